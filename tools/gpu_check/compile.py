# SPDX-License-Identifier: Apache-2.0
"""Compile every own CUDA kernel for all its element types, with all cores, into cupy's cache.

    python -m tools.gpu_check.compile

Whatever runs afterwards finds them there; without this, processes that start together compile the same ones, as cupy's
cache has no lock. Exits 1 if a kernel does not compile.
"""

from __future__ import annotations

import os
import re
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from benchmarks.gpu.rows import QUICK, explain, report

# .cu file -> the element types T and U its kernels are started with, in numpy's letters
TYPES = {
    file: types.split()
    for file, types in {
        "elementwise": "e E f d i l",
        "move": "ff ee EE dd ef fe Ef fE fd df ei fi di il ii ll lf if ?f f? e? E? d? i? l? BB",
        "strided": "ff ee EE dd ef fe Ef fE fd df ei fi di il ii ll lf if ?f f? e? E? d? i? l? BB DD",
        "reduce": "e E f d i l ef Ef",
        "loss": "ei Ei fi di el El fl dl ee EE ff dd fe fE",
        "random": "e E f d",
        "quantize": "e f d",
        "update": "e f d",
        "pool": "eB EB fB dB ei Ei fi di",
        "select": "ei fi di el fl dl",
        "store": "l",
        "indices": "il ll",
        "random_indices": "i l",
        "signs": "el fl dl",
        "gather": "ei Ei fi di ii li el El fl dl il ll",
        "layer_norm": "e E f d ef Ef",
        "batch_norm": "e E f",
        "low_rank": "e f d",
    }.items()
}
# those of single kernels besides
MORE_TYPES = {f"elementwise.{name}_formula": ["ef", "Ef"] for name in ("add", "add_relu", "add_gelu")}


def main() -> int:
    begin, jobs = time.monotonic(), sources()
    if QUICK:  # one source of each file
        jobs = {name.partition(".")[0]: job for name, job in reversed(jobs.items())}
    failures = {}
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as pool:
        for name, compiled in [(name, pool.submit(compile_source, job)) for name, job in jobs.items()]:
            if error := compiled.exception():
                failures[name] = error
                print(f"{name}: {error}", flush=True)
    note = "; ".join(f"{name}: {explain(error)}" for name, error in failures.items())[:400]
    title = f"own kernels compiled in {time.monotonic() - begin:.1f} s by {os.cpu_count()} processes"
    report(title, f"{len(jobs) - len(failures)} of {len(jobs)}", met=not failures, required="all", note=note)
    return int(bool(failures))


def own_kernels() -> set[str]:
    """Return "file.kernel" of every kernel in singa_lite/backend/cuda, as cupy's compiler is asked for it."""
    from singa_lite.backend.cuda.launch import FOLDER, MADE_BY_MACRO, text_of

    found = set()
    for file in (path.stem for path in FOLDER.glob("*.cu")):
        text, suffix = text_of(file), "_formula" if file == "elementwise" else ""
        found |= {f"{file}.{name}" for name in re.findall(r"^KERNEL (?:__\w+__\(\d+\) )?(\w+)", text, re.M)}
        found |= {f"{file}.{name}{suffix}" for name in MADE_BY_MACRO.findall(text)}
    return found


def types_for(name: str) -> list[str]:
    """Return the element types that a kernel, "file.kernel", is started with."""
    return TYPES[name.partition(".")[0]] + MORE_TYPES.get(name, [])


def sources() -> dict[str, str]:
    """Return each different source by the first kernel and element types that need it."""
    from singa_lite.backend.cuda.launch import source_of

    found: dict[str, str] = {}
    for name in sorted(own_kernels()):
        file, _, kernel = name.partition(".")
        for types in types_for(name):
            found.setdefault(source_of(file, types, kernel), f"{name} of {types}")
    return {name: source for source, name in found.items()}


def compile_source(source: str) -> None:
    """Compile ``source`` as singa_lite does; cupy keeps the result."""
    import cupy

    from singa_lite.backend.cuda.launch import COMPILER_OPTIONS

    cupy.RawModule(code=source, options=COMPILER_OPTIONS).compile()


if __name__ == "__main__":
    sys.exit(main())
