# SPDX-License-Identifier: Apache-2.0
"""Time of push and pull through servers beside MXNet's, and of a Trainer's step beside DistOpt's.

    python benchmarks/kvstore.py                                     without MXNet
    python benchmarks/kvstore.py --mxnet-python ~/mxnet/bin/python   MXNet 1.9.1: Python 3.9, numpy < 1.24

Two workers push the 8 arrays of the MNIST CNN (1.72 MB) and pull them again, momentum on the servers, as two calls
(push, pull) and as one (pushpull); S servers, over shared memory (shm) or MPI. Without servers and optimizer it is
compared with an all-reduce of the same bytes. The step is that of the CNN, eager, 64 images a worker, by a Trainer with
one server and by DistOpt with float32. Every process has one thread. All groups are interleaved in one run, those that
wait sleep, the first round is not counted, a step takes as long as on its slowest worker. Printed: medians and ratios.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from interleaved import Group, machine, serve, time_interleaved

SHAPES = [(20, 1, 5, 5), (20,), (50, 20, 5, 5), (50,), (800, 500), (500,), (500, 10), (10,)]
LR, MOMENTUM = 0.005, 0.9
WORKERS = 2
HINT = " (is MXNet installed? see --mxnet-python)"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=20, help="rounds of every group")
    parser.add_argument("--steps", type=int, default=50, help="steps in a round")
    parser.add_argument("--mxnet-python", help="a Python that has MXNet 1.9.1")
    parser.add_argument("--only", nargs="+", help="groups whose names contain one of these")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        WORK[arguments.worker]()
        return
    starts = groups(arguments.mxnet_python)
    if arguments.only:
        starts = {
            name: start for name, start in starts.items() if any(word in name for word in arguments.only)
        }
    print(f"{machine()}; {WORKERS} workers, {sum(map(np.prod, SHAPES)) * 4:,} bytes, 1 thread a process")
    times = time_interleaved(starts, arguments.rounds, arguments.steps, HINT)
    report({name: (statistics.median(values), np.quantile(values, 0.1)) for name, values in times.items()})
    print(f"load {os.getloadavg()[0]:.1f}")


def groups(mxnet_python: str | None) -> dict[str, Callable[[], Group]]:
    """What starts each group, by name."""

    def shm(work: str, servers: int) -> Group:
        run = [sys.executable, "-m", "singa_lite", "run", "-n", str(WORKERS), "-s", str(servers)]
        return Group([[*run, __file__, "--worker", work]], 1, WORKERS)

    def mpi(work: str, servers: int) -> Group:
        mpiexec = str(Path(sys.executable).parent / "mpiexec")
        run = ["env", f"SINGA_LITE_NUM_SERVERS={servers}", mpiexec, "-n", str(WORKERS + servers)]
        return Group([[*run, sys.executable, __file__, "--worker", work]], 1, WORKERS)

    def mxnet(servers: int) -> Group:
        variables = [
            "DMLC_PS_ROOT_URI=127.0.0.1",
            f"DMLC_PS_ROOT_PORT={free_port()}",
            f"DMLC_NUM_WORKER={WORKERS}",
            f"DMLC_NUM_SERVER={servers}",
            "DMLC_INTERFACE=lo",
        ]
        roles = ["scheduler", *["server"] * servers, *["worker"] * WORKERS]
        command = [str(mxnet_python), __file__, "--worker", "mxnet"]
        return Group([["env", *variables, f"DMLC_ROLE={role}", *command] for role in roles], 1, WORKERS)

    starts: dict[str, Callable[[], Group]] = {}
    for servers in (1, 2):
        for work in ("push, pull", "pushpull"):
            starts[f"{work}, S={servers}, shm"] = partial(shm, work, servers)
            starts[f"{work}, S={servers}, mpi"] = partial(mpi, work, servers)
        if mxnet_python:
            starts[f"MXNet, S={servers}"] = partial(mxnet, servers)
    starts["pushpull, S=0, no optimizer"] = lambda: shm("replica", 0)
    starts["all-reduce"] = lambda: shm("all-reduce", 0)
    starts["step, Trainer, S=1"] = lambda: shm("trainer", 1)
    starts["step, DistOpt"] = lambda: shm("distopt", 0)
    return starts


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


# ---- what a process does -----------------------------------------------------------------------------


def gradients() -> list[np.ndarray]:
    """Return small numbers, others on every worker, so that thousands of updates stay finite."""
    rng = np.random.default_rng(os.getpid())
    return [(1e-3 * rng.standard_normal(shape)).astype(np.float32) for shape in SHAPES]


def make_store(name: str = "dist_sync") -> Any:
    from singa_lite import kvstore

    store = kvstore.create(name)
    assert isinstance(store, kvstore.KVStore)
    store.init(list(range(len(SHAPES))), [np.zeros(shape, np.float32) for shape in SHAPES])
    return store


def work_store(is_one_call: bool, has_optimizer: bool = True) -> None:
    from singa_lite import opt

    store = make_store()
    if has_optimizer:
        store.set_optimizer(opt.SGD(lr=LR, momentum=MOMENTUM))
    keys, grads, outs = list(range(len(SHAPES))), gradients(), gradients()

    def two_calls() -> None:
        store.push(keys, grads)
        store.pull(keys, outs)

    serve((lambda: store.pushpull(keys, grads, outs)) if is_one_call else two_calls)


def work_all_reduce() -> None:
    from singa_lite.comm.rendezvous import process_communicator

    communicator = process_communicator()
    flat = np.zeros(sum(map(np.prod, SHAPES)), np.float32)
    serve(lambda: communicator.all_reduce(flat, "sum").wait())


def work_step(has_trainer: bool) -> None:
    from steps import LR, MOMENTUM, WEIGHT_DECAY, batch

    from singa_lite import autograd, kvstore, opt, tensor
    from singa_lite.gluon import Trainer

    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
    from model.cnn import CNN

    store = kvstore.create("dist_sync")  # where a server stays
    x, labels = batch("cnn", seed=store.rank)
    inputs, targets = tensor.from_numpy(x), tensor.from_numpy(labels.astype(np.int32))
    network = CNN()
    network.compile([inputs], use_graph=False)
    network.train()
    sgd = opt.SGD(lr=LR, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY)
    if has_trainer:
        trainer = Trainer(network.get_params(), sgd, kvstore=store, reduction="mean")
    else:
        dist = opt.DistOpt(sgd)
        dist.prepare(network.get_params(), {})

    def step() -> None:
        loss = autograd.softmax_cross_entropy(network.forward(inputs), targets)
        if has_trainer:
            loss.backward()
            trainer.step(1)
        else:
            dist(loss)

    serve(step)


def work_mxnet() -> None:
    import mxnet as mx

    store = mx.kv.create("dist_sync")  # where a server or scheduler stays
    keys = list(range(len(SHAPES)))
    store.init(keys, [mx.nd.zeros(shape) for shape in SHAPES])
    optimizer = mx.optimizer.create("sgd", learning_rate=LR, momentum=MOMENTUM, multi_precision=False)
    store.set_optimizer(optimizer)
    grads, outs = [mx.nd.array(grad) for grad in gradients()], [mx.nd.zeros(shape) for shape in SHAPES]

    def step() -> None:
        store.push(keys, grads)
        store.pull(keys, outs)
        mx.nd.waitall()

    serve(step)


WORK: dict[str, Callable[[], None]] = {
    "push, pull": lambda: work_store(is_one_call=False),
    "pushpull": lambda: work_store(is_one_call=True),
    "replica": lambda: work_store(is_one_call=True, has_optimizer=False),
    "all-reduce": work_all_reduce,
    "trainer": lambda: work_step(has_trainer=True),
    "distopt": lambda: work_step(has_trainer=False),
    "mxnet": work_mxnet,
}


def report(times: dict[str, Any]) -> None:
    for name, (median, best) in times.items():
        print(f"{name:28} {median:8.2f} ms, best tenth {best:8.2f}")
    for one, other in [
        ("push, pull, S=1, shm", "MXNet, S=1"),
        ("push, pull, S=1, mpi", "MXNet, S=1"),
        ("pushpull, S=1, shm", "MXNet, S=1"),
        ("pushpull, S=1, mpi", "MXNet, S=1"),
        ("push, pull, S=2, shm", "push, pull, S=1, shm"),
        ("pushpull, S=2, shm", "pushpull, S=1, shm"),
        ("step, Trainer, S=1", "step, DistOpt"),
    ]:
        if one in times and other in times:
            print(f"{one}: {times[one][0] / times[other][0]:.2f} of {other}")
    one, other = "pushpull, S=0, no optimizer", "all-reduce"
    if one in times and other in times:
        print(f"{one}: {times[one][0] - times[other][0]:.2f} ms above an {other}")


if __name__ == "__main__":
    main()
