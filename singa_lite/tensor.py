# SPDX-License-Identifier: Apache-2.0
"""Tensor, and the raw functions on it: nothing here is recorded for backward.

``a + b``, ``a @ b`` and their kin call OPERATORS, a table that autograd fills, and are differentiable. In-place
forms (``a += b``), fillers and comparisons work on the values alone. Names and defaults are SINGA's; where
they differ the docstring says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .config import state
from .device import Device, get_default_device
from .errors import DeviceError, DTypeError, GraphError, ShapeError
from .graph import refuse

float16 = np.dtype("float16")
float32 = np.dtype("float32")
float64 = np.dtype("float64")
int32 = np.dtype("int32")
int64 = np.dtype("int64")
DTYPES = (float16, float32, float64, int32, int64)
Number = float | int
OPERATORS: dict[str, Callable[..., Any]] = {}  # "add", "sub", "mul", "div", "pow", "matmul", "negative"


class Tensor:
    """A typed array on a device, a node of the autograd graph.

    Args:
        shape: sizes of the axes; () is a scalar. Taken from ``data`` when that is given.
        device: where it lives; None is the CPU.
        dtype: float16, float32, float64, int32 or int64. None is float32, or with ``data`` the dtype of
            ``data``, float64 becoming float32 and int64 int32 as in SINGA's ``from_numpy``.
        data: values, copied; None fills with zeros.
        requires_grad: False keeps gradients from flowing into this tensor.
        stores_grad: True makes it a parameter: ``autograd.backward`` yields its gradient.
        creator: the record of the call that made it; None for a leaf. Set by autograd.
        name: what errors, checkpoints and manifests call it.

    Raises:
        DTypeError: a dtype that is not listed, or values it cannot hold (floats may round).
    """

    def __init__(
        self,
        shape: Sequence[int] = (),
        device: Device | None = None,
        dtype: Any = None,  # Any: whatever numpy.dtype() takes
        data: Any = None,  # Any: whatever numpy.asarray() takes
        requires_grad: bool = True,
        stores_grad: bool = False,
        creator: Any = None,  # Any: autograd.engine.Node, of a higher floor
        name: str | None = None,
    ) -> None:
        self.device = device or get_default_device()
        backend = self.device.backend
        if data is None:
            self._data = backend.zeros(_as_shape(shape), as_dtype(dtype or float32))
            if state.recorder is not None:  # a replay finds what the last step left there
                backend.run("fill", out=self._data, value=0.0)
        else:
            refuse("it makes a Tensor from host values, which a replay would not see change")
            values = np.asarray(data)
            wanted = as_dtype(dtype) if dtype is not None else _natural_dtype(values.dtype)
            self._data = backend.asarray(_convert(values, wanted, "Tensor", rounds=True))
        self.requires_grad = requires_grad
        self.stores_grad = stores_grad
        self.creator = creator
        self.creator_output = 0
        self.name = name

    @classmethod
    def wrap(cls, array: Any, device: Device, creator: Any = None, creator_output: int = 0) -> Tensor:
        """A Tensor around a raw array of ``device``'s backend, without a copy."""
        tensor = cls.__new__(cls)
        tensor.device, tensor._data = device, array
        tensor.requires_grad, tensor.stores_grad, tensor.name = True, False, None
        tensor.creator, tensor.creator_output = creator, creator_output
        return tensor

    # ---- what it is --------------------------------------------------------------------------------

    @property
    def data(self) -> Any:
        """The raw row-major array (numpy.ndarray on the CPU); assigning replaces it."""
        return self._data

    @data.setter
    def data(self, array: Any) -> None:
        if array.shape != self._data.shape or array.dtype != self._data.dtype:
            raise ShapeError(
                f"Tensor.data: cannot replace {self.dtype}{self.shape} by {array.dtype}{array.shape}"
            )
        self._data = array

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._data.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        return self._data.dtype  # type: ignore[no-any-return]

    def ndim(self) -> int:
        return int(self._data.ndim)

    def size(self) -> int:
        """Number of elements."""
        return int(self._data.size)

    def memsize(self) -> int:
        """Number of bytes."""
        return int(self._data.nbytes)

    def is_empty(self) -> bool:
        return self.size() == 0

    def __repr__(self) -> str:
        label = f" {self.name!r}" if self.name else ""
        return f"<Tensor{label} {self.dtype}{list(self.shape)} on {self.device}>"

    def __len__(self) -> int:
        if not self.shape:
            raise ShapeError("len() of a scalar Tensor")
        return self.shape[0]

    def __bool__(self) -> bool:
        if self.size() != 1:
            raise ShapeError(
                f"the truth value of a Tensor of shape {self.shape} is not defined; reduce it first"
            )
        return bool(to_numpy(self).reshape(())[()])

    def __float__(self) -> float:
        return float(self.item())

    def item(self) -> Number:
        """The value of a one-element tensor as a Python number."""
        if self.size() != 1:
            raise ShapeError(f"item: shape {self.shape} has more than one element")
        value: Number = to_numpy(self).reshape(())[()].item()
        return value

    __hash__ = object.__hash__  # by identity: a Tensor can be a dict key, though == compares elements

    # ---- copies and moves --------------------------------------------------------------------------

    def copy_from_numpy(self, np_array: Any, offset: int = 0) -> None:
        """Overwrite the values with those of ``np_array`` (same number of elements, any shape).

        Values are converted, never reinterpreted as SINGA does: 1.0 becomes the int32 1.

        Raises:
            ShapeError: another number of elements, or offset != 0.
            DTypeError: a value this dtype cannot hold exactly (0.5 as int32, a float64 0.1 as float32).
        """
        refuse("it copies host values into a Tensor, which a replay would not see change")
        values = np.asarray(np_array)
        if values.size != self.size() or offset:
            raise ShapeError(f"copy_from_numpy: {values.size} values do not fit into shape {self.shape}")
        values = _convert(values, self.dtype, "copy_from_numpy").reshape(self.shape)
        self.device.backend.run("copy", self.device.backend.asarray(values), out=self._data)

    def copy_data(self, t: Tensor) -> None:
        """Overwrite the values with those of ``t``: same shape and dtype, any device."""
        if t.shape != self.shape or t.dtype != self.dtype:
            raise ShapeError(f"copy_data: {t.dtype}{t.shape} does not fit into {self.dtype}{self.shape}")
        source = t._data if t.device is self.device else self.device.backend.asarray(to_numpy(t))
        self.device.backend.run("copy", source, out=self._data)

    copy_from = copy_data

    def clone(self) -> Tensor:
        """A leaf with a copy of the values, and the same flags."""
        twin = Tensor.wrap(self.device.backend.empty(self.shape, self.dtype), self.device)
        twin.copy_data(self)
        twin.requires_grad, twin.stores_grad, twin.name = self.requires_grad, self.stores_grad, self.name
        return twin

    deepcopy = clone

    def copy(self) -> Tensor:
        """A leaf that shares this tensor's memory, as in SINGA; ``clone`` does not."""
        return Tensor.wrap(self._data, self.device)

    def to_device(self, device: Device) -> None:
        """Move the values to ``device``, in place."""
        if device is not self.device:
            self._data, self.device = device.backend.asarray(to_numpy(self)), device

    def to_host(self) -> None:
        """Move the values to the CPU, in place."""
        self.to_device(get_default_device())

    def as_type(self, dtype: Any) -> Tensor:
        """A leaf with the values rounded to ``dtype``."""
        array = self.device.backend.empty(self.shape, as_dtype(dtype))
        self.device.backend.run("cast", self._data, out=array)
        return Tensor.wrap(array, self.device)

    def to_type(self, dtype: Any) -> Tensor:
        """Round the values to ``dtype`` in place; returns self."""
        self._data = self.as_type(dtype)._data
        return self

    def reshape(self, shape: Sequence[int]) -> Tensor:
        """A leaf of another shape that shares the memory; ``autograd.reshape`` is the recorded form."""
        return Tensor.wrap(self._data.reshape(tuple(shape)), self.device)

    def transpose(self, axes: Sequence[int] | None = None) -> Tensor:
        """A leaf with permuted axes (None: reversed), copied to row-major order."""
        order = tuple(axes) if axes is not None else tuple(reversed(range(self.ndim())))
        array = self.device.backend.empty(tuple(self.shape[axis] for axis in order), self.dtype)
        self.device.backend.run("transpose", self._data, out=array, axes=order)
        return Tensor.wrap(array, self.device)

    # ---- fillers, all in place, all returning self --------------------------------------------------

    def set_value(self, x: Number) -> Tensor:
        """Set every element to ``x``."""
        return self._fill("fill", value=x)

    def gaussian(self, mean: float, std: float) -> Tensor:
        """Draw from the normal distribution of the device's random stream."""
        return self._draw("random_normal", mean=mean, std=std)

    def uniform(self, low: float, high: float) -> Tensor:
        """Draw uniformly from [low, high)."""
        return self._draw("random_uniform", low=low, high=high)

    def bernoulli(self, p: float) -> Tensor:
        """Draw 1 with probability ``p``, else 0."""
        return self._draw("random_bernoulli", p=p)

    def _draw(self, kernel: str, **attributes: float) -> Tensor:
        if self.dtype.kind != "f":
            raise DTypeError(f"{kernel}: needs a float tensor, not {self.dtype}")
        seed, counter = self.device.next_random()
        return self._fill(kernel, seed=seed, counter=counter, **attributes)

    def _fill(self, kernel: str, *inputs: Any, **attributes: Any) -> Tensor:
        self._check_leaf(kernel)
        self.device.backend.run(kernel, *inputs, out=self._data, **attributes)
        return self

    def _check_leaf(self, what: str) -> None:
        if self.creator is not None:
            raise GraphError(
                f"{what}: changing a recorded tensor in place would falsify its gradients; write a = a + b"
            )

    # ---- norms -------------------------------------------------------------------------------------

    def l1(self) -> float:
        """Mean absolute value, as in SINGA."""
        return float(np.abs(to_numpy(self)).mean(dtype=np.float64))

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

    def __pow__(self, other: Tensor | Number) -> Tensor:
        return OPERATORS["pow"](self, other)  # type: ignore[no-any-return]

    def __matmul__(self, other: Tensor) -> Tensor:
        return OPERATORS["matmul"](self, other)  # type: ignore[no-any-return]

    def __neg__(self) -> Tensor:
        return OPERATORS["negative"](self)  # type: ignore[no-any-return]

    # ---- in-place arithmetic: not recorded ------------------------------------------------------------

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
        if kernel == "div" and self.dtype.kind != "f":
            raise DTypeError(f"in-place division of {self.dtype}: convert with as_type(float32) first")
        if np.broadcast_shapes(self.shape, operand.shape) != self.shape:
            raise ShapeError(f"in-place {kernel}: shape {operand.shape} does not broadcast to {self.shape}")
        return self._fill(kernel, self._data, operand)

    # ---- comparison: element-wise, 1 or 0 in float32 -------------------------------------------------

    def __lt__(self, other: Tensor | Number) -> Tensor:
        return _compare(self, other, "less")

    def __le__(self, other: Tensor | Number) -> Tensor:
        return _compare(self, other, "less_equal")

    def __gt__(self, other: Tensor | Number) -> Tensor:
        return _compare(self, other, "greater")

    def __ge__(self, other: Tensor | Number) -> Tensor:
        return _compare(self, other, "greater_equal")

    def __eq__(self, other: object) -> Any:  # Any: element-wise for tensors and numbers, else False
        if not isinstance(other, (Tensor, int, float)):
            return False
        return _compare(self, other, "equal")


