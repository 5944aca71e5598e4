# SPDX-License-Identifier: Apache-2.0
"""What a recorded step does with methods that a script's optimizer overrides: their Python has no node of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

from .. import autograd
from ..autograd.parts import BackwardPairs
from ..graph.recorder import break_graph, host

# what a subclass, or a class beside it, may write, and a replay must run; and what no replay can run
ON_HOST = ("update_all", "apply", "update", "update_pairs", "update_velocity", "step")
UNRECORDABLE = ("__call__", "call", "backward_and_update", "run_update", "number", "decay")


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
    """Mark a method whose Python runs at every replay of a recorded step."""

    @wraps(method)
    def run_in_float32(arguments: list[Any], options: dict[str, Any]) -> Any:
        with autograd.autocast(enabled=False):
            return method(*arguments, **options)

    @wraps(method)
    def run(*arguments: Any, **options: Any) -> Any:
        given = [list(a) if isinstance(a, (Iterator, BackwardPairs)) else a for a in arguments]
        return host(run_in_float32, given, options)

    return run


def unrecordable(method: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a method that runs backward, or is called while kernels are recorded: its Python a replay would not run."""

    @wraps(method)
    def run(self: object, *arguments: Any, **options: Any) -> Any:
        break_graph(f"{type(self).__name__} overrides {method.__name__}, whose Python a replay would not run")
        with autograd.autocast(enabled=False):
            return method(self, *arguments, **options)

    return run
