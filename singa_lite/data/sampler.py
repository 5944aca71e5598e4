# SPDX-License-Identifier: Apache-2.0
"""Which rank sees which sample in which step.

Note [global batches first]: an epoch is one seeded permutation, split into global batches of
``world_size * batch_size`` samples; each is then split among the ranks. So every sample is used exactly
once, every rank makes the same number of steps, and in every step the ranks' batches differ by at most one
sample. The last global batch is smaller. Would it have fewer samples than there are ranks, then the one
before it takes them too, one more for some of the ranks, so that no rank ever gets an empty batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ..errors import CheckpointError, DataError, OptionError

Array = np.ndarray[Any, Any]


def partition(num_samples: int, rank: int, world_size: int) -> slice:
    """Return rank ``rank``'s share of ``num_samples``, for evaluation: consecutive, exact, nothing dropped.

    The shares of all ranks cover every sample once, and their sizes differ by at most one (the lower ranks
    have the larger ones; a share is empty when there are fewer samples than ranks).

    Args:
        num_samples: >= 0.
        rank: 0 <= rank < world_size.
        world_size: number of ranks.

    Example:
        >>> [partition(10, rank, 3) for rank in range(3)]
        [slice(0, 4, None), slice(4, 7, None), slice(7, 10, None)]
    """
    if num_samples < 0 or not 0 <= rank < world_size:
        raise OptionError(f"partition: {num_samples} samples for rank {rank} of {world_size} ranks")
    each, extra = divmod(num_samples, world_size)
    start = rank * each + min(rank, extra)
    return slice(start, start + each + (rank < extra))


class ShardedSampler:
    """Iterates over this rank's index arrays of one epoch, see Note [global batches first].

    An iteration continues from ``(epoch, position)`` and leaves the sampler at the next epoch's start, so
    ``state_dict()`` taken anywhere in the loop resumes at the very next batch, in the same order.

    Args:
        num_samples: size of the data set, >= world_size.
        batch_size: samples per rank and step, >= 1 (batch_size + 1, see Note [global batches first]).
        rank: 0 <= rank < world_size.
        world_size: number of ranks.
        shuffle: a new permutation each epoch; False keeps the order of the data.
        seed: >= 0, equal on all ranks.

    Raises:
        DataError: fewer samples than ranks.
        OptionError: another argument is out of range.

    Example:
        >>> sampler = ShardedSampler(7, 2, 0, 2, shuffle=False)
        >>> [batch.tolist() for batch in sampler]
        [[0, 1], [4, 5]]
    """

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        rank: int,
        world_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        if batch_size < 1 or seed < 0 or not 0 <= rank < world_size:
            raise OptionError(
                f"ShardedSampler: batch_size = {batch_size} must be >= 1, seed = {seed} >= 0 "
                f"and rank = {rank} one of {world_size} ranks"
            )
        if num_samples < world_size:
            raise DataError(
                f"ShardedSampler: {num_samples} samples cannot feed {world_size} ranks; use fewer ranks"
            )
        self.num_samples = num_samples
        self.batch_size = batch_size
        self.rank = rank
        self.world_size = world_size
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.position = 0

    def __len__(self) -> int:
        """Steps of one epoch, equal on every rank."""
        full, rest = divmod(self.num_samples, self.world_size * self.batch_size)
        return full + (rest >= self.world_size)

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of ``epoch`` (>= 0); within that epoch already, stay at the position."""
        if epoch < 0:
            raise OptionError(f"ShardedSampler: epoch = {epoch} must be >= 0")
        if epoch != self.epoch:
            self.epoch, self.position = epoch, 0

    def __iter__(self) -> Iterator[Array]:
        """Yield this rank's indices, int64, shape (n,), for every step left in the epoch."""
        epoch, order, steps = self.epoch, self._order(), len(self)
        for step in range(self.position, steps):
            # counted before the batch is returned: a checkpoint made in the loop means "this one is done"
            self.epoch, self.position = (epoch, step + 1) if step + 1 < steps else (epoch + 1, 0)
            yield order[self._share(step, steps)]

    def _order(self) -> Array:
        if not self.shuffle:
            return np.arange(self.num_samples)
        return np.random.default_rng([self.seed, self.epoch]).permutation(self.num_samples)

    def _share(self, step: int, steps: int) -> slice:
        start = step * self.world_size * self.batch_size
        stop = self.num_samples if step == steps - 1 else start + self.world_size * self.batch_size
        share = partition(stop - start, self.rank, self.world_size)
        return slice(start + share.start, start + share.stop)

    def state_dict(self) -> dict[str, int]:
        """Return what a checkpoint keeps; equal on every rank."""
        return {"epoch": self.epoch, "position": self.position, **self._plan()}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go where ``state_dict()`` was taken.

        Raises:
            CheckpointError: it was taken with another plan (data size, batch, ranks, shuffle or seed).
        """
        plan = {name: state.get(name) for name in self._plan()}
        if plan != self._plan():
            raise CheckpointError(
                f"ShardedSampler: the checkpoint's plan is {plan}, this one's is {self._plan()}"
            )
        self.epoch, self.position = int(state["epoch"]), int(state["position"])

    def _plan(self) -> dict[str, int]:
        names = ("num_samples", "batch_size", "world_size", "shuffle", "seed")
        return {name: int(getattr(self, name)) for name in names}
