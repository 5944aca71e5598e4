# SPDX-License-Identifier: Apache-2.0
"""`singa-lite bench sync`: links, made images, models, and the files it writes."""

from __future__ import annotations

import json
import os
import pty
import struct
import subprocess
import sys
import types
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from singa_lite import cli
from singa_lite.bench import sync, train
from singa_lite.bench.datasets import data_set_of
from singa_lite.bench.models import check_model
from singa_lite.bench.picture import picture
from singa_lite.bench.runs import Provenance, Settings, inputs_of
from singa_lite.data import synthetic_cifar10, synthetic_mnist
from singa_lite.errors import OptionError
from tests.bench.commands import TRAINED, bench, model_with, small_model, without_pictures
from tests.comm.processes import fresh_environment
from tests.limits import LIMIT_S
from tests.slow_cases import slow_but_first

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="several ranks need Linux")
LATENCY_MS = 40  # of a hop; an all-reduce of 2 ranks has 2


def parsed(*arguments: str) -> Namespace:
    return sync._parser().parse_args(["--options", "fp32", *arguments])


def runs_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("run-*.json"))]


# ---- the link ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def linked(tmp_path_factory):
    """A run over a slow link by --link, then the same by SINGA_LITE_LINK, in one folder."""
    folder = tmp_path_factory.mktemp("linked")
    arguments = ["--model", small_model(folder), *TRAINED, "--options", "fp32", "--out", folder / "out"]
    link = f"1gbit,{LATENCY_MS}ms"
    first = bench("sync", *arguments, "--link", link)
    again = bench("sync", *arguments, SINGA_LITE_LINK=f"1000mbit,{LATENCY_MS * 1000}us")
    assert (first.returncode, again.returncode) == (0, 0), first.stderr + again.stderr
    return folder, first, again


def test_steps_take_as_long_as_over_the_link(linked):
    folder, done, _ = linked
    [run] = runs_of(folder / "out")
    assert run["settings"]["link"] == f"1gbit,{LATENCY_MS}ms"
    result = run["result"]
    assert result["step_ms"] >= 2 * LATENCY_MS and result["parts_ms"]["wire"] >= LATENCY_MS
    assert result["bytes_sent"] == [2 * 4 * 7850] * 2
    assert f"link: 1gbit,{LATENCY_MS}ms" in done.stdout


def test_a_link_of_the_environment_is_the_same_setting(linked):
    folder, _, again = linked
    assert "finished before" in again.stderr and len(runs_of(folder / "out")) == 1
    assert f"link: 1gbit,{LATENCY_MS}ms" in again.stdout


def test_an_option_goes_before_the_environment(monkeypatch):
    monkeypatch.setenv("SINGA_LITE_LINK", "1gbit,1ms")
    assert sync.plan(parsed())[0].link == "1gbit,1ms"
    assert sync.plan(parsed("--link", "2gbit,1ms"))[0].link == "2gbit,1ms"
    monkeypatch.setenv("SINGA_LITE_LINK", "soon")
    with pytest.raises(OptionError, match="SINGA_LITE_LINK: expected RATE,LATENCY"):
        sync.plan(parsed())


def test_one_link_has_one_text_and_a_wrong_one_is_refused():
    assert Settings("cnn-mnist", "fp32", link="1000mbit,1000us").link == "1gbit,1ms"
    with pytest.raises(OptionError, match="link: expected RATE,LATENCY"):
        Settings("cnn-mnist", "fp32", link="1gbit")


def test_the_environment_of_a_run_has_no_link(monkeypatch):
    monkeypatch.setenv("SINGA_LITE_LINK", "1gbit,1ms")
    monkeypatch.setenv("SINGA_LITE_HOST", "a")
    environment = Provenance.here(2, {}).environment
    assert "SINGA_LITE_LINK" not in environment and environment["SINGA_LITE_HOST"] == "a"


# ---- images ------------------------------------------------------------------------------------------


def test_made_images_are_named_in_heading_table_and_json(linked):
    folder, done, _ = linked
    heading, head = done.stdout.split("| option |")[0], done.stdout.split("\n| --- |")[0].splitlines()[-1]
    text = "made images (40 to train on, 8 to test on) in the shape of MNIST, not MNIST"
    assert text in heading and "| accuracy %, made images |" in head
    table = json.loads((folder / "out" / "table.json").read_text())
    assert table["data"] == text and table["settings"]["synthetic"] == 40
    assert [row["is_synthetic"] for row in table["rows"]] == [True]
    assert text in (folder / "out" / "table.html").read_text()


