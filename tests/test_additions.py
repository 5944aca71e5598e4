# SPDX-License-Identifier: Apache-2.0
"""How many files of the package an addition needs, as CONTRIBUTING.md promises."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from singa_lite.comm import find_messengers
from singa_lite.sync import find_schemes
from tests.limits import LIMIT_S

ROOT = Path(__file__).parents[1]
SOURCES = (".py", ".h", ".cc", ".cu", ".cuh")
# a word that only this operator uses -> most files of the package, but for layers and tests
OPERATORS = {
    "leakyrelu": 2,
    "elu": 2,
    "gelu": 2,
    "binary_cross_entropy": 2,
    "embedding": 2,
    "unsqueeze": 2,
    "layer_norm_backward": 5,
    "attention_backward": 5,
    "gather_backward": 5,
}
# recorded steps in fewer kernels, which no operator needs
FUSED = {"fuse.py", "fuse_rows.py", "product.cc"}
OPTIMIZERS = ("adagrad_update", "adamw_update", "rmsprop_update")  # the rules
LAYERS = ("Embedding", "Gemm", "LayerNorm", "MultiHeadAttention", "SeparableConv2d")

FORMULAS = """
UNARY(cube, A, x, x * x * x)  // x to the third
BINARY(cube_backward, A, dy, x, 3 * dy * x * x)  // its dx
"""
CLASS = '''

class Cube(Elementwise):
    kernel = "cube"


def cube(x: Tensor) -> Tensor:
    """Return x to the third, element by element."""
    return Cube()(x)


__all__ += ["cube"]
'''
USE = """
import numpy as np
import pytest
import singa_lite
from singa_lite import autograd, tensor
from singa_lite.device import get_default_device
from tests.devices import cuda_device

def check(device):
    for dtype in ("float16", "float32", "float64"):
        x = tensor.Tensor(data=[1.0, -2.0, 0.5], device=device, dtype=dtype, stores_grad=True)
        y = autograd.cube(x)
        dy = tensor.Tensor(data=np.ones(3), device=device, dtype=dtype)
        assert tensor.to_numpy(y).tolist() == [1, -8, 0.125] and y.dtype == dtype
        assert tensor.to_numpy(autograd.gradients(y, dy)[x]).tolist() == [3, 12, 0.75]

autograd.training = True
check(get_default_device())
with pytest.MonkeyPatch.context() as monkeypatch:
    check(cuda_device(monkeypatch))
print(singa_lite.__file__)
"""


def files_with(word: str) -> list[str]:
    """Files of the package, but for layers, that have ``word`` in their code."""
    files = [path for folder in ("singa_lite", "native") for path in (ROOT / folder).rglob("*")]
    names = [path.relative_to(ROOT) for path in files if path.suffix in SOURCES and path.name not in FUSED]
    names = [name for name in names if name.parts[1] not in ("layer", "tests")]
    return [str(name) for name in names if re.search(rf"\b{word}\b", (ROOT / name).read_text())]


@pytest.mark.parametrize("word", OPERATORS)
def test_an_operator_is_in_as_few_files_as_its_kind_needs(word: str) -> None:
    found = files_with(word)
    assert 1 <= len(found) <= OPERATORS[word], found


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_in_one_file(name: str) -> None:
    found = [
        path.name
        for path in (ROOT / "singa_lite" / "layer").glob("*.py")
        if f"class {name}(" in path.read_text()
    ]
    assert len(found) == 1 and name not in (ROOT / "singa_lite" / "layer" / "__init__.py").read_text()


@pytest.mark.parametrize("rule", OPTIMIZERS)
def test_an_optimizer_is_in_two_files(rule: str) -> None:
    assert len(files_with(rule)) == 2


@pytest.mark.parametrize("name", sorted(find_schemes()))
def test_a_scheme_is_in_one_file(name: str) -> None:
    """But for what plans and prints bytes of some of them (bench/), and the texts of errors."""
    assert len(files_with(find_schemes()[name].__name__)) == 1


@pytest.mark.parametrize("transport", sorted(find_messengers()))
def test_messages_over_a_transport_are_in_one_file(transport: str) -> None:
    """tests/comm/test_transports.py shows that collectives are found in a file that is only put there."""
    assert len(files_with(find_messengers()[transport].__name__)) == 1


def test_a_formula_and_a_class_are_an_operator_on_every_device(tmp_path: Path) -> None:
    """In a copy of the package two files are changed, and only what CUDA compiles at first use is compiled."""
    shutil.copytree(
        ROOT / "singa_lite", tmp_path / "singa_lite", ignore=shutil.ignore_patterns("*.so*", "__pycache__")
    )
    for name, text in (("backend/formulas.h", FORMULAS), ("autograd/ops/activation.py", CLASS)):
        with (tmp_path / "singa_lite" / name).open("a") as file:
            file.write(text)
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]\n{USE}"],
        cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(tmp_path / "singa_lite" / "__init__.py")


def test_the_recipes_say_how_many_files_it_takes() -> None:
    rows = {
        line.split("|")[1].strip(): line
        for line in (ROOT / "CONTRIBUTING.md").read_text().splitlines()
        if "|" in line
    }
    for row, count in (
        ("an operator that is a formula by element, or is made of kernels that exist", "at most 2 files"),
        ("an operator with kernels of its own", "at most 5 files"),
        ("a layer", "1 file"),
        ("an optimizer", "at most 2 files"),
        ("a transport", "1 file"),
        ("a dist_option", "1 file"),
    ):
        assert f"{count} of the package" in rows[row], row
