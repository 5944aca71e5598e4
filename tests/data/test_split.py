# SPDX-License-Identifier: Apache-2.0
"""Parts of a data set and their batches: every sample once, as many batches for every part, exact resume."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from singa_lite.data import ShardedSampler, SplitSampler, batches
from singa_lite.errors import CheckpointError, DataError, DTypeError, OptionError


@st.composite
def plans(draw):
    """(length, num_parts) with at least one sample a part."""
    num_parts = draw(st.integers(1, 7))
    return draw(st.integers(num_parts, 150)), num_parts


def parts_of(length, num_parts, **options):
    return [SplitSampler(length, num_parts, part, **options) for part in range(num_parts)]


def sizes(sampler, batch_size):
    return [len(batch) for batch in batches(sampler, batch_size)]


# ---- parts -----------------------------------------------------------------------------------------------


def test_60000_samples_in_7_parts():
    """MXNet's SplitSampler loses 3 of them."""
    parts = parts_of(60_000, 7)
    assert [len(part) for part in parts] == [8572] * 3 + [8571] * 4
    seen = [index for part in parts for index in part]
    assert sorted(seen) == list(range(60_000)) and {type(index) for index in seen} == {int}


@given(plans(), st.booleans(), st.integers(0, 3))
def test_parts_have_every_sample_once_and_are_consecutive(plan, shuffle, seed):
    parts = [sorted(part) for part in parts_of(*plan, shuffle=shuffle, seed=seed)]
    assert [index for part in parts for index in part] == list(range(plan[0]))
    lengths = [len(part) for part in parts]
    assert lengths == sorted(lengths, reverse=True) and lengths[0] - lengths[-1] <= 1
    assert {part.smallest_part for part in parts_of(*plan)} == {lengths[-1]}


def test_an_epoch_has_a_new_order_of_the_same_part():
    sampler = SplitSampler(300, 3, 1)
    first, second = list(sampler), list(sampler)
    assert first != second and sorted(first) == sorted(second) == list(range(100, 200))
    assert first != sorted(first) and sampler.epoch == 2
    assert list(SplitSampler(300, 3, 1)) == first
    assert list(SplitSampler(300, 3, 1, seed=1)) != first


def test_parts_of_one_size_have_different_orders():
    left, right = parts_of(200, 2)
    assert [index + 100 for index in left] != list(right)


def test_the_order_of_the_data_can_be_kept():
    sampler = SplitSampler(7, 2, 1, shuffle=False)
    assert [list(sampler), list(sampler)] == [[4, 5, 6]] * 2
    assert list(SplitSampler(4, shuffle=False)) == [0, 1, 2, 3]


def test_set_epoch_repeats_that_epoch_exactly():
    sampler = SplitSampler(30, 3, 2, seed=5)
    epochs = [list(sampler) for _ in range(3)]
    sampler.set_epoch(1)
    assert list(sampler) == epochs[1]


# ---- batches ---------------------------------------------------------------------------------------------


def test_129_samples_in_2_parts_are_one_batch_each():
    assert [sizes(part, 64) for part in parts_of(129, 2)] == [[65], [64]]