@pytest.mark.slow
def test_resnet20_trains_on_made_images_in_the_shape_of_cifar10(tmp_path):
    arguments = ["--model", "resnet20-cifar10", "--synthetic", "16", "--batch-size", "4", "--epochs", "1"]
    done = bench(
        "sync",
        *arguments,
        "--graph",
        "--options",
        "fp32,fp16",
        "--out",
        tmp_path / "out",
        PYTHONPATH=without_pictures(tmp_path),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "in the shape of CIFAR-10, not CIFAR-10" in done.stdout
    sent = {run["settings"]["option"]: run["result"] for run in runs_of(tmp_path / "out")}
    assert sent["fp32"]["bytes_sent"] == [2 * 4 * 272474] * 2
    assert sent["fp32"]["num_records"] == 1 and sent["fp32"]["break_reasons"] == []
    # and a scale of each bucket
    assert 2 * 2 * 272474 <= sent["fp16"]["bytes_sent"][0] <= 2 * (2 * 272474 + 64)


def test_a_folder_of_cifar10_is_read(tmp_path):
    images = synthetic_cifar10(20, 4)
    parts = [
        np.concatenate([labels[:, None], pixels.reshape(len(labels), -1)], axis=1).astype(np.uint8).tobytes()
        for pixels, labels in (
            (images.train_images, images.train_labels),
            (images.test_images, images.test_labels),
        )
    ]
    for number in range(1, 6):
        size = len(parts[0]) // 5
        (tmp_path / f"data_batch_{number}.bin").write_bytes(parts[0][(number - 1) * size : number * size])
    (tmp_path / "test_batch.bin").write_bytes(parts[1])
    settings = Settings("resnet20-cifar10", "fp32", ranks=1, batch_size=2)
    training = train.RankTraining(settings, tmp_path)
    for ours, theirs in zip(training._images, images, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    x, _ = training._batch(images.train_images, images.train_labels, slice(0, 2))
    expected = (
        images.train_images[:2] / 255.0 - np.reshape([0.4914, 0.4822, 0.4465], (3, 1, 1))
    ) / np.reshape([0.2470, 0.2435, 0.2616], (3, 1, 1))
    np.testing.assert_allclose(x, expected, rtol=1e-4, atol=1e-5)


def test_a_data_set_has_its_own_learning_rate_unless_one_is_given():
    [mnist], [cifar] = (sync.plan(parsed("--model", name)) for name in ("mlp-mnist", "resnet20-cifar10"))
    assert (mnist.lr, mnist.weight_decay, cifar.lr, cifar.weight_decay) == (0.005, 1e-5, 0.05, 5e-4)
    assert sync.plan(parsed("--model", "resnet20-cifar10", "--lr", "0.1"))[0].lr == 0.1


def test_other_images_are_other_inputs():
    found = [
        inputs_of("cnn-mnist", images)
        for images in (synthetic_mnist(9, 1), synthetic_mnist(9, 1), synthetic_mnist(9, 2))
    ]
    assert found[0] == found[1] != found[2]


def test_a_missing_folder_of_data_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(sync, "launch", None)
    arguments = ["bench", "sync", "--options", "fp32", "--out", str(tmp_path / "out")]
    for model in ("cnn-mnist", "resnet20-cifar10"):
        with pytest.raises(SystemExit) as ended:
            cli.main([*arguments, "--model", model, "--data", str(tmp_path / "nowhere")])
        assert "nowhere" in str(ended.value) and "no such folder" in str(ended.value)
    assert not (tmp_path / "out").exists()


# ---- models and folders that are refused --------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "function", "says"),
    [
        ("def made(): return 1", "missing", "has no function 'missing'"),
        ("def made(): return 1", "made", r"returned int, expected a singa_lite\.model\.Model"),
        ("import nowhere_at_all", "made", r"failed with ModuleNotFoundError: .*line 1\)"),
        ("def made():\n    raise RuntimeError('not now')", "made", r"failed with RuntimeError: not now .*line 2\)"),
        ("raise SystemExit(0)", "made", "failed with SystemExit"),
    ],
)  # fmt: skip
def test_a_model_that_cannot_be_made_is_refused_before_anything_starts(
    text, function, says, tmp_path, monkeypatch, capsys
):
    (tmp_path / "mine.py").write_text(text)
    before = list(sys.path)
    with pytest.raises(OptionError, match=says):
        check_model(f"{tmp_path / 'mine.py'}:{function}")
    assert sys.path == before
    monkeypatch.setattr(sync, "launch", None)
    with pytest.raises(SystemExit) as ended:
        cli.main(
            [
                "bench",
                "sync",
                "--options",
                "fp32",
                "--synthetic",
                "--model",
                f"{tmp_path / 'mine.py'}:{function}",
            ]
        )
    assert ended.value.code == 2 and "mine.py" in capsys.readouterr().err


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sync, "launch", None)
    (tmp_path / "out").touch()
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", "sync", "--options", "fp32", "--synthetic", "20", "--out", str(tmp_path / "out")])
    error = capsys.readouterr().err
    assert ended.value.code == 2 and "File exists" in error and "name another with --out" in error


