# SPDX-License-Identifier: Apache-2.0
"""What a Trainer is given, checked: parameters, an optimizer or the name of one, a batch size.

What lives here: MXNet's names of optimizers and their arguments. What does not: what a Trainer does with them
(trainer.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..dtypes import LARGEST_FLOAT32
from ..errors import OptionError, check_number
from ..opt.base import Optimizer, create
from ..opt.checks import unique_names
from ..opt.dist import DistOpt
from ..tensor import Tensor
from ..tensor.core import check_parameter

# MXNet's name of an optimizer -> ours, and its default learning rate
OPTIMIZERS = {
    "sgd": ("SGD", 0.01),
    "adam": ("Adam", 0.001),
    "adamw": ("AdamW", 0.001),
    "rmsprop": ("RMSProp", 0.001),
    "adagrad": ("AdaGrad", 0.01),
}
ARGUMENTS = {
    **{"learning_rate": "lr", "wd": "weight_decay", "beta1": "beta_1", "beta2": "beta_2"},
    **{"eps": "epsilon", "gamma1": "rho"},
}


def parameters_by_name(params: Mapping[str, Tensor] | Sequence[Tensor]) -> dict[str, Tensor]:
    """Return parameters by name, each once, those of a dict in the order of their names."""
    if isinstance(params, Mapping) and all(isinstance(name, str) for name in params):
        pairs = [(name, params[name]) for name in sorted(params)]
    elif isinstance(params, (list, tuple)) and all(isinstance(param, Tensor) for param in params):
        pairs = [(name, param) for param, name in unique_names(dict.fromkeys(params)).items()]
    else:
        raise OptionError(f"Trainer: params must be a dict by name or a list of Tensors, not {params!r}")
    if not pairs:
        raise OptionError("Trainer: there are no parameters; call model.compile() or a forward pass before")
    found: dict[int, tuple[str, Tensor]] = {}
    for name, param in pairs:
        if not name:
            raise OptionError("Trainer: a name in params is empty; states are saved by it, so give one")
        check_parameter(f"Trainer: {name}", param)
        found.setdefault(id(param), (name, param))
    return dict(found.values())


def optimizer_of(optimizer: str | Optimizer, arguments: Mapping[str, Any] | None) -> Optimizer:
    """Return the optimizer that was given, or made of a name and arguments."""
    if not (arguments is None or isinstance(arguments, Mapping)):
        raise OptionError(f"Trainer: optimizer_params must be a dict, not {arguments!r}")
    if not all(isinstance(name, str) for name in arguments or ()):
        raise OptionError(f"Trainer: optimizer_params must have names, got {arguments!r}")
    if isinstance(optimizer, Optimizer) and arguments:
        raise OptionError("Trainer: optimizer_params are for an optimizer given by name")
    made = _made(optimizer, arguments or {}) if isinstance(optimizer, str) else optimizer
    if not isinstance(made, Optimizer):
        raise OptionError(f"Trainer: optimizer must be a name or an opt.Optimizer, not {made!r}")
    if isinstance(made, DistOpt):
        raise OptionError("Trainer: it sums gradients itself; give it the optimizer that DistOpt wraps")
    return made


def _made(optimizer: str, arguments: Mapping[str, Any]) -> Optimizer:
    """Return the optimizer of a name, ours or MXNet's, with arguments of either."""
    name, lr = OPTIMIZERS.get(optimizer.lower(), (optimizer, None))
    given: dict[str, Any] = {} if lr is None else {"lr": lr}
    for key, value in arguments.items():
        ours = ARGUMENTS.get(key, key)
        if ours != key and ours in arguments:
            raise OptionError(f"Trainer: optimizer_params has {key} and {ours}, which are the same")
        given[ours] = value
    return create(name, **given)


def checked_batch_size(where: str, size: float) -> float:
    """Return a batch size as a float; OptionError unless float32 has it and its reciprocal."""
    smallest = float(np.finfo(np.float32).tiny)
    return check_number(f"Trainer: {where}", "batch_size", size, smallest, LARGEST_FLOAT32)
