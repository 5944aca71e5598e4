# SPDX-License-Identifier: Apache-2.0
"""Tensor and SINGA's functions on it: one sample each against numpy, what changes in place, what raises."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from singa_lite import autograd, tensor
from singa_lite.device import Device, get_default_device
from singa_lite.errors import DeviceError, DTypeError, GraphError, OptionError, ShapeError, SingaLiteError
from singa_lite.tensor import Tensor, from_numpy, functions, to_numpy
from singa_lite.tensor.checks import as_raw

pytestmark = pytest.mark.usefixtures("device")  # all of it on each kind of device

RNG = np.random.default_rng(31)


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape)


def positive(*shape: int) -> np.ndarray:
    return RNG.uniform(0.5, 2.0, shape)


@dataclass
class Sample:
    """One call of ``tensor.<name>``: arrays become float64 Tensors, the rest is passed on.

    Attributes:
        name: of the function.
        arguments: positional.
        reference: the same in numpy, from the same arguments.
        options: keywords; reference does not get them.
        changes: number of the argument that holds the result afterwards, or None.
    """

    name: str
    arguments: tuple[Any, ...]
    reference: Callable[..., Any]
    options: dict[str, Any] = field(default_factory=dict)
    changes: int | None = None


def wrap(value: Any) -> Any:
    if isinstance(value, list) and value and isinstance(value[0], np.ndarray):
        return [wrap(item) for item in value]
    return Tensor(data=value, dtype="float64") if isinstance(value, np.ndarray) else value


A, B, ROW, COLUMN, P = normal(3, 4), normal(3, 4), normal(4), normal(3), positive(3, 4)
NEAR = np.where(normal(3, 4) > 0, A, B)
SAMPLES = [
    Sample("abs", (A,), np.abs),
    Sample("exp", (A,), np.exp),
    Sample("ceil", (A,), np.ceil),
    Sample("log", (P,), np.log),
    Sample("relu", (A,), lambda x: np.maximum(x, 0)),
    Sample("sigmoid", (A,), lambda x: 1 / (1 + np.exp(-x))),
    Sample("sign", (A,), np.sign),
    Sample("sqrt", (P,), np.sqrt),
    Sample("square", (A,), np.square),
    Sample("tanh", (A,), np.tanh),
    Sample("add", (A, ROW), np.add),
    Sample("add", (2, A), np.add),
    Sample("add", (A, B, normal(3, 4)), lambda a, b, _: a + b, changes=2),
    Sample("sub", (A, 0.5), np.subtract),
    Sample("eltwise_mult", (A, B), np.multiply),
    Sample("div", (1, P), np.divide),
    Sample("pow", (P, A), np.power),
    Sample("pow", (P, 2), np.power),
    Sample("lt", (A, NEAR), np.less),
    Sample("le", (A, NEAR), np.less_equal),
    Sample("gt", (A, NEAR), np.greater),
    Sample("ge", (A, NEAR), np.greater_equal),
    Sample("eq", (A, NEAR), np.equal),
    Sample("axpy", (0.5, A, B), lambda alpha, x, y: alpha * x + y, changes=2),
    Sample("sum", (A,), np.sum),
    Sample("sum", (A, -1), np.sum),
    Sample("sum", (A, 0, normal(4)), lambda x, axis, _: x.sum(axis), changes=2),
    Sample("average", (A,), np.mean),
    Sample("average", (A, 1), np.mean),
    Sample("softmax", (A,), lambda x: np.exp(x) / np.exp(x).sum(1, keepdims=True)),
    Sample("softmax", (normal(3, 0),), np.copy),
    Sample("softmax", (A, normal(3, 4)), lambda x, _: np.exp(x) / np.exp(x).sum(1, keepdims=True), changes=1),
    Sample("sum_columns", (A,), lambda x: x.sum(1)),
    Sample("sum_rows", (A,), lambda x: x.sum(0)),
    Sample("mult", (A, B.T.copy()), np.matmul),
    Sample("mult", (A, ROW), np.matmul),
    Sample("mult", (normal(2, 3, 4), normal(4, 2)), np.matmul),
    Sample(
        "mult", (A, B.T.copy(), normal(3, 3), 2.0, 0.5), lambda a, b, c, s, t: s * a @ b + t * c, changes=2
    ),
    Sample("mult", (A, ROW, np.full(3, np.nan)), lambda a, b, _: a @ b, changes=2),
    Sample("tensordot", (normal(2, 3, 4), normal(3, 4, 5)), np.tensordot),
    Sample("tensordot", (normal(2, 3, 4), normal(4, 5, 2), [[0, 2], [-1, 0]]), np.tensordot),
    Sample("tensordot", (A, B, 2), np.tensordot),
    Sample("tensordot", (A, B, 0), np.tensordot),
    Sample("einsum", ("ij,kj->ik", A, B), np.einsum),
    Sample("einsum", ("ii->i", normal(3, 3)), np.einsum),
    Sample("add_column", (2.0, COLUMN, 0.5, A), lambda s, v, t, m: s * v[:, None] + t * m, changes=3),
    Sample("add_row", (2.0, ROW, 0.5, A), lambda s, v, t, m: s * v + t * m, changes=3),
    Sample("reshape", (A, (2, -1)), np.reshape),
    Sample("transpose", (normal(2, 3, 4), (2, 0, -2)), lambda x, _: x.transpose(2, 0, 1)),
    Sample("transpose", (normal(2, 3, 4),), np.transpose),
    Sample("contiguous", (A,), lambda x: x),
    Sample("repeat", (normal(2, 3, 4), 3, 1), np.repeat),
    Sample("repeat", (A, 2), np.repeat),
    Sample("repeat", (A, (2, 0, 1), 0), np.repeat),
    Sample("repeat", (A, (2, 0, 1, 3), -1), np.repeat),
    Sample("repeat", (A, [2], 0), np.repeat),
    Sample("concatenate", ([A, normal(3, 1)], -1), np.concatenate),
    Sample("zeros_like", (A,), np.zeros_like),
    Sample("ones_like", (A,), np.ones_like),
    Sample("to_host", (A,), lambda x: x),
    Sample("copy_from_numpy", (A, [[1.0] * 4] * 3), lambda _, values: np.array(values), changes=0),
    Sample(
        "copy_data_to_from",
        (A, B, 3, 2, 5),
        lambda a, b, *_: np.concatenate([a.flat[:2], b.flat[5:8], a.flat[5:]]).reshape(3, 4),
        changes=0,
    ),
]
WITHOUT_VALUES = {"zeros", "ones", "random", "gaussian", "uniform", "bernoulli"}
TESTED_BELOW = WITHOUT_VALUES | {"from_numpy", "from_raw_tensor", "from_raw_tensors", "sizeof"}


def test_every_function_has_a_sample_or_a_test() -> None:
    public = {
        name
        for name, value in inspect.getmembers(functions, inspect.isfunction)
        if value.__module__ == functions.__name__ and not name.startswith("_")
    }
    assert public == {sample.name for sample in SAMPLES} | TESTED_BELOW
    assert public <= set(tensor.__all__)


@pytest.mark.parametrize("sample", SAMPLES, ids=[f"{i}-{s.name}" for i, s in enumerate(SAMPLES)])
def test_function_is_that_of_numpy(sample: Sample) -> None:
    arguments = [wrap(value) for value in sample.arguments]
    result = getattr(tensor, sample.name)(*arguments, **sample.options)
    expected = np.asarray(sample.reference(*sample.arguments))
    if sample.changes is not None:
        assert result is None or result is arguments[sample.changes]
        result = arguments[sample.changes]
    assert result.shape == expected.shape
    np.testing.assert_allclose(to_numpy(result), expected, rtol=1e-12, atol=1e-14)
    for number, (given, value) in enumerate(zip(sample.arguments, arguments, strict=True)):
        if isinstance(given, np.ndarray) and number != sample.changes:
            np.testing.assert_array_equal(to_numpy(value), given)


def test_result_may_be_written_over_an_input() -> None:
    a = wrap(A)
    assert tensor.mult(a, wrap(B.T.copy()[:, [0, 1, 2, 0]]), a.clone()).shape == (3, 4)
    tensor.sub(3, a, a)
    np.testing.assert_allclose(to_numpy(a), 3 - A)


def test_parts_of_one_tensor_may_be_copied_over_each_other() -> None:
    t = from_numpy(np.ma.array(np.arange(6.0)))  # without a mask it is an array as others
    tensor.copy_data_to_from(t, t, 4, 1, 0)
    assert to_numpy(t).tolist() == [0, 0, 1, 2, 3, 5]


def test_fillers_draw_from_the_device() -> None:
    t = Tensor((10000,))
    assert tensor.gaussian(3.0, 2.0, t) is t
    assert to_numpy(t).mean() == pytest.approx(3, abs=0.1) and to_numpy(t).std() == pytest.approx(2, abs=0.1)
    values = to_numpy(tensor.uniform(-1.0, Fraction(3), t))
    assert -1 <= values.min() < -0.9 and 2.9 < values.max() < 3
    values = to_numpy(tensor.bernoulli(0.25, t))
    assert set(values) == {0, 1} and values.mean() == pytest.approx(0.25, abs=0.02)
    assert to_numpy(tensor.zeros((2, 3))).tolist() == [[0] * 3] * 2
    assert to_numpy(tensor.ones((2,))).tolist() == [1, 1]
    values = to_numpy(tensor.random((1000,)))
    assert 0 <= values.min() < 0.05 and 0.95 < values.max() < 1


def test_fillers_change_their_tensor_or_make_one() -> None:
    t = tensor.ones((3,))
    for fill in (
        lambda inplace: t.set_value(2.0, inplace),
        lambda inplace: t.gaussian(4.0, 0.0, inplace=inplace),
        lambda inplace: t.uniform(5.0, 5.0, inplace=inplace),
        lambda inplace: t.bernoulli(0.0, inplace),
    ):
        before = to_numpy(t).tolist()
        made = fill(False)
        assert made is not t and to_numpy(t).tolist() == before != to_numpy(made).tolist()
        assert (made.shape, made.dtype, made.device) == (t.shape, t.dtype, t.device)
        assert fill(True) is t and to_numpy(t).tolist() == to_numpy(made).tolist()


def test_raw_arrays_are_wrapped_without_a_copy() -> None:
    raw = get_default_device().backend.zeros((3,), np.float32)
    one, two = tensor.from_raw_tensors([raw, raw])
    one += 1
    assert to_numpy(two).tolist() == [1, 1, 1]
    assert tensor.from_raw_tensor(raw).data is raw
    assert from_numpy(np.zeros(2)).dtype == "float32"
    assert [tensor.sizeof(dtype) for dtype in (tensor.float16, "float64", "int32")] == [2, 8, 4]


# ---- methods -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "same_in_numpy"),
    [
        (1, np.s_[1:2]),
        (-1, np.s_[2:3]),
        (np.s_[::2], np.s_[::2]),
        (np.s_[1:, ::-1], np.s_[1:, ::-1]),
        (np.s_[-2:, 3], np.s_[-2:, 3:4]),
        (np.s_[5:9], np.s_[5:9]),
        ((), ()),
    ],
)
def test_a_part_keeps_axes_and_honours_steps(keys: Any, same_in_numpy: Any) -> None:
    t = wrap(A)
    part = t[keys]
    np.testing.assert_array_equal(to_numpy(part), A[same_in_numpy])
    part += 1
    np.testing.assert_array_equal(to_numpy(t), A)


def test_rows_of_a_tensor_and_numpy_combine_with_it() -> None:
    t = wrap(A)
    assert [row.shape for row in t] == [(1, 4)] * 3
    np.testing.assert_array_equal(np.asarray(t), A)
    np.testing.assert_array_equal(to_numpy(Tensor(data=t, dtype="float64")), A)
    assert isinstance(np.float64(2) * t, Tensor)
    with pytest.raises(DTypeError, match="got ndarray"):
        A * t


@pytest.mark.parametrize(
    ("name", "vector", "reference"),
    [
        ("add_row", ROW, A + ROW),
        ("add_column", COLUMN, A + COLUMN[:, None]),
        ("mult_row", ROW, A * ROW),
        ("mult_column", COLUMN, A * COLUMN[:, None]),
        ("div_row", ROW, A / ROW),
        ("div_column", COLUMN, A / COLUMN[:, None]),
    ],
)
def test_rows_and_columns_change_the_matrix(name: str, vector: np.ndarray, reference: np.ndarray) -> None:
    t = wrap(A)
    assert getattr(t, name)(wrap(vector)) is t
    np.testing.assert_allclose(to_numpy(t), reference)
    with pytest.raises(ShapeError, match=r"is not a (row|column) of a matrix"):
        getattr(t, name)(Tensor((5,), dtype="float64"))


def test_small_methods() -> None:
    t = wrap(A)
    np.testing.assert_array_equal(to_numpy(t.T()), A.T)
    assert t.contiguous() is t and not t.T().is_transpose()
    np.testing.assert_allclose(to_numpy(t // 0.5), np.floor(A / 0.5))
    np.testing.assert_allclose(to_numpy(t // wrap(B)), np.floor(A / B))
    np.testing.assert_allclose(to_numpy(abs(t)), np.abs(A))
    t.reset_like(Tensor((2,), dtype="int32"))
    assert t.dtype == "int32" and to_numpy(t).tolist() == [0, 0]
    assert autograd.Operation is autograd.Operator


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_integers_divide_to_the_floor_of_their_quotient(device: Device, dtype: str) -> None:
    lowest, largest = np.iinfo(dtype).min, np.iinfo(dtype).max
    a = np.array([7, -7, 7, -7, 6, -6, 0, 5, -5, lowest, lowest, largest, lowest], dtype)
    b = np.array([2, 2, -2, -2, 3, 3, 4, 0, 0, -1, 1, largest, 2], dtype)
    quotients = Tensor(data=a, dtype=dtype) // Tensor(data=b, dtype=dtype)
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(to_numpy(quotients), a // b)
    assert quotients.dtype == dtype
    np.testing.assert_array_equal(to_numpy(Tensor(data=a, dtype=dtype) // 4), a // 4)
    with pytest.raises(DTypeError, match="int"):
        Tensor(data=a, dtype=dtype) // 0.5


@pytest.mark.parametrize("number", [1, True, 1.0, np.int64(1), np.float32(1), np.bool_(True)])
@pytest.mark.parametrize("dtype", ["int32", "float32"])
def test_numbers_of_every_kind_are_compared(number: Any, dtype: str) -> None:
    t = Tensor(data=[0, 1, 2], dtype=dtype)
    assert to_numpy(t == number).tolist() == [0, 1, 0]
    assert to_numpy(t >= number).tolist() == [0, 1, 1]


def test_inequality_is_that_of_each_element() -> None:
    t = Tensor(data=[0.0, 1.0, np.nan])
    assert to_numpy(t != 1.0).tolist() == [1, 0, 1]
    assert to_numpy(t != Tensor(data=[0.0, 2.0, 3.0])).tolist() == [0, 1, 1]
    assert (t != "a") is True and (t != None) is True  # noqa: E711


def test_one_element_is_a_number_for_python() -> None:
    t = Tensor(data=[2.75])
    assert (int(t), float(t), f"{t:.1f}", f"{t}") == (2, 2.75, "2.8", str(t))
    assert f"{Tensor(data=[7]):03d}" == "007"
    for call in (int, float, "{:.1f}".format):
        with pytest.raises(ShapeError, match="elements, not one; choose one, such as x\\[0"):
            call(Tensor((2,)))
    with pytest.raises(OptionError, match="format: expected text, not ndarray"):
        Tensor((1,)).__format__(np.zeros(2))  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="format: Invalid format specifier"):
        f"{t:top}"


def test_a_number_to_the_power_of_a_tensor_has_a_gradient(training: None) -> None:
    t = Tensor(data=[0.0, 3.0], stores_grad=True)
    y = 2 ** (t * 1)
    (gradient,) = autograd.gradients(y, Tensor((2,)).set_value(1)).values()
    np.testing.assert_allclose(to_numpy(y), [1, 8])
    np.testing.assert_allclose(to_numpy(gradient), np.log(2) * np.array([1, 8]), rtol=1e-6)


def test_a_number_of_numpy_without_a_sign_keeps_its_value() -> None:
    assert to_numpy(from_numpy(np.array([0, 2**31 - 1], "u4"))).tolist() == [0, 2**31 - 1]


def test_an_operand_may_be_a_part_of_what_changes() -> None:
    array = get_default_device().backend.asarray(np.arange(12, dtype="f").reshape(3, 4))
    matrix, row = tensor.from_raw_tensor(array), tensor.from_raw_tensor(array[0])
    matrix.add_row(row)
    expected = np.arange(12).reshape(3, 4) + np.arange(4)
    np.testing.assert_array_equal(to_numpy(matrix), expected)
    rows = tensor.from_raw_tensor(array[1:])
    rows *= tensor.from_raw_tensor(array[:-1])
    np.testing.assert_array_equal(to_numpy(matrix)[1:], expected[1:] * expected[:-1])


def test_numpy_arrays_are_copied_by_to_numpy_too() -> None:
    values = np.arange(3)
    copied = to_numpy(values)
    copied[0] = 9
    assert values.tolist() == [0, 1, 2] and copied.tolist() == [9, 1, 2]


def test_what_would_lose_a_gradient_raises(training: None) -> None:
    y = Tensor(data=A, stores_grad=True) * 2
    assert wrap(A).is_dummy() and not y.is_dummy()
    attempts: list[Callable[[], object]] = [
        lambda: y // 2,
        lambda: y.reset_like(y),
        lambda: y.copy_data(y.clone()),
        lambda: y.copy_from_numpy(A),
        lambda: y.to_type("float64"),
        lambda: setattr(y, "data", y.clone().data),
        lambda: y.add_row(wrap(ROW).as_type("float32")),
    ]
    for attempt in attempts:
        with pytest.raises(GraphError):
            attempt()


KEYS: list[Any] = [
    0,
    -1,
    slice(1, None),
    (slice(None), 0),
    (slice(None, None, 2), slice(None, None, -1)),
    (-1, slice(3, 0, -2)),
]
KEYS += [slice(-9, None, -1), slice(-9, -12, -2), (slice(None), slice(-5, -9, -1)), slice(9, -9, -2)]
KEYS += [slice(5, 9), slice(2, 1), (..., 1), (0, ...), (...,), (0, ..., slice(1, 3))]


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_a_part_of_a_recorded_tensor_has_a_gradient(device: Device, training: None, key: Any) -> None:
    keys = tuple(
        slice(k, k + 1 or None) if isinstance(k, int) else k
        for k in (key if isinstance(key, tuple) else (key,))
    )
    x = Tensor(data=A, dtype="float64", stores_grad=True)
    part = (x * 2)[key]
    np.testing.assert_array_equal(to_numpy(part), 2 * A[keys])
    direction = np.random.default_rng(1).standard_normal(part.shape)
    expected = np.zeros(A.shape)
    expected[keys] = 2 * direction
    (gradient,) = autograd.gradients(part, Tensor(data=direction, dtype="float64")).values()
    np.testing.assert_allclose(to_numpy(gradient), expected)
    assert part.clone()[()].shape == part.shape


def test_a_beta_of_0_takes_no_nan_of_the_matrix() -> None:
    m = wrap(np.full_like(A, np.nan))
    tensor.add_row(2.0, wrap(ROW), 0, m)
    np.testing.assert_array_equal(to_numpy(m), np.broadcast_to(2 * ROW, A.shape))


def test_a_refused_row_leaves_the_matrix_alone() -> None:
    m = wrap(A)
    for vector, error in ((wrap(COLUMN), ShapeError), (from_numpy(ROW), DTypeError), (ROW, DTypeError)):
        with pytest.raises(error):
            tensor.add_row(1.0, vector, 0.5, m)
    np.testing.assert_array_equal(to_numpy(m), A)


# ---- bad input -----------------------------------------------------------------------------------------


def t(*shape: int, dtype: str = "float32") -> Tensor:
    return Tensor(shape, dtype=dtype)


def elsewhere(*shape: int) -> Tensor:
    return Tensor(shape, Device("cpu", 7, get_default_device().backend))


def changed(name: str, a: Tensor, b: Any) -> object:
    return getattr(a, name)(b)


MASKED = np.ma.array([1.0, 2.0], "f4", mask=[0, 1])

BAD_CALLS: list[tuple[Callable[[], object], type[SingaLiteError], str]] = [
    (lambda: t(6).reshape((4,)), ShapeError, r"\(6,\) does not fit into \(4,\)"),
    (lambda: t(6).reshape((-1, -1)), ShapeError, "at most one -1"),
    (lambda: t(6).reshape("ab"), ShapeError, "made of ints"),
    (lambda: t(2, 3).transpose((0, 0)), ShapeError, "twice"),
    (lambda: t(2, 3).transpose((0,)), ShapeError, "not a permutation"),
    (lambda: t(2, 3).transpose((0, 2)), ShapeError, "out of range"),
    (lambda: t(2) < t(3), ShapeError, "less: shapes .* do not broadcast"),
    (lambda: t(2) == t(3), ShapeError, "equal: shapes .* do not broadcast"),
    (lambda: changed("__iadd__", t(2), t(3)), ShapeError, "do not broadcast"),
    (lambda: changed("__imul__", t(1), t(3)), ShapeError, r"does not broadcast to \(1,\)"),
    (lambda: changed("__iadd__", t(2), "a"), DTypeError, "got str"),
    (lambda: tensor.add(t(2), Tensor), DTypeError, "expected a Tensor or a number, got type"),
    (lambda: changed("__iadd__", t(2, dtype="int32"), 0.5), DTypeError, "cannot hold"),
    (lambda: changed("__itruediv__", t(2, dtype="int32"), 2), DTypeError, "in-place division"),
    (lambda: changed("__iadd__", t(2), elsewhere(2)), DeviceError, "tensors are on"),
    (lambda: Tensor((2,), device="cpu"), DeviceError, "'cpu' is not a Device"),
    (lambda: t(2).to_device("cpu"), DeviceError, "'cpu' is not a Device"),
    (lambda: from_numpy([1.0], 0), DeviceError, "0 is not a Device"),
    (lambda: Tensor((2.5,)), ShapeError, "made of ints"),
    (lambda: Tensor("ab"), ShapeError, "made of ints"),
    (lambda: Tensor((-1,)), ShapeError, "negative"),
    (lambda: Tensor(dtype="int8"), DTypeError, "cannot hold int8"),
    (lambda: Tensor(data=["a"]), DTypeError, "must be a Tensor or numbers"),
    (lambda: t(2)[2], ShapeError, "index 2 is out of range"),
    (lambda: t(2)[0, 0], ShapeError, "2 keys"),
    (lambda: t(2)["a"], ShapeError, "key 'a' is not an int"),
    (lambda: t(2)[::0], ShapeError, "step"),
    (lambda: t(2)["a":], ShapeError, "not a slice"),
    (lambda: t(2).repeat(-1), ShapeError, "int >= 0"),
    (lambda: t(2).repeat((1, 2, 3)), ShapeError, "2 elements"),
    (lambda: t(2).repeat(2, 1), ShapeError, "axis 1 is out of range"),
    (lambda: t(2, dtype="int32") // 0.5, DTypeError, "int32 cannot hold"),
    (lambda: t(2) // t(3), ShapeError, "do not broadcast"),
    (lambda: tensor.exp(t(2, dtype="int32")), DTypeError, "exp: needs a float tensor"),
    (lambda: tensor.abs(np.ones(2)), DTypeError, "abs: expected a Tensor, got ndarray"),
    (lambda: tensor.add(1, 2), DTypeError, "expected a Tensor, got int"),
    (lambda: tensor.add(t(2), t(3)), ShapeError, "do not broadcast"),
    (lambda: tensor.add(t(2), t(2, dtype="int32")), DTypeError, "dtypes are"),
    (lambda: tensor.add(t(2), elsewhere(2)), DeviceError, "tensors are on"),
    (lambda: tensor.add(t(2), t(2), t(3)), ShapeError, "the tensor to write"),
    (lambda: tensor.sum(t(2), 1), ShapeError, "axis 1 is out of range"),
    (lambda: tensor.average(t(2, dtype="int32")), DTypeError, "needs a float"),
    (lambda: tensor.softmax(t()), ShapeError, "axis -1 is out of range"),
    (lambda: tensor.sum_rows(t(2)), ShapeError, "needs a matrix"),
    (lambda: tensor.mult(t(2, 3), t(2, 3)), ShapeError, "agree in k"),
    (lambda: tensor.mult(t(2, 3), t(3), t(3)), ShapeError, "the tensor to write"),
    (lambda: tensor.tensordot(t(2, 3), t(2, 3)[::1], 1), ShapeError, "differ in size"),
    (lambda: tensor.tensordot(t(2, 3), t(2, 3), 3), ShapeError, "3 axes"),
    (lambda: tensor.tensordot(t(2, 3), t(2, 3), [0]), ShapeError, "two lists"),
    (lambda: tensor.einsum("ij,jk->ik", t(2, 3), t(2, 3)), ShapeError, "einsum: 'ij,jk->ik'"),
    (lambda: tensor.concatenate([], 0), ShapeError, "one Tensor or more"),
    (lambda: tensor.concatenate([t(2, 3), t(2, 2)], 0), ShapeError, "must agree but for axis 0"),
    (lambda: tensor.axpy(1.0, t(3), t(2)), ShapeError, "do not broadcast"),
    (lambda: tensor.copy_data_to_from(t(2), t(3), 3), ShapeError, "are not in 2"),
    (lambda: t(2).copy_data(t(3)), ShapeError, r"shape \(3,\) does not fit into \(2,\)"),
    (lambda: t(2).copy_data(t(2).as_type("int")), DTypeError, "copy_data: int32 does not fit into float32"),
    (
        lambda: setattr(a := t(2), "data", a.as_type("int").data),
        DTypeError,
        "cannot replace float32 by int32",
    ),
    (lambda: tensor.copy_data_to_from(t(2), t(3), 1, -1), ShapeError, "are not in 2"),
    (lambda: tensor.copy_from_numpy(t(2), [1.0]), ShapeError, "do not fit"),
    (lambda: tensor.uniform(0, 1, t(2, dtype="int32")), DTypeError, "needs a float"),
    (lambda: t(2).uniform(5.0, 1.0), OptionError, "low = 5.0 and high = 1.0 are no range of float32"),
    (lambda: t(2).uniform(0.0, np.inf), OptionError, "uniform: low = 0.0 and high = inf"),
    (lambda: t(2).uniform(-3e38, 3e38), OptionError, "are no range of float32"),
    (lambda: t(2, dtype="float16").uniform(0, 7e4), OptionError, "are no range of float16"),
    (lambda: t(2).gaussian(0.0, np.inf), OptionError, "std = inf must be finite as float32"),
    (lambda: t(2).gaussian(1e39, 1.0), OptionError, "must be finite as float32"),
    (lambda: np.asarray(t(2), copy=False), ValueError, "gives numpy a copy"),
    (lambda: t(2).gaussian("a", 1.0), OptionError, "mean = 'a'"),
    (lambda: t(2).gaussian(0.0, -1.0), OptionError, "std = -1.0"),
    (lambda: t(2).bernoulli(2), OptionError, "p = 2"),
    (lambda: t(2).set_value(2, 3), OptionError, "inplace"),
    (lambda: t(2).set_value("a"), DTypeError, "got str"),
    (lambda: t(2, dtype="int32").set_value(0.5), DTypeError, "cannot hold"),
    (lambda: t(2).reset_like(np.ones(2)), DTypeError, "got ndarray"),
    (lambda: autograd.pad(t(2), "constant", None), OptionError, "pads = None"),
    (lambda: autograd.softmax(t(2, 0)), ShapeError, "is empty"),
    (lambda: from_numpy(None), DTypeError, "got None"),
    (lambda: from_numpy(MASKED), DTypeError, "data has masked values"),
    (lambda: t(2).copy_from_numpy(MASKED), DTypeError, "np_array has masked values"),
    (lambda: setattr(t(2), "data", MASKED), DTypeError, "array has masked values|got MaskedArray"),
    (lambda: tensor.from_raw_tensor([1.0]), DTypeError, "expected a raw array of .*, got list"),
    (lambda: from_numpy(np.array([1, 2], object)), DTypeError, "must be a Tensor or numbers, not object"),
    (lambda: from_numpy(np.array([3_000_000_000], "u4")), DTypeError, "int32 cannot hold"),
    (lambda: Tensor(data=np.array([2**64 - 1], "u8"), dtype="int64"), DTypeError, "int64 cannot hold"),
    (lambda: t(1, dtype="int32").copy_from_numpy(np.array(2**32 - 1, "u4")), DTypeError, "int32 cannot hold"),
    (lambda: tensor.sizeof("int8"), DTypeError, "cannot hold int8"),
    (lambda: tensor.from_raw_tensor(np.zeros(2, "int8")), DTypeError, "cannot hold int8"),
    (lambda: tensor.from_raw_tensor(t(2, 4).array[:, :2]), ShapeError, "from_raw_tensor: .*row-major"),
    (lambda: setattr(t(2, 2), "data", t(2, 4).array[:, :2]), ShapeError, r"Tensor.data: .*array.copy\(\)"),
]


@pytest.mark.parametrize(("call", "error", "message"), BAD_CALLS)
def test_bad_input_raises_a_typed_error(
    call: Callable[[], object], error: type[SingaLiteError], message: str
) -> None:
    with pytest.raises(error, match=message):
        call()


def test_raw_arrays_are_row_major_aligned_and_writeable() -> None:
    numbers = bytes(9)
    for array in (np.zeros(4, "f")[::2], np.frombuffer(numbers, "f", 2, 1), np.frombuffer(numbers, "f", 2)):
        with pytest.raises(ShapeError, match="expected a row-major, aligned and writeable array"):
            as_raw("here", array)


# ---- print ---------------------------------------------------------------------------------------------


def test_print_shows_values_dtype_shape_and_device(capsys: pytest.CaptureFixture[str]) -> None:
    where = get_default_device()
    print(Tensor(data=[[1.0, 2.5], [3.0, 4.0]], name="w"))
    print(Tensor(data=[1, 2], dtype="int32"))
    print(Tensor(data=3.0))
    assert capsys.readouterr().out.splitlines() == [
        "Tensor([[1. , 2.5],",
        f"        [3. , 4. ]], dtype=float32, shape=(2, 2), device={where}, name='w')",
        f"Tensor([1, 2], dtype=int32, shape=(2,), device={where})",
        f"Tensor(3., dtype=float32, shape=(), device={where})",
    ]
    large = str(Tensor((1000, 1000)))
    assert len(large) < 700 and "..." in large and "shape=(1000, 1000)" in large
    assert repr(Tensor((2, 3), name="w")) == f"<Tensor 'w' float32[2, 3] on {where}>"  # errors need no values


@pytest.mark.parametrize("ops", ["ij,ik->jk", "ij,ij->j", "ij,ik->j"])
def test_einsum_of_long_sums_is_as_exact_as_a_product(ops: str) -> None:
    x = np.random.default_rng(0).random((300_000, 3)).astype(np.float32)
    found = tensor.to_numpy(tensor.einsum(ops, tensor.from_numpy(x), tensor.from_numpy(x)))
    np.testing.assert_allclose(found, np.einsum(ops, x.astype(float), x.astype(float)), rtol=1e-7)
