# SPDX-License-Identifier: Apache-2.0
"""Find the line of the user's program from which a collective was called."""

from __future__ import annotations

import os
import sys

PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


class CallSites:
    """Where each collective, by kind and name, was called first; a replayed one has the line that recorded it.

    Attributes:
        known: what ``find`` has found, (kind, name) -> (file, line); a look here is sooner.
    """

    MAX_KNOWN = 4096  # a script that gives every call a new name must not fill the memory

    def __init__(self) -> None:
        self.known: dict[tuple[str, str], tuple[str, int]] = {}

    def find(self, kind: str, name: str) -> tuple[str, int]:
        """Return (file, line) of the user's first call of ``kind`` and ``name``; ("", 0) if no user's code called."""
        site = self.known.get((kind, name))
        if site is None:
            if len(self.known) >= self.MAX_KNOWN:
                self.known.clear()
            site = self.known[kind, name] = users_line()
        return site


def users_stacklevel() -> int:
    """Return the ``stacklevel`` with which a warning of the caller names the user's line; 1 if no user called."""
    frame, level = sys._getframe(1), 1
    while frame is not None:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return level
        frame, level = frame.f_back, level + 1  # type: ignore[assignment]
    return 1


def users_line() -> tuple[str, int]:
    """Return file and line of the innermost frame outside of this package, ("", 0) if all are inside."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((PACKAGE, "<frozen")):
            return file, frame.f_lineno
        frame = frame.f_back  # type: ignore[assignment]
    return "", 0
