# SPDX-License-Identifier: Apache-2.0
"""``save_job``: what a rank saves of a job, and what all ranks agree on before they write.

What does not live here: extras, hashes and what is stored once (contents.py), the files (../generation.py), writing
them beside the training (saving.py), what loading shares (job.py).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..config import state
from ..errors import CheckpointError, check_bool, check_int
from ..generation import find_generations, make_folder
from ..graph.interrupts import deferred_interrupts
from ..model import Model
from .contents import as_json, check_samplers, digests, manifest_of, placed, split_extra
from .job import (
    JobState,
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
from .rank_arrays import Arrays
from .resize import EXTRA
from .saving import Saving
from .together import Json, together


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
        CheckpointError: on all ranks if one cannot write, if the steps or positions of their ShardedSamplers differ, or
            parameters that the dist_option keeps equal, or if ``folder`` has a job that this model neither saved nor
            loaded; generations before are as they were.
        OptionError: a bad argument. CommError: a peer has gone.
    """
    keep = check_int("save_job", "keep", keep, 1)
    check_bool("save_job", "block", block)
    check_arguments("save_job", folder, trainer, sampler)
    communicator, optimizer = parts_of(model, trainer, "save_job")
    job = state_of(model)
    job.wait()
    arrays: Arrays = {} if trainer is None else states_of_trainer(trainer)

    def collect() -> Json:
        more, values = split_extra(extra)
        arrays.update(arrays_of(model), **{EXTRA + name: array for name, array in more.items()})
        return {
            "step": optimizer.step_counter,
            "calls": getattr(optimizer, "num_calls", 0),
            "agreed": {
                "folder": absolute("save_job", folder),
                "keep": keep,
                "a sampler": sampler is not None,
            },
            "digests": digests(arrays),
            "sampler": None if sampler is None else as_json("sampler.state_dict()", sampler.state_dict()),
            "extra": values,
        }

    everyone = together(communicator, "save_job", collect)

    def begin() -> Json:
        _compare(everyone, None if trainer is not None else model)
        return _begin(folder, optimizer.step_counter, job) if communicator.rank == 0 else None

    path, number = together(communicator, "save_job", begin)[0]
    own, shared = placed([theirs["digests"] for theirs in everyone], arrays)
    manifest = manifest_of(optimizer, number, everyone, own, shared)
    mine = {name: arrays[name] for part in (own, shared) for name in part[communicator.rank]}
    job.known.add(manifest.id)
    job.folders.add(os.path.realpath(folder))
    with deferred_interrupts():  # or its thread would write on where the next save, after Ctrl-C, removes it
        saving = job.saving = Saving(communicator, Path(path), manifest, mine, keep, frozenset(job.damaged))
    if block:
        job.wait()
    return saving


def _compare(everyone: list[Json], model: Model | None) -> None:
    """Raise CheckpointError where the ranks are not at the same place; of ``model`` parameters are compared, too."""
    check_agreed("save_job", everyone)
    for rank, theirs in enumerate(everyone):
        if theirs["step"] != everyone[0]["step"]:
            raise CheckpointError(
                f"save_job: rank 0 has made {everyone[0]['step']} steps, but rank {rank} {theirs['step']}; "
                "call it after the same step on all ranks"
            )
        if theirs["calls"] != everyone[0]["calls"]:
            raise CheckpointError(
                f"save_job: after {everyone[0]['step']} steps rank 0 has made {everyone[0]['calls']} calls of the next "
                f"one, but rank {rank} {theirs['calls']}; call it after the same call on all ranks"
            )
    if model is not None:
        cure = "change it on all ranks alike, or copy rank 0's values by DistOpt.broadcast"
        check_equal_parameters("save_job", model, [theirs["digests"] for theirs in everyone], cure)
    check_samplers([theirs["sampler"] for theirs in everyone])


def _begin(folder: str | os.PathLike[str], step: int, job: JobState) -> Json:
    """Make the folder of a new generation; return it and its number."""
    others = [each for each in list(state.jobs.values()) if each is not job]
    pending = [each.saving for each in others if each.saving is not None]
    if any(
        os.path.realpath(each.path.parent) == os.path.realpath(folder) for each in pending if not each.is_over
    ):
        raise CheckpointError(
            f"save_job: another model has saved to {folder}, and nobody has waited for it; call wait() of what its "
            "save_job returned, or give each model a folder of its own"
        )
    whole, problems = find_generations(folder)
    newest = whole[0].manifest.number if whole else 0
    if whole and whole[0].manifest.id not in job.known:
        raise CheckpointError(
            f"save_job: {whole[0].path} was saved by another job; go on from it by load_job, or give another folder"
        )
    if problems and os.path.realpath(folder) not in job.folders:
        raise CheckpointError(
            f"save_job: {folder} has checkpoints that cannot be read: {'; '.join(problems.values())}"
        )
    job.damaged |= set(map(os.path.realpath, problems))
    return [str(make_folder(folder, step)), newest + 1]
