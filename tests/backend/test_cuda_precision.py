# SPDX-License-Identifier: Apache-2.0
"""Mixed precision on CUDA devices: kernels of two dtypes, operators and models under autocast, the loss's scale."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from singa_lite import autograd, layer, model, opt
from singa_lite.autograd.autocast import LOW as LOW_DTYPES
from singa_lite.backend.cpu import NumpyBackend
from singa_lite.comm.base import World
from singa_lite.comm.local import LocalCommunicator
from singa_lite.device import Device
from singa_lite.dtypes import accumulation_dtype, bfloat16
from singa_lite.errors import DeviceError, DTypeError, OptionError, ShapeError
from singa_lite.tensor import Tensor, to_numpy
from tests.autograd.op_samples import SAMPLES, Sample
from tests.backend.test_capture import graphs
from tests.devices import cuda_device, no_gpu
from tests.test_precision import Net, Plain

RNG = np.random.default_rng(60)
CPU = NumpyBackend()
PRECISIONS = ["fp16", "bf16"]
# of the sum of magnitudes, for a rounding to 16 bits after sums in float32, and for these sums
TOLERANCE = {"float16": 1.01 * 2.0**-11, "bfloat16": 1.01 * 2.0**-8, "float32": 2.0**-19}
LONG_SUMS = (
    2.0**-12
)  # of the sum of magnitudes: 2^16 terms in float32, which tensor cores truncate 2^12 times
LOW = {"attention", "conv2d", "gemm", "matmul"}
KEEP = {"avg_pool_2d", "cat", "gelu", "max_pool_2d", "slice", "split", "tanh", "transpose"}
pytestmark = [] if no_gpu() else [pytest.mark.gpu]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    yield cuda_device(monkeypatch)
    autograd.training = False


# ---- kernels --------------------------------------------------------------------------------------------------

GEOMETRY = {"stride": (1, 2), "padding": (1, 0), "dilation": (1, 1), "groups": 2}
IMAGE, FILTER, DY = (3, 8, 6, 7), (16, 4, 3, 3), (3, 16, 6, 3)
# kernel, shapes of inputs, how many of them have 16 bits, shapes of outputs, how many of these, attributes
CASES: list[tuple[str, list[Any], int, list[Any], int, dict[str, Any]]] = [
    *(
        ("matmul", [a, b], 2, [out], narrow, {"transpose_a": ta, "transpose_b": tb})
        for narrow in (0, 1)
        for a, b, out, ta, tb in [
            ((9, 40), (40, 7), (9, 7), False, False),
            ((40, 9), (40, 7), (9, 7), True, False),
            ((2, 3, 9, 40), (3, 7, 40), (2, 3, 9, 7), False, True),
            ((40, 9), (7, 40), (9, 7), True, True),
            ((9, 0), (0, 7), (9, 7), False, False),
        ]
    ),
    ("conv2d", [IMAGE, FILTER, (16,)], 2, [DY], 1, GEOMETRY),
    ("conv2d_backward_data", [DY, FILTER], 2, [IMAGE], 1, GEOMETRY),
    ("conv2d_backward_data", [DY, FILTER], 1, [IMAGE], 1, GEOMETRY),
    ("conv2d_backward_weight", [DY, IMAGE], 2, [FILTER, (16,)], 0, GEOMETRY),
    ("conv2d_backward_weight", [(0, *DY[1:]), (0, *IMAGE[1:])], 2, [FILTER, (16,)], 0, GEOMETRY),
    ("add", [(5, 3, 70), (70,)], 1, [(5, 3, 70)], 1, {}),
    ("add", [(5, 3, 70), (3, 1)], 1, [(5, 3, 70)], 1, {}),
    ("sum_to", [(50, 37)], 1, [(37,)], 0, {}),
    ("sum_to", [(5, 3000)], 1, [(5, 1)], 0, {}),
    ("sum_to", [(9000, 3)], 1, [(1, 3)], 0, {}),
    ("sum", [(2, 30_000)], 1, [(2,)], 0, {"axes": (1,), "keepdims": False}),
]


def in_dtypes(shapes: list[Any], count: int, low: Any) -> list[np.ndarray]:
    """Random arrays, the first ``count`` of 16 bits."""
    arrays = [RNG.standard_normal(shape).astype(np.float32) for shape in shapes]
    return [array.astype(low) if number < count else array for number, array in enumerate(arrays)]


def errors_of(backend: Any, case: Any, low: Any) -> list[tuple[np.ndarray, Any]]:
    """The errors of each result over the sum of magnitudes, a rounding, and the dtype that it was rounded to."""
    kernel, shapes, count, results, narrow, attributes = case
    given = in_dtypes(shapes, count, low)
    out = [backend.asarray(array) for array in in_dtypes(results, narrow, low)]

    def run(on: Any, arrays: list[Any], made: list[Any]) -> None:
        on.run(kernel, *arrays, out=tuple(made) if len(made) > 1 else made[0], **attributes)

    run(backend, [backend.asarray(array) for array in given], out)
    exact, size = ([np.zeros(shape) for shape in results] for _ in range(2))
    run(CPU, [array.astype(float) for array in given], exact)
    run(CPU, [abs(array.astype(float)) for array in given], size)
    found = []
    for array, wanted, magnitudes in zip(out, exact, size, strict=True):
        error = abs(backend.to_numpy(array).astype(float) - wanted)
        error /= 2 if kernel == "conv2d" else 1  # rounds before the bias is added, and after
        is_rounded = kernel == "conv2d_backward_weight" and array.ndim == 4  # by cuDNN, before it is float32
        found.append(
            (error / np.where(error == 0, 1, magnitudes), np.dtype(low) if is_rounded else array.dtype)
        )
    return found


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    "case", CASES, ids=lambda case: f"{case[0]}-{case[4]}-" + "".join(map(str, case[3])).replace(" ", "")
)
def test_kernels_of_two_dtypes_add_in_float32_and_round_once(
    case: Any, precision: str, device: Device
) -> None:
    for errors, dtype in errors_of(device.backend, case, LOW_DTYPES[precision]):
        assert errors.max(initial=0) <= TOLERANCE[str(dtype)]


def error_of_long_sums(backend: Any, low: Any) -> float:
    """Return the largest error of a product over the sum of magnitudes; half of its long sums cancels the other half.

    Parts of these sums are far larger than the result, so cuBLAS may not join them in 16 bits.
    """
    a, b = (RNG.uniform(4, 8, shape).astype("f").astype(low) for shape in ((64, 1 << 16), (1 << 16, 64)))
    a[:, 1 << 15 :] *= -1
    out = backend.empty((64, 64), low)
    backend.run("matmul", backend.asarray(a), backend.asarray(b), out=out)
    a, b = a.astype(float), b.astype(float)
    errors = abs(backend.to_numpy(out).astype(float) - a @ b) / (abs(a) @ b)
    return float(np.nan_to_num(errors, nan=np.inf, posinf=np.inf).max())


@pytest.mark.parametrize("precision", PRECISIONS)
def test_long_sums_are_joined_in_float32(precision: str, device: Device) -> None:
    assert error_of_long_sums(device.backend, LOW_DTYPES[precision]) <= LONG_SUMS


@pytest.mark.parametrize("precision", PRECISIONS)
def test_layer_norm_of_16_bits_has_float32_parameters(precision: str, device: Device) -> None:
    backend, low = device.backend, LOW_DTYPES[precision]
    x, dy, scale, bias = in_dtypes([(7, 3, 150), (7, 3, 150), (150,), (150,)], 2, low)
    shapes = [(7, 3, 150), (7, 3), (7, 3)], [(7, 3, 150), (150,), (150,)]

    def run(on: Any, arrays: list[Any], made: list[list[Any]]) -> None:
        x, dy, scale, bias = arrays
        on.run("layer_norm", x, scale, bias, out=tuple(made[0]), eps=1e-5)
        on.run("layer_norm_backward", dy, x, scale, *made[0][1:], out=tuple(made[1]))

    out = [[backend.asarray(array) for array in in_dtypes(each, 1, low)] for each in shapes]
    run(backend, [backend.asarray(array) for array in (x, dy, scale, bias)], out)
    exact = [[np.zeros(shape) for shape in each] for each in shapes]
    run(CPU, [array.astype(float) for array in (x, dy, scale, bias)], exact)
    for array, wanted in zip((*out[0], *out[1]), (*exact[0], *exact[1]), strict=True):
        tolerance = 2 * TOLERANCE[str(array.dtype)] * max(1, abs(wanted).max())
        np.testing.assert_allclose(backend.to_numpy(array).astype(float), wanted, rtol=0, atol=tolerance)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_attention_takes_products_that_float16_does_not_hold(precision: str, device: Device) -> None:
    backend, low = device.backend, LOW_DTYPES[precision]
    x = RNG.standard_normal((2, 6, 3 * 32)).astype("f")
    x[..., :64] = 64 + x[..., :64] / 64  # 16 products of 64 * 64 are 65536
    x = x.astype(low)
    out, exact = backend.empty((2, 6, 32), low), np.zeros((2, 6, 32))
    backend.run("attention", backend.asarray(x), out=out, num_heads=2, causal=True)
    CPU.run("attention", x.astype(float), out=exact, num_heads=2, causal=True)
    found = backend.to_numpy(out).astype(float)
    np.testing.assert_allclose(found, exact, rtol=0, atol=8 * TOLERANCE[str(low)])


@pytest.mark.parametrize("precision", PRECISIONS)
def test_gradients_of_attention_take_products_that_float16_does_not_hold(
    precision: str, device: Device
) -> None:
    backend, low = device.backend, LOW_DTYPES[precision]
    x, dy = RNG.standard_normal((2, 6, 96)).astype("f"), RNG.standard_normal((2, 6, 32)).astype("f")
    x[..., 64:] = 64 + x[..., 64:] / 8
    x, dy = x.astype(low), (64 + dy).astype(low)  # 16 products of 64 * 64 are 65536
    out, exact = backend.empty(x.shape, low), np.zeros(x.shape)
    backend.run("attention_backward", *map(backend.asarray, (dy, x)), out=out, num_heads=2, causal=True)
    CPU.run("attention_backward", dy.astype(float), x.astype(float), out=exact, num_heads=2, causal=True)
    found = backend.to_numpy(out).astype(float)
    np.testing.assert_allclose(found, exact, rtol=0, atol=4 * TOLERANCE[str(low)] * abs(exact).max())


@pytest.mark.parametrize("dtype", ["float32", "float64", *map(str, LOW_DTYPES.values())])
def test_fused_sums_have_the_bits_of_two_kernels(dtype: str, device: Device) -> None:
    run, empty, asarray = device.backend.run, device.backend.empty, device.backend.asarray
    wide = accumulation_dtype(np.dtype(dtype))
    for rows, columns in ((1, 1), (7, 33), (40, 300)):
        a, b = (asarray(RNG.standard_normal((rows, columns)).astype(dtype)) for _ in range(2))
        row, scale, bias = (asarray(RNG.standard_normal(columns).astype(wide)) for _ in range(3))
        for other in (b, row):
            two, one = ([empty(a.shape, dtype) for _ in range(2)] for _ in range(2))
            run("add", a, other, out=two[1])
            run("gelu", two[1], out=two[0])
            run("add_gelu", a, other, out=tuple(one))
            _same_bits(device, one, two)
        two, one = (
            [empty(a.shape, dtype), *(empty((rows,), wide) for _ in range(2)), empty(a.shape, dtype)]
            for _ in range(2)
        )
        run("add", a, b, out=two[3])
        run("layer_norm", two[3], scale, bias, out=tuple(two[:3]), eps=1e-5)
        run("layer_norm", a, scale, bias, b, out=tuple(one), eps=1e-5)
        _same_bits(device, one, two)


class Block(model.Model):
    """What a transformer is made of."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norm = layer.MultiHeadAttention(2), layer.LayerNorm()
        self.up, self.down = layer.Linear(32), layer.Linear(16)
        self.last, self.out = layer.LayerNorm(), layer.Linear(5)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        x = x + self.down(autograd.gelu(self.up(self.norm(x))))
        return autograd.reshape(self.out(self.last(x)), (-1, 5))

    def train_one_batch(self, x: Tensor, labels: Tensor) -> Tensor:
        loss = autograd.softmax_cross_entropy(self.forward(x), labels)
        self.optimizer(loss)
        return loss


