# SPDX-License-Identifier: Apache-2.0
"""Time collectives of the transports of this host: by kind, size, number of ranks, and emulated link."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..comm.base import KINDS
from ..comm.link import EMULATED, link_of_process, parse_link
from ..errors import CommError, OptionError, check_int, is_int_text
from ..files import atomic_file
from ..launch.one_host import LaunchOptions, launch
from ..launch.reaper import die_with_launcher
from ..launch.several_hosts import find_mpiexec
from ..path_arguments import new_file
from .collectives import Task
from .command import check_ranks, markdown_table, rank_command, read_ints, read_list, run_command, say
from .report import Figure
from .runs import Provenance, machine_facts, machine_text, software_facts

TRANSPORTS = ("shm", "mpi")
REAL = "none"  # instead of a link
UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20}
EPILOG = """
A time is from a barrier before the call until wait() has returned, on the slowest rank: the median over the calls of a
round, of about 0.2 s, and of that the median over the rounds, with the lowest and highest. Arrays are float32; a size
is that of what one rank gives. Sent is what a rank puts on a ring. Emulated links are for shm; mpi is measured on its
own.
"""


def main(arguments: Sequence[str]) -> int:
    """Run ``singa-lite bench allreduce`` with these arguments; returns the exit code."""
    parser = _parser()
    given = parser.parse_args(arguments)
    return run_command(parser, lambda: compare(plan(given), given.json))


def plan(given: argparse.Namespace) -> list[Task]:
    """Return what each world measures.

    Raises:
        OptionError: a name, number or link that cannot be measured, or one given twice.
    """
    collectives = read_list("collectives", given.collectives, KINDS)
    transports = read_list("transports", given.transports, TRANSPORTS)
    sizes = [_bytes(word) for word in read_list("sizes", given.sizes)]
    ranks = [check_ranks("bench", number, 2) for number in read_ints("ranks", given.ranks)]
    check_int("bench", "rounds", given.rounds, 1)
    links = [None if text == REAL else str(parse_link("--link", text)) for text in given.link or [REAL]]
    if given.link is None and (found := link_of_process()) is not None:
        links = [str(found)]
    if len(set(links)) < len(links):
        raise OptionError(f"bench: --link {' --link '.join(given.link)} has one twice; leave it out")
    if None not in links and not set(transports) <= set(EMULATED):
        raise OptionError(
            f"bench: --transports {given.transports}: links of mpi are real; leave it out, or add --link {REAL}, on "
            "which alone it is measured"
        )
    return [
        Task(transport, number, link, collectives, sizes, given.rounds)
        for transport in transports
        for number in ranks
        for link in links
        if link is None or transport in EMULATED
    ]


def compare(tasks: Sequence[Task], file: Path | None) -> int:
    """Measure in processes of their own, and print the table of all.

    Args:
        tasks: one world each.
        file: gets the table as JSON; None: nothing does.

    Returns:
        0, or the exit code of the world that failed; then there is no table.

    Raises:
        CommError: there is no mpiexec of MPICH. CheckpointError: the file cannot be written.
    """
    if any(task.transport == "mpi" for task in tasks):
        find_mpiexec()  # before anything runs
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for number, task in enumerate(tasks, 1):
            what = f"{task.transport}, {task.ranks} ranks, link {task.link or 'that of the machine'}"
            say(f"[{number}/{len(tasks)}] {what}")
            measured = Path(folder) / f"{number}.json"
            code = _run(task, measured)
            if code != 0:
                say(f"[{number}/{len(tasks)}] {what}: failed with exit code {code}")
                return code
            rows += [_with_median(task, row) for row in json.loads(measured.read_bytes())]
    provenance = Provenance(machine_facts(), software_facts(), {}, {})
    print(
        f"{machine_text(provenance)}\nmedian (lowest to highest) of {tasks[0].rounds} rounds\n\n{_table(rows)}"
    )
    if file is not None:
        content = {"machine": provenance.machine, "software": provenance.software, "rows": rows}
        with atomic_file(file) as out:
            out.write(json.dumps(content, indent=1).encode())
    return 0


def _run(task: Task, measured: Path) -> int:
    """Measure on the ranks of one world; return the exit code."""
    command = rank_command("collectives", json.dumps(asdict(task)), str(measured))
    if task.transport == "shm":
        return launch(command, task.ranks, LaunchOptions(num_servers=0, link=task.link or ""))
    environ = {name: value for name, value in os.environ.items() if name != "SINGA_LITE_LINK"}
    started = [find_mpiexec()[0], "-n", str(task.ranks), sys.executable, *command]
    done = subprocess.run(started, stdin=subprocess.DEVNULL, env=environ, preexec_fn=die_with_launcher())
    if done.returncode == 0 and not measured.exists():
        raise CommError("bench allreduce: mpiexec ended with exit code 0, but rank 0 wrote no result")
    return done.returncode


def _with_median(task: Task, row: dict[str, Any]) -> dict[str, Any]:
    seconds = row["seconds"]
    world = {"transport": task.transport, "ranks": task.ranks, "link": task.link}
    spread = {"median_s": statistics.median(seconds), "lowest_s": min(seconds), "highest_s": max(seconds)}
    return {**world, **row, **spread}


def _table(rows: Sequence[dict[str, Any]]) -> str:
    names = ["collective", "transport", "ranks", "link", "bytes", "sent by a rank", "ms", "sent, GB/s"]
    cells = []
    for row in rows:
        world = [row["collective"], row["transport"], str(row["ranks"]), row["link"] or "-"]
        seconds = Figure(row["median_s"], row["lowest_s"], row["highest_s"])
        rate = f"{row['bytes_sent'] / row['median_s'] / 1e9:.3g}"
        sizes = [f"{row['bytes']:,}", f"{row['bytes_sent']:,}"]
        cells.append([*world, *sizes, seconds.text(".4g", 1e3), rate])
    return markdown_table(names, cells)


def _bytes(word: str) -> int:
    """Return the bytes of "4096", "64k" or "16m"."""
    unit = word[-1:] if word[-1:] in UNITS else ""
    number = word.removesuffix(unit)
    if not is_int_text(number) or int(number) < 1:
        raise OptionError(f"bench: --sizes: {word!r}: expected bytes such as 4096, 64k or 16m")
    return int(number) * UNITS[unit]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="singa-lite bench allreduce", description=__doc__, epilog=EPILOG)
    add = parser.add_argument
    add(
        "--collectives",
        default="all_reduce",
        metavar="A,B,...",
        help=f"of {', '.join(KINDS)} (default %(default)s)",
    )
    add(
        "--sizes",
        default="4k,64k,1m,16m",
        metavar="A,B,...",
        help="bytes; k and m are KiB and MiB (default %(default)s)",
    )
    add("--ranks", default="2", metavar="A,B,...", help="numbers of ranks, each >= 2 (default %(default)s)")
    add("--transports", default="shm", metavar="A,B,...", help="of shm, mpi (default %(default)s)")
    add(
        "--link",
        action="append",
        metavar="RATE,LATENCY",
        help=f"emulated link of each rank, such as 100mbit,1ms; may be repeated; {REAL}: that of the machine (default: "
        "SINGA_LITE_LINK, else none)",
    )
    add("--rounds", type=int, default=3, metavar="N", help="default %(default)s")
    add("--json", type=new_file, metavar="FILE", help="write the table there, with all rounds")
    return parser
