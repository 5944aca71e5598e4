# SPDX-License-Identifier: Apache-2.0
"""What a step is said to have sent: its exchange of gradients, without what the ranks sent to agree."""

from __future__ import annotations

import numpy as np
import pytest

from singa_lite import autograd, layer, opt
from singa_lite.comm.base import Communicator
from singa_lite.comm.dispatch import DispatchCommunicator
from singa_lite.comm.link import Link
from singa_lite.comm.link_communicator import LinkCommunicator
from singa_lite.comm.work import Traffic
from singa_lite.tensor import Tensor
from tests.ranks import mpi_missing, run_ranks

NUM_ELEMENTS = 5 * 3 + 3
WAYS = [
    ("local", 1, False),
    ("shm", 2, False),
    ("shm", 3, False),
    ("shm", 3, True),
    pytest.param(
        "mpi", 3, False, marks=pytest.mark.skipif(bool(mpi_missing()), reason=mpi_missing() or "mpi works")
    ),
]


def over(communicator: Communicator, linked: bool) -> Communicator:
    return LinkCommunicator(communicator, Link(10**12, 0)) if linked else communicator


def of_steps(
    communicator: Communicator, linked: bool, texts: list[str], differ: bool
) -> list[tuple[int, int]]:
    """Bytes and payload of steps by each dist_option, without a Model; ranks have other gradients if they `differ`."""
    communicator = over(communicator, linked)
    rng = np.random.default_rng(communicator.rank if differ else 0)
    net = layer.Linear(3)
    x, y = (Tensor(data=rng.standard_normal(shape)) for shape in ((4, 5), (4, 3)))
    autograd.training = True
    net(x)
    sgd = opt.DistOpt(opt.SGD(0.1, momentum=0.9), communicator=communicator)
    sgd.broadcast(net.get_params())
    found = []
    for text in texts:
        before = sgd.total_bytes_sent, sgd.total_bytes_payload
        sgd(autograd.mse_loss(net(x), y), text)
        found.append((sgd.bytes_sent, sgd.bytes_payload))
        assert found[-1] == (sgd.total_bytes_sent - before[0], sgd.total_bytes_payload - before[1])
    autograd.training = False
    return found


def sent(size: int, payload: int) -> tuple[int, int]:
    """What an all-reduce of so many bytes counts as."""
    return -(-2 * (size - 1) * payload // size), payload


@pytest.mark.parametrize(("transport", "size", "linked"), WAYS)
def test_a_first_step_without_a_model_counts_gradients_alone(transport: str, size: int, linked: bool) -> None:
    step = sent(size, 4 * NUM_ELEMENTS) if size > 1 else (0, 0)
    assert run_ranks(of_steps, size, linked, ["fp32"] * 2, True, transport=transport) == [[step] * 2] * size


@pytest.mark.parametrize(("transport", "size", "linked"), WAYS)
@pytest.mark.parametrize("differ", [False, True])
def test_a_step_after_local_ones_counts_gradients_and_what_is_averaged(
    differ: bool, transport: str, size: int, linked: bool
) -> None:
    """Parameters and momentum, where they differ between ranks; not the hashes that show it."""
    ranks = run_ranks(of_steps, size, linked, ["localSGD:4", "fp32", "fp32"], differ, transport=transport)
    gradients = 4 * NUM_ELEMENTS if size > 1 else 0
    averaged = 2 * gradients if differ else 0
    expected = [
        (0, 0),
        tuple(map(sum, zip(sent(size, gradients), sent(size, averaged), strict=True))),
        sent(size, gradients),
    ]
    assert ranks == [expected] * size


def traffic_of_objects(communicator: Communicator, linked: bool) -> tuple[Traffic, Traffic]:
    communicator = over(communicator, linked)
    if not linked:  # as ``process_communicator`` gives it
        communicator = DispatchCommunicator(communicator)
    before = communicator.traffic.copy()
    communicator.all_gather_object({"a": "x" * 1000})
    between = communicator.traffic.copy()
    communicator.barrier()
    return between.since(before), communicator.traffic.since(between)


@pytest.mark.parametrize(("transport", "size", "linked"), WAYS)
def test_objects_and_barriers_are_traffic_over_every_transport(
    transport: str, size: int, linked: bool
) -> None:
    for objects, barrier in run_ranks(traffic_of_objects, size, linked, transport=transport):
        payload = 8 + len('{"a": ""}') + 1000  # the length, and the JSON text
        assert (objects.bytes_sent, objects.bytes_payload) == ((size - 1) * payload, payload)
        assert (barrier.bytes_sent, barrier.bytes_payload) == sent(size, 4)
