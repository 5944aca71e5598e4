# SPDX-License-Identifier: Apache-2.0
"""What a rank adds to a generation: extras as JSON and arrays, hashes, and which arrays go into which file."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..dtypes import bfloat16
from ..errors import CheckpointError, OptionError
from ..generation import FORMAT, Manifest, new_id
from ..tensor import Tensor, to_numpy
from .rank_arrays import Arrays, digest
from .together import Json

# of ShardedSampler.state_dict: equal on all ranks that share the samples of an epoch
EPOCH = frozenset(
    {"epoch", "start", "position", "num_samples", "batch_size", "world_size", "shuffle", "seed"}
)


def split_extra(extra: Mapping[str, Any] | None) -> tuple[Arrays, dict[str, Json]]:
    """Return the arrays of ``extra`` and its JSON values; OptionError for what is neither."""
    if extra is not None and not (
        isinstance(extra, Mapping) and all(isinstance(name, str) for name in extra)
    ):
        raise OptionError(f"save_job: extra = {extra!r} must be values by name")
    arrays, values = {}, {}
    for name, value in (extra or {}).items():
        if isinstance(value, (Tensor, np.ndarray)):
            array = to_numpy(value)
            if (
                array.dtype.kind not in "biuf"
                or array.dtype.itemsize > 8
                or isinstance(array, np.ma.MaskedArray)
            ):
                raise OptionError(
                    f"save_job: extra {name!r} is a {type(array).__name__} of dtype {array.dtype}; arrays must be "
                    "of numbers of 8 bytes at most"
                )
            arrays[name] = array.astype(array.dtype.newbyteorder("="), copy=False)
        else:
            values[name] = as_json(f"extra {name!r}", value)
    return arrays, values


def as_json(what: str, value: Any) -> Json:
    """Return ``value`` as it comes back from JSON, tuples as lists; OptionError if that is another value."""
    try:
        again = json.loads(json.dumps(value, allow_nan=True))
        if not _has_text_keys(value):
            raise TypeError("keys must be text")
    except (TypeError, ValueError, RecursionError) as error:
        raise OptionError(f"save_job: {what} = {_shown(value)} is not a JSON value: {error}") from error
    return again


def _shown(value: Any) -> str:
    try:
        return repr(value)
    except Exception:  # such as of an int of more digits than Python writes
        return f"a value of type {type(value).__name__}"


def _has_text_keys(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _has_text_keys(each) for key, each in value.items())
    return not isinstance(value, (list, tuple)) or all(map(_has_text_keys, value))


def check_samplers(states: list[Json]) -> None:
    """Raise CheckpointError where the ranks share the samples of an epoch, and one is elsewhere in it or in another.

    Args:
        states: of the ranks' samplers. Only those of a ShardedSampler of all ranks are compared: any other may give
            each rank samples of its own.
    """
    if not all(
        isinstance(state, dict) and state.keys() >= EPOCH and state["world_size"] == len(states)
        for state in states
    ):
        return
    for rank, state in enumerate(states):
        for name in sorted(EPOCH):
            if state[name] != states[0][name]:
                raise CheckpointError(
                    f"save_job: the sampler's {name} is {states[0][name]!r} on rank 0 but {state[name]!r} on rank "
                    f"{rank}; make it alike on all ranks, and save when all have taken as many batches"
                )


def check_resized_samplers(states: list[Json], where: str) -> None:
    """Raise CheckpointError where another number of ranks cannot go on from the samplers of the ranks that saved.

    Those of a ShardedSampler of all ranks are equal, see ``check_samplers``, and any rank's says where all are.
    """
    if any(state != states[0] for state in states):
        raise CheckpointError(
            f"{where}: the ranks' samplers are at different positions, so only {len(states)} ranks can go on from it; "
            "use a ShardedSampler of all ranks"
        )


def check_optimizer(saved: Mapping[str, Json], settings: Mapping[str, Json], where: str) -> None:
    """Raise CheckpointError unless what ``Optimizer.settings`` gave is of the same class."""
    if saved.get("class") != settings["class"]:
        raise CheckpointError(
            f"{where}: it was saved with the optimizer {saved.get('class')}, this one is {settings['class']}"
        )


def changed_settings(saved: Mapping[str, Json], settings: Mapping[str, Json]) -> list[str]:
    """Return the names of schedules, the learning rate aside, and switches that are others than were saved.

    Plain numbers do not count: those of an optimizer of the script may be its counters.
    """
    return [
        name
        for name, value in settings.items()
        if name in saved
        and name != "lr"
        and isinstance(value, (dict, bool))
        and _fixed(saved[name]) != _fixed(value)
    ]


def _fixed(setting: Json) -> Json:
    """Return what of a setting does not depend on the step."""
    return {**setting, "values": None} if isinstance(setting, dict) else setting


def digests(arrays: Arrays) -> dict[str, str]:
    """Return the hash of each array.

    Raises:
        CheckpointError: one is bfloat16.
    """
    for name, array in arrays.items():
        if array.dtype == bfloat16:
            raise CheckpointError(f"save_job: {name!r} is bfloat16; save it as float32")
    return {name: digest(array) for name, array in arrays.items()}


def placed(
    by_rank: list[dict[str, str]], arrays: Arrays
) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Return the arrays and their hashes of each rank's file: those it has alone, and its part of what is equal on all.

    Args:
        by_rank: the hashes of each rank's arrays by name.
        arrays: this rank's.
    """
    ranks = range(len(by_rank))
    first, *others = by_rank
    is_shared = {name for name, value in first.items() if all(each.get(name) == value for each in others)}
    own = [{name: value for name, value in each.items() if name not in is_shared} for each in by_rank]
    shared: list[dict[str, str]] = [{} for _ in ranks]
    num_bytes = dict.fromkeys(ranks, 0)
    for name in sorted(is_shared, key=lambda name: (-arrays[name].nbytes, name)):
        rank = min(ranks, key=num_bytes.__getitem__)
        shared[rank][name] = first[name]
        num_bytes[rank] += arrays[name].nbytes
    return own, shared


def manifest_of(
    optimizer: Any, number: int, everyone: list[Json], own: list[dict[str, str]], shared: list[dict[str, str]]
) -> Manifest:
    """Return the manifest of a new generation, but for versions; ``own`` and ``shared`` as ``placed`` gives them."""
    return Manifest(
        format=FORMAT,
        number=number,
        id=new_id(),
        step=everyone[0]["step"],
        world_size=len(everyone),
        saved_at=time.time(),
        versions={},
        optimizer=json.loads(json.dumps(optimizer.settings(), default=repr)),
        dist_option=getattr(optimizer, "dist_option", None),
        samplers=[theirs["sampler"] for theirs in everyone],
        extras=[theirs["extra"] for theirs in everyone],
        own=own,
        shared=shared,
    )
