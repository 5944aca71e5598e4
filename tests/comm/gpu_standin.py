# SPDX-License-Identifier: Apache-2.0
"""What tests of NCCL's communicator share: a rank's stand-in GPU (tests/standin/), its arrays, its host communicator.

Kernels run in the stream's own thread, some time after the call: whatever should have waited for them, and did not,
gets old values. native/tests/standin_*.cc tell what the libraries can be asked to do.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from devices import cuda_device_of_rank

from singa_lite.comm.base import Communicator, Work, World
from singa_lite.comm.local import LocalCommunicator
from singa_lite.comm.nccl import NcclCommunicator
from singa_lite.comm.shm import ShmCommunicator


def gpu_of_rank() -> Any:
    """The backend of this rank's stand-in GPU, whose stream is the current one."""
    backend: Any = cuda_device_of_rank().backend
    backend.activate()
    return backend


def on_gpu(values: np.ndarray) -> Any:
    """The same memory, as an array of the stand-in's cupy."""
    cupy = sys.modules["cupy"]
    memory = cupy.cuda.UnownedMemory(values.ctypes.data, values.nbytes, values, 0)
    return cupy.ndarray(values.shape, values.dtype, cupy.cuda.MemoryPointer(memory, 0), values.strides)


def host_of(world: World, timeout_s: float = 30) -> Communicator:
    return ShmCommunicator(world, timeout_s) if world.size > 1 else LocalCommunicator(World(), timeout_s)


class _ThroughWork(Work):
    def __init__(self, work: Work) -> None:
        self._work = work

    def wait(self, timeout_s: float | None = None) -> np.ndarray | None:
        result = self._work.wait(timeout_s)
        gpu_of_rank().synchronize()
        return None if result is None else result.get()

    def done(self) -> bool:
        return self._work.done()


class ThroughNccl(Communicator):
    """An NcclCommunicator for numpy arrays, which it gets as a GPU's; wait() waits on the host."""

    def __init__(self, nccl: NcclCommunicator) -> None:
        super().__init__(nccl.world, nccl.timeout_s)
        self.nccl = nccl

    def _all_reduce(self, array: Any, op: Any, wire_dtype: str | None, name: str) -> Work:
        return _ThroughWork(self.nccl.all_reduce(on_gpu(array), op, wire_dtype=wire_dtype, name=name))

    def _reduce(self, array: Any, op: Any, root: int, name: str) -> Work:
        return _ThroughWork(self.nccl.reduce(on_gpu(array), op, root, name=name))

    def _broadcast(self, array: Any, root: int, name: str) -> Work:
        return _ThroughWork(self.nccl.broadcast(on_gpu(array), root, name=name))

    def _all_gather(self, array: Any, name: str) -> Work:
        return _ThroughWork(self.nccl.all_gather(on_gpu(array), name=name))

    def _reduce_scatter(self, array: Any, op: Any, name: str) -> Work:
        return _ThroughWork(self.nccl.reduce_scatter(on_gpu(array), op, name=name))

    def _new_group(self, ranks: list[int], name: str) -> ThroughNccl | None:
        group = self.nccl.new_group(ranks, name=name)
        return ThroughNccl(group) if isinstance(group, NcclCommunicator) else None

    def close(self) -> None:
        self.nccl.close()
        super().close()
