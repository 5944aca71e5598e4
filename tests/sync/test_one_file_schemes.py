# SPDX-License-Identifier: Apache-2.0
"""A scheme is one file, whatever it needs: of the package, and of the literature in at most 60 lines (schemes/).

One of these has an exchange that ends early. Each trains eagerly, recorded and captured on 1 to 3 ranks, against a
model in float64, and resumes bit for bit.
"""

from __future__ import annotations

import functools
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from singa_lite import autograd, layer, model, opt, sync
from singa_lite.backend.cpu.random import permuted
from singa_lite.comm.base import World
from singa_lite.comm.dispatch import DispatchCommunicator
from singa_lite.device import Device, create_cpu_device
from singa_lite.errors import OptionError
from singa_lite.sync import find_schemes
from singa_lite.sync.fp32 import Fp32
from singa_lite.sync.text import read_dist_option
from singa_lite.tensor import Tensor, to_numpy
from tests.backend.test_capture import graphs
from tests.comm.gpu_standin import host_of
from tests.devices import cuda_device_of_rank, no_gpu
from tests.limits import LIMIT_S
from tests.ranks import run_ranks
from tests.slow_cases import slow_but_first

FOLDER = Path(__file__).parent / "schemes"
SCHEMES: dict[str, dict[str, Any]] = {
    "dgc": {"density": 0.3},
    "powerSGD": {"rank": 2, "rate": 0.0},
    "localSGD": {"period": 4},
    "sign": {},
    "randomK": {"density": 0.3},
    "soonMean": {},
    "shortDgc": {"density": 0.3},
    "shortPowerSGD": {},
    "shortLocalSGD": {},
}
FIRST = tuple(SCHEMES)[:3]  # those that train each time
LR, MOMENTUM = 0.05, 0.9
STEPS = 8  # two periods of localSGD
RESUMED_AT, RESUMED_STEPS = 6, 12  # within a period
SIZES = [3, 1, 2]


def put_beside_the_packages_own() -> None:
    if str(FOLDER) not in sync.__path__:
        sync.__path__.append(str(FOLDER))
        find_schemes.cache_clear()


@pytest.fixture(autouse=True)
def schemes(standin_libraries: None) -> Any:
    put_beside_the_packages_own()
    yield
    sync.__path__.remove(str(FOLDER))
    find_schemes.cache_clear()
    autograd.training = False


