# SPDX-License-Identifier: Apache-2.0
"""The invariants of every scheme, against float64, on 1, 2 and 3 ranks with different data on each."""

import gc
import math
import warnings

import numpy as np
import pytest

from singa_lite import autograd, device, layer, model, opt
from singa_lite.comm.base import World
from singa_lite.comm.local import LocalCommunicator
from singa_lite.comm.work import ring_bytes
from singa_lite.errors import CheckpointError, DTypeError, OptionError
from singa_lite.sync import find_schemes
from singa_lite.sync.buckets import Bucket
from singa_lite.tensor import Tensor, to_numpy
from tests.ranks import run_ranks
from tests.slow_cases import slow_but_first
from tests.sync.by_hand import sparse_bytes
from tests.sync.make_scheme import begin, make_scheme
from tests.sync.training import made, steps

SHAPES = [(3, 5), (40,), (7, 2, 2), (1,), (11,)]
TOTAL = sum(math.prod(shape) for shape in SHAPES)
LARGE = 1 << 30
SIZES = [1, 2, 3]
# scheme -> options that make it equal plain averaging, or None where none do
NEUTRAL = {
    "fp32": {},
    "fp16": None,
    "bf16": None,
    "int8": None,  # test_int8.py
    "hierarchical": {"outer": "fp32"},
    "partialUpdate": None,
    "sparseTopK": {"spars": 1.0},
    "sparseThreshold": {"spars": 0.0},
    "localSGD": {"start": 2},
    "sign": None,
    "randomK": {"density": 1.0},
    "dgc": {"density": 1.0, "mask": False},
    "powerSGD": {"rank": 7, "rate": 0.0},
}


def launch(function, size, *args):
    return run_ranks(function, size, *args, transport="local" if size == 1 else "shm")


def make_params():
    return [
        Tensor(data=np.full(shape, 0.5, np.float32), stores_grad=True, name=f"p{i}")
        for i, shape in enumerate(SHAPES)
    ]


def gradients_of(rank, step, scale=1.0):
    rng = np.random.default_rng([7, rank, step])
    return [(scale * rng.standard_normal(shape)).astype(np.float32) for shape in SHAPES]


def run_step(scheme, params, gradients, options):
    """One step; {param name: gradient to apply} as numpy copies."""
    begin(scheme, **options)
    for param, gradient in zip(params, gradients, strict=True):
        scheme.add_gradient(param, Tensor(data=gradient))
    return {param.name: to_numpy(grad) for param, grad in scheme.finish()}


def flat(parts):
    return np.concatenate([np.ravel(part) for part in parts])


def in_order(result):
    return flat([result[f"p{i}"] for i in range(len(SHAPES))])


def residual_of(scheme, params):
    states = scheme.state_dict({param: param.name for param in params})
    return flat([states.get(f"p{i}:residual", np.zeros(shape, np.float32)) for i, shape in enumerate(SHAPES)])


def several_steps(communicator, name, options, threshold, bucket_bytes, num_steps, scale):
    """Per step (incoming gradient, result, residual afterwards, bytes sent, payload), all flat."""
    scheme = make_scheme(name, communicator, threshold, bucket_bytes)
    params = make_params()
    log = []
    for step in range(num_steps):
        gradients = gradients_of(communicator.rank, step, scale)
        before = communicator.traffic.copy()
        result = run_step(scheme, params, gradients, options)
        scheme.end(params)
        sent = communicator.traffic.since(before)
        log.append(
            (
                flat(gradients),
                in_order(result),
                residual_of(scheme, params),
                sent.bytes_sent,
                sent.bytes_payload,
            )
        )
    return log


def test_every_scheme_of_the_folder_is_tested_here():
    assert {scheme.names[0] for scheme in find_schemes().values()} == set(NEUTRAL)
    assert (
        find_schemes()["plain"] is find_schemes()["fp32"] and find_schemes()["half"] is find_schemes()["fp16"]
    )


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", [name for name, options in NEUTRAL.items() if options is not None])
def test_a_neutral_knob_gives_the_mean_and_the_same_bits_everywhere(name, size):
    logs = launch(several_steps, size, name, NEUTRAL[name], LARGE, LARGE, 2, 1.0)
    for step in range(2):
        mean = np.mean([log[step][0].astype(np.float64) for log in logs], axis=0)
        for log in logs:
            np.testing.assert_allclose(log[step][1], mean, rtol=1e-5, atol=1e-6)
            assert log[step][1].tobytes() == logs[0][step][1].tobytes()


