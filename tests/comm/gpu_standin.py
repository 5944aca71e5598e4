# SPDX-License-Identifier: Apache-2.0
"""A GPU that is none: stand-in libcuda and libnccl, an array type and a backend whose kernels run on a stream.

Kernels are numpy's, but run in the stream's own thread, some time after the call: whatever should have waited
for them, and did not, gets old values. native/tests/standin_*.cc tell what the libraries can be asked to do.
"""

from __future__ import annotations

import ctypes
import os
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from devices import standin_nccl
from standin import compiling

from singa_lite.backend.cpu import NumpyBackend
from singa_lite.comm.base import Communicator, Work, World
from singa_lite.comm.local import LocalCommunicator
from singa_lite.comm.nccl import NcclCommunicator
from singa_lite.comm.shm import ShmCommunicator
from singa_lite.comm.wire import narrow, widen

HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def libraries() -> dict[str, str]:
    """The environment that makes singa_lite open the stand-ins."""
    return {"SINGA_LITE_CUDA_LIB": str(compiling.driver()), "SINGA_LITE_NCCL_LIB": str(standin_nccl())}


class Gpu:
    """This process's stand-in GPU, with one stream that everything computes on."""

    only: Gpu | None = None

    def __init__(self) -> None:
        self.cuda = ctypes.CDLL(os.environ["SINGA_LITE_CUDA_LIB"])
        self.cuda.standin_end_capture.restype = ctypes.c_void_p
        self.cuda.cuInit(0)
        self.cuda.cuCtxPushCurrent_v2(None)
        self.stream = ctypes.c_void_p()
        assert self.cuda.cuStreamCreateWithPriority(ctypes.byref(self.stream), 1, -5) == 0
        self.checks: list[Callable[[], None]] = []  # what a host synchronisation must ask
        self._callbacks: list[Any] = []
        self._errors: list[BaseException] = []

    @classmethod
    def get(cls) -> Gpu:
        if cls.only is None:
            cls.only = cls()
        return cls.only

    def run(self, function: Callable[[], object]) -> None:
        """Give the stream a kernel."""

        def call(_: object) -> None:
            try:
                with np.errstate(all="ignore"):
                    function()
            except BaseException as error:
                self._errors.append(error)

        self._callbacks.append(HOST_FUNCTION(call))
        self.cuda.cuLaunchHostFunc(self.stream, self._callbacks[-1], None)

    @contextmanager
    def capture(self) -> Iterator[Graph]:
        """Make a graph of what the stream is given in the ``with`` block."""
        graph = Graph(self)
        assert self.cuda.standin_begin_capture(self.stream) == 0
        yield graph
        graph.handle = ctypes.c_void_p(self.cuda.standin_end_capture(self.stream))
        assert graph.handle, "a stream that took part in the capture was not joined"

    def synchronize(self) -> None:
        """Wait on the host until the stream has done all it was given."""
        self.cuda.cuStreamSynchronize(self.stream)
        self._callbacks.clear()
        if self._errors:
            raise self._errors[0]
        for check in self.checks:
            check()


class Graph:
    """What was captured."""

    handle: Any = None

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu

    def launch(self) -> None:
        assert self._gpu.cuda.standin_launch(self.handle, self._gpu.stream) == 0

    def destroy(self) -> None:
        self._gpu.cuda.standin_destroy(self.handle)


class HostArray(np.ndarray):
    """An array of the stand-in GPU: host memory that says it is not."""

    device = types.SimpleNamespace(id=0)  # type: ignore[assignment]

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {**self.__array_interface__, "version": 3, "stream": Gpu.get().stream.value}


def on_gpu(values: Any) -> HostArray:
    """The same memory, as an array of the stand-in GPU."""
    return np.asarray(values).view(HostArray)


class HostArrays:
    """What cupy is for the real communicator."""

    kind = HostArray

    def address(self, array: HostArray) -> int:
        return array.ctypes.data

    def stream(self, device: int) -> int:
        assert device == 0 and Gpu.get().stream.value
        return Gpu.get().stream.value

    def empty(self, shape: Sequence[int], dtype: Any) -> HostArray:
        return on_gpu(np.empty(shape, dtype))

    def wrap(self, address: int, count: int, dtype: str, owner: object, device: int) -> HostArray:
        memory = (ctypes.c_char * (count * np.dtype(dtype).itemsize)).from_address(address)
        memory.owner = owner
        array = on_gpu(np.frombuffer(memory, dtype))
        Gpu.get().run(lambda: array.fill(0))
        return array

    def narrow(self, array: HostArray, wire: np.dtype) -> HostArray:
        half = self.empty(array.shape, wire)
        Gpu.get().run(lambda: np.copyto(half, narrow(np.asarray(array), wire)))
        return half

    def widen(self, half: HostArray, divisor: float, out: HostArray) -> None:
        Gpu.get().run(
            lambda: np.divide(widen(np.asarray(half)), np.float32(divisor), out=out, dtype=np.float32)
        )


class GpuBackend(NumpyBackend):
    """Numpy's kernels on the stand-in GPU's stream; only to_numpy and synchronize wait."""

    name = "cuda"

    def __init__(self) -> None:
        self.num_waits = 0

    def execute(self, kernel: str, inputs: Any, out: Any, attributes: dict[str, Any]) -> None:
        self.find(kernel)
        Gpu.get().run(lambda: NumpyBackend.execute(self, kernel, inputs, out, attributes))

    def empty(self, shape: Sequence[int], dtype: Any) -> HostArray:
        return on_gpu(super().empty(shape, dtype))

    def zeros(self, shape: Sequence[int], dtype: Any) -> HostArray:
        return on_gpu(super().zeros(shape, dtype))

    def asarray(self, values: np.ndarray) -> HostArray:
        return on_gpu(super().asarray(values))

    def to_numpy(self, array: HostArray) -> np.ndarray:
        self.synchronize()
        return np.array(array, order="C", subok=False)

    def synchronize(self) -> None:
        self.num_waits += 1
        Gpu.get().synchronize()


def host_of(world: World, timeout_s: float = 30) -> Communicator:
    return ShmCommunicator(world, timeout_s) if world.size > 1 else LocalCommunicator(World(), timeout_s)


class _ThroughWork(Work):
    def __init__(self, work: Work) -> None:
        self._work = work

    def wait(self, timeout_s: float | None = None) -> np.ndarray | None:
        result = self._work.wait(timeout_s)
        Gpu.get().synchronize()
        return None if result is None else np.asarray(result)

    def done(self) -> bool:
        return self._work.done()


class ThroughNccl(Communicator):
    """A real NcclCommunicator for numpy arrays, which it is told are a GPU's; wait() waits on the host."""

    def __init__(self, nccl: NcclCommunicator) -> None:
        super().__init__(nccl.world, nccl.timeout_s)
        self.nccl = nccl
        Gpu.get().checks = [nccl.check]

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
        Gpu.get().checks = [self.nccl.check]
        return ThroughNccl(group) if isinstance(group, NcclCommunicator) else None

    def close(self) -> None:
        self.nccl.close()
        Gpu.get().checks = []
        super().close()
