# SPDX-License-Identifier: Apache-2.0
"""Saved states of a store: training goes on from them in new processes, also with another number of servers."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from singa_lite import opt
from singa_lite.errors import CheckpointError, OptionError
from tests.kvstore.rig import Launch, Rate, caught, run_calls

F32 = np.float32
SIZES = {"conv": (20, 5, 5), "fc": (220, 301), "bias": (7,)}  # fc is cut
TYPES = {"2bit": {"type": "2bit", "threshold": 0.5}, "none": None}
STEPS = 40


def optimizer(kind):
    if kind == "2bit":
        return opt.SGD(lr=opt.ExponentialDecay(0.1, 10, 0.5), momentum=0.9, weight_decay=1e-3)
    return opt.Adam(lr=0.01)


def grads(rig, step):
    rng = rig.rng(step)
    return [rng.standard_normal(shape).astype(F32) for shape in SIZES.values()]


def begin(rig, kind, weights, sets_optimizer=True):
    store = rig.store()
    if TYPES[kind] is not None:
        store.set_gradient_compression(TYPES[kind])
    store.init(list(SIZES), weights)
    if sets_optimizer:
        store.set_optimizer(optimizer(kind))
    return store


def train(rig, store, steps, weights):
    for step in steps:
        store.pushpull(list(SIZES), grads(rig, step), weights, scale=1 / (rig.rank + 1), mean=True)


def at_one_go(rig, kind, folder):
    """Train 40 steps and save after 20, which changes nothing; return the weights at the end."""
    weights = [rig.rng(99, worker=0).standard_normal(shape).astype(F32) for shape in SIZES.values()]
    store = begin(rig, kind, weights)
    train(rig, store, range(STEPS // 2), weights)
    name = f"{folder}/{kind}-{rig.num_servers}"
    store.save_optimizer_states(name)
    store.save_optimizer_states(f"{name}-with", dump_optimizer=True)
    if rig.rank == 0:
        np.savez(f"{name}.npz", *weights)
    train(rig, store, range(STEPS // 2, STEPS), weights)
    return [array.tobytes() for array in weights]


def go_on(rig, kind, folder, saved_with, has_optimizer):
    """Train the last 20 steps, from the file that a job with ``saved_with`` servers wrote."""
    name = f"{folder}/{kind}-{saved_with}"
    with np.load(f"{name}.npz") as found:
        weights = [found[key].copy() for key in found.files]
    store = begin(rig, kind, weights, sets_optimizer=not has_optimizer)
    store.load_optimizer_states(f"{name}-with" if has_optimizer else name)
    assert store.optimizer_description == optimizer(kind).describe()
    train(rig, store, range(STEPS // 2, STEPS), weights)
    return [array.tobytes() for array in weights]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("states")


@functools.cache
def whole(servers, folder):
    """The weights of jobs of 3 workers after 40 steps, by kind."""
    (first, *others) = run_calls(Launch("shm", 3, servers), at_one_go, *((kind, folder) for kind in TYPES))
    assert all(other == first for other in others)
    return dict(zip(TYPES, first, strict=True))


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("kind", TYPES)
def test_the_number_of_servers_changes_no_bit(folder, servers, kind):
    assert whole(servers, folder)[kind] == whole(0, folder)[kind]


@pytest.mark.parametrize("servers", [0, 1, 2])
def test_training_goes_on_in_new_processes_with_equal_bits(folder, servers):
    """From the file of as many servers, and of one more or none; with the optimizer in the file and without."""
    another = (servers + 1) % 3
    expected = {number: whole(number, folder) for number in (servers, another)}
    calls = [
        (kind, folder, saved_with, saved_with == another)
        for kind in TYPES
        for saved_with in (servers, another)
    ]
    for found in run_calls(Launch("shm", 3, servers), go_on, *calls):
        for (kind, _, saved_with, _), weights in zip(calls, found, strict=True):
            assert weights == expected[saved_with][kind], (kind, saved_with)


def test_training_goes_on_over_mpi(folder):
    assert run_calls(Launch("mpi", 2, 1), save_and_go_on, ("2bit", folder)) == [[True], [True]]


def save_and_go_on(rig, kind, folder):
    expected = at_one_go(rig, kind, folder / "mpi")
    rig.close()
    rig.barrier()
    return go_on(rig, kind, folder / "mpi", 1, False) == expected


@pytest.fixture(autouse=True)
def mpi_folder(folder):
    (folder / "mpi").mkdir(exist_ok=True)


# ---- files that do not fit ---------------------------------------------------------------------------


class Heavy(opt.SGD):
    """Has the states of SGD."""


def refuses(rig, folder):
    """Every worker has the error, and nothing has changed."""
    shape, fits = (300, 301), f"{folder}/fits-{rig.num_servers}"

    def make(key="fc", shape=shape, dtype=F32, optimizer=None, compression=None):
        store = rig.store()
        if compression:
            store.set_gradient_compression(compression)
        store.init(key, np.ones(shape, dtype))
        if optimizer is not None:
            store.set_optimizer(optimizer)
        return store

    store = make()
    assert "set_optimizer() comes first" in caught(lambda: store.save_optimizer_states(fits), OptionError)
    sgd = opt.SGD(lr=1.0, momentum=0.5)
    store.set_optimizer(sgd)
    out = np.zeros(shape, F32)
    store.pushpull("fc", np.ones(shape, F32), out, mean=True)
    store.save_optimizer_states(fits)
    caught(lambda: store.save_optimizer_states(f"{folder}/no such folder/x"), CheckpointError)
    with open(fits, "rb") as file:
        content = file.read()
    if rig.rank == 0:
        for name, wrong in {"cut": content[: len(content) // 2], "text": b"hello", "empty": b""}.items():
            with open(f"{fits}-{name}", "wb") as file:
                file.write(wrong)
    store.barrier()
    for name in ("no such", "cut", "text", "empty"):
        assert fits in caught(
            lambda name=name: store.load_optimizer_states(f"{fits}-{name}"), CheckpointError
        )
    if rig.rank == 0:  # the others' path is not looked at
        store.load_optimizer_states(fits)
    else:
        store.load_optimizer_states("elsewhere")
    before = out.copy()
    store.pushpull("fc", np.zeros(shape, F32), out, mean=True)
    assert (out == before - 0.5).all()  # the momentum that was saved

    for options, piece in [
        ({"key": "other", "optimizer": sgd}, "its keys are [['fc', [300, 301], 'float32']], here [['other'"),
        ({"shape": (301, 300), "optimizer": sgd}, "its keys are"),
        ({"dtype": np.float64, "optimizer": sgd}, "its keys are"),
        ({"optimizer": opt.Adam(lr=1.0)}, "its optimizer_class is SGD, but here Adam"),
        ({"optimizer": opt.SGD(lr=1.0)}, "key 'fc' has states"),
        ({"optimizer": Rate(1.0)}, "its optimizer_class is SGD, but here Rate"),
        ({"optimizer": Heavy(lr=1.0, momentum=0.5)}, "its optimizer_class is SGD, but here Heavy"),
        ({}, "key 'fc' has states"),
        (
            {"optimizer": sgd, "compression": TYPES["2bit"]},
            "its compression is None, but here {'type': '2bit'",
        ),
    ]:
        other = make(**options)
        text = caught(lambda other=other: other.load_optimizer_states(fits), CheckpointError)
        assert piece in text, text
    compressed = make(optimizer=sgd, compression={"type": "2bit", "threshold": 0.5})
    compressed.save_optimizer_states(f"{fits}-2bit")
    for params in ({"type": "2bit", "threshold": 0.25}, {"type": "1bit"}):
        other = make(optimizer=sgd, compression=params)
        text = caught(lambda other=other: other.load_optimizer_states(f"{fits}-2bit"), CheckpointError)
        assert "its compression is {'type': '2bit', 'threshold': 0.5}, but here" in text, text
    value = np.zeros(shape, F32)
    store = make(optimizer=opt.Adam(lr=1.0))
    caught(lambda: store.load_optimizer_states(fits), CheckpointError)
    store.pushpull("fc", np.ones(shape, F32), value)  # goes on as if nothing had been
    assert np.allclose(value, 0, atol=1e-6)
    return True


@pytest.mark.parametrize("servers", [0, 2])
def test_a_file_that_does_not_fit_is_an_error_on_all_workers(folder, servers):
    assert run_calls(Launch("shm", 3, servers), refuses, (folder,)) == [[True]] * 3


def loads_of_others(rig, folder):
    store = begin(rig, "2bit", [np.ones(shape, F32) for shape in SIZES.values()])
    return caught(lambda: store.load_optimizer_states(f"{folder}/2bit-1"), CheckpointError)


def test_a_file_of_more_workers_is_refused(folder):
    whole(1, folder)
    for (text,) in run_calls(Launch("shm", 2, 1), loads_of_others, (folder,)):
        assert "its num_workers are 3, here 2" in text
