# SPDX-License-Identifier: Apache-2.0
"""Convolutions on CUDA. Without a GPU libcudnn is a stand-in on host memory (tests/standin/cudnn/)."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from singa_lite import _native
from singa_lite.backend.cpu import NumpyBackend
from singa_lite.config import state
from singa_lite.device import benchmark_convolutions
from singa_lite.errors import DeviceError, OptionError
from tests.devices import no_gpu, standin_cudnn
from tests.limits import LIMIT_S
from tests.slow_cases import slow_but_first

ROOT = Path(__file__).parents[2]
REFERENCE = NumpyBackend()
# of the largest element; Winograd's and Fourier's algorithms on a GPU round more than sums do
TOLERANCE = {"float16": 2e-3, "float32": 2e-6 if no_gpu() else 2e-5, "float64": 1e-12}
FMA, DEFAULT_MATH = 3, 0  # cuDNN's numbers
PLAIN = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "groups": 1}

pytestmark = [
    pytest.mark.skipif(_native.load("_cudnn")[0] is None, reason="_cudnn is not built on this platform"),
    *([] if no_gpu() else [pytest.mark.gpu]),
]


def found(counters: ctypes.CDLL) -> int:
    return int(counters.standin_cudnn_calls(b"cudnnFindConvolutionForwardAlgorithmEx"))


def last_run(counters: ctypes.CDLL) -> tuple[int, int]:
    """(algorithm, math)"""
    return counters.standin_cudnn_last(0), counters.standin_cudnn_last(1)


def close(actual: np.ndarray, expected: np.ndarray, dtype: str) -> None:
    assert actual.dtype == dtype
    scale = max(1.0, float(np.abs(expected).max(initial=0)))
    np.testing.assert_allclose(
        actual.astype("float64") / scale, expected / scale, atol=TOLERANCE[dtype], rtol=0
    )


def channels_last(image: np.ndarray) -> np.ndarray:
    """The same shape, the channels of a pixel side by side in memory."""
    return np.ascontiguousarray(image.transpose(0, 2, 3, 1)).reshape(image.shape)


def row_major(image: np.ndarray) -> np.ndarray:
    """The reverse of ``channels_last``."""
    n, c, h, w = image.shape
    return image.reshape(n, h, w, c).transpose(0, 3, 1, 2)


def check_all(
    backend: Any,
    dtype: str,
    shapes: Any,
    attributes: dict[str, Any],
    rng: Any,
    is_last: tuple[bool, bool] = (False, False),
) -> None:
    """The three directions, with and without bias, against numpy in float64 on the same values.

    is_last: of x and y, whether their channels come last.
    """
    x, w, dy, b = (rng.standard_normal(shape).astype(dtype) for shape in shapes)
    images = [image for image, last in zip((x, dy), is_last, strict=True) if last]
    blocks = tuple(image.shape[1] if last else 1 for image, last in zip((x, dy), is_last, strict=True))
    for kernel, inputs, outs in (
        ("conv2d", (x, w, b), (dy,)),
        ("conv2d", (x, w), (dy,)),
        ("conv2d_backward_data", (dy, w), (x,)),
        ("conv2d_backward_weight", (dy, x), (w, b)),
        ("conv2d_backward_weight", (dy, x), (w,)),
    ):
        expected = tuple(np.zeros(out.shape) for out in outs)
        actual = tuple(backend.empty(out.shape, dtype) for out in outs)
        wide = (array.astype("float64") for array in inputs)
        REFERENCE.run(kernel, *wide, out=expected if len(outs) > 1 else expected[0], **attributes)
        given = [channels_last(a) if any(a is image for image in images) else a for a in inputs]
        backend.run(
            kernel,
            *map(backend.asarray, given),
            out=actual if len(outs) > 1 else actual[0],
            **attributes,
            memory_formats=blocks,
        )
        for mine, right, like in zip(map(backend.to_numpy, actual), expected, outs, strict=True):
            close(row_major(mine) if any(like is image for image in images) else mine, right, dtype)


@st.composite
def convolutions(draw: Any) -> tuple[Any, dict[str, Any]]:
    """Shapes of (x, w, y, b) and attributes."""

    def pair(low: int, high: int) -> tuple[int, int]:
        return draw(st.integers(low, high)), draw(st.integers(low, high))

    groups, n = draw(st.integers(1, 3)), draw(st.integers(0, 3))
    c, o = groups * draw(st.integers(1, 3)), groups * draw(st.integers(1, 3))
    kernel, stride, padding, dilation = pair(1, 3), pair(1, 3), pair(0, 2), pair(1, 2)
    extra = pair(0, 4)
    reach = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    size = [max(1, r - 2 * p) + e for r, p, e in zip(reach, padding, extra, strict=True)]
    out = [(s + 2 * p - r) // t + 1 for s, p, r, t in zip(size, padding, reach, stride, strict=True)]
    shapes = ((n, c, *size), (o, c // groups, *kernel), (n, o, *out), (o,))
    return shapes, {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}


@settings(
    max_examples=60 if no_gpu() else 15,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    case=convolutions(),
    dtype=st.sampled_from(list(TOLERANCE)),
    seed=st.integers(0, 99),
    is_last=st.tuples(st.booleans(), st.booleans()),
)
def test_convolutions_equal_numpy_for_any_window_in_any_order(
    backend: Any, case: Any, dtype: str, seed: int, is_last: tuple[bool, bool]
) -> None:
    check_all(backend, dtype, *case, np.random.default_rng(seed), is_last)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("is_last", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("stride", [(1, 1), (2, 2), (1, 3)])
@pytest.mark.parametrize("size", [(5, 7), (2, 2), (1, 3), (1, 1)])
@pytest.mark.parametrize("n", [1, 2])
def test_convolutions_by_filters_of_one_pixel_equal_numpy(
    backend: Any, dtype: str, is_last: Any, stride: Any, size: Any, n: int
) -> None:
    out = [-(-length // step) for length, step in zip(size, stride, strict=True)]
    shapes = ((n, 3, *size), (4, 3, 1, 1), (n, 4, *out), (4,))
    check_all(backend, dtype, shapes, {**PLAIN, "stride": stride}, np.random.default_rng(0), is_last)


@pytest.mark.parametrize(("dtype", "num_calls"), [("float32", 1), ("float16", 2)])
def test_float32_convolutions_by_filters_of_one_pixel_are_products(
    counters: ctypes.CDLL, backend: Any, dtype: str, num_calls: int
) -> None:
    """But for those with a bias."""
    before = counters.standin_cudnn_calls(b"cudnnConvolutionForward")
    shapes = ((2, 3, 4, 4), (4, 3, 1, 1), (2, 4, 4, 4), (4,))
    check_all(backend, dtype, shapes, PLAIN, np.random.default_rng(0), (True, True))
    assert counters.standin_cudnn_calls(b"cudnnConvolutionForward") - before == num_calls


def forward(backend: Any, dtype: str = "float32", n: int = 2) -> np.ndarray:
    x, w = (backend.asarray(np.ones(shape, dtype)) for shape in ((n, 3, 5, 5), (4, 3, 2, 2)))
    y = backend.empty((n, 4, 4, 4), dtype)
    backend.run("conv2d", x, w, out=y, **PLAIN)
    return backend.to_numpy(y)


def test_algorithms_are_timed_once_for_each_shape(counters: ctypes.CDLL, backend: Any) -> None:
    before = found(counters)
    for n in (2, 3, 2, 3, 2):
        forward(backend, n=n)
    assert found(counters) - before == 2


def test_the_fastest_deterministic_algorithm_in_plain_float32_arithmetic_is_taken(
    counters: ctypes.CDLL, backend: Any
) -> None:
    forward(backend)  # 3 is not deterministic, 2 was timed with TF32
    assert last_run(counters) == (1, FMA)


def test_tf32_is_used_only_where_it_is_allowed(
    counters: ctypes.CDLL, backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward(backend)
    monkeypatch.setattr(state, "allow_tf32", True)
    forward(backend)
    assert last_run(counters) == (2, DEFAULT_MATH)
    monkeypatch.setattr(state, "allow_tf32", False)
    forward(backend)
    assert last_run(counters) == (1, FMA)


def test_tf32_is_kept_off_where_cudnn_proposes_nothing_else(
    counters: ctypes.CDLL, backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STANDIN_CUDNN_MATH", str(DEFAULT_MATH))
    forward(backend)
    assert last_run(counters) == (2, FMA)


def test_float16_uses_tensor_cores(
    counters: ctypes.CDLL, backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "benchmark_convolutions", False)
    forward(backend, "float16")
    [(plan, _)] = backend._plans.values()
    assert (plan.algorithm, plan.math) == (2, DEFAULT_MATH)  # which is free to use them
    forward(backend, "float64")
    assert last_run(counters) == (2, DEFAULT_MATH)


def test_without_benchmark_convolutions_nothing_is_timed_and_what_was_timed_is_kept(
    counters: ctypes.CDLL, backend: Any
) -> None:
    forward(backend)
    before = found(counters)
    benchmark_convolutions(False)
    try:
        forward(backend)
        assert found(counters) == before
        assert len(backend._plans) == 2
    finally:
        benchmark_convolutions()
    forward(backend)
    assert found(counters) == before
    assert len(backend._plans) == 2
    with pytest.raises(OptionError, match="benchmark_convolutions: enabled = 2 must be True or False"):
        benchmark_convolutions(2)  # type: ignore[arg-type]


def test_nothing_is_timed_while_the_stream_is_captured(counters: ctypes.CDLL, backend: Any) -> None:
    before = found(counters)
    x, w = (backend.asarray(np.ones(shape, "float32")) for shape in ((2, 3, 5, 5), (4, 3, 2, 2)))
    y = backend.empty((2, 4, 4, 4), "float32")
    backend.stream.begin_capture()
    backend.run("conv2d", x, w, out=y, **PLAIN)
    graph = backend.stream.end_capture()
    graph.launch(backend.stream)
    np.testing.assert_array_equal(backend.to_numpy(y), 12)
    assert found(counters) == before
    assert last_run(counters) == (1, FMA)


def test_short_memory_leaves_the_algorithms_that_fit(
    counters: ctypes.CDLL, backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    roomy = backend.empty

    def empty(shape: Any, dtype: Any) -> Any:
        if np.prod(shape) > 1 << 12:  # arrays fit, no workspace to time with
            raise MemoryError
        return roomy(shape, dtype)

    monkeypatch.setattr(backend, "empty", empty)
    np.testing.assert_array_equal(forward(backend), 12)
    assert last_run(counters) == (0, FMA)  # without workspace


def test_memory_to_time_with_is_not_of_the_pool_in_force(
    backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    conv = sys.modules["singa_lite.backend.cuda.conv"]
    cuda, using, empty = conv.cupy.cuda, conv.cupy.cuda.using_allocator, backend.empty
    pools: list[Any] = []
    seen: list[Any] = []

    @contextmanager
    def using_allocator(malloc: Any) -> Iterator[None]:
        pools.append(malloc.__self__)
        with using(malloc):
            yield
        pools.pop()

    def noted(shape: Any, dtype: Any) -> Any:
        if shape == conv.WORKSPACE_BYTES[:1]:
            seen.append(pools[-1])
        return empty(shape, dtype)

    monkeypatch.setattr(cuda, "using_allocator", using_allocator)
    monkeypatch.setattr(backend, "empty", noted)
    kept = cuda.MemoryPool()
    with using_allocator(kept.malloc):
        forward(backend)
    assert len(seen) == 1 and seen[0] is not kept


def test_misaligned_arrays_are_copied(counters: ctypes.CDLL, backend: Any) -> None:
    rng, shapes = np.random.default_rng(3), ((2, 3, 5, 5), (4, 3, 2, 2), (2, 4, 4, 4))
    values = [rng.standard_normal(shape) for shape in shapes]
    arrays = [backend.asarray(np.append(0, value))[1:].reshape(value.shape) for value in values]
    assert all(array.data.ptr % 16 for array in arrays)
    REFERENCE.run("conv2d", *values[:2], out=values[2], **PLAIN)
    backend.run("conv2d", *arrays[:2], out=arrays[2], **PLAIN)
    close(backend.to_numpy(arrays[2]), values[2], "float64")
    [(plan, _)] = backend._plans.values()
    assert plan.algorithm == 2


def test_workspace_grows_and_keeps_its_address_while_it_suffices(counters: ctypes.CDLL, backend: Any) -> None:
    forward(backend, n=2)
    address = backend._workspaces[0][-1].data.ptr
    forward(backend, n=1)
    assert [array.data.ptr for array in backend._workspaces[0]] == [address]
    forward(backend, n=8)
    assert len(backend._workspaces[0]) == 2
    assert backend._workspaces[0][0].data.ptr == address


def test_descriptors_and_handles_are_given_back(
    counters: ctypes.CDLL, all_given_back: None, backend: Any
) -> None:
    before, other = counters.standin_cudnn_live(), type(backend)(0)
    forward(other)
    assert counters.standin_cudnn_live() == before + 6


@slow_but_first(
    "call",
    [
        "cudnnCreate",
        "cudnnSetStream",
        "cudnnConvolutionForward",
        "cudnnCreateConvolutionDescriptor",
        "cudnnSetTensor4dDescriptor",
        "cudnnSetFilter4dDescriptor",
        "cudnnSetConvolution2dDescriptor",
        "cudnnSetConvolutionGroupCount",
        "cudnnSetConvolutionMathType",
        "cudnnFindConvolutionForwardAlgorithmEx",
    ],
    count=3,
)
def test_every_failing_call_is_reported_with_its_text(
    all_given_back: None, backend: Any, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STANDIN_CUDNN_FAIL", call)
    with pytest.raises(DeviceError, match=r"STATUS \(5000\): as the test wished"):
        forward(type(backend)(0))


def test_an_error_names_the_call_and_the_shapes(counters: ctypes.CDLL, backend: Any) -> None:
    x, w, wrong = (backend.empty(shape, "float64") for shape in ((2, 3, 5, 5), (4, 3, 2, 2), (2, 4, 5, 4)))
    with pytest.raises(
        DeviceError, match=r"float64 x \(2, 3, 5, 5\) w \(4, 3, 2, 2\) y \(2, 4, 5, 4\).*output size"
    ):
        backend.run("conv2d", x, w, out=wrong, **PLAIN)


def test_an_old_cudnn_is_refused(
    counters: ctypes.CDLL, backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STANDIN_CUDNN_VERSION", "8907")
    with pytest.raises(DeviceError, match=r"version number 8907, but at least 90000 .*nvidia-cudnn-cu12"):
        forward(backend)


def test_a_missing_function_is_named(
    counters: ctypes.CDLL, backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SINGA_LITE_CUDNN_LIB", str(standin_cudnn("-DcudnnAddTensor=cudnnAddNothing")))
    with pytest.raises(DeviceError, match=r"\(version 92800\) has no function cudnnAddTensor"):
        forward(backend)


def test_arrays_that_cudnn_does_not_take_are_an_error_with_the_cure(backend: Any) -> None:
    memory = backend.empty((1,), "float16").data
    x, y = (
        type(backend.empty((1,), "f"))(shape, "float16", memory, (0, 0, 0, 0))
        for shape in ((1 << 16, 8, 64, 64), (1 << 16, 1, 64, 64))
    )
    w = backend.zeros((1, 8, 1, 1), "float16")
    expected = r"cuDNN takes arrays of fewer than 2\^31 elements, not 2147483648; use a smaller batch"
    with pytest.raises(DeviceError, match="conv2d: " + expected):
        backend.conv2d(x, w, out=y, **PLAIN)
    with pytest.raises(DeviceError, match="batchnorm_2d: " + expected):
        backend._norm(x, 1 << 20)


def test_a_missing_library_is_reported_with_its_cure(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SINGA_LITE_CUDNN_LIB", "libno_such_cudnn.so.9")
    with pytest.raises(DeviceError, match=r"libno_such_cudnn.so.9: cannot open .*SINGA_LITE_CUDNN_LIB"):
        forward(backend)


def test_the_library_is_searched_in_its_package_and_then_by_the_loader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SINGA_LITE_CUDNN_LIB", raising=False)
    (tmp_path / "vendor_of_tests" / "cudnn").mkdir(parents=True)
    monkeypatch.syspath_prepend(str(tmp_path))
    names = _native.library_names("SINGA_LITE_CUDNN_LIB", "vendor_of_tests.cudnn", "libcudnn.so.9")
    assert names == [str(tmp_path / "vendor_of_tests/cudnn/lib/libcudnn.so.9"), "libcudnn.so.9"]
    assert _native.library_names("SINGA_LITE_CUDNN_LIB", "no_vendor.cudnn", "libcudnn.so.9") == [
        "libcudnn.so.9"
    ]


# What NVIDIA's header takes from CUDA's, so that cuDNN's alone is needed.
CUDA_HEADERS = {
    "cuda_runtime_api.h": "#include <stddef.h>\n"
    "typedef struct CUstream_st* cudaStream_t;\ntypedef struct CUgraph_st* cudaGraph_t;\n",
    "library_types.h": "typedef enum { MAJOR_VERSION } libraryPropertyType;\n",
}


def test_prototypes_and_numbers_are_those_of_nvidias_header(tmp_path: Path) -> None:
    include = os.environ.get("SINGA_LITE_CUDNN_INCLUDE")
    if include is None:
        spec = importlib.util.find_spec("nvidia") and importlib.util.find_spec("nvidia.cudnn")
        folders = (spec.submodule_search_locations if spec else None) or ["/usr"]
        include = os.path.join(folders[0], "include")
    if not os.path.exists(os.path.join(include, "cudnn.h")):
        pytest.skip("cudnn.h is not installed (nvidia-cudnn-cu12, or SINGA_LITE_CUDNN_INCLUDE=folder)")
    for name, text in CUDA_HEADERS.items():
        (tmp_path / name).write_text(text)
    assert complaints_of_header_check("-Wno-deprecated-declarations", f"-I{include}", f"-I{tmp_path}") == ""


def test_the_check_of_prototypes_has_our_names_also_without_nvidias_header() -> None:
    assert complaints_of_header_check("-DWITHOUT_CUDNN_HEADER") == ""


def complaints_of_header_check(*options: str) -> str:
    command = ["g++", "-std=c++17", "-fsyntax-only", f"-I{ROOT / 'native'}", *options]
    source = ROOT / "native/tests/cudnn_header.cc"
    return subprocess.run([*command, source], capture_output=True, text=True, timeout=LIMIT_S).stderr
