# SPDX-License-Identifier: Apache-2.0
"""Layers made of matrix products: Linear, Gemm, Embedding and MultiHeadAttention."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from .. import autograd, initializer
from ..dtypes import is_float
from ..errors import (
    DTypeError,
    OptionError,
    ShapeError,
    check_bool,
    check_int,
    check_ints,
    check_number,
    is_one_of,
)
from ..tensor import Tensor, float32, to_numpy
from .base import Layer, check_once

__all__ = ["Embedding", "Gemm", "Linear", "MultiHeadAttention"]


class Linear(Layer):
    """y = x W + b.

    ``Linear(out_features)`` takes the input size from its first call; ``Linear(in_features, out_features)``
    checks it. W (in, out) starts as N(0, 2 / (in + out)), b (out,) as zeros.

    Args:
        out_features: columns of the result, >= 1; with a second number the rows of W.
        args: out_features if the first is in_features; then, as in SINGA, bias.
        bias: whether there is b.

    Raises:
        OptionError: a size is not an int >= 1.
        ShapeError: at a call, if x is not (..., in_features), of two axes or more. DTypeError: if it is not of floats.
    """

    W: Tensor
    b: Tensor

    def __init__(self, out_features: int, *args: int, bias: bool = True) -> None:
        super().__init__()
        if len(args) > 2:
            raise OptionError(
                f"Linear: expected (out), (in, out) or (in, out, bias), got {(out_features, *args)}"
            )
        sizes = [check_int("Linear", "size", size, 1) for size in (out_features, *args[:1])]
        self.in_features = sizes[0] if args else None
        self.out_features = sizes[-1]
        if len(args) == 2:
            check_once("Linear", "bias", args[1], bias, True)
        self.bias = check_bool("Linear", "bias", args[1] if len(args) == 2 else bias)

    def initialize(self, x: Tensor) -> None:
        self._check(x)
        self.in_features = x.shape[-1]
        self.W = self.new_parameter("W", (self.in_features, self.out_features), x)
        initializer.gaussian(self.W, self.in_features, self.out_features)
        if self.bias:
            self.b = self.new_parameter("b", (self.out_features,), x)

    def forward(self, x: Tensor) -> Tensor:
        """Map x (..., in_features) to (..., out_features)."""
        self._check(x)
        y = autograd.matmul(x, self.W)
        return autograd.add_bias(y, self.b) if self.bias else y

    def _check(self, x: Tensor) -> None:
        self.check_float(x)
        if x.ndim() < 2:
            raise ShapeError(f"{self!r}: x must be (..., features), but its shape is {x.shape}; use Flatten")
        if self.in_features is not None:
            self.check_size("features", x.shape[-1], self.in_features)


class Gemm(Layer):
    """y = alpha x W + beta b, where x or W may be given transposed (SINGA's and ONNX's layer).

    W is (outputs, in) with ``transB``, else (in, outputs), and starts as N(0, 2 / (in + outputs)); b as zeros.

    Args:
        nb_kernels: columns of the result, >= 1.
        alpha: factor of the product.
        beta: factor of b.
        transA: whether x is (in, rows).
        transB: whether W is (outputs, in).
        bias: whether there is b.
        bias_shape: of b; None is (1, nb_kernels). It broadcasts to the result.

    Raises:
        OptionError: an option is out of range.
        ShapeError: at a call, if x is not a matrix or has another size than at the first.
    """

    W: Tensor
    b: Tensor

    def __init__(
        self,
        nb_kernels: int,
        alpha: float = 1.0,
        beta: float = 1.0,
        transA: bool = False,
        transB: bool = True,
        bias: bool = True,
        bias_shape: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        self.nb_kernels = check_int("Gemm", "nb_kernels", nb_kernels, 1)
        self.alpha, self.beta = check_number("Gemm", "alpha", alpha), check_number("Gemm", "beta", beta)
        self.transA, self.transB = check_bool("Gemm", "transA", transA), check_bool("Gemm", "transB", transB)
        self.bias = check_bool("Gemm", "bias", bias)
        shape = (1, nb_kernels) if bias_shape is None else bias_shape
        self.bias_shape = tuple(check_ints("Gemm", "bias_shape", shape, 1))
        self.in_features: int | None = None

    def initialize(self, x: Tensor) -> None:
        self._check(x)
        self.in_features = x.shape[0 if self.transA else 1]
        sizes = (self.in_features, self.nb_kernels)
        self.W = self.new_parameter("W", sizes[::-1] if self.transB else sizes, x)
        initializer.gaussian(self.W, *sizes)
        if self.bias:
            self.b = self.new_parameter("b", self.bias_shape, x)

    def forward(self, x: Tensor) -> Tensor:
        """x (rows, in), or (in, rows) with transA -> (rows, nb_kernels)."""
        self._check(x)
        b = self.b if self.bias else None
        return autograd.gemm(x, self.W, b, self.alpha, self.beta, self.transA, self.transB)

    def _check(self, x: Tensor) -> None:
        self.check_float(x)
        if x.ndim() != 2:
            raise ShapeError(f"{self!r}: x must be a matrix, but its shape is {x.shape}; use Flatten")
        if self.in_features is not None:
            self.check_size("features", x.shape[0 if self.transA else 1], self.in_features)


class Embedding(Layer):
    """The rows of W that ids name.

    W (input_dim, output_dim) is float32 and starts as N(0, 1).

    Args:
        input_dim: how many ids there are, >= 1.
        output_dim: length of the vector of an id, >= 1.
        initializer: "gaussian", or a function that fills a Tensor, such as those of ``singa_lite.initializer``.

    Raises:
        OptionError: an option is out of range.
        ShapeError: at a call, if an id is not in 0 .. input_dim - 1; on a CUDA device when the host next waits for it.
        DTypeError: at a call, if ids are not integers.
    """

    W: Tensor

    def __init__(
        self, input_dim: int, output_dim: int, initializer: str | Callable[[Tensor], object] = "gaussian"
    ) -> None:
        super().__init__()
        self.input_dim = check_int("Embedding", "input_dim", input_dim, 1)
        self.output_dim = check_int("Embedding", "output_dim", output_dim, 1)
        if not callable(initializer) and not is_one_of(initializer, ("gaussian",)):
            raise OptionError(f"Embedding: initializer = {initializer!r} must be 'gaussian' or a function")
        self.initializer = initializer

    def initialize(self, x: Tensor) -> None:
        if not isinstance(x, Tensor):
            raise DTypeError(f"{self!r}: needs a Tensor of ids as input, got {type(x).__name__}")
        if "W" in vars(self):  # from_pretrained
            return
        self.W = self._new_weights(x.device)
        if callable(self.initializer):
            self.initializer(self.W)
        else:
            self.W.gaussian(0.0, 1.0)

    def from_pretrained(self, W: Tensor | np.ndarray, freeze: bool = True) -> None:
        """Set W to given values; with ``freeze`` it then has no gradient, so no optimizer changes it.

        Raises:
            ShapeError: W is not (input_dim, output_dim).
            DTypeError: W is not a Tensor or numpy array of real numbers.
        """
        check_bool(repr(self), "freeze", freeze)
        if not isinstance(W, (Tensor, np.ndarray)) or not (W.dtype.kind in "iu" or is_float(W.dtype)):
            came = W.dtype if isinstance(W, np.ndarray) else type(W).__name__
            raise DTypeError(f"{self!r}: W must be a Tensor or numpy array of real numbers, not {came}")
        values = to_numpy(W)
        if values.shape != (self.input_dim, self.output_dim):
            raise ShapeError(
                f"{self!r}: W must be {(self.input_dim, self.output_dim)}, but its shape is {values.shape}"
            )
        if "W" not in vars(self):
            self.W = self._new_weights(W.device if isinstance(W, Tensor) else None)
        self.W.copy_from_numpy(values.astype(np.float32))
        self.W.requires_grad = not freeze

    def forward(self, x: Tensor) -> Tensor:
        """Ids of any shape, int32 or int64 -> (x.shape..., output_dim)."""
        return autograd.embedding(x, self.W)

    def _new_weights(self, device: object) -> Tensor:
        shape = (self.input_dim, self.output_dim)
        return Tensor(shape, device, float32, stores_grad=True, name="W")  # type: ignore[arg-type]


class MultiHeadAttention(Layer):
    """Attention of a sequence to itself or, called with two inputs, to another sequence.

    y = attention(projections of x) followed by a Linear; see ``autograd.attention``. Q, K and V come from one
    Linear ``projection`` (width, 3 width), or from ``query`` (width, width) and ``memory_projection`` (other width,
    2 width) if the first call has two inputs; ``output`` is the last Linear.

    Args:
        num_heads: >= 1, divides the width.
        causal: whether position i depends on positions 0 .. i only; not with two inputs.
        bias: whether the Linears have b.

    Raises:
        OptionError: an option is out of range, or ``causal`` comes with two inputs.
        ShapeError: at a call, if x is not (batch, length, width).
    """

    projection: Linear
    query: Linear
    memory_projection: Linear
    output: Linear

    def __init__(self, num_heads: int, causal: bool = False, bias: bool = True) -> None:
        super().__init__()
        self.num_heads = check_int("MultiHeadAttention", "num_heads", num_heads, 1)
        self.causal = check_bool("MultiHeadAttention", "causal", causal)
        self.bias = check_bool("MultiHeadAttention", "bias", bias)
        self.width: int | None = None

    def initialize(self, x: Tensor, memory: Tensor | None = None) -> None:
        self._check(x)
        width = x.shape[2]
        if width % self.num_heads:
            raise ShapeError(f"{self!r}: the width {width} must be divisible by num_heads = {self.num_heads}")
        if memory is None:
            self.projection = Linear(width, 3 * width, bias=self.bias)
        else:
            self.query = Linear(width, width, bias=self.bias)
            self.memory_projection = Linear(2 * width, bias=self.bias)
        self.output = Linear(width, width, bias=self.bias)
        self.width = width

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        """x (batch, length, width), memory (batch, other length, any width) or None -> (batch, length, width)."""
        self._check(x)
        if (memory is None) != ("projection" in vars(self)):
            came, made = (1, 2) if memory is None else (2, 1)
            raise OptionError(f"{self!r}: {came} inputs, but the first call had {made}; use another layer")
        if memory is None:
            y = autograd.attention(self.projection(x), num_heads=self.num_heads, causal=self.causal)
        else:
            queries, others = self.query(x), self.memory_projection(memory)
            y = autograd.attention(queries, others, num_heads=self.num_heads, causal=self.causal)
        return self.output(y)

    def _check(self, x: Tensor) -> None:
        self.check_float(x)
        if x.ndim() != 3:
            raise ShapeError(f"{self!r}: x must be (batch, length, width), but its shape is {x.shape}")
        if self.width is not None:
            self.check_size("features", x.shape[2], self.width)
