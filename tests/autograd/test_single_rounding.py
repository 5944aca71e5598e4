# SPDX-License-Identifier: Apache-2.0
"""Operators on 16 bits beside float64: sums grow in float32, numbers stay whole, results are rounded once."""

from __future__ import annotations

import copy
import enum
import pickle
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from singa_lite import autograd, layer, model, tensor
from singa_lite.config import this_thread
from singa_lite.device import Device
from singa_lite.dtypes import bfloat16
from singa_lite.errors import DTypeError, GraphError, OptionError, ShapeError
from singa_lite.tensor import Tensor, from_numpy, to_numpy

ROUNDING = {np.dtype(bfloat16): 2.0**-8, np.dtype("float16"): 2.0**-11}
NARROW = pytest.mark.parametrize("dtype", ROUNDING, ids=str)
NUMBER = 0.1  # neither holds it


def on(device: Device, values: Any, dtype: Any) -> tuple[Tensor, np.ndarray]:
    """A Tensor of ``values`` rounded to 16 bits, and the same in float64."""
    rounded = np.asarray(values).astype(dtype)
    return Tensor(data=rounded, device=device), rounded.astype(np.float64)


def check(y: Tensor, exact: np.ndarray, magnitude: np.ndarray | None = None) -> None:
    """y is ``exact`` rounded once; what float32 adds up to ``magnitude`` may be off by its own rounding."""
    limit = 1.001 * ROUNDING[y.dtype] * np.abs(exact)
    limit += 1e-5 * (0 if magnitude is None else magnitude)
    assert (np.abs(to_numpy(y).astype(np.float64) - exact) <= limit).all()


@NARROW
@pytest.mark.parametrize("op", [autograd.sum, autograd.mean])
def test_a_sum_of_many_tensors_grows_in_float32(device: Device, dtype: Any, op: Any) -> None:
    rng = np.random.default_rng(0)
    tensors, values = zip(*(on(device, rng.uniform(0.5, 1, (3, 5)), dtype) for _ in range(600)), strict=True)
    check(op(*tensors), np.sum(values, 0) / (len(values) if op is autograd.mean else 1))


@NARROW
def test_a_mean_of_the_largest_numbers_is_finite(device: Device, dtype: Any) -> None:
    largest = float(np.finfo(np.float16).max) if dtype == np.float16 else 3.3e38
    tensors, values = zip(*(on(device, [0.45 * largest], dtype) for _ in range(2)), strict=True)
    check(autograd.mean(*tensors), values[0])


OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "pow": lambda a, b: a**b,
}


@NARROW
@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize("name", OPERATORS)
def test_a_number_stays_whole(device: Device, dtype: Any, name: str, is_first: bool) -> None:
    x, values = on(device, np.random.default_rng(1).uniform(0.2, 3, 500), dtype)
    operator = OPERATORS[name]
    expected = operator(NUMBER, values) if is_first else operator(values, NUMBER)
    found = operator(NUMBER, x) if is_first else operator(x, NUMBER)
    assert found.dtype == dtype and found.device is device
    check(found, expected, np.abs(values) + NUMBER if name in ("add", "sub") else np.abs(expected))
    with autograd.autocast("bf16" if dtype == bfloat16 else "fp32"):
        again = operator(NUMBER, x) if is_first else operator(x, NUMBER)
    np.testing.assert_array_equal(to_numpy(again), to_numpy(found))


@NARROW
def test_a_comparison_takes_the_number_itself(device: Device, dtype: Any) -> None:
    rounded = np.asarray(NUMBER).astype(dtype)
    x, _ = on(device, [rounded, 0, 1], dtype)
    is_above = bool(rounded > np.float64(NUMBER))
    for relation, expected in (
        ("greater", [is_above, 0, 1]),
        ("equal", [0, 0, 0]),
        ("less_equal", [not is_above, 1, 0]),
    ):
        found = getattr(autograd, relation)(x, NUMBER)
        assert found.dtype == dtype and to_numpy(found).tolist() == expected


