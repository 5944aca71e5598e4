# SPDX-License-Identifier: Apache-2.0
"""The NCCL communicator on 1 to 4 ranks without a GPU: its real code over stand-ins (gpu_standin.py)."""

from __future__ import annotations

import ctypes
import functools
import gc
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from singa_lite import autograd, opt, singa_wrap
from singa_lite.comm import nccl
from singa_lite.comm.base import Communicator, World
from singa_lite.comm.dispatch import DispatchCommunicator
from singa_lite.comm.flight_record import ENDED, Call
from singa_lite.comm.nccl import NcclCommunicator
from singa_lite.comm.rendezvous import process_communicator
from singa_lite.comm.wire import BFLOAT16, narrow, widen
from singa_lite.config import state
from singa_lite.device import Device, create_cpu_device
from singa_lite.errors import CommError, DTypeError, ShapeError
from singa_lite.tensor import Tensor
from tests.comm.gpu_standin import ThroughNccl, gpu_of_rank, host_of, on_gpu
from tests.comm.processes import wait_until
from tests.comm.test_contract import FACTS, REDUCE_OPS, data, everyone, folded, run_facts
from tests.devices import cuda_device_of_rank, standin_nccl
from tests.limits import LIMIT_S
from tests.ranks import RankDied, mpi_missing, run_ranks
from tests.slow_cases import slow_but_first

# where NCCL's own way differs from the contract, as NcclCommunicator says; checked below in its own way
OWN_WAY = {
    "max_and_min_hand_on_nan_from_any_rank",
    "half_precision_wire_rounds_both_ways_and_sums_in_float32",
    "bfloat16_wire_rounds_both_ways_and_sums_in_float32",
    "bfloat16_wire_keeps_the_range_of_float32_infinity_and_nan",
    "every_rank_gets_the_same_bits_of_bfloat16_nan",
    "times_of_what_has_not_ended_are_an_error",  # has none, and a group waits for its parent's collectives
}
pytestmark = pytest.mark.usefixtures("standin_libraries")
CONTRACT = [check.__name__ for check in FACTS if check.__name__ not in OWN_WAY]


def run(function, size, *args, **options):
    return run_ranks(function, size, *args, transport="none", timeout_s=LIMIT_S, **options)


def in_time(is_as_expected: Callable[[list[Any]], bool], *call: Any) -> list[Any]:
    """Like ``run``, a few times where a busy machine has made ranks miss the short time-out under test."""
    for _ in range(5):
        results = run(*call, return_exceptions=True)
        if is_as_expected(results):
            break
    return results


def make(world: World, timeout_s: float = 200, host_timeout_s: float = 200) -> NcclCommunicator:
    gpu_of_rank()
    return NcclCommunicator(host_of(world, host_timeout_s), 0, timeout_s=timeout_s)


def num_live() -> int:
    """NCCL communicators that were neither destroyed nor aborted."""
    return ctypes.CDLL(os.environ["SINGA_LITE_NCCL_LIB"]).standin_live()


def caught(call: Any) -> str:
    """The text of the CommError that ``call()`` raises, "" if it raises none."""
    try:
        call()
    except CommError as error:
        return str(error)
    return ""


