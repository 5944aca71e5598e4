# SPDX-License-Identifier: Apache-2.0
"""The CUDA runtime of the stand-in."""

from __future__ import annotations

import os
from typing import Any


class CUDARuntimeError(RuntimeError):
    pass


def getDeviceCount() -> int:
    return int(os.environ.get("STANDIN_GPUS", "2"))


def getDeviceProperties(device_id: int) -> dict[str, Any]:
    return {
        "name": b"stand-in",
        "major": 9,
        "minor": 0,
        "totalGlobalMem": 4 << 30,
        "multiProcessorCount": 2,
        "warpSize": 32,
    }


def runtimeGetVersion() -> int:
    return 13000
