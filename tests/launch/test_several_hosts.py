# SPDX-License-Identifier: Apache-2.0
"""`singa-lite run -H`: workers and servers of several hosts, with an agent in place of ssh; see hosts.py."""

from __future__ import annotations

import functools
import json
import os
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from singa_lite import cli
from singa_lite.comm.base import TIMEOUT_S
from singa_lite.comm.job import threads_per_rank
from singa_lite.comm.progress import ProgressFile
from singa_lite.errors import CommError, OptionError
from singa_lite.launch import rank_wrapper, several_hosts
from singa_lite.launch.copy_folder import FolderCopy
from singa_lite.launch.host_notes import HostNotes
from singa_lite.launch.hosts import Host, place, read_hosts
from singa_lite.launch.one_host import LaunchOptions
from tests.comm.hosts import names_missing, write_agent
from tests.comm.processes import (
    assert_nothing_left,
    at_once,
    fresh_environment,
    run_command,
    wait_until,
    write_script,
)
from tests.limits import LIMIT_S
from tests.ranks import mpi_missing
from tests.slow_cases import cases_that_run, slow_but_first

needs_mpi = pytest.mark.skipif(bool(mpi_missing()), reason=mpi_missing() or "mpi works")
needs_names = pytest.mark.skipif(bool(names_missing()), reason=names_missing() or "names work")


def command_on_hosts(folder: Path, script: str, *arguments: str, options: tuple[str, ...] = ()) -> list[str]:
    """The command for 2 workers and 2 servers on hosts d1 and d2, to be run in ``folder``."""
    (folder / "hosts").write_text("d1  # the first\n\nd2 slots=1\n")
    rsh = shlex.quote(str(write_agent(folder)))
    start = [sys.executable, "-m", "singa_lite", "run", "-n", "2", "-s", "2", "-H", str(folder / "hosts")]
    return [*start, "--rsh", rsh, *options, script, *arguments]


