# SPDX-License-Identifier: Apache-2.0
"""Stores that sum what all workers push: values, sums, updates, bytes, over every transport, with 0 to 7 servers."""

from __future__ import annotations

import functools
import math
import threading

import numpy as np
import pytest

from singa_lite import opt
from singa_lite.device import get_default_device
from singa_lite.errors import CommError
from singa_lite.kvstore.dist import BIG_ARRAY
from singa_lite.kvstore.sums import DIRECT_BYTES
from singa_lite.tensor import Tensor
from tests.kvstore.rig import Facts, Launch, Rate, assert_holds, run_facts, run_process

LAUNCHES = [
    *(Launch("shm", *job) for job in ((1, 0), (2, 1), (3, 0), (3, 2), (2, 3), (7, 7))),
    *(Launch("mpi", *job) for job in ((1, 0), (2, 1), (3, 2), (2, 3))),
]
FACTS = Facts()
F32 = np.float32


def most(launch):
    """All launches but some that are for one fact."""
    return launch not in (Launch("shm", 7, 7), Launch("mpi", 1, 0), Launch("mpi", 2, 3))


fact = FACTS.fact


# ---- the nightly test of MXNet -----------------------------------------------------------------------


@fact()
def the_nightly_form_gives_its_numbers(rig):
    """Init 1, rate 2, worker r pushes r + 1: 1 + W (W + 1) i after push i, exactly."""
    store, total = rig.store(), rig.num_workers * (rig.num_workers + 1)
    kinds = [((2, 3), F32), ((2, 3), np.float16), ((1200, 1200), F32), ((1200, 1200), np.float16)]
    keys = ["3", "4", "99", "100"]
    store.init(keys, [np.ones(shape, dtype) for shape, dtype in kinds])
    store.set_optimizer(Rate(2.0))
    mine = [np.full(shape, rig.rank + 1, dtype) for shape, dtype in kinds]
    outs = [np.zeros(shape, dtype) for shape, dtype in kinds]
    for i in range(1, 8):
        store.push(keys, mine)
        store.pull(keys, outs)
        for out in outs:
            assert (out == 1 + total * i).all(), (i, out.shape, out.dtype, out.flat[0], 1 + total * i)
    assert (mine[0] == rig.rank + 1).all()
    expected = {1: 15, 2: 43, 3: 85, 7: 393}[rig.num_workers]
    assert float(outs[0][0, 0]) == float(outs[3][-1, -1]) == expected


# ---- keys and values ---------------------------------------------------------------------------------


@fact(most)
def worker_0_gives_the_first_value(rig):
    store = rig.store()
    large = (BIG_ARRAY + 7,)
    out, big = np.ones(3, F32), np.ones(large)
    store.init("a", np.full(3, rig.rank, F32))
    store.init(["b", "c"], [Tensor(data=np.full(3, 4 + rig.rank, F32)), np.full(large, rig.rank, np.float64)])
    store.pull(["a", "c"], [out, big])
    assert (out == 0).all() and (big == 0).all()
    tensor = Tensor(data=np.zeros(3, F32))
    store.pull("b", tensor)
    assert tensor.array.tolist() == [4, 4, 4]


@fact(most)
def every_dtype_and_shape_can_be_a_value(rig):
    store, shapes = rig.store(), [(), (1,), (0,), (2, 0, 3), (2, 3, 4)]
    kinds = [
        (shape, dtype) for shape in shapes for dtype in (np.float16, F32, np.float64, np.int32, np.int64)
    ]
    keys = list(range(len(kinds)))
    store.init(keys, [np.full(shape, 5, dtype) for shape, dtype in kinds])
    outs = [np.zeros(shape, dtype) for shape, dtype in kinds]
    store.pull(keys, outs)
    assert all((out == 5).all() for out in outs)
    total = rig.num_workers * (rig.num_workers + 1) // 2
    store.pushpull(keys, [np.full(shape, rig.rank + 1, dtype) for shape, dtype in kinds], outs)
    for (shape, dtype), out in zip(kinds, outs, strict=True):
        assert out.shape == shape and out.dtype == dtype and (out == total).all(), (shape, dtype, out)


@fact(most)
def broadcast_makes_keys_and_sets_them_again(rig):
    store = rig.store()
    out = np.zeros(4, F32)
    store.broadcast("a", np.full(4, 2 + rig.rank, F32), out)
    assert (out == 2).all()
    store.set_optimizer(opt.SGD(lr=1.0, momentum=0.5))
    store.pushpull("a", np.full(4, 1 / rig.num_workers, F32), out)
    value = float(out[0])
    store.broadcast("a", np.full(4, 8 - rig.rank, F32), out)
    assert value < 2 and (out == 8).all()
    store.pushpull("a", np.zeros(4, F32), out)
    assert (out == 7.5).all() or abs(float(out[0]) - 7.5) < 1e-6  # the momentum has stayed


