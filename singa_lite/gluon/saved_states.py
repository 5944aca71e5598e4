# SPDX-License-Identifier: Apache-2.0
"""The states of a Trainer, in a file of its own or in the checkpoint of a job.

What lives here: which arrays and numbers they are, and their checks. What does not: the file's format
(kvstore/states.py), the states of one parameter (opt/).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import kvstore as stores
from ..dtypes import LARGEST_FLOAT32
from ..errors import CheckpointError, OptionError, check_int, check_number
from ..kvstore.calls import Array, Key, Path, States
from ..kvstore.states import check_residuals
from ..kvstore.store import KVStore
from ..opt.base import Optimizer
from ..opt.checks import MAX_STEPS, check_steps
from ..tensor import Tensor
from .shared_optimizer import SharedOptimizer

RESIDUAL = "sync/kvstore/"  # as residuals of a DistOpt's schemes are called


@dataclass(frozen=True, eq=False)
class SavedStates:
    """Saves and restores the optimizer's states, wherever it updates, and what compression has lost.

    Attributes: those of the Trainer. ``kvstore`` is a store of the package or None; ``shared`` notes what is restored.
    """

    params: Mapping[str, Tensor]
    optimizer: Optimizer
    kvstore: KVStore | None
    shared: SharedOptimizer
    updates_on_store: bool
    reduction: str

    def save(self, fname: Path) -> None:
        """As ``Trainer.save_states``."""
        get_states = None if self.updates_on_store else self._own_states
        steps = self.optimizer.step_counter
        head = {"optimizer": None, "steps": steps, "lr": self.shared.constant_lr, **self._alike()}
        self._store_of_states().save_states("save_states", fname, head, get_states)

    def load(self, fname: Path) -> None:
        """As ``Trainer.load_states``."""
        store, access = self._store_of_states(), (self._own_states, self._set_own_states)
        if self.updates_on_store:
            head = store.load_states("load_states", fname, self._alike(), check=check_head)
        else:
            head = store.load_states("load_states", fname, self._alike(), *access, check=check_head)
        self.shared.restore(head["steps"], head.get("lr"))

    def get(self) -> dict[str, Array]:
        """As ``Trainer.get_states``."""
        store = self.kvstore if self.updates_on_store else None
        states = self.optimizer.get_states() if store is None else _flat(store.get_states())
        states["step_counter"] = np.array(self.optimizer.step_counter)
        for name, lost in self._residuals().items():
            states[RESIDUAL + str(name)] = lost
        lr = self.shared.constant_lr
        return {**states, "lr": np.array(np.nan if lr is None else lr)}

    def set(self, states: Mapping[str, Array]) -> None:
        """As ``Trainer.set_states``."""
        _check_states(states, self.params)
        lost: dict[Key, Array] = {
            name.removeprefix(RESIDUAL): states[name] for name in states if name.startswith(RESIDUAL)
        }
        check_residuals("Trainer: set_states", self._residuals(), lost)
        known = {name: states[name] for name in states if name != "lr" and not name.startswith(RESIDUAL)}
        if not self.updates_on_store:
            self.optimizer.set_states(known)
        if self.kvstore is not None:
            if self.updates_on_store:
                del known["step_counter"]  # the store's have their own
                self.kvstore.set_states(self._by_parameter(known))
            self.kvstore.set_residuals(lost)
            params = list(self.params.values())
            self.kvstore.broadcast(list(self.params), params, out=params)
        lr = float(states["lr"])
        self.shared.restore(int(states["step_counter"]), None if np.isnan(lr) else lr)

    def _residuals(self) -> dict[Key, Array]:
        """Return what compression has lost here of these parameters."""
        lost = {} if self.kvstore is None else self.kvstore.get_residuals()
        return {name: lost[name] for name in self.params if name in lost}

    def _alike(self) -> dict[str, Any]:
        """Return what must be the same where the states are loaded."""
        return {"optimizer_class": type(self.optimizer).__name__, "reduction": self.reduction}

    def _store_of_states(self) -> KVStore:
        """Return the store that writes states: the Trainer's, or one of this process with the same keys."""
        if self.kvstore is not None:
            return self.kvstore
        store = stores.create("local", alone=True)
        assert isinstance(store, KVStore)
        store.init(list(self.params), list(self.params.values()))
        return store

    def _own_states(self) -> States:
        """Return the states of this worker's optimizer by parameter."""
        return self._by_parameter(self.optimizer.get_states())

    def _by_parameter(self, states: Mapping[str, Array]) -> States:
        """Return "<parameter>:<state>" by parameter and state; the first one has what is of no parameter."""
        found: States = {name: {} for name in self.params}
        for key, array in states.items():
            name, _, state = key.rpartition(":")
            found[name if name in found else next(iter(found))][state if name in found else key] = array
        return found

    def _set_own_states(self, states: States) -> None:
        """Continue from worker 0's ``_own_states``; all workers call it."""
        saved = _flat(states if self.kvstore is None else self.kvstore.broadcast_states(states))
        own, first = self.optimizer.get_states(), next(iter(self.params))
        self.optimizer.set_states({key: saved[key if key in saved else f"{first}:{key}"] for key in own})


def _flat(states: States) -> dict[str, Array]:
    return {f"{name}:{state}": array for name, each in states.items() for state, array in each.items()}


def check_head(head: Mapping[str, Any]) -> None:
    """Raise CheckpointError unless a file has a step count, and this and the learning rate are numbers."""
    if "steps" not in head:
        raise CheckpointError(
            "Trainer: load_states: the file is of a store's save_optimizer_states; load it by that store's "
            "load_optimizer_states, or save by Trainer.save_states"
        )
    try:
        if check_int("Trainer: load_states", "steps", head["steps"], 0) > MAX_STEPS:
            raise OptionError(f"Trainer: load_states: steps = {head['steps']} is more than {MAX_STEPS}")
        if head.get("lr") is not None:
            check_number("Trainer: load_states", "lr", head["lr"], 0, LARGEST_FLOAT32)
    except OptionError as error:
        raise CheckpointError(str(error)) from error


def _check_states(states: object, names: Collection[str]) -> None:
    """Raise CheckpointError unless ``states`` are what ``Trainer.get_states`` gives for parameters of these names."""
    whole = {"step_counter", "lr"}
    if (
        not isinstance(states, Mapping)
        or not all(isinstance(key, str) and isinstance(value, np.ndarray) for key, value in states.items())
        or not whole <= states.keys()
        or not all(states[key].shape == () and states[key].dtype.kind in "if" for key in whole)
    ):
        raise CheckpointError("Trainer: set_states: expected what get_states gives, arrays by name")
    check_steps("Trainer: set_states", states["step_counter"])
    lr = float(states["lr"])
    if not (np.isnan(lr) or 0 <= lr <= LARGEST_FLOAT32):
        raise CheckpointError(
            f"Trainer: set_states: lr must be a number >= 0, or NaN for a schedule, not {lr}"
        )
    others = sorted(
        key
        for key in states.keys() - whole
        if (key.removeprefix(RESIDUAL) if key.startswith(RESIDUAL) else key.rpartition(":")[0]) not in names
    )
    if others:
        raise CheckpointError(f"Trainer: set_states: {others} are of no parameter of this Trainer")
