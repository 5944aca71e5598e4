# SPDX-License-Identifier: Apache-2.0
"""The models that a benchmark trains: networks of the examples by name, or a function of a file."""

from __future__ import annotations

import inspect
import os
import sys
import traceback
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from .. import autograd, layer
from ..errors import OptionError, SingaLiteError
from ..layer.base import Layer
from ..model import Model
from ..tensor import Tensor

MODELS = ("cnn-mnist", "mlp-mnist", "resnet20-cifar10")
STAGES = (16, 32, 64)  # channels of ResNet-20


class Classifier(Model):
    """Layers one after the other, with softmax cross-entropy as the loss.

    Args:
        layers: the first takes x, float32 (n, channels, h, w); the last gives logits (n, classes).
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


class Block(Layer):
    """relu(bn(conv3x3(relu(bn(conv3x3(x))))) + shortcut(x)), as in examples/model/resnet.py.

    Args:
        channels: of the result.
        is_first: of a stage that halves the image: the first convolution has stride 2, the shortcut is a 1x1 one.

    Source: He et al., "Deep Residual Learning for Image Recognition", 2015; the shortcut is option B.
    """

    def __init__(self, channels: int, is_first: bool) -> None:
        super().__init__()
        stride = 2 if is_first else 1
        self.conv1, self.bn1 = _convolution(channels, 3, stride), layer.BatchNorm2d(momentum=0.1)
        self.conv2, self.bn2 = _convolution(channels, 3), layer.BatchNorm2d(momentum=0.1)
        self.is_first = is_first
        if is_first:
            self.conv_shortcut = _convolution(channels, 1, stride)
            self.bn_shortcut = layer.BatchNorm2d(momentum=0.1)

    def forward(self, x: Tensor) -> Tensor:
        y = autograd.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return autograd.relu(y + (self.bn_shortcut(self.conv_shortcut(x)) if self.is_first else x))


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
    if name == "resnet20-cifar10":  # 272,474 parameters
        stem: list[Layer] = [_convolution(STAGES[0], 3), layer.BatchNorm2d(momentum=0.1), layer.ReLU()]
        blocks = [
            Block(width, stage > 0 and not number)
            for stage, width in enumerate(STAGES)
            for number in range(3)
        ]
        return Classifier([*stem, *blocks, layer.AvgPool2d(8), layer.Flatten(), layer.Linear(10)])
    made = _function(*split_name(name))()
    if not isinstance(made, Model):
        raise OptionError(f"bench: {name} returned {type(made).__name__}, expected a singa_lite.model.Model")
    return made


def check_model(name: str) -> None:
    """Raise OptionError unless ``make_model`` returns a model: a file is run, and its function called, here.

    Python's path, which ranks get, stays as it is.
    """
    if name in MODELS:
        return
    path, _ = split_name(name)
    before = list(sys.path)
    try:
        make_model(name)
    except SingaLiteError:
        raise
    except (Exception, SystemExit) as error:
        lines = [
            frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.endswith(path.name)
        ]
        where = f", line {lines[-1].lineno}" if lines else ""
        raise OptionError(
            f"bench: model = {name!r} failed with {type(error).__name__}: {error} ({path}{where})"
        ) from error
    finally:
        sys.path[:] = before


def split_name(name: str) -> tuple[Path, str]:
    """Return file and function of ``file.py:function``; OptionError if it is not written so or there is no file."""
    path, colon, function = name.rpartition(":")
    if not colon or not function.isidentifier() or not path.endswith(".py"):
        raise OptionError(
            f"bench: model = {name!r} is not known; choose one of {', '.join(MODELS)}, or file.py:function"
        )
    if not os.path.isfile(path):
        raise OptionError(f"bench: model = {name!r}: there is no file {Path(path).resolve()}")
    return Path(path), function


def step_arguments(model: Model, option: str) -> dict[str, str]:
    """Return the keyword arguments of a step with a dist_option, for ``train_one_batch``.

    That is the argument ``dist_option`` where there is one, as its default could be another option; else none.
    """
    has_argument = "dist_option" in inspect.signature(model.train_one_batch).parameters
    return {"dist_option": option} if has_argument else {}


def _convolution(channels: int, kernel_size: int, stride: int = 1) -> layer.Conv2d:
    """Return one without bias: the batch norm after it has one."""
    return layer.Conv2d(channels, kernel_size, stride=stride, padding=kernel_size // 2, bias=False)


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
