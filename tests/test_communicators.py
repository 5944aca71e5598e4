# SPDX-License-Identifier: Apache-2.0
"""nnabla's communicator: every method on 1 to 4 ranks, the numbers of its tutorial, and ranks that differ.

One launch a transport and size runs all facts, as in tests/comm/test_contract.py; each test reports its own.
"""

from __future__ import annotations

import functools
import os
import signal
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from singa_lite import autograd, communicators, model, opt
from singa_lite import layer as layers
from singa_lite.comm.base import World
from singa_lite.comm.local import LocalCommunicator
from singa_lite.config import state
from singa_lite.device import create_cpu_device
from singa_lite.dtypes import bfloat16
from singa_lite.errors import CommError, DeviceError, DTypeError, GraphError, OptionError, ShapeError
from singa_lite.tensor import Tensor, to_numpy
from tests.ranks import mpi_missing, run_ranks
from tests.slow_cases import slow_but_first

WORLDS = [("local", 1), *((word, size) for word in ("shm", "mpi") for size in (2, 3, 4))]
FACTS: list[Callable[[Any], None]] = []
X = np.arange(-3, 9, dtype=np.float32).reshape(3, 4)


def fact(function: Callable[[Any], None]) -> Callable[[Any], None]:
    FACTS.append(function)
    return function


def joined(communicator: Any) -> communicators.MultiProcessCommunicator:
    """A communicator of nnabla's over the one that the test made for this process."""
    state.communicator, state.communicator_pid = communicator, os.getpid()
    comm = communicators.MultiProcessCommunicator()
    comm.init()
    return comm


def mixed(factor: float) -> list[Any]:
    """Arrays of all kinds: numpy's, Tensors, several dtypes and shapes, of no and of one element."""
    return [
        X * np.float32(factor),
        Tensor(data=X * factor, dtype="float16"),
        (X * factor).astype(np.int64),
        np.zeros((0, 3), np.float32),
        Tensor(data=X[0] * factor, dtype="float64"),
        np.array(factor, np.float32),
        Tensor(data=X * factor),
    ]


def bits(values: Any) -> list[bytes]:
    return [to_numpy(value).tobytes() for value in values]


def floats(values: list[Any]) -> list[Any]:
    return [value for value in values if value.dtype.kind == "f"]


@fact
def it_says_who_it_is(comm: Any) -> None:
    world = comm._world
    assert comm.name == "MultiProcessDataParallelCommunicator"
    assert (comm.size, comm.rank, comm.local_rank) == (world.size, world.rank, world.local_rank)
    comm.init(timeout_s=5)
    assert comm._world is world is state.communicator
    assert (
        comm.list_groups() == {"world": list(range(comm.size))}
        and comm.find_group("none") == comm.find_group(["none"]) == []
    )


@fact
def all_reduce_sums_arrays_of_all_kinds_in_both_forms(comm: Any) -> None:
    total = comm.size * (comm.size + 1) / 2
    for inplace in (False, True):
        data = mixed(comm.rank + 1)
        assert comm.all_reduce(data, inplace=inplace) is None
        assert bits(data) == bits(mixed(total))
        data = floats(mixed(comm.rank + 1))
        comm.all_reduce(data, division=True, inplace=inplace)
        assert bits(data) == bits(floats(mixed((comm.size + 1) / 2)))


@fact
def both_forms_give_the_same_bits_of_numbers_that_round(comm: Any) -> None:
    found = []
    for inplace in (False, True):
        rng = np.random.default_rng(comm.rank)
        data = [rng.standard_normal(shape).astype(np.float32) for shape in ((7,), (3, 5), (2, 1, 2))]
        comm.all_reduce(data, division=True, inplace=inplace)
        found.append(bits(data))
    assert found[0] == found[1]


@fact
def one_array_need_not_be_in_a_list_and_one_given_twice_counts_once(comm: Any) -> None:
    total = comm.size * (comm.size + 1) / 2
    t = Tensor(data=np.full(3, comm.rank + 1.0))
    comm.all_reduce(t)
    assert to_numpy(t).tolist() == [total] * 3
    for inplace in (False, True):
        x = np.full(4, comm.rank + 1.0)
        comm.all_reduce([x, x, x.reshape(2, 2)], inplace=inplace)
        assert x.tolist() == [total] * 4
    comm.all_reduce([])
    data = {"x": np.full(1, comm.rank + 1.0), "y": np.full(2, comm.rank + 1.0)}
    comm.all_reduce(data.values())
    comm.all_reduce(value for value in data.values())
    assert [value[0] for value in data.values()] == [total * comm.size] * 2


@fact
def empty_arrays_count_each_wherever_they_are_in_memory(comm: Any) -> None:
    flat = np.full(4, comm.rank + 1.0)
    empty = [flat[:0], flat[:0]] if comm.rank == 0 else [np.empty(0), flat[4:]]
    for inplace in (False, True):
        flat[:] = comm.rank + 1
        comm.all_reduce([*empty, flat], inplace=inplace)
        assert flat.tolist() == [comm.size * (comm.size + 1) / 2] * 4


@fact
def what_only_rank_0_sets_is_summed_like_anything_else(comm: Any) -> None:
    for division in (False, True):
        x = np.full(3, float(comm.rank == 0))
        comm.all_reduce(x, division)
        assert x.tolist() == [1 / comm.size if division else 1] * 3


@fact
def reduce_changes_the_arrays_of_one_rank(comm: Any) -> None:
    for dst in range(comm.size):
        for inplace in (False, True):
            data, mine = mixed(comm.rank + 1), mixed(comm.rank + 1)
            comm.reduce(data, dst, inplace=inplace)
            assert bits(data) == bits(mixed(comm.size * (comm.size + 1) / 2) if comm.rank == dst else mine)
            data = floats(mixed(comm.rank + 1))
            comm.reduce(data, dst, True, inplace)
            assert bits(data) == bits(floats(mixed((comm.size + 1) / 2) if comm.rank == dst else mine))


@fact
def bcast_copies_the_arrays_of_one_rank(comm: Any) -> None:
    for src in range(comm.size):
        for inplace in (False, True):
            data = mixed(comm.rank + 1)
            comm.bcast(data, src, inplace)
            assert bits(data) == bits(mixed(src + 1))


@fact
def all_gather_fills_one_array_a_rank(comm: Any) -> None:
    for dtype in ("float16", "float32", "int64"):
        rows = [
            Tensor((12,), dtype=dtype) if rank % 2 else np.zeros((3, 4), dtype) for rank in range(comm.size)
        ]
        mine = (X * (comm.rank + 1)).astype(dtype)
        mine.flags.writeable = False
        comm.all_gather(mine, rows)
        assert bits(rows) == bits([(X * (rank + 1)).astype(dtype) for rank in range(comm.size)])


