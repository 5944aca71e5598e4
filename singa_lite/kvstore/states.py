# SPDX-License-Identifier: Apache-2.0
"""Saving the optimizers' states of a store, and what compression has lost, and going on from them.

What lives here: what is in the file. What does not: the file's format and safe reading (model_file.py), collecting
states from servers (dist.py). Worker 0 alone has the file; what gathers, scatters or broadcasts is a collective.

Note [states file]: a checkpoint file whose arrays are ``<number of key>:<state>``, ``<number of key>:residual`` of
shape (workers, elements), and ``store``, JSON as bytes: keys with shapes and dtypes, number of workers, compression,
the optimizer's class, and the optimizer where it was dumped. An optimizer's own state "residual" is called
``<number of key>::residual``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, TypeGuard

import numpy as np

from ..comm.base import Communicator
from ..dtypes import LARGEST_FLOAT32
from ..errors import CheckpointError, check_number
from ..model_file import Checkpoint, read_checkpoint, write_checkpoint
from ..opt.checks import check_steps
from ..tensor import Tensor
from .calls import Array, Arrays, Key, Path, Spec, States
from .residuals import Residuals
from .stored import StoredArray

HEAD = "store"
RESIDUAL = "residual"  # what compression has lost
OWN_RESIDUAL = f":{RESIDUAL}"  # a state that an optimizer calls so


def describe_store(specs: Iterable[Spec], num_workers: int) -> dict[str, Any]:
    """Return what a file must have in common with the store that reads it."""
    keys = [[spec.key, list(spec.shape), spec.dtype.name] for spec in specs]
    return {"keys": keys, "num_workers": num_workers}


def write_states(
    path: Path, head: Mapping[str, Any], specs: list[Spec], states: Mapping[Key, Arrays], residuals: Arrays
) -> None:
    """Write the file; CheckpointError if that is not possible."""
    arrays = {
        f"{spec.number}:{OWN_RESIDUAL if name == RESIDUAL else name}": array
        for spec in specs
        for name, array in states.get(spec.key, {}).items()
    }
    text = np.frombuffer(json.dumps(head).encode(), np.uint8)
    write_checkpoint(path, Checkpoint({}, optimizer={HEAD: text, **arrays, **residuals}))


def read_states(
    path: Path, store: Mapping[str, Any], specs: list[Spec]
) -> tuple[dict[str, Any], States, Arrays]:
    """Return the head of a file, the states by key, and the residuals; CheckpointError if it is of another store."""
    arrays = dict(read_checkpoint(path, {}, {}).optimizer or {})
    try:
        head = json.loads(arrays.pop(HEAD).tobytes())
        found = {name: head[name] for name in store}
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"expected a file of a key-value store's states, got {path}") from error
    for name, mine in store.items():
        if found[name] != mine:
            raise CheckpointError(f"{path} is of another store: its {name} are {found[name]}, here {mine}")
    residuals = {name: arrays.pop(name) for name in [*arrays] if name.partition(":")[2] == RESIDUAL}
    for name, array in residuals.items():
        if array.dtype != np.float32 or not np.isfinite(array).all():
            raise CheckpointError(
                f"{path}: {name} must be finite and float32, as what compression has lost is"
            )
    shapes = {f"{spec.number}:{RESIDUAL}": (store["num_workers"], spec.size) for spec in specs}
    if residuals and {name: array.shape for name, array in residuals.items()} != shapes:
        raise CheckpointError(f"{path} lacks what compression has lost, of some keys or workers")
    states: States = {spec.key: {} for spec in specs}
    keys = {str(spec.number): spec.key for spec in specs}
    for name, array in arrays.items():
        number, _, state = name.partition(":")
        if number not in keys:
            raise CheckpointError(f"{path} has a state {name!r} of no key")
        states[keys[number]][RESIDUAL if state == OWN_RESIDUAL else state] = array
    return head, states, residuals


def check_head(path: Path, found: Mapping[str, Any], mine: Mapping[str, Any]) -> None:
    """Raise CheckpointError where the head of a file has another value; older files have fewer entries."""
    for name, value in mine.items():
        if name in found and found[name] != value:
            raise CheckpointError(f"{path}: its {name} is {found[name]}, but here {value}")


def are_states(values: object) -> TypeGuard[Mapping[Key, Arrays]]:
    """Return whether these are arrays by name, by key."""
    return isinstance(values, Mapping) and all(
        isinstance(each, Mapping) and all(isinstance(array, np.ndarray) for array in each.values())
        for each in values.values()
    )


def check_states(path: Path, mine: Mapping[Key, Arrays], found: object) -> None:
    """Raise CheckpointError unless the states have the names, shapes and dtypes that the optimizers have here."""
    if not are_states(found):
        raise CheckpointError(f"{path}: expected arrays by key and name, got {type(found).__name__}")
    if unknown := [key for key in found if key not in mine]:
        raise CheckpointError(f"{path}: there are no keys {unknown} here")
    for key, states in mine.items():
        shapes, others = (
            {name: f"{array.dtype}{list(array.shape)}" for name, array in each.items()}
            for each in (states, found.get(key, {}))
        )
        if shapes != others:
            raise CheckpointError(f"{path}: key {key!r} has states {others}, but the optimizer here {shapes}")
        if (steps := found.get(key, {}).get("step_counter")) is not None:
            check_steps(f"{path}: key {key!r}", steps)


def check_residuals(where: str, mine: Mapping[Key, Array], found: object) -> None:
    """Raise CheckpointError unless ``found`` are residuals of the keys and sizes of ``mine``."""
    if not isinstance(found, Mapping) or not all(isinstance(array, np.ndarray) for array in found.values()):
        raise CheckpointError(f"{where}: expected arrays by key, got {type(found).__name__}")
    shapes, others = ({key: array.shape for key, array in each.items()} for each in (mine, found))
    if shapes != others or not all(array.dtype == np.float32 for array in found.values()):
        raise CheckpointError(
            f"{where}: what compression has lost must be flat float32 arrays of shapes {shapes}, not {others}"
        )


def states_with(path: Path, optimizer: Any, specs: list[Spec]) -> States:
    """Return the states that values have with a file's ``optimizer``, which is JSON, before any update.

    Raises:
        CheckpointError: it is not what a store writes of its optimizer, or this process knows no such class.
    """
    states = {}
    try:
        if optimizer["lr"] is not None:
            check_number(f"{path}", "lr", optimizer["lr"], 0, LARGEST_FLOAT32)
        check_steps(f"{path}", np.asarray(optimizer["description"].get("step_counter", 0)))
        for spec in specs:
            if spec.dtype.kind != "f":
                raise TypeError(f"key {spec.key!r} is {spec.dtype}, and an optimizer needs floats")
            stored = StoredArray(spec.key, Tensor(spec.shape, dtype=spec.dtype))
            stored.set_optimizer(optimizer["description"], optimizer["lr"])
            states[spec.key] = stored.get_states()
    except (KeyError, TypeError, ValueError, AttributeError) as error:  # OptionError is a ValueError
        raise CheckpointError(f"{path}: its optimizer cannot be made: {error}") from error
    return states


def gather_residuals(communicator: Communicator, specs: list[Spec], residuals: Residuals) -> Arrays:
    """Return what compression has lost on each worker, by the name in the file; a collective."""
    found = {}
    for spec in specs:
        lost = residuals.get(spec.key, spec.size)
        rows = communicator.all_gather(lost, name="kvstore.save residual").wait()
        assert rows is not None
        found[f"{spec.number}:{RESIDUAL}"] = rows
    return found


def scatter_residuals(
    communicator: Communicator, specs: list[Spec], residuals: Residuals, found: Arrays
) -> None:
    """Give each worker its row of what worker 0 has ``found``; a collective."""
    for spec in specs:
        rows = np.zeros((communicator.size, spec.size), np.float32)
        if communicator.rank == 0:
            rows[...] = found[f"{spec.number}:{RESIDUAL}"]
        communicator.broadcast(rows, 0, name="kvstore.load residual").wait()
        residuals.set(spec.key, rows[communicator.rank])


def broadcast_states(communicator: Communicator, states: States) -> States:
    """Return worker 0's states on all workers; a collective."""
    mine = [
        [key, name, array.dtype.name, list(array.shape)]
        for key, each in states.items()
        for name, array in each.items()
    ]
    manifest = communicator.all_gather_object(mine, name="kvstore.load states")[0]
    found: States = {}
    for key, name, dtype, shape in manifest:
        array = np.empty(shape, dtype)
        if communicator.rank == 0:
            array[...] = states[key][name]
        communicator.broadcast(array, 0, name="kvstore.load states").wait()
        found.setdefault(key, {})[name] = array
    return found
