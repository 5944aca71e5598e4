# SPDX-License-Identifier: Apache-2.0
"""fp32: every gradient is sent in its own dtype and is averaged."""

from __future__ import annotations

from .buckets import Bucket, BucketedSync, Exchange


class Fp32(BucketedSync):
    """Plain averaging: N ranks of batch B take the step of one rank of batch N*B."""

    names = ("fp32", "plain")
    is_recordable = True
    changes_one_rank = False

    def exchange(self, bucket: Bucket) -> Exchange:
        yield self.communicator.all_reduce(bucket.flat, "mean", name=bucket.name)
