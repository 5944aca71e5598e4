# SPDX-License-Identifier: Apache-2.0
"""Random arguments for calls.py: values of any kind, and those that a parameter's annotation asks for.

Sizes are small, so that no honest call takes a second or a gigabyte. No text is the path of a file that exists.
"""

from __future__ import annotations

import inspect
import random
import re
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from singa_lite import autograd, device, kvstore, layer, opt, singa_wrap
from singa_lite.comm.base import World
from singa_lite.comm.local import LocalCommunicator
from singa_lite.model import Model
from singa_lite.tensor import Tensor

USUAL_SHAPES = [(2, 3), (3, 3), (2, 3, 4), (2, 4, 5, 5), (3,)]
SHAPES = [*USUAL_SHAPES, (), (0,), (1,), (2,), (3, 2), (0, 3), (2, 0, 3), (1, 1, 1, 1)]
TENSOR_DTYPES = ["float32", "float32", "float16", "bfloat16", "float64", "int32", "int64"]
ODD_DTYPES = ["uint8", "bool", "complex64", "O", "U3", "S2", "M8[s]", "m8[s]", "i4,f4", ">f4"]
ARRAY_DTYPES = [*TENSOR_DTYPES, *ODD_DTYPES]
INTS = [0, 1, 2, 3, 4, 7, -1, -2, -7, 2**70, -(2**70)]
FLOATS = [0.0, 0.5, 1.0, -1.0, 1e-30, 1e300, float("nan"), float("inf"), -float("inf")]
# what options are called, too: one of those may be asked for in another place
TEXTS = ["a", "W", "fp32", "sum", "-1", "0.5", "name:1:b=2", "sparseTopK:", "dgc:2", "lstm", "local", "skip"]
TEXTS += ["dist", "ä😀", "{}", "%s", "ij,jk->ik", "", "\n", "a\0b", "\ud800", "x" * 300]


class Net(Model):
    """A model that trains."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = layer.Linear(2)
        self.loss = layer.MeanSquareError()

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)

    def train_one_batch(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        out = self.forward(x)
        loss = self.loss(out, y)
        self.optimizer(loss)
        return out, loss


class Values:
    """Draws values from a random stream."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self._usual = rng.choice(USUAL_SHAPES)  # arguments of a call often go together

    # ---- what is asked for ---------------------------------------------------------------------------

    def fitting(self, name: str, annotation: object) -> Any:
        """Return a value that a parameter of this name and annotation might take."""
        if name in NAMED and self.rng.random() < 0.8:
            return NAMED[name](self)
        choices = [part.strip() for part in _alternatives(str(annotation))]
        wanted = self.rng.choice(choices)
        for pattern, draw in ANNOTATED:
            if re.match(pattern, wanted):
                return draw(self)
        return self.any()

    def shape(self) -> tuple[int, ...]:
        return self._usual if self.rng.random() < 0.8 else self.rng.choice(SHAPES)

    def tensor(self) -> Tensor:
        """A float Tensor, mostly; a parameter, or what an operator recorded, at times."""
        dtype = "float32" if self.rng.random() < 0.8 else self.rng.choice(TENSOR_DTYPES)
        values = self._numbers(self.shape(), dtype)
        return Tensor(data=values, dtype=dtype, stores_grad=self.rng.random() < 0.3)

    def recorded(self) -> Tensor:
        """What an operator recorded: a loss, if its shape is ()."""
        parameter = Tensor(data=self._numbers(self.shape(), "float32"), stores_grad=True, name="W")
        before, autograd.training = autograd.training, True
        loss = autograd.reduce_sum(parameter * parameter, keepdims=False)
        autograd.training = before
        return loss if self.rng.random() < 0.7 else parameter * 2

    def array(self) -> Any:
        dtype = self.rng.choice(["float32", "float32", "float64", "int64", "uint8"])
        return self._numbers(self.shape(), dtype)

    def model(self) -> Net:
        """A compiled model with an optimizer, mostly."""
        net = Net()
        if self.rng.random() < 0.9:
            is_alone = self.rng.random() < 0.5
            net.set_optimizer(opt.SGD(0.1) if is_alone else opt.DistOpt(communicator=self.communicator()))
        if self.rng.random() < 0.8:
            net.compile([Tensor((2, 3))], use_graph=self.rng.random() < 0.5)
        return net

    def communicator(self) -> LocalCommunicator:
        return LocalCommunicator(World())

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        param = self.tensor()
        return [(param, param.clone())]

    def some(self, draw: Callable[[], Any]) -> list[Any]:
        return [draw() for _ in range(self.rng.choice([1, 2, 2, 3]))]

    def _numbers(self, shape: tuple[int, ...], dtype: str) -> Any:
        if dtype == "O":
            array = np.empty(shape, object)
            array[...] = self.rng.choice([None, "a", 1, Decimal(1)])
            return array
        values = np.random.default_rng(self.rng.randrange(99)).standard_normal(shape) * 3
        if self.rng.random() < 0.1 and values.size:
            values.flat[0] = self.rng.choice(FLOATS)
        whole = np.dtype(dtype).kind not in "fc" and dtype != "bfloat16"
        with np.errstate(all="ignore"):
            array = np.nan_to_num(np.abs(values), posinf=1, neginf=1).astype("uint8") if whole else values
            array = np.asarray(array, dtype)  # arithmetic of arrays without axes gives scalars
        if self.rng.random() < 0.05:
            array.flags.writeable = False
        return array.T if self.rng.random() < 0.1 else array

    # ---- whatever there is -----------------------------------------------------------------------------

    def any(self) -> Any:
        """Return a value of any kind."""
        return self.rng.choice(ANY)(self)


