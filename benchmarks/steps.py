# SPDX-License-Identifier: Apache-2.0
"""One training step of the same networks here and in PyTorch: forward, loss, backward, SGD with momentum.

The networks here are those of examples/model/; the ones of PyTorch are written to match them, and their numbers of
parameters are checked.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
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
PARAMETERS = {
    "cnn": 431_080,
    "mlp": 669_706,
    "resnet20": 272_474,
    "resnet18": 11_173_962,
    "resnet50": 25_557_032,
}
OURS = ["eager", "graph", "bf16"]  # bf16: recorded, mixed precision
MIXED = {
    "bf16": "torch autocast",
    "fp16": "torch amp",
}  # mixed precision here, and its like there; fp16 on GPUs
TORCH = ["torch eager", "torch channels_last", "torch compile", "torch autocast", "torch autocast compile"]
LR, MOMENTUM, WEIGHT_DECAY = 0.005, 0.9, 1e-5
CLASSES = {"resnet50": 1000}  # of the others: 10

Step = Callable[[], Any]


def batch(model: str, seed: int = 0, shape: tuple[int, ...] = ()) -> tuple[np.ndarray, np.ndarray]:
    """Normal x, float32 of ``shape`` (that of SHAPES if not given), and labels, int64 (n,)."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape or SHAPES[model]).astype(np.float32)
    return x, rng.integers(0, CLASSES.get(model, 10), len(x))


def make_step(mode: str, model: str, x: np.ndarray, labels: np.ndarray) -> Step:
    """The step of ``model`` in ``mode``, out of OURS or TORCH, in this process alone."""
    return torch_step(mode, model, x, labels) if mode in TORCH else our_step(mode, model, x, labels)


# ---- here --------------------------------------------------------------------------------------------


def find_network(model: str) -> Any:
    """The class of examples/model/ with that name."""
    from model.cnn import CNN
    from model.mlp import MLP
    from model.resnet import ResNet18, ResNet20, ResNet50

    return {"cnn": CNN, "mlp": MLP, "resnet20": ResNet20, "resnet18": ResNet18, "resnet50": ResNet50}[model]


def our_step(
    mode: str,
    model: str,
    x: np.ndarray,
    labels: np.ndarray,
    is_distributed: bool = False,
    *,
    device: Any = None,
    communicator: Any = None,
) -> partial[Any]:
    """A call of the model, on the CPU unless a device is given, in the dtype of ``x``.

    With ``is_distributed`` its SGD is wrapped by DistOpt, whose gradients travel in the mode's precision, over the
    process's communicator unless one is given.
    """
    from singa_lite import opt, tensor

    class Plain(opt.SGD):
        is_recordable = True  # else a step with a __call__ of its own is not recorded

        def __call__(
            self, loss: tensor.Tensor, dist_option: str | None = None, spars: float | None = None
        ) -> None:  # the models hand these on for DistOpt
            super().__call__(loss)

    network = find_network(model)()
    tensors = tensor.from_numpy(x, device), tensor.from_numpy(labels.astype(np.int32), device)
    sgd = (opt.SGD if is_distributed else Plain)(lr=LR, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY)
    precision = mode if mode in MIXED else "fp32"
    if mode == "fp16":  # scales the loss, alone too
        network.set_optimizer(opt.DistOpt(sgd, check_finite="skip", communicator=communicator))
    else:
        network.set_optimizer(opt.DistOpt(sgd, communicator=communicator) if is_distributed else sgd)
    network.compile([tensors[0]], use_graph=mode != "eager", precision=precision)
    check_count(model, sum(value.size() for value in network.get_params().values()))
    options = ["bf16"] if mode == "bf16" else []  # of the wire too; a caller may add its own to the others
    return partial(network, *tensors, *options)


def check_count(model: str, count: int) -> None:
    if count != PARAMETERS[model]:
        raise RuntimeError(f"{model}: {count} parameters, not {PARAMETERS[model]}: another network")


# ---- PyTorch -----------------------------------------------------------------------------------------


