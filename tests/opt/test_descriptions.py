# SPDX-License-Identifier: Apache-2.0
"""Optimizers as JSON values: ``create`` makes of a description what was described, for every optimizer."""

import functools
import gc
import json

import numpy as np
import pytest

from singa_lite import opt
from singa_lite.comm.base import World
from singa_lite.comm.local import LocalCommunicator
from singa_lite.errors import OptionError
from singa_lite.tensor import Tensor, to_numpy
from tests.opt.test_every_optimizer import DECAY, IDS, SAMPLES, SCHEDULES, OfFunction, gradients_for, train


def made_again(optimizer):
    """What ``create`` makes of the text that describes ``optimizer``."""
    description = json.loads(json.dumps(optimizer.describe()))
    return opt.create(description.pop("class"), **description)


@pytest.mark.parametrize(("cls", "arguments", "expected_arguments", "reference"), SAMPLES, ids=IDS)
@pytest.mark.parametrize("lr", [0.25, DECAY], ids=["constant", "decay"])
def test_an_optimizer_made_of_its_description_steps_alike(cls, arguments, expected_arguments, reference, lr):
    first = cls(lr=lr, **arguments)
    second = made_again(first)
    assert type(second) is cls and second is not first and second.lr is not first.lr
    assert second.settings() == first.settings() and repr(second) == repr(first)
    assert {key: first.describe()[key] for key in arguments} == arguments
    params = [Tensor(data=np.ones(5, np.float32), name="w") for _ in range(2)]
    for optimizer, param in zip((first, second), params, strict=True):
        train(optimizer, param, gradients_for((5,)))
    assert to_numpy(params[0]).tobytes() == to_numpy(params[1]).tobytes()


@pytest.mark.parametrize(
    ("cls", "name"), SCHEDULES, ids=[f"{cls.__name__}.{name}" for cls, name in SCHEDULES]
)
def test_the_description_has_what_an_attribute_was_set_to(cls, name):
    optimizer = cls()
    optimizer.step()
    setattr(optimizer, name, 0.25)
    assert optimizer.describe()[name] == 0.25
    setattr(optimizer, name, opt.ExponentialDecay(0.5, 3, 0.5, staircase=True))
    assert optimizer.describe()[name] == {
        "class": "ExponentialDecay", "init_value": 0.5, "decay_steps": 3, "decay_rate": 0.5, "staircase": True
    }  # fmt: skip
    assert (
        made_again(optimizer).settings()
        == opt.create(cls.__name__, **{name: getattr(optimizer, name)}).settings()
    )


def test_a_description_is_of_names_and_plain_values():
    assert opt.SGD(np.float32(0.5), momentum=0.9, dtype=np.float32).describe() == {
        "class": "SGD", "lr": 0.5, "momentum": 0.9, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False,
        "dtype": "float32",
    }  # fmt: skip
    wrapped = opt.DistOpt(opt.Adam(0.1), communicator=LocalCommunicator(World()))
    assert wrapped.describe() == opt.Adam(0.1).describe()


class OwnRule(opt.SGD):
    """An optimizer of a script, whose constructor passes the rest on."""

    def __init__(self, scale, *, warm_up=(1, 2), rates=None, **options):
        super().__init__(**options)
        self.scale, self.warm_up, self.rates = scale, warm_up, rates


class OwnSchedule(opt.DecayScheduler):
    def __init__(self, init_value, bounds):
        super().__init__(init_value)
        self.bounds = bounds

    def call(self, step):
        return self.init_value / (1 + sum(step >= bound for bound in self.bounds))


class Doubled(opt.Constant):
    def call(self, step):
        return 2 * self.init_value


def test_optimizers_and_schedules_of_a_script_are_made_again():
    optimizer = OwnRule(
        2, lr=OwnSchedule(0.5, [1, 4]), rates={"b": [0.5, None, Doubled(3)], "w": DECAY}, momentum=0.9
    )
    again = made_again(optimizer)
    assert (again.scale, again.warm_up, again.rates["b"][:2]) == (2, [1, 2], [0.5, None])
    assert again.rates["b"][2](0) == 6
    assert again.settings() == optimizer.settings()
    assert [again.rates["w"](step) for step in (0, 2)] == [0.1, 0.05]
    assert [again.lr(step) for step in (0, 1, 4)] == [0.5, 0.25, 0.5 / 3]


class Unkept(opt.SGD):
    def __init__(self, scale=1.0):
        super().__init__()
        self._other = scale


class Changed(opt.SGD):
    def __init__(self):
        super().__init__(0.5)


def changed():
    optimizer = Changed()
    optimizer.lr = 0.25
    return optimizer


class Lists(opt.SGD):
    def __init__(self, lr=0.1, rates=(1.0,)):
        super().__init__(lr)
        self.rates = list(rates)


class Rates(opt.SGD):
    def __init__(self, *rates):
        super().__init__(0.1)
        self.rates = rates


class Objects(opt.SGD):
    """Keeps what is no JSON value, made anew by the constructor."""

    def __init__(self, lr=0.1):
        super().__init__(lr)
        self.mask, self.shift = np.float32([1, np.nan]), Tensor(data=[1.0, 2.0])
        self.parts, self.frozen = {"w": [np.int64([1, 2])], 3: None}, {"w"}
        self.rng, self.rule = np.random.default_rng(), lambda grad: grad
        self.update_velocity = self.by_rule

    def by_rule(self, pairs):
        pass


