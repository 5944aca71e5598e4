# SPDX-License-Identifier: Apache-2.0
"""Functions that do what tools/soak/calls.py must find, one each, and some that it must not report."""

from __future__ import annotations

import warnings
from pathlib import Path

from singa_lite.errors import ShapeError
from singa_lite.tensor import Tensor


def returns(x: object) -> None:
    """Do nothing."""


def refuses(x: object) -> None:
    """Raise a typed error."""
    raise ShapeError(f"refuses: expected something else than {x!r}")


def raises_untyped(x: object) -> None:
    raise AttributeError("untyped")


def raises_python_type_error(x: object) -> None:
    len(1)  # type: ignore[arg-type]


def raises_without_message(x: object) -> None:
    raise ShapeError


def warns(x: object) -> None:
    warnings.warn("a warning", stacklevel=1)


def leaves_a_file(x: object) -> None:
    Path("left").touch()
    raise ShapeError("leaves_a_file: it is there all the same")


def changes_first(x: Tensor, y: int, z: int) -> None:
    if isinstance(x, Tensor) and x.dtype.kind == "f":
        x.array = x.array + 1
    raise ShapeError("changes_first: expected another shape")


def exits(x: object) -> None:
    raise SystemExit(0)
