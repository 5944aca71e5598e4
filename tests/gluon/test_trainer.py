# SPDX-License-Identifier: Apache-2.0
"""What a Trainer must do, in jobs of 1, 2, 3 and 7 workers with 0, 1 and 2 servers, over shm and MPI.

One launch for each job runs all facts one after the other (each a function of FACTS) and every test reports its own.
Whole training runs that must have equal bits are in test_trainer_bits.py, arrays of a GPU in test_trainer_on_cuda.py.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import pickle
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from singa_lite import autograd, gluon, kvstore, layer, model, opt
from singa_lite.comm.base import Communicator, World
from singa_lite.comm.local import LocalCommunicator
from singa_lite.errors import CheckpointError, CommError, DTypeError, GraphError, OptionError, ShapeError
from singa_lite.gluon.saved_states import check_head
from singa_lite.kvstore import KVStoreBase
from singa_lite.kvstore.replica import ReplicaStore
from singa_lite.tensor import Tensor, to_numpy
from tests.gluon.jobs import BIG_ARRAY, Rig, backward, bits, check_outcome, parameter, run_job, values
from tests.ranks import mpi_missing
from tests.slow_cases import slow_but_first

F32 = np.float32
# transport, workers, servers
JOBS = [
    ("shm", 1, 0),
    ("shm", 2, 0),
    ("shm", 2, 1),
    ("shm", 3, 0),
    ("shm", 3, 2),
    ("mpi", 3, 1),
]
LARGE = 1003  # elements: more than BIG_ARRAY, so cut into a part for each server
CNN_SHAPES = [(20, 1, 5, 5), (20,), (50, 20, 5, 5), (50,), (800, 500), (500,), (500, 10), (10,)]

FACTS: list[Callable[[Rig], Any]] = []


def fact(function: Callable[[Rig], Any]) -> Callable[[Rig], Any]:
    FACTS.append(function)
    return function


def caught(call: Callable[..., Any], kind: type[Exception], *arguments: Any) -> str:
    with pytest.raises(kind) as error:
        call(*arguments)
    return str(error.value)


def two(start: float = 1.0) -> dict[str, Tensor]:
    """A small parameter, and one that servers share."""
    return {
        "small": parameter(np.full((2, 3), start), "small"),
        "large": parameter(np.full(LARGE, start), "large"),
    }


def all_equal(params: dict[str, Tensor], expected: float) -> bool:
    return all((to_numpy(param) == F32(expected)).all() for param in params.values())


def trainer_of(
    rig: Rig,
    params: Any,
    on_store: bool,
    optimizer: Any = "sgd",
    *,
    big_array: int = BIG_ARRAY,
    **arguments: Any,
) -> gluon.Trainer:
    """A Trainer with a new store."""
    options = {} if isinstance(optimizer, opt.Optimizer) else {"learning_rate": 1.0}
    options |= arguments.pop("optimizer_params", {})
    return gluon.Trainer(
        params,
        optimizer,
        options,
        kvstore=rig.store(big_array=big_array),
        update_on_kvstore=on_store,
        **arguments,
    )


BOTH = (True, False)  # update_on_kvstore

# ---- a step ----------------------------------------------------------------------------------------------


@fact
def a_step_subtracts_the_sum_over_the_workers_and_none_with_lr_0(rig: Rig) -> None:
    for on_store in BOTH:
        params = two()
        trainer = trainer_of(rig, params, on_store)
        backward(dict.fromkeys(params.values(), rig.rank + 1))
        trainer.step(1)
        expected = 1 - rig.size * (rig.size + 1) / 2
        assert all_equal(params, expected), values(params)["small"]
        assert trainer.learning_rate == 1
        trainer.set_learning_rate(0)
        backward(dict.fromkeys(params.values(), rig.rank + 1))
        trainer.step(1)
        assert all_equal(params, expected) and trainer.learning_rate == 0


@fact
def reduction_mean_divides_by_the_number_of_workers(rig: Rig) -> None:
    for on_store in BOTH:
        params = two()
        trainer = trainer_of(rig, params, on_store, reduction="mean")
        backward(dict.fromkeys(params.values(), 2 * (rig.rank + 1)))
        trainer.step(2)
        assert all_equal(params, 1 - (rig.size + 1) / 2)


@fact
def each_worker_has_a_batch_size_of_its_own_in_each_step(rig: Rig) -> list[str]:
    """65 and 64: total = the sum, in order, of gradient / batch size."""
    found = []
    for on_store in BOTH:
        params = two(0.0)
        trainer = trainer_of(rig, params, on_store)
        totals = np.zeros(LARGE)
        rngs = [np.random.default_rng([worker, 5]) for worker in range(rig.size)]
        for step in range(3):
            grads = [rng.standard_normal(LARGE).astype(F32) for rng in rngs]
            sizes = [65 - (worker + step) % 2 for worker in range(rig.size)]
            totals -= np.sum([g.astype(np.float64) / n for g, n in zip(grads, sizes, strict=True)], axis=0)
            backward({params["large"]: grads[rig.rank], params["small"]: 0})
            trainer.step(sizes[rig.rank])
        np.testing.assert_allclose(to_numpy(params["large"]), totals, rtol=1e-5, atol=1e-6)
        found.append(bits(params)["large"])
    assert found[0] == found[1]
    return found[:1]


@fact
def gradients_of_several_backwards_add_up_until_a_step(rig: Rig) -> None:
    for on_store in BOTH:
        params = two(0.0)
        trainer = trainer_of(rig, params, on_store)
        for grad in (1, 2, 4):
            backward(dict.fromkeys(params.values(), grad))
        trainer.step(1)
        assert all_equal(params, -7 * rig.size)
        assert not any(param.has_fresh_grad for param in params.values())
        if on_store:  # what backward computed stays readable
            assert all((to_numpy(param.grad) == 7).all() for param in params.values())
        backward(dict.fromkeys(params.values(), 8))
        trainer.step(1)
        assert all_equal(params, -15 * rig.size)


@fact
def all_workers_begin_with_the_parameters_of_worker_0(rig: Rig) -> None:
    for on_store in BOTH:
        params = two(10.0 + rig.rank)
        trainer_of(rig, params, on_store)
        assert all_equal(params, 10)


@fact
def names_and_arguments_of_mxnet_make_our_optimizers(rig: Rig) -> None:
    params = {"w": parameter([1.0, -2.0])}
    trainer = trainer_of(
        rig, params, True, optimizer_params={"learning_rate": 0.5, "wd": 0.1, "momentum": 0.9}
    )
    grad = np.array([0.5, 0.25])
    value, velocity = np.array([1.0, -2.0]), np.zeros(2)
    for _ in range(3):
        backward({params["w"]: grad * (rig.rank + 1)})
        trainer.step(4)
        velocity = 0.9 * velocity + grad * rig.size * (rig.size + 1) / 8 + 0.1 * value
        value = value - 0.5 * velocity
        np.testing.assert_allclose(to_numpy(params["w"]), value, rtol=1e-5)
    trainer = trainer_of(
        rig, params, True, "adam", optimizer_params={"beta1": 0.5, "epsilon": 1e-6, "learning_rate": 0.01}
    )
    assert trainer.optimizer.value_of("beta_1") == 0.5 and trainer.learning_rate == 0.01
    before = to_numpy(params["w"]).copy()
    backward({params["w"]: [1, -1]})
    trainer.step(1)
    np.testing.assert_allclose(to_numpy(params["w"]), before + np.array([-0.01, 0.01]), rtol=1e-5)


# ---- gradients that no backward has computed -----------------------------------------------------------


@fact
def stale_gradients_are_all_named_before_anything_moves(rig: Rig) -> None:
    for on_store in BOTH:
        params = {name: parameter([1.0, 2.0]) for name in ("a", "b", "c")}
        trainer = trainer_of(rig, params, on_store)
        backward({params["b"]: 1})
        traffic = trainer.kvstore.traffic.bytes_sent
        calls: list[tuple[Any, ...]] = [(trainer.step, 1)]
        if not on_store:
            calls += [(trainer.update, 1), (trainer.allreduce_grads,)]
        for call, *arguments in calls:
            text = caught(call, GraphError, *arguments)
            assert "the gradient of a, c since" in text and "ignore_stale_grad" in text
        assert trainer.kvstore.traffic.bytes_sent == traffic
        assert values(params) == {key: [1.0, 2.0] for key in "abc"}
        backward({params["a"]: 1, params["c"]: 1})  # b's stays fresh
        trainer.step(1)
        assert values(params) == {key: [1.0 - rig.size, 2.0 - rig.size] for key in "abc"}
        assert "the gradient of a, b, c since" in caught(trainer.step, GraphError, 1)


@fact
def a_gradient_stale_on_some_workers_counts_as_zero_and_on_all_is_not_applied(rig: Rig) -> None:
    """Weight decay and momentum neither: "never" stays, also when it comes back later."""
    for on_store in BOTH:
        params = {"some": parameter([1.0]), "never": parameter([1.0]), "all": parameter([1.0])}
        arguments = {"optimizer_params": {"wd": 0.5, "momentum": 0.5}}
        trainer = trainer_of(rig, params, on_store, **arguments)
        backward({params["all"]: 3, params["never"]: 1, params["some"]: rig.rank + 1})
        trainer.step(1)
        start = {name: np.float64(value[0]) for name, value in values(params).items()}
        sums = {"all": 3 * rig.size, "never": rig.size, "some": rig.size * (rig.size + 1) / 2}
        assert start == {name: 1 - (total + 0.5) for name, total in sums.items()}
        grads = {params["all"]: 3}
        if rig.rank > 0:
            grads[params["some"]] = rig.rank + 1
        backward(grads)
        trainer.step(2, ignore_stale_grad=True)
        now = {name: value[0] for name, value in values(params).items()}
        given = {"all": 3 * rig.size / 2, "some": (rig.size * (rig.size + 1) / 2 - 1) / 2}
        for name in ("all", "some") if rig.size > 1 else ("all",):
            velocity = 0.5 * (sums[name] + 0.5) + given[name] + 0.5 * start[name]
            assert now[name] == F32(start[name] - velocity), (name, now)
        assert now["never"] == F32(start["never"])
        backward({params["never"]: 1})
        trainer.step(1, ignore_stale_grad=True)
        velocity = 0.5 * (rig.size + 0.5) + rig.size + 0.5 * start["never"]
        assert values(params)["never"] == [F32(start["never"] - velocity)]
        before = values(params)
        trainer.step(1, ignore_stale_grad=True)  # none at all
        assert values(params) == before


@fact
def a_stale_gradient_is_not_compressed(rig: Rig) -> None:
    """1 bit would make +-1 of a zero, and its residual would grow."""
    for on_store in BOTH:
        params = {"a": parameter([0.0] * 3), "b": parameter([0.0] * 3)}
        compression = {"type": "1bit", "threshold": 0.0}
        trainer = trainer_of(rig, params, on_store, compression_params=compression)
        backward({params["a"]: 1} if rig.rank == 0 else {params["a"]: 1, params["b"]: 1})
        trainer.step(1, ignore_stale_grad=True)
        assert values(params) == {"a": [-rig.size] * 3, "b": [-(rig.size - 1.0)] * 3}
        backward(dict.fromkeys(params.values(), 0.5))
        trainer.step(1)  # residuals 0, so .5 is sent as 1
        assert values(params) == {"a": [-2.0 * rig.size] * 3, "b": [1.0 - 2 * rig.size] * 3}


class Keeping(opt.Optimizer):
    """Subtracts the gradient and half of the one before, which it has kept."""

    _before: Any = None

    def apply(self, param_name: str, param_value: Tensor, param_grad: Tensor) -> None:
        step = param_grad if self._before is None else param_grad + self._before * 0.5
        self._before = param_grad
        param_value -= step


@fact
def an_optimizer_may_keep_the_gradients_that_it_gets(rig: Rig) -> None:
    params = two(0.0)
    trainer = trainer_of(rig, params, True, Keeping(1.0))
    value = before = 0.0
    for step in range(4):
        backward(dict.fromkeys(params.values(), step + 1))
        trainer.step(1)
        total = (step + 1.0) * rig.size
        value, before = value - total - before * 0.5, total
        assert all_equal(params, value), step


# ---- by hand ---------------------------------------------------------------------------------------------


@fact
def allreduce_grads_leaves_the_sum_to_be_clipped_and_update_divides_it(rig: Rig) -> None:
    for reduction in ("sum", "mean"):
        params = two(0.0)
        trainer = trainer_of(rig, params, False, reduction=reduction)
        backward({params["small"]: rig.rank + 1, params["large"]: 4 * (rig.rank + 1)})
        trainer.allreduce_grads()
        total = rig.size * (rig.size + 1) / 2 / (rig.size if reduction == "mean" else 1)
        assert (to_numpy(params["small"].grad) == total).all()
        assert (to_numpy(params["large"].grad) == 4 * total).all()
        for param in params.values():
            grad = to_numpy(param.grad)
            param.grad.copy_from_numpy(np.minimum(grad, 2))
        trainer.update(np.int64(4))
        assert (to_numpy(params["small"]) == -min(total, 2) / 4).all()
        assert (to_numpy(params["large"]) == -min(4 * total, 2) / 4).all()
        assert "no backward" in caught(trainer.update, GraphError, 4)
        assert trainer.bytes_sent == 4 * (6 + LARGE)


@fact
def allreduce_grads_and_update_are_not_for_a_store_that_updates(rig: Rig) -> None:
    params = two()
    trainer = trainer_of(rig, params, True)
    assert trainer.update_on_kvstore
    backward(dict.fromkeys(params.values(), 1))
    for call in (trainer.allreduce_grads, lambda: trainer.update(1)):
        assert "update_on_kvstore=False" in caught(call, OptionError)
    trainer.step(1)
    assert all_equal(params, 1 - rig.size)


@fact
def update_alone_can_leave_out_gradients(rig: Rig) -> None:
    params = {"a": parameter([1.0]), "b": parameter([1.0])}
    trainer = trainer_of(rig, params, False, optimizer_params={"wd": 0.5})
    backward({params["a"]: 2})
    trainer.update(2, ignore_stale_grad=True)
    assert values(params) == {"a": [-0.5], "b": [1.0]} and trainer.bytes_sent == 0
    backward(dict.fromkeys(params.values(), 0))
    trainer.step(1)
    assert trainer.bytes_sent == 8
    backward({params["a"]: 0})
    trainer.update(1, ignore_stale_grad=True)
    assert trainer.bytes_sent == 0


# ---- the learning rate and the optimizer ---------------------------------------------------------------


@fact
def a_schedule_is_the_same_on_servers_and_on_workers(rig: Rig) -> str:
    found = []
    for on_store in BOTH:
        params = two(0.0)
        sgd = opt.SGD(lr=opt.ExponentialDecay(1.0, 2, 0.5, staircase=True), momentum=0.5)
        trainer = trainer_of(rig, params, on_store, sgd)
        value = velocity = 0.0
        for rate in (1.0, 1.0, 0.5, 0.5, 0.25):
            assert trainer.learning_rate == rate
            backward(dict.fromkeys(params.values(), 1))
            trainer.step(1)
            velocity = 0.5 * velocity + rig.size
            value -= rate * velocity
            assert all_equal(params, value)
        trainer.set_learning_rate(2)
        backward(dict.fromkeys(params.values(), 1))
        trainer.step(1)
        assert all_equal(params, value - 2 * (0.5 * velocity + rig.size))
        found.append(bits(params)["small"])
    assert found[0] == found[1]
    return found[0]


@fact
def an_attribute_set_by_hand_arrives_or_is_an_error(rig: Rig) -> None:
    for on_store in BOTH:
        params = two(0.0)
        trainer = trainer_of(rig, params, on_store, opt.SGD(lr=1.0, momentum=0.5))
        trainer.optimizer.lr = 0.5
        assert trainer.learning_rate == 0.5
        backward(dict.fromkeys(params.values(), 2))
        trainer.step(1)
        assert all_equal(params, -rig.size)
        trainer.optimizer.momentum = 0.5  # as before
        trainer.optimizer.momentum = 0.0
        backward(dict.fromkeys(params.values(), 2))
        if on_store:
            text = caught(trainer.step, OptionError, 1)
            assert "momentum of the optimizer was set" in text and "set_optimizer" in text
            assert all_equal(params, -rig.size)
            trainer.kvstore.set_optimizer(trainer.optimizer)
        trainer.step(1)
        assert all_equal(params, -2 * rig.size)
        trainer.optimizer.lr.init_value = 0.25
        backward(dict.fromkeys(params.values(), 4))
        trainer.step(1)
        assert all_equal(params, -3 * rig.size)
        trainer.optimizer.lr = opt.ExponentialDecay(1.0, 1, 0.5)
        backward(dict.fromkeys(params.values(), 2))
        if on_store:
            assert "lr of the optimizer was set" in caught(trainer.step, OptionError, 1)
            schedule = opt.ExponentialDecay(1.0, 1, 0.5)
            trainer.optimizer.lr = schedule
            trainer.kvstore.set_optimizer(trainer.optimizer)
            trainer.step(1)
            schedule.init_value = 2.0
            backward(dict.fromkeys(params.values(), 2))
            assert "lr.init_value of the optimizer was set" in caught(trainer.step, OptionError, 1)


class Masked(opt.Optimizer):
    def __init__(self, lr: float = 1.0) -> None:
        super().__init__(lr)
        self.mask = np.float32([1, 1])

    def apply(self, name: str, value: Tensor, grad: Tensor) -> None:
        value -= grad * Tensor(data=self.mask)


def clipped(name: str, value: Tensor, grad: Tensor) -> None:
    value.copy_data(value - Tensor(data=np.clip(to_numpy(grad), -1, 1)))


@fact
def what_a_store_would_not_see_of_an_optimizer_is_an_error(rig: Rig) -> None:
    for on_store in BOTH:
        for name, value, expected in (("mask", F32([0, 1]), [0, -rig.size]), ("apply", clipped, [-1, -1])):
            params, optimizer = {"w": parameter([0.0, 0.0])}, Masked()
            setattr(optimizer, name, value)
            if on_store:
                text = caught(trainer_of, OptionError, rig, params, on_store, optimizer)
                assert f"Masked: its constructor would not make it again: {name} is" in text, text
                continue
            trainer = trainer_of(rig, params, on_store, optimizer)
            backward({params["w"]: 1})
            trainer.step(1)
            assert values(params) == {"w": expected}


class Hidden(opt.Optimizer):
    """Keeps numbers where a look at its public attributes does not find them, or not that they were changed."""

    def __init__(self, lr: float = 1.0) -> None:
        super().__init__(lr)
        self._factor, self.factors = 1.0, [1.0]
        self._seconds = 0.0

    @functools.cached_property
    def _log(self) -> np.ndarray:
        return np.zeros(2)

    @property
    def factor(self) -> float:
        return self._factor

    @factor.setter
    def factor(self, value: float) -> None:
        self._factor = value

    def change(self, name: str, value: float) -> None:
        if name == "_factor":
            self.factor = value
        else:
            self.factors[0] = value

    def apply(self, name: str, value: Tensor, grad: Tensor) -> None:
        self._seconds = time.perf_counter()
        value -= grad * self.factor * self.factors[0]


@fact
def what_a_property_or_a_list_holds_is_noticed_between_steps(rig: Rig) -> None:
    for on_store in BOTH:
        for name in ("_factor", "factors"):
            params, optimizer = {"w": parameter([0.0])}, Hidden()
            trainer = trainer_of(rig, params, on_store, optimizer)
            backward({params["w"]: 1})
            trainer.step(1)
            if rig.rank == 0:
                assert optimizer._log.size == 2  # kept by the class for itself
            trainer.optimizer.change(name, 0.5)  # type: ignore[attr-defined]
            backward({params["w"]: 1})
            if on_store:
                text = caught(trainer.step, OptionError, 1)
                assert f"Hidden: its constructor would not make it again: {name} is" in text, text
                continue
            trainer.step(1)
            optimizer._seconds = rig.rank
            assert values(params) == {"w": [-1.5 * rig.size]}
            if rig.size > 1:
                trainer.optimizer.change(name, float(rig.rank))  # type: ignore[attr-defined]
                backward({params["w"]: 1})
                text = caught(trainer.step, CommError, 1)
                assert "the workers differ in step: the optimizer is" in text and name in text, text


@fact
def the_store_updates_by_the_learning_rate_that_the_trainer_gives(rig: Rig) -> None:
    params = {"w": parameter([0.0])}

    def check_step(rate: float) -> None:
        params["w"].set_value(0)
        trainer.kvstore.broadcast("w", params["w"], out=params["w"])
        params["w"].mark_grad_stale()
        backward({params["w"]: 1})
        assert trainer.learning_rate == rate
        trainer.step(1)
        assert to_numpy(params["w"]) == F32(-rate * rig.size)

    for on_store in BOTH:
        optimizer = opt.SGD(lr=opt.ExponentialDecay(1.0, 1, 0.5))
        optimizer.step_counter = 2  # it has made steps elsewhere
        trainer = trainer_of(rig, params, on_store, optimizer)
        check_step(0.25)
        for name in ("step_counter", "lr.decay_rate"):
            if name == "step_counter":
                optimizer.step_counter = 1
            else:
                optimizer.lr.decay_rate = 0.25  # type: ignore[attr-defined]
            if on_store:
                backward({params["w"]: 1})
                text = caught(trainer.step, OptionError, 1)
                assert f"{name} of the optimizer was set" in text, text
                trainer.kvstore.set_optimizer(optimizer)
            check_step(optimizer.lr_value)
        if on_store:
            trainer.kvstore.set_optimizer(optimizer)
            check_step(0.25**3)
            trainer.kvstore.set_learning_rate(0.5)
            check_step(0.5)
            trainer.kvstore.set_learning_rate(0.125)
            assert trainer.get_states()["lr"] == 0.125
            trainer.kvstore.set_optimizer(opt.SGD(lr=0.125))
            backward({params["w"]: 1})
            assert "not by this Trainer's optimizer" in caught(trainer.step, OptionError, 1)


# ---- workers that differ -------------------------------------------------------------------------------


@fact
def workers_that_differ_have_an_error_that_names_one_and_what(rig: Rig) -> None:
    if rig.size == 1:
        return
    odd = rig.rank == rig.size - 1

    def differs(what: str, call: Callable[[], Any]) -> None:
        text = caught(call, CommError)
        assert f"worker {rig.size - 1}" in text and what in text, text

    store = rig.store()

    def make(params: Any = None, optimizer: Any = "sgd", reduction: str = "sum", **arguments: Any) -> Any:
        return gluon.Trainer(
            params or {"w": parameter([1.0])}, optimizer, kvstore=store, reduction=reduction, **arguments
        )

    differs("the optimizer", lambda: make(optimizer="adam" if odd else "sgd"))
    differs("the optimizer", lambda: make(optimizer=opt.SGD(lr=0.5 if odd else 0.25)))
    set_alone = opt.SGD()
    if odd:
        set_alone.apply = clipped  # type: ignore[method-assign]
    differs("the optimizer", lambda: make(optimizer=set_alone, update_on_kvstore=False))
    differs("reduction is sum on worker 0 but mean", lambda: make(reduction="mean" if odd else "sum"))
    differs("update_on_kvstore", lambda: make(update_on_kvstore=not odd))
    differs("compression_params", lambda: make(compression_params={"type": "2bit"} if odd else None))
    differs("threshold", lambda: make(compression_params={"type": "2bit", "threshold": 2.0 if odd else 1.0}))
    differs(
        "key 'w' is float32[1], number 0 on worker 0 but not there",
        lambda: make({"vw"[not odd]: parameter([1.0])}),
    )
    differs(
        "key 'w' is float32[1], number 0 on worker 0 but float32[2]",
        lambda: make({"w": parameter([1.0] * (1 + odd))}),
    )
    params = {"w": parameter([1.0])}
    trainer = make(params, update_on_kvstore=False)
    differs(
        "the learning rate is 0.5 on worker 0 but 0.25",
        lambda: trainer.set_learning_rate(0.25 if odd else 0.5),
    )
    assert trainer.learning_rate == 0.01
    backward({params["w"]: 2 if odd else 1})
    differs("a hash of the gradient of w, which allreduce_grads makes equal, is", lambda: trainer.update(1))
    params["w"].mark_grad_stale()
    backward({params["w"]: 1})
    trainer.allreduce_grads()
    backward({params["w"]: 2 if odd else 1})  # adds to the sum
    differs("a hash of the gradient of w,", lambda: trainer.update(1))
    params["w"].mark_grad_stale()
    rows = {"rows": parameter([1.0, 1.0, 1.0])}  # the same numbers, each worker in another order
    other = make(rows, update_on_kvstore=False)
    backward({rows["rows"]: [0, 0, 1] if odd else [1, 0, 0]})
    differs("a hash of the gradient of rows,", lambda: other.update(1))
    backward({params["w"]: 1})
    trainer.allreduce_grads()
    differs("the batch size is 1.0 on worker 0 but 2.0", lambda: trainer.update(2 if odd else 1))
    if odd:
        params["w"].mark_grad_stale()
    differs("the stale gradients", lambda: trainer.update(1, ignore_stale_grad=True))
    trainer.optimizer.lr = 0.5 if odd else 0.25
    backward({params["w"]: 1})
    differs("the optimizer", lambda: trainer.step(1))
    assert values(params) == {"w": [1.0]}
    trainer = gluon.Trainer(params, "sgd", kvstore=rig.store())
    differs("the learning rate is", lambda: trainer.set_learning_rate(0.25 if odd else 0.5))
    assert trainer.learning_rate == 0.01
    params["w"].mark_grad_stale()
    backward({params["w"]: rig.size})
    trainer.step(rig.size)
    assert values(params) == {"w": [F32(1 - 0.01 * rig.size)]}  # and all is well


@fact
def workers_that_differ_in_ignore_stale_grad_have_an_error(rig: Rig) -> None:
    if rig.size == 1:
        return
    params = {"w": parameter([1.0])}
    trainer = gluon.Trainer(params, "sgd", kvstore=rig.store(will_break=True))
    backward({params["w"]: 1})
    text = caught(lambda: trainer.step(1, ignore_stale_grad=rig.rank > 0), CommError)
    assert "allow_none" in text and "'w'" in text, text
    assert values(params) == {"w": [1.0]}


def interrupt(*arguments: Any) -> None:
    raise KeyboardInterrupt


@fact
def a_step_that_an_exception_ends_breaks_the_store_on_all_workers(rig: Rig) -> None:
    if rig.size == 1:
        return
    for on_store in BOTH:
        for is_exchanging in (True, False):
            params = two(0.0)
            store = rig.store(will_break=True)
            trainer = gluon.Trainer(params, "sgd", kvstore=store, update_on_kvstore=on_store)
            rig.workers.barrier()  # all have the values, before worker 0 breaks the store
            backward(dict.fromkeys(params.values(), 1))
            before = signal.signal(signal.SIGALRM, interrupt)
            if rig.rank == 0 and is_exchanging:  # the others come once it has been interrupted
                signal.setitimer(signal.ITIMER_REAL, 0.05)
            elif rig.rank == 0:
                trainer._finish = interrupt  # type: ignore[assignment]
            if rig.rank == 0:
                with pytest.raises(KeyboardInterrupt):
                    trainer.step(1)
            if is_exchanging:
                rig.workers.barrier()
            if rig.rank:
                with suppress(CommError):  # the sum of this step may have been whole before rank 0 aborted
                    trainer.step(1)
            rig.workers.barrier()
            signal.signal(signal.SIGALRM, before)
            backward(dict.fromkeys(params.values(), 1))
            text = caught(trainer.step, CommError, 1)
            assert "was ended by KeyboardInterrupt" in text, text


class Failing(opt.DecayScheduler):
    """A constant rate, or none from step 2 on."""

    fails: ClassVar[bool] = False

    def __init__(self, init_value: float) -> None:
        super().__init__(init_value)

    def call(self, step: int) -> float:
        return float("nan") if Failing.fails and step >= 2 else self.init_value


@fact
def an_update_that_is_refused_behind_the_sum_breaks_the_store_on_all_workers(rig: Rig) -> None:
    if rig.size == 1:
        return
    for on_store in [False] if rig.num_servers else BOTH:
        params = two(0.0)
        store = rig.store(will_break=True)
        rate = {"learning_rate": Failing(0.1)}
        trainer = gluon.Trainer(params, "sgd", rate, kvstore=store, update_on_kvstore=on_store)
        for _ in range(2):
            backward(dict.fromkeys(params.values(), 1))
            trainer.step(1)
        Failing.fails = rig.rank == 1
        backward(dict.fromkeys(params.values(), 1))
        with suppress(CommError):  # on the others, as above
            if rig.rank == 1:
                caught(trainer.step, OptionError, 1)
            else:
                trainer.step(1)
        Failing.fails = False
        backward(dict.fromkeys(params.values(), 1))
        text = caught(trainer.step, CommError, 1)
        assert "was ended by OptionError" in text, text


@fact
def a_step_that_was_late_breaks_the_store_on_all_workers(rig: Rig) -> None:
    if rig.size == 1 or rig.num_servers == 0:
        return
    params = two(0.0)
    store = rig.store(will_break=True)
    trainer = gluon.Trainer(params, "sgd", kvstore=store)
    rig.workers.barrier()
    backward(dict.fromkeys(params.values(), 1))
    if rig.rank == 0:
        store._messenger.timeout_s = 0.1  # type: ignore[attr-defined]
        late = caught(trainer.step, CommError, 1)
        assert "waits for pushes of" in late and "worker 1" in late, late
    rig.workers.barrier()
    if rig.rank:
        with suppress(CommError):
            trainer.step(1)
    backward(dict.fromkeys(params.values(), 1))
    text = caught(trainer.step, CommError, 1)
    assert "waits for pushes of" in text, text


# ---- compression and bytes -----------------------------------------------------------------------------


@fact
def bytes_of_a_step_are_those_of_the_formula(rig: Rig) -> None:
    """The MNIST CNN: 431,080 parameters."""
    dense = 4 * 431_080
    for kind, sent in ((None, dense), ("2bit", 107_788), ("1bit", 53_900)):
        for on_store in BOTH:
            params = [parameter(np.zeros(shape)) for shape in CNN_SHAPES]
            compression = None if kind is None else {"type": kind, "threshold": 0.5}
            trainer = trainer_of(rig, params, on_store, big_array=65_536, compression_params=compression)
            assert trainer.bytes_sent == trainer.bytes_received == trainer.bytes_heads == trainer.wait_s == 0
            for _ in range(2):
                backward(dict.fromkeys(params, 0.5))
                trainer.step(1)
                assert trainer.bytes_sent == sent, (kind, on_store)
                assert trainer.bytes_received == (dense if rig.num_servers else sent)
                assert (trainer.bytes_heads > 0) == (rig.num_servers > 0) and trainer.bytes_heads < 8000
                assert trainer.wait_s >= 0
            expected = 0 if kind == "1bit" else -rig.size  # which sends -1, then 1
            assert all((to_numpy(param) == expected).all() for param in params)


# ---- saved states --------------------------------------------------------------------------------------


def train(rig: Rig, trainer: gluon.Trainer, params: dict[str, Tensor], steps: range) -> None:
    for step in steps:
        rng = np.random.default_rng([rig.rank, step])
        backward({param: rng.standard_normal(param.shape) for param in params.values()})
        trainer.step(3)


@fact
def saved_states_go_on_bit_for_bit(rig: Rig) -> None:
    """20 steps (or a few), save, new stores and servers, load, as many more, against all at one go."""
    sgd = {"momentum": 0.9, "weight_decay": 0.01}
    adam = {"lr": opt.ExponentialDecay(0.01, 3, 0.5)}
    for number, (name, options, kind, on_store) in enumerate(
        [
            ("sgd", sgd, "2bit", True),
            ("sgd", sgd, "2bit", False),
            ("adam", adam, None, True),
            ("adam", adam, None, False),
        ]
    ):
        steps = 20 if number == 0 else 4

        def trainer_for(params: dict[str, Tensor]) -> gluon.Trainer:
            compression = kind and {"type": kind, "threshold": 0.5}  # noqa: B023
            optimizer = opt.create({"sgd": "SGD", "adam": "Adam"}[name], **options)  # noqa: B023
            return trainer_of(rig, params, on_store, optimizer, compression_params=compression)  # noqa: B023

        whole, first = two(), two()
        train(rig, trainer_for(whole), whole, range(2 * steps))
        trainer = trainer_for(first)
        train(rig, trainer, first, range(steps))
        trainer.save_states(Path(rig.folder) / str(number))
        second = {key: parameter(to_numpy(param)) for key, param in first.items()}
        trainer = trainer_for(second)
        trainer.load_states(str(Path(rig.folder) / str(number)))
        assert trainer.optimizer.step_counter == steps
        train(rig, trainer, second, range(steps, 2 * steps))
        assert bits(second) == bits(whole), (name, kind, on_store)


@fact
def states_of_another_trainer_are_an_error_and_change_nothing(rig: Rig) -> None:
    folder = Path(rig.folder)
    own = {on_store: folder / f"own {on_store}" for on_store in BOTH}
    others: dict[str, Path] = {
        name: folder / name for name in ("optimizer", "shape", "compression", "workers")
    }
    for on_store in BOTH:
        params = two()
        trainer = trainer_of(rig, params, on_store, opt.SGD(lr=0.1, momentum=0.9))
        train(rig, trainer, params, range(2))
        trainer.save_states(own[on_store])
    makers: dict[str, Callable[[], gluon.Trainer]] = {
        "optimizer": lambda: trainer_of(rig, two(), True, "adam"),
        "shape": lambda: trainer_of(
            rig, {**two(), "small": parameter([1.0])}, True, opt.SGD(0.1, momentum=0.9)
        ),
        "compression": lambda: trainer_of(
            rig, two(), True, opt.SGD(0.1, momentum=0.9), compression_params={"type": "2bit"}
        ),
    }
    for name, maker in makers.items():
        maker().save_states(others[name])
    if rig.rank == 0:  # a job of one more worker
        alone = ReplicaStore("dist_sync", LocalCommunicator(World()))
        gluon.Trainer(two(), opt.SGD(0.1, momentum=0.9), kvstore=alone).save_states(others["workers"])
        (folder / "broken").write_bytes(own[True].read_bytes()[:-99])
    rig.workers.barrier()
    for on_store in BOTH:
        params = two()
        trainer = trainer_of(rig, params, on_store, opt.SGD(lr=0.1, momentum=0.9))
        train(rig, trainer, params, range(1))
        trainer.save_states(folder / "before")
        bad = {
            "mode": own[not on_store],
            "missing": folder / "missing",
            "broken": folder / "broken",
            **others,
        }
        if rig.size == 1:
            del bad["workers"]
        for name, path in bad.items():
            text = caught(trainer.load_states, CheckpointError, path)
            assert str(path) in text, (name, text)
            if name == "workers":
                assert f"num_workers are 1, here {rig.size}" in text
        trainer.save_states(folder / "after")
        rig.workers.barrier()
        assert (folder / "before").read_bytes() == (folder / "after").read_bytes()
        trainer.load_states(own[on_store])
        assert trainer.optimizer.step_counter == 2
        assert "no folder" in caught(trainer.save_states, CheckpointError, folder / "no folder" / "x")


@fact
def states_that_are_set_must_fit_or_nothing_changes(rig: Rig) -> None:
    def trained(on_store: bool, **arguments: Any) -> gluon.Trainer:
        params = two()
        trainer = trainer_of(rig, params, on_store, opt.SGD(lr=0.1, momentum=0.9), **arguments)
        train(rig, trainer, params, range(2))
        return trainer

    def compare(one: dict[str, Any], other: dict[str, Any]) -> bool:
        return one.keys() == other.keys() and all((one[name] == other[name]).all() for name in one)

    momentum, lost = "small:momentum", "sync/kvstore/small"
    changes: dict[str, Any] = {
        "missing": lambda states: states.pop(momentum, None),
        "unknown": lambda states: states.update({"small:other": np.zeros((2, 3), F32)}),
        "shape": lambda states: states.update({momentum: np.zeros((2, 4), F32)}),
        "dtype": lambda states: states.update({momentum: np.zeros((2, 3))}),
        "residual": lambda states: states.update({lost: np.zeros(99, F32)}),
        "rate": lambda states: states.update({"lr": np.array(-1.0)}),
        "infinite rate": lambda states: states.update({"lr": np.array(np.inf)}),
    }
    for on_store in BOTH:
        trainer = trained(on_store)
        before = trainer.get_states()
        for name, change in changes.items():
            states = {each: np.copy(value) for each, value in before.items()}
            states.update(
                {key: np.asarray(value + 1) for key, value in states.items() if key.startswith("large:")}
            )
            change(states)
            assert caught(trainer.set_states, CheckpointError, states), name
            assert compare(trainer.get_states(), before), name
        trainer = trained(on_store, compression_params={"type": "2bit"})
        before = trainer.get_states()
        for change in (lambda states: states.pop(lost), changes["residual"]):
            states = {each: np.copy(value) for each, value in before.items()}
            change(states)
            assert "what compression has lost" in caught(trainer.set_states, CheckpointError, states)
            assert compare(trainer.get_states(), before)
        trainer.set_states(before)


# ---- other stores --------------------------------------------------------------------------------------


class TwelveLines(KVStoreBase):
    names = ("twelve lines",)
    workers: ClassVar[Communicator]
    num_workers = property(lambda self: self.workers.size)

    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None:
        for one, target in zip(*(x if isinstance(x, list) else [x] for x in (value, out)), strict=True):
            self.workers.broadcast(target.copy_data(one) or target.array, 0).wait()

    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        for one, target in zip(*(x if isinstance(x, list) else [x] for x in (value, out)), strict=True):
            self.workers.all_reduce(target.copy_data(one) or target.array, "sum").wait()


@fact
def a_store_of_the_scripts_own_drives_a_trainer(rig: Rig) -> None:
    TwelveLines.workers = rig.workers
    for reduction in ("sum", "mean"):
        share = rig.size if reduction == "mean" else 1
        params = {"a": parameter([1.0 + rig.rank]), "b": parameter([1.0]), "c": parameter([1.0])}
        trainer = gluon.Trainer(
            params, opt.SGD(1.0, momentum=0.5), kvstore="twelve lines", reduction=reduction
        )
        assert not trainer.update_on_kvstore and values(params)["a"] == [1.0]
        backward(dict.fromkeys(params.values(), 2 * (rig.rank + 1)))
        trainer.step(2)
        total = rig.size * (rig.size + 1) / 2 / share
        assert values(params) == {key: [F32(1 - total)] for key in "abc"}
        given = [params["a"]] if rig.rank == 0 else [params["a"], params["b"]]
        backward(dict.fromkeys(given, 1))
        trainer.step(1, ignore_stale_grad=True)
        found = values(params)
        assert found["a"] == [F32(1 - total - (total / 2 + rig.size / share))]
        assert found["b"] == [F32(1 - total - (total / 2 + (rig.size - 1) / share if rig.size > 1 else 0))]
        assert found["c"] == [F32(1 - total)]
        backward(dict.fromkeys(params.values(), 1))
        trainer.allreduce_grads()
        assert to_numpy(params["a"].grad).tolist() == [rig.size / share]
        trainer.update(1)
        path = Path(rig.folder) / f"twelve {rig.rank}"
        trainer.save_states(path)
        again = {name: parameter(to_numpy(param)) for name, param in params.items()}
        other = gluon.Trainer(again, opt.SGD(1.0, momentum=0.5), kvstore="twelve lines", reduction=reduction)
        other.load_states(path)
        for one, its in ((trainer, params), (other, again)):
            backward(dict.fromkeys(its.values(), 1))
            one.step(1)
        assert bits(params) == bits(again)
    for bad in ({"update_on_kvstore": True}, {"compression_params": {"type": "2bit"}}):
        caught(lambda bad=bad: gluon.Trainer(two(), "sgd", kvstore=TwelveLines(), **bad), OptionError)
    assert "store of kvstore.create" in caught(trainer.synchronize, OptionError)


@fact
def without_a_store_every_worker_trains_alone(rig: Rig) -> None:
    params = two()
    trainer = gluon.Trainer(params, "sgd", {"learning_rate": 1}, kvstore=None, reduction="mean")
    assert trainer.kvstore is None and not trainer.update_on_kvstore
    backward(dict.fromkeys(params.values(), rig.rank + 1))
    trainer.step(2)
    assert all_equal(params, 1 - (rig.rank + 1) / 2) and trainer.bytes_sent == 0 and trainer.wait_s == 0


@fact
def trainers_of_equal_names_do_not_share_what_compression_has_lost(rig: Rig) -> None:
    store = rig.store()
    make = functools.partial(gluon.Trainer, optimizer="sgd", kvstore=store, update_on_kvstore=False)
    make({"w": parameter([1.0])}, compression_params={"type": "2bit"})
    text = caught(lambda: make({"v": parameter([1.0]), "w": parameter([1.0])}), OptionError)
    assert "keys ['w'] already" in text, text
    make({"v": parameter([1.0])})


@fact
def several_trainers_share_a_store_that_does_not_update(rig: Rig) -> None:
    store = rig.store()
    one, other = {"a": parameter([1.0])}, {"b": parameter([1.0, 1.0]), "c": parameter([1.0])}
    first = gluon.Trainer(one, "sgd", {"lr": 1}, kvstore=store, update_on_kvstore=False)
    second = gluon.Trainer(other, "sgd", {"lr": 2}, kvstore=store, update_on_kvstore=False)
    for _ in range(2):
        backward(dict.fromkeys([*one.values(), *other.values()], 1))
        first.step(1)
        second.step(1)
    assert values({**one, **other}) == {
        "a": [1 - 2.0 * rig.size],
        "b": [1 - 4.0 * rig.size] * 2,
        "c": [1 - 4.0 * rig.size],
    }
    for number, trainer in enumerate((first, second)):  # each has a file of its own
        path = Path(rig.folder) / f"several_{number}"
        trainer.save_states(path)
        trainer.load_states(path)
        trainer.set_states(trainer.get_states())
    third = gluon.Trainer({"d": parameter([1.0])}, "sgd", kvstore=store)
    assert third.update_on_kvstore
    for wanted in (None, *BOTH):
        text = caught(
            lambda wanted=wanted: gluon.Trainer(
                {"e": parameter([1.0])}, "sgd", kvstore=store, update_on_kvstore=wanted
            ),
            OptionError,
        )
        assert "has an optimizer already" in text
    backward(dict.fromkeys(one.values(), 1))
    assert "no sums of gradients any more" in caught(lambda: first.step(1), OptionError)


@fact
def states_of_one_trainer_are_loaded_beside_what_compression_has_lost_of_another(rig: Rig) -> None:
    """A worker's gradients are a 32nd to 3 32nds, so three of them are below the threshold and stay residuals."""
    store, path = rig.store(), Path(rig.folder) / "beside"
    own, others = {"a": parameter([1.0, 1.0])}, {"b": parameter([1.0]), "c": parameter([1.0])}
    make = functools.partial(gluon.Trainer, kvstore=store, update_on_kvstore=False)
    first = make(own, "sgd", {"lr": 1.0}, compression_params={"type": "2bit", "threshold": 0.5})
    second = make(others, "sgd", {"lr": 1.0})
    grad = (rig.rank + 1) / 32
    for step in range(3):
        backward({own["a"]: [grad, -grad], others["b"]: grad, others["c"]: -grad})
        first.step(1)
        second.step(1)
        if step == 0:
            first.save_states(path)

    def lost() -> dict[Any, list[float]]:
        return {key: array.tolist() for key, array in store.get_residuals().items()}

    assert lost() == {"a": [3 * grad, -3 * grad], "b": [3 * grad], "c": [-3 * grad]}
    first.load_states(path)
    assert lost() == {"a": [grad, -grad], "b": [3 * grad], "c": [-3 * grad]}


