# SPDX-License-Identifier: Apache-2.0
"""Finding waits among the workers of a store that can never end.

A worker that waits for a pull can go on once those it waits for have pushed; one that is in a call of all workers, such
as ``set_optimizer``, once all others make a call, too. Workers that neither can are in a circle: one pushed a key that
another does not push, or made a call that another does not make.
"""

from __future__ import annotations

from collections.abc import Mapping


class Waits:
    """What the workers have told a server that they wait in.

    Attributes:
        calls: worker -> the call of all workers it is in.
        pulling: worker that has waited for a while -> the number of the request whose answer it waits for.
    """

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self.calls: dict[int, str] = {}
        self.pulling: dict[int, int] = {}

    def forget(self, worker: int) -> None:
        """Note that a worker goes on."""
        self.calls.pop(worker, None)
        self.pulling.pop(worker, None)

    def endless(self, waits_for: Mapping[int, set[int]], left: set[int]) -> list[int]:
        """Return the workers whose pulls can never be answered.

        Args:
            waits_for: worker with a pull that is not answered -> the workers whose pushes it needs.
            left: workers that have closed.
        """
        pulling = {worker: waits_for[worker] for worker in self.pulling if worker in waits_for}
        going = set(range(self._num_workers)) - left - pulling.keys() - self.calls.keys()
        while True:
            free = {worker for worker, needs in pulling.items() if needs <= going}
            if len(going) + len(self.calls) + len(left) == self._num_workers:
                free |= self.calls.keys()
            if free <= going:
                return sorted(pulling.keys() - going)
            going |= free
