# SPDX-License-Identifier: Apache-2.0
"""The shape rule of convolution and pooling."""

from __future__ import annotations

from ...errors import ShapeError

Pair = tuple[int, int]


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
