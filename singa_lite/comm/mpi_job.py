# SPDX-License-Identifier: Apache-2.0
"""The MPI job around the ranks: starting MPI, this process's rank in it, leaving it, ending all of it.

What lives here: what concerns the job as a whole. What does not: collectives (mpi.py), what happens when this
process cannot act (mpi_watchdog.py).
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..config import of_face
from ..errors import CommError
from .base import World
from .host import this_host
from .job import INSTALL

OWN_OUTPUT_S = 0.3  # mpiexec's time to pass on what this rank has printed last, which Abort may lose
FINAL_OUTPUT_S = 2.0  # the other ranks' time to print their error before Abort ends the job
ABORT_S = 2.0  # MPI_Abort takes milliseconds; if it hangs, the watchdog ends the job


class MpiJob:
    """This process as a rank of an MPI job, with the watchdog that ends the job when the rank cannot.

    Args:
        rank, size: as the launcher gave them.
        timeout_s: seconds to wait for the other ranks when MPI starts and when it ends.
        before_finalize: called at the beginning of MPI.Finalize(), which the script may call, too.

    Attributes:
        is_stuck: a call that needs every rank has not returned, so MPI_Finalize would wait for ever.
    """

    def __init__(
        self, rank: int, size: int, timeout_s: float, before_finalize: Callable[[], None] = lambda: None
    ) -> None:
        self.rank, self.size, self.timeout_s = rank, size, timeout_s
        self._before_finalize = before_finalize
        self.is_stuck = False
        self._mpi: Any = None  # Any: mpi4py's module
        reader, self._pipe = os.pipe()
        os.set_inheritable(reader, True)
        program = str(Path(__file__).with_name("mpi_watchdog.py"))
        lost_error = f"rank {rank} of {size} (process {os.getpid()}) ended without leaving the MPI job"
        arguments = [sys.executable, "-I", "-S", program, str(os.getpid()), str(reader), lost_error]
        os.posix_spawn(sys.executable, arguments, os.environ)
        os.close(reader)

    @property
    def failed_line(self) -> str:
        """The line by which rank_wrapper.py knows that an exception is about to end this process."""
        return f"singa_lite: rank {self.rank} of {self.size} failed:\n"

    def start(self) -> Any:
        """Start MPI; every rank must.

        Returns:
            mpi4py's module.

        Raises:
            CommError: see ``load_mpi``. If a rank is missing after ``timeout_s`` the watchdog prints that and ends
                the job, as this call cannot be interrupted.
        """
        error = CommError(
            f"rank {self.rank} of {self.size}: MPI_Init: not every rank of the MPI job started MPI within "
            f"{self.timeout_s:g} s"
        )
        self._message_watchdog(self.timeout_s, f"{type(error).__name__}: {error}")
        self._mpi = load_mpi()
        # MPI.Finalize() begins by deleting the attributes of COMM_SELF, the one that was set last first
        attribute = self._mpi.Comm.Create_keyval(delete_fn=lambda *_: self._before_finalize())
        self._mpi.COMM_SELF.Set_attr(attribute, None)
        self._message_watchdog(float("inf"), "running")
        return self._mpi

    @contextlib.contextmanager
    def joining(self) -> Iterator[None]:
        """Inside: calls that need every rank; after an exception MPI can only be aborted."""
        self.is_stuck = True
        yield
        self.is_stuck = False

    def leave(self) -> None:
        """Finalize MPI, or abort the job if a rank cannot take part."""
        if self.is_stuck:
            time.sleep(OWN_OUTPUT_S)
            self.abort()
        error = CommError(
            f"rank {self.rank} of {self.size}: MPI_Finalize: not every rank of the MPI job ended within "
            f"{self.timeout_s:g} s"
        )
        self._message_watchdog(self.timeout_s, f"{type(error).__name__}: {error}")
        if is_running(self._mpi):
            self._mpi.Finalize()
        with contextlib.suppress(OSError):
            os.write(self._pipe, b"left\n")

    def abort_after_final_output(self) -> None:
        """End every process of the job with exit code 1; the peers get ``FINAL_OUTPUT_S`` to print their errors.

        MPI itself would wait for a rank that failed for ever.
        """
        if is_running(self._mpi):  # else the peers wait in MPI_Init and cannot print anything
            self._message_watchdog(FINAL_OUTPUT_S + ABORT_S, "")
            time.sleep(FINAL_OUTPUT_S)
        self.abort()

    def abort(self) -> None:
        """End every process of the job with exit code 1, now."""
        self._message_watchdog(ABORT_S, "")
        if is_running(self._mpi):
            self._mpi.COMM_WORLD.Abort(1)
        os._exit(1)

    def _message_watchdog(self, seconds: float, error: str) -> None:
        """Send a message that ends the job with ``error`` unless another one follows within ``seconds``."""
        with contextlib.suppress(OSError):  # it was killed
            os.write(self._pipe, f"{seconds} {error}\n".encode())


def load_mpi() -> Any:
    """Import mpi4py's MPI module, which starts MPI; Any: it need not be installed.

    Raises:
        CommError: mpi4py is missing, finds no MPI library, or does not allow threads.
    """
    try:
        import mpi4py

        is_ours = "mpi4py.MPI" not in sys.modules
        if is_ours:  # MpiJob.leave finalizes; mpi4py would in a forked child as well
            mpi4py.rc.finalize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # RuntimeError: mpi4py is there but no libmpi
        raise CommError(f"mpi: mpi4py cannot be used ({str(error).splitlines()[0]}); {INSTALL}") from error
    if not MPI.Is_initialized():  # mpi4py.rc.initialize is False
        MPI.Init_thread()
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        if is_ours:
            MPI.Finalize()
        raise CommError(
            "mpi: MPI was started without THREAD_MULTIPLE; leave mpi4py.rc.threads at its default"
        )
    return MPI


def describe_mpi() -> str:
    """Return the name of the MPI library, or why there is none. MPI is not started, as that may need a launcher."""
    if importlib.util.find_spec("mpi4py") is None:
        return f"no: mpi4py is not installed; {INSTALL}"
    try:
        import mpi4py

        before, mpi4py.rc.initialize = mpi4py.rc.initialize, False
        from mpi4py import MPI

        mpi4py.rc.initialize = before
    except (ImportError, RuntimeError) as error:
        return f"no: mpi4py cannot load an MPI library ({str(error).splitlines()[0]}); {INSTALL}"
    return f"works under mpiexec: {MPI.Get_library_version().strip(chr(0)).splitlines()[0]}"


def start_mpi(launcher: str, job: MpiJob) -> Any:
    """Start MPI and return mpi4py's module.

    Args:
        launcher: what started the process, for errors.
        job: with the rank and size of its environment; MPI's must be the same.

    Raises:
        CommError: mpi4py cannot be used, or belongs to another MPI than the one that started the process, or a rank
            did not join in time.
    """
    where = f"find_world: {launcher} started this process as rank {job.rank} of {job.size}, but"
    try:
        mpi = job.start()
    except CommError as error:
        raise CommError(f"{where} {error}") from error
    world = mpi.COMM_WORLD
    if (world.Get_rank(), world.Get_size()) != (job.rank, job.size):
        library = mpi.Get_library_version().rstrip("\0").splitlines()[0]
        raise CommError(
            f"{where} {library} says rank {world.Get_rank()} of {world.Get_size()}; start it with the mpiexec of "
            "that library (under Slurm: srun --mpi=pmi2 or pmix)"
        )
    return mpi


def mpi_world(launcher: str, job: MpiJob, num_workers: int) -> World:
    """Start MPI as ``start_mpi`` does, and return this process's World among the job's first ``num_workers`` processes.

    Local ranks count the processes that share memory. A worker that does not join in time is a CommError.
    """
    mpi = start_mpi(launcher, job)
    with job.joining():
        if num_workers == job.size:
            return world_of(mpi, mpi.COMM_WORLD, job.timeout_s)
        workers = workers_of(mpi, num_workers, job.timeout_s)
        world = world_of(mpi, workers, job.timeout_s)
        workers.Free()
        return world


def workers_of(mpi: Any, num_workers: int, timeout_s: float) -> Any:
    """Return a new mpi4py communicator of the first ``num_workers`` processes of COMM_WORLD, all of which call this."""
    everyone = mpi.COMM_WORLD
    if num_workers == everyone.Get_size():
        return within(timeout_s, "connect", everyone.Dup)
    group = everyone.Get_group().Incl(range(num_workers))
    return within(timeout_s, "connect", lambda: everyone.Create_group(group))


def world_of(mpi: Any, comm: Any, timeout_s: float) -> World:
    """Return the World of an mpi4py communicator."""
    host = within(timeout_s, "find_world", lambda: comm.Split_type(mpi.COMM_TYPE_SHARED, key=comm.Get_rank()))
    world = World(comm.Get_rank(), comm.Get_size(), host.Get_rank(), host.Get_size(), "", "mpi")
    host.Free()
    return world


def check_versions(comm: Any, timeout_s: float) -> None:
    """Raise CommError unless all processes of an mpi4py communicator have one version of the package."""
    mine = (this_host(), of_face("__version__"))
    everyone = within(timeout_s, "connect", lambda: comm.allgather(mine))
    first_host, first = everyone[0]
    for rank, (host, version) in enumerate(everyone):
        if version != first:
            raise CommError(
                f"MPI: rank {rank} on {host} has singa_lite {version}, rank 0 on {first_host} has {first}; install "
                "one version on all hosts"
            )


def within(timeout_s: float, where: str, call: Callable[[], Any]) -> Any:
    """Return ``call()``, a blocking MPI call that needs all ranks, or raise CommError after ``timeout_s``."""
    from concurrent.futures import Future  # Note [imports]
    from concurrent.futures import TimeoutError as FutureTimeoutError

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
        raise CommError(f"{where}: not every rank of the MPI world joined within {timeout_s:g} s") from None


def is_running(mpi: Any) -> bool:
    """Return whether MPI can be called: it was started, and nobody has called MPI.Finalize()."""
    return mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized()
