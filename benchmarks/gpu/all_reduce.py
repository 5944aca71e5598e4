# SPDX-License-Identifier: Apache-2.0
"""What our all_reduce adds to ncclAllReduce, on one GPU.

    python -m benchmarks.gpu.all_reduce

With one rank nothing travels: this measures the overhead of a call, Python, checks, events and streams, beside a plain
call of the same library by ctypes on the same memory and stream, without and with SINGA_LITE_NCCL_BLOCKING. A mean in
place starts one kernel of NCCL's that reads and writes the memory; a sum in place is nothing to do for NCCL at all, so
its row is the overhead alone. In turn, medians of turns of up to 100 calls, 4 KB to 256 MB of float32. Exits 1 when the
mean of a size is above the limit: 5 us or 2 % of the plain call, the larger.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.gpu.rows import QUICK, medians_ms, report
from singa_lite import _native, device
from singa_lite.comm.base import ReduceOp, World
from singa_lite.comm.local import LocalCommunicator
from singa_lite.comm.nccl import NcclCommunicator

SIZES_KB = [4, 64] if QUICK else [4, 64, 1024, 16 << 10, 256 << 10]
FLOAT32 = 7  # ncclFloat32
OPS: dict[ReduceOp, int] = {"mean": 4, "sum": 0}  # ncclAvg, ncclSum


class Id(ctypes.Structure):
    """ncclUniqueId."""

    _fields_ = (("bytes", ctypes.c_char * 128),)


class PlainNccl:
    """ncclAllReduce of a communicator of one, by ctypes."""

    def __init__(self) -> None:
        names = _native.library_names("SINGA_LITE_NCCL_LIB", "nvidia.nccl", "libnccl.so.2")
        self.library = open_first(names)
        self.communicator = ctypes.c_void_p()
        identity = Id()
        self.check(self.library.ncclGetUniqueId(ctypes.byref(identity)))
        self.check(self.library.ncclCommInitRank(ctypes.byref(self.communicator), 1, identity, 0))

    def check(self, status: int) -> None:
        if status:
            raise RuntimeError(f"NCCL answers with error {status}")

    def caller(self, op: ReduceOp, address: int, count: int, stream: int) -> Callable[[], None]:
        """Return a call that reduces ``count`` float32 at ``address``, in place."""
        call = self.library.ncclAllReduce
        arguments = (
            *(ctypes.c_void_p(address), ctypes.c_void_p(address), ctypes.c_size_t(count)),
            *(FLOAT32, OPS[op], self.communicator, ctypes.c_void_p(stream)),
        )
        return lambda: self.check(call(*arguments))


def open_first(names: list[str]) -> ctypes.CDLL:
    for name in names[:-1]:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return ctypes.CDLL(names[-1])


def main() -> int:
    gpu = device.create_cuda_gpu()
    ours = NcclCommunicator(LocalCommunicator(World()), gpu.id())
    os.environ["SINGA_LITE_NCCL_BLOCKING"] = "1"
    blocking = NcclCommunicator(LocalCommunicator(World()), gpu.id())
    plain = PlainNccl()
    is_met = [compare(gpu.backend, ours, blocking, plain, op, kb) for op in OPS for kb in SIZES_KB]
    ours.close()
    blocking.close()
    return int(not all(is_met))


def compare(
    backend: Any, ours: NcclCommunicator, blocking: NcclCommunicator, plain: PlainNccl, op: ReduceOp, kb: int
) -> bool:
    """Report one size; whether it is within its limit, if it has one."""
    array = backend.zeros((kb * 256,), np.float32)
    interface = array.__cuda_array_interface__
    steps = {
        "ours": lambda: ours.all_reduce(array, op).wait(),
        "blocking": lambda: blocking.all_reduce(array, op).wait(),
        "plain": plain.caller(op, interface["data"][0], array.size, interface.get("stream") or 1),
    }
    us = {name: ms * 1e3 for name, ms in medians_ms(steps, backend.synchronize).items()}
    limit = max(5.0, 0.02 * us["plain"]) if op == "mean" else None
    note = ", ".join(f"{name} {value:.1f} us" for name, value in us.items())
    title = f"{op} of {kb} KB at one rank above ncclAllReduce, us"
    report(title, us["ours"] - us["plain"], limit, note)
    report(f"{title}, SINGA_LITE_NCCL_BLOCKING=1", us["blocking"] - us["plain"], note=note)
    return limit is None or us["ours"] - us["plain"] <= limit


if __name__ == "__main__":
    sys.exit(main())
