# SPDX-License-Identifier: Apache-2.0
"""The operators, one family a file: each class with its public function beneath, which the file's ``__all__`` names."""

from sys import modules
from typing import TYPE_CHECKING

from .activation import *
from .arithmetic import *
from .conv import *
from .dropout import *
from .linear import *
from .loss import *
from .norm import *
from .pool import *
from .recurrent import *
from .reduction import *
from .selection import *
from .shape import *
from .similarity import *

if not TYPE_CHECKING:  # mypy reads lists alone, and without one takes every name
    # by their full names, as two functions have the name of their file
    FAMILIES = [module for name, module in modules.items() if name.startswith(f"{__name__}.")]
    __all__ = sorted(name for family in FAMILIES for name in getattr(family, "__all__", ()))
