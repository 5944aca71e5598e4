# SPDX-License-Identifier: Apache-2.0
"""What data sets of random images have in common: how many images there may be."""

from __future__ import annotations

from ..errors import OptionError, check_int

MAX_IMAGES = 10_000_000  # of 3 KB: 30 GB


def check_counts(where: str, num_train: int, num_test: int, seed: int) -> None:
    """Raise OptionError unless both counts are from 1 to 10,000,000, and the seed is >= 0."""
    for name, count in (("num_train", num_train), ("num_test", num_test)):
        if check_int(where, name, count, 1) > MAX_IMAGES:
            raise OptionError(f"{where}: {name} = {count} must be an int from 1 to {MAX_IMAGES}")
    check_int(where, "seed", seed, 0)
