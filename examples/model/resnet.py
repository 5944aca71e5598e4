# SPDX-License-Identifier: Apache-2.0
"""Residual networks for 32x32 images: ResNet-20 (272,474 parameters) and ResNet-18 (11,173,962).

Source: He et al., "Deep Residual Learning for Image Recognition", 2015; ResNet-20 is that of section 4.2, ResNet-18
has the blocks of table 1 behind a 3x3 stem without pooling, as 32x32 images need. Where a block changes the shape,
its shortcut is a 1x1 convolution (option B of the paper; its own CIFAR networks pad with zeros, option A, and have
2,752 parameters fewer).
"""

from singa_lite import autograd, layer, model

MOMENTUM = 0.1  # share of the batch in the running statistics, as in SINGA; 1 - 0.9


def convolution(outputs, kernel_size=3, stride=1):
    """Without bias: the batch norm after it has one."""
    return layer.Conv2d(outputs, kernel_size, stride=stride, padding=kernel_size // 2, bias=False)


class BasicBlock(layer.Layer):
    """relu(bn(conv3x3(relu(bn(conv3x3(x))))) + shortcut(x)); the first convolution has the stride."""

    def __init__(self, outputs, stride, is_projected):
        super().__init__()
        self.conv1 = convolution(outputs, stride=stride)
        self.bn1 = layer.BatchNorm2d(momentum=MOMENTUM)
        self.conv2 = convolution(outputs)
        self.bn2 = layer.BatchNorm2d(momentum=MOMENTUM)
        self.relu = layer.ReLU()
        self.is_projected = is_projected
        if is_projected:
            self.conv_shortcut = convolution(outputs, 1, stride)
            self.bn_shortcut = layer.BatchNorm2d(momentum=MOMENTUM)

    def forward(self, x):
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return self.relu(y + (self.bn_shortcut(self.conv_shortcut(x)) if self.is_projected else x))


class ResNet(model.Model):
    """A 3x3 stem, stages of basic blocks (each but the first halves the image), their mean, and one linear layer.

    Takes x float32 (n, channels, h, w) and class ids or one-hot rows y.

    Args:
        stages: channels of each stage.
        num_blocks: blocks in each stage.
    """

    def __init__(self, stages, num_blocks, num_classes=10):
        super().__init__()
        self.conv = convolution(stages[0])
        self.bn = layer.BatchNorm2d(momentum=MOMENTUM)
        self.relu = layer.ReLU()
        self.blocks = [
            BasicBlock(outputs, 2 if stage and not number else 1, bool(stage) and not number)
            for stage, outputs in enumerate(stages)
            for number in range(num_blocks)
        ]
        self.flatten = layer.Flatten()
        self.linear = layer.Linear(num_classes)
        self.softmax_cross_entropy = layer.SoftMaxCrossEntropy()

    def forward(self, x):
        y = self.relu(self.bn(self.conv(x)))
        for block in self.blocks:
            y = block(y)
        y = autograd.avg_pool_2d(y, y.shape[2:])  # the mean of each channel
        return self.linear(self.flatten(y))

    def train_one_batch(self, x, y, dist_option="fp32", spars=None):
        out = self.forward(x)
        loss = self.softmax_cross_entropy(out, y)
        self.optimizer(loss, dist_option=dist_option, spars=spars)
        return out, loss


class ResNet20(ResNet):
    """Three stages of 16, 32 and 64 channels, three blocks each."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__((16, 32, 64), 3, num_classes)


class ResNet18(ResNet):
    """Four stages of 64, 128, 256 and 512 channels, two blocks each."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__((64, 128, 256, 512), 2, num_classes)
