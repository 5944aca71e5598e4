# SPDX-License-Identifier: Apache-2.0
"""fp16: gradients travel as half-precision numbers, scaled so that neither sums overflow nor small ones vanish.

Note [half scale]: float16 holds 2**-14 .. 65504 with a relative error of 2**-11. Every bucket is multiplied
by one power of two s, the largest with N * max|g| * s <= 65504 over all ranks, and divided by it afterwards;
both are exact. A value is rounded twice, once on its way and once as a mean, so elements of at least
N * 2**-27 of the bucket's largest keep a relative error below 1e-3; smaller ones an absolute one.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

from ..backend.base import Backend
from ..comm.base import Communicator, Work
from ..errors import DTypeError, OptionError
from .base import Array, Bucket, BucketedSync, Exchange, StepOptions

HALF_MAX = 65504.0  # the largest finite float16


class HalfMessage:
    """One flat float32 array on its way through float16.

    Args:
        flat: the array, shape (n,), replaced by the mean or the sum.
    """

    def __init__(self, communicator: Communicator, backend: Backend, flat: Array, name: str) -> None:
        if flat.dtype != "float32":
            raise DTypeError(
                f"fp16: {name} is {flat.dtype}; only float32 and float16 gradients travel as float16, use fp32"
            )
        self.communicator, self.backend, self.flat, self.name = communicator, backend, flat, name
        self.largest = backend.empty((1,), "float32")
        self.scale = backend.empty((1,), "float32")

    def measure(self) -> Work:
        """Agree on the largest magnitude of all ranks."""
        self.backend.run("max_abs", self.flat, out=self.largest)
        return self.communicator.all_reduce(self.largest, "max", name=self.name)

    def start(self, op: Any) -> Work:
        """Scale and send; ``measure`` must have ended."""
        limit = HALF_MAX / self.communicator.size
        self.backend.run("power_of_two_scale", self.largest, out=self.scale, limit=limit)
        self.backend.run("mul", self.flat, self.scale, out=self.flat)
        return self.communicator.all_reduce(self.flat, op, wire_dtype="float16", name=self.name)

    def unscale(self) -> None:
        """Undo the scale; ``start`` must have ended."""
        self.backend.run("div", self.flat, self.scale, out=self.flat)


class Fp16(BucketedSync):
    """Half the bytes of fp32, see Note [half scale]; float16 gradients travel as they are. SINGA's sums overflow."""

    names = ("fp16", "half")

    def __init__(self, communicator: Communicator, threshold: int, bucket_bytes: int) -> None:
        super().__init__(communicator, threshold, bucket_bytes)
        self._measured: Exchange | None = None  # of the last bucket, not sent yet

    def begin(self, options: StepOptions) -> None:
        super().begin(options)
        if self._measured is not None:
            self._measured.give_up()
        self._measured = None

    def check(self, options: StepOptions) -> None:
        if options.clip_value is not None and not options.clip_value > 0:
            raise OptionError(f"fp16: clip_value = {options.clip_value} must be > 0, or None")

    def start(self, exchange: Exchange, gather: Callable[[], None]) -> None:
        """Ask for the bucket's largest magnitude; send the bucket before, whose largest is known by now."""
        if exchange.bucket.dtype == "float16":
            super().start(exchange, gather)
            return
        exchange.go_on(gather)
        self._send_measured()
        self._measured = exchange

    def flush(self) -> None:
        super().flush()
        self._send_measured()

    def _send_measured(self) -> None:
        exchange = self._measured
        if exchange is not None:
            exchange.go_on(lambda: self.wait(exchange.work))
            self._in_flight.append(exchange)
            self._measured = None

    def exchange(self, bucket: Bucket) -> Generator[Work, None, None]:
        """Yields the agreement on the scale first, unless the gradients are float16, then the sum."""
        clip = self.options.clip_value
        if clip is not None:
            bucket.backend.run("clip", bucket.flat, out=bucket.flat, min=-clip, max=clip)
        if bucket.dtype == "float16":  # as they are
            yield self.send(self.communicator.all_reduce(bucket.flat, "mean", name=bucket.name))
            return
        message = HalfMessage(self.communicator, bucket.backend, bucket.flat, bucket.name)
        yield self.send(message.measure())
        yield self.send(message.start("mean"))
        message.unscale()
