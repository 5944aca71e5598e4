# SPDX-License-Identifier: Apache-2.0
"""Time of a training step beside PyTorch on the CPU: same model, batch, optimizer and threads, in one run.

    python benchmarks/train_step.py                                       1 and 2 threads, all models
    python benchmarks/train_step.py --models cnn --threads 1 --rounds 40
    python benchmarks/train_step.py --torch-python ~/torch/bin/python     PyTorch installed elsewhere

Every mode is a process of its own that is asked in turn for a few steps, so that all see the machine in the
same state; the first round is not counted. A step is forward, loss, backward and SGD with momentum 0.9 and
weight decay. Printed: median step time, and each of our modes as a share of PyTorch's eager and best mode.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

MODELS_FOLDER = Path(__file__).resolve().parent.parent / "examples"
SHAPES = {"cnn": (64, 1, 28, 28), "mlp": (64, 784)}
OURS = ["eager"]
TORCH = ["torch eager", "torch channels_last", "torch compile"]
LR, MOMENTUM, WEIGHT_DECAY, CLASSES = 0.005, 0.9, 1e-5, 10


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--modes", nargs="+", choices=OURS + TORCH, default=OURS + TORCH)
    parser.add_argument("--rounds", type=int, default=20, help="turns of every mode")
    parser.add_argument("--steps", type=int, default=10, help="steps in a turn")
    parser.add_argument("--torch-python", default=sys.executable, help="a Python that has PyTorch")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        serve(*arguments.worker)
        return
    print(f"{processor()}, {os.cpu_count()} cores; load {os.getloadavg()[0]:.1f}; batch 64")
    print(
        f"{'model':6} {'threads':>7} {'mode':20} {'median ms':>9} {'/ eager':>8} {'/ best':>8}  (of PyTorch)"
    )
    for model in arguments.models:
        for threads in arguments.threads:
            report(model, threads, measure(model, threads, arguments))


def measure(model, threads, arguments):
    """{mode: step times in ms}; the workers take turns."""
    workers = {mode: start(mode, model, threads, arguments) for mode in arguments.modes}
    times = {mode: [] for mode in workers}
    try:
        for turn in range(arguments.rounds + 1):
            for mode in list(workers):
                answer = ask(workers[mode], arguments.steps)
                if answer is None:
                    print(
                        f"{mode}: ended, left out (is PyTorch installed? see --torch-python)", file=sys.stderr
                    )
                    workers.pop(mode).wait()
                elif turn:
                    times[mode] += answer
    finally:
        for worker in workers.values():
            worker.stdin.close()
            worker.wait()
    return {mode: values for mode, values in times.items() if values}


def start(mode, model, threads, arguments):
    python = arguments.torch_python if mode in TORCH else sys.executable
    variables = {**os.environ, "OMP_NUM_THREADS": str(threads), "OPENBLAS_NUM_THREADS": str(threads)}
    command = [python, __file__, "--worker", mode, model]
    return subprocess.Popen(command, env=variables, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def ask(worker, steps):
    """The times of so many steps in ms; None if the worker is gone."""
    try:
        worker.stdin.write(f"{steps}\n")
        worker.stdin.flush()
    except BrokenPipeError:
        return None
    line = worker.stdout.readline()
    return json.loads(line) if line else None


def serve(mode, model):
    """The worker: read a number of steps, write their times."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal(SHAPES[model]).astype(np.float32)
    labels = rng.integers(0, CLASSES, x.shape[0])
    step = torch_step(mode, model, x, labels) if mode in TORCH else our_step(model, x, labels)
    for line in sys.stdin:
        times = []
        for _ in range(int(line)):
            begin = time.perf_counter()
            step()
            times.append((time.perf_counter() - begin) * 1e3)
        print(json.dumps(times), flush=True)


def our_step(model, x, labels):
    sys.path.insert(0, str(MODELS_FOLDER))
    from model.cnn import CNN
    from model.mlp import MLP

    from singa_lite import opt, tensor

    class Plain(opt.SGD):
        def __call__(self, loss, dist_option=None, spars=None):  # the models hand these on for DistOpt
            super().__call__(loss)

    network = {"cnn": CNN, "mlp": MLP}[model]()
    x, labels = tensor.from_numpy(x), tensor.from_numpy(labels.astype(np.int32))
    network.set_optimizer(Plain(lr=LR, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY))
    network.compile([x])
    return lambda: network(x, labels)


def torch_step(mode, model, x, labels):
    import torch
    from torch import nn

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    networks = {
        "cnn": lambda: nn.Sequential(
            nn.Conv2d(1, 20, 5), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(20, 50, 5), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(800, 500), nn.ReLU(), nn.Linear(500, CLASSES),
        ),
        "mlp": lambda: nn.Sequential(
            nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, CLASSES)
        ),
    }  # fmt: skip
    network, x, labels = networks[model](), torch.from_numpy(x), torch.from_numpy(labels)
    if mode == "torch channels_last" and x.ndim == 4:
        network = network.to(memory_format=torch.channels_last)
        x = x.contiguous(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(network.parameters(), lr=LR, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY)
    call = torch.compile(network) if mode == "torch compile" else network

    def step():
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(call(x), labels)
        loss.backward()
        optimizer.step()

    return step


def report(model, threads, times):
    medians = {mode: statistics.median(values) for mode, values in times.items()}
    theirs = {mode: medians[mode] for mode in TORCH if mode in medians}
    for mode, median in medians.items():
        shares = ""
        if mode in OURS and theirs:
            eager = f"{median / theirs['torch eager']:8.2f}" if "torch eager" in theirs else " " * 8
            shares = f"{eager} {median / min(theirs.values()):8.2f}"
        print(f"{model:6} {threads:7} {mode:20} {median:9.2f} {shares}", flush=True)


def processor():
    """The processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next(
        (line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine()
    )


if __name__ == "__main__":
    main()
