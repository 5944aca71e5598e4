# SPDX-License-Identifier: Apache-2.0
"""One recorded step: made while the step runs, compared with a later call, and replayed on new inputs.

What lives here: guards, inputs and results of a record. What does not: which record belongs to a call (records.py),
how a step is recorded (graph/), the attributes that it sets (attributes.py), what else it reads in Python
(variables.py).
"""

from __future__ import annotations

import time
import weakref
from collections import Counter
from collections.abc import Hashable, MutableMapping
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from typing import Any

import numpy as np

from ..autograd.engine import RecordedStep
from ..config import env, state, this_thread
from ..device import get_default_device
from ..errors import OptionError
from ..graph.arena import share_memory
from ..graph.clock import without_empty_laps
from ..graph.compare import Tape, difference
from ..graph.interrupts import deferred_interrupts
from ..graph.memory import root_of
from ..graph.nodes import ClockCall, Collective, Fork, Host, Kernel, Node, run_steps
from ..graph.recorder import Recorder
from ..graph.rewrite import pack_in_place
from ..graph.rounded import RoundedCopies, keep_copies, use_copies
from ..layer.base import layers_of
from ..profile import TimeProfile
from ..tensor import Tensor
from ..tensor.pytree import OpaqueLeafError, flatten, leaves, rebuild
from .arguments import Arguments
from .attributes import Attributes, pinned
from .variables import Variables

KEPT = "a tensor of it is kept neither in its result nor in an attribute of the model"
IDENTITY = "an input is a Tensor that the model or a variable holds, and its code compares identities; pass x.clone()"
Known = dict[Hashable, Hashable]  # values of guards now, by their keys


@dataclass(frozen=True)
class RecordInfo:
    """Facts about one record, to read.

    Attributes:
        inputs: shapes and dtypes of the tensors, and the options, that it belongs to.
        num_kernels: kernels of a replay.
        num_collectives: collectives of a replay.
        num_host_nodes: Python functions that a replay calls: counting a step, a custom optimizer.
        num_bytes: memory that inputs, activations and their gradients share.
        break_reason: why such steps run eagerly instead; None if they are replayed.
        nodes: what a replay does, in order, with what its kernels make: dtype and shape, and the memory format where
            that is not row-major (native/kernels/layout.h).
    """

    inputs: str
    num_kernels: int
    num_collectives: int
    num_host_nodes: int
    num_bytes: int
    break_reason: str | None
    nodes: tuple[str, ...] = ()


