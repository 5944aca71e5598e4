# SPDX-License-Identifier: Apache-2.0
"""Memory that was changed between a forward pass and its backward, as that of parameters by another loss's update.

An operator keeps the arrays of its inputs, not copies. Where its backward reads an array that has changed since, the
gradients would mix old and new values; where it does not, as that of a sum, all is well. So kernels of such a backward
are watched. A script's own operator may read in Python what it has given to ``context.save``, so all of that counts as
read; what it keeps elsewhere is not seen. Nor is it noticed what is written to ``Tensor.data``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ..config import this_thread
from ..errors import GraphError
from ..graph.changes import Changes
from ..graph.memory import root_of


@contextmanager
def kept_unread(changed: Mapping[int, Changes], operator: str, number: int) -> Iterator[None]:
    """Inside: GraphError where a kernel reads memory of ``changed`` that has changed after call ``number``."""

    def check(inputs: tuple[Any, ...]) -> None:
        for array in inputs:
            changes = changed.get(id(root_of(array)))
            if changes is not None and changes.is_after(number, array):
                raise GraphError(
                    f"backward: {operator} needs {changes.name or 'a tensor'} of shape {array.shape} as it was in the "
                    "forward pass, and it was changed since, in place or by an update; run the forward pass after the "
                    "update, or one backward() of the sum of the losses"
                )

    before, this_thread.before_kernel = this_thread.before_kernel, check
    try:
        yield
    finally:
        this_thread.before_kernel = before
