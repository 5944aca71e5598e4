# SPDX-License-Identifier: Apache-2.0
"""MXNet's page on training over hosts with Gluon, step by step: a key-value store under a Trainer.

    python examples/mnist_kvstore.py                              one process
    singa-lite run -n 2 -s 1 examples/mnist_kvstore.py            two workers and a server, which keeps the parameters
    singa-lite run -n 2 examples/mnist_kvstore.py                 without servers: every worker keeps a replica
    SINGA_LITE_NUM_SERVERS=2 mpiexec -n 4 python examples/mnist_kvstore.py        MPI, on one host or many

All processes run this script; in a server ``kvstore.create`` does its work until the workers have ended.

Differs from the page where it must: a rank drives one device, parts of the data lose no sample, and the losses are
means, so their gradients are multiplied by the number of samples.
"""

import argparse
import zlib

import numpy as np
from model.cnn import CNN

from singa_lite import autograd, communicators, data, device, gluon, kvstore, tensor

MEAN, STD = 0.1307, 0.3081  # of all training pixels / 255: inputs get mean 0 and variance 1
EVAL_BATCH = 500


def parse_arguments():
    parser = argparse.ArgumentParser(description="Train a CNN on MNIST through a key-value store")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=64, help="of each worker")
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--reduction", choices=("sum", "mean"), default="sum", help="over the workers")
    parser.add_argument("--slices", type=int, default=1, help="parts of a batch, on the one device")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mnist-dir", help="folder of the four IDX files")
    arguments = parser.parse_args()
    if min(arguments.epochs, arguments.batch_size, arguments.slices) < 1:
        parser.error("--epochs, --batch-size and --slices must be at least 1")
    return arguments


def main():
    arguments = parse_arguments()

    # ---- the store: a server ends here
    store = kvstore.create("dist")
    print(f"Total number of workers: {store.num_workers}")
    print(f"This worker's rank: {store.rank}", flush=True)

    # ---- the devices: the same one for every slice of a batch
    comm = communicators.MultiProcessCommunicator()
    comm.init()  # knows which of this host's processes this is
    ctx = [device.create_device(comm.local_rank)] * arguments.slices

    # ---- the network and the trainer: all workers begin with the parameters of worker 0
    ctx[0].SetRandSeed(arguments.seed)
    net = CNN()
    net.compile([tensor.Tensor((arguments.batch_size, 1, 28, 28), ctx[0])])
    trainer = gluon.Trainer(
        net.get_params(), "sgd", {"learning_rate": arguments.lr}, kvstore=store, reduction=arguments.reduction
    )
    if store.rank == 0:
        where = f"{store.num_servers} servers" if store.num_servers else "every worker"
        by_workers = f" and by {store.num_workers} workers" if arguments.reduction == "mean" else ""
        print(
            f"{store.num_workers} workers, {store.num_servers} servers, device {ctx[0]}: gradients are summed over the "
            f"samples and the workers, divided by each worker's batch of {arguments.batch_size}{by_workers}, and "
            f"applied by {where}",
            flush=True,
        )

    # ---- the data: a part of its own for each worker, in a new order each epoch
    mnist = data.load_mnist(arguments.mnist_dir)
    sampler = data.SplitSampler(len(mnist.train_labels), store.num_workers, store.rank, seed=arguments.seed)
    batches = data.batches(sampler, arguments.batch_size)

    for epoch in range(arguments.epochs):
        net.train()
        for indices in batches:
            x, y = data.make_batch(mnist.train_images, mnist.train_labels, indices, mean=MEAN, std=STD)
            train_batch(net, trainer, ctx, x, y)
        print(f"Epoch {epoch}: Test accuracy = {evaluate(net, ctx, mnist):.4f}", flush=True)
    print(f"crc32 of all parameters: {checksum(net):08x}", flush=True)


def train_batch(net, trainer, ctx, x, y):
    """One step: forward and backward of each slice, then the exchange and the update."""
    xs = gluon.utils.split_and_load(x, ctx, even_split=False)
    ys = gluon.utils.split_and_load(y, ctx, even_split=False)
    with autograd.record():
        losses = [net.softmax_cross_entropy(net.forward(X), Y) for X, Y in zip(xs, ys, strict=True)]
    for X, loss in zip(xs, losses, strict=True):
        loss.backward(len(X))  # adds the sum over the samples of the slice
    trainer.step(len(x))  # the last batch may hold one sample more


def evaluate(net, ctx, mnist):
    """The share of all test images that are classified correctly."""
    net.eval()
    correct = 0
    for start in range(0, len(mnist.test_labels), EVAL_BATCH):
        batch = slice(start, start + EVAL_BATCH)
        x, y = data.make_batch(mnist.test_images, mnist.test_labels, batch, mean=MEAN, std=STD)
        out = net(tensor.from_numpy(x, ctx[0]))
        correct += np.count_nonzero(tensor.to_numpy(out).argmax(axis=1) == y)
    return correct / len(mnist.test_labels)


def checksum(net):
    found = 0
    for _, param in sorted(net.get_params().items()):
        found = zlib.crc32(tensor.to_numpy(param).tobytes(), found)
    return found


if __name__ == "__main__":
    main()
