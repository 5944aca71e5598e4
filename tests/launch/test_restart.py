# SPDX-License-Identifier: Apache-2.0
"""`singa-lite run --max-restarts`: which rounds there are, what they print, and that nothing of one stays."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from singa_lite import cli
from singa_lite.comm.job import threads_per_rank
from singa_lite.errors import CommError, OptionError
from singa_lite.generation import FORMAT, Manifest, write_manifest
from singa_lite.launch import restart
from singa_lite.launch.hosts import Host, without_slot
from singa_lite.launch.one_host import CannotStart, Round
from singa_lite.launch.restart import RestartOptions, check_restart, run_rounds
from singa_lite.launch.supervise import noted_signals
from tests.comm.hosts import names_missing, write_agent
from tests.comm.processes import (
    assert_nothing_left,
    fresh_environment,
    launch_command,
    run_command,
    wait_until,
    write_script,
)
from tests.limits import LIMIT_S
from tests.ranks import mpi_missing
from tests.slow_cases import slow_but_first

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="several ranks need Linux")
needs_mpi = pytest.mark.skipif(bool(mpi_missing()), reason=mpi_missing() or "mpi works")
needs_names = pytest.mark.skipif(bool(names_missing()), reason=names_missing() or "names work")

HEAD = """
import os, signal, sys, time
from pathlib import Path
rank = int(os.environ.get("SINGA_LITE_RANK", os.environ.get("PMI_RANK")))
number = int(os.environ["SINGA_LITE_RESTART"])
size = int(os.environ.get("SINGA_LITE_WORLD_SIZE", os.environ.get("PMI_SIZE")))
folder = Path(__file__).parent
(folder / f"part-{number}-{rank}").write_text(os.environ.get("SINGA_LITE_RENDEZVOUS_ID", ""))
(folder / f"part-{number}-{rank}").rename(folder / f"round-{number}-{rank}")
def wait_for(*names):
    while not all((folder / name).exists() for name in names):
        time.sleep(0.02)
