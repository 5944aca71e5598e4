# SPDX-License-Identifier: Apache-2.0
"""Faults of messages over shared memory: peers that are killed, threads, signals and forks, and a full /dev/shm."""

from __future__ import annotations

import contextlib
import math
import os
import resource
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from singa_lite.comm.base import World
from singa_lite.comm.job import Job
from singa_lite.comm.p2p import Message, Messenger
from singa_lite.comm.p2p_shm import ShmMessenger
from singa_lite.errors import CommError
from tests.limits import LIMIT_S
from tests.ranks import RankDied, run_ranks

SHM = Path("/dev/shm")
RING = 2 << 20
LONG = "h" * (900 << 10)  # a header of nearly 1 MB, the most there may be


def join(world: World, num_servers: int) -> ShmMessenger:
    job = Job(world.rank, world.size - num_servers, num_servers, world.rendezvous_id, "shm")
    return ShmMessenger(job, LIMIT_S)


def caught(call: Any) -> str:
    with pytest.raises(CommError) as error:
        call()
    return str(error.value)


# ---- a peer that is killed ----------------------------------------------------------------------------

STAGES = ("joined", "sent", "half a header", "half an array", "both ways")


def die_at(m: Messenger, stage: str) -> None:
    """Send every peer what belongs to ``stage``, and be killed."""
    large = np.full(8 * RING // 4, 7.0, np.float32)
    for peer in m.job.peers:
        if stage != "joined":
            m.send(peer, "whole", [np.array([1, 2, 3, os.getpid()])]).wait()
        if stage == "half a header":
            for _ in range(8):  # more than a receive takes and the ring holds
                m.send(peer, LONG)
        if stage in ("half an array", "both ways"):
            m.send(peer, "part", [large])
    os.kill(os.getpid(), signal.SIGKILL)


def wait_for_death(pid: int) -> None:
    deadline = time.monotonic() + LIMIT_S
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX":
            assert time.monotonic() < deadline
            time.sleep(0.001)


def survive(world: World, num_servers: int, victim: int, stage: str) -> tuple[list[Any], str, list[Any]]:
    """Return what came from the victim, the error of sending to it, and what came from others."""
    m = join(world, num_servers)
    if world.rank == victim:
        die_at(m, stage)
    others = [peer for peer in m.job.peers if peer != victim]
    if victim not in m.job.peers:
        good = [(m.receive().header, m.send(peer, "good").wait()) for peer in m.job.peers]
        return [], "", good
    work = m.send(victim, "large", [np.ones(8 * RING)]) if stage == "both ways" else None
    seen: list[Message] = []
    while not (seen and seen[-1].reason):
        seen.append(m.receive())
        if seen[-1].header == "whole":
            *numbers, pid = seen[-1].read()[0].tolist()
            assert numbers == [1, 2, 3]
            if stage == "half a header":  # takes nothing more before the victim is dead
                wait_for_death(pid)
        if seen[-1].header == "part":
            assert " is not complete: " in caught(seen[-1].read)
    text = caught(work.wait if work else lambda: m.send(victim, "too late"))
    for peer in others:  # they are not harmed
        m.send(peer, "good").wait()
    good = [m.receive().header for _ in others]
    return [message.reason or message.header[:5] for message in seen], text, good


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("num_servers", "victim"), [(1, 0), (2, 2)], ids=["worker of 2", "server of 2"])
def test_a_killed_peer_is_one_message_after_all_it_had_sent(
    num_servers: int, victim: int, stage: str
) -> None:
    results = run_ranks(survive, 3, num_servers, victim, stage, return_exceptions=True, transport="none")
    assert isinstance(results[victim], RankDied)
    name = "worker 0" if victim == 0 else "server 1"
    peer = 2 if victim == 0 else 0
    seen, text, good = results[peer]
    assert seen[-1].startswith(f"{name} (process ") and seen[-1].endswith(") died")
    whole = [] if stage == "joined" else ["whole"]
    if stage == "half a header":
        whole += ["hhhhh"] * seen.count("hhhhh")
        assert len(whole) < 1 + 8
    part = ["part"] if stage in ("half an array", "both ways") else []
    assert seen[:-1] == [*whole, *part] and "cannot send to" in text and seen[-1] in text
    assert len(good) == 1


