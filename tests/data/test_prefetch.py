# SPDX-License-Identifier: Apache-2.0
"""The loader thread: order, look-ahead, errors at their position, and an end with its consumer."""

import copy
import gc
import inspect
import itertools
import os
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import Iterator

import pytest

from singa_lite.data import ShardedSampler, SplitSampler, batches, prefetch
from singa_lite.errors import CheckpointError, DataError, OptionError
from tests.limits import LIMIT_S


def loaders():
    return [thread for thread in threading.enumerate() if thread.name == "singa_lite prefetch"]


@pytest.fixture(autouse=True)
def nothing_runs_afterwards():
    yield
    assert not loaders()


@pytest.mark.parametrize("depth", [1, 2, 7, 1000])
def test_items_come_in_order_and_all_of_them(depth):
    assert list(prefetch((number * number for number in range(500)), depth)) == [n * n for n in range(500)]
    assert not loaders()


def test_empty_sources_and_none_as_an_item_are_no_special_case():
    assert list(prefetch([])) == []
    assert list(prefetch([None, 0, None])) == [None, 0, None]


def test_items_are_made_in_one_other_thread():
    threads = set(prefetch(threading.get_ident() for _ in range(20)))
    assert len(threads) == 1 and threads != {threading.get_ident()}


def test_the_thread_goes_exactly_depth_and_one_ahead():
    made, limit = [], threading.Semaphore(0)

    def source():
        for number in itertools.count():
            made.append(number)
            limit.release()
            yield number

    batches = prefetch(source(), 3)
    assert made == []  # nothing before the first is asked for
    for taken in range(1, 6):
        assert next(batches) == taken - 1
        for _ in range(5 if taken == 1 else 1):  # taken + 3 ready + 1 in the making
            assert limit.acquire(timeout=LIMIT_S)
        assert len(made) == taken + 4
        assert not limit.acquire(timeout=0.02) and len(made) == taken + 4
    batches.close()


def test_the_next_item_is_made_while_the_consumer_has_the_last():
    second = threading.Event()

    def source():
        yield 1
        second.set()
        yield 2

    for item in prefetch(source()):
        assert item == 2 or second.wait(LIMIT_S)


def faulty():
    yield 1
    yield 2
    raise ValueError("the third image is damaged")


def test_an_error_is_raised_at_its_place_with_the_traceback_of_the_source():
    seen = []
    with pytest.raises(ValueError, match="third image") as caught:
        for item in prefetch(faulty(), 5):
            seen.append(item)
    assert seen == [1, 2]
    assert "faulty" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert not loaders()


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), StopIteration()])
def test_no_error_of_the_source_is_lost(error):
    def source():
        yield 1
        raise error

    with pytest.raises((SystemExit, KeyboardInterrupt, RuntimeError)):
        list(prefetch(source()))


def leave_by_break(batches):
    for _ in batches:
        break


def leave_by_error(batches):
    with pytest.raises(ZeroDivisionError):
        for _ in batches:
            raise ZeroDivisionError


def leave_by_close(batches):
    next(batches)
    batches.close()


def leave_by_dropping(batches):
    next(batches)
    del batches


@pytest.mark.parametrize("leave", [leave_by_break, leave_by_error, leave_by_close, leave_by_dropping])
def test_an_early_exit_ends_the_thread_and_closes_the_source(leave):
    made, closed = [], []

    def source():
        try:
            for number in itertools.count():
                made.append(number)
                yield number
        finally:
            closed.append(threading.current_thread())

    kept = source()  # so that it ends by being closed, not by being dropped
    leave(prefetch(kept, 2))
    assert not loaders() and kept.gi_frame is None
    count = len(made)
    assert count <= 4 and len(closed) == 1
    assert len(made) == count


def test_a_generator_dropped_by_the_collector_ends_its_thread():
    batches = prefetch(itertools.count())
    next(batches)
    circle = [batches]
    circle.append(circle)
    del batches, circle
    gc.collect()
    assert not loaders()


