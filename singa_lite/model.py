# SPDX-License-Identifier: Apache-2.0
"""Model: a Layer that knows how to train one batch, and to save and load itself."""

from __future__ import annotations

import io
import json
import os
import tempfile
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from . import autograd
from .config import state
from .errors import CheckpointError, GraphError, OptionError
from .layer.base import Layer
from .opt.base import Optimizer
from .record import RecordInfo, Records
from .tensor import Tensor, to_numpy

# Parts of a checkpoint, a zip file. The first two are SINGA's.
STATES_FILE = "tensor_dict.npz"
ATTRIBUTES_FILE = "states_attr.json"
OPTIMIZER_FILE = "optimizer.npz"
AUX_PREFIX = "aux."


class Model(Layer):
    """Base of a user's model: write ``__init__``, ``forward`` and ``train_one_batch``.

    Calling the model trains one batch in training mode and runs ``forward`` in evaluation mode.

    Example:
        >>> class Regression(Model):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.linear = layer.Linear(1)
        ...         self.loss = layer.MeanSquareError()
        ...     def forward(self, x):
        ...         return self.linear(x)
        ...     def train_one_batch(self, x, y):
        ...         out = self.forward(x)
        ...         loss = self.loss(out, y)
        ...         self.optimizer(loss)
        ...         return out, loss
    """

    def __init__(self) -> None:
        super().__init__()
        self.training = False
        self._is_compiled = False
        self._use_graph = False
        self._records = Records()
        self.optimizer = None

    def set_optimizer(self, optimizer: Optimizer) -> None:
        """Choose what ``self.optimizer(loss)`` calls in ``train_one_batch``; before or after ``compile``."""
        if not isinstance(optimizer, Optimizer):
            raise GraphError(f"set_optimizer: expected an Optimizer, got {type(optimizer).__name__}")
        self.optimizer = optimizer

    @property
    def optimizer(self) -> Any:  # Any: Optimizer, or None before set_optimizer; train_one_batch calls it
        """What ``set_optimizer`` was given."""
        return self._optimizer

    @optimizer.setter
    def optimizer(self, optimizer: Optimizer | None) -> None:
        self._optimizer = optimizer
        self._is_prepared = False  # whether it knows the parameters
        self._records.clear()

    def compile(
        self,
        inputs: Sequence[Tensor],
        is_train: bool = True,
        use_graph: bool = False,
        sequential: bool = False,
    ) -> None:
        """Create all parameters by one forward pass on ``inputs``, and agree on their values with other ranks.

        Args:
            inputs: tensors of the shapes and dtypes to train on; their values do not matter.
            is_train: the mode to start in.
            use_graph: record the step of each combination of shapes, dtypes and options at its first call and
                replay it afterwards (graph.py); ``graph_info`` tells what was recorded.
            sequential: accepted for SINGA scripts; operators always run in order.
        """
        if not isinstance(inputs, (list, tuple)) or not all(isinstance(x, Tensor) for x in inputs):
            raise OptionError("compile: inputs must be a list of Tensors, e.g. model.compile([tx])")
        self._evaluate(*inputs)
        self._is_compiled = True
        self._prepare()
        self.train(is_train)
        self.graph(use_graph, sequential)

    def _prepare(self) -> None:
        if self.optimizer is None or self._is_prepared or not self._is_compiled:
            return
        params = self.get_params()
        buffers = {name: value for name, value in self.get_states().items() if name not in params}
        self.optimizer.prepare(params, buffers)
        self._is_prepared = True

    def graph(self, mode: bool = True, sequential: bool = False) -> None:
        """Switch recording on or off; earlier records are forgotten. ``sequential`` is accepted."""
        self._use_graph = mode
        self._records.clear()

    def graph_info(self) -> list[RecordInfo]:
        """What was recorded: one entry a combination of shapes, dtypes and options."""
        return self._records.info()

    def train(self, mode: bool = True) -> None:
        """Switch to training mode, or with False to evaluation mode; sets ``autograd.training`` of this thread too."""
        self.training = mode
        state.training = mode

    def eval(self) -> None:
        """Switch to evaluation mode. Hides no collective: see ``DistOpt.synchronize``."""
        self.train(False)

    def _evaluate(self, *inputs: Any, **options: Any) -> Any:
        """``forward`` in evaluation, whatever other models of this thread do: no statistics change, none is dropped."""
        training, state.training = state.training, False
        try:
            with autograd.no_grad():
                return self.forward(*inputs, **options)
        finally:
            state.training = training

    def train_one_batch(self, *inputs: Any, **options: Any) -> Any:
        """What a subclass writes: forward, loss, ``self.optimizer(loss)``; returns what the caller wants."""
        raise GraphError(f"{type(self).__name__} defines no train_one_batch")

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        """``train_one_batch`` in training mode, ``forward`` in evaluation mode."""
        if not self.training:
            return self._evaluate(*inputs, **options)
        if not self._is_compiled:
            raise GraphError(f"{type(self).__name__}: call compile([inputs]) before training")
        state.training = True
        self._prepare()
        if not self._use_graph:
            return self.train_one_batch(*inputs, **options)
        return self._records.call(self.train_one_batch, inputs, options, list(self.get_states().values()))

    # ---- checkpoints -------------------------------------------------------------------------------

    def save_states(
        self, fpath: str | os.PathLike[str], aux_states: Mapping[str, Tensor | np.ndarray] | None = None
    ) -> None:
        """Write parameters, buffers, optimizer state and random state to a zip file, atomically.

        Hides no collective: each rank that calls it writes a file, so call it on rank 0, or give every rank a
        path of its own to keep residuals too. An existing file is replaced; SINGA refuses.

        Args:
            fpath: where to.
            aux_states: what else to keep, e.g. {"epoch": np.array(3)}.
        """
        states = {name: to_numpy(value) for name, value in self._compiled_states("save_states").items()}
        aux = {AUX_PREFIX + name: _as_array(value) for name, value in (aux_states or {}).items()}
        attributes: dict[str, Any] = {
            name: {
                "state_type": int(name.startswith(AUX_PREFIX)),
                "shape": value.shape,
                "dtype": str(value.dtype),
            }
            for name, value in {**states, **aux}.items()
        }
        attributes["random_state"] = [list(device.get_random_state()) for device in self._devices()]
        files = {
            STATES_FILE: _npz({**states, **aux}),
            ATTRIBUTES_FILE: json.dumps(attributes, indent=1).encode(),
        }
        if self.optimizer is not None:
            files[OPTIMIZER_FILE] = _npz(self.optimizer.get_states())
        _write_zip(Path(fpath), files)

    def load_states(self, fpath: str | os.PathLike[str]) -> dict[str, np.ndarray]:
        """Read back what ``save_states`` wrote; the optimizer's state too if one is set and was saved.

        Returns:
            The auxiliary states, as numpy arrays.

        Raises:
            CheckpointError: no such file, not a checkpoint, or made by another model.
            GraphError: the model is not compiled yet, so it has no parameters to load into.
        """
        targets = self._compiled_states("load_states")
        self._prepare()
        files = _read_zip(Path(fpath))
        arrays = _arrays(files[STATES_FILE])
        states = {name: value for name, value in arrays.items() if not name.startswith(AUX_PREFIX)}
        missing, unknown = sorted(set(targets) - set(states)), sorted(set(states) - set(targets))
        if missing or unknown:
            raise CheckpointError(f"load_states: {fpath} lacks {missing} and has unknown {unknown}")
        for name, target in targets.items():
            if target.shape != states[name].shape or target.dtype != states[name].dtype:
                raise CheckpointError(
                    f"load_states: {name} in {fpath} is {states[name].dtype}{states[name].shape}, "
                    f"not {target.dtype}{target.shape}"
                )
        random_states = _attributes(files[ATTRIBUTES_FILE]).get("random_state", [])
        if self.optimizer is not None and OPTIMIZER_FILE in files:
            self.optimizer.set_states(_arrays(files[OPTIMIZER_FILE]))  # raises before it changes anything
        self.set_states(states)
        for device, random_state in zip(self._devices(), random_states, strict=False):
            device.set_random_state(random_state)
        return {
            name[len(AUX_PREFIX) :]: value for name, value in arrays.items() if name.startswith(AUX_PREFIX)
        }

    def _compiled_states(self, where: str) -> dict[str, Tensor]:
        if not self._is_compiled:
            raise GraphError(
                f"{where}: {type(self).__name__} has no parameters yet; call compile([inputs]) first"
            )
        return self.get_states()

    def _devices(self) -> list[Any]:
        return list(dict.fromkeys(value.device for value in self.get_states().values()))


