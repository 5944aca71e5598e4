# SPDX-License-Identifier: Apache-2.0
"""Copy a folder to the hosts of a job, through their remote shell.

What lives here: what is copied and how. What does not: which hosts there are (hosts.py), and when (several_hosts.py).
"""

from __future__ import annotations

import contextlib
import os
import platform
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

from ..errors import CommError, OptionError

POLL_S = 0.05  # how soon a signal is noticed
ALWAYS_LEFT_OUT = (".git", "__pycache__")  # at any depth


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
        self._processes: list[subprocess.Popen[bytes]] = []
        self._is_over = False

    def run(self, hosts: Sequence[str], is_over: Callable[[], bool]) -> None:
        """Copy to all ``hosts`` at the same time, by rsync where both sides have it, else by tar.

        Args:
            hosts: their names, each once.
            is_over: asked again and again; once it returns True the copying ends, without an error.

        Raises:
            CommError: a copy has failed; what rsync, tar or the remote shell wrote follows.
        """
        with ThreadPoolExecutor(len(hosts)) as pool:
            copies = {pool.submit(self._copy_to, host): host for host in hosts}
            while wait(copies, POLL_S).not_done:
                if is_over():
                    self._end()
        failed = [(host, copy.result()) for copy, host in copies.items() if copy.result()]
        if failed and not self._is_over:
            host, error = failed[0]
            raise CommError(
                f"launch: cannot copy {self._source} to {self._destination} on {host}: {error.strip()}"
            )

    def _copy_to(self, host: str) -> str:
        """Return "" or why nothing could be copied to ``host``."""
        shell = ["sh", "-c"] if host in ("localhost", "127.0.0.1", platform.node()) else [*self._rsh, host]
        folder = shlex.quote(str(self._destination))
        if shutil.which("rsync"):
            anchored = [f"/{path}" for path in self._left_out()]
            excludes = [f"--exclude={path}" for path in (*ALWAYS_LEFT_OUT, *anchored)]
            # -s: no shell reads the path there
            options = ["-a", "-s", *excludes, f"--rsync-path=mkdir -p {folder} && rsync", f"{self._source}/"]
            if shell[0] == "sh":
                os.makedirs(self._destination, exist_ok=True)
            there = f"{self._destination}/" if shell[0] == "sh" else f"{host}:{self._destination}/"
            if not self._run(["rsync", "-e", shlex.join(self._rsh), *options, there]):
                return ""
        anchored = [f"./{path}" for path in self._left_out()]
        excludes = [f"--exclude={path}" for path in (*ALWAYS_LEFT_OUT, *anchored)]
        pack = ["tar", "-cf", "-", "-C", str(self._source), *excludes, "."]
        return self._run(pack, [*shell, f"mkdir -p {folder} && tar -xf - -C {folder}"])

    def _left_out(self) -> list[str]:
        """Return the paths in the source that stay behind: virtual environments, and the destination if it is there."""
        paths = [path.parent for path in self._source.glob("*/pyvenv.cfg")]
        destination = self._destination.resolve()
        if self._source.resolve() in destination.parents:
            paths.append(self._source / destination.relative_to(self._source.resolve()))
        return [str(path.relative_to(self._source)) for path in paths]

    def _run(self, *commands: list[str]) -> str:
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
                self._processes.append(pipeline[-1])
                if pipeline[1:] and pipeline[-2].stdout is not None:
                    pipeline[-2].stdout.close()  # or the first would not notice the end of the second
            codes = [process.wait() for process in pipeline]
            errors.seek(0)
            text = errors.read().decode(errors="replace")
        return (text or f"exit codes {codes}") if any(codes) else ""

    def _end(self) -> None:
        self._is_over = True
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
