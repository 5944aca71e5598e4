# SPDX-License-Identifier: Apache-2.0
"""cuDNN, through ``_cudnn``: what the families of kernels that call it share.

What lives here: the library, a device's handle, plans that are cached, alignment. What does not: cuDNN's calls
(native/cuda/), and which plan a kernel needs (conv.py, norm.py, recurrent.py).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from functools import cached_property
from typing import Any

from ... import _native
from ...errors import DeviceError
from ..base import Array
from .launch import Launcher

DTYPES = {"f": 0, "d": 1, "e": 2, "E": 9}  # cuDNN's numbers
ALIGNMENT = 16  # bytes; the kernels for 16 bits load that much at once
MOST_PLANS = 4096  # a few KB each; the oldest goes first


def open_cudnn() -> tuple[Any, Any]:
    """Return the compiled module and a handle of cuDNN 9; DeviceError with the cure where these cannot be had."""
    module, reason = _native.load("_cudnn")
    if module is None:
        raise DeviceError(f"cuDNN is called by the compiled module _cudnn: {reason}")
    names = _native.library_names("SINGA_LITE_CUDNN_LIB", "nvidia.cudnn", "libcudnn.so.9")
    try:
        library = module.Cudnn(names)
    except DeviceError as error:
        raise DeviceError(
            f"{error}; install nvidia-cudnn-cu12 or nvidia-cudnn-cu13 to match the CUDA of cupy, or name the "
            "library in SINGA_LITE_CUDNN_LIB"
        ) from None
    return module, module.Handle(library)


def is_aligned(x: Array) -> bool:
    """Return whether ``x`` has the alignment of cuDNN's fastest kernels."""
    return bool(x.data.ptr % ALIGNMENT == 0)


def check_sizes(kernel: str, *arrays: Array) -> None:
    """Raise a DeviceError where cuDNN does not take arrays of so many elements."""
    if (largest := max(x.size for x in arrays)) >= 2**31:
        raise DeviceError(
            f"{kernel}: cuDNN takes arrays of fewer than 2^31 elements, not {largest}; use a smaller batch"
        )


def addresses(arrays: Iterable[Array | None], count: int = 0) -> list[int]:
    """Return where arrays are as the compiled module takes it, ``count`` of them at least: 0 for what is missing."""
    found = [0 if array is None else int(array.data.ptr) for array in arrays]
    return found + [0] * (count - len(found))


class CudnnCaller(Launcher):
    """A backend that calls cuDNN."""

    @cached_property
    def _cudnn(self) -> tuple[Any, Any]:
        """The compiled module and this device's handle."""
        return open_cudnn()

    @cached_property
    def _plans(self) -> dict[Hashable, Any]:
        return {}

    def _plan(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return what ``make`` gave when ``key`` came first."""
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = make()
            if len(self._plans) > MOST_PLANS:
                del self._plans[next(iter(self._plans))]
        return plan

    def _new_plan(self, family: str, *arguments: Any) -> Any:
        """Make an object of the class ``family`` of the compiled module, on this device's handle."""
        module, handle = self._cudnn
        return getattr(module, family)(handle, *arguments)

    def _aligned(self, x: Array) -> Array:
        """``x``, or an aligned copy."""
        if is_aligned(x):
            return x
        copy = self.empty(x.shape, x.dtype)
        self.find("copy")(x, out=copy)
        return copy

    def _target(self, out: Array) -> Array:
        """Return where the result for ``out`` is computed: ``out``, or an aligned array."""
        return out if is_aligned(out) else self.empty(out.shape, out.dtype)

    def _deliver(self, target: Array, out: Array) -> None:
        """Bring what was computed in ``target`` to ``out``."""
        if target is not out:
            self.find("copy")(target, out=out)
