# SPDX-License-Identifier: Apache-2.0
"""What a collective on GPU arrays costs the host of our own: libcuda, libnccl and cupy do nothing.

    python benchmarks/nccl_call.py          needs a C compiler and no GPU

Printed: microseconds of ``all_reduce(array).wait()`` on one rank, median and least of 31 rounds of 3000 calls. What
the driver, NCCL and the GPU take comes on top.
"""

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from singa_lite.comm.base import World
from singa_lite.comm.local import LocalCommunicator
from singa_lite.comm.nccl import NcclCommunicator

ROUNDS, CALLS = 31, 3000
GIVES = {  # function -> what it does before it returns 0
    "cuDevicePrimaryCtxRetain(void **context, int device)": "*context = (void *)0x1000;",
    "cuCtxGetCurrent(void **context)": "*context = (void *)0x1000;",  # as cupy leaves it
    "cuStreamCreateWithPriority(void **stream, unsigned flags, int priority)": "*stream = stream;",
    "cuEventCreate(void **event, unsigned flags)": "*event = event;",
    "cuPointerGetAttribute(int *device, int attribute, void *memory)": "*device = 0;",
    "cuStreamIsCapturing(void *stream, int *status)": "*status = 0;",
    "cuCtxGetDevice(int *device)": "*device = 0;",
    "ncclGetVersion(int *version)": "*version = 22809;",
    "ncclCommInitRankConfig(void **comm)": "*comm = comm;",
    "ncclCommGetAsyncError(void *comm, int *status)": "*status = 0;",
}
NOTHING = """
cuInit cuGetErrorString cuDeviceGetUuid_v2 cuCtxPushCurrent_v2 cuCtxPopCurrent_v2
cuThreadExchangeStreamCaptureMode cuCtxGetStreamPriorityRange cuStreamDestroy_v2 cuStreamWaitEvent cuEventDestroy_v2
cuEventRecord cuEventQuery ncclGetErrorString ncclGetLastError ncclGetUniqueId ncclCommFinalize ncclCommDestroy
ncclCommAbort ncclAllReduce ncclReduce ncclBroadcast ncclAllGather ncclReduceScatter ncclGroupStart ncclGroupEnd
ncclSend ncclRecv
"""


class Memory:
    """Device memory that nobody looks at."""

    __slots__ = ("device_id", "ptr")

    def __init__(self) -> None:
        self.ptr, self.device_id = 0x700000, 0


class Array:
    """What the communicator reads of a cupy array, as attributes that are as quick as cupy's."""

    class flags:
        c_contiguous = True

    __slots__ = ("__weakref__", "data", "dtype", "itemsize", "nbytes", "ndim", "shape", "size")

    def __init__(self, size: int) -> None:
        self.dtype, self.size, self.shape, self.ndim = np.dtype(np.float32), size, (size,), 1
        self.itemsize, self.nbytes, self.data = 4, 4 * size, Memory()

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        return {"shape": self.shape, "typestr": "<f4", "version": 3, "data": (self.data.ptr, False)}


def stand_in() -> Any:
    """What the communicator reads of cupy, as quick as that."""
    stream = SimpleNamespace(ptr=0x5000, synchronize=lambda: None)
    cuda = SimpleNamespace(get_current_stream=lambda device=-1: stream)
    return SimpleNamespace(
        ndarray=Array, cuda=cuda, ElementwiseKernel=lambda *source: None, ones=lambda size, dtype: Array(size)
    )


def build(folder: str) -> Path:
    """A library with both interfaces."""
    lines = [f"int {name} {{ {body} return 0; }}" for name, body in GIVES.items()]
    lines += [f"int {name}(void) {{ return 0; }}" for name in NOTHING.split()]
    source, library = Path(folder, "nothing.c"), Path(folder, "nothing.so")
    source.write_text("\n".join(lines) + "\n")
    subprocess.run(["cc", "-O2", "-w", "-shared", "-fPIC", "-o", library, source], check=True)
    return library


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        library = build(folder)
        os.environ["SINGA_LITE_CUDA_LIB"] = os.environ["SINGA_LITE_NCCL_LIB"] = str(library)
        cupy = sys.modules["cupy"] = stand_in()
        communicator = NcclCommunicator(LocalCommunicator(World()), 0)
        array = cupy.ones(1 << 20, np.float32)
        times_us = []
        for _ in range(ROUNDS):
            start = time.perf_counter()
            for _ in range(CALLS):
                communicator.all_reduce(array, "sum", name="conv1.w").wait()
            times_us.append((time.perf_counter() - start) / CALLS * 1e6)
        communicator.close()
    print(f"{platform.machine()}, Python {platform.python_version()}, load {os.getloadavg()[0]:.1f}")
    print(
        f"all_reduce(array).wait(): median {statistics.median(times_us):.2f} us, least {min(times_us):.2f} us"
    )


if __name__ == "__main__":
    main()
