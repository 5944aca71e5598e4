# SPDX-License-Identifier: Apache-2.0
"""Every optimizer against its formula in float64, its state, and schedules."""

import copy
import inspect
import json
import threading
import warnings

import numpy as np
import pytest

from singa_lite import autograd, layer, model, opt
from singa_lite.comm.base import World
from singa_lite.comm.local import LocalCommunicator
from singa_lite.errors import CheckpointError, DTypeError, GraphError, OptionError, ShapeError
from singa_lite.tensor import Tensor, to_numpy

pytestmark = pytest.mark.usefixtures("device")  # all of it on each kind of device

STEPS = 6


def sgd_reference(p, gradients, lr, momentum=0.0, dampening=0.0, weight_decay=0.0, nesterov=False):
    v = np.zeros_like(p)
    for step, gradient in enumerate(gradients):
        g = gradient + weight_decay * p
        v = momentum * v + (1 - dampening) * g
        p = p - lr(step) * (g + momentum * v if nesterov else v)
    return p


def adam_reference(p, gradients, lr, beta_1=0.9, beta_2=0.999, epsilon=1e-8, weight_decay=0.0):
    m, v = np.zeros_like(p), np.zeros_like(p)
    for step, gradient in enumerate(gradients):
        g = gradient + weight_decay * p
        m = beta_1 * m + (1 - beta_1) * g
        v = beta_2 * v + (1 - beta_2) * g * g
        unbiased_m, unbiased_v = m / (1 - beta_1 ** (step + 1)), v / (1 - beta_2 ** (step + 1))
        p = p - lr(step) * unbiased_m / (np.sqrt(unbiased_v) + epsilon)
    return p


def adamw_reference(p, gradients, lr, beta_1=0.9, beta_2=0.999, epsilon=1e-8, weight_decay=0.01):
    m, v = np.zeros_like(p), np.zeros_like(p)
    for step, g in enumerate(gradients):
        p = p - lr(step) * weight_decay * p
        m = beta_1 * m + (1 - beta_1) * g
        v = beta_2 * v + (1 - beta_2) * g * g
        unbiased_m, unbiased_v = m / (1 - beta_1 ** (step + 1)), v / (1 - beta_2 ** (step + 1))
        p = p - lr(step) * unbiased_m / (np.sqrt(unbiased_v) + epsilon)
    return p


def rmsprop_reference(p, gradients, lr, rho=0.9, epsilon=1e-8, weight_decay=0.0):
    s = np.zeros_like(p)
    for step, gradient in enumerate(gradients):
        g = gradient + weight_decay * p
        s = rho * s + (1 - rho) * g * g
        p = p - lr(step) * g / np.sqrt(s + epsilon)
    return p


def adagrad_reference(p, gradients, lr, epsilon=1e-8, weight_decay=0.0):
    s = np.zeros_like(p)
    for step, gradient in enumerate(gradients):
        g = gradient + weight_decay * p
        s = s + g * g
        p = p - lr(step) * g / np.sqrt(s + epsilon)
    return p


DECAY = opt.ExponentialDecay(0.1, 2, 0.5)
# (optimizer class, its arguments, the reference's arguments, reference)
SAMPLES = [
    (opt.SGD, {}, {}, sgd_reference),
    (opt.SGD, {"momentum": 0.9}, {"momentum": 0.9}, sgd_reference),
    (opt.SGD, {"weight_decay": 0.1}, {"weight_decay": 0.1}, sgd_reference),
    (
        opt.SGD,
        {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01},
        {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01},
        sgd_reference,
    ),
    (opt.SGD, {"momentum": 0.9, "nesterov": True}, {"momentum": 0.9, "nesterov": True}, sgd_reference),
    (opt.Adam, {}, {}, adam_reference),
    (
        opt.Adam,
        {"beta_1": 0.5, "beta_2": 0.9, "epsilon": 1e-3, "weight_decay": 0.1},
        {"beta_1": 0.5, "beta_2": 0.9, "epsilon": 1e-3, "weight_decay": 0.1},
        adam_reference,
    ),
    (opt.AdamW, {}, {}, adamw_reference),
    (opt.AdamW, {"weight_decay": 0.3}, {"weight_decay": 0.3}, adamw_reference),
    (opt.RMSProp, {}, {}, rmsprop_reference),
    (opt.RMSProp, {"rho": 0.5, "weight_decay": 0.1}, {"rho": 0.5, "weight_decay": 0.1}, rmsprop_reference),
    (opt.AdaGrad, {}, {}, adagrad_reference),
    (
        opt.AdaGrad,
        {"epsilon": 0.1, "weight_decay": 0.1},
        {"epsilon": 0.1, "weight_decay": 0.1},
        adagrad_reference,
    ),
]
IDS = [f"{cls.__name__}-{'-'.join(arguments)}" for cls, arguments, _, _ in SAMPLES]


def gradients_for(shape):
    return np.random.default_rng(3).standard_normal((STEPS, *shape))


def train(optimizer, param, gradients):
    for gradient in gradients:
        optimizer.apply(param.name, param, Tensor(data=gradient, dtype=param.dtype))
        optimizer.step()


def test_every_optimizer_is_tested_here():
    public = {
        value for value in vars(opt).values() if inspect.isclass(value) and issubclass(value, opt.Optimizer)
    }
    assert public - {opt.Optimizer, opt.DistOpt} == {cls for cls, *_ in SAMPLES}


