# SPDX-License-Identifier: Apache-2.0
"""Check everything that needs an NVIDIA GPU, without a network, in 8 minutes: build, tests, figures, one report.

    make gpu-check
    python -m tools.gpu_check.check --parts machine build smoke --budget 180
    OUT=/tmp/results python -m tools.gpu_check.check

Each part is a module of this folder or of benchmarks/gpu, in a process of its own with a deadline; what crashes or
hangs is noted and the next part runs. The most valuable come first, and none gets more than what is left of the budget;
those beyond it are named. gpu-check.json and gpu-check.md (in $OUT, else build/gpu-check) are written again with every
row that comes, so whatever cuts the run off leaves what was found until then; gpu-check.log has all output. Nothing
outside of build/gpu-check is changed (and $OUT): its tree is a copy of the checkout, built with the packages of this
Python, and CUDA's, cupy's and PyTorch's caches are there. Exits 1 if something failed or a required figure was missed,
2 at once where there is no GPU; parts named by --parts run all the same.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks.gpu.rows import SKIPPED

ROOT = Path(__file__).resolve().parents[2]
SCRATCH = ROOT / "build" / "gpu-check"
SITE = SCRATCH / "site"  # what --wheels installs
BUDGET_S = 465  # under 8 minutes with the last report
ENDS = (signal.SIGTERM, signal.SIGHUP)
TAIL_LINES = 25  # of the output of a part that failed
MOST_OUTPUT = 1_000_000  # characters of a part that gpu-check.log keeps: their first and last half
END_S = 10  # a process that the driver holds ends when it likes; the next part need not wait
# where CUDA, cupy and PyTorch keep what they compile, in the home folder by default
CACHES = (
    "CUDA_CACHE_PATH",
    "CUPY_CACHE_DIR",
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "TORCH_EXTENSIONS_DIR",
)
LEAST_S = 5  # a part gets no less
NOT_RUN = "not run: no time left"

# name -> (module and arguments, deadline in s), most valuable first: what the budget does not reach is not run
PARTS: dict[str, tuple[Sequence[str], float]] = {
    "machine": (["tools.gpu_check.machine"], 60),
    "build": (["tools.gpu_check.build"], 150),
    "compile": (["tools.gpu_check.compile"], 60),
    "smoke": (["tools.gpu_check.smoke"], 60),
    "precision": (["tools.gpu_check.precision"], 40),
    "tests": (["tools.gpu_check.run_tests"], 120),
    "step cnn": (["benchmarks.gpu.step", "cnn"], 40),
    "step resnet18": (["benchmarks.gpu.step", "resnet18"], 80),
    "step resnet50": (["benchmarks.gpu.step", "resnet50"], 120),
    "transformer": (["benchmarks.gpu.transformer"], 60),
    "top-k": (["benchmarks.gpu.top_k"], 40),
    "DistOpt": (["benchmarks.gpu.dist_opt"], 40),
    "all_reduce": (["benchmarks.gpu.all_reduce"], 40),
    "step cnn compiled": (["benchmarks.gpu.step", "cnn", "--compile"], 60),
    "memcheck": (["tools.gpu_check.kernels", "--tool", "memcheck"], 60),
    "racecheck": (["tools.gpu_check.kernels", "--tool", "racecheck"], 60),
    "ranks": (["tools.gpu_check.ranks"], 90),
    "faults": (["tools.gpu_check.faults"], 120),
}
BEFORE_BUILD = ("tools.gpu_check.machine", "tools.gpu_check.build")


@dataclass
class Outcome:
    """What came of a part.

    Attributes:
        part: its name in PARTS.
        result: "passed", "skipped", "running", or what happened instead.
        seconds: how long it ran.
        rows: what it found, as ``rows.report`` writes it.
        tail: the last lines it printed, unless it passed.
    """

    part: str
    result: str = NOT_RUN
    seconds: float = 0.0
    rows: list[dict[str, Any]] = field(default_factory=list)
    tail: list[str] = field(default_factory=list)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, metavar="PART",
                        help="only these, in the order given: " + ", ".join(PARTS))  # fmt: skip
    parser.add_argument("--budget", type=float, default=BUDGET_S,
                        help="seconds in all (default %(default)s); with more each part gets more")  # fmt: skip
    parser.add_argument("--deadline-factor", type=float,
                        help=f"times this each part's deadline (default: budget / {BUDGET_S}, at least 1)")  # fmt: skip
    parser.add_argument("--wheels", type=Path, metavar="DIR",
                        help="install the wheels in DIR below build/gpu-check, for all parts")  # fmt: skip
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or SCRATCH))
    arguments = parser.parse_args()
    for number in ENDS:
        signal.signal(number, stop)
    if arguments.parts is None and (reason := no_gpu()):
        print(f"gpu-check: no NVIDIA GPU can be used here ({reason}), so nothing is built, tested or measured. "
              "`--parts machine build` tries what needs none.", file=sys.stderr)  # fmt: skip
        return 2
    factor = arguments.deadline_factor or max(1.0, arguments.budget / BUDGET_S)
    parts = {name: (PARTS[name][0], factor * PARTS[name][1]) for name in arguments.parts or PARTS}
    if arguments.wheels is not None:
        install(arguments.wheels)
    outcomes = check(parts, arguments.budget, arguments.out)
    print((arguments.out / "gpu-check.md").read_text())
    return int(any(outcome.result not in ("passed", "skipped") or missed(outcome) for outcome in outcomes))


def no_gpu() -> str:
    """Why there is no GPU here, "" if there may be one: a sign of one is enough, as the parts know better."""
    signs = Path("/dev/nvidiactl").exists() or Path("/dev/dxg").exists() or shutil.which("nvidia-smi")
    if signs or os.environ.get("GPU_CHECK_QUICK") == "1":
        return ""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return str(error)
    return ""


def install(wheels: Path) -> None:
    """Install the wheels of a folder in SITE, without a network; they come before what is installed."""
    found = sorted(map(str, wheels.glob("*.whl")))
    if not found:
        raise SystemExit(f"gpu-check: no wheel in {wheels}")
    options = ["--quiet", "--no-index", "--no-deps", "--no-compile", "--upgrade", "--target", str(SITE)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, *found], check=True)


def stop(number: int, _: FrameType | None) -> None:
    for other in ENDS:
        signal.signal(other, signal.SIG_IGN)  # make and a shell both hand it on: the second must not end this
    raise SystemExit(128 + number)  # so that the part in hand is ended and noted


def check(parts: Mapping[str, tuple[Sequence[str], float]], budget_s: float, out: Path) -> list[Outcome]:
    """Run ``parts`` one after the other and keep the report in ``out`` up to date."""
    out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    outcomes = [Outcome(name) for name in parts]  # whatever ends this run: what it has not reached is said
    with (out / "gpu-check.log").open("w+", errors="replace") as log:
        for outcome, (name, (command, deadline_s)) in zip(outcomes, parts.items(), strict=True):
            left = budget_s - (time.monotonic() - began)
            if left >= LEAST_S:
                outcome.result = "running"
                write_report(outcomes, out)
                print(f"--- {name}", file=log, flush=True)
                run_part(outcome, outcomes, command, min(deadline_s, left), out, log)
            write_report(outcomes, out)
            print(f"{name}: {outcome.result} ({outcome.seconds:.0f} s)", flush=True)
            log.write(f"--- {name}: {outcome.result} ({outcome.seconds:.0f} s)\n")
    return outcomes


def run_part(
    outcome: Outcome, outcomes: list[Outcome], command: Sequence[str], deadline_s: float, out: Path, log: Any
) -> None:
    """Run one part until it ends or its deadline is over, with its rows in ``outcome`` as they come."""
    rows = out / "rows.tmp"
    rows.write_text("")
    begin, start = time.monotonic(), log.tell()
    job = subprocess.Popen(
        [sys.executable, "-u", *command_line(command)],
        stdout=log,
        stderr=subprocess.STDOUT,
        cwd=folder_of(command),
        env=environment(rows),
        start_new_session=True,  # a group of its own, which is ended with all its children
    )
    try:
        while job.poll() is None and time.monotonic() - begin < deadline_s:
            time.sleep(0.2)
            outcome.seconds = time.monotonic() - begin
            if len(found := read_rows(rows)) > len(outcome.rows):
                outcome.rows = found
                write_report(outcomes, out)
        results = {None: f"cut off after {deadline_s:.0f} s", 0: "passed", SKIPPED: "skipped"}
        outcome.result = results.get(job.poll(), f"failed with exit code {job.poll()}")
    except BaseException:
        outcome.result = "cut off: check.py was ended"
        raise
    finally:
        with suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            job.wait(END_S)
        outcome.rows = read_rows(rows)
        rows.unlink()
        output = shortened(log, start)
        if outcome.result != "passed":
            outcome.tail = output.splitlines()[-TAIL_LINES:]
        write_report(outcomes, out)


def shortened(log: Any, start: int) -> str:
    """What ``log`` holds from ``start`` on; where that is too much, its middle is left out from now on."""
    log.seek(start)
    output: str = log.read()
    if (left_out := len(output) - MOST_OUTPUT) > 0:
        half = MOST_OUTPUT // 2
        output = f"{output[:half]}\n... {left_out} characters are left out ...\n{output[-half:]}"
        log.seek(start)
        log.truncate()
        log.write(output)
        log.flush()
    log.seek(0, os.SEEK_END)
    return output


def command_line(command: Sequence[str]) -> list[str]:
    """Python's arguments that run a part: a module, or a script by its path."""
    return [*command] if Path(command[0]).is_absolute() else ["-m", *command]