def test_the_collector_may_drop_the_generator_in_its_own_thread():
    is_dropped, is_collected = threading.Event(), threading.Event()

    def source():
        yield 0
        assert is_dropped.wait(LIMIT_S)
        gc.collect()
        is_collected.set()
        yield 1

    gc.disable()
    try:
        batches = prefetch(source())
        next(batches)
        circle = [batches]
        circle.append(circle)
        del batches, circle
        is_dropped.set()
        assert is_collected.wait(LIMIT_S)
        for thread in loaders():
            thread.join(LIMIT_S)
    finally:
        gc.enable()


def test_an_error_after_the_consumer_left_troubles_nobody():
    batches = prefetch(faulty(), 1)
    assert next(batches) == 1
    batches.close()


class Box:
    pass


def test_items_and_errors_are_not_kept_alive():
    known = []

    def source():
        for _ in range(3):
            box = Box()
            known.append(weakref.ref(box))
            yield box
            del box
        raise ValueError

    gc.disable()
    try:
        with pytest.raises(ValueError):
            for item in prefetch(source(), 1):
                del item
        assert [ref() for ref in known] == [None] * 3
    finally:
        gc.enable()


def test_a_depth_below_one_is_refused_at_once():
    with pytest.raises(OptionError, match="depth = 0"):
        prefetch([1], 0)


def test_an_interpreter_that_ends_with_a_loader_open_is_not_held_up():
    script = (
        "import itertools, singa_lite.data as data\n"
        "batches = data.prefetch(itertools.count())\n"
        "print(next(batches))\n"
        "keep = [batches]; keep.append(keep)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=LIMIT_S)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", "")


def test_with_a_sampler_its_state_is_that_of_the_batch_taken_last():
    reference = ShardedSampler(40, 4, 0, 1, seed=2)
    states = [reference.state_dict() for _ in reference]
    sampler = ShardedSampler(40, 4, 0, 1, seed=2)
    rest = []
    for number, _ in enumerate(prefetch((batch.tolist() for batch in sampler), 3, sampler=sampler)):
        assert sampler.state_dict() == states[number]
        if number == 4:
            break
    assert sampler.state_dict() == states[4]  # what the thread had made ready is not used
    for batch in prefetch((batch.tolist() for batch in sampler), 3, sampler=sampler):
        rest.append(batch)
    again = ShardedSampler(40, 4, 0, 1, seed=2)
    assert rest == [batch.tolist() for batch in again][5:]
    assert sampler.state_dict() == reference.state_dict() and sampler.epoch == 1


def test_values_that_a_script_adds_to_the_state_stay_out_of_the_sampler():
    sampler = ShardedSampler(40, 4, 0, 1)
    for _ in prefetch((batch.tolist() for batch in sampler), sampler=sampler):
        sampler.state_dict()["loss"] = 0.5
    assert sampler.epoch == 1 and "loss" not in sampler.state_dict()


def test_a_loader_within_another_one_has_no_position():
    sampler = ShardedSampler(40, 4, 0, 1, shuffle=False)
    for number, _ in enumerate(prefetch(prefetch((batch.tolist() for batch in sampler), sampler=sampler))):
        with pytest.raises(CheckpointError, match="so make items in one"):
            sampler.state_dict()
        if number == 2:
            break


def test_the_state_of_a_split_sampler_is_that_of_the_batch_taken_last():
    reference, sampler = SplitSampler(43, 2, 0), SplitSampler(43, 2, 0)
    whole, used = [batch.tolist() for batch in batches(reference, 4)], []
    for batch in prefetch(batches(sampler, 4), sampler=sampler):
        used.append(batch.tolist())
        assert sampler.state_dict()["position"] == 4 * len(used)
        if len(used) == 3:
            break
    used += [batch.tolist() for batch in prefetch(batches(sampler, 4), sampler=sampler)]
    assert used == whole and sampler.state_dict() == reference.state_dict()


def nested(sampler):
    return prefetch((batch for batch in sampler), 3)


def taken_before(sampler):
    return [batch.tolist() for batch in sampler]


def by_nobody(sampler):
    return range(4)


@pytest.mark.parametrize("items", [nested, taken_before, by_nobody])
def test_items_whose_batches_another_thread_has_taken_have_no_position(items):
    sampler = ShardedSampler(40, 4, 0, 1)
    with pytest.raises(CheckpointError, match="got an item whose batch another thread has taken, or nobody"):
        list(prefetch(items(sampler), sampler=sampler))