class Net(model.Model):
    """Three matrices and three vectors, in two groups at a threshold of 40."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = layer.Linear(8), layer.Linear(4), layer.Linear(3)
        self.loss = layer.MeanSquareError()

    def forward(self, x: Tensor) -> Tensor:
        return self.third(autograd.tanh(self.second(autograd.tanh(self.first(x)))))

    def train_one_batch(self, x: Tensor, y: Tensor) -> Tensor:
        loss = self.loss(self.forward(x), y)
        self.optimizer(loss)
        return loss


def batch(device: Device, rank: int, step: int) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng([rank, step])
    x, y = rng.standard_normal((5, 6)).astype(np.float32), rng.standard_normal((5, 3)).astype(np.float32)
    return Tensor(data=x, device=device), Tensor(data=y, device=device)


def compiled(device: Device, communicator: Any, name: str, use_graph: bool) -> Net:
    net = Net()
    sgd = opt.SGD(lr=LR, momentum=MOMENTUM)
    net.set_optimizer(
        opt.DistOpt(sgd, communicator=communicator, dist_option=name, threshold=40, **SCHEMES[name])
    )
    net.compile([batch(device, 0, 0)[0]], use_graph=use_graph)
    rng = np.random.default_rng(2)
    net.set_params(
        {name: rng.standard_normal(p.shape).astype(np.float32) / 2 for name, p in net.get_params().items()}
    )
    return net


def values(net: Net) -> dict[str, np.ndarray]:
    return {name: to_numpy(value) for name, value in net.get_params().items()} | net.optimizer.get_states()


def train_by(world: World, names: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """What ``train`` returns for each of these schemes, one after the other in one world."""
    put_beside_the_packages_own()
    communicator = DispatchCommunicator(host_of(world))
    found = {name: train(communicator, name) for name in names}
    communicator.close()
    return found


def train(communicator: DispatchCommunicator, name: str) -> dict[str, Any]:
    """Where a rank is after each step: eager and recorded on the CPU, eager and captured on a GPU; and resumed."""
    found: dict[str, Any] = {}
    devices = {"cpu": create_cpu_device(), "gpu": cuda_device_of_rank()}
    for where, device in devices.items():
        for use_graph in (False, True):
            net = compiled(device, communicator, name, use_graph)
            log = found[f"{where} {'graph' if use_graph else 'eager'}"] = [values(net)]
            for step in range(STEPS + 1):
                net(*batch(device, communicator.rank, step))
                log.append(values(net))
            if use_graph:
                found[f"{where} breaks"] = [info.break_reason for info in net.graph_info()]
    found["launches"] = sum(graph.num_launches for graph in graphs(net))
    whole, second = (compiled(devices["cpu"], communicator, name, True) for _ in range(2))
    for step in range(RESUMED_STEPS):
        if step == RESUMED_AT:
            second.set_states({key: to_numpy(value) for key, value in whole.get_states().items()})
            second.optimizer.set_states(whole.optimizer.get_states())
            whole.graph(True)  # as saving does
        for net in (whole, second)[: 1 + (step >= RESUMED_AT)]:
            net(*batch(devices["cpu"], communicator.rank, step))
    found["resumed"] = [
        {key: value.tobytes() for key, value in values(net).items()} for net in (whole, second)
    ]
    autograd.training = False
    return found


@functools.cache
def trained(size: int, names: tuple[str, ...]) -> list[dict[str, dict[str, Any]]]:
    return run_ranks(train_by, size, names, transport="none", timeout_s=LIMIT_S)


# ---- the same in float64 ------------------------------------------------------------------------------------------


def gradients(params: dict[str, np.ndarray], rank: int, step: int) -> dict[str, np.ndarray]:
    """Of Net, by hand."""
    x, y = (to_numpy(t).astype(np.float64) for t in batch(create_cpu_device(), rank, step))
    h1 = np.tanh(x @ params["first.W"] + params["first.b"])
    h2 = np.tanh(h1 @ params["second.W"] + params["second.b"])
    out = h2 @ params["third.W"] + params["third.b"]
    d3 = 2 * (out - y) / y.size
    d2 = d3 @ params["third.W"].T * (1 - h2**2)
    d1 = d2 @ params["second.W"].T * (1 - h1**2)
    found = {}
    for name, inputs, d in (("first", x, d1), ("second", h1, d2), ("third", h2, d3)):
        found |= {f"{name}.W": inputs.T @ d, f"{name}.b": d.sum(axis=0)}
    return found


GROUPS = [["first.W"], ["third.b", "third.W", "second.b", "second.W"], ["first.b"]]


class Reference:
    """N ranks of a scheme, one after the other."""

    def __init__(self, name: str, size: int, start: dict[str, np.ndarray]) -> None:
        self.name, self.size = name, size
        self.params = [{k: v.astype(np.float64) for k, v in start.items()} for _ in range(size)]
        zeros = {k: np.zeros(v.shape) for k, v in start.items()}
        self.kept = [{slot: {k: v.copy() for k, v in zeros.items()} for slot in "muve"} for _ in range(size)]
        factor = find_schemes()["powerSGD"].slots["q"]
        tensors = {k: Tensor(v.shape, name=k) for k, v in start.items()}
        self.q = {k: factor.start(t)[:2].T.astype(np.float32).astype(np.float64) for k, t in tensors.items()}

    def step(self, number: int) -> None:
        self.number = number
        grads = [gradients(params, rank, number) for rank, params in enumerate(self.params)]
        applied = getattr(self, self.name)(grads)
        for params, kept, of_rank in zip(self.params, self.kept, applied, strict=True):
            for key, grad in of_rank.items():
                kept["m"][key] = (0.0 if self.name in ("dgc", "shortDgc") else MOMENTUM) * kept["m"][
                    key
                ] + grad
                params[key] -= LR * kept["m"][key]
        if self.name in ("localSGD", "shortLocalSGD") and number % 4 == 3:
            means = {key: np.mean([params[key] for params in self.params], axis=0) for key in self.params[0]}
            self.params = [{key: value.copy() for key, value in means.items()} for _ in self.params]

    def localSGD(self, grads: Any) -> Any:
        return grads

    def soonMean(self, grads: Any) -> Any:
        return [{key: np.mean([g[key] for g in grads], axis=0) for key in grads[0]}] * self.size

    def dgc(self, grads: Any) -> Any:
        result = {key: np.zeros(value.shape) for key, value in grads[0].items()}
        for kept, of_rank in zip(self.kept, grads, strict=True):
            for key, grad in of_rank.items():
                kept["u"][key] = MOMENTUM * kept["u"][key] + grad
                kept["v"][key] += kept["u"][key]
            for group in GROUPS:
                flat = np.concatenate([kept["v"][key].ravel() for key in group])
                k = -(-len(flat) * 3 // 10)
                chosen = np.zeros(len(flat), bool)
                chosen[np.argsort(-np.abs(flat), kind="stable")[:k]] = True
                for key in group:
                    part, chosen = (
                        chosen[: result[key].size].reshape(result[key].shape),
                        chosen[result[key].size :],
                    )
                    result[key] += np.where(part, kept["v"][key], 0) / self.size
                    kept["u"][key][part] = kept["v"][key][part] = 0
        return [result] * self.size

    def randomK(self, grads: Any) -> Any:
        result = {key: np.zeros(value.shape) for key, value in grads[0].items()}
        for group in GROUPS:
            sizes = [result[key].size for key in group]
            seed, n = zlib.crc32(", ".join(group).encode()), sum(sizes)
            chosen = np.zeros(n, bool)
            chosen[permuted(np.arange(-(-n * 3 // 10)), n, seed, self.number).astype(int)] = True
            for key, part in zip(group, np.split(chosen, np.cumsum(sizes)[:-1]), strict=True):
                for kept, of_rank in zip(self.kept, grads, strict=True):
                    p, is_sent = of_rank[key] + kept["e"][key], part.reshape(result[key].shape)
                    result[key] += np.where(is_sent, p, 0) / self.size
                    kept["e"][key] = np.where(is_sent, 0, p)
        return [result] * self.size

    def sign(self, grads: Any) -> Any:
        result = {key: np.zeros(value.shape) for key, value in grads[0].items()}
        for kept, of_rank in zip(self.kept, grads, strict=True):
            for key, grad in of_rank.items():
                p = grad + kept["e"][key]
                sent = np.abs(p).mean() * np.where(p >= 0, 1, -1)
                result[key] += sent / self.size
                kept["e"][key] = p - sent
        return [result] * self.size

    def powerSGD(self, grads: Any) -> Any:
        result = {}
        for key in grads[0]:
            ms = [grads[rank][key] + self.kept[rank]["e"][key] for rank in range(self.size)]
            if ms[0].ndim == 1:
                result[key] = np.mean(ms, axis=0)
                continue
            p, _ = np.linalg.qr(np.mean([m @ self.q[key] for m in ms], axis=0))
            qs = [m.T @ p for m in ms]
            for rank, m in enumerate(ms):
                self.kept[rank]["e"][key] = m - p @ qs[rank].T
            self.q[key] = np.mean(qs, axis=0)
            signs = np.sign(np.diag(self.q[key].T @ self.q[key]))
            result[key] = p @ self.q[key].T * signs[0] ** 2
        return [result] * self.size

    shortDgc, shortPowerSGD, shortLocalSGD = dgc, powerSGD, localSGD


@pytest.mark.skipif(not no_gpu(), reason="there is a GPU: ranks of this test share the stand-in")
@slow_but_first("size", SIZES)
@slow_but_first("name", SCHEMES, count=len(FIRST))
def test_a_scheme_in_one_file_trains_in_every_mode_on_every_world(name: str, size: int) -> None:
    names = FIRST if name in FIRST else tuple(SCHEMES)[len(FIRST) :]
    found = [of_rank[name] for of_rank in trained(size, names)]
    params = [key for key in found[0]["cpu eager"][0] if "." in key and ":" not in key and "/" not in key]
    reference = Reference(name, size, {key: found[0]["cpu eager"][0][key] for key in params})
    for step in range(STEPS):
        reference.step(step)
        for rank, of_rank in enumerate(found):
            for mode in ("cpu eager", "cpu graph", "gpu eager", "gpu graph"):
                for key in params:
                    np.testing.assert_allclose(
                        of_rank[mode][step + 1][key],
                        reference.params[rank][key],
                        rtol=2e-3,
                        atol=2e-4,
                        err_msg=f"{mode}, step {step}, {key}",
                    )
    for of_rank in found:
        for key, value in of_rank["gpu eager"][-1].items():
            np.testing.assert_array_equal(of_rank["gpu graph"][-1][key], value, key)
        assert of_rank["cpu breaks"] == [None] * len(of_rank["cpu breaks"]) and of_rank["cpu breaks"]
        assert of_rank["gpu breaks"] == of_rank["cpu breaks"] and of_rank["launches"] >= 4
        assert of_rank["resumed"][0] == of_rank["resumed"][1]
        for key in params:
            if name not in ("localSGD", "shortLocalSGD"):
                assert of_rank["cpu graph"][-1][key].tobytes() == found[0]["cpu graph"][-1][key].tobytes()


def test_each_scheme_is_one_file_of_at_most_sixty_lines() -> None:
    lines = {path.stem: len(path.read_text().splitlines()) for path in FOLDER.glob("*.py")}
    assert len(lines) == 4 and max(lines.values()) <= 60, lines


def test_momentum_is_taken_over_from_optimizers_that_have_one() -> None:
    from singa_lite.comm.local import LocalCommunicator

    local = LocalCommunicator(World())
    for optimizer, reason in (
        (opt.Adam(), "Adam: has no momentum"),
        (opt.SGD(momentum=0.9, dampening=0.1), "SGD: dampening = 0.1"),
    ):
        with pytest.raises(OptionError, match=reason):
            opt.DistOpt(optimizer, communicator=local, dist_option="dgc")
        net = compiled(create_cpu_device(), local, "localSGD", False)
        net.set_optimizer(opt.DistOpt(optimizer, communicator=local))
        net.optimizer.dist_option = "dgc"
        with pytest.raises(OptionError, match=reason):
            net(*batch(create_cpu_device(), 0, 0))
        net.optimizer.dist_option = "fp32"  # which goes on, as nothing has changed
        net(*batch(create_cpu_device(), 0, 0))


def test_options_of_a_scheme_are_its_own() -> None:
    from singa_lite.comm.local import LocalCommunicator

    local = LocalCommunicator(World())
    with pytest.raises(OptionError, match="dgc has no option period; its options are density, warmup"):
        opt.DistOpt(communicator=local, dist_option="dgc", period=3)
    with pytest.raises(OptionError, match="period = 0"):
        opt.DistOpt(communicator=local, dist_option="localSGD", period=0)
    with pytest.raises(OptionError, match="fp32 has no option clip_value; it has no options"):
        opt.DistOpt(communicator=local, clip_value=1.0)


MADE = """
from dataclasses import dataclass
from typing import Literal
from singa_lite.sync.fp32 import Fp32


