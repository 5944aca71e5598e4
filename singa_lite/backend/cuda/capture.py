# SPDX-License-Identifier: Apache-2.0
"""A recorded step as CUDA graphs: the host launches one graph where it would launch hundreds of kernels.

What lives here: capturing the nodes of a tape, and what the host does before each launch. What does not: which nodes a
step has (../../graph), kernels, the memory of a graph's kernels (graph_memory.py).

Note [captured parts]: the first replay runs the nodes one by one: libraries choose their algorithms then, and kernels
get their scratch memory. The second captures them, and from then on a replay is one launch. A graph ends before a Host
node that sees arrays, and another begins after it; collectives in flight are waited for before it. What only counts
runs on the host before the launch, in the order of the tape, as do the Scalars: a kernel takes the address of such a
number (Note [scalars] in launch.py), and the host stores the new values there. A part that cannot be captured runs its
nodes one by one for good; a warning gives the reason.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from ...config import this_thread
from ...errors import GraphError
from ...graph.nodes import Collective, Host, Kernel, Node, Scalar, Wait
from ...users_line import warn
from .executable import ExecutableGraph, begin_capture, discard_capture
from .graph_memory import GraphMemory
from .launch import Launcher, by_value

MAX_NUMBERS, STORED_AT_ONCE = 4096, 60  # the second: of Numbers in store.cu


def split(nodes: list[Node]) -> list[list[Node] | Host]:
    """Cut a tape at the Host nodes that see arrays, and wait before each for what is in flight."""
    parts: list[list[Node] | Host] = []
    current: list[Node] = []
    waits = {node.flight: node for node in nodes if isinstance(node, Wait)}
    for node in nodes:
        if isinstance(node, Host) and node.sees_arrays:
            started = [other.flight for other in current if isinstance(other, Collective)]
            current += [waits.pop(flight) for flight in started if flight in waits]
            parts += [current, node]
            current = []
        elif not isinstance(node, Wait) or waits.pop(node.flight, None) is not None:
            current.append(node)
    return [part for part in [*parts, current] if part]


class CapturedPart:
    """Nodes between two cuts, a CUDA graph from the second run on, see Note [captured parts].

    Args:
        backend: whose kernels they are.
        nodes: none is a Host node that sees arrays.
        memory: for what their kernels allocate for themselves.

    Attributes:
        num_launches: how often the graph was launched.
    """

    def __init__(self, backend: Launcher, nodes: list[Node], memory: GraphMemory) -> None:
        self._backend, self._nodes, self._memory = backend, nodes, memory
        self._is_for_device = any(isinstance(node, (Kernel, Collective)) for node in nodes)
        self._has_run = self._has_failed = False
        self._graph: Any = None
        self._numbers: Numbers | None = None
        self._before_launch: list[Callable[[], None]] = []
        self._begin_graph: list[Callable[[], None]] = []  # at once before the launch
        self._end_graph: list[Callable[[], None]] = []
        self.num_launches = 0

    def __call__(self) -> None:
        if self._graph is None and self._has_run and not self._has_failed:
            try:
                self._capture()
            except GraphError as error:
                self._has_failed = True
                warn(f"a recorded step runs kernel by kernel from now on: {error}")
        if self._graph is not None:
            self._launch()
            return
        with self._memory.in_use():
            for node in self._nodes:
                node()
        self._has_run = self._is_for_device

    def destroy(self) -> None:
        """Destroy the graph: the communicator of its collectives is about to end."""
        self._graph, self._has_run = None, False

    def _capture(self) -> None:
        self._before_launch, self._begin_graph, self._end_graph = [], [], []
        backend, numbers = self._backend, Numbers(self._backend, self._before_launch)
        last: dict[Any, Any] = {}  # the last work of each communicator
        with backend.lock:
            backend.activate()
            backend.join()  # what was given before does not belong to it
            begin_capture(stream := backend.stream)
            try:
                with self._memory.in_use(), numbers.in_use():
                    for node in self._nodes:
                        self._capture_node(node, numbers)
                        if isinstance(node, Collective):
                            last[node.communicator] = node.flight.work
                    backend.join()
            except BaseException:
                discard_capture(stream)
                backend.end_packing()
                raise
            self._graph, self._numbers = ExecutableGraph(backend.stream), numbers
        if last:  # else a launch would use what NCCL had before it was aborted
            self._before_launch.insert(0, backend.check_communicators)
        for communicator, work in last.items():
            before, after = communicator.follow_graph(self, work)
            self._begin_graph.append(before)
            self._end_graph.append(after)

    def _capture_node(self, node: Node, numbers: Numbers) -> None:
        if isinstance(node, Host):
            self._before_launch.append(node)
        elif isinstance(node, Kernel):
            numbers.begin_kernel()
            self._backend.execute(node.name, node.inputs, node.out, node.attributes)
        elif isinstance(node, Collective):
            communicator, before = node.communicator, node.communicator.traffic.copy()
            node()
            sent, communicator.traffic = communicator.traffic.since(before), before  # a capture sends nothing
            self._before_launch.append(lambda: communicator.traffic.add(sent))
        else:
            node()

    def _launch(self) -> None:
        for run in self._before_launch:
            run()
        assert self._numbers is not None
        with self._backend.lock:
            self._backend.activate()
            self._backend.join()
            self._numbers.store()
            for run in self._begin_graph:
                run()
            self._graph.launch(self._backend.stream)
            for run in self._end_graph:
                run()
        self.num_launches += 1


class Numbers:
    """Numbers of a graph that the host stores before a launch, and where its kernels find them.

    Args:
        backend: whose kernels take them.
        before_launch: receives, in the order of the kernels, what reads each number again.
    """

    def __init__(self, backend: Launcher, before_launch: list[Callable[[], None]]) -> None:
        self.backend, self._before_launch = backend, before_launch
        self._on_device = backend.allocate_zeros((MAX_NUMBERS,), np.int64)
        self._values: list[bytes] = []
        self._stored: list[bytes] = []
        self._of_kernel: dict[int, int] = {}  # of the kernel that is captured: id of a Scalar -> number

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Inside the ``with`` block kernels of this thread get addresses of Scalars."""
        this_thread.capture = self
        try:
            yield
        finally:
            this_thread.capture = None

    def address_of(self, scalar: Scalar, pack: Callable[[Any], bytes]) -> np.ndarray[Any, Any]:
        """Return the address of a Scalar, as kernels take it; ``pack`` makes 8 bytes of its value."""
        number = self._of_kernel.setdefault(id(scalar), len(self._values))
        if number == len(self._values):
            if number == MAX_NUMBERS:
                raise GraphError(f"a captured step has more than {MAX_NUMBERS} numbers that change")
            self._values.append(bytes(8))
            self._before_launch.append(lambda: self._set(number, pack(scalar.read())))
        return np.frombuffer(struct.pack("<qq", self._on_device.data.ptr + 8 * number, 0), "V16")

    def _set(self, number: int, value: bytes) -> None:
        self._values[number] = value

    def begin_kernel(self) -> None:
        """Read the next kernel's Scalars at its own position in the order, also where others share them."""
        self._of_kernel.clear()

    def store(self) -> None:
        """Bring the values to the device, unless they are there."""
        if self._values == self._stored:
            return
        values = np.frombuffer(b"".join(self._values), np.int64).tolist()
        for first in range(0, len(values), STORED_AT_ONCE):
            part = values[first : first + STORED_AT_ONCE]
            packed = by_value([len(part), *part], 8 * (1 + STORED_AT_ONCE))
            out = self._on_device[first : first + len(part)]
            self.backend.launch("store.store", "l", 1, 64, out, packed)
        self._stored = list(self._values)
