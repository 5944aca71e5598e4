# SPDX-License-Identifier: Apache-2.0
"""What a "pack" joins is computed right in the joined array, but not where that is in use meanwhile."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from singa_lite.device import get_default_device
from singa_lite.graph.arena import share_memory
from singa_lite.graph.nodes import run_steps
from singa_lite.graph.recorder import Recorder
from singa_lite.graph.rewrite import pack_in_place
from singa_lite.tensor import from_numpy
from singa_lite.tensor.pytree import leaves

SIZE = 64


def packs(x: Any, out: Any, in_use: bool) -> None:
    """Write x * x and x + x end to end into ``out``; with ``in_use`` the joined array is filled and read before."""
    backend = get_default_device().backend
    joined, square, double, twice = (backend.empty((n * SIZE,), "float32") for n in (2, 1, 1, 2))
    backend.run("mul", x, x, out=square)
    if in_use:
        backend.run("fill", out=joined, value=7.0)
        backend.run("add", joined, joined, out=twice)
    backend.run("add", x, x, out=double)
    backend.run("pack", square, double, out=joined)
    if in_use:
        backend.run("add", joined, twice, out=joined)
    backend.run("copy", joined, out=out)


@pytest.mark.parametrize("in_use", [False, True])
def test_a_pack_in_place_computes_what_the_pack_does(in_use: bool) -> None:
    backend = get_default_device().backend
    x = from_numpy(np.arange(SIZE, dtype=np.float32))
    out, recorder = from_numpy(np.zeros(2 * SIZE, np.float32)), Recorder(leaves)
    with recorder.recording():
        packs(x.array, out.array, in_use)
    recorder.finish()
    expected = out.array.copy()
    nodes = pack_in_place(recorder.nodes)
    names = [node.name.split(" ")[0] for node in nodes]
    assert "pack" not in names and names.count("copy") == (2 if in_use else 1)
    array_of, _ = share_memory(nodes, [], lambda size: np.full(size, 255, np.uint8))
    out.array[...] = 0
    run_steps(backend.compile([node.mapped(array_of) for node in nodes]))
    np.testing.assert_array_equal(out.array, expected)
    values = x.array
    np.testing.assert_array_equal(expected, np.concatenate([values**2, 2 * values]) + (14 if in_use else 0))
