# SPDX-License-Identifier: Apache-2.0
"""Model: compile, modes, options, checkpoints."""

import copy
import threading
import warnings
import zipfile
from contextlib import nullcontext
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from singa_lite import autograd, layer, model, opt
from singa_lite.comm.base import World
from singa_lite.comm.local import LocalCommunicator
from singa_lite.device import get_default_device
from singa_lite.errors import CheckpointError, GraphError, OptionError, ShapeError
from singa_lite.tensor import Tensor, to_numpy
from tests.ranks import run_ranks


class Net(model.Model):
    """One of everything that has state: weights, batch-norm statistics, dropout's random stream."""

    def __init__(self):
        super().__init__()
        self.conv = layer.Conv2d(3, 3, padding=1)
        self.norm = layer.BatchNorm2d()
        self.relu = layer.ReLU()
        self.dropout = layer.Dropout(0.3)
        self.flatten = layer.Flatten()
        self.linear = layer.Linear(4)
        self.loss = layer.SoftMaxCrossEntropy()

    def forward(self, x):
        y = self.relu(self.norm(self.conv(x)))
        return self.linear(self.dropout(self.flatten(y)))

    def train_one_batch(self, x, y, dist_option="fp32", spars=None):
        out = self.forward(x)
        loss = self.loss(out, y)
        self.optimizer(loss, dist_option=dist_option, spars=spars)
        return out, loss


def batch(step, size=8):
    rng = np.random.default_rng(step)
    return Tensor(data=rng.standard_normal((size, 2, 6, 6))), Tensor(data=rng.integers(0, 4, size))


def compiled(communicator=None, optimizer=None, use_graph=False, kind=Net):
    get_default_device().SetRandSeed(5)
    net = kind()
    net.set_optimizer(
        opt.DistOpt(
            optimizer or opt.SGD(lr=0.1, momentum=0.9),
            communicator=communicator or LocalCommunicator(World()),
        )
    )
    net.compile([batch(0)[0]], use_graph=use_graph)
    return net


def values(net):
    return {name: to_numpy(state).tobytes() for name, state in net.get_states().items()}


@pytest.fixture(autouse=True)
def evaluation_afterwards():
    yield
    autograd.training = False


def test_compile_creates_and_names_all_parameters():
    net = compiled()
    assert set(net.get_params()) == {"conv.W", "conv.b", "norm.scale", "norm.bias", "linear.W", "linear.b"}
    assert set(net.get_states()) - set(net.get_params()) == {"norm.running_mean", "norm.running_var"}
    assert all(param.name == name for name, param in net.get_params().items())


def test_compile_leaves_statistics_and_training_data_alone():
    net = compiled()
    np.testing.assert_array_equal(to_numpy(net.norm.running_mean), np.zeros(3))
    np.testing.assert_array_equal(to_numpy(net.norm.running_var), np.ones(3))


def test_a_compile_that_fails_leaves_sizes_to_the_next_one():
    class Classifier(model.Model):
        def __init__(self):
            super().__init__()
            self.first, self.later, self.product = layer.Linear(4), [layer.Linear(3)], layer.Conv2d(1, 3)

        def forward(self, x):
            return self.product(self.later[0](self.first(x)))

    net = Classifier()
    with pytest.raises(ShapeError, match=r"Conv2d.*\(N, C, H, W\)"):
        net.compile([Tensor((4, 5))])
    assert not net.get_params()
    net.compile([Tensor((2, 1, 8, 7))])
    assert net.first.W.shape == (7, 4)
    with pytest.raises(ShapeError, match="expected 7 features"):
        net.compile([Tensor((2, 1, 8, 9))])
    assert net.first.W.shape == (7, 4)


def test_training_lowers_the_loss_and_eval_leaves_no_trace():
    net = compiled()
    losses = [net(*batch(0))[1].item() for _ in range(30)]
    assert losses[-1] < 0.5 * losses[0]
    net.eval()
    assert autograd.training is False
    before = values(net)
    first, second = (to_numpy(net(batch(0)[0])) for _ in range(2))
    assert first.tobytes() == second.tobytes() and values(net) == before


