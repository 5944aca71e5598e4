# SPDX-License-Identifier: Apache-2.0
"""The launcher with ranks that do not communicate: output, exit codes, endings, leftovers."""

from __future__ import annotations

import errno
import os
import re
import select
import shlex
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from singa_lite import cli, info_command, launch
from singa_lite.backend.cpu.bfloat16 import describe
from singa_lite.comm.job import LAUNCHERS, threads_per_rank
from singa_lite.errors import CommError, OptionError
from singa_lite.launch import one_host
from singa_lite.launch.output import RankOutput, Sink
from singa_lite.launch.process_names import rank_names
from singa_lite.launch.rank_wrapper import Output
from tests.comm.processes import (
    PATIENT,
    assert_nothing_left,
    at_once,
    fresh_environment,
    launch_command,
    run_command,
    run_ranks_of,
    running,
    wait_until,
    write_script,
)
from tests.limits import LIMIT_S
from tests.slow_cases import slow_but_first

LIMITS = {"ALIVE_S", "DRAIN_S", "FINAL_OUTPUT_S"}
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="several ranks need Linux")

HEAD = """
import os, signal, subprocess, sys, time
from pathlib import Path
rank, folder = int(os.environ["SINGA_LITE_RANK"]), Path(__file__).parent
"""
# a rank with a child of its own and a shared-memory file, as one that is killed while it attaches
LEAVES_TRACES = (
    HEAD
    + """
sleeps = [sys.executable, "-c", f"import time; '{folder}'; time.sleep(600)"]
subprocess.Popen(sleeps)
subprocess.Popen(sleeps, preexec_fn=os.setpgrp)  # as a shell with job control starts them
rendezvous_id = os.environ["SINGA_LITE_RENDEZVOUS_ID"]
Path(f"/dev/shm/singa_lite-{rendezvous_id}.{rank}").write_text("x")
(folder / f"part-{rank}").write_text(rendezvous_id)
(folder / f"part-{rank}").rename(folder / f"rendezvous_id-{rank}")  # nobody reads half of it
"""
)


def shared_files(folder: Path) -> list[Path]:
    """The shared-memory files of the world whose script is in ``folder``."""
    return list(Path("/dev/shm").glob(f"*{(folder / 'rendezvous_id-0').read_text()}*"))


# ---- output ------------------------------------------------------------------------------------------


def test_a_patient_launcher_sets_every_limit_of_its_modules():
    modules = [
        import_module(f"singa_lite.launch.{path.stem}") for path in Path(launch.__path__[0]).glob("*.py")
    ]
    own = {
        f"{each.__name__.rpartition('.')[2]}.{name}"
        for each in modules
        for name in LIMITS & vars(each).keys()
    }
    set_here = set(re.findall(r"(\w+\.\w+) = ", PATIENT))
    # rank_wrapper.py runs on other hosts, as a program of its own
    assert {name for name in own if not name.startswith("rank_wrapper.")} == set_here - {
        "info_command.LIMIT_S"
    }


def test_every_line_stays_whole_and_carries_its_rank(tmp_path):
    text = "for i in range(100):\n    for part in ('a' * 3000, f' {rank} {i}', '\\n'):\n"
    text += "        sys.stdout.write(part)\n        sys.stdout.flush()\n"
    result = run_ranks_of(write_script(tmp_path, HEAD + text), 3)
    assert result.returncode == 0, result.stderr
    expected = [f"[{rank}] {'a' * 3000} {rank} {i}" for rank in range(3) for i in range(100)]
    assert sorted(result.stdout.splitlines()) == sorted(expected)


def test_each_stream_goes_where_it_belongs(tmp_path):
    script = write_script(tmp_path, HEAD + "print('out', rank)\nprint('err', rank, file=sys.stderr)")
    result = run_ranks_of(script, 2)
    assert sorted(result.stdout.splitlines()) == ["[0] out 0", "[1] out 1"]
    assert sorted(result.stderr.splitlines()) == ["[0] err 0", "[1] err 1"]


def test_a_line_that_never_ends_is_still_shown(tmp_path):
    result = run_ranks_of(write_script(tmp_path, HEAD + "print('last', end='')"), 1)
    assert result.stdout == "[0] last\n"


@pytest.fixture
def log(tmp_path):
    """A file that RankOutput writes; its text once all is written."""
    path = tmp_path / "log"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)

    def text(output):
        output.flush(lambda: False)
        return path.read_text()

    yield descriptor, text
    os.close(descriptor)


def test_a_log_gets_only_the_last_state_of_a_progress_bar(log):
    descriptor, text = log
    output = RankOutput(rank_names(2), None, descriptor, descriptor)
    for chunk in (b"\r10%", b"\r50%\r", b"\r100", b"%", b"\nnext\n"):
        output.feed(0, "stderr", chunk)
    assert text(output) == "[0] 100%\n[0] next\n"


