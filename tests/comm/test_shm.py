# SPDX-License-Identifier: Apache-2.0
"""Faults of the shm transport: ranks that die, stop, leave or disagree, and a /dev/shm that is full or occupied."""

from __future__ import annotations

import gc
import multiprocessing
import os
import re
import resource
import secrets
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from singa_lite.comm import lost_ranks
from singa_lite.comm.base import Communicator, World
from singa_lite.comm.flight_record import files_of
from singa_lite.comm.shm import ShmCommunicator
from singa_lite.errors import CommError
from tests.limits import LIMIT_S
from tests.ranks import RankDied, run_ranks

SHM = Path("/dev/shm")


def wait_for(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.001)


def in_time(is_late: Callable[[Any], bool], *call: Any, **options: Any) -> Any:
    """What ``run_ranks`` returns, called again where a busy machine made ranks miss the short time-out under test."""
    for _ in range(10):
        results = run_ranks(*call, **options)
        if not is_late(results):
            break
    return results


class Announced(ShmCommunicator):
    """Makes a file once it has attached and waits for the others."""

    announcement: Path

    def _lost_rank(self) -> str:
        self.announcement.touch()
        return ""


def caught(call: Any) -> str:
    """The text of the CommError that ``call()`` raises, "" if it raises none."""
    try:
        call()
    except CommError as error:
        return str(error)
    return ""


def sums_for_ever(c: Communicator, elements: int, end: str) -> str:
    """All-reduce until it fails; rank 1 goes its own way after three rounds."""
    array = np.ones(elements, np.float32)
    for number in range(1_000_000):
        if c.rank == 1 and number == 3:
            work = c.all_reduce(array, "max", name="grad")  # the others find it half done
            if end == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif end == "raise":
                raise ValueError("the loss is NaN")
            elif end == "leave":
                work.wait()
                c.close()
                return "left"
            elif end == "exit":
                os._exit(3)
        text = caught(lambda: c.all_reduce(array, "max", name="grad").wait())
        if text:
            return text
    return ""


@pytest.mark.parametrize("elements", [1, 50_000, 3_000_000])
def test_a_killed_rank_is_an_error_on_the_two_others(elements: int) -> None:
    results = run_ranks(sums_for_ever, 3, elements, "kill", return_exceptions=True)
    assert isinstance(results[1], RankDied)
    for rank in (0, 2):
        assert f"rank {rank}: all_reduce #" in results[rank] and "'grad'" in results[rank]
        assert "rank 1 (process" in results[rank] and "died" in results[rank]


@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_that_exits_without_closing_counts_as_dead(size: int) -> None:
    results = run_ranks(sums_for_ever, size, 1000, "exit", return_exceptions=True)
    assert all("died" in results[rank] for rank in range(size) if rank != 1)


def test_an_exception_on_one_rank_reaches_the_others_in_words() -> None:
    results = run_ranks(sums_for_ever, 3, 1000, "raise", return_exceptions=True)
    assert isinstance(results[1], ValueError)
    assert all("rank 1 aborted: ValueError: the loss is NaN" in results[rank] for rank in (0, 2))


def test_one_step_more_than_a_closed_rank_is_an_error() -> None:
    results = run_ranks(sums_for_ever, 3, 1000, "leave")
    assert results[1] == "left"
    assert all("rank 1" in results[rank] and "closed" in results[rank] for rank in (0, 2))


def last_call(c: Communicator) -> float:
    array = np.full(1000, float(c.rank))
    work = c.all_reduce(array, "sum")
    if c.rank == 1:
        work.wait()
        c.close()
    else:
        time.sleep(0.2)  # the peer has long closed, but left all we need
        work.wait()
    return float(array[0])


def test_what_a_rank_left_before_it_closed_is_still_good() -> None:
    assert run_ranks(last_call, 2) == [1.0, 1.0]


