# SPDX-License-Identifier: Apache-2.0
"""What calls.py calls: public functions and classes of modules that a user imports, methods, properties."""

from __future__ import annotations

import importlib
import inspect
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

from singa_lite import autograd, communicators, data, device, gluon, kvstore, layer, opt, singa_wrap
from singa_lite.tensor import Tensor
from tests.autograd.op_samples import SAMPLES
from tools.soak.call_arguments import Values
from tools.soak.call_exceptions import DENIED

MODULES = ["tensor", "autograd", "layer", "model", "opt", "device", "initializer", "data", "checkpoint"]
MODULES += ["communicators", "singa_wrap", "kvstore", "gluon", "gluon.utils"]
MODULES += ["sync.text:read_dist_option", "comm.local:LocalCommunicator"]  # of these one name each
NOT_CALLED = {"__init__", "__new__", "__init_subclass__", "__subclasshook__", "__setattr__", "__delattr__"}
NOT_CALLED |= {
    "__getattr__",
    "__reduce__",
    "__reduce_ex__",
    "__setstate__",
    "__del__",
    "__enter__",
    "__exit__",
    "__class__",
    "__dict__",
    "__weakref__",
}


@dataclass
class Target:
    """Something to call.

    Attributes:
        name: as the report says it.
        make: returns what to call, given Values; each call gets a new one.
        samples: calls that are right, as (arguments, options) given Values; drawn from the signature if there are none.
    """

    name: str
    make: Callable[[Values], Callable[..., Any]]
    samples: list[Callable[[Values], tuple[list[Any], dict[str, Any]]]] = field(default_factory=list)


def targets(modules: list[str] | None = None) -> list[Target]:
    """Return all targets in a fixed order; those of ``modules`` alone if any are named."""
    found: dict[str, Target] = {}
    for entry in modules or [f"singa_lite.{name}" for name in MODULES]:
        name, _, only = entry.partition(":")
        for key, value in _public(importlib.import_module(name)):
            if only and key != only:
                continue
            path = f"{name.removeprefix('singa_lite.')}.{key}"
            if callable(value) and path not in DENIED and not inspect.isabstract(value):
                found[path] = Target(path, partial(_given, value))
    if not modules:
        for sample in SAMPLES:
            found[f"autograd.{sample.op}"].samples.append(_operator_call(sample))
        for target in _methods():
            found[target.name] = target
    return [found[name] for name in sorted(found)]


def _given(value: Any, values: Values) -> Any:
    return value