# ---- what a step of a model does -----------------------------------------------------------------------


TWICE = """self.optimizer(loss)
out = self.forward(x)
loss = self.loss(out, y)
self.optimizer(loss)
return out, loss"""
BY_HAND = """for param, grad in autograd.backward(loss):
    self.optimizer.all_reduce(grad)
    self.optimizer.update(param, grad)
self.optimizer.step()
return out, loss"""


@slow_but_first("graph", [["--graph"], []], ids=["recorded", "eager"])
def test_all_calls_of_the_optimizer_in_a_step_are_counted(graph, tmp_path):
    arguments = [
        "--model",
        model_with(tmp_path, TWICE),
        *TRAINED,
        *graph,
        "--options",
        "fp32,sparseTopK:0.01",
    ]
    done = bench("sync", *arguments, "--out", tmp_path / "out", PYTHONPATH=without_pictures(tmp_path))
    assert done.returncode == 0, done.stderr
    results = {run["settings"]["option"]: run["result"] for run in runs_of(tmp_path / "out")}
    fp32, sparse = results["fp32"], results["sparseTopK:0.01"]
    assert fp32["bytes_sent"] == [2 * 2 * 4 * 7850] * 2
    # 79 values with 7 low bits each, and 79 + 61 + 1 high ones, of which each of 2 ranks gets the other's
    of_step = 2 * 4 * (79 + -(-79 * 6 // 32) + -(-(79 + (7849 >> 6) + 1) // 32))
    assert sparse["bytes_sent"] == [2 * of_step] * 2
    assert fp32["parts_ms"] == {} and "the parts of a step are left out" in done.stderr
    assert "wait ms" not in done.stdout


def step_of(folder: Path, body: str, option: str) -> None:
    settings = Settings(model_with(folder, body), option, ranks=1, batch_size=10, synthetic=40)
    train.RankTraining(settings).run()


@pytest.mark.parametrize(
    ("body", "option", "ran"),
    [
        (BY_HAND, "dgc:0.01", "ran no dist_option, expected dgc of 'dgc:0.01'"),
        (BY_HAND, "fp32", "ran no dist_option, expected fp32"),
        (
            "self.optimizer.backward_and_update_half(loss)\nreturn out, loss",
            "sign",
            "ran fp16, expected sign",
        ),
        ("self.optimizer(loss, 'half')\nreturn out, loss", "plain", "ran fp16, expected fp32"),
    ],
)
def test_a_model_whose_step_does_not_run_the_option_is_refused(body, option, ran, tmp_path):
    with pytest.raises(
        OptionError, match=rf"other\.py:Small: train_one_batch {ran}.*self\.optimizer\(loss\)"
    ):
        step_of(tmp_path, body, option)


def test_a_model_that_runs_the_option_by_another_call_is_trained(tmp_path):
    step_of(tmp_path, "self.optimizer.backward_and_update_half(loss)\nreturn out, loss", "fp16")


@pytest.mark.parametrize(
    ("returned", "got"), [("loss", "Tensor"), ("out, loss, x", "3 values"), ("loss, out", "2 values")]
)
def test_a_model_whose_step_returns_something_else_is_refused(returned, got, tmp_path):
    with pytest.raises(OptionError, match=rf"train_one_batch must return \(output, loss\).*got {got}"):
        step_of(tmp_path, f"self.optimizer(loss)\nreturn {returned}", "fp32")


# ---- pictures and bars ---------------------------------------------------------------------------------


def test_a_picture_is_written_and_small(linked):
    folder, done, _ = linked
    drawn = (folder / "out" / "table.png").read_bytes()
    width, height = struct.unpack(">II", drawn[16:24])
    assert drawn[1:4] == b"PNG" and width > height > 300
    assert "table.png" in done.stdout
    assert (folder / "out" / "table.html").stat().st_size < 3e6


def test_a_picture_shows_another_curve_for_another_result():
    def results(accuracy):
        evaluations = [
            {"step": 5 * n, "seconds": float(n), "bytes_sent": n, "accuracy": value}
            for n, value in enumerate((0.5, accuracy), 1)
        ]
        return {"fp32": [{"evaluations": evaluations}]}

    drawn = [picture(results(accuracy), "heading") for accuracy in (0.6, 0.9, 0.6)]
    assert drawn[0] == drawn[2] != drawn[1]


def test_without_matplotlib_the_rest_is_written_and_the_cure_is_named(tmp_path):
    (tmp_path / "tqdm.py").write_text("raise ImportError('not here')")
    arguments = ["--model", small_model(tmp_path), *TRAINED, "--options", "fp32", "--out", tmp_path / "out"]
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "table.png").write_text("an older picture")
    done = bench("sync", *arguments, PYTHONPATH=without_pictures(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "no table.png, as matplotlib is not installed: pip install 'singa-lite[bench]'" in done.stderr
    written = {path.name for path in (tmp_path / "out").glob("table.*")}
    assert written == {"table.json", "table.html"} and "table.png" not in done.stdout


class Bar:
    """What tqdm does, counted."""

    made: list[Bar] = []  # noqa: RUF012

    def __init__(self, **options: Any) -> None:
        self.options, self.count, self.is_closed = options, 0, False
        Bar.made.append(self)

    def update(self) -> None:
        self.count += 1

    def close(self) -> None:
        self.is_closed = True


def test_a_bar_counts_all_steps_where_it_is_asked_for(tmp_path, monkeypatch):
    module: Any = types.ModuleType("tqdm")
    module.tqdm = Bar
    monkeypatch.setitem(sys.modules, "tqdm", module)
    settings = Settings(small_model(tmp_path), "fp32", ranks=1, batch_size=10, epochs=2, synthetic=40)
    train.RankTraining(settings).run()
    assert Bar.made == []
    train.RankTraining(settings).run(is_shown=True)
    [bar] = Bar.made
    assert (bar.count, bar.options["total"], bar.is_closed) == (8, 8, True)
    assert "fp32" in bar.options["desc"]


def test_ranks_are_asked_for_a_bar_on_a_terminal_alone(tmp_path, monkeypatch):
    commands = []

    def launch(command, ranks, options):
        commands.append(command)
        return 1

    monkeypatch.setattr(sync, "launch", launch)
    for is_terminal in (True, False):
        monkeypatch.setattr(sys.stderr, "isatty", lambda is_terminal=is_terminal: is_terminal)
        settings = sync.plan(parsed("--model", small_model(tmp_path), *TRAINED))
        assert sync.compare(settings, None, tmp_path / "out") == 1
    assert [command[-1] for command in commands] == ["bar", ""]


def test_no_bar_is_shown_without_a_terminal(linked):
    for done in linked[1:]:
        assert "\r" not in done.stderr and "step/s" not in done.stderr


WAITS_TO_BE_SEEN = """import os, time
deadline = time.monotonic() + {limit_s}
while not os.path.exists({file!r}) and time.monotonic() < deadline:
    time.sleep(0.01)
self.optimizer(loss)
return out, loss
"""


def test_a_bar_is_shown_on_a_terminal(tmp_path):
    seen_file = tmp_path / "seen"
    arguments = [
        "--model",
        model_with(tmp_path, WAITS_TO_BE_SEEN.format(file=str(seen_file), limit_s=LIMIT_S / 4)),
        *TRAINED,
        "--options",
        "fp32",
        "--out",
        str(tmp_path / "out"),
    ]
    master, slave = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "singa_lite", "bench", "sync", *arguments],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=slave,
        env=fresh_environment(PYTHONPATH=without_pictures(tmp_path)),
    ) as started:  # fmt: skip
        os.close(slave)
        seen = b""
        while True:
            try:
                chunk = os.read(master, 4096)
            except OSError:  # all ends of the other side are closed
                break
            if not chunk:
                break
            seen += chunk
            if b"/2 [" in seen:  # a bar that ends before the launcher has read it is not shown
                seen_file.touch()
        assert started.wait(LIMIT_S) == 0, seen.decode()
    os.close(master)
    assert b"seed 0 fp32: " in seen and b"/2 [" in seen


def test_a_fifth_as_many_images_are_made_to_test_on():
    for name, count, tested in (("cnn-mnist", 40, 8), ("resnet20-cifar10", 3, 1)):
        images = data_set_of(name).images(count)
        assert (len(images.train_labels), len(images.test_images)) == (count, tested)


def test_models_name_their_data():
    assert [data_set_of(name).title for name in ("cnn-mnist", "resnet20-cifar10", "x.py:f")] == [
        "MNIST", "CIFAR-10", "MNIST",
    ]  # fmt: skip


# ---- the trace ---------------------------------------------------------------------------------------


def test_each_run_has_a_trace_of_its_own(tmp_path):
    arguments = ["--model", small_model(tmp_path), *TRAINED, "--out", tmp_path / "out"]
    done = bench(
        "sync",
        *arguments,
        "--options",
        "fp32,sparseTopK:0.5",
        "--trace",
        tmp_path / "trace.json",
        PYTHONPATH=without_pictures(tmp_path),
    )
    assert done.returncode == 0, done.stderr
    for name in ("trace-fp32-0.json", "trace-sparseTopK-0.5-0.json"):
        events = json.loads((tmp_path / name).read_bytes())["traceEvents"]
        assert {event["pid"] for event in events} == {0, 1}
        assert {event["args"]["step"] for event in events if event["ph"] == "X"} == {1, 2}
    assert all(run["settings"]["traced"] for run in runs_of(tmp_path / "out"))