def folder_of(command: Sequence[str]) -> Path:
    """Where a part runs, whose modules it gets: the built copy, but for those that come before it."""
    return ROOT if command[0] in BEFORE_BUILD else tree()


def tree() -> Path:
    """The built copy; the checkout while there is none."""
    built = SCRATCH / "tree"
    return built if (built / "singa_lite").is_dir() else ROOT


def environment(rows: Path) -> dict[str, str]:
    path = [str(tree()), str(SITE), *filter(None, [os.environ.get("PYTHONPATH")])]
    caches = {name: str(SCRATCH / "cache" / name.lower()) for name in CACHES}
    return {**os.environ, **caches, "PYTHONPATH": os.pathsep.join(path), "GPU_CHECK_ROWS": str(rows)}


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a file of rows."""
    complete = path.read_text().rpartition("\n")[0]
    return [json.loads(line) for line in complete.splitlines()]


# ---- the report --------------------------------------------------------------------------------------


def missed(outcome: Outcome) -> bool:
    return any(row["met"] is False for row in outcome.rows)


def write_report(outcomes: Sequence[Outcome], out: Path) -> None:
    """Both files, each replaced as a whole."""
    machine = {row["what"]: row["figure"] for o in outcomes if o.part == "machine" for row in o.rows}
    content = {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": commit(),
        "machine": machine,
        "parts": [asdict(outcome) for outcome in outcomes],
    }
    for name, text in (
        ("gpu-check.json", json.dumps(content, indent=1)),
        ("gpu-check.md", markdown(content)),
    ):
        temporary = out / f"{name}.tmp"
        temporary.write_text(text + "\n")
        temporary.replace(out / name)


@functools.cache
def commit() -> str:
    """The checkout's commit, "+" if files differ from it; without git that of GPU_CHECK_COMMIT, else "unknown"."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty=+", "--abbrev=10", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return os.environ.get("GPU_CHECK_COMMIT") or "unknown"


