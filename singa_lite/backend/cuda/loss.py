# SPDX-License-Identifier: Apache-2.0
"""Softmax and losses, in loss.cu.

Class ids are checked on the device; an id that names no column is a ShapeError at the next call that waits for the
device (``to_numpy``, ``synchronize``), since waiting here would stop the host at every step.
"""

from __future__ import annotations

from math import prod

import numpy as np

from ...errors import ShapeError
from ..base import Array
from .launch import THREADS, Launcher


class LossKernels(Launcher):
    """softmax, cross entropies and the mean squared error."""

    def softmax(self, x: Array, *, out: Array, axis: int) -> None:
        self._rows("loss.softmax", x, axis, x, out)

    def softmax_backward(self, dy: Array, y: Array, *, out: Array, axis: int) -> None:
        self._rows("loss.softmax_backward", y, axis, dy, y, out)

    def _rows(self, name: str, x: Array, axis: int, *arrays: Array) -> None:
        if x.size:
            length, step = x.shape[axis], prod(x.shape[axis % x.ndim + 1 :])
            self.launch(name, x.dtype.char, x.size // length, _threads(length), *arrays, length, step)

    def softmax_cross_entropy(self, x: Array, labels: Array, *, out: tuple[Array, Array]) -> None:
        loss, probabilities = out
        arguments = (loss, probabilities, self.scratch(8 * x.shape[0]), self.ticket, self.faults_address)
        self._labelled("softmax_cross_entropy", x, labels, (x,), *arguments)

    def softmax_cross_entropy_backward(
        self, dy: Array, probabilities: Array, labels: Array, *, out: Array
    ) -> None:
        arrays = (dy, probabilities)
        self._labelled(
            "softmax_cross_entropy_backward", probabilities, labels, arrays, out, self.faults_address
        )

    def cross_entropy(self, probabilities: Array, labels: Array, *, out: Array) -> None:
        smallest = float(
            np.finfo(probabilities.dtype).tiny
        )  # a probability of 0 costs log(tiny), not infinity
        scratch = self.scratch(8 * probabilities.shape[0])
        arguments = (out, smallest, scratch, self.ticket, self.faults_address)
        self._labelled("cross_entropy", probabilities, labels, (probabilities,), *arguments)

    def cross_entropy_backward(self, dy: Array, probabilities: Array, labels: Array, *, out: Array) -> None:
        smallest = float(np.finfo(probabilities.dtype).tiny)
        arrays, arguments = (dy, probabilities), (out, smallest, self.faults_address)
        self._labelled("cross_entropy_backward", probabilities, labels, arrays, *arguments)

    def _labelled(
        self, name: str, like: Array, labels: Array, arrays: tuple[Array, ...], *arguments: object
    ) -> None:
        """Start a kernel with a block for each row of ``like`` (N, C)."""
        rows, classes = like.shape
        if rows and classes:
            types, are_rows = like.dtype.char + labels.dtype.char, int(labels.ndim == 2)
            given = (*arrays, labels, are_rows, rows, classes, *arguments)
            self.launch("loss." + name, types, rows, _threads(classes), *given)

    def mse_loss(self, x: Array, t: Array, *, out: Array) -> None:
        blocks = max(1, min(-(-x.size // 2048), 4 * self.num_processors))
        scratch = self.scratch(8 * blocks)
        self.launch("loss.mse_loss", x.dtype.char, blocks, THREADS, x, t, out, x.size, scratch, self.ticket)

    def mse_loss_backward(self, dy: Array, x: Array, t: Array, *, out: Array) -> None:
        self.each("loss.mse_loss_backward", x.dtype.char, x.size, dy, x, t, out, x.size)

    def check_faults(self) -> None:
        """Raise what kernels that have ended found wrong."""
        if self.faults[0]:
            self.faults[0] = 0
            raise ShapeError(
                f"cross entropy: class ids must lie in 0..{self.faults[2] - 1} (x has {self.faults[2]} columns), "
                f"but a label was {self.faults[1]}; it was met on the device since the host last waited for it"
            )


def _threads(length: int) -> int:
    """Threads of a block that walks a row: whole warps."""
    return 32 if length <= 128 else THREADS
