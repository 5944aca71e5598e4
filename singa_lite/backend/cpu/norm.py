# SPDX-License-Identifier: Apache-2.0
"""Batch and layer normalisation, softmax and attention."""

from __future__ import annotations

from math import prod

import numpy as np

from ..base import Array
from ._accumulation import pairwise_sum, store, upcast


def channel_rows(x: Array) -> Array:
    """Return (N, C, ...) as (N, C, rest), float32 or wider."""
    return upcast(x).reshape(*x.shape[:2], prod(x.shape[2:]))


def per_channel(v: Array) -> Array:
    """Return (C,) as (1, C, 1), float32 or wider."""
    return upcast(v).reshape(1, -1, 1)


def heads_of(inputs: tuple[Array, ...], num_heads: int) -> list[Array]:
    """Return queries, keys and values (batch, heads, length, d), float32 or wider, of the inputs of attention."""
    found: list[Array] = []
    for x, count in zip(inputs, (3,) if len(inputs) == 1 else (1, 2), strict=True):
        split = upcast(x).reshape(*x.shape[:2], count, num_heads, x.shape[2] // (count * num_heads))
        found += list(split.transpose(2, 0, 3, 1, 4))
    return found


def attention_weights(queries: Array, keys: Array, causal: bool) -> Array:
    """Return softmax(Q K^T / sqrt(d)) of heads, (batch, heads, length, other length), 0 where masked."""
    scores = np.matmul(queries, keys.swapaxes(2, 3)) / np.sqrt(queries.dtype.type(queries.shape[3]))
    if causal:
        scores = np.where(np.tri(*scores.shape[2:]) > 0, scores, -np.inf)
    powers = np.exp(scores - scores.max(axis=3, keepdims=True))
    return powers / powers.sum(axis=3, keepdims=True)


def from_heads(*heads: Array) -> Array:
    """Return (batch, heads, length, d) arrays side by side as (batch, length, number of arrays * width)."""
    joined = np.stack(heads).transpose(1, 3, 0, 2, 4)
    return joined.reshape(*joined.shape[:2], -1)


class NormKernels:
    """batchnorm_2d over every axis but 1, layer_norm over the last ones, softmax over any, and attention."""

    def batchnorm_2d_train(
        self, x: Array, scale: Array, bias: Array, *, out: tuple[Array, ...], momentum: float, eps: float
    ) -> None:
        y, mean, inverse_std, running_mean, running_var = out
        rows = channel_rows(x)
        count = rows.shape[0] * rows.shape[2]
        batch_mean = pairwise_sum(rows, (0, 2)) / count
        centred = rows - per_channel(batch_mean)
        batch_var = pairwise_sum(centred * centred, (0, 2)) / count
        mean[...] = batch_mean
        inverse_std[...] = 1 / np.sqrt(batch_var + eps)
        centred *= per_channel(inverse_std) * per_channel(scale)
        centred += per_channel(bias)
        y[...] = centred.reshape(y.shape)
        unbiased = batch_var * (count / max(1, count - 1))
        for running, batch in ((running_mean, batch_mean), (running_var, unbiased)):
            running[...] = (1 - momentum) * upcast(running) + momentum * batch

    def batchnorm_2d_infer(
        self, x: Array, scale: Array, bias: Array, mean: Array, var: Array, *, out: Array, eps: float
    ) -> None:
        factor = upcast(scale) / np.sqrt(upcast(var) + eps)
        shift = upcast(bias) - upcast(mean) * factor
        out[...] = (channel_rows(x) * per_channel(factor) + per_channel(shift)).reshape(out.shape)

    def batchnorm_2d_backward(
        self, dy: Array, x: Array, scale: Array, mean: Array, inverse_std: Array, *, out: tuple[Array, ...]
    ) -> None:
        dx, dscale, dbias = out
        grads, normal = channel_rows(dy), channel_rows(x) - per_channel(mean)
        normal *= per_channel(inverse_std)
        count = grads.shape[0] * grads.shape[2]
        grad_sum = pairwise_sum(grads, (0, 2))
        grad_normal_sum = pairwise_sum(grads * normal, (0, 2))
        dbias[...] = grad_sum
        dscale[...] = grad_normal_sum
        # dx = scale * inverse_std * (dy - mean(dy) - normal * mean(dy * normal))
        normal *= per_channel(-grad_normal_sum / count)
        normal += grads
        normal -= per_channel(grad_sum / count)
        normal *= per_channel(upcast(scale) * upcast(inverse_std))
        dx[...] = normal.reshape(dx.shape)

    def layer_norm(
        self, x: Array, scale: Array, bias: Array, *, out: tuple[Array, Array, Array], eps: float
    ) -> None:
        """(x, scale, bias) -> (y, mean, inverse_std), of the last axes of x, which are those of scale; eps.

        mean, inverse_std: one for each row of these axes, float32 or wider.
        """
        y, mean, inverse_std = out
        rows = upcast(x).reshape(mean.size, scale.size)
        np.mean(rows, axis=1, out=mean.reshape(-1))
        centred = rows - mean.reshape(-1, 1)
        var = np.mean(centred * centred, axis=1)
        inverse_std.reshape(-1)[...] = 1 / np.sqrt(var + eps)
        centred *= inverse_std.reshape(-1, 1)
        y[...] = (centred * upcast(scale).reshape(-1) + upcast(bias).reshape(-1)).reshape(y.shape)

    def layer_norm_backward(
        self,
        dy: Array,
        x: Array,
        scale: Array,
        mean: Array,
        inverse_std: Array,
        *,
        out: tuple[Array, Array, Array],
    ) -> None:
        """(dy, x, scale, mean, inverse_std) -> (dx, dscale, dbias) of layer_norm."""
        dx, dscale, dbias = out
        dys, rows = (upcast(array).reshape(mean.size, scale.size) for array in (dy, x))
        normal = (rows - mean.reshape(-1, 1)) * inverse_std.reshape(-1, 1)
        store(dscale, pairwise_sum(dys * normal, (0,)).reshape(scale.shape))
        store(dbias, pairwise_sum(dys, (0,)).reshape(scale.shape))
        # dx = inverse_std * (g - mean(g) - normal * mean(g * normal)) with g = dy * scale
        grads = dys * upcast(scale).reshape(-1)
        grads -= np.mean(grads, axis=1, keepdims=True) + normal * np.mean(
            grads * normal, axis=1, keepdims=True
        )
        dx[...] = (grads * inverse_std.reshape(-1, 1)).reshape(dx.shape)

    def softmax(self, x: Array, *, out: Array, axis: int) -> None:
        x = upcast(x)
        powers = np.exp(x - x.max(axis=axis, keepdims=True, initial=-np.inf))
        store(out, powers / pairwise_sum(powers, (axis,), keepdims=True))

    def softmax_backward(self, dy: Array, y: Array, *, out: Array, axis: int) -> None:
        dy, y = upcast(dy), upcast(y)
        inner = pairwise_sum(dy * y, (axis,), keepdims=True)
        store(out, y * (dy - inner))

    def attention(self, *inputs: Array, out: Array, num_heads: int, causal: bool) -> None:
        """(qkv (B, T, 3 W)) or (q (B, T, W), kv (B, S, 2 W)) -> y (B, T, W).

        y = probabilities V, probabilities = softmax(Q K^T / sqrt(W / H)); num_heads H, causal: zeros where s > t.
        """
        queries, keys, values = heads_of(inputs, num_heads)
        store(out, from_heads(np.matmul(attention_weights(queries, keys, causal), values)))

    def attention_backward(
        self, dy: Array, *inputs: Array, out: Array | tuple[Array, Array], num_heads: int, causal: bool
    ) -> None:
        """(dy, inputs of attention) -> dqkv or (dq, dkv); num_heads, causal."""
        queries, keys, values = heads_of(inputs, num_heads)
        weights = attention_weights(queries, keys, causal)
        (dys,) = upcast(dy).reshape(*dy.shape[:2], 1, num_heads, -1).transpose(2, 0, 3, 1, 4)
        dweights = np.matmul(dys, values.swapaxes(2, 3))
        dscores = weights * (dweights - np.sum(dweights * weights, axis=3, keepdims=True))
        dscores /= np.sqrt(dscores.dtype.type(queries.shape[3]))
        grads = (
            np.matmul(dscores, keys),
            np.matmul(dscores.swapaxes(2, 3), queries),
            np.matmul(weights.swapaxes(2, 3), dys),
        )
        pairs = [(out[0], grads[:1]), (out[1], grads[1:])] if isinstance(out, tuple) else [(out, grads)]
        for array, part in pairs:
            store(array, from_heads(*part))
