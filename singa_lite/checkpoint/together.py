# SPDX-License-Identifier: Apache-2.0
"""Doing something on all ranks that succeeds or fails on all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..comm.base import Communicator
from ..errors import CheckpointError, SingaLiteError

Json = Any


def together(communicator: Communicator, where: str, action: Callable[[], Json]) -> list[Json]:
    """Call ``action`` and return what it returned on every rank; a collective.

    Args:
        communicator: of the ranks that call this.
        where: whose name errors begin with, equal on all ranks.
        action: gives a JSON value, or raises a SingaLiteError or MemoryError.

    Raises:
        SingaLiteError, MemoryError: what ``action`` raised on this rank. CheckpointError: it raised on another.
    """
    value, failure, text = None, None, None
    try:
        value = action()
    except (SingaLiteError, MemoryError) as error:
        failure, text = error, str(error) or type(error).__name__
    everyone = communicator.all_gather_object([value, text], name=where)
    if failure is not None:
        raise failure
    for rank, (_, text) in enumerate(everyone):
        if text is not None:
            raise CheckpointError(f"{where}: rank {rank} failed: {text}")
    return [each for each, _ in everyone]
