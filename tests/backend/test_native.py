# SPDX-License-Identifier: Apache-2.0
"""Every compiled kernel against the float64 numpy path, and the calls it must leave to numpy."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from singa_lite import _native
from singa_lite.backend.cpu import CpuBackend, NumpyBackend
from singa_lite.backend.formulas import FORMULAS, UPDATES
from singa_lite.backend.recurrent import GATES, RnnConfig
from singa_lite.errors import OptionError
from tests.limits import LIMIT_S

KERNELS, REASON = _native.load("_kernels")
CPU_FLAGS = set(Path("/proc/cpuinfo").read_text().split()) if sys.platform == "linux" else set()
if KERNELS is None:
    pytest.skip(f"nothing was compiled: {REASON}", allow_module_level=True)
HAS_ONEDNN = bool(KERNELS.onednn)
NEEDS_ONEDNN = pytest.mark.skipif(not HAS_ONEDNN, reason="built without oneDNN")
REFERENCE = NumpyBackend()
BACKEND = CpuBackend()
TOLERANCE = 3e-5  # of the largest element: float32 sums of some thousand terms
STEEP = {"floor_div", "sign"}  # a float32 may be on the other side of a step
quick = settings(max_examples=60, deadline=None)


def wide(values: Any) -> Any:
    """The float64 twin of a float32 array."""
    return values.astype(np.float64) if values.dtype == np.float32 else values.copy()


def check(kernel: str, *inputs: np.ndarray, out: tuple[np.ndarray, ...], **attributes: Any) -> None:
    """The compiled kernel takes the call and agrees with numpy in float64, whose in-position outputs start equal."""
    expected = tuple(wide(array) for array in out)
    before = [array.copy() for array in inputs]
    single = out[0] if len(out) == 1 else out
    assert getattr(KERNELS, kernel)(*inputs, out=single, **attributes), f"{kernel} did not take the call"
    REFERENCE.run(kernel, *map(wide, inputs), out=expected[0] if len(out) == 1 else expected, **attributes)
    assert_close(out, expected, kernel)
    for array, original in zip(inputs, before, strict=True):
        np.testing.assert_array_equal(array, original)


def assert_close(found: tuple[np.ndarray, ...], expected: tuple[np.ndarray, ...], kernel: str) -> None:
    for array, reference in zip(found, expected, strict=True):
        scale = max(1.0, np.abs(reference).max(initial=0))
        np.testing.assert_allclose(array, reference, rtol=TOLERANCE, atol=TOLERANCE * scale, err_msg=kernel)


def floats(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def like(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    """An output full of what must be overwritten."""
    return np.full(shape, 99, dtype)


seeds = st.integers(0, 2**32 - 1)
pairs = st.tuples(st.integers(1, 3), st.integers(1, 3))
counts = st.integers(0, 3000) | st.integers(60_000, 70_000)  # the second in several threads


def test_kernels_run_as_compiled_for_this_processor():
    if not KERNELS.knows_levels:
        pytest.skip("the compiler knows no levels of x86-64 (GCC 12 does)")
    flags = Path("/proc/cpuinfo").read_text().partition("flags")[2].partition("\n")[0].split()
    assert KERNELS.fuses_multiply_add() == ({"avx2", "fma", "bmi1", "bmi2", "f16c", "movbe"} <= set(flags))


# ---- element by element --------------------------------------------------------------------------------


def test_every_formula_is_compiled():
    assert [name for name in FORMULAS if not hasattr(KERNELS, name)] == []


@quick
@given(
    st.sampled_from([formula for formula in FORMULAS.values() if formula.name not in STEEP]),
    hnp.mutually_broadcastable_shapes(num_shapes=2, max_dims=5, max_side=9),
    seeds,
)
def test_every_formula_broadcasts_as_numpy_does(formula, shapes, seed):
    given_shapes, out = shapes.input_shapes, shapes.result_shape
    inputs = [
        np.abs(floats(seed + k, *shape), out=like(*shape)) for k, shape in enumerate((out, *given_shapes))
    ]
    chosen = {1: inputs[:1], 2: inputs[1:], 3: inputs}[len(formula.inputs)]
    check(formula.name, *chosen, out=(like(*out),), **dict.fromkeys(formula.numbers, 0.5))


def test_what_a_formula_cannot_take_is_left_to_numpy():
    x = floats(1, 3, 4)
    for a, b, out in (
        (x, floats(2, 3), like(3, 4)),  # no shapes that broadcast
        (x, floats(2, 2, 3, 4), like(3, 4)),
        (x.astype("f8"), x, like(3, 4)),
        (x[:, ::2], floats(2, 3, 2), like(3, 2)),
        (x, x, like(4, 3).T),
    ):
        assert not KERNELS.add(a, b, out=out)
    assert not KERNELS.add(x, out=like(3, 4)) and not KERNELS.add(x, x, x, out=like(3, 4))
    assert not KERNELS.add(x, x, out=like(3, 4), relu=True)  # an attribute it does not know


@quick
@given(seeds, counts)
def test_relu_and_its_gradient(seed, count):
    x = floats(seed, count)
    y = like(count)
    check("relu", x, out=(y,))
    check("relu_backward", floats(seed + 1, count), y, out=(like(count),))


def test_relu_passes_nan_on():
    x = np.tile(np.float32([np.nan, -1, 1, -np.inf, np.inf]), 10)
    y = like(50)
    assert KERNELS.relu(x, out=y)
    np.testing.assert_array_equal(y, np.maximum(x, 0))


@quick
@given(
    seeds, st.sampled_from(["add", "sub", "mul", "div"]), st.lists(st.integers(1, 40), min_size=1, max_size=3)
)
def test_arithmetic_of_arrays_rows_and_numbers(seed, kernel, shape):
    a = floats(seed, *shape)
    for other in ({*()}, shape, shape[-1:], [1], [1] * len(shape)):
        b = np.abs(floats(seed + 1, *other)) + 1
        check(kernel, a, np.asarray(b, np.float32), out=(like(*shape),))


def test_arithmetic_may_write_over_its_first_input():
    for kernel in ("add", "sub", "mul", "div"):
        a, b = floats(1, 50, 33), np.abs(floats(2, 33)) + 1
        expected = like(50, 33)
        assert getattr(KERNELS, kernel)(a, b, out=expected)
        assert getattr(KERNELS, kernel)(a, b, out=a)
        np.testing.assert_array_equal(a, expected)


@quick
@given(seeds, st.integers(1, 300), st.integers(1, 1500))
def test_sum_to_adds_rows(seed, rows, columns):
    check("sum_to", floats(seed, rows, columns), out=(like(columns),))


@quick
@given(seeds, st.lists(st.integers(1, 9), max_size=6), st.data())
def test_sums_and_means_over_any_axes(seed, shape, data):
    axes = data.draw(st.lists(st.integers(0, len(shape) - 1), unique=True).map(tuple)) if shape else ()
    signed = tuple(axis - len(shape) if axis % 2 else axis for axis in axes)
    x = floats(seed, *shape)
    for keepdims in (False, True):
        out = like(*x.sum(axes, keepdims=keepdims).shape)
        for kernel in ("sum", "mean"):
            check(kernel, x, out=(out,), axes=signed, keepdims=keepdims)
    kept = tuple(1 if axis in axes else n for axis, n in enumerate(shape))
    check("sum_to", x, out=(like(*kept),))
    while kept and kept[0] == 1:
        kept = kept[1:]
        check("sum_to", x, out=(like(*kept),))


def test_sums_of_nothing_are_left_to_numpy():
    assert not KERNELS.sum(like(0, 3), out=like(3), axes=(0,), keepdims=False)
    assert not KERNELS.sum(like(3, 0), out=like(0), axes=(0,), keepdims=False)
    assert not KERNELS.mean(like(3, 2), out=like(3), axes=(0,), keepdims=False)  # the wrong shape
    assert not KERNELS.sum(like(3, 2), out=like(2), axes=(5,), keepdims=False)
    assert not KERNELS.sum_to(like(3, 2), out=like(3, 3, 2))


# ---- rows ----------------------------------------------------------------------------------------------


@quick
@given(seeds, st.integers(1, 200), st.integers(1, 700))
def test_layer_norm_and_its_gradient(seed, rows, columns):
    x, dy = floats(seed, rows, columns) + np.float32(3), floats(seed + 1, rows, columns)
    scale, bias = floats(seed + 2, columns), floats(seed + 3, columns)
    y, mean, inverse_std = like(rows, columns), like(rows), like(rows)
    check("layer_norm", x, scale, bias, out=(y, mean, inverse_std), eps=1e-3)
    out = like(rows, columns), like(columns), like(columns)
    check("layer_norm_backward", dy, x, scale, mean, inverse_std, out=out)


def test_layer_norm_over_several_axes_and_what_is_left_to_numpy():
    x, scale = floats(1, 2, 3, 4, 5), floats(2, 4, 5)
    check("layer_norm", x, scale, scale, out=(like(2, 3, 4, 5), like(2, 3), like(2, 3)), eps=1e-3)
    for out in (
        (like(2, 3, 4, 5), like(2), like(2)),
        (like(2, 3, 5, 4), like(2, 3), like(2, 3)),
        (like(2, 3, 4, 5),),
    ):
        assert not KERNELS.layer_norm(x, scale, scale, out=out, eps=1e-3)
    assert not KERNELS.layer_norm(
        x, floats(2, 5, 4), floats(2, 5, 4), out=(x.copy(), like(2, 3), like(2, 3)), eps=1e-3
    )


@quick
@given(
    seeds, st.integers(1, 300), st.integers(1, 300), st.integers(1, 3), st.sampled_from([0, 1, 2, -1, -2, -3])
)
def test_softmax_along_any_axis_and_its_gradient(seed, rows, columns, more, axis):
    shape = (rows, columns, more) if seed % 2 else (more, rows, columns)
    y = like(*shape)
    check("softmax", floats(seed, *shape) - seed % 1000, out=(y,), axis=axis)
    check("softmax_backward", floats(seed + 1, *shape), y, out=(like(*shape),), axis=axis)


@NEEDS_ONEDNN
@quick
@given(
    seeds, st.sampled_from([*GATES]), st.tuples(*[st.integers(1, 3)] * 2), st.tuples(*[st.integers(1, 40)] * 2),
    st.integers(1, 3), st.booleans(), st.booleans(),
)  # fmt: skip
def test_recurrent_layers_and_their_gradients(
    seed, mode, steps_and_batch, sizes, num_layers, bidirectional, bias
):
    config = RnnConfig(mode, *sizes, num_layers, bidirectional, bias)
    options = {"mode": mode, "hidden_size": sizes[1], "num_layers": num_layers, "lengths": None}
    options |= {"bidirectional": bidirectional, "bias": bias}
    x, w = floats(seed, *steps_and_batch, sizes[0]), floats(seed + 1, config.num_weights) / 4
    states = [floats(seed + 2 + k, config.num_cells, x.shape[1], sizes[1]) for k in range(config.num_states)]
    dy = floats(seed + 4, *steps_and_batch, config.num_directions * sizes[1])
    dlast = [floats(seed + 5 + k, *states[0].shape) for k in range(config.num_states)]
    results = []
    for run, kind in ((REFERENCE.run, wide), (native, np.copy)):
        given_x, given_w, *given_states = map(kind, (x, w, *states))
        reserve = np.empty(REFERENCE.recurrent_reserve_bytes(x.shape, given_x.dtype, **options), np.uint8)
        out = (kind(like(*dy.shape)), *map(kind, map(np.zeros_like, states)))
        run("recurrent", given_x, given_w, *given_states, out=(*out, reserve), **options)
        without = (kind(like(*dy.shape)), *map(kind, map(np.zeros_like, states)))
        run("recurrent", given_x, given_w, *given_states, out=without, **options)
        for kept, alone in zip(out, without, strict=True):
            np.testing.assert_array_equal(kept, alone)
        grads = (kind(w), *map(kind, map(np.zeros_like, states)), reserve, kind(like(*x.shape)))
        inputs = (*map(kind, (dy, *dlast)), given_x, given_w, *given_states, out[0])
        run("recurrent_backward", *inputs, out=grads, **options)
        results.append([*out, *(grad for grad in grads if grad is not reserve)])
    for wanted, got in zip(*results, strict=True):
        assert np.abs(got - wanted).max() <= TOLERANCE * max(1, np.abs(wanted).max())


def native(kernel, *inputs, **keywords):
    """Run a kernel of the module, which must take the call."""
    assert getattr(KERNELS, kernel)(*inputs, **keywords), f"{kernel} did not take the call"


@NEEDS_ONEDNN
def test_sequences_of_several_lengths_are_left_to_numpy():
    options = {"mode": "gru", "hidden_size": 2, "num_layers": 1, "bidirectional": False, "bias": True}
    x, w, h = floats(1, 3, 2, 4), floats(2, 48), floats(3, 1, 2, 2)
    out = like(3, 2, 2), like(1, 2, 2)
    assert KERNELS.recurrent(x, w, h, out=out, lengths=None, **options)
    assert not KERNELS.recurrent(x, w, h, out=out, lengths=(3, 1), **options)
    for wrong in ((x, w[1:], h), (x, w, h[:, 1:]), (x[1:], w, h), (x.astype("f8"), w, h)):
        assert not KERNELS.recurrent(*wrong, out=out, lengths=None, **options)
    for wrong in ({"mode": "lstm"}, {"mode": None}, {"mode": "GRU"}, {"more": 1}, {"num_layers": 2}):
        assert not KERNELS.recurrent(x, w, h, out=out, lengths=None, **{**options, **wrong})


@NEEDS_ONEDNN
def test_recurrent_layers_write_only_where_there_is_room():
    options = {"mode": "lstm", "hidden_size": 2, "num_layers": 1, "bidirectional": False, "bias": True}
    x, w, h, c = floats(1, 3, 2, 4), floats(2, 64), floats(3, 1, 2, 2), floats(4, 1, 2, 2)
    reserve = np.empty(REFERENCE.recurrent_reserve_bytes(x.shape, x.dtype, lengths=None, **options), np.uint8)
    y, last, fixed = like(3, 2, 2), like(1, 2, 2), like(3, 2, 2)
    fixed.flags.writeable = False
    options["lengths"] = None
    good = (y, last, last.copy(), reserve)
    assert KERNELS.recurrent(x, w, h, c, out=good, **options)
    for number, wrong in ((0, y[1:]), (0, fixed), (1, last[:, 1:]), (2, y), (3, reserve[1:])):
        out = [*good]
        out[number] = wrong
        assert not KERNELS.recurrent(x, w, h, c, out=tuple(out), **options)
    assert not KERNELS.recurrent(x, w, h, c[:, 1:], out=good, **options)
    given, good = [y, last, last, x, w, h, c, y], (like(64), last, last.copy(), reserve, like(3, 2, 4))
    assert KERNELS.recurrent_backward(*given, out=good, **options)
    for number, wrong in ((0, x), (1, y), (2, y), (4, w[1:]), (5, y), (6, y), (7, x)):
        inputs = [*given]
        inputs[number] = wrong
        assert not KERNELS.recurrent_backward(*inputs, out=good, **options)
    for number, wrong in ((0, like(63)), (1, y), (2, y), (3, reserve[1:]), (4, y)):
        out = [*good]
        out[number] = wrong
        assert not KERNELS.recurrent_backward(*given, out=tuple(out), **options)


@NEEDS_ONEDNN
@pytest.mark.parametrize("mode", GATES)
def test_recurrent_layers_pass_nan_on(mode):
    options = {"mode": mode, "hidden_size": 2, "num_layers": 1, "bidirectional": False, "bias": True}
    x, states = floats(1, 3, 2, 4), [floats(3, 1, 2, 2)] * RnnConfig(mode, 4, 2).num_states
    w = floats(2, RnnConfig(mode, 4, 2).num_weights)
    x[1, 0, 2] = np.nan
    y = like(3, 2, 2)
    assert KERNELS.recurrent(
        x, w, *states, out=(y, *(like(1, 2, 2) for _ in states)), lengths=None, **options
    )
    assert np.isnan(y[1:, 0]).all() and np.isfinite(y[0]).all() and np.isfinite(y[:, 1]).all()


def test_softmax_of_masked_rows():
    x = floats(1, 4, 40)
    x[:, 7:] = -np.inf
    y = like(4, 40)
    check("softmax", x, out=(y,), axis=1)
    assert not y[:, 7:].any()


@quick
@given(
    seeds, st.tuples(*[st.integers(1, 4)] * 2, st.integers(1, 70)), st.tuples(*[st.integers(1, 150)] * 2),
    st.sampled_from("scm"), st.sampled_from([1, 20]),
)  # fmt: skip
def test_attention_and_its_gradient(seed, sizes, lengths, kind, size):
    batch, heads, head_size = sizes
    width, (queries, keys) = heads * head_size, lengths if kind == "m" else lengths[:1] * 2
    if kind == "m":
        inputs = floats(seed, batch, queries, width), floats(seed + 1, batch, keys, 2 * width)
    else:
        inputs = (floats(seed, batch, queries, 3 * width),)
    options = {"num_heads": heads, "causal": kind == "c"}
    y = like(batch, queries, width)
    check("attention", *inputs, out=(y,), **options)
    dy, out = floats(seed + 2, *y.shape) * np.float32(size), tuple(like(*x.shape) for x in inputs)
    check("attention_backward", dy, *inputs, out=out, **options)


def test_attention_of_large_scores():
    x, y = floats(1, 1, 40, 12) * 60, like(1, 40, 4)
    check("attention", x, out=(y,), num_heads=1, causal=True)


def test_a_gradient_of_attention_to_one_key_is_that_of_its_value_alone():
    q, kv, dy = floats(1, 2, 7, 12) * 1000, floats(2, 2, 1, 24) * 1000, floats(3, 2, 7, 12)
    dq, dkv = like(2, 7, 12), like(2, 1, 24)
    assert KERNELS.attention_backward(dy, q, kv, out=(dq, dkv), num_heads=2, causal=False)
    assert not dq.any() and not dkv[..., :12].any()
    np.testing.assert_allclose(dkv[..., 12:], dy.sum(1, keepdims=True), rtol=1e-6)


def test_attention_passes_nan_on():
    x, y, dx = floats(1, 1, 40, 12), like(1, 40, 4), like(1, 40, 12)
    x[0, 30, 5] = np.nan  # a key of position 30
    options = {"num_heads": 1, "causal": True}
    assert KERNELS.attention(x, out=(y,), **options)
    assert np.isfinite(y[0, :30]).all() and np.isnan(y[0, 30:]).all()
    assert KERNELS.attention_backward(y, x, out=dx, **options)
    assert np.isnan(dx).any()


def test_attention_takes_no_arrays_that_do_not_fit():
    x, y = floats(1, 2, 5, 12), like(2, 5, 4)
    options = {"num_heads": 2, "causal": False}
    for inputs, out in (
        ((x,), like(2, 5, 6)),
        ((x,), like(2, 4, 4)),
        ((x,), (y, like(2, 2, 5))),
        ((x[:, :, :11].copy(),), y),
        ((y, floats(2, 2, 5, 4)), y),
        ((y, floats(2, 3, 5, 8)), y),
        ((), y),
    ):
        assert not KERNELS.attention(*inputs, out=out, **options)
    assert not KERNELS.attention(x, out=y, num_heads=3, causal=False)
    assert not KERNELS.attention_backward(y.copy(), x, out=like(2, 5, 13), **options)
    assert not KERNELS.attention_backward(like(2, 4, 4), x, out=like(2, 5, 12), **options)
    assert not KERNELS.attention_backward(y.copy(), out=(), **options)


# ---- moving --------------------------------------------------------------------------------------------

shapes = st.lists(st.integers(0, 20), max_size=5).map(tuple)
MOVED = st.sampled_from(["f", "i4", "f8", "i8", "e", "?"])


def some(seed: int, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    return np.asarray(np.random.default_rng(seed).integers(0, 100, shape)).astype(dtype)


def check_moved(kernel: str, *inputs: np.ndarray, out: np.ndarray, **attributes: Any) -> None:
    """The compiled kernel takes the call and gives numpy's bits."""
    expected = out.copy()
    assert getattr(KERNELS, kernel)(*inputs, out=out, **attributes), f"{kernel} did not take the call"
    REFERENCE.run(kernel, *inputs, out=expected, **attributes)
    np.testing.assert_array_equal(out, expected)


