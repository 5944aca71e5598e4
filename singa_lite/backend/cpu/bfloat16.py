# SPDX-License-Identifier: Apache-2.0
"""What this CPU has for bfloat16; products themselves are in native/kernels and in the numpy kernels beside this."""

from __future__ import annotations

from pathlib import Path

INSTRUCTIONS = {"avx512_bf16": "AVX-512 BF16", "amx_bf16": "AMX"}  # flag of Linux -> its name
CPU_FLAGS = Path("/proc/cpuinfo")


def find_instructions() -> list[str]:
    """Return names of this CPU's instructions for products of bfloat16; none where the system does not list them."""
    try:
        lines = CPU_FLAGS.read_text(errors="replace").splitlines()
    except OSError:
        return []
    flags = next((line.split(":", 1)[1].split() for line in lines if line.startswith("flags")), [])
    return [name for flag, name in INSTRUCTIONS.items() if flag in flags]


def describe() -> str:
    """Return, in words, how products of bfloat16 are computed here."""
    names = find_instructions()
    if names:
        return f"instructions for products: {', '.join(names)}"
    return "no instructions for products: computed in float32 of rounded inputs, the same numbers more slowly"
