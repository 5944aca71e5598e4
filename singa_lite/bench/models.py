# SPDX-License-Identifier: Apache-2.0
"""The models that a benchmark trains: the networks of the MNIST examples by name, or a function of a file."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from .. import layer
from ..errors import OptionError
from ..layer.base import Layer
from ..model import Model
from ..tensor import Tensor

MODELS = ("cnn-mnist", "mlp-mnist")


class Classifier(Model):
    """Layers one after the other, with softmax cross-entropy as the loss.

    Args:
        layers: the first takes x, float32 (n, 1, 28, 28); the last gives logits (n, classes).
    """

    def __init__(self, layers: list[Layer]) -> None:
        super().__init__()
        self.layers = layers
        self.softmax_cross_entropy = layer.SoftMaxCrossEntropy()

    def forward(self, x: Tensor) -> Tensor:
        for each in self.layers:
            x = each(x)
        return x

    def train_one_batch(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        out = self.forward(x)
        loss = self.softmax_cross_entropy(out, y)
        self.optimizer(loss)
        return out, loss


def make_model(name: str) -> Model:
    """Return a new model that is not compiled: one of MODELS, or what ``file.py:function`` returns.

    Raises:
        OptionError: another name, no such file or function, or one that returns no Model.
    """
    if name == "cnn-mnist":  # 431,080 parameters
        convolutions: list[Layer] = [layer.Conv2d(20, 5, activation="RELU"), layer.MaxPool2d(2)]
        convolutions += [layer.Conv2d(50, 5, activation="RELU"), layer.MaxPool2d(2)]
        return Classifier([*convolutions, layer.Flatten(), layer.Linear(500), layer.ReLU(), layer.Linear(10)])
    if name == "mlp-mnist":  # 669,706 parameters
        hidden: list[Layer] = [layer.Linear(512), layer.ReLU(), layer.Linear(512), layer.ReLU()]
        return Classifier([layer.Flatten(), *hidden, layer.Linear(10)])
    made = _function(*split_name(name))()
    if not isinstance(made, Model):
        raise OptionError(f"bench: {name} returned {type(made).__name__}, expected a singa_lite.model.Model")
    return made


def split_name(name: str) -> tuple[Path, str]:
    """Return file and function of ``file.py:function``; OptionError if it is not written so or there is no file."""
    path, colon, function = name.rpartition(":")
    if not colon or not function.isidentifier() or not path.endswith(".py"):
        raise OptionError(
            f"bench: model = {name!r} is not known; choose one of {', '.join(MODELS)}, or file.py:function"
        )
    if not Path(path).is_file():
        raise OptionError(f"bench: model = {name!r}: there is no file {Path(path).resolve()}")
    return Path(path), function


def takes_dist_option(model: Model) -> bool:
    """Return whether ``train_one_batch`` has an argument ``dist_option``, whose default could be another option."""
    return "dist_option" in inspect.signature(model.train_one_batch).parameters


def _function(path: Path, name: str) -> Callable[[], Any]:
    spec = spec_from_file_location("singa_lite_bench_model", path)
    assert spec is not None and spec.loader is not None  # for every .py file there is a loader
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(path.resolve().parent))  # as for a script: it may import its neighbours
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        raise OptionError(f"bench: {path} has no function {name!r} that returns a model")
    return function  # type: ignore[no-any-return]
