# SPDX-License-Identifier: Apache-2.0
"""Time of single operators and layers, called eagerly, beside PyTorch's on the CPU.

    python benchmarks/operators.py                                   all, one thread
    python benchmarks/operators.py --threads 2 --only pow lstm

Both libraries are in this process and take turns, so the Python that runs it must have PyTorch. Printed, of each case:
medians of forward and backward, all inputs and weights taking gradients, and of forward alone without records for a
backward; each with our time as a share of PyTorch's.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from interleaved import machine

IMAGES, SQUARE, SMALL = (16, 64, 28, 28), (1024, 1024), (8, 8)
SECONDS = 1.0  # for the rounds of a case, about


class Case(NamedTuple):
    """One way of calling an operator.

    Attributes:
        name: what --only chooses by.
        shapes: of the inputs, which are float32.
        ours, theirs: of Tensors, one result.
        positive: whether the inputs are.
        weights: of PyTorch's layer.
    """

    name: str
    shapes: Sequence[tuple[int, ...]]
    ours: Callable[..., Any]
    theirs: Callable[..., Any]
    positive: bool = False
    weights: Sequence[Any] = ()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", nargs="+", default=[], help="cases whose names begin so")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = str(arguments.threads)
    import torch

    torch.set_num_threads(arguments.threads)
    print(f"{machine()}; {arguments.threads} threads")
    print(
        f"{'':24} {'ms':>8} {'PyTorch':>8} {'share':>6}  {'forward':>8} {'PyTorch':>8} {'share':>6}",
        flush=True,
    )
    for case in cases():
        if not arguments.only or case.name.startswith(tuple(arguments.only)):
            both, alone = measure(case)
            columns = "  ".join(
                f"{ours:8.3f} {theirs:8.3f} {ours / theirs:6.2f}" for ours, theirs in (both, alone)
            )
            print(f"{case.name:24} {columns}", flush=True)


def cases() -> list[Case]:
    import torch
    import torch.nn.functional as F

    from singa_lite import autograd as A

    def transpose(axes: tuple[int, ...]) -> tuple[Callable[..., Any], Callable[..., Any]]:
        return lambda x: A.transpose(x, axes), lambda x: x.permute(axes).contiguous()

    unary = {
        "relu": (A.relu, torch.relu),
        "sigmoid": (A.sigmoid, torch.sigmoid),
        "tanh": (A.tanh, torch.tanh),
        "exp": (A.exp, torch.exp),
        "abs": (A.abs, torch.abs),
        "elu": (A.elu, F.elu),
        "gelu": (A.gelu, F.gelu),
        "leakyrelu": (A.leakyrelu, F.leaky_relu),
        "clip": (lambda x: A.clip(x, -1.0, 1.0), lambda x: torch.clamp(x, -1.0, 1.0)),
        "pow: x ** 2": (lambda x: x**2, lambda x: x**2),
        "dropout": (lambda x: A.dropout(x, 0.5), lambda x: F.dropout(x, 0.5)),
        "transpose": transpose((1, 0)),
    }
    binary = {
        "add": (lambda a, b: a + b, lambda a, b: a + b),
        "div": (lambda a, b: a / b, lambda a, b: a / b),
        "pow: x ** y": (lambda a, b: a**b, lambda a, b: a**b),
        "max": (A.max, torch.maximum),
        "mse_loss": (A.mse_loss, F.mse_loss),
    }
    images = {
        "softmax: axis 1 of 4": (lambda x: A.softmax(x, 1), lambda x: F.softmax(x, 1)),
        "transpose: to NHWC": transpose((0, 2, 3, 1)),
        "max_pool: 2, stride 2": (lambda x: A.max_pool_2d(x, 2, 2), lambda x: F.max_pool2d(x, 2, 2)),
        "max_pool: 3, stride 2": (lambda x: A.max_pool_2d(x, 3, 2, 1), lambda x: F.max_pool2d(x, 3, 2, 1)),
        "avg_pool: 3, stride 2": (lambda x: A.avg_pool_2d(x, 3, 2, 1), lambda x: F.avg_pool2d(x, 3, 2, 1)),
    }
    found = [Case(name, [SQUARE], *pair) for name, pair in unary.items()]
    found += [Case(name, [SQUARE, SQUARE], *pair, positive=True) for name, pair in binary.items()]
    found += [
        Case("log", [SQUARE], A.log, torch.log, positive=True),
        Case("pow: x ** 1.7", [SQUARE], lambda x: x**1.7, lambda x: x**1.7, positive=True),
        Case("sum: rows", [SQUARE], lambda x: A.reduce_sum(x, [0], 0), lambda x: x.sum(0)),
        Case("softmax: rows", [(1024, 1000)], lambda x: A.softmax(x, 1), lambda x: F.softmax(x, 1)),
        Case("softmax: columns", [SQUARE], lambda x: A.softmax(x, 0), lambda x: F.softmax(x, 0)),
        Case("layer_norm", [(4096, 256), (256,), (256,)], A.layer_norm, _layer_norm),
        Case("matmul", [(512, 512)] * 2, A.matmul, torch.matmul),
        Case("conv2d: 3x3", [IMAGES, (64, 64, 3, 3)], *_convolution(1, 1)),
        Case("conv2d: 1x1", [IMAGES, (128, 64, 1, 1)], *_convolution(0, 1)),
        Case("conv2d: depthwise", [IMAGES, (64, 1, 3, 3)], *_convolution(1, 64)),
    ]
    found += [Case(name, [(16, 64, 56, 56)], *pair) for name, pair in images.items()]
    found += [  # how long a call takes that computes next to nothing
        Case("64 elements: relu", [SMALL], *unary["relu"]),
        Case("64 elements: x * 2.5", [SMALL], lambda x: x * 2.5, lambda x: x * 2.5),
        Case("64 elements: add", [SMALL, SMALL], *binary["add"]),
        Case("64 elements: matmul", [SMALL, SMALL], A.matmul, torch.matmul),
    ]
    found += [
        _recurrent(mode, *sizes) for mode in ("lstm", "gru", "tanh") for sizes in ((32, 16, 256), (8, 64, 64))
    ]
    return found


def _layer_norm(x: Any, scale: Any, bias: Any) -> Any:
    import torch

    return torch.nn.functional.layer_norm(x, scale.shape, scale, bias)


def _convolution(padding: int, groups: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
    import torch

    from singa_lite import autograd

    return (
        lambda x, w: autograd.conv2d(x, w, padding=padding, group=groups),
        lambda x, w: torch.nn.functional.conv2d(x, w, padding=padding, groups=groups),
    )


def _recurrent(mode: str, batch: int, steps: int, hidden: int) -> Case:
    """A layer of 128 features, over all steps; weights take gradients beside the input."""
    import torch

    from singa_lite import layer

    kind = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU, "tanh": torch.nn.RNN}[mode]
    ours, theirs = layer.CudnnRNN(hidden, rnn_mode=mode), kind(128, hidden, batch_first=True)
    return Case(
        f"{mode}: {batch} of {steps}, {hidden}",
        [(batch, steps, 128)],
        ours,
        lambda x: theirs(x)[0],
        weights=list(theirs.parameters()),
    )


def measure(case: Case) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return the medians in ms, (ours, PyTorch's), of both passes and of forward alone."""
    import torch

    from singa_lite import autograd, tensor

    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(shape, np.float32) for shape in case.shapes]
    if case.positive:
        arrays = [np.abs(array) + np.float32(0.1) for array in arrays]
    xs = [tensor.Tensor(data=array, stores_grad=True) for array in arrays]
    ts = [torch.from_numpy(array.copy()).requires_grad_() for array in arrays]
    autograd.training = True
    y = case.ours(*xs)
    dy = rng.standard_normal(y.shape, np.float32)
    ours_dy, theirs_dy = tensor.from_numpy(dy), torch.from_numpy(dy).reshape(case.theirs(*ts).shape)

    def ours() -> None:
        autograd.gradients(case.ours(*xs), ours_dy)

    def theirs() -> None:
        torch.autograd.grad(case.theirs(*ts), [*ts, *case.weights], theirs_dy)

    def ours_forward() -> None:
        with autograd.no_grad():
            case.ours(*xs)

    def theirs_forward() -> None:
        with torch.no_grad():
            case.theirs(*ts)

    times = in_turns([ours, theirs, ours_forward, theirs_forward])
    return (times[0], times[1]), (times[2], times[3])


def in_turns(calls: Sequence[Callable[[], None]]) -> list[float]:
    """Return the median time of each call in ms."""
    for call in calls:  # twice, as the first one allocates
        call()
        call()
    begin = time.perf_counter()
    for call in calls:
        call()
    rounds = max(7, min(600, int(SECONDS / (time.perf_counter() - begin))))
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for call, spent in zip(calls, times, strict=True):
            begin = time.perf_counter()
            call()
            spent.append((time.perf_counter() - begin) * 1e3)
    return [statistics.median(spent) for spent in times]


if __name__ == "__main__":
    main()