def test_fp32_on_one_rank_changes_no_bit():
    [log] = launch(several_steps, 1, "fp32", {}, LARGE, LARGE, 1, 1.0)
    assert log[0][0].tobytes() == log[0][1].tobytes()


@pytest.mark.parametrize("name", ["fp32", "bf16", "sparseTopK", "sparseThreshold"])
def test_bucket_bytes_never_change_a_result(name):
    options = {"spars": 0.3} if name.startswith("sparse") else {}
    logs = [
        launch(several_steps, 2, name, options, 20, bucket_bytes, 2, 1.0)[1]
        for bucket_bytes in (4, 100, LARGE)
    ]
    for other in logs[1:]:
        assert all(a[1].tobytes() == b[1].tobytes() for a, b in zip(logs[0], other, strict=True))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scale", [1.0, 1e30, 1e-30])
def test_fp16_keeps_a_relative_error_below_a_thousandth(size, scale):
    logs = launch(several_steps, size, "fp16", {}, LARGE, LARGE, 1, scale)
    incoming = np.array([log[0][0] for log in logs], np.float64)
    mean, largest = incoming.mean(axis=0), np.abs(incoming).max()
    # against the sum of magnitudes: what cancels has no meaningful relative error
    bound = 1e-3 * np.abs(incoming).mean(axis=0)
    assert np.abs(incoming[np.abs(incoming) > 0]).min() > size * 2.0**-27 * largest
    for log in logs:
        assert np.all(np.abs(log[0][1] - mean) <= bound)
        assert log[0][1].tobytes() == logs[0][0][1].tobytes()


def mean_of(communicator, name, values):
    scheme = make_scheme(name, communicator, LARGE, LARGE)
    param = Tensor((len(values),), name="p")
    begin(scheme)
    scheme.add_gradient(param, Tensor(data=np.array(values, np.float32)))
    [(_, mean)] = scheme.finish()
    return to_numpy(mean)


@pytest.mark.parametrize("size", SIZES)
def test_fp16_keeps_small_values_beside_large_ones(size):
    values = np.array([1.0, size * 2.0**-27, -3e-6, 0.0])  # unscaled, float16 has nothing below 6e-8
    for result in launch(mean_of, size, "fp16", values):
        np.testing.assert_allclose(result, values, rtol=1e-3)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_fp16_passes_nan_and_infinity_on(bad):
    for result in launch(mean_of, 2, "fp16", np.array([1.0, bad])):
        assert not np.isfinite(result[1])


def half_mean(communicator, values):
    """The fp16 mean of float16 gradients, and the bytes it took."""
    scheme = make_scheme("fp16", communicator, LARGE, LARGE)
    begin(scheme)
    mine = values[communicator.rank].astype(np.float16)
    scheme.add_gradient(Tensor(mine.shape, dtype="float16", name="w"), Tensor(data=mine))
    [(_, mean)] = scheme.finish()
    return to_numpy(mean), communicator.traffic.bytes_payload


@pytest.mark.parametrize("size", SIZES)
def test_fp16_sends_float16_gradients_as_they_are(size):
    rng = np.random.default_rng(4)
    values = rng.uniform(-60000, 60000, (3, 50)).astype(np.float16)  # their sum is no float16
    for mean, payload in launch(half_mean, size, values):
        assert mean.dtype == np.float16 and payload == 100
        np.testing.assert_allclose(mean, values[:size].astype(np.float64).mean(axis=0), rtol=1e-3, atol=0.1)


def test_fp16_refuses_float64_gradients():
    scheme = make_scheme("fp16", LocalCommunicator(World()), LARGE, LARGE)
    begin(scheme)
    scheme.add_gradient(Tensor((2,), dtype="float64", name="w"), Tensor((2,), dtype="float64"))
    with pytest.raises(
        DTypeError, match="w is float64; only float32 and float16 gradients are sent as float16"
    ):
        list(scheme.finish())


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scale", [1.0, 1e35, 1e-30])
def test_bf16_is_off_by_at_most_two_roundings(size, scale):
    logs = launch(several_steps, size, "bf16", {}, LARGE, LARGE, 2, scale)
    for step in range(2):
        incoming = np.array([log[step][0] for log in logs], np.float64)
        bound = 2.0 ** (-8 if size == 1 else -7) * np.abs(incoming).mean(axis=0)
        for log in logs:
            error = np.abs(log[step][1] - incoming.mean(axis=0))
            assert np.all(error <= bound) and error.max() > 0  # it does round, on one rank as well
            assert not (log[step][1].view(np.uint32) & 0xFFFF).any()
            assert log[step][1].tobytes() == logs[0][step][1].tobytes()


