# SPDX-License-Identifier: Apache-2.0
"""What a scheme keeps for each parameter from step to step: residuals, velocities, factors."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, Protocol

import numpy as np

from ..errors import CheckpointError
from ..graph.recorder import bookkeep, unrecorded
from ..tensor import Tensor
from .grouping import layout

Array = Any  # a raw array of the device's backend


class Group(Protocol):
    """Parameters that are sent together (sync.buckets.Bucket)."""

    params: list[Tensor]
    backend: Any
    dtype: Any
    alignment: int


class Slot:
    """One of the arrays that are kept for each parameter; a scheme may override both methods.

    The arrays have the dtype of their parameters. Those of a parameter's shape are laid out as gradients in ``flat``.
    """

    def shape(self, param: Tensor) -> tuple[int, ...]:
        """Return the shape of a parameter's array; by default, the parameter's own."""
        return param.shape

    def start(self, param: Tensor) -> np.ndarray | float:
        """Return the first values of a parameter's array, equal on all ranks; by default, zeros."""
        return 0.0


class ParamState:
    """Named arrays for each parameter, as views into one flat array for each group and name.

    A parameter has one array of each name. Where steps differ in which parameters have gradients, and so in their
    groups, it is copied from the group that had the parameter last to the one that has it now.

    Args:
        slots: the arrays, by name.
    """

    def __init__(self, slots: Mapping[str, Slot]) -> None:
        self._slots = slots
        self._flats: dict[Group, list[Array]] = {}
        self._views: dict[Group, dict[tuple[Tensor, str], Array]] = {}
        self._owners: dict[Tensor, Group] = {}  # the group in whose arrays a parameter's are now
        self._moved: dict[Tensor, Group] = {}  # the same, of those that were in several groups
        self._moving: dict[Tensor, Group] = {}  # those that go to another group in this step
        self._restored: dict[tuple[Tensor, str], np.ndarray] = {}  # loaded, and not yet in a group's array

    def of(self, group: Group) -> list[Array]:
        """Return the flat array of each name, in their order."""
        if group not in self._flats:
            with unrecorded():
                self._make(group)
        for param in group.params:
            owner = self._owners.setdefault(param, group)
            if owner is not group:
                self._moving[param] = group
                for slot in self._slots:
                    group.backend.run(
                        "copy", self._views[owner][param, slot], out=self._views[group][param, slot]
                    )
        return self._flats[group]

    def views(self, group: Group, param: Tensor) -> list[Array]:
        """Return the arrays of one parameter in the flat arrays of its group, in the order of their names."""
        return [self._views[group][param, slot] for slot in self._slots]

    @property
    def is_empty(self) -> bool:
        """Whether there is no array yet."""
        return not (self._owners or self._restored)

    def begin(self) -> None:
        """Start a step: moves of one that has failed are forgotten."""
        self._moving = {}

    def commit(self) -> None:
        """End a step: from now on its groups own the arrays of their parameters."""
        if self._moving:
            bookkeep(self._commit, dict(self._moving))

    def _commit(self, moving: dict[Tensor, Group]) -> None:
        self._owners.update(moving)
        self._moved.update(moving)

    def graph_key(self) -> Hashable:
        """Equal before steps that copy the same arrays from group to group."""
        return tuple(map(id, self._moved.values()))

    def state_dict(self, names: dict[Tensor, str]) -> dict[str, np.ndarray]:
        """Return "<parameter>:<slot>" of every array."""
        states = {f"{names[param]}:{slot}": values for (param, slot), values in self._restored.items()}
        for param, owner in self._owners.items():
            for slot in self._slots:
                array = self._views[owner][param, slot]
                states[f"{names[param]}:{slot}"] = owner.backend.to_numpy(array)
        return states

    def load_state_dict(self, states: dict[str, np.ndarray], names: dict[Tensor, str]) -> None:
        """Continue from ``state_dict``; what it lacks starts again. CheckpointError: states that fit no parameter."""
        known = {f"{name}:{slot}": (param, slot) for param, name in names.items() for slot in self._slots}
        for key, values in states.items():
            if key not in known or (self._slots[known[key][1]].shape(known[key][0]), known[key][0].dtype) != (
                values.shape,
                values.dtype,
            ):
                raise CheckpointError(
                    f"state {key!r}, {values.dtype}{list(values.shape)}, fits no parameter of this model"
                )
        self._restored = {known[key]: np.array(v, known[key][0].dtype) for key, v in states.items()}
        for param, owner in self._owners.items():
            self._fill(owner, param)

    def _make(self, group: Group) -> None:
        """Make the arrays of a group that is new."""
        self._flats[group], self._views[group] = [], {}
        for name, slot in self._slots.items():
            shapes = [slot.shape(param) for param in group.params]
            spans, size = layout(shapes, group.alignment if type(slot).shape is Slot.shape else 1)
            flat = group.backend.zeros((size,), group.dtype)
            self._flats[group].append(flat)
            for param, span, shape in zip(group.params, spans, shapes, strict=True):
                self._views[group][param, name] = flat[span].reshape(shape)
        for param in group.params:
            if param not in self._owners:
                self._fill(group, param)

    def _fill(self, group: Group, param: Tensor) -> None:
        """Write restored or first values into a parameter's arrays."""
        for name, slot in self._slots.items():
            out = self._views[group][param, name]
            restored = self._restored.pop((param, name), None)
            values = slot.start(param) if restored is None else restored
            whole = np.ascontiguousarray(np.broadcast_to(np.asarray(values, group.dtype), out.shape))
            group.backend.run("copy", group.backend.asarray(whole), out=out)
