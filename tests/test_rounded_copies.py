# SPDX-License-Identifier: Apache-2.0
"""Updates of recorded steps write the bfloat16 copies of parameters for the next replay, and no stale one is used."""

from __future__ import annotations

import gc
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from singa_lite import autograd, layer, model, opt, tensor
from singa_lite.backend.cpu import CpuBackend, NumpyBackend
from singa_lite.comm.base import Communicator, World
from singa_lite.comm.local import LocalCommunicator
from singa_lite.config import state
from singa_lite.device import get_default_device
from singa_lite.dtypes import bfloat16
from singa_lite.errors import ShapeError
from singa_lite.graph.nodes import Kernel
from singa_lite.record.record import Record
from singa_lite.tensor import Tensor, from_numpy, to_numpy
from tests.comm.processes import wait_until
from tests.ranks import run_ranks
from tests.slow_cases import slow_but_first

OPTIMIZERS = {
    "plain": lambda: opt.SGD(lr=0.1),
    "momentum": lambda: opt.SGD(lr=0.05, momentum=0.9, weight_decay=1e-3),
    "adam": lambda: opt.Adam(lr=1e-2),
}


class Net(model.Model):
    """A convolution and two products, each with a bias that stays float32."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = layer.Conv2d(2, (1, 3), padding=(0, 1))
        self.first, self.relu, self.second = layer.Linear(33), layer.ReLU(), layer.Linear(4)

    def forward(self, x: Tensor) -> Tensor:
        y = autograd.flatten(self.conv(autograd.reshape(x, (len(x), 1, 1, -1))))
        return self.second(self.relu(self.first(y)))

    def train_one_batch(self, x: Tensor, labels: Tensor) -> Tensor:
        loss = autograd.softmax_cross_entropy(self.forward(x), labels)
        self.optimizer(loss)
        return loss


@pytest.fixture(autouse=True)
def evaluation_afterwards() -> Iterator[None]:
    yield
    autograd.training = False
    if state.rounded is not None:
        state.rounded.forget()


def batch(step: int, rank: int = 0, count: int = 8) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng([step, rank])
    return from_numpy(rng.standard_normal((count, 17))), from_numpy(rng.integers(0, 4, count))


def make(
    is_kept: bool = True,
    kind: str = "momentum",
    use_graph: bool = True,
    communicator: Communicator | None = None,
    net: type[Net] = Net,
    **options: Any,
) -> Net:
    """Return a net whose copies are kept, or one that casts at every replay, as its parameters were given out."""
    get_default_device().SetRandSeed(3)
    made = net()
    made.set_optimizer(
        opt.DistOpt(OPTIMIZERS[kind](), communicator=communicator or LocalCommunicator(World()), **options)
    )
    made.compile([batch(0)[0]], use_graph=use_graph, precision="bf16")
    made.train()
    if not is_kept:
        for param in made.get_params().values():
            _ = param.data
    return made


def train(net: Net, steps: range, rank: int = 0, count: int = 8) -> None:
    for step in steps:
        net(*batch(step, rank, count))


def bits(net: Net) -> dict[str, bytes]:
    return {name: to_numpy(value).tobytes() for name, value in net.get_states().items()}


def record_of(net: Net) -> Record:
    (kind,) = net._records._kinds.values()
    return kind.records[0]


def is_fresh(net: Net) -> bool:
    return state.rounded is not None and state.rounded is record_of(net)._copies


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_replay_uses_the_copies_that_the_update_before_it_wrote(kind: str) -> None:
    kept, casts = make(kind=kind), make(is_kept=False, kind=kind)
    for net in (casts, kept):
        train(net, range(6))
    assert bits(kept) == bits(casts)
    assert is_fresh(kept)
    for param in kept.get_params().values():
        copy = kept._records._copies.get(id(param.array))
        assert (copy is not None) == (param.ndim() > 1)
        if copy is not None:
            assert copy.tobytes() == to_numpy(param).astype(bfloat16).tobytes()
            copy[...] = 0  # nobody can do this; it shows that replays read them
    out = kept.get_params()["second.b"]
    wanted = autograd.softmax_cross_entropy(from_numpy(np.tile(to_numpy(out), (8, 1))), batch(9)[1]).item()
    assert kept(*batch(9)).item() == pytest.approx(wanted, abs=1e-2)
    assert casts(*batch(9)).item() != pytest.approx(wanted, abs=2e-2)


class Accumulates(Net):
    """Adds up the gradients of two batches in one step."""

    def train_one_batch(self, x: Tensor, labels: Tensor) -> Tensor:
        sums: dict[Tensor, Tensor] = {}
        for scale in (1.0, 0.5):
            loss = autograd.softmax_cross_entropy(self.forward(x * scale), labels)
            for param, grad in autograd.backward(loss):
                sums[param] = sums[param] + grad if param in sums else grad
        self.optimizer.update_all(list(sums.items()))
        self.optimizer.step()
        return loss


class Distills(Net):
    """Learns what it says without a gradient."""

    def train_one_batch(self, x: Tensor, labels: Tensor) -> Tensor:
        with autograd.no_grad():
            target = self.forward(x * 0.5).as_type(np.float32)
        out = self.forward(x)
        loss = autograd.softmax_cross_entropy(out, labels) + autograd.mse_loss(out, target)
        self.optimizer(loss)
        return loss


class Evaluates(Net):
    """Computes with the parameters before and after their update."""

    def train_one_batch(self, x: Tensor, labels: Tensor) -> Tensor:
        super().train_one_batch(x, labels)
        with autograd.no_grad():
            return autograd.softmax_cross_entropy(self.forward(x), labels)


class Counts(Net):
    """Calls the optimizer twice a step, which updates once."""

    def train_one_batch(self, x: Tensor, labels: Tensor) -> Tensor:
        super().train_one_batch(x, labels)
        return super().train_one_batch(x * 0.5, labels)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("net", [Accumulates, Distills, Evaluates, Counts])
def test_a_step_that_uses_parameters_again_does_what_an_eager_one_does(
    net: type[Net], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CpuBackend, "lower", lambda self, nodes: nodes)
    options = {"accumulate": 2} if net is Counts else {}
    kept, eager = (make(kind=kind, net=net, use_graph=use_graph, **options) for use_graph in (True, False))
    for step in range(6):
        assert kept(*batch(step)).item() == eager(*batch(step)).item()
    assert bits(kept) == bits(eager)
    assert [info.break_reason for info in kept.graph_info()] == [None]
    if net is not Evaluates:  # whose update comes before another use
        assert is_fresh(kept)


def test_a_step_casts_at_its_first_replay_alone() -> None:
    net = make()
    train(net, range(2))
    ran: list[int] = []
    copies = record_of(net)._copies
    assert copies is not None
    copies._casts = [lambda: ran.append(1), *copies._casts]
    train(net, range(5))
    assert not ran
    net.get_params()["first.W"] *= 1
    train(net, range(5))
    assert ran == [1]


def by_copy_from_numpy(net: Net, w: Tensor) -> None:
    w.copy_from_numpy(np.full(w.shape, 0.3, "float32"))


def by_an_operation_in_place(net: Net, w: Tensor) -> None:
    w *= 1.5


def by_random_values(net: Net, w: Tensor) -> None:
    w.gaussian(0.0, 0.3)


def by_copy_data(net: Net, w: Tensor) -> None:
    w.copy_data(from_numpy(np.full(w.shape, 0.2)))


def by_its_raw_data(net: Net, w: Tensor) -> None:
    w.data[...] *= 0.5


def by_a_view_of_its_raw_data(net: Net, w: Tensor) -> None:
    w.data[1:, 2:][...] = 0.25


def by_other_data(net: Net, w: Tensor) -> None:
    w.data = np.full(w.shape, 0.1, "float32")


def by_set_states(net: Net, w: Tensor) -> None:
    net.set_states({name: value * 0.5 for name, value in net.get_states().items()})


def by_a_reshaped_tensor(net: Net, w: Tensor) -> None:
    with autograd.no_grad():
        view = w.reshape((w.size(),))
    view *= 0.5


def by_a_tensor_around_its_raw_array(net: Net, w: Tensor) -> None:
    view = tensor.from_raw_tensor(w.data)
    view *= 0.5


def by_an_optimizer_by_hand(net: Net, w: Tensor) -> None:
    net.optimizer.opt.update(w, from_numpy(np.ones(w.shape, "float32")))


def by_an_eager_step(net: Net, w: Tensor) -> None:
    net.graph(False)
    train(net, range(1))
    net.graph(True)


def by_a_step_of_another_size(net: Net, w: Tensor) -> None:
    train(net, range(50, 53), count=5)


def by_a_step_in_float32(net: Net, w: Tensor) -> None:
    before, net._precision = net._precision, "fp32"
    train(net, range(50, 53))
    net._precision = before


def by_another_thread(net: Net, w: Tensor) -> None:
    thread = threading.Thread(target=by_an_operation_in_place, args=(net, w))
    thread.start()
    thread.join()


def by_a_failed_step(net: Net, w: Tensor) -> None:
    x, _ = batch(0)
    with pytest.raises(Exception, match=r"class|label"):
        net(x, from_numpy(np.full(8, 7)))


def by_a_collective(net: Net, w: Tensor) -> None:
    net.optimizer.communicator.all_reduce(w.array, op="sum").wait()


def by_broadcasting(net: Net, w: Tensor) -> None:
    net.optimizer.communicator.broadcast(w.array, root=0).wait()


WRITES = [value for name, value in list(globals().items()) if name.startswith("by_")]


@pytest.mark.parametrize("write", WRITES)
@slow_but_first("kind", ["adam", "plain"])
def test_what_writes_a_parameter_between_two_replays_is_seen(
    write: Callable[[Net, Tensor], None], kind: str
) -> None:
    found = []
    for is_kept in (True, False):
        net = make(is_kept, kind)
        train(net, range(4))
        assert is_fresh(net) == is_kept
        for start in (10, 20):
            get_default_device().SetRandSeed(start)
            write(net, net.get_params()["first.W"])
            train(net, range(start, start + 3))
        found.append(bits(net))
    assert found[0] == found[1]


def test_a_raw_array_that_was_given_out_is_read_anew_at_every_replay() -> None:
    found = []
    for use_graph in (True, False):
        net = make(use_graph=use_graph)
        raw = net.get_params()["first.W"].data
        train(net, range(3))
        for step in range(3):
            raw[...] = 0.1 * step
            losses = net(*batch(step)).item()
            raw[...] = 0.0
            found.append(losses)
    np.testing.assert_allclose(found[:3], found[3:], atol=2e-2)
    assert state.rounded is None


def test_numpy_cannot_write_to_a_parameter_behind_our_back_while_its_copy_is_fresh() -> None:
    net = make()
    train(net, range(3))
    raw = net.get_params()["first.W"].array
    with pytest.raises(ValueError, match="read-only"):
        raw[0, 0] = 1
    assert is_fresh(net)
    net.get_params()["first.W"].data[0, 0] = 1
    assert raw[0, 0] == 1 and raw.flags.writeable
    del net
    gc.collect()


def test_parameters_may_be_written_once_no_record_keeps_their_copies() -> None:
    net = make()
    train(net, range(3))
    params = {name: value.array for name, value in net.get_params().items()}
    record = weakref.ref(record_of(net))
    net.compile([batch(0)[0]], use_graph=True, precision="bf16")
    gc.collect()
    assert record() is None and state.rounded is None
    assert all(array.flags.writeable for array in params.values())
    for array in params.values():
        array[...] = 0


def test_a_dropped_model_leaves_no_parameters_behind() -> None:
    net = make()
    train(net, range(3))
    assert is_fresh(net)
    watch = weakref.ref(net.get_params()["first.W"].array)
    del net
    gc.collect()
    assert watch() is None and state.rounded is None


def test_a_pickled_model_may_be_written() -> None:
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        net = make()
        train(net, range(3))
        assert is_fresh(net)
        weight = pickle.loads(pickle.dumps(net.get_params()["first.W"], protocol))
        weight *= 2.0
        weight.data[0, 0] = 7
        assert to_numpy(net.get_params()["first.W"])[0, 0] != 7


@pytest.mark.parametrize("is_freezing", [False, True])
def test_an_interrupt_leaves_no_parameter_read_only(
    is_freezing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = make()
    train(net, range(3))
    if is_freezing:
        state.rounded.forget()
    copies, calls = record_of(net)._copies, list[int]()
    assert copies is not None
    set_writeable = copies._set_writeable

    def interrupt(array: Any, is_writeable: bool) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        set_writeable(array, is_writeable)

    monkeypatch.setattr(copies, "_set_writeable", interrupt)
    weight = net.get_params()["first.W"]
    with pytest.raises(KeyboardInterrupt):
        if is_freezing:
            train(net, range(1))
        else:
            weight *= 2.0
    for param in net.get_params().values():
        param *= 0.5
        param.data[...] = 1.0


def test_a_copy_whose_forgetting_was_interrupted_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    net = make()
    train(net, range(3))
    copies = record_of(net)._copies
    assert copies is not None
    set_writeable = copies._set_writeable

    def interrupt(array: Any, is_writeable: bool) -> None:
        set_writeable(array, is_writeable)
        raise KeyboardInterrupt

    monkeypatch.setattr(copies, "_set_writeable", interrupt)
    with pytest.raises(KeyboardInterrupt):
        copies.forget()
    monkeypatch.undo()
    train(net, range(3, 4))
    assert is_fresh(net)
    for name in ("first.W", "second.W"):
        with pytest.raises(ValueError, match="read-only"):
            net.get_params()[name].array[...] = 0.0


@pytest.mark.parametrize("way", ["method", "operator"])
def test_views_of_parameters_made_while_copies_are_fresh_may_be_written(way: str) -> None:
    kept, casts = make(), make(is_kept=False)
    for net in (casts, kept):
        train(net, range(3))
        assert is_fresh(net) == (net is kept)
        with autograd.no_grad():
            reshape = Tensor.reshape if way == "method" else autograd.reshape
            views = [reshape(param, (-1,)) for param in net.get_params().values()]
        for step in range(3, 6):
            for view in views:
                view *= 0.9
            train(net, range(step, step + 1))
        views[0].data[:3] = 0.0
        train(net, range(6, 8))
    assert bits(kept) == bits(casts)


def test_a_tensor_unpickled_on_the_memory_of_a_parameter_may_be_written() -> None:
    kept, casts = make(), make(is_kept=False)
    for net in (casts, kept):
        train(net, range(3))
        buffers: list[pickle.PickleBuffer] = []
        weight = net.get_params()["first.W"]
        other = pickle.loads(pickle.dumps(weight, 5, buffer_callback=buffers.append), buffers=buffers)
        assert np.shares_memory(other.array, weight.array)
        train(net, range(3, 5))
        other *= 0.5
        train(net, range(5, 7))
    assert bits(kept) == bits(casts)


def test_copies_of_parameters_that_no_record_uses_are_freed() -> None:
    net = make()
    train(net, range(3))
    assert len(net._records._copies) == 3
    for step in range(5):
        weight = net.get_params()["first.W"]
        weight.data = to_numpy(weight)
        train(net, range(step, step + 2))
    net._records._kinds.clear()
    gc.collect()
    assert not net._records._copies


def test_two_models_in_turns_train_as_each_by_itself() -> None:
    alone = [make(kind=kind) for kind in OPTIMIZERS]
    for net in alone:
        train(net, range(5))
    together = [make(kind=kind) for kind in OPTIMIZERS]
    for step in range(5):
        for net in together:
            train(net, range(step, step + 1))
    assert list(map(bits, alone)) == list(map(bits, together))


def test_a_parameter_in_two_models_is_cast_again_after_a_step_of_the_other() -> None:
    found = []
    for is_kept in (True, False):
        first, second = make(is_kept), make(is_kept)
        second.first = first.first
        second.compile([batch(0)[0]], use_graph=True, precision="bf16")
        for step in range(4):
            train(first, range(step, step + 1))
            train(second, range(step + 10, step + 11))
        found.append((bits(first), bits(second)))
    assert found[0] == found[1]


class DecaysAfterwards(Net):
    def train_one_batch(self, x: Tensor, labels: Tensor) -> Tensor:
        loss = super().train_one_batch(x, labels)
        self.first.W *= 0.5
        return loss


class DecaysBefore(Net):
    def train_one_batch(self, x: Tensor, labels: Tensor) -> Tensor:
        self.first.W *= 0.5
        return super().train_one_batch(x, labels)


class LooksAgain(Net):
    def train_one_batch(self, x: Tensor, labels: Tensor) -> Tensor:
        loss = super().train_one_batch(x, labels)
        return loss + autograd.softmax_cross_entropy(self.forward(x), labels)


class TrainsTwice(Net):
    def train_one_batch(self, x: Tensor, labels: Tensor) -> Tensor:
        return super().train_one_batch(x, labels) + super().train_one_batch(x, labels)


class UsesAWeightTwice(Net):
    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.first(x))
        return self.second(y + self.relu(self.first(x * 0.5)))


class ReadsACopyAfterwards(Net):
    def train_one_batch(self, x: Tensor, labels: Tensor) -> Tensor:
        before = self.first.W.as_type(bfloat16)
        loss = super().train_one_batch(x, labels)
        with autograd.no_grad():
            return loss + tensor.sum(before.as_type("float32") * self.first.W)


class ReturnsACopy(Net):
    def train_one_batch(self, x: Tensor, labels: Tensor) -> Tensor:
        before = self.first.W.as_type(bfloat16)
        super().train_one_batch(x, labels)
        return before[3, 4]


class KeepsACopy(Net):
    def train_one_batch(self, x: Tensor, labels: Tensor) -> Tensor:
        self.before = self.first.W.as_type(bfloat16)
        return super().train_one_batch(x, labels)


class MakesAFloat16Copy(Net):
    def train_one_batch(self, x: Tensor, labels: Tensor) -> Tensor:
        with autograd.no_grad():
            total = tensor.sum(self.first.W.as_type("float16").as_type("float32"))
        return super().train_one_batch(x, labels) + total


STEPS = [MakesAFloat16Copy, DecaysAfterwards, DecaysBefore, LooksAgain, TrainsTwice, UsesAWeightTwice]
STEPS += [ReadsACopyAfterwards, ReturnsACopy, KeepsACopy]


@pytest.mark.parametrize("kind", STEPS)
def test_a_step_that_writes_or_reads_its_parameters_more_than_once_keeps_its_bits(
    kind: type[Net], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for is_kept in (True, False):
        if not is_kept:
            monkeypatch.setattr(CpuBackend, "rounds_updates", lambda *_: False)
        net = make(net=kind)
        losses = [net(*batch(step)).item() for step in range(6)]
        assert {info.break_reason for info in net.graph_info()} == {None}
        assert (record_of(net)._copies is not None) <= is_kept
        kept = to_numpy(net.before).tobytes() if kind is KeepsACopy else None
        found.append((losses, bits(net), kept))
    assert found[0] == found[1]


def test_a_loaded_checkpoint_is_seen(tmp_path: Path) -> None:
    found = []
    for is_kept in (True, False):
        net = make(is_kept)
        train(net, range(3))
        net.save_states(str(tmp_path / "net.zip"))
        train(net, range(3, 8))
        net.load_states(str(tmp_path / "net.zip"))
        train(net, range(8, 12))
        found.append(bits(net))
    assert found[0] == found[1]


def ranks_train(communicator: Communicator, dist_option: str) -> list[Any]:
    found = []
    for is_kept in (True, False):
        net = make(is_kept, communicator=communicator, dist_option=dist_option)
        train(net, range(5), communicator.rank)
        is_used = is_fresh(net)
        weight = net.get_params()["first.W"]
        communicator.all_reduce(weight.array, op="max").wait()
        weight *= 1 + communicator.world.size
        communicator.broadcast(weight.array, root=communicator.world.size - 1).wait()
        train(net, range(5, 9), communicator.rank)
        found.append((is_used, bits(net)))
    return found


def ranks_train_beside_a_collective(communicator: Communicator, folder: Path) -> list[Any]:
    found = []
    for is_kept in (True, False):
        net, flag = make(is_kept), folder / str(is_kept)
        weight = net.get_params()["first.W"]
        train(net, range(4))
        was_fresh = False
        if communicator.rank == 0:
            weight *= 0.0
            wait_until(flag.exists, "rank 1 has trained")
            communicator.broadcast(weight.array, root=0).wait()
        else:
            work = communicator.broadcast(weight.array, root=0)
            train(net, range(4, 6))  # the weights may land at any time from here on
            was_fresh = is_fresh(net)
            flag.touch()
            work.wait()
        train(net, range(6, 9))
        found.append((was_fresh, is_fresh(net), bits(net), to_numpy(weight)[0, 0]))
    return found


def test_a_step_beside_a_collective_that_writes_a_parameter_casts(tmp_path: Path) -> None:
    for kept, casts in run_ranks(ranks_train_beside_a_collective, 2, tmp_path):
        assert kept[:2] == (False, True) and casts[:2] == (False, False)
        assert kept[2:] == casts[2:]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("dist_option", ["fp32", "bf16", "partialUpdate", "sparseTopK"])
def test_ranks_hold_the_bits_of_ranks_that_cast_at_every_replay(dist_option: str, size: int) -> None:
    results = list(run_ranks(ranks_train, size, dist_option))
    for kept, casts in results:
        assert kept[1] == casts[1] == results[0][0][1]
        assert not casts[0] and (kept[0] or dist_option not in ("fp32", "bf16"))


def test_an_update_rounds_as_a_cast_does() -> None:
    backend = get_default_device().backend
    rng = np.random.default_rng(0)
    for count in (1, 4095, 4096, 4097, 20_001):
        param, grad, v = (rng.standard_normal(count).astype("float32") for _ in range(3))
        param[0], grad[-1] = np.nan, np.inf
        other, states = param.copy(), v.copy()
        copy, wanted = np.empty(count, bfloat16), np.empty(count, bfloat16)
        numbers = {"lr": 0.1, "momentum": 0.9, "gain": 1.0, "weight_decay": 0.0}
        backend.execute("momentum_update", (grad,), (param, v, copy), {**numbers, "rounded": (0,)})
        backend.execute("momentum_update", (grad,), (other, states), numbers)
        backend.execute("cast", (other,), wanted, {})
        assert param.tobytes() == other.tobytes() and v.tobytes() == states.tobytes()
        assert copy.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("rounded", [(-1,), (2,), (0.5,), (0, 0), (1e30,), (0, 1, 0), (float("nan"),)])
@pytest.mark.parametrize("backend", [CpuBackend, NumpyBackend])
def test_an_update_refuses_copies_that_do_not_fit(
    backend: type[NumpyBackend], rounded: tuple[Any, ...]
) -> None:
    grads, params = ([np.ones(n, "float32") for n in (5, 7)] for _ in range(2))
    copies = [np.zeros(5, bfloat16) for _ in rounded]
    with pytest.raises((ShapeError, TypeError)):
        backend().execute("sgd_update", tuple(grads), (*params, *copies), {"lr": 0.1, "rounded": rounded})
    assert (params[0] == 1).all()


def test_an_update_refuses_a_copy_in_a_parameter() -> None:
    param = np.ones(8, "float32")
    copy = param.view(np.uint16)[:8].view(bfloat16)
    with pytest.raises(ShapeError, match="memory"):
        get_default_device().backend.execute(
            "sgd_update", (np.ones(8, "float32"),), (param, copy), {"lr": 0.1, "rounded": (0,)}
        )
    assert (param == 1).all()


def test_a_step_with_python_that_sees_arrays_casts_at_every_replay() -> None:
    net = make(check_finite="skip")
    train(net, range(4))
    record = record_of(net)
    assert record._copies is None and state.rounded is None
    assert sum(isinstance(node, Kernel) and node.name == "cast" for node in record._nodes) >= 2