@pytest.mark.parametrize("size", SIZES)
def test_bf16_keeps_any_size_beside_any_other(size):
    values = np.array([3e38, 1e-38, -1.0, 0.0, np.inf, -np.inf, np.nan]) / [size, *[1] * 6]
    for result in launch(mean_of, size, "bf16", values):
        np.testing.assert_allclose(result, values, rtol=2.0**-8)


def test_bf16_refuses_float64_gradients():
    scheme = make_scheme("bf16", LocalCommunicator(World()), LARGE, LARGE)
    begin(scheme)
    scheme.add_gradient(Tensor((2,), dtype="float64", name="w"), Tensor((2,), dtype="float64"))
    with pytest.raises(DTypeError, match="w is float64; only float32 gradients are sent as bfloat16"):
        list(scheme.finish())


def changing_groups(communicator, name, options, steps):
    """Sums over steps with other parameters each, of gradients and of results; residuals; what the buckets hold."""
    gc.collect()
    others = {id(each) for each in gc.get_objects() if isinstance(each, Bucket)}
    scheme = make_scheme(name, communicator, LARGE, LARGE)
    params = [Tensor(shape, name=f"p{number}") for number, shape in enumerate(SHAPES)]
    given, applied = ({param.name: np.zeros(param.shape) for param in params} for _ in range(2))
    choice, rng = np.random.default_rng(5), np.random.default_rng(communicator.rank)
    for _ in range(steps):
        chosen = [param for param in params if choice.random() < 0.5] or params
        begin(scheme, **options)
        for param in chosen:
            gradient = rng.standard_normal(param.shape).astype(np.float32)
            given[param.name] += gradient
            scheme.add_gradient(param, Tensor(data=gradient))
        for param, grad in scheme.finish():
            applied[param.name] += to_numpy(grad)
        scheme.end(chosen)
    gc.collect()
    buckets = [each for each in gc.get_objects() if isinstance(each, Bucket) and id(each) not in others]
    residuals = scheme.state.state_dict({param: param.name for param in params})
    return given, applied, residuals, sum(bucket.flat.size for bucket in buckets)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("fp32", {}),
        ("sparseTopK", {"spars": 0.1}),
        ("sign", {}),
        ("dgc", {"momentum": False, "density": 0.1, "warmup": 0}),
        ("powerSGD", {"rank": 1, "rate": 1.0}),
        ("randomK", {}),
    ],
)
def test_buckets_of_parameters_that_change_from_step_to_step_are_dropped_and_residuals_stay(name, options):
    logs = launch(changing_groups, 3, name, options, 60)
    kept = {"powerSGD": "error"}.get(name, "residual")
    for number in range(len(SHAPES)):
        param = f"p{number}"
        exact = np.mean(
            [given[param] - kept_of.get(f"{param}:{kept}", 0) for given, _, kept_of, _ in logs], axis=0
        )
        for _, applied, _, size in logs:
            np.testing.assert_allclose(applied[param], exact, rtol=1e-5, atol=1e-4)
            assert TOTAL <= size <= 5 * TOTAL  # of 31 combinations: 16 * TOTAL


def test_fp16_clips_the_local_gradient():
    [log] = launch(several_steps, 1, "fp16", {"clip_value": 0.25}, LARGE, LARGE, 1, 1.0)
    np.testing.assert_allclose(log[0][1], np.clip(log[0][0], -0.25, 0.25), rtol=1e-3, atol=1e-6)


def groups_of(threshold):
    """SINGA's rule for SHAPES, by hand: flat positions of each group, for thresholds 20 and LARGE."""
    ends = np.cumsum([math.prod(shape) for shape in SHAPES])
    spans = [np.arange(end - math.prod(shape), end) for end, shape in zip(ends, SHAPES, strict=True)]
    if threshold == LARGE:
        return [np.arange(TOTAL)]
    # 40 and 28 are groups of their own, 15 + 1 + 11 exceed 20
    return [spans[1], spans[2], np.concatenate([spans[0], spans[3], spans[4]])]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("threshold", [20, LARGE])
