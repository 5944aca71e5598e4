# SPDX-License-Identifier: Apache-2.0
"""Train on MNIST with order="fixed" on 1, 2 and 4 ranks, over shared memory and MPI, and compare the ends bit for bit.

    python -m tools.soak.same_bits
    python -m tools.soak.same_bits --updates 50 --dist-option bf16

The CNN and the MLP of the examples, with dropout before the last layer, eagerly and recorded. Printed: the crc32 of
parameters and momentum of each run; the exit status is 1 unless those of a model, dist_option and mode are one.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import shutil
import subprocess
import sys
import zlib

SIZES, TRANSPORTS = (1, 2, 4), ("shm", "mpi")
MICROBATCHES, IMAGES = 8, 8  # images in a microbatch
LIMIT_S = 1800.0


def main() -> None:
    parser = argparse.ArgumentParser(description="Train to the same bits on any number of ranks")
    parser.add_argument("--updates", type=int, default=200)
    parser.add_argument("--dist-option", choices=("fp32", "bf16"), action="append")
    parser.add_argument("--train", nargs=2, metavar=("MODEL", "MODE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    options = arguments.dist_option or ["fp32", "bf16"]
    if arguments.train:
        model, mode = arguments.train
        train(model, mode, options[0], arguments.updates)
        return
    is_right = True
    for model, option, mode in itertools.product(("cnn", "mlp"), options, ("eager", "graph")):
        found = set()
        for transport, size in itertools.product(TRANSPORTS, SIZES):
            if (transport, size) == ("mpi", 1):
                continue  # one rank has no transport
            checksums = run(transport, size, model, mode, option, arguments.updates)
            print(f"{model}, {option}, {mode}, {size} ranks, {transport}: {sorted(checksums)}", flush=True)
            found |= checksums
        is_right &= len(found) == 1
    print("the same bits" if is_right else "OTHER BITS")
    sys.exit(not is_right)


def run(transport: str, size: int, model: str, mode: str, option: str, updates: int) -> set[str]:
    """Return the checksums of all ranks of a run."""
    script = ["-m", "tools.soak.same_bits", "--updates", str(updates), "--dist-option", option]
    if transport == "mpi":
        mpiexec = shutil.which(
            "mpiexec", path=os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"]
        )
        start = [mpiexec or "mpiexec", "-n", str(size), sys.executable]
    else:
        start = [sys.executable, "-m", "singa_lite", "run", "-n", str(size)]
    done = subprocess.run(
        [*start, *script, "--train", model, mode],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env={**os.environ, "OMP_NUM_THREADS": "1"},  # the order within a product depends on the threads
    )
    checksums = re.findall(r"crc32 (\w{8})", done.stdout)
    if done.returncode != 0 or len(checksums) != size:
        raise SystemExit(
            f"{transport}, {size} ranks: ended with {done.returncode}:\n{done.stdout}{done.stderr}"
        )
    return set(checksums)


def train(name: str, mode: str, option: str, updates: int) -> None:
    """Be one rank: train and print the checksum."""
    sys.path.insert(0, "examples")
    from model.cnn import CNN
    from model.mlp import MLP

    from singa_lite import data, device, layer, opt, tensor

    class Net({"cnn": CNN, "mlp": MLP}[name]):  # type: ignore[misc]
        """The example's model with dropout before the last layer."""

        linear2: layer.Layer  # of the CNN

        def __init__(self) -> None:
            super().__init__()
            self.dropout = layer.Dropout(0.4)
            if name == "cnn":
                self.linear2 = Dropped(self.linear2, self.dropout)
            else:
                self.linears[-1] = Dropped(self.linears[-1], self.dropout)

    class Dropped(layer.Layer):  # type: ignore[misc]
        def __init__(self, linear: layer.Layer, dropout: layer.Layer) -> None:
            super().__init__()
            self.linear, self.dropout = linear, dropout

        def forward(self, x: tensor.Tensor) -> tensor.Tensor:
            return self.linear(self.dropout(x))

    sgd = opt.DistOpt(
        opt.SGD(lr=0.01, momentum=0.9), dist_option=option, microbatches=MICROBATCHES, order="fixed"
    )
    dev = device.create_device(sgd.local_rank)
    dev.SetRandSeed(1)
    mnist = data.load_mnist()
    net = Net()
    net.set_optimizer(sgd)
    net.compile([tensor.Tensor((IMAGES, 1, 28, 28), dev)], use_graph=mode == "graph")
    sampler = data.ShardedSampler(
        len(mnist.train_labels), IMAGES, sgd.global_rank, sgd.world_size, seed=1, microbatches=MICROBATCHES
    )
    for indices in sampler:
        x, y = data.make_batch(mnist.train_images, mnist.train_labels, indices, mean=0.1307, std=0.3081)
        net(tensor.from_numpy(x, dev), tensor.from_numpy(y, dev), option)
        if sgd.step_counter == updates:
            break
    records = net.graph_info()
    if bool(records) != (mode == "graph") or any(record.break_reason for record in records):
        raise SystemExit(f"{mode}: {[record.break_reason for record in records]}")
    found = 0
    for _, value in sorted(net.get_params().items()):
        found = zlib.crc32(tensor.to_numpy(value).tobytes(), found)
        found = zlib.crc32(tensor.to_numpy(sgd.slots(value)["momentum"]).tobytes(), found)
    print(f"rank {sgd.global_rank}: {sgd.step_counter} updates, crc32 {found:08x}\n", end="", flush=True)


if __name__ == "__main__":
    main()
