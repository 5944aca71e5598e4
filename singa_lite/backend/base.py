# SPDX-License-Identifier: Apache-2.0
"""The narrow waist: every computation of the package is one of the kernels listed here, on raw arrays.

What lives here: the list of kernels, the form of a call, and the memory calls that are no kernels. What does
not: how a kernel computes (cpu/), devices (device.py), Tensors and gradients (a backend never sees them).

Note [kernel form]: a kernel is called by name with input arrays, ``out=`` (an array or a tuple of arrays,
allocated by the caller with the right shape and dtype) and plain attributes as keywords.
- Arrays are row-major; copy and broadcast_to also take and write parts of larger arrays, of any strides.
- ``out`` never shares memory with an input, but add, sub, mul, div and clip may write over their first
  input. A kernel marked "in place" also reads its ``out``.
- All that the backward kernel needs is an input or an output: no state, no hidden saved buffers.
- Nothing is random but through the attributes ``seed`` and ``counter``: same pair, same numbers.
- float16, float32 and float64 all work; float16 accumulates in float32. IEEE rules, no warnings: overflow is
  inf, invalid is NaN.
So a training step is a list of (kernel, arrays, attributes) that can be recorded, replayed and lowered.

Note [lowered calls]: ``lower`` alone makes these, each backend those that it knows.
- ``relu``, True where the result goes through a ReLU: of add on CUDA (cuda/fuse.py); of conv2d, matmul and
  batchnorm_2d_train on the CPU (cpu/fuse.py, compiled kernels only).
- One more input, there too: ``bias`` of matmul, a row; ``residual`` of batchnorm_2d_train, added before the ReLU;
  ``bias`` of batchnorm_2d_backward, which then computes the gradient of the ReLU behind that norm as well.
- Channels side by side, 1 for row-major (layout.py): ``blocks`` of a convolution, of x and y or of their
  gradients; ``block`` of batchnorm_2d_train, max_pool_2d, avg_pool_2d and their backward kernels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from ..config import state
from ..errors import OptionError
from ..graph import HostCall, KernelCall, View

Array = Any  # Any: numpy.ndarray on the CPU, cupy.ndarray on CUDA; see Note [kernel form]

Call = KernelCall | HostCall

# kernel -> (inputs) -> outputs; attributes. N batch, C channels, H and W height and width, O output channels.
KERNELS = {
    # element by element; two inputs broadcast
    "relu": "(x) -> max(x, 0)",
    "relu_backward": "(dy, y) -> dx",
    "sigmoid": "(x) -> y",
    "sigmoid_backward": "(dy, y) -> dx",
    "tanh": "(x) -> y",
    "tanh_backward": "(dy, y) -> dx",
    "exp": "(x) -> y",
    "log": "(x) -> y",
    "sqrt": "(x) -> y",
    "abs": "(x) -> y",
    "negative": "(x) -> y",
    "sign": "(x) -> -1, 0 or 1",
    "ceil": "(x) -> y",
    "floor": "(x) -> y",
    "square": "(x) -> y",
    "add": "(a, b) -> a + b",
    "sub": "(a, b) -> a - b",
    "mul": "(a, b) -> a * b",
    "div": "(a, b) -> a / b",
    "pow": "(a, b) -> a ** b",
    "pow_backward_base": "(dy, a, b) -> gradient of a, in the broadcast shape",
    "pow_backward_exponent": "(dy, a, y) -> gradient of b, in the broadcast shape; 0 where a is 0",
    "compare": "(a, b) -> 0 or 1 in out's dtype; relation: less, less_equal, greater, greater_equal, equal",
    "clip": "(x) -> y; min and max: float or None",
    "clip_backward": "(dy, x) -> dx, dy where min <= x <= max; min, max",
    # moving and reducing
    "fill": "() -> out; value: float",
    "copy": "(x) -> same shape and dtype",
    "cast": "(x) -> same shape, out's dtype, rounded to nearest even",
    "transpose": "(x) -> y; axes: permutation",
    "reorder": "(x NCHW) -> the same image; blocks: channels side by side in x and in out (layout.py), one is 1",
    "concat": "(x, ...) -> y; axis",
    "slice": "(x) -> x[start : start + out.shape[axis]] along axis; axis, start",
    "pack": "(x, ...) -> flat (n,), one after the other",
    "unpack": "(flat) -> (x, ...), the reverse of pack",
    "sum": "(x) -> y; axes: tuple of ints, keepdims: bool",
    "mean": "(x) -> y; axes, keepdims",
    "max": "(x) -> y; axes, keepdims",
    "sum_to": "(dy) -> dy summed over the axes that broadcasting out.shape to dy.shape added or stretched",
    "broadcast_to": "(x) -> x repeated along new and size-1 axes to out's shape",
    "matmul": "(a, b) -> y, last two axes multiplied, others broadcast; transpose_a, transpose_b: bool",
    # windows; stride, padding, dilation: pairs (height, width); padding is symmetric
    "conv2d": "(x NCHW, w (O, C/groups, kh, kw)[, b (O,)]) -> y; stride, padding, dilation, groups",
    "conv2d_backward_data": "(dy, w) -> dx; stride, padding, dilation, groups",
    "conv2d_backward_weight": "(dy, x) -> dw or (dw, db); stride, padding, dilation, groups",
    "max_pool_2d": "(x) -> (y, indices: number in the window, row-major); kernel_size, stride, padding",
    "max_pool_2d_backward": "(dy, indices) -> dx; kernel_size, stride, padding",
    "avg_pool_2d": "(x) -> y; kernel_size, stride, padding, count_include_pad",
    "avg_pool_2d_backward": "(dy) -> dx; kernel_size, stride, padding, count_include_pad",
    # normalisation; channels on axis 1, statistics float32 or wider
    "batchnorm_2d_train": "(x, scale, bias) -> (y, mean, inverse_std, running_mean, running_var), the "
    "last two in place: r = (1 - momentum) r + momentum batch; momentum, eps",
    "batchnorm_2d_infer": "(x, scale, bias, running_mean, running_var) -> y; eps",
    "batchnorm_2d_backward": "(dy, x, scale, mean, inverse_std) -> (dx, dscale, dbias)",
    "softmax": "(x) -> y; axis",
    "softmax_backward": "(dy, y) -> dx; axis",
    # recurrent layers: T steps, N batch, I features, H hidden, D directions, L layers; w packed and the attributes
    # mode, hidden_size, num_layers, bidirectional, bias as in recurrent.py; c only for lstm; lengths: None, or N
    # ints: where each sequence ends; behind it y is 0, and hy and cy are the states where it ends
    "recurrent": "(x (T, N, I), w, h0 (L D, N, H)[, c0]) -> (y (T, N, D H), hy[, cy][, reserve]), the last of "
    "recurrent_reserve_bytes, for the gradient",
    "recurrent_backward": "(dy, dhy[, dcy], x, w, h0[, c0], y) -> (dw, dh0[, dc0], reserve[, dx]), the reserve in "
    "place and of no use afterwards",
    # losses: mean over the batch, shape (1,); labels: ids (N,) of an integer dtype, or rows (N, C) of any
    # dtype, divided by their sum (a row of zeros adds nothing)
    "softmax_cross_entropy": "(x (N, C), labels) -> (loss, probabilities (N, C))",
    "softmax_cross_entropy_backward": "(dy (1,), probabilities, labels) -> dx",
    "cross_entropy": "(probabilities (N, C), labels) -> loss",
    "cross_entropy_backward": "(dy (1,), probabilities, labels) -> dx",
    "mse_loss": "(x, t) -> loss, mean over all elements",
    "mse_loss_backward": "(dy (1,), x, t) -> dx",
    # random; seed and counter: integers, each pair is its own stream
    "dropout": "(x) -> (y = x / (1 - ratio) where kept, mask: bool); ratio, seed, counter",
    "dropout_backward": "(dy, mask) -> dx; ratio",
    "random_uniform": "() -> out in [low, high); low, high, seed, counter",
    "random_normal": "() -> out; mean, std, seed, counter",
    "random_bernoulli": "() -> 1 with probability p, else 0; p, seed, counter",
    # optimizer steps of many tensors, one after the other; out holds all params, then all of each state
    "sgd_update": "(grad, ...) -> (param, ...[, velocity, ...]) in place; lr, momentum, dampening, "
    "weight_decay, nesterov",
    "adam_update": "(grad, ...) -> (param, ..., m, ..., v, ...) in place; lr, beta_1, beta_2, eps, "
    "weight_decay, step (from 1)",
    # selection for sparse exchange; indices: int32 or int64, ascending
    "top_k": "(values (n,)) -> (indices (k,), selected (k,)), largest |v|; ties: lowest index; NaN first; k",
    "threshold_count": "(values (n,)) -> count (1,), how many |v| >= threshold or are NaN; threshold",
    "threshold_select": "(values (n,)) -> (indices (count,), selected (count,)); threshold",
    "scatter_add": "(indices, values) -> flat[indices] += values in place; indices are unique",
    "scatter_fill": "(indices) -> flat[indices] = value in place; value: float",
    # the scale of half-precision exchange
    "max_abs": "(x) -> largest |x|, shape (1,); 0 for an empty x, NaN if x has one",
    "power_of_two_scale": "(largest (1,)) -> (1,), the largest power of two s with largest * s <= limit; 1 where "
    "largest is 0, infinite or NaN; limit: float",
}


class Backend(ABC):
    """The kernels of one kind of device and its memory. A backend has one method per name in ``KERNELS``."""

    name: str = ""

    def run(
        self, kernel: str, /, *inputs: Array, out: Array | tuple[Array, ...], **attributes: object
    ) -> None:
        """Run one kernel: the choke point through which every computation passes.

        Args:
            kernel: a name of ``KERNELS``.
            inputs: arrays of this backend.
            out: array or tuple of arrays that receive the result; which may be an input says Note [kernel form].
            attributes: plain values, read at the call.

        Raises:
            OptionError: ``kernel`` is not a kernel of this backend.
        """
        if state.recorder is not None:
            state.recorder.add(self, kernel, inputs, out, attributes)
        self.execute(kernel, inputs, out, attributes)

    def execute(
        self,
        kernel: str,
        inputs: tuple[Array, ...],
        out: Array | tuple[Array, ...],
        attributes: dict[str, Any],
    ) -> None:
        """What ``run`` does, unrecorded."""
        self.find(kernel)(*inputs, out=out, **attributes)

    def find(self, kernel: str) -> Callable[..., None]:
        """The method that computes ``kernel``; OptionError if this backend has none."""
        method = getattr(self, kernel, None) if kernel in KERNELS else None
        if method is None:
            raise OptionError(f"{self.name} backend: no kernel {kernel!r}; backend/base.py lists all of them")
        found: Callable[..., None] = method
        return found

    @abstractmethod
    def empty(self, shape: Sequence[int], dtype: Any) -> Array:
        """A row-major array of undefined content. dtype: whatever numpy.dtype accepts."""

    @abstractmethod
    def zeros(self, shape: Sequence[int], dtype: Any) -> Array:
        """A row-major array of zeros."""

    @abstractmethod
    def asarray(self, values: np.ndarray[Any, Any]) -> Array:
        """A new row-major array of this backend with the values and dtype of a numpy array."""

    @abstractmethod
    def root(self, array: Array) -> Array:
        """The array that owns the memory ``array`` is a part of; itself if it owns it."""

    @abstractmethod
    def offset(self, array: Array) -> int:
        """How many bytes behind the start of its root ``array`` begins."""

    @abstractmethod
    def view(self, root: Array, view: View) -> Array:
        """The array that ``view`` describes in the memory of ``root``."""

    def give_back(self) -> None:
        """Hand memory that is kept for reuse to the system; the default keeps none."""
        return None

    def lower(self, calls: list[Call]) -> list[Call]:
        """The calls of a recorded step in a form that this backend runs faster; the default changes nothing."""
        return calls

    def bake(self, calls: list[Call]) -> list[Callable[[], None]]:
        """What a replay runs in this order, for calls on arrays that stay where they are; the default: one by one."""
        return list(calls)

    def recurrent_reserve_bytes(self, x_shape: tuple[int, ...], dtype: Any, **attributes: Any) -> int:
        """Size of the uint8 array that a call of the kernel ``recurrent`` fills; dtype: x's; its attributes."""
        raise OptionError(f"{self.name} backend: no kernel 'recurrent'")

    @abstractmethod
    def to_numpy(self, array: Array) -> np.ndarray[Any, Any]:
        """A numpy copy of ``array``, after all kernels that write it."""

    @abstractmethod
    def may_share_memory(self, a: Array, b: Array) -> bool:
        """Whether writing ``a`` could change ``b``; never wrongly False."""

    def activate(self) -> None:
        """Let what others start for this thread come after its kernels on this backend; no thing of the CPU."""
        return None

    def packing(self, *uses: Array) -> AbstractContextManager[Any]:
        """Inside the ``with`` block: behind what came before it, beside what comes after. Gives ``packed``.

        For what a scheme does with gradients before a collective, on a device that can do it beside the backward
        pass. ``uses``: arrays for others than this backend's kernels, such as the collective's.
        """
        return nullcontext()

    def unpacking(self, packed: Any) -> AbstractContextManager[None]:
        """Inside: behind what was ``packed`` and the collectives waited for inside; what comes after it comes after."""
        return nullcontext()

    def join(self) -> None:
        """Let what comes from now on come after all that was packed or unpacked."""
        return None

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until every kernel started so far has ended."""
