# SPDX-License-Identifier: Apache-2.0
"""SINGA's collectives on Tensors and raw arrays, which DistOpt offers to scripts that send by hand.

All leave the SUM over the ranks in place and have ended when they return; on CUDA the current stream comes after them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..backend.base import Backend
from ..comm.base import Communicator, is_cuda_array
from ..device import create_cuda_gpu_on, get_default_device
from ..errors import DeviceError, DTypeError, ShapeError
from ..graph.recorder import persist
from ..tensor import Tensor
from .fp16 import HalfMessage
from .sparse import SparseMessage
from .sparse_threshold import check_magnitude, count_selected, send_selected
from .sparse_top_k import check_share, send_top_k

RawOrTensor = Any  # a Tensor, or a raw array such as ``tensor.data``


class ArrayCollectives:
    """The calls, over ``communicator``. ``_before_sum`` is called before each."""

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator
        self._fused: dict[str, list[Any]] = {"sum": [], "half": []}  # put aside until the next send

    def _before_sum(self) -> None:
        """Do what every rank must do before it sends values by hand."""

    def all_reduce(self, tensor: RawOrTensor) -> None:
        """Replace the values by their sum over the ranks."""
        array = _raw(tensor)
        self._before_sum()
        if isinstance(tensor, Tensor):  # a raw array is the stream's that is current
            tensor.device.backend.activate()
        self.communicator.all_reduce(array, "sum").wait()

    def fused_all_reduce(self, tensor: Sequence[RawOrTensor], send: bool = True) -> None:
        """Sum several arrays as one message; ``send=False`` puts them aside for the next call that sends."""
        flat, arrays, backend = self._fuse("sum", tensor, send)
        if flat is not None:
            self._before_sum()
            self.communicator.all_reduce(flat, "sum").wait()
            backend.run("unpack", flat, out=tuple(arrays))

    def all_reduce_half(self, tensor: RawOrTensor) -> None:
        """Do ``all_reduce`` through float16 (sync/fp16.py, Note [half scale])."""
        self._all_reduce_half(_raw(tensor), _backend(tensor))

    def _all_reduce_half(self, array: Any, backend: Backend) -> None:
        self._before_sum()
        message = HalfMessage(self.communicator, backend, array, "all_reduce_half")
        message.measure().wait()
        message.send("sum").wait()

    def fused_all_reduce_half(self, tensor: Sequence[RawOrTensor], send: bool = True) -> None:
        """Do ``fused_all_reduce`` through float16."""
        flat, arrays, backend = self._fuse("half", tensor, send)
        if flat is not None:
            self._all_reduce_half(flat, backend)
            backend.run("unpack", flat, out=tuple(arrays))

    def sparsification(
        self, tensor: RawOrTensor, accumulation: RawOrTensor | None, spars: float, topK: bool
    ) -> None:
        """Replace the values by the sum of what all ranks select.

        Args:
            tensor: float array.
            accumulation: residual, added first and then overwritten by what was not sent; None drops it.
            spars: share of elements with ``topK``, else least magnitude.
            topK: select by share.
        """
        residual = None if accumulation is None else _raw(accumulation)
        self._sparsify(_raw(tensor), residual, _backend(tensor), spars, topK)

    def fused_sparsification(
        self, tensor: Sequence[RawOrTensor], accumulation: RawOrTensor | None, spars: float, topK: bool
    ) -> None:
        """Do ``sparsification`` over several arrays as one; ``accumulation`` has all their elements."""
        flat, arrays, backend = _pack([(_raw(part), _backend(part)) for part in tensor])
        if flat is not None:
            residual = None if accumulation is None else _raw(accumulation)
            self._sparsify(flat, residual, backend, spars, topK)
            backend.run("unpack", flat, out=tuple(arrays))

    def _sparsify(self, array: Any, residual: Any, backend: Backend, spars: float, topK: bool) -> None:
        (check_share if topK else check_magnitude)(spars)
        flat = array.reshape(-1)
        residual = None if residual is None else residual.reshape(-1)
        if residual is not None and (residual.shape, residual.dtype) != (flat.shape, flat.dtype):
            raise ShapeError(
                f"sparsification: accumulation is {residual.dtype}[{residual.size}], "
                f"the values {flat.dtype}[{flat.size}]"
            )
        self._before_sum()
        if residual is not None:
            backend.run("add", flat, residual, out=flat)
        message = SparseMessage(self.communicator, backend, flat, residual, "sparsification")
        if topK:
            send_top_k(message, spars)
        else:
            gather = self.communicator.all_gather(count_selected(message, spars), name=message.name)
            send_selected(message, spars, backend.to_numpy(gather.wait()).ravel().tolist())
        message.merge(1.0)

    def wait(self) -> None:
        """Kept for SINGA scripts: the calls above have ended when they return."""

    def _fuse(self, kind: str, tensors: Sequence[RawOrTensor], send: bool) -> tuple[Any, list[Any], Any]:
        """The arrays put aside and given, each once, as ``_pack`` gives them; (None, [], None) while not sending."""
        kept = self._fused[kind]
        for tensor in tensors:
            array = _raw(tensor)
            if not any(array is known for known, _ in kept):
                kept.append((array, _backend(tensor)))
        if not send:
            return None, [], None
        self._fused[kind] = []
        return _pack(kept)


def _raw(tensor: RawOrTensor) -> Any:
    """The raw array of a Tensor or array, which the caller can change in place as one piece of memory."""
    array = tensor.array if isinstance(tensor, Tensor) else tensor
    if isinstance(tensor, Tensor):
        persist(array)
    if not isinstance(array, np.ndarray) and not is_cuda_array(array):
        raise DTypeError(f"DistOpt: expected a Tensor, a numpy or a CUDA array, got {type(tensor).__name__}")
    if not array.flags.c_contiguous or not getattr(array.flags, "writeable", True):
        raise ShapeError(
            f"DistOpt: an array of shape {array.shape} is not contiguous or read-only; pass a copy"
        )
    return array


def _backend(tensor: RawOrTensor) -> Backend:
    """The backend of the device that a Tensor or raw array lives on."""
    if isinstance(tensor, Tensor):
        return tensor.device.backend
    return (create_cuda_gpu_on(tensor.device.id) if is_cuda_array(tensor) else get_default_device()).backend


def _pack(kept: list[tuple[Any, Backend]]) -> tuple[Any, list[Any], Any]:
    """Arrays of one dtype end to end as one flat array, they, and their backend; (None, [], None) of none."""
    if not kept:
        return None, [], None
    arrays, backend = [array for array, _ in kept], kept[0][1]
    if len({array.dtype for array in arrays}) > 1:
        raise DTypeError(f"DistOpt: one message cannot hold {sorted({str(array.dtype) for array in arrays})}")
    if any(other is not backend for _, other in kept):
        raise DeviceError("DistOpt: one message cannot hold arrays of several devices")
    flat = backend.empty((sum(array.size for array in arrays),), arrays[0].dtype)
    backend.run("pack", *arrays, out=flat)
    return flat, arrays, backend
