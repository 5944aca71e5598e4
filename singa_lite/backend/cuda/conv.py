# SPDX-License-Identifier: Apache-2.0
"""Convolutions by cuDNN, and those that are products by cuBLAS.

What lives here: which plan a call uses, its workspace, and the cases cuDNN doesn't take. What does not: cuDNN's
calls and the choice of an algorithm (native/cuda/convolution.h).

Note [products]: a convolution by filters of one pixel multiplies an image with channels last, as a matrix of pixels, by
the filters; its gradients are products too. In float32 without tensor cores cuBLAS makes them sooner than cuDNN's
algorithms of fixed order do, so a recorded step has channels last where such a convolution stands.

Note [plans]: a plan is made once for every direction, dtype, shape and option, and cached. Its algorithm is the
fastest of those timed on the call's own arrays, deterministic ones first. Nothing can be timed while the stream is
captured into a CUDA graph: then, and where ``device.benchmark_convolutions`` is off, cuDNN's own expectation is taken.
Two processes may find different algorithms the fastest, and so differ in the last bits; without timing they don't.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import cached_property, partial
from typing import Any

import cupy

from ...config import state
from ...dtypes import is_narrow
from ...errors import DeviceError
from ...graph.memory import View
from ..base import Array
from .cudnn import DTYPES, CudnnCaller, addresses, check_sizes, is_aligned

Pair = tuple[int, int]

FORWARD, BACKWARD_DATA, BACKWARD_WEIGHT = range(3)
ORDERS = ((0, 1, 2), (1, 2, 0), (0, 2, 1))  # of x, w and y as cuDNN takes them: two inputs, then the result
PLAIN = (1, 1)
TENSOR_CORE = 8  # channels

# Of scratch memory while algorithms are timed, the first that can be had. Only what the chosen ones need is kept.
WORKSPACE_BYTES = (1 << 30, 256 << 20, 32 << 20)


class ConvKernels(CudnnCaller):
    """conv2d and its two gradients. Sums in float32 or wider; TF32 with ``device.allow_tf32``.

    cuDNN has no arrays of two dtypes: beside images of 16 bits float32 weights are cast at each call, a float32 bias is
    added by a kernel of our own, its gradient summed by one, and a float32 gradient of w is cast from that of 16 bits.
    """

    def conv2d(self, x: Array, w: Array, b: Array | None = None, *, out: Array, **options: Any) -> None:
        if not out.size:
            return
        own = b if b is None or b.dtype == out.dtype else None
        self._convolve(FORWARD, x, self.converted(w, x.dtype), out, own, **options)
        if b is not None and own is None:
            self.find("add")(out, b.reshape(-1, 1, 1), out=out)

    def conv2d_backward_data(self, dy: Array, w: Array, *, out: Array, **options: Any) -> None:
        if out.size:
            self._convolve(BACKWARD_DATA, out, self.converted(w, dy.dtype), dy, None, **options)

    def conv2d_backward_weight(
        self, dy: Array, x: Array, *, out: Array | tuple[Array, Array], **options: Any
    ) -> None:
        dw, db = out if isinstance(out, tuple) else (out, None)
        if not dy.size:  # of an empty batch
            for gradient in (dw, db):
                if gradient is not None:
                    self.find("fill")(out=gradient, value=0.0)
            return
        own_dw = dw if dw.dtype == dy.dtype else self.empty(dw.shape, dy.dtype)
        own_db = db if db is None or db.dtype == dy.dtype else None
        self._convolve(BACKWARD_WEIGHT, x, own_dw, dy, own_db, **options)
        if own_dw is not dw:
            self.find("cast")(own_dw, out=dw)
        if db is not None and own_db is None:  # then dy is row-major, see preferred_formats
            self.find("sum")(dy, out=db, axes=(0, 2, 3), keepdims=False)

    @cached_property
    def _workspaces(self) -> list[list[Array]]:
        """Workspaces by stream, each twice the last: smaller ones stay, a captured graph may hold their addresses."""
        return [[] for _ in self.streams.all]

    def _convolve(
        self,
        direction: int,
        x: Array,
        w: Array,
        y: Array,
        bias: Array | None,
        *,
        stride: Pair,
        padding: Pair,
        dilation: Pair,
        groups: int,
        memory_formats: Pair = PLAIN,
    ) -> None:
        """Compute one of x, w and y, or of their gradients, of the other two; ``memory_formats``: of x and y."""
        order = ORDERS[direction]
        a, b, out = arrays = [(x, w, y)[index] for index in order]
        is_channels_last = max(memory_formats) > 1
        compute: Callable[..., None]
        if is_channels_last and bias is None and is_product(x.dtype, w.shape, padding, groups):
            compute = partial(self._multiply, direction, stride)
        else:
            options = (x.shape, w.shape, y.shape, stride, padding, dilation, groups)
            key = (direction, DTYPES[out.dtype.char], is_channels_last, *options, state.allow_tf32)
            name = ("convolution", state.benchmark_convolutions, *key)
            plan, is_channels_last = self._plan(name, lambda: self._make_plan(key, a, b, out))
            compute = partial(self._run_plan, plan, bias)
        own_formats = [(memory_formats[0], 1, memory_formats[1])[index] for index in order]
        wanted = [array.shape[1] if is_channels_last else 1 for array in arrays]
        formats = list(zip(own_formats, wanted, strict=True))
        operands = list(map(self._operand, arrays, formats))
        for array, operand, pair in zip((a, b), operands, formats, strict=False):
            self._reorder(array, operand, pair)
        compute(*operands)
        self._reorder(operands[2], out, formats[2][::-1])

    def _run_plan(self, plan: Any, bias: Array | None, a: Array, b: Array, out: Array) -> None:
        workspace = self._workspace(plan.workspace_bytes)
        plan.run(self.stream.ptr, *addresses((a, b, out, bias, workspace)), plan.workspace_bytes)

    def _multiply(self, direction: int, stride: Pair, a: Array, b: Array, out: Array) -> None:
        """Compute one of x, w and y of the others by a product, images with channels last, see Note [products]."""
        by_index = dict(zip(ORDERS[direction], (a, b, out), strict=True))
        x, w, y = by_index[0], by_index[1], by_index[2]
        pixels = x.reshape(x.shape[0], *x.shape[2:], x.shape[1])[:, :: stride[0], :: stride[1]]
        chosen = pixels if pixels.size == x.size else self.empty(pixels.shape, x.dtype)
        rows, results = chosen.reshape(-1, x.shape[1]), y.reshape(-1, y.shape[1])
        filters = w.reshape(w.shape[:2])
        if chosen is not pixels and direction != BACKWARD_DATA:
            self.find("copy")(pixels, out=chosen)
        if direction == FORWARD:
            self.find("matmul")(rows, filters, out=results, transpose_b=True)
        elif direction == BACKWARD_WEIGHT:
            self.find("matmul")(results, rows, out=filters, transpose_a=True)
        else:
            self.find("matmul")(results, filters, out=rows)
            if chosen is not pixels:
                self.find("fill")(out=x, value=0.0)
                self.find("copy")(chosen, out=pixels)

    def _operand(self, x: Array, pair: Pair) -> Array:
        """Return ``x`` if a plan can use its memory, else a new array; ``pair``: its memory format, the plan's."""
        return x if is_same(x, pair) and is_aligned(x) else self.empty(x.shape, x.dtype)

    def _reorder(self, x: Array, out: Array, pair: Pair) -> None:
        """Copy ``x``, of memory format pair[0], to ``out``, of memory format pair[1]."""
        if is_same(x, pair):
            self._deliver(x, out)
        else:
            self.find("reorder")(x, out=out, memory_formats=pair)

    def _make_plan(self, key: tuple[Any, ...], a: Array, b: Array, out: Array) -> tuple[Any, bool]:
        """Return a plan with its algorithm chosen, and whether its channels are last.

        cuDNN does not list which convolutions it has with channels last; where it raises, they are row-major.
        """
        check_sizes("conv2d", a, b, out)
        if key[2]:
            with suppress(DeviceError):
                return self._choose(key, a, b, out), True
        return self._choose((*key[:2], False, *key[3:]), a, b, out), False

    def _choose(self, key: tuple[Any, ...], a: Array, b: Array, out: Array) -> Any:
        """Choose the algorithm of a plan and return it; of the arrays only their memory is used."""
        plan = self._new_plan("Convolution", *key)
        if not state.benchmark_convolutions or self.stream.is_capturing():
            plan.estimate(WORKSPACE_BYTES[0])
            return plan
        a, b, target = self._aligned(a), self._aligned(b), self._target(out)
        for workspace_bytes in WORKSPACE_BYTES:
            try:
                # a pool of its own gives it back to the system; others, a graph's perhaps, would keep it
                with cupy.cuda.using_allocator(cupy.cuda.MemoryPool().malloc):
                    scratch = self.empty((workspace_bytes,), "uint8")
            except MemoryError:
                continue
            plan.measure(self.stream.ptr, *addresses((a, b, target, scratch)), workspace_bytes)
            return plan
        plan.estimate(0)
        return plan

    def _workspace(self, size_bytes: int) -> Array | None:
        if size_bytes == 0:
            return None
        kept = self._workspaces[self.streams.number]
        if not kept or kept[-1].size < size_bytes:
            doubled = min(2 * kept[-1].size, WORKSPACE_BYTES[0]) if kept else 0
            # allocate: a recorder must not count it among the arrays that the step has made and somebody keeps
            kept.append(self.allocate((max(size_bytes, doubled),), "uint8"))
        return kept[-1]


