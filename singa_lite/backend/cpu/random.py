# SPDX-License-Identifier: Apache-2.0
"""Random kernels: Philox keyed by (seed, counter), so a number depends on nothing else.

Source: Salmon, Moraes, Dror, Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", 2011.
"""

from __future__ import annotations

import numpy as np

from ...dtypes import accumulation_dtype, is_narrow, largest_below
from ..base import Array
from ._accumulation import store, upcast


def generator(seed: int, counter: int) -> np.random.Generator:
    """Return the stream of one call; (seed, counter) is the whole 128-bit key, so two calls never overlap."""
    key = np.array([seed % 2**64, counter % 2**64], np.uint64)
    return np.random.Generator(np.random.Philox(key=key))


def uniform(shape: tuple[int, ...], dtype: np.dtype, seed: int, counter: int) -> Array:
    """Numbers in [0, 1) of ``dtype``, float16 drawn as float32."""
    return generator(seed, counter).random(shape, accumulation_dtype(dtype))


GOLDEN = 0x9E3779B97F4A7C15  # 2**64 over the golden ratio, as splitmix64 adds


def mix(words: Array) -> Array:
    """Return 64-bit words mixed by the end of splitmix64.

    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014.
    """
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def permuted(indices: Array, n: int, seed: int, counter: int) -> Array:
    """Return where a permutation of 0 .. n - 1 moves ``indices``, uint64.

    Four rounds of a Feistel network permute 0 .. 4**half - 1, the least such range with n numbers; what is not below n
    is permuted again, so those below n are permuted among themselves.
    Source: Black, Rogaway, "Ciphers with arbitrary finite domains", 2002.
    """
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    mask, start = np.uint64((1 << half) - 1), (seed % 2**64) ^ (counter * GOLDEN % 2**64)
    keys = [mix(np.array([(start + number * GOLDEN) % 2**64], np.uint64)) for number in range(1, 5)]
    found, outside = indices.astype(np.uint64), np.arange(indices.size)
    while outside.size:
        left, right = found[outside] >> np.uint64(half), found[outside] & mask
        for key in keys:
            left, right = right, left ^ (mix(right ^ key) & mask)
        found[outside] = left << np.uint64(half) | right
        outside = outside[found[outside] >= n]
    return found


def _keep(x: Array, mask: Array, ratio: float, out: Array) -> None:
    """Write x / (1 - ratio) where ``mask`` is, else 0."""
    if is_narrow(out.dtype):
        store(out, upcast(x) * mask * np.float32(1 / (1 - ratio)))
        return
    np.multiply(x, mask, out=out)
    out *= out.dtype.type(1 / (1 - ratio))


class RandomKernels:
    """Dropout, the fillers, and a random choice of indices."""

    def random_indices(self, *, out: Array, n: int, seed: int, counter: int) -> None:
        out[...] = permuted(np.arange(out.size), n, seed, counter)

    def dropout(self, x: Array, *, out: tuple[Array, Array], ratio: float, seed: int, counter: int) -> None:
        y, mask = out
        # float32 draws for every dtype: the mask of a float16 and a float64 run are the same
        np.greater_equal(uniform(x.shape, np.dtype(np.float32), seed, counter), ratio, out=mask)
        _keep(x, mask, ratio, y)

    def dropout_backward(self, dy: Array, mask: Array, *, out: Array, ratio: float) -> None:
        _keep(dy, mask, ratio, out)

    def random_uniform(self, *, out: Array, low: float, high: float, seed: int, counter: int) -> None:
        values = uniform(out.shape, out.dtype, seed, counter)
        values *= high - low
        values += low
        last = np.full(1, 1 - np.finfo(values.dtype).epsneg, values.dtype)  # the largest that is drawn
        last *= high - low
        last += low
        if last.astype(out.dtype)[0] >= high:  # it is rounded up to high, which is not in the range
            np.minimum(values, max(low, largest_below(high, out.dtype)), out=values)
        out[...] = values

    def random_normal(self, *, out: Array, mean: float, std: float, seed: int, counter: int) -> None:
        values = generator(seed, counter).standard_normal(out.shape, accumulation_dtype(out.dtype))
        values *= std
        values += mean
        out[...] = values

    def random_bernoulli(self, *, out: Array, p: float, seed: int, counter: int) -> None:
        out[...] = uniform(out.shape, np.dtype(np.float32), seed, counter) < p