# ---- checks and conversions -----------------------------------------------------------------------------


def as_dtype(dtype: Any) -> np.dtype[Any]:
    """``dtype`` as a numpy dtype a Tensor can have, else DTypeError."""
    try:
        wanted = np.dtype(dtype)
    except TypeError as error:
        raise DTypeError(f"{dtype!r} is not a dtype") from error
    if wanted not in DTYPES:
        known = ", ".join(str(known) for known in DTYPES)
        raise DTypeError(f"a Tensor cannot hold {wanted}; choose one of {known}")
    return wanted


def _as_shape(shape: Sequence[int] | int) -> tuple[int, ...]:
    sizes = (shape,) if isinstance(shape, int) else tuple(int(size) for size in shape)
    if any(size < 0 for size in sizes):
        raise ShapeError(f"Tensor: shape {sizes} has a negative size")
    return sizes


def _natural_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    if dtype in (float16, int32):
        return dtype
    return float32 if dtype.kind == "f" else int32


def _convert(values: np.ndarray, wanted: np.dtype[Any], where: str, rounds: bool = False) -> np.ndarray:
    """``values`` as ``wanted``, C-contiguous; DTypeError where a value would change (``rounds``: floats may round)."""
    if values.dtype.kind not in "biuf":
        raise DTypeError(f"{where}: values of dtype {values.dtype} are not numbers")
    if values.dtype == wanted:
        return np.ascontiguousarray(values).reshape(values.shape)
    with np.errstate(invalid="ignore", over="ignore"):
        converted = np.array(values, dtype=wanted, order="C")
        both_float = values.dtype.kind == "f" and wanted.kind == "f"
        changed = (converted.astype(values.dtype) != values) & ~(
            (converted != converted) & (values != values)
        )
    if bool(changed.any()) and not (rounds and both_float):
        example = values[changed].flat[0]
        raise DTypeError(
            f"{where}: {wanted} cannot hold {example!r} ({values.dtype}) exactly; "
            f"convert on purpose with .astype('{wanted}')"
        )
    return converted


