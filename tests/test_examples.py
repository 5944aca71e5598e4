# SPDX-License-Identifier: Apache-2.0
"""Every example, run as their docstrings say, on a few real digits."""

import io
import os
import re
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from singa_lite.data import load_mnist
from singa_lite.generation import find_generations
from tests.limits import LIMIT_S
from tests.ranks import _mpiexec, mpi_missing
from tests.slow_cases import slow_but_first

ROOT = Path(__file__).parents[1]
FIXTURE = ROOT / "tests" / "fixtures" / "mnist"
LAUNCH_2 = [sys.executable, "-m", "singa_lite", "run", "-n", "2"]


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """A folder of IDX files: the fixture's digits, the test images three times, so that two ranks fill a batch."""
    folder = tmp_path_factory.mktemp("mnist")
    mnist = load_mnist(FIXTURE)
    parts = {
        "train": (mnist.train_images, mnist.train_labels),
        "t10k": (np.tile(mnist.test_images, (3, 1, 1)), np.tile(mnist.test_labels, 3)),
    }
    for name, (images, labels) in parts.items():
        header = struct.pack(">4I", 2051, *images.shape)
        (folder / f"{name}-images-idx3-ubyte").write_bytes(header + images.tobytes())
        (folder / f"{name}-labels-idx1-ubyte").write_bytes(
            struct.pack(">2I", 2049, len(labels)) + labels.tobytes()
        )
    return folder


def run(digits, *command):
    """What ``command`` prints, stdout and stderr; it must succeed within its deadline."""
    environment = {**os.environ, "MNIST_DIR": str(digits), "MPLBACKEND": "Agg"}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def accuracies(output):
    return [float(text) for text in re.findall(r"Evaluation accuracy = ([\d.]+)", output)]


def losses_of(output):
    return [float(text) for text in re.findall(r"Training loss = ([\d.]+), training accuracy", output)]


def test_autograd_script_learns_on_one_process_and_two(digits):
    script = ROOT / "examples" / "mnist_autograd.py"
    for command in ([sys.executable, script], [sys.executable, script, 2], [*LAUNCH_2, script]):
        found = accuracies(run(digits, *command))
        assert len(found) == 10 and found[-1] > found[0]


@pytest.mark.parametrize(
    "option",
    [
        [],
        pytest.param(["fp16"], marks=pytest.mark.slow),  # goes the way of the first
        ["partialUpdate"],
        ["sparseTopK", "0.05"],
        ["sparseThreshold", "0.001"],
    ],
)
def test_model_script_learns_with_every_option(digits, option):
    found = accuracies(run(digits, *LAUNCH_2, ROOT / "examples" / "mnist_model.py", *option))
    assert len(found) == 10 and found[-1] > found[0]


def test_train_mnist_tells_what_it_does_and_leaves_plot_and_checkpoint(digits, tmp_path):
    script = [ROOT / "examples" / "train_mnist.py", "--epochs", 3, "--out", tmp_path, "--dist-option", "fp16"]
    output = run(digits, *LAUNCH_2, *script)
    losses = losses_of(output)
    assert "world size 2, transport shm, device Device(cpu), effective batch 64 x 2 = 128" in output
    assert "dist_option fp16, reduction mean over ranks" in output
    assert [int(epoch) for epoch in re.findall(r"Starting Epoch (\d):", output)] == [0, 1, 2]
    assert len(losses) == 3 and losses[2] < losses[0]
    assert output.count("images/s") == 3 and output.count("bytes sent per step") == 3
    graphs = re.findall(r"graph of (.*): (\d+) kernels, \d+ collectives\n", output)
    assert graphs and all("'fp16'" in inputs and int(kernels) > 5 for inputs, kernels in graphs)
    assert (tmp_path / "mnist_cnn.zip").exists() and (tmp_path / "mnist_cnn.png").stat().st_size > 10_000

    eager = run(digits, *LAUNCH_2, *script, "--epochs", 1, "--no-graph")
    assert "graph of" not in eager
    np.testing.assert_allclose(losses_of(eager), losses[:1], rtol=1e-3)


