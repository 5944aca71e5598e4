# SPDX-License-Identifier: Apache-2.0
"""The contract of a key-value store: what a ``gluon.Trainer`` needs of one. The package's own are in store.py."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from ..errors import check_choice
from .calls import Keys


class KVStoreBase(ABC):
    """Base of the stores that a ``gluon.Trainer`` can use. A subclass with ``names`` is found by ``kvstore.create``.

    Attributes:
        names: what ``create`` calls it, one text or several; it is made without arguments.
    """

    names: ClassVar[tuple[str, ...]] = ()
    _can_update: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        if isinstance(cls.names, str):
            cls.names = (cls.names,)

    @property
    def type(self) -> str:
        """The name it was created by."""
        return self.names[0] if self.names else type(self).__name__.lower()

    @property
    def rank(self) -> int:
        """The number of this worker."""
        return 0

    @property
    def num_workers(self) -> int:
        """How many workers use the store."""
        return 1

    @classmethod
    def is_capable(cls, capability: str) -> bool:
        """Return whether the store can update the values it keeps ("optimizer"); OptionError for another word."""
        check_choice("is_capable", "capability", capability, ("optimizer",))
        return cls._can_update

    @abstractmethod
    def broadcast(self, key: Keys, value: Any, out: Any, priority: int = 0) -> None:
        """Set ``out`` to worker 0's ``value`` of each key."""

    @abstractmethod
    def pushpull(self, key: Keys, value: Any, out: Any = None, priority: int = 0) -> Any:
        """Set ``out`` (None: ``value``) to the sum of all workers' ``value`` of each key."""
