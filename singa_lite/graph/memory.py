# SPDX-License-Identifier: Apache-2.0
"""Where the arrays of a step are, without keeping them alive.

What lives here: numpy's and cupy's arrays as pieces of memory. What does not: the calls that use them (nodes.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..dtypes import bfloat16

Array = Any  # numpy.ndarray, or cupy.ndarray, which has the same attributes


class Memory:
    """A piece of memory that arrays of a step are views of; compared by identity.

    Attributes:
        num_bytes: its size.
        owner: the array to use at every replay; None for memory that only the step itself needs, which then gets a
            part of the arena.
        version: raised by every node of the tape that writes to it; 0: it holds nothing yet.
    """

    __slots__ = ("num_bytes", "owner", "version")

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.owner: Array = None
        self.version = 0


@dataclass(frozen=True)
class View:
    """An array of a step, as a view of a Memory."""

    memory: Memory
    offset: int  # of its first byte
    shape: tuple[int, ...]
    dtype: Any  # numpy's
    strides: tuple[int, ...]  # in bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * int(self.dtype.itemsize)

    @property
    def is_row_major(self) -> bool:
        """Whether it is in row-major order, at a multiple of its elements' size: compiled kernels take no other."""
        strides = zip(row_major(self.shape, self.dtype), self.strides, self.shape, strict=True)
        return self.offset % self.dtype.itemsize == 0 and all(a == b or n == 1 for a, b, n in strides)

    @property
    def is_whole(self) -> bool:
        """Whether it is all of its memory, in row-major order."""
        return self.offset == 0 and self.num_bytes == self.memory.num_bytes and self.is_row_major


def row_major(shape: tuple[int, ...], dtype: Any) -> tuple[int, ...]:
    """Return the strides of a row-major array, in bytes."""
    strides, stride = [], dtype.itemsize
    for length in reversed(shape):
        strides.append(stride)
        stride *= length
    return tuple(reversed(strides))


def root_of(array: Array) -> Array:
    """Return the array that owns the memory of ``array``."""
    while hasattr(base := array.base, "base"):  # a base that is not an array lacks it: bytes, a capsule, None
        array = base
    return array


def address_of(array: Array) -> int:
    """Return the address of the first byte."""
    return int(array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr)


def view_of(owner: Array, view: View) -> Array:
    """Return the array that ``view`` describes, in the memory of ``owner``."""
    if isinstance(owner, np.ndarray):
        if owner.dtype == bfloat16:  # which has no buffer for numpy
            owner = owner.view(np.uint16)
        return np.ndarray(view.shape, view.dtype, owner, view.offset, view.strides)  # type: ignore[arg-type]
    return type(owner)(view.shape, view.dtype, owner.data + view.offset, view.strides)
