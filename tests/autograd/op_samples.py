# SPDX-License-Identifier: Apache-2.0
"""One table: for each public operator calls with float64 inputs and numpy's results.

A new operator needs a row here; test_every_op.py does the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from singa_lite import autograd
from singa_lite.device import get_default_device
from singa_lite.tensor import Tensor, to_numpy
from tests.recurrent_reference import recurrent_by_hand

SEED = 11
RNG = np.random.default_rng(8)
OWN_DTYPE = "that of the inputs"  # as a value of attributes


@dataclass
class Sample:
    """One call of ``autograd.<op>``.

    Attributes:
        op: the public name.
        inputs: float64 arrays, differentiated; integer arrays are passed on as they are.
        reference: the float64 result from the same arrays.
        attributes: keyword arguments.
        fixed: float64 arrays that follow the inputs and take no gradient.
        takes_list: whether the op takes its inputs as one list.
        output: which output of several counts.
        num_narrow: so many inputs become float16 on request; the others are then float32. None: all.
        has_gradient: whether float inputs have one.
    """

    op: str
    inputs: tuple[np.ndarray, ...]
    reference: Callable[..., np.ndarray]
    attributes: dict[str, Any] = field(default_factory=dict)
    fixed: tuple[np.ndarray, ...] = ()
    takes_list: bool = False
    output: int | None = None
    num_narrow: int | None = None
    has_gradient: bool = True

    def dtype_of(self, index: int, dtype: str) -> str:
        """The dtype of the float input ``index`` (``fixed`` ones follow) for a call in ``dtype``."""
        is_narrow = self.num_narrow is None or index < self.num_narrow
        return dtype if is_narrow or dtype != "float16" else "float32"

    def attributes_for(self, *tensors: Tensor) -> dict[str, Any]:
        """Return the keyword arguments of a call with ``tensors``."""
        return {key: tensors[0].dtype if v is OWN_DTYPE else v for key, v in self.attributes.items()}

    def call(self, *tensors: Tensor) -> Tensor:
        """Run the op on tensors with the values of ``inputs``, from a fixed random state."""
        get_default_device().SetRandSeed(SEED)
        function = getattr(autograd, self.op)
        attributes = self.attributes_for(*tensors)
        extra = [
            Tensor(data=array, dtype=self.dtype_of(index, str(tensors[0].dtype)), device=tensors[0].device)
            for index, array in enumerate(self.fixed, len(self.inputs))
        ]
        if self.takes_list:
            result: Tensor = function(list(tensors), **attributes)
        else:
            result = function(*tensors, *extra, **attributes)
        return result if self.output is None else result[self.output]


def apart(*shape: int) -> np.ndarray:
    """Distinct values at least 0.05 apart and 0.025 from 0 and +-0.5: no finite difference crosses a kink."""
    count = int(np.prod(shape))
    values = (np.arange(count) - count // 2) * 0.05 + 0.025
    return RNG.permutation(values).reshape(shape)


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape)


def positive(*shape: int) -> np.ndarray:
    return RNG.uniform(0.5, 2.0, shape)


def softmax(x: np.ndarray, axis: int = 1) -> np.ndarray:
    powers = np.exp(x - x.max(axis, keepdims=True))
    return powers / powers.sum(axis, keepdims=True)


def normal_cdf(x: np.ndarray) -> np.ndarray:
    return np.array([math.erfc(-v / math.sqrt(2)) / 2 for v in x.flat]).reshape(x.shape)


def loss_of(p: np.ndarray, t: np.ndarray) -> np.ndarray:
    rows = np.eye(p.shape[1])[t] if t.ndim == 1 else t / t.sum(1, keepdims=True)
    return np.array([-(rows * np.log(p)).sum() / len(p)])


def conv(
    x: np.ndarray,
    w: np.ndarray,
    b: np.ndarray | None = None,
    *,
    stride: tuple = (1, 1),
    padding: tuple = (0, 0),
    dilation: tuple = (1, 1),
    group: int = 1,
) -> np.ndarray:
    """Convolution, one window at a time."""
    x = np.pad(x, ((0, 0), (0, 0), (padding[0],) * 2, (padding[1],) * 2))
    reach = [d * (k - 1) + 1 for d, k in zip(dilation, w.shape[2:], strict=True)]
    size = [(n - r) // s + 1 for n, r, s in zip(x.shape[2:], reach, stride, strict=True)]
    y = np.zeros((x.shape[0], w.shape[0], *size))
    per_group = w.shape[0] // group
    for o in range(w.shape[0]):
        channels = slice(o // per_group * w.shape[1], (o // per_group + 1) * w.shape[1])
        for i, j in np.ndindex(*size):
            top, left = i * stride[0], j * stride[1]
            window = x[:, channels, top : top + reach[0] : dilation[0], left : left + reach[1] : dilation[1]]
            y[:, o, i, j] = (window * w[o]).sum((1, 2, 3)) + (0 if b is None else b[o])
    return y


def pool(
    x: np.ndarray, *, kernel: tuple, stride: tuple, padding: tuple = (0, 0), how: Callable[..., Any]
) -> np.ndarray:
    """Pooling, one window at a time; ``how`` gets the elements inside the image."""
    size = [(n + 2 * p - k) // s + 1 for n, k, s, p in zip(x.shape[2:], kernel, stride, padding, strict=True)]
    y = np.zeros((*x.shape[:2], *size))
    for i, j in np.ndindex(*size):
        top, left = i * stride[0] - padding[0], j * stride[1] - padding[1]
        window = x[:, :, max(top, 0) : top + kernel[0], max(left, 0) : left + kernel[1]]
        y[:, :, i, j] = how(window.reshape(*x.shape[:2], -1))
    return y


def batchnorm(x: np.ndarray, scale: np.ndarray, bias: np.ndarray, *_: np.ndarray) -> np.ndarray:
    axes = (0, *range(2, x.ndim))
    column = (1, -1) + (1,) * (x.ndim - 2)
    normal_x = (x - x.mean(axes, keepdims=True)) / np.sqrt(x.var(axes, keepdims=True) + 1e-3)
    return normal_x * scale.reshape(column) + bias.reshape(column)


def layernorm(x: np.ndarray, scale: np.ndarray, bias: np.ndarray) -> np.ndarray:
    axes = tuple(range(x.ndim - scale.ndim, x.ndim))
    return (x - x.mean(axes, keepdims=True)) / np.sqrt(x.var(axes, keepdims=True) + 1e-3) * scale + bias


def attention(*packed: np.ndarray, num_heads: int, causal: bool = False) -> np.ndarray:
    """One sample, head and query at a time; packed: (qkv,) or (q, kv)."""
    projections = np.split(packed[0], 3, 2) if len(packed) == 1 else [packed[0], *np.split(packed[1], 2, 2)]
    q, k, v = (np.split(projection, num_heads, 2) for projection in projections)
    y = np.zeros_like(projections[0])
    heads = np.split(y, num_heads, 2)  # views
    for head, sample, query in np.ndindex(num_heads, *y.shape[:2]):
        seen = query + 1 if causal else None
        scores = k[head][sample, :seen] @ q[head][sample, query] / np.sqrt(y.shape[2] / num_heads)
        heads[head][sample, query] = softmax(scores, 0) @ v[head][sample, :seen]
    return y


def kept_by_dropout(x: np.ndarray) -> np.ndarray:
    """What a dropout of 0.3 does to ``x``, read off the same mask applied to ones."""
    ones = Sample("dropout", (), lambda: np.ones(0), {"ratio": 0.3}).call(Tensor(data=np.ones(x.shape, "f")))
    return x * (to_numpy(ones) > 0) / 0.7


def recurrent_samples(mode: str, *, size: int = 2, hidden: int = 3, **options: Any) -> list[Sample]:
    """One sample an output; three steps of two sequences."""
    gates = {"tanh": 1, "relu": 1, "lstm": 4, "gru": 3}[mode]
    layers, directions = options.get("num_layers", 1), 2 if options.get("bidirectional") else 1
    columns = [size, *[directions * hidden] * (layers - 1)]
    biases = 2 if options.get("bias", True) else 0
    count = sum(directions * gates * hidden * (n + hidden + biases) for n in columns)
    states = [normal(layers * directions, 2, hidden) for _ in range(2 if mode == "lstm" else 1)]
    inputs = (normal(3, 2, size), 0.7 * normal(count), *states)
    options = {"mode": mode, "hidden_size": hidden, **options}
    return [
        Sample(
            "recurrent",
            inputs,
            lambda *arrays, number=number: recurrent_by_hand(*arrays, **options)[number],
            options,
            output=number,
        )
        for number in range(1 + len(states))
    ]


IDS = np.array([2, 0, 1, 2], np.int32)
COUNTS = np.array([[1, 0, 3], [0, 2, 0], [1, 1, 1], [5, 0, 5]], np.int32)
IMAGE = apart(2, 4, 6, 5)

SAMPLES = [
    Sample("cast", (normal(3, 4),), lambda x: x, {"to": OWN_DTYPE}),
    Sample("relu", (apart(3, 4),), lambda x: np.maximum(x, 0)),
    Sample("sigmoid", (normal(3, 4),), lambda x: 1 / (1 + np.exp(-x))),
    Sample("tanh", (normal(3, 4),), np.tanh),
    Sample("leakyrelu", (apart(3, 4),), lambda x: np.where(x > 0, x, 0.01 * x)),
    Sample("leakyrelu", (apart(3, 4),), lambda x: np.where(x > 0, x, 0.3 * x), {"a": 0.3}),
    Sample("elu", (apart(3, 4),), lambda x: np.where(x > 0, x, np.exp(x) - 1)),
    Sample("elu", (apart(3, 4),), lambda x: np.where(x > 0, x, 1.5 * (np.exp(x) - 1)), {"alpha": 1.5}),
    Sample("gelu", (2 * normal(3, 4),), lambda x: x * normal_cdf(x)),
    Sample(
        "gelu",
        (2 * normal(3, 4),),
        lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
        {"approximate": "tanh"},
    ),
    Sample("softmax", (normal(3, 4),), softmax),
    Sample("softmax", (normal(2, 3, 4),), lambda x: softmax(x, -1), {"axis": -1}),
    Sample("exp", (normal(5),), np.exp),
    Sample("log", (positive(5),), np.log),
    Sample("sqrt", (positive(5),), np.sqrt),
    Sample("abs", (apart(5),), np.abs),
    Sample("negative", (normal(5),), np.negative),
    Sample("clip", (apart(30),), lambda x: np.clip(x, -0.5, 0.5), {"min": -0.5, "max": 0.5}),
    Sample("clip", (apart(30),), lambda x: np.maximum(x, -0.5), {"min": -0.5}),
    Sample("add", (normal(2, 3), normal(2, 3)), np.add),
    Sample("add", (normal(2, 3), normal(4, 1, 3)), np.add),
    Sample("sub", (normal(1, 3), normal(2, 1)), np.subtract),
    Sample("mul", (normal(2, 3), normal()), np.multiply),
    Sample("div", (normal(3), positive(2, 1)), np.divide),
    Sample("pow", (positive(3), normal(2, 1)), np.power),
    Sample("pow", (normal(2, 3),), np.square, {"b": 2}),
    Sample("pow", (normal(2, 3),), lambda x: x * x * x, {"b": 3}),
    Sample("sum", (normal(2, 3), normal(2, 3), normal(2, 3)), lambda *xs: xs[0] + xs[1] + xs[2]),
    Sample("mean", (normal(2, 3), normal(2, 3), normal(2, 3)), lambda *xs: (xs[0] + xs[1] + xs[2]) / 3),
    Sample("max", (apart(3, 4), apart(3, 4) + 0.01), np.maximum),
    Sample(
        "max",
        (apart(3, 4), apart(4) + 0.01, apart(3, 1) - 0.02),
        lambda a, b, c: np.maximum(np.maximum(a, b), c),
    ),
    Sample("min", (apart(3, 4), apart(3, 4) + 0.01), np.minimum),
    Sample("min", (apart(4) + 0.01, apart(3, 4)), np.minimum),
    *[
        Sample(op, (np.array([1.0, 2, 3, 4]), np.array([[2.0], [3]])), reference, has_gradient=False)
        for op, reference in {
            "less": np.less,
            "less_equal": np.less_equal,
            "greater": np.greater,
            "greater_equal": np.greater_equal,
            "equal": np.equal,
        }.items()
    ],
    Sample(
        "where",
        (normal(2, 3), normal(2, 3), np.array([[1, 0, 2], [0, 0, -1]])),
        lambda x, y, c: np.where(c, x, y),
    ),
    Sample(
        "where", (normal(3), normal(2, 1), np.array([1, 0, 1], np.int32)), lambda x, y, c: np.where(c, x, y)
    ),
    Sample("gather", (normal(4, 5),), lambda x: x[[2, 0, 2]], {"axis": 0, "indices": [2, 0, -2]}),
    Sample(
        "gather",
        (normal(2, 3, 4),),
        lambda x: x[:, [[0, 2], [2, 2]]],
        {"axis": -2, "indices": np.array([[0, 2], [2, -1]], np.int32)},
    ),
    Sample("embedding", (np.array([[2, 0], [1, 2], [2, 2]], np.int32), normal(4, 3)), lambda x, w: w[x]),
    Sample("gemm", (normal(3, 4), normal(4, 2)), np.matmul),
    Sample(
        "gemm",
        (normal(4, 3), normal(4, 2), normal(2)),
        lambda a, b, c: 0.5 * a.T @ b + 2 * c,
        {"alpha": 0.5, "beta": 2.0, "transA": 1},
    ),
    Sample("gemm", (normal(3, 4), normal(2, 4), normal(3, 1)), lambda a, b, c: a @ b.T + c, {"transB": True}),
    Sample(
        "gemm",
        (normal(4, 3), normal(2, 4), normal(3, 2)),
        lambda a, b, c: -a.T @ b.T + c,
        {"alpha": -1, "transA": 1, "transB": 1},
    ),
    Sample("matmul", (normal(3, 4), normal(4, 2)), np.matmul),
    Sample("matmul", (normal(2, 3, 4), normal(2, 4, 5)), np.matmul),
    Sample("matmul", (normal(2, 3, 4), normal(4, 5)), np.matmul),
    Sample("matmul", (normal(3, 1, 2, 4), normal(2, 4, 2)), np.matmul),
    Sample("matmul", (normal(2, 4), normal(3, 4, 2)), np.matmul),
    Sample("add_bias", (normal(3, 4), normal(4)), np.add),
    Sample("add_bias", (normal(2, 3, 4), normal(4)), np.add),
    Sample("add_bias", (normal(3, 4), normal(3)), lambda x, b: x + b[:, None], {"axis": 1}),
    Sample("add_bias", (normal(3, 3), normal(3)), lambda x, b: x + b[:, None], {"axis": 1}),
    Sample("reshape", (normal(2, 6),), lambda x: x.reshape(3, 4), {"shape": (3, -1)}),
    Sample("flatten", (normal(2, 3, 4),), lambda x: x.reshape(2, 12)),
    Sample("flatten", (normal(2, 3, 4),), lambda x: x.reshape(6, 4), {"axis": -1}),
    Sample("flatten", (normal(2, 3),), lambda x: x.reshape(1, 6), {"axis": 0}),
    Sample("transpose", (normal(2, 3, 4),), lambda x: x.transpose(1, 2, 0), {"shape": (1, -1, 0)}),
    Sample("transpose", (normal(2, 3, 4),), lambda x: x.T),
    Sample("slice", (normal(4, 5),), lambda x: x[1:, :3], {"starts": (1, 0), "ends": (9, 3)}),
    Sample(
        "slice",
        (normal(4, 5, 3),),
        lambda x: x[:, ::-2, 2:],
        {"starts": (-1, -1), "ends": (-99, 3), "axes": (1, -1), "steps": (-2, 1)},
    ),
    *[
        Sample(
            "split",
            (normal(2, 6),),
            lambda x, n=n: np.split(x, [1, 3], 1)[n],
            {"axis": -1, "parts": (1, 2, 3)},
            output=n,
        )
        for n in range(3)
    ],
    Sample("split", (normal(4, 2, 3),), lambda x: x[2:], {"axis": 0, "num_output": 2}, output=1),
    Sample("tile", (normal(2, 3),), lambda x: np.tile(x, (2, 1)), {"repeats": 2}),
    Sample("tile", (normal(2, 3),), lambda x: np.tile(x, (3, 1)), {"repeats": (3, 1)}),
    Sample(
        "tile",
        (normal(1, 1, 1, 2, 1, 2),),
        lambda x: np.tile(x, (2, 1, 1, 3, 1, 1)),
        {"repeats": [2, 1, 1, 3]},
    ),
    Sample("tile", (normal(2, 1, 2, 1, 1, 2),), lambda x: np.tile(x, (2,) * 6), {"repeats": (2,) * 6}),
    Sample("tile", (normal(3),), lambda x: np.tile(x, (2, 2, 3)), {"repeats": [2, 2, 3]}),
    Sample("squeeze", (normal(1, 3, 1, 2),), lambda x: x[0, :, 0]),
    Sample("squeeze", (normal(1, 3, 1, 2),), lambda x: x[:, :, 0], {"axis": -2}),
    Sample("unsqueeze", (normal(2, 3),), lambda x: x[..., None]),
    Sample("unsqueeze", (normal(2, 3),), lambda x: x[None, :, None], {"axis": (0, -2)}),
    Sample(
        "cat",
        (normal(2, 3), normal(2, 1), normal(2, 2)),
        lambda *xs: np.concatenate(xs, 1),
        {"axis": -1},
        takes_list=True,
    ),
    Sample(
        "pad",
        (normal(2, 3),),
        lambda x: np.pad(x, ((1, 0), (2, 1)), constant_values=0.5),
        {"mode": "constant", "pads": (1, 2, 0, 1), "constant": 0.5},
    ),
    Sample("reduce_sum", (normal(2, 3, 4),), lambda x: x.sum(keepdims=True)),
    Sample("reduce_sum", (normal(2, 3, 4),), lambda x: x.sum((0, 2)), {"axes": (-1, 0), "keepdims": 0}),
    Sample("reduce_mean", (normal(2, 3, 4),), lambda x: x.mean(keepdims=False), {"keepdims": False}),
    Sample("reduce_mean", (normal(2, 3, 4),), lambda x: x.mean(1, keepdims=True), {"axes": 1}),
    Sample("conv2d", (normal(2, 3, 5, 6), normal(4, 3, 3, 2), normal(4)), conv),
    Sample(
        "conv2d",
        (normal(2, 4, 5, 6), normal(6, 2, 3, 3)),
        lambda x, w: conv(x, w, stride=(2, 1), padding=(1, 2), dilation=(1, 2), group=2),
        {"stride": (2, 1), "padding": (1, 2), "dilation": (1, 2), "group": 2},
    ),
    Sample(
        "conv2d",
        (normal(1, 3, 4, 4), normal(3, 1, 3, 3), normal(3)),
        lambda x, w, b: conv(x, w, b, padding=(1, 1), group=3),
        {"padding": 1, "group": 3},
    ),
    Sample(
        "max_pool_2d",
        (IMAGE,),
        lambda x: pool(x, kernel=(2, 2), stride=(2, 2), how=lambda w: w.max(-1)),
        {"kernel_size": 2},
    ),
    Sample(
        "max_pool_2d",
        (IMAGE,),
        lambda x: pool(x, kernel=(3, 2), stride=(2, 1), padding=(1, 1), how=lambda w: w.max(-1)),
        {"kernel_size": (3, 2), "stride": (2, 1), "padding": 1},
    ),
    Sample(
        "avg_pool_2d",
        (normal(2, 2, 4, 6),),
        lambda x: pool(x, kernel=(2, 3), stride=(2, 3), how=lambda w: w.mean(-1)),
        {"kernel_size": (2, 3)},
    ),
    Sample(
        "avg_pool_2d",
        (normal(2, 2, 5, 5),),
        lambda x: pool(x, kernel=(3, 3), stride=(2, 2), padding=(1, 1), how=lambda w: w.sum(-1) / 9),
        {"kernel_size": 3, "stride": 2, "padding": 1},
    ),
    Sample(
        "avg_pool_2d",
        (normal(2, 2, 5, 5),),
        lambda x: pool(x, kernel=(3, 3), stride=(2, 2), padding=(1, 1), how=lambda w: w.mean(-1)),
        {"kernel_size": 3, "stride": 2, "padding": 1, "count_include_pad": False},
    ),
    *[
        Sample(
            "batchnorm_2d",
            (normal(*shape), positive(3), normal(3)),
            batchnorm,
            {"eps": 1e-3},
            fixed=(normal(3), positive(3)),
            num_narrow=1,
        )
        for shape in ((4, 3, 2, 2), (6, 3))
    ],
    Sample("layer_norm", (normal(3, 4, 5), positive(5), normal(5)), layernorm, {"eps": 1e-3}),
    Sample("layer_norm", (normal(3, 4, 5), positive(4, 5), normal(4, 5)), layernorm, {"eps": 1e-3}),
    *[
        Sample("attention", inputs, partial(attention, **options), options)
        for inputs, options in (
            ((normal(2, 5, 12),), {"num_heads": 2}),
            ((normal(2, 5, 12),), {"num_heads": 1, "causal": True}),
            ((normal(2, 3, 4), normal(2, 5, 8)), {"num_heads": 2}),
        )
    ],
    Sample("dropout", (positive(4, 5),), kept_by_dropout, {"ratio": 0.3}),
    Sample("softmax_cross_entropy", (normal(4, 3), IDS), lambda x, t: loss_of(softmax(x), t)),
    Sample("softmax_cross_entropy", (normal(4, 3), COUNTS), lambda x, t: loss_of(softmax(x), t)),
    Sample("cross_entropy", (positive(4, 3), IDS), loss_of),
    Sample("cross_entropy", (positive(4, 3), COUNTS), loss_of),
    Sample(
        "binary_cross_entropy",
        (RNG.uniform(0.05, 0.95, (4, 3)), np.array([[0, 1, 1], [1, 0, 0], [0, 0, 1], [1, 1, 1]], np.int32)),
        lambda x, t: np.array([-(t * np.log(x) + (1 - t) * np.log(1 - x)).sum() / 4]),
    ),
    Sample("mse_loss", (normal(4, 3), normal(4, 3)), lambda x, t: np.array([((x - t) ** 2).mean()])),
    *[
        Sample(
            "ranking_loss",
            (normal(*shape), normal(*shape)),
            lambda pos, neg, M=margin: np.array([np.maximum(M - pos + neg, 0).mean()]),
            {"M": margin},
        )
        for shape, margin in (((5,), 0.7), ((4, 3), -0.1))
    ],
    Sample(
        "ranking_loss", (normal(6), normal(6)), lambda p, n: np.array([np.maximum(0.2 - p + n, 0).mean()])
    ),
    Sample(
        "cossim",
        (normal(4, 3), normal(4, 3)),
        lambda a, b: (a * b).sum(1) / (np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)),
    ),
    *recurrent_samples("tanh"),
    *recurrent_samples("relu", hidden=2, bias=False),
    *recurrent_samples("lstm"),
    *recurrent_samples("lstm", size=1, hidden=2, num_layers=2, bidirectional=True, bias=False),
    *recurrent_samples("gru"),
    *recurrent_samples("gru", size=3, hidden=1, num_layers=3),
    *recurrent_samples("gru", hidden=2, bidirectional=True, lengths=(2, 3)),
    *recurrent_samples("lstm", hidden=2, num_layers=2, lengths=(3, 1)),
]
