# SPDX-License-Identifier: Apache-2.0
"""What a store refuses: bad arguments on one worker before anything moves, and workers that disagree on all of them."""

from __future__ import annotations

import functools
import time

import numpy as np
import pytest

from singa_lite import opt
from singa_lite.comm.base import World
from singa_lite.comm.local import LocalCommunicator
from singa_lite.errors import CommError, DTypeError, OptionError, ShapeError
from singa_lite.tensor import Tensor
from tests.kvstore.rig import Facts, Launch, Rate, assert_holds, caught, run_facts, run_process
from tests.limits import LIMIT_S

LAUNCHES = [
    *(Launch("shm", *job) for job in ((1, 0), (1, 2), (2, 1), (3, 0), (3, 2))),
    *(Launch("mpi", *job) for job in ((2, 0), (2, 1))),
]
FACTS = Facts()
F32 = np.float32
fact = FACTS.fact


def several(launch):
    return launch.workers > 1


def with_servers(launch):
    return several(launch) and launch.servers > 0


# ---- bad arguments -----------------------------------------------------------------------------------


@fact()
def bad_arguments_raise_before_anything_moves(rig):
    store = rig.store()
    store.init(["a", "int"], [np.ones((2, 3), F32), np.ones(4, np.int64)])
    good, out = np.ones((2, 3), F32), np.zeros((2, 3), F32)
    read_only = np.zeros((2, 3), F32)
    read_only.flags.writeable = False
    gap = np.zeros((3, 2), F32).T
    bad = [
        (OptionError, "there is no key 'b'", lambda: store.push("b", good)),
        (OptionError, "there is no key 'b'", lambda: store.pull("b", out)),
        (OptionError, "there is no key 'b'", lambda: store.pushpull(["a", "b"], [good, good], [out, out])),
        (OptionError, "there is a key 'a' already", lambda: store.init("a", good)),
        (OptionError, "there is a key 'a' already", lambda: store.init(["b", "a"], [good, good])),
        (
            OptionError,
            "key 'a' is there already but others",
            lambda: store.broadcast(["b", "a"], [good] * 2, [out] * 2),
        ),
        *(
            (ShapeError, f"broadcast: {piece}", lambda key=key, bad=bad: store.broadcast(key, good * 2, bad))
            for key in ("a", "new")
            for bad, piece in (
                (np.ones(6, F32), f"key {key!r} has shape (2, 3), got (6,)"),
                (gap, f"out of key {key!r}: an array of shape (2, 3) is not contiguous"),
            )
        ),
        (OptionError, "broadcast: 1 keys but 2 values", lambda: store.broadcast(["a"], [good], [out] * 2)),
        (OptionError, "ints or texts, not both", lambda: store.init(3, good)),
        (OptionError, "ints or texts, not both", lambda: store.push(3, good)),
        (OptionError, "ints or texts, not both", lambda: store.init(["b", 3], [good, good])),
        (OptionError, "a key is there twice", lambda: store.push(["a", "a"], [good, good])),
        (OptionError, "must be text", lambda: store.init("\ud800", good)),
        (OptionError, "must be an int >= 0", lambda: store.init([-1], [good])),
        (OptionError, "must be an int >= 0", lambda: store.init([1.5], [good])),
        (OptionError, "must be an int >= 0", lambda: store.init([True], [good])),
        (OptionError, "must be an int >= 0", lambda: store.push(None, good)),
        (OptionError, "at least one key", lambda: store.push([], [])),
        (OptionError, "at least one key", lambda: store.init([], [])),
        (OptionError, "2 keys but 1 values", lambda: store.push(["a", "int"], [good])),
        (OptionError, "2 keys but 1 values", lambda: store.push(["a", "int"], good)),
        (OptionError, "1 keys but 2 values", lambda: store.init(["b"], [good, good])),
        (OptionError, "got an empty list", lambda: store.push("a", [])),
        (OptionError, "got an empty list", lambda: store.pull(["a"], [[]])),
        (DTypeError, "key 'a' needs a Tensor or array, got None", lambda: store.push("a", None)),
        (DTypeError, "key 'a' needs a Tensor or array, got module", lambda: store.push("a", np)),
        (DTypeError, "key 'a' needs a Tensor or array, got None", lambda: store.push(["a"], [[None, good]])),
        (DTypeError, "'a'", lambda: store.pushpull("a", [None, good], out, allow_none=True)),
        (DTypeError, "'a'", lambda: store.pushpull("a", [good, None], out, allow_none=True)),
        (DTypeError, "key 'a' needs a Tensor or array, got None", lambda: store.pull("a", None)),
        (
            DTypeError,
            "key 'a' needs a Tensor or array, got None",
            lambda: store.pushpull("a", None, allow_none=True),
        ),
        (DTypeError, "key 'a' needs a Tensor or array, got float", lambda: store.push("a", 1.0)),
        (DTypeError, "key 'a' is float32, got float64", lambda: store.push("a", np.ones((2, 3)))),
        (DTypeError, "key 'a' is float32, got float64", lambda: store.pull("a", np.ones((2, 3)))),
        (DTypeError, "'b'", lambda: store.init("b", None)),
        (DTypeError, "'b'", lambda: store.init("b", 1.0)),
        (DTypeError, "'b'", lambda: store.init("b", np.ones(3, np.int8))),
        (DTypeError, "'b'", lambda: store.init("b", np.ones(3, np.complex64))),
        (DTypeError, "'b'", lambda: store.init("b", np.ones(3, bool))),
        (DTypeError, "'b'", lambda: store.init("b", np.ones(3, ">f4"))),
        (DTypeError, "'b'", lambda: store.init("b", np.array(["text"]))),
        (ShapeError, "'b'", lambda: store.init("b", [good, np.ones(3, F32)])),
        (ShapeError, "key 'a' has shape (2, 3), got (3, 2)", lambda: store.push("a", np.ones((3, 2), F32))),
        (ShapeError, "key 'a' has shape (2, 3), got (6,)", lambda: store.pull("a", np.ones(6, F32))),
        (ShapeError, "'a'", lambda: store.push("a", [good, np.ones((3, 2), F32)])),
        (ShapeError, "key 'a': an array of shape (2, 3) is not contiguous", lambda: store.push("a", gap)),
        (ShapeError, "out of key 'a': an array of shape (2, 3) is not contig", lambda: store.pull("a", gap)),
        (ShapeError, "read-only", lambda: store.pull("a", read_only)),
        (ShapeError, "read-only", lambda: store.pushpull("a", good, [out, read_only])),
        (ShapeError, "not contiguous", lambda: store.init("b", gap)),
        (OptionError, "scale", lambda: store.push("a", good, scale=float("nan"))),
        (OptionError, "scale", lambda: store.push("a", good, scale="1")),
        (OptionError, "scale", lambda: store.push("a", good, scale=1e300)),
        (DTypeError, "key 'int' is int64", lambda: store.push("int", np.ones(4, np.int64), mean=True)),
        (DTypeError, "key 'int' is int64", lambda: store.push("int", np.ones(4, np.int64), scale=0.5)),
        (DTypeError, "key 'int' is int64", lambda: store.set_optimizer(opt.SGD(lr=1.0))),
        (OptionError, "expected an opt.Optimizer", lambda: store.set_optimizer("sgd")),
        (OptionError, "expected an opt.Optimizer", lambda: store.set_optimizer(opt.SGD)),
        (
            OptionError,
            "that DistOpt wraps",
            lambda: store.set_optimizer(opt.DistOpt(opt.SGD(), communicator=LocalCommunicator(World()))),
        ),
        (OptionError, "set_optimizer() comes first", lambda: store.set_learning_rate(0.1)),
        (OptionError, "a function cannot travel", lambda: store.set_updater(lambda *_: None)),
        (OptionError, "a function cannot travel", lambda: store._set_updater(lambda *_: None)),
        (OptionError, "comes before the first key", lambda: store.set_gradient_compression({"type": "2bit"})),
        (OptionError, "expected a dict", lambda: store.set_gradient_compression({"threshold": 1.0})),
        (OptionError, "type = '3bit'", lambda: store.set_gradient_compression({"type": "3bit"})),
        (
            OptionError,
            "must be > 0",
            lambda: store.set_gradient_compression({"type": "2bit", "threshold": 0}),
        ),
        (OptionError, "capability = 'sparse'", lambda: store.is_capable("sparse")),
    ]
    before = store.traffic.bytes_sent, store.traffic.bytes_heads
    complaints = []
    for kind, piece, call in bad:
        try:
            text = caught(call, kind)
        except Exception as error:
            text = f"not {kind.__name__}: {error!r}"
        if piece not in text or text.startswith("not "):
            complaints.append((piece, text))
    assert not complaints, complaints
    assert (store.traffic.bytes_sent, store.traffic.bytes_heads) == before
    store.pull("a", out)
    assert (out == 1).all()
    store.init("new", good)  # no call has made it
    store.pushpull("a", Tensor(data=good), out)  # and goes on
    assert (out == rig.num_workers).all()
    store.push("a", read_only)  # is only read
    store.pull("a", out)
    assert (out == 0).all()