def _as_array(value: Tensor | np.ndarray) -> np.ndarray:
    array = to_numpy(value) if isinstance(value, Tensor) else np.asarray(value)
    if array.dtype.hasobject:
        raise CheckpointError(
            f"save_states: a {type(value).__name__} is no array of numbers; keep it elsewhere"
        )
    return array


def _npz(arrays: Mapping[str, np.ndarray]) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)  # type: ignore[arg-type]
    return buffer.getvalue()


def _arrays(content: bytes) -> dict[str, np.ndarray]:
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
            return dict(arrays)
    except (ValueError, OSError, EOFError, KeyError, zipfile.BadZipFile, zlib.error, TypeError) as error:
        raise CheckpointError(f"load_states: the arrays are damaged: {error}") from error


def _attributes(content: bytes) -> dict[str, Any]:
    try:
        return dict(json.loads(content))
    except ValueError as error:
        raise CheckpointError(f"load_states: {ATTRIBUTES_FILE} is damaged: {error}") from error


def _write_zip(path: Path, files: Mapping[str, bytes]) -> None:
    """Write beside the goal and rename, so that a reader never sees half a file."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(handle, "wb") as file, zipfile.ZipFile(file, "w") as archive:
            for name, content in files.items():
                archive.writestr(name, content)
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)  # mkstemp's file is its owner's alone
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _read_zip(path: Path) -> dict[str, bytes]:
    try:
        with zipfile.ZipFile(path) as archive:
            files = {name: archive.read(name) for name in archive.namelist()}
    except (OSError, zipfile.BadZipFile, zlib.error) as error:
        raise CheckpointError(f"load_states: cannot read {path}: {error}") from error
    if STATES_FILE not in files or ATTRIBUTES_FILE not in files:
        raise CheckpointError(f"load_states: {path} holds no {STATES_FILE} and {ATTRIBUTES_FILE}")
    return files
