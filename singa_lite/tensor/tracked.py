# SPDX-License-Identifier: Apache-2.0
"""Which tensors gradients go through, whether a call is recorded, and a warning where a function would lose them."""

from __future__ import annotations

from typing import Any

from ..config import this_thread
from ..users_line import warn

NO_GRADIENT = (
    "tensor.{0} of a recorded tensor: the result has no gradient, so what the tensor was computed from gets none "
    "through it. Use an operator of autograd, or clone() the tensor if that is meant"
)


def is_tracked(tensor: Any) -> bool:
    """Return whether ``tensor`` can get a gradient: it was recorded, or is a leaf that stores its gradient."""
    return tensor.creator is not None or (tensor.stores_grad and tensor.requires_grad)


def is_recorded_now(tensor: Any) -> bool:
    """Return whether operators record a call with ``tensor`` now, and a gradient may still go through it."""
    if not (this_thread.training and this_thread.recording and is_tracked(tensor)):
        return False
    return tensor.creator is None or (tensor.is_recorded and tensor.creator.context is not None)


def warn_if_recorded(where: str, *tensors: Any) -> None:
    """Warn if one of them is a recorded Tensor, and backward may still go through it.

    Args:
        where: the function of ``tensor`` that is called, for the message.
        tensors: what it computes from; other objects do not count.
    """
    # "is True": a class in place of a Tensor, which a later check refuses, has a property there
    if any(getattr(tensor, "is_recorded", None) is True and is_recorded_now(tensor) for tensor in tensors):
        warn(NO_GRADIENT.format(where))
