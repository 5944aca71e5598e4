# SPDX-License-Identifier: Apache-2.0
"""What scripts written for SINGA do beside the calls that each module's tests have."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from singa_lite import autograd, layer, model, opt, tensor
from singa_lite.errors import CheckpointError, DTypeError, GraphError, ShapeError
from singa_lite.tensor import Tensor, from_numpy, to_numpy


@pytest.fixture(autouse=True)
def evaluation_afterwards() -> Any:
    yield
    autograd.training = False


class Two(model.Model):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = layer.Linear(2), layer.Linear(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))


def inputs(*shape: int) -> Tensor:
    return from_numpy(np.random.default_rng(3).standard_normal(shape).astype(np.float32))


def compiled(net: model.Model, x: Tensor) -> Any:
    net.compile([x])
    return net


# ---- names ---------------------------------------------------------------------------------------------


def test_compile_names_parameters_without_an_optimizer() -> None:
    net = compiled(Two(), inputs(3, 2))
    assert {param.name for param in net.get_params().values()} == {"a.W", "a.b", "b.W", "b.b"}


def test_steps_by_an_optimizer_that_is_set_after_compile_can_be_loaded(tmp_path: Path) -> None:
    x, nets = inputs(3, 2), []
    for _ in range(2):
        net = compiled(Two(), x)
        net.optimizer = opt.SGD(0.1, momentum=0.9)
        net.train()
        nets.append(net)
    nets[0].optimizer(autograd.mse_loss(nets[0].forward(x), x))
    nets[0].save_states(tmp_path / "states.zip")
    nets[1].load_states(tmp_path / "states.zip")
    first, second = (net.optimizer.get_states() for net in nets)
    assert first.keys() == second.keys() == {"step_counter", *(f"{n}:momentum" for n in nets[0].get_params())}
    assert all(np.array_equal(first[name], second[name]) for name in first)


# ---- layers that say themselves what their states are -----------------------------------------------------


class Prototype(layer.Layer):
    """Keeps a Tensor without a gradient, and says so as SINGA's layers do."""

    def initialize(self, x: Tensor) -> None:
        self.prototype = tensor.random((x.shape[1], 2))
        self.linear = layer.Linear(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(autograd.matmul(x, self.prototype))

    def get_states(self) -> dict[str, Tensor]:
        return {"prototype": self.prototype, **super().get_states()}


class Holder(model.Model):
    def __init__(self, held: layer.Layer) -> None:
        super().__init__()
        self.held = held

    def forward(self, x: Tensor) -> Tensor:
        return self.held(x)


def test_states_of_a_layer_that_overrides_get_states_are_saved_and_loaded(tmp_path: Path) -> None:
    x = inputs(4, 3)
    first, second = (compiled(Holder(Prototype()), x) for _ in range(2))
    assert list(first.get_states()) == ["held.linear.W", "held.linear.b", "held.prototype"]
    assert list(first.get_params()) == ["held.linear.W", "held.linear.b"]
    first.save_states(tmp_path / "states.zip")
    assert not np.array_equal(to_numpy(first.held.prototype), to_numpy(second.held.prototype))
    second.load_states(tmp_path / "states.zip")
    np.testing.assert_array_equal(to_numpy(second.held.prototype), to_numpy(first.held.prototype))


class Wrong(layer.Layer):
    def __init__(self, states: Any) -> None:
        super().__init__()
        self.states = (states,)

    def get_params(self) -> Any:
        return self.states[0]


@pytest.mark.parametrize("states", [[1], {"w": 3}, None])
def test_a_layer_that_returns_no_tensors_by_name_is_an_error(states: Any) -> None:
    with pytest.raises(DTypeError, match="Wrong 'held'"):
        Holder(Wrong(states)).get_params()


# ---- tensors, optimizers, files ------------------------------------------------------------------------------


class Scale(layer.Layer):
    """As SINGA's own layers are written: parameters without a name, given by their names."""

    def initialize(self, x: Tensor) -> None:
        self.W, self.b = (Tensor((2,), requires_grad=True, stores_grad=True) for _ in range(2))
        self.W.set_value(1.5)
        self.steps = Tensor((1,), name=f"{self.name}{layer.Layer.sep}steps")

    def forward(self, x: Tensor) -> Tensor:
        return autograd.add_bias(autograd.mul(x, self.W), self.b)

    def get_params(self) -> dict[str | None, Tensor]:
        return {self.W.name: self.W, self.b.name: self.b}

    def get_states(self) -> dict[str | None, Tensor]:
        return {**self.get_params(), self.steps.name: self.steps}


class Scaled(model.Model):
    """A Model of a state of its own, as SINGA's char_rnn; parts of it are in a function alone, as in SINGA's ResNet."""

    def __init__(self) -> None:
        super().__init__()
        self.hx, self.scale, linear = Tensor((1, 2)), Scale(), layer.Linear(2)
        self.down = lambda x: linear(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.scale(self.down(x))

    def train_one_batch(self, x: Tensor, y: Tensor) -> Tensor:
        loss = autograd.mse_loss(self.forward(x), y)
        self.optimizer(loss)
        return loss

    def get_states(self) -> dict[str, Tensor]:
        states = super().get_states()
        assert self.hx.name is not None
        states[self.hx.name] = self.hx
        return states


@pytest.mark.parametrize("use_graph", [False, True])
def test_a_model_written_as_singas_is_saved_whole(tmp_path: Path, use_graph: bool) -> None:
    rng, ends = np.random.default_rng(0), []
    batches = [[from_numpy(rng.standard_normal((4, 2)).astype(np.float32)) for _ in "xy"] for _ in range(4)]
    first, second = Scaled(), Scaled()
    for net in (first, second):
        net.set_optimizer(opt.SGD(0.1, momentum=0.9))
        net.compile([batches[0][0]], use_graph=use_graph)
    for batch in batches:
        first(*batch)
    first.save_states(tmp_path / "scaled.zip")
    second.load_states(tmp_path / "scaled.zip")
    for net in (first, second):
        net(*batches[0])
        ends.append({name: to_numpy(state) for name, state in net.get_states().items()})
    params = ["scale.W", "scale.b", "down.linear.W", "down.linear.b"]
    assert sorted(ends[0]) == sorted([*params, "scale.steps", "hx"])
    assert [param.name for param in first.get_params().values()] == params
    for name, value in ends[0].items():
        np.testing.assert_array_equal(value, ends[1][name], err_msg=name)


def test_a_key_that_is_no_name_is_an_error() -> None:
    class Numbered(layer.Layer):
        def get_params(self) -> Any:
            return {1: self.own}

    net = Holder(Numbered())
    net.held.own = Tensor((1,), stores_grad=True)
    with pytest.raises(DTypeError, match="must have names as keys, not 1"):
        net.get_params()


def test_the_truth_of_a_parameter_is_an_error_that_names_the_way() -> None:
    bias = Tensor((1,), requires_grad=True, stores_grad=True)  # SINGA: always true
    with pytest.raises(DTypeError, match="write `is not None`"):
        bool(bias)
    assert not Tensor((1,)) and bias == 0
    with pytest.raises(ShapeError, match="write `is not None`"):
        bool(Tensor((2,)))


def test_dtypes_by_singas_words_are_of_32_bits() -> None:
    x = from_numpy(np.array([1.5, 2], np.float32))
    assert (x.as_type("int").dtype, x.as_type("int").as_type("float").dtype) == (np.int32, np.float32)
    assert x.as_type("float64").dtype == np.float64


def test_copy_from_takes_an_array_too() -> None:
    x = Tensor((2, 2))
    x.copy_from(np.array([[1, 2], [3, 4]], np.float32))
    y = Tensor((2, 2))
    y.copy_from(x)
    assert to_numpy(y).tolist() == [[1, 2], [3, 4]]


class Halves(opt.Optimizer):
    def __init__(self, lr: float, dtype: Any = tensor.float32) -> None:
        super().__init__(lr, dtype)

    def apply(self, name: str, value: Tensor, grad: Tensor) -> None:
        value *= 0.5


def test_an_optimizer_passes_its_dtype_on() -> None:
    assert Halves(0.1).dtype == np.float32
    with pytest.raises(DTypeError):
        Halves(0.1, "no dtype")


def write_singas(path: Path, states: dict[str, np.ndarray], aux: dict[str, np.ndarray], kind: int) -> None:
    """A checkpoint of SINGA's, which marks auxiliary values by their state_type alone."""
    with zipfile.ZipFile(path, "w") as archive:
        content = io.BytesIO()
        np.savez(content, **states, **aux)
        archive.writestr("tensor_dict.npz", content.getvalue())
        kinds = {**dict.fromkeys(states, 0), **dict.fromkeys(aux, kind)}
        entries = {
            name: {"state_type": kinds[name], "shape": list(value.shape), "dtype": 0}
            for name, value in {**states, **aux}.items()
        }
        archive.writestr("states_attr.json", json.dumps(entries))


def test_auxiliary_values_of_singas_checkpoints_are_read(tmp_path: Path) -> None:
    net = compiled(Two(), inputs(3, 2))
    states = {name: 2 * to_numpy(value) for name, value in net.get_states().items()}
    aux = {"epoch": np.array([3], np.float32)}
    write_singas(tmp_path / "singa.zip", states, aux, 1)
    assert net.load_states(tmp_path / "singa.zip") == aux
    np.testing.assert_array_equal(to_numpy(net.a.W), states["a.W"])
    write_singas(tmp_path / "other.zip", states, aux, 0)
    with pytest.raises(CheckpointError, match="unknown \\['epoch'\\]"):
        net.load_states(tmp_path / "other.zip")


def test_a_model_that_is_not_compiled_is_named_where_nothing_was_recorded() -> None:
    autograd.training = True
    x = inputs(3, 2)
    loss = autograd.mse_loss(Two()(x), x)
    with pytest.raises(
        GraphError, match="calling a Model that is neither compiled nor in training mode evaluates it"
    ):
        opt.SGD(0.1)(loss)
