# SPDX-License-Identifier: Apache-2.0
"""CIFAR-10: 50,000 + 10,000 colour photographs of ten classes, in the binary format of the original distribution.

They are read from the six ``.bin`` files or from the original archive, which is never unpacked to disk, and
fetched from the page of the data set's authors where the network allows. Random images stand in for them only
when a caller requests those by name.

Here are files and bytes only: order is in ``sampler``, scaling in ``loader``, random crops in ``augment``.
Source: Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009.
"""

from __future__ import annotations

import gzip
import os
import stat
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import numpy as np

from ..errors import DataError
from .cache import as_path, cache_root, locked, whole_file
from .synthetic import check_counts

if TYPE_CHECKING:
    import tarfile

Array = np.ndarray[Any, Any]
TRAIN_FILES = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
TEST_FILE = "test_batch.bin"
FILES = (*TRAIN_FILES, TEST_FILE)
SUBFOLDER = "cifar-10-batches-bin"  # what the archive unpacks to
IMAGE_SHAPE = (3, 32, 32)
RECORD_BYTES = 1 + 3 * 32 * 32  # a label, then the red, green and blue planes, row by row
OFFICIAL_BYTES = 10_000 * RECORD_BYTES  # each of the six files
SILENCE_S, FETCH_TIMEOUT_S = 60, 1800  # without a byte; for all of it
CHUNK_BYTES = 1 << 20
MAX_MEMBERS = 1000  # of an archive; the original has 9


@dataclass(frozen=True)
class Archive:
    """The original distribution."""

    url: str = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
    num_bytes: int = 170_052_171
    sha256: str = "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"


ARCHIVE = Archive()
ARCHIVE_NAME = "cifar-10-binary.tar.gz"


class Cifar(NamedTuple):
    """The four arrays, as stored: uint8, planes red, green, blue.

    Attributes:
        train_images: shape (50000, 3, 32, 32).
        train_labels: shape (50000,), values 0 to 9.
        test_images: shape (10000, 3, 32, 32).
        test_labels: shape (10000,).
    """

    train_images: Array
    train_labels: Array
    test_images: Array
    test_labels: Array

    @property
    def note(self) -> str:
        """What differs from the published data set's size, or "" when nothing does."""
        sizes = len(self.train_labels), len(self.test_labels)
        if sizes == (50_000, 10_000):
            return ""
        return "{:,} training and {:,} test images; all of CIFAR-10 are 50,000 and 10,000".format(*sizes)


def load_cifar10(folder: str | Path | None = None) -> Cifar:
    """Return CIFAR-10 from ``folder``, or from the cache, fetching it there first.

    A folder's files may have any whole number of records; ``Cifar.note`` is set when it is not the published one.

    Args:
        folder: holds the six ``.bin`` files, or the folder cifar-10-batches-bin with them, or
            cifar-10-binary.tar.gz; looked for in this order. None is the cache (SINGA_LITE_CACHE).

    Returns:
        New arrays; 50,000 + 10,000 images unless the folder has others.

    Raises:
        DataError: naming the file that is missing or damaged; or the images are neither cached nor
            reachable. They are never made up.

    Example:
        >>> load_cifar10("cifar").train_images.shape  # doctest: +SKIP
        (50000, 3, 32, 32)
    """
    if folder is None:
        return read_archive(fetch_cifar10())
    folder = as_path("load_cifar10", folder)
    for candidate in (folder, folder / SUBFOLDER):
        if any(os.path.exists(candidate / name) for name in FILES):
            return read_folder(candidate)
    if os.path.exists(folder / ARCHIVE_NAME):
        return read_archive(folder / ARCHIVE_NAME)
    what = f"holds neither {TRAIN_FILES[0]} nor {SUBFOLDER} nor {ARCHIVE_NAME}"
    if not os.path.isdir(folder):
        what = "no such folder"
    elif not os.access(folder, os.X_OK):
        what = "permission denied"
    raise DataError(f"CIFAR-10 folder {folder}: {what}")