# ---- evaluation ----------------------------------------------------------------------------------------


class Normed(model.Model):
    def __init__(self, rank: int = 0) -> None:
        super().__init__()
        for name in ("norm", "scaled_norm")[:: -1 if rank == 1 else 1]:  # workers may have other orders
            setattr(self, name, layer.BatchNorm2d())
        self.flatten, self.linear, self.loss = layer.Flatten(), layer.Linear(3), layer.SoftMaxCrossEntropy()

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.flatten(self.norm(x) + self.scaled_norm(x * 3.0)))


@fact
def synchronize_gives_all_workers_the_same_bits(rig: Rig) -> list[dict[str, str]]:
    """Parameters and the statistics of batch norm, in sync and, where there are servers, async."""
    found = []
    for name in ("dist_sync", "dist_async")[: 1 + (rig.num_servers > 0)]:
        net = Normed(rig.rank)
        rng = np.random.default_rng([rig.rank])
        x = Tensor(data=rng.standard_normal((4, 2, 3, 3)).astype(F32) + rig.rank)
        y = Tensor(data=np.arange(4, dtype=np.int32) % 3)
        net.compile([x], is_train=True)
        trainer = gluon.Trainer(net.get_params(), "sgd", {"lr": 0.01}, kvstore=rig.store(name))
        for _ in range(3 + (rig.rank if name == "dist_async" else 0)):
            with autograd.record():
                loss = net.loss(net.forward(x), y)
            loss.backward()
            trainer.step(1)
        own = to_numpy(net.norm.running_mean).astype(np.float64)
        means = rig.workers.all_gather(own).wait().reshape(rig.size, -1)
        trainer.synchronize(net)
        np.testing.assert_allclose(to_numpy(net.norm.running_mean), means.mean(0), rtol=1e-5)
        assert rig.size == 1 or abs(own - means.mean(0)).max() > 0.1
        states = bits(net.get_states())
        assert all(other == states for other in rig.workers.all_gather_object(states))
        trainer.synchronize()
        assert bits(net.get_states()) == states
        found.append(states)
    assert "expected a Model or Layer" in caught(trainer.synchronize, OptionError, "net")
    params = two()
    trainer = trainer_of(rig, params, False, opt.SGD(lr=0.1))
    trainer.synchronize()
    if rig.size > 1:
        if rig.rank == 1:
            params["large"] += 1.0  # as an update of its own gradients would
        text = caught(trainer.synchronize, CommError)
        assert "the workers differ in synchronize: parameter large is" in text and "on worker 1" in text
    return found[:1]


