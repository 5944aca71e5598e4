# SPDX-License-Identifier: Apache-2.0
"""Every layer: deferred initialisation, both call styles, state round trip, gradients to every parameter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from singa_lite import autograd, layer
from singa_lite.device import Device
from singa_lite.errors import DeviceError, DTypeError, OptionError, ShapeError
from singa_lite.layer import Layer
from singa_lite.tensor import Tensor, from_numpy, to_numpy

pytestmark = pytest.mark.usefixtures("device", "training")  # all of it on each kind of device

RNG = np.random.default_rng(6)


@dataclass
class Sample:
    """How to make a layer, what to call it with, and the parameters it must then have.

    Attributes:
        makers: equal layers, one per call style.
        inputs: arrays that become Tensors, lists of arrays likewise; anything else is passed on.
        out_shape: of the result.
        params: name -> shape.
        buffers: name -> shape.
        bad_input: an input that does not fit after the first call, or None.
        dtype: of parameters and result, if not that of the inputs.
    """

    makers: list[Callable[[], Layer]]
    inputs: tuple[Any, ...]
    out_shape: tuple[int, ...]
    params: dict[str, tuple[int, ...]] = field(default_factory=dict)
    buffers: dict[str, tuple[int, ...]] = field(default_factory=dict)
    bad_input: np.ndarray | None = None
    dtype: str | None = None


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape)


IMAGE, ROWS = normal(2, 4, 7, 6), normal(5, 3)
SAMPLES = [
    Sample(
        [lambda: layer.Linear(4), lambda: layer.Linear(3, 4), lambda: layer.Linear(3, 4, True)],
        (ROWS,),
        (5, 4),
        {"W": (3, 4), "b": (4,)},
        bad_input=normal(5, 2),
    ),
    Sample(
        [lambda: layer.Linear(4, bias=False), lambda: layer.Linear(3, 4, False)],
        (normal(2, 5, 3),),
        (2, 5, 4),
        {"W": (3, 4)},
    ),
    Sample(
        [lambda: layer.Conv2d(6, 3), lambda: layer.Conv2d(4, 6, 3), lambda: layer.Conv2d(4, 6, (3, 3), 1, 0)],
        (IMAGE,),
        (2, 6, 5, 4),
        {"W": (6, 4, 3, 3), "b": (6,)},
        bad_input=normal(2, 3, 7, 6),
    ),
    Sample(
        [
            lambda: layer.Conv2d(6, (3, 2), stride=2, padding=1, group=2, bias=False, activation="RELU"),
            lambda: layer.Conv2d(4, 6, (3, 2), 2, 1, 1, 2, False, activation="RELU"),
        ],
        (IMAGE,),
        (2, 6, 4, 4),
        {"W": (6, 2, 3, 2)},
    ),
    Sample(
        [lambda: layer.Conv2d(5, 3, pad_mode="SAME_UPPER"), lambda: layer.Conv2d(5, 3, padding=1)],
        (IMAGE,),
        (2, 5, 7, 6),
        {"W": (5, 4, 3, 3), "b": (5,)},
    ),
    Sample(
        [lambda: layer.BatchNorm2d(), lambda: layer.BatchNorm2d(4), lambda: layer.BatchNorm2d(4, 0.9)],
        (IMAGE,),
        IMAGE.shape,
        {"scale": (4,), "bias": (4,)},
        {"running_mean": (4,), "running_var": (4,)},
        bad_input=normal(2, 3, 7, 6),
    ),
    Sample([lambda: layer.Pooling2d(2), lambda: layer.Pooling2d(2, 2, 0, True)], (IMAGE,), (2, 4, 3, 3)),
    Sample(
        [lambda: layer.MaxPool2d(3, 2), lambda: layer.MaxPool2d((3, 3), (2, 2), 0)], (IMAGE,), (2, 4, 3, 2)
    ),
    Sample(
        [lambda: layer.AvgPool2d(3, 1, 1), lambda: layer.AvgPool2d(3, 1, pad_mode="SAME_LOWER")],
        (IMAGE,),
        IMAGE.shape,
    ),
    Sample([lambda: layer.MaxPool1d(2), lambda: layer.MaxPool1d(2, 2, 0)], (normal(2, 3, 8),), (2, 3, 4)),
    Sample([lambda: layer.AvgPool1d(3, 1, 1)], (normal(2, 3, 8),), (2, 3, 8)),
    Sample([layer.ReLU], (ROWS,), (5, 3)),
    Sample([layer.Sigmoid], (ROWS,), (5, 3)),
    Sample([layer.Tanh], (ROWS,), (5, 3)),
    Sample([layer.SoftMax, lambda: layer.SoftMax(-1)], (ROWS,), (5, 3)),
    Sample([layer.Dropout, lambda: layer.Dropout(0.5)], (ROWS,), (5, 3)),
    Sample([layer.Flatten, lambda: layer.Flatten(1)], (IMAGE,), (2, 168)),
    Sample([layer.Reshape], (ROWS, (3, -1)), (3, 5)),
    Sample([lambda: layer.Cat(1)], ([ROWS, ROWS],), (5, 6)),
    Sample([layer.Add], (ROWS, ROWS[:1]), (5, 3)),
    Sample(
        [lambda: layer.RNN(3, 4), lambda: layer.RNN(3, 4, 1, "tanh", True, False, 0, False)],
        ([ROWS, normal(5, 3)], normal(5, 4)),
        (5, 4),
        {"Wx": (3, 4), "Wh": (4, 4), "b": (4,)},
    ),
    Sample(
        [lambda: layer.RNN(3, 4, nonlinearity="relu", bias=False)],
        ([ROWS], normal(5, 4)),
        (5, 4),
        {"Wx": (3, 4), "Wh": (4, 4)},
    ),
    Sample(
        [lambda: layer.LSTM(3, 4), lambda: layer.LSTM(3, 4, "tanh", 1, True, False, 0, False)],
        ([ROWS, normal(5, 3)], [normal(5, 4), normal(5, 4)]),
        (5, 4),
        {
            **{f"{kind}_{gate}": (rows, 4) for kind, rows in (("Wx", 3), ("Wh", 4)) for gate in "ifog"},
            **{f"{kind}_{gate}": (4,) for kind in ("Bx", "Bh") for gate in "ifog"},
        },
    ),
    Sample(
        [
            lambda: layer.CudnnRNN(4),
            lambda: layer.CudnnRNN(4, "tanh", 1, True, True, 0, False, "lstm", False, True),
        ],
        (normal(5, 2, 3),),
        (5, 2, 4),
        {"W": (16 * (3 + 4 + 2),)},
        bad_input=normal(5, 2, 4),
    ),
    Sample(
        [lambda: layer.CudnnRNN(4, num_layers=2, bidirectional=True, rnn_mode="gru", batch_first=False)],
        (normal(2, 5, 3),),
        (2, 5, 8),
        {"W": (2 * 12 * (3 + 4 + 2) + 2 * 12 * (8 + 4 + 2),)},
    ),
    Sample(
        [lambda: layer.CudnnRNN(4, bidirectional=True, rnn_mode="vanilla", return_sequences=False)],
        (normal(5, 2, 3),),
        (5, 8),
        {"W": (2 * 4 * (3 + 4 + 2),)},
    ),
    Sample([layer.SoftMaxCrossEntropy], (ROWS, np.array([0, 1, 2, 1, 0])), (1,)),
    Sample([layer.CrossEntropy], (np.abs(ROWS) + 0.1, np.eye(3)[[0, 1, 2, 1, 0]]), (1,)),
    Sample([layer.MeanSquareError], (ROWS, ROWS + 1), (1,)),
    Sample([layer.BinaryCrossEntropy], (1 / (1 + np.exp(-ROWS)), (ROWS > 0).astype(int)), (1,)),
    Sample(
        [lambda: layer.Gemm(4), lambda: layer.Gemm(4, 1.0, 1.0, False, True, True)],
        (ROWS,),
        (5, 4),
        {"W": (4, 3), "b": (1, 4)},
        bad_input=normal(5, 2),
    ),
    Sample(
        [lambda: layer.Gemm(4, 0.5, 2, True, False, bias_shape=(3, 1))],
        (ROWS,),
        (3, 4),
        {"W": (5, 4), "b": (3, 1)},
    ),
    Sample([lambda: layer.Gemm(4, bias=False)], (ROWS,), (5, 4), {"W": (4, 3)}),
    Sample(
        [lambda: layer.Embedding(4, 3), lambda: layer.Embedding(4, 3, "gaussian")],
        (np.array([[0, 3], [1, 1]]),),
        (2, 2, 3),
        {"W": (4, 3)},
        dtype="float32",
    ),
    Sample(
        [lambda: layer.LayerNorm(), lambda: layer.LayerNorm(3), lambda: layer.LayerNorm([3])],
        (normal(2, 5, 3),),
        (2, 5, 3),
        {"scale": (3,), "bias": (3,)},
        bad_input=normal(2, 5, 4),
    ),
    Sample(
        [lambda: layer.LayerNorm((5, 3), eps=1e-3)],
        (normal(2, 5, 3),),
        (2, 5, 3),
        {"scale": (5, 3), "bias": (5, 3)},
    ),
    Sample(
        [
            lambda: layer.SeparableConv2d(6, 3),
            lambda: layer.SeparableConv2d(4, 6, 3),
            lambda: layer.SeparableConv2d(4, 6, (3, 3), 1, 0),
        ],
        (IMAGE,),
        (2, 6, 5, 4),
        {"depthwise_conv.W": (4, 1, 3, 3), "point_conv.W": (6, 4, 1, 1)},
        bad_input=normal(2, 3, 7, 6),
    ),
    Sample(
        [lambda: layer.SeparableConv2d(4, 6, 3, 2, 1, bias=True)],
        (IMAGE,),
        (2, 6, 4, 3),
        {
            "depthwise_conv.W": (4, 1, 3, 3),
            "depthwise_conv.b": (4,),
            "point_conv.W": (6, 4, 1, 1),
            "point_conv.b": (6,),
        },
    ),
    Sample(
        [lambda: layer.MultiHeadAttention(2, causal=True), lambda: layer.MultiHeadAttention(2, True, True)],
        (normal(3, 5, 4),),
        (3, 5, 4),
        {
            "projection.W": (4, 12),
            "projection.b": (12,),
            "output.W": (4, 4),
            "output.b": (4,),
        },
        bad_input=normal(3, 5, 6),
    ),
    Sample(
        [lambda: layer.MultiHeadAttention(2, bias=False)],
        (normal(3, 5, 4), normal(3, 2, 6)),
        (3, 5, 4),
        {"query.W": (4, 4), "memory_projection.W": (6, 8), "output.W": (4, 4)},
    ),
]
CASES = [
    pytest.param(sample, maker, id=f"{number}-{type(maker()).__name__}-style{style}")
    for number, sample in enumerate(SAMPLES)
    for style, maker in enumerate(sample.makers)
]
STATEFUL = [case for case in CASES if case.values[0].params]


def arguments(inputs: tuple[Any, ...], dtype: str = "float32") -> list[Any]:
    def convert(value: Any) -> Any:
        if isinstance(value, list):
            return [convert(item) for item in value]
        if isinstance(value, np.ndarray):
            return Tensor(data=value, dtype=dtype if value.dtype.kind == "f" else "int32")
        return value

    return [convert(value) for value in inputs]


def first(result: Any) -> Tensor:
    """The first Tensor of what a layer gives."""
    return first(result[0]) if isinstance(result, (list, tuple)) else result


def subclasses(cls: type[Layer]) -> set[type[Layer]]:
    return {cls, *(found for sub in cls.__subclasses__() for found in subclasses(sub))}


def test_every_layer_has_a_sample() -> None:
    found = (cls for cls in subclasses(Layer) if cls.__module__.startswith("singa_lite.layer"))
    ours = {cls for cls in found if not cls.__name__.startswith("_")}
    sampled = {type(maker()) for sample in SAMPLES for maker in sample.makers}
    assert ours == sampled | {Layer, layer.RNN_Base}
    assert {cls.__name__ for cls in ours} == set(layer.__all__)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize(("sample", "maker"), CASES)
def test_parameters_are_made_once_at_the_first_call(
    sample: Sample, maker: Callable[[], Layer], dtype: str
) -> None:
    made = maker()
    assert made.get_states() == {}
    y = first(made(*arguments(sample.inputs, dtype)))
    dtype = sample.dtype or dtype
    assert y.shape == sample.out_shape and y.dtype == dtype
    params, states = made.get_params(), made.get_states()
    assert {name: param.shape for name, param in params.items()} == sample.params
    assert {name: state.shape for name, state in states.items()} == {**sample.params, **sample.buffers}
    keeps_float32 = isinstance(made, layer.BatchNorm2d) and dtype == "float16"
    assert all(state.dtype == ("float32" if keeps_float32 else dtype) for state in states.values())
    assert all(
        param.stores_grad and param.requires_grad and param.name == n.split(".")[-1]
        for n, param in params.items()
    )
    made(*arguments(sample.inputs, dtype))
    assert all(made.get_states()[name] is state for name, state in states.items())


@pytest.mark.parametrize(("sample", "maker"), STATEFUL)
def test_a_direct_forward_makes_the_parameters_too(sample: Sample, maker: Callable[[], Layer]) -> None:
    made = maker()
    made.forward(*arguments(sample.inputs))
    assert set(made.get_params()) == set(sample.params)


@pytest.mark.parametrize("sample", [sample for sample in SAMPLES if len(sample.makers) > 1])
def test_call_styles_are_equal(sample: Sample) -> None:
    results = []
    for maker in sample.makers:
        made = maker()
        inputs = arguments(sample.inputs)
        first(inputs).device.SetRandSeed(3)
        results.append(to_numpy(first(made(*inputs))))
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


@pytest.mark.parametrize(("sample", "maker"), STATEFUL)
def test_states_survive_a_round_trip(sample: Sample, maker: Callable[[], Layer]) -> None:
    one, other = maker(), maker()
    inputs = arguments(sample.inputs)
    for made in (one, other):
        made(*inputs)
    arrays = {
        name: RNG.uniform(0.5, 1.5, state.shape).astype("f") for name, state in one.get_states().items()
    }
    one.set_states(arrays)
    other.set_states(one.get_states())
    for name, array in arrays.items():
        np.testing.assert_array_equal(to_numpy(other.get_states()[name]), array)
        assert other.get_states()[name] is not one.get_states()[name]
    autograd.training = False
    np.testing.assert_array_equal(to_numpy(first(one(*inputs))), to_numpy(first(other(*inputs))))


@pytest.mark.parametrize(("sample", "maker"), STATEFUL)
def test_gradients_flow_to_every_parameter(sample: Sample, maker: Callable[[], Layer]) -> None:
    made = maker()
    y = first(made(*arguments(sample.inputs)))
    direction = Tensor(data=RNG.standard_normal(y.shape), dtype="float32")
    grads = autograd.gradients(y, direction)
    for name, param in made.get_params().items():
        assert grads[param].shape == param.shape, name
        assert np.abs(to_numpy(grads[param])).max() > 0, name
    assert len(grads) == len(sample.params)


@pytest.mark.parametrize(
    ("sample", "maker"), [case for case in CASES if case.values[0].bad_input is not None]
)
def test_another_input_size_is_a_shape_error_that_names_the_layer(
    sample: Sample, maker: Callable[[], Layer]
) -> None:
    holder = Layer()
    holder.stem = maker()
    holder.stem(*arguments(sample.inputs))
    with pytest.raises(
        ShapeError, match=rf"{type(holder.stem).__name__} 'stem': expected \d .* but the input"
    ):
        holder.stem(*arguments((sample.bad_input,)))


@pytest.mark.parametrize(
    "make", [lambda: layer.Linear(2, 4), lambda: layer.Conv2d(3, 4, 1), lambda: layer.BatchNorm2d(9)]
)
def test_a_wrong_explicit_input_size_is_a_shape_error_at_the_first_call(make: Callable[[], Layer]) -> None:
    made = make()
    x = Tensor((5, 3)) if isinstance(made, layer.Linear) else Tensor((2, 4, 3, 3))
    with pytest.raises(ShapeError, match="leave the input size out"):
        made(x)
    assert made.get_params() == {}


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: layer.Linear(0), OptionError, "size = 0 must be an int >= 1"),
        (lambda: layer.Linear(1, 2, 3, 4), OptionError, "in, out, bias"),
        (lambda: layer.Conv2d(3, 8, 3, 1, stride=2), OptionError, "stride is given twice"),
        (lambda: layer.SeparableConv2d(3, 8, 3, 1, 1, padding=2), OptionError, "padding is given twice"),
        (lambda: layer.Linear(3, 8, True, bias=False), OptionError, "bias is given twice"),
        (lambda: layer.BatchNorm2d(3, 0.5, momentum=0.8), OptionError, "momentum is given twice"),
        (lambda: layer.Conv2d(4, 3, activation="SWISH"), OptionError, "choose one of 'NOTSET', 'RELU'"),
        (lambda: layer.Conv2d(4, 3, pad_mode="VALID"), OptionError, "pad_mode = 'VALID'"),
        (lambda: layer.Conv2d(4, 3, padding=1, pad_mode="SAME_UPPER"), OptionError, "not both"),
        (lambda: layer.Conv2d(5, 3, group=2), OptionError, "must be divisible by group"),
        (lambda: layer.Conv2d(4, 0), OptionError, "kernel_size = 0"),
        (lambda: layer.Conv2d(4, 6, 3, 1, 0, 1, 1, True, "NOTSET"), OptionError, "at most"),
        (lambda: layer.MaxPool2d(2, pad_mode="SAME"), OptionError, "pad_mode = 'SAME'"),
        (lambda: layer.Dropout(1), OptionError, "ratio = 1 must be in"),
        (lambda: layer.BatchNorm2d(1, 2, 3), OptionError, "channels, momentum"),
        (lambda: layer.Linear(2.5), OptionError, "size = 2.5"),
        (lambda: layer.Linear("3"), OptionError, "size = '3'"),
        (lambda: layer.Linear(True), OptionError, "size = True"),
        (lambda: layer.Linear(3, 0), OptionError, "size = 0"),
        (lambda: layer.Conv2d(4, 3, group=0), OptionError, "group = 0"),
        (lambda: layer.Conv2d(4, 3, group=-1), OptionError, "group = -1"),
        (lambda: layer.Conv2d(4, 3, group="a"), OptionError, "group = 'a'"),
        (lambda: layer.Conv2d(0, 4, 3), OptionError, "in_channels = 0"),
        (lambda: layer.Conv2d(4.0, 3), OptionError, "nb_kernels = 4.0"),
        (lambda: layer.Conv2d(4, 2.5), OptionError, "kernel_size = 2.5"),
        (lambda: layer.Conv2d(4, None), OptionError, "kernel_size = None"),
        (lambda: layer.Conv2d(4, 3, stride=True), OptionError, "stride = True"),
        (lambda: layer.BatchNorm2d("x"), OptionError, "channels = 'x'"),
        (lambda: layer.BatchNorm2d(0), OptionError, "channels = 0"),
        (lambda: layer.BatchNorm2d(momentum=3), OptionError, "momentum = 3"),
        (lambda: layer.BatchNorm2d(4, -0.1), OptionError, "momentum = -0.1"),
        (lambda: layer.BatchNorm2d(eps=0), OptionError, "eps = 0"),
        (lambda: layer.BatchNorm2d(eps=float("nan")), OptionError, "eps = nan"),
        (lambda: layer.MaxPool2d(2, 2, padding=2), OptionError, r"padding \(2, 2\) must be smaller"),
        (lambda: layer.AvgPool1d(2, 2, padding=2), OptionError, r"padding \(0, 2\) must be smaller"),
        (lambda: layer.MaxPool1d("a"), OptionError, "kernel_size"),
        (lambda: layer.Dropout("x"), OptionError, "ratio = 'x'"),
        (lambda: layer.Dropout(-0.1), OptionError, "ratio = -0.1"),
        (lambda: layer.Cat(2)([Tensor((2, 3))] * 2), ShapeError, "axis 2 is out of range"),
        (lambda: layer.Cat("x")([Tensor((2, 3))] * 2), ShapeError, "axis 'x' is not an int"),
        (lambda: layer.Cat()(Tensor((2, 3))), DTypeError, "list of Tensors"),
        (lambda: layer.Flatten(-3)(Tensor((2, 3))), ShapeError, "axis -3 is out of range"),
        (lambda: layer.Flatten(1.0)(Tensor((2, 3))), ShapeError, "axis 1.0 is not an int"),
        (lambda: layer.SoftMax(2)(Tensor((2, 3))), ShapeError, "axis 2 is out of range"),
        (lambda: layer.Reshape()(Tensor((2, 3)), (2, "a")), ShapeError, "ints"),
        (
            lambda: layer.Conv2d(4, 2, group=2)(Tensor((1, 3, 4, 4))),
            ShapeError,
            "3 channels must be divisible",
        ),
        (lambda: layer.Conv2d(4, 2)(Tensor((3, 4, 4))), ShapeError, r"x must be \(N, C, H, W\)"),
        (lambda: layer.Linear(4)(Tensor((3,))), ShapeError, "use Flatten"),
        (lambda: layer.Linear(4)(np.ones((3, 2))), DTypeError, "needs a float Tensor as input, got ndarray"),
        (lambda: layer.Conv2d(4, 1)(np.ones((1, 1, 2, 2))), DTypeError, "got ndarray"),
        (lambda: layer.BatchNorm2d()(np.ones((2, 2))), DTypeError, "got ndarray"),
        (lambda: layer.MaxPool2d(3, pad_mode="SAME_UPPER")(Tensor((3, 3))), ShapeError, "N, C, H, W"),
        (lambda: layer.Linear(4)(Tensor((3, 2), dtype="int32")), DTypeError, "needs a float Tensor"),
        (lambda: layer.Gemm(0), OptionError, "nb_kernels = 0"),
        (lambda: layer.Gemm(2, alpha="a"), OptionError, "alpha = 'a'"),
        (lambda: layer.Gemm(2)(Tensor((2, 3, 4))), ShapeError, "must be a matrix"),
        (lambda: layer.Embedding(0, 2), OptionError, "input_dim = 0"),
        (lambda: layer.Embedding(2, 2, "ones"), OptionError, "initializer = 'ones'"),
        (lambda: layer.Embedding(2, 2)(np.ones(3, "i")), DTypeError, "needs a Tensor of ids"),
        (lambda: layer.Embedding(2, 2)(Tensor((3,))), DTypeError, "int32 or int64"),
        (lambda: layer.Embedding(2, 2).from_pretrained(np.ones((2, 3))), ShapeError, r"must be \(2, 2\)"),
        (lambda: layer.Embedding(1, 3).from_pretrained([[1.0, 2, 3]]), DTypeError, "not list"),
        (lambda: layer.Embedding(1, 3).from_pretrained(None), DTypeError, "not NoneType"),
        (lambda: layer.Embedding(1, 3).from_pretrained(np.ones((1, 3)), np.ones(3)), OptionError, "freeze"),
        (lambda: layer.Embedding(1, 3).from_pretrained("abc"), DTypeError, "not str"),
        (lambda: layer.Embedding(1, 3).from_pretrained(np.array([["a"] * 3])), DTypeError, "not <U1"),
        (lambda: layer.Embedding(1, 3).from_pretrained(np.ones((1, 3), "c16")), DTypeError, "not complex128"),
        (lambda: layer.Gemm(3, bias_shape=3), OptionError, "bias_shape = 3 must be a list"),
        (lambda: layer.LayerNorm(0), OptionError, "shape = 0"),
        (lambda: layer.LayerNorm(eps=0), OptionError, "eps = 0"),
        (lambda: layer.LayerNorm((2, 3))(Tensor((3,))), ShapeError, "too few axes"),
        (lambda: layer.LayerNorm((2, 3))(Tensor((3, 3))), ShapeError, "expected 2 features"),
        (lambda: layer.SeparableConv2d(4, 6, 3, 1, 0, 1), OptionError, "at most kernel_size"),
        (lambda: layer.SeparableConv2d(4, 2)(Tensor((3, 4, 4))), ShapeError, r"x must be \(N, C, H, W\)"),
        (lambda: layer.MultiHeadAttention(0), OptionError, "num_heads = 0"),
        (
            lambda: layer.MultiHeadAttention(3)(Tensor((2, 3, 4))),
            ShapeError,
            "must be divisible by num_heads = 3",
        ),
        (lambda: layer.MultiHeadAttention(2)(Tensor((3, 4))), ShapeError, "batch, length, width"),
        (
            lambda: layer.MultiHeadAttention(2, True)(Tensor((2, 3, 4)), Tensor((2, 3, 4))),
            OptionError,
            "leave memory out",
        ),
    ],
)
def test_bad_options_and_inputs_raise_typed_errors(
    make: Callable[[], object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make()


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_same_padding_gives_size_over_stride_rounded_up(data: st.DataObject) -> None:
    size, (stride, dilation) = (
        data.draw(st.tuples(st.integers(1, top), st.integers(1, 12))) for top in (12, 3)
    )
    dilation, kernel_size = min(dilation, 2), data.draw(st.integers(1, 5))
    mode = data.draw(st.sampled_from(["SAME_UPPER", "SAME_LOWER"]))
    x = Tensor((1, 1, *size)).set_value(1.0)
    expected = tuple(-(-n // stride) for n in size)
    conv = layer.Conv2d(1, kernel_size, stride=stride, dilation=dilation, pad_mode=mode)
    assert conv(x).shape[2:] == expected
    y = layer.MaxPool2d(kernel_size, stride, pad_mode=mode)(x)
    assert y.shape[2:] == expected
    assert (to_numpy(y) == 1).all()  # padding never wins


def same_padded(x: np.ndarray, reach: int, stride: int, mode: str, value: float) -> np.ndarray:
    """x in the frame of SAME_*, the longer side last for SAME_UPPER."""
    pads = [(0, 0), (0, 0)]
    for n in x.shape[2:]:
        total = max((-(-n // stride) - 1) * stride + reach - n, 0)
        short, long = total // 2, total - total // 2
        pads.append((short, long) if mode == "SAME_UPPER" else (long, short))
    return np.pad(x, pads, constant_values=value)


@pytest.mark.parametrize("mode", ["SAME_UPPER", "SAME_LOWER"])
@pytest.mark.parametrize(("kernel_size", "stride", "size"), [(3, 2, (8, 7)), (2, 2, (7, 7)), (2, 1, (5, 4))])
def test_uneven_same_padding_is_that_of_an_image_padded_by_hand(
    kernel_size: int, stride: int, size: tuple[int, int], mode: str
) -> None:
    image = normal(2, 3, *size)
    x = Tensor(data=image, dtype="float64", stores_grad=True)
    conv = layer.Conv2d(4, kernel_size, stride=stride, pad_mode=mode)
    made = [
        (layer.MaxPool2d(kernel_size, stride, pad_mode=mode), layer.MaxPool2d(kernel_size, stride), -np.inf),
        (layer.AvgPool2d(kernel_size, stride, pad_mode=mode), layer.AvgPool2d(kernel_size, stride), 0.0),
        (conv, layer.Conv2d(4, kernel_size, stride=stride), 0.0),
    ]
    for automatic, by_hand, value in made:
        padded = Tensor(data=same_padded(image, kernel_size, stride, mode, value), dtype="float64")
        y = automatic(x)
        expected = by_hand(padded)
        if automatic is conv:
            by_hand.set_params(conv.get_params())
            expected = by_hand(padded)
        np.testing.assert_array_equal(to_numpy(y), to_numpy(expected))
        direction = normal(*y.shape)
        grad = to_numpy(autograd.gradients(y, Tensor(data=direction, dtype="float64"))[x])
        for cell in [(0, 0, 0, 0), (1, 2, size[0] - 1, size[1] - 1), (0, 1, size[0] - 1, 0), (1, 0, 2, 3)]:
            ends = []
            for step in (1e-6, -1e-6):
                moved = image.copy()
                moved[cell] += step
                ends.append((to_numpy(automatic(Tensor(data=moved, dtype="float64"))) * direction).sum())
            np.testing.assert_allclose(grad[cell], (ends[0] - ends[1]) / 2e-6, rtol=1e-6, atol=1e-7)


def test_one_dimensional_pooling_takes_three_axes_or_singas_four() -> None:
    rows = normal(2, 3, 7)
    x = Tensor(data=rows, dtype="float64")
    windows = np.stack([rows[:, :, i : i + 3] for i in (0, 2, 4)], 2)
    for made, expected in (
        (layer.MaxPool1d(3, 2), windows.max(-1)),
        (layer.AvgPool1d(3, 2), windows.mean(-1)),
    ):
        np.testing.assert_allclose(to_numpy(made(x)), expected, rtol=1e-12)
        four = made(x.reshape((2, 3, 1, 7)))
        np.testing.assert_allclose(to_numpy(four), expected[:, :, None], rtol=1e-12)


def test_dtype_and_device_checks_name_the_layer() -> None:
    made, narrow, wide = layer.Add(), Tensor((2,)), Tensor((2,), dtype="float64")
    made.dtype_check(narrow, narrow)
    made.device_check(narrow, wide)
    with pytest.raises(DTypeError, match="Add: inputs must share one dtype, got float32, float64"):
        made.dtype_check(narrow, wide)
    wide.device = Device("cpu", 7, wide.device.backend)
    with pytest.raises(DeviceError, match="Add: inputs must be on one device"):
        made.device_check(narrow, wide)


def test_weights_start_with_the_variance_of_their_fans() -> None:
    linear, conv = layer.Linear(300), layer.Conv2d(60, 5)
    linear(Tensor((1, 200)))
    conv(Tensor((1, 40, 5, 5)))
    assert to_numpy(linear.W).var() == pytest.approx(2 / 500, rel=0.05)
    assert to_numpy(conv.W).var() == pytest.approx(2 / (40 * 25 + 60), rel=0.05)
    assert not to_numpy(linear.b).any() and not to_numpy(conv.b).any()


def test_an_argument_may_be_given_twice_as_the_same_value() -> None:
    assert layer.Conv2d(3, 8, 3, 2, stride=2).stride == (2, 2)
    assert layer.SeparableConv2d(3, 8, 3, 1, 2, padding=2).padding == (2, 2)
    assert not layer.Linear(3, 8, False, bias=False).bias
    assert layer.BatchNorm2d(3, 0.5, momentum=0.5).momentum == 0.5


def test_relu_of_a_convolution_is_applied() -> None:
    conv = layer.Conv2d(8, 3, activation="RELU")
    assert to_numpy(conv(Tensor(data=IMAGE))).min() == 0


def test_batch_norm_trains_with_one_image_and_evaluates_one_value() -> None:
    norm, rng = layer.BatchNorm2d(), np.random.default_rng(0)
    image = rng.standard_normal((1, 2, 3, 3)).astype(np.float32)
    autograd.training = True
    try:
        y = to_numpy(norm(from_numpy(image)))
    finally:
        autograd.training = False
    each = image.astype(np.float64)
    mean, var = each.mean((0, 2, 3), keepdims=True), each.var((0, 2, 3), keepdims=True)
    np.testing.assert_allclose(y, (each - mean) / np.sqrt(var + 1e-5), rtol=1e-5, atol=1e-6)
    assert norm(from_numpy(image[:, :, 0, 0])).shape == (1, 2)


@pytest.mark.parametrize(
    "make", [lambda: layer.BatchNorm2d(momentum=0.25), lambda: layer.BatchNorm2d(4, 0.25)]
)
def test_batch_norm_uses_its_momentum(make: Callable[[], layer.BatchNorm2d]) -> None:
    norm = make()
    norm(Tensor(data=IMAGE, dtype="float64"))
    np.testing.assert_allclose(to_numpy(norm.running_mean), 0.25 * IMAGE.mean((0, 2, 3)), rtol=1e-12)


def test_dropout_layer_uses_its_ratio() -> None:
    """SINGA's hands the ratio over as the seed and always drops half."""
    y = to_numpy(layer.Dropout(0.1)(Tensor((100, 100)).set_value(1.0)))
    assert abs((y == 0).mean() - 0.1) < 0.02


