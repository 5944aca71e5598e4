# SPDX-License-Identifier: Apache-2.0
"""The checkpoint file of a model: what is in it, and how it is written and read safely.

What lives here: the format, and every check of a file that needs no model. What does not: which states a model has, and
copying them (model.py), checkpoints of a whole job (generation.py).

Note [checkpoint format]: a zip file of ``tensor_dict.npz`` (parameters and buffers by name; auxiliary arrays as
``aux.<name>``), ``states_attr.json`` (shape, dtype and kind of each, and ``random_state``, a pair of ints per device)
and, where the model has an optimizer, ``optimizer.npz``. The first two are SINGA's. Nothing is compressed or pickled.
"""

from __future__ import annotations

import io
import json
import os
import struct
import zipfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Protocol

import numpy as np

from .dtypes import bfloat16
from .errors import CheckpointError
from .files import atomic_file, check_regular

STATES_FILE = "tensor_dict.npz"
ATTRIBUTES_FILE = "states_attr.json"
OPTIMIZER_FILE = "optimizer.npz"
AUX_PREFIX = "aux."
# the state_type of arrays that are not states of the model, in SINGA's files too, which have no prefix
AUXILIARY = 1
RANDOM_STATE = "random_state"

MAX_NAME_BYTES = 60_000  # of an array; ZIP has room for 65535
SPARE_BYTES = 1 << 20  # read beside arrays: headers and directories
METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # the others unpack without a limit, see _unpacked

Arrays = dict[str, np.ndarray[Any, Any]]


@dataclass(frozen=True)
class Checkpoint:
    """The contents of a checkpoint file.

    Attributes:
        states: parameters and buffers by name.
        aux: what the caller keeps beside them.
        random_states: (seed, counter) of each device.
        optimizer: what ``Optimizer.get_states`` gave; None where there is no optimizer, or it was not read.
    """

    states: Arrays
    aux: Arrays = field(default_factory=dict)
    random_states: Sequence[tuple[int, int]] = ()
    optimizer: Arrays | None = None


