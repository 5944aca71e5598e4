# SPDX-License-Identifier: Apache-2.0
"""The narrow waist: every computation of the package is one of the kernels listed here, on raw arrays.

What lives here: the list of kernels, the form of a call, and the memory calls that are not kernels. What does
not: how a kernel computes (cpu/), devices (device.py), Tensors and gradients (a backend never sees them).

Note [kernel form]: a kernel is called by name with input arrays, ``out=`` (an array or a tuple of arrays,
allocated by the caller with the right shape and dtype) and plain attributes as keywords.
- Arrays are row-major; copy and broadcast_to also take and write parts of larger arrays, of any strides.
- ``out`` never shares memory with an input, but clip and what computes element by element (formulas.h) may write over
  their first input. A kernel marked "in place" also reads its ``out``.
- All that the backward kernel needs is an input or an output: no state, no hidden saved buffers.
- Nothing is random but through the attributes ``seed`` and ``counter``: same pair, same numbers.
- float16, float32 and float64 all work, bfloat16 (dtypes.py) unless ``missing_precisions`` says "bf16"; the narrow ones
  accumulate in float32 and round once, to nearest even. IEEE rules, no warnings: overflow is inf, invalid is NaN.
- Mixed precision: beside activations of 16 bits these are float32: scale, bias and statistics of the norms and their
  gradients, the bias of conv2d and the second input of add. w of conv2d and of conv2d_backward_data, which round a
  float32 one first, dw and db of conv2d_backward_weight, and out of matmul and sum_to have 16 bits or are float32,
  whichever the caller has made.
So a training step is a list of (kernel, arrays, attributes) that can be recorded, replayed and lowered.

Note [lowered calls]: ``lower`` alone makes these, each backend those that it knows.
- On CUDA (cuda/fuse.py): ``relu`` of add, True where the result goes through a ReLU; add_gelu, "(a, b) -> (GELU of the
  sum, sum)"; one more input ``residual`` of layer_norm, which gives its sum with x behind the other outputs.
- On the CPU (cpu/fuse.py, compiled kernels only): ``relu`` of conv2d and matmul; one more input ``bias`` of matmul, a
  row.
- On both (fuse_norm.py; on CUDA of images with channels last): ``relu`` of batchnorm_2d_train, and one more input
  ``residual``, added before the ReLU; ``bias`` of batchnorm_2d_backward, which then computes the gradient of the ReLU
  behind that norm as well.
- Memory formats, channels per block, 1 for row-major (layout.py): ``memory_formats`` of a convolution, of x and y or
  of their gradients; ``memory_format`` of batchnorm_2d_train, max_pool_2d, avg_pool_2d and their backward kernels.
- ``rounded`` of an optimizer step, on the CPU: numbers of parameters, each of which has a bfloat16 copy behind the
  states in out, which is written as well (graph/rounded.py).
- Kernels with names of their own, on the CPU: cpu/fuse_rows.py.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import numpy as np

from ..config import state, this_thread
from ..errors import OptionError
from ..graph.memory import View
from ..graph.nodes import Kernel, Node
from ..graph.recorder import Recorder, break_graph, tell_other_threads
from .formulas import FORMULAS, UPDATES

Array = Any  # Any: numpy.ndarray on the CPU, cupy.ndarray on CUDA; see Note [kernel form]

# kernel -> (inputs) -> outputs; attributes. N batch, C channels, H and W height and width, O output channels.
# Of kernels that are not here the docstring of numpy's method (cpu/) says the same.
KERNELS = {
    # element by element; two inputs broadcast; those of formulas.h are defined there
    **{name: formula.signature for name, formula in FORMULAS.items()},
    "compare": "(a, b) -> 0 or 1 in out's dtype; relation: less, less_equal, greater, greater_equal, equal",
    "clip": "(x) -> y; min and max: float or None",
    "clip_backward": "(dy, x) -> dx, dy where min <= x <= max; min, max",
    # moving and reducing
    "fill": "() -> out; value: float",
    "copy": "(x) -> same shape and dtype",
    "cast": "(x) -> same shape, out's dtype, rounded to nearest even",
    "transpose": "(x) -> y; axes: permutation",
    "reorder": "(x NCHW) -> the same image; memory_formats: of x and of out (layout.py), one is 1",
    "concat": "(x, ...) -> y; axis",
    "slice": "(x) -> x[start : start + out.shape[axis]] along axis; axis, start",
    "pack": "(x, ...) -> flat (n,), one after the other, each at a multiple of alignment elements (1 if not given)",
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
    # normalisation; channels on axis 1; what there is one of for each channel is float32 where x is float16
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
    # optimizer steps of many tensors, one after the other, those of updates.h; out holds all params, then all of each
    # state
    **{name: update.signature for name, update in UPDATES.items()},
    # selection for sparse exchange; indices: int32 or int64, ascending
    "top_k": "(values (n,)) -> (indices (k,), selected (k,)), largest |v|; ties: lowest index; NaN first; k",
    "threshold_count": "(values (n,)) -> count (1,), how many |v| >= threshold or are NaN; threshold",
    "threshold_select": "(values (n,)) -> (indices (count,), selected (count,)); threshold",
    "scatter_add": "(indices, values) -> flat[indices] += values in place; indices are unique",
    "scatter_fill": "(indices) -> flat[indices] = value in place; value: float",
    # ascending indices as words, int32: Note [Elias-Fano] in cpu/indices.py; low_bits: 0 .. 31
    "pack_indices": "(indices (k,)) -> words; low_bits",
    "unpack_indices": "(words) -> indices (k,); low_bits",
    # 8-bit exchange, see cpu/quantize.py; messages: uint8, (rows, bytes of row_size values), a mean's of out's size
    "quantize_int8": "(x (n,)) -> messages, rounded at random without a bias; row_size, seed, counter",
    "quantize_int8_nearest": "(x (n,)) -> (messages, rest: x - their values, 0 where these are NaN); row_size",
    "dequantize_int8": "(messages) -> the values of all rows one after the other, the first out.size of them; row_size",
    "mean_of_int8": "(messages) -> the mean of the rows' values, added in float32 in their order",
    "random_indices": "() -> k different integers of 0 .. n - 1, the first of a permutation of them; n, seed, counter; "
    "the same on every device",
    # signs as bits; a segment of flat ends where the next begins
    "pack_signs": "(x (n,)) -> uint8 (ceil(n / 8) or more,), bit i % 8 of byte i // 8 is 1 where x >= 0; others are 0",
    "add_signs": "(bits, scales (segments,), ends (segments,)) -> flat += or, where its bit is 0, -= factor times the "
    "scale of its segment, in place; factor: float",
    # low-rank exchange, see cpu/low_rank.py; p (rank, rows), q (rank, columns), rank: 1 .. 32
    "orthonormal_rows": "(p) -> its rows made orthonormal in their order, each projected twice; one of which at most "
    "``dropped`` of the squared length is left becomes 0; dropped: float",
    "unit_rows": "(q) -> its rows at length 1; random normal ones where the length is 0 or not finite; seed, counter",
    "low_rank_sum": "(p, q) -> (rows, columns), the sum of p[k, i] * q[k, j] over k in its order",
    "low_rank_rest": "(m (rows, columns), p, q) -> m - low_rank_sum(p, q), 0 where that is not finite",
    # the scale of half-precision exchange
    "max_abs": "(x) -> largest |x|, shape (1,); 0 for an empty x, NaN if x has one",
    "power_of_two_scale": "(largest (1,)) -> (1,), the largest power of two s with largest * s <= limit; 1 where "
    "largest is 0, infinite or NaN; limit: float",
}


@cache
def is_kernel(backend: type, name: str) -> bool:
    """Return whether a method is a kernel: not one of every Backend, with the keyword-only argument ``out``."""
    method = None if hasattr(Backend, name) else getattr(backend, name, None)
    return inspect.isfunction(method) and "out" in inspect.getfullargspec(method).kwonlyargs


class Backend(ABC):
    """The kernels of one kind of device and its memory: a method for each, see ``is_kernel``."""

    name: str = ""
    alignment_bytes = 1  # where an array in a larger one should begin
    # "bf16" or "fp16": why its kernels do not compute products in it, and what to do
    missing_precisions: Mapping[str, str] = {}
    # sets whether Python may write to an array; None: not needed, as ``rounds_updates`` is never True
    set_writeable: Callable[[Array, bool], None] | None = None
    recomputes = False  # whether memory is scarcer than time, see Note [recomputing] in autograd/engine.py
    runs_behind_host = False  # whether a kernel may still run when its call has returned

    def run(
        self, kernel: str, /, *inputs: Array, out: Array | tuple[Array, ...], **attributes: object
    ) -> None:
        """Run one kernel: the choke point through which every computation passes.

        Args:
            kernel: a name of ``KERNELS``.
            inputs: arrays of this backend.
            out: array or tuple of arrays that receive the result; which may be an input, see Note [kernel form].
            attributes: plain values, read at the call.

        Raises:
            OptionError: ``kernel`` is not a kernel of this backend.
        """
        recorder: Recorder | None = this_thread.recorder
        if recorder is not None:
            attributes = recorder.kernel(self, kernel, inputs, out, attributes)
        elif state.recorders:
            tell_other_threads(f"runs {kernel}", inputs, out if isinstance(out, tuple) else (out,))
        if (before := this_thread.before_kernel) is not None:
            before(inputs)
        if (rounded := state.rounded) is not None:  # which another thread may set to None meanwhile
            rounded.written(out if isinstance(out, tuple) else (out,))
        try:
            self.execute(kernel, inputs, out, attributes)
        except BaseException:
            if recorder is not None:
                recorder.note_error(kernel)
            raise

    def execute(
        self,
        kernel: str,
        inputs: tuple[Array, ...],
        out: Array | tuple[Array, ...],
        attributes: dict[str, Any],
    ) -> None:
        """Run a kernel as ``run`` does, unrecorded."""
        self.find(kernel)(*inputs, out=out, **attributes)

    def find(self, kernel: str) -> Callable[..., None]:
        """Return the method that computes ``kernel``; OptionError if this backend has none."""
        if not is_kernel(type(self), kernel):
            raise OptionError(
                f"{self.name} backend: no kernel {kernel!r}; all are in backend/formulas.h, updates.h and cpu/"
            )
        found: Callable[..., None] = getattr(self, kernel)
        return found

    def empty(self, shape: Sequence[int], dtype: Any) -> Array:
        """Return a row-major array of undefined content. dtype: whatever numpy.dtype accepts."""
        array = self.allocate(shape, dtype)
        return array if this_thread.recorder is None else this_thread.recorder.allocate(array)

    def astype(self, array: Array, dtype: Any) -> Array:
        """Return ``array`` rounded or widened to ``dtype``; itself if it has it."""
        if array.dtype == dtype:
            return array
        out = self.empty(array.shape, dtype)
        self.run("cast", array, out=out)
        return out

    def zeros(self, shape: Sequence[int], dtype: Any) -> Array:
        """Return a row-major array of zeros, which it is again at the start of every replay."""
        if this_thread.recorder is None:
            return self.allocate_zeros(shape, dtype)
        array = self.empty(shape, dtype)
        self.run("fill", out=array, value=0.0)
        return array

    @abstractmethod
    def allocate(self, shape: Sequence[int], dtype: Any) -> Array:
        """Return an array as ``empty`` does, unrecorded."""

    @abstractmethod
    def allocate_zeros(self, shape: Sequence[int], dtype: Any) -> Array:
        """Return an array as ``zeros`` does, unrecorded."""

    @abstractmethod
    def asarray(self, values: np.ndarray[Any, Any]) -> Array:
        """Return a new row-major array of this backend with the values and dtype of a numpy array."""

    def release_cached_memory(self) -> None:
        """Give memory that is kept for reuse to the system; the default keeps none."""
        return None

    def saving_memory(self, idle: list[Array]) -> AbstractContextManager[None]:
        """Return a context for a step that runs once, in little memory; the default changes nothing.

        Args:
            idle: arrays that nothing reads or writes within, and whose values are not needed behind it.
        """
        return nullcontext()

    def lower(self, nodes: list[Node]) -> list[Node]:
        """Return the nodes of a recorded step in a form that this backend runs faster; the default changes nothing."""
        return nodes

    def compile(self, nodes: list[Node]) -> list[Callable[[], None]]:
        """Return what a replay runs, in order, for nodes on arrays that stay; the default runs them one by one."""
        return list(nodes)

    def rounds_updates(self, update: Kernel, param: View) -> bool:
        """Return whether ``update`` updates ``param`` and can write a rounded copy of it; see Note [lowered calls]."""
        return False

    def recurrent_reserve_bytes(self, x_shape: tuple[int, ...], dtype: Any, **attributes: Any) -> int:
        """Size of the uint8 array that a call of the kernel ``recurrent`` fills; dtype: x's; its attributes."""
        raise OptionError(f"{self.name} backend: no kernel 'recurrent'")

    def to_numpy(self, array: Array, out: np.ndarray[Any, Any] | None = None) -> np.ndarray[Any, Any]:
        """Return a numpy copy of ``array``, after all kernels that write it; in ``out`` if that is given."""
        break_graph("it reads values on the host, and a replay runs no Python that could use them")
        if state.recorders:
            tell_other_threads("reads values on the host", (array,), ())
        return self.copy_to_host(array, out)

    @abstractmethod
    def copy_to_host(self, array: Array, out: np.ndarray[Any, Any] | None) -> np.ndarray[Any, Any]:
        """Return a copy as ``to_numpy`` does, unrecorded."""

    def host_array(self, shape: Sequence[int], dtype: Any) -> np.ndarray[Any, Any]:
        """Return a numpy array of undefined content, in memory that copies to and from this backend fastest."""
        return np.empty(tuple(shape), dtype)

    @abstractmethod
    def may_share_memory(self, a: Array, b: Array) -> bool:
        """Return whether writing ``a`` could change ``b``; never wrongly False."""

    def activate(self) -> None:
        """Make this backend's device and stream current for the thread; nothing to do on the CPU."""
        return None

    def packing(self, *uses: Array) -> AbstractContextManager[Any]:
        """Run the kernels of the ``with`` block after those before it and beside those that follow; gives ``packed``.

        For what a scheme does with gradients before a collective, on a device that can do it beside the backward
        pass. ``uses``: arrays for others than this backend's kernels, such as the collective's.
        """
        return nullcontext()

    def unpacking(self, packed: Any) -> AbstractContextManager[None]:
        """Run the kernels of the ``with`` block after the one that gave ``packed`` and after Works waited for in it.

        Kernels that follow it run after it.
        """
        return nullcontext()

    def join(self) -> None:
        """Order all later kernels after all packing and unpacking."""
        return None

    def end_packing(self) -> None:
        """Leave a ``packing`` or ``unpacking`` that an error in a recorded step has left open, and join."""
        return None

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until every kernel started so far has ended."""
