# SPDX-License-Identifier: Apache-2.0
"""The only mutable globals of the package, and the environment switches, in one table.

Everything here is process-wide, but for what ``OfThread`` holds. Modules read ``config.state`` at the moment of use and
never copy it.
"""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

# Environment switch -> what it does. Read through env(), so that a misspelt name fails at once.
SWITCHES = {
    "SINGA_LITE_RANK": "rank of this process, set by `singa-lite run`",
    "SINGA_LITE_WORLD_SIZE": "number of processes, set by `singa-lite run`",
    "SINGA_LITE_TICKET": "name shared by the ranks of one world, set by `singa-lite run`",
    "SINGA_LITE_TIMEOUT_S": "seconds a rank waits for a peer before CommError (default 300)",
    "SINGA_LITE_NCCL_LIB": "libnccl.so.2 to open, instead of the one of nvidia-nccl-cu12/-cu13 or the loader's",
    "SINGA_LITE_NCCL_BLOCKING": "1: NCCL's calls return sooner, but its start and connections have no deadline",
    "SINGA_LITE_CUDA_LIB": "libcuda.so.1 to open, instead of the loader's",
    "SINGA_LITE_NCCL_REGISTER": "0: buffers are ordinary GPU memory, not NCCL's registered (default 1)",
    "SINGA_LITE_CUDNN_LIB": "path of libcudnn.so.9, instead of searching for it",
    "SINGA_LITE_CACHE": "folder for fetched data (default ~/.cache/singa_lite)",
    "MNIST_DIR": "folder with the four MNIST IDX files, instead of fetching them",
}


class OfThread(threading.local):
    """What each thread has of its own: one that evaluates or loads data is no part of the step of another."""

    training: bool = False
    recording: bool = True
    recorder: Any = None
    hosting: Any = None
    rehearsal: Any = None


@dataclass
class State:
    """The mutable globals.

    Attributes:
        training: True while operators of this thread record for ``backward`` and dropout/batch-norm train.
        numbers: ever new ones, growing, on any thread: recorded calls and records have theirs.
        recording: False inside ``autograd.no_grad()`` of this thread.
        recorder: what listens to every kernel of this thread while a step is recorded (graph.Recorder), else None.
        hosting: that recorder while it runs a host call, when it does not listen.
        rehearsal: what is asked instead of the device while this thread captures a CUDA graph, or repeats its host
            calls (backend.cuda.capture.CapturedCalls), else None.
        of_thread: where these of a thread are kept.
        communicator: the process's communicator (comm.base.Communicator), made at first use.
        communicator_pid: the process that made it; a forked child must not use its parent's.
        gpu_communicators: those of NCCL (comm.nccl.NcclCommunicator), which waits of the host for a GPU ask for errors.
        default_device: the CPU device (device.Device), made at first use.
        cuda_devices: GPU number -> its device, likewise.
        allow_tf32: whether CUDA devices may round float32 factors to TF32's 10 bits (device.allow_tf32).
    """

    of_thread: OfThread = field(default_factory=OfThread)
    numbers: Iterator[int] = field(default_factory=itertools.count)
    communicator: Any = None  # Any: a type of a higher floor; comm/rendezvous.py owns it
    communicator_pid: int = 0
    gpu_communicators: tuple[weakref.ref[Any], ...] = ()  # Any: likewise
    default_device: Any = None  # Any: likewise; device.py owns it
    cuda_devices: dict[int, Any] = field(default_factory=dict)
    allow_tf32: bool = False

    @property
    def training(self) -> bool:
        return self.of_thread.training

    @training.setter
    def training(self, training: bool) -> None:
        self.of_thread.training = training

    @property
    def recording(self) -> bool:
        return self.of_thread.recording

    @recording.setter
    def recording(self, recording: bool) -> None:
        self.of_thread.recording = recording

    @property
    def recorder(self) -> Any:  # Any: a type of a higher floor; graph.py owns it
        return self.of_thread.recorder

    @recorder.setter
    def recorder(self, recorder: Any) -> None:
        self.of_thread.recorder = recorder

    @property
    def hosting(self) -> Any:  # Any: likewise
        return self.of_thread.hosting

    @hosting.setter
    def hosting(self, recorder: Any) -> None:
        self.of_thread.hosting = recorder

    @property
    def rehearsal(self) -> Any:  # Any: likewise; backend/cuda/capture.py owns it
        return self.of_thread.rehearsal

    @rehearsal.setter
    def rehearsal(self, rehearsal: Any) -> None:
        self.of_thread.rehearsal = rehearsal


state = State()


def env(switch: str, default: str | None = None) -> str | None:
    """Return the environment switch ``switch``, or ``default`` when unset or empty."""
    if switch not in SWITCHES:
        raise KeyError(f"{switch} is not in config.SWITCHES")
    return os.environ.get(switch) or default
