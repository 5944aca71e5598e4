# SPDX-License-Identifier: Apache-2.0
"""Run every own CUDA kernel, alone or under compute-sanitizer.

    python -m tools.gpu_check.kernels
    python -m tools.gpu_check.kernels --tool memcheck
    python -m tools.gpu_check.kernels --tool racecheck

The calls are the samples of tests/backend/test_kernels.py in three dtypes, larger arrays where a kernel cuts them in
pieces, and in bfloat16 what transformers have. Every array is an allocation of its own, so that a write beside it is
seen. A kernel of the .cu files that nothing called is named. Exits 1 if there is one or the tool found something.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.gpu.rows import QUICK, SKIPPED, report
from tools.gpu_check.compile import own_kernels, types_for
from tools.gpu_check.machine import find_tool

DTYPES = ("float32", "float16", "float64")
LARGE = 40_000 if QUICK else 300_000
# what memcheck says of calls that fail: cupy and NVIDIA's libraries ask the driver for what it may not have
TOOLS = {"memcheck": ("--report-api-errors", "no"), "racecheck": ()}
SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tool", choices=TOOLS, help="of compute-sanitizer")
    arguments = parser.parse_args()
    return under(arguments.tool) if arguments.tool else run_all()


def under(tool: str) -> int:
    """Run this under a tool of compute-sanitizer; 1 if that found something."""
    title = f"compute-sanitizer {tool} on the own kernels, findings"
    sanitizer = find_tool("compute-sanitizer")
    if sanitizer is None:
        report(title, None, note="skipped: no compute-sanitizer on PATH or in /usr/local/cuda")
        return SKIPPED
    options = ["--tool", tool, *TOOLS[tool], "--print-limit", "20"]
    command = [sanitizer, *options, sys.executable, "-m", "tools.gpu_check.kernels"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    output = done.stdout + done.stderr
    print(output[-20_000:])
    found = SUMMARY.search(output)
    lines = [line for line in output.splitlines() if line.startswith("========= ") and len(line) > 10]
    if found is None or done.returncode:
        note = f"exit code {done.returncode}: {' / '.join((lines or output.splitlines())[-4:])}"[:400]
        report(title, int(found[1]) if found else None, met=False, required="0", note=note)
        return 1
    note = "" if found[1] == "0" else " / ".join(lines[1:4])[:400]
    report(title, int(found[1]), 0, note)
    return int(found[1] != "0")


def run_all() -> int:
    """All samples; 1 if an own kernel was in none."""
    import cupy

    from singa_lite import device
    from singa_lite.backend.cuda import CudaBackend

    gpu = device.create_cuda_gpu()
    backend = gpu.backend
    assert isinstance(backend, CudaBackend)
    recorded_steps(gpu)
    if hasattr(cupy.cuda, "set_allocator"):
        cupy.cuda.set_allocator(None)  # no pool
    for kernel, inputs, out, attributes in calls():
        given, made = ([backend.asarray(array) for array in arrays] for arrays in (inputs, out))
        backend.run(kernel, *given, out=tuple(made) if len(made) > 1 else made[0], **attributes)
    backend.synchronize()
    run, total = set(backend._functions), len(own_kernels())
    missing = sorted(own_kernels() - {name for name, _ in run})
    unknown = sorted(f"{name} of {types}" for name, types in run if not is_known(name, types))
    report("own kernels run", f"{total - len(missing)} of {total}", met=not missing, required="all",
           note=f"not run: {', '.join(missing)}" if missing else "")  # fmt: skip
    if unknown:
        report("own kernels that compile.py does not know", ", ".join(unknown), met=False, required="none")
    return int(bool(missing or unknown))


def is_known(name: str, types: str) -> bool:
    """Whether compile.py compiles a kernel for these element types; one letter is as good as twice the same."""
    return (types[0], types[-1]) in {(known[0], known[-1]) for known in types_for(name)}


def recorded_steps(gpu: Any) -> None:
    """Some steps of an MLP under DistOpt, recorded: numbers that change reach the device by a kernel."""
    from benchmarks.steps import batch, our_step
    from singa_lite.model import Model

    step = our_step("graph", "mlp", *batch("mlp", shape=(4, 784)), is_distributed=True, device=gpu)
    for _ in range(5):
        step()
    gpu.Sync()
    network = step.func
    assert isinstance(network, Model)
    if refused := "; ".join(info.break_reason for info in network.graph_info() if info.break_reason):
        report("recorded steps of an MLP", None, met=False, required="replayed", note=refused)


Call = tuple[str, list[np.ndarray], list[np.ndarray], dict[str, Any]]


def calls() -> Iterator[Call]:
    """(kernel, inputs, outputs as they start, attributes) of each call."""
    from tests.backend.test_kernels import SAMPLES, in_dtype

    for dtype in DTYPES:
        for sample in SAMPLES:
            if not sample.kernel.startswith(("conv2d", "matmul", "batchnorm")):  # NVIDIA's
                inputs = [in_dtype(array, dtype) for array in sample.inputs]
                out = [in_dtype(np.array(array), dtype) for array in sample.before or sample.expected]
                yield sample.kernel, inputs, out, sample.attributes
        yield from formula_calls(np.random.default_rng(2), dtype)
        yield from large_calls(np.random.default_rng(3), dtype)
        yield from transformer_calls(np.random.default_rng(4), dtype)
        if dtype != "float64":
            yield from norm_calls(np.random.default_rng(6), dtype)
    yield from transformer_calls(np.random.default_rng(5), "bfloat16")
    yield from norm_calls(np.random.default_rng(7), "bfloat16")
    for kind in (np.int32, np.int64):
        yield "random_indices", [], [np.zeros(500, kind)], {"n": LARGE, "seed": 1, "counter": 2}


def formula_calls(rng: np.random.Generator, dtype: str) -> Iterator[Call]:
    """Every line of formulas.h."""
    from singa_lite.backend.formulas import FORMULAS

    for formula in FORMULAS.values():
        inputs = [rng.uniform(0.1, 0.9, 1000).astype(dtype) for _ in formula.inputs]
        yield formula.name, inputs, [inputs[0].copy()], dict.fromkeys(formula.numbers, 0.5)


def large_calls(rng: np.random.Generator, dtype: str) -> Iterator[Call]:
    """Arrays of many blocks, and the random kernels, which have no samples."""
    x = rng.standard_normal(LARGE).astype(dtype)
    rows = x.reshape(100, -1)
    k = LARGE // 100
    chosen = [np.zeros(k, np.int32), np.zeros(k, dtype)]
    yield "top_k", [x], chosen, {"k": k}
    kept = np.flatnonzero(np.abs(x) >= np.asarray(1.5, dtype))
    yield "threshold_count", [x], [np.zeros(1, np.int64)], {"threshold": 1.5}
    yield (
        "threshold_select",
        [x],
        [np.zeros(kept.size, np.int32), np.zeros(kept.size, dtype)],
        {"threshold": 1.5},
    )
    yield "max_abs", [x], [np.zeros(1, dtype)], {}
    for kernel in ("sum", "mean", "max"):
        for array, axis, size in (
            (rows, 0, rows.shape[1]),
            (rows, 1, 100),
            (x.reshape(-1, 4), 0, 4),
            (x, 0, 1),
        ):
            axes = {"axes": (axis,), "keepdims": array is x}
            yield kernel, [array], [np.zeros(size, dtype)], axes
    yield "softmax", [rows], [rows.copy()], {"axis": 1}
    labels = np.zeros(100, np.int32)
    yield "softmax_cross_entropy", [rows, labels], [np.zeros(1, dtype), rows.copy()], {}
    random = {"seed": 1, "counter": 2}
    yield "random_normal", [], [x.copy()], {"mean": 0.0, "std": 1.0, **random}
    yield "random_uniform", [], [x.copy()], {"low": 0.0, "high": 1.0, **random}
    yield "random_bernoulli", [], [x.copy()], {"p": 0.3, **random}
    yield "dropout", [x], [x.copy(), np.zeros(LARGE, bool)], {"ratio": 0.4, **random}


def norm_calls(rng: np.random.Generator, dtype: str) -> Iterator[Call]:
    """Batch norm of images with channels last, more of them than a block has, fused with what stands beside it."""
    shape = (2, 264, 9, 7)
    x, residual, out = (rng.standard_normal(shape).astype(dtype) for _ in range(3))
    scale, bias, mean, std = rng.uniform(0.5, 1, (4, shape[1])).astype(np.float32)
    options = {"memory_format": shape[1], "relu": True, "momentum": 0.1, "eps": 1e-5}
    yield "reorder", [x], [out.copy()], {"memory_formats": (1, shape[1])}
    yield "batchnorm_2d_train", [x, scale, bias, residual], [out, mean, std, mean.copy(), std.copy()], options
    given, gradients = [residual, x, scale, mean, std, bias], [out, scale.copy(), bias.copy()]
    yield "batchnorm_2d_backward", given, gradients, {"memory_format": shape[1]}


def transformer_calls(rng: np.random.Generator, dtype: str) -> Iterator[Call]:
    """Layer norm and attention."""
    from singa_lite.dtypes import accumulation_dtype

    wide = accumulation_dtype(np.dtype(dtype))

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(dtype)

    x, scale, bias = normal(50, 300), normal(300).astype(wide), normal(300).astype(wide)
    mean, inverse_std = np.zeros(50, wide), np.ones(50, wide)
    yield "layer_norm", [x, scale, bias], [x.copy(), mean, inverse_std], {"eps": 1e-5}
    yield "layer_norm", [x, scale, bias, x], [x.copy(), mean, inverse_std, x.copy()], {"eps": 1e-5}
    yield "add_gelu", [x, bias], [x.copy(), x.copy()], {}
    yield "layer_norm_backward", [x, x, scale, mean, inverse_std], [x.copy(), scale.copy(), bias.copy()], {}
    options = {"num_heads": 2, "causal": True}
    projections, y = normal(3, 40, 3 * 16), normal(3, 40, 16)
    yield "attention", [projections], [y.copy()], options
    yield "attention_backward", [y, projections], [projections.copy()], options
    queries, memory = normal(1, 2, 16), normal(1, 2100, 2 * 16)  # rows of scores that are too long for a warp
    options = {"num_heads": 2, "causal": False}
    yield "attention", [queries, memory], [queries.copy()], options
    given, gradients = [queries, queries, memory], [queries.copy(), memory.copy()]
    yield "attention_backward", given, gradients, options


if __name__ == "__main__":
    sys.exit(main())
