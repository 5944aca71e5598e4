# SPDX-License-Identifier: Apache-2.0
"""Recorded steps: a replay does what the eager step does, with new inputs, options and random numbers."""

import sys
from itertools import groupby
from types import SimpleNamespace

import numpy as np
import pytest

from singa_lite import autograd, layer, model, opt
from singa_lite.backend.cpu import CpuBackend
from singa_lite.comm.base import World
from singa_lite.comm.local import LocalCommunicator
from singa_lite.config import this_thread
from singa_lite.device import get_default_device
from singa_lite.errors import OptionError, ShapeError
from singa_lite.graph.nodes import Host
from singa_lite.graph.recorder import Recorder
from singa_lite.profile import TimeProfile
from singa_lite.record import records
from singa_lite.tensor import Tensor, from_numpy, to_numpy
from tests.ranks import run_ranks
from tests.slow_cases import slow_but_first

OPTIONS = ["fp32", "fp16", "bf16", "partialUpdate", "sparseTopK", "sparseThreshold"]


class Net(model.Model):
    """Convolution, batch norm, dropout, a tensor used twice: whatever a replay could get wrong."""

    unrecorded_attributes = (*model.Model.unrecorded_attributes, "python")

    def __init__(self):
        super().__init__()
        self.conv = layer.Conv2d(3, 3, padding=1, activation="RELU")
        self.norm = layer.BatchNorm2d()
        self.pool = layer.MaxPool2d(2)
        self.dropout = layer.Dropout(0.4)
        self.flatten = layer.Flatten()
        self.linear = layer.Linear(4)
        self.loss = layer.SoftMaxCrossEntropy()
        self.python = SimpleNamespace(runs=0)  # counts calls

    def forward(self, x):
        y = self.flatten(self.pool(self.norm(self.conv(x))))
        return self.linear(self.dropout(y) + y)

    def train_one_batch(self, x, y, dist_option="fp32", spars=0.2):
        self.python.runs += 1
        out = self.forward(x)
        loss = self.loss(out, y)
        self.optimizer(loss, dist_option=dist_option, spars=spars)
        return out, loss


def batch(step, size=8):
    rng = np.random.default_rng(step)
    return from_numpy(rng.standard_normal((size, 2, 6, 6))), from_numpy(rng.integers(0, 4, size))


def compiled(use_graph, net=None, communicator=None, optimizer=None):
    get_default_device().SetRandSeed(5)
    net = net or Net()
    sgd = optimizer or opt.SGD(lr=opt.ExponentialDecay(0.1, 2, 0.7), momentum=0.9)
    net.set_optimizer(opt.DistOpt(sgd, communicator=communicator or LocalCommunicator(World()), threshold=30))
    net.compile([batch(0)[0]], use_graph=use_graph)
    return net


def values(net):
    return {name: to_numpy(value).tobytes() for name, value in net.get_states().items()}


def trained(use_graph, calls, **options):
    """Losses, outputs and final states of a model on a list of (step, size, further arguments)."""
    net = compiled(use_graph, **options)
    get_default_device().SetRandSeed(7)
    seen = []
    for step, size, arguments in calls:
        out, loss = net(*batch(step, size), *arguments)
        seen += [to_numpy(out).tobytes(), to_numpy(loss).tobytes()]
    return seen, values(net), net


@pytest.fixture
def as_recorded(monkeypatch):
    """Replay the very kernels that were recorded: lowered ones (tests/backend/test_lower.py) round differently."""
    monkeypatch.setattr(CpuBackend, "lower", lambda self, calls: calls)


@pytest.fixture(autouse=True)
def evaluation_afterwards():
    yield
    autograd.training = False
    assert this_thread.recorder is None


@pytest.mark.usefixtures("as_recorded")
@pytest.mark.parametrize("option", OPTIONS)
def test_ten_replayed_steps_equal_ten_eager_ones_bit_for_bit(option):
    calls = [(step, 8, (option, 0.2)) for step in range(10)]
    eager, graph = trained(False, calls), trained(True, calls)
    assert graph[0] == eager[0] and graph[1] == eager[1]
    infos = graph[2].graph_info()
    num_records = 3 if option == "partialUpdate" else 1  # one for each chunk
    assert len(infos) == graph[2].python.runs == num_records and eager[2].python.runs == 10
    for info in infos:
        assert info.break_reason is None and info.num_kernels >= 20 and info.num_bytes > 0
        # of these count_step, the end of the update, and two for bytes
        calls_python = {"sparseThreshold": 6, "partialUpdate": 5}.get(option, 4)
        assert info.num_host_nodes == calls_python
        assert info.num_collectives == {
            "fp32": 0, "fp16": 2, "bf16": 1, "partialUpdate": 1, "sparseTopK": 3, "sparseThreshold": 3
        }[option]  # fmt: skip


