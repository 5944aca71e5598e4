# SPDX-License-Identifier: Apache-2.0
"""The padding that keeps an image's size: pad_mode SAME_UPPER and SAME_LOWER."""

from __future__ import annotations

from ..errors import OptionError

PAD_MODES = ("NOTSET", "SAME_UPPER", "SAME_LOWER")


def same_padding(
    where: str,
    size: tuple[int, ...],
    kernel_size: tuple[int, int],
    stride: tuple[int, int],
    dilation: tuple[int, int] = (1, 1),
) -> tuple[int, int]:
    """Padding per side, height and width, that gives ceil(size / stride) outputs.

    Where the two sides would be equal, SAME_UPPER and SAME_LOWER are the same; where not, we have no kernel.

    Raises:
        OptionError: the total padding of an axis is odd.
    """
    result = []
    for n, k, s, d in zip(size, kernel_size, stride, dilation, strict=True):
        total = max((-(-n // s) - 1) * s + d * (k - 1) + 1 - n, 0)
        if total % 2:
            raise OptionError(
                f"{where}: pad_mode SAME_* needs {total} zeros on an axis of {n} (kernel {k}, stride {s}), which "
                "do not split evenly; choose an odd kernel_size, or padding= by hand"
            )
        result.append(total // 2)
    return result[0], result[1]
