# SPDX-License-Identifier: Apache-2.0
"""How the numpy kernels accumulate: float16 and bfloat16 in float32, wider types as they are; pairwise sums."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from ...dtypes import accumulation_dtype, bfloat16, is_narrow
from ..base import Array


def upcast(x: Array) -> Array:
    """Return ``x`` itself, or a float32 copy of a float16 or bfloat16 array."""
    return x.astype(np.float32) if is_narrow(x.dtype) else x


def upcast_beside(x: Array, w: Array) -> Array:
    """Return ``upcast(w)``, rounded to the dtype of ``x`` before where only that is float16 or bfloat16."""
    return upcast(w.astype(x.dtype) if is_narrow(x.dtype) else w)


def store(out: Array, values: Array) -> None:
    """Write ``values`` to ``out``, rounded to nearest even; never a float to an integer array."""
    is_bfloat16 = out.dtype == bfloat16 and values.dtype.kind == "f"  # which numpy casts as "unsafe" alone
    np.copyto(out, values, casting="unsafe" if is_bfloat16 else "same_kind")


def pairwise_sum(x: Array, axes: Sequence[int], keepdims: bool = False) -> Array:
    """Sum a row-major array over axes, in blocks whose sums are summed in blocks, and so on.

    numpy sums pairwise along the last axis only: along the first, 200,000 float32 values lose 8 of 24 bits.

    Args:
        x: any array.
        axes: which to sum; negative counts from the end.
        keepdims: whether they stay with size 1.

    Returns:
        The sums, float32 or wider.
    """
    summed = {axis % x.ndim for axis in axes}
    kept = tuple(n for axis, n in enumerate(x.shape) if axis not in summed)
    total, shape = x.astype(accumulation_dtype(x.dtype), copy=False), list(x.shape)
    last = x.ndim
    while last:  # adjacent axes at once, the last ones first
        first = last
        while first and (first - 1) in summed:
            first -= 1
        if first < last:
            sizes = prod(shape[:first]), prod(shape[first:last]), prod(shape[last:])
            total = _sum_middle(total.reshape(sizes))
            shape[first:last] = [1] * (last - first)
        last = max(first - 1, 0)
    return total.reshape(shape if keepdims else kept)


def _sum_middle(x: Array) -> Array:
    """(before, count, after) -> (before, after), pairwise over blocks."""
    before, count, after = x.shape
    if after == 1:
        return np.sum(x.reshape(before, count), axis=1, dtype=x.dtype).reshape(before, 1)
    while count > 16:
        block = 16 if count <= 4096 else 64  # added up one after the other: twice PyTorch's error at most
        blocks = count // block
        whole = x[:, : blocks * block].reshape(before, blocks, block, after)
        sums = [np.sum(whole, axis=2, dtype=x.dtype)]
        if count > blocks * block:
            sums.append(np.sum(x[:, blocks * block :], axis=1, dtype=x.dtype, keepdims=True))
        x = np.concatenate(sums, axis=1) if len(sums) > 1 else sums[0]
        count = x.shape[1]
    return np.sum(x, axis=1, dtype=x.dtype)
