# SPDX-License-Identifier: Apache-2.0
"""Whose code a function, class or module is: recorded steps look at what the program's own names hold."""

from __future__ import annotations

import collections
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from singa_lite import layer
from singa_lite.record.user_code import is_users
from tests.comm.processes import run_command, write_script

CHANGES_A_FACTOR = """
from singa_lite import autograd, layer, model, opt
from singa_lite.tensor import from_numpy, to_numpy
import numpy as np
{setting}
class Net(model.Model):
    def __init__(self):
        super().__init__()
        self.linear = layer.Linear(2)
    def forward(self, x):
        return self.linear(x)
    def train_one_batch(self, x):
        loss = autograd.mse_loss(self.forward(x), x) * {factor}
        self.optimizer(loss)
        return loss
net = Net()
net.set_optimizer(opt.SGD(0.01))
x = from_numpy(np.ones((3, 2), np.float32))
net.compile([x], use_graph=True)
for step in range(4):
    {change}
    expected = np.mean((to_numpy(net.forward(x)) - 1) ** 2) * step
    assert abs(net(x).item() - expected) <= 1e-4 * max(1, expected), (step, expected)
print("right")
"""
GLOBAL = CHANGES_A_FACTOR.format(setting="FACTOR = 0.0", factor="FACTOR", change="FACTOR = float(step)")
# a module of the program that has the name of one of Python's
MODULE = CHANGES_A_FACTOR.format(
    setting="import sched", factor="sched.factor()", change="sched.FACTOR = float(step)"
)


def ways_to_start(folder: Path, way: str) -> list[str]:
    if way == "exec":
        write_script(folder, GLOBAL.replace("FACTOR = float", "globals()['FACTOR'] = float"), "body.py")
        code = f"exec(compile(open({str(folder / 'body.py')!r}).read(), 'body.py', 'exec'), {{}})"
        return [sys.executable, "-c", code]
    if way == "site-packages":
        (folder / "site-packages").mkdir()
        return [sys.executable, str(write_script(folder / "site-packages", GLOBAL))]
    if way == "module":
        write_script(folder, "FACTOR = 0.0\ndef factor():\n    return FACTOR\n", "sched.py")
        return [sys.executable, str(write_script(folder, MODULE))]
    return [sys.executable, "-c", GLOBAL]


@pytest.mark.parametrize("way", ["exec", "site-packages", "module", "-c"])
def test_a_global_of_the_program_is_seen_however_it_is_started(way: str, tmp_path: Path) -> None:
    result = run_command(ways_to_start(tmp_path, way))
    assert (result.returncode, result.stdout, result.stderr) == (0, "right\n", "")


Point = collections.namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (int, False),
        (json, False),
        (json.loads, False),
        (json.JSONDecoder, False),
        (sys, False),
        (collections, False),
        (np, False),
        (np.mean, False),
        (np.ndarray, False),
        (pytest.approx, False),
        (layer.Linear, False),
        (is_users, False),
        (run_command, True),
        (sys.modules[__name__], True),
        (type("Own", (), {"__module__": __name__}), True),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_python_and_installed_packages_are_not_the_programs(value: Any, expected: bool) -> None:
    assert is_users(value) is expected