@fact()
def with_an_optimizer_integers_are_refused(rig):
    store = rig.store()
    store.set_optimizer(opt.SGD(lr=1.0))
    text = caught(lambda: store.init(["a", "b"], [np.ones(2, F32), np.ones(2, np.int32)]), DTypeError)
    assert "key 'b' is int32" in text
    store.init("a", np.ones(2, F32))
    assert "set_learning_rate" in caught(lambda: store.set_learning_rate(-1), OptionError)
    assert "set_learning_rate" in caught(lambda: store.set_learning_rate(float("nan")), OptionError)
    out = np.zeros(2, F32)
    store.pushpull("a", np.ones(2, F32), out, mean=True)
    assert (out == 0).all()


@fact()
def a_learning_rate_that_float32_cannot_hold_is_refused_and_later_keys_are_made(rig):
    store = rig.store()
    store.set_optimizer(opt.SGD(lr=0.5))
    for key in "abc":
        for rate in (np.inf, 1e300):  # before there is a key too
            text = caught(lambda rate=rate: store.set_learning_rate(rate), OptionError)
            assert "set_learning_rate" in text and store.learning_rate is None, text
        store.init(key, np.full(3, 8, F32))
    outs = [np.zeros(3, F32) for _ in "abc"]
    store.pushpull(list("abc"), [np.full(3, 2 * (rig.rank + 1), F32)] * 3, outs)
    assert (np.array(outs) == 8 - 0.5 * rig.num_workers * (rig.num_workers + 1)).all(), outs


