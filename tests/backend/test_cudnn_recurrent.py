# SPDX-License-Identifier: Apache-2.0
"""Recurrent layers on CUDA: cuDNN's calls, its order of weights, lengths, alignment. Without a GPU on the stand-in."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from singa_lite import _native
from singa_lite.backend.cpu import NumpyBackend
from singa_lite.backend.recurrent import GATES, RnnConfig
from singa_lite.config import state
from singa_lite.errors import DeviceError
from tests.devices import no_gpu, standin_cudnn
from tests.slow_cases import slow_but_first

REFERENCE = NumpyBackend()
TOLERANCE = {"float16": 8e-3, "float32": 1e-5, "float64": 1e-12}  # of the largest element
FMA, DEFAULT_MATH, TENSOR_OP = 3, 0, 1  # cuDNN's numbers

pytestmark = [
    pytest.mark.skipif(_native.load("_cudnn")[0] is None, reason="_cudnn is not built on this platform"),
    *([] if no_gpu() else [pytest.mark.gpu]),
]


def calls(counters: ctypes.CDLL, name: str) -> int:
    return int(counters.standin_cudnn_calls(name.encode()))


def compute(
    backend: Any, arrays: dict[str, np.ndarray], options: dict[str, Any], copy_to: Any = None
) -> dict[str, np.ndarray]:
    """All outputs of a forward pass and of its gradient, as float64; ``copy_to`` copies an array to the backend."""
    put = copy_to or backend.asarray
    num_states = 2 if options["mode"] == "lstm" else 1
    x, w, *states = (put(arrays[name]) for name in ("x", "w", "h0", "c0")[: 2 + num_states])
    y, last = put(np.zeros_like(arrays["dy"])), [put(np.zeros_like(arrays["h0"])) for _ in states]
    reserve = backend.empty((backend.recurrent_reserve_bytes(x.shape, x.dtype, **options),), "uint8")
    backend.run("recurrent", x, w, *states, out=(y, *last, reserve), **options)
    alone = [put(np.full_like(arrays["dy"], 9)), *(put(np.zeros_like(arrays["h0"])) for _ in states)]
    backend.run("recurrent", x, w, *states, out=tuple(alone), **options)
    dy, *dlast = (put(arrays[name]) for name in ("dy", "dhy", "dcy")[: 1 + num_states])
    dw, dx = put(np.full_like(arrays["w"], 9)), put(np.full_like(arrays["x"], 9))
    dstates = [put(np.full_like(arrays["h0"], 9)) for _ in states]
    out = (dw, *dstates, reserve, dx)
    backend.run("recurrent_backward", dy, *dlast, x, w, *states, y, out=out, **options)
    named = {"y": y, "hy": last[0], "cy": last[-1], "dw": dw, "dx": dx, "dh0": dstates[0], "dc0": dstates[-1]}
    named.update({"y alone": alone[0], "cy alone": alone[-1]})
    return {name: backend.to_numpy(array).astype("float64") for name, array in named.items()}


def arrays_for(config: RnnConfig, steps: int, batch: int, dtype: str, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    width = config.num_directions * config.hidden_size
    shapes = {"x": (steps, batch, config.input_size), "w": (config.num_weights,), "dy": (steps, batch, width)}
    shapes.update(dict.fromkeys(("h0", "c0", "dhy", "dcy"), (config.num_cells, batch, config.hidden_size)))
    return {name: (0.6 * rng.standard_normal(shape)).astype(dtype) for name, shape in shapes.items()}


def check(
    backend: Any,
    config: RnnConfig,
    steps: int,
    batch: int,
    lengths: Any = None,
    dtype: str = "float64",
    copy_to: Any = None,
) -> None:
    """All results against numpy's in float64 on the same values."""
    arrays = arrays_for(config, steps, batch, dtype, steps + 10 * batch)
    options = {
        name: getattr(config, name) for name in ("mode", "hidden_size", "num_layers", "bidirectional", "bias")
    }
    options["lengths"] = lengths
    actual = compute(backend, arrays, options, copy_to)
    expected = compute(REFERENCE, {name: a.astype("float64") for name, a in arrays.items()}, options)
    for name, right in expected.items():
        scale = max(1.0, float(np.abs(right).max(initial=0)))
        np.testing.assert_allclose(
            actual[name] / scale, right / scale, atol=TOLERANCE[dtype], rtol=0, err_msg=name
        )


@st.composite
def configs(draw: Any) -> tuple[RnnConfig, int, int, Any]:
    """A stack, steps, batch and lengths."""
    config = RnnConfig(
        draw(st.sampled_from(sorted(GATES))),
        draw(st.integers(1, 3)),
        draw(st.integers(1, 3)),
        draw(st.integers(1, 3)),
        draw(st.booleans()),
        draw(st.booleans()),
    )
    steps, batch = draw(st.integers(0, 4)), draw(st.integers(0, 3))
    lengths = None
    if steps and batch and draw(st.booleans()):
        lengths = tuple(draw(st.lists(st.integers(1, steps), min_size=batch, max_size=batch)))
    return config, steps, batch, lengths


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=configs(), dtype=st.sampled_from(list(TOLERANCE)))
def test_recurrent_layers_equal_numpys(backend: Any, case: Any, dtype: str) -> None:
    check(backend, *case, dtype=dtype)