@fact
def reduce_scatter_gives_each_rank_the_sum_of_its_item(comm: Any) -> None:
    for division in (False, True):
        items = [Tensor(data=(X + rank) * (comm.rank + 1)) for rank in range(comm.size)]
        out = np.zeros((4, 3), np.float32)
        comm.reduce_scatter(items, out, division)
        expected = (X + comm.rank) * ((comm.size + 1) / 2 * (1 if division else comm.size))
        assert out.reshape(3, 4).tolist() == expected.tolist()


@fact
def a_group_has_collectives_of_its_own(comm: Any) -> None:
    ranks = np.array([comm.size - 1, 0]) if comm.size > 1 else np.array([0])
    assert comm.new_group(("ends", ranks)) == "ends"
    assert comm.list_groups() == {"world": list(range(comm.size)), "ends": ranks.tolist()}
    assert comm.find_group("ends") == ranks.tolist()
    x = np.full(3, comm.rank + 1.0)
    if comm.rank not in ranks:
        rows = [np.zeros(3) for _ in ranks]
        for call in (
            lambda: comm.all_reduce(x, group="ends"),
            lambda: comm.reduce(x, 0, group="ends"),
            lambda: comm.bcast(x, 0, group="ends"),
            lambda: comm.all_gather(x, rows, "ends"),
            lambda: comm.reduce_scatter(rows, x, group="ends"),
            lambda: comm.barrier("ends"),
            lambda: comm.all_reduce_callback(x, 1, group="ends"),
        ):
            with pytest.raises(OptionError, match=f"rank {comm.rank} is not in group 'ends'"):
                call()
        return
    members = [rank + 1 for rank in ranks.tolist()]
    comm.all_reduce(x, group="ends", division=True)
    assert x.tolist() == [sum(members) / len(members)] * 3
    for root in ranks.tolist():
        x = np.full(3, comm.rank + 1.0)
        comm.reduce(x, root, inplace=True, group="ends")
        assert x.tolist() == [sum(members) if comm.rank == root else comm.rank + 1] * 3
        comm.bcast(x, int(root), group="ends")
        assert x.tolist() == [sum(members)] * 3
    rows = [np.zeros(3) for _ in ranks]
    comm.all_gather(np.full(3, comm.rank + 1.0), rows, "ends")
    assert [row[0] for row in rows] == members
    comm.reduce_scatter(rows, x, group="ends")
    assert x.tolist() == [members[ranks.tolist().index(comm.rank)] * len(members)] * 3
    comm.barrier("ends")


@fact
def bad_calls_raise_before_anything_is_sent(comm: Any) -> None:
    x, ints = np.full(4, 7.0, np.float32), np.arange(4)
    comm.new_group(("taken", [0]))
    with autograd.record():
        made = Tensor((2,), stores_grad=True) * 2.0
    rows = [np.zeros(4, np.float32) for _ in range(comm.size)]
    bad: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (
            OptionError,
            "group = 'none' is not known; choose one of 'world'",
            lambda: comm.all_reduce(x, group="none"),
        ),
        (OptionError, "group = 3", lambda: comm.barrier(3)),
        (OptionError, "dst = 9 is not in group 'world'", lambda: comm.reduce(x, 9)),
        (OptionError, "dst = -1 must be an int >= 0", lambda: comm.reduce(x, -1)),
        (OptionError, "src = True", lambda: comm.bcast(x, True)),
        (DTypeError, "division=True needs floats", lambda: comm.all_reduce([x, ints], division=True)),
        (
            DTypeError,
            "division=True needs floats",
            lambda: comm.reduce_scatter([ints] * comm.size, ints.copy(), True),
        ),
        (
            DTypeError,
            "expected a Tensor, a numpy or a CUDA array, got list",
            lambda: comm.all_reduce([x, [1.0]]),
        ),
        (DTypeError, "got NoneType", lambda: comm.all_reduce([x, None])),
        (DTypeError, "complex64 cannot be sent", lambda: comm.all_reduce([x, np.ones(2, np.complex64)])),
        (ShapeError, "not contiguous", lambda: comm.all_reduce([x, np.ones((4, 4)).T[1:]])),
        (ShapeError, "read-only", lambda: comm.all_reduce([x, np.broadcast_to(np.float32(1), 1)])),
        (ShapeError, "two of the arrays overlap", lambda: comm.all_reduce([x, x[1:]])),
        (GraphError, "all_reduce: changing a recorded tensor", lambda: comm.all_reduce(made)),
        (OptionError, f"a list of {comm.size} arrays", lambda: comm.all_gather(x, [*rows, x])),
        (OptionError, "not ndarray", lambda: comm.all_gather(x, np.zeros((comm.size, 4), np.float32))),
        (ShapeError, r"ndarray_list\[0\] is float32\(4,\) but", lambda: comm.all_gather(x[:3], rows)),
        (
            ShapeError,
            "two of the arrays overlap",
            lambda: (
                comm.all_gather(x, rows[:1] * comm.size) if comm.size > 1 else comm.all_reduce([x, x[1:]])
            ),
        ),
        (ShapeError, "but ndarray float64", lambda: comm.reduce_scatter(rows, np.zeros(4))),
        (OptionError, r"expected \(name, ranks\)", lambda: comm.new_group("g")),
        (OptionError, "the name must be text", lambda: comm.new_group((1, [0]))),
        (OptionError, "there is a group 'taken' of ranks", lambda: comm.new_group(("taken", [0]))),
        (OptionError, "there is a group 'world'", lambda: comm.new_group(("world", [0]))),
        (OptionError, "must be distinct ranks", lambda: comm.new_group(("g", [0, 0]))),
        (OptionError, "must be distinct ranks", lambda: comm.new_group(("g", [comm.size]))),
        (OptionError, "must be distinct ranks", lambda: comm.new_group(("g", []))),
        (OptionError, "must be an int >= 0", lambda: comm.new_group(("g", [0.5]))),
        (OptionError, "pack_size = 0", lambda: comm.all_reduce_callback([x], 0)),
        (OptionError, "division = array", lambda: comm.all_reduce_callback([x], 4, np.arange(2))),
        (OptionError, "scale_grad = 'a'", lambda: comm.all_reduce_callback([x], 1, scale_grad="a")),
        (OptionError, "scale_grad = inf", lambda: comm.all_reduce_callback([x], 1, scale_grad=np.inf)),
        (DTypeError, "division=True needs floats", lambda: comm.all_reduce_callback([ints], 1, True)),
        (DTypeError, "scale_grad needs", lambda: comm.all_reduce_callback([ints], 1, scale_grad=0.5)),
        (
            OptionError,
            "has the parameter .*'w'.*; give gradients",
            lambda: comm.all_reduce_callback([Tensor((1,), stores_grad=True, name="w")], 1),
        ),
        (OptionError, "timeout_s", lambda: comm.init(timeout_s=0)),
    ]
    before = comm._world.traffic.bytes_payload
    for error, message, call in bad:
        with pytest.raises(error, match=message):
            call()
    assert x.tolist() == [7] * 4 and comm._world.traffic.bytes_payload == before
    assert set(comm.list_groups()) == {"world", "ends", "taken"}


