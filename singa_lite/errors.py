# SPDX-License-Identifier: Apache-2.0
"""Every exception the package raises on purpose, and the small checks that raise them.

A message says where, what was expected, what came and how to fix it. docs/errors.md leads from the
text of each ``CommError`` to its cure.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Hashable
from numbers import Integral, Real


class SingaLiteError(Exception):
    """Base of all errors raised by singa_lite."""


class ShapeError(SingaLiteError, ValueError):
    """An array or tensor has the wrong shape, or an axis, size or stride is out of range."""


class DTypeError(SingaLiteError, TypeError):
    """An array or tensor has the wrong element type, or a value does not fit the type requested."""


class DeviceError(SingaLiteError, RuntimeError):
    """A device is missing, or a call mixes tensors of different devices."""


class OptionError(SingaLiteError, ValueError):
    """An option (``dist_option``, ``spars``, ``op``, a learning rate, ...) is unknown or out of range."""


class GraphError(SingaLiteError, RuntimeError):
    """A gradient was requested of something that was not recorded, or a model was used before ``compile``."""


class DataError(SingaLiteError, RuntimeError):
    """A data set is missing, damaged or cannot be fetched."""


class CheckpointError(SingaLiteError, RuntimeError):
    """A checkpoint does not fit the model, is damaged, or cannot be written."""


class CommError(SingaLiteError, RuntimeError):
    """A collective failed: a peer died, is late, disagrees, or a transport is not available."""


class NonFiniteError(SingaLiteError, ArithmeticError):
    """A gradient has infinities or NaN, and ``check_finite="raise"`` was asked for."""


def check_choice(where: str, name: str, value: object, choices: Collection[object]) -> None:
    """Raise ``OptionError`` unless ``value`` is one of ``choices``."""
    if not is_one_of(value, choices):
        known = ", ".join(repr(choice) for choice in choices)
        raise OptionError(f"{where}: {name} = {value!r} is not known; choose one of {known}")


def is_one_of(value: object, choices: Collection[object]) -> bool:
    """Return whether ``value`` is one of ``choices``; an object that cannot be compared with them is not."""
    try:
        return isinstance(value, Hashable) and value in choices  # a list or an array has no hash
    except (TypeError, ValueError):  # nor has a tuple with one in it
        return False


def is_number(value: object, kind: type = Real) -> bool:
    """Return whether ``value`` is a Real, or an Integral: no bool, nor a timedelta64, which numpy calls an Integral."""
    return isinstance(value, kind) and not isinstance(value, bool) and type(value).__name__ != "timedelta64"


def is_int_text(text: str) -> bool:
    """Return whether ``text`` is a whole number >= 0 of at most 18 digits: Python reads none of thousands of them."""
    return text.isascii() and text.isdecimal() and len(text) <= 18


def check_bool(where: str, name: str, value: object) -> bool:
    """Return ``value`` as a bool; ``OptionError`` unless it is True, False, 1 or 0."""
    is_bool = type(value).__name__ in ("bool", "bool_")  # numpy's too, which this file does without
    if is_bool or (isinstance(value, Integral) and value in (0, 1)):
        return bool(value)
    raise OptionError(f"{where}: {name} = {value!r} must be True or False")


def check_text(where: str, name: str, value: object) -> str:
    """Return ``value``; ``OptionError`` unless it is a str that UTF-8 can hold, without lone surrogates."""
    if isinstance(value, str):
        if value.isascii():
            return value
        with contextlib.suppress(UnicodeEncodeError):
            value.encode()
            return value
    raise OptionError(f"{where}: {name} = {value!r} must be text (a str that UTF-8 can hold)")


def check_int(where: str, name: str, value: object, smallest: int) -> int:
    """Return ``value`` as an int; ``OptionError`` unless it is a whole number (no bool, no float) >= ``smallest``."""
    if not is_number(value, Integral) or value < smallest:  # type: ignore[operator]
        raise OptionError(f"{where}: {name} = {repr_of(value)} must be an int >= {smallest}")
    return int(value)  # type: ignore[call-overload, no-any-return]


def check_ints(where: str, name: str, values: object, smallest: int) -> list[int]:
    """Return ``values`` as a list; ``OptionError`` unless it is a list, tuple or array of ints >= ``smallest``."""
    try:
        found = None if isinstance(values, (str, bytes)) else list(values)  # type: ignore[call-overload]
    except TypeError:  # an array without axes is iterable by its type alone
        found = None
    if found is None:
        raise OptionError(f"{where}: {name} = {values!r} must be a list of ints >= {smallest}")
    return [check_int(where, name, value, smallest) for value in found]


def check_number(
    where: str, name: str, value: object, lowest: float = -math.inf, highest: float = math.inf
) -> float:
    """Return ``value`` as a float; ``OptionError`` unless it is a number in lowest .. highest, both included."""
    if not is_number(value) or not lowest <= value <= highest:  # type: ignore[operator]
        raise OptionError(f"{where}: {name} = {repr_of(value)} must be a number in {lowest} .. {highest}")
    try:
        return float(value)  # type: ignore[arg-type]
    except OverflowError:  # of an int
        raise OptionError(f"{where}: {name} = {repr_of(value)} is too large for a float") from None


def repr_of(value: object) -> str:
    """Return the text of a value; of an int with more digits than Python makes texts of, how long it is."""
    try:
        return repr(value)
    except ValueError:
        return f"an int of {value.bit_length()} bits" if isinstance(value, int) else type(value).__name__
