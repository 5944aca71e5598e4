# SPDX-License-Identifier: Apache-2.0
"""What `pip install .` makes of this folder, and what `import singa_lite` loads."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from singa_lite import _native
from tests.limits import LIMIT_S

ROOT = Path(__file__).parents[1]
BUILD_TAG = f"{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
NEEDED = (
    "setup.py",
    "pyproject.toml",
    "CMakeLists.txt",
    "MANIFEST.in",
    "LICENSE",
    "README.md",
    "singa_lite",
    "native",
)
# in front of the compiler: takes the object file that the checkout has, but of what oneDNN makes another
TAKE_OBJECTS = """#!{python} -I
import os, shutil, subprocess, sys
command = sys.argv[1:]
out = command.index("-o") + 1
taken = os.path.join({built!r}, command[out])
if not os.path.exists(taken):  # what CMake tries
    sys.exit(subprocess.run(command).returncode)
if code := subprocess.run([*command[:out], os.devnull, *command[out + 1 :], "-E"]).returncode:
    sys.exit(code)
with open(command[command.index("-MF") + 1]) as dependencies:
    files = dependencies.read().split()
if any(b"SINGA_LITE_ONEDNN" in open(file, "rb").read() for file in files if file.startswith({source!r})):
    sys.exit(subprocess.run(command).returncode)
shutil.copy(taken, command[out])
"""
HAS_ONEDNN = bool(getattr(_native.load("_kernels")[0], "onednn", ""))
ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="the compiled modules are for Linux")


def copy_sources(folder: Path) -> Path:
    """The files a build needs, without anything built."""
    folder.mkdir()
    for name in NEEDED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
        else:
            shutil.copy(ROOT / name, folder)
    return folder


def pip_wheel(source: Path, out: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """`pip wheel` into ``out`` with the tools of this environment, so that no network is needed."""
    command = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--no-index"]
    return subprocess.run(
        [*command, "--wheel-dir", str(out), str(source)],
        capture_output=True,
        text=True,
        timeout=2 * LIMIT_S,  # it compiles
        env={**os.environ, **environment},
    )


def leave_traces(folder: Path) -> None:
    """What an earlier build may have left in ``folder``: a module that is deleted since, a cache of vanished tools."""
    stale, build = folder / "build" / f"lib.{BUILD_TAG}" / "singa_lite", folder / "build" / "native"
    stale.mkdir(parents=True, exist_ok=True)
    (stale / "deleted.py").write_text("")
    build.mkdir(exist_ok=True)
    (build / "CMakeCache.txt").write_text(
        "CMAKE_GENERATOR:INTERNAL=Ninja\nCMAKE_MAKE_PROGRAM:FILEPATH=/gone/ninja\n"
        f"CMAKE_HOME_DIRECTORY:INTERNAL={folder}\nCMAKE_CACHEFILE_DIR:INTERNAL={build}\n"
    )


def wheel_of(source: Path, out: Path, **environment: str) -> zipfile.ZipFile:
    done = pip_wheel(source, out, **environment)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    (path,) = out.glob("*.whl")
    return zipfile.ZipFile(path)


def names_in(folder: Path) -> set[str]:
    """The files of the package in a checkout or a copy of its sources that belong in a wheel."""
    files = (path for path in (folder / "singa_lite").rglob("*") if path.suffix in (".py", ".cu", ".cuh"))
    return {str(path.relative_to(folder)) for path in files}


def sources_in(wheel: zipfile.ZipFile) -> set[str]:
    kinds = (".py", ".cu", ".cuh")
    return {name for name in wheel.namelist() if name.startswith("singa_lite/") and name.endswith(kinds)}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Of this checkout, so that what is compiled already is only linked again."""
    leave_traces(ROOT)
    return wheel_of(ROOT, tmp_path_factory.mktemp("build"))


def test_the_wheel_holds_every_module_and_nothing_of_earlier_builds(wheel):
    assert sources_in(wheel) == names_in(ROOT)


