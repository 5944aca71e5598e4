# SPDX-License-Identifier: Apache-2.0
"""What a table of values cannot say: semantics per operator, shape rules, and what bad input raises."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from singa_lite import autograd, layer
from singa_lite.autograd.ops.window import output_size
from singa_lite.device import Device, get_default_device
from singa_lite.errors import DTypeError, OptionError, ShapeError, SingaLiteError
from singa_lite.tensor import Tensor, to_numpy

pytestmark = pytest.mark.usefixtures("training")


def parameter(values: Any, dtype: str = "float64") -> Tensor:
    return Tensor(data=np.asarray(values, dtype), dtype=dtype, stores_grad=True)


def ones(*shape: int, dtype: str = "float32") -> Tensor:
    return Tensor(data=np.ones(shape), dtype=dtype)


# ---- where SINGA is wrong ------------------------------------------------------------------------------


def test_both_summands_may_have_another_consumer() -> None:
    """SINGA adds into one gradient that both inputs of an addition share."""
    values = np.array([1.0, 2.0, 3.0])
    p, q = parameter(values), parameter(values[::-1].copy())
    u, v = autograd.mul(p, q), autograd.mul(q, q)
    loss = autograd.reduce_sum(autograd.add(autograd.add(u, v), autograd.mul(autograd.add(u, v), 0.5)))
    loss = autograd.add(loss, autograd.reduce_sum(autograd.mul(v, 2.0)))
    grads = autograd.gradients(loss)
    np.testing.assert_allclose(to_numpy(grads[p]), 1.5 * values[::-1])
    np.testing.assert_allclose(to_numpy(grads[q]), 1.5 * values + 7 * values[::-1])


def test_dropout_scales_up_draws_again_and_obeys_its_ratio() -> None:
    """SINGA scales by 1 - ratio, repeats one mask, and its layer always drops half."""
    get_default_device().SetRandSeed(1)
    x = ones(100, 100)
    first, second = (to_numpy(autograd.dropout(x, 0.2)) for _ in range(2))
    assert set(np.unique(first)) == {0.0, np.float32(1.25)}
    assert abs((first == 0).mean() - 0.2) < 0.02
    assert (first != second).any()
    get_default_device().SetRandSeed(1)
    np.testing.assert_array_equal(to_numpy(autograd.dropout(x, 0.2)), first)


def test_dropout_gradient_goes_through_the_same_mask() -> None:
    x = parameter(np.ones((10, 10)))
    y = autograd.dropout(x, 0.4)
    grad = autograd.gradients(autograd.reduce_sum(y))[x]
    np.testing.assert_array_equal(to_numpy(grad), to_numpy(y))


def test_dropout_is_the_identity_outside_training() -> None:
    autograd.training = False
    x = ones(5)
    assert autograd.dropout(x, 0.9) is x


def test_batched_matmul_has_a_gradient() -> None:
    """SINGA's transposes all axes and fails."""
    a, b = parameter(np.ones((2, 3, 4))), parameter(np.full((2, 4, 5), 2.0))
    grads = autograd.gradients(autograd.reduce_sum(autograd.matmul(a, b)))
    np.testing.assert_array_equal(to_numpy(grads[a]), np.full((2, 3, 4), 10.0))
    np.testing.assert_array_equal(to_numpy(grads[b]), np.full((2, 4, 5), 3.0))


def test_a_product_over_no_elements_is_zero_and_has_a_gradient() -> None:
    a, b = parameter(np.ones((2, 3, 0))), parameter(np.ones((0, 4)))
    y = autograd.matmul(a, b)
    np.testing.assert_array_equal(to_numpy(y), np.zeros((2, 3, 4)))
    grads = autograd.gradients(autograd.reduce_sum(y))
    assert (grads[a].shape, grads[b].shape) == ((2, 3, 0), (0, 4))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_soft_labels_are_read_as_numbers(dtype: str) -> None:
    """SINGA reads their bits as integers: 1.15 for this row."""
    p = parameter([[0.2, 0.4, 0.4]])
    target = np.array([[0.125, 0.125, 0.75]])
    loss = autograd.cross_entropy(p, Tensor(data=target, dtype=dtype))
    assert loss.item() == pytest.approx(-(target * np.log([0.2, 0.4, 0.4])).sum())


@pytest.mark.parametrize("dtype", ["float32", "int32", "int64", "float16"])
def test_one_hot_labels_of_any_dtype_equal_ids(dtype: str) -> None:
    x = parameter(np.random.default_rng(0).standard_normal((4, 3)))
    ids = np.array([2, 0, 1, 1])
    by_id = autograd.softmax_cross_entropy(x, Tensor(data=ids, dtype="int32")).item()
    by_row = autograd.softmax_cross_entropy(x, Tensor(data=np.eye(3)[ids].astype(dtype), dtype=dtype)).item()
    assert by_id == by_row


def test_add_bias_does_not_change_its_input() -> None:
    x = ones(2, 3)
    autograd.add_bias(x, ones(3))
    np.testing.assert_array_equal(to_numpy(x), np.ones((2, 3)))


def test_add_bias_on_columns_sums_its_gradient_over_columns() -> None:
    b = parameter(np.zeros(2))
    y = autograd.add_bias(ones(2, 3, dtype="float64"), b, axis=1)
    grad = autograd.gradients(y, Tensor(data=[[1, 2, 3], [4, 5, 6]], dtype="float64"))[b]
    np.testing.assert_array_equal(to_numpy(grad), [6, 15])


def test_transpose_without_axes_reverses_the_shape() -> None:
    assert autograd.transpose(ones(2, 3, 4)).shape == (4, 3, 2)