@fact(most)
def broadcast_again_goes_by_key_whatever_the_order(rig):
    store = rig.store()
    store.init(["a", "b"], [np.zeros(3, F32)] * 2)
    keys = ["b", "a"] if rig.rank == 1 else ["a", "b"]
    outs = [np.zeros(3, F32) for _ in keys]
    store.broadcast(keys, [np.full(3, {"a": 2, "b": 5}[key] + rig.rank, F32) for key in keys], outs)
    assert [out[0] for out in outs] == [{"a": 2, "b": 5}[key] for key in keys]


@fact(most)
def a_sum_replaces_the_value_where_there_is_no_optimizer(rig):
    store, total = rig.store(), rig.num_workers * (rig.num_workers + 1) / 2
    store.init([5, 7, 11], [np.zeros((2, 2), F32)] * 3)
    out = [np.zeros((2, 2), F32) for _ in range(3)]
    for _ in range(2):
        store.push([5, 7, 11], [np.full((2, 2), k * (rig.rank + 1), F32) for k in (1, 2, 3)])
        store.pull([5, 7, 11], out)
        assert [float(each[0, 0]) for each in out] == [total, 2 * total, 3 * total]
    store.push(5, [np.ones((2, 2), F32)] * 4)  # of four devices in MXNet
    store.pull(5, out[0])
    assert (out[0] == 4 * rig.num_workers).all()


@fact(most)
def a_pull_fills_every_array_of_a_list(rig):
    store = rig.store()
    store.init(["a", "b"], [np.full(3, 1, F32), np.full(BIG_ARRAY, 2, F32)])
    first, second = np.zeros(3, F32), Tensor(data=np.zeros(3, F32))
    others = [np.zeros(BIG_ARRAY, F32) for _ in range(3)]
    store.pull(["a", "b"], [[first, second], others])
    assert first.tolist() == second.array.tolist() == [1, 1, 1]
    assert all((other == 2).all() for other in others)
    given = [np.full(3, 1, F32), np.full(3, 2, F32)]
    store.pushpull("a", given)  # and gives them the result
    assert all((each == 3 * rig.num_workers).all() for each in given)


@fact(most)
def arrays_may_be_changed_after_a_push(rig):
    store = rig.store()
    store.init("a", np.zeros(BIG_ARRAY * 8, F32))
    mine, out = np.full(BIG_ARRAY * 8, rig.rank + 1, F32), np.zeros(BIG_ARRAY * 8, F32)
    store.push("a", mine)
    mine[...] = -100
    store.pull("a", out)
    assert (out == rig.num_workers * (rig.num_workers + 1) / 2).all()


# ---- sums --------------------------------------------------------------------------------------------


def ordered_sum(rig, seed, size, dtype, scales=None, mean=False):
    """The sum in worker order: of float16 in float32, divided at the end."""
    total = None
    for worker in range(rig.num_workers):
        values = given(rig, seed, size, dtype, worker)
        values = values.astype(F32) if dtype == np.float16 else values
        if scales is not None:
            values = values * values.dtype.type(scales[worker])
        total = values if total is None else total + values
    if mean:
        total = total / total.dtype.type(rig.num_workers)
    return total.astype(dtype)


def given(rig, seed, size, dtype, worker=None):
    """Numbers of very different size, of which another order has another sum."""
    rng = rig.rng(seed, size, worker=worker)
    return (rng.standard_normal(size) * 10.0 ** rng.integers(-3, 3, size)).astype(dtype)


SUMS = [(7, F32), (7, np.float64), (BIG_ARRAY + 5, F32), (BIG_ARRAY + 5, np.float16), (100, np.float16)]


@fact(most)
def sums_are_those_of_the_workers_in_order(rig):
    """Of equal bits, whatever came first and however the array was cut."""
    store, keys = rig.store(), list(range(len(SUMS)))
    store.init(keys, [np.zeros(size, dtype) for size, dtype in SUMS])
    scales = [1 / (worker + 3) for worker in range(rig.num_workers)]
    options = [{}, {"mean": True}, {"scale": scales[rig.rank]}, {"scale": scales[rig.rank], "mean": True}]
    for seed, each in enumerate(options):
        outs = [np.zeros(size, dtype) for size, dtype in SUMS]
        store.pushpull(keys, [given(rig, seed, size, dtype) for size, dtype in SUMS], outs, **each)
        for (size, dtype), out in zip(SUMS, outs, strict=True):
            factors = scales if "scale" in each else None
            expected = ordered_sum(rig, seed, size, dtype, factors, "mean" in each)
            assert out.tobytes() == expected.tobytes(), (size, dtype, each)