def test_a_terminal_shows_rank_0s_bar_as_it_moves_and_other_lines_above_it():
    reader, screen = os.openpty()
    output = RankOutput(rank_names(2), None, screen, screen)
    output.feed(0, "stderr", b"\r10%")
    output.feed(1, "stdout", b"\r99%")
    output.feed(1, "stdout", b"\nhello\n")
    output.feed(0, "stderr", b"\r20%\n")
    output.flush(lambda: False)
    clear = b"\r\x1b[K"
    expected = clear + b"[0] 10%" + clear + b"[1] 99%\n[1] hello\n[0] 20%\n"
    shown = b""
    while len(shown) < len(expected) and select.select([reader], [], [], LIMIT_S)[0]:
        shown += os.read(reader, 1000).replace(b"\r\n", b"\n")  # a terminal may give it in pieces
    os.close(screen)
    os.close(reader)
    assert shown == expected


def test_prefixes_are_equally_wide(log):
    descriptor, text = log
    output = RankOutput(rank_names(11), None, descriptor, descriptor)
    output.feed(2, "stdout", b"a\n")
    output.feed(10, "stdout", b"b\n")
    assert text(output) == "[ 2] a\n[10] b\n"


def read_to_the_end(descriptor: int, received: list[bytes]) -> None:
    while part := os.read(descriptor, 1 << 16):
        received.append(part)
    os.close(descriptor)


@pytest.mark.parametrize("ending", [b"last\n", b""])
def test_output_is_never_waited_for_and_what_is_left_out_is_counted(ending):
    reader, writer = os.pipe()
    sink = Sink(writer, may_drop=True)
    line = b"x" * 99_999 + b"\n"
    for _ in range(40):  # nobody reads: four times what the buffer and the pipe hold
        sink.write(line)
    assert not sink.is_full
    received: list[bytes] = []
    reading = threading.Thread(target=read_to_the_end, args=(reader, received))
    reading.start()
    sink.flush(lambda: False)
    if ending:
        sink.write(ending)
        sink.flush(lambda: False)
    os.close(writer)
    reading.join(LIMIT_S)
    *lines, notice = b"".join(received).removesuffix(ending).splitlines()
    assert set(lines) == {line[:-1]}
    assert notice == f"singa-lite run: {40 - len(lines)} lines left out".encode()


def test_a_sink_keeps_what_it_gets_until_the_system_has_a_thread_for_it(monkeypatch):
    reader, writer = os.pipe()
    sink, start, refusals = Sink(writer), threading.Thread.start, iter("abc")

    def late_start(thread):
        if next(refusals, None):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", late_start)
    for part in (b"first ", b"and ", b"second"):
        sink.write(part)
    sink.rest(LIMIT_S)
    sink.flush(lambda: False)
    os.close(writer)
    assert os.read(reader, 100) == b"first and second"
    os.close(reader)


TRACE = "Traceback (most recent call last):"
DURING = "During handling of the above exception, another exception occurred:"
DEEP = "\n".join(["  File 'x'"] * 99)  # more than the lines that are kept
DIRECT = "The above exception was the direct cause of the following exception:"


@pytest.mark.parametrize(
    ("text", "distance"),
    [
        ("{0}CommError: rank 0: x: this rank aborted: thread 'Thread-1': ValueError: no more", 0),
        ("RuntimeError: the download was aborted: no network", 0),
        ("{0}CheckpointError: x: fsck of disk failed: 3", 0),
        ("{0}CommError: rank 2: x: rank 1 (process 4711) died", 2),
        (
            "{0}CommError: rank 2: x: rank 1 has closed its communicator: it ended, or made fewer calls than this",
            2,
        ),
        (
            "{0}CommError: shm: rank 2, /dev/shm/x: rank 1 (process 4711) ended with exit code 1 before all ranks had "
            "joined",
            2,
        ),
        ("{0}CommError: shm: rank 2, /dev/shm/x: rank 1 (process 4711) ended before all ranks were there", 2),
        ("{0}CommError: shm: rank 2, /dev/shm/x: rank 0 aborted making it; see its error", 2),
        ("{0}CommError: my storage server does not answer", 1),
        ("{0}CommError: connect: thread 'loader': no file; this process does not join", 1),
        ("{0}CheckpointError: save_job: rank 1 failed: no space", 2),
        ("{0}NonFiniteError: DistOpt: the gradient of 'out.b' on rank 2 has 1 NaN at step 0", 2),
        ("{0}CommError: rank 1: the ranks disagree: rank 0 calls x, rank 2 calls barrier", 2),
        (
            "{0}CommError: rank 1: the ranks differ in their optimizers: lr is 0.1 on rank 0 but 0.2 on rank 2",
            2,
        ),
        ("{0}CommError: NCCL: rank 2 on d2 cannot take part: no GPU", 2),
        (
            "{0}CommError: rank 1: x: waited 2 s for rank 0, which is stopped, too slow, or does not make this call",
            2,
        ),
        ("{0}CommError: connect: not every rank of the MPI world joined within 3 s", 2),
        (
            "{0}CommError: shm: rank 0, /dev/shm/x: waited 2.5 s for rank 2 to start; check that all ranks run",
            2,
        ),
        ("{0}CommError: shm: rank 1, /dev/shm/x: was not made by rank 0 within 1e+03 s; check that", 2),
        ("{0}CommError: rank 1: x: rank 0 aborted: thread 'Thread-1': ValueError: no more", 3),
        (
            f"{{0}}CommError: rank 1: x: rank 0 aborted: no more\n\n{DIRECT}\n\n{TRACE}\nRuntimeError: training failed",
            3,
        ),
        (f"{{0}}CommError: rank 1: x: rank 0 (process 7) died\n\n{DURING}\n\n{TRACE}\nKeyError: 'saved'", 2),
        (f"ValueError: no more\n\n{DURING}\n\n{TRACE}\n{{0}}CommError: rank 1: x: waited 2 s for rank 0", 2),
        (f"KeyError: 'saved'\n\n{DURING}\n\n{TRACE}\nValueError: no more", 0),
        (f"KeyError: 'saved'\n\n{DURING}\n\n{TRACE}\n{{0}}CommError: rank 1: x: rank 2 aborted: no more", 3),
        (f"KeyError: 'saved'\n\n{DIRECT}\n\n{TRACE}\n{{0}}CommError: my server does not answer", 0),
        (f"{{0}}CommError: x: rank 2 aborted: no\n\n{DIRECT}\n\n{TRACE}\n{DEEP}\nRuntimeError: no", 3),
        ("{0}CommError: NCCL: ranks 0 and 1 both use GPU 0 of d1", 2),
        (
            "ValueError: deep\n"
            + "  + Exception Group Traceback (most recent call last):\n"
            + "  | ExceptionGroup: two",
            0,
        ),
        (f"{{0}}CommError: rank 1: x: rank 0 aborted: no more\n{TRACE}\nValueError: another one", 0),
    ],
)
def test_how_far_an_error_is_from_the_cause_is_read_in_the_last_lines_of_its_tracebacks(text, distance):
    descriptor = os.open(os.devnull, os.O_WRONLY)
    output = RankOutput(rank_names(2), None, descriptor, descriptor)
    error = text.format("singa_lite.errors.")
    output.feed(0, "stderr", f"INFO: an upload aborted: again\n{TRACE}\n{error}\n".encode())
    # a watchdog writes no traceback
    output.feed(
        1, "stderr", b"singa_lite: CommError: rank 1: not every rank of the MPI job started MPI within 3 s\n"
    )
    assert [output.distance_to_cause(rank, 1) for rank in range(2)] == [distance, 2]
    of_mpi = Output("", descriptor)
    of_mpi.feed(2, f"{TRACE}\n{error}\n".encode())
    assert of_mpi.errors.distance == distance
    output.flush(lambda: False)
    os.close(descriptor)


