# SPDX-License-Identifier: Apache-2.0
"""What is done about gradients with infinities or NaN: ``DistOpt(check_finite=)``, and the scale of a float16 loss.

Note [before the scheme]: the ranks decide when all their gradients are there and before any of them is given to the
scheme, so what a scheme keeps never sees such a number. This costs one collective of 16 bytes a rank, and no gradient
is sent while others are computed.
Note [loss scale]: a loss in float16, or under ``autocast("fp16")``, is multiplied by a power of two before backward, so
that small gradients do not vanish between the operators, and gradients by its inverse after it, both exact. Where one
overflows the update is left out and the scale halved; after GROW_AFTER updates in a row it is doubled. A replay reads
the scale again, see ``scalar``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..comm.base import Communicator
from ..comm.work import Traffic
from ..dtypes import accumulation_dtype
from ..errors import CheckpointError, NonFiniteError
from ..graph.recorder import fork, host, join, scalar
from ..tensor import Tensor, to_numpy
from ..users_line import warn

LARGEST_SCALE = 2.0**15  # float16's largest power of two; the first scale
GROW_AFTER = 2000
WARN_AFTER = 17  # updates left out in a row: the scale was halved 15 times and is 1 by then
PREFIX = "finite/"  # of states
SCALE = f"{PREFIX}scale"


class FiniteCheck:
    """Looks for numbers that are not finite in the gradients of all ranks.

    Args:
        mode: "raise" a NonFiniteError on all ranks, or "skip" the update on all.
        drop_update: called first in both cases, so that gradients added up with these are not used any more.
        name: gives the name of the collective, which says whose it is.

    Attributes:
        num_skipped: updates left out.
        loss_scale: see Note [loss scale].
        traffic: of the last check, which is not in a step's bytes.
    """

    def __init__(
        self,
        mode: str,
        communicator: Communicator,
        drop_update: Callable[[], None],
        name: Callable[[str], str],
    ) -> None:
        self.mode, self._communicator, self._drop_update, self._name = mode, communicator, drop_update, name
        self.num_skipped = 0
        self.loss_scale = LARGEST_SCALE
        self.traffic = Traffic()
        self._num_good = 0  # updates since the scale was changed
        self._num_in_a_row = 0  # updates left out since the last one that was made, or set_states

    def seed(self, loss: Tensor) -> Tensor:
        """Return the gradient of ``loss`` to begin with, the scale."""
        return _filled(loss, loss.shape, lambda: self.loss_scale)

    def unscaled(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield pairs of parameters and gradients, each gradient divided in place by the scale."""
        factors: dict[Any, Tensor] = {}  # by device and dtype
        for param, grad in pairs:
            key = grad.device, grad.dtype
            if key not in factors:
                factors[key] = _filled(grad, (), lambda: 1 / self.loss_scale)
            grad.device.backend.run("mul", grad.array, factors[key].array, out=grad.array)
            yield param, grad

    def may_update(
        self, pairs: Sequence[tuple[Tensor, Tensor]], names: Mapping[Tensor, str], step: Callable[[], int]
    ) -> bool:
        """Return whether the update is to be made, the same on all ranks, which all call it, and ``end_update`` later.

        Args:
            pairs: parameters and gradients of this rank; those of another may be other ones.
            names: of all parameters, equal on all ranks.
            step: gives the number of updates made before.

        Raises:
            NonFiniteError: with "raise", if a gradient of any rank is not finite.
        """
        grads, indices = [grad for _, grad in pairs], {param: index for index, param in enumerate(names)}
        mine = [indices[param] for param, _ in pairs]
        all_params = [(name, param.size()) for param, name in names.items()]
        arguments = _sums(grads) if grads else None, grads, mine, all_params, step
        if self.mode == "skip":
            return fork(self._decide, *arguments, reason="an update whose gradients are not finite")
        return host(self._decide, *arguments)

    def end_update(self) -> None:
        """End what replays leave out where there is no update."""
        if self.mode == "skip":
            join()

    def _decide(
        self,
        sums: Tensor | None,
        grads: list[Tensor],
        indices: list[int],
        params: list[tuple[str, int]],
        step: Callable[[], int],
    ) -> bool:
        """Return whether all is finite, count that, and with "raise" raise what is not."""
        mine = np.array([-1, 0], np.int64)  # index of the parameter among all, how many elements
        values = () if sums is None else to_numpy(sums)
        for number in np.flatnonzero(~np.isfinite(values)):  # or the sum is beyond its dtype
            count = int(np.count_nonzero(~np.isfinite(to_numpy(grads[number]))))
            if count:
                mine[:] = indices[number], count
                break
        everyone = self._gathered(mine)
        texts = [
            f"{params[index][0]!r} on rank {rank} ({count} of {params[index][1]} elements)"
            for rank, (index, count) in enumerate(everyone.tolist())
            if index >= 0
        ]
        if texts:
            self._drop_update()
        if texts and self.mode == "raise":
            raise NonFiniteError(
                f"DistOpt: the gradient of {', '.join(texts)} is not finite at step {step()}; nothing was updated. "
                "check_finite='skip' leaves such updates out"
            )
        self._count(bool(texts))
        if self._num_in_a_row == WARN_AFTER and self._communicator.rank == 0:
            warn(
                f"DistOpt: {WARN_AFTER} updates in a row were left out, the last because the gradient of "
                f"{', '.join(texts)} is not finite. If parameters, inputs or statistics hold a NaN, no later update "
                "is made either: go on from a checkpoint",
                RuntimeWarning,
            )
        return not texts

    def _gathered(self, mine: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return ``mine`` of all ranks, a row for each; count the traffic."""
        before = self._communicator.traffic.copy()
        everyone = self._communicator.all_gather(mine, name=self._name("whether gradients are finite")).wait()
        assert everyone is not None
        self.traffic = self._communicator.traffic.since(before)
        return everyone

    def _count(self, is_skipped: bool) -> None:
        if is_skipped:
            self.num_skipped += 1
            self._num_in_a_row += 1
            self.loss_scale, self._num_good = max(self.loss_scale / 2, 1.0), 0
            return
        self._num_in_a_row = 0
        self._num_good += 1
        if self._num_good == GROW_AFTER:
            self.loss_scale, self._num_good = min(self.loss_scale * 2, LARGEST_SCALE), 0

    def state_dict(self) -> dict[str, np.ndarray[Any, Any]]:
        """Return what a checkpoint keeps, equal on all ranks."""
        numbers = (self.num_skipped, self.loss_scale, self._num_good)
        return {SCALE: np.array(numbers, np.float64)}

    def check_states(self, states: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Raise CheckpointError unless ``load_state_dict`` can go on from ``states``."""
        for name, values in states.items():
            fits = name == SCALE and values.shape == (3,) and values.dtype.kind == "f"
            if not (fits and np.isfinite(values).all() and values.min() >= 0.0 and values[1] >= 1.0):
                raise CheckpointError(f"DistOpt: {name!r}, {values}, is not what check_finite keeps")

    def load_state_dict(self, states: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Continue from ``state_dict``; without states, as at first."""
        values = states.get(SCALE, np.array([0.0, LARGEST_SCALE, 0.0]))
        self.num_skipped, self.loss_scale, self._num_good = int(values[0]), float(values[1]), int(values[2])
        self._num_in_a_row = 0


def _filled(like: Tensor, shape: tuple[int, ...], read: Callable[[], float]) -> Tensor:
    """Return a Tensor of the dtype and device of ``like`` that is full of a number, which every replay reads again."""
    array = like.device.backend.empty(shape, like.dtype)
    like.device.backend.run("fill", out=array, value=scalar(read))
    return Tensor.wrap(array, like.device)


def _sums(grads: Sequence[Tensor]) -> Tensor:
    """Return the sum of each gradient, shape (count,), float32 or wider: not finite if an element is not."""
    device = grads[0].device
    dtype = max((accumulation_dtype(grad.dtype) for grad in grads), key=lambda each: each.itemsize)
    sums = device.backend.empty((len(grads),), dtype)
    for number, grad in enumerate(grads):
        source = device.backend.astype(grad.array.reshape(-1), dtype)
        device.backend.run("sum", source, out=sums[number : number + 1], axes=(0,), keepdims=True)
    return Tensor.wrap(sums, device)
