# SPDX-License-Identifier: Apache-2.0
"""The CUDA device of tests: the first GPU where there is one, else the stand-in of standin/, which runs its kernels."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from singa_lite.config import state
from singa_lite.device import Device, create_cuda_gpu

ROOT = Path(__file__).parents[1]
STANDIN = Path(__file__).parent / "standin"
NATIVE_TESTS = ROOT / "native" / "tests"


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


def standin_cudnn(*options: str) -> Path:
    """The stand-in of libcudnn, compiled with ``options``."""
    folder = NATIVE_TESTS / "standin" / "cudnn"
    sources = [*sorted(folder.glob("*.cc")), ROOT / "native/common/half.cc"]
    return _compiled("cudnn", sources, [folder / "standin.h"], options)


def standin_driver() -> Path:
    """The stand-in of libcuda: streams, events and graphs on threads."""
    return _compiled("cuda", [NATIVE_TESTS / "standin_cuda.cc"])


def standin_nccl(*options: str) -> Path:
    """The stand-in of libnccl over that, compiled with ``options``."""
    return _compiled("nccl", [NATIVE_TESTS / "standin_nccl.cc"], (), options)


def _compiled(
    name: str, sources: Sequence[Path], headers: Sequence[Path] = (), options: Sequence[str] = ()
) -> Path:
    """A shared library; kept in build/ for the next run."""
    text = "".join(source.read_text() for source in (*headers, *sources)) + "".join(options)
    library = ROOT / "build" / "standin" / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            built = Path(folder, library.name)
            command = ["g++", "-std=c++17", "-O1", "-Wall", "-Wextra", "-fPIC", "-shared", "-o", built, *options]
            libraries = ["-lpthread", "-ldl", "-lrt"]
            subprocess.run(
                [*command, f"-I{ROOT / 'native'}", *sources, *libraries], check=True, timeout=120
            )
            os.replace(built, library)
    return library


def cuda_device(monkeypatch: pytest.MonkeyPatch) -> Device:
    """GPU 0 or its stand-in, the same at every call."""
    if 0 not in state.cuda_devices:
        _make()
    if no_gpu():
        monkeypatch.setenv("SINGA_LITE_CUDNN_LIB", str(standin_cudnn()))
        # as much memory as the real one wants would only be filled with NaNs
        monkeypatch.setattr(
            sys.modules["singa_lite.backend.cuda.conv"], "WORKSPACE_BYTES", (1 << 20, 1 << 16)
        )
        monkeypatch.setattr(type(state.cuda_devices[0].backend), "_new_plan", _new_plan_for_capture)
    device: Device = state.cuda_devices[0]
    return device


def cuda_device_of_rank() -> Device:
    """The same in a process that ends with its test: there ``import cupy`` finds what the device uses."""
    device = cuda_device(pytest.MonkeyPatch())
    sys.modules["cupy"] = sys.modules["singa_lite.backend.cuda"].cupy
    return device


class PlanForCapture:
    """A plan whose work can be captured: the stand-in libcudnn computes at once and knows no streams."""

    STARTS = frozenset({"run", "train", "infer", "forward", "backward"})

    def __init__(self, plan: Any) -> None:
        self._plan = plan

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._plan, name)
        cuda = sys.modules["singa_lite.backend.cuda"].cupy.cuda
        if name in self.STARTS:
            return lambda *arguments: cuda.do(lambda: found(*arguments))
        if name == "measure":  # on arrays that are being written, perhaps
            cuda.get_current_stream().synchronize()
        return found


def _new_plan_for_capture(self: Any, *arguments: Any) -> PlanForCapture:
    return PlanForCapture(
        sys.modules["singa_lite.backend.cuda.cudnn"].CudnnCaller._new_plan(self, *arguments)
    )


def _make() -> None:
    if not no_gpu():
        create_cuda_gpu()
    elif shutil.which("g++") is None:
        pytest.skip("no GPU, and no g++ to run CUDA kernels on the host")
    else:
        with standin_cupy():
            create_cuda_gpu()
