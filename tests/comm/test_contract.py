# SPDX-License-Identifier: Apache-2.0
"""What every communicator must do, on 1 to 4 ranks with different data on each.

One launch per transport and size runs all facts one after the other (each a function of FACTS); every test
reports its own. The disagreements at the end break a communicator, so each has its own launch.
"""

from __future__ import annotations

import copy
import functools
import os
import pickle
import time
import traceback
import zlib
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import pytest

from singa_lite.comm import find_transports
from singa_lite.comm.base import DTYPES, MOVED_DTYPES, REDUCE_OPS, Communicator
from singa_lite.errors import CommError, DTypeError, OptionError, ShapeError
from tests.comm.bfloat16 import nearest_bfloat16
from tests.limits import LIMIT_S
from tests.ranks import mpi_missing, run_ranks

Array = np.ndarray[Any, Any]
WORLDS = [
    (word, size)
    for word, kind in find_transports().items()
    if kind.joins_worlds
    for size in (1, 2, 3, 4)
    if word != "local" or size == 1
]
SIZES = (0, 1, 7, 4099, 100_003)
PIECES = 300_001  # elements that shm sends in pieces, of 256 KB, in half precision too
LARGE = 1_100_000  # float32 that it sends in the background: more than 4 MB
FOLD = {"sum": np.add, "mean": np.add, "max": np.maximum, "min": np.minimum}
FACTS: list[Callable[[Communicator], None]] = []


def fact(function: Callable[[Communicator], None]) -> Callable[[Communicator], None]:
    FACTS.append(function)
    return function


@functools.lru_cache(maxsize=400)
def normal(rank: int, size: int, seed: int) -> Array:
    return np.random.default_rng([seed, size, rank]).standard_normal(size, np.float32) * 100


def data(rank: int, size: int, dtype: Any = np.float32, seed: int = 0) -> Array:
    """Rank ``rank``'s own values, the same whoever asks."""
    values = normal(rank, size, seed)
    return values.astype(np.int64).astype(dtype) if np.dtype(dtype).kind == "u" else values.astype(dtype)


def folded(arrays: list[Array], op: str) -> Array:
    """The contract's bits: folded in rank order, float16 in float32, divided once."""
    wide = [array.astype(np.float32) if array.dtype == np.float16 else array for array in arrays]
    total = functools.reduce(FOLD[op], wide)
    if op == "mean":
        total = total / total.dtype.type(len(arrays))
    return total.astype(arrays[0].dtype)


def in_float64(arrays: list[Array], op: str) -> Array:
    stack = np.stack([array.astype(np.float64) for array in arrays])
    return getattr(stack, op)(axis=0)


def everyone(c: Communicator, size: int, dtype: Any = np.float32, seed: int = 0) -> list[Array]:
    return [data(rank, size, dtype, seed) for rank in range(c.size)]


def same_bits(one: Array, other: Array) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()


def ops_of(dtype: Any) -> list[str]:
    return [op for op in REDUCE_OPS if op != "mean" or np.dtype(dtype).kind == "f"]


@fact
def all_reduce_combines_every_dtype_and_op_in_rank_order(c: Communicator) -> None:
    for dtype in DTYPES:
        for size in SIZES:
            inputs = everyone(c, size, dtype)
            for op in ops_of(dtype):
                array = inputs[c.rank].copy()
                assert c.all_reduce(array, op).wait() is None
                assert same_bits(array, folded(inputs, op)), (dtype, op, size)


@fact
def all_reduce_writes_into_out_and_leaves_its_array(c: Communicator) -> None:
    for size in SIZES:
        for dtype, wire_dtype in (
            (np.float16, None),
            (np.float32, None),
            (np.float32, "bfloat16"),
            (np.int64, None),
        ):
            inputs = everyone(c, size, dtype, seed=7)
            in_place, out = inputs[c.rank].copy(), np.full(size, 9, dtype)
            c.all_reduce(in_place, "sum", wire_dtype=wire_dtype).wait()
            array = inputs[c.rank].copy()
            array.setflags(write=False)
            assert c.all_reduce(array, "sum", out=out, wire_dtype=wire_dtype).wait() is None
            assert same_bits(out, in_place), (size, dtype)
            assert same_bits(array, data(c.rank, size, dtype, seed=7))
    # a rank's own choice
    array, out = data(c.rank, 9), np.zeros(9, np.float32)
    c.all_reduce(array, "sum", out=out if c.rank == 0 else None).wait()
    assert same_bits(out if c.rank == 0 else array, folded(everyone(c, 9), "sum"))


