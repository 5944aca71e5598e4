# SPDX-License-Identifier: Apache-2.0
"""All-reduce of float32 sums on one host, called from Python: shm beside torch's gloo and MPICH.

    python benchmarks/allreduce.py                                         # shm and, if installed, MPICH
    python benchmarks/allreduce.py --torch-python ~/torchvenv/bin/python   # and gloo, from that interpreter
    python benchmarks/allreduce.py --ranks 2,3,4 --json allreduce.json

`singa-lite bench allreduce` measures other collectives, transports and links; this script is for the peers.

Call + wait, in place, on numpy arrays (gloo: on a torch tensor). A round is the median over many calls, on
the slowest rank; peers are interleaved within a round; the table gives the median of 7 rounds. Where gloo's own
rounds differ by more than 1.5 times the machine was not quiet, and the rounds of that size are run again.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import secrets
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SIZES = (4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20)  # bytes
CALLS = {4 << 10: 1000, 64 << 10: 500, 1 << 20: 100, 16 << 20: 12, 64 << 20: 5}
ROUNDS, MAX_REPEATS, NOISE = 7, 3, 1.5
HEAD = "| ranks | KB | shm ms | gloo ms | MPICH ms | gloo / shm | MPICH / shm | asked |\n"
TARGETS = {  # bytes: (times faster than gloo, times faster than MPICH) on 2 ranks
    4 << 10: (100, None),
    1 << 20: (12, 2.5),
    16 << 20: (5, 2),
    64 << 20: (4, 3),
}


# ---- one rank ----------------------------------------------------------------------------------------


def measure(call: Callable[[], object], calls: int) -> float:
    """Median seconds of ``call``, after a tenth as many to warm up."""
    for _ in range(max(2, calls // 10)):
        call()
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def rank_main(kind: str, rank: int, ranks: int, size_bytes: int, rendezvous_id: str) -> None:
    """Measure one round on this rank and print its seconds."""
    count, calls = size_bytes // 4, CALLS[size_bytes]
    if kind == "gloo":
        import torch
        import torch.distributed

        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{rendezvous_id}", rank=rank, world_size=ranks
        )
        tensor = torch.zeros(count)
        seconds = measure(lambda: torch.distributed.all_reduce(tensor, async_op=True).wait(), calls)
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    elif kind == "mpich":
        import numpy as np
        from mpi4py import MPI

        array = np.zeros(count, np.float32)
        seconds = measure(lambda: MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, array), calls)
        seconds = max(MPI.COMM_WORLD.allgather(seconds))
        if MPI.COMM_WORLD.Get_rank() != 0:  # mpiexec mixes what two ranks print
            return
    else:
        import numpy as np

        from singa_lite.comm.base import World
        from singa_lite.comm.shm import ShmCommunicator

        communicator = ShmCommunicator(World(rank, ranks, rank, ranks, rendezvous_id, "shm"), 60)
        array = np.zeros(count, np.float32)
        seconds = measure(lambda: communicator.all_reduce(array, "sum").wait(), calls)
        communicator.barrier()
        communicator.close()
    print(json.dumps(seconds), flush=True)


# ---- all ranks ---------------------------------------------------------------------------------------


def run_round(kind: str, ranks: int, size_bytes: int, torch_python: str) -> float:
    """Seconds of one call on the slowest rank."""
    python = torch_python if kind == "gloo" else sys.executable
    with tempfile.TemporaryDirectory() as folder:
        rendezvous_id = str(Path(folder) / "store") if kind == "gloo" else "bench" + secrets.token_hex(8)
        base = [python, str(Path(__file__).resolve()), "--rank-of", kind]
        tail = [str(ranks), str(size_bytes), rendezvous_id]
        if kind == "mpich":
            mpiexec = str(Path(sys.executable).with_name("mpiexec"))
            mpiexec = mpiexec if Path(mpiexec).exists() else shutil.which("mpiexec") or mpiexec
            commands = [[mpiexec, "-n", str(ranks), *base, "-1", *tail]]
        else:
            commands = [[*base, str(rank), *tail] for rank in range(ranks)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        jobs = [subprocess.Popen(c, stdout=subprocess.PIPE, text=True, env=environment) for c in commands]
        try:
            outputs = [job.communicate(timeout=120)[0] for job in jobs]
        finally:
            for job in jobs:
                job.kill()
    if any(job.returncode for job in jobs):
        raise RuntimeError(f"{kind} failed on {ranks} ranks; its message stands above")
    return max(json.loads(line) for output in outputs for line in output.split())


def run_size(kinds: list[str], ranks: int, size_bytes: int, torch_python: str) -> dict[str, list[float]]:
    """Seconds per peer and round, the peers interleaved; repeated while gloo is noisy."""
    for _ in range(MAX_REPEATS):
        times: dict[str, list[float]] = {kind: [] for kind in kinds}
        for _ in range(ROUNDS):
            for kind in kinds:
                times[kind].append(run_round(kind, ranks, size_bytes, torch_python))
        gloo = times.get("gloo", [1.0])
        if max(gloo) <= NOISE * min(gloo):
            break
        print(
            f"  ({size_bytes >> 10} KB: gloo's rounds differ {max(gloo) / min(gloo):.1f} times)", flush=True
        )
    return times


def verdict(size_bytes: int, ranks: int, medians: dict[str, float]) -> str:
    """What was required of this row, and whether it was reached."""
    ours, gloo, mpich = medians["shm"], medians.get("gloo"), medians.get("mpich")
    wants: list[tuple[str, bool]] = []
    if ranks == 2:
        over_gloo, over_mpich = TARGETS.get(size_bytes, (None, None))
        if gloo and over_gloo:
            wants.append((f">= {over_gloo}x gloo", gloo / ours >= over_gloo))
        if mpich and over_mpich:
            wants.append((f">= {over_mpich}x MPICH", mpich / ours >= over_mpich))
        if mpich and size_bytes == 4096:
            wants.append(("<= max(1.5x MPICH, 15 us)", ours <= max(1.5 * mpich, 15e-6)))
    elif mpich and size_bytes >= 64 << 10:
        wants.append((">= 1x MPICH", mpich >= ours))
    return ", ".join(f"{text}: {'met' if is_met else 'MISSED'}" for text, is_met in wants)


def machine(torch_python: str) -> dict[str, Any]:
    """What the figures depend on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next(
        (line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine()
    )
    versions = {"python": platform.python_version()}
    for module, python in (("numpy", sys.executable), ("mpi4py", sys.executable), ("torch", torch_python)):
        query = f"import {module}; print({module}.__version__)"
        answer = subprocess.run([python, "-c", query], capture_output=True, text=True) if python else None
        if answer is not None and answer.returncode == 0:
            versions[module] = answer.stdout.strip()
    cores = len(os.sched_getaffinity(0))
    return {"cpu": model, "cores": cores, "date": str(datetime.date.today()), "versions": versions}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--ranks", default="2", help="numbers of ranks, e.g. 2,3,4 (gloo takes part with 2)")
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="bytes, out of the default ones")
    parser.add_argument("--torch-python", default="", help="interpreter that has torch")
    parser.add_argument("--json", type=Path, help="store all rounds here")
    parser.add_argument("--rank-of", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        kind, rank, ranks, size_bytes, rendezvous_id = options.rank_of
        return rank_main(kind, int(rank), int(ranks), int(size_bytes), rendezvous_id)
    about = machine(options.torch_python)
    print(json.dumps(about))
    has_mpich = "mpi4py" in about["versions"]
    records = []
    print(HEAD + "|---" * 8 + "|")
    for ranks in map(int, options.ranks.split(",")):
        gloo = ["gloo"] if options.torch_python and ranks == 2 else []
        kinds = ["shm", *gloo, *(["mpich"] if has_mpich else [])]
        for size_bytes in map(int, options.sizes.split(",")):
            times = run_size(kinds, ranks, size_bytes, options.torch_python)
            medians = {kind: statistics.median(rounds) for kind, rounds in times.items()}
            records.append({"ranks": ranks, "bytes": size_bytes, "seconds": times, "median_s": medians})
            shown = [f"{medians[k] * 1e3:.4f}" if k in medians else "" for k in ("shm", "gloo", "mpich")]
            shown += [f"{medians[k] / medians['shm']:.1f}" if k in medians else "" for k in ("gloo", "mpich")]
            shown.append(verdict(size_bytes, ranks, medians))
            print(
                f"| {ranks} | {size_bytes >> 10} | {' | '.join(shown)} |",
                flush=True,
            )
    if options.json:
        options.json.write_text(json.dumps({"machine": about, "rounds": records}, indent=1))


if __name__ == "__main__":
    main()
