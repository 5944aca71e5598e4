# SPDX-License-Identifier: Apache-2.0
"""The folder of finished runs: one JSON file a run, whose name is a hash of all that could change its numbers.

What lives here: what identifies a run, and reading and writing its file. What does not: training (train.py), and what a
table makes of the numbers (report.py).

Note [identity]: settings, the bytes of the data and of a model's file, environment switches, machine and version
identify a run. Two of one identity would differ in time alone, so a finished one is not repeated; any other has another
file. What a model's file imports is not looked at.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from .. import config
from ..comm.job import threads_per_rank
from ..comm.link import parse_link
from ..errors import CheckpointError, OptionError, check_int, check_number
from ..files import atomic_file, sealed, unsealed
from .datasets import Images
from .models import MODELS, split_name

FORMAT = 3  # of a run's file; another one is another identity
TABLE = "table.json"  # what `bench sync` writes and `bench compare` reads
NAME_CHARACTERS = 16  # of the hash: 64 bits
# switches that do not belong to the environment of a run: its data are hashed, its link is a setting
NOT_HASHED = ("MNIST_DIR", "SINGA_LITE_CACHE", "SINGA_LITE_LINK")


@dataclass(frozen=True)
class Settings:
    """How one run trains.

    Attributes:
        model: one of MODELS, or ``file.py:function``.
        option: the dist_option; "threshold=x" among its options is DistOpt's, see ``split_threshold``.
        seed: 0 .. 2**64 - 1, of initial values and of the order of samples.
        ranks, epochs: >= 1.
        graph: record the steps.
        batch_size: samples a rank and step, >= 1.
        lr, momentum, weight_decay: of SGD, finite, >= 0.
        evaluate_every: steps from one evaluation to the next, >= 1.
        synthetic: made images to train on, see ``DataSet.images``, at least one a rank; 0: the real ones.
        link: the emulated link of each rank, as ``parse_link`` reads it; None: the real ones. Kept as ``Link`` prints
            it, so that one link has one text.
        traced: write what the ranks do, which takes time.

    Raises:
        OptionError: a number out of range, or a text that is not a link.
    """

    model: str
    option: str
    seed: int = 0
    ranks: int = 2
    epochs: int = 2
    graph: bool = False
    batch_size: int = 64
    lr: float = 0.005
    momentum: float = 0.9
    weight_decay: float = 1e-5
    evaluate_every: int = 67
    synthetic: int = 0
    link: str | None = None
    traced: bool = False

    def __post_init__(self) -> None:
        for name in ("ranks", "epochs", "batch_size", "evaluate_every"):
            check_int("bench", name, getattr(self, name), 1)
        for name in ("seed", "synthetic"):
            check_int("bench", name, getattr(self, name), 0)
        if self.seed >= 2**64:  # as of a device's random stream
            raise OptionError(f"bench: seed = {self.seed} must be in 0 .. 2**64 - 1")
        if 0 < self.synthetic < self.ranks:
            raise OptionError(
                f"bench: synthetic = {self.synthetic} images cannot feed {self.ranks} ranks; make at least one a rank"
            )
        if self.link is not None:
            object.__setattr__(self, "link", str(parse_link("bench: link", self.link)))
        for name in ("lr", "momentum", "weight_decay"):
            # infinity and NaN are refused too
            check_number("bench", name, getattr(self, name), 0, sys.float_info.max)


@dataclass(frozen=True)
class Provenance:
    """The machine, software and inputs of runs, see Note [identity].

    Attributes:
        machine: processors, cores that this process may use, system, host.
        software: versions of this package, with a hash of its files, of Python and of numpy.
        inputs: hashes of the data and of the model's file.
        environment: the switches that are set, and the threads of a rank.
    """

    machine: Mapping[str, Any]
    software: Mapping[str, str]
    inputs: Mapping[str, str]
    environment: Mapping[str, str]

    @classmethod
    def here(cls, ranks: int, inputs: Mapping[str, str]) -> Provenance:
        """Return that of this machine, where so many ranks share its cores; ``inputs`` as ``inputs_of`` returns."""
        switches = {name: config.env(name) for name in config.SWITCHES if name not in NOT_HASHED}
        environment = {name: value for name, value in switches.items() if value is not None}
        environment["threads"] = os.environ.get("OMP_NUM_THREADS") or str(threads_per_rank(ranks))
        environment["gpus"] = os.environ.get("CUDA_VISIBLE_DEVICES", "all")
        return cls(machine_facts(), software_facts(), inputs, environment)


def inputs_of(model: str, images: Images) -> dict[str, str]:
    """Return hashes of the data and, unless the model is one of MODELS, of its file; OptionError without that."""
    inputs = {} if model in MODELS else {"model": _hash_of(split_name(model)[0].read_bytes())}
    return {**inputs, "data": _hash_of(*(array.tobytes() for array in images))}


class Runs:
    """The runs in a folder, which is made if it is not there.

    Args:
        folder: where the files are.
        provenance: that of new runs.

    Raises:
        OptionError: it cannot be made, as there is a file of its name, say.
    """

    def __init__(self, folder: Path, provenance: Provenance) -> None:
        self.folder, self.provenance = folder, provenance
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OptionError(
                f"bench: the folder of runs, {folder}, cannot be made ({error.strerror}); name another with --out"
            ) from error

    def path(self, settings: Settings) -> Path:
        """Return the file of a run of these settings and this provenance."""
        text = json.dumps(self._identity(settings), sort_keys=True)
        return self.folder / f"run-{_hash_of(text.encode())}.json"

    def find(self, settings: Settings) -> dict[str, Any] | None:
        """Return what ``add`` was given; None if there is no whole file of such a run.

        Raises:
            OptionError: there is a folder of its name.
        """
        path = self.path(settings)
        if path.is_dir():
            raise OptionError(f"bench: {path} is a folder, expected the file of a run; move it away")
        found = _read(path)
        identity = json.loads(json.dumps(self._identity(settings)))
        if found is None or {**found, "result": None} != {**identity, "result": None}:
            return None
        result = found["result"]
        return result if isinstance(result, dict) else None

    def add(self, settings: Settings, result: Mapping[str, Any]) -> None:
        """Write the file of a finished run, whole or not at all.

        Raises:
            CheckpointError: it cannot be written.
        """
        content = {**self._identity(settings), "result": result}
        with atomic_file(self.path(settings)) as file:
            file.write(sealed(content))

    def foreign(self) -> Iterator[str]:
        """Yield, for each whole run in the folder of another machine or other software, its file and which."""
        here = {"machine": dict(self.provenance.machine), "software": dict(self.provenance.software)}
        for path in sorted(self.folder.glob("run-*.json")):
            content = _read(path) if path.is_file() else None
            if content is None:
                continue
            other = [name for name, value in here.items() if content.get(name) != value]
            texts = [f"{name} {_text(content.get(name))}" for name in other]
            if texts:
                yield f"{path.name}: {'; '.join(texts)}"

    def _identity(self, settings: Settings) -> dict[str, Any]:
        return {"format": FORMAT, "settings": asdict(settings), **asdict(self.provenance)}


def machine_text(provenance: Provenance) -> str:
    """Return machine and software in one line."""
    return f"{_text(provenance.machine)}; {_text(provenance.software)}"


def _text(values: Any) -> str:
    """Return a mapping as words; anything else, of a damaged file, as it prints."""
    if not isinstance(values, Mapping):
        return repr(values)
    return ", ".join(f"{name} {value}" for name, value in values.items())


def _read(path: Path) -> dict[str, Any] | None:
    """Return the values in ``path``; None if there are none or they are damaged."""
    try:
        content = unsealed(path.read_bytes())
    except (FileNotFoundError, CheckpointError):
        return None
    return content if "result" in content else None


def machine_facts() -> dict[str, Any]:
    """Return what times depend on: processors, cores, system, host."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        lines = []
    names = {line.partition(":")[2].strip() for line in lines if line.startswith("model name")}
    return {
        "processor": " + ".join(sorted(names)) or platform.processor() or platform.machine(),
        "cores": threads_per_rank(1),  # all that this process may use
        "system": f"{platform.system()} {platform.machine()}",
        "host": platform.node(),
    }


def software_facts() -> dict[str, str]:
    """Return versions; a hash of the package's files tells apart two states of a checkout with one version."""
    package = Path(__file__).resolve().parents[1]
    files = [
        path for path in sorted(package.rglob("*")) if path.suffix in (".py", ".so", ".h", ".cu", ".cuh")
    ]
    try:
        ours = version("singa-lite")
    except PackageNotFoundError:  # used from a folder on Python's path
        ours = "not installed"
    digest = _hash_of(*(part for path in files for part in (path.name.encode(), path.read_bytes())))
    return {"singa-lite": f"{ours} {digest}", "Python": platform.python_version(), "numpy": np.__version__}


def _hash_of(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:NAME_CHARACTERS]
