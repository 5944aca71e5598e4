# SPDX-License-Identifier: Apache-2.0
"""Tensor: a typed array on a device. Its checks are in checks.py, functions of several tensors in functions.py.

``a + b``, ``a @ b`` and their kin call OPERATORS, a table that autograd fills, and are differentiable. All else but
what Note [tracked] names works on the values alone and is not recorded. Names and defaults are SINGA's; where they
differ the docstring says so. ``backward``, which is not SINGA's, is reached through the same table.

Note [tracked]: ``reshape``, ``transpose``, ``T`` and ``as_type`` to a float are the recorded operators of autograd in
training where the tensor is a parameter, or was recorded and backward has not gone through it, or gradients would be
lost (SINGA's are never recorded). Else the result is a leaf. ``clone`` and ``copy`` are always leaves.

Note [in place]: in-place forms (``a += b``, the fillers, ``copy_from_numpy``, ``copy_data``) change values that a
forward pass may have kept for its backward. Between the two, leave the tensors of that pass alone. A tensor that an
operator made raises, and so does a backward pass that would read a parameter changed since (autograd/changed.py). A
change of another leaf is not noticed, nor what is written to ``data``: after ``y = x * w; x *= 10`` the gradient of w
is that of the new x.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from ..config import of_face, state, this_thread
from ..device import Device, get_default_device
from ..dtypes import accumulation_dtype, bfloat16, is_float, largest_of
from ..errors import DeviceError, DTypeError, GraphError, OptionError, ShapeError, check_bool, check_number
from ..graph.buffer import note_replaced
from ..graph.changes import note_change
from ..graph.memory import address_of
from ..graph.nodes import Scalar
from ..graph.recorder import bookkeep, break_graph, guard, tell_other_threads, unrecorded
from ..graph.rounded import expose
from .checks import (
    as_axis,
    as_dtype,
    as_index,
    as_numbers,
    as_permutation,
    as_raw,
    as_shape,
    as_slice,
    broadcast_shape,
    convert,
    convert_number,
    float32,
    int32,
    is_number_or_bool,
    listed,
    natural_dtype,
    product,
    resolve_shape,
)
from .tracked import is_recorded_now, warn_if_recorded

__all__ = ["OPERATORS", "Number", "PlaceHolder", "Tensor", "number_array", "to_numpy"]

Number = float | int


# "add", "sub", "mul", "div", "pow", "matmul", "negative", "abs", "slice", "reshape", "transpose", "cast", "backward"
class _Operators(dict[str, Callable[..., Any]]):
    """Functions by name, which autograd puts here when it is imported."""

    def __missing__(self, name: str) -> Callable[..., Any]:
        of_face("autograd")
        if name not in self:
            raise KeyError(name)
        return self[name]


OPERATORS = _Operators()
SINGA_DTYPES = {"float": float32, "int": int32}  # where numpy's are of 64 bits


class Tensor:
    """A typed array on a device, a node of the autograd graph.

    Args:
        shape: sizes of the axes; () is a scalar. Taken from ``data`` when that is given.
        device: where it lives; None is the CPU.
        dtype: float16, bfloat16, float32, float64, int32 or int64. None is float32, or with ``data`` the dtype of
            ``data``, float64 becoming float32 and int64 int32 as in SINGA's ``from_numpy``.
        data: values, copied; None fills with zeros.
        requires_grad: False keeps gradients from flowing into this tensor.
        stores_grad: True makes it a parameter: ``autograd.backward`` yields its gradient.
        creator: the record of the call that made it; None for a leaf. Set by autograd.
        name: what errors, checkpoints and manifests call it.

    Raises:
        DTypeError: a dtype that is not listed, or values it cannot hold (floats may round).
    """

    _grad: Tensor | None = None
    _has_fresh_grad = False
    _is_parameter = False  # whether a layer has it as a parameter, also after its flags were set to False
    _is_old_grad = False  # whether this was the ``grad`` of a parameter that has another one now

    def __init__(
        self,
        shape: Sequence[int] = (),
        device: Device | None = None,
        dtype: Any = None,  # Any: whatever numpy.dtype() takes
        data: Any = None,  # Any: whatever numpy.asarray() takes
        requires_grad: bool = True,
        stores_grad: bool = False,
        creator: Any = None,  # Any: autograd.engine.Node, of a module above
        name: str | None = None,
    ) -> None:
        self.device = _as_device("Tensor", device)
        backend = self.device.backend
        if data is None:
            self.array = backend.zeros(
                as_shape("Tensor", shape), float32 if dtype is None else _held_dtype(dtype, self.device)
            )
        else:
            break_graph("it makes a Tensor from host values, which a replay would not see change")
            values = as_numbers("Tensor", "data", data)
            wanted = _held_dtype(natural_dtype(values.dtype) if dtype is None else dtype, self.device)
            self.array = backend.asarray(convert(values, wanted, "Tensor", rounds=True))
            if state.recorders:
                tell_other_threads("makes a Tensor from host values", (), (self.array,))
        self.requires_grad = requires_grad
        self.stores_grad = stores_grad
        self.creator = creator
        self.creator_output = 0
        self.name = name

    @classmethod
    def wrap(cls, array: Any, device: Device, creator: Any = None, creator_output: int = 0) -> Tensor:
        """Return a Tensor around a raw array of ``device``'s backend, without a copy."""
        tensor = cls.__new__(cls)
        tensor.device, tensor.array = device, array
        tensor.requires_grad, tensor.stores_grad, tensor.name = True, False, None
        tensor.creator, tensor.creator_output = creator, creator_output
        return tensor

    def __reduce_ex__(self, protocol: Any) -> Any:  # Any: as object's
        """Return what Python's copy and pickle make another Tensor of."""
        break_graph(
            "it copies a Tensor with Python's copy or pickle, which a replay would not do; use clone()"
        )
        # pickle may give the memory out, and numpy would make a read-only copy of a read-only array
        expose(self.array)
        return super().__reduce_ex__(protocol)

    # ---- what it is --------------------------------------------------------------------------------

    @property
    def data(self) -> Any:
        """The raw row-major array (numpy.ndarray on the CPU); assigning another such array replaces it.

        What is done with it is not recorded, so a recorded step that reads it runs eagerly. Operators and
        synchronisation schemes give ``array``, the same, to kernels and collectives, which are recorded; Python may
        find it read-only (graph/rounded.py).
        """
        break_graph("it reads Tensor.data, and a replay would not do what is done with that array")
        expose(self.array)
        return self.array

    @data.setter
    def data(self, array: Any) -> None:
        self._begin_replacement("Tensor.data")
        if not isinstance(array, type(self.array)):
            raise DTypeError(
                f"Tensor.data: expected a {type(self.array).__name__} of {self.device}, got {type(array).__name__}"
            )
        if array.dtype != self.array.dtype:
            raise DTypeError(f"Tensor.data: cannot replace {self.dtype} by {array.dtype}")
        if array.shape != self.array.shape:
            raise ShapeError(f"Tensor.data: cannot replace an array of shape {self.shape} by {array.shape}")
        break_graph("it replaces Tensor.data, which a replay would not do")
        expose(array)
        self._replace(as_raw("Tensor.data", array), self.device)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.array.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.array.dtype  # type: ignore[no-any-return]

    def ndim(self) -> int:
        return int(self.array.ndim)

    def size(self) -> int:
        """Number of elements."""
        return int(self.array.size)

    def memsize(self) -> int:
        """Number of bytes."""
        return int(self.array.nbytes)

    def is_dummy(self) -> bool:
        """Return whether it is a leaf: no recorded operator made it."""
        return self.creator is None

    @property
    def is_recorded(self) -> bool:
        """Whether an operator made it and backward can go through that; False for a result of a recorded step."""
        return self.creator is not None and not self.creator.is_replayed

    def is_transpose(self) -> bool:
        """Return False: ``transpose`` copies."""
        return False

    def is_empty(self) -> bool:
        return self.size() == 0

    def __repr__(self) -> str:
        label = f" {self.name!r}" if self.name else ""
        return f"<Tensor{label} {self.dtype}{list(self.shape)} on {self.device}>"

    def __str__(self) -> str:
        """Return values as numpy shows them, dtype, shape and device; what ``print`` shows."""
        values = np.array2string(to_numpy(self), separator=", ", prefix="Tensor(")
        name = f", name={self.name!r}" if self.name else ""
        return f"Tensor({values}, dtype={self.dtype}, shape={self.shape}, device={self.device}{name})"

    def __len__(self) -> int:
        if not self.shape:
            raise ShapeError("len() of a scalar Tensor")
        return self.shape[0]

    def __bool__(self) -> bool:
        if self.size() != 1:
            raise ShapeError(
                f"the truth value of a Tensor of shape {self.shape} is not defined; reduce it first, or write `is not "
                "None` to ask whether there is one"
            )
        if self.stores_grad:  # SINGA's Tensors are always true
            raise DTypeError(
                "the truth value of a parameter is not defined; write `is not None` to ask whether there is one, or "
                "compare it with a number"
            )
        return bool(to_numpy(self).reshape(())[()])

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __format__(self, spec: str) -> str:
        """Return the value of a one-element tensor in the format of a number, as in f"{loss:.3f}"; "" is str()."""
        if not isinstance(spec, str):
            raise OptionError(f"format: expected text, not {type(spec).__name__}")
        if not spec:
            return str(self)
        number = self.item()
        try:
            return format(number, spec)
        except (OverflowError, TypeError, ValueError) as error:
            raise OptionError(f"format: {error}") from None

    def item(self) -> Number:
        """Return the value of a one-element tensor as a Python number."""
        if self.size() != 1:
            index = ", ".join("0" * self.ndim())
            raise ShapeError(
                f"item: shape {self.shape} has {self.size()} elements, not one; choose one, such as x[{index}]"
            )
        return _python_number(to_numpy(self).reshape(()))

    __hash__ = object.__hash__  # by identity: a Tensor can be a dict key, though == compares elements

    # ---- the gradient ------------------------------------------------------------------------------

    def backward(
        self,
        dy: Tensor | Number | None = None,
        communicator_callbacks: Any = None,
        *,
        clear_buffer: bool = False,
    ) -> None:
        """Compute dy * d(self)/d(p) for every parameter p: added to ``p.grad`` if that is fresh, else replacing it.

        Args:
            dy: the gradient to start from: None (1), a number, or a Tensor of this shape, dtype and device.
            communicator_callbacks: an ``autograd.BackwardCallback`` or a list of them, such as
                ``communicators.MultiProcessCommunicator.all_reduce_callback`` gives; None: no callback.
            clear_buffer: accepted, as nnabla has it; what the operators have kept for it is always freed on the way.

        Raises:
            GraphError: this tensor was not recorded, or its record was used up by an earlier backward.
            ShapeError: it has more than one element and dy is None, or dy has another shape.
            DTypeError, DeviceError: dy has another dtype or is on another device.
            OptionError: a callback that is none, or two that change one gradient. Nothing has changed then.
        """
        OPERATORS["backward"](self, dy, communicator_callbacks)

    @property
    def grad(self) -> Tensor | None:
        """The gradient of a parameter, the same Tensor at every step; None for other Tensors.

        A parameter is a leaf with ``stores_grad`` and ``requires_grad``. Its gradient is zero before the first
        ``backward``, and a new Tensor replaces it if the parameter has changed its shape, dtype or device. A forward
        pass that uses its values must take a ``clone()``, since backward changes it.
        """
        if self.creator is not None or not (self.stores_grad and self.requires_grad):
            return None
        grad = self._grad
        if (
            grad is None
            or grad.array.shape != self.array.shape
            or grad.array.dtype != self.array.dtype
            or grad.device is not self.device
        ):
            with unrecorded():
                grad = Tensor(self.shape, self.device, self.dtype, requires_grad=False)
            if self._grad is not None:
                self._grad._is_old_grad = True
            self._grad, self._has_fresh_grad = grad, False
        return grad

    @grad.setter
    def grad(self, grad: Tensor) -> None:
        if grad is not self.grad or grad is None:  # ``p.grad *= 2`` sets it to itself
            raise GraphError(
                "grad stays the same Tensor: use p.grad.copy_data(other) to change it, or p.mark_grad_stale() to have "
                "the next backward replace it"
            )

    @property
    def has_fresh_grad(self) -> bool:
        """Whether ``backward`` has computed ``grad`` since it was last used up: then the next one adds to it."""
        self._guard_grad()
        return self.grad is not None and self._has_fresh_grad

    def mark_grad_stale(self) -> None:
        """Mark ``grad`` as old: the next ``backward`` replaces it; its values stay until then."""
        set_grads_fresh([self], False)

    def _guard_grad(self) -> None:
        """Guard, in a recorded step, whether the gradient is fresh, and where it is."""
        guard((id(self), "grad"), self._grad_key)

    def _grad_key(self) -> tuple[bool, int | None]:
        grad = self.grad
        return self._has_fresh_grad, None if grad is None else address_of(grad.array)

    # ---- copies and moves --------------------------------------------------------------------------

    def copy_from_numpy(self, np_array: Any, offset: int = 0) -> None:
        """Overwrite the values with those of ``np_array`` (same number of elements, any shape).

        Values are converted, never reinterpreted as SINGA does: 1.0 becomes the int32 1. Not between a forward
        pass that used this tensor and its backward, see Note [in place].

        Raises:
            ShapeError: another number of elements, or offset != 0.
            DTypeError: a value this dtype cannot hold exactly (0.5 as int32, a float64 0.1 as float32).
        """
        self.begin_change("copy_from_numpy")
        break_graph("it copies host values into a Tensor, which a replay would not see change")
        values = as_numbers("copy_from_numpy", "np_array", np_array)
        if values.size != self.size() or as_index("copy_from_numpy", "offset", offset):
            raise ShapeError(f"copy_from_numpy: {values.size} values do not fit into shape {self.shape}")
        values = convert(values, self.dtype, "copy_from_numpy").reshape(self.shape)
        self.device.backend.run("copy", self.device.backend.asarray(values), out=self.array)

    def copy_from(self, t: Tensor | np.ndarray) -> None:
        """Overwrite the values with those of a Tensor, as ``copy_data``, or of an array, as ``copy_from_numpy``."""
        if isinstance(t, np.ndarray):
            self.copy_from_numpy(t)
        else:
            self.copy_data(t)

    def copy_data(self, t: Tensor) -> None:
        """Overwrite the values with those of ``t``: same shape and dtype, any device; see Note [in place]."""
        self.begin_change("copy_data")
        check_tensor("copy_data", t)
        if t.dtype != self.dtype:
            raise DTypeError(f"copy_data: {t.dtype} does not fit into {self.dtype}; convert with as_type()")
        if t.shape != self.shape:
            raise ShapeError(f"copy_data: shape {t.shape} does not fit into {self.shape}")
        source = t.array if t.device is self.device else self.device.backend.asarray(to_numpy(t))
        self.device.backend.run("copy", source, out=self.array)

    def clone(self) -> Tensor:
        """Return a leaf with a copy of the values, and the same flags."""
        twin = Tensor.wrap(self.device.backend.empty(self.array.shape, self.array.dtype), self.device)
        self.device.backend.run("copy", self.array, out=twin.array)
        twin.requires_grad, twin.stores_grad, twin.name = self.requires_grad, self.stores_grad, self.name
        return twin

    deepcopy = clone

    def copy(self) -> Tensor:
        """Return a leaf that shares this tensor's memory, as in SINGA; ``clone`` does not."""
        return Tensor.wrap(self.array, self.device)

    def to_device(self, device: Device) -> None:
        """Move the values to ``device``, in place."""
        device = _as_device("to_device", device)
        if device is not self.device:
            _held_dtype(self.dtype, device)
            self._replace(device.backend.asarray(to_numpy(self)), device)

    def to_host(self) -> None:
        """Move the values to the CPU, in place."""
        self.to_device(get_default_device())

    def as_type(self, dtype: Any) -> Tensor:
        """Return the values rounded to ``dtype``, "float" and "int" of 32 bits; see Note [tracked]."""
        wanted = _held_dtype(SINGA_DTYPES.get(dtype, dtype) if isinstance(dtype, str) else dtype, self.device)
        if is_float(wanted) and is_float(self.dtype) and is_recorded_now(self):
            return OPERATORS["cast"](self, wanted)  # type: ignore[no-any-return]
        array = self.device.backend.empty(self.shape, wanted)
        self.device.backend.run("cast", self.array, out=array)
        return Tensor.wrap(array, self.device)

    def to_type(self, dtype: Any) -> Tensor:
        """Round the values to ``dtype``, as ``as_type`` takes it, in place; returns self. GraphError if recorded."""
        self._begin_replacement("to_type")
        self._replace(self.as_type(dtype).array, self.device)
        return self

    def reshape(self, shape: Sequence[int]) -> Tensor:
        """Return another shape of as many elements, which shares the memory; see Note [tracked].

        One size may be -1. ShapeError: another number of elements.
        """
        if is_recorded_now(self):
            return OPERATORS["reshape"](self, shape)  # type: ignore[no-any-return]
        size = resolve_shape(self.shape, shape)
        expose(self.array)  # the view's own flag says whether it is writeable (graph/rounded.py)
        return Tensor.wrap(self.array.reshape(size), self.device)

    def transpose(self, axes: Sequence[int] | None = None) -> Tensor:
        """Return the tensor with permuted axes (None: reversed), copied to row-major order; see Note [tracked].

        ShapeError: ``axes`` is not a permutation.
        """
        if is_recorded_now(self):
            return OPERATORS["transpose"](self, axes)  # type: ignore[no-any-return]
        order = as_permutation(axes, self.ndim())
        array = self.device.backend.empty(tuple(self.shape[axis] for axis in order), self.dtype)
        self.device.backend.run("transpose", self.array, out=array, axes=order)
        return Tensor.wrap(array, self.device)

    def T(self) -> Tensor:
        """Do ``transpose()``."""
        return self.transpose()

    def contiguous(self) -> Tensor:
        """Return the tensor itself: all Tensors are row-major."""
        return self

    def reset_like(self, t: Tensor) -> None:
        """Become zeros of the shape, dtype and device of ``t``; a leaf only."""
        self._begin_replacement("reset_like")
        check_tensor("reset_like", t)
        self._replace(t.device.backend.zeros(t.shape, t.dtype), t.device)

    def _replace(self, array: Any, device: Device) -> None:
        """Replace the array by one on ``device``."""
        if array is not self.array:
            note_replaced(self.array)
        self.array, self.device = array, device

    def repeat(self, repeats: int | Sequence[int], axis: int | None = None) -> Tensor:
        """Return a leaf with each element along ``axis`` repeated, so many times or each its own number of times.

        (..., n, ...) -> (..., sum of repeats, ...); axis None repeats the elements of the flat tensor. A list of one
        number is that number, as in numpy.
        """
        warn_if_recorded("repeat", self)
        source = self.copy().reshape((-1,)) if axis is None else self
        position = as_axis("repeat", 0 if axis is None else axis, source.ndim())
        size, before, after = source.shape[position], source.shape[:position], source.shape[position + 1 :]
        rows, columns = product(before), product(after)
        backend, pieces = self.device.backend, source.array.reshape(rows, size, columns)
        counts = [as_index("repeat", "repeats", count) for count in listed(repeats)]
        counts *= size if len(counts) == 1 else 1
        if len(counts) != size or min(counts, default=0) < 0:
            raise ShapeError(f"repeat: {size} elements need an int >= 0 or {size} of them, got {repeats!r}")
        array = backend.empty(as_shape("repeat", (*before, sum(counts), *after)), self.dtype)
        if len(set(counts)) == 1:
            target = array.reshape(rows, size, counts[0], columns)
            backend.run("broadcast_to", pieces.reshape(rows, size, 1, columns), out=target)
            return Tensor.wrap(array, self.device)
        target, start = array.reshape(rows, sum(counts), columns), 0
        for index, count in enumerate(counts):
            backend.run("broadcast_to", pieces[:, index : index + 1], out=target[:, start : start + count])
            start += count
        return Tensor.wrap(array, self.device)

    def __getitem__(self, keys: Any) -> Tensor:  # Any: an int, a slice, an ellipsis, or a tuple of them
        """A copy of a part, recorded for its gradient: ``t[0]``, ``t[1:3, ::2]``, ``t[..., 0]``.

        As in SINGA an int keeps its axis, with length 1; ``autograd.squeeze`` takes it away. Steps are honoured, which
        SINGA ignores.

        Raises:
            ShapeError: a key is out of range or of another kind.
        """
        given = list(keys) if isinstance(keys, tuple) else [keys]
        ellipses = [index for index, key in enumerate(given) if key is Ellipsis]
        if len(given) - len(ellipses) > self.ndim() or len(ellipses) > 1:
            raise ShapeError(f"{len(given)} keys for a Tensor of shape {self.shape}")
        for index in ellipses:
            given[index : index + 1] = [slice(None)] * (self.ndim() - len(given) + 1)
        bounds = []
        for key, size in zip(given, self.shape, strict=False):
            numbers = range(size)[as_slice(key, size)]
            start, end = (numbers.start, numbers.stop) if numbers else (0, 0)
            bounds.append((start, end if end >= 0 else -size - 1, numbers.step))
        starts, ends, steps = zip(*bounds, strict=True) if bounds else ((), (), ())
        return OPERATORS["slice"](self, starts, ends, None, steps)  # type: ignore[no-any-return]

    def __iter__(self) -> Iterator[Tensor]:
        """Its parts ``t[0]``, ``t[1]``, ..."""
        return (self[number] for number in range(len(self)))

    __array_ufunc__ = None  # numpy_array * tensor calls Tensor.__rmul__ instead of iterating over the tensor

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """What ``numpy.asarray(t)`` gives: a copy; ValueError if there must be none, as numpy asks for."""
        if copy is False:
            raise ValueError("a Tensor gives numpy a copy; use numpy.asarray(t) or tensor.to_numpy(t)")
        values = to_numpy(self)
        try:
            return values if dtype is None else values.astype(dtype)
        except (TypeError, ValueError) as error:
            raise DTypeError(f"{dtype!r} is not a dtype of numbers: {error}") from None

    # ---- rows and columns of a matrix, in place, returning self ---------------------------------------

    def add_row(self, v: Tensor) -> Tensor:
        """Add v (n,) to every row of this (m, n)."""
        return self._with_vector("add", v, 0)

    def add_column(self, v: Tensor) -> Tensor:
        """Add v (m,) to every column of this (m, n)."""
        return self._with_vector("add", v, 1)

    def mult_row(self, v: Tensor) -> Tensor:
        """Multiply every row of this (m, n) by v (n,)."""
        return self._with_vector("mul", v, 0)

    def mult_column(self, v: Tensor) -> Tensor:
        """Multiply every column of this (m, n) by v (m,)."""
        return self._with_vector("mul", v, 1)

    def div_row(self, v: Tensor) -> Tensor:
        """Divide every row of this (m, n) by v (n,)."""
        return self._with_vector("div", v, 0)

    def div_column(self, v: Tensor) -> Tensor:
        """Divide every column of this (m, n) by v (m,)."""
        return self._with_vector("div", v, 1)

    def _with_vector(self, kernel: str, v: Tensor, axis: int) -> Tensor:
        check_vector(kernel, self, v, axis)
        return self._in_place(kernel, v.reshape((-1, 1)) if axis else v)

    # ---- fillers, which return self, or with inplace=False a new tensor like it; see Note [in place]----

    def set_value(self, x: Number, inplace: bool = True) -> Tensor:
        """Set every element to ``x``."""
        value = _python_number(convert_number("set_value", x, self.dtype))
        return self._target("set_value", inplace)._fill("fill", value=value)

    def gaussian(self, mean: float, std: float, inplace: bool = True) -> Tensor:
        """Draw from the normal distribution of the device's random stream; OptionError unless both are finite."""
        mean, std = check_number("gaussian", "mean", mean), check_number("gaussian", "std", std, 0)
        if not self._holds(mean, std):
            raise OptionError(f"gaussian: mean = {mean} and std = {std} must be finite as {self.dtype}")
        return self._target("gaussian", inplace)._draw("random_normal", mean=mean, std=std)

    def uniform(self, low: float, high: float, inplace: bool = True) -> Tensor:
        """Draw uniformly from [low, high), or low where they are equal.

        Raises:
            OptionError: low > high, or one of them or high - low is not finite in this dtype.
        """
        low, high = check_number("uniform", "low", low), check_number("uniform", "high", high)
        if is_float(self.dtype):  # or it is another error
            holds_span = high - low <= largest_of(accumulation_dtype(self.dtype))
            if low > high or not self._holds(low, high) or not holds_span:
                raise OptionError(
                    f"uniform: low = {low} and high = {high} are no range of {self.dtype} numbers"
                )
        return self._target("uniform", inplace)._draw("random_uniform", low=low, high=high)

    def bernoulli(self, p: float, inplace: bool = True) -> Tensor:
        """Draw 1 with probability ``p``, else 0."""
        return self._target("bernoulli", inplace)._draw(
            "random_bernoulli", p=check_number("bernoulli", "p", p, 0, 1)
        )

    def _holds(self, *numbers: float) -> bool:
        """Return whether none of these is beyond the largest number of this dtype; True of one without such."""
        return not is_float(self.dtype) or max(map(abs, numbers)) <= largest_of(self.dtype)

    def _target(self, filler: str, inplace: bool) -> Tensor:
        return self if check_bool(filler, "inplace", inplace) else Tensor(self.shape, self.device, self.dtype)

    def _draw(self, kernel: str, **attributes: float) -> Tensor:
        if not is_float(self.dtype):
            raise DTypeError(f"{kernel}: needs a float tensor, not {self.dtype}")
        seed, counter = self.device.next_random()
        return self._fill(kernel, seed=seed, counter=counter, **attributes)

    def _fill(self, kernel: str, *inputs: Any, **attributes: Any) -> Tensor:
        self.begin_change(kernel)
        self.device.backend.run(kernel, *inputs, out=self.array, **attributes)
        return self

    def begin_change(self, what: str) -> None:
        """Note that this leaf changes in place now; GraphError if an operator made this tensor and recorded it."""
        self._begin_replacement(what)
        self.note_change()

    def _begin_replacement(self, what: str) -> None:
        """Make this tensor a leaf that gets another array; GraphError if an operator made and recorded it."""
        if self.is_recorded:
            raise GraphError(
                f"{what}: changing a recorded tensor in place would falsify its gradients; compute a new one, "
                "change its clone(), or make it under autograd.no_grad()"
            )
        self.creator = None  # that of a recorded step, from which it is a copy

    def note_change(self) -> None:
        """Note that the values change now, see graph/changes.py."""
        note_change(self.array, self.name)

    # ---- norms -------------------------------------------------------------------------------------

    def l1(self) -> float:
        """Mean absolute value, as in SINGA."""
        return float(np.abs(to_numpy(self).astype(np.float64)).sum() / max(self.size(), 1))

    def l2(self) -> float:
        """Euclidean norm divided by the number of elements, as in SINGA."""
        return float(np.linalg.norm(to_numpy(self).astype(np.float64).ravel()) / max(self.size(), 1))

    # ---- arithmetic: recorded -----------------------------------------------------------------------

    def __add__(self, other: Tensor | Number) -> Tensor:
        return OPERATORS["add"](self, other)  # type: ignore[no-any-return]

    def __radd__(self, other: Number) -> Tensor:
        return OPERATORS["add"](other, self)  # type: ignore[no-any-return]

    def __sub__(self, other: Tensor | Number) -> Tensor:
        return OPERATORS["sub"](self, other)  # type: ignore[no-any-return]

    def __rsub__(self, other: Number) -> Tensor:
        return OPERATORS["sub"](other, self)  # type: ignore[no-any-return]

    def __mul__(self, other: Tensor | Number) -> Tensor:
        return OPERATORS["mul"](self, other)  # type: ignore[no-any-return]

    def __rmul__(self, other: Number) -> Tensor:
        return OPERATORS["mul"](other, self)  # type: ignore[no-any-return]

    def __truediv__(self, other: Tensor | Number) -> Tensor:
        return OPERATORS["div"](self, other)  # type: ignore[no-any-return]

    def __rtruediv__(self, other: Number) -> Tensor:
        return OPERATORS["div"](other, self)  # type: ignore[no-any-return]

    def __floordiv__(self, other: Tensor | Number) -> Tensor:
        """floor(self / other), a leaf (SINGA's is the true quotient); an integer // 0 is 0. GraphError if recorded."""
        if self.creator is not None or (isinstance(other, Tensor) and other.creator is not None):
            raise GraphError("a // b is not recorded and would lose the gradient; use clone()")
        a, b = _widened(self, other, "//")
        operand = _operand(a, b, "//")
        array = a.device.backend.empty(broadcast_shape("//", a.shape, operand.shape), a.dtype)
        a.device.backend.run("floor_div", a.array, operand, out=array)
        return Tensor.wrap(array, a.device)

    def __pow__(self, other: Tensor | Number) -> Tensor:
        return OPERATORS["pow"](self, other)  # type: ignore[no-any-return]

    def __rpow__(self, other: Number) -> Tensor:
        return OPERATORS["pow"](other, self)  # type: ignore[no-any-return]

    def __matmul__(self, other: Tensor) -> Tensor:
        return OPERATORS["matmul"](self, other)  # type: ignore[no-any-return]

    def __neg__(self) -> Tensor:
        return OPERATORS["negative"](self)  # type: ignore[no-any-return]

    def __abs__(self) -> Tensor:
        return OPERATORS["abs"](self)  # type: ignore[no-any-return]

    # ---- in-place arithmetic: not recorded, see Note [in place] ---------------------------------------

    def __iadd__(self, other: Tensor | Number) -> Tensor:
        return self._in_place("add", other)

    def __isub__(self, other: Tensor | Number) -> Tensor:
        return self._in_place("sub", other)

    def __imul__(self, other: Tensor | Number) -> Tensor:
        return self._in_place("mul", other)

    def __itruediv__(self, other: Tensor | Number) -> Tensor:
        return self._in_place("div", other)

    def _in_place(self, kernel: str, other: Tensor | Number) -> Tensor:
        operand = _operand(self, other, kernel)
        if kernel == "div" and not is_float(self.dtype):
            raise DTypeError(f"in-place division of {self.dtype}: convert with as_type(float32) first")
        if broadcast_shape(f"in-place {kernel}", self.shape, operand.shape) != self.shape:
            raise ShapeError(f"in-place {kernel}: shape {operand.shape} does not broadcast to {self.shape}")
        if operand is not self.array and self.device.backend.may_share_memory(self.array, operand):
            # a part of it would be written before it is read
            operand = Tensor.wrap(operand, self.device).clone().array
        return self._fill(kernel, self.array, operand)

    # ---- comparison: element-wise, 1 or 0 in float32 -------------------------------------------------

    def __lt__(self, other: Tensor | Number) -> Tensor:
        return compare(self, other, "less")

    def __le__(self, other: Tensor | Number) -> Tensor:
        return compare(self, other, "less_equal")

    def __gt__(self, other: Tensor | Number) -> Tensor:
        return compare(self, other, "greater")

    def __ge__(self, other: Tensor | Number) -> Tensor:
        return compare(self, other, "greater_equal")

    def __eq__(self, other: object) -> Any:  # Any: element-wise for tensors and numbers, else False
        if not isinstance(other, (Tensor, Scalar)) and not is_number_or_bool(other):
            return False
        return compare(self, other, "equal")  # type: ignore[arg-type]

    def __ne__(self, other: object) -> Any:  # Any: element-wise for tensors and numbers, else True
        is_equal = self == other
        return compare(is_equal, 0, "equal") if isinstance(is_equal, Tensor) else not is_equal


