# SPDX-License-Identifier: Apache-2.0
"""Leave the world when this process ends, and report why when it ends by an exception.

What lives here: the hooks of the interpreter. What does not: joining a world (rendezvous.py), ending an MPI job
(mpi_job.py).

Note [full error stream]: the hooks that print an error raise one of their own where the error stream is full. The peers
learn of the failure all the same.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from traceback import format_exception
from types import TracebackType
from typing import Any

from .. import _native
from ..config import state
from ..error_stream import tell, text_of
from ..errors import CommError
from .dispatch import DispatchCommunicator
from .failed_threads import check_no_failed_thread, fails_job, reason_of
from .link_communicator import LinkCommunicator
from .mpi import MpiCommunicator
from .mpi_job import FINAL_OUTPUT_S, MpiJob
from .p2p import Messenger
from .parent import parent_process
from .progress import progress_of_process


class ExitHooks:
    """The hooks of one process, installed when it begins to join a world.

    The peers of a process that ends raise CommError at once instead of waiting. Under MPI, which would wait for ever
    for a rank that failed, the exception is printed under this rank's number and the whole job ended.

    Attributes:
        communicators: those to leave, in the order they were made.
        messengers: likewise.
        mpi_job: the MPI job this process is a rank of, if any.
    """

    def __init__(self) -> None:
        self.communicators: list[DispatchCommunicator | LinkCommunicator] = []
        self.messengers: list[Messenger] = []
        self.mpi_job: MpiJob | None = None
        self._last_calls: list[Callable[[], None]] = []
        self._pid = os.getpid()
        self._ends_at_once = self._has_aborted = self._reports_first = False
        self._has_lost_output = False
        self._excepthook, self._thread_excepthook = sys.excepthook, threading.excepthook
        sys.excepthook = self._uncaught
        threading.excepthook = self._uncaught_in_thread
        self._unraisablehook = sys.unraisablehook
        sys.unraisablehook = self._uncaught_at_exit
        self.at_exit(self.leave)

    @property
    def is_of_parent(self) -> bool:
        """Whether this process was forked from the one that joined, which aborts for itself."""
        return self._pid != os.getpid()

    @contextlib.contextmanager
    def joining(self) -> Iterator[None]:
        """Inside: this process waits for the others to join."""
        check_no_failed_thread()
        with self.mpi_job.joining() if self.mpi_job else contextlib.nullcontext():
            yield
        if not self._reports_first:  # before weakref.finalize closes what has joined now
            self._reports_first = True
            self.at_exit(lambda: None)

    def at_exit(self, call: Callable[[], None]) -> Callable[[], None]:
        """Register ``call`` for the end of this process, the latest one first; return what unregisters it."""
        finalizer = None

        def once() -> None:
            cancel()
            if not self.is_of_parent:
                self.report_exception()
                call()

        def cancel() -> None:
            atexit.unregister(once)
            if finalizer is not None:
                finalizer.cancel()

        atexit.register(once)
        if parent_process() is not None:  # a forked one ends without atexit (before Python 3.14)
            from multiprocessing.util import Finalize  # Note [imports]

            finalizer = Finalize(None, once, exitpriority=10)
        return cancel

    def before_leaving(self, call: Callable[[], None]) -> None:
        """Register ``call`` for the end of this process without an error; its exception makes the exit code 1.

        It is made earlier where the script itself calls MPI.Finalize(), and must do nothing the second time.
        """

        def last_call() -> None:
            try:
                if not self._has_aborted:
                    call()
            except Exception as error:  # MPI.Finalize(), which may have called this, would go on and wait
                self.note_failure()
                tell("".join(format_exception(error)))
                self._abort_at_end(text_of(error))

        self.at_exit(last_call)  # now, so before the messengers' own hooks, which close them
        self._last_calls.append(last_call)

    def make_last_calls(self) -> None:
        """Call what ``before_leaving`` has registered, the latest one first."""
        if not self.is_of_parent:
            for call in reversed(self._last_calls):
                call()

    def note_failure(self) -> None:
        """Make the exit code 1 where it would be 0, after all that is left to do at exit."""
        native, _ = _native.load("_comm")
        if native is None or parent_process() is not None:  # multiprocessing may end without Python's exit
            self._ends_at_once = True
        else:
            native.end_with_1()

    def leave(self) -> None:
        """Leave every world."""
        self._flush()
        for messenger in self.messengers:
            messenger.close()
        for communicator in self.communicators:
            communicator.close()
        if self.mpi_job is not None:
            hosts: list[MpiCommunicator | Messenger] = [*self.messengers]
            hosts += [made.host for made in self.communicators if isinstance(made.host, MpiCommunicator)]
            self.mpi_job.is_stuck |= any(host.is_stuck for host in hosts)
            if not self.mpi_job.is_stuck:
                for host in hosts:
                    host.drain(FINAL_OUTPUT_S)
            self.mpi_job.leave()
        if self._ends_at_once:
            self._flush()
            os._exit(1)

    def report_exception(self) -> None:
        """Abort where this process ends by an exception that ``_uncaught`` does not see.

        Multiprocessing catches it, and calls this meanwhile; or the script has a sys.excepthook of its own.
        """
        error = sys.exc_info()[1]
        if error is None and sys.excepthook != self._uncaught:
            error = _end_of_script()
        if error is not None and _is_failure(error) and not self._has_aborted:
            self._flush()
            self._abort_at_end(text_of(error))

    def _uncaught_at_exit(self, unraisable: Any) -> None:
        """Note what a function of atexit raises, after which Python would end with 0."""
        try:
            self._unraisablehook(unraisable)
        finally:  # Note [full error stream]
            is_at_exit = str(unraisable.err_msg).startswith("Exception ignored in atexit callback")
            if is_at_exit and not self.is_of_parent and _is_failure(unraisable.exc_value):
                self.note_failure()
                if not self._has_aborted:
                    self._abort_at_end(text_of(unraisable.exc_value))

    def _uncaught(
        self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        job = None if self.is_of_parent else self.mpi_job
        if job is not None:
            # mpiexec does not name the rank of a line, and mixes lines: all in one write
            tell("".join([job.failed_line, *format_exception(kind, error, traceback)]))
        try:
            if job is None or self._excepthook is not sys.__excepthook__:
                self._excepthook(kind, error, traceback)
        finally:  # Note [full error stream]
            if not self.is_of_parent:
                self._abort_at_end(text_of(error))
                self._end_mpi_job()

    def _uncaught_in_thread(self, arguments: threading.ExceptHookArgs) -> None:
        is_failure = fails_job(arguments) and not self.is_of_parent
        if is_failure and self.mpi_job is not None:
            tell(self.mpi_job.failed_line)
        try:
            self._thread_excepthook(arguments)
        finally:  # Note [full error stream]
            if is_failure:
                self.note_failure()
                self._abort(reason_of(arguments))
                self._end_mpi_job()

    def _end_mpi_job(self) -> None:
        self._flush()
        if self.mpi_job is not None:
            self.mpi_job.abort_after_final_output()

    def _flush(self) -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(ValueError, AttributeError):  # closed by the script, or not there
                try:
                    stream.flush()
                except OSError as error:  # Python fails at the end, but in a forked process says nothing
                    if not self._has_lost_output:
                        tell(f"singa_lite: output is lost: {error}\n")
                    self._has_lost_output = True

    def _abort_at_end(self, reason: str) -> None:
        if self.mpi_job is None:  # several hosts: rank_wrapper.py does
            with contextlib.suppress(CommError):  # the script has changed the launcher's variables
                if (progress := progress_of_process()) is not None:
                    progress.note_failure()  # for `singa-lite run`, as something may keep this process alive
        self._abort(reason)

    def _abort(self, reason: str) -> None:
        self._has_aborted = True
        for messenger in self.messengers:
            messenger.abort(reason)
        for communicator in self.communicators:
            communicator.abort_with_groups(reason)


def exit_hooks() -> ExitHooks:
    """Return this process's hooks, installed at the first call."""
    if state.exit_hooks is None or state.exit_hooks.is_of_parent:
        state.exit_hooks = ExitHooks()
    hooks: ExitHooks = state.exit_hooks
    return hooks


