# SPDX-License-Identifier: Apache-2.0
"""Data sets (fetched once, checked, cached), the order of samples over ranks, and batches of them."""

from .augment import pad_crop_flip
from .cifar import Cifar, fetch_cifar10, load_cifar10, synthetic_cifar10
from .loader import make_batch
from .mnist import Mnist, load_mnist, synthetic_mnist
from .prefetch import prefetch
from .sampler import ShardedSampler, partition
from .split import SplitSampler, batches

__all__ = [
    "Cifar",
    "Mnist",
    "ShardedSampler",
    "SplitSampler",
    "batches",
    "fetch_cifar10",
    "load_cifar10",
    "load_mnist",
    "make_batch",
    "pad_crop_flip",
    "partition",
    "prefetch",
    "synthetic_cifar10",
    "synthetic_mnist",
]
