# SPDX-License-Identifier: Apache-2.0
"""docs/errors.md knows every CommError of the sources, and none that is no longer there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "errors.md").read_text()
GLUE = " :;,'()."
LEAST = 8  # shorter pieces of a message are glue such as " of "
ERRORS = ("CommError", "_error")  # called with such a text
TEXTS = ("difference",)  # functions that return such a text, or an end of one
# raised with the text of another error, which the page has
PASSED_ON = {"new_group {}: {}"}


def python_messages() -> list[str]:
    """The message of each `CommError(...)` and `..._error(...)`, {} for what is filled in, and those of TEXTS."""
    found = []
    for path in sorted((ROOT / "singa_lite").rglob("*.py")):
        text = path.read_text()
        if not any(name in text for name in (*ERRORS, *TEXTS)):  # parsing all takes a second
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and node.args:
                name = getattr(node.func, "id", "") or getattr(node.func, "attr", "")
                if name in ERRORS:
                    found.append(text_of(node.args[0]))
            if isinstance(node, ast.FunctionDef) and node.name in TEXTS:
                found += [
                    text_of(inner.value)
                    for inner in ast.walk(node)
                    if isinstance(inner, ast.Return) and isinstance(inner.value, ast.JoinedStr)
                ]
    return found


def text_of(node: ast.expr) -> str:
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    return "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in parts)


def native_messages() -> list[str]:
    """The string literals of each `throw CommError(...)`, in one line."""
    found = []
    for path in sorted((ROOT / "native").rglob("*.cc")):
        if "tests" not in path.parts:
            for thrown in re.findall(r"throw CommError\((.*?)\);", path.read_text(), re.DOTALL):
                found.append("{}".join(re.findall(r'"((?:[^"\\]|\\.)*)"', re.sub(r'"\s*\n\s*"', "", thrown))))
    return found


IN_PYTHON, IN_NATIVE = python_messages(), native_messages()
MESSAGES = [*IN_PYTHON, *IN_NATIVE]
HEADINGS = re.findall(r"^\*\*(.+)\*\*$", PAGE, re.MULTILINE)


def quoted_pieces(heading: str) -> list[str]:
    """The fixed words of the messages that a heading quotes."""
    return [piece for quoted in re.findall(r"`([^`]+)`", heading) for piece in quoted.split("…")]


def test_there_are_messages_of_every_part():
    assert len(IN_PYTHON) > 10 and len(IN_NATIVE) > 10


@pytest.mark.parametrize("message", sorted(set(MESSAGES)))
def test_the_page_has_the_message(message):
    known = [piece.strip(GLUE) for heading in HEADINGS for piece in quoted_pieces(heading)]
    long = [piece for piece in (piece.strip(GLUE) for piece in message.split("{}")) if len(piece) >= LEAST]
    if message not in PASSED_ON and long:
        assert any(words in piece for words in known if len(words) >= LEAST for piece in long), long


@pytest.mark.parametrize("heading", HEADINGS)
def test_the_message_is_still_in_the_sources(heading):
    sources = [*(ROOT / "singa_lite").rglob("*.py"), *(ROOT / "native").rglob("*.cc")]
    text = re.sub(r'"\s*\n\s*f?"', "", "\n".join(path.read_text() for path in sources))
    for piece in quoted_pieces(heading):
        assert piece.strip(GLUE) in text
