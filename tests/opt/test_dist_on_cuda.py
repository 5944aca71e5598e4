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
import threading
from typing import Any

import numpy as np
import pytest

from singa_lite import autograd, layer, model, opt
from singa_lite.comm import dispatch
from singa_lite.comm.base import Communicator, World
from singa_lite.comm.dispatch import DispatchCommunicator
from singa_lite.device import Device, create_cpu_device
from singa_lite.errors import CommError
from singa_lite.sync.buckets import BucketedSync
from singa_lite.tensor import Tensor, to_numpy
from tests.backend.test_capture import graphs
from tests.comm.gpu_standin import host_of
from tests.devices import cuda_device_of_rank, no_gpu
from tests.ranks import RankDied, run_ranks
from tests.slow_cases import slow_but_first

OPTIONS = [
    "fp32",
    "fp16",
    "bf16",
    "int8",
    "hierarchical:int8",
    "partialUpdate",
    "sparseTopK",
    "sparseThreshold",
    "accumulate",
    "clip",
]
# to DistOpt, which sends by sparseTopK
GIVEN: dict[str, dict[str, Any]] = {"accumulate": {"accumulate": 2}, "clip": {"clip_norm": 0.2}}
STEPS = 7
MORE_STEPS = {
    "partialUpdate": 14,
    "accumulate": 9,
}  # four chunks and two kinds of calls, each with graphs of its own
# two ranks are three without jitter, and with calls of NCCL that block
FIRST = [("fp32", 3), ("int8", 2), ("sparseTopK", 3), ("accumulate", 3)]
WORLDS = FIRST + [world for size in (3, 2) for option in OPTIONS if (world := (option, size)) not in FIRST]
pytestmark = [
    pytest.mark.usefixtures("standin_libraries"),
    pytest.mark.skipif(not no_gpu(), reason="there is a GPU: gpu-check trains on two ranks itself"),
]


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
        free, mine = cupy.get_default_memory_pool().free, cupy.cuda.get_current_stream().ptr
        sizes = [
            num_bytes for (_, stream, num_bytes), unused in free.items() if stream == mine for _ in unused
        ]
        for num_bytes in sizes:
            self._arrays.append(cupy.empty(num_bytes, np.uint8))
            self._arrays[-1].data.memset_async(7, num_bytes)

    def check(self) -> None:
        assert all((array.get() == 7).all() for array in self._arrays)


def train(device: Device, communicator: Communicator, option: str, use_graph: bool) -> dict[str, Any]:
    """What a rank sees and has after some steps."""
    net, rank = Net(), communicator.rank
    sgd = opt.SGD(lr=opt.ExponentialDecay(0.1, 2, 0.7), momentum=0.9)
    num_steps = MORE_STEPS.get(option, STEPS)
    given, option = GIVEN.get(option, {}), "sparseTopK" if option in GIVEN else option
    net.set_optimizer(opt.DistOpt(sgd, communicator=communicator, threshold=60, bucket_bytes=2048, **given))
    net.compile([batch(device, rank, 0)[0]], use_graph=use_graph)
    rng = np.random.default_rng(1)
    start = {name: 0.3 * rng.random(x.shape) - 0.1 for name, x in net.get_states().items()}
    net.set_states({name: value.astype(np.float32) for name, value in start.items()})
    losses: list[Tensor] = []
    sent: list[int] = []
    hoard = Hoard()
    for step in range(num_steps):
        losses.append(net(*batch(device, rank, step), option)[1])
        sent.append(net.optimizer.bytes_sent)
        if use_graph:
            hoard.take_all_that_is_free()
    hoard.check()
    return {
        "losses": [to_numpy(loss).item() for loss in losses],
        "states": {name: to_numpy(value) for name, value in net.get_states().items()},
        "optimizer": net.optimizer.get_states(),
        "launches": sum(graph.num_launches for graph in graphs(net)) if use_graph else 0,
        "sent": [*sent, net.optimizer.total_bytes_sent],
    }


def train_everywhere(world: World, option: str) -> list[dict[str, Any]]:
    """On the CPU, on a GPU, and on a GPU with graphs."""
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
        assert eager["sent"] == graph["sent"] and eager["sent"][-1] > 0
        if option == "fp32":
            assert len({*eager["sent"][:-1]}) == 1  # also of the first step, in which NCCL begins
        for name, value in eager["states"].items():
            np.testing.assert_array_equal(graph["states"][name], value, name)
            if option != "partialUpdate" and "running" not in name:  # those are each rank's own
                np.testing.assert_array_equal(results[0][1]["states"][name], value, name)
        for name, value in eager["optimizer"].items():
            np.testing.assert_array_equal(graph["optimizer"][name], value, name)


