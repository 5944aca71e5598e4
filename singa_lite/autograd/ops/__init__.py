# SPDX-License-Identifier: Apache-2.0
"""The operators, one family a file: each class with its public function right beneath."""

from .activation import abs, clip, exp, log, negative, relu, sigmoid, softmax, sqrt, tanh
from .arithmetic import add, div, mean, mul, pow, sub, sum
from .conv import conv2d
from .dropout import dropout
from .linear import add_bias, matmul
from .loss import cross_entropy, mse_loss, softmax_cross_entropy
from .norm import batchnorm_2d
from .pool import avg_pool_2d, max_pool_2d
from .recurrent import recurrent
from .reduction import reduce_mean, reduce_sum
from .shape import cat, flatten, pad, reshape, transpose

__all__ = [
    "abs",
    "add",
    "add_bias",
    "avg_pool_2d",
    "batchnorm_2d",
    "cat",
    "clip",
    "conv2d",
    "cross_entropy",
    "div",
    "dropout",
    "exp",
    "flatten",
    "log",
    "matmul",
    "max_pool_2d",
    "mean",
    "mse_loss",
    "mul",
    "negative",
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
