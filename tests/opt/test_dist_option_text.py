# SPDX-License-Identifier: Apache-2.0
"""A dist_option may be text with its options in it; ranks that were given other ones get an error that names both."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from singa_lite import autograd, layer, model, opt
from singa_lite.comm.base import World
from singa_lite.comm.local import LocalCommunicator
from singa_lite.errors import CommError, OptionError
from singa_lite.sync.text import read_dist_option
from singa_lite.tensor import Tensor, to_numpy
from tests.ranks import run_ranks


class Net(model.Model):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.loss = layer.Linear(5), layer.MeanSquareError()

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)

    def train_one_batch(self, x: Tensor, y: Tensor, **options: Any) -> Tensor:
        loss = self.loss(self.forward(x), y)
        self.optimizer(loss, **options)
        return loss


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng([rank, step])
    return Tensor(data=rng.standard_normal((4, 20))), Tensor(data=rng.standard_normal((4, 5)))


def train(communicator: Any, given: dict[str, Any], of_call: dict[str, Any], use_graph: bool = True) -> bytes:
    """Parameters after four steps."""
    net = Net()
    net.set_optimizer(opt.DistOpt(opt.SGD(0.1, momentum=0.9), communicator=communicator, **given))
    net.compile([batch(0, 0)[0]], use_graph=use_graph)
    rng = np.random.default_rng(3)
    net.set_params(
        {name: rng.standard_normal(p.shape).astype(np.float32) for name, p in net.get_params().items()}
    )
    for step in range(4):
        net(*batch(communicator.rank, step), **of_call)
    autograd.training = False
    return b"".join(to_numpy(param).tobytes() for param in net.get_params().values())


def alone() -> LocalCommunicator:
    return LocalCommunicator(World())


@pytest.mark.parametrize(
    ("text", "name", "options"),
    [
        ("sparseTopK:0.2", "sparseTopK", {"spars": 0.2}),
        ("sparseTopK:0.2:corr=0", "sparseTopK", {"spars": 0.2, "corr": False}),
        ("sparseTopK:corr=False:spars=0.3", "sparseTopK", {"spars": 0.3, "corr": False}),
        ("sparseThreshold:1e-2:corr=true", "sparseThreshold", {"spars": 0.01, "corr": True}),
        ("half:0.5", "fp16", {"clip_value": 0.5}),
        ("fp16:None", "fp16", {"clip_value": None}),
        ("sparseTopK:+.25e0", "sparseTopK", {"spars": 0.25}),
        ("sparseTopK:1.", "sparseTopK", {"spars": 1.0}),
        ("hierarchical:outer=sparseTopK:0.5:corr=0", "hierarchical", {"outer": "sparseTopK:0.5:corr=0"}),
        ("plain", "fp32", {}),
    ],
)
def test_a_text_and_its_options_by_name_give_the_same_bits(
    text: str, name: str, options: dict[str, Any]
) -> None:
    found = read_dist_option(text)
    assert (found.scheme.names[0], found.options) == (name, options)
    by_name = train(alone(), {"dist_option": name, **options}, {})
    assert train(alone(), {"dist_option": text}, {}) == by_name
    assert train(alone(), {}, {"dist_option": text}) == by_name


def test_what_a_call_says_goes_before_what_the_constructor_says() -> None:
    expected = train(alone(), {"dist_option": "sparseTopK:0.5:corr=0"}, {})
    for given, of_call in [
        ({"dist_option": "sparseTopK:0.1:corr=0"}, {"spars": 0.5}),
        ({"dist_option": "sparseTopK:0.1:corr=0"}, {"dist_option": "sparseTopK:0.5"}),
        ({"dist_option": "sparseTopK:corr=0", "spars": 0.5}, {}),
        ({"dist_option": "sparseTopK", "corr": False}, {"dist_option": "sparseTopK:0.5"}),
        ({"dist_option": "fp32"}, {"dist_option": "sparseTopK:0.5", "corr": False}),
    ]:
        assert train(alone(), given, of_call) == expected, (given, of_call)


OF_TOP_K = (
    r"write sparseTopK\[:spars\]\[:key=value...\], with the options spars: float = 0.05, corr: bool = True"
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gone:0.1", "dist_option = 'gone' is not known; choose one of .*'fp32'"),
        ("", "dist_option = '' is not known"),
        ("sparseTopK:share=0.1", f"has 'share=0.1', which is not an option; {OF_TOP_K}"),
        ("sparseTopK:0.1:0.2", f"has '0.2', which is not an option; {OF_TOP_K}"),
        ("sparseTopK:0.1:spars=0.1", f"gives spars twice; {OF_TOP_K}"),
        ("sparseTopK:", f"spars = '', expected float; {OF_TOP_K}"),
        ("sparseTopK:a", f"spars = 'a', expected float; {OF_TOP_K}"),
        ("sparseTopK:corr=2", f"corr = '2', expected bool; {OF_TOP_K}"),
        ("sparseTopK:2", f"spars = 2.0 must be in .*{OF_TOP_K}"),
        ("sparseTopK:nan", f"spars = 'nan', expected float; {OF_TOP_K}"),
        ("sparseThreshold:inf", "spars = 'inf', expected float; write sparseThreshold"),
        ("sparseThreshold:1e999", "spars = '1e999', expected float"),
        ("powerSGD:rate=inf", "rate = 'inf', expected float; write powerSGD.* rank: int = 4, rate: float"),
        ("powerSGD:rate=-Infinity", "rate = '-Infinity', expected float"),
        ("powerSGD:1_0", "rank = '1_0', expected int; write powerSGD"),
        ("powerSGD:\u0664", "rank = '\u0664', expected int"),  # a digit four of another alphabet
        ("powerSGD: 4", "rank = ' 4', expected int"),
        ("powerSGD:4\n", "expected int"),
        ("powerSGD:4.0", "rank = '4.0', expected int"),
        ("powerSGD:rank =4", "has 'rank =4', which is not an option"),
        ("sparseTopK:0.0_1", f"spars = '0.0_1', expected float; {OF_TOP_K}"),
        ("sparseTopK:\uff10.1", "expected float"),
        ("sparseTopK:0x1p-3", "expected float"),
        ("sparseTopK:.", "expected float"),
        ("sparseTopK:corr= 1", "corr = ' 1', expected bool"),
        ("fp16: none", "clip_value = ' none', expected float or None"),
        (" fp32", "dist_option = ' fp32' is not known"),
        ("hierarchical:sparseTopK:0.0_1", "spars = '0.0_1', expected float"),
        ("hierarchical:outer=int8:outer=fp32", "has 'outer=fp32', which is not an option; write int8"),
        (
            "hierarchical:inner=int8",
            "write hierarchical\\[:outer\\], with another dist_option and its options",
        ),
        ("fp16:x", "clip_value = 'x', expected float or None; write fp16"),
        ("fp32:1", "has '1', which is not an option; fp32 has no options"),
        (
            "partialUpdate:threshold=5",
            "partialUpdate has no options; give it to DistOpt as its argument threshold",
        ),
    ],
)
def test_a_text_that_is_wrong_is_refused_with_what_it_may_say(text: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        opt.DistOpt(communicator=alone(), dist_option=text)
    with pytest.raises(OptionError, match=message):
        train(alone(), {}, {"dist_option": text}, use_graph=False)


def test_an_option_given_twice_is_refused() -> None:
    for given, of_call in [
        ({"dist_option": "sparseTopK:0.1", "spars": 0.2}, {}),
        ({"dist_option": "fp16:1", "clip_value": 1.0}, {}),
        ({}, {"dist_option": "sparseTopK:0.1", "spars": 0.1}),
        ({}, {"dist_option": "fp16:1", "clip_value": 2.0}),
    ]:
        with pytest.raises(OptionError, match="is given twice"):
            train(alone(), given, of_call, use_graph=False)


class Hidden(opt.DecayScheduler):
    """Prints nothing of what it gives."""

    def __init__(self, shares: list[float]) -> None:
        super().__init__(0.0)
        self.shares = shares

    def call(self, step: int) -> float:
        return self.shares[step > 0]


@pytest.mark.parametrize("use_graph", [False, True], ids=["eager", "recorded"])
@pytest.mark.parametrize("value", ["False", math.nan, 0.3, None, np.array([1, 0])], ids=str)
def test_a_schedule_of_a_flag_gives_true_or_false(value, use_graph):
    train(alone(), {"dist_option": "sparseTopK:0.5", "corr": Hidden([1.0, False])}, {}, use_graph)
    for dist_option in ("sparseTopK:0.5", "hierarchical:sparseTopK:0.5"):
        given = {"dist_option": dist_option, "corr": Hidden([True, value])}
        with pytest.raises(OptionError, match=r"corr = .* at step 1 must be True or False"):
            train(alone(), given, {}, use_graph)


DIFFERENT = {
    "value": ({"dist_option": "sparseTopK:0.1"}, {"dist_option": "sparseTopK:0.2"}, "spars=0.1", "spars=0.2"),
    "name": ({"dist_option": "fp32"}, {"dist_option": "sparseTopK"}, "fp32", "sparseTopK:spars=0.05"),
    "keyword": (
        {"dist_option": "fp16", "clip_value": 1.0},
        {"dist_option": "fp16"},
        "clip_value=1.0",
        "clip_value=None",
    ),
    "attribute": (
        {"dist_option": "sparseThreshold"},
        {"dist_option": "sparseThreshold", "spars": 0.1},
        "spars=0.05",
        "spars=0.1",
    ),
    "schedule": (
        {"dist_option": "sparseTopK", "spars": Hidden([0.5, 0.5])},
        {"dist_option": "sparseTopK", "spars": Hidden([0.5, 0.4])},
        "the schedule of spars is .*0.5",
        "0.4",
    ),
}


def differ(communicator: Any, kind: str, use_graph: bool, is_of_call: bool) -> None:
    mine = DIFFERENT[kind][communicator.rank == communicator.size - 1]
    given, of_call = ({}, mine) if is_of_call else (mine, {})
    train(communicator, given, of_call, use_graph)


@pytest.mark.parametrize(("size", "use_graph", "is_of_call"), [(2, False, True), (3, True, False)])
@pytest.mark.parametrize("kind", DIFFERENT)
def test_ranks_with_other_options_get_an_error_that_names_both(
    kind: str, size: int, use_graph: bool, is_of_call: bool
) -> None:
    _, _, first, last = DIFFERENT[kind]
    for error in run_ranks(differ, size, kind, use_graph, is_of_call, return_exceptions=True):
        assert isinstance(error, CommError)
        with pytest.raises(
            CommError, match=f"their dist_option: .*{first}.* on rank 0 but .*{last}.* on rank {size - 1}"
        ):
            raise error


def same_in_other_words(communicator: Any) -> bytes:
    text = ["sparseTopK:0.1", "sparseTopK:corr=1:spars=0.1"][communicator.rank]
    return train(communicator, {}, {"dist_option": text})


def test_ranks_may_write_the_same_options_in_other_ways() -> None:
    first, second = run_ranks(same_in_other_words, 2)
    assert first == second


def test_a_dist_opt_knows_whether_ranks_are_kept_equal() -> None:
    assert opt.DistOpt(communicator=alone(), dist_option="sparseTopK:0.1").keeps_equal
    assert not opt.DistOpt(communicator=alone(), dist_option="partialUpdate").keeps_equal
    sgd = opt.DistOpt(communicator=alone())
    w = Tensor(data=np.ones(3), stores_grad=True, name="w")
    autograd.training = True
    sgd(autograd.reduce_sum(w * w, keepdims=0), "partialUpdate")
    autograd.training = False
    assert not sgd.keeps_equal
