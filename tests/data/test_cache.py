# SPDX-License-Identifier: Apache-2.0
"""The cache's lock and its files, in a folder that another user may write to."""

import errno
import fcntl
import os
import subprocess
import sys
import threading

import pytest

from singa_lite.data import cache, cifar, mnist
from singa_lite.data.cache import cache_root, locked, whole_file
from singa_lite.errors import DataError


@pytest.mark.parametrize("kind", ["symlink", "dangling symlink", "pipe", "folder"])
def test_a_lock_that_is_no_plain_file_is_refused_and_written_nowhere(kind, tmp_path):
    target = tmp_path / "target"
    target.write_bytes(b"of the user")
    lock = tmp_path / "lock"
    if kind == "symlink":
        lock.symlink_to(target)
    elif kind == "dangling symlink":
        lock.symlink_to(tmp_path / "new")
    elif kind == "pipe":
        os.mkfifo(lock)
    else:
        lock.mkdir()
    with pytest.raises(OSError), locked(lock):
        raise AssertionError("the lock was taken")
    assert target.read_bytes() == b"of the user" and not (tmp_path / "new").exists()


def test_a_symlink_as_lock_is_a_data_error_of_the_data_set(tmp_path, monkeypatch):
    monkeypatch.setenv("SINGA_LITE_CACHE", str(tmp_path))
    monkeypatch.delenv("MNIST_DIR", raising=False)
    target = tmp_path / "target"
    target.write_bytes(b"of the user")
    mnist.cache_folder().mkdir(parents=True)
    (mnist.cache_folder() / "lock").symlink_to(target)
    with pytest.raises(DataError, match="lock"):
        mnist.load_mnist()
    assert target.read_bytes() == b"of the user"


def test_without_a_home_the_variable_to_set_is_named(monkeypatch):
    monkeypatch.delenv("SINGA_LITE_CACHE", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    with pytest.raises(DataError, match="set SINGA_LITE_CACHE to a folder"):
        cache_root()


def test_a_lock_is_taken_on_a_file_system_that_locks_only_what_is_open_for_writing(tmp_path, monkeypatch):
    """As NFS does, see NFS details in flock(2)."""
    flock = fcntl.flock

    def flock_of_nfs(handle, operation):
        if fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        flock(handle, operation)

    monkeypatch.setattr(fcntl, "flock", flock_of_nfs)
    with locked(tmp_path / "lock"):
        pass


def test_a_lock_keeps_what_the_file_holds_and_needs_no_right_to_write(tmp_path):
    lock = tmp_path / "lock"
    lock.write_bytes(b"kept")
    lock.chmod(0o444)
    with locked(lock):
        pass
    assert lock.read_bytes() == b"kept"


HOLDER = """
import sys
from pathlib import Path
from singa_lite.data.cache import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_lock_is_held_against_other_processes_until_their_holder_dies(tmp_path):
    def holder():
        command = [sys.executable, "-c", HOLDER, str(tmp_path / "lock")]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    first, second = holder(), None
    try:
        assert first.stdout.readline() == "held\n"
        second = holder()
        with pytest.raises(subprocess.TimeoutExpired):
            second.wait(1)
        first.kill()
        assert second.stdout.readline() == "held\n"
    finally:
        for process in filter(None, (first, second)):
            process.kill()
            process.communicate()


def test_a_lock_that_is_not_freed_is_an_error_of_the_data_set_which_names_it(tmp_path, monkeypatch):
    monkeypatch.setenv("SINGA_LITE_CACHE", str(tmp_path))
    monkeypatch.delenv("MNIST_DIR", raising=False)
    monkeypatch.setattr(mnist, "FETCH_TIMEOUT_S", 0.1)
    monkeypatch.setattr(cifar, "FETCH_TIMEOUT_S", 0.1)
    for folder, load in ((tmp_path / "mnist", mnist.load_mnist), (tmp_path / "cifar10", cifar.fetch_cifar10)):
        folder.mkdir()
        with (
            locked(folder / "lock"),
            pytest.raises(DataError, match=f"{folder}/lock was not free for 0.2 s"),
        ):
            load()


def test_a_long_wait_for_a_lock_is_one_warning_with_its_limit(tmp_path, monkeypatch):
    lock = tmp_path / "lock"
    monkeypatch.setattr(cache, "SILENT_S", 0.1)
    with locked(lock):
        with (
            pytest.warns() as warned,
            pytest.raises(OSError, match=r"was not free for 0\.4 s"),
            locked(lock, 0.4),
        ):
            raise AssertionError("the lock was taken")
        with pytest.raises(OSError), locked(lock, 0.05):  # without a warning, which is an error here
            raise AssertionError("the lock was taken")
    assert [str(each.message) for each in warned] == [
        f"waiting for {lock}, which another process holds, for at most 0.4 s"
    ]
    assert warned[0].filename == __file__


def test_a_wait_for_a_lock_without_a_limit_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "SILENT_S", 0.1)
    first = locked(tmp_path / "lock")
    first.__enter__()
    release = threading.Timer(0.5, first.__exit__, (None, None, None))
    release.start()
    with (
        pytest.warns(UserWarning, match="another process holds, until it is free"),
        locked(tmp_path / "lock"),
    ):
        release.join()


def test_the_part_that_a_killed_writer_has_left_is_removed_by_the_next(tmp_path):
    for name in ("data.part-0123456789abcdef", "data2.part-0123456789abcdef"):
        (tmp_path / name).write_bytes(b"half")
    with whole_file(tmp_path / "data") as file:
        file.write(b"whole")
    assert {path.name for path in tmp_path.iterdir()} == {"data", "data2.part-0123456789abcdef"}


def test_a_new_file_goes_under_a_name_that_nobody_can_foresee(tmp_path):
    target = tmp_path / "target"
    target.write_bytes(b"of the user")
    (tmp_path / f"data.part-{os.getpid()}").symlink_to(target)
    names = set()
    for _ in range(2):
        with whole_file(tmp_path / "data") as file:
            file.write(b"fetched")
            names.add(os.path.basename(file.name))
    assert target.read_bytes() == b"of the user" and (tmp_path / "data").read_bytes() == b"fetched"
    assert len(names) == 2 and f"data.part-{os.getpid()}" not in names


def test_a_file_that_is_not_finished_vanishes(tmp_path):
    (tmp_path / "data").write_bytes(b"old")
    with pytest.raises(ZeroDivisionError), whole_file(tmp_path / "data") as file:
        file.write(b"new")
        raise ZeroDivisionError
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"data": b"old"}


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
def test_a_lock_that_cannot_be_opened_for_writing_is_taken_all_the_same(tmp_path, monkeypatch, number):
    lock, os_open = tmp_path / "lock", os.open
    lock.touch()

    def open_to_read(path, flags, *arguments):
        if flags & os.O_RDWR:
            raise OSError(number, os.strerror(number))
        return os_open(path, flags, *arguments)

    monkeypatch.setattr(os, "open", open_to_read)
    with locked(lock):
        pass
