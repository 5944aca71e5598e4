# SPDX-License-Identifier: Apache-2.0
"""Run a test's function on several ranks and bring back what each returned or raised.

    def averages(communicator, start):
        array = np.full(3, start + communicator.rank, np.float32)
        communicator.all_reduce(array, "mean").wait()
        return array

    def test_mean_of_three_ranks():
        results = run_ranks(averages, 3, 10.0)

The function must be at the top level of its module. Ranks are forked from a process that has loaded that module
already, so a start takes milliseconds (Note [helper]), also where mpiexec starts them (Note [mpi]).
Whatever happens, no process and no /dev/shm file of the run stays.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import importlib.util
import json
import os
import pickle
import pkgutil
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from tests.limits import LIMIT_S

ROOT = Path(__file__).resolve().parents[1]
STUB = Path(__file__).with_name("mpi_stub.py")
# how a process of ours starts: this module has one name there too
START = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from tests import ranks; ranks.main(sys.argv[1:])"
GRACE_S = 0.5  # a hung rank has this long to write down where it hangs before it is killed
PRELOAD = ("numpy", "pytest", "hypothesis", "singa_lite")  # loaded once in the helper, when the test has them
FOLDERS = ("singa_lite.comm", "singa_lite.sync")  # a rank looks through their files


class RankDied(Exception):
    """A rank ended without returning or raising: killed by a signal, or left through os._exit."""


class RankHung(Exception):
    """A rank was still running at the deadline; the text says where."""


def run_ranks(
    function: Callable[..., Any],
    size: int,
    *args: Any,
    timeout_s: float = LIMIT_S,
    transport: str = "shm",
    communicator_timeout_s: float = 200,
    return_exceptions: bool = False,
) -> list[Any]:
    """Call ``function(communicator, *args)`` on ``size`` ranks.

    Args:
        function: a function at the top level of its module.
        size: number of ranks; 1 for transport "local", which runs in this process.
        args: the same on every rank; picklable.
        timeout_s: after this many seconds the ranks that still run are killed.
        transport: any of ``find_transports()`` that joins worlds; "local" runs in this process, "mpi" under mpiexec;
            or "none" for ranks that make their own world: then the function is called with a ``World`` instead of a
            communicator.
        communicator_timeout_s: the time-out the communicator is made with.
        return_exceptions: return a failed rank's exception instead of its result (RankDied and RankHung for ranks
            that could not raise), instead of failing.

    Returns:
        What each rank returned, in rank order.

    Raises:
        AssertionError: with every failed rank's traceback; or a process or /dev/shm file was left behind.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        folder = Path(name)
        rendezvous_id = "test" + secrets.token_hex(8)
        spec = {
            "size": size,
            "transport": transport,
            "rendezvous_id": rendezvous_id,
            "timeout_s": communicator_timeout_s,
        }
        (folder / "call.json").write_text(json.dumps(spec))
        (folder / "call.pickle").write_bytes(_dump_call(function, args))
        if transport == "local":
            _run_rank(folder, 0, function, args)
            complaints = []
        elif transport == "mpi":
            complaints = _run_under_mpiexec(folder, size, timeout_s)
        else:
            complaints = _Helper.get().run(folder, size, timeout_s, transport)
        outcomes = [_outcome(folder, rank) for rank in range(size)]
    left = [path for path in Path("/dev/shm").glob(f"*{rendezvous_id}*") if _unlink(path)]
    complaints += [f"left in /dev/shm: {path.name}" for path in left]
    failed = [rank for rank, (error, _) in enumerate(outcomes) if error is not None]
    if complaints or (failed and not return_exceptions):
        texts = [f"---- rank {rank} of {size} ----\n{outcomes[rank][1]}" for rank in failed]
        raise AssertionError("\n".join([*complaints, *texts]))
    return [value if error is None else error for error, value in outcomes]


def mpi_missing() -> str:
    """Why transport "mpi" cannot run here, or "" if it can."""
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed"
    if importlib.util.find_spec("singa_lite.comm.mpi") is None:
        return "singa_lite.comm.mpi is not there"
    return "" if _mpiexec() else "mpiexec is neither beside this Python nor on PATH"


