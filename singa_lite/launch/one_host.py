# SPDX-License-Identifier: Apache-2.0
"""Run one command as the workers and servers of a job on this host, and leave nothing behind.

What lives here: starting the ranks once, from their options to their exit code. What does not: supervising them until
the last has ended (supervise.py), what remains when this process is killed (reaper.py), starting them again
(restart.py), finding the world from inside a rank (../comm/), merging the ranks' output (output.py), their names
(process_names.py), the command line (command.py).
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..comm.inspect_job import reports_at_sigquit
from ..comm.job import threads_per_rank
from ..comm.progress import VARIABLE
from ..errors import CommError, OptionError, check_int
from ..path_arguments import why_no_folder
from .output import RankOutput
from .process_names import ProcessName, rank_names, role_names
from .rank_wrapper import WAITED
from .reaper import Reaper, kill_sessions, remove_segments, start_child
from .supervise import DRAIN_S, RunningJob, noted_signals

EXIT_TIMEOUT_S = 3600.0  # longer than a last evaluation by one rank
MAX_RANKS = 1024  # of a host, see native/comm/segment.h
SHORTAGES = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)
STOP_TIMEOUT_S = 30.0  # to save a checkpoint in; Kubernetes waits as long by default


@dataclass(frozen=True)
class LaunchOptions:
    """How ranks are run.

    Attributes:
        timeout_s: SINGA_LITE_TIMEOUT_S of the ranks; None leaves it as it is.
        exit_timeout_s: seconds that the other ranks have to end after a rank has ended well.
        stop_timeout_s: seconds that ranks which take requests to stop have to end after one, see Note [requests] in
            supervise.py.
        log_dir: see ``RankOutput``.
        num_servers: servers to start beside the workers, >= 0; None: none, and SINGA_LITE_NUM_SERVERS stays as it is.
        link: SINGA_LITE_LINK of the ranks (link.py); None leaves it as it is. Not for ``launch_host_round``.
        worker_env, server_env: variables that the workers, or the servers, get beside those of this process.
    """

    timeout_s: float | None = None
    exit_timeout_s: float = EXIT_TIMEOUT_S
    stop_timeout_s: float = STOP_TIMEOUT_S
    log_dir: Path | None = None
    num_servers: int | None = None
    link: str | None = None
    worker_env: Mapping[str, str] = field(default_factory=dict)
    server_env: Mapping[str, str] = field(default_factory=dict)


def launch(command: Sequence[str], num_workers: int, options: LaunchOptions | None = None) -> int:
    """Run ``sys.executable command...`` as the workers and servers of one job and wait for all of them.

    The workers are the ranks 0 .. num_workers-1, the servers follow. They get no standard input. Their lines come out
    prefixed by the rank, or with servers by the role; OMP_NUM_THREADS, when unset, is 1 for a server, and the workers
    share the other cores. When a rank fails the others get two seconds to report why, then SIGTERM, then SIGKILL.

    Args:
        command: arguments of the Python interpreter, e.g. ["train.py", "--epochs", "2"] or ["-m", "train"].
        num_workers: workers to start, >= 1.
        options: None: the defaults.

    Returns:
        0, or the exit code of the rank that failed first (128 + signal number if a signal ended it), or else 128 +
        signal number when a signal stopped this process (130 for Ctrl-C), or 1 when ranks did not end in time.

    Raises:
        OptionError: an argument is not what it should be; this is not the main thread, where Python handles signals;
            the folder of logs cannot be made.
        CommError: the system gives no more processes, pipes or files.
        BrokenPipeError: the reader of the output has gone.
    """
    _check_launch(command, num_workers, options)
    options = share_cores_of_host(options or LaunchOptions(), num_workers)
    output = open_output(num_workers, options)
    with noted_signals() as signals:
        outcome = launch_round(command, num_workers, options, output, signals)
    if outcome.error is not None:
        raise outcome.error
    return outcome.code


def _check_launch(command: Any, num_workers: Any, options: Any) -> None:
    is_list = isinstance(command, (list, tuple)) and bool(command)
    if not is_list or not all(isinstance(each, (str, os.PathLike)) for each in command):
        raise OptionError(f"launch: command = {command!r} must be a list of text, such as ['train.py']")
    check_int("launch", "num_workers", num_workers, 1)
    if not isinstance(options, (LaunchOptions, type(None))):
        raise OptionError(f"launch: options must be LaunchOptions, not {type(options).__name__}")
    if threading.current_thread() is not threading.main_thread():
        raise OptionError(
            "launch: it handles signals, as Python does in the main thread alone; call it there"
        )


def share_cores_of_host(options: LaunchOptions, num_workers: int) -> LaunchOptions:
    """Return ``options`` with the OMP_NUM_THREADS of processes that share this host's cores, where it is unset.

    Once for all rounds: with other threads products are added up in another order, so a job of order="fixed" that went
    on with fewer ranks would not have the same bits.
    """
    num_servers = options.num_servers or 0
    if os.environ.get("OMP_NUM_THREADS") or num_workers + num_servers == 1:
        return options
    threads = str(threads_per_rank(num_workers, num_servers))
    return replace(
        options,
        worker_env={"OMP_NUM_THREADS": threads, **options.worker_env},
        server_env={"OMP_NUM_THREADS": "1", **options.server_env},
    )


@dataclass(frozen=True)
class Round:
    """How the processes of a job have ended, from one start of all to the end of all.

    Attributes:
        code: the launcher's exit code.
        failed: number of the process that failed of itself, or that could not be started; None: no single one.
        steps: the newest step of each rank; None for one that has counted none.
        started_at, ended_at: when the round began and when it failed or ended, in seconds of ``time.time``.
        error: a process could not be started.
        has_progress: the ranks could report their steps; if not, ``steps`` says nothing.
    """

    code: int
    failed: int | None
    steps: Sequence[int | None]
    started_at: float
    ended_at: float
    error: CommError | None = None
    has_progress: bool = True


def launch_round(
    command: Sequence[str],
    num_workers: int,
    options: LaunchOptions,
    output: RankOutput,
    signals: Sequence[int],
) -> Round:
    """Run the processes of one job from their start to their end, see ``launch``.

    Args:
        options: from ``share_cores_of_host``.
        output: from ``open_output``; one for all rounds.
        signals: those that have come to this process, see ``noted_signals``.
    """
    rendezvous_id, started_at = os.urandom(16).hex(), time.time()
    names = _names(num_workers, options)
    try:
        timeouts = options.exit_timeout_s, options.stop_timeout_s
        job = RunningJob(rendezvous_id, names, output, signals, *timeouts)
        reaper = Reaper(rendezvous_id)
    except OSError as error:
        remove_segments(rendezvous_id)
        failed = CannotStart(f"launch: cannot start {len(names)} processes: {_with_help(error)}")
        return Round(1, None, [None] * len(names), started_at, time.time(), failed)
    failure: CommError | None = None
    try:
        with reports_at_sigquit(output.report, options.log_dir, rendezvous_id):
            _start_all(job, reaper, command, num_workers, options)
            job.supervise()
    except CannotStart as error:
        failure = error
    finally:
        kill_sessions([process.pid for process in job.processes])
        try:
            job.collect()
        finally:  # writing the ranks' last lines fails where the reader is gone
            steps = job.progress.steps()
            remove_segments(rendezvous_id)
            reaper.dismiss()
    if failure is not None:
        output.rest(DRAIN_S)
        return Round(1, len(job.processes), steps, started_at, time.time(), failure)
    code = job.report()
    output.rest(DRAIN_S)
    ended_at, has_progress = job.ended_at or time.time(), job.progress.is_there
    return Round(code, cause_of(*job.first_failure()), steps, started_at, ended_at, has_progress=has_progress)


def cause_of(rank: int | None, distance: int) -> int | None:
    """Return the rank whose failure is nearest to the cause; None where it has only waited for another one."""
    return rank if distance < WAITED else None


def open_output(num_workers: int, options: LaunchOptions) -> RankOutput:
    """Return what writes the lines of the processes, with the folder of logs made.

    Raises:
        OptionError: ``log_dir`` is not a folder or cannot be made. CommError: the logs cannot be opened.
    """
    if options.log_dir is not None:
        try:
            options.log_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OptionError(
                f"--log-dir {options.log_dir}: cannot be made as a folder: {why_no_folder(error)}"
            ) from error
    open_standard_descriptors()
    names = _names(num_workers, options)
    try:
        return RankOutput(names, options.log_dir)
    except OSError as error:
        if options.log_dir is None or error.errno in (errno.EMFILE, errno.ENFILE):
            raise CommError(f"launch: cannot start {len(names)} processes: {_with_help(error)}") from error
        raise CommError(f"launch: cannot open the logs of --log-dir {options.log_dir}: {error}") from error


class CannotStart(CommError):
    """The system gives no more processes."""


def _with_help(error: OSError) -> str:
    """Return the text of ``error``, and what to do if the system is short of processes, memory or files."""
    if error.errno not in SHORTAGES:
        return str(error)
    return f"{error}; raise the limits of this shell (ulimit -n, ulimit -u) or start fewer processes"


def _names(num_workers: int, options: LaunchOptions) -> list[ProcessName]:
    return role_names(num_workers, options.num_servers) if options.num_servers else rank_names(num_workers)


def _start_all(
    job: RunningJob, reaper: Reaper, command: Sequence[str], num_workers: int, options: LaunchOptions
) -> None:
    common = common_environment(options) | job.progress.environ
    for rank, name in enumerate(job.names):
        if job.signals:  # to end: those that run get it at once
            return
        environ = dict(
            common,
            SINGA_LITE_RANK=str(rank),
            SINGA_LITE_WORLD_SIZE=str(len(job.names)),
            SINGA_LITE_RENDEZVOUS_ID=job.rendezvous_id,
            SINGA_LITE_LAUNCHER_PID=str(os.getpid()),
            SINGA_LITE_RESTART="0",
        )
        if options.link is not None:
            environ["SINGA_LITE_LINK"] = options.link
        environ.update(options.worker_env if rank < num_workers else options.server_env)
        try:
            process = _start(command, environ)
            job.add(rank, process)
            reaper.watch(process.pid)
        except OSError as error:
            raise CannotStart(
                f"launch: cannot start {name.text} of {len(job.names)} processes: {_with_help(error)}"
            ) from error


def common_environment(options: LaunchOptions) -> dict[str, str]:
    """Return this process's environment with what ``options`` say, for all processes of a job, on any host."""
    environ = dict(os.environ, PYTHONUNBUFFERED="1")
    environ.pop(VARIABLE, None)  # of a job that this launcher is part of
    if options.num_servers is not None:
        environ["SINGA_LITE_NUM_SERVERS"] = str(options.num_servers)
    if options.timeout_s is not None:
        environ["SINGA_LITE_TIMEOUT_S"] = str(options.timeout_s)
    if options.log_dir is not None:
        environ["SINGA_LITE_LOG_DIR"] = str(options.log_dir.absolute())
    return environ


def _start(command: Sequence[str], environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start one rank."""
    pipe = subprocess.PIPE
    return start_child([sys.executable, *command], env=environ, stdout=pipe, stderr=pipe)


def open_standard_descriptors() -> None:
    """Open /dev/null in place of closed standard streams, or a pipe would get their numbers."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
