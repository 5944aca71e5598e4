# SPDX-License-Identifier: Apache-2.0
"""`python -m singa_lite` is `singa-lite`."""

import sys

from .cli import main

sys.exit(main())
