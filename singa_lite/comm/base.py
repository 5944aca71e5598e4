# SPDX-License-Identifier: Apache-2.0
"""The contract of a communicator: worlds, and collectives on raw arrays.

What lives here: argument checks, sequence numbers. What does not: work in flight and byte counts (work.py), moving data
(local.py, shm.py, mpi.py, nccl.py), finding the world (rendezvous.py), Tensors (a communicator never sees one).
"""

from __future__ import annotations

import json
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from threading import get_ident
from typing import Any, ClassVar, Literal, NamedTuple, NoReturn, Protocol

import numpy as np

from ..config import state, this_thread
from ..errors import (
    CommError,
    DTypeError,
    OptionError,
    ShapeError,
    check_choice,
    check_int,
    check_ints,
    check_number,
    check_text,
)
from ..graph.rounded import note_written
from .flight_recorder import FlightRecorder
from .gpu_arrays import address_of, is_cuda_array
from .host import this_host
from .stop_requests import StopRequests
from .wire import WIRE_DTYPES
from .work import Array, FinishedWork, Traffic, Work, WorkList, ring_bytes

ReduceOp = Literal["sum", "mean", "max", "min"]
REDUCE_OPS = ("sum", "mean", "max", "min")
# in the order of native/comm/types.h
KINDS = ("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all")
HAS_BLOCKS = ("reduce_scatter", "all_to_all")  # a rank puts in a block for each rank
HAS_RESULT = ("all_gather", *HAS_BLOCKS)  # not in place
DTYPES = tuple(np.dtype(name) for name in ("float16", "float32", "float64", "int32", "int64"))
UINT8 = np.dtype(np.uint8)
MOVED_DTYPES = (*DTYPES, UINT8)  # of what is moved and not combined
_COMBINED, _MOVED = frozenset(DTYPES), frozenset(MOVED_DTYPES)  # sooner searched
TIMEOUT_S = 300.0  # long enough for a rank that loads its data late, short enough to notice the same day
MAX_DROPPED = 64  # works that nobody has waited for, until those that have ended are forgotten


class Graph(Protocol):
    """A CUDA graph with collectives in it."""

    def destroy(self) -> None:
        """End it; it is never launched again."""


@dataclass(frozen=True)
class World:
    """One process of a training job: its rank and how many there are.

    Attributes:
        rank: 0 <= rank < size.
        size: number of processes.
        local_rank: rank among the processes of this host, in rank order.
        local_size: number of processes on this host.
        rendezvous_id: random name shared by all ranks of a "shm" world, else "".
        transport: that of the Communicator to join it with (``comm.find_transports``): "local" (size 1), "shm" (one
            host), "mpi".
        members: of a group, the rank of each of its ranks in the world that it was made of, for errors and traces;
            () of a world.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    rendezvous_id: str = ""
    transport: str = "local"
    members: tuple[int, ...] = field(default=(), repr=False, compare=False)

    def name_of(self, rank: int) -> int:
        """Return what errors call ``rank``: that of the world, also in a group."""
        return self.members[rank] if self.members else rank

    def members_of(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Return the ``members`` of a group of ``ranks``."""
        return tuple(self.name_of(rank) for rank in ranks)


class Operation(NamedTuple):
    """A collective apart from its arrays, which every rank must call alike.

    Attributes:
        kind: one of KINDS.
        name: what the caller calls it, e.g. the parameters of a bucket; shown in errors.
        op: how values are combined; None where they are only moved.
        root: rank that a reduce ends on, or a broadcast begins on.
        wire_dtype: a key of wire.WIRE_DTYPES that float32 values are sent as, else None.
    """

    kind: str
    name: str
    op: ReduceOp | None = None
    root: int = 0
    wire_dtype: str | None = None

    @classmethod
    def called(
        cls, kind: str, name: str, op: ReduceOp | None = None, root: int = 0, wire_dtype: str | None = None
    ) -> Operation:
        """Return the operation of a user's call; OptionError unless ``name`` is text."""
        return cls(kind, check_text(kind, "name", name), op, root, wire_dtype)