def test_a_sink_that_may_not_drop_says_when_it_is_full():
    reader, writer = os.pipe()
    sink = Sink(writer)
    for _ in range(2 + (2 << 20) // 100_000):
        sink.write(b"x" * 100_000)
    assert sink.is_full
    os.close(reader)  # ends the thread
    sink.flush(lambda: False)
    assert isinstance(sink.error, BrokenPipeError)
    os.close(writer)


# ---- arguments and environment -----------------------------------------------------------------------


@pytest.mark.parametrize("dashes", [[], ["--"]])
def test_options_after_the_script_are_the_scripts(tmp_path, dashes):
    script = write_script(tmp_path, HEAD + "print(sys.argv[1:])")
    command = [*launch_command(Path(), 1)[:-1], *dashes, str(script), "-n", "5", "--timeout-s", "-m"]
    assert run_command(command).stdout == "[0] ['-n', '5', '--timeout-s', '-m']\n"


def test_options_after_the_script_are_no_abbreviations_of_the_launchers(tmp_path):
    options = ["--n", "5", "--num=4", "--env", "a", "--m", "3", "--h", "--version"]
    script = write_script(tmp_path, HEAD + "print(sys.argv[1:])")
    assert run_command([*launch_command(script, 1), *options]).stdout == f"[0] {options}\n"


def test_a_module_runs_by_name(tmp_path):
    write_script(tmp_path, HEAD + "print(__name__, sys.argv[1:])", "some_module.py")
    command = [*launch_command(Path(), 2)[:-1], "-m", "some_module", "-x"]
    result = run_command(command, PYTHONPATH=str(tmp_path))
    assert sorted(result.stdout.splitlines()) == [f"[{rank}] __main__ ['-x']" for rank in range(2)]


def test_ranks_learn_their_world_and_time_out(tmp_path):
    text = (
        "print(rank, *(os.environ[f'SINGA_LITE_{n}'] for n in ('WORLD_SIZE', 'TIMEOUT_S', 'RENDEZVOUS_ID')))"
    )
    script = write_script(tmp_path, HEAD + text)
    command = launch_command(script, 3)
    result = run_command([*command[:4], "--timeout-s", "7.5", *command[4:]])
    words = sorted(line.split() for line in result.stdout.splitlines())
    assert [line[:4] for line in words] == [[f"[{rank}]", str(rank), "3", "7.5"] for rank in range(3)]
    assert len({line[4] for line in words}) == 1


@pytest.mark.parametrize(
    ("given", "expected"), [({}, str(threads_per_rank(2))), ({"OMP_NUM_THREADS": "7"}, "7")]
)
def test_ranks_share_the_cores_unless_set(tmp_path, given, expected):
    script = write_script(tmp_path, HEAD + "print(os.environ['OMP_NUM_THREADS'])")
    result = run_ranks_of(script, 2, **given)
    assert sorted(result.stdout.splitlines()) == [f"[{rank}] {expected}" for rank in range(2)]


def test_ranks_have_no_standard_input(tmp_path):
    script = write_script(tmp_path, HEAD + "print(repr(sys.stdin.read()))")
    result = subprocess.run(
        launch_command(script, 2), input="secret", capture_output=True, text=True, timeout=LIMIT_S
    )
    assert sorted(result.stdout.splitlines()) == ["[0] ''", "[1] ''"]


ROLES = """
names = ("SINGA_LITE_WORLD_SIZE", "SINGA_LITE_NUM_SERVERS", "OMP_NUM_THREADS", "ROLE")
print(rank, *(os.environ.get(name) for name in names))
if rank == 4:
    time.sleep(.3)
    sys.exit("no more")
time.sleep(600)
"""


def test_workers_and_servers_have_their_names_their_variables_and_their_cores(tmp_path):
    logs = tmp_path / "logs"
    options = ["-s", "2", "--env-worker", "ROLE:a:b", "--env-server", "ROLE:x", "--env-server", "ROLE:"]
    script = write_script(tmp_path, HEAD + ROLES)
    result = run_command(launch_command(script, 3, options=[*options, "--log-dir", str(logs)]))
    threads = threads_per_rank(3, 2)
    lines = [f"[w{rank}] {rank} 5 2 {threads} a:b" for rank in range(3)] + ["[s0] 3 5 2 1 ", "[s1] 4 5 2 1 "]
    assert sorted(result.stdout.splitlines()) == sorted(lines)
    assert result.returncode == 1
    assert result.stderr == "[s1] no more\nsinga-lite run: server 1 failed first (exit code 1)\n  no more\n"
    for line, name in zip(lines, ["worker-0", "worker-1", "worker-2", "server-0", "server-1"], strict=True):
        more = "no more\n" if name == "server-1" else ""
        assert (logs / f"{name}.log").read_text() == line.partition("] ")[2] + "\n" + more
    assert len(list(logs.iterdir())) == 5
    assert_nothing_left(tmp_path)


@pytest.mark.parametrize(("options", "expected"), [([], "1"), (["-s", "0"], "0")])
def test_without_s_the_number_of_servers_is_the_environments(tmp_path, options, expected):
    script = write_script(tmp_path, HEAD + "print(os.environ['SINGA_LITE_NUM_SERVERS'])")
    result = run_command(launch_command(script, 2, options=options), SINGA_LITE_NUM_SERVERS="1")
    assert sorted(result.stdout.splitlines()) == [f"[0] {expected}", f"[1] {expected}"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-n", "2", "-s", "-1", "script.py"], "-s -1: must be >= 0"),
        (["-n", "2", "--env-worker", "A=b", "script.py"], "--env-worker 'A=b': expected NAME:VALUE"),
        (["-n", "2", "--env-server", "A:b", "script.py"], "--env-server: there are no servers"),
        (["-n", "0", "script.py"], "at least one rank"),
        (["-n", "two", "script.py"], "invalid int value"),
        (["-n", "1025", "script.py"], "-n 1025: a host has at most 1024 ranks"),
        (["-n", "9" * 20, "-H", "hosts", "script.py"], "at most 1048576 ranks"),
        (["script.py"], "-n"),
        (["-n", "2"], "which script?"),
        (["-n", "2", "no_such_script.py"], "there is no script 'no_such_script.py'"),
        (["-n", "2", "--timeout-s", "0", "script.py"], "must be > 0"),
        (["-n", "2", "--exit-timeout", "-1", "script.py"], "must be > 0"),
    ],
)
def test_a_wrong_command_line_says_what_is_wrong(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["run", *arguments])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_a_script_whose_name_looks_like_an_option_is_run(tmp_path, monkeypatch):
    (tmp_path / "-V").write_text("print('ran')")
    monkeypatch.chdir(tmp_path)
    result = run_command([sys.executable, "-m", "singa_lite", "run", "-n", "1", "--", "-V"])
    assert (result.returncode, result.stdout.splitlines()) == (0, ["[0] ran"]), result.stderr


