# SPDX-License-Identifier: Apache-2.0
"""Random streams as arrays: those of devices, of numpy's global functions and of Python's module ``random``.

Note [streams of other ranks]: with another number of ranks each stream goes on by itself. Where the ranks that saved
had the same one (of a device: the same seed), all go on with it, behind all that was drawn. Where they had not, each
gets a new one, derived from rank 0's, the step and its rank, the same whenever the job goes on from there. A
checkpoint of one rank does not show which it was: then the streams that the ranks have before they load decide, as
the script has seeded them.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import CheckpointError
from .rank_arrays import Arrays, digest

PREFIX = "random/"
# normals: the second of a pair that numpy and Python keep for the next call
DEVICES, NUMPY, PYTHON, NORMALS = (PREFIX + name for name in ("devices", "numpy", "python", "normals"))
SIZES = {NUMPY: 626, PYTHON: 625}


def streams(devices: Sequence[tuple[int, int]]) -> Arrays:
    """Return the states of this process's streams.

    Args:
        devices: (seed, counter) of each device.

    Raises:
        CheckpointError: numpy's global functions draw from another bit generator than numpy's own, MT19937.
    """
    state: Any = np.random.get_state(legacy=False)  # Any: numpy's stubs know it as a tuple or a dict
    kind = state["bit_generator"]
    if kind != "MT19937":  # by np.random.set_bit_generator
        raise CheckpointError(
            f"the global functions of numpy draw from {kind}, whose state a checkpoint does not keep; call "
            "np.random.set_bit_generator(np.random.MT19937(seed)), and draw from a Generator of the script"
        )
    _, words, python_normal = random.getstate()
    return {
        DEVICES: np.array(devices, np.uint64).reshape(len(devices), 2),
        PYTHON: np.array(words, np.uint32),
        NORMALS: np.array([state["gauss"], np.nan if python_normal is None else python_normal]),
        NUMPY: np.array([*state["state"]["key"], state["state"]["pos"], state["has_gauss"]], np.uint32),
    }


def restore_streams(arrays: Arrays) -> list[tuple[int, int]]:
    """Set numpy's and Python's streams; return (seed, counter) of each device."""
    numpy_normal, python_normal = map(float, arrays[NORMALS])
    if NUMPY in arrays:
        words = arrays[NUMPY]
        np.random.set_state(("MT19937", words[:624], int(words[624]), int(words[625]), numpy_normal))
    python = tuple(map(int, arrays[PYTHON]))
    random.setstate((3, python, None if np.isnan(python_normal) else python_normal))
    return [(int(seed), int(counter)) for seed, counter in arrays[DEVICES]]


def check_streams(arrays: Arrays) -> None:
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


def stream_ids() -> dict[str, str]:
    """Return ids that are equal on ranks whose global streams of numpy, and of Python, are in the same state."""
    now = streams([])
    return {name: _id_of(now, name) for name in (NUMPY, PYTHON)}


def _id_of(states: Arrays, name: str) -> str:
    """Return a hash of the whole state of numpy's or Python's stream."""
    normal = states[NORMALS][[NUMPY, PYTHON].index(name)]
    return f"{digest(states[name])} {normal}" if name in states else ""


def resized_streams(
    saved: Sequence[Arrays],
    now: Sequence[Mapping[str, Any]],
    step: int,
    rank: int,
) -> Arrays:
    """Return states of the streams of ``rank`` in a job of another number of ranks, see Note [streams of other ranks].

    Args:
        saved: the states of each rank of the job that was saved.
        now: what ``stream_ids`` and the devices' seeds, as DEVICES, are on each rank that goes on, before it does.
        step: of the checkpoint.
        rank: of the job that goes on.

    Raises:
        CheckpointError: ``saved`` has something other than random streams.
    """
    for states in saved:
        check_streams(states)
    first, is_one = saved[0], len(saved) == 1
    devices = []
    for number, (seed, _) in enumerate(first[DEVICES]):
        of_ranks = [states[DEVICES][number] for states in saved]
        seeds = [each[DEVICES][number : number + 1] for each in now] if is_one else [s for s, _ in of_ranks]
        if all(each == seeds[0] for each in seeds):
            devices.append((int(seed), max(int(counter) for _, counter in of_ranks)))
        else:
            derived = np.random.SeedSequence((int(seed), step, rank)).generate_state(1, np.uint64)
            devices.append((int(derived[0]), 0))
    arrays: Arrays = {
        DEVICES: np.array(devices, np.uint64).reshape(len(devices), 2),
        NORMALS: first[NORMALS].copy(),
    }
    # how the words of a new stream end, and its kept normal: none
    for number, (name, end, normal) in enumerate([(NUMPY, [624, 0], 0.0), (PYTHON, [624], np.nan)]):
        if name not in first:
            continue
        arrays[name] = first[name]
        if len({each[name] for each in now} if is_one else {_id_of(states, name) for states in saved}) > 1:
            seed = [*map(int, first[name][:4]), step, rank]
            words = np.random.SeedSequence(seed).generate_state(624, np.uint32)
            arrays[name] = np.append(words, np.array(end, np.uint32))
            arrays[NORMALS][number] = normal
    return arrays