"""


def run_restarting(folder: Path, text: str, *options: str, size: int = 3) -> subprocess.CompletedProcess[str]:
    return run_command(launch_command(write_script(folder, HEAD + text), size, options=options))


def rounds_in(folder: Path) -> dict[int, set[int]]:
    """The ranks that ran, by the number of the restart."""
    found: dict[int, set[int]] = {}
    for path in folder.glob("round-*"):
        number, rank = map(int, path.name.split("-")[1:])
        found.setdefault(number, set()).add(rank)
    return found


def save(folder: Path, step: int, saved_at: float, number: int = 0) -> None:
    path = folder / f"step-{step:08d}"
    path.mkdir(parents=True)
    write_manifest(
        path,
        Manifest(FORMAT, number, str(number), step, 1, saved_at, {}, {}, None, [None], [None], [{}], [{}]),
    )


# ---- which rounds there are --------------------------------------------------------------------------


class Rounds:
    """Rounds that end as told: (exit code, rank that failed, steps of the ranks, error)."""

    def __init__(self, monkeypatch, *ends) -> None:
        self.has_progress = True
        self.ends, self.starts, self.reports, self.pauses, self.signals = list(ends), [], [], [], []
        monkeypatch.setattr(restart, "_pause", self.pause)

    def pause(self, seconds, signals):
        self.pauses.append(seconds)
        return not signals

    def start(self, num_workers, environ):
        self.starts.append((num_workers, environ["SINGA_LITE_RESTART"]))
        code, failed, steps, error = self.ends.pop(0)
        if callable(error):
            error = error()
        return Round(code, failed, steps, 1000.0, 1010.0, error, self.has_progress)

    def run(self, num_workers, **options):
        return run_rounds(
            self.start, num_workers, RestartOptions(**options), self.reports.append, self.signals
        )


def failed(code=1, rank=0, steps=(1, 1, 1), error=None):
    return code, rank, steps, error


WELL = (0, None, (1, 1, 1), None)


def test_a_job_that_ends_well_ends(monkeypatch):
    rounds = Rounds(monkeypatch, WELL)
    assert rounds.run(3, max_restarts=5) == 0
    assert rounds.starts == [(3, "0")] and rounds.pauses == []


def test_the_first_restart_comes_at_once_and_the_delay_doubles_up_to_a_minute(monkeypatch):
    rounds = Rounds(monkeypatch, *[failed() for _ in range(10)])
    assert rounds.run(3, max_restarts=9) == 1
    assert rounds.pauses == [0, 1, 2, 4, 8, 16, 32, 60, 60]
    assert [number for _, number in rounds.starts] == [str(number) for number in range(10)]


def test_the_exit_code_is_that_of_the_last_failure(monkeypatch):
    rounds = Rounds(monkeypatch, failed(7), failed(9))
    assert rounds.run(3, max_restarts=1) == 9
    assert rounds.reports[-1] == "no restart is left (--max-restarts 1)"


def test_a_signal_ends_the_job_in_a_round_and_between_rounds(monkeypatch):
    rounds = Rounds(monkeypatch, failed(143, error=lambda: rounds.signals.append(signal.SIGTERM)))
    assert rounds.run(3, max_restarts=5) == 143 and len(rounds.starts) == 1
    between = Rounds(monkeypatch, failed())
    monkeypatch.setattr(restart, "_pause", lambda *_: between.signals.append(signal.SIGHUP))
    assert between.run(3, max_restarts=5) == 129
    assert between.reports[-1] == "no restart, by SIGHUP"


def test_sigquit_between_rounds_does_not_end_the_launcher():
    before = signal.signal(signal.SIGQUIT, signal.SIG_DFL)  # a shell's background jobs ignore it
    try:
        with noted_signals() as signals:
            signal.raise_signal(signal.SIGQUIT)
            assert not signals
        assert signal.getsignal(signal.SIGQUIT) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGQUIT, before)


def test_a_rank_that_fails_twice_before_its_first_step_is_left_out(monkeypatch):
    early = failed(rank=1, steps=(None, None, None))
    rounds = Rounds(monkeypatch, early, early, early, early, WELL)
    assert rounds.run(3, max_restarts=9, min_ranks=2) == 0
    assert [size for size, _ in rounds.starts] == [3, 3, 2, 2, 2]
    assert rounds.reports[2].endswith("with 2 ranks, as rank 1 failed twice running before its first step")
    assert rounds.reports[4].endswith("with 2 ranks")


@pytest.mark.parametrize(
    "ends",
    [
        [failed(rank=1, steps=(None,) * 3), failed(rank=2, steps=(None,) * 3)],
        [failed(rank=1), failed(rank=1)],
        [failed(rank=1, steps=(None,) * 3), failed(rank=1), failed(rank=1, steps=(None,) * 3)],
    ],
    ids=["another rank", "after steps", "not running"],
)
def test_other_failures_leave_the_number_of_ranks(monkeypatch, ends):
    rounds = Rounds(monkeypatch, *ends, WELL)
    assert rounds.run(3, max_restarts=9, min_ranks=1) == 0
    assert {size for size, _ in rounds.starts} == {3}


def test_ranks_that_cannot_start_are_left_out_down_to_the_least_number(monkeypatch):
    no_process = failed(rank=2, steps=(None,) * 8, error=CannotStart("no process"))
    rounds = Rounds(monkeypatch, no_process, no_process, no_process)
    with pytest.raises(CommError, match="no process"):
        rounds.run(8, max_restarts=2, min_ranks=3)
    assert [size for size, _ in rounds.starts] == [8, 3, 3]
    assert re.fullmatch("no process; .*with 3 ranks, as rank 2 cannot start", rounds.reports[1])
    alone = Rounds(monkeypatch, no_process, WELL)
    assert alone.run(8, max_restarts=2) == 0
    assert [size for size, _ in alone.starts] == [8, 8]


@pytest.mark.parametrize("error", [None, CannotStart("no process")], ids=["fails", "cannot start"])
def test_a_server_that_fails_takes_no_worker_away(monkeypatch, error):
    server = failed(rank=4, steps=(5, 5, 5, None, None), error=error)
    rounds = Rounds(monkeypatch, server, server, server, WELL)
    assert rounds.run(3, max_restarts=9, min_ranks=1) == 0
    assert [size for size, _ in rounds.starts] == [3, 3, 3, 3]


def test_where_no_steps_can_be_reported_no_failure_is_one_at_the_start(monkeypatch):
    unknown = failed(rank=1, steps=(None,) * 3)
    rounds = Rounds(monkeypatch, unknown, unknown, WELL)
    rounds.has_progress = False
    assert rounds.run(3, max_restarts=9, min_ranks=1) == 0
    assert [size for size, _ in rounds.starts] == [3, 3, 3]


@pytest.mark.parametrize(
    ("saved", "steps", "expected"),
    [
        ([(20, 1004.0)], (27, 26, None), "7 steps and 6.0 s since the checkpoint of step 20, .* at step 27"),
        ([(20, 900.0)], (None, None), "an unknown number of steps and 10.0 s since the checkpoint of step 20"),
        ([(20, 1001.0), (10, 1005.0)], (11,), "1 steps and 5.0 s since the checkpoint of step 10, .* at step 11"),
        ([], (5,), "all 10.0 s, as .* has no whole checkpoint, the ranks were at step 5"),
    ],
)  # fmt: skip
def test_what_a_round_has_lost_is_said_in_steps_and_seconds(monkeypatch, tmp_path, saved, steps, expected):
    for number, (step, saved_at) in enumerate(saved):
        save(tmp_path, step, saved_at, number)
    (tmp_path / "step-00000099").mkdir()  # never finished
    rounds = Rounds(monkeypatch, failed(steps=steps), WELL)
    rounds.run(3, max_restarts=1, checkpoint=tmp_path)
    assert re.fullmatch(f"lost: {expected}; restart 1 of 1 now with 3 ranks", rounds.reports[0])


def test_a_round_without_a_step_has_lost_none_where_steps_are_counted(monkeypatch, tmp_path):
    save(tmp_path, 20, 900.0)
    ends = [failed(steps=(None, None)), failed(steps=(27, 26)), failed(steps=(None, None))]
    rounds = Rounds(monkeypatch, *ends, WELL)
    rounds.run(2, max_restarts=3, checkpoint=tmp_path)
    lost = [report.split(" and ")[0] for report in rounds.reports]
    assert lost == ["lost: an unknown number of steps", "lost: 7 steps", "lost: 0 steps"]


def test_the_delay_stays_a_minute_however_often_a_job_restarts():
    assert [restart._delay(number) for number in (0, 1, 7, 8, 1025, 10**6)] == [0, 1, 60, 60, 60, 60]


def test_without_a_folder_the_script_must_save_by_itself(monkeypatch):
    rounds = Rounds(monkeypatch, failed(), WELL)
    rounds.run(3, max_restarts=1)
    assert "unless the script itself saves it" in rounds.reports[0]
    assert rounds.reports[1].startswith("lost: unknown without --checkpoint")


# ---- options -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_restarts": -1}, "--max-restarts -1: must be >= 0"),
        ({"min_ranks": 4, "max_restarts": 1}, "--min-ranks 4: must be in 1..3"),
        ({"min_ranks": 0, "max_restarts": 1}, "--min-ranks 0: must be in 1..3"),
        ({"min_ranks": 2}, "--min-ranks: .* give --max-restarts too"),
        (
            {"checkpoint": Path(__file__)},
            "--checkpoint .*: cannot be written as a folder: it is there and is not",
        ),
        ({"checkpoint": Path("/proc/no")}, "--checkpoint .*: cannot be written as a folder: No such file"),
        ({"checkpoint": Path("/proc/self")}, "--checkpoint .*: cannot be written as a folder"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(OptionError, match=message):
        check_restart(RestartOptions(**options), 3)


def test_the_command_line_refuses_before_anything_starts(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_script(tmp_path, HEAD)
    for given in (
        ["--max-restarts", "-1"],
        ["--checkpoint", "script.py"],
        ["--stop-timeout", "0"],
        ["--checkpoint", ""],
        ["--log-dir", ""],
        ["--log-dir", "script.py"],
        ["--log-dir", "script.py/logs"],
    ):
        with pytest.raises(SystemExit) as error:
            cli.main(["run", "-n", "2", *given, "script.py"])
        text = capsys.readouterr().err
        assert error.value.code == 2 and given[0] in text and "ulimit" not in text
    assert rounds_in(tmp_path) == {}


def test_a_missing_folder_is_made(tmp_path):
    options = check_restart(RestartOptions(checkpoint=tmp_path / "a" / "b"), 3)
    assert options.checkpoint == tmp_path / "a" / "b" and options.checkpoint.is_dir()
    assert list(options.checkpoint.iterdir()) == []


def test_a_host_loses_a_slot_and_then_goes():
    hosts = [Host("a", 2), Host("b", 1)]
    assert without_slot(hosts, "a") == [Host("a", 1), Host("b", 1)]
    assert without_slot(hosts, "b") == [Host("a", 2)]


# ---- whole jobs --------------------------------------------------------------------------------------


def test_ranks_start_again_in_new_worlds_until_they_end_well(tmp_path):
    text = (
        "print(os.environ['SINGA_LITE_CHECKPOINT'])\nwait_for(*(f'round-{number}-{r}' for r in range(3)))\n"
    )
    text += "if number == 0 and rank == 1:\n    sys.exit(5)\n"
    text += "if number == 1 and rank > 0:\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    result = run_restarting(
        tmp_path, text, "--max-restarts", "3", "--checkpoint", str(tmp_path / "checkpoints")
    )
    assert result.returncode == 0, result.stderr
    assert rounds_in(tmp_path) == {0: {0, 1, 2}, 1: {0, 1, 2}, 2: {0, 1, 2}}
    worlds = [{(tmp_path / f"round-{n}-{r}").read_text() for r in range(3)} for n in range(3)]
    assert [len(world) for world in worlds] == [1, 1, 1] and len(set.union(*worlds)) == 3
    assert set(result.stdout.splitlines()) == {f"[{r}] {tmp_path / 'checkpoints'}" for r in range(3)}
    assert "rank 1 failed first (exit code 5)" in result.stderr
    assert re.search(r"rank [12] failed first \(killed by SIGKILL\)", result.stderr)
    assert re.findall(r"restart (\d) of 3 (now|in 1 s) with 3 ranks", result.stderr) == [
        ("1", "now"),
        ("2", "in 1 s"),
    ]
    assert_nothing_left(tmp_path)


def test_when_restarts_are_used_up_the_last_exit_code_counts(tmp_path):
    result = run_restarting(tmp_path, "sys.exit(7 + number) if rank == 2 else None", "--max-restarts", "1")
    assert result.returncode == 8
    assert result.stderr.endswith("no restart is left (--max-restarts 1)\n")
    assert set(rounds_in(tmp_path)) == {0, 1}


def test_rounds_leave_no_process_descriptor_thread_or_shared_file(tmp_path):
    text = """
