# SPDX-License-Identifier: Apache-2.0
"""Handle SIGQUIT in a rank: report what all ranks are doing.

What lives here: a rank's handler. What does not: that of a launcher (inspect_job.py), stacks for others (stacks.py).
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType

from ..config import state
from ..error_stream import tell
from ..errors import CommError
from .flight_recorder import deliver, is_recording, records_of_this_process


def report_at_sigquit() -> None:
    """Install a handler of SIGQUIT, which reports and goes on, unless the program has one.

    Python runs the handler between two lines of the main thread, or in a wait for a collective.
    """
    if not is_recording() or state.reports_at_sigquit == os.getpid():
        return
    state.reports_at_sigquit = os.getpid()
    is_main = threading.current_thread() is threading.main_thread()
    # a shell has commands that it runs behind ignore SIGQUIT
    is_free = signal.getsignal(signal.SIGQUIT) in (signal.SIG_DFL, signal.SIG_IGN)
    if sys.platform == "linux" and is_main and is_free:
        signal.signal(signal.SIGQUIT, _report)


def _report(number: int, frame: FrameType | None) -> None:
    if state.reports_at_sigquit != os.getpid():  # forked from a rank, and no rank itself
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        return
    signal.signal(number, signal.SIG_IGN)  # one that comes meanwhile has the same answer
    try:
        records = records_of_this_process()
        world = next((record.id for record in records if record.title == "world"), "")
        where = deliver(records, "", None, world)
    except (OSError, ValueError, CommError) as error:  # the script goes on, whatever a folder of logs does
        where = f"not written: {error}"
    finally:
        signal.signal(number, _report)
    if where:
        tell(f"singa_lite: what every rank was doing: {where}\n")
