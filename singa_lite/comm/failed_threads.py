# SPDX-License-Identifier: Apache-2.0
"""Threads of a rank that fail before it joins its world, when nobody can be told yet."""

from __future__ import annotations

import threading

from ..config import state
from ..error_stream import text_of
from ..errors import CommError


def note_failed_threads() -> None:
    """Note, until this process joins, the last thread that ends by an exception."""
    before = threading.excepthook

    def note(arguments: threading.ExceptHookArgs) -> None:
        try:
            before(arguments)
        finally:  # where the error stream is full
            if state.exit_hooks is None and fails_job(arguments):
                state.failed_thread = reason_of(arguments)

    threading.excepthook = note


def fails_job(arguments: threading.ExceptHookArgs) -> bool:
    """Return whether a thread has failed whose work counts: none of a daemon, and SystemExit ends a thread alone."""
    thread = arguments.thread
    return thread is not None and not thread.daemon and arguments.exc_type is not SystemExit


def reason_of(arguments: threading.ExceptHookArgs) -> str:
    """Return the thread's name and its exception."""
    assert arguments.thread is not None
    return f"thread {arguments.thread.name!r}: {text_of(arguments.exc_value or arguments.exc_type())}"


def check_no_failed_thread() -> None:
    """Raise CommError if a thread has failed before this process joins."""
    if state.failed_thread:
        raise CommError(f"connect: {state.failed_thread}; this process does not join")
