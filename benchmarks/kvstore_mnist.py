# SPDX-License-Identifier: Apache-2.0
"""Accuracy of a Trainer over servers beside DistOpt: the MNIST CNN trained once for each way and seed.

    python benchmarks/kvstore_mnist.py                          4 ways, 2 workers, 1 server, 2 epochs, seeds 0 and 1
    python benchmarks/kvstore_mnist.py --only async --seeds 0   some

Every way trains on the same batches: 64 images a worker of the epoch's order, gradients of means, SGD with momentum.
``dist_async`` updates by each push, at most one push ahead of the slowest worker. Before the evaluation all workers get
the newest parameters. Printed: accuracy over all 10,000 test images after the last epoch, and the time of the run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from interleaved import machine

if TYPE_CHECKING:
    from singa_lite.data import Mnist
    from singa_lite.model import Model

ROOT = Path(__file__).resolve().parent.parent
WORKERS = 2
BATCH, EVAL_BATCH, LR, MOMENTUM, WEIGHT_DECAY = 64, 500, 0.005, 0.9, 1e-5
MEAN, STD = 0.1307, 0.3081
# name -> servers, store (None: DistOpt), its staleness, compression
WAYS: dict[str, tuple[int, str | None, int | None, dict[str, Any] | None]] = {
    "DistOpt fp32": (0, None, None, None),
    "dist_sync": (1, "dist_sync", None, None),
    "dist_sync, 2bit": (1, "dist_sync", None, {"type": "2bit", "threshold": 0.05}),
    "dist_async, staleness 1": (1, "dist_async", 1, None),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--only", default="", help="ways whose names contain this")
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        way, seed, epochs, path = arguments.worker
        train(way, int(seed), int(epochs), Path(path))
        return
    print(f"{machine()}; {WORKERS} workers, {arguments.epochs} epochs")
    found: dict[str, list[float]] = {}
    for seed in arguments.seeds:
        for way in WAYS:
            if arguments.only in way:
                begin = time.perf_counter()
                accuracy = run(way, seed, arguments.epochs)
                found.setdefault(way, []).append(accuracy)
                seconds = time.perf_counter() - begin
                print(f"{way:26} seed {seed}: {100 * accuracy:.2f} %, {seconds:.0f} s", flush=True)
    for way, values in found.items():
        print(f"{way:26} mean {100 * statistics.mean(values):.2f} %")


def run(way: str, seed: int, epochs: int) -> float:
    """Start a job; return the accuracy."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.json"
        launcher = [sys.executable, "-m", "singa_lite", "run", "-n", str(WORKERS), "-s", str(WAYS[way][0])]
        work = [__file__, "--worker", way, str(seed), str(epochs), str(path)]
        subprocess.run([*launcher, *work], check=True, stdout=subprocess.DEVNULL)
        return float(json.loads(path.read_text()))


def train(way: str, seed: int, epochs: int, path: Path) -> None:
    """Do a worker's part; worker 0 writes the accuracy."""
    sys.path.insert(0, str(ROOT / "examples"))
    from model.cnn import CNN

    from singa_lite import autograd, data, device, gluon, kvstore, opt, tensor

    _, store_name, staleness, compression = WAYS[way]
    sgd = opt.SGD(lr=LR, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY)
    if store_name:
        store = kvstore.create(store_name, staleness=staleness)  # where a server stays
        rank = store.rank
    else:
        dist = opt.DistOpt(sgd)
        rank = dist.global_rank
    mnist = data.load_mnist()
    device.get_default_device().SetRandSeed(seed)
    model = CNN()
    model.compile([tensor.Tensor((BATCH, 1, 28, 28))], use_graph=False)
    if store_name:
        trainer = gluon.Trainer(
            model.get_params(), sgd, kvstore=store, compression_params=compression, reduction="mean"
        )
    else:
        dist.prepare(model.get_params(), {})
    sampler = data.ShardedSampler(len(mnist.train_labels), BATCH, rank, WORKERS, seed=seed)
    model.train()
    for _ in range(epochs):
        for indices in sampler:
            x, y = data.make_batch(mnist.train_images, mnist.train_labels, indices, mean=MEAN, std=STD)
            out = model.forward(tensor.from_numpy(x))
            loss = autograd.softmax_cross_entropy(out, tensor.from_numpy(y))
            if store_name:
                loss.backward()
                trainer.step(1)
            else:
                dist(loss)
    if store_name:
        trainer.synchronize(model)
    if rank == 0:
        path.write_text(json.dumps(evaluate(model, mnist)))


def evaluate(model: Model, mnist: Mnist) -> float:
    """Return the share of the test images that are classified correctly."""
    from singa_lite import data, tensor

    model.eval()
    correct = 0
    for start in range(0, len(mnist.test_labels), EVAL_BATCH):
        batch = slice(start, start + EVAL_BATCH)
        x, y = data.make_batch(mnist.test_images, mnist.test_labels, batch, mean=MEAN, std=STD)
        out = model.forward(tensor.from_numpy(x))
        correct += np.count_nonzero(tensor.to_numpy(out).argmax(axis=1) == y)
    return correct / len(mnist.test_labels)


if __name__ == "__main__":
    main()