TASKS = [*((launcher, *names) for launcher, names in LAUNCHERS.items())]


@pytest.mark.parametrize(("launcher", "size_name", "rank_name"), TASKS)
def test_one_of_several_launchers_is_refused(tmp_path, monkeypatch, capsys, launcher, size_name, rank_name):
    for name, value in ((size_name, "3"), (rank_name, "1")):
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        cli.main(["run", "-n", "2", str(write_script(tmp_path, ""))])
    assert ended.value.code == 2
    message = (
        f"this launcher is task 1 of 3 of {launcher}, and each would start a job of its own; start the script"
    )
    assert message in capsys.readouterr().err


def test_all_variables_that_say_so_are_named(tmp_path, monkeypatch, capsys):
    for name, value in (
        ("PMI_SIZE", "3"),
        ("PMI_RANK", "1"),
        ("SLURM_STEP_NUM_TASKS", "3"),
        ("SLURM_PROCID", "1"),
    ):
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        cli.main(["run", "-n", "2", str(write_script(tmp_path, ""))])
    error = capsys.readouterr().err
    assert "of MPICH or Intel MPI (mpiexec) or Slurm (srun), and" in error
    assert "unset PMI_SIZE SLURM_STEP_NUM_TASKS)" in error
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")  # of what mpiexec runs in
    with pytest.raises(SystemExit):
        cli.main(["run", "-n", "2", str(write_script(tmp_path, ""))])
    assert "unset PMI_SIZE)" in capsys.readouterr().err


