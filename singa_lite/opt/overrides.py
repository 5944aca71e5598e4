# SPDX-License-Identifier: Apache-2.0
"""Methods that a script's optimizer overrides: a recorded step has a host node for their Python, or breaks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import wraps
from typing import Any

from .. import autograd
from ..autograd.parts import BackwardPairs
from ..graph.recorder import break_graph, host
from ..tensor import Tensor

# what a subclass, or a class beside it, may write, and a replay must run; and what no replay can run
ON_HOST = ("update_all", "apply", "update", "update_pairs", "update_velocity", "step")
UNRECORDABLE = (
    "__call__",
    "call",
    "backward_and_update",
    "run_update",
    "number",
    "decay",
    "zero_grad",
    "slots",
)


def updates_in(owner: object) -> set[str]:
    """Return which of ``update_all`` and ``apply`` a class has written, or an optimizer has as attributes."""
    return {"update_all", "apply"} & vars(owner).keys() - {*vars(owner).get("_inherited_methods", ())}


def is_of_package(optimizer: type, name: str) -> bool:
    """Return whether a class of this package that ``optimizer`` derives from has a method of this name."""
    package = __name__.partition(".")[0]
    return any(
        name in vars(kind) and kind.__module__.partition(".")[0] == package for kind in optimizer.__mro__
    )


def on_host(method: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a method whose Python runs at every replay of a recorded step; it gets new lists and gradients each time."""

    @wraps(method)
    def run_in_float32(arguments: list[Any], options: dict[str, Any]) -> Any:
        lent = LentGradients()
        with autograd.autocast(enabled=False):
            result = method(*lent.arguments(arguments), **lent.options(options))
        lent.take_back()
        return result

    @wraps(method)
    def run(*arguments: Any, **options: Any) -> Any:
        given = [list(a) if isinstance(a, (Iterator, BackwardPairs)) else a for a in arguments]
        return host(run_in_float32, given, options)

    return run


class LentGradients:
    """Copies of lists and Tensors on the arrays of gradients for one call, which may keep or change them.

    The next step writes these arrays again, and a replay passes the same objects each time.
    """

    def __init__(self) -> None:
        self._pairs: list[tuple[Tensor, Tensor]] = []  # each gradient, and the Tensor that stands for it

    def arguments(self, arguments: Sequence[Any]) -> list[Any]:
        """Return arguments, or a pair, with another Tensor for each but the first, which is the parameter."""
        found: list[Any] = []
        for value in arguments:
            is_gradient = isinstance(value, Tensor) and any(isinstance(other, Tensor) for other in found)
            found.append(self._lend(value) if is_gradient else self._copied(value))
        return found

    def options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return keyword arguments with another Tensor for each that is called a gradient."""
        return {
            name: self._lend(value) if isinstance(value, Tensor) and "grad" in name else self._copied(value)
            for name, value in options.items()
        }

    def _copied(self, value: Any) -> Any:
        """Return a list or tuple of pairs with others in them; else ``value``."""
        if type(value) not in (list, tuple):
            return value
        return type(value)(
            [tuple(self.arguments(pair)) if isinstance(pair, (list, tuple)) else pair for pair in value]
        )

    def _lend(self, gradient: Tensor) -> Tensor:
        stand_in = Tensor.wrap(gradient.array, gradient.device)
        vars(stand_in).update(vars(gradient))
        self._pairs.append((gradient, stand_in))
        return stand_in

    def take_back(self) -> None:
        """Write to a gradient what the call has set instead, and give a Tensor that it keeps memory of its own."""
        while self._pairs:
            gradient, stand_in = self._pairs.pop()
            array, backend = stand_in.array, gradient.device.backend
            if (
                array is not gradient.array
                and array.shape == gradient.shape
                and array.dtype == gradient.array.dtype
            ):
                backend.run("copy", array, out=gradient.array)
            watch = weakref.ref(stand_in)
            del stand_in
            if (kept := watch()) is not None and array is gradient.array:
                kept.array = kept.clone().array


def unrecordable(method: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a method that runs backward, or is called while kernels are recorded: its Python a replay would not run."""

    @wraps(method)
    def run(self: object, *arguments: Any, **options: Any) -> Any:
        break_graph(f"{type(self).__name__} overrides {method.__name__}, whose Python a replay would not run")
        with autograd.autocast(enabled=False):
            return method(self, *arguments, **options)

    return run
