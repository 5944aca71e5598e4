# SPDX-License-Identifier: Apache-2.0
"""Checks of what a script gives a store, before anything moves."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from ..comm.base import DTYPES
from ..device import get_default_device
from ..dtypes import LARGEST_FLOAT32
from ..errors import DTypeError, OptionError, ShapeError, check_bool, check_int, check_number, check_text
from ..graph.memory import address_of
from ..sync.arrays import GivenArray, add_up
from ..tensor import Tensor
from .calls import Key, Keys, Pull, Push, PushOptions, Spec

_KINDS = ({int}, {str})  # of keys
LARGEST_KEY = 2**63 - 1  # of ints
MOST_FOUND = 1000  # lists of keys that are remembered


class Arguments:
    """Checks the arguments of one store's calls.

    Args:
        store: its name, for errors.

    Attributes:
        specs: the keys that there are, in the order in which they were made.
        needs_float32: whether pushes are compressed.
    """

    def __init__(self, store: str) -> None:
        self._name = store
        self.specs: dict[Key, Spec] = {}
        self._found: dict[tuple[Key, ...], list[Spec]] = {}  # of lists of keys that were checked
        self.needs_float32 = False

    def keys(self, where: str, key: Keys) -> list[Key]:
        """Return the keys of a call as a list of ints or of texts, each once."""
        given = _listed(key)
        if not given:
            raise OptionError(f"{self._name}: {where}: give at least one key")
        kinds = {str if isinstance(one, str) else int for one in [*given, *list(self.specs)[:1]]}
        keys = [_checked_key(f"{self._name}: {where}", one) for one in given]
        if len(kinds) > 1:
            raise OptionError(f"{self._name}: {where}: keys are ints or texts, not both: {keys}")
        if len(set(keys)) < len(keys):
            raise OptionError(f"{self._name}: {where}: a key is there twice: {keys}")
        return keys

    def values(self, where: str, key: Keys, value: Any) -> list[list[Any]]:
        """Return the arrays of each key, mostly one; [None] for a key that this worker leaves out."""
        num_keys = len(_listed(key))
        values = _listed(value) if isinstance(key, (list, tuple)) else [value]
        if len(values) != num_keys:
            raise OptionError(f"{self._name}: {where}: {num_keys} keys but {len(values)} values")
        lists = [_listed(one) for one in values]
        if not all(lists):
            raise OptionError(f"{self._name}: {where}: expected a value for each key, got an empty list")
        return lists

    def known(self, where: str, key: Keys) -> list[Spec]:
        """Return what is kept under the keys of a call; OptionError if one was not made."""
        given = tuple(key) if isinstance(key, (list, tuple)) else (key,)
        is_plain = set(map(type, given)) in _KINDS  # so that equal keys are the same ones: True is not 1
        if is_plain and given in self._found:
            return self._found[given]
        keys = self.keys(where, key)
        for one in keys:
            if one not in self.specs:
                raise OptionError(
                    f"{self._name}: {where}: there is no key {one!r}; init() it first, on all workers"
                )
        specs = [self.specs[one] for one in keys]
        if is_plain:
            if len(self._found) == MOST_FOUND:
                self._found.clear()
            self._found[given] = specs
        return specs

    def pushes(
        self, where: str, specs: list[Spec], key: Keys, value: Any, options: PushOptions
    ) -> list[Push]:
        """Return each key with the array to push; a typed error for one that cannot be pushed."""
        pushes = []
        for spec, arrays in zip(specs, self.values(where, key, value), strict=True):
            if options.mean or options.scale != 1:  # with an optimizer all keys are floats
                self.check_float(where, spec)
            if self.needs_float32 and spec.dtype != np.float32:
                raise DTypeError(
                    f"{self._name}: {where}: compression is for float32, and key {spec.key!r} is {spec.dtype}"
                )
            is_left_out = len(arrays) == 1 and arrays[0] is None and options.allow_none
            pushes.append(Push(spec, None if is_left_out else self.like_key(where, spec, arrays)))
        return pushes

    def like_key(self, where: str, spec: Spec, arrays: list[Any]) -> Tensor:
        """Return what is given for a key: an array like the key's, or the sum of several."""
        if len(arrays) == 1 and _is_plain(spec, arrays[0]):
            return Tensor.wrap(arrays[0], get_default_device())
        for array in arrays:
            self._check_like(where, spec, array)
        return self.total(where, spec.key, arrays)

    def pulls(self, where: str, specs: list[Spec], key: Keys, out: Any) -> list[Pull]:
        """Return each key with the Tensors to pull it into; a typed error for arrays that cannot be written."""
        pulls = []
        for spec, arrays in zip(specs, self.values(where, key, out), strict=True):
            outs = []
            for array in arrays:
                if _is_plain(spec, array) and array.flags.writeable:
                    outs.append(Tensor.wrap(array, get_default_device()))
                    continue
                self._check_like(where, spec, array)
                outs.append(GivenArray.of(f"{self._name}: {where}: out of key {spec.key!r}", array).tensor)
            pulls.append(Pull(spec, outs))
        self._check_apart(where, pulls)
        return pulls

    def _check_apart(self, where: str, pulls: list[Pull]) -> None:
        """Raise ShapeError if arrays that values are pulled into overlap, unless they are one array for one key."""
        arrays = [out.array for pull in pulls for out in pull.outs]
        # quick, and true of most: distinct arrays, none of which is a view
        if len(set(map(id, arrays))) == len(arrays) and all(array.base is None for array in arrays):
            return
        spans = sorted(
            {
                (address_of(out.array), out.array.nbytes, pull.spec.number)
                for pull in pulls
                for out in pull.outs
                if pull.spec.size
            }
        )
        for (start, num_bytes, number), (later, _, other) in pairwise(spans):
            if start + num_bytes > later:
                keys = [repr(pull.spec.key) for pull in pulls if pull.spec.number in (number, other)]
                raise ShapeError(
                    f"{self._name}: {where}: arrays of out overlap in memory, of {' and '.join(keys)}; give each value "
                    "an array of its own"
                )

    def _check_like(self, where: str, spec: Spec, array: Any) -> None:
        """Raise unless an array has the shape and dtype of its key."""
        shape, dtype = getattr(array, "shape", None), getattr(array, "dtype", None)
        if not isinstance(shape, (tuple, list)) or dtype is None:
            raise DTypeError(
                f"{self._name}: {where}: key {spec.key!r} needs a Tensor or array, got {type(array).__name__}"
            )
        if tuple(shape) != spec.shape:
            raise ShapeError(
                f"{self._name}: {where}: key {spec.key!r} has shape {spec.shape}, got {tuple(shape)}"
            )
        if dtype != spec.dtype:
            raise DTypeError(f"{self._name}: {where}: key {spec.key!r} is {spec.dtype}, got {dtype}")

    def check_float(self, where: str, spec: Spec) -> None:
        """Raise DTypeError for a key of integers."""
        if spec.dtype.kind != "f":
            raise DTypeError(
                f"{self._name}: {where}: key {spec.key!r} is {spec.dtype}; an optimizer, a scale and a mean need floats"
            )

    def first(self, where: str, key: Key, arrays: list[Any]) -> Tensor:
        """Return the value of a new key; DTypeError if its dtype cannot be sent."""
        value = self.total(where, key, arrays)
        if value.dtype not in DTYPES:
            known = ", ".join(dtype.name for dtype in DTYPES)
            raise DTypeError(f"{self._name}: {where}: key {key!r} is {value.dtype}; use one of {known}")
        return value

    def total(self, where: str, key: Key, arrays: list[Any]) -> Tensor:
        """Return a Tensor around the array of a key, or a new one with the sum of several."""
        given = [
            GivenArray.of(f"{self._name}: {where}: key {key!r}", array, writes=False).tensor
            for array in arrays
        ]
        if len(given) == 1:
            return given[0]
        total = given[0].clone()
        for other in given[1:]:
            if other.shape != total.shape or other.dtype != total.dtype:
                raise ShapeError(
                    f"{self._name}: {where}: the arrays of key {key!r} differ: {total.dtype}{total.shape} and "
                    f"{other.dtype}{other.shape}"
                )
        add_up(total, given[1:])
        return total

    def options(self, where: str, scale: float, mean: bool, allow_none: bool = False) -> PushOptions:
        """Return the options of a push; OptionError for a scale that is not a finite number."""
        factor = check_number(f"{self._name}: {where}", "scale", scale, -LARGEST_FLOAT32, LARGEST_FLOAT32)
        is_mean = check_bool(f"{self._name}: {where}", "mean", mean)
        return PushOptions(factor, is_mean, check_bool(f"{self._name}: {where}", "allow_none", allow_none))


def _checked_key(where: str, key: Any) -> Key:
    """Return a key as an int or a text; OptionError for what is neither, or an int above LARGEST_KEY."""
    if isinstance(key, str):
        return check_text(where, "key", key)
    number = check_int(where, "key", key, 0)
    if number > LARGEST_KEY:
        raise OptionError(f"{where}: a key is an int of at most {LARGEST_KEY}")
    return number


def _listed(given: Any) -> list[Any]:
    return list(given) if isinstance(given, (list, tuple)) else [given]


def _is_plain(spec: Spec, array: Any) -> bool:
    """Return whether an array is numpy's and like its key, as most are, so that it needs no other check."""
    return (
        type(array) is np.ndarray
        and array.shape == spec.shape
        and array.dtype == spec.dtype
        and array.flags.c_contiguous
    )
