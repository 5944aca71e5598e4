# SPDX-License-Identifier: Apache-2.0
"""What SINGA's scripts import from ``singa_wrap``; nothing here computes or communicates by itself.

from singa_lite import singa_wrap as singa
holder = singa.NcclIdHolder()
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .comm.base import is_cuda_array
from .comm.rendezvous import NcclIdHolder, process_communicator
from .comm.work import Array, Work
from .device import get_num_gpus
from .errors import DTypeError, OptionError, check_bool
from .tensor import Tensor
from .tensor.checks import listed

__all__ = ["USE_CUDA", "USE_DIST", "USE_DNNL", "Communicator", "NcclIdHolder"]  # noqa: F822 - the first: __getattr__

# what can be had here, as SINGA's scripts check before they choose a device; USE_CUDA is evaluated below
USE_DIST = True
USE_DNNL = False


def __getattr__(name: str) -> bool:
    """``USE_CUDA``, whether there is a GPU: found out when a script reads it, since that opens CUDA."""
    if name == "USE_CUDA":
        return get_num_gpus() > 0
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class Communicator:
    """SINGA's communicator, a view of the one communicator of this process.

    ``Communicator(buffSize)`` joins the world the process was started in (`singa-lite run`, mpiexec, srun);
    ``Communicator(local_rank, world_size, nccl_id, buffSize)`` names it, for Python's multiprocessing.
    Unlike SINGA's, its calls have ended when they return, an array may have any size, and errors are raised.

    Args:
        arguments: one of the two lists above. ``buffSize`` (elements, > 0) changes nothing here: it is
            DistOpt that fills buckets.

    Attributes:
        world_size, global_rank, local_rank: of this process.

    Raises:
        OptionError: other arguments. CommError: no world can be made, or the process has joined another.
    """

    def __init__(self, *arguments: int | NcclIdHolder) -> None:
        match arguments:
            case (int(buffer_size),):
                joined = process_communicator()
            case (int(local_rank), int(world_size), NcclIdHolder() as holder, int(buffer_size)):
                joined = process_communicator(holder.rendezvous_id, local_rank, world_size)
            case _:
                raise OptionError(
                    "Communicator: expected (buffSize) or (local_rank, world_size, nccl_id, buffSize), got "
                    f"({', '.join(type(argument).__name__ for argument in arguments)})"
                )
        if not buffer_size > 0:
            raise OptionError(f"Communicator: buffSize = {buffer_size} must be > 0 elements")
        self._joined = joined
        self._kept: list[Array] = []
        self.world_size = joined.size
        self.global_rank = joined.rank
        self.local_rank = joined.local_rank

    def synch(self, tensor: Tensor | Array) -> None:
        """Replace ``tensor`` (any shape) by its SUM over the ranks, in place; not the mean."""
        self._sum([_raw(tensor)])

    def fusedSynch(self, tensors: Sequence[Tensor | Array], send: bool = True) -> None:
        """Do ``synch`` for several tensors; with ``send=False`` they wait for the next call with ``send=True``."""
        check_bool("Communicator", "send", send)
        # SINGA's scripts name a kept one when they send
        for array in [_raw(tensor) for tensor in listed(tensors)]:
            if not any(array is kept for kept in self._kept):
                self._kept.append(array)
        if send:
            self._sum(self._kept)
            self._kept = []

    def wait(self) -> None:
        """Nothing to wait for: ``synch`` and ``fusedSynch`` have ended when they return."""

    def _sum(self, arrays: list[Array]) -> None:
        work: Work = self._joined.all_reduce(arrays, "sum", name="singa_wrap.Communicator")
        work.wait()


def _raw(tensor: Tensor | Array) -> Array:
    array = tensor.array if isinstance(tensor, Tensor) else tensor
    if not isinstance(array, np.ndarray) and not is_cuda_array(array):
        raise DTypeError(
            f"Communicator: expected a Tensor, a numpy or a CUDA array, got {type(tensor).__name__}"
        )
    return array
