# SPDX-License-Identifier: Apache-2.0
"""Element-wise CUDA kernels give the same bits whether a thread takes one element or several neighbours at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from singa_lite.backend.base import Backend
from singa_lite.backend.cpu import NumpyBackend
from singa_lite.dtypes import bfloat16
from tests.devices import cuda_device, no_gpu

LIMITS = {"min": -0.5, "max": 0.75}
# kernel, number of inputs and of outputs, attributes, whether numpy gives the same bits
CASES: list[tuple[str, int, int, dict[str, Any], bool]] = [
    ("relu", 1, 1, {}, True),
    ("leakyrelu", 1, 1, {"alpha": 0.25}, True),
    ("gelu", 1, 1, {}, False),
    ("clip", 1, 1, LIMITS, True),
    ("clip_backward", 2, 1, LIMITS, True),
    ("relu_backward", 2, 1, {}, True),
    ("tanh_backward", 2, 1, {}, False),
    ("add", 2, 1, {}, True),
    ("add", 2, 1, {"relu": True}, True),
    ("add_gelu", 2, 2, {}, False),
    ("pass_where_less", 3, 1, {}, True),
]
IDS = [f"{name}-relu" if "relu" in attributes else name for name, _, _, attributes, _ in CASES]
SIZES = [1, 7, 8, 9, 4097]
DTYPES = [np.dtype(np.float16), bfloat16]
pytestmark = [] if no_gpu() else [pytest.mark.gpu]


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Any:
    return cuda_device(monkeypatch).backend


def values(count: int, dtype: Any, seed: int) -> np.ndarray:
    """Return normal numbers with some zeros, infinities and NaNs."""
    made = np.random.default_rng(seed).standard_normal(count)
    for step, special in ((11, -0.0), (13, np.inf), (17, np.nan), (19, 1e-7)):
        made[seed + step - 1 :: step] = special
    return made.astype(dtype)


def bits(arrays: list[np.ndarray]) -> list[np.ndarray]:
    """Return the bits of 16-bit numbers, those of each NaN as the same."""
    return [
        np.where(np.isnan(array.astype("f")), np.uint16(0xFFFF), array.view(np.uint16)) for array in arrays
    ]


def run(
    backend: Backend,
    name: str,
    inputs: list[np.ndarray],
    num_outputs: int,
    shape: tuple[int, ...],
    offsets: tuple[int, ...],
    **attributes: Any,
) -> list[np.ndarray]:
    """Run a kernel on arrays ``offsets`` elements behind an aligned address; check what surrounds its outputs."""

    def place(array: np.ndarray, offset: int) -> tuple[Any, Any]:
        held = backend.asarray(
            np.concatenate([np.ones(offset), array.ravel(), np.ones(9)]).astype(array.dtype)
        )
        return held, held[offset : offset + array.size].reshape(array.shape)

    given = [place(array, offset)[1] for array, offset in zip(inputs, offsets, strict=False)]
    outs = [place(np.zeros(shape, inputs[0].dtype), offset) for offset in offsets[len(inputs) :]]
    out = tuple(view for _, view in outs)
    backend.run(name, *given, out=out if num_outputs > 1 else out[0], **attributes)
    for (held, view), offset in zip(outs, offsets[len(inputs) :], strict=True):
        around = np.delete(backend.to_numpy(held).astype("f"), np.s_[offset : offset + view.size])
        np.testing.assert_array_equal(around, 1)
    return bits([backend.to_numpy(view) for _, view in outs])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_sizes_and_addresses_do_not_change_the_bits(case: Any, dtype: Any, backend: Backend) -> None:
    name, num_inputs, num_outputs, attributes, is_exact = case
    num_arrays = num_inputs + num_outputs
    for size in SIZES:
        inputs = [values(size, dtype, seed) for seed in range(num_inputs)]
        aligned = run(backend, name, inputs, num_outputs, (size,), (0,) * num_arrays, **attributes)
        for moved in [*np.eye(num_arrays, dtype=int), np.ones(num_arrays, int), np.full(num_arrays, 8)]:
            other = run(backend, name, inputs, num_outputs, (size,), tuple(moved), **attributes)
            np.testing.assert_array_equal(other, aligned, err_msg=f"{size} elements, offsets {moved}")
        if is_exact:
            plain = {key: value for key, value in attributes.items() if key != "relu"}
            expected = np.empty(size, dtype)
            NumpyBackend().run(name, *inputs, out=expected, **plain)
            if "relu" in attributes:
                NumpyBackend().run("relu", expected.copy(), out=expected)
            np.testing.assert_array_equal(aligned, bits([expected]), err_msg=f"{size} elements")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES[5:], ids=IDS[5:])
def test_repeated_operands_give_the_bits_of_whole_ones(case: Any, dtype: Any, backend: Backend) -> None:
    name, num_inputs, num_outputs, attributes, _ = case
    shape = (6, 5, 16)
    for repeated in [(16,), (6, 1, 1), (5, 1), (1,), (6, 5, 1)]:
        for place in range(max(0, num_inputs - 2), num_inputs):
            inputs = [values(480, dtype, seed).reshape(shape) for seed in range(num_inputs)]
            inputs[place] = values(int(np.prod(repeated)), dtype, 9).reshape(repeated)
            whole = [np.ascontiguousarray(np.broadcast_to(array, shape)) for array in inputs]
            aligned = (0,) * (num_inputs + num_outputs)
            given = [
                run(backend, name, arrays, num_outputs, shape, aligned, **attributes)
                for arrays in (inputs, whole)
            ]
            np.testing.assert_array_equal(*given, err_msg=f"{repeated} at {place}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_second_operand_of_float32_is_rounded_with_the_result(dtype: Any, backend: Backend) -> None:
    for size in SIZES:
        x, other = values(size, dtype, 0), np.random.default_rng(1).standard_normal(size).astype("f")
        out = backend.asarray(np.zeros(size, dtype))
        backend.run("add", backend.asarray(x), backend.asarray(other), out=out)
        np.testing.assert_array_equal(
            bits([backend.to_numpy(out)]), bits([(x.astype("f") + other).astype(dtype)])
        )


@pytest.mark.parametrize("dtype", [*DTYPES, np.dtype(np.float32)], ids=str)
@pytest.mark.parametrize("block", [3, 8, 24])
def test_channels_in_blocks_are_pooled_to_the_same_bits(block: int, dtype: Any, backend: Backend) -> None:
    geometry: dict[str, Any] = {"kernel_size": (3, 2), "stride": (2, 1), "padding": (1, 1)}
    shape, out_shape = (2, 24, 7, 6), (2, 24, 4, 7)
    x = values(2016, np.dtype(np.float32), 3).clip(-2, 2).round(1).astype(dtype).reshape(shape)  # with equals
    dy = values(1344, dtype, 4).reshape(out_shape)

    def in_blocks(array: np.ndarray) -> np.ndarray:
        n, c, h, w = array.shape
        parts = array.reshape(n, c // block, block, h, w).transpose(0, 1, 3, 4, 2)
        return np.ascontiguousarray(parts).reshape(array.shape)

    def pool(x: np.ndarray, dy: np.ndarray, memory_format: int, offset: int) -> list[np.ndarray]:
        def on_device(array: np.ndarray) -> Any:
            held = backend.asarray(np.concatenate([np.zeros(offset, array.dtype), array.ravel()]))
            return held[offset:].reshape(array.shape)

        y, dx = on_device(np.zeros_like(dy)), on_device(np.zeros_like(x))
        indices = on_device(np.zeros(out_shape, np.uint8))
        options = {**geometry, "memory_format": memory_format}
        backend.run("max_pool_2d", on_device(x), out=(y, indices), **options)
        backend.run("max_pool_2d_backward", on_device(dy), indices, out=dx, **options)
        return [backend.to_numpy(array) for array in (y, indices, dx)]

    expected = [in_blocks(array) for array in pool(x, dy, 1, 0)]
    for offset in (0, 1):
        for mine, right in zip(pool(in_blocks(x), in_blocks(dy), block, offset), expected, strict=True):
            np.testing.assert_array_equal(mine.astype("f"), right.astype("f"), err_msg=f"offset {offset}")