@fact
def all_reduce_refuses_an_out_that_does_not_fit(c: Communicator) -> None:
    array = data(c.rank, 8)
    before = array.copy()
    for out, error in (
        (np.zeros(7, np.float32), ShapeError),
        (np.zeros(8, np.float64), ShapeError),
        (np.zeros((8, 2), np.float32)[:, 0], ShapeError),
        (array, OptionError),
        (array[:], OptionError),
        ([0.0] * 8, DTypeError),
    ):
        with pytest.raises(error):
            c.all_reduce(array, "sum", out=out)  # type: ignore[arg-type]
    with pytest.raises(OptionError):
        c.all_reduce([array, array], "sum", out=np.zeros(8, np.float32))
    assert same_bits(array, before)


@fact
def sums_and_means_agree_with_float64(c: Communicator) -> None:
    for dtype, tolerance in ((np.float16, 1e-3), (np.float32, 1e-6), (np.float64, 1e-14)):
        for op in ("sum", "mean"):
            array = data(c.rank, 20_000, dtype, seed=1)
            c.all_reduce(array, op).wait()
            inputs = everyone(c, 20_000, dtype, seed=1)
            tolerance_here = tolerance * sum(np.abs(values.astype(np.float64)) for values in inputs)
            assert np.all(np.abs(array - in_float64(inputs, op)) <= tolerance_here)


@fact
def every_rank_gets_the_same_bits(c: Communicator) -> None:
    array = data(c.rank, 400_001, seed=2)
    c.all_reduce(array, "mean").wait()
    assert len(set(c.all_gather_object(zlib.crc32(array.tobytes())))) == 1


@fact
def half_precision_wire_rounds_both_ways_and_sums_in_float32(c: Communicator) -> None:
    for size in (*SIZES, PIECES):
        for op in REDUCE_OPS:
            array = data(c.rank, size, seed=3)
            work = c.all_reduce(array, op, wire_dtype="float16")
            work.wait()
            assert work.bytes_payload == 2 * size
            halves = [values.astype(np.float16) for values in everyone(c, size, seed=3)]
            assert same_bits(array, folded(halves, op).astype(np.float32)), (size, op)


@fact
def half_precision_wire_overflows_to_infinity(c: Communicator) -> None:
    array = np.array([7e4, -7e4, 1.0], np.float32)
    c.all_reduce(array, "mean", wire_dtype="float16").wait()
    assert array.tolist() == [np.inf, -np.inf, 1.0]


