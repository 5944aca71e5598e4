# SPDX-License-Identifier: Apache-2.0
"""First values of parameters: each function fills a Tensor in place from its device's random stream.

Fans of a shape: (in, out) for a matrix; (in * window, out * window) for a convolution's (out, in, kh, kw).
The variance-scaling family is N(0, scale / fan) or uniform in +-sqrt(3 scale / fan), which has that variance.
"""

from __future__ import annotations

import math

import numpy as np

from .errors import OptionError, ShapeError, check_int, check_number
from .tensor import Tensor, to_numpy
from .tensor.calls import check_floats, check_matrix
from .tensor.core import check_tensor


def fans(t: Tensor) -> tuple[int, int]:
    """Return (fan in, fan out): how many weights are summed in one output, and how many leave one input.

    Raises:
        ShapeError: fewer than two axes, such as those of a bias, or no elements.
        DTypeError: no Tensor.
    """
    check_tensor("initializer", t)
    if t.ndim() < 2 or t.is_empty():
        raise ShapeError(f"initializer: needs two axes or more, and elements, but the shape is {t.shape}")
    if t.ndim() == 2:
        return t.shape[0], t.shape[1]
    receptive_field = math.prod(t.shape[2:])
    return t.shape[1] * receptive_field, t.shape[0] * receptive_field


def gaussian(t: Tensor, fan_in: int = 0, fan_out: int = 0) -> None:
    """Fill from N(0, 2 / (fan_in + fan_out)); N(0, 1 / fan) if one of them is 0.

    Args:
        t: float tensor of any shape.
        fan_in: >= 0.
        fan_out: >= 0; not both 0.
    """
    check_tensor("gaussian", t)
    fan_in, fan_out = check_int("gaussian", "fan_in", fan_in, 0), check_int("gaussian", "fan_out", fan_out, 0)
    if fan_in + fan_out == 0:
        raise OptionError(f"gaussian: fan_in = {fan_in} and fan_out = {fan_out} must not both be 0")
    t.gaussian(0.0, math.sqrt((2 if fan_in and fan_out else 1) / (fan_in + fan_out)))


def glorot_normal(t: Tensor) -> None:
    """N(0, 2 / (fan in + fan out)). Source: Glorot, Bengio, 2010."""
    _normal(t, 2 / sum(fans(t)))


def glorot_uniform(t: Tensor) -> None:
    """Uniform with the variance 2 / (fan in + fan out). Source: Glorot, Bengio, 2010."""
    _uniform(t, 2 / sum(fans(t)))


def he_normal(t: Tensor) -> None:
    """N(0, 2 / fan in), made for relu. Source: He et al., "Delving Deep into Rectifiers", 2015."""
    _normal(t, 2 / fans(t)[0])


def he_uniform(t: Tensor) -> None:
    """Uniform with the variance 2 / fan in, made for relu. Source: as ``he_normal``."""
    _uniform(t, 2 / fans(t)[0])


def lecun_normal(t: Tensor) -> None:
    """N(0, 1 / fan in). Source: LeCun et al., "Efficient BackProp", 1998."""
    _normal(t, 1 / fans(t)[0])


def lecun_uniform(t: Tensor) -> None:
    """Uniform with the variance 1 / fan in. Source: as ``lecun_normal``."""
    _uniform(t, 1 / fans(t)[0])


def eye(t: Tensor) -> None:
    """Ones on the diagonal, zeros elsewhere.

    Raises:
        ShapeError: t is not a matrix.
    """
    check_matrix("eye", t)
    t.copy_from_numpy(np.eye(*t.shape, dtype=t.dtype))


def orthogonal(t: Tensor, gain: float = 1.0) -> None:
    """Fill with a random matrix whose shorter side's vectors are orthonormal, times ``gain``.

    Raises:
        ShapeError: t is not a matrix.
        DTypeError: t is not a float Tensor.

    Source: Saxe, McClelland, Ganguli, 2014.
    """
    check_matrix("orthogonal", t)
    check_floats("orthogonal", t)
    gain = check_number("orthogonal", "gain", gain)
    square = Tensor((max(t.shape), min(t.shape)), t.device, "float64").gaussian(0.0, 1.0)
    q, r = np.linalg.qr(to_numpy(square))
    q *= np.sign(np.diag(r))  # else the distribution depends on QR's choice of signs
    t.copy_from_numpy((gain * (q if t.shape[0] >= t.shape[1] else q.T)).astype(t.dtype))


def _normal(t: Tensor, variance: float) -> None:
    t.gaussian(0.0, math.sqrt(variance))


def _uniform(t: Tensor, variance: float) -> None:
    limit = math.sqrt(3 * variance)
    t.uniform(-limit, limit)


# SINGA's older names
xavier = glorot_uniform
glorot = glorot_normal
msra = he_normal
