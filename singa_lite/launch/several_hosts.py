# SPDX-License-Identifier: Apache-2.0
"""Run one command as the workers and servers of a job on several hosts, by MPICH's mpiexec, and leave nothing behind.

What lives here: starting mpiexec once and ending it. What does not: starting it again (restart.py), processes of one
host without MPI (one_host.py), which hosts there are (hosts.py), copying the script there (copy_folder.py), and
what runs there around each script (rank_wrapper.py).

Note [ends of mpiexec]: it passes SIGINT and SIGTERM on to all processes; when it is killed, its processes on the hosts
end theirs. That also happens when this process is killed. Remote shells that it leaves, as it does when one of them
fails, become children of this process and are killed at the end.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..comm.inspect_job import reports_at_sigquit
from ..comm.job import INSTALL, OWN_VARIABLES
from ..comm.progress import NAME, ProgressFile
from ..config import env
from ..errors import CommError, OptionError
from .copy_folder import FolderCopy
from .host_notes import HostNotes
from .hosts import Host, is_this_host, place
from .one_host import LaunchOptions, Round, cause_of, common_environment, open_standard_descriptors
from .process_names import role_names
from .reaper import REQUESTS, adopt_orphans, end_orphans, own_children, signal_group, start_child
from .supervise import DRAIN_S, FINAL_OUTPUT_S, POLL_S, TERM_S, how_ended

START_S = 3.0  # for the remote shells, beside the time-out of processes that wait for each other
TIMEOUT_S = 300.0  # without SINGA_LITE_TIMEOUT_S, as comm/base.py has it, which imports numpy
PROBE_S = 5.0  # for the answer of a host that may be lost
LATE_CODE = -1  # in place of mpiexec's: not all processes have started in time
LOST_CODE = 255  # of mpiexec where it cannot reach a host or has lost one
OF_ANOTHER_JOB = (*OWN_VARIABLES, "SINGA_LITE_LAUNCHER_PID")


@dataclass(frozen=True)
class Placement:
    """Where the processes of a job run, and how to reach them.

    Attributes:
        hosts: at least one.
        rsh: the remote shell and its options; it takes what ssh takes, and is called as "CMD -x HOST COMMAND".
        copy_to: a folder on every host, to which the current folder is copied and where the processes run; None:
            nothing is copied, and all hosts have the current folder at the same path.
        first: the host of each process in the first round, workers before servers, which says how the processes of a
            host share its cores in all rounds (``share_cores_of_host``); None: this is the first.
    """

    hosts: Sequence[Host]
    rsh: Sequence[str]
    copy_to: Path | None = None
    first: Sequence[str] | None = None


def launch_host_round(
    command: Sequence[str],
    num_workers: int,
    placement: Placement,
    options: LaunchOptions,
    checkpoint: Path | None,
    signals: Sequence[int],
) -> Round:
    """Run ``sys.executable command...`` as the workers and servers of one MPI job and wait for all of them.

    Every host has this Python at this path, with MPICH and mpi4py. Lines come out behind "[w0] " or "[s1] ".
    A process that fails ends the others: at once if a signal ended it, else after two seconds in which they report why.

    Args:
        command, num_workers: see ``launch``.
        placement: which hosts.
        options: ``exit_timeout_s`` is not used: MPI itself waits for all processes. The folder of logs is made on each
            host.
        checkpoint: folder that all hosts share, for the progress file; None: nothing is known of the ranks' progress,
            and so no signal is a request to stop.
        signals: those that have come to this process, see ``noted_signals``.

    Returns:
        How it ended; ``code`` as ``launch`` returns it. Its ``error``: processes have not started in time.

    Raises:
        CommError: there is no mpiexec of MPICH, no remote shell, or the folder cannot be copied.
        OptionError: of ``placement.copy_to``, see ``FolderCopy``; or the script is not in the folder that is copied.
    """
    started_at = time.time()
    open_standard_descriptors()
    hosts = place(placement.hosts, num_workers, options.num_servers or 0)
    start = _start_arguments(placement, hosts)
    folder = Path.cwd()
    copy = FolderCopy(folder, placement.copy_to, placement.rsh) if placement.copy_to else None
    if copy:
        command = _in_folder(command, folder)
    progress = ProgressFile(checkpoint / NAME if checkpoint else None, len(hosts))
    environ = _environment(placement, options) | progress.environ
    notes, patience_s = HostNotes(len(hosts)), _timeout_s(options) + START_S
    environ["SINGA_LITE_WRAPPER"] = _describe(hosts, num_workers, placement, folder, options, notes.token)
    try:
        if copy:
            copy.run(sorted(set(hosts)), lambda: bool(signals), patience_s)
        code, is_asked, begun = 0, False, time.monotonic()
        if not signals:
            arguments = [*start, *command]
            with reports_at_sigquit(write_report):
                code, is_asked = _supervise(arguments, environ, signals, progress, options, notes, patience_s)
        steps, failed = progress.steps(), cause_of(*progress.first_failure())
    finally:
        progress.remove()
    missing = list(dict.fromkeys(host for rank, host in enumerate(hosts) if rank not in notes.started))
    error, waited_s = None, patience_s if code == LATE_CODE else int(time.monotonic() - begun)
    if signals:
        code = _report_stop(signals[0], is_well=is_asked and code == 0)
    # the second: ranks on other hosts have given it up first
    elif code == LATE_CODE or (code != 0 and missing and waited_s >= _timeout_s(options)):
        code = 1
        error = CommError(
            f"launch: no process has started on {', '.join(missing)} within {waited_s:g} s: the host or its remote "
            "shell does not answer; see --timeout-s if it only needs longer"
        )
    elif code == LOST_CODE and not notes.failed:
        write_report(_loss_of_host(missing, list(dict.fromkeys(hosts)), placement.rsh, signals))
    return Round(code, failed, steps, started_at, time.time(), error, progress.is_there)


def _start_arguments(placement: Placement, hosts: Sequence[str]) -> list[str]:
    """Return what starts a process on each of ``hosts``, by rank, before the arguments of Python there."""
    mpiexec, major_version = find_mpiexec()
    launcher = ["-launcher", "ssh", "-launcher-exec", _remote_shell(placement)]
    where = _host_arguments(placement.hosts, hosts, major_version)
    wrapper = [sys.executable, "-I", "-S", str(Path(__file__).with_name("rank_wrapper.py")), sys.executable]
    return [mpiexec, *launcher, *where, "-wdir", "/", "-n", str(len(hosts)), *wrapper]


def _report_stop(number: int, is_well: bool) -> int:
    """Report how the processes ended after signal ``number`` to this one; return the launcher's exit code."""
    name = signal.Signals(number).name
    write_report(
        f"all processes have ended as {name} asked them to" if is_well else f"ended all processes by {name}"
    )
    return 0 if is_well else 128 + number


