# SPDX-License-Identifier: Apache-2.0
"""The command line `singa-lite`, of which each command's own work is elsewhere."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from io import TextIOWrapper
from pathlib import Path
from types import MappingProxyType
from typing import Any

from .bench.command import run_command
from .comm.flight_report import SHOWN_CALLS
from .comm.inspect_job import inspect_job
from .errors import OptionError
from .launch.command import add_run, launch_job

DESCRIPTION = (
    "run starts ranks, inspect shows what they do, bench compares dist_options, plan predicts their step times, "
    "trace joins the parts of a trace, info says what works on this machine"
)
WITHOUT_OUTPUT = ("run", "trace")  # commands that do more than print
BENCHES = (
    "sync: train with several dist_options and compare them; compare: two results of sync; "
    "allreduce: time collectives"
)


class Parser(argparse.ArgumentParser):
    """As argparse's, but help that cannot be written is an error."""

    def print_help(self, file: Any = None) -> None:
        """Print the help to ``file`` (None: the output); OSError if that cannot be."""
        if file is None:
            _check_output()
        print(self.format_help(), end="", file=file, flush=True)


def _check_output() -> None:
    """Raise OSError if what is printed would be lost without a word."""
    if sys.stdout is None:
        raise OSError("the standard output is closed")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line ``arguments`` (None: those of this process); returns the exit code."""
    if isinstance(sys.stdout, TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # paths that it cannot encode
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = Parser(prog="singa-lite", description=DESCRIPTION)
    return run_command(parser, lambda: _run(parser, words))


def _run(parser: Parser, words: list[str]) -> int:
    parser.add_argument("--version", action="store_true", help="print the version of this package")
    if words and words[0] not in WITHOUT_OUTPUT:
        _check_output()
    if words == ["--version"]:
        from .info_command import print_version

        return print_version()
    commands = parser.add_subparsers(required=True, metavar=" | ".join(COMMANDS))
    named = [COMMANDS[word] for word in words[:1] if word in COMMANDS]
    # only the one: `run` would start later by what `plan` and `info` import
    for add in named or COMMANDS.values():
        add(commands)
    options, unknown = parser.parse_known_args(words)
    if unknown:
        place = "; options of the script go behind it" if words[0] == "run" else ""
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{place}")
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
        "trace",
        help="join and remove what processes wrote that were not started by `run --trace`",
    )
    trace.add_argument(
        "folder", type=Path, metavar="FOLDER", help="that SINGA_LITE_TRACE named; removed if empty then"
    )
    trace.add_argument("file", type=Path, metavar="FILE", help="for the Chrome trace events")
    trace.set_defaults(action=lambda options: run_command(trace, lambda: _join(options.folder, options.file)))


def _add_info(commands: Any) -> None:
    from .info_command import print_info

    info = commands.add_parser("info", help="list what was built and which transports work")
    info.set_defaults(action=lambda options: run_command(info, print_info))


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


def _inspect(pid: int, num_calls: int) -> int:
    if num_calls < 1:
        raise OptionError(f"--calls {num_calls}: must be >= 1")
    print(inspect_job(pid, num_calls), end="")
    return 0


def _join(folder: Path, path: Path) -> int:
    from .comm.trace_file import join_trace

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


if __name__ == "__main__":
    sys.exit(main())