def broken(c: NcclCommunicator, limit_s: float = LIMIT_S) -> str:
    """The error that the communicator gets, without a call from us."""
    deadline = time.monotonic() + limit_s
    while not (text := caught(c.check)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return text


# ---- the contract --------------------------------------------------------------------------------------


def facts(world: World) -> dict[str, str]:
    c = ThroughNccl(make(world))
    outcome = run_facts(c, skip=OWN_WAY)
    c.close()
    outcome["all are closed"] = "" if num_live() == 0 else f"{num_live()} communicators live"
    return outcome


@functools.cache
def outcomes(size: int) -> list[dict[str, str]]:
    return run(facts, size)


@pytest.mark.parametrize("size", [1, 2, 3, pytest.param(4, marks=pytest.mark.slow)])
class TestContract:
    @pytest.mark.parametrize("name", [*CONTRACT, "all are closed"])
    def test_that(self, size: int, name: str) -> None:
        texts = [outcome.get(name, "not reached") for outcome in outcomes(size)]
        assert not any(texts), "\n".join(f"-- rank {rank}: {text}" for rank, text in enumerate(texts) if text)


def sends_halves(world: World) -> bool:
    c = ThroughNccl(make(world))
    for op in REDUCE_OPS:
        array = data(c.rank, 4099, seed=3)
        work = c.all_reduce(array, op, wire_dtype="float16")
        work.wait()
        halves = [values.astype(np.float16) for values in everyone(c, 4099, seed=3)]
        if op == "mean":
            expected = folded(halves, "sum").astype(np.float32) / np.float32(c.size)
        else:
            expected = folded(halves, op).astype(np.float32)
        assert array.tobytes() == expected.tobytes() and work.bytes_payload == 2 * 4099, op
    c.close()
    return True


def test_blocking_calls_keep_the_contract_too(monkeypatch):
    monkeypatch.setenv("SINGA_LITE_NCCL_BLOCKING", "1")
    for outcome in run(facts, 2):
        assert not any(outcome.values()), outcome


@pytest.mark.parametrize("size", [1, 3])
def test_a_half_precision_mean_is_the_sum_of_halves_divided_in_float32(size):
    assert run(sends_halves, size) == [True] * size


def sends_bfloat16(world: World) -> bool:
    c = ThroughNccl(make(world))
    for op in ("sum", "mean"):
        array = data(c.rank, 4099, seed=3)
        work = c.all_reduce(array, op, wire_dtype="bfloat16")
        work.wait()
        total = sum(widen(narrow(values, BFLOAT16)) for values in everyone(c, 4099, seed=3))
        expected = widen(narrow(total, BFLOAT16)) / np.float32(c.size if op == "mean" else 1)
        assert array.tobytes() == expected.tobytes() and work.bytes_payload == 2 * 4099, op
    c.close()
    return True


@pytest.mark.parametrize("size", [1, 3])
def test_bfloat16_is_sent_as_bfloat16(size):
    assert run(sends_bfloat16, size) == [True] * size


# ---- order on the GPU ----------------------------------------------------------------------------------


def overlaps(world: World) -> tuple[list[float], bool]:
    """All-reduce what a slow kernel writes, then read it by a kernel.

    The slow kernel ends only when all has been given to the GPU: a call that waited for it would never return.
    """
    c, gpu, all_given = make(world), gpu_of_rank(), threading.Event()
    values, seen = np.zeros(1000, np.float32), np.zeros(1000, np.float32)
    gpu.stream.add(lambda: all_given.wait(LIMIT_S))
    gpu.stream.add(lambda: values.fill(c.rank + 1.0))
    work = c.all_reduce(on_gpu(values), "sum", name="late")
    was_done = work.done()
    work.wait()
    gpu.stream.add(lambda: np.copyto(seen, values))
    all_given.set()
    gpu.synchronize()
    c.close()
    return sorted(set(seen.tolist())), was_done


@pytest.mark.parametrize("slow_ms", ["0", "20"])
def test_a_collective_waits_for_its_input_and_a_reader_for_the_result(slow_ms, monkeypatch):
    monkeypatch.setenv("STANDIN_SLOW_MS", slow_ms)
    for values, was_done in run(overlaps, 3):
        assert values == [6.0] and not was_done


def drops_works(world: World) -> bool:
    """The arrays of works nobody keeps live until the collective has ended."""
    c, gpu, has_counted = make(world), gpu_of_rank(), threading.Event()
    gpu.stream.add(lambda: has_counted.wait(LIMIT_S))
    for _ in range(100):
        c.all_reduce(on_gpu(np.ones(50_000, np.float32)), "sum")
    kept = len(c._works)
    has_counted.set()
    last = on_gpu(np.ones(10, np.float32))
    c.all_reduce(last, "sum").wait()
    gpu.synchronize()
    c.check()
    c.close()
    return kept == 100 and last.get().tolist() == [c.size] * 10


class LateGraph:
    """A CUDA graph with a collective in it: NCCL cannot end while there is one."""

    def __init__(self) -> None:
        self.live_at_end: list[int] = []
        self.captured: Any = None

    def destroy(self) -> None:
        self.live_at_end.append(num_live())
        self.captured = None


def ends_graphs(world: World, way: str) -> list[int]:
    c, stream, graph = make(world), gpu_of_rank().stream, LateGraph()
    stream.begin_capture()
    work = c.all_reduce(on_gpu(np.ones(10, np.float32)), "sum")
    work.wait()
    graph.captured = stream.end_capture()
    c.follow_graph(graph, work)
    if way == "close":
        c.close()
    elif way == "abort":
        c.abort("for a test")
    else:
        c._at_exit()
    return graph.live_at_end


@pytest.mark.parametrize("way", ["close", "abort", "exit"])
def test_graphs_end_before_nccl_does(way):
    """NCCL's end polls until all graphs with its kernels are gone, so it must not come first."""
    assert run(ends_graphs, 1, way) == [[1]]


def drops_a_group(world: World) -> tuple[int, list[float], int]:
    """Rank 0 forgets a group that rank 1 still holds, as when its garbage collector comes first."""
    c = make(world)
    group = c.new_group([0, 1])
    assert group is not None
    group.all_reduce(on_gpu(np.ones(3)), "sum").wait()
    gpu_of_rank().synchronize()
    if world.rank == 0:
        del group
        gc.collect()
    dropped = num_live()
    array = on_gpu(np.ones(3))
    c.all_reduce(array, "sum").wait()
    gpu_of_rank().synchronize()
    c.host.barrier()
    assert c._at_exit.alive
    c.close()
    assert not c._at_exit.alive
    return dropped, array.get().tolist(), num_live()


def test_a_group_that_one_rank_has_dropped_ends_with_the_process():
    """NCCL's end waits for all ranks, so garbage collection must not be it."""
    assert run(drops_a_group, 2) == [(2, [2.0] * 3, 1)] * 2


def test_arrays_of_dropped_works_are_kept_alive():
    assert run(drops_works, 2) == [True, True]


def captures(world: World) -> tuple[bool, int, list[float]]:
    """What becomes part of a graph is not watched: the graph's owner does that."""
    c, gpu = make(world), gpu_of_rank()
    array = on_gpu(np.ones(10, np.float32))
    gpu.stream.begin_capture()
    *_, work = (c.all_reduce(array, "sum") for _ in range(3))
    kept, was_done = len(c._works), work.done()
    work.wait()
    time.sleep(0.05)  # several polls of the watching thread
    graph = gpu.stream.end_capture()
    before, after = c.follow_graph(LateGraph(), work)
    for _ in range(2):
        before()
        graph.launch(gpu.stream)
        after()
    gpu.synchronize()
    del graph
    c.check()
    c.close()
    return was_done, kept, array.get().tolist()


def test_a_captured_collective_is_not_watched():
    """The graph of three sums runs twice: 2 ranks, so 2**6."""
    assert run(captures, 2) == [(True, 3, [64.0] * 10)] * 2


# ---- who takes part ------------------------------------------------------------------------------------


def start_error(world: World, timeout_s: float = 200) -> tuple[str, int]:
    """The error of making a communicator, and how many of NCCL's were left."""
    text = caught(lambda: make(world, timeout_s).close())
    return text, num_live()


def test_info_asks_nccl_and_the_driver(monkeypatch):
    describe = NcclCommunicator.describe
    assert describe() == "works: NCCL 2.28.9, one GPU a rank"
    monkeypatch.setenv("SINGA_LITE_CUDA_LIB", "libnone.so.1")
    assert describe().startswith("no: CUDA's driver cannot be used: ") and "libnone.so.1" in describe()
    monkeypatch.setenv("SINGA_LITE_NCCL_LIB", "libnone.so.2")
    assert describe().startswith("no: NCCL cannot be used: ") and "libnone.so.2" in describe()


def shares_on_rank_0_alone(world: World) -> str:
    if world.rank == 0:
        os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    return text_of_start(world)


def test_ranks_share_a_gpu_only_if_all_are_set_to(monkeypatch):
    monkeypatch.setenv("STANDIN_UUID", "7")
    monkeypatch.setenv("STANDIN_VERSION", "23003")
    assert all("ranks 0 and 1 both use GPU 0" in text for text in run(shares_on_rank_0_alone, 2))


def test_two_ranks_on_one_gpu_are_an_error_on_both(monkeypatch):
    monkeypatch.setenv("STANDIN_UUID", "7")
    for text, live in run(start_error, 2):
        assert "ranks 0 and 1 both use GPU 0" in text and live == 0


@pytest.mark.parametrize(("version", "works"), [("22907", False), ("23003", True)])
def test_ranks_may_share_a_gpu_where_nccl_can(version, works, monkeypatch):
    monkeypatch.setenv("STANDIN_UUID", "7")
    monkeypatch.setenv("STANDIN_VERSION", version)
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    assert [text == "" for text, _ in run(start_error, 2)] == [works, works]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"STANDIN_VERSION": "20905"}, "2.14 or later is needed"),
        ({"SINGA_LITE_NCCL_LIB": "libnone.so.2"}, "libnone.so.2"),
        ({"SINGA_LITE_CUDA_LIB": "libnone.so.1"}, "libnone.so.1"),
    ],
)
def test_a_library_that_cannot_be_used_is_an_error_on_every_rank(changes, words, monkeypatch):
    for name, value in changes.items():
        monkeypatch.setenv(name, value)
    texts = run(text_of_start, 3)
    assert all("rank 0" in text and words in text for text in texts), texts