# ---- the tutorial's numbers ------------------------------------------------------------------------------

PAGE = {  # of the ranks called A and B, and their mean
    "conv/W": (
        [5.0180483, 0.457942, -2.8701296, 2.0715926, 3.0698593, -1.6650047, -2.5591214, 6.4248834, 9.881935],
        [-1.2505884, -0.87151337, -8.685524, 10.738419, 14.676786, 7.483423, 5.612471, -12.880402, 19.141157],
        [
            1.8837300,
            -0.2067857,
            -5.7778268,
            6.4050058,
            8.8733227,
            2.9092092,
            1.5266748,
            -3.2277593,
            14.511546,
        ],
    ),
    "conv/b": ([8.658947], [13.196114], [10.9275305]),
    "affine/W": (
        [-0.93160367, -1.376812, -1.8957546, -0.33000934, -0.7211893, -0.25237036],
        [-1.6865108, -0.938529, -1.028422, -0.98217344, -0.97528917, -0.413546],
        [-1.3090572, -1.1576705, -1.4620883, -0.6560914, -0.8482392, -0.3329582],
    ),
    "affine/b": ([-0.48865744, 0.48865741], [-0.7447065, 0.7447065], [-0.6166820, 0.6166820]),
}
SUMS = {"conv/b": [21.855061], "affine/b": [-1.2333639, 1.2333639]}  # what the page prints for all but conv/W


@fact
def every_gradient_of_the_page_is_divided(comm: Any) -> None:
    for inplace in (False, True):
        grads = {name: np.array(rows[comm.rank % 2], np.float32) for name, rows in PAGE.items()}
        comm.all_reduce(list(grads.values()), division=True, inplace=inplace)
        if comm.size == 2:
            for name, (_, _, mean) in PAGE.items():
                np.testing.assert_allclose(grads[name], mean, rtol=2e-7, atol=1e-7, err_msg=name)
        if comm.size == 3:  # A, B, A
            np.testing.assert_allclose(grads["conv/b"], [10.171336], rtol=1e-7)
    grads = {name: np.array(PAGE[name][comm.rank % 2], np.float32) for name in SUMS}
    comm.all_reduce(list(grads.values()))
    if comm.size == 2:
        for name, total in SUMS.items():
            np.testing.assert_allclose(grads[name], total, rtol=1e-7)
    if comm.size == 3:
        np.testing.assert_allclose(grads["conv/b"], [30.514008], rtol=1e-7)


def network(rank: int) -> tuple[dict[str, Tensor], Tensor]:
    """The page's parameters and the loss of a rank's data."""
    weights, data = np.random.RandomState(0), np.random.RandomState(rank)
    values = {
        "conv/W": weights.uniform(-2, 2, (1, 1, 3, 3)),
        "conv/b": np.zeros(1),
        "affine/W": weights.uniform(-2, 2, (1024, 2)),
        "affine/b": np.zeros(2),
    }
    params = {name: Tensor(data=value, stores_grad=True, name=name) for name, value in values.items()}
    x, y = Tensor(data=data.rand(4, 1, 32, 32)), Tensor(data=data.choice(2, 4), dtype="int32")
    with autograd.record():
        h = autograd.flatten(autograd.conv2d(x, params["conv/W"], params["conv/b"], padding=1))
        h = autograd.add_bias(autograd.matmul(h, params["affine/W"]), params["affine/b"])
        loss = autograd.softmax_cross_entropy(h, y)
    return params, loss


LOSSES = (31.714787, 26.005419, 11.262360)
OWN = (  # conv/b, conv/W[0, 0, 0], its sum of magnitudes, affine/W[0, 0], its sum of magnitudes, affine/b[0]
    (3.597467, [-7.719436, 14.766751, -3.604381], 53.50172, -0.195633, 1240.9110, -0.248646),
    (-0.007115, [-7.911251, 4.599514, -4.463818], 40.29651, 0.508456, 452.5401, 0.000492),
    (0.014353, [4.082939, -3.721111, -2.655966], 35.30304, -0.337526, 441.9827, -0.000992),
)
MEANS = {
    2: (1.795176, [-7.815343, 9.683133, -4.034099], 42.84009, 0.156412, 650.8231, -0.124077),
    3: (1.201568, [-3.849249, 5.215051, -3.574722], 29.48149, -0.008234, 443.0904, -0.083049),
}


def summary(params: dict[str, Tensor]) -> tuple[Any, ...]:
    grads = {name: to_numpy(param.grad).astype(np.float64) for name, param in params.items()}
    conv, affine = grads["conv/W"], grads["affine/W"]
    row = conv[0, 0, 0].tolist()
    return (
        grads["conv/b"][0], row, np.abs(conv).sum(), affine[0, 0], np.abs(affine).sum(), grads["affine/b"][0]
    )  # fmt: skip


def assert_close(found: tuple[Any, ...], expected: tuple[Any, ...]) -> None:
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


@fact
def the_network_of_the_page_has_the_gradients_of_nnabla(comm: Any) -> None:
    params, loss = network(comm.rank)
    adam = opt.Adam(lr=0.001)
    adam.set_parameters(params)
    adam.zero_grad()
    loss.backward()
    if comm.rank < 3:
        np.testing.assert_allclose(loss.item(), LOSSES[comm.rank], rtol=1e-5)
        assert_close(summary(params), OWN[comm.rank])
    comm.all_reduce([param.grad for param in params.values()], division=True)
    if comm.size in MEANS:
        assert_close(summary(params), MEANS[comm.size])
    before = to_numpy(params["conv/W"]).ravel()
    adam.update_all([(param, param.grad) for param in params.values()])
    adam.step()
    if comm.size == 2:
        conv = to_numpy(params["conv/W"]).ravel()
        np.testing.assert_allclose(conv[:4], [0.19625401, 0.8597575, 0.4120535, 0.17853273], rtol=1e-6)
        np.testing.assert_allclose(to_numpy(params["conv/b"]), [-0.001], rtol=1e-5)
        np.testing.assert_allclose(to_numpy(params["affine/b"]), [0.001, -0.001], rtol=1e-5)
        np.testing.assert_allclose(np.abs(conv - before), 0.001, rtol=1e-3)