def set_grads_fresh(params: Sequence[Tensor], is_fresh: bool) -> None:
    """Mark the gradients of ``params`` as fresh: the next ``backward`` adds to them; with False it replaces them."""

    def mark_grads() -> None:
        for param in params:
            param._has_fresh_grad = is_fresh

    for param in params:
        param._guard_grad()
    bookkeep(mark_grads)


PlaceHolder = Tensor  # SINGA's name for an input of Model.compile


def to_numpy(t: Tensor | np.ndarray) -> np.ndarray:
    """Return a numpy copy of the values; of a numpy array too, such as ``Model.load_states`` gives."""
    if isinstance(t, np.ndarray):
        return t.copy()
    check_tensor("to_numpy", t)
    array: np.ndarray = t.device.backend.to_numpy(t.array)
    return array


def number_array(where: str, value: object, like: Tensor) -> Any:
    """Return a raw scalar of ``like``'s dtype and backend; DTypeError for what is not a number or does not fit."""
    try:
        if isinstance(value, Scalar):
            return _read_again(where, value, like.device, like.dtype)
        return like.device.backend.asarray(convert_number(where, value, like.dtype))
    except AttributeError:
        check_tensor(where, like)
        raise


def check_tensor(where: str, t: object) -> None:
    """Raise DTypeError unless ``t`` is a Tensor."""
    if not isinstance(t, Tensor):
        raise DTypeError(f"{where}: expected a Tensor, got {type(t).__name__}; wrap it with from_numpy")


