# SPDX-License-Identifier: Apache-2.0
"""Call everything public with random arguments: each call returns, or raises an error of singa_lite/errors.py.

    python -m tools.soak.calls --calls 20000 --seed 0
    python -m tools.soak.calls --minutes 30
    python -m tools.soak.calls --only 0:1234      # one call again, with its traceback

Half of the calls are right but for one argument. A TypeError counts only where the arguments do not bind to the
signature. All else is a finding: another exception, a warning, a process that dies or takes longer than --deadline, a
file left by a call that failed, an argument changed by a call that was refused, an error without a message. Findings
are listed by what was called, the kind, and the line of the package; the exit code is 1 if there are any.
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
CHUNK = 1000  # calls of a process: the world and what else is once a process is new after them
START_S = 120.0  # how long a process may take to start
TIMEOUT_S = "0.5"  # how long a collective waits for a peer that is not there


class Worker:
    """A process that makes calls; leaving the block ends it."""

    def __init__(self, seed: int, first: int, last: int, modules: list[str], folder: Path) -> None:
        own = {name: str(folder) for name in ("HOME", "TMPDIR", "SINGA_LITE_CACHE", "MNIST_DIR")}
        own |= {"PYTHONPATH": str(ROOT)} | {
            "SINGA_LITE_TIMEOUT_S": TIMEOUT_S,
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        }
        kept = {name: value for name, value in os.environ.items() if not name.startswith("SINGA_LITE_")}
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed where the block is left
        command = [sys.executable, "-X", "faulthandler", "-m", "tools.soak.call_worker", str(seed)]
        self.process = subprocess.Popen(
            [*command, str(first), str(last), *modules],
            cwd=ROOT,
            env=kept | own,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._errors,
        )
        assert self.process.stdout
        self._pipe = self.process.stdout.fileno()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._pipe, selectors.EVENT_READ)
        self._rest = b""

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout
        self.process.stdout.close()
        self._selector.close()
        self._errors.close()

    def line(self, limit_s: float) -> dict[str, Any] | None:
        """Return the next line, None at the end; TimeoutError if none comes."""
        end = time.monotonic() + limit_s
        while b"\n" not in self._rest:
            if not self._selector.select(max(end - time.monotonic(), 0)):
                raise TimeoutError
            part = os.read(self._pipe, 1 << 16)
            if not part:
                return None
            self._rest += part
        first, _, self._rest = self._rest.partition(b"\n")
        found: dict[str, Any] = json.loads(first)
        return found

    def death(self) -> str:
        """Return how the process ended, and the end of what it said."""
        code = self.process.wait()
        self._errors.seek(0)
        return f"exit code {code}: " + self._errors.read().decode(errors="replace")[-2000:]


def run(seed: int, first: int, last: int, modules: list[str], deadline_s: float) -> Iterator[dict[str, Any]]:
    """Yield a dict of each call: number, target, arguments, and its outcome, which is a dict if it is a finding."""
    while first < last:
        with (
            tempfile.TemporaryDirectory(prefix="singa_lite-soak-") as name,
            Worker(seed, first, last, modules, Path(name)) as worker,
        ):
            begin = worker.line(START_S)
            if begin is None:
                raise SystemExit(f"the worker did not start: {worker.death()}")
            if first == 0:
                yield begin
            while first < last:
                called = None
                try:
                    called = worker.line(deadline_s)
                    done = worker.line(deadline_s) if called else None
                    what = "DIED" if done is None else ""
                except TimeoutError:
                    done, what = None, "HANG"
                if done is None:
                    text = worker.death() if what == "DIED" else f"longer than {deadline_s:g} s"
                    called = called or {"number": first, "target": "the arguments of a call", "arguments": ""}
                    done = {"outcome": {"kind": what, "message": text, "place": ""}}
                assert called is not None  # without it nothing was done
                yield called | done
                first += 1
                if what:
                    break


def fuzz(
    seed: int, calls: int, minutes: float, modules: list[str], deadline_s: float
) -> tuple[Counter[str], dict[tuple[str, str, str], list[dict[str, Any]]]]:
    """Return how many calls had which outcome, and the findings by target, kind and place."""
    counts: Counter[str] = Counter()
    findings: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    end, called = time.monotonic() + 60 * minutes, set()
    for first in range(0, calls, CHUNK):
        if time.monotonic() > end:
            break
        for each in run(seed, first, min(first + CHUNK, calls), modules, deadline_s):
            if "targets" in each:
                print(f"{each['targets']} callables", flush=True)
                continue
            called.add(each["target"])
            outcome = each["outcome"]
            if isinstance(outcome, dict):
                findings.setdefault((each["target"], outcome["kind"], outcome["place"]), []).append(each)
                outcome = "finding"
            counts[outcome] += 1
    print(f"{len(called)} of them called")
    return counts, findings


def repeat(only: str, modules: list[str]) -> None:
    """Make one call again in this process, and show its traceback."""
    from tools.soak import call_worker
    from tools.soak.call_targets import targets

    seed, number = map(int, only.split(":"))

    def outcome(target: Any, function: Any, arguments: Any, options: Any) -> str:
        try:
            call_worker._use(function(*arguments, **options))
        except BaseException:
            traceback.print_exc()
        return "returned"

    call_worker.outcome = outcome
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        call_worker.call(targets(modules or None), seed, number, print)
        os.chdir("/")


def main() -> None:
    parser = argparse.ArgumentParser(description="Call everything public with random arguments")
    parser.add_argument("--calls", type=int, default=sys.maxsize)
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--deadline", type=float, default=30.0, metavar="SECONDS", help="of a call")
    parser.add_argument("--modules", nargs="*", default=[], help="instead of the package's")
    parser.add_argument("--only", metavar="SEED:NUMBER")
    arguments = parser.parse_args()
    if arguments.only:
        return repeat(arguments.only, arguments.modules)
    if arguments.calls == sys.maxsize and arguments.minutes == float("inf"):
        parser.error("give --calls or --minutes")
    counts, findings = fuzz(
        arguments.seed, arguments.calls, arguments.minutes, arguments.modules, arguments.deadline
    )
    for (target, kind, place), several in sorted(findings.items(), key=lambda item: -len(item[1])):
        first = several[0]
        print(f"{len(several):5} {target}: {kind} at {place}: {first['outcome']['message']}")
        print(f"      {arguments.seed}:{first['number']} {target}({first['arguments']})")
    if not arguments.modules:
        from tools.soak.call_exceptions import DENIED

        for name, reason in DENIED.items():
            print(f"not called: {name}: {reason}")
    print(f"{counts.total()} calls: {', '.join(f'{count} {name}' for name, count in counts.most_common())}")
    print(f"{counts['finding']} findings of {len(findings)} kinds")
    sys.exit(bool(findings))


if __name__ == "__main__":
    main()
