# SPDX-License-Identifier: Apache-2.0
"""Stores whose pushes travel as 1 or 2 bits a value: MXNet's tables, a model in numpy, bytes; 0 to 2 servers."""

from __future__ import annotations

import functools
from itertools import pairwise

import numpy as np
import pytest

from singa_lite import opt
from singa_lite.errors import DTypeError, OptionError
from tests.kvstore.rig import Facts, Launch, Rate, assert_holds, caught, run_facts, run_process

LAUNCHES = [
    *(Launch("shm", *job) for job in ((1, 0), (2, 1), (3, 0), (3, 2))),
    *(Launch("mpi", *job) for job in ((2, 0), (2, 1))),
]
FACTS = Facts()
F32 = np.float32
SHAPES = [(2, 3), (1211, 1211), (1200, 1200)]
MNIST_CNN = [500, 20, 25_000, 50, 400_000, 500, 5_000, 10]
fact = FACTS.fact


def begin(rig, kind, threshold, shapes, value=0):
    store = rig.store()
    store.set_gradient_compression({"type": kind, "threshold": threshold})
    store.init(list(range(len(shapes))), [np.full(shape, value, F32) for shape in shapes])
    store.set_optimizer(Rate(2.0))
    return store


def table(rig, kind, threshold, pushed, expected):
    """Every worker pushes these, one after the other; the pulls are W times ``expected``. Return the residuals."""
    shapes, residuals = SHAPES[:1], []
    store = begin(rig, kind, threshold, shapes)
    for value, each in zip(pushed, expected, strict=True):
        out = np.full(shapes[0], 99, F32)
        store.push(0, np.full(shapes[0], value, F32))
        store.pull(0, out)
        assert (out == F32(each * rig.num_workers)).all(), (value, out[0, 0], each)
        (residual,) = set(store._residuals.get(0, out.size).tolist())
        residuals.append(residual)
    return residuals


@fact()
def two_bits_at_a_half_give_the_tables(rig):
    t = 0.5
    assert table(rig, "2bit", t, [0.4, F32(t) - F32(0.4), 0.2, F32(t) - F32(0.2)], [0, 1, 1, 2])[-1] == 0
    kept = table(rig, "2bit", t, [0.4, 0.2, 0.2, 0.2], [0, 1, 1, 2])
    assert np.allclose(kept, [0.4, 0.1, 0.3, 0], rtol=0, atol=1e-7), kept
    table(rig, "2bit", t, [t, 0, -t], [1, 1, 0])


@fact()
def one_bit_gives_the_tables(rig):
    for threshold in (-0.5, 0, 0.5):
        table(rig, "1bit", threshold, [2, 0, -2], [2, 4, 2])
    table(rig, "1bit", 1.5, [2, 0, -2], [2, 0, -2])
    table(rig, "1bit", 0, [1] * 7 + [-1] * 7, [*range(2, 15, 2), *range(12, -1, -2)])


def sent(kind, threshold, residual):
    """What is sent of gradients that were added to ``residual``, in numpy; the rest stays."""
    t = F32(threshold)
    if kind == "2bit":
        values = t * ((residual >= t).astype(F32) - (residual <= -t).astype(F32))
    else:
        values = np.where(residual > t, F32(1), F32(-1))
    residual -= values
    return values


def random_model(rig, kind, threshold, shapes, rounds):
    """Random pushes of every worker, against each worker's residual in numpy."""
    store = begin(rig, kind, threshold, shapes)
    kept = [[np.zeros(shape, F32) for shape in shapes] for _ in range(rig.num_workers)]
    value = [np.zeros(shape, F32) for shape in shapes]
    outs = [np.zeros(shape, F32) for shape in shapes]
    for i in range(rounds):
        everyone = [
            [
                rig.rng(i, number, worker=worker).uniform(-0.6, 0.6, shape).astype(F32)
                for number, shape in enumerate(shapes)
            ]
            for worker in range(rig.num_workers)
        ]
        store.pushpull(list(range(len(shapes))), everyone[rig.rank], outs)
        for number, out in enumerate(outs):
            total = np.zeros(shapes[number], F32)
            for residuals, grads in zip(kept, everyone, strict=True):
                residuals[number] += grads[number]
                total += sent(kind, threshold, residuals[number])
            value[number] += 2 * total
            assert (out == value[number]).all(), (kind, i, shapes[number])


@fact()
def random_pushes_give_what_a_model_in_numpy_gives(rig):
    random_model(rig, "2bit", 0.5, [(2, 3), (301, 300), (17,), (1,)], 7)
    random_model(rig, "1bit", 0.0, [(2, 3), (301, 300), (33,)], 7)


