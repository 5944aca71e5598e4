# SPDX-License-Identifier: Apache-2.0
"""Two ranks with NVIDIA's NCCL, one of which fails: the other must end with a typed error in time, nobody may stay.

    python -m tools.gpu_check.faults
    python -m tools.gpu_check.faults --faults kill stop --modes graph

A GPU each, or one where NCCL >= 2.30 lets ranks share it. Each fault comes between steps of a CNN, eager and recorded;
TIMEOUT_S is what the ranks wait for each other. Last, a job whose rank is killed starts again from its checkpoint, and
must end with the bits of one that was not, where cuDNN's algorithms are not timed. Exits 1 if not all is so.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.rows import QUICK, SKIPPED, explain, report
from tools.gpu_check.ranks import RANKS, SHARED_GPU, why_not

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

TIMEOUT_S, MARGIN_S = 10, 5
TOGETHER = 2 if QUICK else 6  # jobs at a time
STEPS, FAILS_AT, SAVES_EVERY = 40, 12, 5
BATCH = 2 if QUICK else 8
MAX_STEPS = 100_000  # what the other rank would go on to
DEAD, SILENT = "died|ended|NCCL failed", "in NCCL for the other ranks|waited"
# what the error of the other rank says
FAULTS = {
    "kill": DEAD,
    "exit": f"{DEAD}|{SILENT}",  # rank 1 waits in ncclCommFinalize for rank 0, which sees its time-out
    "raise": f"{DEAD}|RuntimeError",
    "interrupt": f"{DEAD}|KeyboardInterrupt",
    "stop": SILENT,
    "sleep": SILENT,
    "other collective": SILENT,
    "illegal address": f"{DEAD}|DeviceError",
}
ON_GPU_ALONE = ("other collective", "illegal address")  # the stand-ins know nothing of these
JOBS = {"fixed": "yes", "timed": ""}  # how cuDNN's algorithms are chosen -> whether bits must be equal
END_S = 20  # of the launcher, on top


def main() -> int:
    if "SINGA_LITE_RANK" in os.environ:
        return rank(*sys.argv[1:])
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = [fault for fault in FAULTS if not (QUICK and fault in ON_GPU_ALONE)]
    parser.add_argument("--faults", nargs="*", choices=FAULTS, default=known, metavar="FAULT")
    parser.add_argument("--modes", nargs="+", choices=("graph", "eager"), default=("graph", "eager"))
    parser.add_argument("--jobs", nargs="*", choices=JOBS, default=list(JOBS), metavar="fixed|timed")
    arguments = parser.parse_args()
    if note := why_not():
        report(f"{RANKS} ranks over NCCL, of which one fails", None, note=f"skipped: {note}")
        return SKIPPED
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(TOGETHER) as pool:
        results = [pool.submit(goes_on, chosen, Path(folder)) for chosen in arguments.jobs]
        results += [
            pool.submit(is_told, fault, mode, Path(folder))
            for mode in arguments.modes
            for fault in arguments.faults
        ]
    return int(not all(result.result() for result in results))


def is_told(fault: str, mode: str, folder: Path) -> bool:
    """Report what one fault of rank 1 is to rank 0; whether that is a typed error in time."""
    folder = folder / f"{fault} {mode}".replace(" ", "-")
    folder.mkdir()
    code, output, left = run_job([fault, mode, str(folder)])
    title = f"{fault} at rank 1, {mode}: seconds until rank 0 has its error"
    try:
        begin = float((folder / "begin").read_text())
        told = json.loads((folder / "told").read_text())
    except (OSError, ValueError) as error:
        print(output[-5000:])
        report(title, None, met=False, required="an error", note=f"exit code {code}: {explain(error)}")
        return False
    seconds, limit = told["time"] - begin, TIMEOUT_S + MARGIN_S
    is_right = seconds <= limit and told["type"] == "CommError" and re.search(FAULTS[fault], told["text"])
    is_right = bool(is_right and code != 0 and not left)
    note = f"exit code {code}, {left} processes left, {told['type']}: {told['text'][:200]}"
    report(title, seconds, met=is_right, required=f"CommError in {limit} s", note=note)
    if not is_right:
        print(output[-5000:])
    return is_right


def goes_on(chosen: str, folder: Path) -> bool:
    """Report whether a job with a killed rank ends with the bits of one without; whether that is as required."""
    digests, notes = [], []
    for what in ("whole", "killed"):
        place = folder / f"{chosen}-{what}"
        place.mkdir()
        options = ["--max-restarts", "1", "--checkpoint", str(place / "job")]
        code, output, left = run_job([what, chosen, str(place)], *options)
        notes.append(f"{what}: exit code {code}, {left} processes left")
        try:
            digests.append((place / "digest").read_text())
        except OSError:
            print(output[-5000:])
            digests.append(f"none of {what}")
    is_same, required = digests[0] == digests[1], JOBS[chosen]
    title = f"a job that a killed rank interrupts has the bits of one without, algorithms {chosen}"
    met = is_same if required else None
    report(title, "yes" if is_same else "NO", met=met, required=required, note="; ".join(notes))
    return is_same or not required


def run_job(arguments: list[str], *options: str) -> tuple[int, str, int]:
    """Run this file's ranks: (the launcher's exit code, the output, number of processes that stayed, now killed)."""
    mark = f"GPU_CHECK_FAULT={os.getpid()}-{time.monotonic_ns()}"
    command = [
        sys.executable,
        "-m",
        "singa_lite",
        "run",
        "-n",
        str(RANKS),
        "--timeout-s",
        str(TIMEOUT_S),
        *options,
    ]
    command += ["-m", "tools.gpu_check.faults", *arguments]
    environment = {**os.environ, **SHARED_GPU, **dict([mark.split("=")])}
    with tempfile.TemporaryFile("w+") as output:
        try:
            limit_s = 3 * (TIMEOUT_S + MARGIN_S) + END_S
            code = subprocess.run(
                command, env=environment, stdout=output, stderr=output, timeout=limit_s, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            code = 124
        output.seek(0)
        return code, output.read(), kill_with(mark)


def kill_with(mark: str) -> int:
    """Kill every process that has ``mark`` in its environment; how many there were."""
    killed = 0
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark.encode() in path.read_bytes().split(b"\0"):
                os.kill(int(path.parent.name), signal.SIGKILL)
                killed += 1
        except OSError:
            continue
    return killed


# ---- in a rank ---------------------------------------------------------------------------------------


def rank(what: str, mode: str, folder: str) -> int:
    """One rank's part of a job."""
    if what in FAULTS:
        return until_told(what, mode == "graph", Path(folder))
    return job(what == "killed", mode == "timed", Path(folder))


