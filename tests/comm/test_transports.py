# SPDX-License-Identifier: Apache-2.0
"""A transport is one file in comm/: nothing else of the package names it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import singa_lite
from singa_lite.comm import find_messengers, find_transports
from singa_lite.comm.base import Communicator
from tests.comm.processes import LIMIT_S, PATIENT, fresh_environment

PACKAGE = Path(singa_lite.__file__).parent
TESTS = Path(__file__).parents[1]
# its ranks find each other as shm's do; add a new way of moving data here
TOY = """
from .shm import ShmCommunicator

class ToyCommunicator(ShmCommunicator):
    transport = "toy"

    @classmethod
    def describe(cls):
        return "works: for tests"
"""
USE = """
import numpy as np
import singa_lite.comm.rendezvous
from tests.ranks import run_ranks
from tests.comm.test_contract import WORLDS, run_facts
from singa_lite.comm.base import World
from singa_lite.comm.rendezvous import connect

def connected(world):
    communicator = connect(World(world.rank, world.size, world.rank, world.size, world.rendezvous_id, "toy"))
    facts = run_facts(communicator)
    communicator.close()
    return type(communicator.host).__name__, facts

def summed(communicator):
    array = np.full(3, communicator.rank + 1.0)
    communicator.all_reduce(array, "sum").wait()
    return type(communicator).__name__, array[2]

if __name__ == "__main__":  # the ranks load this file too
    assert [size for word, size in WORLDS if word == "toy"] == [1, 2, 3, 4], WORLDS
    for name, facts in run_ranks(connected, 3, transport="none"):
        assert name == "ToyCommunicator" and len(facts) > 20, (name, facts)
        assert not any(facts.values()), [text for text in facts.values() if text]
    for name, total in run_ranks(summed, 2, transport="toy"):
        assert (name, total) == ("ToyCommunicator", 3.0)
    print("all facts hold")
"""


@pytest.fixture
def package_with_toy(tmp_path):
    """A folder with the tests and a copy of the package, made of links, in which comm/ has one file more."""
    for source, folder in (
        (PACKAGE, tmp_path / "singa_lite"),
        (PACKAGE / "comm", tmp_path / "singa_lite" / "comm"),
    ):
        folder.mkdir()
        for entry in source.iterdir():
            if entry.name not in ("comm", "__pycache__"):
                (folder / entry.name).symlink_to(entry)
    (tmp_path / "singa_lite" / "comm" / "toy.py").write_text(TOY)
    (tmp_path / "tests").symlink_to(TESTS)
    return tmp_path


def run_with(folder, *arguments):
    command = [sys.executable, *arguments]
    environment = fresh_environment(PYTHONPATH=str(folder), PYTHONDONTWRITEBYTECODE="1")
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, cwd=folder
    )


def test_a_file_in_the_folder_is_a_transport_that_keeps_the_contract(package_with_toy):
    script = package_with_toy / "use.py"
    script.write_text(USE)
    result = run_with(package_with_toy, str(script))
    assert (result.returncode, result.stdout) == (0, "all facts hold\n"), result.stderr


def test_a_file_in_the_folder_is_a_row_of_info(package_with_toy):
    result = run_with(package_with_toy, "-c", PATIENT, "info")
    assert "\ntransport toy    works: for tests\n" in result.stdout, result.stdout + result.stderr


def test_every_transport_says_whether_it_works():
    assert {"local", "shm", "mpi", "nccl"} <= set(find_transports())
    assert "" not in find_transports() and "" not in find_messengers()
    for word, kind in find_transports().items():
        assert issubclass(kind, Communicator) and kind.transport == word
        assert kind.describe().startswith(("works", "no: "))
