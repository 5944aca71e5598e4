# SPDX-License-Identifier: Apache-2.0
"""Records of a model's training step: which one belongs to a call, and replaying it on new inputs.

What lives here: keys, private copies of inputs and results. What does not: how a step is recorded (graph.py).
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from .arena import Lifetime, plan_offsets
from .config import state
from .device import get_default_device
from .graph import HostCall, KernelCall, Memory, Recorder, View
from .profile import TimeProfile
from .tensor import Tensor

MAX_RECORDS = 8  # each holds all activations of its step; the least recently used is dropped
Step = Callable[..., Any]
Call = KernelCall | HostCall


@dataclass(frozen=True)
class RecordInfo:
    """What a person may want to know of one record.

    Attributes:
        inputs: shapes and dtypes of the tensors, and the options, that it belongs to.
        num_kernels: kernel calls of a replay.
        num_host_calls: places where Python runs: a gradient handed to its scheme, the update.
        num_bytes: memory that activations and their gradients share.
        nodes: the calls of a replay in their order, with what they make: its dtype and shape, and the blocks of
            channels it lies in where it is not row-major (native/kernels/layout.h).
        refusal: why such steps run eagerly instead; None if they are replayed.
    """

    inputs: str
    num_kernels: int
    num_host_calls: int
    num_bytes: int
    refusal: str | None
    nodes: tuple[str, ...] = ()


class Record:
    """One recorded step.

    Inputs and results of a replay belong to the caller: the record works on copies of its own.
    """

    def __init__(
        self, step: Step, arguments: tuple[Any, ...], options: dict[str, Any], states: list[Tensor]
    ) -> None:
        """Run ``step`` once, eagerly, on copies of the tensors in its arguments, and keep its calls."""
        recorder = Recorder(_tensors)
        copies = {key: _own(value) for key, value in _named(arguments, options).items()}
        self._inputs = {key: value for key, value in copies.items() if isinstance(value, Tensor)}
        self._label = ", ".join(
            f"{v.dtype}{list(v.shape)}" if isinstance(v, Tensor) else repr(v) for v in copies.values()
        )
        if any(tensor.stores_grad for tensor in self._inputs.values()):
            recorder.refuse("an input stores its gradient")
        with recorder.recording():
            self._result = step(
                *(copies[place] for place in range(len(arguments))),
                **{name: copies[name] for name in options},
            )
        recorder.settle()
        self.refusal = recorder.refusal
        self.result = _copied(self._result)  # of the step just run, for its caller
        self._states = [(tensor, tensor.data, tensor.stores_grad, tensor.requires_grad) for tensor in states]
        self._number = next(state.numbers)  # in the tables of profiles
        self._device = states[0].device if states else get_default_device()
        self._num_bytes = 0
        self._calls: list[Call] = []
        self._replay_calls: list[Callable[[], None]] = []
        if self.refusal is None:
            for tensor in states + _tensors([self._inputs, self._result]):
                recorder.keep(tensor.device.backend, tensor.data)
            backend = self._device.backend
            self._calls, self._num_bytes = share_memory(backend.lower(recorder.calls), backend)
            self._replay_calls = backend.bake(self._calls)

    def is_current(self, states: list[Tensor]) -> bool:
        """Whether parameters and statistics are the same, live where the record has them, and none was frozen."""
        return len(states) == len(self._states) and all(
            mine is given
            and mine.data is array
            and mine.stores_grad == stores_grad
            and mine.requires_grad == requires_grad
            for given, (mine, array, stores_grad, requires_grad) in zip(states, self._states, strict=True)
        )

    def replay(self, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Run the recorded calls on new values; what the step returned, as new tensors."""
        given = _named(arguments, options)
        for key, tensor in self._inputs.items():
            tensor.copy_data(given[key])
        profile = self._device.profile
        if profile.verbosity:
            self._replay_timed(profile)
        else:
            for run in self._replay_calls:
                run()
        return _copied(self._result)

    def _replay_timed(self, profile: TimeProfile) -> None:
        """Run the calls and tell the device's profile how long each took."""
        times = [time.perf_counter()]
        for call in self._calls:
            call()
            self._device.Sync()
            times.append(time.perf_counter())
        names = [(call.phase, call.name) for call in self._calls]
        profile.add(self._number, names, [end - start for start, end in pairwise(times)])

    def info(self) -> RecordInfo:
        """For people."""
        num_kernels = sum(isinstance(call, KernelCall) for call in self._calls)
        return RecordInfo(
            self._label,
            num_kernels,
            len(self._calls) - num_kernels,
            self._num_bytes,
            self.refusal,
            tuple(map(_described, self._calls)),
        )


