# SPDX-License-Identifier: Apache-2.0
"""Cases of one test that take long and say nearly the same: one of them runs each time, all of them with the slow."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow_but_first(
    names: str | tuple[str, ...], cases: Iterable[Any], count: int = 1, ids: Any = None
) -> pytest.MarkDecorator:
    """``pytest.mark.parametrize`` that marks the cases behind the first ``count`` as slow."""
    is_one = isinstance(names, str) and "," not in names
    marked = []
    for index, case in enumerate(cases):
        param = case if hasattr(case, "marks") else pytest.param(*((case,) if is_one else case))
        marks = [*param.marks, *([pytest.mark.slow] if index >= count else [])]
        marked.append(pytest.param(*param.values, marks=marks, id=param.id))
    return pytest.mark.parametrize(names, marked, ids=ids)


def cases_that_run(request: pytest.FixtureRequest, name: str) -> list[Any]:
    """Values of the parameter ``name`` in those tests of the module that have been chosen, for a fixture of all."""
    items = [
        item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")
    ]
    values = [item.callspec.params[name] for item in items if name in item.callspec.params]
    return list(dict.fromkeys(values))
