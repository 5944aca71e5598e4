# SPDX-License-Identifier: Apache-2.0
"""Optimizer steps, in place on parameter and state."""

from __future__ import annotations

import numpy as np

from ..base import Array
from ._wide import wide


class UpdateKernels:
    """sgd_update and adam_update."""

    def sgd_update(
        self,
        grad: Array,
        *,
        out: Array | tuple[Array, ...],
        lr: float,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
    ) -> None:
        """v = momentum v + (1 - dampening) g with g = grad + weight_decay p, and p -= lr v.

        With nesterov p -= lr (g + momentum v).
        """
        param, velocity = out if isinstance(out, tuple) and len(out) == 2 else (out, None)
        param = param[0] if isinstance(param, tuple) else param
        slope = wide(grad) + weight_decay * wide(param) if weight_decay else wide(grad)
        if momentum and velocity is not None:
            velocity *= momentum
            velocity += (1 - dampening) * slope if dampening else slope
            slope = slope + momentum * wide(velocity) if nesterov else wide(velocity)
        param -= (lr * slope).astype(param.dtype, copy=False)

    def adam_update(
        self,
        grad: Array,
        *,
        out: tuple[Array, Array, Array],
        lr: float,
        beta_1: float,
        beta_2: float,
        eps: float,
        step: int,
        weight_decay: float = 0.0,
    ) -> None:
        """p -= lr m' / (sqrt(v') + eps) with m, v the moving means of g and g*g, m' and v' bias-corrected.

        Source: Kingma, Ba, "Adam: A Method for Stochastic Optimization", 2015, algorithm 1.
        """
        param, m, v = out
        slope = wide(grad) + weight_decay * wide(param) if weight_decay else wide(grad)
        m *= beta_1
        m += (1 - beta_1) * slope
        v *= beta_2
        v += (1 - beta_2) * (slope * slope)
        scale = np.sqrt(wide(v) * (1 / (1 - beta_2**step)))
        scale += eps
        np.divide(m, scale, out=scale)
        scale *= lr / (1 - beta_1**step)
        param -= scale.astype(param.dtype, copy=False)