class Undescribed(opt.Optimizer):
    def __init__(self, function):
        super().__init__(0.1)
        self.function = function

    def apply(self, name, value, grad):
        self.function(value, grad)


@fact()
def an_optimizer_that_cannot_be_described_is_refused(rig):
    store = rig.store()
    store.init("a", np.ones(2, F32))
    assert "Undescribed" in caught(lambda: store.set_optimizer(Undescribed(print)), OptionError)
    store.set_optimizer(Rate(0.0))


# ---- workers that disagree ---------------------------------------------------------------------------


def disagree(store, call, piece, last):
    """Have the last worker's call differ: a CommError on all that names it."""
    text = caught(call, CommError)
    assert piece in text and "on worker 0 but" in text and f"on worker {last};" in text, text
    assert f"{store.type}: worker {store.rank}: " in text, text


@fact(several)
def workers_that_disagree_are_named_on_all_with_the_key(rig):
    store, last = rig.store(), rig.num_workers - 1
    odd = rig.rank == last
    ones = np.ones(3, F32)
    store.init("before", ones)
    disagree(
        store, lambda: store.init("b" if odd else "a", ones), "the workers differ in init: key 'a' is", last
    )
    disagree(store, lambda: store.init("a", np.ones(4 if odd else 3, F32)), "key 'a' is float32[3]", last)
    disagree(store, lambda: store.init("a", ones.astype(np.float16) if odd else ones), "but float16[3]", last)
    keys = ["a", "b"]
    disagree(store, lambda: store.init(keys[::-1] if odd else keys, [ones, ones]), "init: key 'a'", last)
    disagree(store, lambda: store.init(keys if odd else keys[:1], [ones] * (1 + odd)), "init: key 'b'", last)
    out = np.zeros(3, F32)
    disagree(store, lambda: store.set_optimizer(opt.SGD(lr=0.2 if odd else 0.1)), "lr is", last)
    disagree(
        store, lambda: store.set_optimizer(opt.Adam(lr=0.1) if odd else opt.SGD(lr=0.1)), "class is", last
    )
    disagree(store, lambda: store.set_optimizer(opt.SGD(lr=0.1, momentum=0.9 * odd)), "momentum is", last)
    store.set_optimizer(opt.SGD(lr=0.5))
    disagree(store, lambda: store.set_learning_rate(0.1 * rig.rank), "the learning rate is 0.0", 1)
    disagree(
        store, lambda: store.agree("step", {"batch size": 8 + odd}), "differ in step: batch size is 8", last
    )
    disagree(store, lambda: store.agree("step", {} if odd else {"x": None}), "x is None", last)
    store.pushpull("before", ones, out, mean=True)  # nothing has changed
    assert (out == 0.5).all()
    store.init(["a", "b"], [ones, ones])


