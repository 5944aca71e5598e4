# SPDX-License-Identifier: Apache-2.0
"""Tests that take long and have many cases: the first cases run each time, the others with the slow tests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow_but_first(
    names: str | tuple[str, ...], cases: Iterable[Any], count: int = 1, ids: Any = None
) -> pytest.MarkDecorator:
    """``pytest.mark.parametrize`` that marks the cases after the first ``count`` as slow."""
    is_one = isinstance(names, str) and "," not in names
    marked = []
    for index, case in enumerate(cases):
        param = case if hasattr(case, "marks") else pytest.param(*((case,) if is_one else case))
        marks = [*param.marks, *([pytest.mark.slow] if index >= count else [])]
        marked.append(pytest.param(*param.values, marks=marks, id=param.id))
    return pytest.mark.parametrize(names, marked, ids=ids)


def cases_that_run(request: pytest.FixtureRequest, name: str) -> list[Any]:
    """The values of parameter ``name`` in the chosen tests of this module, so that a fixture starts only their jobs."""
    items = [
        item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")
    ]
    values = [item.callspec.params[name] for item in items if name in item.callspec.params]
    return list(dict.fromkeys(values))
