# SPDX-License-Identifier: Apache-2.0
"""Stores of one process: MXNet's documented values, updaters, saved states, recorded steps."""

from __future__ import annotations

import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from singa_lite import autograd, kvstore, layer, model, opt
from singa_lite.errors import CheckpointError, OptionError, ShapeError
from singa_lite.tensor import Tensor, to_numpy
from tests.kvstore.rig import Rate

F32 = np.float32
NAMES = ["local", "local_update_cpu", "local_allreduce_cpu", "device", "local_allreduce_device", "nccl"]


@pytest.fixture
def store():
    return kvstore.create()


def pulled(store, key, shape=(2, 3)):
    out = np.full(shape, 99, F32)
    store.pull(key, out)
    return out


@pytest.mark.parametrize("name", NAMES)
def test_a_local_store_says_its_name_and_is_alone(name):
    store = kvstore.create(name)
    assert (store.type, store.rank, store.num_workers, store.num_servers) == (name, 0, 1, 0)
    assert store.is_capable("optimizer") and store.server_stats() == []
    store.barrier()
    store._barrier()
    store.close()
    store.close()


def test_each_local_store_has_keys_of_its_own(store):
    another = kvstore.create()
    store.init(3, np.ones(2, F32))
    another.init(3, np.zeros(2, F32))
    assert pulled(store, 3, 2).tolist() == [1, 1] and pulled(another, 3, 2).tolist() == [0, 0]


def test_a_pushed_value_replaces_the_one_before(store):
    store.init(3, np.full((2, 3), 4, F32))
    assert (pulled(store, 3) == 4).all()
    store.push(3, np.full((2, 3), 8, F32))
    assert (pulled(store, 3) == 8).all()


def test_a_list_of_arrays_is_summed_first(store):
    store.init(3, np.ones((2, 3), F32))
    store.push(3, [np.ones((2, 3), F32)] * 4)
    assert (pulled(store, 3) == 4).all()


def test_a_list_of_keys_has_a_value_each(store):
    keys = [5, 7, 11]
    store.init(keys, [np.ones((2, 3), F32)] * 3)
    store.push(keys, [np.full((2, 3), number, F32) for number in (1, 2, 3)])
    outs = [np.zeros((2, 3), F32) for _ in keys]
    store.pull(keys, outs)
    assert [out[0, 0] for out in outs] == [1, 2, 3]
    devices = [[np.ones((2, 3), F32)] * 4] * 3
    store.push(keys, devices)
    assert all((pulled(store, key) == 4).all() for key in keys)


@pytest.mark.parametrize("set_updater", ["set_updater", "_set_updater"])
def test_an_updater_changes_the_value_in_place(store, set_updater):
    seen = []

    def update(key, pushed, stored):
        seen.append(key)
        stored += pushed * 2

    store.init(3, np.full((2, 3), 4, F32))
    getattr(store, set_updater)(update)
    store.push(3, np.ones((2, 3), F32))
    assert (pulled(store, 3) == 6).all()
    store.init(4, np.zeros((2, 3), F32))  # a later key too
    store.push(4, [np.ones((2, 3), F32)] * 4)  # once a push
    assert (pulled(store, 4) == 8).all()
    assert seen == [3, 4]
    with pytest.raises(OptionError, match="expected a function, got 3"):
        store.set_updater(3)
    with pytest.raises(OptionError, match="pushpull: wait = 'no'"):
        store.pushpull(3, np.ones((2, 3), F32), wait="no")


class ByName(opt.Optimizer):
    """Calls ``apply`` with the gradient before the parameter."""

    slot_names = ("velocity",)

    def update_all(self, pairs):
        for param, grad in pairs:
            self.apply(param_name=param.name, param_grad=grad, param_value=param)

    def apply(self, param_name, param_value, param_grad):
        velocity = self.slots(param_value)["velocity"]
        velocity *= 0.5
        velocity += param_grad
        param_value -= velocity


def test_an_optimizer_may_call_its_methods_with_arguments_in_any_order(store):
    store.init("w", np.zeros((2, 3), F32))
    store.set_optimizer(ByName(1.0))
    for _ in range(3):
        store.push("w", np.ones((2, 3), F32))
    assert (pulled(store, "w") == -(1 + 1.5 + 1.75)).all()


