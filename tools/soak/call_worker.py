# SPDX-License-Identifier: Apache-2.0
"""The process that calls.py starts: makes calls in an empty folder, without a network, and reports each by a line.

    python -m tools.soak.call_worker SEED FIRST LAST [MODULE ...]

Before each call it writes {"number", "target", "arguments"}, afterwards {"number", "outcome", "finding"}. A call is
determined by the seed and its number.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import json
import os
import random
import reprlib
import resource
import shutil
import signal
import socket
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from singa_lite import config, device
from singa_lite.errors import SingaLiteError
from singa_lite.layer import Layer
from singa_lite.tensor import Tensor
from tools.soak.call_arguments import Values
from tools.soak.call_exceptions import ACCEPTED
from tools.soak.call_targets import Target, targets

MEMORY_BYTES = 4 << 30
LEAST_MESSAGE = 10  # letters; an error says what was expected and what came
PACKAGE = f"{os.sep}singa_lite{os.sep}"


@dataclass
class Finding:
    """What should not happen: its kind, what is known of it, and the line of the package that it comes from."""

    kind: str
    message: str
    place: str


def make_call(target: Target, values: Values) -> tuple[Callable[..., Any], list[Any], dict[str, Any]]:
    """Return a function with random arguments, or right ones of which one or two are wrong, or none."""
    function, rng = target.make(values), values.rng
    parameters = _parameters(function)
    is_random = rng.random() < 0.35
    if target.samples and not is_random and rng.random() < 0.7:
        arguments, options = rng.choice(target.samples)(values)
    else:
        arguments, options = _from_signature(parameters, values, is_random)
    for _ in range(0 if is_random else rng.choice([0, 1, 1, 1, 2])):
        place = rng.choice([*range(len(arguments)), *options] or [None])
        if isinstance(place, int):
            arguments[place] = values.any()
        elif place is not None:
            options[place] = values.any()
    return function, arguments, options


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(_called(function)).parameters.values())
    except (TypeError, ValueError):  # of a class written in C, say
        return [inspect.Parameter("arguments", inspect.Parameter.VAR_POSITIONAL)]


def _called(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return what has the signature: a layer's ``__call__`` takes what its forward takes."""
    owner = getattr(function, "__self__", None)
    is_layer_call = isinstance(owner, Layer) and getattr(function, "__name__", "") == "__call__"
    if is_layer_call and owner is not None:
        return owner.train_one_batch if getattr(owner, "training", False) else owner.forward  # type: ignore[no-any-return]
    return function


def _from_signature(
    parameters: list[inspect.Parameter], values: Values, is_random: bool
) -> tuple[list[Any], dict[str, Any]]:
    arguments: list[Any] = []
    options: dict[str, Any] = {}
    for each in parameters:
        has_default = each.default is not inspect.Parameter.empty

        def draw(each: inspect.Parameter = each) -> Any:
            return values.any() if is_random else values.fitting(each.name, each.annotation)

        if each.kind is each.VAR_POSITIONAL:
            arguments += [draw() for _ in range(values.rng.choice([0, 1, 2]))]
        elif each.kind is each.VAR_KEYWORD:
            options |= {"other": values.any()} if values.rng.random() < 0.2 else {}
        elif each.kind is each.KEYWORD_ONLY or has_default:
            if not has_default or values.rng.random() < 0.4:
                options[each.name] = draw()
        else:
            arguments.append(draw())
    if values.rng.random() < 0.02:
        arguments.append(values.any())
    return arguments, options


# ---- outcomes ----------------------------------------------------------------------------------------------


def outcome(
    target: Target, function: Callable[..., Any], arguments: list[Any], options: dict[str, Any]
) -> str | Finding:
    """Make the call; return "returned", "typed", "signature" or "accepted", else what was found."""
    before = [_content(value) for value in _arrays(function, arguments, options)]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", "This CPU has no instructions for bfloat16")
            _use(function(*arguments, **options))
        return "returned"
    except SingaLiteError as error:
        if len(str(error)) < LEAST_MESSAGE:
            return Finding("short message", repr(error), _place(error))
        if before != [_content(value) for value in _arrays(function, arguments, options)]:
            return Finding("changed before it was refused", f"{type(error).__name__}: {error}", _place(error))
        return "typed"
    except BaseException as error:
        if isinstance(error, TypeError) and not _binds(function, arguments, options):
            return "signature"
        if any(target.name.startswith(name) and isinstance(error, kind) for name, kind, _ in ACCEPTED):
            return "accepted"
        return Finding(type(error).__name__, _printable(str(error)[:300]), _place(error))