@pytest.mark.parametrize(("cls", "arguments", "expected_arguments", "reference"), SAMPLES, ids=IDS)
@pytest.mark.parametrize("lr", [0.1, DECAY], ids=["constant", "decay"])
@pytest.mark.parametrize(("dtype", "rtol"), [("float64", 1e-12), ("float32", 2e-5)])
def test_trajectory_follows_the_formula(cls, arguments, expected_arguments, reference, lr, dtype, rtol):
    start = np.random.default_rng(1).standard_normal((3, 4)).astype(dtype)
    param = Tensor(data=start, dtype=dtype, stores_grad=True, name="w")
    gradients = gradients_for((3, 4)).astype(dtype)
    train(cls(lr=lr, **arguments), param, gradients)
    schedule = lr if callable(lr) else lambda step: lr
    expected = reference(
        start.astype(np.float64), gradients.astype(np.float64), schedule, **expected_arguments
    )
    np.testing.assert_allclose(to_numpy(param), expected, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    ("cls", "arguments", "reference"),
    [
        (opt.Adam, {"beta_1": 0.0, "beta_2": 0.0}, adam_reference),
        (opt.AdamW, {"beta_1": 0.0, "beta_2": 0.0}, adamw_reference),
        (opt.RMSProp, {"rho": 0.0}, rmsprop_reference),
    ],
)
def test_an_average_of_one_step_forgets_a_gradient_a_million_times_as_large(cls, arguments, reference, dtype):
    gradients = gradients_for((5,)) * 100.0 ** -np.arange(STEPS).reshape(-1, 1) * 1e4
    param = Tensor(data=np.zeros(5), dtype=dtype, stores_grad=True, name="w")
    train(cls(lr=0.1, **arguments), param, gradients)
    expected = reference(np.zeros(5), gradients, lambda step: 0.1, **arguments)
    np.testing.assert_allclose(to_numpy(param), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("cls", [opt.Adam, opt.AdamW, opt.RMSProp])
def test_a_gradient_whose_square_is_too_large_does_not_make_parameters_nan(cls):
    param = Tensor(data=[0.5], stores_grad=True, name="w")
    train(cls(lr=0.1), param, [np.array([1e22]), np.array([1.0]), np.array([1.0])])
    assert np.isfinite(to_numpy(param)).all()


def test_a_recorded_result_is_no_parameter():
    training = autograd.training
    autograd.training = True
    try:
        result = Tensor(data=[1.0], stores_grad=True) * 2.0
        with pytest.raises(GraphError, match="changing a recorded tensor in place"):
            opt.SGD(lr=1.0).update(result, Tensor(data=[1.0]))
    finally:
        autograd.training = training
    assert to_numpy(result) == [2.0]


def test_a_schedule_of_numpys_numbers_counts_beyond_their_range():
    schedule = opt.ExponentialDecay(0.1, np.uint8(10), np.float16(0.5), True)
    assert schedule(300) == 0.1 * 0.5**30 and opt.ExponentialDecay(0.1, 10, np.float16(0.9))(0) == 0.1


@pytest.mark.parametrize(("cls", "arguments", "expected_arguments", "reference"), SAMPLES, ids=IDS)
def test_an_optimizer_goes_on_bit_for_bit_from_its_saved_state(cls, arguments, expected_arguments, reference):
    gradients = gradients_for((5,))
    straight, resumed = (Tensor(data=np.ones(5, np.float32), stores_grad=True, name="w") for _ in range(2))
    train(cls(lr=DECAY, **arguments), straight, gradients)
    first = cls(lr=DECAY, **arguments)
    train(first, resumed, gradients[:3])
    second = cls(lr=DECAY, **arguments)
    second.prepare({"w": resumed}, {})
    second.set_states(first.get_states())
    train(second, resumed, gradients[3:])
    assert to_numpy(straight).tobytes() == to_numpy(resumed).tobytes()


@pytest.mark.parametrize(("cls", "arguments", "expected_arguments", "reference"), SAMPLES, ids=IDS)
def test_a_copy_goes_on_with_the_state_of_the_same_parameters(cls, arguments, expected_arguments, reference):
    gradients = gradients_for((5,))
    straight, copied = (Tensor(data=np.ones(5, np.float32), stores_grad=True, name="w") for _ in range(2))
    train(cls(lr=DECAY, **arguments), straight, gradients)
    first = cls(lr=DECAY, **arguments)
    train(first, copied, gradients[:3])
    second = copy.deepcopy(first)
    before = first.get_states()
    train(second, copied, gradients[3:])
    assert to_numpy(straight).tobytes() == to_numpy(copied).tobytes()
    assert second.get_states().keys() == before.keys()
    for name, value in before.items():  # of the original, which is another state
        np.testing.assert_array_equal(first.get_states()[name], value)


def test_a_copy_has_the_slots_and_what_a_class_says_of_its_state():
    class Odd(opt.SGD):
        __slots__ = ("extra",)

        def __init__(self):
            super().__init__(0.1, momentum=0.9)
            self.extra, self.lock = [3], threading.Lock()

        def __getstate__(self):
            return {name: value for name, value in vars(self).items() if name != "lock"}, {
                "extra": self.extra
            }

    first, param = Odd(), Tensor((2,), stores_grad=True)
    first.update(param, Tensor(data=np.ones(2)))
    second = copy.deepcopy(first)
    assert second.extra == [3] and second.extra is not first.extra and not hasattr(second, "lock")
    assert list(second._slots) == [param]


def test_two_parameters_of_one_name_keep_their_own_momentum():
    optimizer = opt.SGD(lr=1.0, momentum=0.5)
    first, second = (Tensor((2,), stores_grad=True, name="W") for _ in range(2))
    for _ in range(2):
        optimizer.update(first, Tensor(data=np.ones(2)))
        optimizer.update(second, Tensor(data=np.zeros(2)))
    np.testing.assert_array_equal(to_numpy(first), [-2.5, -2.5])
    np.testing.assert_array_equal(to_numpy(second), [0, 0])
    assert set(optimizer.get_states()) == {"step_counter", "W:momentum", "W#1:momentum"}


@pytest.mark.parametrize(("cls", "arguments", "expected_arguments", "reference"), SAMPLES, ids=IDS)
def test_one_call_a_dtype_updates_all_as_one_call_each(
    cls, arguments, expected_arguments, reference, monkeypatch
):
    shapes = [(3, 4), (5,), (1,), (2, 2)]
    dtypes = [np.float32, np.float64, np.float32, np.float64]
    sets = [
        [Tensor(data=np.full(shape, 0.5), dtype=dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
        for _ in range(2)
    ]
    together, single = cls(lr=DECAY, **arguments), cls(lr=DECAY, **arguments)
    calls = []
    kind = type(sets[0][0].device.backend)
    run = kind.run

    def counted(*arrays, **options):
        calls.append(arrays[1])
        run(*arrays, **options)

    for step in range(STEPS):
        rng = np.random.default_rng(step)
        grads = [Tensor(data=rng.standard_normal(p.shape), dtype=p.dtype) for p in sets[0]]
        with monkeypatch.context() as patch:
            patch.setattr(kind, "run", counted)
            together.update_all(iter(zip(sets[0], grads, strict=True)))
        together.step()
        for param, grad in zip(sets[1], grads, strict=True):
            single.update_all([(param, grad)])
        single.step()
    assert len(calls) == 2 * STEPS
    for a, b in zip(*sets, strict=True):
        np.testing.assert_array_equal(to_numpy(a), to_numpy(b))


def test_a_parameter_given_twice_is_updated_twice():
    param, grad = Tensor(data=np.ones(3)), Tensor(data=np.full(3, 2.0))
    opt.SGD(lr=0.1).update_all([(param, grad), (param, grad)])
    np.testing.assert_allclose(to_numpy(param), 0.6, rtol=1e-6)


def test_a_pair_that_does_not_fit_leaves_the_pairs_before_it_alone():
    param, grad = Tensor(data=np.ones(3)), Tensor(data=np.ones(3))
    with pytest.raises(ShapeError):
        opt.SGD(lr=0.1).update_all([(param, grad), (Tensor((2,)), grad)])
    np.testing.assert_array_equal(to_numpy(param), 1)


def test_call_runs_backward_updates_and_counts():
    optimizer = opt.SGD(lr=0.5)
    w = Tensor(data=np.array([2.0, 3.0]), stores_grad=True, name="w")
    autograd.training = True
    try:
        optimizer(autograd.reduce_sum(w * w, keepdims=0))
    finally:
        autograd.training = False
    np.testing.assert_allclose(to_numpy(w), [0, 0])
    assert optimizer.step_counter == 1


def test_schedules():
    assert opt.Constant(0.3)(17) == 0.3
    assert opt.ExponentialDecay(1.0, 10, 0.5)(5) == pytest.approx(0.5**0.5)
    assert opt.ExponentialDecay(1.0, 10, 0.5, staircase=True)(19) == 0.5
    assert opt.ExponentialDecay(1.0, 0.1, 0.5, staircase=True)(1) == 0.5**10  # 1 // 0.1 is 9
    assert opt.ExponentialDecay(1.0, 5e-324, 0.5, staircase=True)(1) == 0


class Given(opt.DecayScheduler):
    """What ``value`` gives at each step."""

    def __init__(self, value):
        super().__init__(0.0)
        self.value = value

    def call(self, step):
        return self.value(step)


@pytest.mark.parametrize("value", [np.array([0.25]), np.array([0.25, 0.5]), "0.25", np.float32(-0.25)])
def test_a_schedule_that_gives_no_number_in_the_range_is_refused(value):
    kind = "" if value.__class__ is np.float32 else "a number "
    with pytest.raises(OptionError, match=rf"lr = .* at step 0 must be {kind}>= 0 and < inf"):
        stepped(opt.SGD(lr=Given(lambda step: value)), 1.0)
    assert stepped(opt.SGD(lr=Given(lambda step: np.array(0.25))), 1.0) == 0.75


def stepped(optimizer, start):
    """The value of a parameter that was ``start``, after a step with gradient 1."""
    param = Tensor(data=np.array([start], np.float32))
    optimizer.update(param, Tensor(data=np.ones(1, np.float32)))
    optimizer.step()
    return float(to_numpy(param)[0])


def test_dampening_does_nothing_without_momentum_however_that_is_said():
    changed = opt.SGD(lr=1.0, momentum=0.9, dampening=0.5)
    changed.momentum = 0.0
    for optimizer in (
        opt.SGD(lr=1.0, dampening=0.5),
        opt.SGD(lr=1.0, momentum=opt.Constant(0.0), dampening=0.5),
        changed,
    ):
        assert stepped(optimizer, 0.0) == -1.0
        assert optimizer.momentum_rule(0).momentum == 0
    assert stepped(opt.SGD(lr=1.0, momentum=0.9, dampening=0.5), 0.0) == -0.5


def test_a_schedule_that_gives_nesterov_a_dampening_is_refused_at_its_step():
    optimizer = opt.SGD(momentum=0.9, nesterov=True, dampening=Given(lambda step: 0.5 * (step > 1)))
    stepped(optimizer, 0.0)
    stepped(optimizer, 0.0)
    with pytest.raises(OptionError, match=r"dampening = 0.5 at step 2, but nesterov needs 0"):
        stepped(optimizer, 0.0)


class Averaged(opt.SGD):
    slot_names = (*opt.SGD.slot_names, "average")

    def update_all(self, pairs):
        pairs = list(pairs)
        super().update_all(pairs)
        for param, _ in pairs:
            average = self.slots(param)["average"]
            average *= 0.5
            average += param * 0.5


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_subclass_of_sgd_keeps_an_array_of_its_own(momentum):
    optimizer, param = Averaged(lr=0.1, momentum=momentum), Tensor(data=np.array([1.0]), dtype="float64")
    p, v, average = 1.0, 0.0, 0.0
    for _ in range(3):
        optimizer.update(param, Tensor(data=np.array([2.0]), dtype="float64"))
        v = momentum * v + 2.0
        p -= 0.1 * v
        average = 0.5 * average + 0.5 * p
    np.testing.assert_allclose(to_numpy(param), [p], rtol=1e-12)
    np.testing.assert_allclose(to_numpy(optimizer.slots(param)["average"]), [average], rtol=1e-12)


class ClassHasMomentumLast(opt.SGD):
    slot_names = ("average", "momentum")


class SetsSlotsLater(opt.SGD):
    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.slot_names = ("average", *self.slot_names)


class ForgetsMomentum(opt.SGD):
    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.slot_names = ["average"]


@pytest.mark.parametrize(
    ("kind", "start"),
    [(kind, 0.9) for kind in (ClassHasMomentumLast, SetsSlotsLater, ForgetsMomentum)]
    + [(kind, 0.0) for kind in (SetsSlotsLater, ForgetsMomentum)],  # the other one sums up from the start
)
def test_sgd_sums_up_in_its_own_array_wherever_a_subclass_names_others(kind, start):
    gradients = [np.full((1, 1), g) for g in (1.0, 2.0, 4.0)]
    found = []
    for cls in (opt.SGD, kind):
        optimizer, param = cls(lr=0.5, momentum=start), Tensor(data=np.ones((1, 1)), name="w")
        for momentum, gradient in zip((0.0, 0.9, 0.0), gradients, strict=True):
            optimizer.momentum = momentum
            train(optimizer, param, [gradient])
        found.append(to_numpy(param).tolist())
        assert to_numpy(optimizer.slots(param)["momentum"]).tolist() == [[4.0]]
        assert "average" not in optimizer.slots(param) or to_numpy(optimizer.slots(param)["average"]) == 0
    assert found[0] == found[1]


class AdamWithMore(opt.Adam):
    slot_names = ("maximum", "v", "m")


def test_an_optimizer_finds_its_arrays_by_name():
    found = []
    for optimizer in (opt.Adam(lr=0.5), AdamWithMore(lr=0.5)):
        param = Tensor(data=np.ones((1, 1)), name="w")
        train(optimizer, param, [np.full((1, 1), g) for g in (1.0, -2.0, 4.0)])
        slots = {name: to_numpy(slot).tolist() for name, slot in optimizer.slots(param).items()}
        assert slots.pop("maximum", [[0.0]]) == [[0.0]]
        found.append((to_numpy(param).tolist(), slots))
    assert found[0] == found[1]


@pytest.mark.parametrize("slots", [None, (), ("a", "b"), ("c",)])
def test_a_kernel_is_given_the_arrays_that_it_has(slots):
    class TwoSlots(opt.Optimizer):
        slot_names = ("a", "b")

        def update_all(self, pairs):
            self.run_update("adagrad_update", pairs, slots=slots, lr=0.1, epsilon=1e-8)

    param = Tensor(data=np.ones((1, 1)), name="w")
    with pytest.raises(
        OptionError, match=r"TwoSlots: adagrad_update changes 1 arrays per parameter.*'a', 'b'"
    ):
        TwoSlots(0.1).update(param, Tensor(data=np.ones((1, 1))))
    assert to_numpy(param) == 1


@pytest.mark.parametrize("make", [lambda: opt.SGD(momentum=0.9), opt.Adam, opt.AdaGrad, opt.RMSProp])
def test_a_parameter_that_changes_its_dtype_needs_another_optimizer(make):
    def pairs():
        return [(param, Tensor(data=np.ones(3), dtype=param.dtype)) for param in (other, param)]

    optimizer = make()
    other, param = (Tensor(data=np.ones(3, np.float32), name=name) for name in ("other", "w"))
    optimizer.update_pairs(pairs())
    before = to_numpy(other).tolist(), to_numpy(param).tolist()
    param.to_type("float64")
    with pytest.raises(DTypeError, match=r"w is float64, but its \w+ of earlier steps is float32"):
        optimizer.update_pairs(pairs())
    assert (to_numpy(other).tolist(), to_numpy(param).tolist()) == before
    make().update_pairs(pairs())


@pytest.mark.parametrize(
    "make",
    [
        lambda: opt.SGD(lr=-1),
        lambda: opt.SGD(lr="0.1"),
        lambda: opt.SGD(lr=float("nan")),
        lambda: opt.SGD(lr=float("inf")),
        lambda: opt.SGD(lr=True),
        lambda: opt.SGD(momentum=-0.1),
        lambda: opt.SGD(nesterov=True),
        lambda: opt.SGD(momentum=0.9, dampening=0.1, nesterov=True),
        lambda: opt.ExponentialDecay(0.1, 0, 0.5),
    ],
)
def test_values_out_of_range_raise(make):
    with pytest.raises(OptionError):
        make()


SCHEDULES = [
    (cls, name)
    for cls in (opt.SGD, opt.AdaGrad, opt.RMSProp, opt.Adam, opt.AdamW)
    for name, value in vars(cls()).items()
    if isinstance(value, opt.DecayScheduler)
]


@pytest.mark.parametrize(
    ("cls", "name"), SCHEDULES, ids=[f"{cls.__name__}.{name}" for cls, name in SCHEDULES]
)
def test_a_number_that_is_set_later_is_what_the_constructor_makes_of_it(cls, name):
    made, changed = cls(**{name: 0.25}), cls()
    setattr(changed, name, 0.25)
    params = [Tensor(data=np.ones(3), name="w") for _ in range(2)]
    for optimizer, param in zip((made, changed), params, strict=True):
        train(optimizer, param, gradients_for((3,)))
    np.testing.assert_array_equal(*map(to_numpy, params))
    assert repr(changed) == repr(made)


@pytest.mark.parametrize(
    ("cls", "name"), SCHEDULES, ids=[f"{cls.__name__}.{name}" for cls, name in SCHEDULES]
)
def test_a_number_out_of_range_that_is_set_later_raises_and_changes_nothing(cls, name):
    optimizer = cls()
    before = repr(optimizer)
    bad = [-0.1, float("inf"), float("nan"), True, "0.1", None, 10**400]
    bad += {"epsilon": [0.0], "rho": [1.0], "beta_1": [1.0], "beta_2": [1.0]}.get(name, [])
    for value in bad:
        with pytest.raises(OptionError, match=f"{cls.__name__}: {name} = "):
            setattr(optimizer, name, value)
    assert repr(optimizer) == before


def test_a_number_in_place_of_a_schedule_of_a_subclass_is_used():
    class Scaled(opt.SGD):
        def __init__(self):
            super().__init__(lr=1.0)
            self.scale = opt.Constant(1.0)

        def apply(self, name, value, grad):
            value -= grad * self.value_of("scale")

    optimizer, param = Scaled(), Tensor(data=np.ones(2), name="w")
    optimizer.scale = -0.5
    optimizer.update(param, Tensor(data=np.ones(2)))
    assert to_numpy(param).tolist() == [1.5, 1.5]


@pytest.mark.parametrize("momentum", [0.9, opt.Constant(0.9)], ids=["number", "schedule"])
def test_momentum_that_is_set_after_some_steps_starts_then(momentum):
    optimizer, param = opt.SGD(lr=0.1), Tensor(data=np.ones(3), dtype="float64", name="w")
    optimizer.prepare({"w": param}, {})
    gradients = gradients_for((3,))
    train(optimizer, param, gradients[:2])
    optimizer.momentum = momentum
    assert set(optimizer.get_states()) == {"step_counter", "w:momentum"}
    train(optimizer, param, gradients[2:])
    expected = sgd_reference(np.ones(3), gradients[:2], lambda step: 0.1)
    expected = sgd_reference(expected, gradients[2:], lambda step: 0.1, momentum=0.9)
    np.testing.assert_allclose(to_numpy(param), expected, rtol=1e-12)


def test_momentum_of_zero_for_a_while_is_that_of_the_formula():
    optimizer, param = opt.SGD(lr=1.0, momentum=0.5), Tensor((1,), dtype="float64", name="w")
    for momentum, expected in [(0.5, -1), (0.0, -2), (0.5, -3.5)]:
        optimizer.momentum = momentum
        train(optimizer, param, np.ones((1, 1)))
        assert to_numpy(param).tolist() == [expected]


@pytest.mark.parametrize(("name", "value"), [("momentum", 0), ("dampening", 0.1)])
def test_what_nesterov_needs_cannot_be_taken_away(name, value):
    optimizer = opt.SGD(momentum=0.9, nesterov=True)
    before = repr(optimizer)
    with pytest.raises(OptionError, match="nesterov needs"):
        setattr(optimizer, name, value)
    assert repr(optimizer) == before
    with pytest.raises(OptionError, match="nesterov needs"):
        opt.SGD().nesterov = True


@pytest.mark.parametrize("value", ["no", 2, [1], None, np.array([1, 2])])
def test_nesterov_is_true_or_false_however_it_is_set(value):
    optimizer = opt.SGD(momentum=0.9)
    with pytest.raises(OptionError, match="nesterov"):
        optimizer.nesterov = value
    assert optimizer.nesterov is False
    optimizer.nesterov = np.True_
    assert optimizer.nesterov is True


def test_numpy_scalars_are_numbers():
    assert opt.SGD(lr=np.float32(0.5)).lr(0) == 0.5


def test_call_is_what_a_subclass_writes_as_in_singa(training):
    class Halves(opt.SGD):
        def call(self, loss):
            super().call(loss * 0.5)

    optimizer, w = Halves(0.1), Tensor(data=np.ones(2), stores_grad=True)
    optimizer(autograd.reduce_sum(w, keepdims=0))
    np.testing.assert_allclose(to_numpy(w), 0.95)
    assert optimizer.step_counter == 1


def test_a_parameter_that_changes_its_shape_raises():
    optimizer, w = opt.SGD(0.1, momentum=0.9), Tensor((2, 3), name="w")
    optimizer.update(w, Tensor((2, 3)))
    w.reset_like(Tensor((3, 4)))
    with pytest.raises(ShapeError, match=r"SGD: w has shape \(3, 4\), but its momentum \(2, 3\)"):
        optimizer.update(w, Tensor((3, 4)))


def test_gradients_that_do_not_fit_raise_before_anything_changes():
    optimizer, w = opt.SGD(), Tensor((2, 3), name="w")
    with pytest.raises(ShapeError, match="w has shape"):
        optimizer.update(w, Tensor((3, 2)))
    with pytest.raises(DTypeError, match="w is float32"):
        optimizer.update(w, Tensor((2, 3), dtype="float64"))
    np.testing.assert_array_equal(to_numpy(w), np.zeros((2, 3)))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda sgd, w: sgd.update(w, np.ones(2, np.float32)), "the gradient must be a Tensor, not ndarray"),
        (lambda sgd, w: sgd.update(w, None), "the gradient must be a Tensor, not NoneType"),
        (lambda sgd, w: sgd.update(np.ones(2, np.float32), w), "the parameter must be a Tensor, not ndarray"),
        (lambda sgd, w: sgd.update(None, w), "the parameter must be a Tensor, not NoneType"),
        (lambda sgd, w: sgd.update(*(Tensor(data=[1, 2]) for _ in "pg")), "is int32; only float"),
        (lambda sgd, w: sgd.update_all(None), "pairs .*, got NoneType"),
        (lambda sgd, w: sgd.update_all([(w, w), w]), "a pair .*, got Tensor"),
        (lambda sgd, w: sgd(None), "backward: expected a Tensor, got NoneType"),
        (lambda sgd, w: sgd(np.ones(1)), "backward: expected a Tensor, got ndarray"),
    ],
)
def test_what_is_no_tensor_raises_before_anything_changes(call, message):
    sgd, w = opt.SGD(momentum=0.9), Tensor(data=np.ones(2), name="w")
    with pytest.raises(DTypeError, match=message):
        call(sgd, w)
    assert (
        to_numpy(w).tolist() == [1, 1] and sgd.step_counter == 0 and set(sgd.get_states()) == {"step_counter"}
    )