class Record:
    """One recorded step.

    Inputs and results of a replay belong to the caller: the record works on copies of its own.

    Args:
        model: whose step is run, once and eagerly, on copies of the Tensors in ``arguments`` and ``options``.
        arenas: memory that the records of a model share, idle; another piece is appended where none is large enough.
        copies: of parameters, which they share too (graph/rounded.py); more are added.
        is_replayed: False for a run that is only compared with a record.

    Attributes:
        device: on which the step ran.
        communicators: of its collectives.
        result: what the step returned, for the caller of this call.
        written: arrays by their ids that outlive the step and that replays write; only where there is no break_reason.
        num_left: replays until such a step runs eagerly, see ``Records.postpone``.
        changes_containers: whether the step has changed a list, dict or dataclass among its arguments.
        break_reason, is_lasting, is_partial: the Recorder's.
    """

    break_reason: str | None

    def __init__(
        self,
        model: Any,  # model.Model, of a module above
        arguments: tuple[Any, ...],
        options: dict[str, Any],
        arenas: list[Any],
        copies: MutableMapping[int, Any],
        is_replayed: bool = True,
    ) -> None:
        self._tape: Tape | None = None
        self.num_left = replays_before_check()
        self._creator = RecordedStep()
        recorder = Recorder(leaves)
        given = Arguments((arguments, options))
        inputs = given.tensors
        recorder.take_inputs([tensor.array for tensor in inputs])
        self.device = inputs[0].device if inputs else get_default_device()
        self._attributes = Attributes(model)
        self._variables = Variables(
            [layer for _, layer in layers_of(model)], self._attributes.before.values()
        )
        # Tensors that the step may compare an input with; what holds them is compared at every replay
        self._compares_identities = self._variables.compares_identities
        held = [each for found in self._attributes.before.values() for each in found.tensors]
        self._held = {*map(id, held), *self._variables.tensors}
        if self._compares_identities and not self._held.isdisjoint(map(id, given.given)):
            self.break_reason, self.is_lasting = IDENTITY, False
            self.is_partial = self.changes_containers = False
            self.result = model.run_train_one_batch(*arguments, **options)
            return
        self.result = self._run_eagerly(model, given, arenas, recorder)
        self.changes_containers = given.changes_containers
        _check_result(self.result, (arguments, options), recorder)
        new = [weakref.ref(tensor) for tensor in (*inputs, *leaves(self.result))]
        new += self._attributes.finish(recorder, inputs)
        del given
        self._tape = self._tape_of(recorder, [*inputs, *self._attributes.inputs])
        if recorder.break_reason is None:
            self._results = [pinned(tensor, recorder) for tensor in leaves(self.result)]
            # numbers of those that an operator has made
            self._made = [
                number for number, each in enumerate(leaves(self.result)) if each.creator is not None
            ]
            self._result = rebuild(self.result, iter(self._results))
            self.result = self._new_result()
            inputs = [Tensor.wrap(tensor.array, tensor.device) for tensor in inputs]
            known = [tensor.array for tensor in (*inputs, *self._attributes.inputs)]
            if recorder.has_escaped(known) or any(tensor() is not None for tensor in new):
                recorder.break_graph(KEPT)
                # somebody may hold what they were copied from
                for clone, kept in zip(leaves(self.result), self._results, strict=True):
                    clone.array = kept.array
                self._attributes.share_memory()
        self.break_reason, self.is_lasting = recorder.break_reason, recorder.is_lasting
        self.is_partial = recorder.is_partial
        self._guards = recorder.guards
        # Ctrl-C waits for the end of a replay then, or some parameters would be a step ahead of others
        self._is_whole = recorder.updates_in_parts
        if self.break_reason is None and is_replayed:
            self._compile(recorder, [*inputs, *self._attributes.inputs], arenas, copies)

    def _run_eagerly(self, model: Any, given: Arguments, arenas: list[Any], recorder: Recorder) -> Any:
        """Return the step's result, and have its tape; what it does to its arguments is done to the caller's, too."""
        training = this_thread.training
        try:
            with self.device.backend.saving_memory(arenas), recorder.recording():
                result = model.run_train_one_batch(*given.value[0], **given.value[1])
        except BaseException:
            recorder.break_graph("it raises an error")
            given.give_back(recorder)
            given.give_values_back(recorder)
            raise
        given.give_back(recorder)
        for _, layer in layers_of(model):
            given.give_attributes_back(layer, recorder)
        if this_thread.training != training:
            recorder.break_graph("it changes autograd.training")
        recorder.finish()
        self._variables.finish(recorder)
        given.give_values_back(recorder)
        return result

    def _tape_of(self, recorder: Recorder, inputs: list[Tensor]) -> Tape:
        """Return the tape of the step that has just run, with its inputs and outputs."""
        outputs, structure = leaves(self.result), None
        if recorder.break_reason is None:
            changes, made = self._attributes.changes()
            hosts = [node for node in recorder.nodes if isinstance(node, Host)]
            outputs = [*outputs, *made, *leaves([node.arguments for node in hosts])]
            structure = flatten(self.result)[0], changes
        given, gave = ([recorder.view(tensor.array) for tensor in each] for each in (inputs, outputs))
        return Tape(recorder.nodes, given, gave, structure, recorder.casts_again)

    def _compile(
        self, recorder: Recorder, inputs: list[Tensor], arenas: list[Any], copies: MutableMapping[int, Any]
    ) -> None:
        """Turn the tape into what a replay runs."""
        backend = self.device.backend
        views = [recorder.view(tensor.array) for tensor in inputs]
        self.written = written_by(recorder)
        nodes = without_empty_laps(backend.lower(pack_in_place(recorder.nodes)))
        known = [view.memory for view in views if view]
        nodes, num_casts, params = keep_copies(nodes, known, copies)

        def make(num_bytes: int) -> Any:
            backend.release_cached_memory()  # what the recorded step used, or both would be held at once
            found = next((arena for arena in arenas if arena.nbytes >= num_bytes), None)
            if found is None:
                found = backend.empty((num_bytes,), "uint8")
                arenas.append(found)
            return found

        array_of, self._num_bytes = share_memory(nodes, known, make)
        self._number = next(state.numbers)  # in the tables of profiles
        self._nodes = [node.mapped(array_of) for node in nodes]
        self._inputs = [None if view is None else array_of(view) for view in views]
        self.communicators = list(
            dict.fromkeys(node.communicator for node in nodes if isinstance(node, Collective))
        )
        self._replay_nodes = backend.compile(self._nodes[num_casts:])
        self._copies: RoundedCopies | None = None
        if params:
            casts = backend.compile(self._nodes[:num_casts])
            assert backend.set_writeable is not None  # as it rounds updates
            self._copies = RoundedCopies(casts, params, backend.set_writeable)
            weakref.finalize(self, self._copies.forget).atexit = False
        self._nodes = [node for node in self._nodes if not isinstance(node, ClockCall)]

    def fits(self, known: Known, given: list[Tensor]) -> bool:
        """Return whether a replay would do what the step does now.

        Args:
            known: collects what was compared.
            given: the Tensors of a call.
        """
        if self._compares_identities and not self._held.isdisjoint(map(id, given)):
            return False
        if not self._attributes.fit() or self._variables.changed() is not None:
            return False
        for key, (function, value) in self._guards.items():
            if key not in known:
                known[key] = function()
            if known[key] != value:
                return False
        return True

    def difference(self, old: Record) -> str | None:
        """Return how this run of the step differs from that of the record ``old``; None if it does not."""
        if self._tape is None or old._tape is None or self.is_partial:
            return None
        return difference(old._tape, self._tape, self.device.backend.to_numpy)

    def replay(self, given: list[Tensor]) -> Any:
        """Run the tape on the Tensors of a call; return what the step returned, as new tensors."""
        for communicator in self.communicators:
            communicator.wait_all()
        execute = self.device.backend.execute
        for array, tensor in zip(self._inputs, (*given, *self._attributes.now()), strict=True):
            if array is not None:
                execute("copy", (tensor.array,), array, {})
        with deferred_interrupts() if self._is_whole and not self.communicators else nullcontext():
            self._run()
        self._attributes.repeat()
        return self._new_result()

    def _run(self) -> None:
        profile = self.device.profile
        copies = None if profile.verbosity else self._copies
        try:
            is_ready = state.rounded is copies and (copies is None or copies.are_fresh)
            if not is_ready:
                use_copies(copies)
            if profile.verbosity:
                self._replay_timed(profile)
            else:
                run_steps(self._replay_nodes)
        except BaseException:
            use_copies(None)
            self.device.backend.end_packing()
            raise

    def _new_result(self) -> Any:
        tensors = list(map(Tensor.clone, self._results))
        for number in self._made:
            tensors[number].creator = self._creator
        return rebuild(self._result, iter(tensors))

    def _replay_timed(self, profile: TimeProfile) -> None:
        """Run the nodes one by one and give the device's profile how long each took."""
        times = [time.perf_counter()]

        def note_time() -> None:
            self.device.Sync()
            times.append(time.perf_counter())

        run_steps(self._nodes, note_time)
        names = [(node.phase, node.name) for node in self._nodes]
        profile.add(self._number, names, [end - start for start, end in pairwise(times)])

    def info(self, label: str) -> RecordInfo:
        """Return facts to read; ``label`` is the kind's."""
        counts = Counter(map(type, self._nodes))
        return RecordInfo(
            label,
            counts[Kernel],
            counts[Collective],
            counts[Host] + counts[Fork],
            self._num_bytes,
            None,
            tuple(map(_described, self._nodes)),
        )