# ---- in the parent -----------------------------------------------------------------------------------


def _dump_call(function: Callable[..., Any], args: Sequence[Any]) -> bytes:
    """Pickle a call so that a child can make it however pytest imported the test's module."""
    module = sys.modules[function.__module__]
    where = (module.__name__, getattr(module, "__file__", None), function.__qualname__)
    return pickle.dumps((list(sys.path), where, pickle.dumps(tuple(args))))


def _outcome(folder: Path, rank: int) -> tuple[BaseException | None, Any]:
    """(None, value) of a rank that returned, else (exception, text to print)."""
    output = folder / f"output-{rank}"
    printed = output.read_text(errors="replace") if output.exists() else ""
    try:
        error, value = pickle.loads((folder / f"result-{rank}").read_bytes())
    except FileNotFoundError:
        status = folder / f"status-{rank}"
        text = (status.read_text() if status.exists() else "ended without a result") + "\n" + printed
        return (RankHung if text.startswith("hung") else RankDied)(text), text
    return (error, f"{value}\n{printed}") if error is not None else (None, value)


def _unlink(path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    return True


def _mpiexec() -> str | None:
    beside = Path(sys.executable).with_name("mpiexec")
    return str(beside) if beside.exists() else shutil.which("mpiexec")


def _run_under_mpiexec(folder: Path, size: int, timeout_s: float) -> list[str]:
    mpiexec = _mpiexec()
    assert mpiexec, mpi_missing()
    complaints = _Helper.get().run(folder, size, timeout_s, "mpi")  # from now on it listens
    if complaints:
        return complaints
    stub = [sys.executable, "-I", "-S", str(STUB), folder.name]
    command = [mpiexec, "-n", str(size), *stub, sys.executable, "-c", START, "rank", str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # as ranks of the helper
    with (folder / "mpiexec").open("w") as log:
        job = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
        )
        try:
            job.wait(timeout_s)
        except subprocess.TimeoutExpired:
            for rank in range(size):
                pid = folder / f"pid-{rank}"
                if pid.exists() and not (folder / f"result-{rank}").exists():
                    (folder / f"status-{rank}").write_text(f"hung for {timeout_s} s")
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(pid.read_text()), signal.SIGUSR1)
            time.sleep(GRACE_S)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGTERM)  # mpiexec ends its ranks, which are sessions of their own
            with contextlib.suppress(subprocess.TimeoutExpired):
                job.wait(60)
        finally:
            for pid in folder.glob("pid-*"):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid.read_text()), signal.SIGKILL)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)
            job.wait()
    errors = [_outcome(folder, rank)[0] for rank in range(size)]
    has_results = not any(isinstance(error, (RankDied, RankHung)) for error in errors)
    if has_results and (job.returncode == 0 or any(errors)):
        return []
    said = (folder / "mpiexec").read_text(errors="replace")
    return [f"mpiexec ended with {job.returncode} and said: {said}"]


# Note [helper]: the helper process has numpy, pytest, hypothesis and singa_lite loaded. For each file of tests it forks
# a process that loads the modules of the functions too, and all ranks of that file are forked from there: loading takes
# 30 ms, and a rank would do it each time. No module that one file has loaded is there in ranks of another.
#
# Note [mpi]: mpiexec starts programs, and a rank that loads numpy, pytest and hypothesis takes half a second of a core.
# So it starts mpi_stub.py, which hands its environment, its output and the socket by which a rank of MPICH knows its
# place over to a server, forked for the call from the process of the test's file; the server forks a rank for each. A
# stub ends as its rank does, and a rank is killed when its stub is gone, as this is how mpiexec ends jobs.


