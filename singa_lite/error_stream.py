# SPDX-License-Identifier: Apache-2.0
"""Texts of errors: to the user by the error stream, which may be closed or full, and to other ranks."""

from __future__ import annotations

import contextlib
import os
import sys


def tell(text: str) -> None:
    """Write ``text`` to the error stream in one piece, as lines of ranks are mixed there; nothing if it cannot be.

    Python's own buffer is passed by: a signal may have interrupted a write into it, and what cannot be written would
    stay in it, to fail again at exit.
    """
    with contextlib.suppress(OSError, ValueError, AttributeError):  # full; closed; None
        try:
            descriptor = sys.stderr.fileno()
        except (OSError, AttributeError):  # an object in its place, without a file
            sys.stderr.write(text)
            return
        data = text.encode(errors="backslashreplace")
        while data:
            data = data[os.write(descriptor, data) :]


def text_of(error: BaseException) -> str:
    """Return class and text of an error, which may be one of the user whose text cannot be made."""
    name = type(error).__name__
    try:
        return f"{name}: {error}"
    except Exception as failure:
        return f"{name} (its text could not be made: {type(failure).__name__})"


def sendable(text: str) -> str:
    """Return ``text`` with escapes for what is not valid in UTF-8, and for NUL, at which native code would cut it."""
    return text.encode(errors="backslashreplace").decode().replace("\0", "\\0")