@pytest.mark.parametrize("precision", ["fp32", *PRECISIONS])
def test_a_recorded_transformer_has_fused_sums_and_the_bits_of_an_eager_one(
    precision: str, device: Device
) -> None:
    rng, losses = np.random.default_rng(0), []
    x = Tensor(data=rng.standard_normal((3, 7, 16)).astype("f"), device=device)
    labels = Tensor(data=rng.integers(0, 5, 21).astype("i"), device=device)
    for use_graph in (False, True):
        device.SetRandSeed(1)
        net = Block()
        communicator = LocalCommunicator(World())
        net.set_optimizer(opt.DistOpt(opt.SGD(lr=0.1), communicator=communicator, check_finite="skip"))
        net.compile([x], use_graph=use_graph, precision=precision)
        net.train()
        losses.append([net(x, labels).item() for _ in range(4)])
    assert losses[0] == losses[1]
    (info,) = net.graph_info()
    assert info.break_reason is None
    outputs = [node.count("[") for node in info.nodes if node.startswith(("layer_norm ", "add_gelu "))]
    assert (outputs.count(4), outputs.count(2)) == (2, 1)
    assert not any(node.startswith("gelu ") for node in info.nodes)


def _same_bits(device: Device, found: list[Any], wanted: list[Any]) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert device.backend.to_numpy(one).tobytes() == device.backend.to_numpy(other).tobytes()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_attention_and_its_gradients_are_rounded_once(precision: str, causal: bool, device: Device) -> None:
    backend, low, options = device.backend, LOW_DTYPES[precision], {"num_heads": 2, "causal": causal}
    for length, width in ((1, 4), (5, 32), (70, 16), (33, 6)):
        x, dy = (RNG.standard_normal((2, length, count * width)).astype(low) for count in (3, 1))
        y, dx = backend.empty(dy.shape, low), backend.empty(x.shape, low)
        backend.run("attention", backend.asarray(x), out=y, **options)
        backend.run("attention_backward", backend.asarray(dy), backend.asarray(x), out=dx, **options)
        for found, (wanted, magnitudes) in zip((y, dx), _attention(x, dy, **options), strict=True):
            errors = abs(backend.to_numpy(found).astype(float) - wanted)
            assert (
                errors <= TOLERANCE[str(low)] * magnitudes + 1e-7
            ).all()  # where float16 is subnormal: 6e-8


