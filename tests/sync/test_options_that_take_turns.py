# SPDX-License-Identifier: Apache-2.0
"""A dist_option whose options change between steps, and change back: replays use those of their own step."""

from __future__ import annotations

import numpy as np
import pytest

from singa_lite import autograd, layer, model, opt
from singa_lite.comm.base import World
from singa_lite.comm.local import LocalCommunicator
from singa_lite.errors import OptionError
from singa_lite.tensor import Tensor, to_numpy
from tests.ranks import run_ranks
from tests.sync.make_scheme import begin, make_scheme

PLANS = {
    "threshold": ["sparseThreshold:0.01"] * 3 + ["sparseThreshold:1000"] * 3 + ["sparseThreshold:0.01"] * 4,
    "sign": ["sign"] * 3 + ["sign:rescale=0"] * 3 + ["sign"] * 4,
    "period": ["localSGD:3"] * 4 + ["localSGD:2"] * 4 + ["localSGD:3"] * 6,
    "hierarchical": ["hierarchical:sparseThreshold:0.01"] * 6,
}


class Net(model.Model):
    def __init__(self, has_two_calls: bool) -> None:
        super().__init__()
        self.first, self.second, self.loss = layer.Linear(6), layer.Linear(3), layer.MeanSquareError()
        self.has_two_calls = has_two_calls

    def forward(self, x: Tensor) -> Tensor:
        return self.second(autograd.tanh(self.first(x)))

    def train_one_batch(self, x: Tensor, y: Tensor) -> Tensor:
        loss = self.loss(self.forward(x), y)
        if not self.has_two_calls:
            self.optimizer(loss)
            return loss
        self.optimizer(loss, "sparseThreshold", spars=0.01)
        loss = self.loss(self.forward(x), y)
        self.optimizer(loss, "sparseThreshold", spars=0.5)
        return loss


def trained(communicator, plan, use_graph, has_two_calls=False, kind=Net):
    net = kind(has_two_calls)
    sgd = opt.SGD(opt.ExponentialDecay(0.1, 10, 0.5), momentum=0.9)
    net.set_optimizer(opt.DistOpt(sgd, communicator=communicator, dist_option=plan[0], threshold=20))
    net.compile([Tensor((4, 5))], use_graph=use_graph)
    rng = np.random.default_rng(2)
    net.set_params(
        {k: rng.standard_normal(p.shape).astype(np.float32) / 2 for k, p in net.get_params().items()}
    )
    sent = []
    for step, option in enumerate(plan):
        net.optimizer.dist_option = option
        rng = np.random.default_rng([communicator.rank, step])
        net(
            Tensor(data=rng.standard_normal((4, 5)).astype(np.float32)),
            Tensor(data=rng.standard_normal((4, 3)).astype(np.float32)),
        )
        sent.append(net.optimizer.bytes_sent)
    autograd.training = False
    return sent, np.concatenate([to_numpy(p).ravel() for p in net.get_params().values()])


def eager_and_recorded(communicator):
    found = {
        name: [trained(communicator, plan, graph) for graph in (False, True)] for name, plan in PLANS.items()
    }
    found["two calls"] = [trained(communicator, ["fp32"] * 6, graph, True) for graph in (False, True)]
    return found


def test_recorded_steps_have_the_options_of_their_own_step():
    for of_rank in run_ranks(eager_and_recorded, 2):
        for name, ((sent, values), (sent_again, recorded)) in of_rank.items():
            assert sent == sent_again, name
            np.testing.assert_allclose(recorded, values, rtol=1e-5, atol=1e-6, err_msg=name)


class TwoUpdates(Net):
    def train_one_batch(self, x: Tensor, y: Tensor) -> Tensor:
        self.optimizer(self.loss(self.forward(x), y), self.optimizer.dist_option)
        loss = self.loss(self.forward(x), y)
        self.optimizer(loss, "fp32")
        return loss


def local_and_common_updates(communicator):
    """Parameters of a rank, by option and mode, after steps of a local update and one that keeps ranks equal."""
    return {
        (option, graph): trained(communicator, [option] * 6, graph, kind=TwoUpdates)[1]
        for option in ("localSGD:8", "partialUpdate")
        for graph in (False, True)
    }


def test_an_update_that_keeps_ranks_equal_averages_what_one_before_it_in_the_step_has_not():
    of_rank = run_ranks(local_and_common_updates, 3)
    for (option, graph), values in of_rank[0].items():
        for other in of_rank[1:]:
            np.testing.assert_array_equal(other[option, graph], values, err_msg=f"{option} {graph}")
        np.testing.assert_allclose(values, of_rank[0][option, False], rtol=1e-5, atol=1e-6)


def local_steps_and_then_common_ones(communicator):
    """Why a model's steps are not replayed, where steps of localSGD come before those of fp32."""
    net = Net(False)
    net.set_optimizer(opt.DistOpt(opt.SGD(0.1), communicator=communicator, dist_option="localSGD:8"))
    net.compile([Tensor((4, 5))], use_graph=True)
    for step in range(6):
        net.optimizer.dist_option = "localSGD:8" if step < 3 else "fp32"
        net(Tensor((4, 5)), Tensor((4, 3)))
    autograd.training = False
    return [info.break_reason for info in net.graph_info()]


def test_an_average_of_what_earlier_steps_left_breaks_no_graph():
    assert all(
        reason is None for reasons in run_ranks(local_steps_and_then_common_ones, 2) for reason in reasons
    )


def drift(communicator):
    """How localSGD:2 leaves parameters that take turns beside one that is always there."""
    scheme = make_scheme("localSGD", communicator, 1 << 30, 1 << 30)
    shared, one, other = (
        Tensor(data=np.zeros(3, np.float32), name=name) for name in ("shared", "one", "other")
    )
    for step in range(8):
        params = [shared, other if step % 2 else one]
        begin(scheme, step, period=2)
        for param in params:
            scheme.add_gradient(param, Tensor((3,)))
        list(scheme.finish())
        for param in params:
            param.copy_from_numpy(to_numpy(param) + np.float32(communicator.rank + 1))
        scheme.end(params)
    return [to_numpy(param) for param in (one, other)]


def test_parameters_that_take_turns_are_all_averaged():
    first, second = run_ranks(drift, 2)
    for mine, theirs in zip(first, second, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_hierarchical_refuses_a_scheme_that_averages_parameters():
    with pytest.raises(OptionError, match="localSGD averages parameters"):
        opt.DistOpt(communicator=LocalCommunicator(World()), dist_option="hierarchical:localSGD:2")
