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
        action: gives a JSON value, or raises a SingaLiteError.

    Raises:
        SingaLiteError: what ``action`` raised on this rank. CheckpointError: it raised on another.
    """
    value, failure = None, None
    try:
        value = action()
    except SingaLiteError as error:
        failure = error
    everyone = communicator.all_gather_object([value, None if failure is None else str(failure)], name=where)
    if failure is not None:
        raise failure
    for rank, (_, text) in enumerate(everyone):
        if text is not None:
            raise CheckpointError(f"{where}: rank {rank} failed: {text}")
    return [each for each, _ in everyone]
