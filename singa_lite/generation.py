# SPDX-License-Identifier: Apache-2.0
"""A generation of a job checkpoint: a folder with the files of all ranks, and the manifest that makes it count.

What lives here: names of files, the manifest, finding generations and removing old ones. What does not: the files of
ranks, what they save, and their agreement (checkpoint/), writing a file atomically (files.py).

Note [generations]: FOLDER/step-00000120/ has a ``rank-00003.safetensors`` of each rank, with the arrays that it has
alone and its part of those that are equal on all ranks, and ``manifest.json``, written last and by renaming: a folder
without it does not count, so that a job killed while it saves leaves the generation before. A manifest has a hash of
each array, of its dtype, shape and bytes, and one of its own values. ``number`` grows with every generation of a
folder, also where a job has gone back to an earlier step: the newest is that of the largest. A new one never has the
name of an unfinished one that it removes: if another job is still writing that, it finds no folder, and fails.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
from collections.abc import Collection
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from .errors import CheckpointError
from .files import PART_SUFFIX, atomic_file, check_regular, sealed, sync_folder, unsealed

FORMAT = 2  # 1 had a file of a rank's own arrays and one of its part of the others, and hashes by SHA-256
LATEST_S = 1e12  # of times, seconds
MANIFEST = "manifest.json"
FOLDER = re.compile(r"step-\d{8,}(\.\d+)?")
_NAMES = rf"rank-\d{{5,}}\.safetensors|{re.escape(MANIFEST)}"
# a file, one that is being written, and what NFS leaves of one that was removed while it was open
OWN_FILE = re.compile(rf"{_NAMES}|\.({_NAMES})\.\w+{re.escape(PART_SUFFIX)}|\.nfs\w+")

Json = Any


@dataclass(frozen=True)
class Manifest:
    """The manifest of a generation: its step, ranks, dist_option and hashes.

    Attributes:
        format: version of this format.
        number: grows with every generation of a folder.
        id: that no other generation has, random.
        step: optimizer steps made when it was saved.
        world_size: ranks that saved it.
        saved_at: seconds since 1970.
        versions: of Python, numpy and singa_lite.
        optimizer: what ``Optimizer.settings`` gave.
        dist_option: of the DistOpt, None without one.
        samplers, extras: of each rank, JSON values; None where it had none.
        own, shared: of each rank's file, the arrays that it has alone, those of all, and their hashes, see
            ``checkpoint.rank_arrays.digest``.
    """

    format: int
    number: int
    id: str
    step: int
    world_size: int
    saved_at: float
    versions: dict[str, str]
    optimizer: dict[str, Json]
    dist_option: str | None
    samplers: list[Json]
    extras: list[Json]
    own: list[dict[str, str]]
    shared: list[dict[str, str]]

    def to_json(self) -> dict[str, Json]:
        """Return a JSON object."""
        return asdict(self)

    @staticmethod
    def of_json(values: Json) -> Manifest:
        """Return the manifest of a JSON object; CheckpointError if it is not one."""
        names = {field.name for field in fields(Manifest)}
        if not isinstance(values, dict) or values.get("format") != FORMAT or set(values) != names:
            raise CheckpointError(f"expected a manifest of format {FORMAT}, got other values")
        manifest = Manifest(**values)
        whole = [getattr(manifest, name) for name in ("number", "step", "world_size")]
        lists = (manifest.samplers, manifest.extras, manifest.own, manifest.shared)
        if (
            not all(type(value) is int and value >= 0 for value in whole)
            or not isinstance(manifest.saved_at, (int, float))
            or not 0 <= manifest.saved_at < LATEST_S
            or not isinstance(manifest.id, str)
            or not isinstance(manifest.dist_option, (str, type(None)))
            or not all(isinstance(each, dict) for each in (manifest.versions, manifest.optimizer))
            or not all(isinstance(each, list) and len(each) == manifest.world_size for each in lists)
            or not all(isinstance(extra, (dict, type(None))) for extra in manifest.extras)
            or not all(_is_entry(entry) for entry in manifest.own + manifest.shared)
        ):
            raise CheckpointError("its manifest has values that no job writes")
        return manifest


def new_id() -> str:
    """Return what tells a new generation from all others."""
    return os.urandom(8).hex()


def _is_entry(entry: Json) -> bool:
    return isinstance(entry, dict) and all(isinstance(value, str) for value in entry.values())


@dataclass(frozen=True)
class Generation:
    """A whole generation: its folder and its manifest."""

    path: Path
    manifest: Manifest


def rank_file(rank: int) -> str:
    """Return the name of a rank's file."""
    return f"rank-{rank:05d}.safetensors"


# ---- folders ---------------------------------------------------------------------------------------------


