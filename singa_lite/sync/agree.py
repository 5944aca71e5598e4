# SPDX-License-Identifier: Apache-2.0
"""Comparing what must be equal on all ranks: parameters, optimizers, states.

Every function here is a collective: all ranks must call it. A difference is a CommError on all of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ..comm.base import Communicator
from ..errors import CommError
from ..graph.recorder import persist
from ..tensor import Tensor

Json = Any


def compare(communicator: Communicator, what: str, mine: Mapping[str, Json], cure: str) -> None:
    """Raise a CommError that names the first entry in which a rank differs from rank 0.

    Args:
        what: what is compared, for the error.
        mine: this rank's entries, JSON values by name.
        cure: what to do about a difference.
    """
    everyone = communicator.all_gather_object(mine, name=what)
    for rank, theirs in enumerate(everyone):
        if theirs == everyone[0]:
            continue
        first = everyone[0]
        name = next(name for name in [*first, *theirs] if first.get(name) != theirs.get(name))
        raise CommError(
            f"DistOpt, rank {communicator.rank}: the ranks differ in {what}: {name} is {_text(first, name)} on rank 0 "
            f"but {_text(theirs, name)} on rank {rank}; {cure}"
        )


def _text(entries: Mapping[str, Json], name: str) -> str:
    return str(entries[name]) if name in entries else "not there"


def manifest(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return dtype and shape of each tensor, by name."""
    return {name: f"{tensor.dtype}{list(tensor.shape)}" for name, tensor in tensors.items()}


def digests(arrays: Iterable[tuple[str, np.ndarray]]) -> dict[str, str]:
    """Return a hash of 8 bytes of each array, by name."""
    return {name: hashlib.blake2b(a.tobytes(), digest_size=8).hexdigest() for name, a in arrays}


def compare_values(
    communicator: Communicator, what: str, arrays: Sequence[tuple[str, np.ndarray]], cure: str
) -> None:
    """Raise a CommError that names the first array whose bits differ; 8 bytes are sent where none does."""
    mine = digests(arrays)
    joined = hashlib.blake2b("".join(mine.values()).encode(), digest_size=8).digest()
    own = np.frombuffer(joined, np.int64).copy()
    everyone = communicator.all_gather(own, name=what).wait()
    assert everyone is not None
    if len(set(everyone.ravel().tolist())) > 1:
        compare(communicator, what, mine, cure)


def are_equal(communicator: Communicator, what: str, tensors: Iterable[Tensor]) -> bool:
    """Return whether the bits of ``tensors`` are equal on all ranks."""
    joined = "".join(digests((str(n), host_copy(tensor)) for n, tensor in enumerate(tensors)).values())
    return len(set(communicator.all_gather_object(joined, name=what))) == 1


def host_copy(tensor: Tensor) -> np.ndarray:
    """Return a numpy copy of a tensor's values."""
    array: np.ndarray = tensor.device.backend.to_numpy(tensor.array)
    return array


def arrays_of(tensors: Iterable[Tensor]) -> list[Any]:
    """Return the raw arrays of tensors that stay, for a collective that comes after what was computed there."""
    known = list(tensors)
    for backend in {tensor.device.backend for tensor in known}:
        backend.activate()
    for tensor in known:
        persist(tensor.array)
    return [tensor.array for tensor in known]
