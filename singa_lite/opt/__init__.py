# SPDX-License-Identifier: Apache-2.0
"""The face of opt: optimizers, schedules and DistOpt."""

from .adam import Adam
from .base import Optimizer
from .dist import DistOpt
from .schedule import Constant, DecayScheduler, ExponentialDecay
from .sgd import SGD

__all__ = ["SGD", "Adam", "Constant", "DecayScheduler", "DistOpt", "ExponentialDecay", "Optimizer"]
