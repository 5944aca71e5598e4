# SPDX-License-Identifier: Apache-2.0
"""NVIDIA's run-time compiler, which needs no GPU: whether a source compiles for a given one."""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def load() -> ctypes.CDLL | None:
    """libnvrtc of a pip package or of the system; None if there is none."""
    for folder in folders():
        # CUDA 13's compiler looks for its other half by name alone; one that is open is found so
        for path in sorted(folder.glob("libnvrtc-builtins.so.*")):
            with suppress(OSError):
                ctypes.CDLL(str(path))
        for path in sorted(folder.glob("libnvrtc.so.*")):
            with suppress(OSError):
                return ctypes.CDLL(str(path))
    for name in ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"):
        with suppress(OSError):
            return ctypes.CDLL(name)
    return None


def folders() -> Iterator[Path]:
    """Where pip puts it, with CUDA 13 and with CUDA 12."""
    for package in ("nvidia.cu13", "nvidia.cuda_nvrtc"):
        with suppress(ModuleNotFoundError):
            spec = importlib.util.find_spec(package)
            for folder in (spec.submodule_search_locations or []) if spec else []:
                yield Path(folder, "lib")


def compile_source(nvrtc: ctypes.CDLL, source: str, architecture: str) -> tuple[str, bytes]:
    """(the compiler's complaints, "" if it compiled without a warning; PTX) for e.g. "compute_90"."""
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    assert nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernels.cu", 0, None, None) == 0
    given = ("--std=c++17", "-ftz=true", "--device-as-default-execution-space")  # as cupy has them
    options = (ctypes.c_char_p * 4)(
        *(option.encode() for option in (*given, f"--gpu-architecture={architecture}"))
    )
    status = nvrtc.nvrtcCompileProgram(program, len(options), options)
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    ptx = ctypes.create_string_buffer(0)
    if status == 0:
        nvrtc.nvrtcGetPTXSize(program, ctypes.byref(size))
        ptx = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetPTX(program, ptx)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    text = log.value.decode()
    return text or (f"error {status}" if status else ""), ptx.value
