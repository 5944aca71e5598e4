# SPDX-License-Identifier: Apache-2.0
"""`singa-lite plan`: its arguments, and calibrations that are measured in a process of their own."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from ..comm.link import Link, link_of_process, parse_link
from ..errors import OptionError, check_int, is_int_text
from ..launch.reaper import die_with_launcher
from ..path_arguments import new_file
from .calibration import Calibration, read_calibration, write_calibration
from .command import check_ranks, rank_command, read_list
from .cost import ALGORITHMS, Cluster, Network
from .measure import BATCH, MEASURED
from .models import MODELS, check_model
from .plan import report
from .validation import validate
from .validation_rank import Trial
from .wire_bytes import messages_of

STEPS = 24
MAX_RANKS = 10**9
DESCRIPTION = """
Predict what a training step of each dist_option would send and take on a cluster, from the times of one rank and a
cost model. The times are measured here first, in under a minute, or read with --calibration. With --validate, measure
what is predicted: for each number of ranks as many processes of this host train over the emulated --link, or without it
over shared memory, and predicted and measured step times are printed with the error of each. The exit code is then 1 if
errors are above 15 % in the median or 30 % at worst, or if rank 0 sent other bytes than predicted. Keep the machine
idle meanwhile; its load is printed.
"""


def add_plan(commands: Any) -> argparse.ArgumentParser:
    """Add the command `plan` to the subparsers ``commands`` (Any: argparse keeps their class private)."""
    plan: argparse.ArgumentParser = commands.add_parser(
        "plan", help="predict the step time of each dist_option on a cluster", description=DESCRIPTION
    )
    add = plan.add_argument
    add("--ranks", required=True, metavar="N,...", help="numbers of ranks, for example 8,64,1024")
    add(
        "--link",
        metavar="RATE,LATENCY",
        help="between hosts, for example 25gbit,10us; left out with --validate alone",
    )
    add(
        "--options", metavar="A,B,...", help="dist_options, as in fp32,sparseTopK:0.01 (default: ten of them)"
    )
    add("--model", metavar="MODEL", help=f"{', '.join(MODELS)}, or file.py:function (default {MODELS[0]})")
    add("--batch-size", type=int, metavar="N", help=f"samples a rank and step (default {BATCH})")
    add("--gpus-per-node", type=int, default=1, metavar="P", help="ranks a host (default %(default)s)")
    add("--node-link", metavar="RATE,LATENCY", help="between ranks of a host (default: takes no time)")
    add(
        "--all-reduce",
        choices=ALGORITHMS,
        help="algorithm where a host has one rank; smaller: the faster of ring and recursive doubling, as MPI and NCCL "
        "choose; ring: as `run --link` emulates (default smaller)",
    )
    add("--calibration", type=Path, metavar="FILE", help="JSON with times of one rank, see docs/sync.md")
    add("--save", type=new_file, metavar="FILE", help="write the calibration there")
    add("--validate", action="store_true", help="measure what is predicted on this host, see above")
    add(
        "--steps",
        type=int,
        metavar="N",
        help=f"with --validate: steps of each option that count, at least (default {STEPS})",
    )
    return plan


def run_plan(given: argparse.Namespace) -> int:
    """Print predictions; return the exit code.

    Raises:
        OptionError: an argument that is wrong, or not for this use. CommError: the ranks of --validate failed.
    """
    sizes = _sizes(given.ranks)
    options = None if given.options is None else read_list("options", given.options)
    for option in options or ():
        messages_of(option, ((1,),), 1)  # raises where there is no formula
    if given.validate:
        return _validate(given, sizes, options)
    _refuse(given, ["steps"], " is for --validate")
    if given.link is None:
        raise OptionError("plan: --link is missing: what joins the hosts, for example --link 25gbit,10us")
    algorithm = given.all_reduce or "smaller"
    outer = Network.of_link(parse_link("--link", given.link), algorithm)
    inner = Network(0.0, 0.0)
    if given.node_link is not None:
        inner = Network.of_link(parse_link("--node-link", given.node_link), algorithm)
    if check_int("plan", "--gpus-per-node", given.gpus_per_node, 1) > MAX_RANKS:
        raise OptionError(f"plan: --gpus-per-node {given.gpus_per_node}: expected at most {MAX_RANKS:,}")
    cluster = Cluster(inner, outer, given.gpus_per_node)
    for size in sizes:
        cluster.num_hosts(size)  # raises here, and not after the measuring
    calibration = _calibration(given, options)
    print(report(calibration, cluster, sizes), flush=True)
    if given.save is not None:
        write_calibration(given.save, calibration)
    return 0


def _validate(given: argparse.Namespace, sizes: list[int], options: list[str] | None) -> int:
    """Return 0 if predictions are near enough, else 1."""
    _refuse(given, ["node_link", "calibration", "save"], " is not for --validate")
    if given.gpus_per_node != 1:
        raise OptionError(
            "plan: --gpus-per-node is not for --validate, where each rank has a link of its own"
        )
    if given.all_reduce not in (None, "ring"):
        raise OptionError(f"plan: --all-reduce {given.all_reduce}: the emulated link of --validate is a ring")
    if min(sizes) < 2:
        raise OptionError(f"plan: --ranks {given.ranks}: --validate needs at least 2, as one sends nothing")
    check_ranks("plan", max(sizes), 2)
    link: Link | None = link_of_process() if given.link is None else parse_link("--link", given.link)
    steps = check_int("plan", "--steps", STEPS if given.steps is None else given.steps, 1)
    trial = Trial(tuple(options or MEASURED), steps, **_work(given))
    return 0 if validate(trial, sizes, link) else 1


def _calibration(given: argparse.Namespace, options: list[str] | None) -> Calibration:
    """Return the calibration in the file that was given, or else measure one: this process loads no kernels."""
    if given.calibration is not None:
        _refuse(given, ["options", "model", "batch_size"], ": --calibration says it; leave one out")
        return read_calibration(given.calibration)
    work = _work(given)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "calibration.json"
        environ = {"OMP_NUM_THREADS": "1", **os.environ}  # more threads would wait for each other
        arguments = [str(path), json.dumps(options or MEASURED), json.dumps(work)]
        command = [sys.executable, *rank_command("measure", *arguments)]
        answer = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            env=environ,
            start_new_session=True,  # so that Ctrl-C is said once
            preexec_fn=die_with_launcher(),
        )
        if answer.returncode != 0:
            raise OptionError("plan: measuring a calibration failed, see above; give one with --calibration")
        return read_calibration(path)


def _refuse(given: argparse.Namespace, names: list[str], why: str) -> None:
    """Raise OptionError if an argument was given that is not for this use."""
    for name in names:
        if getattr(given, name) is not None:
            raise OptionError(f"plan: --{name.replace('_', '-')}{why}")


def _work(given: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of a Workload; OptionError where there is no such model."""
    batch_size = BATCH if given.batch_size is None else given.batch_size
    model = MODELS[0] if given.model is None else given.model
    check_model(model)
    return {"model": model, "batch_size": check_int("plan", "--batch-size", batch_size, 1)}


def _sizes(text: str) -> list[int]:
    words = text.split(",")
    if not all(is_int_text(word) and 1 <= int(word) <= MAX_RANKS for word in words):
        raise OptionError(
            f"plan: --ranks {text!r}: expected whole numbers in 1 .. {MAX_RANKS:,} such as 8,64,1024"
        )
    return [int(word) for word in words]
