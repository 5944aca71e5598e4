# SPDX-License-Identifier: Apache-2.0
"""The scheme that docs/sync.md writes as an example is one file, as printed, and trains eagerly and recorded."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from singa_lite import autograd, opt, sync
from singa_lite.errors import OptionError
from singa_lite.layer import Linear, MeanSquareError
from singa_lite.model import Model
from singa_lite.sync import find_schemes
from singa_lite.sync.buckets import Bucket
from singa_lite.tensor import Tensor, to_numpy
from tests.ranks import run_ranks

PAGE = Path(__file__).parents[2] / "docs" / "sync.md"
STEPS = 20


class Net(Model):
    """Two groups at a threshold of 20."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.loss = Linear(4), Linear(2), MeanSquareError()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(autograd.tanh(self.first(x)))

    def train_one_batch(self, x: Tensor, y: Tensor) -> Tensor:
        loss = self.loss(self.forward(x), y)
        self.optimizer(loss)
        return loss


def train(communicator: Any, folder: str) -> dict[bool, tuple[list[float], bytes, list[str | None]]]:
    """Losses, parameters and reasons of breaks, eagerly and recorded."""
    sync.__path__.append(folder)
    find_schemes.cache_clear()
    found = {}
    for use_graph in (False, True):
        net = Net()
        sgd = opt.SGD(lr=0.05, momentum=0.9)
        net.set_optimizer(opt.DistOpt(sgd, communicator=communicator, dist_option="sharedSign", threshold=20))
        net.compile([Tensor((5, 6))], use_graph=use_graph)
        start = np.random.default_rng(1)
        first = {name: start.standard_normal(p.shape) / 2 for name, p in net.get_params().items()}
        net.set_params({name: value.astype(np.float32) for name, value in first.items()})
        x = np.random.default_rng([2, communicator.rank]).standard_normal((5, 6)).astype(np.float32)
        losses = [float(to_numpy(net(Tensor(data=x), Tensor(data=x[:, :2])))[0]) for _ in range(STEPS)]
        values = b"".join(to_numpy(param).tobytes() for param in net.get_params().values())
        found[use_graph] = losses, values, [info.break_reason for info in net.graph_info()]
    sync.__path__.remove(folder)
    del sys.modules["singa_lite.sync.shared_sign"]
    find_schemes.cache_clear()
    autograd.training = False
    return found


def scheme_of_the_page() -> str:
    [source] = re.findall(r"```python\n(# SPDX.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(source.splitlines()) <= 40
    return source


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_scheme_of_the_page_trains_to_the_same_bits_eagerly_and_recorded(
    size: int, tmp_path: Path
) -> None:
    (tmp_path / "shared_sign.py").write_text(scheme_of_the_page())
    ranks = run_ranks(train, size, str(tmp_path), transport="local" if size == 1 else "shm")
    for found in ranks:
        (eager, values, _), (recorded, replayed, breaks) = found[False], found[True]
        assert eager == recorded and values == replayed == ranks[0][False][1]
        assert breaks == [None] and eager[-1] < eager[0] / 2


@pytest.mark.parametrize("size", [1, 3])
def test_numpy_in_a_scheme_that_does_not_say_is_recordable_is_never_left_out(
    size: int, tmp_path: Path
) -> None:
    source = scheme_of_the_page().replace("    is_recordable = True\n", "")
    source = source.replace('run("sign", flat, out=signs)', "signs[...] = np.sign(flat)")
    source = source.replace("from .buckets", "import numpy as np\n\nfrom .buckets")
    assert "np.sign" in source and "is_recordable" not in source
    (tmp_path / "shared_sign.py").write_text(source)
    for found in run_ranks(train, size, str(tmp_path), transport="local" if size == 1 else "shm"):
        (eager, values, _), (recorded, replayed, [reason]) = found[False], found[True]
        assert eager == recorded and values == replayed
        assert reason is not None and "set is_recordable = True in its class" in reason


def test_a_scheme_cannot_put_another_array_in_place_of_the_gradients() -> None:
    bucket = Bucket([Tensor((3,))], "w", True)
    before = bucket.flat
    bucket.flat += 2
    with pytest.raises(OptionError, match="change it in place"):
        bucket.flat = bucket.flat * 2
    assert bucket.flat is before and bucket.flat.tolist()[:3] == [2, 2, 2]
