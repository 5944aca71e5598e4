# SPDX-License-Identifier: Apache-2.0
"""What one rank of a run does: train as the Settings say, and, on rank 0, write down what was measured."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from .. import data, tensor
from ..device import create_device
from ..errors import OptionError, is_int_text
from ..files import atomic_file
from ..model import Model
from ..opt import SGD, DistOpt
from ..opt.dist import THRESHOLD
from ..sync.text import read_dist_option
from ..tensor import Tensor
from .datasets import data_set_of
from .models import make_model, step_arguments
from .runs import Settings

Value = TypeVar("Value")
EVAL_BATCH = 500
WARM_STEPS = 10  # whose parts do not count, where there are others: they record and allocate


def main(settings: str, result: str, folder: str, bar: str) -> None:
    """Train as one rank of the world that the environment names.

    Args:
        settings: a Settings as JSON.
        result: the file that rank 0 writes its measurements to, as JSON.
        folder: of the data; "": their cache.
        bar: "bar" has rank 0 show a progress bar, if tqdm is installed; "": none.
    """
    training = RankTraining(Settings(**json.loads(settings)), Path(folder) if folder else None)
    measured = training.run(is_shown=bool(bar) and training.dist.global_rank == 0)
    if training.dist.global_rank == 0:
        with atomic_file(Path(result)) as file:
            file.write(json.dumps(measured).encode())


def split_threshold(option: str) -> tuple[str, int]:
    """Return a dist_option without "threshold=x", which no scheme has as an option, and x; else DistOpt's default.

    Raises:
        OptionError: x is not an int >= 0, or given twice, or the rest is not a dist_option.
    """
    parts = option.split(":")
    given = [part.removeprefix("threshold=") for part in parts if part.startswith("threshold=")]
    if len(given) > 1 or not all(map(is_int_text, given)):
        raise OptionError(f"bench: {option!r} must give threshold once, an int >= 0: threshold=50000")
    rest = ":".join(part for part in parts if not part.startswith("threshold="))
    read_dist_option(rest)
    return rest, int(given[0]) if given else THRESHOLD


class Clock:
    """Seconds of training, without those of evaluations.

    Args:
        now: gives seconds; differences count.

    Attributes:
        seconds: from the making of the clock until it was stopped last.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now, self._since, self.seconds = now, now(), 0.0

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Stop it inside."""
        self.seconds += self._now() - self._since
        yield
        self._since = self._now()


class RankTraining:
    """One rank's model, optimizer and data, and what it has measured.

    Args:
        settings: how to train.
        folder: of the data; None: their cache.

    Attributes:
        dist: the DistOpt.
    """

    def __init__(self, settings: Settings, folder: Path | None = None) -> None:
        self._settings = settings
        self._data_set = data_set_of(settings.model)
        self._option, threshold = split_threshold(settings.option)
        sgd = SGD(lr=settings.lr, momentum=settings.momentum, weight_decay=settings.weight_decay)
        self.dist = DistOpt(sgd, dist_option=self._option, threshold=threshold)
        self._device = create_device(self.dist.local_rank)
        self._device.SetRandSeed(settings.seed)
        self._images = self._data_set.images(settings.synthetic, folder)
        count = len(self._images.train_labels)
        inputs = tensor.zeros((min(settings.batch_size, count), *self._data_set.shape), self._device)
        self._model = make_model(settings.model)
        self._model.set_optimizer(self.dist)
        self._model.compile([inputs], use_graph=settings.graph)
        self._arguments = step_arguments(self._model, self._option)
        world, rank = self.dist.world_size, self.dist.global_rank
        self._sampler = data.ShardedSampler(count, settings.batch_size, rank, world, seed=settings.seed)
        self._step_s: list[float] = []
        self._parts_s: dict[str, list[float | None]] = {}
        self._bytes_sent = 0
        self._evaluations: list[dict[str, Any]] = []

    def run(self, *, is_shown: bool = False) -> dict[str, Any]:
        """Train for all epochs; return what was measured, with the bytes of all ranks.

        Args:
            is_shown: show a progress bar on standard error, if tqdm is installed.

        Returns:
            accuracy: of all test images, after the last step.
            loss: mean over the last epoch's batches and ranks.
            steps, train_s: of the run; seconds of rank 0, without evaluations.
            step_ms: mean over rank 0's steps, as options may do more in some than in others, and the waits for other
                ranks behind them; not those of ``_warm``.
            parts_ms: the same of each part of a step (sync/step_seconds.py); none if a step had several updates.
            bytes_sent: of all steps, of each rank.
            epochs: of each the mean loss, steps, and bytes of all ranks.
            evaluations: of each the steps and train_s before it, the bytes of all ranks until then, and the accuracy.
            num_records: of steps that were replayed.
            break_reasons: why other steps ran eagerly though they were to be recorded.
            device: what rank 0 computed on.
        """
        epochs = []
        self.dist.all_reduce(np.zeros(1))  # all ranks are there
        with _shown(self._settings, len(self._sampler) if is_shown else 0) as advance:
            clock = Clock()
            for epoch in range(self._settings.epochs):
                epochs.append(self._epoch(clock, advance, is_last=epoch == self._settings.epochs - 1))
        with clock.stopped():
            by_rank = np.zeros(self.dist.world_size)
            by_rank[self.dist.global_rank] = self._bytes_sent
            self.dist.all_reduce(by_rank)
        records = self._model.graph_info()
        return {
            "accuracy": self._evaluations[-1]["accuracy"],
            "loss": epochs[-1]["loss"],
            "steps": len(self._step_s),
            "train_s": clock.seconds,
            "step_ms": 1e3 * statistics.fmean(_warm(self._step_s)),
            "parts_ms": self._parts_ms(),
            "bytes_sent": [int(count) for count in by_rank],
            "epochs": epochs,
            "evaluations": self._evaluations,
            "num_records": sum(record.break_reason is None for record in records),
            "break_reasons": sorted({record.break_reason for record in records if record.break_reason}),
            "device": str(self._device),
        }

    def _epoch(self, clock: Clock, advance: Callable[[], object], *, is_last: bool) -> dict[str, Any]:
        settings, images = self._settings, self._images
        before, loss_sum = self._bytes_sent, 0.0
        self._model.train()
        for number, indices in enumerate(self._sampler, 1):
            batch = self._batch(images.train_images, images.train_labels, indices)
            loss_sum += self._step(*batch)
            advance()
            is_end = is_last and number == len(self._sampler)
            if len(self._step_s) % settings.evaluate_every == 0 or is_end:
                self._wait_for_all()
                with clock.stopped():
                    self._evaluate(clock.seconds)
                    self._model.train()
        self._wait_for_all()
        with clock.stopped():
            totals = np.array([loss_sum, self._bytes_sent - before])
            self.dist.all_reduce(totals)
        steps = len(self._sampler)
        loss = float(totals[0]) / (steps * self.dist.world_size)
        return {"loss": loss, "steps": steps, "bytes_sent": int(totals[1])}

    def _wait_for_all(self) -> None:
        """Wait until all ranks have made their steps, as a part of the last one: not every option waits in each."""
        start = time.perf_counter()
        self.dist.all_reduce(np.zeros(1))
        self._step_s[-1] += time.perf_counter() - start

    def _step(self, x: np.ndarray, y: np.ndarray) -> float:
        """Make one step; return the batch's loss. Timed from the call to the loss on the host."""
        inputs, labels = tensor.from_numpy(x, self._device), tensor.from_numpy(y, self._device)
        before, updates = self.dist.total_bytes_sent, self.dist.step_counter
        start = time.perf_counter()
        loss = _loss_of(self._model(inputs, labels, **self._arguments))
        value = float(loss.item())
        self._step_s.append(time.perf_counter() - start)
        if self.dist.step_counter - updates == 1:  # of several they are known of the last one alone
            parts = self.dist.step_seconds
            known = {"wait": self.dist.wait_s} if parts is None else asdict(parts)
            for name, seconds in known.items():
                self._parts_s.setdefault(name, []).append(seconds)
        if len(self._step_s) == 1:
            self._check_option_has_run()
        self._bytes_sent += self.dist.total_bytes_sent - before
        return value

    def _check_option_has_run(self) -> None:
        """Raise OptionError where the model has made its first step without the option: its row would be another's."""
        kind, run = read_dist_option(self._option).scheme, self.dist._schemes.kinds
        if kind not in run:
            names = " and ".join(sorted(other.names[0] for other in run)) or "no dist_option"
            raise OptionError(
                f"bench: {self._settings.model}: train_one_batch ran {names}, expected {kind.names[0]} of "
                f"{self._settings.option!r}; it must call self.optimizer(loss), or have an argument dist_option and "
                "pass it on"
            )

    def _parts_ms(self) -> dict[str, float]:
        """Return the mean of each part that is known of all steps, without the first ones if there are others."""
        steps = len(self._step_s)
        kept = {name: _warm(values) for name, values in self._parts_s.items() if len(values) == steps}
        return {
            name: 1e3 * statistics.fmean(known)
            for name, values in kept.items()
            if len(known := [value for value in values if value is not None]) == len(values)
        }

    def _batch(
        self, images: np.ndarray, labels: np.ndarray, indices: np.ndarray | slice
    ) -> tuple[np.ndarray, np.ndarray]:
        return data.make_batch(images, labels, indices, mean=self._data_set.mean, std=self._data_set.std)

    def _evaluate(self, seconds: float) -> None:
        """Append an evaluation of all test images, of the ranks' average, which training does not go on from."""
        images, labels = self._images.test_images, self._images.test_labels
        share = data.partition(len(labels), self.dist.global_rank, self.dist.world_size)
        correct = 0
        with _averaged(self._model, self.dist):
            self._model.eval()
            for first in range(share.start, share.stop, EVAL_BATCH):
                part = slice(first, min(first + EVAL_BATCH, share.stop))
                x, y = self._batch(images, labels, part)
                out = tensor.to_numpy(self._model(tensor.from_numpy(x, self._device)))
                correct += int(np.count_nonzero(out.argmax(axis=1) == y))
        totals = np.array([correct, self._bytes_sent], np.float64)
        self.dist.all_reduce(totals)
        evaluation = {
            "step": len(self._step_s),
            "seconds": seconds,
            "bytes_sent": int(totals[1]),
            "accuracy": float(totals[0]) / len(labels),
        }
        self._evaluations.append(evaluation)