def test_a_bad_pair_among_others_leaves_the_parameters_of_apply_alone():
    class Plain(opt.Optimizer):
        def apply(self, name, value, grad):
            value -= grad

    w = Tensor(data=np.ones(2), name="w")
    for update in (Plain(0.1).update_pairs, Plain(0.1).update_all):
        with pytest.raises(DTypeError, match="the gradient must be a Tensor"):
            update([(w, w), (w, None)])
    assert to_numpy(w).tolist() == [1, 1]


class OfFunction(opt.DecayScheduler):
    def __init__(self, function):
        super().__init__(0.0)
        self.function, self.num_calls = function, 0

    def call(self, step):
        self.num_calls += 1
        return self.function(step)


class Hidden(opt.SGD):
    def __init__(self, scale):
        super().__init__()
        self._scale = scale


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda rate: opt.SGD(OfFunction(lambda step: rate)), "lr"),
        (lambda rate: opt.SGD(OfFunction(lambda step: 0.1 if step < 1000 else rate)), "lr"),
        (lambda rate: Hidden(rate), "_scale"),
        (lambda rate: Hidden(np.float32(rate)), "_scale"),
        (lambda rate: Hidden(opt.Constant(rate)), "_scale"),
    ],
)
def test_optimizers_that_step_differently_have_other_settings(make, name):
    one, same, other = (json.loads(json.dumps(make(rate).settings())) for rate in (0.1, 0.1, 0.2))
    assert one == same
    assert {key for key in one if one[key] != other[key]} == {name}


