# SPDX-License-Identifier: Apache-2.0
"""Train a model with several dist_options and seeds, and compare accuracy, bytes and time."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..checkpoint import atomic_file
from ..comm.launch import LaunchOptions, launch
from ..data.cache import locked
from ..errors import OptionError, SingaLiteError, check_number
from .models import MODELS
from .page import page
from .report import as_json, rows_of, table
from .runs import Place, Runs, Settings, machine_text
from .train import split_threshold

TABLE, PAGE = "table.json", "table.html"
# the package of a rank is this one, whatever the current folder holds
RANK = "import sys; sys.path[:] = {!r}; from singa_lite.bench.train import main; main(*sys.argv[1:])"
EPILOG = """
Each option and seed runs in processes of its own, options in turn. A run that is finished in DIR is not repeated unless
its settings, the data, the machine or the installed version differ. "threshold=x" in an option, as in
partialUpdate:threshold=50000, is that of DistOpt. The target does not change runs: it is read from their evaluations.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``singa-lite bench sync`` with these arguments (None: those of this process); returns the exit code."""
    parser = _parser()
    given = parser.parse_args(arguments)
    try:
        return compare(plan(given), given.target, given.out)
    except OptionError as error:
        parser.error(str(error))
    except BrokenPipeError:  # the reader of our output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or Python complains at exit
        return 141  # 128 + SIGPIPE, as in a shell
    except (OSError, SingaLiteError) as error:
        sys.exit(f"singa-lite bench sync: {error}")


def plan(given: argparse.Namespace) -> list[Settings]:
    """Return the settings of all runs, in the order in which they run: for each seed all options.

    Raises:
        OptionError: an option, seed or number that no run can have, or one given twice.
    """
    options = [option.strip() for option in given.options.split(",")]
    seeds = _ints("seeds", given.seeds)
    for name, values in (("options", options), ("seeds", seeds)):
        if len(set(values)) < len(values):
            raise OptionError(f"bench: --{name} {getattr(given, name)} has one twice; leave it out")
    for option in options:
        split_threshold(option)
    check_number("bench", "target", 1.0 if given.target is None else given.target, 0, 1)
    same = {name: getattr(given, name) for name in ("model", "ranks", "epochs", "graph", "batch_size", "lr")}
    every = {"evaluate_every": given.evaluate_every}
    return [Settings(option=option, seed=seed, **same, **every) for seed in seeds for option in options]


def compare(settings: Sequence[Settings], target: float | None, folder: Path) -> int:
    """Make the runs that are not in ``folder`` yet, and print the table of all.

    Args:
        settings: of the runs, which differ in option and seed alone.
        target: accuracy to reach, 0 to 1; None: no columns of it.
        folder: of the runs' files; table.json in it gets what the table says.

    Returns:
        0, or the exit code of the run that failed; then there is no table, and the runs before it stay.

    Raises:
        OptionError: there is no such model. DataError: there are no data. CheckpointError: a file cannot be written.
    """
    first = settings[0]
    runs = Runs(folder, Place.here(first.model, first.ranks))
    results: dict[str, list[dict[str, Any]]] = {each.option: [] for each in settings}
    with locked(folder / "lock"):  # two commands would make the same runs, and disturb each other's times
        for number, each in enumerate(settings, 1):
            start = f"[{number}/{len(settings)}] seed {each.seed} {each.option}"
            result = runs.find(each)
            if result is None:
                code = _run(each, runs)
                if code != 0:
                    _say(f"{start}: failed with exit code {code}; call again for what is missing")
                    return code
                result = runs.find(each)
                assert result is not None  # just written
                how = f"{result['train_s']:.1f} s of training"
            else:
                how = f"finished before, {runs.path(each)}"
            _say(f"{start}: accuracy {100 * result['accuracy']:.2f} %, {how}")
            for reason in result["break_reasons"]:
                _say(f"  steps ran eagerly: {reason}")
            results[each.option].append(result)
        _report(settings, results, target, runs)
    return 0


def _run(settings: Settings, runs: Runs) -> int:
    """Train in processes of their own and add the run; returns the exit code, and adds nothing if it is not 0."""
    measured = runs.path(settings).with_suffix(
        ".measured"
    )  # by rank 0; the run counts when all ranks have ended
    measured.unlink(missing_ok=True)
    command = ["-c", RANK.format(sys.path), json.dumps(asdict(settings)), str(measured.resolve())]
    code = launch(command, settings.ranks, LaunchOptions(num_servers=0))
    if code == 0:
        try:
            runs.add(settings, json.loads(measured.read_bytes()))
        except (FileNotFoundError, ValueError) as error:
            raise OptionError(
                f"bench: all ranks ended with exit code 0, but rank 0 without a result ({error}); the code of "
                f"{settings.model} must not end the process"
            ) from error
    measured.unlink(missing_ok=True)
    return code


def _report(
    settings: Sequence[Settings],
    results: dict[str, list[dict[str, Any]]],
    target: float | None,
    runs: Runs,
) -> None:
    """Print the table and write it as JSON and HTML; name the runs in the folder that are left out."""
    first, rows = settings[0], rows_of(results, target)
    seeds = sorted({each.seed for each in settings})
    devices = sorted({result["device"] for of_option in results.values() for result in of_option})
    same = {name: value for name, value in asdict(first).items() if name not in ("option", "seed")}
    content = {
        **asdict(runs.place),
        "settings": same,
        "seeds": seeds,
        "target": target,
        "devices": devices,
        "rows": as_json(rows),
        "runs": {
            option: [runs.path(each).name for each in settings if each.option == option] for option in results
        },
    }
    with atomic_file(runs.folder / TABLE) as file:
        file.write(json.dumps(content, indent=1).encode())
    heading = (
        f"{machine_text(runs.place)}; {', '.join(devices)}, {runs.place.environment['threads']} threads a rank\n"
        f"{first.model}, {first.ranks} ranks, batch {first.batch_size} a rank, {first.epochs} epochs, "
        f"seeds {', '.join(map(str, seeds))}, SGD lr {first.lr} momentum {first.momentum} weight decay "
        f"{first.weight_decay}, inputs (pixel / 255 - {first.mean}) / {first.std}, "
        f"{'recorded' if first.graph else 'eager'} steps\n"
        "mean (lowest to highest) of the seeds"
    )
    with atomic_file(runs.folder / PAGE) as file:
        file.write(page(rows, results, heading, target).encode())
    foreign = list(runs.foreign())
    if foreign:
        _say("not in the table, as they were made elsewhere:\n  " + "\n  ".join(foreign))
    saved = ", ".join(str((runs.folder / name).resolve()) for name in (TABLE, PAGE))
    print(f"{heading}\n\n{table(rows, target)}\n\nsaved: {saved}")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _ints(name: str, text: str) -> list[int]:
    """Return the numbers of "0,1,2"."""
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise OptionError(
            f"bench: --{name} {text!r}: expected ints with commas between, as in 0,1,2"
        ) from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="singa-lite bench sync", description=__doc__, epilog=EPILOG)
    add, default = parser.add_argument, Settings("", "")
    add("--model", default=MODELS[0], help=f"{', '.join(MODELS)}, or file.py:function (default %(default)s)")
    add("--options", required=True, metavar="A,B,...", help="dist_options, as in fp32,sparseTopK:0.01")
    add("--ranks", type=int, default=default.ranks, metavar="N", help="ranks of a run (default %(default)s)")
    add("--epochs", type=int, default=default.epochs, metavar="N", help="default %(default)s")
    add("--seeds", default="0", metavar="A,B,...", help="a run each (default %(default)s)")
    add("--graph", action="store_true", help="record the steps")
    add("--target", type=float, metavar="ACCURACY", help="report when it is reached, as in 0.98")
    add(
        "--batch-size", type=int, default=default.batch_size, metavar="N", help="a rank (default %(default)s)"
    )
    add("--lr", type=float, default=default.lr, help="learning rate (default %(default)s)")
    add(
        "--evaluate-every",
        type=int,
        default=default.evaluate_every,
        metavar="STEPS",
        help="from one evaluation to the next, while the clock stands (default %(default)s)",
    )
    add("--out", type=Path, default=Path("runs/bench-sync"), metavar="DIR", help="default %(default)s")
    return parser
