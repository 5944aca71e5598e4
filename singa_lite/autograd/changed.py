# SPDX-License-Identifier: Apache-2.0
"""Leaves that were changed between a forward pass and its backward, as parameters by the update of another loss.

An operator keeps the array of a leaf, not a copy. Where its backward reads that array, the gradients would mix old
and new values; where it does not, as that of a sum, all is well. So kernels of such a backward are watched. A script's
own operator may read in Python what it has given to ``context.save``, so all of that counts as read; what it keeps
elsewhere is not seen. Not noticed is what a replay changes, and what is written to ``Tensor.data``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from ..config import this_thread
from ..errors import GraphError
from ..tensor import Tensor


@contextmanager
def kept_unread(changed: Iterable[Tensor], operator: str, number: int) -> Iterator[None]:
    """Inside: GraphError where a kernel reads one of the leaves ``changed`` that changed after call ``number``."""
    leaves = [leaf for leaf in changed if leaf.changed_at > number]

    def check(inputs: tuple[Any, ...]) -> None:
        for leaf in leaves:
            may_share_memory = leaf.device.backend.may_share_memory
            if any(may_share_memory(array, leaf.array) for array in inputs):
                raise GraphError(
                    f"backward: {operator} needs {leaf.name or 'a tensor'} of shape {leaf.shape} as it was in the "
                    "forward pass, and it was changed since, in place or by an update; run the forward pass after the "
                    "update, or one backward() of the sum of the losses"
                )

    before, this_thread.before_kernel = this_thread.before_kernel, check
    try:
        yield
    finally:
        this_thread.before_kernel = before
