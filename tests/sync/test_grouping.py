# SPDX-License-Identifier: Apache-2.0
"""The grouping rule, for any list of sizes."""

from hypothesis import given
from hypothesis import strategies as st

from singa_lite.sync.grouping import group_all

SIZES = st.lists(st.integers(0, 50), max_size=40)


@given(SIZES, st.integers(0, 60))
def test_every_item_is_in_exactly_one_group(sizes, limit):
    groups = group_all(list(range(len(sizes))), sizes, limit)
    assert sorted(item for group in groups for item in group) == list(range(len(sizes)))


@given(SIZES, st.integers(0, 60))
def test_large_items_stand_alone_and_small_ones_keep_their_order(sizes, limit):
    groups = group_all(list(range(len(sizes))), sizes, limit)
    small = [item for group in groups for item in group if sizes[item] <= limit]
    assert small == sorted(small)
    assert all(len(group) == 1 for group in groups if any(sizes[item] > limit for item in group))


@given(SIZES, st.integers(0, 60))
def test_a_joined_group_ends_with_the_item_that_exceeds_the_limit(sizes, limit):
    groups = group_all(list(range(len(sizes))), sizes, limit)
    joined = [group for group in groups if sizes[group[0]] <= limit]
    for index, group in enumerate(joined):
        assert sum(sizes[item] for item in group[:-1]) <= limit
        assert index == len(joined) - 1 or sum(sizes[item] for item in group) > limit
