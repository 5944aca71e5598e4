# SPDX-License-Identifier: Apache-2.0
"""Random streams as arrays: those of devices, of numpy's global functions and of Python's module ``random``."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import CheckpointError
from ..generation import Arrays

PREFIX = "random/"
DEVICES, NUMPY, PYTHON, NORMALS = (
    PREFIX + name for name in ("devices", "numpy", "python", "normals")
)  # normals: the second of a pair that numpy and Python keep for the next call
SIZES = {NUMPY: 626, PYTHON: 625}


def streams(devices: Sequence[tuple[int, int]]) -> Arrays:
    """Return the states of this process's streams.

    Args:
        devices: (seed, counter) of each device.
    """
    state: Any = np.random.get_state()  # Any: numpy's stubs know only that it is a tuple or a dict
    kind, keys, position, has_normal, normal = state
    _, words, python_normal = random.getstate()
    arrays: Arrays = {
        DEVICES: np.array(devices, np.uint64).reshape(len(devices), 2),
        PYTHON: np.array(words, np.uint32),
        NORMALS: np.array([normal, np.nan if python_normal is None else python_normal]),
    }
    if kind == "MT19937":  # numpy's own; a script may have set another
        arrays[NUMPY] = np.array([*keys, position, has_normal], np.uint32)
    return arrays


def restore_streams(arrays: Mapping[str, np.ndarray[Any, Any]]) -> list[tuple[int, int]]:
    """Set numpy's and Python's streams; return (seed, counter) of each device."""
    numpy_normal, python_normal = map(float, arrays[NORMALS])
    if NUMPY in arrays:
        words = arrays[NUMPY]
        np.random.set_state(("MT19937", words[:624], int(words[624]), int(words[625]), numpy_normal))
    python = tuple(map(int, arrays[PYTHON]))
    random.setstate((3, python, None if np.isnan(python_normal) else python_normal))
    return [(int(seed), int(counter)) for seed, counter in arrays[DEVICES]]


def check_streams(arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
    """Raise CheckpointError unless ``restore_streams`` can go on from ``arrays``."""
    is_right = (
        arrays.keys() >= {DEVICES, PYTHON, NORMALS}
        and arrays[DEVICES].ndim == 2
        and (arrays[DEVICES].shape[1], arrays[DEVICES].dtype) == (2, np.uint64)
        and arrays[NORMALS].shape == (2,)
        and all(
            arrays[name].shape == (size,)
            and arrays[name].dtype == np.uint32
            and arrays[name][624] <= 624  # a position
            for name, size in SIZES.items()
            if name in arrays
        )
    )
    if not is_right:
        raise CheckpointError("the states of the random streams are not what a job saves")


def derived_streams(saved: Sequence[Mapping[str, np.ndarray[Any, Any]]], step: int, rank: int) -> Arrays:
    """Return states of new streams for ``rank``, the same whenever a job goes on from ``step`` with it.

    Devices whose seed was the same on all ranks keep it, and go on behind all that was drawn.

    Args:
        saved: the states of each rank of the job that was saved.
        step: of the checkpoint.
        rank: of the job that goes on.
    """
    first = saved[0]
    devices = []
    for number, (seed, _) in enumerate(first[DEVICES]):
        of_ranks = [states[DEVICES][number] for states in saved]
        if all(each == seed for each, _ in of_ranks):
            devices.append((int(seed), max(int(counter) for _, counter in of_ranks)))
        else:
            derived = np.random.SeedSequence((int(seed), step, rank)).generate_state(1, np.uint64)
            devices.append((int(derived[0]), 0))
    words = [
        np.random.SeedSequence([*map(int, first[name][:4]), step, rank]).generate_state(624, np.uint32)
        for name in (PYTHON, NUMPY)
        if name in first
    ]
    arrays = {
        DEVICES: np.array(devices, np.uint64).reshape(len(devices), 2),
        PYTHON: np.append(words[0], np.uint32(624)),
        NORMALS: np.array([0.0, np.nan]),
    }
    if NUMPY in first:
        arrays[NUMPY] = np.append(words[1], np.array([624, 0], np.uint32))
    return arrays
