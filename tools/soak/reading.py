# SPDX-License-Identifier: Apache-2.0
"""Read damaged files of a reader, in a process of its own, and tell what came of each.

What lives here: the process. What does not: starting it again where it dies, and counting (readers.py).
"""

from __future__ import annotations

import os
import random
import resource
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from singa_lite.errors import SingaLiteError
from tools.soak.damage import MARK, damage
from tools.soak.file_readers.reader import Changed, Read, Reader, Refused, hash_of

SPARE_BYTES = 384 << 20  # that a read may take for files of some KB
RIGHT, TYPED, OTHER = "right", "typed", "other"
Files = dict[str, bytes]


@dataclass(frozen=True)
class Outcome:
    """What came of one read: one of the kinds above, or what was found; and how the file was damaged."""

    kind: str
    how: str = ""

    @property
    def is_finding(self) -> bool:
        return self.kind not in (RIGHT, TYPED, OTHER)


def files_in(folder: Path) -> Files:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def damaged_folder(
    reader: Reader, variants: Sequence[Files], folder: Path, rng: random.Random
) -> tuple[str, bool]:
    """Write the files of a reader with some of them damaged; return how, and whether checksums were made again."""
    files, other = dict(variants[0]), variants[min(1, len(variants) - 1)]
    name, action = rng.choice(sorted(files)), rng.random()
    how, is_forged = f"{name}: ", False
    if action < 0.8 or len(files) == 1:
        for each in dict.fromkeys([name, *rng.sample(sorted(files), rng.choice([0, 0, 0, 1]))]):
            changed = damage(files[each], other.get(each, b""), rng)
            files[each], how, is_forged = (
                changed.content,
                f"{how}{changed.how} ",
                is_forged or changed.is_forged,
            )
            is_forged |= changed.how == "swap" and not reader.is_bound
        if reader.seal is not None and rng.random() < 0.3:
            files[name], how, is_forged = reader.seal(name, files[name]), f"{how}, sealed", True
    elif action < 0.85:
        how += "missing"
        del files[name]
    elif action < 0.9:
        there = rng.choice(sorted(files))
        files[name], files[there], how = files[there], files[name], f"{how}swapped with {there}"
    elif action < 0.95:
        where = rng.choice([name + ".1", name.replace("0", "9"), "9" + name, "step-99999999/manifest.json"])
        files.setdefault(where, files[name])
        how += f"copied to {where}"
    for each, content in files.items():
        path = folder / each
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    if action >= 0.95 and len(files) > 1:
        odd = rng.choice(["folder", "link to itself", "link to nothing"])
        (folder / name).unlink()
        if odd == "folder":
            (folder / name).mkdir()
        else:
            (folder / name).symlink_to(folder / name if odd == "link to itself" else "nowhere")
        how += odd
    return how, is_forged


def outcome_of(reader: Reader, read: Read, folder: Path, right: Sequence[str], is_forged: bool) -> str:
    """Return the kind of an outcome."""
    try:
        value = hash_of(read(folder))
    except Refused:
        return TYPED
    except Changed as error:
        return str(error)
    except BaseException as error:
        causes: list[BaseException] = [error]
        while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None and cause not in causes:
            causes.append(cause)
        if any(isinstance(each, MemoryError) for each in causes):
            return f"memory: {error!r:.200}"
        return (
            TYPED
            if isinstance(error, (SingaLiteError, *reader.also))
            else f"{type(error).__name__}: {str(error)[:200]}"
        )
    if value in right:
        return RIGHT
    return OTHER if is_forged or reader.free else "another value without an error"


def written_beside(root: Path) -> list[str]:
    """Return and remove what lies where no reader may write."""
    known = {root / "in", root / "cwd", *(root / "cwd").glob("own*")}
    found = [path for path in (*root.iterdir(), *(root / "cwd").iterdir()) if path not in known]
    found = [path for path in found if not path.name.startswith("valid-")]
    found += [path for path in [Path(f"/{MARK}")] if path.exists()]
    for path in found:
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    return [path.name for path in found]


def read_files(connection: Connection, reader: Reader, root: Path, indices: Sequence[int], seed: int) -> None:
    """Read damaged files, one an index; send each index before and its Outcome after."""
    (root / "cwd").mkdir(exist_ok=True)
    os.chdir(root / "cwd")
    for number in range(reader.num_variants):
        if not (root / f"valid-{number}").exists():
            (root / f"valid-{number}").mkdir()
            reader.make(root / f"valid-{number}", number)
    variants, folder, read = (
        [files_in(root / f"valid-{n}") for n in range(reader.num_variants)],
        root / "in",
        reader.start(),
    )
    right = []
    for number in range(reader.num_variants):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(root / f"valid-{number}", folder)
        right.append(hash_of(read(folder)))
    written_beside(root)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + SPARE_BYTES, size + SPARE_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for index in indices:
        connection.send(index)
        rng = random.Random(f"{seed}/{reader.name}/{index}")
        shutil.rmtree(folder)
        folder.mkdir()
        how, is_forged = damaged_folder(reader, variants, folder, rng)
        kind = outcome_of(reader, read, folder, right, is_forged)
        if beside := written_beside(root):
            kind = f"written elsewhere: {beside}"
        connection.send(Outcome(kind, how))
