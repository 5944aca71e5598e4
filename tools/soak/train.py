# SPDX-License-Identifier: Apache-2.0
"""A job to disturb: trains a small model, saves every so many steps, and writes a hash of all states at the end.

    singa-lite run -n 3 tools/soak/train.py FOLDER RESULT --dist-option dgc:0.05
    singa-lite run -n 3 --max-restarts 1 tools/soak/train.py FOLDER RESULT --fault exit:2:33

    singa-lite run -n 2 -s 1 tools/soak/train.py FOLDER RESULT --dist-option store

FOLDER gets the checkpoints, and it goes on from what is there; RESULT-<rank> gets the hash. A fault is
kind:rank:step, in the first round alone.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import singa_lite.checkpoint.saving as saving  # noqa: E402
from singa_lite import checkpoint, gluon, kvstore, opt  # noqa: E402
from singa_lite.comm.rendezvous import process_communicator  # noqa: E402
from singa_lite.files import atomic_file  # noqa: E402
from tests.checkpoint.job_net import Net, batch, bits, compiled, with_trainer  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("result")
    parser.add_argument("--dist-option", default="fp32")
    parser.add_argument("--graph", action="store_true")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save-every", type=int, default=20)
    parser.add_argument("--no-block", action="store_true")
    parser.add_argument("--fault", help="kind:rank:step")
    parser.add_argument(
        "--usage", action="store_true", help="print memory and descriptors half way and at the end"
    )
    arguments = parser.parse_args()
    net: Net
    trainer: gluon.Trainer | None
    if arguments.dist_option == "store":
        store = kvstore.create("dist_sync")
        assert isinstance(store, kvstore.KVStore)
        communicator, with_store = store.communicator, with_trainer(store, opt.SGD(lr=0.1, momentum=0.9))
        net, trainer = with_store, with_store.trainer
    else:
        communicator, trainer = process_communicator(), None
        net = compiled(communicator, arguments.dist_option, arguments.graph)
    job = checkpoint.load_job(arguments.folder, net, trainer=trainer)
    start = job.step if job else 0
    print(f"training from {start}", flush=True)
    for step in range(start, arguments.steps):
        if arguments.fault and os.environ.get("SINGA_LITE_RESTART", "0") == "0":
            kind, rank, at = arguments.fault.split(":")
            if (int(rank), int(at)) == (communicator.rank, step):
                print(f"fault at {time.time()}", flush=True)
                FAULTS[kind](communicator)
        net(*batch(step, communicator.rank))
        if step == start:
            print(f"first step at {time.time()}", flush=True)
        if (step + 1) % arguments.save_every == 0:
            checkpoint.save_job(arguments.folder, net, trainer=trainer, block=not arguments.no_block)
        if arguments.usage and step + 1 in (arguments.steps // 2, arguments.steps):
            print(f"usage {usage()}", flush=True)
    print("trained", flush=True)
    digest = hashlib.sha256()
    for name, value in sorted(bits(net).items()):
        digest.update(name.encode() + value)
    Path(f"{arguments.result}-{communicator.rank}").write_text(digest.hexdigest())


def usage() -> str:
    """Resident memory in kB, and open descriptors."""
    lines = Path("/proc/self/status").read_text().splitlines()
    resident = next(line.split()[1] for line in lines if line.startswith("VmRSS"))
    return f"{resident} {len(os.listdir('/proc/self/fd'))}"


# ---- faults ----------------------------------------------------------------------------------------------


def send_self(number: signal.Signals) -> Callable[[Any], None]:
    """A signal to this process."""
    return lambda communicator: os.kill(os.getpid(), number)


def stop_and_go_on(communicator: Any) -> None:
    """Stop for half a second."""
    subprocess.Popen(["sh", "-c", f"sleep 0.5; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


def segmentation_fault(communicator: Any) -> None:
    ctypes.string_at(0)


def loop(communicator: Any) -> None:
    while True:
        pass


def other_collective(communicator: Any) -> None:
    communicator.barrier(name="that the others do not call")


def raise_error(communicator: Any) -> None:
    raise RuntimeError("a fault")


def die_while_saving(communicator: Any) -> None:
    """Be killed in the middle of the next save."""

    def die(path: Path, arrays: Any) -> None:
        with atomic_file(path) as file:
            file.write(b"half")
            file.flush()
            os.kill(os.getpid(), signal.SIGKILL)

    saving.write_arrays = die


FAULTS: dict[str, Callable[[Any], None]] = {
    "kill": send_self(signal.SIGKILL),
    "raise": raise_error,
    "exit": lambda communicator: sys.exit(0),
    "exit3": lambda communicator: sys.exit(3),
    "_exit": lambda communicator: os._exit(0),
    "segv": segmentation_fault,
    "int": send_self(signal.SIGINT),
    "term": send_self(signal.SIGTERM),
    "stop": send_self(signal.SIGSTOP),
    "stopcont": stop_and_go_on,
    "loop": loop,
    "other": other_collective,
    "save": die_while_saving,
}


if __name__ == "__main__":
    main()