def test_a_pretrained_embedding_keeps_its_rows_unless_it_is_to_learn() -> None:
    rows = normal(4, 3)
    for freeze in (True, False):
        embedding = layer.Embedding(4, 3)
        embedding.from_pretrained(rows, freeze=freeze)
        ids = Tensor(data=[2, 0])
        y = embedding(ids)
        np.testing.assert_array_equal(to_numpy(y), rows[[2, 0]].astype("f"))
        head = layer.Linear(1)
        grads = autograd.gradients(head(y), Tensor(data=np.ones((2, 1), "f")))
        assert (embedding.W in grads) != freeze and head.W in grads
        embedding.from_pretrained(Tensor(data=np.ones((4, 3)), dtype="bfloat16"), freeze=freeze)
        np.testing.assert_array_equal(to_numpy(embedding(ids)), np.ones((2, 3), "f"))
        embedding.from_pretrained(-rows, freeze=freeze)
        np.testing.assert_array_equal(to_numpy(embedding(ids)), -rows[[2, 0]].astype("f"))


@pytest.mark.parametrize(
    ("make", "bad", "good"),
    [
        (lambda: layer.MultiHeadAttention(2), ((2, 3, 4), (2, 3)), ((2, 3, 4),)),
        (lambda: layer.MultiHeadAttention(2), ((2, 3, 4), (5, 3, 6)), ((2, 3, 4), (2, 5, 6))),
        (lambda: layer.MultiHeadAttention(2, causal=True), ((2, 3, 4), (2, 3, 4)), ((2, 3, 4),)),
        (lambda: layer.Conv2d(3, 5), ((1, 2, 4, 4),), ((1, 7, 6, 6),)),
    ],
)
def test_a_first_call_that_fails_leaves_the_layer_as_it_was(
    make: Callable[[], Layer], bad: tuple, good: tuple
) -> None:
    made = make()
    before = dict(vars(made))
    with pytest.raises((ShapeError, OptionError)):
        made(*map(Tensor, bad))
    assert vars(made) == before and not made.get_params()
    assert made(*map(Tensor, good)).shape[0] == good[0][0]
    assert made.get_params()