# ---- running the facts ---------------------------------------------------------------------------------

STEP_ONE = FACTS[:4]  # what seven workers check
SAME_ANYWHERE = [  # results that depend on the number of workers alone
    "each_worker_has_a_batch_size_of_its_own_in_each_step",
    "a_schedule_is_the_same_on_servers_and_on_workers",
    "synchronize_gives_all_workers_the_same_bits",
]


@fact
def synchronize_names_what_replicas_have_made_differ(rig: Rig) -> None:
    if rig.num_servers or rig.size == 1:
        return
    params = two()
    trainer = trainer_of(rig, params, True)
    trainer.synchronize()
    trainer.kvstore._stored["small"].param.set_value(rig.rank)  # type: ignore[union-attr]
    assert "parameter small" in caught(trainer.synchronize, CommError)


@functools.cache
def outcomes(transport: str, num_workers: int, num_servers: int) -> list[dict[str, tuple[str, Any]]]:
    return run_job(transport, num_workers, num_servers, STEP_ONE if num_workers == 7 else FACTS)


@pytest.mark.parametrize("name", [check.__name__ for check in FACTS])
@pytest.mark.parametrize("job", JOBS, ids=lambda job: f"{job[0]}-{job[1]}+{job[2]}")
def test_that(job: tuple[str, int, int], name: str) -> None:
    check_outcome(outcomes(*job), name)


