# SPDX-License-Identifier: Apache-2.0
"""PowerSGD in its shortest form: matrices travel as two of rank 2, with error feedback (Vogels et al., 2019)."""

import math
from types import MappingProxyType

import numpy as np

from .buckets import BucketedSync
from .power_sgd import seed_of
from .state import Slot

RANK = 2


class Factor(Slot):
    """Q of a matrix, (RANK, columns); what is no matrix has none."""

    def shape(self, param):
        return (RANK, math.prod(param.shape[1:])) if param.ndim() > 1 else (0,)

    def start(self, param):
        return np.random.default_rng(seed_of(param)).standard_normal(self.shape(param))


class ShortPowerSgd(BucketedSync):
    """P = mean(M Q) with orthonormal columns, Q = mean(M^T P), M = gradient + error; the result is P Q^T."""

    names = ("shortPowerSGD",)
    is_recordable = True
    slots = MappingProxyType({"error": Slot(), "q": Factor()})

    def exchange(self, bucket):
        run, empty = bucket.backend.run, lambda *shape: bucket.backend.empty(shape, bucket.dtype)
        run("add", bucket.flat, self.state.of(bucket)[0], out=bucket.flat)
        errors, qs = zip(*(self.state.views(bucket, p) for p in bucket.params if p.ndim() > 1), strict=True)
        ms = [m.reshape(len(m), -1) for _, m in bucket.views(bucket.flat) if m.ndim > 1]
        ps = [empty(RANK, len(m)) for m in ms]
        for m, q, p in zip(ms, qs, ps, strict=True):
            run("matmul", q, m, out=p, transpose_b=True)
        yield from self._mean(bucket, [*ps, *(m for _, m in bucket.views(bucket.flat) if m.ndim == 1)])
        for m, q, p, error in zip(ms, qs, ps, errors, strict=True):
            for i, j in ((0, 0), (1, 0), (1, 0), (1, 1)):  # Gram-Schmidt, with a second pass against rounding
                run("mul", p[i], p[j], out=(scratch := empty(len(m))))
                run("sum", scratch, out=(number := empty(1)), axes=(0,), keepdims=True)
                run(*("mul", p[j], number) if j < i else ("sqrt", number), out=scratch if j < i else number)
                run(*("sub", p[i], scratch) if j < i else ("div", p[i], number), out=p[i])
            run("matmul", p, m, out=q)
            run("matmul", p, q, out=(product := empty(*m.shape)), transpose_a=True)
            run("sub", m, product, out=error.reshape(m.shape))  # what this rank's own factors miss
        yield from self._mean(bucket, qs)
        for m, q, p in zip(ms, qs, ps, strict=True):
            run("matmul", p, q, out=m, transpose_a=True)

    def _mean(self, bucket, arrays):
        flat = bucket.backend.empty((sum(array.size for array in arrays),), bucket.dtype)
        bucket.backend.run("pack", *arrays, out=flat)
        yield self.communicator.all_reduce(flat, "mean", name=bucket.name)
        bucket.backend.run("unpack", flat, out=tuple(arrays))