def test_top_k_sends_exactly_the_largest_of_each_group_and_keeps_the_rest(size, threshold):
    logs = launch(several_steps, size, "sparseTopK", {"spars": 0.1}, threshold, LARGE, 4, 1.0)
    residuals = np.zeros((size, TOTAL), np.float32)
    for step in range(4):
        sent = np.zeros((size, TOTAL), np.float32)
        for rank, log in enumerate(logs):
            incoming = log[step][0] + residuals[rank]
            for group in groups_of(threshold):
                k = math.ceil(len(group) / 10)
                chosen = group[np.argsort(-np.abs(incoming[group]), kind="stable")[:k]]
                sent[rank, chosen] = incoming[chosen]
            residuals[rank] = incoming - sent[rank]
            assert log[step][2].tobytes() == residuals[rank].tobytes()
        mean = sent.astype(np.float64).mean(axis=0)
        for log in logs:
            np.testing.assert_allclose(log[step][1], mean, rtol=1e-6, atol=0)
            assert log[step][1].tobytes() == logs[0][step][1].tobytes()


@pytest.mark.parametrize("size", SIZES)
def test_threshold_sends_exactly_what_reaches_it_and_keeps_the_rest(size):
    logs = launch(several_steps, size, "sparseThreshold", {"spars": 1.5}, 20, LARGE, 4, 1.0)
    residuals = np.zeros((size, TOTAL), np.float32)
    for step in range(4):
        incoming = np.array([log[step][0] for log in logs]) + residuals
        sent = np.where(np.abs(incoming) >= 1.5, incoming, np.float32(0))
        residuals = incoming - sent
        mean = sent.astype(np.float64).mean(axis=0)
        for rank, log in enumerate(logs):
            assert log[step][2].tobytes() == residuals[rank].tobytes()
            np.testing.assert_allclose(log[step][1], mean, rtol=1e-6, atol=0)
    assert np.count_nonzero(residuals) > TOTAL / 2  # the test did see both kinds


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("name", "knob"), [("sparseTopK", "spars"), ("sparseThreshold", "spars"), ("dgc", "density")]
)
def test_what_rounding_values_to_float16_loses_is_kept(name, knob, size):
    options = {knob: 1.5 if name == "sparseThreshold" else 0.1, "values": "fp16"}
    if name == "dgc":
        options["momentum"] = False
    logs = launch(several_steps, size, name, options, 20, LARGE, 4, 1.0)
    residuals = np.zeros((size, TOTAL))
    for step in range(4):
        incoming = np.array([log[step][0] for log in logs], np.float64) + residuals
        residuals = np.array([log[step][2] for log in logs], np.float64)
        sent = incoming - residuals
        places = np.abs(sent) > 0.01  # others were not sent; float16 is off by at most 2**-11
        assert 0 < np.count_nonzero(places) < size * TOTAL and np.abs(residuals[places]).max() > 0
        assert np.all(np.abs(residuals[places]) <= 2.0**-11 * np.abs(incoming[places]))
        np.testing.assert_allclose(sent[places], sent[places].astype(np.float16), rtol=1e-6)
        for log in logs:
            np.testing.assert_allclose(log[step][1], sent.mean(axis=0), rtol=1e-5, atol=1e-6)
            assert log[step][1].tobytes() == logs[0][step][1].tobytes()


def test_values_beyond_float16_are_sent_step_by_step_and_what_is_not_finite_once():
    scheme = make_scheme("sparseTopK", LocalCommunicator(World()), LARGE, LARGE)
    param = Tensor((4,), name="p")
    results = []
    for values in ([1e5, np.inf, 0.0, 0.0], [0.0] * 4, [0.0] * 4):
        begin(scheme, spars=0.5, values="fp16")
        scheme.add_gradient(param, Tensor(data=np.array(values, np.float32)))
        results += [to_numpy(mean) for _, mean in scheme.finish()]
        scheme.end([param])
    np.testing.assert_array_equal(results[0], [65504, np.nan, 0, 0])
    np.testing.assert_array_equal(results[1] + results[2], [np.float32(1e5) - 65504, 0, 0, 0])


def four_small_gradients(communicator):
    scheme = make_scheme("sparseThreshold", communicator, LARGE, LARGE)
    param = Tensor((1,), name="p")
    results = []
    for value in (0.4, 0.2, 0.2, 0.4):  # threshold 0.5: nothing, 0.6 fires, nothing, 0.6 fires
        begin(scheme, spars=0.5)
        scheme.add_gradient(param, Tensor(data=np.array([value], np.float32)))
        results += [float(to_numpy(mean)[0]) for _, mean in scheme.finish()]
    return results


def test_small_gradients_fire_when_their_sum_reaches_the_threshold():
    for results in launch(four_small_gradients, 2):
        np.testing.assert_allclose(results, [0, 0.6, 0, 0.6], rtol=1e-6)


