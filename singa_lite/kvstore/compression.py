# SPDX-License-Identifier: Apache-2.0
"""Gradients sent in 1 or 2 bits a value; what is not sent stays in a residual and is sent later.

What lives here: the options, and making and reading codes on arrays of the host. What does not: keeping residuals,
and sending codes. Contiguous arrays go to compiled code (native/kernels/quantize.h); numpy, the reference, gives the
same bits for arrays with gaps, and where nothing was compiled.

Note [codes]: residual += gradient; what is sent is then subtracted from the residual. A byte has the first value in its
highest bits, and the bits after the last value are 0.

| type | residual | sent | code |
|---|---|---|---|
| 2bit | >= threshold | +threshold | 11 |
| | <= -threshold | -threshold | 10 |
| | between | 0 | 00 |
| 1bit | > threshold | +1 | 1 |
| | else | -1 | 0 |

Source: MXNet, src/kvstore/gradient_compression-inl.h.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import _native
from ..dtypes import LARGEST_FLOAT32
from ..errors import DTypeError, OptionError, ShapeError, check_choice, check_number
from .calls import Array

WHERE = "set_gradient_compression"
BITS = {"1bit": 1, "2bit": 2}
WORD_BITS = 32  # of an int32, in which codes travel


@dataclass(frozen=True)
class Compression:
    """How gradients are compressed, see Note [codes].

    Args:
        type: "1bit" or "2bit".
        threshold: a finite number, rounded to float32; for 2bit > 0. It is compared with the gradients as they are
            pushed: .5 is small for sums over a batch and large for means.

    Raises:
        OptionError: an unknown type, or a threshold that is not such a number.

    Example:
        >>> compression = Compression("2bit", 0.5)
        >>> residual, codes = np.zeros(3, np.float32), np.zeros(compression.code_size(3), np.int32)
        >>> compression.encode(np.float32([0.75, -0.25, -2]), residual, codes)
        True
        >>> residual.tolist(), codes.view(np.uint8).tolist()
        ([0.25, -0.25, -1.5], [200, 0, 0, 0])
    """

    type: str
    threshold: float = 0.5

    def __post_init__(self) -> None:
        check_choice(WHERE, "type", self.type, BITS)
        threshold = check_number(WHERE, "threshold", self.threshold, -LARGEST_FLOAT32, LARGEST_FLOAT32)
        object.__setattr__(self, "threshold", threshold)  # a float, whichever kind of number came
        if self.type == "2bit" and not self._threshold > 0:
            raise OptionError(
                f"{WHERE}: threshold = {self.threshold!r} must be > 0 for 2bit, as a float32 too"
            )

    @classmethod
    def of(cls, params: Mapping[str, Any]) -> Compression:
        """Return the compression that MXNet's dict describes: {"type": "2bit", "threshold": 0.5}.

        Raises:
            OptionError: it is not a dict, has no type or another name, or a value is not as the class says.
        """
        if (
            not isinstance(params, Mapping)
            or "type" not in params
            or not set(params) <= {"type", "threshold"}
        ):
            raise OptionError(
                f"{WHERE}: expected a dict with type and, if it is not .5, threshold, got {params!r}"
            )
        return cls(**params)

    @property
    def bits(self) -> int:
        """Bits a value: 1 or 2."""
        return BITS[self.type]

    @property
    def _threshold(self) -> np.float32:
        return np.float32(self.threshold)

    def code_size(self, num_values: int) -> int:
        """Return how many int32 the codes of so many values take: 16 or 32 values each."""
        return -(-num_values * self.bits // WORD_BITS)

    def encode(self, grad: Array, residual: Array, codes: Array) -> bool:
        """Add ``grad`` to ``residual``, write into ``codes`` what is to be sent, and subtract that from ``residual``.

        Args:
            grad: float32, shape (n,); only read.
            residual: float32, shape (n,); changed in place.
            codes: int32, shape (code_size(n),); all of it is overwritten.

        Returns:
            True; or False, with nothing changed, if a sum of gradient and residual is infinite or NaN.

        Raises:
            DTypeError, ShapeError, OptionError: an array is not as above, or cannot be written; nothing has changed.
        """
        _check("encode", "grad", grad, np.float32, np.size(grad))
        _check("encode", "residual", residual, np.float32, grad.size, is_written=True)
        _check("encode", "codes", codes, np.int32, self.code_size(grad.size), is_written=True)
        native, _ = _native.load("_kernels")
        if native is not None:
            is_finite: bool | None = native.quantize(grad, residual, codes, self.bits, self._threshold)
            if is_finite is not None:
                return is_finite
        return self._encode_with_numpy(grad, residual, codes)

    def decode(self, codes: Array, out: Array) -> None:
        """Write the values that ``codes`` stand for into ``out``: +threshold, -threshold and 0, or +1 and -1.

        Args:
            codes: int32, shape (code_size(n),), as ``encode`` made it with this compression.
            out: float32, shape (n,).

        Raises:
            DTypeError, ShapeError, OptionError: an array is not as above, or ``out`` cannot be written.
        """
        self._decode("decode", codes, out, adds=False)

    def decode_add(self, codes: Array, out: Array) -> None:
        """Add the values that ``codes`` stand for to ``out``; arguments and errors as of ``decode``."""
        self._decode("decode_add", codes, out, adds=True)

    def _decode(self, where: str, codes: Array, out: Array, adds: bool) -> None:
        _check(where, "out", out, np.float32, np.size(out), is_written=True)
        _check(where, "codes", codes, np.int32, self.code_size(out.size))
        native, _ = _native.load("_kernels")
        if native is not None and native.dequantize(codes, out, self.bits, self._threshold, adds):
            return
        values = self._values(codes, out.size)
        out[...] = out + values if adds else values

    def _encode_with_numpy(self, grad: Array, residual: Array, codes: Array) -> bool:
        with np.errstate(over="ignore", invalid="ignore"):
            sums = residual + grad
        if not np.isfinite(sums).all():
            return False
        if self.bits == 1:
            flags = sums > self._threshold
        else:
            is_positive = sums >= self._threshold
            flags = np.stack([is_positive | (sums <= -self._threshold), is_positive], axis=1)
        packed = np.zeros(codes.size * codes.itemsize, np.uint8)
        used = np.packbits(flags)
        packed[: used.size] = used
        codes[...] = packed.view(np.int32)
        residual[...] = sums - self._values(codes, sums.size)
        return True

    def _values(self, codes: Array, num_values: int) -> Array:
        flags = np.unpackbits(np.ascontiguousarray(codes).view(np.uint8), count=num_values * self.bits)
        if self.bits == 1:
            return np.array([-1, 1], np.float32)[flags]
        is_sent, is_positive = flags.reshape(-1, 2).T
        return np.array([0, 0, -self._threshold, self._threshold], np.float32)[2 * is_sent + is_positive]


def _check(where: str, name: str, array: Any, dtype: Any, size: int, is_written: bool = False) -> None:
    """Raise unless ``array`` is a flat numpy array of ``dtype`` and ``size`` elements."""
    if not isinstance(array, np.ndarray) or array.dtype != dtype:
        kind = getattr(array, "dtype", type(array).__name__)
        raise DTypeError(f"{where}: {name} must be a numpy array of {np.dtype(dtype)}, got {kind}")
    if array.shape != (size,):
        raise ShapeError(f"{where}: {name} has shape {array.shape}, expected ({size},)")
    if is_written and not array.flags.writeable:
        raise OptionError(f"{where}: {name} cannot be written; pass a copy")
