# SPDX-License-Identifier: Apache-2.0
"""Time of a training step of the transformer of examples/train_text.py beside PyTorch on the CPU.

    python benchmarks/transformer.py                                        1 and 2 threads
    python benchmarks/transformer.py --threads 1 --layers 2 --rounds 6
    python benchmarks/transformer.py --torch-python ~/torch/bin/python      PyTorch installed elsewhere

Every mode is a process of its own that is asked in rounds for a few steps, so that all see the machine in the same
state; the first round, in which graphs are recorded and compiled, is not counted. A step is forward, loss, backward and
Adam, on 32 pieces of 128 characters out of 103 different ones, 4 layers, width 128 and 4 heads unless told otherwise;
PyTorch's attention is its scaled_dot_product_attention. "bf16" is a recorded step in mixed precision, and so are both
of PyTorch's modes with "autocast". Printed: median step time, and each of our modes as a share of PyTorch's eager and
best mode. torch.compile needs a C++ compiler.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from interleaved import Group, machine, serve, time_interleaved
from steps import MIXED, Step

OURS = ["eager", "graph", "bf16"]  # bf16: recorded, mixed precision
TORCH = ["torch eager", "torch compile", "torch autocast", "torch autocast compile"]
CHARACTERS, LR = 103, 1e-3
HINT = " (is PyTorch installed? see --torch-python)"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for option, default in (("batch", 32), ("length", 128), ("layers", 4), ("width", 128), ("heads", 4)):
        parser.add_argument(f"--{option}", type=int, default=default)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--modes", nargs="+", choices=OURS + TORCH, default=OURS + TORCH)
    parser.add_argument("--rounds", type=int, default=12, help="rounds of every mode")
    parser.add_argument("--steps", type=int, default=5, help="steps in a round")
    parser.add_argument("--torch-python", default=sys.executable, help="a Python that has PyTorch")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        make = torch_step if arguments.worker in TORCH else our_step
        serve(make(arguments.worker, arguments))
        return
    print(machine())
    print(
        f"{'threads':>7} {'mode':22} {'median ms':>9} {'/ eager':>8} {'/ best':>8}  (of PyTorch)", flush=True
    )
    for threads in arguments.threads:
        report(threads, measure(threads, arguments))


def measure(threads: int, arguments: argparse.Namespace) -> dict[str, list[float]]:
    """{mode: step times in ms}; the modes alternate."""
    sizes = [
        f"--{option}={getattr(arguments, option)}"
        for option in ("batch", "length", "layers", "width", "heads")
    ]

    def start(mode: str) -> Group:
        python = arguments.torch_python if mode in TORCH else sys.executable
        return Group([[python, __file__, "--worker", mode, *sizes]], threads)

    return time_interleaved(
        {mode: partial(start, mode) for mode in arguments.modes}, arguments.rounds, arguments.steps, HINT
    )


def report(threads: int, times: dict[str, list[float]]) -> None:
    medians = {mode: statistics.median(values) for mode, values in times.items()}
    theirs = {mode: medians[mode] for mode in TORCH if mode in medians}
    for mode, median in medians.items():
        shares = ""
        if mode in OURS and theirs:
            eager = f"{median / theirs['torch eager']:8.2f}" if "torch eager" in theirs else " " * 8
            shares = f"{eager} {median / min(theirs.values()):8.2f}"
        print(f"{threads:7} {mode:22} {median:9.1f} {shares}")
    print(f"{'':7} load {os.getloadavg()[0]:.1f}", flush=True)


def batch(arguments: argparse.Namespace) -> tuple[np.ndarray, np.ndarray]:
    """Ids (batch, length) of characters, and those that follow."""
    ids = np.random.default_rng(0).integers(0, CHARACTERS, (arguments.batch, arguments.length + 1))
    return ids[:, :-1].copy(), ids[:, 1:].copy()


def number_of_parameters(arguments: argparse.Namespace) -> int:
    width = arguments.width
    block = 12 * width * width + 13 * width  # four norms' vectors, projections, and what the Linears add
    return (2 * CHARACTERS + arguments.length + 2) * width + CHARACTERS + arguments.layers * block


def check_count(count: int, arguments: argparse.Namespace) -> None:
    if count != number_of_parameters(arguments):
        raise RuntimeError(f"{count} parameters, not {number_of_parameters(arguments)}: another network")


def our_step(mode: str, arguments: argparse.Namespace, device: Any = None) -> Step:
    """A call of the example's model, in this process alone, on the CPU unless a device is given."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
    from model.transformer import Transformer

    from singa_lite import autograd, opt, tensor

    class Alone(Transformer):
        def train_one_batch(self, x: Any, y: Any) -> Any:  # the example's gives DistOpt its options
            out = self.forward(x)
            loss = autograd.softmax_cross_entropy(
                autograd.reshape(out, (-1, CHARACTERS)), autograd.reshape(y, (-1,))
            )
            self.optimizer(loss)
            return out, loss

    network = Alone(CHARACTERS, arguments.length, arguments.layers, arguments.width, arguments.heads)
    x, y = (tensor.from_numpy(ids.astype(np.int32), device) for ids in batch(arguments))
    network.set_optimizer(opt.Adam(lr=LR))
    network.compile([x], use_graph=mode != "eager", precision=mode if mode in MIXED else "fp32")
    check_count(sum(value.size() for value in network.get_params().values()), arguments)
    if mode != "eager":
        network(x, y)
        if reason := network.graph_info()[0].break_reason:
            raise RuntimeError(f"the step was not recorded: {reason}")

    def step() -> Any:
        return network(x, y)

    return step


def torch_step(mode: str, arguments: argparse.Namespace, device: str = "cpu") -> Step:
    """The same network and step in PyTorch."""
    import torch
    from torch import nn
    from torch.nn import functional

    if device == "cpu":
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    torch.manual_seed(0)
    width, heads = arguments.width, arguments.heads

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention_norm, self.norm = nn.LayerNorm(width), nn.LayerNorm(width)
            self.projection, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.grow, self.shrink = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x: Any) -> Any:
            split = self.projection(self.attention_norm(x)).view(*x.shape[:2], 3, heads, width // heads)
            q, k, v = split.permute(2, 0, 3, 1, 4)
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.output(y.transpose(1, 2).reshape(x.shape))
            return x + self.shrink(functional.gelu(self.grow(self.norm(x))))

    class Transformer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.characters = nn.Embedding(CHARACTERS, width)
            self.positions = nn.Embedding(arguments.length, width)
            self.blocks = nn.Sequential(*[Block() for _ in range(arguments.layers)])
            self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CHARACTERS)
            self.register_buffer("numbers", torch.arange(arguments.length))

        def forward(self, x: Any) -> Any:
            return self.head(self.norm(self.blocks(self.characters(x) + self.positions(self.numbers))))

    network = Transformer().to(device)
    check_count(sum(value.numel() for value in network.parameters()), arguments)
    x, y = (torch.from_numpy(ids).to(device) for ids in batch(arguments))
    optimizer = torch.optim.Adam(network.parameters(), lr=LR, fused=True)
    options = {} if device == "cpu" else {"mode": "reduce-overhead"}  # CUDA graphs
    call = torch.compile(network, **options) if mode.endswith("compile") else network
    is_mixed = "autocast" in mode

    def step() -> Any:
        optimizer.zero_grad()
        with torch.autocast(device, torch.bfloat16, enabled=is_mixed):
            loss = functional.cross_entropy(call(x).flatten(0, 1), y.flatten())
        loss.backward()
        optimizer.step()
        return loss

    return step


if __name__ == "__main__":
    main()