@fact(several)
def other_options_of_compression_are_named(rig):
    store = rig.store()
    odd = rig.rank == rig.num_workers - 1
    for one, other in [
        ({"type": "2bit"}, {"type": "1bit"}),
        ({"type": "2bit"}, {"type": "2bit", "threshold": 0.25}),
    ]:
        disagree(
            store,
            lambda one=one, other=other: store.set_gradient_compression(other if odd else one),
            "differ in set_gradient_compression",
            rig.num_workers - 1,
        )


@fact(with_servers)
def other_arguments_of_create_are_named(rig):
    odd = rig.rank == rig.num_workers - 1
    for name, options, piece in [
        ("dist_async", {"staleness": 3 if odd else None}, "create: staleness is None"),
        ("dist_async", {"staleness": 3 if odd else 0}, "create: staleness is 0"),
        ("dist_sync", {"big_array": 10 if odd else 20}, "create: big_array is 20"),
        ("dist_sync" if odd else "dist_async", {}, "create: is_async is True"),
    ]:
        text = caught(lambda name=name, options=options: rig.store(name, **options), CommError)
        assert piece in text and f"on worker {rig.num_workers - 1};" in text, text
        rig.leave()


@fact(several)
def another_call_is_an_error_on_all(rig):
    store = rig.store()
    store.init("a", np.ones(2, F32))
    odd = rig.rank == 1
    text = caught(lambda: store.barrier() if odd else store.set_optimizer(Rate(1.0)))
    assert "kvstore.barrier" in text and "kvstore.set_optimizer" in text and "rank 1" in text, text
    rig.leave(text)


@fact(several)
def other_options_of_a_push_are_named_with_the_key(rig):
    for option in ("mean", "allow_none"):
        store = rig.store()
        store.init(["a", "b"], [np.ones(2, F32)] * 2)
        text = caught(
            lambda store=store, option=option: store.pushpull("b", np.ones(2, F32), **{option: rig.rank == 1})
        )
        assert "'b'" in text and "1" in text, text
        differ = f"{option} is False on worker 0 but True on worker 1"
        if rig.num_servers:
            assert f"the workers differ in push of 'b': {differ}" in text, text
        else:
            assert f"{option}=True" in text, text
        rig.leave(text)
        if rig.num_servers:
            errors = rig.server_errors()
            assert any(differ in error for error in errors), errors


@fact(lambda launch: several(launch) and not launch.servers)
def another_key_is_named_where_every_worker_keeps_all(rig):
    for is_compressed in (False, True):
        for keys, others in (("a", "b"), ("abcd", "abce"), ("abcde", "abced")):
            store = rig.store()
            if is_compressed:
                store.set_gradient_compression({"type": "2bit"})
            store.init(list("abcdef"), [np.ones(2, F32)] * 6)
            mine = list(others if rig.rank == 1 else keys)
            text = caught(lambda store=store, mine=mine: store.push(mine, [np.ones(2, F32)] * len(mine)))
            for each in (keys, others):
                assert f"kvstore.push({', '.join(map(repr, each))})" in text, text
            assert "rank 1" in text, text
            rig.leave(text)


@fact(with_servers)
def a_worker_that_leaves_early_is_named_with_key_and_counts(rig):
    store = rig.store()
    store.init(["a", "b"], [np.ones(2, F32), np.ones(100_000, F32)])
    mine = [np.ones(2, F32), np.ones(100_000, F32)]
    for _ in range(3):
        store.pushpull(["a", "b"], mine)
    if rig.rank == 1:
        close_or_leave(rig, "worker 1 has left after 3 pushes of 'b'")
    else:
        text = caught(lambda: store.pushpull(["b"], mine[1:]))
        assert "pushpull of 'b'" in text, text
        assert "worker 1 has left after 3 pushes of 'b', but worker " in text, text
        assert "has pushed it 4 times; all workers must push a key equally often" in text, text
        rig.leave(text)
    errors = rig.server_errors()
    assert any("worker 1 has left after 3 pushes of 'b'" in error for error in errors), errors


@fact(with_servers)
def a_push_too_many_is_an_error_of_close(rig):
    """Also where no pull waits for it."""
    store = rig.store()
    store.init("a", np.ones(2, F32))
    for _ in range(3 + (rig.rank == 0)):
        store.push("a", np.ones(2, F32))
    close_or_leave(rig, "has left after 3 pushes of 'a'")
    errors = rig.server_errors()
    assert any("has left after 3 pushes of 'a', but worker 0 has pushed it 4 times" in e for e in errors), (
        errors
    )