def test_the_settings_leave_schedules_alone_and_the_state_out():
    def fails(step):
        raise ValueError("later")

    optimizer, schedule = opt.SGD(OfFunction(lambda step: 0.1)), OfFunction(fails)
    optimizer.momentum = schedule
    described = optimizer.settings()
    assert optimizer.lr.num_calls == schedule.num_calls == 0
    assert described["lr"]["values"]["1000"] == "0.1" and described["momentum"]["values"] == {
        "none": "ValueError"
    }
    optimizer.step()
    assert optimizer.settings().keys() == described.keys() and "_step_counter" not in described


def test_states_that_do_not_fit_raise_and_change_nothing():
    optimizer = opt.SGD(momentum=0.9)
    optimizer.prepare({"w": Tensor((2,))}, {})
    good = optimizer.get_states()
    for bad, text in [
        ({**good, "w:momentum": np.zeros(3, np.float32)}, r"w:momentum' is float32\(3,\), not float32\(2,\)"),
        ({**good, "v:momentum": np.ones(2)}, "unknown .*v:momentum"),
        ({"step_counter": np.array(3)}, "lack .*w:momentum"),
        (opt.Adam().get_states(), "lack .*w:momentum"),
    ]:
        with pytest.raises(CheckpointError, match=text):
            optimizer.set_states(bad)
    assert optimizer.step_counter == 0


