# SPDX-License-Identifier: Apache-2.0
"""One training step of the same networks here and in PyTorch: forward, loss, backward, SGD with momentum.

The networks here are those of examples/model/; the ones of PyTorch are written to match them, and their numbers of
parameters are checked.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

SHAPES = {
    "cnn": (64, 1, 28, 28),
    "mlp": (64, 784),
    "resnet20": (64, 3, 32, 32),
    "resnet18": (32, 3, 32, 32),
}
PARAMETERS = {"cnn": 431_080, "mlp": 669_706, "resnet20": 272_474, "resnet18": 11_173_962}
OURS = ["eager", "graph"]
TORCH = ["torch eager", "torch channels_last", "torch compile"]
LR, MOMENTUM, WEIGHT_DECAY, CLASSES = 0.005, 0.9, 1e-5, 10

Step = Callable[[], Any]


def batch(model: str, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Normal x, float32 of the model's shape, and labels, int64 (n,)."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(SHAPES[model]).astype(np.float32)
    return x, rng.integers(0, CLASSES, x.shape[0])


def make_step(mode: str, model: str, x: np.ndarray, labels: np.ndarray) -> Step:
    """The step of ``model`` in ``mode``, out of OURS or TORCH, in this process alone."""
    return torch_step(mode, model, x, labels) if mode in TORCH else our_step(mode, model, x, labels)


# ---- here --------------------------------------------------------------------------------------------


def our_step(mode: str, model: str, x: np.ndarray, labels: np.ndarray, is_distributed: bool = False) -> Step:
    """A call of the model; with ``is_distributed`` its SGD is wrapped by DistOpt, float32 gradients."""
    from model.cnn import CNN
    from model.mlp import MLP
    from model.resnet import ResNet18, ResNet20

    from singa_lite import opt, tensor

    class Plain(opt.SGD):
        def __call__(self, loss, dist_option=None, spars=None):  # the models hand these on for DistOpt
            super().__call__(loss)

    network = {"cnn": CNN, "mlp": MLP, "resnet20": ResNet20, "resnet18": ResNet18}[model]()
    tensors = tensor.from_numpy(x), tensor.from_numpy(labels.astype(np.int32))
    sgd = (opt.SGD if is_distributed else Plain)(lr=LR, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY)
    network.set_optimizer(opt.DistOpt(sgd) if is_distributed else sgd)
    network.compile([tensors[0]], use_graph=mode == "graph")
    check_count(model, sum(value.size() for value in network.get_params().values()))
    return lambda: network(*tensors)


def check_count(model: str, count: int) -> None:
    if count != PARAMETERS[model]:
        raise RuntimeError(f"{model}: {count} parameters, not {PARAMETERS[model]}: another network")


# ---- PyTorch -----------------------------------------------------------------------------------------


def torch_step(mode: str, model: str, x: np.ndarray, labels: np.ndarray, wrap: Any = None) -> Step:
    """``wrap``, e.g. DistributedDataParallel, is called on the network."""
    import torch
    from torch import nn

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    torch.manual_seed(0)
    network: Any = torch_network(model)
    check_count(model, sum(value.numel() for value in network.parameters()))
    inputs, targets = torch.from_numpy(x), torch.from_numpy(labels)
    if mode == "torch channels_last" and inputs.ndim == 4:
        network = network.to(memory_format=torch.channels_last)
        inputs = inputs.contiguous(memory_format=torch.channels_last)
    # fused: one call for all parameters, the fastest of its three forms (loop, foreach, fused) on the CPU
    optimizer = torch.optim.SGD(
        network.parameters(), lr=LR, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY, fused=True
    )
    network = wrap(network) if wrap else network
    call = torch.compile(network) if mode == "torch compile" else network

    def step() -> Any:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(call(inputs), targets)
        loss.backward()
        optimizer.step()
        return loss

    return step


def torch_network(model: str) -> Any:
    """The network of examples/model/ in PyTorch's modules."""
    from torch import nn

    if model == "cnn":
        return nn.Sequential(
            nn.Conv2d(1, 20, 5), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(20, 50, 5), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(800, 500), nn.ReLU(), nn.Linear(500, CLASSES),
        )  # fmt: skip
    if model == "mlp":
        return nn.Sequential(
            nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, CLASSES)
        )
    stages, num_blocks = {"resnet20": ((16, 32, 64), 3), "resnet18": ((64, 128, 256, 512), 2)}[model]
    return torch_resnet(stages, num_blocks)


def torch_resnet(stages: tuple[int, ...], num_blocks: int) -> Any:
    """examples/model/resnet.py; inplace ReLU, as torchvision's ResNet has it."""
    import torch
    from torch import nn

    def convolution(inputs: int, outputs: int, kernel_size: int = 3, stride: int = 1) -> list[Any]:
        padding = kernel_size // 2
        return [
            nn.Conv2d(inputs, outputs, kernel_size, stride, padding, bias=False),
            nn.BatchNorm2d(outputs, momentum=0.1),
        ]

    class Block(nn.Module):
        def __init__(self, inputs: int, outputs: int, stride: int) -> None:
            super().__init__()
            self.body = nn.Sequential(
                *convolution(inputs, outputs, stride=stride),
                nn.ReLU(inplace=True),
                *convolution(outputs, outputs),
            )
            changes = stride != 1 or inputs != outputs
            self.shortcut = (
                nn.Sequential(*convolution(inputs, outputs, 1, stride)) if changes else nn.Identity()
            )
            self.relu = nn.ReLU(inplace=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.relu(self.body(x) + self.shortcut(x))

    blocks: list[Any] = []
    for stage, outputs in enumerate(stages):
        for number in range(num_blocks):
            inputs = stages[stage - 1] if stage and not number else outputs
            blocks.append(Block(inputs, outputs, 2 if stage and not number else 1))
    return nn.Sequential(
        *convolution(3, stages[0]), nn.ReLU(inplace=True), *blocks,
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(stages[-1], CLASSES),
    )  # fmt: skip
