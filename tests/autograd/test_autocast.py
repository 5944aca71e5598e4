# SPDX-License-Identifier: Apache-2.0
"""autocast: which dtype each operator computes in, gradients of parameters, copies of them, and what is refused."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from singa_lite import autograd, layer, model, opt
from singa_lite.autograd import Operator
from singa_lite.backend.base import Backend
from singa_lite.backend.cpu import CpuBackend
from singa_lite.backend.cpu.bfloat16 import describe
from singa_lite.comm.base import World
from singa_lite.comm.local import LocalCommunicator
from singa_lite.config import state, this_thread
from singa_lite.device import get_default_device
from singa_lite.errors import DeviceError, DTypeError, OptionError
from singa_lite.graph.recorder import break_graph, host
from singa_lite.tensor import Tensor, bfloat16, eq, ge, gt, le, lt, to_numpy
from tests.autograd.op_samples import SAMPLES, Sample

RNG = np.random.default_rng(5)
pytestmark = pytest.mark.usefixtures("training")
IDS = [f"{number}-{sample.op}" for number, sample in enumerate(SAMPLES)]
# what an operator gives for float32 inputs
LOW = {"attention", "conv2d", "gemm", "matmul"}


def param(*shape: int) -> Tensor:
    return Tensor(data=RNG.standard_normal(shape), stores_grad=True)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of kernels, in the order of their calls."""
    called: list[str] = []
    execute = CpuBackend.execute

    def spy(self: Backend, kernel: str, *arguments: object) -> None:
        called.append(kernel)
        execute(self, kernel, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(CpuBackend, "execute", spy)
    return called


def tensors_of(sample: Sample, dtype: str) -> list[Tensor]:
    return [
        Tensor(
            data=array,
            dtype=dtype if array.dtype.kind == "f" else array.dtype,
            stores_grad=array.dtype.kind == "f",
        )
        for array in sample.inputs
    ]


@pytest.mark.parametrize("sample", SAMPLES, ids=IDS)
def test_every_operator_computes_by_its_rule_and_gives_float32_gradients(sample: Sample) -> None:
    tensors = tensors_of(sample, "float32")
    with autograd.autocast("bf16"):
        y = sample.call(*tensors)
    expected = np.asarray(sample.reference(*sample.inputs))
    assert y.dtype == (bfloat16 if sample.op in LOW else "float32")
    assert y.shape == expected.shape
    scale = max(1.0, abs(expected).max())
    assert abs(to_numpy(y).astype(float) - expected).max() <= 3e-2 * scale
    if not sample.has_gradient:
        return
    found = autograd.gradients(y, Tensor(data=np.ones(y.shape), dtype=y.dtype))
    plain = tensors_of(sample, "float32")
    z = sample.call(*plain)
    wanted = autograd.gradients(z, Tensor(data=np.ones(z.shape)))
    assert len(found) == len(wanted)
    for tensor, other in zip(tensors, plain, strict=True):
        if other in wanted:
            assert found[tensor].dtype == "float32"
            grad = to_numpy(wanted[other])
            assert abs(to_numpy(found[tensor]) - grad).max() <= 6e-2 * max(1.0, abs(grad).max())


@pytest.mark.parametrize("sample", [s for s in SAMPLES if s.num_narrow is None], ids=lambda s: s.op)
def test_every_operator_takes_bfloat16_activations(sample: Sample) -> None:
    tensors = tensors_of(sample, "bfloat16")
    with autograd.autocast("bf16"):
        function = getattr(autograd, sample.op)
        extra = [Tensor(data=array, dtype="float32") for array in sample.fixed]
        arguments = [list(tensors)] if sample.takes_list else [*tensors, *extra]
        result = function(*arguments, **sample.attributes_for(*tensors))
    y = result if sample.output is None else result[sample.output]
    rules = {"cossim", "softmax", "reduce_sum", "reduce_mean", "recurrent"}
    is_wide = sample.op in rules or "entropy" in sample.op or "loss" in sample.op
    mixes = sample.fixed and sample.op not in {"layer_norm", "batchnorm_2d"}
    if not mixes:
        assert y.dtype == ("float32" if is_wide else bfloat16)
    if y.creator is not None:
        for tensor, grad in autograd.gradients(y, Tensor(data=np.ones(y.shape), dtype=y.dtype)).items():
            assert grad.dtype == tensor.dtype == bfloat16


def test_a_small_net_keeps_activations_in_bfloat16_and_parameters_in_float32() -> None:
    x = Tensor(data=RNG.standard_normal((4, 3, 6, 6)))
    layers = [layer.Conv2d(8, 3, padding=1), layer.BatchNorm2d(), layer.ReLU(), layer.MaxPool2d(2, 2)]
    dense, last = layer.Linear(16), layer.LayerNorm()
    with autograd.autocast("bf16"):
        dtypes = []
        for each in layers:
            x = each(x)
            dtypes.append(x.dtype)
        y = last(autograd.gelu(dense(autograd.flatten(x))))
        cost = autograd.softmax_cross_entropy(y, Tensor(data=np.array([0, 1, 2, 3]), dtype="int32"))
    assert dtypes == [bfloat16] * 4 and y.dtype == bfloat16
    assert cost.dtype == "float32"
    found = autograd.gradients(cost)
    params = [p for each in (*layers, dense, last) for p in each.get_params().values()]
    assert set(found) == set(params) and len(params) == 8
    assert {p.dtype for p in params} == {grad.dtype for grad in found.values()} == {np.dtype("float32")}
    assert all(np.isfinite(to_numpy(grad)).all() for grad in found.values())


def test_the_gradient_of_a_weight_is_a_float32_sum_of_rounded_factors() -> None:
    x, w = Tensor(data=RNG.standard_normal((64, 5))), param(5, 3)
    with autograd.autocast():
        y = autograd.matmul(x, w)
    dy = Tensor(data=RNG.standard_normal(y.shape), dtype=bfloat16)
    found = to_numpy(autograd.gradients(y, dy)[w])
    rounded = to_numpy(x.as_type(bfloat16)).astype(float)
    exact = rounded.T @ to_numpy(dy).astype(float)
    np.testing.assert_allclose(found, exact, rtol=0, atol=1e-5)  # 2**-8 if it were rounded on its way
    assert (found != found.astype(bfloat16).astype("f")).any()


def test_a_recorded_step_casts_a_parameter_once_and_again_when_it_has_changed(kernels: list[str]) -> None:
    x, w = Tensor(data=RNG.standard_normal((2, 3))).as_type(bfloat16), param(3, 3)
    was, alone, device = to_numpy(w).copy(), LocalCommunicator(World()), get_default_device()
    with autograd.autocast():
        device.EnableGraph(True)
        y = autograd.matmul(autograd.matmul(x, w), w)
        assert kernels.count("cast") == 1 + 1  # and as_type
        w *= 2.0
        held = autograd.matmul(x, w)
        assert kernels.count("cast") == 3
        autograd.matmul(x, w)
        assert kernels.count("cast") == 3
        with autograd.autocast(enabled=False):
            w += 1.0  # the block around sees it
        z = autograd.matmul(x, w)
        assert kernels.count("cast") == 4
        work = alone.all_reduce(w.array, "sum")
        held = autograd.matmul(x, w)
        assert kernels.count("cast") == 5
        work.wait()
        held = autograd.matmul(x, w)
        assert kernels.count("cast") == 6
        host(lambda: w.array.fill(2.0))
        u = autograd.matmul(x, w)
        assert kernels.count("cast") == 7
        list(autograd.backward(y, Tensor(y.shape, dtype=bfloat16)))
        casts = kernels.count("cast")
        autograd.matmul(x, w)
        assert kernels.count("cast") == casts
        del held
        device.EnableGraph(False)
    w.copy_from_numpy(was)
    device.RunGraph()
    device.ResetGraph()
    wide = to_numpy(x).astype(float)
    for got, weights in ((z, 2 * was + 1), (u, np.full((3, 3), 2.0))):
        expected = wide @ weights.astype(bfloat16).astype(float)
        np.testing.assert_allclose(to_numpy(got).astype(float), expected, rtol=2**-8, atol=1e-2)


def test_a_parameter_whose_array_was_given_out_is_rounded_at_each_use() -> None:
    x, w, device = Tensor(data=np.eye(3)), param(3, 3), get_default_device()
    raw = w.data
    with autograd.autocast():
        device.EnableGraph(True)
        held = autograd.matmul(x, w)
        raw[...] = 2.0
        y = autograd.matmul(x, w)
        device.EnableGraph(False)
    device.ResetGraph()
    assert (to_numpy(y) == 2).all() and (to_numpy(held) != 2).any()


def test_a_step_that_runs_eagerly_in_the_end_rounds_at_each_use() -> None:
    x, w, device = Tensor(data=np.eye(3)), param(3, 3), get_default_device()
    with autograd.autocast():
        device.EnableGraph(True)
        held = autograd.matmul(x, w)
        break_graph("numpy writes a parameter")
        w.array[...] = 2.0
        y = autograd.matmul(x, w)
        device.EnableGraph(False)
    device.ResetGraph()
    assert (to_numpy(y) == 2).all() and (to_numpy(held) != 2).any()


def test_two_views_of_one_memory_are_rounded_each() -> None:
    x, both, device = (
        Tensor(data=np.eye(4)),
        np.arange(16, dtype=np.float32).reshape(4, 4),
        get_default_device(),
    )
    w, turned = param(4, 4), param(4, 4)
    w.array, turned.array = both, both.T
    with autograd.autocast():
        device.EnableGraph(True)
        y, z = autograd.matmul(x, w), autograd.matmul(x, turned)
        w *= 2.0  # which changes both
        u = autograd.matmul(x, turned)
        device.EnableGraph(False)
    device.ResetGraph()
    for got, expected in ((y, both / 2), (z, both.T / 2), (u, both.T)):
        np.testing.assert_array_equal(to_numpy(got).astype(np.float32), expected)


class Same(Operator):
    """Returns its input, which under autocast is a rounded parameter."""

    autocast = "low"

    def forward(self, context: Any, x: Any) -> Any:
        return x


def test_a_rounded_parameter_that_is_written_is_rounded_again() -> None:
    x, w, device = Tensor(data=np.eye(2)), param(2, 2), get_default_device()
    with autograd.autocast():
        device.EnableGraph(True)
        with autograd.no_grad():
            got = Same()(w)
        got *= 2.0
        y = autograd.matmul(x, w)
        device.EnableGraph(False)
    device.ResetGraph()
    np.testing.assert_array_equal(to_numpy(y), to_numpy(w).astype(bfloat16))


class Linear(model.Model):
    def __init__(self) -> None:
        super().__init__()
        self.linear = layer.Linear(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)

    def train_one_batch(self, x: Tensor) -> Tensor:
        loss = autograd.reduce_sum(self.forward(x))
        self.optimizer(loss)
        return loss


def test_an_eager_operator_sees_what_was_written_by_hand() -> None:
    x, w, net = Tensor(data=np.eye(2)), param(2, 2), Linear()
    net.set_optimizer(opt.SGD(lr=1.0))
    net.compile([x], use_graph=True)
    net(x)
    writes = [
        lambda: w.data.fill(3.0),
        lambda: np.multiply(w.array, 2, out=w.array),
        lambda: net(x),  # recorded
        lambda: net(x),  # a replay
    ]
    with autograd.autocast():
        for write in writes:
            autograd.matmul(x, w)
            autograd.matmul(x, net.linear.W)
            write()
            for weights in (w, net.linear.W):
                got, expected = autograd.matmul(x, weights), to_numpy(weights).astype(bfloat16)
                np.testing.assert_array_equal(to_numpy(got), expected)


def test_biases_are_not_rounded_before_they_are_added() -> None:
    x, w, one = Tensor(data=np.ones((1, 1, 1, 1))), Tensor(data=np.ones((1, 1, 1, 1))), Tensor(data=[[1.0]])
    bias = Tensor(data=np.array([2.0**-8 + 2.0**-20]), stores_grad=True)  # which bfloat16 rounds to a tie
    with autograd.autocast():
        for y in (
            autograd.conv2d(x, w, bias),
            autograd.gemm(one, one, bias),
            autograd.add_bias(autograd.matmul(one, one), bias),
        ):
            assert y.dtype == bfloat16 and y.item() == 1 + 2.0**-7
            grad = autograd.gradients(y, Tensor(data=np.ones(y.shape), dtype=bfloat16))[bias]
            assert grad.dtype == "float32" and grad.item() == 1


def test_two_uses_of_a_parameter_add_their_gradients_in_float32() -> None:
    x, w = Tensor(data=RNG.standard_normal((4, 3))), param(3, 3)
    with autograd.autocast():
        y = autograd.matmul(x, w) + autograd.matmul(x, w)
    dy = Tensor(data=np.ones(y.shape), dtype=bfloat16)
    one = to_numpy(x.as_type(bfloat16)).astype(float).T @ np.ones((4, 3))
    np.testing.assert_allclose(to_numpy(autograd.gradients(y, dy)[w]), 2 * one, atol=1e-5)


def test_an_activation_of_two_dtypes_is_added_in_the_widest() -> None:
    wide, low = Tensor(data=np.full(3, 1 + 2.0**-12)), Tensor(data=np.ones(3), dtype=bfloat16)
    with autograd.autocast():
        assert (wide + low).dtype == "float32"
        np.testing.assert_array_equal(to_numpy(wide + low), np.full(3, 2 + 2.0**-12, "f"))
        assert (low + low).dtype == bfloat16
        assert autograd.cat([low, wide]).dtype == "float32"


@pytest.mark.parametrize("form", ["> < >= <=", "== !=", "//", "functions"])
def test_operators_of_values_take_the_widest_too(form: str) -> None:
    values, others = np.array([1.0, 2.0, 3.0], "f"), np.array([1.0, 2 - 2.0**-20, 3 + 2.0**-20], "f")
    low, wide = Tensor(data=values, dtype=bfloat16), Tensor(data=others)
    forms = {
        "> < >= <=": lambda a, b: [a > b, a < b, a >= b, a <= b],
        "== !=": lambda a, b: [a == b, a != b],
        "//": lambda a, b: [a // b],
        "functions": lambda a, b: [f(a, b) for f in (lt, le, gt, ge, eq)],
    }
    plain = {**forms, "functions": lambda a, b: [a < b, a <= b, a > b, a >= b, a == b]}
    for a, b, expected in (
        (low, wide, plain[form](values, others)),
        (wide, low, plain[form](others, values)),
    ):
        with pytest.raises(DTypeError):
            forms[form](a, b)
        with autograd.autocast():
            for result, values_of_it in zip(forms[form](a, b), expected, strict=True):
                assert result.dtype == "float32"
                np.testing.assert_array_equal(to_numpy(result), values_of_it.astype("f"))
    with autograd.autocast(), pytest.raises(DTypeError, match="float16"):
        forms[form](low, Tensor(data=others, dtype="float16"))


def test_blocks_nest_and_end() -> None:
    a, b = Tensor((2, 2)), Tensor((2, 2))
    product = lambda: autograd.matmul(a, b).dtype  # noqa: E731
    with autograd.autocast():
        with autograd.autocast(enabled=False):
            assert product() == "float32"
            with autograd.autocast("bf16"):
                assert product() == bfloat16
            assert product() == "float32"
        assert product() == bfloat16
        with autograd.autocast("fp32"):
            assert product() == "float32"
    assert product() == "float32" and this_thread.autocast is None
    with pytest.raises(KeyError), autograd.autocast():
        raise KeyError
    assert this_thread.autocast is None


def test_a_block_is_of_its_thread_alone() -> None:
    found = []
    with autograd.autocast():
        thread = threading.Thread(target=lambda: found.append(this_thread.autocast))
        thread.start()
        thread.join()
    assert found == [None]


def test_an_unknown_precision_is_an_option_error() -> None:
    with pytest.raises(
        OptionError, match=r"precision = 'bf8' is not known; choose one of 'fp32', 'bf16', 'fp16'"
    ):
        autograd.autocast("bf8")
    with pytest.raises(OptionError, match="enabled"):
        autograd.autocast("bf16", enabled="no")  # type: ignore[arg-type]


class Cube(Operator):
    def forward(self, context, x):  # type: ignore[no-untyped-def]
        return x * x * x


def test_an_operator_without_a_rule_is_named_with_the_page() -> None:
    x = Tensor((2,))
    with autograd.autocast(), pytest.raises(DTypeError, match=r"Cube: has no rule .*docs/precision\.md"):
        Cube()(x)
    with autograd.autocast(), autograd.autocast(enabled=False):
        Cube()(x)


def test_a_misspelt_rule_is_no_rule() -> None:
    class Other(Cube):
        autocast = "lower"  # type: ignore[assignment]

    with autograd.autocast(), pytest.raises(DTypeError, match="Other: has the unknown rule 'lower'"):
        Other()(Tensor((2,)))


@pytest.mark.parametrize("dtype", ["float64", "float16"])
def test_other_float_dtypes_are_named_with_the_operator(dtype: str) -> None:
    x, w = Tensor((2, 2), dtype=dtype), Tensor((2, 2))
    for name, call in (
        ("Matmul", lambda: autograd.matmul(w, x)),
        ("ReLU", lambda: autograd.relu(x)),
        ("MeanSquareError", lambda: autograd.mse_loss(w, x)),
    ):
        with autograd.autocast(), pytest.raises(DTypeError, match=f"{name}: .* not {dtype}.*precision"):
            call()


def test_a_device_without_a_precision_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    x = Tensor((2, 2))
    with (
        autograd.autocast("fp16"),
        pytest.raises(DeviceError, match=r"Matmul: .*no instructions .*float16.*precision\.md"),
    ):
        autograd.matmul(x, x)
    monkeypatch.setattr(type(x.device.backend), "missing_precisions", {"bf16": "it is too old"})
    with autograd.autocast(), pytest.raises(DeviceError, match=r"Matmul: precision 'bf16' .*too old"):
        autograd.matmul(x, x)
    with pytest.raises(DTypeError, match="no kernels for bfloat16: it is too old"):
        x.as_type(bfloat16)


def test_a_function_whose_body_runs_later_is_not_decorated() -> None:
    def generator() -> Iterator[int]:
        yield 1

    async def coroutine() -> None: ...

    for function in (generator, coroutine):
        with pytest.raises(OptionError, match="runs later than its call"):
            autograd.autocast("bf16")(function)  # type: ignore[operator]


def triple(value: Tensor) -> None:
    value.copy_data(autograd.matmul(value, Tensor(data=np.eye(2) * 3)))


class ByApply(opt.Optimizer):
    """Updates by an operator, which must not round; so do the next two."""

    def apply(self, param_name: str, param_value: Tensor, param_grad: Tensor) -> None:
        triple(param_value)


class ByUpdateAll(opt.Optimizer):
    is_recordable = True

    def update_all(self, pairs: Any) -> None:
        for param, _ in pairs:
            triple(param)


class ByCall(opt.Optimizer):
    def call(self, loss: Tensor) -> None:
        for param, _ in autograd.backward(loss):
            triple(param)


def by_attribute() -> opt.Optimizer:
    optimizer = opt.SGD(0.1)
    optimizer.update_all = lambda pairs: [triple(param) for param, _ in pairs]  # type: ignore[assignment]
    return optimizer


@pytest.mark.parametrize(
    "make", [lambda: ByApply(0.1), lambda: ByUpdateAll(0.1), lambda: ByCall(0.1), by_attribute]
)
@pytest.mark.parametrize("is_wrapped", [False, True])
def test_an_optimizer_computes_in_float32(make: Any, is_wrapped: bool) -> None:
    w = Tensor(data=np.full((2, 2), 1 + 2.0**-12), stores_grad=True)
    optimizer = make()
    if is_wrapped and not isinstance(optimizer, ByCall):  # whose call it cannot make
        optimizer = opt.DistOpt(optimizer, communicator=LocalCommunicator(World()))
    with autograd.autocast():
        cost = autograd.reduce_sum(autograd.matmul(w, w))
        optimizer(cost)
    np.testing.assert_array_equal(to_numpy(w), np.full((2, 2), 3 * (1 + 2.0**-12), "f"))


def test_recurrent_layers_compute_in_float32_from_bfloat16() -> None:
    x = Tensor(data=RNG.standard_normal((5, 2, 4)), dtype=bfloat16)
    lstm = layer.CudnnRNN(3)
    with autograd.autocast():
        y = lstm(x)
    assert y.dtype == "float32"
    assert {str(p.dtype) for p in lstm.get_params().values()} == {"float32"}
    assert all(grad.dtype == "float32" for grad in autograd.gradients(autograd.reduce_sum(y)).values())


def test_a_cell_adds_its_float32_bias_in_float32() -> None:
    cell, state = layer.RNN(4, 3), Tensor((2, 3), dtype=bfloat16)
    steps = [Tensor(data=RNG.standard_normal((2, 4))) for _ in range(3)]
    with autograd.autocast():
        states, last = cell(steps, state)
    assert [each.dtype for each in (*states, last)] == ["float32"] * 4
    found = autograd.gradients(last, Tensor(data=np.ones(last.shape)))
    assert set(found) == set(cell.get_params().values())
    assert all(grad.dtype == "float32" for grad in found.values())


def cpu_with(flags: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "cpuinfo").write_text(f"processor\t: 0\nflags\t\t: fpu avx512f {flags}\n")
    monkeypatch.setattr("singa_lite.backend.cpu.bfloat16.CPU_FLAGS", folder / "cpuinfo")
    monkeypatch.setattr(state, "has_looked_for_bfloat16", False)
    monkeypatch.setattr(state, "cuda_devices", {})


def test_a_cpu_without_instructions_says_so_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu_with("avx512_vnni", tmp_path, monkeypatch)
    assert describe().startswith("no instructions")
    with pytest.warns(UserWarning, match="no instructions for bfloat16") as reported:
        for _ in range(2):
            with autograd.autocast("fp32"), autograd.autocast():
                pass
    assert len(reported) == 1 and reported[0].filename == __file__


def test_a_cpu_with_instructions_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu_with("avx512_bf16 amx_bf16", tmp_path, monkeypatch)
    assert describe() == "instructions for products: AVX-512 BF16, AMX"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        autograd.autocast()
    monkeypatch.setattr("singa_lite.backend.cpu.bfloat16.CPU_FLAGS", tmp_path / "missing")
    assert describe().startswith("no instructions")
