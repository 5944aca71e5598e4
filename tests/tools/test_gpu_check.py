# SPDX-License-Identifier: Apache-2.0
"""The driver of `make gpu-check`: whatever its parts do, both reports are there and say so. No GPU is used."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import sysconfig
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import rows
from tests.limits import LIMIT_S
from tools.gpu_check import build, check, kernels, run_tests

ROOT = Path(__file__).parents[2]
HEAD = f"import sys; sys.path.insert(0, {str(ROOT)!r})\nfrom benchmarks.gpu.rows import report\n"
HANGS = "import subprocess, time\nsubprocess.Popen(['sleep', '{seconds}'])\ntime.sleep(100)\n"


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str, str], str]:
    """Writes a part that can report rows; gives its path."""

    def write(name: str, body: str) -> str:
        path = tmp_path / f"{name}.py"
        path.write_text(HEAD + body)
        return str(path)

    return write


class Clock:
    """The clock of check.py, by which seconds pass only when a test says so."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self._passes_s: dict[str, float] = {}  # row -> seconds that pass once a part has reported it
        self._pending_s = 0.0
        self._read = check.read_rows

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        time.sleep(0.01)
        self.now_s += self._pending_s
        self._pending_s = 0.0

    def pass_after(self, row: str, seconds: float) -> None:
        self._passes_s[row] = seconds

    def read_rows(self, path: Path) -> list[dict[str, Any]]:
        found = self._read(path)
        self._pending_s += sum(self._passes_s.pop(entry["what"], 0.0) for entry in found)
        return found


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(check, "time", made)
    monkeypatch.setattr(check, "read_rows", made.read_rows)
    return made


def outcomes_in(out: Path) -> dict[str, dict[str, Any]]:
    return {part["part"]: part for part in json.loads((out / "gpu-check.json").read_text())["parts"]}


def test_crashing_hanging_and_unreached_parts_leave_the_rows_of_the_others(script, tmp_path, clock):
    clock.pass_after("first", 2)
    child_s = f"4321.{os.getpid()}"  # tells it from those of other runs
    parts = {
        "machine": ([script("machine", "report('GPU', 'none at all')")], 20),
        "good": (
            [script("good", "report('a ratio', 0.4, 0.5)\nreport('another | one', 1.25, 1.0, 'slow')")],
            20,
        ),
        "crash": ([script("crash", "report('before', 1)\nprint('going down')\nimport os; os._exit(9)")], 20),
        "hang": ([script("hang", "report('first', 2)\n" + HANGS.format(seconds=child_s))], 1.5),
        "after": ([script("after", "report('last', None, 3.0, 'came to nothing')\nsys.exit(1)")], 20),
    }
    out = tmp_path / "out"
    outcomes = check.check(parts, 60, out)
    found = outcomes_in(out)
    assert [part["result"] for part in found.values()] == [
        *("passed", "passed", "failed with exit code 9", "cut off after 2 s", "failed with exit code 1"),
    ]
    assert [row["figure"] for part in found.values() for row in part["rows"]] == [
        *("none at all", 0.4, 1.25, 1, 2, None),
    ]
    assert [check.missed(outcome) for outcome in outcomes] == [False, True, False, False, True]
    assert found["crash"]["tail"][-1] == "going down"
    text = (out / "gpu-check.md").read_text()
    assert "- GPU: none at all" in text
    assert "| a ratio | 0.4 | <= 0.5 | met |  |" in text
    assert "| another \\| one | 1.25 | <= 1 | **missed** | slow |" in text
    assert "| last | None | <= 3 | **missed** | came to nothing |" in text
    assert "| hang | cut off after 2 s | 2 |" in text
    assert "going down" in (out / "gpu-check.log").read_text()
    wait_for(lambda: not is_running("sleep", child_s))  # what a part started ends with it


def test_parts_beyond_the_budget_are_named_and_not_run(script, tmp_path, clock):
    parts = {
        "long": ([script("long", "report('begun', 1)\nimport time; time.sleep(100)")], 100),
        "late": ([script("late", "report('never', 1)")], 100),
    }
    clock.pass_after("begun", 6)
    check.check(parts, 6, tmp_path / "out")
    found = outcomes_in(tmp_path / "out")
    assert found["long"]["result"] == "cut off after 6 s"
    assert found["late"]["result"] == "not run: no time left" and not found["late"]["rows"]
    assert "| late | not run: no time left | 0 |" in (tmp_path / "out" / "gpu-check.md").read_text()


