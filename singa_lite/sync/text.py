# SPDX-License-Identifier: Apache-2.0
"""A dist_option as text, for command lines: a scheme and its options as ``name[:value][:key=value...]``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from math import inf
from types import UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

from ..errors import OptionError, check_choice
from . import find_schemes
from .base import Scheme, text_of, types_of

BOOLS = {"1": True, "true": True, "0": False, "false": False}
# what Python reads besides, such as 1_0, spaces, other alphabets' digits and inf, is a slip of the pen here
NUMBERS = {int: r"[+-]?[0-9]+", float: r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?"}


class DistOption(NamedTuple):
    """The scheme that a dist_option names, and the values in its text, by the names of fields of ``Options``."""

    scheme: type[Scheme]
    options: dict[str, Any]


def read_dist_option(text: str) -> DistOption:
    """Return what ``name[:value][:key=value...]`` says; the bare value is that of the first field.

    All behind the name is that value where a scheme ``wraps_another``, and so is all behind ``:key=``. Numbers are
    decimal and finite, in ASCII digits, without spaces.

    Raises:
        OptionError: an unknown name or key, a key given twice, or a value that is not of its field's type or out
            of range.
    """
    name, *parts = text.split(":") if isinstance(text, str) else [text]
    known = find_schemes()
    check_choice("DistOpt", "dist_option", name, known)
    scheme = known[name]
    types = types_of(scheme)
    if scheme.wraps_another and parts:
        parts = [":".join(parts)]
    options: dict[str, Any] = {}
    for number, part in enumerate(parts):
        key, equals, value = part.partition("=")
        first = next(iter(types), None)
        if number == 0 and first and (not equals or (scheme.wraps_another and key != first)):
            key, value = first, part
        if key not in types or key in options:
            problem = f"gives {key} twice" if key in options else f"has {part!r}, which is not an option"
            cure = "; give it to DistOpt as its argument threshold" if key == "threshold" else ""
            raise OptionError(f"DistOpt: dist_option {text!r} {problem}; {form_of(scheme)}{cure}")
        if not _has_text(types[key]):
            raise OptionError(
                f"DistOpt: dist_option {text!r} gives {key}, a {_type_name(types[key])}, which is no text; give it by "
                f"name, DistOpt({key}=...)"
            )
        try:
            options[key] = _value_of(value, types[key])
        except ValueError:
            raise OptionError(
                f"DistOpt: dist_option {text!r} has {key} = {value!r}, expected {_type_name(types[key])}; "
                f"{form_of(scheme)}"
            ) from None
    try:
        scheme.Options(**options)
    except OptionError as error:
        raise OptionError(f"DistOpt: dist_option {text!r}: {error}; {form_of(scheme)}") from None
    return DistOption(scheme, options)


def options_by_name(scheme: type[Scheme], options: dict[str, Any]) -> dict[str, Any]:
    """Return ``options`` with those of a wrapped scheme beside its name, instead of in its text.

    Raises:
        OptionError: one of them is given twice, or the text is wrong.
    """
    first = wrapped_field(scheme)
    if first not in options:
        return options
    wrapped = read_dist_option(options[first])
    if twice := sorted(set(wrapped.options) & set(options)):
        raise OptionError(
            f"DistOpt: {', '.join(twice)} is given twice, in {first} = {options[first]!r} and by name; leave one out"
        )
    return {**options, **wrapped.options, first: wrapped.scheme.names[0]}


def scheme_of_options(scheme: type[Scheme], options: Mapping[str, Any]) -> type[Scheme]:
    """Return the scheme whose options are given by name: ``scheme``, or the one that it wraps."""
    if not scheme.wraps_another:
        return scheme
    first = wrapped_field(scheme)
    return read_dist_option(options.get(first, getattr(scheme.Options(), first))).scheme


def make_options(scheme: type[Scheme], values: dict[str, Any]) -> Any:
    """Return the ``Options`` with ``values``, as ``options_by_name`` gives them: a wrapped scheme's in its text."""
    if scheme.wraps_another:
        first = wrapped_field(scheme)
        wrapped = scheme_of_options(scheme, values)
        inner = wrapped.Options(**{name: value for name, value in values.items() if name != first})
        values = {first: wrapped.names[0] + text_of(inner)}
    return scheme.Options(**values)


def wrapped_field(scheme: type[Scheme]) -> str:
    """Return the name of the option that is another dist_option, "" if there is none."""
    return next(iter(types_of(scheme))) if scheme.wraps_another else ""


def form_of(scheme: type[Scheme]) -> str:
    """Return how a dist_option of ``scheme`` is written, with the name, type and default of every field."""
    name, types = scheme.names[0], types_of(scheme)
    if not types:
        return f"{name} has no options"
    each = [f"{f.name}: {_type_name(types[f.name])} = {f.default}" for f in fields(scheme.Options)]
    rest = "[:key=value...], with the options"
    if scheme.wraps_another:
        rest = ", with another dist_option and its options:"
    return f"write {name}[:{next(iter(types))}]{rest} {', '.join(each)}"


def accepted_of(kind: Any) -> tuple[list[Any], list[Any]]:
    """Return what an option of type ``kind`` may be: of which types, and which values of Literals besides."""
    parts = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    choices = [choice for part in parts if get_origin(part) is Literal for choice in get_args(part)]
    return [part for part in parts if get_origin(part) is not Literal], choices


def _value_of(text: str, kind: Any) -> Any:
    """Return ``text`` as a value of a field's type; ValueError if it is not one."""
    types, choices = accepted_of(kind)
    if type(None) in types and text.lower() == "none":
        return None
    for choice in choices:
        if text == str(choice):
            return choice
    if bool in types:
        if text.lower() not in BOOLS:
            raise ValueError(text)
        return BOOLS[text.lower()]
    read = next((each for each in types if each in (int, float, str)), None)
    if read is None or (read in NUMBERS and not re.fullmatch(NUMBERS[read], text)):
        raise ValueError(text)
    value = read(text)
    if value in (inf, -inf):  # 1e999
        raise ValueError(text)
    return value


def _has_text(kind: Any) -> bool:
    """Return whether a text can give values of ``kind``, other than None."""
    types, choices = accepted_of(kind)
    return bool(choices) or any(each in (bool, int, float, str) for each in types)


def _type_name(kind: Any) -> str:
    types, choices = accepted_of(kind)
    names = ["None" if each is type(None) else getattr(each, "__name__", str(each)) for each in types]
    return " or ".join([*map(repr, choices), *names])
