# SPDX-License-Identifier: Apache-2.0
"""The convolutional network of the MNIST examples and benchmarks: 431,080 parameters."""

from singa_lite import layer, model


class CNN(model.Model):
    """Two 5x5 convolutions (20 and 50 channels), each with ReLU and 2x2 max pooling, then 500 units, then 10.

    Takes x float32 (n, 1, 28, 28) and class ids or one-hot rows y.
    """

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.conv1 = layer.Conv2d(20, 5, activation="RELU")
        self.conv2 = layer.Conv2d(50, 5, activation="RELU")
        self.pooling = layer.MaxPool2d(2)
        self.flatten = layer.Flatten()
        self.linear1 = layer.Linear(500)
        self.relu = layer.ReLU()
        self.linear2 = layer.Linear(num_classes)
        self.softmax_cross_entropy = layer.SoftMaxCrossEntropy()

    def forward(self, x):
        y = self.pooling(self.conv1(x))
        y = self.pooling(self.conv2(y))
        y = self.relu(self.linear1(self.flatten(y)))
        return self.linear2(y)

    def train_one_batch(self, x, y, dist_option="fp32", spars=None):
        out = self.forward(x)
        loss = self.softmax_cross_entropy(out, y)
        self.optimizer(loss, dist_option=dist_option, spars=spars)
        return out, loss