def test_attention_to_another_sequence_and_to_itself_are_two_layers() -> None:
    made, x = layer.MultiHeadAttention(2), Tensor((2, 3, 4))
    made(x)
    with pytest.raises(OptionError, match="2 inputs, but the first call had 1"):
        made(x, x)


@pytest.mark.parametrize("causal", [False, True])
def test_multi_head_attention_is_what_its_parameters_say(causal: bool) -> None:
    x, made = normal(2, 5, 4), layer.MultiHeadAttention(2, causal)
    y = to_numpy(made(Tensor(data=x, dtype="float64")))
    params = {name: to_numpy(param) for name, param in made.get_params().items()}
    q, k, v = np.split(x @ params["projection.W"] + params["projection.b"], 3, 2)
    heads = []
    for columns in (slice(0, 2), slice(2, 4)):
        scores = q[..., columns] @ k[..., columns].swapaxes(1, 2) / np.sqrt(2)
        powers = np.exp(scores) * (np.tri(5) if causal else 1)
        heads.append(powers / powers.sum(2, keepdims=True) @ v[..., columns])
    expected = np.concatenate(heads, 2) @ params["output.W"] + params["output.b"]
    np.testing.assert_allclose(y, expected, rtol=1e-10, atol=1e-12)


def test_gemm_and_separable_convolution_use_their_options() -> None:
    rows, gemm = normal(5, 3), layer.Gemm(4, 0.5, 2, transA=True, transB=False, bias_shape=(3, 1))
    x = Tensor(data=rows, dtype="float64")
    gemm(x)
    gemm.set_params({"W": normal(5, 4), "b": normal(3, 1)})
    expected = 0.5 * rows.T @ to_numpy(gemm.W) + 2 * to_numpy(gemm.b)
    np.testing.assert_allclose(to_numpy(gemm(x)), expected, rtol=1e-12)
    image = Tensor(data=IMAGE, dtype="float64")
    separable = layer.SeparableConv2d(6, 3, stride=2, padding=1, bias=True)
    y = separable(image)
    options = {"stride": 2, "padding": 1, "group": 4}
    inner = autograd.conv2d(image, separable.depthwise_conv.W, separable.depthwise_conv.b, **options)
    outer = autograd.conv2d(inner, separable.point_conv.W, separable.point_conv.b)
    np.testing.assert_allclose(to_numpy(y), to_numpy(outer), rtol=1e-12)
