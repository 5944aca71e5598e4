# SPDX-License-Identifier: Apache-2.0
"""What an optimizer is given, checked: pairs of parameters and gradients, saved states, names of parameters."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ..config import state
from ..dtypes import bfloat16
from ..errors import CheckpointError, DeviceError, DTypeError, OptionError, ShapeError, check_text
from ..graph.recorder import guard
from ..tensor import Tensor

MAX_STEPS = 2**53  # up to which schedules compute with floats that are exact


def check_not_wrapped(where: str, optimizer: object) -> None:
    """Raise OptionError for an optimizer that a DistOpt of several ranks wraps; a recorded step depends on it."""

    def wrapper() -> Any:
        return next((dist for dist in state.dist_opts if dist.opt is optimizer), None)

    if wrapper() is not None:
        gc.collect()  # one that nobody holds any more, but for a cycle, does not count
    if (dist := wrapper()) is not None:
        raise OptionError(
            f"{where}: {optimizer!r} is inside a DistOpt of {dist.world_size} ranks, and with it alone each rank "
            "would train by itself; give the DistOpt"
        )
    guard((id(optimizer), "is wrapped"), lambda: wrapper() is not None)


def check_initialized(optimizer: object) -> None:
    """Raise OptionError for an optimizer whose ``__init__`` does not call that of ``Optimizer``."""
    if "_names" not in vars(optimizer):
        raise OptionError(f"{type(optimizer).__name__}: its __init__ must call super().__init__(lr) first")


def check_arrays(where: str, states: object, kinds: type | tuple[type, ...] = np.ndarray) -> None:
    """Raise CheckpointError unless ``states`` are numpy arrays, or of other ``kinds``, by name."""
    if not isinstance(states, Mapping):
        raise CheckpointError(f"{where}: expected states by name, got {type(states).__name__}")
    for name, value in states.items():
        if not isinstance(name, str) or not isinstance(value, kinds):
            raise CheckpointError(
                f"{where}: state {name!r} must be a numpy array, not {type(value).__name__}"
            )


def check_steps(where: str, steps: np.ndarray[Any, Any]) -> None:
    """Raise CheckpointError unless a saved "step_counter" is one integer from 0 to 2**53."""
    if steps.shape != () or steps.dtype.kind not in "iu" or not 0 <= steps <= MAX_STEPS:
        raise CheckpointError(f"{where}: step_counter must be an int from 0 to {MAX_STEPS}, not {steps}")


def unique_names(params: Iterable[Tensor], called: Mapping[Tensor, str] | None = None) -> dict[Tensor, str]:
    """Return a name for each parameter, in the order given: its own, or "<name>#<k>" where names repeat.

    Args:
        params: the parameters.
        called: names to take instead of their own, which another model of the same layers may have changed since.

    Raises:
        OptionError: a name has lone surrogates, and cannot be sent to other ranks or saved.
    """
    names: dict[Tensor, str] = {}
    counts: dict[str, int] = {}
    taken: set[str] = set()
    for param in params:
        name = check_text("parameter", "name", (called or {}).get(param) or param.name or "unnamed")
        count = counts.get(name, 0)
        while (own := f"{name}#{count}" if count else name) in taken:  # by one that its owner has called so
            count += 1
        counts[name] = count + 1
        names[param] = own
        taken.add(own)
    return names


def as_pairs(optimizer: str, pairs: object) -> list[tuple[Tensor, Tensor]]:
    """Return ``pairs`` as a list; DTypeError unless it consists of (parameter, gradient)."""
    if not isinstance(pairs, Iterable) or isinstance(pairs, (Tensor, np.ndarray)):
        raise DTypeError(f"{optimizer}: expected pairs (parameter, gradient), got {type(pairs).__name__}")
    found = list(pairs)
    for pair in found:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise DTypeError(f"{optimizer}: expected a pair (parameter, gradient), got {type(pair).__name__}")
        for name, value in zip(("parameter", "gradient"), pair, strict=True):
            if not isinstance(value, Tensor):
                raise DTypeError(f"{optimizer}: the {name} must be a Tensor, not {type(value).__name__}")
    return found


def check_pair(optimizer: str, param: Tensor, grad: Tensor) -> None:
    """Raise a typed error unless ``grad`` can update ``param``."""
    param.begin_change(f"{optimizer}: {param.name}")
    if grad.array.shape != param.array.shape:
        raise ShapeError(f"{optimizer}: {param.name} has shape {param.shape}, its gradient {grad.shape}")
    if grad.array.dtype != param.array.dtype:
        raise DTypeError(f"{optimizer}: {param.name} is {param.dtype}, its gradient {grad.dtype}")
    if grad.device is not param.device:
        raise DeviceError(f"{optimizer}: {param.name} is on {param.device}, its gradient on {grad.device}")
    if param.dtype == bfloat16:
        raise DTypeError(
            f"{optimizer}: {param.name} is bfloat16; keep parameters in float32, of which autocast rounds copies "
            "(docs/precision.md)"
        )
    if param.dtype.kind != "f":
        raise DTypeError(f"{optimizer}: {param.name} is {param.dtype}; only float parameters can be updated")
