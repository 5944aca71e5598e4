# SPDX-License-Identifier: Apache-2.0
"""Model: a Layer that knows how to train one batch, and to save and load itself."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from inspect import signature
from typing import TYPE_CHECKING, Any

import numpy as np

from . import autograd
from .autograd.autocast import autocast_like, check_precision, precision_of
from .config import state, this_thread
from .device import Device
from .errors import CheckpointError, GraphError, OptionError, check_bool
from .graph.clock import abandon_step, begin_step
from .layer.base import Layer, layers_of, unchanged_by_errors
from .opt.base import Optimizer
from .opt.checks import check_arrays, check_not_wrapped
from .opt.overrides import runs_later
from .record.record import RecordInfo
from .record.records import Records
from .tensor import Tensor, to_numpy
from .tensor.pytree import leaves
from .tensor.tracked import is_recorded_now
from .users_line import warn

if TYPE_CHECKING:
    from .model_file import Checkpoint

EVALUATES = (
    "{0} is in evaluation mode, where a call of the model records nothing: what its input was computed from gets no "
    "gradient through it. Call its forward(), or if that is meant clone() the input"
)


class Model(Layer):
    """Base of a user's model: write ``__init__``, ``forward`` and ``train_one_batch``.

    Calling the model trains one batch in training mode and runs ``forward`` in evaluation mode. In the step of
    another model, one that was never compiled or put into a mode is a layer like others, and its ``forward`` trains.

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
        self._has_mode = False  # whether train, eval or compile has chosen one
        self._is_compiled = False
        self._use_graph = False
        self._precision = "fp32"
        self._records = Records(self)
        self.optimizer = None

    def __getattr__(self, name: str) -> Any:  # only called when there is no such attribute
        if "_records" not in vars(self):
            raise AttributeError(
                f"{type(self).__name__} has no attribute {name!r}: its __init__ must call super().__init__() first"
            )
        return super().__getattr__(name)

    def set_optimizer(self, optimizer: Optimizer) -> None:
        """Choose what ``self.optimizer(loss)`` calls in ``train_one_batch``; before or after ``compile``.

        Raises:
            GraphError: it is no Optimizer. OptionError: a DistOpt of several ranks wraps it.
        """
        if optimizer is None:
            raise GraphError("set_optimizer: expected an Optimizer, got NoneType")
        self.optimizer = optimizer

    @property
    def optimizer(self) -> Any:  # Any: Optimizer, or None before set_optimizer; train_one_batch calls it
        """What ``set_optimizer`` was given."""
        return self._optimizer

    @optimizer.setter
    def optimizer(self, optimizer: Optimizer | None) -> None:
        if optimizer is not None:
            if not isinstance(optimizer, Optimizer):
                raise GraphError(f"set_optimizer: expected an Optimizer, got {type(optimizer).__name__}")
            check_not_wrapped("set_optimizer", optimizer)
        self._optimizer = optimizer
        # id() of the parameters that the optimizer knows; None: it was given none
        self._prepared: frozenset[int] | None = None
        self._records.clear()

    def compile(
        self,
        inputs: Sequence[Any],  # Any: what forward takes
        is_train: bool = True,
        use_graph: bool = False,
        sequential: bool = False,
        precision: str = "fp32",
    ) -> None:
        """Create all parameters by one forward pass on ``inputs``, and agree on their values with other ranks.

        If that pass raises, no layer has parameters that it did not have before.

        Args:
            inputs: tensors of the shapes and dtypes to train on, or lists, tuples and dicts of them where ``forward``
                takes such; their values do not matter.
            is_train: the mode to start in.
            use_graph: record the step of each combination of shapes, dtypes and options at its first call and
                replay it afterwards (record/); ``graph_info`` lists what was recorded. The text "True" is True, as
                SINGA's examples give it.
            sequential: accepted for SINGA scripts; operators always run in order.
            precision: "bf16", or "fp16" on GPUs, has calls of the model run ``train_one_batch`` and ``forward`` under
                ``autograd.autocast``, which calling these by hand does not: products, convolutions and attention
                compute in 16 bits, parameters and what the optimizer keeps stay float32. "fp16" takes
                ``DistOpt(check_finite="skip")``, which scales the loss.

        Raises:
            OptionError: an argument is not what it should be, another ``precision``, or ``forward`` does not take so
                many inputs. Nothing has changed then.
            DeviceError: ``precision`` is not there on the device of an input; nor has anything changed then.
            GraphError: layers were replaced after steps of the optimizer, which keeps states of their parameters.
            CommError: with a DistOpt, ranks have other parameters or optimizers, or a peer is gone or late.
        """
        if not isinstance(inputs, (list, tuple)) or not all(map(leaves, inputs)):
            raise OptionError("compile: inputs must be a list of Tensors, e.g. model.compile([tx])")
        try:
            signature(self.forward).bind(*inputs)
        except TypeError as error:
            raise OptionError(
                f"compile: {type(self).__name__}.forward does not take these {len(inputs)} inputs: {error}"
            ) from None
        check_bool("compile", "is_train", is_train)
        use_graph = check_bool("compile", "use_graph", _flag(use_graph))
        precision = check_precision("compile", precision, (x.device for x in leaves(inputs)))
        before, self._precision = self._precision, precision
        try:
            with unchanged_by_errors(each for _, each in layers_of(self) if not each._is_initialized):
                self._evaluate(*inputs)
                self._check_prepared()
        except BaseException:
            self._precision = before
            raise
        self._name_parameters()
        self._prepare()
        self._is_compiled = True
        self.train(is_train)
        self.graph(use_graph, sequential)

    def _name_parameters(self) -> None:
        for name, param in self.get_params().items():  # as an optimizer does that is set later or never
            param.name = name

    def _name_parameters_of(self, layer: Layer) -> None:
        """Give the parameters that a layer has made in a call of this model, if compiled, their paths as names."""
        if self._is_compiled:
            own = {id(value) for value in vars(layer).values()}
            for name, param in self.get_params().items():
                if id(param) in own:
                    param.name = name

    def _prepare(self) -> None:
        """Give the parameters to the optimizer, if it has none."""
        if self._prepared is not None or self._optimizer is None:
            return
        params = self.get_params()
        buffers = {name: value for name, value in self.get_states().items() if name not in params}
        self._optimizer.prepare(params, buffers)
        self._prepared = frozenset(map(id, params.values()))

    def _check_prepared(self) -> None:
        """Prepare the optimizer again for other parameters; GraphError if it has updated some that are gone."""
        if self._prepared is None:
            return
        now = frozenset(map(id, self.get_params().values()))
        if self._prepared - now and self.optimizer.step_counter:
            raise GraphError(
                f"compile: {type(self).__name__} has lost parameters that its optimizer keeps states of; call "
                "set_optimizer with a new one after replacing layers"
            )
        self._prepared = now if now == self._prepared else None

    def graph(self, mode: bool = True, sequential: bool = False) -> None:
        """Switch recording on or off; earlier records are forgotten. ``sequential`` is accepted."""
        self._use_graph = check_bool("graph", "mode", mode)
        self._records.clear()

    def graph_info(self) -> list[RecordInfo]:
        """Return one entry for each record, and one for each kind of call that runs eagerly, with the reason."""
        return self._records.info()

    def train(self, mode: bool = True) -> None:
        """Switch to training mode, or with False to evaluation mode; sets ``autograd.training`` of this thread too."""
        self.training = this_thread.training = check_bool("train", "mode", mode)
        self._has_mode = True

    def eval(self) -> None:
        """Switch to evaluation mode. Hides no collective: see ``DistOpt.synchronize``."""
        self.train(False)

    def _evaluate(self, *inputs: Any, **options: Any) -> Any:
        """``forward`` in evaluation, whatever other models of this thread do: no statistics change, none is dropped."""
        training, this_thread.training = this_thread.training, False
        called, this_thread.called = this_thread.called, self
        try:
            with autograd.no_grad(), autocast_like(self._precision):
                return self.forward(*inputs, **options)
        finally:
            this_thread.training, this_thread.called = training, called

    def train_one_batch(self, *inputs: Any, **options: Any) -> Any:
        """Run forward, loss, ``self.optimizer(loss)``; a subclass writes it, and returns what its caller uses."""
        raise GraphError(f"{type(self).__name__} defines no train_one_batch")

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        """``train_one_batch`` in training mode, ``forward`` in evaluation mode.

        A model that was not compiled makes its parameters in its first training step, which runs eagerly; they are
        named as the step's backward pass begins.

        Raises:
            GraphError: a model that is neither compiled nor in a mode has an optimizer; or one that was not compiled is
                to train within another's step or ``compile``, with a DistOpt of several ranks, or with order="fixed".
        """
        if not self.training:
            is_layer = this_thread.model is not None and not self._has_mode
            means_to_train = self._optimizer is not None and this_thread.recording and not self._is_compiled
            if means_to_train and not (is_layer or self._has_mode):
                needs_ranks = any(dist is self._optimizer for dist in state.dist_opts)
                raise GraphError(
                    f"{type(self).__name__}: call compile([inputs]) {'' if needs_ranks else 'or train() '}before "
                    "training, or eval() to evaluate"
                )
            if is_layer:
                return self.forward(*inputs, **options)
            is_recording = this_thread.training and this_thread.recording
            if is_recording and any(map(is_recorded_now, leaves((inputs, options)))):
                warn(EVALUATES.format(type(self).__name__))
            return self._evaluate(*inputs, **options)
        if this_thread.model is self:
            raise GraphError(
                f"{type(self).__name__}: its step calls the model, which would train it; call forward"
            )
        if not self._is_compiled:
            self._check_may_train()
        begin_step()
        this_thread.training = True
        try:
            if not self._is_compiled:
                return self._run_first(*inputs, **options)
            self._prepare()
            place = Optimizer.place
            if self._optimizer is not None and self._optimizer.places_streams:
                self._optimizer.place_streams()
                place = self._optimizer.place
            if not self._use_graph:
                return self.run_train_one_batch(*inputs, **options)
            if self._records.owner() is not self:  # they are of the model that this is a copy of
                self._records = Records(self)
            return self._records.call(self, inputs, options, precision_of(self._precision), *place)
        except BaseException:
            abandon_step()
            raise

    def _check_may_train(self) -> None:
        """Raise GraphError where a model that was not compiled cannot train."""
        is_fixed = self._optimizer is not None and self._optimizer.places_streams
        if is_fixed or any(dist is self._optimizer for dist in state.dist_opts):
            raise GraphError(
                f"{type(self).__name__}: call compile([inputs]) before training with this DistOpt, which has all ranks "
                "begin alike there"
            )
        if this_thread.model is not None or not this_thread.recording:
            raise GraphError(
                f"{type(self).__name__}: call compile([inputs]) before training it within another model or no_grad()"
            )

    def _run_first(self, *inputs: Any, **options: Any) -> Any:
        """Run the step of a model that was not compiled."""

        def begin_backward() -> None:  # of several in the step, a later one may have other layers behind it
            if self._prepared != frozenset(map(id, self.get_params().values())):
                self._prepared = None
            self._name_parameters()
            self._prepare()

        before, this_thread.before_backward = this_thread.before_backward, begin_backward
        try:
            results = self.run_train_one_batch(*inputs, **options)
        finally:
            this_thread.before_backward = before
        begin_backward()
        self._is_compiled = True
        return results

    def run_train_one_batch(self, *inputs: Any, **options: Any) -> Any:
        """Run ``train_one_batch`` in the model's precision, unrecorded; what records of steps run, too."""
        if runs_later(self.train_one_batch):
            raise GraphError(
                f"{type(self).__name__}: train_one_batch is a generator or a coroutine, which would run after the "
                "step; write it without yield and async"
            )
        outer, this_thread.model = this_thread.model, self
        called, this_thread.called = this_thread.called, self
        try:
            with autocast_like(self._precision):
                return self.train_one_batch(*inputs, **options)
        except (AttributeError, TypeError) as error:
            if self._optimizer is None and "'NoneType' object" in str(error):
                raise GraphError(
                    f"{type(self).__name__}: {error}; call set_optimizer before training"
                ) from error
            raise
        finally:
            this_thread.model, this_thread.called = outer, called

    # ---- checkpoints -------------------------------------------------------------------------------

    def save_states(
        self, fpath: str | os.PathLike[str], aux_states: Mapping[str, Tensor | np.ndarray] | None = None
    ) -> None:
        """Write parameters, buffers, optimizer state and random state to a file, atomically.

        The next step of each recorded kind runs eagerly, as in a run that loads the file, where it is recorded: both
        continue with the same bits.

        Hides no collective: each rank that calls it writes a file, so call it on rank 0, or give every rank a
        path of its own to keep residuals, and in recorded bfloat16 the bits, too. An existing file is replaced; SINGA
        raises.

        Args:
            fpath: where to.
            aux_states: what else to keep, e.g. {"epoch": np.array(3)}.

        Raises:
            CheckpointError: ``fpath`` is a folder or a device, the system cannot write, or a value of
                ``aux_states`` or of the optimizer's ``get_states`` is not an array, or is an array of Python objects.
                An existing file is as it was.
            GraphError: the model is not compiled yet, so it has no parameters to save.
        """
        from .model_file import write_checkpoint  # Note [imports]

        if not (
            aux_states is None
            or (isinstance(aux_states, Mapping) and all(isinstance(key, str) for key in aux_states))
        ):
            raise CheckpointError(f"save_states: aux_states must be arrays by name, not {aux_states!r}")
        if masked := [name for name, value in (aux_states or {}).items() if np.ma.is_masked(value)]:
            raise CheckpointError(
                f"save_states: aux_states: {masked[0]} has masked values; give them a value, such as by filled(0)"
            )
        try:
            aux = {
                name: to_numpy(value) if isinstance(value, Tensor) else np.asarray(value)
                for name, value in (aux_states or {}).items()
            }
        except ValueError as error:  # a list of lists of other lengths
            raise CheckpointError(f"save_states: expected arrays in aux_states: {error}") from None
        write_checkpoint(fpath, replace(self.snapshot("save_states"), aux=aux))

    def load_states(self, fpath: str | os.PathLike[str]) -> dict[str, np.ndarray]:
        """Read back what ``save_states`` wrote; the optimizer's state too if one is set and was saved.

        The whole file is read and checked before anything changes. Random states go to the devices in the order
        of the states; those of more devices than the model has are left out. Recorded steps are forgotten. With a
        DistOpt the ranks compare what they have loaded at the next step.

        Returns:
            The auxiliary states, as numpy arrays.

        Raises:
            CheckpointError: no such file, not a checkpoint, damaged, made by another model, or by an optimizer with
                other states (AdamW takes those of Adam); nothing was changed.
            GraphError: the model is not compiled yet, so it has no parameters to load into.
        """
        from .model_file import read_checkpoint  # Note [imports]

        targets = self._compiled_states("load_states")
        self._prepare()
        known = None if self._optimizer is None else self._optimizer.get_states()
        loaded = read_checkpoint(fpath, targets, known)
        self.restore(loaded, f"load_states: {fpath}")
        return loaded.aux

    def snapshot(self, where: str = "snapshot") -> Checkpoint:
        """Return copies of parameters, buffers, optimizer state and random state.

        The next step of each recorded kind runs eagerly, see ``save_states``.

        Args:
            where: whose name errors begin with.

        Raises:
            GraphError: the model is not compiled yet.
        """
        from .model_file import Checkpoint  # Note [imports]

        states = {name: to_numpy(value) for name, value in self._compiled_states(where).items()}
        random_states = [device.get_random_state() for device in self.devices()]
        optimizer = None if self._optimizer is None else self._optimizer.get_states()
        if self._optimizer is not None:
            name = f"{where}: get_states of {type(self._optimizer).__name__}"
            check_arrays(name, optimizer, (np.ndarray, np.generic))
        shape = self._optimizer.unnamed() if isinstance(self._optimizer, Optimizer) else None
        if shape is not None:
            warn(
                f"{where}: the optimizer updates a parameter of shape {shape} that {type(self).__name__} did not have "
                "when it was compiled or first trained: a checkpoint lacks it, or another process refuses that. Keep "
                "layers in attributes, and compile again after adding some"
            )
        for records in self._all_records():
            records.postpone()
        return Checkpoint(states, {}, random_states, optimizer)

    def restore(self, checkpoint: Checkpoint, where: str = "restore") -> None:
        """Continue from what ``snapshot`` gave; recorded steps are forgotten.

        Args:
            checkpoint: of a model and an optimizer like these; without an optimizer's states that stays as it is.
            where: whose name errors begin with.

        Raises:
            CheckpointError: it is another model's or optimizer's; nothing was changed.
            GraphError: the model is not compiled yet.
        """
        from .model_file import Checkpoint  # Note [imports]

        if not isinstance(checkpoint, Checkpoint):
            raise CheckpointError(f"{where}: expected what snapshot() gives, got {type(checkpoint).__name__}")
        targets = self._compiled_states(where)
        self._prepare()
        for name in {**targets, **checkpoint.states}:
            mine, theirs = targets.get(name), checkpoint.states.get(name)
            if mine is None or theirs is None or (mine.shape, mine.dtype) != (theirs.shape, theirs.dtype):
                has = [
                    f"{each.dtype}{each.shape}" if each is not None else "missing" for each in (theirs, mine)
                ]
                raise CheckpointError(
                    f"{where}: {name!r} is {has[0]} in the checkpoint, but {has[1]} in the model"
                )
        if checkpoint.optimizer is not None:
            if self._optimizer is None:
                raise CheckpointError(
                    f"{where}: the checkpoint has an optimizer's states, but the model no optimizer; call set_optimizer"
                )
            try:
                self.optimizer.set_states(checkpoint.optimizer)  # all or nothing, and the last that can fail
            except (AttributeError, LookupError, TypeError, ValueError) as error:
                raise CheckpointError(
                    f"{where}: the optimizer cannot go on from its part: {error}"
                ) from error
        self.set_states(checkpoint.states)
        for device, random_state in zip(self.devices(), checkpoint.random_states, strict=False):
            device.set_random_state(random_state)
        if self._optimizer is not None:
            self._optimizer.states_loaded()
        for records in self._all_records():
            records.clear()

    def _all_records(self) -> list[Records]:
        """Return the records of this model and of those among its layers."""
        return [layer._records for _, layer in layers_of(self) if isinstance(layer, Model)]

    def check_compiled(self, where: str) -> None:
        """Raise GraphError, with the caller ``where``, if the model is not compiled yet."""
        if not self._is_compiled:
            raise GraphError(
                f"{where}: {type(self).__name__} has no parameters yet; call compile([inputs]) first"
            )

    def _compiled_states(self, where: str) -> dict[str, Tensor]:
        self.check_compiled(where)
        return self.get_states()

    def devices(self) -> list[Device]:
        """Return the devices of parameters and buffers, in their order."""
        return list(dict.fromkeys(value.device for value in self.get_states().values()))


def _flag(value: object) -> object:
    """Return the bool that the text "True" or "False" says; anything else as it is."""
    return value == "True" if isinstance(value, str) and value in ("True", "False") else value