def _operand(tensor: Tensor, other: Tensor | Number, where: str) -> Any:
    """The raw array of ``other``, a number becoming an array of ``tensor``'s dtype."""
    if isinstance(other, Tensor):
        if other.device is not tensor.device:
            raise DeviceError(f"{where}: tensors on {tensor.device} and {other.device} meet; use to_device()")
        if other.dtype != tensor.dtype:
            raise DTypeError(f"{where}: {tensor.dtype} and {other.dtype} meet; convert one with as_type()")
        return other.data
    if not isinstance(other, (int, float, np.number)):
        raise DTypeError(f"{where}: expected a Tensor or a number, got {type(other).__name__}")
    value = _convert(np.asarray(other), tensor.dtype, where, rounds=True)
    return tensor.device.backend.asarray(value)


def _compare(tensor: Tensor, other: Tensor | Number, relation: str) -> Tensor:
    operand = _operand(tensor, other, relation)
    result = tensor.device.backend.empty(np.broadcast_shapes(tensor.shape, operand.shape), float32)
    tensor.device.backend.run("compare", tensor.data, operand, out=result, relation=relation)
    return Tensor.wrap(result, tensor.device)


# ---- raw functions -------------------------------------------------------------------------------------


def from_numpy(np_array: Any, dev: Device | None = None) -> Tensor:
    """A Tensor with a copy of the values; float64 becomes float32, int64 int32 (DTypeError if too large)."""
    return Tensor(data=np_array, device=dev)


