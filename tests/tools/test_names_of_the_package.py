# SPDX-License-Identifier: Apache-2.0
"""What benchmarks/ and tools/ take from the package is there: most of them run by hand alone."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted(
    str(path.relative_to(ROOT))
    for folder in ("benchmarks", "tools")
    for path in (ROOT / folder).rglob("*.py")
)


def imported(tree: ast.AST) -> Iterator[tuple[str, Any]]:
    """The names that imports from the package bind, and what they are; AttributeError for what is not there."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "singa_lite":
            module = importlib.import_module(node.module or "")
            for each in node.names:
                if not hasattr(module, each.name):
                    importlib.import_module(f"{node.module}.{each.name}")
                yield each.asname or each.name, getattr(module, each.name)


def rebound(tree: ast.AST) -> set[str]:
    """Names that are also something else in the file: variables and parameters."""
    found = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    return found | {
        node.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)
    }


def missing(text: str) -> list[str]:
    tree = ast.parse(text)
    modules = {name: found for name, found in imported(tree) if isinstance(found, ModuleType)}
    for name in rebound(tree):
        modules.pop(name, None)
    uses = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    ]
    return [
        f"line {node.lineno}: {node.value.id}.{node.attr}"
        for node in uses
        if isinstance(node.value, ast.Name)
        and node.value.id in modules
        and not hasattr(modules[node.value.id], node.attr)
    ]


@pytest.mark.parametrize("file", FILES)
def test_names_of_the_package_that_a_script_uses_are_there(file: str) -> None:
    try:
        assert missing((ROOT / file).read_text()) == []
    except ModuleNotFoundError as error:
        if error.name and not error.name.startswith("singa_lite"):
            pytest.skip(f"{error.name} is not installed")
        raise


def test_a_name_that_is_not_there_is_found() -> None:
    assert missing("from singa_lite import opt\nopt.SGD(0.1)\nopt.Sgd(0.1)") == ["line 3: opt.Sgd"]
    with pytest.raises(ImportError):
        missing("from singa_lite.opt import Sgd")