@pytest.mark.parametrize("use_graph", [False, True])
def test_a_thread_that_evaluates_leaves_another_one_training(use_graph):
    evaluated = compiled()
    evaluated.eval()
    before, seen = values(evaluated), SimpleQueue()  # a record does not look into that

    def evaluate():
        evaluated(batch(9)[0])
        seen.put(autograd.training)

    class Disturbed(Net):
        def forward(self, x):
            if autograd.training:  # in the midst of a training step, not of compile
                thread = threading.Thread(target=evaluate)
                thread.start()
                thread.join(60)
            return super().forward(x)

    nets = [compiled(use_graph=use_graph, kind=kind) for kind in (Net, Disturbed)]
    for net in nets:
        get_default_device().SetRandSeed(7)
        for step in range(3):
            net(*batch(step))
    flags = [seen.get() for _ in range(seen.qsize())]
    assert autograd.training is True and flags == [False] * (1 if use_graph else 3)
    assert values(nets[1]) == values(nets[0]) and values(evaluated) == before


def test_a_thread_starts_in_evaluation_and_keeps_its_own_training_flag():
    seen = []

    def work():
        seen.append(autograd.training)
        autograd.training = True
        barrier.wait(60)
        barrier.wait(60)
        seen.append(autograd.training)

    barrier = threading.Barrier(2)
    thread = threading.Thread(target=work)
    autograd.training = True
    thread.start()
    barrier.wait(60)
    autograd.training = False
    barrier.wait(60)
    thread.join(60)
    assert seen == [False, True] and autograd.training is False


def test_a_model_in_evaluation_leaves_no_trace_while_another_of_its_thread_trains():
    teacher, student = compiled(), compiled()
    teacher.eval()
    expected, before = to_numpy(teacher(batch(0)[0])), values(teacher)
    student.train()
    student(*batch(0))
    np.testing.assert_array_equal(to_numpy(teacher(batch(0)[0])), expected)
    assert values(teacher) == before and autograd.training is True


@pytest.mark.parametrize("use_graph", [False, True])
def test_new_inputs_options_and_batch_sizes_are_honoured(use_graph):
    net, other = compiled(use_graph=use_graph), compiled()
    seen = []
    for step, (size, option) in enumerate([(8, "fp32"), (5, "fp32"), (8, "sparseTopK"), (8, "fp32")]):
        net.train()
        out, loss = net(*batch(step, size), option, 0.5)
        assert out.shape == (size, 4)
        seen.append(loss.item())
    get_default_device().SetRandSeed(5)
    other = compiled()
    expected = []
    for step, (size, option) in enumerate([(8, "fp32"), (5, "fp32"), (8, "sparseTopK"), (8, "fp32")]):
        x, y = batch(step, size)
        out = other.forward(x)
        loss = other.loss(out, y)
        expected.append(loss.item())
        other.optimizer(loss, option, 0.5)
    assert seen == (pytest.approx(expected, rel=1e-6) if use_graph else expected) and len(set(seen)) == 4


def test_an_optimizer_set_after_compile_is_prepared_at_the_first_call():
    net = Net()
    net.compile([batch(0)[0]])
    net.set_optimizer(opt.DistOpt(opt.SGD(momentum=0.9), communicator=LocalCommunicator(World())))
    net(*batch(0))
    assert "conv.W:momentum" in net.optimizer.get_states()


def test_a_plain_optimizer_works_without_dist_option():
    class Plain(Net):
        def train_one_batch(self, x, y):
            out = self.forward(x)
            loss = self.loss(out, y)
            self.optimizer(loss)
            return out, loss

    net = Plain()
    net.set_optimizer(opt.Adam(lr=0.01))
    net.compile([batch(0)[0]])
    losses = [net(*batch(0))[1].item() for _ in range(20)]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("option", ["fp32", "sparseTopK"])
