# SPDX-License-Identifier: Apache-2.0
"""Train a model with several dist_options and seeds, and compare accuracy, bytes and time."""

from __future__ import annotations

import argparse
import json
import math
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..comm.link import link_of_process, parse_link
from ..comm.trace_file import tracing
from ..data.cache import locked
from ..errors import OptionError, check_int, check_number
from ..files import atomic_file
from ..launch.one_host import LaunchOptions, launch
from ..path_arguments import folder
from .command import check_ranks, rank_command, read_ints, read_list, run_command, say
from .datasets import Images, data_set_of
from .models import MODELS, check_model
from .page import page
from .picture import picture
from .report import Result, Results, rows_of, table
from .runs import FORMAT, TABLE, Provenance, Runs, Settings, inputs_of, machine_text
from .train import split_threshold

PAGE, PICTURE = "table.html", "table.png"
SYNTHETIC = 5000  # made images to train on, unless another number is given
EPILOG = """
Each option and seed runs in processes of its own, options alternate. A run that is finished in DIR is not repeated
unless its settings, the data, the machine or the installed version differ. "threshold=x" in an option, as in
partialUpdate:threshold=50000, is that of DistOpt. The target does not change runs: it is read from their evaluations.
"""


def main(arguments: Sequence[str]) -> int:
    """Run ``singa-lite bench sync`` with these arguments; returns the exit code."""
    parser = _parser()
    given = parser.parse_args(arguments)
    return run_command(parser, lambda: compare(plan(given), given.target, given.out, given.data, given.trace))


def plan(given: argparse.Namespace) -> list[Settings]:
    """Return the settings of all runs, in the order in which they run: for each seed all options.

    Raises:
        OptionError: an option, seed or number that no run can have, or one given twice.
    """
    options, seeds = read_list("options", given.options), read_ints("seeds", given.seeds)
    for option in options:
        split_threshold(option)
    check_number("bench", "target", 1.0 if given.target is None else given.target, 0, 1)
    if given.synthetic is not None:
        check_int("bench", "synthetic", given.synthetic, 1)
        if given.data is not None:
            raise OptionError("bench: --data names real images and --synthetic makes others; leave one out")
    check_ranks("bench", given.ranks, 1)
    data_set = data_set_of(given.model)
    link = link_of_process() if given.link is None else parse_link("--link", given.link)
    same = {name: getattr(given, name) for name in ("model", "ranks", "epochs", "graph", "batch_size")}
    same["evaluate_every"], same["weight_decay"] = given.evaluate_every, data_set.weight_decay
    same["lr"] = data_set.lr if given.lr is None else given.lr
    same["synthetic"] = given.synthetic or 0
    same["link"] = None if link is None else str(link)
    same["traced"] = given.trace is not None
    return [Settings(option=option, seed=seed, **same) for seed in seeds for option in options]


def compare(
    settings: Sequence[Settings],
    target: float | None,
    folder: Path,
    data: Path | None = None,
    trace: Path | None = None,
) -> int:
    """Make the runs that are not in ``folder`` yet, and print the table of all.

    Args:
        settings: of the runs, which differ in option and seed alone.
        target: accuracy to reach, 0 to 1; None: no columns of it.
        folder: of the runs' files; table.json in it gets what the table says.
        data: folder of the data; None: their cache.
        trace: of settings that are ``traced``, the file of a single run, see ``_trace_of``.

    Returns:
        0, or the exit code of the run that failed; then there is no table, and the runs before it stay.

    Raises:
        OptionError: there is no such model, or the folder cannot be made. DataError: there are no data.
        CheckpointError: a file cannot be written.
    """
    first = settings[0]
    check_model(first.model)
    images = data_set_of(first.model).images(first.synthetic, data)
    runs = Runs(folder, Provenance.here(first.ranks, inputs_of(first.model, images)))
    results: dict[str, list[dict[str, Any]]] = {each.option: [] for each in settings}
    with locked(folder / "lock"):  # two commands would make the same runs, and disturb each other's times
        for number, each in enumerate(settings, 1):
            start = f"[{number}/{len(settings)}] seed {each.seed} {each.option}"
            result = runs.find(each)
            if result is None:
                with tracing(trace if len(settings) == 1 else _trace_of(trace, each)) as variables:
                    code = _run(each, runs, images, data, variables)
                if code == 128 + signal.SIGINT:
                    raise KeyboardInterrupt
                if code != 0:
                    say(
                        f"{start}: failed with exit code {code}, see above; fix that and call again for the rest"
                    )
                    return code
                result = runs.find(each)
                assert result is not None  # just written
                how = f"{result['train_s']:.1f} s of training"
            else:
                how = f"finished before, {runs.path(each)}"
                how += "" if trace is None else "; its trace is not written again"
            say(f"{start}: accuracy {100 * result['accuracy']:.2f} %, {how}")
            _say_limits(result)
            results[each.option].append(result)
        _report(settings, results, target, runs)
    return 0


