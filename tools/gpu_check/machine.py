# SPDX-License-Identifier: Apache-2.0
"""What a machine has for CUDA: GPU, driver, libraries and packages, with their versions. Needs nothing installed."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu.rows import report

PACKAGES = (
    *("numpy", "pybind11", "setuptools", "cmake", "ninja", "cupy-cuda13x", "cupy-cuda12x", "torch", "triton"),
    *("nvidia-cublas", "nvidia-cuda-nvrtc", "nvidia-cuda-runtime", "nvidia-cudnn-cu13", "nvidia-nccl-cu13"),
    *("pytest", "pytest-timeout", "hypothesis", "mpi4py", "threadpoolctl"),
    *("ml_dtypes", "safetensors", "xxhash"),
)
TOOLS = ("nvcc", "compute-sanitizer", "g++", "cmake", "ninja", "make")


def main() -> None:
    report("GPU", gpu())
    report(
        "CUDA driver",
        library_version(names("CUDA", "nvidia.cuda_driver", "libcuda.so.1"), "cuDriverGetVersion"),
    )
    report("CUDA toolkit", nvcc())
    report("cuDNN", library_version(names("CUDNN", "nvidia.cudnn", "libcudnn.so.9"), "cudnnGetVersion", True))
    report("NCCL", library_version(names("NCCL", "nvidia.nccl", "libnccl.so.2"), "ncclGetVersion"))
    report("Python", f"{platform.python_version()} at {sys.executable}; {platform.platform()}")
    report("processor", f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    report("packages", ", ".join(f"{name} {package_version(name)}" for name in PACKAGES))
    report("tools", ", ".join(f"{name} {find_tool(name) or 'missing'}" for name in TOOLS))


def gpu() -> str:
    """Name, driver, memory and clocks as nvidia-smi prints them."""
    query = "--query-gpu=name,driver_version,memory.total,memory.used,utilization.gpu,clocks.sm,compute_cap"
    try:
        done = subprocess.run(
            ["nvidia-smi", query, "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"nvidia-smi: {error}"
    return "; ".join((done.stdout or done.stderr).strip().splitlines())


def nvcc() -> str:
    tool = find_tool("nvcc")
    if tool is None:
        return "no nvcc"
    done = subprocess.run([tool, "--version"], capture_output=True, text=True, timeout=20, check=False)
    return next((line for line in done.stdout.splitlines() if "release" in line), done.stderr.strip())


def find_tool(name: str) -> str | None:
    """A program of PATH or of a CUDA toolkit where it is installed by default."""
    folders = [os.environ.get("PATH", os.defpath), "/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer"]
    return shutil.which(name, path=os.pathsep.join(folders))


def names(word: str, package: str, file: str) -> list[str]:
    """Return what SINGA_LITE_<word>_LIB names, else where a library of a pip package may be, and the loader's."""
    if chosen := os.environ.get(f"SINGA_LITE_{word}_LIB"):
        return [chosen]
    try:
        spec = importlib.util.find_spec(package)
    except ModuleNotFoundError:
        spec = None
    folders = (spec.submodule_search_locations or []) if spec else []
    return [*(str(Path(folder, "lib", file)) for folder in folders), file]


def library_version(candidates: Sequence[str], function: str, returns_it: bool = False) -> str:
    """What ``function`` of the first library that opens says, e.g. "22809 (libnccl.so.2)"."""
    for name in candidates:
        try:
            call = getattr(ctypes.CDLL(name), function)
        except (OSError, AttributeError) as error:
            reason = str(error)
            continue
        number = ctypes.c_int()
        if returns_it:
            call.restype = ctypes.c_size_t
            return f"{call()} ({name})"
        status = call(ctypes.byref(number))
        return f"{number.value} ({name})" if status == 0 else f"error {status} of {name}"
    return f"missing: {reason}"


def package_version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


if __name__ == "__main__":
    main()
