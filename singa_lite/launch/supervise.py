# SPDX-License-Identifier: Apache-2.0
"""Supervise the ranks of a job on this host until the last has ended, and end them all when one fails.

What lives here: their output as it comes, their ends, signals to the launcher, who failed first. What does not:
starting them (one_host.py), merging their output (output.py).

Note [requests]: SIGTERM and SIGUSR1 to the launcher are requests if a rank takes them as such
(DistOpt.stop_on_signals), which it writes into the progress file. Then those ranks alone get the signal, for the others
learn of it through collectives, or serve until the workers have left.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from types import FrameType
from typing import IO

from ..comm.lost_ranks import report_lost_rank
from ..comm.progress import ProgressFile
from .output import RankOutput
from .process_names import ProcessName
from .rank_wrapper import DRAIN_S, FINAL_OUTPUT_S, STOP_SIGNALS, name_of
from .reaper import REQUESTS, signal_group

POLL_S = 0.05  # how soon a rank's end is noticed
LOOK_S = 0.25  # how soon a noted failure is noticed; each look reads a file
# from a noted failure to the first rank's end, which children, threads and functions of atexit may delay for ever
ALIVE_S = 4.0
TERM_S = 0.8  # from SIGTERM to SIGKILL; with FINAL_OUTPUT_S under the 4 s in which a launcher must end


@contextlib.contextmanager
def noted_signals() -> Iterator[Sequence[int]]:
    """Inside: STOP_SIGNALS do not end this process but are appended to the sequence that this gives.

    SIGQUIT is ignored, where ``reports_at_sigquit`` does not handle it. SIGCHLD is not, also where this process was
    started so: the system would reap the ranks, and their exit codes be lost.
    """
    signals: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        signals.append(number)

    noted = [number for number in STOP_SIGNALS if signal.getsignal(number) != signal.SIG_IGN]  # nohup
    before = {number: signal.signal(number, note) for number in noted}
    if signal.getsignal(signal.SIGQUIT) == signal.SIG_DFL:
        before[signal.SIGQUIT] = signal.signal(signal.SIGQUIT, lambda number, frame: None)
    if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:
        before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class RunningJob:
    """The ranks while they run, who failed first, and how far the ending of the others is.

    Args:
        rendezvous_id: of their world.
        names: of the ranks.
        output: of the ranks, one for all rounds.
        signals: those that have come to this process, see ``noted_signals``.
        exit_timeout_s, stop_timeout_s: see ``LaunchOptions``.

    Attributes:
        progress: how far they are.
        ended_at: when the first of them failed, by ``time.time``; None: none has.
    """

    def __init__(
        self,
        rendezvous_id: str,
        names: Sequence[ProcessName],
        output: RankOutput,
        signals: Sequence[int],
        exit_timeout_s: float,
        stop_timeout_s: float,
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
        self.signals = signals
        self._num_noticed = 0  # of them
        self._exit_timeout_s, self._exit_deadline = exit_timeout_s, float("inf")
        self._stop_timeout_s, self._stop_deadline = stop_timeout_s, float("inf")
        self._is_asked = False  # the ranks were asked to stop, see Note [requests]
        self._late: list[int] = []  # ranks that did not end in time
        self._deadline = float("inf")  # when the next of _endings goes to those that still run
        self._endings: list[int] = []
        self._ending = False
        self._next_look = 0.0  # into the progress file, for failures

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
            self._notice_failures()
            if time.monotonic() >= min(self._exit_deadline, self._stop_deadline) and not self._endings:
                self._late = sorted(self._running)
                self._end_after(0)
            if time.monotonic() >= self._deadline and self._endings:
                self._take_noted_failures()
                self._signal_running(self._endings.pop(0))
                self._deadline = time.monotonic() + TERM_S

    def collect(self) -> None:
        """Reap all ranks (they are dead or dying) and pass on what they wrote last."""
        for process in self.processes:
            process.wait()
        deadline = time.monotonic() + DRAIN_S
        is_over = False
        while self._selector.get_map() and not is_over:
            # before a pass over all pipes: what a dead rank wrote is in them
            is_over = time.monotonic() >= deadline
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

    def first_failure(self) -> tuple[int | None, int]:
        """Return which rank's failure is nearest to the cause, and how far it is; None if none has failed."""
        # A rank that ends takes the others' collectives with it: their CommError only repeats its failure.
        distances = [(self.output.distance_to_cause(rank, code), rank) for rank, code in self._failures]
        distance, rank = min(distances, key=itemgetter(0), default=(0, None))
        return rank, distance

    def _report(self) -> int:
        if self.signals and not self._failures:
            return self._report_stop()
        if self._late:
            self.output.report(
                f"{self._names_of(self._late)} had not ended {self._exit_timeout_s:g} s after the others and was "
                "killed; see --exit-timeout"
            )
            return 1
        rank, _ = self.first_failure()
        if rank is None:
            return 0
        code = dict(self._failures)[rank]
        ended = self._names_of(self._ended_before)
        before = f", after {ended} had ended with exit code 0" if ended else ""
        self.output.report(
            f"{self.names[rank].text} failed first ({how_ended(code)}){before}",
            self.output.final_output(rank),
        )
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
            if code == 0 and rank in self.progress.failed():  # an exception, and then os._exit(0)
                code = 1
            self._running.discard(rank)
            self._exit_deadline = time.monotonic() + self._exit_timeout_s
            process = f"{self.names[rank].text} (process {self.processes[rank].pid})"
            report_lost_rank(
                self.rendezvous_id,
                f"{process} {'was' if code < 0 else 'ended with'} {how_ended(code)} before all ranks had joined",
            )
            if code != 0 and not self._ending:
                self.ended_at = self.ended_at or time.time()
                self._failures.append((rank, code))
                self._end_after(FINAL_OUTPUT_S)
            elif code == 0 and self.ended_at is None:
                self._ended_before.append(rank)

    def _notice_failures(self) -> None:
        """End the job if a rank has noted a failure and none ends; children, threads or atexit keep them alive."""
        now = time.monotonic()
        if self._ending or self._endings or now < self._next_look:
            return
        if self.ended_at is not None:  # noted ALIVE_S ago
            self._end_after(0)
        elif self.progress.failed():
            self.ended_at, self._next_look = time.time(), now + ALIVE_S
        else:
            self._next_look = now + LOOK_S

    def _take_noted_failures(self) -> None:
        """Count the ranks that have failed and that this process must end now, as if they had ended with 1."""
        if not self._ending:
            known = dict(self._failures)
            self._failures += [(rank, 1) for rank in self.progress.failed() if rank not in known]

    def _notice_signals(self) -> None:
        if len(self.signals) - self.signals.count(signal.SIGUSR1) > 1:  # a second signal: now
            self._signal_running(signal.SIGKILL)
        elif len(self.signals) > self._num_noticed and not self._ending:
            new = self.signals[self._num_noticed :]  # of several at a time one that is not a request counts
            number = next((each for each in new if each not in REQUESTS), new[-1])
            self._num_noticed += len(new)
            is_request = number in REQUESTS
            takers = [rank for rank in self.progress.takers() if rank in self._running] if is_request else []
            for rank in takers:
                self.processes[rank].send_signal(number)
            if takers and not self._is_asked:
                self._is_asked = True
                self._stop_deadline = time.monotonic() + self._stop_timeout_s
            elif not takers and not (self._is_asked and is_request):
                self._signal_running(number)
                self._end_after(FINAL_OUTPUT_S)

    def _end_after(self, seconds: float) -> None:
        if not self._endings:
            self._endings = [signal.SIGTERM, signal.SIGKILL]
            self._deadline = time.monotonic() + seconds

    def _signal_running(self, number: int) -> None:
        self._ending = True  # what fails from now on was ended by us
        for rank in self._running:
            signal_group(self.processes[rank].pid, number)
            if number == signal.SIGTERM:
                # a stopped process takes the signal only when it goes on
                signal_group(self.processes[rank].pid, signal.SIGCONT)


def how_ended(code: int) -> str:
    """Return in words how a process with this exit code, negative for a signal, has ended."""
    return f"exit code {code}" if code >= 0 else f"killed by {name_of(-code)}"
