# SPDX-License-Identifier: Apache-2.0
"""Optimizer steps of all parameters in one launch: the updates of updates.h."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..base import Array
from ..formulas import UPDATES, Update
from .launch import THREADS, Launcher, by_value

MAX_ITEMS, MAX_NUMBERS, PIECE_ELEMENTS = 80, 8, 2048  # of update.cu


class UpdateKernels(Launcher):
    """A method for each of UPDATES; every number may change from step to step, see Note [scalars] in launch.py."""

    def update(
        self, name: str, grads: tuple[Array, ...], out: Array | tuple[Array, ...], numbers: tuple[Any, ...]
    ) -> None:
        """Start ``name`` for as many tensors at a time as its arguments hold; one given twice, one after the other."""
        out = out if isinstance(out, tuple) else (out,)
        count = len(grads)
        UPDATES[name].check_count(count, len(out))
        packed = b"".join(self.scalar(number).tobytes() for number in numbers)
        given = np.frombuffer(packed.ljust(16 * MAX_NUMBERS, b"\0"), f"V{16 * MAX_NUMBERS}")
        types, items, blocks = grads[0].dtype.char, [0], 0
        seen: set[int] = set()
        for index, grad in enumerate(grads):
            addresses = [array.data.ptr for array in out[index::count]]
            if blocks and (addresses[0] in seen or len(seen) == MAX_ITEMS):
                self.launch(f"update.{name}", types, blocks, THREADS, _packed(items), given)
                items, blocks = [0], 0
                seen.clear()
            if grad.size:
                items += grad.data.ptr, *addresses, *(0,) * (3 - len(addresses)), grad.size, blocks
                blocks -= -grad.size // PIECE_ELEMENTS
                seen.add(addresses[0])
        if blocks:
            self.launch(f"update.{name}", types, blocks, THREADS, _packed(items), given)


def _packed(items: list[int]) -> Any:
    items[0] = len(items) // 6
    return by_value(items, 8 * (1 + 6 * MAX_ITEMS))


def _kernel_of(update: Update) -> Callable[..., None]:
    def kernel(
        self: UpdateKernels,
        *grads: Array,
        out: Array | tuple[Array, ...],
        weight_decay: float = 0.0,
        **numbers: float,
    ) -> None:
        values = (numbers[name] for name in update.numbers)
        self.update(update.name, grads, out, (weight_decay, *values))

    kernel.__name__, kernel.__doc__ = update.name, update.signature
    return kernel


for _update in UPDATES.values():
    setattr(UpdateKernels, _update.name, _kernel_of(_update))