def text_of_start(world: World) -> str:
    return caught(lambda: make(world).close())


def test_a_missing_function_is_named(monkeypatch):
    monkeypatch.setenv("SINGA_LITE_NCCL_LIB", str(standin_nccl("-DSTANDIN_WITHOUT_ID")))
    assert all("has no function ncclGetUniqueId" in text for text in run(text_of_start, 2))


def another_version(world: World) -> str:
    os.environ["STANDIN_VERSION"] = str(22809 + world.rank)
    return text_of_start(world)


def test_unequal_versions_are_an_error_on_every_rank():
    assert all("rank 0 has version 22809, rank 1 22810" in text for text in run(another_version, 2))


def test_a_start_that_never_completes_is_an_error_in_time(monkeypatch):
    monkeypatch.setenv("STANDIN_FAULT", "init_hangs")
    results = run(start_error, 3, 3.0)
    for rank, (text, live) in enumerate(results):  # the last may notice that the first has given up and ended
        assert text.startswith(f"rank {rank}: NCCL's start: ") and live == 0
    assert any("waited 3 s in NCCL for the other ranks" in text for text, _ in results)


def test_a_start_that_fails_says_why(monkeypatch):
    monkeypatch.setenv("STANDIN_FAULT", "init_fails")
    monkeypatch.setenv("STANDIN_RANK", "1")
    (_, live_0), (text, live_1) = run(start_error, 2, 3.0)
    assert "NCCL failed: unhandled system error (stand-in)" in text and live_0 == live_1 == 0


# ---- failures of a collective --------------------------------------------------------------------------


def third_fails(world: World, timeout_s: float) -> tuple[str, str, int]:
    """What becomes of the third collective, what the next call says, and NCCL communicators left."""
    c, stream = make(world, timeout_s), gpu_of_rank().stream
    array = on_gpu(np.ones(1000, np.float32))
    text = ""
    for number in range(3):
        text = text or caught(lambda number=number: c.all_reduce(array, "mean", name=f"w{number}").wait())
    text = text or broken(c)
    stream.synchronize()  # it is free again
    after = caught(lambda: c.all_reduce(array, "sum"))
    c.close()
    return text, after, num_live()


LABEL = "rank {}: all_reduce #2 'w2' (float32[1000], mean): "


def test_an_error_of_the_network_is_noticed_while_nobody_calls(monkeypatch):
    monkeypatch.setenv("STANDIN_FAULT", "async_error")
    for rank, (text, after, live) in enumerate(run(third_fails, 3, 30.0)):
        assert text.startswith(LABEL.format(rank)) and "remote process exited" in text
        assert after == text and live == 0


def test_a_collective_that_does_not_end_is_an_error_in_time(monkeypatch):
    monkeypatch.setenv("STANDIN_FAULT", "op_hangs")
    monkeypatch.setenv("STANDIN_RANK", "1")
    results = in_time(lambda results: all("#2 'w2'" in str(found) for found in results), third_fails, 3, 1.0)
    for rank, (text, after, live) in enumerate(results):
        assert text.startswith(LABEL.format(rank)) and after == text and live == 0
    assert any("waited 1 s in NCCL for the other ranks" in text for text, _, _ in results)


