# SPDX-License-Identifier: Apache-2.0
"""Activations, and the element-by-element functions of one tensor."""

from __future__ import annotations

from collections.abc import Callable

from ...errors import ShapeError, check_choice, check_number
from ...tensor import Tensor, as_axis
from ...tensor.checks import convert_number
from ..engine import Array, Context, Operator, Recomputed
from ._common import Elementwise, SavesOutput, check_floats, check_tensors, like, scaled

__all__ = [
    "abs",
    "clip",
    "elu",
    "exp",
    "gelu",
    "leakyrelu",
    "log",
    "negative",
    "relu",
    "sigmoid",
    "softmax",
    "sqrt",
    "tanh",
]


class ReLU(SavesOutput):
    kernel = "relu"

    def _recomputation(
        self, context: Context, inputs: list[Array | Recomputed]
    ) -> Callable[[], Array] | None:
        [source], backend = inputs, context.backend
        if not isinstance(source, Recomputed):
            return None

        def compute() -> Array:
            x = source.compute()  # not what is kept for others: read by this kernel alone, both become one
            y = backend.empty(x.shape, x.dtype)
            backend.run("relu", x, out=y)
            return y

        return compute


def relu(x: Tensor) -> Tensor:
    """max(x, 0), element by element; the gradient at 0 is 0.

    Args:
        x: float tensor of any shape.

    Returns:
        Same shape and dtype as ``x``.
    """
    return ReLU()(x)  # type: ignore[no-any-return]