def torch_step(
    mode: str, model: str, x: np.ndarray, labels: np.ndarray, wrap: Any = None, device: str = "cpu"
) -> Step:
    """``wrap``, e.g. DistributedDataParallel, is called on the network.

    On a GPU "torch compile" replays CUDA graphs; "torch deterministic" is eager without cuDNN's algorithms whose sums
    have no fixed order, as ours are; "torch amp" computes in float16 where PyTorch thinks fit, and "torch autocast" in
    bfloat16, with channels last.
    """
    import torch
    from torch import nn

    if device == "cpu":
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    torch.manual_seed(0)
    network: Any = torch_network(model).to(device)
    check_count(model, sum(value.numel() for value in network.parameters()))
    inputs, targets = torch.from_numpy(x).to(device), torch.from_numpy(labels).to(device)
    if mode in ("torch channels_last", "torch amp", "torch autocast") and inputs.ndim == 4:
        network = network.to(memory_format=torch.channels_last)
        inputs = inputs.contiguous(memory_format=torch.channels_last)
    # fused: one call for all parameters, the fastest of its three forms (loop, foreach, fused)
    optimizer = torch.optim.SGD(
        network.parameters(), lr=LR, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY, fused=True
    )
    network = wrap(network) if wrap else network
    options = {} if device == "cpu" else {"mode": "reduce-overhead"}
    call = torch.compile(network, **options) if mode.endswith("compile") else network

    def step() -> Any:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(call(inputs), targets)
        loss.backward()
        optimizer.step()
        return loss

    def deterministic_step() -> Any:
        torch.backends.cudnn.deterministic = True
        try:
            return step()
        finally:
            torch.backends.cudnn.deterministic = False

    def autocast_step() -> Any:
        optimizer.zero_grad()
        with torch.autocast(device, torch.bfloat16):
            loss = nn.functional.cross_entropy(call(inputs), targets)
        loss.backward()
        optimizer.step()
        return loss

    scaler = torch.amp.GradScaler(device)

    def half_step() -> Any:
        optimizer.zero_grad()
        with torch.autocast(device, torch.float16):
            loss = nn.functional.cross_entropy(call(inputs), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss

    others = {
        "torch amp": half_step,
        "torch autocast": autocast_step,
        "torch autocast compile": autocast_step,
        "torch deterministic": deterministic_step,
    }
    return others.get(mode, step)


def torch_network(model: str) -> Any:
    """The network of examples/model/ in PyTorch's modules."""
    from torch import nn

    if model == "cnn":
        return nn.Sequential(
            nn.Conv2d(1, 20, 5), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(20, 50, 5), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(800, 500), nn.ReLU(), nn.Linear(500, 10),
        )  # fmt: skip
    if model == "mlp":
        return nn.Sequential(
            nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
        )
    if model == "resnet50":
        return torch_resnet((64, 128, 256, 512), (3, 4, 6, 3), is_deep=True)
    stages, num_blocks = {"resnet20": ((16, 32, 64), 3), "resnet18": ((64, 128, 256, 512), 2)}[model]
    return torch_resnet(stages, [num_blocks] * len(stages))


def torch_resnet(stages: Sequence[int], num_blocks: Sequence[int], is_deep: bool = False) -> Any:
    """examples/model/resnet.py, deep or not; inplace ReLU, as torchvision's ResNet has it."""
    import torch
    from torch import nn

    def convolution(inputs: int, outputs: int, kernel_size: int = 3, stride: int = 1) -> list[Any]:
        padding = kernel_size // 2
        return [
            nn.Conv2d(inputs, outputs, kernel_size, stride, padding, bias=False),
            nn.BatchNorm2d(outputs, momentum=0.1),
        ]

    def body(inputs: int, width: int, stride: int) -> list[Any]:
        if not is_deep:
            return [
                *convolution(inputs, width, 3, stride),
                nn.ReLU(inplace=True),
                *convolution(width, width),
            ]
        return [
            *convolution(inputs, width, 1), nn.ReLU(inplace=True),
            *convolution(width, width, 3, stride), nn.ReLU(inplace=True),
            *convolution(width, 4 * width, 1),
        ]  # fmt: skip

    class Block(nn.Module):
        def __init__(self, inputs: int, width: int, stride: int) -> None:
            super().__init__()
            outputs = 4 * width if is_deep else width
            self.body = nn.Sequential(*body(inputs, width, stride))
            changes = stride != 1 or inputs != outputs
            self.shortcut = (
                nn.Sequential(*convolution(inputs, outputs, 1, stride)) if changes else nn.Identity()
            )
            self.relu = nn.ReLU(inplace=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.relu(self.body(x) + self.shortcut(x))

    blocks: list[Any] = []
    inputs = stages[0]
    for stage, width in enumerate(stages):
        for number in range(num_blocks[stage]):
            blocks.append(Block(inputs, width, 2 if stage and not number else 1))
            inputs = 4 * width if is_deep else width
    stem = convolution(3, stages[0], 7, 2) if is_deep else convolution(3, stages[0])
    pool = [nn.MaxPool2d(3, 2, 1)] if is_deep else []
    return nn.Sequential(
        *stem, nn.ReLU(inplace=True), *pool, *blocks,
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000 if is_deep else 10),
    )  # fmt: skip
