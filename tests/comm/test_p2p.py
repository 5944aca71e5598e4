# SPDX-License-Identifier: Apache-2.0
"""What every messenger must do, over every transport, in jobs of 2, 3 and 4 processes.

One launch for each transport and job runs all facts one after the other (each a function of FACTS) and every test
reports its own. Workers and servers are ranks of ``run_ranks``.
"""

from __future__ import annotations

import functools
import math
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from singa_lite.comm import find_messengers, p2p_mpi
from singa_lite.comm.base import DTYPES, Communicator
from singa_lite.comm.job import Job
from singa_lite.comm.p2p import Message, Messenger
from singa_lite.errors import CommError, DTypeError, OptionError, ShapeError
from tests.limits import LIMIT_S
from tests.ranks import mpi_missing, run_ranks
from tests.slow_cases import slow_but_first

Array = np.ndarray[Any, Any]
JOBS = [(2, 2), (2, 1), (1, 1)]  # workers, servers
LARGE = 64 << 20  # bytes


@dataclass
class Rig:
    """One process of the job under test.

    Attributes:
        messenger: shared by the facts that do not end it.
        barrier: returns once all processes of the job have called it.
        another: makes a new messenger, together with all others, for a fact that ends it.
    """

    messenger: Messenger
    barrier: Callable[[], None]
    another: Callable[[str], Messenger]


FACTS: list[Callable[[Rig], None]] = []


def fact(function: Callable[[Rig], None]) -> Callable[[Rig], None]:
    FACTS.append(function)
    return function


def data(source: int, to: int, number: int, size: int, dtype: Any = np.float32) -> Array:
    """What ``source`` sends to ``to``, the same whoever asks."""
    return np.random.default_rng([source, to, number]).standard_normal(size).astype(dtype)


def same_bits(one: Array, other: Array) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()


def caught(call: Callable[[], Any], kind: type[Exception] = CommError) -> str:
    with pytest.raises(kind) as error:
        call()
    return str(error.value)


@fact
def headers_come_as_they_were_sent(rig: Rig) -> None:
    m = rig.messenger
    header = {"from": m.job.rank, "text": "ü\n" * 100, "list": [None, True, 0.5, 1 << 60], "empty": {}}
    for peer in m.job.peers:
        m.send(peer, header).wait()
    messages = [m.receive() for _ in m.job.peers]
    assert sorted(message.source for message in messages) == list(m.job.peers)
    for message in messages:
        assert message.header == {**header, "from": message.source} and message.reason == ""
        assert message.read() == [] and message.shapes == [] and message.num_bytes == 0


def exchange(rig: Rig, arrays_for: Callable[[int, int], list[Array]]) -> None:
    """Send every peer what ``arrays_for(this rank, peer)`` gives, and compare what comes from each."""
    m = rig.messenger
    works = [m.send(peer, [m.job.rank, peer], arrays_for(m.job.rank, peer)) for peer in m.job.peers]
    sources = []
    for _ in m.job.peers:
        message = m.receive()
        sources.append(message.source)
        assert message.header == [message.source, m.job.rank] and not message.reason
        expected = arrays_for(message.source, m.job.rank)
        assert message.shapes == [array.shape for array in expected]
        assert message.dtypes == [array.dtype for array in expected]
        into = [np.zeros_like(array) for array in expected]
        got = message.read(into)
        assert all(one is other for one, other in zip(got, into, strict=True))
        assert all(map(same_bits, got, expected))
    assert sorted(sources) == list(m.job.peers)
    for work in works:
        assert work.wait() is None
    rig.barrier()  # nobody sends for the next one yet