class _Helper:
    """The process at the root of all shm ranks; one for the whole test run."""

    _only: _Helper | None = None

    def __init__(self) -> None:
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}  # no BLAS threads, or fork is not safe
        command = [sys.executable, "-c", START, "helper"]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        atexit.register(self.end)

    @classmethod
    def get(cls) -> _Helper:
        if cls._only is None or cls._only.process.poll() is not None:
            cls._only = cls()
        return cls._only

    def run(self, folder: Path, size: int, timeout_s: float, transport: str) -> list[str]:
        assert self.process.stdin and self.process.stdout
        loaded = [name for name in PRELOAD if name in sys.modules]
        request = {"folder": str(folder), "size": size, "timeout_s": timeout_s, "transport": transport}
        request |= {"preload": loaded}
        request |= {"path": sys.path, "env": dict(os.environ)}
        request["file"] = os.environ.get("PYTEST_CURRENT_TEST", "").partition("::")[0]
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise AssertionError(f"the helper that starts ranks ended with {self.process.wait()}")
        return json.loads(answer)

    def end(self) -> None:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


# ---- in the helper -----------------------------------------------------------------------------------


def _serve() -> None:
    """Pass each request to the fork for its file of tests, until the parent goes away."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    file, fork = None, None
    for line in sys.stdin:
        request = json.loads(line)
        if fork is None or request["file"] != file:
            if fork is not None:
                fork.end()
            sys.path[:] = request["path"]
            for name in request["preload"]:
                importlib.import_module(name)
            file, fork = request["file"], _Fork()
        answers.write(fork.answer(line))
        answers.flush()
    if fork is not None:
        fork.end()


class _Fork:
    """A fork of the helper, from which the ranks of one file of tests are forked."""

    def __init__(self) -> None:
        mine, its = socket.socketpair()
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                mine.close()
                _serve_file(its)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        its.close()
        self.lines, self.socket = mine.makefile("rw"), mine

    def answer(self, line: str) -> str:
        self.lines.write(line)
        self.lines.flush()
        if not (answer := self.lines.readline()):
            raise RuntimeError("the process that forks ranks has ended")
        return answer

    def end(self) -> None:
        self.lines.close()
        self.socket.close()
        os.waitpid(self.pid, 0)


def _serve_file(connection: socket.socket) -> None:
    """Fork the ranks of one request after the other, until the helper closes the connection."""
    lines = connection.makefile("rw")
    for line in lines:
        request = json.loads(line)
        os.environ.clear()
        # ranks share the cores, as share_cores() has them do it; the libraries read this once
        os.environ.update({**request["env"], "OMP_NUM_THREADS": "1"})
        _load_in_advance(Path(request["folder"]))
        gc.freeze()  # ranks need not look at what is loaded here, which would copy its pages
        if len(os.listdir("/proc/self/task")) > 1:
            complaints = ["a module started a thread while it was imported: ranks cannot be forked beside it"]
        elif request["transport"] == "mpi":
            complaints = []
            _start_server(Path(request["folder"]))
        else:
            complaints = _fork_ranks(Path(request["folder"]), request)
        lines.write(json.dumps(complaints) + "\n")
        lines.flush()


def _load_in_advance(folder: Path) -> None:
    """Import what every rank of the call would; what fails here fails there again, where the error is reported."""
    path, (module_name, file, _), _ = pickle.loads((folder / "call.pickle").read_bytes())
    sys.path[:] = path
    with contextlib.suppress(BaseException), warnings.catch_warnings():
        _refuse_warnings()
        _load_module(module_name, file)
        for package in filter(None, map(sys.modules.get, FOLDERS)):
            for module in pkgutil.iter_modules(package.__path__):
                importlib.import_module(f"{package.__name__}.{module.name}")
        if native := sys.modules.get("singa_lite._native"):
            for name in native.MODULES:
                native.load(name)


def _fork_ranks(folder: Path, request: dict[str, Any]) -> list[str]:
    """Fork, wait until the deadline, kill; returns complaints about what was left running."""
    running = {}
    for rank in range(request["size"]):
        pid = os.fork()
        if pid == 0:
            _forked(partial(_shm_rank, folder, rank), lambda: request["env"])
        running[pid] = rank
    everyone = dict(running)
    _collect(folder, running, time.monotonic() + request["timeout_s"])
    for pid, rank in running.items():
        (folder / f"status-{rank}").write_text(f"hung for {request['timeout_s']} s")
        os.kill(pid, signal.SIGCONT)
        os.kill(pid, signal.SIGUSR1)
    if running:
        time.sleep(GRACE_S)
        for pid in running:
            os.kill(pid, signal.SIGKILL)
        _collect(folder, running, time.monotonic() + 30)
    complaints = [f"rank {rank} cannot be killed" for rank in running.values()]
    for pid, rank in everyone.items():  # each rank leads a process group, so its children can be found
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
            complaints.append(f"rank {rank} left a process running")
    return complaints


def _collect(folder: Path, running: dict[int, int], deadline: float) -> None:
    """Wait for children, removing those that ended from ``running`` and noting how they ended."""
    pause_s = 0.001
    while running and time.monotonic() < deadline:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.2, 0.02)
        elif pid in running:
            note = folder / f"status-{running.pop(pid)}"
            if not note.exists():
                note.write_text(f"ended with {os.waitstatus_to_exitcode(status)}")


def _start_server(folder: Path) -> None:
    """Fork a process that forks a rank for each stub that mpiexec starts."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("\0" + folder.name)
    listener.listen(100)
    parent = os.getpid()
    if os.fork() == 0:
        try:
            _serve_stubs(folder, listener, parent)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    listener.close()


