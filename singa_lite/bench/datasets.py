# SPDX-License-Identifier: Apache-2.0
"""The images that a benchmark's model trains on: those of MNIST or CIFAR-10, or made ones in their shape.

What lives here: which data belong to a model, and what SGD and scaling suit them. Reading them is in ../data/.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..data import Cifar, Mnist, load_cifar10, load_mnist, synthetic_cifar10, synthetic_mnist

Images = Mnist | Cifar
TEST_SHARE = 5  # training images for a test image, of made ones


@dataclass(frozen=True)
class DataSet:
    """Images of ten classes, and how they are trained on.

    Attributes:
        title: its name in tables.
        shape: channels, height, width of an image.
        mean, std: inputs are (pixel / 255 - mean) / std, one number a channel.
        lr, weight_decay: of SGD, unless the caller names others.
        load: reads it from a folder; None: from its cache.
        make: makes random images of learnable classes, so many to train and to test on.
    """

    title: str
    shape: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    lr: float
    weight_decay: float
    load: Callable[[Path | None], Images]
    make: Callable[[int, int], Images]

    def images(self, synthetic: int = 0, folder: Path | None = None) -> Images:
        """Return the images.

        Args:
            synthetic: made images to train on, and a fifth as many to test on; 0: the real ones.
            folder: holds the real ones; None: their cache, or MNIST_DIR.

        Raises:
            DataError: they are not there. Real ones are never made up.
        """
        return self.make(synthetic, max(1, synthetic // TEST_SHARE)) if synthetic else self.load(folder)

    def text(self, synthetic: int = 0) -> str:
        """Return what the images are, for headings."""
        if not synthetic:
            return self.title
        counts = f"{synthetic} to train on, {max(1, synthetic // TEST_SHARE)} to test on"
        return f"made images ({counts}) in the shape of {self.title}, not {self.title}"


MNIST = DataSet("MNIST", (1, 28, 28), (0.1307,), (0.3081,), 0.005, 1e-5, load_mnist, synthetic_mnist)
# mean and deviation of all training pixels, by colour
CIFAR10 = DataSet(
    "CIFAR-10",
    (3, 32, 32),
    (0.4914, 0.4822, 0.4465),
    (0.2470, 0.2435, 0.2616),
    0.05,
    5e-4,
    load_cifar10,
    synthetic_cifar10,
)


def data_set_of(model: str) -> DataSet:
    """Return what the model of this name trains on; ``file.py:function`` on MNIST."""
    return CIFAR10 if model.endswith("-cifar10") else MNIST
