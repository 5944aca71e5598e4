# SPDX-License-Identifier: Apache-2.0
"""MXNet's key-value store: arrays by key, that the workers of a job push to and pull from. docs/mxnet.md."""

from .base import KVStoreBase
from .create import create
from .store import KVStore

__all__ = ["KVStore", "KVStoreBase", "create"]
