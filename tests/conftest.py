# SPDX-License-Identifier: Apache-2.0
"""What holds for every test: no GPU test without a GPU, no property test judged by the clock, nothing left behind."""

from __future__ import annotations

import gc
import os
import secrets
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from singa_lite import autograd
from singa_lite.config import state
from singa_lite.device import Device, get_default_device
from tests.devices import cuda_device, no_gpu, standin_nccl
from tests.repeated import repeated
from tests.standin import compiling

NUL = b"\0"
SHM = Path("/dev/shm")
LEFT_LIMIT_S = 30  # what still runs or exists this long after the last test was left behind
TOKEN = "PYTEST_LEFT_BEHIND"  # the run, in the environment of all its processes
HELPER = b"ranks.main(sys.argv[1:])\0helper"
# they serve this process's tests and end with it
SERVANTS = (
    HELPER,
    b"multiprocessing.resource_tracker",
    b"multiprocessing.forkserver",
)
# files that take longest, for pytest-xdist: what begins last should not take long
LONGEST_FIRST = (
    *("test_build", "test_dist_on_cuda", "test_ways_to_start", "test_one_host", "test_examples", "test_nccl"),
    *("test_every_op", "test_job", "test_mpi", "test_stopping", "test_contract", "test_sync", "test_restart"),
    *("test_flight_recorder", "test_dist_sync", "test_hierarchical", "test_trainer", "test_failures"),
    *("test_one_file_schemes", "test_examples_cifar", "test_sync_settings", "test_notebook", "test_p2p"),
    *("test_several_hosts", "test_steps_by_hand", "test_random_programs", "test_soak", "test_resume"),
)

try:
    from hypothesis import settings
except ModuleNotFoundError:  # then the files that need it cannot be collected, and the others run
    pass
else:
    settings.register_profile("explore", deadline=None)
    settings.register_profile("same examples", deadline=None, derandomize=True, database=None)
    settings.load_profile("same examples")


def pytest_configure(config: pytest.Config) -> None:
    # started in the background by a shell; children inherit it
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if not is_worker(config):
        os.environ[TOKEN] = secrets.token_hex(8)  # inherited: even a grandchild without parents is found
        config.stash[SHM_BEFORE] = shm_files()


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in repeated(items):
        item.add_marker(pytest.mark.slow)
    needs_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if needs_gpu and (reason := no_gpu()):
        for item in needs_gpu:
            item.add_marker(pytest.mark.skip(reason=f"no NVIDIA GPU: {reason}"))
    if is_worker(config):
        items.sort(key=lambda item: rank_of(item.path.stem))  # stable: the tests of a file stay together


def pytest_collection_finish() -> None:
    gc.freeze()  # the garbage collector need not look at thousands of tests again and again


def pytest_runtest_teardown() -> None:
    autograd.training = False  # as in a new thread, whatever the test has left


def rank_of(name: str) -> int:
    """The index of a test file in LONGEST_FIRST."""
    return LONGEST_FIRST.index(name) if name in LONGEST_FIRST else len(LONGEST_FIRST)


# on a machine without a GPU the same tests run on the stand-in, and are not marked
CUDA = pytest.param("cuda", id="cuda-standin") if no_gpu() else pytest.param("cuda", marks=pytest.mark.gpu)


@pytest.fixture(params=["cpu", CUDA])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Device:
    """Each kind of device, one after the other; inside the test it is the default device."""
    made = get_default_device() if request.param == "cpu" else cuda_device(monkeypatch)
    monkeypatch.setattr(state, "default_device", made)
    return made


@pytest.fixture
def standin_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-ins of libcuda and libnccl, for this process and the ranks that it starts."""
    monkeypatch.setenv("SINGA_LITE_CUDA_LIB", str(compiling.driver()))
    monkeypatch.setenv("SINGA_LITE_NCCL_LIB", str(standin_nccl()))


@pytest.fixture
def training() -> Iterator[None]:
    """Training, until the test ends."""
    autograd.training = True
    yield
    autograd.training = False


# ---- nothing left behind -------------------------------------------------------------------------------

SHM_BEFORE = pytest.StashKey[set[str]]()
LEFT = pytest.StashKey[list[str]]()


def is_worker(config: pytest.Config) -> bool:
    """Whether pytest-xdist started this process, to run a part of the tests."""
    return hasattr(config, "workerinput")


@pytest.hookimpl(trylast=True)  # pytest-xdist has ended its workers by then
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the run when a process or a shared-memory file of it outlives the last test."""
    if is_worker(session.config):
        return
    deadline = time.monotonic() + LEFT_LIMIT_S
    files = shm_files() - session.config.stash[SHM_BEFORE]  # those that come from now on are another run's
    while (left := processes_of_this_run()) or files & shm_files():
        if time.monotonic() > deadline:
            may_be_others = not left and is_another_run_here()
            note = "(of this run or of another on this machine)" if may_be_others else ""
            session.config.stash[LEFT] = [*left, *(f"{path} {note}" for path in sorted(files & shm_files()))]
            if not may_be_others:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED
            return
        time.sleep(0.1)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if left := config.stash.get(LEFT, []):
        terminalreporter.section("left behind by the tests", red=True)
        terminalreporter.write_line("\n".join(left))


def shm_files() -> set[str]:
    return {str(path) for path in SHM.glob("singa_lite-*")} if SHM.is_dir() else set()


def processes() -> Iterator[tuple[int, int, str, bytes, bytes]]:
    """(process id, its parent's, state, command line, environment) of each process that may be looked at."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            status, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            found = (folder / "cmdline").read_bytes(), (folder / "environ").read_bytes()
        except OSError:  # ended meanwhile, or another user's
            continue
        yield int(folder.name), int(parent), status, *found


def processes_of_this_run() -> list[str]:
    """Our children and all that inherited TOKEN, but for the servants: process id and command line of each."""
    token, me, found = f"{TOKEN}={os.environ[TOKEN]}".encode(), os.getpid(), []
    everyone = list(processes())
    ours = {process for process, parent, _, command, _ in everyone if parent == me and is_servant(command)}
    # that of ranks.py has a fork of its own, whose children are ranks
    ours |= {process for process, parent, _, command, _ in everyone if parent in ours and HELPER in command}
    for process, parent, status, command, environment in everyone:
        if (token in environment or parent == me) and process not in ours and status != "Z" and process != me:
            found.append(f"process {process}: {command.replace(NUL, b' ').decode(errors='replace')}")
    return found


def is_servant(command: bytes) -> bool:
    return any(name in command for name in SERVANTS)


def is_another_run_here() -> bool:
    """Whether other tests run on this machine, whose shared-memory files have such names too."""
    own, name = f"{TOKEN}={os.environ[TOKEN]}".encode(), f"{TOKEN}=".encode()
    return any(name in environment and own not in environment for *_, environment in processes())
