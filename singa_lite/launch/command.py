# SPDX-License-Identifier: Apache-2.0
"""`singa-lite run`: its arguments, and the launch that they ask for.

What does not live here: starting processes (one_host.py, several_hosts.py), starting them again (restart.py), the other
commands (../cli.py).
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..comm.job import LAUNCHERS, task_of_mpi
from ..comm.link import parse_link
from ..path_arguments import folder
from .hosts import read_hosts
from .one_host import EXIT_TIMEOUT_S, MAX_RANKS, STOP_TIMEOUT_S, LaunchOptions
from .restart import RestartOptions, check_restart, launch_host_rounds, launch_rounds
from .several_hosts import Placement, srun_line

RSH = "ssh"
MAX_HOSTS = 1024
# options that have nothing like them in the line for srun
NOT_WITH_SRUN = (
    "max_restarts",
    "min_ranks",
    "log_dir",
    "trace",
    "env_worker",
    "env_server",
    "stop_timeout",
    "sync_dst_dir",
    "rsh",
)
DESCRIPTOR = re.compile(r"/dev/(stdin|fd/.*)|/proc/[^/]+/(task/[^/]+/)?fd/.*")
USAGE = (
    "singa-lite run -n W [-s S] [-H FILE] [--sync-dst-dir DIR] [--launcher local|mpi|ssh] [--rsh CMD] "
    "[--env-worker NAME:VALUE] [--env-server NAME:VALUE] [--log-dir DIR] [--link RATE,LATENCY] [--trace FILE] "
    "[--max-restarts K] [--checkpoint FOLDER] [--min-ranks M] [--timeout-s T] [--exit-timeout T] [--stop-timeout T] "
    "[-m] SCRIPT [ARGUMENT ...]"
)


def add_run(commands: Any) -> argparse.ArgumentParser:
    """Add the command `run` to the subparsers ``commands`` (Any: argparse keeps their class private)."""
    run: argparse.ArgumentParser = commands.add_parser(
        "run",
        help="run a script as the workers and servers of a job",
        usage=USAGE,
        allow_abbrev=False,  # or the script's options would be taken for abbreviations of these
        description="Run SCRIPT as W workers and S servers, on this host or with -H on several. Every line of "
        "output begins with its rank or role; when a process fails all are ended, and the exit code is that of the "
        "first failure.",
    )
    add = run.add_argument
    add("-n", "--num-workers", type=int, required=True, metavar="W", help="workers (ranks), >= 1")
    add("-s", "--num-servers", type=int, metavar="S", help="servers of a kvstore, >= 0 (default 0)")
    add(
        "-H",
        "--hosts",
        type=Path,
        metavar="FILE",
        help="file with a host a line: HOST, HOST:COUNT or HOST slots=COUNT; MPICH's mpiexec starts processes there",
    )
    add(
        "--sync-dst-dir",
        type=Path,
        metavar="DIR",
        help="folder on every host to which the current folder is copied first, and in which the processes run",
    )
    add(
        "--launcher",
        metavar="local|mpi|ssh",
        help="local: processes of this host, the default without -H; mpi, ssh: by MPICH's mpiexec, the default with -H",
    )
    add("--rsh", metavar="CMD", help=f"the remote shell for -H, with its options (default {RSH})")
    for role in ("worker", "server"):
        add(
            f"--env-{role}",
            action="append",
            default=[],
            metavar="NAME:VALUE",
            help=f"set an environment variable of the {role}s; may be repeated",
        )
    add(
        "--log-dir",
        type=folder,
        metavar="DIR",
        help="append all output of each rank to DIR/rank-R.log, where there are servers to DIR/worker-R.log and "
        "DIR/server-R.log; the terminal then leaves out what nobody reads in time",
    )
    add(
        "--link",
        metavar="RATE,LATENCY",
        help="have collectives take as long as over a link of this rate and latency per hop for each rank, for example "
        "100mbit,1ms; kbit, mbit, gbit; us, ms, s; not with -H or -s",
    )
    add(
        "--trace",
        type=Path,
        metavar="FILE",
        help="write what each rank did in its steps, as Chrome trace events for ui.perfetto.dev; with -H to a folder "
        "that all hosts share",
    )
    add(
        "--max-restarts",
        type=int,
        default=0,
        metavar="K",
        help="start all processes again when one has failed, at most K times in all (default 0)",
    )
    add(
        "--checkpoint",
        type=folder,
        metavar="FOLDER",
        help="folder for the job's checkpoints (SINGA_LITE_CHECKPOINT), made if it is missing; with -H one that all "
        "hosts share",
    )
    add(
        "--min-ranks",
        type=int,
        metavar="M",
        help="restart with fewer workers, but not fewer than M, when one cannot start or fails twice running before "
        "its first step",
    )
    add("--timeout-s", type=float, metavar="T", help="seconds a process waits for another (default 300)")
    add(
        "--exit-timeout",
        type=float,
        metavar="T",
        help=f"seconds the other processes have to end after one has ended with 0 (default {EXIT_TIMEOUT_S:g}); not "
        "with -H",
    )
    add(
        "--stop-timeout",
        type=float,
        metavar="T",
        help="seconds that ranks which take signals as requests to stop (DistOpt.stop_on_signals) have after SIGTERM "
        f"or SIGUSR1 (default {STOP_TIMEOUT_S:g}); others have two",
    )
    add("-m", dest="is_module", action="store_true", help="SCRIPT is the name of a module")
    add("command", nargs=argparse.REMAINDER, metavar="SCRIPT", help="and its arguments")
    return run


def launch_job(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Start the processes that the arguments of `run` ask for, wait for them, and return the exit code.

    Raises:
        OptionError: an argument that is wrong, or not for this use. CommError: the processes cannot be started.
        BrokenPipeError: the reader of the output has gone; all ranks are ended.
    """
    _check_is_alone(parser)
    _check_numbers(parser, options)
    given = LaunchOptions(
        timeout_s=options.timeout_s,
        exit_timeout_s=EXIT_TIMEOUT_S if options.exit_timeout is None else options.exit_timeout,
        stop_timeout_s=STOP_TIMEOUT_S if options.stop_timeout is None else options.stop_timeout,
        log_dir=options.log_dir,
        num_servers=options.num_servers,
        link=options.link,
        worker_env=_variables(parser, "--env-worker", options.env_worker),
        server_env=_variables(parser, "--env-server", options.env_server),
    )
    restart = RestartOptions(options.max_restarts, options.checkpoint, options.min_ranks)
    is_local, command = _is_local(parser, options), _command(parser, options)
    placement = None
    if not is_local:
        placement = Placement(read_hosts(options.hosts), _rsh(parser, options.rsh), options.sync_dst_dir)
        if "SLURM_JOB_ID" in os.environ and "SLURM_STEP_NUM_TASKS" not in os.environ:
            left_out = [f"--{name.replace('_', '-')}" for name in NOT_WITH_SRUN if getattr(options, name)]
            note = f" (without {', '.join(left_out)})" if left_out else ""
            line = srun_line(command, options.num_workers, given, options.checkpoint)
            parser.error(f"-H: this is a Slurm allocation, where srun starts processes{note}: {line}")
    restart = check_restart(restart, options.num_workers)
    with _tracing(options.trace) as variables:
        launch_options = replace(given, worker_env={**given.worker_env, **variables})
        if placement is None:
            return launch_rounds(command, options.num_workers, launch_options, restart)
        return launch_host_rounds(command, options.num_workers, placement, launch_options, restart)