def test_a_refused_collective_is_an_error_of_its_call(monkeypatch):
    monkeypatch.setenv("STANDIN_FAULT", "op_fails")
    for rank, (text, _, live) in enumerate(run(third_fails, 2, 30.0)):
        assert (
            f"rank {rank}: all_reduce #2 'w2'" in text and "invalid argument (stand-in)" in text and live == 0
        )


def test_a_rank_that_dies_is_noticed_at_once(monkeypatch):
    monkeypatch.setenv("STANDIN_FAULT", "dies")
    monkeypatch.setenv("STANDIN_RANK", "1")
    results = run(third_fails, 3, 300.0, return_exceptions=True)
    assert isinstance(results[1], RankDied)
    for rank in (0, 2):
        text, after, live = results[rank]
        assert text.startswith(f"rank {rank}: all_reduce #") and "rank 1 (process" in text and "died" in text
        assert after == text and live == 0


def test_an_abort_that_hangs_does_not_hold_up_the_rank(monkeypatch):
    monkeypatch.setenv("STANDIN_FAULT", "abort_hangs")
    assert in_time(["", ""].__eq__, leaves, 2, "abort") == [""] * 2


def test_an_end_that_hangs_does_not_hold_up_the_rank(monkeypatch):
    monkeypatch.setenv("STANDIN_FAULT", "end_hangs")
    monkeypatch.setenv("STANDIN_RANK", "1")
    assert in_time(["", ""].__eq__, leaves, 2, "close") == [""] * 2


def ends_late(world: World, way: str) -> int:
    """The communicators that live on where NCCL's end hangs and nobody waits for it any more."""
    c = make(world, 200)
    group = c.new_group([0, 1])
    assert group is not None
    group.all_reduce(on_gpu(np.ones(3)), "sum").wait()
    c.host.barrier()
    if way == "abort":
        c.abort("for a test")
    else:
        state.nccl_deadline = time.monotonic()
        c._at_exit()
    group._at_exit()
    return num_live()


@pytest.mark.parametrize("way", ["abort", "exit"])
def test_groups_end_at_once_where_the_time_to_leave_is_over(way, monkeypatch):
    monkeypatch.setenv("STANDIN_FAULT", "end_hangs")
    monkeypatch.setattr("singa_lite.comm.nccl.LEAVE_S", LIMIT_S)  # nobody waits for it
    assert run(ends_late, 2, way) == [0, 0]


def leaves(world: World, how: str) -> str:
    c = make(world, 1.0)
    c.all_reduce(on_gpu(np.ones(3)), "sum").wait()
    if how == "abort":
        c.abort("the loss is NaN")
    else:
        c.close()
    text = caught(lambda: c.all_reduce(on_gpu(np.ones(3)), "sum"))
    return "" if ("the loss is NaN" if how == "abort" else "is closed") in text else text


def long_queue(world: World) -> str:
    """A kernel that takes longer than the time-out is not the collective's fault."""
    c, stream, has_computed = make(world, 1.0), gpu_of_rank().stream, threading.Event()
    array = on_gpu(np.ones(10, np.float32))
    stream.add(lambda: has_computed.wait(LIMIT_S))
    c.all_reduce(array, "sum").wait()
    time.sleep(2)
    c.host.barrier()  # or one rank would wait for the other
    has_computed.set()
    stream.synchronize()
    text = caught(c.check)
    c.close()
    return text


def test_the_time_out_counts_from_when_the_input_is_ready():
    assert in_time(["", ""].__eq__, long_queue, 2) == ["", ""]


def killed_while_waiting(world: World) -> str:
    """Rank 1 is killed before it makes the call; rank 0 waits on the host for its stream."""
    c, gpu = make(world, 300.0), gpu_of_rank()
    array = on_gpu(np.ones(10, np.float32))
    c.all_reduce(array, "sum", name="grad").wait()
    gpu.synchronize()
    if c.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    c.all_reduce(array, "sum", name="grad").wait()
    return caught(gpu.synchronize)


def test_a_killed_peer_ends_a_host_synchronisation_with_its_error():
    text, died = run(killed_while_waiting, 2, return_exceptions=True)
    assert isinstance(died, RankDied) and "'grad'" in text and "rank 1 (process" in text and "died" in text


def third_of_a_dead_peer(world: World) -> str:
    """Rank 1 ends while rank 0's call waits in NCCL for a connection to it."""
    c, array = make(world, 300.0), on_gpu(np.ones(10, np.float32))
    for _ in range(2):
        c.all_reduce(array, "sum", name="grad").wait()
    gpu_of_rank().synchronize()
    if c.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return caught(lambda: c.all_reduce(array, "sum", name="grad"))


def test_a_peer_that_dies_while_nccl_makes_connections_is_noticed(monkeypatch):
    monkeypatch.setenv("STANDIN_FAULT", "give_hangs")
    text, died = run(third_of_a_dead_peer, 2, return_exceptions=True)
    assert isinstance(died, RankDied) and "rank 0: all_reduce #2 'grad'" in text and "rank 1 (process" in text


def interrupted(world: World) -> list[str]:
    """Ctrl-C while NCCL makes connections; the communicator is broken then, not half used."""
    c, array = make(world, 300.0), on_gpu(np.ones(10, np.float32))
    for _ in range(2):
        c.all_reduce(array, "sum").wait()
    seen = []

    def interrupt(_: int, frame: Any) -> None:
        seen.append((frame.f_code.co_name, frame.f_lasti))
        if seen[-1][0] == "_submit" and seen[-2:] == [seen[-1]] * 2:  # Python stays where it calls NCCL
            signal.setitimer(signal.ITIMER_REAL, 0)
            raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.2, 0.2)
    with pytest.raises(KeyboardInterrupt):
        c.all_reduce(array, "sum", name="grad")
    text = caught(c.check)
    c.close()
    return [text, str(num_live())]