@pytest.mark.usefixtures("as_recorded")
def test_adam_counts_its_steps_in_a_replay():
    calls = [(step, 8, ()) for step in range(6)]
    eager, graph = (trained(use_graph, calls, optimizer=opt.Adam(lr=0.01)) for use_graph in (False, True))
    assert graph[1] == eager[1]


@pytest.mark.usefixtures("as_recorded")
def test_shapes_and_options_have_records_of_their_own():
    calls = [
        (0, 8, ()),
        (1, 5, ()),
        (2, 8, ("sparseTopK", 0.5)),
        (3, 8, ()),
        (4, 5, ()),
        (5, 8, ("sparseTopK", 0.1)),
    ]
    eager, graph = trained(False, calls), trained(True, calls)
    assert graph[:2] == eager[:2]
    assert len(graph[2].graph_info()) == 4


def with_changing_spars(use_graph, option, way, shares):
    """Payload bytes of each step, final states and the model; ``way`` is how ``shares`` reach DistOpt."""

    class Shares(opt.DecayScheduler):
        def call(self, step):
            return shares[step]

    net, schedule, payloads = compiled(use_graph), Shares(0.0), []
    get_default_device().SetRandSeed(7)
    for step, share in enumerate(shares):
        if way == "attribute":
            net.optimizer.spars = share
        net(*batch(step), option, {"schedule": schedule, "attribute": None, "number": share}[way])
        payloads.append(net.optimizer.bytes_payload)
    return payloads, values(net), net


@pytest.mark.usefixtures("as_recorded")
@pytest.mark.parametrize("option", ["sparseTopK", "sparseThreshold"])
@slow_but_first("way", ["schedule", "attribute"])
def test_twenty_values_of_spars_are_read_again(option, way):
    shares = [0.9 * 0.8**step for step in range(20)]
    plain = with_changing_spars(False, option, "number", shares)
    eager, graph = (with_changing_spars(use_graph, option, way, shares) for use_graph in (False, True))
    assert plain[:2] == eager[:2] == graph[:2]
    # how many elements are sent decides the nodes of a step; which magnitude they have does not
    num_records = 20 if option == "sparseTopK" else 1
    assert len(graph[2].graph_info()) == num_records and graph[2].python.runs == num_records
    assert len(set(graph[0])) > 10


@pytest.mark.usefixtures("as_recorded")
def test_a_step_that_is_another_one_every_time_ends_up_eager_and_says_why(monkeypatch):
    monkeypatch.setattr(records, "MAX_MISSES", 5)
    shares = [0.9 * 0.8**step for step in range(8)]
    eager, graph = (with_changing_spars(use, "sparseTopK", "schedule", shares) for use in (False, True))
    assert eager[:2] == graph[:2] and graph[2].python.runs == 8
    [info] = graph[2].graph_info()
    assert "changes at every step" in info.break_reason


@pytest.mark.usefixtures("as_recorded")
def test_numbers_for_spars_make_records_of_their_own_with_the_values_of_eager_steps():
    shares = [0.5, 0.1, 0.5, 0.2]
    eager, graph = (with_changing_spars(use, "sparseTopK", "number", shares) for use in (False, True))
    assert graph[:2] == eager[:2]
    assert len(graph[2].graph_info()) == 3


def test_a_schedule_that_leaves_its_range_raises_in_a_replay_and_changes_no_parameter():
    net = compiled(True)
    net.optimizer.spars = 0.5
    net(*batch(0), "sparseTopK", None)
    before = {name: to_numpy(value).tobytes() for name, value in net.get_params().items()}
    for wrong in (1.5, 0.0, opt.Constant(1.5)):
        net.optimizer.spars = wrong
        with pytest.raises(OptionError, match="spars = "):
            net(*batch(1), "sparseTopK", None)
    for wrong in (float("nan"), "half"):
        with pytest.raises(OptionError, match="spars = "):
            net.optimizer.spars = wrong
    assert {name: to_numpy(value).tobytes() for name, value in net.get_params().items()} == before
    net.optimizer.spars = 0.5
    net(*batch(1), "sparseTopK", None)
    assert net.optimizer.step_counter == 2


