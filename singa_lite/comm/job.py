# SPDX-License-Identifier: Apache-2.0
"""The job that this process was started in, as its environment says.

What lives here: reading the variables of our launcher, MPI and Slurm, who is a worker and who a server, and how many
threads each gets. What does not: joining the job or its world (rendezvous.py), starting processes (../launch/).
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass

from ..config import env
from ..errors import CommError, is_int_text

# What started the process -> its variables (number of tasks, rank of this one), the innermost launcher first.
# Slurm: a real srun step sets SLURM_STEP_NUM_TASKS; a mere batch allocation does not.
LAUNCHERS = {
    "MPICH or Intel MPI (mpiexec)": ("PMI_SIZE", "PMI_RANK"),
    "Open MPI (mpirun)": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    "MVAPICH (mpirun)": ("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"),
    "Slurm (srun)": ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
}
# beside these, what differs between jobs; MPICH's differ by the socket behind PMI_FD alone
JOB_VARIABLES = ("PMI_FD", "PMI_PORT", "PMIX_NAMESPACE", "SLURM_JOB_ID", "SLURM_STEP_ID")
INSTALL = "pip install 'mpi4py>=4.0' 'mpich>=4.2'"  # what the extra "mpi" brings
# `singa-lite run` sets all of them
OWN_VARIABLES = ("SINGA_LITE_RENDEZVOUS_ID", "SINGA_LITE_RANK", "SINGA_LITE_WORLD_SIZE")
SIZES = (OWN_VARIABLES[-1], *(size for size, _ in LAUNCHERS.values()))
# those by which this process was one of several when it imported the package
AT_START = tuple(name for name in SIZES if os.environ.get(name, "") not in ("", "1"))


@dataclass(frozen=True)
class Job:
    """One process of a job of workers and servers: its rank, and how many there are of each.

    The workers have the ranks 0 .. num_workers-1 in the job, which are those of their world too; the servers follow.

    Attributes:
        rank: 0 <= rank < size.
        num_workers: >= 1.
        num_servers: >= 0.
        rendezvous_id: random name shared by all processes of a "shm" job, else "".
        transport: that of the Messenger to join it with (``comm.find_messengers``), "shm" (one host) or "mpi"; "local"
            is of a job of one, which has none.
    """

    rank: int = 0
    num_workers: int = 1
    num_servers: int = 0
    rendezvous_id: str = ""
    transport: str = "local"

    @property
    def size(self) -> int:
        return self.num_workers + self.num_servers

    @property
    def is_server(self) -> bool:
        return self.rank >= self.num_workers

    @property
    def peers(self) -> range:
        """Ranks of those that this process exchanges messages with: the servers, or the workers."""
        return range(self.num_workers) if self.is_server else range(self.num_workers, self.size)

    def name_of(self, rank: int) -> str:
        """Return "worker 1" or "server 0"."""
        return f"worker {rank}" if rank < self.num_workers else f"server {rank - self.num_workers}"

    def names_of(self, ranks: Sequence[int]) -> str:
        """Return "worker 0, 1" or "server 0, 1" for ranks of one role; likewise one after the other."""
        names: list[str] = []
        word = ""
        for rank in ranks:
            its_word, _, number = self.name_of(rank).partition(" ")
            names.append(number if its_word == word else f"{its_word} {number}")
            word = its_word
        return ", ".join(names)


def launched_job() -> Job:
    """Return the Job of this process without joining it; CommError as ``find_job``."""
    return launcher_and_job()[1]


def launcher_and_job() -> tuple[str, Job]:
    """Return what launched this process, "" for `singa-lite run` and for nothing, and its Job."""
    values = {name: env(name) for name in OWN_VARIABLES}
    if any(values.values()):
        for name, value in values.items():
            if value is None:
                raise CommError(f"find_world: {name} is not set; start the script with `singa-lite run`")
        rank, size = _rank_and_size(*OWN_VARIABLES[1:])
        if env("SINGA_LITE_LAUNCHER_PID") not in (None, str(os.getppid())):
            raise _not_rank_error(rank, size)
        return "", _job(rank, size, str(values["SINGA_LITE_RENDEZVOUS_ID"]), "shm")
    for launcher, (size_name, rank_name) in LAUNCHERS.items():
        if os.environ.get(size_name):
            rank, size = _rank_and_size(rank_name, size_name)
            if size > 1 and _is_child_of_mpi_rank():
                raise _not_rank_error(rank, size)
            if size == 1:  # srun or mpiexec may have started one torchrun a host
                _refuse_torchrun()
            return launcher, _job(rank, size, "", "mpi")
    if AT_START:  # each process would train alone
        raise CommError(
            f"find_world: {AT_START[0]} was set when this process started and is not now; leave the launcher's "
            "variables in the environment, or give this process a world of its own (world_size=1, or a NcclIdHolder)"
        )
    _refuse_torchrun()
    return "", _job(0, 1, "", "")


def _refuse_torchrun() -> None:
    """Raise CommError for one of several processes of torchrun, each of which would train alone."""
    size = os.environ.get("WORLD_SIZE", "")
    if os.environ.get("TORCHELASTIC_RUN_ID") and is_int_text(size) and int(size) > 1:
        raise CommError(
            f"find_world: torchrun started this process as rank {os.environ.get('RANK', '?')} of {size}, and its "
            "variables make no world here; start the script with `singa-lite run` or mpiexec, or give this process a "
            "world of its own (world_size=1, or a NcclIdHolder)"
        )


def task_of_mpi() -> tuple[str, int, int] | None:
    """Return what launched this process as one of several tasks of MPI or Slurm, which of them it is, and their number.

    None for the only task, for a batch script, for what a rank of an MPI job has started by itself, and where the
    variables are damaged.
    """
    for launcher, (size_name, rank_name) in LAUNCHERS.items():
        if os.environ.get(size_name):
            try:
                rank, size = _rank_and_size(rank_name, size_name)
            except CommError:
                return None
            return (launcher, rank, size) if size > 1 and not _is_child_of_mpi_rank() else None
    return None


def mark_mpi_rank() -> None:
    """Note in the environment that this process is the rank of its MPI job: what it starts inherits that."""
    os.environ["SINGA_LITE_MPI_RANK"] = json.dumps([os.getpid(), _mpi_variables(), _pmi_socket()])


def _is_child_of_mpi_rank() -> bool:
    """Return whether this process has the variables of a rank that started it, not of a job of its own."""
    mark = env("SINGA_LITE_MPI_RANK")
    if mark is None:
        return False
    rank_pid, variables, socket = json.loads(mark)
    if rank_pid in (os.getpid(), os.getppid()):
        return rank_pid != os.getpid()
    # a job that a rank starts has others, or at least another socket; None: closed for a child's child
    return variables == _mpi_variables() and _pmi_socket() in (None, socket)


def _mpi_variables() -> dict[str, str]:
    names = (*(name for pair in LAUNCHERS.values() for name in pair), *JOB_VARIABLES)
    return {name: os.environ[name] for name in names if name in os.environ}


def _pmi_socket() -> int | None:
    """Return the inode of MPICH's socket to the launcher; None: there is none."""
    try:
        found = os.fstat(int(os.environ["PMI_FD"]))
    except (KeyError, ValueError, OSError):
        return None
    return found.st_ino if stat.S_ISSOCK(found.st_mode) else None