def test_ctrl_c_is_noticed_while_nccl_makes_connections(monkeypatch):
    monkeypatch.setenv("STANDIN_FAULT", "give_hangs")
    for text, live in run(interrupted, 2):
        assert "'grad'" in text and "interrupted" in text and live == "0"


def forked(world: World) -> list[str]:
    c = make(world)
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        os.write(writer, caught(lambda: c.all_reduce(on_gpu(np.ones(3)), "sum")).encode())
        c._finalizer()
        os._exit(0)
    os.waitpid(pid, 0)
    text = os.read(reader, 1000).decode()
    array = on_gpu(np.ones(3))
    c.all_reduce(array, "sum").wait()
    gpu_of_rank().synchronize()
    c.close()
    return [text, str(array.get().tolist())]


def test_a_forked_child_cannot_use_its_parents():
    for text, values in run(forked, 2):
        assert "fork()" in text and values == "[2.0, 2.0, 2.0]"


# ---- which arrays go where -----------------------------------------------------------------------------


def dispatches(world: World) -> dict[str, Any]:
    gpu, host = gpu_of_rank(), host_of(world)
    c = DispatchCommunicator(host)
    mine, theirs = np.full(3, c.rank + 1.0), on_gpu(np.full(3, c.rank + 1.0))
    c.all_reduce(mine, "sum").wait()
    was_made = c._nccl is not None
    c.all_reduce([theirs, mine], "sum").wait()
    gpu.synchronize()
    group = c.new_group([0])
    if group is not None:
        group.all_reduce(on_gpu(np.ones(3)), "sum").wait()
    nccl = c._nccl
    errors = []
    for communicator, array in ((host, theirs), (nccl, mine), (nccl, [1.0])):
        with pytest.raises(DTypeError) as raised:
            communicator.all_reduce(array, "sum")
        errors.append(str(raised.value))
    gathered = c.all_gather_object(c.rank)
    c.close()
    return {"early": was_made, "sums": [mine.tolist(), theirs.get().tolist()], "errors": errors, "ranks": gathered,
            "live": num_live()}  # fmt: skip


def test_arrays_go_to_the_side_they_live_on():
    for result in run(dispatches, 3):
        assert not result["early"], "NCCL is started by the first CUDA array"
        assert (
            result["sums"] == [[18.0] * 3, [6.0] * 3] and result["ranks"] == [0, 1, 2] and result["live"] == 0
        )
        assert "lives on a GPU" in result["errors"][0]
        assert "host communicator" in result["errors"][1] and "CUDA array" in result["errors"][2]


def on_another_gpu(world: World) -> list[str]:
    c = make(world)
    foreign = np.ones(3).view(ForeignArray)
    texts = [caught(lambda: c.all_reduce(on_gpu(np.ones(3), device_id=1), "sum", name="w"))]
    os.environ["STANDIN_MEMORY_DEVICE"] = "1"  # of what the driver is asked for: arrays of other libraries
    texts.append(caught(lambda: c.all_reduce(foreign, "sum", name="w")))
    c.all_reduce(on_gpu(np.ones(3)), "sum").wait()
    os.environ["STANDIN_MEMORY_DEVICE"] = "0"
    c.all_reduce(foreign, "sum").wait()
    c.close()
    return texts


def test_memory_of_another_gpu_is_refused_and_the_communicator_lives():
    for texts in run(on_another_gpu, 2):
        assert len(texts) == 2 and all("lives on GPU 1" in text and "'w'" in text for text in texts)


def calls_in_other_contexts(world: World) -> list[tuple[float, int | None, int | None]]:
    """Sum in threads whose current context is none, and another GPU's; each with the context before and after."""
    c = make(world)
    cuda = ctypes.CDLL(os.environ["SINGA_LITE_CUDA_LIB"])
    current, results = ctypes.c_void_p(), []

    def call(context: int | None) -> None:
        gpu = gpu_of_rank()
        cuda.cuCtxSetCurrent(ctypes.c_void_p(context))
        array = on_gpu(np.ones(3))
        c.all_reduce(array, "sum").wait()
        cuda.cuCtxGetCurrent(ctypes.byref(current))
        gpu.synchronize()
        results.append((float(array.get()[0]), context, current.value))

    for context in (None, 0x1001):
        thread = threading.Thread(target=call, args=[context])
        thread.start()
        thread.join()
    c.close()
    return results


def test_a_call_needs_no_current_context_and_leaves_the_one_there_is():
    assert run(calls_in_other_contexts, 2) == [[(2.0, None, None), (2.0, 0x1001, 0x1001)]] * 2


def alone(world: World) -> tuple[list[float], tuple[int, ...]]:
    gpu_of_rank()
    c = DispatchCommunicator(host_of(world))
    array = on_gpu(np.array([1.0, 70000.0], np.float32))
    c.all_reduce(array, "mean", wire_dtype="float16").wait()
    return array.get().tolist(), c.all_gather(array).wait().shape


def test_a_world_of_one_needs_no_nccl(monkeypatch):
    monkeypatch.setenv("SINGA_LITE_NCCL_LIB", "libnone.so")
    assert run(alone, 1) == [([1.0, np.inf], (1, 2))]


