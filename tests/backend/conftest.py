# SPDX-License-Identifier: Apache-2.0
"""What the tests of cuDNN share."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from typing import Any

import pytest

from tests.devices import cuda_device, no_gpu, standin_cudnn


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A CUDA backend that has planned nothing yet."""
    return type(cuda_device(monkeypatch).backend)(0)


@pytest.fixture
def counters() -> ctypes.CDLL:
    """The stand-in in place of cuDNN; its own functions, which count."""
    if not no_gpu():
        pytest.skip("there is a GPU: the stand-in of cuDNN knows host memory only")
    return ctypes.CDLL(str(standin_cudnn()))


@pytest.fixture
def all_given_back(counters: ctypes.CDLL) -> Iterator[None]:
    """Checks, after the test, that the stand-in's handles and descriptors it made are gone."""
    gc.collect()
    before = counters.standin_cudnn_live()
    yield
    gc.collect()
    assert counters.standin_cudnn_live() == before