@fact(lambda launch: launch.workers == 3 and most(launch))
def float16_is_summed_in_float32(rig):
    store = rig.store()
    store.init("a", np.zeros(2, np.float16))
    out = np.zeros(2, np.float16)
    store.pushpull("a", np.full(2, [2048, 1, 1][rig.rank], np.float16), out)
    assert out.tolist() == [2050, 2050]  # 2048 + 1 is 2048 in float16


@fact(most)
def optimizers_on_servers_give_the_bits_of_one_here(rig):
    """Also of slices; each key has steps and a schedule of its own."""
    sizes = {"a": 3, "b": BIG_ARRAY + 11, "c": 400}
    for number, make in enumerate(
        (
            lambda: opt.SGD(lr=opt.ExponentialDecay(0.1, 2, 0.5), momentum=0.9, weight_decay=1e-3),
            lambda: opt.Adam(lr=0.01),
        )
    ):
        store = rig.store()
        store.init(list(sizes), [np.ones(size, F32) for size in sizes.values()])
        store.set_optimizer(make())
        here = {
            key: (make(), Tensor(data=np.ones(size, F32), device=get_default_device()))
            for key, size in sizes.items()
        }
        for i in range(4):
            keys = [key for key in sizes if key != "c" or i % 2]
            outs = [np.zeros(sizes[key], F32) for key in keys]
            mine = [given(rig, 10 * number + i, sizes[key], F32) for key in keys]
            store.pushpull(keys, mine, outs, mean=True, scale=0.01)
            for key, out in zip(keys, outs, strict=True):
                optimizer, param = here[key]
                total = ordered_sum(rig, 10 * number + i, sizes[key], F32, [0.01] * rig.num_workers, True)
                optimizer.update_all([(param, Tensor(data=total))])
                optimizer.step()
                assert out.tobytes() == param.array.tobytes(), (number, i, key)


@fact(most)
def a_new_learning_rate_counts_from_the_next_push_on(rig):
    store = rig.store()
    store.init("a", np.zeros(2, F32))
    store.set_optimizer(opt.SGD(lr=0.5))
    out, ones = np.zeros(2, F32), np.ones(2, F32)
    store.pushpull("a", ones, out, mean=True)
    assert (out == -0.5).all()
    store.set_learning_rate(0)
    store.pushpull("a", ones, out, mean=True)
    assert (out == -0.5).all()
    store.init("b", np.zeros(2, F32))  # later keys have it too
    store.pushpull("b", ones, out, mean=True)
    assert (out == 0).all()
    store.set_learning_rate(2)
    store.pushpull("a", ones, out, mean=True)
    assert (out == -2.5).all()
    store.set_optimizer(opt.SGD(lr=0.25))
    store.pushpull("b", ones, out, mean=True)
    assert (out == -0.25).all()


@fact(most)
def a_new_optimizer_drops_the_states(rig):
    store = rig.store()
    store.init("a", np.zeros(2, F32))
    store.set_optimizer(opt.SGD(lr=1.0, momentum=0.5))
    assert store.optimizer_description == opt.SGD(lr=1.0, momentum=0.5).describe()
    out, ones = np.zeros(2, F32), np.ones(2, F32)
    store.pushpull("a", ones, out, mean=True)
    store.set_optimizer(opt.SGD(lr=1.0, momentum=0.5))
    before = out.copy()
    store.pushpull("a", np.zeros(2, F32), out, mean=True)
    assert (out == before).all()


# ---- several at once ---------------------------------------------------------------------------------


@fact(most)
def several_pushpulls_may_be_in_flight(rig):
    """Each gives the value after its own push, whichever is waited for first."""
    store, total = rig.store(), rig.num_workers * (rig.num_workers + 1)
    store.init(["a", "b"], [np.ones(3, F32), np.ones(BIG_ARRAY + 1, F32)])
    store.set_optimizer(Rate(2.0))
    outs = [[np.zeros(3, F32), np.zeros(BIG_ARRAY + 1, F32)] for _ in range(4)]
    mine = [np.full(3, rig.rank + 1, F32), np.full(BIG_ARRAY + 1, rig.rank + 1, F32)]
    works = [store.pushpull(["a", "b"], mine, out, wait=False) for out in outs]
    last = [np.zeros(3, F32), np.zeros(BIG_ARRAY + 1, F32)]
    store.pull(["a", "b"], last)
    works[2].wait()
    assert (outs[2][0] == 1 + 3 * total).all() and works[2].done()
    for i, (work, out) in enumerate(zip(works, outs, strict=True)):
        work.wait()
        assert work.wait() is None and work.done()
        assert all((each == 1 + total * (i + 1)).all() for each in out), i
    assert all((each == 1 + 4 * total).all() for each in last)