KILLED_IN_AN_EVALUATION = """
import importlib, os, signal, sys, time
script = importlib.import_module(sys.argv.pop(1))
evaluate = script.evaluate
def killed(*arguments):
    if os.environ["SINGA_LITE_RESTART"] + os.environ["SINGA_LITE_RANK"] == "00":
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    return evaluate(*arguments)
script.evaluate = killed
script.main()
"""


@slow_but_first(
    "name, options", [("train_mnist", []), ("train_cifar", ["--synthetic", 90, "--model", "mlp"])]
)
def test_a_job_killed_in_an_evaluation_keeps_every_epoch_and_may_be_started_again(
    digits, tmp_path, monkeypatch, name, options
):
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "examples"))
    (tmp_path / "killed.py").write_text(KILLED_IN_AN_EVALUATION)
    command = [
        *LAUNCH_2, "--max-restarts", 1, "--checkpoint", tmp_path / "job", tmp_path / "killed.py", name, *options,
        "--epochs", 2, "--batch-size", 32, "--save-every", 1, "--out", tmp_path,
    ]  # fmt: skip
    output = run(digits, *command)
    assert "restart 1 of 1 now with 2 ranks" in output
    assert [int(epoch) for epoch in re.findall(r"Starting Epoch (\d):", output)] == [0, 0, 1]
    assert len(accuracies(output)) == 2
    newest = find_generations(tmp_path / "job")[0][0].manifest
    assert [len(extra["history"]) for extra in newest.extras] == [2, 2]

    [picture] = tmp_path.glob("*.png")
    picture.unlink()
    again = run(digits, *command)
    assert f"Going on from step {newest.step}\n" in again and "Starting Epoch" not in again
    assert picture.exists()


def train_mnist_once(digits, out, precision):
    script = [sys.executable, "examples/train_mnist.py", "--batch-size", 32, "--out", out, "--epochs", 1]
    return losses_of(run(digits, *script, "--precision", precision))


@pytest.fixture(scope="module")
def losses_in_float32(digits, tmp_path_factory):
    return train_mnist_once(digits, tmp_path_factory.mktemp("float32"), "float32")


@slow_but_first(("precision", "dtype"), [("bf16", "float32"), ("float16", "float16")])
def test_train_mnist_in_sixteen_bits_follows_float32(digits, tmp_path, losses_in_float32, precision, dtype):
    losses = train_mnist_once(digits, tmp_path, precision)
    with zipfile.ZipFile(tmp_path / "mnist_cnn.zip") as checkpoint:
        states = np.load(io.BytesIO(checkpoint.read("tensor_dict.npz")))
        assert {states[name].dtype.name for name in states if name.startswith("conv")} == {dtype}
    assert losses != losses_in_float32
    np.testing.assert_allclose(losses, losses_in_float32, rtol=2e-2)


def test_train_mnist_without_data_says_what_to_do(tmp_path):
    environment = {**os.environ, "MNIST_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "train_mnist.py")],
        env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S,
    )  # fmt: skip
    assert done.returncode != 0 and "DataError" in done.stderr and str(tmp_path) in done.stderr
    assert "Starting Epoch" not in done.stdout


def test_the_script_of_the_guide_trains_as_printed(tmp_path):
    page = (ROOT / "docs" / "data-parallel.md").read_text()
    [source] = re.findall(r"```python\n(import .*?)```", page, re.DOTALL)
    shown = "print(sgd.world_size, sgd.bytes_sent, out.shape, tensor.to_numpy(loss).tolist())\n"
    (tmp_path / "guide.py").write_text(source + shown)
    for command, expected in (([sys.executable], "1 0 (8, 10)"), (LAUNCH_2, "2 407080 (20, 10)")):
        assert expected in run(tmp_path, *command, tmp_path / "guide.py")