def test_the_wheel_carries_types_and_licence(wheel):
    names = wheel.namelist()
    assert "singa_lite/py.typed" in names
    (licence,) = (name for name in names if name.endswith("licenses/LICENSE"))
    assert wheel.read(licence) == (ROOT / "LICENSE").read_bytes()


def test_the_metadata_ask_for_little_and_offer_the_extras(wheel):
    (name,) = (name for name in wheel.namelist() if name.endswith("METADATA"))
    metadata = Parser().parsestr(wheel.read(name).decode())
    needs = metadata.get_all("Requires-Dist")
    always = {need.split(">")[0] for need in needs if "extra ==" not in need}
    assert always <= {"ml_dtypes", "numpy", "safetensors", "threadpoolctl", "xxhash"}
    assert set(metadata.get_all("Provides-Extra")) == {
        "mpi",
        "plot",
        "bench",
        "notebook",
        "test",
        "cuda12",
        "cuda13",
    }
    for extra in ("cuda12", "cuda13"):  # the headers that cupy's own kernels include, such as float16's
        assert any("nvidia-cuda-runtime" in need and f'"{extra}"' in need for need in needs), extra
    assert metadata["Requires-Python"] == ">=3.10"
    assert metadata["License-Expression"] == "Apache-2.0"


def load_from(folder: Path, module: str, question: str = "''") -> str:
    """The file of a compiled module of the package in ``folder``, and a question's answer; or why it does not load."""
    code = (
        f"import sys; sys.path.insert(0, {str(folder)!r}); from singa_lite import _native; "
        f"module, reason = _native.load({module!r}); print(*((module.__file__, {question}) if module else (reason,)))"
    )
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, timeout=LIMIT_S)
    return done.stdout + done.stderr


@ON_LINUX
@pytest.mark.parametrize("module", ["_comm", "_cudnn", "_kernels", "_nccl"])
def test_the_compiled_module_loads_from_the_unpacked_wheel(wheel, tmp_path, module):
    wheel.extractall(tmp_path)
    assert load_from(tmp_path, module).startswith(str(tmp_path / "singa_lite" / module))


@pytest.mark.skipif(not HAS_ONEDNN, reason="built without oneDNN")
def test_the_wheel_carries_onednn_and_its_licences(wheel):
    names = {name.removeprefix("singa_lite/") for name in wheel.namelist()}
    assert {"libdnnl.so.3", "libdnnl.LICENSE", "libdnnl.THIRD-PARTY-PROGRAMS"} <= names


@pytest.mark.slow
@ON_LINUX
def test_a_copy_of_the_sources_builds_without_onednn(wheel, tmp_path):
    """Nothing else of a checkout is needed. This checkout itself is built with oneDNN.

    What does not mention oneDNN is preprocessed alone, and its object file is the one that this checkout's build has
    just made of the same text. The rest is compiled, without optimization, which takes most of the time of a build.
    """
    source, launcher = copy_sources(tmp_path / "source"), tmp_path / "take_objects.py"
    leave_traces(source)
    text = TAKE_OBJECTS.format(
        python=sys.executable, source=str(source), built=str(ROOT / "build" / "native")
    )
    launcher.write_text(text)
    launcher.chmod(0o755)
    switches = {"SINGA_LITE_ONEDNN": "off", "CMAKE_BUILD_TYPE": "Plain"}
    copied = wheel_of(source, tmp_path / "wheel", **switches, CMAKE_CXX_COMPILER_LAUNCHER=str(launcher))
    assert set(copied.namelist()) == {name for name in wheel.namelist() if "libdnnl" not in name}
    copied.extractall(tmp_path / "unpacked")
    for module in ("_comm", "_cudnn", "_kernels", "_nccl"):
        assert load_from(tmp_path / "unpacked", module).startswith(str(tmp_path / "unpacked"))
    assert load_from(tmp_path / "unpacked", "_kernels", "module.onednn == ''").split()[1] == "True"


