# SPDX-License-Identifier: Apache-2.0
"""What a fresh process imports: the launcher hardly anything, a script what it names."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import singa_lite
from tests.comm.processes import run_command, write_script

LAUNCHER = """
import sys
from singa_lite import cli
assert cli.main(["run", "-n", "2", *sys.argv[1:]]) == 0
print("launcher:", sorted({"numpy", "singa_lite.tensor"} & set(sys.modules)))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="several ranks need Linux")
def test_the_launcher_imports_no_numpy(tmp_path: Path) -> None:
    script = write_script(tmp_path, "import sys, singa_lite.tensor; print('numpy' in sys.modules)")
    result = run_command([sys.executable, "-c", LAUNCHER, str(script)])
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == ["[0] True", "[1] True", "launcher: []"]


def test_what_few_scripts_need_is_not_imported_for_all() -> None:
    script = (
        "import sys, numpy; before = {*sys.modules}; from singa_lite import autograd, data, layer, model, opt, tensor; "
        "print(*{*sys.modules} - before)"
    )
    seldom = {
        "ssl",
        "http",
        "tarfile",
        "zipfile",
        "hashlib",
        "subprocess",
        "multiprocessing",
        "mpi4py",
        "cupy",
    }
    result = run_command([sys.executable, "-c", script])
    assert result.returncode == 0, result.stderr
    assert "singa_lite.data.cifar" in result.stdout and seldom.isdisjoint(result.stdout.split())


@pytest.mark.parametrize(
    "statements",
    [
        "import singa_lite.autograd as autograd",
        "from singa_lite import autograd",
        "import singa_lite; autograd = singa_lite.autograd",
        "from singa_lite.autograd import Linear; import singa_lite.autograd as autograd",
    ],
)
def test_layers_are_found_in_autograd_however_it_is_imported(statements: str) -> None:
    check = f"""
{statements}
from singa_lite import layer
assert autograd.Linear is layer.Linear and autograd.Conv2d is layer.Conv2d
assert not hasattr(autograd, "Lineal") and {{"Linear", "relu"}} <= set(dir(autograd)) and "Linear" in vars(autograd)
"""
    result = run_command([sys.executable, "-c", check])
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("start", ["from singa_lite.tensor import Tensor", "from singa_lite import tensor"])
def test_a_tensor_alone_has_its_operators(start: str) -> None:
    check = f"""
{start}
import numpy as np
a = {"Tensor" if "Tensor" in start else "tensor.Tensor"}(data=np.ones((2, 2)))
print((a + a * 2 - a @ a)[0].shape, [row.shape for row in -a], abs(a).dtype)
try:
    a.backward()
except Exception as error:
    print(type(error).__name__)
"""
    result = run_command([sys.executable, "-c", check])
    assert result.stdout.splitlines() == ["(1, 2) [(1, 2), (1, 2)] float32", "GraphError"], result.stderr


def test_each_public_name_may_be_the_first() -> None:
    check = """
import os, singa_lite
for name in singa_lite.__all__:
    assert name in dir(singa_lite)
    if os.fork() == 0:  # nothing else is imported yet
        print(name, bool(getattr(singa_lite, name)), flush=True)
        os._exit(0)
    os.wait()
"""
    result = run_command([sys.executable, "-c", check])
    assert result.stdout.splitlines() == [f"{name} True" for name in singa_lite.__all__], result.stderr


def test_another_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'singa_lite' has no attribute 'layers'"):
        singa_lite.layers  # noqa: B018
    with pytest.raises(AttributeError, match=r"module 'singa_lite\.autograd' has no attribute 'Lineal'"):
        singa_lite.autograd.Lineal  # noqa: B018