class ArrayLike(Protocol):
    """What a reader must know of an array: a Tensor or a numpy array."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype[Any]: ...


# ---- writing -------------------------------------------------------------------------------------------


def write_checkpoint(path: str | os.PathLike[str], checkpoint: Checkpoint) -> None:
    """Write a checkpoint file atomically, see ``atomic_file``.

    Raises:
        CheckpointError: an array has Python objects in it or a name that the file has for another, or the file cannot
            be written.
    """
    aux = {AUX_PREFIX + name: value for name, value in checkpoint.aux.items()}
    if twice := sorted(set(aux) & set(checkpoint.states)):
        raise CheckpointError(f"save_states: auxiliary states {twice} are states of the model; rename them")
    if RANDOM_STATE in checkpoint.states:
        raise CheckpointError(
            f"save_states: a state of the model is called {RANDOM_STATE!r}, as the state of its device is in the file; "
            "rename it"
        )
    arrays = {**checkpoint.states, **aux}
    attributes: dict[str, Any] = {
        name: {"state_type": AUXILIARY if name in aux else 0, "shape": value.shape, "dtype": str(value.dtype)}
        for name, value in arrays.items()
    }
    attributes[RANDOM_STATE] = [list(pair) for pair in checkpoint.random_states]
    members = {STATES_FILE: _npz(arrays), ATTRIBUTES_FILE: json.dumps(attributes, indent=1).encode()}
    if checkpoint.optimizer is not None:
        members[OPTIMIZER_FILE] = _npz(checkpoint.optimizer)
    with atomic_file(path) as file, zipfile.ZipFile(file, "w") as archive:
        for name, content in members.items():
            archive.writestr(zipfile.ZipInfo(name), content)


def _npz(arrays: Mapping[str, np.ndarray[Any, Any]]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, array in arrays.items():
            if array.dtype == bfloat16:  # which npy files have no name for
                raise CheckpointError(f"save_states: {name!r} is bfloat16; save it as float32")
            if array.dtype.hasobject or array.dtype.names or not _is_name(name):
                raise CheckpointError(
                    f"save_states: {name!r} is not an array of numbers with a plain name; keep it elsewhere"
                )
            with archive.open(name + ".npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, (1, 0), allow_pickle=False)
    return buffer.getvalue()


def _is_name(name: str) -> bool:
    """Return whether a ZIP archive can have a member of that name."""
    try:
        return "\0" not in name and len(name.encode()) <= MAX_NAME_BYTES
    except UnicodeEncodeError:
        return False


# ---- reading -------------------------------------------------------------------------------------------


def read_checkpoint(
    path: str | os.PathLike[str],
    states: Mapping[str, ArrayLike],
    optimizer: Mapping[str, ArrayLike] | None,
) -> Checkpoint:
    """Read and check a checkpoint file of a model with these states.

    No more is read than the model expects and as many bytes again as the file has on disk, so a small file that
    unpacks to gigabytes is an error.

    Args:
        path: the file.
        states: the model's parameters and buffers; names, shapes and dtypes must agree.
        optimizer: the states of the model's optimizer, which determine how much to expect; whether they fit is for
            ``Optimizer.set_states`` to check. None: that part is not read.

    Raises:
        CheckpointError: no such file, not a checkpoint, damaged, or of another model.
    """
    try:
        if isinstance(path, int):  # of an open file, which reading would close
            raise CheckpointError("expected a path, got the number of an open file")
        check_regular(path)
        with open(path, "rb") as file:
            return _read(file, states, optimizer)
    except CheckpointError as error:
        raise CheckpointError(f"load_states: cannot read {path}: {error}") from error
    # bytes of others: zipfile, numpy and json raise nearly every type for one kind of damage or another
    except Exception as error:
        raise CheckpointError(
            f"load_states: cannot read {path}: no such file, not a checkpoint or damaged "
            f"({type(error).__name__}: {error})"
        ) from error


def _read(
    file: BinaryIO, states: Mapping[str, ArrayLike], optimizer: Mapping[str, ArrayLike] | None
) -> Checkpoint:
    expected = [*states.values(), *(optimizer or {}).values()]
    limit = os.fstat(file.fileno()).st_size + sum(map(_num_bytes, expected)) + SPARE_BYTES
    wanted = {STATES_FILE, ATTRIBUTES_FILE} | ({OPTIMIZER_FILE} if optimizer is not None else set())
    with zipfile.ZipFile(file) as archive:
        known = _members(archive, file, limit)
        lacking = sorted({STATES_FILE, ATTRIBUTES_FILE} - set(known))
        unknown = sorted(set(known) - {STATES_FILE, ATTRIBUTES_FILE, OPTIMIZER_FILE})
        if lacking or unknown:
            raise CheckpointError(f"it lacks {lacking} and has unknown {unknown}")
        contents = {name: _unpacked(archive, known[name]) for name in sorted(wanted & set(known))}
    attributes = _attributes(contents[ATTRIBUTES_FILE])
    auxiliary = {name for name, entry in attributes.items() if _kind(entry) == AUXILIARY}
    arrays = _arrays(contents[STATES_FILE], limit, states, auxiliary)
    _check_shapes(attributes, arrays)
    random_states = _random_states(attributes)
    slots = _arrays(contents[OPTIMIZER_FILE], limit) if OPTIMIZER_FILE in contents else None
    aux = {name.removeprefix(AUX_PREFIX): value for name, value in arrays.items() if name not in states}
    return Checkpoint({name: arrays[name] for name in states}, aux, random_states, slots)


def _num_bytes(array: ArrayLike) -> int:
    return int(np.prod(array.shape, dtype=np.int64)) * array.dtype.itemsize


def _members(archive: zipfile.ZipFile, file: Any, limit: int) -> dict[str, zipfile.ZipInfo]:
    """Return the members of a zip file by name, checked before anything is unpacked.

    Members must fill the file from its first byte to its directory: a damaged directory that leaves one out, or
    names the same bytes many times, is found here.
    """
    infos = sorted(archive.infolist(), key=lambda info: info.header_offset)
    end = slack = total = 0
    for info in infos:
        file.seek(info.header_offset + 26)
        if not 0 <= info.header_offset - end <= slack:
            raise CheckpointError(f"its directory is damaged before {info.filename!r}")
        end = info.header_offset + 30 + sum(struct.unpack("<HH", file.read(4))) + info.compress_size
        # sizes that follow the member, where they were not known before
        slack = 24 if info.flag_bits & 8 else 0
        total += info.file_size
        if info.compress_type not in METHODS or info.is_dir():
            raise CheckpointError(f"{info.filename!r} is compressed in a way that is not read")
    if not 0 <= archive.start_dir - end <= slack:
        raise CheckpointError("its directory is damaged")
    if total > limit:
        raise CheckpointError(f"it unpacks to {total} bytes where this model needs at most {limit}")
    if len({info.filename for info in infos}) < len(infos):
        raise CheckpointError("it has two members of one name")
    return {info.filename: info for info in infos}


def _unpacked(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> bytes:
    """Return a member's bytes; where it unpacks to more than it says, ``ZipFile.read`` would take memory for 2 GB."""
    with archive.open(info) as member:
        return member.read(info.file_size + 1)