# ---- sums while backward goes on ---------------------------------------------------------------------


def three_layers(rank: int) -> tuple[list[Tensor], Tensor]:
    """Parameters of two dtypes, one of them used twice and one not at all, and a loss."""
    rng, data = np.random.default_rng(7), np.random.default_rng([8, rank])
    shapes = [(5, 5), (5,), (5, 5), (3,), (4,)]
    dtypes = ["float32"] * 4 + ["float64"]
    params = [
        Tensor(data=rng.standard_normal(shape), dtype=dtype, stores_grad=True, name=f"p{number}")
        for number, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))
    ]
    x = Tensor(data=data.standard_normal((6, 5)))
    with autograd.record():
        h = autograd.tanh(autograd.add_bias(autograd.matmul(x, params[0]), params[1]))
        h = autograd.matmul(autograd.tanh(autograd.matmul(h, params[2])), params[0])  # a shared parameter
        loss = autograd.reduce_mean(h * h, keepdims=0)
        other = autograd.reduce_sum(params[4] * float(rank + 1), keepdims=0)
    other.backward()
    return params, loss


CASES: list[dict[str, Any]] = [
    *({"pack_size": pack_size} for pack_size in (1, 2, 8, 10_485_761)),
    {"pack_size": 8, "division": True},
    {"pack_size": 30, "scale_grad": 0.1},
    {"pack_size": 2, "scale_grad": 0.1, "division": True, "keep_dtype": True},
]


@fact
def all_reduce_callback_gives_the_bits_of_all_reduce(comm: Any) -> None:
    pair = [0, comm.size - 1] if comm.size > 1 else [0]
    comm.new_group(("pair", pair))
    groups = ["world", "pair"] if comm.rank in pair else ["world"]
    for options in [{**case, "group": group} for case in CASES for group in groups]:
        found = []
        for with_callback in (False, True):
            params, loss = three_layers(comm.rank)
            grads = [param.grad for param in params]
            if with_callback:
                callback = comm.all_reduce_callback([*grads, grads[0]], **options)
                loss.backward(communicator_callbacks=callback)
            else:
                loss.backward()
                for grad in grads:
                    grad *= options.get("scale_grad", 1)
                comm.all_reduce(grads, options.get("division", False), group=options["group"])
            assert [param.has_fresh_grad for param in params] == [True, True, True, False, True]
            found.append(bits(grads))
        assert found[0] == found[1], options


class Sent(autograd.BackwardCallback):
    """Notes how many bytes have been sent when a gradient is final."""

    def __init__(self, comm: Any) -> None:
        self.comm, self.first = comm, comm._world.traffic.bytes_payload
        self.seen: list[int] = []

    def add_gradient(self, param: Tensor) -> None:
        self.seen.append(self.comm._world.traffic.bytes_payload - self.first)

    def finish(self) -> None:
        self.add_gradient(Tensor())


@fact
def sums_start_while_backward_goes_on(comm: Any) -> None:
    for pack_size, expected in (
        (1, [100, 120, 220]),
        (5, [100, 120, 220]),
        (6, [100, 100, 200]),
        (99, [0, 0, 0]),
    ):
        params, loss = three_layers(comm.rank)
        sent = Sent(comm)
        callback = comm.all_reduce_callback([param.grad for param in params[:3]], pack_size)
        loss.backward(communicator_callbacks=[callback, sent])
        if comm.size > 1:
            assert sent.seen == [*expected, 220], pack_size


@fact
def several_callbacks_of_one_backward_sum_what_each_was_given(comm: Any) -> None:
    found = []
    for with_callbacks in (False, True):
        params, loss = three_layers(comm.rank)
        grads = [param.grad for param in params[:3]]
        callbacks = [comm.all_reduce_callback(part, 1) for part in (grads[:1], grads[1:]) if with_callbacks]
        loss.backward(communicator_callbacks=callbacks or None)
        if not with_callbacks:
            comm.all_reduce(grads)
        found.append(bits(grads))
    assert found[0] == found[1]


@fact
def a_gradient_in_two_callbacks_is_an_error(comm: Any) -> None:
    params, loss = three_layers(comm.rank)
    before = bits(param.grad for param in params)
    callbacks = [comm.all_reduce_callback([param.grad for param in params[:3]], size) for size in (1, 99)]
    with pytest.raises(OptionError, match="two communicator_callbacks change the same gradient"):
        loss.backward(communicator_callbacks=callbacks)
    raw = params[0].grad.array.reshape(-1)
    callbacks = [comm.all_reduce_callback([given], 1) for given in (params[0].grad, raw)]
    with pytest.raises(OptionError, match="two communicator_callbacks change the same gradient"):
        loss.backward(communicator_callbacks=callbacks)
    assert bits(param.grad for param in params) == before


@fact
def a_callback_with_the_gradient_of_an_earlier_dtype_is_an_error(comm: Any) -> None:
    w = Tensor(data=np.ones(3, np.float32), stores_grad=True, name="w")
    callback = comm.all_reduce_callback([w.grad], 1)
    w.to_type(np.float64)
    with autograd.record():
        loss = autograd.reduce_sum(w * w)
    with pytest.raises(
        GraphError, match="the parameter of gradient 0 has changed its shape, dtype or device"
    ):
        loss.backward(communicator_callbacks=callback)


@fact
def gradients_added_up_over_two_passes_are_summed_once(comm: Any) -> None:
    found = []
    for with_callback in (False, True):
        w = Tensor(data=np.array([0.3, -0.7]) * (comm.rank + 1), stores_grad=True, name="w")
        callback = comm.all_reduce_callback(w.grad, 1, division=True) if with_callback else None
        for callbacks in (None, callback):
            with autograd.record():
                loss = autograd.reduce_sum(w * w * w, keepdims=0)
            loss.backward(communicator_callbacks=callbacks)
        if not with_callback:
            comm.all_reduce([w.grad], division=True)
        found.append(bits([w.grad]))
    assert found[0] == found[1]