def preferred_formats(
    kernel: str,
    x: tuple[int, ...],
    w: tuple[int, ...],
    y: tuple[int, ...],
    has_bias: bool,
    *,
    dtype: Any,
    groups: int,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
) -> Pair | None:
    """Return formats of x and y that suit tensor cores, which read a pixel's channels together, or products.

    See ../layout.py, which gives all that a convolution has. An image of few channels, as the first is, stays as it is.
    So does one whose bias is added afterwards (fuse.py).
    """
    if has_bias or groups > 1 or y[1] % TENSOR_CORE:
        return None
    uses_tensor_cores = is_narrow(dtype) or (dtype == "float32" and state.allow_tf32)
    if not (uses_tensor_cores or is_product(dtype, w, padding, groups)):
        return None
    return (1 if x[1] % TENSOR_CORE else x[1]), y[1]


def is_product(dtype: Any, w: tuple[int, ...], padding: Pair, groups: int) -> bool:
    """Return whether a convolution is a product that cuBLAS makes sooner, see Note [products]."""
    is_pixel = w[2:] == PLAIN and padding == (0, 0) and groups == 1
    return bool(is_pixel and dtype == "float32" and not state.allow_tf32)


def takes_formats(x: View) -> bool:
    """Return whether an image may have channels last."""
    return bool(is_narrow(x.dtype) or x.dtype == "float32")


def is_same(x: Array, pair: Pair) -> bool:
    """Return whether both memory formats, row-major and channels last, are the same memory."""
    return bool(pair[0] == pair[1] or x.shape[2:] == (1, 1))