def test_an_optimizer_updates_the_value(store):
    store.init("w", np.zeros((2, 3), F32))
    store.set_optimizer(opt.SGD(lr=0.01))
    store.push("w", np.ones((2, 3), F32))
    assert (pulled(store, "w") == F32(-0.01)).all()


def test_the_value_is_the_stores_own(store):
    given = np.ones((2, 3), F32)
    store.init(3, given)
    given[...] = 5
    assert (pulled(store, 3) == 1).all()
    out = pulled(store, 3)
    out[...] = 7
    assert (pulled(store, 3) == 1).all()
    store.push(3, given)
    given[...] = 9
    assert (pulled(store, 3) == 5).all()


def test_tensors_and_arrays_may_be_mixed(store):
    store.init("w", Tensor(data=np.ones(3, F32)))
    first, second = Tensor(data=np.zeros(3, F32)), np.zeros(3, F32)
    store.pushpull("w", [Tensor(data=np.ones(3, F32)), np.ones(3, F32)], out=[first, second])
    assert to_numpy(first).tolist() == second.tolist() == [2, 2, 2]


def test_what_is_in_flight_has_ended(store):
    store.init("w", np.ones(3, F32))
    out = np.zeros(3, F32)
    work = store.pushpull("w", np.full(3, 2, F32), out, wait=False)
    assert work.done() and work.wait() is None and out.tolist() == [2, 2, 2]


def test_priorities_and_ignore_sparse_change_nothing(store):
    store.init("w", np.ones(3, F32))
    store.push("w", np.full(3, 2, F32), -1)
    out = np.zeros(3, F32)
    store.pull("w", out, -2, ignore_sparse=False)
    store.pushpull("w", np.full(3, 3, F32), out, priority=7)
    store.broadcast("w", np.full(3, 4, F32), out, priority=7)
    assert out.tolist() == [4, 4, 4]


def test_scale_mean_and_none_work_alone_too(store):
    store.init(["a", "b"], [np.zeros(3, F32)] * 2)
    outs = [np.zeros(3, F32) for _ in range(2)]
    store.pushpull(["a", "b"], [np.full(3, 4, F32), None], outs, scale=0.25, mean=True, allow_none=True)
    assert outs[0].tolist() == [1, 1, 1] and outs[1].tolist() == [0, 0, 0]


@pytest.mark.parametrize("name", ["local", "local_update_cpu", "local_allreduce_cpu", "nccl"])
def test_stores_that_send_nothing_do_not_compress(name):
    with pytest.raises(
        OptionError, match=f"{name}: set_gradient_compression is for the stores device and dist"
    ):
        kvstore.create(name).set_gradient_compression({"type": "2bit"})


def test_a_device_store_compresses():
    store = kvstore.create("device")
    store.set_gradient_compression({"type": "2bit", "threshold": 0.5})
    store.init("w", np.ones(3, F32))
    store.push("w", np.full(3, 0.6, F32))
    assert pulled(store, "w", 3).tolist() == [0.5] * 3


@pytest.mark.parametrize("dumps", [True, False])
def test_saved_states_go_on(tmp_path, dumps):
    def make():
        store = kvstore.create()
        store.init(["a", "b"], [np.ones(3, F32), np.ones((2, 2), np.float64)])
        return store

    first, second = make(), make()
    first.set_optimizer(opt.SGD(lr=1.0, momentum=0.5))
    first.set_learning_rate(0.25)
    ones = [np.ones(3, F32), np.ones((2, 2))]
    first.push(["a", "b"], ones)
    first.save_optimizer_states(tmp_path / "states", dump_optimizer=dumps)
    if not dumps:
        with pytest.raises(CheckpointError, match="has states"):
            second.load_optimizer_states(tmp_path / "states")
        second.set_optimizer(opt.SGD(lr=0.25, momentum=0.5))
    second.load_optimizer_states(tmp_path / "states")
    outs = [[np.zeros(3, F32), np.zeros((2, 2))] for _ in range(2)]
    first.pull(["a", "b"], outs[0])
    second.broadcast(["a", "b"], outs[0], outs[1])
    for store, out in zip((first, second), outs, strict=True):
        store.pushpull(["a", "b"], ones, out)
    assert all(one.tobytes() == two.tobytes() for one, two in zip(*outs, strict=True))
    assert outs[0][0].tolist() == [1 - 0.25 - 0.375] * 3


# ---- recorded steps ----------------------------------------------------------------------------------


