# SPDX-License-Identifier: Apache-2.0
"""docs/singa.md names what is there, and nothing else."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from singa_lite import autograd, data, device, initializer, layer, opt, tensor
from singa_lite.autograd import ops

PAGE = (Path(__file__).parents[1] / "docs" / "singa.md").read_text()
ROWS = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", PAGE, re.MULTILINE))


def names_in(text: str) -> set[str]:
    """Every word in backticks; words joined by blanks count one by one."""
    return {word for quoted in re.findall(r"`([^`]*)`", text) for word in quoted.split()}


def test_every_public_operator_and_layer_is_on_the_page() -> None:
    assert set(ops.__all__) <= names_in(ROWS["autograd"])
    assert names_in(ROWS["layer"]) == set(layer.__all__)


@pytest.mark.parametrize("module", [autograd, initializer, opt])
def test_every_name_on_the_page_exists(module: object) -> None:
    named = names_in(ROWS[module.__name__.split(".")[-1]])
    assert not {name for name in named if not hasattr(module, name)}


def test_every_tensor_function_on_the_page_exists() -> None:
    assert not {name for name in names_in(ROWS["tensor"]) if not hasattr(tensor, name)}


def test_what_the_page_calls_missing_is_missing() -> None:
    missing = PAGE.split("## Missing")[1]
    for module, held in (("autograd", autograd), ("data", data), ("layer", layer), ("opt", opt)):
        entry = re.search(rf"^- `{module}`:(.*?)(?=^- |\Z)", missing, re.MULTILINE | re.DOTALL)
        assert not {name for name in names_in(entry[1] if entry else "") if hasattr(held, name)}
    assert not hasattr(device, "enable_lazy_alloc")
    assert {"ImageBatchIter", "utils", "Matmul", "ctensor2numpy"} <= names_in(missing)
    assert importlib.util.find_spec("singa_lite.utils") is None
