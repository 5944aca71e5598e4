# SPDX-License-Identifier: Apache-2.0
"""The world of one: every collective ends where it began, so a script needs no second code path."""

from __future__ import annotations

import numpy as np

from .base import Array, Communicator, FinishedWork, ReduceOp, Work, is_cuda_array
from .wire import WIRE_DTYPES, narrow, widen


class LocalCommunicator(Communicator):
    """Collectives among one rank, on numpy and CUDA arrays.

    ``wire_dtype`` rounds here too, as it would on the way to a peer.
    """

    def _check_kind(self, array: object) -> None:
        if not is_cuda_array(array):
            super()._check_kind(array)

    def _all_reduce(self, array: Array, op: ReduceOp, wire_dtype: str | None, name: str) -> Work:
        if wire_dtype is not None:
            with np.errstate(over="ignore"):  # beyond the wire's range is infinite by contract
                array[...] = widen(narrow(array, WIRE_DTYPES[wire_dtype]))
        return FinishedWork()

    def _reduce(self, array: Array, op: ReduceOp, root: int, name: str) -> Work:
        return FinishedWork()

    def _broadcast(self, array: Array, root: int, name: str) -> Work:
        return FinishedWork()

    def _all_gather(self, array: Array, name: str) -> Work:
        return FinishedWork(array[np.newaxis].copy())

    def _reduce_scatter(self, array: Array, op: ReduceOp, name: str) -> Work:
        return FinishedWork(array.copy())

    def _new_group(self, ranks: list[int], name: str) -> LocalCommunicator:
        return LocalCommunicator(self.world, self.timeout_s)
