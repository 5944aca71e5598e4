# SPDX-License-Identifier: Apache-2.0
"""Run the tests marked gpu, backend parity among them: a process for each file, a line for each failure.

    python -m tools.gpu_check.run_tests
    python -m tools.gpu_check.run_tests tests/backend --select "not gpu"       on a machine without a GPU

A kernel that spoils the GPU's context spoils one file only. Works with pytest alone: without pytest-timeout a test that
hangs ends with the run, without hypothesis the files that need it are named. Exits 1 if a test failed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.gpu.rows import QUICK, report

ROOT = Path(__file__).resolve().parents[2]
# the most telling files first
FIRST = ("backend/test_kernels", "backend/test_cuda", "backend", "autograd", "layer", "opt", "")
FILE_TIMEOUT_S = 80
SHOWN = 8  # failures of a file
TOGETHER = max(
    1, min(8, (os.cpu_count() or 1) // 2)
)  # files at a time: tests are short kernels and much Python
LINE = re.compile(r"^(tests/\S+?\.py)::")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("paths", nargs="*", default=["tests"])
    parser.add_argument("--select", default="gpu", help="pytest's -m")
    arguments = parser.parse_args()
    if importlib.util.find_spec("pytest") is None:
        report("tests marked gpu", None, note="not run: no pytest here", met=False, required="pass")
        return 1
    _, listing = pytest("--collect-only", "-q", "-m", arguments.select, *arguments.paths)
    files = sorted({match[1] for line in listing.splitlines() if (match := LINE.match(line))}, key=place)
    if not files:
        print(listing)
        report("tests marked gpu", 0, note="none collected, see gpu-check.log", met=False, required="pass")
        return 1
    for line in listing.splitlines():
        if line.startswith("ERROR"):
            report("tests that cannot be collected", None, note=line[:200])
    with ThreadPoolExecutor(1 if QUICK else TOGETHER) as pool:
        results = list(pool.map(lambda file: run_file(file, arguments.select), files))
    return int(not all(results))


def place(file: str) -> tuple[int, str]:
    return next(number for number, name in enumerate(FIRST) if file.startswith(f"tests/{name}")), file


def pytest(*arguments: str, timeout_s: float = 60, **variables: str) -> tuple[int, str]:
    """Run pytest: (its exit code, 124 if it was ended after ``timeout_s``; its output)."""
    options = ["-o", "filterwarnings=default"]  # what CUDA's packages warn of is no failure of ours
    if importlib.util.find_spec("pytest_timeout"):  # signal: the other tests of the file still run
        options += ["-o", "timeout=60", "-o", "timeout_method=signal"]
    else:  # without strict settings, among which are the missing plugin's
        options += ["-o", "addopts="]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "pytest", "--continue-on-collection-errors", "-p", "no:cacheprovider"]
    variables = {**os.environ, "PYTHONPATH": path, **variables}
    with tempfile.TemporaryFile("w+") as output:  # not a pipe, which a test's forgotten child would hold open
        try:
            code = subprocess.run(
                [*command, *options, *arguments],
                cwd=ROOT,
                env=variables,
                stdout=output,
                stderr=output,
                timeout=timeout_s,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            code = 124
        output.seek(0)
        return code, output.read()


def run_file(file: str, select: str) -> bool:
    """Run and report the tests of one file; whether all passed."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder, "results")
        results.touch()
        options = ("-q", "--tb=short", "-m", select, "-p", "tools.gpu_check.run_tests")
        code, output = pytest(file, *options, timeout_s=FILE_TIMEOUT_S, GPU_TESTS_RESULTS=str(results))
        lines = [json.loads(line) for line in results.read_text().splitlines()]
    counts = Counter(line["outcome"] for line in lines if line["outcome"] != "started")
    failures = [f"{line['test'].partition('::')[2]}: {line['why']}" for line in lines if line.get("why")]
    has_ended = code in (0, 1)
    if not has_ended:
        failures.insert(0, f"pytest ended with exit code {code} in {lines[-1]['test'] if lines else file}")
    if failures:
        print(output[-20_000:], flush=True)
    is_passed = has_ended and not failures
    note = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
    report(file, counts["passed"], met=is_passed, required="pass", note=note)
    for failure in failures[:SHOWN]:
        report(f"of {file}", "fails", note=failure)
    return is_passed


# ---- inside pytest, as a plugin ----------------------------------------------------------------------


def pytest_runtest_logstart(nodeid: str) -> None:
    write({"test": nodeid, "outcome": "started"})


def pytest_runtest_logreport(report: Any) -> None:
    if report.failed:
        crash = getattr(report.longrepr, "reprcrash", None)
        why = " ".join(str(crash.message if crash else report.longrepr).split())
        write({"test": report.nodeid, "outcome": "failed", "why": why[:300]})
    elif report.skipped or report.when == "call":
        write({"test": report.nodeid, "outcome": report.outcome})


def pytest_collectreport(report: Any) -> None:
    if report.failed:
        write(
            {"test": report.nodeid, "outcome": "failed", "why": str(report.longrepr).splitlines()[-1][:300]}
        )


def write(line: dict[str, str]) -> None:
    """A line at once, so that it outlives what the next test does."""
    if path := os.environ.get("GPU_TESTS_RESULTS"):
        with Path(path).open("a") as file:
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    sys.exit(main())