def _alternatives(annotation: str) -> list[str]:
    """Split "A | B[C | D]" into A and B[C | D]."""
    parts, depth = [""], 0
    for letter in annotation:
        depth += (letter in "[(") - (letter in "])")
        if letter == "|" and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


Draw = Callable[[Values], Any]


def _of(*values: Any) -> Draw:
    return lambda v: v.rng.choice(values)


def _nothing(*arguments: Any, **options: Any) -> None:
    """Do nothing."""


NAMED: dict[str, Draw] = {
    "axis": _of(0, 1, -1, None),
    "axes": _of(0, (0, 1), None, (1, 0)),
    "dtype": _of(*TENSOR_DTYPES, np.float32, np.dtype("int32")),
    "fpath": _of("state.npz", Path("state.npz")),
    "folder": _of("folder", Path("folder")),
    "fname": _of("state.npz"),
    "op": _of("sum", "mean"),
    "dist_option": _of("fp32", "fp16", "sparseTopK:0.5", "dgc:0.5", "localSGD:2", "powerSGD:1", "int8"),
    "kvstore": _of("local", None),
    "optimizer": _of("sgd", "adam", opt.SGD(0.1)),
    "capability": _of("optimizer"),
    "rnn_mode": _of("lstm", "gru", "tanh"),
    "mode": _of("constant", "lstm", "tanh"),
    "loss": Values.recorded,
    "y": lambda v: v.recorded() if v.rng.random() < 0.5 else v.tensor(),
    "xs": lambda v: v.some(v.tensor),
    "dy": _of(None, 1.0),
    "key": _of(0, "a", [0, 1], ["a", "b"]),
    "images": lambda v: v._numbers((3, 1, 4, 4), "uint8"),
    "labels": lambda v: v._numbers((3,), "int64"),
    "indices": lambda v: v._numbers((2,), "int64") % 3,
    "rng": lambda v: np.random.default_rng(1),
    "nonlinearity": _of("tanh", "relu"),
    "num_samples": _of(7, 12),
    "world_size": _of(1, 2, 3),
    "rank": _of(0, 1),
    "root": _of(0),
}
# the beginning of an annotation's alternative -> what to draw
ANNOTATED: list[tuple[str, Draw]] = [
    (r"None", _of(None)),
    (r"bool", _of(True, False)),
    (r"int|Size", _of(1, 2, 3, 4)),
    (r"float|Number|Real|Option", _of(0.5, 0.1, 1.0, 2)),
    (r"str\b", _of(*TEXTS)),
    (r"Tensor|RawOrTensor\b", Values.tensor),
    (r"(Sequence|list|Iterable|tuple)\[(Tensor|RawOrTensor)|RawOrTensors", lambda v: v.some(v.tensor)),
    (r"(Sequence|list|Iterable|tuple)\[(int|Size)|Shape", _of((2, 3), (3, 2), (1, 2), [2], (6,), (-1,))),
    (r"(Sequence|list|Iterable|tuple)\[(float|Number)", _of((0.5,), [1.0, 2.0, 3.0])),
    (r"(Sequence|list|Iterable)\[(Array|np)", lambda v: v.some(v.array)),
    (r"(Sequence|list|Iterable)\[(Device)", lambda v: [device.get_default_device()]),
    (r"(dict|Mapping)\[str, (Tensor|np|RawOrT)|Values", lambda v: {"W": v.tensor()}),
    (r"(dict|Mapping)\[", _of({}, {"learning_rate": 0.1}, {"type": "2bit", "threshold": 0.5})),
    (r"Pairs", Values.pairs),
    (r"Array|np\.ndarray|GivenArray|ArrayLike", Values.array),
    (r"Device", lambda v: device.get_default_device()),
    (r"Optimizer", lambda v: opt.SGD(0.1)),
    (r"Model", Values.model),
    (r"Layer", lambda v: layer.Linear(2)),
    (r"Communicator", Values.communicator),
    (r"DecayScheduler", lambda v: opt.ExponentialDecay(0.1, 2, 0.5)),
    (r"KVStoreBase", lambda v: kvstore.create("local")),
    (r"Callable", _of(_nothing)),
    (r"NcclIdHolder|RendezvousId", lambda v: singa_wrap.NcclIdHolder()),
]
ANY: list[Draw] = [
    _of(None, True, False),
    _of(*INTS),
    _of(*FLOATS, 1j, Fraction(1, 3), Decimal("0.5")),
    _of(*TEXTS),
    _of(b"", b"ab", bytearray(3), memoryview(b"abc")),
    _of([], [1], [1, 2], [None], ["a"], [[1, 2], [3]], [True], [2**70]),
    _of((), (2, 3), (1.5, 2), ((1, 2), (0, 1))),
    _of({}, {"a": 1}, {1: None}, {"W": None}, {"class": "SGD"}),
    _of({1, 2}, frozenset(), range(3), slice(None), Ellipsis),
    lambda v: v._numbers(v.rng.choice(SHAPES), v.rng.choice(ARRAY_DTYPES)),
    lambda v: np.dtype(v.rng.choice(ARRAY_DTYPES)),
    _of(np.float32(0.5), np.int64(2), np.bool_(True), np.float64("nan"), np.str_("a"), np.datetime64(1, "s")),
    lambda v: Tensor(v.rng.choice(SHAPES), dtype=v.rng.choice(TENSOR_DTYPES)),
    Values.tensor,
    Values.recorded,
    lambda v: v.some(v.tensor),
    lambda v: v.some(v.any) if v.rng.random() < 0.5 else tuple(v.some(v.any)),
    lambda v: {"W": v.any()},
    lambda v: {"W": v.tensor()},
    lambda v: device.get_default_device(),
    lambda v: layer.Linear(2),
    lambda v: opt.SGD(0.1),
    Values.model,
    lambda v: opt.DistOpt(communicator=v.communicator()),
    lambda v: opt.ExponentialDecay(0.1, 2, 0.5),
    Values.communicator,
    _of(_nothing, int, Tensor, np, inspect, object()),
    lambda v: iter([1, 2]),
    lambda v: Path("folder"),
    lambda v: np.random.default_rng(1),
]
