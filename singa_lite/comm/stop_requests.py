# SPDX-License-Identifier: Apache-2.0
"""Requests to stop: a bit that every collective carries beside its data, combined with "or" over the ranks.

What lives here: what this rank sends and what it has received. What does not: moving the bit (shm.py, mpi.py), signals
and the ends of steps (stopping.py).

Note [same step]: all ranks must decide alike at the end of a step. What a rank sends changes at the begin and the end
of a step alone, so all complete exchanges of one step combine the same bits, whichever collectives they are made of.
Within a step a rank also sends on what it has received: a leader that has received a request within its host
(sync/hierarchical.py) passes it on to the other leaders, and each leader to its host.
"""

from __future__ import annotations


class StopRequests:
    """The requests of one world as this rank knows them; its groups that take part in steps share the object.

    Attributes:
        is_requested: this rank asks to stop; set at any time, also by a signal handler.
        is_sent: collectives that start now say that this rank knows of a request.
        received: whether a collective since the step began carried one; None if there was no collective.
    """

    __slots__ = ("is_requested", "is_sent", "received")

    def __init__(self) -> None:
        self.is_requested = self.is_sent = False
        self.received: bool | None = None

    def begin_step(self) -> None:
        """Send this rank's request with the collectives from here on, and forget what those before carried."""
        self.is_sent |= self.is_requested
        self.received = None

    def receive(self, is_asked: bool) -> None:
        """Take what a collective that has ended carried."""
        self.is_sent |= is_asked
        self.received = is_asked or bool(self.received)

    def end_step(self) -> bool | None:
        """Return whether a rank asked to stop in the collectives since the step began; None if there were none."""
        received, self.received = self.received, None
        self.is_sent |= self.is_requested
        return received
