# SPDX-License-Identifier: Apache-2.0
"""Batch normalization by cuDNN, but for images with channels last, and layer normalization.

What lives here: the batches cuDNN doesn't take. What does not: cuDNN's calls (native/cuda/norm.h), and channels last
(batch_norm.py).
"""

from __future__ import annotations

from math import nan, prod
from typing import Any

from ...errors import DeviceError, OptionError
from ..base import Array
from .batch_norm import ChannelsLastNorm, takes
from .cudnn import DTYPES, addresses, check_sizes
from .launch import types_of

MOST_TRAINED = 880801  # samples; more are unsupported by cuDNN
MOST_INFERRED = 65528  # of 65535 that cuDNN takes; parts of a multiple of 8 samples begin aligned


class NormKernels(ChannelsLastNorm):
    """batchnorm_2d over every axis but 1, for ``memory_format`` see ../layout.py; layer_norm over the last ones."""

    def batchnorm_2d_train(
        self,
        x: Array,
        scale: Array,
        bias: Array,
        residual: Array | None = None,
        *,
        out: tuple[Array, ...],
        momentum: float,
        eps: float,
        memory_format: int = 1,
        relu: bool = False,
    ) -> None:
        y, mean, inverse_std, running_mean, running_var = out
        if not x.size:
            for statistic in out[1:]:
                self.find("fill")(out=statistic, value=nan)  # 0 / 0
            return
        if memory_format > 1 and takes(x, scale):
            self._train_channels_last(x, scale, bias, residual, out, momentum, eps, relu)
            return
        if relu or residual is not None:
            raise OptionError("batchnorm_2d_train: a residual and a ReLU are for images with channels last")
        plan = self._norm(x, MOST_TRAINED, memory_format > 1)
        x, target = self._aligned(x), self._target(y)
        has_variance = x.size > x.shape[1]
        updated = (running_mean, running_var) if has_variance else (None, None)
        arrays = (x, scale, bias, target, mean, inverse_std, *updated)
        plan.train(self.stream.ptr, *addresses(arrays), momentum, eps)
        if not has_variance:
            self._update_without_variance(mean, running_mean, running_var, momentum)
        self._deliver(target, y)

    def batchnorm_2d_infer(
        self, x: Array, scale: Array, bias: Array, mean: Array, var: Array, *, out: Array, eps: float
    ) -> None:
        if not x.size:
            return
        x, target = self._aligned(x), self._target(out)
        for first in range(0, x.shape[0], MOST_INFERRED):
            samples = slice(first, first + MOST_INFERRED)
            arrays = (x[samples], scale, bias, mean, var, target[samples])
            self._norm(arrays[0], MOST_INFERRED).infer(self.stream.ptr, *addresses(arrays), eps)
        self._deliver(target, out)

    def batchnorm_2d_backward(
        self,
        dy: Array,
        x: Array,
        scale: Array,
        mean: Array,
        inverse_std: Array,
        bias: Array | None = None,
        *,
        out: tuple[Array, ...],
        memory_format: int = 1,
    ) -> None:
        dx, dscale, dbias = out
        if not x.size:
            for gradient in (dscale, dbias):
                self.find("fill")(out=gradient, value=0.0)
            return
        if memory_format > 1 and takes(x, scale):
            self._backward_channels_last(dy, x, scale, mean, inverse_std, bias, out)
            return
        if bias is not None:
            raise OptionError("batchnorm_2d_backward: a ReLU's gradient is for images with channels last")
        plan = self._norm(x, MOST_TRAINED, memory_format > 1)
        dy, x, target = self._aligned(dy), self._aligned(x), self._target(dx)
        arrays = (dy, x, scale, mean, inverse_std, target, dscale, dbias)
        plan.backward(self.stream.ptr, *addresses(arrays))
        self._deliver(target, dx)

    def layer_norm(
        self, x: Array, scale: Array, bias: Array, *residual: Array, out: tuple[Array, ...], eps: float
    ) -> None:
        """Run layer_norm.cu, as its gradient does: cuDNN has it in its graphs alone."""
        name = "layer_norm.layer_norm_of_sum" if residual else "layer_norm.layer_norm"
        given = (x, *residual, scale, bias, *out, scale.size, float(eps))
        self.each_row(name, types_of(x, scale), out[1].size, scale.size, *given)

    def layer_norm_backward(self, *inputs: Array, out: tuple[Array, Array, Array]) -> None:
        dy, x, scale, mean, _ = inputs
        dx, dscale, dbias = out
        products = self.empty((mean.size, scale.size), mean.dtype)
        given = (*inputs, dx, products, scale.size)
        self.each_row("layer_norm.layer_norm_backward", types_of(x, scale), mean.size, scale.size, *given)
        sums = self.empty((scale.size,), mean.dtype)
        self.find("sum_to")(products, out=sums)
        self.find("cast")(sums, out=dscale.reshape(-1))
        self.find("sum_to")(dy.reshape(products.shape), out=dbias.reshape(-1))

    def _norm(self, x: Array, most: int, is_channels_last: bool = False) -> Any:
        """Return the plan for the shape of ``x``."""
        if x.shape[0] > most:
            raise DeviceError(
                f"batchnorm_2d: cuDNN takes at most {most} samples, not {x.shape[0]}; train on smaller batches"
            )
        check_sizes("batchnorm_2d", x)
        shape = x.shape if x.ndim == 4 else (*x.shape[:2], prod(x.shape[2:]), 1)
        key = (DTYPES[x.dtype.char], is_channels_last, shape)
        return self._plan(("norm", *key), lambda: self._new_plan("BatchNorm", *key))

    def _update_without_variance(
        self, mean: Array, running_mean: Array, running_var: Array, momentum: float
    ) -> None:
        """Update the running statistics after a batch of one element a channel: cuDNN would divide 0 by 0."""
        share, part = self.empty((1,), mean.dtype), self.empty(mean.shape, mean.dtype)
        self.find("sub")(mean, mean, out=part)  # the variance: 0, or NaN where the element is not finite
        for running, batch in ((running_var, part), (running_mean, mean)):
            self.find("fill")(out=share, value=1 - momentum)
            self.find("mul")(running, share, out=running)
            self.find("fill")(out=share, value=momentum)
            self.find("mul")(batch, share, out=part)
            self.find("add")(running, part, out=running)