def _say_limits(result: Result) -> None:
    for reason in result["break_reasons"]:
        say(f"  steps ran eagerly: {reason}")
    if not result["parts_ms"]:
        say(
            "  the parts of a step are left out: it has several updates, and they are known of the last alone"
        )


def _trace_of(trace: Path | None, settings: Settings) -> Path | None:
    """Return the file for the trace of one of several runs: trace.json becomes trace-fp16-0.json, with the seed."""
    if trace is None:
        return None
    option = re.sub(r"[^\w.=-]", "-", settings.option)
    return trace.with_name(f"{trace.stem}-{option}-{settings.seed}{trace.suffix}")


def _run(
    settings: Settings, runs: Runs, images: Images, data: Path | None, variables: Mapping[str, str]
) -> int:
    """Train in processes of their own and add the run; returns the exit code, and adds nothing if it is not 0.

    ``variables`` are of the ranks' environment.

    Raises:
        OptionError: rank 0 has ended without a result, or the model's file or the package has changed meanwhile.
    """
    # written by rank 0; the run counts when all ranks have ended
    measured = runs.path(settings).with_suffix(".measured")
    measured.unlink(missing_ok=True)
    bar = "bar" if sys.stderr.isatty() else ""
    given = (json.dumps(asdict(settings)), str(measured.resolve()), str(data or ""), bar)
    options = LaunchOptions(num_servers=0, link=settings.link, worker_env=variables)
    try:
        code = launch(rank_command("train", *given), settings.ranks, options)
        if code == 0:
            now = Provenance.here(settings.ranks, inputs_of(settings.model, images))
            _add(settings, runs, measured, now)
        return code
    finally:
        measured.unlink(missing_ok=True)


def _add(settings: Settings, runs: Runs, measured: Path, provenance: Provenance) -> None:
    """Add a run whose processes have all ended well; ``provenance`` is that of now. Raises OptionError, see _run."""
    if provenance != runs.provenance:
        raise OptionError(
            f"bench: the file of {settings.model} or the package has changed while {settings.option} was trained, so "
            "nobody knows what was measured; call again"
        )
    try:
        result = json.loads(measured.read_bytes())
    except (FileNotFoundError, ValueError) as error:
        raise OptionError(
            f"bench: all ranks ended with exit code 0, but rank 0 without a result ({error}); the code of "
            f"{settings.model} must not end the process"
        ) from error
    runs.add(settings, result)