def synthetic_cifar10(num_train: int, num_test: int, seed: int = 0) -> Cifar:
    """Make random images in the shape of CIFAR-10, to try a script or to measure time without the data.

    Each class has a colour; its images are uniform noise around it, so that a model can learn to classify them.

    Args:
        num_train: 1 to 10,000,000.
        num_test: likewise.
        seed: >= 0; the same seed gives the same images.

    Raises:
        OptionError: an argument is out of range.

    Example:
        >>> synthetic_cifar10(20, 10).test_images.shape
        (10, 3, 32, 32)
    """
    check_counts("synthetic_cifar10", num_train, num_test, seed)
    rng = np.random.default_rng(seed)
    colours = rng.integers(0, 128, (10, 3, 1, 1), dtype=np.uint8)
    parts: list[Array] = []
    for count in (num_train, num_test):
        labels = rng.integers(0, 10, count, dtype=np.uint8)
        images = rng.integers(0, 128, (count, *IMAGE_SHAPE), dtype=np.uint8)
        images += colours[labels]
        parts += [images, labels]
    return Cifar(*parts)


# ---- the binary format ---------------------------------------------------------------------------------


def read_folder(folder: Path) -> Cifar:
    """Read the six files of ``folder``.

    Raises:
        DataError: naming the file and what is wrong with it.
    """
    where, contents = f"CIFAR-10 folder {folder}", {}
    for name in FILES:
        try:
            if not stat.S_ISREG((folder / name).stat().st_mode):  # reading another may never end
                raise DataError(f"{where}: {name} is not a regular file")
            contents[name] = (folder / name).read_bytes()
        except FileNotFoundError:
            raise DataError(f"{where}: {name} is missing; it needs {', '.join(FILES)}") from None
        except (OSError, MemoryError) as error:
            raise DataError(f"{where}: cannot read {name}: {type(error).__name__} {error}") from error
    return _join(str(folder), contents)


def read_archive(path: Path) -> Cifar:
    """Read the six files out of the archive, straight into memory.

    Only regular members with exactly the names of the original are looked at; others are passed over.

    Raises:
        DataError: a member is missing, there twice, or longer than the original; or the archive is damaged.
    """
    import tarfile  # Note [imports]

    if not path.is_file():  # reading a pipe or device may never end
        raise DataError(f"{path}: is not a regular file")
    contents: dict[str, bytes] = {}
    members = {f"{SUBFOLDER}/{name}": name for name in FILES}
    try:
        with gzip.open(path) as stream:
            heads = _Heads(path, stream)
            with tarfile.open(fileobj=heads, mode="r|") as archive:  # type: ignore[call-overload]  # it has read()
                for number, member in enumerate(archive):
                    heads.expect(member.size if number < MAX_MEMBERS else -CHUNK_BYTES)
                    if member.name in members:
                        contents[members[member.name]] = _read_member(path, archive, member, contents)
            while stream.read(CHUNK_BYTES):  # to its end, where gzip compares the checksum
                pass
    except (OSError, EOFError, ValueError, zlib.error, tarfile.TarError) as error:
        raise DataError(f"{path}: damaged or no .tar.gz: {error}") from error
    if missing := [name for name in FILES if name not in contents]:
        raise DataError(f"{path}: {SUBFOLDER}/{missing[0]} is missing; is this {ARCHIVE_NAME}?")
    return _join(str(path), contents)


class _Heads:
    """A stream of a tar archive that refuses more than CHUNK_BYTES of headers at a time: memory is taken for them."""

    def __init__(self, path: Path, stream: gzip.GzipFile) -> None:
        self._path, self._stream = path, stream
        self.expect(0)

    def expect(self, num_bytes: int) -> None:
        """Allow so many bytes of a member, and the next headers."""
        self._left = num_bytes + CHUNK_BYTES

    def read(self, size: int) -> bytes:
        chunk = self._stream.read(size)
        self._left -= len(chunk)
        if self._left < 0:
            raise DataError(f"{self._path}: too many members, or too long names; is this {ARCHIVE_NAME}?")
        return chunk


def _read_member(
    path: Path, archive: tarfile.TarFile, member: tarfile.TarInfo, known: dict[str, bytes]
) -> bytes:
    file = archive.extractfile(member) if member.isreg() else None
    if file is None or Path(member.name).name in known:
        raise DataError(f"{path}: {member.name} is there twice or is not a plain file")
    if member.size > OFFICIAL_BYTES:  # before memory is taken for it
        raise DataError(f"{path}: {member.name} has {member.size} bytes, more than {OFFICIAL_BYTES}")
    return file.read()


