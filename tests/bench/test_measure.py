# SPDX-License-Identifier: Apache-2.0
"""Calibrations: a communicator that moves nothing, what steps over it say, and the bytes predicted from them."""

import math

import numpy as np
import pytest

from singa_lite import layer
from singa_lite.bench import measure as measuring
from singa_lite.bench.calibration import BucketShapes, OptionTimes
from singa_lite.bench.cost import Cluster, Network
from singa_lite.bench.loopback import LoopbackCommunicator
from singa_lite.bench.measure import (
    MEASURED,
    Alone,
    LoneStepTimes,
    Training,
    Workload,
    calibration_of,
    measure,
    merges,
)
from singa_lite.bench.models import Classifier
from singa_lite.bench.plan import predict
from singa_lite.comm.base import World
from singa_lite.comm.local import LocalCommunicator
from singa_lite.comm.work import ring_bytes
from singa_lite.device import create_device
from singa_lite.opt.dist import THRESHOLD
from singa_lite.tensor import to_numpy
from tests.bench.test_wire_bytes import CNN

SMALL = Workload("mlp-mnist", 2)


def loopback(rank=1, size=3):
    return LoopbackCommunicator(World(rank, size, rank, size))


# ---- the communicator ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "arguments", "expected"),
    [
        ("all_reduce", ("sum",), [3, 6, 9, 12, 15, 18]),
        ("all_reduce", ("mean",), [1, 2, 3, 4, 5, 6]),
        ("all_reduce", ("max",), [1, 2, 3, 4, 5, 6]),
        ("reduce", ("sum", 1), [3, 6, 9, 12, 15, 18]),
        ("reduce", ("sum", 0), [1, 2, 3, 4, 5, 6]),
        ("broadcast", (2,), [1, 2, 3, 4, 5, 6]),
        ("all_gather", (), [[1, 2, 3, 4, 5, 6]] * 3),
        ("reduce_scatter", ("sum",), [9, 12]),
        ("reduce_scatter", ("mean",), [3, 4]),
        ("all_to_all", (), [3, 4, 3, 4, 3, 4]),
    ],
)
def test_what_a_rank_receives_is_what_it_sends(kind, arguments, expected):
    communicator, array = loopback(), np.arange(1.0, 7.0)
    received = getattr(communicator, kind)(array, *arguments, name="it").wait()
    assert (array if received is None else received).tolist() == expected
    assert communicator.traffic.bytes_sent == ring_bytes(kind, 48, 3)
    assert [call.name for call in communicator.calls] == ["it"]


def test_a_result_in_another_array_leaves_the_own_one():
    array, out = np.ones(2), np.zeros(2)
    loopback().all_reduce(array, "sum", out=out).wait()
    assert array.tolist() == [1, 1] and out.tolist() == [3, 3]


def test_each_rank_is_the_leader_of_a_host():
    communicator = loopback()
    inner, outer = communicator.split_by_host()
    assert (inner.size, outer) == (1, communicator)
    assert communicator.new_group([0, 2]) is None and communicator.new_group([2, 1]).rank == 1


def test_fp32_over_it_is_training_alone_bit_for_bit():
    def trained(communicator):
        create_device(0).SetRandSeed(3)
        training = Training(SMALL, "fp32", communicator)
        for _ in range(3):
            training.step()
        return [to_numpy(param) for param in training._model.get_params().values()]

    for got, expected in zip(trained(loopback(0)), trained(LocalCommunicator(World())), strict=True):
        np.testing.assert_array_equal(got, expected)


# ---- calibrations --------------------------------------------------------------------------------------


def test_a_calibration_by_hand():
    # 2 ranks, fp32: 10 s, of which the last 2 follow the exchange; sign: 15 s, 1 s of it to merge each rank
    alone = {option: Alone(SMALL, option, 2) for option in ("fp32", "sign")}
    for one in alone.values():
        one.time_step()
    times = {
        "fp32": [LoneStepTimes(10.0, (7.0,), 2.0), LoneStepTimes(11.0, (7.5,), 3.0)],
        "sign": [LoneStepTimes(15.0, (9.0,), 5.0)],
    }
    found = calibration_of(("fp32", "sign", "localSGD:2"), alone, times, min, "", {"sign": 1.0}, size=2)
    assert (found.compute_s, found.update_s) == (8.0, 2.0)
    assert [bucket.ready_s for bucket in found.buckets] == [7.0]
    assert found.options == {
        "fp32": OptionTimes(0.0),
        "sign": OptionTimes(15.0 - 10.0 - 2.0, 1.0),
        "localSGD:2": OptionTimes(0.0),
    }
    # the link takes no time: computing and compressing, or ready, compressed and merged; updating
    assert (
        predict(found, Cluster(Network(0, 0), Network(0, 0)), "sign", 2).seconds == max(8 + 3, 7 + 3 + 2) + 2
    )


def test_all_options_of_the_cnn_are_measured():
    found = measure(rounds=1)
    assert tuple(found.options) == MEASURED and found.compute_s > 0 and found.options["fp32"].compress_s == 0
    [bucket] = found.buckets
    assert sum(map(math.prod, bucket.shapes)) == 431_080
    assert sorted(bucket.shapes) == sorted(CNN)
    assert not any(times.buckets for times in found.options.values())
    assert 0 < bucket.ready_s <= found.compute_s


def test_what_is_gathered_whole_is_merged_for_each_rank():
    merging = [option for option in MEASURED if merges(option, CNN)]
    assert merging == ["sign", "sparseTopK:0.01", "dgc:0.001"]
    assert merges("hierarchical:sign", CNN) and not merges("hierarchical:int8", CNN)


@pytest.fixture
def two_groups(monkeypatch):
    """A model whose gradients fp32 sends in one message, and sparse schemes in two."""

    def make(name):
        return Classifier([layer.Flatten(), layer.Linear(2700), layer.ReLU(), layer.Linear(10)])

    assert THRESHOLD < 784 * 2700
    monkeypatch.setattr(measuring, "make_model", make)
    monkeypatch.setattr(measuring, "WARM_UP", 0)
    return Workload("two groups", 2)


def test_predicted_bytes_are_those_sent_where_options_group_gradients_differently(two_groups):
    cluster = Cluster(Network(0, 0), Network(0, 0))
    options = ("fp32", "fp16", "powerSGD:4", "int8", "sign", "dgc:0.001", "sparseTopK:0.02:values=fp16")
    alone = {option: Alone(two_groups, option, 3, rank=2) for option in options}
    times = {option: [one.time_step()] for option, one in alone.items()}
    sent = {option: one.training.dist.bytes_sent for option, one in alone.items()}
    found = calibration_of(tuple(alone), alone, times, min, "", size=3)
    assert {option: predict(found, cluster, option, 3).sent for option in alone} == sent
    selective = {option for option in alone if found.options[option].buckets}
    assert selective == set(options[3:])
    [large, rest] = found.options["dgc:0.001"].buckets
    assert large.shapes == ((784, 2700),) and rest.shapes == ((10,), (2700, 10), (2700,))
    assert found.buckets == (BucketShapes(found.buckets[0].ready_s, (*rest.shapes, *large.shapes)),)
