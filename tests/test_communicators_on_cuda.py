# SPDX-License-Identifier: Apache-2.0
"""nnabla's communicator on arrays of GPUs, over NCCL: both are stand-ins, whose work happens after the call."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

from singa_lite import autograd, communicators
from singa_lite.comm.base import World
from singa_lite.comm.dispatch import DispatchCommunicator
from singa_lite.config import state
from singa_lite.tensor import Tensor, to_numpy
from tests.comm.gpu_standin import host_of
from tests.devices import cuda_device_of_rank, no_gpu
from tests.ranks import run_ranks

pytestmark = [
    pytest.mark.usefixtures("standin_libraries"),
    pytest.mark.skipif(not no_gpu(), reason="there is a GPU: two ranks cannot share it"),
]
X = np.arange(12, dtype=np.float32)


def every_method(world: World) -> dict[str, Any]:
    device = cuda_device_of_rank()
    state.communicator, state.communicator_pid = DispatchCommunicator(host_of(world)), os.getpid()
    comm = communicators.MultiProcessCommunicator(device)
    comm.init()
    found: dict[str, Any] = {}

    def on_gpu(factor: float, shape: tuple[int, ...] = (3, 4)) -> Tensor:
        return Tensor(data=X.reshape(shape) * factor, device=device)

    for inplace in (False, True):
        data = [on_gpu(comm.rank + 1), np.full(3, comm.rank + 1.0), on_gpu(comm.rank + 2)]
        comm.all_reduce(data, division=True, inplace=inplace)
        found[f"all_reduce {inplace}"] = [to_numpy(value).ravel()[1] for value in data]
    data = on_gpu(comm.rank + 1)
    comm.bcast([data], 1)
    found["bcast"] = to_numpy(data).ravel()[1]
    rows = [on_gpu(0) for _ in range(comm.size)]
    comm.all_gather(on_gpu(comm.rank + 1), rows)
    found["all_gather"] = [to_numpy(row).ravel()[1] for row in rows]
    out = on_gpu(0, (12,))
    comm.reduce_scatter(rows, out)
    found["reduce_scatter"] = to_numpy(out)[1]
    for with_callback in (False, True):
        params = [Tensor(data=X * factor, device=device, stores_grad=True) for factor in (0.5, 0.25, 2.0)]
        grads = [param.grad for param in params]
        callback = comm.all_reduce_callback(grads, 20, scale_grad=0.1) if with_callback else None
        with autograd.record():
            loss = autograd.reduce_sum(autograd.tanh(params[0] * params[1]) * params[2], keepdims=0)
        loss.backward(float(comm.rank + 1), callback)
        if not with_callback:
            for grad in grads:
                grad *= 0.1
            comm.all_reduce(grads)
        found[f"callback {with_callback}"] = [to_numpy(grad).tobytes() for grad in grads]
    comm.barrier()
    state.communicator.close()
    state.communicator = None
    return found


def test_arrays_of_gpus_are_summed_over_nccl() -> None:
    for rank, found in enumerate(run_ranks(every_method, 2, transport="none")):
        assert found["all_reduce False"] == found["all_reduce True"] == [1.5, 1.5, 2.5]
        assert found["bcast"] == 2 and found["all_gather"] == [1, 2]
        assert found["reduce_scatter"] == 2 * (rank + 1)
        assert found["callback True"] == found["callback False"]