@pytest.mark.parametrize(
    ("cls", "arguments"),
    [
        (opt.Adam, {"beta_1": 1.0}),
        (opt.Adam, {"beta_2": 1.5}),
        (opt.Adam, {"epsilon": 0.0}),
        (opt.AdamW, {"weight_decay": -1}),
        (opt.RMSProp, {"rho": 1.0}),
        (opt.RMSProp, {"epsilon": 0.0}),
        (opt.AdaGrad, {"epsilon": -1e-8}),
    ],
)
def test_ranges(cls, arguments):
    with pytest.raises(OptionError, match=f"Adam|{cls.__name__}"):
        cls(**arguments)


def test_lr_value_is_the_rate_of_the_next_step():
    optimizer = opt.RMSProp(lr=DECAY)
    assert optimizer.lr_value == 0.1
    for _ in range(2):
        optimizer.step()
    assert optimizer.lr_value == 0.05
    optimizer.lr = opt.Constant(0.3)
    assert optimizer.lr_value == 0.3


def test_an_optimizer_prints_its_numbers():
    assert str(opt.SGD(lr=DECAY, momentum=0.9)) == (
        "SGD(lr=ExponentialDecay(init_value=0.1, decay_steps=2, decay_rate=0.5, staircase=False), momentum=0.9, "
        "dampening=0.0, weight_decay=0.0, nesterov=False)"
    )
    assert str(opt.AdaGrad(lr=0.5)) == "AdaGrad(lr=0.5, epsilon=1e-08, weight_decay=0.0)"


