# SPDX-License-Identifier: Apache-2.0
"""Every sample once an epoch, equal steps on every rank, exact resume: properties over sizes and ranks."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from singa_lite.data import ShardedSampler, SplitSampler, batches, partition
from singa_lite.errors import CheckpointError, DataError, OptionError


@st.composite
def plans(draw):
    """(num_samples, batch_size, world_size) with at least one sample a rank."""
    world_size = draw(st.integers(1, 5))
    return draw(st.integers(world_size, 120)), draw(st.integers(1, 9)), world_size


def epoch_of(num_samples, batch_size, world_size, **options):
    """The batches of one epoch, indexed [rank][step]."""
    return [
        list(ShardedSampler(num_samples, batch_size, rank, world_size, **options))
        for rank in range(world_size)
    ]


@given(plans(), st.booleans(), st.integers(0, 3))
def test_every_sample_is_used_exactly_once_an_epoch(plan, shuffle, seed):
    batches = epoch_of(*plan, shuffle=shuffle, seed=seed)
    seen = np.concatenate([batch for rank in batches for batch in rank])
    np.testing.assert_array_equal(np.sort(seen), np.arange(plan[0]))


@given(plans())
def test_every_rank_makes_the_announced_number_of_steps(plan):
    steps = [len(rank) for rank in epoch_of(*plan)]
    announced = [len(ShardedSampler(*plan[:2], rank, plan[2])) for rank in range(plan[2])]
    assert steps == announced
    assert len(set(steps)) == 1


@given(plans())
def test_batches_of_a_step_differ_by_at_most_one_and_none_is_empty(plan):
    sizes = np.array([[batch.size for batch in rank] for rank in epoch_of(*plan)])
    assert sizes.min() >= 1
    assert (sizes.max(axis=0) - sizes.min(axis=0)).max() <= 1
    assert sizes.sum(axis=1).max() - sizes.sum(axis=1).min() <= 1


@given(plans())
def test_all_steps_but_the_last_have_full_batches(plan):
    sizes = np.array([[batch.size for batch in rank] for rank in epoch_of(*plan)])
    assert (sizes[:, :-1] == plan[1]).all()
    assert sizes.max() <= plan[1] + 1


@given(plans(), st.integers(0, 3))
def test_global_batches_of_n_ranks_are_those_of_one_rank_with_n_times_the_batch(plan, seed):
    num_samples, batch_size, world_size = plan
    many = epoch_of(*plan, seed=seed)
    steps = [np.concatenate(step) for step in zip(*many, strict=True)]
    (single,) = epoch_of(num_samples, batch_size * world_size, 1, seed=seed)
    np.testing.assert_array_equal(np.concatenate(steps), np.concatenate(single))
    for ours, theirs in zip(steps[:-1], single, strict=False):
        np.testing.assert_array_equal(ours, theirs)


def test_a_tail_smaller_than_the_world_joins_the_last_global_batch():
    batches = epoch_of(10, 4, 2, shuffle=False)
    assert [[batch.tolist() for batch in rank] for rank in batches] == [
        [[0, 1, 2, 3], [8]],
        [[4, 5, 6, 7], [9]],
    ]
    batches = epoch_of(9, 4, 2, shuffle=False)
    assert [[batch.tolist() for batch in rank] for rank in batches] == [[[0, 1, 2, 3, 4]], [[5, 6, 7, 8]]]


def test_epochs_have_different_orders_and_seeds_too():
    sampler = ShardedSampler(50, 50, 0, 1, seed=1)
    first, second = next(iter(sampler)), next(iter(sampler))
    other = next(iter(ShardedSampler(50, 50, 0, 1, seed=2)))
    assert not np.array_equal(first, second)
    assert not np.array_equal(first, other)


def test_set_epoch_repeats_that_epoch_exactly():
    sampler = ShardedSampler(30, 4, 1, 3, seed=5)
    epochs = [list(sampler) for _ in range(3)]
    sampler.set_epoch(1)
    for ours, theirs in zip(list(sampler), epochs[1], strict=True):
        np.testing.assert_array_equal(ours, theirs)


@given(plans(), st.data())
def test_a_resumed_sampler_yields_exactly_what_was_left(plan, data):
    num_samples, batch_size, world_size = plan
    rank = data.draw(st.integers(0, world_size - 1))
    sampler = ShardedSampler(num_samples, batch_size, rank, world_size, seed=7)
    reference = [batch for _ in range(3) for batch in sampler]
    stop = data.draw(st.integers(1, 2 * len(sampler)))
    sampler.set_epoch(0)
    taken = 0
    while taken < stop:
        for _ in sampler:
            taken += 1
            if taken == stop:  # the state as a checkpoint inside the loop sees it
                break
    fresh = ShardedSampler(num_samples, batch_size, rank, world_size, seed=7)
    fresh.load_state_dict(sampler.state_dict())
    rest = [batch for _ in range(3) for batch in fresh]
    for ours, theirs in zip(rest, reference[stop:], strict=False):
        np.testing.assert_array_equal(ours, theirs)
    assert len(rest) >= len(reference) - stop


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"num_samples": 31}, "num_samples"),
        ({"batch_size": 5}, "batch_size"),
        ({"seed": 1}, "seed"),
        ({"position": "2"}, "not what state_dict gives"),
        ({"position": -1}, "not what state_dict gives"),
        ({"position": 4}, "no sampler gives"),
        ({"epoch": None}, "not what state_dict gives"),
        ({"world_size": 0, "position": 3}, "no sampler gives"),
        ({"world_size": 31, "position": 0}, "no sampler gives"),
        ({"world_size": 1, "batch_size": 0, "position": 3}, "no sampler gives"),
    ],
)
def test_a_checkpoint_of_another_plan_is_refused(change, text):
    state = ShardedSampler(30, 4, 0, 2).state_dict() | change
    sampler = ShardedSampler(30, 4, 0, 2)
    with pytest.raises(CheckpointError, match=text):
        sampler.load_state_dict(state)
    assert sampler.state_dict() == ShardedSampler(30, 4, 0, 2).state_dict()


@given(plans(), st.data())
def test_other_numbers_of_ranks_go_on_behind_the_samples_that_were_used(plan, data):
    num_samples, batch_size, world_size = plan
    used, state = [], None
    for _ in range(4):
        ranks = [
            ShardedSampler(num_samples, batch_size, rank, world_size, seed=3) for rank in range(world_size)
        ]
        if state is not None:
            for rank in ranks:
                rank.load_state_dict(state)
        steps = data.draw(st.integers(0, len(ranks[0]) - ranks[0].position), label="steps")
        loops = [iter(rank) for rank in ranks]
        for _ in range(steps):
            batches = [next(loop) for loop in loops]
            assert all(batch.size for batch in batches)
            assert max(map(len, batches)) - min(map(len, batches)) <= 1
            used += [index for batch in batches for index in batch]
        assert len({str(rank.state_dict()) for rank in ranks}) == 1
        state = ranks[0].state_dict()
        if state["epoch"]:
            break
        left = num_samples - len(used)
        before, world_size = world_size, data.draw(st.integers(1, min(8, left)), label="ranks")
        if world_size != before:
            batch_size = data.draw(st.integers(1, 9), label="batch size")
    else:
        last = ShardedSampler(num_samples, state["batch_size"], 0, 1, seed=3)
        last.load_state_dict(state)
        used += [index for batch in last for index in batch]
    assert sorted(used) == list(range(num_samples))


@pytest.mark.parametrize("sampler", [ShardedSampler(40, 4, 0, 1), SplitSampler(10)], ids=["sharded", "split"])
@pytest.mark.parametrize("move", ["load", "epoch"])
@pytest.mark.parametrize("number", [3, 9])
def test_a_loop_whose_sampler_is_moved_ends_with_an_error_and_the_next_one_begins_there(
    sampler, move, number
):
    sampler.load_state_dict(sampler.state_dict() | {"epoch": 1, "position": 0})
    start = sampler.state_dict()
    first = next(iter(sampler))
    sampler.load_state_dict(start)
    with pytest.raises(CheckpointError, match="moved by load_state_dict"):
        for count, _ in enumerate(sampler):
            if count == number:
                sampler.load_state_dict(start) if move == "load" else sampler.set_epoch(5)
    if move == "epoch":
        assert (sampler.epoch, sampler.position) == (5, 0)
    else:
        assert sampler.state_dict() == start and np.array_equal(next(iter(sampler)), first)


def test_more_ranks_than_samples_that_are_left_are_refused():
    sampler = ShardedSampler(8, 3, 0, 2)
    next(iter(sampler))
    assert sampler.position == 1
    with pytest.raises(CheckpointError, match="2 samples of epoch 0 are left, which cannot feed 3 batches"):
        ShardedSampler(8, 3, 0, 3).load_state_dict(sampler.state_dict())


def test_fewer_samples_than_ranks_is_an_error():
    with pytest.raises(DataError, match="2 samples cannot feed 3 ranks"):
        ShardedSampler(2, 4, 0, 3)


@pytest.mark.parametrize("change", [{"batch_size": 0}, {"rank": 2}, {"rank": -1}, {"seed": -1}])
def test_bad_arguments_are_option_errors(change):
    arguments = {"num_samples": 10, "batch_size": 2, "rank": 0, "world_size": 2, "seed": 0} | change
    with pytest.raises(OptionError, match="ShardedSampler"):
        ShardedSampler(**arguments)
    with pytest.raises(OptionError, match="epoch"):
        ShardedSampler(10, 2, 0, 2).set_epoch(-1)


@given(st.integers(0, 200), st.integers(1, 9))
def test_partitions_cover_everything_once_with_sizes_differing_by_at_most_one(num_samples, world_size):
    shares = [np.arange(num_samples)[partition(num_samples, rank, world_size)] for rank in range(world_size)]
    np.testing.assert_array_equal(np.concatenate(shares), np.arange(num_samples))
    sizes = [share.size for share in shares]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("arguments", [(-1, 0, 2), (10, 2, 2), (10, -1, 2)])
def test_partition_refuses_ranks_outside_the_world(arguments):
    with pytest.raises(OptionError):
        partition(*arguments)


@pytest.mark.parametrize("make", [lambda: ShardedSampler(12, 2, 0, 1), lambda: SplitSampler(12)])
def test_a_second_loop_over_a_sampler_ends_the_first(make):
    sampler = make()
    first, second = iter(sampler), iter(sampler)
    next(first)
    used = [next(second)]
    with pytest.raises(DataError, match="another loop over it has begun"):
        next(first)
    used += list(second)
    assert len(used) == len(sampler) - 1 and sampler.epoch == 1
    assert len(list(sampler)) == len(sampler)


@pytest.mark.parametrize("kind", [np.uint8, np.int16, np.int64])
def test_integers_of_numpy_are_ints(kind):
    plain = ShardedSampler(255, 64, 3, 4, seed=2)
    sampler = ShardedSampler(255 if kind is np.uint8 else kind(255), kind(64), kind(3), kind(4), seed=kind(2))
    assert [batch.tolist() for batch in sampler] == [batch.tolist() for batch in plain]
    sampler.set_epoch(kind(5))
    assert json.loads(json.dumps(sampler.state_dict()))["epoch"] == 5
    assert partition(1000, kind(3), kind(4)) == slice(750, 1000)
    assert [batch.tolist() for batch in batches(range(5), kind(3))] == [[0, 1, 2], [3, 4]]
