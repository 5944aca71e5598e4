# SPDX-License-Identifier: Apache-2.0
"""Paths as arguments of commands: what argparse takes as ``type``."""

from __future__ import annotations

import argparse
from pathlib import Path


def folder(text: str) -> Path:
    """Return the path of a folder; an empty one, as of an unset variable, would be the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("the path of a folder is empty; write . for the current one")
    return Path(text)


def why_no_folder(error: OSError) -> str | None:
    """Return why a folder could not be made or written, from the error of mkdir with ``exist_ok``."""
    return "it is there and is not a folder" if isinstance(error, FileExistsError) else error.strerror


def new_file(text: str) -> Path:
    """Return the path of a file to be written, whose folder is there."""
    path = Path(text)
    if not text:
        raise argparse.ArgumentTypeError("the path of a file is empty")
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder")
    if not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: there is no folder {path.absolute().parent}")
    return path
