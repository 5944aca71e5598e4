# SPDX-License-Identifier: Apache-2.0
"""The base of samplers: the position of a loop, which checkpoints keep, also where a thread runs the loop ahead.

Note [cursors]: a loop advances the ``Cursor`` that the sampler had as it began. ``load_state_dict`` and ``set_epoch``
give the sampler another one, by which the loop notices that it is left behind. Where a thread runs the loop ahead of
the training (prefetch.py), the cursor is the thread's position, and the ``Consumer`` has that of the training.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass

from ..config import this_thread
from ..errors import CheckpointError, DataError, check_int


@dataclass
class Cursor:
    """The position of a loop, see Note [another number of ranks] in sampler.py."""

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
            return dict(consumer.state)  # a script may add values of its own
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