class Sigmoid(Elementwise):
    kernel = "sigmoid"


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)), element by element.

    Result and gradient keep their relative accuracy for every x: sigmoid(-20) is 2.1e-9, and so is the gradient at 20.

    Args:
        x: float tensor of any shape.

    Returns:
        Same shape and dtype as ``x``.
    """
    return Sigmoid()(x)  # type: ignore[no-any-return]


class Tanh(SavesOutput):
    kernel = "tanh"


def tanh(x: Tensor) -> Tensor:
    """Return the hyperbolic tangent, element by element.

    Args:
        x: float tensor of any shape.

    Returns:
        Same shape and dtype as ``x``.
    """
    return Tanh()(x)  # type: ignore[no-any-return]


class LeakyReLU(Elementwise):
    kernel = "leakyrelu"


def leakyrelu(x: Tensor, a: float = 0.01) -> Tensor:
    """Return x where it is positive, else a x; the gradient at 0 is a.

    Args:
        x: float tensor of any shape.
        a: the factor of values below 0.

    Returns:
        Same shape and dtype as ``x``.

    Raises:
        OptionError: ``a`` is not a number.
    """
    return LeakyReLU(alpha=check_number("leakyrelu", "a", a))(x)  # type: ignore[no-any-return]


class Elu(Elementwise):
    kernel = "elu"


def elu(x: Tensor, alpha: float = 1.0) -> Tensor:
    """Return x where it is positive, else alpha (e^x - 1); the gradient at 0 is alpha.

    Args:
        x: float tensor of any shape.
        alpha: minus the limit far below 0.

    Returns:
        Same shape and dtype as ``x``.

    Raises:
        OptionError: ``alpha`` is not a number.

    Source: Clevert, Unterthiner, Hochreiter, "Fast and Accurate Deep Network Learning by ELUs", 2015.
    """
    return Elu(alpha=check_number("elu", "alpha", alpha))(x)  # type: ignore[no-any-return]


class Gelu(Elementwise):
    kernel = "gelu"


class GeluTanh(Elementwise):
    kernel = "gelu_tanh"


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """Return x times the probability that a standard normal variable is less than x.

    y = x (1 + erf(x / sqrt(2))) / 2, or with "tanh" x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2, which differs
    from it by at most 5e-4. Name and options are PyTorch's.

    Args:
        x: float tensor of any shape.
        approximate: "none" or "tanh".

    Returns:
        Same shape and dtype as ``x``.

    Raises:
        OptionError: another ``approximate``.

    Source: Hendrycks, Gimpel, "Gaussian Error Linear Units", 2016.
    """
    check_choice("gelu", "approximate", approximate, ("none", "tanh"))
    return (Gelu() if approximate == "none" else GeluTanh())(x)  # type: ignore[no-any-return]


class SoftMax(Operator):
    autocast = "float32"

    def __init__(self, axis: int = 1) -> None:
        self.axis = axis

    def check(self, *inputs: Tensor) -> None:
        check_floats("softmax", *inputs)
        if inputs[0].shape[as_axis("softmax", self.axis, inputs[0].ndim())] == 0:
            raise ShapeError(f"softmax: axis {self.axis} of shape {inputs[0].shape} is empty")

    def forward(self, context: Context, *inputs: Array) -> Array:
        y = like(context, "softmax", inputs[0], axis=self.axis)
        context.save(y)
        return y

    def backward(self, context: Context, *dys: Array) -> Array:
        return like(context, "softmax_backward", dys[0], *context.saved, axis=self.axis)


def softmax(x: Tensor, axis: int = 1) -> Tensor:
    """exp(x) / sum(exp(x)) along one axis, computed from x - max(x).

    Args:
        x: float tensor.
        axis: where the results sum to one; negative counts from the end.

    Returns:
        Same shape and dtype as ``x``.

    Raises:
        ShapeError: x has no such axis.
    """
    return SoftMax(axis)(x)  # type: ignore[no-any-return]


class Exp(SavesOutput):
    kernel = "exp"

    def backward(self, context: Context, *dys: Array) -> Array:
        return like(context, "mul", dys[0], *context.saved)


def exp(a: Tensor) -> Tensor:
    """Return e ** a, element by element; beyond the range of the dtype it is inf.

    Args:
        a: float tensor of any shape.

    Returns:
        Same shape and dtype as ``a``.
    """
    return Exp()(a)  # type: ignore[no-any-return]


class Log(Elementwise):
    kernel = "log"

    def backward(self, context: Context, *dys: Array) -> Array:
        return like(context, "div", dys[0], *context.saved)


def log(x: Tensor) -> Tensor:
    """Return the natural logarithm, element by element: -inf at 0, NaN below.

    Args:
        x: float tensor of any shape.

    Returns:
        Same shape and dtype as ``x``.
    """
    return Log()(x)  # type: ignore[no-any-return]


class Sqrt(SavesOutput):
    kernel = "sqrt"

    def backward(self, context: Context, *dys: Array) -> Array:
        return scaled(context, like(context, "div", dys[0], *context.saved), 0.5)


def sqrt(x: Tensor) -> Tensor:
    """Return the square root, element by element: NaN below 0; the gradient at 0 is inf.

    Args:
        x: float tensor of any shape.

    Returns:
        Same shape and dtype as ``x``.
    """
    return Sqrt()(x)  # type: ignore[no-any-return]


class Abs(Operator):
    autocast = "keep"

    def check(self, *inputs: Tensor) -> None:
        check_tensors("abs", *inputs)

    def forward(self, context: Context, *inputs: Array) -> Array:
        context.save(inputs[0])
        return like(context, "abs", inputs[0])

    def backward(self, context: Context, *dys: Array) -> Array:
        return like(context, "mul", dys[0], like(context, "sign", *context.saved))


def abs(a: Tensor) -> Tensor:
    """Return the absolute value, element by element; the gradient at 0 is 0.

    Args:
        a: tensor of any shape and dtype.

    Returns:
        Same shape and dtype as ``a``.
    """
    return Abs()(a)  # type: ignore[no-any-return]


class Negative(Operator):
    autocast = "keep"

    def check(self, *inputs: Tensor) -> None:
        check_tensors("negative", *inputs)

    def forward(self, context: Context, *inputs: Array) -> Array:
        return like(context, "negative", inputs[0])

    def backward(self, context: Context, *dys: Array) -> Array:
        return like(context, "negative", dys[0])


def negative(x: Tensor) -> Tensor:
    """-x, element by element.

    Args:
        x: tensor of any shape and dtype.

    Returns:
        Same shape and dtype as ``x``.
    """
    return Negative()(x)  # type: ignore[no-any-return]


class Clip(Operator):
    autocast = "keep"

    def __init__(self, min: float | None, max: float | None) -> None:
        given = {"min": min, "max": max}
        for name, limit in given.items():
            if limit is not None:
                check_number("clip", name, limit)
        self.limits = given

    def check(self, *inputs: Tensor) -> None:
        check_tensors("clip", *inputs)
        for limit in self.limits.values() if inputs[0].dtype.kind == "i" else ():
            if limit is not None:
                convert_number("clip", limit, inputs[0].dtype)

    def forward(self, context: Context, *inputs: Array) -> Array:
        (x,) = inputs
        context.save(x)
        kind = int if x.dtype.kind == "i" else float
        self.limits = {name: None if limit is None else kind(limit) for name, limit in self.limits.items()}
        return like(context, "clip", x, **self.limits)

    def backward(self, context: Context, *dys: Array) -> Array:
        return like(context, "clip_backward", dys[0], *context.saved, **self.limits)


def clip(x: Tensor, min: float | None = None, max: float | None = None) -> Tensor:
    """Return x limited to min .. max; the gradient passes where min <= x <= max.

    Args:
        x: tensor of any shape and dtype.
        min: lower limit; None: no limit.
        max: upper limit; None: no limit. Below ``min`` every element becomes ``max``.

    Returns:
        Same shape and dtype as ``x``.

    Raises:
        OptionError: a limit is not a number. DTypeError: ``x`` holds integers, and its dtype does not hold a limit.
    """
    return Clip(min, max)(x)  # type: ignore[no-any-return]
