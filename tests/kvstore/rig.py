# SPDX-License-Identifier: Apache-2.0
"""Jobs of workers and servers for tests of stores: one launch checks many facts, each with stores of its own.

A fact is a function of a ``Rig`` that every worker calls. The servers follow: each time the workers make a store, they
serve it until the workers have closed it.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest

from singa_lite.comm import find_messengers, find_transports
from singa_lite.comm.base import Communicator, World
from singa_lite.comm.job import Job
from singa_lite.comm.local import LocalCommunicator
from singa_lite.comm.p2p import Messenger
from singa_lite.errors import CommError
from singa_lite.kvstore import KVStore
from singa_lite.kvstore.dist import DistStore
from singa_lite.kvstore.replica import ReplicaStore
from singa_lite.kvstore.server import Server
from singa_lite.opt import Optimizer
from tests.limits import LIMIT_S
from tests.ranks import mpi_missing, run_ranks

Array = np.ndarray[Any, Any]
Calls = tuple[tuple[Any, ...], ...]


class Launch(NamedTuple):
    """What is launched: how many processes of each role, over which transport."""

    transport: str
    workers: int
    servers: int

    def __str__(self) -> str:
        return f"{self.transport}-{self.workers}+{self.servers}"


class Rate(Optimizer):
    """MXNet's optimizer "test": w += rate * g."""

    def __init__(self, rate: float = 2.0) -> None:
        super().__init__(0.1)
        self.rate = rate

    def apply(self, name: str, value: Any, grad: Any) -> None:
        value += grad * self.rate


@dataclass
class Rig:
    """One worker of a launch.

    Attributes:
        launch: what it is a part of.
        everyone: the communicator of all processes, workers first.
        name: makes the names of rendezvous unique.
    """

    launch: Launch
    everyone: Communicator
    name: str
    _num_stores: int = 0
    _open: list[tuple[KVStore | None, Messenger | None, Communicator]] = field(default_factory=list)

    @property
    def rank(self) -> int:
        return self.everyone.rank

    @property
    def num_workers(self) -> int:
        return self.launch.workers

    @property
    def num_servers(self) -> int:
        return self.launch.servers

    def store(self, name: str = "dist_sync", **options: Any) -> KVStore:
        """Make a store, together with all other workers, after closing the one before."""
        self.close()
        self._tell("serve")
        rendezvous = f"{self.name}-{self._num_stores}"
        self._num_stores += 1
        workers = self._workers(rendezvous)
        if not self.num_servers:
            self._open.append((None, None, workers))
            made: KVStore = ReplicaStore(name, workers)
        else:
            messenger = self.messenger(rendezvous)
            self._open.append((None, messenger, workers))
            made = DistStore(name, workers, messenger, **options)
        self._open[-1] = (made, *self._open[-1][1:])
        return made

    def messenger(self, rendezvous: str) -> Messenger:
        launch = self.launch
        job = Job(self.everyone.rank, launch.workers, launch.servers, rendezvous, launch.transport)
        return find_messengers()[launch.transport](job, LIMIT_S)

    def _workers(self, rendezvous: str) -> Communicator:
        if self.num_workers == 1:
            return LocalCommunicator(World())
        transport = self.launch.transport
        world = World(self.rank, self.num_workers, self.rank, self.num_workers, f"{rendezvous}-w", transport)
        return find_transports()[transport](world, LIMIT_S)

    def close(self) -> None:
        """Close the stores of a fact, as at the end of a script."""
        for store, _, communicator in self._open:
            if store is not None:
                store.close()
            communicator.close()
        self._open.clear()

    def leave(self, reason: str = "") -> None:
        """Leave the stores of a fact without closing them, as a script that fails; "" as one that is of no use."""
        for _, messenger, communicator in self._open:
            if messenger is not None:
                messenger.abort(reason) if reason else messenger.close()
            communicator.abort(reason) if reason else communicator.close()
        self._open.clear()

    def server_errors(self) -> list[str]:
        """Return what the servers of the last store raised, "" for those that ended well; all workers call it."""
        return self._tell("report")[self.num_workers :]

    def barrier(self) -> None:
        """Wait for all workers and servers; there is no store meanwhile."""
        self._tell("report")

    def _tell(self, command: str) -> list[Any]:
        return self.everyone.all_gather_object(command)

    def values(self, what: Any) -> list[Any]:
        """Return what each worker gave, a JSON value, while there is a store."""
        return self._open[-1][2].all_gather_object(what)

    def rng(self, *seeds: int, worker: int | None = None) -> np.random.Generator:
        """Return random numbers of a worker, the same whoever asks."""
        return np.random.default_rng([self.rank if worker is None else worker, *seeds])