def test_a_momentum_that_a_schedule_brings_to_zero_leaves_plain_descent():
    class Once(opt.DecayScheduler):
        def call(self, step):
            return 0.9 if step == 0 else 0.0

    optimizer, w = opt.SGD(lr=1.0, momentum=Once(0.9)), Tensor((2,), name="w")
    for _ in range(2):
        optimizer.update(w, Tensor(data=np.ones(2)))
        optimizer.step()
    np.testing.assert_array_equal(to_numpy(w), [-2, -2])


class Linear(opt.DecayScheduler):
    """From init_value to 0 at step 2, and below it from there on."""

    def call(self, step):
        return self.init_value * (1 - step / 2)


class Gives(opt.DecayScheduler):
    def __init__(self, value):
        super().__init__(0.1)
        self.value = value

    def call(self, step):
        return self.value if step == 3 else self.init_value


@pytest.mark.parametrize("use_graph", [False, True], ids=["eager", "recorded"])
@pytest.mark.parametrize(
    ("name", "schedule", "text"),
    [
        ("lr", Linear(0.1), "SGD: lr = -0.05 at step 3 must be >= 0"),
        ("lr", Gives(float("nan")), "SGD: lr = nan at step 3 must be"),
        ("lr", Gives(float("inf")), "SGD: lr = inf at step 3 must be"),
        ("lr", Gives(None), "SGD: lr = None at step 3 must be"),
        ("weight_decay", Gives("x"), "SGD: weight_decay = 'x' at step 3 must be"),
        ("lr", Gives(10**400), "SGD: lr = 1000000"),
        ("beta_1", Gives(1.0), "Adam: beta_1 = 1.0 at step 3 must be >= 0 and < 1"),
        ("epsilon", Gives(0.0), "Adam: epsilon = 0.0 at step 3 must be > 0 and finite"),
    ],
)
def test_what_a_schedule_gives_must_be_in_the_range_of_its_number(name, schedule, text, use_graph):
    class Net(model.Model):
        def __init__(self):
            super().__init__()
            self.linear = layer.Linear(1)

        def forward(self, x):
            return self.linear(x)

        def train_one_batch(self, x):
            self.optimizer(autograd.reduce_mean(self.forward(x), None, 0))

    net, x = Net(), Tensor(data=np.ones((2, 3), np.float32))
    kind = opt.Adam if text.startswith("Adam") else opt.SGD
    net.set_optimizer(kind(**{"lr": 0.1, name: schedule}))
    net.compile([x], use_graph=use_graph)
    for _ in range(3):
        net(x)
    before = to_numpy(net.linear.W)
    with pytest.raises(OptionError, match=text):
        net(x)
    np.testing.assert_array_equal(to_numpy(net.linear.W), before)


