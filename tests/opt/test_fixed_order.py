# SPDX-License-Identifier: Apache-2.0
"""DistOpt(microbatches=8, order="fixed"): the same bits on 1, 2, 4 and 8 ranks, all transports, and after a resize."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from threadpoolctl import threadpool_limits

from singa_lite import autograd, checkpoint, layer, model, opt
from singa_lite.data import ShardedSampler
from singa_lite.device import get_default_device, get_num_threads
from singa_lite.errors import (
    CheckpointError,
    CommError,
    DataError,
    NonFiniteError,
    OptionError,
    SingaLiteError,
)
from singa_lite.record import records
from singa_lite.tensor import Tensor, from_numpy, to_numpy
from tests.ranks import mpi_missing, run_ranks
from tests.slow_cases import slow_but_first

NUM_SAMPLES, BATCH = 203, 5  # the last global batch of an epoch has microbatches of 4 and 5
MODES = [("fp32", False), ("fp32", True), ("bf16", False), ("bf16", True)]
rng = np.random.default_rng(0)
IMAGES = rng.standard_normal((NUM_SAMPLES, 3, 6, 6)).astype(np.float32)
LABELS = rng.integers(0, 4, NUM_SAMPLES)
get_num_threads()  # loads the kernels: threadpool_limits holds for libraries that are loaded


class Net(model.Model):
    """Convolution, dropout and products, without batch statistics."""

    fails = False

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.relu, self.pool = layer.Conv2d(8, 3, padding=1), layer.ReLU(), layer.MaxPool2d(2)
        self.flatten, self.dropout, self.linear = layer.Flatten(), layer.Dropout(0.4), layer.Linear(4)
        self.loss = layer.SoftMaxCrossEntropy()

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.dropout(self.flatten(self.pool(self.relu(self.conv(x))))))

    def train_one_batch(self, x: Tensor, y: Tensor) -> Tensor:
        loss = self.loss(self.forward(x), y)
        if self.fails:
            raise ValueError("on purpose")
        self.optimizer(loss)
        return loss


def made(communicator: Any, dist_option: str, use_graph: bool, **options: Any) -> tuple[Net, ShardedSampler]:
    get_default_device().SetRandSeed(3)
    sgd = opt.SGD(lr=opt.ExponentialDecay(0.05, 10, 0.8), momentum=0.9)
    net = Net()
    arguments = {"microbatches": 8, "order": "fixed", "clip_norm": 1.0, **options}
    net.set_optimizer(opt.DistOpt(sgd, communicator=communicator, dist_option=dist_option, **arguments))
    net.compile([from_numpy(IMAGES[:BATCH])], use_graph=use_graph)
    each = arguments["microbatches"]
    return net, ShardedSampler(
        NUM_SAMPLES, BATCH, communicator.rank, communicator.size, seed=1, microbatches=each
    )


@threadpool_limits.wrap(limits=1)  # the order within a product depends on the threads
def train(net: Net, sampler: ShardedSampler, updates: int) -> None:
    """Train until so many updates were made."""
    while net.optimizer.step_counter < updates:
        for indices in sampler:
            net(from_numpy(IMAGES[indices]), from_numpy(LABELS[indices]))
            if net.optimizer.step_counter == updates and not net.optimizer._sums.num_calls:
                break
    autograd.training = False


def checksum(net: Net) -> int:
    """crc32 of parameters and momentum."""
    found = 0
    for _, value in sorted(net.get_params().items()):
        found = zlib.crc32(to_numpy(value).tobytes(), found)
        found = zlib.crc32(to_numpy(net.optimizer.slots(value)["momentum"]).tobytes(), found)
    return found


def checksums(communicator: Any, updates: int) -> list[int]:
    found = []
    for dist_option, use_graph in MODES:
        net, sampler = made(communicator, dist_option, use_graph)
        train(net, sampler, updates)
        assert all(info.break_reason is None for info in net.graph_info())
        found.append(checksum(net))
    return found


@pytest.fixture(scope="module")
def alone() -> list[int]:
    [found] = run_ranks(checksums, 1, 14, transport="local")
    assert len({found[0], found[2]}) == 2  # bf16 rounds
    return found


@slow_but_first("size", [4, 2, 8])
def test_every_number_of_ranks_ends_with_the_bits_of_one(alone: list[int], size: int) -> None:
    assert run_ranks(checksums, size, 14) == [alone] * size


@pytest.mark.skipif(bool(mpi_missing()), reason=mpi_missing() or "mpi4py is there")
def test_the_same_over_mpi(alone: list[int]) -> None:
    assert run_ranks(checksums, 4, 14, transport="mpi") == [alone] * 4


def without_the_third(communicator: Any) -> list[tuple[int, int]]:
    """Checksums of runs whose third update has a NaN in a microbatch of rank 0, and how many updates were left out."""
    found = []
    for use_graph in (False, True):
        net, sampler = made(communicator, "fp32", use_graph, check_finite="skip")
        calls = 8 // communicator.size
        with threadpool_limits(limits=1):
            for call, indices in zip(range(5 * calls), sampler, strict=False):
                images = IMAGES[indices] * np.float32(
                    np.nan if call == 2 * calls and communicator.rank == 0 else 1
                )
                net(from_numpy(images), from_numpy(LABELS[indices]))
        autograd.training = False
        found.append((checksum(net), net.optimizer.num_skipped))
    return found


def test_an_update_that_is_left_out_keeps_the_bits_of_every_number_of_ranks_equal() -> None:
    [alone] = run_ranks(without_the_third, 1, transport="local")
    assert [skipped for _, skipped in alone] == [1, 1] and alone[0] == alone[1]
    for size in (2, 4):
        assert run_ranks(without_the_third, size) == [alone] * size


@threadpool_limits.wrap(limits=1)
def with_draws_between(communicator: Any, use_graph: bool, draws: bool) -> int:
    """The checksum after updates between which each rank draws, and one of whose calls fails and is repeated."""
    net, sampler = made(communicator, "fp32", use_graph)
    calls = 8 // communicator.size
    for call, indices in zip(range(6 * calls), sampler, strict=False):
        x, y = from_numpy(IMAGES[indices]), from_numpy(LABELS[indices])
        if draws and call % calls == 0:
            net.forward(x)  # in training mode
        if draws and call == 3 * calls + calls // 2:
            net.fails = True
            with pytest.raises(ValueError, match="on purpose"):
                net(x, y)
            net.fails = False
        net(x, y)
    autograd.training = False
    return checksum(net)


@pytest.mark.parametrize("use_graph", [False, True], ids=["eager", "recorded"])
def test_what_is_drawn_between_calls_changes_no_bits(use_graph: bool) -> None:
    [undisturbed] = run_ranks(with_draws_between, 1, use_graph, False, transport="local")
    for size in (1, 2, 4):
        assert run_ranks(with_draws_between, size, use_graph, True) == [undisturbed] * size


class Langevin(opt.SGD):
    """Adds noise to each gradient; runs as Python in replays."""

    std = 0.5

    def update_all(self, pairs: Any) -> None:
        super().update_all(
            [(param, grad + Tensor(param.shape).gaussian(0, self.std)) for param, grad in pairs]
        )


class RecordedLangevin(Langevin):
    is_recordable = True


class NoisyNet(Net):
    """Draws behind its optimizer's calls, and adds that to the parameters, if `adds_noise`."""

    def train_one_batch(self, x: Tensor, y: Tensor, adds_noise: bool) -> Tensor:  # type: ignore[override]
        loss = super().train_one_batch(x, y)
        if adds_noise:
            for param in self.get_params().values():
                param += Tensor(param.shape).gaussian(0, 0.05)
        return loss


