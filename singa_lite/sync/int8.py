# SPDX-License-Identifier: Apache-2.0
"""int8: gradients are sent as 8-bit codes, 256 of them with one scale, rounded at random without a bias.

Note [two phases]: every rank may need every other one's codes, which is (N-1) n bytes: more than fp32 sends from 8
ranks on. So above 2 ranks each rank gets the codes of its share of the blocks from all (all-to-all), averages there
in float32 in rank order, quantises the average again, and all gather these: 2(N-1)/N n bytes. A group is padded to N
equal shares of whole blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

from ..errors import check_int
from .base import Array
from .buckets import Bucket, BucketedSync, Exchange, Soon
from .state import Slot

BLOCK = 256  # elements that share a scale (backend/cpu/quantize.py)


class Int8(BucketedSync):
    """The mean of a * q over the ranks: a = max |g| / 127 of a block of 256, q = floor(g / a + u), u in (0, 1).

    u depends on ``seed``, the rank, the group and the step alone, so the error's mean is 0 and a run can be
    continued. With ``ef`` q is the nearest code instead, and what it misses is added to the next step's gradient. A
    block with a value that is not finite becomes NaN on all ranks; its residual is 0 afterwards.

    Source: Alistarh et al., "QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding", 2017, with the
    largest magnitude of a block as its norm.
    """

    names = ("int8",)
    is_recordable = True
    is_selective = True  # groups do not depend on bucket_bytes, or the blocks would
    sends, sent_as = ("float32", "float16"), "int8"
    slots = MappingProxyType({"residual": Slot()})

    @dataclass(frozen=True)
    class Options:
        """Options of int8.

        Attributes:
            ef: round to nearest and keep what that misses for the next step (error feedback).
            seed: of the draws, >= 0; equal seeds give equal runs.
        """

        ef: bool = False
        seed: int = 0

        def __post_init__(self) -> None:
            check_int("int8", "seed", self.seed, 0)

    def exchange(self, bucket: Bucket) -> Exchange:
        run, flat, ranks = bucket.backend.run, bucket.flat, self.communicator.size
        if ranks <= 2:
            message = self._quantized(bucket, flat, 1, flat.size)
            received = yield self.communicator.all_gather(message.reshape(-1), name=bucket.name)
            run("mean_of_int8", received, out=flat)
            return
        share = -(-flat.size // (ranks * BLOCK)) * BLOCK  # elements that a rank averages
        message = self._quantized(bucket, flat, ranks, share)
        # Soon, so that only the second phase is left when backward ends
        shares = yield Soon(self.communicator.all_to_all(message, name=f"shares of {bucket.name}"))
        average = bucket.backend.empty((share,), "float32")
        run("mean_of_int8", shares, out=average)
        mine = self._message(bucket, 1, share)
        run("quantize_int8", average, out=mine, row_size=share, **self._stream(bucket, "average"))
        received = yield self.communicator.all_gather(mine.reshape(-1), name=bucket.name)
        run("dequantize_int8", received, out=flat, row_size=share)

    def _quantized(self, bucket: Bucket, flat: Array, num_rows: int, row_size: int) -> Array:
        """Return the codes of this rank's gradients, with the residual where it is kept."""
        message, run = self._message(bucket, num_rows, row_size), bucket.backend.run
        if not self.options.ef:
            run("quantize_int8", flat, out=message, row_size=row_size, **self._stream(bucket, "gradient"))
            return message
        [residual] = self.state.of(bucket)
        run("add", flat, residual, out=flat)
        run("quantize_int8_nearest", flat, out=(message, residual), row_size=row_size)
        return message

    def _message(self, bucket: Bucket, num_rows: int, row_size: int) -> Array:
        return bucket.backend.empty((num_rows, row_size + -(-row_size // BLOCK) * 4), "uint8")

    def _stream(self, bucket: Bucket, what: str) -> dict[str, int]:
        """Return the attributes of a stream of draws that no other rank, group, step or phase has."""
        import hashlib  # Note [imports]

        text = f"{self.options.seed} {self.communicator.rank} {what} {bucket.key}"
        digest = hashlib.blake2b(text.encode(), digest_size=6).digest()  # a double holds so large an int
        seed = int.from_bytes(digest, "little")
        return {"seed": seed, "counter": self.scalar(lambda step: step.step)}
