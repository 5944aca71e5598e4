# SPDX-License-Identifier: Apache-2.0
"""A Trainer of arrays of GPUs: over NCCL without servers, through the host with one. Both are stand-ins."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from singa_lite import gluon, opt
from singa_lite.comm.base import World
from singa_lite.comm.dispatch import DispatchCommunicator
from singa_lite.comm.job import Job
from singa_lite.comm.p2p_shm import ShmMessenger
from singa_lite.device import Device, get_default_device
from singa_lite.kvstore.dist import DistStore
from singa_lite.kvstore.replica import ReplicaStore
from singa_lite.kvstore.server import Server
from singa_lite.tensor import Tensor, to_numpy
from tests.comm.gpu_standin import host_of
from tests.devices import cuda_device_of_rank, no_gpu
from tests.gluon.jobs import backward
from tests.limits import LIMIT_S
from tests.ranks import run_ranks

pytestmark = [
    pytest.mark.usefixtures("standin_libraries"),
    pytest.mark.skipif(not no_gpu(), reason="there is a GPU: two ranks cannot share it"),
]
SHAPES = {"small": (3, 2), "large": (1003,)}


def train(device: Device, store: Any, on_store: bool, **arguments: Any) -> list[np.ndarray]:
    """Parameters after steps with momentum, one of which leaves a gradient out on worker 0."""
    params = {
        n: Tensor(data=np.ones(s, np.float32), device=device, stores_grad=True) for n, s in SHAPES.items()
    }
    trainer = gluon.Trainer(
        params, opt.SGD(lr=0.5, momentum=0.5), kvstore=store, update_on_kvstore=on_store, **arguments
    )
    for step in range(4):
        rng = np.random.default_rng([store.rank, step])
        grads = {param: rng.standard_normal(param.shape) for param in params.values()}
        if step == 2 and store.rank == 0:
            del grads[params["small"]]
        backward(grads)
        trainer.step(4, ignore_stale_grad=step == 2)
    trainer.synchronize()
    return [to_numpy(param) for param in params.values()]


def run_trainers(world: World, num_servers: int, rendezvous_id: str) -> list[Any]:
    """What a worker has on the CPU, on a GPU, and on a GPU with compression, updating on the store and by itself."""
    num_workers, found = world.size - num_servers, []
    names = [
        (kind, on_store, bits)
        for kind in ("cpu", "cuda")
        for on_store in (True, False)
        for bits in (None, "2bit")
    ]
    host = host_of(world)
    workers = host.new_group(list(range(num_workers)))
    for number, (kind, on_store, bits) in enumerate(names):
        if num_servers:
            job = Job(world.rank, num_workers, num_servers, f"{rendezvous_id}{number}", "shm")
            messenger = ShmMessenger(job, LIMIT_S)
        if workers is None:
            Server(messenger).serve()
            messenger.close()
            continue
        device = get_default_device() if kind == "cpu" else cuda_device_of_rank()
        communicator = workers if kind == "cpu" else DispatchCommunicator(workers)
        store: Any = (
            DistStore("dist_sync", communicator, messenger, big_array=1000)
            if num_servers
            else ReplicaStore("dist_sync", communicator)
        )
        found.append(
            train(device, store, on_store, compression_params=bits and {"type": bits, "threshold": 0.5})
        )
        if num_servers:
            store.close()
    return found


@pytest.mark.parametrize("num_servers", [0, 1])
def test_trainers_on_gpus_end_where_those_on_cpus_do(num_servers: int) -> None:
    found = run_ranks(
        run_trainers, 2 + num_servers, num_servers, f"cuda{time.monotonic_ns()}", transport="none"
    )[:2]
    for worker in found:
        on_cpu, on_gpu = worker[:4], worker[4:]
        for expected, values in zip(on_cpu, on_gpu, strict=True):
            for one, other in zip(expected, values, strict=True):
                np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-6)
                assert np.abs(one - 1).max() > 0.1
    for one, other in zip(*found, strict=True):
        assert all((a == b).all() for a, b in zip(one, other, strict=True))
