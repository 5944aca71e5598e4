# SPDX-License-Identifier: Apache-2.0
"""Writing a generation in a thread of each rank, and its end on all ranks.

Note [two phases]: each rank's thread writes its file, which is there when it is whole. Rank 0's thread waits for all of
them, then writes the manifest, so that no thread calls a collective. ``wait`` is one: there a rank learns of another
rank's failure, and rank 0 stops waiting for a file that will not come.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import threading
import time
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import numpy as np

from ..comm.base import Communicator
from ..comm.exit_hooks import exit_hooks
from ..error_stream import tell
from ..errors import CheckpointError
from ..generation import Manifest, rank_file, remove_old, write_manifest
from .rank_arrays import Arrays, write_arrays
from .together import together

POLL_S = 0.002
CALM_S = 0.03  # the next recorded step runs eagerly and wants the interpreter: writing begins this long after the copy
EXIT_S = 10.0  # how long a process that ends waits for the other ranks' files
LOST_S = 0.5  # likewise once a collective has failed: that of a lost rank never comes, but others are writing theirs
SEEN_S = 120.0  # how long files that other hosts have written may take to be seen here
WHERE = "save_job"


class Saving:
    """A generation that is being written.

    Args:
        communicator: of the job's ranks.
        path: the generation's folder.
        manifest: without versions.
        arrays: what this rank writes.
        keep: generations that stay in the folder.
        damaged: ids of generations that do not.
    """

    def __init__(
        self,
        communicator: Communicator,
        path: Path,
        manifest: Manifest,
        arrays: Arrays,
        keep: int,
        damaged: Collection[str],
    ) -> None:
        self.path = path
        self._communicator, self._manifest, self._keep = communicator, manifest, keep
        self._damaged = damaged
        self._arrays = arrays
        self._failure: CheckpointError | None = None
        self._is_awaited, self._is_written, self._is_given_up = (threading.Event() for _ in range(3))
        # not Thread.join: where Ctrl-C ends that, Python 3.11 takes a thread that still writes for one that has ended
        self._is_ended, self._process = threading.Event(), os.getpid()
        self.is_over = False  # whether wait was called
        self._error: BaseException | None = None  # what wait raised
        self._hooks = exit_hooks()
        thread = threading.Thread(target=self._run, name="singa_lite save_job", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the system has no process or memory left for one
            self._failure = CheckpointError(f"cannot write {path}: {error}")
            self._end()
        self._cancel_finish = self._hooks.at_exit(self._finish)

    @property
    def is_of_parent(self) -> bool:
        """Whether this process is a forked child, which has not got the thread."""
        return self._process != os.getpid()

    def done(self) -> bool:
        """Return whether this rank's part is over; on rank 0, whether the generation counts, or never will."""
        return self._is_ended.is_set() or self.is_of_parent

    def wait(self) -> Path:
        """Return the generation's folder once it counts; a collective.

        Raises:
            CheckpointError: a rank could not write; the generation does not count, and those before it stay. Or this
                is a forked child of the process that writes.
        """
        if self._error is not None:
            raise self._error
        if self.is_over:
            return self.path
        try:
            if self.is_of_parent:
                raise CheckpointError(
                    f"{WHERE}: process {self._process} writes {self.path}, and {os.getpid()} is a forked child of it; "
                    "call wait in the parent"
                )
            self._is_awaited.set()
            self._cancel_finish()
            together(self._communicator, WHERE, self._written)
            together(self._communicator, WHERE, self._ended)
        except BaseException as error:
            self._error = error
            self.wait_for_thread()
            raise
        finally:
            self.is_over = True
        return self.path

    def wait_for_thread(self) -> None:
        """Wait until this rank's part is over, also where Ctrl-C has ended ``wait`` and this; no collective."""
        self._join(0.0)

    def _written(self) -> None:
        self._is_written.wait()
        if self._failure is not None:
            raise self._failure

    def _ended(self) -> None:
        self._join(min(SEEN_S, self._communicator.timeout_s))
        if self._failure is not None:
            raise self._failure

    def _join(self, seconds: float) -> None:
        """Wait for the thread, which gives up waiting for other ranks' files after ``seconds``."""
        if not self.is_of_parent:
            self._is_ended.wait(seconds)
            self._is_given_up.set()
            self._is_ended.wait()

    def _finish(self) -> None:
        """Wait for the thread before the process ends; its failure is one of the process."""
        self._is_awaited.set()
        self._join(LOST_S if self._communicator.has_failed else EXIT_S)
        if self._failure is not None:
            self._hooks.note_failure()
            tell(f"{WHERE}: {self._failure}\n")

    # ---- in the thread -----------------------------------------------------------------------------------

    def _run(self) -> None:
        self._is_awaited.wait(CALM_S)
        try:
            write_arrays(self.path / rank_file(self._communicator.rank), self._arrays)
            self._is_written.set()
            self._arrays = {}
            if self._communicator.rank == 0:
                self._commit()
        except CheckpointError as error:
            self._failure = error
        except BaseException as error:  # whatever it is: the thread has no other way to say it
            self._failure = CheckpointError(f"cannot write {self.path}: {type(error).__name__}: {error}")
        finally:
            self._end()

    def _end(self) -> None:
        """Free the arrays, and let nobody wait for them any more."""
        self._arrays = {}
        self._is_written.set()
        self._is_ended.set()

    def _commit(self) -> None:
        """Write the manifest once every rank's file is there, then remove what is not needed any more."""
        files = [self.path / rank_file(rank) for rank in range(self._manifest.world_size)]
        while missing := [file.name for file in files if not file.exists()]:
            if self._is_given_up.is_set() or not self.path.is_dir():
                raise CheckpointError(
                    f"{self.path} lacks {missing}; has that rank ended, or do not all hosts share "
                    "this folder?"
                )
            time.sleep(POLL_S)
        write_manifest(self.path, replace(self._manifest, versions=_versions()))
        remove_old(self.path.parent, self._keep, self._damaged)


@functools.cache  # reading the metadata of a package takes as long as writing the manifest
def _versions() -> dict[str, str]:
    try:
        ours = importlib.metadata.version("singa-lite")
    except importlib.metadata.PackageNotFoundError:  # run from a folder
        ours = "unknown"
    return {"singa_lite": ours, "python": platform.python_version(), "numpy": np.__version__}
