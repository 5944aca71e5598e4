# SPDX-License-Identifier: Apache-2.0
"""NVIDIA's run-time compiler, which needs no GPU: whether a source compiles for a given one."""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path


def load() -> ctypes.CDLL | None:
    """libnvrtc of the system or of a pip package; None if there is none."""
    names: list[str] = ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"]
    for package in ("nvidia.cu13", "nvidia.cuda_nvrtc"):
        try:
            spec = importlib.util.find_spec(package)
        except ModuleNotFoundError:
            continue
        for folder in (spec.submodule_search_locations or []) if spec else []:
            names += map(str, sorted(Path(folder, "lib").glob("libnvrtc.so.*")))
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def compile_source(nvrtc: ctypes.CDLL, source: str, architecture: str) -> tuple[str, bytes]:
    """(the compiler's complaints, "" if it compiled without a warning; PTX) for e.g. "compute_90"."""
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    assert nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernels.cu", 0, None, None) == 0
    options = (ctypes.c_char_p * 3)(
        b"--std=c++17", b"-ftz=true", f"--gpu-architecture={architecture}".encode()
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
