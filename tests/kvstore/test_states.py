# SPDX-License-Identifier: Apache-2.0
"""A file of states whose checksums are right and whose contents are not: refused, and nothing has changed."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from singa_lite.errors import CheckpointError
from singa_lite.model_file import OPTIMIZER_FILE, Checkpoint, write_checkpoint
from tools.soak.file_readers.states import store_state, trained_store, trained_trainer, trainer_state

Arrays = dict[str, np.ndarray[Any, Any]]


def change(
    path: Path, change_head: Callable[[dict[str, Any]], Any], change_arrays: Callable[[Arrays], Any]
) -> None:
    """Write the file again with another head and other arrays."""
    with zipfile.ZipFile(path) as archive, np.load(io.BytesIO(archive.read(OPTIMIZER_FILE))) as found:
        arrays = dict(found)
    head = json.loads(arrays["store"].tobytes())
    change_head(head)
    change_arrays(arrays)
    text = np.frombuffer(json.dumps(head).encode(), np.uint8)
    write_checkpoint(path, Checkpoint({}, optimizer={**arrays, "store": text}))


@pytest.mark.parametrize(
    ("change_head", "change_arrays"),
    [
        (lambda head: head.update(optimizer=[1]), lambda arrays: None),
        (lambda head: head["optimizer"].update(description={"class": 3}), lambda arrays: None),
        (lambda head: head["optimizer"]["description"].update(momentum=0.0), lambda arrays: None),
        (lambda head: head["optimizer"].update(lr="x"), lambda arrays: None),
        (lambda head: None, lambda arrays: arrays.pop("1:residual")),
        (lambda head: None, lambda arrays: arrays.update({"1:residual": np.zeros(3, np.float32)})),
        (lambda head: None, lambda arrays: arrays.pop("1:step_counter")),
        (lambda head: None, lambda arrays: arrays.update({"9" * 5000 + ":x": np.zeros(1)})),
        (
            lambda head: head.update(extra=json.loads("[" * 900 + "]" * 900)),
            lambda arrays: arrays.pop("0:residual"),
        ),
    ],
)
def test_a_store_refuses_it(change_head, change_arrays, tmp_path: Path) -> None:
    store = trained_store(1)
    trained_store(2).save_optimizer_states(tmp_path / "states", dump_optimizer=True)
    change(tmp_path / "states", change_head, change_arrays)
    before = store_state(store)
    with pytest.raises(CheckpointError):
        store.load_optimizer_states(tmp_path / "states")
    assert store_state(store) == before


def test_a_file_written_before_there_were_these_entries_is_read(tmp_path: Path) -> None:
    saved = trained_trainer(2)
    saved.save_states(tmp_path / "states")

    def forget(head: dict[str, Any]) -> None:
        for name in ("compression", "optimizer_class", "reduction"):
            del head[name]

    change(tmp_path / "states", forget, lambda arrays: None)
    trainer = trained_trainer(1)
    trainer.load_states(tmp_path / "states")
    assert trainer.optimizer.step_counter == saved.optimizer.step_counter


WRONG: list[dict[str, Any]] = [{"steps": -1}, {"steps": 1e99}, {"steps": "x"}, {"lr": "x"}, {"lr": -1.0}]


@pytest.mark.parametrize("values", [*WRONG, {"reduction": "mean"}, {"optimizer_class": "RMSProp"}])
def test_a_trainer_refuses_it(values, tmp_path: Path) -> None:
    trainer = trained_trainer(1)
    trained_trainer(2).save_states(tmp_path / "states")
    change(tmp_path / "states", lambda head: head.update(values), lambda arrays: None)
    before = trainer_state(trainer)
    with pytest.raises(CheckpointError):
        trainer.load_states(tmp_path / "states")
    assert trainer_state(trainer) == before
