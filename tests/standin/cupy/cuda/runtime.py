# SPDX-License-Identifier: Apache-2.0
"""The CUDA runtime of the stand-in."""

from __future__ import annotations

import ctypes
import os
from typing import Any

streamCaptureModeRelaxed = 2


class CUDARuntimeError(RuntimeError):
    pass


def getDeviceCount() -> int:
    return int(os.environ.get("STANDIN_GPUS", "2"))


def getDeviceProperties(device_id: int) -> dict[str, Any]:
    return {
        "name": b"stand-in",
        "major": 9,
        "minor": 0,
        "totalGlobalMem": 4 << 30,
        "multiProcessorCount": 2,
        "warpSize": 32,
    }


def runtimeGetVersion() -> int:
    return 13000


def streamBeginCapture(stream: int, mode: int = streamCaptureModeRelaxed) -> None:
    assert stream and mode == streamCaptureModeRelaxed
    _streams.QUEUES.check(_cuda().standin_begin_capture(ctypes.c_void_p(stream)))


def streamEndCapture(stream: int) -> int:
    graph = _cuda().standin_end_capture(ctypes.c_void_p(stream))
    if not graph:
        raise CUDARuntimeError("a stream that took part in the capture was not joined")
    return int(graph)


def graphInstantiate(graph: int) -> int:
    made = ctypes.c_void_p()
    _cuda().cuGraphInstantiateWithFlags(ctypes.byref(made), ctypes.c_void_p(graph), ctypes.c_ulonglong(0))
    assert made.value
    return made.value


def graphDestroy(graph: int) -> None:
    _cuda().standin_destroy_graph(ctypes.c_void_p(graph))


def graphLaunch(graph_exec: int, stream: int) -> None:
    status = _cuda().standin_launch(ctypes.c_void_p(graph_exec), ctypes.c_void_p(stream))
    _streams.QUEUES.check(status)


def graphExecDestroy(graph_exec: int) -> None:
    _cuda().standin_destroy(ctypes.c_void_p(graph_exec))


def _cuda() -> Any:
    return _streams.QUEUES.cuda


from . import _streams  # noqa: E402 - it raises CUDARuntimeError