def find_generations(folder: str | os.PathLike[str]) -> tuple[list[Generation], dict[Path, str]]:
    """Return the generations of ``folder`` that count, the newest first, and why those of other paths cannot be read.

    Raises:
        CheckpointError: ``folder`` is there and is not a folder, or it or a manifest cannot be read by the system.
    """
    names, before = _names_in(folder), list[str]()
    found, problems = list[Generation](), dict[Path, str]()
    # a job that saves there may remove what was listed, but not before it has made a newer one
    while not found and names != before:
        found, problems = _read_manifests(folder, names)
        names, before = _names_in(folder), names
    return sorted(found, key=lambda generation: -generation.manifest.number), problems


def _names_in(folder: str | os.PathLike[str]) -> list[str]:
    """Return the names that generations may have; none if there is no such folder."""
    try:
        return sorted(filter(FOLDER.fullmatch, os.listdir(folder)))
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:  # ValueError: a name with a zero byte
        raise CheckpointError(f"cannot read the folder {folder}: {error}") from error


def _read_manifests(
    folder: str | os.PathLike[str], names: list[str]
) -> tuple[list[Generation], dict[Path, str]]:
    """Return the generations with these names that count, and why those of other paths cannot be read."""
    found, problems = [], {}
    for path in (Path(folder) / name for name in names):
        try:
            check_regular(path / MANIFEST)
            found.append(Generation(path, _manifest((path / MANIFEST).read_bytes())))
        except (FileNotFoundError, NotADirectoryError):
            continue  # never finished, or being removed
        except CheckpointError as error:
            problems[path] = f"{path / MANIFEST}: {error}"
        except (OSError, MemoryError) as error:  # which says nothing of the file
            raise CheckpointError(
                f"cannot read {path / MANIFEST}: {type(error).__name__}: {error}"
            ) from error
    return found, problems


@functools.lru_cache(maxsize=8)  # every save reads those of the generations that are kept
def _manifest(content: bytes) -> Manifest:
    return Manifest.of_json(unsealed(content))


def make_folder(folder: str | os.PathLike[str], step: int) -> Path:
    """Make a folder for a new generation, and remove those that were never finished.

    Raises:
        CheckpointError: one of those has files that no job writes; or the system cannot.
    """
    try:
        parent = Path(os.path.abspath(folder))  # a thread writes there, whatever the current folder is then
        parent.mkdir(parents=True, exist_ok=True)
        names = os.listdir(parent)
        unfinished = [path for name in names if _is_unfinished(path := parent / name)]
        for path in unfinished:
            if foreign := _foreign_files(path):
                raise CheckpointError(
                    f"{path} has the name of a checkpoint that was never finished, which a save removes, but has other "
                    f"files, {foreign[:3]}; move it, or give another folder"
                )
        made, number = parent / f"step-{step:08d}", 0
        while made.name in names:  # also of an unfinished one, see Note [generations]
            number += 1
            made = parent / f"step-{step:08d}.{number}"
        for path in unfinished:
            _remove(path)
        made.mkdir()
    except (OSError, ValueError) as error:  # ValueError: a name with a zero byte
        raise CheckpointError(f"cannot make a folder in {folder}: {error}") from error
    return made


def _is_unfinished(path: Path) -> bool:
    """Return whether a folder, or a link, has the name of a generation and no manifest; a file is left alone."""
    is_ours = FOLDER.fullmatch(path.name) is not None and (path.is_dir() or path.is_symlink())
    return is_ours and not (path / MANIFEST).exists()


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Make the generation in ``path`` count; all its files must be there."""
    sync_folder(path)
    sync_folder(path.parent)
    with atomic_file(path / MANIFEST) as file:
        file.write(sealed(manifest.to_json()))


def remove_old(folder: str | os.PathLike[str], keep: int, damaged: Collection[str]) -> None:
    """Remove all but the newest ``keep`` generations, and damaged ones; one that has files of others stays.

    Each stops counting before its files go. Of a symlink to one the link goes alone.

    Args:
        damaged: ids, or the real paths of folders whose manifests cannot be read.
    """
    try:
        found, problems = find_generations(folder)
    except CheckpointError:  # the next save says so, or removes them
        return
    whole = [generation for generation in found if generation.manifest.id not in damaged]
    old = [generation.path for generation in found if generation not in whole[:keep]]
    old += [path for path in problems if os.path.realpath(path) in damaged]
    for path in old:
        if not _foreign_files(path):
            with suppress(OSError):  # it counts or it does not; what is left of it goes with the next save
                _remove(path)


def _foreign_files(path: Path) -> list[str]:
    """Return the names in a generation's folder that are not the generation's own."""
    if not path.is_dir():  # a link to a folder that is gone
        return []
    return sorted(
        entry.name
        for entry in os.scandir(path)
        if not (OWN_FILE.fullmatch(entry.name) and entry.is_file(follow_symlinks=False))
    )


def _remove(path: Path) -> None:
    if path.is_symlink():
        path.unlink()
    else:
        (path / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(path)