@pytest.mark.parametrize("name", [check.__name__ for check in STEP_ONE])
def test_seven_workers_know_that(name: str) -> None:
    check_outcome(outcomes("shm", 7, 1), name)


@pytest.mark.parametrize("name", SAME_ANYWHERE)
@slow_but_first(
    ("num_workers", "transports"), [(3, ["shm"]), (2, ["shm"]), (3, ["shm", "mpi"])], ids=["3", "2", "mpi"]
)
def test_servers_and_transport_do_not_change_a_bit(
    num_workers: int, transports: list[str], name: str
) -> None:
    if "mpi" in transports and (reason := mpi_missing()):
        pytest.skip(reason)
    jobs = [job for job in JOBS if job[0] in transports and job[1] == num_workers]
    assert {job[0] for job in jobs} == set(transports)
    found = [result for job in jobs for result in check_outcome(outcomes(*job), name)]
    assert len(found) >= 2 * num_workers and all(result == found[0] for result in found)


# ---- in one process --------------------------------------------------------------------------------------


def test_a_local_store_in_a_job_of_several_workers_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RENDEZVOUS_ID": "none", "RANK": "0", "WORLD_SIZE": "3", "NUM_SERVERS": "1"}.items():
        monkeypatch.setenv(f"SINGA_LITE_{name}", value)
    monkeypatch.delenv("SINGA_LITE_LAUNCHER_PID", raising=False)
    text = caught(lambda: gluon.Trainer(two(), "sgd"), OptionError)
    assert "one of 2 workers" in text and "dist_sync" in text and "alone=True" in text
    params = two()
    alone = gluon.Trainer(params, "sgd", {"learning_rate": 1}, kvstore=kvstore.create("device", alone=True))
    backward(dict.fromkeys(params.values(), 1))
    alone.step(1)
    assert all_equal(params, 0)


