# SPDX-License-Identifier: Apache-2.0
"""The contract of a communicator: worlds, collectives on raw arrays, and work in flight.

What lives here: argument checks, sequence numbers, byte counts. What does not: moving data (local.py,
shm.py, mpi.py, nccl.py), finding the world (rendezvous.py), Tensors (a communicator never sees one).
Note [bytes]: a collective reports the bytes one rank puts on a ring, whatever the transport does:
all-reduce 2(N-1)/N*B, reduce-scatter (N-1)/N*B, all-gather (N-1)*B, broadcast and reduce (N-1)/N*B,
rounded up to a whole byte, where B is the payload in bytes as it travels (wire dtype).
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from ..config import state
from ..errors import CommError, DTypeError, OptionError, ShapeError, check_choice
from ..graph import made
from .wire import WIRE_DTYPES

ReduceOp = Literal["sum", "mean", "max", "min"]
REDUCE_OPS = ("sum", "mean", "max", "min")
DTYPES = tuple(np.dtype(name) for name in ("float16", "float32", "float64", "int32", "int64"))
_TRAVELS = frozenset(DTYPES)  # sooner searched
TIMEOUT_S = 300.0  # long enough for a rank that loads its data late, short enough to notice the same day
Array = np.ndarray[Any, Any]  # or a CUDA array with numpy's attributes, such as cupy's; see is_cuda_array


def is_cuda_array(array: object) -> bool:
    """Whether ``array`` lives on a GPU, by CUDA's array interface."""
    return type(array) is not np.ndarray and hasattr(array, "__cuda_array_interface__")


class Graph(Protocol):
    """A CUDA graph with collectives in it."""

    def give_up(self) -> None:
        """End it; it is never started again."""


class MakesArrays(Protocol):
    """A backend, as far as a communicator needs one."""

    @property
    def name(self) -> str: ...

    def zeros(self, shape: Sequence[int], dtype: Any) -> Any: ...


