# SPDX-License-Identifier: Apache-2.0
"""What the contract (test_contract.py) leaves open about the world of one."""

from __future__ import annotations

import numpy as np
import pytest

from singa_lite.comm.base import World
from singa_lite.comm.local import LocalCommunicator
from singa_lite.comm.work import Work
from singa_lite.config import state
from singa_lite.errors import OptionError


def test_results_are_copies_of_the_input() -> None:
    communicator, array = LocalCommunicator(World()), np.ones(3)
    for work in (communicator.all_gather(array), communicator.reduce_scatter(array, "sum")):
        result = work.wait()
        assert result is not None and not np.shares_memory(result, array)


def test_nothing_is_sent_but_the_payload_is_counted() -> None:
    work = LocalCommunicator(World()).all_reduce(np.ones(3, np.float32), "sum", wire_dtype="float16")
    assert (work.bytes_sent, work.bytes_payload) == (0, 6)


def test_a_group_of_one_outlives_its_parent() -> None:
    parent = LocalCommunicator(World())
    group = parent.new_group([0])
    parent.close()
    assert group is not None and group.all_gather_object("here") == ["here"]


def test_collectives_that_nobody_waits_for_take_little_time_each() -> None:
    looked = []

    class InFlight(Work):
        def _is_done(self) -> bool:
            looked.append(self)
            return False

    class Slow(LocalCommunicator):
        def _start(self, *arguments: object) -> Work:
            return InFlight()

    communicator = Slow(World())
    kept = [communicator.all_reduce(np.ones(3), "sum") for _ in range(2000)]
    assert communicator.works_in_flight == kept
    assert len(looked) < 3 * len(kept)  # not 2000 for each
    state.works_in_flight.difference_update(map(id, kept))


def test_a_time_out_must_be_positive() -> None:
    with pytest.raises(OptionError, match="timeout_s"):
        LocalCommunicator(World(), 0)