def replays_before_check() -> float:
    """Return after how many replays a step is compared with its record, by the switch SINGA_LITE_CHECK_RECORDS."""
    text = env("SINGA_LITE_CHECK_RECORDS")
    if text is None:
        return inf
    try:
        num_replays = int(text)
    except ValueError:
        num_replays = -1
    if num_replays < 0:
        raise OptionError(f"SINGA_LITE_CHECK_RECORDS={text}: expected an int >= 0")
    return num_replays


def written_by(recorder: Recorder) -> dict[int, Any]:
    """Return the arrays that outlive a step and that its tape writes, by their ids."""
    owners = (view.memory.owner for node in recorder.nodes for view in node.outputs)
    return {id(array): array for array in (root_of(owner) for owner in owners if owner is not None)}


def _described(node: Node) -> str:
    """Describe a node for people."""
    if not isinstance(node, Kernel):
        return node.name
    outputs = ", ".join(f"{array.dtype}{list(array.shape)}" for array in node.outputs)
    shown = ("relu", "memory_format", "memory_formats")
    extras = "".join(f" {key}={node.attributes[key]}" for key in shown if key in node.attributes)
    return f"{node.name} -> {outputs}{extras}"


def _check_result(result: Any, arguments: Any, recorder: Recorder) -> None:
    """Break the graph for a result that a replay could not make: an object of another type, a number from elsewhere."""
    try:
        flatten(result)
    except OpaqueLeafError as error:
        recorder.break_graph(f"it returns a {error}, which a replay cannot make; return Tensors")
    known = {
        *_numbers(arguments),
        *(n for tensor in leaves(arguments) for n in (*tensor.shape, tensor.size())),
    }
    for number in _numbers(result):
        if number not in known:
            recorder.break_graph(
                f"it returns the number {number:g}, which a replay would not compute; return a Tensor"
            )


def _numbers(value: Any) -> list[float]:
    found = leaves(value, (int, float, np.number))
    return [float(number) for number in found if not isinstance(number, bool)]