def test_parameters_are_a_dict_or_a_list_and_shared_ones_count_once() -> None:
    a, b, shared = (parameter([1.0], "W") for _ in range(3))
    for params, names in (
        ({"z": a, "y": b, "x": shared, "w": shared}, ["w", "y", "z"]),
        ([a, shared, b, shared], ["W", "W#1", "W#2"]),
        ((a, shared, b), ["W", "W#1", "W#2"]),
    ):
        for tensor in (a, b, shared):
            tensor.copy_from_numpy(np.ones(1, F32))
            tensor.name = "W"
        trainer = gluon.Trainer(params, "sgd", {"learning_rate": 1})
        backward({a: 1, b: 2, shared: 3})
        trainer.step(1)
        assert [to_numpy(tensor).item() for tensor in (a, b, shared)] == [0, -1, -2]
        a.mark_grad_stale()
        assert f"the gradient of {', '.join(names)} since" in caught(trainer.step, GraphError, 1)
        assert repr(trainer).startswith("Trainer(3 parameters, SGD(lr=1.0,") and "here)" in repr(trainer)


def test_names_of_mxnet_have_its_learning_rates() -> None:
    rates = {"sgd": 0.01, "Adam": 0.001, "adamw": 0.001, "rmsprop": 0.001, "adagrad": 0.01}
    for name, rate in rates.items():
        assert gluon.Trainer(two(), name).learning_rate == rate
        assert type(gluon.Trainer(two(), name, {"lr": 0.5}).optimizer).__name__.lower() == name.lower()


