# SPDX-License-Identifier: Apache-2.0
"""How many digits kernels keep, on every path: numpy's, the compiled one, and CUDA's sources.

Bounds of sums are twice the error of PyTorch 2.13's sums of the same arrays, as measured on an x86-64 CPU with AVX-512.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from singa_lite import autograd
from singa_lite.backend.base import Backend
from singa_lite.backend.cpu import CpuBackend, NumpyBackend
from singa_lite.tensor import Tensor, from_numpy, to_numpy
from tests.devices import cuda_device, no_gpu

# on a machine without a GPU the same tests run on the stand-in
CUDA = pytest.param("cuda", id="cuda-standin") if no_gpu() else pytest.param("cuda", marks=pytest.mark.gpu)


@pytest.fixture(params=["numpy", "cpu", CUDA])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Backend:
    """Each path in turn; the CPU device takes compiled kernels where there are any."""
    if request.param == "cuda":
        return cuda_device(monkeypatch).backend
    return NumpyBackend() if request.param == "numpy" else CpuBackend()


def run(backend: Backend, kernel: str, *inputs: Any, out: Any, **attributes: Any) -> Any:
    """The output of a kernel as float64; of a float16 or float32 input as that."""
    made = backend.asarray(out)
    backend.run(kernel, *(backend.asarray(x) for x in inputs), out=made, **attributes)
    return backend.to_numpy(made)


def last_places(got: Any, exact: Any) -> Any:
    """The distance in units of the last place of the exact value's float; 0 where both are equal or NaN."""
    nearest = exact.astype(got.dtype)
    unit = np.spacing(np.abs(nearest)).astype(np.longdouble)
    return np.where(got == nearest, 0, np.abs(got.astype(np.longdouble) - exact) / unit)


# ---- element by element --------------------------------------------------------------------------------

LOWEST = {
    "float16": -17.0,
    "float32": -103.0,
    "float64": -745.0,
}  # where sigmoid is the smallest number there is
NORMAL = {"float16": -9.0, "float32": -87.0, "float64": -708.0}  # a GPU takes smaller numbers for 0


def points(dtype: str, lowest: float) -> Any:
    """From ``lowest`` to its opposite, evenly, and small ones of every size."""
    even = np.linspace(lowest, -lowest, 40_001)
    small = np.geomspace(1e-7, 1, 4_000)
    return np.concatenate([even, small, -small]).astype(dtype)


def exact_sigmoid(x: Any) -> Any:
    power = np.exp(-np.abs(x.astype(np.longdouble)))
    return np.where(x < 0, power, 1) / (1 + power)


def exact_gradient(x: Any) -> Any:
    power = np.exp(-np.abs(x.astype(np.longdouble)))
    return power / (1 + power) ** 2


@pytest.mark.skipif(
    np.finfo(np.longdouble).eps > 1e-18, reason="needs a float wider than float64 as reference"
)
@pytest.mark.parametrize("dtype", LOWEST)
def test_sigmoid_is_within_two_units_of_the_last_place_and_its_gradient_nearly(backend, dtype):
    x = points(dtype, (LOWEST if backend.name == "cpu" else NORMAL)[dtype])
    assert last_places(run(backend, "sigmoid", x, out=np.zeros_like(x)), exact_sigmoid(x)).max() <= 2
    ones = np.ones_like(x)
    dx = run(backend, "sigmoid_backward", ones, x, out=np.zeros_like(x))
    # computed in a wider type
    is_wide = dtype == "float16" or (dtype == "float32" and type(backend) is NumpyBackend)
    assert last_places(dx, exact_gradient(x)).max() <= (0.6 if is_wide else 2.5)


@pytest.mark.parametrize("dtype", LOWEST)
def test_sigmoid_of_extremes(backend, dtype):
    x = np.array([-np.inf, np.inf, np.nan, 0, -0.0, -1e4, 1e4], dtype)
    y = run(backend, "sigmoid", x, out=np.zeros_like(x))
    np.testing.assert_array_equal(y, np.array([0, 1, np.nan, 0.5, 0.5, 0, 1], dtype))
    dx = run(backend, "sigmoid_backward", np.ones_like(x), x, out=np.zeros_like(x))
    np.testing.assert_array_equal(dx, np.array([0, 0, np.nan, 0.25, 0.25, 0, 0], dtype))


@pytest.mark.parametrize("value", [-20.0, 20.0])
def test_the_logarithm_of_a_sigmoid_far_out_is_finite_and_has_a_gradient(device, training, value):
    x = Tensor(data=np.full((), value, np.float32), device=device, stores_grad=True)
    y = autograd.log(autograd.sigmoid(x))
    (gradient,) = autograd.gradients(y).values()
    exact = -np.log1p(np.exp(-np.float64(value)))
    if value > 0:  # the logarithm of a float32 just below 1 is as coarse as its distance from 1
        assert abs(y.item() - exact) < 1e-7
    else:
        assert y.item() == pytest.approx(exact, rel=1e-6)
    assert gradient.item() == pytest.approx(1 / (1 + np.exp(np.float64(value))), rel=1e-6)


