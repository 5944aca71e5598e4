# SPDX-License-Identifier: Apache-2.0
"""The flight recorder of NCCL's collectives, which the host starts and never waits for.

A call is recorded when it is given to the GPU. That it has ended there is noticed by the communicator's thread, some
milliseconds later, and recorded when the next one is given or this process makes a report. A call that was aborted, as
those in flight are when the communicator fails, is recorded as failed. One in a CUDA graph is recorded once, while the
graph is made.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from ..errors import CommError
from .base import Operation
from .codes import codes_of
from .flight_record import FlightRecord
from .flight_recorder import ALL_CALLS, FileRecorder
from .work import Array


class GpuRecorder(FileRecorder):
    """The recorder of an NcclCommunicator; arguments as ``FileRecorder``."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._num_calls = 0
        self._in_flight: deque[tuple[int, Any]] = deque(maxlen=ALL_CALLS)
        self._is_broken = False

    def begin(self, operation: Operation, array: Array) -> None:
        """Record a call, which ``given`` or ``end_begun`` follows."""
        self._note_ends()
        codes = codes_of(operation, array.dtype)
        self.start(codes, array.shape, array.size, self._num_calls, operation.kind, operation.name)
        self._num_calls += 1

    def given(self, op: Any) -> None:
        """Remember NCCL's side of the call."""
        self._in_flight.append((self._num_calls - 1, op))

    def end_begun(self, is_refused: bool) -> None:
        """Record that the call begun last was not given; a refused one leaves its number to the next."""
        self.end(self._num_calls - 1, False)
        self._num_calls -= is_refused

    def failed(self, error: CommError) -> None:
        """Report the first failure of the communicator, which fails in every later call again."""
        if not self._is_broken:
            self._is_broken = self.has_failed = True
            self._note_ends()
            while self._in_flight:  # they are being aborted
                self.end(self._in_flight.popleft()[0], False)
            self.report(error)

    def read(self) -> FlightRecord:
        self._note_ends()
        return super().read()

    def _note_ends(self) -> None:
        while self._in_flight and (self._in_flight[0][1].is_captured or self._in_flight[0][1].has_ended):
            number, op = self._in_flight.popleft()
            self.end(number, not op.was_aborted)
