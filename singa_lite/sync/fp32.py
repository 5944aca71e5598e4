# SPDX-License-Identifier: Apache-2.0
"""fp32: every gradient travels in its own dtype and is averaged."""

from __future__ import annotations

from collections.abc import Iterator

from ..comm.base import Work
from .base import Bucket, BucketedSync


class Fp32(BucketedSync):
    """Plain averaging: N ranks of batch B take the step of one rank of batch N*B."""

    names = ("fp32", "plain")

    def exchange(self, bucket: Bucket) -> Iterator[Work]:
        yield self.send(self.communicator.all_reduce(bucket.flat, "mean", name=bucket.name))