def _command(parser: argparse.ArgumentParser, options: argparse.Namespace) -> list[str]:
    """Return the arguments of Python."""
    command: list[str] = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        parser.error("which script? singa-lite run -n 2 train.py")
    if options.is_module:
        return ["-m", *command]
    if not os.path.exists(command[0]):  # False too, not an OSError, of a name too long
        parser.error(f"there is no script {command[0]!r} in {os.getcwd()}")
    is_file = os.path.isfile(command[0]) or os.path.isdir(command[0])
    is_alone = options.num_workers + (options.num_servers or 0) == 1
    if _is_descriptor(command[0]) or not (is_file or is_alone):
        parser.error(f"{command[0]!r} is no file that every process can read; write the script to one")
    if command[0].startswith("-"):  # Python would take it for an option
        return [os.path.join(os.curdir, command[0]), *command[1:]]
    return command


def _is_descriptor(path: str) -> bool:
    """Return whether a path leads to an open file of the process that looks, as /dev/stdin does."""
    while not DESCRIPTOR.fullmatch(path := os.path.abspath(path)):
        if not os.path.islink(path):
            return False
        path = os.path.join(os.path.dirname(path), os.readlink(path))
    return True


def _tracing(path: Path | None) -> AbstractContextManager[dict[str, str]]:
    if path is None:
        return nullcontext({})
    from ..comm.trace_file import tracing  # Note [imports]

    return tracing(path)


