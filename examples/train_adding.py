# SPDX-License-Identifier: Apache-2.0
"""Train a recurrent network to add two numbers far apart in a sequence, on any number of processes.

    python examples/train_adding.py                                       one process
    singa-lite run -n 2 examples/train_adding.py --mode gru               two processes of this machine
    singa-lite run -n 4 examples/train_adding.py --dist-option fp16       four, gradients as half floats
    mpiexec -n 2 python examples/train_adding.py                          MPI or, with srun, Slurm

Each step of a sequence has a number in 0 .. 1 and a mark, which is 1 at one step of either half and 0 elsewhere. The
network gives one number, the sum of the two that are marked. To answer 1 always has a mean square error of 1/6; below
0.01 both numbers are remembered. Every process draws its own sequences.

Source: Hochreiter, Schmidhuber, "Long Short-Term Memory", 1997, the adding problem.
"""

import argparse
import time

import numpy as np

from singa_lite import autograd, data, device, layer, model, opt, tensor

TEST_SEQUENCES = 1000


class Adder(model.Model):
    """A recurrent layer whose last state gives the sum."""

    def __init__(self, hidden_size, num_layers, mode):
        super().__init__()
        self.recurrent = layer.CudnnRNN(
            hidden_size, num_layers=num_layers, rnn_mode=mode, return_sequences=False
        )
        self.head = layer.Linear(1)

    def forward(self, x):
        return self.head(self.recurrent(x))

    def train_one_batch(self, x, y, dist_option, spars):
        out = self.forward(x)
        loss = autograd.mse_loss(out, y)
        self.optimizer(loss, dist_option=dist_option, spars=spars)
        return out, loss


def parse_arguments():
    parser = argparse.ArgumentParser(description="Train a recurrent network on the adding problem")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch-size", type=int, default=64, help="sequences per process")
    parser.add_argument("--length", type=int, default=30, help="steps of a sequence")
    parser.add_argument("--hidden", type=int, default=32)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--mode", default="lstm", choices=["lstm", "gru", "tanh", "relu"])
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--dist-option", default="fp32", help="such as fp16 or sparseTopK:0.01")
    parser.add_argument("--spars", type=float, help="share (sparseTopK) or magnitude (sparseThreshold)")
    parser.add_argument(
        "--graph", action=argparse.BooleanOptionalAction, default=True, help="record the steps"
    )
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.steps < 1 or arguments.batch_size < 1 or arguments.length < 2:
        parser.error("--steps and --batch-size must be at least 1, --length at least 2")
    return arguments


def sequences(rng, count, length):
    """(count, length, 2) numbers and marks, and (count, 1) sums."""
    numbers, marks = rng.uniform(0, 1, (count, length)), np.zeros((count, length))
    rows, half = np.arange(count), length // 2
    marks[rows, rng.integers(0, half, count)] = 1
    marks[rows, rng.integers(half, length, count)] = 1
    x, y = np.stack([numbers, marks], 2), (numbers * marks).sum(1, keepdims=True)
    return x.astype(np.float32), y.astype(np.float32)


def main():
    arguments = parse_arguments()
    adam = opt.DistOpt(opt.Adam(lr=arguments.lr))
    dev = device.create_device(adam.local_rank)
    dev.SetRandSeed(arguments.seed)
    adder = Adder(arguments.hidden, arguments.layers, arguments.mode)
    adder.set_optimizer(adam)
    shape = (arguments.batch_size, arguments.length, 2)
    adder.compile([tensor.zeros(shape, dev)], use_graph=arguments.graph)
    is_first = adam.global_rank == 0
    if is_first:
        print(
            f"world size {adam.world_size}, device {dev}, {arguments.mode}, dist_option {arguments.dist_option}"
        )

    rng = np.random.default_rng([arguments.seed, 1 + adam.global_rank])
    start = time.perf_counter()
    for step in range(1, arguments.steps + 1):
        x, y = (tensor.from_numpy(array, dev) for array in sequences(rng, *shape[:2]))
        _, loss = adder(x, y, arguments.dist_option, arguments.spars)
        if is_first and step % 100 == 0:
            print(f"step {step}: loss {loss.item():.5f}", flush=True)
    dev.Sync()
    seconds = time.perf_counter() - start
    if not adam.keeps_equal:
        adam.synchronize(adder)  # between averages a parameter differs from rank to rank
    error = evaluate(adder, adam, dev, arguments)
    if is_first:
        speed = arguments.steps * arguments.batch_size * adam.world_size / seconds
        print(f"{speed:.0f} sequences/s, {adam.bytes_sent} bytes sent per step and rank")
        print(f"Mean square error of {TEST_SEQUENCES} new sequences = {error:.5f}", flush=True)


def evaluate(adder, adam, dev, arguments):
    """The mean square error on sequences that all processes draw alike; each looks at its share of them."""
    adder.eval()
    x, y = sequences(np.random.default_rng([arguments.seed, 0]), TEST_SEQUENCES, arguments.length)
    share = data.partition(TEST_SEQUENCES, adam.global_rank, adam.world_size)
    out = tensor.to_numpy(adder(tensor.from_numpy(x[share.start : share.stop], dev)))
    total = np.array([((out - y[share.start : share.stop]) ** 2).sum()], np.float64)
    adam.all_reduce(total)
    return total[0] / TEST_SEQUENCES


if __name__ == "__main__":
    main()