def _arrays(
    content: bytes,
    limit: int,
    expected: Mapping[str, ArrayLike] | None = None,
    auxiliary: Collection[str] = (),
) -> Arrays:
    """Read the arrays of an npz file: those ``expected`` and ``auxiliary`` ones, or all if None."""
    file = io.BytesIO(content)
    with zipfile.ZipFile(file) as archive:
        members = {name.removesuffix(".npy"): info for name, info in _members(archive, file, limit).items()}
        if expected is not None:
            missing, others = sorted(set(expected) - set(members)), sorted(set(members) - set(expected))
            unknown = [name for name in others if name not in auxiliary]
            if missing or unknown:
                raise CheckpointError(f"it lacks {missing} and has unknown {unknown}")
        return {
            name: _array(name, _unpacked(archive, info), (expected or {}).get(name))
            for name, info in members.items()
        }


def _array(name: str, content: bytes, like: ArrayLike | None) -> np.ndarray[Any, Any]:
    """Read the array of an npy file, of the shape and dtype of ``like`` if one is given."""
    file = io.BytesIO(content)
    version = np.lib.format.read_magic(file)
    if version != (1, 0):
        raise CheckpointError(f"{name!r} is in version {version} of numpy's format, not in (1, 0)")
    shape, is_fortran, dtype = np.lib.format.read_array_header_1_0(file)
    if dtype.hasobject:
        raise CheckpointError(f"{name!r} holds Python objects, which are not read")
    if like is not None and (shape != like.shape or dtype != like.dtype):
        raise CheckpointError(f"{name!r} is {dtype}{shape}, not {like.dtype}{like.shape}")
    values = np.frombuffer(content, np.uint8, offset=file.tell())
    if min(shape, default=0) < 0 or values.size != int(np.prod(shape, dtype=object)) * dtype.itemsize:
        raise CheckpointError(f"{name!r} has {values.size} bytes for {dtype}{shape}")
    return np.ndarray(shape, dtype, values.copy(), order="F" if is_fortran else "C")


def _attributes(content: bytes) -> dict[str, Any]:
    attributes = json.loads(content)
    if not isinstance(attributes, dict):
        raise CheckpointError(f"{ATTRIBUTES_FILE} is not an object")
    return attributes


def _kind(entry: Any) -> Any:
    return entry.get("state_type") if isinstance(entry, dict) else None


def _check_shapes(attributes: dict[str, Any], arrays: Arrays) -> None:
    """Raise CheckpointError unless the attributes have an entry for each array, with its shape."""
    for name, array in arrays.items():
        entry = attributes.get(name)
        if not isinstance(entry, dict) or entry.get("shape") != list(array.shape):
            raise CheckpointError(
                f"{ATTRIBUTES_FILE} says {entry!r} of {name!r}, which has shape {array.shape}"
            )


def _random_states(attributes: dict[str, Any]) -> list[tuple[int, int]]:
    pairs = attributes.get(RANDOM_STATE, [])
    for pair in pairs if isinstance(pairs, list) else [pairs]:
        if (
            not isinstance(pair, list)
            or len(pair) != 2
            or not all(type(n) is int and 0 <= n < 2**64 for n in pair)
        ):
            raise CheckpointError(f"{RANDOM_STATE} must be pairs of ints in 0 .. 2**64 - 1, not {pair!r}")
    return [(seed, counter) for seed, counter in pairs]