def _check_is_alone(parser: argparse.ArgumentParser) -> None:
    """Refuse to be one of several launchers, which MPI or Slurm have started and of which each would have a job."""
    task = task_of_mpi()
    if task is not None:
        _, rank, size = task
        found = {
            launcher: name for launcher, (name, _) in LAUNCHERS.items() if os.environ.get(name) == str(size)
        }
        parser.error(
            f"this launcher is task {rank} of {size} of {' or '.join(found)}, and each would start a job of its own; "
            "start the script itself with that, or one launcher, with -H for several hosts (where separate jobs are "
            f"meant: unset {' '.join(found.values())})"
        )


def _check_numbers(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    if options.num_workers < 1:
        parser.error(f"-n {options.num_workers}: at least one rank is needed")
    if options.hosts is None and options.num_workers > MAX_RANKS:
        parser.error(f"-n {options.num_workers}: a host has at most {MAX_RANKS} ranks")
    if options.num_workers > MAX_RANKS * MAX_HOSTS:
        parser.error(f"-n {options.num_workers}: at most {MAX_RANKS * MAX_HOSTS} ranks")
    if (options.num_servers or 0) < 0:
        parser.error(f"-s {options.num_servers}: must be >= 0")
    if options.env_server and not options.num_servers:
        parser.error("--env-server: there are no servers; start some with -s")
    if options.link is not None:
        parse_link("--link", options.link)
        if options.num_servers:
            parser.error("--link: is for collectives, not for messages to servers; leave out -s")
        if options.hosts is not None:
            parser.error("--link: not with -H; links between hosts are real")
    for name in ("timeout_s", "stop_timeout", "exit_timeout"):
        seconds = getattr(options, name)
        if seconds is not None and not seconds > 0:
            parser.error(f"--{name.replace('_', '-')} {seconds:g}: must be > 0")


def _is_local(parser: argparse.ArgumentParser, options: argparse.Namespace) -> bool:
    """Return whether the processes run on this host without MPI; check the options that depend on it."""
    launcher = options.launcher or ("mpi" if options.hosts else "local")
    if launcher in ("sge", "yarn"):
        parser.error(
            f"--launcher {launcher}: not supported; in a job of that scheduler start the script with mpiexec or srun"
        )
    if launcher not in ("local", "mpi", "ssh"):
        parser.error(f"--launcher {launcher}: expected local, mpi or ssh")
    if launcher != "local":
        if options.hosts is None:
            parser.error(f"--launcher {launcher}: needs a host file, -H FILE")
        if options.exit_timeout is not None:
            parser.error(
                "--exit-timeout: not with -H; MPI waits for all processes, as long as --timeout-s says"
            )
        return False
    if options.hosts is not None:
        parser.error("--launcher local: starts processes on this host only; leave out -H")
    if options.sync_dst_dir is not None:
        parser.error("--sync-dst-dir: there are no hosts to copy to; give -H FILE")
    if options.rsh is not None:
        parser.error("--rsh: there are no hosts to reach; give -H FILE")
    if options.num_workers + (options.num_servers or 0) > 1 and sys.platform != "linux":
        parser.error(
            f"-n {options.num_workers}: shared memory works on Linux only; use mpiexec on {sys.platform}"
        )
    return True


def _rsh(parser: argparse.ArgumentParser, given: str | None) -> list[str]:
    """Return the words of the remote shell's command."""
    try:
        words = shlex.split(RSH if given is None else given)
    except ValueError as error:
        parser.error(f"--rsh {given!r}: {error}")
    if not words:
        parser.error("--rsh: expected a command, for example ssh")
    return words


def _variables(parser: argparse.ArgumentParser, option: str, given: Sequence[str]) -> dict[str, str]:
    """Return the environment variables of "NAME:VALUE" words; a later one of a name counts."""
    for word in given:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*:.*", word, re.DOTALL):
            parser.error(f"{option} {word!r}: expected NAME:VALUE")
    return dict(word.split(":", 1) for word in given)
