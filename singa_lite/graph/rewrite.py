# SPDX-License-Identifier: Apache-2.0
"""Changing the nodes of a tape into fewer or faster ones.

What lives here: who reads and writes what, merging nodes, computing gradients right in the bucket they are sent from.
What does not: which kernels fuse, which each backend knows (backend/cpu/fuse.py, backend/cuda/fuse.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace

from .memory import Memory, View, row_major
from .nodes import Host, Kernel, Node, StreamSwitch


class GraphRewriter:
    """The nodes of a tape, who reads and writes each piece of memory, and changing them.

    Args:
        accepts: whether kernels that make this array may be changed.

    Attributes:
        nodes: None where a node was removed.
    """

    def __init__(self, nodes: list[Node], accepts: Callable[[View], bool]) -> None:
        self._accepts = accepts
        self.nodes: list[Node | None] = [None] * len(nodes)
        self._readers: dict[Memory, list[int]] = defaultdict(list)
        self._writers: dict[Memory, list[int]] = defaultdict(list)
        for number, node in enumerate(nodes):
            self.put(number, node)

    def kernel(self, number: int, *names: str) -> Kernel | None:
        """Return the node of that number if it is still there and a kernel of ``names``."""
        node = self.nodes[number]
        return node if isinstance(node, Kernel) and node.name in names else None

    def maker(self, view: View, *names: str) -> tuple[int, Kernel] | None:
        """Return the one kernel that makes ``view``, with its number, if it is one of ``names`` and accepted."""
        writers = self._writers[view.memory]
        node = self.kernel(writers[0], *names) if len(writers) == 1 else None
        return (writers[0], node) if node is not None and self._accepts(node.outputs[0]) else None

    def pair(
        self, last: int, name: str, *makers: str, argument: int = 0
    ) -> tuple[int, Kernel, Kernel] | None:
        """Return two kernels that may become one at the number ``last``.

        Returns:
            (number of the first, the first, the node ``last``): the last is a ``name`` and the only reader of its input
            number ``argument``, which the first, one of ``makers``, makes. None if there are no such two.
        """
        node = self.kernel(last, name)
        if node is None or not self.is_private(node.inputs[argument]):
            return None
        found = self.maker(node.inputs[argument], *makers)
        return (*found, node) if found is not None and self.can_move(found[0], last) else None

    def addition(self, last: int, maker: str) -> tuple[int, Kernel, Kernel, View, View] | None:
        """Return an "add" at the number ``last`` and the kernel ``maker`` that computes one of its inputs.

        Returns:
            (number of the maker, the maker, the add, the input that the maker computes, the other input), if the two
            may become one. Where both inputs come from such kernels the later is taken, whose result is nearer in the
            cache. None if there are no such two.
        """
        pairs = [(self.pair(last, "add", maker, argument=number), number) for number in (0, 1)]
        found = [(*pair, number) for pair, number in pairs if pair is not None]
        if not found:
            return None
        first, call, add, number = max(found, key=lambda match: match[0])
        return first, call, add, add.inputs[number], add.inputs[1 - number]

    def is_private(self, view: View) -> bool:
        """Return whether one node alone reads ``view``, and nobody after the step."""
        return view.memory.owner is None and len(self._readers[view.memory]) == 1

    def readers(self, view: View) -> list[int]:
        """Return the numbers of the nodes that read the memory of ``view``, once for each of their inputs."""
        return list(self._readers[view.memory])

    def writers(self, view: View) -> list[int]:
        """Return the numbers of the nodes that write to the memory of ``view``, likewise."""
        return list(self._writers[view.memory])

    def can_move(self, first: int, last: int) -> bool:
        """Return whether node ``first`` may run where ``last`` does: nothing in between changes what it reads."""
        node = self.nodes[first]
        assert node is not None
        touched = {view.memory for view in (*node.inputs, *node.outputs)}
        written = {view.memory for view in node.outputs}
        for other in self.nodes[first + 1 : last]:
            if isinstance(other, StreamSwitch) or (isinstance(other, Host) and other.sees_arrays):
                return False
            if other is not None and (
                touched & {view.memory for view in other.outputs}
                or written & {view.memory for view in other.inputs}
            ):
                return False
        return True

    def is_changed(self, view: View, first: int, last: int) -> bool:
        """Return whether a node between two others may write to the memory of ``view``."""
        return any(
            (isinstance(node, Host) and node.sees_arrays)
            or any(view.memory is written.memory for written in node.outputs)
            for node in self.nodes[first + 1 : last]
            if node is not None
        )

    def merge(self, first: int, last: int, node: Kernel) -> None:
        """Remove both nodes and put ``node`` in place of ``last``."""
        self.put(first, None)
        self.put(last, node)

    def put(self, number: int, node: Node | None) -> None:
        """Put ``node``, or nothing, in place of another."""
        old, self.nodes[number] = self.nodes[number], node
        for view in old.inputs if old is not None else ():
            self._readers[view.memory].remove(number)
        for view in old.outputs if old is not None else ():
            self._writers[view.memory].remove(number)
        for view in node.inputs if node is not None else ():
            self._readers[view.memory].append(number)
        for view in node.outputs if node is not None else ():
            self._writers[view.memory].append(number)

    def rest(self) -> list[Node]:
        """Return the nodes that are left."""
        return [node for node in self.nodes if node is not None]


def pack_in_place(nodes: list[Node]) -> list[Node]:
    """Compute what a "pack" joins right in the joined array, so that the pack need not run.

    Done for an input that is all of a piece of memory, packed once, that only the nodes before the pack use, if none of
    these uses the joined array meanwhile, that is no such joined array itself, and where its part begins as the backend
    wants arrays to begin: a library may compute other bits elsewhere. The others are copied there one by one.
    """
    users: dict[Memory, list[int]] = defaultdict(list)
    for number, node in enumerate(nodes):
        for memory in {view.memory for view in (*node.inputs, *node.outputs)}:
            users[memory].append(number)
    hosts = [number for number, node in enumerate(nodes) if isinstance(node, Host) and node.sees_arrays]
    moved: dict[Memory, View] = {}  # what is to be computed elsewhere: all of it there
    joins: set[Memory] = set()  # joined arrays in which something is to be computed
    copies: dict[int, list[Node]] = {}  # by the number of the pack that they replace
    for number, pack in enumerate(nodes):
        if not isinstance(pack, Kernel) or pack.name != "pack":
            continue
        joined, left = pack.out.memory, list[Node]()
        for source, target in zip(pack.inputs, _parts(pack), strict=True):
            memory = source.memory
            first, last = users[memory][0], users[memory][-1]
            is_made = memory not in {view.memory for view in nodes[first].inputs}
            is_free = not any(first <= n < number for n in (*users[joined], *hosts))
            is_aligned = target.offset % pack.backend.alignment_bytes == 0
            is_once = sum(view.memory is memory for view in pack.inputs) == 1
            is_only = last == number and memory.owner is None and source.is_whole and is_once
            # what a joined array consists of is computed there
            if is_made and is_free and is_aligned and is_only and memory not in joins:
                moved[memory] = target
                joins.add(joined)
            else:
                left.append(replace(pack, name="copy", inputs=(source,), out=target, attributes={}))
        if len(left) < len(pack.inputs):
            copies[number] = left

    def there(view: View) -> View:
        if (target := moved.get(view.memory)) is None:
            return view
        return replace(view, memory=target.memory, offset=target.offset + view.offset)

    groups = (copies.get(number, [node]) for number, node in enumerate(nodes))
    return [node.mapped(there) for group in groups for node in group]


def _parts(pack: Kernel) -> Iterator[View]:
    """Return the part of the joined array that each input of a pack becomes."""
    alignment = pack.attributes.get("alignment", 1) * pack.out.dtype.itemsize
    offset = pack.out.offset
    for source in pack.inputs:
        yield View(pack.out.memory, offset, source.shape, source.dtype, row_major(source.shape, source.dtype))
        offset += -(-source.num_bytes // alignment) * alignment
