# SPDX-License-Identifier: Apache-2.0
"""DistOpt: N ranks take one common step; agreement before the first; SINGA's methods."""

import gc
import warnings
import weakref

import numpy as np
import pytest

from singa_lite import autograd, opt
from singa_lite.comm.base import World
from singa_lite.comm.local import LocalCommunicator
from singa_lite.dtypes import bfloat16
from singa_lite.errors import CheckpointError, CommError, OptionError, ShapeError, SingaLiteError
from singa_lite.opt.checks import unique_names
from singa_lite.sync import find_schemes
from singa_lite.tensor import Tensor, to_numpy
from tests.ranks import run_ranks
from tests.sync.make_scheme import begin

FEATURES, HIDDEN, BATCH = 6, 5, 4
OPTIONS = ["fp32", "fp16", "bf16", "partialUpdate", "sparseTopK", "sparseThreshold"]


def make_params(seed=0):
    rng = np.random.default_rng(seed)
    shapes = {"w1": (FEATURES, HIDDEN), "b1": (HIDDEN,), "w2": (HIDDEN, 1)}
    return {
        name: Tensor(data=0.5 * rng.standard_normal(shape), stores_grad=True, name=name)
        for name, shape in shapes.items()
    }


def loss_of(params, x, y):
    hidden = autograd.tanh(autograd.add_bias(autograd.matmul(x, params["w1"]), params["b1"]))
    return autograd.mse_loss(autograd.matmul(hidden, params["w2"]), y)