def test_only_the_latest_records_are_kept():
    calls = [(0, size, ()) for size in range(1, records.MAX_RECORDS + 4)] + [(0, 1, ())]
    eager, graph = trained(False, calls), trained(True, calls)
    assert graph[:2] == eager[:2]
    infos = graph[2].graph_info()
    assert len(infos) == records.MAX_RECORDS and infos[-1].inputs.startswith("float32[1, ")


@pytest.mark.usefixtures("as_recorded")
def test_kinds_that_lose_their_records_in_turn_run_eagerly_so_that_others_keep_theirs(monkeypatch):
    monkeypatch.setattr(records, "MAX_RECORDS", 4)
    calls = [(step, 1 + step % 6, ()) for step in range(60)]
    eager, graph = trained(False, calls), trained(True, calls)
    assert graph[:2] == eager[:2]
    reasons = [info.break_reason for info in graph[2].graph_info()]
    assert reasons.count(None) == 4 and len(reasons) == 6
    assert "dropped 4 times for those of other calls" in next(filter(None, reasons))
    runs = graph[2].python.runs
    for step in range(60, 72):
        graph[2](*batch(step, 1 + step % 6))
    assert graph[2].python.runs == runs + 2 * 2  # of two kinds, twice each


def test_a_run_that_goes_on_has_the_bits_of_one_whose_records_took_turns(monkeypatch, tmp_path):
    def train(net, first, last):
        get_default_device().SetRandSeed(first)
        for step in range(first, last):
            net(*batch(step, 2 + step % 6))
        return values(net)

    def bfloat16_net():
        net = Net()
        sgd = opt.SGD(0.05, momentum=0.9)
        net.set_optimizer(opt.DistOpt(sgd, communicator=LocalCommunicator(World()), threshold=30))
        net.compile([batch(0)[0]], use_graph=True, precision="bf16")
        return net

    monkeypatch.setattr(records, "MAX_RECORDS", 4)
    whole, resumed = bfloat16_net(), bfloat16_net()
    train(whole, 0, 40)
    whole.save_states(str(tmp_path / "saved.zip"))
    expected = train(whole, 40, 100)
    resumed.load_states(str(tmp_path / "saved.zip"))
    assert train(resumed, 40, 100) == expected
    assert any(info.break_reason for info in resumed.graph_info())


def test_records_that_were_worth_it_may_be_dropped_any_number_of_times(monkeypatch):
    monkeypatch.setattr(records, "MAX_RECORDS", 1)
    monkeypatch.setattr(records, "REPLAYS_PAID", 3)
    net = compiled(True)
    for size in [1, 2] * 6:
        for step in range(5):
            net(*batch(step, size))
    assert [info.break_reason for info in net.graph_info()] == [None]
    assert net.python.runs == 12


def test_a_record_that_is_replayed_stays_however_many_others_of_its_kind_are_dropped(monkeypatch):
    class Scaled(Net):
        factor = 1.0

        def train_one_batch(self, x, y):
            return super().train_one_batch(x * self.factor, y)

    monkeypatch.setattr(records, "MAX_RECORDS", 4)
    net = compiled(True, Scaled())
    for number in range(20):
        net.factor = 1.0
        runs = net.python.runs
        for step in range(3):
            net(*batch(step))
        assert net.python.runs == runs + (number == 0)
        net.factor = 2.0 + number  # once, never again
        net(*batch(0))
    assert {info.break_reason for info in net.graph_info()} == {None}


def test_a_model_remembers_a_limited_number_of_kinds_and_those_with_records(monkeypatch):
    class Breaking(Net):
        def train_one_batch(self, x, y):
            out, loss = super().train_one_batch(x, y)
            if x.shape[0] > 1:
                to_numpy(loss)
            return out, loss

    monkeypatch.setattr(records, "MAX_KINDS", 8)
    net = compiled(True, Breaking())
    net(*batch(0, 1))
    for size in range(2, 20):
        net(*batch(size, size))
        assert len(net.graph_info()) <= 8
    runs = net.python.runs
    net(*batch(0, 1))
    assert net.python.runs == runs