def parse_records(where: str, raw: bytes) -> tuple[Array, Array]:
    """Decode one file of the binary format: records of 1 byte label and 3 x 32 x 32 bytes of pixels.

    Args:
        where: named in errors.
        raw: its bytes.

    Returns:
        (images, labels): uint8 (count, 3, 32, 32) and (count,), views of ``raw``.

    Raises:
        DataError: no record, a part of a record, or a label above 9.
    """
    count, rest = divmod(len(raw), RECORD_BYTES)
    if count < 1 or rest:
        raise DataError(
            f"{where}: {len(raw)} bytes are not a whole number (>= 1) of records of {RECORD_BYTES} bytes; "
            f"{rest} are left over after {count}"
        )
    records = np.frombuffer(raw, np.uint8).reshape(count, RECORD_BYTES)
    labels = records[:, 0]
    if labels.max() > 9:
        first = int(np.argmax(labels > 9))
        raise DataError(f"{where}: record {first} has label {labels[first]}; CIFAR-10 labels are 0 to 9")
    return records[:, 1:].reshape(count, *IMAGE_SHAPE), labels


def _join(where: str, contents: dict[str, bytes]) -> Cifar:
    parts = [parse_records(f"{where}: {name}", contents[name]) for name in FILES]
    images, labels = zip(*parts, strict=True)
    train_images, train_labels = np.concatenate(images[:-1]), np.concatenate(labels[:-1])
    return Cifar(train_images, train_labels, images[-1].copy(), labels[-1].copy())


# ---- fetching ------------------------------------------------------------------------------------------


def fetch_cifar10(folder: str | Path | None = None) -> Path:
    """Fetch the original archive to ``folder`` unless it is there; return its path.

    Safe for several processes at once: one fetches, the others wait. What is fetched is checked (size and sha256)
    before it takes its name. A file of that name with other contents is replaced.

    Args:
        folder: made if need be; None is ``cifar10`` in the cache (SINGA_LITE_CACHE).

    Raises:
        DataError: the network does not allow it, or what came is not the archive; the text says what to do instead.
    """
    folder = cache_root() / "cifar10" if folder is None else as_path("fetch_cifar10", folder)
    path = folder / ARCHIVE_NAME
    try:
        if _is_whole(path):
            return path
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder / "lock", 2 * FETCH_TIMEOUT_S):
            if not _is_whole(path):  # another process may have fetched it while this one waited
                _fetch(path)
    except OSError as error:
        raise DataError(f"CIFAR-10: cannot write to {folder}: {error}; name another folder") from error
    return path


def _is_whole(path: Path) -> bool:
    import hashlib  # Note [imports]

    if not path.is_file() or path.stat().st_size != ARCHIVE.num_bytes:
        return False
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest() == ARCHIVE.sha256


def _fetch(path: Path) -> None:
    import http.client  # Note [imports]
    import urllib.request  # Note [imports]

    with whole_file(path) as file:
        try:
            with urllib.request.urlopen(ARCHIVE.url, timeout=SILENCE_S) as answer:
                num_bytes, sha256 = _copy(answer, file)
        except (OSError, http.client.HTTPException) as error:
            raise DataError(
                f"CIFAR-10 is not in {path.parent} and {ARCHIVE.url} cannot be fetched: {error}. Fetch that file "
                f"(170 MB) where there is a network, put it into a folder, packed or unpacked, and name the folder: "
                "load_cifar10(folder), or --cifar-dir of the examples"
            ) from error
        if (num_bytes, sha256) != (ARCHIVE.num_bytes, ARCHIVE.sha256):
            raise DataError(
                f"CIFAR-10: {ARCHIVE.url} gave {num_bytes} bytes with sha256 {sha256}, expected "
                f"{ARCHIVE.num_bytes} with {ARCHIVE.sha256}; nothing of it was used"
            )


def _copy(answer: BinaryIO, file: BinaryIO) -> tuple[int, str]:
    """Copy to the end, or a little past the expected size; (bytes, sha256) of what was written."""
    import hashlib  # Note [imports]

    digest, num_bytes = hashlib.sha256(), 0
    end = time.monotonic() + FETCH_TIMEOUT_S
    while num_bytes <= ARCHIVE.num_bytes and (chunk := answer.read(CHUNK_BYTES)):
        if time.monotonic() > end:
            raise TimeoutError(f"{num_bytes} bytes after {FETCH_TIMEOUT_S} s")
        file.write(chunk)
        digest.update(chunk)
        num_bytes += len(chunk)
    return num_bytes, digest.hexdigest()
