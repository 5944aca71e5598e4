# SPDX-License-Identifier: Apache-2.0
"""Checks of the arguments of a DistOpt before anything is sent; options of schemes are read in step_options.py."""

from __future__ import annotations

from math import inf
from threading import TIMEOUT_MAX

from ..errors import OptionError, check_choice, check_int, check_number
from .schedule import DecayScheduler


def check_messages(buff_size: object, bucket_bytes: object, threshold: object, timeout_s: object) -> None:
    """Raise OptionError unless messages and groups have sizes, and a collective a time to wait."""
    check_int("DistOpt", "threshold", threshold, 0)
    if bucket_bytes is None:
        check_int("DistOpt", "buffSize", buff_size, 1)
    else:
        check_int("DistOpt", "bucket_bytes", bucket_bytes, 1)
    if timeout_s is not None:
        check_number("DistOpt", "timeout_s", timeout_s, 1e-3, TIMEOUT_MAX)


def check_updates(accumulate: object, microbatches: object, order: object) -> tuple[int, int | None]:
    """Return accumulate and microbatches as ints; OptionError unless an update and the order of its sum are given."""
    calls = check_int("DistOpt", "accumulate", accumulate, 1)
    check_choice("DistOpt", "order", order, ("any", "fixed"))
    number = None if microbatches is None else check_int("DistOpt", "microbatches", microbatches, 1)
    if calls != 1 and number is not None:
        raise OptionError("DistOpt: accumulate and microbatches are one thing; leave one out")
    if order == "fixed" and (number is None or number & (number - 1)):
        raise OptionError(f"DistOpt: order='fixed' needs microbatches, a power of two, not {number}")
    return calls, number


def check_spars(spars: object) -> None:
    """Raise OptionError unless this is a number >= 0 or a schedule; what schemes take of it, they check."""
    if not isinstance(spars, DecayScheduler):
        check_number("DistOpt", "spars", spars, 0)


def check_values(clip_norm: object, check_finite: object, check_every: object) -> float | None:
    """Return clip_norm as a float; OptionError unless these say what is done about large gradients, and when."""
    norm = None if clip_norm is None else check_number("DistOpt", "clip_norm", clip_norm)
    if norm is not None and not 0 < norm < inf:
        raise OptionError(f"DistOpt: clip_norm = {clip_norm} must be > 0 and finite, or None")
    check_choice("DistOpt", "check_finite", check_finite, (None, "raise", "skip"))
    if check_every is not None:
        check_int("DistOpt", "check_every", check_every, 1)
    return norm
