# SPDX-License-Identifier: Apache-2.0
"""Shared by ``save_job`` and ``load_job``: the ranks of a job, the arrays of each, and its known checkpoints.

What does not live here: saving (save.py), going on from what was saved (load.py), extras, hashes and what is stored
once (contents.py), the files (../generation.py).
"""

from __future__ import annotations

import os
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from ..comm.base import Communicator, World
from ..comm.job import launched_job
from ..comm.local import LocalCommunicator
from ..config import state
from ..errors import CheckpointError, OptionError
from ..model import Model
from ..opt import DistOpt
from .rank_arrays import Arrays
from .resize import OPTIMIZER
from .saving import Saving
from .streams import streams
from .together import Json

MODEL = "model/"


class Sampler(Protocol):
    """Where the training is in its samples (data.ShardedSampler)."""

    def state_dict(self) -> dict[str, Any]:
        """Return JSON values."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go where ``state_dict`` was taken."""


class Trainer(Protocol):
    """The interface of gluon.Trainer, which updates instead of the model's optimizer; all workers call all of it."""

    @property
    def optimizer(self) -> Any:
        """Has settings() and step_counter."""

    @property
    def kvstore(self) -> Any:
        """Has a communicator, the workers'."""

    @property
    def reduction(self) -> str:
        """Whether gradients become their "sum" over the workers, or their "mean"."""

    def get_states(self) -> Arrays:
        """Return what this worker needs to go on."""

    def set_states(self, states: Arrays) -> None:
        """Continue from ``get_states`` and worker 0's parameters."""


@dataclass(frozen=True)
class Job:
    """The generation that ``load_job`` has restored.

    Attributes:
        step: optimizer steps that were made.
        world_size: ranks that saved it.
        extra: what this rank gave ``save_job``; rank 0's where the number of ranks is another.
        folder: the generation.
    """

    step: int
    world_size: int
    extra: dict[str, Any] = field(default_factory=dict)
    folder: Path = Path()


@dataclass
class JobState:
    """The generations and folders of a model's job checkpoints.

    Attributes:
        known: ids of the generations that this model has saved, or left behind by loading.
        damaged: ids of those left behind, which no ``keep`` counts, and real paths of those with damaged manifests.
        folders: real paths of those that it has saved to or loaded from.
        saving: the last one, which nobody has waited for yet if it is not over.
    """

    known: set[str] = field(default_factory=set)
    damaged: set[str] = field(default_factory=set)
    folders: set[str] = field(default_factory=set)
    saving: Saving | None = None

    def wait(self) -> None:
        """Wait for the last saving; a collective, which raises what went wrong."""
        if self.saving is not None:
            if not (self.saving.is_over or self.saving.is_of_parent):
                self.saving.wait()
            self.saving.wait_for_thread()  # which Ctrl-C, twice, may have left
            self.saving = None


def state_of(model: Model) -> JobState:
    """Return what is known of the job checkpoints of ``model``."""
    # by id, as a script's model may be equal to another, or have no hash
    if id(model) not in state.jobs:
        weakref.finalize(model, state.jobs.pop, id(model), None)
        state.jobs[id(model)] = JobState()
    found: JobState = state.jobs[id(model)]
    return found


def parts_of(model: Model, trainer: Trainer | None, where: str) -> tuple[Communicator, Any]:
    """Return the communicator of the job's ranks, and the optimizer that counts its steps."""
    if not isinstance(model, Model):
        raise OptionError(f"{where}: expected a Model, got {type(model).__name__}")
    if trainer is not None and model.optimizer is not None:
        raise OptionError(f"{where}: the model has an optimizer of its own; leave the trainer out")
    if trainer is None and model.optimizer is None:
        raise OptionError(f"{where}: the model has no optimizer; call set_optimizer first, or give a trainer")
    optimizer = model.optimizer if trainer is None else trainer.optimizer
    communicator = getattr(optimizer if trainer is None else trainer.kvstore, "communicator", None)
    if communicator is None:
        communicator = LocalCommunicator(World())
    is_alone = isinstance(communicator, LocalCommunicator) and not isinstance(optimizer, DistOpt)
    if is_alone and launched_job().num_workers > 1:
        what = (
            "the model's optimizer is not a DistOpt"
            if trainer is None
            else "the trainer's store is not a dist store"
        )
        raise OptionError(f"{where}: {what}, so each of this job's ranks would save for itself")
    return communicator, optimizer


def check_agreed(where: str, everyone: list[Json]) -> None:
    """Raise CheckpointError where what all ranks must give alike is another on one."""
    for rank, theirs in enumerate(everyone):
        for what, value in everyone[0]["agreed"].items():
            if theirs["agreed"][what] != value:
                raise CheckpointError(
                    f"{where}: {what} is {value!r} on rank 0 but {theirs['agreed'][what]!r} on rank {rank}"
                )


def check_equal_parameters(where: str, model: Model, everyone: list[dict[str, str]], cure: str) -> None:
    """Raise CheckpointError where a parameter that is trained, and kept equal on all ranks, differs, by its hashes."""
    if not getattr(model.optimizer, "keeps_equal", True):
        return
    params = model.get_params().values()
    trained = {id(param) for param in params if param.stores_grad and param.requires_grad}
    for name in (name for name, value in model.get_states().items() if id(value) in trained):
        for rank, theirs in enumerate(everyone):
            if theirs[MODEL + name] != everyone[0][MODEL + name]:
                raise CheckpointError(
                    f"{where}: the parameter {name} is another on rank {rank} than on rank 0; {cure}"
                )


def states_of_trainer(trainer: Trainer) -> Arrays:
    """Return the states of a trainer as those of an optimizer; a collective."""
    return {OPTIMIZER + name: array for name, array in trainer.get_states().items()}


def check_arguments(where: str, folder: object, trainer: object, sampler: object) -> None:
    """Raise OptionError where one is not of the kind that ``save_job`` and ``load_job`` take."""
    if not isinstance(folder, (str, os.PathLike)) or not str(folder) or "\0" in str(folder):
        raise OptionError(f"{where}: folder must be a path, not {folder!r}")
    if trainer is not None and not all(
        hasattr(trainer, name) for name in ("kvstore", "optimizer", "get_states")
    ):
        raise OptionError(f"{where}: trainer must be a gluon.Trainer, not {type(trainer).__name__}")
    if sampler is not None and not (hasattr(sampler, "state_dict") and hasattr(sampler, "load_state_dict")):
        raise OptionError(f"{where}: sampler must be a ShardedSampler, not {type(sampler).__name__}")


def arrays_of(model: Model) -> Arrays:
    """Return copies of all that a rank has, by name."""
    snapshot = model.snapshot("save_job")
    arrays = {MODEL + name: array for name, array in snapshot.states.items()}
    arrays |= {OPTIMIZER + name: array for name, array in (snapshot.optimizer or {}).items()}
    return arrays | streams(snapshot.random_states)


def absolute(where: str, folder: str | os.PathLike[str]) -> str:
    """Return the path of a folder from the root; CheckpointError if it is relative to one that is gone."""
    try:
        return os.path.abspath(folder)
    except OSError as error:
        raise CheckpointError(
            f"{where}: {folder} is relative, and the current folder is gone: {error}"
        ) from error
