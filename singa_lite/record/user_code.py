# SPDX-License-Identifier: Apache-2.0
"""What the code of a user's function names: variables, attributes, calls that draw new numbers.

What lives here: reading one function, and whether it is the user's. What does not: which functions a step runs, and the
values of what they name (variables.py).
"""

from __future__ import annotations

import dis
import os
import sys
from functools import lru_cache
from itertools import pairwise, zip_longest
from operator import attrgetter
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

from .attributes import Absent

PACKAGES = {__name__.partition(".")[0], "numpy", "cupy", "mpi4py"}
STDLIB = os.path.dirname(os.__file__) + os.sep
INSTALLED = ("site-packages", "dist-packages")
# which draw new numbers if they are made without a seed
GENERATORS = {"default_rng", "RandomState", "Random"}
SYSTEMS_NUMBERS = {"SystemRandom", "urandom", "randbits", "randbelow", "token_bytes"}
# of generators that others share: a replay would not leave their state as the step does
SEEDING = {"seed", "set_state", "setstate"}
KEYWORD_CALLS = ("CALL_KW", "CALL_FUNCTION_KW")  # which take their names from the constant before
PARTS = attrgetter("__code__", "__defaults__", "__kwdefaults__")  # of a function, what can be replaced


@lru_cache(maxsize=1000)  # a bound for functions that are made again and again
def names_of(code: CodeType) -> tuple[set[str], set[str]]:
    """Return the global variables and the attributes that ``code``, and what is defined in it, names."""
    names, attributes = set[str](), set[str]()
    instructions = list(dis.get_instructions(code))
    for instruction, then in zip_longest(instructions, instructions[1:]):
        if instruction.opname in ("LOAD_GLOBAL", "STORE_GLOBAL", "LOAD_NAME"):
            names.add(str(instruction.argval))
        elif "ATTR" in instruction.opname or instruction.opname == "LOAD_METHOD":
            attributes.add(str(instruction.argval))
        # of match, or a loop over names; not the keywords of a call
        elif isinstance(instruction.argval, tuple) and not _are_keywords(instruction, then):
            attributes |= {part for part in instruction.argval if isinstance(part, str)}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            inner_names, inner_attributes = names_of(constant)
            names, attributes = names | inner_names, attributes | inner_attributes
        elif isinstance(constant, str):
            attributes.add(constant)  # of getattr
    return names, attributes


def _are_keywords(named: dis.Instruction, then: dis.Instruction | None) -> bool:
    """Return whether a tuple of texts names the keywords of a call; Python 3.12 has an instruction for that."""
    return named.opname == "KW_NAMES" or (then is not None and then.opname in KEYWORD_CALLS)


def compares_identities(code: CodeType) -> bool:
    """Return whether ``code``, or what is defined in it, asks if two objects are one, neither of them a constant."""
    if any(compares_identities(part) for part in code.co_consts if isinstance(part, CodeType)):
        return True
    return any(
        then.opname == "IS_OP" and named.opname != "LOAD_CONST"
        for named, then in pairwise(dis.get_instructions(code))
    )


def unseeded_calls(code: CodeType) -> set[str]:
    """Return calls in ``code``, and in what it defines: of GENERATORS without a seed, SYSTEMS_NUMBERS and SEEDING."""
    found = set[str]().union(*(unseeded_calls(part) for part in code.co_consts if isinstance(part, CodeType)))
    shown = [
        each for each in dis.get_instructions(code) if each.opname not in ("PRECALL", "PUSH_NULL", "CACHE")
    ]
    for named, then in pairwise(shown):
        name = str(named.argval)
        if (
            name in SYSTEMS_NUMBERS
            or (name in GENERATORS and then.opname.startswith("CALL") and not then.arg)
            or (name in SEEDING and _is_called(named))
        ):
            found.add(name)
    return found


def _is_called(instruction: dis.Instruction) -> bool:
    """Return whether what an instruction loads is to be called, as far as Python's version says it."""
    if instruction.opname == "LOAD_METHOD":
        return True
    says_so = {"LOAD_GLOBAL": (3, 11), "LOAD_ATTR": (3, 12)}.get(instruction.opname)
    return says_so is not None and sys.version_info >= says_so and bool((instruction.arg or 0) & 1)


def is_users(value: Any) -> bool:
    """Return whether a function, class or module belongs to the program, and not to Python or an installed package."""
    if isinstance(value, ModuleType):
        return _is_users_file(value.__name__, getattr(value, "__file__", None))
    if isinstance(value, FunctionType):  # whose __module__ may be that of a function it wraps
        return _is_users_file(str(value.__globals__.get("__name__")), value.__code__.co_filename)
    name = value.__module__ or ""
    # or made by exec in a namespace without a name; the class of Cython's functions has a descriptor there
    if name == "builtins" or not isinstance(name, str):
        codes = [each.__code__ for each in vars(value).values() if isinstance(each, FunctionType)]
        return bool(codes) and _is_users_file("", codes[0].co_filename)
    return _is_users_file(name, getattr(sys.modules.get(name), "__file__", None))


def _is_users_file(module: str, file: str | None) -> bool:
    """Return whether code of ``module`` in ``file`` is the program's, whatever names its modules have."""
    if module.partition(".")[0] in PACKAGES or (file or "").startswith("<frozen"):
        return False
    if not file:
        return module not in sys.stdlib_module_names
    if file == getattr(sys.modules["__main__"], "__file__", None):
        return True
    return not file.startswith(STDLIB) and not any(folder in file for folder in INSTALLED)


def defaults_of(function: FunctionType) -> dict[str, object]:
    """Return the defaults of a function's parameters by name."""
    defaults, code = function.__defaults__ or (), function.__code__
    names = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
    return dict(zip(names, defaults, strict=True)) | (function.__kwdefaults__ or {})


def value_of_cell(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:
        return Absent