@pytest.mark.parametrize("loss", [autograd.softmax_cross_entropy, autograd.cross_entropy, autograd.mse_loss])
def test_losses_multiply_by_the_incoming_gradient(loss: Callable[..., Tensor]) -> None:
    """SINGA's ignore or mishandle it, so that loss scaling is impossible."""
    values = np.random.default_rng(4).uniform(0.2, 1, (3, 3))
    target = Tensor(data=np.eye(3), dtype="float64")
    grads = []
    for dy in (None, 1024.0, Tensor(data=[1024.0], dtype="float64")):
        x = parameter(values)
        grads.append(to_numpy(autograd.gradients(loss(x, target), dy)[x]))
    np.testing.assert_array_equal(grads[1], 1024 * grads[0])
    np.testing.assert_array_equal(grads[2], grads[1])


# ---- batch norm ----------------------------------------------------------------------------------------


def test_running_statistics_move_in_training_only() -> None:
    values = np.random.default_rng(5).standard_normal((8, 3, 2, 2))
    x = Tensor(data=values, dtype="float64")
    mean, var = parameter([1.0, 2, 3]), parameter([4.0, 5, 6])
    autograd.batchnorm_2d(x, ones(3, dtype="float64"), ones(3, dtype="float64"), mean, var, momentum=0.9)
    np.testing.assert_allclose(
        to_numpy(mean), 0.1 * np.array([1, 2, 3]) + 0.9 * values.mean((0, 2, 3)), rtol=1e-12
    )
    np.testing.assert_allclose(
        to_numpy(var), 0.1 * np.array([4, 5, 6]) + 0.9 * values.var((0, 2, 3), ddof=1), rtol=1e-12
    )
    autograd.training = False
    kept = to_numpy(mean)
    y = autograd.batchnorm_2d(x, ones(3, dtype="float64"), ones(3, dtype="float64"), mean, var, eps=1e-3)
    np.testing.assert_array_equal(to_numpy(mean), kept)
    column = (1, 3, 1, 1)
    expected = (values - kept.reshape(column)) / np.sqrt(to_numpy(var).reshape(column) + 1e-3) + 1
    np.testing.assert_allclose(to_numpy(y), expected, rtol=1e-12)


# ---- numbers as operands -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_numbers_take_the_dtype_of_the_tensor(dtype: str) -> None:
    x = Tensor(data=[1.0, 2.0, 4.0], dtype=dtype)
    cases = {
        "add": (0.1, lambda a, b: a + b),
        "sub": (3, lambda a, b: a - b),
        "mul": (0.5, lambda a, b: a * b),
        "div": (0.7, lambda a, b: a / b),
        "pow": (2, lambda a, b: a**b),
    }
    for name, (number, reference) in cases.items():
        for pair in ((x, number), (number, x)):
            y = getattr(autograd, name)(*pair)
            assert y.dtype == dtype
            arrays = [to_numpy(item).astype(float) if item is x else item for item in pair]
            np.testing.assert_allclose(to_numpy(y).astype(float), reference(*arrays), rtol=2e-3)


def test_tensor_operators_are_recorded() -> None:
    x = parameter([1.0, 2.0])
    y = 3 - ((x + 1) * 2 - x / 2) ** 2
    grad = autograd.gradients(autograd.reduce_sum(-y))[x]
    inner = (np.array([1.0, 2]) + 1) * 2 - np.array([1.0, 2]) / 2
    np.testing.assert_allclose(to_numpy(grad), 2 * inner * 1.5)


def test_gradient_of_a_power_is_finite_at_zero() -> None:
    x = parameter([0.0, 0.0])
    grad = autograd.gradients(autograd.reduce_sum(x**2.0 + x**0.0))[x]
    np.testing.assert_array_equal(to_numpy(grad), [0, 0])


# ---- choosing ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "first", "second"), [("max", [1, 0, 1, 1], [0, 1, 0, 0]), ("min", [1, 1, 0, 1], [0, 0, 1, 0])]
)
def test_the_first_of_equal_tensors_has_the_gradient(
    device: Device, op: str, first: list, second: list
) -> None:
    a, b = parameter([1.0, 2, 3, np.nan]), parameter([1.0, 4, 2, 0])
    y = getattr(autograd, op)(a, b)
    np.testing.assert_array_equal(to_numpy(y), {"max": [1, 4, 3, np.nan], "min": [1, 2, 2, np.nan]}[op])
    grads = autograd.gradients(y, Tensor(data=np.ones(4), dtype="float64"))
    np.testing.assert_array_equal(to_numpy(grads[a]), first)
    np.testing.assert_array_equal(to_numpy(grads[b]), second)


def test_the_largest_of_tensors_and_numbers(device: Device) -> None:
    x = Tensor(data=[-1.0, 0.5, np.nan, 3.0])
    np.testing.assert_array_equal(to_numpy(autograd.max(x, 0, 2.5)), np.float32([2.5, 2.5, np.nan, 3]))
    np.testing.assert_array_equal(to_numpy(autograd.min(0, x)), np.float32([-1, 0, np.nan, 0]))
    whole = Tensor(data=[1, 5, 3])
    assert to_numpy(autograd.max(whole, 4)).tolist() == [4, 5, 4] and autograd.max(whole) is whole


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int32"])
def test_comparisons_are_masks_in_the_dtype_of_floats(device: Device, dtype: str) -> None:
    mask = autograd.greater(Tensor(data=[1, 2, 3], dtype=dtype), 2)
    assert mask.dtype == ("float32" if dtype == "int32" else dtype) and to_numpy(mask).tolist() == [0, 0, 1]


