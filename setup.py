# SPDX-License-Identifier: Apache-2.0
"""Builds native/ with CMake into singa_lite/; pyproject.toml holds the metadata."""

import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.errors import CompileError

ROOT = Path(__file__).parent.resolve()
EXTENSIONS = ["singa_lite._comm"] if sys.platform == "linux" else []  # what CMakeLists.txt builds
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


class CMakeBuild(build_ext):
    """Run CMake once for all extensions, straight into the folder where setuptools expects them."""

    def run(self) -> None:
        if not self.extensions:
            return
        import pybind11  # a build requirement, needed only where something is compiled

        target = Path(self.get_ext_fullpath(self.extensions[0].name)).parent.resolve()
        build = Path(self.build_temp).resolve()
        # --fresh: a cache left by an earlier isolated build names tools that are gone
        self.cmake("--fresh", "-S", ROOT, "-B", build, "-G", "Ninja", "--log-level=WARNING",
                   f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={target}",
                   f"-DPython_EXECUTABLE={sys.executable}",
                   f"-Dpybind11_DIR={pybind11.get_cmake_dir()}")  # fmt: skip
        self.cmake("--build", build)

    def cmake(self, *arguments: object) -> None:
        path = tools_path()
        command = [shutil.which("cmake", path=path) or "cmake", *map(str, arguments)]
        try:
            subprocess.run(command, check=True, env={**os.environ, "PATH": path})
        except (OSError, subprocess.CalledProcessError) as error:
            raise CompileError(f"{error}\n{CURE}") from None


class CleanBuildPy(build_py):
    """Copy the Python files into an empty folder: build/ would bring back modules deleted since."""

    def run(self) -> None:
        if not self.editable_mode:
            shutil.rmtree(Path(self.build_lib) / "singa_lite", ignore_errors=True)
        super().run()


setup(
    packages=find_packages(include=["singa_lite", "singa_lite.*"]),
    package_data={"singa_lite": ["py.typed"]},
    ext_modules=[Extension(name, sources=[]) for name in EXTENSIONS],
    cmdclass={"build_ext": CMakeBuild, "build_py": CleanBuildPy},
)