def _attention(
    x: np.ndarray, dy: np.ndarray, num_heads: int, causal: bool
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return y and dx in float64, each with the sums of the magnitudes of its last products' terms."""
    batch, length, width = dy.shape

    def split(array: np.ndarray, count: int) -> np.ndarray:
        return array.astype(float).reshape(batch, length, count, num_heads, -1).transpose(2, 0, 3, 1, 4)

    def join(*heads: np.ndarray) -> np.ndarray:
        return np.stack(heads).transpose(1, 3, 0, 2, 4).reshape(batch, length, len(heads) * width)

    (q, k, v), (dout,) = split(x, 3), split(dy, 1)
    scale = q.shape[-1] ** -0.5
    scores = scale * q @ k.swapaxes(-1, -2)
    if causal:
        scores = np.where(np.tri(length, dtype=bool), scores, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    dp = dout @ v.swapaxes(-1, -2)
    ds = scale * p * (dp - (p * dp).sum(-1, keepdims=True))
    grads = (ds @ k, ds.swapaxes(-1, -2) @ q, p.swapaxes(-1, -2) @ dout)
    sums = (abs(ds) @ abs(k), abs(ds).swapaxes(-1, -2) @ abs(q), p.swapaxes(-1, -2) @ abs(dout))
    return [(join(p @ v), join(p @ abs(v))), (join(*grads), join(*sums))]


def test_bfloat16_is_rounded_to_nearest_even_from_float32_and_float64(device: Device) -> None:
    backend, bits = device.backend, RNG.integers(0, 2**32, 20_000, np.uint64).astype(np.uint32)
    bits[:4096] &= np.uint32(0xFFFF0000)  # ties, and numbers that stay
    bits[:2048] |= np.uint32(0x8000)
    values = bits.view(np.float32)
    low = backend.empty(values.shape, bfloat16)
    backend.run("cast", backend.asarray(values), out=low)
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(backend.to_numpy(low).astype("f"), values.astype(bfloat16).astype("f"))
    wide = backend.empty(values.shape, np.float32)
    backend.run("cast", low, out=wide)
    np.testing.assert_array_equal(backend.to_numpy(wide), backend.to_numpy(low).astype("f"))
    one = backend.empty((1,), bfloat16)
    for value, expected in (
        (1 + 2.0**-8, 1.0),  # a tie
        (1 + 2.0**-8 + 2.0**-40, 1 + 2.0**-7),  # which float32 would make a tie
        (1 + 3 * 2.0**-8 - 2.0**-40, 1 + 2.0**-7),
        (-1 - 2.0**-8 - 2.0**-40, -1 - 2.0**-7),
        (1e300, np.inf),
        (np.nan, np.nan),
    ):
        backend.run("fill", out=one, value=value)
        np.testing.assert_array_equal(backend.to_numpy(one).astype(float), [expected])


# ---- operators ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("sample", SAMPLES, ids=[f"{n}-{sample.op}" for n, sample in enumerate(SAMPLES)])
def test_operators_compute_by_their_rules_and_give_float32_gradients(
    sample: Sample, precision: str, device: Device
) -> None:
    autograd.training = True
    is_float = [array.dtype.kind == "f" for array in sample.inputs]
    tensors = [
        Tensor(data=array, dtype="float32" if known else array.dtype, device=device, stores_grad=known)
        for array, known in zip(sample.inputs, is_float, strict=True)
    ]
    with autograd.autocast(precision):
        y = sample.call(*tensors)
    assert y.dtype == (LOW_DTYPES[precision] if sample.op in LOW else "float32")
    if sample.op != "dropout":  # whose numbers are the CPU's
        expected = np.asarray(sample.reference(*sample.inputs))
        assert abs(to_numpy(y).astype(float) - expected).max() <= 3e-2 * max(1.0, abs(expected).max())
    if sample.has_gradient:
        found = autograd.gradients(y, Tensor(data=np.ones(y.shape), dtype=y.dtype, device=device))
        assert {grad.dtype for grad in found.values()} == {np.dtype("float32")}
        assert all(np.isfinite(to_numpy(grad)).all() for grad in found.values())


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("sample", [s for s in SAMPLES if s.op in KEEP], ids=lambda sample: sample.op)
def test_activations_of_16_bits_stay_so(sample: Sample, precision: str, device: Device) -> None:
    autograd.training, low = True, LOW_DTYPES[precision]
    tensors = [
        Tensor(
            data=array if array.dtype.kind != "f" else array.astype(low),
            device=device,
            stores_grad=array.dtype.kind == "f",
        )
        for array in sample.inputs
    ]
    with autograd.autocast(precision):
        y = sample.call(*tensors)
    expected = np.asarray(
        sample.reference(
            *(
                to_numpy(tensor).astype(array.dtype)
                for tensor, array in zip(tensors, sample.inputs, strict=True)
            )
        )
    )
    assert y.dtype == low
    tolerance = 2 * TOLERANCE[str(low)] * max(1.0, abs(expected).max())
    np.testing.assert_allclose(to_numpy(y).astype(float), expected, rtol=0, atol=tolerance)
    found = autograd.gradients(y, Tensor(data=np.ones(y.shape, low), device=device))
    assert {grad.dtype for grad in found.values()} == {low}


# ---- models ---------------------------------------------------------------------------------------------------


def batch(device: Device, step: int) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(step)
    labels = rng.integers(0, 4, 8)
    x = rng.standard_normal((8, 1, 8, 8)) + labels.reshape(-1, 1, 1, 1)
    return Tensor(data=x.astype("f"), device=device), Tensor(data=labels.astype("i"), device=device)


def compiled(device: Device, use_graph: bool, precision: str, kind: type[Net] = Net, **options: Any) -> Net:
    device.SetRandSeed(3)
    net = kind()
    sgd = opt.SGD(lr=0.02, momentum=0.9)
    communicator = LocalCommunicator(World())
    net.set_optimizer(opt.DistOpt(sgd, communicator=communicator, check_finite="skip", **options))
    net.compile([batch(device, 0)[0]], use_graph=use_graph, precision=precision)
    device.SetRandSeed(8)
    return net


def everything(net: Net) -> dict[str, bytes]:
    states = {name: to_numpy(value).tobytes() for name, value in net.get_states().items()}
    return states | {name: value.tobytes() for name, value in net.optimizer.get_states().items()}


@pytest.mark.parametrize("precision", PRECISIONS)
def test_captured_steps_equal_eager_ones(precision: str, device: Device) -> None:
    losses, nets = [], []
    for use_graph in (False, True):
        net = compiled(device, use_graph, precision)
        results = [net(*batch(device, step)) for step in range(9)]
        assert {out.dtype for out, _ in results} == {LOW_DTYPES[precision]}
        losses.append([to_numpy(loss).item() for _, loss in results])
        nets.append(net)
    assert {str(value.dtype) for value in nets[0].get_states().values()} == {"float32"}
    assert sum(graph.num_launches for graph in graphs(nets[1])) >= 2
    assert nets[1].graph_info()[0].inputs.endswith(f", {precision}")
    np.testing.assert_allclose(losses[1], losses[0], rtol=0, atol=2e-2)
    assert nets[0].optimizer.num_skipped == nets[1].optimizer.num_skipped <= 4
    if no_gpu():  # a GPU may choose other algorithms
        assert everything(nets[0]) == everything(nets[1])


def curve(net: Net, device: Device, steps: int) -> list[float]:
    """The loss of each update; a batch whose update is left out comes again, at a smaller scale."""
    found: list[float] = []
    while len(found) < steps:
        skipped = net.optimizer.num_skipped
        loss = to_numpy(net(*batch(device, len(found)))[1]).item()
        if net.optimizer.num_skipped == skipped:
            found.append(loss)
    return found


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_model_that_is_restored_goes_on_with_the_same_bits(precision: str, device: Device) -> None:
    net, other = (compiled(device, True, precision) for _ in range(2))
    for step in range(12):
        if step == 5:
            other.restore(net.snapshot())
        for each in (net, other)[: 1 + (step >= 5)]:
            device.SetRandSeed(step)  # they share its random stream
            each(*batch(device, step))
    if no_gpu():
        assert everything(net) == everything(other)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_losses_follow_those_in_float32(precision: str, device: Device) -> None:
    wide, low = (curve(compiled(device, True, used, Plain), device, 15) for used in ("fp32", precision))
    np.testing.assert_allclose(low, wide, rtol=0, atol=4e-2)
    assert low != wide and low[-1] < 0.8 * low[0]


def test_a_gradient_that_float16_cannot_hold_leaves_the_update_out_and_halves_the_scale(
    device: Device,
) -> None:
    for use_graph in (False, True):
        net = compiled(device, use_graph, "fp16")
        for step in range(8):
            net(*batch(device, step))
        skipped, scale, before = net.optimizer.num_skipped, net.optimizer.loss_scale, everything(net)
        x, labels = batch(device, 8)
        net(x * 1e5, labels)
        assert (net.optimizer.num_skipped, net.optimizer.loss_scale) == (skipped + 1, scale / 2)
        after = everything(net)
        changed = {name for name in before if after[name] != before[name]}
        assert {name.rsplit(".")[-1] for name in changed} <= {"running_mean", "running_var", "finite/scale"}
        steps = net.optimizer.step_counter
        net(*batch(device, 9))
        assert net.optimizer.step_counter == steps + 1 and net.optimizer.num_skipped == skipped + 1


# ---- what is refused ------------------------------------------------------------------------------------------


def test_float16_gradients_without_a_scale_are_refused(device: Device) -> None:
    autograd.training = True
    linear, (x, labels) = layer.Linear(4), batch(device, 0)

    def cost() -> Tensor:
        with autograd.autocast("fp16"):
            y = linear(autograd.flatten(x))
        return autograd.softmax_cross_entropy(y, labels)  # in float16, outside of the block

    linear(autograd.flatten(x))
    weight = to_numpy(linear.W)
    plain = opt.DistOpt(opt.SGD(lr=1.0), communicator=LocalCommunicator(World()), check_finite="raise")
    for use in (opt.SGD(lr=1.0), plain, lambda loss: loss.backward(), autograd.gradients):
        with pytest.raises(OptionError, match=r'backward: .*check_finite="skip".*precision\.md'):
            use(cost())  # type: ignore[operator]
    np.testing.assert_array_equal(to_numpy(linear.W), weight)
    scaling = opt.DistOpt(opt.SGD(lr=1.0), communicator=LocalCommunicator(World()), check_finite="skip")
    scaling(cost())
    assert scaling.step_counter + scaling.num_skipped == 1
    small = autograd.gradients(cost(), 1.0)[linear.W]
    large = autograd.gradients(cost(), 1024.0)[linear.W]
    assert small.dtype == large.dtype == np.dtype("float32")
    np.testing.assert_allclose(to_numpy(large), 1024 * to_numpy(small), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("low", ["bf16", "fp16"])
def test_a_loss_of_several_elements_is_refused(low: str, device: Device) -> None:
    autograd.training = True
    dist = opt.DistOpt(opt.SGD(lr=1.0), communicator=LocalCommunicator(World()), check_finite="skip")
    linear = layer.Linear(4)
    with autograd.autocast(low):
        y = autograd.relu(linear(Tensor((8, 3), device)))
    with pytest.raises(ShapeError, match=r"y has shape \(8, 4\)"):
        dist(y)
    autograd.training = False


def test_an_old_gpu_or_numpy_has_no_bfloat16(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = sys.modules["singa_lite.backend.cuda.launch"]
    gpu = SimpleNamespace(compute_capability="75")
    assert "compute capability 8.0" in launch._missing_precisions(gpu)["bf16"]  # type: ignore[attr-defined]
    gpu.compute_capability = "90"

    def refuse(*_: Any) -> None:
        raise ValueError("Unsupported dtype")

    monkeypatch.setattr(launch, "cupy", SimpleNamespace(empty=refuse))
    missing = launch._missing_precisions(gpu)  # type: ignore[attr-defined]
    monkeypatch.setattr(device.backend, "missing_precisions", missing)
    with pytest.raises(DeviceError, match=r"compile: precision 'bf16' .*install NumPy 2\.1\.2"):
        compiled(device, False, "bf16")
    with pytest.raises(DTypeError, match=r"no kernels for bfloat16: cupy .* with NumPy"):
        Tensor((2,), device=device, dtype="bfloat16")
