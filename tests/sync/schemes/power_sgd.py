# SPDX-License-Identifier: Apache-2.0
"""PowerSGD: matrices are sent as the product of two of rank 2, with error feedback (Vogels et al., 2019)."""

import math
import zlib

import numpy as np

from .base import BucketedSync
from .state import Slot

RANK = 2


class Factor(Slot):
    """Q of a matrix, (columns, RANK); what is no matrix has none."""

    def shape(self, param):
        return (math.prod(param.shape[1:]), RANK) if param.ndim() > 1 else (0,)

    def start(self, param):
        return np.random.default_rng(zlib.crc32(param.name.encode())).standard_normal(self.shape(param))


class PowerSgd(BucketedSync):
    """P = mean(M Q) with orthonormal columns, Q = mean(M^T P), M = gradient + error; the result is P Q^T."""

    names = ("powerSGD",)
    slots = {"error": Slot(), "q": Factor()}  # noqa: RUF012

    def exchange(self, bucket):
        run, empty = bucket.backend.run, lambda *shape: bucket.backend.empty(shape, bucket.dtype)
        run("add", bucket.flat, self.state.of(bucket)[0], out=bucket.flat)
        errors, qs = zip(*(self.state.views(bucket, p) for p in bucket.params if p.ndim() > 1), strict=True)
        ms = [m.reshape(len(m), -1) for _, m in bucket.views(bucket.flat) if m.ndim > 1]
        ps = [empty(RANK, len(m)) for m in ms]
        for m, q, p in zip(ms, qs, ps, strict=True):
            run("matmul", q, m, out=p, transpose_a=True, transpose_b=True)
        yield from self._mean(bucket, [*ps, *(m for _, m in bucket.views(bucket.flat) if m.ndim == 1)])
        for m, q, p, error in zip(ms, qs, ps, errors, strict=True):
            self._orthonormalise(run, p, empty(p.shape[1]), empty(1), empty(1))
            run("matmul", m, p, out=q, transpose_a=True, transpose_b=True)
            run("matmul", p, q, out=(product := empty(*m.shape)), transpose_a=True, transpose_b=True)
            run("sub", m, product, out=error.reshape(m.shape))  # what this rank's own factors miss
        yield from self._mean(bucket, qs)
        for m, q, p in zip(ms, qs, ps, strict=True):
            run("matmul", p, q, out=m, transpose_a=True, transpose_b=True)

    def _mean(self, bucket, arrays):
        flat = bucket.backend.empty((sum(array.size for array in arrays),), bucket.dtype)
        bucket.backend.run("pack", *arrays, out=flat)
        yield self.communicator.all_reduce(flat, "mean", name=bucket.name)
        bucket.backend.run("unpack", flat, out=tuple(arrays))

    def _orthonormalise(self, run, rows, scratch, number, norm):
        for i, j in ((0, 0), (1, 0), (1, 0), (1, 1)):  # Gram-Schmidt, with a second pass against rounding
            run("mul", rows[i], rows[j], out=scratch)
            run("sum", scratch, out=number, axes=(0,), keepdims=True)
            run(*("mul", rows[j], number) if j < i else ("sqrt", number), out=scratch if j < i else norm)
            run(*("sub", rows[i], scratch) if j < i else ("div", rows[i], norm), out=rows[i])