class ForeignArray(np.ndarray):
    """Of a library that the communicator does not know."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {**self.__array_interface__, "version": 3, "stream": gpu_of_rank().stream.ptr}


def takes_foreign_arrays(world: World) -> tuple[list[float], str]:
    c = make(world)
    foreign = np.full(3, c.rank + 1.0).view(ForeignArray)
    c.all_reduce(foreign, "mean").wait()
    gpu_of_rank().synchronize()
    with pytest.raises(ShapeError) as raised:
        c.all_reduce(np.ones((3, 2)).view(ForeignArray).T, "sum")
    with pytest.raises(ShapeError):
        c.all_reduce(on_gpu(np.ones((3, 2)).T), "sum")
    with pytest.raises(DTypeError):
        c.all_reduce(on_gpu(np.ones(3, np.int32)), "mean")
    c.close()
    return foreign.tolist(), str(raised.value)


def test_arrays_of_another_library_are_sent_by_their_interface():
    for values, text in run(takes_foreign_arrays, 2):
        assert values == [1.5] * 3 and "is not contiguous" in text


def joins_by_rendezvous_id(world: World) -> tuple[list[float], list[float], str]:
    """SINGA's constructor for Python's multiprocessing, then arrays of both kinds."""
    holder = singa_wrap.NcclIdHolder()
    holder.rendezvous_id = world.rendezvous_id
    c = singa_wrap.Communicator(world.rank, world.size, holder, 1000)
    return sums_both_kinds(c)


def joins_by_launcher(world: World) -> tuple[list[float], list[float], str]:
    """SINGA's constructor for a started job; here `singa-lite run` is who started it."""
    names = {"RANK": world.rank, "WORLD_SIZE": world.size, "RENDEZVOUS_ID": world.rendezvous_id}
    os.environ.update({f"SINGA_LITE_{name}": str(value) for name, value in names.items()})
    return sums_both_kinds(singa_wrap.Communicator(1000))


def sums_both_kinds(c: singa_wrap.Communicator) -> tuple[list[float], list[float], str]:
    device = cuda_device_of_rank()
    theirs, mine = (
        Tensor(data=np.full(3, c.global_rank + 1.0), device=device),
        np.full(3, c.global_rank + 1.0),
    )
    c.synch(mine)
    c.fusedSynch([theirs.data], send=False)
    c.fusedSynch([theirs.data])
    values = device.backend.to_numpy(theirs.data).tolist()
    process_communicator().close()
    return mine.tolist(), values, f"{num_live()} live"


@pytest.mark.parametrize(
    "joins", [joins_by_rendezvous_id, joins_by_launcher], ids=lambda joins: joins.__name__
)
def test_both_constructors_of_singa_reach_nccl(joins):
    assert run(joins, 3) == [([6.0] * 3, [6.0] * 3, "0 live")] * 3


def joins_by_mpi(host: Communicator) -> dict[str, Any]:
    """MPI carries NCCL's id, what the ranks agree on, and numpy arrays; NCCL the rest, in groups as well."""
    gpu, c = gpu_of_rank(), DispatchCommunicator(host)
    theirs, mine = on_gpu(np.full(3, c.rank + 1.0)), np.full(3, c.rank + 1.0)
    c.all_reduce([theirs, mine], "mean").wait()
    group = c.new_group([2, 0])
    part = on_gpu(np.full(2, c.rank + 1.0))
    if group is not None:
        group.all_reduce(part, "sum").wait()
    gpu.synchronize()
    found = {
        "means": [theirs.get().tolist(), mine.tolist()],
        "part": part.get().tolist(),
    }
    for communicator in (group, c):
        if communicator is not None:
            communicator.close_gpu()
    return {**found, "live": num_live()}


@pytest.mark.skipif(bool(mpi_missing()), reason=f"no MPI: {mpi_missing()}")
def test_ranks_that_mpi_started_reach_nccl():
    results = run_ranks(joins_by_mpi, 3, transport="mpi", timeout_s=LIMIT_S)
    assert [found.pop("part") for found in results] == [[4.0] * 2, [2.0] * 2, [4.0] * 2]
    assert results == [{"means": [[2.0] * 3] * 2, "live": 0}] * 3


# ---- DistOpt -------------------------------------------------------------------------------------------

OPTIONS = [
    {"dist_option": "fp32"},
    {"dist_option": "fp16"},
    {"dist_option": "bf16"},
    {"dist_option": "int8", "ef": True},
    {"dist_option": "hierarchical:sparseTopK:0.3"},
    {"dist_option": "partialUpdate"},
    {"dist_option": "sparseTopK", "spars": 0.3},
    {"dist_option": "sparseThreshold", "spars": 0.02},
]


def train(
    communicator: Communicator, device: Device, options: dict[str, Any], waits: list[Any]
) -> tuple[Any, Any, int]:
    """(parameters, saved states, how many ``waits`` the last step added) of five steps."""
    rng = np.random.default_rng(3 + communicator.rank)  # rank 0's values must win
    shapes = {"w1": (6, 5), "b1": (5,), "w2": (5, 1)}
    params = {
        name: Tensor(data=0.5 * rng.standard_normal(shape), device=device, stores_grad=True, name=name)
        for name, shape in shapes.items()
    }
    autograd.training = True
    dist = opt.DistOpt(
        opt.SGD(lr=0.1, momentum=0.9), communicator=communicator, threshold=10, bucket_bytes=64
    )
    dist.prepare(params, {})
    for step in range(5):
        batch = np.random.default_rng([step, communicator.rank])
        x = Tensor(data=batch.standard_normal((4, 6)), device=device)
        y = Tensor(data=batch.standard_normal((4, 1)), device=device)
        hidden = autograd.tanh(autograd.add_bias(autograd.matmul(x, params["w1"]), params["b1"]))
        waits.clear()
        dist(autograd.mse_loss(autograd.matmul(hidden, params["w2"]), y), **options)
    num_waits = len(waits)
    values = {name: device.backend.to_numpy(param.data) for name, param in params.items()}
    return values, dist.get_states(), num_waits