def test_parts_that_all_hang_take_no_longer_than_the_budget(script, tmp_path, monkeypatch, clock):
    """Each part gets what is left of the budget, not its own deadline."""
    monkeypatch.setattr(check, "LEAST_S", 1)
    given = []

    def hang_for_half_a_second(*call: Any) -> None:
        given.append(call[3])
        clock.now_s += 0.5

    monkeypatch.setattr(check, "run_part", hang_for_half_a_second)
    parts = {str(number): ([script("hang", "")], 100.0) for number in range(10)}
    check.check(parts, 3.2, tmp_path / "out")
    assert len(given) == 5 and given == sorted(given, reverse=True) and all(0 < left <= 3.2 for left in given)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_run_that_is_ended_has_written_what_was_found(script, tmp_path, number):
    child_s = f"{1234 + number}.{os.getpid()}"
    slow = script("slow", "report('early', 7)\n" + HANGS.format(seconds=child_s))
    driver = script("driver", f"""
import pathlib, signal
from tools.gpu_check import check
signal.signal(signal.SIGTERM, check.stop)
parts = {{'slow': ([{slow!r}], 90), 'next': ([{slow!r}], 90)}}
check.check(parts, 180, pathlib.Path({str(tmp_path)!r}, 'out'))
""")  # fmt: skip
    job = subprocess.Popen([sys.executable, driver], start_new_session=True)
    try:
        wait_for(lambda: outcomes_in(tmp_path / "out")["slow"]["rows"])
        os.kill(job.pid, number)
        assert job.wait(LIMIT_S) == (-number if number == signal.SIGKILL else 128 + number)
        found = outcomes_in(tmp_path / "out")["slow"]
        assert [row["figure"] for row in found["rows"]] == [7]
        was_told = number == signal.SIGTERM
        assert found["result"] == ("cut off: check.py was ended" if was_told else "running")
        wait_for(lambda: is_running(f"{slow}") is not was_told)
        assert outcomes_in(tmp_path / "out")["next"]["result"] == "not run: no time left"
    finally:
        for process in running(str(slow)) + running("sleep", child_s):
            os.kill(process, signal.SIGKILL)


@pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning")
def test_a_part_that_cannot_be_ended_costs_its_deadline_and_a_little(script, tmp_path, monkeypatch, clock):
    """As a process that hangs in the driver: no signal ends it."""
    monkeypatch.setattr(check, "END_S", 0.5)
    parts = {
        "stuck": ([script("stuck", "report('early', 1)\nimport time; time.sleep(100)")], 2),
        "next": ([script("next", "report('late', 2)")], 20),
    }
    kept = []
    with monkeypatch.context() as patches:
        patches.setattr(check.os, "killpg", lambda group, number: kept.append(group))
        clock.pass_after("early", 2)
        check.check(parts, 60, tmp_path / "out")
    os.killpg(kept[0], signal.SIGKILL)
    wait_for(lambda: os.waitpid(kept[0], os.WNOHANG)[0])
    found = outcomes_in(tmp_path / "out")
    assert [part["result"] for part in found.values()] == ["cut off after 2 s", "passed"]
    assert [row["figure"] for part in found.values() for row in part["rows"]] == [1, 2]


def test_the_log_keeps_the_first_and_last_of_a_part_that_prints_without_end(
    script, tmp_path, monkeypatch, clock
):
    monkeypatch.setattr(check, "MOST_OUTPUT", 1000)
    body = "print('first')\nfor i in range(9999): print('again', i)\nprint('last'); sys.exit(1)"
    parts = {
        "loud": ([script("loud", body)], 20),
        "next": ([script("next", "print('of the next')")], 20),
    }
    check.check(parts, 60, tmp_path / "out")
    lines = (tmp_path / "out" / "gpu-check.log").read_text().splitlines()
    assert sum(map(len, lines)) < 1300 and sum("characters are left out" in line for line in lines) == 1
    assert lines[:2] == ["--- loud", "first"]
    ends = lines.index("last")
    assert lines[ends + 1].startswith("--- loud: failed") and lines[ends + 2] == "--- next"
    assert lines[ends + 3] == "of the next" and lines[ends + 4].startswith("--- next: passed")
    assert outcomes_in(tmp_path / "out")["loud"]["tail"][-1] == "last"


