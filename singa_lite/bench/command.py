# SPDX-License-Identifier: Apache-2.0
"""What the commands of `singa-lite` have in common: errors, exit codes, lists, tables, and starting ranks."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Collection, Iterable, Sequence

from ..errors import OptionError, SingaLiteError, check_int
from ..launch.one_host import MAX_RANKS

# the package of a rank is this one, whatever the current folder holds
RANK = "import sys; sys.path[:] = {!r}; from singa_lite.bench.{} import main; main(*sys.argv[1:])"


def run_command(parser: argparse.ArgumentParser, call: Callable[[], int]) -> int:
    """Return the exit code of ``call``; end this process with the text of its error, 2 for an OptionError, else 1."""
    try:
        return call()
    except OptionError as error:
        parser.error(_text(parser, error))
    except KeyboardInterrupt:
        say(f"{parser.prog}: interrupted")
        return 128 + signal.SIGINT
    except BrokenPipeError:  # the reader of our output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or Python complains at exit
        return 141  # 128 + SIGPIPE, as in a shell
    except (OSError, SingaLiteError) as error:
        is_gone = isinstance(error, FileNotFoundError) and error.filename is None  # of os.getcwd()
        sys.exit(f"{parser.prog}: {'the current folder is gone: ' if is_gone else ''}{_text(parser, error)}")


def _text(parser: argparse.ArgumentParser, error: Exception) -> str:
    """Return the text of ``error``, without the name of the command that stands before it anyway."""
    return str(error).removeprefix(f"{parser.prog.removeprefix('singa-lite ')}: ")


def rank_command(module: str, *arguments: str) -> list[str]:
    """Return the arguments of the Python interpreter that call ``main`` of a module of this folder."""
    return ["-c", RANK.format(sys.path, module), *arguments]


def say(line: str) -> None:
    """Print a line on the error stream, beside the results on the output."""
    print(line, file=sys.stderr, flush=True)


def markdown_table(names: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown: the ``names`` of its columns, and the cells of each row."""
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def read_list(option: str, text: str, known: Collection[str] | None = None) -> list[str]:
    """Return the words of "a,b,c".

    Args:
        option: names it in errors, without "--".
        text: at least one word, none twice.
        known: the words there are; None: any.

    Raises:
        OptionError: another text.
    """
    words = [word.strip() for word in text.split(",")]
    if not all(words):
        raise OptionError(f"bench: --{option} {text!r}: expected names with commas between, and one is empty")
    if len(set(words)) < len(words):
        raise OptionError(f"bench: --{option} {text} has one twice; leave it out")
    for word in words:
        if known is not None and word not in known:
            raise OptionError(f"bench: --{option}: {word!r} is not known; choose of {', '.join(known)}")
    return words


def check_ranks(command: str, number: int, least: int) -> int:
    """Return a number of ranks; OptionError if it is below ``least``, or a host cannot have so many."""
    if check_int(command, "--ranks", number, least) > MAX_RANKS:
        raise OptionError(f"{command}: --ranks {number}: a host has at most {MAX_RANKS} ranks")
    return number


def read_ints(option: str, text: str) -> list[int]:
    """Return the numbers of "0,1,2"; OptionError for another text, or one with a number twice."""
    try:
        numbers = [int(word) for word in text.split(",")]
    except ValueError:
        raise OptionError(
            f"bench: --{option} {text!r}: expected ints with commas between, as in 0,1,2"
        ) from None
    if len(set(numbers)) < len(numbers):
        raise OptionError(f"bench: --{option} {text} has one twice; leave it out")
    return numbers