class Net(model.Model):
    def __init__(self, store):
        super().__init__()
        self.fc = layer.Linear(2)
        self.store = store

    def forward(self, x):
        return self.fc(x)

    def train_one_batch(self, x, y):
        loss = autograd.softmax_cross_entropy(self.forward(x), y)
        for param, grad in list(autograd.backward(loss)):
            self.store.push(param.name, grad)
            self.store.pull(param.name, param)
        return loss


@pytest.mark.usefixtures("training")
def test_a_step_that_uses_a_store_runs_eagerly_and_says_so(store):
    net = Net(store)
    x, y = Tensor(data=np.ones((4, 3), F32)), Tensor(data=np.zeros(4, np.int32))
    net.compile([x], is_train=True, use_graph=True)
    net.train()
    for name, param in net.get_params().items():
        param.name = name
        store.init(name, param)
    store.set_optimizer(Rate(-0.5))
    losses = [float(to_numpy(net(x, y)).sum()) for _ in range(4)]
    assert losses == sorted(losses, reverse=True) and len(set(losses)) == 4
    (info,) = net.graph_info()
    assert info.break_reason == "it uses a key-value store"


@pytest.mark.parametrize("name", ["local", "dist"])
def test_an_optimizer_that_comes_after_a_push_begins_from_what_that_left(name):
    store, out = kvstore.create(name), np.zeros(2, np.float32)
    store.init(3, np.full(2, 4, np.float32))
    store.push(3, np.full(2, 8, np.float32))
    store.set_optimizer(opt.SGD(lr=0.5))
    store.pushpull(3, np.ones(2, np.float32), out)
    assert out.tolist() == [7.5, 7.5]


def test_an_updater_that_comes_after_a_push_begins_from_what_that_left():
    store, out = kvstore.create("local"), np.zeros(2, np.float32)
    store.init(3, np.full(2, 4, np.float32))
    store.push(3, np.full(2, 8, np.float32))
    store.set_updater(lambda key, pushed, stored: stored.copy_data(stored + pushed * 2.0))
    store.pushpull(3, np.ones(2, np.float32), out)
    assert out.tolist() == [10, 10]


def test_of_an_updater_and_an_optimizer_the_last_one_counts():
    store, ones = kvstore.create("local"), np.ones(2, np.float32)
    outs = [np.zeros(2, np.float32), np.zeros(2, np.float32)]
    store.init(0, outs[0])
    for key, expected, of_new_key in ((1, -0.5, -0.5), (2, 1.5, 2.0), (3, 1.0, -0.5)):
        store.set_updater(lambda key, pushed, stored: stored.copy_data(stored + pushed * 2.0))
        assert store.optimizer_description is None
        if key != 2:
            store.set_optimizer(opt.SGD(lr=0.5))
        store.init(key, np.zeros(2, np.float32))
        store.pushpull([0, key], [ones, ones], outs)
        assert [out.tolist() for out in outs] == [[expected] * 2, [of_new_key] * 2]
    store.set_updater(lambda key, pushed, stored: stored.copy_data(stored + pushed))
    store.init(4, np.zeros(2, np.int32))  # which no optimizer updates


def test_a_path_is_checked_before_anything_moves():
    store = kvstore.create("local")
    store.init(1, np.zeros(2, np.float32))
    store.set_optimizer(opt.SGD(lr=0.5))
    for call in (store.save_optimizer_states, store.load_optimizer_states):
        with pytest.raises(OptionError, match="fname must be a path, not None"):
            call(None)


def test_memory_for_sums_is_bounded(store):
    keys = [*range(8)]
    store.init(keys, [np.zeros(10, np.float32)] * 8)
    for first in range(8):
        for last in range(first + 1, 9):
            some = keys[first:last]
            ones = [np.ones(10, np.float32)] * len(some)
            store.pushpull(some, [*ones], out=[one.copy() for one in ones], allow_none=bool(first % 2))
    assert sum(memory.flat.size() for memory in store._memory.values()) <= 160


def test_steps_and_states_that_cannot_be_are_refused(store):
    store.init("a", np.zeros(3, np.float32))
    with pytest.raises(OptionError, match="is more than"):
        store.note_step(2**80)
    store.set_optimizer(opt.SGD(lr=1.0, momentum=0.5))
    for states in (None, {}, {"a": {}}, {"a": {"momentum": None}}, {**store.get_states(), "b": {}}):
        with pytest.raises(CheckpointError):
            store.set_states(states)
    for residuals in (None, {"a": np.zeros(3, np.float32)}):
        with pytest.raises(CheckpointError):
            store.set_residuals(residuals)


