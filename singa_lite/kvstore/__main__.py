# SPDX-License-Identifier: Apache-2.0
"""A server without a script: `python -m singa_lite.kvstore`. It knows the package's optimizers alone."""

from .create import serve

serve()
