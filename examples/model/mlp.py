# SPDX-License-Identifier: Apache-2.0
"""A multilayer perceptron for MNIST-size images: 784-512-512-10, 669,706 parameters."""

from singa_lite import layer, model


class MLP(model.Model):
    """Linear layers with ReLU between them. Takes x float32 (n, ...) and class ids or one-hot rows y."""

    def __init__(self, hidden: tuple[int, ...] = (512, 512), num_classes: int = 10) -> None:
        super().__init__()
        self.flatten = layer.Flatten()
        self.linears = [layer.Linear(size) for size in (*hidden, num_classes)]
        self.relu = layer.ReLU()
        self.softmax_cross_entropy = layer.SoftMaxCrossEntropy()

    def forward(self, x):
        y = self.flatten(x)
        for linear in self.linears[:-1]:
            y = self.relu(linear(y))
        return self.linears[-1](y)

    def train_one_batch(self, x, y, dist_option="fp32", spars=None):
        out = self.forward(x)
        loss = self.softmax_cross_entropy(out, y)
        self.optimizer(loss, dist_option=dist_option, spars=spars)
        return out, loss
