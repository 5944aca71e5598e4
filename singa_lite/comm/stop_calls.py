# SPDX-License-Identifier: Apache-2.0
"""The calls of DistOpt by which all ranks stop at the end of the same step; how ranks agree is in stopping.py."""

from __future__ import annotations

from abc import ABC
from collections.abc import Iterable

from ..graph.recorder import break_graph
from .stopping import STOP_SIGNALS, StopAgreement


class StopCalls(ABC):
    """Ask to stop, and whether a rank did; a subclass sets ``_stop`` and tells it when steps end."""

    _stop: StopAgreement

    @property
    def should_stop(self) -> bool:
        """Whether a rank was asked to stop, equal on all ranks: it becomes True at the end of the same step on each.

        A request is decided by the collectives of the first step that begins after it, and is True from the end of that
        step on; where steps are made by hand, of the one after. A scheme whose steps have no collective (localSGD)
        decides at its next average.
        """
        break_graph("it reads should_stop, which a replay would not do")
        return self._stop.is_decided

    def stop_on_signals(self, signals: Iterable[int] = STOP_SIGNALS) -> None:
        """Turn signals into requests to stop (``should_stop``), instead of ending this process; all ranks call it.

        One process that gets a signal is enough. The same signal a second or more later ends the process as ever, but
        SIGUSR1 and SIGUSR2, which only ask. `singa-lite run` passes SIGTERM and SIGUSR1 on, and then waits
        --stop-timeout seconds. Signals that the process ignores stay ignored. Over NCCL, whose collectives carry no
        requests, each step makes one more small collective of the host from now on.

        Args:
            signals: those that ask; () for none, if a handler of the script calls ``request_stop``.

        Raises:
            OptionError: no signal, one that cannot be handled, one that has a handler of the script, or this is not
                the main thread. CommError: a rank does not call it.
        """
        self._stop.listen(signals)

    def request_stop(self) -> None:
        """Ask all ranks to stop, on any rank, at any time, also in a signal handler; see ``should_stop``."""
        self._stop.request()
