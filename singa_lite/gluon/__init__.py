# SPDX-License-Identifier: Apache-2.0
"""Names of MXNet's Gluon for scripts that write their own training loop."""

from . import utils

__all__ = ["utils"]
