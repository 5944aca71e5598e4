# SPDX-License-Identifier: Apache-2.0
"""examples/train_cifar.py on random images and on files of the CIFAR-10 format, on one process and on two."""

import argparse
import importlib.util
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from singa_lite.data import ShardedSampler, synthetic_cifar10
from tests.limits import LIMIT_S

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "examples" / "train_cifar.py"
LAUNCH_2 = [sys.executable, "-m", "singa_lite", "run", "-n", "2"]


def start(*command, **environment):
    return subprocess.run(
        [str(part) for part in command],
        env={**os.environ, "MPLBACKEND": "Agg", **environment},
        cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S,
    )  # fmt: skip


def run(*command):
    """What the command prints on stdout and stderr; it must succeed within its deadline."""
    done = start(*command)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def numbers(pattern, output):
    return [float(text) for text in re.findall(rf"{pattern} = ([\d.]+)", output)]


@pytest.fixture
def folder(tmp_path):
    """Six files of the binary format: 60 + 20 images."""
    images = synthetic_cifar10(60, 20, seed=1)
    records = [
        np.concatenate([labels[:, None], pixels.reshape(len(labels), -1)], axis=1)
        for pixels, labels in (images[:2], images[2:])
    ]
    for number in range(5):
        (tmp_path / f"data_batch_{number + 1}.bin").write_bytes(records[0][12 * number :][:12].tobytes())
    (tmp_path / "test_batch.bin").write_bytes(records[1].tobytes())
    return tmp_path


def test_one_process_learns_random_images_and_leaves_plot_and_checkpoint(tmp_path):
    options = ["--synthetic", 200, "--model", "cnn", "--epochs", 3, "--batch-size", 32, "--out", tmp_path]
    output = run(sys.executable, SCRIPT, *options)
    assert "world size 1, transport local, device Device(cpu), effective batch 32 x 1 = 32" in output
    assert "model cnn, data random images, not CIFAR-10: 200 training and 40 test images" in output
    assert [int(epoch) for epoch in re.findall(r"Starting Epoch (\d):", output)] == [0, 1, 2]
    losses, tested = numbers("Training loss", output), numbers("Evaluation accuracy", output)
    assert len(losses) == 3 and losses[2] < 0.7 * losses[0] and tested[2] > 0.3
    assert output.count("images/s") == 3 and "7/7 loss" in output
    assert (tmp_path / "cifar_cnn.zip").exists() and (tmp_path / "cifar_cnn.png").stat().st_size > 10_000


def test_two_ranks_train_a_resnet_on_files_and_count_every_image(folder, tmp_path):
    options = [
        "--cifar-dir",
        folder,
        "--epochs",
        2,
        "--batch-size",
        15,
        "--lr",
        0.02,
        "--dist-option",
        "fp16",
    ]
    output = run(*LAUNCH_2, SCRIPT, *options, "--out", tmp_path / "out")
    assert "world size 2, transport shm" in output and "dist_option fp16" in output
    assert "model resnet20, data CIFAR-10: 60 training and 20 test images; all of CIFAR-10" in output
    losses = numbers("Training loss", output)
    assert len(losses) == 2 and losses[1] < losses[0]
    for accuracies, count in (("training accuracy", 60), ("Evaluation accuracy", 20)):
        for accuracy in numbers(accuracies, output):  # whole images over the whole data set
            assert math.isclose(accuracy * count, round(accuracy * count), abs_tol=1e-3)
    assert "2/2 loss" in output and (tmp_path / "out" / "cifar_resnet20.zip").exists()


@pytest.mark.slow
def test_a_run_repeats_bit_for_bit(tmp_path):
    options = ["--synthetic", 80, "--model", "mlp", "--epochs", 2, "--batch-size", 16, "--out", tmp_path]
    first, again = (run(*LAUNCH_2, SCRIPT, *options) for _ in range(2))
    pattern = r"loss = ([\d.]+), training accuracy = ([\d.]+)"
    assert re.findall(pattern, first) == re.findall(pattern, again) != []


@pytest.mark.slow
def test_workers_of_a_key_value_store_print_the_same_accuracy(folder):
    """Each has its own statistics of batch norm, and with dist_async weights of its own, until synchronize()."""
    script = ROOT / "examples" / "cifar_kvstore.py"
    random = ["--synthetic", 100, "--steps", 5, "--epochs", 2]
    files = ["--cifar-dir", folder, "--model", "resnet18", "--steps", 1, "--epochs", 1]
    for store, options, what, how in (
        (
            "dist",
            random,
            "resnet20, data random images, not CIFAR-10",
            "summed over the workers and divided by 2",
        ),
        ("dist_async", files, "resnet18, data CIFAR-10", "applied as they come, each worker's on its own"),
    ):
        output = run(*LAUNCH_2, "-s", 1, script, "--batch-size", 8, "--kvstore", store, *options)
        assert f"2 workers, 1 servers, {store}, device Device(cpu)" in output
        assert f"model {what}; gradients of batch means are {how}" in output
        tested = re.findall(r"Epoch (\d): Test accuracy = ([\d.]+)", output)
        assert len(tested) == 2 * options[-1] and len(set(tested)) == options[-1]
        losses = numbers("mean loss of this worker", output)
        assert len(losses) == len(set(losses)) == 2 * options[-1]


