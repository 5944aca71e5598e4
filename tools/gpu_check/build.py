# SPDX-License-Identifier: Apache-2.0
"""Build the package for check.py: a wheel by the packages installed here, without oneDNN and without a network.

build/gpu-check/tree gets what the wheel holds (so what it lacks is found out) and the tests, what they read, benchmarks
and examples of the checkout. Where pip cannot make the wheel, setup.py builds the modules beside a copy of the sources;
where that fails too, modules built elsewhere for this Python are taken from the folder GPU_CHECK_MODULES, if it is set.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
import zipfile
from pathlib import Path

from benchmarks.gpu.rows import report

ROOT = Path(__file__).resolve().parents[2]
TREE = ROOT / "build" / "gpu-check" / "tree"
WHEELS = ROOT / "build" / "gpu-check" / "wheel"
SOURCES = ("setup.py", "pyproject.toml", "CMakeLists.txt", "MANIFEST.in", "README.md", "LICENSE", "native")
BESIDE = ("tests", "tools", "benchmarks", "examples", "docs", "native")  # native: tests compile files of it
BUILT = shutil.ignore_patterns("*.so", "*.so.*", "libdnnl.*", "__pycache__")
MODULES = "import json, singa_lite._native as n; print(json.dumps({m: n.load(m)[1] for m in n.MODULES}))"


def main() -> int:
    begin = time.monotonic()
    for folder in (TREE, WHEELS):
        shutil.rmtree(folder, ignore_errors=True)
    source = copy_sources()
    ways = {"a wheel": build_wheel, "setup.py build_ext": build_in_place}
    if os.environ.get("GPU_CHECK_MODULES"):
        ways["taking the modules of GPU_CHECK_MODULES"] = take_modules
    for way, build in ways.items():
        if build(source):
            break
        report(f"build by {way}", None, note="failed, see gpu-check.log", met=False, required="works")
    else:
        shutil.copytree(source / "singa_lite", TREE / "singa_lite")  # numpy alone can still be tested
    copy_beside()
    modules = subprocess.run(
        [sys.executable, "-c", MODULES], cwd=TREE, capture_output=True, text=True, timeout=60, check=False
    )
    is_built = modules.returncode == 0 and set(json.loads(modules.stdout).values()) == {"built"}
    note = (modules.stdout or modules.stderr).strip()[-400:]
    report(
        f"build by {way}, s", round(time.monotonic() - begin, 1), met=is_built, required="works", note=note
    )
    return int(not is_built)


def copy_sources() -> Path:
    """A copy of the sources, so that nothing is built in the checkout."""
    source = WHEELS / "source"
    source.mkdir(parents=True)
    for name in (*SOURCES, "singa_lite"):
        path = ROOT / name
        if path.is_dir():
            shutil.copytree(path, source / name, ignore=BUILT)
        elif path.exists():
            shutil.copy(path, source / name)
    return source


def copy_beside() -> None:
    """What a wheel does not hold and the tests and benchmarks need, into TREE."""
    for name in BESIDE:
        shutil.copytree(ROOT / name, TREE / name, ignore=BUILT)
    for name in ("pyproject.toml", "README.md"):  # pytest's settings; what tests of documents read
        shutil.copy(ROOT / name, TREE)


def build_wheel(source: Path) -> bool:
    """The wheel's files in TREE; False if it could not be made."""
    options = ["--no-build-isolation", "--no-deps", "--no-index", "--disable-pip-version-check"]
    if not run([sys.executable, "-m", "pip", "wheel", *options, "-w", str(WHEELS), "."], source):
        return False
    (wheel,) = WHEELS.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(TREE)
    return True


def build_in_place(source: Path) -> bool:
    """The sources with the modules beside them in TREE; False if they could not be built."""
    (source / "pyproject.toml").unlink(missing_ok=True)  # setuptools older than 77 stops at its licence
    if not run([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], source):
        return False
    shutil.copytree(source / "singa_lite", TREE / "singa_lite")
    return True


def take_modules(source: Path) -> bool:
    """The sources with carried modules beside them in TREE; False if there are none for this Python."""
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    modules = list(Path(os.environ["GPU_CHECK_MODULES"]).glob(f"*{suffix}"))
    if not modules:
        return False
    shutil.copytree(source / "singa_lite", TREE / "singa_lite", dirs_exist_ok=True)
    for module in modules:
        shutil.copy(module, TREE / "singa_lite")
    return True


def run(command: list[str], folder: Path) -> bool:
    print("$", *command, flush=True)
    environment = {**os.environ, "SINGA_LITE_ONEDNN": "off"}
    return subprocess.run(command, cwd=folder, env=environment, check=False).returncode == 0


if __name__ == "__main__":
    sys.exit(main())
