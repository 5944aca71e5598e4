# SPDX-License-Identifier: Apache-2.0
"""bf16: gradients are sent as bfloat16, which has float32's range and needs no scale.

Note [bfloat16 error]: a value is rounded twice, once on its way and once as a mean, each time by at most 2**-8 of
itself. So, up to 256 ranks, a mean is off by at most 2**-7 of the ranks' mean |g| (2**-8 on one rank, where the second
rounding changes nothing), and below 2**-126 by at most 2**-133. Values from 3.396e38 on, which float32 could just hold,
become infinite; so does, as with fp32, a sum over the ranks beyond float32.
"""

from __future__ import annotations

from .buckets import Bucket, BucketedSync, Exchange


class Bf16(BucketedSync):
    """Half the bytes of fp32 and nothing to agree on first, and an eighth of fp16's precision."""

    names = ("bf16",)
    is_recordable = True
    sends, sent_as = ("float32",), "bfloat16"

    def exchange(self, bucket: Bucket) -> Exchange:
        yield self.communicator.all_reduce(bucket.flat, "mean", wire_dtype="bfloat16", name=bucket.name)
