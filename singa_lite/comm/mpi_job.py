# SPDX-License-Identifier: Apache-2.0
"""The MPI job around the ranks: starting MPI, this process's place in it, ending all of it.

What lives here: what concerns the job as a whole. What does not: collectives (mpi.py).
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

from ..errors import CommError
from .base import TIMEOUT_S, World

LAST_WORDS_S = 2.0  # the other ranks' time to print their error before Abort ends the job


def load_mpi() -> Any:
    """Import mpi4py's MPI module, which starts MPI; Any: it need not be installed.

    Raises:
        CommError: mpi4py is missing, finds no MPI library, or was told not to allow threads.
    """
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # RuntimeError: mpi4py is there but no libmpi
        raise CommError(
            f"mpi: mpi4py cannot be used ({str(error).splitlines()[0]}); pip install 'singa-lite[mpi]'"
        ) from error
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise CommError(
            "mpi: MPI was started without THREAD_MULTIPLE; leave mpi4py.rc.threads at its default"
        )
    return MPI


def mpi_world(launcher: str, rank: int, size: int) -> World:
    """Return this process's place in COMM_WORLD, local ranks by shared memory and rank order.

    Args:
        launcher: what started the process, for errors.
        rank, size: what its environment says; MPI must say the same.

    Raises:
        CommError: mpi4py cannot be used, or belongs to another MPI than the one that started the process.
    """
    try:
        mpi = load_mpi()
    except CommError as error:
        raise CommError(
            f"find_world: {launcher} started this process as rank {rank} of {size}, but {error}"
        ) from error
    world = mpi.COMM_WORLD
    if (world.Get_rank(), world.Get_size()) != (rank, size):
        library = mpi.Get_library_version().rstrip("\0").splitlines()[0]
        raise CommError(
            f"find_world: {launcher} started this process as rank {rank} of {size}, but {library} says rank "
            f"{world.Get_rank()} of {world.Get_size()}; start it with the mpiexec of that library (under Slurm: "
            "srun --mpi=pmi2 or pmix)"
        )
    return place_in(mpi, world)


def place_in(mpi: Any, comm: Any) -> World:
    """This process's place in an mpi4py communicator."""
    host = within(TIMEOUT_S, "find_world", lambda: comm.Split_type(mpi.COMM_TYPE_SHARED, key=comm.Get_rank()))
    place = World(comm.Get_rank(), comm.Get_size(), host.Get_rank(), host.Get_size(), "", "mpi")
    host.Free()
    return place


def within(timeout_s: float, where: str, call: Callable[[], Any]) -> Any:
    """Return ``call()``, a blocking MPI call that needs all ranks, or raise CommError after ``timeout_s``."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    try:
        return future.result(min(timeout_s, threading.TIMEOUT_MAX))
    except FutureTimeoutError:
        raise CommError(f"{where}: not every rank of the MPI world came within {timeout_s:g} s") from None


def end_job() -> None:
    """End every process of the MPI job with exit code 1, as MPI itself would wait for a failed rank for ever.

    The peers get ``LAST_WORDS_S`` to print what they have to say.
    """
    time.sleep(LAST_WORDS_S)
    abort_job()


def abort_job() -> None:
    """MPI_Abort, after removing the shared-memory files that MPICH would leave behind, 2 MB a job."""
    with contextlib.suppress(OSError), open("/proc/self/maps") as maps:
        for path in set(re.findall(r"/dev/shm/(?:mpich_shm_|sm_segment\.)\S+", maps.read())):
            os.unlink(path)
    load_mpi().COMM_WORLD.Abort(1)
