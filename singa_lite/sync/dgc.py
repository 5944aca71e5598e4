# SPDX-License-Identifier: Apache-2.0
"""dgc: the largest elements of what momentum has summed up are sent (Deep Gradient Compression).

Note [velocity]: on each rank u = m u + g and v = v + u (Nesterov: v + g + m u); the K largest of v are sent, and there
v becomes 0 and, with masking, u too. The mean over the ranks is a velocity: the optimizer applies it without momentum,
and keeps for the weight decay a velocity of its own, dense and equal on all ranks (``Optimizer.update_velocity``).
Momentum is linear: what the optimizer's slot holds when dgc takes over goes on there, and with K = n and without
masking the sum is SGD's own step.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from math import sqrt
from types import MappingProxyType
from typing import Any

from ..errors import CheckpointError, OptionError, check_choice, check_int, check_number
from ..graph.recorder import bookkeep
from ..tensor import Tensor
from .base import Array, StepContext
from .buckets import Bucket, BucketedSync, Exchange
from .clip import clip_factors
from .sparse import VALUES, SparseMessage
from .sparse_top_k import check_share, send_top_k
from .state import Slot

LADDER = (0.25, 0.0625, 0.015625, 0.004)  # densities of the warm-up: few, as each has a record of its own


class Dgc(BucketedSync):
    """The ``density`` share of each group's largest velocities, see Note [velocity].

    Source: Lin et al., "Deep Gradient Compression", 2018; the ladder of densities is theirs.
    """

    names = ("dgc",)
    counter_kinds = "iu"
    is_recordable = True
    sums_residuals = True
    is_selective = True
    keeps_velocity = True
    slots = MappingProxyType({"velocity": Slot(), "residual": Slot()})

    @dataclass(frozen=True)
    class Options:
        """Options of dgc.

        Attributes:
            density: share of the elements to send, 0 < density <= 1.
            warmup: steps, from dgc's first on, in which the share falls to ``density`` by a ladder of larger ones.
            momentum: sum up by the optimizer's momentum before sending; False leaves the momentum to the optimizer.
            mask: forget the velocity of what was sent.
            clip: scale the rank's gradient down to the norm clip / sqrt(ranks) first; None does not.
            values: "own" sends them in their dtype, "fp16" rounded; what that loses is kept.
        """

        density: float = 0.001
        warmup: int = 0
        momentum: bool = True
        mask: bool = True
        clip: float | None = None
        values: str = "own"

        def __post_init__(self) -> None:
            check_share("dgc", "density", self.density)
            check_int("dgc", "warmup", self.warmup, 0)
            check_choice("dgc", "values", self.values, VALUES)
            if self.clip is not None and not check_number("dgc", "clip", self.clip) > 0:
                raise OptionError(f"dgc: clip = {self.clip} must be > 0, or None")

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._first: int | None = None  # the step at which it began
        self._has_momentum: bool | None = None  # whether ``Options.momentum`` was on then
        self._density = 1.0  # of the step that runs
        self._held: list[tuple[Tensor, Tensor]] = []  # gradients that wait for the norm of all
        self._factors: dict[Any, Array] = {}  # by dtype: what gradients are clipped by in this step

    @classmethod
    def takes_momentum(cls, options: Any) -> bool:
        return bool(options.momentum)

    def step_key(self, step: StepContext) -> Hashable:
        return self._density_at(step)  # Nesterov's rule is a guard of SGD's own

    def _density_at(self, step: StepContext) -> float:
        """Return the share to send: for each rung of the ladder above ``density`` as many steps, and then that.

        Where the warm-up does not divide evenly, the smaller shares have a step more. Before the step at which it
        began, to which a counter may have been set back, it is as then.
        """
        done = max(0, step.step - (step.step if self._first is None else self._first))
        rungs = [share for share in LADDER if share > step.options.density]
        if done < step.options.warmup and rungs:
            return rungs[((done + 1) * len(rungs) - 1) // step.options.warmup]
        return float(step.options.density)

    def begin(self, step: StepContext, read: Callable[[], StepContext] | None = None) -> None:
        super().begin(step, read)
        bookkeep(self._note_start, step.options.momentum)  # at replays too: other states may be loaded
        self._density = self._density_at(step)
        self._held, self._factors = [], {}

    def _note_start(self, has_momentum: bool) -> None:
        """Note the first step, and whether it has momentum; OptionError where a later one differs in that."""
        if self._first is None:
            self._first, self._has_momentum = self.now().step, has_momentum
        if has_momentum != self._has_momentum:
            raise OptionError(
                f"dgc: momentum = {has_momentum}, but it began with {self._has_momentum}, and velocities that were "
                "summed up so far would be lost; make another DistOpt"
            )

    def add_gradient(self, param: Tensor, grad: Tensor) -> None:
        if self.options.clip is None:
            super().add_gradient(param, grad)
        else:
            self._held.append((param, grad))

    def finish(self) -> Iterator[tuple[Tensor, Tensor]]:
        held, self._held = self._held, []
        if held:
            self._factors = clip_factors(
                [grad for _, grad in held], self.options.clip / sqrt(self.communicator.size)
            )
        for pair in held:
            super().add_gradient(*pair)
        yield from super().finish()
        self._factors = {}  # of this step alone

    def exchange(self, bucket: Bucket) -> Exchange:
        run, flat = bucket.backend.run, bucket.flat
        velocity, residual = self.state.of(bucket)
        if self._factors:
            run("mul", flat, self._factors[bucket.dtype], out=flat)
        self._accumulate(bucket, velocity, residual)
        values = self.options.values
        message = SparseMessage(
            self.communicator, bucket.backend, flat, residual, bucket.name, values, source=residual
        )
        work = send_top_k(message, self._density)
        if self.options.momentum:
            # what is not finite has been sent, NaN first, and must not come again
            run("finite_or_zero", velocity, out=velocity)
            if self.options.mask:
                run("scatter_fill", message.indices, out=velocity, value=0.0)
        yield work
        message.merge(1.0 / self.communicator.size)

    def _accumulate(self, bucket: Bucket, velocity: Array, residual: Array) -> None:
        """Add the bucket's gradients to both, as Note [velocity] says: an optimizer's step at a learning rate of -1."""
        run, out = bucket.backend.run, (residual, velocity)
        if not self.options.momentum:
            run("add", residual, bucket.flat, out=residual)
            return
        momentum = self.scalar(lambda step: step.rule.momentum)
        if self.now().rule.is_nesterov:
            run("nesterov_update", bucket.flat, out=out, lr=-1.0, momentum=momentum)
        else:
            run("momentum_update", bucket.flat, out=out, lr=-1.0, momentum=momentum, gain=1.0)

    def counters(self) -> dict[str, float]:
        if self._first is None or self._has_momentum is None:
            return {}
        return {"first step": self._first, "has momentum": int(self._has_momentum)}

    def set_counters(self, counters: dict[str, Any]) -> None:
        if counters and set(counters) != {"first step", "has momentum"}:
            raise CheckpointError(f"dgc: {sorted(counters)[:3]} are not its counters")
        self._first = int(counters["first step"]) if counters else None
        self._has_momentum = bool(counters["has momentum"]) if counters else None
