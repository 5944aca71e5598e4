# SPDX-License-Identifier: Apache-2.0
"""Collectives on GPU memory over NCCL: arrays of CUDA's array interface (cupy's), one GPU a rank.

What lives here: arrays, who takes part on which GPU, the lifetime of arrays in flight. What does not: order on
the GPU, noticing failures and everything that waits, which is native (native/comm/nccl.h tells how); numpy
arrays, which go to the host communicator (dispatch.py).

Note [scaling]: a mean is one call, ncclAvg, which for floats is NCCL's sum of values multiplied by 1/N on their way
in. What is scaled by a kernel of ours would lose by that: float32 values that travel in 16 bits are divided in float32
after their sum (a half divided before may vanish), and so is fp16's scale undone; sparse sums are not NCCL's. So no
operator of NCCL's with another factor (ncclRedOpCreatePreMulSum) is made. Arrays of float16 themselves are averaged by
ncclAvg, which keeps their sum from overflowing.

Note [groups]: a group gets a communicator by an id of its own, not by ncclCommSplit, which all ranks of the parent
would have to call while it is idle, and whose saving, shared channels (splitShare), would bind the ends of both.
"""

from __future__ import annotations

import os
import socket
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from .. import _native, config
from ..config import state
from ..errors import CommError, DTypeError
from ..graph import is_repeating
from .base import DTYPES, Array, Communicator, Graph, MakesArrays, ReduceOp, Work, is_cuda_array
from .gpu_arrays import CupyArrays
from .wire import BFLOAT16, WIRE_DTYPES

# The numbers of native/comm/types.h.
_ALL_REDUCE, _REDUCE, _BROADCAST, _ALL_GATHER, _REDUCE_SCATTER = range(5)
_OPS = {"sum": 0, "mean": 1, "max": 2, "min": 3}
_NO_OP = 4
_DTYPES = {dtype: code for code, dtype in enumerate((*DTYPES, BFLOAT16))}
_FLOATS = frozenset(dtype for dtype in DTYPES if dtype.kind == "f")
REGISTERED_BYTES = 1 << 20  # below this a buffer is ordinary memory: NCCL's comes in pieces of 2 MiB or more
_ADDING = threading.Lock()
SHARES_GPU = 23000  # NCCL 2.30, the first that lets ranks share a GPU, if NCCL_MULTI_RANK_GPU_ENABLE=1


class Lease:
    """Registered memory while an array lies in it; afterwards the next array of its size gets it.

    Args:
        memory: native.
        free: of each size in bytes, what no array lies in; emptied for good when the communicator ends.
    """

    def __init__(self, memory: Any, free: dict[int, list[Any]]) -> None:
        self._memory, self._free = memory, free

    def __del__(self) -> None:
        if self._memory.bytes in self._free:
            self._free[self._memory.bytes].append(self._memory)


class NcclWork(Work):
    """A collective of an NcclCommunicator in flight."""

    _half: tuple[Array, float, Array] | None = None  # what the 16 bits on the wire must become
    is_ordered = False

    def __init__(self, communicator: NcclCommunicator, op: Any, array: Array, result: Array | None) -> None:
        self._communicator = communicator
        self._op = op  # native
        self._array = array
        self._result = result

    def wait(self, timeout_s: float | None = None) -> Array | None:
        """Hold the current stream back until the collective has ended; the host does not wait.

        ``timeout_s`` is not used: the communicator's own runs on the GPU, see ``NcclCommunicator``.
        """
        if is_repeating():
            return self._result
        communicator = self._communicator
        communicator._wait(self._op, communicator._stream(self._array))
        if self._half is not None:
            half, divisor, out = self._half
            communicator._arrays.widen(half, divisor, out)
            self._half = None
        self.is_ordered = True
        communicator._let_go()
        return self._result

    def done(self) -> bool:
        return bool(self._communicator._native.is_done(self._op))

    def captured_by(self, graph: Graph) -> NcclCommunicator:
        self._communicator._graphs.add(graph)
        return self._communicator

    def relaunched(self) -> None:
        self._communicator.watch(self._array, f"a CUDA graph with collectives up to {self._op.label}")