def _serve_stubs(folder: Path, listener: socket.socket, parent: int) -> None:
    """Fork ranks, report their ends, and kill those whose stubs are gone, until the call or ``parent`` is over."""
    stubs: dict[int, socket.socket] = {}  # by the rank's process
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    while stubs or (folder.exists() and os.getppid() == parent):
        ready = [descriptor for descriptor, _ in poll.poll(10)]
        if listener.fileno() in ready:
            stub, _ = listener.accept()
            if (pid := os.fork()) == 0:
                _forked(partial(_mpi_rank, folder), partial(_take_over, stub))
            stubs[pid] = stub
            poll.register(stub, 0)  # its end alone
        for pid, stub in stubs.items():
            if stub.fileno() in ready or os.getppid() != parent:
                os.kill(pid, signal.SIGKILL)
                with contextlib.suppress(ProcessLookupError):  # it may not lead a process group yet
                    os.killpg(pid, signal.SIGKILL)
        while stubs and (ended := os.waitpid(-1, os.WNOHANG))[0]:
            stub = stubs.pop(ended[0])
            with contextlib.suppress(OSError), stub:
                poll.unregister(stub)
                stub.sendall(str(os.waitstatus_to_exitcode(ended[1])).encode())


def _take_over(stub: socket.socket) -> dict[str, str]:
    """Take a stub's output and its socket to mpiexec; return its environment."""
    size, descriptors, _, _ = socket.recv_fds(stub, 8, 3)
    output, errors, pmi = descriptors
    for descriptor, number in ((output, 1), (errors, 2)):
        os.dup2(descriptor, number)
        os.close(descriptor)
    with stub.makefile("rb") as lines:
        environ = json.loads(lines.read(int.from_bytes(size, "little")))
    return {**environ, "PMI_FD": str(pmi)}


def _forked(life: Callable[[], int], read_environment: Callable[[], dict[str, str]]) -> None:
    """The life of a forked rank; never returns."""
    code = 1
    try:
        os.setpgid(0, 0)
        environment = read_environment()
        os.environ.clear()
        os.environ.update(environment)
        code = life()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


# ---- in a rank ---------------------------------------------------------------------------------------


def _shm_rank(folder: Path, rank: int) -> int:
    _redirect(folder, rank)
    return _rank_main(folder, rank)


def _redirect(folder: Path, rank: int) -> None:
    """Send output to a file, and let SIGUSR1 append every thread's stack to it."""
    output = os.open(folder / f"output-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.register(signal.SIGUSR1, file=output, all_threads=True)


def _refuse_warnings() -> None:
    """Have warnings raise, but those that pytest is told to ignore (pyproject.toml)."""
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "This CPU has no instructions for bfloat16")


