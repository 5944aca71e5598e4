# SPDX-License-Identifier: Apache-2.0
"""Finding and making a store by its name, and running a server of the job.

What lives here: which class a name means in this job, and the one store of a process that has peers.
"""

from __future__ import annotations

import os
import sys
from threading import TIMEOUT_MAX
from typing import Any

from .. import config
from ..comm.base import World
from ..comm.exit_hooks import exit_hooks
from ..comm.job import launched_job
from ..comm.local import LocalCommunicator
from ..comm.rendezvous import process_communicator, process_messenger
from ..error_stream import text_of
from ..errors import CommError, OptionError, check_choice, check_int, check_number
from ..plugins import subclasses
from .base import KVStoreBase
from .dist import BIG_ARRAY, DistStore
from .replica import LOCAL_NAMES, ReplicaStore
from .server import Server
from .store import KVStore

SYNC_NAMES = ("dist", "dist_sync", "dist_device_sync", "dist_sync_device")
BASE: type[Any] = KVStoreBase  # Any: an abstract class, which mypy would not have as an argument
ASYNC_NAMES = ("dist_async", "dist_async_device", "dist_device_async")


def create(
    name: str = "local",
    *,
    staleness: int | None = None,
    big_array: int = BIG_ARRAY,
    timeout_s: float | None = None,
    alone: bool = False,
) -> KVStoreBase:
    """Return the store that a name stands for. On a server of the job: serve, then end the process with exit code 0.

    Args:
        name: "local", "device" and the like keep values in this process. "dist", "dist_sync" and the like sum over the
            workers of the job, on its servers, or without servers by an all-reduce; "dist_async" updates by each push
            as it comes, and needs servers. Or a name of a ``KVStoreBase`` of the script.
        staleness: with "dist_async", how many pushes of a key a worker may be ahead of the slowest before its pull
            waits, >= 0; None: any number.
        big_array: elements from which a key is cut into a part for each server.
        timeout_s: seconds a call waits for a worker or server; None: SINGA_LITE_TIMEOUT_S, else 300. The first that
            joins decides for the process.
        alone: use a store of this process alone in a job of several workers, which then train apart.

    Returns:
        The store; a dist store is one for each process: a second call with equal arguments gives it again.

    Raises:
        OptionError: an unknown name, an argument out of range, "dist_async" without servers, a local store in a job of
            several workers, or a second dist store with other arguments.
        CommError: not all workers and servers have joined in time, the workers' arguments differ, or this process has
            closed its dist store.
    """
    own = {each: kind for kind in subclasses(BASE) for each in vars(kind).get("names", ())}
    check_choice("kvstore.create", "name", name, (*LOCAL_NAMES, *SYNC_NAMES, *ASYNC_NAMES, *own))
    big_array = check_int("kvstore.create", "big_array", big_array, 1)
    if staleness is not None:
        staleness = check_int("kvstore.create", "staleness", staleness, 0)
        if name not in ASYNC_NAMES:
            raise OptionError(
                f"kvstore.create: staleness is for dist_async; {name} has no worker ahead of another"
            )
    if timeout_s is not None:
        check_number("kvstore.create", "timeout_s", timeout_s, 1e-3, TIMEOUT_MAX)
    if name in own:
        return own[name]()
    if name in LOCAL_NAMES:
        return _local(name, alone)
    return _dist({"name": name, "staleness": staleness, "big_array": big_array}, timeout_s)


def serve(timeout_s: float | None = None) -> None:
    """Do a server's work until all workers of the job have closed.

    Raises:
        CommError: a worker died, failed or disagreed with another, or this process is not a server.
    """
    messenger = process_messenger(timeout_s)
    if not messenger.job.is_server:
        raise CommError(
            f"kvstore: {messenger.name} is not a server; start more processes with `singa-lite run -s`"
        )
    try:
        Server(messenger).serve()
    except Exception as error:  # a script may catch it; the workers get it in any case
        messenger.abort(text_of(error))
        raise
    messenger.close()


def _local(name: str, alone: bool) -> ReplicaStore:
    job = launched_job()
    if job.is_server:
        raise OptionError(
            f"kvstore.create: {name!r} is a store of one process, and this one is {job.name_of(job.rank)}; start the "
            "script without servers, or create a dist store in it"
        )
    if job.num_workers > 1 and not alone:
        raise OptionError(
            f"kvstore.create: {name!r} is a store of this process, one of {job.num_workers} workers, which would train "
            "apart; use 'dist_sync', or alone=True if they should"
        )
    return ReplicaStore(name, LocalCommunicator(World()))


def _dist(arguments: dict[str, Any], timeout_s: float | None) -> KVStore:
    state = config.state
    if state.store is not None and state.store_pid == os.getpid():
        if state.store_arguments != arguments:
            raise OptionError(
                f"kvstore.create: this process has a store made with {state.store_arguments}; it cannot have another, "
                f"with {arguments}"
            )
        made: KVStore = state.store
        if made.is_closed:
            raise CommError(
                f"kvstore.create: {made!r} was closed, and its servers have left; close it at the end"
            )
        return made
    job = launched_job()
    if job.is_server:
        serve(timeout_s)
        sys.exit(0)
    if arguments["name"] in ASYNC_NAMES and job.num_servers == 0:
        raise OptionError(
            f"kvstore.create: {arguments['name']!r} needs servers; start the script with `singa-lite run -n "
            f"{job.num_workers} -s 1`"
        )
    store: KVStore
    if job.num_servers == 0:
        store = ReplicaStore(arguments["name"], process_communicator(timeout_s=timeout_s))
    else:
        messenger = process_messenger(timeout_s)
        workers = process_communicator(timeout_s=timeout_s)
        store = DistStore(messenger=messenger, communicator=workers, **arguments)
        exit_hooks().before_leaving(store.leave)
    state.store, state.store_pid, state.store_arguments = store, os.getpid(), arguments
    return store
