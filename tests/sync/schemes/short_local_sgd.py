# SPDX-License-Identifier: Apache-2.0
"""Local SGD in its shortest form: every rank takes its own steps, and after 4 parameters are averaged (Stich, 2019)."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from ..graph.recorder import bookkeep
from ..tensor import Tensor
from .base import Scheme

PERIOD = 4


class ShortLocalSgd(Scheme):
    """Averages all parameters after every fourth update."""

    names = ("shortLocalSGD",)
    is_recordable = True
    keeps_equal = False

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._updates = 0

    def graph_key(self) -> Hashable:
        return self._is_due()

    def _is_due(self) -> bool:
        return (self._updates + 1) % PERIOD == 0

    def after_update(self, params: list[Tensor]) -> None:
        if self._is_due():
            self.average(params)
        bookkeep(self._count)

    def _count(self) -> None:
        self._updates += 1

    def counters(self) -> dict[str, float]:
        return {"updates": self._updates}

    def set_counters(self, counters: dict[str, Any]) -> None:
        self._updates = int(counters.get("updates", 0))
