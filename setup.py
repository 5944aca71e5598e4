# SPDX-License-Identifier: Apache-2.0
"""Builds native/ with CMake; pyproject.toml holds the metadata.

All builds of a checkout but the sanitized one share build/native: what an earlier one compiled and nothing has changed
since is only linked again.
"""

import importlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

from setuptools import Command, Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.errors import CompileError

ROOT = Path(__file__).parent.resolve()
BUILD = ROOT / "build" / "native"
# what CMakeLists.txt builds
EXTENSIONS = (
    [f"singa_lite.{name}" for name in ("_comm", "_cudnn", "_kernels", "_nccl")]
    if sys.platform == "linux"
    else []
)
ONEDNN = (
    "onednn-devel-cpu-gomp"  # the build requirement with its CMake files; onednn-cpu-gomp has the library
)
BUNDLED = "libdnnl.so.3"  # copied beside _kernels, so that it is found however the package is installed
LICENCES = ("LICENSE", "THIRD-PARTY-PROGRAMS")
CURE = "native/ was not built, see above; it needs a C++17 compiler (Debian, Ubuntu: apt install g++)"


def tools_path() -> str:
    """PATH with the cmake and ninja of the build requirements first, where they are installed."""
    folders = []
    for package, folder in (("cmake", "CMAKE_BIN_DIR"), ("ninja", "BIN_DIR")):
        try:
            folders.append(getattr(importlib.import_module(package), folder))
        except ImportError:  # built without isolation, with the system's tools
            continue
    return os.pathsep.join([*folders, os.environ.get("PATH", os.defpath)])


def files_of(package: str, *names: str) -> list[Path]:
    """The files of an installed package that bear one of ``names``; none if it is not installed."""
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        return []
    found = {file.name: Path(str(file.locate())).resolve() for file in files if file.name in names}
    return [path for path in found.values() if path.is_file()]


def onednn_options() -> list[str]:
    """How CMake finds oneDNN; SINGA_LITE_ONEDNN=off builds without it, as where its wheel does not exist."""
    wanted = os.environ.get("SINGA_LITE_ONEDNN", "on").lower()
    if wanted not in ("on", "off"):
        raise CompileError(f"SINGA_LITE_ONEDNN must be on or off, not {wanted!r}")
    config = files_of(ONEDNN, "dnnl-config.cmake") if wanted == "on" else []
    if not config:
        return ["-DCMAKE_DISABLE_FIND_PACKAGE_dnnl=ON"]
    return [f"-Ddnnl_DIR={config[0].parent}"]


def generator() -> str:
    """What CMake writes for: Ninja, or make where there is no Ninja (built without isolation)."""
    return "Ninja" if shutil.which("ninja", path=tools_path()) else "Unix Makefiles"


def run_tool(tool: str, *arguments: object) -> None:
    """Run cmake or ctest of the build requirements."""
    path = tools_path()
    command = [shutil.which(tool, path=path) or tool, *map(str, arguments)]
    jobs = str(os.cpu_count() or 1)  # make takes one at a time unless told
    environment = {"CMAKE_BUILD_PARALLEL_LEVEL": jobs, **os.environ, "PATH": path}
    try:
        subprocess.run(command, check=True, env=environment)
    except (OSError, subprocess.CalledProcessError) as error:
        raise CompileError(f"{error}\n{CURE}") from None


def configure(build: Path, *options: str) -> None:
    """Let CMake find its tools again: those of an earlier isolated build are gone. Object files that fit are kept."""
    (build / "CMakeCache.txt").unlink(missing_ok=True)
    for found in (build / "CMakeFiles").glob("[0-9]*"):  # the compiler, by version of CMake
        shutil.rmtree(found)
    run_tool("cmake", "-S", ROOT, "-B", build, "-G", generator(), "--log-level=WARNING", *options)


def module_options(target: Path) -> list[str]:
    """How CMake finds what the modules need, and the folder it puts them in."""
    import pybind11  # a build requirement, needed only where something is compiled

    return [
        f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={target}",
        f"-DPython_EXECUTABLE={sys.executable}",
        f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
        *onednn_options(),
    ]


class CMakeBuild(build_ext):
    """Run CMake once for all extensions, straight into the folder where setuptools expects them."""

    def run(self) -> None:
        if not self.extensions:
            return
        target = Path(self.get_ext_fullpath(self.extensions[0].name)).parent.resolve()
        configure(BUILD, *module_options(target))
        for path in target.glob("libdnnl.*"):  # of an earlier build
            path.unlink()
        # linking it copies libdnnl again
        Path(self.get_ext_fullpath("singa_lite._kernels")).unlink(missing_ok=True)
        run_tool("cmake", "--build", BUILD)
        if (target / BUNDLED).exists():
            for path in files_of("onednn-cpu-gomp", *LICENCES):
                shutil.copy(path, target / f"libdnnl.{path.name}")


class NativeTests(Command):
    """Build and run the programs of native/tests: python setup.py native_tests [--sanitize]."""

    description = "build and run the test programs of native/tests"
    user_options: ClassVar[list[tuple[str, str | None, str]]] = [
        ("sanitize", None, "with AddressSanitizer and UndefinedBehaviorSanitizer")
    ]
    boolean_options: ClassVar[list[str]] = ["sanitize"]

    def initialize_options(self) -> None:
        self.sanitize = False

    def finalize_options(self) -> None:
        pass

    def run(self) -> None:
        if self.sanitize:
            build = ROOT / "build" / "sanitize"
            configure(build, "-DSINGA_LITE_SANITIZE=ON", *onednn_options())
        else:
            build = BUILD
            configure(build, *module_options(ROOT / "singa_lite"))
        run_tool("cmake", "--build", build, "--target", "native_programs")
        try:
            run_tool(
                "ctest", "--test-dir", build, "--parallel", "2", "--output-on-failure", "--no-tests=error"
            )
        except CompileError:
            raise CompileError("programs of native/tests failed, see above") from None


class CleanBuildPy(build_py):
    """Copy the Python files into an empty folder: build/ would bring back modules deleted since."""

    def run(self) -> None:
        if not self.editable_mode:
            shutil.rmtree(Path(self.build_lib) / "singa_lite", ignore_errors=True)
        super().run()


setup(
    packages=find_packages(include=["singa_lite", "singa_lite.*"]),
    # named, so that an editable install is a line in a .pth file: else every start of Python loads a finder, for 15 ms
    package_dir={"": "."},
    package_data={
        "singa_lite": ["py.typed"],
        "singa_lite.backend": ["*.h"],
        "singa_lite.backend.cuda": ["*.cu", "*.cuh"],
    },
    ext_modules=[Extension(name, sources=[]) for name in EXTENSIONS],
    cmdclass={"build_ext": CMakeBuild, "build_py": CleanBuildPy, "native_tests": NativeTests},
)
