# SPDX-License-Identifier: Apache-2.0
"""Files with states of a training: a model's, a job's, a store's, a Trainer's."""

from __future__ import annotations

import json
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from singa_lite import checkpoint, gluon, kvstore, opt
from singa_lite.checkpoint import contents, job
from singa_lite.checkpoint.rank_arrays import write_arrays
from singa_lite.checkpoint.streams import restore_streams, streams
from singa_lite.comm.base import World
from singa_lite.comm.local import LocalCommunicator
from singa_lite.data import ShardedSampler
from singa_lite.files import HASH, sealed
from singa_lite.generation import find_generations, rank_file, write_manifest
from singa_lite.launch import one_host, restart
from singa_lite.tensor import Tensor
from tests.checkpoint.job_net import Net, compiled, train
from tools.soak.file_readers.reader import Read, all_or_nothing, hash_of

OPTION = "sparseTopK:0.05"  # has residuals
GROUPS = 3  # ranks of a job that one rank goes on from


def trained(seed: int, steps: int = 2) -> Net:
    net = compiled(LocalCommunicator(World()), OPTION, False)
    net.devices()[0].SetRandSeed(seed)
    train(net, range(seed, seed + steps))
    return net


def state_of(net: Net) -> str:
    """Return a hash of all that loading may change: parameters, optimizer, random streams."""
    kept = net.snapshot()
    return hash_of((kept.states, kept.optimizer, streams(kept.random_states)))


def elsewhere(net: Net) -> Callable[[], None]:
    """Return a function that gives ``net`` other values than those of any file."""
    kept, there = net.snapshot(), streams([(77, 7)])

    def go() -> None:
        net.restore(kept)
        net.devices()[0].set_random_state(restore_streams(there)[0])

    return go


def make_model_file(folder: Path, number: int) -> None:
    trained(10 * number).save_states(
        folder / "model.zip", {"epoch": np.array(number), "name": np.ones((2, 0))}
    )


def start_model_file() -> Read:
    net = trained(55)
    leave = elsewhere(net)

    def read(folder: Path) -> object:
        leave()
        aux = all_or_nothing(lambda: state_of(net), lambda: net.load_states(folder / "model.zip"))
        return state_of(net), hash_of(aux)

    return read


def sampler_at(epoch: int, batches: int) -> ShardedSampler:
    made = ShardedSampler(40, 4, 0, 1, seed=1)
    made.set_epoch(epoch)
    for _, _ in zip(range(batches), made, strict=False):
        pass
    return made


def make_job(folder: Path, number: int) -> None:
    """Write two generations of a job; of number 2 the older one alone, of number 3 none."""
    if number == 3:
        return
    net = trained(100 * (number % 2))
    for step in (2, 4)[: 1 if number == 2 else 2]:
        if step == 4:
            train(net, range(2))
        np.random.seed(number % 2 + step)
        random.seed(number % 2 + step)
        extra = {"array": np.arange(step), "lines": [step, {"x": None}]}
        with mock.patch.object(contents.time, "time", lambda step=step: 1e9 + step):
            checkpoint.save_job(folder, net, sampler=sampler_at(step, number % 2), extra=extra)


def make_resized_job(folder: Path, number: int) -> None:
    """Write a generation of three ranks, whose residuals and random streams are different; of number 2 none."""
    if number == 2:
        return
    nets = [trained(100 * number + rank) for rank in range(GROUPS)]
    by_rank = [job.arrays_of(net) for net in nets]
    for arrays in by_rank[1:]:
        arrays.update({name: array for name, array in by_rank[0].items() if name.startswith(job.MODEL)})
    digests = [contents.digests(arrays) for arrays in by_rank]
    own, shared = contents.placed(digests, by_rank[0])
    path = folder / "step-00000002"
    path.mkdir()
    for rank, arrays in enumerate(by_rank):
        write_arrays(path / rank_file(rank), {name: arrays[name] for name in (*own[rank], *shared[rank])})
    everyone = [{"step": 2, "sampler": sampler_at(2, 1).state_dict(), "extra": {"a": 1}}] * GROUPS
    write_manifest(path, contents.manifest_of(nets[0].optimizer, 1, everyone, own, shared))


