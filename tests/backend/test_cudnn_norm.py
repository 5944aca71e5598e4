# SPDX-License-Identifier: Apache-2.0
"""How batch normalisation calls cuDNN; its values are in test_cuda_windows.py."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from singa_lite import _native
from singa_lite.backend.cpu import NumpyBackend
from singa_lite.errors import DeviceError
from tests.devices import no_gpu, standin_cudnn
from tests.slow_cases import slow_but_first

REFERENCE = NumpyBackend()
TOLERANCE = {"float16": 2e-3, "float32": 3e-6 if no_gpu() else 2e-5, "float64": 1e-12}
TRAIN, INFER = {"momentum": 0.3, "eps": 1e-3}, {"eps": 1e-3}

pytestmark = [
    pytest.mark.skipif(_native.load("_cudnn")[0] is None, reason="_cudnn is not built on this platform"),
    *([] if no_gpu() else [pytest.mark.gpu]),
]


def calls(shape: tuple[int, ...] = (3, 2, 5, 4)) -> list[tuple[str, list[np.ndarray], list[np.ndarray], Any]]:
    """(kernel, inputs, outputs before, attributes) of every kernel, its outputs full of 0.5."""
    rng, c = np.random.default_rng(3), shape[1]
    x, dy, (scale, bias, mean, var) = (
        rng.standard_normal(shape),
        rng.standard_normal(shape),
        rng.uniform(0.5, 2, (4, c)),
    )
    half = np.full(c, 0.5)
    return [
        ("batchnorm_2d_train", [x, scale, bias], [dy, half, half, mean, var], TRAIN),
        ("batchnorm_2d_infer", [x, scale, bias, mean, var], [dy], INFER),
        ("batchnorm_2d_backward", [dy, x, scale, mean, var], [x, half, half], {}),
    ]


BY_KERNEL = {call[0]: call for call in calls()}
KERNELS = pytest.mark.parametrize("kernel", BY_KERNEL)


def on(backend: Any, call: Any, given: list[Any], out: list[Any]) -> None:
    backend.run(call[0], *given, out=tuple(out) if len(out) > 1 else out[0], **call[3])


def kept_in(array: np.ndarray, dtype: str) -> str:
    """The dtype of ``array`` in a call with x of ``dtype``: channels have float32 beside float16."""
    return "float32" if dtype == "float16" and array.ndim == 1 else dtype


def expected(call: Any, dtype: str) -> list[np.ndarray]:
    """numpy's outputs in float64, of values rounded to ``dtype``."""
    given, out = ([a.astype(kept_in(a, dtype)).astype("float64") for a in arrays] for arrays in call[1:3])
    on(REFERENCE, call, given, out)
    return out


def check(actual: list[Any], right: list[np.ndarray], dtype: str) -> None:
    for mine, wide in zip(actual, right, strict=True):
        assert mine.dtype == kept_in(wide, dtype)
        tolerance = TOLERANCE[dtype] * max(1.0, np.abs(wide).max(initial=0))
        np.testing.assert_allclose(mine.astype("float64"), wide, rtol=TOLERANCE[dtype], atol=tolerance)


def placed(backend: Any, arrays: list[np.ndarray], dtype: str, offset: int = 0) -> list[Any]:
    """On the device, ``offset`` elements behind the start of an allocation."""
    return [
        backend.asarray(np.append(np.zeros(offset), a).astype(kept_in(a, dtype)))[offset:].reshape(a.shape)
        for a in arrays
    ]


@KERNELS
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_misaligned_arrays_give_the_same(backend: Any, kernel: str, dtype: str) -> None:
    call = BY_KERNEL[kernel]
    given, out = (placed(backend, arrays, dtype, 1) for arrays in call[1:3])
    assert all(array.data.ptr % 16 for array in (*given, *out))
    on(backend, call, given, out)
    check([backend.to_numpy(array) for array in out], expected(call, dtype), dtype)


