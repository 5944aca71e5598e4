# SPDX-License-Identifier: Apache-2.0
"""Transports: one file each, found by listing this folder."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeVar

from ..plugins import classes_in

if TYPE_CHECKING:
    from .base import Communicator
    from .p2p import Messenger

Contract = TypeVar("Contract", "Communicator", "Messenger")


@cache
def find_transports() -> Mapping[str, type[Communicator]]:
    """Return every word of ``World.transport`` and the class that it chooses; the folder is read once."""
    from .base import Communicator

    return _by_word(Communicator)  # type: ignore[type-abstract]


@cache
def find_messengers() -> Mapping[str, type[Messenger]]:
    """Return every word of ``Job.transport`` and the class that it chooses; the folder is read once."""
    from .p2p import Messenger

    return _by_word(Messenger)  # type: ignore[type-abstract]


def _by_word(contract: type[Contract]) -> Mapping[str, type[Contract]]:
    transports = [kind for kind in classes_in(__name__, contract) if "transport" in vars(kind)]
    # the contract itself has an empty word
    return MappingProxyType({kind.transport: kind for kind in transports if kind.transport})