def batch_of(step, rank, size):
    """Rank's part of the global batch of 6 * BATCH samples, whatever the number of ranks."""
    rng = np.random.default_rng([11, step])
    x, y = rng.standard_normal((6 * BATCH, FEATURES)), rng.standard_normal((6 * BATCH, 1))
    part = slice(rank * 6 * BATCH // size, (rank + 1) * 6 * BATCH // size)
    return Tensor(data=x[part]), Tensor(data=y[part])


def train(communicator, steps=10, seed=0, prepare=True, **options):
    """Parameters after ``steps`` steps, and the DistOpt."""
    autograd.training = True
    dist = opt.DistOpt(opt.SGD(lr=0.1, momentum=0.9), communicator=communicator, threshold=10)
    params = make_params(seed)
    if prepare:
        dist.prepare(params, {})
    for step in range(steps):
        dist(loss_of(params, *batch_of(step, communicator.rank, communicator.size)), **options)
    return {name: to_numpy(param) for name, param in params.items()}, dist


def trained(communicator, *arguments, **options):
    return train(communicator, *arguments, **options)[0]


def trained_with(communicator, options):
    return trained(communicator, **options)


def local(**options):
    return train(LocalCommunicator(World()), **options)


@pytest.fixture(autouse=True)
def evaluation_afterwards():
    yield
    autograd.training = False


@pytest.mark.parametrize("size", [2, 3])
def test_n_ranks_of_batch_b_equal_one_rank_of_batch_n_b(size):
    expected = local()[0]
    for params in run_ranks(trained, size):
        for name, values in params.items():
            np.testing.assert_allclose(values, expected[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("option", [option for option in OPTIONS if option != "partialUpdate"])
def test_all_ranks_hold_the_same_bits_after_ten_steps(option, size):
    spars = 0.02 if option == "sparseThreshold" else 0.3
    first, *others = run_ranks(trained_with, size, {"dist_option": option, "spars": spars})
    for other in others:
        assert {name: values.tobytes() for name, values in first.items()} == {
            name: values.tobytes() for name, values in other.items()
        }


def test_fp32_on_one_rank_is_the_plain_optimizer_bit_for_bit():
    params = make_params()
    sgd = opt.SGD(lr=0.1, momentum=0.9)
    autograd.training = True
    for step in range(10):
        sgd(loss_of(params, *batch_of(step, 0, 1)))
    expected = local()[0]
    assert all(to_numpy(param).tobytes() == expected[name].tobytes() for name, param in params.items())


def different_starts(communicator):
    return trained(communicator, steps=1, seed=communicator.rank)


def test_prepare_gives_rank_0s_values_to_all():
    first, *others = run_ranks(different_starts, 3)
    assert all(
        values.tobytes() == other[name].tobytes() for other in others for name, values in first.items()
    )


def different_starts_without_prepare(communicator):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        params = trained(communicator, steps=3, seed=communicator.rank, prepare=False)
    return params, [(str(warning.message), warning.filename) for warning in caught]


def test_without_a_model_different_starts_are_repaired_and_reported_once_where_the_script_called():
    results = run_ranks(different_starts_without_prepare, 2)
    (first, warned), (second, _) = results
    assert all(values.tobytes() == second[name].tobytes() for name, values in first.items())
    ((text, file),) = warned
    assert "different parameter values" in text and file == __file__


def different_starts_that_raise(communicator):
    params = make_params(communicator.rank)
    dist = opt.DistOpt(opt.SGD(lr=0.1), communicator=communicator)
    autograd.training = True
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="different parameter values"):
            dist(loss_of(params, *batch_of(0, communicator.rank, communicator.size)))
        dist(loss_of(params, *batch_of(1, communicator.rank, communicator.size)))
    return {name: to_numpy(param).tobytes() for name, param in params.items()}


def test_different_starts_are_repaired_where_the_warning_is_an_error():
    first, *others = run_ranks(different_starts_that_raise, 3)
    assert others == [first, first]


def other_manifest(communicator, kind):
    params = make_params()
    if communicator.rank == 1:
        if kind == "missing":
            del params["b1"]
        elif kind == "shape":
            params["w2"] = Tensor((HIDDEN, 2), stores_grad=True)
        else:
            params["w2"] = Tensor((HIDDEN, 1), dtype="float64", stores_grad=True)
    opt.DistOpt(communicator=communicator).prepare(params, {})


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("missing", r"b1 is float32\[5\] on rank 0 but not there on rank 1"),
        ("shape", r"\[5, 1\].*\[5, 2\]"),
        ("dtype", "float32.*float64"),
    ],
)
def test_a_rank_with_another_manifest_is_an_error_on_all(kind, text):
    for error in run_ranks(other_manifest, 3, kind, return_exceptions=True):
        assert isinstance(error, CommError)
        with pytest.raises(CommError, match=text):
            raise error


def other_manifest_without_prepare(communicator):
    autograd.training = True
    params = make_params()
    if communicator.rank == 1:
        params["w2"] = Tensor(data=np.ones((HIDDEN, 2)), stores_grad=True, name="w2")
    dist = opt.DistOpt(communicator=communicator)
    x, _ = batch_of(0, communicator.rank, communicator.size)
    out = autograd.matmul(autograd.matmul(x, params["w1"]), params["w2"])
    dist(autograd.mse_loss(out, Tensor(out.shape)))


def test_without_a_model_another_manifest_is_an_error_on_all():
    for error in run_ranks(other_manifest_without_prepare, 2, return_exceptions=True):
        assert isinstance(error, CommError) and "models must be equal" in str(error)


def buffers_of(communicator):
    buffers = {"running_mean": Tensor(data=np.full(3, communicator.rank + 1.0))}
    opt.DistOpt(communicator=communicator).prepare(make_params(), buffers)
    return to_numpy(buffers["running_mean"])


def test_prepare_gives_rank_0s_statistics_to_all():
    for values in run_ranks(buffers_of, 2):
        np.testing.assert_array_equal(values, [1, 1, 1])


