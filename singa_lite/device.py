# SPDX-License-Identifier: Apache-2.0
"""Devices: where arrays live, which backend computes on them, and the random stream they own.

The ``create_*`` names are SINGA's. ``create_device(local_rank)`` is ours: a GPU if there is one, else the
CPU, so that one script serves both. Asking for a GPU that is not there is a DeviceError, never a silent CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ._native import load
from .backend.base import Backend
from .backend.cpu import CpuBackend
from .config import state
from .errors import DeviceError, GraphError, OptionError, check_bool, check_int, check_ints
from .graph.buffer import GraphBuffer
from .graph.recorder import break_graph, scalar
from .profile import TimeProfile

CURE = "device.create_device(local_rank) takes a GPU where there is one and the CPU elsewhere"
OLDEST_CUPY = 14  # the first whose streams have priorities
INSTALL_CUPY = "pip install 'singa-lite[cuda13]', or [cuda12] for a CUDA 12 driver"
MAX_THREADS = 1024  # GNU OpenMP ends the process where it cannot start as many as asked for


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
        self._graph = GraphBuffer(backend)

    def id(self) -> int:
        """GPU number; -1 for the CPU."""
        return self._index

    def __repr__(self) -> str:
        return "Device(cpu)" if self.kind == "cpu" else f"Device({self.kind}:{self._index})"

    def __deepcopy__(self, memo: object) -> Device:
        """Keep copies of a tensor on the same device."""
        return self

    def __reduce__(self) -> tuple[Callable[..., Device], tuple[int, ...]]:
        """Keep pickles and shallow copies of a tensor on the same device."""
        return (get_default_device, ()) if self.kind == "cpu" else (create_cuda_gpu_on, (self._index,))

    def Sync(self) -> None:
        """Wait until all work given to the device has ended (SINGA's name)."""
        self.backend.synchronize()

    def EnableGraph(self, enable: bool) -> None:
        """Record what this thread computes until ``EnableGraph(False)``, for ``RunGraph`` (SINGA's name).

        Unlike in SINGA it is computed at once as well, so ``RunGraph`` is the second run. ``Model.compile(use_graph=
        True)`` does all of this by itself.

        Raises:
            GraphError: this thread records a model's step, or another thread started to record.
        """
        if check_bool("EnableGraph", "enable", enable):
            self._graph.start()
        else:
            self._graph.stop()

    def graph_enabled(self) -> bool:
        """Return whether ``EnableGraph(True)`` records (SINGA's name)."""
        return self._graph.is_recording

    def RunGraph(self, serial: bool = False) -> None:
        """Run what ``EnableGraph`` recorded once more, on the values its tensors have now (SINGA's name).

        Args:
            serial: accepted for SINGA scripts; calls always run in order.

        Raises:
            GraphError: nothing was recorded, or it cannot be replayed: values were read on the host meanwhile, say.
        """
        self._graph.run()

    def ResetGraph(self) -> None:
        """Forget what ``EnableGraph`` recorded; GraphError while it records (SINGA's name)."""
        if self._graph.is_recording:
            raise GraphError("ResetGraph: call EnableGraph(False) first")
        self._graph.reset()

    def SetVerbosity(self, verbosity: int) -> None:
        """Measure replayed steps: 0 not at all, 1 by phase, 2 every call, 3 synchronisation only (SINGA's levels)."""
        self.profile.set_verbosity(verbosity)

    def SetSkipIteration(self, skip_iteration: int) -> None:
        """Leave out the first replays of each record (5 at the start)."""
        self.profile.skip_iteration = check_int("SetSkipIteration", "skip_iteration", skip_iteration, 0)

    def PrintTimeProfiling(self) -> None:
        """Print the seconds a replay spends where, as SetVerbosity chose."""
        print(self.profile.text(), flush=True)

    def SetRandSeed(self, seed: int) -> None:
        """Restart the device's random stream from ``seed`` (0 <= seed < 2**64; 0 is where it starts).

        Raises:
            OptionError: ``seed`` is not such an int.
        """
        if check_int("SetRandSeed", "seed", seed, 0) >= 2**64:
            raise OptionError(f"SetRandSeed: seed = {seed} must be in 0 .. 2**64 - 1")
        break_graph("it sets the seed of a device, which a replay would not do")
        self._seed, self._counter = int(seed), 0

    def next_random(self) -> tuple[Any, Any]:  # Any: ints, or Scalars while a step is recorded
        """Claim the next piece of the random stream: (seed, counter), numbers for a random kernel and nothing else."""
        return scalar(lambda: self._seed), scalar(self._draw)

    def _draw(self) -> int:
        self._counter += 1
        return self._counter

    def get_random_state(self) -> tuple[int, int]:
        """Return (seed, counter); what a checkpoint keeps."""
        break_graph("it reads the random state of a device, which a replay would not do")
        return self._seed, self._counter

    def set_random_state(self, random_state: tuple[int, int]) -> None:
        """Go on from where ``get_random_state`` was taken."""
        pair = check_ints("set_random_state", "random_state", random_state, 0)
        if len(pair) != 2 or max(pair) >= 2**64:
            raise OptionError(f"set_random_state: expected (seed, counter) < 2**64, got {random_state!r}")
        break_graph("it sets the random state of a device, which a replay would not do")
        self._seed, self._counter = pair


def get_default_device() -> Device:
    """Return the CPU, the default device. All CPU devices are this one."""
    if state.default_device is None:
        with state.device_lock:
            if state.default_device is None:
                state.default_device = Device("cpu", -1, CpuBackend())
    default: Device = state.default_device
    return default


def create_cpu_device() -> Device:
    """Return the CPU (SINGA's name for ``get_default_device``)."""
    return get_default_device()


def get_num_threads() -> int:
    """Threads that compiled CPU kernels called from this Python thread use; 1 where nothing was compiled."""
    break_graph("it reads the number of threads, which a replay would not do")
    kernels, _ = load("_kernels")
    return 1 if kernels is None else int(kernels.num_threads())


def set_num_threads(num: int) -> None:
    """Set the number of threads of compiled CPU kernels called from this Python thread, instead of ``OMP_NUM_THREADS``.

    A child forked after kernels ran on several threads stays on one.

    Raises:
        OptionError: ``num`` is not an integer from 1 to 1024.
    """
    if check_int("set_num_threads", "num", num, 1) > MAX_THREADS:
        raise OptionError(f"set_num_threads: num = {num} must be an int from 1 to {MAX_THREADS}")
    break_graph("it sets the number of threads, which a replay would not do")
    kernels, _ = load("_kernels")
    if kernels is not None:
        kernels.set_num_threads(num)


def create_device(local_rank: int = 0) -> Device:
    """Return the GPU of this rank if the machine has one, else the CPU.

    Args:
        local_rank: rank among the ranks of this host, ``DistOpt(...).local_rank``.
    """
    check_int("create_device", "local_rank", local_rank, 0)
    if get_num_gpus() == 0:
        return get_default_device()
    return create_cuda_gpu_on(local_rank % get_num_gpus())


def allow_tf32(allowed: bool = True) -> None:
    """Allow CUDA devices to round the factors of float32 products and convolutions to TF32's 10 bits: faster, coarser.

    Off at the start. Holds for all devices of the process, from the next call on; a captured step keeps what it had.
    """
    break_graph("it sets whether TF32 is allowed, which a replay would not do")
    state.allow_tf32 = check_bool("allow_tf32", "allowed", allowed)


def benchmark_convolutions(enabled: bool = True) -> None:
    """Time cuDNN's algorithms at the first call of each convolution and take the fastest, or take the one it proposes.

    On at the start. Two processes may find different algorithms the fastest, and then differ in the last bits. Off,
    they take the same one, so that a job on GPUs goes on with the bits of one that was not stopped. Holds for all
    devices of the process, from the next call on; a captured step keeps what it had. PyTorch's ``cudnn.benchmark``.

    Raises:
        OptionError: ``enabled`` is not a bool.
    """
    break_graph("it sets how convolutions choose their algorithms, which a replay would not do")
    state.benchmark_convolutions = check_bool("benchmark_convolutions", "enabled", enabled)


def get_num_gpus() -> int:
    """Number of GPUs that can be used; 0 without cupy, without a driver, and without a GPU."""
    try:
        return int(_cupy().cuda.runtime.getDeviceCount())
    except DeviceError:
        return 0


def get_gpu_ids() -> list[int]:
    """Return the numbers of the GPUs, 0 .. get_num_gpus() - 1."""
    return list(range(get_num_gpus()))


def get_gpu_mem_size(id: int) -> tuple[int, int]:
    """Return (free, total) bytes of memory of GPU number ``id``; raises as ``create_cuda_gpu_on``."""
    free, total = _gpu("get_gpu_mem_size", id).mem_info
    return int(free), int(total)


def device_query(id: int, verbose: bool = False) -> str:
    """Return the properties of GPU number ``id``, one a line; raises as ``create_cuda_gpu_on``.

    Args:
        id: number of the GPU.
        verbose: all that the driver reports of it.
    """
    _gpu("device_query", id)
    properties = _cupy().cuda.runtime.getDeviceProperties(id)
    shown = properties if verbose else ("name", "major", "minor", "totalGlobalMem", "multiProcessorCount")
    values = {key: properties[key] for key in shown}
    return "\n".join(f"{key}: {v.decode() if isinstance(v, bytes) else v}" for key, v in values.items())


def create_cuda_gpu_on(device_id: int) -> Device:
    """GPU number ``device_id``; calls with the same number give the same device.

    Raises:
        DeviceError: cupy, the driver or that GPU is missing, or cupy is too old; says which and how to fix it.
    """
    _gpu("create_cuda_gpu_on", device_id)
    with state.device_lock:
        if device_id not in state.cuda_devices:
            state.cuda_devices[device_id] = Device("cuda", device_id, _cuda_backend(device_id))
    created: Device = state.cuda_devices[device_id]
    return created


def _cuda_backend(device_id: int) -> Backend:
    """Return a new backend of a GPU; DeviceError if cupy is too old or misses a part of CUDA."""
    if int((version := _cupy().__version__).partition(".")[0]) < OLDEST_CUPY:
        raise DeviceError(
            f"create_cuda_gpu_on({device_id}): expected cupy {OLDEST_CUPY} or later, got {version}: {INSTALL_CUPY}"
        )
    try:
        from .backend.cuda import CudaBackend  # cupy is optional and slow to import
    except ImportError as error:
        raise DeviceError(f"create_cuda_gpu_on({device_id}): cupy misses a part of CUDA ({error})") from error
    return CudaBackend(device_id)


def create_cuda_gpu() -> Device:
    """GPU number 0; raises as ``create_cuda_gpu_on``."""
    return create_cuda_gpu_on(0)


def create_cuda_gpus(num: int) -> list[Device]:
    """GPUs 0 .. num-1; raises as ``create_cuda_gpu_on``."""
    return [create_cuda_gpu_on(number) for number in range(check_int("create_cuda_gpus", "num", num, 0))]


def create_cuda_gpus_on(device_ids: list[int]) -> list[Device]:
    """Return the GPUs with these numbers; raises as ``create_cuda_gpu_on``."""
    return [
        create_cuda_gpu_on(number)
        for number in check_ints("create_cuda_gpus_on", "device_ids", device_ids, 0)
    ]


def _gpu(where: str, device_id: int) -> Any:
    """cupy's handle of GPU ``device_id``; DeviceError if there is none."""
    try:
        cupy = _cupy()
        count = int(cupy.cuda.runtime.getDeviceCount())
    except DeviceError as error:
        raise DeviceError(f"{where}({device_id}): {error}; {CURE}") from None
    if isinstance(device_id, bool) or not isinstance(device_id, int) or not 0 <= device_id < count:
        raise DeviceError(f"{where}({device_id!r}): this machine has GPUs 0 .. {count - 1}")
    return cupy.cuda.Device(device_id)


def _cupy() -> Any:
    """Import cupy; DeviceError where it is missing or finds no GPU."""
    try:
        import cupy
    except ImportError as error:
        raise DeviceError(f"CUDA devices need cupy ({error}): {INSTALL_CUPY}") from None
    try:
        count = int(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise DeviceError(
            f"cupy finds no usable NVIDIA driver or GPU ({error}); nvidia-smi shows more"
        ) from None
    if count == 0:
        raise DeviceError("the NVIDIA driver sees no GPU; CUDA_VISIBLE_DEVICES may hide them")
    return cupy