@quick
@given(seeds, shapes, MOVED, st.data())
def test_copies_between_parts_of_arrays(seed, shape, dtype, data):
    def part(number, dtype):
        """An array of ``shape`` within a larger one, with steps, some of them backwards."""
        steps = [data.draw(st.sampled_from([1, 1, 2, -1, -3])) for _ in shape]
        whole = some(seed + number, tuple(n * abs(step) for n, step in zip(shape, steps, strict=True)), dtype)
        return whole[(..., *(slice(None, None, step) for step in steps))]

    check_moved("copy", part(0, dtype), out=part(1, dtype))


@quick
@given(seeds, shapes, MOVED, st.data())
def test_transposes(seed, shape, dtype, data):
    axes = tuple(data.draw(st.permutations(range(len(shape)))))
    x = some(seed, shape, dtype)
    check_moved("transpose", x, out=like(*x.transpose(axes).shape, dtype=dtype), axes=axes)


@pytest.mark.parametrize("axes", [(1, 0), (0, 2, 1), (2, 0, 1), (0, 2, 3, 1), (0, 2, 1, 3), (3, 2, 1, 0)])
def test_large_transposes_in_several_threads(axes):
    shape = {2: (700, 333), 3: (7, 300, 101), 4: (5, 40, 31, 17)}[len(axes)]
    x = floats(1, *shape)
    check_moved("transpose", x, out=like(*x.transpose(axes).shape), axes=axes)


