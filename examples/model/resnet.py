# SPDX-License-Identifier: Apache-2.0
"""Residual networks: ResNet-20 (272,474 parameters) and ResNet-18 (11,173,962) for 32x32 images, ResNet-50
(25,557,032 with 1000 classes) for 224x224.

Source: He et al., "Deep Residual Learning for Image Recognition", 2015; ResNet-20 is that of section 4.2, ResNet-18
has the blocks of table 1 behind a 3x3 stem without pooling, as 32x32 images need. Where a block changes the shape,
its shortcut is a 1x1 convolution (option B of the paper; its own CIFAR networks pad with zeros, option A, and have
2,752 parameters fewer). ResNet-50 is that of table 1, with the stride of a block at its 3x3 convolution, where
most implementations have it, not at its first.
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


class Bottleneck(layer.Layer):
    """As BasicBlock, with conv1x1 to ``width``, conv3x3 with the stride, and conv1x1 to 4 * width channels."""

    def __init__(self, width, stride, is_projected):
        super().__init__()
        self.conv1 = convolution(width, 1)
        self.bn1 = layer.BatchNorm2d(momentum=MOMENTUM)
        self.conv2 = convolution(width, stride=stride)
        self.bn2 = layer.BatchNorm2d(momentum=MOMENTUM)
        self.conv3 = convolution(4 * width, 1)
        self.bn3 = layer.BatchNorm2d(momentum=MOMENTUM)
        self.relu = layer.ReLU()
        self.is_projected = is_projected
        if is_projected:
            self.conv_shortcut = convolution(4 * width, 1, stride)
            self.bn_shortcut = layer.BatchNorm2d(momentum=MOMENTUM)

    def forward(self, x):
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return self.relu(y + (self.bn_shortcut(self.conv_shortcut(x)) if self.is_projected else x))


class ResNet(model.Model):
    """A 3x3 stem, stages of basic blocks (each but the first halves the image), their mean, and one linear layer.

    Takes x float32 (n, channels, h, w) and class ids or one-hot rows y.

    Args:
        stages: channels of each stage.
        num_blocks: blocks in each stage, one number or one a stage.
        is_deep: bottlenecks behind a 7x7 stem with stride 2 and 3x3 max pooling, for large images.
    """

    def __init__(self, stages, num_blocks, num_classes=10, is_deep=False):
        super().__init__()
        self.conv = convolution(stages[0], 7, 2) if is_deep else convolution(stages[0])
        self.bn = layer.BatchNorm2d(momentum=MOMENTUM)
        self.relu = layer.ReLU()
        self.pool = layer.MaxPool2d(3, 2, 1) if is_deep else None
        counts = [num_blocks] * len(stages) if isinstance(num_blocks, int) else num_blocks
        block = Bottleneck if is_deep else BasicBlock
        self.blocks = [
            block(width, 2 if stage and not number else 1, (bool(stage) or is_deep) and not number)
            for stage, width in enumerate(stages)
            for number in range(counts[stage])
        ]
        self.flatten = layer.Flatten()
        self.linear = layer.Linear(num_classes)
        self.softmax_cross_entropy = layer.SoftMaxCrossEntropy()

    def forward(self, x):
        y = self.relu(self.bn(self.conv(x)))
        y = self.pool(y) if self.pool else y
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


class ResNet50(ResNet):
    """Four stages of 3, 4, 6 and 3 bottlenecks of 64, 128, 256 and 512 channels inside, four times as many outside."""

    def __init__(self, num_classes: int = 1000) -> None:
        super().__init__((64, 128, 256, 512), (3, 4, 6, 3), num_classes, is_deep=True)