@fact
def gradients_left_out_of_a_callback_stay_as_they_are(comm: Any) -> None:
    params, loss = three_layers(comm.rank)
    raw = params[0].grad.data
    loss.backward(communicator_callbacks=[comm.all_reduce_callback([raw], 3)])
    own, loss = three_layers(comm.rank)
    loss.backward()
    assert bits(param.grad for param in params[1:]) == bits(param.grad for param in own[1:])
    comm.all_reduce(own[0].grad)
    assert bits([params[0].grad]) == bits([own[0].grad])


class Raises(autograd.BackwardCallback):
    def add_gradient(self, param: Tensor) -> None:
        raise ValueError(param.name)


@fact
def after_a_callback_that_raised_the_next_step_is_right(comm: Any) -> None:
    expected = []
    for fails in (False, True):
        params, loss = three_layers(comm.rank)
        callback = comm.all_reduce_callback([param.grad for param in params[:3]], 1)
        if fails:
            with pytest.raises(ValueError, match=r"p0|p2"):
                loss.backward(communicator_callbacks=[callback, Raises()])
            for param in params:
                param.mark_grad_stale()
            again, loss = three_layers(comm.rank)
            callback = comm.all_reduce_callback([param.grad for param in again[:3]], 1)
            params = again
        loss.backward(communicator_callbacks=callback)
        expected.append(bits(param.grad for param in params[:3]))
    assert expected[0] == expected[1]


# ---- copies in one process ---------------------------------------------------------------------------


def copies(*values: float) -> list[dict[str, Tensor]]:
    found = []
    for value in values:
        params = {"w": Tensor((2,), stores_grad=True), "b": Tensor((1,), stores_grad=True)}
        for param in params.values():
            param.grad.set_value(value)
        found.append(params)
    return found


@fact
def registered_copies_are_summed_before_the_ranks(comm: Any) -> None:
    for division in (False, True):
        comm.clear_context_parameters()
        registered = copies(1.0 * (comm.rank + 1), 3.0 * (comm.rank + 1))
        for params in registered:
            comm.add_context_and_parameters((None, params))
        comm.allreduce(division)
        expected = 4.0 * comm.size * (comm.size + 1) / 2 / (2 * comm.size if division else 1)
        assert [to_numpy(p.grad).tolist() for params in registered for p in params.values()] == [
            [expected] * 2, [expected]
        ] * 2  # fmt: skip
    comm.clear_context_parameters()
    with pytest.raises(OptionError, match="allreduce needs add_context_and_parameters"):
        comm.allreduce()


def register(comm: Any, gradients: dict[str, Any], dtype: Any = np.float64) -> dict[str, Tensor]:
    """Register a copy whose parameters have these gradients, in this order."""
    params = {}
    for name, values in gradients.items():
        params[name] = Tensor(data=np.zeros(np.shape(values)), dtype=dtype, stores_grad=True, name=name)
        grad = params[name].grad
        assert grad is not None
        grad.copy_from_numpy(np.asarray(values, dtype))
    comm.add_context_and_parameters((None, params))
    return params


def gradients_of(registered: list[dict[str, Tensor]], name: str) -> list[Any]:
    return [to_numpy(params[name].grad).tolist() for params in registered]


@fact
def copies_with_names_in_another_order_are_summed_by_name(comm: Any) -> None:
    comm.clear_context_parameters()
    first = register(comm, {"enc": [1.0 + comm.rank], "dec": [100.0 * (1 + comm.rank)]})
    second = register(comm, {"dec": [300.0 * (1 + comm.rank)], "enc": [3.0 + comm.rank]})
    comm.allreduce()
    ranks = range(comm.size)
    assert gradients_of([first, second], "enc") == [[sum(4.0 + 2 * rank for rank in ranks)]] * 2
    assert gradients_of([first, second], "dec") == [[sum(400.0 * (1 + rank) for rank in ranks)]] * 2
    comm.clear_context_parameters()


def forty_thousands(number: int, count: int) -> list[float]:
    """Return float16 numbers: over all numbers below ``count`` their mean is 40000 and the largest is below 41000."""
    return [40000.0 + 32 * (2 * number - count + 1)] * 2


@fact
def means_of_float16_copies_do_not_overflow(comm: Any) -> None:
    for count in (1, 2, 3):
        comm.clear_context_parameters()
        numbers = range(comm.rank * count, (comm.rank + 1) * count)
        registered = [
            register(comm, {"w": forty_thousands(number, comm.size * count)}, np.float16)
            for number in numbers
        ]
        comm.allreduce(division=True)
        assert gradients_of(registered, "w") == [[40000.0] * 2] * count, count
    comm.clear_context_parameters()


HALF_STEP = 2.0**-8  # of bfloat16 between 1 and 2: how far a number that is rounded once may be off


def between_1_and_2(number: int) -> Any:
    return (1 + np.random.default_rng([3, number]).integers(0, 128, 200) / 128).astype(bfloat16)


@fact
def means_of_bfloat16_copies_are_rounded_once(comm: Any) -> None:
    for count in (2, 3):  # one copy is sent in bfloat16, which all_reduce refuses
        comm.clear_context_parameters()
        numbers = range(comm.rank * count, (comm.rank + 1) * count)
        registered = [register(comm, {"w": between_1_and_2(number)}, bfloat16) for number in numbers]
        comm.allreduce(division=True)
        every = [between_1_and_2(number).astype(np.float64) for number in range(comm.size * count)]
        for found in gradients_of(registered, "w"):
            assert abs(np.array(found) - np.mean(every, 0)).max() <= HALF_STEP * (1 + 1e-5), count
    comm.clear_context_parameters()


@fact
def a_gradient_that_is_gone_is_named_before_any_is_summed(comm: Any) -> None:
    comm.clear_context_parameters()
    first = register(comm, {"b": [1.0 + comm.rank], "w": [2.0]})
    second = register(comm, {"b": [10.0 + comm.rank], "w": [20.0]})
    second["w"].stores_grad = False
    before = comm._world.traffic.bytes_payload
    with pytest.raises(DTypeError, match="allreduce: w: expected a parameter"):
        comm.allreduce()
    assert gradients_of([first, second], "b") == [[1.0 + comm.rank], [10.0 + comm.rank]]
    assert gradients_of([first], "w") == [[2.0]] and comm._world.traffic.bytes_payload == before
    comm.clear_context_parameters()


# ---- the launches ------------------------------------------------------------------------------------