@quick
@given(seeds, hnp.mutually_broadcastable_shapes(num_shapes=1, max_dims=4, max_side=30), MOVED)
def test_broadcasts(seed, shapes, dtype):
    x = some(seed, shapes.input_shapes[0], dtype)
    shape = tuple(7 if n == 1 else n for n in shapes.result_shape)
    check_moved("broadcast_to", x, out=like(*shape, dtype=dtype))
    check_moved("broadcast_to", x, out=like(3, *shape, dtype=dtype))


@quick
@given(
    seeds,
    st.lists(st.integers(0, 9), min_size=1, max_size=4).map(tuple),
    st.lists(st.integers(0, 9), max_size=4),
    MOVED,
    st.data(),
)
def test_parts_are_joined_and_taken(seed, shape, sizes, dtype, data):
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    position = axis % len(shape)
    parts = [
        some(seed + i, (*shape[:position], n, *shape[position + 1 :]), dtype)
        for i, n in enumerate([*sizes, 3])
    ]
    whole = like(*shape[:position], sum(sizes) + 3, *shape[position + 1 :], dtype=dtype)
    check_moved("concat", *parts, out=whole, axis=axis)
    start = 0
    for part in parts:
        check_moved("slice", whole, out=np.empty_like(part), axis=position, start=start)
        start += part.shape[position]


@quick
@given(
    seeds,
    st.tuples(*[st.integers(0, 40)] * 3),
    st.lists(st.integers(0, 12), max_size=2).map(tuple),
    st.sampled_from(["i4", "i8"]),
)
def test_taking_by_index_and_putting_back(seed, shape, count, dtype):
    assume(shape[1] > 0 or 0 in count)
    x = floats(seed, *shape)
    ids = np.random.default_rng(seed).integers(0, max(1, shape[1]), count).astype(dtype)
    ids = np.asarray(ids)
    y = like(shape[0], *count, shape[2])
    check_moved("gather", x, ids, out=y, axis=1, where="embedding")
    check("gather_backward", floats(seed + 1, *y.shape), ids, out=(like(*shape),), axis=1)


def test_rows_of_a_large_matrix_are_put_back_in_several_threads():
    ids = np.random.default_rng(1).integers(0, 65, (32, 128)).astype("i4")
    check("gather_backward", floats(1, 32, 128, 700), ids, out=(like(65, 700),), axis=0)


def test_indices_out_of_range_are_left_to_numpy():
    x = floats(1, 3, 4)
    for bad in (-1, 4):
        ids = np.array([0, bad], "i4")
        assert not KERNELS.gather(x, ids, out=like(3, 2), axis=1)
        assert not KERNELS.gather_backward(like(3, 2), ids, out=x, axis=1)
    good = np.array([0, 1], "i4")
    assert not KERNELS.gather(x, good, out=like(3, 3), axis=1) and not KERNELS.gather(
        x, good, out=like(3, 2), axis=-1
    )
    assert not KERNELS.gather(x, good.astype("f4"), out=like(3, 2), axis=1)
    assert not KERNELS.gather(x.astype("f8"), good, out=like(3, 2, dtype="f8"), axis=1)


def test_fills():
    for shape in ((), (0, 3), (70_000,)):
        check("fill", out=(like(*shape),), value=2.5)