def zombie(world: World) -> str:
    """Rank 0 forks rank 1 itself and does not collect it."""
    if world.rank == 1:
        return ""
    pid = os.fork()
    c = ShmCommunicator(World(int(pid == 0), 2, int(pid == 0), 2, world.rendezvous_id, "shm"), 200)
    if pid == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    text = caught(lambda: c.barrier())
    state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    os.waitpid(pid, 0)
    return f"{state}: {text}"


def test_a_peer_that_is_a_zombie_counts_as_dead() -> None:
    text = run_ranks(zombie, 2, transport="none")[0]
    assert text.startswith("Z: ") and "died" in text


def stopped(c: Communicator, folder: str) -> str:
    (Path(folder) / str(c.rank)).write_text(str(os.getpid()))
    c.barrier()
    victim = int((Path(folder) / "2").read_text())
    if c.rank == 2:
        os.kill(victim, signal.SIGSTOP)
    else:  # it may still be on its way there
        stat_file = Path(f"/proc/{victim}/stat")
        wait_for(lambda: stat_file.read_text().rpartition(")")[2].split()[0] == "T")
    text = caught(lambda: [c.all_reduce(np.ones(10), "sum", name="grad").wait(1.0) for _ in range(4)])
    if c.rank == 0:
        os.kill(victim, signal.SIGCONT)
    return text


def test_a_stopped_rank_is_a_time_out_that_names_it(tmp_path: Path) -> None:
    texts = run_ranks(stopped, 3, str(tmp_path))
    # on a busy machine another rank may be late as well
    assert any(re.search(r"waited 1 s for rank ([013], )*2", text) for text in texts[:2]), texts
    assert all(texts), texts


def late(world: World, folder: str) -> str:
    given_up = Path(folder) / world.rendezvous_id
    try:
        c = ShmCommunicator(world, 0.5)
    except CommError as error:
        return f"no world: {error}"
    if world.rank == 1:
        wait_for(given_up.exists)
    text = caught(lambda: c.all_reduce(np.ones(3_000_000), "sum").wait())
    given_up.touch()
    c.close()
    return text


def test_the_communicators_own_time_out_ends_a_large_collective(tmp_path: Path) -> None:
    def is_late(texts: list[str]) -> bool:
        return any(text.startswith("no world") for text in texts)

    texts = in_time(is_late, late, 2, str(tmp_path), transport="none")
    assert "waited 0.5 s for rank 1" in texts[0] and "rank 0 aborted" in texts[1]


def forked_use(c: Communicator) -> str:
    c.all_reduce(np.ones(3_000_000), "sum").wait()  # there is a background thread
    in_flight = c.all_reduce(np.ones(10), "sum")
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        texts = [caught(lambda: c.all_reduce(np.ones(3), "sum")), caught(in_flight.wait)]
        c.close()
        os.write(writer, "|".join(texts).encode())
        del c
        gc.collect()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    in_flight.wait()
    c.barrier()  # the parent goes on, and its peers don't take it for dead
    return os.read(reader, 10_000).decode()


def test_a_forked_child_gets_an_error_and_harms_nobody() -> None:
    for text in run_ranks(forked_use, 2):
        assert text.count("fork()") == 2


def shape_of_segment(world: World) -> dict[str, Any]:
    os.umask(0)
    path = SHM / f"singa_lite-{world.rendezvous_id}"
    if world.rank == 1:
        wait_for(path.exists)
        wait_for(lambda: path.stat().st_blocks * 512 >= path.stat().st_size > 1_000_000)
        status = path.stat()
    c = ShmCommunicator(world, 200)
    seen = {"exists": path.exists()}
    if world.rank == 1:
        allocated = status.st_blocks * 512 >= status.st_size > 1_000_000
        seen.update(mode=stat.S_IMODE(status.st_mode), allocated=allocated)
    c.close()
    return seen


def test_the_segment_is_private_really_allocated_and_unlinked_after_attach() -> None:
    first, second = run_ranks(shape_of_segment, 2, transport="none")
    assert first == {"exists": False}
    assert second == {"exists": False, "mode": 0o600, "allocated": True}