@pytest.mark.parametrize("mode", sorted(GATES))
@pytest.mark.parametrize("bias", [True, False])
def test_another_order_of_weights_in_cudnn_changes_nothing(
    counters: ctypes.CDLL, backend: Any, mode: str, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(backend, RnnConfig(mode, 3, 2, 2, True, bias), 3, 2)
    [plan] = backend._plans.values()
    assert plan.pieces == []  # a parameter is passed to cuDNN as it is
    monkeypatch.setenv("SINGA_LITE_CUDNN_LIB", str(standin_cudnn("-DSTANDIN_RNN_GAP=3")))
    other = type(backend)(0)
    check(other, RnnConfig(mode, 3, 2, 2, True, bias), 3, 2)
    [plan] = other._plans.values()
    assert len(plan.pieces) == 2 * 2 * 2 * GATES[mode] * (2 if bias else 1)


def test_arrays_that_are_not_aligned_are_copied(backend: Any) -> None:
    def odd(array: np.ndarray) -> Any:
        placed = backend.asarray(np.append(np.zeros(1, array.dtype), array))[1:].reshape(array.shape)
        assert placed.data.ptr % 16
        return placed

    check(backend, RnnConfig("lstm", 3, 2, 2, True), 3, 2, copy_to=odd)
    check(backend, RnnConfig("gru", 3, 2, 2, True), 3, 2, (1, 2), copy_to=odd)


def step(backend: Any, dtype: str = "float32", batch: int = 2, lengths: Any = None) -> None:
    config = RnnConfig("lstm", 3, 2)
    options = {"mode": "lstm", "hidden_size": 2, "num_layers": 1, "bidirectional": False, "bias": True}
    compute(backend, arrays_for(config, 3, batch, dtype, 0), {**options, "lengths": lengths})


def test_tf32_is_used_only_where_it_is_allowed(
    counters: ctypes.CDLL, backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for allowed, dtype, math in (
        (False, "float32", FMA),
        (True, "float32", DEFAULT_MATH),
        (False, "float32", FMA),
        (False, "float16", TENSOR_OP),
        (False, "float64", DEFAULT_MATH),
    ):
        monkeypatch.setattr(state, "allow_tf32", allowed)
        step(backend, dtype)
        assert counters.standin_cudnn_recurrent_math() == math


def test_a_plan_is_made_once_for_each_shape_and_set_of_lengths(counters: ctypes.CDLL, backend: Any) -> None:
    before = calls(counters, "cudnnCreateRNNDescriptor")
    for batch, lengths in ((2, None), (3, None), (2, None), (2, (1, 3)), (2, (3, 3)), (2, (1, 3)), (3, None)):
        step(backend, batch=batch, lengths=lengths)
    assert calls(counters, "cudnnCreateRNNDescriptor") - before == 3  # (3, 3) is no set of its own


def test_descriptors_are_given_back(counters: ctypes.CDLL, all_given_back: None, backend: Any) -> None:
    before, other = counters.standin_cudnn_live(), type(backend)(0)
    step(other)
    assert counters.standin_cudnn_live() == before + 6


@slow_but_first(
    "call",
    [
        "cudnnCreateRNNDescriptor",
        "cudnnRNNForward",
        "cudnnCreateRNNDataDescriptor",
        "cudnnCreateDropoutDescriptor",
        "cudnnSetDropoutDescriptor",
        "cudnnSetRNNDescriptor_v8",
        "cudnnSetRNNDataDescriptor",
        "cudnnSetTensorNdDescriptor",
        "cudnnGetRNNWeightSpaceSize",
        "cudnnGetRNNWeightParams",
        "cudnnGetRNNTempSpaceSizes",
        "cudnnRNNBackwardData_v8",
        "cudnnRNNBackwardWeights_v8",
    ],
    count=3,
)
def test_every_failing_call_is_reported_with_its_text(
    all_given_back: None, backend: Any, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STANDIN_CUDNN_FAIL", call)
    with pytest.raises(DeviceError, match=r"STATUS \(5000\): as the test wished"):
        step(type(backend)(0))


def test_an_error_names_the_call_and_the_sizes(
    counters: ctypes.CDLL, backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STANDIN_CUDNN_FAIL", "cudnnRNNForward")
    with pytest.raises(
        DeviceError, match=r"cudnnRNNForward for float32 lstm x \(3, 2, 3\) hidden 2 layers 1: "
    ):
        step(backend)


def test_sequences_longer_than_cudnn_supports_raise(counters: ctypes.CDLL, backend: Any) -> None:
    with pytest.raises(
        DeviceError, match=r"cudnnSetRNNDataDescriptor of x for float32 tanh x \(65536, 1, 1\)"
    ):
        backend.recurrent_reserve_bytes(
            (65536, 1, 1), "float32", mode="tanh", hidden_size=1, num_layers=1, bidirectional=False, bias=True
        )
