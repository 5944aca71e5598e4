# SPDX-License-Identifier: Apache-2.0
"""The records of a model's training step: which one belongs to a call, and when a step is recorded or runs eagerly.

What lives here: the keys of records, and how many there are. What does not: one run of a step (run.py), one record
(record.py).

Note [microbatches]: with order="fixed" the same calls must run eagerly on any number of ranks, as replays round
otherwise. It depends on that number which microbatches share these records (opt/fixed_order.py). So each microbatch
has kinds and limits of its own. After an update that was left out, as all ranks know, all records run eagerly once
more: a step without its update is not kept where it is recorded, and that is the last one of each rank. An error of
one rank changes no record.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from math import inf
from operator import attrgetter
from typing import Any

from ..config import state, this_thread
from ..errors import GraphError
from ..graph.memory import root_of
from ..graph.recorder import Recorder
from ..layer.base import layers_of
from ..tensor import Tensor
from ..tensor.pytree import OpaqueLeafError, flatten, leaves
from ..users_line import warn
from .arguments import repeats
from .record import Known, Record, RecordInfo, replays_before_check
from .run import Run
from .variables import OF_ALL_TENSORS

# all of one model, with order="fixed" of one microbatch of it
MAX_RECORDS = 64  # they share memory, and the least recently used is dropped
MAX_MISSES = 64  # recordings of one kind of call without a replay, until it runs eagerly for good
MAX_KINDS = 1024  # of calls; the least recently used one without records is forgotten
MAX_DROPS = 4  # how often a kind may lose all its records before they were worth it, until it runs eagerly
REPLAYS_PAID = 20  # which are worth what recording a step takes
MAX_RETRIES = 3  # of a step that made its parameters, or what else no replay can make, while it was recorded
TOO_MANY_MISSES = (
    "{} steps in a row were recorded and none could be replayed: what decides which nodes it has changes at every step "
    "(a number among the arguments, an attribute of the model, a variable, a schedule)"
)
TOO_MANY_IN_TURN = (
    f"its record was dropped {MAX_DROPS} times for those of other calls before it had been replayed much, as a model "
    "keeps a limited number: tensors of many shapes take turns, or other arguments do; pad batches to fewer shapes"
)
NOT_NOTICED = (
    "a step that was replayed runs {} now. What decides that was not noticed, so replays may have given wrong results. "
    "Pass it to the model as an argument, keep it in an attribute of the model, or compile with use_graph=False"
)
name_of = attrgetter("name")


@dataclass
class Kind:
    """The records of calls that are alike but for values."""

    label: str  # for people
    types: Hashable  # of the arguments, behind the microbatch
    microbatch: int | None  # see Note [microbatches]; None with any other order
    records: list[Record] = field(default_factory=list)  # they differ in guards and in attributes they found
    misses: int = 0  # recordings since the last replay
    drops: int = 0  # how often all its records were dropped for others before they were replayed much
    retries: int = 0  # of steps that broke, but need not the next time
    last_reason: str | None = None  # why the last of them did
    break_reason: str | None = None  # why such calls run eagerly for good
    is_settled: bool = False  # whether the step itself is the reason, and not what calls came before
    is_checked: bool = False  # whether a call whose inputs the model holds has shown what the step writes


class Records:
    """The records of one model, by what a call is made of; by its types alone if the step changes containers there.

    Args:
        model: whose records they are; None is no one's.

    Attributes:
        owner: gives that model, None once it is gone.
    """

    def __init__(self, model: Any = None) -> None:
        self.owner: Callable[[], Any] = weakref.ref(self if model is None else model)
        self._kinds: OrderedDict[Hashable, Kind] = OrderedDict()
        self._arenas: list[Any] = []
        self._copies = weakref.WeakValueDictionary[int, Any]()  # each while a record uses it
        # by their ids, arrays that outlive steps and that these write, each while it is there
        self._written: dict[int, weakref.ref[Any]] = {}
        # by microbatch: recordings since a replay, of all kinds with tensors of these shapes
        self._misses = Counter[int | None]()
        self._shapes: dict[int | None, list[tuple[int, ...]]] = {}
        self._num_dropped = 0  # updates that had been left out when the last call began
        self._recorded: Kind | None = None  # of the step that is being recorded
        self._lock = threading.RLock()  # held while a step is recorded or replayed: its memory is there once
        state.lock_owners[id(self)] = self

    def call(
        self,
        model: Any,
        arguments: tuple[Any, ...],
        options: dict[str, Any],
        precision: str,
        microbatch: int | None = None,
        num_dropped: int = 0,
    ) -> Any:
        """Replay the record of such a step of ``model`` in ``precision``, or run the step and make a record.

        Args:
            microbatch, num_dropped: number of the call within the update and updates left out so far, with
                order="fixed", see Note [microbatches].
        """
        if this_thread.recorder is not None:  # a model within another one's step
            return model.run_train_one_batch(*arguments, **options)
        # released before a step runs eagerly, as many may
        with self._lock:
            if num_dropped != self._num_dropped:
                self._num_dropped = num_dropped
                for record in self._all_records():
                    record.num_left = 0
            kind, tensors = self._kind_of(arguments, options, precision, microbatch)
            if kind.break_reason is None:
                known: Known = {}
                # not in a function of its own: a replay makes few calls of Python
                for number, record in enumerate(kind.records):
                    if record.fits(known, tensors):
                        kind.records.insert(0, kind.records.pop(number))
                        kind.misses = self._misses[microbatch] = 0
                        if record.num_left <= 0:
                            if not kind.is_checked and self._share_memory(model, tensors):
                                return self._note_writes(kind, model, arguments, options)
                            return self._run_postponed(kind, record, model, arguments, options)
                        record.num_left -= 1
                        record.num_replays += 1
                        # as ``run_train_one_batch``, for Python of the step that calls the model
                        outer, this_thread.model = this_thread.model, model
                        try:
                            return record.replay(tensors)
                        finally:
                            this_thread.model = outer
                if self._may_record(kind, tensors):
                    if not kind.is_checked and self._share_memory(model, tensors):
                        return self._note_writes(kind, model, arguments, options)
                    return self._record(kind, model, arguments, options)
        return model.run_train_one_batch(*arguments, **options)

    def _run_postponed(
        self, kind: Kind, record: Record, model: Any, arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> Any:
        """Run the step of a postponed record eagerly, and drop the records of its kind if its tape is another one.

        Raises:
            GraphError: the tape is another one, with the switch SINGA_LITE_CHECK_RECORDS; without it that is a warning.
        """
        run = Run(model, arguments, options, self._idle_arenas())
        # a job that goes on from the save records this step, and keeps no record of one without its update
        record.num_left = 0 if run.recorder.is_partial else replays_before_check()
        record.num_replays = 0
        if (found := run.difference(record.tape)) is not None:
            kind.break_reason = NOT_NOTICED.format(found)
            kind.records.clear()
            text = f"{type(model).__name__}: {kind.break_reason}"
            if record.num_left < inf:
                raise GraphError(text)
            warn(text)
        return run.result

    def _may_record(self, kind: Kind, tensors: list[Tensor]) -> bool:
        """Return whether to record a call that no record fits; after MAX_MISSES in vain never again."""
        microbatch = kind.microbatch
        if kind.drops >= MAX_DROPS and not kind.records:  # recording takes as long as many steps
            kind.break_reason = TOO_MANY_IN_TURN
            return False
        if kind.misses == MAX_MISSES:
            kind.break_reason = TOO_MANY_MISSES.format(MAX_MISSES)
            kind.records.clear()
            return False
        if (shapes := [tensor.shape for tensor in tensors]) != self._shapes.get(microbatch):
            self._shapes[microbatch], self._misses[microbatch] = shapes, 0
        if self._misses[microbatch] == MAX_MISSES:  # such calls are all of other kinds
            self._join_kinds(kind, TOO_MANY_MISSES.format(MAX_MISSES))
            return False
        return True

    def _share_memory(self, model: Any, tensors: list[Tensor]) -> bool:
        """Return whether an input may be a Tensor of the model, which the step may write to."""
        held = [tensor for _, layer in layers_of(model) for tensor in leaves(vars(layer))]
        arrays = [
            tensor.array for tensor in (*held, *(tensor._grad for tensor in held)) if tensor is not None
        ]
        return not {id(root_of(array)) for array in arrays}.isdisjoint(
            id(root_of(tensor.array)) for tensor in tensors
        )

    def _note_writes(
        self, kind: Kind, model: Any, arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> Any:
        """Run the step on the very inputs, not on copies, and note what it writes, with which inputs may share none."""
        kind.is_checked = True
        recorder = Recorder(leaves)
        with recorder.recording():
            result = model.run_train_one_batch(*arguments, **options)
        self._note_written(recorder)
        return result

    def _note_written(self, recorder: Recorder) -> None:
        """Note the arrays that outlive a step and that its tape writes."""
        owners = (view.memory.owner for node in recorder.nodes for view in node.outputs)
        for array in (root_of(owner) for owner in owners if owner is not None):
            self._written[id(array)] = weakref.ref(array, partial(self._written.pop, id(array)))

    def _record(self, kind: Kind, model: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Run the step and keep its record, or note why it cannot be replayed; return what the step returned."""
        self._misses[kind.microbatch] += 1
        self._recorded = kind
        try:
            run = Run(model, arguments, options, self._idle_arenas())
            if run.recorder.break_reason is None:
                kind.records.insert(0, Record(run, self._arenas, self._copies))
                self._note_written(run.recorder)
                self._drop_oldest(kind.microbatch)
        finally:
            self._recorded = None
        recorder = run.recorder
        if recorder.break_reason is None:
            kind.misses += 1
        elif run.changes_containers:  # so the next call has other ones
            self._join_kinds(kind, recorder.break_reason)
            kind.is_settled = True
        elif recorder.is_lasting or kind.retries == MAX_RETRIES:
            kind.break_reason, kind.is_settled = recorder.break_reason, recorder.is_lasting
        elif not recorder.is_partial:  # a step without an update says nothing about the next
            kind.retries += 1
            kind.last_reason = recorder.break_reason
        return run.result

    def _join_kinds(self, kind: Kind, break_reason: str | None) -> None:
        """Run all calls of the types of ``kind`` eagerly from now on, as that."""
        self._misses[kind.microbatch] = 0
        self._kinds = OrderedDict(
            (key, each) for key, each in self._kinds.items() if each.types != kind.types
        )
        self._kinds[kind.types] = kind
        kind.break_reason = break_reason
        kind.records.clear()

    def _idle_arenas(self) -> list[Any]:
        """Return the arenas, after the collectives in flight: those of a step that has failed still use them."""
        for record in self._all_records():
            for communicator in record.communicators:
                communicator.wait_all()
        return self._arenas

    def _drop_oldest(self, microbatch: int | None) -> None:
        """Drop the least recently used record if there are more than MAX_RECORDS, and count for its kind."""
        kinds = self._kinds_of(microbatch)
        if sum(len(kind.records) for kind in kinds.values()) > MAX_RECORDS:
            kind = next(kind for kind in kinds.values() if kind.records)
            record = kind.records.pop()
            if not kind.records:
                kind.drops = kind.drops + 1 if record.num_replays < REPLAYS_PAID else 0

    def _kind_of(
        self, arguments: tuple[Any, ...], options: dict[str, Any], precision: str, microbatch: int | None
    ) -> tuple[Kind, list[Tensor]]:
        """Return the kind of a call, and the Tensors of its arguments."""
        types = microbatch, *map(type, arguments), *options, *map(type, options.values())
        if types in self._kinds:
            return self._kinds[types], []
        reason, tensors = None, list[Tensor]()
        try:
            key, tensors = flatten((arguments, options))
        except OpaqueLeafError as error:
            key = reason = (
                f"arguments of type {error} do not distinguish calls; pass Tensors, plain values, or lists, "
                "tuples, dicts and dataclasses of them"
            )
        shared = repeats(tensors, self._written)
        modes = precision, this_thread.recording
        key = microbatch, key, modes, shared, *map(name_of, tensors), *map(len, map(vars, tensors))
        if key not in self._kinds:
            self._forget_kind(microbatch)
            reason = reason or _unfit(tensors, shared is not None and shared[1])
            label = _label((*arguments, *options.values()), precision, microbatch)
            self._kinds[key] = Kind(label, types, microbatch, break_reason=reason)
        self._kinds.move_to_end(key)
        return self._kinds[key], tensors if shared is None else list(dict.fromkeys(tensors))

    def _forget_kind(self, microbatch: int | None) -> None:
        """Forget the least recently used kind without records if there are MAX_KINDS."""
        kinds = self._kinds_of(microbatch)
        oldest = next((key for key, kind in kinds.items() if not kind.records), None)
        if oldest is not None and len(kinds) >= MAX_KINDS:
            del self._kinds[oldest]

    def _kinds_of(self, microbatch: int | None) -> dict[Hashable, Kind]:
        return {key: kind for key, kind in self._kinds.items() if kind.microbatch == microbatch}

    def info(self) -> list[RecordInfo]:
        """Return one entry a record, the least recently used kind first, and one a kind that runs eagerly."""
        found = []
        for kind in self._kinds.values():
            found += [record.info(kind.label) for record in reversed(kind.records)]
            reason = kind.break_reason or (None if kind.records else kind.last_reason)
            if reason is not None:
                found.append(RecordInfo(kind.label, 0, 0, 0, 0, reason))
        return found

    def postpone(self) -> None:
        """Run the next step of each record eagerly, as in a run that goes on from a checkpoint made now.

        There that step is recorded, which rounds as an eager one does; those behind it are replayed in both.
        """
        self._kinds = OrderedDict(
            (key, kind)
            for key, kind in self._kinds.items()
            # the last: of the step that runs, whose record reports the save
            if kind.records or kind.is_settled or kind is self._recorded
        )
        self._misses.clear()
        for kind in self._kinds.values():
            kind.misses = kind.retries = kind.drops = 0
            kind.is_checked = False
        for record in self._all_records():
            record.num_replays = REPLAYS_PAID  # its drop does not count: a run that goes on has none yet
            record.num_left = 0

    def _all_records(self) -> list[Record]:
        return [record for kind in self._kinds.values() for record in kind.records]

    def clear(self) -> None:
        """Forget all records."""
        self._kinds.clear()
        self._written.clear()
        self._arenas.clear()
        self._copies.clear()

    def __reduce__(self) -> tuple[type[Records], tuple[()]]:
        """Start a copy or a pickle of a model without records: they hold arrays of the original."""
        return Records, ()


def _label(values: tuple[Any, ...], precision: str, microbatch: int | None) -> str:
    """Describe a call with these arguments for people."""
    parts = [f"{x.dtype}{list(x.shape)}" if isinstance(x, Tensor) else repr(x) for x in values]
    parts += [precision] if precision != "fp32" else []
    parts += ["no_grad"] if not this_thread.recording else []
    parts += [f"microbatch {microbatch}"] if microbatch is not None else []
    return ", ".join(parts)


def _unfit(tensors: list[Tensor], has_overlap: bool) -> str | None:
    """Why a step on such inputs cannot be recorded: a record works on copies, through which no gradient flows."""
    if any(tensor.is_recorded for tensor in tensors):
        return "an input was made by a recorded operator; pass x.clone()"
    if has_overlap:
        return "two inputs share memory, or one does with a Tensor that the step writes; pass x.clone()"
    for tensor in tensors:
        for name in vars(tensor).keys() - OF_ALL_TENSORS - {"name"}:
            return f"an input has an attribute {name} of its own, which may be another one at the next call"
    return "an input stores its gradient" if any(tensor.stores_grad for tensor in tensors) else None
