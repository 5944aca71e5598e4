# SPDX-License-Identifier: Apache-2.0
"""Layers: one family a file, whose ``__all__`` names them."""

from sys import modules
from typing import TYPE_CHECKING

from .activation import *
from .base import *
from .conv import *
from .dropout import *
from .linear import *
from .loss import *
from .norm import *
from .pool import *
from .recurrent import *
from .shape import *

if not TYPE_CHECKING:  # mypy reads lists alone, and without one takes every name
    FAMILIES = [module for name, module in modules.items() if name.startswith(f"{__name__}.")]
    __all__ = sorted(name for family in FAMILIES for name in getattr(family, "__all__", ()))
