# SPDX-License-Identifier: Apache-2.0
"""recurrent: what the samples of every operator don't show - dropout, lengths, emptiness, errors, replays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from singa_lite import autograd, layer, model, opt
from singa_lite.autograd.ops.recurrent import unbind
from singa_lite.backend.recurrent import GATES, RnnConfig
from singa_lite.device import get_default_device
from singa_lite.errors import DTypeError, OptionError, ShapeError
from singa_lite.tensor import Tensor, from_numpy, to_numpy
from tests.recurrent_reference import recurrent_by_hand

pytestmark = pytest.mark.usefixtures("device", "training")  # all of it on each kind of device

RNG = np.random.default_rng(4)
MODES = list(GATES)


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape)


def float64(array: np.ndarray, stores_grad: bool = False) -> Tensor:
    return Tensor(data=array, dtype="float64", stores_grad=stores_grad)


def case(mode: str, steps: int = 4, batch: int = 3, size: int = 2, **options: Any) -> tuple[list, dict]:
    """Arrays x, w and the states, and the options of a call."""
    options = {"hidden_size": 3, "mode": mode, **options}
    stack = RnnConfig(
        input_size=size, **{k: v for k, v in options.items() if k not in ("dropout", "lengths")}
    )
    states = [normal(stack.num_cells, batch, 3) for _ in range(stack.num_states)]
    return [normal(steps, batch, size), 0.6 * normal(stack.num_weights), *states], options


def grads(y: Tensor, direction: np.ndarray, of: list[Tensor]) -> list[np.ndarray]:
    found = autograd.gradients(y, float64(direction))
    return [to_numpy(found[tensor]) for tensor in of]


@pytest.mark.parametrize("mode", MODES)
def test_a_sequence_among_longer_ones_is_as_it_is_alone(mode: str) -> None:
    lengths = (2, 4, 1)
    arrays, options = case(mode, num_layers=2, bidirectional=True)
    y, *last = autograd.recurrent(*map(float64, arrays), lengths=lengths, **options)
    for n, length in enumerate(lengths):
        x, w, *states = arrays
        alone = [x[:length, n : n + 1], w, *(state[:, n : n + 1] for state in states)]
        expected, *ends = autograd.recurrent(*map(float64, alone), **options)
        np.testing.assert_allclose(to_numpy(y)[:length, n], to_numpy(expected)[:, 0], rtol=1e-12, atol=1e-14)
        assert not to_numpy(y)[length:, n].any()
        for mine, end in zip(last, ends, strict=True):
            np.testing.assert_allclose(to_numpy(mine)[:, n], to_numpy(end)[:, 0], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("mode", MODES)
def test_nothing_flows_from_or_to_what_is_behind_the_end(mode: str) -> None:
    arrays, options = case(mode, num_layers=2, bidirectional=True, lengths=(2, 4, 1))
    tensors = [float64(array, True) for array in arrays]
    y = autograd.recurrent(*tensors, **options)[0]
    direction = normal(*y.shape)
    dx, dw, *_ = grads(y, direction, tensors)
    for n, length in enumerate(options["lengths"]):
        assert not dx[length:, n].any() and dx[:length, n].all()
        direction[length:, n] = arrays[0][length:, n] = np.nan
    tensors = [float64(array, True) for array in arrays]
    again = autograd.recurrent(*tensors, **options)[0]
    np.testing.assert_array_equal(to_numpy(again), to_numpy(y))
    np.testing.assert_array_equal(grads(again, direction, tensors)[1], dw)


def test_lengths_that_are_all_whole_change_nothing() -> None:
    arrays, options = case("lstm", num_layers=2, bidirectional=True)
    expected = autograd.recurrent(*map(float64, arrays), **options)
    for mine, other in zip(
        autograd.recurrent(*map(float64, arrays), lengths=(4, 4, 4), **options), expected, strict=True
    ):
        np.testing.assert_array_equal(to_numpy(mine), to_numpy(other))


@pytest.mark.parametrize("mode", MODES)
def test_states_left_out_are_zeros(mode: str) -> None:
    (x, w, *states), options = case(mode, num_layers=2)
    y, *last = autograd.recurrent(float64(x), float64(w), **options)
    zeros = [np.zeros_like(state) for state in states]
    expected = recurrent_by_hand(x, w, *zeros, **options)
    for mine, other in zip((y, *last), expected, strict=False):
        np.testing.assert_allclose(to_numpy(mine), other, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("output", [0, 1, 2])
def test_one_output_alone_has_its_gradient(mode: str, output: int) -> None:
    """The gradients of all outputs together are the sum of those of each."""
    if output == 2 and mode != "lstm":
        return
    arrays, options = case(mode, num_layers=2, bidirectional=True)
    tensors = [float64(array, True) for array in arrays]
    made = autograd.recurrent(*tensors, **options)[output]
    direction = normal(*made.shape)
    alone = grads(made, direction, tensors)
    tensors = [float64(array, True) for array in arrays]
    total = None
    for number, tensor in enumerate(autograd.recurrent(*tensors, **options)):
        weight = direction if number == output else np.zeros(tensor.shape)
        term = autograd.reduce_sum(autograd.mul(tensor, float64(weight)), keepdims=0)
        total = term if total is None else autograd.add(total, term)
    for mine, other in zip(alone, grads(total, np.ones(()), tensors), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-12, atol=1e-14)


def by_layers(x: Tensor, w: Tensor, *states: Tensor, dropout: float, **options: Any) -> Tensor:
    """Two layers as two calls with autograd.dropout between them."""
    rows = {"tanh": 1, "relu": 1, "lstm": 4, "gru": 3}[options["mode"]] * 3 * 2
    flat, cut = to_numpy(w), [rows * (2 + 3), rows * (6 + 3), rows * 2, rows * 2]
    first, second, bias, other_bias = np.split(flat, np.cumsum(cut)[:-1])
    options["num_layers"] = 1
    both = [[to_numpy(state)[:2] for state in states], [to_numpy(state)[2:] for state in states]]
    y = autograd.recurrent(x, float64(np.append(first, bias)), *map(float64, both[0]), **options)[0]
    y = autograd.dropout(y, dropout)
    return autograd.recurrent(y, float64(np.append(second, other_bias)), *map(float64, both[1]), **options)[0]


@pytest.mark.parametrize("mode", MODES)
def test_dropout_falls_between_the_layers_and_nowhere_else(mode: str) -> None:
    arrays, options = case(mode, num_layers=2, bidirectional=True, dropout=0.4)
    x = float64(arrays[0], True)
    results = []
    for function in (lambda *tensors, **given: autograd.recurrent(*tensors, **given)[0], by_layers):
        get_default_device().SetRandSeed(5)
        y = function(x, *map(float64, arrays[1:]), **options)
        results.append((to_numpy(y), *grads(y, np.ones(y.shape), [x])))
    for mine, expected in zip(*results, strict=True):
        np.testing.assert_allclose(mine, expected, rtol=1e-12, atol=1e-14)
    plain = to_numpy(autograd.recurrent(*map(float64, arrays), **{**options, "dropout": 0.0})[0])
    assert abs(plain - results[0][0]).max() > 1e-3
    autograd.training = False
    np.testing.assert_array_equal(to_numpy(autograd.recurrent(*map(float64, arrays), **options)[0]), plain)


def test_gradients_with_dropout_are_those_of_finite_differences() -> None:
    arrays, options = case("lstm", steps=2, batch=2, num_layers=3, dropout=0.3)

    def run(arrays: list[np.ndarray], stores_grad: bool = False) -> tuple[list[Tensor], tuple[Tensor, ...]]:
        get_default_device().SetRandSeed(5)
        tensors = [float64(array, stores_grad) for array in arrays]
        return tensors, autograd.recurrent(*tensors, **options)

    tensors, (y, *_) = run(arrays, True)
    direction = normal(*y.shape)
    found = grads(y, direction, tensors)
    for index, array in enumerate(arrays):
        for cell in [tuple(RNG.integers(n) for n in array.shape) for _ in range(20)]:
            ends = []
            for move in (1e-6, -1e-6):
                moved = [other.copy() for other in arrays]
                moved[index][cell] += move
                ends.append((to_numpy(run(moved)[1][0]) * direction).sum())
            np.testing.assert_allclose(found[index][cell], (ends[0] - ends[1]) / 2e-6, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("length", "batch"), [(0, 3), (4, 0)])
def test_nothing_to_do_keeps_the_states_and_gives_zero_gradients(mode: str, length: int, batch: int) -> None:
    arrays, options = case(mode, steps=length, batch=batch, num_layers=2, bidirectional=True)
    tensors = [float64(array, True) for array in arrays]
    y, *last = autograd.recurrent(*tensors, **options)
    assert y.shape == (length, batch, 6)
    for end, start in zip(last, arrays[2:], strict=True):
        np.testing.assert_array_equal(to_numpy(end), start)
    direction = normal(*last[-1].shape)
    dx, dw, *dstates = grads(last[-1], direction, tensors)
    assert dx.shape == arrays[0].shape and not dw.any()
    np.testing.assert_array_equal(dstates[-1], direction)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"mode": "elman"}, OptionError, "mode = 'elman'"),
        ({"hidden_size": 0}, OptionError, "hidden_size = 0"),
        ({"num_layers": 1.5}, OptionError, "num_layers = 1.5"),
        ({"dropout": 1}, OptionError, "ratio = 1"),
        ({"lengths": 3}, OptionError, "list of ints"),
        ({"lengths": (0, 1, 1)}, OptionError, "length = 0"),
        ({"lengths": (1, 1)}, ShapeError, "lengths must be 3 ints in 1 .. 4"),
        ({"lengths": (1, 5, 1)}, ShapeError, "lengths must be 3 ints in 1 .. 4"),
        ({"num_layers": 2}, ShapeError, "weights, w has the shape"),
        ({"bias": False}, ShapeError, "weights, w has the shape"),
        ({"hidden_size": 4}, ShapeError, "weights, w has the shape"),
        ({"mode": "gru"}, ShapeError, "mode 'gru' has no c0"),
        ({"x": np.zeros((4, 2))}, ShapeError, r"\(steps, batch, features\)"),
        ({"x": np.zeros((4, 5, 2))}, ShapeError, r"h0 must be .* = \(1, 5, 3\), not \(1, 3, 3\)"),
        ({"c0": np.zeros((1, 3, 4))}, ShapeError, "c0 must be"),
    ],
)
def test_what_does_not_fit_is_a_typed_error(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    arrays, options = case("lstm")
    given = dict(zip(("x", "w", "h0", "c0"), arrays, strict=True))
    given.update({name: value for name, value in change.items() if name in given})
    options.update({name: value for name, value in change.items() if name not in given})
    with pytest.raises(error, match=message):
        autograd.recurrent(*map(float64, given.values()), **options)


def test_states_of_another_dtype_and_no_tensors_are_dtype_errors() -> None:
    (x, w, *states), options = case("lstm")
    with pytest.raises(DTypeError, match="one dtype"):
        autograd.recurrent(float64(x), float64(w), Tensor(data=states[0], dtype="float32"), **options)
    with pytest.raises(DTypeError, match="Tensor"):
        autograd.recurrent(x, float64(w), **options)
    with pytest.raises(DTypeError, match="float"):
        autograd.recurrent(Tensor((4, 3, 2), dtype="int32"), float64(w), **options)


def test_steps_are_the_rows_of_the_first_axis_and_their_gradients_join() -> None:
    x = float64(normal(3, 2, 4), True)
    made = unbind(x)
    np.testing.assert_array_equal([to_numpy(step) for step in made], to_numpy(x))
    y = autograd.add(made[0], autograd.mul(made[2], made[2]))
    (dx,) = grads(y, np.ones((2, 4)), [x])
    np.testing.assert_allclose(dx, [np.ones((2, 4)), np.zeros((2, 4)), 2 * to_numpy(x)[2]])


class Last(model.Model):
    """A recurrent layer, and a product on its last state."""

    def __init__(self, make: Callable[[], layer.Layer]) -> None:
        super().__init__()
        self.recurrent, self.head = make(), layer.Linear(1)

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.recurrent, layer.CudnnRNN):
            return self.head(self.recurrent(x))
        xs = unbind(autograd.transpose(x, (1, 0, 2)))
        zeros = Tensor((x.shape[0], 5), x.device, requires_grad=False)
        state = (zeros, zeros) if isinstance(self.recurrent, layer.LSTM) else zeros
        return self.head(self.recurrent(xs, state)[1])

    def train_one_batch(self, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        y = self.forward(x)
        loss = autograd.mse_loss(y, t)
        self.optimizer(loss)
        return y, loss


def made(mode: str) -> Callable[[], layer.Layer]:
    options = {"num_layers": 2, "dropout": 0.2, "bidirectional": True, "return_sequences": False}
    makers = {"RNN": lambda: layer.RNN(3, 5), "LSTM": lambda: layer.LSTM(3, 5)}
    return makers.get(mode, lambda: layer.CudnnRNN(5, rnn_mode=mode, **options))


@pytest.mark.parametrize("mode", [*MODES, "RNN", "LSTM"])
def test_replayed_steps_are_the_eager_ones(mode: str) -> None:
    rng = np.random.default_rng(3)
    batches = [[rng.standard_normal(shape).astype("f") for shape in ((4, 6, 3), (4, 1))] for _ in range(5)]
    losses = []
    for use_graph in (False, True):
        get_default_device().SetRandSeed(2)
        trained = Last(made(mode))
        trained.set_optimizer(opt.SGD(lr=0.2, momentum=0.9))
        trained.compile([from_numpy(batches[0][0])], is_train=True, use_graph=use_graph)
        losses.append([to_numpy(trained(*map(from_numpy, batch))[1]).item() for batch in batches * 2])
        if use_graph:
            assert [info.break_reason for info in trained.graph_info()] == [None]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
    assert len(set(losses[0])) == 10
