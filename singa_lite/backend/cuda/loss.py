# SPDX-License-Identifier: Apache-2.0
"""Softmax, attention and losses, in loss.cu.

Class ids are checked on the device; an id that names no column is a ShapeError at the next call that waits for the
device (``to_numpy``, ``synchronize``), since waiting here would stop the host at every step.
"""

from __future__ import annotations

from math import prod

import numpy as np

from ...dtypes import accumulation_dtype, bfloat16
from ...errors import ShapeError
from ..base import Array
from .launch import THREADS, Launcher

WARP_ROW = 2048  # elements of a row of scores at most that a warp has


class LossKernels(Launcher):
    """softmax, attention, cross entropies and the mean squared error."""

    def softmax(self, x: Array, *, out: Array, axis: int) -> None:
        self._softmax("softmax", axis, x, out)

    def softmax_backward(self, dy: Array, y: Array, *, out: Array, axis: int) -> None:
        self._softmax("softmax_backward", axis, dy, y, out)

    def _softmax(self, name: str, axis: int, *arrays: Array) -> None:
        x = arrays[0]
        if x.size:
            length, step = x.shape[axis], prod(x.shape[axis % x.ndim + 1 :])
            self.each_row(f"loss.{name}", x.dtype.char, x.size // length, length, *arrays, length, step)

    def attention(self, *inputs: Array, out: Array, num_heads: int, causal: bool) -> None:
        """Made of transposes, cuBLAS's products and a softmax that scales and masks.

        Of inputs of 16 bits scores, probabilities and their gradients are float32: float16 may not hold scores before
        they are scaled, and rounded to bfloat16 they would cost the result as much again as its own rounding does.
        """
        queries, keys, values = self._heads(inputs, num_heads)
        scores = self._products_of_rows(queries, keys)
        probabilities = self.empty(scores.shape, scores.dtype)
        self._each_score("attention", scores, causal, queries, probabilities)
        self._join_heads(out, self._product(probabilities, values)[None])

    def attention_backward(
        self, dy: Array, *inputs: Array, out: Array | tuple[Array, Array], num_heads: int, causal: bool
    ) -> None:
        queries, keys, values = self._heads(inputs, num_heads)
        (dys,) = self._split_heads(dy, 1, num_heads)
        scores, dprobabilities = self._products_of_rows(queries, keys), self._products_of_rows(dys, values)
        probabilities, dscores = (self.empty(scores.shape, scores.dtype) for _ in range(2))
        self._each_score(
            "attention_backward", scores, causal, queries, dprobabilities, probabilities, dscores
        )
        is_split = isinstance(out, tuple)
        dqueries = self.empty((1 if is_split else 3, *queries.shape), scores.dtype)
        dmemory = self.empty((2, *keys.shape), scores.dtype) if is_split else dqueries[1:]
        self._product(dscores, keys, dqueries[0])
        self._product(dscores, queries, dmemory[0], transpose_a=True)
        self._product(probabilities, dys, dmemory[1], transpose_a=True)
        for array, grads in zip(out if is_split else (out,), (dqueries, dmemory), strict=False):
            self._join_heads(array, grads)

    def _products_of_rows(self, a: Array, b: Array) -> Array:
        """Multiply each row of ``a`` by each of ``b``, in float32 at least."""
        out = self.empty((*a.shape[:3], b.shape[2]), accumulation_dtype(a.dtype))
        self.find("matmul")(a, b, out=out, transpose_b=True)
        return out

    def _each_score(self, name: str, scores: Array, causal: bool, queries: Array, *arrays: Array) -> None:
        """Start a kernel with a warp for each row of ``scores``, or a block if that is long."""
        length = scores.shape[3]
        if not scores.size:
            return
        rows = scores.size // length
        name, blocks = (f"{name}_of_warps", -(-rows * 32 // THREADS)) if length <= WARP_ROW else (name, rows)
        numbers = (rows, length, queries.shape[3] ** -0.5, scores.shape[2] if causal else 0)
        self.launch(f"loss.{name}", scores.dtype.char, blocks, THREADS, scores, *arrays, *numbers)

    def _heads(self, inputs: tuple[Array, ...], num_heads: int) -> list[Array]:
        """Queries, keys and values (batch, heads, length, d) of the inputs of attention."""
        counts = (3,) if len(inputs) == 1 else (1, 2)
        found = [self._split_heads(x, count, num_heads) for x, count in zip(inputs, counts, strict=True)]
        return [heads for part in found for heads in part]

    def _split_heads(self, x: Array, count: int, num_heads: int) -> Array:
        """(batch, length, count * width) as (count, batch, heads, length, d)."""
        split = x.reshape(*x.shape[:2], count, num_heads, x.shape[2] // (count * num_heads))
        heads = self.empty(tuple(split.shape[axis] for axis in (2, 0, 3, 1, 4)), x.dtype)
        self.find("transpose")(split, out=heads, axes=(2, 0, 3, 1, 4))
        return heads

    def _join_heads(self, out: Array, heads: Array) -> None:
        """Write (count, batch, heads, length, d) to (batch, length, count * width), rounded if that has 16 bits."""
        shape = tuple(heads.shape[axis] for axis in (1, 3, 0, 2, 4))
        joined = out.reshape(shape) if out.dtype == heads.dtype else self.empty(shape, heads.dtype)
        self.find("transpose")(heads, out=joined, axes=(1, 3, 0, 2, 4))
        if out.dtype != heads.dtype:
            self.find("cast")(joined, out=out.reshape(shape))

    def _product(self, a: Array, b: Array, out: Array | None = None, transpose_a: bool = False) -> Array:
        """Multiply the matrices of each sample and head: those of 16 bits are widened, and fit in TF32."""
        is_widened = b.dtype != a.dtype
        if is_widened:
            b, narrow = self.empty(b.shape, a.dtype), b
            self.find("cast")(narrow, out=b)
        if out is None:
            out = self.empty((*a.shape[:3], b.shape[3]), a.dtype)
        self.find("matmul")(a, b, out=out, transpose_a=transpose_a, allows_tf32=is_widened)
        return out

    def softmax_cross_entropy(self, x: Array, labels: Array, *, out: tuple[Array, Array]) -> None:
        self._labelled("softmax_cross_entropy", labels, (x,), *out, *self.memory_of_grid(x.shape[0]))

    def softmax_cross_entropy_backward(
        self, dy: Array, probabilities: Array, labels: Array, *, out: Array
    ) -> None:
        self._labelled("softmax_cross_entropy_backward", labels, (dy, probabilities), out)

    def cross_entropy(self, probabilities: Array, labels: Array, *, out: Array) -> None:
        given = (_smallest(probabilities), out, *self.memory_of_grid(probabilities.shape[0]))
        self._labelled("cross_entropy", labels, (probabilities,), *given)

    def cross_entropy_backward(self, dy: Array, probabilities: Array, labels: Array, *, out: Array) -> None:
        self._labelled("cross_entropy_backward", labels, (dy, probabilities), _smallest(probabilities), out)

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
        kind, found, size = (int(number) for number in self.faults)
        if kind:
            self.faults[0] = 0
            what = f"indices must be in 0 .. {size - 1}, but one was {found}"
            if kind == 1:
                expected = f"class ids must be in 0..{size - 1} (x has {size} columns)"
                what = f"cross entropy: {expected}, but a label was {found}"
            raise ShapeError(f"{what}; the device found it since the host last waited for it")


def _smallest(probabilities: Array) -> float:
    """Return the least normal number of the type: a probability of 0 costs log(tiny), not infinity."""
    dtype = probabilities.dtype
    return float(np.finfo(np.float32 if dtype == bfloat16 else dtype).tiny)  # they have the same
