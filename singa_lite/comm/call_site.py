# SPDX-License-Identifier: Apache-2.0
"""The lines of the user's program from which collectives were called."""

from __future__ import annotations

from ..users_line import users_line


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
