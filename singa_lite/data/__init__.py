# SPDX-License-Identifier: Apache-2.0
"""Data sets (fetched once, checked, cached), the order of samples over ranks, and batches of them."""

from .loader import make_batch
from .mnist import Mnist, load_mnist
from .sampler import ShardedSampler, partition

__all__ = ["Mnist", "ShardedSampler", "load_mnist", "make_batch", "partition"]