@fact(most)
def a_second_thread_in_a_call_is_an_error(rig):
    store, errors = rig.store(), []
    store.init("a", np.ones(3, F32))
    if not rig.launch.servers:
        return  # the communicator says it of two collectives

    def call():
        try:
            store.pushpull("a", np.ones(3, F32), np.ones(3, F32))
        except CommError as error:
            errors.append(str(error))

    with store._one_thread("a call"):
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
    assert len(errors) == 1 and "another thread is in a call of this store" in errors[0], errors
    out = np.zeros(3, F32)
    store.pushpull("a", np.full(3, rig.rank, F32), out)
    assert (out == sum(range(rig.num_workers))).all()


@fact(most)
def a_worker_may_leave_keys_out(rig):
    store, n = rig.store(), rig.num_workers
    store.init(["a", "b", "c"], [np.ones(2, F32), np.ones(BIG_ARRAY, F32), np.ones(2, F32)])
    store.set_optimizer(opt.SGD(lr=1.0, weight_decay=0.5))
    outs = [np.zeros(2, F32), np.zeros(BIG_ARRAY, F32), np.zeros(2, F32)]
    last = rig.rank == n - 1  # alone gives "b"
    mine = [np.ones(2, F32), np.ones(BIG_ARRAY, F32) if last else None, None]
    store.pushpull(["a", "b", "c"], mine, outs, allow_none=True)
    assert (outs[0] == 1 - (n + 0.5)).all() and (outs[1] == 1 - 1.5).all()
    assert (outs[2] == 1).all()  # no weight decay either
    store.pushpull(["a", "b", "c"], [None] * 3, outs, allow_none=True)
    assert (outs[0] == 1 - (n + 0.5)).all() and (outs[1] == 1 - 1.5).all() and (outs[2] == 1).all()


