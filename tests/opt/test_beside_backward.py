# SPDX-License-Identifier: Apache-2.0
"""What a scheme does with gradients on a GPU goes on beside the backward pass: the stand-in's streams are held up."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from devices import cuda_device_of_rank, no_gpu, standin_nccl
from ranks import run_ranks
from standin import compiling

from singa_lite.comm.base import World
from singa_lite.comm.dispatch import DispatchCommunicator
from singa_lite.sync import find_schemes
from singa_lite.sync.base import BucketedSync, StepOptions
from singa_lite.tensor import Tensor
from tests.comm.gpu_standin import host_of

MAIN, PACK, UNPACK = range(3)
SIZE, LIMIT_S = 200, 20.0
pytestmark = pytest.mark.skipif(not no_gpu(), reason="there is a GPU: its streams cannot be held up")


@pytest.fixture(autouse=True)
def use_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SINGA_LITE_CUDA_LIB", str(compiling.driver()))
    monkeypatch.setenv("SINGA_LITE_NCCL_LIB", str(standin_nccl()))


class Steps:
    """Steps of a scheme on two parameters, each a bucket of its own."""

    def __init__(self, world: World, option: str) -> None:
        self.device, self.rank = cuda_device_of_rank(), world.rank
        self.backend: Any = self.device.backend
        self.streams = [lane.stream for lane in self.backend.lanes.all]
        self.communicator = DispatchCommunicator(host_of(world))
        found = find_schemes()[option](self.communicator, 60, 256)
        assert isinstance(found, BucketedSync)
        self.scheme = found
        self.params = [Tensor(data=np.zeros(SIZE, np.float32), device=self.device) for _ in range(2)]

    def begin(self) -> None:
        for flat in self.flats():
            flat[...] = 0
        self.scheme.begin(StepOptions(0.1, corr=False))

    def push_all(self) -> None:
        for number, param in enumerate(self.params):
            rng = np.random.default_rng([self.rank, number])
            values = rng.standard_normal(SIZE).astype(np.float32)
            self.scheme.push(param, Tensor(data=values, device=self.device))
        self.scheme.flush()

    def means(self) -> list[bytes]:
        return [self.backend.to_numpy(mean.data).tobytes() for _, mean in self.scheme.finish()]

    def hold_up(self, lane: int) -> threading.Event:
        """Let nothing that is given to the lane from now on happen before the event is set."""
        released = threading.Event()
        self.streams[lane].add(lambda: released.wait(LIMIT_S))
        return released

    def flats(self) -> list[np.ndarray[Any, Any]]:
        """The memory in which the means appear."""
        return [bucket.flat.host for bucket in self.scheme._buckets.values()]


def comes_true(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + LIMIT_S / 2
    while not (found := condition()) and time.monotonic() < deadline:
        time.sleep(0.002)
    return found


def compute_beside(world: World, option: str) -> list[bool]:
    steps = Steps(world, option)
    steps.begin()
    steps.push_all()
    expected = steps.means()

    steps.begin()
    released = steps.hold_up(PACK)
    steps.push_all()
    y = steps.backend.empty((1,), "float32")
    steps.backend.run("fill", out=y, value=3.0)  # more of the backward pass
    goes_on = comes_true(lambda: y.host[0] == 3)
    nothing_came = not any(flat.tobytes() == mean for flat, mean in zip(steps.flats(), expected, strict=True))
    released.set()
    found = [goes_on, nothing_came, steps.means() == expected]

    if option != "sparseThreshold":  # whose host must see how many were selected
        steps.begin()
        steps.push_all()
        released = steps.hold_up(MAIN)
        means = list(steps.scheme.finish())
        y.host[0] = 0
        steps.backend.run("fill", out=y, value=3.0)  # the update, say
        came = comes_true(lambda: [flat.tobytes() for flat in steps.flats()] == expected)
        found += [came, y.host[0] == 0]
        released.set()
        found += [[steps.backend.to_numpy(mean.data).tobytes() for _, mean in means] == expected]
    steps.communicator.close()
    return found


@pytest.mark.parametrize("option", ["fp32", "fp16", "bf16", "sparseTopK", "sparseThreshold"])
def test_packing_and_unpacking_wait_for_no_more_than_they_need(option: str) -> None:
    for found in run_ranks(compute_beside, 2, option, transport="none"):
        assert found == [True] * (3 if option == "sparseThreshold" else 6)


def update_early(world: World, option: str) -> bool:
    """Whether an update sees the means of a step whose means come late."""
    steps = Steps(world, option)
    steps.begin()
    steps.push_all()
    expected = steps.means()
    steps.begin()
    steps.push_all()
    released = steps.hold_up(UNPACK)
    kept = steps.backend.empty((2, SIZE), "float32")
    threading.Timer(0.2, released.set).start()
    for row, (_, mean) in zip(kept, list(steps.scheme.finish()), strict=True):
        steps.backend.run("copy", mean.data, out=row)
    found = [row.tobytes() for row in steps.backend.to_numpy(kept)]
    steps.communicator.close()
    return found == expected


@pytest.mark.parametrize("option", ["fp32", "fp16", "bf16", "sparseTopK"])
def test_an_update_waits_for_the_means(option: str) -> None:
    assert run_ranks(update_early, 2, option, transport="none") == [True] * 2
