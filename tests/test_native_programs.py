# SPDX-License-Identifier: Apache-2.0
"""The C++ programs of native/tests, without sanitizers; `make sanitize` runs them with."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.timeout(600)  # compiles native/
@pytest.mark.skipif(sys.platform != "linux", reason="nothing is compiled elsewhere")
def test_the_native_programs_pass():
    programs = sorted(path.stem for path in (ROOT / "native" / "tests").glob("*_test.cc"))
    command = [sys.executable, "setup.py", "--quiet", "native_tests"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=540, cwd=ROOT)
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
    passed = {
        line.split()[3]
        for line in done.stdout.splitlines()
        if line.rstrip().endswith("sec") and " Passed " in line
    }
    assert passed >= set(programs), "a program was not built"