class Made(Fp32):
    {names}

    @dataclass(frozen=True)
    class Options:
        way: Literal["in", "out"] = "in"
        share: Literal["auto"] | float | None = None
        sizes: tuple[int, ...] = ()

    {init}
"""


@pytest.fixture
def made(tmp_path: Path) -> Any:
    """A function that puts one more scheme beside the package's own, in a file of its own."""
    found: list[str] = []

    def make(names: str = "", init: str = "") -> None:
        found.append(f"made_{len(found)}")
        (tmp_path / f"{found[-1]}.py").write_text(MADE.format(names=names, init=init))
        find_schemes.cache_clear()

    sync.__path__.append(str(tmp_path))
    yield make
    sync.__path__.remove(str(tmp_path))
    for name in found:
        sys.modules.pop(f"singa_lite.sync.{name}", None)
    find_schemes.cache_clear()


def test_a_class_without_names_of_its_own_leaves_those_of_its_base_class_alone(made: Any) -> None:
    made()
    assert find_schemes()["fp32"] is find_schemes()["plain"] is Fp32


def test_a_name_of_two_schemes_is_an_error_with_both(made: Any) -> None:
    made('names = ("one", "fp32")')
    with pytest.raises(OptionError, match=r"'fp32' is among the names of .*fp32.Fp32 and of .*made_0.Made"):
        opt.DistOpt(opt.SGD())