@fact(lambda launch: launch.transport == "shm" and launch.servers == 2)
def so_do_large_ones(rig):
    random_model(rig, "2bit", 0.5, SHAPES, 2)


@fact()
def first_values_and_pulls_are_not_compressed(rig):
    store = begin(rig, "2bit", 0.5, [(7,), (100_000,)], value=1)
    outs = [np.zeros(7, F32), np.zeros(100_000, F32)]
    before = store.traffic.bytes_received
    store.pull([0, 1], outs)
    assert all((out == 1).all() for out in outs)
    if rig.num_servers:
        assert store.traffic.bytes_received - before == 4 * 100_007
    store.broadcast(0, np.full(7, 0.3, F32), outs[0])
    assert (outs[0] == F32(0.3)).all()


def pushed(rig, store, keys, arrays):
    """(bytes sent, bytes received) by a push and pull of arrays."""
    before = store.traffic.bytes_sent, store.traffic.bytes_received
    store.push(keys, arrays)
    middle = store.traffic.bytes_sent, store.traffic.bytes_received
    store.pull(keys, [np.zeros_like(array) for array in arrays])
    return middle[0] - before[0], store.traffic.bytes_received - middle[1]


@fact()
def bytes_pushed_are_those_of_the_formula(rig):
    """4 ceil(n / 16) or 4 ceil(n / 32) a part; (1211, 1211) cut in two has an odd value in each."""
    figures = {"2bit": [4, 366_632, 360_000], "1bit": [4, 183_316, 180_000]}
    for kind, numbers in figures.items():
        store = begin(rig, kind, 0.5, SHAPES)
        for key, (shape, number) in enumerate(zip(SHAPES, numbers, strict=True)):
            per_word, size = (16, 32)[kind == "1bit"], int(np.prod(shape))
            if rig.num_servers > 1 and size > 65_536:
                cuts = [round(size * k / rig.num_servers) for k in range(rig.num_servers + 1)]
                number = sum(4 * -(-(b - a) // per_word) for a, b in pairwise(cuts))
            found, pulled = pushed(rig, store, [key], [np.ones(shape, F32)])
            assert found == number, (kind, shape, found)
            assert pulled == (4 * size if rig.num_servers else 0)


@fact()
def a_step_of_the_mnist_cnn_pushes_a_16th_or_a_32nd(rig):
    sizes, keys = [(size,) for size in MNIST_CNN], list(range(len(MNIST_CNN)))
    arrays = [np.ones(size, F32) for size in MNIST_CNN]
    for kind, number in {"2bit": 107_788, "1bit": 53_900}.items():
        found, pulled = pushed(rig, begin(rig, kind, 0.5, sizes), keys, arrays)
        assert found == number, found
        assert pulled == (1_724_320 if rig.num_servers else 0)
    store = rig.store()
    store.init(keys, arrays)
    found, pulled = pushed(rig, store, keys, arrays)
    assert found == 1_724_320
    if rig.num_servers == 2:
        assert sorted(each["elements"] for each in store.server_stats()) == [206_060, 225_020]


@fact()
def scale_and_mean_are_for_what_was_decoded(rig):
    store = rig.store()
    store.set_gradient_compression({"type": "2bit"})  # .5
    store.init("a", np.zeros(5, F32))
    store.set_optimizer(Rate(1.0))
    out = np.zeros(5, F32)
    store.pushpull("a", np.full(5, 0.75, F32), out, scale=0.25 * (rig.rank + 1), mean=True)
    assert np.allclose(out, 0.125 * (rig.num_workers + 1) / 2, rtol=1e-6), out
    assert (store._residuals.get("a", 5) == 0.25).all()


@fact()
def without_an_optimizer_the_decoded_sum_replaces_the_value(rig):
    store = rig.store()
    store.set_gradient_compression({"type": "1bit", "threshold": 0})
    store.init("a", np.full(5, 9, F32))
    out = np.zeros(5, F32)
    for _ in range(2):
        store.pushpull("a", np.full(5, 3, F32), out)
        assert (out == rig.num_workers).all()


@fact()
def a_key_left_out_keeps_its_residual(rig):
    store = begin(rig, "2bit", 0.5, [(3,), (70_000,)])
    outs = [np.zeros(3, F32), np.zeros(70_000, F32)]
    arrays = [np.full(3, 0.3, F32), np.full(70_000, 0.6, F32)]
    store.pushpull([0, 1], arrays, outs, allow_none=True)
    first = rig.rank == 0
    store.pushpull([0, 1], [arrays[0], arrays[1] if first else None], outs, allow_none=True)
    assert (outs[0] == rig.num_workers).all()
    assert (outs[1] == rig.num_workers + 1).all()
    assert np.allclose(store._residuals.get(1, 70_000), 0.2 if first else 0.1, atol=1e-6)
    store.pushpull([0, 1], [None, None], outs, allow_none=True)
    assert (outs[0] == rig.num_workers).all() and (outs[1] == rig.num_workers + 1).all()


@fact()
def values_that_are_not_finite_are_refused_and_change_nothing(rig):
    store = begin(rig, "2bit", 0.5, [(3,), (4,)])
    good = [np.full(3, 0.3, F32), np.full(4, 0.3, F32)]
    store.push([0, 1], good)
    before = store.traffic.bytes_sent
    for wrong in (np.nan, np.inf, -np.inf):
        bad = [good[0], np.array([0, 0, wrong, 0], F32)]
        text = caught(lambda bad=bad: store.push([0, 1], bad), OptionError)
        assert "key 1" in text and "nothing was sent" in text, text
    assert store.traffic.bytes_sent == before
    out = np.zeros(3, F32)
    store.push([0, 1], good)  # the residuals are those of the first push
    store.pull(0, out)
    assert (out == rig.num_workers).all()


@fact(lambda launch: launch.servers > 0)
def a_push_with_too_many_names_leaves_the_residuals(rig):
    """The header for the last server would have over a million bytes; nothing is sent to the first either."""
    store = rig.store()
    store.set_gradient_compression({"type": "2bit", "threshold": 0.5})
    keys, sizes = ["short", *(letter * 300_000 for letter in "abcd")], [1000, 2, 2, 2, 2]
    for key, size in zip(keys, sizes, strict=True):  # the long ones on the second server, if there is one
        store.init(key, np.zeros(size, F32))
        store.push(key, np.full(size, 0.125 * (rig.rank + 1), F32))
    before = {
        key: np.full(size, 0.125 * (rig.rank + 1)).tolist() for key, size in zip(keys, sizes, strict=True)
    }
    traffic = store.traffic.bytes_sent
    given = [np.full(size, 0.25, F32) for size in sizes]
    text = caught(lambda: store.push(keys, given), OptionError)
    assert "the header has" in text and store.traffic.bytes_sent == traffic, text
    assert {key: lost.tolist() for key, lost in store.get_residuals().items()} == before
    out = np.zeros(1000, F32)
    store.pushpull("short", given[0], out)  # 3, 4 and 5 eighths on three workers
    assert (out == 0.5 * (rig.num_workers - 1)).all(), out[0]


@fact()
def float32_alone_is_compressed(rig):
    store = rig.store()
    store.set_gradient_compression({"type": "2bit", "threshold": 0.5})
    store.init(["half", "double"], [np.ones(2, np.float16), np.ones(2)])
    for key, dtype in {"half": np.float16, "double": np.float64}.items():
        text = caught(lambda key=key, dtype=dtype: store.push(key, np.ones(2, dtype)), DTypeError)
        assert f"key {key!r} is {np.dtype(dtype)}" in text, text


@fact()
def optimizers_update_by_what_was_decoded(rig):
    store = rig.store()
    store.set_gradient_compression({"type": "1bit", "threshold": 0.0})
    store.init("a", np.zeros(70_000, F32))
    store.set_optimizer(opt.SGD(lr=0.5, momentum=0.5))
    out = np.zeros(70_000, F32)
    store.pushpull("a", np.full(70_000, 5, F32), out, mean=True)
    assert (out == -0.5).all()
    store.pushpull("a", np.full(70_000, 5, F32), out, mean=True)
    assert (out == -1.25).all()


@fact(lambda launch: launch.servers > 0)
def pushes_of_async_stores_are_compressed_too(rig):
    store = rig.store("dist_async")
    store.set_gradient_compression({"type": "2bit", "threshold": 0.5})
    store.init("a", np.zeros(70_000, F32))
    store.set_optimizer(Rate(2.0))
    for _ in range(4):
        store.push("a", np.full(70_000, 0.25, F32))
    store.barrier()
    out = np.zeros(70_000, F32)
    store.pull("a", out)
    assert (out == 2 * rig.num_workers).all()


def process(*arguments):
    return run_process(*arguments, facts=FACTS)


@functools.cache
def outcomes(launch):
    return run_facts(process, launch, FACTS)


@pytest.mark.parametrize(("launch", "name"), FACTS.cases(LAUNCHES))
def test_that(launch, name):
    assert_holds(outcomes(launch), name)