def _loss_of(returned: Any) -> Tensor:
    """Return the loss of what a model's call returned; OptionError unless that is (output, loss)."""
    if isinstance(returned, (tuple, list)) and len(returned) == 2:
        loss = returned[1]
        if isinstance(loss, Tensor) and loss.size() == 1:
            return loss
    what = f"{len(returned)} values" if isinstance(returned, (tuple, list)) else type(returned).__name__
    raise OptionError(
        f"bench: train_one_batch must return (output, loss), the loss a Tensor of one element; got {what}"
    )


def _warm(values: Sequence[Value]) -> Sequence[Value]:
    """Return the values of steps without those that record and allocate, if there are others."""
    return values[WARM_STEPS:] or values[1:] or values


@contextmanager
def _shown(settings: Settings, steps: int) -> Iterator[Callable[[], object]]:
    """Give what to call after each step: it moves a progress bar over so many steps an epoch, 0 for none."""
    bar = None
    if steps:
        with suppress(ImportError):  # of the extra bench
            from tqdm import tqdm

            # standard error is a pipe to the launcher, which shows bars where its own is a terminal
            title = f"seed {settings.seed} {settings.option}"
            bar = tqdm(total=steps * settings.epochs, desc=title, leave=False, ncols=100, unit="step")
    try:
        yield bar.update if bar is not None else lambda: None
    finally:
        if bar is not None:
            bar.close()


@contextmanager
def _averaged(model: Model, dist: DistOpt) -> Iterator[None]:
    """Inside, ranks that differ, in parameters or in statistics of batch norm, hold their average."""
    states = model.get_states()
    if dist.keeps_equal and len(states) == len(model.get_params()):
        yield
        return
    own = {name: tensor.to_numpy(state) for name, state in states.items()}
    dist.synchronize(model)
    yield
    for name, state in states.items():
        state.copy_from_numpy(own[name])