@pytest.mark.parametrize(
    "variables",
    [
        {"PMI_SIZE": "1", "PMI_RANK": "0"},
        {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"},
        # sbatch
        {
            "SLURM_JOB_ID": "7",
            "SLURM_NTASKS": "4",
            "SLURM_PROCID": "0",
            "SLURM_TASKS_PER_NODE": "4",
        },
    ],
)
def test_a_launcher_runs_as_the_only_task_and_in_a_batch_script(tmp_path, variables):
    result = run_ranks_of(write_script(tmp_path, "print('up')"), 2, **variables)
    assert (result.returncode, sorted(result.stdout.splitlines())) == (0, ["[0] up", "[1] up"]), result.stderr


@pytest.mark.parametrize(
    ("name", "processes"),
    [
        *((name, ["-n", "2"]) for name in ("/dev/stdin", "/dev/fd/0", "/proc/self/fd/0", "pipe", "link")),
        ("/dev/stdin", ["-n", "1"]),  # no rank gets the launcher's
        ("pipe", ["-n", "1", "-s", "1"]),
    ],
)
def test_a_script_that_not_every_process_could_read_is_refused(tmp_path, name, processes):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/stdin")
    with open(write_script(tmp_path, "print('trained')")) as script:
        result = subprocess.run(
            [sys.executable, "-m", "singa_lite", "run", *processes, str(tmp_path / name)],
            stdin=script,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
    assert result.returncode == 2 and "is no file that every process can read" in result.stderr, result


def test_a_script_may_be_a_link_to_a_file(tmp_path):
    (tmp_path / "link").symlink_to(write_script(tmp_path, "print('trained')"))
    assert sorted(run_ranks_of(tmp_path / "link", 2).stdout.splitlines()) == ["[0] trained", "[1] trained"]


def test_a_process_with_a_wrong_command_line_ends_with_2():
    result = run_command([sys.executable, "-m", "singa_lite", "run", "-n", "0", "script.py"])
    assert result.returncode == 2
    assert "at least one rank" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], 2), r"command = \[\] must be a list of text"),
        (("train.py", 2), "command = 'train.py' must be a list of text"),
        ((["-c", 1], 2), "must be a list of text"),
        ((["-c", ""], 0), "num_workers"),
        ((["-c", ""], 2.0), "num_workers"),
        ((["-c", ""], 2, {"log_dir": "x"}), "options must be LaunchOptions, not dict"),
    ],
)
def test_launch_refuses_wrong_arguments(arguments, message):
    with pytest.raises(OptionError, match=message):
        one_host.launch(*arguments)


def test_launch_refuses_other_threads_than_the_main_one():
    with ThreadPoolExecutor(1) as pool, pytest.raises(OptionError, match="in the main thread alone"):
        pool.submit(one_host.launch, ["-c", ""], 2).result()


# ---- endings -----------------------------------------------------------------------------------------


# what ends a job whose other ranks would go on -> (ranks, script)
ENDINGS = {
    "a message": (3, "time.sleep(.2 * rank)\nif rank == 1:\n    sys.exit('no more')\ntime.sleep(600)"),
    "an exit code": (2, "if rank == 1:\n    sys.exit(7)\ntime.sleep(600)"),
    "a signal": (2, "if rank == 1:\n    os.kill(os.getpid(), 9)\ntime.sleep(600)"),
    "SIGTERM is ignored": (
        2,
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nif rank:\n    sys.exit(3)\ntime.sleep(600)",
    ),
    "a rank is stopped": (
        2,
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit('it was told'))\n"
        "if rank == 0:\n    os.kill(os.getpid(), signal.SIGSTOP)\n    time.sleep(600)\ntime.sleep(.2)\nsys.exit(4)",
    ),
    # two, as a third could be later than the time-out too
    "a rank is stopped at its end": (2, "if rank == 1:\n    os.kill(os.getpid(), signal.SIGSTOP)"),
}
OPTIONS = {"a rank is stopped at its end": ["--exit-timeout", "1"]}


@pytest.fixture(scope="module")
def endings(tmp_path_factory):
    """What came of the jobs of ENDINGS, which run at the same time: most of it they wait for ranks to go."""
    folder = tmp_path_factory.mktemp("endings")
    scripts = [
        write_script(folder, HEAD + text, f"{number}.py") for number, (_, text) in enumerate(ENDINGS.values())
    ]
    commands = [
        launch_command(script, size, options=OPTIONS.get(ending, []))
        for script, (ending, (size, _)) in zip(scripts, ENDINGS.items(), strict=True)
    ]
    results = at_once([partial(run_command, command) for command in commands])
    assert_nothing_left(folder)
    return dict(zip(ENDINGS, results, strict=True))


