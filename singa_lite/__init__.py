# SPDX-License-Identifier: Apache-2.0
"""The public face of singa_lite; nothing inside the package imports it."""

__version__ = "0.1.0"
