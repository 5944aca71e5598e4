# SPDX-License-Identifier: Apache-2.0
"""The nodes of a tape: what a recorded step does, in order, and every replay does again.

What lives here: the kinds of nodes. What does not: recording them (recorder.py), when to replay them (record/), how
a backend runs kernels faster (``Backend.lower``, ``Backend.compile``).

A node refers to arrays by a View; ``mapped`` substitutes real arrays, and then it can be called. ``inputs`` are
the arrays it reads, ``outputs`` those it writes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import dataclass, replace
from functools import partial, partialmethod
from typing import Any, ClassVar, NoReturn, TypeVar

import numpy as np

from ..config import this_thread
from ..errors import GraphError, is_number

OnArrays = TypeVar("OnArrays", bound="ArrayNode")
Call = TypeVar("Call", bound="PythonCall")


NO_VALUE = (
    "a number that every replay reads again, as Optimizer.number gives it, has no value for Python that runs once: "
    "compute it in scalar(lambda: ...), or where it decides which kernels run, have guard(key, lambda: ...) return "
    "what it decides, both of singa_lite.graph.recorder, and read it by value_of(name) there"
)


class Scalar:
    """A number that is read again at every replay: a learning rate, Adam's count, a random stream's counter.

    What is computed of it with numbers and other ones, by + - * / // % ** and abs, is one too; its value is nobody's to
    read.

    Attributes:
        read: called once for each node that has this number, in the order of the tape; it may count.
        value: what it gave in the recorded step.
        source: ``read`` as it was given, also where several share what it gives.
    """

    __slots__ = ("read", "source", "value")

    def __init__(self, read: Callable[[], Any]) -> None:
        self.read = self.source = read
        self.value = read()

    def shared(self) -> tuple[Scalar, Scalar]:
        """Return two for nodes of one number: the first reads it, the other gives again what was read last."""
        last = [self.value]

        def read() -> Any:
            last[0] = self.read()
            return last[0]

        first, other = copy(self), copy(self)
        first.read, other.read = read, lambda: last[0]
        return first, other

    def _with(self, function: Callable[..., Any], *others: Any, is_right: bool = False) -> Any:
        """Return a Scalar of ``function`` of this and ``others``; NotImplemented for Tensors, GraphError for arrays."""
        if any(isinstance(other, np.ndarray) for other in others):
            self._refuse()
        if not all(isinstance(other, Scalar) or is_number(other) for other in others):
            return NotImplemented
        numbers = (*others, self) if is_right else (self, *others)
        new = copy(self)
        new.read = new.source = partial(_computed, function, *numbers)
        new.value = function(*(each.value if isinstance(each, Scalar) else each for each in numbers))
        return new

    def _refuse(self, *others: object) -> NoReturn:
        raise GraphError(NO_VALUE)

    __add__ = partialmethod(_with, operator.add)
    __radd__ = partialmethod(_with, operator.add, is_right=True)
    __sub__ = partialmethod(_with, operator.sub)
    __rsub__ = partialmethod(_with, operator.sub, is_right=True)
    __mul__ = partialmethod(_with, operator.mul)
    __rmul__ = partialmethod(_with, operator.mul, is_right=True)
    __truediv__ = partialmethod(_with, operator.truediv)
    __rtruediv__ = partialmethod(_with, operator.truediv, is_right=True)
    __floordiv__ = partialmethod(_with, operator.floordiv)
    __rfloordiv__ = partialmethod(_with, operator.floordiv, is_right=True)
    __mod__ = partialmethod(_with, operator.mod)
    __rmod__ = partialmethod(_with, operator.mod, is_right=True)
    __pow__ = partialmethod(_with, operator.pow)
    __rpow__ = partialmethod(_with, operator.pow, is_right=True)
    __neg__ = partialmethod(_with, operator.neg)
    __abs__ = partialmethod(_with, operator.abs)
    __round__ = __floor__ = __ceil__ = __trunc__ = __divmod__ = __rdivmod__ = _refuse
    __bool__ = __float__ = __int__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __eq__ = __ne__ = _refuse  # type: ignore[assignment]
    __hash__ = object.__hash__
    __array_ufunc__ = None  # so that numpy leaves the operators to this class, and makes no array of objects


def _computed(function: Callable[..., Any], *numbers: Any) -> Any:
    """Return ``function`` of numbers, of Scalars of what they read now."""
    return function(*(each.read() if isinstance(each, Scalar) else each for each in numbers))


class ArrayNode:
    """A node that reads the arrays ``inputs`` and writes ``out``, an array or a tuple of arrays."""

    inputs: tuple[Any, ...]
    out: Any

    @property
    def outputs(self) -> tuple[Any, ...]:
        return self.out if isinstance(self.out, tuple) else (self.out,)

    def mapped(self: OnArrays, change: Callable[[Any], Any]) -> OnArrays:
        """Return the same node with ``change(array)`` for each of its arrays."""
        out = tuple(map(change, self.out)) if isinstance(self.out, tuple) else change(self.out)
        return replace(self, inputs=tuple(map(change, self.inputs)), out=out)  # type: ignore[type-var]


@dataclass(frozen=True)
class Kernel(ArrayNode):
    """A kernel of a backend, with what ``Backend.run`` was given."""

    backend: Any  # backend.base.Backend, of a module above
    name: str
    inputs: tuple[Any, ...]
    out: Any
    attributes: dict[str, Any]  # which may be Scalars
    phase: str  # "Forward" or "Backward"

    @property
    def has_scalars(self) -> bool:
        """Whether an attribute is read again at every replay."""
        return any(isinstance(value, Scalar) for value in self.attributes.values())

    def __call__(self) -> None:
        attributes = dict(self.attributes)
        for key, value in self.attributes.items():
            if isinstance(value, Scalar):
                attributes[key] = value.read()
        self.backend.execute(self.name, self.inputs, self.out, attributes)


class Flight:
    """Connects a Collective with its Wait: the work that the newest run started."""

    __slots__ = ("work",)

    def __init__(self) -> None:
        self.work: Any = None  # comm.work.Work, of a module above; None as well once it was waited for


@dataclass(frozen=True)
class Collective(ArrayNode):
    """The start of a collective, which ``communicator.launch(operation, out, *inputs)`` gives a Work."""

    communicator: Any  # comm.base.Communicator, of a module above
    operation: Any  # which collective, with all arguments but the arrays (comm.base.Operation)
    inputs: tuple[Any, ...]  # the array to send, and what the transport needs beside it
    out: Any  # has the result after the Wait; the first of the inputs where the collective is in place
    flight: Flight  # shared with the Wait
    phase: ClassVar[str] = "Dist"

    @property
    def name(self) -> str:
        return f"Dist.{self.operation.kind}"

    def __call__(self) -> None:
        self.flight.work = self.communicator.launch(self.operation, self.out, *self.inputs)


@dataclass(frozen=True)
class Wait(ArrayNode):
    """Waiting for a collective, whose arrays are in use until here."""

    flight: Flight  # shared with the Collective
    inputs: tuple[Any, ...]
    out: Any
    timeout_s: float | None  # as given to ``Work.wait``
    name: ClassVar[str] = "Dist.wait"
    phase: ClassVar[str] = "Dist"

    def __call__(self) -> None:
        work, self.flight.work = self.flight.work, None
        work.wait(self.timeout_s)


@dataclass(frozen=True)
class PythonCall:
    """A node that calls ``function(*arguments)``; which arrays it uses is not on the tape."""

    function: Callable[..., object]
    arguments: tuple[Any, ...]
    inputs: ClassVar[tuple[Any, ...]] = ()
    outputs: ClassVar[tuple[Any, ...]] = ()
    phase: ClassVar[str] = "Dist"

    def mapped(self: Call, change: Callable[[Any], Any]) -> Call:
        return self

    def __call__(self) -> None:
        self.function(*self.arguments)


@dataclass(frozen=True)
class Host(PythonCall):
    """Python that runs at every replay."""

    # whether it reads or writes arrays, and must run at its position: a CUDA graph ends before it and another begins
    # after it; False for what only counts
    sees_arrays: bool

    @property
    def name(self) -> str:
        return f"Host.{getattr(self.function, '__name__', 'call').strip('_')}"


@dataclass(frozen=True)
class Join(Host):
    """The end of what a Fork leaves out; does nothing."""


@dataclass(frozen=True)
class Fork(Host):
    """Python whose result decides at every replay whether the nodes up to its ``join`` are run."""

    join: Join


class StreamSwitch(PythonCall):
    """A change of the stream that a device's kernels go to, or an event between streams; none on the CPU."""

    name: ClassVar[str] = "Dist.stream"


class ClockCall(PythonCall):
    """``function(clock, *arguments)`` with the clock of the thread, which measures a step (clock.py)."""

    name: ClassVar[str] = "Dist.clock"

    def __call__(self) -> None:
        self.function(this_thread.clock, *self.arguments)


def run_steps(steps: Iterable[Callable[[], None]], after_each: Callable[[], None] | None = None) -> None:
    """Call ``steps``, nodes or what a backend makes of them, but for those a Fork decides against."""
    end: Join | None = None
    for step in steps:
        if end is None or step is end:
            end = None
            if not isinstance(step, Fork):
                step()
            elif not step.function(*step.arguments):
                end = step.join
        if after_each is not None:
            after_each()


Node = Kernel | Collective | Wait | Host | StreamSwitch | ClockCall
