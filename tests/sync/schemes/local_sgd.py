# SPDX-License-Identifier: Apache-2.0
"""Local SGD: every rank takes its own steps, and every so many the parameters are averaged (Stich, 2019)."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from ..errors import check_int
from ..graph.recorder import bookkeep
from ..tensor import Tensor
from .base import Scheme


class LocalSgd(Scheme):
    """Averages all parameters after every ``period`` steps."""

    names = ("localSGD",)
    keeps_equal = False

    @dataclass(frozen=True)
    class Options:
        """period: steps from one average to the next."""

        period: int = 4

        def __post_init__(self) -> None:
            check_int("localSGD", "period", self.period, 1)

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._steps = 0

    def graph_key(self) -> Hashable:
        return self._is_due()

    def _is_due(self) -> bool:
        return (self._steps + 1) % self.options.period == 0

    def after_update(self, params: list[Tensor]) -> None:
        if self._is_due():
            self.average(params)
        bookkeep(self._count)

    def _count(self) -> None:
        self._steps += 1

    def counters(self) -> dict[str, int]:
        return {"steps": self._steps}

    def set_counters(self, counters: dict[str, int]) -> None:
        self._steps = counters.get("steps", 0)
