# SPDX-License-Identifier: Apache-2.0
"""Start the processes of a job again when they have failed: the loop over rounds.

What lives here: whether there is another round, when, with how many ranks, and what was lost. What does not: one round
(one_host.py, several_hosts.py), the checkpoints (../checkpoint/), of which this reads the manifests.

All processes of a round end before the next begins, in a new world; the scripts go on from the newest checkpoint. The
number of restarts counts from the start of the launcher to its end; nothing refills it.
"""

from __future__ import annotations

import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..errors import CheckpointError, OptionError
from ..generation import Manifest, find_generations
from ..path_arguments import why_no_folder
from .hosts import place, without_slot
from .one_host import LaunchOptions, Round, launch_round, open_output, share_cores_of_host
from .several_hosts import Placement, launch_host_round, write_report
from .supervise import DRAIN_S, POLL_S, noted_signals

LONGEST_DELAY_S = 60.0
# Of the number of workers, and variables for all processes
StartRound = Callable[[int, Mapping[str, str]], Round]


@dataclass(frozen=True)
class RestartOptions:
    """When and how a job is started again.

    Attributes:
        max_restarts: how often at most, >= 0.
        checkpoint: folder of the job's checkpoints, SINGA_LITE_CHECKPOINT of the ranks; None: the script knows.
        min_ranks: go on with fewer ranks, but not fewer than these, >= 1, when a rank cannot start, or fails twice
            running before its first step; None: always all.
    """

    max_restarts: int = 0
    checkpoint: Path | None = None
    min_ranks: int | None = None


def check_restart(options: RestartOptions, num_workers: int) -> RestartOptions:
    """Return ``options`` with an absolute path, whose folder is there.

    Raises:
        OptionError: a number is out of range, or ``checkpoint`` is not a folder or cannot be written.
    """
    if options.max_restarts < 0:
        raise OptionError(f"--max-restarts {options.max_restarts}: must be >= 0")
    if options.min_ranks is not None:
        if not 1 <= options.min_ranks <= num_workers:
            raise OptionError(
                f"--min-ranks {options.min_ranks}: must be in 1..{num_workers}, the number of -n"
            )
        if options.max_restarts == 0:
            raise OptionError("--min-ranks: fewer ranks go on after a restart; give --max-restarts too")
    if options.checkpoint is None:
        return options
    folder = options.checkpoint.absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OptionError(
            f"--checkpoint {folder}: cannot be written as a folder: {why_no_folder(error)}"
        ) from error
    return RestartOptions(options.max_restarts, folder, options.min_ranks)


def run_rounds(
    start: StartRound,
    num_workers: int,
    options: RestartOptions,
    report: Callable[[str], None],
    signals: Sequence[int],
) -> int:
    """Run rounds until one ends well, a signal comes, or no restart is left; return the exit code of the last.

    Args:
        start: runs one round.
        num_workers: of the first round.
        options: from ``check_restart``.
        report: writes a line for the user.
        signals: those that have come to this process; it grows.

    Raises:
        CommError: a process of the last round could not be started. BrokenPipeError: the reader of the output has gone.
    """
    environ = {} if options.checkpoint is None else {"SINGA_LITE_CHECKPOINT": str(options.checkpoint)}
    if options.max_restarts and options.checkpoint is None:
        report(
            "no --checkpoint: what the ranks have done is lost at a restart unless the script itself saves it"
        )
    counts_steps = False  # a round has counted some
    lost_at_start: int | None = None  # the worker that failed in the round before, before its first step
    for number in range(options.max_restarts + 1):
        ended = start(num_workers, {**environ, "SINGA_LITE_RESTART": str(number)})
        if ended.code == 0 or signals:
            break
        if number == options.max_restarts:
            if number:
                report(f"no restart is left (--max-restarts {number})")
            break
        before, delay_s = num_workers, _delay(number)
        counts_steps |= any(step is not None for step in ended.steps)
        num_workers, why = _next_size(ended, lost_at_start, before, options.min_ranks)
        lost_at_start = _failed_at_start(ended, before) if num_workers == before else None
        error = f"{ended.error}; " if ended.error else ""
        when = f"in {delay_s:g} s" if delay_s else "now"
        report(
            f"{error}{_loss(ended, options.checkpoint, counts_steps)}; restart {number + 1} of {options.max_restarts} "
            f"{when} with {num_workers} ranks{why}"
        )
        if not _pause(delay_s, signals):
            report(f"no restart, by {signal.Signals(signals[0]).name}")
            return 128 + signals[0]
    if ended.error is not None:
        raise ended.error
    return ended.code