class Pair(model.Model):
    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x):
        return self.second(self.first(x))

    def train_one_batch(self, x):
        loss = autograd.mse_loss(self.forward(x), x)
        self.optimizer(loss)
        return loss


def test_states_keep_their_names_where_another_model_of_the_same_layers_is_compiled(tmp_path):
    x = Tensor(data=np.random.default_rng(0).random((8, 4)))

    def made():
        net = Pair(layer.Linear(4), layer.Linear(4))
        net.set_optimizer(opt.SGD(lr=0.05, momentum=0.9))
        net.compile([x])
        return net

    net, other = made(), made()
    for _ in range(3):
        net(x)
    Pair(net.second, net.first).compile([x], is_train=False)  # calls its parameters so too
    net.train()
    net.save_states(tmp_path / "states.zip")
    other.load_states(tmp_path / "states.zip")
    for each in (net, other):
        each(x)
    for name, param in net.get_params().items():
        np.testing.assert_array_equal(to_numpy(param), to_numpy(other.get_params()[name]), err_msg=name)


def test_an_optimizer_whose_constructor_was_not_called_says_so() -> None:
    class Mine(opt.Optimizer):
        def __init__(self) -> None:
            self.rate = 0.1

    with pytest.raises(OptionError, match=r"Mine: its __init__ must call super\(\).__init__\(lr\) first"):
        Mine().prepare({"w": Tensor((2,))}, {})
    with pytest.raises(OptionError, match=r"Mine: its __init__ must call super\(\).__init__\(lr\) first"):
        opt.DistOpt(Mine(), communicator=LocalCommunicator(World()))