class Communicator(ABC):
    """Collectives among the ranks of one world, on C-contiguous arrays of float16/32/64 or int32/64.

    What is only moved may be uint8 as well; a reduction of it is a ``DTypeError``.

    Arrays are numpy's, unless a transport's docstring says otherwise; one of another kind is a ``DTypeError``.

    Every rank must call the same collectives in the same order with equal sizes, dtypes and names; a rank
    that does not is a ``CommError`` on all. ``all_reduce``, ``reduce`` and ``broadcast`` change the arrays in
    place; an array must not be touched before its ``Work`` has ended. Sums run in rank order (float16 in
    float32), so all ranks get the same bits. Not for use by two threads at once, nor after a fork.

    Args:
        world: this process's rank and where it runs.
        timeout_s: seconds a collective waits for its peers.

    Attributes:
        traffic: what was sent so far.
        num_optimizers: DistOpts that have made collectives over it.
        flight_recorder: keeps the last collectives for reports of failures; None: nothing does.
        stop_requests: what the collectives carry beside their data, but for those over NCCL.
        carries_requests: whether all collectives do.
        transport: the word of ``World.transport`` for this class; "" for one that only wraps others.
        joins_worlds: whether it is made of a World and a time-out; False if it is made for a world that was joined.
    """

    transport: ClassVar[str] = ""
    joins_worlds: ClassVar[bool] = True

    @classmethod
    def describe(cls) -> str:
        """Return "works: ..." or "no: ..." with the reason and the cure, for this process. May load libraries."""
        return "works"

    def __init__(self, world: World, timeout_s: float = TIMEOUT_S) -> None:
        if not isinstance(world, World):
            raise OptionError(f"{type(self).__name__}: expected a World, got {type(world).__name__}")
        if not check_number(type(self).__name__, "timeout_s", timeout_s) > 0:
            raise OptionError(f"{type(self).__name__}: timeout_s = {timeout_s} must be > 0")
        self.world = world
        self.timeout_s = float(timeout_s)
        self.traffic = Traffic()
        self.num_optimizers = 0
        self.flight_recorder: FlightRecorder | None = None
        self.stop_requests = StopRequests()
        self.carries_requests = True
        self._works: dict[int, Work] = {}  # started and not waited for yet, by id
        self._num_launched = 0
        self._max_works = MAX_DROPPED  # from which on those that have ended are looked for
        self._aborts_with: list[weakref.ref[Communicator]] = []  # when a collective fails here
        self._groups: tuple[weakref.ref[Communicator], ...] = ()  # made by new_group
        self._is_closed = self._has_failed = False
        self._thread = get_ident()  # which has started the last collective

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
        return self.world.size == 1

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank={self.rank}, size={self.size})"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Raise OptionError, for copies too: Python's copy calls this."""
        raise OptionError(
            f"{self!r}: a communicator cannot be copied or pickled, as it sends for this process; use it itself here, "
            "and have another process make its own (process_communicator)"
        )

    # ---- collectives -------------------------------------------------------------------------------

    def all_reduce(
        self,
        arrays: Array | Sequence[Array],
        op: ReduceOp,
        *,
        out: Array | None = None,
        wire_dtype: str | None = None,
        wire_scale: Array | None = None,
        name: str = "all_reduce",
    ) -> Work:
        """Combine ``arrays`` over the ranks, in place or into ``out``; every rank gets the same bits.

        Args:
            arrays: one array or a list of them, any shape, size 0 allowed.
            op: "sum", "mean", "max" or "min"; "mean" of integers is a DTypeError.
            out: where the result goes, of the shape and dtype of ``arrays``, then one array, which stays as it is and
                shares no memory with ``out``. None is in place. A rank's own choice: it changes no other rank's result.
            wire_dtype: "float16" sends float32 values rounded to half and rounds the result to half
                (sums in float32); values beyond 65504 become infinite. "bfloat16" does the same with 8 bits of
                precision and float32's range. None sends the array's own dtype.
            wire_scale: with ``wire_dtype``: float32, shape (1,), equal on all ranks and > 0. Values are multiplied by
                it before they are rounded for the wire, and the result is divided by it. None is 1.
            name: shown in errors; equal on all ranks.

        Returns:
            Work; its wait() returns None.
        """
        if type(op) is not str or op not in REDUCE_OPS:
            check_choice("all_reduce", "op", op, REDUCE_OPS)
        operation = Operation.called("all_reduce", name, op, wire_dtype=wire_dtype)
        if wire_dtype is not None or wire_scale is not None:
            for array in arrays if isinstance(arrays, (list, tuple)) else (arrays,):
                self._check_wire(array, wire_dtype, wire_scale, name)
        if out is not None:
            array = self._check_out(arrays, op, out, name)
            return self.launch(operation, out, array, wire_scale)
        return self._in_place(operation, arrays, wire_scale)

    def reduce(
        self, arrays: Array | Sequence[Array], op: ReduceOp, root: int = 0, *, name: str = "reduce"
    ) -> Work:
        """Combine ``arrays`` over the ranks into rank ``root``'s arrays; other ranks' stay unchanged."""
        check_choice("reduce", "op", op, REDUCE_OPS)
        self._check_root("reduce", root)
        return self._in_place(Operation.called("reduce", name, op, root), arrays)

    def broadcast(self, arrays: Array | Sequence[Array], root: int = 0, *, name: str = "broadcast") -> Work:
        """Copy rank ``root``'s ``arrays`` over those of every other rank."""
        self._check_root("broadcast", root)
        return self._in_place(Operation.called("broadcast", name, None, root), arrays)

    def all_gather(self, array: Array, *, name: str = "all_gather") -> Work:
        """Collect every rank's ``array``; wait() returns a new array (size, *array.shape), in rank order."""
        self._check_array(array, writes=False)
        out = self._new_array((self.size, *array.shape), array)
        return self.launch(Operation.called("all_gather", name), out, array)

    def reduce_scatter(self, array: Array, op: ReduceOp, *, name: str = "reduce_scatter") -> Work:
        """Combine ``array`` (size*k, ...) over the ranks; wait() returns this rank's k rows as a new array."""
        check_choice("reduce_scatter", "op", op, REDUCE_OPS)
        self._check_array(array, op, writes=False)
        self._check_blocks("reduce_scatter", array, name)
        out = self._new_array((array.shape[0] // self.size, *array.shape[1:]), array)
        return self.launch(Operation.called("reduce_scatter", name, op), out, array)

    def all_to_all(self, array: Array, *, name: str = "all_to_all") -> Work:
        """Send each rank a block of ``array``; wait() returns a new array of its shape with a block of each rank.

        Args:
            array: shape (size*k, ...), unchanged; its k rows from j*k on go to rank j.
            name: shown in errors; equal on all ranks.

        Returns:
            Work; its wait() returns (size*k, ...): the k rows from j*k on came from rank j.

        Raises:
            ShapeError: axis 0 is not divisible by the ranks.
        """
        self._check_array(array, writes=False)
        self._check_blocks("all_to_all", array, name)
        return self.launch(Operation.called("all_to_all", name), self._new_array(array.shape, array), array)

    def barrier(self, *, name: str = "barrier") -> None:
        """Return once every rank has called it."""
        self.all_reduce(np.zeros(1, np.int32), "sum", name=name).wait()

    def all_gather_object(self, value: Any, *, name: str = "all_gather_object") -> list[Any]:
        """Collect one JSON-able value per rank, in rank order (manifests, errors, host names)."""
        try:
            text = np.frombuffer(json.dumps(value).encode(), np.uint8)
        except (TypeError, ValueError, RecursionError) as error:
            raise OptionError(
                f"{name!r}: expected a JSON value, got {type(value).__name__}: {error}"
            ) from None
        lengths = self.all_gather(np.array([text.size], np.int64), name=name).wait()
        assert lengths is not None
        padded = np.zeros(int(lengths.max()), np.uint8)
        padded[: text.size] = text
        rows = self.all_gather(padded, name=name).wait()
        assert rows is not None
        raw = [rows[rank, : int(lengths[rank, 0])].tobytes() for rank in range(self.size)]
        return [json.loads(item) for item in raw]

    def new_group(self, ranks: Sequence[int], *, name: str = "group") -> Communicator | None:
        """Make a communicator of some ranks; all ranks of this one must call it, with equal ``ranks``.

        Returns:
            The group's communicator, ranked in the order given; None on a rank that is not in ``ranks``.
        """
        check_text("new_group", "name", name)
        members = check_ints("new_group", "ranks", ranks, 0)
        if not members or len(set(members)) != len(members) or not set(members) <= set(range(self.size)):
            raise OptionError(f"new_group: ranks = {members} must be distinct ranks of 0..{self.size - 1}")
        for rank, given in enumerate(everyone := self.all_gather_object(members, name=f"new_group {name}")):
            if given != everyone[0]:
                raise CommError(
                    f"new_group {name!r}: ranks disagree about the members: {everyone[0]} on rank 0, {given} on rank "
                    f"{rank}"
                )
        group = self._new_group(members, name)
        if group is not None:
            living = (known for known in self._groups if known() is not None)
            self._groups = (*living, weakref.ref(group))
        return group

    def split_by_host(self, *, name: str = "hosts") -> tuple[Communicator, Communicator | None]:
        """Make a communicator of this host's ranks and one of a leader a host; all ranks must call it.

        Two processes are on one host if ``host.this_host()`` gives both the same text; SINGA_LITE_HOST overrides it.

        Returns:
            inner: of the ranks of this host, in rank order; its rank 0 is the leader.
            outer: of the leaders, in rank order; None on other ranks.
        """
        check_text("split_by_host", "name", name)
        hosts = self.all_gather_object(this_host(), name=f"split_by_host {name}")
        inner: Communicator | None = None
        for host in dict.fromkeys(hosts):
            ranks = [rank for rank, other in enumerate(hosts) if other == host]
            group = self.new_group(ranks, name=f"{name}: that of rank {ranks[0]}")
            inner = inner if group is None else group
        assert inner is not None
        # ascending, as hosts come in rank order
        leaders = [hosts.index(host) for host in dict.fromkeys(hosts)]
        return inner, self.new_group(leaders, name=f"{name}: leaders")

    @property
    def works_in_flight(self) -> list[Work]:
        """Collectives that nobody has waited for yet: this thread's, and those of others that have not ended."""
        thread = get_ident()
        return [work for work in list(self._works.values()) if work._thread == thread or not work._is_done()]

    def wait_all(self) -> None:
        """Wait for ``works_in_flight``: those of a step that has failed still use its arrays."""
        thread = get_ident()
        for work in list(self._works.values()):
            if work._thread == thread or not work._is_done():
                work.wait()
            else:
                state.works_in_flight.discard(id(work))

    def follow_graph(self, graph: Graph, last: Work) -> tuple[Callable[[], None], Callable[[], None]]:
        """Return what to call before and after each launch of a CUDA graph with collectives of this communicator.

        So the time-out counts for these as well, from when the stream has reached the graph. The graph is destroyed
        before this communicator ends.

        Args:
            graph: the graph.
            last: its last collective of this communicator.
        """
        return (lambda: None), (lambda: None)

    def close(self) -> None:
        """Leave the world; later calls, here or on a peer that still waits for us, are a CommError."""
        self._is_closed = True

    def abort(self, reason: str) -> None:
        """Leave because of an error: close() that reports ``reason`` to the peers. Never blocks."""
        self.close()

    def abort_with_groups(self, reason: str) -> None:
        """Abort this one and its groups, and theirs: where a process ends, peers in any of them wait for it."""
        self.abort(reason)
        for reference in self._groups:
            if (group := reference()) is not None:
                group.abort_with_groups(reason)

    def share_stop_requests(self, requests: StopRequests) -> None:
        """Carry ``requests`` from now on: a group's ranks are to know of those of the world."""
        self.stop_requests = requests

    def abort_together(self, others: Sequence[Communicator]) -> None:
        """From now on, abort ``others`` if a collective fails here: their ranks would wait for this one in vain."""
        if not isinstance(others, (list, tuple)) or not all(
            isinstance(each, Communicator) for each in others
        ):
            raise OptionError(f"abort_together: expected a list of Communicators, got {others!r}")
        self._aborts_with = [weakref.ref(other) for other in others if other is not self]

    @property
    def has_failed(self) -> bool:
        """Whether a collective has failed here, so that some rank may be gone."""
        return self._has_failed

    def _note_failure(self, error: CommError) -> None:
        self._has_failed = True
        try:
            if self.flight_recorder is not None:
                self.flight_recorder.report(error)
        finally:  # their errors repeat this text, with the path of the report
            others, self._aborts_with = self._aborts_with, []
            for reference in others:
                if (other := reference()) is not None:
                    other.abort(str(error))

    # ---- what a transport writes -------------------------------------------------------------------

    @abstractmethod
    def _start(self, operation: Operation, array: Array, out: Array, scale: Array | None) -> Work:
        """Start a collective on checked arrays; ``out`` is ``array`` where it is in place.

        It may wait for the peers only with arrays of a few KB: ranks start larger collectives, and compute, before they
        wait for the first. ``scale`` is what values are multiplied by on the wire, see ``all_reduce``.
        """

    def _new_array(self, shape: tuple[int, ...], like: Array) -> Array:
        """Return a new array for a result, of undefined content, on the side of ``like`` and with its dtype."""
        return np.empty(shape, like.dtype)

    @abstractmethod
    def _new_group(self, ranks: list[int], name: str) -> Communicator | None: ...

    # ---- one collective ----------------------------------------------------------------------------

    def _in_place(
        self, operation: Operation, arrays: Array | Sequence[Array], scale: Array | None = None
    ) -> Work:
        if not isinstance(arrays, (list, tuple)):
            self._check_array(arrays, operation.op)
            return self.launch(operation, arrays, arrays, scale)  # type: ignore[arg-type]
        for array in arrays:
            self._check_array(array, operation.op)
        _check_apart(operation, arrays)
        works = [self.launch(operation, array, array, scale) for array in arrays]
        return works[0] if len(works) == 1 else WorkList(works, operation.name)

    def launch(self, operation: Operation, out: Array, array: Array, scale: Array | None = None) -> Work:
        """Start a collective on checked arrays, count it, and record it if a step is being recorded."""
        if self._is_closed:
            raise CommError(f"{self!r}: this communicator is closed")
        if self._thread != (thread := get_ident()):
            self._check_thread(operation)
            self._thread = thread
        try:
            work = self._start(operation, array, out, scale)
        except CommError as error:
            self._note_failure(error)
            raise
        kind, name, _, _, wire_dtype = operation
        work.kind, work.name = kind, name
        work._launcher, work._arrays, work._stop_requests = self, (array, out, scale), self.stop_requests
        work._thread, work._number, work._members = thread, self._num_launched, self.world.members
        self._num_launched += 1
        if kind in HAS_RESULT:
            work._result = out
        payload = array.nbytes if wire_dtype is None else array.nbytes // 2
        work.bytes_payload, work.bytes_sent = payload, ring_bytes(kind, payload, self.world.size)
        traffic = self.traffic
        traffic.bytes_payload += payload
        traffic.bytes_sent += work.bytes_sent
        if len(self._works) > self._max_works:
            self._drop_ended()
        self._works[id(work)] = work
        if isinstance(work, FinishedWork):
            self.traffic.wait_s += work.report_call()
        else:
            state.works_in_flight.add(id(work))
        if this_thread.recorder is not None:
            inputs = (array,) if scale is None else (array, scale)
            this_thread.recorder.collective(self, operation, inputs, out, work)
        return work

    def _drop_ended(self) -> None:
        """Forget collectives that have ended and that nobody waits for."""
        ended = [key for key, work in list(self._works.items()) if work._is_done()]
        state.works_in_flight.difference_update(ended)  # first, as their ids may then be those of others
        for key in ended:
            self._works.pop(key, None)
        self._max_works = max(MAX_DROPPED, 2 * len(self._works))  # so that this takes little time for each

    def _forget(self, work: Work, seconds: float) -> None:
        """Count the time that the host waited for ``work``, which has ended."""
        self._works.pop(id(work), None)
        state.works_in_flight.discard(id(work))
        work._arrays = ()
        self.traffic.wait_s += seconds

    # ---- checks ------------------------------------------------------------------------------------

    def _check_thread(self, operation: Operation) -> None:
        """Raise CommError for a collective of this thread while one that another thread has started is in flight."""
        for work in list(self._works.values()):
            if not work._is_done():
                raise CommError(
                    f"{self!r}: {operation.kind} {operation.name!r}: another thread has started {work.kind} "
                    f"{work.name!r}, which has not ended; ranks must start collectives in one order, so give each "
                    "thread a communicator of its own (new_group)"
                )

    def _check_wire(self, array: Any, wire_dtype: str | None, wire_scale: Any, name: str) -> None:
        check_choice("all_reduce", "wire_dtype", wire_dtype, (None, *WIRE_DTYPES))
        if wire_dtype is None:
            raise OptionError(
                f"all_reduce {name!r}: wire_scale needs wire_dtype, one of {', '.join(WIRE_DTYPES)}"
            )
        if getattr(array, "dtype", None) != np.float32:
            raise DTypeError(
                f"all_reduce {name!r}: wire_dtype needs float32 arrays, not {getattr(array, 'dtype', array)}"
            )
        if wire_scale is not None:
            self._check_kind(wire_scale)
            if wire_scale.dtype != np.float32 or wire_scale.shape != (1,):
                raise ShapeError(
                    f"all_reduce {name!r}: wire_scale is {wire_scale.dtype}{wire_scale.shape}, not float32(1,)"
                )
            if isinstance(wire_scale, np.ndarray) and not 0 < wire_scale[0] < np.inf:
                raise OptionError(f"all_reduce {name!r}: wire_scale = {wire_scale[0]} must be > 0 and finite")

    def _check_array(self, array: Any, op: ReduceOp | None = None, *, writes: bool = True) -> None:
        """Raise for an array that cannot be sent, or be combined by ``op``."""
        self._check_kind(array)
        if writes:
            note_written(array)
        dtype, flags = array.dtype, array.flags
        if dtype not in (_MOVED if op is None else _COMBINED):
            known = ", ".join(str(dtype) for dtype in DTYPES)
            if dtype == UINT8:
                raise DTypeError(
                    f"{self!r}: uint8 can be moved, but not combined by {op!r}; use one of {known}"
                )
            raise DTypeError(
                f"{self!r}: dtype {dtype} cannot be sent; use one of {known}, or uint8 to be moved"
            )
        if op == "mean" and dtype.kind != "f":
            raise DTypeError(f"{self!r}: the mean of {dtype} is not an integer; use op='sum'")
        if not flags.c_contiguous:
            raise ShapeError(f"{self!r}: array of shape {array.shape} is not contiguous; pass a copy")
        if writes and not getattr(flags, "writeable", True):  # cupy's always are
            raise ShapeError(f"{self!r}: array of shape {array.shape} is read-only; pass a copy")

    def _check_out(self, array: Any, op: ReduceOp, out: Array, name: str) -> Array:
        """Return ``array``; raise unless it can be combined by ``op`` into ``out``."""
        if isinstance(array, (list, tuple)):
            raise OptionError(f"all_reduce {name!r}: out is for one array, not for a list")
        self._check_array(array, op, writes=False)
        self._check_array(out, op)
        if out.shape != array.shape or out.dtype != array.dtype or is_cuda_array(out) != is_cuda_array(array):
            raise ShapeError(
                f"all_reduce {name!r}: out is a {type(out).__name__} {out.dtype}{out.shape}, the array a "
                f"{type(array).__name__} {array.dtype}{array.shape}"
            )
        if abs(address_of(out) - address_of(array)) < array.nbytes:
            raise OptionError(
                f"all_reduce {name!r}: out shares memory with the array; leave it out for in place"
            )
        return array  # type: ignore[no-any-return]

    def _check_kind(self, array: object) -> None:
        """Raise DTypeError for an array that this transport does not move."""
        if is_cuda_array(array):
            raise DTypeError(
                f"{self!r}: a {type(array).__name__} lives on a GPU; only numpy arrays can be sent here"
            )
        if not isinstance(array, np.ndarray):
            raise DTypeError(f"{self!r}: expected a numpy array, got {type(array).__name__}")

    def _check_blocks(self, where: str, array: Array, name: str) -> None:
        if array.ndim == 0 or array.shape[0] % self.size:
            raise ShapeError(
                f"{where} {name!r}: axis 0 of shape {array.shape} must be divisible by {self.size} ranks"
            )

    def _check_root(self, where: str, root: int) -> None:
        if check_int(where, "root", root, 0) >= self.size:
            raise OptionError(f"{where}: root = {root} is not a rank of 0..{self.size - 1}")


def _check_apart(operation: Operation, arrays: Sequence[Array]) -> None:
    """Raise OptionError if two arrays of a list share memory, as each would be combined with the other's result."""
    spans = sorted(
        (address_of(array), address_of(array) + array.nbytes, number) for number, array in enumerate(arrays)
    )
    for (_, end, number), (start, _, other) in pairwise(span for span in spans if span[0] < span[1]):
        if start < end:
            raise OptionError(
                f"{operation.kind} {operation.name!r}: the arrays {min(number, other)} and {max(number, other)} of the "
                "list share memory; give each part once"
            )