launcher = os.environ["SINGA_LITE_LAUNCHER_PID"]
wait_for(*(f'round-{number}-{r}' for r in range(3)))
if rank == 0:
    looks = []
    for _ in range(10):
        looks.append(len(os.listdir(f"/proc/{launcher}/fd")))
        time.sleep(0.01)
    files = min(looks)  # for a moment it may have one more, as when it reads the progress file
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    worlds = [(folder / f"round-{n}-0").read_text() for n in range(number)]
    left = [name for name in os.listdir("/dev/shm") if any(world in name for world in worlds)]
    print(files, len(children), left, flush=True)
    time.sleep(0.2)  # until the line is read, whose writer is a thread
    (folder / 'counted').write_text("") if number == 5 else None
    sys.exit(number < 5)
if number < 5:
    signal.pause()
wait_for('counted')
"""
    command = launch_command(
        write_script(tmp_path, HEAD + text),
        3,
        options=["--max-restarts", "5", "--log-dir", str(tmp_path / "logs")],
    )
    quick = "import sys; from singa_lite import cli; from singa_lite.launch import restart, supervise; "
    quick += "supervise.FINAL_OUTPUT_S = 0.1; restart._delay = lambda number: 0.0; sys.exit(cli.main())"
    at = command.index("-m")
    result = run_command([*command[:at], "-c", quick, *command[at + 2 :]])
    lines = result.stdout.splitlines()
    assert len(lines) == 6 and len(set(lines)) == 1, result.stdout + result.stderr
    assert lines[0].endswith(" 4 []")  # three ranks and the reaper
    assert_nothing_left(tmp_path)


def test_the_steps_lost_are_counted_from_what_the_ranks_have_reached(tmp_path):
    text = """
