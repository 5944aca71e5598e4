# SPDX-License-Identifier: Apache-2.0
"""Test accuracy after training in bfloat16 beside float32: same weights, same batches, recorded steps.

    python benchmarks/precision.py                                     the CNN, 2 epochs of MNIST, 3 seeds
    python benchmarks/precision.py --model resnet20 --folder /usr/share/datasets/fashion-mnist --epochs 3 --seeds 0 1

``--folder`` holds the four IDX files of MNIST or of a data set in its form, such as Fashion-MNIST, which Debian has as
dataset-fashion-mnist. One process, batches of 64, SGD with momentum 0.9; the last batch of an epoch is left out if it
is smaller. The learning rate falls linearly to 0, or the last few batches would decide more than the precision.
Printed: accuracy and last loss of every run, their means by precision, the difference of the accuracies.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

import numpy as np
from interleaved import machine
from steps import MOMENTUM, WEIGHT_DECAY, find_network

from singa_lite import data, device, opt, tensor

BATCH = 64
EVAL_BATCH = 500
PRECISIONS = ["fp32", "bf16"]


class LinearDecay(opt.DecayScheduler):
    """init_value at step 0, less by the same amount every step, 0 from ``num_steps`` on."""

    def __init__(self, init_value: float, num_steps: int) -> None:
        super().__init__(init_value)
        self.num_steps = num_steps

    def call(self, step: int) -> float:
        return self.init_value * max(0.0, 1 - step / self.num_steps)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=["cnn", "resnet20", "resnet18"], default="cnn")
    parser.add_argument("--folder", help="of the four IDX files; MNIST is fetched if not given")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--lr", type=float, default=0.005)
    arguments = parser.parse_args()
    arrays = data.load_mnist(arguments.folder)
    print(f"{machine()}; {arguments.model}, {arguments.epochs} epochs of {arguments.folder or 'MNIST'}")
    accuracies: dict[str, list[float]] = {precision: [] for precision in PRECISIONS}
    for seed in arguments.seeds:
        for precision in PRECISIONS:
            start = time.perf_counter()
            accuracy, loss = train(arrays, precision, seed, arguments)
            accuracies[precision].append(accuracy)
            print(
                f"seed {seed} {precision}: {accuracy:.2f} %, last loss {loss:.6f}, {time.perf_counter() - start:.0f} s",
                flush=True,
            )
    means = {precision: statistics.mean(values) for precision, values in accuracies.items()}
    print(", ".join(f"{precision} {mean:.3f} %" for precision, mean in means.items()))
    print(f"bf16 - fp32: {means['bf16'] - means['fp32']:+.3f} points; load {os.getloadavg()[0]:.1f}")


def train(
    arrays: data.Mnist, precision: str, seed: int, arguments: argparse.Namespace
) -> tuple[float, float]:
    """Train one network; its test accuracy in percent and its last loss."""
    device.get_default_device().SetRandSeed(seed)
    network = find_network(arguments.model)()
    num_steps = arguments.epochs * (len(arrays.train_labels) // BATCH)
    sgd = opt.SGD(lr=LinearDecay(arguments.lr, num_steps), momentum=MOMENTUM, weight_decay=WEIGHT_DECAY)
    network.set_optimizer(opt.DistOpt(sgd))
    pixels = arrays.train_images / np.float32(255)
    mean, std = float(pixels.mean()), float(pixels.std())
    x, y = (tensor.from_numpy(a) for a in data.make_batch(*arrays[:2], slice(0, BATCH), mean=mean, std=std))
    network.compile([x], use_graph=True, precision=precision)
    network.train()
    rng = np.random.default_rng(seed)
    for _ in range(arguments.epochs):
        order = rng.permutation(len(arrays.train_labels))
        for start in range(0, len(order) - BATCH + 1, BATCH):
            indices = order[start : start + BATCH]
            x, y = (tensor.from_numpy(a) for a in data.make_batch(*arrays[:2], indices, mean=mean, std=std))
            _, loss = network(x, y)
    network.eval()
    correct = 0
    for start in range(0, len(arrays.test_labels), EVAL_BATCH):
        images, labels = data.make_batch(*arrays[2:], slice(start, start + EVAL_BATCH), mean=mean, std=std)
        out = tensor.to_numpy(network(tensor.from_numpy(images)))
        correct += np.count_nonzero(out.argmax(axis=1) == labels)
    return 100 * correct / len(arrays.test_labels), loss.item()


if __name__ == "__main__":
    main()
