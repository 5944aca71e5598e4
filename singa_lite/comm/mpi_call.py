# SPDX-License-Identifier: Apache-2.0
"""The message with which a collective over MPI begins: the call's number, its words, and its data if they are small."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .work import Array

NAME_BYTES = 1000  # of a longer name the beginning and a hash of all of it
CALL_BYTES = NAME_BYTES + 280  # the call in words
SHOWN = 120  # characters of a long name in errors
BEFORE = 30  # of them, before the first difference
# sequence number, bytes of the call's words, whether the rank asks to stop, bytes of data
HEADER = struct.Struct("<qh?xi")


@dataclass(frozen=True)
class Call:
    """One collective in words: its number, how errors begin, and the text on which the ranks must agree."""

    number: int
    kind: str
    name: str
    where: str
    text: str


class Message(NamedTuple):
    """What a rank sent: its call's number (-1: nothing yet) and text, whether it asks to stop, and its data."""

    number: int
    text: str
    asks_to_stop: bool
    data: bytes


def call_of(rank: int, number: int, kind: str, name: str, words: str) -> Call:
    """Return the collective ``kind`` called ``name`` of ``rank``; ``words``: on what else the ranks must agree."""
    whole, name = name, repr(name)[1:-1]  # escaped: nothing ends a line, or is obeyed by a terminal
    where = f"rank {rank}: {kind} #{number} '{name if len(name) <= SHOWN else name[:SHOWN] + '...'}'"
    raw = name.encode()
    if len(raw) > NAME_BYTES:
        import hashlib  # Note [imports]

        digest = hashlib.blake2b(raw, digest_size=8).hexdigest()
        name = f"{raw[:NAME_BYTES].decode(errors='ignore')}...' ({len(raw)} bytes, hash {digest})"
    else:
        name += "'"
    return Call(number, kind, whole, where, f"{kind} #{number} '{name} {words}")


def difference(text: str, other: str) -> str:
    """Return ``text``, or its beginning, the part where it first differs from ``other``, and its end if it is long."""
    if len(text) <= 3 * SHOWN:
        return text
    at = next(
        (i for i, (mine, theirs) in enumerate(zip(text, other, strict=False)) if mine != theirs), len(text)
    )
    part = slice(max(SHOWN, at - BEFORE), min(len(text) - SHOWN, at - BEFORE + SHOWN))
    middle = f"{text[part]}..." if part.start < part.stop else ""
    return f"{text[:SHOWN]}...{middle}{text[-SHOWN:]}"


def rows_for(num_ranks: int, data_bytes: int) -> Array:
    """Room for a message of each rank, with so many bytes of data at most."""
    return np.zeros((num_ranks, HEADER.size + CALL_BYTES + data_bytes), np.uint8)


def clear(rows: Array) -> None:
    """Mark every row as empty: all numbers are -1."""
    rows[:, : HEADER.size] = 255


def message_of(number: int, call: str, data: bytes, asks_to_stop: bool = False) -> Array:
    words = call.encode(errors="replace")[:CALL_BYTES]
    return np.frombuffer(HEADER.pack(number, len(words), asks_to_stop, len(data)) + words + data, np.uint8)


def message_in(row: Array) -> Message:
    """Return the message in ``row``, as far as it has come."""
    number, num_words, asks_to_stop, num_data = HEADER.unpack_from(row.data)
    data_at = HEADER.size + num_words
    text = row[HEADER.size : data_at].tobytes().decode(errors="replace")
    return Message(number, text, asks_to_stop, row[data_at : data_at + num_data].tobytes())
