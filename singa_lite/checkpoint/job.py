# SPDX-License-Identifier: Apache-2.0
"""Saving a job and going on from what was saved, on all ranks alike.

What lives here: what a rank saves, and what all ranks agree on. What does not: extras, hashes and what is stored once
(contents.py), the files (../generation.py), writing them beside the training (saving.py), another number of ranks
(resize.py).
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from ..comm.base import Communicator, World
from ..comm.hosts import this_host
from ..comm.local import LocalCommunicator
from ..comm.rendezvous import launched_job
from ..config import state
from ..errors import CheckpointError, OptionError, check_bool, check_int
from ..generation import (
    Arrays,
    DamagedError,
    Generation,
    Manifest,
    find_generations,
    make_folder,
    read_rank,
    read_shared,
)
from ..model import Model
from ..model_file import Checkpoint
from ..opt import DistOpt
from ..opt.fixed_order import check_threads
from .contents import (
    as_json,
    changed_settings,
    check_optimizer,
    check_resized_samplers,
    check_samplers,
    digests,
    manifest_of,
    placed,
    split_extra,
)
from .resize import EXTRA, OPTIMIZER, resized
from .saving import Saving
from .streams import DEVICES, check_streams, restore_streams, stream_ids, streams
from .streams import PREFIX as STREAMS
from .together import together

Json = Any
MODEL = "model/"


class Sampler(Protocol):
    """Where the training is in its samples (data.ShardedSampler)."""

    def state_dict(self) -> dict[str, Any]:
        """Return JSON values."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go where ``state_dict`` was taken."""


class Trainer(Protocol):
    """What updates the parameters in place of the model's optimizer (gluon.Trainer); all workers call all of it."""

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
        """Go on from ``get_states`` and worker 0's parameters."""


