# SPDX-License-Identifier: Apache-2.0
"""What is done about gradients with infinities or NaN: ``DistOpt(check_finite=)``, and the scale of a float16 loss.

Note [before the scheme]: the ranks decide when all their gradients are there and before any of them is given to the
scheme, so what a scheme keeps never sees such a number. This costs one collective of 16 bytes a rank, and no gradient
is sent while others are computed.
Note [loss scale]: a float16 loss is multiplied by a power of two before backward, so that small gradients do not vanish
between the operators, and gradients by its inverse after it, both exact. Where one overflows the update is left out and
the scale halved; after GROW_AFTER updates in a row it is doubled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..comm.base import Communicator
from ..errors import CheckpointError, NonFiniteError
from ..graph.recorder import break_graph, host
from ..tensor import Tensor, to_numpy

LARGEST_SCALE = 2.0**15  # float16's largest power of two; the first scale
GROW_AFTER = 2000
PREFIX = "finite/"  # of states


class FiniteCheck:
    """Looks for numbers that are not finite in the gradients of all ranks.

    Args:
        mode: "raise" a NonFiniteError on all ranks, or "skip" the update on all.
        drop_sums: called before it is raised, so that gradients added up with these are not used any more.

    Attributes:
        num_skipped: updates that were left out.
        loss_scale: what a float16 loss is multiplied by.
    """

    def __init__(self, mode: str, communicator: Communicator, drop_sums: Callable[[], None]) -> None:
        self.mode, self._communicator, self._drop_sums = mode, communicator, drop_sums
        self.num_skipped = 0
        self.loss_scale = LARGEST_SCALE
        self._num_good = 0  # updates since the scale was changed

    def scale_of(self, loss: Tensor) -> float:
        """Return what to multiply the gradient of ``loss`` by."""
        return self.loss_scale if self.mode == "skip" and loss.dtype == np.float16 else 1.0

    def may_update(
        self, pairs: Sequence[tuple[Tensor, Tensor]], names: Sequence[str], step: Callable[[], int]
    ) -> bool:
        """Return whether the update is to be made, the same on all ranks; all of them call it.

        Args:
            pairs: parameters and gradients of this rank.
            names: of the parameters.
            step: gives the number of updates made before.

        Raises:
            NonFiniteError: with "raise", if a gradient of any rank is not finite.
        """
        if self.mode == "skip":
            break_graph("check_finite='skip' decides at each step whether there is an update")
        sums = [_sum(grad) for _, grad in pairs]
        found: str = host(self._decide, sums, [grad for _, grad in pairs], list(names), step)
        return not found

    def _decide(
        self, sums: list[Tensor], grads: list[Tensor], names: list[str], step: Callable[[], int]
    ) -> str:
        """Return what is not finite, or ""; raise it with "raise"."""
        mine = np.array([-1, 0], np.int64)  # number of the parameter, how many elements
        for number, total in enumerate(sums):
            if not np.isfinite(to_numpy(total)).all():  # it is not, or the sum is beyond its dtype
                count = int(np.count_nonzero(~np.isfinite(to_numpy(grads[number]))))
                if count:
                    mine[:] = number, count
                    break
        everyone = self._communicator.all_gather(mine, name="whether gradients are finite").wait()
        assert everyone is not None
        texts = [
            f"{names[number]!r} on rank {rank} ({count} of {grads[number].size()} elements)"
            for rank, (number, count) in enumerate(everyone.tolist())
            if number >= 0
        ]
        if texts and self.mode == "raise":
            self._drop_sums()
            raise NonFiniteError(
                f"DistOpt: the gradient of {', '.join(texts)} is not finite at step {step()}; nothing was updated. "
                "check_finite='skip' leaves such updates out"
            )
        self._count(bool(texts))
        return ", ".join(texts)

    def _count(self, is_skipped: bool) -> None:
        if is_skipped:
            self.num_skipped += 1
            self.loss_scale, self._num_good = max(self.loss_scale / 2, 1.0), 0
            return
        self._num_good += 1
        if self._num_good == GROW_AFTER:
            self.loss_scale, self._num_good = min(self.loss_scale * 2, LARGEST_SCALE), 0

    def state_dict(self) -> dict[str, np.ndarray[Any, Any]]:
        """Return what a checkpoint keeps, equal on all ranks."""
        numbers = (self.num_skipped, self.loss_scale, self._num_good)
        return {PREFIX + "scale": np.array(numbers, np.float64)}

    def check_states(self, states: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Raise CheckpointError unless ``load_state_dict`` can go on from ``states``."""
        for values in states.values():
            if values.shape != (3,) or not np.isfinite(values).all() or not values[1] >= 1.0:
                raise CheckpointError(f"DistOpt: {values} is not what check_finite keeps")

    def load_state_dict(self, states: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Go on from ``state_dict``; without states, as at first."""
        values = states.get(PREFIX + "scale", np.array([0.0, LARGEST_SCALE, 0.0]))
        self.num_skipped, self.loss_scale, self._num_good = int(values[0]), float(values[1]), int(values[2])


def unscale(grad: Tensor, scale: float) -> None:
    """Divide ``grad`` by a power of two, in place."""
    backend = grad.device.backend
    factor = backend.empty((1,), grad.dtype)
    backend.run("fill", out=factor, value=1.0 / scale)
    backend.run("mul", grad.array, factor, out=grad.array)


def _sum(grad: Tensor) -> Tensor:
    """Return the sum of all elements, shape (1,), float32 or wider: not finite if one is not."""
    backend, dtype = grad.device.backend, np.result_type(grad.dtype, np.float32)
    source = grad.array.reshape(-1)
    if dtype != grad.dtype:
        wide = backend.empty(source.shape, dtype)
        backend.run("cast", source, out=wide)
        source = wide
    total = backend.empty((1,), dtype)
    backend.run("sum", source, out=total, axes=(0,), keepdims=True)
    return Tensor.wrap(total, grad.device)
