# SPDX-License-Identifier: Apache-2.0
"""sparseTopK: the elements of largest magnitude travel, exactly K of them."""

from __future__ import annotations

import math
from collections.abc import Generator, Hashable
from fractions import Fraction

from ..comm.base import Work
from ..errors import OptionError
from .base import Bucket, StepOptions
from .sparse import SparseMessage, SparseSync


def check_share(spars: float) -> None:
    """Raise OptionError unless 0 < spars <= 1."""
    if not 0.0 < spars <= 1.0:
        raise OptionError(f"sparseTopK: spars = {spars} must be in (0, 1], the share of elements to send")


def select_top_k(message: SparseMessage, spars: float) -> Work:
    """Send the K = ceil(spars * n) elements of largest magnitude.

    NaN counts as largest, ties go to the lowest index. ``spars`` is read as the decimal it is written as, so
    0.07 of 100 elements are 7 and not 8.
    """
    num_elements = message.flat.size
    k = math.ceil(Fraction(str(float(spars))) * num_elements)
    indices = message.backend.empty((k,), "int32" if num_elements < 2**31 else "int64")
    values = message.backend.empty((k,), message.flat.dtype)
    message.backend.run("top_k", message.flat, out=(indices, values), k=k)
    return message.start(indices, values, [k] * message.communicator.size)


class SparseTopK(SparseSync):
    """The ``spars`` share of each group's largest \\|gradient + residual\\|."""

    names = ("sparseTopK",)

    def check(self, options: StepOptions) -> None:
        check_share(options.spars)

    def record_key(self, options: StepOptions) -> Hashable:
        return super().record_key(options), options.spars  # which says how many elements are sent

    def exchange(self, bucket: Bucket) -> Generator[Work, None, None]:
        message = self.message(bucket)
        yield self.send(select_top_k(message, self.options.spars))
        message.merge(1.0 / self.communicator.size)