@pytest.mark.parametrize("optimizer", [opt.SGD, opt.Adam])
def test_a_checkpoint_resumes_bit_for_bit(tmp_path, option, optimizer):
    def make():
        return compiled(optimizer=optimizer(lr=opt.ExponentialDecay(0.01, 3, 0.5)))

    straight = make()
    for step in range(6):
        if step == 3:
            straight.save_states(tmp_path / "net.zip", {"step": np.array(3)})
        straight(*batch(step), option, 0.3)
    resumed = make()
    get_default_device().SetRandSeed(99)
    aux = resumed.load_states(tmp_path / "net.zip")
    assert set(aux) == {"step"} and int(aux["step"]) == 3
    for step in range(3, 6):
        resumed(*batch(step), option, 0.3)
    assert values(resumed) == values(straight)


def test_saving_replaces_a_file_whole(tmp_path):
    net = compiled()
    for _ in range(2):
        net.save_states(tmp_path / "net.zip")
    assert [path.name for path in tmp_path.iterdir()] == ["net.zip"]
    (tmp_path / "plain").write_text("")
    assert (tmp_path / "net.zip").stat().st_mode == (tmp_path / "plain").stat().st_mode  # as the umask says


def test_checkpoints_that_do_not_fit_raise_and_change_nothing(tmp_path):
    class Other(Net):
        def __init__(self):
            super().__init__()
            self.linear2 = layer.Linear(2)

        def forward(self, x):
            return self.linear2(super().forward(x))

    other = Other()
    other.compile([batch(0)[0]])
    other.save_states(tmp_path / "other.zip")
    net = compiled()
    before = values(net)
    with pytest.raises(CheckpointError, match=r"unknown .*linear2"):
        net.load_states(tmp_path / "other.zip")
    with pytest.raises(CheckpointError, match="cannot read"):
        net.load_states(tmp_path / "missing.zip")
    (tmp_path / "text.zip").write_text("no zip")
    with pytest.raises(CheckpointError, match="cannot read"):
        net.load_states(tmp_path / "text.zip")
    assert values(net) == before