def alternate(communicator):
    """Two losses alternately, of two parameters each: every chunk of both must be averaged."""
    autograd.training = True
    params = [Tensor(data=np.full(4, 1.0), stores_grad=True, name=f"p{i}") for i in range(4)]
    dist = opt.DistOpt(opt.SGD(lr=0.1), communicator=communicator, threshold=3)
    dist.prepare({param.name: param for param in params}, {})
    for step in range(8):
        first, second = params[:2] if step % 2 == 0 else params[2:]
        scale = Tensor(data=np.full(4, 0.1 * (communicator.rank + step)))
        dist(autograd.reduce_sum(first * second * scale, keepdims=0), "partialUpdate")
    return [to_numpy(param).tobytes() for param in params], dist.get_states()


def test_partial_update_takes_turns_for_each_set_of_parameters():
    (first, states), (second, _) = run_ranks(alternate, 2)
    ages = [int(value) for key, value in states.items() if key.startswith("sync/partialUpdate/")]
    assert ages == [1, 0, 1, 0]  # updates since the average
    # the last step of each set averaged its second chunk
    assert sum(a == b for a, b in zip(first, second, strict=True)) == 2


def test_a_step_that_raised_leaves_nothing_for_the_next():
    expected = local(steps=1, dist_option="sparseTopK", spars=1.0)[0]
    autograd.training = True
    dist = opt.DistOpt(opt.SGD(lr=0.1, momentum=0.9), communicator=LocalCommunicator(World()), threshold=10)
    params = make_params()
    dist.prepare(params, {})
    scheme = dist._scheme(find_schemes()["sparseTopK"], None)
    begin(scheme, spars=1.0)
    scheme.add_gradient(params["b1"], Tensor(data=np.full(HIDDEN, 9.0)))  # and then backward fails
    dist(loss_of(params, *batch_of(0, 0, 1)), "sparseTopK", 1.0)
    assert all(to_numpy(param).tobytes() == expected[name].tobytes() for name, param in params.items())


def test_a_threshold_given_at_the_call_survives_a_checkpoint():
    autograd.training = True

    def make():
        params = make_params()
        dist = opt.DistOpt(opt.SGD(lr=0.1), communicator=LocalCommunicator(World()))
        dist.prepare(params, {})
        return params, dist

    params, dist = make()
    for step in range(3):
        loss = loss_of(params, *batch_of(step, 0, 1))
        dist.backward_and_sparse_update(loss, threshold=20, spars=0.2, topK=True)
    other_params, other = make()
    for name, param in other_params.items():
        param.copy_from_numpy(to_numpy(params[name]))
    other.set_states(dist.get_states())
    assert other.get_states().keys() == dist.get_states().keys()  # also before the scheme has run again
    for each, of in ((params, dist), (other_params, other)):
        of.backward_and_sparse_update(loss_of(each, *batch_of(3, 0, 1)), threshold=20, spars=0.2, topK=True)
    assert all(to_numpy(other_params[name]).tobytes() == to_numpy(p).tobytes() for name, p in params.items())


def two_heads(option, stop=None):
    """Parameters after steps that use one head or the other, saved and loaded after ``stop`` steps."""
    autograd.training = True

    def make(values=None):
        params = make_params() | {"other": Tensor(data=np.ones((HIDDEN, 1)), stores_grad=True, name="other")}
        dist = opt.DistOpt(opt.SGD(lr=0.1), communicator=LocalCommunicator(World()))
        dist.prepare(params, {})
        for name, value in (values or {}).items():
            params[name].copy_from_numpy(value)
        return params, dist

    params, dist = make()
    for step, head in enumerate(["w2", "other", "w2", "w2", "other", "w2", "other", "other"]):
        if step == stop:
            states, values = dist.get_states(), {name: to_numpy(param) for name, param in params.items()}
            params, dist = make(values)
            dist.set_states(states)
        dist(loss_of(params | {"w2": params[head]}, *batch_of(step, 0, 1)), option, 0.1)
    return {name: to_numpy(param).tobytes() for name, param in params.items()}


