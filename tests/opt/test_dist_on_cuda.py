# SPDX-License-Identifier: Apache-2.0
"""Training on several GPUs: the CUDA backend, DistOpt, NCCL and CUDA graphs together, without a GPU.

cupy's stand-in puts its work on the streams of the stand-in libcuda, where that of NCCL's stand-in runs too. All of it
happens some time after the call, memory that is free is used again at once, and a graph runs its nodes in another
order each time: what is not ordered by a stream or an event comes out wrong.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import numpy as np
import pytest
from devices import cuda_device_of_rank, no_gpu, standin_nccl
from ranks import RankDied, run_ranks
from standin import compiling

from singa_lite import autograd, layer, model, opt
from singa_lite.comm import nccl
from singa_lite.comm.base import Communicator, World
from singa_lite.comm.dispatch import DispatchCommunicator
from singa_lite.device import Device, create_cpu_device
from singa_lite.errors import CommError
from singa_lite.tensor import Tensor, to_numpy
from tests.backend.test_capture import graphs
from tests.comm.gpu_standin import host_of

OPTIONS = ["fp32", "fp16", "bf16", "partialUpdate", "sparseTopK", "sparseThreshold"]
STEPS = 9
pytestmark = pytest.mark.skipif(not no_gpu(), reason="there is a GPU: gpu-check trains on two ranks itself")


@pytest.fixture(autouse=True)
def use_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SINGA_LITE_CUDA_LIB", str(compiling.driver()))
    monkeypatch.setenv("SINGA_LITE_NCCL_LIB", str(standin_nccl()))


class Net(model.Model):
    """Convolution, pooling, and a layer larger than the others together."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.pool = (
            layer.Conv2d(4, 3, padding=1),
            layer.BatchNorm2d(),
            layer.MaxPool2d(2),
        )
        self.first, self.second = layer.Linear(40), layer.Linear(5)
        self.relu, self.loss = layer.ReLU(), layer.SoftMaxCrossEntropy()

    def forward(self, x: Tensor) -> Tensor:
        y = autograd.reshape(self.pool(self.relu(self.norm(self.conv(x)))), (x.shape[0], 36))
        return self.second(self.relu(self.first(y)))

    def train_one_batch(self, x: Tensor, y: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
        out = self.forward(x)
        loss = self.loss(out, y)
        self.optimizer(loss, *options)
        return out, loss


def batch(device: Device, rank: int, step: int) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng([rank, step])
    x = rng.standard_normal((6, 1, 6, 6)).astype(np.float32)
    labels = rng.integers(0, 5, 6).astype(np.int32)
    return Tensor(data=x, device=device), Tensor(data=labels, device=device)


class Hoard:
    """Memory that the caller of a recorded step has taken meanwhile: a graph may not write there."""

    def __init__(self) -> None:
        self._arrays: list[Any] = []

    def take_all_that_is_free(self) -> None:
        cupy = sys.modules["cupy"]
        free = cupy.get_default_memory_pool().free
        sizes = [num_bytes for num_bytes, blocks in free.items() for _ in blocks]
        for num_bytes in sizes:
            self._arrays.append(cupy.empty(num_bytes, np.uint8))
            self._arrays[-1].data.memset_async(7, num_bytes)

    def check(self) -> None:
        assert all((array.get() == 7).all() for array in self._arrays)


def train(device: Device, communicator: Communicator, option: str, use_graph: bool) -> dict[str, Any]:
    """What a rank sees and has after some steps."""
    net, rank = Net(), communicator.rank
    sgd = opt.SGD(lr=opt.ExponentialDecay(0.1, 2, 0.7), momentum=0.9)
    net.set_optimizer(opt.DistOpt(sgd, communicator=communicator, threshold=60, bucket_bytes=2048))
    net.compile([batch(device, rank, 0)[0]], use_graph=use_graph)
    rng = np.random.default_rng(1)
    start = {name: 0.3 * rng.random(x.shape) - 0.1 for name, x in net.get_states().items()}
    net.set_states({name: value.astype(np.float32) for name, value in start.items()})
    losses: list[Tensor] = []
    hoard = Hoard()
    for step in range(STEPS):
        losses.append(net(*batch(device, rank, step), option)[1])
        if use_graph:
            hoard.take_all_that_is_free()
    hoard.check()
    return {
        "losses": [to_numpy(loss).item() for loss in losses],
        "states": {name: to_numpy(value) for name, value in net.get_states().items()},
        "optimizer": net.optimizer.get_states(),
        "launches": sum(graph.num_launches for graph in graphs(net)) if use_graph else 0,
    }


def train_everywhere(world: World, option: str) -> list[dict[str, Any]]:
    """On the CPU, on a GPU, and on a GPU with graphs."""
    nccl.REGISTERED_BYTES = 1024  # buckets here are small
    communicator = DispatchCommunicator(host_of(world))
    on_cpu = train(create_cpu_device(), communicator, option, False)
    device = cuda_device_of_rank()
    found = [on_cpu, *(train(device, communicator, option, use_graph) for use_graph in (False, True))]
    communicator.close()
    return found


def check(results: list[list[dict[str, Any]]], option: str) -> None:
    """All ranks with GPUs are where those without are, and where each other are."""
    for on_cpu, eager, graph in results:
        np.testing.assert_allclose(eager["losses"], on_cpu["losses"], rtol=2e-2 if option == "bf16" else 1e-3)
        assert eager["losses"] == graph["losses"]
        assert graph["launches"] >= 4
        for name, value in eager["states"].items():
            np.testing.assert_array_equal(graph["states"][name], value, name)
            if option != "partialUpdate" and "running" not in name:  # those are each rank's own
                np.testing.assert_array_equal(results[0][1]["states"][name], value, name)
        for name, value in eager["optimizer"].items():
            np.testing.assert_array_equal(graph["optimizer"][name], value, name)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("option", OPTIONS)
def test_ranks_with_gpus_train_as_ranks_without(
    option: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STANDIN_JITTER_US", "2000" if size == 3 else "0")
    monkeypatch.setenv("SINGA_LITE_NCCL_BLOCKING", str(int(size == 2)))
    check(run_ranks(train_everywhere, size, option, transport="none"), option)


def resume(world: World, option: str) -> list[dict[str, bytes]]:
    """Where a rank ends without a break, and where another model ends that continues from half-way."""
    device, communicator = cuda_device_of_rank(), DispatchCommunicator(host_of(world))

    def make() -> Net:
        net = Net()
        net.set_optimizer(opt.DistOpt(opt.SGD(lr=0.1, momentum=0.9), communicator=communicator, threshold=60))
        net.compile([batch(device, world.rank, 0)[0]], use_graph=True)
        return net

    whole, second = make(), make()
    for step in range(2 * STEPS):
        if step == STEPS:
            second.set_states({name: to_numpy(value) for name, value in whole.get_states().items()})
            second.optimizer.set_states(whole.optimizer.get_states())
        for net in (whole, second)[: 1 + (step >= STEPS)]:
            net(*batch(device, world.rank, step), option)
    found = [
        {
            **{name: to_numpy(value).tobytes() for name, value in net.get_states().items()},
            **{name: value.tobytes() for name, value in net.optimizer.get_states().items()},
        }
        for net in (whole, second)
    ]
    communicator.close()
    return found


@pytest.mark.parametrize("option", ["partialUpdate", "sparseTopK", "sparseThreshold"])
def test_a_resumed_rank_goes_on_bit_for_bit(option: str) -> None:
    for whole, second in run_ranks(resume, 2, option, transport="none"):
        assert whole == second


def lose_a_rank(world: World) -> str:
    """The error that a rank gets where another dies while all replay graphs."""
    device, communicator = cuda_device_of_rank(), DispatchCommunicator(host_of(world))
    net = Net()
    net.set_optimizer(opt.DistOpt(opt.SGD(lr=0.1), communicator=communicator))
    net.compile([batch(device, world.rank, 0)[0]], use_graph=True)
    for step in range(1000):
        if step == 6 and world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            _, loss = net(*batch(device, world.rank, step))
            to_numpy(loss)
        except CommError as error:
            assert step >= 6 and sum(graph.num_launches for graph in graphs(net)) >= 3
            communicator.close()
            return str(error)
    return "no error"


def test_a_rank_killed_while_graphs_run_is_an_error_on_the_others() -> None:
    first, killed, third = run_ranks(lose_a_rank, 3, transport="none", return_exceptions=True)
    assert isinstance(killed, RankDied)
    for text in (first, third):
        assert "rank 1" in text and "died" in text
