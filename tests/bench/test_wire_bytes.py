# SPDX-License-Identifier: Apache-2.0
"""Bytes of each option: hand-computed cases, what the schemes of this package send, and where they stop paying."""

import itertools
import math

import numpy as np
import pytest

from singa_lite import autograd
from singa_lite.bench.wire_bytes import (
    Message,
    bf16,
    bytes_sent,
    elias_fano_bytes,
    fp16,
    fp32,
    int8,
    messages_of,
    num_kept,
    power_sgd,
    random_k,
    sign,
    sparse,
)
from singa_lite.errors import OptionError
from singa_lite.opt import SGD, DistOpt
from singa_lite.tensor import Tensor
from tests.ranks import run_ranks

# the CNN of examples/model/cnn.py
CNN = [(20, 1, 5, 5), (20,), (50, 20, 5, 5), (50,), (800, 500), (500,), (500, 10), (10,)]
N = sum(math.prod(shape) for shape in CNN)


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        (fp32(N), 1_724_320),
        (fp16(N), 862_164),
        (bf16(N), 862_160),
        (int8(N, 2), 437_816),
        (sign(N, len(CNN)), 53_917),
        (power_sgd(CNN, 4), 40_800),
        (power_sgd(CNN, 2), 21_560),
        (power_sgd(CNN, 1), 11_940),
        (sparse(N, 0.01), 21_864),
        (sparse(N, 0.01, value_bytes=2), 13_244),  # 4,311 values and one more for the padding
        (sparse(N, 0.001), 2_376),
        (sparse(N, 0.001, value_bytes=2), 1_512),
        (random_k(N, 0.1), 172_432),
        (random_k(N, 0.01), 17_244),
    ],
)
def test_two_ranks_of_the_cnn_send(messages, expected):
    assert N == 431_080
    assert bytes_sent(messages, 2) == expected


