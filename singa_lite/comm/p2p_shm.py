# SPDX-License-Identifier: Apache-2.0
"""Messages between the workers and the servers of one host over shared memory, Linux only.

What lives here: arrays and errors as Python has them. What does not: rings, waiting and noticing dead peers, which is
native (native/comm/p2p.h).
"""

from __future__ import annotations

import weakref
from typing import Any

from .base import TIMEOUT_S
from .job import Job
from .lost_ranks import lost_rank
from .p2p import Arrival, Messenger, SendWork
from .shm import load_native
from .work import Array


class ShmSendWork(SendWork):
    """A message of a ShmMessenger on its way."""

    def __init__(self, native: Any, outgoing: Any) -> None:  # native
        self._native, self._outgoing = native, outgoing

    @property
    def failure(self) -> str:  # type: ignore[override]
        return str(self._outgoing.failure)

    def _is_sent_within(self, limit_s: float) -> bool:
        return bool(self._native.wait(self._outgoing, limit_s))

    def _is_done(self) -> bool:
        return self._has_ended() or bool(self._native.is_done(self._outgoing))

    def _has_ended(self) -> bool:
        return bool(self._outgoing.has_ended)


class ShmMessenger(Messenger):
    """Processes of one host, over /dev/shm/singa_lite-<rendezvous_id>-p2p (2 MB a ring, at most 32 MB).

    The file is as that of ``ShmCommunicator``: readable by this user only, really allocated, and gone from /dev/shm
    once all have attached; a peer's death is noticed by the lock it held.

    Args:
        job: ``job.rendezvous_id`` must be equal in all processes and new for every job.
        timeout_s: see ``Messenger``.

    Raises:
        CommError: not on Linux or not compiled, /dev/shm full, processes missing, sizes or ranks in conflict.
    """

    transport = "shm"

    def __init__(self, job: Job, timeout_s: float = TIMEOUT_S) -> None:
        super().__init__(job, timeout_s)
        name, ranks = f"{job.rendezvous_id}-p2p", (job.rank, job.num_workers, job.num_servers)
        self._native = load_native().Messenger(name, *ranks, self.timeout_s, self._lost_rank)
        # Runs when this object goes or the interpreter exits, whichever is first; leave() is idempotent.
        self._finalizer = weakref.finalize(self, self._native.leave, "")
        self._native.wait_for_all(self._lost_rank)

    def _send(self, to: int, head: bytes, arrays: list[Array]) -> ShmSendWork:
        return ShmSendWork(self._native, self._native.send(to, head, arrays))

    def _receive(self, limit_s: float) -> Arrival | None:
        message = self._native.receive(limit_s)
        return message and Arrival(message.source, message.head, message.reason, message)

    def _read(self, arrival: Arrival, into: list[Array], limit_s: float) -> str | None:
        return str(arrival.handle.failure) if self._native.read(arrival.handle, into, limit_s) else None

    def _leave(self, reason: str) -> None:
        self._native.leave(reason)

    def _lost_rank(self) -> str:
        """Return why the job cannot become complete, or ""; called while this process waits for that."""
        return lost_rank(self.job.rendezvous_id, self.job.size)