def test_where_takes_conditions_of_any_dtype_and_from_the_host(device: Device) -> None:
    x, y = parameter([1.0, 2.0, np.inf]), Tensor(data=[-1.0], dtype="float64")
    for condition in (
        [True, False, False],
        np.array([2, 0, 0]),
        Tensor(data=[0.5, 0, 0]),
        Tensor(data=[1, 0, 0]),
        Tensor(data=[np.nan, 0, 0]),
    ):
        chosen = autograd.where(x, y, condition)
        assert to_numpy(chosen).tolist() == [1, -1, -1]
        (grad,) = autograd.gradients(chosen, Tensor(data=[5.0, 6, 7], dtype="float64")).values()
        assert to_numpy(grad).tolist() == [5, 0, 0]
    assert to_numpy(autograd.where(1, Tensor(data=[[0.0], [2.0]]), [1, 0])).tolist() == [[1, 0], [1, 2]]


@pytest.mark.parametrize(
    ("dtype", "condition_dtype", "condition"),
    [
        ("int32", "float32", [0.5, 0, 2]),
        ("float16", "float32", [1e-10, 0, -1e-10]),
        ("int32", "int64", [2**32, 0, -(2**32)]),
        ("float32", "float64", [1e-50, -0.0, 1e-50]),
        ("float32", "int32", [-1, 0, 1]),
    ],
)
def test_where_compares_the_condition_with_zero_in_its_own_dtype(
    device: Device, dtype: str, condition_dtype: str, condition: list
) -> None:
    x, y = Tensor(data=[1, 2, 3], dtype=dtype), Tensor(data=[4, 5, 6], dtype=dtype)
    chosen = autograd.where(x, y, Tensor(data=condition, dtype=condition_dtype))
    assert chosen.dtype == dtype and to_numpy(chosen).tolist() == [1, 5, 3]


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_binary_cross_entropy_is_finite_at_certain_probabilities(device: Device, dtype: str) -> None:
    x = parameter([[0.0], [1.0], [0.0], [1.0]], dtype)
    loss = autograd.binary_cross_entropy(x, Tensor(data=[[0], [1], [1], [0]]))
    assert loss.item() == 50 and loss.shape == (1,)
    (grad,) = autograd.gradients(loss).values()
    assert to_numpy(grad)[:2].tolist() == [[0], [0]] and not np.isnan(to_numpy(grad)).any()


def test_gelu_keeps_its_digits_far_below_zero(device: Device) -> None:
    """x (1 + erf(x / sqrt(2))) / 2 in float32 has none left at -6."""
    x = np.float32([-3, -5, -6, -8])
    expected = np.array([v * math.erfc(-v / math.sqrt(2)) / 2 for v in x.tolist()])
    np.testing.assert_allclose(to_numpy(autograd.gelu(Tensor(data=x))), expected, rtol=2e-6)


# ---- taking by index -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("ids_dtype", ["int32", "int64"])
def test_rows_that_several_ids_name_have_the_sum_of_their_gradients(
    device: Device, dtype: str, ids_dtype: str
) -> None:
    rng = np.random.default_rng(3)
    ids = rng.integers(0, 7, (5, 300))  # some 200 of each
    dy = rng.standard_normal((5, 300, 33)).astype(dtype)
    w = parameter(rng.standard_normal((9, 33)), dtype)
    gradients = []
    for _ in range(2):
        y = autograd.embedding(Tensor(data=ids, dtype=ids_dtype), w)
        np.testing.assert_array_equal(to_numpy(y), to_numpy(w)[ids])
        gradients.append(to_numpy(autograd.gradients(y, Tensor(data=dy, dtype=dtype))[w]))
    exact = np.zeros((9, 33))
    np.add.at(exact, ids.reshape(-1), dy.reshape(-1, 33).astype(float))
    tolerance = {"float16": 2e-2, "float32": 2e-6, "float64": 1e-13}[dtype]
    np.testing.assert_allclose(gradients[0], exact, atol=tolerance * np.abs(exact).max())
    assert gradients[0].tobytes() == gradients[1].tobytes() and not gradients[0][7:].any()


def test_an_index_out_of_range_is_a_shape_error_at_the_latest_when_the_host_waits(device: Device) -> None:
    w = parameter(np.ones((3, 2)), "float32")
    for bad in (3, -1):
        with pytest.raises(ShapeError, match=r"indices must be in 0 \.\. 2"):
            to_numpy(autograd.embedding(Tensor(data=[0, bad]), w))
    assert to_numpy(autograd.embedding(Tensor(data=[2]), w)).tolist() == [[1, 1]]


def test_an_index_out_of_range_names_the_function_that_was_called() -> None:
    with pytest.raises(ShapeError, match=r"^embedding: indices must be in 0 \.\. 2"):
        autograd.embedding(Tensor(data=[3]), ones(3, 2))
    with pytest.raises(ShapeError, match=r"^gather: indices must be in 0 \.\. 2"):
        autograd.gather(ones(3, 2), 0, Tensor(data=[3]))


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint64"])
def test_indices_of_few_bits_take_from_a_long_axis(dtype: str) -> None:
    x = Tensor(data=np.arange(40_000), dtype="int32")
    assert to_numpy(autograd.gather(x, 0, np.array([1, 100], dtype))).tolist() == [1, 100]
    assert to_numpy(autograd.gather(x, 0, np.array([-1], "int8"))).tolist() == [39_999]


def test_pad_and_clip_keep_numbers_that_no_float_holds() -> None:
    number, zeros = 2**53 + 1, Tensor((1,), dtype="int64")
    assert to_numpy(autograd.pad(zeros, "constant", [1, 0], number)).tolist() == [number, 0]
    assert to_numpy(autograd.clip(zeros, number)).tolist() == [number]
    assert to_numpy(autograd.clip(zeros, None, -number)).tolist() == [-number]


@pytest.mark.parametrize("shape", [(0, 3), (3, 0)])
def test_taking_nothing_and_from_nothing(device: Device, shape: tuple[int, int]) -> None:
    x = parameter(np.ones(shape))
    assert autograd.gather(x, 1, []).shape == (x.shape[0], 0)
    y = autograd.gather(x, 1, Tensor(data=np.zeros((2, 0), np.int32)))
    assert y.shape == (shape[0], 2, 0)
    assert (
        to_numpy(autograd.gradients(y, Tensor((shape[0], 2, 0), dtype="float64"))[x]).tolist()
        == np.zeros(shape).tolist()
    )