@dataclass(frozen=True)
class World:
    """Who takes part: this process's place among the processes of one training job.

    Attributes:
        rank: 0 <= rank < size.
        size: number of processes.
        local_rank: place among the processes of this host, in rank order.
        local_size: number of processes on this host.
        ticket: random name shared by all ranks of a "shm" world, else "".
        transport: "local" (size 1), "shm" (one host) or "mpi".
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    ticket: str = ""
    transport: str = "local"


class Work:
    """A collective in flight; keeps its arrays alive until it has ended.

    Attributes:
        name: what the caller called it, e.g. the first parameter of a bucket.
        bytes_sent: bytes this rank puts on a ring, see Note [bytes].
        bytes_payload: bytes of the array as it travels.
    """

    name: str = ""
    bytes_sent: int = 0
    bytes_payload: int = 0

    def wait(self, timeout_s: float | None = None) -> Array | None:
        """Block until the collective has ended; the result for all_gather and reduce_scatter, else None.

        Raises:
            CommError: a peer died, closed, disagrees or has not come within ``timeout_s`` seconds
                (None: the communicator's own time-out).
        """
        raise NotImplementedError

    def done(self) -> bool:
        """Whether wait() would return at once. Never blocks."""
        raise NotImplementedError

    def captured_by(self, graph: Graph) -> Hashable:
        """Called when this became a part of a CUDA graph; gives who watches it."""
        return None

    def relaunched(self) -> None:
        """Called when a CUDA graph that holds this collective was started again, if it is the last of its watcher."""


class FinishedWork(Work):
    """A collective that had ended when it was called."""

    def __init__(self, result: Array | None = None) -> None:
        self._result = result

    def wait(self, timeout_s: float | None = None) -> Array | None:
        return self._result

    def done(self) -> bool:
        return True


class WorkList(Work):
    """The collectives of one call with a list of arrays; wait() waits for all and returns None."""

    def __init__(self, works: list[Work], name: str) -> None:
        self._works = works
        self.name = name
        self.bytes_sent = sum(work.bytes_sent for work in works)
        self.bytes_payload = sum(work.bytes_payload for work in works)

    def wait(self, timeout_s: float | None = None) -> None:
        for work in self._works:
            work.wait(timeout_s)

    def done(self) -> bool:
        return all(work.done() for work in self._works)


def ring_bytes(collective: str, payload: int, size: int) -> int:
    """Bytes one rank puts on a ring of ``size`` ranks for ``payload`` bytes, see Note [bytes]."""
    if collective == "all_gather":
        return (size - 1) * payload
    share = 2 if collective == "all_reduce" else 1
    return -(-share * (size - 1) * payload // size)


class Communicator(ABC):
    """Collectives among the ranks of one world, on C-contiguous arrays of float16/32/64 or int32/64.

    Arrays are numpy's, unless a transport says otherwise; one of another kind is a ``DTypeError``.

    Every rank must call the same collectives in the same order with equal sizes, dtypes and names; a rank
    that does not is a ``CommError`` on all. ``all_reduce``, ``reduce`` and ``broadcast`` change the arrays in
    place; an array must not be touched before its ``Work`` has ended. Sums run in rank order (float16 in
    float32), so all ranks get the same bits. Not for use by two threads at once, nor after a fork.

    Args:
        world: this process's place.
        timeout_s: seconds a collective waits for its peers.
    """

    def __init__(self, world: World, timeout_s: float = TIMEOUT_S) -> None:
        if not timeout_s > 0:
            raise OptionError(f"{type(self).__name__}: timeout_s = {timeout_s} must be > 0")
        self.world = world
        self.timeout_s = float(timeout_s)
        self._is_closed = False

    @property
    def rank(self) -> int:
        return self.world.rank

    @property
    def size(self) -> int:
        return self.world.size

    @property
    def local_rank(self) -> int:
        return self.world.local_rank

    @property
    def is_alone(self) -> bool:
        """Whether there is no peer and so nothing to move."""
        return self.size == 1

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank={self.rank}, size={self.size})"

    # ---- collectives -------------------------------------------------------------------------------

    def all_reduce(
        self,
        arrays: Array | Sequence[Array],
        op: ReduceOp,
        *,
        wire_dtype: str | None = None,
        name: str = "all_reduce",
    ) -> Work:
        """Combine ``arrays`` over the ranks in place; every rank gets the same bits.

        Args:
            arrays: one array or a list of them, any shape, size 0 allowed.
            op: "sum", "mean", "max" or "min"; "mean" of integers is a DTypeError.
            wire_dtype: "float16" sends float32 values rounded to half and rounds the result to half
                (sums in float32); values beyond 65504 become infinite. "bfloat16" does the same with 8 bits of
                precision and float32's range. None sends the array's own dtype.
            name: shown in errors.

        Returns:
            Work; its wait() returns None.
        """
        if op not in REDUCE_OPS:
            check_choice("all_reduce", "op", op, REDUCE_OPS)
        if isinstance(arrays, (list, tuple)):
            if len(arrays) != 1:
                for array in arrays:
                    self._check_array(array, op)
                    self._check_wire(array, wire_dtype, name)
                works = [self.all_reduce(array, op, wire_dtype=wire_dtype, name=name) for array in arrays]
                return WorkList(works, name)
            arrays = arrays[0]
        self._check_array(arrays, op)
        payload = arrays.nbytes  # type: ignore[union-attr]
        if wire_dtype is not None:
            self._check_wire(arrays, wire_dtype, name)
            payload //= 2
        work = self._starter(self._all_reduce)(arrays, op, wire_dtype, name)
        return self._count(work, "all_reduce", payload, name)

    def reduce(
        self, arrays: Array | Sequence[Array], op: ReduceOp, root: int = 0, *, name: str = "reduce"
    ) -> Work:
        """Combine ``arrays`` over the ranks into rank ``root``'s arrays; other ranks' stay unchanged."""
        check_choice("reduce", "op", op, REDUCE_OPS)
        self._check_root("reduce", root)

        def start(array: Array) -> Work:
            work = self._starter(self._reduce)(array, op, root, name)
            return self._count(work, "reduce", array.nbytes, name)

        return self._each(arrays, op, start, name)

    def broadcast(self, arrays: Array | Sequence[Array], root: int = 0, *, name: str = "broadcast") -> Work:
        """Copy rank ``root``'s ``arrays`` over those of every other rank."""
        self._check_root("broadcast", root)

        def start(array: Array) -> Work:
            work = self._starter(self._broadcast)(array, root, name)
            return self._count(work, "broadcast", array.nbytes, name)

        return self._each(arrays, None, start, name)

    def all_gather(self, array: Array, *, name: str = "all_gather") -> Work:
        """Collect every rank's ``array``; wait() returns a new array (size, *array.shape), in rank order."""
        self._check_array(array, writes=False)
        work = self._starter(self._all_gather)(array, name)
        return self._count(work, "all_gather", array.nbytes, name)

    def reduce_scatter(self, array: Array, op: ReduceOp, *, name: str = "reduce_scatter") -> Work:
        """Combine ``array`` (size*k, ...) over the ranks; wait() returns this rank's k rows as a new array."""
        check_choice("reduce_scatter", "op", op, REDUCE_OPS)
        self._check_array(array, op, writes=False)
        if array.ndim == 0 or array.shape[0] % self.size:
            raise ShapeError(
                f"reduce_scatter {name}: axis 0 of shape {array.shape} must divide by {self.size} ranks"
            )
        work = self._starter(self._reduce_scatter)(array, op, name)
        return self._count(work, "reduce_scatter", array.nbytes, name)

    def barrier(self, *, name: str = "barrier") -> None:
        """Return once every rank has called it."""
        self.all_reduce(np.zeros(1, np.int32), "sum", name=name).wait()

    def all_gather_object(self, value: Any, *, name: str = "all_gather_object") -> list[Any]:
        """Collect one JSON-able value per rank, in rank order (manifests, errors, host names)."""
        text = np.frombuffer(json.dumps(value).encode(), np.uint8)
        lengths = self.all_gather(np.array([text.size], np.int64), name=name).wait()
        assert lengths is not None
        padded = np.zeros(-(-int(lengths.max()) // 4) * 4, np.uint8)
        padded[: text.size] = text
        rows = self.all_gather(padded.view(np.int32), name=name).wait()
        assert rows is not None
        raw = [bytes(rows[rank].view(np.uint8)[: int(lengths[rank, 0])]) for rank in range(self.size)]
        return [json.loads(item) for item in raw]

    def new_group(self, ranks: Sequence[int], *, name: str = "group") -> Communicator | None:
        """Make a communicator of some ranks; all ranks of this one must call it, with equal ``ranks``.

        Returns:
            The group's communicator, ranked in the order given; None on a rank that is not in ``ranks``.
        """
        members = list(ranks)
        if not members or len(set(members)) != len(members) or not set(members) <= set(range(self.size)):
            raise OptionError(f"new_group: ranks = {members} must be distinct ranks of 0..{self.size - 1}")
        if any(other != members for other in self.all_gather_object(members, name=f"new_group {name}")):
            raise CommError(
                f"new_group {name}: ranks disagree about the members; rank {self.rank} gave {members}"
            )
        return self._new_group(members, name)

    def buffer(self, num_elements: int, dtype: str = "float32", backend: MakesArrays | None = None) -> Array:
        """Memory this transport moves fastest, zero-filled, shape (num_elements,); of ``backend``, else numpy's.

        All ranks must call it alike, as they do collectives: some memory is only of use if all have it. It may wait
        for the ranks, and keep the memory for the next buffer of its size: for arrays that are kept, not for a call's.
        """
        if backend is None:
            return np.zeros(num_elements, dtype)
        zeros: Array = backend.zeros((num_elements,), dtype)
        return zeros

    def close(self) -> None:
        """Leave the world; later calls, here or on a peer that still waits for us, are a CommError."""
        self._is_closed = True

    def abort(self, reason: str) -> None:
        """Leave because of an error: close() that tells the peers ``reason``. Never blocks."""
        self.close()

    # ---- what a transport writes -------------------------------------------------------------------

    @abstractmethod
    def _all_reduce(self, array: Array, op: ReduceOp, wire_dtype: str | None, name: str) -> Work: ...

    @abstractmethod
    def _reduce(self, array: Array, op: ReduceOp, root: int, name: str) -> Work: ...

    @abstractmethod
    def _broadcast(self, array: Array, root: int, name: str) -> Work: ...

    @abstractmethod
    def _all_gather(self, array: Array, name: str) -> Work: ...

    @abstractmethod
    def _reduce_scatter(self, array: Array, op: ReduceOp, name: str) -> Work: ...

    @abstractmethod
    def _new_group(self, ranks: list[int], name: str) -> Communicator | None: ...

    # ---- checks ------------------------------------------------------------------------------------

    def _each(
        self,
        arrays: Array | Sequence[Array],
        op: ReduceOp | None,
        start: Callable[[Array], Work],
        name: str,
    ) -> Work:
        if not isinstance(arrays, (list, tuple)):
            self._check_array(arrays, op)
            return start(arrays)  # type: ignore[arg-type]
        for array in arrays:
            self._check_array(array, op)
        return WorkList([start(array) for array in arrays], name)

    def _starter(self, start: Callable[..., Work]) -> Callable[..., Work]:
        """``start(array, ...)``; on the GPU it becomes a part of the CUDA graph that is captured, if any."""
        if state.of_thread.rehearsal is None:
            return start
        return lambda array, *rest: (
            made(lambda: start(array, *rest)) if is_cuda_array(array) else self._tell(start, array, *rest)
        )

    def _tell(self, start: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """``start`` something of the host; a CUDA graph that is captured or repeated hears that it was."""
        if state.of_thread.rehearsal is not None:
            state.of_thread.rehearsal.has_told_others = True
        return start(*arguments, **options)

    def _count(self, work: Work, collective: str, payload: int, name: str) -> Work:
        work.name = name
        work.bytes_payload = payload
        work.bytes_sent = ring_bytes(collective, payload, self.world.size)
        return work

    def _check_wire(self, array: Any, wire_dtype: str | None, name: str) -> None:
        check_choice("all_reduce", "wire_dtype", wire_dtype, (None, *WIRE_DTYPES))
        if wire_dtype is not None and array.dtype != np.float32:
            raise DTypeError(f"all_reduce {name}: wire_dtype needs float32 arrays, not {array.dtype}")

    def _check_array(self, array: Any, op: ReduceOp | None = None, *, writes: bool = True) -> None:
        """Raise for an array that cannot travel, or be combined by ``op``."""
        if self._is_closed:
            raise CommError(f"{self!r}: this communicator is closed")
        self._check_kind(array)
        dtype, flags = array.dtype, array.flags
        if dtype not in _TRAVELS:
            known = ", ".join(str(dtype) for dtype in DTYPES)
            raise DTypeError(f"{self!r}: dtype {dtype} does not travel; use one of {known}")
        if op == "mean" and dtype.kind != "f":
            raise DTypeError(f"{self!r}: the mean of {dtype} is not an integer; use op='sum'")
        if not flags.c_contiguous:
            raise ShapeError(f"{self!r}: array of shape {array.shape} is not contiguous; pass a copy")
        if writes and not getattr(flags, "writeable", True):  # cupy's always are
            raise ShapeError(f"{self!r}: array of shape {array.shape} is read-only; pass a copy")

    def _check_kind(self, array: object) -> None:
        """Raise DTypeError for an array that this transport does not move."""
        if is_cuda_array(array):
            raise DTypeError(
                f"{self!r}: a {type(array).__name__} lives on a GPU; only numpy arrays travel here"
            )
        if not isinstance(array, np.ndarray):
            raise DTypeError(f"{self!r}: expected a numpy array, got {type(array).__name__}")

    def _check_root(self, where: str, root: int) -> None:
        if not 0 <= root < self.size:
            raise OptionError(f"{where}: root = {root} is not a rank of 0..{self.size - 1}")
