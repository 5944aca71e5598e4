# SPDX-License-Identifier: Apache-2.0
"""Functions that end or block the process of tools/soak/calls.py, which must find that."""

from __future__ import annotations

import os
import time


def dies() -> None:
    os.abort()


def hangs() -> None:
    time.sleep(3600)
