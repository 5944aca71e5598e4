# SPDX-License-Identifier: Apache-2.0
"""The attributes of a model as a recorded step finds and leaves them.

What lives here: which attributes a step changes, and doing the same in a replay. What does not: the tape (record.py),
the walk over the layers (layer/base.py).

Note [attributes]: a step may read Tensors from attributes of its layers and set attributes (``self.total = self.total
+ loss``). A replay runs only where an attribute that the step changes holds what it held before the recorded step, up
to the values of its Tensors; it reads these, and sets the attribute as the step did, to new Tensors. Lists, dicts and
dataclasses that were there before the step and are still are changed in place, as others may hold them. Through one
that an operator has made no gradient flows, as through a result of the step: ``backward`` would be a GraphError. So a
record fits both such a Tensor and a leaf, unless ``backward`` ended at what was there when the step was recorded. All
other attributes must be what they were then, and two that held one Tensor or list must hold one again, as a step that
sets one to the other's Tensor may then have changed nothing.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Container, Hashable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import is_dataclass
from itertools import chain, compress
from operator import is_
from types import MemberDescriptorType
from typing import Any, NamedTuple

from ..autograd.engine import RecordedStep
from ..errors import GraphError
from ..graph.memory import root_of
from ..graph.recorder import Recorder
from ..layer.base import Layer, is_parameter, layers_of
from ..tensor import Tensor
from ..tensor.pytree import flatten, is_container, placed, rebuild
from .arguments import aliases
from .watched import watched

READ = (
    "it sets {}, which an optimizer or a schedule reads, though a replay sets it at its end; give them a Tensor or a "
    "number of their own"
)


class Absent:
    """Stands, as a class, for what a name holds that is not there."""


class Attribute:
    """An attribute of a layer at one moment.

    Args:
        value: what it held, or Absent.

    Attributes:
        layer, name, label: where it is, and its path for people.
        structure, tensors: what pytree.flatten gives of the value.
        arrays, flags: the raw arrays of ``tensors`` at that moment, and whether they wanted and stored gradients.
        objects: what is neither a Tensor nor a plain value in it.
        containers: the lists, dicts and dataclasses that it is made of.
    """

    def __init__(self, layer: object, name: str, label: str, value: Any) -> None:
        self.layer, self.name, self.label, self.value = layer, name, label, value
        self.objects: list[object] = []
        self.containers: list[object] = []
        self.structure, self.tensors = flatten(value, self._describe, True, self.containers)
        self.arrays = [tensor.array for tensor in self.tensors]
        self.flags = list(map(_flags_of, self.tensors))

    def _describe(self, value: object) -> Hashable:
        self.objects.append(value)
        return id(value)

    def now(self) -> Attribute:
        """Return the same attribute as it is now."""
        return Attribute(self.layer, self.name, self.label, vars(self.layer).get(self.name, Absent))

    def is_like(self, other: Attribute) -> bool:
        """Return whether both hold the same Tensors, with the same arrays, in equal structures."""
        return self.structure == other.structure and all(
            map(is_, self.tensors + self.arrays, other.tensors + other.arrays)
        )


class Change(NamedTuple):
    """The change of an attribute by a step."""

    before: Attribute  # as it was before the recorded step, whose structure a replay must find
    value: Any  # what the step set it to, with any Tensors, or Absent
    # of each Tensor in it: its number among those held before a step and, after them, those made
    sources: list[int]
    places: list[int]  # likewise of each list, dict and dataclass in it

    def repeat(self, tensors: list[Tensor], containers: list[Any]) -> None:
        """Do the same with the ``tensors`` and ``containers`` of a replay, held and made; None is one to be made."""
        attributes = vars(self.before.layer)
        if self.value is Absent:
            attributes.pop(self.before.name, None)
            return
        value = rebuild(self.value, iter([tensors[number] for number in self.sources]))
        attributes[self.before.name] = placed(value, iter(self.places), containers) if self.places else value


class Attributes:
    """The attributes of a model and its layers, from before a recorded step on.

    Attributes:
        before: all of them before the step; empty once it is finished.
        inputs: Tensors of attributes that change, which the tape reads.
        are_set: whether a replay sets any.
    """

    def __init__(self, model: Layer) -> None:
        self._model = model
        self.before = _attributes_of(model)
        self._layers_before = [layer for _, layer in layers_of(model)]
        self.inputs: list[Tensor] = []
        self.are_set = False
        # by layer and name: what the step had set when host code ran
        self._set_before_host: set[Hashable] = set()
        self._changes: dict[Hashable, Change] = {}
        self._constants: list[Attribute] = []  # unchanged ones that may change without being set
        self._held: list[Tensor] = []  # before a step, by the attributes that change and by the constants
        self._containers: list[object] = []  # likewise
        self._shared: list[int] = []  # which of these are one object, see ``aliases``
        self._num_containers = 0  # with those that the step has made
        self._made: list[Tensor] = []  # by the step, for attributes
        self._computed: list[bool] = []  # of each of these, whether an operator has made it
        self._creator = RecordedStep()
        self._set: list[Tensor] = []  # copies of these that the attributes have
        self._read: list[int] = []  # of the inputs: numbers among those held
        # numbers of those at which a gradient ended, and whether they were leaves: with others it would go on or not
        self._ends: list[tuple[int, bool]] = []

    def finish(self, recorder: Recorder, inputs: list[Tensor]) -> list[weakref.ref[Tensor]]:
        """Find what the step has changed and set it as replays will; return the Tensors that the step had set.

        Args:
            inputs: of the step, whose views it may have set.
        """
        if (reason := _why_unseen(self._model)) is not None:
            recorder.break_graph(reason)
        before, self.before = self.before, {}
        after = {key: old.now() for key, old in before.items()} | _attributes_of(self._model)
        known = {id(tensor) for tensor in _tensors_of(before.values())}
        set_by_step = [weakref.ref(each) for each in _tensors_of(after.values()) if id(each) not in known]
        states = self._states_of_model()
        for found in before.values():
            if list(map(_flags_of, found.tensors)) != found.flags:
                what = f"it set requires_grad or stores_grad of a tensor in {found.label}"
                recorder.break_graph(what, is_lasting=False)
        changed: dict[Hashable, tuple[Attribute, Attribute]] = {}
        for key, new in after.items():
            old = before.get(key) or Attribute(new.layer, new.name, new.label, Absent)
            if old.is_like(new) and all(map(is_, old.containers, new.containers)):
                if _may_change_unset(new.value) or not all(id(tensor) in states for tensor in new.tensors):
                    self._constants.append(new)
            elif (reason := _why_not_repeated(old, new, states)) is not None:
                recorder.break_graph(reason, is_lasting=False)
            else:
                changed[key] = old, new
        olds = [old for old, _ in changed.values()]
        self._held = _tensors_of([*olds, *self._constants])
        self._containers = _containers_of([*olds, *self._constants])
        self._shared = aliases(self._containers)
        self._find_inputs(olds, [*self._held, *states.values()], recorder)
        if recorder.break_reason is None or not recorder.is_lasting:
            has_views = self._pin(changed, recorder, inputs)
            self.repeat()
            if has_views:
                self.share_memory()
        self.are_set = bool(self._changes)
        self._states = [
            (t, t.array, t.stores_grad, t.requires_grad) for t in self._states_of_model().values()
        ]
        self._others = self._find_others()
        self._layers: list[Layer] = []  # as of the last look at the others; these follow it
        self._names: list[object] = [None]
        self._is_other, self._objects = list[bool](), list[object]()
        return set_by_step

    def _states_of_model(self) -> dict[int, Tensor]:
        """Parameters and buffers by their ids."""
        return {id(tensor): tensor for tensor in self._model.get_states().values()}

    def _find_inputs(self, olds: list[Attribute], known: list[Tensor], recorder: Recorder) -> None:
        """Find the Tensors of ``olds`` that the tape reads; each must have memory that no other ``known`` one has."""
        uses = Counter(id(root_of(tensor.array)) for tensor in known)
        behind_gradients = recorder.behind_gradients() if olds else set()
        labelled = [(old.label, tensor) for old in olds for tensor in old.tensors]
        for number, (label, tensor) in enumerate(labelled):
            view = recorder.view(tensor.array)
            if view is None:
                continue
            if view.memory in behind_gradients:
                self._ends.append((number, tensor.creator is None))
            if tensor.is_recorded:
                reason = f"{label} was made by a recorded operator of an earlier step"
            elif recorder.writes([tensor.array]):
                reason = f"it changes {label} in place and sets it"
            elif not view.is_whole or uses[id(root_of(tensor.array))] > 1:
                reason = f"{label} shares its memory with another tensor"
            else:
                recorder.take_inputs([tensor.array])
                self.inputs.append(tensor)
                self._read.append(number)
                continue
            recorder.break_graph(f"{reason}; use clone()", is_lasting=False)

    def _pin(
        self,
        changed: dict[Hashable, tuple[Attribute, Attribute]],
        recorder: Recorder,
        inputs: list[Tensor],
    ) -> bool:
        """Pin the Tensors that the step made for attributes, and note as Changes how replays set these.

        Returns whether it has made views of other Tensors, which no replay does.
        """
        numbers = {id(tensor): number for number, tensor in enumerate(self._held)}  # and by made arrays
        places = {id(found): number for number, found in enumerate(self._containers)}
        self._num_containers = len(self._containers)
        tensors = list(self._held)
        for key, (old, new) in changed.items():
            sources = []
            for tensor in new.tensors:
                source = numbers.get(id(tensor))
                if source is None:
                    source = numbers.setdefault(id(tensor.array), len(tensors))
                    if source == len(tensors):
                        tensors.append(pinned(tensor, recorder))
                        self._computed.append(tensor.creator is not None)
                sources.append(source)
            value = rebuild(new.value, iter([tensors[source] for source in sources]))
            for found in new.containers:
                if id(found) not in places:
                    places[id(found)] = self._num_containers
                    self._num_containers += 1
            self._changes[key] = Change(old, value, sources, [places[id(found)] for found in new.containers])
        self._made = tensors[len(self._held) :]
        self._aliases = aliases(self._held)
        known = {id(each): each for each in (*self._held, *inputs, *self._states_of_model().values())}
        roots = Counter(id(root_of(tensor.array)) for tensor in (*known.values(), *self._made))
        views = [
            new.label
            for key, (_, new) in changed.items()
            for source, tensor in zip(self._changes[key].sources, new.tensors, strict=True)
            if source >= len(self._held) and roots[id(root_of(tensor.array))] > 1
        ]
        if views:
            recorder.break_graph(f"it sets {views[0]} to a view of another tensor; use clone()")
        return bool(views)

    def fit(self) -> bool:
        """Return whether all attributes are as the recorded step found them."""
        for tensor, array, stores_grad, requires_grad in self._states:
            if tensor.array is not array or tensor.stores_grad != stores_grad:
                return False
            if tensor.requires_grad != requires_grad:
                return False
        found = list(map(vars, self._layers))  # without a call of Python
        objects = compress(chain.from_iterable(map(dict.values, found)), self._is_other)
        is_same = [*map(len, found), *chain.from_iterable(found)] == self._names
        if not (is_same and all(map(is_, objects, self._objects))) and not self._are_others_like():
            return False
        current = []
        for change in self._changes.values():
            current.append(now := change.before.now())
            if now.structure != change.before.structure:
                return False
        for constant in self._constants:
            current.append(now := constant.now())
            if not constant.is_like(now):
                return False
        self._held = _tensors_of(current) if current else []
        self._containers = _containers_of(current) if current else []
        for number, is_leaf in self._ends:
            if (self._held[number].creator is None) != is_leaf:
                return False
        if (self._containers or self._shared) and aliases(self._containers) != self._shared:
            return False
        return not (self._held or self._aliases) or aliases(self._held) == self._aliases

    def _are_others_like(self) -> bool:
        """Return whether the attributes that do not change are as they were; at once until one holds another object."""
        others = self._find_others()
        if others.keys() != self._others.keys():
            return False
        if not all(other.is_like(self._others[key]) for key, other in others.items()):
            return False
        self._layers = [layer for _, layer in layers_of(self._model)]
        found = list(map(vars, self._layers))
        self._names = [*map(len, found), *chain.from_iterable(found)]
        keys = [(id(layer), name) for layer in self._layers for name in vars(layer)]
        self._is_other = [key in others for key in keys]
        self._objects = [others[key].value for key in keys if key in others]
        return True

    def _find_others(self) -> dict[Hashable, Attribute]:
        return {key: found for key, found in _attributes_of(self._model).items() if key not in self._changes}

    def now(self) -> list[Tensor]:
        """Return the ``inputs`` of this replay; ``fit`` was called before."""
        return list(map(self._held.__getitem__, self._read))

    def repeat(self) -> None:
        """Set the attributes as the step did."""
        if self._changes:
            self._set = [tensor.clone() for tensor in self._made]
            for tensor in compress(self._set, self._computed):
                tensor.creator = self._creator
            tensors = [*self._held, *self._set]
            containers = [*self._containers, *[None] * (self._num_containers - len(self._containers))]
            for change in self._changes.values():
                change.repeat(tensors, containers)
        self._held, self._containers = [], []

    def changes(self) -> tuple[Hashable, list[Tensor]]:
        """Return the changed attributes without the values of their Tensors, and the Tensors that the step made."""
        found = [
            (key, flatten(change.value, id)[0], *change.sources, *change.places)
            for key, change in self._changes.items()
        ]
        return tuple(found), self._made

    def watched_in_replay(self, on_read: Callable[[str], None] | None = None) -> AbstractContextManager[None]:
        """Watch the attributes that a replay sets later than the step did; by default a read is a GraphError."""
        late = [self._changes[key].before for key in self._changes.keys() & self._set_before_host]
        attributes = [(each.layer, each.name) for each in late if each.name in vars(each.layer)]
        return watched(attributes, on_read or _refuse_read)

    def watched_while_recorded(self, recorder: Recorder) -> AbstractContextManager[None]:
        """Watch the attributes that the step has set so far; a read breaks the graph."""
        if recorder.break_reason is not None:
            return nullcontext()
        changed = [
            (layer, name)
            for layer in self._layers_before
            for name, value in vars(layer).items()
            if self._is_set(layer, name, value)
        ]
        self._set_before_host.update((id(layer), name) for layer, name in changed)
        return watched(changed, lambda name: recorder.break_graph(READ.format(name)))

    def _is_set(self, layer: Layer, name: str, value: Any) -> bool:
        """Return whether the step being recorded has set an attribute, which is no parameter and no layer."""
        before = self.before.get((id(layer), name))
        if before is not None and before.value is value:
            return _may_change_unset(value) and not before.is_like(before.now())
        is_state = isinstance(value, Tensor) and (is_parameter(value) or name in layer.buffers)
        return not is_state and not isinstance(value, Layer) and name not in layer.unrecorded_attributes

    def share_memory(self) -> None:
        """Give the Tensors that ``repeat`` has set the memory of those of the step."""
        for clone, made in zip(self._set, self._made, strict=True):
            clone.array = made.array


def _refuse_read(name: str) -> None:
    raise GraphError(
        f"the step cannot be replayed any more: {READ.format(name)}, or compile with use_graph=False"
    )


def _attributes_of(model: Layer) -> dict[Hashable, Attribute]:
    """Read all attributes of all layers, by layer and name."""
    return {
        (id(layer), name): Attribute(layer, name, f"{path}.{name}" if path else name, value)
        for path, layer in layers_of(model)
        for name, value in list(vars(layer).items())
        if name not in layer.unrecorded_attributes
    }


def _why_unseen(model: Layer) -> str | None:
    """Why a layer may change without ``vars`` showing it, or None."""
    for path, layer in layers_of(model):
        label = path or type(layer).__name__
        for kind in type(layer).__mro__:
            for name, value in vars(kind).items() if "__slots__" in vars(kind) else ():
                if isinstance(value, MemberDescriptorType):
                    return f"{label}.{name} is in __slots__, where a replay does not see it change"
    return None


def _tensors_of(attributes: Iterable[Attribute]) -> list[Tensor]:
    return [tensor for attribute in attributes for tensor in attribute.tensors]


def _containers_of(attributes: Iterable[Attribute]) -> list[object]:
    return [container for attribute in attributes for container in attribute.containers]


def _flags_of(tensor: Tensor) -> tuple[bool, bool]:
    return tensor.requires_grad, tensor.stores_grad


def _may_change_unset(value: object) -> bool:
    """Return whether what an attribute holds, apart from Tensors, may change without the attribute being set."""
    if isinstance(value, tuple):
        return any(map(_may_change_unset, value))
    return isinstance(value, (list, dict)) or is_dataclass(value)


def _why_not_repeated(old: Attribute, new: Attribute, states: Container[int]) -> str | None:
    """Why a replay cannot set an attribute as the step did; None if it can."""
    if any(id(tensor) in states for tensor in (*old.tensors, *new.tensors)):
        return f"it made or replaced parameters or buffers ({new.label})"
    arrays = dict(zip(map(id, old.tensors), old.arrays, strict=True))
    current = zip(map(id, new.tensors), new.arrays, strict=True)
    if any(arrays.get(tensor, array) is not array for tensor, array in current):
        return f"it replaced the array of a tensor in {new.label}"
    if any(all(value is not known for known in old.objects) for value in new.objects):
        return f"it set {new.label}, to an object that a replay cannot make"
    if any(map(is_container, new.objects)):
        return f"it changed {new.label}, where a dict or dataclass has attributes beside its items or fields"
    return None


def pinned(tensor: Tensor, recorder: Recorder) -> Tensor:
    """Return a leaf on the array of ``tensor`` with its flags, and have replays write that array where it is."""
    recorder.keep(tensor.array)
    leaf = Tensor.wrap(tensor.array, tensor.device)
    leaf.requires_grad, leaf.stores_grad, leaf.name = tensor.requires_grad, tensor.stores_grad, tensor.name
    return leaf
