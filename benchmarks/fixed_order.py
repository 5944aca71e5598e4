# SPDX-License-Identifier: Apache-2.0
"""What sums in a fixed order cost an update of 2 ranks: DistOpt(microbatches=8, order="fixed") beside order="any".

    python benchmarks/fixed_order.py                       MNIST CNN, 16 images a microbatch, recorded steps
    python benchmarks/fixed_order.py --dist-option bf16 --images 64

Both take turns in one run. Printed: median times of an update, which is 8 / ranks calls of a rank, and their ratio.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable
from functools import partial

from interleaved import Group, machine, serve, time_interleaved
from steps import LR, MOMENTUM, SHAPES, WEIGHT_DECAY, batch

MICROBATCHES = 8


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=("cnn", "mlp"), default="cnn")
    parser.add_argument("--images", type=int, default=16, help="of a microbatch")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--dist-option", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--rounds", type=int, default=20, help="rounds of both")
    parser.add_argument("--updates", type=int, default=10, help="updates in a round")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        serve(make_update(arguments, arguments.worker))
        return
    print(f"{machine()}; {arguments.model}, {arguments.dist_option}, {arguments.ranks} ranks of 1 thread")

    def start(order: str) -> Group:
        run = [sys.executable, "-m", "singa_lite", "run", "-n", str(arguments.ranks), *sys.argv]
        return Group([[*run, "--worker", order]], 1, arguments.ranks)

    starts = {order: partial(start, order) for order in ("any", "fixed")}
    times = time_interleaved(starts, arguments.rounds, arguments.updates)
    plain, fixed = (statistics.median(times[order]) for order in ("any", "fixed"))
    print(f"update: any order {plain:.3f} ms, fixed order {fixed:.3f} ms: {fixed / plain:.4f}")
    print(f"load {os.getloadavg()[0]:.1f}")


def make_update(arguments: argparse.Namespace, order: str) -> Callable[[], None]:
    """Return what makes one update on this rank."""
    from model.cnn import CNN
    from model.mlp import MLP

    from singa_lite import opt, tensor

    rank = int(os.environ["SINGA_LITE_RANK"])
    x, labels = batch(arguments.model, rank, (arguments.images, *SHAPES[arguments.model][1:]))
    tensors = tensor.from_numpy(x), tensor.from_numpy(labels.astype("int32"))
    network = {"cnn": CNN, "mlp": MLP}[arguments.model]()
    sgd = opt.SGD(lr=LR, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY)
    dist = opt.DistOpt(sgd, microbatches=MICROBATCHES, order=order, dist_option=arguments.dist_option)
    network.set_optimizer(dist)
    network.compile([tensors[0]], use_graph=True)

    def update() -> None:
        for _ in range(MICROBATCHES // arguments.ranks):
            network(*tensors, arguments.dist_option)

    return update


if __name__ == "__main__":
    main()
