# SPDX-License-Identifier: Apache-2.0
"""The window of convolution and pooling: its options and its shape rule."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral

from ...errors import OptionError, ShapeError, is_number

Pair = tuple[int, int]
LARGEST = 2**31 - 1  # of compiled kernels
# oneDNN 3.2 makes code that grows with a stride: 5 s for 1e7, and wrong sums near LARGEST
LARGEST_OF_CONV = 2**16


def pair(
    where: str, name: str, value: int | Sequence[int], smallest: int, largest: int = LARGEST
) -> tuple[int, int]:
    """Return ``value`` as (height, width), one number standing for both; OptionError outside smallest .. largest."""
    both = tuple(value) if isinstance(value, Sequence) else (value, value)
    is_pair = len(both) == 2 and all(is_number(n, Integral) for n in both)
    if not is_pair or not smallest <= min(both) <= max(both) <= largest:
        raise OptionError(
            f"{where}: {name} = {value!r} must be an int or a pair of ints >= {smallest} and <= {largest}"
        )
    return int(both[0]), int(both[1])


def check_pool_padding(where: str, kernel_size: Pair, padding: Pair) -> None:
    """Raise OptionError unless every window overlaps the image."""
    if any(p >= k for p, k in zip(padding, kernel_size, strict=True)):
        raise OptionError(
            f"{where}: padding {padding} must be smaller than kernel_size {kernel_size}, "
            "else a window would be outside the image"
        )


def output_size(
    where: str,
    size: tuple[int, ...],
    kernel_size: Pair,
    stride: Pair,
    padding: Pair,
    dilation: Pair = (1, 1),
) -> Pair:
    """floor((size + 2 padding - dilation (kernel_size - 1) - 1) / stride) + 1, for height and width.

    Raises:
        ShapeError: the window is larger than the padded image.
    """
    result = []
    for n, k, s, p, d in zip(size, kernel_size, stride, padding, dilation, strict=True):
        reach = d * (k - 1) + 1
        if n + 2 * p < reach:
            raise ShapeError(
                f"{where}: a window of {kernel_size} (dilation {dilation}) does not fit into an image of "
                f"{tuple(size)} with padding {padding}; use a smaller kernel or more padding"
            )
        result.append((n + 2 * p - reach) // s + 1)
    return result[0], result[1]
