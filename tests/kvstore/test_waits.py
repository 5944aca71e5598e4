# SPDX-License-Identifier: Apache-2.0
"""Workers that wait for each other: found at once, and never where one is only slow."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path

import pytest

from singa_lite.kvstore.waits import Waits
from tests.comm.processes import at_once, launch_command, run_command, write_script

SCRIPT = """
import os, subprocess, sys, time
import numpy as np
from singa_lite import kvstore, opt

store = kvstore.create("dist_sync")
is_odd, values = store.rank == 1, np.zeros(3, np.float32)
store.init(["a", "b", "c"], [values] * 3)
store.set_optimizer(opt.SGD(lr=1.0))
ones = np.ones(3, np.float32)
kind = sys.argv[1]
if kind == "other keys":
    store.pushpull("b" if is_odd else "a", ones, values)
if kind == "a call of one":
    if is_odd:
        store.set_learning_rate(0.5)
    store.pushpull("a", ones, values)
if kind == "a barrier of one":
    if is_odd:
        store.barrier()
    store.pushpull("a", ones, values)
if kind == "polled":  # 0 waits for b, of another server, then computes for longer than 1 waits for c
    pull_a = None if is_odd else store.pushpull("a", ones, values, wait=False)
    time.sleep(1.5 * is_odd)
    store.pushpull("b", ones, values)
    time.sleep(1.5 * (not is_odd))
    store.pushpull("c", ones, values)
    if is_odd:
        store.pushpull("a", ones, values)
    while pull_a and not pull_a.done():
        time.sleep(0.01)
    sys.stdout.write(f"ended with {values[0]}\\n")
if kind == "stopped in a barrier":  # which 0 has left long before 1 goes on
    if is_odd:
        pid = os.getpid()
        subprocess.Popen(["sh", "-c", f"sleep 0.3; kill -STOP {pid}; sleep 3.5; kill -CONT {pid}"])
    else:
        time.sleep(1.0)
    store.barrier()
    store.pushpull("a", ones, values)
    sys.stdout.write(f"ended with {values[0]}\\n")
if kind == "slow ones":  # beyond the second after which a wait is looked at
    store.set_learning_rate(0.5)
    time.sleep(1.5 * is_odd)
    store.pushpull("a", ones, values)
    time.sleep(1.5 * (not is_odd))
    store.barrier()
    store.pushpull("a", ones, values)
    sys.stdout.write(f"ended with {values[0]}\\n")
"""
ERRORS = {
    "other keys": "server 0: worker 0 can never go on: it waits for pushes of 'a' by worker 1 (0 so far), and worker 1 "
    "waits too",
    "a call of one": "waits for pushes of 'a' by worker 1 (0 so far), and worker 1 is in set_learning_rate",
    "a barrier of one": "waits for pushes of 'a' by worker 1 (0 so far), and worker 1 is in barrier",
}


@functools.cache
def results(folder: Path) -> dict[str, subprocess.CompletedProcess[str]]:
    """One job for each kind, all at the same time: they mostly wait."""
    script = write_script(folder, SCRIPT)
    kinds = [*ERRORS, "slow ones", "polled", "stopped in a barrier"]
    calls = [
        functools.partial(
            run_command,
            launch_command(
                script, 2, kind, options=["-s", "2" if kind == "polled" else "1"], is_patient=True
            ),
        )
        for kind in kinds
    ]
    return dict(zip(kinds, at_once(calls), strict=True))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("waits")


@pytest.mark.skipif(sys.platform != "linux", reason="several processes need Linux")
@pytest.mark.parametrize("kind", ERRORS)
def test_workers_that_wait_for_each_other_are_named_at_once(kind: str, folder: Path) -> None:
    result = results(folder)[kind]
    assert result.returncode != 0
    for name in ("[w0] ", "[w1] ", "[s0] "):
        lines = [
            line
            for line in result.stderr.splitlines()
            if line.startswith(f"{name}singa_lite.errors.CommError")
        ]
        assert len(lines) == 1 and ERRORS[kind] in lines[0], result.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="several processes need Linux")
def test_a_slow_worker_is_waited_for(folder: Path) -> None:
    result = results(folder)["slow ones"]
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("ended with -2.0") == 2  # two rounds of 0.5 * 2


@pytest.mark.skipif(sys.platform != "linux", reason="several processes need Linux")
def test_a_worker_that_was_stopped_in_a_call_that_others_have_ended_is_waited_for(folder: Path) -> None:
    result = results(folder)["stopped in a barrier"]
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("ended with -2.0") == 2


@pytest.mark.skipif(sys.platform != "linux", reason="several processes need Linux")
def test_a_worker_that_computes_while_a_pull_is_late_does_not_wait(folder: Path) -> None:
    result = results(folder)["polled"]
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("ended with -2.0") == 2


def waits(num_workers: int, pulling: set[int] = frozenset(), **calls: str) -> Waits:  # type: ignore[assignment]
    found = Waits(num_workers)
    found.pulling.update(dict.fromkeys(pulling, 7))
    for name, call in calls.items():
        found.begin_call(int(name[1:]), call)
    return found


def test_only_a_circle_is_endless() -> None:
    assert waits(3, {0}).endless({0: {1, 2}}, set()) == []  # 1 and 2 compute
    assert waits(3, {0, 1}).endless({0: {1}, 1: {2}}, set()) == []  # 2 computes: then 1, then 0 go on
    assert waits(3, {0, 1}).endless({0: {1}, 1: {0}}, set()) == [0, 1]
    assert waits(3, {0, 1, 2}).endless({0: {1}, 1: {2}, 2: {1}}, set()) == [0, 1, 2]  # 0 waits for the circle
    assert waits(3, {0}).endless({}, set()) == []  # it waits for another server
    assert waits(3, set()).endless({0: {1}, 1: {0}}, set()) == []  # none has waited for long


def test_a_call_of_all_waits_for_all_that_have_not_left() -> None:
    assert waits(2, {0}, w1="barrier").endless({0: {1}}, set()) == [0]
    assert waits(3, {0}, w1="barrier").endless({0: {2}}, set()) == []  # 2 pushes, then 0 comes to the barrier
    assert waits(3, {0}, w1="barrier").endless({0: {1, 2}}, set()) == [0]
    assert waits(3, set(), w0="init", w1="init").endless({}, {2}) == []
    assert waits(3, {0}, w1="barrier").endless({0: {1}}, {2}) == [0]


def test_a_call_that_another_worker_has_ended_does_not_wait() -> None:
    found = waits(3, {0}, w0="barrier", w1="barrier", w2="barrier")
    found.end_call(0)
    found.forget(0)
    found.pulling[0] = 7
    assert found.calls == {} and found.endless({0: {1, 2}}, set()) == []
    found.begin_call(1, "set_learning_rate")  # the next one, which 0 does not make
    assert found.calls == {1: "set_learning_rate"} and found.endless({0: {1}}, set()) == [0]