import numpy as np
from singa_lite import opt
sgd = opt.DistOpt()
for step in range(7):
    sgd.all_reduce(np.ones(3, np.float32))
    sgd.step()
sys.exit(3 if number == 0 and rank == 1 else 0)
"""
    save(tmp_path / "saved", 4, 0.0)
    result = run_restarting(tmp_path, text, "--max-restarts", "1", "--checkpoint", str(tmp_path / "saved"))
    assert result.returncode == 0, result.stderr
    assert re.search(
        r"lost: 3 steps and \d+\.\d s since the checkpoint of step 4, the ranks were at step 7", result.stderr
    )


@slow_but_first("num_servers", ["0", "1"])
def test_a_worker_that_fails_late_stays_where_a_trainer_counts_the_steps(tmp_path, num_servers):
    text = """
import numpy as np
from singa_lite import autograd, gluon
from singa_lite.tensor import Tensor
param = Tensor(data=np.ones(3, np.float32), requires_grad=True, stores_grad=True)
trainer = gluon.Trainer({"w": param}, "sgd", kvstore="dist_sync")
for step in range(7):
    with autograd.record():
        loss = autograd.reduce_sum(param, keepdims=0)
    loss.backward()
    trainer.step(1)
sys.exit(3 if number < 2 and rank == 1 else 0)
"""
    save(tmp_path / "saved", 4, 0.0)
    given = [
        "--max-restarts",
        "2",
        "--min-ranks",
        "1",
        "--checkpoint",
        str(tmp_path / "saved"),
        "-s",
        num_servers,
    ]
    result = run_restarting(tmp_path, text, *given, size=2)
    assert result.returncode == 0, result.stderr
    assert {number: ranks & {0, 1} for number, ranks in rounds_in(tmp_path).items()} == {
        number: {0, 1} for number in range(3)
    }
    assert "lost: 3 steps and" in result.stderr and "the ranks were at step 7" in result.stderr


def start_job(folder: Path, text: str, *options: str) -> subprocess.Popen[str]:
    command = launch_command(write_script(folder, HEAD + text), 3, options=options)
    return subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        env=fresh_environment(),
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # nohup would have it ignored
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_launcher_ends_the_job_for_good(tmp_path, number):
    job = start_job(tmp_path, "sys.exit(1) if number == 0 else time.sleep(600)", "--max-restarts", "9")
    wait_until(lambda: rounds_in(tmp_path).get(1) == {0, 1, 2}, "the second round")
    job.send_signal(number)
    _, errors = job.communicate(timeout=LIMIT_S)
    assert job.returncode == 128 + number
    assert f"ended all ranks by {number.name}" in errors and "restart 2" not in errors
    assert_nothing_left(tmp_path)
    assert set(rounds_in(tmp_path)) == {0, 1}


def test_a_signal_between_rounds_ends_the_job(tmp_path):
    job = start_job(tmp_path, "sys.exit(1)", "--max-restarts", "9")
    assert job.stderr
    assert any("restart 4 of 9 in 4 s" in line for line in job.stderr), "no such pause"
    job.send_signal(signal.SIGTERM)
    _, errors = job.communicate(timeout=LIMIT_S)
    assert job.returncode == 143 and "no restart, by SIGTERM" in errors
    assert set(rounds_in(tmp_path)) == {0, 1, 2, 3}


def test_nothing_restarts_after_the_launcher_was_killed(tmp_path):
    job = start_job(tmp_path, "sys.exit(1) if number == 0 else time.sleep(600)", "--max-restarts", "9")
    wait_until(lambda: rounds_in(tmp_path).get(1) == {0, 1, 2}, "the second round")
    job.kill()
    job.communicate(timeout=LIMIT_S)
    assert_nothing_left(tmp_path)
    world = (tmp_path / "round-1-0").read_text()
    wait_until(lambda: not list(Path("/dev/shm").glob(f"*{world}*")), "the removal of the shared files")
    assert set(rounds_in(tmp_path)) == {0, 1}


def test_a_job_goes_on_without_a_rank_that_fails_at_the_start(tmp_path):
    text = "print(size)\nsys.exit(4) if size == 3 and rank == 1 else time.sleep(0.2)"
    result = run_restarting(tmp_path, text, "--max-restarts", "5", "--min-ranks", "2")
    assert result.returncode == 0, result.stderr
    assert rounds_in(tmp_path) == {0: {0, 1, 2}, 1: {0, 1, 2}, 2: {0, 1}}
    assert "with 2 ranks, as rank 1 failed twice running before its first step" in result.stderr


STEPS = """
import numpy as np
from singa_lite import opt
sgd = opt.DistOpt()
for step in range(7):
    sgd.all_reduce(np.ones(3, np.float32))
    sgd.step()
