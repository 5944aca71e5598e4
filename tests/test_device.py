# SPDX-License-Identifier: Apache-2.0
"""Devices: which there are, what is said where one is missing, and the same training on each kind."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from singa_lite import autograd, device, layer, model, opt, singa_wrap
from singa_lite._native import load
from singa_lite.config import state
from singa_lite.device import Device, get_default_device
from singa_lite.errors import DeviceError, OptionError
from singa_lite.tensor import Tensor, to_numpy
from tests.devices import cuda_device, no_gpu, standin_cupy
from tests.limits import LIMIT_S

STEPS = 12


class Perceptron(model.Model):
    """Linear layers, so that it needs no cuDNN."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = layer.Linear(16), layer.Linear(4)
        self.relu, self.loss = layer.ReLU(), layer.SoftMaxCrossEntropy()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.relu(self.first(x)))

    def train_one_batch(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        out = self.forward(x)
        loss = self.loss(out, y)
        self.optimizer(loss)
        return out, loss


def losses_on(where: Device, dtype: str, use_graph: bool, optimizer: opt.Optimizer) -> list[float]:
    """Losses of a training whose tensors name their device, from the same weights on every device."""
    rng = np.random.default_rng(8)
    weights = {
        "first.W": (6, 16), "first.b": (16,), "second.W": (16, 4), "second.b": (4,)
    }  # fmt: skip
    net = Perceptron()
    net.set_optimizer(optimizer)
    x, y = Tensor((8, 6), where, dtype), Tensor((8,), where, "int32")
    net.compile([x], use_graph=use_graph)
    values = {name: (0.5 * rng.standard_normal(shape)).astype(dtype) for name, shape in weights.items()}
    net.set_params({name: Tensor(data=value, device=where, dtype=dtype) for name, value in values.items()})
    found = []
    for _ in range(STEPS):
        labels = rng.integers(0, 4, 8)
        x.copy_from_numpy((rng.standard_normal((8, 6)) + labels[:, None]).astype(dtype))
        y.copy_from_numpy(labels.astype("int32"))
        out, loss = net(x, y)
        assert out.device is where and loss.dtype == dtype
        found.append(float(loss))
    assert net.get_params()["first.W"].device is where
    return found


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Device:
    return cuda_device(monkeypatch)


@pytest.mark.parametrize("use_graph", [False, True])
@pytest.mark.parametrize(
    ("make", "dtype", "rtol"),
    [
        (lambda: opt.SGD(0.1, momentum=0.9), "float32", 1e-3),
        (lambda: opt.SGD(0.1, momentum=0.9), "float16", 5e-2),
        (lambda: opt.Adam(0.01), "float32", 1e-3),  # float16 cannot hold its eps of 1e-8
    ],
)
def test_training_is_the_same_on_cpu_and_gpu(make, dtype, rtol, use_graph, cuda):  # type: ignore[no-untyped-def]
    with np.errstate(all="ignore"):
        expected = losses_on(get_default_device(), dtype, use_graph, make())
    assert expected[-1] < 0.7 * expected[0]
    np.testing.assert_allclose(losses_on(cuda, dtype, use_graph, make()), expected, rtol=rtol)


def test_tensors_of_two_devices_are_not_mixed_silently(cuda: Device) -> None:
    one, other = Tensor((2,)), Tensor((2,), cuda)
    with pytest.raises(DeviceError):
        one + other
    with pytest.raises(DeviceError):
        autograd.add(one, other)
    one.to_device(cuda)
    np.testing.assert_array_equal(to_numpy(one + other), 0)


def test_devices_of_one_number_are_one(cuda: Device) -> None:
    assert cuda.id() == 0 and repr(cuda) == "Device(cuda:0)" and cuda.kind == "cuda"
    if no_gpu():
        with standin_cupy():
            first, second = device.create_cuda_gpus(2)
            assert device.create_device(3) is second and device.create_cuda_gpu() is first is cuda
            x = [Tensor(data=np.full(3, float(n)), device=where) for n, where in enumerate((first, second))]
            for _ in range(2):  # each call finds the other device current
                assert [to_numpy(t * t).tolist() for t in x] == [[0] * 3, [1] * 3]


@pytest.mark.skipif(not no_gpu(), reason="asks the stand-in")
def test_what_gpus_there_are() -> None:
    with standin_cupy():
        assert device.get_num_gpus() == 2 and device.get_gpu_ids() == [0, 1] and singa_wrap.USE_CUDA
        assert device.get_gpu_mem_size(1) == (3 << 30, 4 << 30)
        assert "name: stand-in" in device.device_query(0) and "warpSize" in device.device_query(
            0, verbose=True
        )
        with pytest.raises(DeviceError, match=r"create_cuda_gpu_on\(2\): this machine has GPUs 0 \.\. 1"):
            device.create_cuda_gpu_on(2)
        with pytest.raises(DeviceError, match=r"0 \.\. 1"):
            device.create_cuda_gpu_on(True)


@pytest.mark.skipif(not no_gpu(), reason="asks the stand-in")
def test_a_cupy_that_is_too_old_is_an_error_with_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    with standin_cupy():
        import cupy

        monkeypatch.setattr(cupy, "__version__", "13.6.0")
        monkeypatch.setattr(state, "cuda_devices", {})
        for make in (device.create_cuda_gpu, device.create_device):
            with pytest.raises(
                DeviceError, match=r"expected cupy 14 or later, got 13\.6\.0: pip install 'singa-lite"
            ):
                make()
        assert not state.cuda_devices


@pytest.mark.skipif(not no_gpu(), reason="needs a machine without a GPU")
@pytest.mark.parametrize(
    "what", ["create_cuda_gpu()", "create_cuda_gpus(2)", "get_gpu_mem_size(0)", "device_query(0)"]
)
def test_without_a_gpu_the_error_names_what_is_missing_and_the_way_out(what: str) -> None:
    with pytest.raises(
        DeviceError, match=r"(cupy|driver|GPU).*; device\.create_device\(local_rank\) takes a GPU"
    ):
        eval(f"device.{what}")
    assert device.get_num_gpus() == 0 and device.get_gpu_ids() == []
    assert device.create_device(1) is get_default_device()


def test_importing_the_package_does_not_import_cupy() -> None:
    code = (
        "import sys, singa_lite; sys.exit('cupy' in sys.modules or 'singa_lite.backend.cuda' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=LIMIT_S, check=False).returncode == 0


@pytest.mark.skipif(load("_kernels")[0] is None, reason="no compiled kernels, so no threads")
def test_num_threads_are_those_of_the_calling_thread() -> None:
    before = device.get_num_threads()
    try:
        device.set_num_threads(1024)
        device.set_num_threads(3)
        seen = [device.get_num_threads()]
        other = threading.Thread(target=lambda: seen.append(device.get_num_threads()))
        other.start()
        other.join()
    finally:
        device.set_num_threads(before)
    assert seen == [3, before] and device.get_num_threads() == before
    for wrong in (0, -1, 1.5, True, "2", 1025, 1 << 70):
        with pytest.raises(OptionError, match="set_num_threads: num"):
            device.set_num_threads(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [(2**64, 0), (0, 2**64), (-1, 0), (0,), 3, "01"])
def test_a_random_state_is_two_numbers_that_a_checkpoint_holds(wrong):
    cpu = device.get_default_device()
    before = cpu.get_random_state()
    with pytest.raises(OptionError, match="set_random_state: "):
        cpu.set_random_state(wrong)
    assert cpu.get_random_state() == before


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (partial(device.set_num_threads, device.get_num_threads()), "it sets the number of threads"),
        (lambda: device.allow_tf32(False), "it sets whether TF32 is allowed"),
        (device.benchmark_convolutions, "it sets how convolutions choose their algorithms"),
    ],
)
def test_settings_of_devices_make_a_step_eager(change: Callable[[], None], reason: str) -> None:
    class Sets(model.Model):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2.0

        def train_one_batch(self, x: Tensor) -> Tensor:
            change()
            return x * 2.0

    net = Sets()
    net.compile([x := Tensor((2,))], use_graph=True)
    net(x)
    assert str(net.graph_info()[0].break_reason).startswith(reason)
