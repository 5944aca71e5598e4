# SPDX-License-Identifier: Apache-2.0
"""Optimizer steps, in place on parameter and state."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ...errors import ShapeError
from ..base import Array
from ._wide import wide


class UpdateKernels:
    """sgd_update and adam_update."""

    def sgd_update(
        self,
        *grads: Array,
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
        for grad, param, *velocities in _by_tensor(grads, out):
            slope = wide(grad) + weight_decay * wide(param) if weight_decay else wide(grad)
            if momentum and velocities:
                velocity = velocities[0]
                velocity *= momentum
                velocity += (1 - dampening) * slope if dampening else slope
                slope = slope + momentum * wide(velocity) if nesterov else wide(velocity)
            param -= (lr * slope).astype(param.dtype, copy=False)

    def adam_update(
        self,
        *grads: Array,
        out: tuple[Array, ...],
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
        for grad, param, m, v in _by_tensor(grads, out):
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


def _by_tensor(grads: tuple[Array, ...], out: Array | tuple[Array, ...]) -> Iterator[tuple[Array, ...]]:
    """(grad, param, state, ...) of each tensor; ``out`` holds all params, then all of each state."""
    out = out if isinstance(out, tuple) else (out,)
    count = len(grads)
    if count == 0 or len(out) % count:
        raise ShapeError(f"an update of {count} gradients cannot write {len(out)} arrays")
    return zip(grads, *(out[start : start + count] for start in range(0, len(out), count)), strict=True)
