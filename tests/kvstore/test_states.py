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

from singa_lite import kvstore, opt
from singa_lite.errors import CheckpointError
from singa_lite.kvstore import KVStore
from singa_lite.model_file import OPTIMIZER_FILE, Checkpoint, read_checkpoint, write_checkpoint
from tests.kvstore.rig import Launch, Rig, caught, run_calls
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
        (lambda head: None, lambda arrays: arrays.update({"1:step_counter": np.array(-1)})),
        (lambda head: head["optimizer"].update(lr=float("inf")), lambda arrays: None),
        (lambda head: head["optimizer"].update(lr=1e300), lambda arrays: None),
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


def test_an_optimizer_for_integers_is_refused(tmp_path: Path) -> None:
    store: Any = kvstore.create("device")
    store.init("a", np.arange(3))
    head = {"optimizer": {"description": opt.SGD(0.1).describe(), "lr": None}}
    store.save_states("save_states", tmp_path / "states", head, lambda: {"a": {"step_counter": np.array(0)}})
    with pytest.raises(CheckpointError, match=r"key 'a' is int64"):
        store.load_optimizer_states(tmp_path / "states")
    store.push("a", np.ones(3, np.int64))
    assert store.optimizer_description is None


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


# ---- in jobs -----------------------------------------------------------------------------------------

SHAPES = {"w": (3, 5), "b": (7,)}  # keys number 0 and 1


def arrays_of(store: KVStore) -> dict[str, list[Any]]:
    return {
        f"{key}:{name}": a.tolist() for key, each in store.get_states().items() for name, a in each.items()
    }


def trained_by_all(rig: Rig) -> KVStore:
    """A store, momenta of which are sums over the workers."""
    store, keys = rig.store(), list(SHAPES)
    store.init(keys, [np.zeros(shape, np.float32) for shape in SHAPES.values()])
    store.set_optimizer(opt.SGD(lr=0.5, momentum=0.5))
    store.push(keys, [np.full(shape, rig.rank + 1, np.float32) for shape in SHAPES.values()])
    return store


def damage(path: Path, what: str) -> None:
    """Write a file again with a count of steps, or a learning rate, that cannot be."""
    arrays = dict(read_checkpoint(path, {}, {}).optimizer or {})
    if what == "steps":
        arrays["1:step_counter"] = np.full_like(arrays["1:step_counter"], -1)
    else:
        head = json.loads(arrays["store"].tobytes())
        head["optimizer"]["lr"] = float("inf")
        arrays["store"] = np.frombuffer(json.dumps(head).encode(), np.uint8)
    write_checkpoint(path, Checkpoint({}, optimizer=arrays))


def refuses(rig: Rig, folder: Path, what: str, dumps: bool) -> list[Any]:
    """Load a file of other states that is damaged; return the error, and the values after one more push."""
    store, path = trained_by_all(rig), folder / f"{what}-{dumps}-{rig.num_servers}"
    store.set_learning_rate(0.125)
    store.save_optimizer_states(path, dump_optimizer=dumps)
    store.set_learning_rate(0.25)
    store.push(list(SHAPES), [np.full(shape, rig.rank + 1, np.float32) for shape in SHAPES.values()])
    if rig.rank == 0:
        damage(path, what)
    store.barrier()
    before = arrays_of(store), store.optimizer_description, store.learning_rate
    text = caught(lambda: store.load_optimizer_states(path), CheckpointError)
    assert (arrays_of(store), store.optimizer_description, store.learning_rate) == before
    outs = [np.ones(shape, np.float32) for shape in SHAPES.values()]
    store.pushpull(list(SHAPES), [np.zeros_like(out) for out in outs], outs)
    return [text, *(out.tolist() for out in outs)]


@pytest.mark.parametrize("servers", [0, 1, 2])
def test_a_job_refuses_a_count_or_a_rate_that_cannot_be(servers: int, tmp_path: Path) -> None:
    cases = {("steps", False): "step_counter", ("steps", True): "step_counter", ("rate", True): "lr"}
    calls = [(tmp_path, *case) for case in cases]
    for found in run_calls(Launch("shm", 3, servers), refuses, *calls):
        for piece, (text, *values) in zip(cases.values(), found, strict=True):
            assert piece in text and str(tmp_path) in text, text
            # gradients 6, 6, 0 of the workers together: momentum 6, 9, 4.5 at the rates 0.5, 0.25, 0.25
            expected = -(6 * 0.5 + 9 * 0.25 + 4.5 * 0.25)
            assert values == [np.full(shape, expected).tolist() for shape in SHAPES.values()]


@pytest.mark.parametrize("rate", [float("inf"), 1e300, -1.0, "x"])
def test_a_store_without_keys_refuses_a_rate_that_cannot_be(rate: Any, tmp_path: Path) -> None:
    store: Any = kvstore.create("local")
    store.set_optimizer(opt.SGD(lr=0.5))
    store.set_learning_rate(0.25)
    store.save_optimizer_states(tmp_path / "states", dump_optimizer=True)
    change(tmp_path / "states", lambda head: head["optimizer"].update(lr=rate), lambda arrays: None)
    with pytest.raises(CheckpointError, match=r"its optimizer cannot be made: .*lr"):
        store.load_optimizer_states(tmp_path / "states")
    store.init("w", np.ones(3, np.float32))
    out = np.zeros(3, np.float32)
    store.pushpull("w", np.full(3, 2, np.float32), out)
    assert out.tolist() == [0.5] * 3
