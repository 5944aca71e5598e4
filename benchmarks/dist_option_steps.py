# SPDX-License-Identifier: Apache-2.0
"""Time of a recorded step of the MNIST CNN with each dist_option on 2 ranks of one host, in interleaved rounds.

    python benchmarks/dist_option_steps.py
    python benchmarks/dist_option_steps.py --options fp32,dgc:0.001 --rounds 40

64 images a rank, one thread a rank. Ranks that wait for their turn sleep; a step takes as long as on its slowest rank.
Printed: the median step, what the option's own packing, compressing and decompressing takes of it on rank 0 (the median
of ``DistOpt.step_seconds``), and the step by fp32's with these: at most 1.05 if the option costs nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
from interleaved import Group, machine, serve, time_interleaved

OPTIONS = "fp32,fp16,bf16,int8,powerSGD:4,sign,sparseTopK:0.01,dgc:0.001:warmup=48,localSGD:8,localSGD:32,randomK:0.1"
OWN = "BENCHMARK_OWN"  # the environment variable with the folder for what rank 0 measures
WARM_STEPS = 60  # dgc's warm-up, and first steps


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--options", default=OPTIONS, help="fp32 among them (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=24, help="rounds of each option")
    parser.add_argument("--steps", type=int, default=10, help="steps in a round")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(arguments.worker)
        return
    print(machine())
    with tempfile.TemporaryDirectory() as folder:
        os.environ[OWN] = folder

        def start(option: str) -> Group:
            run = [sys.executable, "-m", "singa_lite", "run", "-n", "2", __file__, "--worker", option]
            return Group([run], 1, 2)

        options = arguments.options.split(",")
        starts = {option: partial(start, option) for option in options}
        times = time_interleaved(starts, arguments.rounds, arguments.steps)
        own = {
            option: json.loads((Path(folder) / option.replace(":", "-")).read_bytes()) for option in options
        }
    plain = statistics.median(times["fp32"])
    for option in options:
        step = statistics.median(times[option])
        ratio = step / (plain + own[option])
        print(f"{option:22} step {step:6.2f} ms, own {own[option]:5.2f} ms, by fp32's with these {ratio:.3f}")
    print(f"load {os.getloadavg()[0]:.1f}")


def work(option: str) -> None:
    """Be one rank."""
    from singa_lite import opt, tensor
    from singa_lite.bench.models import make_model

    sgd = opt.DistOpt(opt.SGD(lr=0.005, momentum=0.9, weight_decay=1e-5), dist_option=option)
    network = make_model("cnn-mnist")
    network.set_optimizer(sgd)
    rng = np.random.default_rng(sgd.global_rank)
    x = tensor.from_numpy(rng.standard_normal((64, 1, 28, 28)).astype(np.float32))
    labels = tensor.from_numpy(rng.integers(0, 10, 64).astype(np.int32))
    network.compile([x], use_graph=True)
    for _ in range(WARM_STEPS):
        network(x, labels)
    own = []

    def step() -> None:
        network(x, labels)
        seconds = sgd.step_seconds
        assert seconds is not None  # a step was made, on the CPU
        own.append(1e3 * (seconds.pack + seconds.compress + seconds.decompress))

    serve(step)
    if sgd.global_rank == 0:
        (Path(os.environ[OWN]) / option.replace(":", "-")).write_text(json.dumps(statistics.median(own)))


if __name__ == "__main__":
    main()
