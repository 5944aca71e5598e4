# SPDX-License-Identifier: Apache-2.0
"""Methods that a script's optimizer overrides: a recorded step has a host node for their Python, or breaks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, ItemsView, Iterator
from functools import wraps
from inspect import CO_ASYNC_GENERATOR, CO_COROUTINE, CO_GENERATOR
from typing import Any

from .. import autograd
from ..autograd.parts import BackwardPairs
from ..graph.recorder import break_graph, host
from ..tensor import Tensor
from ..tensor.pytree import leaves, rebuild
from ..users_line import warn

# methods that a script may override: those that every replay runs as host nodes, and those that none can run
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


# methods of a DistOpt that ``optimizer(loss)`` does not call, but steps by hand
OF_STEPS_BY_HAND = (
    "all_reduce",
    "all_reduce_half",
    "fused_all_reduce",
    "fused_all_reduce_half",
    "sparsification",
    "fused_sparsification",
    "update",
    "update_all",
    "update_pairs",
    "apply",
)


def runs_later(function: object) -> bool:
    """Return whether a call of ``function`` makes a generator or a coroutine, and runs nothing yet."""
    code = getattr(function, "__code__", None)
    return code is not None and bool(code.co_flags & (CO_GENERATOR | CO_COROUTINE | CO_ASYNC_GENERATOR))


def updates_in(owner: object) -> set[str]:
    """Return which of ``update_all`` and ``apply`` a class has written, or an optimizer has as attributes."""
    return {"update_all", "apply"} & vars(owner).keys() - {*vars(owner).get("_inherited_methods", ())}


def replaced_methods(optimizer: object) -> dict[str, Any]:
    """Return by name the functions that were set as attributes of an optimizer instead of methods of its class."""
    held = vars(optimizer)
    return {name: held[name] for name in (*ON_HOST, *UNRECORDABLE) if callable(held.get(name))}


def warn_of_overrides(kind: type, base: type) -> None:
    """Warn where ``kind``, a subclass of the DistOpt ``base``, overrides what SINGA's calls call and ours do not."""
    if names := sorted(name for name in OF_STEPS_BY_HAND if getattr(kind, name) is not getattr(base, name)):
        warn(
            f"{kind.__name__} overrides {', '.join(names)}, which steps by hand alone call, not optimizer(loss); write "
            "a dist_option (docs/sync.md), or an optimizer for the DistOpt to wrap"
        )


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
        lent: list[tuple[Tensor, Tensor]] = []
        try:
            arguments, options = _lend((arguments, options), lent)
            with autograd.autocast(enabled=False):
                return method(*arguments, **options)
        finally:
            del arguments, options
            _take_back(lent)

    @wraps(method)
    def run(*arguments: Any, **options: Any) -> Any:
        given = [list(a) if isinstance(a, (Iterator, ItemsView, BackwardPairs)) else a for a in arguments]
        return host(run_in_float32, given, options)

    return run


def _lend(arguments: tuple[list[Any], dict[str, Any]], lent: list[tuple[Tensor, Tensor]]) -> Any:
    """Return a pytree like ``arguments`` with other Tensors on the arrays of gradients; add both to ``lent``.

    A call may keep or change these Tensors: the next step writes the arrays again, and a replay passes the same
    objects each time. A Tensor is a gradient unless it stores one, or the optimizer, the first argument, knows it as a
    parameter, as in a key-value store.
    """
    found = leaves(arguments)
    known = getattr(next(iter(arguments[0]), None), "_slots", {})
    are_params = [tensor.stores_grad or tensor in known for tensor in found]
    if any(are_params):  # else nothing tells which they are
        for number, gradient in enumerate(found):
            if not are_params[number]:
                found[number] = Tensor.wrap(gradient.array, gradient.device)
                vars(found[number]).update(vars(gradient))
                lent.append((gradient, found[number]))
    return rebuild(arguments, iter(found))


def _take_back(lent: list[tuple[Tensor, Tensor]]) -> None:
    """Give gradients what the call has set of them, and Tensors that it keeps memory of their own."""
    while lent:
        gradient, stand_in = lent.pop()
        array = stand_in.array
        is_replaced = array is not gradient.array
        if is_replaced:
            _replace(gradient, array)
        vars(gradient).update(vars(stand_in) | {"array": gradient.array})
        watch = weakref.ref(stand_in)
        del stand_in
        if (kept := watch()) is not None and not is_replaced:
            kept.array = kept.clone().array


def _replace(gradient: Tensor, array: Any) -> None:
    """Write ``array`` where the gradient is, where a replay reads it; the gradient gets it if that cannot be."""
    old = gradient.array
    if array.shape == old.shape and array.dtype == old.dtype and getattr(old.flags, "writeable", True):
        gradient.device.backend.run("copy", array, out=old)
    else:
        gradient.array = array


def unrecordable(method: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a method that runs backward, or is called while kernels are recorded: its Python a replay would not run."""

    @wraps(method)
    def run(self: object, *arguments: Any, **options: Any) -> Any:
        break_graph(f"{type(self).__name__} overrides {method.__name__}, whose Python a replay would not run")
        with autograd.autocast(enabled=False):
            return method(self, *arguments, **options)

    return run