@pytest.mark.parametrize("name", ["sigmoid", "tanh", "exp", "log", "sqrt", "relu", "abs", "negative"])
def test_functions_of_one_tensor_take_one_number(device, training, name):
    x = Tensor(data=np.float32(0.25), device=device, stores_grad=True)
    assert x.shape == ()
    row = from_numpy(np.float32([0.25]), device)
    y = getattr(autograd, name)(x)
    assert y.shape == () and to_numpy(y) == to_numpy(getattr(autograd, name)(row))[0]
    assert all(gradient.shape == () for gradient in autograd.gradients(y).values())


# ---- sums ----------------------------------------------------------------------------------------------

# shape, axes, PyTorch's error: the largest |sum - exact| / sum of |x|, for x uniform in [-0.5, 0.5) of three seeds
SUMS = [
    ((200_000, 16), (0,), 8.87e-10),
    ((50_000, 64), (0,), 3.16e-9),
    ((4096, 128), (0,), 8.07e-9),
    ((1000, 500), (0,), 2.00e-8),
    ((64, 1000, 32), (0, 1), 2.18e-9),
    ((16, 2000, 32), (1,), 1.30e-8),
    ((20_000, 7, 9), (0,), 2.96e-9),
    ((64, 16, 400), (0, 2), 1.0e-8),
    ((256, 1000), (1,), 1.57e-8),
    ((300_000,), (0,), 6.0e-10),
]


@pytest.mark.parametrize(("shape", "axes", "error"), SUMS, ids=str)
@pytest.mark.parametrize("kernel", ["sum", "mean", "sum_to"])
def test_a_float32_sum_has_no_more_than_twice_the_error_of_pytorch(backend, kernel, shape, axes, error):
    for seed in range(1 if backend.name == "cuda" else 3):
        x = np.random.default_rng(seed).random(shape).astype(np.float32) - np.float32(0.5)
        exact = x.sum(axes, np.float64)
        scale = np.abs(x).sum(axes, np.float64)
        attributes = {} if kernel == "sum_to" else {"axes": axes, "keepdims": False}
        kept = tuple(1 if axis in axes else n for axis, n in enumerate(shape))
        out = np.zeros(kept if kernel == "sum_to" else exact.shape, np.float32)
        got = run(backend, kernel, x, out=out, **attributes).reshape(exact.shape).astype(np.float64)
        if kernel == "mean":
            got = got * (x.size // exact.size)
        assert (np.abs(got - exact) / scale).max() <= 2 * error


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_a_long_sum_of_positive_values_is_as_good_as_its_dtype(backend, dtype):
    x = np.random.default_rng(0).random((100_000, 6)).astype(dtype)
    got = run(backend, "mean", x, out=np.zeros(6, dtype), axes=(0,), keepdims=False)
    exact = x.astype(np.longdouble).mean(0)
    assert last_places(got, exact).max() <= (1 if dtype == "float16" else 4)


def test_batch_norm_statistics_of_many_rows_are_within_few_units_of_the_last_place(backend):
    x = np.random.default_rng(1).random((30_000, 4, 2, 2)).astype(np.float32) + np.float32(1)
    scale, bias = np.ones(4, np.float32), np.zeros(4, np.float32)
    zeros = [np.zeros_like(x), *(np.zeros(4, np.float32) for _ in range(4))]
    out = tuple(backend.asarray(array) for array in zeros)
    given = (backend.asarray(array) for array in (x, scale, bias))
    backend.run("batchnorm_2d_train", *given, out=out, momentum=1.0, eps=1e-5)
    mean, inverse_std = (backend.to_numpy(array) for array in out[1:3])
    wide = x.astype(np.float64)
    assert last_places(mean, wide.mean((0, 2, 3)).astype(np.longdouble)).max() <= 4
    assert np.abs(inverse_std * np.sqrt(wide.var((0, 2, 3)) + 1e-5) - 1).max() < 1e-6


@pytest.mark.parametrize("axis", [0, 1])
def test_softmax_of_many_is_not_their_sequential_sum(backend: Backend, axis: int) -> None:
    shape = (400_000, 2) if axis == 0 else (2, 400_000)
    x = np.full(shape, -2.3, np.float32)  # whose powers are all rounded to the same side when they are added
    x.swapaxes(0, axis)[0] = 0
    powers = np.exp(x.astype(np.float64))
    exact = powers / powers.sum(axis, keepdims=True)
    got = run(backend, "softmax", x, out=np.empty_like(x), axis=axis)
    assert np.abs(got / exact - 1).max() < 1e-5
    dy = np.random.default_rng(5).uniform(1, 2, shape).astype(np.float32)
    dx = run(backend, "softmax_backward", dy, got, out=np.empty_like(x), axis=axis)
    wanted = got.astype(np.float64) * (dy - (got.astype(np.float64) * dy).sum(axis, keepdims=True))
    assert np.abs(dx - wanted).max() < 1e-5 * np.abs(wanted).max()
