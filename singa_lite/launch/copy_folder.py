# SPDX-License-Identifier: Apache-2.0
"""Copy a folder to the hosts of a job, through their remote shell.

What lives here: what is copied and how. What does not: which hosts there are (hosts.py), and when (several_hosts.py).
"""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

from ..comm.proc import GROUP, stat_fields
from ..errors import CommError, OptionError
from .hosts import is_this_host
from .reaper import kill_sessions

POLL_S = 0.05  # how soon a signal is noticed
LOOK_S = 0.5  # how often the bytes of copies are looked at
ALWAYS_LEFT_OUT = (".git", "__pycache__")  # at any depth


Counts = dict[str, str]  # of each process of a copy what Linux has counted: bytes read and written


class FolderCopy:
    """A folder to copy to several hosts. Nothing is removed there; virtual environments, ".git" and "__pycache__" stay
    behind, because the hosts have their Python already.

    Args:
        source: a folder of this host.
        destination: where it goes on every host; made if missing.
        rsh: the remote shell, which is called with a host's name and a command.

    Raises:
        OptionError: ``destination`` is a relative path, or ``source`` itself.
    """

    def __init__(self, source: Path, destination: Path, rsh: Sequence[str]) -> None:
        where = f"--sync-dst-dir {str(destination)!r}"
        if not destination.is_absolute():
            raise OptionError(f"{where}: expected an absolute path, the same on all hosts")
        if destination.resolve() == source.resolve():
            raise OptionError(
                f"{where} is the current folder itself; name another one, or leave the option out if all hosts see it"
            )
        self._source, self._destination, self._rsh = source, destination, list(rsh)
        self._processes: list[tuple[str, subprocess.Popen[bytes]]] = []  # with their hosts
        self._is_over = False
        self._next_look = 0.0

    def run(self, hosts: Sequence[str], is_over: Callable[[], bool], silence_s: float = math.inf) -> None:
        """Copy to all ``hosts`` at the same time, by rsync where both sides have it, else by tar.

        Args:
            hosts: their names, each once.
            is_over: asked again and again; once it returns True the copying ends, without an error.
            silence_s: after which a copy that moves no byte has failed; on Linux only, where that can be seen.

        Raises:
            CommError: a copy has failed; what rsync, tar or the remote shell wrote follows.
        """
        seen: dict[str, tuple[Counts, float]] = {}  # of each host, and since when they have not changed
        silent: list[str] = []
        with ThreadPoolExecutor(len(hosts)) as pool:
            copies = {pool.submit(self._copy_to, host): host for host in hosts}
            while not_done := wait(copies, POLL_S).not_done:
                if is_over():
                    self._end()
                elif not silent:
                    self._look(seen)
                    late = [
                        host for host, (_, since) in seen.items() if time.monotonic() - since >= silence_s
                    ]
                    silent = [copies[copy] for copy in not_done if copies[copy] in late]
                    if silent:
                        self._end()
        if silent:
            raise CommError(
                f"launch: cannot copy {self._source} to {self._destination} on {', '.join(sorted(silent))}: nothing "
                f"has moved for {silence_s:g} s, as the host or its remote shell does not answer; see --timeout-s"
            )
        failed = [(host, copy.result()) for copy, host in copies.items() if copy.result()]
        if failed and not self._is_over:
            host, error = failed[0]
            raise CommError(
                f"launch: cannot copy {self._source} to {self._destination} on {host}: {error.strip()}"
            )

    def _look(self, seen: dict[str, tuple[Counts, float]]) -> None:
        """Note in ``seen`` which copies have moved bytes since the last look, which is at least LOOK_S ago."""
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + LOOK_S
        host_of = {process.pid: host for host, process in list(self._processes)}  # by process group
        counts: dict[str, Counts] = {host: {} for host in host_of.values()}
        for path in Path("/proc").glob("[0-9]*"):
            fields = stat_fields(path.name)
            host = host_of.get(int(fields[GROUP])) if fields else None
            if host is not None:
                with contextlib.suppress(OSError):
                    counts[host][path.name] = (path / "io").read_text()
        for host, found in counts.items():
            if not found or host not in seen or seen[host][0] != found:
                seen[host] = found, now

    def _copy_to(self, host: str) -> str:
        """Return "" or why nothing could be copied to ``host``."""
        is_here = is_this_host(host)
        folder = shlex.quote(str(self._destination))
        if shutil.which("rsync"):
            mkdir = f"--rsync-path=mkdir -p {folder} && rsync"
            # -s: no shell reads the path there
            options = ["-a", "-s", *self._excludes("/"), mkdir, f"{self._source}/"]
            if is_here:
                os.makedirs(self._destination, exist_ok=True)
            there = f"{self._destination}/" if is_here else f"{host}:{self._destination}/"
            if not self._run(host, ["rsync", "-e", shlex.join(self._rsh), *options, there]):
                return ""
        pack = ["tar", "-cf", "-", "-C", str(self._source), *self._excludes("./"), "."]
        shell = ["sh", "-c"] if is_here else [*self._rsh, host]
        return self._run(host, pack, [*shell, f"mkdir -p {folder} && tar -xf - -C {folder}"])

    def _excludes(self, root: str) -> list[str]:
        """Return rsync's or tar's options for what stays behind: virtual environments, the destination if it is there.

        Args:
            root: what a path begins with that is meant from the source on.
        """
        paths = [path.parent for path in self._source.glob("*/pyvenv.cfg")]
        destination = self._destination.resolve()
        if self._source.resolve() in destination.parents:
            paths.append(self._source / destination.relative_to(self._source.resolve()))
        anchored = [f"{root}{path.relative_to(self._source)}" for path in paths]
        return [f"--exclude={path}" for path in (*ALWAYS_LEFT_OUT, *anchored)]

    def _run(self, host: str, *commands: list[str]) -> str:
        """Run commands that each read the output of the one before; return "" or what they wrote as they failed."""
        with tempfile.TemporaryFile() as errors:
            pipeline: list[subprocess.Popen[bytes]] = []
            for command in commands:
                before = pipeline[-1].stdout if pipeline else subprocess.DEVNULL
                out = subprocess.PIPE if command is not commands[-1] else errors
                if self._is_over:
                    break
                pipeline.append(
                    subprocess.Popen(command, stdin=before, stdout=out, stderr=errors, start_new_session=True)
                )
                self._processes.append((host, pipeline[-1]))
                if pipeline[1:] and pipeline[-2].stdout is not None:
                    pipeline[-2].stdout.close()  # or the first would not notice the end of the second
            codes = [process.wait() for process in pipeline]
            errors.seek(0)
            text = errors.read().decode(errors="replace")
        return (text or f"exit codes {codes}") if any(codes) else ""

    def _end(self) -> None:
        self._is_over = True
        kill_sessions([process.pid for _, process in self._processes])
