# SPDX-License-Identifier: Apache-2.0
"""What runs on a lent machine with a GPU works over the stand-ins: gpu-check's compile, and the scripts of gpu_day."""

from __future__ import annotations

import json
import lzma
import os
import shutil
import struct
import subprocess
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.devices import no_gpu, standin_cupy, standin_environment
from tests.limits import LIMIT_S
from tools.gpu_check import compile as compiler

ROOT = Path(__file__).parents[2]
BEGIN = ROOT / "tools" / "gpu_day" / "begin.sh"
pytestmark = [
    pytest.mark.skipif(not no_gpu(), reason="there is a GPU: gpu-check runs them there"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ to run CUDA kernels on the host"),
]
TORCH = """
class Tables:
    def __enter__(self): return self
    def __exit__(self, *error): pass
    def key_averages(self): return self
    def table(self, **options): return f"kernels by {options['sort_by']}"
def profile(activities): return Tables()
class ProfilerActivity: CUDA = 1
"""


def run(*command: str, folder: Path = ROOT, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command over the stand-ins."""
    environment = {**standin_environment(), **variables}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )


def test_kernels_are_compiled_beforehand() -> None:
    done = run(sys.executable, "-m", "tools.gpu_check.compile")
    assert done.returncode == 0, done.stderr
    assert f"{len(compiler.TYPES)} of {len(compiler.TYPES)} all met" in done.stdout  # one of each file


def test_parts_of_gpu_check_run_over_the_stand_ins(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tools.gpu_check.check", "--parts", "machine", "ranks", "all_reduce"]
    run(*command, "--out", str(tmp_path), STANDIN_VERSION="22809")
    found = json.loads((tmp_path / "gpu-check.json").read_text())
    machine, ranks, all_reduce = found["parts"]
    assert machine["result"] == "passed" and found["machine"]["NCCL"].startswith("22809")
    assert ranks["result"] == "skipped" and "does not let ranks share" in ranks["rows"][0]["note"]
    # at one rank a mean is work for NCCL and a sum is none, so that only the former can be held against a limit
    limited = {row["what"].split()[0] for row in all_reduce["rows"] if row["required"]}
    assert limited == {"mean"} and any(row["what"].startswith("sum") for row in all_reduce["rows"])
    assert all(isinstance(row["figure"], float) for row in all_reduce["rows"])


def test_a_source_has_its_own_kernel_and_no_other_that_a_macro_makes() -> None:
    with standin_cupy():
        sources = compiler.sources()
        assert {name.partition(" of ")[0] for name in sources} <= compiler.own_kernels()
        text = sources["elementwise.relu_formula of f"]
        assert "\nUNARY(relu," in text and "\nUNARY(sigmoid," not in text and "\nBINARY(add," not in text
        assert "\nREDUCTION(max_rows," in sources["reduce.max_rows of d"]
        assert len(sources) == len(set(sources.values()))


def test_a_kernel_that_does_not_compile_is_named(monkeypatch: pytest.MonkeyPatch, capsys: object) -> None:
    monkeypatch.setattr(compiler, "sources", lambda: {"move.broken of f": "nonsense"})
    monkeypatch.setattr(compiler, "get_context", lambda how: None)
    raises = SimpleNamespace(exception=lambda: RuntimeError("line 1: nonsense"))

    class Pool:
        def __init__(self, *arguments: object) -> None: ...
        def __enter__(self) -> Pool:
            return self

        def __exit__(self, *error: object) -> None: ...
        def submit(self, *job: object) -> SimpleNamespace:
            return raises

    monkeypatch.setattr(compiler, "ProcessPoolExecutor", Pool)
    assert compiler.main() == 1
    assert "move.broken of f: RuntimeError: line 1: nonsense" in capsys.readouterr().out  # type: ignore[attr-defined]


@pytest.mark.slow
def test_profiles_are_printed_for_what_works_and_reasons_for_the_rest(tmp_path: Path) -> None:
    package = tmp_path / "torch"
    package.mkdir()
    backends = "from types import SimpleNamespace as S\nbackends = S(cuda=S(matmul=S()), cudnn=S())\n"
    (package / "__init__.py").write_text(backends)
    (package / "profiler.py").write_text(TORCH)
    path = os.pathsep.join([str(tmp_path), standin_environment()["PYTHONPATH"]])
    done = run(sys.executable, "-m", "tools.gpu_day.profile", "cnn", PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    ours = [number for number, line in enumerate(lines) if line.endswith("graph: 3 steps")]
    assert [lines[number].split(", graph")[0] for number in ours] == [
        "##### cnn, float32",
        "##### cnn, tf32",
        "##### cnn, fp16",
        "##### cnn, bf16",
        "##### cnn, float16",
    ]
    assert all(lines[number + 1] == "kernels by self_device_time_total" for number in ours)
    assert sum(line.startswith("left out: ") for line in lines) == 5  # that torch has no networks


@pytest.fixture
def carried(tmp_path: Path) -> Path:
    """A folder with all that may be carried to such a machine."""
    folder = tmp_path / ".gpu_day"
    (folder / "wheels").mkdir(parents=True)
    (folder / "modules").mkdir()
    (folder / "commit").write_text("0123abcd\n")
    (folder / "libnccl.so.2.xz").write_bytes(lzma.compress(b"a library"))
    kernel = tmp_path / "cupy_cache_dir" / "kernel.cubin"
    kernel.parent.mkdir()
    kernel.touch()
    with tarfile.open(folder / "cupy_cache.tgz", "w:gz") as archive:
        archive.add(kernel.parent, "cupy_cache_dir")
    return folder


def begin(folder: Path, commands: str) -> list[str]:
    """Run commands behind begin.sh in ``folder``; return what Python was started with, a line each time."""
    python = folder / "python"
    python.write_text(
        f'#!/bin/sh\n[ "$1" = -c ] && exec {sys.executable} "$@"; '
        'echo "$PWD $* ${GPU_CHECK_COMMIT-} ${GPU_CHECK_MODULES-} ${SINGA_LITE_NCCL_LIB-}" >> "$CALLS"\n'
    )
    python.chmod(0o755)
    variables = {name: value for name, value in os.environ.items() if name not in ("OUT", "CARRIED")}
    variables |= {"PYTHON": str(python), "CALLS": str(folder / "calls"), "OUT": str(folder / "out")}
    subprocess.run(
        ["bash", "-e", "-c", f". {BEGIN}\n{commands}"], cwd=folder, env=variables, check=True, timeout=LIMIT_S
    )
    return (folder / "calls").read_text().splitlines()


def test_a_machine_gets_what_was_carried_to_it(tmp_path: Path, carried: Path) -> None:
    cached = tmp_path / "build" / "gpu-check" / "cache" / "cupy_cache_dir" / "kernel.cubin"
    [line] = begin(tmp_path, f'build "step cnn"; [ -f {cached} ]; keep_cache')
    assert line.startswith(f"{tmp_path} -m tools.gpu_check.check --parts machine build compile step cnn ")
    assert f"--wheels {carried}/wheels" in line and f"--out {tmp_path}/out/a" in line
    assert line.endswith(f" 0123abcd {carried}/modules ")
    with tarfile.open(tmp_path / "out" / "cupy_cache.tgz") as archive:
        assert "cupy_cache_dir/kernel.cubin" in archive.getnames()


def test_a_carried_nccl_serves_the_commands_that_ask_for_it(tmp_path: Path, carried: Path) -> None:
    library = tmp_path / "build" / "gpu-check" / "cache" / "libnccl.so.2"
    with_it, without = begin(tmp_path, "with_nccl check --parts ranks; check --parts ranks")
    assert with_it.endswith(f" {library}") and without.endswith(f"{carried}/modules ")
    assert library.read_bytes() == b"a library"


def test_a_libnccl_is_shrunk_to_one_architecture(tmp_path: Path) -> None:
    """An ELF file of two sections of device code, each a fat binary of PTX and of two architectures."""

    def image(kind: int, architecture: int, code: bytes) -> bytes:
        return (
            struct.pack("<HHIQIII", kind, 1, 64, len(code), 0, 0, 0)
            + struct.pack("<I", architecture).ljust(36, b"\1")
            + code
        )

    images = image(1, 90, b"ptx-----") + image(2, 80, b"ampere--") + image(2, 90, b"hopper--")
    binary = struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(images)) + images + bytes(8)
    names = b"\0.nv_fatbin\0__nv_relfatbin\0.shstrtab\0"
    start, count = 64, 4
    contents = [b"", binary, binary, names]
    places = [start + sum(map(len, contents[:i])) for i in range(count)]
    numbers = [0, names.index(b".nv"), names.index(b"__nv"), names.index(b".shs")]
    table = b"".join(
        struct.pack("<IIQQQQIIQQ", numbers[i], 0, 0, 0, places[i], len(contents[i]), 0, 0, 0, 0)
        for i in range(count)
    )
    head = bytearray(64)
    struct.pack_into("<Q", head, 0x28, start + sum(map(len, contents)))
    struct.pack_into("<HHH", head, 0x3A, 64, count, 3)
    library = tmp_path / "libnccl.so.2"
    library.write_bytes(bytes(head) + b"".join(contents) + table)
    command = [sys.executable, "-m", "tools.gpu_day.shrink_nccl", str(library)]
    done = run(*command, "90", str(tmp_path / "out" / "small.xz"))
    assert done.returncode == 0, done.stderr
    small = lzma.decompress((tmp_path / "out" / "small.xz").read_bytes())
    assert len(small) == library.stat().st_size and small.count(b"hopper--") == 1
    assert small.index(b"hopper--") == library.read_bytes().index(b"hopper--")
    assert b"ampere" not in small and b"ptx" not in small
    assert b"no machine code for sm_75" in run(*command, "75", str(tmp_path / "x")).stderr.encode()


def test_nothing_need_be_carried(tmp_path: Path) -> None:
    lines = begin(tmp_path, "build; check --parts smoke; in_tree -m benchmarks.gpu.step cnn")
    assert "--wheels" not in lines[0] and "--parts smoke" in lines[1]
    assert lines[2].strip() == f"{tmp_path} -m benchmarks.gpu.step cnn"  # the checkout: nothing was built
    (tmp_path / "build" / "gpu-check" / "tree" / "singa_lite").mkdir(parents=True)
    assert begin(tmp_path, "in_tree -m x")[-1].strip() == f"{tmp_path}/build/gpu-check/tree -m x"