def test_every_own_kernel_runs_by_itself():
    command = [sys.executable, "-m", "tests.standin", sys.executable, "-m", "tools.gpu_check.kernels"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0 and "all met" in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
def test_a_killed_rank_is_told_to_the_other_in_time():
    command = [sys.executable, "-m", "tests.standin", sys.executable, "-m", "tools.gpu_check.faults"]
    command += ["--faults", "kill", "--modes", "graph", "--jobs"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0 and " CommError in 15 s met" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize(("tool", "asks_for_api_errors"), [("memcheck", False), ("racecheck", True)])
def test_what_cupy_asks_the_driver_in_vain_is_no_finding_of_memcheck(
    tmp_path, monkeypatch, tool, asks_for_api_errors
):
    sanitizer = tmp_path / "compute-sanitizer"
    sanitizer.write_text(
        f'#!/bin/sh\necho "$@" > {tmp_path}/arguments\necho "========= ERROR SUMMARY: 0 errors"\n'
    )
    sanitizer.chmod(0o755)
    monkeypatch.setattr(kernels, "find_tool", lambda name: str(sanitizer))
    assert kernels.under(tool) == 0
    given = (tmp_path / "arguments").read_text()
    assert f"--tool {tool}" in given and ("--report-api-errors no" not in given) is asks_for_api_errors


def test_a_machine_without_a_gpu_is_told_so_at_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(check, "no_gpu", lambda: "no libcuda.so.1")
    monkeypatch.setattr(check, "PARTS", {"machine": (["tools.gpu_check.machine"], 60)})
    monkeypatch.setattr(sys, "argv", ["check.py", "--out", str(tmp_path / "out")])
    before = {number: signal.getsignal(number) for number in check.ENDS}
    try:
        assert check.main() == 2
        assert "no NVIDIA GPU can be used here (no libcuda.so.1)" in capsys.readouterr().err
        assert not (tmp_path / "out").exists()
        sys.argv += ["--parts", "machine"]
        assert check.main() == 0 and "machine" in outcomes_in(tmp_path / "out")
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_the_first_of_several_signals_counts():
    before = {number: signal.getsignal(number) for number in check.ENDS}
    try:
        with pytest.raises(SystemExit):
            check.stop(signal.SIGTERM, None)
        assert {signal.getsignal(number) for number in check.ENDS} == {signal.SIG_IGN}
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_row_that_is_half_written_waits(tmp_path):
    path = tmp_path / "rows"
    path.write_text('{"what": 1}\n{"what": ')
    assert check.read_rows(path) == [{"what": 1}]


def test_every_part_is_a_script_with_a_deadline_and_the_budget_is_below_8_minutes():
    for command, deadline_s in check.PARTS.values():
        assert importlib.util.find_spec(command[0])
        assert 0 < deadline_s <= 150
    assert check.BUDGET_S < 480


def test_a_file_of_tests_that_dies_tells_what_passed_failed_and_where_it_died(monkeypatch, tmp_path):
    monkeypatch.setenv("GPU_CHECK_ROWS", str(rows := tmp_path / "rows"))
    path = tmp_path / "test_them.py"
    path.write_text(
        "import os, pytest\n"
        "def test_good(): pass\n"
        "def test_bad(): assert 1 == 2, 'not at all'\n"
        "@pytest.mark.skip\ndef test_absent(): pass\n"
        "def test_deadly(): os._exit(7)\n"
    )
    assert not run_tests.run_file(str(path), "")
    found = [json.loads(line) for line in rows.read_text().splitlines()]
    assert (found[0]["figure"], found[0]["met"]) == (1, False)
    assert found[0]["note"] == "1 passed, 1 failed, 1 skipped"
    assert "exit code 7 in" in found[1]["note"] and found[1]["note"].endswith("test_deadly")
    assert found[2]["note"].startswith("test_bad: AssertionError: not at all")
    path.write_text("def test_good(): pass\n")
    assert run_tests.run_file(str(path), "")


def test_the_tree_that_is_tested_has_the_files_that_tests_of_cudnn_compile(monkeypatch, tmp_path):
    monkeypatch.setattr(build, "TREE", tmp_path / "tree")
    (tmp_path / "tree").mkdir()
    build.copy_beside()
    text = (ROOT / "tests" / "backend" / "test_cudnn.py").read_text()
    named = re.findall(r'"(native/[\w/.]+)"', text)
    assert named and all((tmp_path / "tree" / name).exists() for name in named)


def test_steps_take_turns_and_the_clock_waits_for_the_device(monkeypatch):
    pending, order = [], []

    def step(name, seconds):
        return lambda: (order.append(name), pending.append(seconds))

    def synchronize():
        time.sleep(sum(pending))
        pending.clear()

    monkeypatch.setattr(rows, "TURN_S", 0.01)
    found = rows.medians_ms({"slow": step("slow", 0.02), "fast": step("fast", 0.002)}, synchronize, 3)
    assert found["slow"] >= 20 and found["fast"] >= 2  # ms
    turns = [name for number, name in enumerate(order[4:]) if [*order[4:]][number - 1 : number] != [name]]
    assert turns == ["slow", "fast"] * 3


def test_a_part_that_cannot_run_here_is_skipped_and_neither_passed_nor_failed(
    script, tmp_path, monkeypatch, clock
):
    text = f"report('ranks', None, note='no second GPU'); sys.exit({rows.SKIPPED})"
    monkeypatch.setattr(check, "PARTS", {"ranks": ([script("ranks", text)], 20)})
    monkeypatch.setattr(sys, "argv", ["check.py", "--parts", "ranks", "--out", str(tmp_path / "out")])
    monkeypatch.setattr(check, "ENDS", ())
    assert check.main() == 0
    assert outcomes_in(tmp_path / "out")["ranks"]["result"] == "skipped"
    assert "| ranks | skipped |" in (tmp_path / "out" / "gpu-check.md").read_text()


@pytest.mark.parametrize(
    ("options", "expected_s"),
    [
        ((), 20),
        (("--budget", str(3 * check.BUDGET_S)), 60),
        (("--budget", "60"), 20),
        (("--deadline-factor", "2"), 40),
    ],
)
def test_more_time_in_all_is_more_for_each_part(options, expected_s, tmp_path, monkeypatch):
    given = {}
    monkeypatch.setattr(check, "PARTS", {"smoke": (["smoke"], 20.0)})
    monkeypatch.setattr(check, "check", lambda parts, budget, out: given.update(parts) or [])
    monkeypatch.setattr(check, "ENDS", ())
    monkeypatch.setattr(sys, "argv", ["check.py", "--parts", "smoke", "--out", str(tmp_path), *options])
    (tmp_path / "gpu-check.md").touch()
    assert check.main() == 0 and given["smoke"][1] == pytest.approx(expected_s)


def test_parts_import_what_carried_wheels_hold(tmp_path, monkeypatch):
    wheel = tmp_path / "wheels" / "carried_thing-1.0-py3-none-any.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("carried_thing.py", "VALUE = 7\n")
        info = "carried_thing-1.0.dist-info"
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: carried-thing\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setattr(check, "SITE", tmp_path / "site")
    check.install(wheel.parent)
    code = "import carried_thing; print(carried_thing.VALUE)"
    environment = check.environment(tmp_path / "rows")
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=False)
    assert done.stdout == b"7\n", done.stderr
    with pytest.raises(SystemExit, match="no wheel in"):
        check.install(tmp_path)


def test_carried_modules_are_taken_where_building_fails(tmp_path, monkeypatch):
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    (tmp_path / "source" / "singa_lite").mkdir(parents=True)
    (tmp_path / "source" / "singa_lite" / "device.py").touch()
    (tmp_path / "modules").mkdir()
    monkeypatch.setattr(build, "TREE", tmp_path / "tree")
    monkeypatch.setenv("GPU_CHECK_MODULES", str(tmp_path / "modules"))
    assert not build.take_modules(tmp_path / "source")  # there is none
    (tmp_path / "modules" / "_nccl.cpython-39-another.so").touch()
    assert not build.take_modules(tmp_path / "source")
    (tmp_path / "modules" / f"_nccl{suffix}").touch()
    assert build.take_modules(tmp_path / "source")
    assert {path.name for path in (tmp_path / "tree" / "singa_lite").iterdir()} == {
        "device.py",
        f"_nccl{suffix}",
    }


def test_the_commit_is_told_where_there_is_no_git(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("GPU_CHECK_COMMIT", "0123abcd")
    check.commit.cache_clear()
    try:
        assert check.commit() == "0123abcd"
    finally:
        check.commit.cache_clear()


# ---- processes ---------------------------------------------------------------------------------------


def running(*words: str) -> list[int]:
    """Processes whose command line has all these words."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if set(words) <= set(command) and int(path.parent.name) != os.getpid():
            found.append(int(path.parent.name))
    return found


def is_running(*words: str) -> bool:
    return bool(running(*words))


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        try:
            if condition():
                return
        except OSError:
            pass
        time.sleep(0.1)
    pytest.fail("it did not come to pass")