# ---- threads, signals, forks ---------------------------------------------------------------------------


def abort_beside(world: World) -> str:
    m = join(world, 1)
    if world.rank == 0:
        return m.receive().reason
    threading.Timer(0.05, m.abort, ["thread 'loader': ValueError: no data"]).start()
    return caught(lambda: m.receive(math.inf))


def test_another_thread_may_abort_while_one_receives() -> None:
    first, second = run_ranks(abort_beside, 2, transport="none")
    assert first == "server 0 aborted: thread 'loader': ValueError: no data"
    assert second == "server 0: this messenger is closed"


def send_when_told(world: World, folder: str) -> Any:
    """Rank 0 waits in receive(), while a thread of it must run for rank 1 to be told to send."""
    m, pipe = join(world, 1), Path(folder) / "pipe"
    if world.rank == 0:
        thread = threading.Thread(target=pipe.write_text, args=["go on"])
        thread.start()
        message = m.receive()
        thread.join()
        return message.header
    return m.send(0, pipe.read_text()).wait()


def test_other_threads_run_while_one_waits(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert run_ranks(send_when_told, 2, str(tmp_path), transport="none") == ["go on", None]


class Interrupted(Exception):
    pass


def interrupt(number: int, frame: Any) -> None:
    raise Interrupted


def interrupted(world: World) -> list[str]:
    """Rank 0 is interrupted while it waits for a message; then all goes on."""
    m = join(world, 1)
    large = np.ones(8 * RING)
    if world.rank == 1:
        headers = [m.receive().header]
        work = m.send(0, "large", [large])  # a part of it fits
        message = m.receive()  # which moves the rest
        work.wait()
        return [*headers, message.header, str(message.read()[0].sum() == large.size)]

    signal.signal(signal.SIGALRM, interrupt)

    def in_the_midst_of(call: Any) -> str:
        signal.setitimer(signal.ITIMER_REAL, 0.02)
        try:
            call()
        except Interrupted:
            return "interrupted"
        return "not interrupted"

    seen = [in_the_midst_of(m.receive)]
    m.send(1, "begin").wait()
    assert m.receive().read()[0].sum() == large.size
    work = m.send(1, "large too", [large])
    work.wait()
    return seen


def test_a_signal_handler_that_raises_ends_the_wait_and_nothing_else() -> None:
    assert run_ranks(interrupted, 2, transport="none") == [["interrupted"], ["begin", "large too", "True"]]


def forked_use(world: World) -> str:
    m = join(world, 1)
    peer = m.job.peers[0]
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        texts = [caught(lambda: m.send(peer, "child")), caught(m.receive)]
        m.close()
        m.abort("nothing happens")
        os.write(writer, "|".join(texts).encode())
        del m
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    m.send(peer, "parent").wait()
    assert m.receive().header == "parent"
    return os.read(reader, 10_000).decode()


def test_a_forked_child_gets_an_error_and_harms_nobody() -> None:
    for text in run_ranks(forked_use, 2, transport="none"):
        assert text.count("made before fork()") == 2


# ---- the file ------------------------------------------------------------------------------------------


def path_after_joining(world: World) -> list[str]:
    m = join(world, 1)
    found = [path.name for path in SHM.glob(f"singa_lite-{world.rendezvous_id}*")]
    m.close()
    return found


def test_the_file_has_no_name_once_all_have_joined() -> None:
    assert run_ranks(path_after_joining, 2, transport="none") == [[], []]


def too_small(world: World, num_workers: int, num_servers: int) -> str:
    """Files above 64 KB cannot be made, which fails where a full /dev/shm does: at the allocation."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (65536, resource.RLIM_INFINITY))
    text = caught(lambda: ShmMessenger(Job(0, num_workers, num_servers, world.rendezvous_id, "shm"), 1))
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return text


@pytest.mark.parametrize(("job", "needs"), [((1, 1), "4.2 MB"), ((2, 2), "16.8 MB"), ((16, 16), "33.6 MB")])
def test_a_ring_has_2_mb_and_all_have_32_mb_at_most(job: tuple[int, int], needs: str) -> None:
    (text,) = run_ranks(too_small, 1, *job, transport="none")
    assert text.startswith("shm: worker 0, /dev/shm/singa_lite-") and f"needs {needs}, and" in text, text
