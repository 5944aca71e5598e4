# SPDX-License-Identifier: Apache-2.0
"""Threads that run kernels at the same time."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from singa_lite.device import get_default_device
from singa_lite.dtypes import bfloat16

GEOMETRY = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "groups": 1}


def results(dtype: object, weight_dtype: object) -> list[bytes]:
    """A convolution and its gradients, for which oneDNN takes scratch."""
    backend = get_default_device().backend
    rng = np.random.default_rng(0)
    x, dy, w = (
        rng.standard_normal(shape).astype(dtype)
        for shape in ((4, 32, 16, 16), (4, 32, 16, 16), (32, 32, 3, 3))
    )
    w = w.astype(weight_dtype)
    y, dx, dw = np.empty_like(dy), np.empty_like(x), np.empty(w.shape, np.float32)
    backend.run("conv2d", x, w, out=y, **GEOMETRY)
    backend.run("conv2d_backward_data", dy, w, out=dx, **GEOMETRY)
    backend.run("conv2d_backward_weight", dy, x, out=dw, **GEOMETRY)
    return [array.tobytes() for array in (y, dx, dw)]


@pytest.mark.parametrize(
    ("dtype", "weight_dtype"), [(np.float32, np.float32), (bfloat16, bfloat16), (bfloat16, np.float32)]
)
def test_kernels_give_the_same_bits_in_threads_that_run_them_together(
    dtype: object, weight_dtype: object
) -> None:
    wanted, wrong = results(dtype, weight_dtype), []

    def work() -> None:
        for _ in range(30):
            if results(dtype, weight_dtype) != wanted:
                wrong.append(threading.current_thread())

    threads = [threading.Thread(target=work, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not wrong