def _end_of_script() -> BaseException | None:
    """Return the exception that has left the script itself; not one that others, such as a prompt, have handled."""
    error: BaseException | None = getattr(sys, "last_value", None)
    traceback = None if error is None else error.__traceback__
    while traceback is not None and traceback.tb_frame.f_globals.get("__name__") == "runpy":
        traceback = traceback.tb_next
    frame = None if traceback is None else traceback.tb_frame
    main = vars(sys.modules["__main__"])
    is_script = (
        frame is not None
        and frame.f_globals is main
        and frame.f_code.co_name == "<module>"
        and frame.f_code.co_filename != "<console>"  # of code.interact
    )
    return error if is_script and not hasattr(sys, "ps1") else None


def report_from_run() -> None:
    """Have the exception that ends this process of multiprocessing reported where it leaves ``run``.

    From Python 3.13 on the exit hooks of such a process run when the exception is gone.
    """
    from multiprocessing.process import BaseProcess  # Note [imports]

    run = BaseProcess.run

    def reporting(process: BaseProcess) -> None:
        try:
            run(process)
        except BaseException:
            hooks = state.exit_hooks
            if hooks is not None and not hooks.is_of_parent:
                hooks.report_exception()
            raise

    if sys.version_info >= (3, 13) and run.__module__ != __name__:  # once in a process
        BaseProcess.run = reporting  # type: ignore[method-assign]


def _is_failure(error: BaseException | None) -> bool:
    return error is not None and not (isinstance(error, SystemExit) and error.code in (None, 0))
