# SPDX-License-Identifier: Apache-2.0
"""Pauses between two looks at MPI, which cannot wait until a deadline."""

from __future__ import annotations

import os
import time

YIELDS = 200
NAP_S, LONGEST_NAP_S, GROWTH = 5e-5, 5e-4, 1.01


class Pauses:
    """Pauses of one wait: YIELDS times the core is given to another process, then naps grow by GROWTH.

    Ranks may outnumber cores, and a server without work must leave them to the workers. A nap is NAP_S longer than a
    hundredth of those before it together, up to LONGEST_NAP_S.
    """

    def __init__(self) -> None:
        self._count, self._nap_s = 0, NAP_S

    def pause(self) -> bool:
        """Give the core away, or nap; return whether it was a nap, after which it is time to look at the clock."""
        if self._count < YIELDS:
            self._count += 1
            os.sched_yield()
            return False
        time.sleep(self._nap_s)
        self._nap_s = min(self._nap_s * GROWTH, LONGEST_NAP_S)
        return True
