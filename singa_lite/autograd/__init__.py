# SPDX-License-Identifier: Apache-2.0
"""The face of autograd: the engine, every operator function, and the ``training`` switch.

``autograd.training = True``, as SINGA scripts write it, reaches ``config.this_thread.training``.
"""

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ..config import this_thread
from ..tensor import OPERATORS
from . import ops
from .accumulate import BackwardCallback, backward_into_grads
from .autocast import autocast
from .engine import Context, Operator, backward, gradients, no_grad, record
from .ops import *


class _Autograd(ModuleType):
    """This module, with ``training`` as a property."""

    @property
    def training(self) -> bool:
        """Whether operators record for backward, and dropout and batch norm train. Each thread starts with False."""
        return this_thread.training

    @training.setter
    def training(self, value: bool) -> None:
        this_thread.training = bool(value)

    def __getattr__(self, name: str) -> Any:
        """Return a layer, which SINGA scripts find here too; layers are above, so the face of the package has them."""
        layers = {} if name.startswith("__") else vars(sys.modules[__package__.split(".")[0]].layer)
        if name not in layers.get("__all__", ()):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return layers[name]


if TYPE_CHECKING:
    training: bool  # the property, which mypy does not see

Operation = Operator  # another name of SINGA's for it
sys.modules[__name__].__class__ = _Autograd
# what ``a + b``, ``t[0]``, ``loss.backward()`` and their kin call
OPERATORS.update({name: value for name, value in vars(ops).items() if callable(value)})
OPERATORS["backward"] = backward_into_grads

if not TYPE_CHECKING:  # mypy reads lists alone, and without one takes every name
    __all__ = [
        "BackwardCallback",
        "Context",
        "Operation",
        "Operator",
        "autocast",
        "backward",
        "gradients",
        "no_grad",
        "record",
    ]
    __all__ += ops.__all__
