# SPDX-License-Identifier: Apache-2.0
"""Build native/ with CMake into singa_lite/; pyproject.toml holds the metadata."""

import subprocess
import sys
from pathlib import Path

import pybind11
from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()


class CMakeBuild(build_ext):
    """Run CMake once for all extensions, straight into the folder where setuptools expects them."""

    def run(self) -> None:
        target = Path(self.get_ext_fullpath(self.extensions[0].name)).parent.resolve()
        build = Path(self.build_temp).resolve()
        configure = [
            # --fresh: a cache left by an earlier isolated build names tools that are gone
            *["cmake", "--fresh", "-S", str(ROOT), "-B", str(build), "-G", "Ninja"],
            f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={target}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
        ]
        subprocess.run(configure, check=True)
        subprocess.run(["cmake", "--build", str(build), "--parallel", "2"], check=True)


setup(
    packages=find_packages(include=["singa_lite", "singa_lite.*"]),
    package_data={"singa_lite": ["py.typed"]},
    ext_modules=[Extension("singa_lite._comm", sources=[])] if sys.platform == "linux" else [],
    cmdclass={"build_ext": CMakeBuild},
)
