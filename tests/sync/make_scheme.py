# SPDX-License-Identifier: Apache-2.0
"""Make a scheme without a DistOpt, to run its steps by hand."""

from __future__ import annotations

from typing import Any, NamedTuple

from singa_lite.comm.base import Communicator
from singa_lite.sync import find_schemes
from singa_lite.sync.base import MomentumRule, Scheme, StepContext
from singa_lite.tensor import Tensor


class NoMomentum(NamedTuple):
    momentum: float = 0.0
    is_nesterov: bool = False


class NoOptimizer:
    """An OptimizerView without an optimizer; parameters need names of their own."""

    def collective_name(self, name: str) -> str:
        return name

    def name_of(self, param: Tensor) -> str:
        return param.name or "unnamed"

    def slots(self, param: Tensor) -> dict[str, Tensor]:
        return {}

    def lr_at(self, step: int) -> float:
        return 1.0

    def momentum_rule(self, step: int) -> MomentumRule:
        return NoMomentum()


def begin(scheme: Scheme, step: int = 0, **options: Any) -> None:
    """Start a step, as DistOpt does."""
    scheme.begin(StepContext(scheme.Options(**options), step, scheme.optimizer))


def make_scheme(name: str, communicator: Communicator, threshold: int, bucket_bytes: int) -> Scheme:
    """Return a new scheme, which ``dist_option = name`` chooses."""
    return find_schemes()[name](communicator, threshold, bucket_bytes, NoOptimizer())
