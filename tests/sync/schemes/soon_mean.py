# SPDX-License-Identifier: Apache-2.0
"""The mean over the ranks by an exchange that has ended before the last gradient is there; alone it yields nothing."""

from __future__ import annotations

from .buckets import Bucket, BucketedSync, Exchange, Soon


class SoonMean(BucketedSync):
    """The mean, waited for as soon as the next bucket is packed."""

    names = ("soonMean",)
    is_recordable = True

    def exchange(self, bucket: Bucket) -> Exchange:
        if not self.communicator.is_alone:
            yield Soon(self.communicator.all_reduce(bucket.flat, "mean", name=bucket.name))