def test_a_checkpoint_of_another_optimizer_or_a_damaged_one_changes_nothing(tmp_path):
    adam = compiled(optimizer=opt.Adam())
    adam(*batch(0))
    adam.save_states(tmp_path / "adam.zip")
    net = compiled()
    net.save_states(tmp_path / "net.zip")
    with zipfile.ZipFile(tmp_path / "net.zip") as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    for name in files:
        with zipfile.ZipFile(tmp_path / f"bad-{name}.zip", "w") as archive:
            for other, content in files.items():
                archive.writestr(other, content[: len(content) // 2] if other == name else content)
    net(*batch(1))
    before = values(net)
    for path in tmp_path.glob("[ab]*.zip"):
        with pytest.raises(CheckpointError):
            net.load_states(path)
        assert values(net) == before
    with pytest.raises(CheckpointError, match="not an array of numbers"):
        net.save_states(tmp_path / "aux.zip", {"a": {"x": 1}})


def test_reloading_an_earlier_checkpoint_resumes_bit_for_bit(tmp_path):
    net = compiled()
    net.save_states(tmp_path / "start.zip")
    runs = []
    for _ in range(2):
        net.load_states(tmp_path / "start.zip")
        runs.append([net(*batch(step), "sparseTopK", 0.1)[1].item() for step in range(4)])
    assert runs[0] == runs[1]


def test_a_new_optimizer_is_prepared_too():
    net = compiled()
    net.set_optimizer(opt.DistOpt(opt.SGD(momentum=0.5), communicator=LocalCommunicator(World())))
    net(*batch(0))
    assert set(net.optimizer.get_states()) >= {"conv.W:momentum", "linear.b:momentum"}
    assert net.optimizer._ranks.names  # and not learned as parameters of no model


def test_calling_the_model_trains_whatever_the_module_flag_was():
    net = compiled()
    autograd.training = False
    before = values(net)
    net(*batch(0))
    assert values(net) != before


def test_a_model_that_is_not_compiled_says_so(tmp_path):
    net = Net()
    for call in (lambda: net.save_states(tmp_path / "x"), lambda: net.load_states(tmp_path / "x")):
        with pytest.raises(GraphError, match="compile"):
            call()


class Outer(model.Model):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


def test_a_model_with_an_optimizer_and_without_a_mode_is_an_error_and_evaluation_is_none():
    net, (x, y) = Net(), batch(0)
    assert net(x).shape == (8, 4)  # has no optimizer, so it is not meant to train
    net.set_optimizer(opt.SGD(0.1))
    for inputs in ((x, y), (x,)):
        with pytest.raises(
            GraphError, match=r"compile\(\[inputs\]\) or train\(\) before training, or eval\(\)"
        ):
            net(*inputs)
    with autograd.no_grad():
        assert net(x).shape == (8, 4)
    outer = Outer(net)
    outer.compile([x])  # calls it as a layer
    outer.eval()
    assert outer(x).shape == (8, 4)
    net.eval()
    assert net(x).shape == (8, 4)


@pytest.mark.parametrize("use_graph", [False, True])
def test_training_without_an_optimizer_is_an_error(use_graph):
    net, (x, y) = Net(), batch(0)
    net.compile([x], use_graph=use_graph)
    assert net.optimizer is None
    with pytest.raises(GraphError, match=r"Net: .*NoneType.*; call set_optimizer before training"):
        net(x, y)
    net.set_optimizer(opt.DistOpt(opt.SGD(0.1), communicator=LocalCommunicator(World())))
    net(x, y)


class MayOptimize(Net):
    def train_one_batch(self, x, y):
        loss = self.loss(self.forward(x), y)
        if self.optimizer is not None:
            self.optimizer(loss)
        return loss


def test_a_step_may_ask_whether_there_is_an_optimizer():
    net, (x, y) = MayOptimize(), batch(0)
    net.compile([x])
    before = values(net)
    net(x, y)
    assert {name: before[name] for name in net.get_params()} == {
        name: value for name, value in values(net).items() if name in net.get_params()
    }


class OwnModes(Net):
    def train(self, mode=True):
        self.training = mode

    def eval(self):
        self.training = False


def test_modes_of_the_users_own_are_taken_once_it_is_compiled():
    net, (x, _) = OwnModes(), batch(0)
    net.set_optimizer(opt.SGD(0.1))
    net.compile([x])
    net.eval()
    assert net(x).shape == (8, 4)


def test_wrong_arguments_raise():
    with pytest.raises(GraphError, match="expected an Optimizer"):
        Net().set_optimizer("sgd")
    with pytest.raises(OptionError, match="list of Tensors"):
        Net().compile(batch(0)[0])
    net = compiled()
    with pytest.raises(OptionError, match="dist_option"):
        net(*batch(0), "fp8")

    class Lazy(model.Model):
        def forward(self, x):
            return x

    lazy = Lazy()
    lazy.compile([batch(0)[0]])
    with pytest.raises(GraphError, match="train_one_batch"):
        lazy(batch(0)[0])


class Part(layer.Layer):
    """What trains: products, dropout and statistics."""

    def __init__(self):
        super().__init__()
        self.linear, self.dropout = layer.Linear(72), layer.Dropout(0.3)

    def forward(self, x):
        return self.dropout(self.linear(x))


class PartModel(model.Model, Part):
    """The same, as a Model."""


def with_part(kind):
    class Whole(Net):
        def __init__(self):
            super().__init__()
            self.part = kind()

        def forward(self, x):
            y = self.flatten(self.relu(self.norm(self.conv(x))))
            return self.linear(self.part(y))

    return Whole


@pytest.mark.parametrize("use_graph", [False, True])
def test_a_model_in_the_step_of_another_one_trains_as_a_layer_does(use_graph):
    found = []
    for kind in (Part, PartModel):
        net = compiled(kind=with_part(kind), use_graph=use_graph)
        for step in range(4):
            net(*batch(step))
        found.append(values(net))
    assert found[0] == found[1]


@pytest.mark.parametrize("use_graph", [False, True])
def test_a_model_that_was_put_into_evaluation_stays_in_it_in_the_step_of_another_one(use_graph):
    net = compiled(kind=with_part(PartModel), use_graph=use_graph)
    net.part.eval()
    net.train()
    before = to_numpy(net.part.linear.W)
    with pytest.warns(UserWarning, match="PartModel is in evaluation mode"):
        for step in range(4):
            net(*batch(step))
    np.testing.assert_array_equal(to_numpy(net.part.linear.W), before)


class Linear(model.Model):
    """A pretrained network, such as a perceptual loss has one."""

    def __init__(self):
        super().__init__()
        self.linear = layer.Linear(4)

    def forward(self, x):
        return self.linear(x)


class WithCritic(Linear):
    def __init__(self, means_it):
        super().__init__()
        self.critic, self.means_it = Linear(), means_it

    def train_one_batch(self, x):
        out = self.forward(x)
        seen = self.critic(out.clone() if self.means_it else out)
        loss = autograd.reduce_mean(seen * seen) + autograd.reduce_mean(out)
        self.optimizer(loss)
        return loss


@pytest.mark.parametrize("means_it", [False, True])
@pytest.mark.parametrize("use_graph", [False, True])
def test_a_gradient_that_ends_at_a_model_in_evaluation_is_reported(use_graph, means_it):
    net, x = WithCritic(means_it), Tensor((2, 4))
    net.critic.compile([x], is_train=False)
    net.set_optimizer(opt.SGD(lr=0.1))
    net.compile([x], use_graph=use_graph)
    with nullcontext() if means_it else pytest.warns(UserWarning, match="gets no gradient through it"):
        net(x)
    net.eval()
    net.critic(net.forward(x))  # without a warning, which would be an error
    autograd.training = True
    with pytest.warns(UserWarning, match="gets no gradient through it"):
        net.critic(net.forward(x))
    with autograd.no_grad():
        net.critic(net.forward(x))


class Copies(Linear):
    def __init__(self, how):
        super().__init__()
        self.target, self.how = layer.Linear(4), how

    def forward(self, x):
        return self.linear(x) + self.target(x)

    def train_one_batch(self, x):
        loss = autograd.reduce_mean(self.forward(x))
        self.optimizer(loss)
        getattr(self.target, self.how)(self.linear.get_params())
        return loss


@pytest.mark.parametrize("how", ["set_params", "set_states"])
def test_a_recorded_step_may_copy_the_parameters_of_one_layer_to_another(how):
    net, x = Copies(how), Tensor(data=np.ones((2, 4)))
    net.set_optimizer(opt.SGD(lr=0.1))
    net.compile([x], use_graph=True)
    for _ in range(3):
        before = to_numpy(net.linear.b)
        net(x)
        assert (to_numpy(net.linear.b) != before).all()
        np.testing.assert_array_equal(to_numpy(net.target.b), to_numpy(net.linear.b))
    assert [info.break_reason for info in net.graph_info()] == [None]


def test_a_step_that_calls_its_own_model_says_so():
    class Calls(Net):
        def train_one_batch(self, x, y):
            return self(x, y)

    with pytest.raises(GraphError, match="call forward"):
        compiled(kind=Calls)(*batch(0))


def test_a_model_whose_layers_were_replaced_needs_a_new_optimizer():
    net = compiled()
    net(*batch(0))
    net.linear = layer.Linear(4)
    with pytest.raises(GraphError, match="set_optimizer"):
        net.compile([batch(0)[0]])
    net.set_optimizer(opt.SGD(lr=0.1))
    net.compile([batch(0)[0]])
    net.optimizer.zero_grad()


def test_layers_that_were_added_are_known_after_compile():
    class Grows(Net):
        more = staticmethod(lambda x: x)

        def forward(self, x):
            return self.more(super().forward(x))

        def train_one_batch(self, x, y):
            self.optimizer.zero_grad()
            self.loss(self.forward(x), y).backward()
            return to_numpy(self.linear.W.grad), to_numpy(self.get_params()["more.W"].grad)

    net = Grows()
    net.set_optimizer(opt.SGD(lr=0.1))
    net.compile([batch(0)[0]])
    net.more = layer.Linear(4)
    net.compile([batch(0)[0]])
    net.dropout = layer.Dropout(0.0)
    first, again = net(*batch(0)), net(*batch(0))
    for one, other in zip(first, again, strict=True):
        np.testing.assert_array_equal(one, other)  # and not twice as large


def test_a_model_may_take_lists_and_dicts_of_tensors():
    class Takes(Net):
        def forward(self, xs, more):
            return super().forward(xs[0] + more["x"])

    net, x = Takes(), batch(0)[0]
    net.compile([[x], {"x": x}], is_train=False)
    assert net([x], {"x": x}).shape == (8, 4)
    for wrong in ([[]], [{"x": 1}], [x, 3], x):
        with pytest.raises(OptionError, match="compile"):
            net.compile(wrong)


def ranks_train(communicator):
    get_default_device().SetRandSeed(communicator.rank)
    net = Net()
    net.set_optimizer(opt.DistOpt(opt.SGD(lr=0.1), communicator=communicator))
    net.compile([batch(0)[0]])
    start = values(net)
    for step in range(3):
        net(*batch(10 * step + communicator.rank))
    trained = values(net)
    net.optimizer.synchronize(net)
    return start, trained, values(net)


def test_ranks_start_and_stay_equal_and_statistics_after_synchronize():
    (start, trained, averaged), *others = run_ranks(ranks_train, 3)
    for other_start, other_trained, other_averaged in others:
        assert other_start == start and other_averaged == averaged
        params = [name for name in trained if "running" not in name]
        assert all(other_trained[name] == trained[name] for name in params)
        assert other_trained["norm.running_mean"] != trained["norm.running_mean"]


@pytest.mark.parametrize(("text", "is_recorded"), [("True", True), ("False", False)])
def test_compile_takes_the_texts_of_singas_examples(text, is_recorded):
    net = compiled(use_graph=text)
    net(*batch(0))
    net(*batch(0))
    assert bool(net.graph_info()) == is_recorded
    with pytest.raises(OptionError, match="use_graph = 'no' must be True or False"):
        compiled(use_graph="no")


def wraps_another(communicator):
    """The error of a model that is given what its DistOpt wraps."""
    inner = opt.SGD(0.1)
    dist, net = opt.DistOpt(inner, communicator=communicator), Net()
    try:
        net.set_optimizer(inner)
    except OptionError as error:
        dist.opt = opt.SGD(0.1)
        net.set_optimizer(inner)  # nothing wraps it any more
        return str(error)
    return ""


def test_what_a_dist_opt_of_several_ranks_wraps_is_no_models_optimizer():
    assert all("each rank would train by itself" in text for text in run_ranks(wraps_another, 2))
    assert wraps_another(LocalCommunicator(World())) == ""


@pytest.mark.parametrize("use_graph", [False, True])
def test_a_copy_of_a_model_has_records_of_its_own(use_graph: bool) -> None:
    """``copy.copy`` shares layers and optimizer, and replays no step of the other's."""
    ends = []
    for may_replay in (False, use_graph):
        net = compiled(use_graph=may_replay)
        for step in range(3):
            net(*batch(step))
        twin = copy.copy(net)
        assert twin.conv is net.conv and twin.optimizer is net.optimizer
        twin.relu = layer.Sigmoid()
        ends.append([to_numpy(each(*batch(step))[1]).item() for step in range(3) for each in (twin, net)])
    np.testing.assert_allclose(ends[1], ends[0], rtol=1e-5)


def test_a_result_of_a_recorded_step_that_is_changed_in_place_is_a_leaf():
    net = compiled(use_graph=True)
    for step in range(3):
        out, _ = net(*batch(step))
    assert not out.is_dummy() and not out.is_recorded
    out += 1.0
    assert out.is_dummy()


class Hides(Net):
    """A layer where none is looked for, in a plain object."""

    def __init__(self):
        super().__init__()
        self.box = SimpleNamespace(hidden=layer.Linear(4))

    def forward(self, x):
        return self.box.hidden(super().forward(x))


@pytest.mark.parametrize("use_graph", [False, True])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("is_wrapped", [False, True])
def test_a_save_without_a_layer_that_is_trained_warns(
    tmp_path: Path, is_wrapped: bool, momentum: float, use_graph: bool
) -> None:
    net, optimizer = Hides(), opt.SGD(0.1, momentum)
    net.set_optimizer(
        opt.DistOpt(optimizer, communicator=LocalCommunicator(World())) if is_wrapped else optimizer
    )
    net.train_one_batch = lambda x, y: net.optimizer(net.loss(net.forward(x), y))
    net.compile([batch(0)[0]], use_graph=use_graph)
    net.save_states(tmp_path / "before.zip")  # nothing is trained yet
    for step in range(3):
        net(*batch(step))
    with pytest.warns(
        UserWarning, match=r"updates a parameter of shape \(4,.*that Hides did not have when it was"
    ):
        net.save_states(tmp_path / "net.zip")
    net.hidden = net.box.hidden
    net.compile([batch(0)[0]], use_graph=use_graph)
    net(*batch(0))
    net.save_states(tmp_path / "whole.zip")


class Lazy(Net):
    def train_one_batch(self, x, y):
        yield super().train_one_batch(x, y)


class Awaited(Net):
    async def train_one_batch(self, x, y):
        return super().train_one_batch(x, y)


class Both(Net):
    async def train_one_batch(self, x, y):
        yield super().train_one_batch(x, y)


class Returns(Net):
    """One that has run, and returns a generator of what it has."""

    def train_one_batch(self, x, y):
        return (each for each in super().train_one_batch(x, y))


@pytest.mark.parametrize("use_graph", [False, True])
@pytest.mark.parametrize("kind", [Lazy, Awaited, Both])
def test_a_step_that_would_run_later_is_an_error(kind: Any, use_graph: bool) -> None:
    net = compiled(use_graph=use_graph, kind=kind)
    for _ in range(3):
        with pytest.raises(GraphError, match="would run after the step; write it without yield and async"):
            net(*batch(0))
    assert net.optimizer.step_counter == 0
    assert len(list(compiled(use_graph=use_graph, kind=Returns)(*batch(0)))) == 2


def test_a_model_that_skips_the_base_class_is_told_so() -> None:
    class Skips(model.Model):
        def __init__(self) -> None:
            self.linear = layer.Linear(1)

    with pytest.raises(
        AttributeError, match=r"Skips .*: its __init__ must call super\(\).__init__\(\) first"
    ):
        Skips().compile([Tensor((2, 3))])


class Forgets(Net):
    """Counts a step without an update, or makes it from the gradients that backward has stored."""

    updates = False

    def train_one_batch(self, *inputs):
        loss = autograd.mse_loss(self.forward(inputs[0]), self.forward(inputs[0]) * 0.0)
        loss.backward()
        if self.updates:
            for param in self.get_params().values():
                self.optimizer.update(param, param.grad)
        self.optimizer.step()
        return loss


@pytest.mark.parametrize("use_graph", [False, True], ids=["eager", "recorded"])
@pytest.mark.parametrize("is_dist", [False, True])
def test_a_step_that_is_only_counted_is_warned_of(is_dist, use_graph):
    for updates in (False, True):
        net, sgd = Forgets(), opt.SGD(0.1)
        net.updates = updates
        net.set_optimizer(opt.DistOpt(sgd, communicator=LocalCommunicator(World())) if is_dist else sgd)
        x = batch(0)[0]
        net.compile([x], use_graph=use_graph)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(3):
                net(x)
        assert any("SGD: step() only counts a step" in str(each.message) for each in caught) != updates
        assert sgd.step_counter == 3


def test_a_step_of_a_function_that_is_set_instead_of_a_method_is_not_warned_of():
    sgd, param = opt.SGD(0.5), Tensor(data=[1.0], stores_grad=True)
    sgd.set_parameters({"w": param})
    sgd.apply = lambda name, value, grad: value.copy_data(value - grad.clone())
    with autograd.record():
        loss = autograd.reduce_sum(param * 2.0, keepdims=0)
    loss.backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sgd.update_pairs([(param, param.grad)])
        sgd.step()
    assert to_numpy(param) == -1
