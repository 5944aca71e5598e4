# SPDX-License-Identifier: Apache-2.0
"""Stores whose servers update by each push as it comes: sums, staleness, workers that are late, stopped or gone."""

from __future__ import annotations

import functools
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from singa_lite import opt
from singa_lite.errors import OptionError
from singa_lite.kvstore.dist import BIG_ARRAY
from tests.comm.processes import wait_until
from tests.kvstore.rig import Facts, Launch, Rate, assert_holds, caught, run_facts, run_process

LAUNCHES = [
    *(Launch("shm", *job) for job in ((1, 2), (2, 1), (3, 2))),
    Launch("mpi", 2, 1),
]
FACTS = Facts()
F32 = np.float32
fact = FACTS.fact
T = 25  # rounds


def several(launch):
    return launch.workers > 1


def two(launch):
    return launch.workers == 2


@fact()
def every_push_is_added_once_in_any_order(rig):
    """T pushes of r + 1 by every worker r, rate 2: 1 + T W (W + 1), exactly."""
    store, keys = rig.store("dist_async"), [3, 9]
    store.init(keys, [np.ones((2, 3), F32), np.ones(BIG_ARRAY + 3, F32)])
    store.set_optimizer(Rate(2.0))
    mine = [np.full((2, 3), rig.rank + 1, F32), np.full(BIG_ARRAY + 3, rig.rank + 1, F32)]
    outs = [np.zeros((2, 3), F32), np.zeros(BIG_ARRAY + 3, F32)]
    for i in range(1, T + 1):
        store.pushpull(keys, mine, outs)
        least = 1 + 2 * i * (rig.rank + 1)
        assert all((out >= least).all() for out in outs), (i, outs[0])  # at least its own
    store.barrier()
    store.pull(keys, outs)
    assert all((out == 1 + T * rig.num_workers * (rig.num_workers + 1)).all() for out in outs), outs[0]
    assert sum(each["rounds"] for each in store.server_stats()) == T * rig.num_workers * (1 + rig.num_servers)


@fact()
def without_an_optimizer_a_push_is_refused(rig):
    store = rig.store("dist_async")
    store.init("a", np.ones(2, F32))
    sent = store.traffic.bytes_sent
    for call in (store.push, store.pushpull):
        assert "set_optimizer() comes first" in caught(
            functools.partial(call, "a", np.ones(2, F32)), OptionError
        )
    assert store.traffic.bytes_sent == sent
    out = np.zeros(2, F32)
    store.pull("a", out)
    assert (out == 1).all()


@fact()
def a_mean_divides_by_one_as_each_push_is_a_round(rig):
    """There is no sum over workers whose mean it could be."""
    store = rig.store("dist_async")
    store.init("a", np.zeros(2, F32))
    store.set_optimizer(opt.SGD(lr=1.0))
    store.push("a", np.ones(2, F32), mean=True, scale=0.5)
    store.barrier()
    out = np.zeros(2, F32)
    store.pull("a", out)
    assert (out == -0.5 * rig.num_workers).all()


@fact(two)
def three_pushes_ahead_are_answered_and_the_fourth_waits(rig):
    ahead(rig, 3)


@fact(two)
def with_staleness_0_no_worker_gets_ahead(rig):
    ahead(rig, 0)


def ahead(rig, staleness):
    store = rig.store("dist_async", staleness=staleness)
    store.init("a", np.zeros(2, F32))
    store.set_optimizer(Rate(1.0))
    if rig.rank == 1:
        store.barrier()  # held
        store.push("a", np.full(2, 100, F32))
        store.barrier()
        store.barrier()
        return  # and closes
    outs = [np.zeros(2, F32) for _ in range(staleness + 2)]
    works = [store.pushpull("a", np.ones(2, F32), out, wait=False) for out in outs[:-1]]
    for i in range(staleness):
        works[i].wait()
        assert (outs[i] == i + 1).all()
    store.server_stats()  # the servers have handled all that came before this
    assert not works[staleness].done()
    store.barrier()
    works[staleness].wait()
    assert (outs[staleness] == staleness + 101).all()
    store.barrier()
    another = store.pushpull("a", np.ones(2, F32), outs[-1], wait=False)
    store.server_stats()
    assert not another.done()  # until worker 1 has closed, which no longer counts then
    store.barrier()
    another.wait()
    assert (outs[-1] == staleness + 102).all()


@fact(two)
def without_a_bound_nobody_waits_for_another(rig):
    store = rig.store("dist_async")
    store.init("a", np.zeros(2, F32))
    store.set_optimizer(Rate(1.0))
    out = np.zeros(2, F32)
    if rig.rank == 0:
        for i in range(50):
            store.pushpull("a", np.ones(2, F32), out)
            assert (out == i + 1).all()
    store.barrier()


