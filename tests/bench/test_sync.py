# SPDX-License-Identifier: Apache-2.0
"""`singa-lite bench sync`: a few steps of a tiny model on real digits, in processes of their own."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from singa_lite import cli, device, tensor
from singa_lite.bench import sync, train
from singa_lite.bench.datasets import data_set_of
from singa_lite.bench.models import make_model
from singa_lite.bench.page import COLOURS, HEIGHT, LEFT, WIDTH, page
from singa_lite.bench.report import rows_of, table, when_reached
from singa_lite.bench.runs import Provenance, Runs, Settings, machine_facts
from singa_lite.bench.train import split_threshold
from singa_lite.data import load_mnist
from singa_lite.data.mnist import IDX_SHA256, to_idx
from singa_lite.errors import OptionError
from singa_lite.files import sealed, unsealed
from singa_lite.opt.dist import THRESHOLD
from tests.bench.commands import without_pictures
from tests.comm.processes import assert_nothing_left, at_once, fresh_environment, wait_until
from tests.limits import LIMIT_S
from tests.test_example_models import load

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="several ranks need Linux")

FIXTURE = Path(__file__).parents[1] / "fixtures" / "mnist"
NUM_TRAIN, NUM_TEST = 60, 20
SIZE = 784 * 6 + 6 + 6 * 10 + 10  # parameters of the tiny model
# its steps end or fail as files in its folder say
TINY = """
import os
from pathlib import Path
from singa_lite import layer, model

FOLDER = Path(__file__).parent

class Tiny(model.Model):
    def __init__(self):
        super().__init__()
        self.flatten, self.hidden, self.linear = layer.Flatten(), layer.Linear(6), layer.Linear(10)
        self.loss = layer.SoftMaxCrossEntropy()

    def forward(self, x):
        return self.linear(self.hidden(self.flatten(x)))

    def train_one_batch(self, x, y, dist_option="fp32"):
        if (FOLDER / f"fail-{dist_option}").exists():
            raise RuntimeError("told to fail")
        if (FOLDER / f"hang-{dist_option}").exists():
            import time
            (FOLDER / f"hangs-{os.getpid()}").touch()
            time.sleep(600)
        out = self.forward(x)
        loss = self.loss(out, y)
        self.optimizer(loss, dist_option=dist_option)
        return out, loss

def tiny():
    return Tiny()

def no_model():
    return 1
"""


@pytest.fixture(scope="module")
def digits(tmp_path_factory) -> Path:
    """A folder of a few of the fixture's digits."""
    folder = tmp_path_factory.mktemp("digits")
    parts = zip(IDX_SHA256, load_mnist(FIXTURE), (NUM_TRAIN, NUM_TRAIN, NUM_TEST, NUM_TEST), strict=True)
    for name, array, count in parts:
        (folder / name).write_bytes(to_idx(array[:count]))
    without_pictures(folder)  # they are drawn in test_sync_settings.py
    return folder


