# SPDX-License-Identifier: Apache-2.0
"""How long the imports of a script that trains take beside numpy's own; the promise is at most 0.1 s more.

    python benchmarks/import_time.py            # median of 11 fresh processes each, interleaved

Prints the medians in milliseconds, that of `singa-lite run` too, and exits 1 when the promise is broken. Numbers:
docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys

ALLOWED_MS = 100
# `import singa_lite` alone imports hardly anything
WHOLE = "from singa_lite import autograd, device, initializer, layer, model, opt, tensor"
STATEMENTS = {"numpy": "import numpy", "singa_lite": WHOLE, "its launcher": "import singa_lite.cli"}
TIMED = "import time; start = time.perf_counter(); {}; print((time.perf_counter() - start) * 1e3)"


def import_ms(statement: str) -> float:
    """Milliseconds of ``statement`` in a fresh interpreter, its own start not counted."""
    command = [sys.executable, "-I", "-c", TIMED.format(statement)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=11)
    rounds = parser.parse_args().rounds
    times = [
        {name: import_ms(statement) for name, statement in STATEMENTS.items()} for _ in range(rounds + 1)
    ]
    # the first round reads the files from disk
    medians = {name: statistics.median(time[name] for time in times[1:]) for name in STATEMENTS}
    for name, median in medians.items():
        print(f"{name:12} {median:7.1f} ms")
    extra = medians["singa_lite"] - medians["numpy"]
    print(f"{'difference':12} {extra:7.1f} ms (at most {ALLOWED_MS})")
    return int(extra > ALLOWED_MS)


if __name__ == "__main__":
    sys.exit(main())
