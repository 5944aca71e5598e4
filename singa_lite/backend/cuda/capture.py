# SPDX-License-Identifier: Apache-2.0
"""A recorded step as CUDA graphs: the host starts one graph where it would start hundreds of kernels.

What lives here: capturing the calls of a step, and what the host still does at every replay. What does not: which
calls a step has (../../graph.py), kernels.

Note [repeated host calls]: what Python does in a step - counting it, asking the schedule for a learning rate, handing
gradients on - must happen at every replay. So host calls run again before each launch of their graph, but nothing
reaches the device: their kernels are compared with the captured ones, memory and collectives are those of the
capture, and numbers that change from step to step (Note [scalars] in launch.py) are stored for the graph to read.
A step that does something else runs call by call, and the next is captured anew. One that cannot be captured, as its
host calls read values, runs call by call for good; a warning says why.

Note [variants]: a host call says by its ``variant`` which kind of step it will make. Every kind has its own graph. Its
first step runs call by call: a scheme makes its memory then, and a library chooses its algorithms.
One with a host call that must see values (None) is cut there: a graph before and one after, Python between.

Note [memory of graphs]: what a kernel allocates for itself belongs to its graph from then on, so it comes from a pool
that nobody else uses; all graphs of a step share it, as they run one after the other. Host calls may also make what
outlives a step, a residual for instance; so each variant has a pool for them, or its graph could be given memory in
which another variant's step keeps something. The first step fills both; what a capture wants beyond that, as it keeps
all that its host calls make, comes from the driver, which permits that in a relaxed capture (cupy's).
"""

from __future__ import annotations

import struct
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import cupy
import numpy as np

from ...config import state
from ...errors import GraphError
from ...graph import HostCall, KernelCall
from ..base import Array, Call
from .launch import Launcher, by_value

MAX_VARIANTS = (
    64  # of one step; the least recently used is dropped, but where those come back there may be more
)
MOST_DROPPED = 4096  # that are remembered
MAX_NUMBERS, STORED_AT_ONCE = 4096, 60  # the second: of Numbers in store.cu


class Refused(GraphError):
    """A step cannot be captured, and may as well run call by call."""


class Changed(Exception):
    """A host call did not do what was captured."""


@dataclass
class Execution:
    """A kernel of the capture.

    Attributes:
        launches: of our own kernels, with their arguments; kept where numbers may change.
        first_number: of those it asked for.
    """

    kernel: str
    arrays: tuple[Array, ...]
    attributes: dict[str, Any]
    first_number: int
    launches: list[tuple[Any, ...]] = field(default_factory=list)


class CapturedStep:
    """Runs the calls of a recorded step, from the second run of a variant on as a graph.

    Args:
        backend: the CUDA backend whose arrays ``calls`` work on.
    """

    def __init__(self, backend: Launcher, calls: list[Call], pool: Any = None) -> None:
        self._backend, self._calls = backend, calls
        self._pool = pool or cupy.cuda.MemoryPool()  # of kernels, see Note [memory of graphs]
        self._variants: OrderedDict[Hashable, Variant] = OrderedDict()
        self._most, self._dropped = MAX_VARIANTS, deque[int](maxlen=MOST_DROPPED)
        self._parts: list[CapturedStep | HostCall] = []  # of a step that is cut at its host calls

    def __call__(self) -> None:
        key = tuple(call.variant() for call in self._calls if isinstance(call, HostCall))
        if None in key:
            for part in self._parts or self._cut():
                part()
            return
        if key not in self._variants:
            self._variants[key] = Variant(self._backend, self._calls, self._pool)
            if hash(key) in self._dropped:  # kinds that come in turn, more than there is room for
                self._most = min(2 * self._most, MOST_DROPPED)
                self._dropped.clear()
            if len(self._variants) > self._most:
                self._dropped.append(hash(self._variants.popitem(last=False)[0]))
        self._variants.move_to_end(key)
        self._variants[key]()

    def _cut(self) -> list[CapturedStep | HostCall]:
        for sees_values, group in groupby(self._calls, must_see_values):
            calls: list[Any] = list(group)
            self._parts += calls if sees_values else [CapturedStep(self._backend, calls, self._pool)]
        return self._parts


