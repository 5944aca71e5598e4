# SPDX-License-Identifier: Apache-2.0
"""MNIST with a plain class and autograd functions, as the SINGA documentation writes it.

    python examples/mnist_autograd.py                          one process
    singa-lite run -n 2 examples/mnist_autograd.py             two processes of this machine
    python examples/mnist_autograd.py 2                        the same through Python's multiprocessing
    mpiexec -n 2 python examples/mnist_autograd.py             MPI

The tail of the data that fills no batch is dropped, as there; examples/train_mnist.py uses every sample.
Differs from the page where it must: the import, create_device (a GPU if there is one), autograd.training.
"""

import argparse
import multiprocessing
import sys

import numpy as np

from singa_lite import autograd, data, device, opt, tensor
from singa_lite import singa_wrap as singa

IMG_SIZE = 28
num_classes = 10
batch_size = 64  # per process
max_epoch = 10


class CNN:
    def __init__(self):
        self.conv1 = autograd.Conv2d(1, 20, 5, padding=0)
        self.conv2 = autograd.Conv2d(20, 50, 5, padding=0)
        self.linear1 = autograd.Linear(4 * 4 * 50, 500)
        self.linear2 = autograd.Linear(500, 10)
        self.pooling1 = autograd.MaxPool2d(2, 2, padding=0)
        self.pooling2 = autograd.MaxPool2d(2, 2, padding=0)

    def forward(self, x):
        y = self.conv1(x)
        y = autograd.relu(y)
        y = self.pooling1(y)
        y = self.conv2(y)
        y = autograd.relu(y)
        y = self.pooling2(y)
        y = autograd.flatten(y)
        y = self.linear1(y)
        y = autograd.relu(y)
        y = self.linear2(y)
        return y


def load_dataset():
    mnist = data.load_mnist()
    train_x, train_y = data.make_batch(mnist.train_images, mnist.train_labels, slice(None))
    test_x, test_y = data.make_batch(mnist.test_images, mnist.test_labels, slice(None))
    return train_x, np.eye(num_classes, dtype=np.float32)[train_y], test_x, np.eye(num_classes)[test_y]


def data_partition(dataset_x, dataset_y, global_rank, world_size):
    data_per_rank = dataset_x.shape[0] // world_size
    idx_start = global_rank * data_per_rank
    idx_end = (global_rank + 1) * data_per_rank
    return dataset_x[idx_start:idx_end], dataset_y[idx_start:idx_end]


def synchronize(tensor, dist_opt):
    dist_opt.all_reduce(tensor.data)
    tensor /= dist_opt.world_size


def sum_over_ranks(values, dist_opt):
    total = tensor.Tensor((len(values),), dtype=tensor.float32, data=np.array(values, np.float32))
    dist_opt.all_reduce(total.data)
    return tensor.to_numpy(total)


def count_correct(out, y):
    return np.sum(np.argmax(tensor.to_numpy(out), axis=1) == np.argmax(y, axis=1))


def train_mnist_cnn(nccl_id=None, local_rank=None, world_size=None):
    model = CNN()
    sgd = opt.SGD(lr=0.005, momentum=0.9, weight_decay=1e-5)
    sgd = opt.DistOpt(sgd, nccl_id=nccl_id, local_rank=local_rank, world_size=world_size)
    dev = device.create_device(sgd.local_rank)

    train_x, train_y, test_x, test_y = load_dataset()
    train_x, train_y = data_partition(train_x, train_y, sgd.global_rank, sgd.world_size)
    test_x, test_y = data_partition(test_x, test_y, sgd.global_rank, sgd.world_size)
    num_train_batch = train_x.shape[0] // batch_size
    num_test_batch = test_x.shape[0] // batch_size
    idx = np.arange(train_x.shape[0])
    if not num_train_batch or not num_test_batch:
        raise SystemExit(f"a process has less than a batch of {batch_size} images; use fewer processes")

    # Synchronize the initial parameters
    autograd.training = True
    tx = tensor.Tensor((batch_size, 1, IMG_SIZE, IMG_SIZE), dev, tensor.float32)
    ty = tensor.Tensor((batch_size, num_classes), dev, tensor.int32)
    out = model.forward(tx)
    loss = autograd.softmax_cross_entropy(out, ty)
    for p, g in autograd.backward(loss):
        synchronize(p, sgd)

    for epoch in range(max_epoch):
        np.random.shuffle(idx)
        autograd.training = True
        train_loss, train_correct = 0.0, 0
        for b in range(num_train_batch):
            x = train_x[idx[b * batch_size : (b + 1) * batch_size]]
            y = train_y[idx[b * batch_size : (b + 1) * batch_size]]
            tx.copy_from_numpy(x)
            ty.copy_from_numpy(y)
            out = model.forward(tx)
            loss = autograd.softmax_cross_entropy(out, ty)
            train_loss += tensor.to_numpy(loss)[0]
            train_correct += count_correct(out, y)
            # do backpropagation and all-reduce
            sgd.backward_and_update(loss)

        autograd.training = False
        test_correct = 0
        for b in range(num_test_batch):
            y = test_y[b * batch_size : (b + 1) * batch_size]
            tx.copy_from_numpy(test_x[b * batch_size : (b + 1) * batch_size])
            test_correct += count_correct(model.forward(tx), y)

        train_loss, train_correct, test_correct = sum_over_ranks(
            [train_loss, train_correct, test_correct], sgd
        )
        if sgd.global_rank == 0:
            seen = num_train_batch * batch_size * sgd.world_size
            tested = num_test_batch * batch_size * sgd.world_size
            print(f"Starting Epoch {epoch}:")
            print(f"Training loss = {train_loss:.6f}, training accuracy = {train_correct / seen:.6f}")
            print(f"Evaluation accuracy = {test_correct / tested:.6f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a CNN on MNIST with autograd functions")
    parser.add_argument(
        "world_size", type=int, nargs="?", help="processes to start; this one trains if not given"
    )
    world_size = parser.parse_args().world_size
    if world_size is None:
        train_mnist_cnn()
        sys.exit()
    if world_size < 1:
        parser.error("world_size must be at least 1")
    # Generate a rendezvous id with which the processes find each other
    nccl_id = singa.NcclIdHolder()
    process = []
    for local_rank in range(0, world_size):
        process.append(
            multiprocessing.Process(target=train_mnist_cnn, args=(nccl_id, local_rank, world_size))
        )
    for p in process:
        p.start()
    for p in process:
        p.join()
    sys.exit(max(abs(p.exitcode) for p in process))