# ---- layer norm ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_layer_norm_keeps_its_digits_far_from_zero(device: Device, dtype: str) -> None:
    x = (1000 + np.random.default_rng(2).standard_normal((4, 700))).astype(dtype)
    one, zero = ones(700, dtype=dtype), Tensor((700,), dtype=dtype)
    wide = x.astype(float)
    expected = (wide - wide.mean(1, keepdims=True)) / np.sqrt(wide.var(1, keepdims=True) + 1e-5)
    y = to_numpy(autograd.layer_norm(Tensor(data=x, dtype=dtype), one, zero))
    np.testing.assert_allclose(y, expected, atol={"float16": 4e-3, "float32": 2e-4, "float64": 1e-10}[dtype])


# ---- attention -----------------------------------------------------------------------------------------


def test_causal_attention_does_not_depend_on_what_comes_later(device: Device) -> None:
    x = np.random.default_rng(4).standard_normal((2, 70, 24)).astype("float32")
    changed = x.copy()
    changed[:, 40:] = 1e3
    first, second = (
        to_numpy(autograd.attention(Tensor(data=v), num_heads=2, causal=True)) for v in (x, changed)
    )
    np.testing.assert_array_equal(first[:, :40], second[:, :40])
    assert np.abs(first[:, 40:] - second[:, 40:]).max() > 1


def test_attention_keeps_no_probabilities_for_backward(device: Device) -> None:
    x = Tensor(data=np.ones((2, 50, 24), "float32"), requires_grad=True, stores_grad=True)
    y = autograd.attention(x, num_heads=2, causal=True)
    assert y.creator is not None and y.creator.context is not None
    assert [array.shape for array in y.creator.context.saved] == [x.shape]


@pytest.mark.parametrize(
    ("shapes", "options", "error", "message"),
    [
        ([(2, 3, 10)], {"num_heads": 2}, ShapeError, "must be 3 times a width"),
        ([(2, 3, 9)], {"num_heads": 2}, ShapeError, "divides by num_heads = 2"),
        ([(2, 0, 12)], {"num_heads": 2}, ShapeError, "no axis may be empty"),
        ([(3, 12)], {"num_heads": 2}, ShapeError, "3 axes"),
        ([(2, 3, 4), (2, 3, 4)], {"num_heads": 2}, ShapeError, "2 width"),
        ([(2, 3, 4), (1, 3, 8)], {"num_heads": 2}, ShapeError, "2 width"),
        ([(2, 3, 4), (2, 3, 8)], {"num_heads": 2, "causal": True}, OptionError, "leave memory out"),
        ([(2, 3, 12)], {"num_heads": 0}, OptionError, "num_heads = 0"),
    ],
)
def test_attention_of_what_does_not_fit_is_an_error(
    shapes: list, options: dict, error: type, message: str
) -> None:
    with pytest.raises(error, match=message):
        autograd.attention(*(Tensor(shape) for shape in shapes), **options)


# ---- shape rules ---------------------------------------------------------------------------------------

SIZE = st.integers(1, 9)
SMALL = st.integers(1, 3)


@settings(max_examples=60, deadline=None)
@given(SIZE, SIZE, SMALL, SMALL, SMALL, SMALL, st.integers(0, 2), SMALL)
def test_convolution_has_as_many_outputs_as_windows_fit(
    height: int, width: int, kh: int, kw: int, sh: int, sw: int, padding: int, dilation: int
) -> None:
    sizes = []
    for n, k, s in ((height, kh, sh), (width, kw, sw)):
        starts = range(0, n + 2 * padding, s)
        sizes.append(sum(start + dilation * (k - 1) < n + 2 * padding for start in starts))
    x, w = ones(2, 1, height, width), ones(3, 1, kh, kw)
    options = {"stride": (sh, sw), "padding": padding, "dilation": dilation}
    if min(sizes) == 0:
        with pytest.raises(ShapeError, match="does not fit"):
            autograd.conv2d(x, w, **options)
    else:
        assert autograd.conv2d(x, w, **options).shape == (2, 3, *sizes)