def check_parameter(where: str, param: object) -> None:
    """Raise DTypeError unless ``param`` is a Tensor that gets a gradient in ``Tensor.grad``."""
    if not isinstance(param, Tensor) or param.grad is None:
        what = "a parameter, a Tensor with stores_grad=True and requires_grad=True"
        raise DTypeError(f"{where}: expected {what}, got {param!r}; leave out what is not trained")


def check_vector(where: str, matrix: Tensor, v: object, axis: int) -> None:
    """Raise unless ``v`` is a row (axis 0) or a column (axis 1) of ``matrix``, of its dtype and device."""
    what = "column" if axis else "row"
    check_tensor(f"{where}_{what}", v)
    assert isinstance(v, Tensor)
    if matrix.ndim() != 2 or v.shape != (matrix.shape[1 - axis],):
        raise ShapeError(f"{where}_{what}: {v.shape} is not a {what} of a matrix {matrix.shape}")
    _operand(matrix, v, f"{where}_{what}")


def check_alike(where: str, a: Tensor, b: Tensor) -> None:
    """Raise unless both are on one device and of one dtype."""
    if a.device is not b.device:
        raise DeviceError(f"{where}: tensors are on {a.device} and {b.device}; use to_device()")
    if a.dtype != b.dtype:
        raise DTypeError(f"{where}: dtypes are {a.dtype} and {b.dtype}; convert one with as_type()")


