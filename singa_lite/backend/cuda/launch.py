# SPDX-License-Identifier: Apache-2.0
"""Starting our own CUDA kernels: compiled at first use, once for every set of element types.

What lives here: sources and their types, the size of a launch, the lane it goes to, and the numbers that change from
step to step. What does not: what a kernel computes (the .cu files), and which arrays it gets (its family's file).

Note [launch]: a kernel of ours takes row-major arrays, int64, float64 and structures by value, so nothing is
converted on the way; all work of a lane runs in order, see Note [lanes] in lane.py. No launch waits for the device.

Note [scalars]: learning rates, Adam's step, thresholds and random streams change from step to step. A kernel takes
them as a Number (common.cuh): by value, or as an address on the device that is read when the kernel runs. ``scalar``
is the one place where they are made, so that a captured step can hand out addresses and refresh what stands there.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cupy
import numpy as np

from ...config import state
from ...errors import GraphError
from ...graph import is_repeating
from ..base import Array, Backend
from .lane import PACK, UNPACK, Lanes

FOLDER = Path(__file__).parent
THREADS = (
    256  # of a block: eight warps hide the latency of memory, and several blocks fit on a multiprocessor
)
C_TYPES = {
    "?": "bool",
    "B": "Byte",
    "e": "Half",
    "f": "float",
    "d": "double",
    "i": "int",
    "l": "Int",
    "q": "Int",
}


def by_value(numbers: Sequence[int], num_bytes: int) -> np.ndarray[Any, Any]:
    """A structure of int64 members as kernels take it: ``numbers``, then zeros up to ``num_bytes``."""
    packed = struct.pack(f"<{len(numbers)}q", *numbers)
    return np.frombuffer(packed.ljust(num_bytes, b"\0"), f"V{num_bytes}")


class Turn:
    """Which thread gives work to the streams: kernels share scratch memory, and a capture takes all that comes.

    Raises:
        GraphError: at ``with``, where another thread has had its turn for a minute.
    """

    PATIENCE_S = 60.0

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        if not self._lock.acquire(timeout=self.PATIENCE_S):
            raise GraphError(
                f"the GPU was wanted for {self.PATIENCE_S:g} s while another thread captured a step on it: Python in "
                "a captured step must not wait for a thread that computes on the same device"
            )

    def __exit__(self, *error: object) -> None:
        self._lock.release()


class Launcher(Backend):
    """What the families of kernels share.

    Args:
        device_id: number of the GPU.
    """

    def __init__(self, device_id: int) -> None:
        self.device_id = device_id
        device = cupy.cuda.Device(device_id)
        device.use()
        self.num_processors = int(device.attributes["MultiProcessorCount"])
        self.turn = Turn()
        self.lanes = Lanes(device, self.turn)
        self._functions: dict[tuple[str, str], Any] = {}
        self._modules: dict[tuple[str, str], Any] = {}
        # written by kernels, read by the host whenever it has waited: what Labels in loss.cu found wrong
        self._pinned = cupy.cuda.alloc_pinned_memory(24)
        self.faults = np.frombuffer(self._pinned, np.int64, 3)
        self.faults[...] = 0
        self.faults_address = int(self._pinned.ptr)

    @property
    def rehearsal(self) -> Any:  # Any: capture.CapturedCalls
        """What listens to this thread's calls instead of the device, if anything does."""
        found = state.rehearsal
        return found if found is not None and found.backend is self else None

    @property
    def stream(self) -> Any:
        """cupy's, of this thread's lane."""
        return self.lanes.current.stream

    @property
    def ticket(self) -> Array:
        """That lane's, see is_last_block in common.cuh."""
        return self.lanes.current.ticket

    def scratch(self, num_bytes: int) -> Array:
        """Memory for one kernel method, until the next on this lane asks."""
        return self.lanes.current.scratch(num_bytes)

    def activate(self) -> None:
        self.lanes.activate()

    @contextmanager
    def packing(self, *uses: Array) -> Iterator[Any]:
        self.activate()
        packed = None if is_repeating() else cupy.cuda.Event(disable_timing=True)
        with self.lanes.on(PACK, self.lanes.current.mark):
            self.lanes.keep(*uses)
            yield packed
            if packed is not None:
                with self.turn:
                    packed.record(self.stream)

    @contextmanager
    def unpacking(self, packed: Any) -> Iterator[None]:
        try:
            with self.lanes.on(UNPACK, lambda: packed):
                yield
        finally:
            self.join()

    def join(self) -> None:
        self.lanes.join()

    def launch(self, name: str, types: str, blocks: int, threads: int, *arguments: Any) -> None:
        """Start the kernel ``name`` ("file.kernel") for element types T and U, given by numpy's characters."""
        function = self._functions.get((name, types)) or self._compile(name, types)
        if self.rehearsal is not None and not self.rehearsal.launches(
            name, types, blocks, threads, arguments
        ):
            return
        function((blocks,), (threads,), arguments)

    def each(self, name: str, types: str, count: int, *arguments: Any) -> None:
        """Start a kernel that works on ``count`` elements, in blocks of THREADS; none for no elements."""
        if count:
            blocks = min(-(-count // THREADS), 16 * self.num_processors)  # two waves of full multiprocessors
            self.launch(name, types, blocks, THREADS, *arguments)

    def scalar(self, value: float) -> np.ndarray[Any, Any]:
        """A number that changes from step to step as kernels take it, see Note [scalars]; ints modulo 2**64."""
        whole = isinstance(value, int)
        packed = struct.pack("<Q", value % 2**64) if whole else struct.pack("<d", value)
        if self.rehearsal is not None:
            found: np.ndarray[Any, Any] = self.rehearsal.scalar(packed)
            return found
        return np.frombuffer(bytes(8) + packed, "V16")

    def _compile(self, name: str, types: str) -> Any:
        file, _, kernel = name.partition(".")
        if (file, types) not in self._modules:
            self._modules[file, types] = cupy.RawModule(code=source_of(file, types), options=("--std=c++17",))
        function = self._functions[name, types] = self._modules[file, types].get_function(kernel)
        return function


def source_of(file: str, types: str) -> str:
    """The whole source of a kernel file for element types T and U (T again if one is given)."""
    first, second = C_TYPES[types[0]], C_TYPES[types[-1]]
    chosen = (
        f"typedef {first} T; typedef {second} U; typedef WideOf<T>::type A; typedef RealOf<T>::type Real;\n"
    )
    return (FOLDER / "common.cuh").read_text() + chosen + (FOLDER / f"{file}.cu").read_text()
