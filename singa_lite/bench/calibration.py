# SPDX-License-Identifier: Apache-2.0
"""What one rank's step takes without a network, in a file. measure.py makes one.

The file is JSON, an object with

    compute_s   seconds of forward and backward
    update_s    seconds of the optimizer (0 if it is in compute_s)
    buckets     in the order of backward: {"ready_s": when it is computed, "shapes": of its parameters}
    options     "fp32", "sparseTopK:0.01", ... (as DistOpt takes them): {"compress_s": seconds it adds to a step
                of one rank, "merge_s": seconds for what one rank sent to be added up, 0 if left out,
                "buckets": those of the option, if it groups gradients in another way}
    about       a line of text, "" if left out
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..errors import OptionError, check_int, check_number
from ..files import atomic_file
from .wire_bytes import word_of

LONGEST_S = 1e9  # of what is calibrated, seconds
MOST_ELEMENTS = 1 << 48  # of a parameter


@dataclass(frozen=True)
class BucketShapes:
    """Gradients that are exchanged together, see above."""

    ready_s: float
    shapes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class OptionTimes:
    """Seconds that an option adds to a step, see above."""

    compress_s: float
    merge_s: float = 0.0
    buckets: tuple[BucketShapes, ...] = ()


@dataclass(frozen=True)
class Calibration:
    """Times of one rank, see above."""

    compute_s: float
    update_s: float
    buckets: tuple[BucketShapes, ...]
    options: Mapping[str, OptionTimes] = field(default_factory=dict)
    about: str = ""

    def buckets_of(self, option: str) -> tuple[BucketShapes, ...]:
        """Return the buckets of an option: its own, or else those of all."""
        return self.options[option].buckets or self.buckets


def read_calibration(path: Path) -> Calibration:
    """Return the calibration in a JSON file.

    Raises:
        OptionError: there is none, or a field is missing, unknown or out of range; names the file and the field.
    """
    where = f"calibration {path}"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise OptionError(f"{where}: expected a JSON file: {error}") from error
    return calibration_from(where, found)


def calibration_from(where: str, found: Any) -> Calibration:
    """Return the calibration of an object of JSON.

    Args:
        where: names it in errors.
        found: see above.

    Raises:
        OptionError: a field is missing, unknown or out of range; names the field.
    """
    try:
        fields = _fields(where, found, ("compute_s", "update_s", "buckets", "options"), ("about",))
        options = {name: _option(where, name, given) for name, given in fields["options"].items()}
        buckets = _buckets(where, fields["buckets"])
        times = [check_number(where, name, fields[name], 0, LONGEST_S) for name in ("compute_s", "update_s")]
    except (AttributeError, TypeError) as error:
        raise OptionError(
            f"{where}: options is an object and buckets are lists, as the documentation says"
        ) from error
    if "fp32" not in options or not buckets:
        raise OptionError(
            f"{where}: expected at least one bucket, and fp32 among the options, to compare with"
        )
    return Calibration(times[0], times[1], buckets, options, str(fields.get("about", "")))


def write_calibration(path: Path, calibration: Calibration) -> None:
    """Write a file that ``read_calibration`` reads; CheckpointError if that fails, and an older one stays."""
    with atomic_file(path) as file:
        file.write(json.dumps(asdict(calibration), indent=1).encode() + b"\n")


def _fields(where: str, given: Any, needed: Sequence[str], known: Sequence[str] = ()) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise OptionError(f"{where}: expected an object with {', '.join(needed)}, got {type(given).__name__}")
    for name in needed:
        if name not in given:
            raise OptionError(f"{where}: {name} is missing")
    for name in given:
        if name not in needed and name not in known:
            raise OptionError(f"{where}: {name} is not known; choose of {', '.join([*needed, *known])}")
    return given


def _option(where: str, name: str, given: Any) -> OptionTimes:
    word_of(name)
    where = f"{where}: options: {name}"
    fields = _fields(where, given, ("compress_s",), ("merge_s", "buckets"))
    buckets = _buckets(where, fields.get("buckets", ()))
    compress_s = check_number(where, "compress_s", fields["compress_s"], 0, LONGEST_S)
    merge_s = check_number(where, "merge_s", fields.get("merge_s", 0.0), 0, LONGEST_S)
    return OptionTimes(compress_s, merge_s, buckets)


def _buckets(where: str, given: Any) -> tuple[BucketShapes, ...]:
    return tuple(_bucket(f"{where}: bucket {number}", bucket) for number, bucket in enumerate(given))


def _bucket(where: str, given: Any) -> BucketShapes:
    fields = _fields(where, given, ("ready_s", "shapes"))
    shapes = tuple(tuple(check_int(where, "shapes", size, 1) for size in shape) for shape in fields["shapes"])
    if not shapes:
        raise OptionError(f"{where}: shapes has none; leave a bucket without parameters out")
    for shape in shapes:
        if math.prod(shape) > MOST_ELEMENTS:
            raise OptionError(f"{where}: a shape has more than {MOST_ELEMENTS} elements")
    return BucketShapes(check_number(where, "ready_s", fields["ready_s"], 0, LONGEST_S), shapes)