def to_numpy(t: Tensor) -> np.ndarray:
    """A numpy copy of the values."""
    refuse("it reads values on the host, and a replay runs no Python that could use them")
    array: np.ndarray = t.device.backend.to_numpy(t.data)
    return array


def to_host(t: Tensor) -> Tensor:
    """A leaf on the CPU with a copy of the values."""
    return Tensor(data=to_numpy(t), dtype=t.dtype)


def zeros(shape: Sequence[int], device: Device | None = None) -> Tensor:
    """A float32 Tensor of zeros."""
    return Tensor(shape, device)


def ones(shape: Sequence[int], device: Device | None = None) -> Tensor:
    """A float32 Tensor of ones."""
    return Tensor(shape, device).set_value(1.0)


def zeros_like(t: Tensor) -> Tensor:
    """Zeros of t's shape, dtype and device."""
    return Tensor(t.shape, t.device, t.dtype)


def ones_like(t: Tensor) -> Tensor:
    """Ones of t's shape, dtype and device."""
    return zeros_like(t).set_value(1.0)


def random(shape: Sequence[int], device: Device | None = None) -> Tensor:
    """A float32 Tensor drawn uniformly from [0, 1)."""
    return Tensor(shape, device).uniform(0.0, 1.0)


def product(shape: Sequence[int]) -> int:
    """The product of the sizes; 1 for ()."""
    return math.prod(shape)
