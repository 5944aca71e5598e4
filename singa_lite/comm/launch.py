# SPDX-License-Identifier: Apache-2.0
"""Run one command as the workers and servers of a job on this host, and leave nothing behind.

What lives here: starting the ranks once, supervising them, ending them all when one fails. What does not: starting them
again (restart.py), finding the world from inside a rank (rendezvous.py), merging the ranks' output (output.py), their
names (process_names.py), the command line (../cli.py).

Note [nothing left]: every rank leads its own session, so a signal to its process group reaches its children
too. A reaper process, forked before the ranks, sees by the end of a pipe that the launcher is gone, even by
SIGKILL, then kills the groups and removes the shared-memory files; PR_SET_PDEATHSIG covers the reaper's death.

Note [requests]: SIGTERM and SIGUSR1 to the launcher are requests if a rank takes them as such
(DistOpt.stop_on_signals), which it writes into the progress file. Then those ranks alone get the signal, for the others
learn of it through collectives, or serve until the workers have left.
"""

from __future__ import annotations

import contextlib
import ctypes
import glob
import os
import secrets
import select
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO

from ..errors import CommError
from .inspect_job import reports_at_sigquit
from .lost_ranks import report_lost_rank
from .output import RankOutput
from .process_names import ProcessName, rank_names, role_names
from .progress import VARIABLE, ProgressFile
from .rendezvous import threads_per_rank

EXIT_TIMEOUT_S = 3600.0  # longer than a last evaluation by one rank
HELP = "raise the limits of this shell (ulimit -n, ulimit -u) or start fewer processes"
POLL_S = 0.05  # how soon a rank's end is noticed
FINAL_OUTPUT_S = 2.0  # the other ranks' time to print their own CommError
TERM_S = 0.8  # from SIGTERM to SIGKILL; with FINAL_OUTPUT_S under the 4 s in which a launcher must end
DRAIN_S = 0.5  # output that a dead rank's children may still send
STOP_TIMEOUT_S = 30.0  # to save a checkpoint in; Kubernetes waits as long by default
PR_SET_PDEATHSIG = 1  # linux/prctl.h
REQUESTS = (signal.SIGTERM, signal.SIGUSR1)  # see Note [requests]
STOP_SIGNALS = (signal.SIGINT, signal.SIGHUP, *REQUESTS)


@dataclass(frozen=True)
class LaunchOptions:
    """How ranks are run.

    Attributes:
        timeout_s: SINGA_LITE_TIMEOUT_S of the ranks; None leaves it as it is.
        exit_timeout_s: seconds that the other ranks have to end after a rank has ended well.
        stop_timeout_s: seconds that ranks which take requests to stop have to end after one, see Note [requests].
        log_dir: see ``RankOutput``.
        num_servers: servers to start beside the workers, >= 0; None: none, and SINGA_LITE_NUM_SERVERS stays as it is.
        link: SINGA_LITE_LINK of the ranks (link.py); None leaves it as it is. Not for ``launch_on_hosts``.
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
        CommError: the system gives no more processes, pipes or files.
        BrokenPipeError: the reader of the output has gone.
    """
    options = options or LaunchOptions()
    output = open_output(num_workers, options)
    with noted_signals() as signals:
        outcome = launch_round(command, num_workers, options, output, signals)
    if outcome.error is not None:
        raise outcome.error
    return outcome.code


@dataclass(frozen=True)
class Round:
    """How the processes of a job have ended, from one start of all to the end of all.

    Attributes:
        code: the launcher's exit code.
        failed: number of the process that failed first, or that could not be started; None: no single one.
        how: it ended, such as "exit code 1".
        steps: the newest step of each rank; None for one that has counted none.
        started_at, ended_at: when the round began and when it failed or ended, in seconds of ``time.time``.
        error: a process could not be started.
    """

    code: int
    failed: int | None
    how: str
    steps: Sequence[int | None]
    started_at: float
    ended_at: float
    error: CommError | None = None


