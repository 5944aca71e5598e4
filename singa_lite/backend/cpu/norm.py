# SPDX-License-Identifier: Apache-2.0
"""Batch normalisation and softmax."""

from __future__ import annotations

from math import prod

import numpy as np

from ..base import Array
from ._wide import wide


def channel_rows(x: Array) -> Array:
    """(N, C, ...) as (N, C, rest), float32 or wider."""
    return wide(x).reshape(*x.shape[:2], prod(x.shape[2:]))


def per_channel(v: Array) -> Array:
    """(C,) as (1, C, 1), float32 or wider."""
    return wide(v).reshape(1, -1, 1)


class NormKernels:
    """batchnorm_2d over every axis but 1, and softmax over any axis."""

    def batchnorm_2d_train(
        self, x: Array, scale: Array, bias: Array, *, out: tuple[Array, ...], momentum: float, eps: float
    ) -> None:
        y, mean, inverse_std, running_mean, running_var = out
        rows = channel_rows(x)
        count = rows.shape[0] * rows.shape[2]
        batch_mean = rows.mean(axis=(0, 2))
        centred = rows - per_channel(batch_mean)
        batch_var = np.einsum("ncp,ncp->c", centred, centred) / count
        mean[...] = batch_mean
        inverse_std[...] = 1 / np.sqrt(batch_var + eps)
        centred *= per_channel(inverse_std) * per_channel(scale)
        centred += per_channel(bias)
        y[...] = centred.reshape(y.shape)
        unbiased = batch_var * (count / max(1, count - 1))
        for running, batch in ((running_mean, batch_mean), (running_var, unbiased)):
            running[...] = (1 - momentum) * wide(running) + momentum * batch

    def batchnorm_2d_infer(
        self, x: Array, scale: Array, bias: Array, mean: Array, var: Array, *, out: Array, eps: float
    ) -> None:
        factor = wide(scale) / np.sqrt(wide(var) + eps)
        shift = wide(bias) - wide(mean) * factor
        out[...] = (channel_rows(x) * per_channel(factor) + per_channel(shift)).reshape(out.shape)

    def batchnorm_2d_backward(
        self, dy: Array, x: Array, scale: Array, mean: Array, inverse_std: Array, *, out: tuple[Array, ...]
    ) -> None:
        dx, dscale, dbias = out
        slopes, normal = channel_rows(dy), channel_rows(x) - per_channel(mean)
        normal *= per_channel(inverse_std)
        count = slopes.shape[0] * slopes.shape[2]
        slope_sum = slopes.sum(axis=(0, 2))
        slope_normal_sum = np.einsum("ncp,ncp->c", slopes, normal)
        dbias[...] = slope_sum
        dscale[...] = slope_normal_sum
        # dx = scale * inverse_std * (dy - mean(dy) - normal * mean(dy * normal))
        normal *= per_channel(-slope_normal_sum / count)
        normal += slopes
        normal -= per_channel(slope_sum / count)
        normal *= per_channel(wide(scale) * wide(inverse_std))
        dx[...] = normal.reshape(dx.shape)

    def softmax(self, x: Array, *, out: Array, axis: int) -> None:
        x = wide(x)
        powers = np.exp(x - x.max(axis=axis, keepdims=True))
        np.divide(powers, powers.sum(axis=axis, keepdims=True), out=out, casting="same_kind")

    def softmax_backward(self, dy: Array, y: Array, *, out: Array, axis: int) -> None:
        dy, y = wide(dy), wide(y)
        inner = (dy * y).sum(axis=axis, keepdims=True)
        np.multiply(y, dy - inner, out=out, casting="same_kind")
