# SPDX-License-Identifier: Apache-2.0
"""The optimizer of a Trainer, kept the same on all workers and in the store that updates by it.

What lives here: noticing what a script has set, on the optimizer or on the store, and passing it on. What does not: how
a store gives the optimizer to its servers (kvstore/), updates (opt/).
"""

from __future__ import annotations

from typing import Any
from weakref import WeakMethod

from ..config import state
from ..errors import OptionError
from ..graph.recorder import guard
from ..kvstore.store import KVStore
from ..opt.arguments import argument_names
from ..opt.base import OWN_ATTRIBUTES, Optimizer
from ..opt.schedule import Constant, DecayScheduler

MAX_ITEMS = 100  # of a list whose numbers are compared at each step


class SharedOptimizer:
    """Compares an optimizer with the one that all workers have agreed on, or that the store updates by.

    Args:
        optimizer: the Trainer's, prepared.
        store: which all workers share; None: nobody else has to have the same.
        is_on_store: whether the store updates by one like it.
    """

    def __init__(self, optimizer: Optimizer, store: KVStore | None, is_on_store: bool) -> None:
        self._optimizer = optimizer
        self._store = store
        self._is_on_store = is_on_store
        state.trainers[id(optimizer)] = self  # which keeps it, and so its id
        self._note()
        if store is not None and is_on_store:
            store.lr_hooks.append(WeakMethod(self._take_lr))

    @property
    def constant_lr(self) -> float | None:
        """The learning rate, what the store's ``set_learning_rate`` has set for one; None if it is a schedule."""
        rate = self._optimizer.lr
        return rate.init_value if type(rate) is Constant else None

    def set_lr(self, lr: float) -> None:
        """Set the learning rate, a number >= 0, here and on the servers; CommError if workers set different ones."""
        if self._store is not None:
            if self._is_on_store:
                self._store.set_learning_rate(lr)
            else:
                self._store.agree("set_learning_rate", {"the learning rate": lr})
        self._take_lr(lr)

    def _take_lr(self, lr: float) -> None:
        """Take over a learning rate that the script has set by the store's ``set_learning_rate``."""
        self._optimizer.lr = lr
        now = self._attributes()
        self._noted |= {name: now[name] for name in now if name.partition(".")[0] == "lr"}

    def restore(self, steps: int, lr: float | None) -> None:
        """Go on after ``steps`` steps with a saved ``constant_lr``; a schedule stays. States have been set before."""
        self._optimizer.step_counter = steps
        self.note_step()
        if lr is not None and self.constant_lr not in (None, lr):
            self.set_lr(lr)

    def note_step(self) -> None:
        """Note that the optimizer and what the store updates by have made a step."""
        self._noted["step_counter"] = vars(self._optimizer)["_step_counter"]

    def check(self) -> None:
        """Pass on what the script has set since the last step; all workers call it.

        Raises:
            OptionError: what the servers would not see, or another Trainer has got the optimizer since.
            CommError: the workers have set different things.
        """
        guard((id(self), "is the latest"), self._is_latest)
        if not self._is_latest():
            raise OptionError(
                f"Trainer: step: {self._optimizer!r} was given to another Trainer since, and would count the steps of "
                "both; give each an optimizer of its own"
            )
        store = self._store
        if store is None:
            return
        store.check_usable("Trainer: step")
        changed = self._changed()
        if not self._is_on_store:
            if changed:
                steps, kind = self._optimizer.step_counter, type(self._optimizer)
                settings = {k: v for k, v in self._optimizer.settings().items() if _says_how(kind, k)}
                store.agree("step", {"the optimizer": settings, "its step_counter": steps})
        elif store.optimizer_description is not self._description:
            self._check_replaced(store)
        elif "step_counter" in changed or (changed and not self._is_like_store(store)):
            lr = self.constant_lr
            if lr is None or not changed <= {"lr", "lr.init_value"}:
                raise OptionError(
                    f"Trainer: step: {', '.join(sorted(changed))} of the optimizer was set, which the store does not "
                    "see; call trainer.kvstore.set_optimizer(trainer.optimizer), which resets its state"
                )
            self.set_lr(lr)
        self._note()

    def _is_latest(self) -> bool:
        # a copy has an optimizer of its own, which nobody has noted
        return state.trainers.setdefault(id(self._optimizer), self) is self

    def _check_replaced(self, store: KVStore) -> None:
        """Raise OptionError unless the optimizer that the script has given to the store is like this one."""
        description, steps = store.optimizer_description or {}, self._optimizer.step_counter
        if description.get("step_counter", 0) != steps or not self._is_like_store(store):
            raise OptionError(
                f"Trainer: step: the store updates by {dict(description) or 'an updater'}, not by this Trainer's "
                f"optimizer, {self._optimizer!r} after {steps} steps; call "
                "trainer.kvstore.set_optimizer(trainer.optimizer)"
            )

    def _is_like_store(self, store: KVStore) -> bool:
        """Return whether the store updates by an optimizer like this one, whatever steps it has made."""
        theirs = dict(store.optimizer_description or {})
        theirs.pop("step_counter", None)
        if store.learning_rate is not None and "lr" in theirs:
            theirs["lr"] = store.learning_rate
        return theirs == self._optimizer.describe()

    def _changed(self) -> set[str]:
        """Return the names of attributes that were set since the last note; of a new schedule no arguments."""
        now, noted = self._attributes(), self._noted
        changed = {name for name in now if not _are_same(now[name], noted.get(name))}
        return {name for name in changed if name.rpartition(".")[0] not in changed}

    def _attributes(self) -> dict[str, Any]:
        """Return what says how the optimizer updates, the arguments of schedules as "lr.decay_rate"."""
        attributes = vars(self._optimizer)  # not the property step_counter: a recorded step may not read it
        found = {"step_counter": attributes["_step_counter"]}
        for name, value in attributes.items():
            if _says_how(type(self._optimizer), name):
                found |= {name: _as_noted(value), **_arguments_of(name, value)}
        return found

    def _note(self) -> None:
        """Remember what the optimizer is, and the one that the store has."""
        self._noted = self._attributes()
        self._description = None if self._store is None else self._store.optimizer_description


def _says_how(kind: type, name: str) -> bool:
    """Return whether an attribute of an optimizer is a setting: public, or set by a property of its name."""
    of_class = getattr(kind, name.lstrip("_"), None)
    is_set = isinstance(of_class, property) and of_class.fset is not None
    return name not in OWN_ATTRIBUTES and (is_set or not name.startswith("_"))


def _arguments_of(where: str, value: object) -> dict[str, Any]:
    """Return by name what a schedule was made with, and the schedules in it; {} for anything else."""
    if not isinstance(value, DecayScheduler):
        return {}
    found: dict[str, Any] = {}
    for name in argument_names(type(value)):
        argument = getattr(value, name, None)
        found[f"{where}.{name}"] = argument
        found |= _arguments_of(f"{where}.{name}", argument)
    return found


def _as_noted(value: object) -> object:
    """Return what a setting is compared by: the text of a list of numbers or texts, which may change in place."""
    if not isinstance(value, list) or len(value) > MAX_ITEMS:
        return value
    return repr(value) if all(isinstance(item, (int, float, str)) for item in value) else value


def _are_same(now: object, noted: object) -> bool:
    """Return whether two values are one object, or numbers or texts of one type that are equal."""
    return now is noted or (
        isinstance(now, (bool, int, float, str)) and type(now) is type(noted) and now == noted
    )