def _rank_main(folder: Path, rank: int) -> int:
    """Load the function, run it, write the result. Returns the exit code."""
    _refuse_warnings()
    signal.signal(signal.SIGTERM, _terminated)
    try:
        path, (module_name, file, qualified_name), raw = pickle.loads((folder / "call.pickle").read_bytes())
        sys.path[:] = path
        function: Any = _load_module(module_name, file)
        for part in qualified_name.split("."):
            function = getattr(function, part)
        args = pickle.loads(raw)
    except BaseException as error:
        _write_result(folder, rank, error, traceback.format_exc())
        return 1
    return _run_rank(folder, rank, function, args)


def _terminated(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _load_module(name: str, file: str | None) -> Any:
    if name == "__main__":
        name = "__rank_main__"  # so that the script's own `if __name__ == "__main__"` stays quiet
    if name in sys.modules:
        return sys.modules[name]
    if file is None or name.startswith("singa_lite"):
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _run_rank(folder: Path, rank: int, function: Callable[..., Any], args: Sequence[Any]) -> int:
    """Make the communicator, call the function, write its result or exception."""
    spec = json.loads((folder / "call.json").read_text())
    communicator = None
    try:
        subject = communicator = _make_communicator(spec, rank)
        if communicator is None:
            from singa_lite.comm.base import World

            subject = World(rank, spec["size"], rank, spec["size"], spec["rendezvous_id"], "shm")
        value = function(subject, *args)
        _write_result(folder, rank, None, value)
    except BaseException as error:
        _write_result(folder, rank, error, traceback.format_exc())
        if communicator is not None and hasattr(communicator, "abort_with_groups"):
            communicator.abort_with_groups(f"{type(error).__name__}: {error}")  # as at the end of a script
        return 1
    finally:
        if communicator is not None:
            communicator.close()
    return 0


def _make_communicator(spec: dict[str, Any], rank: int) -> Any:
    """The communicator of ``spec``; None for transport "none"."""
    if spec["transport"] == "none":
        return None
    from singa_lite.comm import find_transports
    from singa_lite.comm.base import World

    size, transport = spec["size"], spec["transport"]
    world = World(rank, size, rank, size, spec["rendezvous_id"], transport)
    return find_transports()[transport](world, spec["timeout_s"])


def _write_result(folder: Path, rank: int, error: BaseException | None, value: Any) -> None:
    """Store (exception or None, value or traceback text); what cannot be pickled becomes text."""
    try:
        raw = pickle.dumps((error, value))
        pickle.loads(raw)
    except Exception as problem:
        error = RuntimeError(
            f"{type(error).__name__}: {error}" if error else f"result of rank {rank}: {problem}"
        )
        raw = pickle.dumps((error, str(value)))
    part = folder / f"part-{rank}"
    part.write_bytes(raw)
    part.rename(folder / f"result-{rank}")


def _mpi_rank(folder: Path) -> int:
    """A rank under mpiexec: its result must be on disk before any rank may end the job."""
    from mpi4py import MPI

    rank, size = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    _redirect(folder, rank)
    code = _rank_main(folder, rank)
    deadline = time.monotonic() + LIMIT_S
    while not all((folder / f"result-{other}").exists() for other in range(size)):
        if time.monotonic() > deadline:
            break
        time.sleep(0.01)
    sys.stdout.flush()
    sys.stderr.flush()
    outcomes = [_outcome(folder, other)[0] for other in range(size)]
    if any(error is not None for error in outcomes):
        from singa_lite.comm.mpi_watchdog import shared_files

        for path in shared_files(os.getpid()):
            Path(path).unlink(missing_ok=True)
        os._exit(code or 1)  # MPI's own finalisation, which removes them, would wait for ranks that are gone
    MPI.Finalize()
    # not os._exit: MPICH tells mpiexec of its end in a function that the C library calls at exit
    ctypes.CDLL(None).exit(code)
    return code


def main(arguments: Sequence[str]) -> None:
    """Run what the parent started: the helper, or a rank under mpiexec."""
    if arguments[0] == "helper":
        _serve()
    else:
        _mpi_rank(Path(arguments[1]))
