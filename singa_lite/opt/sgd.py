# SPDX-License-Identifier: Apache-2.0
"""Stochastic gradient descent with momentum."""

from __future__ import annotations

from ..errors import OptionError, check_bool
from ..graph.recorder import guard, scalar
from .base import MomentumRule, Optimizer, Pairs
from .schedule import Constant, DecayScheduler, ScheduleAttribute


class SGD(Optimizer):
    """v = momentum * v + (1 - dampening) * g with g = grad + weight_decay * p, then p -= lr * v.

    With nesterov p -= lr * (g + momentum * v). v starts at zero, so dampening acts from the first step on; with
    momentum 0, a number and no schedule, it does nothing, as in SINGA.

    Args:
        lr: learning rate, >= 0.
        momentum: >= 0; 0 keeps no state.
        dampening: share of the gradient that momentum leaves out.
        weight_decay: >= 0, times the parameter is added to its gradient.
        nesterov: needs momentum > 0 and dampening 0.
        dtype: accepted for SINGA scripts; the momentum has its parameter's dtype.

    Raises:
        OptionError: a value out of range, here or where a schedule gives it. DTypeError: no dtype of a Tensor.

    Source: Sutskever et al., "On the importance of initialization and momentum in deep learning", 2013.
    """

    def __init__(
        self,
        lr: float | DecayScheduler = 0.1,
        momentum: float | DecayScheduler = 0.0,
        dampening: float | DecayScheduler = 0.0,
        weight_decay: float | DecayScheduler = 0.0,
        nesterov: bool = False,
        dtype: object = None,
    ) -> None:
        super().__init__(lr, dtype)
        self.momentum = momentum
        self.dampening = dampening
        self.weight_decay = weight_decay
        self.nesterov = nesterov

    is_recordable = True
    momentum = ScheduleAttribute()
    dampening = ScheduleAttribute()
    weight_decay = ScheduleAttribute()

    def __setattr__(self, name: str, value: object) -> None:
        """Set an attribute; OptionError if it is out of range, or nesterov is left without what it needs."""
        before = vars(self).get(name)
        if name == "nesterov":
            value = check_bool("SGD", name, value)
        elif name == "slot_names" and isinstance(value, (list, tuple)) and self._sums():
            value = tuple(dict.fromkeys((*value, "momentum")))  # it stays
        super().__setattr__(name, value)
        if name not in ("momentum", "dampening", "nesterov"):
            return
        if vars(self).get("nesterov") and (self.momentum.call(0) <= 0 or self.dampening.call(0) != 0):
            vars(self)[name] = before
            raise OptionError("SGD: nesterov needs momentum > 0 and dampening 0")
        if name == "momentum" and value != 0 and not self._sums():
            self.slot_names = (*self.slot_names, "momentum")

    def update_all(self, pairs: Pairs) -> None:
        lr, decay = self.number("lr"), self.number("weight_decay")
        if not self._sums():
            self.run_update("sgd_update", pairs, slots=(), lr=lr, weight_decay=decay)
            return
        guard((id(self), "nesterov"), lambda: self.nesterov)
        if self.nesterov:
            kernel, numbers = "nesterov_update", {"momentum": scalar(self._nesterov_momentum)}
        else:
            kernel = "momentum_update"
            numbers = {"momentum": self.number("momentum"), "gain": scalar(lambda: 1 - self._dampening())}
        self.run_update(kernel, pairs, slots=("momentum",), lr=lr, weight_decay=decay, **numbers)

    def _sums(self) -> bool:
        """Return whether there is, or was, momentum, or a subclass names its slot: one set later goes on from there."""
        return "momentum" in self.slot_names

    def _dampening(self, step: int | None = None) -> float:
        momentum = vars(self).get("momentum")
        has_none = type(momentum) is Constant and momentum.init_value == 0
        return 0.0 if has_none else self.value_of("dampening", step)

    def _nesterov_momentum(self) -> float:
        dampening = self._dampening()
        if dampening != 0:
            raise OptionError(
                f"SGD: dampening = {dampening} at step {self._step_counter}, but nesterov needs 0"
            )
        return self.value_of("momentum")

    def momentum_rule(self, step: int) -> MomentumRule:
        written = ("update_all", "apply", "update_pairs", "update_velocity")
        last = next(kind for kind in type(self).__mro__ if any(name in vars(kind) for name in written))
        if "update_velocity" not in vars(last):
            raise OptionError(
                f"{type(self).__name__}: {last.__name__} has an update of its own, which a dist_option that takes the "
                "momentum over does not call; write update_velocity there too"
            )
        dampening = self._dampening(step)
        if dampening != 0:
            raise OptionError(
                f"SGD: dampening = {dampening} leaves a share of each gradient out, which a dist_option that takes the "
                "momentum over cannot do; set it to 0"
            )
        return MomentumRule(self.value_of("momentum", step), self.nesterov)

    def update_velocity(self, pairs: Pairs) -> None:
        """Do p -= lr * (g + w) with w = momentum * w + weight_decay * p, for velocities g; w is the slot "momentum".

        With nesterov p -= lr * (g + weight_decay * p + momentum * w). So weight decay has its momentum, and what the
        slot held before goes on.
        """
        if not self._sums():
            SGD.update_all(self, pairs)  # without momentum they are one
            return
        guard((id(self), "nesterov"), lambda: self.nesterov)
        kernel = "nesterov_velocity_update" if self.nesterov else "velocity_update"
        lr, momentum, decay = map(self.number, ("lr", "momentum", "weight_decay"))
        self.run_update(kernel, pairs, slots=("momentum",), lr=lr, momentum=momentum, decay=decay)
