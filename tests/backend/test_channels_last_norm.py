# SPDX-License-Identifier: Apache-2.0
"""Our own batch norm of images with channels last on CUDA beside numpy's in float64, and what is fused with it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from singa_lite import autograd, layer, opt
from singa_lite.backend.cpu import NumpyBackend
from singa_lite.device import allow_tf32
from singa_lite.dtypes import bfloat16
from singa_lite.errors import OptionError
from singa_lite.tensor import Tensor, to_numpy
from tests.backend.test_capture import Net, compiled
from tests.devices import cuda_device, no_gpu

REFERENCE = NumpyBackend()
TOLERANCE = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 1.6e-2}
SHAPES = [(3, 8, 5, 4), (2, 24, 7, 3), (1, 8, 1, 1), (4, 520, 3, 3), (2, 2048, 2, 2), (30, 8, 33, 31)]
pytestmark = [] if no_gpu() else [pytest.mark.gpu]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Any:
    return cuda_device(monkeypatch)


def channels_last(image: np.ndarray) -> np.ndarray:
    """The same shape, its memory in the order of channels last."""
    return np.ascontiguousarray(np.moveaxis(image, 1, -1)).reshape(image.shape)


def row_major(image: np.ndarray) -> np.ndarray:
    n, c, h, w = image.shape
    return np.moveaxis(image.reshape(n, h, w, c), -1, 1)


def run(
    backend: Any, kernel: str, inputs: list[np.ndarray], out: list[np.ndarray], **attributes: Any
) -> list[np.ndarray]:
    """Outputs in float64; images, the arrays of four axes, go and come with channels last on CUDA."""
    on_host = backend is REFERENCE
    given, made = (
        [a if on_host or a.ndim == 1 else channels_last(a) for a in arrays] for arrays in (inputs, out)
    )
    if not on_host:
        given, made = ([backend.asarray(a) for a in arrays] for arrays in (given, made))
        attributes |= {"memory_format": inputs[0].shape[1]}
    backend.run(kernel, *given, out=tuple(made), **attributes)
    found = [a if on_host else backend.to_numpy(a) for a in made]
    return [(a if on_host or a.ndim == 1 else row_major(a)).astype("float64") for a in found]


def wide(arrays: list[np.ndarray]) -> list[np.ndarray]:
    return [array.astype("float64") for array in arrays]


def check(actual: list[np.ndarray], expected: list[np.ndarray], dtype: str) -> None:
    for number, (mine, right) in enumerate(zip(actual, expected, strict=True)):
        tolerance = TOLERANCE["float32" if number else dtype] * max(1.0, np.abs(right).max())
        np.testing.assert_allclose(mine, right, rtol=0, atol=tolerance)


@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_training_is_numpys(device: Any, dtype: str, shape: Any, relu: bool, has_residual: bool) -> None:
    rng, kind = np.random.default_rng(1), bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    x, residual = ((rng.standard_normal(shape) + offset).astype(kind) for offset in (2, 0))
    scale, bias, mean, var = rng.uniform(-1, 2, (4, shape[1])).astype("f")
    out = [np.zeros(shape, kind), np.zeros_like(mean), np.zeros_like(mean), mean, var]
    options = {"momentum": 0.3, "eps": 1e-3}
    expected = run(REFERENCE, "batchnorm_2d_train", wide([x, scale, bias]), wide(out), **options)
    expected[0] = expected[0] + has_residual * residual.astype("float64")
    expected[0] = np.maximum(expected[0], 0) if relu else expected[0]
    given = [x, scale, bias, *([residual] if has_residual else [])]
    found = run(device.backend, "batchnorm_2d_train", given, out, relu=relu, **options)
    check(found, expected, dtype)
    assert [a.tobytes() for a in found] == [
        a.tobytes() for a in run(device.backend, "batchnorm_2d_train", given, out, relu=relu, **options)
    ]


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_gradients_are_numpys(device: Any, dtype: str, shape: Any, relu: bool) -> None:
    rng, kind = np.random.default_rng(2), bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    x, dy = (rng.standard_normal(shape).astype(kind) for _ in range(2))
    scale, bias, mean, std = rng.uniform(-1, 2, (4, shape[1])).astype("f")
    out = [np.zeros(shape, kind), np.zeros_like(mean), np.zeros_like(mean)]
    x64, dy64, scale64, bias64, mean64, std64 = wide([x, dy, scale, bias, mean, std])
    if relu:
        dy64 = dy64 * (
            (x64 - mean64[:, None, None]) * (std64 * scale64)[:, None, None] + bias64[:, None, None] > 0
        )
    expected = run(REFERENCE, "batchnorm_2d_backward", [dy64, x64, scale64, mean64, std64], wide(out))
    given = [dy, x, scale, mean, std, *([bias] if relu else [])]
    check(run(device.backend, "batchnorm_2d_backward", given, out), expected, dtype)


def test_a_mean_far_from_zero_does_not_hide_the_variance(device: Any) -> None:
    x = np.random.default_rng(3).standard_normal((30, 8, 30, 30)) + 1000
    x = x.astype("f")
    channels, out = np.ones(8, "f"), [np.zeros_like(x), *[np.zeros(8, "f") for _ in range(4)]]
    inverse_std = run(
        device.backend, "batchnorm_2d_train", [x, channels, channels], out, momentum=0.1, eps=0.0
    )[2]
    right = 1 / x.astype("float64").std((0, 2, 3))
    np.testing.assert_allclose(inverse_std, right, rtol=1e-6)


def test_what_is_fused_is_refused_for_row_major_images(device: Any) -> None:
    backend = device.backend
    x, c = backend.asarray(np.ones((2, 8, 3, 3), "f")), backend.asarray(np.ones(8, "f"))
    given = {"out": (x, c, c, c, c), "momentum": 0.1, "eps": 1e-5}
    for inputs, extra in (([x, c, c], {"relu": True}), ([x, c, c, x], {})):
        with pytest.raises(OptionError, match="batchnorm_2d_train: a residual and a ReLU"):
            backend.run("batchnorm_2d_train", *inputs, **given, **extra)
    with pytest.raises(OptionError, match="batchnorm_2d_backward: a ReLU's gradient"):
        backend.run("batchnorm_2d_backward", x, x, c, c, c, c, out=(x, c, c))


def test_what_is_not_finite_is_seen(device: Any) -> None:
    x = np.ones((2, 8, 3, 3), "f")
    x[1, 3, 2, 2], x[0, 5, 0, 0] = np.nan, np.inf
    channels, out = np.ones(8, "f"), [np.zeros_like(x), *[np.zeros(8, "f") for _ in range(4)]]
    found = run(
        device.backend, "batchnorm_2d_train", [x, channels, channels], out, relu=True, momentum=0.1, eps=1e-5
    )
    for array in (found[0].sum((0, 2, 3)), found[2], found[4]):
        assert np.isnan(array[[3, 5]]).all() and np.isfinite(array[[0, 1, 2, 4, 6, 7]]).all()


# ---- in a recorded step ------------------------------------------------------------------------------


class Block(Net):
    """Two convolutions with norms, ReLUs and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = [layer.Conv2d(8, 3, padding=1, bias=False) for _ in range(3)]
        self.norms, self.relus = [layer.BatchNorm2d() for _ in range(3)], [layer.ReLU() for _ in range(3)]

    def forward(self, x: Tensor) -> Tensor:
        x = autograd.reshape(x, (x.shape[0], 1, 6, 6))
        first = self.relus[0](self.norms[0](self.convs[0](x)))
        second = self.relus[1](self.norms[1](self.convs[1](first)))
        third = self.relus[2](autograd.add(self.norms[2](self.convs[2](second)), first))
        return super().forward(autograd.reshape(third, (x.shape[0], 288)))


