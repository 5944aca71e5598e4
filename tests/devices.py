# SPDX-License-Identifier: Apache-2.0
"""The CUDA device of tests: the first GPU where there is one, else the stand-in of standin/, which runs its kernels."""

from __future__ import annotations

import ctypes
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from singa_lite.backend.base import KERNELS
from singa_lite.config import state
from singa_lite.device import Device, create_cuda_gpu

CUDNN_KERNELS = {
    kernel for kernel in KERNELS if kernel.startswith(("conv2d", "max_pool_2d", "avg_pool_2d", "batchnorm_2d"))
}
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


def cuda_device(monkeypatch: pytest.MonkeyPatch) -> Device:
    """GPU 0 or its stand-in, the same at every call; a test that asks for a kernel it lacks is skipped."""
    if 0 not in state.cuda_devices:
        _make()
    device: Device = state.cuda_devices[0]

    def find(kernel: str) -> Callable[..., None]:
        if kernel in CUDNN_KERNELS and not hasattr(device.backend, kernel):
            pytest.skip(f"the CUDA backend has no kernel {kernel} yet")
        return type(device.backend).find(device.backend, kernel)

    monkeypatch.setattr(device.backend, "find", find)
    return device


def _make() -> None:
    if not no_gpu():
        create_cuda_gpu()
    elif shutil.which("g++") is None:
        pytest.skip("no GPU, and no g++ to run CUDA kernels on the host")
    else:
        with standin_cupy():
            create_cuda_gpu()
