# SPDX-License-Identifier: Apache-2.0
"""Changing the calls of a recorded step, for backends that make fewer or faster ones of them in ``lower``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace

from ..graph import HostCall, KernelCall, Memory, View
from .base import Call


class Steps:
    """The calls of a step, who reads and writes each piece of memory, and changing them.

    Args:
        accepts: whether calls that make this array may be changed.

    Attributes:
        calls: None where a call was taken away.
    """

    def __init__(self, calls: list[Call], accepts: Callable[[View], bool]) -> None:
        self._accepts = accepts
        self.calls: list[Call | None] = list(calls)
        self._readers: dict[Memory, list[int]] = defaultdict(list)
        self._writers: dict[Memory, list[int]] = defaultdict(list)
        for number, call in enumerate(calls):
            self._note(number, call)

    def _note(self, number: int, call: Call) -> None:
        if isinstance(call, KernelCall):
            for view in call.inputs:
                self._readers[view.memory].append(number)
            for view in call.outputs:
                self._writers[view.memory].append(number)

    def kernel(self, number: int, *names: str) -> KernelCall | None:
        """The call of that number if it is still there and one of ``names``."""
        call = self.calls[number]
        return call if isinstance(call, KernelCall) and call.kernel in names else None

    def maker(self, view: View, *names: str) -> tuple[int, KernelCall] | None:
        """The one call that makes ``view``, with its number, if it is one of ``names`` whose arrays are accepted."""
        writers = self._writers[view.memory]
        call = self.kernel(writers[0], *names) if len(writers) == 1 else None
        return (writers[0], call) if call is not None and self._accepts(call.outputs[0]) else None

    def pair(
        self, last: int, name: str, *makers: str, argument: int = 0
    ) -> tuple[int, KernelCall, KernelCall] | None:
        """Two calls that may become one at the place of ``last``.

        Returns:
            (number of the first, the first, the call ``last``): the last is a ``name`` and the only reader of its input
            number ``argument``, which the first, one of ``makers``, makes. None if there are no such two.
        """
        call = self.kernel(last, name)
        if call is None or not self.is_private(call.inputs[argument]):
            return None
        found = self.maker(call.inputs[argument], *makers)
        return (*found, call) if found is not None and self.can_move(found[0], last) else None

    def is_private(self, view: View) -> bool:
        """Whether one call alone reads ``view``, and nobody after the step."""
        return view.memory.owner is None and len(self._readers[view.memory]) == 1

    def can_move(self, first: int, last: int) -> bool:
        """Whether call ``first`` may as well run at the place of ``last``: nothing in between changes what it reads."""
        call = self.calls[first]
        assert isinstance(call, KernelCall)
        touched = {view.memory for view in (*call.inputs, *call.outputs)}
        written = {view.memory for view in call.outputs}
        for number in range(first + 1, last):
            other = self.calls[number]
            if isinstance(other, HostCall):
                return False
            if other is not None and (
                touched & {view.memory for view in other.outputs}
                or written & {view.memory for view in other.inputs}
            ):
                return False
        return True

    def may_update(self, first: int, last: int) -> bool:
        """Whether parameters may change between two calls."""
        return any(isinstance(call, HostCall) and call.updates for call in self.calls[first:last])

    def merge(self, first: int, last: int, call: KernelCall) -> None:
        """Take both calls away and put ``call`` at the place of ``last``."""
        self._forget(first)
        self.calls[first] = None
        self.put(last, call)

    def put(self, number: int, call: KernelCall) -> None:
        """Put ``call`` in the place of another."""
        self._forget(number)
        self.calls[number] = call
        self._note(number, call)

    def _forget(self, number: int) -> None:
        call = self.calls[number]
        if isinstance(call, KernelCall):
            for view in call.inputs:
                self._readers[view.memory] = [n for n in self._readers[view.memory] if n != number]
            for view in call.outputs:
                self._writers[view.memory] = [n for n in self._writers[view.memory] if n != number]

    def rest(self) -> list[Call]:
        """The calls that are left."""
        return [call for call in self.calls if call is not None]


def relu_before_pooling(steps: Steps, last: int) -> None:
    """max_pool_2d_backward, relu_backward -> relu_backward on the smaller side, max_pool_2d_backward.

    A winner of the pooling is positive where the window's result is.
    """
    pair = steps.pair(last, "relu_backward", "max_pool_2d_backward")
    if pair is None:
        return
    first, pooling, relu = pair
    slope, indices = pooling.inputs
    forward = steps.maker(indices, "max_pool_2d")
    if forward is None or forward[1].inputs[0] != relu.inputs[1]:
        return
    masked = View(Memory(slope.memory.num_bytes), slope.offset, slope.shape, slope.dtype, slope.strides)
    steps.put(first, replace(relu, inputs=(slope, forward[1].outputs[0]), out=masked))
    steps.put(last, replace(pooling, inputs=(masked, indices), out=relu.out))
