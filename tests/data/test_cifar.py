# SPDX-License-Identifier: Apache-2.0
"""CIFAR-10 from a folder, from the archive and fetched from a file:// address; no network is used."""

import gzip
import hashlib
import io
import multiprocessing
import os
import sys
import tarfile
import time
import tracemalloc
import zlib

import numpy as np
import pytest

from singa_lite.data import __main__ as command
from singa_lite.data import cifar, fetch_cifar10, load_cifar10, synthetic_cifar10
from singa_lite.errors import DataError, OptionError
from tests.limits import LIMIT_S

COUNTS = dict(zip(cifar.FILES, (3, 1, 2, 1, 1, 4), strict=True))


@pytest.fixture(autouse=True)
def no_outside(monkeypatch, tmp_path):
    """An empty cache, and an origin that does not exist."""
    monkeypatch.setenv("SINGA_LITE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cifar, "ARCHIVE", cifar.Archive(url=(tmp_path / "no origin").as_uri()))


@pytest.fixture
def records():
    """File name -> records as the format has them: label, red, green, blue."""
    rng = np.random.default_rng(5)
    made = {name: rng.integers(0, 256, (count, 3073), dtype=np.uint8) for name, count in COUNTS.items()}
    for array in made.values():
        array[:, 0] %= 10
    return made


@pytest.fixture
def folder(tmp_path, records):
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, array in records.items():
        (folder / name).write_bytes(array.tobytes())
    return folder


def pack(path, members):
    """A .tar.gz of (name, content) members; a content that is a str is a TarInfo type instead."""
    with tarfile.open(path, "w:gz") as archive:
        for name, content in members:
            info = tarfile.TarInfo(name)
            if isinstance(content, bytes):
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
            else:
                info.type, info.linkname = content.encode(), "elsewhere"
                archive.addfile(info)
    return path


def official(records):
    return [(f"{cifar.SUBFOLDER}/{name}", array.tobytes()) for name, array in records.items()]


def check(images, records):
    train = np.concatenate([records[name] for name in cifar.TRAIN_FILES])
    test = records[cifar.TEST_FILE]
    assert images.train_labels.tolist() == [record[0] for record in train.tolist()]
    assert images.test_labels.tolist() == [record[0] for record in test.tolist()]
    for found, expected in ((images.train_images, train), (images.test_images, test)):
        assert found.shape == (len(expected), 3, 32, 32) and found.dtype == np.uint8
        for number, colour, row, column in ((0, 0, 0, 0), (1, 1, 5, 7), (2, 2, 31, 31), (3, 2, 0, 31)):
            assert (
                found[number, colour, row, column] == expected[number, 1 + 1024 * colour + 32 * row + column]
            )
        np.testing.assert_array_equal(found.reshape(len(expected), -1), expected[:, 1:])


# ---- a folder, an archive ------------------------------------------------------------------------------


def test_the_six_files_are_read_in_order_from_the_folder_its_subfolder_or_the_archive(folder, records):
    check(load_cifar10(folder), records)
    subfolder = folder.rename(folder.with_name(cifar.SUBFOLDER))
    check(load_cifar10(str(subfolder.parent)), records)
    archives = folder.with_name("packed")
    archives.mkdir()
    pack(archives / cifar.ARCHIVE_NAME, [(f"{cifar.SUBFOLDER}/readme.html", b"hello"), *official(records)])
    check(load_cifar10(archives), records)
    assert [path.name for path in archives.iterdir()] == [cifar.ARCHIVE_NAME]


def test_the_arrays_can_be_changed_without_harm(folder):
    for array in load_cifar10(folder):
        array += 1


def test_a_size_that_is_not_the_published_one_is_named(folder):
    assert load_cifar10(folder).note == "8 training and 4 test images; all of CIFAR-10 are 50,000 and 10,000"
    labels = np.zeros(50_000, np.uint8)
    assert cifar.Cifar(labels, labels, labels[:10_000], labels[:10_000]).note == ""


@pytest.mark.parametrize(
    ("name", "damage", "complaint"),
    [
        ("data_batch_1.bin", lambda raw: raw[:-1], "9218 bytes .* 3072 are left over after 2"),
        ("data_batch_4.bin", lambda raw: raw + b"\0", "3074 bytes .* 1 are left over after 1"),
        ("test_batch.bin", lambda raw: b"", "0 bytes"),
        ("test_batch.bin", lambda raw: raw[:3073] + b"\x0a" + raw[3074:], "record 1 has label 10"),
    ],
)
def test_a_damaged_file_is_named_with_what_is_wrong(folder, records, name, damage, complaint):
    damaged = damage(records[name].tobytes())
    (folder / name).write_bytes(damaged)
    with pytest.raises(DataError, match=rf"{name}: .*{complaint}") as caught:
        load_cifar10(folder)
    assert str(folder) in str(caught.value)
    packed = {**{key: array.tobytes() for key, array in records.items()}, name: damaged}
    path = pack(folder / "x.tar.gz", [(f"{cifar.SUBFOLDER}/{key}", raw) for key, raw in packed.items()])
    with pytest.raises(DataError, match=rf"{name}: .*{complaint}"):
        cifar.read_archive(path)


@pytest.mark.parametrize("name", ["data_batch_3.bin", cifar.ARCHIVE_NAME])
def test_a_file_that_is_not_regular_is_refused_and_not_read(folder, tmp_path, name):
    if name == cifar.ARCHIVE_NAME:
        folder = tmp_path / "packed"
        folder.mkdir()
    for make in (os.mkfifo, lambda path: os.symlink("/dev/zero", path)):
        (folder / name).unlink(missing_ok=True)
        make(folder / name)
        with pytest.raises(DataError, match=rf"{name}.* is not a regular file"):
            load_cifar10(folder)


def test_a_file_that_does_not_fit_into_memory_is_a_data_error(folder, monkeypatch):
    def read_bytes(path):
        raise MemoryError

    monkeypatch.setattr(cifar.Path, "read_bytes", read_bytes)
    with pytest.raises(DataError, match=r"cannot read data_batch_1\.bin: MemoryError"):
        load_cifar10(folder)


def test_a_missing_file_and_a_missing_folder_are_named(folder):
    (folder / "data_batch_3.bin").unlink()
    with pytest.raises(DataError, match=r"data_batch_3\.bin is missing"):
        load_cifar10(folder)
    with pytest.raises(DataError, match="no such folder"):
        load_cifar10(folder / "nowhere")
    with pytest.raises(DataError, match="name too long"):
        load_cifar10(folder / ("too long a name" * 100))
    (folder / "empty").mkdir()
    with pytest.raises(DataError, match="holds neither"):
        load_cifar10(folder / "empty")


def test_an_archive_is_never_unpacked_and_only_exact_names_of_plain_files_count(tmp_path, records):
    path = tmp_path / cifar.ARCHIVE_NAME
    evil = [("../data_batch_1.bin", b"x"), ("/data_batch_1.bin", b"x"), ("other/data_batch_1.bin", b"x")]
    check(load_cifar10(pack(path, [*evil, *official(records)]).parent), records)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [cifar.ARCHIVE_NAME]
    for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE):
        pack(path, [(f"{cifar.SUBFOLDER}/data_batch_1.bin", kind.decode()), *official(records)[1:]])
        with pytest.raises(DataError, match=r"data_batch_1\.bin is there twice or is not a plain file"):
            load_cifar10(tmp_path)
    pack(path, [*official(records), official(records)[0]])
    with pytest.raises(DataError, match="twice"):
        load_cifar10(tmp_path)
    pack(path, official(records)[:-1])
    with pytest.raises(DataError, match=r"test_batch\.bin is missing"):
        load_cifar10(tmp_path)


