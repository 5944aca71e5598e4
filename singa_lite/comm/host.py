# SPDX-License-Identifier: Apache-2.0
"""Which host this process runs on."""

from __future__ import annotations

import os
from pathlib import Path

from ..config import env


def this_host() -> str:
    """Return a text that is equal for the processes of this host alone: SINGA_LITE_HOST, else the kernel's boot id."""
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:  # not Linux
        boot_id = os.uname().nodename
    return env("SINGA_LITE_HOST") or boot_id
