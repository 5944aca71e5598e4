# SPDX-License-Identifier: Apache-2.0
"""A job under mpiexec ends in time, with an error and without leftovers, whatever happens to one of its ranks."""

from __future__ import annotations

import functools

import pytest

from tests.comm.mpi_faults import Outcome, complaints_of, inject
from tests.comm.processes import at_once
from tests.ranks import mpi_missing

pytestmark = pytest.mark.skipif(bool(mpi_missing()), reason=mpi_missing() or "mpi works")
# one of each way in which a job used to hang, to end with 0 or to leave files; mpi_faults.py runs all 77
FAULTS = (
    ("exit0", "import"),
    ("stop", "rendezvous"),
    ("raise", "rendezvous"),
    ("_exit0", "between"),
    ("kill9", "checkpoint"),
    ("stop", "exit"),
    ("launcherkill", "mid"),
)


@pytest.fixture(scope="module")
def outcomes() -> dict[tuple[str, str], Outcome]:
    """What became of the jobs, which run at the same time as they mostly wait."""
    return dict(zip(FAULTS, at_once([functools.partial(inject, *fault) for fault in FAULTS]), strict=True))


@pytest.mark.parametrize("fault", FAULTS, ids="-".join)
def test_a_fault_ends_the_job_in_time_with_an_error_and_leaves_nothing(outcomes, fault):
    # a busy machine may be slow; mpi_faults.py, run by hand, asks for 5 s
    assert complaints_of(outcomes[fault], grace_s=20) == [], outcomes[fault].output