def sharded_and_batches():
    sampler = ShardedSampler(40, 4, 0, 1)
    return sampler, (batch for batch in sampler)


def split_and_batches():
    sampler = SplitSampler(40, 1, 0)
    return sampler, batches(sampler, 4)


@pytest.mark.parametrize("make", [sharded_and_batches, split_and_batches])
def test_without_it_the_state_is_refused_while_the_thread_is_ahead(make):
    sampler, source = make()
    ahead = prefetch(source)
    next(ahead)
    with pytest.raises(CheckpointError, match="prefetch\\(batches, sampler=sampler\\)"):
        sampler.state_dict()
    ahead.close()
    with pytest.raises(CheckpointError, match="prefetch\\(batches, sampler=sampler\\)"):
        sampler.state_dict()


@pytest.mark.parametrize("make", [sharded_and_batches, split_and_batches])
def test_a_sampler_that_is_moved_while_a_thread_runs_it_stays_there_and_ends_the_loop(make):
    sampler, source = make()
    start, used = sampler.state_dict(), []
    with pytest.raises(CheckpointError, match="moved by load_state_dict"):
        for batch in prefetch(source, sampler=sampler):
            used.append(batch)
            if len(used) == 3:
                sampler.load_state_dict(start)
    assert len(used) == 3 and sampler.state_dict() == start and not loaders()


@pytest.mark.parametrize("number", [1, 12])
def test_where_a_loop_was_left_that_a_thread_ran_ahead_is_not_known_but_at_the_end_of_an_epoch(number):
    sampler = ShardedSampler(24, 2, 0, 1)
    for count, _ in enumerate(prefetch(iter(sampler)), 1):
        if count == number:
            break
    if number == 12:
        assert sampler.state_dict()["epoch"] == 1
        return
    with pytest.raises(CheckpointError, match=r"prefetch\(batches, sampler=sampler\)"):
        sampler.state_dict()
    sampler.set_epoch(3)
    assert sampler.state_dict()["epoch"] == 3


def never_answers(release: threading.Event) -> Iterator[int]:
    yield 0
    release.wait(LIMIT_S)
    yield 1


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_source_that_never_answers_does_not_hold_back_an_error(monkeypatch, error) -> None:
    monkeypatch.setattr(sys.modules["singa_lite.data.prefetch"], "CLOSE_S", 0.05)
    release = threading.Event()
    warned = pytest.warns(UserWarning, match=r"still in what makes the items after 0\.05 s")
    with warned, pytest.raises(error, match="mine"):
        for _ in prefetch(never_answers(release)):
            raise error("mine")
    [thread] = loaders()
    release.set()
    thread.join(LIMIT_S)


def test_a_child_may_use_what_was_not_begun_before_the_fork() -> None:
    items, (reader, writer) = prefetch(range(3)), os.pipe()
    if (pid := os.fork()) == 0:
        os.write(writer, str(list(items)).encode())
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert os.read(reader, 1000) == b"[0, 1, 2]"
    os.close(reader)
    os.close(writer)


def test_a_forked_child_is_told_that_it_has_no_thread() -> None:
    items = prefetch(iter(range(10)))
    assert next(items) == 0
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            text = f"{next(items)}"
        except DataError as error:
            text = str(error)
        os.write(writer, text.encode())
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert "call prefetch in the child" in os.read(reader, 1000).decode()
    os.close(reader)
    os.close(writer)
    assert list(items) == list(range(1, 10))


@pytest.mark.parametrize("second", ["loop", "prefetch", "copy", "batches"])
@pytest.mark.parametrize("make", [lambda: ShardedSampler(30, 2, 1, 3), lambda: SplitSampler(10, seed=3)])
def test_a_loop_beside_a_loader_that_was_left_and_is_held_goes_on_behind_what_was_taken(make, second):
    """What the loader's thread has taken ahead is not left out, and the loader is no more."""
    sampler = make()
    loader = prefetch((item for item in sampler), sampler=sampler)
    first = next(loader)
    later = copy.deepcopy(sampler) if second == "copy" else sampler
    assert later.state_dict() == sampler.state_dict()
    if second == "prefetch":
        rest = list(prefetch((item for item in later), sampler=later))
    elif second == "batches" and isinstance(later, SplitSampler):
        rest = [index for batch in batches(later, 4) for index in batch.tolist()]
    else:
        rest = list(later)
    assert [str(item) for item in [first, *rest]] == [str(item) for item in make()]
    assert later.state_dict()["epoch"] == 1
    if second == "copy":
        assert len(list(loader)) == len(rest)
        return
    with pytest.raises(CheckpointError, match="it was moved"):
        next(loader)
    assert sampler.state_dict()["epoch"] == 1  # where the end of the old loader has left it


