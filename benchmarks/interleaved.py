# SPDX-License-Identifier: Apache-2.0
"""Time workers in interleaved rounds, so that what is compared sees the machine in the same state.

A group is one way of doing the work: one process, or several ranks. Each of its processes calls ``serve`` and then
sleeps in a read until it gets a number of steps to do, so a group that is not at work takes no CPU. What a step is
is defined in steps.py, what is compared in the scripts beside this one.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

SOCKET = "BENCHMARK_SOCKET"  # the environment variable with the address to serve at
WARM_STEPS = 3  # at least so many before times count: they compile, record and allocate
TIMEOUT_S = 600  # for a start, and for a round


def machine() -> str:
    """The processor, its cores and how busy they are: what a figure depends on."""
    return f"{processor()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"


def processor() -> str:
    """The processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next(
        (line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine()
    )


def environment(threads: int) -> dict[str, str]:
    """This process's, with so many threads for kernels and numpy."""
    return {**os.environ, "OMP_NUM_THREADS": str(threads), "OPENBLAS_NUM_THREADS": str(threads)}


def serve(step: Callable[[], object]) -> None:
    """Do as many steps as requested and send their times in ms, until the connection ends."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(os.environ[SOCKET])
        with connection.makefile("rw") as file:
            for line in file:
                times = []
                for _ in range(int(line)):
                    begin = time.perf_counter()
                    step()
                    times.append((time.perf_counter() - begin) * 1e3)
                file.write(json.dumps(times) + "\n")
                file.flush()


class Group:
    """The processes behind one name.

    Args:
        commands: what starts them; a launcher counts as one command.
        threads: OMP_NUM_THREADS of each.
        processes: how many call ``serve``.
    """

    def __init__(self, commands: Iterable[Sequence[str]], threads: int, processes: int = 1) -> None:
        self._folder = tempfile.TemporaryDirectory()
        address = str(Path(self._folder.name) / "socket")
        variables = {**environment(threads), SOCKET: address}
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(address)
            server.listen(processes)
            server.settimeout(0.2)
            self._jobs = [subprocess.Popen(command, env=variables, stdout=sys.stderr) for command in commands]
            self._connections = self._accept(server, processes)
        self._files = [connection.makefile("rw") for connection in self._connections]

    def _accept(self, server: socket.socket, processes: int) -> list[socket.socket]:
        connections: list[socket.socket] = []
        deadline = time.monotonic() + TIMEOUT_S
        while len(connections) < processes and time.monotonic() < deadline:
            try:
                connections.append(server.accept()[0])
                connections[-1].settimeout(TIMEOUT_S)
            except TimeoutError:
                if any(job.poll() is not None for job in self._jobs):
                    break
        return connections if len(connections) == processes else []

    def time_steps(self, steps: int) -> list[float] | None:
        """Return the times of so many steps in ms, of the slowest process each; None if one is gone."""
        try:
            for file in self._files:
                file.write(f"{steps}\n")
                file.flush()
            lines = [file.readline() for file in self._files]
        except ConnectionError:
            return None
        if not lines or not all(lines):
            return None
        return [max(times) for times in zip(*map(json.loads, lines), strict=True)]

    def close(self) -> None:
        """End the processes: the ones that wait see the end of what they read."""
        for connection, file in zip(self._connections, self._files, strict=True):
            try:
                connection.shutdown(socket.SHUT_RDWR)
                file.close()
            except OSError:  # it has gone before
                pass
            connection.close()
        for job in self._jobs:
            try:
                job.wait(10)
            except subprocess.TimeoutExpired:
                job.kill()
                job.wait()
        self._folder.cleanup()


@contextlib.contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Have so many processes run without a pause."""
    others = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def time_interleaved(
    starts: Mapping[str, Callable[[], Group]], rounds: int, steps: int, hint: str = ""
) -> dict[str, list[float]]:
    """Return {name: step times in ms}; the first round of each is not counted.

    Args:
        starts: what starts each group, by name.
        rounds: rounds that count.
        steps: steps in a round.
        hint: what to print of a group that ended; it is left out.
    """
    groups: dict[str, Group] = {}
    times: dict[str, list[float]] = {name: [] for name in starts}
    try:
        for name, start in starts.items():
            groups[name] = start()
        for number in range(rounds + 1):
            for name in list(groups):
                measured = groups[name].time_steps(steps if number else max(steps, WARM_STEPS))
                if measured is None:
                    print(f"{name}: ended, left out{hint}", file=sys.stderr)
                    groups.pop(name).close()
                elif number:
                    times[name] += measured
    finally:
        for group in groups.values():
            group.close()
    return {name: values for name, values in times.items() if values}
