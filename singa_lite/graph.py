# SPDX-License-Identifier: Apache-2.0
"""Record a training step as a list of calls, and replay it without the Python that made them.

What lives here: the recorder that Backend.run tells of every kernel, and the plan made from it. What does not:
which step a record belongs to (model.py), what a kernel computes (backend/).

Note [recorded step]: while a step runs eagerly, every kernel call is kept with a View of each array it read and
wrote, so running the list on arrays laid out alike repeats the step. What must happen in Python each time - handing
a gradient to its synchronisation scheme, waiting, updating parameters - is wrapped in ``host`` and kept as a call of
its own; the kernels it runs are not recorded. Between two host calls no other Python of the step runs.
A step that reads values back, or makes tensors from host values, would be frozen by this; it refuses to be
replayed and says why.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from .config import state

Result = TypeVar("Result")


class Memory:
    """A piece of memory that arrays of a step lie in; compared by identity.

    Attributes:
        num_bytes: its size.
        owner: the array that owns it, if a replay must use this very piece: it holds what the step reads but does
            not compute, or what outlives it. None for what only the step itself needs, which then gets other memory.
    """

    __slots__ = ("num_bytes", "owner")

    def __init__(self, num_bytes: int, owner: Any = None) -> None:
        self.num_bytes = num_bytes
        self.owner = owner


@dataclass(frozen=True)
class View:
    """An array of a step without its memory, so that recording keeps no activation alive.

    Attributes:
        memory: where it lies.
        offset: its first byte in there.
        shape, dtype, strides: as numpy's, strides in bytes.
    """

    memory: Memory
    offset: int
    shape: tuple[int, ...]
    dtype: Any
    strides: tuple[int, ...]


@dataclass(frozen=True)
class KernelCall:
    """One kernel of a recorded step.

    Attributes:
        backend: what runs it (backend.base.Backend, of a higher floor).
        kernel, inputs, out, attributes: as given to ``Backend.run``, but with a View for every array.
        random: the device whose stream the kernel draws from at every replay, or None.
        phase: "Forward" or "Backward".
    """

    backend: Any
    kernel: str
    inputs: tuple[Any, ...]
    out: Any
    attributes: dict[str, Any]
    random: Any
    phase: str

    @property
    def name(self) -> str:
        return self.kernel

    @property
    def outputs(self) -> tuple[Any, ...]:
        """``out`` as a tuple."""
        return self.out if isinstance(self.out, tuple) else (self.out,)

    def mapped(self, change: Callable[[Any], Any]) -> KernelCall:
        """The same call on ``change(array)`` for every array it reads or writes."""
        out = tuple(map(change, self.out)) if isinstance(self.out, tuple) else change(self.out)
        return replace(self, inputs=tuple(map(change, self.inputs)), out=out)

    def __call__(self) -> None:
        """Run it; only once it was mapped to arrays."""
        attributes = self.attributes
        if self.random is not None:
            seed, counter = self.random.next_random()
            attributes = {**attributes, "seed": seed, "counter": counter}
        self.backend.execute(self.kernel, self.inputs, self.out, attributes)


def nothing() -> None:
    """What brings back nothing."""


@dataclass(frozen=True)
class HostCall:
    """Python that runs at every replay.

    Attributes:
        function, arguments: called as function(*arguments); the arguments name all tensors it reads.
        updates: whether it may write parameters or other arrays that kernels read.
        variant: tells before a replay what kind of step the call will make, where kinds run different kernels; None
            if the call must see values, so that it cannot be part of a CUDA graph.
        remember: gives what brings Python's counters back to where they are now, for a step that is begun anew because
            a call after this one did not do what a CUDA graph has.
    """

    function: Callable[..., object]
    arguments: tuple[Any, ...]
    updates: bool = True
    variant: Callable[[], Hashable] = lambda: 0
    remember: Callable[[], Callable[[], None]] = lambda: nothing
    phase = "Dist"

    @property
    def name(self) -> str:
        return f"Dist.{getattr(self.function, '__name__', 'call').strip('_')}"

    def __call__(self) -> None:
        self.function(*self.arguments)


class Recorder:
    """Collects the calls of one step, see Note [recorded step].

    Args:
        tensors_in: finds the Tensors (of a higher floor) in nested lists, tuples and dicts.

    Attributes:
        calls: kernels and host calls, in their order.
        refusal: why the step must not be replayed; None if it may be.
        phase: "Backward" from a call of autograd.backward to the next operator that is recorded, else "Forward".
    """

    def __init__(self, tensors_in: Callable[[Any], list[Any]]) -> None:
        self.calls: list[KernelCall | HostCall] = []
        self.refusal: str | None = None
        self.phase = "Forward"
        self._random: Any = None  # the device that gave numbers to the kernel that comes next
        self._memories: dict[int, Memory] = {}  # by the id of the array that owns it, while that lives
        self._watches: list[Any] = []  # weak references to those arrays
        self._tensors_in = tensors_in
        self._handed: list[tuple[Any, Memory]] = []  # tensors given to host calls, and where they lay

    def add(
        self, backend: Any, kernel: str, inputs: tuple[Any, ...], out: Any, attributes: dict[str, Any]
    ) -> None:
        """Keep a kernel call."""
        random, self._random = self._random, None
        if "counter" in attributes and random is None:
            self.refuse(f"{kernel} draws random numbers that come from no device")
        for array in inputs:
            root = backend.root(array)
            if id(root) not in self._memories:  # a constant, or what the step before left
                self.keep(backend, array)
        call = KernelCall(backend, kernel, inputs, out, attributes, random, self.phase)
        self.calls.append(call.mapped(lambda array: self._view(backend, array)))

    def keep(self, backend: Any, array: Any) -> None:
        """Say that replays must read or write ``array`` where it is."""
        root = backend.root(array)
        self._memory(root).owner = root

    def settle(self) -> None:
        """Say, at the end of the step, that replays must leave what is looked at later where it is looked for."""
        for tensor, memory in self._handed:
            root = tensor.device.backend.root(tensor.data)
            if self._memories.get(id(root)) is memory:
                memory.owner = root
            elif tensor.data.nbytes == memory.num_bytes and tensor.data.flags.c_contiguous:
                memory.owner = tensor.data
            else:
                self.refuse("a host call moved a part of an array")
        for watch in self._watches:  # someone holds these: a state no model knows, an activation put aside
            root = watch()
            if root is not None and self._memories[id(root)].owner is None:
                self._memories[id(root)].owner = root

    def check_made(self, where: str, backend: Any, made: tuple[Any, ...], given: tuple[Any, ...]) -> None:
        """Refuse the step if ``where`` made an array without a kernel; it may hand on what it was given."""
        known = {id(backend.root(array)) for array in given}
        for array in made:
            root = id(backend.root(array))
            if root not in known and root not in self._memories:
                self.refuse(f"{where} computes outside of the backend's kernels")

    def _view(self, backend: Any, array: Any) -> View:
        root = backend.root(array)
        offset = backend.offset(array)
        return View(self._memory(root), offset, array.shape, array.dtype, array.strides)

    def _memory(self, root: Any) -> Memory:
        """The Memory of the array ``root``; another array that is made at its place later has another one."""
        key = id(root)
        if key not in self._memories:
            self._memories[key] = Memory(root.nbytes)
            self._watches.append(weakref.ref(root, lambda _: self._memories.pop(key)))
        return self._memories[key]

    def draw(self, device: Any) -> None:
        """Tell that the next kernel draws from ``device``."""
        self._random = device

    def refuse(self, reason: str) -> None:
        """Tell why this step cannot be replayed; the first reason counts."""
        self.refusal = self.refusal or reason

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Listen to every kernel inside the ``with`` block."""
        before, state.recorder = state.recorder, self
        try:
            yield
        finally:
            state.recorder = before

    def host(self, call: HostCall) -> Any:
        """Run ``call`` unheard, and keep it to be run at every replay; what its function returns."""
        self.calls.append(call)
        self._handed += [
            (tensor, self._memory(tensor.device.backend.root(tensor.data)))
            for tensor in self._tensors_in(call.arguments)
        ]
        state.recorder, state.hosting = None, self
        try:
            return call.function(*call.arguments)
        finally:
            state.recorder, state.hosting = self, None


