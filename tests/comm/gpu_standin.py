# SPDX-License-Identifier: Apache-2.0
"""What tests of NCCL's communicator share: a rank's stand-in GPU (tests/standin/), its arrays, its host communicator.

Kernels run in the stream's own thread, some time after the call: whatever should have waited for them, and did not,
gets old values. cuda/driver.cc and nccl/nccl.cc say in their first lines which faults they can be asked for.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from singa_lite.comm.base import Communicator, Operation, World
from singa_lite.comm.local import LocalCommunicator
from singa_lite.comm.nccl import NcclCommunicator
from singa_lite.comm.shm import ShmCommunicator
from singa_lite.comm.work import Work
from tests.devices import cuda_device_of_rank


def gpu_of_rank() -> Any:
    """The backend of this rank's stand-in GPU, whose stream is the current one."""
    backend: Any = cuda_device_of_rank().backend
    backend.activate()
    return backend


def on_gpu(values: np.ndarray, device_id: int = 0) -> Any:
    """The same memory, as an array of the stand-in's cupy on that GPU."""
    cupy = sys.modules["cupy"]
    memory = cupy.cuda.UnownedMemory(values.ctypes.data, values.nbytes, values, device_id)
    return cupy.ndarray(values.shape, values.dtype, cupy.cuda.MemoryPointer(memory, 0), values.strides)


def host_of(world: World, timeout_s: float = 200) -> Communicator:
    return ShmCommunicator(world, timeout_s) if world.size > 1 else LocalCommunicator(World(), timeout_s)


class _ThroughWork(Work):
    has_times = False

    def __init__(self, work: Work, out: np.ndarray) -> None:
        self._work, self._target = work, out

    def _wait(self, timeout_s: float | None) -> None:
        result = self._work.wait(timeout_s)
        gpu_of_rank().synchronize()
        if result is not None:
            self._target[...] = result.get()

    def _is_done(self) -> bool:
        return self._work.done()


class ThroughNccl(Communicator):
    """An NcclCommunicator for numpy arrays, which it gets as a GPU's; wait() waits on the host."""

    def __init__(self, nccl: NcclCommunicator) -> None:
        super().__init__(nccl.world, nccl.timeout_s)
        self.nccl = nccl

    def _start(self, operation: Operation, array: Any, out: Any, scale: Any) -> Work:
        kind, name, op, root, wire_dtype = operation
        given: dict[str, Any] = {"name": name}
        if kind == "all_reduce":
            given |= {"wire_dtype": wire_dtype, "wire_scale": None if scale is None else on_gpu(scale)}
            given |= {"out": None if out is array else on_gpu(out)}
        arguments = [
            value for value in (op, root if kind in ("reduce", "broadcast") else None) if value is not None
        ]
        return _ThroughWork(getattr(self.nccl, kind)(on_gpu(array), *arguments, **given), out)

    def _new_group(self, ranks: list[int], name: str) -> ThroughNccl | None:
        group = self.nccl.new_group(ranks, name=name)
        return ThroughNccl(group) if isinstance(group, NcclCommunicator) else None

    def close(self) -> None:
        self.nccl.close()
        super().close()
