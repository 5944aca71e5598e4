# SPDX-License-Identifier: Apache-2.0
"""Layers inside layers: where states are found, and what they are called."""

from __future__ import annotations

import copy

import numpy as np
import pytest

from singa_lite import autograd, layer
from singa_lite.errors import CheckpointError, DTypeError, GraphError, ShapeError
from singa_lite.layer import BatchNorm2d, Conv2d, Layer, Linear, ReLU
from singa_lite.layer.base import layers_of
from singa_lite.model import Model
from singa_lite.tensor import Tensor, to_numpy


class Block(Layer):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = Conv2d(channels, 3, padding=1)
        self.bn = BatchNorm2d()

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.conv(x))


class Net(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.stem = Conv2d(2, 1)
        self.blocks = [Block(2), (ReLU(), Block(2))]
        self.heads = {"left": Linear(3), "right": [Linear(1)]}
        self.again = self.stem  # shared
        self.temperature = Tensor((1,), stores_grad=True)
        self.scratch = Tensor((7,))  # no state

    def forward(self, x: Tensor) -> Tensor:
        self.last_output = self.blocks[0](self.stem(x))
        flat = layer.Flatten()(self.blocks[1][1](self.blocks[1][0](self.last_output)))
        return layer.Cat(1)([self.heads["left"](flat), self.heads["right"][0](flat)])


BLOCK = ["conv.W", "conv.b", "bn.scale", "bn.bias"]
PARAMS = [
    *["stem.W", "stem.b"],
    *[f"blocks.0.{name}" for name in BLOCK],
    *[f"blocks.1.1.{name}" for name in BLOCK],
    *["heads.left.W", "heads.left.b", "heads.right.0.W", "heads.right.0.b", "temperature"],
]
BUFFERS = {f"blocks.{block}.bn.{name}" for block in ("0", "1.1") for name in ("running_mean", "running_var")}


@pytest.fixture
def net() -> Net:
    made = Net()
    made(Tensor((2, 1, 4, 4)))
    return made


def test_states_are_found_everywhere_and_named_by_their_path(net: Net) -> None:
    assert list(net.get_params()) == PARAMS
    assert set(net.get_states()) == {*PARAMS, *BUFFERS}


def test_a_recorded_tensor_is_no_state(net: Net) -> None:
    autograd.training = True
    try:
        net(Tensor((2, 1, 4, 4)))
    finally:
        autograd.training = False
    net.last_output.stores_grad = True
    assert list(net.get_params()) == PARAMS


def test_names_and_order_do_not_depend_on_the_process(net: Net) -> None:
    other = Net()
    other(Tensor((5, 1, 4, 4)))
    assert list(other.get_states()) == list(net.get_states())


def test_a_shared_layer_counts_once(net: Net) -> None:
    tensors = list(net.get_states().values())
    assert len({id(tensor) for tensor in tensors}) == len(tensors)
    assert not any(name.startswith("again") for name in net.get_states())


def test_a_shared_tensor_counts_once() -> None:
    first, second = Linear(3), Linear(3)
    holder = Layer()
    holder.first, holder.second = first, second
    x = Tensor((2, 3))
    first(x), second(x)
    second.W = first.W
    assert list(holder.get_params()) == ["first.W", "first.b", "second.b"]


def test_a_layer_that_knows_its_parent_is_no_endless_loop() -> None:
    parent = Layer()
    parent.child = Linear(2)
    parent.child.parent = parent
    parent.child(Tensor((1, 2)))
    assert list(parent.get_params()) == ["child.W", "child.b"]
    assert list(parent.child.get_params()) == ["W", "b"]


def test_registered_layers_are_found() -> None:
    holder = Layer()
    holder.register_layers(Linear(2), ReLU(), Linear(1))
    holder.Linear_2(holder.Linear_0(Tensor((1, 3))))
    assert list(holder.get_params()) == ["Linear_0.W", "Linear_0.b", "Linear_2.W", "Linear_2.b"]


def test_layers_registered_later_take_no_name_away() -> None:
    holder = Layer()
    for _ in range(2):
        holder.register_layers(Linear(2), ReLU())
    holder.Linear_1(holder.Linear_0(Tensor((1, 3))))
    assert list(holder.get_params()) == ["Linear_0.W", "Linear_0.b", "Linear_1.W", "Linear_1.b"]
    assert len(vars(holder)) == 4


def test_a_registered_layer_has_the_path_of_singas_files_also_if_a_list_holds_it() -> None:
    holder = Layer()
    holder.first, holder.parts, holder.last = Linear(3), [Linear(2), ReLU(), Linear(1)], Linear(4)
    holder.register_layers(*holder.parts)
    holder.register_layers(holder.last)
    x = holder.first(Tensor((1, 3)))
    for part in (*holder.parts, holder.last):
        x = part(x)
    names = ["first", "Linear_0", "Linear_2", "Linear_1"]
    assert list(holder.get_params()) == [f"{name}.{param}" for name in names for param in "Wb"]
    assert holder.parts[0].name == "Linear_0"


def test_layers_are_registered_by_the_keys_of_a_dict() -> None:
    holder = Layer()
    holder.register_layers({"first": Linear(2), "second": Linear(1)})
    holder.second(holder.first(Tensor((1, 3))))
    assert list(holder.get_params()) == ["first.W", "first.b", "second.W", "second.b"]


class Enclosing(Layer):
    """Layers that functions alone hold, one of which an attribute holds as well."""

    def __init__(self) -> None:
        super().__init__()
        hidden, shared, later = Linear(3), Linear(4), Linear(5)
        big: dict[str, object] = {}
        big["itself"] = big

        def run(x: Tensor, again: bool = True) -> Tensor:
            return run(shared(hidden(x)), again=False) if again else self.last(x)

        def unassigned() -> object:
            return missing, big

        self.run, self.rest, self.never = run, [lambda x: later(x)], unassigned
        self.last, self.shared = Linear(1), shared
        if len(self.rest) > 1:
            missing = None

    def forward(self, x: Tensor) -> Tensor:
        return self.rest[0](self.run(x))


def test_layers_that_a_function_encloses_are_found_last() -> None:
    net, inner = Layer(), Enclosing()
    net.inner, net.after = inner, Linear(2)
    net.after(inner(Tensor((2, 2))))
    paths = ["last", "shared", "run.hidden", "rest.0.later"]
    assert list(inner.get_params()) == [f"{path}.{param}" for path in paths for param in "Wb"]
    assert str(inner).splitlines()[0] == "Enclosing 'inner': 40 parameters"
    assert [line.split(":")[0] for line in str(inner).splitlines() if "Linear" in line] == [
        f"  {p}" for p in paths
    ]
    paths = ["inner.last", "inner.shared", "after", "inner.run.hidden", "inner.rest.0.later"]
    assert list(net.get_params()) == [f"{path}.{param}" for path in paths for param in "Wb"]
    assert [path for path, _ in layers_of(net)] == ["", "inner", *paths]


def test_a_function_that_encloses_what_holds_it_adds_nothing() -> None:
    parent = Layer()
    parent.a, parent.b = Linear(2), Linear(3)
    parent.b.penalty = lambda: parent.a.W
    parent.act = lambda x: parent.b(x)
    parent.act(parent.a(Tensor((1, 2))))
    assert list(parent.b.get_params()) == ["W", "b"]
    names = list(parent.get_params())
    twin = copy.deepcopy(parent)  # with the same functions, of the first one
    assert list(twin.get_params()) == names == ["a.W", "a.b", "b.W", "b.b"]
    assert not {*map(id, twin.get_params().values())} & {*map(id, parent.get_params().values())}


class Own(Layer):
    """A layer that says itself what it has, by names of its Tensors, or by others."""

    def __init__(self, key: str | None = None) -> None:
        super().__init__()
        self.key, self.weight = key, Tensor((2,), stores_grad=True, name=key)
        self.alias, self.given = self.weight, Tensor((1,), stores_grad=True, name="given name")

    def get_params(self) -> dict[str | None, Tensor]:
        return {self.key or self.weight.name: self.weight}


@pytest.mark.parametrize(
    ("key", "name"), [(None, "weight"), ("kernel", "kernel"), ("own.W", "W"), ("other.W", "other.W")]
)
def test_names_of_a_layers_own_params_stay_when_its_tensors_are_named_by_their_path(
    key: str | None, name: str
) -> None:
    own = Own(key)
    assert own.weight.name == (key or "weight") and own.given.name == "given name"
    outer, middle = Layer(), Layer()
    outer.middle, middle.own = middle, own
    for _ in range(2):
        assert list(middle.get_params()) == [f"own.{name}"]
        assert list(outer.get_params()) == [f"middle.own.{name}"]
        own.weight.name, own.key = f"middle.own.{name}", key if key == "kernel" else None


def test_names_stay_in_a_layer_that_only_a_function_holds() -> None:
    outer, own = Layer(), Own()
    outer.run = lambda: own
    assert own.name is None
    assert list(outer.get_params()) == ["run.own.weight"]
    own.weight.name = "run.own.weight"
    assert list(outer.get_params()) == ["run.own.weight"]


def test_layers_registered_beside_one_of_their_name_are_all_kept() -> None:
    holder, layers = Layer(), [Linear(1), Linear(2)]
    holder.Linear_0 = Linear(3)
    holder.register_layers(*layers)
    assert list(vars(holder)) == ["Linear_0", "Linear_1", "Linear_2"]
    assert [holder.Linear_1, holder.Linear_2] == layers


def test_tensors_of_other_layers_are_not_named() -> None:
    holder, free = Layer(), Tensor((1,))
    holder.free = free
    assert free.name is None


def test_what_is_registered_by_no_name_is_an_error_and_changes_nothing() -> None:
    holder = Layer()
    holder.first = Linear(1)
    with pytest.raises(DTypeError, match="names must be strings, not 1"):
        holder.register_layers({1: holder.first})
    assert list(vars(holder)) == ["first"]


def test_two_parameters_of_one_name_are_an_error() -> None:
    holder = Layer()
    holder.parts = {1: Linear(2), "1": Linear(2)}
    for part in holder.parts.values():
        part(Tensor((1, 3)))
    for call in (holder.get_params, holder.get_states):
        with pytest.raises(GraphError, match=r"are called 'parts\.1\.W'"):
            call()


def test_layers_carry_the_name_they_are_held_under(net: Net) -> None:
    assert net.stem.name == "stem"
    assert net.blocks[1][1].name == "blocks.1.1"
    assert repr(net.blocks[1][1].conv) == "Conv2d 'conv'"


def test_unset_attributes_say_why() -> None:
    with pytest.raises(
        AttributeError, match="Linear has no attribute 'W'; parameters are made at the first call"
    ):
        _ = Linear(3).W
    made = Linear(3)
    made(Tensor((1, 2)))
    with pytest.raises(AttributeError, match=r"no attribute 'weight'$"):
        _ = made.weight


def test_set_states_copies_values_in(net: Net) -> None:
    states = {name: np.full(state.shape, 0.5, np.float32) for name, state in net.get_states().items()}
    kept = net.get_states()
    net.set_states(states)
    assert all(net.get_states()[name] is state for name, state in kept.items())
    assert all((to_numpy(state) == 0.5).all() for state in kept.values())
    states["stem.W"][:] = 7
    assert (to_numpy(net.stem.W) == 0.5).all()


def test_set_params_leaves_buffers_alone(net: Net) -> None:
    before = to_numpy(net.blocks[0].bn.running_var)
    net.set_params({name: to_numpy(param) + 1 for name, param in net.get_params().items()})
    np.testing.assert_array_equal(to_numpy(net.blocks[0].bn.running_var), before)


def test_set_params_may_exchange_the_parameters_of_two_layers() -> None:
    holder = Layer()
    holder.a, holder.b = Linear(2, 2), Linear(2, 2)
    holder.b(holder.a(Tensor((1, 2))))
    before = {name: to_numpy(param) for name, param in holder.get_params().items()}
    params = holder.get_params()
    holder.set_params(
        {"a.W": params["b.W"], "a.b": params["b.b"], "b.W": params["a.W"], "b.b": params["a.b"]}
    )
    for one, other in ("a.W", "b.W"), ("b.W", "a.W"):
        np.testing.assert_array_equal(to_numpy(holder.get_params()[one]), before[other])


def test_a_tensor_or_layer_as_a_key_has_its_number_as_a_name() -> None:
    holder = Layer()
    holder.first, holder.second = Linear(2), Linear(2)
    holder.second(holder.first(Tensor((1, 2))))
    biases = holder.first.b, holder.second.b
    holder.scale = {bias: Tensor((1,), stores_grad=True) for bias in biases}
    holder.extra = {holder.first: Tensor((3,), stores_grad=True), "last": Tensor((4,), stores_grad=True)}
    names = list(holder.get_params())
    assert names[4:] == ["scale.#0", "scale.#1", "extra.#0", "extra.last"]
    for bias in biases:
        bias += 1.0
    assert list(holder.get_params()) == names


def test_unknown_missing_and_misshapen_states_are_refused_before_any_change(net: Net) -> None:
    good = {name: to_numpy(state) + 1 for name, state in net.get_states().items()}
    before = {name: to_numpy(state) for name, state in net.get_states().items()}
    with pytest.raises(CheckpointError, match=r"knows no \['stem.V'\]"):
        net.set_states({**good, "stem.V": np.zeros(1)})
    with pytest.raises(CheckpointError, match=r"lacks values for \['stem.W'\]"):
        net.set_states({name: value for name, value in good.items() if name != "stem.W"})
    with pytest.raises(ShapeError, match=r"temperature has shape \(1,\), not \(2,\)"):
        net.set_states({**good, "temperature": np.zeros(2, np.float32)})
    for name, state in net.get_states().items():
        np.testing.assert_array_equal(to_numpy(state), before[name])


def test_states_before_the_first_call_are_refused_with_a_hint() -> None:
    with pytest.raises(CheckpointError, match="after its first call only"):
        Linear(2).set_params({"W": np.zeros((2, 2))})


def test_a_failed_initialisation_can_be_tried_again() -> None:
    made = Linear(3, 4)
    with pytest.raises(ShapeError):
        made(Tensor((1, 2)))
    assert made(Tensor((1, 3))).shape == (1, 4)


def test_initialize_runs_once_also_through_super() -> None:
    calls = []

    class Parent(Layer):
        def initialize(self, x: Tensor) -> None:
            calls.append(x.shape)

        def forward(self, x: Tensor) -> Tensor:
            return x

    class Child(Parent):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    child = Child()
    child(Tensor((2, 2)))
    child(Tensor((3, 2)))
    assert calls == [(2, 2)]


def test_print_shows_a_tree_with_counts_of_parameters(net: Net, capsys: pytest.CaptureFixture[str]) -> None:
    print(net)
    lines = capsys.readouterr().out.splitlines()
    total = sum(param.size() for param in net.get_params().values())
    assert lines[0] == f"Net: {total} parameters"
    assert lines[1:4] == [
        "  stem: Conv2d, 4 parameters",
        "    W float32[2, 1, 1, 1]: 2",
        "    b float32[2]: 2",
    ]
    assert "  blocks.1.0: ReLU, 0 parameters" in lines
    assert lines[lines.index("  blocks.1.1: Block, 42 parameters") + 1] == "    conv: Conv2d, 38 parameters"
    assert "  temperature float32[1]: 1" in lines
    # shared; no parameters
    assert not any("again" in line or "scratch" in line or "running" in line for line in lines)
    counts = [int(line.rsplit(" ", 1)[1]) for line in lines if "[" in line]
    assert sum(counts) == total


def test_print_of_a_layer_before_its_first_call_says_when_it_has_parameters() -> None:
    assert str(Net()).splitlines()[0] == "Net: 1 parameters; parameters are made at the first call"
    parent = Layer()
    parent.child = Linear(2)
    parent.child.parent = parent
    assert "child: Linear, 0 parameters" in str(parent)


@pytest.mark.parametrize("base", [list, tuple, dict])
def test_a_layer_that_is_a_list_too_is_refused_as_its_own_attributes_would_be_lost(base: type) -> None:
    with pytest.raises(DTypeError, match=r"Blocks: a Layer cannot be a list, tuple or dict too"):
        type("Blocks", (Layer, base), {})


@pytest.mark.parametrize("value", [[], "total", ("total", 3), None])
@pytest.mark.parametrize("name", ["buffers", "unrecorded_attributes"])
def test_what_is_no_tuple_of_names_is_refused_where_names_of_attributes_are_read(
    name: str, value: object
) -> None:
    with pytest.raises(DTypeError, match=f"{name} must be a tuple of names of attributes"):
        setattr(Layer(), name, value)
    with pytest.raises(DTypeError, match=f"^Own: {name} must be a tuple of names of attributes"):
        type("Own", (Layer,), {name: value})
    for names in (("total",), ["total"], frozenset({"total"})):
        setattr(Layer(), name, names)
        type("Own", (Layer,), {name: names})
    type("Own", (Layer,), {name: property(lambda self: ("total",))})


def test_errors_of_attributes_need_no_repr_of_the_layer() -> None:
    class Own(Layer):
        def __init__(self) -> None:
            self.buffers = ("total",)
            with pytest.raises(DTypeError, match="Own: get_params is a method of Layer"):
                self.get_params = 3
            with pytest.raises(AttributeError, match="Own has no attribute 'size'"):
                repr(self)
            self.size = 3

        def __repr__(self) -> str:
            return f"Own({self.size})"

    assert repr(Own()) == "Own(3)"


@pytest.mark.parametrize("value", [True, None, [], ReLU()])
@pytest.mark.parametrize(("name", "owner"), [("get_params", "Layer"), ("train", "Model"), ("graph", "Model")])
def test_an_attribute_with_the_name_of_a_method_of_the_package_is_refused(
    name: str, owner: str, value: object
) -> None:
    class Own(Model):
        def mine(self) -> None:
            pass

    net = Own()
    with pytest.raises(DTypeError, match=f"^Own: {name} is a method of {owner}, which the .* would replace"):
        setattr(net, name, value)
    net.mine = value
    setattr(net, name, lambda: None)


def test_layers_are_not_registered_under_the_name_of_a_method() -> None:
    net, before = Layer(), ReLU()
    net.a = before
    with pytest.raises(DTypeError, match="Layer: forward is a method of Layer"):
        net.register_layers({"b": ReLU(), "forward": before})
    assert vars(net) == {"a": before}


def test_an_optimizer_that_is_none_is_refused_when_it_is_set() -> None:
    net = Model()
    for value in (5, [1], ReLU()):
        with pytest.raises(GraphError, match="expected an Optimizer, got"):
            net.optimizer = value