def train_both_ways(world: World) -> list[tuple[Any, Any, int]]:
    """By each of OPTIONS, on the stand-in GPU over NCCL, and on the CPU over shared memory."""
    host, found = host_of(world), []
    device, waits = cuda_device_of_rank(), []
    c, synchronize = NcclCommunicator(host, 0), device.backend.synchronize
    device.backend.synchronize = lambda: (waits.append(None), synchronize())
    for options in OPTIONS:
        values, states, num_waits = train(c, device, options, waits)
        expected, expected_states, _ = train(host, create_cpu_device(), options, [])
        assert sorted(states) == sorted(expected_states)
        assert all(type(state) is np.ndarray for state in states.values())
        found.append((values, expected, num_waits))
    c.close()
    return found


@functools.cache
def trained(size: int) -> list[list[tuple[Any, Any, int]]]:
    return run(train_both_ways, size)


@slow_but_first("size", [3, 1, 2])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: options["dist_option"])
def test_every_dist_option_trains_as_on_the_cpu_and_only_the_count_waits(options, size, monkeypatch):
    monkeypatch.setenv("STANDIN_SLOW_MS", "1")
    results = [of_rank[OPTIONS.index(options)] for of_rank in trained(size)]
    num_groups = 3  # of the sparse schemes, by the threshold of 10 elements
    for values, expected, waits in results:
        for name in expected:
            tolerance = {"fp16": 1e-2, "bf16": 3e-2}.get(options["dist_option"], 1e-5)
            np.testing.assert_allclose(values[name], expected[name], rtol=tolerance, atol=tolerance / 10)
        assert waits <= (num_groups if options["dist_option"] == "sparseThreshold" else 0)
    if options["dist_option"] != "partialUpdate":
        assert len({str({name: v.tobytes() for name, v in values.items()}) for values, _, _ in results}) == 1


def singa_calls(world: World) -> dict[str, Any]:
    """SINGA's collectives on Tensors of the GPU leave the sum, ordered before the stream's next kernel."""
    device, c = cuda_device_of_rank(), NcclCommunicator(host_of(world), 0)
    dist = opt.DistOpt(communicator=c)
    plain, half, *fused = (Tensor(data=np.full(4, c.rank + 1.0), device=device) for _ in range(4))
    sparse, residual = (Tensor(data=np.array([0.1, -3.0, 2.0, 0.0]) * k, device=device) for k in (1, 0))
    dist.all_reduce(plain)
    dist.all_reduce_half(half)
    dist.fused_all_reduce(fused[:1], send=False)
    dist.fused_all_reduce(fused)
    dist.sparsification(sparse, residual, 1.0, topK=False)
    found = {
        name: device.backend.to_numpy(tensor.data).tolist()
        for name, tensor in {
            "plain": plain, "half": half, "fused": fused[1], "sparse": sparse, "residual": residual
        }.items()
    }  # fmt: skip
    c.close()
    return found


def test_singas_calls_leave_the_sum_of_gpu_tensors():
    for found in run(singa_calls, 3):
        assert found["plain"] == found["half"] == found["fused"] == [6.0] * 4
        assert found["sparse"] == [0.0, -9.0, 6.0, 0.0]
        np.testing.assert_allclose(found["residual"], [0.1, 0, 0, 0], rtol=1e-6)


# ---- the flight recorder -------------------------------------------------------------------------------


def recorded_calls(c: NcclCommunicator) -> Sequence[Call]:
    """What the recorder of this rank knows of its calls."""
    assert c.flight_recorder is not None
    [mine] = [rank for rank in c.flight_recorder.read().ranks if rank.rank == c.rank]
    return mine.calls


def count_barriers(world: World) -> list[int]:
    """How many collectives the host has made after each call."""
    nccl.MAX_COMPARED = 2
    c, found = make(world), []
    at_start = c.host.traffic.bytes_payload
    for name in ("a", "a", "b", "a", "b", "c", "c", "b", "a"):
        before = c.host._num_launched
        c.all_reduce(on_gpu(np.ones(4, np.float32)), "sum", name=name).wait()
        found.append(c.host._num_launched - before)
    assert c.host.traffic.bytes_payload == at_start  # a step's bytes are of its gradients alone
    c.close()
    return found


def test_a_call_is_compared_once_or_again_when_it_was_forgotten() -> None:
    assert run(count_barriers, 3) == [[1, 0, 1, 0, 0, 1, 0, 0, 1]] * 3


def new_to_rank_1(world: World, done: Path) -> str:
    """The error where rank 1 makes a call that is new, and the others repeat one; they live until ``done`` is there."""
    c = make(world, 1.0, 1.0)
    c.all_reduce(on_gpu(np.ones(4, np.float32)), "sum", name="a").wait()
    gpu_of_rank().synchronize()
    if c.rank == 1:
        text = caught(lambda: c.all_reduce(on_gpu(np.ones(4, np.float32)), "sum", name="b"))
        done.touch()
        return text
    c.all_reduce(on_gpu(np.ones(4, np.float32)), "sum", name="a").wait()
    text = broken(c)
    wait_until(done.exists, "the end of rank 1")
    return text