@given(plans(), st.integers(1, 30))
def test_every_part_makes_as_many_batches_and_uses_every_sample(plan, batch_size):
    epochs = [list(batches(part, batch_size)) for part in parts_of(*plan)]
    announced = {len(batches(part, batch_size)) for part in parts_of(*plan)}
    assert {len(epoch) for epoch in epochs} == announced == {-(-(plan[0] // plan[1]) // batch_size)}
    seen = np.concatenate([batch for epoch in epochs for batch in epoch])
    np.testing.assert_array_equal(np.sort(seen), np.arange(plan[0]))
    for epoch in epochs:
        assert {len(batch) for batch in epoch[:-1]} <= {batch_size} and 1 <= len(epoch[-1]) <= batch_size + 1
        assert all(batch.dtype == np.int64 and batch.ndim == 1 for batch in epoch)


def test_each_loop_over_batches_is_the_next_epoch():
    loader = batches(SplitSampler(20, 2, 0), 4)
    twin = SplitSampler(20, 2, 0)
    for _ in range(3):
        assert np.concatenate(list(loader)).tolist() == list(twin)


def test_any_sampler_with_a_length_has_batches():
    assert [batch.tolist() for batch in batches(range(7), 3)] == [[0, 1, 2], [3, 4, 5], [6]]
    assert [batch.tolist() for batch in batches(np.array([5, 1]), 2)] == [[5, 1]]
    assert list(batches([], 3)) == [] and len(batches([], 3)) == 0
    loader = batches([4, 2], 1)
    assert [len(list(loader)), len(list(loader)), len(loader)] == [2, 2, 2]


# ---- resume ----------------------------------------------------------------------------------------------


@given(plans(), st.integers(1, 12), st.data())
def test_a_resumed_sampler_makes_exactly_the_batches_that_were_left(plan, batch_size, data):
    samplers = parts_of(*plan, seed=7)
    epochs = [[batch.tolist() for _ in range(3) for batch in batches(part, batch_size)] for part in samplers]
    stop = data.draw(st.integers(1, 2 * len(batches(samplers[0], batch_size))))
    states = []
    for part in parts_of(*plan, seed=7):
        loader, taken = batches(part, batch_size), 0
        while taken < stop:
            for _ in loader:
                taken += 1
                if taken == stop:  # the state as a checkpoint inside the loop sees it
                    break
        states.append(part.state_dict())
    assert all(state == states[0] for state in states)
    for part, reference in zip(parts_of(*plan, seed=7), epochs, strict=True):
        part.load_state_dict(states[0])
        rest = [batch.tolist() for _ in range(3) for batch in batches(part, batch_size)]
        assert rest[: len(reference) - stop] == reference[stop:]


def test_a_state_of_a_larger_part_that_this_one_cannot_reach_is_the_next_epoch():
    larger, smaller = parts_of(5, 2)
    for _ in zip(range(2), larger, strict=False):
        pass
    smaller.load_state_dict(larger.state_dict())
    assert (smaller.epoch, smaller.position) == (1, 0)


@given(plans(), st.integers(1, 12), st.data())
def test_another_batch_size_in_the_middle_of_an_epoch_loses_nothing(plan, batch_size, data):
    sampler = SplitSampler(*plan)
    whole = list(SplitSampler(*plan))
    position = data.draw(st.integers(0, len(whole) - 1))
    sampler.load_state_dict(sampler.state_dict() | {"position": position})
    rest = [index for batch in batches(sampler, batch_size) for index in batch]
    assert rest == whole[position:] and sampler.epoch == 1


def test_a_checkpoint_of_another_plan_is_refused():
    state = SplitSampler(30, 2).state_dict()
    for other in (SplitSampler(30, 3), SplitSampler(31, 2), SplitSampler(30, 2, seed=1)):
        with pytest.raises(CheckpointError, match="the checkpoint's plan"):
            other.load_state_dict(state)
    with pytest.raises(CheckpointError, match="num_parts"):
        SplitSampler(30, 2).load_state_dict(ShardedSampler(30, 4, 0, 2).state_dict())
    for length, position in ((30, 15), (31, 16)):
        state = SplitSampler(length, 2).state_dict()
        with pytest.raises(CheckpointError, match=f"position = {position} is beyond every part"):
            SplitSampler(length, 2).load_state_dict(state | {"position": position})
        SplitSampler(length, 2).load_state_dict(state | {"position": position - 1})


# ---- bad input -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((-1,), "length = -1"),
        ((10.0,), "length = 10.0 must be an int"),
        ((10, 0), "num_parts = 0"),
        ((10, 2, 2), "part_index = 2 must be < num_parts = 2"),
        ((10, 2, -1), "part_index = -1"),
        ((10, 2, True), "part_index = True"),
    ],
)
def test_bad_arguments_are_option_errors(arguments, words):
    with pytest.raises(OptionError, match=f"SplitSampler: {words}"):
        SplitSampler(*arguments)


def test_bad_options_are_option_errors():
    with pytest.raises(OptionError, match="seed"):
        SplitSampler(10, seed=-1)
    with pytest.raises(OptionError, match="epoch"):
        SplitSampler(10).set_epoch(-1)
    for batch_size in (0, -3, 2.0, True, None):
        with pytest.raises(OptionError, match="batch_size"):
            batches(SplitSampler(10), batch_size)
    for sampler in (None, 3, iter([1, 2]), np.array(3)):
        with pytest.raises(OptionError, match="expected a sampler"):
            batches(sampler, 2)


def test_fewer_samples_than_parts_is_an_error():
    with pytest.raises(DataError, match="2 samples cannot be split into 3 parts"):
        SplitSampler(2, 3)


def test_a_sampler_of_batches_has_no_batches():
    with pytest.raises(DTypeError, match="ShardedSampler's are batches already"):
        list(batches(ShardedSampler(12, 3, 0, 2), 2))


def test_a_sampler_that_ends_before_its_length_is_an_error():
    class Short(list):
        def __len__(self):
            return 5

    with pytest.raises(DataError, match="ended after 3 of a batch's 4 indices"):
        list(batches(Short([1, 2, 3]), 4))
