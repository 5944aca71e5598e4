# SPDX-License-Identifier: Apache-2.0
"""The cost model: cases computed by hand, limits that are known, and a table of times to an accuracy."""

import math
from collections.abc import Iterable

import pytest

from singa_lite.bench.cost import (
    Bucket,
    Network,
    Transfer,
    all_gather,
    all_reduce,
    collective,
    doubling_all_reduce,
    hierarchical_all_reduce,
    local_sgd_step_s,
    ring_all_reduce,
    scatter,
    step_s,
    together,
)
from singa_lite.bench.wire_bytes import Message, fp16, fp32, int8, power_sgd, sign, sparse
from singa_lite.comm.link import parse_link
from singa_lite.errors import OptionError
from tests.bench.test_wire_bytes import CNN, N

NETWORK = Network(hop_s=1.0, byte_s=2.0)  # so that each term can be seen in a sum


def close(transfer, link_s, latency_s):
    return transfer == pytest.approx((link_s, latency_s), rel=1e-12)


# ---- collectives -------------------------------------------------------------------------------------


def test_a_ring_all_reduce_by_hand():
    # 3 ranks, 12 bytes: 4 steps of 4 bytes each
    assert close(ring_all_reduce(NETWORK, 12, 3), 4 * 4 * 2.0, 4.0)
    assert close(ring_all_reduce(NETWORK, 12, 1), 0, 0)


def test_recursive_doubling_by_hand():
    assert close(doubling_all_reduce(NETWORK, 12, 4), 2 * 12 * 2.0, 2.0)
    assert close(doubling_all_reduce(NETWORK, 12, 5), 3 * 12 * 2.0, 3.0)
    assert close(doubling_all_reduce(NETWORK, 12, 1), 0, 0)


def test_the_smaller_algorithm_is_doubling_for_short_and_the_ring_for_long_messages():
    def network(word):
        return Network(1e-3, 1e-8, algorithm=word)

    for payload, word in ((100, "doubling"), (10**9, "ring")):
        assert all_reduce(network("smaller"), payload, 16) == all_reduce(network(word), payload, 16)
    assert all_reduce(network("doubling"), 100, 16) != all_reduce(network("ring"), 100, 16)
    assert all_reduce(Network(1e-3, 1e-8), 100, 16) == ring_all_reduce(network("ring"), 100, 16)


def test_what_is_gathered_and_scattered_by_hand():
    assert close(all_gather(NETWORK, 12, 4), 3 * 12 * 2.0, 3.0)
    assert close(scatter(NETWORK, 12, 4), 3 * 3 * 2.0, 3.0)
    assert collective(NETWORK, Message("all_to_all", 12), 4) == scatter(NETWORK, 12, 4)
    assert collective(NETWORK, Message("all_gather", 12), 4) == all_gather(NETWORK, 12, 4)
    assert collective(NETWORK, Message("all_reduce", 12), 4) == ring_all_reduce(NETWORK, 12, 4)
    with pytest.raises(OptionError, match="all_together"):
        collective(NETWORK, Message("all_together", 12), 4)


def test_an_all_gather_grows_with_the_ranks_and_an_all_reduce_does_not():
    fast = Network(0.0, 1.0)
    gathers = [all_gather(fast, 100, size).total_s for size in (2, 4, 64)]
    reduces = [all_reduce(fast, 100, size).total_s for size in (2, 4, 64)]
    assert gathers == [100, 300, 6300]
    assert all(seconds < 200 for seconds in reduces)


def test_reduce_scatter_and_all_gather_of_the_shares_are_an_all_reduce():
    plain = Network(3.0, 2.0)
    parts = together([scatter(plain, 60, 5), all_gather(plain, 12, 5)])
    assert close(parts, *ring_all_reduce(plain, 60, 5))


def test_a_hierarchy_by_hand_and_at_its_ends():
    inner, outer = Network(0.5, 0.25), Network(8.0, 4.0)
    # 2 ranks a host, 3 hosts, 12 bytes: 2 (0.5 + 0.25·6) within, 4·8 + 4/3·4·12 among
    assert hierarchical_all_reduce(inner, outer, 12, 2, 3).total_s == pytest.approx(2 * 2.0 + 32 + 64)
    assert close(hierarchical_all_reduce(inner, outer, 12, 1, 3), *ring_all_reduce(outer, 12, 3))
    assert close(hierarchical_all_reduce(inner, outer, 12, 4, 1), *ring_all_reduce(inner, 12, 4))


