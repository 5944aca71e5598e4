# SPDX-License-Identifier: Apache-2.0
"""Run a command with the stand-ins in place of cupy, cuDNN, NCCL and the CUDA driver, and with tiny sizes.

python -m tests.standin python -m tools.gpu_check.smoke
"""

from __future__ import annotations

import os
import sys

from tests.devices import standin_environment

if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    os.execvpe(sys.argv[1], sys.argv[1:], standin_environment())