def test_inputs_and_results_belong_to_the_caller():
    net = compiled(True)
    x, y = batch(0)
    results = []
    for step in range(3):
        before = to_numpy(x).tobytes()
        results.append(net(x, y))
        assert to_numpy(x).tobytes() == before
        x.copy_from_numpy(to_numpy(batch(step + 1)[0]))
    outs = [to_numpy(out).tobytes() for out, _ in results]
    assert len(set(outs)) == 3
    results[0][0].data[:] = 0
    net(x, y)
    assert to_numpy(results[1][0]).tobytes() == outs[1]


def test_dropout_draws_new_masks_in_every_replay():
    net = compiled(True)
    x, y = batch(0)
    net.optimizer.opt.lr = opt.Constant(0.0)
    outs = {to_numpy(net(x, y)[0]).tobytes() for _ in range(4)}
    assert len(outs) == 4


class ReadsTheLoss(Net):
    def train_one_batch(self, x, y):
        out = self.forward(x)
        loss = self.loss(out, y)
        if loss.item() > 0:
            self.optimizer(loss)
        return out, loss


class MakesATensor(Net):
    def train_one_batch(self, x, y):
        self.calls = getattr(self, "calls", 0) + 1
        out = self.forward(x * Tensor(data=np.full(1, self.calls, np.float32)))
        loss = self.loss(out, y)
        self.optimizer(loss)
        return out, loss


@pytest.mark.parametrize(
    ("kind", "reason"), [(ReadsTheLoss, "reads values"), (MakesATensor, "makes a Tensor")]
)
def test_a_step_that_a_replay_would_freeze_runs_eagerly_and_says_why(kind, reason):
    calls = [(step, 8, ()) for step in range(4)]
    eager, graph = trained(False, calls, net=kind()), trained(True, calls, net=kind())
    assert graph[:2] == eager[:2]
    [info] = graph[2].graph_info()
    assert reason in info.break_reason and info.num_kernels == 0


@pytest.mark.usefixtures("as_recorded")
def test_loaded_states_are_what_the_next_replay_uses(tmp_path):
    calls = [(step, 8, ()) for step in range(3)]
    _, _, net = trained(True, calls)
    net.save_states(tmp_path / "net.zip")
    kept = values(net)
    net(*batch(9))
    net.load_states(tmp_path / "net.zip")
    assert values(net) == kept
    expected = values(net)
    other = compiled(False)
    other.load_states(tmp_path / "net.zip")
    assert values(other) == expected
    random_state = get_default_device().get_random_state()
    first = to_numpy(net(*batch(4))[1]).tobytes()
    get_default_device().set_random_state(random_state)
    assert to_numpy(other(*batch(4))[1]).tobytes() == first
    assert values(net) == values(other)


@pytest.mark.usefixtures("as_recorded")
@pytest.mark.parametrize("option", OPTIONS)
def test_a_replay_goes_on_from_optimizer_states_that_were_set(option):
    nets = compiled(True), compiled(False)
    for net in nets:
        get_default_device().SetRandSeed(7)
        for step in range(3):
            net(*batch(step), option)
        kept, states = values(net), net.optimizer.get_states()
        net(*batch(8), option)  # what the scheme keeps now belongs to no state that was saved
        for name, value in net.get_states().items():
            value.copy_from_numpy(np.frombuffer(kept[name], np.float32).reshape(value.shape))
        net.optimizer.set_states(states)
        for step in range(3, 6):
            net(*batch(step), option)
    assert nets[0].graph_info()[0].break_reason is None
    assert values(nets[0]) == values(nets[1])


def test_a_parameter_that_moved_makes_a_new_record():
    net, other = compiled(True), compiled(False)
    for each in (net, other):
        get_default_device().SetRandSeed(7)
        each(*batch(0))
        each.linear.W.to_type("float32")  # a new array with the same values
        each(*batch(1))
    assert values(net) == values(other)


def test_bad_input_raises_in_a_replay_as_in_an_eager_step():
    net = compiled(True)
    x, y = batch(0)
    net(x, y)
    wrong = from_numpy(np.full(8, 4))
    for _ in range(2):
        with pytest.raises(ShapeError, match="class ids"):
            net(x, wrong)


def test_a_step_that_raises_leaves_no_record():
    net = compiled(True)
    x, _ = batch(0)
    with pytest.raises(ShapeError):
        net(x, from_numpy(np.zeros(3, np.int32)))
    assert net.graph_info() == [] and this_thread.recorder is None


