# SPDX-License-Identifier: Apache-2.0
"""Collectives on GPU memory over NCCL: arrays of CUDA's array interface (cupy's), one GPU a rank.

What lives here: arrays, who takes part on which GPU, the lifetime of arrays in flight. What does not: order on
the GPU, noticing failures and everything that waits, which is native (see native/comm/nccl.h); numpy
arrays, which go to the host communicator (dispatch.py).

Note [scaling]: a mean is one call, ncclAvg, which for floats is NCCL's sum of values multiplied by 1/N on their way
in. What is scaled by a kernel of ours would lose by that: float32 values sent in 16 bits are divided in float32
after their sum (a half divided before may vanish), and so is fp16's scale undone; sparse sums are not NCCL's. So no
operator of NCCL's with another factor (ncclRedOpCreatePreMulSum) is made. Arrays of float16 themselves are averaged by
ncclAvg, which keeps their sum from overflowing.

Note [groups]: a group gets a communicator by an id of its own, not by ncclCommSplit, which all ranks of the parent
would have to call while it is idle, and whose saving, shared channels (splitShare), would bind the ends of both.

Note [new calls]: NCCL does not compare the ranks' calls, and of one size adds what does not belong together. So the
first call of each Operation makes a barrier of the host under a name that has all of it, as the host's transports
compare names. Ranks that call something else for the first time get a CommError with both texts; one that does what is
new to it alone waits at the barrier, and the others in NCCL, until the time-out. A call that is repeated costs a look
into a dict; ranks that repeat calls in another order are not noticed. A scheme that has a number of its options in the
name (sparseThreshold), and reads it from a schedule, makes the barrier whenever the number is new.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .. import _native
from ..config import is_on, state
from ..error_stream import sendable
from ..errors import CommError, DTypeError
from ..graph.recorder import unrecorded
from .base import DTYPES, HAS_BLOCKS, Communicator, Graph, Operation, ReduceOp
from .codes import DTYPE_CODES, KIND_CODES, OP_CODES
from .flight_record import GPU_TITLE
from .flight_recorder import is_recording, title_of
from .gpu_arrays import UNKNOWN_DEVICE, CupyArrays, address_of, is_cuda_array
from .gpu_recorder import GpuRecorder
from .wire import WIRE_DTYPES
from .work import Array, Work, uncounted

_FLOATS = frozenset(dtype for dtype in DTYPES if dtype.kind == "f")
_ADDING = threading.Lock()
MAX_COMPARED = 4096  # Operations; the oldest is forgotten, as all ranks forget it, and compared again
LEAVE_S = 10.0  # NCCL's end may wait for peers that are gone
SHARES_GPU = 23000  # NCCL 2.30, the first that lets ranks share a GPU, if NCCL_MULTI_RANK_GPU_ENABLE=1


class NcclWork(Work):
    """A collective of an NcclCommunicator in flight. The host never waits for it, so its ``times`` are None."""

    has_times = False

    def __init__(self, communicator: NcclCommunicator, op: Any, array: Array, out: Array) -> None:
        self._communicator = communicator
        self._op = op  # native
        self._stream_of, self._out = array, out
        # what is sent in 16 bits, divisor, wire_scale
        self._narrow: tuple[Array, float, Array | None] | None = None

    def _wait(self, timeout_s: float | None) -> None:
        """Hold the current stream back until the collective has ended; the host does not wait.

        ``timeout_s`` is not used: the communicator's own runs on the GPU, see ``NcclCommunicator``.
        """
        communicator = self._communicator
        try:
            communicator._wait(self._op, communicator._arrays.stream(self._stream_of))
        except CommError as error:
            communicator._report(error)
            raise
        if self._narrow is not None:
            half, divisor, scale = self._narrow
            communicator._arrays.widen(half, divisor, scale, self._out)
            self._narrow = None

    def _is_done(self) -> bool:
        return bool(self._communicator._native.is_done(self._op))


class NcclCommunicator(Communicator):
    """Ranks with a GPU each, on one host or many; made by all ranks of ``host`` together.

    A collective starts once the stream that was current at the call has written the array, and runs on a stream
    of its own. ``wait()`` holds back the stream that is current then; no call blocks the host. What fails later -
    a peer that died, an error of the network, a collective that runs for longer than ``timeout_s`` after its
    input was ready - aborts NCCL and is raised by the next call or by ``check()``; the communicator stays broken.

    Where the contract of ``Communicator`` cannot be NCCL's: sums come in an order NCCL chooses, though all ranks
    get the same bits; float16 and bfloat16 are added in their own precision, so wider worlds round more often; max
    and min may drop NaN; the ranks' calls are compared when they are new, Note [new calls], so a rank that repeats
    another one is noticed by the time-out at best. With ``wire_dtype`` the result is in the array only after
    ``wait()``; its mean is the sum on the wire, divided in float32. Groups run on their parent's stream. One that
    nobody holds any more lives as long as the process.

    Args:
        host: the communicator of the same ranks for numpy arrays and objects.
        device: number of this rank's GPU.
        timeout_s: None is that of ``host``.
        parent: the native communicator whose stream this one runs on; None makes one.
        name: of a group, for reports.

    Raises:
        CommError: on every rank, where one has no NCCL 2.14 or later, no GPU or another version, or two ranks
            share a GPU; or a rank has not come in time.
    """

    transport = "nccl"
    joins_worlds = False

    @classmethod
    def describe(cls) -> str:
        """Return as ``Communicator.describe``. Opens NCCL and the driver."""
        mine, *_ = _introduce(1, 0)  # as a rank that makes no id, which would start NCCL's network
        if "failure" in mine:
            return f"no: {mine['failure']}"
        version = mine["version"]
        return f"works: NCCL {version // 10000}.{version // 100 % 100}.{version % 100}, one GPU a rank"

    def __init__(
        self,
        host: Communicator,
        device: int,
        *,
        timeout_s: float | None = None,
        parent: Any = None,
        name: str = "of GPUs",
    ) -> None:
        super().__init__(host.world, host.timeout_s if timeout_s is None else timeout_s)
        self.host, self.device = host, device
        self._arrays = CupyArrays(device)
        self.kind = self._arrays.kind
        mine, native, library, driver = _introduce(self.rank, device)
        everyone: list[dict[str, Any]] = host.all_gather_object(mine, name="NCCL's start")
        names = host.world.members_of(range(host.size))
        _check_ranks(everyone, names)
        peers = [
            (names[rank], other["process"])
            for rank, other in enumerate(everyone)
            if rank != self.rank and other["host"] == mine["host"]
        ]
        identity, is_blocking = bytes.fromhex(everyone[0]["id"]), is_on("SINGA_LITE_NCCL_BLOCKING")
        ranks = (self.rank, names[self.rank], self.size)
        self._native: Any = native.Communicator(
            library, driver, identity, *ranks, device, self.timeout_s, peers, parent, is_blocking
        )
        self._start_native, self._wait = self._native.start, self._native.wait
        self.flight_recorder = self._recorder = self._make_recorder(everyone, name)
        self._compared: dict[Operation, None] = {}
        self._graphs: weakref.WeakSet[Graph] = weakref.WeakSet()
        # not when this object goes: NCCL's end waits for all ranks, and each collects garbage when it likes
        self._at_exit = weakref.finalize(_leave, _leave_at_exit, self._graphs, self._native)
        self._is_first = parent is None
        with _ADDING:
            living = (known for known in state.gpu_communicators if known() is not None)
            state.gpu_communicators = (*living, weakref.ref(self))

    @property
    def is_alone(self) -> bool:
        """False: a world of one that requests NCCL gets it."""
        return False

    def barrier(self, *, name: str = "barrier") -> None:
        self.host.barrier(name=name)

    def all_gather_object(self, value: Any, *, name: str = "all_gather_object") -> list[Any]:
        return self.host.all_gather_object(value, name=name)

    def check(self) -> None:
        """Raise the CommError of a collective that failed after its Work's wait(), unless this is closed."""
        try:
            self._native.check_failure()
        except CommError as error:
            self._report(error)
            raise

    def follow_graph(self, graph: Graph, last: Work) -> tuple[Callable[[], None], Callable[[], None]]:
        assert isinstance(last, NcclWork)
        self._graphs.add(graph)
        array, label = last._out, f"a CUDA graph with collectives up to {last._op.label}"
        native, stream = self._native, self._arrays.stream
        return lambda: native.begin_graph(stream(array), label), lambda: native.end_graph(stream(array))

    def abort(self, reason: str) -> None:
        self._wait_no_more()
        _leave(self._graphs, lambda: self._native.abort(sendable(reason)))
        self.close()

    def close(self) -> None:
        if self._at_exit.detach():
            begin = time.monotonic()
            _leave(self._graphs, self._native.close)
            if time.monotonic() - begin >= min(LEAVE_S, self.timeout_s):
                self._wait_no_more()

    def _wait_no_more(self) -> None:
        """Let groups end at once at the end of this process: where this has failed, peers do not come to theirs."""
        if self._is_first and state.nccl_deadline is None:
            state.nccl_deadline = time.monotonic()

    def _start(self, operation: Operation, array: Array, out: Array, scale: Array | None) -> NcclWork:
        if operation not in self._compared:
            self._compare(operation, array)
        recorder = self._recorder
        if recorder is None:
            return self._give(operation, array, out, scale)
        self._check_usable()
        recorder.begin(operation, array)
        try:
            return self._give(operation, array, out, scale)
        except BaseException as error:
            # nothing has failed, and the next call has this one's number
            is_refused = bool(self._native.is_usable)
            recorder.end_begun(is_refused)
            if not is_refused and isinstance(error, CommError):
                self._report(error)
            raise

    def _compare(self, operation: Operation, array: Array) -> None:
        """Have the host's transport compare a call that is new, Note [new calls]."""
        self._check_usable()
        kind, name, op, root, wire_dtype = operation
        how = [op, wire_dtype and f"as {wire_dtype}", root and f"root {root}", f"{array.dtype}[{array.size}]"]
        text = " ".join(str(each) for each in how if each)
        with unrecorded(), uncounted(self.host):
            self.host.barrier(name=f"before NCCL's {kind} {name}: {text}")
        if len(self._compared) >= MAX_COMPARED:
            del self._compared[next(iter(self._compared))]
        self._compared[operation] = None

    def _check_usable(self) -> None:
        """Raise the CommError of a communicator that has failed or is closed."""
        if not self._native.is_usable:
            self.check()
            self._native.check()

    def _give(self, operation: Operation, array: Array, out: Array, scale: Array | None) -> NcclWork:
        kind, name, op, root, wire_dtype = operation
        if wire_dtype is None:
            return self._submit(kind, op, root, array, out, name)
        half = self._arrays.narrow(array, WIRE_DTYPES[wire_dtype], scale)
        # NCCL would multiply by 1/N before it adds: in float16 that loses small values
        work = self._submit(kind, "sum" if op == "mean" else op, root, half, half, name)
        work._narrow = half, self.size if op == "mean" else 1.0, scale
        work._out = out
        return work

    def _make_recorder(self, everyone: list[dict[str, Any]], name: str) -> GpuRecorder | None:
        native, _ = _native.load("_comm")
        if native is None or not is_recording() or self.size == 1:
            return None
        members = self.world.members or range(self.size)
        processes = [(other["host"], other["process"]) for other in everyone]
        title = title_of(self.world.members, name, GPU_TITLE)
        above = self.host.flight_recorder
        import hashlib  # Note [imports]

        identity = hashlib.sha256(everyone[0]["id"].encode()).hexdigest()[:32]
        world_id = above.world_id if above else ""
        return GpuRecorder(native, self.rank, members, processes, identity, title, world_id)

    def _report(self, error: CommError) -> None:
        """Report the first failure by the recorder."""
        if self._recorder is not None:
            self._recorder.failed(error)

    def _submit(
        self, kind: str, op: ReduceOp | None, root: int, array: Array, out: Array, name: str
    ) -> NcclWork:
        """Give a collective to NCCL."""
        count = array.size // self.size if kind in HAS_BLOCKS else array.size
        source, device, stream = self._arrays.locate(array)
        target = source if out is array else self._address_of_result(out, kind, name)
        dtype = DTYPE_CODES[array.dtype]
        native = self._start_native(
            KIND_CODES[kind], OP_CODES[op], dtype, root, source, target, count, name, stream, device
        )
        if self._recorder is not None:
            self._recorder.given(native)
        return NcclWork(self, native, array, out)

    def _address_of_result(self, out: Array, kind: str, name: str) -> int:
        address, device, _ = self._arrays.locate(out)
        if device not in (self.device, UNKNOWN_DEVICE):
            raise CommError(
                f"rank {self.world.name_of(self.rank)}: {kind} {name!r}: out is in memory of GPU {device}; this "
                f"communicator is on GPU {self.device}"
            )
        return address

    def _new_array(self, shape: tuple[int, ...], like: Array) -> Array:
        return self._arrays.empty(shape, like.dtype)  # type: ignore[no-any-return]

    def _new_group(self, ranks: list[int], name: str) -> NcclCommunicator | None:
        host = self.host._new_group(ranks, name)
        if host is None:
            return None
        return NcclCommunicator(host, self.device, timeout_s=self.timeout_s, parent=self._native, name=name)

    def _check_array(self, array: Any, op: ReduceOp | None = None, *, writes: bool = True) -> None:
        if type(array) is self.kind and array.dtype in _FLOATS and array.flags.c_contiguous:
            return  # the usual array, cheap to check; a closed communicator is noticed below
        super()._check_array(array, op, writes=writes)

    def _check_kind(self, array: object) -> None:
        if isinstance(array, np.ndarray) and not is_cuda_array(array):
            raise DTypeError(f"{self!r}: numpy arrays are sent by the host communicator, not by NCCL")
        if not is_cuda_array(array):
            raise DTypeError(f"{self!r}: expected a CUDA array, got {type(array).__name__}")


