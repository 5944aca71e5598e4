# SPDX-License-Identifier: Apache-2.0
"""The seam to native/kernels: a call goes there first, and to numpy where it is not taken.

Note [taking a call]: a function of the compiled module ``_kernels`` has the name and form of a kernel. It computes
and returns True, or returns False having done nothing: another dtype than float32, a strided array, a shape
it has no code for. So the numpy path is whole, the reference of every kernel, and all there is where
nothing was compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..._native import load
from ...graph import KernelCall
from ..base import KERNELS, Array, Backend, Call
from ..layout import lay_out
from .fuse import fuse, is_float32


class NativeKernels(Backend):
    """Placed before a backend that has every kernel; takes what the compiled module can compute."""

    def __init__(self) -> None:
        module, _ = load("_kernels")
        self._takes: dict[str, Callable[..., bool]] = {
            kernel: getattr(module, kernel) for kernel in KERNELS if hasattr(module, kernel)
        }
        self._give_back = getattr(module, "give_back", None)
        self._make_plan = getattr(module, "Plan", None)
        self._conv_blocks = getattr(module, "conv_blocks", None)  # only with oneDNN
        self._empty = getattr(module, "empty", None)

    def empty(self, shape: Sequence[int], dtype: Any) -> Array:
        return super().empty(shape, dtype) if self._empty is None else self._empty(shape, dtype)  # type: ignore[safe-super]

    def execute(
        self,
        kernel: str,
        inputs: tuple[Array, ...],
        out: Array | tuple[Array, ...],
        attributes: dict[str, Any],
    ) -> None:
        take = self._takes.get(kernel)
        if take is None or not take(*inputs, out=out, **attributes):  # see Note [taking a call]
            super().execute(kernel, inputs, out, attributes)

    def give_back(self) -> None:
        if self._give_back is not None:
            self._give_back()

    def lower(self, calls: list[Call]) -> list[Call]:
        return calls if self._conv_blocks is None else lay_out(fuse(calls), self._conv_blocks, is_float32)

    def bake(self, calls: list[Call]) -> list[Callable[[], None]]:
        if self._make_plan is None:
            return super().bake(calls)
        baked: list[Callable[[], None]] = []
        for call in calls:
            segment = baked[-1] if baked and isinstance(baked[-1], Segment) else Segment(self._make_plan())
            if not segment.take(call, self._takes):
                baked.append(call)
            elif segment.calls == [call]:
                baked.append(segment)
        return baked


class Segment:
    """Compiled kernels of a recorded step that follow each other: one call from Python runs them all.

    Attributes:
        calls: what the plan holds; a kernel that refuses the values it meets is run by the backend instead.
    """

    def __init__(self, plan: Any) -> None:
        self._plan = plan
        self.calls: list[KernelCall] = []

    def take(self, call: Call, takes: dict[str, Callable[..., bool]]) -> bool:
        """Add ``call``, if it is a compiled kernel whose attributes never change."""
        if not isinstance(call, KernelCall) or call.random is not None or call.kernel not in takes:
            return False
        taken = self._plan.record(takes[call.kernel], call.inputs, {"out": call.out, **call.attributes})
        if taken:
            self.calls.append(call)
        return bool(taken)

    def __call__(self) -> None:
        done = self._plan.run()
        while done < len(self.calls):
            self.calls[done]()
            done = self._plan.run(done + 1)
