# SPDX-License-Identifier: Apache-2.0
"""Read a host file, choose the host of each process of a job, and tell this host from others.

What does not live here: starting anything there (several_hosts.py).
"""

from __future__ import annotations

import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import OptionError

# a name that begins with "-" would be an option of the remote shell
LINE = re.compile(r"([A-Za-z0-9_][A-Za-z0-9_.-]*)(?::([0-9]{1,5})|\s+slots=([0-9]{1,5}))?")


@dataclass(frozen=True)
class Host:
    """A line of a host file.

    Attributes:
        name: as the remote shell takes it.
        num_slots: workers to start there before those of the next host, >= 1.
    """

    name: str
    num_slots: int = 1


def read_hosts(path: Path) -> list[Host]:
    """Return the hosts of a file with one a line: "host", "host:count" or "host slots=count"; "#" begins a comment.

    Raises:
        OptionError: the file cannot be read, a line is none of these or names a host again, or there is none.
    """
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError as error:
        raise OptionError(f"read_hosts: cannot read the host file {str(path)!r}: {error.strerror}") from error
    hosts: list[Host] = []
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        match = LINE.fullmatch(text)
        num_slots = int(match[2] or match[3] or 1) if match else 0
        if match is None or num_slots < 1:
            raise OptionError(
                f"read_hosts: line {number} of {str(path)!r} is {text!r}; expected HOST, HOST:COUNT or "
                "HOST slots=COUNT, with COUNT in 1..99999"
            )
        if match[1] in [host.name for host in hosts]:
            raise OptionError(
                f"read_hosts: line {number} of {str(path)!r} names {match[1]!r} again; write {match[1]}:COUNT once"
            )
        hosts.append(Host(match[1], num_slots))
    if not hosts:
        raise OptionError(f"read_hosts: {str(path)!r} names no host; write one a line")
    return hosts


def place(hosts: Sequence[Host], num_workers: int, num_servers: int) -> list[str]:
    """Return the name of each process's host, by rank: workers first, as everywhere.

    Workers fill the slots of the hosts in order, and begin again with the first host when all slots are taken. Servers
    go round the hosts one by one, from the host behind that of the last worker.
    """
    slots = [index for index, host in enumerate(hosts) for _ in range(host.num_slots)]
    workers = [slots[rank % len(slots)] for rank in range(num_workers)]
    servers = [(workers[-1] + 1 + number) % len(hosts) for number in range(num_servers)]
    return [hosts[index].name for index in workers + servers]


def is_this_host(name: str) -> bool:
    """Return whether ``name`` is one of this host itself, for which no remote shell is needed."""
    return name in ("localhost", "127.0.0.1", platform.node())


def without_slot(hosts: Sequence[Host], name: str) -> list[Host]:
    """Return ``hosts`` with a slot fewer of the host ``name``, and without it if that was its last."""
    fewer = [Host(host.name, host.num_slots - (host.name == name)) for host in hosts]
    return [host for host in fewer if host.num_slots > 0]
