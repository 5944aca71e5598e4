# SPDX-License-Identifier: Apache-2.0
"""Starting our own CUDA kernels: each compiled at first use, once for every set of element types.

What lives here: sources and their types, the size of a launch, the stream it goes to, and the numbers that change from
step to step. What does not: what a kernel computes (the .cu files), and which arrays it gets (its family's file).

Note [launch]: a kernel of ours takes row-major arrays, int64, float64 and structures by value, so nothing is
converted on the way; all work of a stream runs in order (Note [streams] in streams.py). No launch waits for the device.

Note [scalars]: learning rates, Adam's step, thresholds and random streams change from step to step. A kernel takes
them as a Number (common.cuh): by value, or as an address on the device that is read when the kernel runs. ``scalar``
makes them: of a number the first, and the second of a Scalar, which kernels get while a graph is captured
(capture.Numbers).
"""

from __future__ import annotations

import re
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import cupy
import numpy as np

from ...config import state, this_thread
from ...dtypes import bfloat16
from ...errors import GraphError
from ...graph.nodes import Scalar
from ...graph.recorder import switch_stream
from ..base import Array, Backend
from ..formulas import FOLDER as FORMULAS_FOLDER
from .streams import PACK, UNPACK, StreamSet

FOLDER = Path(__file__).parent
# of a block: eight warps hide the latency of memory, and several blocks fit on a multiprocessor
THREADS = 256
OLDEST_BFLOAT16 = 80  # compute capability, times 10, of the first GPUs that multiply it
COMPILER_OPTIONS = ("--std=c++17",)
C_TYPES = {
    "?": "bool",
    "B": "Byte",
    "e": "Half",
    "E": "Bfloat16",
    "f": "float",
    "d": "double",
    "i": "int",
    "l": "Int",
    "q": "Int",
    "D": "Sixteen",
}
# a line that makes one kernel by a macro: UNARY(relu, A, ...) makes relu_formula, REDUCTION(max_rows, ...) max_rows
MADE_BY_MACRO = re.compile(r"^[A-Z_]+\d?\((\w+),.*$", re.MULTILINE)


def by_value(numbers: Sequence[int], num_bytes: int) -> np.ndarray[Any, Any]:
    """Return a structure of int64 members as kernels take it: ``numbers``, then zeros up to ``num_bytes``."""
    packed = struct.pack(f"<{len(numbers)}q", *numbers)
    return np.frombuffer(packed.ljust(num_bytes, b"\0"), f"V{num_bytes}")


def types_of(x: Array, other: Array) -> str:
    """Return the element types T and U of a kernel that takes both arrays: one letter where they are the same."""
    first, second = x.dtype.char, other.dtype.char
    return str(first if first == second else first + second)


def _missing_precisions(device: Any) -> dict[str, str]:
    """Return why a GPU, or cupy with an old NumPy, does not compute in bfloat16, if it doesn't."""
    if int(device.compute_capability) < OLDEST_BFLOAT16:
        return {"bf16": "its products take a GPU of compute capability 8.0 or later; choose 'fp16'"}
    try:
        cupy.empty(1, bfloat16)
    except (TypeError, ValueError):
        cure = "install NumPy 2.1.2 or later, or choose 'fp16'"
        return {"bf16": f"cupy has no bfloat16 with NumPy {np.__version__}; {cure}"}
    return {}


class DeviceLock:
    """Lets one thread at a time give work to the streams: kernels share scratch memory, and a capture takes all work.

    Raises:
        GraphError: at ``with``, where another thread has held it for a minute.
    """

    PATIENCE_S = 60.0

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        if not self._lock.acquire(timeout=self.PATIENCE_S):
            raise GraphError(
                f"waited {self.PATIENCE_S:g} s for the GPU while another thread captured a step on it: Python in "
                "a captured step must not wait for a thread that computes on the same device"
            )

    def __exit__(self, *error: object) -> None:
        self._lock.release()


class Packed:
    """The result of ``packing``, for ``unpacking``."""

    event: Any = None  # happens once what was packed is there
    capture: Any = None  # of which the event is a part, if a graph was captured


