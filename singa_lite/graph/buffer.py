# SPDX-License-Identifier: Apache-2.0
"""Record and replay by hand: EnableGraph, RunGraph and ResetGraph of a Device (SINGA's names).

What lives here: keeping the arrays of the tape where the script can see them, and replaying it. What does not: records
of a model's training step, which check their inputs and need no such calls (record/).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from ..config import state, this_thread
from ..errors import GraphError
from .arena import share_memory
from .nodes import Collective, run_steps
from .recorder import Recorder, switch_recorder
from .rounded import use_copies

CURE = "; Model.compile(use_graph=True) runs such steps eagerly, or records them again, by itself"


class GraphBuffer:
    """The record of one device between ``start`` and ``stop``.

    Kernels run at once while they are recorded. All arrays that the script still holds at ``stop``, such as inputs,
    parameters and a loss, stay where they are: a replay reads their new values and writes them.

    Args:
        backend: of the device (backend.base.Backend, of a higher level).
    """

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._recorder: Recorder | None = None
        self._owner: threading.Thread | None = None  # which records
        self.reset()

    @property
    def is_recording(self) -> bool:
        """Whether a thread records; one that has ended without ``stop`` does not."""
        if self._owner is not None and not self._owner.is_alive():
            state.recorders.discard(self._recorder)
            self._owner = self._recorder = None
        return self._recorder is not None

    def reset(self) -> None:
        """Forget what was recorded."""
        self._tape: Recorder | None = None
        state.graph_buffers.discard(self)
        self._steps: list[Callable[[], None]] = []

    def start(self) -> None:
        """Record what this thread computes from now on, instead of what was recorded before."""
        if self.is_recording:
            if this_thread.recorder is not self._recorder:
                raise GraphError("EnableGraph: another thread records; call EnableGraph(False) there first")
            return
        if this_thread.recorder is not None:
            raise GraphError("EnableGraph: this thread records a step already; leave use_graph=True out")
        self.reset()
        self._recorder, self._owner = Recorder(_tensors_in), threading.current_thread()
        switch_recorder(None, self._recorder)
        state.graph_buffers.add(self)

    def stop(self) -> None:
        """End recording."""
        if not self.is_recording:
            return
        if this_thread.recorder is not self._recorder:
            raise GraphError(
                "EnableGraph: call EnableGraph(False) in the thread that called EnableGraph(True)"
            )
        tape, self._recorder, self._owner = self._recorder, None, None
        assert tape is not None  # for mypy: it records
        switch_recorder(tape, None)
        tape.finish()
        tape.keep_alive_arrays()
        self._tape = tape
        if tape.break_reason is None:
            nodes = self._backend.lower(tape.nodes)
            array_of, _ = share_memory(nodes, [], lambda size: self._backend.empty((size,), "uint8"))
            nodes = [node.mapped(array_of) for node in nodes]
            waits = [node.communicator.wait_all for node in nodes if isinstance(node, Collective)]
            self._steps = [*waits, *self._backend.compile(nodes)]

    def run(self) -> None:
        """Run what was recorded once more.

        Raises:
            GraphError: nothing was recorded, recording goes on, or a replay would not do what the script did.
        """
        if self.is_recording:
            raise GraphError("RunGraph: call EnableGraph(False) first")
        if self._tape is None:
            raise GraphError(
                "RunGraph: nothing was recorded; compute between EnableGraph(True) and EnableGraph(False)"
            )
        if self._tape.break_reason is not None:
            raise GraphError(f"RunGraph: it cannot be replayed: {self._tape.break_reason}{CURE}")
        if any(function() != value for function, value in self._tape.guards.values()):
            raise GraphError(f"RunGraph: the script would compute something else now; record it again{CURE}")
        use_copies(None)  # of parameters that these steps may write
        run_steps(self._steps)

    def note_replaced(self, array: Any) -> None:
        """Break the graph if it uses ``array``."""
        tape = self._recorder or self._tape
        if tape is not None and tape.view(array) is not None:
            tape.break_graph(
                "a tensor of it has another array since, by data =, to_type, reset_like or to_device, where copy_data "
                "and copy_from_numpy change the values of the one it has"
            )


def note_replaced(array: Any) -> None:
    """Note that a Tensor gets another array instead of ``array``, which replays would go on using."""
    for buffer in list(state.graph_buffers):
        buffer.note_replaced(array)


def _tensors_in(value: Any) -> list[Any]:
    """Return the Tensors (of a higher level) in nested lists, tuples and dicts."""
    if isinstance(value, dict):
        return _tensors_in(list(value.values()))
    if isinstance(value, (list, tuple)):
        return [tensor for entry in value for tensor in _tensors_in(entry)]
    return [value] if hasattr(value, "array") and hasattr(value, "creator") else []
