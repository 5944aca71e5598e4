# SPDX-License-Identifier: Apache-2.0
"""The communicator that scripts get: numpy arrays are sent by the host's transport, CUDA arrays by NCCL.

What lives here: the choice by an array's kind. What does not: moving data (local.py, shm.py, mpi.py, nccl.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..graph.recorder import unrecorded
from .base import Communicator, Graph, Operation, ReduceOp
from .gpu_arrays import is_cuda_array
from .local import LocalCommunicator
from .nccl import NcclCommunicator, device_of
from .stop_requests import StopRequests
from .work import Array, Traffic, Work, uncounted


class DispatchCommunicator(Communicator):
    """Both sides of one world; NCCL's is made, by all ranks together, at the first collective on a CUDA array.

    A world or a group of one needs no NCCL.

    Args:
        host: for numpy arrays, objects and barriers; closed with this one.
        parent: the communicator this one is a group of.
        name: of a group, for reports.
    """

    def __init__(
        self, host: Communicator, parent: DispatchCommunicator | None = None, name: str = "of GPUs"
    ) -> None:
        self.host, self._name = host, name  # first: it keeps the traffic
        super().__init__(host.world, host.timeout_s)
        self.flight_recorder = host.flight_recorder
        self.stop_requests = host.stop_requests
        # native: the first NCCL communicator of a world and its groups, on whose stream they all run
        self._first: list[Any] = [] if parent is None else parent._first
        self._nccl: NcclCommunicator | None = None
        # for CUDA arrays of one rank: its host communicator may know numpy's alone
        self._alone = LocalCommunicator(host.world, host.timeout_s)

    @property
    def traffic(self) -> Traffic:  # type: ignore[override]
        """What was sent so far, on both sides, and of objects and barriers, which the host's side sends."""
        return self.host.traffic

    @traffic.setter
    def traffic(self, traffic: Traffic) -> None:
        self.host.traffic = traffic

    def __repr__(self) -> str:
        return repr(self.host)

    def side(self, array: object) -> Communicator:
        """Return the communicator that moves ``array``."""
        if self._nccl is not None and type(array) is self._nccl.kind:
            return self._nccl
        if not is_cuda_array(array):
            return self.host
        if self.size == 1:
            return self._alone
        if self._nccl is None:
            device = device_of(array)
            above = self._first[0] if self._first else None
            with unrecorded(), uncounted(self.host):
                self._nccl = NcclCommunicator(self.host, device, parent=above, name=self._name)
            self._first[:] = [above or self._nccl._native]
            self.carries_requests = False
        return self._nccl

    def barrier(self, *, name: str = "barrier") -> None:
        self.host.barrier(name=name)

    def all_gather_object(self, value: Any, *, name: str = "all_gather_object") -> list[Any]:
        return self.host.all_gather_object(value, name=name)

    def follow_graph(self, graph: Graph, last: Work) -> tuple[Callable[[], None], Callable[[], None]]:
        return (self._nccl or self.host).follow_graph(graph, last)

    def share_stop_requests(self, requests: StopRequests) -> None:
        super().share_stop_requests(requests)
        self.host.share_stop_requests(requests)

    @property
    def has_failed(self) -> bool:
        return self._has_failed or self.host.has_failed

    def abort(self, reason: str) -> None:
        if self._nccl is not None:
            self._nccl.abort(reason)
        self.host.abort(reason)

    def close(self) -> None:
        self.close_gpu()
        self.host.close()

    def close_gpu(self) -> None:
        """Leave NCCL, while the peers can still be reached."""
        if self._nccl is not None:
            self._nccl.close()

    def _start(self, operation: Operation, array: Array, out: Array, scale: Array | None) -> Work:
        return self.side(array)._start(operation, array, out, scale)

    def _new_array(self, shape: tuple[int, ...], like: Array) -> Array:
        return self.side(like)._new_array(shape, like)

    def _new_group(self, ranks: list[int], name: str) -> DispatchCommunicator | None:
        host = self.host._new_group(ranks, name)
        return None if host is None else DispatchCommunicator(host, self, name)

    def _check_array(self, array: Any, op: ReduceOp | None = None, *, writes: bool = True) -> None:
        if self._nccl is not None and type(array) is self._nccl.kind:
            self._nccl._check_array(array, op, writes=writes)
        else:
            super()._check_array(array, op, writes=writes)

    def _check_kind(self, array: object) -> None:
        if not is_cuda_array(array):
            self.host._check_kind(array)
