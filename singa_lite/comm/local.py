# SPDX-License-Identifier: Apache-2.0
"""The world of one: every collective ends where it began, so a script needs no second code path."""

from __future__ import annotations

import time

import numpy as np

from .base import Communicator, Operation
from .gpu_arrays import is_cuda_array
from .wire import WIRE_DTYPES, narrow, widen
from .work import Array, FinishedWork, Times, Work


class LocalCommunicator(Communicator):
    """Collectives among one rank, on numpy and CUDA arrays.

    ``wire_dtype`` rounds here too, as it would on the way to a peer.
    """

    transport = "local"

    @classmethod
    def describe(cls) -> str:
        return "works: one process"

    def _check_kind(self, array: object) -> None:
        if not is_cuda_array(array):
            super()._check_kind(array)

    def _start(self, operation: Operation, array: Array, out: Array, scale: Array | None) -> Work:
        now = time.perf_counter()
        if operation.wire_dtype is not None:
            with np.errstate(all="ignore"):  # beyond the wire's range is infinite by contract
                widen(narrow(array, WIRE_DTYPES[operation.wire_dtype], scale), scale, out=out)
        elif out is not array:
            out[...] = array
        return FinishedWork(Times(now, now, now))  # whoever is alone needs not ask (stopping.py)

    def _new_array(self, shape: tuple[int, ...], like: Array) -> Array:
        return like.reshape(shape).copy()

    def _new_group(self, ranks: list[int], name: str) -> LocalCommunicator:
        return LocalCommunicator(self.world, self.timeout_s)
