# SPDX-License-Identifier: Apache-2.0
"""Softmax, attention and losses, in loss.cu.

Class ids are checked on the device; an id that names no column is a ShapeError at the next call that waits for the
device (``to_numpy``, ``synchronize``), since waiting here would stop the host at every step.

Note [causal attention]: a query does not see the keys behind it, so of all products with keys half are for nothing. The
queries are cut in parts of CAUSAL_ROWS, and a part is multiplied by the keys up to its own end alone. The last part
comes first: it gives all keys a gradient, to which the others add theirs.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from math import prod
from typing import Any

from ...dtypes import accumulation_dtype, is_narrow
from ...errors import ShapeError
from ..base import Array
from ..cpu.loss import smallest_normal
from .launch import THREADS, Launcher

# elements of a row of scores at most that a warp has: its threads hold kHeld of loss.cu each
WARP_ROW = 32 * 16
CAUSAL_ROWS = 128  # see Note [causal attention]

Part = tuple[Any, slice, slice]  # some rows of all matrices


class LossKernels(Launcher):
    """softmax, attention, cross entropies and the mean squared error."""

    def softmax(self, x: Array, *, out: Array, axis: int) -> None:
        self._softmax("loss.softmax", axis, x, out)

    def softmax_backward(self, dy: Array, y: Array, *, out: Array, axis: int) -> None:
        self._softmax("loss.softmax_backward", axis, dy, y, out)

    def _softmax(self, name: str, axis: int, x: Array, *others: Array) -> None:
        if x.size:
            length, step = x.shape[axis], prod(x.shape[axis % x.ndim + 1 :])
            self.each_row(name, x.dtype.char, x.size // length, length, x, *others, length, step)

    def attention(self, *inputs: Array, out: Array, num_heads: int, causal: bool) -> None:
        """Made of transposes, cuBLAS's products and a softmax that scales and masks, see Note [causal attention].

        Of inputs of 16 bits scores, probabilities and their gradients are float32: float16 may not hold scores before
        they are scaled, and rounded to bfloat16 they would cost the result as much again as its own rounding does.
        """
        queries, keys, values = (each for view in by_heads(inputs, num_heads) for each in self._copied(view))
        wide = accumulation_dtype(queries.dtype)
        multiply = partial(self.find("matmul"), allows_tf32=is_narrow(queries.dtype))  # in which 16 bits fit
        wide_values, y = self.converted(values, wide), self.empty(queries.shape, wide)
        for rows, seen in causal_parts(queries, keys, causal):
            scores = self._products_of_rows(queries[rows], keys[seen])
            probabilities = self.empty(scores.shape, scores.dtype)
            self._each_score("attention", queries, causal, rows, scores, probabilities)
            multiply(probabilities, wide_values[seen], out=y[rows])
        self._join_heads(out, y[None])

    def attention_backward(
        self, dy: Array, *inputs: Array, out: Array | tuple[Array, Array], num_heads: int, causal: bool
    ) -> None:
        """Two products at once where these are of one shape: with keys and with values, and for their gradients."""
        views, (dys,) = by_heads(inputs, num_heads), by_heads((dy,), num_heads, 1)
        queries, memory = views if len(views) == 2 else (views[0][:1], views[0][1:])
        from_rows, memory = self.empty((2, *queries.shape[1:]), dy.dtype), self._copied(memory)
        for view, copy in ((queries, from_rows[:1]), (dys, from_rows[1:])):
            self.find("copy")(view, out=copy)
        wide = accumulation_dtype(dy.dtype)
        multiply = partial(self.find("matmul"), allows_tf32=is_narrow(dy.dtype))  # in which 16 bits fit
        wide_rows, wide_keys = self.converted(from_rows, wide), self.converted(memory[0], wide)
        is_split = isinstance(out, tuple)
        dqueries = self.empty((1 if is_split else 3, *queries.shape[1:]), wide_keys.dtype)
        dmemory = self.empty(memory.shape, wide_keys.dtype) if is_split else dqueries[1:]
        for number, (rows, seen) in enumerate(causal_parts(from_rows, memory, causal)):
            scores, dprobabilities = products = self._products_of_rows(from_rows[rows], memory[seen])
            dscores, probabilities = made = self.empty(products.shape, products.dtype)
            arrays = scores, dprobabilities, probabilities, dscores
            self._each_score("attention_backward", from_rows, causal, rows, *arrays)
            multiply(dscores, wide_keys[seen], out=dqueries[0][rows])
            beta = int(number > 0)  # the first part has all keys
            multiply(made, wide_rows[rows], out=dmemory[seen], transpose_a=True, beta=beta)
        for array, grads in zip(out if is_split else (out,), (dqueries, dmemory), strict=False):
            self._join_heads(array, grads)

    def _products_of_rows(self, a: Array, b: Array) -> Array:
        """Multiply each row of ``a`` by each of ``b``, in float32 at least."""
        out = self.empty((*a.shape[:-1], b.shape[-2]), accumulation_dtype(a.dtype))
        self.find("matmul")(a, b, out=out, transpose_b=True)
        return out

    def _copied(self, view: Array) -> Array:
        """Return a row-major copy."""
        copy = self.empty(view.shape, view.dtype)
        self.find("copy")(view, out=copy)
        return copy

    def _each_score(self, name: str, queries: Array, causal: bool, rows: Part, *arrays: Array) -> None:
        """Start a kernel with a warp for each row of the scores, ``arrays[0]``, or a block if that is long."""
        scores = arrays[0]
        if not scores.size:
            return
        height, length = scores.shape[-2:]
        count = blocks = scores.size // length
        if length <= WARP_ROW:
            name, blocks = f"{name}_of_warps", -(-count * 32 // THREADS)
        numbers = (count, length, queries.shape[-1] ** -0.5, height if causal else 0, rows[1].start)
        self.launch(f"loss.{name}", scores.dtype.char, blocks, THREADS, *arrays, *numbers)

    def _join_heads(self, out: Array, heads: Array) -> None:
        """Write (count, batch, heads, length, d) to (batch, length, count * width), rounded if that has 16 bits."""
        shape = tuple(heads.shape[axis] for axis in (1, 3, 0, 2, 4))
        joined = out.reshape(shape) if out.dtype == heads.dtype else self.empty(shape, heads.dtype)
        self.find("transpose")(heads, out=joined, axes=(1, 3, 0, 2, 4))
        if out.dtype != heads.dtype:
            self.find("cast")(joined, out=out.reshape(shape))

    def softmax_cross_entropy(self, x: Array, labels: Array, *, out: tuple[Array, Array]) -> None:
        self._labelled("softmax_cross_entropy", labels, (x,), *out, *self.memory_of_grid(x.shape[0]))

    def softmax_cross_entropy_backward(
        self, dy: Array, probabilities: Array, labels: Array, *, out: Array
    ) -> None:
        self._labelled("softmax_cross_entropy_backward", labels, (dy, probabilities), out)

    def cross_entropy(self, probabilities: Array, labels: Array, *, out: Array) -> None:
        given = (smallest_normal(probabilities.dtype), out, *self.memory_of_grid(probabilities.shape[0]))
        self._labelled("cross_entropy", labels, (probabilities,), *given)

    def cross_entropy_backward(self, dy: Array, probabilities: Array, labels: Array, *, out: Array) -> None:
        smallest = smallest_normal(probabilities.dtype)
        self._labelled("cross_entropy_backward", labels, (dy, probabilities), smallest, out)

    def _labelled(self, name: str, labels: Array, arrays: tuple[Array, ...], *arguments: object) -> None:
        """Start a kernel with a block for each row of the last of ``arrays`` (N, C)."""
        rows, classes = arrays[-1].shape
        types, are_rows = arrays[-1].dtype.char + labels.dtype.char, int(labels.ndim == 2)
        given = (*arrays, labels, are_rows, rows, classes, self.faults_address, *arguments)
        self.each_row(f"loss.{name}", types, rows, classes, *given)

    def mse_loss(self, x: Array, t: Array, *, out: Array) -> None:
        self.over_grid("loss.mse_loss", x.dtype.char, x.size, x, t, out)

    def mse_loss_backward(self, dy: Array, x: Array, t: Array, *, out: Array) -> None:
        self.each("loss.mse_loss_backward", x.dtype.char, x.size, dy, x, t, out, x.size)

    def check_faults(self) -> None:
        """Raise what kernels that have ended found wrong."""
        kind, found, size = map(int, self.faults)
        if kind:
            self.faults[0] = 0
            what = f"indices must be in 0 .. {size - 1}, but one was {found}"
            if kind == 1:
                expected = f"class ids must be in 0..{size - 1} (x has {size} columns)"
                what = f"cross entropy: {expected}, but a label was {found}"
            raise ShapeError(f"{what}; the device found it since the host last waited for it")


def by_heads(inputs: tuple[Array, ...], num_heads: int, count: int = 3) -> list[Array]:
    """Return views (count, batch, heads, length, d) of arrays (batch, length, count * width).

    Args:
        count: of one array; of two, queries and memory, the first has 1 and the second has keys and values.
    """
    counts = (count,) if len(inputs) == 1 else (1, 2)
    splits = [
        x.reshape(*x.shape[:2], count, num_heads, x.shape[2] // (count * num_heads))
        for x, count in zip(inputs, counts, strict=True)
    ]
    return [split.transpose(2, 0, 3, 1, 4) for split in splits]


def causal_parts(queries: Array, keys: Array, causal: bool) -> Iterator[tuple[Part, Part]]:
    """Yield parts of the queries and the keys that each of them sees, the last first; one part unless ``causal``."""
    length = queries.shape[-2]
    step = CAUSAL_ROWS if causal else max(1, length)
    num_seen = keys.shape[-2]  # by the last part, which gives those that no query sees a gradient of 0
    for start in reversed(range(0, max(1, length), step)):
        rows, seen = slice(start, min(start + step, length)), slice(0, num_seen)
        yield (Ellipsis, rows, slice(None)), (Ellipsis, seen, slice(None))
        num_seen = start
