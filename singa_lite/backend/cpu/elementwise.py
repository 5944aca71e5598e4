# SPDX-License-Identifier: Apache-2.0
"""Element-by-element kernels: the formulas of formulas.h, and others; inputs broadcast as in numpy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ...dtypes import accumulation_dtype, bfloat16
from ..base import Array
from ..formulas import FORMULAS, Formula
from ._accumulation import store, upcast
from .functions import FUNCTIONS

COMPARISONS = {
    "less": np.less,
    "less_equal": np.less_equal,
    "greater": np.greater,
    "greater_equal": np.greater_equal,
    "equal": np.equal,
}
UFUNCS = {  # numpy's own, which write into the result
    "tanh": np.tanh,
    "exp": np.exp,
    "log": np.log,
    "sqrt": np.sqrt,
    "abs": np.abs,
    "negative": np.negative,
    "sign": np.sign,
    "ceil": np.ceil,
    "square": np.square,
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "pow": np.power,
}


class ElementwiseKernels:
    """A method for each of FORMULAS, and compare and clip."""

    def compare(self, a: Array, b: Array, *, out: Array, relation: str) -> None:
        out[...] = COMPARISONS[relation](upcast(a), upcast(b))

    def clip(self, x: Array, *, out: Array, min: float | None, max: float | None) -> None:
        store(out, np.clip(upcast(x), min, max))

    def clip_backward(self, dy: Array, x: Array, *, out: Array, min: float | None, max: float | None) -> None:
        x, inside = upcast(x), np.ones(x.shape, bool)
        if min is not None:
            inside &= x >= min
        if max is not None:
            inside &= x <= max
        dy = upcast(dy)
        store(out, np.where(inside, dy, dy.dtype.type(0)))


def _kernel_of(formula: Formula) -> Callable[..., None]:
    """Return the kernel that evaluates ``formula``, or numpy's function for it."""
    ufunc = UFUNCS.get(formula.name)
    names = ("A", "Real", *formula.inputs, *formula.numbers)
    value = eval(f"lambda {', '.join(names)}: {formula.value}", dict(FUNCTIONS))

    def kernel(self: ElementwiseKernels, *inputs: Array, out: Array, **numbers: float) -> None:
        if ufunc is not None and out.dtype != bfloat16:
            # named, as numpy 1 has an array without axes take the dtype of others
            ufunc(*inputs, out=out, dtype=np.result_type(*(x.dtype for x in inputs)), casting="same_kind")
            return
        element = accumulation_dtype(inputs[0].dtype)
        real = element.type if element.kind == "f" else np.float64
        store(out, value(element.type, real, *map(upcast, inputs), **numbers))

    kernel.__name__, kernel.__doc__ = formula.name, formula.signature
    return kernel


for _formula in FORMULAS.values():
    setattr(ElementwiseKernels, _formula.name, _kernel_of(_formula))