"""
FAILS = {  # of itself, before its first step
    "thread": "t = threading.Thread(target=open, args=('/gone',), name='loader'); t.start(); t.join()",
    "CommError": "raise CommError('my server does not answer')",
    "text": "raise RuntimeError('the download was aborted: no network')",
    "output": "print('INFO: the upload was aborted: again', file=sys.stderr); os._exit(5)",
}


@slow_but_first("way", FAILS)
def test_a_rank_that_fails_of_itself_is_left_out_whatever_it_prints(tmp_path, way):
    text = "import threading\nfrom singa_lite.errors import CommError\n"
    text += f"if rank == 1 and size == 3:\n    {FAILS[way]}\n"
    options = ["--timeout-s", "20", "--max-restarts", "2", "--min-ranks", "2"]
    result = run_restarting(tmp_path, text + STEPS, *options)
    assert result.returncode == 0, result.stderr
    assert "with 2 ranks, as rank 1 failed twice running" in result.stderr


# the others wait for rank 0, in vain
HANGS = "if number < 2 and rank == 0:\n    time.sleep(600)\n"


@pytest.mark.parametrize(
    "delay_s", [0, 1]
)  # 1: rank 2 does not wait for its 2 s but learns that rank 1 has ended
def test_no_rank_is_left_out_for_one_that_hangs_before_its_first_step(tmp_path, delay_s):
    late = f"if rank == 2:\n    time.sleep({delay_s})\n"
    options = ["--timeout-s", "2", "--max-restarts", "2", "--min-ranks", "1"]
    result = run_restarting(tmp_path, late + HANGS + STEPS, *options)
    assert result.returncode == 0, result.stderr
    assert rounds_in(tmp_path) == {number: {0, 1, 2} for number in range(3)}
    assert result.stderr.count("with 3 ranks") == 2


UNKNOWN_CAUSES = {  # an error that all ranks get, and one that a script has made of another rank's end
    "NaN": """