def launch_round(
    command: Sequence[str],
    num_workers: int,
    options: LaunchOptions,
    output: RankOutput,
    signals: Sequence[int],
) -> Round:
    """Run the processes of one job from their start to their end, see ``launch``.

    Args:
        output: from ``open_output``; one for all rounds.
        signals: those that have come to this process, see ``noted_signals``.
    """
    rendezvous_id, started_at = secrets.token_hex(16), time.time()
    names = _names(num_workers, options)
    try:
        job = Job(rendezvous_id, names, options, output)
        reaper = Reaper(rendezvous_id)
    except OSError as error:
        remove_segments(rendezvous_id)
        failed = CannotStart(f"launch: cannot start {len(names)} processes: {error}; {HELP}")
        return Round(1, None, str(error), [None] * len(names), started_at, time.time(), failed)
    job.signals = signals
    failure: CommError | None = None
    try:
        with reports_at_sigquit(output.report, options.log_dir, rendezvous_id):
            _start_all(job, reaper, command, num_workers, options)
            job.supervise()
    except CannotStart as error:
        failure = error
    finally:
        kill_groups([process.pid for process in job.processes])
        try:
            job.collect()
        finally:  # writing the ranks' last lines fails where the reader is gone
            steps = job.progress.steps()
            remove_segments(rendezvous_id)
            reaper.dismiss()
    if failure is not None:
        output.rest(DRAIN_S)
        return Round(1, len(job.processes), str(failure), steps, started_at, time.time(), failure)
    code = job.report()
    output.rest(DRAIN_S)
    return Round(code, *job.first_failure(), steps, started_at, job.ended_at or time.time())


def open_output(num_workers: int, options: LaunchOptions) -> RankOutput:
    """Return what writes the lines of the processes; CommError if the logs cannot be opened."""
    open_standard_descriptors()
    names = _names(num_workers, options)
    try:
        return RankOutput(names, options.log_dir)
    except OSError as error:
        raise CommError(f"launch: cannot start {len(names)} processes: {error}; {HELP}") from error


class CannotStart(CommError):
    """The system gives no more processes."""