@pytest.mark.parametrize("name", ["sparseTopK", "sparseThreshold"])
def test_without_correction_what_is_not_sent_is_dropped(name):
    options = {"spars": 0.1 if name == "sparseTopK" else 1.5, "corr": False}
    [log] = launch(several_steps, 1, name, options, LARGE, LARGE, 3, 1.0)
    for gradient, result, residual, _, _ in log:
        assert not residual.any()
        assert np.all((result == 0) | (result == gradient))


def test_top_k_keeps_no_value_that_is_not_finite():
    scheme = make_scheme("sparseTopK", LocalCommunicator(World()), 0, 1 << 20)
    param = Tensor((6,), name="p")
    values = np.array([np.nan, np.inf, -np.inf, 1, 2, np.nan], np.float32)
    for step, grads in enumerate((values, np.zeros(6, np.float32), np.zeros(6, np.float32))):
        begin(scheme, step, spars=0.3)
        scheme.add_gradient(param, Tensor(data=grads))
        [(_, mean)] = scheme.finish()
        found = to_numpy(mean)
        scheme.end([param])
        expected = [[np.nan, 0, 0, 0, 0, np.nan], [0, 0, 0, 1, 2, 0], np.zeros(6)][step]
        np.testing.assert_array_equal(found, expected)


def test_top_k_always_sends_nan_and_breaks_ties_by_the_lowest_index():
    scheme = make_scheme("sparseTopK", LocalCommunicator(World()), LARGE, LARGE)
    param = Tensor((6,), name="p")
    begin(scheme, spars=0.5)
    scheme.add_gradient(param, Tensor(data=np.array([1, -2, np.nan, 2, 2, 0], np.float32)))
    [(_, mean)] = scheme.finish()
    np.testing.assert_array_equal(to_numpy(mean), [0, -2, np.nan, 2, 0, 0])


def test_k_counts_the_share_as_the_decimal_it_is_written_as():
    communicator = LocalCommunicator(World())
    scheme = make_scheme("sparseTopK", communicator, LARGE, LARGE)
    param = Tensor((100,), name="p")
    for spars, k in [(0.07, 7), (0.071, 8), (1e-9, 1), (1.0, 100)]:  # 0.07 * 100 > 7 in binary
        begin(scheme, spars=spars, corr=False)
        scheme.add_gradient(param, Tensor(data=np.arange(1, 101, dtype=np.float32)))
        [(_, mean)] = scheme.finish()
        assert np.count_nonzero(to_numpy(mean)) == k


@pytest.mark.parametrize("size", [2, 3])
def test_partial_update_averages_one_chunk_a_step_and_leaves_the_others(size):
    for log in zip(*launch(drifting_parameters, size), strict=True):
        averaged, values = log[0][0], np.array([entry[1] for entry in log])
        assert all(entry[0] == averaged for entry in log)
        for number, chunk in enumerate(groups_of(20)):
            equal = all(row[chunk].tobytes() == values[0][chunk].tobytes() for row in values)
            assert equal == (number == averaged)
            expected = np.array([entry[2] for entry in log], np.float64)[:, chunk].mean(axis=0)
            if number == averaged:
                np.testing.assert_allclose(values[0][chunk], expected, rtol=1e-6)


def drifting_parameters(communicator):
    """(chunk, parameters after the average, parameters before it) for four steps of local drift."""
    scheme = make_scheme("partialUpdate", communicator, 20, LARGE)
    params = make_params()
    log = []
    for step in range(4):
        chunk = step % len(groups_of(20))
        gradients = gradients_of(communicator.rank, step)
        applied = run_step(scheme, params, gradients, {})
        assert in_order(applied).tobytes() == flat(gradients).tobytes()  # the local step, untouched
        for param in params:
            param.copy_from_numpy(to_numpy(param) - applied[param.name])
        before = flat([to_numpy(param) for param in params])
        scheme.end(params)
        log.append((chunk, flat([to_numpy(param) for param in params]), before))
    return log


