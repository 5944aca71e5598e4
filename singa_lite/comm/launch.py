# SPDX-License-Identifier: Apache-2.0
"""Run one command as the ranks of a world on this host, and leave nothing behind.

What lives here: starting the ranks, supervising them, ending them all when one fails. What does not: finding
the world from inside a rank (rendezvous.py), merging the ranks' output (output.py), the command line (../cli.py).

Note [nothing left]: every rank leads its own session, so a signal to its process group reaches its children
too. A keeper process, forked before the ranks, sees by the end of a pipe that the launcher is gone, even by
SIGKILL, then kills the groups and removes the shared-memory files; PR_SET_PDEATHSIG covers the keeper's death.
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
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import IO

from .output import RankOutput
from .rendezvous import threads_per_rank

POLL_S = 0.05  # how soon a rank's end is noticed
LAST_WORDS_S = 2.0  # the other ranks' time to print their own CommError
TERM_S = 0.8  # from SIGTERM to SIGKILL; with LAST_WORDS_S under the 4 s in which a launcher must end
DRAIN_S = 0.5  # output that a dead rank's children may still send
PR_SET_PDEATHSIG = 1  # linux/prctl.h
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def launch(command: Sequence[str], num_ranks: int, timeout_s: float | None = None) -> int:
    """Run ``sys.executable command...`` as ``num_ranks`` ranks of one world and wait for all of them.

    The ranks get no standard input. Their lines come out prefixed by the rank; OMP_NUM_THREADS, when unset,
    shares the cores. When a rank fails the others get two seconds to say why, then SIGTERM, then SIGKILL.

    Args:
        command: arguments of the Python interpreter, e.g. ["train.py", "--epochs", "2"] or ["-m", "train"].
        num_ranks: processes to start, >= 1.
        timeout_s: SINGA_LITE_TIMEOUT_S of the ranks; None leaves it as it is.

    Returns:
        0, or the exit code of the rank that failed first (128 + signal number if a signal ended it), or
        128 + signal number when this process was told to stop (130 for Ctrl-C).
    """
    ticket = secrets.token_hex(16)
    job = Job(num_ranks)
    keeper = Keeper(ticket)
    with job.stopped_by_signals():
        try:
            for rank in range(num_ranks):
                process = _start(command, rank, num_ranks, ticket, timeout_s)
                job.add(rank, process)
                keeper.watch(process.pid)
            job.supervise()
        finally:
            kill_groups([process.pid for process in job.processes])
            try:
                job.collect()
            finally:  # writing the ranks' last lines fails where the reader is gone
                remove_segments(ticket)
                keeper.dismiss()
    return job.report()


class Job:
    """The ranks while they run, who failed first, and how far the ending of the others has come."""

    def __init__(self, num_ranks: int) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []
        self.output = RankOutput(num_ranks)
        self._selector = selectors.DefaultSelector()
        self._failures: list[tuple[int, int]] = []  # (rank, return code), in the order they came
        self._running: set[int] = set()
        self._signals: list[int] = []
        self._deadline = float("inf")  # when the next of _ENDINGS goes to those that still run
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

    @contextlib.contextmanager
    def stopped_by_signals(self) -> Iterator[None]:
        """Note SIGINT, SIGTERM and SIGHUP instead of dying by them; supervise() acts on them."""

        def note(number: int, frame: FrameType | None) -> None:
            self._signals.append(number)

        heard = [number for number in STOP_SIGNALS if signal.getsignal(number) != signal.SIG_IGN]  # nohup
        before = {number: signal.signal(number, note) for number in heard}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def supervise(self) -> None:
        """Pass output on until every rank has ended; end all of them once one failed or a signal came."""
        while self._running:
            self._pump(POLL_S)
            self._notice_ends()
            self._notice_signals()
            if time.monotonic() >= self._deadline and self._endings:
                self._signal_running(self._endings.pop(0))
                self._deadline = time.monotonic() + TERM_S

    def collect(self) -> None:
        """Reap all ranks (they are dead or dying) and pass on what they wrote last."""
        for process in self.processes:
            process.wait()
        deadline = time.monotonic() + DRAIN_S
        while self._selector.get_map() and time.monotonic() < deadline:
            self._pump(POLL_S)
        for process in self.processes:
            for pipe in (process.stdout, process.stderr):
                assert pipe is not None
                pipe.close()
        self._selector.close()
        self.output.finish()

    def report(self) -> int:
        """Say which rank failed first and what it said last; return the launcher's exit code."""
        if self._signals:
            self.output.say(f"ended all ranks by {signal.Signals(self._signals[0]).name}")
            return 128 + self._signals[0]
        if not self._failures:
            return 0
        # A rank that ends takes the others' collectives with it: their CommError is an echo of its failure.
        rank, code = min(self._failures, key=lambda failure: self.output.echo(failure[0]))
        how = f"exit code {code}" if code > 0 else f"killed by {signal.Signals(-code).name}"
        self.output.say(f"rank {rank} failed first ({how})", self.output.last_words(rank))
        return code if code > 0 else 128 - code

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
            if code is not None:
                self._running.discard(rank)
                if code != 0 and not self._ending:
                    self._failures.append((rank, code))
                    self._end_after(LAST_WORDS_S, [signal.SIGTERM, signal.SIGKILL])

    def _notice_signals(self) -> None:
        if len(self._signals) == 1 and not self._ending:
            self._signal_running(self._signals[0])
            self._ending = True
            self._end_after(LAST_WORDS_S, [signal.SIGTERM, signal.SIGKILL])
        elif len(self._signals) > 1:  # asked again: now
            self._signal_running(signal.SIGKILL)

    def _end_after(self, seconds: float, signals: list[int]) -> None:
        if not self._endings:
            self._endings = signals
            self._deadline = time.monotonic() + seconds

    def _signal_running(self, number: int) -> None:
        self._ending = True  # what fails from now on was ended by us
        for rank in self._running:
            signal_group(self.processes[rank].pid, number)


