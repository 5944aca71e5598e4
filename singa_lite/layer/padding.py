# SPDX-License-Identifier: Apache-2.0
"""The padding that keeps an image's size: pad_mode SAME_UPPER and SAME_LOWER."""

from __future__ import annotations

from .. import autograd
from ..tensor import Tensor

PAD_MODES = ("NOTSET", "SAME_UPPER", "SAME_LOWER")


def same_pad(
    x: Tensor,
    pad_mode: str,
    kernel_size: tuple[int, int],
    stride: tuple[int, int],
    dilation: tuple[int, int] = (1, 1),
    value: float = 0.0,
) -> tuple[Tensor, tuple[int, int]]:
    """Prepare a window that gives ceil(size / stride) outputs.

    The kernels pad both sides alike. Where an axis needs an odd number of elements, the one left over is added
    here: after the image for SAME_UPPER, before it for SAME_LOWER.

    Args:
        x: (N, C, H, W).
        pad_mode: "SAME_UPPER" or "SAME_LOWER".
        kernel_size, stride, dilation: of the window, (height, width).
        value: what the element left over is.

    Returns:
        (x or a recorded, longer copy of it, padding per side: height and width).
    """
    totals = [
        max((-(-n // s) - 1) * s + d * (k - 1) + 1 - n, 0)
        for n, k, s, d in zip(x.shape[2:], kernel_size, stride, dilation, strict=True)
    ]
    odd = [0, 0, totals[0] % 2, totals[1] % 2]
    if any(odd):
        pads = [0, 0, 0, 0, *odd] if pad_mode == "SAME_UPPER" else [*odd, 0, 0, 0, 0]
        x = autograd.pad(x, "constant", pads, value)
    return x, (totals[0] // 2, totals[1] // 2)
