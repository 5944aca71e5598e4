# SPDX-License-Identifier: Apache-2.0
"""Find the line of the user's program that called this package, for records of calls and for warnings."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from types import FrameType


def users_line() -> tuple[str, int]:
    """Return file and line of the innermost frame outside of this package, ("", 0) if all are inside."""
    frame, _ = _users_frame()
    if frame is None:
        return "", 0
    return frame.f_code.co_filename.encode(errors="replace").decode(), frame.f_lineno


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn, naming the user's line."""
    frame, stacklevel = _users_frame()
    warnings.warn(message, category, stacklevel if frame else 1)


def _users_frame() -> tuple[FrameType | None, int]:
    """Return the innermost frame outside of this package, or None, and the caller's ``stacklevel`` of it."""
    frame, level = sys._getframe(), 0
    while frame is not None and frame.f_code.co_filename.startswith(NOT_USERS):
        frame, level = frame.f_back, level + 1  # type: ignore[assignment]
    return frame, level


# as frames have it, which need not be absolute
PACKAGE = os.path.dirname(_users_frame.__code__.co_filename) + os.sep
# the last enters our own context managers
NOT_USERS = (PACKAGE, "<frozen", contextlib.contextmanager.__code__.co_filename)
