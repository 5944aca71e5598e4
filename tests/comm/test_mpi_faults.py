# SPDX-License-Identifier: Apache-2.0
"""A job under mpiexec ends in time, with an error and without leftovers, whatever happens to one of its ranks."""

from __future__ import annotations

import functools

import pytest

from tests.comm.mpi_faults import Outcome, complaints_of, inject
from tests.comm.processes import at_once
from tests.limits import LIMIT_S
from tests.ranks import mpi_missing
from tests.slow_cases import cases_that_run, slow_but_first

GRACE_S = 60  # a busy machine may be slow
pytestmark = pytest.mark.skipif(bool(mpi_missing()), reason=mpi_missing() or "mpi works")
# one of each way in which a job used to hang, to end with 0 or to leave files; mpi_faults.py runs all 77
FAULTS = (
    ("exit0", "import"),
    ("kill9", "checkpoint"),
    ("launcherkill", "mid"),
    ("stop", "rendezvous"),
    ("raise", "rendezvous"),
    ("_exit0", "between"),
    ("stop", "exit"),
)


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> dict[tuple[str, str], Outcome]:
    """What became of the jobs, which run at the same time as they mostly wait."""
    faults = cases_that_run(request, "fault")
    calls = [functools.partial(inject, *fault, limit_s=LIMIT_S, gone_s=GRACE_S) for fault in faults]
    return dict(zip(faults, at_once(calls), strict=True))


@slow_but_first("fault", FAULTS, count=3, ids="-".join)
def test_a_fault_ends_the_job_in_time_with_an_error_and_leaves_nothing(outcomes, fault):
    # mpi_faults.py, run by hand, asks for 5 s
    assert complaints_of(outcomes[fault], grace_s=GRACE_S) == [], outcomes[fault].output
