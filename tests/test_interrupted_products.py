# SPDX-License-Identifier: Apache-2.0
"""Signals in the midst of a product: oneDNN computes it with its stack on the heap (native/common/signals.h)."""

import os
import subprocess
import sys

import pytest

from singa_lite.comm.stacks import stacks_of
from tests.limits import LIMIT_S

HANDLED = """
import signal
import numpy as np
from singa_lite import autograd, tensor

handled = []
signal.signal(signal.SIGALRM, lambda *_: handled.append(1))
signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)
a = tensor.from_numpy(np.random.default_rng(0).standard_normal((512, 512), np.float32))
while len(handled) < 200:
    autograd.matmul(a, a)
signal.setitimer(signal.ITIMER_REAL, 0)
print(len(handled) >= 200)
"""
INTERRUPTED = """
import os, signal, threading, time
import numpy as np
from singa_lite import layer, model, opt, tensor


class Net(model.Model):
    def __init__(self):
        super().__init__()
        self.hidden, self.out, self.loss = layer.Linear(512), layer.Linear(10), layer.SoftMaxCrossEntropy()

    def forward(self, x):
        return self.out(self.hidden(x))

    def train_one_batch(self, x, y):
        loss = self.loss(self.forward(x), y)
        self.optimizer(loss)
        return loss


net = Net()
net.set_optimizer(opt.SGD(0.1))
x = tensor.from_numpy(np.random.default_rng(0).standard_normal((256, 784), np.float32))
y = tensor.from_numpy(np.arange(256) % 10)
net.compile([x], use_graph=True)
net(x, y)


def interrupt():
    while True:
        time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)


threading.Thread(target=interrupt, daemon=True).start()
for _ in range(30):
    try:
        while True:
            net(x, y)
    except KeyboardInterrupt:
        pass
signal.signal(signal.SIGINT, signal.SIG_IGN)
print(True)
"""


@pytest.mark.parametrize("threads", ["1", "2"])
@pytest.mark.parametrize("text", [HANDLED, INTERRUPTED], ids=["a handler", "Ctrl-C"])
def test_signals_leave_a_process_whole(text, threads):
    # faulthandler would give the thread another stack for handlers, and hide what this is about
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONFAULTHANDLER"}
    done = subprocess.run(
        [sys.executable, "-c", text],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env={**environ, "OMP_NUM_THREADS": threads},
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


STACKS = """
import threading, time
import numpy as np
from singa_lite import autograd, tensor
from singa_lite.comm.stacks import write_stacks

write_stacks()
threading.Thread(target=time.sleep, args=[600], daemon=True).start()
a = tensor.from_numpy(np.ones((1024, 1024), np.float32))
autograd.matmul(a, a)
print("ready", flush=True)
while True:
    autograd.matmul(a, a)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="stacks are written on Linux alone")
def test_the_stack_of_the_main_thread_is_written_during_a_product():
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONFAULTHANDLER"}
    process = subprocess.Popen(
        [sys.executable, "-c", STACKS],
        stdout=subprocess.PIPE,
        text=True,
        env={**environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        assert process.stdout.readline() == "ready\n"
        for _ in range(20):
            stack = stacks_of([process.pid])[process.pid]
            assert "in <module>" in stack, stack
        assert process.poll() is None
    finally:
        process.kill()
        process.communicate()
