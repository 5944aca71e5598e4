# SPDX-License-Identifier: Apache-2.0
"""The contract of an optimizer: one method, ``update_all``, and SINGA's doors to it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from .. import autograd
from ..device import Device
from ..errors import CheckpointError, DeviceError, DTypeError, ShapeError
from ..graph import host
from ..tensor import Tensor
from .schedule import DecayScheduler, as_schedule

Pairs = Iterable[tuple[Tensor, Tensor]]


class Optimizer(ABC):
    """Changes parameters along their gradients.

    State is kept per parameter object, never by name: SINGA keys momentum by name and mixes the buffers of
    two layers that are both called 'W'.

    Args:
        lr: learning rate, >= 0, a number or a DecayScheduler of the step.
    """

    slot_names: tuple[str, ...] = ()  # the arrays kept per parameter, in the parameter's shape and dtype

    def __init__(self, lr: float | DecayScheduler) -> None:
        self.lr = as_schedule("lr", lr)
        self.step_counter = 0
        self._slots: dict[Tensor, dict[str, Tensor]] = {}

    def __call__(self, loss: Tensor) -> None:
        """Run backward, update every parameter, and count the step."""
        pairs = list(autograd.backward(loss))
        host(self._apply, pairs, remember=self.remember)

    def prepare(self, params: dict[str, Tensor], buffers: dict[str, Tensor]) -> None:
        """Learn the names of a model's parameters; ``buffers`` are states without gradient.

        ``Model.compile`` calls it on every rank; DistOpt makes the ranks agree here.
        """
        for name, param in params.items():
            param.name = name
            self.slots(param)

    def _apply(self, pairs: list[tuple[Tensor, Tensor]]) -> None:
        self.update_all(pairs)
        self.step()

    @abstractmethod
    def update_all(self, pairs: Pairs) -> None:
        """Update each parameter by its gradient, in place; the one method an optimizer writes."""

    def run_update(self, kernel: str, pairs: Pairs, **attributes: Any) -> None:
        """Check all ``pairs``, then run an update kernel once for all tensors of a device and dtype."""
        groups: dict[tuple[Device, str], tuple[list[Tensor], list[Any]]] = {}
        for param, grad in pairs:
            check_pair(type(self).__name__, param, grad)
            key = param.device, param.dtype.char
            if key not in groups:
                groups[key] = [], []
            groups[key][0].append(param)
            groups[key][1].append(grad.data)
        for (device, _), (params, grads) in groups.items():
            kept = [self.slots(param) for param in params] if self.slot_names else []
            states = [slots[name].data for name in self.slot_names for slots in kept]
            device.backend.run(kernel, *grads, out=(*(param.data for param in params), *states), **attributes)

    def apply(self, param_name: str, param_value: Tensor, param_grad: Tensor) -> None:
        """Update one parameter (SINGA's door); the name is not used as a key."""
        self.update_all([(param_value, param_grad)])

    def update(self, param: Tensor, grad: Tensor) -> None:
        """Update one parameter (SINGA's older door)."""
        self.update_all([(param, grad)])

    def step(self) -> None:
        """Count a step, on which schedules depend."""
        self.step_counter += 1

    def remember(self) -> Callable[[], None]:
        """See ``HostCall.remember``."""
        counter = self.step_counter

        def bring_back() -> None:
            self.step_counter = counter

        return bring_back

    def backward_and_update(self, loss: Tensor) -> None:
        """The same as calling the optimizer."""
        self(loss)

    # ---- state -------------------------------------------------------------------------------------

    def slots(self, param: Tensor) -> dict[str, Tensor]:
        """The state of ``param``, zeros at first: {slot name: tensor like the parameter}."""
        if param not in self._slots:
            self._slots[param] = {
                slot: Tensor(param.shape, param.device, param.dtype) for slot in self.slot_names
            }
        return self._slots[param]

    def get_states(self) -> dict[str, np.ndarray]:
        """What a checkpoint keeps: "step_counter", and "<parameter>:<slot>" for every slot.

        Parameters are called by name, and by the order in which they were first updated where names repeat.
        """
        names = unique_names(self._slots)
        states = {
            f"{names[param]}:{slot}": value.device.backend.to_numpy(value.data)
            for param, slots in self._slots.items()
            for slot, value in slots.items()
        }
        return {"step_counter": np.array(self.step_counter), **states}

    def set_states(self, states: dict[str, np.ndarray]) -> None:
        """Go on from ``get_states``; the parameters must be known, by ``prepare`` or an earlier update.

        Raises:
            CheckpointError: states are missing, unknown or of another shape or dtype; nothing was changed.
        """
        mine = self.get_states()
        missing, unknown = sorted(set(mine) - set(states)), sorted(set(states) - set(mine))
        if missing or unknown:
            raise CheckpointError(
                f"{type(self).__name__}: the states lack {missing} and have unknown {unknown}"
            )
        for key, value in mine.items():
            if value.shape != states[key].shape or value.dtype != states[key].dtype:
                raise CheckpointError(
                    f"{type(self).__name__}: state {key!r} is {states[key].dtype}{states[key].shape}, "
                    f"not {value.dtype}{value.shape}"
                )
        for param, name in unique_names(self._slots).items():
            for slot, target in self._slots[param].items():
                target.copy_from_numpy(states[f"{name}:{slot}"])
        self.step_counter = int(states["step_counter"])


def unique_names(params: Iterable[Tensor]) -> dict[Tensor, str]:
    """A name for each parameter, in the order given: its own, or "<name>#<k>" where names repeat."""
    names: dict[Tensor, str] = {}
    counts: dict[str, int] = {}
    for param in params:
        name = param.name or "unnamed"
        count = counts.get(name, 0)
        counts[name] = count + 1
        names[param] = f"{name}#{count}" if count else name
    return names


def check_pair(optimizer: str, param: Tensor, grad: Tensor) -> None:
    """Raise a typed error unless ``grad`` can update ``param``."""
    if grad.data.shape != param.data.shape:
        raise ShapeError(f"{optimizer}: {param.name} has shape {param.shape}, its gradient {grad.shape}")
    if grad.data.dtype != param.data.dtype:
        raise DTypeError(f"{optimizer}: {param.name} is {param.dtype}, its gradient {grad.dtype}")
    if grad.device is not param.device:
        raise DeviceError(f"{optimizer}: {param.name} is on {param.device}, its gradient on {grad.device}")
