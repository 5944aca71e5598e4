# SPDX-License-Identifier: Apache-2.0
"""Optimizer steps of all parameters in one launch, in update.cu; the formulas are those of ../cpu/update.py."""

from __future__ import annotations

from typing import Any

from ...errors import ShapeError
from ..base import Array
from .launch import THREADS, Launcher, by_value

MAX_ITEMS, PIECE_ELEMENTS = 80, 2048  # of Items in update.cu


class UpdateKernels(Launcher):
    """sgd_update and adam_update; every number may change from step to step, see Note [scalars] in launch.py."""

    def sgd_update(
        self,
        *grads: Array,
        out: Array | tuple[Array, ...],
        lr: float,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
    ) -> None:
        numbers = map(self.scalar, map(float, (lr, momentum, dampening, weight_decay)))
        self._update("update.sgd_update", grads, out, *numbers, int(nesterov))

    def adam_update(
        self,
        *grads: Array,
        out: tuple[Array, ...],
        lr: float,
        beta_1: float,
        beta_2: float,
        eps: float,
        step: int,
        weight_decay: float = 0.0,
    ) -> None:
        numbers = map(self.scalar, (lr / (1 - beta_1**step), 1 / (1 - beta_2**step), float(weight_decay)))
        self._update("update.adam_update", grads, out, *numbers, float(beta_1), float(beta_2), float(eps))

    def _update(
        self, name: str, grads: tuple[Array, ...], out: Array | tuple[Array, ...], *arguments: Any
    ) -> None:
        """Start ``name`` for as many tensors at a time as its arguments hold; one given twice, one after the other."""
        out = out if isinstance(out, tuple) else (out,)
        count = len(grads)
        if count == 0 or len(out) % count:
            raise ShapeError(f"an update of {count} gradients cannot write {len(out)} arrays")
        types, items, blocks = grads[0].dtype.char, [0], 0
        seen: set[int] = set()
        for place, grad in enumerate(grads):
            addresses = [array.data.ptr for array in out[place::count]]
            if blocks and (addresses[0] in seen or len(seen) == MAX_ITEMS):
                self.launch(name, types, blocks, THREADS, _packed(items), *arguments)
                items, blocks = [0], 0
                seen.clear()
            if grad.size:
                items += grad.data.ptr, *addresses, *(0,) * (3 - len(addresses)), grad.size, blocks
                blocks -= -grad.size // PIECE_ELEMENTS
                seen.add(addresses[0])
        if blocks:
            self.launch(name, types, blocks, THREADS, _packed(items), *arguments)


def _packed(items: list[int]) -> Any:
    items[0] = len(items) // 6
    return by_value(items, 8 * (1 + 6 * MAX_ITEMS))
