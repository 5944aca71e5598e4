# SPDX-License-Identifier: Apache-2.0
"""What the launcher calls the processes of a job: in messages, before their lines, and as the names of their logs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ProcessName:
    """The names of one process.

    Attributes:
        text: in messages, "worker 1".
        prefix: before each of its lines, "[w1] "; those of a job are equally wide.
        log: its file in the folder of logs, "worker-1.log".
    """

    text: str
    prefix: str
    log: str


def rank_names(num_ranks: int) -> list[ProcessName]:
    """Return the names of a job without servers, by number: "rank 0", "[0] ", "rank-0.log"."""
    return _names([("rank", "", number) for number in range(num_ranks)])


def role_names(num_workers: int, num_servers: int) -> list[ProcessName]:
    """Return the names of a job's processes by role, in the order of ranks: "worker 0", "[w0] ", "worker-0.log"."""
    workers = [("worker", "w", number) for number in range(num_workers)]
    return _names(workers + [("server", "s", number) for number in range(num_servers)])


def _names(roles: list[tuple[str, str, int]]) -> list[ProcessName]:
    width = max(len(f"{letter}{number}") for _, letter, number in roles)
    return [
        ProcessName(f"{word} {number}", f"[{f'{letter}{number}':>{width}}] ", f"{word}-{number}.log")
        for word, letter, number in roles
    ]