def test_a_member_longer_than_the_original_is_refused(tmp_path, records, monkeypatch):
    monkeypatch.setattr(cifar, "OFFICIAL_BYTES", 3 * 3073)
    pack(tmp_path / cifar.ARCHIVE_NAME, official(records))
    with pytest.raises(DataError, match=r"test_batch\.bin has 12292 bytes, more than 9219"):
        load_cifar10(tmp_path)


@pytest.mark.parametrize(
    "members", [[("x" * (1 << 25), b"")], [(f"{number}", b"") for number in range(3000)]]
)
def test_names_take_no_memory_without_a_limit(tmp_path, records, members):
    pack(tmp_path / cifar.ARCHIVE_NAME, members)
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match="too many members, or too long names"):
            load_cifar10(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_a_cut_or_flipped_archive_is_damaged(tmp_path, records):
    path = pack(tmp_path / cifar.ARCHIVE_NAME, official(records))
    whole = path.read_bytes()
    flipped = whole[:-8] + bytes([whole[-8] ^ 1]) + whole[-7:]  # in the checksum: all else is readable
    for raw in (whole[: len(whole) // 2], whole[:-4], flipped, b"no archive", b"", gzip.compress(b"no tar")):
        path.write_bytes(raw)
        with pytest.raises(DataError, match=r"damaged|missing"):
            load_cifar10(tmp_path)


# ---- fetching ------------------------------------------------------------------------------------------


@pytest.fixture
def origin(tmp_path, records, monkeypatch):
    """A stand-in archive where the real one would be."""
    path = pack(tmp_path / "origin.tar.gz", official(records))
    raw = path.read_bytes()
    archive = cifar.Archive(path.as_uri(), len(raw), hashlib.sha256(raw).hexdigest())
    monkeypatch.setattr(cifar, "ARCHIVE", archive)
    return path


def test_the_archive_is_fetched_once_and_then_read_from_the_cache(origin, records):
    check(load_cifar10(), records)
    origin.unlink()
    check(load_cifar10(), records)
    path = fetch_cifar10()
    path.write_bytes(path.read_bytes()[:-1] + b"\x07")
    with pytest.raises(DataError, match="cannot be fetched"):  # another content is not the archive
        load_cifar10()


def test_a_folder_can_be_named(origin, records, tmp_path):
    path = fetch_cifar10(tmp_path / "new" / "folder")
    assert path == tmp_path / "new" / "folder" / cifar.ARCHIVE_NAME
    check(load_cifar10(path.parent), records)


@pytest.mark.parametrize(
    "damage", [lambda raw: raw[:-1], lambda raw: raw + b"\0" * 5000, lambda raw: raw[::-1]]
)
def test_nothing_is_kept_of_a_delivery_that_is_not_the_archive(origin, damage, tmp_path):
    origin.write_bytes(damage(origin.read_bytes()))
    with pytest.raises(DataError, match=r"gave \d+ bytes with sha256 .* nothing of it was used"):
        fetch_cifar10(tmp_path / "new")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["lock"]


def test_an_origin_without_end_is_left(origin, monkeypatch, tmp_path):
    origin.write_bytes(b"\0" * 10_000_000)
    monkeypatch.setattr(cifar, "CHUNK_BYTES", 1 << 14)
    with pytest.raises(DataError, match="bytes with sha256") as caught:
        fetch_cifar10(tmp_path / "new")
    assert int(str(caught.value).split("gave ")[1].split()[0]) <= cifar.ARCHIVE.num_bytes + (1 << 14)


def test_without_a_network_the_error_says_what_to_do(tmp_path):
    with pytest.raises(DataError, match=r"cannot be fetched.*load_cifar10\(folder\), or --cifar-dir"):
        load_cifar10()
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="name another folder"):
        fetch_cifar10(tmp_path / "file" / "below")


def test_the_origin_is_contacted_over_https_and_checked_by_sha256():
    archive = cifar.Archive()
    assert archive.url.startswith("https://") and len(archive.sha256) == 64


def load_in_child(results):
    results.put(len(load_cifar10().train_images))


@pytest.mark.skipif(sys.platform != "linux", reason="fork hands the stand-in archive to the children")
def test_of_ranks_that_start_at_once_one_fetches_and_all_get_whole_data(origin, monkeypatch, tmp_path):
    log, fetch = tmp_path / "log", cifar._fetch

    def slow_fetch(path):
        with log.open("a") as file:
            file.write("fetched ")
        time.sleep(0.3)  # the others come meanwhile
        fetch(path)

    monkeypatch.setattr(cifar, "_fetch", slow_fetch)
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    children = [context.Process(target=load_in_child, args=(results,)) for _ in range(3)]
    for child in children:
        child.start()
    assert [results.get(timeout=LIMIT_S) for _ in children] == [8] * 3
    for child in children:
        child.join(LIMIT_S)
    assert [child.exitcode for child in children] == [0] * 3
    assert log.read_text() == "fetched "
    assert not list(fetch_cifar10().parent.glob("*.part-*"))


def test_the_command_fetches_and_says_where_or_what_is_wrong(capsys, origin):
    assert command.main(["cifar10"]) == 0
    assert f"8 training and 4 test images in {fetch_cifar10().parent}" in capsys.readouterr().out
    fetch_cifar10().unlink()
    origin.unlink()
    assert command.main(["cifar10"]) == 1
    assert "cannot be fetched" in capsys.readouterr().err


# ---- random images -------------------------------------------------------------------------------------


def test_random_images_repeat_with_their_seed_and_show_their_class():
    images = synthetic_cifar10(200, 50, seed=4)
    assert [array.shape for array in images] == [(200, 3, 32, 32), (200,), (50, 3, 32, 32), (50,)]
    assert {array.dtype for array in images} == {np.dtype(np.uint8)} and images.train_labels.max() <= 9
    for ours, theirs in zip(images, synthetic_cifar10(200, 50, seed=4), strict=True):
        assert zlib.crc32(ours) == zlib.crc32(theirs)
    assert not np.array_equal(images.train_labels, synthetic_cifar10(200, 50, seed=5).train_labels)
    colours = np.stack(
        [images.train_images[images.train_labels == label].mean((0, 2, 3)) for label in range(10)]
    )
    distances = np.linalg.norm(images.test_images.mean((2, 3))[:, None] - colours, axis=2)
    assert (distances.argmin(axis=1) == images.test_labels).all()
    for bad in ((0, 1, 0), (1, 0, 0), (1, 1, -1), (1 << 70, 1, 0)):
        with pytest.raises(OptionError):
            synthetic_cifar10(*bad)
