# SPDX-License-Identifier: Apache-2.0
"""Find the world and the job this process belongs to, and make its one communicator and its one messenger.

What lives here: worlds given by arguments, the choice of a transport, joining, sharing the cores. What does not: what
the environment says of the job (job.py), starting processes (../launch/), leaving the world when the process ends
(exit_hooks.py), moving data (one file for each transport).
"""

from __future__ import annotations

import os
import re
import weakref
from numbers import Integral
from typing import Any

from .. import _native, config
from ..errors import CommError, OptionError, check_choice, is_one_of
from . import find_messengers, find_transports
from .base import TIMEOUT_S, Communicator, World
from .dispatch import DispatchCommunicator
from .exit_hooks import exit_hooks, report_from_run
from .flight_signals import report_at_sigquit
from .job import Job, launcher_and_job, mark_mpi_rank, threads_per_rank
from .link import check_emulated, link_of_process
from .link_communicator import LinkCommunicator
from .local import LocalCommunicator
from .lost_ranks import forget_members, list_member
from .mpi_job import MpiJob, mpi_world, start_mpi
from .p2p import Messenger
from .parent import end_with_parent, parent_process
from .trace_file import start_trace


class NcclIdHolder:
    """A random id that the processes of one world share, made by the parent and passed to each.

    SINGA keeps an NCCL id in it and can only be forked; here it is a name (no CUDA or thread), so it may be pickled:
    Python's multiprocessing works with fork, spawn and forkserver. A process of multiprocessing that gets it as an
    argument and ends before it has joined is an error on the others at once.

    Attributes:
        rendezvous_id: 32 random hexadecimal digits.
    """

    def __init__(self) -> None:
        from multiprocessing.util import register_after_fork  # Note [imports]

        self.rendezvous_id = os.urandom(16).hex()
        register_after_fork(self, NcclIdHolder._forked)
        weakref.finalize(self, _forget_in, os.getpid(), self.rendezvous_id)

    def __repr__(self) -> str:
        return f"NcclIdHolder(rendezvous_id={self.rendezvous_id!r})"

    def __setstate__(self, attributes: dict[str, Any]) -> None:
        import multiprocessing  # Note [imports]

        self.__dict__.update(attributes)
        # the second is multiprocessing's own mark of a process that gets its arguments just now
        if parent_process() or getattr(multiprocessing.current_process(), "_inheriting", False):
            list_member(self.rendezvous_id)
            report_from_run()

    def _forked(self) -> None:
        """Find out, in every process that multiprocessing forks, whether it is to be a rank."""
        import multiprocessing  # Note [imports]

        process: Any = multiprocessing.current_process()  # Any: its arguments are private
        if any(argument is self for argument in (*process._args, *process._kwargs.values())):
            list_member(self.rendezvous_id)
            report_from_run()


def find_world(
    rendezvous_id: str | None = None,
    local_rank: int | None = None,
    world_size: int | None = None,
    timeout_s: float = TIMEOUT_S,
) -> World:
    """Return the World of this process: its rank among the workers of its job, and how many there are.

    Explicit arguments come first, then what `singa-lite run` set, then MPI or a Slurm step of more than one
    task; without any of them the world is this process alone. SINGA_LITE_NUM_SERVERS takes that many of the last
    processes of a job out of it (``find_job``), but for a world given by arguments.

    Args:
        rendezvous_id: the same on all ranks of one host, ``NcclIdHolder().rendezvous_id``; letters, digits, "-", "_".
        local_rank: 0 <= local_rank < world_size.
        world_size: number of processes, >= 1; with 1 the other two may be left out.
        timeout_s: seconds to wait for the other ranks of an MPI world.

    Raises:
        OptionError: some but not all of the arguments are given, or one is out of range.
        CommError: the environment contradicts itself, or names an MPI world that mpi4py cannot join, or this process
            is a server.
    """
    if any(given is not None for given in (rendezvous_id, local_rank, world_size)):
        return _explicit_world(rendezvous_id, local_rank, world_size)
    launcher, job = launcher_and_job()
    if job.is_server:
        if job.transport == "mpi":  # this error ends a job whose other processes wait in MPI_Init
            _mpi_job(job.rank, job.size, timeout_s)
        raise CommError(
            f"find_world: this process is {job.name_of(job.rank)} of {job.num_servers} (SINGA_LITE_NUM_SERVERS), which "
            f"has no rank in the world of the {job.num_workers} workers; let workers alone train"
        )
    if job.transport == "mpi" and job.num_workers > 1:
        return mpi_world(launcher, _mpi_job(job.rank, job.size, timeout_s), job.num_workers)
    if not job.rendezvous_id:
        return World()
    return _shm_world(job.rendezvous_id, job.rank, job.num_workers)


