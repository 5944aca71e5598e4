# SPDX-License-Identifier: Apache-2.0
"""The one importer of compiled modules; lists what was built, and why not.

Note [spinning]: a thread of GNU OpenMP that waits for others spins, by default 300,000 times, which are some 10 ms.
Where other processes want the cores, the thread that is waited for may have none, and spinning takes the time in which
it could run: steps then take several times as long, some of them 50 times. 5,000 spins are enough for the waits of a
step on an idle machine (docs/benchmarks.md, "Beside other processes"). The library reads the variable as it is loaded,
so it is set while a compiled module is imported for the first time.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import shlex
import sys
from collections.abc import Iterator
from types import ModuleType

from .config import env

MODULES = {
    "_comm": "shared-memory collectives (Linux)",
    "_cudnn": "convolution, batch norm and recurrent layers on CUDA devices (Linux)",
    "_kernels": "float32 and bfloat16 kernels for the CPU (Linux)",
    "_nccl": "collectives on GPU memory over NCCL, which is looked for when it is first used (Linux)",
}

SPIN_COUNT = "5000"  # see Note [spinning]


def load(name: str) -> tuple[ModuleType | None, str]:
    """Import the compiled module ``singa_lite.<name>``.

    Returns:
        (module, "built"), or (None, the reason why it is missing).
    """
    module = f"{__package__}.{name}"
    try:
        with contextlib.nullcontext() if module in sys.modules else _few_spins():
            return importlib.import_module(module), "built"
    except ImportError as error:
        return None, f"{error}; {_cure()}"


def _cure() -> str:
    folder = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    is_built = any(importlib.util.find_spec(f"{__package__}.{name}") for name in MODULES)
    if os.path.exists(os.path.join(folder, "setup.py")) and not is_built:
        # Python looks into a script's folder first, which hides the installed package
        return (
            f"singa_lite was imported from its sources in {folder}, which are not built; move the script, or start "
            f"Python, in another folder, or build them by `pip install --editable {shlex.quote(folder)}`"
        )
    return "reinstall with `pip install .` and read the compiler's output"


@contextlib.contextmanager
def _few_spins() -> Iterator[None]:
    """Have GNU OpenMP spin little, if it is loaded meanwhile and the user has chosen nothing; Note [spinning]."""
    if "GOMP_SPINCOUNT" in os.environ or "OMP_WAIT_POLICY" in os.environ:
        yield
        return
    os.environ["GOMP_SPINCOUNT"] = SPIN_COUNT
    try:
        yield
    finally:
        os.environ.pop("GOMP_SPINCOUNT", None)  # another thread that imports may have done so


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