@settings(max_examples=60, deadline=None)
@given(SIZE, SIZE, SMALL, SMALL, SMALL, SMALL, st.integers(0, 2))
def test_pooling_has_as_many_outputs_as_windows_fit(
    height: int, width: int, kh: int, kw: int, sh: int, sw: int, padding: int
) -> None:
    options: dict[str, Any] = {"kernel_size": (kh, kw), "stride": (sh, sw), "padding": padding}
    sizes = [
        sum(start + k <= n + 2 * padding for start in range(0, n + 2 * padding, s))
        for n, k, s in ((height, kh, sh), (width, kw, sw))
    ]
    for op in (autograd.max_pool_2d, autograd.avg_pool_2d):
        x = ones(2, 3, height, width)
        if padding >= min(kh, kw):
            with pytest.raises(OptionError, match="padding"):
                op(x, **options)
        elif min(sizes) == 0:
            with pytest.raises(ShapeError, match="does not fit"):
                op(x, **options)
        else:
            y = op(x, **options)
            assert y.shape == (2, 3, *sizes)
            if op is autograd.max_pool_2d:
                assert (to_numpy(y) == 1).all()  # padding never wins, and every window overlaps the image


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_broadcast_gradients_have_the_shape_of_their_input(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    shapes = []
    for _ in range(2):
        kept = shape[data.draw(st.integers(0, len(shape))) :]
        shapes.append([1 if data.draw(st.booleans()) else size for size in kept])
    a, b = (parameter(np.full(s, 2.0)) for s in shapes)
    for op in (autograd.add, autograd.sub, autograd.mul, autograd.div, autograd.pow):
        y = op(a, b)
        grads = autograd.gradients(autograd.reduce_sum(y))
        assert grads[a].shape == a.shape and grads[b].shape == b.shape
        if op is autograd.add:
            assert to_numpy(grads[a]).sum() == y.size()


def test_output_size_names_the_operator_and_the_cure() -> None:
    with pytest.raises(ShapeError, match=r"conv2d: a window of \(5, 5\).*smaller kernel"):
        output_size("conv2d", (4, 4), (5, 5), (1, 1), (0, 0))


# ---- bad input -----------------------------------------------------------------------------------------


def ids(*values: int, dtype: str = "int32") -> Tensor:
    return Tensor(data=np.array(values), dtype=dtype)


BAD_CALLS: list[tuple[str, Callable[[], object], type[SingaLiteError], str]] = [
    ("relu of ints", lambda: autograd.relu(ids(1)), DTypeError, "relu: needs float"),
    ("div of ints", lambda: autograd.div(ids(1), ids(2)), DTypeError, "div: needs float"),
    ("add shapes", lambda: autograd.add(ones(2), ones(3)), ShapeError, r"\(2,\) and \(3,\) do not broadcast"),
    ("add of a string", lambda: autograd.add(ones(2), "1"), DTypeError, "Tensor or a number, got str"),
    ("add of two numbers", lambda: autograd.add(1, 2), DTypeError, "one operand must be a Tensor"),
    ("int plus fraction", lambda: autograd.add(ids(1), 0.5), DTypeError, r"int32 cannot hold .*0\.5"),
    ("sum of nothing", autograd.sum, ShapeError, "sum: expected at least one"),
    ("mean of nothing", autograd.mean, ShapeError, "mean: expected at least one"),
    ("sum of shapes", lambda: autograd.sum(ones(2), ones(3)), ShapeError, "sum: tensors have the shapes"),
    ("softmax axis", lambda: autograd.softmax(ones(2)), ShapeError, "axis 1 is out of range for 1 axes"),
    (
        "conv2d of no weights",
        lambda: autograd.conv2d(ones(1, 2, 4, 4), ones(3, 2, 0, 1)),
        ShapeError,
        "has no elements",
    ),
    (
        "conv2d stride",
        lambda: autograd.conv2d(ones(1, 2, 4, 4), ones(3, 2, 2, 2), stride=2**17),
        OptionError,
        "stride = 131072 .* <= 65536",
    ),
    ("matmul inner", lambda: autograd.matmul(ones(2, 3), ones(2, 3)), ShapeError, "must agree in k"),
    ("matmul vector", lambda: autograd.matmul(ones(3), ones(3, 2)), ShapeError, "must agree in k"),
    ("matmul batch", lambda: autograd.matmul(ones(2, 1, 1), ones(3, 1, 1)), ShapeError, "do not broadcast"),
    ("bias size", lambda: autograd.add_bias(ones(2, 3), ones(2)), ShapeError, r"shape \(3,\)"),
    ("bias axis", lambda: autograd.add_bias(ones(2, 3), ones(3), 2), OptionError, "axis = 2"),
    ("reshape size", lambda: autograd.reshape(ones(6), (4, 2)), ShapeError, r"\(6,\) does not fit into"),
    ("reshape rest", lambda: autograd.reshape(ones(6), (4, -1)), ShapeError, "does not fit into"),
    ("reshape two rests", lambda: autograd.reshape(ones(6), (-1, -1)), ShapeError, "at most one -1"),
    ("flatten axis", lambda: autograd.flatten(ones(2), 3), ShapeError, "flatten: axis 3"),
    ("transpose", lambda: autograd.transpose(ones(2, 3), (0,)), ShapeError, "not a permutation of 2"),
    ("transpose twice", lambda: autograd.transpose(ones(2, 3), (1, 1)), ShapeError, "twice"),
    ("cat sizes", lambda: autograd.cat([ones(2, 3), ones(2, 4)]), ShapeError, "must agree but for axis 0"),
    ("cat of nothing", lambda: autograd.cat([]), ShapeError, "at least one"),
    ("int plus nan", lambda: autograd.add(ids(1), float("nan")), DTypeError, "int32 cannot hold .*nan"),
    ("int plus too much", lambda: autograd.add(ids(1), 2**40), DTypeError, "int32 cannot hold"),
    ("float plus too much", lambda: autograd.add(ones(1), 10**400), DTypeError, "too large for float32"),
    ("add complex", lambda: autograd.add(ones(1), np.complex64(1j)), DTypeError, "got complex64"),
    ("cat of no list", lambda: autograd.cat(3), DTypeError, "list of Tensors, got int"),
    ("cat axis", lambda: autograd.cat([ones(2)], 1), ShapeError, "cat: axis 1 is out of range for 1 axes"),
    ("axis kind", lambda: autograd.reduce_sum(ones(2), "a"), ShapeError, "axis 'a' is not an int"),
    ("axes kind", lambda: autograd.reduce_mean(ones(2), (0.0,)), ShapeError, "axis 0.0 is not an int"),
    ("softmax axis kind", lambda: autograd.softmax(ones(2, 2), None), ShapeError, "axis None is not an int"),
    ("transpose kind", lambda: autograd.transpose(ones(2, 2), 1), ShapeError, "not a permutation"),
    ("reshape kind", lambda: autograd.reshape(ones(2), (2.0,)), ShapeError, "made of ints"),
    ("clip kind", lambda: autograd.clip(ones(2), "a"), OptionError, "min = 'a' must be a number"),
    (
        "less of a huge int",
        lambda: autograd.less(ones(2, dtype="int64"), 2**70),
        DTypeError,
        "too large for int64",
    ),
    ("clip ints", lambda: autograd.clip(ones(2, dtype="int32"), 0.5), DTypeError, "int32 cannot hold"),
    (
        "conv group 0",
        lambda: autograd.conv2d(ones(1, 1, 1, 1), ones(1, 1, 1, 1), group=0),
        OptionError,
        "group",
    ),
    ("conv group kind", lambda: autograd.conv2d(ones(1), ones(1), group="a"), OptionError, "group = 'a'"),
    ("dropout kind", lambda: autograd.dropout(ones(3), "a"), OptionError, "ratio = 'a'"),
    ("pad kind", lambda: autograd.pad(ones(3), "constant", (1, "a")), OptionError, "pads = 'a'"),
    ("pad negative", lambda: autograd.pad(ones(3), "constant", (1, -1)), OptionError, "pads = -1"),
    ("pad count", lambda: autograd.pad(ones(3), "constant", (1, 1, 1)), ShapeError, "1 axes need 2 pads"),
    ("pad mode", lambda: autograd.pad(ones(3), "edge", (1, 1)), OptionError, "mode = 'edge'"),
    (
        "pad of ints beyond",
        lambda: autograd.pad(ids(3), "constant", (1, 1), 2**40),
        DTypeError,
        "int32 cannot",
    ),
    (
        "pad of ints",
        lambda: autograd.pad(ids(3), "constant", (1, 1), 0.5),
        DTypeError,
        "int32 cannot hold 0.5",
    ),
    (
        "batchnorm statistics kind",
        lambda: autograd.batchnorm_2d(ones(2, 3), ones(3), ones(3), np.ones(3), ones(3)),
        DTypeError,
        "running_mean must be a Tensor",
    ),
    (
        "batchnorm momentum",
        lambda: autograd.batchnorm_2d(ones(2, 3), ones(3), ones(3), ones(3), ones(3), momentum="a"),
        OptionError,
        "momentum = 'a'",
    ),
    ("reduce axis", lambda: autograd.reduce_sum(ones(2), 1), ShapeError, "axis 1 is out of range"),
    ("mean of ints", lambda: autograd.reduce_mean(ids(1)), DTypeError, "needs float"),
    ("conv axes", lambda: autograd.conv2d(ones(3, 4, 4), ones(2, 3, 1, 1)), ShapeError, r"\(N, C, H, W\)"),
    (
        "conv channels",
        lambda: autograd.conv2d(ones(1, 4, 9, 9), ones(8, 3, 5, 5)),
        ShapeError,
        "x has 4 channels but W expects 3",
    ),
    (
        "conv group",
        lambda: autograd.conv2d(ones(1, 4, 9, 9), ones(8, 1, 5, 5), group=3),
        ShapeError,
        "divisible by group = 3",
    ),
    (
        "conv bias",
        lambda: autograd.conv2d(ones(1, 1, 9, 9), ones(8, 1, 5, 5), ones(1)),
        ShapeError,
        r"b must have shape \(8,\)",
    ),
    (
        "conv stride",
        lambda: autograd.conv2d(ones(1, 1, 9, 9), ones(8, 1, 5, 5), stride=0),
        OptionError,
        "stride = 0",
    ),
    (
        "conv padding",
        lambda: autograd.conv2d(ones(1, 1, 9, 9), ones(8, 1, 5, 5), padding=(1, 1, 1, 1)),
        OptionError,
        "pair of ints",
    ),
    ("pool axes", lambda: autograd.max_pool_2d(ones(3, 4), 2), ShapeError, "max_pool_2d: x must have 4 axes"),
    ("pool kernel", lambda: autograd.avg_pool_2d(ones(1, 1, 4, 4), 0), OptionError, "kernel_size = 0"),
    ("dropout ratio", lambda: autograd.dropout(ones(3), 1.0), OptionError, "ratio = 1.0"),
    (
        "batchnorm scale",
        lambda: autograd.batchnorm_2d(ones(2, 3), ones(2), ones(3), ones(3), ones(3)),
        ShapeError,
        r"scale must have shape \(3,\)",
    ),
    (
        "batchnorm statistics",
        lambda: autograd.batchnorm_2d(ones(2, 3), ones(3), ones(3), ones(3), ones(3, dtype="float64")),
        DTypeError,
        "expected float32 running_var beside float32 x, got float64",
    ),
    (
        "batchnorm axes",
        lambda: autograd.batchnorm_2d(ones(2, 3, 4), ones(3), ones(3), ones(3), ones(3)),
        ShapeError,
        r"\(N, C\)",
    ),
    (
        "label count",
        lambda: autograd.softmax_cross_entropy(ones(2, 3), ids(1, 1, 1)),
        ShapeError,
        r"ids \(2,\) or a matrix \(2, 3\)",
    ),
    (
        "label range",
        lambda: autograd.softmax_cross_entropy(ones(2, 3), ids(1, 3)),
        ShapeError,
        r"0\.\.2 .* 1\.\.3",
    ),
    ("float ids", lambda: autograd.cross_entropy(ones(2, 3), ones(2)), DTypeError, "int32 or int64"),
    ("logits", lambda: autograd.softmax_cross_entropy(ones(2), ids(0, 0)), ShapeError, r"\(N, C\)"),
    (
        "softmax loss of nothing",
        lambda: autograd.softmax_cross_entropy(ones(0, 3), ids()),
        ShapeError,
        r"x has shape \(0, 3\): there is no mean loss of nothing",
    ),
    ("loss of nothing", lambda: autograd.cross_entropy(ones(0, 3), ones(0, 3)), ShapeError, "no mean loss"),
    ("loss of no class", lambda: autograd.cross_entropy(ones(2, 0), ids(0, 0)), ShapeError, "no mean loss"),
    (
        "mse of nothing",
        lambda: autograd.mse_loss(ones(0, 3), ones(0, 3)),
        ShapeError,
        r"\(0, 3\).* no mean loss",
    ),
    (
        "batchnorm of nothing",
        lambda: autograd.batchnorm_2d(ones(0, 3, 4, 4), ones(3), ones(3), ones(3), ones(3)),
        ShapeError,
        r"\(0, 3, 4, 4\): there is no mean of a batch of nothing",
    ),
    (
        "batchnorm of one value",
        lambda: autograd.batchnorm_2d(ones(1, 3), ones(3), ones(3), ones(3), ones(3)),
        ShapeError,
        r"\(1, 3\): one value of a channel has no variance",
    ),
    (
        "batchnorm of one pixel",
        lambda: autograd.batchnorm_2d(ones(1, 3, 1, 1), ones(3), ones(3), ones(3), ones(3)),
        ShapeError,
        r"\(1, 3, 1, 1\): one value of a channel has no variance",
    ),
    ("mse shapes", lambda: autograd.mse_loss(ones(2, 1), ones(2)), ShapeError, "one shape"),
    ("gelu of ints", lambda: autograd.gelu(ids(1)), DTypeError, "gelu: needs float"),
    ("gelu by another way", lambda: autograd.gelu(ones(1), "erf"), OptionError, "approximate = 'erf'"),
    ("elu of ints", lambda: autograd.elu(ids(1)), DTypeError, "elu: needs float"),
    ("elu with a string", lambda: autograd.elu(ones(1), "1"), OptionError, "elu: alpha = '1'"),
    ("leakyrelu with a string", lambda: autograd.leakyrelu(ones(1), "1"), OptionError, "leakyrelu: a = '1'"),
    ("max of nothing", autograd.max, ShapeError, "max: expected at least one"),
    ("max of one number", lambda: autograd.max(1), DTypeError, "max: expected a Tensor, got int"),
    ("max of two numbers", lambda: autograd.max(1, 2, ones(1)), DTypeError, "max: one operand must be"),
    ("max shapes", lambda: autograd.max(ones(2), ones(3)), ShapeError, "max: shapes"),
    ("min dtypes", lambda: autograd.min(ones(2), ids(2, 2)), DTypeError, "min: inputs must share"),
    ("greater shapes", lambda: autograd.greater(ones(2), ones(3)), ShapeError, "greater: shapes"),
    ("less of dtypes", lambda: autograd.less(ones(2), ids(2, 2)), DTypeError, "less: inputs must share"),
    ("where shapes", lambda: autograd.where(ones(2), ones(3), [1]), ShapeError, "where: shapes"),
    ("where condition", lambda: autograd.where(ones(2), ones(2), [1, 0, 1]), ShapeError, "where: shapes"),
    ("where ragged", lambda: autograd.where(ones(2), ones(2), [[1], [1, 2]]), ShapeError, "where: condition"),
    ("where of text", lambda: autograd.where(ones(2), ones(2), "a"), DTypeError, "where: condition .* <U1"),
    ("where of None", lambda: autograd.where(ones(2), ones(2), None), DTypeError, "not NoneType"),
    ("where of an object", lambda: autograd.where(ones(2), ones(2), object()), DTypeError, "not object"),
    ("gather ragged", lambda: autograd.gather(ones(2), 0, [[0], [1, 2]]), ShapeError, "gather: indices"),
    ("gelu by an array", lambda: autograd.gelu(ones(2), np.ones(2)), OptionError, "gelu: approximate"),
    (
        "where dtypes",
        lambda: autograd.where(ones(2), ids(2, 2), [1, 0]),
        DTypeError,
        "where: inputs must share",
    ),
    ("gemm inner", lambda: autograd.gemm(ones(2, 3), ones(2, 3)), ShapeError, "inner sizes differ"),
    ("gemm of vectors", lambda: autograd.gemm(ones(3), ones(3, 2)), ShapeError, "gemm: A must have 2 axes"),
    ("gemm bias", lambda: autograd.gemm(ones(2, 3), ones(3, 4), ones(3)), ShapeError, "gemm: shapes"),
    (
        "gemm large bias",
        lambda: autograd.gemm(ones(1, 3), ones(3, 4), ones(2, 4)),
        ShapeError,
        "does not broadcast",
    ),
    ("gemm factor", lambda: autograd.gemm(ones(2, 3), ones(3, 4), alpha="2"), OptionError, "gemm: alpha"),
    ("bce shapes", lambda: autograd.binary_cross_entropy(ones(2, 1), ones(2)), ShapeError, "one shape"),
    ("bce of nothing", lambda: autograd.binary_cross_entropy(ones(0), ones(0)), ShapeError, "no mean loss"),
    ("bce of a number", lambda: autograd.binary_cross_entropy(ones(), ones()), ShapeError, r"\(N, \.\.\.\)"),
    (
        "bce labels",
        lambda: autograd.binary_cross_entropy(ones(1), [1]),
        DTypeError,
        "Tensor of labels, got list",
    ),
    ("slice lengths", lambda: autograd.slice(ones(2, 3), [0], [1, 2]), ShapeError, "slice: starts, ends"),
    ("slice too many", lambda: autograd.slice(ones(2), [0, 0], [1, 2]), ShapeError, "one length <= 1"),
    ("slice axis", lambda: autograd.slice(ones(2), [0], [1], [1]), ShapeError, "slice: axis 1 is out of"),
    (
        "slice axis twice",
        lambda: autograd.slice(ones(2, 2), [0, 0], [1, 1], [1, -1]),
        ShapeError,
        "named once",
    ),
    ("slice step", lambda: autograd.slice(ones(2), [0], [1], [0], [0]), ShapeError, "step 0"),
    (
        "slice start",
        lambda: autograd.slice(ones(2), [0.5], [1]),
        ShapeError,
        "slice: start 0.5 is not an int",
    ),
    ("slice from a number", lambda: autograd.slice(ones(2), 0, 2), ShapeError, "must be lists of ints"),
    (
        "slice of 0-d arrays",
        lambda: autograd.slice(ones(2), np.array(1), [2]),
        ShapeError,
        "must be lists of ints",
    ),
    ("slice from None", lambda: autograd.slice(ones(2), None, None), ShapeError, "must be lists of ints"),
    ("slice by axis", lambda: autograd.slice(ones(2), [0], [1], 0), ShapeError, "must be lists of ints"),
    (
        "split by a number",
        lambda: autograd.split(ones(4), 0, 2),
        OptionError,
        "split: parts = 2 must be a list",
    ),
    ("split sizes", lambda: autograd.split(ones(4), 0, (1, 2)), ShapeError, "do not add up to 4"),
    ("split unevenly", lambda: autograd.split(ones(5), 0, num_output=2), ShapeError, "do not add up to 5"),
    ("split by nothing", lambda: autograd.split(ones(5), 0), OptionError, "parts or num_output"),
    ("split by both", lambda: autograd.split(ones(4), 0, (4,), 1), OptionError, "parts or num_output"),
    ("split axis", lambda: autograd.split(ones(4), 1, (4,)), ShapeError, "split: axis 1 is out of range"),
    ("tile by a float", lambda: autograd.tile(ones(2), 1.5), OptionError, "tile: repeats"),
    ("tile by less than 0", lambda: autograd.tile(ones(2), (-1, 2)), OptionError, "tile: repeats"),
    ("tile beyond memory", lambda: autograd.tile(ones(2), 2**62), ShapeError, "more axes or elements"),
    ("tile into 65 axes", lambda: autograd.tile(ones(2), (1,) * 65), ShapeError, "more axes or elements"),
    ("cossim of vectors", lambda: autograd.cossim(ones(2), ones(2)), ShapeError, "must have 2 axes"),
    ("cossim shapes", lambda: autograd.cossim(ones(2, 3), ones(1, 3)), ShapeError, "must have one shape"),
    ("ranking shapes", lambda: autograd.ranking_loss(ones(2), ones(2, 1)), ShapeError, "must have one shape"),
    ("ranking of nothing", lambda: autograd.ranking_loss(ones(0), ones(0)), ShapeError, "no mean loss"),
    ("ranking margin", lambda: autograd.ranking_loss(ones(2), ones(2), "wide"), OptionError, "M"),
    ("squeeze size", lambda: autograd.squeeze(ones(2, 1), 0), ShapeError, "must have size 1"),
    ("squeeze axis", lambda: autograd.squeeze(ones(2, 1), 2), ShapeError, "squeeze: axis 2 is out of range"),
    (
        "unsqueeze axis",
        lambda: autograd.unsqueeze(ones(2), 3),
        ShapeError,
        "unsqueeze: axis 3 is out of range",
    ),
    ("unsqueeze twice", lambda: autograd.unsqueeze(ones(2), (0, -3)), ShapeError, "twice"),
]


@pytest.mark.parametrize(
    "take",
    [
        lambda x: x[...],
        lambda x: x[()],
        lambda x: autograd.slice(x, [], []),
        lambda x: autograd.pad(x, "constant", []),
    ],
    ids=["ellipsis", "empty tuple", "slice", "pad"],
)
def test_a_part_of_a_tensor_without_dimensions_is_the_tensor(
    device: Device, take: Any, training: None
) -> None:
    x = Tensor(data=np.array(3, np.float32), device=device, requires_grad=True, stores_grad=True)
    y = take(x)
    assert y.shape == () and to_numpy(y) == 3
    ((_, grad),) = autograd.backward(take(x) * x)
    assert grad.shape == () and to_numpy(grad) == 6


def test_an_empty_batch_goes_through_a_network_in_evaluation(device: Device) -> None:
    autograd.training = False
    net = [
        layer.Conv2d(4, 3, padding=1),
        layer.BatchNorm2d(),
        layer.ReLU(),
        layer.MaxPool2d(2),
        layer.Flatten(),
    ]
    for size in (2, 0):
        x = ones(size, 3, 6, 6)
        for each in net:
            x = each(x)
        assert x.shape == (size, 36)
    assert layer.BatchNorm2d()(ones(0, 5)).shape == (0, 5)


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_clip_limits_integers_by_whole_numbers(device: Device, dtype: str) -> None:
    x = Tensor(data=np.array([-3, 1, 5]), dtype=dtype, device=device)
    clipped = autograd.clip(x, min=-1.0, max=4)
    assert clipped.dtype == dtype and to_numpy(clipped).tolist() == [-1, 1, 4]


def test_an_empty_batch_adds_nothing_to_gradients(device: Device) -> None:
    conv, linear = layer.Conv2d(4, 3), layer.Linear(2)
    for size in (2, 0):
        y = linear(autograd.flatten(conv(ones(size, 3, 6, 6))))
        grads = autograd.gradients(autograd.reduce_sum(y))
    assert len(grads) == 4 and not any(to_numpy(grad).any() for grad in grads.values())


@pytest.mark.parametrize(("_", "call", "error", "message"), BAD_CALLS, ids=[row[0] for row in BAD_CALLS])
def test_bad_input_raises_a_typed_error_that_says_what_came(
    _: str, call: Callable[[], object], error: type[SingaLiteError], message: str
) -> None:
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("name", ["kernel_size", "stride", "padding"])
def test_a_window_larger_than_a_kernel_counts_to_is_refused(name: str) -> None:
    x = Tensor(data=np.ones((1, 1, 4, 4)))
    with pytest.raises(OptionError, match=f"{name} = 1180591620717411303424 must be an int"):
        autograd.avg_pool_2d(x, **{"kernel_size": 3, "padding": 1, name: 2**70})
