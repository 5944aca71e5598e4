# SPDX-License-Identifier: Apache-2.0
"""The CUDA device of tests: the first GPU where there is one, else the stand-in of standin/, which runs its kernels."""

from __future__ import annotations

import ctypes
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from singa_lite.config import state
from singa_lite.device import Device, create_cuda_gpu

STANDIN = Path(__file__).parent / "standin"


def no_gpu() -> str:
    """Why there is no NVIDIA GPU to test on, or ""."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return str(error)
    count = ctypes.c_int()
    if status := driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return f"the CUDA driver answers with error {status}"
    return "" if count.value else "the CUDA driver sees no device"


@contextmanager
def standin_cupy() -> Iterator[None]:
    """Let ``import cupy`` find the stand-in inside the ``with`` block."""
    before = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "cupy"}
    for name in before:
        del sys.modules[name]
    sys.path.insert(0, str(STANDIN))
    try:
        yield
    finally:
        sys.path.remove(str(STANDIN))
        for name in [name for name in sys.modules if name.split(".")[0] == "cupy"]:
            del sys.modules[name]
        sys.modules.update(before)


def cuda_device() -> Device:
    """GPU 0 or its stand-in, the same at every call."""
    if 0 in state.cuda_devices:
        return state.cuda_devices[0]
    if not no_gpu():
        return create_cuda_gpu()
    if shutil.which("g++") is None:
        pytest.skip("no GPU, and no g++ to run CUDA kernels on the host")
    with standin_cupy():
        return create_cuda_gpu()