import numpy as np
from singa_lite import autograd, opt, tensor
x = tensor.from_numpy(np.full(3, np.nan if rank == 1 and number < 2 else 1, np.float32))
w = tensor.Tensor((3,), requires_grad=True, stores_grad=True, name="w")
autograd.training = True
sgd = opt.DistOpt(opt.SGD(0.1), check_finite="raise")
for step in range(7):
    sgd(autograd.reduce_sum(autograd.mul(w, x), None, 0))
""",
    "wrapped": f"""
if rank == 1 and number < 2:
    os._exit(0)
try:
    exec({STEPS!r})
except Exception as error:
    raise RuntimeError("training failed") from error
""",
}


@slow_but_first("cause", UNKNOWN_CAUSES)
def test_no_rank_is_left_out_where_the_error_does_not_say_which(tmp_path, cause):
    options = ["--timeout-s", "20", "--max-restarts", "2", "--min-ranks", "1"]
    result = run_restarting(tmp_path, UNKNOWN_CAUSES[cause], *options)
    assert result.returncode == 0, result.stderr
    assert rounds_in(tmp_path) == {number: {0, 1, 2} for number in range(3)}


def test_a_job_goes_on_without_a_rank_that_cannot_start(tmp_path):
    command = launch_command(
        write_script(tmp_path, HEAD + "print(size)"), 3, options=["--max-restarts", "1", "--min-ranks", "2"]
    )
    limited = """
