# SPDX-License-Identifier: Apache-2.0
"""What a scheme does with gradients on a GPU goes on beside the backward pass: the stand-in's streams are held up."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from singa_lite.comm.base import World
from singa_lite.comm.dispatch import DispatchCommunicator
from singa_lite.comm.local import LocalCommunicator
from singa_lite.device import Device
from singa_lite.errors import OptionError
from singa_lite.sync import find_schemes
from singa_lite.sync.base import types_of
from singa_lite.sync.buckets import Bucket, BucketedSync, Exchange
from singa_lite.tensor import Tensor, to_numpy
from tests.backend.test_capture import batch, compiled, distributed, trained
from tests.comm.gpu_standin import host_of
from tests.devices import cuda_device, cuda_device_of_rank, no_gpu
from tests.limits import LIMIT_S
from tests.ranks import run_ranks
from tests.slow_cases import slow_but_first
from tests.sync.make_scheme import NoOptimizer, begin, make_scheme

COMPUTE, PACK, UNPACK = range(3)
SIZE = 200
OPTIONS = ["fp32", "fp16", "bf16", "sparseTopK", "sparseThreshold"]
pytestmark = [
    pytest.mark.usefixtures("standin_libraries"),
    pytest.mark.skipif(not no_gpu(), reason="there is a GPU: its streams cannot be held up"),
]


def hold_up(backend: Any, stream: int) -> threading.Event:
    """Let nothing that is given to the stream from now on happen before the event is set."""
    released = threading.Event()
    backend.streams.all[stream].stream.add(lambda: released.wait(LIMIT_S))
    return released


class Steps:
    """Steps of a scheme on two parameters, each a bucket of its own."""

    def __init__(self, world: World, option: str) -> None:
        self.device, self.rank = cuda_device_of_rank(), world.rank
        self.backend: Any = self.device.backend
        self.communicator = DispatchCommunicator(host_of(world))
        found = make_scheme(option, self.communicator, 60, 256)
        assert isinstance(found, BucketedSync)
        self.scheme = found
        self.params = [Tensor(data=np.zeros(SIZE, np.float32), device=self.device) for _ in range(2)]

    def begin(self) -> None:
        for flat in self.flats():
            flat[...] = 0
        sparse = {"spars": 0.1, "corr": False} if "corr" in types_of(type(self.scheme)) else {}
        begin(self.scheme, **sparse)

    def pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        for number, param in enumerate(self.params):
            values = np.random.default_rng([self.rank, number]).standard_normal(SIZE)
            yield param, Tensor(data=values.astype(np.float32), device=self.device)

    def add_all(self) -> None:
        """Push, and start what ``finish`` starts without waiting, as each parameter fills a bucket."""
        for pair in self.pairs():
            self.scheme.add_gradient(*pair)
        for in_flight in self.scheme._in_flight:
            in_flight.advance_soon()

    def means(self) -> list[bytes]:
        return [self.backend.to_numpy(mean.data).tobytes() for _, mean in self.scheme.finish()]

    def hold_up(self, stream: int) -> threading.Event:
        return hold_up(self.backend, stream)

    def flats(self) -> list[np.ndarray[Any, Any]]:
        """The memory in which the means appear."""
        return [grad.array.host for bucket in self.scheme._buckets.values() for _, grad in bucket.grads]


def comes_true(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + LIMIT_S / 2
    while not (found := condition()) and time.monotonic() < deadline:
        time.sleep(0.002)
    return found


def compute_beside(world: World, option: str) -> list[bool]:
    steps = Steps(world, option)
    steps.begin()
    steps.add_all()
    expected = steps.means()

    steps.begin()
    released = steps.hold_up(PACK)
    steps.add_all()
    y = steps.backend.empty((1,), "float32")
    steps.backend.run("fill", out=y, value=3.0)  # more of the backward pass
    goes_on = comes_true(lambda: y.host[0] == 3)
    nothing_came = not any(flat.tobytes() == mean for flat, mean in zip(steps.flats(), expected, strict=True))
    released.set()
    found = [goes_on, nothing_came, steps.means() == expected]

    if option != "sparseThreshold":  # whose host must see how many were selected
        steps.begin()
        steps.add_all()
        released = steps.hold_up(COMPUTE)
        means = list(steps.scheme.finish())
        y.host[0] = 0
        steps.backend.run("fill", out=y, value=3.0)  # the update, say
        came = comes_true(lambda: [flat.tobytes() for flat in steps.flats()] == expected)
        found += [came, y.host[0] == 0]
        released.set()
        found += [[steps.backend.to_numpy(mean.data).tobytes() for _, mean in means] == expected]
    steps.communicator.close()
    return found


@pytest.mark.parametrize("option", OPTIONS)
def test_packing_and_unpacking_wait_for_no_more_than_they_need(option: str) -> None:
    for found in run_ranks(compute_beside, 2, option, transport="none"):
        assert found == [True] * (3 if option == "sparseThreshold" else 6)


def pack_beside_unpacking(world: World, option: str) -> list[bool]:
    steps = Steps(world, option)
    steps.begin()
    steps.add_all()
    expected = steps.means()
    steps.begin()
    first, second = steps.pairs()
    steps.scheme.add_gradient(*first)
    released = steps.hold_up(PACK)
    steps.scheme.add_gradient(*second)
    means = list(steps.scheme.finish())
    came = comes_true(lambda: steps.flats()[0].tobytes() == expected[0])
    found = [came, steps.flats()[1].tobytes() != expected[1]]
    released.set()
    found += [[steps.backend.to_numpy(mean.data).tobytes() for _, mean in means] == expected]
    steps.communicator.close()
    return found


@pytest.mark.parametrize("option", ["fp32", "bf16", "sparseTopK"])  # fp16 sends a bucket once it has the next
def test_a_bucket_is_reduced_and_unpacked_while_the_next_is_packed(option: str) -> None:
    assert run_ranks(pack_beside_unpacking, 2, option, transport="none") == [[True] * 3] * 2


def update_early(world: World, option: str) -> bool:
    """Whether an update sees the means of a step whose means come late."""
    steps = Steps(world, option)
    steps.begin()
    steps.add_all()
    expected = steps.means()
    steps.begin()
    steps.add_all()
    released = steps.hold_up(UNPACK)
    kept = steps.backend.empty((2, SIZE), "float32")
    threading.Timer(0.2, released.set).start()
    for row, (_, mean) in zip(kept, list(steps.scheme.finish()), strict=True):
        steps.backend.run("copy", mean.data, out=row)
    found = [row.tobytes() for row in steps.backend.to_numpy(kept)]
    steps.communicator.close()
    return found == expected


@pytest.mark.parametrize("option", OPTIONS[:4])
def test_an_update_waits_for_the_means(option: str) -> None:
    assert run_ranks(update_early, 2, option, transport="none") == [True] * 2


# ---- steps that fail, and arrays that Python releases, in a world of one -------------------------------


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return cuda_device(monkeypatch)


def alone(option: str) -> Any:
    return make_scheme(option, LocalCommunicator(World()), 60, 256)


def full(device: Device, value: float) -> Tensor:
    return Tensor(data=np.full(SIZE, value, np.float32), device=device)


@slow_but_first("option", OPTIONS, count=2)
def test_memory_that_a_failed_step_packs_is_not_given_to_others(device: Any, option: str) -> None:
    released = hold_up(device.backend, PACK)

    def fail() -> None:
        scheme = alone(option)
        begin(scheme, **({"spars": 0.1} if option.startswith("sparse") else {}))
        scheme.add_gradient(full(device, 0), full(device, 5))
        for in_flight in scheme._in_flight:
            in_flight.advance_soon()  # and here backward() raises

    fail()
    gc.collect()
    arrays = [device.backend.empty((SIZE,), "float32") for _ in range(6)]
    for number, array in enumerate(arrays):
        device.backend.run("fill", out=array, value=number)
    threading.Timer(0.2, released.set).start()
    for number, array in enumerate(arrays):
        np.testing.assert_array_equal(device.backend.to_numpy(array), number)


def test_states_after_a_failed_step_are_those_that_it_left(device: Any) -> None:
    found = []
    for is_late in (False, True):
        scheme, param = alone("sparseTopK"), full(device, 0)
        param.name = "w"
        begin(scheme, spars=0.1)
        released = hold_up(device.backend, PACK)
        threading.Timer(0.2 * is_late, released.set).start()
        scheme.add_gradient(param, Tensor(data=np.arange(SIZE, dtype=np.float32), device=device))
        found.append(scheme.state_dict({param: "w"})["w:residual"])
    np.testing.assert_array_equal(*found)
    assert np.count_nonzero(found[0]) == 0.9 * SIZE - 1


class Feedback(BucketedSync):
    """Makes an array of its own once the collective has ended, and releases it in the next step."""

    names = ("feedback",)
    is_recordable = True

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.kept: dict[Bucket, Any] = {}

    def exchange(self, bucket: Bucket) -> Exchange:
        if bucket in self.kept:
            if len(self.kept) == 1:  # the second of two buckets
                threading.Timer(0.2, hold_up(bucket.backend, PACK).set).start()
            bucket.backend.run("add", bucket.flat, self.kept.pop(bucket), out=bucket.flat)
        yield self.communicator.all_reduce(bucket.flat, "mean", name=bucket.name)
        self.kept[bucket] = bucket.backend.empty(bucket.flat.shape, bucket.dtype)
        bucket.backend.run("copy", bucket.flat, out=self.kept[bucket])


class NoGenerator(BucketedSync):
    def exchange(self, bucket: Bucket) -> Exchange:  # type: ignore[return]
        self.communicator.all_reduce(bucket.flat, "mean", name=bucket.name)


class YieldsOneOfTwo(BucketedSync):
    def exchange(self, bucket: Bucket) -> Exchange:
        work = self.communicator.all_reduce(bucket.flat, "mean", name="first")
        self.communicator.all_reduce(bucket.flat, "mean", name="second")
        yield work


class YieldsAnArray(BucketedSync):
    def exchange(self, bucket: Bucket) -> Exchange:
        yield bucket.flat  # type: ignore[misc]


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (NoGenerator, "NoGenerator: exchange must yield"),
        (YieldsAnArray, r"YieldsAnArray.exchange yielded ndarray"),
    ],
)
def test_an_exchange_that_yields_no_works_says_so(kind: Any, text: str) -> None:
    scheme = kind(LocalCommunicator(World()), 1, 1, NoOptimizer())
    begin(scheme)
    with pytest.raises(OptionError, match=text):
        scheme.add_gradient(
            Tensor(data=np.ones(4, np.float32), requires_grad=True, stores_grad=True, name="w"),
            Tensor(data=np.ones(4, np.float32)),
        )


def test_a_collective_that_an_exchange_has_not_yielded_is_an_error() -> None:
    scheme = YieldsOneOfTwo(LocalCommunicator(World()), 1, 1, NoOptimizer())
    begin(scheme)
    param = Tensor(data=np.ones(4, np.float32), requires_grad=True, stores_grad=True, name="w")
    scheme.add_gradient(param, Tensor(data=np.ones(4, np.float32)))
    with pytest.raises(
        OptionError, match="YieldsOneOfTwo: exchange must yield 'second', which it has started"
    ):
        scheme.end([param for param, _ in scheme.finish()])


def test_a_scheme_may_let_go_of_an_array_that_is_still_read(device: Any) -> None:
    scheme, params = (
        Feedback(LocalCommunicator(World()), 60, 256, NoOptimizer()),
        [full(device, 0) for _ in range(2)],
    )
    for step in (1, 2):
        begin(scheme)
        for number, param in enumerate(params):
            scheme.add_gradient(param, full(device, 10.0**number))
        for number, (_, mean) in enumerate(list(scheme.finish())):
            np.testing.assert_array_equal(to_numpy(mean), step * 10.0**number)


def test_what_is_packed_after_a_read_is_waited_for_too(device: Any) -> None:
    backend = device.backend
    x, y = (full(device, value).data for value in (1, 2))
    with backend.packing():
        backend.to_numpy(x)
        threading.Timer(0.2, hold_up(backend, PACK).set).start()
        x[...] = y  # as a communicator may do
    backend.join()
    backend.run("add", x, y, out=x)
    np.testing.assert_array_equal(backend.to_numpy(x), 4)


@pytest.mark.parametrize("steps_before", [1, 4])  # the next replay runs call by call, or is a graph
def test_a_replay_waits_for_what_a_failed_step_packs(device: Any, steps_before: int) -> None:
    found = []
    for fails in (False, True):
        net = compiled(device, True, distributed())
        seen = trained(net, device, range(steps_before), "fp16")
        state = device.get_random_state()
        if fails:
            released = hold_up(device.backend, PACK)
            scheme = net.optimizer._schemes.get(find_schemes()["fp16"])
            scheme.finish = lambda: 1 / 0
            with pytest.raises(ZeroDivisionError):
                net(*batch(device, 99, size=5), "fp16")
            del scheme.finish
            threading.Timer(0.2, released.set).start()
        device.set_random_state(state)
        found.append(seen + trained(net, device, [steps_before], "fp16"))
        buckets = net.optimizer._schemes.get(find_schemes()["fp16"])._buckets.values()
        found[-1] += [to_numpy(grad).tobytes() for bucket in buckets for _, grad in bucket.grads]
    assert found[0] == found[1]