def _public(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """Yield what a module names in ``__all__``, else the public names that it or a module below it defines."""
    for name in getattr(module, "__all__", None) or sorted(vars(module)):
        value = getattr(module, name)
        origin = str(getattr(value, "__module__", ""))
        is_own = hasattr(module, "__all__") or f"{origin}.".startswith(f"{module.__name__}.")
        if not name.startswith("_") and is_own and not isinstance(value, ModuleType):
            yield name, value


def _operator_call(sample: Any) -> Callable[[Values], tuple[list[Any], dict[str, Any]]]:
    """Return what makes the arguments of a row of the table of operators."""

    def draw(values: Values) -> tuple[list[Any], dict[str, Any]]:
        dtype = values.rng.choice(["float32", "float32", "float16", "float64"])
        tensors = [
            Tensor(data=array, dtype=sample.dtype_of(index, dtype) if array.dtype.kind == "f" else None)
            for index, array in enumerate((*sample.inputs, *sample.fixed))
        ]
        return [tensors] if sample.takes_list else tensors, dict(sample.attributes)

    return draw


# ---- methods -----------------------------------------------------------------------------------------------


def _methods() -> Iterator[Target]:
    """Yield a target for each method and each property that can be set, once for the class that defines it."""
    makers: dict[str, list[tuple[Callable[[Values], Any], str]]] = {}
    for make in OBJECTS:
        kind = type(make(Values(random.Random(0))))
        for name in dir(kind):
            owner = next(base for base in kind.__mro__ if name in vars(base))
            is_public = not name.startswith("_") or (name.endswith("__") and name not in NOT_CALLED)
            if not is_public or not owner.__module__.startswith("singa_lite"):
                continue
            member = vars(owner)[name]
            path = f"{owner.__module__.removeprefix('singa_lite.')}.{owner.__name__}.{name}"
            if isinstance(member, property) or hasattr(member, "__set__"):
                makers.setdefault(path, []).append((make, name))
                if getattr(member, "fset", True) is not None:
                    makers.setdefault(f"{path}=", []).append((make, f"{name}="))
            elif inspect.isroutine(getattr(kind, name)):
                makers.setdefault(path, []).append((make, name))
    for path, entries in makers.items():
        if path not in DENIED:
            yield Target(path, partial(_one_bound, entries))


def _one_bound(entries: list[tuple[Callable[[Values], Any], str]], values: Values) -> Callable[..., Any]:
    make, name = values.rng.choice(entries)
    return _bound(make, name, values)


def _bound(make: Callable[[Values], Any], name: str, values: Values) -> Callable[..., Any]:
    """Return the method of a new object, or a function that reads or sets a property of it."""
    owner = make(values)
    member = getattr(type(owner), name.removesuffix("="), None)
    if name.endswith("="):

        def set_attribute(value):  # type: ignore[no-untyped-def]
            setattr(owner, name[:-1], value)

        return set_attribute
    if isinstance(member, property) or not callable(member):
        return lambda: getattr(owner, name)
    found: Callable[..., Any] = getattr(owner, name)
    return found


def used(make: Callable[[Values], Any], *inputs: Callable[[Values], Any]) -> Callable[[Values], Any]:
    """Return what makes a layer that was called once, mostly: it has its parameters then."""

    def draw(values: Values) -> Any:
        made = make(values)
        if values.rng.random() < 0.6:
            made(*(each(values) for each in inputs))
        return made

    return draw


def trained(optimizer: opt.Optimizer, values: Values) -> opt.Optimizer:
    """Return the optimizer, which knows a parameter, mostly."""
    if values.rng.random() < 0.7:
        optimizer.set_parameters({"W": Tensor((2, 3), stores_grad=True)})
    return optimizer


def parallel(kind: type[Any], values: Values) -> Any:
    """Return a communicator of nnabla's that was initialised and has a copy of a model, mostly."""
    made = kind()
    if values.rng.random() < 0.8:
        made.init()
        made.add_context_and_parameters((None, {"W": Tensor((2, 3), stores_grad=True)}))
    return made


def store(values: Values) -> kvstore.KVStoreBase:
    """Return a store with a key, mostly."""
    made: Any = kvstore.create("local")
    if values.rng.random() < 0.8:
        made.init(values.rng.choice([0, "a"]), np.zeros((2, 3), np.float32))
    return made


def normal(*shape: int) -> Callable[[Values], Tensor]:
    return lambda values: Tensor(shape).gaussian(0, 1)


PLAIN_LAYERS = [
    layer.ReLU,
    layer.Sigmoid,
    layer.Tanh,
    layer.SoftMax,
    layer.Flatten,
    layer.Add,
    layer.Cat,
    layer.Dropout,
]
PLAIN_LAYERS += [
    layer.MeanSquareError,
    layer.SoftMaxCrossEntropy,
    layer.CrossEntropy,
    layer.BinaryCrossEntropy,
]
POOLING_LAYERS = [layer.MaxPool1d, layer.AvgPool1d, layer.MaxPool2d, layer.AvgPool2d]
OPTIMIZERS = [opt.SGD, opt.Adam, opt.AdamW, opt.RMSProp, opt.AdaGrad]
ROWS, IMAGE = normal(2, 3), normal(2, 4, 5, 5)
OBJECTS: list[Callable[[Values], Any]] = [
    Values.tensor,
    Values.recorded,
    Values.model,
    Values.communicator,
    lambda v: device.get_default_device(),
    lambda v: autograd.Operator(),
    lambda v: autograd.Context(device.get_default_device(), (True,)),
    lambda v: layer.Layer(),
    used(lambda v: layer.Linear(2), ROWS),
    used(lambda v: layer.Gemm(2), ROWS),
    used(lambda v: layer.Embedding(4, 2), lambda v: Tensor((2,), dtype="int32")),
    used(lambda v: layer.MultiHeadAttention(2), normal(2, 3, 4)),
    used(lambda v: layer.Conv2d(2, 3, padding=1), IMAGE),
    used(lambda v: layer.SeparableConv2d(2, 3), IMAGE),
    used(lambda v: layer.BatchNorm2d(), IMAGE),
    used(lambda v: layer.LayerNorm(), ROWS),
    used(lambda v: layer.LSTM(3, 2), lambda v: [ROWS(v)], lambda v: (normal(2, 2)(v), normal(2, 2)(v))),
    used(lambda v: layer.RNN(3, 2), lambda v: [ROWS(v)], normal(2, 2)),
    used(lambda v: layer.CudnnRNN(2), normal(2, 3, 4)),
    *(lambda v, kind=kind: kind() for kind in PLAIN_LAYERS),
    *(lambda v, kind=kind: kind(2) for kind in POOLING_LAYERS),
    lambda v: layer.Reshape(),
    *(lambda v, kind=kind: trained(kind(0.1), v) for kind in OPTIMIZERS),
    lambda v: trained(opt.DistOpt(opt.SGD(0.1), communicator=v.communicator()), v),
    lambda v: opt.ExponentialDecay(0.1, 2, 0.5),
    lambda v: opt.Constant(0.1),
    lambda v: data.ShardedSampler(12, 2, 0, 1),
    lambda v: data.SplitSampler(12, 2, 0),
    lambda v: data.batches(data.SplitSampler(12, 2, 0), 2),
    lambda v: v.communicator().all_reduce(np.zeros(2, np.float32), "sum"),
    lambda v: parallel(communicators.DataParallelCommunicator, v),
    lambda v: parallel(communicators.MultiProcessDataParallelCommunicator, v),
    lambda v: singa_wrap.Communicator(4),
    lambda v: singa_wrap.NcclIdHolder(),
    store,
    lambda v: gluon.Trainer({"W": Tensor((2, 3), stores_grad=True)}, "sgd", {"learning_rate": 0.1}),
]