def run_facts(communicator: Any) -> dict[str, str]:
    """Every fact's traceback on this rank, "" where it holds."""
    comm, outcome = joined(communicator), {}
    for check in FACTS:
        try:
            check(comm)
            comm.barrier()
            outcome[check.__name__] = ""
        except Exception as error:
            outcome[check.__name__] = traceback.format_exc()
            if isinstance(error, CommError):
                break
    state.communicator = None
    return outcome


@functools.cache
def outcomes(transport: str, size: int) -> list[dict[str, str]]:
    return run_ranks(run_facts, size, transport=transport)


@pytest.mark.parametrize(("transport", "size"), WORLDS, ids=lambda value: str(value))
@pytest.mark.parametrize("name", [check.__name__ for check in FACTS])
def test_that(transport: str, size: int, name: str) -> None:
    if transport == "mpi" and (reason := mpi_missing()):
        pytest.skip(reason)
    texts = [outcome.get(name, "not reached") for outcome in outcomes(transport, size)]
    assert not any(texts), "\n".join(f"-- rank {rank}: {text}" for rank, text in enumerate(texts) if text)


# ---- ranks that differ -------------------------------------------------------------------------------


def other_use(comm: Any) -> None:
    """A backward that reaches one gradient more on rank 1."""
    v, w = (Tensor(data=[1.0, 2.0], stores_grad=True, name=name) for name in "vw")
    with autograd.record():
        loss = autograd.reduce_sum(v * w if comm.rank == 1 else v * 2.0, keepdims=0)
    loss.backward(communicator_callbacks=comm.all_reduce_callback([v.grad, w.grad], 1))


def two_sums(comm: Any, pack_size: int) -> None:
    params, loss = three_layers(comm.rank)
    loss.backward(communicator_callbacks=comm.all_reduce_callback([p.grad for p in params], pack_size))


DIFFERENCES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "number": (lambda comm: comm.all_reduce([np.ones(3)] + [np.ones(2)] * (comm.rank == 1)), "float64[5]"),
    "order": (
        lambda comm: comm.all_reduce([np.ones(3), np.ones(2)][:: -1 if comm.rank == 1 else 1]),
        "of 2, 3 elements",
    ),
    "parts of one length": (
        lambda comm: comm.reduce([np.ones(5)] if comm.rank == 1 else [np.ones(3), np.ones(2)], 0),
        "of 3, 2 elements",
    ),
    "lengths of inplace": (
        lambda comm: comm.all_reduce([np.ones(3)] * 1 + [np.ones(4)] * (comm.rank == 1), inplace=True),
        "of 3, 4 elements",
    ),
    "nothing": (lambda comm: comm.all_reduce([np.ones(3)] * comm.rank), "of 0 elements"),
    "division": (lambda comm: comm.all_reduce(np.ones(3), comm.rank == 1), "mean"),
    "dtype": (lambda comm: comm.all_reduce(np.ones(3, np.int32 if comm.rank == 1 else np.float32)), "int32"),
    "inplace": (lambda comm: comm.all_reduce([np.ones(3), np.ones(4)], inplace=comm.rank == 1), "float64[7]"),
    "root": (lambda comm: comm.bcast(np.ones(3), comm.rank), "root"),
    "call": (
        lambda comm: comm.barrier() if comm.rank else comm.all_reduce(np.ones(3)),
        "communicators.barrier",
    ),
    "members": (lambda comm: comm.new_group(("g", [comm.rank])), "ranks disagree about the members"),
    "name of a group": (lambda comm: comm.new_group((f"g{comm.rank}", [0])), "new_group g1"),
    "graph": (other_use, "w#1"),
    "pack_size": (lambda comm: two_sums(comm, 1 if comm.rank == 1 else 100), "p0"),
}


def differ(communicator: Any, name: str) -> str:
    try:
        DIFFERENCES[name][0](joined(communicator))
    except CommError as error:
        return str(error)
    return ""


def differ_over_mpi(communicator: Any) -> dict[str, str]:
    """Every difference on a communicator of its own, in one job."""
    from singa_lite.comm.mpi import MpiCommunicator

    return {name: differ(MpiCommunicator(communicator.world, 30), name) for name in DIFFERENCES}


@functools.cache
def differences_over_mpi() -> list[dict[str, str]]:
    return run_ranks(differ_over_mpi, 2, transport="mpi")


@pytest.mark.parametrize("transport", ["shm", "mpi"])
@pytest.mark.parametrize("name", DIFFERENCES)
def test_ranks_that_differ_get_an_error_each(transport: str, name: str) -> None:
    if transport == "mpi" and (reason := mpi_missing()):
        pytest.skip(reason)
    texts = (
        [seen[name] for seen in differences_over_mpi()] if transport == "mpi" else run_ranks(differ, 2, name)
    )
    for text in texts:
        assert DIFFERENCES[name][1] in text


def aborts(communicator: Any) -> str:
    comm = joined(communicator)
    comm.new_group(("others", [2, 1]))
    comm.barrier()
    if comm.rank == 1:
        comm.abort("the data of rank 1 are not there")
    with pytest.raises(CommError) as found:
        comm.barrier("world" if comm.rank == 0 else "others")
    return str(found.value)


@pytest.mark.parametrize("transport", ["shm", "mpi"])
def test_an_abort_is_an_error_of_all_peers_that_says_why(transport: str) -> None:
    if transport == "mpi" and (reason := mpi_missing()):
        pytest.skip(reason)
    waits_in_world, own, waits_in_group = run_ranks(aborts, 3, transport=transport)
    assert "closed" in own and "this rank aborted: the data of rank 1 are not there" in own
    for text in (waits_in_world, waits_in_group):
        assert "aborted: the data of rank 1 are not there" in text


# ---- recorded steps ----------------------------------------------------------------------------------


class Net(model.Model):
    """Steps of nnabla's form, by the communicator or by its callback."""

    def __init__(self, comm: Any, way: str) -> None:
        super().__init__()
        self.first, self.second = layers.Linear(6), layers.Linear(1)
        self.comm, self.way = comm, way
        self.callback: Any = None

    def forward(self, x: Tensor) -> Tensor:
        return self.second(autograd.tanh(self.first(x)))

    def train_one_batch(self, x: Tensor, y: Tensor) -> Tensor:
        loss = autograd.mse_loss(self.forward(x), y)
        params = self.get_params().values()
        self.optimizer.zero_grad()
        loss.backward(communicator_callbacks=self.callback)
        if self.way == "sums":
            self.comm.all_reduce([param.grad for param in params], division=True)
        self.optimizer.update_all([(param, param.grad) for param in params])
        self.optimizer.step()
        return loss


