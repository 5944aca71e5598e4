# SPDX-License-Identifier: Apache-2.0
"""Hosts that are not there: a program in place of ssh that runs commands here, under another host name where it may."""

from __future__ import annotations

import functools
import shutil
import subprocess
from pathlib import Path

AGENT = """#!/bin/sh
while [ "${{1#-}}" != "$1" ]; do shift; done
host=$1
shift
exec {}
"""
WITH_NAME = 'unshare -u sh -c "hostname $host; $*"'
WITHOUT = 'sh -c "$*"'


@functools.cache
def names_missing() -> str:
    """Why commands cannot run under the names of hosts, or "" if they can."""
    if (
        shutil.which("unshare")
        and subprocess.run(["unshare", "-u", "true"], capture_output=True).returncode == 0
    ):
        return ""
    return "other host names need root and unshare -u"


def write_agent(folder: Path, name: str = "agent") -> Path:
    """A program that takes "[-OPTION ...] HOST COMMAND ..." and runs COMMAND as a shell does."""
    path = folder / name
    path.write_text(AGENT.format(WITHOUT if names_missing() else WITH_NAME))
    path.chmod(0o755)
    return path
