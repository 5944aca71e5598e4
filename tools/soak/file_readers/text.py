# SPDX-License-Identifier: Apache-2.0
"""Files with numbers and names: of `singa-lite bench`, `plan`, `run` and `inspect`."""

from __future__ import annotations

import contextlib
import io
import json
import os
import secrets
import time
from pathlib import Path
from typing import Any

import numpy as np

from singa_lite import _native
from singa_lite.bench import calibration, compare, plan, report, runs
from singa_lite.bench.cost import Cluster, Network
from singa_lite.comm import flight_record, flight_report, lost_ranks, progress, trace_file
from singa_lite.comm.base import World
from singa_lite.comm.shm import ShmCommunicator
from singa_lite.graph.clock import Span, Waited
from singa_lite.graph.trace import SUFFIX, TraceWriter
from singa_lite.launch import hosts
from tests.bench.test_compare import result, write
from tools.soak.file_readers.reader import Read, Refused

RANKS = 3
PROVENANCE = runs.Provenance({"cores": 2, "host": "a"}, {"singa-lite": "1"}, {"data": "x"}, {"threads": "1"})
SETTINGS = runs.Settings("cnn-mnist", "fp16", ranks=1, epochs=1)


def make_run(folder: Path, number: int) -> None:
    made = runs.Runs(folder, PROVENANCE)
    made.add(SETTINGS, {**result(loss=0.1 + number), "break_reasons": [], "device": "cpu"})
    os.replace(made.path(SETTINGS), folder / "run.json")


def start_run() -> Read:
    """Read a finished run as `bench sync` does: a damaged one is none, and is made again."""

    def read(folder: Path) -> object:
        made = runs.Runs(folder, PROVENANCE)
        os.replace(folder / "run.json", made.path(SETTINGS))
        list(made.foreign())
        found = made.find(SETTINGS)
        if found is None:
            raise Refused
        return json.dumps(found), report.table(report.rows_of({"fp16": [found]}, 0.8), 0.8)

    return read


def make_tables(folder: Path, number: int) -> None:
    for name in "ab":
        made = {"fp32": [result(9.0), result(11.0 + number)], "fp16": [result(5.0)] * 2}
        write(folder / name, made)
        os.replace(folder / name / compare.TABLE, folder / f"{name}.json")
        (folder / name).rmdir()


def start_tables() -> Read:
    def read(folder: Path) -> object:
        text = io.StringIO()
        with contextlib.redirect_stdout(text):
            code = compare.compare(folder / "a.json", folder / "b.json", 0.2, is_anyway=True)
        return code, text.getvalue().replace(str(folder), "")

    return read


def make_calibration(folder: Path, number: int) -> None:
    buckets = (calibration.BucketShapes(4e-3, ((10, 10),)), calibration.BucketShapes(0.01, ((50, 5), (50,))))
    options = {
        "fp32": calibration.OptionTimes(0.0),
        "sparseTopK:0.1": calibration.OptionTimes(2e-3, 3e-4),
        "localSGD:4": calibration.OptionTimes(0.0, buckets=buckets[:1]),
    }
    made = calibration.Calibration(0.01, 1e-3 * (1 + number), buckets, options, "by hand")
    calibration.write_calibration(folder / "calibration.json", made)


def start_calibration() -> Read:
    cluster = Cluster(Network(0.0, 0.0), Network(1e-5, 1e-9), 4)

    def read(folder: Path) -> object:
        return plan.report(calibration.read_calibration(folder / "calibration.json"), cluster, [4, 64])

    return read


def make_trace(folder: Path, number: int) -> None:
    parts = folder / "parts"
    for rank in range(2):
        writer = TraceWriter(parts)
        writer.add_facts(rank=rank, host=f"h{rank}")
        if rank == 0:
            writer.add_facts(offset_of=1, offset=(1.0, 0.25 + number, 1e-3))
        for step in range(3):
            spans = [Span("forward", "", step, step + 0.5), Span("wait", "w", step + 0.5, step + 0.9)]
            times = (step + 0.1, step + 0.2 + 0.01 * rank, step + 0.3)
            writer.add_step(spans, [Waited("w", "all_reduce", 40, times, step + 0.5, step + 0.9)])
        writer.close()
        (made,) = (path for path in parts.iterdir() if len(path.stem) > 1)
        os.replace(made, parts / f"{rank}{SUFFIX}")
        lines = (parts / f"{rank}{SUFFIX}").read_text().splitlines()[1:]  # without its process's number
        (parts / f"{rank}{SUFFIX}").write_text("\n".join(lines) + "\n")


def start_trace() -> Read:
    def read(folder: Path) -> object:
        out = folder / "trace.json"
        trace_file.join_trace(folder / "parts", out)
        json.loads(out.read_bytes())
        return out.read_bytes()

    return read


def make_progress(folder: Path, number: int) -> None:
    path = folder / "progress"
    progress.ProgressFile(path, RANKS)
    for rank in range(RANKS):
        mine = progress.Progress(str(path), rank)
        mine.note_step(5 + number + rank)
        mine.note_takes_requests()


def start_progress() -> Read:
    def read(folder: Path) -> object:
        found = progress.ProgressFile(folder / "new", RANKS)
        os.replace(folder / "progress", folder / "new")
        steps, takers, (failed, _) = found.steps(), found.takers(), found.first_failure()
        assert len(steps) == RANKS and set(takers) <= set(range(RANKS)) and failed in (None, *range(RANKS))
        return steps, takers, failed

    return read


def make_flight(folder: Path, number: int) -> None:
    communicator = ShmCommunicator(World(0, 1, 0, 1, f"soak{secrets.token_hex(8)}", "shm"), 10.0)
    for _ in range(66 + number):
        communicator.all_reduce(np.zeros((3, 2)), "sum", name="x").wait()
    (path,) = (
        path
        for path in flight_record.files_of(os.getpid(), flight_record.SEGMENT)
        if communicator.world.rendezvous_id in os.readlink(path)
    )
    with open(os.open(path, os.O_RDONLY), "rb", closefd=False) as file:
        whole = file.read()
    communicator.close()
    start = whole.index((0x464C494748540001).to_bytes(8, "little"))  # kFlightMagic of native/comm
    (folder / "record").write_bytes(whole[start:])


def start_flight() -> Read:
    native: Any = _native.load("_comm")[0]

    def read(folder: Path) -> object:
        record = flight_record.record_of(native.read_flight((folder / "record").read_bytes()))
        flight_report.report_text([record], "", {}, {}, time.monotonic(), 64)
        return repr(record)

    return read


def make_hosts(folder: Path, number: int) -> None:
    (folder / "hosts").write_text(f"# of the lab\nnode-a:2\nnode-b slots={3 + number}\n\nnode.c  # slow\n")


def start_hosts() -> Read:
    def read(folder: Path) -> object:
        found = hosts.read_hosts(folder / "hosts")
        return found, hosts.place(found, 9, 2)

    return read


def make_members(folder: Path, number: int) -> None:
    (folder / "members").write_text("".join(f"{2**22 + 5 + rank} {77 + number}\n" for rank in range(2)))


def start_members() -> Read:
    rendezvous_id = f"soak{secrets.token_hex(8)}"

    def read(folder: Path) -> object:
        path = Path(lost_ranks._members(rendezvous_id))
        try:
            path.write_bytes((folder / "members").read_bytes())
            return lost_ranks.lost_rank(rendezvous_id, 2).count("ended before all ranks had joined")
        finally:
            path.unlink(missing_ok=True)

    return read
