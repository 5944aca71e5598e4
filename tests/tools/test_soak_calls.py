# SPDX-License-Identifier: Apache-2.0
"""tools/soak/calls.py: random calls of the package have no findings, and what it must find it does."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.limits import LIMIT_S

ROOT = Path(__file__).parents[2]
FOUND = re.compile(r"^ *\d+ [\w.]+\.(\w+): (\w[\w ]*?) at ", re.MULTILINE)


def soak(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tools.soak.calls", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False)


def test_random_calls_return_or_raise_typed_errors() -> None:
    done = soak("--calls", "1000", "--seed", "7", "--deadline", str(LIMIT_S / 2))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 findings" in done.stdout


def test_what_should_not_happen_is_found() -> None:
    done = soak("--calls", "180", "--modules", "tests.tools.bad_calls", "--deadline", str(LIMIT_S / 2))
    assert done.returncode == 1, done.stdout + done.stderr
    assert set(FOUND.findall(done.stdout)) == {
        ("raises_untyped", "AttributeError"),
        ("raises_python_type_error", "TypeError"),
        ("raises_without_message", "short message"),
        ("warns", "UserWarning"),
        ("leaves_a_file", "left behind"),
        ("changes_first", "changed before it was refused"),
        ("exits", "SystemExit"),
    }


def test_processes_that_die_or_hang_are_found() -> None:
    done = soak("--calls", "2", "--modules", "tests.tools.deadly_calls", "--deadline", "2")
    assert done.returncode == 1, done.stdout + done.stderr
    assert FOUND.findall(done.stdout) == [("dies", "DIED"), ("hangs", "HANG")]