def launch_rounds(
    command: Sequence[str], num_workers: int, options: LaunchOptions, restart: RestartOptions
) -> int:
    """Run ``launch``, and again as ``restart`` says, which ``check_restart`` has returned."""
    options = share_cores_of_host(options, num_workers)
    output = open_output(num_workers, options)

    def start(number: int, environ: Mapping[str, str]) -> Round:
        return launch_round(command, number, _with(options, environ), output, signals)

    with noted_signals() as signals:
        try:
            return run_rounds(start, num_workers, restart, output.report, signals)
        finally:
            output.rest(DRAIN_S)


def launch_host_rounds(
    command: Sequence[str],
    num_workers: int,
    placement: Placement,
    options: LaunchOptions,
    restart: RestartOptions,
) -> int:
    """Run ``launch_host_round``, and again as ``restart`` says, which ``check_restart`` has returned.

    With fewer ranks there is a slot fewer on the host of the one that failed.
    """
    hosts, last, lost_host = list(placement.hosts), num_workers, ""
    first = place(hosts, num_workers, options.num_servers or 0)

    def start(number: int, environ: Mapping[str, str]) -> Round:
        nonlocal hosts, last, lost_host
        if number < last and len(hosts) > 1:
            hosts = without_slot(hosts, lost_host)
        here = replace(placement, hosts=hosts, first=first)
        ended = launch_host_round(command, number, here, _with(options, environ), restart.checkpoint, signals)
        assigned = place(hosts, number, options.num_servers or 0)
        last, lost_host = number, "" if ended.failed is None else assigned[ended.failed]
        return ended

    with noted_signals() as signals:
        return run_rounds(start, num_workers, restart, write_report, signals)


def _with(options: LaunchOptions, environ: Mapping[str, str]) -> LaunchOptions:
    """Return ``options`` with more variables for all processes."""
    return replace(
        options, worker_env={**options.worker_env, **environ}, server_env={**options.server_env, **environ}
    )


def _delay(number: int) -> float:
    """Return the seconds before the restart after round ``number``: 0, 1, 2, 4 and so on."""
    return min(LONGEST_DELAY_S, 2.0 ** min(number - 1, 6)) if number else 0.0


def _pause(seconds: float, signals: Sequence[int]) -> bool:
    """Wait; return False at once when a signal has come."""
    deadline = time.monotonic() + seconds
    while not signals and (left := deadline - time.monotonic()) > 0:
        time.sleep(min(POLL_S, left))
    return not signals


def _failed_at_start(ended: Round, num_workers: int) -> int | None:
    """Return the worker that failed first if it had counted no step; None if it had, or none is known."""
    if ended.failed is None or ended.error is not None or not ended.has_progress:
        return None
    if ended.failed >= num_workers or ended.steps[ended.failed] is not None:  # a server counts none
        return None
    return ended.failed


def _next_size(
    ended: Round, lost_at_start: int | None, num_workers: int, least: int | None
) -> tuple[int, str]:
    """Return with how many workers to go on, and if they are fewer, why.

    Args:
        lost_at_start: ``_failed_at_start`` of the round before.
    """
    fewer, why = num_workers, ""
    if ended.error is not None and ended.failed is not None and ended.failed < num_workers:
        fewer, why = ended.failed, f", as rank {ended.failed} cannot start"
    elif lost_at_start is not None and lost_at_start == _failed_at_start(ended, num_workers):
        fewer, why = num_workers - 1, f", as rank {lost_at_start} failed twice running before its first step"
    if least is None or max(least, fewer) == num_workers:
        return num_workers, ""
    return max(least, fewer), why


def _newest(folder: Path) -> Manifest | None:
    """Return the manifest of the newest whole generation; None if there is none that can be read."""
    try:
        found, _ = find_generations(folder)
    except CheckpointError:
        return None
    return found[0].manifest if found else None


def _loss(ended: Round, folder: Path | None, counts_steps: bool) -> str:
    """Return in words what the end of a round has lost.

    Args:
        counts_steps: this round or one before has counted some: then a round without any has made none.
    """
    reached = max((step for step in ended.steps if step is not None), default=None)
    saved = None if folder is None else _newest(folder)
    seconds = ended.ended_at - ended.started_at
    at = "" if reached is None else f", the ranks were at step {reached}"
    if folder is None:
        return f"lost: unknown without --checkpoint{at}, after {seconds:.1f} s"
    if saved is None:
        return f"lost: all {seconds:.1f} s, as {folder} has no whole checkpoint{at}"
    since = max(0.0, ended.ended_at - max(saved.saved_at, ended.started_at))
    is_known = counts_steps and ended.has_progress
    steps = "an unknown number of" if not is_known else str(max(0, (reached or 0) - saved.step))
    return f"lost: {steps} steps and {since:.1f} s since the checkpoint of step {saved.step}{at}"
