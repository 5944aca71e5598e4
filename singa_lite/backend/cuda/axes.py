# SPDX-License-Identifier: Apache-2.0
"""Shapes as kernels take them: axes from the innermost, joined where elements follow each other in every array."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np

from ...errors import ShapeError
from .launch import by_value

LOAD = 16  # bytes that a thread reads at once at most
MAX_AXES = 8  # of Broadcast in common.cuh and Axes in reduce.cu, after joining
Strides = tuple[int, ...]


def strides_of(shape: Sequence[int], ndim: int | None = None) -> Strides:
    """Strides in elements of a row-major array; 0 for axes of size 1, and for those before it up to ``ndim``."""
    strides = tuple(0 if n == 1 else prod(shape[axis + 1 :]) for axis, n in enumerate(shape))
    return (0,) * ((len(shape) if ndim is None else ndim) - len(shape)) + strides


def joined(shape: Sequence[int], *strides: Strides) -> tuple[list[int], list[list[int]]]:
    """Axes from the innermost, adjacent ones joined where that changes no offset; at least one axis."""
    sizes: list[int] = []
    steps: list[list[int]] = [[] for _ in strides]
    for axis in reversed(range(len(shape))):
        if shape[axis] == 1:
            continue
        pairs = [(stride[axis], step) for stride, step in zip(strides, steps, strict=True)]
        if sizes and all(stride == step[-1] * sizes[-1] for stride, step in pairs):
            sizes[-1] *= shape[axis]
            continue
        sizes.append(shape[axis])
        for stride, step in pairs:
            step.append(stride)
    if len(sizes) > MAX_AXES:
        raise ShapeError(f"CUDA: shape {tuple(shape)} has more than {MAX_AXES} axes that cannot be joined")
    return sizes or [1], [step or [0] for step in steps]


def _packed(ndim: int, *lists: list[int]) -> np.ndarray[Any, Any]:
    numbers = [number for part in lists for number in (*part, *(0,) * (MAX_AXES - len(part)))]
    return by_value((ndim, *numbers), 8 * (1 + MAX_AXES * len(lists)))


@lru_cache(4096)
def broadcast(shape: tuple[int, ...], a: tuple[int, ...], b: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Return the structure Broadcast of arrays of shapes ``a`` and ``b`` that give ``shape``."""
    return strided(shape, strides_of(a, len(shape)), strides_of(b, len(shape)))


@lru_cache(4096)
def strided(shape: tuple[int, ...], a: Strides, b: Strides) -> np.ndarray[Any, Any]:
    """Return the same for given strides."""
    sizes, (a_steps, b_steps) = joined(shape, a, b)
    return _packed(len(sizes), sizes, a_steps, b_steps)


def are_loads(shape: Sequence[int], itemsize: int, *strides: Strides) -> bool:
    """Return whether arrays of those strides, in bytes, are made of runs of LOAD bytes along the last axis."""
    if not shape or itemsize * shape[-1] % LOAD or any(given[-1] != itemsize for given in strides):
        return False
    return not any(stride % LOAD for given in strides for stride in given[:-1])


@lru_cache(4096)
def reduction(shape: tuple[int, ...], axes: tuple[int, ...]) -> tuple[int, int, bool, Any, Any]:
    """Return how to reduce ``axes`` of ``shape``.

    Returns:
        (elements of out, elements reduced into each, whether adjacent elements are kept apart, and the structures
        Axes of the axes that stay and of those that go).
    """
    gone = {axis % len(shape) for axis in axes}
    strides = strides_of(shape)
    parts = []
    for wanted in (False, True):
        chosen = [axis for axis in range(len(shape)) if (axis in gone) == wanted]
        sizes, (steps,) = joined([shape[i] for i in chosen], tuple(strides[i] for i in chosen))
        parts.append((prod(shape[i] for i in chosen), steps[0], _packed(len(sizes), sizes, steps)))
    (outs, kept_step, kept), (length, _, reduced) = parts
    return outs, length, kept_step == 1, kept, reduced
