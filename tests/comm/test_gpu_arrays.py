# SPDX-License-Identifier: Apache-2.0
"""Values on their way through 16 bits on a GPU, beside wire.py's on the host."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from singa_lite.comm.gpu_arrays import CupyArrays
from singa_lite.comm.wire import WIRE_DTYPES, narrow, widen
from tests.devices import cuda_device, no_gpu

pytestmark = [] if no_gpu() else [pytest.mark.gpu]


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Any:
    found = cuda_device(monkeypatch).backend
    monkeypatch.setitem(sys.modules, "cupy", sys.modules["singa_lite.backend.cuda"].cupy)
    return found


def floats() -> np.ndarray:
    """All kinds: ties between two halves of either sort, what overflows, infinities, NaNs; normal numbers alone."""
    rng = np.random.default_rng(0)
    some = rng.standard_normal(5000).astype(np.float32) * np.float32(10.0) ** rng.integers(-4, 5, 5000)
    ties = (rng.integers(0x3C00, 0x4400, 500, np.uint32) << 16) + 0x8000
    special = [
        0.0,
        -0.0,
        65504,
        65519,
        65520,
        -65520,
        3.3895e38,
        3.4e38,
        -3.4e38,
        np.inf,
        -np.inf,
        np.nan,
        -np.nan,
    ]
    return np.concatenate([some, ties.view(np.float32), np.array(special)]).astype(np.float32)


def test_every_stream_finds_the_scale_of_those_without_one(backend: Any) -> None:
    values, cupy = floats(), sys.modules["cupy"]
    cupy.cuda.Stream(non_blocking=True).use()
    for _ in range(20):
        cupy.ones(4_000_000, np.float32)  # so that what comes behind is late
    arrays = CupyArrays(0)
    backend.activate()
    half = backend.to_numpy(arrays.narrow(backend.asarray(values), WIRE_DTYPES["float16"]))
    np.testing.assert_array_equal(half, narrow(values, WIRE_DTYPES["float16"], None))


@pytest.mark.parametrize("wire", WIRE_DTYPES)
@pytest.mark.parametrize("divisor", [1.0, 3.0])
@pytest.mark.parametrize("scale", [None, 0.25, 3.0])
def test_sixteen_bits_are_what_the_host_makes_of_them(
    backend: Any, wire: str, divisor: float, scale: float | None
) -> None:
    values, arrays = floats(), CupyArrays(0)
    factor = None if scale is None else np.array([scale], np.float32)
    on_device = None if factor is None else backend.asarray(factor)
    backend.activate()
    half = arrays.narrow(backend.asarray(values), WIRE_DTYPES[wire], on_device)
    expected = narrow(values, WIRE_DTYPES[wire], factor)
    is_number = ~np.isnan(values)
    np.testing.assert_array_equal(
        backend.to_numpy(half).view(np.uint16)[is_number], expected.view(np.uint16)[is_number]
    )
    wide = backend.empty(values.shape, "float32")
    arrays.widen(half, divisor, on_device, wide)
    with np.errstate(over="ignore"):
        on_host = widen(expected) / np.float32(divisor) / np.float32(scale or 1)  # a mean is taken first
    np.testing.assert_allclose(backend.to_numpy(wide), on_host, rtol=1e-6)