def test_the_first_failure_ends_all_ranks_and_names_itself(endings):
    result = endings["a message"]
    assert result.returncode == 1
    assert "singa-lite run: rank 1 failed first (exit code 1)\n  no more\n" in result.stderr


@pytest.mark.parametrize(("ending", "code"), [("an exit code", 7), ("a signal", 137)])
def test_the_exit_code_is_that_of_the_first_failure(endings, ending, code):
    assert endings[ending].returncode == code
    assert "rank 1 failed first" in endings[ending].stderr


def test_a_rank_that_ignores_sigterm_is_killed(endings):
    assert endings["SIGTERM is ignored"].returncode == 3


def test_a_stopped_rank_is_told_to_end_with_the_others(endings):
    assert endings["a rank is stopped"].returncode == 4
    assert "it was told" in endings["a rank is stopped"].stderr


def test_a_rank_that_hangs_at_its_end_is_killed_and_named(endings):
    result = endings["a rank is stopped at its end"]
    assert result.returncode == 1
    assert "rank 1 had not ended 1 s after the others and was killed; see --exit-timeout" in result.stderr


@pytest.mark.parametrize("end", ["raise", "sys.exit(3)", "raise RuntimeError('training failed') from error"])
def test_a_repeated_failure_is_not_taken_for_the_cause(tmp_path, end):
    text = "from singa_lite.errors import CommError\nif rank == 0:\n    try:\n"
    text += "        raise CommError('rank 1 has left')\n"
    text += f"    except CommError as error:\n        print(error, file=sys.stderr)\n        {end}\n"
    text += "time.sleep(.5)\nraise ValueError('the cause')"
    result = run_ranks_of(write_script(tmp_path, HEAD + text), 2, is_patient=True)
    summary = result.stderr[result.stderr.index("singa-lite run:") :]
    assert summary.startswith("singa-lite run: rank 1 failed first (exit code 1)\n  Traceback")
    assert summary.endswith("  ValueError: the cause\n")
    assert "rank 1 has left" in result.stderr  # the others' error is shown as well


@pytest.mark.parametrize("end", ["", "sys.exit(5)"])
def test_children_of_ranks_and_shared_files_go_with_the_ranks(tmp_path, end):
    result = run_ranks_of(write_script(tmp_path, LEAVES_TRACES + end), 2, is_patient=True)
    assert result.returncode == (5 if end else 0)
    assert shared_files(tmp_path) == []
    assert_nothing_left(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_launcher_ends_all_ranks(tmp_path, number):
    script = write_script(tmp_path, LEAVES_TRACES + "time.sleep(600)")
    command = launch_command(script, 2, is_patient=True)
    job = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=fresh_environment())
    wait_until(lambda: len(list(tmp_path.glob("rendezvous_id-*"))) == 2, "the ranks' start")
    job.send_signal(number)
    _, errors = job.communicate(timeout=LIMIT_S)
    assert job.returncode == 128 + number
    assert f"ended all ranks by {number.name}" in errors
    assert ("KeyboardInterrupt" in errors) == (number == signal.SIGINT)
    assert shared_files(tmp_path) == []
    assert_nothing_left(tmp_path)


def test_nothing_survives_a_killed_launcher(tmp_path):
    script = write_script(tmp_path, LEAVES_TRACES + "time.sleep(600)")
    job = subprocess.Popen(launch_command(script, 2), env=fresh_environment())
    wait_until(lambda: len(list(tmp_path.glob("rendezvous_id-*"))) == 2, "the ranks' start")
    job.kill()
    job.wait(LIMIT_S)
    assert_nothing_left(tmp_path)
    wait_until(lambda: not shared_files(tmp_path), "the removal of the shared files")


def test_a_reader_that_goes_away_ends_the_ranks(tmp_path):
    script = write_script(tmp_path, HEAD + "while True:\n    print('more')\n    time.sleep(.01)")
    job = subprocess.Popen(
        launch_command(script, 2), stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=fresh_environment()
    )
    assert job.stdout is not None and job.stderr is not None
    job.stdout.readline()
    job.stdout.close()
    assert job.wait(LIMIT_S) == 141
    assert job.stderr.read() == b""
    job.stderr.close()
    assert_nothing_left(tmp_path)


FLOOD = HEAD + "(folder / f'up-{rank}').touch()\nwhile True:\n    print('x' * 1000)\n"


def test_an_unread_pipe_hides_no_death_and_no_signal(tmp_path):
    leaves = "    rank == 1 and (folder / 'up-0').exists() and sys.exit(3)\n    rank == 0 and print"
    script = write_script(tmp_path, FLOOD.replace("    print", leaves))
    job = subprocess.Popen(launch_command(script, 2), stdout=subprocess.PIPE, env=fresh_environment())
    wait_until(lambda: len(list(tmp_path.glob("up-*"))) == 2, "the ranks' start")
    # only the launcher is left, with what nobody has read
    wait_until(lambda: len(running(tmp_path)) == 1, "the end of the other rank")
    assert job.poll() is None
    job.terminate()
    assert job.wait(LIMIT_S) == 3
    assert_nothing_left(tmp_path)
    assert job.stdout is not None
    job.stdout.close()


