# SPDX-License-Identifier: Apache-2.0
"""What Ctrl-C must not cut in two."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def deferred_interrupts() -> Iterator[None]:
    """Defer Ctrl-C to the end of the ``with`` block, where it raises KeyboardInterrupt or calls the process's handler.

    In the main thread alone: no other is interrupted. A block has no collectives, whose wait Ctrl-C must end.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    came: list[Any] = []
    signal.signal(signal.SIGINT, lambda *arguments: came.append(arguments))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if came:
            handler(*came[-1])
