# SPDX-License-Identifier: Apache-2.0
"""The CUDA device of tests: the first GPU where there is one, else the stand-in of standin/, which runs its kernels."""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from singa_lite.config import state
from singa_lite.device import Device, create_cuda_gpu
from tests.standin import compiling

ROOT = Path(__file__).parents[1]


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
    sys.path.insert(0, str(compiling.STANDIN))
    try:
        yield
    finally:
        sys.path.remove(str(compiling.STANDIN))
        for name in [name for name in sys.modules if name.split(".")[0] == "cupy"]:
            del sys.modules[name]
        sys.modules.update(before)


def standin_cudnn(*options: str) -> Path:
    """The stand-in of libcudnn, compiled with ``options``."""
    folder = compiling.STANDIN / "cudnn"
    sources = [*sorted(folder.glob("*.cc")), ROOT / "native/common/half.cc"]
    return compiling.library("cudnn", [*sources, compiling.driver()], [folder / "standin.h"], options)


def standin_nccl(*options: str) -> Path:
    """The stand-in of libnccl, compiled with ``options``; its work is done by the stand-in of libcuda."""
    return compiling.library("nccl", [compiling.STANDIN / "nccl" / "nccl.cc"], (), options)


def cuda_device(monkeypatch: pytest.MonkeyPatch) -> Device:
    """GPU 0 or its stand-in, the same at every call."""
    if no_gpu():
        return standin_device(monkeypatch)
    if 0 not in state.cuda_devices:
        create_cuda_gpu()
    device: Device = state.cuda_devices[0]
    return device


def standin_device(monkeypatch: pytest.MonkeyPatch) -> Device:
    """The stand-in of GPU 0, the same at every call."""
    if 0 not in state.cuda_devices:
        if shutil.which("g++") is None:
            pytest.skip("no g++ to run CUDA kernels on the host")
        with standin_cupy():
            create_cuda_gpu()
    monkeypatch.setenv("SINGA_LITE_CUDNN_LIB", str(standin_cudnn()))
    if "SINGA_LITE_CUDA_LIB" not in os.environ:  # else a test has chosen one
        monkeypatch.setenv("SINGA_LITE_CUDA_LIB", str(compiling.driver()))
    # as much memory as the real one needs would only be filled with NaNs
    monkeypatch.setattr(sys.modules["singa_lite.backend.cuda.conv"], "WORKSPACE_BYTES", (1 << 20, 1 << 16))
    device: Device = state.cuda_devices[0]
    return device


def standin_environment() -> dict[str, str]:
    """Return the environment in which another Python finds all stand-ins, and gpu-check takes tiny sizes."""
    path = [str(ROOT), str(compiling.STANDIN), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path),
        "SINGA_LITE_CUDNN_LIB": str(standin_cudnn()),
        "SINGA_LITE_NCCL_LIB": str(standin_nccl()),
        "SINGA_LITE_CUDA_LIB": str(compiling.driver()),
        "STANDIN_GPUS": "1",
        # too little for the most that algorithms are measured with, which would be filled with NaNs at each convolution
        "STANDIN_MEMORY_BYTES": str(250 << 20),
        "STANDIN_VERSION": "23003",  # of NCCL, which lets ranks share a GPU
        "GPU_CHECK_QUICK": "1",
        "GPU_CHECK_TORCH": "cpu",
    }


def cuda_device_of_rank() -> Device:
    """The same in a process that ends with its test: there ``import cupy`` finds the stand-in too."""
    if 0 not in state.cuda_devices:
        standin_device(pytest.MonkeyPatch())
        sys.modules["cupy"] = sys.modules["singa_lite.backend.cuda"].cupy
    device: Device = state.cuda_devices[0]
    return device
