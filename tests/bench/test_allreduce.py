# SPDX-License-Identifier: Apache-2.0
"""`singa-lite bench allreduce`: what is measured, and that bytes and times are those of the collectives."""

from __future__ import annotations

import json
import math
import sys

import pytest

from singa_lite import cli
from singa_lite.bench import allreduce
from singa_lite.bench.allreduce import plan
from singa_lite.comm.base import KINDS
from tests.bench.commands import bench
from tests.ranks import mpi_missing

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="several ranks need Linux")
LATENCY_S = 0.002


def parsed(*arguments: str):
    return allreduce._parser().parse_args(arguments)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """All collectives of 3 ranks over memory and over a slow link."""
    file = tmp_path_factory.mktemp("allreduce") / "table.json"
    done = bench(
        "allreduce", "--collectives", ",".join(KINDS), "--sizes", "100,4k", "--ranks", "3", "--rounds", "1",
        "--link", "none", "--link", f"100mbit,{LATENCY_S * 1000:g}ms", "--json", file,
        SINGA_LITE_LINK="none of it, as links are given",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(file.read_text()), done.stdout


def expected_bytes(kind: str, given: int) -> int:
    share = {"all_reduce": 2 * 2 / 3, "all_gather": 2}.get(kind, 2 / 3)
    return math.ceil(share * given)


def test_every_collective_is_measured_at_each_size_and_link(measured):
    rows = measured[0]["rows"]
    found = [(row["link"], row["collective"], row["bytes"]) for row in rows]
    blocks = ("reduce_scatter", "all_to_all")
    # 3 blocks of whole numbers
    sizes = {kind: (108, 4104) if kind in blocks else (100, 4096) for kind in KINDS}
    links = (None, "100mbit,2ms")
    assert found == [(link, kind, size) for link in links for kind in KINDS for size in sizes[kind]]
    assert {(row["transport"], row["ranks"], len(row["seconds"])) for row in rows} == {("shm", 3, 1)}


def test_bytes_sent_equal_the_closed_formulas(measured):
    for row in measured[0]["rows"]:
        assert row["bytes_sent"] == expected_bytes(row["collective"], row["bytes"]), row


def test_a_link_takes_its_latency_for_each_hop(measured):
    for row in measured[0]["rows"]:
        if row["link"] is not None:
            hops = 4 if row["collective"] == "all_reduce" else 2
            assert row["lowest_s"] >= 0.9 * hops * LATENCY_S, row
        assert row["lowest_s"] <= row["median_s"] <= row["highest_s"] and row["median_s"] > 0


def test_the_table_has_a_line_for_each(measured):
    content, out = measured
    lines = [line for line in out.splitlines() if line.startswith("| ")][2:]
    assert len(lines) == len(content["rows"])
    for line, row in zip(lines, content["rows"], strict=True):
        cells = line.strip("| ").split(" | ")
        assert cells[:4] == [row["collective"], "shm", "3", row["link"] or "-"]
        assert cells[4:6] == [f"{row['bytes']:,}", f"{row['bytes_sent']:,}"]
        assert cells[6].startswith(f"{1e3 * row['median_s']:.4g}")
    assert content["machine"]["host"] in out


@pytest.mark.skipif(bool(mpi_missing()), reason=f"transport mpi: {mpi_missing()}")
def test_mpi_is_measured_on_its_own_links():
    tasks = plan(parsed("--transports", "shm,mpi", "--link", "none", "--link", "1gbit,1ms", "--ranks", "2,3"))
    assert [(task.transport, task.ranks, task.link) for task in tasks] == [
        ("shm", 2, None), ("shm", 2, "1gbit,1ms"), ("shm", 3, None), ("shm", 3, "1gbit,1ms"), ("mpi", 2, None),
        ("mpi", 3, None),
    ]  # fmt: skip
    done = bench("allreduce", "--transports", "mpi", "--sizes", "4k", "--rounds", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| all_reduce | mpi | 2 | - | 4,096 | 4,096 |" in done.stdout
    assert "median (lowest to highest) of 2 rounds" in done.stdout


def test_a_link_of_the_environment_counts_where_none_is_given(monkeypatch):
    monkeypatch.setenv("SINGA_LITE_LINK", "1gbit,1ms")
    assert [task.link for task in plan(parsed())] == ["1gbit,1ms"]
    assert [task.link for task in plan(parsed("--link", "none"))] == [None]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--collectives", "all_reduce,gather"], "'gather' is not known; choose of all_reduce, reduce"),
        (["--collectives", ""], "one is empty"),
        (["--transports", "tcp"], "'tcp' is not known; choose of shm, mpi"),
        (["--transports", "mpi", "--link", "1gbit,1ms"], "links of mpi are real"),
        (["--sizes", "4k,1g"], "'1g': expected bytes such as 4096, 64k or 16m"),
        (["--sizes", "0"], "'0': expected bytes"),
        (["--sizes", "9" * 5000], "9': expected bytes"),
        (["--ranks", "1,2"], "ranks = 1 must be an int >= 2"),
        (["--ranks", "2,5000"], "--ranks 5000: a host has at most 1024 ranks"),
        (["--ranks", "two"], "expected ints"),
        (["--rounds", "0"], "rounds = 0"),
        (["--link", "fast"], "--link: expected RATE,LATENCY"),
        (["--link", "1gbit,1ms", "--link", "1000mbit,1ms"], "one twice"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_starts(arguments, says, monkeypatch, capsys):
    monkeypatch.setattr(allreduce, "launch", None)
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", "allreduce", *arguments])
    assert ended.value.code == 2 and says in " ".join(capsys.readouterr().err.split())