def _timeout_s(options: LaunchOptions) -> float:
    """Return the seconds that processes wait for each other."""
    if options.timeout_s is not None:
        return options.timeout_s
    try:
        return max(0.0, float(env("SINGA_LITE_TIMEOUT_S") or TIMEOUT_S))
    except ValueError:  # the processes say so
        return TIMEOUT_S


def _loss_of_host(
    missing: Sequence[str], hosts: Sequence[str], rsh: Sequence[str], signals: Sequence[int]
) -> str:
    """Return in words which hosts mpiexec could not reach or has lost, by asking those that may be.

    Args:
        missing: hosts on which not all processes had started.
        hosts: all.
    """
    suspects = missing or hosts
    silent = _unreachable(suspects, rsh, signals)
    if silent:
        return f"mpiexec could not reach, or has lost: {', '.join(f'{host} ({why})' for host, why in silent.items())}"
    if missing:
        return (
            f"mpiexec has ended before all processes had started on {', '.join(missing)}, which answers now"
        )
    return f"mpiexec has lost the connection to one of {', '.join(hosts)}; all answer now"


def _unreachable(hosts: Sequence[str], rsh: Sequence[str], signals: Sequence[int]) -> dict[str, str]:
    """Return why the remote shell cannot run a command on some of ``hosts``; nothing once a signal has come."""
    null = subprocess.DEVNULL
    asked = {
        host: start_child([*rsh, "-x", host, "true"], stdout=null, stderr=null)
        for host in hosts
        if not is_this_host(host)
    }
    deadline = time.monotonic() + PROBE_S
    while any(process.poll() is None for process in asked.values()):
        if signals or time.monotonic() >= deadline:
            break
        time.sleep(POLL_S)
    codes = {host: process.poll() for host, process in asked.items()}
    for process in asked.values():
        signal_group(process.pid, signal.SIGKILL)
        process.wait()
    if signals:
        return {}
    return {
        host: f"no answer within {PROBE_S:g} s"
        if code is None
        else f"the remote shell ends with {how_ended(code)}"
        for host, code in codes.items()
        if code != 0
    }


