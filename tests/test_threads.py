# SPDX-License-Identifier: Apache-2.0
"""A script's own threads: which train at the same time, use the package first, or are there when the process forks."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest

from singa_lite import device, layer, model, opt
from singa_lite.backend.cpu import CpuBackend
from singa_lite.comm.base import World
from singa_lite.comm.local import LocalCommunicator
from singa_lite.comm.work import Work
from singa_lite.config import state
from singa_lite.kvstore.replica import ReplicaStore
from singa_lite.tensor import Tensor, from_numpy, to_numpy
from tests.limits import LIMIT_S


def in_threads(count: int, function: Any) -> list[Any]:
    """What ``function(number)`` returns in each of ``count`` threads, which start it at the same time."""
    results: list[Any] = [None] * count
    barrier = threading.Barrier(count)

    def run(number: int) -> None:
        barrier.wait(LIMIT_S)
        results[number] = function(number)

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
        assert not thread.is_alive()
    return results


def test_threads_that_use_the_package_first_share_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    class SlowBackend(CpuBackend):
        def __init__(self) -> None:
            made.append(self)
            time.sleep(0.1)
            super().__init__()

    monkeypatch.setattr(state, "default_device", None)
    monkeypatch.setattr(device, "CpuBackend", SlowBackend)
    first, *others = in_threads(4, lambda _: device.get_default_device())
    assert first is not None and all(other is first for other in others) and len(made) == 1


class Net(model.Model):
    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = layer.Linear(16), layer.Linear(4)
        self.loss = layer.SoftMaxCrossEntropy()

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.hidden(x))

    def train_one_batch(self, x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = self.loss(self.forward(x), y)
        self.optimizer(loss)
        return loss


def compiled(seed: int, option: str, use_graph: bool) -> Net:
    net = Net()
    net.set_optimizer(opt.DistOpt(opt.SGD(0.1), communicator=state.communicator, dist_option=option))
    net.compile([from_numpy(np.zeros((8, 6)))], use_graph=use_graph)
    rng = np.random.default_rng(seed)
    for param in net.get_params().values():
        param.copy_from_numpy(rng.standard_normal(param.shape).astype(np.float32))
    return net


def trained(net: Net, seed: int) -> list[bytes]:
    rng = np.random.default_rng(seed)
    for _ in range(60):
        net(from_numpy(rng.standard_normal((8, 6))), from_numpy(rng.integers(0, 4, 8)))
    return [to_numpy(param).tobytes() for param in net.get_params().values()]


@pytest.mark.parametrize("use_graph", [False, True])
@pytest.mark.parametrize("option", ["fp16", "sign", "sparseTopK"])
def test_optimizers_of_several_threads_on_one_communicator_do_not_meet(
    option: str, use_graph: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "communicator", LocalCommunicator(World()))
    alone = [trained(compiled(seed, option, use_graph), seed) for seed in range(3)]
    nets = [compiled(seed, option, use_graph) for seed in range(3)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        together = in_threads(3, lambda seed: trained(nets[seed], seed))
    finally:
        sys.setswitchinterval(before)
    assert together == alone
    for net in nets:
        assert [info.break_reason for info in net.graph_info()] == [None] * use_graph


def test_what_another_thread_has_started_and_ended_is_not_in_flight() -> None:
    communicator = LocalCommunicator(World())
    in_threads(1, lambda _: communicator.all_reduce(np.ones(3), "sum"))
    assert communicator.works_in_flight == []
    mine = communicator.all_reduce(np.ones(3), "sum")
    assert communicator.works_in_flight == [mine]
    communicator.wait_all()
    assert communicator.works_in_flight == []


def test_what_nobody_waits_for_any_more_does_not_count_as_in_flight() -> None:
    class Ended(Work):
        is_over = False

        def _is_done(self) -> bool:
            return self.is_over

    class Remote(LocalCommunicator):
        def _start(self, *arguments: object) -> Work:
            return Ended()

    communicator = Remote(World())
    [work] = in_threads(1, lambda _: communicator.all_reduce(np.ones(3), "sum"))
    assert communicator.works_in_flight == [work] and id(work) in state.works_in_flight
    work.is_over = True
    communicator.wait_all()
    assert communicator.works_in_flight == [] and id(work) not in state.works_in_flight


FORKS_IN_A_PUSH = """
import os, signal, threading
import numpy as np
from singa_lite import kvstore
from singa_lite.tensor import Tensor, to_numpy

