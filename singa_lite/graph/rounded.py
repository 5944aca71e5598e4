# SPDX-License-Identifier: Apache-2.0
"""Rounded copies of parameters that stay from one replay of a step to the next.

What lives here: which casts of a tape need not run at every replay, and knowing whether a copy is still that of its
parameter. What does not: rounding (``Backend.rounds_updates`` says whose updates write copies).

Note [fresh copies]: in a step that rounds a parameter to 16 bits, computes with the copy and updates the parameter at
its end, the update writes the copy as well, so the next replay of that step needs no cast. That holds as long as nobody
else writes the parameter. Kernels outside of the replay, collectives and messages say which memory they write, and a
replay of another step may write any: each has the next replay cast again, and so have collectives in flight, which
write at a time of their own. What Python does with a raw array is not seen: an array that ``Tensor.data``
has given out is never kept, as its holder may write to it at any time, and one whose copy is fresh is read-only for
numpy, so that writing to it in another way is an error and not lost. Views of ``Tensor.array`` that were made before
have a flag of their own, so what is written to these is lost on the copy.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from dataclasses import replace
from functools import partial

from ..config import state
from ..dtypes import bfloat16
from .memory import Array, root_of
from .nodes import Host, Kernel, Node, StreamSwitch, run_steps
from .rewrite import GraphRewriter

SetWriteable = Callable[[Array, bool], None]


class RoundedCopies:
    """The copies of one recorded step, see Note [fresh copies].

    Attributes:
        are_fresh: whether a replay may use them as they are.

    Args:
        casts: what makes all of them.
        params: the arrays of the parameters.
        set_writeable: sets whether numpy may write to an array.
    """

    def __init__(
        self, casts: Sequence[Callable[[], None]], params: list[Array], set_writeable: SetWriteable
    ) -> None:
        self._casts = casts
        self._params = {id(param): param for param in params}
        self._set_writeable = set_writeable
        self.are_fresh = False

    def refresh(self) -> None:
        """Make all copies, and know them to be fresh until ``forget``, if nobody else may write the parameters."""
        if not state.works_in_flight and self._params.keys().isdisjoint(state.exposed):
            state.rounded = self  # first, so that what interrupts this can be undone
            self._set_all_writeable(False)
        run_steps(self._casts)
        self.are_fresh = state.rounded is self

    def forget(self) -> None:
        """Mark all copies as old, so that the next replay makes them again."""
        with state.rounded_lock:
            if state.rounded is self:
                self.are_fresh = False
                self._set_all_writeable(True)
                state.rounded = None  # last, likewise

    def written(self, arrays: Iterable[Array]) -> None:
        """Call ``forget`` if any of ``arrays``, which will be written, is memory of a parameter."""
        found = [array for array in arrays if id(root_of(array)) in self._params]
        if found:
            self.forget()
            for array in found:  # a view has a flag of its own
                self._set_writeable(array, True)

    def _set_all_writeable(self, is_writeable: bool) -> None:
        for param in self._params.values():
            self._set_writeable(param, is_writeable)


def use_copies(copies: RoundedCopies | None) -> None:
    """Make ``copies`` for a replay, and forget others; None: it keeps none, or has failed."""
    with state.rounded_lock:
        if state.rounded is not None:
            state.rounded.forget()
        if copies is not None:
            copies.refresh()


def note_written(*arrays: Array) -> None:
    """Note that something other than a kernel is about to write ``arrays``."""
    if (rounded := state.rounded) is not None:
        rounded.written(arrays)


def expose(array: Array) -> None:
    """Note that Python has the raw ``array`` from now on, and may write to its memory at any time."""
    root = root_of(array)
    note_written(root)
    key = id(root)
    if key not in state.exposed:
        state.exposed[key] = weakref.ref(root, partial(state.exposed.pop, key))


def keep_copies(nodes: list[Node], copies: MutableMapping[int, Array]) -> tuple[list[Node], int, list[Array]]:
    """Return the nodes of a tape with updates that write the rounded copies of their parameters.

    Args:
        nodes: a tape, none of which writes an input of the step.
        copies: arrays of copies, which the records of a model share, by the ids of their parameters' arrays.

    Returns:
        (the nodes, first the casts that this makes needless as long as copies are fresh; how many these are; the arrays
        of their parameters).
    """
    if any(isinstance(node, StreamSwitch) or (isinstance(node, Host) and node.sees_arrays) for node in nodes):
        return nodes, 0, []
    graph = GraphRewriter(nodes, lambda view: True)
    casts: list[Node] = []
    params: list[Array] = []
    for number, cast in enumerate(nodes):
        if not isinstance(cast, Kernel) or not _rounds_parameter(cast):
            continue
        (param,), copy = cast.inputs, cast.out
        owner = param.memory.owner
        last = graph.writers(param)
        update = graph.nodes[last[0]] if len(last) == 1 else None
        if (
            isinstance(update, Kernel)
            and cast.backend.rounds_updates(update, param)
            and graph.writers(copy) == [number]
            and max(graph.readers(copy), default=number) < last[0]
        ):
            position = update.outputs.index(param)
            rounded = update.attributes.get("rounded", ())
            known = copies.get(id(owner))
            if position not in rounded:  # else an earlier cast gives the same
                attributes = {**update.attributes, "rounded": (*rounded, position)}
                graph.nodes[last[0]] = replace(update, out=(*update.outputs, copy), attributes=attributes)
                casts.append(replace(cast, phase="Forward"))
                params.append(owner)
                if known is None or (known.shape, known.dtype) != (copy.shape, copy.dtype):
                    known = copies[id(owner)] = cast.backend.empty(copy.shape, copy.dtype)
            copy.memory.owner = known
            graph.nodes[number] = None  # not by put: readers and writers are those before
    return [*casts, *graph.rest()], len(casts), params


def _rounds_parameter(cast: Kernel) -> bool:
    """Return whether a kernel casts a whole array that outlives the step to bfloat16, in memory of the step alone."""
    if cast.name != "cast" or cast.out.dtype != bfloat16:
        return False
    (param,), copy = cast.inputs, cast.out
    owner = param.memory.owner
    return owner is not None and copy.memory.owner is None and owner.shape == param.shape and copy.is_whole