def _not_rank_error(rank: int, size: int) -> CommError:
    return CommError(
        f"find_world: process {os.getpid()} is not rank {rank} of {size} but was started by it; let that "
        "process communicate, or give this one a world of its own (world_size=1, or a NcclIdHolder)"
    )


def threads_per_rank(local_size: int, num_servers: int = 0) -> int:
    """Threads for one of ``local_size`` ranks that share the cores this process may run on, but for one a server."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, (cores - num_servers) // local_size)


def _job(rank: int, size: int, rendezvous_id: str, transport: str) -> Job:
    text = env("SINGA_LITE_NUM_SERVERS") or "0"
    num_servers = _whole_number("find_job", "SINGA_LITE_NUM_SERVERS", text)
    if num_servers >= size:
        raise CommError(
            f"find_job: SINGA_LITE_NUM_SERVERS={text} leaves no worker among the {size} processes of this job; start "
            "more, or unset it"
        )
    return Job(rank, size - num_servers, num_servers, rendezvous_id, transport if size > 1 else "local")


def _rank_and_size(rank_name: str, size_name: str) -> tuple[int, int]:
    rank, size = (
        _whole_number("find_world", name, os.environ.get(name, "")) for name in (rank_name, size_name)
    )
    if not rank < size:
        raise CommError(
            f"find_world: {rank_name}={rank} in the environment must be less than {size_name}={size}"
        )
    return rank, size


def _whole_number(where: str, name: str, text: str) -> int:
    if not is_int_text(text):
        raise CommError(f"{where}: {name}={text!r} in the environment is not a whole number >= 0")
    return int(text)