def test_an_epoch_may_be_tried_again_while_a_traceback_holds_its_loader():
    sampler = ShardedSampler(30, 2, 1, 3)

    def epoch(fails):
        taken = []
        for item in prefetch((item for item in sampler), sampler=sampler):
            taken.append(item.tolist())
            if fails and len(taken) == 2:
                raise ValueError(taken)
        return taken

    try:
        epoch(True)
    except ValueError as error:
        assert error.args[0] + epoch(False) == [item.tolist() for item in ShardedSampler(30, 2, 1, 3)]


def test_a_loader_may_go_over_several_epochs():
    sampler = ShardedSampler(30, 2, 1, 3)
    loader = prefetch((item for _ in range(3) for item in sampler), sampler=sampler)
    assert len(list(loader)) == 15 and sampler.state_dict()["epoch"] == 3


def test_a_system_that_gives_no_thread_is_a_data_error_and_the_sampler_stays(monkeypatch):
    def no_thread(self):
        raise RuntimeError("can't start new thread")

    sampler = ShardedSampler(20, 4, 0, 1)
    before = sampler.state_dict()
    with (
        monkeypatch.context() as patch,
        pytest.raises(DataError, match="no thread to make the items in: can't"),
    ):
        patch.setattr(threading.Thread, "start", no_thread)
        next(prefetch(iter(sampler), sampler=sampler))
    assert sampler.state_dict() == before
    assert len(list(prefetch(iter(sampler), sampler=sampler))) == 5


def test_ctrl_c_while_the_thread_starts_ends_it_and_the_sampler_stays(monkeypatch):
    start = threading.Thread.start

    def interrupted(self):
        start(self)
        raise KeyboardInterrupt

    sampler = ShardedSampler(20, 4, 0, 1)
    before = sampler.state_dict()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(threading.Thread, "start", interrupted)
        next(prefetch(iter(sampler), sampler=sampler))
    assert not loaders() and sampler.state_dict() == before
    assert len(list(prefetch(iter(sampler), sampler=sampler))) == 5


def test_ctrl_c_that_makes_the_start_of_the_thread_fail_is_raised(monkeypatch):
    def interrupted(self):
        try:
            raise KeyboardInterrupt
        finally:
            raise RuntimeError("release unlocked lock")

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(prefetch([1]))


def test_a_thread_that_begins_after_ctrl_c_has_ended_the_loop_takes_nothing(monkeypatch):
    start, threads, made = threading.Thread.start, [], []

    def interrupted(self):
        threads.append(self)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(threading.Thread, "start", interrupted)
        next(prefetch(map(made.append, range(2))))
    start(threads[0])
    threads[0].join(LIMIT_S)
    assert made == []


def test_ctrl_c_at_any_call_of_the_consumer_ends_the_thread(monkeypatch):
    """A signal's handler runs where a function begins, also within those of the standard library."""
    monkeypatch.setattr(sys.modules["singa_lite.data.prefetch"], "CLOSE_S", 0.5)
    for number in range(100):
        items, calls = prefetch(itertools.count()), itertools.count()
        next(items)

        def interrupt(frame, event, _, number=number, calls=calls):
            if not frame.f_code.co_flags & inspect.CO_GENERATOR and next(calls) == number:
                raise KeyboardInterrupt

        before = sys.gettrace()
        sys.settrace(interrupt)
        try:
            for _ in range(5):
                next(items)
        except KeyboardInterrupt:
            assert not loaders()
        else:
            assert number > 3
            break
        finally:
            sys.settrace(before)
            items.close()