def batches(
    communicator: Any, sampler: ShardedSampler, num_calls: int, check_finite: str | None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of 8 microbatches an update; with `check_finite` the first of the third update is NaN, on rank 0."""
    for call, indices in zip(range(num_calls), sampler, strict=False):
        is_bad = check_finite is not None and call == 2 * 8 // communicator.size and communicator.rank == 0
        images = IMAGES[indices] * np.float32(np.nan if is_bad else 1)
        yield from_numpy(images), from_numpy(LABELS[indices])


@threadpool_limits.wrap(limits=1)
def noisy(
    communicator: Any,
    kind: type[opt.SGD],
    use_graph: bool,
    check_finite: str | None,
    always: bool = False,
    folder: str | None = None,
    updates: int = 4,
) -> tuple[int, int]:
    """Checksums of parameters, and of numbers drawn behind the last call; noise behind updates, or `always`.

    The third update is left out with `check_finite`.
    """
    get_default_device().SetRandSeed(3)
    net = NoisyNet()
    arguments: dict[str, Any] = {"microbatches": 8, "order": "fixed", "check_finite": check_finite}
    net.set_optimizer(opt.DistOpt(kind(lr=0.05, momentum=0.9), communicator=communicator, **arguments))
    net.compile([from_numpy(IMAGES[:BATCH])], use_graph=use_graph)
    sampler = ShardedSampler(NUM_SAMPLES, BATCH, communicator.rank, communicator.size, seed=1, microbatches=8)
    if folder is not None:
        checkpoint.load_job(folder, net, sampler=sampler)
    calls, counters = 8 // communicator.size, set[int]()
    for call, (x, y) in enumerate(batches(communicator, sampler, updates * calls, check_finite)):
        net(x, y, always or call % calls == calls - 1)
        counters.add(get_default_device().get_random_state()[1])
    if folder is not None:
        checkpoint.save_job(folder, net, sampler=sampler)
    autograd.training = False
    assert len(counters) == updates * calls or check_finite  # no call draws what another one has drawn
    assert all(info.break_reason is None for info in net.graph_info())
    return checksum(net), zlib.crc32(to_numpy(Tensor((5,)).gaussian(0, 1)).tobytes())


@pytest.mark.parametrize("use_graph", [False, True], ids=["eager", "recorded"])
@pytest.mark.parametrize(
    ("kind", "check_finite"), [(Langevin, None), (RecordedLangevin, None), (RecordedLangevin, "skip")]
)
def test_what_is_drawn_in_and_behind_an_update_is_equal_on_all_numbers_of_ranks(
    kind: type[opt.SGD], use_graph: bool, check_finite: str | None
) -> None:
    [alone] = run_ranks(noisy, 1, kind, False, check_finite, transport="local")
    for size in (1, 2, 4):
        assert run_ranks(noisy, size, kind, use_graph, check_finite) == [alone] * size


@pytest.mark.parametrize("use_graph", [False, True], ids=["eager", "recorded"])
def test_noise_behind_every_call_is_equal_on_all_ranks(use_graph: bool) -> None:
    first, second = run_ranks(noisy, 2, Langevin, use_graph, None, True)
    assert first == second


def test_noise_of_updates_is_that_of_a_run_that_nobody_stopped(tmp_path: Any) -> None:
    [whole] = run_ranks(noisy, 1, RecordedLangevin, True, None, transport="local")
    for size in (4, 2):
        found = run_ranks(noisy, size, RecordedLangevin, True, None, False, str(tmp_path / "job"), 2)
        assert found == [found[0]] * size
    assert found == [whole] * 2


@threadpool_limits.wrap(limits=1)
def own_loop(communicator: Any, check_finite: str | None) -> int:
    """The checksum after a loop without steps of a Model; the third update is left out with `check_finite`."""
    get_default_device().SetRandSeed(3)
    net = Net()
    net.compile([from_numpy(IMAGES[:BATCH])])
    arguments: dict[str, Any] = {"microbatches": 8, "order": "fixed", "check_finite": check_finite}
    sgd = opt.DistOpt(Langevin(0.05, 0.9), communicator=communicator, **arguments)
    sgd.prepare(net.get_params(), {})
    sampler = ShardedSampler(NUM_SAMPLES, BATCH, communicator.rank, communicator.size, seed=1, microbatches=8)
    autograd.training = True
    for x, y in batches(communicator, sampler, 5 * 8 // communicator.size, check_finite):
        with contextlib.suppress(NonFiniteError):
            sgd(net.loss(net.forward(x), y))
    autograd.training = False
    net.set_optimizer(sgd)
    return checksum(net)


@pytest.mark.parametrize("check_finite", [None, "raise", "skip"])
def test_a_loop_without_a_model_draws_by_the_number_of_the_microbatch(check_finite: str | None) -> None:
    [alone] = run_ranks(own_loop, 1, check_finite, transport="local")
    for size in (2, 4):
        assert run_ranks(own_loop, size, check_finite) == [alone] * size


class Twice(Net):
    """Two microbatches a step."""

    places = False

    def train_one_batch(self, x: Tensor, y: Tensor) -> None:  # type: ignore[override]
        super().train_one_batch(x, y)
        if self.places:
            self.optimizer.place_streams()
        super().train_one_batch(x, y)


@threadpool_limits.wrap(limits=1)
def two_a_step(communicator: Any, use_graph: bool, places: bool) -> int | str:
    get_default_device().SetRandSeed(3)
    net = Twice()
    net.places = places
    net.set_optimizer(
        opt.DistOpt(opt.SGD(0.05, 0.9), communicator=communicator, microbatches=4, order="fixed")
    )
    x, y = from_numpy(IMAGES[:BATCH]), from_numpy(LABELS[:BATCH])
    net.compile([x], use_graph=use_graph)
    try:
        for _ in range(12 // communicator.size):
            net(x, y)
    except OptionError as error:
        return str(error)
    autograd.training = False
    return checksum(net)


@pytest.mark.parametrize("use_graph", [False, True], ids=["eager", "recorded"])
def test_a_step_of_several_microbatches_places_the_streams_itself(use_graph: bool) -> None:
    [alone] = run_ranks(two_a_step, 1, False, True, transport="local")
    for size in (1, 2, 4):
        assert run_ranks(two_a_step, size, use_graph, True) == [alone] * size
    for error in run_ranks(two_a_step, 2, use_graph, False):
        assert "place_streams() of the optimizer" in str(error)


def in_any_order(communicator: Any) -> int:
    net, sampler = made(communicator, "fp32", False, order="any")
    train(net, sampler, 14)
    return checksum(net)


MANY = 128  # more than the 64 records of a model


class Small(model.Model):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.loss = layer.Linear(6), layer.Linear(3), layer.SoftMaxCrossEntropy()
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        return self.second(autograd.relu(self.first(x)))

    def train_one_batch(self, x: Tensor, y: Tensor) -> Tensor:
        loss = self.loss(self.forward(x), y)
        if self.fails:
            raise ValueError("on purpose")
        self.optimizer(loss)
        return loss


@threadpool_limits.wrap(limits=1)
def small_checksums(
    communicator: Any,
    microbatches: int,
    kinds: int,
    bad: int,
    save: int,
    mode: str | None,
    short: int = -1,
    failing: int = -1,
    only_last: bool = False,
) -> list[int]:
    """Checksums after each update; one has an infinity in the last microbatch, behind one the model is saved.

    Args:
        kinds: how many batch sizes take turns.
        short: the update whose last microbatch has a sample less.
        failing: the update in which the last microbatch but one fails, and is repeated.
        only_last: whether batch sizes take turns in the last microbatch alone.
    """
    get_default_device().SetRandSeed(3)
    net = Small()
    arguments: dict[str, Any] = {"microbatches": microbatches, "order": "fixed", "check_finite": mode}
    net.set_optimizer(opt.DistOpt(opt.SGD(lr=0.1, momentum=0.9), communicator=communicator, **arguments))
    net.compile([from_numpy(np.zeros((4, 7), np.float32))], use_graph=True, precision="bf16")
    found, each = [], microbatches // communicator.size
    for update in range(9 * kinds):
        rng = np.random.default_rng(update)
        size = 4 if only_last else 4 - update % kinds
        x = rng.standard_normal((microbatches, size, 7)).astype(np.float32)
        y = rng.integers(0, 3, (microbatches, size))
        if update == bad:
            x[-1, 0, 0] = np.inf
        with contextlib.suppress(ArithmeticError):
            for number in range(communicator.rank * each, (communicator.rank + 1) * each):
                used = slice(None)
                if number == microbatches - 1:
                    used = slice(size - (update % kinds if only_last else update == short))
                batch = from_numpy(x[number, used]), from_numpy(y[number, used])
                if update == failing and number == microbatches - 2:
                    net.fails = True
                    with pytest.raises(ValueError, match="on purpose"):
                        net(*batch)
                    net.fails = False
                net(*batch)
        if update == save:
            net.snapshot()
        found.append(checksum(net))
    autograd.training = False
    has_room = kinds <= records.MAX_RECORDS or (only_last and communicator.rank < communicator.size - 1)
    assert all(info.break_reason is None for info in net.graph_info()) == has_room
    return found


def with_few_records(communicator: Any, only_last: bool) -> list[int]:
    """Checksums where more batch sizes take turns than the model keeps records of."""
    before, records.MAX_RECORDS = records.MAX_RECORDS, 2
    try:
        return small_checksums(communicator, 4, 3, -1, -1, None, only_last=only_last)
    finally:
        records.MAX_RECORDS = before


@pytest.mark.parametrize("only_last", [False, True], ids=["all", "the last microbatch"])
def test_steps_without_room_for_records_run_eagerly_from_the_same_update_on(only_last: bool) -> None:
    [expected] = run_ranks(with_few_records, 1, only_last, transport="local")
    for size in (2, 4):
        assert run_ranks(with_few_records, size, only_last) == [expected] * size


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param((MANY, 1, -1, -1, None), id="many microbatches"),
        pytest.param((32, 3, -1, -1, None), id="three batch sizes", marks=pytest.mark.slow),
        pytest.param((4, 1, 3, 2, "skip"), id="left out behind a save"),
        pytest.param((4, 1, 3, 2, "raise"), id="an error behind a save"),
        pytest.param((4, 1, 0, -1, "skip"), id="the first one left out"),
        pytest.param((4, 1, 3, -1, "skip", 3), id="left out with a short batch"),
        pytest.param((4, 1, 3, -1, "raise", 3), id="an error with a short batch"),
        pytest.param((4, 1, -1, -1, None, -1, 3), id="an error of one rank"),
    ],
)
def test_replays_begin_at_the_same_update_on_every_number_of_ranks(arguments: Any) -> None:
    [expected] = run_ranks(small_checksums, 1, *arguments, transport="local")
    for size in (2, 4):
        assert run_ranks(small_checksums, size, *arguments) == [expected] * size


def go_on_with_another_seed(communicator: Any, path: str) -> tuple[list[int], list[int]]:
    """Checksums of a run, and of one that has another seed and loads what the first has saved."""
    found = []
    for seed in (3, 4):
        net, sampler = made(communicator, "fp32", True)
        if seed == 4:
            get_default_device().SetRandSeed(4)
            net.set_optimizer(
                opt.DistOpt(
                    opt.SGD(lr=opt.ExponentialDecay(0.05, 10, 0.8), momentum=0.9),
                    communicator=communicator, microbatches=8, order="fixed", clip_norm=1.0,
                )
            )  # fmt: skip
            net.compile([from_numpy(IMAGES[:BATCH])], use_graph=True)
            net.load_states(f"{path}/{communicator.rank}.zip")
        else:
            train(net, sampler, 3)
            net.save_states(f"{path}/{communicator.rank}.zip")
        sampler = ShardedSampler(
            NUM_SAMPLES, BATCH, communicator.rank, communicator.size, seed=7, microbatches=8
        )
        train(net, sampler, 6)
        found.append(checksum(net))
    return found[0], found[1]


def test_a_checkpoint_brings_its_seed(tmp_path: Any) -> None:
    [(whole, second), *others] = run_ranks(go_on_with_another_seed, 2, str(tmp_path))
    assert whole == second and others == [(whole, second)]


def test_without_it_the_bits_depend_on_the_number_of_ranks(alone: list[int]) -> None:
    """So that the tests above can fail."""
    found = {run_ranks(in_any_order, size)[0] for size in (2, 4)}
    assert len({*found, alone[0]}) == 3


def mean_gradient(communicator: Any) -> list[float]:
    """How far the first update is off the float64 mean over all microbatches, in units of its largest element."""
    net, sampler = made(communicator, "fp32", False, clip_norm=None)
    net.dropout.ratio = 0.0
    before = {name: to_numpy(value).astype(np.float64) for name, value in net.get_params().items()}
    grads: dict[str, Any] = dict.fromkeys(before, 0.0)
    every = ShardedSampler(NUM_SAMPLES, BATCH, 0, 1, seed=1, microbatches=8)
    for number, indices in enumerate(every):
        if number == 8:
            break
        autograd.training = True
        loss = net.loss(net.forward(from_numpy(IMAGES[indices])), from_numpy(LABELS[indices]))
        for param, grad in autograd.backward(loss):
            grads[net.optimizer.name_of(param)] += to_numpy(grad).astype(np.float64) / 8
    train(net, sampler, 1)
    found = []
    for name, value in net.get_params().items():
        step = (before[name] - to_numpy(value)) / 0.05
        found.append(float(np.abs(step - grads[name]).max() / np.abs(grads[name]).max()))
    return found


@pytest.mark.parametrize("size", [1, 4])
def test_the_update_is_by_the_mean_over_all_microbatches(size: int) -> None:
    for found in run_ranks(mean_gradient, size, transport="local" if size == 1 else "shm"):
        assert len(found) == 4 and max(found) < 1e-4


def resumed(communicator: Any, folder: str, updates: int, saves: bool) -> tuple[int | None, list[int]]:
    """Go on by so many updates, recorded; save in the end. The step gone on from, and the checksums."""
    found, start = [], None
    for dist_option in ("fp32", "bf16"):
        net, sampler = made(communicator, dist_option, True)
        job = checkpoint.load_job(f"{folder}/{dist_option}", net, sampler=sampler)
        start = None if job is None else job.step
        train(net, sampler, (start or 0) + updates)
        checkpoint.save_job(f"{folder}/{dist_option}", net, sampler=sampler)
        if not saves:
            train(net, sampler, (start or 0) + 2 * updates)
            checkpoint.save_job(f"{folder}/{dist_option}", net, sampler=sampler)
            train(net, sampler, (start or 0) + 3 * updates)
        found.append(checksum(net))
    return start, found


def test_a_job_that_loses_ranks_and_gets_them_again_ends_with_the_same_bits(tmp_path: Any) -> None:
    [(_, whole)] = run_ranks(resumed, 1, str(tmp_path / "whole"), 6, False, transport="local")
    folder = str(tmp_path / "changed")
    assert run_ranks(resumed, 4, folder, 6, True)[0][0] is None
    assert run_ranks(resumed, 2, folder, 6, True)[0][0] == 6
    assert run_ranks(resumed, 8, folder, 6, True) == [(12, whole)] * 8


def within_a_batch(communicator: Any, folder: str) -> list[str]:
    """Save between the microbatches of an update and go on, on as many ranks and then on others."""
    net, sampler = made(communicator, "fp32", False)
    errors = []
    try:
        job = checkpoint.load_job(folder, net, sampler=sampler)
    except CheckpointError as error:
        return [str(error)]
    assert job is None
    loop = iter(sampler)
    for _ in range(3):
        indices = next(loop)
        net(from_numpy(IMAGES[indices]), from_numpy(LABELS[indices]))
    checkpoint.save_job(folder, net, sampler=sampler)
    train(net, sampler, 2)
    again, sampler = made(communicator, "fp32", False)
    checkpoint.load_job(folder, again, sampler=sampler)
    train(again, sampler, 2)
    errors.append("" if checksum(again) == checksum(net) else "other bits")
    return errors


def test_a_save_between_microbatches_is_for_as_many_ranks(tmp_path: Any) -> None:
    assert run_ranks(within_a_batch, 2, str(tmp_path)) == [[""]] * 2
    for [error] in run_ranks(within_a_batch, 4, str(tmp_path)):
        assert "only 2 ranks can go on from" in error


class TwoHeads(Net):
    """A parameter that not every call uses."""

    def __init__(self) -> None:
        super().__init__()
        self.other = layer.Linear(4)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        y = self.flatten(self.pool(self.relu(self.conv(x))))
        self.calls += 1
        return autograd.add(self.linear(y), self.other(y)) if self.calls % 3 else self.linear(y)


def refused(communicator: Any) -> list[str]:
    errors = []

    def attempt(action: Any) -> None:
        try:
            action()
            errors.append("no error")
        except SingaLiteError as error:
            errors.append(f"{type(error).__name__}: {error}")

    def dist(**options: Any) -> Any:
        return opt.DistOpt(opt.SGD(lr=0.1), communicator=communicator, **options)

    def two_heads() -> None:
        net = TwoHeads()
        net.set_optimizer(dist(microbatches=8, order="fixed"))
        net.compile([from_numpy(IMAGES[:BATCH])])
        for _ in range(4):
            net(from_numpy(IMAGES[:BATCH]), from_numpy(LABELS[:BATCH]))

    def by_hand() -> None:
        autograd.training = True
        net = Net()
        loss = net.loss(net.forward(from_numpy(IMAGES[:BATCH])), from_numpy(LABELS[:BATCH]))
        dist(microbatches=8, order="fixed")(loss)

    def reseeded() -> None:
        net, sampler = made(communicator, "fp32", False)
        get_default_device().SetRandSeed(9)
        train(net, sampler, 1)

    def other_seed() -> None:
        get_default_device().SetRandSeed(communicator.rank)
        net = Net()
        net.set_optimizer(dist(microbatches=8, order="fixed"))
        net.compile([from_numpy(IMAGES[:BATCH])])

    attempt(lambda: dist(microbatches=8, order="sorted"))
    attempt(lambda: dist(order="fixed"))
    attempt(lambda: dist(microbatches=6, order="fixed"))
    attempt(lambda: dist(microbatches=8, accumulate=2))
    attempt(lambda: dist(microbatches=7))
    attempt(lambda: dist(microbatches=8, order="fixed", dist_option="sparseTopK"))
    attempt(two_heads)
    attempt(by_hand)
    attempt(reseeded)
    attempt(lambda: ShardedSampler(40, 4, communicator.rank, 2, microbatches=3))
    attempt(lambda: ShardedSampler(7, 4, communicator.rank, 2, microbatches=8))
    attempt(other_seed)
    autograd.training = False
    return errors


REFUSALS = [
    (OptionError, "order = 'sorted'"),
    (OptionError, "a power of two, not None"),
    (OptionError, "a power of two, not 6"),
    (OptionError, "accumulate and microbatches"),
    (OptionError, "microbatches = 7 must be divisible by the 2 ranks"),
    (OptionError, "fp32 and bf16, not for sparseTopK"),
    (OptionError, "has none in this one"),
    (SingaLiteError, "call prepare(params, buffers)"),
    (OptionError, "was 3 at first and is 9 now"),
    (OptionError, "microbatches = 3 must be divisible by the 2 ranks"),
    (DataError, "7 samples cannot feed 8 microbatches"),
    (CommError, "their random seeds"),
]


def test_what_would_break_the_order_is_refused() -> None:
    for errors in run_ranks(refused, 2):
        assert len(errors) == len(REFUSALS)
        for (kind, text), error in zip(REFUSALS, errors, strict=True):
            assert text in error, errors
            assert kind is SingaLiteError or error.startswith(kind.__name__)


def stopped(communicator: Any) -> int:
    """How many updates were made when all ranks were told to stop, which rank 3 asks for after two."""
    net, sampler = made(communicator, "fp32", False)
    for _ in range(4):
        for indices in sampler:
            net(from_numpy(IMAGES[indices]), from_numpy(LABELS[indices]))
            if communicator.rank == 3 and net.optimizer.step_counter == 2:
                net.optimizer.request_stop()
            if net.optimizer.should_stop:
                autograd.training = False
                return int(net.optimizer.step_counter)
    return -1


def test_a_request_to_stop_reaches_all_pairs_of_ranks_in_one_update() -> None:
    assert run_ranks(stopped, 4) == [3] * 4