class Variant:
    """One kind of a step, see Note [variants]."""

    def __init__(self, backend: Launcher, calls: list[Call], pool: Any) -> None:
        self._backend, self._calls = backend, calls
        self._pools = {KernelCall: pool, HostCall: cupy.cuda.MemoryPool()}
        self._has_run = self._is_refused = False
        self.graph: CapturedCalls | None = None

    def __call__(self) -> None:
        if self.graph is not None and not self.graph.repeat():
            self.graph, self._has_run = None, False
        if self.graph is None and self._has_run and not self._is_refused:
            try:
                self.graph = CapturedCalls(self._backend, self._calls, self.run)
            except Refused as error:
                self._is_refused = True
                warnings.warn(f"a recorded step runs call by call from now on: {error}", stacklevel=2)
        if self.graph is not None:
            self.graph.launch()
        else:
            for call in self._calls:
                self.run(call)
            self._has_run = True

    def run(self, call: Call) -> None:
        """Run a call with memory as Note [memory of graphs] says."""
        with cupy.cuda.using_allocator(self._pools[type(call)].malloc):
            call()


class CapturedCalls:
    """Calls as one CUDA graph, see Note [repeated host calls]. Made by ``run`` on each, with nothing computed.

    Attributes:
        backend: whose calls these are.
        num_launches: how often the graph was started.
        has_told_others: whether the host calls have told other ranks something, so that they may not run again.
    """

    def __init__(self, backend: Launcher, calls: list[Call], run: Callable[[Call], None]) -> None:
        self.backend, self._calls = backend, calls
        self._done: list[list[Any]] = []  # by call: executions, and what it made, in their order
        self._expected: Iterator[Any] = iter(())
        self._execution: Execution | None = None  # that runs now
        self._numbers: list[bytes] = []
        self._next_number = 0
        self._stored = b""
        self._on_device = backend.zeros((MAX_NUMBERS,), np.int64)
        self.is_repeating = self.has_told_others = False
        self.num_launches = 0
        self._graph: Any = None
        with undone_after(GraphError, calls), backend.turn, self._in_force():
            backend.activate()
            backend.join()  # what was given before is no part of it
            backend.stream.begin_capture()
            try:
                for call in calls:
                    self._done.append([])
                    run(call)
                backend.join()
            except BaseException as error:
                with suppress(RuntimeError):  # CUDA's, of a collective that nobody will wait for
                    backend.stream.end_capture()
                if isinstance(error, GraphError) and not self.has_told_others:
                    raise Refused(str(error)) from error
                raise
            self._graph = backend.stream.end_capture()
        works = [made for done in self._done for made in done if hasattr(made, "relaunched")]
        self._last_works = {work.captured_by(self): work for work in works}  # by who watches them

    def give_up(self) -> None:
        """End the CUDA graph: what its collectives run on is about to end. The next ``repeat`` says no."""
        self._graph = None

    def repeat(self) -> bool:
        """Do again what Python does in these calls; False if they would not run the same kernels any more."""
        if self._graph is None:
            return False
        self.is_repeating, self.has_told_others = True, False
        try:
            with undone_after((Changed, GraphError), self._calls), self._in_force():
                for call, done in zip(self._calls, self._done, strict=True):
                    if isinstance(call, HostCall) or call.random is not None:
                        self._expected = iter(done)
                        call()
                        if next(self._expected, None) is not None:
                            raise Changed
        except Changed:
            return False
        except GraphError:
            if self.has_told_others:
                raise
            return False
        return True

    def launch(self) -> None:
        """Start the graph with the numbers that ``repeat`` or the capture stored."""
        with self.backend.turn:
            self.backend.activate()
            self.backend.join()
            self._store(b"".join(self._numbers))
            self._graph.launch(self.backend.stream)
        self.num_launches += 1
        for work in self._last_works.values():
            work.relaunched()

    def _store(self, numbers: bytes) -> None:
        """Bring the numbers to the device, unless they are there."""
        if numbers == self._stored:
            return
        values = np.frombuffer(numbers, np.int64).tolist()
        for first in range(0, len(values), STORED_AT_ONCE):
            part = values[first : first + STORED_AT_ONCE]
            packed = by_value([len(part), *part], 8 * (1 + STORED_AT_ONCE))
            place = self._on_device[first : first + len(part)]
            self.backend.launch("store.store", "l", 1, 64, place, packed)
        self._stored = numbers

    @contextmanager
    def _in_force(self) -> Iterator[None]:
        """Hear of every kernel, array, collective and number."""
        state.rehearsal = self
        try:
            yield
        finally:
            state.rehearsal = None
            self._execution = None

    # ---- what the backend and communicators tell ---------------------------------------------------------

    def execute(
        self, run: Callable[[], None], kernel: str, arrays: tuple[Array, ...], attributes: dict[str, Any]
    ) -> None:
        """Capture a kernel, or compare it with the captured one."""
        if self._execution is not None:  # a part of another kernel
            run()
            return
        if not self.is_repeating:
            self._execution = Execution(kernel, arrays, attributes, len(self._numbers))
            run()
            has_numbers = len(self._numbers) > self._execution.first_number
            self._execution.launches *= has_numbers
            self._done[-1].append(self._execution)
        else:
            self._execution = self._next(Execution)
            known = self._execution
            if kernel != known.kernel or not are_same(arrays, known.arrays):
                raise Changed
            if known.launches:
                self._next_number, self._launch_number = known.first_number, 0
                run()
            elif attributes != known.attributes:
                raise Changed
        self._execution = None

    def launches(self, *launch: Any) -> bool:
        """Whether a kernel of ours must be started; else it is the captured one."""
        if self._execution is None:
            raise GraphError("a step being captured starts a kernel past Backend.run")
        if not self.is_repeating:
            self._execution.launches.append(launch)
            return True
        known = self._execution.launches[self._launch_number : self._launch_number + 1]
        self._launch_number += 1
        if not known or not are_same(launch, known[0]):
            raise Changed
        return False

    def scalar(self, packed: bytes) -> np.ndarray[Any, Any]:
        """Where the graph finds a number of 8 bytes."""
        if self.is_repeating:
            place = self._next_number
            self._numbers[place] = packed
        else:
            place = len(self._numbers)
            if place == MAX_NUMBERS:
                raise GraphError(f"a captured step has more than {MAX_NUMBERS} numbers that change")
            self._numbers.append(packed)
        self._next_number = place + 1
        return np.frombuffer(struct.pack("<qq", self._on_device.data.ptr + 8 * place, 0), "V16")

    def made(self, make: Callable[[], Any]) -> Any:
        """What ``make`` gives at the capture, then and at every repetition: an array, or a collective."""
        if self._execution is not None:
            return make()
        if not self.is_repeating:
            self._done[-1].append(make())
            return self._done[-1][-1]
        return self._next(object)

    def _next(self, kind: type) -> Any:
        found = next(self._expected, None)
        if (
            found is None
            or not isinstance(found, kind)
            or isinstance(found, Execution) != (kind is Execution)
        ):
            raise Changed
        return found