@slow_but_first("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_job_whose_output_nobody_reads(tmp_path, number):
    job = subprocess.Popen(
        launch_command(write_script(tmp_path, FLOOD), 2), stdout=subprocess.PIPE, env=fresh_environment()
    )
    wait_until(lambda: len(list(tmp_path.glob("up-*"))) == 2, "the ranks' start")
    time.sleep(0.5)  # until the pipe and the buffer are full
    job.send_signal(number)
    assert job.wait(LIMIT_S) == 128 + number
    assert_nothing_left(tmp_path)
    assert job.stdout is not None
    job.stdout.close()


def test_log_files_get_everything_although_nobody_reads_the_terminal(tmp_path):
    text = "for i in range(3000):\n    print('o' * 990, i)\n    print('e' * 990, i, file=sys.stderr)\n"
    script = write_script(tmp_path, HEAD + text)
    reader, writer = os.pipe()
    command = launch_command(script, 3, options=["--log-dir", str(tmp_path / "logs" / "new")])
    for _ in range(2):  # the second job's lines come behind the first's
        assert subprocess.run(command, stdout=writer, stderr=writer, timeout=LIMIT_S).returncode == 0
    os.close(reader)
    os.close(writer)
    for rank in range(3):
        lines = (tmp_path / "logs" / "new" / f"rank-{rank}.log").read_text().splitlines()
        for kind in "oe":
            found = [line for line in lines if line[0] == kind]
            assert found == [f"{kind * 990} {i}" for i in range(3000)] * 2


def test_a_launcher_without_standard_streams_runs_its_ranks(tmp_path):
    script = write_script(tmp_path, HEAD + "print('out')\n(folder / f'ran-{rank}').touch()")
    command = shlex.join(launch_command(script, 2))
    result = subprocess.run(["sh", "-c", f"exec {command} <&- >&- 2>&-"], timeout=LIMIT_S)
    assert result.returncode == 0
    assert len(list(tmp_path.glob("ran-*"))) == 2


def test_too_few_descriptors_are_an_error_with_a_cure(tmp_path):
    command = shlex.join(launch_command(write_script(tmp_path, HEAD + "time.sleep(600)"), 16))
    result = run_command(["sh", "-c", f"ulimit -n 24; exec {command}"])
    assert result.returncode == 1
    assert re.fullmatch(
        r"singa-lite run: launch: cannot start rank \d+ of 16 processes: .*Too many open files; .*ulimit -n.*\n",
        result.stderr,
    )
    assert_nothing_left(tmp_path)


@pytest.mark.parametrize(("make", "reason"), [(os.mkfifo, "No such device"), (os.mkdir, "Is a directory")])
def test_a_log_that_cannot_be_written_is_an_error_before_anything_starts(tmp_path, make, reason):
    logs, ran = tmp_path / "logs", tmp_path / "ran"
    logs.mkdir()
    make(logs / "rank-1.log")
    script = write_script(tmp_path, f"open({str(ran)!r}, 'w')")
    result = run_command(launch_command(script, 2, options=["--log-dir", str(logs)]))
    assert result.returncode == 1 and not ran.exists()
    start = f"singa-lite run: launch: cannot open the logs of --log-dir {logs}: "
    assert result.stderr.startswith(start) and reason in result.stderr and "ulimit" not in result.stderr


def test_info_says_what_works_and_why_the_rest_does_not(tmp_path):
    result = run_command([sys.executable, "-c", PATIENT, "info"])
    assert result.returncode == 0, result.stderr
    rows = {line[:16].strip(): line[17:] for line in result.stdout.splitlines()}
    assert rows["transport local"].startswith("works")
    assert rows["transport shm"].startswith("works")
    assert rows["transport nccl"].startswith(("works: NCCL ", "no: NCCL", "no: CUDA's driver"))
    assert rows["device cuda"].startswith(("works: name: ", "no: singa_lite.errors.DeviceError: "))
    assert str(len(os.sched_getaffinity(0))) in rows["platform"]
    assert rows["bfloat16"] == describe() and "instructions for products" in describe()


def test_a_package_that_is_not_installed_says_where_it_is(monkeypatch):
    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(info_command, "version", missing)
    where = Path(info_command.__file__).parent
    assert info_command.package_version() == f"not installed, used from {where}"


@pytest.mark.parametrize("module", ["singa_lite", "singa_lite.cli"])
def test_the_package_and_the_command_line_can_be_run_as_modules(tmp_path, module):
    script = write_script(tmp_path, "print('started')")
    result = run_command([sys.executable, "-m", module, "run", "-n", "1", str(script)])
    assert result.returncode == 0 and "started" in result.stdout, result.stderr


@pytest.fixture(scope="module")
def info_beside_broken_packages(tmp_path_factory):
    """What `info` says where mpi4py is broken, and a singa_lite in the current folder too."""
    folder, path = tmp_path_factory.mktemp("folder"), tmp_path_factory.mktemp("path")
    for package in (folder / "singa_lite", path / "mpi4py"):
        package.mkdir()
    write_script(folder / "singa_lite", "raise ImportError('of the current folder')", "__init__.py")
    write_script(path / "mpi4py", "raise ImportError('gone')", "__init__.py")
    root = str(Path(__file__).parents[2])
    start = f"import os, sys; sys.path.insert(0, {root!r}); os.chdir({str(folder)!r})"
    code = f"{start}; from singa_lite.cli import main; main(['info'])"
    result = run_command([sys.executable, "-c", code], PYTHONPATH=str(path))
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_info_asks_the_package_that_runs_and_not_one_of_the_current_folder(info_beside_broken_packages):
    assert "transport nccl" in info_beside_broken_packages
    assert "of the current folder" not in info_beside_broken_packages


def assert_mpi4py_cannot_load(row: str) -> None:
    assert "no: mpi4py cannot load" in row and "pip install 'mpi4py>=4.0' 'mpich>=4.2'" in row


def test_info_survives_a_broken_mpi4py(info_beside_broken_packages):
    [row] = [line for line in info_beside_broken_packages.splitlines() if line.startswith("transport mpi")]
    assert_mpi4py_cannot_load(row)


def test_the_row_of_mpi_survives_a_broken_library_too(tmp_path, monkeypatch):
    package = tmp_path / "mpi4py"
    package.mkdir()
    write_script(package, "raise RuntimeError('cannot load MPI library')", "__init__.py")
    monkeypatch.syspath_prepend(tmp_path)  # which the process that is asked gets
    assert_mpi4py_cannot_load(info_command._ask(info_command.ASK_TRANSPORT.format("mpi")))


def test_a_transport_whose_process_gives_no_answer_does_not_work():
    assert info_command._ask("") == "no: no answer"


@pytest.mark.parametrize(("number", "helps"), [(errno.EAGAIN, True), (errno.E2BIG, False)])
def test_a_process_that_cannot_start_for_want_of_something_names_the_limits(monkeypatch, number, helps):
    def start(*_):
        raise OSError(number, "no")

    monkeypatch.setattr(one_host, "_start", start)
    with pytest.raises(
        CommError, match=rf"cannot start rank 0 of 2 processes: \[Errno {number}\] no"
    ) as caught:
        one_host.launch(["-c", ""], 2)
    assert ("ulimit" in str(caught.value)) == helps


IGNORES_CHILDREN = "import signal, os, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); "


@pytest.mark.parametrize(("code", "reported"), [(0, ""), (7, "rank 1 failed first (exit code 7)")])
def test_a_launcher_started_with_sigchld_ignored_has_the_exit_codes(tmp_path, code, reported):
    ends = f"print(signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL)\nsys.exit({code} if rank == 1 else 0)"
    start = IGNORES_CHILDREN + "os.execv(sys.argv[1], sys.argv[1:])"
    command = launch_command(write_script(tmp_path, HEAD + ends), 2)
    result = run_command([sys.executable, "-c", start, *command])
    assert result.returncode == code, result.stderr
    assert reported in result.stderr and "Errno" not in result.stderr
    assert result.stdout.count("True") == 2
    assert_nothing_left(tmp_path)


def test_a_launch_leaves_sigchld_as_it_was():
    code = IGNORES_CHILDREN + "from singa_lite.launch.one_host import launch; print(launch(['-c', ''], 2)); "
    code += "print(signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN)"
    result = run_command([sys.executable, "-c", code])
    assert result.stdout == "0\nTrue\n", result.stderr


def test_a_signal_that_comes_while_ranks_are_started_starts_no_more_of_them(monkeypatch, capfd):
    started = []

    def start(*arguments):
        started.append(arguments)
        os.kill(os.getpid(), signal.SIGTERM)
        return start_rank(*arguments)

    start_rank = one_host._start
    monkeypatch.setattr(one_host, "_start", start)
    assert (
        one_host.launch(["-c", "import time; time.sleep(60)"], 40, one_host.LaunchOptions())
        == 128 + signal.SIGTERM
    )
    assert len(started) == 1
    assert "ended all ranks by SIGTERM" in capfd.readouterr().err


def test_options_of_the_script_before_its_name_are_told_where_to_go(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["run", "-n", "2", "--dist-option", "fp16", "train.py"])
    assert ended.value.code == 2
    assert (
        "unrecognized arguments: --dist-option; options of the script go behind it" in capsys.readouterr().err
    )


def test_the_command_line_says_its_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"{info_command.package_version()}\n"


def test_a_version_that_cannot_be_printed_is_a_line_of_error():
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            [sys.executable, "-m", "singa_lite", "--version"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=LIMIT_S,
            env=fresh_environment(PYTHONUNBUFFERED="1"),
        )
    assert (result.returncode, result.stderr) == (1, "singa-lite: [Errno 28] No space left on device\n")


@pytest.mark.parametrize("words", ["info", "--version", "plan -n 2", "inspect 1", "--help", "run --help"])
def test_a_command_that_cannot_print_fails(words):
    for unbuffered in ("", "1"):
        command = f"{shlex.quote(sys.executable)} -m singa_lite {words}"
        closed = run_command(["sh", "-c", f"exec {command} >&-"], PYTHONUNBUFFERED=unbuffered)
        assert (closed.returncode, closed.stderr) == (1, "singa-lite: the standard output is closed\n")
        if "--" in words:
            full = run_command(["sh", "-c", f"exec {command} > /dev/full"], PYTHONUNBUFFERED=unbuffered)
            assert full.returncode != 0 and "No space left on device" in full.stderr
