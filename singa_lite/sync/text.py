# SPDX-License-Identifier: Apache-2.0
"""A dist_option as text, for command lines: a scheme and its options as ``name[:value][:key=value...]``."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, NamedTuple, get_args, get_type_hints

from ..errors import OptionError, check_choice
from . import find_schemes
from .base import Scheme

BOOLS = {"1": True, "true": True, "0": False, "false": False}


class DistOption(NamedTuple):
    """What the text of a dist_option says.

    Attributes:
        scheme: the scheme that its name chooses.
        options: the values in it, by the names of fields of ``scheme.Options``.
    """

    scheme: type[Scheme]
    options: dict[str, Any]


def read_dist_option(text: str) -> DistOption:
    """Return what ``name[:value][:key=value...]`` says; the bare value is that of the first field.

    All behind the name is that value where a scheme ``wraps_another``.

    Raises:
        OptionError: an unknown name or key, a key given twice, or a value that is not of its field's type or out
            of range.
    """
    name, *parts = text.split(":") if isinstance(text, str) else [text]
    known = find_schemes()
    check_choice("DistOpt", "dist_option", name, known)
    scheme = known[name]
    types = get_type_hints(scheme.Options)
    if scheme.wraps_another and parts:
        parts = [":".join(parts)]
    options: dict[str, Any] = {}
    for number, part in enumerate(parts):
        key, equals, value = part.partition("=")
        if number == 0 and types and (not equals or scheme.wraps_another):
            key, value = next(iter(types)), part
        if key not in types or key in options:
            problem = f"gives {key} twice" if key in options else f"has {part!r}, which is no option"
            raise OptionError(f"DistOpt: dist_option {text!r} {problem}; {form_of(scheme)}")
        try:
            options[key] = _value_of(value, types[key])
        except ValueError:
            raise OptionError(
                f"DistOpt: dist_option {text!r} has {key} = {value!r}, which is no {_type_name(types[key])}; "
                f"{form_of(scheme)}"
            ) from None
    try:
        scheme.Options(**options)
    except OptionError as error:
        raise OptionError(f"DistOpt: dist_option {text!r}: {error}; {form_of(scheme)}") from None
    return DistOption(scheme, options)


def form_of(scheme: type[Scheme]) -> str:
    """Return how a dist_option of ``scheme`` is written, with the name, type and default of every field."""
    name, types = scheme.names[0], get_type_hints(scheme.Options)
    if not types:
        return f"{name} has no options"
    each = [f"{f.name}: {_type_name(types[f.name])} = {f.default}" for f in fields(scheme.Options)]
    return f"write {name}[:{next(iter(types))}][:key=value...], with the options {', '.join(each)}"


def text_of(options: Any) -> str:
    """Return the dist_option that gives ``options``, an object of a scheme's ``Options``; a schedule as it prints."""
    return "".join(f":{field.name}={getattr(options, field.name)}" for field in fields(options))


def _value_of(text: str, kind: Any) -> Any:
    """Return ``text`` as a value of a field's type; ValueError if it is none."""
    accepted = get_args(kind) or (kind,)
    if type(None) in accepted and text.lower() == "none":
        return None
    if bool in accepted:
        if text.lower() not in BOOLS:
            raise ValueError(text)
        return BOOLS[text.lower()]
    return next(each for each in accepted if each is not type(None))(text)


def _type_name(kind: Any) -> str:
    accepted = get_args(kind) or (kind,)
    return " or ".join("None" if each is type(None) else str(each.__name__) for each in accepted)