def test_a_call_that_is_new_to_one_rank_ends_in_the_time_out(tmp_path: Path) -> None:
    first, second, third = run(new_to_rank_1, 3, tmp_path / "done")
    assert "waited 1 s" in second and "before NCCL's all_reduce b: sum float32[4]" in second
    assert all("'a'" in text and "waited 1 s in NCCL" in text for text in (first, third))


def another_call(world: World) -> tuple[list[str], str]:
    """Rank 1 repeats another call than the others after three alike; what the recorder knows, and the error."""
    c = make(world, 2.0)
    for name in ("grad", "odd"):
        c.all_reduce(on_gpu(np.ones((5, 1), np.float32)), "mean", name=name, wire_dtype="float16").wait()
    c.all_reduce(on_gpu(np.ones(7, np.float32)), "sum", name="without rank 2").wait()
    gpu_of_rank().synchronize()
    deadline = time.monotonic() + LIMIT_S
    while (calls := recorded_calls(c))[-1].state != ENDED and time.monotonic() < deadline:
        time.sleep(0.005)
    c.all_reduce(
        on_gpu(np.ones(5, np.float32)), "mean", name="odd" if c.rank == 1 else "grad", wire_dtype="float16"
    )
    if c.rank != 2:
        c.all_reduce(on_gpu(np.ones(7, np.float32)), "sum", name="without rank 2")
    error = "" if c.rank == 2 else broken(c)
    c.host.barrier()  # rank 2 lives while the others look
    c.close()
    return [f"{x.kind} {x.op} {x.name} {x.dtype}{list(x.shape)} {x.state == ENDED}" for x in calls], error


def test_a_report_names_the_call_that_a_rank_has_not_given_to_its_gpu(tmp_path, monkeypatch):
    monkeypatch.setenv("SINGA_LITE_LOG_DIR", str(tmp_path))
    results = run(another_call, 3)
    for calls, _ in results:
        assert calls == [
            "all_reduce mean grad float32[5, 1] True",
            "all_reduce mean odd float32[5, 1] True",
            "all_reduce sum without rank 2 float32[7] True",
        ]
    assert all("waited 2 s in NCCL" in error for _, error in results[:2])
    [path] = tmp_path.iterdir()
    report = path.read_text()
    assert any(str(path) in error for _, error in results)
    assert report.count("What every rank was doing") == 1
    assert re.search(r"First call where ranks differ: #3 of the world, over NCCL", report)
    assert re.search(r"rank 1: all_reduce 'odd' mean float32\[5\] as float16 at .*test_nccl\.py", report)
    assert re.search(r"rank 0, 2: all_reduce 'grad' mean float32\[5\] as float16 at .*test_nccl\.py", report)
    # the report's rank aborted what it was in, which has not ended
    assert re.search(
        r"rank \d \(process \d+, running\): in #[34] of the world, over NCCL, .*, failed", report
    )
    assert not re.search(r"after #[34] of the world, over NCCL", report)


# ---- what does not concern NCCL ----------------------------------------------------------------------------


def behind_own_work(world: World) -> str:
    """The error of a graph that the stream reaches after longer than the time-out."""
    c, gpu = make(world, 0.5), gpu_of_rank()
    array = on_gpu(np.ones(10, np.float32))
    gpu.stream.begin_capture()
    work = c.all_reduce(array, "sum")
    work.wait()
    graph = gpu.stream.end_capture()
    before, after = c.follow_graph(LateGraph(), work)
    gpu.stream.add(lambda: time.sleep(1.5))
    before()
    graph.launch(gpu.stream)
    after()
    gpu.synchronize()
    error = caught(c.check)
    del graph
    c.close()
    return error


def test_a_time_out_of_a_graph_leaves_out_what_the_stream_does_before():
    assert run(behind_own_work, 2) == ["", ""]


def refused_calls(world: World) -> tuple[list[str], list[tuple[int, str, bool]], int, str]:
    """Errors of calls with memory of another GPU, then what the recorder knows, and a group's error."""
    c, gpu = make(world), gpu_of_rank()
    c.all_reduce(on_gpu(np.ones(3, np.float32)), "sum", name="first").wait()
    errors = [
        caught(lambda: c.all_reduce(on_gpu(np.ones(3, np.float32), device_id=1), "sum", name="in")),
        caught(
            lambda: c.all_reduce(
                on_gpu(np.ones(3, np.float32)),
                "sum",
                name="result",
                out=on_gpu(np.ones(3, np.float32), device_id=1),
            )
        ),
    ]
    c.all_reduce(on_gpu(np.ones(3, np.float32)), "sum", name="last").wait()
    gpu.synchronize()
    deadline = time.monotonic() + LIMIT_S
    while (calls := recorded_calls(c))[-1].state != ENDED and time.monotonic() < deadline:
        time.sleep(0.005)
    group = c.new_group([1, 2])
    of_group = ""
    if group is not None:
        of_group = caught(
            lambda: group.all_reduce(on_gpu(np.ones(3, np.float32), device_id=1), "sum", name="in")
        )
        group.close()
    c.close()
    return errors, [(call.number, call.name, call.state == ENDED) for call in calls], c.rank, of_group


def test_a_refused_call_is_neither_counted_nor_the_failure_of_the_communicator(tmp_path, monkeypatch):
    monkeypatch.setenv("SINGA_LITE_LOG_DIR", str(tmp_path))
    for (array, result), calls, rank, of_group in run(refused_calls, 3):
        assert "lives on GPU 1" in array and "out is in memory of GPU 1" in result
        assert calls == [(0, "first", True), (1, "last", True)]
        assert of_group.startswith(f"rank {rank}: ") == (rank > 0)  # its rank in the world
    assert not list(tmp_path.iterdir())  # no report was made