def test_several_arrays_of_float16_are_summed_in_float32():
    store = kvstore.create("local")
    store.init("a", np.zeros(1, np.float16))
    store.push("a", [np.array([value], np.float16) for value in (2048, 1, 1)])  # 2049 is no float16
    out = np.zeros(1, np.float16)
    store.pull("a", out)
    assert out.tolist() == [2050]


def test_pushes_of_two_threads_all_count(store):
    shape, num_pushes = (200_000,), 100
    store.init("w", np.zeros(shape, F32))
    store.set_optimizer(opt.SGD(lr=1.0))

    def push(value):
        for _ in range(num_pushes):
            store.push("w", np.full(shape, value, F32))

    with ThreadPoolExecutor(2) as threads:
        for work in [threads.submit(push, value) for value in (1, 2)]:
            work.result()
    assert (pulled(store, "w", shape) == -num_pushes * (1 + 2)).all()


def test_lists_of_keys_are_not_remembered_for_ever(store):
    keys = list(range(40))
    for key in keys:
        store.init(key, np.zeros(2, F32))
    rng, held = np.random.default_rng(0), []
    tracemalloc.start()
    try:
        for _ in range(3):
            for _ in range(2000):
                store._arguments.known("push", rng.permutation(keys).tolist())
            held.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert held[0] > 100_000 and held[2] < 1.5 * held[0]


def test_a_key_that_is_too_large_is_an_option_error(store):
    for key in (2**63, 10**5000):  # the second is too long for a text
        with pytest.raises(OptionError, match="an int of at most 9223372036854775807"):
            store.init(key, np.zeros(2, F32))
    with pytest.raises(OptionError, match="key = an int of 16610 bits must be an int >= 0"):
        store.init(-(10**5000), np.zeros(2, F32))
    store.init(2**63 - 1, np.ones(2, F32))
    assert (pulled(store, 2**63 - 1, 2) == 1).all()


def test_arrays_that_keys_are_pulled_into_do_not_overlap(store):
    store.init(["a", "b", "none"], [np.ones(4, F32), np.full(4, 2, F32), np.zeros(0, F32)])
    whole = np.full(8, 99, F32)
    for first, second in ((whole[:4], whole[:4]), (whole[:4], whole[3:7])):
        with pytest.raises(ShapeError, match="overlap in memory, of 'a' and 'b'"):
            store.pull(["a", "b"], [first, second])
        with pytest.raises(ShapeError, match="overlap"):
            store.pushpull(["a", "b"], [np.ones(4, F32)] * 2, out=[first, second])
    same = Tensor(data=np.zeros(4, F32))
    with pytest.raises(ShapeError, match="overlap"):
        store.pull(["a", "b"], [same, same])
    for outs in ([whole[:4], whole[2:6]], [whole[1:5], whole[:4]]):
        with pytest.raises(ShapeError, match="overlap in memory, of 'a';"):
            store.pull("a", outs)
    assert (whole == 99).all()
    empty = np.zeros(0, F32)
    store.pull(["a", "none", "b"], [[whole[:4], whole[:4]], empty, whole[4:]])
    assert whole.tolist() == [1] * 4 + [2] * 4


class Remaining(opt.Optimizer):
    """w -= lr * (gradients so far), which it keeps in a state that is called as what compression has lost."""

    slot_names = ("residual",)

    def __init__(self, lr=0.5):
        super().__init__(lr)

    def update_all(self, pairs):
        for value, grad in pairs:
            so_far = self.slots(value)["residual"]
            so_far += grad
            value -= so_far * self.lr_value


@pytest.mark.parametrize("compresses", [False, True])
def test_a_state_that_is_called_residual_is_saved(tmp_path, compresses):
    def started():
        store = kvstore.create("device")
        if compresses:
            store.set_gradient_compression({"type": "2bit", "threshold": 0.5})
        store.init("w", np.zeros(3, F32))
        store.set_optimizer(Remaining())
        return store

    def pushed(store):
        store.push("w", F32([0.75, 1.0, 1.25]))
        return pulled(store, "w", 3)

    first, second = started(), started()
    before = pushed(first)
    first.save_optimizer_states(tmp_path / "states")
    second.load_optimizer_states(tmp_path / "states")
    assert (pushed(second) == pushed(first) - before).all()