@dataclass(frozen=True)
class Fact:
    """What holds in a launch.

    Attributes:
        check: raises if it does not.
        when: whether it is about a launch.
    """

    check: Callable[[Rig], None]
    when: Callable[[Launch], bool]


class Facts(dict[str, Fact]):
    """Facts by name."""

    def fact(self, when: Callable[[Launch], bool] = lambda launch: True) -> Callable[..., Any]:
        """Add the function below as one."""

        def add(check: Callable[[Rig], None]) -> Callable[[Rig], None]:
            self[check.__name__] = Fact(check, when)
            return check

        return add

    def of(self, launch: Launch) -> dict[str, Fact]:
        return {name: each for name, each in self.items() if each.when(launch)}

    def cases(self, launches: list[Launch]) -> list[Any]:
        """Return (launch, name of fact) for pytest.mark.parametrize."""
        return [
            pytest.param(launch, name, id=f"{launch}-{name}")
            for launch in launches
            for name in self.of(launch)
        ]


def run_worker(rig: Rig, facts: Facts, names: list[str]) -> dict[str, str]:
    """Return the traceback of each fact, "" where it holds; a failure that others wait for ends the list."""
    outcome = {}
    for name in names:
        started = time.perf_counter()
        try:
            facts[name].check(rig)
            rig.close()
            rig.barrier()
            outcome[name] = ""
        except Exception:
            outcome[name] = traceback.format_exc()
            rig.leave(f"the fact {name} does not hold")
            rig.everyone.abort(f"the fact {name} does not hold")
            break
        if rig.rank == 0:
            print(f"{name} {time.perf_counter() - started:.3f} s")
    else:
        rig._tell("end")
    return outcome


def run_server(rig: Rig) -> dict[str, str]:
    """Serve the stores that the workers make, until they say that this was all."""
    error, number = "", 0
    while True:
        try:
            command = rig.everyone.all_gather_object(error)[0]
        except CommError:
            return {}  # a worker has failed, and says why
        if command == "end":
            return {}
        if command != "serve":
            continue
        rendezvous, number, error = f"{rig.name}-{number}", number + 1, ""
        messenger = rig.messenger(rendezvous)
        try:
            Server(messenger).serve()
            messenger.close()
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"
            messenger.abort(error)


def run_process(c: Communicator, launch: Launch, name: str, names: list[str], facts: Facts) -> dict[str, str]:
    rig = Rig(launch, c, name)
    return run_server(rig) if c.rank >= launch.workers else run_worker(rig, facts, names)


def run_facts(process: Callable[..., dict[str, str]], launch: Launch, facts: Facts) -> list[dict[str, str]]:
    """Run the facts about a launch in its processes.

    Args:
        process: calls ``run_process`` with the facts of its module; at the top level of the test's module.
    """
    if launch.transport == "mpi" and (reason := mpi_missing()):
        pytest.skip(reason)
    size = launch.workers + launch.servers
    transport = "local" if size == 1 and launch.transport == "shm" else launch.transport
    name = f"kv{time.monotonic_ns()}"
    found = run_ranks(process, size, launch, name, list(facts.of(launch)), transport=transport)
    return found[: launch.workers]


def _run_calls(c: Communicator, launch: Launch, name: str, function: Any, calls: Calls) -> list[Any]:
    rig = Rig(launch, c, name)
    if c.rank >= launch.workers:
        run_server(rig)
        return []
    found = []
    for call in calls:
        found.append(function(rig, *call))
        rig.close()
    rig._tell("end")
    return found


def run_calls(launch: Launch, function: Callable[..., Any], *calls: tuple[Any, ...]) -> list[list[Any]]:
    """Return what ``function(rig, *call)`` gave on each worker, for each call, in processes of their own."""
    if launch.transport == "mpi" and (reason := mpi_missing()):
        pytest.skip(reason)
    name, size = f"kv{time.monotonic_ns()}", launch.workers + launch.servers
    found = run_ranks(_run_calls, size, launch, name, function, calls, transport=launch.transport)
    return found[: launch.workers]


def assert_holds(outcomes: list[dict[str, str]], name: str) -> None:
    texts = [outcome.get(name, "not reached") for outcome in outcomes]
    assert not any(texts), "\n".join(f"-- worker {rank}: {text}" for rank, text in enumerate(texts) if text)


def caught(call: Callable[[], Any], kind: type[Exception] = CommError) -> str:
    """Return the text of what ``call`` must raise."""
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__} was raised")
