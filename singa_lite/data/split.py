# SPDX-License-Identifier: Apache-2.0
"""MXNet's way to divide a data set: every worker keeps one part of it and shuffles that; batches of any sampler.

``ShardedSampler`` (sampler.py) is the better choice where all workers can read all samples: it plans batches of the
data set again every epoch, and in every step the workers' batches differ by at most one sample.

Note [equal batches]: all parts make ceil(smallest part / batch_size) batches, so no worker waits at the end of an epoch
for one that has none left. The last batch takes what is left: of a larger part batch_size + 1 samples at most.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from itertools import islice
from typing import Any, Protocol

import numpy as np

from ..errors import CheckpointError, DataError, DTypeError, OptionError, check_bool, check_int
from .resumable import Cursor, ResumableSampler
from .sampler import partition

Array = np.ndarray[Any, Any]


class Sampler(Protocol):
    """The interface of samplers for ``batches``: their indices, and how many there are in an epoch."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[int]: ...


class SplitSampler(ResumableSampler):
    """Iterates over the indices of one part of the data set, one int at a time, in a new order each epoch.

    The parts are consecutive, differ by at most one sample (the lower ones are larger), and together have every sample
    once; MXNet's loses the rest of the division. An iteration continues from ``(epoch, position)`` and leaves the
    sampler at the next epoch's start, as that of ``ShardedSampler`` does.

    Args:
        length: size of the data set, >= num_parts.
        num_parts: number of workers, >= 1.
        part_index: 0 <= part_index < num_parts, such as the worker's rank.
        shuffle: a new order of the part each epoch, the same in every run; False keeps the order of the data.
        seed: >= 0.

    Raises:
        DataError: fewer samples than parts.
        OptionError: another argument is out of range.

    Example:
        >>> [list(SplitSampler(7, 3, part, shuffle=False)) for part in range(3)]
        [[0, 1, 2], [3, 4], [5, 6]]
    """

    def __init__(
        self, length: int, num_parts: int = 1, part_index: int = 0, *, shuffle: bool = True, seed: int = 0
    ) -> None:
        super().__init__()
        self.length = check_int("SplitSampler", "length", length, 0)
        self.num_parts = check_int("SplitSampler", "num_parts", num_parts, 1)
        self.part_index = check_int("SplitSampler", "part_index", part_index, 0)
        self.seed = check_int("SplitSampler", "seed", seed, 0)
        if self.part_index >= self.num_parts:
            raise OptionError(f"SplitSampler: part_index = {part_index} must be < num_parts = {num_parts}")
        if self.length < self.num_parts:
            raise DataError(
                f"SplitSampler: {length} samples cannot be split into {num_parts} parts; use fewer workers"
            )
        self.shuffle = check_bool("SplitSampler", "shuffle", shuffle)
        self._part = partition(self.length, self.part_index, self.num_parts)

    @property
    def smallest_part(self) -> int:
        """Samples of the smallest part, equal on every worker."""
        return self.length // self.num_parts

    def __len__(self) -> int:
        """Samples of this part."""
        return self._part.stop - self._part.start

    def __iter__(self) -> Iterator[int]:
        """Yield the index of every sample of this part that is left in the epoch."""
        self.begin_loop()
        order = self._order()
        for number in self._numbers(len(self)):
            yield order[number]

    def _order(self) -> list[int]:
        indices = np.arange(self._part.start, self._part.stop)
        if self.shuffle:
            indices = np.random.default_rng([self.seed, self.epoch, self.part_index]).permutation(indices)
        return indices.tolist()  # type: ignore[no-any-return]

    def live_state(self) -> dict[str, int]:
        """Return the state of the loop that runs; equal on every worker after as many ``batches``."""
        return {"epoch": self.epoch, "position": self.position, **self._plan()}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go where ``state_dict()`` was taken, on this worker or another.

        Raises:
            CheckpointError: it was taken with another plan (data size, number of parts, shuffle or seed), or no part
                has such a position.
        """
        plan = self._plan_in(state)
        if None in (state.get("epoch"), state.get("position")) or plan != self._plan():
            raise self._plan_error(plan)
        epoch, position = state["epoch"], state["position"]
        if position >= partition(self.length, 0, self.num_parts).stop:  # of the largest part
            raise CheckpointError(
                f"SplitSampler: position = {position} is beyond every part of {self.length} samples in {self.num_parts}"
            )
        # the last sample of a larger part comes when this one has begun its next epoch
        self._move(Cursor(epoch, 0, position) if position < len(self) else Cursor(epoch + 1))

    def _plan(self) -> dict[str, int]:
        return {name: int(getattr(self, name)) for name in ("length", "num_parts", "shuffle", "seed")}


class Batches:
    """Iterates over the index arrays of an epoch of a sampler, of the next one each time; ``batches`` makes it."""

    def __init__(self, sampler: Sampler, batch_size: int) -> None:
        self.sampler = sampler
        self.batch_size = batch_size

    def __len__(self) -> int:
        """Batches of a whole epoch, equal on every worker, see Note [equal batches]."""
        return self._steps_after(0)

    def __iter__(self) -> Iterator[Array]:
        """Yield the indices of each batch that is left in the sampler's epoch, int64, shape (n,)."""
        position = 0
        if isinstance(self.sampler, SplitSampler):
            self.sampler.begin_loop()
            position = self.sampler.position
        left = len(self.sampler) - position
        indices = iter(self.sampler)
        for _ in range(1, self._steps_after(position)):
            yield _take(indices, self.batch_size)
            left -= self.batch_size
        if left > 0:
            yield _take(indices, left)

    def _steps_after(self, position: int) -> int:
        sampler = self.sampler
        smallest = sampler.smallest_part if isinstance(sampler, SplitSampler) else len(sampler)
        return -(-(smallest - position) // self.batch_size)


def batches(sampler: Sampler, batch_size: int) -> Batches:
    """Return an iterable of one epoch's batches of ``sampler``: index arrays, such as ``make_batch`` takes.

    Each loop over it is the next epoch, or what is left of one in whose middle the sampler was put.

    Args:
        sampler: a ``SplitSampler``, all of whose parts make the same number of batches (Note [equal batches]); or
            anything with a length that yields one index at a time, such as ``range(100)``, whose last batch is smaller.
        batch_size: samples a batch, >= 1.

    Raises:
        OptionError: ``batch_size`` is not an int >= 1, or ``sampler`` has no length or cannot be iterated over.
        DTypeError, DataError: while iterating, if the sampler yields something else than ints, or ends too early.

    Example:
        >>> [batch.tolist() for batch in batches(SplitSampler(5, 2, 0, shuffle=False), 2)]
        [[0, 1, 2]]
    """
    batch_size = check_int("batches", "batch_size", batch_size, 1)
    is_number = isinstance(sampler, np.ndarray) and not sampler.ndim
    if is_number or not (hasattr(sampler, "__len__") and hasattr(sampler, "__iter__")):
        raise OptionError(
            f"batches: expected a sampler, with a length and indices to iterate over, got {sampler!r}"
        )
    return Batches(sampler, batch_size)


def _take(indices: Iterator[int], count: int) -> Array:
    """Return the next ``count`` indices, int64, shape (count,)."""
    try:
        taken = [operator.index(index) for index in islice(indices, count)]
        found = np.array(taken, np.int64)
    except OverflowError as error:
        raise DataError(f"batches: the sampler yielded an index that no dataset has: {error}") from None
    except TypeError as error:
        raise DTypeError(
            f"batches: the sampler must yield ints ({error}); a ShardedSampler's are batches already"
        ) from None
    if len(taken) < count:
        raise DataError(
            f"batches: the sampler ended after {len(taken)} of a batch's {count} indices; its length says more"
        )
    return found
