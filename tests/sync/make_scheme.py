# SPDX-License-Identifier: Apache-2.0
"""Make a scheme without a DistOpt, to run its steps by hand."""

from __future__ import annotations

from singa_lite.comm.base import Communicator
from singa_lite.sync import find_schemes
from singa_lite.sync.base import Scheme
from singa_lite.tensor import Tensor


class NoOptimizer:
    """An OptimizerView without an optimizer; parameters need names of their own."""

    step_counter = 0

    def name_of(self, param: Tensor) -> str:
        return param.name or "unnamed"

    def slots(self, param: Tensor) -> dict[str, Tensor]:
        return {}

    def momentum_of_step(self) -> float:
        return 0.0


def make_scheme(name: str, communicator: Communicator, threshold: int, bucket_bytes: int) -> Scheme:
    """Return a new scheme, which ``dist_option = name`` chooses."""
    return find_schemes()[name](communicator, threshold, bucket_bytes, NoOptimizer())