def test_moves_that_do_not_fit_are_left_to_numpy():
    x = floats(1, 3, 4)
    assert not KERNELS.copy(x, out=like(4, 3)) and not KERNELS.copy(x, out=like(3, 4, dtype="f8"))
    assert not KERNELS.transpose(x, out=like(3, 4), axes=(1, 0)) and not KERNELS.transpose(
        x, out=like(4, 3), axes=(1,)
    )
    assert not KERNELS.transpose(x, out=like(4, 3), axes=(2, 0))
    assert not KERNELS.broadcast_to(x, out=like(3, 5)) and not KERNELS.broadcast_to(x, out=like(4))
    assert not KERNELS.slice(x, out=like(3, 2), axis=1, start=3) and not KERNELS.slice(
        x, out=like(3, 2), axis=5, start=0
    )
    assert not KERNELS.slice(x, out=like(3, 2), axis=1, start=-1)
    assert not KERNELS.concat(x, out=like(3, 5), axis=1) and not KERNELS.concat(x, x, out=like(3, 4), axis=1)
    assert not KERNELS.copy("x", out=x) and not KERNELS.copy(x.astype(">f4"), out=like(3, 4, dtype=">f4"))
    locked = like(3, 4)
    locked.flags.writeable = False
    assert not KERNELS.copy(x, out=locked)


@quick
@given(seeds, counts, st.none() | st.floats(-1, 0), st.none() | st.floats(0, 1))
def test_clip(seed, count, low, high):
    check("clip", floats(seed, count), out=(like(count),), min=low, max=high)


@quick
@given(seeds, counts)
def test_half_precision_has_numpys_bits(seed, count):
    x = floats(seed, count) * np.float32(10.0) ** np.random.default_rng(seed).integers(-9, 6, count)
    x = x.astype(np.float32)
    half, back = like(count, dtype=np.float16), like(count)
    assert KERNELS.cast(x, out=half) and KERNELS.cast(half, out=back)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(half.view(np.uint16), x.astype(np.float16).view(np.uint16))
    np.testing.assert_array_equal(back, half.astype(np.float32))


@quick
@given(seeds, counts)
def test_max_abs(seed, count):
    check("max_abs", floats(seed, count), out=(like(1),))


def test_max_abs_tells_of_nan():
    x = floats(1, 100)
    x[70] = np.nan
    out = like(1)
    assert KERNELS.max_abs(x, out=out) and np.isnan(out[0])


# ---- products and windows ------------------------------------------------------------------------------


@pytest.mark.skipif(not HAS_ONEDNN, reason="built without oneDNN: products are numpy's")
@quick
@given(
    seeds,
    st.lists(st.integers(1, 3), max_size=3),
    st.tuples(*[st.integers(1, 70)] * 3),
    st.booleans(),
    st.booleans(),
)
def test_matmul(seed, stack, sizes, transpose_a, transpose_b):
    m, n, k = sizes
    a = floats(seed, *stack, *((k, m) if transpose_a else (m, k)))
    b = floats(seed + 1, *stack, *((n, k) if transpose_b else (k, n)))
    check("matmul", a, b, out=(like(*stack, m, n),), transpose_a=transpose_a, transpose_b=transpose_b)


@pytest.mark.skipif(not HAS_ONEDNN, reason="built without oneDNN: products are numpy's")
def test_products_that_broadcast_are_left_to_numpy():
    a, b = floats(1, 2, 3, 4, 5), floats(2, 2, 1, 5, 6)
    assert not KERNELS.matmul(a, b, out=like(2, 3, 4, 6)) and not KERNELS.matmul(
        a, b[0], out=like(2, 3, 4, 6)
    )


@st.composite
def convolutions(draw: Any) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], dict[str, Any]]:
    """Shapes of x, w, y and the attributes of a convolution that fits."""
    groups = draw(st.sampled_from([1, 1, 1, 2, 3]))
    n, c, o = draw(st.integers(1, 4)), groups * draw(st.integers(1, 9)), groups * draw(st.integers(1, 9))
    kernel = draw(st.tuples(st.integers(1, 5), st.integers(1, 5)))
    size = draw(st.tuples(st.integers(1, 14), st.integers(1, 14)))
    stride, dilation = draw(pairs), draw(pairs)
    padding = draw(st.tuples(st.integers(0, 2), st.integers(0, 2)))
    out = tuple(
        (h + 2 * p - d * (k - 1) - 1) // s + 1
        for h, k, s, p, d in zip(size, kernel, stride, padding, dilation, strict=True)
    )
    assume(all(h + 2 * p > d * (k - 1) for h, k, p, d in zip(size, kernel, padding, dilation, strict=True)))
    geometry = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    return (n, c, *size), (o, c // groups, *kernel), (n, o, *out), geometry


def check_convolution(seed: int, x_shape: Any, w_shape: Any, y_shape: Any, geometry: dict[str, Any]) -> None:
    x, w, b, dy = (
        floats(seed, *x_shape),
        floats(seed + 1, *w_shape),
        floats(seed + 2, w_shape[0]),
        floats(seed + 3, *y_shape),
    )
    check("conv2d", x, w, b, out=(like(*y_shape),), **geometry)
    check("conv2d", x, w, out=(like(*y_shape),), **geometry)
    check("conv2d_backward_data", dy, w, out=(like(*x_shape),), **geometry)
    check("conv2d_backward_weight", dy, x, out=(like(*w_shape),), **geometry)
    check("conv2d_backward_weight", dy, x, out=(like(*w_shape), like(w_shape[0])), **geometry)


@pytest.mark.skipif(not HAS_ONEDNN, reason="built without oneDNN: convolutions are numpy's")
@settings(max_examples=40, deadline=None)
@given(seeds, convolutions())
def test_convolution_and_its_gradients(seed, convolution):
    check_convolution(seed, *convolution)


@pytest.mark.skipif(not HAS_ONEDNN, reason="built without oneDNN: convolutions are numpy's")
@pytest.mark.parametrize(
    ("x", "w", "y"),
    [
        ((8, 1, 28, 28), (20, 1, 5, 5), (8, 20, 24, 24)),
        ((8, 20, 12, 12), (50, 20, 5, 5), (8, 50, 8, 8)),
        ((2, 3, 32, 32), (16, 3, 3, 3), (2, 16, 30, 30)),
        ((5, 2, 9, 40), (7, 2, 3, 3), (5, 7, 7, 38)),
        ((4, 32, 12, 11), (48, 32, 3, 3), (4, 48, 10, 9)),
    ],
)
def test_convolutions_of_real_models(x, w, y):
    geometry = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "groups": 1}
    check_convolution(3, x, w, y, geometry)


@pytest.mark.skipif(not HAS_ONEDNN, reason="built without oneDNN: convolutions are numpy's")
@settings(max_examples=40, deadline=None)
@given(
    seeds,
    st.tuples(st.integers(1, 5), st.integers(1, 7)),
    st.tuples(st.integers(1, 7), st.sampled_from([3, 5, 7])),
    st.tuples(st.integers(0, 2), st.integers(0, 2)),
    st.tuples(st.integers(1, 9), st.integers(8, 30)),
)
def test_weight_gradient_of_one_channel(seed, counts, kernel, padding, out):
    batch, outputs = counts
    size = tuple(o + k - 1 - 2 * p for o, k, p in zip(out, kernel, padding, strict=True))
    assume(min(size) >= 1)
    x, dy = floats(seed, batch, 1, *size), floats(seed + 1, batch, outputs, *out)
    geometry = {"stride": (1, 1), "padding": padding, "dilation": (1, 1), "groups": 1}
    dw = like(outputs, 1, *kernel)
    check("conv2d_backward_weight", dy, x, out=(dw,), **geometry)
    check("conv2d_backward_weight", dy, x, out=(dw.copy(), like(outputs)), **geometry)


