# SPDX-License-Identifier: Apache-2.0
"""A job to disturb: trains a small model, saves every so many steps, and writes a hash of all states at the end.

    singa-lite run -n 3 tools/soak/train.py FOLDER RESULT --dist-option dgc:0.05

FOLDER gets the checkpoints; RESULT-<rank> the hash. It goes on from what is in FOLDER.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from singa_lite import checkpoint  # noqa: E402
from singa_lite.comm.rendezvous import process_communicator  # noqa: E402
from tests.checkpoint.job_net import batch, bits, compiled  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("result")
    parser.add_argument("--dist-option", default="fp32")
    parser.add_argument("--graph", action="store_true")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save-every", type=int, default=20)
    parser.add_argument("--no-block", action="store_true")
    arguments = parser.parse_args()
    communicator = process_communicator()
    net = compiled(communicator, arguments.dist_option, arguments.graph)
    job = checkpoint.load_job(arguments.folder, net)
    start = job.step if job else 0
    print(f"training from {start}", flush=True)
    for step in range(start, arguments.steps):
        net(*batch(step, communicator.rank))
        if (step + 1) % arguments.save_every == 0:
            checkpoint.save_job(arguments.folder, net, block=not arguments.no_block)
    print("trained", flush=True)
    digest = hashlib.sha256()
    for name, value in sorted(bits(net).items()):
        digest.update(name.encode() + value)
    Path(f"{arguments.result}-{communicator.rank}").write_text(digest.hexdigest())


if __name__ == "__main__":
    main()
