# SPDX-License-Identifier: Apache-2.0
"""The tests; what is set here holds before any library is loaded, and in all their processes."""

import os
import sys

# Threads of GNU OpenMP that wait by spinning take the cores from other processes: two files of tests took 190 s beside
# them on a busy machine, and 35 s without.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# numpy's products: threads of OpenBLAS spin too while they wait for each other, and the arrays of tests are small
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# Where this is set, each of a thousand processes compiles the package's Python again: half of the 0.55 s of a start.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
