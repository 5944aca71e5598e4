# SPDX-License-Identifier: Apache-2.0
"""One array that a store keeps: its value, its optimizer, and how a sum of gradients changes it.

What lives here: the same for a whole array in a worker and for a slice on a server. What does not: where sums come
from (replica.py, server.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..errors import CheckpointError
from ..opt.base import Optimizer, create
from ..tensor import Tensor
from .calls import Arrays, Key

Description = Mapping[str, Any]  # of an optimizer, see describe
Updater = Callable[[Any, Tensor, Tensor], None]


def describe(optimizer: Optimizer) -> dict[str, Any]:
    """Return ``Optimizer.describe``, and "step_counter" where the optimizer has made steps."""
    steps = optimizer.step_counter
    return optimizer.describe() | ({"step_counter": steps} if steps else {})


def make_optimizer(description: Description) -> Optimizer:
    """Return the optimizer that was described; OptionError if this process knows no such class."""
    arguments = dict(description)
    steps = arguments.pop("step_counter", 0)
    made = create(arguments.pop("class"), **arguments)
    made.step_counter = steps
    return made


class StoredArray:
    """A value, and the optimizer that updates it, of its own: so its steps and schedules count the updates of this key.

    Args:
        key: int or text.
        value: its Tensor; this object owns the memory.
    """

    def __init__(self, key: Key, value: Tensor) -> None:
        self.key = key
        self.param = value
        self.param.name = str(key)
        self.optimizer: Optimizer | None = None
        self.updater: Updater | None = None

    def set_optimizer(self, description: Description, lr: float | None = None) -> None:
        """Update the value by a new optimizer, without state, from now on; ``lr`` None is the one described."""
        self.updater = None
        self.optimizer = make_optimizer(description)
        if lr is not None:
            self.optimizer.lr = lr
        self.optimizer.prepare({str(self.key): self.param}, {})

    def set_lr(self, lr: float) -> None:
        """Set the optimizer's learning rate."""
        assert self.optimizer is not None
        self.optimizer.lr = lr

    def apply(self, total: Any) -> None:
        """Update the value by the raw array ``total``, or replace it where there is no optimizer.

        Args:
            total: shape and dtype of the value, on its device; becomes the value's memory if it replaces it.
        """
        if self.updater is not None:
            self.updater(self.key, Tensor.wrap(total, self.param.device), self.param)
        elif self.optimizer is not None:
            self.optimizer.update_pairs([(self.param, Tensor.wrap(total, self.param.device))])
            self.optimizer.step()
        else:
            self.param.array = total

    def get_states(self) -> Arrays:
        """Return the optimizer's state by name; {} without one."""
        if self.optimizer is None:
            return {}
        return {
            name.removeprefix(f"{self.param.name}:"): a for name, a in self.optimizer.get_states().items()
        }

    def set_states(self, states: Arrays) -> None:
        """Continue from ``get_states``; CheckpointError if they are those of another optimizer or array."""
        if self.optimizer is None:
            raise CheckpointError(f"key {self.key!r}: there is no optimizer to load states into")
        mine = self.optimizer.get_states()
        prefix = f"{self.param.name}:"
        self.optimizer.set_states({name: states[name.removeprefix(prefix)] for name in mine})