@KERNELS
@pytest.mark.parametrize("shape", [(3, 2, 5, 4), (1, 2, 1, 1)], ids=str)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_captured_call_is_repeated(backend: Any, kernel: str, shape: Any, dtype: str) -> None:
    [call] = [call for call in calls(shape) if call[0] == kernel]
    given, out = (placed(backend, arrays, dtype) for arrays in call[1:3])
    start = [array.copy() for array in out]
    on(backend, call, given, out)  # takes the memory that the capture then finds in the pool
    for array, before in zip(out, start, strict=True):
        backend.run("copy", before, out=array)
    backend.synchronize()
    backend.stream.begin_capture()
    on(backend, call, given, out)
    graph = backend.stream.end_capture()
    before = [backend.to_numpy(array).astype("float64") for array in out]
    for mine, wide in zip(before, call[2], strict=True):
        np.testing.assert_array_equal(mine, wide.astype(kept_in(wide, dtype)))  # a capture computes nothing
    graph.launch(backend.stream)
    check([backend.to_numpy(array) for array in out], expected(call, dtype), dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kernel", BY_KERNEL)
def test_a_call_launches_no_kernel_of_our_own(
    backend: Any, kernel: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Channels are float32 beside float16, as cuDNN keeps them: nothing is converted before and after."""
    launched: list[str] = []
    given, out = (placed(backend, arrays, dtype) for arrays in BY_KERNEL[kernel][1:3])
    monkeypatch.setattr(backend, "launch", lambda name, *rest: launched.append(name))
    on(backend, BY_KERNEL[kernel], given, out)
    assert not launched


def test_float16_images_have_float32_statistics(backend: Any) -> None:
    call = BY_KERNEL["batchnorm_2d_train"]
    given, out = (placed(backend, arrays, "float16") for arrays in call[1:3])
    on(backend, call, given, out)
    for mine, wide in zip(out[1:], expected(call, "float16")[1:], strict=True):
        np.testing.assert_allclose(backend.to_numpy(mine), wide, rtol=TOLERANCE["float32"])


@pytest.mark.parametrize("shape", [(131075, 1), (65529, 2, 1, 1)], ids=str)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_large_batches_are_inferred_in_parts(backend: Any, shape: tuple[int, ...], dtype: str) -> None:
    call = calls(shape)[1]
    given, out = (placed(backend, arrays, dtype) for arrays in call[1:3])
    on(backend, call, given, out)
    check([backend.to_numpy(array) for array in out], expected(call, dtype), dtype)


def test_a_batch_too_large_to_train_on_raises(backend: Any) -> None:
    x, channel = backend.zeros((880802, 1), "float32"), backend.zeros((1,), "float32")
    with pytest.raises(DeviceError, match="at most 880801 samples, not 880802; train on smaller batches"):
        backend.run("batchnorm_2d_train", x, channel, channel, out=(x, *[channel] * 4), **TRAIN)
    with pytest.raises(DeviceError, match="at most 880801 samples"):
        backend.run("batchnorm_2d_backward", x, x, channel, channel, channel, out=(x, channel, channel))


def test_an_empty_batch_has_no_gradient_of_scale_and_bias(backend: Any) -> None:
    x, scale = backend.zeros((0, 2, 3, 3), "float32"), backend.asarray(np.ones(2, "float32"))
    dscale, dbias = backend.asarray(np.ones(2, "float32")), backend.asarray(np.ones(2, "float32"))
    backend.run("batchnorm_2d_backward", x, x, scale, scale, scale, out=(x, dscale, dbias))
    assert not backend.to_numpy(dscale).any() and not backend.to_numpy(dbias).any()


def test_a_shape_is_planned_once(counters: ctypes.CDLL, backend: Any) -> None:
    before = counters.standin_cudnn_live()
    for _ in range(2):
        for call in BY_KERNEL.values():
            given, out = (placed(backend, arrays, "float32") for arrays in call[1:3])
            on(backend, call, given, out)
    assert len(backend._plans) == 1  # forward and backward
    assert counters.standin_cudnn_live() == before + 1 + 2  # the handle, and its descriptors


CALLS = [
    ("batchnorm_2d_train", "cudnnSetTensor4dDescriptor", r"x \(3, 2, 5, 4\)"),
    ("batchnorm_2d_train", "cudnnBatchNormalizationForwardTraining", r"x \(3, 2, 5, 4\)"),
    ("batchnorm_2d_train", "cudnnDeriveBNTensorDescriptor", r"float32 x \(3, 2, 5, 4\)"),
    ("batchnorm_2d_infer", "cudnnBatchNormalizationForwardInference", r"x \(3, 2, 5, 4\)"),
    ("batchnorm_2d_backward", "cudnnBatchNormalizationBackward", r"x \(3, 2, 5, 4\)"),
]


@slow_but_first(("kernel", "name", "shapes"), CALLS, count=2, ids=[name for _, name, _ in CALLS])
def test_every_failing_call_is_reported_with_its_text(
    all_given_back: None, backend: Any, kernel: str, name: str, shapes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = BY_KERNEL[kernel]
    given, out = (placed(backend, arrays, "float32") for arrays in call[1:3])
    monkeypatch.setenv("STANDIN_CUDNN_FAIL", name)
    with pytest.raises(DeviceError, match=rf"{shapes}.*STATUS \(5000\): as the test wished"):
        on(type(backend)(0), call, given, out)


@pytest.mark.parametrize("name", ["cudnnBatchNormalizationBackward", "cudnnAddTensor"])
def test_a_missing_function_is_named_by_the_first_call_of_any_family(
    counters: ctypes.CDLL, backend: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SINGA_LITE_CUDNN_LIB", str(standin_cudnn(f"-D{name}=of_another_library")))
    call = BY_KERNEL["batchnorm_2d_infer"]
    given, out = (placed(backend, arrays, "float32") for arrays in call[1:3])
    with pytest.raises(DeviceError, match=rf"\(version 92800\) has no function {name};"):
        on(backend, call, given, out)