def objects(name, value):
    optimizer = Objects()
    setattr(optimizer, name, value)
    return optimizer


def test_objects_that_the_constructor_makes_again_may_be_there():
    assert made_again(Objects()).mask.tobytes() == Objects().mask.tobytes()
    objects("mask", np.float32([1, np.nan])).describe()


def changed_list():
    optimizer = Lists()
    optimizer.factors = {"w": [5.0]}
    return optimizer


class DecaysByNumber(opt.Optimizer):
    """Has a number by the name of a method of other optimizers, and values that it makes when they are asked for."""

    def __init__(self, lr=0.1, decay=0.9):
        super().__init__(lr)
        self.decay = decay
        self.names = np.array([decay, None], object)

    @functools.cached_property
    def log(self):
        return np.zeros(2)

    def update_all(self, pairs):
        for param, grad in pairs:
            param -= grad * self.decay


def test_a_number_may_have_the_name_of_a_method_and_values_may_be_made_late():
    made, other = DecaysByNumber(), DecaysByNumber(decay=0.5)
    assert made.settings()["decay"] == 0.9 and other.settings()["decay"] == 0.5
    assert made.log.size == 2
    assert made_again(made).settings() == made.settings()
    made.names[0] = 0.7
    with pytest.raises(OptionError, match="names is"):
        made.describe()


def test_lists_and_dicts_are_settings():
    assert Lists(rates=(1.0, 2)).settings()["rates"] == [1.0, 2]
    assert changed_list().settings()["factors"] == {"w": [5.0]}
    assert Lists(rates=[object()]).settings().get("rates") is None  # no JSON value
    assert opt.create("Lists", **without_class(Lists(rates=[3.0]).describe())).rates == [3.0]


def without_class(description):
    return {name: value for name, value in description.items() if name != "class"}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: changed_list().describe(),
            "Lists: .* factors is .*5.0.*, but would be None; make factors what an argument of the constructor says",
        ),
        (lambda: Rates(5.0).describe(), "Rates: .* rates is .5.0,., but would be ..;"),
        (lambda: objects("mask", np.float32([0, np.nan])).describe(), "Objects: .* mask is array"),
        (lambda: objects("mask", np.float64([1, np.nan])).describe(), "Objects: .* mask is array"),
        (lambda: objects("mask", np.float32([[1, np.nan]])).describe(), "Objects: .* mask is array"),
        (lambda: objects("mask", None).describe(), "Objects: .* mask is None, but would be array"),
        (lambda: objects("shift", Tensor(data=[1.0, 3.0])).describe(), "Objects: .* shift is "),
        (lambda: objects("parts", {"w": [np.int64([1, 3])], 3: None}).describe(), "Objects: .* parts is "),
        (lambda: objects("frozen", set()).describe(), "Objects: .* frozen is set"),
        (lambda: objects("rule", lambda grad: -grad).describe(), "Objects: .* rule is <function"),
        (lambda: objects("other", object()).describe(), "Objects: .* other is <object"),
        *(
            (
                lambda name=name: objects(name, print).describe(),
                f"{name} is .*; write a subclass with the method {name}$",
            )
            for name in ("apply", "update_all", "update_velocity", "number")
        ),
        (lambda: opt.SGD(OfFunction(len)).describe(), "OfFunction.function is a builtin_function"),
        (
            lambda: Unkept(2.0).describe(),
            "Unkept: expected an attribute for the argument scale, .*set self.scale",
        ),
        (lambda: changed().describe(), "Changed: .* lr is 0.25, but would be 0.5"),
        (lambda: OwnRule(np.ones(2)).describe(), "OwnRule.scale is a ndarray, which is not a JSON value"),
        (lambda: OwnRule({"class": "x"}).describe(), "OwnRule.scale is a dict"),
        (
            lambda: opt.create("Lion"),
            "no Optimizer is called 'Lion'; known are AdaGrad, .*SGD.* top of the script",
        ),
        (lambda: opt.create("Optimizer"), "no Optimizer is called"),
        (lambda: opt.create("OptimizerWrapper", lr=0.1), "no Optimizer is called"),
        (lambda: opt.create(opt.SGD), "no Optimizer is called <class"),
        (lambda: opt.create("SGD", rate=0.1), "SGD cannot be made of .rate.: .*rate"),
        (lambda: opt.create("SGD", lr={"class": "Lion"}), "no DecayScheduler is called 'Lion'"),
        (lambda: opt.create("SGD", lr={"init_value": 0.1}), "lr = .* must be a finite number"),
        (lambda: opt.create("SGD", lr=-1), "lr = -1 must be"),
    ],
)
def test_what_cannot_be_made_again_raises(make, message):
    with pytest.raises(OptionError, match=message):
        make()


def test_two_optimizers_of_one_name_cannot_be_told_apart():
    gc.collect()  # classes that other tests have defined

    def define(base):
        class Twin(base):
            pass

        return Twin

    def define_other():
        class Twin(opt.SGD):
            pass

        return Twin

    old, new = define(opt.SGD), define(opt.SGD)  # as a notebook's cell that runs twice
    assert type(opt.create("Twin")) is new and new().describe()["class"] == "Twin"
    with pytest.raises(OptionError, match="Twin: a class of this name was defined again"):
        old().describe()
    other = define_other()
    with pytest.raises(OptionError, match=r"2 classes are called Twin: .*define\..* and .*define_other\."):
        other().describe()
