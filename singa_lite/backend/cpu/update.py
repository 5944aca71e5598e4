# SPDX-License-Identifier: Apache-2.0
"""Optimizer steps, in place on parameter and state: the updates of updates.h."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from ...errors import ShapeError
from ..base import Array
from ..formulas import UPDATES, Update
from ._accumulation import store, upcast
from .functions import FUNCTIONS


class UpdateKernels:
    """A method for each of UPDATES."""


def _kernel_of(update: Update) -> Callable[..., None]:
    """Return the kernel that evaluates ``update``."""
    names = ", ".join(("g", "p", *(state for state, _ in update.states), *update.numbers))
    values = [
        eval(f"lambda {names}: {text}", dict(FUNCTIONS))
        for text in (*(text for _, text in update.states), update.value)
    ]

    def kernel(
        self: UpdateKernels,
        *grads: Array,
        out: Array | tuple[Array, ...],
        weight_decay: float = 0.0,
        rounded: tuple[int, ...] = (),
        **numbers: float,
    ) -> None:
        arrays = out if isinstance(out, tuple) else (out,)
        end = len(arrays) - len(rounded)
        _check_copies(update.name, rounded, arrays[: len(grads)], arrays[end:])
        for grad, param, *states in _by_tensor(update, grads, arrays[:end]):
            p = upcast(param)
            g = upcast(grad) + weight_decay * p if weight_decay else upcast(grad)
            # as compiled ones have them, so that what is computed of numbers alone has the same bits
            exact = {name: p.dtype.type(number) for name, number in numbers.items()}
            for value, target in zip(values, (*states, param), strict=True):
                store(target, value(g, p, *map(upcast, states), **exact))
        for number, copy in zip(rounded, arrays[end:], strict=True):
            store(copy, arrays[number])

    kernel.__name__, kernel.__doc__ = update.name, update.signature
    return kernel


def _check_copies(
    name: str, numbers: tuple[int, ...], params: tuple[Array, ...], copies: tuple[Array, ...]
) -> None:
    """Raise a ShapeError unless each number is of a parameter, once, which its copy is like and apart from."""
    is_known = len(set(numbers)) == len(numbers) and all(number in range(len(params)) for number in numbers)
    if not is_known or any(c.shape != params[n].shape for n, c in zip(numbers, copies, strict=True)):
        raise ShapeError(f"{name}: rounded = {numbers} names no parameters of the copies' shapes")
    if any(np.may_share_memory(param, copy) for param in params for copy in copies):
        raise ShapeError(f"{name}: a copy shares memory with a parameter")


def _by_tensor(
    update: Update, grads: tuple[Array, ...], out: tuple[Array, ...]
) -> Iterator[tuple[Array, ...]]:
    """Return (grad, param, state, ...) of each tensor; ``out`` holds all params, then all of each state."""
    count = len(grads)
    update.check_count(count, len(out))
    return zip(grads, *(out[start : start + count] for start in range(0, len(out), count)), strict=True)


for _update in UPDATES.values():
    setattr(UpdateKernels, _update.name, _kernel_of(_update))
