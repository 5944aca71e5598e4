# SPDX-License-Identifier: Apache-2.0
"""The groups of ranks in which the steps of a scheme exchange: they fail and stop together, and count as one."""

from __future__ import annotations

from collections.abc import Sequence

from ..comm.base import Communicator
from ..comm.work import Traffic


class StepGroups:
    """The ``groups`` of this rank that a scheme has made of its ``communicator``; an abort of one aborts all."""

    def __init__(self, communicator: Communicator, groups: Sequence[Communicator]) -> None:
        self._communicator = communicator
        for group in groups:
            group.abort_together([*groups, communicator])
            group.share_stop_requests(communicator.stop_requests)
        self._before = {group: group.traffic.copy() for group in groups}

    def begin(self) -> None:
        """Start a step: what one has sent that an exception ended is not counted."""
        self._before = {group: group.traffic.copy() for group in self._before}

    def count(self) -> list[Traffic]:
        """Add what each group has sent in this step to the communicator's traffic; return it."""
        sent = [group.traffic.since(before) for group, before in self._before.items()]
        for traffic in sent:
            self._communicator.traffic.add(traffic)
        return sent
