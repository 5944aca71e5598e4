# SPDX-License-Identifier: Apache-2.0
"""What each rank goes on from when the number of ranks is another than in the checkpoint.

Note [another number of ranks]: what was equal on all ranks stays as it is. Of the rest, parameters, optimizer states
and batch-norm statistics are averaged; so are residuals, velocities and unfinished sums of gradients, which are applied
as means over the ranks: averages have the same weight on any number of them. What the compression of a Trainer that
adds up gradients has lost keeps its sum. States of hosts' leaders go to the leaders of the hosts that go on: of
residuals the average, of the rest the first leader's. For random streams see streams.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import CheckpointError
from .rank_arrays import Array, Arrays
from .streams import PREFIX as STREAMS
from .streams import resized_streams

OPTIMIZER = "optimizer/"
EXTRA = "extra/"
UNAPPLIED = (f"{OPTIMIZER}sync/", f"{OPTIMIZER}accumulate/sum/")  # zeros on a rank that has none
LEVELS = f"{OPTIMIZER}accumulate/level/"
LEADERS = f"{OPTIMIZER}sync/hierarchical/"
OF_A_RANK = (":residual", ":error", ":velocity")  # how names of what a leader has not applied end
LOST = f"{OPTIMIZER}sync/kvstore/"  # by the compression of a Trainer


def resized(
    shared: Arrays,
    by_rank: Sequence[Arrays],
    now: Sequence[Mapping[str, Any]],
    step: int,
    rank: int,
    *,
    is_leader: bool,
    adds_up: bool = False,
) -> Arrays:
    """Return the arrays that ``rank`` goes on from, see Note [another number of ranks].

    Args:
        shared: the arrays that were equal on all ranks.
        by_rank: those that were not, of each rank that saved.
        now: of each rank that goes on, its streams as they are, see ``resized_streams``.
        step: of the checkpoint.
        is_leader: whether ``rank`` is the first one of its host.
        adds_up: whether gradients are added up over the ranks, not averaged.

    Raises:
        CheckpointError: numbers that cannot be averaged differ among the ranks.
    """
    everything, arrays = [{**shared, **own} for own in by_rank], dict[str, Array]()
    for name in dict.fromkeys(name for own in everything for name in own):
        values = [own[name] for own in everything if name in own]
        if name.startswith(STREAMS):
            continue
        if name.startswith(EXTRA):
            arrays.update({name: everything[0][name]} if name in everything[0] else {})
            continue
        if len({(value.shape, value.dtype) for value in values}) > 1:
            raise CheckpointError(f"{name!r} has another shape or dtype on another rank")
        if name.startswith(LEVELS):
            raise CheckpointError(
                f"it was saved within a global batch of order='fixed', which only {len(by_rank)} ranks can go on from"
            )
        if name.startswith(LEADERS):
            if is_leader:
                arrays[name] = _mean(values, len(values)) if name.endswith(OF_A_RANK) else values[0]
        elif name.startswith(LOST) and adds_up:
            arrays[name] = _mean(values, len(now))
        elif name in shared or (
            name.startswith(OPTIMIZER) and not name.startswith(UNAPPLIED) and len(values) == 1
        ):
            arrays[name] = values[0]  # alone: worker 0 has what servers keep
        elif values[0].dtype.kind == "f" and "/counter/" not in name:
            arrays[name] = _mean(values, len(by_rank) if name.startswith(UNAPPLIED) else len(values))
        else:
            raise CheckpointError(
                f"{name!r} differs from rank to rank, so only {len(by_rank)} ranks can go on from this step"
            )
    return arrays | resized_streams(everything, now, step, rank)


def _mean(values: Sequence[Array], count: int) -> Array:
    """Return the sum of ``values`` by ``count``, in their dtype; float64 inside."""
    mean: Array = np.sum(np.stack(values).astype(np.float64), axis=0) / count
    return np.asarray(mean, values[0].dtype)
