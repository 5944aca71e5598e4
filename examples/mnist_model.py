# SPDX-License-Identifier: Apache-2.0
"""MNIST with a Model and a choice of dist_option, as the SINGA documentation writes it.

    python examples/mnist_model.py                              one process
    singa-lite run -n 2 examples/mnist_model.py fp16            two processes of this machine
    mpiexec -n 2 python examples/mnist_model.py sparseTopK 0.05 MPI

The tail of the data that fills no batch is dropped, as there; examples/train_mnist.py uses every sample.
Differs from the page where it must: the import, and create_device (a GPU if there is one).
"""

import argparse

import numpy as np

from singa_lite import data, device, layer, model, opt, tensor

IMG_SIZE = 28
num_classes = 10
batch_size = 64  # per process
max_epoch = 10
graph = True


class CNN(model.Model):
    def __init__(self, num_classes=10, num_channels=1):
        super(CNN, self).__init__()
        self.conv1 = layer.Conv2d(num_channels, 20, 5, padding=0, activation="RELU")
        self.conv2 = layer.Conv2d(20, 50, 5, padding=0, activation="RELU")
        self.linear1 = layer.Linear(500)
        self.linear2 = layer.Linear(num_classes)
        self.pooling1 = layer.MaxPool2d(2, 2, padding=0)
        self.pooling2 = layer.MaxPool2d(2, 2, padding=0)
        self.relu = layer.ReLU()
        self.flatten = layer.Flatten()
        self.softmax_cross_entropy = layer.SoftMaxCrossEntropy()

    def forward(self, x):
        y = self.conv1(x)
        y = self.pooling1(y)
        y = self.conv2(y)
        y = self.pooling2(y)
        y = self.flatten(y)
        y = self.linear1(y)
        y = self.relu(y)
        y = self.linear2(y)
        return y

    def train_one_batch(self, x, y, dist_option="fp32", spars=0):
        out = self.forward(x)
        loss = self.softmax_cross_entropy(out, y)
        if dist_option == "fp32":
            self.optimizer(loss)
        elif dist_option == "fp16":
            self.optimizer.backward_and_update_half(loss)
        elif dist_option == "partialUpdate":
            self.optimizer.backward_and_partial_update(loss)
        elif dist_option == "sparseTopK":
            self.optimizer.backward_and_sparse_update(loss, topK=True, spars=spars)
        elif dist_option == "sparseThreshold":
            self.optimizer.backward_and_sparse_update(loss, topK=False, spars=spars)
        else:  # any other of docs/sync.md, with its options, such as sparseTopK:0.05
            self.optimizer(loss, dist_option)
        return out, loss


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


def sum_over_ranks(values, dist_opt):
    total = tensor.Tensor((len(values),), dtype=tensor.float32, data=np.array(values, np.float32))
    dist_opt.all_reduce(total.data)
    return tensor.to_numpy(total)


def count_correct(out, y):
    return np.sum(np.argmax(tensor.to_numpy(out), axis=1) == np.argmax(y, axis=1))


def train_mnist_cnn(dist_option="fp32", spars=0.0):
    model = CNN()
    sgd = opt.SGD(lr=0.005, momentum=0.9, weight_decay=1e-5)
    sgd = opt.DistOpt(sgd)
    model.set_optimizer(sgd)
    dev = device.create_device(sgd.local_rank)

    train_x, train_y, test_x, test_y = load_dataset()
    train_x, train_y = data_partition(train_x, train_y, sgd.global_rank, sgd.world_size)
    test_x, test_y = data_partition(test_x, test_y, sgd.global_rank, sgd.world_size)
    num_train_batch = train_x.shape[0] // batch_size
    num_test_batch = test_x.shape[0] // batch_size
    idx = np.arange(train_x.shape[0])
    if not num_train_batch or not num_test_batch:
        raise SystemExit(f"a process has less than a batch of {batch_size} images; use fewer processes")

    tx = tensor.Tensor((batch_size, 1, IMG_SIZE, IMG_SIZE), dev, tensor.float32)
    ty = tensor.Tensor((batch_size, num_classes), dev, tensor.int32)
    model.compile([tx], is_train=True, use_graph=graph, sequential=True)
    # Use the same random seed for different ranks
    seed = 0
    dev.SetRandSeed(seed)
    np.random.seed(seed)

    for epoch in range(max_epoch):
        np.random.shuffle(idx)
        model.train()
        train_loss, train_correct = 0.0, 0
        for b in range(num_train_batch):
            x = train_x[idx[b * batch_size : (b + 1) * batch_size]]
            y = train_y[idx[b * batch_size : (b + 1) * batch_size]]
            tx.copy_from_numpy(x)
            ty.copy_from_numpy(y)
            # Train the model
            out, loss = model(tx, ty, dist_option, spars)
            train_loss += tensor.to_numpy(loss)[0]
            train_correct += count_correct(out, y)

        model.eval()
        test_correct = 0
        for b in range(num_test_batch):
            y = test_y[b * batch_size : (b + 1) * batch_size]
            tx.copy_from_numpy(test_x[b * batch_size : (b + 1) * batch_size])
            test_correct += count_correct(model(tx), y)

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
    parser = argparse.ArgumentParser(description="Train a CNN on MNIST with a Model")
    parser.add_argument("dist_option", nargs="?", default="fp32", help="how gradients are sent")
    parser.add_argument(
        "spars", type=float, nargs="?", help="of the sparse dist_options: the share or the magnitude"
    )
    arguments = parser.parse_args()
    train_mnist_cnn(arguments.dist_option, arguments.spars)