class Keeper:
    """A forked process that clears up when the launcher is killed, see Note [nothing left]."""

    def __init__(self, ticket: str) -> None:
        reader, self._writer = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                os.close(self._writer)
                _keep(reader, ticket)
            finally:
                os._exit(0)
        os.close(reader)

    def watch(self, group: int) -> None:
        """Have process group ``group`` killed should this process vanish."""
        os.write(self._writer, f"{group}\n".encode())

    def dismiss(self) -> None:
        """End the keeper; nothing is left to clear up."""
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


def remove_segments(ticket: str) -> None:
    """Remove the shared-memory files of the world ``ticket``; ranks that died early may have left some."""
    for path in glob.glob(f"/dev/shm/singa_lite-{ticket}*"):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def _start(
    command: Sequence[str], rank: int, num_ranks: int, ticket: str, timeout_s: float | None
) -> subprocess.Popen[bytes]:
    environ = dict(os.environ, PYTHONUNBUFFERED="1")
    environ.update(SINGA_LITE_RANK=str(rank), SINGA_LITE_WORLD_SIZE=str(num_ranks), SINGA_LITE_TICKET=ticket)
    if timeout_s is not None:
        environ["SINGA_LITE_TIMEOUT_S"] = str(timeout_s)
    if not environ.get("OMP_NUM_THREADS") and num_ranks > 1:
        environ["OMP_NUM_THREADS"] = str(threads_per_rank(num_ranks))
    launcher = os.getpid()
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None

    def die_with_launcher() -> None:
        if libc is not None:
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != launcher:  # it died before the call above
                os._exit(1)

    return subprocess.Popen(
        [sys.executable, *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environ,
        start_new_session=True,
        preexec_fn=die_with_launcher,
    )


def _keep(reader: int, ticket: str) -> None:
    """The keeper's life: read groups to watch until the pipe ends, then clear up."""
    os.setsid()
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):  # a reader of the launcher's output must not wait for the keeper
        os.dup2(null, descriptor)
    text = b""
    while True:
        select.select([reader], [], [])
        chunk = os.read(reader, 4096)
        if not chunk:
            break
        text += chunk
    kill_groups([int(line) for line in text.split()])
    remove_segments(ticket)
