# SPDX-License-Identifier: Apache-2.0
"""The command line: `singa-lite run` starts the ranks of a script, `singa-lite info` lists what works here."""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from . import _native
from .comm import find_transports
from .comm.launch import EXIT_TIMEOUT_S, LaunchOptions, launch
from .comm.rendezvous import threads_per_rank
from .errors import CommError

LIMIT_S = 30.0  # a broken MPI or driver may hang where its name is read
ASK_CUDA = (
    "from singa_lite import device as d; names = [d.device_query(i).split(chr(10))[0] for i in d.get_gpu_ids()]; "
    "print('works:', '; '.join(names)) if names else d.create_cuda_gpu()"
)
ASK_TRANSPORT = "from singa_lite.comm import find_transports; print(find_transports()[{!r}].describe())"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line ``arguments`` (None: those of this process); returns the exit code."""
    parser = argparse.ArgumentParser(prog="singa-lite", description=__doc__)
    commands = parser.add_subparsers(dest="name", required=True, metavar="run | info")
    commands.add_parser("info", help="list what was built and which transports work")
    run = commands.add_parser(
        "run",
        help="run a script as several ranks of this host",
        usage="singa-lite run -n N [--timeout-s S] [--exit-timeout S] [--log-dir DIR] [-m] SCRIPT [ARGUMENT ...]",
        description="Run SCRIPT as N ranks of this host. Every line of output begins with its rank; when a "
        "rank fails all are ended, and the exit code is that of the first failure.",
    )
    run.add_argument("-n", "--num-ranks", type=int, required=True, metavar="N", help="processes, >= 1")
    run.add_argument("--timeout-s", type=float, metavar="S", help="seconds a rank waits for another")
    run.add_argument(
        "--exit-timeout",
        type=float,
        default=EXIT_TIMEOUT_S,
        metavar="S",
        help="seconds the other ranks have to end after one has ended with 0 (default %(default)g)",
    )
    run.add_argument(
        "--log-dir",
        type=Path,
        metavar="DIR",
        help="append all output of each rank to DIR/rank-R.log; the terminal then leaves out what nobody reads in time",
    )
    run.add_argument("-m", dest="is_module", action="store_true", help="SCRIPT is the name of a module")
    run.add_argument("command", nargs=argparse.REMAINDER, metavar="SCRIPT", help="and its arguments")
    options = parser.parse_args(arguments)
    if options.name == "info":
        print(info())
        return 0
    return _run(run, options)


def info() -> str:
    """List what was built and which transports work here, and why the others do not."""
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
        *((f"transport {word}", _ask(ASK_TRANSPORT.format(word))) for word in find_transports()),
        ("device cuda", _ask(ASK_CUDA)),
    ]
    return "\n".join(f"{name:16} {text}" for name, text in rows)


def package_version() -> str:
    """Return the installed version, or the path of a copy that is only on Python's path."""
    try:
        return version("singa-lite")
    except PackageNotFoundError:
        return f"not installed, used from {Path(__file__).parent}"


def _run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if options.num_ranks < 1:
        parser.error(f"-n {options.num_ranks}: at least one rank is needed")
    if options.timeout_s is not None and not options.timeout_s > 0:
        parser.error(f"--timeout-s {options.timeout_s:g}: must be > 0")
    if not options.exit_timeout > 0:
        parser.error(f"--exit-timeout {options.exit_timeout:g}: must be > 0")
    if not command:
        parser.error("which script? singa-lite run -n 2 train.py")
    if options.num_ranks > 1 and sys.platform != "linux":
        parser.error(
            f"-n {options.num_ranks}: shared memory works on Linux only; use mpiexec on {sys.platform}"
        )
    if options.is_module:
        command = ["-m", *command]
    elif not Path(command[0]).exists():
        parser.error(f"there is no script {command[0]!r} in {os.getcwd()}")
    try:
        launch_options = LaunchOptions(options.timeout_s, options.exit_timeout, options.log_dir)
        return launch(command, options.num_ranks, launch_options)
    except CommError as error:
        sys.exit(f"singa-lite run: {error}")
    except BrokenPipeError:  # the reader of our output, `head` say, has gone; all ranks are ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or Python complains at exit
        return 141  # 128 + SIGPIPE, as in a shell


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
    # -c puts the current folder first, where a package of this name may be that is not the one running
    command = [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; {code}"]
    try:
        answer = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return f"no: no answer within {LIMIT_S:g} s"
    if answer.returncode != 0:
        last = (answer.stderr.strip().splitlines() or ["no message"])[-1]
        return f"no: {last}"
    return answer.stdout.strip(chr(0)).strip().splitlines()[0]


if __name__ == "__main__":
    sys.exit(main())
