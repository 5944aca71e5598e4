# SPDX-License-Identifier: Apache-2.0
"""RNN, LSTM and CudnnRNN: SINGA's formulas, layouts, lengths, options that raise, ranks that train together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from singa_lite import autograd, layer, model, opt
from singa_lite.autograd.ops.recurrent import unbind
from singa_lite.errors import DTypeError, OptionError, ShapeError
from singa_lite.tensor import Tensor, to_numpy
from tests.ranks import run_ranks
from tests.recurrent_reference import recurrent_by_hand, sigmoid

RNG = np.random.default_rng(9)
pytestmark = pytest.mark.usefixtures("training")
ON_EACH_DEVICE = pytest.mark.usefixtures("device")


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape)


def float64(array: np.ndarray) -> Tensor:
    return Tensor(data=array, dtype="float64")


def with_values(made: layer.Layer, *inputs: Any) -> dict[str, np.ndarray]:
    """Call the layer once, give its parameters values that matter, and return them."""
    made(*inputs)
    values = {name: 0.5 * normal(*param.shape) for name, param in made.get_params().items()}
    made.set_params(values)
    return values


@ON_EACH_DEVICE
@pytest.mark.parametrize("nonlinearity", ["tanh", "relu"])
@pytest.mark.parametrize("bias", [True, False])
def test_rnn_is_singas_formula(nonlinearity: str, bias: bool) -> None:
    made = layer.RNN(3, 4, nonlinearity=nonlinearity, bias=bias)
    xs, h = [normal(2, 3) for _ in range(3)], normal(2, 4)
    tensors = [float64(x) for x in xs]
    values = with_values(made, tensors, float64(h))
    outs, last = made(tensors, float64(h))
    assert len(outs) == 3 and last is outs[-1]
    first = to_numpy(made.step_forward(tensors[0], float64(h)))
    np.testing.assert_allclose(first, to_numpy(outs[0]), rtol=1e-12)
    for x, out in zip(xs, outs, strict=True):
        h = x @ values["Wx"] + h @ values["Wh"] + values.get("b", 0)
        h = np.tanh(h) if nonlinearity == "tanh" else np.maximum(h, 0)
        np.testing.assert_allclose(to_numpy(out), h, rtol=1e-12, atol=1e-14)


@ON_EACH_DEVICE
def test_a_step_of_rnn_takes_other_weights() -> None:
    made = layer.RNN(3, 4)
    x, h, Wx, Wh, b = normal(2, 3), normal(2, 4), normal(3, 4), normal(4, 4), normal(4)
    y = made.step_forward(*map(float64, (x, h, Wx, Wh, b)))
    np.testing.assert_allclose(to_numpy(y), np.tanh(x @ Wx + h @ Wh + b), rtol=1e-12)


@pytest.mark.parametrize("bias", [True, False])
def test_weights_given_to_a_step_of_rnn_are_all_and_have_its_shapes(bias: bool) -> None:
    made = layer.RNN(2, 3, bias=bias)
    x, h, Wx, Wh, b = map(float64, (normal(1, 2), normal(1, 3), normal(2, 3), normal(3, 3), normal(3)))
    for given in ((Wx,), (None, Wh), (None, None, b), (Wx, Wh) if bias else (Wx, Wh, b)):
        wanted = "Wx, Wh and b" if bias else "Wx and Wh, as there is no bias"
        with pytest.raises(OptionError, match=f"step_forward: give all of {wanted}, or none"):
            made.step_forward(x, h, *given)
    rest = (b,) if bias else ()
    for given in ((float64(normal(3, 2)), Wh), (Wx, float64(normal(2, 3))), (float64(normal(6)), Wh)):
        with pytest.raises(ShapeError, match=r"every (Wx|Wh) must have the shape"):
            made.step_forward(x, h, *given, *rest)
    np.testing.assert_array_equal(to_numpy(made.step_forward(x, h)), to_numpy(made([x], h)[1]))


@ON_EACH_DEVICE
@pytest.mark.parametrize("bias", [True, False])
def test_lstm_is_singas_formula(bias: bool) -> None:
    made = layer.LSTM(3, 4, bias=bias)
    xs, h, c = [normal(2, 3) for _ in range(3)], normal(2, 4), normal(2, 4)
    tensors, states = [float64(x) for x in xs], (float64(h), float64(c))
    values = with_values(made, tensors, states)
    assert list(values)[:3] == ["Wx_i", "Wh_i", "Wx_f"] and len(values) == (16 if bias else 8)
    outs, last, c_last = made(tensors, states)
    assert len(outs) == 3 and last is outs[-1]
    one = made.step_forward(tensors[0], *states)
    np.testing.assert_allclose(to_numpy(one[0]), to_numpy(outs[0]), rtol=1e-12)
    for number, x in enumerate(xs):
        a = {
            gate: x @ values[f"Wx_{gate}"] + values.get(f"Bx_{gate}", 0)
            + h @ values[f"Wh_{gate}"] + values.get(f"Bh_{gate}", 0)
            for gate in "ifog"
        }  # fmt: skip
        c = sigmoid(a["f"]) * c + sigmoid(a["i"]) * np.tanh(a["g"])
        h = sigmoid(a["o"]) * np.tanh(c)
        np.testing.assert_allclose(to_numpy(outs[number]), h, rtol=1e-12, atol=1e-14)
        if number == 0:
            np.testing.assert_allclose(to_numpy(one[1]), c, rtol=1e-12)
    np.testing.assert_allclose(to_numpy(c_last), c, rtol=1e-12)


@ON_EACH_DEVICE
@pytest.mark.parametrize("rnn_mode", ["vanilla", "relu", "lstm", "gru"])
@pytest.mark.parametrize("batch_first", [True, False])
def test_cudnn_rnn_is_the_textbooks(rnn_mode: str, batch_first: bool) -> None:
    mode = "tanh" if rnn_mode == "vanilla" else rnn_mode
    x = normal(5, 2, 3)  # steps, batch, features
    options = {"num_layers": 2, "bidirectional": True, "bias": False}
    made = layer.CudnnRNN(4, rnn_mode=rnn_mode, batch_first=batch_first, **options)
    given = float64(x.swapaxes(0, 1) if batch_first else x)
    values = with_values(made, given)
    states = [normal(4, 2, 4) for _ in range(2 if mode == "lstm" else 1)]
    expected, hy, _ = recurrent_by_hand(x, values["W"], *states, hidden_size=4, mode=mode, **options)
    y = to_numpy(made(given, *map(float64, states)))
    np.testing.assert_allclose(y.swapaxes(0, 1) if batch_first else y, expected, rtol=1e-11, atol=1e-13)
    made.return_sequences = False
    last = to_numpy(made(given, *map(float64, states)))
    np.testing.assert_allclose(last, np.concatenate([hy[2], hy[3]], 1), rtol=1e-11, atol=1e-13)


@ON_EACH_DEVICE
def test_masked_sequences_give_their_state_at_the_end() -> None:
    x, lengths = normal(4, 3, 2), [2, 4, 1]
    made = layer.CudnnRNN(3, batch_first=False, use_mask=True)
    masks = Tensor(data=np.array(lengths, "int32"))
    made(float64(x), seq_lengths=masks)
    zeros = np.zeros((1, 3, 3))
    weights = to_numpy(made.W)
    expected, hy, _ = recurrent_by_hand(x, weights, zeros, zeros, hidden_size=3, lengths=tuple(lengths))
    for given in (masks, lengths, np.array(lengths)):
        np.testing.assert_allclose(
            to_numpy(made(float64(x), seq_lengths=given)), expected, rtol=1e-11, atol=1e-14
        )
    made.return_sequences = False
    np.testing.assert_allclose(to_numpy(made(float64(x), seq_lengths=masks)), hy[0], rtol=1e-11)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: layer.RNN(3, 4, 2), OptionError, "num_layers = 2 does nothing for a list"),
        (lambda: layer.RNN(3, 4, nonlinearity="sigmoid"), OptionError, "nonlinearity = 'sigmoid'"),
        (lambda: layer.RNN(3, 4, bidirectional=True), OptionError, "bidirectional = True"),
        (lambda: layer.RNN(3, 4, dropout=0.5), OptionError, "dropout = 0.5"),
        (lambda: layer.RNN(0, 4), OptionError, "input_size = 0"),
        (lambda: layer.LSTM(3, 4, "relu"), OptionError, "nonlinearity = 'relu'"),
        (lambda: layer.LSTM(3, 4, batch_first=True), OptionError, "batch_first = True"),
        (lambda: layer.LSTM(3, 0), OptionError, "hidden_size = 0"),
        (lambda: layer.CudnnRNN(4, "relu"), OptionError, "activation = 'relu' would do nothing"),
        (lambda: layer.CudnnRNN(4, rnn_mode="elman"), OptionError, "rnn_mode = 'elman'"),
        (lambda: layer.CudnnRNN(4, num_layers=0), OptionError, "num_layers = 0"),
        (lambda: layer.CudnnRNN(4, dropout=1.0), OptionError, "ratio = 1.0"),
        (lambda: layer.CudnnRNN(True), OptionError, "hidden_size = True"),
        (lambda: layer.CudnnRNN(4)(Tensor((2, 3))), ShapeError, r"x must be \(N, T, features\)"),
        (lambda: layer.CudnnRNN(4)(np.ones((2, 3, 4))), DTypeError, "got ndarray"),
        (lambda: layer.CudnnRNN(4)(Tensor((2, 3, 4)), Tensor((1, 3, 4))), ShapeError, "h0 must be"),
        (
            lambda: layer.CudnnRNN(4, rnn_mode="gru")(Tensor((2, 3, 4)), cx=Tensor((1, 2, 4))),
            OptionError,
            "cx is a state of rnn_mode 'lstm'",
        ),
        (lambda: layer.CudnnRNN(4)(Tensor((2, 3, 4)), seq_lengths=[1, 2]), OptionError, "go with use_mask"),
        (lambda: layer.CudnnRNN(4, use_mask=True)(Tensor((2, 3, 4))), OptionError, "go with use_mask"),
        (
            lambda: layer.CudnnRNN(4, use_mask=True)(Tensor((2, 3, 4)), seq_lengths=Tensor((2,))),
            DTypeError,
            "must be integers",
        ),
        (
            lambda: layer.CudnnRNN(4, use_mask=True)(Tensor((2, 3, 4)), seq_lengths=[1, 4]),
            ShapeError,
            r"2 ints in 1 .. 3",
        ),
        (lambda: layer.RNN(3, 4)([], Tensor((2, 4))), ShapeError, "at least one step"),
        (lambda: layer.RNN(3, 4)(Tensor((2, 3)), Tensor((2, 4))), DTypeError, "expected a list of Tensors"),
        (lambda: layer.RNN(3, 4)([Tensor((2, 3)), Tensor((1, 3))], Tensor((2, 4))), ShapeError, "every step"),
        (lambda: layer.RNN(3, 4)([Tensor((2, 3))], Tensor((2, 3))), ShapeError, "every state"),
        (lambda: layer.LSTM(3, 4)([Tensor((2, 3))], Tensor((2, 4))), ShapeError, r"as \(h0, c0\)"),
        (lambda: layer.RNN(3, 4)([np.ones((2, 3))], Tensor((2, 4))), DTypeError, "got ndarray"),
    ],
)
def test_bad_options_and_inputs_raise_typed_errors(
    make: Callable[[], object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make()


def test_weights_start_as_singas() -> None:
    rnn, lstm, stack = layer.RNN(80, 50), layer.LSTM(80, 50), layer.CudnnRNN(25)
    rnn([Tensor((1, 80))], Tensor((1, 50)))
    lstm([Tensor((1, 80))], (Tensor((1, 50)), Tensor((1, 50))))
    stack(Tensor((1, 1, 30)))
    for param in (rnn.Wx, rnn.Wh, lstm.Wx_f, lstm.Wh_o):
        assert to_numpy(param).std() == pytest.approx(0.01, rel=0.1)
    assert not to_numpy(rnn.b).any() and not to_numpy(lstm.Bh_f).any()
    W = to_numpy(stack.W)
    assert W.shape == (100 * (30 + 25 + 2),) and abs(W).max() <= 0.2
    assert W.var() == pytest.approx(0.2**2 / 3, rel=0.1) and to_numpy(stack.W)[-100:].any()


class Masked(model.Model):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent = layer.CudnnRNN(3, use_mask=True, return_sequences=False)

    def forward(self, x: Tensor, lengths: Any) -> Tensor:
        return self.recurrent(x, seq_lengths=lengths)

    def train_one_batch(self, x: Tensor, lengths: Any, t: Tensor) -> tuple[Tensor, Tensor]:
        y = self.forward(x, lengths)
        loss = autograd.mse_loss(y, t)
        self.optimizer(loss)
        return y, loss


@ON_EACH_DEVICE
def test_steps_see_new_lengths_with_and_without_a_record() -> None:
    x, t = Tensor(data=normal(3, 5, 2)), Tensor(data=normal(3, 3))
    losses: list[list[float]] = [[], [], []]
    for number, use_graph in enumerate((False, True, True)):
        made = Masked()
        made.set_optimizer(opt.SGD(lr=0.1))
        x.device.SetRandSeed(1)
        made.compile([x, Tensor(data=np.array([1, 2, 3], "int32"))], use_graph=use_graph)
        for lengths in [(1, 2, 3), (5, 5, 5), (2, 2, 1), (5, 5, 5)] * 2:
            given = lengths if number < 2 else Tensor(data=np.array(lengths, "int32"))
            losses[number].append(made(x, given, t)[1].item())
        break_reasons = [info.break_reason for info in made.graph_info()]
        if number < 2:
            assert break_reasons == [None] * 3 * number
        else:
            assert len(break_reasons) == 1 and "reads values on the host" in break_reasons[0]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
    np.testing.assert_allclose(losses[2], losses[0], rtol=1e-5)


class Net(model.Model):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.recurrent = (
            layer.LSTM(3, 5) if kind == "LSTM" else layer.CudnnRNN(5, rnn_mode=kind, return_sequences=False)
        )
        self.head = layer.Linear(1)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind != "LSTM":
            return self.head(self.recurrent(x))
        columns = unbind(autograd.transpose(x, (1, 0, 2)))
        zeros = Tensor((x.shape[0], 5), requires_grad=False)
        return self.head(self.recurrent(columns, (zeros, zeros))[1])

    def train_one_batch(self, x: Tensor, t: Tensor, option: str) -> Tensor:
        loss = autograd.mse_loss(self.forward(x), t)
        self.optimizer(loss, dist_option=option, spars=0.3)
        return loss


def trained(communicator: Any, kind: str, option: str) -> dict[str, np.ndarray]:
    """Parameters after ten steps on this rank's part of global batches of 12."""
    made = Net(kind)
    made.set_optimizer(opt.DistOpt(opt.SGD(lr=0.2, momentum=0.9), communicator=communicator))
    Tensor((1,)).device.SetRandSeed(communicator.rank)  # ranks start apart; compile makes them equal
    made.compile([Tensor((1, 4, 3))], is_train=True)
    start = np.random.default_rng(1)
    made.set_params(
        {name: (0.4 * start.standard_normal(p.shape)).astype("f") for name, p in made.get_params().items()}
    )
    for step in range(10):
        rng = np.random.default_rng([7, step])
        x, t = rng.standard_normal((12, 4, 3)), rng.standard_normal((12, 1))
        part = slice(
            communicator.rank * 12 // communicator.size, (communicator.rank + 1) * 12 // communicator.size
        )
        made(Tensor(data=x[part]), Tensor(data=t[part]), option)
    return {name: to_numpy(param) for name, param in made.get_params().items()}


@pytest.mark.parametrize("kind", ["lstm", "gru", "LSTM"])
def test_three_ranks_take_the_steps_of_one_with_the_whole_batch(kind: str) -> None:
    (expected,) = run_ranks(trained, 1, kind, "fp32")
    ranks = run_ranks(trained, 3, kind, "fp32")
    for params in ranks:
        for name, values in params.items():
            np.testing.assert_allclose(values, expected[name], rtol=1e-4, atol=1e-6)
            assert values.tobytes() == ranks[0][name].tobytes()


@pytest.mark.parametrize("option", ["fp16", "sparseTopK"])
def test_ranks_hold_the_same_bits_with_other_schemes(option: str) -> None:
    first, *others = run_ranks(trained, 3, "lstm", option)
    assert all(
        values.tobytes() == other[name].tobytes() for other in others for name, values in first.items()
    )
