# SPDX-License-Identifier: Apache-2.0
"""The formulas of formulas.h and the updates of updates.h as Python sees them: which there are, and what they take."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from ..errors import ShapeError

FOLDER = Path(__file__).parent
NUM_INPUTS = {"UNARY": 1, "BINARY": 2, "TERNARY": 3}
LINE = re.compile(r"^(UNARY|BINARY|TERNARY|UPDATE[012])\((.*)\)  // (.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Formula:
    """A line of formulas.h, see Note [formulas] there.

    Attributes:
        name: the kernel's.
        type: "A" or "Real".
        inputs: names of the arrays.
        value: the expression, which is Python too.
        numbers: names of the attributes, which are floats.
        meaning: what it gives.
    """

    name: str
    type: str
    inputs: tuple[str, ...]
    value: str
    numbers: tuple[str, ...]
    meaning: str

    @property
    def signature(self) -> str:
        """The kernel's form, as in the table of base.py."""
        attributes = "".join(f"; {number}: float" for number in self.numbers)
        return f"({', '.join(self.inputs)}) -> {self.meaning}{attributes}"


@dataclass(frozen=True)
class Update:
    """A line of updates.h, see Note [updates] there.

    Attributes:
        name: the kernel's.
        states: name and new value of each state, in their order.
        value: the new value of the parameter.
        numbers: names of the attributes, which are floats; every update has ``weight_decay`` besides.
        meaning: what it is.
    """

    name: str
    states: tuple[tuple[str, str], ...]
    value: str
    numbers: tuple[str, ...]
    meaning: str

    @property
    def signature(self) -> str:
        """The kernel's form, as in the table of base.py."""
        states = "".join(f", {name}, ..." for name, _ in self.states)
        numbers = ", ".join((*self.numbers, "weight_decay = 0"))
        return f"(grad, ...) -> (param, ...{states}) in place, {self.meaning}; {numbers}: float"

    def check_count(self, num_grads: int, num_arrays: int) -> None:
        """Raise ShapeError unless ``num_arrays`` are a parameter and its states for each of the gradients, of which
        there must be one."""
        num_states = len(self.states)
        if num_grads == 0 or num_arrays != num_grads * (1 + num_states):
            raise ShapeError(
                f"an update of {num_grads} gradients and {num_states} states cannot write {num_arrays} arrays"
            )


def split_arguments(text: str) -> list[str]:
    """Return the arguments of a macro: ``text`` split at the commas outside of parentheses."""
    arguments, depth, start = [], 0, 0
    for index, character in enumerate(text):
        depth += {"(": 1, ")": -1}.get(character, 0)
        if character == "," and depth == 0:
            arguments.append(text[start:index].strip())
            start = index + 1
    return [*arguments, text[start:].strip()]


def read_formulas(source: str) -> dict[str, Formula]:
    """Return the formulas of a text by name, in their order."""
    found = {}
    for kind, arguments, meaning in LINE.findall(source):
        name, kind_of_element, *rest = split_arguments(arguments)
        count = NUM_INPUTS[kind]
        inputs, numbers = tuple(rest[:count]), tuple(rest[count + 1 :])
        found[name] = Formula(name, kind_of_element, inputs, rest[count], numbers, meaning)
    return found


def read_updates(source: str) -> dict[str, Update]:
    """Return the updates of a text by name, in their order."""
    found = {}
    for kind, arguments, meaning in LINE.findall(source):
        name, *rest = split_arguments(arguments)
        end = 2 * int(kind[-1])
        states = tuple(zip(rest[:end:2], rest[1:end:2], strict=True))
        found[name] = Update(name, states, rest[end], tuple(rest[end + 1 :]), meaning)
    return found


FORMULAS = read_formulas((FOLDER / "formulas.h").read_text())
UPDATES = read_updates((FOLDER / "updates.h").read_text())
