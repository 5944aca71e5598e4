# SPDX-License-Identifier: Apache-2.0
"""One eager run of a step, which is recorded: its tape, what it returned, and why it cannot be replayed.

What lives here: running the step on copies of its inputs, and finding what a replay could not do. What does not:
replaying the tape (record.py), the attributes that the step sets (attributes.py), what else it reads in Python
(variables.py).
"""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np

from ..autograd.engine import RecordedStep
from ..config import this_thread
from ..device import get_default_device
from ..graph.compare import Tape, difference
from ..graph.nodes import Host
from ..graph.recorder import Recorder
from ..layer.base import layers_of
from ..tensor import Tensor
from ..tensor.pytree import OpaqueLeafError, flatten, leaves, rebuild
from .arguments import Arguments
from .attributes import Attributes, pinned
from .variables import Variables

KEPT = "a tensor of it is kept neither in its result nor in an attribute of the model"
SHARED = "an argument is a list, dict or dataclass that an attribute of the model holds; pass a copy"
MADE_BEFORE = (
    "it reads a Tensor of an attribute or variable that a recorded operator made before the step; use clone()"
)
IDENTITY = "an input is a Tensor that the model or a variable holds, and its code compares identities; pass x.clone()"


class Run:
    """One recorded run of a step; a Record is made of one that nothing breaks.

    Args:
        model: whose step is run, once and eagerly, on copies of the Tensors in ``arguments`` and ``options``.
        arenas: memory that the records of a model share, idle.

    Attributes:
        device: on which the step ran.
        recorder: with the nodes, and with the reason if no replay can do what the step did.
        attributes: of the model, as the step has found and left them.
        variables: what else the step has read in Python.
        held: ids of the Tensors that the step may compare an input with.
        inputs: Tensors with the arrays that a replay copies its inputs to.
        result: what the step returned, for the caller of this call.
        results: makes what a replay returns; only where there is no break_reason.
        tape: for comparing; None if the step was not recorded at all.
        changes_containers: whether the step has changed a list, dict or dataclass among its arguments.
    """

    def __init__(
        self,
        model: Any,  # model.Model, of a module above
        arguments: tuple[Any, ...],
        options: dict[str, Any],
        arenas: list[Any],
    ) -> None:
        self.recorder = Recorder(leaves)
        self.tape: Tape | None = None
        given = Arguments((arguments, options))
        inputs = given.tensors
        self.recorder.take_inputs([tensor.array for tensor in inputs])
        self.device = inputs[0].device if inputs else get_default_device()
        self.attributes = Attributes(model)
        before = self.attributes.before.values()
        self.variables = Variables([layer for _, layer in layers_of(model)], before, (arguments, options))
        # no method of this object, whose memory would be free at the next garbage collection only
        self.recorder.around_host = partial(_around_host, self.recorder, self.attributes, self.variables)
        self.held = {*self.variables.tensors, *(id(each) for found in before for each in found.tensors)}
        self.changes_containers = False
        if self.variables.compares_identities and not self.held.isdisjoint(map(id, given.given)):
            self.recorder.break_graph(IDENTITY, is_lasting=False)
        elif any(given.is_copied(each) for found in before for each in found.containers):
            self.recorder.break_graph(SHARED, is_lasting=False)
        if self.recorder.break_reason is not None:
            self.result = model.run_train_one_batch(*arguments, **options)
            return
        self.result = self._run(model, given, arenas)
        self.recorder.check_written_elsewhere(array for found in before for array in found.arrays)
        self.recorder.check_written_elsewhere(tensor.array for tensor in self.variables.tensors.values())
        held = (*self.variables.tensors.values(), *(each for found in before for each in found.tensors))
        if any(each.is_recorded and self.recorder.view(each.array) is not None for each in held):
            self.recorder.break_graph(MADE_BEFORE, is_lasting=False)
        self.changes_containers = given.changes_containers
        self._check_result(model, (arguments, options))
        new = [weakref.ref(tensor) for tensor in (*inputs, *leaves(self.result))]
        new += self.attributes.finish(self.recorder, inputs)
        del given
        self.tape = self._make_tape([*inputs, *self.attributes.inputs])
        # from here on nothing refers to the Tensors that the step had
        self.inputs = [Tensor.wrap(tensor.array, tensor.device) for tensor in inputs]
        del inputs
        self.inputs += self.attributes.inputs
        if self.recorder.break_reason is None:
            self.results = Results(self.result, self.recorder)
            self.result = self.results.new()
            known = [tensor.array for tensor in self.inputs]
            if self.recorder.has_escaped(known, new):
                self.recorder.break_graph(KEPT)
                self.results.share_memory(self.result)
                self.attributes.share_memory()

    def _run(self, model: Any, given: Arguments, arenas: list[Any]) -> Any:
        """Return the step's result, and have its tape; what it does to its arguments is done to the caller's, too."""
        recorder, training = self.recorder, this_thread.training
        try:
            with self.device.backend.saving_memory(arenas), recorder.recording():
                result = model.run_train_one_batch(*given.value[0], **given.value[1])
        except BaseException:
            recorder.break_graph("it raises an error")
            given.write_back(recorder)
            given.write_values_back(recorder)
            raise
        given.write_back(recorder)
        for _, layer in layers_of(model):
            given.give_attributes_back(layer, recorder)
        if this_thread.training != training:
            recorder.break_graph("it changes autograd.training")
        recorder.finish()
        self.variables.finish(recorder)
        given.write_values_back(recorder)
        return result

    def _check_result(self, model: Any, arguments: Any) -> None:
        """Break the graph for a result that a replay could not make: an object, a parameter, a foreign number."""
        try:
            flatten(self.result)
        except OpaqueLeafError as error:
            self.recorder.break_graph(f"it returns a {error}, which a replay cannot make; return Tensors")
        known = {
            *_numbers(arguments),
            *(n for tensor in leaves(arguments) for n in (*tensor.shape, tensor.size())),
        }
        states = {id(tensor) for tensor in model.get_states().values()}
        for tensor in leaves(self.result):
            if id(tensor) in states or (tensor.stores_grad and id(tensor) in self.held):
                what = "a parameter" if tensor.stores_grad else "a parameter or buffer"
                self.recorder.break_graph(f"it returns {what}, which a replay would copy; return its clone()")
        for number in _numbers(self.result):
            if number not in known:
                self.recorder.break_graph(
                    f"it returns the number {number:g}, which a replay would not compute; return a Tensor"
                )

    def _make_tape(self, inputs: list[Tensor]) -> Tape:
        """Return the tape of the step that has just run, with its inputs and outputs."""
        outputs, structure, recorder = leaves(self.result), None, self.recorder
        if recorder.break_reason is None:
            changes, made = self.attributes.changes()
            hosts = [node for node in recorder.nodes if isinstance(node, Host)]
            outputs = [*outputs, *made, *leaves([node.arguments for node in hosts])]
            structure = flatten(self.result)[0], changes
        given, gave = ([recorder.view(tensor.array) for tensor in each] for each in (inputs, outputs))
        return Tape(recorder.nodes, given, gave, structure, recorder.casts_again)

    def difference(self, old: Tape) -> str | None:
        """Return how this run differs from the one with the tape ``old``; None if it does not, or left a part out."""
        if self.tape is None or self.recorder.is_partial:
            return None
        return difference(old, self.tape, self.device.backend.to_numpy)


