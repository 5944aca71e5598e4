# SPDX-License-Identifier: Apache-2.0
"""Which rank sees which sample in which step.

Note [global batches first]: an epoch is one seeded permutation, split into global batches of
``world_size * batch_size`` samples; each is then split among the ranks. So every sample is used exactly
once, every rank makes the same number of steps, and in every step the ranks' batches differ by at most one
sample. The last global batch is smaller. Would it have fewer samples than there are ranks, then the one
before it takes them too, one more for some of the ranks, so that no rank ever gets an empty batch.

Note [another number of ranks]: global batches before a position are the first samples of the permutation, whatever the
number of ranks. So with another one an epoch goes on behind the samples that were used: ``start`` of them, and
``position`` counts the steps since.

Note [cursors]: a loop advances the ``Cursor`` that the sampler had as it began. ``load_state_dict`` and ``set_epoch``
give the sampler another one, by which the loop notices that it is left behind. Where a thread runs the loop ahead of
the training (prefetch.py), the cursor is the thread's position, and the ``Consumer`` has that of the training.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..config import this_thread
from ..errors import CheckpointError, DataError, OptionError, check_bool, check_int

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


@dataclass
class Cursor:
    """The position of a loop, see Note [another number of ranks]."""

    epoch: int = 0
    start: int = 0
    position: int = 0


@dataclass(eq=False)
class Loop:
    """A loop over a sampler.

    Attributes:
        thread: that runs it.
        is_open: it is within the epoch, or was left there.
    """

    thread: int
    is_open: bool = True


@dataclass(eq=False)
class Consumer:
    """The loop that takes what a thread makes ahead of it.

    Attributes:
        state: of the sampler behind the item taken last.
        thread: that makes them, once it has begun.
        taker: the thread that has taken the last one.
    """

    state: dict[str, int]
    thread: int | None = None
    taker: int | None = None


class ResumableSampler:
    """Base of the samplers: a cursor that a loop advances, also if a thread runs it ahead of the training."""

    def __init__(self) -> None:
        self._cursor = Cursor()  # see Note [cursors]
        self._loop: Loop | None = None  # the latest
        self._consumer: Consumer | None = None

    @property
    def epoch(self) -> int:
        """Epoch of the next batch."""
        return self._watched("epoch")

    @property
    def start(self) -> int:
        """Samples of this epoch that another number of ranks has used."""
        return self._watched("start")

    @property
    def position(self) -> int:
        """How many batches (SplitSampler: indices) of this epoch were taken, behind ``start``."""
        self._break_graph()
        return self._cursor.position

    def _watched(self, name: str) -> int:
        """Return a field of the cursor that seldom changes: a step that reads it is recorded again when it has."""

        def read() -> int:
            value: int = getattr(self._cursor, name)
            return value

        if this_thread.recorder is not None:
            this_thread.recorder.guards.setdefault((self, name), (read, read()))
        return read()

    def _break_graph(self) -> None:
        """Break the graph of a recorded step that reads a value which changes with every batch."""
        if this_thread.recorder is not None:
            this_thread.recorder.break_graph(
                "it reads the position of a sampler, which a replay would not do"
            )

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of ``epoch`` (>= 0), outside a loop; within that epoch already, stay at the position."""
        epoch = check_int(type(self).__name__, "epoch", epoch, 0)
        if epoch != self.epoch:
            self._move(Cursor(epoch))

    def state_dict(self) -> dict[str, int]:
        """Return what a checkpoint keeps.

        Raises:
            CheckpointError: another thread runs the loop or has left it within the epoch, ahead of what was trained on,
                without ``follow``.
        """
        self._break_graph()
        consumer, loop = self._consumer, self._loop  # another thread may move the sampler meanwhile
        me = threading.get_ident()
        if consumer is not None and consumer.taker in (None, me):
            return consumer.state
        if consumer is not None or (loop is not None and loop.is_open and loop.thread != me):
            raise CheckpointError(
                f"{type(self).__name__}: another thread takes its batches ahead of the training, or has left its loop "
                "within the epoch, so the position of the training is unknown; call prefetch(batches, sampler=sampler) "
                "or ask in the thread that trains; of a prefetch in another one nobody knows it, so make items in one"
            )
        return self.live_state()

    def live_state(self) -> dict[str, int]:
        """Return the state of the loop that runs, whichever thread runs it."""
        raise NotImplementedError

    def own_state(self) -> dict[str, int]:
        """Return the state of the loop that this thread runs; CheckpointError if another one has run the last."""
        if self._loop is None or self._loop.thread != threading.get_ident():
            raise CheckpointError(
                f"{type(self).__name__}: prefetch(..., sampler=) got an item whose batch another thread has taken, or "
                "nobody, so its position is unknown; make items from the sampler itself, in one generator"
            )
        return self.live_state()

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go where ``state_dict()`` was taken."""
        raise NotImplementedError

    def start_following(self) -> Consumer:
        """Return a new consumer, whose state ``state_dict`` returns from now on; it begins with the state as it is now.

        A consumer that was followed before is no more: the sampler goes back to what that has taken last.
        """
        if self._consumer is not None:
            self.rewind(self._consumer)
        self._consumer = Consumer(self.live_state())
        return self._consumer

    def follow(self, consumer: Consumer, state: dict[str, int]) -> None:
        """Set the state of ``consumer`` to that behind the item which it has taken.

        Raises:
            CheckpointError: the sampler was moved since ``start_following``, or another loop over it has begun.
        """
        if self._consumer is not consumer:
            raise self._moved_error()
        consumer.state, consumer.taker = state, threading.get_ident()

    def rewind(self, consumer: Consumer) -> None:
        """Go to the state of ``consumer``, if it is followed: what was made ahead was not used."""
        if self._consumer is consumer:
            self.load_state_dict(consumer.state)

    def begin_loop(self) -> None:
        """Begin a loop of this thread; it goes on behind the consumer of another thread's loop, which ends."""
        consumer, thread = self._consumer, threading.get_ident()
        if consumer is None:
            return
        if consumer.thread in (None, thread):
            consumer.thread = thread
        else:
            self.rewind(consumer)

    def _move(self, cursor: Cursor) -> None:
        self._cursor, self._consumer = cursor, None
        if self._loop is not None:
            self._loop.is_open = False

    def _moved_error(self) -> CheckpointError:
        return CheckpointError(
            f"{type(self).__name__}: it was moved by load_state_dict, load_job, set_epoch or another loop within its "
            "loop; leave the loop, and begin another"
        )

    def _plan(self) -> dict[str, int]:
        """Return the settings that decide which samples belong to a position."""
        raise NotImplementedError

    def _plan_in(self, state: object) -> dict[str, int | None]:
        """Return the plan of a ``state_dict()``, None for what it lacks; CheckpointError for anything else."""
        if not isinstance(state, dict) or not all(
            type(value) is int and value >= 0 for value in state.values()
        ):
            raise CheckpointError(f"{type(self).__name__}: {state!r} is not what state_dict gives")
        return {name: state.get(name) for name in self._plan()}

    def _plan_error(self, plan: dict[str, int | None]) -> CheckpointError:
        return CheckpointError(
            f"{type(self).__name__}: the checkpoint's plan is {plan}, this one's is {self._plan()}"
        )

    def _numbers(self, count: int) -> Iterator[int]:
        """Yield what is left of the ``count`` numbers of this epoch.

        Raises:
            CheckpointError: the sampler was moved meanwhile.
            DataError: another loop over it has begun.
        """
        cursor, epoch, start = self._cursor, self.epoch, self.start
        loop = self._loop = Loop(threading.get_ident())
        try:
            for number in range(cursor.position, count):
                # counted before the batch is returned: a checkpoint made in the loop means "this one is done"
                is_last = number + 1 == count
                cursor.epoch, cursor.start, cursor.position = (
                    (epoch + 1, 0, 0) if is_last else (epoch, start, number + 1)
                )
                yield number
                if self._cursor is not cursor:
                    raise self._moved_error()
                if self._loop is not loop and not is_last:
                    raise DataError(
                        f"{type(self).__name__}: another loop over it has begun, so samples would be left out of this "
                        "one; leave one loop before the next, or make a sampler for each"
                    )
        finally:
            if not cursor.position:  # the epoch is complete
                loop.is_open = False


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
                or more ranks than the epoch has samples left are to go on.
        """
        plan = self._plan_in(state)
        resized = plan["world_size"] != self.world_size
        may_differ = ("world_size",) if self.microbatches else ("world_size", "batch_size")
        mine = self._plan() | ({name: plan[name] for name in may_differ} if resized else {})
        where = [state.get("epoch"), state.get("start", 0), state.get("position")]
        if plan != mine or None in (*plan.values(), *where):
            raise self._plan_error(plan)
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