@contextmanager
def undone_after(error: type[Exception] | tuple[type[Exception], ...], calls: list[Call]) -> Iterator[None]:
    """Bring back, if that error comes, what host calls and random streams of a step had counted before."""
    devices = {call.random for call in calls if isinstance(call, KernelCall) and call.random is not None}
    devices |= {
        device for device in (state.default_device, *state.cuda_devices.values()) if device is not None
    }
    draws = [(device, device.get_random_state()) for device in devices]
    befores = [call.remember() for call in calls if isinstance(call, HostCall)]
    try:
        yield
    except error:
        for device, random_state in draws:
            device.set_random_state(random_state)
        for bring_back in befores:
            bring_back()
        raise


def must_see_values(call: Call) -> bool:
    """Whether a CUDA graph must end before this call."""
    return isinstance(call, HostCall) and call.variant() is None


def are_same(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Whether arguments of a kernel are equal: the same places in memory, the same numbers."""
    return len(a) == len(b) and all(x is y or _is_same(x, y) for x, y in zip(a, b, strict=True))


def _is_same(a: Any, b: Any) -> bool:
    if isinstance(a, tuple):
        return isinstance(b, tuple) and are_same(a, b)
    if isinstance(a, cupy.ndarray):
        return isinstance(b, cupy.ndarray) and (a.data.ptr, a.shape, a.dtype) == (
            b.data.ptr,
            b.shape,
            b.dtype,
        )
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.tobytes() == b.tobytes()
    return bool(a == b)