def test_without_data_it_says_what_to_do_and_makes_nothing_up(tmp_path):
    done = start(sys.executable, SCRIPT, "--cifar-dir", tmp_path)
    assert done.returncode != 0 and "DataError" in done.stderr and str(tmp_path) in done.stderr
    assert "Starting Epoch" not in done.stdout


@pytest.fixture(scope="module")
def script():
    """The script as a module."""
    sys.path.insert(0, str(SCRIPT.parent))
    try:
        spec = importlib.util.spec_from_file_location("train_cifar_script", SCRIPT)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.path.remove(str(SCRIPT.parent))
        for name in [name for name in sys.modules if name.split(".")[0] == "model"]:
            del sys.modules[name]


def test_the_ranks_average_their_statistics_before_each_evaluation(script, tmp_path, monkeypatch):
    calls = []
    synchronize, evaluate = script.opt.DistOpt.synchronize, script.evaluate
    note = [(script.opt.DistOpt, "synchronize", synchronize), (script, "evaluate", evaluate)]
    for owner, name, function in note:
        noted = lambda *args, name=name, function=function: calls.append(name) or function(*args)  # noqa: E731
        monkeypatch.setattr(owner, name, noted)
    options = ["--synthetic", "20", "--model", "mlp", "--epochs", "2", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["train_cifar.py", *options])
    script.main()
    assert calls == ["synchronize", "evaluate"] * 2


def test_the_learning_rate_grows_in_a_line_and_falls_along_half_a_cosine(script):
    schedule = script.WarmupCosine(0.8, 4, 20)
    assert [schedule(step) for step in range(4)] == pytest.approx([0.2, 0.4, 0.6, 0.8])
    assert [schedule(step) for step in (4, 12, 20, 25)] == pytest.approx([0.8, 0.4, 0.0, 0.0])
    assert all(schedule(step) > schedule(step + 1) for step in range(4, 19))
    assert script.WarmupCosine(0.8, 0, 1)(0) == 0.8
    assert script.WarmupCosine(0.8, 4, 20, ahead=5)(7) == schedule(12)


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_on_other_ranks_the_learning_rate_goes_on_where_it_was(script, ranks):
    """0.625 of the job is done: an epoch and half of the second of two, by two ranks."""
    arguments, seen = argparse.Namespace(epochs=2), ShardedSampler(96, 4, 0, 2)
    for epoch in range(2):
        assert seen.epoch == epoch
        for number, _ in enumerate(seen):
            if (epoch, number) == (1, 2):
                state = seen.state_dict()
                break
    assert script.share_done(seen, arguments) == (1 + 3 * 8 / 96) / 2 == 0.625
    others = ShardedSampler(96, 4, 0, ranks)
    others.load_state_dict(state)
    assert script.share_done(others, arguments) == 0.625


def test_the_batches_of_all_ranks_are_the_whole_epoch_each_image_changed_on_its_own(script):
    images = synthetic_cifar10(50, 1)
    seen = []
    for rank in range(3):
        sampler = script.data.ShardedSampler(50, 4, rank, 3, seed=5)
        expected = list(script.data.ShardedSampler(50, 4, rank, 3, seed=5))
        batches = list(script.make_batches(images, sampler, 5))
        again = list(script.make_batches(images, script.data.ShardedSampler(50, 4, rank, 3, seed=5), 5))
        assert [y.tolist() for _, y in batches] == [images.train_labels[i].tolist() for i in expected]
        assert all((x == x2).all() for (x, _), (x2, _) in zip(batches, again, strict=True))
        seen += np.concatenate(expected).tolist()
    assert sorted(seen) == list(range(50))


def test_every_rank_epoch_and_step_changes_its_images_in_its_own_way(script):
    images = synthetic_cifar10(1, 1)
    same = images._replace(
        train_images=images.train_images.repeat(40, 0), train_labels=np.zeros(40, np.uint8)
    )
    found = set()
    for rank in range(2):
        sampler = script.data.ShardedSampler(40, 10, rank, 2, shuffle=False)
        found |= {x.tobytes() for _ in range(3) for x, _ in script.make_batches(same, sampler, 0)}
    assert sampler.epoch == 3 and len(found) == 2 * 3 * 2
