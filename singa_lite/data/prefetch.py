# SPDX-License-Identifier: Apache-2.0
"""A thread that makes the next batches ready while the current one trains."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Generator, Iterable
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from ..errors import DataError, OptionError, check_int
from ..users_line import warn
from .resumable import ResumableSampler

Item = TypeVar("Item")
CLOSE_S = 5.0  # how long the end of the loop waits for the item in the making
STUCK = (
    "prefetch: the loop has ended, but its thread is still in what makes the items after {:g} s; do not use the "
    "objects of that before it has returned"
)


def prefetch(
    items: Iterable[Item], depth: int = 2, *, sampler: ResumableSampler | None = None
) -> Generator[Item, None, None]:
    """Yield ``items`` in their order; a thread takes them up to ``depth`` ahead.

    The thread starts with the first item requested. It has ended when the iteration ends, by exhaustion, an error,
    ``break`` or ``close()``: close waits for the item it is making, and closes ``items`` if that is a generator. It
    waits CLOSE_S seconds at most, so that a source that never answers does not hold back an error of the consumer: then
    it warns, and the thread ends with that item or with the process.
    An exception in ``items`` is raised at its position in the order, with the traceback of the thread; not at all when
    the consumer has left before. ``items`` runs in the thread, so it must touch nothing that the consumer changes, and
    yield a new object each time.

    Args:
        items: e.g. a generator of batches; what numpy copies there runs beside the training.
        depth: items kept ready, >= 1; one more may be in the making.
        sampler: the ShardedSampler or SplitSampler that ``items`` takes batches from, one for each item. The thread
            runs it ahead; with this its ``state_dict()`` is that of the item taken last, and where the consumer leaves,
            it stays. CheckpointError, with the item, where another thread or nobody has taken its batch.

    Raises:
        OptionError: ``depth`` is not an int >= 1, ``items`` cannot be iterated over, or ``sampler`` is another
            object. DataError: an item is requested in a forked child, which has not got the thread, or the system gives
            none.

    Example:
        >>> list(prefetch(number * number for number in range(4)))
        [0, 1, 4, 9]
    """
    check_int("prefetch", "depth", depth, 1)
    if not isinstance(items, Iterable) or getattr(items, "shape", None) == ():
        raise OptionError(f"prefetch: items must be something to iterate over, not {type(items).__name__}")
    if sampler is not None and not isinstance(sampler, ResumableSampler):
        raise OptionError(
            f"prefetch: sampler must be a ShardedSampler or SplitSampler, not {type(sampler).__name__}"
        )
    if sampler is None:
        return _consume(items, _Shelf(depth))
    return _follow(_consume(_with_states(items, sampler), _Shelf(depth)), sampler)


def _with_states(items: Iterable[Item], sampler: ResumableSampler) -> Generator[tuple[Item, Any], None, None]:
    """Yield items with the state of the sampler behind each; closes ``items`` if that is a generator."""
    try:
        for item in items:
            yield item, sampler.own_state()
    finally:
        if isinstance(items, Generator):
            items.close()


def _follow(
    items: Generator[tuple[Item, Any], None, None], sampler: ResumableSampler
) -> Generator[Item, None, None]:
    consumer = sampler.start_following()
    try:
        for item, state in items:
            sampler.follow(consumer, state)
            yield item
    finally:
        items.close()
        sampler.rewind(consumer)


class _Shelf(Generic[Item]):
    """What the thread and the consumer share; Ctrl-C leaves queues of C whole, but not the lock of a Condition."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.process = 0  # that has the thread
        self.items: SimpleQueue[tuple[Item] | None] = SimpleQueue()  # None: nothing more will come
        self.taken: SimpleQueue[None] = SimpleQueue()  # one for each item taken, and one for the end
        self.error: BaseException | None = None
        self.is_closed = False  # nothing more will be taken

    def take(self) -> tuple[Item] | None:
        """Wait for an item; None at the end."""
        if os.getpid() != self.process:
            raise DataError(
                f"prefetch: process {os.getpid()} was forked from {self.process}, which has the thread that makes the "
                "items; call prefetch in the child"
            )
        item = self.items.get()
        self.taken.put(None)
        return item


def _fill(items: Iterable[Item], shelf: _Shelf[Item]) -> None:
    """Run as the thread; it refers to the shelf only, so that a dropped consumer is collected and closes the shelf."""
    try:
        try:
            # closed before it has begun: Ctrl-C may have ended Thread.start
            for number, item in enumerate(() if shelf.is_closed else items):
                if number >= shelf.depth:
                    shelf.taken.get()
                if shelf.is_closed:
                    break
                shelf.items.put((item,))
        finally:
            if isinstance(items, Generator):
                items.close()
    except BaseException as error:  # passed to the consumer, whatever it is
        shelf.error = error
    shelf.items.put(None)


def _consume(items: Iterable[Item], shelf: _Shelf[Item]) -> Generator[Item, None, None]:
    # daemon: an interpreter that ends while a reference is still held somewhere must not wait for it. It closes this
    # generator then, when threads run no more and join, from Python 3.13 on, does not return
    is_ending = sys.is_finalizing
    thread = threading.Thread(target=_fill, args=(items, shelf), name="singa_lite prefetch", daemon=True)
    shelf.process = os.getpid()
    try:
        try:
            thread.start()
        except RuntimeError as error:
            if isinstance(error.__context__, KeyboardInterrupt):  # it came within Thread.start
                raise error.__context__ from None
            raise DataError(f"prefetch: the system gives no thread to make the items in: {error}") from error
        while (taken := shelf.take()) is not None:
            yield taken[0]
    finally:
        shelf.is_closed = True
        shelf.taken.put(None)
        # the collector may drop this in the thread; Thread.start fails, or Ctrl-C ends it, before there is one
        if not is_ending() and thread is not threading.current_thread() and thread.is_alive():
            thread.join(CLOSE_S)
            if thread.is_alive():
                warn(STUCK.format(CLOSE_S))
    if shelf.error is not None:
        try:
            raise shelf.error
        finally:
            shelf.error = None  # its traceback holds this frame: a circle that would keep the items