def find_mpiexec() -> tuple[str, int]:
    """Return the path of MPICH's mpiexec, the one beside this Python or else on PATH, and its major version.

    Raises:
        CommError: there is none, or it belongs to another MPI.
    """
    beside = Path(sys.executable).with_name("mpiexec")
    mpiexec = str(beside) if beside.exists() else shutil.which("mpiexec")
    if mpiexec is None:
        raise CommError(f"launch: there is no mpiexec of MPICH, which starts the processes; {INSTALL}")
    answer = subprocess.run([mpiexec, "--version"], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    version = re.search(r"^HYDRA.*^\s*Version:\s*(\d+)", answer.stdout, re.MULTILINE | re.DOTALL)
    if version is None:
        raise CommError(f"launch: {mpiexec} is not the mpiexec of MPICH; {INSTALL}")
    return mpiexec, int(version[1])


def _remote_shell(placement: Placement) -> str:
    """Return the path of the remote shell; CommError if there is none that mpiexec can start."""
    rsh = shutil.which(placement.rsh[0])
    if rsh is None:
        raise CommError(f"launch: there is no remote shell {placement.rsh[0]!r}; name one with --rsh")
    if re.search(r"\s", rsh):
        raise CommError(
            f"launch: mpiexec takes no remote shell with a blank in its path, {rsh!r}; make a link to it"
        )
    return rsh


def _environment(placement: Placement, options: LaunchOptions) -> dict[str, str]:
    """Return the environment of mpiexec, which passes it on to all processes."""
    common = common_environment(options)
    environ = {name: value for name, value in common.items() if name not in OF_ANOTHER_JOB}
    environ["SINGA_LITE_NUM_SERVERS"] = str(options.num_servers or 0)
    if len(placement.rsh) > 1:
        environ["HYDRA_LAUNCHER_EXTRA_ARGS"] = shlex.join(placement.rsh[1:])
    return environ


def _host_arguments(hosts: Sequence[Host], placed: Sequence[str], major_version: int) -> list[str]:
    """Return mpiexec's arguments that start each process on the host where it is ``placed``."""
    arguments = ["-hosts", ",".join(f"{host.name}:{host.num_slots}" for host in hosts)]
    if list(placed) == place(hosts, len(placed), 0):  # as workers alone, which is mpiexec's own way
        return arguments
    if major_version < 5:
        raise CommError(
            "launch: mpiexec of MPICH before version 5 cannot place servers on hosts with several slots; "
            "pip install 'mpich>=5', or leave the counts out of the host file"
        )
    names = [host.name for host in hosts]
    return [*arguments, "-rankmap", ",".join(str(names.index(name)) for name in placed)]


def srun_line(
    command: Sequence[str], num_workers: int, options: LaunchOptions, checkpoint: Path | None
) -> str:
    """Return the shell line that starts the job by Slurm's srun."""
    values = {
        "SINGA_LITE_NUM_SERVERS": options.num_servers or None,
        "SINGA_LITE_TIMEOUT_S": options.timeout_s,
        "SINGA_LITE_CHECKPOINT": checkpoint and os.path.abspath(checkpoint),
    }
    variables = [f"{name}={shlex.quote(str(value))}" for name, value in values.items() if value is not None]
    size = num_workers + (options.num_servers or 0)
    words = ["srun", "-n", str(size), "--kill-on-bad-exit=1", "--distribution=cyclic", "--label"]
    return " ".join([*variables, shlex.join([*words, sys.executable, *command])])


def _in_folder(command: Sequence[str], folder: Path) -> list[str]:
    """Return ``command`` with the path of its script relative to ``folder``, which is copied."""
    script = Path(command[0])
    if command[0] == "-m":
        return list(command)
    if folder.resolve() not in script.resolve().parents:
        raise OptionError(
            f"--sync-dst-dir copies the current folder, {folder}, and the script {str(script)!r} is not in it; start "
            "from the script's folder"
        )
    inside = str(script.resolve().relative_to(folder.resolve()))
    return [os.path.join(os.curdir, inside), *command[1:]]  # Python would take "-x.py" for an option


def write_report(text: str) -> None:
    """Write a line of the launcher itself to the error stream."""
    os.write(2, f"singa-lite run: {text}\n".encode(errors="surrogateescape"))


def _describe(
    hosts: Sequence[str],
    num_workers: int,
    placement: Placement,
    folder: Path,
    options: LaunchOptions,
    token: str,
) -> str:
    """Return what rank_wrapper.py must know. It travels in the environment, which other users cannot read."""
    num_servers = len(hosts) - num_workers
    names = role_names(num_workers, num_servers)
    processes = [
        {"name": name.text, "prefix": name.prefix, "log": name.log, "host": host}
        for name, host in zip(names, hosts, strict=True)
    ]
    first = placement.first or hosts
    workers = Counter(first[: len(first) - num_servers])
    servers = Counter(first[len(first) - num_servers :])
    return json.dumps(
        {
            "processes": processes,
            "environ": {"worker": dict(options.worker_env), "server": dict(options.server_env)},
            "log_dir": str(options.log_dir.absolute()) if options.log_dir else None,
            "folder": str(placement.copy_to or folder),
            "sharing": {host: [workers[host], servers[host]] for host in first},
            "token": token,
        }
    )


def _supervise(
    command: Sequence[str],
    environ: dict[str, str],
    signals: Sequence[int],
    progress: ProgressFile,
    options: LaunchOptions,
    notes: HostNotes,
    patience_s: float,
) -> tuple[int, bool]:
    """Run mpiexec to its end and pass ``signals``, which grow, on to its processes.

    Args:
        notes: takes those of the processes.
        patience_s: seconds after which all processes must have started.

    Returns:
        mpiexec's exit code, LATE_CODE if it was killed as a process had not started, and whether the processes got the
        first signal as a request to stop: if the progress file says that ranks take it as one, and there are no
        servers, as mpiexec sends it to all processes.
    """
    before = own_children()
    adopt_orphans(True)
    process = start_child(command, env=environ, stderr=subprocess.PIPE)
    assert process.stderr is not None
    notes.follow(os.dup(process.stderr.fileno()))
    process.stderr.close()
    endings = [signal.SIGTERM, signal.SIGKILL]
    deadline, is_asked, is_late = float("inf"), False, False
    start_deadline = time.monotonic() + patience_s
    try:
        while process.poll() is None:
            time.sleep(POLL_S)
            if time.monotonic() >= start_deadline and not signals:
                start_deadline, is_late = float("inf"), not notes.have_all_started
                if is_late:
                    process.kill()
            is_second = len(signals) - signals.count(signal.SIGUSR1) > 1
            may_ask = all(number in REQUESTS for number in signals)
            if is_asked and not may_ask:  # after the request
                is_asked, deadline = False, float("inf")
            if signals and deadline == float("inf"):
                is_asked = may_ask and bool(progress.takers()) and not options.num_servers
                process.send_signal(signal.SIGINT if signal.SIGINT in signals else signal.SIGTERM)
                deadline = time.monotonic() + (options.stop_timeout_s if is_asked else FINAL_OUTPUT_S)
            if is_second or (endings and time.monotonic() >= deadline):
                process.send_signal(signal.SIGKILL if is_second else endings.pop(0))
                deadline = time.monotonic() + TERM_S
    finally:
        process.kill()
        process.wait()
        end_orphans(before)
        adopt_orphans(False)
        given_up_at = time.monotonic() + DRAIN_S
        notes.finish(lambda: bool(signals) and time.monotonic() > given_up_at)
    if is_late:
        return LATE_CODE, False
    code = process.returncode if process.returncode >= 0 else 128 - process.returncode
    return code, is_asked