@pytest.mark.parametrize("name", ["update_all", "apply", "step"])
def test_an_update_that_calling_does_not_run_is_refused_where_the_class_is_defined(name):
    def generator(self, *arguments):
        yield

    async def coroutine(self, *arguments):
        pass

    for method in (generator, coroutine):
        for bases, written in (
            ((opt.SGD,), {name: method}),
            ((type("Mixin", (), {name: method}), opt.SGD), {}),
        ):
            with pytest.raises(OptionError, match=f"^Mine: {name} is a generator or a coroutine"):
                type("Mine", bases, written)
    type("Mine", (opt.SGD,), {name: lambda self, *arguments: None})


class MomentsByName(opt.Optimizer):
    """An optimizer as SINGA's, whose state is in a dict of its own."""

    def __init__(self, lr=0.1, params=()):
        super().__init__(lr)
        self.moments, self.params = {}, list(params)

    def apply(self, name, value, grad):
        if name not in self.moments:
            self.moments[name] = Tensor(value.shape, value.device, value.dtype, requires_grad=False)
        self.moments[name] += grad
        value -= self.moments[name] * self.lr_value


class Saves(MomentsByName):
    def get_states(self):
        return super().get_states() | {name: to_numpy(value) for name, value in self.moments.items()}


class Arrays(MomentsByName):
    """Keeps its moments as numpy arrays."""

    def apply(self, name, value, grad):
        moment = self.moments.setdefault(name, np.zeros(value.shape, np.float32))
        moment += to_numpy(grad)
        value.copy_from_numpy(to_numpy(value) - np.float32(0.1) * moment)


class SavesArrays(Arrays):
    def get_states(self):
        return super().get_states() | {f"moments:{name}": value for name, value in self.moments.items()}

    def set_states(self, states):
        mine = {name for name in states if name.startswith("moments:")}
        super().set_states({name: value for name, value in states.items() if name not in mine})
        self.moments = {name.removeprefix("moments:"): states[name].copy() for name in mine}


class InSlots(MomentsByName):
    slot_names = ("moment",)

    def apply(self, name, value, grad):
        self.moments[name] = self.slots(value)
        self.moments[name]["moment"] += grad
        value -= self.moments[name]["moment"] * self.lr_value


class Clones(MomentsByName):
    """Copies parameters, flags included."""

    def apply(self, name, value, grad):
        self.moments.setdefault(name, value.clone())
        value -= grad * self.lr_value


@pytest.mark.parametrize(
    "kind", [MomentsByName, Clones, Arrays, Saves, SavesArrays, InSlots, opt.SGD, opt.Adam]
)
def test_tensors_that_are_not_saved_are_warned_of_once(kind, tmp_path):
    sgd, net = kind(), Pair(layer.Linear(4), layer.Linear(4))
    x = Tensor(data=np.random.default_rng(0).random((8, 4)))
    net.set_optimizer(sgd)
    net.compile([x])
    sgd.params = list(net.get_params().values())
    net(x)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            net.save_states(tmp_path / "states.zip")
            opt.DistOpt(sgd, communicator=LocalCommunicator(World())).get_states()
    texts = [str(each.message) for each in caught]
    if kind not in (MomentsByName, Clones, Arrays):
        assert texts == []
        return
    (text,) = texts
    assert (
        text.startswith(f"{kind.__name__}: the Tensors and arrays in moments are not in its states")
        and "slot_names" in text
    )
    assert caught[0].filename == __file__


@pytest.mark.parametrize("is_fresh", [True, False])
def test_states_that_a_subclass_adds_are_loaded(is_fresh, tmp_path):
    x, values = Tensor(data=np.random.default_rng(0).random((8, 4))), []
    for is_resumed in (False, True):
        net = Pair(layer.Linear(4), layer.Linear(4))
        x.device.SetRandSeed(1)
        net.set_optimizer(SavesArrays())
        net.compile([x])
        net(x)
        if is_resumed:
            net.save_states(tmp_path / "states.zip")
            if is_fresh:
                net = Pair(layer.Linear(4), layer.Linear(4))
                net.set_optimizer(SavesArrays())
                net.compile([x])
            else:
                net(x)
            net.load_states(tmp_path / "states.zip")
        net(x)
        values.append({name: to_numpy(param) for name, param in net.get_params().items()})
    for name, value in values[0].items():
        np.testing.assert_array_equal(value, values[1][name])
