# SPDX-License-Identifier: Apache-2.0
"""What a scheme keeps for each parameter from step to step: residuals, velocities, factors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from ..errors import CheckpointError, DTypeError
from ..graph.recorder import unrecorded
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


class Arrays:
    """Zeros for ``params``, all or some of ``group``: for each slot a flat array, of which each has a part."""

    def __init__(self, group: Group, params: list[Tensor], slots: Mapping[str, Slot]) -> None:
        self.params, self.flats = params, list[Array]()
        self.parts: dict[Tensor, list[Array]] = {param: [] for param in params}  # of every flat array
        for slot in slots.values():
            shapes = [slot.shape(param) for param in params]
            spans, size = layout(shapes, group.alignment if type(slot).shape is Slot.shape else 1)
            flat = group.backend.empty((size,), group.dtype)
            group.backend.run("fill", out=flat, value=0.0)
            self.flats.append(flat)
            for param, span, shape in zip(params, spans, shapes, strict=True):
                self.parts[param].append(flat[span].reshape(shape))


class ParamState:
    """Named arrays for each parameter, as views into one flat array for each group and name.

    Parameters that are sent together when their arrays are made have them in one flat array for good, which is what a
    group of just these, in this order, works on. Where steps differ in which parameters have gradients, any other group
    works on copies in each step, which ``commit`` writes back.
    """

    def __init__(self, slots: Mapping[str, Slot]) -> None:
        self._slots = slots
        self._kept: dict[Tensor, Arrays] = {}
        self._used: dict[Group, Arrays] = {}  # by the groups of this step: those kept, or copies
        self._restored: dict[tuple[Tensor, str], np.ndarray] = {}  # loaded, for parameters without arrays

    def of(self, group: Group) -> list[Array]:
        """Return the flat array of each name, in their order."""
        if group not in self._used:
            self._used[group] = self._arrays_of(group)
        return self._used[group].flats

    def views(self, group: Group, param: Tensor) -> list[Array]:
        """Return the parts of one parameter in what ``of`` has returned for its group in this step, by the names."""
        return self._used[group].parts[param]

    def used(self, group: Group) -> list[Array]:
        """Return what ``of`` has returned for a group in this step; nothing where it was not called."""
        return self._used[group].flats if group in self._used else []

    @property
    def is_empty(self) -> bool:
        """Whether there is no array yet."""
        return not (self._kept or self._restored)

    def begin(self) -> None:
        """Start a step; copies of groups whose exchange an exception has ended are dropped."""
        self._used = {}

    def commit(self, group: Group) -> None:
        """Write back what a group has changed in copies; ``BucketedSync`` does when its exchange has ended."""
        used = self._used.pop(group, None)
        if used is not None and used is not self._kept[group.params[0]]:
            for param in group.params:
                _copy(group, used.parts[param], self._kept[param].parts[param])

    def state_dict(self, names: dict[Tensor, str]) -> dict[str, np.ndarray]:
        """Return "<parameter>:<slot>" of every array."""
        states = {f"{names[param]}:{slot}": values for (param, slot), values in self._restored.items()}
        for param, kept in self._kept.items():
            for slot, array in zip(self._slots, kept.parts[param], strict=True):
                states[f"{names[param]}:{slot}"] = param.device.backend.to_numpy(array)
        return states

    def load_state_dict(self, states: dict[str, np.ndarray], names: dict[Tensor, str]) -> None:
        """Continue from ``state_dict``; what it lacks starts again. CheckpointError: states that fit no parameter."""
        known = {f"{name}:{slot}": (param, slot) for param, name in names.items() for slot in self._slots}
        kinds = {key: (self._slots[slot].shape(param), param.dtype) for key, (param, slot) in known.items()}
        for key, values in states.items():
            if kinds.get(key) != (values.shape, values.dtype):
                raise CheckpointError(
                    f"state {key!r}, {values.dtype}{list(values.shape)}, fits no parameter of this model"
                )
        self._restored = {known[key]: np.array(v, known[key][0].dtype) for key, v in states.items()}
        self._kept = {param: kept for param, kept in self._kept.items() if self._fits(param)}
        for param in self._kept:
            self._fill(param)

    def _arrays_of(self, group: Group) -> Arrays:
        """Return the arrays that a group works on in this step; make those of parameters that have none."""
        if new := [param for param in group.params if param not in self._kept]:
            with unrecorded():
                made = Arrays(group, new, self._slots)
                for param in new:
                    self._kept[param] = made
                    self._fill(param)
        for param in group.params:
            if not self._fits(param):
                raise DTypeError(
                    f"{param.name} is {param.dtype}{list(param.shape)}, but what its dist_option keeps of earlier "
                    "steps is of another dtype or shape; make a new DistOpt for a parameter that changes these"
                )
        kept = self._kept[group.params[0]]
        if list(map(id, kept.params)) == list(map(id, group.params)):
            return kept
        copies = Arrays(group, group.params, self._slots)
        for param in group.params:
            _copy(group, self._kept[param].parts[param], copies.parts[param])
        return copies

    def _fits(self, param: Tensor) -> bool:
        """Return whether a parameter's arrays are as they would be made now."""
        arrays = zip(self._slots.values(), self._kept[param].parts[param], strict=True)
        return all((slot.shape(param), param.dtype) == (array.shape, array.dtype) for slot, array in arrays)

    def _fill(self, param: Tensor) -> None:
        """Write restored or first values into a parameter's arrays."""
        backend = param.device.backend
        for (name, slot), out in zip(self._slots.items(), self._kept[param].parts[param], strict=True):
            restored = self._restored.pop((param, name), None)
            values = slot.start(param) if restored is None else restored
            whole = np.ascontiguousarray(np.broadcast_to(np.asarray(values, param.dtype), out.shape))
            backend.run("copy", backend.asarray(whole), out=out)


def _copy(group: Group, sources: list[Array], targets: list[Array]) -> None:
    for source, target in zip(sources, targets, strict=True):
        group.backend.run("copy", source, out=target)
