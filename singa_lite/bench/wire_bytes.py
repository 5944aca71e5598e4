# SPDX-License-Identifier: Apache-2.0
"""What each dist_option sends in a step, as closed formulas.

A step is a list of Messages, collectives with their payload; ``bytes_sent`` adds up what a rank puts on a ring for
them, as ``Traffic.bytes_sent`` counts it. n is the number of gradient elements, all in one bucket and float32; N the
number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from ..comm.work import ring_bytes
from ..errors import OptionError, check_int, check_number
from ..sync.indices import IndexCode
from ..sync.int8 import BLOCK
from ..sync.sparse_top_k import count_of_share
from ..sync.text import read_dist_option

SCALE_BYTES = 4


class Message(NamedTuple):
    """A collective of a step.

    Attributes:
        kind: one of comm.base.KINDS.
        payload: bytes of the array that a rank puts in, as sent.
    """

    kind: str
    payload: int


def bytes_sent(messages: Iterable[Message], size: int) -> int:
    """Return the bytes that one of ``size`` >= 1 ranks puts on a ring for ``messages``."""
    check_int("bytes_sent", "size", size, 1)
    return sum(ring_bytes(kind, payload, size) for kind, payload in messages)


def num_kept(n: int, density: float) -> int:
    """Return K = ceil(density n), how many of ``n`` elements a share of 0 < ``density`` <= 1 keeps, at least 1."""
    check_int("num_kept", "n", n, 1)
    check_number("num_kept", "density", density, 0, 1)
    return max(1, count_of_share(density, n))


def messages_of(option: str, shapes: Sequence[tuple[int, ...]], size: int) -> list[Message]:
    """Return what a dist_option sends for a bucket in a step in which it sends; of hierarchical its outer one.

    Args:
        option: its text, as DistOpt takes it: "fp32", "sparseTopK:0.01:values=fp16".
        shapes: of the bucket's parameters.
        size: number of ranks; of hierarchical number of hosts.

    Raises:
        OptionError: a text that DistOpt refuses, or an option whose bytes depend on the gradients.
    """
    options = options_of(option)
    n = sum(map(math.prod, shapes))
    match word_of(option):
        case "fp32" | "localSGD":
            return fp32(n)
        case "fp16":
            return fp16(n)
        case "bf16":
            return bf16(n)
        case "int8":
            return int8(n, size)
        case "sign":
            return sign(n, len(shapes))
        case "powerSGD":
            return power_sgd(shapes, options.rank, options.rate)
        case "randomK":
            return random_k(n, options.density)
        case "sparseTopK" | "dgc" as word:
            density = options.spars if word == "sparseTopK" else options.density
            return sparse(n, density, value_bytes=2 if options.values == "fp16" else 4)
        case "hierarchical":
            return messages_of(options.outer, shapes, size)
    raise OptionError(
        f"plan: there is no formula for what {option} sends: it depends on the gradients or the step, or is not of "
        "this package; leave it out"
    )


def word_of(option: str) -> str:
    """Return the name of the scheme that the text of a dist_option chooses."""
    return read_dist_option(option).scheme.names[0]


def options_of(option: str) -> Any:  # Any: each scheme has a class of its own
    """Return the options in the text of a dist_option, an object of its scheme's ``Options``."""
    scheme, given = read_dist_option(option)
    return scheme.Options(**given)


# ---- all-reduced: bytes a rank hardly grow with N ------------------------------------------------------------


def fp32(n: int) -> list[Message]:
    """Every gradient as float32: 2(N-1)/N 4n bytes."""
    return [Message("all_reduce", 4 * n)]


def fp16(n: int) -> list[Message]:
    """The largest magnitude, for the scale, then every gradient as float16: 2(N-1)/N (2n + 4) bytes."""
    return [Message("all_reduce", SCALE_BYTES), Message("all_reduce", 2 * n)]


def bf16(n: int) -> list[Message]:
    """Every gradient as bfloat16: 2(N-1)/N 2n bytes."""
    return [Message("all_reduce", 2 * n)]


def random_k(n: int, density: float) -> list[Message]:
    """The same K indices on every rank, so values alone travel: 2(N-1)/N 4K bytes."""
    return [Message("all_reduce", 4 * num_kept(n, density))]


def power_sgd(shapes: Sequence[tuple[int, ...]], rank: int, rate: float = 2.0) -> list[Message]:
    """P with what is not compressed, then Q: 2(N-1)/N 4 (sum of r (rows + columns) + dense) bytes.

    A parameter is a matrix (shape[0], all others). It is compressed, with r = min(rank, rows, columns), where that
    divides its elements by more than ``rate``: rate r (rows + columns) < rows columns.

    Source: Vogels, Karimireddy, Jaggi, "PowerSGD", 2019.
    """
    check_int("power_sgd", "rank", rank, 1)
    left, right = 0, 0
    for shape in shapes:
        elements = math.prod(shape)
        rows = shape[0] if shape else 1
        columns = elements // rows
        kept = min(rank, rows, columns)
        if len(shape) > 1 and rate * kept * (rows + columns) < elements:
            left, right = left + kept * rows, right + kept * columns
        else:
            left += elements
    # without a matrix there is no Q
    return [Message("all_reduce", 4 * count) for count in (left, right) if count]


# ---- gathered: bytes grow with N -------------------------------------------------------------------------


def sign(n: int, num_tensors: int) -> list[Message]:
    """A bit an element and a scale a tensor: (N-1) (ceil(n/8) + 4 tensors) bytes."""
    return [Message("all_gather", -(-n // 8) + SCALE_BYTES * num_tensors)]


def int8(n: int, size: int) -> list[Message]:
    """A byte an element and a scale for each block of 256: c = n + 4 ceil(n/256).

    At most 2 ranks gather it, (N-1) c bytes. More send it in two phases, an all-to-all of blocks and an all-gather of
    their means, about 2(N-1)/N c, padded to N equal shares of blocks.
    """
    blocks = -(-n // BLOCK)
    if size <= 2:
        return [Message("all_gather", n + SCALE_BYTES * blocks)]
    share = -(-blocks // size) * (BLOCK + SCALE_BYTES)
    return [Message("all_to_all", size * share), Message("all_gather", share)]


def sparse(n: int, density: float, *, value_bytes: int = 4) -> list[Message]:
    """K values of each rank with their indices: (N-1) (value_bytes K + indices) bytes; for top-K and DGC.

    The values are padded to a multiple of 4 bytes; for the indices see ``elias_fano_bytes``.

    Args:
        n: elements that compete.
        density: K/n.
        value_bytes: 4 for float32, 2 for float16.
    """
    kept = num_kept(n, density)
    return [Message("all_gather", -(-value_bytes * kept // 4) * 4 + elias_fano_bytes(n, kept))]


def elias_fano_bytes(n: int, kept: int) -> int:
    """Return the bytes of ``kept`` ascending indices out of ``n``, 1 <= kept <= n, see sync/indices.py."""
    return 4 * IndexCode(n, kept).num_words