def test_the_script_of_the_readme_trains_as_printed(tmp_path, digits):
    [source] = re.findall(r"```python\n(from .*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (tmp_path / "train.py").write_text(source)
    number = len(load_mnist(digits).test_labels)
    for size, sent, command in ((1, 0, [sys.executable]), (2, 58664, LAUNCH_2)):
        output = run(digits, *command, tmp_path / "train.py")
        shares = re.findall(rf"(\d+) of {number // size} test images, {sent} bytes sent per step", output)
        assert len(shares) == size and sum(map(int, shares)) > number / 2


TO_FILES = 'exec "$1" "$2" > "$0/rank-$PMI_RANK"'  # mpiexec may break a line of one rank by another's


@pytest.mark.parametrize("launch", ["alone", "shm", "mpi"])
def test_the_tutorial_of_the_communicator_prints_the_gradients_of_nnabla(tmp_path, launch):
    script = ROOT / "examples" / "communicator_tutorial.py"
    if launch == "mpi":
        if mpi_missing():
            pytest.skip(mpi_missing())
        run(tmp_path, _mpiexec(), "-n", 2, "sh", "-c", TO_FILES, tmp_path, sys.executable, script)
        output = "".join(path.read_text() for path in tmp_path.glob("rank-*"))
    else:
        output = run(tmp_path, *(LAUNCH_2 if launch == "shm" else [sys.executable]), script)
    size = 1 if launch == "alone" else 2
    assert output.count(f"n_devices={size}\n") == size
    assert {int(rank) for rank in re.findall(r"mpi_rank=(\d)", output)} == set(range(size))
    assert f"summed over {size} processes and divided by {size}" in output
    biases = [float(text) for text in re.findall(r"conv/b \[(.*)\]", output)]
    own, mean = [3.597467, -0.007115][:size], 3.597467 if size == 1 else 1.795176
    np.testing.assert_allclose(sorted(biases), sorted([*own, *[mean] * size]), rtol=1e-4, atol=1e-4)
    [*losses] = re.findall(r"(?:loss|second update)=([\d.]+)", output)
    expected = [31.714787, 30.5698, 26.005419, 25.8651] if size == 2 else [31.714787]
    for value in expected:
        assert any(abs(float(loss) - value) < 1e-3 for loss in losses), losses


def test_mnist_over_a_key_value_store_has_equal_bits_wherever_gradients_are_summed(digits):
    """Servers change none, nor do slices the accuracy."""
    script = [ROOT / "examples" / "mnist_kvstore.py", "--epochs", 3]
    sums = set()
    for workers, servers, options in (
        (1, 0, ["--slices", 3, "--reduction", "mean"]),
        (2, 0, []),
        (2, 1, []),
        (2, 2, []),
    ):
        launch = [sys.executable, "-m", "singa_lite", "run", "-n", workers, "-s", servers]
        output = run(digits, *(launch if workers > 1 else launch[:1]), *script, *options)
        assert output.count(f"Total number of workers: {workers}\n") == workers
        assert {int(rank) for rank in re.findall(r"This worker's rank: (\d)", output)} == set(range(workers))
        assert f"{workers} workers, {servers} servers, device Device(cpu): gradients are summed" in output
        by = " and by 1 workers" if "mean" in options else ""
        where = f"{servers} servers" if servers else "every worker"
        assert f"divided by each worker's batch of 64{by}, and applied by {where}\n" in output
        tested = re.findall(r"Epoch (\d): Test accuracy = ([\d.]+)", output)
        assert sorted(int(epoch) for epoch, _ in tested) == sorted([0, 1, 2] * workers)
        assert len(set(tested)) == 3  # all workers print the same
        first, last = (float(dict(tested)[epoch]) for epoch in "02")
        assert last > first + 0.1
        printed = re.findall(r"crc32 of all parameters: (\w{8})", output)
        assert len(printed) == workers
        sums |= {(workers, crc) for crc in printed}
    assert len(sums) == 2


def test_train_adding_learns_to_add_on_two_processes(tmp_path):
    script = [
        ROOT / "examples" / "train_adding.py",
        "--mode",
        "gru",
        "--length",
        8,
        "--steps",
        200,
        "--hidden",
        16,
    ]
    output = run(tmp_path, *LAUNCH_2, *script)
    assert "world size 2, device Device(cpu), gru, dist_option fp32" in output
    [error] = re.findall(r"Mean square error of 1000 new sequences = ([\d.]+)", output)
    assert float(error) < 0.02  # to answer 1 always has 1/6


@slow_but_first(("ranks", "precision"), [(3, "fp32"), (2, "bf16"), (1, "fp32")])
def test_train_text_learns_and_keeps_equal_bits_on_all_ranks(tmp_path, ranks, precision):
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 40)
    script = [
        ROOT / "examples" / "train_text.py", tmp_path / "text.txt", "--layers", 1, "--width", 16, "--heads", 2,
        "--length", 16, "--batch-size", 8, "--steps", 60, "--lr", 0.01, "--write", 9, "--precision", precision,
    ]  # fmt: skip
    launch = [sys.executable] if ranks == 1 else [*LAUNCH_2[:-1], ranks]
    output = run(tmp_path, *launch, *script)
    assert f"world size {ranks}, device Device(cpu)" in output
    [first] = re.findall(r"step 1: loss ([\d.]+)", output)
    [train, test] = re.findall(r"Training loss = ([\d.]+), of text not trained on = ([\d.]+)", output)[0]
    assert float(first) > 3 and float(train) < 1.2 and float(test) < 1.2  # 28 characters: ln 28 = 3.3
    sums = re.findall(r"rank \d: parameters have the checksum (\w+)", output)
    assert len(sums) == ranks and len(set(sums)) == 1
    if ranks == 1:
        return
    eager = run(tmp_path, *launch, *script, "--no-graph")
    [again] = re.findall(r"Training loss = ([\d.]+)", eager)
    assert abs(float(again) - float(train)) < (1e-2 if precision == "fp32" else 2e-2)


