# SPDX-License-Identifier: Apache-2.0
"""Kernels of the CPU on bfloat16 arrays, against float64 on the same rounded inputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from singa_lite.backend.base import Backend
from singa_lite.backend.cpu import CpuBackend, NumpyBackend
from singa_lite.backend.formulas import FORMULAS, UPDATES
from singa_lite.dtypes import bfloat16, is_float, is_narrow
from tests.backend.test_kernels import SAMPLES, Sample

# of exchange and updates, which have float32 gradients, and those without a float array
NEVER = {
    *UPDATES, "top_k", "threshold_count", "threshold_select", "scatter_add", "scatter_fill", "max_abs",
    "power_of_two_scale", "orthonormal_rows", "unit_rows", "low_rank_sum", "low_rank_rest", "pack_signs", "add_signs",
    "pack_indices", "unpack_indices",
}  # fmt: skip
USED = [s for s in SAMPLES if s.kernel not in NEVER and "int8" not in s.kernel]
# so many inputs and outputs are bfloat16, those behind them float32; others: all
NARROW = {
    "batchnorm_2d_train": (1, 1),
    "batchnorm_2d_infer": (1, 1),
    "batchnorm_2d_backward": (2, 1),
    "layer_norm": (1, 1),
    "layer_norm_backward": (2, 1),
    "conv2d": (2, 1),
    "conv2d_backward_weight": (2, 0),
}
ROUNDING = 2.0**-8  # relative to the largest result: every output is rounded once, by at most 2**-9
BACKENDS = [NumpyBackend(), CpuBackend()]


def rounded(arrays: tuple[Any, ...], count: int) -> list[np.ndarray]:
    """Return float arrays as bfloat16, those behind the first ``count`` as float32."""
    return [
        array.astype(bfloat16 if index < count else "f") if array.dtype.kind == "f" else array
        for index, array in enumerate(map(np.asarray, arrays))
    ]


def widened(arrays: list[np.ndarray]) -> list[np.ndarray]:
    return [array.astype(np.float64) if is_float(array.dtype) else array.copy() for array in arrays]


def run(backend: Backend, sample: Sample, inputs: list[np.ndarray], out: list[np.ndarray]) -> None:
    attributes = sample.attributes
    backend.run(sample.kernel, *inputs, out=tuple(out) if len(out) > 1 else out[0], **attributes)


@pytest.mark.parametrize("backend", BACKENDS, ids=["numpy", "native"])
@pytest.mark.parametrize("sample", USED, ids=[f"{n}-{s.kernel}" for n, s in enumerate(USED)])
def test_a_kernel_rounds_its_float32_result_once(sample: Sample, backend: Backend) -> None:
    num_inputs, num_outputs = NARROW.get(sample.kernel, (99, 99))
    starts = sample.before or tuple(np.zeros(array.shape, array.dtype) for array in sample.expected)
    inputs, out = rounded(sample.inputs, num_inputs), rounded(starts, num_outputs)
    kept, expected = [array.copy() for array in inputs], widened(out)
    run(NumpyBackend(), sample, widened(inputs), expected)
    run(backend, sample, inputs, out)
    for array, copy in zip(inputs, kept, strict=True):
        np.testing.assert_array_equal(array.view(np.uint8), copy.view(np.uint8))
    for got, wanted in zip(out, expected, strict=True):
        finite = np.where(np.isinf(wanted), 0, wanted)
        tolerance = ROUNDING * np.abs(finite).max(initial=1.0) if is_narrow(got.dtype) else 1e-5
        tolerance *= np.abs(finite).max(initial=1.0) if got.dtype == np.float32 else 1
        np.testing.assert_allclose(got.astype(np.float64), wanted, rtol=0, atol=tolerance)


@pytest.mark.parametrize("backend", BACKENDS, ids=["numpy", "native"])
@pytest.mark.parametrize("name", FORMULAS)
def test_a_formula_rounds_its_float32_result_once(name: str, backend: Backend) -> None:
    formula = FORMULAS[name]
    shapes = {1: [(5, 7)], 2: [(5, 7), (7,)], 3: [(5, 7), (5, 1), (7,)]}[len(formula.inputs)]
    inputs = [np.random.default_rng(k).uniform(0.1, 0.9, s).astype(bfloat16) for k, s in enumerate(shapes)]
    numbers = dict.fromkeys(formula.numbers, 0.5)
    made, expected = np.zeros((5, 7), bfloat16), np.zeros((5, 7))
    backend.run(name, *inputs, out=made, **numbers)
    NumpyBackend().run(name, *widened(inputs), out=expected, **numbers)
    np.testing.assert_allclose(made.astype(float), expected, rtol=ROUNDING, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS, ids=["numpy", "native"])
def test_a_product_of_bfloat16_is_added_in_float32(backend: Backend) -> None:
    ones, total = np.ones((1, 1001), bfloat16), np.zeros((1, 1), np.float32)
    backend.run("matmul", ones, ones.T.copy(), out=total)
    assert total[0, 0] == 1001  # in bfloat16 sums of ones end at 256, and this is no number of it
    ones, narrow = np.ones((1, 1000), bfloat16), np.zeros((1, 1), bfloat16)
    backend.run("sum", ones, out=narrow, axes=(1,), keepdims=True)
    assert narrow[0, 0] == 1000
    backend.run("sum_to", np.ones((1000, 3), bfloat16), out=(sums := np.zeros(3, np.float32)))
    assert (sums == 1000).all()


@pytest.mark.parametrize("backend", BACKENDS, ids=["numpy", "native"])
def test_a_float32_bias_is_added_before_rounding(backend: Backend) -> None:
    x, bias = np.full((2, 3), 1.0, bfloat16), np.full(3, 2.0**-9 + 2.0**-20, np.float32)
    y = np.zeros((2, 3), bfloat16)
    backend.run("add", x, bias, out=y)
    assert (y == 1.0).all()
    backend.run("add", x, np.full(3, 2.0**-8 + 2.0**-20, np.float32), out=y)
    assert (y == 1 + 2.0**-7).all()  # the bias rounded first would be a tie, which goes to 1


@pytest.mark.parametrize("backend", BACKENDS, ids=["numpy", "native"])
def test_casts_round_to_nearest_even_and_keep_what_is_not_finite(backend: Backend) -> None:
    values = np.array([1 + 2.0**-8, 1 + 3 * 2.0**-8, -1 - 2.0**-8, 3.4e38, np.inf, -np.inf, np.nan], "f")
    narrow, again = np.zeros(7, bfloat16), np.zeros(7, np.float32)
    backend.run("cast", values, out=narrow)
    backend.run("cast", narrow, out=again)
    np.testing.assert_array_equal(again, [1, 1 + 2.0**-6, -1, np.inf, np.inf, -np.inf, np.nan])


@pytest.mark.parametrize("backend", BACKENDS, ids=["numpy", "native"])
def test_dropout_of_bfloat16_has_the_mask_of_float32(backend: Backend) -> None:
    x, mask, other = np.ones((64, 8), bfloat16), np.zeros((64, 8), bool), np.zeros((64, 8), bool)
    y, wide = np.zeros_like(x), np.zeros((64, 8), np.float32)
    backend.run("dropout", x, out=(y, mask), ratio=0.3, seed=1, counter=2)
    backend.run("dropout", x.astype("f"), out=(wide, other), ratio=0.3, seed=1, counter=2)
    np.testing.assert_array_equal(mask, other)
    np.testing.assert_array_equal(y, wide.astype(bfloat16))
    backend.run("dropout_backward", x, mask, out=y, ratio=0.3)
    np.testing.assert_array_equal(y, wide.astype(bfloat16))