def host(
    function: Callable[..., Result],
    *arguments: Any,
    updates: bool = True,
    variant: Callable[[], Hashable] = lambda: 0,
    remember: Callable[[], Callable[[], None]] = lambda: nothing,
) -> Result:
    """Run ``function(*arguments)`` now, and at this place of every replay if the step is being recorded.

    Every tensor that the function reads and the step computes must be among the arguments, or in lists of them.
    ``updates=False`` promises that it writes no array that kernels of the step read. What ``variant`` and
    ``remember`` are says HostCall.
    """
    recorder: Recorder | None = state.recorder
    if recorder is None:
        return function(*arguments)
    result: Result = recorder.host(HostCall(function, arguments, updates, variant, remember))
    return result


def made(make: Callable[[], Result]) -> Result:
    """``make()``; what it gave when the step was captured, while the host calls of a CUDA graph are repeated."""
    return make() if state.rehearsal is None else state.rehearsal.made(make)


def is_repeating() -> bool:
    """Whether host calls of a CUDA graph are being repeated: nothing must be given to the device."""
    rehearsal = state.of_thread.rehearsal
    return rehearsal is not None and bool(rehearsal.is_repeating)


def move_to(tensor: Any, array: Any) -> None:
    """Have replays of the step being recorded, if any, compute ``tensor`` right into ``array``.

    For the host call that takes the tensor and has copied it there: a replay finds it in its place.
    """
    if state.hosting is not None:
        tensor.data = array


def refuse(reason: str) -> None:
    """Say that the step being recorded, if any, must run eagerly."""
    if state.recorder is not None:
        state.recorder.refuse(reason)
