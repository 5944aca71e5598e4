# SPDX-License-Identifier: Apache-2.0
"""What holds for every test: no GPU test without a GPU, no property test judged by the clock, nothing left."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from devices import cuda_device, no_gpu
from hypothesis import settings

from singa_lite import autograd
from singa_lite.config import state
from singa_lite.device import Device, get_default_device

NUL = b"\0"
SHM = Path("/dev/shm")
LEFT_LIMIT_S = 10  # what still stands this long after the last test was left behind
TOKEN = "PYTEST_LEFT_BEHIND=" + secrets.token_hex(8)
# they serve the whole run and end with it
SERVANTS = (b"ranks.py\0helper", b"multiprocessing.resource_tracker", b"multiprocessing.forkserver")

settings.register_profile("shared machine", deadline=None)
settings.load_profile("shared machine")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    needs_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if needs_gpu and (reason := no_gpu()):
        for item in needs_gpu:
            item.add_marker(pytest.mark.skip(reason=f"no NVIDIA GPU: {reason}"))


# on a machine without a GPU the same tests run on the stand-in, and are not marked
CUDA = pytest.param("cuda", id="cuda-standin") if no_gpu() else pytest.param("cuda", marks=pytest.mark.gpu)


@pytest.fixture(params=["cpu", CUDA])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Device:
    """Each kind of device in turn; inside the test it is where Tensors live unless told otherwise."""
    made = get_default_device() if request.param == "cpu" else cuda_device(monkeypatch)
    monkeypatch.setattr(state, "default_device", made)
    return made


@pytest.fixture
def training() -> Iterator[None]:
    """Training, until the test ends."""
    autograd.training = True
    yield
    autograd.training = False


@pytest.fixture(scope="session", autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fail the run when a process or a shared-memory file of it outlives the last test."""
    name, _, value = TOKEN.partition("=")
    os.environ[name] = value  # inherited, so that even a grandchild without parents is found
    shm_before = shm_files()
    yield
    deadline = time.monotonic() + LEFT_LIMIT_S
    while left := processes_of_this_run() + sorted(shm_files() - shm_before):
        if time.monotonic() > deadline:
            pytest.fail("left behind by the tests:\n" + "\n".join(left), pytrace=False)
        time.sleep(0.1)


def shm_files() -> set[str]:
    return {str(path) for path in SHM.glob("singa_lite-*")} if SHM.is_dir() else set()


def processes_of_this_run() -> list[str]:
    """Our children and all that inherited TOKEN, but for the servants: pid and command of each."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            command = (folder / "cmdline").read_bytes()
            is_ours = TOKEN.encode() in (folder / "environ").read_bytes() or int(parent) == os.getpid()
        except OSError:  # ended meanwhile, or another user's
            continue
        is_servant = int(parent) == os.getpid() and any(name in command for name in SERVANTS)
        if is_ours and not is_servant and state != "Z" and int(folder.name) != os.getpid():
            found.append(f"process {folder.name}: {command.replace(NUL, b' ').decode(errors='replace')}")
    return found
