# SPDX-License-Identifier: Apache-2.0
"""Losses: one number per batch, and the gradient times whatever comes from above."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...dtypes import bfloat16
from ...errors import ShapeError
from ..base import Array
from ._accumulation import store, upcast


def check_ids(where: str, ids: Array, classes: int) -> None:
    """Raise ShapeError unless every id names a column."""
    if ids.size and (ids.min() < 0 or ids.max() >= classes):
        raise ShapeError(
            f"{where}: class ids must be in 0..{classes - 1} (x has {classes} columns), "
            f"but the labels range over {ids.min()}..{ids.max()}"
        )


def label_rows(labels: Array, like: Array, where: str) -> Array:
    """Labels as rows that sum to one, in the shape of ``like`` (N, C) and its dtype, float32 or wider."""
    dtype = upcast(like[:0]).dtype
    if labels.ndim == 2:
        rows = labels.astype(dtype)
        total = rows.sum(axis=1, keepdims=True)
        return rows / np.where(total == 0, 1, total)
    check_ids(where, labels, like.shape[1])
    rows = np.zeros(like.shape, dtype)
    rows[np.arange(labels.size), labels] = 1
    return rows


def smallest_normal(dtype: np.dtype[Any]) -> float:
    """Return the smallest normal number > 0 of a float dtype; bfloat16 has float32's."""
    return float(np.finfo(np.float32 if dtype == bfloat16 else dtype).tiny)


class LossKernels:
    """Cross entropies and the mean squared error."""

    def softmax_cross_entropy(self, x: Array, labels: Array, *, out: tuple[Array, Array]) -> None:
        loss, probabilities = out
        rows = label_rows(labels, x, "softmax_cross_entropy")
        shifted = upcast(x)
        shifted = shifted - shifted.max(axis=1, keepdims=True)
        powers = np.exp(shifted)
        total = powers.sum(axis=1, keepdims=True)
        store(probabilities, powers / total)
        # where a label is 0, a logit of -inf must not make 0 * inf
        terms = np.where(rows == 0, 0, rows * (shifted - np.log(total)))
        loss[...] = -terms.sum() / x.shape[0]

    def softmax_cross_entropy_backward(
        self, dy: Array, probabilities: Array, labels: Array, *, out: Array
    ) -> None:
        rows = label_rows(labels, probabilities, "softmax_cross_entropy")
        dx = upcast(probabilities) * rows.sum(axis=1, keepdims=True)
        dx -= rows
        dx *= upcast(dy).reshape(()) / dx.shape[0]
        out[...] = dx

    def cross_entropy(self, probabilities: Array, labels: Array, *, out: Array) -> None:
        rows = label_rows(labels, probabilities, "cross_entropy")
        smallest = smallest_normal(probabilities.dtype)  # a probability of 0 costs log(tiny), not infinity
        out[...] = (
            -(rows * np.log(np.maximum(upcast(probabilities), smallest))).sum() / probabilities.shape[0]
        )

    def cross_entropy_backward(self, dy: Array, probabilities: Array, labels: Array, *, out: Array) -> None:
        rows = label_rows(labels, probabilities, "cross_entropy")
        smallest = smallest_normal(probabilities.dtype)
        rows /= np.maximum(upcast(probabilities), smallest)
        rows *= -upcast(dy).reshape(()) / rows.shape[0]
        out[...] = rows

    def mse_loss(self, x: Array, t: Array, *, out: Array) -> None:
        errors = (upcast(x) - upcast(t)).reshape(-1)
        out[...] = np.dot(errors, errors) / errors.size

    def mse_loss_backward(self, dy: Array, x: Array, t: Array, *, out: Array) -> None:
        errors = upcast(x) - upcast(t)
        errors *= upcast(dy).reshape(()) * (2 / errors.size)
        out[...] = errors
