# SPDX-License-Identifier: Apache-2.0
"""Gradient accumulation: the mean over several batches, of which one update is made.

What lives here: the sums, and which call of DistOpt makes the update. What does not: what is done with the mean
(dist.py).

Note [sums]: the mean over n calls is the gradient of the mean of their n losses, so a call in which a parameter has no
gradient counts for it as zeros. Sums have arrays of their own, which stay from step to step: no scheme gets one, as
gradients become parts of its messages. Between two updates they are zeros, so that the first call of a sum runs the
same kernels as those after it. The n-th call leaves them alone until its update is made: one that failed can be made
again.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from ..device import Device
from ..dtypes import accumulation_dtype
from ..errors import CheckpointError
from ..graph.recorder import bookkeep, guard_ahead, steps_since_start, unrecorded
from ..tensor import Tensor

Array = Any  # a raw array of the device's backend
Gradients = Iterable[tuple[Tensor, Tensor]]
PREFIX = "accumulate/"  # of states
CALLS, BATCHES, SUM = f"{PREFIX}calls", f"{PREFIX}batches", f"{PREFIX}sum/"


class GradientSums:
    """Sums of gradients over ``num_batches`` calls, in float32 or wider; with 1 they pass as they are. Note [sums]."""

    def __init__(self, num_batches: int) -> None:
        self.num_batches = num_batches
        self._calls = 0  # since this was made, or the number in the sum that was loaded
        self._sums: dict[tuple[Tensor, int], Array] = {}  # by parameter and level, which is 0 here
        self._pending: dict[Tensor, None] = {}  # parameters of the unfinished sum, in the order they came
        self._at_start = frozenset[int]()  # see ``guard``
        self._factors: dict[tuple[Device, str], Array] = {}  # 1 / num_batches

    @property
    def num_calls(self) -> int:
        """Calls in the unfinished sum."""
        return self._calls % self.num_batches

    @property
    def is_last(self) -> bool:
        """Whether the call that runs makes an update."""
        return self.num_calls == self.num_batches - 1

    def guard(self) -> None:
        """Guard, at the start of a call, whether it makes an update, and of which sums."""
        if self.num_batches == 1:
            return
        ahead = steps_since_start(self, self._calls)
        if ahead == 0:
            self._at_start = self._pending_ids()
        guard_ahead(self, ahead, partial(self._kind, ahead, self._at_start))

    def _kind(self, ahead_when_recorded: int, at_start: frozenset[int], ahead: int) -> Hashable:
        """Return what decides the kernels of the call after ``ahead`` others: the sums pending as the step starts."""
        if (self._calls + ahead + 1) % self.num_batches:
            return None
        return at_start if ahead != ahead_when_recorded else self._pending_ids()

    def _pending_ids(self) -> frozenset[int]:
        """Return the ids of the parameters that have a sum, whose order is another one where states were loaded."""
        return frozenset(map(id, self._pending))

    def add(self, gradients: Gradients) -> None:
        """Add the gradients of a call that makes no update: all of them, or none if one raises."""
        by_kind: dict[tuple[Device, str], tuple[list[Array], list[Array]]] = {}
        pairs = list(gradients)
        for param, grad in pairs:
            total = self._sum_of(param)
            grads, totals = by_kind.setdefault((param.device, total.dtype.char), ([], []))
            grads.append(param.device.backend.astype(grad.array, total.dtype))
            totals.append(total)
        for (device, _), (grads, totals) in by_kind.items():
            # an update at a learning rate of -1 adds, all arrays by one kernel
            device.backend.run("sgd_update", *grads, out=tuple(totals), lr=-1.0, weight_decay=0.0)
        bookkeep(partial(self._count, [param for param, _ in pairs]))

    def means(self, gradients: Gradients, params: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the means for the update: as the gradients of its call come, then those of parameters without one.

        The latter in the order of ``params``, all parameters: that of their sums is not in a checkpoint.
        """
        if self.num_batches == 1:
            yield from gradients
            return
        rest = dict(self._pending)
        for param, grad in gradients:
            yield param, self._mean(param, grad, has_sum=param in rest)
            rest.pop(param, None)
        for param in params:
            if param not in rest:
                continue
            backend, total = param.device.backend, self._sums[param, 0]
            grad = Tensor.wrap(backend.empty(param.shape, param.dtype), param.device)
            scaled = grad.array if total.dtype == param.dtype else backend.empty(param.shape, total.dtype)
            backend.run("mul", total, self._factor(param.device, total.dtype), out=scaled)
            if scaled is not grad.array:
                backend.run("cast", scaled, out=grad.array)
            yield param, grad

    def _mean(self, param: Tensor, grad: Tensor, has_sum: bool) -> Tensor:
        """Turn the gradient of the last call into the mean, in place."""
        backend = param.device.backend
        run, wide = backend.run, backend.astype(grad.array, accumulation_dtype(param.dtype))
        if has_sum:
            run("add", wide, self._sums[param, 0], out=wide)
        run("mul", wide, self._factor(param.device, wide.dtype), out=wide)
        if wide is not grad.array:
            run("cast", wide, out=grad.array)
        return grad

    def end(self) -> None:
        """End a call whose update is made: sums are zeros again."""
        if self.num_batches == 1:
            return
        for (param, _), total in self._sums.items():
            if param in self._pending:
                param.device.backend.run("fill", out=total, value=0.0)
        bookkeep(self._clear)

    def _count(self, params: list[Tensor]) -> None:
        self._calls += 1
        self._pending.update(dict.fromkeys(params))

    def _clear(self) -> None:
        self._calls += 1
        self._pending.clear()

    def _sum_of(self, param: Tensor, level: int = 0) -> Array:
        if (param, level) not in self._sums:
            with unrecorded():
                self._sums[param, level] = param.device.backend.zeros(param.shape, self._dtype_of(param))
        return self._sums[param, level]

    def _dtype_of(self, param: Tensor) -> np.dtype[Any]:
        return accumulation_dtype(param.dtype)

    def _factor(self, device: Device, dtype: np.dtype[Any]) -> Array:
        key = device, dtype.char
        if key not in self._factors:
            with unrecorded():
                self._factors[key] = device.backend.empty((), dtype)
                device.backend.run("fill", out=self._factors[key], value=1.0 / self.num_batches)
        return self._factors[key]

    def state_dict(self, names: Mapping[Tensor, str]) -> dict[str, np.ndarray]:
        """Return the unfinished sum of this rank, nothing if there is none; parameters are called by ``names``."""
        if not self.num_calls:
            return {}
        sums = {
            key: param.device.backend.to_numpy(self._sums[param, level])
            for key, (param, level) in self._keys(names).items()
            if self._is_pending(param, level)
        }
        return {CALLS: np.array(self.num_calls), BATCHES: np.array(self.num_batches), **sums}

    def _keys(self, names: Mapping[Tensor, str]) -> dict[str, tuple[Tensor, int]]:
        """Return the parameter and level of every sum that a checkpoint may have, by its key."""
        return {SUM + name: (param, 0) for param, name in names.items()}

    def _is_pending(self, param: Tensor, level: int) -> bool:
        """Return whether the unfinished sum has an array of ``param`` at ``level``."""
        return param in self._pending

    def check_states(self, states: Mapping[str, np.ndarray], names: Mapping[Tensor, str]) -> None:
        """Raise CheckpointError unless ``load_state_dict`` can go on from ``states``."""
        if not states:
            return
        self._check_counts(states)
        known = {key: (param.shape, self._dtype_of(param)) for key, (param, _) in self._keys(names).items()}
        for key, values in states.items():
            if key not in (CALLS, BATCHES) and known.get(key) != (values.shape, values.dtype):
                raise CheckpointError(
                    f"DistOpt: state {key!r}, {values.dtype}{list(values.shape)}, fits no parameter of this model, or "
                    "its sum had another order= when it was saved"
                )

    def _check_counts(self, states: Mapping[str, np.ndarray]) -> None:
        found = [states.get(name, np.array(0)) for name in (BATCHES, CALLS)]
        if any(each.shape != () or each.dtype.kind not in "iu" for each in found):
            raise CheckpointError(f"DistOpt: {BATCHES!r} and {CALLS!r} must be ints, got {found}")
        batches, calls = map(int, found)
        if batches != self.num_batches or not 0 < calls < batches:
            raise CheckpointError(
                f"DistOpt: the states are of {calls} of {batches} calls that make an update, but here "
                f"{self.num_batches} do; give the DistOpt the same accumulate, or the same microbatches on as many "
                "ranks, or save after an update"
            )

    def load_state_dict(self, states: Mapping[str, np.ndarray], names: Mapping[Tensor, str]) -> None:
        """Continue from ``state_dict``, which ``check_states`` has seen; without states a sum begins."""
        for (param, _), total in self._sums.items():
            param.device.backend.run("fill", out=total, value=0.0)
        self._calls, self._pending = int(states.get(CALLS, 0)), {}
        for key, (param, level) in self._keys(names).items():
            if key in states:
                backend = param.device.backend
                backend.run("copy", backend.asarray(states[key]), out=self._sum_of(param, level))
                self._pending[param] = None