@contextlib.contextmanager
def noted_signals() -> Iterator[Sequence[int]]:
    """Inside: STOP_SIGNALS do not end this process but are appended to the sequence that this gives."""
    signals: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        signals.append(number)

    noted = [number for number in STOP_SIGNALS if signal.getsignal(number) != signal.SIG_IGN]  # nohup
    before = {number: signal.signal(number, note) for number in noted}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Job:
    """The ranks while they run, who failed first, and how far the ending of the others is.

    Attributes:
        signals: those that have come to this process, see ``noted_signals``.
        output: of the ranks.
        progress: how far they are.
        ended_at: when the first of them failed, by ``time.time``; None: none has.
    """

    def __init__(
        self,
        rendezvous_id: str,
        names: Sequence[ProcessName],
        options: LaunchOptions,
        output: RankOutput,
    ) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []
        self.names = names
        self.output = output
        output.begin(names)
        self.rendezvous_id = rendezvous_id
        self.progress = ProgressFile(Path(f"/dev/shm/singa_lite-{rendezvous_id}.progress"), len(names))
        self.ended_at: float | None = None
        self._selector = selectors.DefaultSelector()
        self._failures: list[tuple[int, int]] = []  # (rank, return code), in the order of their ends
        self._ended_before: list[int] = []  # with 0, before the first failure
        self._running: set[int] = set()
        self.signals: Sequence[int] = ()
        self._num_noticed = 0  # of them
        self._exit_timeout_s, self._exit_deadline = options.exit_timeout_s, float("inf")
        self._stop_timeout_s, self._stop_deadline = options.stop_timeout_s, float("inf")
        self._is_asked = False  # the ranks were asked to stop, see Note [requests]
        self._late: list[int] = []  # ranks that did not end in time
        self._deadline = float("inf")  # when the next of _endings goes to those that still run
        self._endings: list[int] = []
        self._ending = False

    def add(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        """Supervise ``process`` as ``rank``; ranks come in order."""
        self.processes.append(process)
        self._running.add(rank)
        for name in ("stdout", "stderr"):
            pipe: IO[bytes] = getattr(process, name)
            os.set_blocking(pipe.fileno(), False)
            self._selector.register(pipe, selectors.EVENT_READ, (rank, name))

    def supervise(self) -> None:
        """Pass output on until every rank has ended; end all of them after a failure or a signal."""
        while self._running:
            if self.output.is_full:
                self.output.wait_for_room(POLL_S)
            else:
                self._pump(POLL_S)
            self._notice_ends()
            self._notice_signals()
            if time.monotonic() >= min(self._exit_deadline, self._stop_deadline) and not self._endings:
                self._late = sorted(self._running)
                self._end_after(0, [signal.SIGTERM, signal.SIGKILL])
            if time.monotonic() >= self._deadline and self._endings:
                self._signal_running(self._endings.pop(0))
                self._deadline = time.monotonic() + TERM_S

    def collect(self) -> None:
        """Reap all ranks (they are dead or dying) and pass on what they wrote last."""
        for process in self.processes:
            process.wait()
        deadline = time.monotonic() + DRAIN_S
        is_over = False
        while self._selector.get_map() and not is_over:
            is_over = (
                time.monotonic() >= deadline
            )  # before a pass over all pipes: what a dead rank wrote is in them
            self._pump(POLL_S)
        for process in self.processes:
            for pipe in (process.stdout, process.stderr):
                assert pipe is not None
                pipe.close()
        self._selector.close()
        self.output.end_lines()

    def report(self) -> int:
        """Report which rank failed first and its final output; return the launcher's exit code."""
        code = self._report()
        deadline = time.monotonic() + DRAIN_S
        may_give_up = self.output.has_logs
        self.output.flush(lambda: (may_give_up or bool(self.signals)) and time.monotonic() > deadline)
        self.output.check()
        return code

    def first_failure(self) -> tuple[int | None, str]:
        """Return which rank failed first, and how; None if none did."""
        if not self._failures:
            return None, ""
        # A rank that ends takes the others' collectives with it: their CommError only repeats its failure.
        rank, code = min(self._failures, key=lambda failure: self.output.distance_to_cause(failure[0]))
        return rank, how_ended(code)

    def _report(self) -> int:
        if self.signals and not self._failures:
            return self._report_stop()
        if self._late:
            self.output.report(
                f"{self._names_of(self._late)} had not ended {self._exit_timeout_s:g} s after the others and was "
                "killed; see --exit-timeout"
            )
            return 1
        rank, how = self.first_failure()
        if rank is None:
            return 0
        ended = self._names_of(self._ended_before)
        before = f", after {ended} had ended with exit code 0" if ended else ""
        self.output.report(
            f"{self.names[rank].text} failed first ({how}){before}", self.output.final_output(rank)
        )
        code = dict(self._failures)[rank]
        return code if code > 0 else 128 - code

    def _report_stop(self) -> int:
        """Report how the ranks ended after a signal to this process."""
        name = signal.Signals(self.signals[0]).name
        if self._is_asked and all(process.returncode == 0 for process in self.processes):
            self.output.report(f"all ranks have ended as {name} asked them to")
            return 0
        if self._late and self._is_asked:
            self.output.report(
                f"{self._names_of(self._late)} had not ended {self._stop_timeout_s:g} s after {name} and was killed; "
                "see --stop-timeout"
            )
        else:
            self.output.report(f"ended all ranks by {name}")
        return 128 + self.signals[0]

    def _names_of(self, ranks: Sequence[int]) -> str:
        return ", ".join(self.names[rank].text for rank in ranks)

    def _pump(self, timeout_s: float) -> None:
        for key, _ in self._selector.select(timeout_s):
            rank, name = key.data
            chunk = os.read(key.fd, 1 << 16)
            if not chunk:
                self._selector.unregister(key.fileobj)
            self.output.feed(rank, name, chunk)

    def _notice_ends(self) -> None:
        for rank in sorted(self._running):
            code = self.processes[rank].poll()
            if code is None:
                continue
            self._running.discard(rank)
            self._exit_deadline = time.monotonic() + self._exit_timeout_s
            process = f"{self.names[rank].text} (process {self.processes[rank].pid})"
            report_lost_rank(
                self.rendezvous_id, f"{process} ended with {how_ended(code)} before all ranks had joined"
            )
            if code != 0 and not self._ending:
                self.ended_at = self.ended_at or time.time()
                self._failures.append((rank, code))
                self._end_after(FINAL_OUTPUT_S, [signal.SIGTERM, signal.SIGKILL])
            elif code == 0 and not self._failures:
                self._ended_before.append(rank)

    def _notice_signals(self) -> None:
        if len(self.signals) - self.signals.count(signal.SIGUSR1) > 1:  # a second signal: now
            self._signal_running(signal.SIGKILL)
        elif len(self.signals) > self._num_noticed and not self._ending:
            new = self.signals[self._num_noticed :]  # of several at a time one that is no request counts
            number = next((each for each in new if each not in REQUESTS), new[-1])
            self._num_noticed += len(new)
            takers = self._takers() if number in REQUESTS else []
            for rank in takers:
                self.processes[rank].send_signal(number)
            if takers and not self._is_asked:
                self._is_asked = True
                self._stop_deadline = time.monotonic() + self._stop_timeout_s
            elif not takers and not (self._is_asked and number in REQUESTS):
                self._signal_running(number)
                self._end_after(FINAL_OUTPUT_S, [signal.SIGTERM, signal.SIGKILL])

    def _takers(self) -> list[int]:
        """Return the running ranks that take signals as requests to stop."""
        return [rank for rank in self.progress.takers() if rank in self._running]

    def _end_after(self, seconds: float, signals: list[int]) -> None:
        if not self._endings:
            self._endings = signals
            self._deadline = time.monotonic() + seconds

    def _signal_running(self, number: int) -> None:
        self._ending = True  # what fails from now on was ended by us
        for rank in self._running:
            signal_group(self.processes[rank].pid, number)
            if number == signal.SIGTERM:
                signal_group(
                    self.processes[rank].pid, signal.SIGCONT
                )  # a stopped process takes it then alone


class Reaper:
    """A forked process that kills the ranks when the launcher is killed, see Note [nothing left]."""

    def __init__(self, rendezvous_id: str) -> None:
        reader, self._writer = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                os.close(self._writer)
                _reap(reader, rendezvous_id)
            finally:
                os._exit(0)
        os.close(reader)

    def watch(self, group: int) -> None:
        """Have process group ``group`` killed should this process vanish."""
        os.write(self._writer, f"{group}\n".encode())

    def dismiss(self) -> None:
        """End the reaper; nothing is left to reap."""
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        os.close(self._writer)


def signal_group(group: int, number: int) -> None:
    """Send signal ``number`` to process group ``group``, if any of it is left."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


def kill_groups(groups: Sequence[int]) -> None:
    """Kill what is left of the process groups."""
    for group in groups:
        signal_group(group, signal.SIGKILL)


def remove_segments(rendezvous_id: str) -> None:
    """Remove the shared-memory files of the world ``rendezvous_id``; ranks that died early may have left some."""
    for path in glob.glob(f"/dev/shm/singa_lite-{rendezvous_id}*"):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def _names(num_workers: int, options: LaunchOptions) -> list[ProcessName]:
    return role_names(num_workers, options.num_servers) if options.num_servers else rank_names(num_workers)


def _start_all(
    job: Job, reaper: Reaper, command: Sequence[str], num_workers: int, options: LaunchOptions
) -> None:
    num_servers = options.num_servers or 0
    for rank, name in enumerate(job.names):
        environ = dict(
            os.environ,
            PYTHONUNBUFFERED="1",
            SINGA_LITE_RANK=str(rank),
            SINGA_LITE_WORLD_SIZE=str(len(job.names)),
            SINGA_LITE_RENDEZVOUS_ID=job.rendezvous_id,
            SINGA_LITE_LAUNCHER_PID=str(os.getpid()),
        )
        if options.num_servers is not None:
            environ["SINGA_LITE_NUM_SERVERS"] = str(num_servers)
        if options.timeout_s is not None:
            environ["SINGA_LITE_TIMEOUT_S"] = str(options.timeout_s)
        if options.link is not None:
            environ["SINGA_LITE_LINK"] = options.link
        if options.log_dir is not None:
            environ["SINGA_LITE_LOG_DIR"] = str(options.log_dir.absolute())
        environ.pop(VARIABLE, None)  # of a job that this launcher is part of
        environ |= job.progress.environ | {"SINGA_LITE_RESTART": "0"}
        if not environ.get("OMP_NUM_THREADS") and len(job.names) > 1:
            threads = threads_per_rank(num_workers, num_servers) if rank < num_workers else 1
            environ["OMP_NUM_THREADS"] = str(threads)
        environ.update(options.worker_env if rank < num_workers else options.server_env)
        try:
            process = _start(command, environ)
            job.add(rank, process)
            reaper.watch(process.pid)
        except OSError as error:
            raise CannotStart(
                f"launch: cannot start {name.text} of {len(job.names)} processes: {error}; {HELP}"
            ) from error


def _start(command: Sequence[str], environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start one rank, which dies with this process."""
    return subprocess.Popen(
        [sys.executable, *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environ,
        start_new_session=True,
        preexec_fn=die_with_launcher(),
    )


def die_with_launcher() -> Callable[[], None]:
    """Return what a child of this process calls first to be killed when this process ends; on Linux only."""
    launcher = os.getpid()
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None

    def call() -> None:
        if libc is not None:
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != launcher:  # it died before the call above
                os._exit(1)

    return call


def open_standard_descriptors() -> None:
    """Open /dev/null in place of closed standard streams, or a pipe would get their numbers."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


def how_ended(code: int) -> str:
    """Return in words how a process with this exit code, negative for a signal, has ended."""
    return f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"


def _reap(reader: int, rendezvous_id: str) -> None:
    """Read groups to watch until the pipe ends, then kill them and remove their files."""
    os.setsid()
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):  # a reader of the launcher's output must not wait for the reaper
        os.dup2(null, descriptor)
    text = b""
    while True:
        select.select([reader], [], [])
        chunk = os.read(reader, 4096)
        if not chunk:
            break
        text += chunk
    kill_groups([int(line) for line in text.split()])
    remove_segments(rendezvous_id)
