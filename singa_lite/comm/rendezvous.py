# SPDX-License-Identifier: Apache-2.0
"""Find the world this process belongs to, and make its one communicator.

What lives here: reading what launched the process (explicit arguments, our launcher, MPI, Slurm), the choice
of a transport, sharing the cores, leaving the world at exit. What does not: starting processes (launch.py),
moving data (local.py, shm.py, mpi.py, nccl.py).
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import re
import secrets
import sys
from collections.abc import Mapping
from multiprocessing.util import Finalize
from traceback import format_exception
from types import TracebackType

from .. import _native, config
from ..errors import CommError, OptionError
from .base import TIMEOUT_S, Communicator, World
from .dispatch import DispatchCommunicator
from .local import LocalCommunicator
from .mpi import MpiCommunicator, leave_job
from .mpi_job import end_job, mpi_world
from .shm import ShmCommunicator

# What started the process -> its variables (number of tasks, rank of this one), the innermost launcher first.
# Slurm: a real srun step sets SLURM_STEP_NUM_TASKS; a mere batch allocation does not.
LAUNCHERS = {
    "MPICH or Intel MPI (mpiexec)": ("PMI_SIZE", "PMI_RANK"),
    "Open MPI (mpirun)": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    "MVAPICH (mpirun)": ("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"),
    "Slurm (srun)": ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
}


class NcclIdHolder:
    """A random ticket that the processes of one world share, made by the parent and passed to each.

    SINGA keeps an NCCL id in it and can only be forked; here it is a name and nothing else (no CUDA, file or
    thread), so it may be pickled: Python's multiprocessing works with fork, spawn and forkserver.

    Attributes:
        ticket: 32 random hexadecimal digits.
    """

    def __init__(self) -> None:
        self.ticket = secrets.token_hex(16)

    def __repr__(self) -> str:
        return f"NcclIdHolder(ticket={self.ticket!r})"


def find_world(
    ticket: str | None = None, local_rank: int | None = None, world_size: int | None = None
) -> World:
    """Return this process's place among the processes of its job.

    Explicit arguments come first, then what `singa-lite run` set, then MPI or a Slurm step of more than one
    task; without any of them the world is this process alone.

    Args:
        ticket: name shared by the ranks of one host, ``NcclIdHolder().ticket``; letters, digits, "-" and "_".
        local_rank: 0 <= local_rank < world_size.
        world_size: number of processes, >= 1; with 1 the other two may be left out.

    Raises:
        OptionError: some but not all of the arguments are given, or one is out of range.
        CommError: the environment contradicts itself, or names an MPI world that mpi4py cannot join.
    """
    if (ticket, local_rank, world_size) != (None, None, None):
        return _explicit_world(ticket, local_rank, world_size)
    names = ("SINGA_LITE_TICKET", "SINGA_LITE_RANK", "SINGA_LITE_WORLD_SIZE")
    values = {name: config.env(name) for name in names}
    if any(values.values()):
        for name, value in values.items():
            if value is None:
                raise CommError(f"find_world: {name} is not set; start the script with `singa-lite run`")
        rank, size = _rank_and_size(*names[1:])
        return _shm_world(str(values["SINGA_LITE_TICKET"]), rank, size)
    for launcher, (size_name, rank_name) in LAUNCHERS.items():
        if os.environ.get(size_name):
            rank, size = _rank_and_size(rank_name, size_name)
            return mpi_world(launcher, rank, size) if size > 1 else World()
    return World()


def connect(world: World, timeout_s: float = TIMEOUT_S) -> Communicator:
    """Make the communicator of ``world``; returns once every rank has come.

    Raises:
        CommError: a rank has not come within ``timeout_s`` seconds, or the transport does not work here.
    """
    if world.transport == "local":
        return LocalCommunicator(world, timeout_s)
    if world.transport == "mpi":
        host: Communicator = MpiCommunicator(world, timeout_s)
    elif sys.platform != "linux":
        raise CommError(f"connect: transport shm works on Linux only, not on {sys.platform}; use MPI there")
    else:
        host = ShmCommunicator(world, timeout_s)
    communicator = DispatchCommunicator(host)
    share_cores(world.local_size)
    fail_together(communicator)
    return communicator


def process_communicator(
    ticket: str | None = None,
    local_rank: int | None = None,
    world_size: int | None = None,
    timeout_s: float | None = None,
) -> Communicator:
    """Return the one communicator of this process, made at the first call and closed at exit.

    Args:
        ticket, local_rank, world_size: see ``find_world``; None: as the process was started.
        timeout_s: seconds a rank waits for a peer; None: SINGA_LITE_TIMEOUT_S, else 300. The first call
            decides for the process.

    Raises:
        CommError: the arguments contradict the world that the process has joined already, or see ``connect``.
        OptionError: see ``find_world``.
    """
    state = config.state
    explicit = (ticket, local_rank, world_size) != (None, None, None)
    if state.communicator is not None and state.communicator_pid == os.getpid():
        if explicit:
            _check_same(_explicit_world(ticket, local_rank, world_size), state.communicator.world)
        return state.communicator
    world = find_world(ticket, local_rank, world_size)
    if state.communicator is not None and world.size > 1 and _same(world, state.communicator.world):
        raise CommError(
            f"process_communicator: this process was forked from rank {world.rank} after that had joined its "
            "world; communicate in the parent, or start workers before it joins"
        )
    state.communicator = connect(world, _timeout(timeout_s))
    state.communicator_pid = os.getpid()
    return state.communicator


def share_cores(local_size: int) -> None:
    """Give this rank's BLAS and OpenMP its part of the cores, unless OMP_NUM_THREADS already says how many.

    Without this, N ranks run N threads per core, and spinning barriers make each 2 to 10 times slower.

    Args:
        local_size: ranks on this host; each gets max(1, cores // local_size) threads.
    """
    if local_size > 1 and not os.environ.get("OMP_NUM_THREADS"):
        import threadpoolctl  # here, because it costs 20 ms and most processes are alone

        _native.load("_kernels")  # its OpenMP can be limited only once it is loaded
        threadpoolctl.threadpool_limits(limits=threads_per_rank(local_size))


def fail_together(communicator: DispatchCommunicator) -> None:
    """Leave the world when this process ends, and say why when it ends by an uncaught exception.

    The peers then raise CommError at once instead of waiting. Under MPI, which would wait for ever for a rank
    that failed, the exception is printed under this rank's number and the whole job ended.
    """
    pid, before = os.getpid(), sys.excepthook

    def report(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        is_mpi = isinstance(communicator.host, MpiCommunicator) and pid == os.getpid()
        if is_mpi:  # mpiexec says not whose line it is, and mixes lines: all in one write
            lines = [f"singa_lite: rank {communicator.rank} of {communicator.size} failed:\n"]
            sys.stderr.write("".join(lines + format_exception(kind, error, traceback)))
        if not is_mpi or before is not sys.__excepthook__:
            before(kind, error, traceback)
        if pid != os.getpid():  # a forked child: its parent is well
            return
        communicator.abort(f"{kind.__name__}: {error}")
        _flush()
        if is_mpi:
            end_job()

    def leave() -> None:
        if pid != os.getpid():
            return
        _flush()
        communicator.close_gpu()
        if isinstance(communicator.host, MpiCommunicator):
            leave_job(communicator.host)
        communicator.close()

    sys.excepthook = report
    atexit.register(leave)
    if multiprocessing.parent_process() is not None:  # a forked one ends without atexit (before Python 3.14)
        Finalize(None, leave, exitpriority=10)


def threads_per_rank(local_size: int) -> int:
    """Threads for one of ``local_size`` ranks that share the cores this process may run on."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // local_size)


def _explicit_world(ticket: str | None, local_rank: int | None, world_size: int | None) -> World:
    given = f"ticket={ticket!r}, local_rank={local_rank!r}, world_size={world_size!r}"
    if world_size == 1 and local_rank in (None, 0):
        return World()
    if ticket is None or local_rank is None or world_size is None:
        raise OptionError(
            f"find_world: give ticket, local_rank and world_size together, or none; got {given}"
        )
    if not 0 <= local_rank < world_size:
        raise OptionError(f"find_world: local_rank must be in 0..world_size-1; got {given}")
    return _shm_world(ticket, local_rank, world_size)


def _shm_world(ticket: str, rank: int, size: int) -> World:
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", ticket):
        raise OptionError(f"find_world: ticket {ticket!r} must be 1 to 64 letters, digits, '-' or '_'")
    return World(rank, size, rank, size, ticket, "shm") if size > 1 else World()


def _rank_and_size(
    rank_name: str, size_name: str, environ: Mapping[str, str] = os.environ
) -> tuple[int, int]:
    numbers = []
    for name in (rank_name, size_name):
        text = environ.get(name, "")
        if not re.fullmatch(r"[0-9]+", text):
            raise CommError(f"find_world: {name}={text!r} in the environment is not a whole number >= 0")
        numbers.append(int(text))
    rank, size = numbers
    if not rank < size:
        raise CommError(
            f"find_world: {rank_name}={rank} in the environment must be less than {size_name}={size}"
        )
    return rank, size


def _timeout(timeout_s: float | None) -> float:
    if timeout_s is not None:
        return timeout_s
    text = config.env("SINGA_LITE_TIMEOUT_S")
    try:
        seconds = float(text) if text is not None else TIMEOUT_S
    except ValueError:
        seconds = -1.0
    if not seconds > 0:
        raise CommError(
            f"process_communicator: SINGA_LITE_TIMEOUT_S={text!r} must be a number of seconds > 0"
        )
    return seconds


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # pythonw and some daemons have none
            stream.flush()


def _same(world: World, other: World) -> bool:
    return (world.ticket, world.rank, world.size) == (other.ticket, other.rank, other.size)


def _check_same(asked: World, joined: World) -> None:
    if not _same(asked, joined):
        raise CommError(
            f"process_communicator: this process is rank {joined.rank} of {joined.size} (ticket "
            f"{joined.ticket!r}) already and cannot become rank {asked.rank} of {asked.size} (ticket "
            f"{asked.ticket!r}); a process has one world"
        )
