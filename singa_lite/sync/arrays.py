# SPDX-License-Identifier: Apache-2.0
"""Arrays that a script hands to a collective: Tensors, numpy and CUDA arrays, mixed, in lists.

What lives here: checking them before anything is sent, and sending many as few messages. What does not: which
collective it is (communicators.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from ..backend.base import Backend
from ..comm.base import is_cuda_array
from ..comm.work import Work
from ..device import create_cuda_gpu_on, get_default_device
from ..dtypes import is_narrow
from ..errors import DeviceError, DTypeError, OptionError, ShapeError, check_bool
from ..graph.memory import address_of
from ..graph.recorder import persist
from ..graph.rounded import note_written
from ..tensor import Tensor
from ..tensor.checks import as_plain

RawOrTensor = Any  # a Tensor, or a raw array such as ``tensor.data``
RawOrTensors = RawOrTensor | Iterable[RawOrTensor]


class GivenArray(NamedTuple):
    """An array that a caller gave, and the Tensor around it: the caller's, or a new one."""

    array: Any
    tensor: Tensor

    @classmethod
    def of(cls, where: str, value: RawOrTensor, writes: bool = True) -> GivenArray:
        """Return ``value`` with its Tensor; raises unless it is contiguous and, with ``writes``, can be changed."""
        given = cls.around(where, value, writes)
        if writes:
            given.tensor.begin_change(where)
        return given

    @classmethod
    def around(cls, where: str, value: RawOrTensor, writes: bool = True) -> GivenArray:
        """Return ``value`` as ``of`` does, also a Tensor that a backward pass still needs."""
        array = value.array if isinstance(value, Tensor) else value
        if isinstance(value, Tensor):
            persist(array)
        if not isinstance(array, np.ndarray) and not is_cuda_array(array):
            raise DTypeError(
                f"{where}: expected a Tensor, a numpy or a CUDA array, got {type(value).__name__}"
            )
        array = as_plain(where, array)
        if writes:
            note_written(array)
        if not array.flags.c_contiguous or (writes and not getattr(array.flags, "writeable", True)):
            raise ShapeError(
                f"{where}: an array of shape {array.shape} is not contiguous or read-only; pass a copy"
            )
        if isinstance(value, Tensor):
            if writes:
                value.note_change()
            return cls(array, value)
        device = create_cuda_gpu_on(value.device.id) if is_cuda_array(value) else get_default_device()
        return cls(array, Tensor.wrap(array, device))

    @property
    def backend(self) -> Backend:
        """The backend of the device that it lives on."""
        return self.tensor.device.backend


def as_list(data: RawOrTensors) -> list[RawOrTensor]:
    """Return the arrays of a list or other iterable; one array as a list of itself."""
    is_one = hasattr(data, "dtype") or not isinstance(data, Iterable)
    return [data] if is_one else list(data)


def given_arrays(where: str, data: RawOrTensors, division: bool = False) -> list[GivenArray]:
    """Return the arrays given, each once, empty ones all; a typed error unless all can be changed in place."""
    found: dict[Any, GivenArray] = {}
    for number, value in enumerate(as_list(data)):
        given = GivenArray.of(where, value)
        # an empty array may have the address of another one, and on another rank not
        where_it_is = address_of(given.array) if given.array.nbytes else ("empty", number)
        found.setdefault((where_it_is, given.array.nbytes, given.array.dtype), given)
    arrays = list(found.values())
    check_apart(where, arrays)
    check_division(where, arrays, division)
    return arrays


def one_a_rank(
    where: str, values: Sequence[RawOrTensor], like: GivenArray, size: int, writes: bool = True
) -> list[GivenArray]:
    """Return the arrays of a list that has one for each rank, all like the one given."""
    if not isinstance(values, (list, tuple)) or len(values) != size:
        number = len(values) if isinstance(values, (list, tuple)) else type(values).__name__
        raise OptionError(
            f"{where}: ndarray_list must be a list of {size} arrays, one a rank of the group, not {number}"
        )
    found = [GivenArray.of(where, value, writes) for value in values]
    for number, other in enumerate(found):
        if other.array.size != like.array.size or other.array.dtype != like.array.dtype:
            raise ShapeError(
                f"{where}: ndarray_list[{number}] is {other.array.dtype}{other.array.shape} but ndarray "
                f"{like.array.dtype}{like.array.shape}; they must have one size and dtype"
            )
        if other.tensor.device is not like.tensor.device:
            raise DeviceError(
                f"{where}: ndarray_list[{number}] is on {other.tensor.device} but ndarray on {like.tensor.device}"
            )
    if writes:
        check_apart(where, found)
    return found


def change_arrays(start: Callable[..., Work], name: str, given: list[GivenArray], inplace: bool) -> None:
    """Run a collective that changes arrays: one by one ``inplace``, else those of a device and dtype as one message.

    Args:
        start: starts it on the arrays to send, under a ``name`` that must be equal on all ranks.
        name: of the collective; the lengths of several arrays are added, as messages do not say which arrays they are.
    """
    check_bool(name, "inplace", inplace)
    for backend in {each.backend for each in given}:
        backend.activate()
    if len(given) != 1:
        name += f" of {', '.join(str(each.array.size) for each in given) or 0} elements"
    if inplace or not given:  # an empty message compares the names
        start([each.array for each in given] or [np.empty(0, np.float32)], name=name).wait()
        return
    alike: dict[tuple[Backend, Any], list[Any]] = {}
    for each in given:
        alike.setdefault((each.backend, each.array.dtype), []).append(each.array)
    messages = [_packed(backend, arrays) for (backend, _), arrays in alike.items()]
    start(messages, name=name).wait()
    for (backend, _), arrays, message in zip(alike, alike.values(), messages, strict=True):
        if message is not arrays[0]:
            backend.run("unpack", message, out=tuple(arrays))


def _packed(backend: Backend, arrays: list[Any]) -> Any:
    """Return arrays of one dtype end to end; one that is alone as it is."""
    if len(arrays) == 1:
        return arrays[0]
    flat = backend.empty((sum(array.size for array in arrays),), arrays[0].dtype)
    backend.run("pack", *arrays, out=flat)
    return flat


def check_apart(where: str, given: list[GivenArray]) -> None:
    """Raise ShapeError if two arrays that are written overlap."""
    starts = [(address_of(each.array), each.array.nbytes) for each in given if each.array.nbytes]
    if any(start + num_bytes > later for (start, num_bytes), (later, _) in pairwise(sorted(starts))):
        raise ShapeError(f"{where}: two of the arrays overlap in memory; pass copies")


def check_division(where: str, given: list[GivenArray], division: bool) -> None:
    """Raise DTypeError for integers whose mean is asked for."""
    for each in given:
        if division and each.array.dtype.kind != "f":
            raise DTypeError(f"{where}: division=True needs floats, and an array is {each.array.dtype}")


def add_up(total: Tensor, others: Sequence[Tensor]) -> None:
    """Add ``others`` to ``total``, all of one shape and dtype; several of 16 bits in float32, rounded once."""
    if len(others) > 1 and is_narrow(total.dtype):
        wide = total.as_type("float32")
        add_up(wide, [other.as_type("float32") for other in others])
        total.copy_data(wide.as_type(total.dtype))
        return
    for other in others:
        total += other
