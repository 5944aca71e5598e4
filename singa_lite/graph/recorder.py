# SPDX-License-Identifier: Apache-2.0
"""Record a training step as a tape of nodes, while it runs eagerly.

What lives here: the recorder, and what code of a step reports to it. What doesn't: what is on a tape (nodes.py), which
tape belongs to a call and replaying it (record/), what a kernel computes (backend/).

Note [recorded step]: while a step runs eagerly, every kernel and every collective is put on a tape with a View of each
array that it reads and writes, so running the tape on arrays laid out alike repeats the step. Python runs once, while
recording. Python that must run at every replay is a Host node (``host``, ``bookkeep``), a number that must be read at
every replay a Scalar (``scalar``), and what decides which nodes a step has is a guard (``guard``): a replay whose
guards have other values is recorded again. Whatever else a step does to arrays or variables outside of nodes breaks
the graph (``break_graph``): such a step always runs eagerly, and ``Model.graph_info`` gives the reason. print, files
and clocks are not looked at: what a step does with them is done while recording alone.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

from ..config import state, this_thread
from .memory import Array, Memory, View, address_of, root_of
from .nodes import Collective, Flight, Fork, Host, Join, Kernel, Node, Scalar, StreamSwitch, Wait

Result = TypeVar("Result")
Guard = Callable[[], Hashable]


class Recorder:
    """Collects the nodes of one step, see Note [recorded step].

    Args:
        tensors_in: finds the Tensors (of a module above) in nested lists, tuples and dicts.

    Attributes:
        nodes: the tape.
        guards: by what each is about, the function and its value when the step began.
        first: see ``steps_since_start``.
        break_reason: why the step must not be replayed; None if it may be.
        is_lasting: whether the next step of this kind breaks as well.
        is_partial: whether a fork has left a part of the step out.
        casts_again: whether an array was cast again which nothing on the tape has changed, see ``cast``.
        around_host: makes the ``with`` block in which Python runs that replays run too.
        ends_of_gradients: memory of inputs of operators, to which ``backward`` gave no gradient as they take none.
        joins: of forks that have not ended.
        updates_in_parts: whether an optimizer changes some parameters before others.
        phase: "Backward" from a call of autograd.backward to the next operator that is recorded, else "Forward".
    """

    def __init__(self, tensors_in: Callable[[Any], list[Any]]) -> None:
        self.nodes: list[Node] = []
        self.guards: dict[Hashable, tuple[Guard, Hashable]] = {}
        self.first: dict[Hashable, int] = {}
        self.break_reason: str | None = None
        self.is_lasting = True
        self.is_partial = False
        self.casts_again = False
        self.around_host: Callable[[], AbstractContextManager[None]] = nullcontext
        self.ends_of_gradients: set[Memory] = set()
        self.joins: list[Join] = []
        self.updates_in_parts = False
        self.phase = "Forward"
        self._memories: dict[int, Memory] = {}  # by the id of the array that owns it, while that lives
        self._watches: list[Any] = []  # weak references to those arrays
        self._tensors_in = tensors_in
        self._passed: list[tuple[Any, Memory]] = []  # tensors given to host nodes, and their memory then
        self._num_hosts = 0  # of host nodes that see arrays, each of which may write to any
        # by what was cast, and to which dtype: a weak reference to the result, and the versions of both then
        self._casts: dict[tuple[View, Any], tuple[Any, tuple[int, ...]]] = {}
        self._in_flight: dict[int, Collective] = {}  # by the id of a Work that nobody has waited for
        # by the id of an array's root: what another thread has done to it, and a weak reference to it
        self._read_elsewhere: dict[int, tuple[str, Any]] = {}
        self._written_elsewhere: dict[int, tuple[str, Any]] = {}

    def recording(self) -> AbstractContextManager[None]:
        """Record what this thread does inside the ``with`` block."""
        return _recorder_of_thread(self)

    def break_graph(self, reason: str, is_lasting: bool = True) -> None:
        """Make this step run eagerly, for this reason; the first one counts."""
        if self.break_reason is None:
            self.break_reason, self.is_lasting = reason, is_lasting

    # ---- nodes -------------------------------------------------------------------------------------

    def kernel(
        self, backend: Any, name: str, inputs: tuple[Array, ...], out: Any, attributes: dict[str, Any]
    ) -> dict[str, Any]:
        """Record a kernel; return its attributes with the numbers of now."""
        if "counter" in attributes and not isinstance(attributes["counter"], Scalar):
            self.break_graph(f"{name} draws random numbers that come from no device")
        for array in inputs:
            if not self._known_or_kept(array).version:
                self.break_graph(f"{name} reads an array that no kernel of the step has written")
        for array in out if isinstance(out, tuple) else (out,):
            self._known_or_kept(array).version += 1
        self.nodes.append(Kernel(backend, name, inputs, out, attributes, self.phase).mapped(self._view))
        return {key: value.value if isinstance(value, Scalar) else value for key, value in attributes.items()}

    def collective(
        self, communicator: Any, operation: Any, inputs: tuple[Array, ...], out: Array, work: Any
    ) -> None:
        """Record a collective that was just started as ``work``."""
        if any(self._known(array) is None for array in inputs):
            self.break_graph(
                f"{operation.kind} {operation.name} of an array that no kernel of the step has made"
            )
        node = Collective(communicator, operation, inputs, out, Flight()).mapped(self._view)
        node.out.memory.version += 1
        node.flight.work = work  # until finish, so that its id is not used again
        self.nodes.append(node)
        self._in_flight[id(work)] = node

    def wait(self, work: Any, timeout_s: float | None) -> None:
        """Record waiting for ``work``."""
        node = self._in_flight.pop(id(work), None)
        if node is not None:
            node.out.memory.version += 1
            self.nodes.append(Wait(node.flight, node.inputs, node.out, timeout_s))
        elif not any(isinstance(other, Collective) and other.flight.work is work for other in self.nodes):
            self.break_graph("it waits for a collective that was started before the step")

    def host(self, node: Host) -> Any:
        """Run a host node without recording what it does, and keep it; return what its function returns."""
        self.nodes.append(node)
        for tensor in self._tensors_in(node.arguments):
            memory = self._known_or_kept(tensor.array)
            memory.version += 1
            self._passed.append((tensor, memory))
        self._num_hosts += node.sees_arrays
        try:
            with unrecorded(), self.around_host():
                return node.function(*node.arguments)
        except BaseException:
            self.note_error(node.name)
            raise

    def note_error(self, what: str) -> None:
        """Break the graph of a step that may catch an error: what it does then is for these values alone."""
        self.break_graph(f"{what} raised an error", is_lasting=False)

    def cast(self, backend: Any, array: Array, dtype: Any) -> Array:
        """Return ``array`` in ``dtype``.

        That is the result of an earlier cast if somebody still holds it and nothing may have written to either since;
        an array that ``Tensor.data`` has given out may have been written at any time.
        """
        source, key = self._known_or_kept(array), (self._view(array), dtype)
        watch, versions = self._casts.get(key, (lambda: None, ()))
        found = watch()
        if found is not None and versions == self._versions(source, found):
            if self.break_reason is None and id(root_of(array)) not in state.exposed:
                return found
            self.casts_again = True
        found = backend.empty(array.shape, dtype)
        backend.run("cast", array, out=found)
        self._casts[key] = weakref.ref(found), self._versions(source, found)
        return found

    def _versions(self, source: Memory, result: Array) -> tuple[int, ...]:
        return source.version, self._memory(result).version, self._num_hosts

    # ---- memory ------------------------------------------------------------------------------------

    def allocate(self, array: Array) -> Array:
        """Note that ``array`` is new and uninitialised; returns it."""
        self._memory(root_of(array))
        return array

    def keep(self, array: Array) -> Memory:
        """Pin ``array``: replays read and write it where it is."""
        root = root_of(array)
        memory = self._memory(root)
        memory.owner, memory.version = root, max(1, memory.version)
        return memory

    def keep_alive_arrays(self) -> None:
        """Pin all arrays of the step that somebody still holds."""
        for root in self._alive():
            self.keep(root)

    def take_inputs(self, arrays: list[Array]) -> None:
        """Declare ``arrays`` inputs: every replay copies new values to memory of the step alone."""
        for array in arrays:
            memory = self._memory(root_of(array))
            memory.owner, memory.version = None, memory.version + 1

    def view(self, array: Array) -> View | None:
        """Return the View of an array that the step has used, else None."""
        return None if self._known(array) is None else self._view(array)

    def writes(self, arrays: Iterable[Array]) -> bool:
        """Return whether a node writes to the memory of one of ``arrays``, whose views all nodes have in common."""
        memories = {self._known(array) for array in arrays}
        return any(view.memory in memories for node in self.nodes for view in node.outputs)

    def memories_of(self, arrays: Iterable[Array]) -> tuple[Memory, ...]:
        """Return the memory of those of ``arrays`` that the step has used."""
        return tuple(memory for array in arrays if (memory := self._known(array)) is not None)

    def behind_gradients(self) -> set[Memory]:
        """Return the memory of what ``ends_of_gradients`` were computed from; more, where memory was used again."""
        found = set(self.ends_of_gradients)
        for node in reversed(self.nodes):
            if any(view.memory in found for view in node.outputs):
                found.update(view.memory for view in node.inputs)
        return found

    def check_outputs(self, where: str, outputs: tuple[Array, ...], given: tuple[Array, ...]) -> None:
        """Break the graph if ``where`` made an array without a kernel; it may return what it was given."""
        roots = {id(root_of(array)) for array in given}
        for array in outputs:
            memory = self._known(array)
            if id(root_of(array)) not in roots and (memory is None or not memory.version):
                self.break_graph(f"{where} computes outside of the backend's kernels")

    def note_elsewhere(self, what: str, inputs: tuple[Array, ...], outputs: tuple[Array, ...]) -> None:
        """Note what another thread does meanwhile; it breaks the graph where it is a part of the step.

        That is so if it writes an array that the step uses, or reads one that the step makes or writes, then or later.
        """
        for arrays, noted in ((inputs, self._read_elsewhere), (outputs, self._written_elsewhere)):
            for root in map(root_of, arrays):
                memory = self._memories.get(id(root))
                if memory is not None and (noted is self._written_elsewhere or memory.owner is None):
                    self._break_for_thread(what)
                noted[id(root)] = what, weakref.ref(root)

    def check_written_elsewhere(self, arrays: Iterable[Array]) -> None:
        """Break the graph if another thread has written one of ``arrays``, which belong to the step or its model."""
        for root in map(root_of, arrays):
            what, watch = self._written_elsewhere.get(id(root), ("", None))
            if watch is not None and watch() is root:
                self._break_for_thread(what)

    def _break_for_thread(self, what: str) -> None:
        reason = f"another thread {what} with a Tensor of it, which a replay would not do"
        self.break_graph(reason, is_lasting=False)  # it may have been by chance

    def finish(self) -> None:
        """Pin, at the end of the step, what host nodes use; break the graph for what a replay could not restore."""
        if self._in_flight:
            kinds = ", ".join(node.operation.kind for node in self._in_flight.values())
            self.break_graph(f"it leaves a collective in flight ({kinds})")
        if self.joins:
            self.break_graph("a part of it that may be left out did not end")
        for node in self.nodes:
            if isinstance(node, Collective):
                node.flight.work = None
        self._check_reads_elsewhere()
        for tensor, memory in self._passed:
            if self._known(tensor.array) is memory:
                memory.owner = root_of(tensor.array)
            else:
                self.break_graph("a host node has replaced the array of a tensor")

    def _check_reads_elsewhere(self) -> None:
        if self._read_elsewhere:
            written = {view.memory for node in self.nodes for view in node.outputs}
            written |= {memory for _, memory in self._passed}
            for what, watch in list(self._read_elsewhere.values()):
                if (root := watch()) is not None and self._memories.get(id(root)) in written:
                    self._break_for_thread(what)

    def has_escaped(self, known: list[Array], tensors: list[weakref.ref[Any]]) -> bool:
        """Return whether somebody still holds one of ``tensors``, or an array of the step that is not ``known``."""
        roots = {id(root_of(array)) for array in known}

        def is_held() -> bool:
            return any(tensor() is not None for tensor in tensors) or any(
                id(root) not in roots and self._memories[id(root)].owner is None for root in self._alive()
            )

        if is_held():
            gc.collect()  # what only unreachable cycles hold is gone afterwards
        return is_held()

    def _alive(self) -> Iterator[Array]:
        """Return the arrays with memory of their own that the step has used and somebody still holds."""
        return (root for watch in self._watches if (root := watch()) is not None)

    def _known(self, array: Array) -> Memory | None:
        return self._memories.get(id(root_of(array)))

    def _known_or_kept(self, array: Array) -> Memory:
        """Return the Memory of ``array``; pin one that the step has not made: a constant, or of an earlier step."""
        return self._known(array) or self.keep(array)

    def _view(self, array: Array) -> View:
        root = root_of(array)
        offset = address_of(array) - address_of(root) if array is not root else 0
        return View(self._memory(root), offset, array.shape, array.dtype, array.strides)

    def _memory(self, root: Array) -> Memory:
        """Return the Memory of the array ``root``; an array made at its address later has another one."""
        key = id(root)
        if key not in self._memories:
            self.check_written_elsewhere([root])
            self._memories[key] = Memory(root.nbytes)
            # called without Python in between, where Ctrl-C would be lost and the entry stay
            self._watches.append(weakref.ref(root, partial(self._memories.pop, key)))
        return self._memories[key]


# ---- what code of a step reports to the recorder, if there is one ----------------------------------------


def host(function: Callable[..., Result], *arguments: Any) -> Result:
    """Run ``function(*arguments)`` now, and here in every replay of the step being recorded, if any.

    What it does is not recorded. Every tensor that it uses and the step computes must be among the arguments, or in
    lists of them. On CUDA a graph ends before it; what only counts is for ``bookkeep``.
    """
    recorder: Recorder | None = this_thread.recorder
    if recorder is None:
        return function(*arguments)
    return recorder.host(Host(function, arguments, sees_arrays=True))  # type: ignore[no-any-return]


def fork(function: Callable[..., bool], *arguments: Any, reason: str = "a part of it") -> bool:
    """Return ``function(*arguments)``, and have replays run what comes up to ``join`` only where it gives True.

    Every replay calls it, as for ``host``. A step where it gives False is not kept, as it lacks what is left out, which
    ``reason`` names. Each fork needs its ``join``; a step with two runs eagerly.
    """
    recorder: Recorder | None = this_thread.recorder
    if recorder is None:
        return function(*arguments)
    if any(isinstance(node, Fork) for node in recorder.nodes):
        recorder.break_graph("two parts of it may be left out, the second of which depends on the first")
    end = Join(_joined, (), sees_arrays=True)
    is_taken: bool = recorder.host(Fork(function, arguments, sees_arrays=True, join=end))
    recorder.joins.append(end)
    if not is_taken:
        recorder.is_partial = True
        recorder.break_graph(f"{reason} was left out", is_lasting=False)
    return is_taken


def join() -> None:
    """End what the last ``fork`` may leave out of a replay."""
    recorder: Recorder | None = this_thread.recorder
    if recorder is not None:
        recorder.host(recorder.joins.pop())


def _joined() -> None:
    """Do nothing: the node that ends the part of a step that a fork can leave out."""


def bookkeep(function: Callable[..., object], *arguments: Any) -> None:
    """Run ``function(*arguments)``, which uses no array, now and here in every replay."""
    recorder: Recorder | None = this_thread.recorder
    if recorder is None:
        function(*arguments)
    else:
        recorder.host(Host(function, arguments, sees_arrays=False))


def switch_stream(function: Callable[..., None], *arguments: Any) -> None:
    """Run ``function(*arguments)``, which orders the streams of a device, and record it as a StreamSwitch."""
    recorder: Recorder | None = this_thread.recorder
    if recorder is not None:
        recorder.nodes.append(StreamSwitch(function, arguments))
    function(*arguments)


def scalar(read: Callable[[], Any]) -> Any:  # Any: a number, or a Scalar while a step is recorded
    """Return ``read()``; in a recorded step a Scalar, an attribute of a kernel that every replay reads again."""
    recorder: Recorder | None = this_thread.recorder
    if recorder is None:
        return read()
    with unrecorded(), recorder.around_host():
        return Scalar(read)


def guard(key: Hashable, function: Guard) -> None:
    """Record the step being recorded again wherever ``function()``, called before a replay, has another value than now.

    Args:
        key: what it is about; of several guards of a step with one key the first counts, as what comes later in a step
            follows from how it began.
    """
    recorder: Recorder | None = this_thread.recorder
    if recorder is not None and key not in recorder.guards:
        with unrecorded(), recorder.around_host():
            recorder.guards[key] = function, function()


def guard_ahead(key: Hashable, ahead: int, function: Callable[[int], Hashable]) -> None:
    """Record a guard of a part of the step being recorded that comes after ``ahead`` others of its kind.

    Args:
        key: what it is about.
        ahead: as ``steps_since_start`` gives it.
        function: called with 0 now, and with ``ahead`` before a replay: after how many others the part comes then.
    """
    recorder: Recorder | None = this_thread.recorder
    if recorder is not None and (key, ahead) not in recorder.guards:
        with unrecorded(), recorder.around_host():
            recorder.guards[key, ahead] = partial(function, ahead), function(0)


def steps_since_start(key: Hashable, steps: int) -> int:
    """Return ``steps`` minus what it was when this was first called for ``key`` in the step being recorded, else 0."""
    return 0 if this_thread.recorder is None else steps - this_thread.recorder.first.setdefault(key, steps)


def persist(array: Array) -> None:
    """Declare that ``array`` stays in its memory from step to step, unless a step being recorded has made it."""
    recorder: Recorder | None = this_thread.recorder
    if recorder is not None and recorder.view(array) is None:
        recorder.keep(array)


def break_graph(reason: str) -> None:
    """Make the step being recorded, if any, run eagerly, for this reason."""
    if this_thread.recorder is not None:
        this_thread.recorder.break_graph(reason)


def tell_other_threads(what: str, inputs: tuple[Array, ...], outputs: tuple[Array, ...]) -> None:
    """Report what this thread does to arrays to the recorders of other threads, unless it records a step itself."""
    if this_thread.recorder is None:
        for recorder in list(state.recorders):
            recorder.note_elsewhere(what, inputs, outputs)


def unrecorded() -> AbstractContextManager[None]:
    """Leave what this thread does inside the ``with`` block out of the step being recorded, if any.

    For what happens once, not in every step: making memory that stays, comparing the ranks.
    """
    return _recorder_of_thread(None)


@contextmanager
def _recorder_of_thread(recorder: Recorder | None) -> Iterator[None]:
    before = this_thread.recorder
    switch_recorder(before, recorder)
    try:
        yield
    finally:
        switch_recorder(recorder, before)


def switch_recorder(before: Recorder | None, after: Recorder | None) -> None:
    """Have ``after`` record what this thread does, instead of ``before``; None: nothing."""
    this_thread.recorder = after
    if before is not after:
        state.recorders.discard(before)
        if after is not None:
            state.recorders.add(after)
