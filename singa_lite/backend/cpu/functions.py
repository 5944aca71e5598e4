# SPDX-License-Identifier: Apache-2.0
"""The functions that formulas.h uses, on numpy arrays of float32 or wider."""

from __future__ import annotations

import math

import numpy as np

from ..base import Array


def logistic(x: Array) -> Array:
    """1 / (1 + e^-x) in float64, so that a result of float32 is rounded once."""
    power = np.exp(-np.abs(x.astype(np.float64)))
    largest = np.where(x < 0, power, 1)  # largest (1 - e / (1 + e)): 1.8 units of the last place
    return largest - largest * (power / (1 + power))


def logistic_grad(x: Array) -> Array:
    """Return the derivative of ``logistic``, in float64; y (1 - y) would lose all digits where y is near 1."""
    power = np.exp(-np.abs(x.astype(np.float64)))
    return power / (1 + power * (2 + power))


def floored_quotient(a: Array, b: Array) -> Array:
    """floor(a / b); numpy's own takes 1 // 0.1 for 9."""
    return np.floor(a / b) if a.dtype.kind == "f" else np.floor_divide(a, b)


def normal_cdf(x: Array) -> Array:
    """Return the probability that a normal variable is less than x, in float64."""
    wanted = x.astype(np.float64)
    return np.array([math.erfc(-value * math.sqrt(0.5)) / 2 for value in wanted.flat]).reshape(x.shape)


def normal_pdf(x: Array) -> Array:
    """Return the density of the normal distribution, in float64."""
    return np.exp(-0.5 * np.square(x.astype(np.float64))) * (1 / math.sqrt(2 * math.pi))


FUNCTIONS = {
    "where": np.where,
    "exp": np.exp,
    "expm1": np.expm1,
    "log": np.log,
    "log1p": np.log1p,
    "sqrt": np.sqrt,
    "tanh": np.tanh,
    "ceil": np.ceil,
    "pow": np.power,
    "logistic": logistic,
    "logistic_grad": logistic_grad,
    "floored_quotient": floored_quotient,
    "normal_cdf": normal_cdf,
    "normal_pdf": normal_pdf,
}