@slow_but_first(("option", "size"), WORLDS, count=len(FIRST))
def test_ranks_with_gpus_train_as_ranks_without(
    option: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STANDIN_JITTER_US", "2000" if size == 3 else "0")
    monkeypatch.setenv("SINGA_LITE_NCCL_BLOCKING", str(int(size == 2)))
    check(run_ranks(train_everywhere, size, option, transport="none"), option)


LARGE_STEP = 6


def train_in_16_bits(world: World, precision: str) -> list[dict[str, Any]]:
    """Where a rank is after steps under autocast, on a GPU without and with graphs; one overflows float16 on rank 1."""
    communicator, found = DispatchCommunicator(host_of(world)), []
    device, rank = cuda_device_of_rank(), world.rank
    for use_graph in (False, True):
        device.SetRandSeed(5)
        net, sgd = Net(), opt.SGD(lr=0.05, momentum=0.9)
        net.set_optimizer(opt.DistOpt(sgd, communicator=communicator, check_finite="skip"))
        net.compile([batch(device, rank, 0)[0]], use_graph=use_graph, precision=precision)
        skips = []
        for step in range(10):
            x, labels = batch(device, rank, step)
            net(x * (1e5 if step == LARGE_STEP and rank == 1 else 1.0), labels)
            skips.append(net.optimizer.num_skipped)
        params = b"".join(to_numpy(value).tobytes() for value in net.get_params().values())
        scale = net.optimizer.loss_scale
        launches = sum(graph.num_launches for graph in graphs(net)) if use_graph else None
        found.append({"params": params, "skips": skips, "scale": scale, "launches": launches})
    communicator.close()
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_with_gpus_skip_updates_together_in_float16(size: int) -> None:
    results = run_ranks(train_in_16_bits, size, "fp16", transport="none")
    first = results[0][0]
    assert first["skips"][LARGE_STEP] == first["skips"][LARGE_STEP - 1] + 1
    assert first["skips"][-1] < 5 and first["scale"] == 2.0 ** (15 - first["skips"][-1])
    for of_rank in results:
        assert all(found | {"launches": None} == first for found in of_rank)
        assert of_rank[1]["launches"] >= 4


def test_ranks_with_gpus_hold_the_same_bits_in_bfloat16() -> None:
    results = run_ranks(train_in_16_bits, 3, "bf16", transport="none")
    assert results[0][0]["skips"] == [0] * 10
    for eager, graph in results:
        assert eager["params"] == graph["params"] == results[0][0]["params"] and graph["launches"] >= 4


def train_in_fixed_order(world: World) -> list[bytes]:
    """Parameters and momentum after 4 updates of 8 microbatches, on a GPU without and with graphs."""
    communicator, found = DispatchCommunicator(host_of(world)), []
    device, each = cuda_device_of_rank(), 8 // world.size
    device._index = world.rank  # as where each rank has a GPU of its own
    for use_graph in (False, True):
        net = Net()
        device.SetRandSeed(5)
        sgd = opt.SGD(lr=0.1, momentum=0.9)
        net.set_optimizer(opt.DistOpt(sgd, communicator=communicator, microbatches=8, order="fixed"))
        net.compile([batch(device, 0, 0)[0]], use_graph=use_graph)
        for call in range(4 * each):
            net(*batch(device, world.rank * each + call % each, call // each))
        assert sgd.step_counter == 4 and (not use_graph or sum(g.num_launches for g in graphs(net)) > each)
        states = [*net.get_params().values(), *(sgd.slots(p)["momentum"] for p in net.get_params().values())]
        found.append(b"".join(to_numpy(value).tobytes() for value in states))
    communicator.close()
    return found


def test_sums_in_fixed_order_have_the_same_bits_on_one_gpu_two_and_four() -> None:
    found = [run_ranks(train_in_fixed_order, size, transport="none") for size in (1, 2, 4)]
    assert len({bits for ranks in found for of_rank in ranks for bits in of_rank}) == 1


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


class TwoWorlds(Net):
    """A step with collectives of the world, then of a group."""

    def train_one_batch(self, x: Tensor, y: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
        result = super().train_one_batch(x, y)
        if self.of_group is not None:
            self.of_group(self.loss(self.forward(x), y))
        return result


def lose_a_rank(world: World, kind: type[Net]) -> tuple[str, int]:
    """The error that a rank gets from its GPU alone where another dies, and how many graphs it started."""
    device, communicator = cuda_device_of_rank(), DispatchCommunicator(host_of(world))
    net = kind()
    net.set_optimizer(opt.DistOpt(opt.SGD(lr=0.1), communicator=communicator))
    net.compile([batch(device, world.rank, 0)[0]], use_graph=True)
    group = communicator.new_group([0, 2])
    net.of_group = None if group is None else opt.DistOpt(opt.SGD(lr=0.1), communicator=group)
    for step in range(6):
        _, loss = net(*batch(device, world.rank, step))
    to_numpy(loss)
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    started = sum(graph.num_launches for graph in graphs(net))
    try:
        _, loss = net(*batch(device, world.rank, 6))
        to_numpy(loss)
    except CommError as error:
        communicator.close()
        return str(error), started
    return "no error", started


@pytest.mark.parametrize("kind", [Net, TwoWorlds])
def test_a_rank_killed_while_graphs_run_is_an_error_on_the_others(kind: type[Net]) -> None:
    first, killed, third = run_ranks(lose_a_rank, 3, kind, transport="none", return_exceptions=True)
    assert isinstance(killed, RankDied)
    for text, started in (first, third):
        assert "rank 1" in text and "died" in text and "graph" in text
        assert "all_reduce #" in text and "float32[" in text and started >= 3


def read_when_closed(world: World) -> bool:
    """Only collectives need the communicator."""
    device, communicator = cuda_device_of_rank(), DispatchCommunicator(host_of(world))
    net = Net()
    net.set_optimizer(opt.DistOpt(opt.SGD(lr=0.1), communicator=communicator))
    net.compile([batch(device, world.rank, 0)[0]], use_graph=True)
    for step in range(4):
        _, loss = net(*batch(device, world.rank, step))
    communicator.close()
    device.Sync()
    net.eval()
    x, y = batch(device, world.rank, 4)
    is_finite = np.isfinite(to_numpy(loss)).all() and np.isfinite(to_numpy(net.forward(x))).all()
    net.train()
    try:
        net(x, y)
    except CommError as error:
        return bool(is_finite and "closed" in str(error))
    return False


def test_a_gpu_can_be_read_when_its_communicator_is_closed() -> None:
    assert run_ranks(read_when_closed, 2, transport="none") == [True, True]


def reduce_on_threads(world: World) -> list[float]:
    """Sums of what the main thread has computed, each on a thread that has computed nothing."""
    device, communicator = cuda_device_of_rank(), DispatchCommunicator(host_of(world))
    dist = opt.DistOpt(opt.SGD(lr=0.1), communicator=communicator)
    found = []
    for number in range(5):
        x = Tensor(data=np.full(1000, world.rank + 1.0, np.float32), device=device)
        for _ in range(20):
            x = x + number
        thread = threading.Thread(target=dist.all_reduce, args=(x,))
        thread.start()
        thread.join()
        found += [to_numpy(x).min().item(), to_numpy(x).max().item()]
    communicator.close()
    return found


def test_a_collective_on_another_thread_comes_after_what_was_computed() -> None:
    expected = [3.0 + 40 * number for number in range(5) for _ in range(2)]
    assert run_ranks(reduce_on_threads, 2, transport="none") == [expected] * 2


class Branches(model.Model):
    """Two branches of equal sizes, whose gradients come in the order in which they were added."""

    def __init__(self, order: list[str]) -> None:
        super().__init__()
        self.left, self.right, self.order = layer.Linear(4), layer.Linear(4), order

    def forward(self, x: Tensor) -> Tensor:
        return autograd.add(*(getattr(self, name)(x) for name in self.order))


def differ_over_nccl(world: World, case: str) -> str:
    """The error where rank 1 sends what has the others' sizes in another order, or what has another shape."""
    device, communicator = cuda_device_of_rank(), DispatchCommunicator(host_of(world, 20))
    is_odd = world.rank == 1
    x = Tensor(data=np.full((3, 4), world.rank + 1.0, np.float32), device=device)
    x.requires_grad, x.stores_grad = False, False
    try:
        if case == "shapes":
            dist = opt.DistOpt(opt.SGD(lr=0.1), communicator=communicator)
            dist.all_reduce(autograd.reshape(x, (4, 3)) if is_odd else x)
            return "no error"
        nets = [Branches(["left", "right"][:: -1 if is_odd and case == "branches" else 1]) for _ in range(2)]
        for net in nets:
            sgd = opt.SGD(lr=0.1)
            net.set_optimizer(opt.DistOpt(sgd, communicator=communicator, bucket_bytes=16))
            net.compile([x])
        autograd.training = True
        for net in nets[:: -1 if is_odd and case == "models" else 1]:
            net.optimizer(autograd.reduce_mean(net.forward(x) * net.forward(x)))
    except CommError as error:
        return str(error)
    finally:
        communicator.abort("the test has ended")
    return "no error"


@pytest.mark.parametrize(
    ("case", "mine", "theirs"),
    [
        ("branches", "left", "right"),
        ("models", "DistOpt 2 fp32: right.W", "NCCL's all_reduce fp32: right.W"),
        ("shapes", "[4, 3]", "[3, 4]"),
    ],
)
def test_ranks_that_send_other_things_of_one_size_are_told(case: str, mine: str, theirs: str) -> None:
    for text in run_ranks(differ_over_nccl, 3, case, transport="none"):
        assert mine in text and theirs in text and "all_reduce" in text, text


def start_a_group_first(world: World) -> list[bool]:
    """Whether each NCCL communicator was made on the stream of another."""
    device, communicator = cuda_device_of_rank(), DispatchCommunicator(host_of(world))
    parents, make = [], dispatch.NcclCommunicator

    def note(*arguments: Any, parent: Any = None, **options: Any) -> Any:
        parents.append(parent)
        return make(*arguments, parent=parent, **options)

    dispatch.NcclCommunicator = note
    for some in (communicator.new_group([0, 1]), communicator.new_group([0, 1]), communicator):
        some.all_reduce(device.backend.zeros((3,), "float32"), "sum").wait()
    communicator.close()
    return [parent is not None for parent in parents]


def test_a_world_and_its_groups_share_a_stream_whoever_comes_first() -> None:
    assert run_ranks(start_a_group_first, 2, transport="none") == [[False, True, True]] * 2


def reduce_alone(world: World) -> tuple[list[float], tuple[int, ...]]:
    """What becomes of a GPU's array in a group of this rank alone."""
    device, communicator = cuda_device_of_rank(), DispatchCommunicator(host_of(world))
    alone = [communicator.new_group([rank]) for rank in range(world.size)][world.rank]
    x = Tensor(data=np.array([world.rank, 70000.0], np.float32), device=device)
    alone.all_reduce(x.data, "mean", wire_dtype="float16").wait()
    shape = alone.all_gather(x.data).wait().shape
    communicator.close()
    return to_numpy(x).tolist(), shape


def test_a_group_of_one_keeps_its_gpus_array() -> None:
    found = run_ranks(reduce_alone, 2, transport="none")
    assert found == [([rank, np.inf], (1, 2)) for rank in (0.0, 1.0)]


def fail_now_and_then(world: World, kind: str, option: str) -> tuple[list[float], list[float]]:
    """Losses of steps without an error in between, and with."""
    device = cuda_device_of_rank() if kind == "cuda" else create_cpu_device()
    communicator = DispatchCommunicator(host_of(world))
    add, num_added = BucketedSync.add_gradient, [0, 0]  # so far in this step, and which one fails

    def fail(self: BucketedSync, param: Tensor, grad: Tensor) -> None:
        num_added[0] += 1
        if num_added[0] == num_added[1]:
            raise ValueError("as the test wished")
        add(self, param, grad)

    BucketedSync.add_gradient = fail
    found = []
    for fails in (False, True):
        net = Net()
        sgd = opt.SGD(lr=0.1, momentum=0.9)
        net.set_optimizer(opt.DistOpt(sgd, communicator=communicator, threshold=60, bucket_bytes=256))
        net.compile([batch(device, world.rank, 0)[0]], use_graph=False)
        rng = np.random.default_rng(1)
        start = {name: 0.3 * rng.random(x.shape) - 0.1 for name, x in net.get_states().items()}
        net.set_states({name: value.astype(np.float32) for name, value in start.items()})
        losses = []
        for step in range(STEPS):
            if fails and step >= 3:
                num_added[:] = 0, 4 + step % 4
                with pytest.raises(ValueError):
                    net(*batch(device, world.rank, step), option)
            num_added[:] = 0, 0
            losses.append(to_numpy(net(*batch(device, world.rank, step), option)[1]).item())
        found.append(losses)
    communicator.close()
    return found[0], found[1]


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@slow_but_first("option", ["fp32", "fp16", "hierarchical"])
def test_a_step_after_one_that_failed_waits_for_what_that_left_in_flight(
    kind: str, option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STANDIN_JITTER_US", "2000")
    for without, with_failures in run_ranks(fail_now_and_then, 3, kind, option, transport="none"):
        assert without == with_failures