def start_job() -> Read:
    net = trained(55)
    leave, sampler = elsewhere(net), sampler_at(0, 0)
    away = sampler.state_dict()

    def state() -> object:
        return state_of(net), sampler.state_dict()

    def read(folder: Path) -> object:
        leave()
        sampler.load_state_dict(away)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = all_or_nothing(state, lambda: checkpoint.load_job(folder, net, sampler=sampler))
        if found is None:
            return None
        assert isinstance(found, checkpoint.Job)
        return state(), found.step, found.world_size, hash_of(found.extra)

    return read


def seal_manifest(name: str, content: bytes) -> bytes:
    """Return a manifest with the hash of the values that it has now."""
    try:
        values = json.loads(content)
        return sealed({key: value for key, value in values.items() if key != HASH})
    except (ValueError, RecursionError, AttributeError):  # no object of JSON
        return content


def start_launcher() -> Read:
    """Read what the launcher reads of a job: the newest manifest, for its line about what was lost.

    Its id is a random one of each save.
    """
    ended = one_host.Round(1, 0, [7, None], 0.0, 1.0)

    def read(folder: Path) -> object:
        found, _ = find_generations(folder)
        manifests = [{**generation.manifest.to_json(), "id": ""} for generation in found[:1]]
        return restart._loss(ended, folder, counts_steps=True), manifests

    return read


def trained_store(seed: int) -> Any:
    store: Any = kvstore.create("device")
    store.set_gradient_compression({"type": "2bit", "threshold": 0.5})
    rng = np.random.default_rng(seed)
    weights = [rng.standard_normal(shape).astype(np.float32) for shape in ((3, 5), (7,))]
    store.init(["w", "b"], weights)
    store.set_optimizer(opt.SGD(lr=0.1, momentum=0.9))
    store.pushpull(["w", "b"], [0.3 * array for array in weights], [array.copy() for array in weights])
    return store


def store_state(store: Any) -> object:
    kept = {key: store._residuals.get(key, size).copy() for key, size in (("w", 15), ("b", 7))}
    return hash_of((store._get_states(), kept)), str(store.optimizer_description)


def make_store(folder: Path, number: int) -> None:
    trained_store(number % 2).save_optimizer_states(folder / "states", dump_optimizer=number > 1)


def start_store() -> Read:
    def read(folder: Path) -> object:
        store = trained_store(9)
        all_or_nothing(lambda: store_state(store), lambda: store.load_optimizer_states(folder / "states"))
        return store_state(store)

    return read


def trained_trainer(seed: int) -> Any:
    rng = np.random.default_rng(seed)
    params = {name: Tensor(data=rng.standard_normal(4).astype(np.float32)) for name in ("w", "b")}
    for name, param in params.items():
        param.name, param.requires_grad, param.stores_grad = name, True, True
        assert param.grad is not None
        param.grad.copy_from_numpy(rng.standard_normal(4).astype(np.float32))
    trainer = gluon.Trainer(params, opt.Adam(lr=0.01 * (1 + seed)), kvstore=None)
    trainer._update(list(params))
    trainer._optimizer.step()
    return trainer


def make_trainer(folder: Path, number: int) -> None:
    trained_trainer(number).save_states(folder / "states")


def trainer_state(trainer: Any) -> object:
    return hash_of(trainer._saved._own_states()), trainer.learning_rate, trainer._optimizer.step_counter


def start_trainer() -> Read:
    def read(folder: Path) -> object:
        trainer = trained_trainer(9)
        all_or_nothing(lambda: trainer_state(trainer), lambda: trainer.load_states(folder / "states"))
        return trainer_state(trainer)

    return read