def losses(device: Any, use_graph: bool, precision: str = "fp32") -> tuple[list[float], Net]:
    net, rng = compiled(device, use_graph, opt.SGD(lr=0.05), Block), np.random.default_rng(4)
    net.compile(
        [Tensor(data=np.zeros((6, 36), "f"), device=device)], use_graph=use_graph, precision=precision
    )
    found = []
    for _ in range(5):
        x = Tensor(data=rng.standard_normal((6, 36)).astype("f"), device=device)
        y = Tensor(data=rng.integers(0, 5, 6).astype(np.int32), device=device)
        found.append(float(to_numpy(net(x, y)[1]).item()))
    autograd.training = False
    return found, net


def test_recorded_norms_take_their_relus_and_residuals_over(device: Any) -> None:
    allow_tf32(True)  # images of float32 have their channels last then
    try:
        (eager, _), (recorded, net) = losses(device, False), losses(device, True)
    finally:
        allow_tf32(False)
    np.testing.assert_allclose(recorded, eager, rtol=1e-5 if no_gpu() else 1e-2)
    [info] = net.graph_info()
    names = [node.split()[0] for node in info.nodes]
    assert names.count("batchnorm_2d_train") == names.count("batchnorm_2d_backward") == 3
    assert "relu=True memory_format=8" in next(
        node for node in info.nodes if node.startswith("batchnorm_2d_train")
    )
    assert names.count("relu_backward") == 3  # of the residual's ReLU, and the perceptron's two


def test_images_of_a_step_in_mixed_precision_have_their_channels_last(device: Any) -> None:
    """Its weights are float32, and tensor cores compute all the same."""
    if reason := device.backend.missing_precisions.get("bf16"):
        pytest.skip(reason)
    (eager, _), (recorded, net) = losses(device, False, "bf16"), losses(device, True, "bf16")
    np.testing.assert_allclose(recorded, eager, rtol=2e-2)
    [info] = net.graph_info()
    for name in ("conv2d", "conv2d_backward_data", "batchnorm_2d_train", "batchnorm_2d_backward"):
        found = [node for node in info.nodes if node.split()[0] == name]
        assert len(found) >= 2 and all("8" in node.rpartition("memory_format")[2] for node in found), found
    assert not any(node.startswith("reorder") for node in info.nodes if "[6, 8, 6, 6]" in node.split("->")[0])