def open_world(world: World, size: int | None = None, rank: int | None = None, timeout_s: float = 200) -> str:
    mine = World(
        world.rank if rank is None else rank, size or world.size, 0, world.size, world.rendezvous_id, "shm"
    )
    return caught(lambda: ShmCommunicator(mine, timeout_s).close())


def limited(world: World) -> str:
    """Rank 0 may not make files above 64 KB, which fails where a full /dev/shm does: at the allocation."""
    if world.rank == 0:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (65536, resource.RLIM_INFINITY))
    text = open_world(world, timeout_s=0.5)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return text


def test_a_limit_on_the_size_of_files_is_an_error_that_names_it() -> None:
    texts = run_ranks(limited, 2, transport="none")
    assert "needs 1.1 MB" in texts[0] and "ulimit -f" in texts[0]
    assert texts[1], "rank 1 took part in a world that does not exist"


RANK_0 = """
from singa_lite.comm.base import World
from singa_lite.comm.shm import ShmCommunicator
from singa_lite.errors import CommError
try:
    ShmCommunicator(World(0, 2, 0, 2, "full", "shm"), 0.5)
except CommError as error:
    print(error)
"""


def test_no_space_for_the_segment_is_an_error_that_says_how_much_is_needed() -> None:
    mounted = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=64k tmpfs /dev/shm && exec "$@"', "sh"]
    try:
        subprocess.run([*mounted, "true"], check=True, capture_output=True, timeout=LIMIT_S)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"/dev/shm cannot be mounted anew here: {error}")
    done = subprocess.run(
        [*mounted, sys.executable, "-c", RANK_0], capture_output=True, text=True, timeout=LIMIT_S
    )
    assert "needs 1.1 MB" in done.stdout and "free" in done.stdout and "--shm-size" in done.stdout, done


def full_group(c: Communicator) -> str:
    if c.rank == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (65536, resource.RLIM_INFINITY))
    text = caught(lambda: c.new_group([1, 2], name="pair"))
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    c.barrier()  # the parent is not harmed
    return text


def test_no_room_for_a_group_is_an_error_on_all_ranks_of_the_parent() -> None:
    assert all("pair" in text and "needs" in text for text in run_ranks(full_group, 3))


def group_beside_squatters(c: Communicator) -> bool:
    """Make a group where somebody has taken every name that can be guessed from the world's."""
    taken = [SHM / f"singa_lite-{c.world.rendezvous_id}{suffix}" for suffix in ("-0", "-1", "-2", "-group")]
    if c.rank == 0:
        for path in taken:
            path.write_bytes(b"not ours")
    c.barrier()
    try:
        group = c.new_group([1, 0])
        assert group is not None
        array = np.full(3, c.rank + 1.0)
        group.all_reduce(array, "sum").wait()
        group.close()
        c.barrier()
        return bool((array == 3).all())
    finally:
        if c.rank == 0:
            for path in taken:
                path.unlink()


def test_a_groups_segment_has_a_name_that_nobody_can_take_before() -> None:
    assert run_ranks(group_beside_squatters, 2) == [True, True]


def test_a_cut_character_does_not_hide_the_error() -> None:
    name = "é" * 2000
    texts = run_ranks(renamed, 2, name)
    assert all("the ranks disagree" in text and "é" in text for text in texts), texts


def renamed(c: Communicator, name: str) -> str:
    return caught(lambda: c.all_reduce(np.ones(3), "sum", name=f"{c.rank}{name}").wait())


def overwritten(c: Communicator, start: int, content: bytes) -> str:
    """Make collectives, and have rank 1 write ``content`` into the world's segment before the fourth."""

    def train() -> None:
        for step in range(20):
            if (c.rank, step) == (1, 3):
                (path,) = files_of(os.getpid(), f"/dev/shm/singa_lite-{c.world.rendezvous_id}")
                os.pwrite(int(Path(path).name), content, start)
            array = np.full(100_000, c.rank + step, np.float32)
            c.all_reduce(array, "sum", name="x").wait()
            assert array.tolist() == [3 + 3 * step] * array.size

    return caught(train) or "right"


