# SPDX-License-Identifier: Apache-2.0
"""One recorded step: compiled from a run of it, and replayed on new inputs.

What lives here: guards, compiling and replaying. What does not: which record belongs to a call (records.py), running
and recording the step (run.py), the attributes that it sets (attributes.py), what else it reads in Python
(variables.py).
"""

from __future__ import annotations

import gc
import time
import weakref
from collections import Counter
from collections.abc import Hashable, MutableMapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from typing import Any

from ..config import env, state
from ..errors import OptionError
from ..graph.arena import share_memory
from ..graph.changes import ReplayedChanges
from ..graph.clock import without_empty_laps
from ..graph.interrupts import deferred_interrupts
from ..graph.nodes import ClockCall, Collective, Fork, Host, Kernel, Node, run_steps
from ..graph.recorder import Recorder
from ..graph.rewrite import pack_in_place
from ..graph.rounded import RoundedCopies, keep_copies, use_copies
from ..profile import TimeProfile
from ..tensor import Tensor
from .run import Run

NOTHING = nullcontext()
LARGE_BYTES = 16 << 20  # of a model's first memory, before which the collector runs: some 50 ms
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
        run: of the step, with no break_reason.
        arenas: memory that the records of a model share, idle; another piece is appended where none is large enough.
        copies: of parameters, which they share too (graph/rounded.py); more are added.

    Attributes:
        device: on which the step ran.
        communicators: of its collectives.
        tape: for comparing it with that of a later run.
        num_left: replays until such a step runs eagerly, see ``Records.postpone``.
        num_replays: how often it was replayed.
    """

    def __init__(self, run: Run, arenas: list[Any], copies: MutableMapping[int, Any]) -> None:
        assert run.tape is not None and run.recorder.break_reason is None
        self.num_left = replays_before_check()
        self.num_replays = 0
        self.device, self.tape, self._results = run.device, run.tape, run.results
        self._attributes, self._variables, self._held = run.attributes, run.variables, run.held
        self._compares_identities = run.variables.compares_identities
        self._guards = run.recorder.guards
        # Ctrl-C waits for the end of a replay then, or some parameters would be a step ahead of others
        self._is_whole = run.recorder.updates_in_parts
        self._changes = ReplayedChanges(view for node in run.recorder.nodes for view in node.outputs)
        weakref.finalize(self, self._changes.end).atexit = False
        self._compile(run.recorder, run.inputs, arenas, copies)

    def _compile(
        self, recorder: Recorder, inputs: list[Tensor], arenas: list[Any], copies: MutableMapping[int, Any]
    ) -> None:
        """Turn the tape into what a replay runs."""
        backend = self.device.backend
        views = [recorder.view(tensor.array) for tensor in inputs]
        nodes = without_empty_laps(backend.lower(pack_in_place(recorder.nodes)))
        known = [view.memory for view in views if view]
        nodes, num_casts, params = keep_copies(nodes, copies)

        def make(num_bytes: int) -> Any:
            if not arenas and num_bytes >= LARGE_BYTES:
                gc.collect()  # the collector counts objects, not the bytes of models that nobody uses any more
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
        watch: AbstractContextManager[object] = NOTHING
        read: list[str] = []
        if self._attributes.are_set:
            # values in ``known`` may be of a guard that read an attribute which this step sets first
            known, watch = {}, self._attributes.watched_in_replay(read.append)
        with watch:
            for key, (function, value) in self._guards.items():
                if key not in known:
                    known[key] = function()
                if known[key] != value:
                    return False
        return not read

    def replay(self, given: list[Tensor]) -> Any:
        """Run the tape on the Tensors of a call; return what the step returned, as new tensors."""
        for communicator in self.communicators:
            communicator.wait_all()
        execute = self.device.backend.execute
        for array, tensor in zip(self._inputs, (*given, *self._attributes.now()), strict=True):
            if array is not None:
                execute("copy", (tensor.array,), array, {})
        with deferred_interrupts() if self._is_whole and not self.communicators else NOTHING:
            if self._attributes.are_set:
                with self._attributes.watched_in_replay():
                    self._run()
            else:
                self._run()
        self._attributes.repeat()
        return self._results.new()

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
        finally:
            self._changes.note_replay()

    def _replay_timed(self, profile: TimeProfile) -> None:
        """Run the nodes one by one and give the device's profile how long each took but those of the clock."""
        times = [time.perf_counter()]

        def note_time() -> None:
            self.device.Sync()
            times.append(time.perf_counter())

        run_steps(self._nodes, note_time)
        measured = [
            (node, end - start)
            for node, (start, end) in zip(self._nodes, pairwise(times), strict=True)
            if not isinstance(node, ClockCall)
        ]
        names = [(node.phase, node.name) for node, _ in measured]
        profile.add(self._number, names, [seconds for _, seconds in measured])

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
            tuple(_described(node) for node in self._nodes if not isinstance(node, ClockCall)),
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


def _described(node: Node) -> str:
    """Describe a node for people."""
    if not isinstance(node, Kernel):
        return node.name
    outputs = ", ".join(f"{array.dtype}{list(array.shape)}" for array in node.outputs)
    shown = ("relu", "memory_format", "memory_formats")
    extras = "".join(f" {key}={node.attributes[key]}" for key in shown if key in node.attributes)
    return f"{node.name} -> {outputs}{extras}"
