# SPDX-License-Identifier: Apache-2.0
"""Jobs of workers and servers for tests of a Trainer: one launch runs many facts, each with stores of its own.

What lives here: starting them. What does not: the facts (test_trainer*.py).
"""

from __future__ import annotations

import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from singa_lite import autograd
from singa_lite.comm import find_messengers
from singa_lite.comm.base import Communicator
from singa_lite.comm.job import Job
from singa_lite.comm.p2p import Messenger
from singa_lite.errors import CommError
from singa_lite.kvstore.dist import DistStore
from singa_lite.kvstore.replica import ReplicaStore
from singa_lite.kvstore.server import Server
from singa_lite.kvstore.store import KVStore
from singa_lite.tensor import Tensor, to_numpy
from tests.limits import LIMIT_S
from tests.ranks import mpi_missing, run_ranks

Array = np.ndarray[Any, Any]
BIG_ARRAY = 1000  # elements, instead of 65,536: from here a key is cut into a part for each server


@dataclass
class Rig:
    """One worker of the job under test.

    Attributes:
        workers: the communicator of the workers.
        num_servers: how many servers the job has.
        folder: of the launch, for files.
    """

    everyone: Communicator
    workers: Communicator
    num_servers: int
    rendezvous_id: str
    folder: str
    _count: int = 0
    _is_broken: bool = False
    _open: list[DistStore] = field(default_factory=list)

    @property
    def rank(self) -> int:
        return self.workers.rank

    @property
    def size(self) -> int:
        return self.workers.size

    def store(self, name: str = "dist_sync", will_break: bool = False, big_array: int = BIG_ARRAY) -> KVStore:
        """A new store with new servers; the one before is closed. One that will break has a communicator of its own."""
        self.close()
        workers = self.workers.new_group(list(range(self.size))) if will_break else self.workers
        assert workers is not None
        if self.num_servers == 0:
            return ReplicaStore(name, workers)
        self._count += 1
        self.everyone.all_gather_object(self._count, name="test: serve")
        messenger = make_messenger(self.everyone, self.num_servers, f"{self.rendezvous_id}{self._count}")
        store = DistStore(name, workers, messenger, big_array=big_array)
        self._open.append(store)
        self._is_broken = will_break
        return store

    def close(self) -> None:
        """Close the store."""
        for store in self._open:
            if self._is_broken:  # DistStore.close would wait again for the server that has failed
                self.workers.barrier()
                store._messenger.abort("the test has ended")
            else:
                store.close()
        self._open.clear()

    def abort(self, reason: str) -> None:
        """Have all others fail too."""
        for store in self._open:
            store._messenger.abort(reason)
        self.workers.abort(reason)
        self.everyone.abort(reason)


def make_messenger(everyone: Communicator, num_servers: int, name: str) -> Messenger:
    transport = everyone.transport
    job = Job(everyone.rank, everyone.size - num_servers, num_servers, name, transport)
    return find_messengers()[transport](job, LIMIT_S)


def serve(everyone: Communicator, num_servers: int, rendezvous_id: str) -> None:
    """The life of a server: one after the other, each for one store."""
    while number := everyone.all_gather_object(None, name="test: serve")[0]:
        messenger = make_messenger(everyone, num_servers, f"{rendezvous_id}{number}")
        try:
            Server(messenger).serve()
            messenger.close()
        except CommError as error:  # as at the end of a server's process; workers report it
            messenger.abort(str(error))


def run_facts(
    everyone: Communicator,
    num_servers: int,
    rendezvous_id: str,
    folder: str,
    facts: Sequence[Callable[[Rig], Any]],
) -> dict[str, tuple[str, Any]]:
    """Each fact's traceback in this worker, "" where it holds, and its result; a failure ends the list."""
    num_workers = everyone.size - num_servers
    workers = everyone.new_group(list(range(num_workers)))
    outcomes: dict[str, tuple[str, Any]] = {}
    if workers is None:
        with suppress(CommError):  # a worker has failed, and says why
            serve(everyone, num_servers, rendezvous_id)
        return outcomes
    rig = Rig(everyone, workers, num_servers, rendezvous_id, folder)
    for check in facts:
        try:
            outcomes[check.__name__] = ("", check(rig))
            rig.close()
            workers.barrier()
        except (Exception, pytest.fail.Exception):
            outcomes[check.__name__] = (traceback.format_exc(), None)
            rig.abort(f"the fact {check.__name__} does not hold")
            return outcomes
    everyone.all_gather_object(0, name="test: serve")
    return outcomes


# ---- parameters and gradients ----------------------------------------------------------------------------


def parameter(value: Any, name: str | None = None, dtype: str = "float32") -> Tensor:
    return Tensor(data=np.asarray(value, dtype), stores_grad=True, name=name)


def backward(gradients: dict[Tensor, Any]) -> None:
    """Have each parameter's gradient be exactly these numbers, in one backward pass."""
    with autograd.record():
        terms = []
        for param, grad in gradients.items():
            factor = np.broadcast_to(np.asarray(grad, param.dtype), param.shape)
            product = param * Tensor(data=factor, device=param.device)
            terms.append(autograd.reduce_sum(product, keepdims=0))
        loss = terms[0]
        for term in terms[1:]:
            loss = loss + term
    loss.backward()


def values(params: dict[str, Tensor]) -> dict[str, list[Any]]:
    return {name: to_numpy(param).tolist() for name, param in params.items()}


def bits(params: dict[str, Tensor]) -> dict[str, str]:
    return {name: to_numpy(param).tobytes().hex() for name, param in params.items()}


def run_job(
    transport: str, num_workers: int, num_servers: int, facts: Sequence[Callable[[Rig], Any]]
) -> list[dict[str, tuple[str, Any]]]:
    """Launch a job and return the outcomes of each worker."""
    if transport == "mpi" and (reason := mpi_missing()):
        pytest.skip(reason)
    with tempfile.TemporaryDirectory(prefix="trainer-") as folder:
        found = run_ranks(
            run_facts,
            num_workers + num_servers,
            num_servers,
            f"trainer{time.monotonic_ns()}",
            folder,
            facts,
            transport=transport,
        )
    return found[:num_workers]


def check_outcome(outcomes: list[dict[str, tuple[str, Any]]], name: str) -> list[Any]:
    """Fail with the tracebacks of a fact that does not hold; return its results by worker."""
    found = [outcome.get(name, ("not reached", None)) for outcome in outcomes]
    texts = [f"-- worker {rank}: {text}" for rank, (text, _) in enumerate(found) if text]
    assert not texts, "\n".join(texts)
    return [result for _, result in found]