@pytest.mark.parametrize("size", SIZES)
def test_bytes_follow_the_closed_formula(size):
    def sent(name, **options):
        logs = launch(several_steps, size, name, options, 20, LARGE, 1, 1.0)
        assert len({log[0][3:5] for log in logs}) == 1
        return logs[0][0][3:5], logs

    lengths = [len(group) for group in groups_of(20)]
    ks = [math.ceil(length / 10) for length in lengths]
    payload = 4 * TOTAL if size > 1 else 0  # of one rank, nothing is given to a collective
    assert sent("fp32")[0] == (ring_bytes("all_reduce", 4 * TOTAL, size), payload)
    assert sent("fp16")[0] == (
        ring_bytes("all_reduce", 2 * TOTAL, size) + ring_bytes("all_reduce", 4, size),
        2 * TOTAL + 4,
    )
    assert sent("bf16")[0] == (ring_bytes("all_reduce", 2 * TOTAL, size), 2 * TOTAL)
    assert sent("partialUpdate")[0] == (ring_bytes("all_reduce", 4 * lengths[0], size), 4 * lengths[0])
    payload = sum(sparse_bytes(n, k) for n, k in zip(lengths, ks, strict=True))
    assert sent("sparseTopK", spars=0.1)[0] == ((size - 1) * payload, payload)
    payload -= sum(4 * k - 4 * math.ceil(k / 2) for k in ks)
    assert sent("sparseTopK", spars=0.1, values="fp16")[0] == ((size - 1) * payload, payload)
    measured, logs = sent("sparseThreshold", spars=1.5)
    most = [max(np.count_nonzero(np.abs(log[0][0][group]) >= 1.5) for log in logs) for group in groups_of(20)]
    payload = sum(8 + sparse_bytes(n, count) for n, count in zip(lengths, most, strict=True))
    assert measured == ((size - 1) * payload, payload)


def test_ring_bytes_by_hand():
    assert ring_bytes("all_reduce", 900, 3) == 1200
    assert ring_bytes("all_gather", 900, 3) == 1800
    assert ring_bytes("reduce_scatter", 900, 3) == 600
    assert ring_bytes("all_reduce", 4, 3) == 6  # 5.33, rounded up
    assert ring_bytes("all_reduce", 900, 1) == 0


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("sparseTopK", {"spars": 0.0}),
        ("sparseTopK", {"spars": 1.5}),
        ("sparseTopK", {"spars": float("nan")}),
        ("sparseThreshold", {"spars": -1.0}),
        ("sparseThreshold", {"spars": float("nan")}),
        ("fp16", {"clip_value": 0.0}),
        ("sparseTopK", {"values": "fp8"}),
        ("sparseThreshold", {"values": 16}),
        ("dgc", {"values": None}),
        ("localSGD", {"period": 0}),
        ("localSGD", {"period": 1.5}),
        ("localSGD", {"start": -1}),
        ("randomK", {"density": 0.0}),
        ("randomK", {"density": float("nan")}),
        ("dgc", {"density": 0.0}),
        ("dgc", {"density": 1.5}),
        ("dgc", {"warmup": -1}),
        ("dgc", {"warmup": 0.5}),
        ("dgc", {"clip": 0.0}),
        ("dgc", {"clip": float("nan")}),
    ],
)
def test_options_out_of_range_raise(name, options):
    with pytest.raises(OptionError, match=name):
        find_schemes()[name].Options(**options)


def resumed_run(communicator, name, options, stop):
    """The last result of five steps, with the state saved after ``stop`` and loaded into a new scheme."""
    scheme, params = make_scheme(name, communicator, 20, LARGE), make_params()
    names = {param: param.name for param in params}
    for step in range(5):
        if step == stop:
            states = scheme.state_dict(names)
            scheme = make_scheme(name, communicator, 20, LARGE)
            scheme.load_state_dict(states, names)
            assert {k: v.tobytes() for k, v in scheme.state_dict(names).items()} == {
                k: v.tobytes() for k, v in states.items()
            }
        result = run_step(scheme, params, gradients_of(communicator.rank, step), options)
        scheme.end(params)
    return in_order(result).tobytes(), scheme.counters()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("sparseTopK", {"spars": 0.1}),
        ("sparseThreshold", {"spars": 1.5}),
        ("partialUpdate", {}),
    ],
)
def test_a_scheme_goes_on_bit_for_bit_from_its_saved_state(name, options):
    straight = launch(resumed_run, 2, name, options, None)
    assert launch(resumed_run, 2, name, options, 3) == straight


def test_a_state_that_fits_no_parameter_raises():
    scheme = make_scheme("sparseTopK", LocalCommunicator(World()), LARGE, LARGE)
    with pytest.raises(CheckpointError, match="fits no parameter"):
        scheme.load_state_dict({"gone": np.zeros(3)}, {})


class Listening(LocalCommunicator):
    """Notes what is reduced, in order."""

    def __init__(self) -> None:
        super().__init__(World())
        self.recorded: list[str] = []

    def _start(self, operation, *arrays):
        self.recorded.append(f"{operation.op} {operation.name}")
        return super()._start(operation, *arrays)


