# SPDX-License-Identifier: Apache-2.0
"""int8 on every transport: every code that is sent is that of a model of all ranks, and so is what comes of it."""

from __future__ import annotations

import functools
import hashlib
import math
from typing import Any

import numpy as np
import pytest

from singa_lite import autograd, layer, model, opt
from singa_lite.comm.base import Communicator, World
from singa_lite.comm.local import LocalCommunicator
from singa_lite.errors import DTypeError, OptionError
from singa_lite.tensor import Tensor, to_numpy
from tests.backend.test_quantize import message_bytes
from tests.backend.test_quantize import model as coded
from tests.limits import LIMIT_S
from tests.ranks import mpi_missing, run_ranks
from tests.sync.make_scheme import begin, make_scheme

STEPS = 8
SHAPES = [(30, 20), (7,), (2, 3, 5)]  # two groups at a threshold of 100: the first, and the others
GROUPS = [["p0"], ["p1", "p2"]]
WORLDS = [
    ("local", 1),
    *(("shm", size) for size in (1, 2, 3, 4)),
    *(pytest.param("mpi", size, marks=pytest.mark.slow) for size in (1, 2, 3, 4)),
]
KINDS = {"stochastic": {"seed": 5}, "ef": {"ef": True}}


def gradients_of(rank: int, step: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng([11, rank, step])
    return {f"p{i}": rng.standard_normal(shape).astype(np.float32) for i, shape in enumerate(SHAPES)}


class Listening:
    """A communicator that keeps what is given to it."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator, self.sent = communicator, []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._communicator, name)

    def all_gather(self, array: np.ndarray, **options: Any) -> Any:
        self.sent.append(array.copy().ravel())
        return self._communicator.all_gather(array, **options)

    def all_to_all(self, array: np.ndarray, **options: Any) -> Any:
        self.sent.append(array.copy().ravel())
        return self._communicator.all_to_all(array, **options)


def several_steps(communicator: Any, options: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Of each step: what was sent, the gradients to apply, the residuals, and the bytes."""
    listening = Listening(communicator)
    scheme = make_scheme("int8", listening, 100, 1 << 30)  # type: ignore[arg-type]
    params = [Tensor(shape, name=f"p{i}") for i, shape in enumerate(SHAPES)]
    log = []
    for step in range(STEPS):
        before = communicator.traffic.copy()
        begin(scheme, step, **options)
        for param in params:
            scheme.add_gradient(param, Tensor(data=gradients_of(communicator.rank, step)[param.name]))
        result = {param.name: to_numpy(grad).copy() for param, grad in scheme.finish()}
        scheme.end(params)
        kept = scheme.state_dict({param: param.name for param in params})
        traffic = communicator.traffic.since(before)
        log.append((listening.sent, result, kept, (traffic.bytes_sent, traffic.bytes_payload)))
        listening.sent = []
    return log


def over_mpi(communicator: Any) -> dict[str, list[tuple[Any, ...]]]:
    return {kind: several_steps(communicator, options) for kind, options in KINDS.items()}


@functools.cache
def logs_of(transport: str, size: int) -> list[dict[str, list[tuple[Any, ...]]]]:
    return run_ranks(over_mpi, size, transport=transport, timeout_s=LIMIT_S)


def seed_of(seed: int, rank: int, what: str, group: list[str]) -> int:
    text = f"{seed} {rank} {what} {', '.join(group)}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "little")


def decoded(message: np.ndarray, row_size: int) -> np.ndarray:
    """What one row stands for, in float32."""
    blocks = -(-row_size // 256)
    scales = message[: 4 * blocks].copy().view(np.float32)
    return message[4 * blocks :].view(np.int8).astype(np.float32) * np.repeat(scales, 256)[:row_size]


def step_of_model(
    grads: list[np.ndarray], kept: list[np.ndarray], group: list[str], step: int, kind: str
) -> tuple[list[list[np.ndarray]], np.ndarray]:
    """What each rank sends of a group, and the result in float64; ``kept`` is changed."""
    size, n, seed = len(grads), grads[0].size, KINDS[kind].get("seed", 0)
    share = n if size <= 2 else math.ceil(n / (256 * size)) * 256
    rows = 1 if size <= 2 else size
    first = []
    for rank, grad in enumerate(grads):
        if kind == "ef":
            given = grad + kept[rank]
            message = coded(given, share, rows, None)
            kept[rank][:] = given - np.concatenate([decoded(row, share) for row in message])[:n]
        else:
            message = coded(grad, share, rows, seed_of(seed, rank, "gradient", group), step)
        first.append(message)
    if size <= 2:
        return [[m.ravel()] for m in first], np.mean([decoded(m[0], n).astype(float) for m in first], axis=0)
    second = []
    for rank in range(size):
        total = decoded(first[0][rank], share)
        for other in first[1:]:
            total = total + decoded(other[rank], share)
        stream = seed_of(seed, rank, "average", group), step
        second.append(coded(total / np.float32(size), share, 1, *stream).ravel())
    whole = np.concatenate([decoded(row, share) for row in second])[:n]
    return [[m.ravel(), s] for m, s in zip(first, second, strict=True)], whole.astype(float)


@functools.cache
def model_of(size: int, kind: str) -> list[tuple[list[list[np.ndarray]], np.ndarray, list[list[np.ndarray]]]]:
    """Of each step: what each rank sends in its order, the result of all groups, and each rank's residuals."""
    kept = [[np.zeros(600, np.float32), np.zeros(37, np.float32)] for _ in range(size)]
    log = []
    for step in range(STEPS):
        grads = [gradients_of(rank, step) for rank in range(size)]
        sent: list[list[np.ndarray]] = [[] for _ in range(size)]
        results = []
        for number, group in enumerate(GROUPS):
            flats = [np.concatenate([grad[name].ravel() for name in group]) for grad in grads]
            messages, result = step_of_model(flats, [of[number] for of in kept], group, step, kind)
            results.append(result)
            for rank in range(size):
                sent[rank] += messages[rank]
        log.append((sent, np.concatenate(results), [[part.copy() for part in of] for of in kept]))
    return log


def in_order(parts: dict[str, np.ndarray], suffix: str = "") -> np.ndarray:
    return np.concatenate([parts[f"p{i}{suffix}"].ravel() for i in range(len(SHAPES))])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("transport", "size"), WORLDS)
def test_codes_are_the_models_and_all_ranks_get_its_result(transport: str, size: int, kind: str) -> None:
    if transport == "mpi" and (reason := mpi_missing()):
        pytest.skip(reason)
    logs = [of[kind] for of in logs_of(transport, size)]
    for step, (sent, expected, kept) in enumerate(model_of(size, kind)):
        for rank, log in enumerate(logs):
            ours, result, states, _ = log[step]
            order = sorted(range(len(ours)), key=lambda i: ours[i].size)  # both phases of the groups overlap
            for mine, theirs in zip(order, sorted(sent[rank], key=len), strict=True):
                np.testing.assert_array_equal(ours[mine], theirs, f"step {step}, rank {rank}")
            np.testing.assert_allclose(in_order(result), expected, rtol=1e-5, atol=1e-7)
            assert in_order(result).tobytes() == in_order(logs[0][step][1]).tobytes()
            if kind == "ef":
                np.testing.assert_array_equal(in_order(states, ":residual"), np.concatenate(kept[rank]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("transport", "size"), WORLDS)
def test_bytes_follow_the_closed_formula(transport: str, size: int, kind: str) -> None:
    if transport == "mpi" and (reason := mpi_missing()):
        pytest.skip(reason)
    sent = 0
    for n in (600, 37):
        if size <= 2:
            sent += (size - 1) * (n + 4 * math.ceil(n / 256))
        else:
            sent += 2 * (size - 1) * 260 * math.ceil(n / (256 * size))
    for log in logs_of(transport, size):
        assert {step[3][0] for step in log[kind]} == {sent}


def test_bytes_of_the_mnist_cnn_at_two_ranks() -> None:
    assert message_bytes(431_080) == 437_816


def nan_on_rank_1(communicator: Any, ef: bool) -> list[tuple[bool, bool]]:
    """Of two steps, of which the first has a NaN on the last rank: whether results and residuals are finite."""
    scheme, found = make_scheme("int8", communicator, 100, 1 << 30), []
    param = Tensor((50,), name="w")
    for step in range(2):
        begin(scheme, step, ef=ef)
        grad = np.ones(50, np.float32)
        grad[7] = np.nan if step == 0 and communicator.rank == communicator.size - 1 else 1
        scheme.add_gradient(param, Tensor(data=grad))
        [(_, result)] = scheme.finish()
        kept = scheme.state_dict({param: "w"}).values()
        found.append((bool(np.isfinite(to_numpy(result)).all()), all(np.isfinite(k).all() for k in kept)))
        scheme.end([param])
    return found


@pytest.mark.parametrize("ef", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_nan_reaches_all_ranks_in_its_step_and_no_later_one(size: int, ef: bool) -> None:
    for found in run_ranks(nan_on_rank_1, size, ef):
        assert found == [(False, True), (True, True)]


def test_what_is_not_sent_as_int8_is_refused() -> None:
    scheme = make_scheme("int8", LocalCommunicator(World()), 100, 1 << 30)
    begin(scheme)
    scheme.add_gradient(Tensor((2,), dtype="float64", name="w"), Tensor((2,), dtype="float64"))
    with pytest.raises(DTypeError, match="w is float64; only float32 and float16 gradients are sent as int8"):
        list(scheme.finish())
    for seed in (-1, 0.5, True):
        with pytest.raises(OptionError, match="int8: seed"):
            scheme.Options(seed=seed)


def halves(communicator: Any, ef: bool) -> bytes:
    scheme, param = make_scheme("int8", communicator, 100, 1 << 30), Tensor((50,), dtype="float16", name="w")
    grads = np.random.default_rng(communicator.rank).standard_normal((2, 50)).astype(np.float16)
    for grad in grads:
        begin(scheme, ef=ef)
        scheme.add_gradient(param, Tensor(data=grad))
        [(_, result)] = scheme.finish()
        scheme.end([param])
    value = to_numpy(result)
    all_grads = [np.random.default_rng(r).standard_normal((2, 50))[1] for r in range(communicator.size)]
    assert value.dtype == np.float16 and np.abs(value - np.mean(all_grads, axis=0)).max() < 0.08
    return value.tobytes()


@pytest.mark.parametrize("ef", [False, True])
@pytest.mark.parametrize("size", [1, 3])
def test_float16_gradients_stay_float16(size: int, ef: bool) -> None:
    assert len(set(run_ranks(halves, size, ef))) == 1


# ---- training: recorded as eager, and continued ------------------------------------------------------------------


class Net(model.Model):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = layer.Linear(30), layer.Linear(3)
        self.loss = layer.MeanSquareError()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(autograd.tanh(self.first(x)))

    def train_one_batch(self, x: Tensor, y: Tensor) -> Tensor:
        loss = self.loss(self.forward(x), y)
        self.optimizer(loss)
        return loss


def compiled(communicator: Any, use_graph: bool, ef: bool) -> Net:
    net = Net()
    sgd = opt.SGD(lr=0.1, momentum=0.9)
    net.set_optimizer(
        opt.DistOpt(sgd, communicator=communicator, dist_option=f"int8:{int(ef)}:seed=3", threshold=100)
    )
    net.compile([Tensor((5, 20))], use_graph=use_graph)
    rng = np.random.default_rng(2)
    start = {name: rng.standard_normal(p.shape) / 4 for name, p in net.get_params().items()}
    net.set_params({name: value.astype(np.float32) for name, value in start.items()})
    return net


def train_step(net: Net, rank: int, step: int) -> None:
    rng = np.random.default_rng([5, rank, step])
    x, y = rng.standard_normal((5, 20)).astype(np.float32), rng.standard_normal((5, 3)).astype(np.float32)
    net(Tensor(data=x), Tensor(data=y))


def bits(net: Net) -> dict[str, bytes]:
    return {name: to_numpy(value).tobytes() for name, value in net.get_params().items()}


def trains(communicator: Any, ef: bool) -> dict[str, Any]:
    """Parameters after each step, eager, recorded, and recorded from a checkpoint on."""
    found: dict[str, Any] = {}
    for use_graph in (False, True):
        net = compiled(communicator, use_graph, ef)
        log = found["recorded" if use_graph else "eager"] = []
        for step in range(STEPS):
            if use_graph and step == 4:
                states, slots = net.get_states(), net.optimizer.get_states()
                second = compiled(communicator, True, ef)
                second.set_states({key: to_numpy(value) for key, value in states.items()})
                second.optimizer.set_states(slots)
            train_step(net, communicator.rank, step)
            log.append(bits(net))
    found["breaks"] = [info.break_reason for info in net.graph_info()]
    for step in range(4, STEPS):
        train_step(second, communicator.rank, step)
    found["continued"] = bits(second)
    autograd.training = False
    return found


@pytest.mark.parametrize("ef", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_recorded_and_continued_runs_have_the_bits_of_eager_ones(size: int, ef: bool) -> None:
    ranks = run_ranks(trains, size, ef)
    for found in ranks:
        assert found["breaks"] and set(found["breaks"]) == {None}
        assert found["eager"] == found["recorded"] == ranks[0]["recorded"]
        assert found["continued"] == found["recorded"][-1]
        assert len({str(step) for step in found["eager"]}) == STEPS
