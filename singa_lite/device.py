# SPDX-License-Identifier: Apache-2.0
"""Devices: where arrays live, which backend computes on them, and the random stream they own.

The ``create_*`` names are SINGA's. ``create_device(local_rank)`` is ours: a GPU if there is one, else the
CPU, so that one script serves both. Asking for a GPU that is not there is a DeviceError, never a silent CPU.
"""

from __future__ import annotations

from collections.abc import Callable

from .backend.base import Backend
from .backend.cpu import CpuBackend
from .config import state
from .errors import DeviceError, OptionError
from .profile import TimeProfile


class Device:
    """One CPU or GPU.

    Args:
        kind: "cpu" or "cuda".
        index: GPU number, -1 for the CPU.
        backend: the kernels for arrays that live here.
    """

    def __init__(self, kind: str, index: int, backend: Backend) -> None:
        self.kind = kind
        self.backend = backend
        self._index = index
        self._seed = 0
        self._counter = 0
        self.profile = TimeProfile()

    def id(self) -> int:
        """GPU number; -1 for the CPU."""
        return self._index

    def __repr__(self) -> str:
        return "Device(cpu)" if self.kind == "cpu" else f"Device({self.kind}:{self._index})"

    def __reduce__(self) -> tuple[Callable[..., Device], tuple[int, ...]]:
        """A copy or a pickle of a tensor is on the same device."""
        return (get_default_device, ()) if self.kind == "cpu" else (create_cuda_gpu_on, (self._index,))

    def Sync(self) -> None:
        """Wait until all work given to the device has ended (SINGA's name)."""
        self.backend.synchronize()

    def SetVerbosity(self, verbosity: int) -> None:
        """Measure replayed steps: 0 not at all, 1 by phase, 2 every call, 3 synchronisation only (SINGA's levels)."""
        self.profile.set_verbosity(verbosity)

    def SetSkipIteration(self, skip_iteration: int) -> None:
        """Leave out the first replays of each record (5 at the start)."""
        if skip_iteration < 0:
            raise OptionError(f"SetSkipIteration: {skip_iteration} must be >= 0")
        self.profile.skip_iteration = skip_iteration

    def PrintTimeProfiling(self) -> None:
        """Print the seconds a replay spends where, as SetVerbosity chose."""
        print(self.profile.text(), flush=True)

    def SetRandSeed(self, seed: int) -> None:
        """Restart the device's random stream from ``seed`` (0 <= seed < 2**64; 0 is where it starts)."""
        if not 0 <= int(seed) < 2**64:
            raise OptionError(f"SetRandSeed: seed = {seed} must be in 0 .. 2**64 - 1")
        self._seed, self._counter = int(seed), 0

    def next_random(self) -> tuple[int, int]:
        """Claim the next piece of the random stream, as (seed, counter) for a random kernel."""
        self._counter += 1
        if state.recorder is not None:
            state.recorder.draw(self)
        return self._seed, self._counter

    def get_random_state(self) -> tuple[int, int]:
        """(seed, counter); what a checkpoint keeps."""
        return self._seed, self._counter

    def set_random_state(self, random_state: tuple[int, int]) -> None:
        """Go on from where ``get_random_state`` was taken."""
        self._seed, self._counter = int(random_state[0]), int(random_state[1])


def get_default_device() -> Device:
    """The CPU, where Tensors live unless told otherwise. All CPU devices are this one."""
    if state.default_device is None:
        state.default_device = Device("cpu", -1, CpuBackend())
    default: Device = state.default_device
    return default


def create_cpu_device() -> Device:
    """The CPU (SINGA's name for ``get_default_device``)."""
    return get_default_device()


def create_device(local_rank: int = 0) -> Device:
    """The GPU of this rank if the machine has one, else the CPU.

    Args:
        local_rank: place among the ranks of this host, ``DistOpt(...).local_rank``.
    """
    if get_num_gpus() == 0:
        return get_default_device()
    return create_cuda_gpu_on(local_rank % get_num_gpus())


def get_num_gpus() -> int:
    """Number of GPUs this build can use; 0 while it has no CUDA backend."""
    return 0


def create_cuda_gpu_on(device_id: int) -> Device:
    """GPU number ``device_id``.

    Raises:
        DeviceError: this build or this machine has no such GPU.
    """
    raise DeviceError(
        f"create_cuda_gpu_on({device_id}): this build of singa_lite computes on the CPU only; "
        "use device.create_device(local_rank), which takes a GPU where there is one and the CPU elsewhere"
    )


def create_cuda_gpu() -> Device:
    """GPU number 0; raises as ``create_cuda_gpu_on``."""
    return create_cuda_gpu_on(0)


def create_cuda_gpus(num: int) -> list[Device]:
    """GPUs 0 .. num-1; raises as ``create_cuda_gpu_on``."""
    return create_cuda_gpus_on(list(range(num)))


def create_cuda_gpus_on(device_ids: list[int]) -> list[Device]:
    """The GPUs with these numbers; raises as ``create_cuda_gpu_on``."""
    return [create_cuda_gpu_on(device_id) for device_id in device_ids]
