# SPDX-License-Identifier: Apache-2.0
"""Steps that run themselves again are compared with their record: what changed unnoticed is an error or a warning."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from singa_lite import autograd, layer, model, opt
from singa_lite.device import get_default_device
from singa_lite.errors import CommError, GraphError, OptionError
from singa_lite.graph.recorder import host
from singa_lite.tensor import Tensor, from_numpy, to_numpy
from tests.ranks import run_ranks

SWITCH = "SINGA_LITE_CHECK_RECORDS"
UNSEEN = "UNSEEN_BY_A_RECORD"  # a variable of the environment, where no record looks
X = np.arange(12, dtype=np.float32).reshape(4, 3) / 12
Y = np.arange(4, dtype=np.float32).reshape(4, 1)
ROWS = np.arange(96, dtype=np.float32).reshape(32, 3) / 96
DEVICE = get_default_device()


def is_set() -> bool:
    return os.environ.get(UNSEEN) == "1"


class Net(model.Model):
    def __init__(self) -> None:
        super().__init__()
        self.fc = layer.Linear(1)
        self.dropout = layer.Dropout(0.5)
        self.kept: Any = None

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)

    def train_one_batch(self, x: Tensor, z: Tensor, y: Tensor) -> Any:
        loss = autograd.mse_loss(self.fc(self.dropout(x) + z), y)
        self.optimizer(loss)
        return loss


class OtherInput(Net):
    """All inputs that it chooses from are alike but for their values."""

    def train_one_batch(self, x: Tensor, z: Tensor, y: Tensor) -> Any:
        return super().train_one_batch(z if is_set() else x, z, y)


class OtherNumber(Net):
    def train_one_batch(self, x: Tensor, z: Tensor, y: Tensor) -> Any:
        return super().train_one_batch(x * (2.0 if is_set() else 1.0), z, y)


class OtherAttribute(Net):
    def train_one_batch(self, x: Tensor, z: Tensor, y: Tensor) -> Any:
        return super().train_one_batch(autograd.leakyrelu(x, 0.25 if is_set() else 0.5), z, y)


class OtherResult(Net):
    def train_one_batch(self, x: Tensor, z: Tensor, y: Tensor) -> Any:
        loss = super().train_one_batch(x, z, y)
        both = loss + 1.0, loss * 2.0
        return both[::-1] if is_set() else both


class MoreKernels(Net):
    def train_one_batch(self, x: Tensor, z: Tensor, y: Tensor) -> Any:
        loss = super().train_one_batch(x, z, y)
        return autograd.relu(loss) if is_set() else loss


class MoreAtTheEnd(Net):
    def train_one_batch(self, x: Tensor, z: Tensor, y: Tensor) -> Any:
        loss = super().train_one_batch(x, z, y)
        if is_set():
            autograd.relu(loss)
        return loss


class OtherUpdates(Net):
    def train_one_batch(self, x: Tensor, z: Tensor, y: Tensor) -> Any:
        loss = autograd.mse_loss(self.fc(x), y)
        pairs = list(autograd.backward(loss))
        for param, grad in pairs[:1] if is_set() else pairs:
            self.optimizer.update(param, grad)
        self.optimizer.step()
        return loss


class OtherUpdateByHand(Net):
    """Its update is Python of a script, which gets another gradient."""

    def train_one_batch(self, x: Tensor, z: Tensor, y: Tensor) -> Any:
        loss = autograd.mse_loss(self.fc(x), y)
        for param, grad in list(autograd.backward(loss)):
            twice = grad + grad
            host(lessened, param, twice if is_set() else grad)
        return loss


def lessened(param: Tensor, grad: Tensor) -> None:
    param -= grad * 0.1


class OtherKept(Net):
    def train_one_batch(self, x: Tensor, z: Tensor, y: Tensor) -> Any:
        loss = super().train_one_batch(x, z, y)
        both = loss + 1.0, loss * 2.0
        self.kept = both[is_set()]
        return loss


class OtherNumberKept(Net):
    def train_one_batch(self, x: Tensor, z: Tensor, y: Tensor) -> Any:
        self.kept = 2.0 if is_set() else 1.0
        return super().train_one_batch(x, z, y)


class OtherKey(Net):
    def train_one_batch(self, x: Tensor, z: Tensor, y: Tensor) -> Any:
        return {"b" if is_set() else "a": super().train_one_batch(x, z, y)}


class OtherRate(Net):
    def train_one_batch(self, x: Tensor, z: Tensor, y: Tensor) -> Any:
        loss = autograd.mse_loss(self.fc(x), y)
        (OTHER if is_set() else FIRST)(loss)
        return loss


FIRST, OTHER = opt.SGD(0.1), opt.SGD(0.5)


class ReadsValues(Net):
    def train_one_batch(self, x: Tensor, z: Tensor, y: Tensor) -> Any:
        loss = super().train_one_batch(x, z, y)
        return loss * float(to_numpy(loss).sum()) if is_set() else loss


KINDS = [
    OtherInput,
    OtherKept,
    OtherNumberKept,
    OtherKey,
    OtherRate,
    OtherUpdateByHand,
    OtherNumber,
    OtherAttribute,
    OtherResult,
    MoreKernels,
    MoreAtTheEnd,
    OtherUpdates,
    ReadsValues,
]


def compiled(kind: type[Net], use_graph: bool = True, optimizer: Any = None) -> Net:
    net = kind()
    net.set_optimizer(optimizer or opt.SGD(0.1))
    net.compile([from_numpy(X)], use_graph=use_graph)
    net.set_params({name: np.full(param.shape, 0.1, np.float32) for name, param in net.get_params().items()})
    return net


def call(net: Net) -> Any:
    return net(from_numpy(X), from_numpy(X + 1), from_numpy(Y))


def numbers(net: Net) -> list[np.ndarray]:
    return [to_numpy(param) for param in net.get_params().values()]


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_record_does_not_see_is_a_graph_error_after_so_many_replays(
    kind: type[Net], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SWITCH, "2")
    net = compiled(kind)
    for _ in range(5):  # two of which are replays, then one runs eagerly, as before
        call(net)
    assert not any(found.break_reason for found in net.graph_info())
    monkeypatch.setenv(UNSEEN, "1")
    call(net)
    with pytest.raises(GraphError, match=f"{kind.__name__}: a step that was replayed runs .* now"):
        for _ in range(2):
            call(net)
    assert "was not noticed" in str(net.graph_info()[-1].break_reason)


@pytest.mark.parametrize("kind", [OtherInput, OtherKept])
def test_the_first_step_after_a_save_warns_and_later_ones_are_right(
    kind: type[Net], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = compiled(kind)
    call(net), call(net)
    net.save_states(tmp_path / "first")
    call(net), call(net)
    monkeypatch.setenv(UNSEEN, "1")
    call(net)
    net.save_states(tmp_path / "second")
    with pytest.warns(UserWarning, match=f"{kind.__name__}: a step that was replayed runs .*was not noticed"):
        call(net)
    eager = compiled(kind, use_graph=False)
    eager.set_params(dict(zip(eager.get_params(), numbers(net), strict=True)))
    for each in (net, eager):
        each.dropout.ratio = 0.0
        for step in range(3):
            monkeypatch.setenv(UNSEEN, str(step % 2))
            call(each)
    for mine, expected in zip(numbers(net), numbers(eager), strict=True):
        np.testing.assert_array_equal(mine, expected)


def test_steps_are_right_from_the_error_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "0")  # the call that changes is the one that is compared
    nets = [compiled(OtherInput, use_graph) for use_graph in (True, False)]
    for net in nets:
        net.dropout.ratio = 0.0
    for step in range(6):
        monkeypatch.setenv(UNSEEN, str(step // 3))
        for net in nets:
            if step == 3 and net is nets[0]:
                with pytest.raises(GraphError):
                    call(net)
            else:
                call(net)
        for mine, expected in zip(*map(numbers, nets), strict=True):
            np.testing.assert_array_equal(mine, expected)


def adam() -> Any:
    return opt.Adam(opt.ExponentialDecay(0.1, 2, 0.9))


def clipped() -> Any:
    return opt.DistOpt(opt.SGD(0.1, momentum=0.9), clip_norm=0.1, accumulate=3)


@pytest.mark.parametrize("make", [adam, clipped])
@pytest.mark.parametrize("every", ["0", "1", "3"])
def test_what_may_change_from_step_to_step_is_no_difference(
    make: Callable[[], Any], every: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SWITCH, every)
    net = compiled(Net, optimizer=make())
    for _ in range(14):
        call(net)
    assert not any(found.break_reason for found in net.graph_info())


def of_three(communicator: Any, text: str) -> tuple[str, list[np.ndarray]]:
    os.environ[SWITCH] = "1"
    net = compiled(
        OtherNumber, optimizer=opt.DistOpt(opt.SGD(0.1), communicator=communicator, dist_option=text)
    )
    for _ in range(7):
        net(from_numpy(X + communicator.rank), from_numpy(X), from_numpy(Y))
    assert not any(found.break_reason for found in net.graph_info())
    os.environ[UNSEEN] = "1"
    reason = ""
    for _ in range(3):
        try:
            net(from_numpy(X + communicator.rank), from_numpy(X), from_numpy(Y))
        except (GraphError, CommError) as error:
            reason = type(error).__name__
    return reason, numbers(net)


@pytest.mark.parametrize(
    "text", ["fp32", "fp16", "partialUpdate", "sparseTopK:0.5", "powerSGD:1", "localSGD:2"]
)
def test_ranks_that_change_together_all_have_the_error_and_go_on(text: str) -> None:
    (reason, first), *others = run_ranks(of_three, 3, text)
    assert reason == "GraphError" and all(other[0] == reason for other in others)
    if text in ("fp32", "fp16", "sparseTopK:0.5", "powerSGD:1"):
        for _, values in others:
            for mine, expected in zip(values, first, strict=True):
                np.testing.assert_array_equal(mine, expected)


def slices(net: Net, step: int) -> None:
    """Inputs that are parts of larger arrays, at other offsets each time."""
    net(
        Tensor.wrap(ROWS[step : step + 4], DEVICE),
        Tensor.wrap(ROWS[step + 4 : step + 8], DEVICE),
        from_numpy(Y),
    )


def columns(net: Net, step: int) -> None:
    """Strides of axes of length 1 mean nothing."""
    rows = Tensor.wrap(np.arange(3, dtype=np.float32).reshape(3, 1).T, DEVICE)
    net(rows, rows.clone(), from_numpy(Y[:1]))


def held(net: Net, step: int) -> None:
    """An input that the model holds, and its step reads there as well."""
    net(from_numpy(X), net.kept, from_numpy(Y))


def looked_at(net: Net, step: int) -> None:
    """A view of a parameter is held between some steps, which an autocast step casts twice then."""
    net.seen = net.fc.W.data if step % 4 > 1 else None
    call(net)


def printed(net: Net, step: int) -> None:
    os.environ[UNSEEN] = str(int(step % 4 > 1))
    call(net)


class Held(Net):
    def train_one_batch(self, x: Tensor, z: Tensor, y: Tensor) -> Any:
        return super().train_one_batch(x + self.kept, z, y)


class Twice(Net):
    unrecorded_attributes = (*Net.unrecorded_attributes, "seen")

    def train_one_batch(self, x: Tensor, z: Tensor, y: Tensor) -> Any:
        loss = autograd.mse_loss(self.fc(x) + self.fc(z), y)
        self.optimizer(loss)
        return loss


class Prints(Net):
    def train_one_batch(self, x: Tensor, z: Tensor, y: Tensor) -> Any:
        loss = super().train_one_batch(x, z, y)
        if is_set():
            print(to_numpy(loss))
        return loss


@pytest.mark.parametrize(
    ("kind", "call", "precision"),
    [
        (Net, slices, "fp32"),
        (Net, columns, "fp32"),
        (Held, held, "fp32"),
        (Twice, looked_at, "bf16"),
        (Prints, printed, "fp32"),
    ],
)
@pytest.mark.parametrize("every", ["0", "1", "2"])
def test_what_a_caller_does_otherwise_is_no_difference(
    kind: type[Net], call: Any, precision: str, every: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SWITCH, every)
    monkeypatch.setenv(UNSEEN, "0")  # so that it is restored
    net = kind()
    net.kept = from_numpy(X)
    net.set_optimizer(opt.SGD(0.1))
    net.compile([from_numpy(X)], use_graph=True, precision=precision)
    for step in range(12):
        call(net, step)
    assert [found.break_reason for found in net.graph_info()] == [None] * len(net.graph_info())


@pytest.mark.parametrize("text", ["yes", "-1", "1.5", "²"])
def test_a_bad_switch_is_an_option_error(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, text)
    with pytest.raises(OptionError, match=f"{SWITCH}={text}: expected an int >= 0"):
        call(compiled(Net))
