# SPDX-License-Identifier: Apache-2.0
"""Accuracy, time and bytes of every dist_option: the MNIST CNN trained once for each option and seed.

    python benchmarks/dist_options.py                                    five options, 2 ranks, 2 epochs, 1 seed
    python benchmarks/dist_options.py fp32 sparseTopK:0.01 --seeds 0 1   some, on two seeds
    python benchmarks/dist_options.py --ranks 4 --epochs 5 --out runs/options

An option is a dist_option; "partialUpdate:x" is partialUpdate with a threshold of x elements (the default of 2,097,152
would put this CNN of 431,080 parameters into a single chunk).
Options alternate within a seed. Step time and waiting are medians over all steps on rank 0; accuracy is of
all 10,000 test images after the last epoch; loss is the mean over the last epoch's batches and ranks.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
OPTIONS = ["fp32", "fp16", "bf16", "partialUpdate:50000", "sparseTopK:0.05", "sparseThreshold:0.001"]
BATCH, EVAL_BATCH, LR, MOMENTUM, WEIGHT_DECAY = 64, 500, 0.005, 0.9, 1e-5
MEAN, STD = 0.1307, 0.3081


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("options", nargs="*", default=OPTIONS, metavar="OPTION")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument(
        "--out", type=Path, default=Path("runs/dist_options"), help="folder for JSON and plot"
    )
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        train(arguments.options[0], arguments.epochs, arguments.seeds[0], Path(arguments.worker))
        return
    runs = {option: [] for option in arguments.options}
    for seed in arguments.seeds:
        for option in arguments.options:
            runs[option].append(launch(option, seed, arguments))
            print(
                f"seed {seed} {option}: accuracy {runs[option][-1]['accuracy']:.4f}",
                file=sys.stderr,
                flush=True,
            )
    rows = [summary(option, runs[option], runs[arguments.options[0]]) for option in arguments.options]
    print_table(rows, arguments)
    arguments.out.mkdir(parents=True, exist_ok=True)
    report = {
        "machine": machine(),
        "ranks": arguments.ranks,
        "epochs": arguments.epochs,
        "rows": rows,
        "runs": runs,
    }
    (arguments.out / "dist_options.json").write_text(json.dumps(report, indent=1))
    plot(runs, arguments.out / "dist_options.png")
    print(f"saved: {(arguments.out / 'dist_options.json').resolve()}")


def launch(option, seed, arguments):
    """Train one option on one seed in processes of its own; what rank 0 measured."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [
            *[sys.executable, "-m", "singa_lite", "run", "-n", str(arguments.ranks), __file__, option],
            *["--epochs", str(arguments.epochs), "--seeds", str(seed), "--worker", str(result)],
        ]
        subprocess.run(command, check=True, stdout=sys.stderr)
        return json.loads(result.read_text())


