# SPDX-License-Identifier: Apache-2.0
"""Sums whose bits do not depend on the number of ranks: DistOpt(order="fixed"); no dist_option of its own.

Note [fixed order]: a global batch is a power of two of microbatches, numbered in the order of the samples. Their
gradients are the leaves of a binary tree of sums: neighbours first, then neighbouring sums. A rank has neighbouring
leaves, so its own sum is a node (opt/fixed_order.py), and the nodes above it are made here: at each level by an
all-reduce of two ranks, which adds two numbers, in either order with the same bits. On the wire as bfloat16 every leaf
and every sum is rounded, wherever it is made.
"""

from __future__ import annotations

from typing import Any

from ..comm.base import Communicator
from ..comm.work import uncounted
from ..errors import DTypeError
from ..graph.recorder import bookkeep, unrecorded
from ..tensor import Tensor
from .base import scale_in_place
from .buckets import Bucket, BucketedSync, Exchange
from .step_groups import StepGroups

WIRE_DTYPES = {"fp32": None, "bf16": "bfloat16"}  # by dist_option; None: their own


class FixedOrder(BucketedSync):
    """The mean over microbatches by sums in a fixed order, see Note [fixed order]; DistOpt sets the attributes."""

    is_recordable = True
    wire_dtype: str | None = None  # what values are sent as, of WIRE_DTYPES
    num_microbatches = 1  # of all ranks, whose gradients the sums have together

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._pairs_of_ranks: list[Communicator] | None = None  # a group of two a level, the lowest first

    def check(self, bucket: Bucket) -> None:
        if bucket.dtype != "float32" and (bucket.dtype != "float64" or self.wire_dtype):
            raise DTypeError(
                f"order='fixed': {bucket.key} is {bucket.dtype}; only float32 gradients are summed in fixed order"
            )

    def exchange(self, bucket: Bucket) -> Exchange:
        if self._pairs_of_ranks is None:
            with unrecorded(), uncounted(self.communicator):
                self._pairs_of_ranks = self._make_groups()
        for group in self._pairs_of_ranks:
            yield group.all_reduce(bucket.flat, "sum", wire_dtype=self.wire_dtype, name=bucket.name)
        scale_in_place(bucket.backend, bucket.flat, 1.0 / self.num_microbatches)

    def _make_groups(self) -> list[Communicator]:
        size, rank, groups = self.communicator.size, self.communicator.rank, list[Communicator]()
        if size == 2:
            return [self.communicator]
        level = 1
        while level < size:
            for low in (each for each in range(size) if not each & level):
                group = self.communicator.new_group([low, low | level], name=f"level {level} of rank {low}")
                if rank & ~level == low:
                    assert group is not None
                    groups.append(group)
            level *= 2
        self.groups = StepGroups(self.communicator, groups)
        return groups

    def after_update(self, params: list[Tensor]) -> None:
        if self.groups is not None:
            bookkeep(self.groups.count)
