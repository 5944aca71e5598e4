# SPDX-License-Identifier: Apache-2.0
"""Messages between workers and servers that are threads of one process.

A job that was not launched is one worker without a server, which has nobody to send to. ``local_messengers`` makes
the messengers of a whole job, one for each thread: so a store can run its servers in threads, and a test a job.
"""

from __future__ import annotations

import threading
import time
from collections import deque

from .base import TIMEOUT_S
from .job import Job
from .p2p import Arrival, Messenger, SendWork
from .work import Array


class LocalSendWork(SendWork):
    """A message whose arrays were copied when it was sent."""

    def __init__(self, failure: str) -> None:
        self.failure = failure

    def _is_sent_within(self, limit_s: float) -> bool:
        return True

    def _is_done(self) -> bool:
        return True

    def _has_ended(self) -> bool:
        return True


class Mailboxes:
    """Mailboxes that the messengers of one local job share.

    Attributes:
        changed: held while anything is read or written; notified when a message comes or somebody leaves.
        arrivals: receiver -> sender -> messages that were not received.
        left: why each that left has done so.
    """

    def __init__(self, size: int) -> None:
        self.changed = threading.Condition()
        self.arrivals: list[list[deque[Arrival]]] = [[deque() for _ in range(size)] for _ in range(size)]
        self.left: dict[int, str] = {}


class LocalMessenger(Messenger):
    """Threads of this process. Arrays are copied when they are sent, so a send has always ended.

    Args:
        job: this thread's rank.
        timeout_s: see ``Messenger``.
        mailboxes: those of the job.
    """

    transport = "local"

    def __init__(self, job: Job, timeout_s: float, mailboxes: Mailboxes) -> None:
        super().__init__(job, timeout_s)
        self._mailboxes = mailboxes
        self._next_box = 0

    def _send(self, to: int, head: bytes, arrays: list[Array]) -> LocalSendWork:
        copies = [array.copy() for array in arrays]
        with self._mailboxes.changed:
            failure = self._mailboxes.left.get(to, "")
            if not failure:
                self._mailboxes.arrivals[to][self.job.rank].append(Arrival(self.job.rank, head, "", copies))
                self._mailboxes.changed.notify_all()
        return LocalSendWork(failure)

    def _receive(self, limit_s: float) -> Arrival | None:
        deadline = time.monotonic() + limit_s
        boxes = [self._mailboxes.arrivals[self.job.rank][peer] for peer in self.job.peers]
        with self._mailboxes.changed:
            while True:
                self._check_usable()
                for index in range(self._next_box, self._next_box + len(boxes)):
                    if box := boxes[index % len(boxes)]:
                        self._next_box = (index + 1) % len(boxes)
                        return box.popleft()
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    return None
                self._mailboxes.changed.wait(min(left_s, threading.TIMEOUT_MAX))

    def _read(self, arrival: Arrival, into: list[Array], limit_s: float) -> str:
        for array, copy in zip(into, arrival.handle, strict=True):
            array[...] = copy
        return ""

    def _leave(self, reason: str) -> None:
        why = f"{self.name} aborted: {reason}" if reason else f"{self.name} has closed its messenger"
        with self._mailboxes.changed:
            self._mailboxes.left[self.job.rank] = why
            for peer in self.job.peers:
                self._mailboxes.arrivals[peer][self.job.rank].append(Arrival(self.job.rank, b"", why))
            self._mailboxes.changed.notify_all()


def local_messengers(
    num_workers: int, num_servers: int, timeout_s: float = TIMEOUT_S
) -> list[LocalMessenger]:
    """Return the messengers of a job in this process, in the order of their ranks; each is for one thread."""
    jobs = [Job(rank, num_workers, num_servers) for rank in range(num_workers + num_servers)]
    mailboxes = Mailboxes(len(jobs))
    return [LocalMessenger(job, timeout_s, mailboxes) for job in jobs]
