# SPDX-License-Identifier: Apache-2.0
"""The line of the user's program that a warning or a record of a call names."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest

from singa_lite import users_line

CALLS = """
def calls(function, *arguments, depth):
    return calls(function, *arguments, depth=depth - 1) if depth else function(*arguments)
"""


def inside(file: str) -> Callable[..., Any]:
    """A function that calls another one from any number of frames of ``file``."""
    names: dict[str, Any] = {}
    exec(compile(CALLS, file, "exec"), names)
    return names["calls"]


@pytest.mark.parametrize("depth", [0, 1, 5])
def test_frames_of_the_package_are_passed_over(depth: int) -> None:
    of_package = inside(users_line.PACKAGE + "opt/dist.py")
    with pytest.warns(RuntimeWarning, match="^beware$") as caught:
        here = of_package(users_line.users_line, depth=depth)
        of_package(users_line.warn, "beware", RuntimeWarning, depth=depth)
    assert here[0] == caught[0].filename == __file__
    assert here[1] + 1 == caught[0].lineno


def test_a_script_beside_the_package_is_the_users() -> None:
    for name in ("singa_lite_script.py", "train.py"):
        file = users_line.PACKAGE.rstrip("/").removesuffix("singa_lite") + name
        assert inside(file)(users_line.users_line, depth=0) == (file, 3)


def test_without_a_users_frame_a_warning_is_still_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(users_line, "PACKAGE", "/")  # python -m singa_lite: all frames are the package's
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        users_line.warn("beware")
    assert [str(warning.message) for warning in caught] == ["beware"]
