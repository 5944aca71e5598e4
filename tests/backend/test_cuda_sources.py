# SPDX-License-Identifier: Apache-2.0
"""NVRTC compiles the sources of all own CUDA kernels, which takes no GPU."""

from __future__ import annotations

from typing import Any

import pytest

from tests.devices import cuda_device
from tests.standin import nvrtc
from tools.gpu_check.compile import TYPES, own_kernels, types_for


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Any:
    return cuda_device(monkeypatch).backend


@pytest.mark.parametrize("architecture", ["compute_80", "compute_90"])
@pytest.mark.parametrize("file", TYPES)
def test_sources_compile_without_a_warning(file: str, architecture: str, backend: Any) -> None:
    compiler = nvrtc.load()
    if compiler is None:
        pytest.skip("NVRTC is not installed (pip install nvidia-cuda-nvrtc)")
    source_of = backend._compile.__globals__["source_of"]
    kernels = [name for name in own_kernels() if name.startswith(f"{file}.")]
    for source in {
        source_of(file, types, name.partition(".")[2]): None for name in kernels for types in types_for(name)
    }:
        complaints, ptx = nvrtc.compile_source(compiler, source, architecture)
        assert complaints == "" and b".entry" in ptx, f"{complaints[:1000]}\n{source[-3000:]}"


@pytest.mark.parametrize("types", ["e", "E"])
def test_elements_of_16_bits_move_by_16_bytes(types: str, backend: Any) -> None:
    compiler = nvrtc.load()
    if compiler is None:
        pytest.skip("NVRTC is not installed (pip install nvidia-cuda-nvrtc)")
    source = backend._compile.__globals__["source_of"]("elementwise", types, "add_gelu_formula")
    _, ptx = nvrtc.compile_source(compiler, source, "compute_90")
    entry = ptx[ptx.index(b".entry add_gelu_formula") :].partition(b"\n}\n")[0]
    assert entry.count(b"ld.global.v4.u32") >= 2 and entry.count(b"st.global.v4.u32") >= 2