def find_job(timeout_s: float = TIMEOUT_S) -> Job:
    """Return the Job of this process: the processes launched together, of which the last are servers.

    How many are, SINGA_LITE_NUM_SERVERS says, the same in all. Under MPI this starts MPI.

    Args:
        timeout_s: seconds to wait for the other processes of an MPI job.

    Raises:
        CommError: the environment contradicts itself, leaves no worker, or names an MPI job that mpi4py cannot join.
    """
    launcher, job = launcher_and_job()
    if job.transport == "mpi":
        start_mpi(launcher, _mpi_job(job.rank, job.size, timeout_s))
    return job


def connect(world: World, timeout_s: float = TIMEOUT_S) -> Communicator:
    """Make the communicator of ``world``; return once every rank has joined.

    SINGA_LITE_LINK puts an emulated link around each rank (link.py).

    Raises:
        CommError: a rank has not joined within ``timeout_s`` seconds, or the transport does not work here, or the ranks
            have different links.
        OptionError: there is no such transport, or a link that is wrong or is not for this transport.
    """
    link = link_of_process()
    if world.transport == LocalCommunicator.transport:
        alone = LocalCommunicator(world, timeout_s)
        start_trace(alone)
        return alone if link is None else LinkCommunicator(alone, link)
    transports = {word: kind for word, kind in find_transports().items() if kind.joins_worlds}
    check_choice("connect", "world.transport", world.transport, transports)
    check_emulated(link, world.transport)
    hooks = exit_hooks()
    with hooks.joining():
        host = transports[world.transport](world, timeout_s)
        communicator = DispatchCommunicator(host) if link is None else LinkCommunicator(host, link)
    hooks.communicators.append(communicator)
    end_with_parent()
    share_cores(world.local_size)
    report_at_sigquit()
    start_trace(communicator.host)
    return communicator


def connect_messenger(job: Job, timeout_s: float = TIMEOUT_S) -> Messenger:
    """Make the messenger of a process of ``job``; return once all workers and servers have joined.

    Raises:
        CommError: a process has not joined within ``timeout_s`` seconds, the transport does not work here, or the job
            has no servers.
        OptionError: there is no such transport, or SINGA_LITE_LINK is set: messages have no emulated link.
    """
    if config.env("SINGA_LITE_LINK"):
        raise OptionError(
            "connect_messenger: SINGA_LITE_LINK is for collectives of the workers alone, not for messages to servers; "
            "unset it, or start no servers"
        )
    if job.num_servers == 0:
        raise CommError(
            f"connect_messenger: this job of {job.num_workers} workers has no servers to send to; start more processes "
            "and set SINGA_LITE_NUM_SERVERS"
        )
    check_choice("connect_messenger", "job.transport", job.transport, find_messengers())
    hooks = exit_hooks()
    with hooks.joining():
        messenger = find_messengers()[job.transport](job, timeout_s)
    hooks.messengers.append(messenger)
    end_with_parent()
    share_cores(1 if job.is_server else messenger.local_workers, messenger.local_servers, job.is_server)
    return messenger


def process_communicator(
    rendezvous_id: str | None = None,
    local_rank: int | None = None,
    world_size: int | None = None,
    timeout_s: float | None = None,
) -> Communicator:
    """Return the one communicator of this process, made at the first call and closed at exit.

    Args:
        rendezvous_id, local_rank, world_size: see ``find_world``; None: as the process was started.
        timeout_s: seconds a rank waits for a peer; None: SINGA_LITE_TIMEOUT_S, else 300. The first call
            decides for the process.

    Raises:
        CommError: the arguments contradict the world that the process has joined already, or see ``connect``.
        OptionError: see ``find_world``.
    """
    state = config.state
    explicit = any(given is not None for given in (rendezvous_id, local_rank, world_size))
    if state.communicator is not None and state.communicator_pid == os.getpid():
        if explicit:
            _check_same(_explicit_world(rendezvous_id, local_rank, world_size), state.communicator.world)
        return state.communicator
    with state.communicator_lock:
        # made by another thread meanwhile
        if state.communicator is not None and state.communicator_pid == os.getpid():
            return process_communicator(rendezvous_id, local_rank, world_size, timeout_s)
        timeout_s = _timeout(timeout_s)
        world = find_world(rendezvous_id, local_rank, world_size, timeout_s)
        if state.communicator is not None and world.size > 1 and _same(world, state.communicator.world):
            raise CommError(
                f"process_communicator: this process was forked from rank {world.rank} after that had joined its "
                "world; communicate in the parent, or start workers before it joins"
            )
        state.communicator = connect(world, timeout_s)
        state.communicator_pid = os.getpid()
        return state.communicator


