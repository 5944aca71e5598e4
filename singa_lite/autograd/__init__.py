# SPDX-License-Identifier: Apache-2.0
"""The face of autograd: the engine, every operator function, and the ``training`` switch.

``autograd.training = True``, as SINGA scripts write it, reaches ``config.state.training``.
"""

import sys
from types import ModuleType

from ..config import state
from .engine import Context, Operator, backward, gradients, no_grad


class _Autograd(ModuleType):
    """This module, with ``training`` as a property."""

    @property
    def training(self) -> bool:
        """Whether operators record for backward, and dropout and batch norm train. False at the start."""
        return state.training

    @training.setter
    def training(self, value: bool) -> None:
        state.training = bool(value)


sys.modules[__name__].__class__ = _Autograd

__all__ = ["Context", "Operator", "backward", "gradients", "no_grad"]
