# SPDX-License-Identifier: Apache-2.0
"""The face of autograd: the engine, every operator function, and the ``training`` switch.

``autograd.training = True``, as SINGA scripts write it, reaches ``config.this_thread.training``.
"""

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ..config import of_face, this_thread
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
        """Find the layers here too, as SINGA scripts do, from the first use of a name on."""
        if not name.startswith("_"):
            _add_layers()
        try:
            return vars(self)[name]
        except KeyError:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}") from None

    def __dir__(self) -> list[str]:
        _add_layers()
        return sorted(vars(self))


def _add_layers() -> None:
    layer = of_face("layer")
    globals().update({name: getattr(layer, name) for name in getattr(layer, "__all__", ())})


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
