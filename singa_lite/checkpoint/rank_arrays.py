# SPDX-License-Identifier: Apache-2.0
"""The file of a rank in a generation: its arrays, and their hashes.

What does not live here: names of files and the manifest (generation.py), what ranks save (contents.py).
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import CheckpointError
from ..files import atomic_file, check_regular
from ..generation import Generation, rank_file

Array = np.ndarray[Any, Any]
Arrays = dict[str, Array]


class DamagedError(CheckpointError):
    """A file of a generation is missing, or has other bytes than were written; it is not that reading it failed."""


def digest(array: Array) -> str:
    """Return the XXH3 hash of an array's dtype, shape and bytes, 128 bits as hexadecimal digits.

    It detects damaged bytes and arrays that differ among ranks, ten times as fast as SHA-256, but not forgery.
    """
    import xxhash

    whole = xxhash.xxh3_128(f"{array.dtype.str}{array.shape}".encode())
    whole.update(np.ascontiguousarray(array).reshape(-1).data)
    return whole.hexdigest()


def write_arrays(path: Path, arrays: Arrays) -> None:
    """Write a safetensors file atomically.

    Raises:
        CheckpointError: the system cannot.
    """
    import safetensors.numpy

    content = safetensors.numpy.save({name: np.asarray(array, order="C") for name, array in arrays.items()})
    with atomic_file(path) as file:
        file.write(content)


def read_shared(generation: Generation) -> Arrays:
    """Return the arrays that were equal on all ranks; raises as ``read_rank``."""
    arrays: Arrays = {}
    for rank, hashes in enumerate(generation.manifest.shared):
        arrays |= _read_arrays(generation, rank, hashes)
    return arrays


def read_rank(generation: Generation, rank: int) -> Arrays:
    """Return the arrays that a rank had alone.

    Raises:
        DamagedError: the file is missing, or an array is not what the manifest says.
        CheckpointError: the system cannot read it, or there is no memory for it.
    """
    return _read_arrays(generation, rank, generation.manifest.own[rank])


def _read_arrays(generation: Generation, rank: int, hashes: Mapping[str, str]) -> Arrays:
    import safetensors
    import safetensors.numpy

    path = generation.path / rank_file(rank)
    try:
        arrays: Arrays = safetensors.numpy.load(_part_of(path, hashes))
    except (
        *(FileNotFoundError, NotADirectoryError, IsADirectoryError),
        *(CheckpointError, ValueError, KeyError, TypeError, AttributeError, struct.error, RecursionError),
        safetensors.SafetensorError,
    ) as error:
        # AttributeError: a dtype that numpy has not
        raise DamagedError(f"cannot read {path}: {type(error).__name__}: {error}") from error
    except (OSError, MemoryError) as error:
        raise CheckpointError(f"cannot read {path}: {type(error).__name__}: {error}") from error
    if {name: digest(array) for name, array in arrays.items()} != hashes:
        raise DamagedError(f"cannot read {path}: it is damaged: its arrays are not what the manifest says")
    return arrays


def _part_of(path: Path, names: Collection[str]) -> bytes:
    """Return the content of a safetensors file with some of the arrays of the one at ``path``.

    They are read, not mapped: a file that gets shorter meanwhile would end the process by SIGBUS.
    """
    check_regular(path)
    with open(path, "rb") as file:
        (num_bytes,) = struct.unpack("<Q", file.read(8))
        data_bytes = os.fstat(file.fileno()).st_size - 8 - num_bytes
        if data_bytes < 0:
            raise ValueError(f"a header of {num_bytes} bytes does not fit into the file")
        entries = json.loads(file.read(num_bytes))
        header, parts, end = {}, [], 0
        for name in names:
            first, last = entries[name]["data_offsets"]
            if not 0 <= first <= last <= data_bytes:
                raise ValueError(
                    f"{name} at bytes {first} to {last} is not in the {data_bytes} bytes of data"
                )
            file.seek(8 + num_bytes + first)
            parts.append(file.read(last - first))
            header[name] = {**entries[name], "data_offsets": [end, end + last - first]}
            end += last - first
    text = json.dumps(header).encode()
    return b"".join([struct.pack("<Q", len(text)), text, *parts])