def recorded_steps(communicator: Any, way: str, use_graph: bool) -> Any:
    comm = joined(communicator)
    net = Net(comm, way)
    net.set_optimizer(opt.SGD(0.1, momentum=0.9))
    batches = np.random.default_rng(comm.rank).standard_normal((6, 5, 5)).astype(np.float32)
    net.compile([Tensor(data=batches[0, :, :4])], use_graph=use_graph)
    params = net.get_params()
    for name in ("first.W", "second.W"):
        params[name].copy_from_numpy(
            np.random.default_rng(3).standard_normal(params[name].shape).astype(np.float32)
        )
    if way == "callback":
        net.callback = comm.all_reduce_callback([param.grad for param in params.values()], 8, division=True)
    for batch in batches:
        net(Tensor(data=batch[:, :4]), Tensor(data=batch[:, 4:]))
    infos = [(info.break_reason, info.num_collectives) for info in net.graph_info()]
    return [to_numpy(param) for param in params.values()], infos


@pytest.mark.parametrize("way", ["sums", "callback"])
def test_a_recorded_step_sends_what_an_eager_one_sends(way: str) -> None:
    eager = run_ranks(recorded_steps, 3, way, False)
    recorded = run_ranks(recorded_steps, 3, way, True)
    for (expected, _), (found, infos) in zip(eager, recorded, strict=True):
        for one, other, first in zip(found, expected, recorded[0][0], strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
            assert one.tobytes() == first.tobytes()
        assert [reason for reason, _ in infos] == [None, None]
        assert {number for _, number in infos} == {1 if way == "sums" else 2}


# ---- without a world ---------------------------------------------------------------------------------


def test_before_init_everything_says_to_call_it() -> None:
    comm = communicators.MultiProcessCommunicator()
    x = np.ones(2)
    for call in (
        *(lambda name=name: getattr(comm, name) for name in ("name", "size", "rank", "local_rank")),
        *(
            lambda name=name: getattr(comm, name)()
            for name in ("list_groups", "barrier", "abort", "allreduce")
        ),
        lambda: comm.all_reduce(x),
        lambda: comm.reduce(x, 0),
        lambda: comm.bcast(x, 0),
        lambda: comm.all_gather(x, [x]),
        lambda: comm.reduce_scatter([x], x),
        lambda: comm.new_group(("g", [0])),
        lambda: comm.find_group("g"),
        lambda: comm.all_reduce_callback(x, 1),
    ):
        with pytest.raises(CommError, match=r"call init\(\) first"):
            call()
    assert "init() was not called" in repr(comm)


def test_the_names_of_nnabla_are_one_class() -> None:
    assert {getattr(communicators, name) for name in communicators.__all__} == {
        communicators.MultiProcessDataParallelCommunicator, communicators.DataParallelCommunicator
    }  # fmt: skip
    assert communicators.Comm is communicators.Dist is communicators.MultiProcessDataParalellCommunicator


def test_the_local_rank_is_that_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    for rank, local_rank in enumerate((0, 0, 1, 1)):
        world = LocalCommunicator(World(rank, 4, local_rank, 2))
        monkeypatch.setattr(state, "communicator", world)
        monkeypatch.setattr(state, "communicator_pid", os.getpid())
        comm = communicators.Comm(create_cpu_device())
        comm.init()
        assert (comm.rank, comm.local_rank, comm.size) == (rank, local_rank, 4)


@pytest.mark.parametrize(
    "make", [communicators.MultiProcessCommunicator, communicators.DataParallelCommunicator]
)
def test_a_context_is_a_device_or_none(make: Any) -> None:
    with pytest.raises(DeviceError, match="'cudnn' is not a Device"):
        make("cudnn")
    with pytest.raises(DeviceError, match="0 is not a Device"):
        make(None).add_context_and_parameters((0, copies(1.0)[0]))


@pytest.mark.parametrize(("division", "expected"), [(False, 4), (True, 2)])
def test_copies_of_one_process_are_summed_without_a_world(division: bool, expected: float) -> None:
    comm = communicators.DataParallelCommunicator()
    registered = copies(1.0, 3.0)
    comm.init()
    for params in registered:
        comm.add_context_and_parameters((None, params))
    assert (comm.name, comm.size, comm.rank, comm.local_rank) == ("DataParallelCommunicator", 2, 0, 0)
    comm.allreduce(division=division)
    assert [to_numpy(p.grad).tolist() for params in registered for p in params.values()] == [
        [expected] * 2, [expected]
    ] * 2  # fmt: skip


def test_copies_of_float16_are_summed_in_float32() -> None:
    comm = communicators.DataParallelCommunicator()
    for start in (2048, 1, 1):  # 2049 is no float16
        w = Tensor(data=np.ones(1), dtype=np.float16, stores_grad=True)
        assert w.grad is not None
        w.grad.copy_from_numpy(np.array([start], np.float16))
        comm.add_context_and_parameters((None, {"w": w}))
    comm.allreduce()
    assert to_numpy(w.grad).tolist() == [2050]


def test_copies_of_one_process_may_have_their_names_in_another_order() -> None:
    comm = communicators.DataParallelCommunicator()
    first = register(comm, {"enc": [1.0], "dec": [100.0]})
    second = register(comm, {"dec": [300.0], "enc": [3.0]})
    comm.allreduce()
    assert gradients_of([first, second], "enc") == [[4.0]] * 2
    assert gradients_of([first, second], "dec") == [[400.0]] * 2


@pytest.mark.parametrize("count", [2, 3])
def test_means_of_float16_copies_of_one_process_do_not_overflow(count: int) -> None:
    comm = communicators.DataParallelCommunicator()
    numbers = [forty_thousands(number, count) for number in range(count)]
    registered = [register(comm, {"w": number}, np.float16) for number in numbers]
    comm.allreduce(division=True)
    assert gradients_of(registered, "w") == [[40000.0] * 2] * count


def test_means_of_bfloat16_copies_of_one_process_are_rounded_once() -> None:
    """The sum 3 + 5 / 128 would be rounded to 3 + 4 / 128, and a third of that to 1 + 1 / 128."""
    comm = communicators.DataParallelCommunicator()
    registered = [register(comm, {"w": [1 + number / 128]}, bfloat16) for number in (0, 1, 4)]
    comm.allreduce(division=True)
    assert gradients_of(registered, "w") == [[1 + 2 / 128]] * 3


def test_a_gradient_that_is_gone_is_named_before_any_copy_is_changed() -> None:
    comm = communicators.DataParallelCommunicator()
    first, second = register(comm, {"b": [1.0], "w": [2.0]}), register(comm, {"b": [10.0], "w": [20.0]})
    second["w"].stores_grad = False
    with pytest.raises(DTypeError, match="allreduce: w: expected a parameter"):
        comm.allreduce(division=True)
    assert gradients_of([first, second], "b") == [[1.0], [10.0]] and gradients_of([first], "w") == [[2.0]]


def sums_by_name(communicator: Any) -> dict[str, list[float]]:
    state.communicator, state.communicator_pid = communicator, os.getpid()
    comm = communicators.MultiProcessDataParallelCommunicator()
    comm.init()
    params = {}
    for name, value in (("enc", 1.0), ("dec", 100.0)):
        params[name] = Tensor(data=np.zeros(3), requires_grad=True, stores_grad=True, name=name)
        params[name].grad.set_value(value * (communicator.rank + 1))
    names = ["enc", "dec"] if communicator.rank != 1 else ["dec", "enc"]
    comm.add_context_and_parameters((None, {name: params[name] for name in names}))
    comm.allreduce()
    return {name: to_numpy(params[name].grad).tolist() for name in ("enc", "dec")}


def test_gradients_are_summed_by_name_whatever_their_order() -> None:
    for sums in run_ranks(sums_by_name, 3):
        assert sums == {"enc": [6.0] * 3, "dec": [600.0] * 3}


def interrupt(*arguments: Any) -> None:
    raise KeyboardInterrupt


def interrupted(communicator: Any, call: str) -> str:
    """The error of the next collective behind one that Ctrl-C has ended on rank 0."""
    state.communicator, state.communicator_pid = communicator, os.getpid()
    comm = communicators.MultiProcessDataParallelCommunicator()
    comm.init()
    array = np.full(4, 1.0 + comm.rank, np.float32)
    parameter = Tensor(data=array, stores_grad=True)
    with autograd.record():
        loss = autograd.reduce_sum(parameter * Tensor(data=array))
    loss.backward()
    callback = comm.all_reduce_callback([parameter.grad], 1)
    rows = [np.zeros(4, np.float32) for _ in range(comm.size)]
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: comm.all_reduce(array),
        "reduce": lambda: comm.reduce(array, 0),
        "bcast": lambda: comm.bcast(array, 1),
        "all_gather": lambda: comm.all_gather(array, rows),
        "reduce_scatter": lambda: comm.reduce_scatter(rows, array),
        "barrier": comm.barrier,
        "all_reduce_callback": lambda: loss.backward(communicator_callbacks=callback),
    }
    with autograd.record():
        loss = autograd.reduce_sum(parameter * Tensor(data=array))
    communicator.barrier()
    if comm.rank == 0:  # the others come once it has been interrupted
        before = signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyboardInterrupt):
            calls[call]()
        signal.signal(signal.SIGALRM, before)
    else:
        time.sleep(0.5)
        with suppress(CommError):  # rank 0 has sent its part, which may be all that this one needs
            calls[call]()
    with pytest.raises(CommError) as error:
        comm.all_reduce(array)
    return str(error.value)


