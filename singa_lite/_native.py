# SPDX-License-Identifier: Apache-2.0
"""The one importer of compiled modules; lists what was built, and why not."""

from __future__ import annotations

import importlib
import importlib.util
import os
from types import ModuleType

from .config import env

MODULES = {
    "_comm": "shared-memory collectives (Linux)",
    "_cudnn": "convolution, batch norm and recurrent layers on CUDA devices (Linux)",
    "_kernels": "float32 and bfloat16 kernels for the CPU (Linux)",
    "_nccl": "collectives on GPU memory over NCCL, which is looked for when it is first used (Linux)",
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


def library_names(variable: str, package: str, file: str) -> list[str]:
    """Return where a vendor's shared library may be, in the order in which to try.

    Args:
        variable: the environment variable that names the library; if it is set, nothing else is tried.
        package: the installed package whose folder ``lib`` may hold it, such as "nvidia.cudnn".
        file: its file name, such as "libcudnn.so.9", which the loader searches last.
    """
    chosen = env(variable)
    if chosen:
        return [chosen]
    try:
        spec = importlib.util.find_spec(package)
    except ModuleNotFoundError:  # of the package above it
        spec = None
    folders = spec.submodule_search_locations or [] if spec else []
    return [*(os.path.join(folder, "lib", file) for folder in folders), file]
