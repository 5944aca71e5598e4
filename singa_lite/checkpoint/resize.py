# SPDX-License-Identifier: Apache-2.0
"""What each rank goes on from when the number of ranks is another than in the checkpoint.

Note [another number of ranks]: what was equal on all ranks stays as it is, but for residuals, velocities and unfinished
sums of gradients. Of the rest, parameters, optimizer states and batch-norm statistics are averaged. Residuals and
unfinished sums of gradients are what has not been applied yet, so their sum over the ranks is kept: it is shared out by
element, and what rounding leaves of an element goes to the next ranks, so that the sum of what ranks get is the float64
sum to its last bit from three ranks on, to 48 bits on two, and rounded on one. States of hosts' leaders go to rank 0,
which is a leader on any hosts: of residuals the whole sum, of the rest the first leader's; other leaders start without.
For random streams see streams.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import CheckpointError
from ..generation import Arrays
from .streams import PREFIX as STREAMS
from .streams import resized_streams

Array = np.ndarray[Any, Any]
OPTIMIZER = "optimizer/"
EXTRA = "extra/"
SUMS = (f"{OPTIMIZER}sync/", f"{OPTIMIZER}accumulate/sum/")
LEVELS = f"{OPTIMIZER}accumulate/level/"
LEADERS = f"{OPTIMIZER}sync/hierarchical/"
OF_A_RANK = (":residual", ":error", ":velocity")  # how names of what a rank has not applied end, in SUMS
TRAINER = f"{OPTIMIZER}sync/kvstore/"  # all of it is what compression has lost
MAX_PIECES = 3  # float16 or float32 numbers that hold a float64


def resized(
    shared: Arrays,
    by_rank: Sequence[Mapping[str, Array]],
    now: Sequence[Mapping[str, Any]],
    step: int,
    rank: int,
) -> Arrays:
    """Return the arrays that ``rank`` goes on from, see Note [another number of ranks].

    Args:
        shared: the arrays that were equal on all ranks.
        by_rank: those that were not, of each rank that saved.
        now: of each rank that goes on, its streams as they are, see ``resized_streams``.
        step: of the checkpoint.

    Raises:
        CheckpointError: numbers that cannot be averaged differ among the ranks.
    """
    everything, size = [{**shared, **own} for own in by_rank], len(now)
    sums = {name: array for name, array in shared.items() if _is_sum(name)}
    arrays = {name: array for name, array in shared.items() if name not in sums}
    by_rank = [{**own, **sums} for own in by_rank]
    for name in dict.fromkeys(name for own in by_rank for name in own):
        values = [own[name] for own in by_rank if name in own]
        if name.startswith(STREAMS):
            continue
        if name.startswith(EXTRA):
            arrays.update({name: by_rank[0][name]} if name in by_rank[0] else {})
            continue
        if len({(value.shape, value.dtype) for value in values}) > 1:
            raise CheckpointError(f"{name!r} has another shape or dtype on another rank")
        if name.startswith(LEVELS):
            raise CheckpointError(
                f"it was saved within a global batch of order='fixed', which only {len(by_rank)} ranks can go on from"
            )
        if name.startswith(LEADERS):
            if rank == 0:
                arrays[name] = share_of_sum(values, 0, 1) if name.endswith(OF_A_RANK) else values[0]
        elif name.startswith(SUMS) and values[0].dtype.kind == "f" and values[0].ndim:
            arrays[name] = share_of_sum(values, rank, size)
        elif name.startswith(OPTIMIZER) and not name.startswith(SUMS) and len(values) == 1:
            arrays[name] = values[0]  # worker 0 has what servers keep
        elif values[0].dtype.kind == "f" and "/counter/" not in name:
            arrays[name] = np.mean(np.stack(values).astype(np.float64), axis=0).astype(values[0].dtype)
        else:
            raise CheckpointError(
                f"{name!r} differs from rank to rank, so only {len(by_rank)} ranks can go on from this step"
            )
    return arrays | resized_streams(everything, now, step, rank)


def _is_sum(name: str) -> bool:
    """Return whether a state that is equal on all ranks is still each rank's own."""
    return name.startswith((TRAINER, LEADERS, f"{OPTIMIZER}accumulate/sum/")) or (
        name.startswith(SUMS) and name.endswith(OF_A_RANK)
    )


def share_of_sum(values: Sequence[Array], rank: int, size: int) -> Array:
    """Return what ``rank`` of ``size`` gets of the sum of ``values``, in their dtype.

    Raises:
        CheckpointError: the sum of finite values is too large for their dtype.
    """
    dtype, shape = values[0].dtype, values[0].shape
    rest = np.sum(np.stack(values).astype(np.float64), axis=0).ravel()
    # which piece of each element is this rank's
    turn = (rank - np.arange(rest.size)) % size
    share = np.zeros(rest.size, dtype)
    for number in range(min(size, MAX_PIECES)):
        with np.errstate(over="ignore", invalid="ignore"):
            piece = rest.astype(dtype)
            if np.any(np.isinf(piece) & np.isfinite(rest)):
                raise CheckpointError(f"the sum of residuals over the ranks is too large for {dtype}")
            rest = np.where(np.isfinite(piece), rest - piece, 0.0)
        share = np.where(turn == number, piece, share)
    return share.reshape(shape)
