# SPDX-License-Identifier: Apache-2.0
"""The way to native/kernels: a call goes there first, and to numpy where it is not supported.

Note [supported calls]: a function of the compiled module ``_kernels`` has the name and form of a kernel. It computes
and returns True, or returns False having done nothing: another dtype than float32 (or, for many, bfloat16), a
strided array, a shape it has no code for. So the numpy path is whole, the reference of every kernel, and all there is
where nothing was compiled.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from ..._native import load
from ...config import env, is_on
from ...graph.memory import View
from ...graph.nodes import Host, Kernel, Node
from ...users_line import warn
from ..base import Array, Backend, is_kernel
from ..formulas import UPDATES
from ..layout import choose_formats
from .fuse import fuse, is_compiled_dtype, takes_convolution
from .fuse_rows import LOWERED


class NativeKernels(Backend):
    """Runs what the compiled module supports, in front of a backend that has every kernel."""

    def __init__(self) -> None:
        module, reason = load("_kernels")
        if module is None and sys.platform == "linux":
            warn(f"the compiled kernels are missing, and numpy's are many times slower: {reason}")
        self._supported: dict[str, Callable[..., bool]] = {
            name: getattr(module, name)
            for name in dir(module)
            if is_kernel(type(self), name) or name in LOWERED
        }
        self._release = getattr(module, "release_cached_memory", None)
        self._save_memory = getattr(module, "save_memory", None)
        self._discard_pages = getattr(module, "discard_pages", None)
        self._make_plan = getattr(module, "Plan", None)
        self._conv_formats = getattr(module, "conv_formats", None)  # only with oneDNN
        self._empty = getattr(module, "empty", None)
        self.set_writeable = getattr(module, "set_writeable", None)
        has_choice, winograd = env("SINGA_LITE_WINOGRAD"), is_on("SINGA_LITE_WINOGRAD")
        if has_choice and self._conv_formats is not None:
            module.use_winograd(winograd)  # type: ignore[union-attr]

    def allocate(self, shape: Sequence[int], dtype: Any) -> Array:
        return super().allocate(shape, dtype) if self._empty is None else self._empty(shape, dtype)  # type: ignore[safe-super]

    def execute(
        self,
        kernel: str,
        inputs: tuple[Array, ...],
        out: Array | tuple[Array, ...],
        attributes: dict[str, Any],
    ) -> None:
        run = self._supported.get(kernel)
        if run is None or not run(*inputs, out=out, **attributes):  # see Note [supported calls]
            super().execute(kernel, inputs, out, attributes)

    def release_cached_memory(self) -> None:
        if self._release is not None:
            self._release()

    @contextmanager
    def saving_memory(self, idle: list[Array]) -> Iterator[None]:
        if self._save_memory is None or self._discard_pages is None:
            yield
            return
        for array in idle:
            self._discard_pages(array)
        self._save_memory(True)
        try:
            yield
        finally:
            self._save_memory(False)
            self.release_cached_memory()

    def lower(self, nodes: list[Node]) -> list[Node]:
        return (
            nodes
            if self._conv_formats is None
            else choose_formats(fuse(nodes), self._conv_formats, is_compiled_dtype, takes_convolution)
        )

    def rounds_updates(self, update: Kernel, param: View) -> bool:
        is_update = update.name in UPDATES and param in update.outputs[: len(update.inputs)]
        return self.set_writeable is not None and is_update and is_compiled_dtype(param)

    def compile(self, nodes: list[Node]) -> list[Callable[[], None]]:
        if self._make_plan is None:
            return super().compile(nodes)
        compiled: list[Callable[[], Any]] = []
        for node in nodes:
            last = compiled[-1] if compiled else None
            segment = last if isinstance(last, Segment) else Segment(self._make_plan())
            if type(node) is Host:  # neither a fork nor its join, which run_steps looks for
                compiled.append(partial(node.function, *node.arguments))
            elif not segment.try_add(node, self._supported):
                compiled.append(node)
            elif segment is not last:
                compiled.append(segment)
        return compiled


class Segment:
    """Compiled kernels of a recorded step that follow each other: one call from Python runs them all.

    Attributes:
        nodes: what the plan holds; a kernel that does not support the values it gets is run by the backend instead.
    """

    def __init__(self, plan: Any) -> None:
        self._plan = plan
        self.nodes: list[Kernel] = []

    def try_add(self, node: Node, supported: dict[str, Callable[..., bool]]) -> bool:
        """Add ``node``, if it is a compiled kernel whose attributes never change."""
        if not isinstance(node, Kernel) or node.has_scalars or node.name not in supported:
            return False
        is_added = self._plan.record(supported[node.name], node.inputs, {"out": node.out, **node.attributes})
        if is_added:
            self.nodes.append(node)
        return bool(is_added)

    def __call__(self) -> None:
        done = self._plan.run()
        while done < len(self.nodes):
            self.nodes[done]()
            done = self._plan.run(done + 1)
