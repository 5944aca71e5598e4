# SPDX-License-Identifier: Apache-2.0
"""nnabla's tutorial of data-parallel training, step by step: a communicator called between backward and update.

    python examples/communicator_tutorial.py                   one process
    singa-lite run -n 2 examples/communicator_tutorial.py      two processes of this machine
    mpiexec -n 2 python examples/communicator_tutorial.py      MPI, on one host or many

The objective is a mean over B * N samples. Its gradient is the mean over N processes of the gradients of B samples
each: every process computes its own (1), the sum is taken over the processes (2) and divided by their number (3).

Differs from the page where it must: data are seeded by the rank, a device is chosen by the rank among the processes of
its host, and with division=True every gradient is divided (the page's output has three of four undivided).
"""

import numpy as np

from singa_lite import autograd, communicators, device, opt, tensor

n_class = 2
b, c, h, w = 4, 1, 32, 32  # samples of each process, and the shape of one
kernel, pad = (3, 3), 1

# ---- the communicator for the exchange of gradients

comm = communicators.MultiProcessCommunicator()
comm.init()
dev = device.create_device(comm.local_rank)  # a GPU if there is one, else the CPU
print(f"n_devices={comm.size}")
print(f"mpi_rank={comm.rank}")
if comm.rank == 0:
    print(f"gradients are summed over {comm.size} processes and divided by {comm.size}")

# ---- data points: other ones in each process

data = np.random.RandomState(comm.rank)
x = tensor.Tensor(data=data.rand(b, c, h, w), device=dev)
y = tensor.Tensor(data=data.choice(n_class, b), device=dev, dtype=tensor.int32)

# ---- a very simple neural network: the same weights in each process, by one generator with one seed

rng = np.random.RandomState(0)
limit = np.sqrt(6 / (1 + 0.5))  # Glorot's, of nnabla's calc_uniform_lim_glorot(1, 1 / 2, kernel=(1, 1))
params = {
    name: tensor.Tensor(shape, dev, stores_grad=True, name=name)
    for name, shape in (
        ("conv/W", (1, c, *kernel)),
        ("conv/b", (1,)),
        ("affine/W", (c * h * w, n_class)),
        ("affine/b", (n_class,)),
    )
}
for name in ("conv/W", "affine/W"):
    params[name].copy_from_numpy(rng.uniform(-limit, limit, params[name].shape).astype(np.float32))


def forward():
    hidden = autograd.conv2d(x, params["conv/W"], params["conv/b"], padding=pad)
    pred = autograd.add_bias(
        autograd.matmul(autograd.flatten(hidden), params["affine/W"]), params["affine/b"]
    )
    return autograd.softmax_cross_entropy(pred, y)  # the mean over the samples of this process


def show(title):
    print(title)
    for name, param in params.items():
        print(name, np.array2string(tensor.to_numpy(param.grad), precision=8, threshold=20))


# ---- the solver

solver = opt.Adam(lr=0.001)
solver.set_parameters(params)

# ---- training: 1. forward, 2. zero_grad, 3. backward, 4. all_reduce (the only difference), 5. update

with autograd.record():
    loss = forward()
solver.zero_grad()
loss.backward()
print(f"loss={loss.item():.6f}")
show("gradients of this process:")

comm.all_reduce([param.grad for param in params.values()], division=True)
show("mean of the gradients of all processes:")

solver.update_all([(param, param.grad) for param in params.values()])
solver.step()
print("conv/W after the update:", np.array2string(tensor.to_numpy(params["conv/W"]).ravel(), precision=7))

# ---- the same step, with the exchange going on during backward

callback = comm.all_reduce_callback([param.grad for param in params.values()], 1 << 20, division=True)
with autograd.record():
    loss = forward()
solver.zero_grad()
loss.backward(communicator_callbacks=callback)
solver.update_all([(param, param.grad) for param in params.values()])
solver.step()
print(f"loss before the second update={loss.item():.6f}")