class Stretched(opt.SGD):
    """An optimizer of the script's own."""

    def __init__(self, lr: float = 3.0) -> None:
        super().__init__(lr)


def test_a_name_may_be_that_of_a_class_of_the_script() -> None:
    assert gluon.Trainer(two(), "Stretched").learning_rate == 3


OPTION_ERRORS: dict[str, tuple[Callable[[], Any], str]] = {
    "no parameters": (lambda: gluon.Trainer({}, "sgd"), "there are no parameters; call model.compile"),
    "a model": (lambda: gluon.Trainer(Normed(), "sgd"), "params must be"),
    "one Tensor": (lambda: gluon.Trainer(parameter([1.0]), "sgd"), "params must be"),
    "numbers as names": (lambda: gluon.Trainer({1: parameter([1.0])}, "sgd"), "params must be"),
    "a list of arrays": (lambda: gluon.Trainer([np.ones(2)], "sgd"), "params must be"),
    "an empty name": (lambda: gluon.Trainer({"": parameter([1.0])}, "sgd"), "a name in params is empty"),
    "an unknown optimizer": (lambda: gluon.Trainer(two(), "sdg"), "no Optimizer is called 'sdg'"),
    "a class": (lambda: gluon.Trainer(two(), opt.SGD), "must be a name or an opt.Optimizer"),
    "no optimizer": (lambda: gluon.Trainer(two(), None), "must be a name or an opt.Optimizer"),
    "DistOpt": (lambda: gluon.Trainer(two(), opt.DistOpt(opt.SGD(0.1))), "the optimizer that DistOpt wraps"),
    "DistOpt by name": (lambda: gluon.Trainer(two(), "DistOpt"), "the optimizer that DistOpt wraps"),
    "an unknown argument": (lambda: gluon.Trainer(two(), "sgd", {"speed": 1}), "speed"),
    "an argument twice": (lambda: gluon.Trainer(two(), "sgd", {"wd": 0, "weight_decay": 0}), "are the same"),
    "no dict": (lambda: gluon.Trainer(two(), "sgd", 0.1), "must be a dict"),
    "arguments of an object": (lambda: gluon.Trainer(two(), opt.SGD(0.1), {"lr": 1}), "given by name"),
    "a rate below 0": (lambda: gluon.Trainer(two(), "sgd", {"lr": -1}), "lr"),
    "an unknown store": (lambda: gluon.Trainer(two(), "sgd", kvstore="dust"), "'dust'"),
    "no store": (lambda: gluon.Trainer(two(), "sgd", kvstore=3), "a name, a KVStoreBase or None"),
    "an unknown reduction": (lambda: gluon.Trainer(two(), "sgd", reduction="max"), "'max'"),
    "update_on_kvstore 1": (lambda: gluon.Trainer(two(), "sgd", update_on_kvstore=1), "True, False or None"),
    "update on no store": (
        lambda: gluon.Trainer(two(), "sgd", kvstore=None, update_on_kvstore=True),
        "cannot",
    ),
    "compression of no store": (
        lambda: gluon.Trainer(two(), "sgd", kvstore=None, compression_params={"type": "2bit"}),
        "compression_params need a store",
    ),
    "compression of a local store": (
        lambda: gluon.Trainer(two(), "sgd", kvstore="local", compression_params={"type": "2bit"}),
        "for the stores device and dist",
    ),
    "async that does not update": (
        lambda: gluon.Trainer(
            two(),
            "sgd",
            kvstore=ReplicaStore("dist_async", LocalCommunicator(World())),
            update_on_kvstore=False,
        ),
        "dist_async updates on its servers",
    ),
    **{
        f"batch size {size!r}": (lambda size=size: gluon.Trainer(two(), "sgd").step(size), "batch_size")
        for size in (0, -1, True, "64", None, float("nan"), float("inf"), 1e-300)
    },
    "a batch size too long for a text": (
        lambda: gluon.Trainer(two(), "sgd").step(10**5000),
        "an int of 16610 bits must be a number",
    ),
    **{
        f"learning rate {lr!r}": (lambda lr=lr: gluon.Trainer(two(), "sgd").set_learning_rate(lr), "lr")
        for lr in (-1, True, "0.1", None, float("nan"), float("inf"))
    },
}


