# SPDX-License-Identifier: Apache-2.0
"""The dtype of bfloat16 arrays, which NumPy itself has none of."""

from __future__ import annotations

import ml_dtypes
import numpy as np

bfloat16 = np.dtype(ml_dtypes.bfloat16)