import os, sys
from singa_lite import cli
from singa_lite.launch import one_host
start = one_host._start
def some(command, environ):
    if environ["SINGA_LITE_RANK"] == "2":
        raise OSError(11, "no")
    return start(command, environ)
one_host._start = some
sys.exit(cli.main())
"""
    at = command.index("-m")
    result = run_command([*command[:at], "-c", limited, *command[at + 2 :]])
    assert result.returncode == 0, result.stderr
    # the first two of three may have come so far before the third could not start
    assert sorted(set(result.stdout.splitlines()) - {"[0] 3", "[1] 3"}) == ["[0] 2", "[1] 2"]
    assert "cannot start rank 2 of 3 processes" in result.stderr and "as rank 2 cannot start" in result.stderr
    assert_nothing_left(tmp_path)


def test_servers_start_again_too(tmp_path):
    text = "print(rank)\nif number == 0:\n    sys.exit(6) if rank == 2 else time.sleep(600)"
    result = run_restarting(tmp_path, text, "-s", "1", "--max-restarts", "1", size=2)
    assert result.returncode == 0, result.stderr
    assert "server 0 failed first (exit code 6)" in result.stderr
    assert rounds_in(tmp_path) == {0: {0, 1, 2}, 1: {0, 1, 2}}
    assert_nothing_left(tmp_path)


@pytest.mark.parametrize(
    "options", [[], ["--max-restarts", "1", "--checkpoint", "saved"]], ids=["script", "folder"]
)
def test_a_current_folder_that_is_gone_is_named(tmp_path, options):
    (tmp_path / "gone").mkdir()
    script = write_script(tmp_path, "print(1)") if options else "train.py"
    arguments = ["run", "-n", "2", *options, str(script)]
    text = f"import os, sys; os.chdir({str(tmp_path / 'gone')!r}); os.rmdir({str(tmp_path / 'gone')!r})\n"
    text += f"from singa_lite import cli; sys.exit(cli.main({arguments!r}))"
    result = run_command([sys.executable, "-c", text])
    assert result.returncode == 1 and "singa-lite run: the current folder is gone: " in result.stderr


# ---- several hosts -----------------------------------------------------------------------------------


def run_on_hosts(folder: Path, text: str, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "hosts").write_text("d2\nd1:2\n")
    given = ["-H", str(folder / "hosts"), "--rsh", shlex.quote(str(write_agent(folder))), *options]
    return run_command(launch_command(write_script(folder, HEAD + text), 3, options=given))


@needs_mpi
def test_a_job_of_several_hosts_starts_again(tmp_path):
    text = (
        STEPS
        + "if number < 2 and rank == 1 + number:\n    os.kill(os.getpid(), 9) if number else sys.exit(5)"
    )
    save(tmp_path / "saved", 4, 0.0)
    result = run_on_hosts(tmp_path, text, "--max-restarts", "3", "--checkpoint", str(tmp_path / "saved"))
    assert result.returncode == 0, result.stderr
    assert rounds_in(tmp_path) == {number: {0, 1, 2} for number in range(3)}
    assert len(re.findall(r"lost: 3 steps and .* the ranks were at step 7", result.stderr)) == 2
    assert [path.name for path in (tmp_path / "saved").iterdir()] == ["step-00000004"]
    assert_nothing_left(tmp_path)


@needs_mpi
@needs_names
def test_a_job_goes_on_without_the_host_whose_rank_fails_at_the_start(tmp_path):
    text = "import socket\nprint(socket.gethostname(), flush=True)\n"
    text += "if socket.gethostname() == 'd2':\n    sys.exit(4)\n" + STEPS
    options = ["--max-restarts", "3", "--min-ranks", "2", "--checkpoint", str(tmp_path / "saved")]
    result = run_on_hosts(tmp_path, text, *options)
    assert result.returncode == 0, result.stderr
    assert rounds_in(tmp_path) == {0: {0, 1, 2}, 1: {0, 1, 2}, 2: {0, 1}}
    assert "with 2 ranks, as rank 0 failed twice running before its first step" in result.stderr
    assert sorted(result.stdout.splitlines()[-2:]) == ["[w0] d1", "[w1] d1"]
    assert_nothing_left(tmp_path)


@needs_mpi
@pytest.mark.slow  # as ranks of one host, above
def test_no_host_loses_a_slot_for_one_whose_rank_hangs_before_its_first_step(tmp_path):
    options = [
        "--timeout-s",
        "3",
        "--max-restarts",
        "2",
        "--min-ranks",
        "1",
        "--checkpoint",
        str(tmp_path / "saved"),
    ]
    result = run_on_hosts(tmp_path, HANGS + STEPS, *options)
    assert result.returncode == 0, result.stderr
    assert rounds_in(tmp_path) == {number: {0, 1, 2} for number in range(3)}
    assert result.stderr.count("with 3 ranks") == 2
    assert_nothing_left(tmp_path)


@needs_mpi
@pytest.mark.slow
def test_a_host_that_loses_a_slot_keeps_the_threads_of_a_rank(tmp_path):
    text = "print(os.environ.get('OMP_NUM_THREADS'), flush=True)\n"
    text += "if size == 3 and rank == 2:\n    sys.exit(4)\n" + STEPS
    options = ["--max-restarts", "3", "--min-ranks", "2", "--checkpoint", str(tmp_path / "saved")]
    result = run_on_hosts(tmp_path, text, *options)
    assert result.returncode == 0, result.stderr
    assert "with 2 ranks, as rank 2 failed twice running" in result.stderr
    shared = str(threads_per_rank(2))
    # d1 had two ranks at first
    assert sorted(result.stdout.splitlines()[-2:]) == ["[w0] None", f"[w1] {shared}"]


@needs_mpi
@pytest.mark.slow  # as ranks of one host, above
@pytest.mark.parametrize("failure", ["raise ValueError('no')", FAILS["thread"]], ids=["exception", "thread"])
def test_a_job_goes_on_without_the_host_whose_rank_raises_after_all_have_joined(tmp_path, failure):
    before, loop, after = STEPS.partition("for step")
    text = f"import threading\n{before}if size == 3 and rank == 1:\n    {failure}\n{loop}{after}"
    options = ["--max-restarts", "3", "--min-ranks", "2", "--checkpoint", str(tmp_path / "saved")]
    result = run_on_hosts(tmp_path, text, *options)
    assert result.returncode == 0, result.stderr
    assert rounds_in(tmp_path) == {0: {0, 1, 2}, 1: {0, 1, 2}, 2: {0, 1}}
    assert "with 2 ranks, as rank 1 failed twice running before its first step" in result.stderr
    assert_nothing_left(tmp_path)
