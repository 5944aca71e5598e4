# SPDX-License-Identifier: Apache-2.0
"""The attributes of a model as a recorded step finds and leaves them.

What lives here: which attributes a step changes, and doing the same in a replay. What does not: the tape (records.py),
the tree of layers (layer/tree.py).

Note [slots]: a step may read Tensors from attributes of its layers and set attributes (``self.total = self.total +
loss``). Each attribute that it changes is a slot: a replay runs only where the attribute holds what it held before the
recorded step, up to the values of its Tensors; it reads these, and sets the attribute as the step did, to new Tensors
that are leaves. All other attributes must be what they were when the step was recorded, and two that held one Tensor
must hold one again, as a step that sets one to the other's Tensor may then have changed nothing.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from types import FunctionType
from typing import Any, NamedTuple, Protocol

from ..graph.memory import root_of
from ..graph.recorder import Recorder
from ..tensor import Tensor
from ..tensor.pytree import flatten, rebuild


class HasAttributes(Protocol):
    """A layer.

    Attributes:
        unrecorded_attributes: names of attributes that a record does not look at.
    """

    @property
    def unrecorded_attributes(self) -> tuple[str, ...]: ...


class Tree(Protocol):
    """The layers of a model."""

    def layers(self) -> Iterable[tuple[str, HasAttributes]]:
        """Give each layer with its path from the model."""

    def states(self) -> list[Tensor]:
        """Return parameters and buffers."""

    def generation(self) -> int:
        """Return a number that changes when an attribute of any layer is set."""


class Attribute:
    """An attribute of a layer at one moment.

    Attributes:
        name, label: its name, and its path for people.
        value: what it held; None if it was not there.
        structure, tensors: what pytree.flatten gives of it.
        arrays: the raw arrays of ``tensors`` at that moment.
        objects: what is neither a Tensor nor a plain value in it.
    """

    def __init__(self, layer: object, name: str, label: str, is_there: bool | None = None) -> None:
        self._layer, self.name, self.label = layer, name, label
        self.is_there = name in vars(layer) if is_there is None else is_there
        self.value = vars(layer).get(name) if self.is_there else None
        self.objects: list[object] = []
        self.structure, self.tensors = flatten((self.is_there, self.value), self._describe)
        self.arrays = [tensor.array for tensor in self.tensors]

    def _describe(self, value: object) -> Hashable:
        self.objects.append(value)
        return id(value)

    def now(self) -> Attribute:
        """Return the same attribute as it is now."""
        return Attribute(self._layer, self.name, self.label)

    def absent(self) -> Attribute:
        """Return the same attribute as it was before it was set."""
        return Attribute(self._layer, self.name, self.label, is_there=False)

    def is_like(self, other: Attribute) -> bool:
        """Return whether both hold the same Tensors, with the same arrays, in equal structures."""
        return self.structure == other.structure and all(
            mine is theirs
            for mine, theirs in zip(self.tensors + self.arrays, other.tensors + other.arrays, strict=True)
        )

    def set(self, value: Any) -> None:
        """Set the attribute."""
        vars(self._layer)[self.name] = value

    def remove(self) -> None:
        """Delete the attribute."""
        vars(self._layer).pop(self.name, None)


class Position(NamedTuple):
    """Where a Tensor was before the step: the key of a slot and the number of the Tensor in it."""

    slot: Hashable
    number: int


Kept = (
    Position | Tensor | None
)  # a Tensor of an attribute that stays as it is; None for one that the step makes


class Slot:
    """An attribute that a step changes, see Note [slots].

    Args:
        before, after: the attribute before and after the recorded step.

    Attributes:
        before: the first of them, whose structure a replay must find.
    """

    def __init__(self, before: Attribute, after: Attribute) -> None:
        self.before = before
        self._tensors = after.tensors
        self._is_there = after.is_there
        self._in_place = after.value is before.value and isinstance(after.value, (list, dict))
        self._after = rebuild(after.value, iter(after.tensors))
        self._kept: list[Kept] = []

    def pin(self, recorder: Recorder, held: Mapping[int, Kept]) -> None:
        """Have replays leave new Tensors where the recorded step left them; ``held`` are those that are not new."""
        self._kept = [held.get(id(tensor)) for tensor in self._tensors]
        for tensor, kept in zip(self._tensors, self._kept, strict=True):
            if kept is None:
                recorder.keep(tensor.array)
        self._tensors = [Tensor.wrap(tensor.array, tensor.device) for tensor in self._tensors]
        self._after = rebuild(self._after, iter(self._tensors))

    def bind(self, current: Attribute, held: Mapping[Hashable, Attribute], new: dict[int, Tensor]) -> None:
        """Do to the attribute, which is ``current`` now, what the step did.

        Args:
            held: all slots as they are now, by their keys.
            new: copies of what the step made, by the id of the array; the slots share them.
        """
        if not self._is_there:
            current.remove()
            return
        tensors = []
        for tensor, kept in zip(self._tensors, self._kept, strict=True):
            if isinstance(kept, Tensor):
                tensors.append(kept)
            elif kept is not None:
                tensors.append(held[kept.slot].tensors[kept.number])
            else:
                if id(tensor.array) not in new:
                    new[id(tensor.array)] = tensor.clone()
                tensors.append(new[id(tensor.array)])
        value = rebuild(self._after, iter(tensors))
        container: Any = current.value
        if self._in_place and isinstance(container, dict):
            container.clear()
            container.update(value)
        elif self._in_place:
            container[:] = value
        else:
            current.set(value)


class Slots:
    """The attributes of a tree, from before a recorded step on.

    Args:
        tree: the layers that the step works on.

    Attributes:
        inputs: Tensors of slots that the tape reads.
    """

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._before = _attributes(tree)
        self.inputs: list[Tensor] = []
        # of the inputs: numbers of the slot and of the Tensor in it
        self._positions: list[Position] = []
        self._slots: dict[Hashable, Slot] = {}
        self._constants: list[Attribute] = []
        self._current: dict[Hashable, Attribute] = {}  # the slots' attributes before this replay

    def objects(self) -> list[tuple[str, str, object]]:
        """Return what attributes hold that is neither a Tensor nor a plain value: label and name of each, value."""
        return [
            (found.label, found.name, value)
            for found in self._before.values()
            for value in (*found.objects, *([found.value] if isinstance(found.value, FunctionType) else []))
        ]

    def new_tensors(self) -> list[Tensor]:
        """Return the Tensors that attributes hold now and did not before the step."""
        before = {id(tensor) for found in self._before.values() for tensor in found.tensors}
        after = (tensor for found in _attributes(self._tree).values() for tensor in found.tensors)
        return [tensor for tensor in after if id(tensor) not in before]

    def finish(self, recorder: Recorder) -> None:
        """Find what the step has changed, and set its slots as replays will."""
        before, self._before = self._before, {}
        after, states = _attributes(self._tree), {id(tensor) for tensor in self._tree.states()}
        for key, new in after.items():
            old = before.pop(key, None) or new.absent()
            self._compare(key, old, new, states, recorder)
        for key, old in before.items():
            self._compare(key, old, old.now(), states, recorder)
        self._find_inputs(recorder)
        if recorder.break_reason is None or not recorder.is_lasting:
            held = self._held()
            for slot in self._slots.values():
                slot.pin(recorder, held)
            self._current = {key: slot.before for key, slot in self._slots.items()}
            self._aliases = _aliases([*self._current.values(), *self._constants])
            self.bind()
        self._states = [(t, t.array, t.stores_grad, t.requires_grad) for t in self._tree.states()]
        self._generation = self._tree.generation()
        self._others = {
            key: found for key, found in _attributes(self._tree).items() if key not in self._slots
        }

    def _compare(
        self, key: Hashable, old: Attribute, new: Attribute, states: set[int], recorder: Recorder
    ) -> None:
        if old.is_like(new):
            if not all(id(tensor) in states for tensor in new.tensors):
                self._constants.append(new)
        elif any(id(tensor) in states for tensor in (*old.tensors, *new.tensors)):
            recorder.break_graph(f"it made or replaced parameters or buffers ({new.label})", is_lasting=False)
        elif any(
            a is b and x is not y
            for a, x in zip(old.tensors, old.arrays, strict=True)
            for b, y in zip(new.tensors, new.arrays, strict=True)
        ):
            recorder.break_graph(f"it replaced the array of a tensor in {new.label}", is_lasting=False)
        elif any(all(value is not known for known in old.objects) for value in new.objects):
            recorder.break_graph(
                f"it set {new.label}, to an object that a replay cannot make", is_lasting=False
            )
        else:
            self._slots[key] = Slot(old, new)

    def _held(self) -> dict[int, Kept]:
        """Return where the Tensors of all attributes were before the step, by their ids."""
        held: dict[int, Kept] = {
            id(tensor): tensor for attribute in self._constants for tensor in attribute.tensors
        }
        for key, slot in self._slots.items():
            held |= {id(tensor): Position(key, n) for n, tensor in enumerate(slot.before.tensors)}
        return held

    def _find_inputs(self, recorder: Recorder) -> None:
        """Find the Tensors of slots that the tape reads; each must have memory of its own."""
        constants = [tensor for attribute in self._constants for tensor in attribute.tensors]
        held = [tensor.array for tensor in (*constants, *self._tree.states())]
        held += [tensor.array for slot in self._slots.values() for tensor in slot.before.tensors]
        for key, slot in self._slots.items():
            for number, tensor in enumerate(slot.before.tensors):
                view = recorder.view(tensor.array)
                if view is None:
                    continue
                root = root_of(tensor.array)
                if tensor.creator is not None:
                    reason = (
                        f"{slot.before.label} was made by a recorded operator of an earlier step; use clone()"
                    )
                    recorder.break_graph(reason, is_lasting=False)
                elif not view.is_whole or sum(root_of(array) is root for array in held) > 1:
                    reason = f"{slot.before.label} shares its memory with another tensor; use clone()"
                    recorder.break_graph(reason, is_lasting=False)
                else:
                    recorder.take_inputs([tensor.array])
                    self.inputs.append(tensor)
                    self._positions.append(Position(key, number))

    def fit(self) -> bool:
        """Return whether all attributes are as the recorded step found them."""
        for tensor, array, stores_grad, requires_grad in self._states:
            if (
                tensor.array is not array
                or tensor.stores_grad != stores_grad
                or tensor.requires_grad != requires_grad
            ):
                return False
        if self._tree.generation() != self._generation and not self._is_same_tree():
            return False
        self._current = {key: slot.before.now() for key, slot in self._slots.items()}
        return (
            all(self._current[key].structure == slot.before.structure for key, slot in self._slots.items())
            and all(constant.is_like(constant.now()) for constant in self._constants)
            and _aliases([*self._current.values(), *self._constants]) == self._aliases
        )

    def _is_same_tree(self) -> bool:
        generation = self._tree.generation()
        others = {key: found for key, found in _attributes(self._tree).items() if key not in self._slots}
        is_same = others.keys() == self._others.keys() and all(
            found.is_like(self._others[key]) for key, found in others.items()
        )
        if is_same:
            self._generation = generation
        return is_same

    def now(self) -> list[Tensor]:
        """Return the ``inputs`` of this replay; ``fit`` was called before."""
        return [self._current[slot].tensors[number] for slot, number in self._positions]

    def bind(self) -> None:
        """Set the slots as the step did."""
        new: dict[int, Tensor] = {}
        for key, slot in self._slots.items():
            slot.bind(self._current[key], self._current, new)
        self._current = {}


def _aliases(attributes: Iterable[Attribute]) -> list[int]:
    """Return for each Tensor of ``attributes`` the number of the first that is the same object."""
    first: dict[int, int] = {}
    tensors = (tensor for attribute in attributes for tensor in attribute.tensors)
    return [first.setdefault(id(tensor), number) for number, tensor in enumerate(tensors)]


def _attributes(tree: Tree) -> dict[Hashable, Attribute]:
    """All attributes of all layers, by layer and name."""
    return {
        (id(layer), name): Attribute(layer, name, f"{path}.{name}" if path else name)
        for path, layer in tree.layers()
        for name in list(vars(layer))
        if name not in layer.unrecorded_attributes
    }