@pytest.mark.slow
def test_train_text_stops_when_asked_and_goes_on_with_the_same_bits(tmp_path):
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 40)
    script = [
        ROOT / "examples" / "train_text.py", tmp_path / "text.txt", "--layers", 1, "--width", 16, "--heads", 2,
        "--length", 16, "--batch-size", 8, "--steps", 400, "--write", 9, "--no-graph",
    ]  # fmt: skip
    whole = run(tmp_path, *LAUNCH_2[:-1], 3, *script)
    saving = [*LAUNCH_2[:-1], 3, "--checkpoint", tmp_path / "job", *script]
    job = subprocess.Popen(
        [str(part) for part in saving], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert job.stdout is not None
    while "step 1: loss" not in (line := job.stdout.readline()):
        assert line
    job.terminate()
    output, errors = job.communicate(timeout=LIMIT_S)
    assert job.returncode == 0, errors
    [stopped] = re.findall(r"Stopped at step (\d+), as asked", output)
    assert 0 < int(stopped) < 400
    rest = run(tmp_path, *saving)
    assert f"Going on from step {stopped}\n" in rest
    sums = re.findall(r"rank \d: parameters have the checksum (\w+)", rest)
    assert len(sums) == 3 and set(sums) == set(re.findall(r"have the checksum (\w+)", whole))


def test_train_text_refuses_a_text_that_is_too_short(tmp_path):
    (tmp_path / "text.txt").write_text("short")
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "train_text.py"), str(tmp_path / "text.txt")],
        capture_output=True, text=True, timeout=LIMIT_S,
    )  # fmt: skip
    assert done.returncode != 0 and "5 characters are too few for pieces of 128" in done.stderr
