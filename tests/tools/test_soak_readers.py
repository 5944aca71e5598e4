# SPDX-License-Identifier: Apache-2.0
"""Damaged files, and damaged shared memory, are errors of the package: a short part of both soaks, always the same."""

from __future__ import annotations

import faulthandler
import os
import random
import signal
import time
from pathlib import Path

import pytest

from tests.slow_cases import slow_but_first
from tools.soak import damage, readers, reading, segment
from tools.soak.file_readers import READERS
from tools.soak.file_readers.reader import Read, Reader


@slow_but_first("times", [1, 5])
def test_no_reader_of_the_package_takes_a_damaged_file_silently(times: int, tmp_path: Path) -> None:
    rows = readers.soak(READERS, times, 0, tmp_path)
    assert [(row.reader.name, *each) for row in rows for each in row.findings] == []
    assert all(row.counts.total() == times for row in rows)
    assert sum(row.counts[reading.TYPED] for row in rows) > 10 * times


def test_damage_is_the_same_for_one_seed_and_of_every_kind() -> None:
    made = [damage.damage(b'{"a": [1, 2], "b": "x"}', b"{}", random.Random(n)) for n in range(300)]
    assert made == [damage.damage(b'{"a": [1, 2], "b": "x"}', b"{}", random.Random(n)) for n in range(300)]
    assert {each.how for each in made} == {"json", *(change.__name__ for change in damage.PLAIN)}


# ---- readers with a fault: each is found -----------------------------------------------------------------


def make(folder: Path, number: int) -> None:
    (folder / "file").write_bytes(b"number %d" % number)


def raises(content: bytes) -> object:
    return {b"number 0": 0, b"number 1": 1}[content]


def takes_anything(content: bytes) -> object:
    return content


def waits(content: bytes) -> object:
    return time.sleep(0 if content.startswith(b"number") else 100)


def dies(content: bytes) -> object:
    faulthandler.disable()  # pytest's, whose traceback would look like a crash of the tests
    return content if content.startswith(b"number") else os.kill(os.getpid(), signal.SIGSEGV)


def takes_memory(content: bytes) -> object:
    return len(bytes(0 if content.startswith(b"number") else 2 * reading.SPARE_BYTES))


def writes_elsewhere(content: bytes) -> object:
    return content.startswith(b"number") or Path("../elsewhere").touch()


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        (raises, "KeyError"),
        (takes_anything, "another value without an error"),
        (waits, "no end within the deadline"),
        (dies, "the process ended: SIGSEGV"),
        (takes_memory, "memory: MemoryError"),
        (writes_elsewhere, "written elsewhere: ['elsewhere']"),
    ],
)
def test_a_reader_with_a_fault_is_found(fault, found, tmp_path: Path) -> None:
    def start() -> Read:
        return lambda folder: fault((folder / "file").read_bytes())

    reader = Reader("planted", "", "CRC", "", make, start)
    (row,) = readers.soak(
        [reader], 3 if fault is waits else 12, 0, tmp_path, deadline_s=0.3 if fault is waits else 20.0
    )
    assert row.findings and any(outcome.kind.startswith(found) for _, outcome in row.findings), row


# ---- shared memory ---------------------------------------------------------------------------------------


def test_overwritten_shared_memory_is_an_error_or_nothing() -> None:
    counts, findings = segment.soak(3, 0, timeout_s=0.5)
    assert findings == [] and sum(ways.total() for ways in counts.values()) == 9
