# SPDX-License-Identifier: Apache-2.0
"""Calls that all workers of a store make alike: compared before anything changes, done on all of them or on none.

What lives here: a store's workers, and its end by an error. What does not: what the calls do (store.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from ..comm.base import Communicator
from ..comm.progress import progress_of_process
from ..config import state
from ..errors import CheckpointError, CommError, OptionError, SingaLiteError, check_int
from ..graph.recorder import break_graph
from ..opt.checks import MAX_STEPS
from ..tensor import Tensor
from ..tensor.checks import listed
from ..tensor.core import check_tensor
from .base import KVStoreBase
from .calls import difference

Result = TypeVar("Result")
BUSY_S = 1.0  # that a call waits for the end of another thread's


class WorkerCalls(KVStoreBase):
    """A store of several workers; see ``KVStore`` for its arguments."""

    def __init__(self, name: str, communicator: Communicator) -> None:
        self._name = name
        self._communicator = communicator
        self._failure = ""  # what broke the store
        self._progress = progress_of_process()
        self._lock = threading.RLock()  # of the thread in a call: another would take its answers or memory
        state.lock_owners[id(self)] = self

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._name!r}, worker {self.rank} of {self.num_workers})"

    @property
    def type(self) -> str:
        return self._name

    @property
    def rank(self) -> int:
        return self._communicator.rank

    @property
    def num_workers(self) -> int:
        return self._communicator.size

    @property
    def communicator(self) -> Communicator:
        """The workers'."""
        return self._communicator

    def abort(self, reason: str) -> None:
        """Break the store because of an error: every later call, here or on another worker, is a CommError saying why.

        Nothing in a store of one process, where nobody could have another value.
        """
        self._failure = self._failure or str(reason)
        self._communicator.abort(str(reason))

    def check_usable(self, where: str) -> None:
        """Raise a CommError if the store was aborted here; ``where`` is the caller, for errors."""
        if self._failure:
            raise CommError(
                f"{self._name}: {where}: the store is broken by an earlier error: {self._failure}"
            )

    @contextmanager
    def aborting(self, where: str) -> Iterator[None]:
        """Inside, an exception aborts the store, as the exchange is half done; but not one that a check of ours raises.

        ``where`` is the caller, for errors.
        """
        with self._one_thread(where):
            self.check_usable(where)
            try:
                yield
            except BaseException as error:
                if isinstance(error, CommError):
                    self.abort(str(error))
                elif not isinstance(error, SingaLiteError):
                    self.abort(f"{where} was ended by {type(error).__name__}")
                raise

    @contextmanager
    def _one_thread(self, where: str) -> Iterator[None]:
        """Wait BUSY_S seconds for another thread that is inside, then raise a CommError."""
        lock = self._lock  # which is another one in a child that is forked inside
        if not lock.acquire(timeout=BUSY_S):
            raise CommError(
                f"{self._name}: {where}: another thread is in a call of this store; call it in one thread at a time"
            )
        try:
            yield
        finally:
            lock.release()

    @contextmanager
    def applying(self, where: str) -> Iterator[None]:
        """Inside, any exception aborts the store: other workers may have applied what this one has not.

        ``where`` is the caller, for errors.
        """
        try:
            yield
        except BaseException as error:
            self.abort(f"{where} was ended by {type(error).__name__}")
            raise

    def barrier(self) -> None:
        """Return once every worker has called it and the servers have taken in what all had pushed before."""
        with self._calling("barrier"):
            self._communicator.barrier(name="kvstore.barrier")

    _barrier = barrier

    def agree(self, call: str, mine: Mapping[str, Any]) -> None:
        """Raise a CommError that names worker and entry unless all workers call this with equal JSON values."""
        if not isinstance(mine, Mapping):
            raise OptionError(f"{self._name}: agree: expected entries by name, got {type(mine).__name__}")
        self._together(call, mine, lambda: None)

    def note_step(self, step: int) -> None:
        """Report to the launcher, if there is one, that this worker has made ``step`` steps; Trainer does.

        `singa-lite run` takes a worker that has reported none as one that fails at its start (``--min-ranks``).
        """
        if check_int(f"{self._name}: note_step", "step", step, 0) > MAX_STEPS:
            raise OptionError(f"{self._name}: note_step: step = {step} is more than {MAX_STEPS}")
        if self._progress is not None:
            self._progress.note_step(step)

    def average(self, tensors: Sequence[Tensor]) -> None:
        """Set float Tensors to their mean over the workers; all call it alike."""
        given = listed(tensors)
        for tensor in given:
            check_tensor(f"{self._name}: average", tensor)
        with self._calling("average"):
            for tensor in given:
                tensor.device.backend.activate()
                name = f"kvstore.average({tensor.name})" if tensor.name else "kvstore.average"
                self._communicator.all_reduce(tensor.array, "mean", name=name).wait()

    def _together(self, call: str, mine: Mapping[str, Any], action: Callable[[], Result]) -> Result:
        """Return the result of ``action``, once all workers have called it with equal entries; fail on all or none.

        Raises:
            CommError: naming worker and entry, where they differ.
            OptionError, CheckpointError: on all workers, what one of them raised.
        """
        break_graph("it changes a key-value store")
        with self._calling(call):
            everyone = self._communicator.all_gather_object(dict(mine), name=f"kvstore.{call}")
            odd = next((worker for worker, theirs in enumerate(everyone) if theirs != everyone[0]), None)
            if odd is None:
                return self._do(call, action)
        text = difference(call, everyone[0], 0, everyone[odd], odd)
        raise CommError(f"{self._name}: worker {self.rank}: {text}")

    def _do(self, call: str, action: Callable[[], Result]) -> Result:
        """Return the result of ``action``, done on all workers; raise on all of them what it has raised on one."""
        failure = None
        try:
            result = action()
        except (OptionError, CheckpointError) as error:
            failure = [type(error).__name__, str(error)]
        failures = self._communicator.all_gather_object(failure, name=f"kvstore.{call} has ended")
        for kind, text in filter(None, failures):
            raise (OptionError if kind == "OptionError" else CheckpointError)(text)
        return result

    @contextmanager
    def _calling(self, call: str) -> Iterator[None]:
        """Inside: this worker is in a call of all workers, behind all that it has pushed."""
        with self.aborting(call):
            self._flush(call)
            try:
                yield
            finally:
                self._end_call()

    def _flush(self, call: str) -> None:
        """Return once what this worker has pushed was taken in; ``call``, which all workers make, comes next."""

    def _end_call(self) -> None:
        """Called when that has ended."""
