# SPDX-License-Identifier: Apache-2.0
"""Start `singa-lite bench` as a user does, without data."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.comm.processes import fresh_environment
from tests.limits import LIMIT_S

# for images of any shape, in 2 steps of 10 images on 2 ranks
SMALL = """
from singa_lite import layer, model

class Small(model.Model):
    def __init__(self):
        super().__init__()
        self.flatten, self.linear, self.loss = layer.Flatten(), layer.Linear(10), layer.SoftMaxCrossEntropy()

    def forward(self, x):
        return self.linear(self.flatten(x))

    def train_one_batch(self, x, y):
        out = self.forward(x)
        loss = self.loss(out, y)
        self.optimizer(loss)
        return out, loss
"""
TRAINED = ["--synthetic", "40", "--batch-size", "10", "--epochs", "1"]


def bench(
    what: str, *arguments: str | Path, folder: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """`singa-lite bench what arguments` in ``folder``, with variables beside those of this process."""
    return subprocess.run(
        [sys.executable, "-m", "singa_lite", "bench", what, *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        cwd=folder,
        env=fresh_environment(SINGA_LITE_TIMEOUT_S=str(LIMIT_S), **environment),
    )


def without_pictures(folder: Path) -> str:
    """A PYTHONPATH on which matplotlib is missing: importing it takes half of the time of so short a run."""
    (folder / "matplotlib.py").write_text("raise ImportError('not here')")
    return str(folder)


def small_model(folder: Path) -> str:
    """The name of a model of 7,850 parameters, whose file is written to ``folder``."""
    (folder / "small.py").write_text(SMALL)
    return f"{folder / 'small.py'}:Small"


def model_with(folder: Path, body: str) -> str:
    """The name of that model with another end of ``train_one_batch``, whose file is written to ``folder``."""
    whole = "        self.optimizer(loss)\n        return out, loss\n"
    assert whole in SMALL
    lines = "".join(f"        {line}\n" for line in body.splitlines())
    (folder / "other.py").write_text("from singa_lite import autograd\n" + SMALL.replace(whole, lines))
    return f"{folder / 'other.py'}:Small"