def test_fp16_does_not_wait_for_the_bucket_before_to_agree_on_a_scale():
    """On a GPU one stream does both, so a bucket's largest value must not queue behind the sum before it."""
    communicator = Listening()
    scheme = make_scheme("fp16", communicator, 10, 8)
    begin(scheme)
    for name in "abc":
        param = Tensor(data=np.ones(4, np.float32), stores_grad=True, name=name)
        scheme.add_gradient(param, Tensor(data=np.full(4, 3.0, np.float32)))
    means = [to_numpy(mean).tolist() for _, mean in scheme.finish()]
    assert means == [[3.0] * 4] * 3
    assert [text.replace("fp16:clip_value=None: ", "") for text in communicator.recorded] == [
        "max largest of a",
        "max largest of b",
        "mean a",
        "max largest of c",
        "mean b",
        "mean c",
    ]


# ---- steps with other parameters each time ----------------------------------------------------------------


class Dropping(model.Model):
    """Each step leaves out layers that all ranks have drawn alike, as stochastic depth does."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = [layer.Linear(4) for _ in range(5)]
        for number, block in enumerate(self.blocks):
            setattr(self, f"block{number}", block)
        self.used = range(5)

    def forward(self, x: Tensor) -> Tensor:
        for number in self.used:
            x = x + self.blocks[number](x)
        return x

    def train_one_batch(self, x: Tensor) -> Tensor:
        loss = autograd.mse_loss(self.forward(x), x)
        self.optimizer(loss)
        return loss


def steps_until_equal(communicator, dist_option, use_graph):
    """For each weight, after how many of 40 steps in turn it was equal on all ranks."""
    device.get_default_device().SetRandSeed(5)
    net = Dropping()
    dist = opt.DistOpt(
        opt.SGD(lr=0.01), communicator=communicator, dist_option=dist_option, threshold=1, bucket_bytes=64
    )
    net.set_optimizer(dist)
    net.compile([Tensor(data=np.ones((2, 4)))], use_graph=use_graph)
    choice, equal = np.random.default_rng(2), np.zeros(5, int)
    for step in range(40):
        net.used = tuple(np.flatnonzero(choice.random(5) < 0.7).tolist()) or (0,)
        own = np.random.default_rng((communicator.rank, step))
        net(Tensor(data=0.5 * own.standard_normal((2, 4))))
        assert all(np.isfinite(to_numpy(block.W)).all() for block in net.blocks)
        weights = [to_numpy(block.W).tobytes().hex() for block in net.blocks]
        everyone = communicator.all_gather_object(weights)
        equal += [len(set(each)) == 1 for each in zip(*everyone, strict=True)]
    return equal.tolist()


@slow_but_first("use_graph", [True, False])
@pytest.mark.parametrize(("dist_option", "least"), [("localSGD:4", 7), ("partialUpdate", 2)])
def test_a_parameter_is_averaged_in_its_turn_whichever_others_a_step_has(dist_option, least, use_graph):
    results = run_ranks(steps_until_equal, 3, dist_option, use_graph)
    assert results[0] == results[1] == results[2]
    assert min(results[0]) >= least, results[0]


def trained_dropping(communicator, dist_option, use_graph, folder):
    """Weights after 60 steps with other layers each, residuals, records, and what the buckets hold in weights."""
    gc.collect()
    others = {id(each) for each in gc.get_objects() if isinstance(each, Bucket)}
    device.get_default_device().SetRandSeed(5)
    net = Dropping()
    dist = opt.DistOpt(opt.SGD(lr=0.01), communicator=communicator, dist_option=dist_option)
    net.set_optimizer(dist)
    net.compile([Tensor(data=np.ones((2, 4)))], use_graph=use_graph)
    choice = np.random.default_rng(2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of replays that may have given wrong results
        for step in range(60):
            net.used = tuple(np.flatnonzero(choice.random(5) < 0.7).tolist()) or (0,)
            own = np.random.default_rng((communicator.rank, step))
            net(Tensor(data=0.5 * own.standard_normal((2, 4))))
            if step == 30:  # records are compared with the steps behind a save
                net.save_states(folder / f"{use_graph}-{communicator.rank}.zip")
    gc.collect()
    buckets = [each for each in gc.get_objects() if isinstance(each, Bucket) and id(each) not in others]
    num_layers = sum(bucket.flat.size for bucket in buckets) / 20
    num_records = len(net.graph_info()) if use_graph else 0
    weights = [to_numpy(block.W) for block in net.blocks]
    return weights, dist.get_states(), num_records, num_layers


@slow_but_first("dist_option", ["sparseTopK:0.2", "dgc:0.2:momentum=0", "powerSGD:1:rate=1", "sign"])
def test_recorded_steps_with_other_layers_each_keep_residuals_as_eager_ones_do(dist_option, tmp_path):
    eager, recorded = (
        run_ranks(trained_dropping, 3, dist_option, graph, tmp_path) for graph in (False, True)
    )
    for rank in range(3):
        for mine, theirs, first in zip(eager[rank][0], recorded[rank][0], recorded[0][0], strict=True):
            np.testing.assert_allclose(theirs, mine, rtol=1e-4, atol=1e-6)
            assert theirs.tobytes() == first.tobytes()
        residuals = [key for key in eager[rank][1] if key.startswith("sync/") and "counter" not in key]
        assert len(residuals) >= 10  # of a weight and a bias in each of five layers
        for key in residuals:
            np.testing.assert_allclose(recorded[rank][1][key], eager[rank][1][key], rtol=1e-3, atol=1e-5)
        assert recorded[rank][2] > 5 and max(eager[rank][3], recorded[rank][3]) <= 25


def test_a_run_that_resumes_keeps_the_residuals_of_an_update_that_fails_behind_its_exchange():
    """In the run that does not, the group of that step has copies; in the other one it has the arrays themselves."""

    def residuals(steps, restored=None):
        scheme = make_scheme("sparseTopK", LocalCommunicator(World()), LARGE, LARGE)
        if restored is not None:
            scheme.load_state_dict(restored, names)
        for chosen, seed in steps:
            begin(scheme, spars=0.1)
            for param in chosen:
                scheme.add_gradient(param, Tensor(data=np.random.default_rng(seed).standard_normal(10)))
            list(scheme.finish())
            if seed != 3:  # in that step the optimizer's update has raised
                scheme.end(list(chosen))
        return scheme.state_dict(names)

    a, b = Tensor((10,), name="a"), Tensor((10,), name="b")
    names, first, then = {a: "a", b: "b"}, [((a, b), 0), ((a,), 1)], [((a,), 2), ((a,), 3)]
    straight, resumed = residuals([*first, *then]), residuals(then, residuals(first))
    assert straight["a:residual"].tobytes() == resumed["a:residual"].tobytes()


@pytest.mark.parametrize("use_graph", [False, True])
@pytest.mark.parametrize("name", sorted(find_schemes()))
def test_a_parameter_that_changes_its_dtype_is_sent_or_refused(name: str, use_graph: bool) -> None:
    options = {"powerSGD": "powerSGD:1", "randomK": "randomK:1"}
    net = made(LocalCommunicator(World()), use_graph, options.get(name, name))
    steps(net, 0, 0, 2)
    for layers in (net.first, net.second):
        layers.W.to_type("float64")
        layers.b.to_type("float64")
    wide = [Tensor(data=np.ones(shape), dtype="float64") for shape in ((4, 5), (4, 3))]
    try:
        net(*wide)
    except DTypeError as error:
        assert "float64" in str(error)
    else:
        assert not [key for key in net.optimizer.get_states() if key.endswith(":residual")]
    autograd.training = False


@pytest.mark.parametrize("option", ["fp32", "fp16", "partialUpdate", "localSGD:2", "sparseThreshold:0.1"])
@pytest.mark.parametrize("change", ["dtype", "shape"])
def test_one_of_two_parameters_changes(option: str, change: str) -> None:
    """The others are there as before; what is sent in parts that are kept is cut anew."""
    autograd.training = True
    first, second = (Tensor(data=np.ones(2, np.float32), stores_grad=True, name=name) for name in "ab")
    dist = opt.DistOpt(opt.SGD(0.125), communicator=LocalCommunicator(World()), dist_option=option)
    dist.prepare({"a": first, "b": second}, {})

    def step() -> None:
        sums = [autograd.cast(autograd.reduce_sum(param), "float64") for param in (first, second)]
        dist(autograd.add(*sums))

    step()
    if change == "dtype":
        first.to_type("float64")
    else:
        first.reset_like(Tensor((3,)))
        first.set_value(0.875)
    if option == "sparseThreshold:0.1" or (option, change) == ("fp16", "dtype"):
        with pytest.raises(DTypeError, match="a is float"), warnings.catch_warnings(record=True):
            step()
        return
    step()
    step()
    for param, size in ((first, 2 + (change == "shape")), (second, 2)):
        np.testing.assert_array_equal(to_numpy(param), np.full(size, 0.625))