def _use(result: object) -> None:
    """Enter a context manager, and take the first items of an iterator: what it does is done then."""
    if isinstance(result, contextlib.AbstractContextManager) and not isinstance(result, Layer):
        with result:
            pass
    elif isinstance(result, Iterator):
        list(itertools.islice(result, 3))


def _arrays(function: object, arguments: list[Any], options: dict[str, Any]) -> list[Any]:
    given = [getattr(function, "__self__", None), *arguments, *options.values()]
    return [each for each in given if isinstance(each, (Tensor, np.ndarray))]


def _content(value: Any) -> object:
    array = value.array if isinstance(value, Tensor) else value
    return array.shape, array.dtype.str, array.tobytes() if array.dtype.kind != "O" else None


def _binds(function: Callable[..., Any], arguments: list[Any], options: dict[str, Any]) -> bool:
    try:
        inspect.signature(_called(function)).bind(*arguments, **options)
    except TypeError:
        return False
    except ValueError:
        return True
    return True


def _printable(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


def _place(error: BaseException) -> str:
    """Return the last line of the package that the error passed."""
    frames = traceback.extract_tb(error.__traceback__)
    inside = [frame for frame in frames if PACKAGE in frame.filename] or frames
    name = inside[-1].filename.rpartition(PACKAGE)[2].rpartition(os.sep + os.sep)[2]
    return f"{name}:{inside[-1].lineno} {inside[-1].name}"


# ---- the process -------------------------------------------------------------------------------------------


Report = Callable[[dict[str, Any]], None]


def call(found: list[Target], seed: int, number: int, report: Report) -> str | Finding:
    """Make call ``number`` of a seed, telling ``report`` beforehand what it is."""
    rng = random.Random(f"{seed} {number}")
    target = found[number % len(found)]  # each as often as the others
    device.get_default_device().SetRandSeed(number)
    function, arguments, options = make_call(target, Values(rng))
    shown = [*map(reprlib.repr, arguments), *(f"{k}={reprlib.repr(v)}" for k, v in options.items())]
    report({"number": number, "target": target.name, "arguments": _printable(", ".join(shown))})
    config.this_thread.training = rng.random() < 0.3
    result = outcome(target, function, arguments, options)
    _reset()
    left = sorted(str(path) for path in Path().iterdir())
    if left and not isinstance(result, Finding) and result != "returned":
        result = Finding("left behind", f"{left} by a call that failed", "")
    for name in left:
        shutil.rmtree(name) if os.path.isdir(name) and not os.path.islink(name) else os.unlink(name)
    return result


def _reset() -> None:
    """Undo what a call has switched for the process."""
    config.this_thread.training, config.this_thread.recording = False, True
    if config.this_thread.recorder is not None:
        device.get_default_device().EnableGraph(False)
    device.set_num_threads(1)


def confine() -> None:
    """Go to an empty folder, with limits, and without a network."""

    def refuse(*_: object) -> None:
        raise OSError("no network")

    socket.getaddrinfo = socket.create_connection = refuse  # type: ignore[assignment]
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides


def main() -> None:
    seed, first, last = map(int, sys.argv[1:4])
    output = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # some calls print

    def report(line: dict[str, Any]) -> None:
        output.write(json.dumps(line) + "\n")
        output.flush()

    found = targets(sys.argv[4:] or None)
    report({"number": -1, "targets": len(found)})
    confine()
    with tempfile.TemporaryDirectory(prefix="singa_lite-calls-") as folder:
        os.chdir(folder)
        for number in range(first, last):
            result = call(found, seed, number, report)
            is_finding = isinstance(result, Finding)
            report({"number": number, "outcome": vars(result) if is_finding else result})
        os.chdir("/")


if __name__ == "__main__":
    main()
