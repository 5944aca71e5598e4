# SPDX-License-Identifier: Apache-2.0
"""fp16: gradients are sent as half-precision numbers, scaled so that neither sums overflow nor small ones vanish.

Note [half scale]: float16 holds 2**-14 .. 65504 with a relative error of 2**-11. Every bucket is multiplied
by one power of two s as it is rounded for the wire, the largest with N * max|g| * s <= 65504 over all ranks, and
divided by it as it is widened again; both are exact. A value is rounded twice, once on its way and once as a mean, so
elements of at least N * 2**-27 of the bucket's largest keep a relative error below 1e-3; smaller ones an absolute one.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..backend.base import Backend
from ..comm.base import Communicator, ReduceOp
from ..comm.work import Work
from ..errors import DTypeError, OptionError, check_number
from .base import Array
from .buckets import Bucket, BucketedSync, Exchange, Soon

HALF_MAX = 65504.0  # the largest finite float16


class HalfMessage:
    """One flat float32 array, shape (n,), on its way through float16; replaced by the mean or the sum."""

    def __init__(self, communicator: Communicator, backend: Backend, flat: Array, name: str) -> None:
        if flat.dtype != "float32":
            raise DTypeError(f"fp16: {name} is {flat.dtype}; only float32 values are rounded to float16")
        self.communicator, self.backend, self.flat, self.name = communicator, backend, flat, name
        self._largest = backend.empty((1,), "float32")

    def measure(self) -> Work:
        """Start to agree on the largest magnitude of all ranks."""
        self.backend.run("max_abs", self.flat, out=self._largest)
        return self.communicator.all_reduce(self._largest, "max", name=f"largest of {self.name}")

    def send(self, op: ReduceOp) -> Work:
        """Start to send the values, scaled; ``measure`` must have ended."""
        scale = self.backend.empty((1,), "float32")
        limit = HALF_MAX / self.communicator.size
        self.backend.run("power_of_two_scale", self._largest, out=scale, limit=limit)
        return self.communicator.all_reduce(
            self.flat, op, wire_dtype="float16", wire_scale=scale, name=self.name
        )


class Fp16(BucketedSync):
    """Half the bytes of fp32, see Note [half scale]; float16 gradients are sent as they are. SINGA's sums overflow."""

    names = ("fp16", "half")
    is_recordable = True
    sends, sent_as = ("float32", "float16"), "float16"

    @dataclass(frozen=True)
    class Options:
        """Options of fp16.

        Attributes:
            clip_value: limit each local gradient element to +-clip_value before sending; None does not.
        """

        clip_value: float | None = None

        def __post_init__(self) -> None:
            if self.clip_value is not None and not check_number("fp16", "clip_value", self.clip_value) > 0:
                raise OptionError(f"fp16: clip_value = {self.clip_value} must be > 0, or None")

    def exchange(self, bucket: Bucket) -> Exchange:
        clip = self.options.clip_value
        if clip is not None:
            bucket.backend.run("clip", bucket.flat, out=bucket.flat, min=-clip, max=clip)
        if bucket.dtype == "float16":  # as they are
            yield self.communicator.all_reduce(bucket.flat, "mean", name=bucket.name)
            return
        message = HalfMessage(self.communicator, bucket.backend, bucket.flat, bucket.name)
        yield Soon(message.measure())
        yield message.send("mean")