def until_told(fault: str, use_graph: bool, folder: Path) -> int:
    """Train; rank 1 fails at a step, and rank 0 writes the error that it gets of this."""
    from singa_lite.errors import SingaLiteError

    step, gpu, communicator, _ = cnn(use_graph)
    try:
        for number in range(MAX_STEPS):
            if communicator.rank == 1 and number == FAILS_AT:
                gpu.Sync()
                (folder / "begin").write_text(str(time.time()))
                fail(fault, gpu, communicator)
            step(number)
    except SingaLiteError as error:
        if communicator.rank == 0:
            told = {"time": time.time(), "type": type(error).__name__, "text": " ".join(str(error).split())}
            (folder / "told.new").write_text(json.dumps(told))
            (folder / "told.new").rename(folder / "told")
        raise
    return 0


def fail(fault: str, gpu: Any, communicator: Any) -> None:
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "exit":
        sys.exit(0)
    elif fault == "raise":
        raise RuntimeError("the script's own")
    elif fault == "interrupt":
        signal.raise_signal(signal.SIGINT)
    elif fault == "sleep":
        time.sleep(3600)
    elif fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "other collective":
        communicator.all_gather(gpu.backend.zeros((7,), np.float32)).wait()
    else:
        write_nowhere(gpu)


def write_nowhere(gpu: Any) -> None:
    """Run a kernel that the GPU ends, which spoils this process's context."""
    import cupy

    code = 'extern "C" __global__ void nowhere(long long* address) { *address = 1; }'
    cupy.RawKernel(code, "nowhere")((1,), (1,), (np.uint64(64),))
    gpu.Sync()


def job(is_killed: bool, is_timed: bool, folder: Path) -> int:
    """Train with checkpoints; rank 1 kills itself once if it shall; rank 0 writes the digest of the parameters."""
    from singa_lite import checkpoint, device

    device.benchmark_convolutions(is_timed)
    step, gpu, communicator, model = cnn(use_graph=True)
    found = checkpoint.load_job(folder / "job", model)
    for number in range(found.step if found else 0, STEPS):
        if is_killed and communicator.rank == 1 and number == FAILS_AT and found is None:
            gpu.Sync()
            os.kill(os.getpid(), signal.SIGKILL)
        step(number)
        if (number + 1) % SAVES_EVERY == 0:
            checkpoint.save_job(folder / "job", model)
    if communicator.rank == 0:
        (folder / "digest").write_text(digest_of(model))
    return 0


def cnn(use_graph: bool) -> tuple[Any, Any, Any, Any]:
    """A CNN under DistOpt: (its training step, called with the step's number; GPU; communicator; model)."""
    from model.cnn import CNN

    from singa_lite import device, opt, tensor

    optimizer = opt.DistOpt(opt.SGD(lr=0.01, momentum=0.9))
    communicator = optimizer.communicator
    gpu = device.create_device(communicator.local_rank)
    gpu.SetRandSeed(3)
    model = CNN()
    model.set_optimizer(optimizer)

    def batch(number: int) -> tuple[Any, Any]:
        rng = np.random.default_rng([communicator.rank, number])
        x = rng.standard_normal((BATCH, 1, 28, 28)).astype(np.float32)
        labels = rng.integers(0, 10, BATCH).astype(np.int32)
        return tensor.from_numpy(x, gpu), tensor.from_numpy(labels, gpu)

    model.compile([batch(0)[0]], use_graph=use_graph)

    def step(number: int) -> float:
        return float(model(*batch(number), "fp32")[1].item())

    return step, gpu, communicator, model


def digest_of(model: Any) -> str:
    from singa_lite import tensor

    digest = hashlib.sha256()
    for param in model.get_params().values():
        digest.update(tensor.to_numpy(param).tobytes())
    return digest.hexdigest()


if __name__ == "__main__":
    sys.exit(main())