def test_an_overwritten_header_does_no_harm() -> None:
    assert run_ranks(overwritten, 3, 0, b"\xff" * 4096) == ["right"] * 3


@pytest.mark.parametrize(
    ("content", "rank"), [(b"\xff" * 24, 2), (b"\xff" * 24, 1), (bytes(24), 1), (bytes(24), 0)]
)
def test_an_overwritten_counter_is_an_error_on_all_ranks_in_time_or_does_no_harm(
    content: bytes, rank: int
) -> None:
    # the three counters of a rank, in its RankBlock of native/comm/segment.h, behind the header
    for text in run_ranks(overwritten, 3, 4096 + 192 * rank, content, communicator_timeout_s=1):
        assert text == "right" or "place in the shared memory is damaged" in text or "waited 1 s" in text, (
            text
        )


@pytest.mark.parametrize(
    "content", [b"1\t2 3\n", b"\0 5\n", b"7 \n\n \n", b"\xff " * 99, b"9" * 99 + b" 1\n"]
)
def test_a_damaged_list_of_ranks_is_no_list(content: bytes) -> None:
    rendezvous_id = f"test{secrets.token_hex(8)}"
    path = Path(lost_ranks._members(rendezvous_id))
    path.write_bytes(content)
    try:
        assert lost_ranks.lost_rank(rendezvous_id, 2) == ""
    finally:
        path.unlink()


def wrong_size(world: World) -> str:
    return open_world(world, size=3 if world.rank == 1 else 2)


def test_ranks_that_disagree_about_their_number_raise() -> None:
    for text in run_ranks(wrong_size, 2, transport="none"):
        assert "rank 0 says the world has 2 ranks, rank 1 says 3" in text


def same_rank(world: World, folder: str) -> str:
    waits = Path(folder) / world.rendezvous_id
    if world.rank == 0:  # gives up while rank 1 still waits
        return open_world(world, timeout_s=2)
    if world.rank == 2:
        wait_for(waits.exists)
        return open_world(world, rank=1)
    Announced.announcement = waits
    text = caught(lambda: Announced(world, 200).close())
    waits.touch()
    return text


def test_a_rank_taken_twice_is_an_error(tmp_path: Path) -> None:
    def is_late(texts: list[str]) -> bool:  # rank 0 had left before the others came
        return "rank 1 is taken" not in texts[2] or "for rank 2 to start" not in texts[0]

    texts = in_time(is_late, same_rank, 3, str(tmp_path), transport="none")
    assert "rank 1 is taken by process" in texts[2]
    assert "for rank 2 to start" in texts[0]


def missing(world: World) -> str:
    return "" if world.rank == 1 else open_world(world, timeout_s=0.5)


def test_a_rank_that_never_starts_is_named() -> None:
    assert "for rank 1 to start" in run_ranks(missing, 2, transport="none")[0]


def killed_early(world: World, folder: str) -> str:
    is_dead = Path(folder) / "dead"
    if world.rank == 0:
        Announced.announcement = Path(folder) / "waits"
        pid = os.fork()
        if pid == 0:
            Announced(World(0, 2, 0, 2, world.rendezvous_id, "shm"), 2 * LIMIT_S)
        wait_for(Announced.announcement.exists)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        is_dead.touch()
        return ""
    wait_for(is_dead.exists)
    text = open_world(world)
    return f"{text} {(SHM / f'singa_lite-{world.rendezvous_id}').exists()}"


def test_a_segment_whose_maker_died_is_refused_and_removed(tmp_path: Path) -> None:
    text = run_ranks(killed_early, 2, str(tmp_path), transport="none")[1]
    assert "rank 0 has died" in text and text.endswith("False")


def test_a_rendezvous_id_in_use_is_refused() -> None:
    path = SHM / f"singa_lite-{secrets.token_hex(8)}"
    path.write_bytes(b"not ours")
    try:
        world = World(0, 2, 0, 2, path.name.removeprefix("singa_lite-"), "shm")
        assert "exists already" in caught(lambda: ShmCommunicator(world, 1))
        assert path.read_bytes() == b"not ours"
    finally:
        path.unlink()


