# SPDX-License-Identifier: Apache-2.0
"""Batch normalization of images with channels last, by own kernels: cuDNN's plain ones take 20 times as long there.

What lives here: which threads take what of an image. What does not: what they compute (batch_norm.cu), and images that
are row-major (norm.py).
"""

from __future__ import annotations

from typing import Any

from ...graph.memory import View
from ...graph.nodes import Kernel
from ..base import Array
from .axes import LOAD
from .cudnn import CudnnCaller
from .launch import THREADS

WIDEST = 32  # threads side by side
LEAST_ROWS = 8  # of a thread, where blocks are not needed to fill the GPU
BLOCKS = 4  # of a multiprocessor


def takes(x: Array | View, scale: Array | View) -> bool:
    """Return whether these kernels take an image of that dtype and number of channels."""
    itemsize = x.dtype.itemsize
    return x.dtype.char in "efE" and scale.dtype == "float32" and x.shape[1] % (LOAD // itemsize) == 0


def has_fused_calls(norm: Kernel, *others: View) -> bool:
    """Return whether a recorded batch norm can be fused with what has the arrays ``others``."""
    x, scale = norm.inputs[1:3] if norm.name == "batchnorm_2d_backward" else norm.inputs[:2]
    is_last: bool = norm.attributes.get("memory_format", 1) > 1 and takes(x, scale)
    return is_last and 0 not in x.shape and all(view.is_row_major for view in others)


class ChannelsLastNorm(CudnnCaller):
    """batchnorm_2d_train and its gradient, of float32, float16 and bfloat16 beside float32 parameters."""

    def _train_channels_last(
        self,
        x: Array,
        scale: Array,
        bias: Array,
        residual: Array | None,
        out: tuple[Array, ...],
        momentum: float,
        eps: float,
        relu: bool,
    ) -> None:
        y, *statistics = out
        x, target = self._aligned(x), self._target(y)
        summand = 0 if residual is None else self._aligned(residual)
        types, blocks, chunks, sums, sizes = self._parts(x)
        self.launch("batch_norm.batch_norm_sums", types, blocks, THREADS, x, sums, *sizes)
        rest = (*sizes[:2], chunks, float(momentum), float(eps))
        self._each_channel("batch_norm_statistics", x, sums, *statistics, *rest)
        given = (x, scale, bias, *statistics[:2], summand, target, *sizes, int(relu))
        self.launch("batch_norm.batch_norm_apply", types, blocks, THREADS, *given)
        self._deliver(target, y)

    def _backward_channels_last(
        self,
        dy: Array,
        x: Array,
        scale: Array,
        mean: Array,
        inverse_std: Array,
        bias: Array | None,
        out: tuple[Array, ...],
    ) -> None:
        dx, dscale, dbias = out
        dy, x, target = self._aligned(dy), self._aligned(x), self._target(dx)
        types, blocks, chunks, sums, sizes = self._parts(x)
        given, grads = (dy, x, scale, 0 if bias is None else bias, mean, inverse_std), (dscale, dbias)
        self.launch("batch_norm.batch_norm_gradient_sums", types, blocks, THREADS, *given, sums, *sizes)
        self._each_channel("batch_norm_parameter_gradients", x, sums, inverse_std, *grads, sizes[1], chunks)
        self.launch("batch_norm.batch_norm_backward", types, blocks, THREADS, *given, *grads, target, *sizes)
        self._deliver(target, dx)

    def _parts(self, x: Array) -> tuple[str, int, int, Array, tuple[int, int, int]]:
        """Return types, blocks, how many share channels, memory for sums, (rows, channels, threads side by side)."""
        channels, rows = x.shape[1], x.size // x.shape[1]
        loads = channels * x.itemsize // LOAD
        wide = min(WIDEST, 1 << (loads - 1).bit_length())
        groups, tall = -(-loads // wide), THREADS // wide
        chunks = max(1, min(BLOCKS * self.num_processors // groups, -(-rows // (LEAST_ROWS * tall))))
        sums = self.scratch(2 * 8 * chunks * channels)
        return x.dtype.char, groups * chunks, chunks, sums, (rows, channels, wide)

    def _each_channel(self, name: str, x: Array, *arguments: Any) -> None:
        self.launch(f"batch_norm.{name}", x.dtype.char, -(-x.shape[1] // 8), THREADS, *arguments)
