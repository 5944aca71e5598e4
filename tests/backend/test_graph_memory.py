# SPDX-License-Identifier: Apache-2.0
"""Memory of captured graphs stays while they do, and goes with them."""

from __future__ import annotations

import gc
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from singa_lite.device import create_cuda_gpu_on
from tests.backend.test_capture import Images, compiled, distributed, graphs, trained
from tests.devices import cuda_device, no_gpu, standin_cupy, standin_environment
from tests.limits import LIMIT_S

pytestmark = pytest.mark.skipif(not no_gpu(), reason="the stand-in of cupy counts memory, CUDA does not")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Any:
    return cuda_device(monkeypatch)


@pytest.fixture
def cupy(device: Any) -> Any:
    """The stand-in of cupy."""
    device.backend.activate()
    return sys.modules["singa_lite.backend.cuda"].cupy  # type: ignore[attr-defined]


def make_graph_memory(device_id: int = 0) -> Any:
    return sys.modules["singa_lite.backend.cuda.graph_memory"].GraphMemory(device_id)  # type: ignore[attr-defined]


def allocated_bytes(device: Any, cupy: Any) -> int:
    """Return what the driver has given away, without what the default pool keeps for later."""
    gc.collect()
    device.backend.release_cached_memory()
    device.backend.synchronize()
    count: int = cupy.cuda.Memory.allocated_bytes
    return count


def is_freed(cupy: Any, block: Any) -> bool:
    return any(found is block for found in cupy._array.GRAVES)


def capture_and_drop_a_model(device: Any) -> None:
    net = compiled(device, True, distributed(), Images)
    trained(net, device, range(4), "fp16")  # casts what it sends into memory of the graph
    assert graphs(net)


def test_memory_of_a_dropped_model_goes_back_to_the_driver(device: Any, cupy: Any) -> None:
    capture_and_drop_a_model(device)  # what the backend keeps for good is there
    before, leaked = allocated_bytes(device, cupy), len(cupy._array.LEAKED)
    for _ in range(2):
        capture_and_drop_a_model(device)
    assert (allocated_bytes(device, cupy), len(cupy._array.LEAKED)) == (before, leaked)


def test_memory_goes_back_also_where_it_is_collected_with_its_arrays(device: Any, cupy: Any) -> None:
    before = allocated_bytes(device, cupy)
    memory = make_graph_memory()
    with memory.in_use():
        circle = [memory, cupy.empty(1000, np.uint8)]
    circle.append(circle)
    assert allocated_bytes(device, cupy) == before + 1000
    del memory, circle
    assert allocated_bytes(device, cupy) == before


def test_memory_of_one_gpu_goes_back_also_while_another_is_the_current_one(device: Any, cupy: Any) -> None:
    with standin_cupy():
        other = create_cuda_gpu_on(1)
    memory, leaked = make_graph_memory(1), len(cupy._array.LEAKED)
    other.backend.activate()
    with memory.in_use():
        cupy.empty(1000, np.uint8)
    device.backend.activate()
    before = cupy.cuda.get_current_stream().ptr
    del memory
    gc.collect()
    assert len(cupy._array.LEAKED) == leaked
    assert cupy.cuda.get_current_stream().ptr == before


AT_EXIT = """
import atexit
atexit.register(lambda: print(cupy.cuda.Memory.allocated_bytes - before))  # the last that runs
import cupy
from singa_lite.device import create_cuda_gpu

backend = create_cuda_gpu().backend
backend.activate()
from singa_lite.backend.cuda.graph_memory import GraphMemory

memory = GraphMemory(0)
before = cupy.cuda.Memory.allocated_bytes
with memory.in_use():
    cupy.empty(1000, "u1")
"""


def test_an_interpreter_that_ends_leaves_memory_of_graphs_to_the_driver() -> None:
    done = subprocess.run(
        [sys.executable, "-c", AT_EXIT],
        env=standin_environment(),
        capture_output=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.stdout == b"1000\n", done.stderr.decode()


def test_an_array_may_outlive_the_memory_it_is_from(device: Any, cupy: Any) -> None:
    before = allocated_bytes(device, cupy)
    memory = make_graph_memory()
    with memory.in_use():
        array = cupy.empty(1000, np.uint8)
    block = array.data.mem.block
    del memory
    gc.collect()
    assert not is_freed(cupy, block)
    del array
    assert allocated_bytes(device, cupy) == before


def test_memory_that_a_graph_uses_stays_when_there_is_no_more(
    device: Any, cupy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = make_graph_memory()
    with memory.in_use():
        scratch = cupy.empty(1000, np.uint8)
    block = scratch.data.mem.block
    del scratch  # free for Python; a graph that was captured writes there
    kept = [cupy.empty(5000, np.uint8)]
    kept.clear()  # in the default pool
    monkeypatch.setattr(cupy.cuda.Memory, "limit_bytes", cupy.cuda.Memory.allocated_bytes)
    with memory.in_use():
        larger = cupy.empty(2000, np.uint8)
    assert larger.size == 2000 and not is_freed(cupy, block)
    del memory
    gc.collect()
    assert is_freed(cupy, block)


def test_memory_that_a_graph_uses_stays_where_there_is_not_enough_in_all(
    device: Any, cupy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = make_graph_memory()
    with memory.in_use():
        scratch = cupy.empty(1000, np.uint8)
    block = scratch.data.mem.block
    del scratch
    monkeypatch.setattr(cupy.cuda.Memory, "limit_bytes", 0)
    with memory.in_use(), pytest.raises(MemoryError, match="out of memory"):
        cupy.empty(2000, np.uint8)
    assert not is_freed(cupy, block)
