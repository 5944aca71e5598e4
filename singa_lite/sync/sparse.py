# SPDX-License-Identifier: Apache-2.0
"""What the sparse schemes share: select some elements, gather them from all ranks, keep the rest as residual.

Note [residual]: what a rank does not send stays in its residual and is added to the next step's gradient, so
that sent + kept = gradient + residual before, element by element. Selection, rounding and residuals happen
at every world size, one included.
"""

from __future__ import annotations

from types import MappingProxyType

import numpy as np

from ..backend.base import Backend
from ..comm.base import Communicator
from ..comm.work import Work
from .base import Array, scale_in_place
from .buckets import Bucket, BucketedSync
from .fp16 import HALF_MAX
from .indices import IndexCode
from .state import Slot

VALUES = ("own", "fp16")  # how values may travel


class SparseMessage:
    """Selected elements of one flat array on their way to all ranks, as one message: values, then indices as words.

    Args:
        flat: shape (n,), replaced by the sum of what all ranks selected.
        residual: receives what this rank did not select, shape (n,), and what rounding lost; None drops it.
        values: "own" sends values in their dtype, "fp16" rounded to float16, +-65504 at most.
        source: what to select from, shape (n,), such as ``residual``; None is ``flat``.
    """

    indices: Array  # what this rank has selected, padded; ``allocate`` makes it
    lost: Array | None = None  # what rounding lost of each, finite; None if nothing was rounded

    def __init__(
        self,
        communicator: Communicator,
        backend: Backend,
        flat: Array,
        residual: Array | None,
        name: str,
        values: str = "own",
        source: Array | None = None,
    ) -> None:
        self.communicator, self.backend, self.name = communicator, backend, name
        self.source = flat if source is None else source
        self.flat, self.residual = flat, residual
        self.index_dtype = "int32" if flat.size < 2**31 else "int64"
        self._value_dtype = np.dtype("float16") if values == "fp16" else flat.dtype

    def allocate(self, k: int) -> tuple[Array, Array]:
        """Return memory for the k indices and values to send, where that can be within the message."""
        self._code = IndexCode(self.flat.size, k)
        self._message = self.backend.empty((self._num_bytes(),), "uint8")
        values, _ = self._parts(self._message)
        self.indices = self.backend.empty((k,), self.index_dtype)
        self._values = (
            values if values.dtype == self.flat.dtype else self.backend.empty((k,), self.flat.dtype)
        )
        return self.indices, self._values

    def send(self, counts: list[int]) -> Work:
        """Start to send what ``allocate`` returned, filled: ascending, padded alike on all ranks; keep the rest.

        ``counts`` are how many elements each rank selected.
        """
        self._counts = counts
        values, words = self._parts(self._message)
        if values.dtype != self.flat.dtype:
            self._round(values)
        if self._code.k:
            self.backend.run("pack_indices", self.indices, out=words, low_bits=self._code.low_bits)
        self._gather = self.communicator.all_gather(self._message, name=self.name)
        self._keep_rest(self.indices[: counts[self.communicator.rank]])
        return self._gather

    def merge(self, scale: float) -> None:
        """Leave ``scale`` times the sum in ``flat``, added rank by rank; waits for what was sent."""
        messages = self._gather.wait()
        assert messages is not None
        run, empty = self.backend.run, self.backend.empty
        run("fill", out=self.flat, value=0.0)
        for rank, count in enumerate(self._counts if self._code.k else ()):
            values, words = self._parts(messages[rank])
            indices = empty((self._code.k,), self.index_dtype)
            run("unpack_indices", words, out=indices, low_bits=self._code.low_bits)
            wide = self.backend.astype(values, self.flat.dtype)
            run("scatter_add", indices[:count], wide[:count], out=self.flat)
        if scale != 1.0:
            scale_in_place(self.backend, self.flat, scale)

    def _round(self, out: Array) -> None:
        """Write the values as they are sent to ``out``, and note what that loses; an infinity is sent as NaN."""
        run, values = self.backend.run, self._values
        limited, zero, back, rest, self.lost = (
            self.backend.empty(values.shape, values.dtype) for _ in range(5)
        )
        run("clip", values, out=limited, min=-HALF_MAX, max=HALF_MAX)
        run("sub", values, values, out=zero)  # NaN where a value is not finite
        run("add", limited, zero, out=limited)
        run("cast", limited, out=out)
        run("cast", out, out=back)
        run("sub", values, back, out=rest)
        run("finite_or_zero", rest, out=self.lost)

    def _keep_rest(self, mine: Array) -> None:
        """Write the unsent elements of the source into the residual, where finite; ``mine``: indices of those sent."""
        if self.residual is None:
            return
        self.backend.run("finite_or_zero", self.source, out=self.residual)
        self.backend.run("scatter_fill", mine, out=self.residual, value=0.0)
        if self.lost is not None:
            self.backend.run("scatter_add", mine, self.lost[: mine.size], out=self.residual)

    def _num_bytes(self) -> int:
        """Bytes of a message: values and words, each message at a multiple of the size of a value, and of a word."""
        unit = max(4, self._value_dtype.itemsize)
        return -(-(self._border + 4 * self._code.num_words) // unit) * unit

    @property
    def _border(self) -> int:
        """Where the words begin in a message."""
        return -(-self._code.k * self._value_dtype.itemsize // 4) * 4

    def _parts(self, message: Array) -> tuple[Array, Array]:
        """Return the values, (k,), and the words of a message."""
        values = message[: self._code.k * self._value_dtype.itemsize].view(self._value_dtype)
        words = message[self._border : self._border + 4 * self._code.num_words].view("int32")
        return values, words


class SparseSync(BucketedSync):
    """Base of the sparse schemes. ``Options`` must have ``corr``, whether what is not sent is kept, and ``values``."""

    is_selective = True
    slots = MappingProxyType({"residual": Slot()})

    def message(self, bucket: Bucket) -> SparseMessage:
        """Add the residual to the bucket, and return a message to select its elements for."""
        [residual] = self.state.of(bucket) if self.options.corr else [None]
        if residual is not None:
            bucket.backend.run("add", bucket.flat, residual, out=bucket.flat)
        return SparseMessage(
            self.communicator, bucket.backend, bucket.flat, residual, bucket.name, self.options.values
        )
