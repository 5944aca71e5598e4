# SPDX-License-Identifier: Apache-2.0
"""Recording a step on the CPU, also a second one of another batch size, needs no more memory than replays do.

Nor do the models that a script has dropped keep theirs.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest

from singa_lite import autograd, layer, model, opt, tensor
from tests.limits import LIMIT_S

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc of Linux")

# Twelve activations of 4 MB each, kept for backward, and little else.
CODE = """
import json, sys
import numpy as np
from singa_lite import autograd, layer, model, opt, tensor

class Net(model.Model):
    def __init__(self):
        super().__init__()
        self.first, self.last = layer.Linear(256), layer.Linear(8)

    def forward(self, x):
        x = self.first(x)
        for _ in range(12):
            x = autograd.sigmoid(x)
        return self.last(x)

    def train_one_batch(self, x, labels):
        loss = autograd.softmax_cross_entropy(self.forward(x), labels)
        self.optimizer(loss)
        return loss

def megabytes(name):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name))

def train(size, steps):
    for _ in range(steps):
        net(tensor.from_numpy(x[:size]), tensor.from_numpy(labels[:size]))

net, x = Net(), np.random.default_rng(0).standard_normal((4096, 256)).astype(np.float32)
labels = np.zeros(4096, np.int32)
net.set_optimizer(opt.SGD(lr=0.1))
net.compile([tensor.from_numpy(x)], use_graph=True)
before = megabytes("VmHWM")
found = []
for size in 4096, 4000, 4096:
    train(size, 3)
    found.append(megabytes("VmHWM") - before)
net.save_states(sys.argv[1])
train(4096, 3)  # the first of them eagerly
found.append(megabytes("VmHWM") - before)
print(json.dumps([megabytes("VmRSS") - before, *found]))
"""


def test_the_peak_is_that_of_replays(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE, tmp_path / "net.zip"], capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stderr
    replays, first, *later = json.loads(done.stdout)
    assert replays > 40
    assert max(later) < first * 1.1
    assert first < replays * 1.1


class Wide(model.Model):
    def __init__(self) -> None:
        super().__init__()
        self.linear = layer.Linear(1024)

    def forward(self, x: tensor.Tensor) -> tensor.Tensor:
        return autograd.sigmoid(autograd.sigmoid(self.linear(x)))

    def train_one_batch(self, x: tensor.Tensor, labels: tensor.Tensor) -> tensor.Tensor:
        loss = autograd.mse_loss(self.forward(x), labels)
        self.optimizer(loss)
        return loss


def test_a_model_that_was_dropped_goes_when_a_large_one_is_recorded() -> None:
    x = tensor.from_numpy(np.zeros((2048, 8), np.float32))
    labels = tensor.from_numpy(np.zeros((2048, 1024), np.float32))
    dropped: list[weakref.ref[Wide]] = []
    gc.disable()
    try:
        for _ in range(3):
            net = Wide()
            net.set_optimizer(opt.SGD(lr=0.1))
            net.compile([x], use_graph=True)
            for _ in range(3):
                net(x, labels)
            assert net.graph_info()[0].num_bytes >= 16 << 20
            assert not any(old() for old in dropped)
            dropped.append(weakref.ref(net))
            del net
    finally:
        gc.enable()
