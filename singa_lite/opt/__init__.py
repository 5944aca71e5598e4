# SPDX-License-Identifier: Apache-2.0
"""The face of opt: optimizers, ``create``, schedules and DistOpt."""

from .adaptive import *
from .base import Optimizer as Optimizer
from .base import create as create
from .dist import DistOpt as DistOpt
from .schedule import *
from .sgd import SGD as SGD
