# SPDX-License-Identifier: Apache-2.0
"""Mixed precision: which operators compute in 16 bits inside ``autocast``, and the casts that this takes.

What lives here: the context, the rules, and casting the inputs of a call. What does not: the rule of an operator, an
attribute of its class (ops/), and casting gradients back (engine.py). docs/precision.md has a table of all operators.

Note [rules]: ``autocast`` of an operator's class says in which dtype it computes.
- "low": in bfloat16 or float16, sums in float32. Of its inputs the first ``autocast_inputs`` are cast, None: all.
- "float32": in float32.
- "widest": in the widest dtype of its float inputs.
- "keep": inputs are taken as they are.
Integer and boolean inputs are never cast. A class without a rule is an error: a guess would be a silent one.
Note [copies of parameters]: operators of a recorded step share the rounded copy of a parameter as long as one of them
keeps it for backward and nothing may have written the parameter (``Recorder.cast``); graph/rounded.py says which casts
replays do. Eager operators round a parameter at each use, as anybody may write to it in between.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, ContextDecorator, nullcontext
from inspect import isasyncgenfunction, iscoroutinefunction, isgeneratorfunction
from typing import Any

import numpy as np

from ..backend.cpu.bfloat16 import find_instructions
from ..config import state, this_thread
from ..device import Device
from ..dtypes import bfloat16, is_float
from ..errors import DeviceError, DTypeError, GraphError, OptionError, check_bool, is_one_of
from ..tensor import Tensor, float32
from ..users_line import warn

RULES = ("low", "float32", "widest", "keep")
# what products are computed in
LOW = {"bf16": bfloat16, "fp16": np.dtype("float16")}
PRECISIONS = ("fp32", *LOW)


def check_precision(where: str, precision: object, devices: Iterable[Device] = ()) -> str:
    """Return ``precision``; OptionError unless it is one of PRECISIONS, DeviceError unless all devices have it."""
    if not is_one_of(precision, PRECISIONS):
        raise OptionError(
            f"{where}: precision = {precision!r} is not known; choose one of "
            f"{', '.join(map(repr, PRECISIONS))} (docs/precision.md)"
        )
    known = next(known for known in PRECISIONS if known == precision)  # a plain str
    for device in devices:
        _check_device(where, known, device)
    return known


def _check_device(where: str, precision: str, device: Device) -> None:
    if reason := device.backend.missing_precisions.get(precision):
        raise DeviceError(
            f"{where}: precision {precision!r} is not there on {device}: {reason} (docs/precision.md)"
        )


def autocast(precision: str = "bf16", enabled: bool = True) -> AbstractContextManager[None]:
    """Run operators inside the ``with`` block in a lower precision, each by its own rule (docs/precision.md).

    Products, convolutions and attention round their inputs to bfloat16, or to float16, and add in float32; losses, sums
    and softmax compute in float32; all others take activations as they are. Parameters and their gradients stay
    float32. It acts on operators of ``autograd``, of this thread alone, not on optimizers. Blocks nest, the inner one
    decides.

    Args:
        precision: "bf16"; "fp16", on GPUs, with a scale of the loss, which ``DistOpt(check_finite="skip")`` applies; or
            "fp32": as without.
        enabled: False is the same as "fp32".

    Raises:
        OptionError: another precision, or ``enabled`` is not a bool.
        DTypeError: inside, an operator without a rule, or an input of one in another float dtype than these.
        DeviceError: inside, an input on a device without that precision.

    Example:
        >>> from singa_lite import autograd
        >>> x = Tensor(data=np.ones((2, 3), np.float32))
        >>> with autograd.autocast("bf16"):
        ...     y = autograd.matmul(x, Tensor(data=np.ones((3, 4), np.float32)))
        >>> y.dtype
        dtype(bfloat16)
    """
    wanted = check_precision("autocast", precision)
    used = wanted if check_bool("autocast", "enabled", enabled) else "fp32"
    if used == "bf16" and not state.has_looked_for_bfloat16 and not state.cuda_devices:
        _report_slow_cpu()
    return _Block(used)


def _report_slow_cpu() -> None:
    """Warn, once a process, if the CPU has no instructions for products of bfloat16; one with a GPU computes there."""
    state.has_looked_for_bfloat16 = True
    if not find_instructions():
        warn(
            "This CPU has no instructions for bfloat16 (AVX-512 BF16 or AMX): autocast computes the same numbers in "
            "float32 of rounded inputs, more slowly than one that has them"
        )


class _Block(ContextDecorator):
    """Context manager that ``autocast`` returns; it can be entered again, also within itself and by several threads."""

    def __init__(self, precision: str) -> None:
        self._precision = precision

    def __call__(self, func: Any) -> Any:
        if isgeneratorfunction(func) or iscoroutinefunction(func) or isasyncgenfunction(func):
            raise OptionError(
                f"autocast: the body of {func.__qualname__} runs later than its call, outside of the block; write "
                "`with autocast(...):` in it"
            )
        return super().__call__(func)

    def __enter__(self) -> None:
        this_thread.outer_autocasts = (*this_thread.outer_autocasts, this_thread.autocast)
        this_thread.autocast = Autocast(self._precision) if self._precision != "fp32" else None

    def __exit__(self, *_: object) -> None:
        if not this_thread.outer_autocasts:
            raise GraphError("autocast: this thread leaves a block that it is not in")
        *outer, this_thread.autocast = this_thread.outer_autocasts
        this_thread.outer_autocasts = tuple(outer)


def precision_of(precision: str) -> str:
    """Return what a model of ``precision`` computes in now: "fp32" leaves that to the block around its call."""
    return (
        precision if precision != "fp32" or this_thread.autocast is None else this_thread.autocast.precision
    )


def autocast_like(precision: str) -> AbstractContextManager[None]:
    """Return a block of ``precision_of(precision)``."""
    return nullcontext() if precision == "fp32" else autocast(precision)


class Autocast:
    """A block in which inputs are cast by Note [rules].

    Args:
        precision: of LOW.
    """

    def __init__(self, precision: str) -> None:
        self.precision, self._dtype = precision, LOW[precision]

    def cast(self, op: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return what the operator ``op`` computes with instead of its inputs: these where none is cast."""
        name, rule = type(op).__name__, op.autocast
        if rule not in RULES:
            came = "has no rule" if rule is None else f"has the unknown rule {rule!r}"
            raise DTypeError(
                f'{name}: {came} for autocast("{self.precision}"); give its class `autocast = "low"`, "float32", '
                '"widest" or "keep", or call it inside autocast(enabled=False); docs/precision.md has the rules of all '
                "operators"
            )
        if rule in ("float32", "widest"):
            return self.widen(name, inputs, always=rule == "float32")
        for tensor in () if op.takes_any_float else inputs:
            self._check(name, tensor)
        if rule == "keep":
            return inputs
        count = len(inputs) if op.autocast_inputs is None else op.autocast_inputs
        return (*(self._low(tensor) for tensor in inputs[:count]), *inputs[count:])

    def widen(self, name: str, inputs: tuple[Any, ...], always: bool = False) -> tuple[Any, ...]:
        """Return the inputs in float32, where one of them has it or ``always``; errors name ``name``."""
        for tensor in inputs:
            self._check(name, tensor)
        if not always and all(_dtype(tensor) != float32 for tensor in inputs):
            return inputs
        return tuple(_cast(tensor, float32) if _dtype(tensor) == self._dtype else tensor for tensor in inputs)

    def _check(self, name: str, tensor: Any) -> None:
        """Raise a typed error for a Tensor of a dtype that no rule covers; operators refuse other objects."""
        dtype = _dtype(tensor)
        if dtype is None:
            return
        if is_float(dtype) and dtype not in (float32, self._dtype):
            raise DTypeError(
                f'{name}: autocast("{self.precision}") takes float32 and {self._dtype}, not {dtype}; convert with '
                "as_type(float32), or call it inside autocast(enabled=False) (docs/precision.md)"
            )
        _check_device(name, self.precision, tensor.device)

    def _low(self, tensor: Any) -> Any:
        """Return a float32 Tensor rounded to 16 bits; any other as it is."""
        return _cast(tensor, self._dtype) if _dtype(tensor) == float32 else tensor


def _dtype(value: Any) -> Any:
    """Return the dtype of a Tensor; None for anything else."""
    return value.array.dtype if isinstance(value, Tensor) else None


def _cast(tensor: Tensor, dtype: Any) -> Tensor:
    array, backend, recorder = tensor.array, tensor.device.backend, this_thread.recorder
    if recorder is not None and tensor.stores_grad and tensor.creator is None:
        return Tensor.wrap(recorder.cast(backend, array, dtype), tensor.device)
    cast = backend.empty(tensor.shape, dtype)
    backend.run("cast", array, out=cast)
    return Tensor.wrap(cast, tensor.device)