def process_messenger(timeout_s: float | None = None) -> Messenger:
    """Return the one messenger of this process, made at the first call and closed at exit.

    All workers and servers of the job must call it.

    Args:
        timeout_s: seconds a call waits for a peer; None: SINGA_LITE_TIMEOUT_S, else 300. The first call decides for
            the process.

    Raises:
        CommError: see ``find_job`` and ``connect_messenger``, or this process was forked from one that has joined.
    """
    state = config.state
    if state.messenger is None or state.messenger_pid != os.getpid():
        timeout_s = _timeout(timeout_s)
        job = find_job(timeout_s)
        if state.messenger is not None:
            raise CommError(
                f"process_messenger: this process was forked from {job.name_of(job.rank)} after that had joined its "
                "job; exchange messages in the parent"
            )
        state.messenger = connect_messenger(job, timeout_s)
        state.messenger_pid = os.getpid()
    messenger: Messenger = state.messenger
    return messenger


def share_cores(local_size: int, num_servers: int = 0, is_server: bool = False) -> None:
    """Give this rank's BLAS and OpenMP its part of the cores, unless OMP_NUM_THREADS already does.

    Without this, N ranks run N threads per core, and spinning barriers make each 2 to 10 times slower.

    Args:
        local_size: ranks on this host that compute; each gets max(1, (cores - num_servers) // local_size) threads.
        num_servers: servers on this host, which get one thread each.
        is_server: whether this process is one of them.
    """
    if local_size + num_servers > 1 and not os.environ.get("OMP_NUM_THREADS"):
        import threadpoolctl  # here, because it costs 20 ms and most processes are alone

        _native.load("_kernels")  # its OpenMP can be limited only once it is loaded
        limit = 1 if is_server else threads_per_rank(local_size, num_servers)
        threadpoolctl.threadpool_limits(limits=limit)


def _forget_in(pid: int, rendezvous_id: str) -> None:
    if os.getpid() == pid:  # not in a forked copy
        forget_members(rendezvous_id)


def _mpi_job(rank: int, size: int, timeout_s: float) -> MpiJob:
    hooks = exit_hooks()
    mark_mpi_rank()
    hooks.mpi_job = hooks.mpi_job or MpiJob(rank, size, timeout_s, hooks.make_last_calls)
    return hooks.mpi_job


def _explicit_world(rendezvous_id: str | None, local_rank: int | None, world_size: int | None) -> World:
    given = f"rendezvous_id={rendezvous_id!r}, local_rank={local_rank!r}, world_size={world_size!r}"
    if is_one_of(world_size, (1,)) and is_one_of(local_rank, (None, 0)):
        return World()
    if rendezvous_id is None or local_rank is None or world_size is None:
        raise OptionError(
            f"find_world: give rendezvous_id, local_rank and world_size together, or none; got {given}"
        )
    are_ints = isinstance(local_rank, Integral) and isinstance(world_size, Integral)
    if not are_ints or not 0 <= local_rank < world_size:
        raise OptionError(f"find_world: local_rank must be in 0..world_size-1; got {given}")
    return _shm_world(rendezvous_id, local_rank, world_size)


def _shm_world(rendezvous_id: str, rank: int, size: int) -> World:
    if not isinstance(rendezvous_id, str) or not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", rendezvous_id):
        raise OptionError(
            f"find_world: rendezvous_id {rendezvous_id!r} must be 1 to 64 letters, digits, '-' or '_'"
        )
    return World(rank, size, rank, size, rendezvous_id, "shm") if size > 1 else World()


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


def _same(world: World, other: World) -> bool:
    return (world.rendezvous_id, world.rank, world.size) == (other.rendezvous_id, other.rank, other.size)


def _check_same(requested: World, joined: World) -> None:
    if not _same(requested, joined):
        raise CommError(
            f"process_communicator: this process is rank {joined.rank} of {joined.size} (rendezvous id "
            f"{joined.rendezvous_id!r}) already and cannot become rank {requested.rank} of {requested.size} ("
            f"rendezvous id {requested.rendezvous_id!r}); a process has one world"
        )
