# SPDX-License-Identifier: Apache-2.0
"""MXNet's gluon: a Trainer over a key-value store, and what training loops use beside it. docs/mxnet.md."""

from . import utils
from .trainer import Trainer

__all__ = ["Trainer", "utils"]
