# SPDX-License-Identifier: Apache-2.0
"""Time of a training step on ranks of one host beside PyTorch's DistributedDataParallel, and how ours scales.

    python benchmarks/train_step_2_ranks.py                                      MNIST CNN, 64 images a rank
    python benchmarks/train_step_2_ranks.py --torch-python ~/torch/bin/python    PyTorch installed elsewhere

Ours runs under `singa-lite run -n 2` with DistOpt, float32 gradients averaged over the ranks; PyTorch as 2
processes with gloo, gradient_as_bucket_view and fused SGD. In "bf16" and "torch autocast" products are of bfloat16, and
gradients travel in 16 bits (dist_option bf16; fp16_compress_hook, as bf16_compress_hook needs NCCL). Beside them one
rank trains 64 images alone, without and with DistOpt: what 2 ranks add to that is the price of exchange and of sharing
the machine. As many processes that train at once and know nothing of each other (strangers) separate the second from
the first. Every process has one thread. All groups are interleaved in one run, those that wait sleep, the first round
is not counted, a step takes as long as on its slowest rank. Printed: median step times and their ratios.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from interleaved import SOCKET, Group, busy_processes, machine, serve, time_interleaved
from steps import SHAPES, batch, our_step, torch_step

HINT = " (is PyTorch installed? see --torch-python)"
MODES = ["eager", "graph", "bf16"]
TORCH = ["torch eager", "torch channels_last", "torch autocast"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=SHAPES, default="cnn")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20, help="rounds of every group")
    parser.add_argument("--steps", type=int, default=10, help="steps in a round")
    parser.add_argument(
        "--busy", type=int, default=0, help="other processes, each of which takes a core if it can"
    )
    parser.add_argument("--torch-python", default=sys.executable, help="a Python that has PyTorch")
    parser.add_argument("--only", nargs="+", help="groups whose names contain one of these")
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(*arguments.worker)
        return
    print(f"{machine()}; {arguments.model}, {SHAPES[arguments.model][0]} images a rank, 1 thread a rank")
    starts = {
        name: start
        for name, start in groups(arguments).items()
        if not arguments.only or any(word in name for word in arguments.only)
    }
    with busy_processes(arguments.busy):
        times = time_interleaved(starts, arguments.rounds, arguments.steps, HINT)
    report({name: statistics.median(values) for name, values in times.items()}, arguments.ranks)
    print(f"load {os.getloadavg()[0]:.1f}")


def groups(arguments: argparse.Namespace) -> dict[str, Callable[[], Group]]:
    """What starts each group, by name."""
    model, ranks = arguments.model, arguments.ranks

    def ours(mode: str) -> Group:
        run = [sys.executable, "-m", "singa_lite", "run", "-n", str(ranks)]
        return Group([[*run, __file__, "--worker", mode, model, "ours", str(ranks)]], 1, ranks)

    def theirs(mode: str) -> Group:
        command = [arguments.torch_python, __file__, "--worker", mode, model]
        return Group([[*command, str(rank), str(ranks)] for rank in range(ranks)], 1, ranks)

    def alone(mode: str, how: str, count: int = 1) -> Group:
        return Group([[sys.executable, __file__, "--worker", mode, model, how, "1"]] * count, 1, count)

    starts: dict[str, Callable[[], Group]] = {}
    for mode in MODES:
        starts[f"{ranks} ranks {mode}"] = partial(ours, mode)
        starts[f"1 rank {mode}"] = partial(alone, mode, "alone")
        starts[f"1 rank DistOpt {mode}"] = partial(alone, mode, "ours")
        starts[f"{ranks} strangers {mode}"] = partial(alone, mode, "alone", ranks)
    for mode in TORCH:
        starts[f"{ranks} ranks {mode}"] = partial(theirs, mode)
    return starts


def work(mode: str, model: str, how: str, ranks: str) -> None:
    """One rank; ``how`` is alone, ours (DistOpt), or the rank's number in PyTorch's group."""
    if mode in TORCH:
        serve_torch(mode, model, int(how), int(ranks))
        return
    rank = int(os.environ.get("SINGA_LITE_RANK", "0"))
    serve(our_step(mode, model, *batch(model, seed=rank), is_distributed=how == "ours"))


def serve_torch(mode: str, model: str, rank: int, ranks: int) -> None:
    import torch
    from torch import distributed
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    store = f"file://{os.environ[SOCKET]}.store"
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)

    def wrap(network: Any) -> Any:
        network = torch.nn.parallel.DistributedDataParallel(network, gradient_as_bucket_view=True)
        if mode == "torch autocast":
            network.register_comm_hook(None, default_hooks.fp16_compress_hook)
        return network

    serve(torch_step(mode, model, *batch(model, seed=rank), wrap=wrap))
    distributed.destroy_process_group()


def report(medians: dict[str, float], ranks: int) -> None:
    for name, median in medians.items():
        print(f"{name:28} {median:9.2f} ms")
    for mode in MODES:
        ours = medians.get(f"{ranks} ranks {mode}")
        if ours is None:
            continue
        peers = TORCH if mode == "bf16" else [peer for peer in TORCH if peer != "torch autocast"]
        theirs = [medians[name] for name in (f"{ranks} ranks {peer}" for peer in peers) if name in medians]
        if theirs:
            print(f"{mode}: {ours / min(theirs):.2f} of the best of DistributedDataParallel")
        for name in (f"1 rank {mode}", f"1 rank DistOpt {mode}", f"{ranks} strangers {mode}"):
            if name in medians:
                print(f"{mode}: {ours / medians[name]:.2f} of {name}")


if __name__ == "__main__":
    main()
