# SPDX-License-Identifier: Apache-2.0
"""Batch normalisation by cuDNN.

What lives here: float16 channels, and the batches cuDNN doesn't take. What does not: cuDNN's calls
(native/cuda/norm.h).

Note [channels]: cuDNN keeps scale, bias, statistics and their gradients in float32 where x is float16; ours have the
dtype of x. Then one launch brings them to scratch memory of float32 before a call, and one brings back the results.
"""

from __future__ import annotations

from collections.abc import Callable
from math import nan, prod
from typing import Any

from ...errors import DeviceError
from ..base import Array
from .cudnn import DTYPES, CudnnCaller

MOST_TRAINED = 880801  # samples; with more cuDNN says it doesn't support them
MOST_INFERRED = 65528  # of 65535 that cuDNN takes; parts of a multiple of 8 samples begin aligned


class NormKernels(CudnnCaller):
    """batchnorm_2d over every axis but 1."""

    def batchnorm_2d_train(
        self, x: Array, scale: Array, bias: Array, *, out: tuple[Array, ...], momentum: float, eps: float
    ) -> None:
        y, mean, inverse_std, *running = out
        if not x.size:
            for statistic in out[1:]:
                self.find("fill")(out=statistic, value=nan)  # 0 / 0
            return
        plan = self._norm(x, MOST_TRAINED)
        x, target = self._aligned(x), self._target(y)

        def train(*channels: Array) -> None:
            *parameters, running_mean, running_var, mean, inverse_std = channels
            has_variance = x.size > x.shape[1]
            updated = (running_mean, running_var) if has_variance else (None, None)
            arrays = (x, *parameters, target, mean, inverse_std, *updated)
            plan.train(self.stream.ptr, *map(_address, arrays), momentum, eps)
            if not has_variance:
                self._update_without_variance(mean, running_mean, running_var, momentum)

        self._with_channels(train, (scale, bias, *running, mean, inverse_std), 4, 2)
        self._deliver(target, y)

    def batchnorm_2d_infer(
        self, x: Array, scale: Array, bias: Array, mean: Array, var: Array, *, out: Array, eps: float
    ) -> None:
        if not x.size:
            return
        x, target = self._aligned(x), self._target(out)

        def infer(*channels: Array) -> None:
            for first in range(0, x.shape[0], MOST_INFERRED):
                samples = slice(first, first + MOST_INFERRED)
                arrays = (x[samples], *channels, target[samples])
                self._norm(arrays[0], MOST_INFERRED).infer(self.stream.ptr, *map(_address, arrays), eps)

        self._with_channels(infer, (scale, bias, mean, var), 4, 4)
        self._deliver(target, out)

    def batchnorm_2d_backward(
        self, dy: Array, x: Array, scale: Array, mean: Array, inverse_std: Array, *, out: tuple[Array, ...]
    ) -> None:
        dx, dscale, dbias = out
        if not x.size:
            for gradient in (dscale, dbias):
                self.find("fill")(out=gradient, value=0.0)
            return
        plan = self._norm(x, MOST_TRAINED)
        dy, x, target = self._aligned(dy), self._aligned(x), self._target(dx)

        def backward(*channels: Array) -> None:
            arrays = (dy, x, *channels[:3], target, *channels[3:])
            plan.backward(self.stream.ptr, *map(_address, arrays))

        self._with_channels(backward, (scale, mean, inverse_std, dscale, dbias), 3, 3)
        self._deliver(target, dx)

    def _norm(self, x: Array, most: int) -> Any:
        """The plan for the shape of ``x``."""
        if x.shape[0] > most:
            raise DeviceError(
                f"batchnorm_2d: cuDNN takes at most {most} samples, not {x.shape[0]}; train on smaller batches"
            )
        shape = x.shape if x.ndim == 4 else (*x.shape[:2], prod(x.shape[2:]), 1)
        key = ("norm", x.dtype.char, shape)
        return self._plan(key, lambda: self._new_plan("BatchNorm", DTYPES[x.dtype.char], shape))

    def _with_channels(
        self, run: Callable[..., None], channels: tuple[Array, ...], given: int, written: int
    ) -> None:
        """Call ``run`` with ``channels`` as cuDNN takes them, see Note [channels].

        Args:
            given: how many, from the first on, have values before.
            written: the number of the first that gets values; so do all behind it.
        """
        if channels[0].dtype.char != "e":
            run(*channels)
            return
        size = channels[0].size
        wide = self.empty((size * len(channels),), "float32")
        self.find("pack")(*channels[:given], out=wide[: size * given])
        run(*(wide[size * i : size * (i + 1)] for i in range(len(channels))))
        if channels[written:]:
            self.find("unpack")(wide[size * written :], out=channels[written:])

    def _update_without_variance(
        self, mean: Array, running_mean: Array, running_var: Array, momentum: float
    ) -> None:
        """The running statistics after a batch of one element a channel: cuDNN would divide its variance 0 by 0."""
        share, part = self.empty((1,), mean.dtype), self.empty(mean.shape, mean.dtype)
        self.find("sub")(mean, mean, out=part)  # the variance: 0, or NaN where the element is not finite
        for running, batch in ((running_var, part), (running_mean, mean)):
            self.find("fill")(out=share, value=1 - momentum)
            self.find("mul")(running, share, out=running)
            self.find("fill")(out=share, value=momentum)
            self.find("mul")(batch, share, out=part)
            self.find("add")(running, part, out=running)


def _address(array: Array | None) -> int:
    return 0 if array is None else int(array.data.ptr)
