# SPDX-License-Identifier: Apache-2.0
"""docs/mxnet.md names what is there, and its script runs."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from singa_lite import gluon, kvstore
from singa_lite.tensor import Tensor
from tests.comm.processes import launch_command, run_command, write_script
from tests.pages import dotted_names, exists, lines_of_ranks, read_page, script_of

PAGE, ROWS = read_page("mxnet")
NAMED = dotted_names(ROWS)
STARTS: dict[str, Any] = {
    "gluon": gluon,
    "kvstore": kvstore,
    "KVStore": kvstore.KVStore,
    "Tensor": Tensor,
    "Trainer": gluon.Trainer,
}
# what the Trainer uses, and no script of MXNet
NOT_OF_SCRIPTS = {"broadcast_states", "load_states", "names", "save_states"}


@pytest.mark.parametrize("name", sorted(NAMED))
def test_every_name_on_the_page_exists(name: str) -> None:
    assert exists(name, STARTS)


def test_every_name_of_the_modules_and_classes_is_on_the_page() -> None:
    assert {f"kvstore.{name}" for name in kvstore.__all__} <= NAMED
    assert {f"gluon.utils.{name}" for name in gluon.utils.__all__} | {"gluon.Trainer"} <= NAMED
    for kind in (kvstore.KVStore, gluon.Trainer):
        public = {name for name in dir(kind) if not name.startswith("_")}
        if kind is kvstore.KVStore:
            public -= NOT_OF_SCRIPTS
        assert {f"{kind.__name__}.{name}" for name in public} <= NAMED
    assert len(ROWS) > 25


def test_the_page_names_stores_that_there_are() -> None:
    row = next(ours for theirs, ours in ROWS if "mx.kv.create" in theirs)
    names = re.findall(r"`([a-z_]+)`", row.split(" Keywords")[0])
    create = sys.modules["singa_lite.kvstore.create"]
    assert len(names) == 10 and set(names) <= {*create.LOCAL_NAMES, *create.SYNC_NAMES, *create.ASYNC_NAMES}


def test_what_the_page_calls_missing_is_missing() -> None:
    missing = PAGE.split("## Missing")[1]
    assert "`row_sparse_pull`" in missing and not hasattr(kvstore.KVStore, "row_sparse_pull")
    assert not [name for name in ("loss", "nn", "data") if hasattr(gluon, name)]


@pytest.mark.parametrize(("workers", "servers"), [(1, 0), (2, 0), (2, 1)])
def test_the_script_of_the_page_runs_as_printed(tmp_path: Path, workers: int, servers: int) -> None:
    shown = "print(tensor.to_numpy(net.get_params()['W']).tobytes().hex(), loss.item() < 1, len(indices))\n"
    script = write_script(tmp_path, script_of(PAGE) + shown)
    launch = launch_command(script, workers, options=["-s", str(servers)])
    done = run_command(launch if workers > 1 else [sys.executable, str(script)])
    assert done.returncode == 0, done.stderr
    lines = lines_of_ranks(done.stdout)
    assert len(lines) == workers and len(set(lines)) == 1
    assert lines[0].endswith(f" True {8 if workers == 1 else 4}")
