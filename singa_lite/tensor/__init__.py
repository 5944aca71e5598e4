# SPDX-License-Identifier: Apache-2.0
"""The public names of tensor: Tensor, its dtypes, and SINGA's functions; docs/singa.md lists differences."""

from typing import TYPE_CHECKING

from . import checks, core, functions
from .checks import *
from .core import *
from .functions import *

if not TYPE_CHECKING:  # mypy reads lists alone, and without one takes every name
    __all__ = [*checks.__all__, *core.__all__, *functions.__all__]
