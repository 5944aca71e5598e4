# SPDX-License-Identifier: Apache-2.0
"""A transport is one file in comm/, such as sockets.py here: nothing else of the package names it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import singa_lite
from singa_lite.comm import find_messengers, find_transports, shm
from singa_lite.comm.base import Communicator
from tests.comm.processes import LIMIT_S, PATIENT, fresh_environment

PACKAGE = Path(singa_lite.__file__).parent
TESTS = Path(__file__).parents[1]
USE = """
import numpy as np
import singa_lite.comm.rendezvous
from singa_lite import autograd, layer, model, opt
from singa_lite.errors import CommError
from singa_lite.tensor import Tensor, to_numpy
from tests.ranks import run_ranks
from tests.comm.test_contract import WORLDS, run_facts
from singa_lite.comm.base import World
from singa_lite.comm.rendezvous import connect

def connected(world):
    communicator = connect(World(world.rank, world.size, world.rank, world.size, world.rendezvous_id, "sockets"))
    facts = run_facts(communicator)
    communicator.close()
    return type(communicator.host).__name__, facts

def trained(communicator, option, use_graph):
    net = Net()
    net.set_optimizer(opt.DistOpt(opt.SGD(0.1, momentum=0.9), communicator=communicator, dist_option=option))
    draw = np.random.default_rng(communicator.rank)
    x, y = (Tensor(data=draw.standard_normal((4, 3)).astype(np.float32)) for _ in range(2))
    net.compile([x], is_train=True, use_graph=use_graph)
    for _ in range(4):
        x.copy_from_numpy(draw.standard_normal((4, 3)).astype(np.float32))
        net(x, y)
    values = b"".join(to_numpy(param).tobytes() for param in net.get_params().values())
    return values, net.optimizer.bytes_sent, bool(net.graph_info())

class Net(model.Model):
    def __init__(self):
        super().__init__()
        self.linear = layer.Linear(3)

    def forward(self, x):
        return self.linear(x)

    def train_one_batch(self, x, y):
        loss = autograd.mse_loss(self.forward(x), y)
        self.optimizer(loss)
        return loss

def differs_on_rank_1(communicator):
    try:
        communicator.all_reduce(np.ones(5), "max" if communicator.rank == 1 else "sum").wait()
    except CommError as error:
        return str(error)

if __name__ == "__main__":  # the ranks load this file too
    assert [size for word, size in WORLDS if word == "sockets"] == [1, 2, 3, 4], WORLDS
    for name, facts in run_ranks(connected, 3, transport="none"):
        assert name == "SocketCommunicator" and len(facts) > 20, (name, facts)
        assert not any(facts.values()), [text for text in facts.values() if text]
    for option in ("fp32", "fp16", "sparseTopK", "powerSGD", "localSGD:2", "hierarchical:sign"):
        here, there = (run_ranks(trained, 3, option, True, transport=word) for word in ("sockets", "shm"))
        eager = run_ranks(trained, 3, option, False, transport="sockets")
        assert here == there and [each[:2] for each in eager] == [each[:2] for each in here], option
        assert len({values for values, *_ in here}) == 1 and here[0][1] > 0 and here[0][2], option
    assert all("the ranks disagree" in text for text in run_ranks(differs_on_rank_1, 3, transport="sockets"))
    print("all facts hold")
"""


@pytest.fixture
def package_with_sockets(tmp_path):
    """A folder with the tests and a copy of the package, made of links, in which comm/ has one file more."""
    for source, folder in (
        (PACKAGE, tmp_path / "singa_lite"),
        (PACKAGE / "comm", tmp_path / "singa_lite" / "comm"),
    ):
        folder.mkdir()
        for entry in source.iterdir():
            if entry.name not in ("comm", "__pycache__"):
                (folder / entry.name).symlink_to(entry)
    (tmp_path / "singa_lite" / "comm" / "sockets.py").symlink_to(Path(__file__).with_name("sockets.py"))
    (tmp_path / "tests").symlink_to(TESTS)
    return tmp_path


def run_with(folder, *arguments):
    command = [sys.executable, *arguments]
    environment = fresh_environment(PYTHONPATH=str(folder), PYTHONDONTWRITEBYTECODE="1")
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, cwd=folder
    )


@pytest.mark.slow
def test_a_file_in_the_folder_is_a_transport_that_keeps_the_contract(package_with_sockets):
    script = package_with_sockets / "use.py"
    script.write_text(USE)
    result = run_with(package_with_sockets, str(script))
    assert (result.returncode, result.stdout) == (0, "all facts hold\n"), result.stderr


def test_a_file_in_the_folder_is_a_row_of_info(package_with_sockets):
    result = run_with(package_with_sockets, "-c", PATIENT, "info")
    assert "\ntransport sockets works: for tests\n" in result.stdout, result.stdout + result.stderr


def test_every_transport_says_whether_it_works():
    assert {"local", "shm", "mpi", "nccl"} <= set(find_transports())
    assert "" not in find_transports() and "" not in find_messengers()
    for word, kind in find_transports().items():
        assert issubclass(kind, Communicator) and kind.transport == word
        assert kind.describe().startswith(("works", "no: "))


@pytest.mark.skipif(sys.platform != "linux", reason="shared memory needs Linux")
def test_shared_memory_that_no_rank_can_use_does_not_work(tmp_path, monkeypatch):
    monkeypatch.setattr(shm, "SHM", str(tmp_path / "none"))
    assert shm.ShmCommunicator.describe() == f"no: {tmp_path / 'none'} is not there"
    monkeypatch.setattr(shm, "SHM", "/proc/self")  # also root cannot write there
    assert shm.ShmCommunicator.describe() == "no: /proc/self cannot be written"
    monkeypatch.setattr(shm, "SHM", str(tmp_path))
    full = os.statvfs("/proc")
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    assert shm.ShmCommunicator.describe() == f"no: {tmp_path} has 0.0 MB free, of 1.1 MB needed"
