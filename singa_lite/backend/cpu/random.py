# SPDX-License-Identifier: Apache-2.0
"""Random kernels: Philox keyed by (seed, counter), so a number depends on nothing else.

Source: Salmon, Moraes, Dror, Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", 2011.
"""

from __future__ import annotations

import numpy as np

from ..base import Array
from ._accumulation import accumulation_dtype


def generator(seed: int, counter: int) -> np.random.Generator:
    """Return the stream of one call; (seed, counter) is the whole 128-bit key, so two calls never overlap."""
    key = np.array([seed % 2**64, counter % 2**64], np.uint64)
    return np.random.Generator(np.random.Philox(key=key))


def uniform(shape: tuple[int, ...], dtype: np.dtype, seed: int, counter: int) -> Array:
    """Numbers in [0, 1) of ``dtype``, float16 drawn as float32."""
    return generator(seed, counter).random(shape, accumulation_dtype(dtype))


class RandomKernels:
    """Dropout and the fillers."""

    def dropout(self, x: Array, *, out: tuple[Array, Array], ratio: float, seed: int, counter: int) -> None:
        y, mask = out
        # float32 draws for every dtype: the mask of a float16 and a float64 run are the same
        np.greater_equal(uniform(x.shape, np.dtype(np.float32), seed, counter), ratio, out=mask)
        np.multiply(x, mask, out=y)
        y *= y.dtype.type(1 / (1 - ratio))

    def dropout_backward(self, dy: Array, mask: Array, *, out: Array, ratio: float) -> None:
        np.multiply(dy, mask, out=out)
        np.multiply(out, out.dtype.type(1 / (1 - ratio)), out=out)

    def random_uniform(self, *, out: Array, low: float, high: float, seed: int, counter: int) -> None:
        values = uniform(out.shape, out.dtype, seed, counter)
        values *= high - low
        values += low
        out[...] = values

    def random_normal(self, *, out: Array, mean: float, std: float, seed: int, counter: int) -> None:
        values = generator(seed, counter).standard_normal(out.shape, accumulation_dtype(out.dtype))
        values *= std
        values += mean
        out[...] = values

    def random_bernoulli(self, *, out: Array, p: float, seed: int, counter: int) -> None:
        out[...] = uniform(out.shape, np.dtype(np.float32), seed, counter) < p
