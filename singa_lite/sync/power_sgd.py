# SPDX-License-Identifier: Apache-2.0
"""powerSGD: matrices travel as products of two narrow ones.

Note [low rank]: a gradient plus what was not sent before is a matrix M, shape (rows, columns), rows the parameter's
first axis. With Q, shape (rank, columns), of the step before, the ranks average P = Q M^T, orthonormalise its rows,
average Q = P M, and apply P^T Q; each keeps M - P^T Q by its own Q. Both are sums, so bytes don't grow with the number
of ranks. What all compute for themselves (the orthonormal rows, the product) are kernels with one order of sums, not a
library's, which may choose another on another host.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from ..errors import OptionError, check_int, check_number
from ..tensor import Tensor
from .base import Array
from .buckets import Bucket, BucketedSync, Exchange
from .state import Slot

MAX_RANK = 32  # rows of Q that are kept; more save too few bytes to be worth their arithmetic
DROPPED = 1e-12  # share of its squared length below which a row of P is rounding alone


class Factor(Slot):
    """Q of a matrix, (rows, columns); empty for a parameter of one axis."""

    def shape(self, param: Tensor) -> tuple[int, ...]:
        rows, columns = matrix_shape(param.shape)
        return (min(rows, columns, MAX_RANK), columns) if param.ndim() > 1 else (0,)

    def start(self, param: Tensor) -> np.ndarray:
        return np.random.default_rng(seed_of(param)).standard_normal(self.shape(param))


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the shape of a parameter as a matrix: its first axis, and all others as one."""
    return (shape[0], math.prod(shape[1:])) if shape else (1, 1)


def seed_of(param: Tensor) -> int:
    """Return a number that belongs to the shape of ``param``, equal on all ranks; a name can change on one."""
    return zlib.crc32(repr(param.shape).encode())


class Matrix(NamedTuple):
    """A gradient that is sent as P and Q."""

    param: Tensor
    m: Array  # gradient and residual, (rows, columns), in the bucket
    p: Array  # (rank, rows)
    q: Array  # (rank, columns), in the state
    error: Array  # the residual, (rows, columns), in the state


class PowerSgd(BucketedSync):
    """The best product of ``rank`` columns and rows that one power iteration a step finds, see Note [low rank].

    Vectors, and matrices that would save too little, travel as they are in the message of P; so do all of a bucket of
    float16.

    Source: Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression", 2019.
    """

    names = ("powerSGD",)
    is_recordable = True
    slots = MappingProxyType({"error": Slot(), "q": Factor()})

    @dataclass(frozen=True)
    class Options:
        """Options of powerSGD.

        Attributes:
            rank: rows of P and Q, 1 .. 32; at most the rows and columns of a matrix.
            rate: a matrix is sent as P and Q if these have more than ``rate`` times fewer elements, >= 0.
            feedback: keep what was not sent and add it to the next step's gradient; False drops it.
            warm_start: begin with the Q of the step before; False with random numbers.
        """

        rank: int = 4
        rate: float = 2.0
        feedback: bool = True
        warm_start: bool = True

        def __post_init__(self) -> None:
            if check_int("powerSGD", "rank", self.rank, 1) > MAX_RANK:
                raise OptionError(f"powerSGD: rank = {self.rank} must be <= {MAX_RANK}")
            check_number("powerSGD", "rate", self.rate, 0)

    def exchange(self, bucket: Bucket) -> Exchange:
        run = bucket.backend.run
        if bucket.dtype == "float16":
            yield self.communicator.all_reduce(bucket.flat, "mean", name=bucket.name)
            return
        if self.options.feedback:
            run("add", bucket.flat, self.state.of(bucket)[0], out=bucket.flat)
        matrices, dense = self._split(bucket)
        for _, m, p, q, _ in matrices:
            run("matmul", q, m, out=p, transpose_b=True)
        yield from self._mean(bucket, [*(matrix.p for matrix in matrices), *dense])
        matrices = [self._multiply(bucket, matrix) for matrix in matrices]
        yield from self._mean(bucket, [matrix.q for matrix in matrices])
        for matrix in matrices:
            self._expand(bucket, matrix)

    def _split(self, bucket: Bucket) -> tuple[list[Matrix], list[Array]]:
        """Return what is sent as P and Q, and what is sent as it is."""
        matrices, dense = [], []
        self.state.of(bucket)
        for param, view in bucket.views(bucket.flat):
            rows, columns = matrix_shape(param.shape)
            rank = min(self.options.rank, rows, columns)
            error, q = self.state.views(bucket, param)
            if param.ndim() < 2 or rank * (rows + columns) * self.options.rate >= rows * columns:
                # another rank or rate left it, and it is sent now
                if param.ndim() > 1 and self.options.feedback:
                    bucket.backend.run("fill", out=error, value=0.0)
                dense.append(view)
                continue
            p = bucket.backend.empty((rank, rows), bucket.dtype)
            m, error = (array.reshape(rows, columns) for array in (view, error))
            matrices.append(Matrix(param, m, p, q[:rank], error))
        return matrices, dense

    def _mean(self, bucket: Bucket, arrays: list[Array]) -> Exchange:
        """Replace ``arrays`` by their means over the ranks, as one message."""
        if arrays:
            flat = bucket.backend.empty((sum(array.size for array in arrays),), bucket.dtype)
            bucket.backend.run("pack", *arrays, out=flat)
            yield self.communicator.all_reduce(flat, "mean", name=bucket.name)
            bucket.backend.run("unpack", flat, out=tuple(arrays))

    def _multiply(self, bucket: Bucket, matrix: Matrix) -> Matrix:
        """Set Q to P M with P orthonormalised, keep what they miss of M, and return the matrix with that P."""
        run, (_, m, p, q, error) = bucket.backend.run, matrix
        orthonormal = bucket.backend.empty(p.shape, bucket.dtype)
        run("orthonormal_rows", p, out=orthonormal, dropped=DROPPED)
        run("matmul", orthonormal, m, out=q)
        if self.options.feedback:
            run("low_rank_rest", m, orthonormal, q, out=error)
        return matrix._replace(p=orthonormal)

    def _expand(self, bucket: Bucket, matrix: Matrix) -> None:
        """Write P^T Q into the bucket, and make Q what the next step begins with."""
        run, (param, m, p, q, _) = bucket.backend.run, matrix
        run("low_rank_sum", p, q, out=m)
        following = bucket.backend.empty(q.shape, bucket.dtype)
        stream = {"seed": seed_of(param), "counter": self.scalar(lambda step: step.step)}
        if self.options.warm_start:
            # rows of length 1 keep P in the range of M. A row of P that was rounding alone became 0, and Q's with it,
            # which would stay 0: it is drawn again
            run("unit_rows", q, out=following, **stream)
        else:
            run("random_normal", out=following, mean=0.0, std=1.0, **stream)
        run("copy", following, out=q)