def run(digits: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command, on the tiny model, whose file is in ``folder`` and whose runs are in folder/out."""
    return subprocess.run(
        command(folder, *arguments), capture_output=True, text=True, timeout=LIMIT_S, env=environment(digits)
    )  # fmt: skip


def command(folder: Path, *arguments: str) -> list[str]:
    if not (folder / "tiny.py").exists():
        (folder / "tiny.py").write_text(TINY)
    given = ["--model", f"{folder / 'tiny.py'}:tiny", "--batch-size", "10", "--out", str(folder / "out")]
    return [sys.executable, "-m", "singa_lite", "bench", "sync", *given, *arguments]


def environment(digits: Path) -> dict[str, str]:
    """That of a command without matplotlib, which takes half of the time of so short a one."""
    return fresh_environment(MNIST_DIR=str(digits), SINGA_LITE_TIMEOUT_S=str(LIMIT_S), PYTHONPATH=str(digits))


def runs_in(folder: Path) -> dict[tuple[str, int], dict]:
    """(option, seed) -> the JSON of that run."""
    found = [json.loads(path.read_text()) for path in (folder / "out").glob("run-*.json")]
    return {(each["settings"]["option"], each["settings"]["seed"]): each for each in found}


@pytest.fixture(scope="module")
def compared(digits, tmp_path_factory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """Two options on two seeds, 2 ranks: 6 steps each."""
    folder = tmp_path_factory.mktemp("compared")
    options = ["--options", "fp32,sparseTopK:0.02", "--seeds", "0,1", "--epochs", "2"]
    done = run(digits, folder, *options, "--evaluate-every", "2", "--target", "0.05")
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, done


def sparse_payload(n: int, density: float) -> int:
    """K float32 values, and their places as Elias and Fano write them in 32-bit words."""
    k = math.ceil(density * n)
    low = int(math.log2(n / k))
    return 4 * (k + math.ceil(k * low / 32) + math.ceil((k + ((n - 1) >> low) + 1) / 32))


# ---- numbers -----------------------------------------------------------------------------------------


def test_bytes_of_a_run_equal_the_closed_formulas_on_two_ranks(compared):
    runs = runs_in(compared[0])
    assert len(runs) == 4
    for (option, _), run_ in runs.items():
        of_step = 4 * SIZE if option == "fp32" else sparse_payload(SIZE, 0.02)
        result = run_["result"]
        assert result["steps"] == 2 * 3
        assert result["bytes_sent"] == [6 * of_step] * 2
        assert [epoch["bytes_sent"] for epoch in result["epochs"]] == [3 * of_step * 2] * 2
        assert [each["bytes_sent"] for each in result["evaluations"]] == [n * of_step * 2 for n in (2, 4, 6)]


def test_bytes_equal_the_closed_formulas_on_three_ranks(digits, tmp_path):
    done = run(digits, tmp_path, "--options", "fp32,sparseTopK:0.02", "--ranks", "3", "--epochs", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    runs = runs_in(tmp_path)
    assert runs["fp32", 0]["result"]["bytes_sent"] == [2 * math.ceil(2 * 2 * 4 * SIZE / 3)] * 3
    assert runs["sparseTopK:0.02", 0]["result"]["bytes_sent"] == [2 * 2 * sparse_payload(SIZE, 0.02)] * 3
    table = json.loads((tmp_path / "out" / "table.json").read_text())
    assert table["rows"][1]["step_bytes"]["mean"] == 2 * sparse_payload(SIZE, 0.02)


def test_the_table_says_what_the_files_of_the_runs_say(compared):
    folder, done = compared
    runs = runs_in(folder)
    rows = {
        cells[0]: cells[1:]
        for cells in (
            line.strip("| ").split(" | ") for line in done.stdout.splitlines() if line.startswith("|")
        )
    }
    assert list(rows) == ["option", "---", "fp32", "sparseTopK:0.02"]
    columns = rows["option"]
    fp32_bytes = statistics.mean(sum(runs["fp32", seed]["result"]["bytes_sent"]) for seed in (0, 1))
    for option in ("fp32", "sparseTopK:0.02"):
        results = [runs[option, seed]["result"] for seed in (0, 1)]
        cells = dict(zip(columns, rows[option], strict=True))
        sent = sum(results[0]["bytes_sent"])
        assert cells["accuracy %"] == spread([100 * each["accuracy"] for each in results], ".2f")
        assert cells["loss"] == spread([each["epochs"][-1]["loss"] for each in results], ".4f")
        assert cells["step ms"] == spread([each["step_ms"] for each in results], ".1f")
        assert cells["wait ms"] == spread([each["parts_ms"]["wait"] for each in results], ".2f")
        for part in ("compute", "pack", "compress", "wire", "decompress", "update"):
            assert cells[f"{part} ms"] == spread([each["parts_ms"][part] for each in results], ".2f")
            assert part == "pack" or min(each["parts_ms"][part] for each in results) > 0
        overlaps = [100 * each["parts_ms"]["hidden"] / each["parts_ms"]["wire"] for each in results]
        assert cells["overlap %"] == spread(overlaps, ".0f")
        assert cells["bytes sent a step and rank"] == f"{sent / 6 / 2:,.0f}"
        assert cells["MB sent by all in the run"] == f"{sent / 1e6:,.2f}"
        assert cells["fp32's / its"] == f"{fp32_bytes / sent:.1f}"
        reached = [when_reached(each, 0.05) for each in results]
        assert None not in reached  # 1 of 20 digits
        assert cells["s to 5 %"] == spread([each["seconds"] for each in reached], ".1f")
        assert cells["steps to it"] == spread([each["step"] for each in reached], ".1f")


def spread(values, form):
    mean, lowest, highest = (format(value, form) for value in (statistics.mean(values), *extremes(values)))
    return mean if lowest == highest else f"{mean} ({lowest} to {highest})"


def extremes(values):
    return min(values), max(values)


def test_seeds_give_other_runs_and_options_other_losses(compared):
    losses = {run_["result"]["loss"] for run_ in runs_in(compared[0]).values()}
    assert len(losses) == 4


def curve(*accuracies):
    return {"evaluations": [{"step": 67 * n, "accuracy": value} for n, value in enumerate(accuracies, 1)]}


@pytest.mark.parametrize(
    ("accuracies", "step"),
    [
        ((0.5, 0.98, 0.979, 0.98, 0.99), 4 * 67),  # one alone does not count
        ((0.98, 0.98, 0.5), 67),  # what comes after does not either
        ((0.5, 0.97, 0.99), None),  # the last one alone
        ((), None),
    ],
)
def test_a_target_is_reached_at_the_first_of_two_evaluations_in_a_row(accuracies, step):
    found = when_reached(curve(*accuracies), 0.98)
    assert (found and found["step"]) == step


def result_of(*accuracies, sent=100):
    evaluations = [
        {"step": 67 * n, "seconds": float(n), "bytes_sent": sent * n, "accuracy": value}
        for n, value in enumerate(accuracies, 1)
    ]
    epoch = {"loss": 1.0, "steps": 5, "bytes_sent": 2 * sent}
    return {
        "accuracy": accuracies[-1], "loss": 1.0, "steps": 10, "train_s": 3.0, "step_ms": 2.0, "parts_ms": {"wait": 1.0},
        "bytes_sent": [sent, 2 * sent], "epochs": [epoch, epoch],
        "evaluations": evaluations,
    }  # fmt: skip


def test_a_target_that_one_seed_misses_is_marked():
    [row] = rows_of({"fp16": [result_of(0.9, 0.9, 0.9), result_of(0.1, 0.9, 0.8)]}, 0.9)
    assert (row.num_runs, row.num_reached, row.fp32_ratio) == (2, 1, None)
    assert row.target_s.mean == 1.0 and row.target_steps.mean == 67 and row.target_bytes.mean == 100


@pytest.mark.parametrize("name", ["fp32", "plain"])
def test_ratios_are_to_the_whole_run_of_fp32_by_any_name_and_place(name):
    rows = rows_of({"fp16": [result_of(0.9, sent=50)], name: [result_of(0.9, sent=200)]}, None)
    assert [row.fp32_ratio for row in rows] == [4.0, 1.0]


def test_an_option_that_sends_nothing_has_no_ratio():
    rows = rows_of({"fp32": [result_of(0.9, sent=0)]}, None)
    assert rows[0].fp32_ratio is None


def test_a_part_that_one_option_does_not_know_leaves_its_cell_empty():
    rows = rows_of({"fp16": [{**result_of(0.9), "parts_ms": {}}], "fp32": [result_of(0.9)]}, None)
    head, _, half, plain = [line.strip("| ").split(" | ") for line in table(rows, None).splitlines()]
    assert len(head) == len(half) == len(plain) and head[-2:] == ["wait ms", "overlap %"]
    assert (half[-2:], plain[-2:]) == (["-", "-"], ["1.00", "-"])
    root = ElementTree.fromstring(page(rows, {}, "", None).removeprefix("<!DOCTYPE html>"))
    assert [[cell.text for cell in line] for line in root.iter("tr")] == [head, half, plain]


def test_the_page_is_whole_by_itself_and_has_the_table(compared):
    folder, done = compared
    text = (folder / "out" / "table.html").read_text()
    assert not re.search(r"<script|https?:|href|src=|url\(|@import", text)
    root = ElementTree.fromstring(text.removeprefix("<!DOCTYPE html>"))
    shown = [[cell.text for cell in line] for line in root.iter("tr")]
    printed = [line.strip("| ").split(" | ") for line in done.stdout.splitlines() if line.startswith("|")]
    assert shown == [printed[0], *printed[2:]]
    assert len(list(root.iter("svg"))) == 3 and len(list(root.iter("polyline"))) == 3 * 4


def points_of(line):
    return [tuple(map(float, pair.split(","))) for pair in line.get("points").split()]


def test_a_chart_shows_every_evaluation_at_its_place():
    results = {"fp16<": [result_of(0.9, 0.99, 1.0)], "fp32": [result_of(0.5)]}
    text = page(rows_of({"fp16": results["fp16<"]}, None), results, "a & b", None)
    root = ElementTree.fromstring(text.removeprefix("<!DOCTYPE html>"))
    # over seconds 1, 2, 3: errors of 10, 1 and none, here 0.01 %; 50 %
    first, other = list(root.iter("polyline"))[:2]
    (x1, y1), (x2, y2), (x3, y3) = points_of(first)
    [(x, y)] = points_of(other)
    assert x == x1 and y < y1 < y2 < y3
    assert (y3 - y2) / (y2 - y1) == pytest.approx(2, abs=0.01)  # 1 to 0.01 % is two powers of ten
    assert (x3 - x1) / (x2 - x1) == pytest.approx(math.log(3) / math.log(2), abs=0.01)
    assert LEFT < x1 < x3 < WIDTH and y3 < HEIGHT
    assert [each.get("stroke") for each in (first, other)] == list(COLOURS[:2])


def test_a_world_of_one_sends_nothing_and_has_a_page():
    results = {"fp32": [result_of(0.9, 0.9, sent=0)]}
    text = page(rows_of(results, 0.5), results, "", 0.5)
    root = ElementTree.fromstring(text.removeprefix("<!DOCTYPE html>"))
    assert [len(points_of(line)) for line in root.iter("polyline")] == [2, 0, 2]


# ---- finished runs -----------------------------------------------------------------------------------


def test_a_finished_run_is_not_repeated_but_half_a_file_is(digits, compared, tmp_path):
    folder = tmp_path
    for path in [compared[0] / "tiny.py", *(compared[0] / "out").glob("run-*.json")]:
        (folder / path.relative_to(compared[0])).parent.mkdir(exist_ok=True)
        (folder / path.relative_to(compared[0])).write_bytes(path.read_bytes())
    options = [
        "--options",
        "fp32,sparseTopK:0.02",
        "--seeds",
        "0,1",
        "--epochs",
        "2",
        "--evaluate-every",
        "2",
    ]
    # the model's path is a setting: that of the first call
    options += ["--model", f"{compared[0] / 'tiny.py'}:tiny"]
    before = {path: path.read_bytes() for path in (folder / "out").glob("run-*.json")}
    half = sorted(before)[0]
    half.write_bytes(before[half][: len(before[half]) // 2])
    done = run(digits, folder, *options, "--target", "0.5")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr.count("finished before") == 3 and done.stderr.count("s of training") == 1
    assert json.loads(half.read_text())["settings"] == json.loads(before.pop(half))["settings"]
    assert {path: path.read_bytes() for path in before} == before
    assert "s to 50 %" in done.stdout


def test_after_a_failed_run_only_what_is_missing_runs(digits, tmp_path):
    options = ["--options", "fp32,fp16", "--epochs", "1"]
    (tmp_path / "fail-fp16").touch()
    done = run(digits, tmp_path, *options)
    assert done.returncode == 1
    assert "told to fail" in done.stdout + done.stderr and "[2/2] seed 0 fp16: failed" in done.stderr
    assert "| option" not in done.stdout and not (tmp_path / "out" / "table.json").exists()
    assert list(runs_in(tmp_path)) == [("fp32", 0)]
    (tmp_path / "fail-fp16").unlink()
    again = run(digits, tmp_path, *options)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "[1/2] seed 0 fp32" in again.stderr and again.stderr.count("finished before") == 1
    assert len(runs_in(tmp_path)) == 2 and "| fp16 |" in again.stdout


def test_a_run_whose_model_was_edited_meanwhile_is_not_kept(digits, tmp_path):
    (tmp_path / "tiny.py").write_text(
        TINY + "\nwith open(__file__, 'a') as file:\n    file.write('# edited')\n"
    )
    done = run(digits, tmp_path, "--options", "fp32", "--epochs", "1")
    assert done.returncode == 2 and "has changed while fp32 was trained" in done.stderr, done.stderr
    assert not runs_in(tmp_path)


def test_the_cores_are_those_that_the_process_may_use(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3})
    assert machine_facts()["cores"] == 1


def test_a_figure_that_is_no_number_is_null_in_json_and_nan_whatever_the_order():
    for losses in ([0.5, math.nan], [math.nan, 0.5]):
        results = [result_of(0.5) | {"loss": loss} for loss in losses]
        (row,) = rows_of({"fp32": results}, None, False)
        assert row.loss.text(".1f") == "nan"
        assert (
            json.loads(json.dumps(sync._without_nan([asdict(row)]), allow_nan=False))[0]["loss"]["mean"]
            is None
        )


def test_a_threshold_may_stand_before_the_option(digits, tmp_path):
    done = run(digits, tmp_path, "--options", "threshold=50:fp32,threshold=50:fp16", "--epochs", "1")
    assert done.returncode == 0 and "| threshold=50:fp16 |" in done.stdout, done.stderr


SLOW = """        import time
        time.sleep(0.05 * (os.environ["SINGA_LITE_RANK"] == "1"))
        out = self"""


def test_the_clock_does_not_stop_before_all_ranks_have_made_their_steps(digits, tmp_path):
    (tmp_path / "tiny.py").write_text(TINY.replace("        out = self", SLOW))
    done = run(digits, tmp_path, "--options", "localSGD:100", "--epochs", "2", "--evaluate-every", "2")
    assert done.returncode == 0, done.stderr
    result = runs_in(tmp_path)["localSGD:100", 0]["result"]
    assert result["steps"] == 6 and result["train_s"] > 6 * 0.05
    assert result["step_ms"] >= 40  # of the first one no more is known than that it was waited for


def test_ranks_that_end_early_with_0_are_no_finished_run(digits, tmp_path):
    ends = TINY.replace("        out = self.forward(x)", "        raise SystemExit(0)")
    (tmp_path / "tiny.py").write_text(ends)
    done = run(digits, tmp_path, "--options", "fp32", "--ranks", "1", "--epochs", "1")
    assert done.returncode == 2 and "must not end the process" in done.stderr
    assert runs_in(tmp_path) == {}


def test_killing_the_command_leaves_no_rank_and_no_run(digits, tmp_path):
    options = ["--options", "fp32,fp16", "--epochs", "1"]
    (tmp_path / "hang-fp16").touch()
    with subprocess.Popen(
        command(tmp_path, *options), env=environment(digits), stdout=subprocess.DEVNULL
    ) as started:
        try:
            wait_until(lambda: len(list(tmp_path.glob("hangs-*"))) == 2, "both ranks hang")
        finally:
            os.kill(started.pid, signal.SIGKILL)
    assert_nothing_left(tmp_path)
    assert list(runs_in(tmp_path)) == [("fp32", 0)]
    (tmp_path / "hang-fp16").unlink()
    again = run(digits, tmp_path, *options)
    assert again.returncode == 0, again.stdout + again.stderr
    assert again.stderr.count("finished before") == 1 and again.stderr.count("s of training") == 1
    left = {path.name for path in (tmp_path / "out").iterdir()} - {"lock", "table.json", "table.html"}
    assert all(re.fullmatch(r"run-\w{16}\.json", name) for name in left) and len(left) == 2


def test_ctrl_c_says_so_and_keeps_the_runs_that_have_ended(digits, tmp_path):
    options = ["--options", "fp32,fp16", "--epochs", "1"]
    (tmp_path / "hang-fp16").touch()
    with subprocess.Popen(
        command(tmp_path, *options),
        env=environment(digits),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as started:
        wait_until(lambda: len(list(tmp_path.glob("hangs-*"))) == 2, "both ranks hang")
        started.send_signal(signal.SIGINT)
        _, errors = started.communicate(timeout=LIMIT_S)
    assert started.returncode == 130 and errors.splitlines()[-1] == "singa-lite bench sync: interrupted"
    assert "failed with exit code" not in errors and list(runs_in(tmp_path)) == [("fp32", 0)]
    assert_nothing_left(tmp_path)


def test_two_commands_at_once_make_a_run_once(digits, tmp_path):
    (tmp_path / "tiny.py").write_text(TINY)
    both = at_once([lambda: run(digits, tmp_path, "--options", "fp32", "--epochs", "1")] * 2)
    assert [done.returncode for done in both] == [0, 0]
    said = "".join(done.stderr for done in both)
    assert said.count("s of training") == 1 and said.count("finished before") == 1


PROVENANCE = Provenance({"cores": 2}, {"singa-lite": "1"}, {"data": "a"}, {"threads": "1"})
PLAIN = Settings("cnn-mnist", "fp32")
OTHERS = {
    "model": "mlp-mnist", "option": "fp16", "seed": 1, "ranks": 3, "epochs": 3, "graph": True, "batch_size": 65,
    "lr": 0.1, "momentum": 0.8, "weight_decay": 0.0, "evaluate_every": 68, "synthetic": 9, "link": "1gbit,1ms",
    "traced": True,
}  # fmt: skip
OTHER_PLACES = {
    "machine": {"cores": 4}, "software": {"singa-lite": "2"}, "inputs": {"data": "b"}, "environment": {"threads": "2"}
}  # fmt: skip


def test_any_other_setting_has_another_file(tmp_path):
    assert set(OTHERS) == set(asdict(PLAIN))
    runs = Runs(tmp_path, PROVENANCE)
    paths = {runs.path(PLAIN), *(runs.path(replace(PLAIN, **{name: OTHERS[name]})) for name in OTHERS)}
    assert len(paths) == 1 + len(OTHERS)
    runs.add(PLAIN, {"accuracy": 0.5})
    assert runs.find(PLAIN) == {"accuracy": 0.5}
    assert all(runs.find(replace(PLAIN, **{name: OTHERS[name]})) is None for name in OTHERS)


@pytest.mark.parametrize("name", OTHER_PLACES)
def test_a_run_of_another_place_is_not_found_even_under_this_name(name, tmp_path):
    assert set(OTHER_PLACES) == set(asdict(PROVENANCE))
    there, here = (
        Runs(tmp_path, replace(PROVENANCE, **{name: OTHER_PLACES[name]})),
        Runs(tmp_path, PROVENANCE),
    )
    there.add(PLAIN, {"accuracy": 0.5})
    assert here.find(PLAIN) is None and there.find(PLAIN) is not None
    there.path(PLAIN).rename(here.path(PLAIN))
    assert here.find(PLAIN) is None
    assert len(list(here.foreign())) == (name in ("machine", "software"))


def test_a_folder_with_the_name_of_a_run_is_named_and_one_of_another_run_is_left_out(tmp_path):
    runs = Runs(tmp_path, PROVENANCE)
    runs.path(replace(PLAIN, seed=1)).mkdir()
    runs.add(PLAIN, {"accuracy": 0.5})
    assert runs.find(PLAIN) == {"accuracy": 0.5} and list(runs.foreign()) == []
    with pytest.raises(
        OptionError, match=r"run-\w+\.json is a folder, expected the file of a run; move it away"
    ):
        runs.find(replace(PLAIN, seed=1))


def test_every_rank_may_have_one_made_image_and_the_largest_seed():
    assert Settings("cnn-mnist", "fp32", ranks=3, synthetic=3, seed=2**64 - 1).synthetic == 3
    for name in ("lr", "momentum", "weight_decay"):
        with pytest.raises(OptionError, match=f"{name} = inf"):
            Settings("cnn-mnist", "fp32", **{name: math.inf})


def test_a_run_of_another_machine_is_named_and_left_out(digits, compared, tmp_path):
    folder = Path(shutil.copytree(compared[0], tmp_path / "copy"))
    path = next((folder / "out").glob("run-*.json"))
    content = unsealed(path.read_bytes())
    content["machine"]["host"], content["result"]["accuracy"] = "elsewhere", 1.0
    foreign = folder / "out" / "run-0123456789abcdef.json"
    foreign.write_bytes(sealed(content))
    done = run(
        digits, folder, "--options", "fp32,sparseTopK:0.02", "--seeds", "0,1", "--epochs", "2",
        "--evaluate-every", "2", "--model", f"{compared[0] / 'tiny.py'}:tiny",
    )  # fmt: skip
    assert done.returncode == 0 and done.stderr.count("finished before") == 4
    assert "not in the table" in done.stderr and foreign.name in done.stderr and "elsewhere" in done.stderr
    assert "100.00" not in done.stdout


# ---- what a run trains -------------------------------------------------------------------------------


def test_recorded_and_eager_runs_send_the_same_bytes(digits, tmp_path, compared):
    done = run(digits, tmp_path, "--options", "fp32,sparseTopK:0.02", "--graph", "--epochs", "2")
    assert done.returncode == 0 and "recorded steps" in done.stdout, done.stdout + done.stderr
    eager, recorded = runs_in(compared[0]), runs_in(tmp_path)
    for key, run_ in recorded.items():
        assert (run_["result"]["num_records"], run_["result"]["break_reasons"]) == (1, [])
        assert eager[key]["result"]["num_records"] == 0
        assert run_["result"]["bytes_sent"] == eager[key]["result"]["bytes_sent"]
        assert abs(run_["result"]["loss"] - eager[key]["result"]["loss"]) < 1e-3


def test_steps_that_cannot_be_recorded_are_reported(digits, tmp_path):
    reads = TINY.replace("        self.optimizer(", "        loss.item()\n        self.optimizer(")
    (tmp_path / "tiny.py").write_text(reads)
    done = run(digits, tmp_path, "--options", "fp32", "--graph", "--ranks", "1", "--epochs", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "steps ran eagerly: " in done.stderr
    assert runs_in(tmp_path)["fp32", 0]["result"]["num_records"] == 0


def test_a_seed_decides_initial_values_and_order(digits, compared, monkeypatch):
    monkeypatch.setenv("MNIST_DIR", str(digits))
    made = []
    for seed in (0, 1, 0):
        training = train.RankTraining(Settings(f"{compared[0] / 'tiny.py'}:tiny", "fp32", seed, ranks=1))
        values = [tensor.to_numpy(value).tobytes() for value in training._model.get_params().values()]
        made.append((values[0], [batch.tolist() for batch in training._sampler]))
    assert made[0] == made[2]
    assert made[0][0] != made[1][0] and made[0][1] != made[1][1]


def test_evaluating_between_averages_changes_nothing(digits, tmp_path):
    options = ["--options", "localSGD:4", "--epochs", "2"]
    results = []
    for every in ("1", "1000"):
        done = run(digits, tmp_path, *options, "--evaluate-every", every)
        assert done.returncode == 0, done.stdout + done.stderr
        rows = json.loads((tmp_path / "out" / "table.json").read_text())["rows"]
        results.append([(row["loss"], row["accuracy"], row["run_bytes"]) for row in rows])
    assert results[0] == results[1]


def test_the_clock_stands_during_evaluations():
    times = iter((10.0, 13.0, 100.0, 104.0, 200.0))
    clock, seen = train.Clock(lambda: next(times)), []
    for _ in range(2):
        with clock.stopped():
            seen.append(clock.seconds)
    assert seen == [3.0, 7.0]


@pytest.mark.parametrize(
    ("name", "example"),
    [("cnn-mnist", "cnn.CNN"), ("mlp-mnist", "mlp.MLP"), ("resnet20-cifar10", "resnet.ResNet20")],
)
def test_the_models_are_those_of_the_examples(name, example):
    shape = (4, *data_set_of(name).shape)
    x, outputs = np.random.default_rng(0).normal(size=shape).astype(np.float32), []
    for made in (make_model(name), load(example)()):
        dev = device.get_default_device()
        dev.SetRandSeed(3)
        made.compile([tensor.from_numpy(x, dev)])
        made.eval()
        outputs.append(tensor.to_numpy(made(tensor.from_numpy(x, dev))))
    np.testing.assert_array_equal(*outputs)


def test_a_threshold_is_taken_out_of_the_option():
    assert split_threshold("sparseTopK:0.01:threshold=500:corr=0") == ("sparseTopK:0.01:corr=0", 500)
    assert split_threshold("fp32") == ("fp32", THRESHOLD)


# ---- bad input ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--options", "fp32,fp23"], "'fp23' is not known"),
        (["--options", "fp32,sparseTopK:2"], "must be in (0, 1]"),
        (["--options", "fp32:threshold=1:threshold=2"], "threshold once"),
        (["--options", f"fp32:threshold={'9' * 5000}"], "threshold once, an int >= 0"),
        (["--options", "fp32,fp32"], "one twice"),
        (["--options", "fp32", "--seeds", "0,0"], "one twice"),
        (["--options", "fp32", "--seeds", "0,x"], "expected ints"),
        (["--options", "fp32", "--seeds", "-1"], "seed = -1"),
        (["--options", "fp32", "--seeds", str(2**64)], f"seed = {2**64} must be in 0 .. 2**64 - 1"),
        (["--options", "fp32", "--seeds", "1" * 5000], "expected ints"),
        (["--options", "fp32", "--lr", "inf"], "lr = inf must be a number in 0"),
        (["--options", "fp32", "--lr", "nan"], "lr = nan"),
        (["--options", "fp32", "--ranks", "0"], "ranks = 0"),
        (
            ["--options", "fp32", "--ranks", "3", "--synthetic", "2"],
            "synthetic = 2 images cannot feed 3 ranks",
        ),
        (["--options", "fp32", "--evaluate-every", "0"], "evaluate_every = 0"),
        (["--options", "fp32", "--target", "98"], "target = 98.0"),
        (
            ["--options", "fp32", "--model", "vgg"],
            "cnn-mnist, mlp-mnist, resnet20-cifar10, or file.py:function",
        ),
        (["--options", "fp32", "--model", "nowhere.py:f"], "there is no file"),
        (["--options", ""], "--options '': expected names with commas between"),
        (["--options", "fp32,,fp16"], "one is empty"),
        (["--options", "fp32", "--link", "fast"], "--link: expected RATE,LATENCY such as 100mbit,1ms"),
        (["--options", "fp32", "--synthetic", "0"], "synthetic = 0"),
        (["--options", "fp32", "--synthetic", "--data", "."], "leave one out"),
    ],
)
def test_what_no_run_can_have_is_refused_before_anything_starts(
    arguments, says, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(sync, "launch", None)
    monkeypatch.setenv("MNIST_DIR", str(FIXTURE))
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", "sync", "--out", str(tmp_path / "out"), *arguments])
    assert ended.value.code == 2 and says in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_an_unknown_option_is_an_option_error():
    with pytest.raises(OptionError, match="'fp23' is not known"):
        sync.plan(sync._parser().parse_args(["--options", "fp32,fp23"]))


def test_a_function_that_returns_no_model_is_refused(tmp_path):
    (tmp_path / "tiny.py").write_text(TINY)
    with pytest.raises(OptionError, match=r"returned int, expected a singa_lite\.model\.Model"):
        make_model(f"{tmp_path / 'tiny.py'}:no_model")
    with pytest.raises(OptionError, match="has no function 'missing'"):
        make_model(f"{tmp_path / 'tiny.py'}:missing")