def _report(settings: Sequence[Settings], results: Results, target: float | None, runs: Runs) -> None:
    """Print the table and write it as JSON, HTML and PNG; name the runs in the folder that are left out."""
    first, rows = settings[0], rows_of(results, target, settings[0].synthetic > 0)
    devices = sorted({result["device"] for of_option in results.values() for result in of_option})
    content = {
        "format": FORMAT,
        **asdict(runs.provenance),
        "settings": {name: value for name, value in asdict(first).items() if name not in ("option", "seed")},
        "data": data_set_of(first.model).text(first.synthetic),
        "seeds": _seeds(settings),
        "target": target,
        "devices": devices,
        "rows": _without_nan([asdict(row) for row in rows]),
        "runs": {
            option: [runs.path(each).name for each in settings if each.option == option] for option in results
        },
    }
    heading = _heading(settings, devices, runs.provenance)
    texts = {
        TABLE: json.dumps(content, indent=1, allow_nan=False),
        PAGE: page(rows, results, heading, target),
    }
    for name, text in texts.items():
        with atomic_file(runs.folder / name) as file:
            file.write(text.encode())
    written = [*texts, *_draw(results, heading, runs.folder)]
    foreign = list(runs.foreign())
    if foreign:
        say("not in the table, as they were made elsewhere:\n  " + "\n  ".join(foreign))
    saved = ", ".join(str((runs.folder / name).resolve()) for name in written)
    print(f"{heading}\n\n{table(rows, target)}\n\nsaved: {saved}")


def _without_nan(value: Any) -> Any:
    """Return JSON values with null for NaN and infinities, which JSON has no numbers for."""
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _heading(settings: Sequence[Settings], devices: Sequence[str], provenance: Provenance) -> str:
    """Return lines that say how the runs were made."""
    first = settings[0]
    data_set = data_set_of(first.model)
    return (
        f"{machine_text(provenance)}; {', '.join(devices)}, {provenance.environment['threads']} threads a rank\n"
        f"{first.model}, {first.ranks} ranks, batch {first.batch_size} a rank, {first.epochs} epochs, "
        f"seeds {', '.join(map(str, _seeds(settings)))}, SGD lr {first.lr} momentum {first.momentum} weight decay "
        f"{first.weight_decay}, inputs (pixel / 255 - {_numbers(data_set.mean)}) / {_numbers(data_set.std)}, "
        f"{'recorded' if first.graph else 'eager'} steps\n"
        f"data: {data_set.text(first.synthetic)}; link: {first.link or 'that of the machine'}\n"
        "mean (lowest to highest) of the seeds"
    )


def _draw(results: Results, heading: str, folder: Path) -> list[str]:
    """Write the picture; return its name, or none where matplotlib is not installed, which is said."""
    (folder / PICTURE).unlink(missing_ok=True)  # an older one would show other runs
    drawn = picture(results, heading)
    if drawn is None:
        say(f"no {PICTURE}, as matplotlib is not installed: pip install 'singa-lite[bench]' has it drawn")
        return []
    with atomic_file(folder / PICTURE) as file:
        file.write(drawn)
    return [PICTURE]


def _seeds(settings: Sequence[Settings]) -> list[int]:
    return sorted({each.seed for each in settings})


def _numbers(values: Sequence[float]) -> str:
    return str(values[0]) if len(values) == 1 else str(tuple(values))


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
    add("--lr", type=float, help="learning rate (default 0.005 on MNIST, 0.05 on CIFAR-10)")
    add(
        "--data",
        type=Path,
        metavar="FOLDER",
        help="of the images (default: MNIST_DIR, or a cache, fetched once)",
    )
    add(
        "--synthetic",
        type=int,
        nargs="?",
        const=SYNTHETIC,
        metavar="COUNT",
        help="made images of learnable classes instead, COUNT to train on (default %(const)s), a fifth to test on",
    )
    add(
        "--link",
        metavar="RATE,LATENCY",
        help="emulated link of each rank, as in `singa-lite run`: 100mbit,1ms",
    )
    add(
        "--evaluate-every",
        type=int,
        default=default.evaluate_every,
        metavar="STEPS",
        help="from one evaluation to the next, while the clock stands (default %(default)s)",
    )
    add(
        "--trace",
        type=Path,
        metavar="FILE",
        help="write what each rank did in its steps, as `singa-lite run` does; of several runs FILE-OPTION-SEED",
    )
    add("--out", type=folder, default=Path("runs/bench-sync"), metavar="DIR", help="default %(default)s")
    return parser