@fact(lambda launch: launch.servers < 2)
def workers_may_differ_in_scale_and_in_what_they_leave_out(rig):
    """Also of an array that travels by itself where there are no servers, and is changed by nothing but the sum."""
    store, n = rig.store(), rig.num_workers
    sizes = [3, DIRECT_BYTES // 4 + 5, 2, DIRECT_BYTES // 4]
    keys = ["a", "b", "c", "d"]
    store.init(keys, [np.zeros(size, F32) for size in sizes])
    first = rig.rank == 0
    for step in (1, 2):
        mine = [np.arange(size, dtype=F32) * step for size in sizes]
        before = [array.copy() for array in mine]
        outs = [np.full(size, -1, F32) for size in sizes]
        given = [mine[0], mine[1], None if first else mine[2], None if first else mine[3]]
        store.pushpull(keys, given, outs, scale=0.5 if first else 1.0, mean=True, allow_none=True)
        factors = [(n - 0.5) / n] * 2 + [(n - 1) / n] * 2
        for array, out, factor in zip(mine, outs, factors, strict=True):
            expected = array.astype(np.float64) * factor
            np.testing.assert_allclose(out, expected, rtol=1e-6)
        assert all((array == copy).all() for array, copy in zip(mine, before, strict=True))
    store.push(keys, mine)
    mine[1][:] = 77  # after a push the arrays are the caller's again
    store.pull(keys, outs)
    for array, out in zip(before, outs, strict=True):
        np.testing.assert_array_equal(out, array * n)


@fact(lambda launch: launch.workers == 2 and launch.servers == 1)
def sixty_four_megabytes_go_both_ways(rig):
    store, size = rig.store(), 1 << 23
    store.init("a", np.zeros(size))
    mine = np.arange(size, dtype=np.float64)
    out = np.zeros(size)
    store.pushpull("a", mine + rig.rank, out)
    assert (out == 2 * mine + 1).all()
    assert store.traffic.bytes_received >= size * 8


# ---- servers -----------------------------------------------------------------------------------------


@fact(most)
def bytes_are_those_of_the_arrays(rig):
    store, sizes = rig.store(), [500, 20, BIG_ARRAY + 9, 50]
    keys = [f"p{number}" for number in range(len(sizes))]
    store.init(keys, [np.zeros(size, F32) for size in sizes])
    t = store.traffic
    before = t.bytes_sent, t.bytes_received, t.bytes_heads, t.wait_s
    arrays = [np.ones(size, F32) for size in sizes]
    store.pushpull(keys, arrays)
    t = store.traffic
    num_bytes = 4 * sum(sizes)
    assert (t.bytes_sent - before[0], t.bytes_received - before[1]) == (num_bytes, num_bytes)
    if rig.num_servers:
        assert 0 < t.bytes_heads - before[2] < 2000 * rig.num_servers
        assert t.wait_s > before[3]
    store.push(keys, arrays)
    assert store.traffic.bytes_sent - before[0] == 2 * num_bytes


@fact(lambda launch: launch.servers > 0 and most(launch))
def servers_say_what_they_have_done(rig):
    store, sizes = rig.store(), [30, 10, BIG_ARRAY * 2, 5]
    store.init(list(range(4)), [np.zeros(size, F32) for size in sizes])
    store.barrier()
    before = store.server_stats()
    store.barrier()
    for _ in range(3):
        store.pushpull(list(range(4)), [np.ones(size, F32) for size in sizes])
    store.barrier()
    after = store.server_stats()
    assert len(after) == rig.num_servers == store.num_servers
    assert sum(each["elements"] for each in after) == sum(sizes)
    assert sum(each["keys"] for each in after) == 3 + rig.num_servers
    for now, then in zip(after, before, strict=True):
        assert now["keys"] == then["keys"] and now["elements"] == then["elements"]
        assert now["rounds"] - then["rounds"] == 3 * now["keys"]
        num_bytes = 3 * 4 * now["elements"] * rig.num_workers
        assert now["bytes_in"] - then["bytes_in"] == now["bytes_out"] - then["bytes_out"] == num_bytes
        assert now["idle_s"] > then["idle_s"] > 0
    assert set(after[0]) == {"keys", "elements", "rounds", "bytes_in", "bytes_out", "idle_s"}


@fact(lambda launch: launch.servers > 1 and most(launch))
def keys_go_to_servers_by_load_and_large_ones_are_cut(rig):
    store, shares = rig.store(big_array=1000), rig.num_servers
    store.init(["a", "b", "c"], [np.zeros(999, F32), np.zeros(1000, F32), np.zeros(1, F32)])
    parts = [round(1000 * (k + 1) / shares) - round(1000 * k / shares) for k in range(shares)]
    expected = [999 + parts[0], *parts[1:]]
    expected[expected.index(min(expected))] += 1
    found = [each["elements"] for each in store.server_stats()]
    assert found == expected, (found, expected)
    tiny = rig.store(big_array=1)  # every array is cut that has enough elements
    sizes = [(), (1,), (2,), (3,), (4,), (0,)]
    tiny.init(list(range(6)), [np.full(shape, 1, F32) for shape in sizes])
    tiny.set_optimizer(opt.Adam(lr=0.5))
    outs = [np.zeros(shape, F32) for shape in sizes]
    tiny.pushpull(list(range(6)), [np.full(shape, rig.rank + 1, F32) for shape in sizes], outs)
    assert all(np.allclose(out, 0.5, atol=1e-6) for out in outs), outs


@fact(most)
def a_store_says_what_it_is(rig):
    store = rig.store("dist_device_sync")
    assert (store.type, store.rank, store.num_workers, store.num_servers) == (
        "dist_device_sync",
        rig.rank,
        rig.num_workers,
        rig.num_servers,
    )
    assert store.is_capable("optimizer")
    assert f"worker {rig.rank} of {rig.num_workers}" in repr(store)
    if not rig.num_servers:
        assert store.server_stats() == []
    store.barrier()
    store._barrier()


def process(*arguments):
    return run_process(*arguments, facts=FACTS)


@functools.cache
def outcomes(launch):
    return run_facts(process, launch, FACTS)


@pytest.mark.parametrize(("launch", "name"), FACTS.cases(LAUNCHES))
def test_that(launch, name):
    assert_holds(outcomes(launch), name)


def test_the_nightly_numbers_are_those_of_the_formula():
    assert [[1 + w * (w + 1) * i for i in (1, 2, 3, 7)] for w in (1, 2, 3, 7)] == [
        [3, 5, 7, 15],
        [7, 13, 19, 43],
        [13, 25, 37, 85],
        [57, 113, 169, 393],
    ]
    assert math.isclose(393, float(np.float16(393)))