@quick
@given(
    seeds,
    st.tuples(*[st.integers(1, 3)] * 2, *[st.integers(1, 11)] * 2),
    pairs,
    pairs,
    st.booleans(),
    st.data(),
)
def test_pooling_and_its_gradients(seed, shape, kernel_size, stride, count_include_pad, data):
    padding = tuple(data.draw(st.integers(0, k - 1)) for k in kernel_size)
    pairs_of = zip(shape[2:], kernel_size, stride, padding, strict=True)
    out = tuple((n + 2 * p - k) // s + 1 for n, k, s, p in pairs_of)
    assume(
        min(out) >= 1 and all(n + 2 * p >= k for n, k, p in zip(shape[2:], kernel_size, padding, strict=True))
    )
    check_pooling(seed, shape, (*shape[:2], *out), kernel_size, stride, padding, count_include_pad)


def check_pooling(seed, shape, out, kernel_size, stride, padding, count_include_pad=True):  # type: ignore[no-untyped-def]
    geometry = {"kernel_size": kernel_size, "stride": stride, "padding": padding}
    x, dy = floats(seed, *shape).round(1), floats(seed + 1, *out)  # rounded: with equals among the elements
    for dtype in (np.uint8, np.int32):
        indices = like(*out, dtype=dtype)
        check("max_pool_2d", x, out=(like(*out), indices), **geometry)
        check("max_pool_2d_backward", dy, indices, out=(like(*shape),), **geometry)
    geometry["count_include_pad"] = count_include_pad
    check("avg_pool_2d", x, out=(like(*out),), **geometry)
    check("avg_pool_2d_backward", dy, out=(like(*shape),), **geometry)


@pytest.mark.parametrize("size", [(8, 12), (9, 12), (8, 13), (24, 24)])
def test_pooling_by_two(size):
    out = (4, 5, size[0] // 2, size[1] // 2)
    check_pooling(1, (4, 5, *size), out, (2, 2), (2, 2), (0, 0))


@pytest.mark.parametrize("padding", [(0, 0), (1, 1)])
def test_max_pool_passes_nan_on(padding):
    x = floats(1, 1, 2, 6, 6)
    x[0, 0, 1, 1] = x[0, 1, 4, 2] = np.nan
    geometry = {"kernel_size": (2, 2), "stride": (2, 2), "padding": padding}
    size = 3 + padding[0]
    out, expected = (like(1, 2, size, size), like(1, 2, size, size, dtype=np.uint8)), like(1, 2, size, size)
    assert KERNELS.max_pool_2d(x, out=out, **geometry)
    REFERENCE.run("max_pool_2d", x, out=(expected, out[1].copy()), **geometry)
    np.testing.assert_array_equal(out[0], expected)


# ---- normalisation, losses, updates --------------------------------------------------------------------


@quick
@given(seeds, st.integers(1, 5), st.integers(1, 6), st.sampled_from([(), (1, 1), (7, 5), (40, 41)]))
def test_batch_normalisation(seed, batch, channels, inner):
    assume(batch * int(np.prod(inner)) > 1)
    shape = (batch, channels, *inner)
    x, dy = floats(seed, *shape) + 3, floats(seed + 1, *shape)
    scale, bias = floats(seed + 2, channels), floats(seed + 3, channels)
    mean, inverse_std = like(channels), like(channels)
    running = (floats(seed + 4, channels), np.abs(floats(seed + 5, channels)))
    outputs = (like(*shape), mean, inverse_std, *running)
    check("batchnorm_2d_train", x, scale, bias, out=outputs, momentum=0.1, eps=1e-3)
    check("batchnorm_2d_infer", x, scale, bias, *running, out=(like(*shape),), eps=1e-3)
    outputs = (like(*shape), like(channels), like(channels))
    check("batchnorm_2d_backward", dy, x, scale, mean, inverse_std, out=outputs)


@quick
@given(
    seeds, st.integers(1, 70), st.integers(1, 300), st.sampled_from([0, 1, 30]), st.sampled_from(["i4", "i8"])
)
def test_softmax_and_its_cross_entropy(seed, rows, columns, spread, ids):
    x = floats(seed, rows, columns) * np.float32(spread)
    labels = np.random.default_rng(seed).integers(0, columns, rows).astype(ids)
    probabilities = like(rows, columns)
    check("softmax", x, out=(probabilities,), axis=1)
    check("softmax_cross_entropy", x, labels, out=(like(1), probabilities))
    check(
        "softmax_cross_entropy_backward", np.float32([0.7]), probabilities, labels, out=(like(rows, columns),)
    )


@quick
@given(
    seeds,
    st.lists(st.integers(1, 12), max_size=3) | st.lists(st.integers(500, 70_000), min_size=1, max_size=1),
)
def test_the_mean_squared_error(seed, shape):
    x, t = floats(seed, *shape), floats(seed + 1, *shape)
    check("mse_loss", x, t, out=(like(1),))
    check("mse_loss_backward", np.float32([0.7]), x, t, out=(like(*shape),))


def test_the_mean_squared_error_of_other_shapes_and_dtypes_is_numpys():
    x, dy = floats(1, 3, 4), np.float32([1])
    for other in (floats(1, 4), floats(1, 3, 1), x.astype("f8"), np.empty((3, 4, 0), "f"), x.T):
        assert not KERNELS.mse_loss(x, other, out=like(1))
        assert not KERNELS.mse_loss_backward(dy, x, other, out=like(3, 4))
    assert not KERNELS.mse_loss(x, x, out=like(2)) and not KERNELS.mse_loss(x, x, out=like(1, dtype="f8"))
    assert not KERNELS.mse_loss_backward(like(2), x, x, out=like(3, 4))
    assert not KERNELS.mse_loss_backward(dy, x, x, out=like(3, 3))
    gradient = like(1000)
    x, t = np.full(1000, 1e-5, "f"), np.zeros(1000, "f")
    assert KERNELS.mse_loss_backward(np.float32([2e38]), x, t, out=gradient)
    assert gradient == pytest.approx(4e30)


def test_softmax_of_infinite_logits_is_numpys():
    x = np.float32([[0, -np.inf, 1], [-200, 0, 3], [np.nan, 1, 2], [-np.inf, -np.inf, -np.inf]])
    got, expected = like(4, 3), like(4, 3)
    assert KERNELS.softmax(x, out=got, axis=1)
    REFERENCE.run("softmax", x, out=expected, axis=1)
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-30)


def update_numbers(update):
    """Numbers that fit every update: rates and weights below one, no weight of zero."""
    numbers = {"correction": 1.5, "epsilon": 1e-4, "lr": 0.01, "rate": 0.01}
    return {name: numbers.get(name, 0.9) for name in update.numbers}


@quick
@given(seeds, counts, st.sampled_from(list(UPDATES.values())), st.sampled_from([0.0, 0.1]))
def test_updates(seed, count, update, weight_decay):
    arrays = [floats(seed + place, count) for place in range(2 + len(update.states))]
    grad, param, *states = arrays[0], arrays[1], *map(np.abs, arrays[2:])
    check(update.name, grad, out=(param, *states), weight_decay=weight_decay, **update_numbers(update))


@quick
@given(seeds, counts, st.sampled_from(list(UPDATES.values())), st.sampled_from([0.0, 0.1]))
def test_updates_have_the_bits_of_numpy(seed, count, update, weight_decay):
    """As ranks may have other processors, or no compiled kernels, and keep equal parameters."""
    arrays = [floats(seed + place, count) for place in range(2 + len(update.states))]
    grad, *given_arrays = arrays[0], arrays[1], *map(np.abs, arrays[2:])
    found, expected = ([array.copy() for array in given_arrays] for _ in range(2))
    numbers = {"weight_decay": weight_decay, **update_numbers(update)}
    for run, out in ((getattr(KERNELS, update.name), found), (partial(REFERENCE.run, update.name), expected)):
        run(grad, out=out[0] if len(out) == 1 else tuple(out), **numbers)
    assert [array.tobytes() for array in found] == [array.tobytes() for array in expected]


@pytest.mark.parametrize("update", UPDATES.values(), ids=UPDATES)
def test_an_infinite_parameter_without_weight_decay_has_the_bits_of_numpy(update):
    arrays = [np.full(3, np.inf, np.float32) for _ in range(1 + len(update.states))]
    found, expected = ([array.copy() for array in arrays] for _ in range(2))
    for run, out in ((getattr(KERNELS, update.name), found), (partial(REFERENCE.run, update.name), expected)):
        run(floats(0, 3), out=out[0] if len(out) == 1 else tuple(out), **update_numbers(update))
    np.testing.assert_array_equal(found, expected)


# sizes whose sum is split among threads inside a tensor, empty ones included
sizes = st.lists(st.integers(0, 50) | st.integers(20_000, 40_000), min_size=1, max_size=6)


@quick
@given(seeds, sizes, st.sampled_from(list(UPDATES.values())))
def test_an_update_of_many_tensors_updates_each(seed, sizes, update):
    grads, params, *states = (
        [floats(seed + 10 * kind + i, size) for i, size in enumerate(sizes)]
        for kind in range(2 + len(update.states))
    )
    states = [np.abs(array) for state in states for array in state]
    check(update.name, *grads, out=(*params, *states), **update_numbers(update))


def test_updates_that_overlap_or_do_not_fit_are_left_to_numpy():
    memory, grad = floats(1, 12), floats(2, 8)
    whole, tail = memory[:8], memory[4:]
    before = memory.copy()
    assert not KERNELS.sgd_update(grad, grad, out=(whole, tail), lr=0.1)
    momentum = {"lr": 0.1, "momentum": 0.9}
    assert not KERNELS.nesterov_update(grad, out=(whole, tail), **momentum)  # velocity over param
    assert not KERNELS.sgd_update(grad, grad, out=(whole, whole), lr=0.1)
    assert not KERNELS.sgd_update(grad, grad, out=(whole,), lr=0.1)
    assert not KERNELS.sgd_update(grad, out=(memory,), lr=0.1)
    assert not KERNELS.sgd_update(grad.astype(np.float64), out=(whole,), lr=0.1)
    assert not KERNELS.nesterov_update(grad, out=(whole,), **momentum)
    assert not KERNELS.nesterov_update(grad, out=(whole, floats(3, 8)), lr=0.1)  # no momentum
    assert not KERNELS.nesterov_update(grad, out=(whole, floats(3, 8)), gain=1.0, **momentum)
    assert not KERNELS.sgd_update(grad, out=(whole,), lr=(0.1, 0.2))
    np.testing.assert_array_equal(memory, before)
    BACKEND.run("sgd_update", grad, grad, out=(whole, whole), lr=0.1)  # one after the other
    np.testing.assert_allclose(whole, before[:8] - 0.2 * grad, rtol=1e-5, atol=1e-6)


@quick
@given(seeds, sizes)
def test_pack_and_unpack(seed, sizes):
    parts = [floats(seed + i, size) for i, size in enumerate(sizes)]
    packed = like(sum(sizes))
    check("pack", *parts, out=(packed,))
    back = tuple(like(size) for size in sizes)
    assert KERNELS.unpack(packed, out=back)
    for part, other in zip(parts, back, strict=True):
        np.testing.assert_array_equal(part, other)


def test_pack_leaves_other_dtypes_sizes_and_strides_to_numpy():
    x = floats(1, 4, 6)
    assert not KERNELS.pack(x, out=like(23))
    assert not KERNELS.pack(x, out=like(25))
    assert not KERNELS.pack(x.T, out=like(24))
    assert not KERNELS.pack(x, out=like(24, dtype=np.float64))
    assert not KERNELS.unpack(x.ravel(), out=(like(25),))
    flat = like(24)
    BACKEND.run("pack", x.T, out=flat)
    np.testing.assert_array_equal(flat, x.T.ravel())


# ---- selection -----------------------------------------------------------------------------------------


def selected_by(
    backend: Any, kernel: str, values: np.ndarray, count: int, index: str, **attributes: Any
) -> Any:
    indices, selected = np.full(count, -1, index), np.empty(count, values.dtype)
    if backend is KERNELS:
        assert getattr(KERNELS, kernel)(values, out=(indices, selected), **attributes)
    else:
        backend.run(kernel, values, out=(indices, selected), **attributes)
    return indices, selected


def check_top_k(values: np.ndarray, k: int, index: str = "i8") -> None:
    got = selected_by(KERNELS, "top_k", values, k, index, k=k)
    expected = selected_by(REFERENCE, "top_k", values, k, index, k=k)
    np.testing.assert_array_equal(got[0], expected[0])
    np.testing.assert_array_equal(got[1], expected[1])


@quick
@given(seeds, st.lists(st.integers(0, 70), min_size=1, max_size=6), st.integers(0, 3), st.booleans())
def test_signs_are_numpys(seed, lengths, spare, has_nan):
    ends = np.cumsum(lengths, dtype=np.int64)
    values, scales = floats(seed, int(ends[-1])), floats(seed + 1, len(lengths))
    if has_nan and values.size:
        values[values.size // 2], scales[0] = np.nan, np.inf
        values[:1] = -0.0
    bits = [np.full(-(-values.size // 8) + spare, 7, np.uint8) for _ in range(2)]
    assert KERNELS.pack_signs(values, out=bits[0])
    REFERENCE.run("pack_signs", values, out=bits[1])
    np.testing.assert_array_equal(*bits)
    sums = [values.copy(), values.copy()]
    assert KERNELS.add_signs(bits[0], scales, ends, out=sums[0], factor=0.7)
    REFERENCE.run("add_signs", bits[1], scales, ends, out=sums[1], factor=0.7)
    np.testing.assert_array_equal(*sums)


@pytest.mark.parametrize("ends", [[5, 3, 9], [3, 5, 8], [3, 5, 10]])
def test_segments_that_do_not_fit_are_left_to_numpy(ends):
    values = floats(0, 9)
    bits, before = np.zeros(2, np.uint8), values.copy()
    assert not KERNELS.add_signs(bits, floats(1, 3), np.array(ends), out=values, factor=1.0)
    np.testing.assert_array_equal(values, before)


@quick
@given(seeds, st.integers(1, 9), st.integers(0, 700), st.integers(0, 60), st.booleans())
def test_low_rank_products_are_numpys_bit_by_bit(seed, rank, rows, columns, has_nan):
    p, q, m = floats(seed, rank, rows), floats(seed + 1, rank, columns), floats(seed + 2, rows, columns)
    if rank > 2:
        p[2] = p[0] * 3 - p[1]
    if has_nan and m.size:
        m[rows // 2, 0], p[-1, rows // 2] = np.inf, np.nan
    for kernel, inputs, attributes in [
        ("orthonormal_rows", (p,), {"dropped": 1e-12}),
        ("low_rank_sum", (p, q), {}),
        ("low_rank_rest", (m, p, q), {}),
    ]:
        shape = p.shape if kernel == "orthonormal_rows" else m.shape
        got, expected = np.full(shape, 7, np.float32), np.full(shape, 7, np.float32)
        assert getattr(KERNELS, kernel)(*inputs, out=got, **attributes)
        REFERENCE.run(kernel, *inputs, out=expected, **attributes)
        np.testing.assert_array_equal(got, expected)
    got, expected = np.full(q.shape, 7, np.float32), np.full(q.shape, 7, np.float32)
    if q.size:
        assert KERNELS.unit_rows(q, out=got, seed=1, counter=2)
        REFERENCE.run("unit_rows", q, out=expected, seed=1, counter=2)
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("value", [0.0, np.nan, np.inf])
def test_rows_without_a_length_are_drawn_by_numpy(value):
    q, drawn = floats(0, 3, 5), np.zeros((3, 5), np.float32)
    q[1] = value
    before, out = q.copy(), np.full_like(q, 7)
    assert not KERNELS.unit_rows(q, out=out, seed=1, counter=2)
    assert (out == 7).all() and q.tobytes() == before.tobytes()
    REFERENCE.run("unit_rows", q, out=out, seed=1, counter=2)
    REFERENCE.run("random_normal", out=drawn, mean=0.0, std=1.0, seed=1, counter=2)
    np.testing.assert_array_equal(out[1], drawn[1])
    np.testing.assert_allclose(np.linalg.norm(out[[0, 2]], axis=1), 1, rtol=1e-6)


@quick
@given(
    seeds, st.integers(1, 100_000), st.floats(0, 1), st.integers(0, 1 << 40), st.sampled_from(["i4", "i8"])
)
def test_random_places_are_numpys(seed, n, share, counter, index):
    places = [np.full(max(1, round(share * min(n, 3000))), -1, index) for _ in range(2)]
    assert KERNELS.random_indices(out=places[0], n=n, seed=seed, counter=counter)
    REFERENCE.run("random_indices", out=places[1], n=n, seed=seed, counter=counter)
    np.testing.assert_array_equal(*places)
    assert len(set(places[0].tolist())) == places[0].size and places[0].min() >= 0 and places[0].max() < n


@quick
@given(
    seeds,
    st.integers(1, 5000),
    st.floats(0, 1),
    st.integers(0, 5),
    st.booleans(),
    st.sampled_from(["i4", "i8"]),
)
def test_top_k_is_numpys(seed, count, share, decimals, has_nan, index):
    values = floats(seed, count).round(decimals)
    if has_nan:
        values[np.random.default_rng(seed).integers(0, count, 3)] = np.float32([np.nan, -np.nan, np.inf])
    check_top_k(values, round(share * count), index)


LARGE = 600_000  # enough to be sampled


@pytest.mark.parametrize("share", [0.0001, 0.01, 0.3, 0.99, 1])
@pytest.mark.parametrize(
    "values",
    [
        floats(1, LARGE),
        floats(2, LARGE).round(1),
        np.zeros(LARGE, np.float32),
        np.arange(LARGE, dtype=np.float32),
        np.where(np.arange(LARGE) % (LARGE // 65536) == 0, 100, floats(3, LARGE)).astype(np.float32),
        np.where(np.arange(LARGE) % 100 == 3, np.nan, floats(4, LARGE)).astype(np.float32),
    ],
    ids=["normal", "with equals", "all equal", "sorted", "where the sample deceives", "with NaN"],
)
def test_top_k_of_many_is_exact(values, share):
    check_top_k(values, int(share * values.size))


@quick
@given(seeds, counts, st.sampled_from([-1.0, 0.0, 1e-40, 0.5, 1.0, 2.5, 9.0, np.inf]))
def test_thresholds_are_numpys(seed, count, threshold):
    values = floats(seed, count).round(1)
    values[: count // 100] = np.nan
    found, expected = np.zeros(1, np.int64), np.zeros(1, np.int64)
    assert KERNELS.threshold_count(values, out=found, threshold=threshold)
    REFERENCE.run("threshold_count", values, out=expected, threshold=threshold)
    assert found[0] == expected[0]
    for index in ("i4", "i8"):
        got = selected_by(KERNELS, "threshold_select", values, int(found[0]), index, threshold=threshold)
        want = selected_by(REFERENCE, "threshold_select", values, int(found[0]), index, threshold=threshold)
        np.testing.assert_array_equal(got[0], want[0])
        np.testing.assert_array_equal(got[1], want[1])


@quick
@given(seeds, st.integers(1, 1000), st.sampled_from(["i4", "i8"]))
def test_scattering(seed, count, index):
    flat, chosen = floats(seed, count), np.random.default_rng(seed).random(count) < 0.3
    indices = np.flatnonzero(chosen).astype(index)
    check("scatter_add", indices, floats(seed + 1, indices.size), out=(flat,))
    check("scatter_fill", indices, out=(flat,), value=2.5)


@pytest.mark.parametrize("index", [-1, 5])
def test_scattering_outside_is_left_to_numpy_and_changes_nothing(index):
    flat = floats(1, 5)
    before = flat.copy()
    assert not KERNELS.scatter_add(np.array([0, index]), floats(2, 2), out=flat)
    assert not KERNELS.scatter_fill(np.array([0, index]), out=flat, value=1.0)
    np.testing.assert_array_equal(flat, before)


# ---- what is left to numpy -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.astype(np.float64),
        lambda x: x.astype(np.float16),
        lambda x: x.astype(">f4"),
        lambda x: np.repeat(x, 2, axis=-1)[..., ::2],
        lambda x: np.asfortranarray(x),
        lambda x: np.frombuffer(b"-" + x.tobytes(), np.uint8)[1:].view(np.float32).reshape(x.shape),
        lambda x: x.tolist(),
    ],
    ids=["float64", "float16", "big-endian", "strided", "column-major", "unaligned", "list"],
)
def test_other_arrays_are_not_taken(change):
    x, y = floats(1, 2, 3, 4, 6), like(2, 3, 4, 6)
    assert not KERNELS.relu(change(x), out=y)
    assert not KERNELS.add(x, change(x), out=y)
    assert (y == 99).all()


def test_read_only_outputs_are_not_written():
    y = like(4)
    y.flags.writeable = False
    assert not KERNELS.relu(floats(1, 4), out=y)
    assert (y == 99).all()


def test_read_only_messages_are_not_written():
    def locked(*shape: int, dtype: str) -> np.ndarray:
        made = like(*shape, dtype=dtype)
        made.flags.writeable = False
        return made

    indices, words = np.arange(3), np.zeros(4, np.uint32)
    code = {"low_bits": 1, "upper_bound": 8}
    for kernel, inputs, out, options in (
        ("pack_signs", (floats(1, 8),), locked(1, dtype="u1"), {}),
        (
            "add_signs",
            (np.zeros(1, "u1"), floats(1, 1), np.array([8])),
            locked(8, dtype="f"),
            {"factor": 1.0},
        ),
        ("random_indices", (), locked(3, dtype="l"), {"n": 10, "seed": 1, "counter": 1}),
        ("pack_indices", (indices,), locked(4, dtype="u4"), code),
        ("unpack_indices", (words,), locked(3, dtype="l"), code),
    ):
        assert not getattr(KERNELS, kernel)(*inputs, out=out, **options)
        assert (out == 99).all()


def test_softmax_takes_no_array_without_axes():
    assert not KERNELS.softmax(floats(1, 3, 4), out=like(4, 3), axis=-1)
    assert not KERNELS.softmax(np.array(1, "f"), out=np.array(9, "f"), axis=-1)
    assert not KERNELS.softmax_backward(np.array(1, "f"), np.array(1, "f"), out=np.array(9, "f"), axis=-1)


def test_labels_out_of_range_are_left_to_numpy():
    out = (like(1), like(2, 3))
    for label in (-1, 3):
        assert not KERNELS.softmax_cross_entropy(floats(1, 2, 3), np.array([0, label]), out=out)


def test_a_call_not_taken_is_computed_by_numpy():
    x, y = np.asfortranarray(floats(1, 5, 7)), like(5, 7)
    BACKEND.run("relu", x, out=y)
    np.testing.assert_array_equal(y, np.maximum(x, 0))


# ---- memory, threads and processes ---------------------------------------------------------------------


def test_large_arrays_are_reused_and_aligned():
    first = KERNELS.empty((100, 1000), np.float32)
    address = first.ctypes.data
    assert address % 64 == 0 and first.flags.c_contiguous and first.flags.writeable
    view = first[3:]
    del first
    assert KERNELS.empty((100, 1000), "float32").ctypes.data != address  # a view keeps it alive
    del view
    assert KERNELS.empty((100, 1000), np.float32).ctypes.data == address


def test_the_pool_holds_little_more_than_was_in_use_at_once():
    code = (
        "from singa_lite import _native; k, _ = _native.load('_kernels')\n"
        "for n in range(1, 40): k.empty((n, 1 << 20), 'uint8')\n"
        "print(k.pool_bytes() >> 20)"
    )
    assert int(run_python(code)) <= 39 * 9 // 8 + 16  # sizes are rounded by at most an eighth


@pytest.mark.parametrize(
    ("instructions", "x", "w"),
    [("AVX2", (4, 3, 16, 4), (10, 3, 1, 1)), ("DEFAULT", (3, 9, 12, 12), (5, 9, 1, 1))],
)
def test_the_gradient_of_a_strided_1x1_convolution_writes_nowhere_else(instructions, x, w):
    code = (
        "import numpy as np\n"
        "from singa_lite import _native; k, _ = _native.load('_kernels')\n"
        f"n, _, height, width = {x}\n"
        "sizes = np.random.default_rng(0).integers(1, 400, 20)\n"
        "given = dict(stride=(2, 2), padding=(0, 0), dilation=(1, 1), groups=1)\n"
        "for _ in range(300):\n"
        f"    x, dw, dy = np.ones({x}, 'f'), np.empty({w}, 'f'), np.ones((n, {w[0]}, height // 2, width // 2), 'f')\n"
        "    assert k.conv2d_backward_weight(dy, x, out=dw, **given)\n"
        "    assert (dw == dy[:, 0].size).all()\n"
        "    assert not any(np.zeros(size, 'f').any() for size in sizes)\n"
        "print('done')"
    )
    assert run_python(code, ONEDNN_MAX_CPU_ISA=instructions).strip() == "done"


@pytest.mark.parametrize(
    ("chosen", "spins"),
    [({}, _native.SPIN_COUNT), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "passive"}, "0")],
    ids=["nothing", "a number", "a policy"],
)
def test_threads_spin_little_unless_the_user_has_chosen(chosen, spins):
    environment = {
        name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    }
    code = (
        "import os; before = dict(os.environ)\n"
        "from singa_lite import _native; _native.load('_kernels')\n"
        "print(dict(os.environ) == before)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={**environment, **chosen, "OMP_DISPLAY_ENV": "verbose"},
        capture_output=True, text=True, timeout=LIMIT_S, check=True,
    )  # fmt: skip
    assert done.stdout == "True\n"
    assert f"GOMP_SPINCOUNT = '{spins}'" in done.stderr


WINOGRAD = """
import numpy as np
from singa_lite import _native; k, _ = _native.load("_kernels")
from singa_lite.backend.cpu import CpuBackend; CpuBackend()
rng = np.random.default_rng(3)
x, w, dy = (rng.standard_normal(shape) for shape in ((2, 32, 13, 9), (40, 32, 3, 3), (2, 40, 13, 9)))
geometry = dict(stride=(1, 1), padding=(1, 1), dilation=(1, 1), groups=1)
def windows(images):
    padded = np.pad(images, ((0, 0), (0, 0), (1, 1), (1, 1)))
    return np.lib.stride_tricks.sliding_window_view(padded, (3, 3), (2, 3))
def error(got, *operands_of_einsum):  # of the sum of magnitudes
    subscripts, *operands = operands_of_einsum
    exact, magnitude = np.einsum(subscripts, *operands), np.einsum(subscripts, *map(abs, operands))
    return (abs(got - exact) / magnitude).max()
x, w, dy = (array.astype("f").astype(float) for array in (x, w, dy))
y, dx, dw = (np.full(array.shape, np.nan, "f") for array in (dy, x, w))
x32, w32, dy32 = (array.astype("f") for array in (x, w, dy))
assert k.conv2d(x32, w32, out=y, **geometry)
assert k.conv2d_backward_data(dy32, w32, out=dx, **geometry)
assert k.conv2d_backward_weight(dy32, x32, out=dw, **geometry)
print(error(y, "nchwij,ocij->nohw", windows(x), w))
print(error(dx, "nohwij,ocij->nchw", windows(dy), w[:, :, ::-1, ::-1]))
print(error(dw, "nchwij,nohw->ocij", windows(x), dy))
"""


@pytest.mark.skipif(not HAS_ONEDNN, reason="built without oneDNN: convolutions are numpy's")
def test_convolutions_by_winograd_and_direct_ones_are_exact_to_a_few_units_in_the_last_place():
    by_switch = {switch: run_python(WINOGRAD, SINGA_LITE_WINOGRAD=switch) for switch in ("on", "off")}
    assert by_switch["on"] != by_switch["off"]
    for errors in by_switch.values():
        assert all(0 < float(error) < 4e-7 for error in errors.split()), errors  # of the sum of magnitudes


CHOICE = """
import sys, numpy as np
from singa_lite import _native; k, _ = _native.load("_kernels")
from singa_lite.backend.cpu import CpuBackend; CpuBackend()
from singa_lite.dtypes import bfloat16
rng = np.random.default_rng(3)
for channels in (32, 64):
    for dtype in ("f", bfloat16):
        for size in (12, 6):  # of the second there are 18 tiles
            x = rng.standard_normal((2, channels, size, size)).astype(dtype)
            w = rng.standard_normal((64, channels, 3, 3)).astype(dtype)
            y = np.empty((2, 64, size, size), dtype)
            assert k.conv2d(x, w, out=y, stride=(1, 1), padding=(1, 1), dilation=(1, 1), groups=1)
            print(channels, size, dtype == "f", y.tobytes().hex())
"""


@pytest.mark.skipif(not HAS_ONEDNN, reason="built without oneDNN: convolutions are numpy's")
@pytest.mark.skipif(
    not {"avx2", "fma"} <= CPU_FLAGS, reason="this processor has no AVX2: convolutions are direct"
)
@pytest.mark.parametrize("isa", ["", "AVX2"])
def test_winograd_is_chosen_where_it_was_measured_to_be_faster(isa):
    held_to = {"ONEDNN_MAX_CPU_ISA": isa} if isa else {}
    ran = {
        switch: [
            line.split() for line in run_python(CHOICE, SINGA_LITE_WINOGRAD=switch, **held_to).splitlines()
        ]
        for switch in ("", "on", "off")
    }
    has_avx512 = "avx512bw" in CPU_FLAGS and isa == ""
    multiplies_bfloat16 = isa == "" and KERNELS.multiplies_bfloat16()
    for chosen, by_winograd, direct in zip(*ran.values(), strict=True):
        channels, is_large, is_float32 = int(chosen[0]), chosen[1] == "12", chosen[2] == "True"
        is_chosen = channels >= (64 if has_avx512 else 32) and (is_float32 or not multiplies_bfloat16)
        assert (by_winograd != direct) == is_large or not is_float32
        assert chosen == (by_winograd if is_chosen else direct)


def test_the_switch_for_winograd_is_on_or_off(monkeypatch):
    monkeypatch.setenv("SINGA_LITE_WINOGRAD", "yes")
    with pytest.raises(OptionError, match="SINGA_LITE_WINOGRAD=yes: expected on or off"):
        CpuBackend()


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5,), (1 << 17,)])
@pytest.mark.parametrize("dtype", ["float32", np.float16, np.dtype(np.int64), bool])
def test_empty_has_the_shape_and_dtype_requested(shape, dtype):
    array = BACKEND.empty(shape, dtype)
    assert array.shape == shape and array.dtype == np.dtype(dtype) and array.flags.c_contiguous


def run_python(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


STEP = """
import os, sys
import numpy as np
from singa_lite import _native
from singa_lite.backend.cpu import CpuBackend
kernels, _ = _native.load("_kernels")
backend = CpuBackend()
x, w = np.ones((16, 8, 20, 20), np.float32), np.ones((8, 8, 3, 3), np.float32)
def step():
    y, z = np.empty((16, 8, 18, 18), np.float32), np.empty((200, 200), np.float32)
    geometry = dict(stride=(1, 1), padding=(0, 0), dilation=(1, 1), groups=1)
    backend.run("conv2d", x, w, out=y, **geometry)
    backend.run("conv2d_backward_weight", y, x, out=(np.empty_like(w), np.empty(8, np.float32)), **geometry)
    backend.run("matmul", np.ones((200, 200), np.float32), z * 0, out=z)
    backend.run("relu", y, out=np.empty_like(y))
    assert (y == 72).all()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")
def test_a_child_forked_after_threads_ran_computes_on_one():
    code = STEP + (
        "step()\n"
        "assert kernels.num_threads() == 4\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    step(); print(kernels.num_threads(), flush=True); os._exit(0)\n"
        "assert os.waitpid(pid, 0)[1] == 0\n"
        "step(); print(kernels.num_threads())"
    )
    assert run_python(code, OMP_NUM_THREADS="4").split() == ["1", "4"]


@pytest.mark.skipif(not HAS_ONEDNN, reason="built without oneDNN: products are numpy's")
def test_a_child_forked_after_a_product_alone_computes_on_one():
    code = STEP + (
        "a = np.ones((500, 500), np.float32)\n"
        "backend.run('matmul', a, a, out=np.empty_like(a))\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    backend.run('matmul', a, a, out=np.empty_like(a)); print(kernels.num_threads(), flush=True); os._exit(0)\n"
        "assert os.waitpid(pid, 0)[1] == 0\n"
    )
    assert run_python(code, OMP_NUM_THREADS="4").split() == ["1"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")
def test_a_child_forked_before_any_threads_ran_may_use_them():
    code = STEP + (
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    step(); print(kernels.num_threads(), flush=True); os._exit(0)\n"
        "assert os.waitpid(pid, 0)[1] == 0\n"
    )
    assert run_python(code, OMP_NUM_THREADS="3").split() == ["3"]


def test_threads_follow_the_environment_and_threadpoolctl():
    code = STEP + (
        "import threadpoolctl\n"
        "print(kernels.num_threads())\n"
        "with threadpoolctl.threadpool_limits(2): step(); print(kernels.num_threads())\n"
        "step(); print(kernels.num_threads())"
    )
    assert run_python(code, OMP_NUM_THREADS="3").split() == ["3", "2", "3"]


def test_the_number_of_threads_changes_no_selection_and_no_elementwise_bit():
    code = (
        "import numpy as np, hashlib\n"
        "from singa_lite.backend.cpu import CpuBackend\n"
        "b = CpuBackend(); v = np.random.default_rng(0).standard_normal(700_000).astype('f4')\n"
        "i, s = np.empty(7000, 'i8'), np.empty(7000, 'f4'); b.run('top_k', v, out=(i, s), k=7000)\n"
        "p, m = v.copy(), v.copy(); b.run('nesterov_update', v, out=(p, m), lr=.1, momentum=.9)\n"
        "c = np.empty(700, 'f4'); b.run('sum_to', v.reshape(1000, 700), out=c)\n"
        "print(hashlib.sha256(b''.join(a.tobytes() for a in (i, s, p, m, c))).hexdigest())"
    )
    assert len({run_python(code, OMP_NUM_THREADS=str(threads)) for threads in (1, 2, 5)}) == 1