@ON_LINUX
def test_sources_that_are_not_built_are_named(tmp_path):
    """As a script beside them would import them, in place of the installed package."""
    source = copy_sources(tmp_path / "source")
    (source / "train.py").write_text("from singa_lite import device, opt; device.get_default_device()")
    done = subprocess.run(
        [sys.executable, source / "train.py"], capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stderr
    assert "the compiled kernels are missing" in done.stderr
    assert f"imported from its sources in {source}, which are not built" in done.stderr


def test_a_misspelt_switch_is_an_error(tmp_path):
    done = pip_wheel(copy_sources(tmp_path / "source"), tmp_path, SINGA_LITE_ONEDNN="none")
    assert done.returncode != 0
    assert "SINGA_LITE_ONEDNN must be on or off, not 'none'" in done.stdout + done.stderr


@ON_LINUX
def test_a_failing_compiler_is_shown_with_the_cure(tmp_path):
    done = pip_wheel(copy_sources(tmp_path / "source"), tmp_path, CXX="/bin/false")
    assert done.returncode != 0
    assert "/bin/false" in done.stdout + done.stderr
    assert "needs a C++17 compiler (Debian, Ubuntu: apt install g++)" in done.stdout + done.stderr


@pytest.mark.slow
@ON_LINUX
def test_the_native_programs_pass():
    """Those of native/tests, without sanitizers; `make sanitize` runs them with."""
    programs = {path.stem for path in (ROOT / "native" / "tests").glob("*_test.cc")}
    command = [sys.executable, "setup.py", "--quiet", "native_tests"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2 * LIMIT_S, cwd=ROOT)
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
    lines = [
        line for line in done.stdout.splitlines() if line.rstrip().endswith("sec") and " Passed " in line
    ]
    assert programs and {line.split()[3] for line in lines} >= programs, "a program was not built"


@pytest.mark.parametrize(
    ("platform", "expected"),
    [
        ("linux", ["singa_lite._comm", "singa_lite._cudnn", "singa_lite._kernels", "singa_lite._nccl"]),
        ("darwin", []),
        ("win32", []),
    ],
)
def test_only_linux_compiles_anything(platform, expected):
    code = (
        "import sys, runpy, setuptools.command.build_ext, setuptools.command.build_py; "
        "made = {}; setuptools.setup = made.update; "
        f"sys.platform = {platform!r}; runpy.run_path({str(ROOT / 'setup.py')!r}); "
        "print([extension.name for extension in made['ext_modules']], 'singa_lite.data' in made['packages'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S, cwd=ROOT, check=True
    )
    assert done.stdout.strip() == f"{expected} True"


# ---- import --------------------------------------------------------------------------------------------

HEAVY = {
    "cupy",
    "mpi4py",
    "matplotlib",
    "threadpoolctl",
    "asyncio",
    "setuptools",
    "pytest",
    # Python's own of a millisecond or more, see Note [imports] in singa_lite/__init__.py
    "concurrent",
    "fractions",
    "hashlib",
    "logging",
    "multiprocessing",
    "socket",
    "subprocess",
    "urllib",
    "zipfile",
}
REPORT = (
    "import {}, sys, threading, os; "
    "print(*sorted({{name.split('.')[0] for name in sys.modules}})); "
    "print(threading.active_count(), len(os.listdir('/proc/self/task')) if sys.platform == 'linux' else 0)"
)


def loaded_by(packages: str) -> tuple[set[str], str]:
    """(top-level modules, numbers of threads) after ``import packages`` in a fresh interpreter."""
    done = subprocess.run(
        [sys.executable, "-I", "-c", REPORT.format(packages)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=True,
    )
    modules, threads = done.stdout.splitlines()
    return set(modules.split()), threads


def test_import_loads_no_heavy_module_and_starts_no_thread():
    others, numpy_threads = loaded_by("numpy, pathlib")  # pathlib imports urllib.parse
    with_us, our_threads = loaded_by("numpy, singa_lite")
    assert not (with_us - others) & HEAVY
    assert our_threads == numpy_threads
