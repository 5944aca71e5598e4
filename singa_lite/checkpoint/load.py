# SPDX-License-Identifier: Apache-2.0
"""``load_job``: going on from the newest whole generation, on all ranks alike.

What does not live here: the files (../generation.py), the states of another number of ranks (resize.py), random streams
(streams.py), what saving shares (job.py).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ..comm.base import Communicator
from ..comm.host import this_host
from ..errors import CheckpointError, SingaLiteError
from ..generation import Generation, Manifest, find_generations
from ..model import Model
from ..model_file import Checkpoint
from ..opt.fixed_order import check_threads
from ..users_line import warn
from .contents import changed_settings, check_optimizer, check_resized_samplers, digests
from .job import (
    MODEL,
    Job,
    Sampler,
    Trainer,
    absolute,
    arrays_of,
    check_agreed,
    check_arguments,
    check_equal_parameters,
    parts_of,
    state_of,
    states_of_trainer,
)
from .rank_arrays import Arrays, DamagedError, read_rank, read_shared
from .resize import EXTRA, OPTIMIZER, resized
from .streams import DEVICES, check_streams, restore_streams, stream_ids
from .streams import PREFIX as STREAMS
from .together import Json, together


def load_job(
    folder: str | os.PathLike[str],
    model: Model,
    *,
    trainer: Trainer | None = None,
    sampler: Sampler | None = None,
) -> Job | None:
    """Continue from the newest generation in ``folder`` that is whole; a collective.

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
        OptionError: an argument is of another type. GraphError: the model is not compiled yet.
    """
    check_arguments("load_job", folder, trainer, sampler)
    communicator, optimizer = parts_of(model, trainer, "load_job")
    state_of(model).wait()

    def find() -> Json:
        model.check_compiled("load_job")
        agreed = {"folder": absolute("load_job", folder), "a sampler": sampler is not None}
        seeds = [device.get_random_state()[0] for device in model.devices()]
        now = stream_ids() | {DEVICES: seeds}
        found = _found(folder) if communicator.rank == 0 else None
        return {"agreed": agreed, "streams": now, "host": this_host(), "found": found}

    everyone = together(communicator, "load_job", find)
    check_agreed("load_job", everyone)
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
            warn(f"load_job: {problem}; going on from {generation.path.name}")
        job = _go_on(communicator, model, trainer, sampler, generation, arrays)
        known = state_of(model)
        known.known |= {each["id"] for _, each in found["generations"]}
        known.damaged |= set(damaged)
        known.damaged.discard(generation.manifest.id)  # it was repaired if it was there
        known.folders.add(os.path.realpath(folder))
        _warn_of_changes(generation, optimizer)
        return job
    if problems:
        raise CheckpointError(f"load_job: no generation in {folder} can be read: {'; '.join(problems)}")
    return None


def _warn_of_changes(generation: Generation, optimizer: Any) -> None:
    """Warn where the job goes on with another dist_option or other settings of the optimizer."""
    saved_with, has = generation.manifest.dist_option, getattr(optimizer, "dist_option", None)
    if saved_with != has:
        warn(
            f"load_job: {generation.path.name} was saved with dist_option {saved_with!r}, and goes on with {has!r}"
        )
    if changed := changed_settings(generation.manifest.optimizer, optimizer.settings()):
        warn(f"load_job: {generation.path.name} was saved with another {', '.join(changed)} of the optimizer")


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
    saved_sampler, states = manifest.samplers[saver], _part(arrays, OPTIMIZER)
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
        if (saved_sampler is None) != (sampler is None):
            cure = (
                "without a sampler; leave it out" if saved_sampler is None else "with a sampler; give it too"
            )
            raise CheckpointError(f"{where}: it was saved {cure}")

    def restore_sampler() -> None:
        nonlocal before
        if sampler is not None:
            before = sampler.state_dict()
            sampler.load_state_dict(saved_sampler)

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
    except SingaLiteError:
        if sampler is not None and before is not None:
            sampler.load_state_dict(before)
        raise
    has: Arrays = {}
    if trainer is not None:
        trainer.set_states(states)
        has = states_of_trainer(trainer)
    everyone = together(communicator, "load_job", lambda: _compare(arrays, has | arrays_of(model), where))

    def compare_parameters() -> None:  # that this rank trains
        check_equal_parameters(where, model, everyone, "load a checkpoint of an earlier step")

    together(communicator, "load_job", compare_parameters)
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


def _compare(read: Arrays, has: Arrays, where: str) -> dict[str, str]:
    """Return a hash of each array that the model has now; CheckpointError unless those are what was read."""
    found, wanted = digests(has), digests(read)
    for name, value in wanted.items():
        if not name.startswith((EXTRA, STREAMS)) and found.get(name, value) != value:
            raise CheckpointError(f"{where}: {name!r} is not what was read after it was loaded")
    return found
