# SPDX-License-Identifier: Apache-2.0
"""Gradients one can hold: ``Tensor.backward`` puts them into ``Tensor.grad``, and calls callbacks as each is final.

What lives here: adding up, and the contract of a callback. What does not: computing gradients (engine.py), where a
gradient is kept and whether it is fresh (tensor/core.py), sending it (communicators.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import OptionError
from ..graph.memory import address_of
from ..tensor import Tensor
from ..tensor.core import set_grads_fresh
from .engine import backward


class BackwardCallback:
    """Callback of ``Tensor.backward``; a subclass overrides which of the three methods it needs.

    In a recorded step this Python runs once, and the kernels and collectives that it starts are recorded.
    """

    _changed_gradients: Sequence[Tensor] = ()  # no two callbacks of one backward may change the same

    def begin(self) -> None:
        """Called before anything is computed; what it raises leaves all gradients as they are."""

    def add_gradient(self, param: Tensor) -> None:
        """Called as soon as ``param.grad`` is final, in the same order on every rank."""

    def finish(self) -> None:
        """Called after the last gradient."""


def backward_into_grads(
    y: Tensor,
    dy: Tensor | float | None = None,
    communicator_callbacks: BackwardCallback | Sequence[BackwardCallback] | None = None,
) -> None:
    """Compute the gradient of every parameter, into ``Tensor.grad``: the work of ``Tensor.backward``."""
    callbacks = _as_list(communicator_callbacks)
    gradients = backward(y, dy)
    for callback in callbacks:
        callback.begin()
    changed: list[Tensor] = []
    try:
        for param, gradient in gradients:
            grad = param.grad
            if grad is None:  # its flags were changed after the forward pass
                continue
            if param.has_fresh_grad:
                param.device.backend.run("add", grad.array, gradient.array, out=grad.array)
            else:
                param.device.backend.run("copy", gradient.array, out=grad.array)
            grad.note_change()
            changed.append(param)
            for callback in callbacks:
                callback.add_gradient(param)
    finally:
        set_grads_fresh(changed, True)
    for callback in callbacks:
        callback.finish()


def _as_list(callbacks: object) -> list[BackwardCallback]:
    """Return the callbacks given; OptionError for anything else, or two that change one gradient."""
    if callbacks is None:
        return []
    found: list[BackwardCallback] = []
    for callback in callbacks if isinstance(callbacks, (list, tuple)) else [callbacks]:
        if not isinstance(callback, BackwardCallback):
            raise OptionError(
                "backward: communicator_callbacks must be a BackwardCallback or a list of them, such as "
                f"all_reduce_callback() gives, not {type(callback).__name__}"
            )
        if any(callback is known for known in found):
            raise OptionError("backward: communicator_callbacks has a callback twice")
        found.append(callback)
    changed = [
        address_of(grad.array) for callback in found for grad in callback._changed_gradients if grad.size()
    ]
    if len(set(changed)) < len(changed):
        raise OptionError(
            "backward: two communicator_callbacks change the same gradient; give it to one of them"
        )
    return found