def close_or_leave(rig, piece):
    """Close a store, whose server may have found by then what ``piece`` says."""
    try:
        rig.close()
    except CommError as error:
        assert piece in str(error), error
        rig.leave(str(error))


@fact(with_servers)
def who_waits_too_long_hears_for_whom(rig):
    store = rig.store()
    store.init(["a", "b"], [np.ones(2, F32), np.ones(100_000, F32)])
    out = [np.zeros(2, F32), np.zeros(100_000, F32)]
    mine = [np.ones(2, F32), np.ones(100_000, F32)]
    store.pushpull(["a", "b"], mine, out)
    last = rig.num_workers - 1
    if rig.rank != last:
        work = store.pushpull(["b", "a"], mine[::-1], out[::-1], wait=False)
    store.barrier()
    if rig.rank == 0:
        text = caught(lambda: work.wait(0.01))
        assert text.startswith(
            "dist_sync: pushpull of 'b', 'a': worker 0: waited 0.01 s for a message from"
        ), text
        assert f"; server 0 waits for pushes of 'b' by worker {last} (1 so far)" in text, text
    store.barrier()
    if rig.rank == last:
        store.push("b", mine[1])
        store.push("a", mine[0])
    else:
        work.wait()  # is of use still
        assert all((each == rig.num_workers).all() for each in out)


@fact(several)
def values_that_print_alike_are_told_apart(rig):
    text = caught(lambda: rig.store().agree("x", {"y": "1" if rig.rank == 1 else 1}))
    assert "y is 1 on worker 0 but '1' on worker 1" in text, text


@fact(lambda launch: launch.servers > 0 and launch.workers == 2)
def a_work_that_is_late_is_done_and_raises(rig):
    store = rig.store()
    store.init("a", np.ones(2, F32))
    store.barrier()
    if rig.rank == 0:
        store._messenger.timeout_s = 0.2
        work = store.pushpull("a", np.ones(2, F32), wait=False)
        deadline = time.monotonic() + LIMIT_S
        while not work.done():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert "waits for pushes of 'a' by worker 1" in caught(work.wait)
        assert "waits for pushes of 'a' by worker 1" in caught(store.barrier)
    else:
        caught(store.barrier)
    rig.leave("the time-out has passed")


@fact(lambda launch: launch.servers == 2)
def a_push_with_too_many_names_sends_nothing(rig):
    store = rig.store()
    keys, sizes = ["short", *(letter * 300_000 for letter in "abcd")], [1000, 2, 2, 2, 2]
    for key, size in zip(keys, sizes, strict=True):  # the long ones on the second server
        store.init(key, np.zeros(size, F32))
    rounds = [each["rounds"] for each in store.server_stats()]
    caught(lambda: store.push(keys, [np.ones(size, F32) for size in sizes]), OptionError)
    store.barrier()
    assert [each["rounds"] for each in store.server_stats()] == rounds
    store.push("short", np.ones(1000, F32))


@fact(with_servers)
def a_stale_worker_hears_for_whom_it_waits(rig):
    store = rig.store("dist_async", staleness=1)
    store.init("a", np.ones(2, F32))
    store.set_optimizer(Rate(1.0))
    if rig.rank == 0:
        works = [store.pushpull("a", np.ones(2, F32), wait=False) for _ in range(2)]
        text = caught(lambda: works[1].wait(0.01))
        assert "server 0 waits for pushes of 'a' by worker 1 (0 so far)" in text, text
        assert ("worker 2 (0 so far)" in text) == (rig.num_workers == 3), text
    store.barrier()
    if rig.rank:
        store.push("a", np.ones(2, F32))


@fact(with_servers)
def a_closed_store_is_of_no_use(rig):
    store = rig.store()
    store.init("a", np.ones(2, F32))
    store.close()
    store.close()
    assert "is closed" in caught(lambda: store.push("a", np.ones(2, F32)))
    assert "is closed" in caught(store.barrier)


def process(*arguments):
    return run_process(*arguments, facts=FACTS)


@functools.cache
def outcomes(launch):
    return run_facts(process, launch, FACTS)


@pytest.mark.parametrize(("launch", "name"), FACTS.cases(LAUNCHES))
def test_that(launch, name):
    assert_holds(outcomes(launch), name)
