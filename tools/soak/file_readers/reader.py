# SPDX-License-Identifier: Apache-2.0
"""What a reader of files is, for a soak: how valid files are made and read, and what a checksum protects."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Read = Callable[[Path], object]


class Refused(Exception):
    """A reader that returns None, as its documentation says, where another one raises."""


class Changed(Exception):
    """Something was loaded in part: a finding."""


@dataclass(frozen=True)
class Reader:
    """A reader of files.

    Attributes:
        name: of the files.
        module: that reads them.
        protects: the checksum that finds other values, or "".
        free: what is not checked without one, in a word.
        make: writes valid files into a folder; those of another number have other values.
        start: returns the function that reads a folder, in the process that reads.
        num_variants: numbers that ``make`` takes; what they hold are the right values.
        is_bound: whether the checksum is one of all files of the folder together.
        seal: makes the checksum within a file's content right again, by its name; None: there is none within.
        also: errors that its documentation names, beside SingaLiteErrors.
    """

    name: str
    module: str
    protects: str
    free: str
    make: Callable[[Path, int], None]
    start: Callable[[], Read]
    num_variants: int = 2
    is_bound: bool = False
    seal: Callable[[str, bytes], bytes] | None = None
    also: tuple[type[Exception], ...] = ()


def all_or_nothing(state: Callable[[], object], load: Callable[[], object]) -> object:
    """Return what ``load`` returned; Changed if it failed and ``state`` is not what it was."""
    before = state()
    try:
        return load()
    except Exception as error:
        if state() != before:
            raise Changed(f"changed, and then: {type(error).__name__}: {error}") from error
        raise


def hash_of(values: Any) -> str:
    """Return a hash of arrays in dicts and tuples, of their dtypes and shapes too."""
    if isinstance(values, dict):
        return hash_of(tuple((key, values[key]) for key in sorted(values, key=str)))
    if isinstance(values, (tuple, list)):
        return hashlib.sha256("".join(map(hash_of, values)).encode()).hexdigest()
    if isinstance(values, np.ndarray):
        values = (values.dtype.str, values.shape, hashlib.sha256(values.tobytes()).hexdigest())
    return hashlib.sha256(repr(values).encode()).hexdigest()