@fact
def arrays_of_every_dtype_size_and_shape_arrive(rig: Rig) -> None:
    for number, size in enumerate((0, 1, 7, 4099, 70_001)):
        exchange(
            rig,
            lambda a, b, n=number, k=size: [data(a, b, n, k + a + b, dtype) for dtype in DTYPES],  # type: ignore[misc]
        )
    shapes = [(), (0,), (3, 0, 2), (1,), (2, 3, 4)]
    exchange(
        rig,
        lambda a, b: [data(a, b, 7, math.prod(shape)).reshape(shape) for shape in shapes],
    )
    exchange(rig, lambda a, b: [np.zeros((0,), np.int64)] * 3)


@fact
def arrays_may_be_changed_once_they_have_been_sent(rig: Rig) -> None:
    m = rig.messenger
    arrays = {peer: data(m.job.rank, peer, 0, 40_001) for peer in m.job.peers}
    works = {peer: m.send(peer, "before", [array]) for peer, array in arrays.items()}
    for peer, work in works.items():
        work.wait()
        arrays[peer][...] = -1
    for _ in m.job.peers:
        message = m.receive()
        assert same_bits(message.read()[0], data(message.source, m.job.rank, 0, 40_001))


@fact
def sixty_four_megabytes_each_way_at_once_arrive(rig: Rig) -> None:
    """All send before any receives, and wait for that first: nobody reads until all was sent."""
    m = rig.messenger
    arrays = {
        peer: np.full(LARGE // 8 // len(m.job.peers), m.job.rank * 10 + peer, np.float64)
        for peer in m.job.peers
    }
    works = [m.send(peer, "large", [arrays[peer]]) for peer in m.job.peers]
    for work in works:
        work.wait()
    for _ in m.job.peers:
        message = m.receive()
        (got,) = message.read()
        assert (got == message.source * 10 + m.job.rank).all()


@fact
def reading_while_sending_moves_both(rig: Rig) -> None:
    """The same without waiting first: the calls that read move what is sent."""
    m = rig.messenger
    sizes = [3_000_000, 3, 1_000_000, 0, 1_000_003]
    works = []
    for number, size in enumerate(sizes):
        for peer in m.job.peers:
            works.append(m.send(peer, number, [np.full(size // len(m.job.peers), number + 1, np.float32)]))
    numbers: dict[int, list[int]] = {peer: [] for peer in m.job.peers}
    for _ in range(len(sizes) * len(m.job.peers)):
        message = m.receive()
        numbers[message.source].append(message.header)
        (got,) = message.read()
        assert (got == message.header + 1).all()
    assert all(order == list(range(len(sizes))) for order in numbers.values())
    for work in works:
        work.wait()
        assert work.done()


@fact
def messages_of_a_pair_keep_their_order(rig: Rig) -> None:
    m = rig.messenger
    sizes = np.random.default_rng(5).integers(0, 20_000, 60)
    works = [
        m.send(peer, number, [data(m.job.rank, peer, number, int(size))] if size % 3 else [])
        for number, size in enumerate(sizes)
        for peer in m.job.peers
    ]
    numbers = dict.fromkeys(m.job.peers, 0)
    while any(number < len(sizes) for number in numbers.values()):
        message = m.receive()
        number = numbers[message.source]
        assert message.header == number
        arrays = message.read()
        if sizes[number] % 3:
            assert same_bits(arrays[0], data(message.source, m.job.rank, number, int(sizes[number])))
        numbers[message.source] += 1
    for work in works:
        work.wait()


@fact
def a_source_that_floods_does_not_starve_another(rig: Rig) -> None:
    """Peer 0 sends 300 messages before the other sends one; that one is among the first of those received after."""
    m = rig.messenger
    if len(m.job.peers) == 1 and m.job.num_workers + m.job.num_servers == 2:
        return
    first_of = {0, m.job.num_workers}
    is_flooding = m.job.rank in first_of
    works = []
    if is_flooding:
        works = [m.send(peer, "flood", [np.zeros(50)]) for peer in m.job.peers for _ in range(300)]
    rig.barrier()
    if not is_flooding:
        works = [m.send(peer, "one", [np.ones(50)]) for peer in m.job.peers]
    rig.barrier()
    sources = []
    for _ in range(300 + len(m.job.peers) - 1):
        message = m.receive()
        message.read()
        sources.append(message.source)
    others = [peer for peer in m.job.peers if peer not in first_of]
    assert all(sources.index(other) <= 20 for other in others), sources[:40]
    for work in works:
        work.wait()


@fact
def a_message_may_be_read_late_or_not_at_all(rig: Rig) -> None:
    m = rig.messenger
    works = [
        m.send(peer, number, [data(m.job.rank, peer, number, 200_003)])
        for number in range(4)
        for peer in m.job.peers
    ]
    messages: list[Message] = [m.receive() for _ in range(4 * len(m.job.peers))]
    for message in reversed(messages):
        if message.header != 1:
            (got,) = message.read()
            assert same_bits(got, data(message.source, m.job.rank, message.header, 200_003))
    for work in works:
        work.wait()


@fact
def done_comes_true_without_wait(rig: Rig) -> None:
    m = rig.messenger
    works = [m.send(peer, "large", [np.ones(1_000_003)]) for peer in m.job.peers]
    deadline = time.monotonic() + LIMIT_S
    while not all(work.done() for work in works):
        assert time.monotonic() < deadline
    for _ in m.job.peers:
        assert m.receive().read()[0].sum() == 1_000_003


@fact
def bad_arguments_raise_before_anything_moves(rig: Rig) -> None:
    m = rig.messenger
    peer, array = m.job.peers[0], np.ones(4, np.float32)
    not_a_peer = m.job.rank
    recursive: list[Any] = []
    recursive.append(recursive)
    bad: list[tuple[type[Exception], Callable[[], Any]]] = [
        (OptionError, lambda: m.send(not_a_peer, "x")),
        (OptionError, lambda: m.send(-1, "x")),
        (OptionError, lambda: m.send(m.job.size, "x")),
        (OptionError, lambda: m.send(True, "x")),
        (OptionError, lambda: m.send("0", "x")),  # type: ignore[arg-type]
        (OptionError, lambda: m.receive("1")),  # type: ignore[arg-type]
        (OptionError, lambda: m.receive(float("nan"))),
        (OptionError, lambda: m.send(peer, object())),
        (OptionError, lambda: m.send(peer, {1, 2})),
        (OptionError, lambda: m.send(peer, recursive)),
        (OptionError, lambda: m.send(peer, "x" * (1 << 20))),
        (DTypeError, lambda: m.send(peer, "x", [[1.0]])),  # type: ignore[list-item]
        (DTypeError, lambda: m.send(peer, "x", [array, np.ones(3, np.complex64)])),
        (DTypeError, lambda: m.send(peer, "x", [np.ones(3, ">f4")])),
        (ShapeError, lambda: m.send(peer, "x", [np.ones((4, 4))[:, 1]])),
    ]
    before = replace(m.traffic)
    for kind, call in bad:
        caught(call, kind)
    assert m.traffic == before
    read_only = np.empty((2, 3), np.float32)
    read_only.flags.writeable = False
    works = [m.send(to, "good", [data(m.job.rank, to, 0, 6).reshape(2, 3)]) for to in m.job.peers]
    for _ in m.job.peers:
        message = m.receive()
        assert message.header == "good"
        for kind, into in (
            (ShapeError, []),
            (ShapeError, [array, array]),
            (ShapeError, [np.empty(6, np.float32)]),
            (ShapeError, [np.empty((3, 2), np.float32).T]),
            (ShapeError, [read_only]),
            (DTypeError, [np.empty((2, 3), np.float64)]),
            (DTypeError, [[0.0] * 6]),
        ):
            caught(lambda into=into, message=message: message.read(into), kind)  # type: ignore[misc]
        (got,) = message.read()
        assert same_bits(got, data(message.source, m.job.rank, 0, 6).reshape(2, 3))
        assert "was read before" in caught(message.read, OptionError)
    for work in works:
        work.wait()


@fact
def bytes_are_counted(rig: Rig) -> None:
    m = rig.messenger
    before = replace(m.traffic)
    exchange(rig, lambda a, b: [np.ones(1000, np.float16), np.ones(7, np.int64)])
    peers = len(m.job.peers)
    assert m.traffic.bytes_sent - before.bytes_sent == peers * 2056
    assert m.traffic.bytes_received - before.bytes_received == peers * 2056
    assert m.traffic.bytes_heads - before.bytes_heads == 2 * peers * len(
        '{"header":[0,1],"arrays":[["float16",[1000]],["int64",[7]]]}'
    )
    assert m.traffic.wait_s > before.wait_s


@fact
def nothing_in_time_is_an_error_that_names_the_peers(rig: Rig) -> None:
    m = rig.messenger
    text = caught(lambda: m.receive(0.01))
    assert text.startswith(f"{m.name}: waited 0.01 s for a message from {m.job.names_of(m.job.peers)}"), text
    rig.barrier()  # and the messenger is good for more
    exchange(rig, lambda a, b: [data(a, b, 0, 5)])


@fact
def a_peer_that_makes_no_call_is_an_error_that_names_it(rig: Rig) -> None:
    """And once it does make calls, the message arrives all the same."""
    m = rig.messenger
    works = []
    if not m.job.is_server:
        works = [m.send(peer, "large", [np.ones(1_000_003)]) for peer in m.job.peers]
        for peer, work in zip(m.job.peers, works, strict=True):
            text = caught(lambda work=work: work.wait(0.02))  # type: ignore[misc]
            assert text.startswith(f"{m.name}: waited 0.02 s for {m.job.name_of(peer)} to take a message"), (
                text
            )
    rig.barrier()
    if m.job.is_server:
        first = m.receive()
        if m.transport == "shm":  # MPI may copy from the memory of a process that makes no call
            text = caught(lambda: first.read(timeout_s=0.02))
            assert f"for the arrays of a message from {m.job.name_of(first.source)}" in text, text
    rig.barrier()
    if m.job.is_server:
        for _ in m.job.peers[1:]:
            assert m.receive().read()[0].sum() == 1_000_003
        works = [m.send(peer, "that was all") for peer in m.job.peers]
        assert all(m.receive().header == "thanks" for _ in m.job.peers)  # this call moves what was not read
    else:
        assert all(m.receive().header == "that was all" for _ in m.job.peers)
        for work in works:
            work.wait()
        works = [m.send(peer, "thanks") for peer in m.job.peers]
    for work in works:
        work.wait()
    assert not m.is_stuck
    rig.barrier()
    exchange(rig, lambda a, b: [data(a, b, 0, 5)])


@fact
def large_arrays_are_cut_for_mpi(rig: Rig) -> None:
    """As if no MPI took more than 1000 bytes at a time: in fact it is 2**31 - 1."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(p2p_mpi, "PIECE_BYTES", 1000)
        rig.barrier()
        exchange(rig, lambda a, b: [data(a, b, n, n, np.float64) for n in (125, 1000, 1001, 0, 12_501)])


@fact
def a_peer_that_closes_is_one_message_after_all_it_had_sent(rig: Rig) -> None:
    m = rig.another("closes")
    if not m.job.is_server:
        works = [m.send(peer, number, [np.full(9, number)]) for number in range(5) for peer in m.job.peers]
        for work in works:
            work.wait()
        m.close()
        m.close()
        assert "is closed" in caught(lambda: m.send(m.job.peers[0], "x"))
        assert "is closed" in caught(m.receive)
    else:
        seen: dict[int, list[Any]] = {peer: [] for peer in m.job.peers}
        for _ in range(6 * len(m.job.peers)):
            message = m.receive()
            assert message.read() == [] if message.reason else (message.read()[0] == message.header).all()
            seen[message.source].append(message.reason or message.header)
        for peer, messages in seen.items():
            assert messages[:5] == list(range(5)) and messages[5].startswith(f"worker {peer} ")
            assert "has closed its messenger" in messages[5]
            assert "has closed its messenger" in caught(lambda peer=peer: m.send(peer, "x"))  # type: ignore[misc]
        assert "no peer is left" in caught(lambda: m.receive(math.inf))
    rig.barrier()
    m.close()


@fact
def a_peer_that_aborts_gives_its_reason(rig: Rig) -> None:
    m = rig.another("aborts")
    text = "ValueError: the loss is NaN: ü" * 3
    sent = text + r": \ud800 \0"
    if m.job.rank == m.job.size - 1:  # the last server
        m.send(0, "last words", [np.arange(3)]).wait()
        m.abort(text + ": \ud800 \0")
    elif not m.job.is_server:
        seen = []
        while not (seen and seen[-1].reason):
            seen.append(m.receive())
        assert [message.header for message in seen] == ["last words", None][-len(seen) :]
        assert len(seen) == 2 if m.job.rank == 0 else 1
        assert seen[-1].source == m.job.size - 1
        assert seen[-1].reason == f"server {m.job.num_servers - 1} aborted: {sent}"
        assert sent in caught(lambda: m.send(m.job.size - 1, "x", [np.ones(3)]))
        exchange_with_others = [peer for peer in m.job.peers if peer != m.job.size - 1]
        for peer in exchange_with_others:  # who is left is not harmed
            m.send(peer, "good").wait()
    else:
        for _ in m.job.peers:
            assert m.receive().header == "good"
    rig.barrier()
    m.close()


@fact
def a_peer_that_leaves_ends_a_send_that_waits_for_it(rig: Rig) -> None:
    m = rig.another("leaves")
    if m.job.is_server:
        m.abort("enough")
    else:
        works = [(peer, m.send(peer, "large", [np.ones(1_000_003)])) for peer in m.job.peers]
        for peer, work in works:
            assert f"cannot send to {m.job.name_of(peer)}" in caught(work.wait)
            assert work.done() and "enough" in caught(work.wait)
    rig.barrier()
    m.close()


def run_facts(rig: Rig) -> dict[str, str]:
    """Every fact's traceback in this process, "" where it holds; a failure that others wait for ends the list."""
    outcome = {}
    for check in FACTS:
        try:
            check(rig)
            rig.barrier()
            outcome[check.__name__] = ""
        except Exception:
            outcome[check.__name__] = traceback.format_exc()
            rig.messenger.abort(f"the fact {check.__name__} does not hold")
            break
    return outcome


def facts_of_rank(c: Communicator, num_servers: int, rendezvous_id: str) -> dict[str, str]:
    def another(name: str) -> Messenger:
        job = Job(c.rank, c.size - num_servers, num_servers, f"{rendezvous_id}{name}", c.transport)
        return find_messengers()[c.transport](job, LIMIT_S)

    rig = Rig(another(""), c.barrier, another)
    outcome = run_facts(rig)
    rig.messenger.close()
    return outcome


@functools.cache
def outcomes(transport: str, num_workers: int, num_servers: int) -> list[dict[str, str]]:
    if transport == "mpi" and (reason := mpi_missing()):
        pytest.skip(reason)
    rendezvous_id = f"p2p{time.monotonic_ns()}"
    return run_ranks(
        facts_of_rank, num_workers + num_servers, num_servers, rendezvous_id, transport=transport
    )


@slow_but_first("job", JOBS, ids=lambda job: f"{job[0]}+{job[1]}")
@pytest.mark.parametrize("transport", sorted(find_messengers()))
class TestMessengerContract:
    @pytest.mark.parametrize("name", [check.__name__ for check in FACTS])
    def test_that(self, transport: str, job: tuple[int, int], name: str) -> None:
        texts = [outcome.get(name, "not reached") for outcome in outcomes(transport, *job)]
        assert not any(texts), "\n".join(f"-- rank {rank}: {text}" for rank, text in enumerate(texts) if text)
