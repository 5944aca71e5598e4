# SPDX-License-Identifier: Apache-2.0
"""The scheme that docs/sync.md writes as an example is one file, with which `singa-lite bench sync` trains."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.bench.commands import TRAINED, bench, small_model

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="several ranks need Linux")
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def package(tmp_path_factory) -> Path:
    """A folder with a copy of the package, its files links, in which sync/ has the page's file more."""
    folder = tmp_path_factory.mktemp("package")
    shutil.copytree(
        ROOT / "singa_lite",
        folder / "singa_lite",
        ignore=shutil.ignore_patterns("__pycache__"),
        copy_function=lambda source, target: Path(target).symlink_to(source),
    )
    [source] = re.findall(r"```python\n(# SPDX.*?)```", (ROOT / "docs" / "sync.md").read_text(), re.DOTALL)
    (folder / "singa_lite" / "sync" / "shared_sign.py").write_text(source)
    return folder


def trained(package: Path, folder: Path, *arguments: str) -> dict[str, dict[str, Any]]:
    """The result of each option."""
    given = [
        "--model",
        small_model(folder),
        *TRAINED,
        "--epochs",
        "6",
        "--lr",
        "0.001",
        "--out",
        folder / "out",
    ]
    given += arguments
    done = bench("sync", *given, folder=package)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| sharedSign |" in done.stdout
    found = [json.loads(path.read_text()) for path in (folder / "out").glob("run-*.json")]
    results = {run["settings"]["option"]: run["result"] for run in found}
    # of each element 2 bytes, and of the group a float32
    assert results["sharedSign"]["bytes_sent"] == [12 * (2 * 7850 + 4)] * 2
    losses = [epoch["loss"] for epoch in results["sharedSign"]["epochs"]]
    assert losses[-1] < 0.75 * losses[0]
    return results


@pytest.mark.slow
def test_a_scheme_of_one_file_trains_eagerly_and_recorded_to_the_same_loss(package, tmp_path):
    folders = [tmp_path / "eager", tmp_path / "recorded"]
    for folder in folders:
        folder.mkdir()
    both = trained(package, folders[0], "--options", "fp32,sharedSign")
    eager, fp32 = both["sharedSign"], both["fp32"]
    recorded = trained(package, folders[1], "--options", "sharedSign", "--graph")["sharedSign"]
    assert fp32["bytes_sent"] == [12 * 4 * 7850] * 2
    assert [epoch["loss"] for epoch in eager["epochs"]] != [epoch["loss"] for epoch in fp32["epochs"]]
    assert (eager["num_records"], recorded["num_records"], recorded["break_reasons"]) == (0, 1, [])
    assert recorded["loss"] == pytest.approx(eager["loss"], rel=1e-3)


def test_no_other_file_of_the_package_knows_the_scheme():
    for path in (ROOT / "singa_lite").rglob("*.py"):
        assert "sharedSign" not in path.read_text() and "shared_sign" not in path.read_text()
