# SPDX-License-Identifier: Apache-2.0
"""`singa-lite bench compare`: ratios of two tables, and when the second is worse."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from singa_lite import cli
from singa_lite.bench import sync
from singa_lite.bench.compare import Change
from singa_lite.bench.datasets import data_set_of
from singa_lite.bench.report import Figure, rows_of
from singa_lite.bench.runs import FORMAT, TABLE, Provenance, Runs, Settings, inputs_of

EVALUATION = {"step": 5, "seconds": 1.0, "bytes_sent": 100}


def result(step_ms=10.0, loss=0.1, accuracy=0.9, sent=1000, seconds=1.0, reached=True) -> dict[str, Any]:
    """What a run of one rank wrote; it reached 80 % after ``seconds``."""
    values = (0.85, 0.85, accuracy) if reached else (0.1, 0.1, accuracy)
    evaluations = [
        {**EVALUATION, "seconds": seconds * n, "accuracy": value} for n, value in enumerate(values, 1)
    ]
    epoch = {"loss": loss, "steps": 10, "bytes_sent": sent}
    return {
        "accuracy": accuracy, "loss": loss, "steps": 10, "train_s": 3.0, "step_ms": step_ms, "parts_ms": {"wait": 1.0},
        "bytes_sent": [sent], "epochs": [epoch], "evaluations": evaluations,
    }  # fmt: skip


def write(
    folder: Path, runs: dict[str, list[dict[str, Any]]], target: float | None = 0.8, **changes: Any
) -> Path:
    """A folder with the table of these runs."""
    folder.mkdir()
    content = {
        "format": FORMAT, "machine": {"cores": 2, "host": "a"}, "software": {"singa-lite": "1"},
        "inputs": {"data": "x"}, "environment": {"threads": "1"}, "data": "MNIST",
        "settings": {"model": "cnn-mnist", "link": None}, "devices": ["cpu"],
        "seeds": [0, 1], "target": target, "rows": [asdict(row) for row in rows_of(runs, target)], **changes,
    }  # fmt: skip
    (folder / TABLE).write_text(json.dumps(content))
    return folder


def compare(*arguments: str | Path) -> int:
    return cli.main(["bench", "compare", *map(str, arguments)])


def refusal(capsys, *arguments: str | Path) -> str:
    with pytest.raises(SystemExit) as ended:
        compare(*arguments)
    assert ended.value.code == 2
    return " ".join(capsys.readouterr().err.split())


@pytest.fixture
def a(tmp_path) -> Path:
    return write(tmp_path / "a", {"fp32": [result(9.0), result(11.0)], "fp16": [result(5.0), result(5.0)]})


def test_ratios_of_each_option_are_printed(a, tmp_path, capsys):
    runs = {"fp32": [result(9.0, sent=500), result(10.0, sent=500)], "fp16": [result(5.0, accuracy=0.95)] * 2}
    assert compare(a, write(tmp_path / "b", runs)) == 0
    rows = {
        line.split(" | ")[0]: line.split(" | ")[1:]
        for line in capsys.readouterr().out.splitlines()
        if "|" in line
    }
    assert rows["| option"] == ["step ms", "bytes of the run", "loss", "error %", "s to 80 % |"]
    assert rows["| fp32"][0] == "0.950 (10 to 9.5)" and rows["| fp32"][1] == "0.500 (1000 to 500)"
    assert rows["| fp16"][3] == "0.500 (10 to 5)" and rows["| fp16"][4] == "1.000 (1 to 1) |"


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"step_ms": 14.0}, "step ms"),
        ({"loss": 0.13}, "loss"),
        ({"loss": math.nan}, "loss"),
        ({"accuracy": 0.87}, "error %"),
        ({"sent": 1300}, "bytes of the run"),
        ({"seconds": 1.3}, "s to 80 %"),
        ({"reached": False}, "s to 80 %"),
    ],
)
def test_each_figure_that_is_worse_by_more_than_the_tolerance_is_an_exit_code(
    change, name, a, tmp_path, capsys
):
    b = write(tmp_path / "b", {"fp32": [result(**change)] * 2, "fp16": [result(5.0)] * 2})
    assert compare(a, b) == 1
    out = capsys.readouterr().out
    assert out.splitlines()[-1].endswith(f"spread: fp32: {name}") and out.count("WORSE") == 1
    assert (compare(b, b), compare(b, a)) == (0, 0)


def finished_sync(folder: Path, losses: tuple[float, ...]) -> Path:
    """A folder in which `bench sync` has made its table of finished runs, a seed for each loss."""
    settings = [
        Settings("cnn-mnist", "fp32", seed, ranks=1, synthetic=40, graph=True) for seed in range(len(losses))
    ]
    inputs = inputs_of("cnn-mnist", data_set_of("cnn-mnist").images(40, None))
    runs = Runs(folder, Provenance.here(1, inputs))
    for each, loss in zip(settings, losses, strict=True):
        runs.add(each, {**result(loss=loss), "device": "cpu", "break_reasons": [], "num_records": 1})
    assert sync.compare(settings, None, folder) == 0
    return folder


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_run_of_bench_sync_that_diverged_is_worse(loss, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sync, "picture", lambda drawn, heading: None)
    before = finished_sync(tmp_path / "before", (0.1, 0.2))
    after = finished_sync(tmp_path / "after", (0.1, loss))
    assert json.loads((after / TABLE).read_bytes())["rows"][0]["loss"]["mean"] is None
    capsys.readouterr()
    assert compare(before, after) == 1
    assert capsys.readouterr().out.splitlines()[-1].endswith("spread: fp32: loss")
    assert (compare(after, after), compare(after, before)) == (0, 0)


def test_a_larger_tolerance_forgives_it(a, tmp_path):
    b = write(tmp_path / "b", {"fp32": [result(14.0)] * 2, "fp16": [result(5.0)] * 2})
    assert (compare(a, b, "--tolerance", "0.5"), compare(a, b, "--tolerance", "0.1")) == (0, 1)


@pytest.mark.parametrize(("steps", "code"), [((11.0, 30.0), 0), ((11.1, 30.0), 1)])
def test_seeds_that_overlap_forgive_it(steps, code, a, tmp_path):
    b = write(tmp_path / "b", {"fp32": [result(ms) for ms in steps], "fp16": [result(5.0)] * 2})
    assert compare(a, b) == code


@pytest.mark.parametrize(("accuracies", "code"), [((0.7, 0.85), 0), ((0.7, 0.79), 1)])
def test_the_spread_of_errors_is_that_of_the_accuracies(accuracies, code, tmp_path):
    before = write(tmp_path / "before", {"fp32": [result(accuracy=value) for value in (0.9, 0.8)]})
    after = write(tmp_path / "after", {"fp32": [result(accuracy=value) for value in accuracies]})
    assert compare(before, after) == code


@pytest.mark.parametrize(
    ("before", "after", "ratio", "is_worse"),
    [
        (0.0, 0.0, 1.0, False),
        (0.0, 1.0, None, True),
        (math.nan, math.nan, math.nan, False),
        (1.0, 1.2, 1.2, False),
        (-1.0, -0.9, None, False),
        (-1.0, -0.7, None, True),
        (-1.0, 0.1, None, True),
        (-1.0, -1.5, None, False),
        (-1.0, -1.0, 1.0, False),
    ],
)
def test_zeros_negative_and_no_numbers_are_judged_too(before, after, ratio, is_worse):
    change = Change(Figure.of([before]), Figure.of([after]))
    assert change.is_worse(0.2) == is_worse
    assert change.ratio == pytest.approx(ratio, nan_ok=True) if ratio is not None else change.ratio is None


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"machine": {"cores": 4, "host": "a"}}, "machine cores: 2 in A, 4 in B"),
        (
            {"settings": {"model": "cnn-mnist", "link": "1gbit,1ms"}},
            "settings link: None in A, 1gbit,1ms in B",
        ),
        ({"seeds": [0]}, "seeds: [0, 1] in A, [0] in B"),
        ({"inputs": {"data": "y"}}, "inputs data: x in A, y in B"),
        ({"environment": {"threads": "2"}}, "environment threads: 1 in A, 2 in B"),
        ({"devices": ["cuda"]}, "devices: ['cpu'] in A, ['cuda'] in B"),
    ],
)
def test_results_of_other_runs_are_refused_unless_it_is_asked_for_and_then_stated(
    changes, says, a, tmp_path, capsys
):
    b = write(tmp_path / "b", {"fp32": [result(10.0)] * 2, "fp16": [result(5.0)] * 2}, **changes)
    assert says in refusal(capsys, a, b) and not capsys.readouterr().out
    assert compare(a, b, "--anyway") == 0
    assert f"differs: {says}" in capsys.readouterr().out


def test_other_software_options_and_targets_are_stated(a, tmp_path, capsys):
    runs = {"fp32": [result(10.0)] * 2, "int8": [result()] * 2}
    b = write(tmp_path / "b", runs, target=0.7, software={"singa-lite": "2"})
    assert compare(a / TABLE, b) == 0
    out = capsys.readouterr().out
    for line in (
        "differs: software singa-lite: 1 in A, 2 in B",
        "left out: fp16, which B has not",
        "left out: int8, which A has not",
        "left out: seconds to the target, which is 0.8 in A and 0.7 in B",
    ):
        assert line in out.splitlines()
    assert "s to 80" not in out


def test_what_is_no_table_is_named(a, tmp_path, capsys):
    assert "nowhere: No such file or directory; expected a folder" in refusal(capsys, a, tmp_path / "nowhere")
    (tmp_path / "half").write_text((a / TABLE).read_text()[:-9])
    assert "is not a table.json of this version" in refusal(capsys, a, tmp_path / "half")
    old = write(tmp_path / "old", {"fp32": [result()]}, format=FORMAT - 1)
    assert "is not a table.json of this version" in refusal(capsys, old, a)
    wide = json.loads((a / TABLE).read_text())["rows"][0] | {
        "loss": {"mean": 1.0, "lowest": "0", "highest": 10**400}
    }
    (tmp_path / "deep").write_text("[" * 100000)
    assert "is not a table.json of this version" in refusal(capsys, tmp_path / "deep", a)
    for broken in ({"rows": [{"option": "fp32"}]}, {"rows": [1]}, {"rows": 1}, {"rows": [wide]}):
        path = write(tmp_path / f"broken{len(list(tmp_path.iterdir()))}", {"fp32": [result()]}, **broken)
        assert "is not a table.json of this version" in refusal(capsys, a, path)
    other = write(tmp_path / "other", {"sign": [result()] * 2})
    assert "no option in common" in refusal(capsys, a, other)
    assert "tolerance = -1.0" in refusal(capsys, a, a, "--tolerance", "-1")
