# SPDX-License-Identifier: Apache-2.0
"""The multi-layer perceptron of the examples and benchmarks: 784-512-512-10, 669,706 parameters."""

from singa_lite import layer, model


class MLP(model.Model):
    """Two hidden layers of 512 units with ReLU.

    Takes x float32 (n, 784), or images that are flattened first, and class ids or one-hot rows y.
    """

    def __init__(self, num_classes: int = 10, hidden: int = 512) -> None:
        super().__init__()
        self.flatten = layer.Flatten()
        self.linear1 = layer.Linear(hidden)
        self.linear2 = layer.Linear(hidden)
        self.linear3 = layer.Linear(num_classes)
        self.relu = layer.ReLU()
        self.softmax_cross_entropy = layer.SoftMaxCrossEntropy()

    def forward(self, x):
        y = self.relu(self.linear1(self.flatten(x)))
        y = self.relu(self.linear2(y))
        return self.linear3(y)

    def train_one_batch(self, x, y, dist_option="fp32", spars=None):
        out = self.forward(x)
        loss = self.softmax_cross_entropy(out, y)
        self.optimizer(loss, dist_option=dist_option, spars=spars)
        return out, loss