@pytest.mark.parametrize("option", ["sparseTopK", "sparseThreshold"])
@pytest.mark.parametrize("stop", [1, 2, 3, 4, 5])
def test_a_residual_goes_with_its_parameter_from_group_to_group(option, stop):
    assert two_heads(option, stop) == two_heads(option)


def test_an_earlier_state_forgets_what_came_later():
    _, dist = local(steps=1)
    early = dist.get_states()
    autograd.training = True
    params = {param.name: param for param in dist.opt._slots}
    dist(loss_of(params, *batch_of(1, 0, 1)), "sparseTopK", 0.1)
    assert any(key.startswith("sync/") for key in dist.get_states())
    dist.set_states(early)
    now = dist.get_states()
    assert not any(now.pop(key).any() for key in list(now) if key.startswith("sync/"))  # residuals of nothing
    assert {key: value.tobytes() for key, value in now.items()} == {
        key: value.tobytes() for key, value in early.items()
    }


def test_two_models_on_one_dist_opt_keep_their_names():
    dist = opt.DistOpt(opt.SGD(momentum=0.9), communicator=LocalCommunicator(World()))
    first, second = make_params(), make_params(1)
    dist.prepare(first, {})
    dist.prepare(second, {})
    autograd.training = True
    for params in (first, second):
        dist(loss_of(params, *batch_of(0, 0, 1)), "sparseTopK", 0.1)
    states = dist.get_states()
    assert {
        "sync/sparseTopK/w1:residual",
        "sync/sparseTopK/w1#1:residual",
        "w1:momentum",
        "w1#1:momentum",
    } <= set(states)
    dist.set_states(states)
    dist(loss_of(first, *batch_of(1, 0, 1)), "sparseTopK", 0.1)


@pytest.mark.parametrize(
    "make",
    [
        lambda d: d.all_reduce(np.ones((4, 2), np.float32).T),
        lambda d: d.sparsification(np.ones((4, 2), np.float32).T, None, 0.5, True),
        lambda d: d.sparsification(np.ones(4, np.float32), np.ones(3, np.float32), 0.5, True),
        lambda d: d.sparsification(np.ones(4, bfloat16), None, 0.5, True),
        lambda d: d.fused_sparsification([np.ones(4, np.int32)], None, 0.5, True),
        lambda d: d.all_reduce([1.0, 2.0]),
        lambda d: d.fused_all_reduce([np.ones(2, np.float32), np.ones(2)]),
        lambda d: opt.DistOpt(3, communicator=d.communicator),
        lambda d: opt.DistOpt(communicator=d.communicator, threshold="x"),
        lambda d: opt.DistOpt(communicator=d.communicator, spars=-1),
        lambda d: opt.DistOpt(communicator=d.communicator, timeout_s=-1),
        lambda d: opt.DistOpt(communicator=d.communicator, timeout_s=float("inf")),
        lambda d: opt.DistOpt(opt.DistOpt(communicator=d.communicator), communicator=d.communicator),
        lambda d: opt.DistOpt(communicator=d.communicator, dist_option=["fp32"]),
        lambda d: opt.DistOpt(communicator=d.communicator, dist_option="fp16", clip_value="a"),
        lambda d: opt.DistOpt(communicator=d.communicator, dist_option="sparseTopK", corr="no"),
        lambda d: d(None),
        lambda d: d.update(Tensor((2,)), np.ones(2, np.float32)),
        lambda d: setattr(d, "spars", -1),
        lambda d: d.opt.run_update("sgb", []),
    ],
)
def test_arrays_and_arguments_that_do_not_fit_raise(make):
    with pytest.raises(SingaLiteError):
        make(opt.DistOpt(communicator=LocalCommunicator(World())))


def test_a_learning_rate_can_be_set():
    dist = opt.DistOpt(opt.SGD(lr=0.1), communicator=LocalCommunicator(World()))
    dist.lr = 0.5
    assert dist.opt.lr(0) == 0.5
    with pytest.raises(OptionError, match="SGD: lr = inf"):
        dist.lr = float("inf")


