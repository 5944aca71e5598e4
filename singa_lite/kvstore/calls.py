# SPDX-License-Identifier: Apache-2.0
"""The data of a store's calls: keys, the arrays to push, the Tensors to pull into, and the traffic of messages."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..comm.p2p import MessageTraffic as MessageTraffic
from ..sync.agree import first_difference
from ..tensor import Tensor

Key = int | str
Keys = Key | Sequence[Key]
Path = str | os.PathLike[str]
Array = np.ndarray[Any, Any]
Arrays = dict[str, Array]
States = dict[Key, Arrays]  # of the optimizers, by key and name


@dataclass(frozen=True)
class Spec:
    """The number, shape and dtype of a key's value.

    Attributes:
        key: int or text.
        number: how many keys were made before.
        shape: of the value.
        dtype: of the value, one of float16/32/64 or int32/64.
        size: number of elements.
    """

    key: Key
    number: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    size: int


class Push(NamedTuple):
    """One key's part of a push: its array, or None where this worker adds nothing."""

    spec: Spec
    value: Tensor | None


class Pull(NamedTuple):
    """One key's part of a pull: where its value goes."""

    spec: Spec
    outs: list[Tensor]


@dataclass(frozen=True)
class PushOptions:
    """The options of a push.

    Attributes:
        scale: this worker's factor of its values.
        mean: the sum is divided by the number of workers.
        allow_none: workers may leave keys out. Equal on all workers.
    """

    scale: float = 1.0
    mean: bool = False
    allow_none: bool = False

    def as_json(self) -> dict[str, Any]:
        """Return what must be equal on all workers."""
        return {"mean": self.mean, "allow_none": self.allow_none}


def difference(call: str, one: Mapping[str, Any], worker: int, other: Mapping[str, Any], number: int) -> str:
    """Return the text of what two workers gave a call differently, the first entry that differs."""
    name = first_difference(one, other)
    texts = [
        [str(found[name]), repr(found[name])] if name in found else ["not there"] * 2
        for found in (one, other)
    ]
    first, second = [text[texts[0][0] == texts[1][0]] for text in texts]  # 1 and "1" print alike
    return (
        f"the workers differ in {call}: {name} is {first} on worker {worker} but {second} on worker "
        f"{number}; all workers must call it alike"
    )