def train(option, epochs, seed, result):
    """What one rank does."""
    sys.path.insert(0, str(ROOT / "examples"))
    from model.cnn import CNN

    from singa_lite import data, device, opt, tensor

    name, _, value = option.partition(":")
    is_partial = name == "partialUpdate"
    threshold = {"threshold": int(value)} if value and is_partial else {}
    dist = opt.DistOpt(opt.SGD(lr=LR, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY), **threshold)
    dev = device.create_device(dist.local_rank)
    dev.SetRandSeed(seed)
    cnn = CNN()
    cnn.set_optimizer(dist)
    cnn.compile([tensor.zeros((BATCH, 1, 28, 28), dev)])
    mnist = data.load_mnist()
    sampler = data.ShardedSampler(
        len(mnist.train_labels), BATCH, dist.global_rank, dist.world_size, seed=seed
    )
    steps, waits, history, sent, payload = [], [], [], 0, 0
    for _ in range(epochs):
        cnn.train()
        loss_sum = 0.0
        for indices in sampler:
            x, y = data.make_batch(mnist.train_images, mnist.train_labels, indices, mean=MEAN, std=STD)
            x, y = tensor.from_numpy(x, dev), tensor.from_numpy(y, dev)
            start = time.perf_counter()
            _, loss = cnn(x, y, name if is_partial else option)
            steps.append(time.perf_counter() - start)
            waits.append(dist.wait_s)
            sent, payload = sent + dist.bytes_sent, payload + dist.bytes_payload
            loss_sum += loss.item()
        if not dist.keeps_equal:
            dist.synchronize(cnn)
        cnn.eval()
        share = data.partition(len(mnist.test_labels), dist.global_rank, dist.world_size)
        correct = 0
        for first in range(share.start, share.stop, EVAL_BATCH):
            batch = slice(first, min(first + EVAL_BATCH, share.stop))
            x, y = data.make_batch(mnist.test_images, mnist.test_labels, batch, mean=MEAN, std=STD)
            correct += np.count_nonzero(tensor.to_numpy(cnn(tensor.from_numpy(x, dev))).argmax(axis=1) == y)
        totals = np.array([loss_sum, correct], np.float64)
        dist.all_reduce(totals)
        history.append(
            {
                "loss": totals[0] / (len(sampler) * dist.world_size),
                "accuracy": totals[1] / len(mnist.test_labels),
            }
        )
    if dist.global_rank == 0:
        measured = {
            **history[-1],
            "step_ms": 1e3 * statistics.median(steps),
            "wait_ms": 1e3 * statistics.median(waits),
            "bytes_sent": sent / len(steps),
            "bytes_payload": payload / len(steps),
            "history": history,
        }
        result.write_text(json.dumps(measured))


def summary(option, runs, first_runs):
    """Means over the seeds, and the ratio of bytes to those of the first option."""
    figures = ("accuracy", "loss", "step_ms", "wait_ms", "bytes_sent", "bytes_payload")
    row = {figure: statistics.mean(run[figure] for run in runs) for figure in figures}
    reference = statistics.mean(run["bytes_sent"] for run in first_runs)
    return {"option": option, **row, "ratio": reference / row["bytes_sent"] if row["bytes_sent"] else None}


def print_table(rows, arguments):
    print(
        f"{machine()}\n{arguments.ranks} ranks, batch {BATCH} a rank, {arguments.epochs} epochs, seeds "
        f"{arguments.seeds}, SGD lr {LR} momentum {MOMENTUM} weight decay {WEIGHT_DECAY}, "
        f"inputs (pixel / 255 - {MEAN}) / {STD}\n"
    )
    first = rows[0]["option"]
    print(f"| option | accuracy | loss | step ms | waited ms | bytes sent | payload | {first} bytes / its |")
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        ratio = f"{row['ratio']:.1f}" if row["ratio"] else "-"
        print(
            f"| {row['option']} | {100 * row['accuracy']:.2f} % | {row['loss']:.4f} | {row['step_ms']:.1f} | "
            f"{row['wait_ms']:.2f} | {row['bytes_sent']:,.0f} | {row['bytes_payload']:,.0f} | {ratio} |"
        )


def machine():
    cpus = {
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    }
    return f"{', '.join(cpus)}, {os.cpu_count()} cores, Python {platform.python_version()}, numpy {np.__version__}"


def plot(runs, path):
    """Accuracy over bytes sent in all, one line an option; nothing without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        print("no plot: pip install 'singa-lite[plot]' draws one")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4))
    for option, of_option in runs.items():
        accuracies = np.mean([[epoch["accuracy"] for epoch in run["history"]] for run in of_option], axis=0)
        left.plot(range(1, len(accuracies) + 1), 100 * accuracies, marker=".", label=option)
        sent = statistics.mean(run["bytes_sent"] for run in of_option)
        right.scatter(sent, 100 * accuracies[-1], label=option)
    left.set(xlabel="epoch", ylabel="evaluation accuracy, %")
    left.legend(fontsize=8)
    right.set(xlabel="bytes sent per step and rank", ylabel="evaluation accuracy, %", xscale="log")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    print(f"plot: {path.resolve()}")


if __name__ == "__main__":
    main()
