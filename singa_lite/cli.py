# SPDX-License-Identifier: Apache-2.0
"""The command line: `run` starts ranks, `inspect` shows what they do, `bench` measures, `plan` predicts, `info`..."""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from . import _native
from .backend.cpu.bfloat16 import describe
from .bench.command import run_command
from .comm import find_transports
from .comm.flight_report import SHOWN_CALLS
from .comm.inspect_job import inspect_job
from .comm.rendezvous import threads_per_rank
from .comm.trace_file import join_trace
from .errors import OptionError
from .launch_command import add_run, launch_job

BENCHES = (
    "sync: train with several dist_options and compare them; compare: two results of sync; "
    "allreduce: time collectives"
)
LIMIT_S = 30.0  # a broken MPI or driver may hang where its name is read
ASK_CUDA = (
    "from singa_lite import device as d; names = [d.device_query(i).split(chr(10))[0] for i in d.get_gpu_ids()]; "
    "print('works:', '; '.join(names)) if names else d.create_cuda_gpu()"
)
ASK_TRANSPORT = "from singa_lite.comm import find_transports; print(find_transports()[{!r}].describe())"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line ``arguments`` (None: those of this process); returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(prog="singa-lite", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar=" | ".join(COMMANDS))
    named = [COMMANDS[word] for word in words[:1] if word in COMMANDS]
    for add in (
        named or COMMANDS.values()
    ):  # one: what `plan` and `info` import would delay the start of `run`
        add(commands)
    options = parser.parse_args(words)
    code: int = options.action(options)
    return code


def _add_run(commands: Any) -> None:
    run = add_run(commands)
    run.set_defaults(action=lambda options: run_command(run, lambda: launch_job(run, options)))


def _add_inspect(commands: Any) -> None:
    inspect = commands.add_parser("inspect", help="show what every rank of a running job is doing")
    inspect.add_argument("pid", type=int, metavar="PID", help="of a rank, or of what started the ranks")
    inspect.add_argument(
        "--calls",
        type=int,
        default=SHOWN_CALLS,
        metavar="N",
        help="how many last calls of each rank (default %(default)s)",
    )
    inspect.set_defaults(
        action=lambda options: run_command(inspect, lambda: _inspect(options.pid, options.calls))
    )


def _add_bench(commands: Any) -> None:
    bench = commands.add_parser("bench", help="compare dist_options, or time collectives")
    bench.add_argument("what", choices=["sync", "compare", "allreduce"], help=BENCHES)
    bench.add_argument(
        "arguments", nargs=argparse.REMAINDER, help="of it; `singa-lite bench sync --help` lists them"
    )
    bench.set_defaults(action=lambda options: _bench(options.what, options.arguments))


def _add_plan(commands: Any) -> None:
    from .bench.plan_command import add_plan, run_plan

    plan = add_plan(commands)
    plan.set_defaults(action=lambda options: run_command(plan, lambda: run_plan(options)))


def _add_trace(commands: Any) -> None:
    trace = commands.add_parser(
        "trace", help="join what processes wrote that were not started by `run --trace`"
    )
    trace.add_argument("folder", type=Path, metavar="FOLDER", help="that SINGA_LITE_TRACE named")
    trace.add_argument("file", type=Path, metavar="FILE", help="for the Chrome trace events")
    trace.set_defaults(action=lambda options: run_command(trace, lambda: _join(options.folder, options.file)))


def _add_info(commands: Any) -> None:
    parser = commands.add_parser("info", help="list what was built and which transports work")
    parser.set_defaults(action=_print_info)


COMMANDS: Mapping[str, Callable[[Any], None]] = MappingProxyType(  # Any: argparse keeps their class private
    {
        "run": _add_run,
        "inspect": _add_inspect,
        "bench": _add_bench,
        "plan": _add_plan,
        "trace": _add_trace,
        "info": _add_info,
    }
)


def _print_info(options: argparse.Namespace) -> int:
    print(info())
    return 0


def _inspect(pid: int, num_calls: int) -> int:
    if num_calls < 1:
        raise OptionError(f"--calls {num_calls}: must be >= 1")
    print(inspect_job(pid, num_calls), end="")
    return 0


def _join(folder: Path, path: Path) -> int:
    print(join_trace(folder, path))
    return 0


def _bench(what: str, arguments: Sequence[str]) -> int:
    """Run a command of the folder bench/."""
    if what == "sync":
        from .bench.sync import main as bench
    elif what == "compare":
        from .bench.compare import main as bench
    else:
        from .bench.allreduce import main as bench
    return bench(arguments)


def _python(code: str) -> list[str]:
    """Return the command that runs Python code with this process's package."""
    # -c puts the current folder first, where a package of this name may be that is not the one running
    return [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; {code}"]


def info() -> str:
    """List what was built and which transports work here, and why the others do not."""
    from importlib.metadata import version

    rows = [
        ("singa-lite", package_version()),
        ("python", f"{platform.python_version()} ({sys.executable})"),
        ("numpy", version("numpy")),
        (
            "platform",
            f"{platform.system()} {platform.machine()}, {threads_per_rank(1)} cores for this process",
        ),
        *((f"native {name}", f"{what}: {_native.load(name)[1]}") for name, what in _native.MODULES.items()),
        ("oneDNN", _onednn()),
        ("bfloat16", describe()),
        *((f"transport {word}", _ask(ASK_TRANSPORT.format(word))) for word in find_transports()),
        ("device cuda", _ask(ASK_CUDA)),
    ]
    return "\n".join(f"{name:16} {text}" for name, text in rows)


def package_version() -> str:
    """Return the installed version, or the path of a copy that is only on Python's path."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("singa-lite")
    except PackageNotFoundError:
        return f"not installed, used from {Path(__file__).parent}"


def _onednn() -> str:
    """Return which oneDNN the CPU kernels were built with, and how many threads they use."""
    kernels, reason = _native.load("_kernels")
    if kernels is None:
        return f"no: {reason}"
    if not kernels.onednn:
        return "no: built without it, so convolutions and matrix products are numpy's"
    return f"{kernels.onednn}, {kernels.num_threads()} threads"


def _ask(code: str) -> str:
    """Run Python code in a process of its own, so that nothing here can hang; return its first line, or "no: why"."""
    try:
        answer = subprocess.run(
            _python(code), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return f"no: no answer within {LIMIT_S:g} s"
    if answer.returncode != 0:
        last = (answer.stderr.strip().splitlines() or ["no message"])[-1]
        return f"no: {last}"
    return answer.stdout.strip(chr(0)).strip().splitlines()[0]


if __name__ == "__main__":
    sys.exit(main())
