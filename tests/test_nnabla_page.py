# SPDX-License-Identifier: Apache-2.0
"""docs/nnabla.md names what is there, and its script runs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from singa_lite import communicators
from singa_lite.tensor import Tensor
from tests.comm.processes import launch_command, run_command, write_script
from tests.pages import dotted_names, exists, lines_of_ranks, read_page, script_of

PAGE, ROWS = read_page("nnabla")
NAMED = dotted_names(ROWS)
STARTS = {"Comm": communicators.Comm, "Tensor": Tensor}


@pytest.mark.parametrize("name", sorted(NAMED))
def test_every_name_on_the_page_exists(name: str) -> None:
    assert exists(name, STARTS)


def test_every_name_of_the_module_and_of_a_communicator_is_on_the_page() -> None:
    assert {f"communicators.{name}" for name in communicators.__all__} <= NAMED
    public = {
        name for kind in (communicators.Comm, communicators.DataParallelCommunicator) for name in dir(kind)
    }
    assert {f"Comm.{name}" for name in public if not name.startswith("_")} <= NAMED
    assert len(ROWS) > 15


def test_what_the_page_calls_missing_is_missing() -> None:
    assert not [name for name in dir(communicators.Comm) if name.endswith("_async")]


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_script_of_the_page_runs_as_printed(tmp_path: Path, ranks: int) -> None:
    script = write_script(
        tmp_path,
        script_of(PAGE) + "print(tensor.to_numpy(params['W']).tobytes().hex(), step, loss.item() > 0)\n",
    )
    done = run_command(launch_command(script, ranks) if ranks > 1 else [sys.executable, str(script)])
    assert done.returncode == 0, done.stderr
    lines = lines_of_ranks(done.stdout)
    assert len(lines) == ranks and len(set(lines)) == 1 and lines[0].endswith(" 2 True")