class NcclCommunicator(Communicator):
    """Ranks with a GPU each, on one host or many; made by all ranks of ``host`` together.

    A collective starts once the stream that was current at the call has written the array, and runs on a stream
    of its own. ``wait()`` holds back the stream that is current then; no call blocks the host. What fails later -
    a peer that died, an error of the network, a collective that runs for longer than ``timeout_s`` after its
    input was ready - aborts NCCL and is raised by the next call or by ``check()``; the communicator stays broken.

    Where the contract of ``Communicator`` cannot be NCCL's: sums come in an order NCCL chooses, though all ranks
    get the same bits; float16 and bfloat16 are added in their own precision, so wider worlds round more often; max
    and min may drop NaN; the ranks' calls are not compared, so a rank that makes another one is noticed by the
    time-out. With ``wire_dtype`` the result is in the array only after ``wait()``; its mean is the sum on the wire,
    divided in float32. Groups run on their parent's stream.

    Args:
        host: the communicator of the same ranks for numpy arrays and objects.
        device: number of this rank's GPU.
        timeout_s: None is that of ``host``.
        parent: the native communicator whose stream this one runs on; None makes one.

    Raises:
        CommError: on every rank, where one has no NCCL 2.14 or later, no GPU or another version, or two ranks
            share a GPU; or a rank has not come in time.
    """

    def __init__(
        self,
        host: Communicator,
        device: int,
        *,
        timeout_s: float | None = None,
        parent: Any = None,
    ) -> None:
        super().__init__(host.world, host.timeout_s if timeout_s is None else timeout_s)
        self.host, self.device = host, device
        self._arrays = CupyArrays(device)
        self.kind, self._address, self._stream = self._arrays.kind, self._arrays.address, self._arrays.stream
        mine, native, library, driver = _introduce(self.rank, device)
        everyone: list[dict[str, Any]] = host.all_gather_object(mine, name="NCCL's start")
        _check_ranks(everyone)
        peers = [
            (rank, other["process"])
            for rank, other in enumerate(everyone)
            if rank != self.rank and other["host"] == mine["host"]
        ]
        identity = bytes.fromhex(everyone[0]["id"])
        self._native: Any = native.Communicator(
            library,
            driver,
            identity,
            self.rank,
            self.size,
            device,
            self.timeout_s,
            peers,
            parent,
            config.env("SINGA_LITE_NCCL_BLOCKING") == "1",
        )
        self._give, self._wait = self._native.start, self._native.wait
        self._graphs: weakref.WeakSet[Graph] = weakref.WeakSet()
        # Runs when this object goes or the interpreter exits, whichever is first; close() is idempotent.
        self._finalizer = weakref.finalize(self, _leave, self._graphs, self._native.close)
        with _ADDING:
            living = (known for known in state.gpu_communicators if known() is not None)
            state.gpu_communicators = (*living, weakref.ref(self))
        self._in_flight: deque[NcclWork] = deque()  # keeps arrays of dropped works alive
        self._free: dict[int, list[Any]] = {}  # registered memory, see Lease
        are_apart = 1 < self.size == len({other["gpu"] for other in everyone})
        self._registers = are_apart and all(other["registers"] for other in everyone)

    @property
    def is_alone(self) -> bool:
        """False: a world of one that wants NCCL gets it."""
        return False

    def barrier(self, *, name: str = "barrier") -> None:
        self.host.barrier(name=name)

    def all_gather_object(self, value: Any, *, name: str = "all_gather_object") -> list[Any]:
        return self.host.all_gather_object(value, name=name)

    def buffer(self, num_elements: int, dtype: str = "float32", backend: MakesArrays | None = None) -> Array:
        """A flat array of zeros in memory that NCCL has registered, so that it need not copy; else an ordinary one.

        NCCL forbids that some ranks give it registered memory and others not. So the ranks agree, by the host,
        on every buffer of 1 MiB or more (``REGISTERED_BYTES``): where one cannot have such memory, none gets it.
        In a captured step, whose memory is the graph's, at one rank, where ranks share a GPU and before NCCL 2.19
        it is ordinary. Registered memory is used again for the next buffer of its size once its array is gone.
        """
        num_bytes = num_elements * np.dtype(dtype).itemsize
        is_ours = backend is not None and backend.name == "cuda" and num_bytes >= REGISTERED_BYTES
        if not (self._registers and is_ours) or state.of_thread.rehearsal is not None:
            return super().buffer(num_elements, dtype, backend)
        lease = self._lease(num_bytes)
        answer = np.array([lease is not None], np.int32)
        self.host.all_reduce(answer, "min", name="buffer").wait()
        if lease is not None and answer[0]:
            address = lease._memory.address
            return self._arrays.wrap(address, num_elements, dtype, lease)  # type: ignore[no-any-return]
        self._registers = False  # nor will the next time, here or elsewhere
        return super().buffer(num_elements, dtype, backend)

    def _lease(self, num_bytes: int) -> Lease | None:
        free = self._free.setdefault(num_bytes, [])
        memory = free.pop() if free else self._native.allocate(num_bytes)
        return None if memory is None else Lease(memory, self._free)

    def check(self) -> None:
        """Raise the CommError of a collective that failed after its Work's wait(), unless this is closed."""
        self._native.check_failure()

    def watch(self, array: Array, name: str) -> None:
        """Let the time-out count for what ``array``'s stream was given so far, e.g. a graph with collectives."""
        self._native.watch(self._stream(array), name)

    def abort(self, reason: str) -> None:
        _leave(self._graphs, lambda: self._native.abort(reason))
        self.close()

    def close(self) -> None:
        _leave(self._graphs, self._native.close)
        self._in_flight.clear()
        self._free.clear()

    def _all_reduce(self, array: Array, op: ReduceOp, wire_dtype: str | None, name: str) -> Work:
        if wire_dtype is None:
            return self._start(_ALL_REDUCE, _OPS[op], array, array, name)
        half = self._arrays.narrow(array, WIRE_DTYPES[wire_dtype])
        # NCCL would multiply by 1/N before it adds: in float16 that loses small values
        work = self._start(_ALL_REDUCE, _OPS["sum" if op == "mean" else op], half, half, name)
        work._half = (half, self.size if op == "mean" else 1.0, array)
        return work

    def _reduce(self, array: Array, op: ReduceOp, root: int, name: str) -> Work:
        return self._start(_REDUCE, _OPS[op], array, array, name, root=root)

    def _broadcast(self, array: Array, root: int, name: str) -> Work:
        return self._start(_BROADCAST, _NO_OP, array, array, name, root=root)

    def _all_gather(self, array: Array, name: str) -> Work:
        result = self._arrays.empty((self.size, *array.shape), array.dtype)
        return self._start(_ALL_GATHER, _NO_OP, array, result, name, result=result)

    def _reduce_scatter(self, array: Array, op: ReduceOp, name: str) -> Work:
        result = self._arrays.empty((array.shape[0] // self.size, *array.shape[1:]), array.dtype)
        return self._start(_REDUCE_SCATTER, _OPS[op], array, result, name, result=result)

    def _start(
        self,
        kind: int,
        op: int,
        array: Array,
        out: Array,
        name: str,
        *,
        root: int = 0,
        result: Array | None = None,
    ) -> NcclWork:
        self._let_go()
        count = array.size if kind != _REDUCE_SCATTER else out.size
        source, stream = self._address(array), self._stream(array)
        target = source if out is array else self._address(out)
        native = self._give(kind, op, _DTYPES[array.dtype], root, source, target, count, name, stream)
        work = NcclWork(self, native, array, result)
        self._in_flight.append(work)
        return work

    def _let_go(self) -> None:
        """Let go of arrays of collectives that nobody has to wait for any more."""
        in_flight = self._in_flight
        while in_flight and (in_flight[0].is_ordered or in_flight[0]._op.has_ended):
            in_flight.popleft()

    def _new_group(self, ranks: list[int], name: str) -> NcclCommunicator | None:
        host = self.host.new_group(ranks, name=name)
        if host is None:
            return None
        return NcclCommunicator(host, self.device, timeout_s=self.timeout_s, parent=self._native)

    def _check_array(self, array: Any, op: ReduceOp | None = None, *, writes: bool = True) -> None:
        if type(array) is self.kind and array.dtype in _FLOATS and array.flags.c_contiguous:
            return  # the usual array, soon found to be right; a closed communicator is noticed below
        super()._check_array(array, op, writes=writes)

    def _check_kind(self, array: object) -> None:
        if isinstance(array, np.ndarray) and not is_cuda_array(array):
            raise DTypeError(f"{self!r}: numpy arrays travel by the host communicator, not by NCCL")
        if not is_cuda_array(array):
            raise DTypeError(f"{self!r}: expected a CUDA array, got {type(array).__name__}")


def _leave(graphs: weakref.WeakSet[Graph], end: Callable[[], None]) -> None:
    """End NCCL's communicator by ``end``. NCCL waits in it, without end, for all graphs that hold its kernels."""
    for graph in list(graphs):
        graph.give_up()
    graphs.clear()
    end()


def describe() -> str:
    """Whether CUDA arrays could travel from this process, "works: ..." or "no: ...". Opens NCCL and the driver."""
    mine, *_ = _introduce(1, 0)  # as a rank that makes no id, which would start NCCL's network
    if "failure" in mine:
        return f"no: {mine['failure']}"
    version = mine["version"]
    return f"works: NCCL {version // 10000}.{version // 100 % 100}.{version % 100}, one GPU a rank"


def device_of(array: Any) -> int:  # Any: of CUDA's array interface
    """Number of the GPU that a CUDA array lives on."""
    driver = _load().Driver(_driver_names())
    return int(driver.device_of(array.__cuda_array_interface__["data"][0]))


def _load() -> Any:
    native, reason = _native.load("_nccl")
    if native is None:
        raise CommError(f"NCCL: the native module is missing ({reason})")
    return native


def _driver_names() -> list[str]:
    return _native.library_names("SINGA_LITE_CUDA_LIB", "nvidia.cuda_driver", "libcuda.so.1")


def _introduce(rank: int, device: int) -> tuple[dict[str, Any], Any, Any, Any]:
    """What the others must know of this rank, and what it has opened; a failure is told, not raised."""
    mine: dict[str, Any] = {"host": _host_identity(), "name": socket.gethostname(), "process": os.getpid()}
    native = library = driver = None
    try:
        native = _load()
        library = native.Library(_native.library_names("SINGA_LITE_NCCL_LIB", "nvidia.nccl", "libnccl.so.2"))
        driver = native.Driver(_driver_names())
        mine |= {"version": library.version, "device": device, "gpu": driver.uuid(device)}
        mine["shares"] = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
        mine["registers"] = library.registers and config.env("SINGA_LITE_NCCL_REGISTER", "1") == "1"
        mine["id"] = library.unique_id().hex() if rank == 0 else ""
    except CommError as error:
        mine["failure"] = str(error)
    return mine, native, library, driver


def _check_ranks(everyone: list[dict[str, Any]]) -> None:
    """Raise one CommError on all ranks where these cannot work together."""
    for rank, other in enumerate(everyone):
        if "failure" in other:
            raise CommError(f"NCCL: rank {rank} on {other['name']} cannot take part: {other['failure']}")
        if other["version"] != everyone[0]["version"]:
            raise CommError(
                f"NCCL: rank 0 has version {everyone[0]['version']}, rank {rank} {other['version']}; "
                "install the same on every host"
            )
    may_share = everyone[0]["version"] >= SHARES_GPU and all(other["shares"] for other in everyone)
    ranks_on: dict[str, int] = {}
    for rank, other in enumerate(everyone):
        first = ranks_on.setdefault(other["gpu"], rank)
        if first != rank and not may_share:
            raise CommError(
                f"NCCL: ranks {first} and {rank} both use GPU {other['device']} of {other['name']}; give each rank its "
                "own, as device.create_device(local_rank) does, or start no more ranks than there are GPUs"
            )


def _host_identity() -> str:
    """Equal for processes that can name each other by process id."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip() + os.readlink("/proc/self/ns/pid")
