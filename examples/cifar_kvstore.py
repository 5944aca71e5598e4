# SPDX-License-Identifier: Apache-2.0
"""Train a ResNet on CIFAR-10 with a Trainer over a key-value store, as the README of MXNet's example does.

    python examples/cifar_kvstore.py --cifar-dir cifar                          one process
    singa-lite run -n 2 -s 1 examples/cifar_kvstore.py --model resnet18         two workers and a server
    singa-lite run -n 2 -s 1 examples/cifar_kvstore.py --synthetic --steps 5    random images, to try it

MXNet's workers print different accuracies, since each has its own running statistics of batch norm. Here
``trainer.synchronize(net)`` averages them before each evaluation, so all workers print the same.
"""

import argparse
from itertools import islice

import numpy as np
from model.resnet import ResNet18, ResNet20

from singa_lite import autograd, communicators, data, device, gluon, kvstore, tensor

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)  # of all training pixels / 255, by colour
EVAL_BATCH = 250
MODELS = {"resnet20": ResNet20, "resnet18": ResNet18}


def parse_arguments():
    parser = argparse.ArgumentParser(description="Train a ResNet on CIFAR-10 through a key-value store")
    parser.add_argument("--model", choices=MODELS, default="resnet20")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--steps", type=int, help="at most so many an epoch")
    parser.add_argument("--batch-size", type=int, default=64, help="of each worker")
    parser.add_argument("--lr", type=float, default=0.001)
    parser.add_argument("--kvstore", default="dist", help="dist, or dist_async, which needs servers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--cifar-dir", help="folder of the binary files, unpacked or as cifar-10-binary.tar.gz"
    )
    parser.add_argument(
        "--synthetic", type=int, nargs="?", const=5000, metavar="COUNT",
        help="random images instead: COUNT to train on, a fifth of it to test on",
    )  # fmt: skip
    arguments = parser.parse_args()
    if min(arguments.epochs, arguments.batch_size, 1 if arguments.steps is None else arguments.steps) < 1:
        parser.error("--epochs, --batch-size and --steps must be at least 1")
    return arguments


def main():
    arguments = parse_arguments()
    store = kvstore.create(arguments.kvstore)  # a server of the job ends here
    comm = communicators.MultiProcessCommunicator()
    comm.init()  # knows which of this host's processes this is
    dev = device.create_device(comm.local_rank)

    dev.SetRandSeed(arguments.seed)
    net = MODELS[arguments.model]()
    net.compile([tensor.Tensor((arguments.batch_size, 3, 32, 32), dev)])
    trainer = gluon.Trainer(
        net.get_params(), "adam", {"learning_rate": arguments.lr}, kvstore=store, reduction="mean"
    )
    cifar = load_data(arguments)
    sampler = data.ShardedSampler(
        len(cifar.train_labels), arguments.batch_size, store.rank, store.num_workers, seed=arguments.seed
    )
    if store.rank == 0:
        what = "random images, not CIFAR-10" if arguments.synthetic is not None else "CIFAR-10"
        by = f"summed over the workers and divided by {store.num_workers}"
        if "async" in store.type:
            by = "applied as they come, each worker's on its own"
        print(f"{store.num_workers} workers, {store.num_servers} servers, {store.type}, device {dev}")
        print(f"model {arguments.model}, data {what}; gradients of batch means are {by}", flush=True)

    for epoch in range(arguments.epochs):
        net.train()
        losses = []
        batches = islice(make_batches(cifar, sampler, arguments.seed), arguments.steps)
        for x, y in data.prefetch(batches):
            with autograd.record():
                out = net.forward(tensor.from_numpy(x, dev))
                loss = net.softmax_cross_entropy(out, tensor.from_numpy(y, dev))
            loss.backward()
            trainer.step(1)  # the loss is a mean
            losses.append(loss.item())
        trainer.synchronize(net)
        print(f"Epoch {epoch}: mean loss of this worker = {np.mean(losses):.4f}")
        print(f"Epoch {epoch}: Test accuracy = {evaluate(net, dev, cifar):.4f}", flush=True)


def load_data(arguments):
    if arguments.synthetic is not None:
        return data.synthetic_cifar10(arguments.synthetic, max(1, arguments.synthetic // 5), arguments.seed)
    return data.load_cifar10(arguments.cifar_dir)


def make_batches(cifar, sampler, seed):
    """(x, y) of every step of this worker's epoch, images shifted by up to 4 pixels and mirrored at random."""
    epoch = sampler.epoch
    for step, indices in enumerate(sampler):
        rng = np.random.default_rng([seed, epoch, step, sampler.rank])
        images = data.pad_crop_flip(cifar.train_images[indices], rng)
        yield data.make_batch(images, cifar.train_labels[indices], slice(None), mean=MEAN, std=STD)


def evaluate(net, dev, cifar):
    """The share of all test images that are classified correctly."""
    net.eval()
    correct = 0
    for start in range(0, len(cifar.test_labels), EVAL_BATCH):
        batch = slice(start, start + EVAL_BATCH)
        x, y = data.make_batch(cifar.test_images, cifar.test_labels, batch, mean=MEAN, std=STD)
        out = net(tensor.from_numpy(x, dev))
        correct += np.count_nonzero(tensor.to_numpy(out).argmax(axis=1) == y)
    return correct / len(cifar.test_labels)


if __name__ == "__main__":
    main()
