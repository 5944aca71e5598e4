# SPDX-License-Identifier: Apache-2.0
"""SGD that leaves its momentum to somebody else takes the same steps as SGD, weight decay included."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from singa_lite import opt
from singa_lite.errors import OptionError
from singa_lite.tensor import Tensor, to_numpy

STEPS = 12
SETTINGS = {
    "momentum": {"momentum": 0.9, "weight_decay": 0.1},
    "Nesterov": {"momentum": 0.8, "weight_decay": 0.1, "nesterov": True},
    "without decay": {"momentum": 0.9},
    "without momentum": {"weight_decay": 0.1},
    "schedules": {
        "lr": opt.ExponentialDecay(0.1, 3, 0.5),
        "momentum": opt.ExponentialDecay(0.9, 5, 0.9),
        "weight_decay": opt.ExponentialDecay(0.1, 4, 0.8),
    },
}


def gradient(step: int) -> np.ndarray:
    return np.random.default_rng(step).standard_normal(50)


def reference(settings: dict) -> np.ndarray:
    """SGD in float64."""
    p, v = np.linspace(-1, 1, 50), np.zeros(50)
    for step in range(STEPS):
        lr, m, decay = (
            value(step) if callable(value) else value
            for value in (settings.get(k, d) for k, d in (("lr", 0.1), ("momentum", 0), ("weight_decay", 0)))
        )
        g = gradient(step) + decay * p
        v = m * v + g
        p = p - lr * (g + m * v if settings.get("nesterov") else v)
    return p


@pytest.mark.parametrize("begin", [0, 5])
@pytest.mark.parametrize("name", SETTINGS)
def test_velocities_and_gradients_lead_to_the_same_parameters(name: str, begin: int) -> None:
    """From step ``begin`` on the momentum is applied by the test: what the slot holds then goes on."""
    sgd = opt.SGD(**SETTINGS[name])
    p, u = Tensor(data=np.linspace(-1, 1, 50), name="p"), np.zeros(50)
    for step in range(STEPS):
        g = gradient(step)
        if step < begin:
            sgd.update_pairs([(p, Tensor(data=g))])
        else:
            rule = sgd.momentum_rule(step)
            u = rule.momentum * u + g
            velocity = g + rule.momentum * u if rule.is_nesterov else u
            sgd.update_velocity([(p, Tensor(data=velocity))])
        sgd.step()
    np.testing.assert_allclose(to_numpy(p), reference(SETTINGS[name]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("optimizer", "reason"),
    [
        (opt.SGD(momentum=0.9, dampening=0.5), "SGD: dampening = 0.5 leaves a share"),
        (opt.Adam(), "Adam: has no momentum that a dist_option could take over; use SGD"),
        (opt.RMSProp(), "RMSProp: has no momentum"),
    ],
)
def test_momentum_that_cannot_be_taken_over_is_refused(optimizer: opt.Optimizer, reason: str) -> None:
    with pytest.raises(OptionError, match=reason):
        optimizer.momentum_rule(0)
    if not isinstance(optimizer, opt.SGD):
        with pytest.raises(OptionError, match=reason):
            optimizer.update_velocity([(Tensor((2,)), Tensor((2,)))])


class Signed(opt.SGD):
    def apply(self, param_name: str, param_value: Tensor, param_grad: Tensor) -> None:
        super().apply(param_name, param_value, param_grad)


class Twice(opt.SGD):
    def update_all(self, pairs: Any) -> None:
        super().update_all(pairs)


class Halved(opt.SGD):
    def update_pairs(self, pairs: Any) -> None:
        super().update_pairs([(param, grad * 0.5) for param, grad in pairs])


class Both(Twice):
    def update_velocity(self, pairs: Any) -> None:
        super().update_velocity(pairs)


class Renamed(Twice):
    """Inherits an update of its own."""


@pytest.mark.parametrize(
    ("kind", "named"), [(Signed, "Signed"), (Twice, "Twice"), (Halved, "Halved"), (Renamed, "Twice")]
)
def test_an_sgd_with_an_update_of_its_own_keeps_its_momentum(kind: type[opt.SGD], named: str) -> None:
    with pytest.raises(OptionError, match=f"{kind.__name__}: {named} has an update of its own"):
        opt.DistOpt(kind(0.1, momentum=0.9), dist_option="dgc:0.1")
    assert Both(0.1, momentum=0.9).momentum_rule(0) == (0.9, False)


def test_dampening_is_read_at_the_step() -> None:
    sgd = opt.SGD(momentum=0.9, dampening=opt.ExponentialDecay(1e-300, 1, 1e-30))  # 0 from step 1 on
    with pytest.raises(OptionError, match="dampening = 1e-300"):
        sgd.momentum_rule(0)
    assert sgd.momentum_rule(1) == (0.9, False)