@pytest.mark.parametrize("what", OPTION_ERRORS)
def test_what_is_wrong_is_an_option_error(what: str) -> None:
    call, expected = OPTION_ERRORS[what]
    assert expected in caught(call, OptionError)


def test_what_is_no_parameter_is_a_dtype_error() -> None:
    for bad in (Tensor((2,)), np.ones(2), None, 3):
        text = caught(lambda bad=bad: gluon.Trainer({"a": parameter([1.0]), "w": bad}, "sgd"), DTypeError)
        assert "w: expected a parameter" in text


class Recorded(Normed):
    """Steps with a Trainer inside, or just the gradients."""

    trainer: Any = None

    def train_one_batch(self, x: Tensor, y: Tensor) -> Tensor:
        loss = self.loss(self.forward(x), y)
        loss.backward()
        if self.trainer is not None:
            self.trainer.step(1)
        return loss


@pytest.mark.parametrize("is_inside", [False, True])
def test_recorded_steps_train_as_eager_ones(is_inside: bool) -> None:
    x = Tensor(data=np.random.default_rng(1).standard_normal((4, 2, 3, 3)).astype(F32))
    y = Tensor(data=np.arange(4, dtype=np.int32) % 3)
    found = []
    for use_graph in (False, True):
        net = Recorded()
        net.compile([x], use_graph=use_graph)
        rng = np.random.default_rng(0)
        net.set_params({n: rng.standard_normal(p.shape).astype(F32) for n, p in net.get_params().items()})
        trainer = gluon.Trainer(net.get_params(), "sgd", {"lr": 0.1, "momentum": 0.9}, kvstore="device")
        net.trainer = trainer if is_inside else None
        for _ in range(6):
            net(x, y)
            if not is_inside:
                trainer.step(1)
        found.append(np.concatenate([to_numpy(p).ravel() for p in net.get_params().values()]))
        if use_graph:
            [info] = net.graph_info()
            assert ("key-value store" in (info.break_reason or "")) == is_inside
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("use_graph", [False, True])
def test_a_recorded_step_notices_that_its_optimizer_was_given_to_another_trainer(use_graph: bool) -> None:
    net, x = Recorded(), Tensor(data=np.random.default_rng(1).standard_normal((4, 2, 3, 3)).astype(F32))
    y = Tensor(data=np.arange(4, dtype=np.int32) % 3)
    net.compile([x], use_graph=use_graph)
    optimizer = opt.SGD(lr=0.1, momentum=0.9)
    net.trainer = gluon.Trainer(net.get_params(), optimizer, kvstore=None)
    for _ in range(4):
        net(x, y)
    assert [info.break_reason for info in net.graph_info()] == [None] * use_graph
    before = bits(net.get_params())
    second = gluon.Trainer(two(), optimizer, kvstore=None)
    assert "was given to another Trainer" in caught(net, OptionError, x, y)
    assert bits(net.get_params()) == before and second.optimizer.step_counter == 4


class Doubling(KVStoreBase):
    """Counts its calls, and doubles what is summed, in Python."""

    calls = 0

    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None:
        pass

    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        self.calls += 1
        for target in out:
            np.multiply(target.array, 2, out=target.array)


def test_a_store_of_the_scripts_own_is_called_in_every_step_of_a_model_with_a_graph() -> None:
    x = Tensor(data=np.ones((4, 2, 3, 3), F32))
    net = Recorded()
    net.compile([x], use_graph=True)
    store = Doubling()
    net.trainer = gluon.Trainer(net.get_params(), "sgd", {"lr": 0.1}, kvstore=store)
    for _ in range(5):
        net(x, Tensor(data=np.arange(4, dtype=np.int32) % 3))
    assert store.calls == 5
    assert "key-value store" in str(net.graph_info()[0].break_reason)


@pytest.mark.parametrize("updates_on_store", [True, False])
def test_the_learning_rate_that_was_set_is_saved(updates_on_store: bool, tmp_path: Path) -> None:
    store = kvstore.create("local")
    trainer = gluon.Trainer(two(), "sgd", kvstore=store, update_on_kvstore=updates_on_store)
    trainer.set_learning_rate(0.25)
    trainer.save_states(tmp_path / "states")
    trainer.set_learning_rate(0.75)
    trainer.load_states(tmp_path / "states")
    assert trainer.learning_rate == 0.25


