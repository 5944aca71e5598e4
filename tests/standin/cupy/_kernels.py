# SPDX-License-Identifier: Apache-2.0
"""Kernels of the stand-in: CUDA C++ compiled for the host, kept in build/ for the next run."""

from __future__ import annotations

import ctypes
import hashlib
import re
import subprocess
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from tests.standin import compiling

from ._array import Memory, ndarray
from .cuda import do, get_current_stream

HERE = Path(__file__).parent
EMULATION = HERE.parent / "emulation.h"
COMPILER = ("g++", "-std=c++20", "-O1", "-fPIC", "-w", "-fvisibility=hidden")
EXPANDER = ("g++", "-E", "-P", "-D__global__=__global__", "-D__launch_bounds__(...)=")
LINKED = ("-nostdlib",)  # the rest comes with the runtime; to search C++'s libraries takes time
ENTRY = re.compile(r'extern "C" __global__ void (\w+)\s*\(')
STRIDED = {"copy"}  # kernels that are told the strides of their arrays
KINDS = {int: "i8", float: "f8"}


def compile_kernels(code: str) -> Path:
    """A shared library that can launch every kernel in ``code``."""
    runtime = compiling.library("emulation", [EMULATION.with_suffix(".cc")], [EMULATION])
    header = precompiled(EMULATION.read_text())

    def build(path: Path) -> None:
        source = path.with_suffix(".cc")
        source.write_text(code)
        expanded = run(*EXPANDER, source)
        source.write_text("\n".join([code, *(f"EMULATE({name})" for name in ENTRY.findall(expanded)), ""]))
        options = ("-include", header, "-fvisibility=default", "-shared", *LINKED)
        run(*COMPILER, *options, "-o", path, source, runtime, "-lgcc")

    # linked to that runtime: another needs another
    key = hashlib.sha256(f"{runtime.name}\n{header.name}\n{code}".encode())
    return compiling.made_once(f"{key.hexdigest()[:24]}.so", build)


def precompiled(text: str) -> Path:
    """A header with this text, which g++ has compiled: most of the time of a kernel's compilation is the header's."""
    name = f"emulation-{hashlib.sha256(text.encode()).hexdigest()[:16]}.h"
    header = compiling.made_once(name, lambda path: path.write_text(text))
    compiling.made_once(f"{name}.gch", lambda path: run(*COMPILER, "-x", "c++-header", header, "-o", path))
    return header


def run(*command: str | Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"g++ does not compile the kernels:\n{done.stderr[:3000]}")
    return done.stdout


class RawModule:
    """A source of kernels, compiled when the first is asked for."""

    def __init__(self, *, code: str, options: tuple[str, ...] = ()) -> None:
        self.code, self.library = code, None

    def compile(self) -> None:
        if self.library is None:
            self.library = ctypes.CDLL(str(compile_kernels(self.code)))

    def get_function(self, name: str) -> Function:
        self.compile()
        return Function(self.library, name)


class Function:
    """One kernel; ``calls`` counts launches of all."""

    calls = 0

    def __init__(self, library: ctypes.CDLL, name: str) -> None:
        self.name, self.launch = name, getattr(library, f"launch_{name}")
        form = getattr(library, f"form_{name}")
        form.restype = ctypes.c_char_p
        self.form = form().decode().split()

    def __call__(self, grid: tuple[int, ...], block: tuple[int, ...], args: tuple[Any, ...]) -> None:
        assert get_current_stream().ptr, f"{self.name} was launched on the default stream"
        assert len(args) == len(self.form), f"{self.name} takes {len(self.form)} arguments, not {len(args)}"
        given = [self.argument(value, wanted) for value, wanted in zip(args, self.form, strict=True)]
        addresses = (ctypes.c_void_p * len(given))(*(x.ctypes.data for x in given))
        launch, blocks = (
            self.launch,
            [
                value.data.mem.block
                for value in args
                if isinstance(value, ndarray) and isinstance(value.data.mem, Memory)
            ],
        )

        def run(given: Any = given) -> None:  # given: what the addresses point to
            status = launch(*grid, *block, addresses)
            assert status == 0, (
                f"{self.name}: " + ("threads wait for each other", "a bad size of launch")[status - 1]
            )
            for memory in blocks:
                memory.check()

        Function.calls += 1
        do(run)

    def argument(self, value: Any, wanted: str) -> np.ndarray:
        """The bytes of an argument, as cupy would pass them."""
        if isinstance(value, ndarray):
            assert value.flags.c_contiguous or self.name in STRIDED, (
                f"{self.name}: an array of strides {value.strides} is not row-major"
            )
            kind, value = "p8", np.array([value.data.ptr], np.int64)
        elif isinstance(value, np.ndarray):
            assert value.size == 1, f"{self.name}: cupy passes numpy arrays of one element only"
            kind = f"s{value.nbytes}"
        else:
            kind = KINDS[type(value)]
            value = np.array([value])
            kind = "p8" if wanted == "p8" and kind == "i8" else kind
        assert kind == wanted, f"{self.name} wants {wanted}, but gets {kind}"
        return value


class ElementwiseKernel:
    """``operation`` on every element, with parameters given as "dtype name, dtype name"."""

    C_TYPES: ClassVar = {"float32": "float", "float16": "_Float16", "uint16": "unsigned short"}

    def __init__(self, in_params: str, out_params: str, operation: str, name: str) -> None:
        self.name, self.operation = name, operation
        self.raw = {p.split()[-1] for p in in_params.split(", ") if p.startswith("raw ")}
        self.takes, self.gives = (
            [p.split()[-2:] for p in params.split(", ")] for params in (in_params, out_params)
        )
        self._function: Function | None = None

    def __call__(self, *args: Any) -> ndarray:
        given, out = args[: len(self.takes)], args[len(self.takes) :]
        for value, (dtype, _) in zip((*given, *out), (*self.takes, *self.gives), strict=False):
            assert value.dtype == dtype, f"{self.name}: {value.dtype} is not {dtype}"
        made = out[0] if out else ndarray(given[0].shape, self.gives[0][0])
        if self._function is None:
            code = self._code([isinstance(value, ndarray) for value in given])
            self._function = RawModule(code=code).get_function(self.name)
        numbers = [
            value if isinstance(value, ndarray) else np.array([value]).view(f"V{value.nbytes}")
            for value in given
        ]
        self._function((1,), (32,), (*numbers, made, made.size))
        return made

    def _code(self, are_arrays: list[bool]) -> str:
        parameters, before, after = [], [], []
        for (dtype, name), is_array in zip(self.takes, are_arrays, strict=True):
            c = self.C_TYPES[dtype]
            if name in self.raw:
                parameters.append(f"const {c}* {name}")
                continue
            parameters.append(f"const {c}* {name}_" if is_array else f"Number<{c}> {name}_")
            before.append(f"const {c} {name} = {name}_" + ("[i_];" if is_array else ".value;"))
        for dtype, name in self.gives:
            c = self.C_TYPES[dtype]
            parameters.append(f"{c}* {name}_")
            before.append(f"{c} {name};")
            after.append(f"{name}_[i_] = {name};")
        body = " ".join([*before, self.operation, ";", *after])
        return (
            "template <class V> struct Number { V value; };\n"
            f'extern "C" __global__ void {self.name}({", ".join(parameters)}, long long n_) {{\n'
            f"  for (long long i_ = threadIdx.x; i_ < n_; i_ += blockDim.x) {{ {body} }}\n}}\n"
        )