class Results:
    """What replays of a step return, each time as new Tensors.

    Args:
        result: what the step returned; replays leave its arrays where they are.
    """

    def __init__(self, result: Any, recorder: Recorder) -> None:
        self._kept = [pinned(tensor, recorder) for tensor in leaves(result)]
        # numbers of those that an operator has made
        self._made = [number for number, tensor in enumerate(leaves(result)) if tensor.creator is not None]
        self._creator = RecordedStep()
        self._structure = rebuild(result, iter(self._kept))

    def new(self) -> Any:
        """Return copies of what the last replay has computed."""
        tensors = list(map(Tensor.clone, self._kept))
        for number in self._made:
            tensors[number].creator = self._creator
        return rebuild(self._structure, iter(tensors))

    def share_memory(self, result: Any) -> None:
        """Give the Tensors in ``result``, which ``new`` returned, the memory of those of the step."""
        for clone, kept in zip(leaves(result), self._kept, strict=True):
            clone.array = kept.array


def _around_host(
    recorder: Recorder, attributes: Attributes, variables: Variables
) -> AbstractContextManager[None]:
    """Return the context in which Python runs that replays run too; it must find what it would find in a replay."""
    variables.note_changed()
    return attributes.watched_while_recorded(recorder)


def _numbers(value: Any) -> list[float]:
    found = leaves(value, (int, float, np.number))
    return [float(number) for number in found if not isinstance(number, bool)]