def disagreeing_group(communicator):
    communicator.new_group([0, 1] if communicator.rank == 0 else [0, 2])


def test_ranks_that_name_other_members_of_a_group_all_get_an_error():
    for error in run_ranks(disagreeing_group, 3, return_exceptions=True):
        assert isinstance(error, CommError) and "disagree about the members" in str(error)


def one_step_more(communicator):
    trained(communicator, steps=3 if communicator.rank == 1 else 2)


def test_a_rank_that_makes_one_step_more_gets_an_error():
    results = run_ranks(one_step_more, 3, return_exceptions=True)
    assert isinstance(results[1], CommError)


def broadcast_a_dict(communicator):
    params = make_params(communicator.rank)
    opt.DistOpt(communicator=communicator).broadcast(params)
    return {name: to_numpy(param).tobytes() for name, param in params.items()}


def test_parameters_by_name_are_broadcast():
    expected = {name: to_numpy(param).tobytes() for name, param in make_params(0).items()}
    assert run_ranks(broadcast_a_dict, 3) == [expected] * 3


# ---- SINGA's methods -----------------------------------------------------------------------------------


def seed_synchronize(communicator):
    """The documentation's loop: average whatever each rank started with."""
    autograd.training = True
    dist = opt.DistOpt(opt.SGD(), communicator=communicator)
    params = make_params(communicator.rank)
    for param, _ in autograd.backward(loss_of(params, *batch_of(0, communicator.rank, communicator.size))):
        dist.all_reduce(param.data)
        param /= dist.world_size
    return {name: to_numpy(param) for name, param in params.items()}


def test_the_documentations_loop_averages_every_parameter():
    starts = [{name: to_numpy(param) for name, param in make_params(rank).items()} for rank in range(3)]
    for params in run_ranks(seed_synchronize, 3):
        for name, values in params.items():
            np.testing.assert_allclose(
                values, np.mean([s[name] for s in starts], axis=0), rtol=1e-5, atol=1e-7
            )


def sums(communicator):
    """Results of every public collective on arrays that differ by rank."""
    dist = opt.DistOpt(communicator=communicator)
    rank = communicator.rank

    def arrays():
        return [np.array([1.0, -2.0, 0.1], np.float32) * (rank + 1), np.full((2, 2), rank, np.float32)]

    results = {}
    for name in ("all_reduce", "all_reduce_half"):
        results[name], _ = values = arrays()
        getattr(dist, name)(values[0])
    for name in ("fused_all_reduce", "fused_all_reduce_half"):
        values = arrays()
        getattr(dist, name)(values[:1], send=False)
        assert values[0].tobytes() == arrays()[0].tobytes()
        getattr(dist, name)(values)  # SINGA's backward_and_update gives the whole list when it sends
        results[name] = np.concatenate([value.ravel() for value in values])
    for name, top_k, spars in (("top_k", True, 0.5), ("threshold", False, 1.5)):
        value, residual = arrays()[0], np.full(3, 0.5, np.float32)
        dist.sparsification(value, residual, spars, top_k)
        results[name], results[name + " residual"] = value, residual
    values, residual = arrays(), np.zeros(7, np.float32)
    dist.fused_sparsification(values, residual, 1.0, True)
    results["fused_sparsification"] = np.concatenate([value.ravel() for value in values])
    dist.wait()
    return results


