# SPDX-License-Identifier: Apache-2.0
"""Comparing what must be equal on all ranks: parameters, optimizers, states.

A function that takes a communicator is a collective: all ranks must call it. Where it does not return whether there is
a difference, one is a CommError on all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ..comm.base import Communicator
from ..errors import CommError
from ..tensor import Tensor, to_numpy

Json = Any


def compare(communicator: Communicator, what: str, mine: Mapping[str, Json], cure: str) -> None:
    """Raise a CommError that names the first entry in which a rank differs from rank 0.

    Args:
        what: the entries as a whole, for the error, as is ``cure``.
        mine: this rank's entries, JSON values by name.
    """
    first, *others = communicator.all_gather_object(mine, name=what)
    for rank, theirs in enumerate(others, 1):
        if theirs != first:
            name = first_difference(first, theirs)
            raise CommError(
                f"DistOpt, rank {communicator.rank}: the ranks differ in {what}: {name} is {_text(first, name)} on "
                f"rank 0 but {_text(theirs, name)} on rank {rank}; {cure}"
            )


def first_difference(one: Mapping[str, Json], other: Mapping[str, Json]) -> str:
    """Return the name of the first entry that only one of the two has, or that differs; they are not equal."""
    names = (name for name in [*one, *other] if (name in one) != (name in other) or one[name] != other[name])
    return next(names)


def _text(entries: Mapping[str, Json], name: str) -> str:
    return str(entries[name]) if name in entries else "not there"


def by_name(tensors: Mapping[str, Tensor]) -> list[Tensor]:
    """Return the Tensors in the order of their names, as a model may be made in another order on another rank."""
    return [tensors[name] for name in sorted(tensors, key=str)]


def text_of_names(tensors: Mapping[str, Tensor]) -> str:
    """Return what a collective of ``by_name(tensors)`` is called, so that ranks with other names are an error."""
    return f"of {len(tensors)} names, hash {_digest(repr(sorted(map(str, tensors))).encode())}"


def compare_models(
    communicator: Communicator, states: Mapping[str, Tensor], optimizer: Mapping[str, Json]
) -> None:
    """Compare names, dtypes and shapes of parameters and buffers, and ``optimizer``, which ``settings`` gave."""
    manifest = {name: f"{tensor.dtype}{list(tensor.shape)}" for name, tensor in states.items()}
    compare(communicator, "their parameters and buffers", manifest, "models must be equal on all ranks")
    compare(communicator, "their optimizers", optimizer, "make the same optimizer on every rank")


def compare_progress(
    communicator: Communicator,
    what: str,
    steps: int,
    optimizer: Mapping[str, Json],
    values: Mapping[str, np.ndarray] | None,
) -> None:
    """Compare the number of steps made, ``optimizer`` and, unless None, the bits of ``values``, as 8 bytes in all.

    Where these differ, the error names the first array that does; ``what`` is its name for the others.
    """
    cure = (
        "change parameters, states and numbers of the optimizer on all ranks alike, and load the same checkpoint on "
        "all, each its own file of one step"
    )
    compare(communicator, what, {"the number of steps made": steps, **optimizer}, cure)
    if values is None:
        return
    states = "their parameters and optimizer states"
    mine = {name: _digest(values[name].tobytes()) for name in sorted(values)}
    joined = bytes.fromhex(_digest("".join(mine.values()).encode()))
    everyone = communicator.all_gather(np.frombuffer(joined, np.int64).copy(), name=states).wait()
    assert everyone is not None
    if len(set(everyone.ravel().tolist())) > 1:
        compare(communicator, states, mine, cure)


def are_equal(communicator: Communicator, what: str, tensors: Mapping[str, Tensor]) -> bool:
    """Return whether the bits of ``tensors``, by name, are equal on all ranks."""
    return are_alike(communicator, what, [digest_of(tensors[name]) for name in sorted(tensors)])


def are_alike(communicator: Communicator, what: str, digests: Iterable[str]) -> bool:
    """Return whether ``digests``, in their order, are equal on all ranks."""
    return len(set(communicator.all_gather_object("".join(digests), name=what))) == 1


def digest_of(tensor: Tensor) -> str:
    """Return a hash of 8 bytes of the bits of ``tensor``."""
    return _digest(to_numpy(tensor).tobytes())


def _digest(content: bytes) -> str:
    import hashlib  # Note [imports]

    return hashlib.blake2b(content, digest_size=8).hexdigest()