def markdown(content: Mapping[str, Any]) -> str:
    """The report for people."""
    lines = [f"# GPU check, {content['date']}, commit {content['commit']}", ""]
    lines += [f"- {what}: {figure}" for what, figure in content["machine"].items()]
    lines += ["", "| what | figure | required | met | note |", "|---|---|---|---|---|"]
    for part in content["parts"]:
        if part["part"] != "machine":
            lines += [table_row(row) for row in part["rows"]]
    lines += ["", "| part | result | seconds |", "|---|---|---|"]
    lines += [f"| {part['part']} | {part['result']} | {part['seconds']:.0f} |" for part in content["parts"]]
    for part in content["parts"]:
        if part["tail"]:
            lines += [
                "",
                f"Last lines of {part['part']} ({part['result']}):",
                "",
                "```",
                *part["tail"],
                "```",
            ]
    return "\n".join(lines)


def table_row(row: Mapping[str, Any]) -> str:
    met = {True: "met", False: "**missed**", None: ""}[row["met"]]
    figure = f"{row['figure']:.4g}" if isinstance(row["figure"], float) else row["figure"]
    cells = [row["what"], figure, row["required"], met, row["note"]]
    texts = (" ".join(str(cell).split()).replace("|", "\\|") for cell in cells)
    return f"| {' | '.join(texts)} |"


if __name__ == "__main__":
    sys.exit(main())