def test_public_collectives_leave_the_sum_in_place():
    for rank, result in enumerate(run_ranks(sums, 3)):
        vector, both = np.array([6, -12, 0.6]), np.array([6, -12, 0.6, 3, 3, 3, 3])
        np.testing.assert_allclose(result["all_reduce"], vector, rtol=1e-6)
        np.testing.assert_allclose(result["all_reduce_half"], vector, rtol=1e-3)
        np.testing.assert_allclose(result["fused_all_reduce"], both, rtol=1e-6)
        np.testing.assert_allclose(result["fused_all_reduce_half"], both, rtol=1e-3)
        np.testing.assert_allclose(result["fused_sparsification"], both, rtol=1e-6)
        # with 0.5 added: rank 0 has 1.5 -1.5 0.6, rank 1 2.5 -3.5 0.7, rank 2 3.5 -5.5 0.8; two of three are sent
        np.testing.assert_allclose(result["top_k"], [7.5, -10.5, 0], rtol=1e-6)
        np.testing.assert_allclose(result["top_k residual"], [0, 0, 0.5 + 0.1 * (rank + 1)], rtol=1e-6)
        np.testing.assert_allclose(result["threshold"], [7.5, -10.5, 0], rtol=1e-6)
        np.testing.assert_allclose(result["threshold residual"], [0, 0, 0.5 + 0.1 * (rank + 1)], rtol=1e-6)


def update_with_a_sum(communicator):
    dist = opt.DistOpt(opt.SGD(lr=1.0), communicator=communicator)
    param, grad = Tensor((2,), name="p"), Tensor(data=np.full(2, communicator.rank + 1.0))
    dist.all_reduce(grad.data)
    dist.update(param, grad)
    return to_numpy(param)


def test_update_takes_a_sum_and_divides_once():
    for values in run_ranks(update_with_a_sum, 3):
        np.testing.assert_allclose(values, [-2, -2])


def test_methods_and_dist_options_give_the_same_bits():
    methods = {
        "backward_and_update": {"dist_option": "plain"},
        "backward_and_update_half": {"dist_option": "half"},
        "backward_and_partial_update": {"dist_option": "partialUpdate"},
        "backward_and_sparse_update": {"dist_option": "sparseThreshold", "spars": 0.05},
    }
    for method, options in methods.items():
        by_word = local(steps=1, **options)[0]
        autograd.training = True
        dist = opt.DistOpt(opt.SGD(lr=0.1, momentum=0.9), communicator=LocalCommunicator(World()))
        params = make_params()
        getattr(dist, method)(loss_of(params, *batch_of(0, 0, 1)))
        assert all(to_numpy(param).tobytes() == by_word[name].tobytes() for name, param in params.items()), (
            method
        )


def test_unknown_options_and_wrong_values_raise_before_anything_changes():
    dist = opt.DistOpt(communicator=LocalCommunicator(World()), threshold=10)
    params = make_params()
    autograd.training = True
    for options, text in [
        ({"dist_option": "fp8"}, "dist_option = 'fp8' is not known; choose one of"),
        ({"dist_option": "sparseTopK", "spars": 0}, "must be in"),
        ({"dist_option": "sparseThreshold", "spars": -1}, "must be a number in 0"),
    ]:
        loss = loss_of(params, *batch_of(0, 0, 1))
        with pytest.raises(OptionError, match=text):
            dist(loss, **options)
    assert dist.step_counter == 0
    dist(loss, dist_option="sparseTopK")
    with pytest.raises(OptionError, match="may belong to groups of that size"):
        dist(loss_of(params, *batch_of(0, 0, 1)), dist_option="sparseTopK", threshold=11)
    with pytest.raises(OptionError, match="bucket_bytes"):
        opt.DistOpt(communicator=LocalCommunicator(World()), bucket_bytes=0)
    with pytest.raises(ShapeError, match="one element"):
        dist(loss_of(params, *batch_of(0, 0, 1)) * Tensor(data=np.ones(2)))


def test_lr_step_and_states_pass_through():
    _, dist = local(steps=4)
    assert dist.lr is dist.opt.lr and dist.step_counter == dist.opt.step_counter == 4
    assert set(dist.get_states()) == {"step_counter", "w1:momentum", "b1:momentum", "w2:momentum"}


