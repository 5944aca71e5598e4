# SPDX-License-Identifier: Apache-2.0
"""The only mutable globals of the package, and the environment switches, in one table.

Everything here is process-wide, but for ``this_thread``. Modules read ``config.state`` at the moment of use and
never copy it.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from .errors import OptionError

# Environment switch -> what it does. Read through env(), so that a misspelt name fails at once.
SWITCHES = {
    "SINGA_LITE_RANK": "rank of this process, set by `singa-lite run`",
    "SINGA_LITE_WORLD_SIZE": "number of processes, set by `singa-lite run`",
    "SINGA_LITE_NUM_SERVERS": "how many processes of a job are servers, the last ones (default 0)",
    "SINGA_LITE_RENDEZVOUS_ID": "name shared by the ranks of one world, set by `singa-lite run`",
    "SINGA_LITE_LAUNCHER_PID": "the `singa-lite run` whose child has these, set by itself",
    "SINGA_LITE_MPI_RANK": "the process that is a rank of an MPI job, and which, for its children, set by itself",
    "SINGA_LITE_PROGRESS": "file in which ranks write how far they are, set by `singa-lite run`",
    "SINGA_LITE_CHECKPOINT": "folder of a job's checkpoints, set by `singa-lite run --checkpoint`",
    "SINGA_LITE_RESTART": "how often the job was started again, set by `singa-lite run` (0 at first)",
    "SINGA_LITE_WRAPPER": "what `singa-lite run -H` tells rank_wrapper.py on each host",
    "SINGA_LITE_LOST_FD": "where a rank's watchdog tells rank_wrapper.py that the rank is lost, set by that",
    "SINGA_LITE_TIMEOUT_S": "seconds a rank waits for a peer before CommError (default 300)",
    "SINGA_LITE_LINK": "emulated link of each rank, such as 100mbit,1ms (comm/link.py), set by `singa-lite run --link`",
    "SINGA_LITE_LOG_DIR": "folder for reports of what every rank was doing, set by `singa-lite run --log-dir`",
    "SINGA_LITE_FLIGHT_RECORDER": "off: ranks do not record their last collectives, to measure what that costs",
    "SINGA_LITE_TRACE": "folder for what the processes' steps did, set by `singa-lite run --trace`",
    "SINGA_LITE_HOST": "what this process calls its host, so that one machine can play several (split_by_host)",
    "SINGA_LITE_NCCL_LIB": "libnccl.so.2 to open, instead of the one of nvidia-nccl-cu12/-cu13 or the loader's",
    "SINGA_LITE_NCCL_BLOCKING": "1: NCCL's calls return sooner, but its start and connections have no deadline",
    "SINGA_LITE_CUDA_LIB": "libcuda.so.1 to open, instead of the loader's",
    "SINGA_LITE_CUDNN_LIB": "path of libcudnn.so.9, instead of searching for it",
    "SINGA_LITE_WINOGRAD": "on or off: convolutions of 3 x 3 by Winograd's filtering (default: where it is faster)",
    "SINGA_LITE_CHECK_RECORDS": "after how many replays a step is run and compared with its record (default never)",
    "SINGA_LITE_CACHE": "folder for fetched data (default ~/.cache/singa_lite)",
    "MNIST_DIR": "folder with the four MNIST IDX files, instead of fetching them",
}


class OfThread(threading.local):
    """The state of each thread: a thread that evaluates or loads data does not take part in another's step.

    Attributes:
        training: True while operators record for ``backward`` and dropout and batch norm train.
        recording: False inside ``autograd.no_grad()``.
        recorder: what records this thread's step (graph.recorder.Recorder), else None.
        autocast: the precision of its operators (autograd.autocast.Autocast), else None.
        outer_autocasts: those of the blocks around the one that it is in.
        capture: what captures its kernels as a CUDA graph (backend.cuda.capture.Numbers), else None.
        clock: where the time of its steps goes (graph.clock.StepClock), made at first use.
        model: whose step runs (model.Model), else None.
        before_backward: called as a backward pass begins, in the first step of a model that was not compiled.
        before_kernel: called with the inputs of each kernel, in a backward pass that must not read some.
        called: the model whose call runs, in training or evaluation, else None.
        on_read: called with the name of a watched attribute before a read (record.watched), else None.
    """

    training: bool = False
    recording: bool = True
    recorder: Any = None  # Any: types of modules above
    autocast: Any = None
    outer_autocasts: tuple[Any, ...] = ()
    capture: Any = None
    clock: Any = None
    model: Any = None
    before_backward: Callable[[], None] | None = None
    before_kernel: Callable[[tuple[Any, ...]], None] | None = None
    called: Any = None
    on_read: Any = None


@dataclass
class State:
    """The mutable globals.

    Attributes:
        numbers: ever new ones, growing, on any thread: recorded calls and records have theirs.
        recorders: those that record a step now, each of another thread (graph.recorder.Recorder).
        graph_buffers: those that hold what was recorded by hand, or record it (graph.buffer.GraphBuffer).
        communicator: the process's communicator (comm.base.Communicator), made at first use.
        communicator_pid: the process that made it; a forked child must not use its parent's.
        communicator_lock: held while it is made.
        messenger: the process's messenger (comm.p2p.Messenger), made at first use.
        messenger_pid: likewise the process that made it.
        store: the process's store of a job (kvstore.store.KVStore), made at first use.
        store_pid: likewise the process that made it.
        store_arguments: what it was made with.
        jobs: id of a model -> what is known of its job checkpoints (checkpoint.job.JobState).
        dist_opts: each DistOpt of several ranks (opt.dist).
        trainers: id of an optimizer -> the gluon.SharedOptimizer of the Trainer that has got it last.
        trace: what writes this process's part of a trace (graph.trace.TraceWriter), made at first use.
        watched_parent: the process that is killed when its parent has ended (comm.parent).
        flight_recorders: those of its communicators (comm.flight_recorder.FlightRecorder).
        reports_at_sigquit: the process that does (comm.flight_signals).
        writes_stacks: likewise the process that does for others (comm.stacks).
        failed_thread: the last that failed before this process joined (comm.failed_threads), "" for none.
        exit_hooks: what this process does for its peers when it ends (comm.exit_hooks.ExitHooks), made when it joins.
        nccl_deadline: time.monotonic() from which on nobody waits for NCCL's end where this process ends, or None.
        gpu_communicators: those of NCCL (comm.nccl.NcclCommunicator), which host waits for a GPU check for errors.
        default_device: the CPU device (device.Device), made at first use.
        cuda_devices: GPU number -> its device, likewise.
        has_looked_for_bfloat16: whether a CPU without instructions for it has been reported (autograd.autocast).
        rounded: the step whose copies of parameters are fresh (graph.rounded.RoundedCopies), else None.
        rounded_lock: held while a step's copies become fresh or are forgotten.
        device_lock: held while a device is made.
        lock_owners: id of each that has a lock of its own, ``_lock``, which a forked child makes new -> the owner.
        works_in_flight: ids of collectives that were started and not waited for (comm.work.Work).
        changes: id of each array that owns memory which was changed in place -> graph.changes.Changes, the latest last.
        replayed_changes: those by replays of each record that is there (graph.changes.ReplayedChanges), by their ids.
        noticed_changes: what has changed while each backward pass runs that runs now, by its id.
        exposed: id of each array that Python has as ``Tensor.data`` -> a weak reference to it (graph.rounded).
        allow_tf32: whether CUDA devices may round float32 factors to TF32's 10 bits (device.allow_tf32).
        benchmark_convolutions: whether cuDNN's algorithms are timed first (device.benchmark_convolutions).
    """

    recorders: set[Any] = field(default_factory=set)  # Any: a type of a module above
    graph_buffers: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)  # Any: likewise
    numbers: Iterator[int] = field(default_factory=itertools.count)
    communicator: Any = None  # Any: a type of a module above; comm/rendezvous.py owns it
    communicator_pid: int = 0
    communicator_lock: Any = field(default_factory=threading.RLock)
    messenger: Any = None  # Any: likewise
    messenger_pid: int = 0
    store: Any = None  # Any: likewise
    store_pid: int = 0
    store_arguments: dict[str, Any] = field(default_factory=dict)
    jobs: dict[int, Any] = field(default_factory=dict)  # Any: likewise
    dist_opts: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)  # Any: likewise
    # of ids, as a script's optimizer may have no hash; Any: likewise
    trainers: weakref.WeakValueDictionary[int, Any] = field(default_factory=weakref.WeakValueDictionary)
    trace: Any = None  # Any: likewise
    watched_parent: int = 0
    flight_recorders: tuple[weakref.ref[Any], ...] = ()  # Any: likewise
    reports_at_sigquit: int = 0
    writes_stacks: int = 0
    failed_thread: str = ""
    exit_hooks: Any = None  # Any: likewise; comm/exit_hooks.py owns it
    nccl_deadline: float | None = None
    gpu_communicators: tuple[weakref.ref[Any], ...] = ()  # Any: likewise
    default_device: Any = None  # Any: likewise; device.py owns it
    cuda_devices: dict[int, Any] = field(default_factory=dict)
    has_looked_for_bfloat16: bool = False
    rounded: Any = None  # Any: likewise; graph/rounded.py owns it
    rounded_lock: Any = field(default_factory=threading.RLock)  # Any: a function's result on Python 3.10
    device_lock: Any = field(default_factory=threading.RLock)  # Any: likewise
    lock_owners: weakref.WeakValueDictionary[int, Any] = field(default_factory=weakref.WeakValueDictionary)
    works_in_flight: set[int] = field(default_factory=set)
    changes: OrderedDict[int, Any] = field(default_factory=OrderedDict)  # Any: likewise
    replayed_changes: dict[int, Any] = field(default_factory=dict)  # Any: likewise
    noticed_changes: dict[int, dict[int, Any]] = field(default_factory=dict)
    exposed: dict[int, weakref.ref[Any]] = field(default_factory=dict)
    allow_tf32: bool = False
    benchmark_convolutions: bool = True


state = State()
this_thread = OfThread()


def _renew_locks() -> None:
    """Make new locks in a child that is forked: a thread that has held one of the old ones is not there."""
    state.communicator_lock, state.rounded_lock, state.device_lock = (threading.RLock() for _ in range(3))
    for owner in list(state.lock_owners.values()):
        owner._lock = threading.RLock()
    state.works_in_flight.clear()  # they are the parent's
    if state.rounded is not None:  # it may have been changing
        state.rounded.forget()


os.register_at_fork(after_in_child=_renew_locks)


def of_face(name: str) -> Any:
    """Return a module of the package's public face, imported now if it was not yet, for names that are found below it.

    Layers are in autograd too, as SINGA has them, and Tensors have operators, whatever a script has imported.
    """
    return getattr(sys.modules[__package__], name)


def env(switch: str, default: str | None = None) -> str | None:
    """Return the environment switch ``switch``, or ``default`` when unset or empty."""
    if switch not in SWITCHES:
        raise KeyError(f"{switch} is not in config.SWITCHES")
    return os.environ.get(switch) or default


def is_on(switch: str, default: bool = False) -> bool:
    """Return whether the environment switch ``switch`` is on or 1 rather than off or 0; ``default`` if unset or empty.

    Raises:
        OptionError: it is something else.
    """
    value = env(switch)
    if value not in (None, "on", "1", "off", "0"):
        raise OptionError(f"{switch}={value}: expected on or off")
    return default if value is None else value in ("on", "1")
