# SPDX-License-Identifier: Apache-2.0
"""The memory plan, for any lifetimes."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from singa_lite.graph.arena import ALIGNMENT, Lifetime, plan_offsets, share_memory
from singa_lite.graph.memory import Memory, View
from singa_lite.graph.nodes import Kernel, StreamSwitch

LIFETIMES = st.lists(
    st.builds(
        lambda size, first, length: Lifetime(size, first, first + length),
        st.integers(0, 500),
        st.integers(0, 20),
        st.integers(0, 10),
    ),
    max_size=25,
)


@given(LIFETIMES)
def test_buffers_alive_together_never_share_a_byte(lifetimes):
    offsets, total = plan_offsets(lifetimes)
    spans = [(offset, offset + life.num_bytes, life) for offset, life in zip(offsets, lifetimes, strict=True)]
    for index, (start, end, life) in enumerate(spans):
        assert start % ALIGNMENT == 0 and start >= 0 and end <= total
        for other_start, other_end, other in spans[index + 1 :]:
            if life.first <= other.last and other.first <= life.last:
                assert end <= other_start or other_end <= start or start == end or other_start == other_end


@given(LIFETIMES)
def test_the_arena_is_between_the_most_alive_at_once_and_the_sum(lifetimes):
    _, total = plan_offsets(lifetimes)
    sizes = [-(-life.num_bytes // ALIGNMENT) * ALIGNMENT for life in lifetimes]
    alive = [
        sum(size for size, life in zip(sizes, lifetimes, strict=True) if life.first <= call <= life.last)
        for call in range(32)
    ]
    assert max(alive, default=0) <= total <= sum(sizes)


def test_a_chain_of_equal_buffers_needs_two():
    chain = [Lifetime(ALIGNMENT, call, call + 1) for call in range(10)]
    assert plan_offsets(chain)[1] == 2 * ALIGNMENT


def test_what_another_stream_uses_shares_no_byte_with_what_runs_beside_it():
    def kernel(*views: View) -> Kernel:
        return Kernel(None, "copy", views[1:], views[0], {}, "Backward")

    def view() -> View:
        return View(Memory(64), 0, (16,), np.dtype("float32"), (4,))

    before, packed, after = view(), view(), view()
    switch = StreamSwitch(lambda: None, ())
    nodes = [kernel(before), switch, kernel(packed), switch, kernel(after)]
    array_of, num_bytes = share_memory(nodes, [], lambda num_bytes: np.zeros(num_bytes, np.uint8))
    assert num_bytes == 128  # those of one stream share
    assert np.shares_memory(array_of(before), array_of(after))
    assert not np.shares_memory(array_of(packed), array_of(after))
    assert not np.shares_memory(array_of(packed), array_of(before))