@slow_but_first(
    "call",
    ["all_reduce", "reduce", "bcast", "all_gather", "reduce_scatter", "barrier", "all_reduce_callback"],
    count=2,
)
def test_a_collective_that_is_interrupted_on_one_rank_ends_on_all(call: str) -> None:
    for text in run_ranks(interrupted, 3, call):
        assert f"{call} was ended by KeyboardInterrupt" in text, text


def ranks_with_other_numbers_of_copies(communicator: Any) -> str:
    state.communicator, state.communicator_pid = communicator, os.getpid()
    comm = communicators.MultiProcessDataParallelCommunicator()
    comm.init()
    for params in copies(*[6.0] * (2 if communicator.rank == 0 else 1)):
        comm.add_context_and_parameters((None, params))
    with pytest.raises(CommError) as error:
        comm.allreduce(division=True)
    return str(error.value)


def test_ranks_that_registered_other_numbers_of_copies_are_an_error() -> None:
    for text in run_ranks(ranks_with_other_numbers_of_copies, 3):
        assert "allreduce of 2 copies" in text and "allreduce of 1 copy" in text, text


def ranks_with_other_names(communicator: Any) -> tuple[str, list[float]]:
    comm = joined(communicator)
    names = ["fc", "head"] if comm.rank == 2 else ["conv", "fc"]
    params = register(comm, {name: [1.0 + comm.rank] for name in names})
    with pytest.raises(CommError) as error:
        comm.allreduce()
    return str(error.value), [value for name in names for value in to_numpy(params[name].grad).tolist()]


def test_ranks_that_registered_other_names_are_an_error_and_change_nothing() -> None:
    for rank, (text, gradients) in enumerate(run_ranks(ranks_with_other_names, 3)):
        assert "of 'conv', 'fc'" in text and "of 'fc', 'head'" in text, text
        assert gradients == [1.0 + rank] * 2


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"w": None}, OptionError, r"expected \(device or None, \{name: parameter\}\)"),
        ((None, {}), OptionError, "expected parameters by name"),
        ((None, {"w": np.ones(2), "b": 0}), DTypeError, "w: expected a parameter"),
        ((None, {"w": Tensor((2,))}), DTypeError, "w: expected a parameter, a Tensor with stores_grad=True"),
        ((None, {1: Tensor((2,), stores_grad=True)}), OptionError, "a copy has \\[1\\] but the first one"),
        (
            (None, {"w": Tensor((2,), stores_grad=True)}),
            OptionError,
            "a copy has \\['w'\\] but the first one",
        ),
        (
            (None, {"w": Tensor((3,), stores_grad=True), "b": Tensor((1,), stores_grad=True)}),
            ShapeError,
            r"w is .*\[3\].* but in the first copy .*\[2\]",
        ),
    ],
)
def test_copies_that_differ_are_refused(given: Any, error: type[Exception], message: str) -> None:
    comm = communicators.DataParallelCommunicator()
    registered = copies(1.0)[0]
    comm.add_context_and_parameters((None, registered))
    with pytest.raises(OptionError, match="w is registered already"):
        comm.add_context_and_parameters((None, registered))
    with pytest.raises(OptionError, match="v is registered already"):
        communicators.DataParallelCommunicator().add_context_and_parameters(
            (None, dict.fromkeys("wv", registered["w"]))
        )
    with pytest.raises(error, match=message):
        comm.add_context_and_parameters(given)
    assert comm.size == 1