def resumed(communicator, option, stop):
    """Ten steps, with everything saved after ``stop`` and loaded into a new DistOpt."""
    autograd.training = True
    params = make_params()

    def make():
        dist = opt.DistOpt(opt.Adam(lr=0.05), communicator=communicator, threshold=10, spars=0.1)
        dist.prepare(params, {})
        return dist

    dist = make()
    for step in range(10):
        if step == stop:
            # between averages partialUpdate's parameters differ by rank: prepare would make them equal
            values, states = {name: to_numpy(p) for name, p in params.items()}, dist.get_states()
            dist = make()
            for name, param in params.items():
                param.copy_from_numpy(values[name])
            dist.set_states(states)
        dist(loss_of(params, *batch_of(step, communicator.rank, communicator.size)), option)
    return {name: to_numpy(param).tobytes() for name, param in params.items()}


@pytest.mark.parametrize("option", OPTIONS)
def test_training_goes_on_bit_for_bit_from_saved_states(option):
    assert run_ranks(resumed, 2, option, 5) == run_ranks(resumed, 2, option, None)


def test_states_of_unknown_schemes_raise():
    _, dist = local(steps=1)
    with pytest.raises(CheckpointError, match="unknown schemes"):
        dist.set_states({"sync/gone/x": np.zeros(1)})
    with pytest.raises(CheckpointError, match="expected a single whole number >= 0 for each of the counters"):
        dist.set_states({"sync/localSGD/counter/steps": np.zeros(2)})


@pytest.mark.parametrize(
    "state", ["localSGD/counter/steps", "dgc/counter/first step", "partialUpdate/counter/next chunk of 1"]
)
@pytest.mark.parametrize("value", [1.5, -1, np.nan, True])
def test_counts_that_are_no_counts_raise(state: str, value: float) -> None:
    _, dist = local(steps=1)
    name = state.partition("/")[0]
    with pytest.raises(CheckpointError, match=f"{name}: expected a single whole number >= 0"):
        dist.set_states({f"sync/{state}": np.array(value)})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("accumulate/calls", np.array(1.5)),
        ("accumulate/calls", np.array([1])),
        ("accumulate/calls", np.array("1")),
        ("finite/scale", np.array([0.0, 1024.0, -1.0])),
        ("finite/scale", np.array(["0", "1024", "1"])),
        ("finite/other", np.array([0.0, 1024.0, 1.0])),
        ("sync/localSGD/counter/updates of w", np.array(-1)),
        ("sync/localSGD/counter/updates of w", np.array(np.nan)),
        ("sync/localSGD/counter/updates of w", np.array("1")),
        ("sync/sparseTopK/w:residual", np.array(["0"] * 6).reshape(2, 3)),
        ("sync/sparseTopK/w:residual", np.zeros((2, 3), np.complex64)),
    ],
)
def test_states_that_no_dist_opt_has_saved_are_refused(key, value):
    autograd.training = True
    w = Tensor(data=np.ones((2, 3), np.float32), requires_grad=True, stores_grad=True)
    dist = opt.DistOpt(communicator=LocalCommunicator(World()), accumulate=2, check_finite="skip")
    dist.prepare({"w": w}, {})
    for _ in range(3):
        dist(autograd.reduce_sum(w, None, 0), "sparseTopK", spars=0.5)
    before = dist.get_states()
    with pytest.raises(CheckpointError):
        dist.set_states({**before, key: value})
    assert str(dist.get_states()) == str(before)


class TwoStates:
    """A stand-in for a model: one parameter, one statistic."""

    def __init__(self, rank):
        self.states = {"w": Tensor(data=np.full(2, rank)), "running_mean": Tensor(data=np.full(3, 10 * rank))}
        self.states = {name: value.as_type("float32") for name, value in self.states.items()}

    def get_states(self):
        return self.states


def synchronized(communicator):
    model = TwoStates(communicator.rank)
    opt.DistOpt(communicator=communicator).synchronize(model)
    return {name: to_numpy(value) for name, value in model.states.items()}


