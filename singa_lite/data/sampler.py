# SPDX-License-Identifier: Apache-2.0
"""Which rank sees which sample in which step. What lives elsewhere: the position of a loop, resumable.py.

Note [global batches first]: an epoch is one seeded permutation, split into global batches of
``world_size * batch_size`` samples; each is then split among the ranks. So every sample is used exactly
once, every rank makes the same number of steps, and in every step the ranks' batches differ by at most one
sample. The last global batch is smaller. Would it have fewer samples than there are ranks, then the one
before it takes them too, one more for some of the ranks, so that no rank ever gets an empty batch.

Note [another number of ranks]: global batches before a position are the first samples of the permutation, whatever the
number of ranks. So with another one an epoch goes on behind the samples that were used: ``start`` of them, and
``position`` counts the steps since.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ..errors import CheckpointError, DataError, OptionError, check_bool, check_int
from .resumable import Cursor, ResumableSampler

Array = np.ndarray[Any, Any]


def partition(num_samples: int, rank: int, world_size: int) -> slice:
    """Return rank ``rank``'s share of ``num_samples``, for evaluation: consecutive, exact, nothing dropped.

    The shares of all ranks cover every sample once, and their sizes differ by at most one (the lower ranks
    have the larger ones; a share is empty when there are fewer samples than ranks).

    Args:
        num_samples: >= 0.
        rank: 0 <= rank < world_size.
        world_size: number of ranks.

    Raises:
        OptionError: an argument is out of range.

    Example:
        >>> [partition(10, rank, 3) for rank in range(3)]
        [slice(0, 4, None), slice(4, 7, None), slice(7, 10, None)]
    """
    num_samples = check_int("partition", "num_samples", num_samples, 0)
    rank = check_int("partition", "rank", rank, 0)
    world_size = check_int("partition", "world_size", world_size, 1)
    if rank >= world_size:
        raise OptionError(f"partition: {num_samples} samples for rank {rank} of {world_size} ranks")
    each, extra = divmod(num_samples, world_size)
    start = rank * each + min(rank, extra)
    return slice(start, start + each + (rank < extra))


class ShardedSampler(ResumableSampler):
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
        microbatches: for DistOpt(microbatches=, order="fixed"): that many batches make a global batch, whatever the
            number of ranks, which must divide it; a rank gets its neighbouring ones one after the other, each of
            ``batch_size``. None: a batch of each rank.

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
        microbatches: int | None = None,
    ) -> None:
        super().__init__()
        where = "ShardedSampler"
        self.num_samples = check_int(where, "num_samples", num_samples, 0)
        self.batch_size = check_int(where, "batch_size", batch_size, 1)
        self.seed = check_int(where, "seed", seed, 0)
        self.rank = check_int(where, "rank", rank, 0)
        self.world_size = world_size = check_int(where, "world_size", world_size, 1)
        if self.rank >= world_size:
            raise OptionError(f"{where}: rank = {rank} must be one of {world_size} ranks")
        if microbatches is not None:
            microbatches = check_int(where, "microbatches", microbatches, 1)
            if microbatches % world_size:
                raise OptionError(
                    f"{where}: microbatches = {microbatches} must be divisible by the {world_size} ranks"
                )
        self.microbatches = microbatches
        self.num_batches = microbatches or world_size  # of a global batch
        self._each = self.num_batches // world_size  # of them, this rank's
        if self.num_samples < self.num_batches:
            what = "ranks; use fewer ranks" if microbatches is None else "microbatches; use fewer"
            raise DataError(f"ShardedSampler: {num_samples} samples cannot feed {self.num_batches} {what}")
        self.shuffle = check_bool(where, "shuffle", shuffle)

    def __len__(self) -> int:
        """Batches of one epoch, from ``start`` on; equal on every rank."""
        full, rest = divmod(self.num_samples - self.start, self.num_batches * self.batch_size)
        return (full + (rest >= self.num_batches)) * self._each

    def __iter__(self) -> Iterator[Array]:
        """Yield this rank's indices, int64, shape (n,), for every step left in the epoch."""
        self.begin_loop()
        start, order, count = self.start, self._order(), len(self)
        for number in self._numbers(count):
            yield order[self._share(start, number, count)]

    def _order(self) -> Array:
        if not self.shuffle:
            return np.arange(self.num_samples)
        return np.random.default_rng([self.seed, self.epoch]).permutation(self.num_samples)

    def _share(self, start: int, number: int, count: int) -> slice:
        """Return where in the permutation batch ``number`` of ``count`` of this rank is."""
        step, part = divmod(number, self._each)
        start += step * self.num_batches * self.batch_size
        is_last = step + 1 == count // self._each
        stop = self.num_samples if is_last else start + self.num_batches * self.batch_size
        share = partition(stop - start, self.rank * self._each + part, self.num_batches)
        return slice(start + share.start, start + share.stop)

    def live_state(self) -> dict[str, int]:
        """Return the state of the loop that runs, whichever thread runs it; equal on every rank."""
        return {"epoch": self.epoch, "start": self.start, "position": self.position, **self._plan()}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go where ``state_dict()`` was taken, by as many ranks or others.

        With another number of ranks, and then another ``batch_size`` too if wanted, the epoch goes on behind the
        samples that were used: each is used once, see Note [another number of ranks].

        Raises:
            CheckpointError: it was taken with another plan (data size, shuffle, seed; with as many ranks, batch size),
                no sampler gives it, or more ranks than the epoch has samples left are to go on.
        """
        plan = self._plan_in(state)
        resized = plan["world_size"] != self.world_size
        may_differ = ("world_size",) if self.microbatches else ("world_size", "batch_size")
        mine = self._plan() | ({name: plan[name] for name in may_differ} if resized else {})
        where = [state.get("epoch"), state.get("start", 0), state.get("position")]
        if plan != mine or None in (*plan.values(), *where):
            raise self._plan_error(plan)
        size = state["world_size"]
        is_possible = 0 < size <= self.num_samples and state["batch_size"] > 0
        if not is_possible or (self.microbatches or 0) % size:
            raise CheckpointError(f"ShardedSampler: no sampler gives {state!r}")
        epoch, start, position = (int(value or 0) for value in where)
        if resized and self.microbatches:
            step, part = divmod(position * state["world_size"], self.microbatches)
            if part:
                raise CheckpointError(
                    f"ShardedSampler: the checkpoint was made within a global batch of {self.microbatches}, which only "
                    f"{state['world_size']} ranks can go on from; save after an update"
                )
            position = step * self._each
        elif resized:
            start, position = start + position * state["world_size"] * state["batch_size"], 0
        left = self.num_samples - start - position // self._each * self.num_batches * self.batch_size
        if left <= 0:
            raise CheckpointError(f"ShardedSampler: no sampler gives {state!r}")
        if left < self.num_batches:
            raise CheckpointError(
                f"ShardedSampler: {left} samples of epoch {epoch} are left, which cannot feed {self.num_batches} "
                "batches; go on with fewer ranks until the epoch ends, or call set_epoch for the next"
            )
        self._move(Cursor(epoch, start, position))

    def _plan(self) -> dict[str, int]:
        names = ("num_samples", "batch_size", "world_size", "shuffle", "seed")
        more = {"microbatches": self.microbatches} if self.microbatches else {}
        return {name: int(getattr(self, name)) for name in names} | more