def _as_device(where: str, device: object) -> Device:
    """``device``, None being the CPU; DeviceError for anything else."""
    if device is not None and not isinstance(device, Device):
        raise DeviceError(
            f"{where}: {device!r} is not a Device; make one with device.create_device() or get_default_device()"
        )
    return device or get_default_device()


def _held_dtype(dtype: Any, device: Device) -> np.dtype[Any]:
    """Return ``dtype`` as one a Tensor of ``device`` can have, else DTypeError."""
    wanted = as_dtype(dtype)
    if wanted == bfloat16 and (reason := device.backend.missing_precisions.get("bf16")):
        raise DTypeError(f"{device} has no kernels for bfloat16: {reason}")
    return wanted


def _python_number(array: np.ndarray) -> Number:
    """Return the one value of a numpy array as a Python number, which a scalar of bfloat16 is not."""
    value: Number = float(array) if array.dtype == bfloat16 else array.item()
    return value


def _operand(tensor: Tensor, other: Tensor | Number, where: str) -> Any:
    """The raw array of ``other``; a number becomes one of ``tensor``'s dtype, or of float32 beside 16 bits."""
    if isinstance(other, Scalar):
        return _read_again(where, other, tensor.device, accumulation_dtype(tensor.dtype))
    if not isinstance(other, Tensor):
        value = convert_number(where, other, accumulation_dtype(tensor.dtype))
        return tensor.device.backend.asarray(value)
    check_alike(where, tensor, other)
    return other.array


