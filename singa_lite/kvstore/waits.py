# SPDX-License-Identifier: Apache-2.0
"""Finding waits among the workers of a store that can never end.

A worker that waits for a pull can go on once those it waits for have pushed; one that is in a call of all workers, such
as ``set_optimizer``, once all others make a call, too, or at once where another has ended the same call: then all have
made it. Workers that cannot are in a circle: one pushed a key that another does not push, or made a call that another
does not make.
"""

from __future__ import annotations

from collections.abc import Mapping


class Waits:
    """The calls in which the workers wait, as they have reported them to a server.

    Attributes:
        pulling: worker that has waited for a while -> the number of the request whose answer it waits for.
    """

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._calls: dict[int, str] = {}
        self._num_calls = [0] * num_workers  # that each worker has begun; all make the same ones
        self._num_ended = 0  # by any of them
        self.pulling: dict[int, int] = {}

    @property
    def calls(self) -> dict[int, str]:
        """Worker -> the call of all workers it is in, which no worker has ended."""
        return {
            worker: call for worker, call in self._calls.items() if self._num_calls[worker] > self._num_ended
        }

    def begin_call(self, worker: int, call: str) -> None:
        """Note that a worker has begun a call of all."""
        self._calls[worker] = call
        self._num_calls[worker] += 1

    def end_call(self, worker: int) -> None:
        """Note that a worker has ended its last call of all."""
        self._num_ended = max(self._num_ended, self._num_calls[worker])

    def forget(self, worker: int) -> None:
        """Note that a worker goes on."""
        self._calls.pop(worker, None)
        self.pulling.pop(worker, None)

    def endless(self, waits_for: Mapping[int, set[int]], left: set[int]) -> list[int]:
        """Return the workers whose pulls can never be answered.

        Args:
            waits_for: worker with a pull that is not answered -> the workers whose pushes it needs.
            left: workers that have closed.
        """
        pulling = {worker: waits_for[worker] for worker in self.pulling if worker in waits_for}
        calls = self.calls.keys()
        going = set(range(self._num_workers)) - left - pulling.keys() - calls
        while True:
            free = {worker for worker, needs in pulling.items() if needs <= going}
            if len(going) + len(calls) + len(left) == self._num_workers:
                free |= calls
            if free <= going:
                return sorted(pulling.keys() - going)
            going |= free