def run_in(folder: Path, command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    return run_command(
        ["sh", "-c", f"cd {shlex.quote(str(folder))} && exec {shlex.join(command)}"], **environment
    )


# ---- host files, places ------------------------------------------------------------------------------


def test_a_host_file_has_a_host_a_line(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("# all\nd1\n  d2:4 # big\n\nnode-3.example slots=2\n")
    assert read_hosts(path) == [Host("d1", 1), Host("d2", 4), Host("node-3.example", 2)]


@pytest.mark.parametrize(
    "line",
    [
        "d1 d2",
        "d1:",
        "d1:0",
        "d1:x",
        "d1:999999",
        f"d1:{'9' * 5000}",
        "d1:-1",
        "-oProxyCommand=x",
        "d1 slots=0",
        "d1,d2",
        "d1;ls",
        "d\xff",
    ],
)
def test_a_bad_line_of_a_host_file_is_shown(tmp_path, line):
    path = tmp_path / "hosts"
    path.write_bytes(b"d1\n" + line.encode("latin-1") + b"\n")
    with pytest.raises(
        OptionError, match=r"line 2 of .*hosts' is .*; expected HOST, HOST:COUNT or HOST slots=COUNT"
    ):
        read_hosts(path)


def test_a_host_file_that_is_missing_or_empty_or_repeats_a_host_is_refused(tmp_path):
    with pytest.raises(OptionError, match=r"cannot read the host file .*hosts': No such file"):
        read_hosts(tmp_path / "hosts")
    (tmp_path / "hosts").write_text("# none yet\n")
    with pytest.raises(OptionError, match="names no host"):
        read_hosts(tmp_path / "hosts")
    (tmp_path / "hosts").write_text("d1\nd2\nd1:2\n")
    with pytest.raises(OptionError, match=r"line 3 of .* names 'd1' again; write d1:COUNT once"):
        read_hosts(tmp_path / "hosts")


@pytest.mark.parametrize(
    ("hosts", "num_workers", "num_servers", "expected"),
    [
        ("a b", 2, 2, "a b a b"),
        ("a b", 3, 2, "a b a b a"),
        ("a b c", 2, 2, "a b c a"),
        ("a:2 b:2", 4, 2, "a a b b a b"),
        ("a:2 b:1", 5, 1, "a a b a a b"),
        ("a", 2, 1, "a a a"),
    ],
)
def test_workers_fill_the_slots_in_turn_and_servers_go_round_the_hosts(
    hosts, num_workers, num_servers, expected
):
    words = [word.partition(":") for word in hosts.split()]
    assert place([Host(n, int(c or 1)) for n, _, c in words], num_workers, num_servers) == expected.split()


# ---- whole jobs --------------------------------------------------------------------------------------

TOGETHER = """
import os, re, subprocess, sys, time
from pathlib import Path
import numpy as np
from singa_lite.comm.rendezvous import process_communicator, process_messenger

messenger = process_messenger(timeout_s=300)
job = messenger.job


def say(*words):
    sys.stdout.write(" ".join(map(str, (messenger.name, *words))) + "\\n")

"""
WORK = """
say(os.uname().nodename, Path.cwd().name, os.environ["OMP_NUM_THREADS"], os.environ["ROLE"], sys.argv[1:],
    repr(sys.stdin.read()))
if job.is_server:
    for _ in job.peers:
        messenger.receive()
else:
    communicator = process_communicator()
    array = np.full(3, 2.0 ** job.rank)
    communicator.all_reduce(array, "sum").wait()
    say(communicator.rank, communicator.size, communicator.local_rank, array[0])
"""


@needs_mpi
@needs_names
def test_a_job_of_two_hosts_runs_in_a_copy_of_the_folder(tmp_path):
    folder, copy, logs = tmp_path / "my project", tmp_path / "copy of it", tmp_path / "logs"
    (folder / "my scripts").mkdir(parents=True)
    script = write_script(folder / "my scripts", TOGETHER + WORK)
    arguments = ["a b", '"', "it's", "$HOME", "-n", "\n", ""]
    roles = ["--env-worker", "ROLE:a:b 'c'", "--env-server", "ROLE:"]
    options = ("--sync-dst-dir", str(copy), "--log-dir", str(logs), *roles)
    # the script by its whole path, which is not that of the copy
    result = run_in(folder, command_on_hosts(tmp_path, str(script), *arguments, options=options))
    assert result.returncode == 0, result.stderr
    workers, servers = threads_per_rank(1, 1), 1
    expected = [
        *(f"w{i}] worker {i} d{i + 1} {copy.name} {workers} a:b 'c' {arguments} ''" for i in range(2)),
        *(f"s{i}] server {i} d{i + 1} {copy.name} {servers}  {arguments} ''" for i in range(2)),
        *(f"w{i}] worker {i} {i} 2 0 3.0" for i in range(2)),
    ]
    assert sorted(result.stdout.splitlines()) == sorted("[" + line for line in expected)
    for name in ("worker-0", "worker-1", "server-0", "server-1"):
        prefix = f"{name[0]}{name[-1]}] "
        lines = [line.removeprefix(prefix) for line in expected if line.startswith(prefix)]
        assert (logs / f"{name}.log").read_text().splitlines() == lines
    assert len(list(logs.iterdir())) == 4
    assert_nothing_left(tmp_path)


ENDS = """
rank = job.rank
folder = Path(__file__).parent
child = f"import time; '{folder}'; time.sleep(600)"
subprocess.Popen([sys.executable, "-c", child])
maps = Path("/proc/self/maps").read_text()
(folder / f"part-{rank}").write_text(" ".join(re.findall(r"/dev/shm/mpich_shm_\\w+", maps)))
(folder / f"part-{rank}").rename(folder / f"shared-{rank}")
while len(list(folder.glob("shared-*"))) < 4:
    time.sleep(.01)
if rank == 1:
    (END)
while True:
    say("got", messenger.receive().reason)
"""
# how worker 1 of a job of two hosts ends -> code, exit code of the launcher
ENDINGS = {
    "raise": ("1 / 0", 1),
    "kill": ("os.kill(os.getpid(), 9)", 137),
    "exit": ("os._exit(0)", 1),
    "interrupt": ("(folder / 'ready').touch()", 130),
    "terminate": ("(folder / 'ready').touch()", 143),
    "launcher_killed": ("(folder / 'ready').touch()", -9),
    "code": ("os._exit(3)", 3),
    "realtime": ("os.kill(os.getpid(), 40)", 168),
    "group": ("os.kill(0, 15)", 143),
}
SIGNALS = {
    "interrupt": signal.SIGINT,
    "terminate": signal.SIGTERM,
    "launcher_killed": signal.SIGKILL,
}


def end_job(folder: Path, ending: str) -> tuple[int, str]:
    """Run the job in a folder of its own; return the launcher's exit code and all output, once all have ended."""
    folder = folder / ending
    folder.mkdir()
    script = write_script(folder, TOGETHER + ENDS.replace("END", ENDINGS[ending][0]))
    with (folder / "output").open("w") as output:
        job = subprocess.Popen(
            command_on_hosts(folder, str(script)), stdout=output, stderr=output, env=fresh_environment()
        )
        if ending in SIGNALS:
            wait_until((folder / "ready").exists, "the start of all")
            job.send_signal(SIGNALS[ending])
        try:
            code = job.wait(LIMIT_S)
        finally:
            assert_nothing_left(folder)
    files = {path for name in folder.glob("shared-*") for path in name.read_text().split()}
    assert files
    wait_until(lambda: not any(Path(path).exists() for path in files), "the removal of MPI's files")
    return code, (folder / "output").read_text()


@pytest.fixture(scope="module")
def endings(request, tmp_path_factory):
    """What came of the jobs, which run at the same time."""
    folder, chosen = tmp_path_factory.mktemp("endings"), {"raise", *cases_that_run(request, "ending")}
    calls = [functools.partial(end_job, folder, ending) for ending in chosen]
    return dict(zip(chosen, at_once(calls), strict=True))


@needs_mpi
@slow_but_first("ending", ENDINGS, count=6)
def test_the_exit_code_of_a_job_of_two_hosts_is_that_of_its_end(endings, ending):
    code, output = endings[ending]
    assert code == ENDINGS[ending][1], output


@needs_mpi
def test_a_worker_that_raises_is_named_and_the_others_have_its_text(endings):
    output = endings["raise"][1]
    assert "[w1] ZeroDivisionError: division by zero" in output
    for number in range(2):
        assert f"[s{number}] server {number} got worker 1 aborted: ZeroDivisionError" in output


@needs_mpi
@slow_but_first(
    ("ending", "how"),
    [
        ("kill", "was killed by SIGKILL"),
        ("exit", "failed (exit code 0)"),
        ("code", "failed (exit code 3)"),
        ("realtime", "was killed by signal 40"),
        ("group", "was killed by SIGTERM"),
    ],
    count=2,
)
def test_a_process_that_is_lost_is_named_with_its_host(endings, ending, how):
    lines = endings[ending][1].splitlines()
    assert [line for line in lines if line.startswith("singa-lite run:")] == [
        f"singa-lite run: worker 1 on d2 {how}"
    ]
    watchdog = re.compile(r"\[w1\] singa_lite: rank 1 of 4 .* ended without leaving the MPI job")
    # after a signal nobody waits for the watchdog's own message
    assert how.startswith("was killed") or any(watchdog.match(line) for line in lines)


@needs_mpi
@pytest.mark.parametrize("ending", ["interrupt", "terminate"])
def test_a_signal_to_the_launcher_reaches_all_hosts(endings, ending):
    output = endings[ending][1]
    assert f"singa-lite run: ended all processes by {SIGNALS[ending].name}" in output
    for prefix in ("w0", "w1", "s0", "s1"):
        assert (f"[{prefix}] KeyboardInterrupt" in output) == (ending == "interrupt")
    assert "was killed by" not in output


ALONE = """
import os, subprocess, sys, time
from pathlib import Path
rank, folder = int(os.environ["PMI_RANK"]), Path(__file__).parent
"""
LINES = """
for i in range(200):
    print(str(rank) * i * 40, i)
print("10%\\r50%\\rlast", end="")
sys.stderr.write("no newline")
"""


@needs_mpi
def test_lines_of_several_hosts_stay_whole_and_long_ones_are_cut(tmp_path):
    script = write_script(tmp_path, ALONE + LINES)
    result = run_in(tmp_path, command_on_hosts(tmp_path, str(script), options=("--log-dir", "logs")))
    assert result.returncode == 0, result.stderr
    room = 4096 - len("[w0] \n")
    expected: list[str] = []
    for rank, prefix in enumerate(("w0", "w1", "s0", "s1")):
        lines = [f"{str(rank) * i * 40} {i}" for i in range(200)] + ["last"]
        pieces = [line[start : start + room] for line in lines for start in range(0, len(line), room)]
        assert len(pieces) > len(lines)
        expected += [f"[{prefix}] {piece}" for piece in pieces]
        role = ("worker", "server")[rank // 2]
        log = (tmp_path / "logs" / f"{role}-{rank % 2}.log").read_text().splitlines()
        assert log[:-2] == lines[:-1] and sorted(log[-2:]) == ["last", "no newline"]
    assert sorted(result.stdout.splitlines()) == sorted(expected)
    assert sorted(result.stderr.splitlines()) == [f"[{name}] no newline" for name in ("s0", "s1", "w0", "w1")]


def job_of_one_worker(folder):
    """What a wrapper is told."""
    return {
        "processes": [{"name": "worker 0", "prefix": "[w0] ", "log": "worker-0.log", "host": "d1"}],
        "environ": {"worker": {}},
        "log_dir": str(folder / "logs"),
        "folder": str(folder),
        "sharing": {"d1": [1, 0]},
    }


def test_a_wrapper_ends_by_the_signal_that_ended_its_script(tmp_path):
    """Without a request over PMI that alone ends the others."""
    job = job_of_one_worker(tmp_path)
    text = "import os, resource, signal\nresource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n"
    script = write_script(tmp_path, text + "print('up', flush=True)\nos.kill(os.getpid(), signal.SIGSEGV)")
    result = subprocess.run(
        [sys.executable, "-I", "-S", rank_wrapper.__file__, sys.executable, str(script)],
        env=fresh_environment(PMI_RANK="0", SINGA_LITE_WRAPPER=json.dumps(job)),
        capture_output=True,
        text=True,
        start_new_session=True,  # it kills what its script leaves in its process group
        timeout=LIMIT_S,
    )
    assert result.returncode == -signal.SIGSEGV
    assert result.stdout == "[w0] up\n"
    assert result.stderr == "singa-lite run: worker 0 on d1 was killed by SIGSEGV\n"
    assert (tmp_path / "logs" / "worker-0.log").read_text() == "up\n" + result.stderr


def test_a_log_on_a_full_disk_is_an_error_that_names_process_and_host(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "worker-0.log").symlink_to("/dev/full")
    script = write_script(tmp_path, "import time\nprint('up', flush=True)\ntime.sleep(600)")
    result = subprocess.run(
        [sys.executable, "-I", "-S", rank_wrapper.__file__, sys.executable, str(script)],
        env=fresh_environment(PMI_RANK="0", SINGA_LITE_WRAPPER=json.dumps(job_of_one_worker(tmp_path))),
        capture_output=True,
        text=True,
        start_new_session=True,
        timeout=LIMIT_S,
    )
    assert result.returncode == 1
    reason = "[Errno 28] No space left on device"
    assert result.stdout == "[w0] up\n"
    assert result.stderr == f"singa-lite run: worker 0 on d1 cannot write its log: {reason}\n"
    assert_nothing_left(tmp_path)


def test_a_report_that_a_script_cannot_start_is_read_before_the_job_ends(tmp_path, monkeypatch):
    calls = []
    for name in ("_report", "wait_until_read", "abort_job"):
        monkeypatch.setattr(rank_wrapper, name, lambda *_, name=name: calls.append(name))
    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.setenv("SINGA_LITE_WRAPPER", json.dumps(job_of_one_worker(tmp_path / "gone")))
    assert rank_wrapper.main(["true"]) == 1
    assert calls == ["_report", "wait_until_read", "abort_job"]


@pytest.mark.parametrize("is_read", [True, False])
def test_a_wrapper_waits_until_its_report_is_read_but_not_for_ever(is_read, monkeypatch):
    reader, writer = os.pipe()
    os.write(writer, b"was killed")
    late = threading.Timer(0.1, lambda: os.read(reader, 100))
    if is_read:
        monkeypatch.setattr(rank_wrapper, "DRAIN_S", LIMIT_S)
        late.start()
    rank_wrapper.wait_until_read(writer)
    assert bool(select.select([reader], [], [], 0)[0]) != is_read
    late.cancel()
    os.close(reader)
    os.close(writer)


FAILS = "if rank == 2:\n    sys.exit('no more')\ntime.sleep(600)\n"


@needs_mpi
def test_a_process_that_fails_before_it_joins_ends_the_job(tmp_path):
    script = write_script(tmp_path, ALONE + FAILS)
    result = run_in(tmp_path, command_on_hosts(tmp_path, str(script)))
    assert result.returncode == 1
    assert "[s0] no more\nsinga-lite run: server 0 on d1 failed (exit code 1)\n" in result.stderr
    assert_nothing_left(tmp_path)


@needs_mpi
def test_a_folder_that_a_host_does_not_have_is_named(tmp_path):
    script, folder = write_script(tmp_path, ""), tmp_path / "gone"
    folder.mkdir()
    command = command_on_hosts(tmp_path, str(script))
    agent = tmp_path / "agent"
    agent.write_text(
        agent.read_text().replace("exec", f"rmdir {shlex.quote(str(folder))} 2> /dev/null\nexec")
    )
    result = run_in(folder, command)
    assert result.returncode == 1
    missing = f"[Errno 2] No such file or directory: '{folder}'"
    name = r"(worker 0|server 0) on d1|(worker 1|server 1) on d2"  # the first ends the others
    assert re.search(
        rf"^singa-lite run: ({name}) cannot start: {re.escape(missing)}$", result.stderr, re.MULTILINE
    )
    assert_nothing_left(tmp_path)


@needs_mpi
def test_a_launcher_without_standard_streams_starts_hosts_all_the_same(tmp_path):
    script = write_script(tmp_path, ALONE + "print('out')\n(folder / f'ran-{rank}').touch()")
    command = shlex.join(command_on_hosts(tmp_path, str(script)))
    result = subprocess.run(
        ["sh", "-c", f"exec {command} <&- >&- 2>&-"], timeout=LIMIT_S, env=fresh_environment()
    )
    assert result.returncode == 0
    assert len(list(tmp_path.glob("ran-*"))) == 4


# ---- hosts that do not answer, or are lost ----------------------------------------------------------


def agent_without(folder: Path, what: str) -> Path:
    """An agent as ``write_agent`` makes, but on d2, for which it does ``what``."""
    agent = write_agent(folder)
    agent.write_text(agent.read_text().replace("exec", f"if test $host = d2; then {what}; fi\nexec", 1))
    return agent


@needs_mpi
@pytest.mark.parametrize("restarts", ["0", "1"])
def test_a_host_that_does_not_answer_is_named_after_the_time_out(tmp_path, restarts):
    script = write_script(tmp_path, "import time\nprint('up', flush=True)\ntime.sleep(600)")
    command = command_on_hosts(
        tmp_path, str(script), options=("--timeout-s", "3", "--max-restarts", restarts)
    )
    agent_without(tmp_path, "sleep 600; exit 0")
    result = run_in(tmp_path, command)
    assert result.returncode == 1
    assert sorted(set(result.stdout.splitlines())) == ["[s0] up", "[w0] up"]
    message = "launch: no process has started on d2 within 6 s: the host or its remote shell does not answer"
    assert result.stderr.count(message) == 1 + int(restarts), result.stderr
    assert_nothing_left(tmp_path)


@needs_mpi
def test_a_host_that_does_not_answer_is_named_if_a_rank_elsewhere_gives_it_up_first(tmp_path):
    script = write_script(tmp_path, "from singa_lite import opt\nopt.DistOpt(opt.SGD(lr=0.1))")
    command = command_on_hosts(tmp_path, str(script), options=("--timeout-s", "6", "-s", "0"))
    agent_without(tmp_path, "sleep 600; exit 0")
    result = run_in(tmp_path, command)
    assert result.returncode == 1
    assert "not every rank of the MPI job started MPI within 6 s" in result.stderr
    assert "singa-lite run: worker 0 on d1 failed (exit code 1)" in result.stderr  # its watchdog's SIGKILL
    assert re.search(r"launch: no process has started on d2 within \d+ s: the host", result.stderr), (
        result.stderr
    )
    assert_nothing_left(tmp_path)


@needs_mpi
def test_a_host_that_cannot_be_reached_is_named_beside_what_mpiexec_says(tmp_path):
    command = command_on_hosts(tmp_path, str(write_script(tmp_path, "import time\ntime.sleep(600)")))
    agent_without(tmp_path, "echo no route >&2; exit 255")
    result = run_in(tmp_path, command)
    assert result.returncode == 255
    last = (
        "singa-lite run: mpiexec could not reach, or has lost: d2 (the remote shell ends with exit code 255)"
    )
    assert "no route\n" in result.stderr and result.stderr.splitlines()[-1] == last
    assert_nothing_left(tmp_path)


@needs_mpi
@pytest.mark.parametrize("is_back", [True, False])
def test_a_host_that_is_lost_later_is_named_unless_it_answers_again(tmp_path, is_back):
    script = write_script(tmp_path, ALONE + "(folder / f'up-{rank}').touch()\ntime.sleep(600)")
    command = command_on_hosts(tmp_path, str(script), options=("--timeout-s", "40"))
    lose = f'sh -c "exec $*" & until test -e {tmp_path}/up-0 -a -e {tmp_path}/up-1; do sleep .1; done; kill -9 $!'
    back = "exit 0" if is_back else "exit 3"
    agent_without(tmp_path, f"cd {tmp_path}; test ! -e lost || {back}; {lose}; touch lost; exit 255")
    result = run_in(tmp_path, command)
    # once in some 80 runs mpiexec has not noticed, nor passed on that d2 had started
    if result.returncode == 1:
        assert "no process has started on d2 within 43 s" in result.stderr, result.stderr
        return
    assert result.returncode == 255
    lost = "mpiexec could not reach, or has lost: d2 (the remote shell ends with exit code 3)"
    expected = "mpiexec has lost the connection to one of d1, d2; all answer now" if is_back else lost
    assert result.stderr.splitlines()[-1] == f"singa-lite run: {expected}"
    assert_nothing_left(tmp_path)


def test_notes_are_taken_out_of_what_is_passed_on_wherever_it_is_cut():
    for cut in range(150):
        notes = HostNotes(2)
        start, end = (f"[singa-lite {notes.token} {word}]\n" for word in ("started 0", "failed 1"))
        other = f"[singa-lite 0123 started 1]\n[w0] [1\n[singa-lite {notes.token[:5]}"
        text = f"[mpi{start}exec] a\n{other}{end}{start}[singa".encode()
        assert len(text) > 150
        passed = b"".join(map(notes.take, (text[:cut], text[cut:], b"")))
        assert passed.decode() == f"[mpiexec] a\n{other}[singa"
        assert (notes.started, notes.failed, notes.have_all_started) == ({0}, {1}, False)


def test_the_launcher_waits_for_hosts_as_long_as_ranks_for_each_other(monkeypatch):
    monkeypatch.delenv("SINGA_LITE_TIMEOUT_S", raising=False)
    assert several_hosts._timeout_s(LaunchOptions()) == TIMEOUT_S
    monkeypatch.setenv("SINGA_LITE_TIMEOUT_S", "7.5")
    assert several_hosts._timeout_s(LaunchOptions()) == 7.5
    assert several_hosts._timeout_s(LaunchOptions(timeout_s=2)) == 2
    monkeypatch.setenv("SINGA_LITE_TIMEOUT_S", "soon")
    assert several_hosts._timeout_s(LaunchOptions()) == TIMEOUT_S


# ---- the copy ----------------------------------------------------------------------------------------


@pytest.fixture
def project(tmp_path):
    """A folder with what is copied and what stays behind."""
    folder = tmp_path / "my project"
    for name in (".git", "venv", "data/__pycache__", "copies/one", "venv data"):
        (folder / name).mkdir(parents=True)
    (folder / "venv" / "pyvenv.cfg").touch()
    for name in (
        "train.py",
        ".git/HEAD",
        "data/__pycache__/x.pyc",
        "data/it's",
        "copies/other",
        "venv data/x",
    ):
        (folder / name).write_text(name)
    (folder / "train.py").chmod(0o755)
    return folder


COPIED = {"train.py", "data/it's", "copies/other", "venv data/x"}


def without(monkeypatch, folder: Path, program: str) -> None:
    """Take ``program`` off PATH."""
    programs = folder / "bin"
    programs.mkdir()
    for name in ("sh", "tar", "rsync", "mkdir", "unshare", "hostname", "sleep"):
        if name != program and shutil.which(name):
            (programs / name).symlink_to(shutil.which(name))
    monkeypatch.setenv("PATH", str(programs))


@pytest.mark.parametrize("tool", ["rsync", "tar"])
def test_the_current_folder_is_copied_but_for_environments_and_the_copy_itself(
    tmp_path, monkeypatch, project, tool
):
    if tool == "rsync" and not shutil.which("rsync"):
        pytest.skip("rsync is not installed")
    without(monkeypatch, tmp_path, "tar" if tool == "rsync" else "rsync")
    agent = write_agent(tmp_path)
    agent.write_text(agent.read_text().replace("exec", f"echo $host >> {tmp_path}/asked\nexec"))
    for host in ("d1", "d2", "d1", "d2"):  # in turns, as they share a folder here
        copy = FolderCopy(project, project / "copies" / "one" / "a b", [str(agent), "-q", "-o=x y"])
        copy.run([host], lambda: False)
    target = project / "copies" / "one" / "a b"
    assert {str(path.relative_to(target)) for path in target.rglob("*") if path.is_file()} == COPIED
    assert all((target / name).read_text() == name for name in COPIED)
    assert os.access(target / "train.py", os.X_OK)
    assert sorted((tmp_path / "asked").read_text().split()) == ["d1", "d1", "d2", "d2"]


def test_the_launchers_own_host_needs_no_remote_shell_for_the_copy(tmp_path, project):
    FolderCopy(project, tmp_path / "copy", ["no-such-shell"]).run(["localhost"], lambda: False)
    assert (tmp_path / "copy" / "train.py").read_text() == "train.py"


def test_tar_copies_where_the_other_side_has_no_rsync(tmp_path, project):
    agent = write_agent(tmp_path)
    agent.write_text(agent.read_text().replace("exec", 'case "$*" in *rsync*) exit 127;; esac\nexec'))
    FolderCopy(project, tmp_path / "copy", [str(agent)]).run(["d1"], lambda: False)
    assert (tmp_path / "copy" / "train.py").read_text() == "train.py"


def test_a_copy_that_fails_names_the_host_and_the_reason(tmp_path, project):
    (tmp_path / "file").touch()
    agent = write_agent(tmp_path)
    agent.write_text(
        agent.read_text().replace("exec", "test $host != d2 || { echo no route >&2; exit 255; }\nexec")
    )
    copy = FolderCopy(project, tmp_path / "copy", [str(agent)])
    with pytest.raises(CommError, match=r"cannot copy .*my project to .*copy on d2: no route"):
        copy.run(["d1", "d2"], lambda: False)
    with pytest.raises(CommError, match=r"cannot copy .* on d1: .*file"):
        FolderCopy(project, tmp_path / "file", [str(agent)]).run(["d1"], lambda: False)


def test_a_copy_without_a_byte_for_too_long_names_the_host(tmp_path, project):
    agent = agent_without(tmp_path, "sleep 600; exit 0")
    copy = FolderCopy(project, tmp_path / "copy", [str(agent)])
    with pytest.raises(
        CommError, match=r"cannot copy .*my project to .*copy on d2: nothing has moved for 2 s, as the"
    ):
        copy.run(["d1", "d2"], lambda: False, silence_s=2)
    assert_nothing_left(tmp_path)


def test_a_slow_copy_may_take_longer_than_silence(tmp_path, project, monkeypatch):
    head = shutil.which("head")
    without(monkeypatch, tmp_path, "rsync")
    (project / "large").write_bytes(bytes(1 << 20))
    slow = f"for i in 1 2 3 4 5 6 7 8 9 10 11 12; do {head} -c 9000 > /dev/null; sleep .25; done"
    agent = agent_without(tmp_path, f"{slow}; {head} -c 9999999 > /dev/null; exit 0")
    FolderCopy(project, tmp_path / "copy", [str(agent)]).run(["d2"], lambda: False, silence_s=2)


def test_a_signal_ends_the_copy(tmp_path, project):
    agent = write_agent(tmp_path)
    agent.write_text(f"#!/bin/sh\ntouch {tmp_path}/up\nsleep 600\n: {tmp_path}\n")
    FolderCopy(project, tmp_path / "copy", [str(agent)]).run(["d1", "d2"], (tmp_path / "up").exists)
    assert_nothing_left(tmp_path)


def test_a_folder_is_not_copied_to_itself_nor_to_a_relative_path(tmp_path, project):
    with pytest.raises(OptionError, match="'copy': expected an absolute path"):
        FolderCopy(project, Path("copy"), ["ssh"])
    (tmp_path / "link").symlink_to(project)
    with pytest.raises(OptionError, match="is the current folder itself"):
        FolderCopy(project, tmp_path / "link", ["ssh"])


# ---- the command line --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("-H none", "cannot read the host file 'none': No such file"),
        ("-H bad", "line 1 of 'bad' is 'd1 d2'; expected HOST"),
        ("-H hosts --launcher local", "--launcher local: starts processes on this host only"),
        ("-H hosts --exit-timeout 5", "--exit-timeout: not with -H"),
        ("-H hosts --sync-dst-dir copy", "--sync-dst-dir 'copy': expected an absolute path"),
        ("-H hosts --sync-dst-dir /x ../other.py", "the script '../other.py' is not in it"),
        ("-H hosts --rsh ''", "--rsh: expected a command"),
        ('-H hosts --rsh "\'"', '--rsh "\'": No closing quotation'),
        ("--launcher mpi", "--launcher mpi: needs a host file, -H FILE"),
        ("--launcher ssh", "--launcher ssh: needs a host file, -H FILE"),
        (
            "--launcher sge",
            "--launcher sge: not supported; in a job of that scheduler start the script with mpiexec or srun",
        ),
        ("--launcher yarn", "start the script with mpiexec or srun"),
        ("--launcher x", "--launcher x: expected local, mpi or ssh"),
        ("--sync-dst-dir /x", "--sync-dst-dir: there are no hosts to copy to; give -H FILE"),
        ("--rsh ssh", "--rsh: there are no hosts to reach; give -H FILE"),
    ],
)
def test_options_that_do_not_fit_are_refused(tmp_path, monkeypatch, capsys, options, message):
    start_in(tmp_path / "here", monkeypatch)
    with pytest.raises(SystemExit) as end:
        cli.main(["run", "-n", "2", *shlex.split(options), "script.py"])
    assert end.value.code == 2
    assert message in capsys.readouterr().err


def start_in(folder: Path, monkeypatch) -> None:
    """Go to ``folder``, with a script and host files; mpiexec seems to be there, and must not be started."""
    folder.mkdir()
    (folder / "script.py").touch()
    (folder.parent / "other.py").touch()
    (folder / "hosts").write_text("d1\nd2\n")
    (folder / "bad").write_text("d1 d2\n")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(several_hosts, "find_mpiexec", lambda: ("mpiexec", 5))
    monkeypatch.setattr(several_hosts.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(several_hosts, "_supervise", lambda *_: pytest.fail("nothing is to start"))
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)


def test_in_a_slurm_allocation_the_srun_line_is_shown(tmp_path, monkeypatch, capsys):
    start_in(tmp_path / "here", monkeypatch)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    with pytest.raises(SystemExit):
        cli.main(["run", "-n", "2", "-s", "1", "--timeout-s", "9", "-H", "hosts", "-m", "some.module", "a b"])
    line = (
        f"srun -n 3 --kill-on-bad-exit=1 --distribution=cyclic --label {sys.executable} -m some.module 'a b'"
    )
    assert (
        f"srun starts processes: SINGA_LITE_NUM_SERVERS=1 SINGA_LITE_TIMEOUT_S=9.0 {line}\n"
        in capsys.readouterr().err
    )


def test_the_srun_line_has_the_folders_and_says_what_it_lacks(tmp_path, monkeypatch, capsys):
    start_in(tmp_path / "here", monkeypatch)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    options = ["--checkpoint", "c k", "--log-dir", "logs", "--max-restarts", "2", "--env-worker", "A:b"]
    with pytest.raises(SystemExit):
        cli.main(["run", "-n", "2", "-H", "hosts", *options, "script.py"])
    error, here = capsys.readouterr().err, tmp_path / "here"
    assert "where srun starts processes (without --max-restarts, --log-dir, --env-worker): SINGA_" in error
    # the name outside of quotes, for a shell
    assert f": SINGA_LITE_CHECKPOINT='{here}/c k' srun -n 2 " in error
    assert not (here / "c k").exists()


def test_inside_a_step_of_slurm_mpiexec_starts_the_job(tmp_path, monkeypatch):
    start_in(tmp_path / "here", monkeypatch)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    calls = []
    monkeypatch.setattr(several_hosts, "_supervise", lambda *given: calls.append(given) or (5, False))
    assert cli.main(["run", "-n", "3", "--rsh", "ssh -p 22", "-H", "hosts", "script.py"]) == 5
    [(command, environ, *_)] = calls
    assert command[command.index("-launcher-exec") + 1] == "/bin/ssh"
    assert command[command.index("-hosts") + 1] == "d1:1,d2:1" and "-rankmap" not in command
    assert environ["HYDRA_LAUNCHER_EXTRA_ARGS"] == "-p 22"
    assert environ["SINGA_LITE_NUM_SERVERS"] == "0"


class Stuck:
    """mpiexec which the system ends long after SIGKILL, as in a call to a file system that hangs."""

    def __init__(self) -> None:
        reader, writer = os.pipe()
        os.close(writer)
        self.stderr, self.returncode = os.fdopen(reader, "rb"), -signal.SIGKILL
        self.sent: list[int] = []
        self._polls = iter([None] * 50)

    def poll(self):
        return next(self._polls, self.returncode)

    def send_signal(self, number):
        self.sent.append(number)

    def kill(self): ...

    def wait(self): ...


def test_mpiexec_that_does_not_end_at_once_by_sigkill_is_waited_for(monkeypatch):
    stuck = Stuck()
    monkeypatch.setattr(several_hosts, "start_child", lambda *_, **__: stuck)
    for limit in ("FINAL_OUTPUT_S", "TERM_S", "POLL_S"):
        monkeypatch.setattr(several_hosts, limit, 0.001)
    given = [ProgressFile(None, 1), LaunchOptions(), HostNotes(1), 60.0]
    assert several_hosts._supervise(["mpiexec"], {}, [signal.SIGTERM], *given) == (137, False)
    assert stuck.sent == [signal.SIGTERM, signal.SIGTERM, signal.SIGKILL]


def test_a_missing_mpiexec_or_another_mpis_is_an_error_that_names_the_cure(tmp_path, monkeypatch):
    monkeypatch.setattr(several_hosts.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        CommError, match=r"there is no mpiexec of MPICH, .*; pip install 'mpi4py>=4.0' 'mpich>=4.2'"
    ):
        several_hosts.find_mpiexec()
    mpiexec = tmp_path / "mpiexec"
    mpiexec.write_text("#!/bin/sh\necho mpiexec (OpenRTE) 5.0\n")
    mpiexec.chmod(0o755)
    with pytest.raises(
        CommError, match=r"mpiexec is not the mpiexec of MPICH; pip install 'mpi4py>=4.0' 'mpich>=4.2'"
    ):
        several_hosts.find_mpiexec()


def test_servers_go_round_hosts_with_several_slots_where_mpich_can_do_that(tmp_path, monkeypatch, capsys):
    start_in(tmp_path / "here", monkeypatch)
    Path("hosts").write_text("d1:2\nd2:2\n")
    calls = []
    monkeypatch.setattr(several_hosts, "_supervise", lambda command, *_: calls.append(command) or (0, False))
    assert cli.main(["run", "-n", "4", "-s", "2", "-H", "hosts", "script.py"]) == 0
    assert calls[0][calls[0].index("-hosts") + 1] == "d1:2,d2:2"
    assert calls[0][calls[0].index("-rankmap") + 1] == "0,0,1,1,0,1"
    monkeypatch.setattr(several_hosts, "find_mpiexec", lambda: ("mpiexec", 4))
    with pytest.raises(SystemExit, match="mpiexec of MPICH before version 5 cannot place servers"):
        cli.main(["run", "-n", "4", "-s", "2", "-H", "hosts", "script.py"])
    assert len(calls) == 1


def test_a_remote_shell_that_is_missing_or_cannot_be_started_is_named(tmp_path, monkeypatch):
    start_in(tmp_path / "a b", monkeypatch)
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path / "a b")
    monkeypatch.setattr(several_hosts, "find_mpiexec", lambda: ("mpiexec", 5))
    start = ["run", "-n", "1", "-H", "hosts"]
    with pytest.raises(SystemExit, match="there is no remote shell 'no-such-shell'; name one with --rsh"):
        cli.main([*start, "--rsh", "no-such-shell", "script.py"])
    agent = write_agent(tmp_path / "a b")
    with pytest.raises(SystemExit, match="no remote shell with a blank in its path"):
        cli.main([*start, "--rsh", shlex.quote(str(agent)), "script.py"])
