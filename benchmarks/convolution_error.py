# SPDX-License-Identifier: Apache-2.0
"""Rounding error of convolutions and their gradients in float32, beside PyTorch's.

    python benchmarks/convolution_error.py --torch-python ~/torch/bin/python

Images are the positive part of normal numbers, weights normal and scaled as for ReLU, gradients normal. Printed: root
mean square of the difference from numpy's result in float64, as a share of that of the result.
"""

import argparse
import os
import subprocess
import sys
import tempfile

import numpy as np

SHAPES = (  # batch, channels, outputs, height and width
    (32, 64, 64, 32),
    (32, 128, 128, 16),
    (32, 512, 512, 4),
    (64, 32, 32, 16),
)
GEOMETRY = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "groups": 1}


def operands(shape: tuple[int, ...], dtype: str) -> tuple[np.ndarray, ...]:
    """Return x, w and dy, whose numbers are those of a float32."""
    batch, channels, outputs, size = shape
    rng = np.random.default_rng(0)
    x = np.maximum(rng.standard_normal((batch, channels, size, size), "f"), 0)
    w = rng.standard_normal((outputs, channels, 3, 3), "f") * np.float32((2 / (9 * channels)) ** 0.5)
    return tuple(
        array.astype(dtype) for array in (x, w, rng.standard_normal((batch, outputs, size, size), "f"))
    )


def ours(shape: tuple[int, ...], dtype: str) -> list[np.ndarray]:
    """Return the convolution and the gradients of x and w; in float64 they are numpy's."""
    from singa_lite.backend.cpu import CpuBackend

    x, w, dy = operands(shape, dtype)
    results = [np.empty_like(array) for array in (dy, x, w)]
    backend = CpuBackend()
    backend.run("conv2d", x, w, out=results[0], **GEOMETRY)
    backend.run("conv2d_backward_data", dy, w, out=results[1], **GEOMETRY)
    backend.run("conv2d_backward_weight", dy, x, out=results[2], **GEOMETRY)
    return results


def torchs(shape: tuple[int, ...]) -> list[np.ndarray]:
    """Return the same by PyTorch."""
    import torch

    x, w, dy = map(torch.from_numpy, operands(shape, "f"))
    y = torch.conv2d(x.requires_grad_(), w.requires_grad_(), padding=1)
    y.backward(dy)
    return [tensor.detach().numpy() for tensor in (y, x.grad, w.grad)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--torch-python", default=sys.executable, help="a Python that has PyTorch")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        for number, shape in enumerate(SHAPES):
            np.savez(os.path.join(arguments.worker, f"{number}.npz"), *torchs(shape))
        return
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([arguments.torch_python, __file__, "--worker", folder], check=True)
        print("batch, channels, outputs, size      y: ours PyTorch     dx: ours PyTorch     dw: ours PyTorch")
        for number, shape in enumerate(SHAPES):
            with np.load(os.path.join(folder, f"{number}.npz")) as file:
                theirs = [file[name] for name in file.files]
            errors = []
            for exact, *results in zip(ours(shape, "d"), ours(shape, "f"), theirs, strict=True):
                errors += [np.sqrt(np.mean((got - exact) ** 2) / np.mean(exact**2)) for got in results]
            print(f"{shape!s:30}" + "".join(f"{error:10.1e}" for error in errors), flush=True)


if __name__ == "__main__":
    main()