def test_the_learning_rate_that_was_set_last_counts_wherever_it_was_set() -> None:
    params = two()
    trainer = gluon.Trainer(params, "sgd", kvstore=kvstore.create("local"), update_on_kvstore=True)
    store: Any = trainer.kvstore
    trainer.set_learning_rate(0.25)
    trainer.optimizer.lr = 0.5
    store.set_learning_rate(0.25)  # as before
    backward(dict.fromkeys(params.values(), 1))
    trainer.step(1)
    assert all_equal(params, 0.75) and trainer.learning_rate == 0.25
    store.set_learning_rate(0.125)
    trainer.optimizer.lr = 0.5
    backward(dict.fromkeys(params.values(), 1))
    trainer.step(1)
    assert all_equal(params, 0.25) and store.learning_rate == trainer.learning_rate == 0.5


SHARED: list[dict[str, Any]] = [{}, {"kvstore": None}, {"kvstore": "local", "update_on_kvstore": True}]


@pytest.mark.parametrize("arguments", SHARED, ids=["device", "no store", "on the store"])
def test_an_optimizer_is_that_of_the_trainer_that_was_made_last(arguments: dict[str, Any]) -> None:
    optimizer, one, other = opt.SGD(lr=1.0, momentum=0.5), two(), two(2.0)
    first = gluon.Trainer(one, optimizer, **arguments)
    backward(dict.fromkeys(one.values(), 1))
    first.step(1)
    second = gluon.Trainer(other, optimizer, **arguments)
    backward(dict.fromkeys([*one.values(), *other.values()], 1))
    states = bits({name: Tensor(data=array) for name, array in optimizer.get_states().items()})
    text = caught(first.step, OptionError, 1)
    assert "was given to another Trainer" in text and "SGD" in text, text
    assert all_equal(one, 0) and all_equal(other, 2) and optimizer.step_counter == 1
    assert all(param.has_fresh_grad for param in [*one.values(), *other.values()])
    assert bits({name: Tensor(data=array) for name, array in optimizer.get_states().items()}) == states
    second.step(1)
    assert all_equal(one, 0) and all_equal(other, 1) and optimizer.step_counter == 2
    del first, second
    again = gluon.Trainer(one, optimizer, **arguments)
    again.set_learning_rate(0.25)
    again.step(1)
    assert optimizer.step_counter == 3
    momentum = 0.0 if again.update_on_kvstore else 0.5  # a new store has no states
    assert all_equal(one, -0.25 * (momentum + 1))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda trainer: pickle.loads(pickle.dumps(trainer))])
def test_a_copy_of_a_trainer_has_an_optimizer_of_its_own(copied: Any) -> None:
    trainer = gluon.Trainer(two(), opt.SGD(lr=1.0), kvstore=None)
    other = copied(trainer)
    for each in (trainer, other):
        params = each._params
        backward(dict.fromkeys(params.values(), 1))
        each.step(1)
        assert all_equal(params, 0) and each.optimizer.step_counter == 1


@dataclasses.dataclass
class Plain(opt.Optimizer):
    """Has no hash, and is equal to another of the same rate."""

    rate: float

    def __post_init__(self) -> None:
        super().__init__(self.rate)

    def apply(self, param_name: str, param_value: Tensor, param_grad: Tensor) -> None:
        param_value -= param_grad * self.rate


def test_equal_optimizers_are_still_two() -> None:
    pairs = [(params, gluon.Trainer(params, Plain(0.5))) for params in (two(), two())]
    for params, trainer in pairs:
        backward(dict.fromkeys(params.values(), 1))
        trainer.step(1)
        assert all_equal(params, 0.5)


class FailsOnce(opt.Optimizer):
    """w -= lr * g, but for the second parameter ever: that is an exception."""

    def __init__(self) -> None:
        super().__init__(0.5)
        self._num_calls = 0

    def apply(self, param_name: str, param_value: Tensor, param_grad: Tensor) -> None:
        self._num_calls += 1
        if self._num_calls == 2:
            raise ArithmeticError("the second")
        param_value -= param_grad * 0.5


@pytest.mark.parametrize("store", [None, "local", "device", ReplicaStore("dist", LocalCommunicator(World()))])
@pytest.mark.parametrize("by_hand", [False, True])
def test_gradients_of_a_step_that_failed_are_not_used_again(
    store: str | KVStoreBase | None, by_hand: bool
) -> None:
    params = two(0.0)
    trainer = gluon.Trainer(params, FailsOnce(), kvstore=store, update_on_kvstore=False)
    step = trainer.update if by_hand else trainer.step
    backward(dict.fromkeys(params.values(), 4))
    with pytest.raises(ArithmeticError, match="the second"):
        step(4)
    # they are divided by the batch size, and one parameter has been updated
    assert "no backward has computed the gradient of large, small" in caught(step, GraphError, 4)
    before = values(params)
    backward(dict.fromkeys(params.values(), 4))
    step(4)
    after = values(params)
    assert all(np.array_equal(np.asarray(after[name]), np.asarray(before[name]) - 0.5) for name in params)


def test_gradients_of_a_step_that_was_interrupted_are_not_added_to() -> None:
    params = two(0.0)
    trainer = gluon.Trainer(params, "sgd", {"learning_rate": 1}, kvstore="device")
    backward(dict.fromkeys(params.values(), 4))
    finish, trainer._finish = trainer._finish, interrupt  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        trainer.step(4)
    trainer._finish = finish  # type: ignore[method-assign]
    backward(dict.fromkeys(params.values(), 8))
    gradients = [to_numpy(param.grad) for param in params.values() if param.grad is not None]
    assert len(gradients) == 2 and all((gradient == 8).all() for gradient in gradients)


def test_a_step_that_the_store_refused_can_be_made_again_after_a_backward() -> None:
    params = {"w": parameter([1.0])}
    trainer = gluon.Trainer(
        params, "sgd", {"learning_rate": 1}, kvstore="device", compression_params={"type": "2bit"}
    )
    backward({params["w"]: float("nan")})
    assert "not all finite" in caught(trainer.step, OptionError, 1)
    assert "no backward has computed the gradient of w" in caught(trainer.step, GraphError, 1)
    backward({params["w"]: 0.5})
    trainer.step(1)
    assert values(params) == {"w": [0.5]}


class FailsAt2(opt.Optimizer):
    """w -= lr * g, but for a gradient of 2: that is an exception of a type that the package's checks raise."""

    def apply(self, param_name: str, param_value: Tensor, param_grad: Tensor) -> None:
        if (to_numpy(param_grad) == 2).any():
            raise ShapeError("two")
        param_value -= param_grad * 0.5


@pytest.mark.parametrize("store", ["local", "device"])
def test_gradients_of_a_step_that_failed_in_the_store_are_not_used_again(store: str) -> None:
    params = two(0.0)
    trainer = gluon.Trainer(params, FailsAt2(0.5), kvstore=store, update_on_kvstore=True)
    backward(dict(zip(params.values(), (4, 8), strict=True)))
    with pytest.raises(ShapeError, match="two"):
        trainer.step(4)
    assert "no backward has computed the gradient of large, small" in caught(trainer.step, GraphError, 4)
    before = values(params)
    backward(dict.fromkeys(params.values(), 4))
    trainer.step(4)
    after = values(params)
    assert all(np.array_equal(np.asarray(after[name]), np.asarray(before[name]) - 0.5) for name in params)


def test_states_that_a_store_has_saved_are_refused(tmp_path: Path) -> None:
    trainer = gluon.Trainer(two(), "sgd", kvstore=kvstore.create("local"), update_on_kvstore=True)
    store: Any = trainer.kvstore
    store.save_optimizer_states(tmp_path / "states")
    with pytest.raises(CheckpointError, match="of a store's save_optimizer_states"):
        trainer.load_states(tmp_path / "states")


@pytest.mark.parametrize(
    "head", [{"lr": np.inf}, {"lr": 1e300}, {"lr": -0.1}, {"steps": 2**70}, {"steps": -1}, {"steps": None}]
)
def test_a_file_with_an_impossible_rate_or_count_is_refused_before_anything_changes(
    head: dict[str, Any],
) -> None:
    check_head({"lr": 0.1, "steps": 3})
    with pytest.raises(CheckpointError, match=r"lr|steps"):
        check_head({"lr": 0.1, "steps": 3} | head)