@fact(two)
def staleness_counts_each_key_by_itself(rig):
    store = rig.store("dist_async", staleness=1)
    store.init(["a", "b"], [np.zeros(2, F32)] * 2)
    store.set_optimizer(Rate(1.0))
    out = np.zeros(2, F32)
    if rig.rank == 0:
        store.pushpull("a", np.ones(2, F32), out)
        store.pushpull("b", np.ones(2, F32), out)
        late = store.pushpull("a", np.ones(2, F32), out, wait=False)
        other = np.zeros(2, F32)
        store.pull("b", other)  # one ahead
        assert (other == 1).all() and not late.done()
    store.barrier()
    if rig.rank == 1:
        store.push("a", np.ones(2, F32))
    else:
        late.wait()
        assert (out == 3).all()


@fact(lambda launch: several(launch) and launch.transport == "shm")
def a_stopped_worker_does_not_hold_the_others(rig):
    """Not even with an answer on its way that does not fit its ring."""
    store = rig.store("dist_async")
    store.init(["a", "large"], [np.zeros(2, F32), np.zeros(1 << 20, F32)])
    store.set_optimizer(Rate(1.0))
    pids = rig.values(os.getpid())
    out, big = np.zeros(2, F32), np.zeros(1 << 20, F32)
    if rig.rank == 1:
        work = store.pushpull("large", np.ones(1 << 20, F32), big, wait=False)
        for send in work.sends:
            send.wait()
        os.kill(os.getpid(), signal.SIGSTOP)
        work.wait()
        assert (big >= 1).all()
    else:
        try:
            wait_until(lambda: " T " in Path(f"/proc/{pids[1]}/stat").read_text(), "worker 1 to stop")
            for _ in range(20):
                store.pushpull("a", np.ones(2, F32), out)
            store.pushpull("large", np.ones(1 << 20, F32), big)
            assert (out >= 20).all() and (big >= 2).all()
        finally:
            os.kill(pids[1], signal.SIGCONT)
    store.barrier()
    store.pull(["a", "large"], [out, big])
    others = rig.num_workers - 1
    assert (out == 20 * others).all() and (big == 1 + others).all()


@fact(several)
def workers_may_push_as_often_as_they_like_and_leave(rig):
    store = rig.store("dist_async", staleness=1000)
    store.init(["a", "large"], [np.zeros(2, F32), np.zeros(1 << 20, F32)])
    store.set_optimizer(Rate(1.0))
    if rig.rank:
        for _ in range(4):
            store.push("large", np.ones(1 << 20, F32))  # keeps the server busy
    for _ in range(rig.rank + 1):
        store.push("a", np.ones(2, F32))
    store.barrier()  # behind all of these
    if rig.rank == 0:
        out = np.zeros(2, F32)
        store.pull("a", out)
        assert (out == rig.num_workers * (rig.num_workers + 1) / 2).all()


@fact(two)
def an_answer_on_its_way_is_not_changed_by_a_later_push(rig):
    store, size = rig.store("dist_async"), 1 << 20
    store.init("a", np.zeros(size, F32))
    store.set_optimizer(Rate(1.0))
    out = np.zeros(size, F32)
    if rig.rank == 0:
        work = store.pushpull("a", np.ones(size, F32), out, wait=False)
        for send in work.sends:
            send.wait()
    rig.values("worker 0 has sent, and takes nothing")
    if rig.rank == 1:
        store.push("a", np.full(size, 10, F32))
        store.server_stats()
    rig.values("worker 1's push was applied")
    if rig.rank == 0:
        work.wait()
        assert (out == 1).all(), (out.min(), out.max())
    store.pull("a", out)
    assert (out == 11).all()


@fact(several)
def a_new_learning_rate_reaches_all_servers(rig):
    store = rig.store("dist_async")
    store.init(["a", "b"], [np.zeros(BIG_ARRAY, F32), np.zeros(2, F32)])
    store.set_optimizer(opt.SGD(lr=1.0))
    ones, outs = [np.ones(BIG_ARRAY, F32), np.ones(2, F32)], [np.zeros(BIG_ARRAY, F32), np.zeros(2, F32)]
    store.push(["a", "b"], ones)
    store.set_learning_rate(0)  # behind all that was pushed before
    store.pushpull(["a", "b"], ones, outs)
    assert all((out == -rig.num_workers).all() for out in outs)


def process(*arguments):
    return run_process(*arguments, facts=FACTS)


@functools.cache
def outcomes(launch):
    return run_facts(process, launch, FACTS)


@pytest.mark.parametrize(("launch", "name"), FACTS.cases(LAUNCHES))
def test_that(launch, name):
    assert_holds(outcomes(launch), name)
