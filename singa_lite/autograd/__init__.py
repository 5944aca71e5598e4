# SPDX-License-Identifier: Apache-2.0
"""The face of autograd: the engine, every operator function, and the ``training`` switch.

``autograd.training = True``, as SINGA scripts write it, reaches ``config.state.training``.
"""

import sys
from types import ModuleType

from ..config import state
from ..tensor import OPERATORS
from .engine import Context, Operator, backward, gradients, no_grad
from .ops import (
    abs,
    add,
    add_bias,
    avg_pool_2d,
    batchnorm_2d,
    cat,
    clip,
    conv2d,
    cross_entropy,
    div,
    dropout,
    exp,
    flatten,
    log,
    matmul,
    max_pool_2d,
    mean,
    mse_loss,
    mul,
    negative,
    pad,
    pow,
    recurrent,
    reduce_mean,
    reduce_sum,
    relu,
    reshape,
    sigmoid,
    softmax,
    softmax_cross_entropy,
    sqrt,
    sub,
    sum,
    tanh,
    transpose,
)


class _Autograd(ModuleType):
    """This module, with ``training`` as a property."""

    @property
    def training(self) -> bool:
        """Whether operators record for backward, and dropout and batch norm train. Each thread starts with False."""
        return state.training

    @training.setter
    def training(self, value: bool) -> None:
        state.training = bool(value)


Operation = Operator  # another name of SINGA's for it
sys.modules[__name__].__class__ = _Autograd
# what ``a + b``, ``a @ b`` and their kin on Tensors call
OPERATORS.update(add=add, sub=sub, mul=mul, div=div, pow=pow, matmul=matmul, negative=negative)

__all__ = [
    "Context",
    "Operation",
    "Operator",
    "abs",
    "add",
    "add_bias",
    "avg_pool_2d",
    "backward",
    "batchnorm_2d",
    "cat",
    "clip",
    "conv2d",
    "cross_entropy",
    "div",
    "dropout",
    "exp",
    "flatten",
    "gradients",
    "log",
    "matmul",
    "max_pool_2d",
    "mean",
    "mse_loss",
    "mul",
    "negative",
    "no_grad",
    "pad",
    "pow",
    "recurrent",
    "reduce_mean",
    "reduce_sum",
    "relu",
    "reshape",
    "sigmoid",
    "softmax",
    "softmax_cross_entropy",
    "sqrt",
    "sub",
    "sum",
    "tanh",
    "transpose",
]
