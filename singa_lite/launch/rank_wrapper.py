# SPDX-License-Identifier: Apache-2.0
"""Run the script of one process of a job under mpiexec: prefix its lines with its name, and report how it ended.

What lives here: a program that several_hosts.py has mpiexec start by its path on every host, so it imports nothing of
the package; the launcher imports from here what both do. What does not: starting mpiexec
(several_hosts.py), ending an MPI job from inside (../comm/mpi_job.py).

Note [ended ranks]: mpiexec of MPICH goes on when a process ends with an exit code, and the others wait for it for
ever. It ends them all when a signal ends a process, but with an exit code that says nothing. So an abort with the right
exit code is requested first, over PMI, the socket between mpiexec and its ranks, and then this process ends as its
script did. mpiexec kills process groups: script and children stay in the group of this process. A script that ends with
0 inside an MPI job is lost too; the watchdog of the rank (mpi_watchdog.py) writes that into a pipe.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import fcntl
import json
import os
import re
import resource
import select
import selectors
import signal
import stat
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Any

FINAL_OUTPUT_S = 2.0  # the other ranks' time to print their own CommError
DRAIN_S = 0.5  # output that a dead rank's children may still send
WATCHDOG_S = 5.0  # a rank's watchdog takes milliseconds to notice its end
POLL_S = 0.05
PARENT_S = 0.5  # how soon the end of mpiexec's process on this host is noticed
LINE_BYTES = 1 << 20  # a longer "line" is passed on in pieces rather than held
PR_SET_PDEATHSIG = 1  # linux/prctl.h
WAITED = 2  # from this distance to the cause on, an error does not say which rank is the cause
# errors that every rank raises, or that name the end of another rank, which may only have waited for a third one
NOT_OWN = re.compile(
    rb"singa_lite(\.errors\.NonFiniteError: "
    rb"|\.errors\.CheckpointError: .*rank \d+ failed: "
    rb"|(\.errors\.|: )CommError: .*("
    rb"\b(waited|within) [0-9.e+]+ s\b|\) died\b| has died; |has closed its (communicator|messenger)"
    rb"| before all ranks (had joined|were there)|rank 0 aborted making it"
    rb"|ranks (disagree|differ)|rank \d+ .*cannot (take part|go on)|has left after"
    rb"|NCCL: ranks? \d+ |MPI: rank \d+ on ))"
)
TRACEBACK = re.compile(rb"(  \+ Exception Group )?Traceback \(most recent call")
# what Python writes between tracebacks
DURING = b"During handling of the above exception, another exception occurred:"
DIRECT = b"The above exception was the direct cause of the following exception:"
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


class LogError(OSError):
    """A log cannot be written, as on a full disk."""


class Output:
    """The lines of one process, written behind a prefix, and whole into its log.

    Args:
        prefix: before each line.
        log: a descriptor; None: no log.

    Attributes:
        errors: those on it.
        is_failing: whether the script has said that an exception ends it, as a rank of an MPI job does.
    """

    def __init__(self, prefix: str, log: int | None) -> None:
        self.errors = ErrorLines()
        self.is_failing = False
        self._prefix, self._log = prefix.encode(), log
        self._open_lines = {1: b"", 2: b""}

    def feed(self, stream: int, chunk: bytes) -> None:
        """Take ``chunk`` from stream 1 or 2; b"" means the stream has ended."""
        *lines, rest = (self._open_lines[stream] + chunk).split(b"\n")
        if rest and (not chunk or len(rest) > LINE_BYTES):
            lines, rest = [*lines, rest], b""
        for line in lines:
            self.write(stream, self._prefix, line)
        self._open_lines[stream] = rest

    def write(self, stream: int, prefix: bytes, line: bytes) -> None:
        """Write a line in its last state.

        mpiexec would mix a line that does not fit into one write to a pipe with those of others: it is cut in pieces.
        """
        line = last_state(line)
        self.errors.read(line)
        self.is_failing |= re.fullmatch(rb"singa_lite: rank \d+ of \d+ failed:", line) is not None
        size = select.PIPE_BUF - len(prefix) - 1
        for start in range(0, len(line) or 1, size):
            _write_all(stream, prefix + line[start : start + size] + b"\n")
        if self._log is not None:
            try:
                _write_all(self._log, line + b"\n")
            except OSError as error:
                self._log = None
                raise LogError(f"cannot write its log: {error}") from error

    def end_lines(self) -> None:
        """Write the lines that never ended."""
        for stream in (1, 2):
            self.feed(stream, b"")


class Script:
    """The script while it runs.

    Attributes:
        is_lost: it has ended without leaving the MPI job.
        stop_signals: those that this process got from outside of its group, whose processes are the script's.
    """

    def __init__(self, command: list[str], environ: dict[str, str]) -> None:
        self.is_lost = False
        self.stop_signals: list[int] = []
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        self._parent = os.getppid()
        self._selector = selectors.DefaultSelector()
        self._watch_children()
        self._lost, writer = os.pipe()
        os.set_inheritable(writer, True)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**environ, "SINGA_LITE_LOST_FD": str(writer)},
            close_fds=False,  # the socket of PMI is the script's
            preexec_fn=_begin,
        )
        os.close(writer)
        assert self._process.stdout and self._process.stderr
        for stream, descriptor in enumerate(
            (self._process.stdout.fileno(), self._process.stderr.fileno()), 1
        ):
            self._selector.register(descriptor, selectors.EVENT_READ, stream)

    def wait(self, output: Output) -> int:
        """Pass output on until the script has ended.

        Returns:
            Its exit code; negative for a signal, but 1 if its watchdog has killed it as it missed a deadline.
        """
        while (code := self._process.poll()) is None:
            self._note_stop_signals()  # while who has sent them is there
            self._pump(output, PARENT_S)
            if output.is_failing:  # it is about to abort the job, and mpiexec then kills this process, too
                note_failure(1, WAITED if output.errors.distance else 0)
        self._note_stop_signals()  # those that have ended the script
        kill_others_of_group()
        is_readable = code == -signal.SIGKILL and select.select([self._lost], [], [], 0)[0]
        if is_readable and os.read(self._lost, 100) == b"late\n":  # it is the watchdog that has killed it
            code = 1
        has_time = code >= 0  # a signal ends the job at once
        if has_time and select.select([self._lost], [], [], WATCHDOG_S)[0]:
            # an empty read is the end of the pipe: the watchdog has ended
            self.is_lost = os.read(self._lost, 100) != b""
        deadline = time.monotonic() + DRAIN_S
        while self._pump(output, POLL_S if has_time else 0) and has_time and time.monotonic() < deadline:
            pass
        output.end_lines()
        return code

    def _note_stop_signals(self) -> None:
        while (got := signal.sigtimedwait(STOP_SIGNALS, 0)) is not None:
            try:  # whether the script has called kill(0, ...); 0: the kernel has sent it, or another PID namespace
                is_own = got.si_pid > 0 and (
                    got.si_pid == self._process.pid or os.getpgid(got.si_pid) == os.getpgrp()
                )
            except OSError:
                is_own = False
            if not is_own:
                self.stop_signals.append(got.si_signo)

    def pause(self, seconds: float) -> None:
        """Wait, unless mpiexec ends meanwhile."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self._end_with_parent()
            time.sleep(POLL_S)

    def _watch_children(self) -> None:
        """Wake the selector at every signal, the end of the script among them."""
        reader, writer = os.pipe()
        for descriptor in (reader, writer):
            os.set_blocking(descriptor, False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        self._selector.register(reader, selectors.EVENT_READ, 0)

    def _pump(self, output: Output, timeout_s: float) -> bool:
        """Read what there is within ``timeout_s``; return whether more may come."""
        for key, _ in self._selector.select(timeout_s):
            chunk = os.read(key.fd, 1 << 16)
            if key.data and not chunk:
                self._selector.unregister(key.fd)
            if key.data:
                output.feed(key.data, chunk)
        self._end_with_parent()
        return len(self._selector.get_map()) > 1

    def _end_with_parent(self) -> None:
        if os.getppid() != self._parent:  # mpiexec's process on this host was killed
            os.killpg(0, signal.SIGKILL)


def main(command: list[str]) -> int:
    """Run ``command``; the variable SINGA_LITE_WRAPPER is the JSON text that ``several_hosts._describe`` returns."""
    job: dict[str, Any] = json.loads(os.environ.pop("SINGA_LITE_WRAPPER"))
    process = job["processes"][int(os.environ["PMI_RANK"])]
    name = f"{process['name']} on {process['host']}"
    note(job, "started")
    try:
        os.chdir(job["folder"])
        output = Output(process["prefix"], open_log(job["log_dir"], process["log"]))
        script = Script(command, environ_of(job, process))
    except OSError as error:
        return _give_up(job, f"{name} cannot start: {error}")
    try:
        code = script.wait(output)
    except LogError as error:
        return _give_up(job, f"{name} {error}")
    if script.stop_signals:  # the others have them too, and end in their own time
        return code if code >= 0 else 128 - code
    if code == 0 and not script.is_lost:
        return 0
    note_failure(code or 1, output.errors.distance_to_cause(code))
    note(job, "failed")
    if code >= 0:
        _report(output, f"{name} failed (exit code {code})")
        script.pause(FINAL_OUTPUT_S)
        abort_job(code or 1)
        return code
    _report(output, f"{name} was killed by {name_of(-code)}")
    wait_until_read(2)
    abort_job(128 - code)
    end_by_signal(-code)
    return 128 - code


def _give_up(job: dict[str, Any], reason: str) -> int:
    """End the job for want of something that this process needs; return its exit code."""
    _report(None, reason)
    note(job, "failed")
    note_failure(1, 0)
    wait_until_read(2)
    abort_job(1)
    return 1


def distance_of(line: bytes) -> int | None:
    """Return how far the error on a line of output is from the cause of a job's end; None if the line has no error.

    0 for an error of the rank itself or of its thread; 1 for another CommError; WAITED for an error that every rank
    raises, or that names the end of another rank; more for one that repeats another's.
    """
    if TRACEBACK.match(line):  # whose last line follows
        return 0
    is_comm_error = re.match(rb"singa_lite(\.errors\.|: )CommError: ", line)  # the second: of a watchdog
    if is_comm_error and b"this rank aborted: thread " in line:
        return 0
    if is_comm_error and b"aborted: " in line:
        return WAITED + 1
    if NOT_OWN.match(line):
        return WAITED
    return 1 if is_comm_error else None


class ErrorLines:
    """The error that a process has printed last, with those before it in a chain of tracebacks.

    One that was raised from another is as far from the cause as that one; one that came while another was handled as
    far as the farther of both.

    Attributes:
        distance: see ``distance_of``; None: it has printed none.
    """

    def __init__(self) -> None:
        self.distance: int | None = None
        self._link = b""  # between the traceback before and the next one
        self._before: int | None = None  # distance of what the last traceback is linked to
        self._is_raised_from = False

    def read(self, line: bytes) -> None:
        """Take a line of output."""
        if line in (DURING, DIRECT):
            self._link = line
        found = distance_of(line)
        if found is None:
            return
        if TRACEBACK.match(line):
            self._before = self.distance if self._link else None
            self._is_raised_from, self._link = self._link == DIRECT, b""
        if self._before is None:
            self.distance = found
        elif not self._is_raised_from:
            self.distance = max(found, self._before)

    def distance_to_cause(self, code: int) -> int:
        """Return how far an end with exit code ``code``, negative for a signal, is from the cause of a job's end.

        An exit code without an error may be what a script makes of another rank's end: as far as a CommError.
        """
        if self.distance is not None:
            return self.distance
        return 0 if code < 0 else 1


def last_state(line: bytes) -> bytes:
    """Return what a terminal would show of a line that was redrawn with carriage returns."""
    return next((state for state in reversed(line.split(b"\r")) if state), b"")


def name_of(number: int) -> str:
    """Return the name of a signal."""
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def environ_of(job: dict[str, Any], process: dict[str, str]) -> dict[str, str]:
    """Return the script's environment: its role's variables, and its part of this host's cores in the first round."""
    role = process["name"].partition(" ")[0]
    environ = {**os.environ, **job["environ"][role], "SINGA_LITE_LAUNCHER_PID": str(os.getpid())}
    num_workers, num_servers = job["sharing"].get(process["host"], (1, 0))
    if not environ.get("OMP_NUM_THREADS") and (num_workers + num_servers > 1 or role == "server"):
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        num_threads = 1 if role == "server" else max(1, (cores - num_servers) // max(1, num_workers))
        environ["OMP_NUM_THREADS"] = str(num_threads)
    return environ


def note(job: dict[str, Any], word: str) -> None:
    """Tell the launcher that this process has "started" or "failed": it takes such a line out (host_notes.py)."""
    if "token" in job:
        with contextlib.suppress(OSError):
            _write_all(2, f"[singa-lite {job['token']} {word} {os.environ['PMI_RANK']}]\n".encode())


def note_failure(code: int, distance_to_cause: int) -> None:
    """Write into this rank's record of the progress file (progress.py), if there is one, how it has failed."""
    offset = 32 * int(os.environ["PMI_RANK"]) + 16
    with contextlib.suppress(OSError):
        descriptor = os.open(os.environ.get("SINGA_LITE_PROGRESS", ""), os.O_WRONLY | os.O_NOFOLLOW)
        os.pwrite(descriptor, struct.pack("<qq", code, distance_to_cause), offset)
        os.close(descriptor)  # so that other hosts can read it


def open_log(folder: str | Path | None, name: str) -> int | None:
    """Return a descriptor that appends to the log ``name`` in ``folder``; None without a folder."""
    if folder is None:
        return None
    os.makedirs(folder, exist_ok=True)
    # a pipe that nobody reads is an error, instead of a wait for the reader
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK
    descriptor = os.open(os.path.join(folder, name), flags, 0o666)
    os.set_blocking(descriptor, True)
    return descriptor


def kill_others_of_group() -> None:
    """Kill the children that the script has left."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            group = int(path.read_text(errors="replace").rpartition(")")[2].split()[2])
            if group == os.getpgrp() and int(path.parent.name) != os.getpid():
                os.kill(int(path.parent.name), signal.SIGKILL)


def abort_job(exit_code: int) -> None:
    """Request the end of the whole job from mpiexec, over PMI's wire protocol, version 1."""
    pmi = int(os.environ.get("PMI_FD", -1))
    with contextlib.suppress(OSError):
        if stat.S_ISSOCK(os.fstat(pmi).st_mode):
            os.write(pmi, f"cmd=abort exitcode={exit_code}\n".encode())


def wait_until_read(descriptor: int) -> None:
    """Wait, but not long, until mpiexec has read what was written to a pipe: after an abort it may read no more."""
    deadline, num_unread = time.monotonic() + DRAIN_S, array.array("i", [1])
    with contextlib.suppress(OSError):  # not a pipe
        while num_unread[0] and time.monotonic() < deadline:
            fcntl.ioctl(descriptor, termios.FIONREAD, num_unread)
            time.sleep(0.001)


def end_by_signal(number: int) -> None:
    """End this process by signal ``number``, without a core file of its own."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):  # SIGKILL
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
    os.kill(os.getpid(), number)


def _report(output: Output | None, text: str) -> None:
    """Write a line of the launcher itself to the error stream, and to the log if there is one."""
    with contextlib.suppress(OSError):
        (output or Output("", None)).write(2, b"", f"singa-lite run: {text}".encode(errors="surrogateescape"))


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _begin() -> None:
    """Have this process, which becomes the script, get signals, and end with its parent."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except BrokenPipeError:  # mpiexec's process on this host has gone
        os.killpg(0, signal.SIGKILL)