def _leave(graphs: weakref.WeakSet[Graph], end: Callable[[], None]) -> None:
    """End NCCL's communicator by ``end``. NCCL waits in it, without end, for all graphs that hold its kernels."""
    for graph in list(graphs):
        graph.destroy()
    graphs.clear()
    end()


def _leave_at_exit(graphs: weakref.WeakSet[Graph], native: Any) -> None:
    """End a communicator when the process ends, which all of its communicators delay by LEAVE_S at most."""
    if state.nccl_deadline is None:
        state.nccl_deadline = time.monotonic() + LEAVE_S
    left_s = max(0.0, state.nccl_deadline - time.monotonic())
    _leave(graphs, lambda: native.close(left_s))


def device_of(array: Any) -> int:  # Any: of CUDA's array interface
    """Number of the GPU that a CUDA array lives on."""
    return int(_load().Driver(_driver_names()).device_of(address_of(array)))


def _load() -> Any:
    native, reason = _native.load("_nccl")
    if native is None:
        raise CommError(f"NCCL: the native module is missing ({reason})")
    return native


def _driver_names() -> list[str]:
    return _native.library_names("SINGA_LITE_CUDA_LIB", "nvidia.cuda_driver", "libcuda.so.1")


def _introduce(rank: int, device: int) -> tuple[dict[str, Any], Any, Any, Any]:
    """Return what the others must know of this rank, and what it has opened; a failure is returned, not raised."""
    mine: dict[str, Any] = {"host": _host_identity(), "name": os.uname().nodename, "process": os.getpid()}
    native = library = driver = None
    try:
        native = _load()
        library = native.Library(_native.library_names("SINGA_LITE_NCCL_LIB", "nvidia.nccl", "libnccl.so.2"))
        driver = native.Driver(_driver_names())
        mine |= {"version": library.version, "device": device, "gpu": driver.uuid(device)}
        mine["shares"] = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
        mine["id"] = library.unique_id().hex() if rank == 0 else ""
    except CommError as error:
        mine["failure"] = str(error)
    return mine, native, library, driver


def _check_ranks(everyone: list[dict[str, Any]], names: Sequence[int]) -> None:
    """Raise one CommError on all ranks where these cannot work together; ``names``: theirs in the world."""
    for rank, other in zip(names, everyone, strict=True):
        if "failure" in other:
            raise CommError(f"NCCL: rank {rank} on {other['name']} cannot take part: {other['failure']}")
        if other["version"] != everyone[0]["version"]:
            raise CommError(
                f"NCCL: rank {names[0]} has version {everyone[0]['version']}, rank {rank} {other['version']}; "
                "install the same on every host"
            )
    may_share = everyone[0]["version"] >= SHARES_GPU and all(other["shares"] for other in everyone)
    ranks_on: dict[str, int] = {}
    for rank, other in zip(names, everyone, strict=True):
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