def test_synchronize_averages_parameters_and_statistics():
    for states in run_ranks(synchronized, 3):
        np.testing.assert_array_equal(states["w"], [1, 1])
        np.testing.assert_array_equal(states["running_mean"], [10, 10, 10])


def test_a_dist_opt_prints_its_optimizer_and_how_gradients_travel():
    optimizer = opt.DistOpt(opt.AdaGrad(lr=0.5), dist_option="fp16", clip_value=1.0)
    assert str(optimizer) == (
        "DistOpt(AdaGrad(lr=0.5, epsilon=1e-08, weight_decay=0.0), dist_option='fp16', clip_value=1.0, world_size=1)"
    )
    assert optimizer.lr_value == 0.5


def test_states_of_another_outer_scheme_change_nothing():
    def stepped(dist_option, steps):
        dist = opt.DistOpt(
            opt.SGD(lr=0.1, momentum=0.9), communicator=LocalCommunicator(World()), dist_option=dist_option
        )
        params = make_params()
        dist.prepare(params, {})
        for step in range(steps):
            dist(loss_of(params, *batch_of(step, 0, 1)))
        return dist

    autograd.training = True
    dist = stepped("hierarchical:sparseTopK:0.5", 1)
    before = dist.get_states()
    with pytest.raises(CheckpointError, match="they are of powerSGD, but the outer scheme is sparseTopK"):
        dist.set_states(stepped("hierarchical:powerSGD", 2).get_states())
    after = dist.get_states()
    assert dist.step_counter == 1 and list(after) == list(before)
    assert all(after[name].tobytes() == value.tobytes() for name, value in before.items())


def test_a_call_may_choose_another_outer_scheme_without_the_first_ones_options():
    autograd.training = True
    dist = opt.DistOpt(
        opt.SGD(lr=0.1), communicator=LocalCommunicator(World()), dist_option="hierarchical:sparseTopK:0.5"
    )
    params = make_params()
    dist(loss_of(params, *batch_of(0, 0, 1)), "hierarchical:bf16")
    plain, expected = opt.SGD(lr=0.1), make_params()
    plain(loss_of(expected, *batch_of(0, 0, 1)))
    for name, param in params.items():
        np.testing.assert_allclose(to_numpy(param), to_numpy(expected[name]), rtol=1e-2)


def test_a_dist_opt_that_is_dropped_is_freed_at_once():
    gc.collect()
    gc.disable()
    try:
        dist = opt.DistOpt(opt.SGD(lr=0.1, momentum=0.9), communicator=LocalCommunicator(World()))
        is_there = weakref.ref(dist.opt)
        del dist
        assert is_there() is None
    finally:
        gc.enable()


def test_the_threshold_may_be_set_before_a_scheme_has_run():
    dist = opt.DistOpt(opt.SGD(lr=0.1), communicator=LocalCommunicator(World()))
    dist.threshold = 7
    assert dist._scheme(find_schemes()["sparseTopK"], None).threshold == 7


def test_names_of_parameters_are_unique_whatever_their_own_are() -> None:
    for own in (["W", "W", "W#1"], ["W", "W#1", "W"], ["W#1", "W", "W"], [None, "unnamed#1", None]):
        params = [Tensor(data=np.ones(1), name=name) for name in own]
        names = unique_names(params)
        assert list(names) == params and len(set(names.values())) == 3
        assert list(unique_names(params[:2]).values()) == list(names.values())[:2]
    with pytest.raises(OptionError, match="must be text"):
        unique_names([Tensor((1,), name="W"), Tensor((1,), name="W\ud800")])


@pytest.mark.parametrize("share", [None, "0.1", 0, 1.5, float("nan")])
def test_a_share_of_elements_that_is_none_is_an_error_with_its_range(share):
    with pytest.raises(OptionError, match=rf"^sparseTopK: spars = {share!r} must be in \(0, 1\]"):
        opt.DistOpt(opt.SGD(0.1)).sparsification(Tensor((4,)), None, share, True)