def _read_again(where: str, number: Scalar, device: Device, dtype: np.dtype[Any]) -> Any:
    """Return a raw scalar that every replay fills again; GraphError but for float32 and float64."""
    if dtype.char not in "fd":
        convert_number(where, number, dtype)
    array = device.backend.empty((), dtype)
    device.backend.run("fill", out=array, value=number)
    return array


def _widened(tensor: Tensor, other: Tensor | Number, where: str) -> tuple[Tensor, Tensor | Number]:
    """Return both; of two Tensors that differ in dtype in float32, where autocast has them so (its rule "widest")."""
    if this_thread.autocast is None or not isinstance(other, Tensor) or tensor.dtype == other.dtype:
        return tensor, other
    return this_thread.autocast.widen(where, (tensor, other))  # type: ignore[no-any-return]


def compare(tensor: Tensor, other: Tensor | Number, relation: str) -> Tensor:
    """Return 1 where the relation holds, else 0: a float32 leaf of the broadcast shape."""
    tensor, other = _widened(tensor, other, relation)
    operand = _operand(tensor, other, relation)
    shape = broadcast_shape(relation, tensor.shape, operand.shape)
    result = tensor.device.backend.empty(shape, float32)
    array = tensor.array if tensor.dtype == operand.dtype else tensor.as_type(float32).array
    tensor.device.backend.run("compare", array, operand, out=result, relation=relation)
    return Tensor.wrap(result, tensor.device)