store = kvstore.create("local")
store.init("w", Tensor(data=np.zeros(3)))
is_inside, may_go, parent = threading.Event(), threading.Event(), os.getpid()


def update(key, pushed, stored):
    if os.getpid() == parent:
        is_inside.set()
        may_go.wait()
    stored += pushed


store.set_updater(update)
thread = threading.Thread(target=lambda: store.push("w", Tensor(data=np.ones(3))), daemon=True)
thread.start()
is_inside.wait()
child = os.fork()
if child == 0:
    signal.alarm(20)
    out = Tensor((3,))
    store.push("w", Tensor(data=np.ones(3)))
    store.pull("w", out)
    print(to_numpy(out).tolist(), flush=True)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
may_go.set()
thread.join()
"""


def test_a_child_that_is_forked_while_a_thread_pushes_uses_its_own_store() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKS_IN_A_PUSH], capture_output=True, text=True, timeout=LIMIT_S
    )
    assert (done.returncode, done.stdout.strip()) == (0, "[1.0, 1.0, 1.0]"), done.stderr


FORKS_INSIDE = """
import os
import numpy as np
from singa_lite import kvstore
from singa_lite.tensor import Tensor, to_numpy

store, child = kvstore.create("local"), []
store.init("w", Tensor(data=np.zeros(3)))


def update(key, pushed, stored):
    stored += pushed
    if not child:
        child.append(os.fork())


store.set_updater(update)
store.push("w", Tensor(data=np.ones(3)))
store.push("w", Tensor(data=np.ones(3)))
out = Tensor((3,))
store.pull("w", out)
if child[0] != 0:  # one after the other
    assert os.waitpid(child[0], 0)[1] == 0
print(to_numpy(out).tolist(), flush=True)
if child[0] == 0:
    os._exit(0)
"""


def test_a_child_that_is_forked_in_a_call_of_a_store_ends_it_and_goes_on() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKS_INSIDE], capture_output=True, text=True, timeout=LIMIT_S
    )
    assert (done.returncode, done.stdout.splitlines()) == (0, ["[2.0, 2.0, 2.0]"] * 2), done.stderr


def test_locks_are_kept_by_owner_whatever_compares_equal() -> None:
    class Store(ReplicaStore):
        def __eq__(self, other: object) -> bool:
            return isinstance(other, Store)

    stores = [Store("local", LocalCommunicator(World())) for _ in range(2)]
    assert all(state.lock_owners[id(store)] is store for store in stores)


FORKS_WHILE_LOCKED = """
import os, signal, threading
import numpy as np
from singa_lite import layer, model, opt, tensor
from singa_lite.config import state
from singa_lite.kvstore.replica import ReplicaStore


class Net(model.Model):
    def __init__(self):
        super().__init__()
        self.out, self.loss = layer.Linear(4), layer.SoftMaxCrossEntropy()

    def forward(self, x):
        return self.out(x)

    def train_one_batch(self, x, y):
        loss = self.loss(self.forward(x), y)
        self.optimizer(loss)
        return loss


net = Net()
net.set_optimizer(opt.SGD(0.1))
x, y = tensor.from_numpy(np.eye(8, 6)), tensor.from_numpy(np.arange(8) % 4)
net.compile([x], use_graph=True, precision="bf16")
for _ in range(3):
    net(x, y)
assert state.rounded is not None  # copies of parameters are fresh, and the parameters read-only
is_held, may_go = threading.Event(), threading.Event()


def hold():
    with state.rounded_lock, state.device_lock, state.communicator_lock:
        is_held.set()
        may_go.wait()


thread = threading.Thread(target=hold, daemon=True)
thread.start()
is_held.wait()
child = os.fork()
if child == 0:
    signal.alarm(20)
    opt.DistOpt(opt.SGD(0.1))
    print([float(tensor.to_numpy(net(x, y))[0]) for _ in range(3)], flush=True)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
may_go.set()
thread.join()
print([float(tensor.to_numpy(net(x, y))[0]) for _ in range(3)])
"""


def test_a_child_that_is_forked_while_a_thread_holds_locks_trains_on() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKS_WHILE_LOCKED], capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stderr
    child, parent = done.stdout.splitlines()
    assert child == parent
