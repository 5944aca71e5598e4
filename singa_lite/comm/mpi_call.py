# SPDX-License-Identifier: Apache-2.0
"""The message with which a collective over MPI begins: the call's number, its words, and its data if they are small."""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

import numpy as np

from .base import Array

CALL_BYTES = 240  # the call in words; long names are cut and hashed
HEADER = struct.Struct("<qii")  # sequence number, bytes of the call's words, bytes of data


@dataclass(frozen=True)
class Call:
    """One collective in words: its number, the label for errors, and the text on which the ranks must agree."""

    number: int
    label: str
    text: str


def call_of(number: int, kind: str, name: str, words: str) -> Call:
    """The collective ``kind`` called ``name``; ``words``: on what else the ranks must agree."""
    short = name if len(name) <= 80 else f"{name[:70]}~{zlib.crc32(name.encode()):08x}"
    label = f"{kind} #{number} {short!r}"
    return Call(
        number, label, f"{label} {words}".encode(errors="replace")[:CALL_BYTES].decode(errors="ignore")
    )


def rows_for(num_ranks: int, data_bytes: int) -> Array:
    """Room for a message of each rank, with so many bytes of data at most."""
    return np.zeros((num_ranks, HEADER.size + CALL_BYTES + data_bytes), np.uint8)


def clear(rows: Array) -> None:
    """Let no message have come: all numbers are -1."""
    rows[:, : HEADER.size] = 255


def message_of(number: int, call: str, data: bytes) -> Array:
    words = call.encode(errors="replace")[:CALL_BYTES]
    return np.frombuffer(HEADER.pack(number, len(words), len(data)) + words + data, np.uint8)


def number_in(row: Array) -> int:
    """The number of the call whose message is in ``row``."""
    return int(HEADER.unpack_from(row.data)[0])


def words_in(row: Array) -> str:
    _, num_words, _ = HEADER.unpack_from(row.data)
    return row[HEADER.size : HEADER.size + num_words].tobytes().decode(errors="replace")


def data_in(row: Array) -> bytes:
    _, num_words, num_data = HEADER.unpack_from(row.data)
    start = HEADER.size + num_words
    return row[start : start + num_data].tobytes()
