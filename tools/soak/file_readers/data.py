# SPDX-License-Identifier: Apache-2.0
"""Files of data sets: MNIST's and CIFAR-10's folders, archives and caches."""

from __future__ import annotations

import gzip
import hashlib
import io
import pickle
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from singa_lite.data import cifar, mnist, synthetic_cifar10, synthetic_mnist
from tools.soak.file_readers.reader import Read, Refused, hash_of


def digits(number: int) -> dict[str, bytes]:
    return dict(zip(mnist.IDX_SHA256, map(mnist.to_idx, synthetic_mnist(5, 3, number)), strict=True))


def make_idx(folder: Path, number: int) -> None:
    for name, content in digits(number).items():
        (folder / name).write_bytes(content)


def make_idx_gz(folder: Path, number: int) -> None:
    for name, content in digits(number).items():
        (folder / f"{name}.gz").write_bytes(gzip.compress(content))


def arrays_of(found: Any) -> object:
    """Return a hash of images and labels, once they are what every caller may expect."""
    for images, labels in (found[:2], found[2:]):
        assert (
            images.dtype == labels.dtype == np.uint8 and len(images) == len(labels) >= 1 and labels.max() <= 9
        )
        assert images.shape[1:] in ((28, 28), (3, 32, 32))
    return hash_of(tuple(found))


def start_idx() -> Read:
    return lambda folder: arrays_of(mnist.load_mnist(folder))


def start_idx_cache() -> Read:
    mnist.IDX_SHA256.update({name: hashlib.sha256(raw).hexdigest() for name, raw in digits(0).items()})

    def read(folder: Path) -> object:
        found = mnist._verified_files(folder)
        if found is None:
            raise Refused
        return arrays_of([mnist.parse_idx(name, raw) for name, raw in found.items()])

    return read


def wheel_of(path: Path) -> mnist.Package:
    rng = np.random.default_rng(3)
    parts = tuple(
        ((rng.integers(0, 256, (n, 784)) / 256).astype(np.float32), rng.integers(0, 10, n)) for n in (2, 1, 1)
    )
    text = pickle.dumps(parts, protocol=3).replace(b"numpy._core.multiarray", b"numpy.core.multiarray")
    packed = gzip.compress(text, mtime=0)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(zipfile.ZipInfo("digits/all.pkl.gz"), packed)
    hashes = [hashlib.sha256(content).hexdigest() for content in (path.read_bytes(), packed)]
    return mnist.Package("digits==1", hashes[0], "digits/all.pkl.gz", hashes[1])


def make_wheel(folder: Path, number: int) -> None:
    wheel_of(folder / "digits.whl")


def start_wheel() -> Read:
    package = wheel_of(Path("own.whl"))
    return lambda folder: sorted(mnist.read_wheel(folder / "digits.whl", package).items())


def records(number: int) -> dict[str, bytes]:
    found = synthetic_cifar10(5, 1, number)
    rows = [
        np.concatenate([labels[:, None], images.reshape(len(images), -1)], axis=1)
        for images, labels in (found[:2], found[2:])
    ]
    return dict(zip(cifar.FILES, [*(row.tobytes() for row in rows[0]), rows[1].tobytes()], strict=True))


def make_records(folder: Path, number: int) -> None:
    for name, content in records(number).items():
        (folder / name).write_bytes(content)


def archive(number: int) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as made:
        for name, content in records(number).items():
            info = tarfile.TarInfo(f"{cifar.SUBFOLDER}/{name}")
            info.size = len(content)
            made.addfile(info, io.BytesIO(content))
    return gzip.compress(packed.getvalue(), mtime=0)


def make_archive(folder: Path, number: int) -> None:
    (folder / cifar.ARCHIVE_NAME).write_bytes(archive(number))


def start_records() -> Read:
    return lambda folder: arrays_of(cifar.load_cifar10(folder))


def start_archive_cache() -> Read:
    """Read the archive in the cache, where no network can replace a damaged one."""
    content = archive(0)
    cifar.ARCHIVE = cifar.Archive("file:///nowhere", len(content), hashlib.sha256(content).hexdigest())
    return lambda folder: arrays_of(cifar.read_archive(cifar.fetch_cifar10(folder)))
