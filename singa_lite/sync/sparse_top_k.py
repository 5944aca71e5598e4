# SPDX-License-Identifier: Apache-2.0
"""sparseTopK: the elements of largest magnitude are sent, exactly K of them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..comm.work import Work
from ..errors import OptionError, check_choice, is_number, repr_of
from .buckets import Bucket, Exchange
from .sparse import VALUES, SparseMessage, SparseSync


def check_share(where: str, name: str, share: float) -> None:
    """Raise OptionError unless 0 < share <= 1."""
    if not is_number(share) or not 0.0 < share <= 1.0:
        raise OptionError(
            f"{where}: {name} = {repr_of(share)} must be in (0, 1], the share of elements to send"
        )


def count_of_share(share: float, n: int) -> int:
    """Return ceil(share * n), reading ``share`` as the decimal it is written as: 0.07 of 100 are 7 and not 8."""
    from fractions import Fraction  # Note [imports]

    return math.ceil(Fraction(str(float(share))) * n)


def send_top_k(message: SparseMessage, spars: float) -> Work:
    """Start to send the K = ceil(spars * n) elements of largest magnitude; NaN counts as largest.

    Ties go to the lowest index.
    """
    k = count_of_share(spars, message.flat.size)
    message.backend.run("top_k", message.source, out=message.allocate(k), k=k)
    return message.send([k] * message.communicator.size)


class SparseTopK(SparseSync):
    """The ``spars`` share of each group's largest \\|gradient + residual\\|."""

    names = ("sparseTopK",)
    is_recordable = True

    @dataclass(frozen=True)
    class Options:
        """Options of sparseTopK.

        Attributes:
            spars: share of the elements to send, 0 < spars <= 1.
            corr: keep what was not sent and add it to the next step's gradient; False drops it.
            values: "own" sends them in their dtype, "fp16" rounded; with ``corr`` what that loses is kept.
        """

        spars: float = 0.05
        corr: bool = True
        values: str = "own"

        def __post_init__(self) -> None:
            check_share("sparseTopK", "spars", self.spars)
            check_choice("sparseTopK", "values", self.values, VALUES)

    def exchange(self, bucket: Bucket) -> Exchange:
        message = self.message(bucket)
        yield send_top_k(message, self.options.spars)
        message.merge(1.0 / self.communicator.size)