@NARROW
def test_functions_of_values_keep_numbers_whole(device: Device, dtype: Any) -> None:
    x, values = on(device, np.random.default_rng(5).uniform(0.2, 3, 100), dtype)
    check(tensor.eltwise_mult(x, NUMBER), values * NUMBER)
    check(tensor.div(NUMBER, x), NUMBER / values)
    check(tensor.pow(x, 2.3), values**2.3, 10 * values**2.3)
    target, _ = on(device, np.zeros(100), dtype)
    assert tensor.sub(NUMBER, x, target) is target
    check(target, NUMBER - values, values + NUMBER)
    for name, expected in (
        ("__imul__", values * NUMBER),
        ("__isub__", values - NUMBER),
        ("__itruediv__", values / NUMBER),
    ):
        changed, _ = on(device, values, dtype)
        check(getattr(changed, name)(NUMBER), expected, values + NUMBER)
    rounded, _ = on(device, [NUMBER], dtype)
    is_above = bool(to_numpy(rounded).astype("d")[0] > NUMBER)
    assert bool(to_numpy(rounded > NUMBER)) == is_above and not to_numpy(rounded == NUMBER)
    quotient, exact = on(device, [2.25], dtype)
    assert to_numpy(quotient // NUMBER).astype("d") == exact // NUMBER


@NARROW
def test_numbers_that_it_holds_cost_no_cast(
    device: Device, dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, values = on(device, [1, 2, 3], dtype)
    run, kernels = device.backend.run, []
    monkeypatch.setattr(
        device.backend, "run", lambda kernel, *a, **k: (kernels.append(kernel), run(kernel, *a, **k))[1]
    )
    assert to_numpy(0.5 * x + 3 - x / 4).tolist() == (0.5 * values + 3 - values / 4).tolist()
    assert np.isnan(to_numpy(x * float("nan")).astype("f")).all() and "cast" not in kernels
    _ = x * NUMBER + NUMBER - x / NUMBER + (NUMBER + NUMBER * x)
    assert "cast" not in kernels  # nor do kernels that take a number of float32
    _ = x**NUMBER
    assert kernels.count("cast") == 2


@NARROW
def test_a_number_keeps_no_wide_array_for_backward(device: Device, dtype: Any, training: None) -> None:
    x, _ = on(device, np.ones(50), dtype)
    x.requires_grad = x.stores_grad = True
    for y in (x + NUMBER, x - NUMBER, x * NUMBER, x / NUMBER):
        saved = [value for value in y.creator.context.saved if hasattr(value, "nbytes")]
        assert all(value.nbytes <= x.array.nbytes for value in saved)


def test_errors_name_the_function_of_the_program() -> None:
    half = Tensor(data=np.ones(3), dtype="float16")
    with autograd.autocast("bf16"), pytest.raises(DTypeError, match=r"^Mul: "):
        _ = half * NUMBER
    with pytest.raises(DTypeError, match=r"^add: dtypes are float16 and float32"):
        tensor.add(half, NUMBER, Tensor(data=np.ones(3)))
    with pytest.raises(ShapeError, match=r"^add: "):
        tensor.add(half, NUMBER, Tensor(data=np.ones(4), dtype="float16"))


@NARROW
def test_gradients_pass_a_number(device: Device, dtype: Any, training: None) -> None:
    x, values = on(device, [0.5, 1.25, 3], dtype)
    x.requires_grad = x.stores_grad = True
    dy, upstream = on(device, [1, -2, 0.75], dtype)
    found = dict(autograd.backward(x * NUMBER, dy))[x]
    check(found, upstream * NUMBER)
    found = dict(autograd.backward(autograd.pow(x, 2.3), dy))[x]
    check(found, upstream * 2.3 * values**1.3, 10 * np.abs(upstream * values**1.3))


@NARROW
@pytest.mark.parametrize("transposed", [0, 1])
def test_gemm_rounds_once(device: Device, dtype: Any, transposed: int, training: None) -> None:
    rng = np.random.default_rng(2)
    (a, a_values), (b, b_values), (c, c_values), (dy, upstream) = (
        on(device, rng.standard_normal(shape), dtype) for shape in ((7, 33), (33, 5), (1, 5), (7, 5))
    )
    if transposed:
        a, b = (on(device, values.T, dtype)[0] for values in (a_values, b_values))
    for leaf in (a, b, c):
        leaf.requires_grad = leaf.stores_grad = True
    y = autograd.gemm(a, b, c, 1 / 3, -1.7, transposed, transposed)
    magnitude = np.abs(a_values) @ np.abs(b_values) + np.abs(c_values)
    check(y, a_values @ b_values / 3 - 1.7 * c_values, magnitude)
    found = dict(autograd.backward(y, dy))
    da, db = upstream @ b_values.T / 3, a_values.T @ upstream / 3
    check(found[a], da.T if transposed else da, 100)
    check(found[b], db.T if transposed else db, 100)
    check(found[c], -1.7 * upstream.sum(0, keepdims=True), 100)


def test_gradients_of_parameters_are_not_rounded_on_their_way(training: None) -> None:
    a, b, c = (Tensor(data=np.ones(shape, "f")) for shape in ((4096, 1), (1, 3), (1, 3)))
    for leaf in (b, c):
        leaf.requires_grad = leaf.stores_grad = True
    with autograd.autocast("bf16"):
        y = autograd.gemm(a, b, c, alpha=1 / 3, beta=1 / 3)
    found = dict(autograd.backward(y, from_numpy(np.ones((4096, 3), bfloat16))))
    for parameter in (b, c):
        np.testing.assert_allclose(to_numpy(found[parameter]), np.full((1, 3), 4096 / 3), rtol=1e-6)


def test_gradients_of_gemm_in_float32_do_not_overflow_in_between(training: None) -> None:
    a, b, c = (
        Tensor(data=np.full(shape, value, "f")) for shape, value in (((4, 1), 0), ((1, 1), 1e25), ((1, 1), 0))
    )
    for leaf in (a, c):
        leaf.requires_grad = leaf.stores_grad = True
    dy = from_numpy(np.full((4, 1), 3e38, "f"))
    found = dict(autograd.backward(autograd.gemm(a, b, c, 1e-30, 0.1), dy))
    np.testing.assert_allclose(to_numpy(found[a]), np.full((4, 1), 3e33), rtol=1e-6)
    np.testing.assert_allclose(to_numpy(found[c]), [[1.2e38]], rtol=1e-6)


@NARROW
def test_the_gradient_of_a_repeated_factor_is_added_in_float32(
    device: Device, dtype: Any, training: None
) -> None:
    rng = np.random.default_rng(3)
    (x, x_values), (w, w_values), (dy, upstream) = (
        on(device, rng.standard_normal(shape), dtype) for shape in ((13, 4), (40, 4, 2), (40, 13, 2))
    )
    x.requires_grad = x.stores_grad = w.requires_grad = w.stores_grad = True
    found = dict(autograd.backward(autograd.matmul(x, w), dy))
    check(found[x], (upstream @ w_values.transpose(0, 2, 1)).sum(0), 100)
    check(found[w], x_values.T @ upstream, 100)


class Numbers(model.Model):
    """What is 16 bits in between is multiplied by numbers and summed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = layer.Linear(16), layer.Linear(3)

    def forward(self, x: Tensor) -> Tensor:
        h = autograd.relu(self.first(x)) * NUMBER
        return self.second(autograd.mean(h, autograd.sum(h, h, h), 0.3 - h))


def test_a_recorded_evaluation_has_the_values_of_an_eager_one() -> None:
    x = from_numpy(np.random.default_rng(4).standard_normal((6, 8)).astype("f"))
    net = Numbers()
    net.compile([x], is_train=False, use_graph=True, precision="bf16")
    net.eval()
    recorded = [to_numpy(net(x)) for _ in range(3)]
    net.graph(False)
    for values in recorded:
        np.testing.assert_allclose(values.astype("f"), to_numpy(net(x)).astype("f"), rtol=2**-8, atol=2**-9)


# ---- blocks ------------------------------------------------------------------------------------------


def product_dtype() -> Any:
    return autograd.matmul(Tensor(data=np.ones((2, 2), "f")), Tensor(data=np.ones((2, 2), "f"))).dtype


def test_a_block_can_be_entered_again_within_itself_and_by_threads() -> None:
    block, found = autograd.autocast("bf16"), []
    inside, done = threading.Barrier(2), threading.Barrier(2)

    def other() -> None:
        with block:
            inside.wait(60)
            found.append(product_dtype())
            done.wait(60)
        found.append(product_dtype())

    for _ in range(2):
        with block, autograd.autocast("fp32"), block:
            assert product_dtype() == bfloat16
        assert product_dtype() == np.float32 and this_thread.autocast is None
    thread = threading.Thread(target=other)
    thread.start()
    inside.wait(60)
    assert product_dtype() == np.float32
    done.wait(60)
    thread.join()
    assert found == [bfloat16, np.float32] and block(product_dtype)() == bfloat16
    with pytest.raises(ZeroDivisionError), pickle.loads(pickle.dumps(copy.deepcopy(block))):
        raise ZeroDivisionError
    assert this_thread.autocast is None and this_thread.outer_autocasts == ()
    with pytest.raises(GraphError, match="leaves a block that it is not in"):
        block.__exit__(None, None, None)


def test_a_precision_may_be_an_enum_of_str() -> None:
    with autograd.autocast(enum.Enum("Precision", {"low": "bf16"}, type=str).low):  # type: ignore[attr-defined]
        assert product_dtype() == bfloat16


@pytest.mark.parametrize("precision", [np.array("bf16"), np.array(["bf16"]), ["bf16"], b"bf16", None, 16])
def test_a_precision_of_another_type_is_refused(precision: Any) -> None:
    with pytest.raises(OptionError, match="autocast: precision"):
        autograd.autocast(precision)
    with pytest.raises(OptionError, match="compile: precision"):
        Numbers().compile([from_numpy(np.ones((2, 8), "f"))], precision=precision)


@pytest.mark.parametrize("dtype", ["float64", "float16"])
@pytest.mark.parametrize("is_training", [False, True])
def test_dropout_refuses_other_floats_in_a_block(dtype: str, is_training: bool, training: None) -> None:
    autograd.training = is_training
    with autograd.autocast("bf16"), pytest.raises(DTypeError, match=f"Dropout: .* not {dtype}"):
        autograd.dropout(Tensor(data=np.ones(3), dtype=dtype))
