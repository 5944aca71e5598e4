# SPDX-License-Identifier: Apache-2.0
"""What the tests of lowered steps share: comparisons with eager steps, and the kernels of a lowered one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from singa_lite.backend.cpu import CpuBackend
from singa_lite.graph.nodes import Kernel

States = Mapping[str, np.ndarray]


def assert_alike(eager: Sequence[Any], lowered: Sequence[Any]) -> None:
    """(Outputs, losses, states) of lowered steps are those of eager ones up to rounding."""
    for one, other in zip(eager[0], lowered[0], strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(lowered[1], eager[1], rtol=1e-5)
    for name, value in eager[2].items():
        np.testing.assert_allclose(lowered[2][name], value, rtol=1e-5, atol=1e-6, err_msg=name)


def assert_ranks_alike(eager: Sequence[States], lowered: Sequence[States]) -> None:
    """All ranks of lowered steps have the same bits, near those of eager ones."""
    first, *others = lowered
    for name, value in first.items():
        assert all(other[name].tobytes() == value.tobytes() for other in others), name
        np.testing.assert_allclose(value, eager[0][name], rtol=1e-4, atol=1e-5)


def lowered_calls(monkeypatch: pytest.MonkeyPatch, run: Callable[[], object]) -> list[Kernel]:
    """The kernels of the first step that is lowered while ``run`` runs."""
    seen = []
    lower = CpuBackend.lower

    def listen(self: CpuBackend, calls: Any) -> Any:
        seen.append(lower(self, calls))
        return seen[-1]

    monkeypatch.setattr(CpuBackend, "lower", listen)
    run()
    return [call for call in seen[0] if isinstance(call, Kernel)]