@dataclass(frozen=True)
class Job:
    """What ``load_job`` has gone on from.

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


def save_job(
    folder: str | os.PathLike[str],
    model: Model,
    *,
    trainer: Trainer | None = None,
    sampler: Sampler | None = None,
    extra: Mapping[str, Any] | None = None,
    keep: int = 2,
    block: bool = True,
) -> Saving:
    """Save all that the ranks need to go on with the same bits, as a new generation in ``folder``; a collective.

    Saved are parameters, buffers, the optimizer's and the dist_option's states, unfinished sums of gradients, and the
    random streams of devices, numpy and Python. The generation counts once all of it is on the disk; then the oldest
    ones are removed. The next recorded step runs eagerly, as after ``Model.save_states``.

    Args:
        folder: the job's own, on a file system that all hosts share; made if it is not there.
        model: compiled, with an optimizer, on several ranks a DistOpt; or without one, and with a ``trainer``.
        trainer: a gluon.Trainer of the model's parameters; what its store's servers keep is saved as well.
        sampler: whose ``state_dict()`` is to be saved as well.
        extra: what else to keep, by name: JSON values or arrays of numbers; each rank has its own.
        keep: whole generations that stay, >= 1.
        block: False returns as soon as the values are copied, and a thread writes them. The next ``save_job`` or
            ``wait()`` on all ranks raises what went wrong.

    Returns:
        The Saving; its ``wait()``, which ``block`` has called, gives the generation's folder.

    Raises:
        CheckpointError: on all ranks if one cannot write, if their steps or the places of their ShardedSamplers differ,
            or if ``folder`` has a job that this model neither saved nor loaded; generations before are as they were.
        OptionError: a bad argument. CommError: a peer has gone.
    """
    keep = check_int("save_job", "keep", keep, 1)
    check_bool("save_job", "block", block)
    _check_arguments("save_job", folder, trainer, sampler)
    communicator, optimizer = _parts(model, trainer, "save_job")
    job = _state(model)
    job.wait()
    arrays: Arrays = {} if trainer is None else _of_trainer(trainer)

    def collect() -> Json:
        more, values = split_extra(extra)
        arrays.update(_arrays(model), **{EXTRA + name: array for name, array in more.items()})
        return {
            "step": optimizer.step_counter,
            "agreed": {"folder": os.path.abspath(folder), "keep": keep, "a sampler": sampler is not None},
            "digests": digests(arrays),
            "sampler": None if sampler is None else as_json("sampler.state_dict()", sampler.state_dict()),
            "extra": values,
            "new": _begin(folder, optimizer.step_counter, job) if communicator.rank == 0 else None,
        }

    everyone = together(communicator, "save_job", collect)
    _check_agreed("save_job", everyone)
    for rank, theirs in enumerate(everyone):
        if theirs["step"] != everyone[0]["step"]:
            raise CheckpointError(
                f"save_job: rank 0 has made {everyone[0]['step']} steps, but rank {rank} {theirs['step']}; "
                "call it after the same step on all ranks"
            )
    check_samplers([theirs["sampler"] for theirs in everyone])
    path, number = everyone[0]["new"]
    own, shared = placed([theirs["digests"] for theirs in everyone], arrays)
    manifest = manifest_of(optimizer, number, everyone, own, shared)
    mine = {name: arrays[name] for part in (own, shared) for name in part[communicator.rank]}
    job.known.add(manifest.id)
    job.folders.add(_key(folder))
    saving = Saving(communicator, Path(path), manifest, mine, keep, frozenset(job.damaged))
    if block:
        saving.wait()
    else:
        job.saving = saving
    return saving


def load_job(
    folder: str | os.PathLike[str],
    model: Model,
    *,
    trainer: Trainer | None = None,
    sampler: Sampler | None = None,
) -> Job | None:
    """Go on from the newest generation in ``folder`` that is whole; a collective.

    A save of this model with ``block=False`` is waited for. A generation with a missing or damaged file is left out
    with a warning, on all ranks. With as many ranks as saved it the job goes on with the same bits; with another number
    see docs/jobs.md.

    Args:
        folder: what ``save_job`` was given.
        model, trainer: as they were saved, with any number of servers.
        sampler: as it was saved with, or none if it was not; with another number of ranks it goes on behind the samples
            that were used.

    Returns:
        What was loaded, or None if there is no generation yet: nothing was changed.

    Raises:
        CheckpointError: on all ranks: all generations that are there are damaged; the newest whole one cannot be read
            by the system, is of another model, optimizer or sampler, or only as many ranks as saved it can go on from
            it; or with order="fixed" ranks had another number of threads. CommError: a peer has gone.
    """
    _check_arguments("load_job", folder, trainer, sampler)
    communicator, optimizer = _parts(model, trainer, "load_job")
    _state(model).wait()

    def find() -> Json:
        agreed = {"folder": os.path.abspath(folder), "a sampler": sampler is not None}
        seeds = [device.get_random_state()[0] for device in model.devices()]
        now = stream_ids() | {DEVICES: seeds}
        found = _found(folder) if communicator.rank == 0 else None
        return {"agreed": agreed, "streams": now, "host": this_host(), "found": found}

    everyone = together(communicator, "load_job", find)
    _check_agreed("load_job", everyone)
    found = everyone[0]["found"]
    problems, damaged = list(found["problems"]), []
    for path, values in found["generations"]:
        generation = Generation(Path(path), Manifest.of_json(values))
        try:
            arrays = _read_together(generation, communicator, everyone, trainer)
        except DamagedError as error:
            problems.append(str(error))
            damaged.append(generation.manifest.id)
            continue
        for problem in problems:
            warnings.warn(f"load_job: {problem}; going on from {generation.path.name}", stacklevel=2)
        job = _go_on(communicator, model, trainer, sampler, generation, arrays)
        known = _state(model)
        known.known |= {each["id"] for _, each in found["generations"]}
        known.damaged |= set(damaged)
        known.folders.add(_key(folder))
        saved_with, has = generation.manifest.dist_option, getattr(optimizer, "dist_option", None)
        if saved_with != has:
            warnings.warn(
                f"load_job: {generation.path.name} was saved with dist_option {saved_with!r}, and goes on with {has!r}",
                stacklevel=2,
            )
        if changed := changed_settings(generation.manifest.optimizer, optimizer.settings()):
            warnings.warn(
                f"load_job: {generation.path.name} was saved with another {', '.join(changed)} of the optimizer",
                stacklevel=2,
            )
        return job
    if problems:
        raise CheckpointError(f"load_job: no generation in {folder} can be read: {'; '.join(problems)}")
    return None


@dataclass
class JobState:
    """What is known of a model's job checkpoints.

    Attributes:
        known: ids of the generations that this model has saved, or left behind by loading.
        damaged: ids of those left behind, which no ``keep`` counts, and real paths of those with damaged manifests.
        folders: that it has saved to or loaded from.
        saving: the last one of ``block=False``, not waited for yet.
    """

    known: set[str] = field(default_factory=set)
    damaged: set[str] = field(default_factory=set)
    folders: set[str] = field(default_factory=set)
    saving: Saving | None = None

    def wait(self) -> None:
        """Wait for the last saving; a collective, which raises what went wrong."""
        if self.saving is not None:
            last, self.saving = self.saving, None
            if not last.is_over:
                last.wait()


def _state(model: Model) -> JobState:
    found: JobState = state.jobs.setdefault(model, JobState())
    return found


# ---- what a rank has -------------------------------------------------------------------------------------


def _parts(model: Model, trainer: Trainer | None, where: str) -> tuple[Communicator, Any]:
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
            "the model's optimizer is no DistOpt"
            if trainer is None
            else "the trainer's store is no dist store"
        )
        raise OptionError(f"{where}: {what}, so each of this job's ranks would save for itself")
    return communicator, optimizer


def _check_agreed(where: str, everyone: list[Json]) -> None:
    """Raise CheckpointError where what all ranks must give alike is another on one."""
    for rank, theirs in enumerate(everyone):
        for what, value in everyone[0]["agreed"].items():
            if theirs["agreed"][what] != value:
                raise CheckpointError(
                    f"{where}: {what} is {value!r} on rank 0 but {theirs['agreed'][what]!r} on rank {rank}"
                )


def _of_trainer(trainer: Trainer) -> Arrays:
    """Return the states of a trainer as those of an optimizer; a collective."""
    return {OPTIMIZER + name: array for name, array in trainer.get_states().items()}


def _check_arguments(where: str, folder: object, trainer: object, sampler: object) -> None:
    if not isinstance(folder, (str, os.PathLike)) or not str(folder) or "\0" in str(folder):
        raise OptionError(f"{where}: folder must be a path, not {folder!r}")
    if trainer is not None and not all(
        hasattr(trainer, name) for name in ("kvstore", "optimizer", "get_states")
    ):
        raise OptionError(f"{where}: trainer must be a gluon.Trainer, not {type(trainer).__name__}")
    if sampler is not None and not (hasattr(sampler, "state_dict") and hasattr(sampler, "load_state_dict")):
        raise OptionError(f"{where}: sampler must be a ShardedSampler, not {type(sampler).__name__}")


def _arrays(model: Model) -> Arrays:
    """Return copies of all that a rank has, by name."""
    snapshot = model.snapshot("save_job")
    arrays = {MODEL + name: array for name, array in snapshot.states.items()}
    arrays |= {OPTIMIZER + name: array for name, array in (snapshot.optimizer or {}).items()}
    return arrays | streams(snapshot.random_states)


# ---- folders ---------------------------------------------------------------------------------------------


def _key(folder: str | os.PathLike[str]) -> str:
    return os.path.realpath(folder)


def _begin(folder: str | os.PathLike[str], step: int, job: JobState) -> Json:
    """Make the folder of a new generation; return it and its number."""
    pending = [each.saving for each in state.jobs.values() if each is not job and each.saving is not None]
    if any(_key(each.path.parent) == _key(folder) for each in pending if not each.is_over):
        raise CheckpointError(
            f"save_job: another model's save to {folder} is not over; give each model a folder of its own"
        )
    whole, problems = find_generations(folder)
    newest = whole[0].manifest.number if whole else 0
    if whole and whole[0].manifest.id not in job.known:
        raise CheckpointError(
            f"save_job: {whole[0].path} was saved by another job; go on from it by load_job, or give another folder"
        )
    if problems and _key(folder) not in job.folders:
        raise CheckpointError(
            f"save_job: {folder} has checkpoints that cannot be read: {'; '.join(problems.values())}"
        )
    job.damaged |= set(map(os.path.realpath, problems))
    return [str(make_folder(folder, step)), newest + 1]


def _found(folder: str | os.PathLike[str]) -> Json:
    whole, problems = find_generations(folder)
    return {
        "generations": [[str(each.path), each.manifest.to_json()] for each in whole],
        "problems": list(problems.values()),
    }


def _read_together(
    generation: Generation, communicator: Communicator, everyone: list[Json], trainer: Trainer | None
) -> Arrays:
    """Return the arrays that this rank goes on from.

    Args:
        everyone: of each rank its streams and its host.

    Raises:
        DamagedError: on all ranks: one has found a damaged or missing file.
        CheckpointError: on all ranks: one cannot read a file that may be whole, or go on from what it has read.
    """
    manifest, rank = generation.manifest, communicator.rank
    is_resized = communicator.size != manifest.world_size
    shared: Arrays = {}
    by_rank: list[Arrays] = []
    arrays: Arrays = {}

    def read() -> Json:
        try:
            shared.update(read_shared(generation))
            for each in range(manifest.world_size) if is_resized else [rank]:
                by_rank.append(read_rank(generation, each))
        except DamagedError as error:
            return str(error)
        return None

    def resize() -> None:
        hosts = [theirs["host"] for theirs in everyone]
        try:
            if is_resized:
                made = resized(
                    shared,
                    by_rank,
                    [theirs["streams"] for theirs in everyone],
                    manifest.step,
                    rank,
                    is_leader=hosts.index(hosts[rank]) == rank,
                    adds_up=trainer is not None and trainer.reduction == "sum",
                )
            else:
                made = shared | by_rank[0]
            arrays.update(made)
            check_streams(arrays)
        except CheckpointError as error:
            raise CheckpointError(f"load_job: {generation.path}: {error}") from error

    for damage in together(communicator, "load_job", read):
        if damage is not None:
            raise DamagedError(damage)
    together(communicator, "load_job", resize)
    return arrays


def _go_on(
    communicator: Communicator,
    model: Model,
    trainer: Trainer | None,
    sampler: Sampler | None,
    generation: Generation,
    arrays: Arrays,
) -> Job:
    """Give model and sampler what was read, and compare among the ranks what they have now."""
    manifest, where = generation.manifest, f"load_job: {generation.path}"
    is_resized = communicator.size != manifest.world_size
    saver = 0 if is_resized else communicator.rank  # whose extras and sampler go on here
    states = _part(arrays, OPTIMIZER)
    settings = (model.optimizer if trainer is None else trainer.optimizer).settings()
    mine = None if trainer is None else trainer.get_states()
    before: Json = None  # of the sampler

    def check() -> None:
        check_optimizer(manifest.optimizer, settings, where)
        if mine is None:
            check_threads(manifest.optimizer, settings, where)
        else:
            _check_trainer(mine, states, communicator.rank, where)
        if is_resized and sampler is not None:
            check_resized_samplers(manifest.samplers, where)

    def restore_sampler() -> None:
        nonlocal before
        before = None if sampler is None else sampler.state_dict()
        _restore_sampler(manifest, saver, sampler, where)

    def restore_model() -> None:
        model.restore(Checkpoint(_part(arrays, MODEL), {}, (), states if trainer is None else None), where)
        for device, random_state in zip(model.devices(), restore_streams(arrays), strict=False):
            device.set_random_state(random_state)
        if trainer is None:
            model.optimizer.states_loaded()

    together(communicator, "load_job", check)
    try:
        together(communicator, "load_job", restore_sampler)
        together(communicator, "load_job", restore_model)
    except CheckpointError:
        if sampler is not None and before is not None:
            sampler.load_state_dict(before)
        raise
    has: Arrays = {}
    if trainer is not None:
        trainer.set_states(states)
        has = _of_trainer(trainer)
    everyone = together(communicator, "load_job", lambda: _compare(arrays, has | _arrays(model), where))
    parameters = [f"{MODEL}{name}" for name in model.get_params()]
    if getattr(model.optimizer, "keeps_equal", True) and any(
        theirs[name] != everyone[0][name] for theirs in everyone for name in parameters
    ):
        raise CheckpointError(f"{where}: the ranks have loaded different parameters")
    extra = {**(manifest.extras[saver] or {}), **_part(arrays, EXTRA)}
    return Job(manifest.step, manifest.world_size, extra, generation.path)


def _part(arrays: Arrays, prefix: str) -> Arrays:
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}


def _check_trainer(mine: Arrays, saved: Arrays, rank: int, where: str) -> None:
    """Raise CheckpointError unless a trainer with these states can go on from what was saved."""
    missing, unknown = sorted(mine.keys() - saved), sorted(saved.keys() - mine if rank == 0 else ())
    shapes = [
        f"{name!r} is {saved[name].dtype}{saved[name].shape}, here {array.dtype}{array.shape}"
        for name, array in mine.items()
        if name in saved and (array.shape, array.dtype) != (saved[name].shape, saved[name].dtype)
    ]
    if missing or unknown or shapes:
        raise CheckpointError(
            f"{where}: it is of another trainer: lacks {missing}, has {unknown}; {'; '.join(shapes)}"
        )


def _restore_sampler(manifest: Manifest, saver: int, sampler: Sampler | None, where: str) -> None:
    saved = manifest.samplers[saver]
    if (saved is None) != (sampler is None):
        has = (
            "was saved without a sampler; leave it out"
            if saved is None
            else "was saved with a sampler; give it too"
        )
        raise CheckpointError(f"{where}: it {has}")
    if sampler is not None:
        sampler.load_state_dict(saved)


def _compare(read: Arrays, has: Arrays, where: str) -> dict[str, str]:
    """Return a hash of each array that the model has now; CheckpointError unless those are what was read."""
    found, wanted = digests(has), digests(read)
    for name, value in wanted.items():
        if not name.startswith((EXTRA, STREAMS)) and found.get(name, value) != value:
            raise CheckpointError(f"{where}: {name!r} is not what was read after it was loaded")
    return found
