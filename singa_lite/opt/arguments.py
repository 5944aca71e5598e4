# SPDX-License-Identifier: Apache-2.0
"""Optimizers and schedules as JSON values: their class and what their constructors were given.

What lives here: reading the arguments from attributes, and making the object again. What does not: which optimizers
there are (one file for each family), comparing those of several ranks (``Optimizer.settings``).

Note [arguments]: a constructor's argument is read from the attribute of its name, so it is what the attribute was last
set to. ``**options`` stands for the arguments of the class above.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from types import FunctionType, MethodType
from typing import Any, TypeVar

import numpy as np

from ..errors import OptionError
from ..plugins import subclasses
from ..tensor import Tensor, to_numpy
from .schedule import Constant, DecayScheduler, described

Made = TypeVar("Made")
_SCHEDULE: type[Any] = DecayScheduler  # Any: an abstract class, which mypy would not have as an argument


def description_of(value: object) -> dict[str, Any]:
    """Return {"class": its name, and each argument of its constructor}, see Note [arguments].

    Raises:
        OptionError: an argument has no attribute of its name, or is not a JSON value.
    """
    kind = type(value)
    names = argument_names(kind)
    if missing := [name for name in names if not hasattr(value, name)]:
        raise OptionError(
            f"{kind.__name__}: expected an attribute for the argument {missing[0]}, got none; set self.{missing[0]} in "
            "the constructor"
        )
    found = {name: _as_json(f"{kind.__name__}.{name}", getattr(value, name)) for name in names}
    return {"class": kind.__name__, **found}


def make(base: type[Made], name: object, arguments: Mapping[str, Any]) -> Made:
    """Return an object of the subclass of ``base`` called ``name``; of one that was defined again the newest.

    Args:
        arguments: as ``description_of`` gives them.

    Raises:
        OptionError: no class has that name, or two have; or the constructor does not take these arguments.
    """
    kind = _find(base, name)
    given = {key: _from_json(value) for key, value in arguments.items()}
    try:
        inspect.signature(kind).bind(**given)
    except TypeError as error:
        raise OptionError(f"create: {name} cannot be made of ({', '.join(given)}): {error}") from None
    return kind(**given)


def _find(base: type[Made], name: object) -> type[Made]:
    kinds = [kind for kind in subclasses(base) if not inspect.isabstract(kind)]
    called = [kind for kind in kinds if isinstance(name, str) and kind.__name__ == name]
    found = {(kind.__module__, kind.__qualname__): kind for kind in called}
    if len(found) > 1:
        paths = " and ".join(".".join(path) for path in found)
        raise OptionError(f"create: {len(found)} classes are called {name}: {paths}; rename one")
    if found:
        return found.popitem()[1]
    known = ", ".join(sorted({kind.__name__ for kind in kinds if not kind.__name__.startswith("_")}))
    raise OptionError(
        f"create: no {base.__name__} is called {name!r}; known are {known}; define a class of your own before this "
        "call, at the top of the script that every process runs"
    )


def argument_names(kind: type) -> list[str]:
    """Return the names of the constructor's arguments."""
    names: list[str] = []
    for owner in kind.__mro__:
        if "__init__" not in vars(owner):
            continue
        parameters = list(inspect.signature(vars(owner)["__init__"]).parameters.values())[1:]
        names += [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            break
    return list(dict.fromkeys(names))


def comparable(value: object, step: int) -> object:
    """Return what tells an attribute from that of another object: values, bits of arrays, the code of functions.

    Of any other object it is the type.
    """
    if (plain := described(value, step)) is not None:
        return plain
    if isinstance(value, Tensor):
        value = to_numpy(value)
    if isinstance(value, np.ndarray):
        return value.dtype, value.shape, value.tolist() if value.dtype.hasobject else value.tobytes()
    if isinstance(value, dict):
        return {key: comparable(item, step) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [comparable(item, step) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted(repr(comparable(item, step)) for item in value)
    return value.__code__ if isinstance(value, (FunctionType, MethodType)) else type(value)


def _as_json(where: str, value: object) -> Any:
    if isinstance(value, DecayScheduler):
        return value.init_value if type(value) is Constant else description_of(value)
    if isinstance(value, np.dtype) or (isinstance(value, type) and issubclass(value, np.generic)):
        return np.dtype(value).name
    plain = value.item() if isinstance(value, np.generic) else value
    if plain is None or isinstance(plain, (bool, int, float, str)):
        return plain
    if isinstance(plain, (list, tuple)):
        return [_as_json(where, item) for item in plain]
    if isinstance(plain, dict) and all(isinstance(key, str) for key in plain) and "class" not in plain:
        return {key: _as_json(where, item) for key, item in plain.items()}
    raise OptionError(
        f"{where} is a {type(value).__name__}, which is not a JSON value; use numbers, text, lists and schedules"
    )


def _from_json(value: Any) -> Any:
    if isinstance(value, list):
        return [_from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    found = {key: _from_json(item) for key, item in value.items()}
    return make(_SCHEDULE, found.pop("class"), found) if "class" in found else found