@pytest.mark.parametrize("names", ['"abc"', "(1,)", '["abc"]', '("",)'])
def test_names_that_are_no_tuple_of_texts_are_an_error(made: Any, names: str) -> None:
    made(f"names = {names}")
    with pytest.raises(OptionError, match=r"made_0.Made: names must be a tuple of texts, got "):
        find_schemes()


def test_a_text_gives_a_choice(made: Any) -> None:
    made('names = ("made",)')
    for text, options in {
        "made:out": {"way": "out"},
        "made:in:share=auto": {"way": "in", "share": "auto"},
        "made:share=0.5": {"share": 0.5},
        "made:share=none": {"share": None},
    }.items():
        assert read_dist_option(text).options == options
        opt.DistOpt(opt.SGD(), dist_option=text)
        opt.DistOpt(opt.SGD(), dist_option="made", **options)
    for text, error in {
        "made:up": "way = 'up', expected 'in' or 'out'; write made",
        "made:share=x": "share = 'x', expected 'auto' or float or None; write made",
        "made:sizes=3": "gives sizes, a tuple.*, which is no text; give it by name",
    }.items():
        with pytest.raises(OptionError, match=error):
            opt.DistOpt(opt.SGD(), dist_option=text)
    with pytest.raises(OptionError, match="way = 'up' is not known; choose one of 'in', 'out'"):
        opt.DistOpt(opt.SGD(), dist_option="made", way="up")


@pytest.mark.parametrize("text", ["made", "hierarchical:made"])
def test_an_init_without_the_base_classes_is_an_error_that_says_so(made: Any, text: str) -> None:
    made('names = ("made",)', "Options = Fp32.Options; __init__ = lambda self, *arguments: None")
    net = Net()
    net.set_optimizer(opt.DistOpt(opt.SGD(), dist_option=text))
    net.compile([batch(create_cpu_device(), 0, 0)[0]])
    with pytest.raises(OptionError, match=r"Made: its __init__ must call super\(\).__init__"):
        net(*batch(create_cpu_device(), 0, 0))