def test_networks_out_of_range_are_refused():
    for bad in ({"hop_s": -1.0, "byte_s": 0.0}, {"hop_s": 0.0, "byte_s": math.nan}):
        with pytest.raises(OptionError, match="Network"):
            Network(**bad)
    with pytest.raises(OptionError, match="algorithm"):
        Network(0, 0, algorithm="tree")
    with pytest.raises(OptionError, match="size"):
        all_gather(NETWORK, 1, 0)


# ---- steps -------------------------------------------------------------------------------------------


def test_a_single_bucket_at_the_end_adds_up():
    bucket = Bucket(ready_s=10, compress_s=1, transfer=Transfer(5, 2))
    assert step_s(10, [bucket], decompress_s=3, update_s=0.5) == 10 + 1 + 5 + 2 + 3 + 0.5


def test_a_bucket_that_leaves_early_hides_behind_the_computing():
    early = Bucket(2, 0.0, Transfer(5, 2))
    assert step_s(10, [early], update_s=1) == 11  # it ends at 9
    assert step_s(10, [early._replace(compress_s=0.25)], update_s=1) == 11.25


def test_buckets_share_the_link_but_not_the_latency():
    first, second = Bucket(2, 0.0, Transfer(6, 4)), Bucket(3, 0.0, Transfer(1, 4))
    # the first leaves at 8 and ends at 12, the second leaves at 9 and ends at 13
    assert step_s(4, [first, second]) == 13
    # a long latency of the first may end last
    assert step_s(4, [first._replace(transfer=Transfer(6, 40)), second]) == 48


def test_compressing_a_bucket_delays_those_behind_it():
    buckets = [Bucket(2, 1.0, Transfer(0, 0)), Bucket(5, 1.0, Transfer(3, 0))]
    assert step_s(5, buckets) == 5 + 2 + 3


def test_a_step_without_buckets_is_computing_and_updating():
    assert step_s(3, [], decompress_s=100, update_s=1) == 4


def test_buckets_out_of_order_are_refused():
    for ready in ((3, 2), (2, 11)):
        with pytest.raises(OptionError, match="bucket 1 is ready"):
            step_s(10, [Bucket(at, 0, Transfer(1, 1)) for at in ready])


def test_local_sgd_by_hand():
    assert local_sgd_step_s(10, 1, Transfer(6, 2), 4) == 13
    assert local_sgd_step_s(10, 1, Transfer(6, 2), 1) == step_s(
        10, [Bucket(10, 0, Transfer(6, 2))], update_s=1
    )


# ---- the MNIST CNN at 100 Mbit/s and 1 ms, two ranks, 15 ms of computing, no overlap -----------------------


TABLE = {  # messages, seconds of compressing, step in ms, median steps to 98 %, seconds
    "fp32": (fp32(N), 0.0, 154.9, 603, 93.4),
    "fp16": (fp16(N), 0.0, 88.0, 603, 53.1),
    "int8": (int8(N, 2), 1.5e-3, 52.5, 603, 31.7),
    "sign": (sign(N, len(CNN)), 0.5e-3, 20.8, 670, 13.9),
    "powerSGD:4": (power_sgd(CNN, 4), 0.6e-3, 22.9, 603, 13.8),
    "dgc:0.001": (sparse(N, 0.001), 0.6e-3, 16.8, 737, 12.4),
    "sparseTopK:0.01": (sparse(N, 0.01), 0.6e-3, 18.4, 603, 11.1),
}
SLOW = Network.of_link(parse_link("--link", "100mbit,1ms"))


def exchange(messages: Iterable[Message]) -> Transfer:
    """Messages of 2 ranks, of which each waits for the one before."""
    return together(collective(SLOW, message, 2) for message in messages)


@pytest.mark.parametrize("name", TABLE)
def test_the_time_to_98_percent(name):
    messages, compress_s, step_ms, steps, seconds = TABLE[name]
    step = step_s(15e-3, [Bucket(15e-3, compress_s, exchange(messages))])
    assert 1000 * step == pytest.approx(step_ms, abs=0.06)
    assert steps * step == pytest.approx(seconds, abs=0.06)


@pytest.mark.parametrize(("period", "step_ms", "seconds"), [(8, 32.5, 19.6), (32, 19.4, 11.7)])
def test_the_time_to_98_percent_of_local_sgd(period, step_ms, seconds):
    step = local_sgd_step_s(15e-3, 0.0, exchange(fp32(N)), period)
    assert 1000 * step == pytest.approx(step_ms, abs=0.06)
    assert 603 * step == pytest.approx(seconds, abs=0.06)