@fact
def bfloat16_wire_rounds_both_ways_and_sums_in_float32(c: Communicator) -> None:
    for size in (*SIZES, PIECES):
        for op in REDUCE_OPS:
            array = data(c.rank, size, seed=15)
            work = c.all_reduce(array, op, wire_dtype="bfloat16")
            work.wait()
            assert work.bytes_payload == 2 * size
            assert work.bytes_sent == -(-2 * (c.size - 1) * 2 * size // c.size)
            inputs = [nearest_bfloat16(values) for values in everyone(c, size, seed=15)]
            assert same_bits(array, nearest_bfloat16(folded(inputs, op))), (size, op)


@fact
def bfloat16_wire_keeps_the_range_of_float32_infinity_and_nan(c: Communicator) -> None:
    kinds = [1e38, -3e38, 3.39e38, 3.4e38, np.inf, -np.inf, np.nan, 1e-45, 1e-40, -2e-38, -0.0]
    signalling = np.array([0x7F800001, 0xFF800001], np.uint32).view(np.float32)
    special = np.concatenate([np.array(kinds, np.float32), signalling])
    for copies in (1, 2000):  # at once, and in pieces
        inputs = []
        for rank in range(c.size):
            own = np.full((c.size, special.size * copies), 1.0, np.float32)
            # each special value is combined with ordinary ones of the others
            own[rank] = np.tile(special, copies)
            inputs.append(np.append(own, np.float32([3e38, np.inf if rank else -np.inf])))
        for op in REDUCE_OPS:
            array = inputs[c.rank].copy()
            c.all_reduce(array, op, wire_dtype="bfloat16").wait()
            with np.errstate(all="ignore"):
                expected = nearest_bfloat16(folded([nearest_bfloat16(values) for values in inputs], op))
            np.testing.assert_array_equal(array, expected, err_msg=op)
            assert (np.isnan(array) | (np.signbit(array) == np.signbit(expected))).all()


@fact
def every_rank_gets_the_same_bits_of_bfloat16_nan(c: Communicator) -> None:
    array = data(c.rank, 40_001, seed=16)
    array[c.rank :: 7] = np.nan
    array[c.rank + 1 :: 11] = np.inf
    array[c.rank + 2 :: 13] = -np.inf
    c.all_reduce(array, "mean", wire_dtype="bfloat16").wait()
    assert np.isnan(array).any() and np.isfinite(array).any()
    assert len(set(c.all_gather_object(zlib.crc32(array.tobytes())))) == 1
    assert not (array.view(np.uint32) & 0xFFFF).any()


@fact
def max_and_min_hand_on_nan_from_any_rank(c: Communicator) -> None:
    for dtype in (np.float16, np.float32, np.float64):
        for op in ("max", "min"):
            array = np.full(c.size + 40, float(c.rank), dtype)
            array[c.rank] = np.nan
            c.all_reduce(array, op).wait()
            assert np.isnan(array[: c.size]).all()
            assert (array[c.size :] == (c.size - 1 if op == "max" else 0)).all()


@fact
def a_zero_dimensional_array_keeps_its_shape(c: Communicator) -> None:
    array = np.array(float(c.rank + 1))
    c.all_reduce(array, "sum").wait()
    assert array.shape == () and array == c.size * (c.size + 1) / 2
    gathered = c.all_gather(np.array(c.rank)).wait()
    assert gathered is not None and gathered.tolist() == list(range(c.size))


@fact
def a_list_of_arrays_goes_array_by_array(c: Communicator) -> None:
    arrays = [data(c.rank, n, dtype) for n, dtype in ((3, np.float32), (0, np.float64), (65, np.int64))]
    work = c.all_reduce(arrays, "sum")
    assert work.wait() is None and work.done()
    for array in arrays:
        assert same_bits(array, folded(everyone(c, array.size, array.dtype), "sum"))
    assert work.bytes_payload == 3 * 4 + 65 * 8


@fact
def reduce_reaches_the_root_and_leaves_others_unchanged(c: Communicator) -> None:
    for root in range(c.size):
        for size in (5, 100_003):
            array = data(c.rank, size, seed=4)
            c.reduce(array, "mean", root).wait()
            inputs = everyone(c, size, seed=4)
            assert same_bits(array, folded(inputs, "mean") if c.rank == root else inputs[c.rank])


@fact
def broadcast_copies_every_dtype_from_every_root(c: Communicator) -> None:
    for root in range(c.size):
        for dtype in MOVED_DTYPES:
            array = data(c.rank, 3001, dtype, seed=5)
            c.broadcast(array, root).wait()
            assert same_bits(array, data(root, 3001, dtype, seed=5))


@fact
def all_gather_stacks_in_rank_order(c: Communicator) -> None:
    for dtype in MOVED_DTYPES:
        for shape in ((0,), (1,), (3, 0, 2), (2, 3), (401, 503)):
            array = data(c.rank, int(np.prod(shape)), dtype, seed=6).reshape(shape)
            before = array.copy()
            result = c.all_gather(array).wait()
            stacked = [values.reshape(shape) for values in everyone(c, array.size, dtype, seed=6)]
            assert result is not None and same_bits(result, np.stack(stacked)) and same_bits(array, before)


@fact
def reduce_scatter_gives_each_rank_its_rows(c: Communicator) -> None:
    for dtype in DTYPES:
        for op in ops_of(dtype):
            for rows, width in ((1, 1), (3, 5), (0, 4), (67, 401)):
                shape = (c.size * rows, width)
                array = data(c.rank, c.size * rows * width, dtype, seed=7).reshape(shape)
                before = array.copy()
                result = c.reduce_scatter(array, op).wait()
                inputs = [v.reshape(shape) for v in everyone(c, array.size, dtype, seed=7)]
                expected = folded(inputs, op)[c.rank * rows : (c.rank + 1) * rows]
                assert result is not None and same_bits(result, expected) and same_bits(array, before)


@fact
def all_to_all_sends_block_j_to_rank_j_and_keeps_rank_order(c: Communicator) -> None:
    for dtype in MOVED_DTYPES:
        for rows, width in ((1, 1), (3, 5), (0, 4), (5, 0), (67, 401)):
            shape = (c.size, rows, width)
            inputs = [v.reshape(shape) for v in everyone(c, c.size * rows * width, dtype, seed=17)]
            array = inputs[c.rank].reshape(c.size * rows, width).copy()
            before = array.copy()
            result = c.all_to_all(array).wait()
            expected = np.concatenate([values[c.rank] for values in inputs])
            assert result is not None and same_bits(result, expected) and same_bits(array, before)
            assert not np.shares_memory(result, array)


@fact
def a_large_all_to_all_goes_in_pieces_beside_others(c: Communicator) -> None:
    inputs = everyone(c, c.size * PIECES, seed=18)
    summed = data(c.rank, 9, seed=19)
    work = c.all_to_all(inputs[c.rank])
    c.all_reduce(summed, "sum").wait()
    expected = np.concatenate([values.reshape(c.size, -1)[c.rank] for values in inputs])
    result = work.wait()
    assert result is not None and same_bits(result, expected)
    assert same_bits(summed, folded(everyone(c, 9, seed=19), "sum"))


@fact
def works_know_when_they_were_posted_and_when_all_ranks_were_there(c: Communicator) -> None:
    for size in (3, 5000, LARGE):  # at once, in a thread over MPI, in the background over shared memory
        c.barrier()
        time.sleep(0.02 * (c.rank == c.size - 1))  # the last rank comes late
        before = time.perf_counter()
        work = c.all_reduce(data(c.rank, size, seed=20), "sum")
        after = time.perf_counter()
        work.wait()
        times, now = work.times(), time.perf_counter()
        if times is None:  # a stand-in of NCCL's
            return
        assert before <= times.posted <= after and times.posted <= times.all_there <= times.ended <= now
        # all are on one host, whose clock they share
        assert max(c.all_gather_object(times.posted)) <= times.all_there
        assert times == work.times()


@fact
def times_of_what_has_not_ended_are_an_error(c: Communicator) -> None:
    if c.size == 1:
        return
    pair, last = c.new_group([0, c.size - 1]), c.size - 1
    if pair is not None and c.rank == last:
        pair.barrier()  # rank 0 has looked
    work = c.all_reduce(np.ones(40_000), "sum")
    if pair is not None and c.rank == 0:
        if work.has_times:
            with pytest.raises(OptionError, match="all_reduce has not ended"):
                work.times()
        pair.barrier()
    work.wait()
    if pair is not None:
        pair.close()


@fact
def times_of_a_list_are_of_the_first_and_the_last(c: Communicator) -> None:
    work = c.all_reduce([np.ones(3), np.ones(40_000)], "sum")
    work.wait()
    first, last = (part.times() for part in work._works)  # type: ignore[attr-defined]
    if first is not None:
        assert work.times() == (
            first.posted,
            max(first.all_there, last.all_there),
            max(first.ended, last.ended),
        )


@fact
def more_than_64_mb_is_sent(c: Communicator) -> None:
    if c.size != 3:  # others send it in the same pieces, and it takes longest
        return
    pattern, array = np.arange(4093.0), np.empty((2077, 4093))  # float64
    array[:] = pattern * (c.rank + 1)
    c.all_reduce(array, "sum").wait()
    assert (array == pattern * (c.size * (c.size + 1) / 2)).all()


@fact
def works_in_flight_may_be_awaited_in_any_order(c: Communicator) -> None:
    sizes = [10, LARGE, 0, 5000, 1, 400_000, PIECES, 64, 500_000, 2, 12, 4096]
    arrays = [data(c.rank, size, seed=8) for size in sizes]
    works = [c.all_reduce(array, "sum", name=f"bucket {i}") for i, array in enumerate(arrays)]
    order = np.random.default_rng([9, c.rank]).permutation(len(works))
    for i in order:
        works[i].wait()
        assert works[i].done()
        works[i].wait()
    for size, array in zip(sizes, arrays, strict=True):
        assert same_bits(array, folded(everyone(c, size, seed=8), "sum"))


@fact
def done_comes_true_without_wait(c: Communicator) -> None:
    for size in (100, LARGE):
        array = data(c.rank, size, seed=10)
        work = c.all_reduce(array, "max")
        deadline = time.monotonic() + LIMIT_S
        while not work.done():
            assert time.monotonic() < deadline
            time.sleep(0.0005)
        assert same_bits(array, folded(everyone(c, size, seed=10), "max"))


@fact
def a_dropped_work_still_ends(c: Communicator) -> None:
    for _ in range(5):
        c.all_reduce(data(c.rank, LARGE, seed=11), "sum")
        c.all_reduce(data(c.rank, 20, seed=11), "sum")
    c.barrier()


@fact
def collectives_of_all_kinds_follow_each_other(c: Communicator) -> None:
    random = np.random.default_rng(12)  # the same choices on every rank
    for number in range(60):
        size, root = int(random.choice([1, 33, 5000, 70_000])), int(random.integers(c.size))
        array, inputs = data(c.rank, size, seed=number), everyone(c, size, seed=number)
        kind = random.choice(["all_reduce", "reduce", "broadcast", "all_gather"])
        if kind == "all_reduce":
            c.all_reduce(array, "sum").wait()
            assert same_bits(array, folded(inputs, "sum"))
        elif kind == "reduce":
            c.reduce(array, "min", root).wait()
            assert same_bits(array, folded(inputs, "min") if c.rank == root else inputs[c.rank])
        elif kind == "broadcast":
            c.broadcast(array, root).wait()
            assert same_bits(array, inputs[root])
        else:
            result = c.all_gather(array).wait()
            assert result is not None and same_bits(result, np.stack(inputs))


@fact
def no_rank_leaves_a_barrier_before_the_last_has_come(c: Communicator) -> None:
    time.sleep(0.03 * c.rank)
    entered = time.monotonic()
    c.barrier()
    left = time.monotonic()
    assert left >= max(c.all_gather_object(entered))


@fact
def objects_of_unequal_length_are_gathered(c: Communicator) -> None:
    mine = {"rank": c.rank, "text": "ü" * c.rank * 1000, "list": [None, True, 0.5]}
    assert c.all_gather_object(mine) == [{**mine, "rank": r, "text": "ü" * r * 1000} for r in range(c.size)]
    assert c.all_gather_object(None) == [None] * c.size


@fact
def bytes_follow_the_ring_formula(c: Communicator) -> None:
    array, n = np.ones(1001, np.float32), c.size
    work = c.all_reduce(array, "sum", name="grad")
    work.wait()
    assert (work.name, work.bytes_payload) == ("grad", 4004)
    assert work.bytes_sent == -(-2 * (n - 1) * 4004 // n)
    work = c.all_gather(array)
    work.wait()
    assert work.bytes_sent == (n - 1) * 4004
    work = c.broadcast(array)
    work.wait()
    assert work.bytes_sent == -(-(n - 1) * 4004 // n)
    work = c.all_to_all(np.ones(n * 7, np.uint8))
    work.wait()
    assert (work.bytes_payload, work.bytes_sent) == (n * 7, (n - 1) * 7)


@fact
def bad_arguments_raise_before_anything_is_sent(c: Communicator) -> None:
    array = np.ones(4, np.float32)
    bad: list[tuple[type[Exception], Callable[[], Any]]] = [
        (OptionError, lambda: c.all_reduce(array, "average")),  # type: ignore[arg-type]
        (OptionError, lambda: c.all_reduce(array, "sum", wire_dtype="int8")),
        (OptionError, lambda: c.all_reduce(array, "sum", name=5)),  # type: ignore[arg-type]
        (OptionError, lambda: c.all_reduce(array, "sum", name="\ud800")),
        (OptionError, lambda: c.all_gather_object(1, name=None)),  # type: ignore[arg-type]
        (OptionError, lambda: c.barrier(name=b"barrier")),  # type: ignore[arg-type]
        (OptionError, lambda: c.new_group([0], name=5)),  # type: ignore[arg-type]
        (OptionError, lambda: c.split_by_host(name=None)),  # type: ignore[arg-type]
        (DTypeError, lambda: c.all_reduce(array, "sum", wire_dtype="float16", wire_scale=2.0)),  # type: ignore[arg-type]
        (OptionError, lambda: c.all_reduce([array, array], "sum")),
        (OptionError, lambda: c.all_reduce([array[2:], np.ones(3, np.float32), array[:3]], "sum")),
        (OptionError, lambda: c.broadcast([array[:0], array[1:], array.view(np.int32)])),
        *(
            (
                OptionError,
                lambda scale=scale: c.all_reduce(array, "sum", wire_dtype="float16", wire_scale=scale),
            )
            for scale in np.array([[0], [-2], [np.nan], [np.inf]], np.float32)
        ),
        (OptionError, lambda: c.broadcast(array, c.size)),
        (OptionError, lambda: c.reduce(array, "sum", -1)),
        (OptionError, lambda: c.new_group([0, 0])),
        (DTypeError, lambda: c.all_reduce(np.ones(4, np.int32), "mean")),
        (DTypeError, lambda: c.all_reduce(np.ones(4, np.complex64), "sum")),
        (DTypeError, lambda: c.all_reduce(np.ones(4, np.uint8), "sum")),
        (DTypeError, lambda: c.reduce(np.ones(4, np.uint8), "max")),
        (DTypeError, lambda: c.reduce_scatter(np.ones(4 * c.size, np.uint8), "sum")),
        (DTypeError, lambda: c.all_reduce(np.ones(4, np.float64), "sum", wire_dtype="float16")),
        (DTypeError, lambda: c.all_reduce(np.ones(4, np.float16), "sum", wire_dtype="bfloat16")),
        (DTypeError, lambda: c.all_reduce([array, [1.0]], "sum")),  # type: ignore[list-item]
        (ShapeError, lambda: c.all_reduce(np.ones((4, 4), np.float32).T[1:], "sum")),
        (ShapeError, lambda: c.all_reduce(np.broadcast_to(np.float32(1), 1), "sum")),
        (DTypeError, lambda: c.all_to_all(np.ones(4 * c.size, np.uint16))),
        (ShapeError, lambda: c.all_to_all(np.ones(c.size + 1 if c.size > 1 else (), np.float32))),
        (ShapeError, lambda: c.reduce_scatter(np.ones(c.size + 1 if c.size > 1 else (), np.float32), "sum")),
    ]
    for error, call in bad:
        with pytest.raises(error):
            call()
    work = c.all_reduce(array, "sum")
    for limit in ("1", -1.0, np.nan, array):
        with pytest.raises(OptionError):
            work.wait(limit)  # type: ignore[arg-type]
    work.wait()
    assert array.tolist() == [c.size] * 4


@fact
def a_copy_or_a_pickle_of_it_is_an_option_error(c: Communicator) -> None:
    for call in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(OptionError, match="a communicator cannot be copied or pickled"):
            call(c)


@fact
def parts_of_one_array_that_touch_may_be_in_one_list(c: Communicator) -> None:
    array = np.ones(6, np.float32)
    c.all_reduce([array[3:], array[2:2], array[:3]], "sum").wait()
    assert array.tolist() == [c.size] * 6


@fact
def groups_work_beside_their_parent(c: Communicator) -> None:
    ranks = list(range(c.size))[::-2]  # every second rank, from the last one down
    group = c.new_group(ranks)
    assert (group is None) == (c.rank not in ranks)
    mine = data(c.rank, 50_000, seed=13)
    parent_work = c.all_reduce(mine, "sum")
    if group is not None:
        assert (group.rank, group.size) == (ranks.index(c.rank), len(ranks))
        array = data(c.rank, 1000, seed=14)
        group.all_reduce(array, "mean").wait()
        assert same_bits(array, folded([data(r, 1000, seed=14) for r in ranks], "mean"))
        gathered = group.all_gather(np.array([c.rank])).wait()
        assert gathered is not None and gathered.ravel().tolist() == ranks
        group.close()
    parent_work.wait()
    assert same_bits(mine, folded(everyone(c, 50_000, seed=13), "sum"))
    alone = c.new_group([0])
    assert (alone is not None) == (c.rank == 0)
    if alone is not None:
        alone.barrier()
        alone.close()


def hosts_are_split(c: Communicator, hosts: list[str]) -> None:
    """Rank r runs on ``hosts[r]``: who is with whom, in which order, and that both communicators work."""
    before = os.environ.get("SINGA_LITE_HOST")
    os.environ["SINGA_LITE_HOST"] = hosts[c.rank]
    try:
        inner, outer = c.split_by_host(name="test")
    finally:
        os.environ.pop("SINGA_LITE_HOST")
        if before is not None:
            os.environ["SINGA_LITE_HOST"] = before
    mine = [rank for rank, host in enumerate(hosts) if host == hosts[c.rank]]
    leaders = [hosts.index(host) for host in dict.fromkeys(hosts)]
    assert (inner.size, inner.rank) == (len(mine), mine.index(c.rank))
    assert (outer is None) == (inner.rank != 0) == (c.rank not in leaders)
    array = np.array([c.rank + 1], np.int64)
    inner.reduce(array, "sum", 0).wait()
    if outer is not None:
        assert (outer.size, outer.rank) == (len(leaders), leaders.index(c.rank))
        assert array[0] == sum(mine) + len(mine)
        outer.all_reduce(array, "sum").wait()
        gathered = outer.all_gather(np.array([c.rank])).wait()
        assert gathered is not None and gathered.ravel().tolist() == leaders
        outer.close()
    inner.broadcast(array, 0).wait()
    assert array[0] == c.size * (c.size + 1) // 2
    inner.close()


@fact
def ranks_are_split_by_host_where_hosts_are_unequal(c: Communicator) -> None:
    for hosts in ("aaab", "abbb", "abab", "aaaa", "abcd"):  # 2 + 1 at 3 ranks, 3 + 1 and 2 + 2 at 4
        hosts_are_split(c, list(hosts[: c.size] if c.size != 3 else hosts[1:]))


@fact
def ranks_of_this_machine_are_on_one_host(c: Communicator) -> None:
    inner, outer = c.split_by_host()
    assert (inner.rank, inner.size, outer is None) == (c.rank, c.size, c.rank != 0)
    if outer is not None:
        assert outer.size == 1
        outer.close()
    inner.close()


def run_facts(c: Communicator, skip: Collection[str] = ()) -> dict[str, str]:
    """Every fact's traceback on this rank, "" where it holds; a broken communicator ends the list."""
    outcome = {}
    for check in FACTS:
        if check.__name__ in skip:
            continue
        try:
            check(c)
            c.barrier(name=f"end of {check.__name__}")
            outcome[check.__name__] = ""
        except Exception as error:
            outcome[check.__name__] = traceback.format_exc()
            if isinstance(error, CommError):
                break
    return outcome


@functools.cache
def outcomes(transport: str, size: int) -> list[dict[str, str]]:
    return run_ranks(run_facts, size, transport=transport)


def skip_without(transport: str) -> None:
    if transport == "mpi" and (reason := mpi_missing()):
        pytest.skip(reason)


@pytest.mark.parametrize(
    ("transport", "size"),
    [
        # what a transport does with one rank is seen on shm in each run
        pytest.param(
            *world,
            id=f"{world[0]}-{world[1]}",
            marks=[pytest.mark.slow] if world in (("mpi", 1), ("mpi", 4)) else [],
        )
        for world in WORLDS
    ],
)
class TestCommunicatorContract:
    @pytest.mark.parametrize("name", [check.__name__ for check in FACTS])
    def test_that(self, transport: str, size: int, name: str) -> None:
        skip_without(transport)
        texts = [outcome.get(name, "not reached") for outcome in outcomes(transport, size)]
        assert not any(texts), "\n".join(f"-- rank {rank}: {text}" for rank, text in enumerate(texts) if text)


# ---- disagreements: rank 1 does something else ----------------------------------------------------------

LONG = "".join(f"layer{i}.W " for i in range(250))[:2000]  # a bucket is called by all its parameters


def named(c: Communicator, at: int) -> Any:
    """A collective whose name is another on rank 1, from character ``at`` on."""
    return c.all_reduce(np.ones(5), "sum", name=LONG[:at] + f"<rank {c.rank == 1:d}>" + LONG[at + 8 :])


DISAGREEMENTS: dict[str, tuple[Callable[[Communicator], Any], str]] = {
    "op": (lambda c: c.all_reduce(np.ones(500, np.float32), "sum" if c.rank == 1 else "max"), "max"),
    "dtype": (lambda c: c.all_reduce(np.ones(500, np.int32 if c.rank == 1 else np.float32), "sum"), "int32"),
    "count": (lambda c: c.all_reduce(np.ones(500 + c.rank // 1 % 2, np.float32), "sum"), "501"),
    "large count": (
        lambda c: c.all_reduce(np.ones(10 if c.rank == 1 else LARGE, np.float32), "sum"),
        str(LARGE),
    ),
    "name": (lambda c: c.all_reduce(np.ones(5), "sum", name="w1" if c.rank == 1 else "w0"), "w1"),
    "start of a long name": (lambda c: named(c, 0), "'<rank 1>"),
    "middle of a long name": (lambda c: named(c, 700), LONG[680:700] + "<rank 1>"),
    "end of a long name": (lambda c: named(c, 1900), "(2000 bytes, "),
    "wire": (
        lambda c: c.all_reduce(np.ones(5, np.float32), "sum", wire_dtype="float16" if c.rank == 1 else None),
        "float16",
    ),
    "wires": (
        lambda c: c.all_reduce(
            np.ones(5, np.float32), "sum", wire_dtype="float16" if c.rank == 1 else "bfloat16"
        ),
        "as bfloat16",
    ),
    "wire_scale": (
        lambda c: c.all_reduce(
            np.ones(5, np.float32),
            "sum",
            wire_dtype="float16",
            wire_scale=np.float32([0.5]) if c.rank == 1 else None,
        ),
        "scaled by 0.5",
    ),
    "uint8": (lambda c: c.all_gather(np.ones(500, np.uint8 if c.rank == 1 else np.float32)), "uint8"),
    "block": (lambda c: c.all_to_all(np.ones(c.size * (500 + (c.rank == 1)), np.uint8)), "all_to_all"),
    "blocks or rows": (
        lambda c: (c.all_gather if c.rank == 1 else c.all_to_all)(np.ones(c.size * 3)),
        "all_to_all",
    ),
    "root": (lambda c: c.broadcast(np.ones(5), int(c.rank == 1)), "root"),
    "collective": (
        lambda c: c.all_reduce(np.ones(5), "sum") if c.rank == 1 else c.all_gather(np.ones(5)),
        "all_gather",
    ),
}


def disagree(c: Communicator, name: str) -> tuple[str, str]:
    """The text of the error, and of the one of the next call."""
    array = np.ones(3, np.float32)
    c.all_reduce(array, "sum").wait()
    try:
        DISAGREEMENTS[name][0](c).wait()
    except CommError as error:
        text = str(error)
    else:
        return "", ""
    try:
        c.all_reduce(array, "sum").wait()
    except CommError as error:
        return text, str(error)
    return text, ""


def disagree_over_mpi(c: Communicator) -> dict[str, tuple[str, str]]:
    """Every disagreement on a communicator of its own, in one job: mpiexec takes longer than all of them."""
    from singa_lite.comm.mpi import MpiCommunicator

    return {name: disagree(MpiCommunicator(c.world, 30), name) for name in DISAGREEMENTS}


@functools.cache
def disagreements_over_mpi(size: int) -> list[dict[str, tuple[str, str]]]:
    return run_ranks(disagree_over_mpi, size, transport="mpi")


@pytest.mark.parametrize(
    ("transport", "size"), [("shm", 2), ("shm", 3), ("mpi", 3)], ids=lambda value: str(value)
)
@pytest.mark.parametrize("name", DISAGREEMENTS)
def test_a_disagreement_is_an_error_on_every_rank(transport: str, size: int, name: str) -> None:
    skip_without(transport)
    if transport == "mpi":
        texts = [seen[name] for seen in disagreements_over_mpi(size)]
    else:
        texts = run_ranks(disagree, size, name, transport=transport)
    for rank, (first, second) in enumerate(texts):
        assert f"rank {rank}" in first and DISAGREEMENTS[name][1] in first, (rank, first)
        assert len(first) < 1000
        assert second, f"rank {rank} went on after: {first}"


def abort_by_hand(c: Communicator) -> str:
    """The text of the error of ranks that wait for one that has aborted."""
    if c.rank == 0:
        c.abort("the loss is NaN \ud800 \0!")
        return ""
    with pytest.raises(CommError) as caught:
        c.barrier().wait()
    return str(caught.value)


@pytest.mark.parametrize("transport", ["shm", "mpi"])
def test_an_abort_gives_peers_its_text_even_where_that_is_not_valid_in_utf_8(transport: str) -> None:
    skip_without(transport)
    for text in run_ranks(abort_by_hand, 3, transport=transport)[1:]:
        assert r"the loss is NaN \ud800 \0!" in text