def test_one_rank_sends_nothing_and_more_follow_the_ring():
    assert bytes_sent(fp32(N), 1) == 0
    assert bytes_sent(fp32(10), 3) == -(-2 * 2 * 40 // 3)
    assert bytes_sent(sign(10, 1), 3) == 2 * (2 + 4)
    assert bytes_sent([Message("all_reduce", 8), Message("all_gather", 3)], 4) == 12 + 9


def test_int8_in_two_phases_is_padded_to_equal_shares_of_blocks():
    assert int8(1000, 3) == [Message("all_to_all", 3 * 2 * 260), Message("all_gather", 2 * 260)]
    assert bytes_sent(int8(1000, 3), 3) == 2 * 2 * 260 + 2 * 2 * 260
    assert int8(1000, 2) == [Message("all_gather", 1000 + 16)]


def test_power_sgd_compresses_only_what_it_halves():
    # (8, 8) by rank 2: 2·2·16 = 64 is not below 64; (8, 9): 68 < 72; (2, 9) by rank 5: 2·11 < 18 · 2
    assert power_sgd([(8, 8)], 2) == [Message("all_reduce", 256)]  # no second message, as there is no Q
    assert power_sgd([(8, 9), (5,)], 2) == [
        Message("all_reduce", 4 * (16 + 5)),
        Message("all_reduce", 4 * 18),
    ]
    assert power_sgd([(2, 9)], 5, 0.5) == [Message("all_reduce", 16), Message("all_reduce", 72)]
    assert power_sgd([(), (3, 100)], 50) == [Message("all_reduce", 4 * 301)]


def round_trip(places, n):
    """Encode by the rule of ``elias_fano_bytes`` bit by bit; return the number of bytes, and the places decoded."""
    low_bits = max(0, math.floor(math.log2(n / len(places))))
    lows = "".join(format(place % 2**low_bits, f"0{low_bits}b") if low_bits else "" for place in places)
    highs = ["0"] * (len(places) + ((n - 1) >> low_bits) + 1)
    for number, place in enumerate(places):
        highs[(place >> low_bits) + number] = "1"
    ones = [position for position, bit in enumerate(highs) if bit == "1"]
    parts = (
        [lows[i : i + low_bits] for i in range(0, len(lows), low_bits)] if low_bits else ["0"] * len(places)
    )
    decoded = [
        (one - i << low_bits) + int(low, 2) for i, (one, low) in enumerate(zip(ones, parts, strict=True))
    ]
    return 4 * (math.ceil(len(lows) / 32) + math.ceil(len(highs) / 32)), decoded


@pytest.mark.parametrize(
    ("n", "kept"), [(1, 1), (7, 7), (7, 3), (64, 1), (1000, 250), (1000, 333), (4099, 5), (33, 32)]
)
def test_elias_fano_has_room_for_any_places(n, kept):
    rng = np.random.default_rng(n)
    for places in (range(kept), range(n - kept, n), sorted(rng.choice(n, kept, replace=False).tolist())):
        size, decoded = round_trip(list(places), n)
        assert size == elias_fano_bytes(n, kept)
        assert decoded == list(places)


def test_a_share_keeps_what_the_schemes_keep():
    assert [num_kept(100, 0.07), num_kept(1000, 0.0001), num_kept(10, 1.0), num_kept(3, 0.5)] == [7, 1, 10, 2]
    with pytest.raises(OptionError, match="density"):
        num_kept(10, 1.5)


# ---- beside the schemes --------------------------------------------------------------------------------


OPTIONS = [
    "fp32",
    "fp16",
    "bf16",
    "int8",
    "sign",
    "powerSGD:1",
    "powerSGD:3:rate=1",
    "randomK:0.1",
    "sparseTopK:0.1",
]
OPTIONS += ["sparseTopK:0.069:values=fp16", "dgc:0.05", "localSGD:1", "hierarchical:sign"]


def sent_by_schemes(communicator, options):
    """Bytes of the second step of each, over parameters (30, 7) and (7,), one bucket."""
    found = {}
    for option in options:
        sgd = DistOpt(SGD(0.1, momentum=0.9), dist_option=option, communicator=communicator)
        w = Tensor(data=np.ones((30, 7), np.float32), requires_grad=True, stores_grad=True, name="w")
        b = Tensor(data=np.ones(7, np.float32), requires_grad=True, stores_grad=True, name="b")
        x = Tensor(data=np.random.default_rng(communicator.rank).standard_normal((4, 30)).astype(np.float32))
        autograd.training, before = True, autograd.training
        for _ in range(2):
            y = autograd.add_bias(autograd.matmul(x, w), b)
            sgd(autograd.reduce_mean(y, [0, 1], keepdims=False))
        autograd.training = before
        found[option] = sgd.bytes_sent
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_the_schemes_send_what_is_said_here(size):
    shapes = [(30, 7), (7,)]
    expected = {option: bytes_sent(messages_of(option, shapes, size), size) for option in OPTIONS}
    expected["hierarchical:sign"] = None
    for rank, found in enumerate(run_ranks(sent_by_schemes, size, OPTIONS)):
        # all ranks are of one host: the leader sends nothing between hosts
        within = 2 * -(-4 * 217 * (size - 1) // size)
        assert found == {**expected, "hierarchical:sign": within}, rank


# ---- where they stop paying ----------------------------------------------------------------------------


def ranks_until_no_gain(messages_of, n=1 << 20):
    """The first number of ranks at which an option sends no fewer bytes than fp32; None: at all it sends fewer."""
    sizes = itertools.chain(range(2, 1000), (10**power for power in range(3, 7)))
    gains = ((size, bytes_sent(fp32(n), size) - bytes_sent(messages_of(n, size), size)) for size in sizes)
    return next((size for size, gain in gains if gain <= 0), None)


def test_sparse_pays_for_longer_than_with_4_bytes_a_place():
    ranks = ranks_until_no_gain(lambda n, _: sparse(n, 0.01))
    assert 155 <= ranks <= 160  # 8 / 5.07 of 100


def test_int8_in_two_phases_never_stops_paying():
    assert ranks_until_no_gain(lambda n, size: int8(n, size), n=1 << 30) is None


def test_sign_by_all_gather_stops_at_64_ranks():
    assert ranks_until_no_gain(lambda n, _: sign(n, 8)) == 64


def test_what_is_all_reduced_never_stops_paying():
    side = 1 << 10
    assert ranks_until_no_gain(lambda n, _: power_sgd([(side, n // side)], 4)) is None
    assert ranks_until_no_gain(lambda n, _: random_k(n, 0.1)) is None
    assert ranks_until_no_gain(lambda n, _: bf16(n)) is None