class Records:
    """The records of one model, by what a call is made of."""

    def __init__(self) -> None:
        self._records: OrderedDict[Hashable, Record] = OrderedDict()
        self._refusals: dict[str, RecordInfo] = {}  # of calls that no record can belong to

    def call(
        self, step: Step, arguments: tuple[Any, ...], options: dict[str, Any], states: list[Tensor]
    ) -> Any:
        """Replay the record of such a call, or run the step and make one."""
        key = _key_of(arguments, options)
        if key is None:
            refusal = _unknowable(arguments, options)
            self._refusals[refusal] = RecordInfo(refusal, 0, 0, 0, refusal)
        if key is None or state.recorder is not None:
            return step(*arguments, **options)
        record = self._records.get(key)
        if record is not None and not record.is_current(states):
            self._records.clear()
            record = None
        if record is None:
            record = Record(step, arguments, options, states)
            self._records[key] = record
            if len(self._records) > MAX_RECORDS:
                self._records.popitem(last=False)
            result, record.result = record.result, None
            return result
        self._records.move_to_end(key)
        return step(*arguments, **options) if record.refusal else record.replay(arguments, options)

    def info(self) -> list[RecordInfo]:
        """One entry a record, the least recently used first; then why calls without one run eagerly."""
        return [record.info() for record in self._records.values()] + list(self._refusals.values())

    def clear(self) -> None:
        """Forget all records."""
        self._records.clear()
        self._refusals.clear()

    def __reduce__(self) -> tuple[type[Records], tuple[()]]:
        """A copy or a pickle of a model starts without records: they hold arrays of the original."""
        return Records, ()


def _described(call: Call) -> str:
    """A call for people."""
    if isinstance(call, HostCall):
        return call.name
    made = ", ".join(f"{array.dtype}{list(array.shape)}" for array in call.outputs)
    shown = ("relu", "block", "blocks")
    extras = "".join(f" {key}={call.attributes[key]}" for key in shown if key in call.attributes)
    return f"{call.name} -> {made}{extras}"


def share_memory(calls: list[Call], backend: Any) -> tuple[list[Call], int]:
    """Give the calls arrays: the recorded ones, and places in one arena for memory that only the step needs.

    There, pieces that are never alive together share bytes.

    Returns:
        (the same calls on arrays, bytes of the arena).
    """
    lifetimes: dict[Memory, Lifetime] = {}
    for number, call in enumerate(calls):
        for view in (*call.inputs, *call.outputs) if isinstance(call, KernelCall) else ():
            if view.memory.owner is None:
                first = lifetimes[view.memory].first if view.memory in lifetimes else number
                lifetimes[view.memory] = Lifetime(view.memory.num_bytes, first, number)
    offsets, total = plan_offsets(list(lifetimes.values()))
    place = dict(zip(lifetimes, offsets, strict=True))
    backend.give_back()  # what the recorded step used, or both would be held at once
    arena = backend.empty((total,), "uint8")

    def array_of(view: View) -> Any:
        if view.memory.owner is not None:
            return backend.view(view.memory.owner, view)
        return backend.view(arena, replace(view, offset=view.offset + place[view.memory]))

    return [call.mapped(array_of) if isinstance(call, KernelCall) else call for call in calls], total


def _named(arguments: tuple[Any, ...], options: dict[str, Any]) -> dict[int | str, Any]:
    named: dict[int | str, Any] = dict(enumerate(arguments))
    named.update(options)
    return named


def _key_of(arguments: tuple[Any, ...], options: dict[str, Any]) -> Hashable | None:
    """Shapes, dtypes, devices and plain values of a call; None if it cannot be told from others."""
    key = tuple(
        (
            name,
            (value.shape, value.dtype.str, id(value.device))
            if isinstance(value, Tensor)
            else (type(value), value),
        )
        for name, value in _named(arguments, options).items()
    )
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _unknowable(arguments: tuple[Any, ...], options: dict[str, Any]) -> str:
    """Which arguments keep a call from having a key."""
    kinds = {type(value).__name__ for value in _named(arguments, options).values() if not _is_hashable(value)}
    names = ", ".join(sorted(kinds))
    return f"arguments of type {names} do not tell one call from another; pass Tensors or plain values"


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _own(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _tensors(value: Any) -> list[Tensor]:
    """All Tensors in nested lists, tuples and dicts."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [tensor for item in value for tensor in _tensors(item)] if isinstance(value, (list, tuple)) else []


def _copied(value: Any) -> Any:
    """``value`` with every Tensor in it as a leaf of its own."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, (list, tuple)):
        return type(value)(_copied(item) for item in value)
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return value