@pytest.mark.usefixtures("as_recorded")
def test_a_call_that_no_record_can_belong_to_says_why():
    class Listens(Net):
        def train_one_batch(self, given):
            return super().train_one_batch(given.x, given.y)

    eager, graph = compiled(False, net=Listens()), compiled(True, net=Listens())
    given = SimpleNamespace()
    for net in (eager, graph):
        get_default_device().SetRandSeed(7)
        for step in range(3):
            given.x, given.y = batch(step)
            net(given)
    assert values(eager) == values(graph)
    [info] = graph.graph_info()
    assert "of type SimpleNamespace" in info.break_reason and info.num_kernels == 0


def test_evaluation_is_never_recorded():
    net = compiled(True)
    net(*batch(0))
    net.eval()
    net(batch(0)[0])
    assert len(net.graph_info()) == 1


def test_kernels_of_host_calls_are_not_recorded():
    recorder, tensor = Recorder(lambda arguments: []), Tensor((2,))
    with recorder.recording():
        recorder.host(Host(tensor.set_value, (1.0,), sees_arrays=True))
        tensor.set_value(2.0)
    assert len(recorder.nodes) == 2
    tensor.set_value(0.0)
    recorder.nodes[0]()
    np.testing.assert_array_equal(to_numpy(tensor), [1, 1])


def ranks_train(communicator, use_graph, option):
    CpuBackend.lower = lambda self, calls: calls  # in a process of its own, where no fixture reaches
    net = compiled(use_graph, communicator=communicator)
    get_default_device().SetRandSeed(7 + communicator.rank)
    for step in range(5):
        net(*batch(10 * step + communicator.rank), option)
    return {name: value for name, value in values(net).items() if "running" not in name}


@slow_but_first("option", OPTIONS, count=3)
def test_ranks_replay_to_the_same_bits_as_eagerly(option):
    eager, graph = (run_ranks(ranks_train, 3, use_graph, option) for use_graph in (False, True))
    assert graph == eager
    if option != "partialUpdate":
        assert graph[0] == graph[1] == graph[2]


def ranks_count_packs(communicator, option):
    rank = communicator.rank
    net = compiled(True, communicator=communicator)
    net(*batch(rank), option)
    kernels = []

    class Watching(CpuBackend):
        def execute(self, kernel, inputs, out, attributes):
            if all(x.dtype != np.int64 for x in inputs):  # not the numbers of selected elements
                kernels.append(kernel)
            super().execute(kernel, inputs, out, attributes)

    get_default_device().backend.__class__ = Watching
    net(*batch(3 + rank), option)
    return kernels.count("pack"), kernels.count("copy")


@pytest.mark.parametrize("option", ["fp32", "fp16", "bf16", "sparseTopK", "sparseThreshold"])
def test_a_replay_computes_gradients_right_where_they_are_sent_from(option):
    assert run_ranks(ranks_count_packs, 3, option) == [(0, 4)] * 3  # two inputs and two results are copied


def test_activations_not_alive_together_share_memory():
    class Deep(Net):
        def __init__(self):
            super().__init__()
            self.layers = [layer.Conv2d(3, 3, padding=1, activation="RELU") for _ in range(8)]

        def forward(self, x):
            for each in self.layers:
                x = each(x)
            return self.linear(self.flatten(x))

    calls = [(step, 8, ()) for step in range(4)]
    eager, graph = trained(False, calls, net=Deep()), trained(True, calls, net=Deep())
    assert graph[:2] == eager[:2]
    activation = 4 * 8 * 3 * 6 * 6
    # eight convolutions and eight activations are saved for backward; their gradients come one after the other
    assert graph[2].graph_info()[0].num_bytes < (16 + 6) * (activation + 64)


def profiled(capsys, verbosity, replays=8):
    net, device = compiled(True), get_default_device()
    device.SetVerbosity(verbosity)
    try:
        for step in range(1 + replays):
            net(*batch(step))
        device.PrintTimeProfiling()
    finally:
        device.SetVerbosity(0)
    return capsys.readouterr().out.splitlines()


def seconds(line):
    label, _, value = line.rpartition(" : ")
    assert value.endswith(" sec")
    return label, float(value.removesuffix(" sec"))