class Launcher(Backend):
    """Base of the families of kernels.

    Args:
        device_id: number of the GPU.
    """

    def __init__(self, device_id: int) -> None:
        self.device_id = device_id
        device = cupy.cuda.Device(device_id)
        device.use()
        self.num_processors = int(device.attributes["MultiProcessorCount"])
        self.lock = DeviceLock()
        self.streams = StreamSet(device, self.lock)
        self._functions: dict[tuple[str, str], Any] = {}
        self._modules: dict[str, Any] = {}  # by source
        # written by kernels, read by the host whenever it has waited: what Labels in loss.cu found wrong
        self._pinned = cupy.cuda.alloc_pinned_memory(24)
        self.faults = np.frombuffer(self._pinned, np.int64, 3)
        self.faults[...] = 0
        self.faults_address = int(self._pinned.ptr)
        self.activate()
        self.missing_precisions = _missing_precisions(device)

    @property
    def capture(self) -> Any:  # Any: capture.Numbers
        """The numbers of the graph that this thread captures on this backend, else None."""
        found = this_thread.capture
        return found if found is not None and found.backend is self else None

    @property
    def stream(self) -> Any:
        """cupy's, that this thread's kernels go to."""
        return self.streams.current.stream

    @property
    def block_counter(self) -> Array:
        """That stream's, see is_last_block in common.cuh."""
        return self.streams.current.block_counter

    def scratch(self, num_bytes: int) -> Array:
        """Return memory for one kernel method, until the next call on this stream."""
        return self.streams.current.scratch(num_bytes)

    def activate(self) -> None:
        self.streams.activate()

    @contextmanager
    def packing(self, *uses: Array) -> Iterator[Any]:
        packed = Packed()
        switch_stream(self._start_packing, uses)
        try:
            yield packed
        finally:
            switch_stream(self._leave_packing, packed)

    def _start_packing(self, uses: tuple[Array, ...]) -> None:
        self.streams.enter(PACK, self.streams.current.record_event)
        self.streams.keep(*uses)

    def _leave_packing(self, packed: Packed) -> None:
        with self.lock:
            packed.event, packed.capture = self.streams.current.record_event(), self.capture
        self.streams.leave()

    @contextmanager
    def unpacking(self, packed: Packed) -> Iterator[None]:
        switch_stream(self._start_unpacking, packed)
        try:
            yield
        finally:
            switch_stream(self.end_packing)

    def _start_unpacking(self, packed: Packed) -> None:
        is_same = packed.capture is self.capture  # else a graph packed it that ended before this one began
        self.streams.enter(UNPACK, lambda: packed.event if is_same else self.streams.current.record_event())

    def join(self) -> None:
        self.streams.join()

    def end_packing(self) -> None:
        self.streams.leave()
        self.join()

    def check_communicators(self) -> None:
        """Raise the CommError of a collective that was aborted after its wait."""
        for known in state.gpu_communicators:
            if (communicator := known()) is not None:
                communicator.check()

    def converted(self, x: Array, dtype: Any) -> Array:
        """Return ``x``, or a copy of it in ``dtype``, for one kernel method."""
        if x.dtype == dtype:
            return x
        copy = self.empty(x.shape, dtype)
        self.find("cast")(x, out=copy)
        return copy

    def launch(self, name: str, types: str, blocks: int, threads: int, *arguments: Any) -> None:
        """Start the kernel ``name`` ("file.kernel") for element types T and U, given by numpy's characters."""
        function = self._functions.get((name, types)) or self._compile(name, types)
        function((blocks,), (threads,), arguments)

    def each(self, name: str, types: str, count: int, *arguments: Any) -> None:
        """Start a kernel that works on ``count`` elements, in blocks of THREADS; none for no elements."""
        if count:
            blocks = min(-(-count // THREADS), 16 * self.num_processors)  # two waves of full multiprocessors
            self.launch(name, types, blocks, THREADS, *arguments)

    def each_row(self, name: str, types: str, rows: int, length: int, *arguments: Any) -> None:
        """Start a kernel with a block, of whole warps, for each row of ``length`` elements; none for no elements."""
        if rows and length:
            self.launch(name, types, rows, 32 if length <= 128 else THREADS, *arguments)

    def over_grid(self, name: str, types: str, count: int, *arguments: Any) -> None:
        """Start a kernel that makes one value of ``count`` elements by over_grid in common.cuh."""
        blocks = self.count_blocks(count)
        self.launch(name, types, blocks, THREADS, *arguments, count, *self.memory_of_grid(blocks))

    def count_blocks(self, count: int) -> int:
        """Return how many blocks share ``count`` elements: of 2048 at least, at most 4 a multiprocessor."""
        return max(1, min(-(-count // 2048), 4 * self.num_processors))

    def memory_of_grid(self, blocks: int) -> tuple[Array, Array]:
        """Return what blocks need to join a value of each: memory for these, and the block counter."""
        return self.scratch(8 * blocks), self.block_counter

    def scalar(self, value: Any, kind: type = float) -> np.ndarray[Any, Any]:
        """Return a number that may change from step to step as kernels take it, see Note [scalars].

        Args:
            value: a number, or while a graph is captured perhaps a Scalar.
            kind: float, or int for one modulo 2**64.
        """
        if isinstance(value, Scalar):
            return self.capture.address_of(value, partial(_packed, kind))  # type: ignore[no-any-return]
        return np.frombuffer(bytes(8) + _packed(kind, value), "V16")

    def _compile(self, name: str, types: str) -> Any:
        file, _, kernel = name.partition(".")
        source = source_of(file, types, kernel)
        if source not in self._modules:
            self._modules[source] = cupy.RawModule(code=source, options=COMPILER_OPTIONS)
        function = self._functions[name, types] = self._modules[source].get_function(kernel)
        return function


def _packed(kind: type, value: Any) -> bytes:
    return struct.pack("<Q", int(value) % 2**64) if kind is int else struct.pack("<d", value)


def text_of(file: str) -> str:
    """Return the text of a .cu file, with the formulas or updates that it makes kernels of."""
    paths = [FOLDER / f"{file}.cu"]
    if file == "elementwise":
        paths = [FOLDER / "functions.cuh", FORMULAS_FOLDER / "formulas.h", *paths]
    if file == "update":
        paths.append(FORMULAS_FOLDER / "updates.h")
    return "".join(path.read_text() for path in paths)


def source_of(file: str, types: str, kernel: str) -> str:
    """Return the source of ``kernel`` of a .cu file for element types T and U (T again if one is given).

    The file's other kernels are in it too, except those that a line of a macro makes: all of elementwise.cu takes NVRTC
    3.4 s, ``relu`` of it 0.2 s and ``add`` 0.5 s.
    """
    first, second = C_TYPES[types[0]], C_TYPES[types[-1]]
    chosen = (
        f"typedef {first} T; typedef {second} U; typedef WideOf<T>::type A; typedef RealOf<T>::type Real;\n"
        "typedef TotalOf<A>::type Total;\n"
    )
    wanted = {kernel, kernel.removesuffix("_formula")}
    text = MADE_BY_MACRO.sub(lambda line: line[0] if line[1] in wanted else "", text_of(file))
    return (FOLDER / "common.cuh").read_text() + chosen + text