@pytest.mark.parametrize("mode", [0o644, 0o666])
def test_a_segment_open_to_others_is_refused(mode: int) -> None:
    path = SHM / f"singa_lite-{secrets.token_hex(8)}"
    path.touch()
    path.chmod(mode)
    try:
        world = World(1, 2, 1, 2, path.name.removeprefix("singa_lite-"), "shm")
        assert "open to other users" in caught(lambda: ShmCommunicator(world, 1))
    finally:
        path.unlink()


@pytest.mark.parametrize("rendezvous_id", ["", "a/b", "x" * 300])
def test_a_rendezvous_id_that_is_no_file_name_is_refused(rendezvous_id: str) -> None:
    assert "rendezvous id" in caught(lambda: ShmCommunicator(World(0, 1, 0, 1, rendezvous_id, "shm"), 1))


def use_after_close(c: Communicator) -> str:
    work = c.all_reduce(np.ones(3), "sum")
    work.wait()
    c.barrier()
    late_work = c.all_reduce(np.ones(3_000_000), "sum") if c.rank == 0 else None
    c.close()
    c.close()
    work.wait()
    return caught(lambda: c.barrier()) + (caught(late_work.wait) if late_work else "")


def test_close_is_final_and_may_be_repeated() -> None:
    first, second = run_ranks(use_after_close, 2)
    assert "closed while a collective was in flight" in first and "this communicator is closed" in second


def ends_in_flight(rendezvous_id: str, rank: int) -> None:
    c = ShmCommunicator(World(rank, 2, rank, 2, rendezvous_id, "shm"), 200)
    works = [c.all_reduce(np.ones(4_000_000), "sum") for _ in range(3)]
    if rank == 0:
        works[0].wait()
    raise SystemExit(7 + rank)


def test_an_interpreter_may_end_with_works_in_flight() -> None:
    context, rendezvous_id = multiprocessing.get_context("spawn"), secrets.token_hex(8)
    ranks = [context.Process(target=ends_in_flight, args=(rendezvous_id, rank)) for rank in (0, 1)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(LIMIT_S)
    # 7 and 8, or 1 for a CommError, as the other may have left already; neither a crash nor a hang
    assert ranks[0].exitcode in (1, 7) and ranks[1].exitcode in (1, 8)
    assert not list(SHM.glob(f"singa_lite-{rendezvous_id}*"))


def threads_of(c: Communicator) -> tuple[int, int]:
    def count() -> int:
        return len(list(Path("/proc/self/task").iterdir()))

    c.all_reduce(np.ones(100), "sum").wait()
    before = count()
    c.all_reduce(np.ones(1_000_000), "sum").wait()
    after = count()
    c.barrier()
    return before, after


def test_a_thread_starts_with_the_first_large_collective_only() -> None:
    for before, after in run_ranks(threads_of, 2):
        assert (before, after) == (1, 2)


def in_two_threads(c: Any) -> list[str]:
    group = c.new_group(list(range(c.size)))
    assert group is not None
    found: list[str] = []

    def all_reduce() -> None:
        try:
            c.all_reduce(np.ones(3, np.float32), "sum", name="other").wait()
            found.append("ended")
        except CommError as error:
            found.append(str(error))

    def in_thread() -> None:
        thread = threading.Thread(target=all_reduce)
        thread.start()
        thread.join()

    in_thread()  # while none is in flight
    if c.rank == 0:
        group.barrier()
    work = c.all_reduce(np.ones(3, np.float32), "sum", name="first")
    if c.rank > 0:  # rank 0 has not started it
        in_thread()
        group.barrier()
    work.wait()
    in_thread()
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_threads_may_take_turns_but_not_have_collectives_in_flight_at_once(size: int) -> None:
    first, *others = run_ranks(in_two_threads, size)
    assert first == ["ended", "ended"]
    for before, meanwhile, after in others:
        assert before == after == "ended"
        assert "all_reduce 'other': another thread has started all_reduce 'first'" in meanwhile
