# SPDX-License-Identifier: Apache-2.0
"""The one importer of compiled modules; says what was built, and why not."""

from __future__ import annotations

import importlib
from types import ModuleType

MODULES = {
    "_comm": "shared-memory collectives (Linux)",
    "_cudnn": "convolutions on CUDA devices (Linux)",
    "_kernels": "float32 kernels for the CPU (Linux)",
}


def load(name: str) -> tuple[ModuleType | None, str]:
    """Import the compiled module ``singa_lite.<name>``.

    Returns:
        (module, "built"), or (None, the reason why it is missing).
    """
    try:
        return importlib.import_module(f"{__package__}.{name}"), "built"
    except ImportError as error:
        return None, f"{error}; reinstall with `pip install .` and read the compiler's output"