def test_time_profiling_prints_phases_calls_or_synchronisation(capsys):
    head, *phases = profiled(capsys, 1)
    assert head == "Time Profiling:"
    assert [seconds(line)[0] for line in phases] == [
        "Forward Propagation Time", "Backward Propagation Time", "Dist Time"
    ]  # fmt: skip
    assert all(seconds(line)[1] > 0 for line in phases)
    calls = [seconds(line)[0] for line in profiled(capsys, 2)[1:]]
    assert len(calls) == 25 and calls[0] == "OP_ID0. conv2d" and calls[-1] == "OP_ID24. Host.end_update"
    synchronisation = [seconds(line)[0] for line in profiled(capsys, 3)[1:]]
    assert len(synchronisation) == 4 and all(". Host." in label for label in synchronisation)


class TwoLosses(model.Model):
    """A step whose second loss is computed after the gradients of the first, or, ``amid``, while they come."""

    def __init__(self):
        super().__init__()
        self.first, self.second = layer.Linear(3), layer.Linear(1)

    def forward(self, x):
        return self.first(x), self.second(x)

    def train_one_batch(self, x, amid):
        one = autograd.reduce_sum(autograd.tanh(self.first(x)))
        pairs = autograd.backward(one)
        pairs = pairs if amid else [(param, gradient * 0.5) for param, gradient in pairs]
        two = autograd.reduce_sum(autograd.sigmoid(self.second(x)))
        self.optimizer.update_all([*pairs, *autograd.backward(two)])
        return two


@pytest.mark.parametrize("amid", [False, True])
def test_each_loss_of_a_step_has_its_calls_in_the_right_phase(as_recorded, amid):
    net, device = TwoLosses(), get_default_device()
    net.set_optimizer(opt.SGD(lr=0.1))
    x = from_numpy(np.ones((2, 4), np.float32))
    net.compile([x], use_graph=True)
    device.SetVerbosity(1)
    try:
        for _ in range(2):
            net(x, amid)
        (entries,) = device.profile.entries.values()
    finally:
        device.SetVerbosity(0)
    phases = [
        (phase, [entry.name for entry in group]) for phase, group in groupby(entries, lambda e: e.phase)
    ]
    assert [phase for phase, _ in phases] == ["Forward", "Backward"] * 2
    forward, backward = ([name for phase, names in phases if phase == wanted for name in names]
                         for wanted in ("Forward", "Backward"))  # fmt: skip
    assert not {"tanh_backward", "sigmoid_backward"} & set(forward) and {"tanh", "sigmoid"} <= set(forward)
    assert not {"tanh", "sigmoid"} & set(backward) and {"tanh_backward", "sigmoid_backward"} <= set(backward)


def test_the_first_replays_are_not_counted(capsys):
    assert "the first 5 are skipped" in profiled(capsys, 1, replays=5)[1]


@pytest.mark.parametrize("later", [0, 5])
def test_the_seconds_a_replay_do_not_depend_on_what_is_skipped_later(later):
    profile = TimeProfile(verbosity=2, skip_iteration=2)
    for _ in range(6):
        profile.add(1, [("Forward", "conv2d")], [0.25])
    profile.skip_iteration = later
    assert profile.text().splitlines()[1] == "OP_ID0. conv2d : 0.250000 sec"


class Small(model.Model):
    """A convolution and a linear layer."""

    def __init__(self):
        super().__init__()
        self.conv, self.flatten, self.linear = layer.Conv2d(8, 3), layer.Flatten(), layer.Linear(10)
        self.loss = layer.SoftMaxCrossEntropy()

    def forward(self, x):
        return self.linear(self.flatten(self.conv(x)))

    def train_one_batch(self, x, y):
        out = self.forward(x)
        loss = self.loss(out, y)
        self.optimizer(loss, dist_option="fp16")
        return out, loss


def ranks_count_calls(communicator):
    net, calls = Small(), []
    net.set_optimizer(opt.DistOpt(opt.SGD(lr=0.1, momentum=0.9), communicator=communicator))
    x, y = from_numpy(np.ones((8, 1, 12, 12), np.float32)), from_numpy(np.arange(8) % 10)
    net.compile([x], use_graph=True)
    for _ in range(3):
        net(x, y)

    def note(frame, event, argument):
        if event == "call" and "singa_lite" in frame.f_code.co_filename:
            calls.append(frame.f_code.co_name)

    sys.setprofile(note)
    net(x, y)
    sys.setprofile(None)
    return len(calls)


def test_a_replay_makes_few_calls_of_python():
    assert all(0 < calls <= 150 for calls in run_ranks(ranks_count_calls, 2))
