# SPDX-License-Identifier: Apache-2.0
"""Every kernel of every device against a plain float64 reference, and the form every kernel keeps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from singa_lite.backend.base import KERNELS, Backend, is_kernel
from singa_lite.backend.cpu import CpuBackend, NumpyBackend
from singa_lite.backend.formulas import FORMULAS, Formula
from singa_lite.device import Device
from singa_lite.errors import OptionError, ShapeError
from singa_lite.graph.memory import Memory, View, address_of, root_of, view_of

RNG = np.random.default_rng(20)
TOLERANCE = {"float16": 2e-3, "float32": 2e-6, "float64": 1e-12}


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape)


def positive(*shape: int) -> np.ndarray:
    return RNG.uniform(0.3, 2.0, shape)


@dataclass
class Sample:
    """One call: float64 inputs (integer ones stay as they are) and the expected outputs."""

    kernel: str
    inputs: tuple[Any, ...]
    expected: tuple[Any, ...]  # an integer or bool array fixes that output's dtype
    attributes: dict[str, Any] = field(default_factory=dict)
    before: tuple[Any, ...] | None = None  # of a kernel that works in place
    num_narrow: tuple[int, int] | None = (
        None  # so many inputs and outputs may be float16, the others are then float32
    )

    def arrays(self, dtype: str) -> tuple[list[Any], list[Any]]:
        """Inputs, and outputs as they are before the call."""
        starts = self.before or tuple(np.full(array.shape, 99, array.dtype) for array in self.expected)
        return tuple(  # type: ignore[return-value]
            [
                in_dtype(array, "float32" if dtype == "float16" and index >= narrow else dtype)
                for index, array in enumerate(arrays)
            ]
            for arrays, narrow in zip((self.inputs, starts), self.num_narrow or (99, 99), strict=True)
        )


X, Y, P = normal(2, 3, 4), normal(3, 1), positive(2, 3, 4)
IMAGE = normal(2, 6, 5, 7)
IN_PAIRS = np.stack([IMAGE[:, ::2], IMAGE[:, 1::2]], -1).reshape(IMAGE.shape)
DY = normal(2, 3, 4)
PLACES = np.array([2, 0, 2], np.int32)
SIGMOID = 1 / (1 + np.exp(-X))


def im2col_free_conv(x, w, b, stride, padding, dilation, groups):  # type: ignore[no-untyped-def]
    """Convolution by its definition, one output element at a time."""
    (ph, pw), (sh, sw), (dh, dw) = padding, stride, dilation
    x = np.pad(x, ((0, 0), (0, 0), (ph, ph), (pw, pw)))
    (n, _, h, wid), (o, cg, kh, kw) = x.shape, w.shape
    oh, ow = (h - dh * (kh - 1) - 1) // sh + 1, (wid - dw * (kw - 1) - 1) // sw + 1
    y = np.zeros((n, o, oh, ow))
    for k in range(o):
        first = k // (o // groups) * cg
        for i in range(oh):
            for j in range(ow):
                rows = slice(i * sh, i * sh + dh * (kh - 1) + 1, dh)
                columns = slice(j * sw, j * sw + dw * (kw - 1) + 1, dw)
                y[:, k, i, j] = (x[:, first : first + cg, rows, columns] * w[k]).sum((1, 2, 3)) + b[k]
    return y


def vjp(function, x, dy):  # type: ignore[no-untyped-def]
    """dy . d function/dx for a function that is linear in x: exact up to rounding."""
    grads = np.zeros(x.size)
    for i in range(x.size):
        unit = np.zeros(x.size)
        unit[i] = 1
        grads[i] = (dy * function(unit.reshape(x.shape))).sum()
    return grads.reshape(x.shape)


def conv_samples(**geometry: Any) -> list[Sample]:
    groups = geometry["groups"]
    x, w, b = normal(2, 4, 6, 7), normal(6, 4 // groups, 3, 2), normal(6)
    zero = np.zeros(6)

    def conv(x, w, b=zero):  # type: ignore[no-untyped-def]
        return im2col_free_conv(x, w, b, **geometry)

    y = conv(x, w, b)
    dy = normal(*y.shape)
    return [
        Sample("conv2d", (x, w, b), (y,), geometry),
        Sample("conv2d", (x, w), (conv(x, w),), geometry),
        Sample("conv2d_backward_data", (dy, w), (vjp(lambda t: conv(t, w), x, dy),), geometry),
        Sample(
            "conv2d_backward_weight",
            (dy, x),
            (vjp(lambda t: conv(x, t), w, dy), dy.sum((0, 2, 3))),
            geometry,
        ),
        Sample("conv2d_backward_weight", (dy, x), (vjp(lambda t: conv(x, t), w, dy),), geometry),
    ]


def pool_samples(kernel_size: tuple, stride: tuple, padding: tuple) -> list[Sample]:
    x = normal(2, 3, 7, 6)
    (kh, kw), (sh, sw), (ph, pw) = kernel_size, stride, padding
    oh, ow = (7 + 2 * ph - kh) // sh + 1, (6 + 2 * pw - kw) // sw + 1
    y, indices, dx = np.zeros((2, 3, oh, ow)), np.zeros((2, 3, oh, ow), np.uint8), np.zeros(x.shape)
    average = {flag: np.zeros(y.shape) for flag in (True, False)}
    average_dx = {flag: np.zeros(x.shape) for flag in (True, False)}
    dy = normal(*y.shape)
    for output in np.ndindex(*y.shape):
        n, c, i, j = output
        cells = {
            number: (n, c, i * sh - ph + number // kw, j * sw - pw + number % kw) for number in range(kh * kw)
        }
        cells = {k: cell for k, cell in cells.items() if 0 <= cell[2] < 7 and 0 <= cell[3] < 6}
        best = max(cells, key=lambda number: x[cells[number]])
        y[output], indices[output] = x[cells[best]], best
        dx[cells[best]] += dy[output]
        for flag, count in ((True, kh * kw), (False, len(cells))):
            average[flag][output] = sum(x[cell] for cell in cells.values()) / count
            for cell in cells.values():
                average_dx[flag][cell] += dy[output] / count
    geometry = {"kernel_size": kernel_size, "stride": stride, "padding": padding}
    samples = [
        Sample("max_pool_2d", (x,), (y, indices), geometry),
        Sample("max_pool_2d_backward", (dy, indices), (dx,), geometry),
    ]
    for flag in (True, False):
        attributes = {**geometry, "count_include_pad": flag}
        samples.append(Sample("avg_pool_2d", (x,), (average[flag],), attributes))
        samples.append(Sample("avg_pool_2d_backward", (dy,), (average_dx[flag],), attributes))
    return samples


def norm_samples() -> list[Sample]:
    x, scale, bias, dy = normal(4, 3, 2, 2) + 1, positive(3), normal(3), normal(4, 3, 2, 2)
    running_mean, running_var = normal(3), positive(3)
    mean, var = x.mean((0, 2, 3)), x.var((0, 2, 3))
    column = (1, 3, 1, 1)

    def normalise(x):  # type: ignore[no-untyped-def]
        centred = x - x.mean((0, 2, 3)).reshape(column)
        deviation = np.sqrt(x.var((0, 2, 3)) + 1e-3).reshape(column)
        return centred / deviation * scale.reshape(column) + bias.reshape(column)

    dx = np.zeros(x.shape)
    for cell in np.ndindex(*x.shape):
        step = np.zeros(x.shape)
        step[cell] = 1e-6
        dx[cell] = (dy * (normalise(x + step) - normalise(x - step))).sum() / 2e-6
    inverse_std = 1 / np.sqrt(var + 1e-3)
    normal_x = (x - mean.reshape(column)) * inverse_std.reshape(column)
    inferred = (x - running_mean.reshape(column)) / np.sqrt(running_var + 1e-3).reshape(column)
    inferred = inferred * scale.reshape(column) + bias.reshape(column)
    return [
        Sample(
            "batchnorm_2d_train",
            (x, scale, bias),
            (
                normalise(x),
                mean,
                inverse_std,
                0.1 * running_mean + 0.9 * mean,
                0.1 * running_var + 0.9 * var * 16 / 15,
            ),
            {"momentum": 0.9, "eps": 1e-3},
            before=(np.zeros(x.shape), np.zeros(3), np.zeros(3), running_mean, running_var),
            num_narrow=(1, 1),
        ),
        Sample(
            "batchnorm_2d_infer",
            (x, scale, bias, running_mean, running_var),
            (inferred,),
            {"eps": 1e-3},
            num_narrow=(1, 1),
        ),
        Sample(
            "batchnorm_2d_backward",
            (dy, x, scale, mean, inverse_std),
            (dx, (dy * normal_x).sum((0, 2, 3)), dy.sum((0, 2, 3))),
            num_narrow=(2, 1),
        ),
    ]


def softmax(x, axis):  # type: ignore[no-untyped-def]
    powers = np.exp(x)
    return powers / powers.sum(axis, keepdims=True)


def loss_samples() -> list[Sample]:
    x, dy = normal(5, 4), np.array([1.7])
    p, t = softmax(x, 1), normal(5, 4)
    ids = np.array([3, 0, 1, 1, 2], np.int32)
    soft = np.array([[1, 1, 8, 0], [0, 0, 0, 5], [1, 2, 3, 4], [2, 0, 0, 2], [0, 0, 0, 0]], np.int64)
    samples = []
    for labels in (ids, np.eye(4)[ids], soft, soft / 10):
        rows = (
            np.eye(4)[labels] if labels.ndim == 1 else labels / np.maximum(labels.sum(1, keepdims=True), 1e-9)
        )
        loss = np.array([-(rows * np.log(p)).sum() / 5])
        grads = 1.7 / 5 * (p * rows.sum(1, keepdims=True) - rows)
        samples += [
            Sample("softmax_cross_entropy", (x, labels), (loss, p)),
            Sample("softmax_cross_entropy_backward", (dy, p, labels), (grads,)),
            Sample("cross_entropy", (p, labels), (loss,)),
            Sample("cross_entropy_backward", (dy, p, labels), (-1.7 / 5 * rows / p,)),
        ]
    samples.append(Sample("mse_loss", (x, t), (np.array([((x - t) ** 2).mean()]),)))
    samples.append(Sample("mse_loss_backward", (dy, x, t), (1.7 * 2 * (x - t) / 20,)))
    return samples


def update_samples() -> list[Sample]:
    p, g, v, m = normal(5), normal(5), normal(5), positive(5)
    grad = g + 0.01 * p
    moved = 0.9 * v + 0.8 * grad
    momentum = {"lr": 0.1, "momentum": 0.9, "gain": 0.8, "weight_decay": 0.01}
    velocity = 0.9 * v + grad
    m1, v1 = 0.9 * v + 0.1 * grad, 0.99 * m + 0.01 * grad**2
    adam = {"rate": 0.1 / (1 - 0.9**3), "weight_1": 0.1, "weight_2": 0.01, "epsilon": 1e-3}
    adam["correction"] = 1 / (1 - 0.99**3)
    step = 0.1 * (m1 / (1 - 0.9**3)) / (np.sqrt(v1 / (1 - 0.99**3)) + 1e-3)
    s1, sum1 = 0.9 * m + 0.1 * grad**2, m + grad**2
    return [
        Sample("sgd_update", (g,), (p - 0.1 * g,), {"lr": 0.1}, before=(p,)),
        Sample("sgd_update", (g,), (p - 0.1 * grad,), {"lr": 0.1, "weight_decay": 0.01}, before=(p,)),
        Sample("sgd_update", (g, p), (p - 0.1 * g, g - 0.1 * p), {"lr": 0.1}, before=(p, g)),
        Sample("momentum_update", (g,), (p - 0.1 * moved, moved), momentum, before=(p, v)),
        Sample(
            "momentum_update",
            (g, g),
            (p - 0.1 * moved, p - m - 0.1 * (moved - 0.8 * 0.01 * m), moved, moved - 0.8 * 0.01 * m),
            momentum,
            before=(p, p - m, v, v),
        ),
        Sample(
            "nesterov_update",
            (g,),
            (p - 0.1 * (grad + 0.9 * velocity), velocity),
            {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01},
            before=(p, v),
        ),
        Sample(
            "velocity_update",
            (g,),
            (p - 0.1 * (g + 0.9 * v + 0.01 * p), 0.9 * v + 0.01 * p),
            {"lr": 0.1, "momentum": 0.9, "decay": 0.01},
            before=(p, v),
        ),
        Sample(
            "nesterov_velocity_update",
            (g,),
            (p - 0.1 * (g + 0.01 * p + 0.9 * (0.9 * v + 0.01 * p)), 0.9 * v + 0.01 * p),
            {"lr": 0.1, "momentum": 0.9, "decay": 0.01},
            before=(p, v),
        ),
        Sample("adam_update", (g,), (p - step, m1, v1), {**adam, "weight_decay": 0.01}, before=(p, v, m)),
        Sample(
            "adamw_update",
            (g,),
            (0.7 * p - step, m1, v1),
            {**adam, "keep": 0.7, "weight_decay": 0.01},
            before=(p, v, m),
        ),
        Sample(
            "rmsprop_update",
            (g,),
            (p - 0.1 * grad / np.sqrt(s1 + 1e-3), s1),
            {"lr": 0.1, "weight": 0.1, "epsilon": 1e-3, "weight_decay": 0.01},
            before=(p, m),
        ),
        Sample(
            "adagrad_update",
            (g,),
            (p - 0.1 * grad / np.sqrt(sum1 + 1e-3), sum1),
            {"lr": 0.1, "epsilon": 1e-3, "weight_decay": 0.01},
            before=(p, m),
        ),
    ]


def low_rank_samples() -> list[Sample]:
    p, q, m = normal(3, 7), normal(3, 4), normal(7, 4)
    basis, upper = np.linalg.qr(p.T)
    orthonormal = (basis * np.sign(np.diag(upper))).T
    with_zeros = np.insert(p, 1, 0.0, axis=0)
    m[2, 1], m[3, 3] = np.inf, np.nan
    rest = m - p.T @ q
    rest[2, 1] = rest[3, 3] = 0
    return [
        Sample("orthonormal_rows", (p,), (orthonormal,), {"dropped": 1e-12}),
        Sample(
            "orthonormal_rows", (with_zeros,), (np.insert(orthonormal, 1, 0.0, axis=0),), {"dropped": 1e-12}
        ),
        Sample("unit_rows", (q,), (q / np.linalg.norm(q, axis=1, keepdims=True),), {"seed": 3, "counter": 5}),
        Sample("low_rank_sum", (p, q), (p.T @ q,)),
        Sample("low_rank_sum", (p[:1], q[:1]), (np.outer(p[0], q[0]),)),
        Sample("low_rank_rest", (m, p, q), (rest,)),
    ]


def select_samples() -> list[Sample]:
    values = np.array([1.0, -3.0, 0.5, 3.0, np.nan, -2.0, 3.0, -np.inf])
    indices = np.array([1, 4, 7], np.int64)
    chosen = np.array([1, 3, 4, 6, 7], np.int32)
    flat, added = normal(8), normal(3)
    after_add, after_fill = flat.copy(), flat.copy()
    after_add[indices] += added
    after_fill[indices] = 7
    return [
        Sample("top_k", (values,), (indices, values[indices]), {"k": 3}),
        Sample("threshold_count", (values,), (np.array([5]),), {"threshold": 3.0}),
        Sample("threshold_select", (values,), (chosen, values[chosen]), {"threshold": 3.0}),
        Sample("scatter_add", (indices, added), (after_add,), before=(flat,)),
        # 2 low bits each: 1, 0, 3; then bits 0 + 0, 1 + 1, 1 + 2, as 4 >> 2 = 7 >> 2 = 1
        Sample("pack_indices", (indices,), (np.array([0b110001, 0b1101], np.int32),), {"low_bits": 2}),
        Sample("unpack_indices", (np.array([0b110001, 0b1101], np.int32),), (indices,), {"low_bits": 2}),
        Sample("pack_signs", (values,), (np.array([0b01001101], np.uint8),)),
        Sample("pack_signs", (np.array([-0.0, -1, 1] * 3),), (np.array([0b01101101, 1, 0], np.uint8),)),
        Sample(
            "add_signs",
            (
                np.array([0b01101101, 0b11111110], np.uint8),
                np.array([2.0, 0.5, 8]),
                np.array([3, 8, 9], np.int64),
            ),
            (np.arange(9) + np.array([1, -1, 1, 0.25, -0.25, 0.25, 0.25, -0.25, -4]),),
            {"factor": 0.5},
            before=(np.arange(9.0),),
        ),
        Sample("max_abs", (flat,), (np.array([np.abs(flat).max()]),)),
        Sample("max_abs", (values,), (np.array([np.nan]),)),
        Sample("power_of_two_scale", (np.array([3.0]),), (np.array([16.0]),), {"limit": 50.0}),
        Sample("power_of_two_scale", (np.array([3.0]),), (np.array([16.0]),), {"limit": 48.0}),
        Sample("power_of_two_scale", (np.array([np.nan]),), (np.array([1.0]),), {"limit": 48.0}),
        Sample("power_of_two_scale", (np.array([0.0]),), (np.array([1.0]),), {"limit": 48.0}),
        Sample("scatter_fill", (indices,), (after_fill,), {"value": 7.0}, before=(flat,)),
    ]


def int8_samples() -> list[Sample]:
    """Whole multiples of scales that float16 holds, which no draw changes."""
    scales = np.array([[0.125], [2.0]], np.float32)
    codes = np.array([[127, -3, 0, 5], [-127, 0, 64, 1]], np.int8)
    messages = np.concatenate([scales.view(np.uint8), codes.view(np.uint8)], axis=1)
    values = scales * codes.astype(float)
    x, last = values.ravel()[:7], messages.copy()
    last[1, -1] = 0  # there is no value
    first = last[:1].copy()
    rest = np.array([0.0, 0.25, 0.0])
    nearest = np.array([[*np.float32(1).tobytes(), 127, 0, 256 - 4]], np.uint8)
    return [
        Sample("quantize_int8", (x,), (last,), {"row_size": 4, "seed": 5, "counter": 6}),
        Sample("quantize_int8_nearest", (np.array([127, 0.25, -4]),), (nearest, rest), {"row_size": 3}),
        Sample("dequantize_int8", (messages,), (x,), {"row_size": 4}),
        Sample("dequantize_int8", (first,), (values[0],), {"row_size": 4}),
        Sample("mean_of_int8", (messages,), (values.mean(axis=0),)),
    ]


MASK = np.array([[True, False, True]])
SAMPLES = [
    Sample("relu", (X,), (np.maximum(X, 0),)),
    Sample("relu_backward", (DY, np.maximum(X, 0)), (DY * (X > 0),)),
    Sample("sigmoid", (X,), (SIGMOID,)),
    Sample("sigmoid_backward", (DY, X), (DY * SIGMOID * (1 - SIGMOID),)),
    Sample("tanh", (X,), (np.tanh(X),)),
    Sample("tanh_backward", (DY, np.tanh(X)), (DY * (1 - np.tanh(X) ** 2),)),
    Sample("exp", (X,), (np.exp(X),)),
    Sample("log", (P,), (np.log(P),)),
    Sample("sqrt", (P,), (np.sqrt(P),)),
    Sample("abs", (X,), (np.abs(X),)),
    Sample("negative", (X,), (-X,)),
    Sample("sign", (X,), (np.sign(X),)),
    Sample("ceil", (X,), (np.ceil(X),)),
    Sample("square", (X,), (X * X,)),
    Sample("add", (X, Y), (X + Y,)),
    Sample("sub", (Y, X), (Y - X,)),
    Sample("mul", (X, Y), (X * Y,)),
    Sample("div", (Y, P), (Y / P,)),
    Sample("floor_div", (Y, P), (np.floor(Y / P),)),
    Sample("floor_div", (np.arange(-6, 6), np.array([2])), (np.arange(-6, 6) // 2,)),
    Sample("pow", (P, X), (P**X,)),
    Sample("pow_backward_base", (DY, P, X), (DY * X * P ** (X - 1),)),
    Sample("pow_backward_base", (np.ones(2), np.zeros(2), np.array([0.0, 2])), (np.zeros(2),)),
    Sample("pow_backward_exponent", (DY, P, P**X), (DY * P**X * np.log(P),)),
    Sample("pow_backward_exponent", (np.ones(1), np.zeros(1), np.zeros(1)), (np.zeros(1),)),
    *[
        Sample("compare", (np.arange(3.0), np.ones(3)), (np.array(wanted, bool),), {"relation": relation})
        for relation, wanted in {
            "less": [1, 0, 0],
            "less_equal": [1, 1, 0],
            "greater": [0, 0, 1],
            "greater_equal": [0, 1, 1],
            "equal": [0, 1, 0],
        }.items()
    ],
    Sample("compare", (np.arange(3.0), np.ones(3)), (np.array([0.0, 1, 0]),), {"relation": "equal"}),
    Sample("clip", (X,), (np.clip(X, -0.5, 0.5),), {"min": -0.5, "max": 0.5}),
    Sample("clip", (X,), (np.minimum(X, 0.5),), {"min": None, "max": 0.5}),
    Sample("clip", (X,), (np.full_like(X, -0.5),), {"min": 0.5, "max": -0.5}),  # all become max, as in NumPy
    Sample("clip_backward", (DY, X), (DY * (np.abs(X) < 0.5),), {"min": -0.5, "max": 0.5}),
    Sample("clip_backward", (DY, X), (DY * (X > -0.5),), {"min": -0.5, "max": None}),
    Sample("fill", (), (np.full((2, 3), 2.5),), {"value": 2.5}),
    Sample("copy", (X,), (X,)),
    Sample("cast", (np.array([1.7, -2.2]),), (np.array([1, -2], np.int32),)),
    Sample("transpose", (X,), (X.transpose(2, 0, 1),), {"axes": (2, 0, 1)}),
    Sample(
        "reorder", (IMAGE,), (IMAGE.transpose(0, 2, 3, 1).reshape(IMAGE.shape),), {"memory_formats": (1, 6)}
    ),
    Sample(
        "reorder", (IMAGE.transpose(0, 2, 3, 1).reshape(IMAGE.shape),), (IMAGE,), {"memory_formats": (6, 1)}
    ),
    Sample("reorder", (IMAGE,), (IN_PAIRS,), {"memory_formats": (1, 2)}),
    Sample("reorder", (IN_PAIRS,), (IMAGE,), {"memory_formats": (2, 1)}),
    Sample("concat", (X, X[:, :1]), (np.concatenate([X, X[:, :1]], 1),), {"axis": 1}),
    Sample("slice", (X,), (X[:, 1:3],), {"axis": 1, "start": 1}),
    Sample("pack", (X, Y), (np.concatenate([X.ravel(), Y.ravel()]),)),
    Sample("unpack", (np.arange(7.0),), (np.arange(4.0).reshape(2, 2), np.arange(4.0, 7))),
    Sample("gather", (X, PLACES), (X[:, PLACES],), {"axis": 1}),
    Sample("gather", (X, PLACES.astype("int64")), (X[..., PLACES],), {"axis": 2}),
    Sample("gather_backward", (X[:, PLACES], PLACES), (X * np.array([1, 0, 2])[:, None],), {"axis": 1}),
    Sample("sum", (X,), (X.sum((0, 2)),), {"axes": (0, 2), "keepdims": False}),
    Sample("mean", (X,), (X.mean((1, 2), keepdims=True),), {"axes": (1, 2), "keepdims": True}),
    Sample("max", (X,), (X.max((1,)),), {"axes": (1,), "keepdims": False}),
    Sample("sum_to", (X,), (X.sum((0, 2), keepdims=True)[0],)),
    Sample("sum_to", (X,), (X.sum((0, 1)),)),
    Sample("broadcast_to", (Y,), (np.broadcast_to(Y, (2, 3, 4)).copy(),)),
    Sample("matmul", (X, normal(4, 5)), (), {}),
    Sample("matmul", (normal(4, 2), normal(3, 4)), (), {"transpose_a": True, "transpose_b": True}),
    *conv_samples(stride=(1, 1), padding=(0, 0), dilation=(1, 1), groups=1),
    *conv_samples(stride=(2, 1), padding=(1, 2), dilation=(1, 1), groups=2),
    *conv_samples(stride=(1, 2), padding=(2, 0), dilation=(2, 3), groups=1),
    *pool_samples((2, 2), (2, 2), (0, 0)),
    *pool_samples((3, 2), (2, 1), (1, 1)),
    *pool_samples((1, 2), (2, 3), (0, 0)),
    *norm_samples(),
    Sample("softmax", (X,), (softmax(X, 1),), {"axis": 1}),
    Sample(
        "softmax_backward",
        (DY, softmax(X, 1)),
        (softmax(X, 1) * (DY - (DY * softmax(X, 1)).sum(1, keepdims=True)),),
        {"axis": 1},
    ),
    *loss_samples(),
    Sample(
        "dropout_backward", (np.array([[1.0, 2, 3]]), MASK), (np.array([[1.25, 0, 3.75]]),), {"ratio": 0.2}
    ),
    *update_samples(),
    *select_samples(),
    *int8_samples(),
    *low_rank_samples(),
]
for sample in SAMPLES:
    if sample.kernel == "matmul":
        first, second = sample.inputs
        first = first.swapaxes(-1, -2) if sample.attributes.get("transpose_a") else first
        second = second.swapaxes(-1, -2) if sample.attributes.get("transpose_b") else second
        sample.expected = (np.einsum("...ij,jk->...ik", first, second),)
ELSEWHERE = {
    "recurrent",
    "recurrent_backward",
    "layer_norm",
    "layer_norm_backward",
    "attention",
    "attention_backward",
}  # called by one operator alone, tested with it
RANDOM = {
    "random_indices",
    "dropout",
    "random_uniform",
    "random_normal",
    "random_bernoulli",
}  # tested in test_random.py


@pytest.fixture
def backend(device: Device) -> Backend:
    return device.backend


def in_dtype(array: np.ndarray, dtype: str) -> np.ndarray:
    return array.astype(dtype if array.dtype.kind == "f" else array.dtype)


def compute(
    backend: Backend, kernel: str, *inputs: np.ndarray, out: tuple[np.ndarray, ...], **attributes: Any
) -> tuple[np.ndarray, ...]:
    """Run a kernel on copies; its outputs, which start as ``out``. The inputs must stay as they are."""
    given, made = ([backend.asarray(array) for array in arrays] for arrays in (inputs, out))
    backend.run(kernel, *given, out=tuple(made) if len(made) > 1 else made[0], **attributes)
    for array, copy in zip(given, inputs, strict=True):
        np.testing.assert_array_equal(backend.to_numpy(array), copy)
    return tuple(map(backend.to_numpy, made))


def test_every_kernel_has_a_sample() -> None:
    sampled = {sample.kernel for sample in SAMPLES} | RANDOM | ELSEWHERE
    kernels = {name for name in dir(CpuBackend) if is_kernel(CpuBackend, name)}
    assert set(KERNELS) <= kernels and sampled <= kernels
    assert kernels - sampled <= set(FORMULAS)  # see test_every_formula_is_what_numpy_gives_in_float64


def test_every_device_has_every_kernel(backend: Backend) -> None:
    kernels = {name for name in dir(CpuBackend) if is_kernel(CpuBackend, name)}
    assert {name for name in dir(backend) if is_kernel(type(backend), name)} >= kernels


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("formula", FORMULAS.values(), ids=FORMULAS)
def test_every_formula_is_what_numpy_gives_in_float64(backend: Backend, formula: Formula, dtype: str) -> None:
    shapes = {1: [(5, 7)], 2: [(5, 7), (7,)], 3: [(5, 7), (5, 1), (7,)]}[len(formula.inputs)]
    inputs = [
        np.random.default_rng(k).uniform(0.1, 0.9, shape).astype(dtype) for k, shape in enumerate(shapes)
    ]
    numbers = dict.fromkeys(formula.numbers, 0.5)
    (made,) = compute(backend, formula.name, *inputs, out=(np.zeros((5, 7), dtype),), **numbers)
    expected = np.zeros((5, 7))
    NumpyBackend().run(formula.name, *(x.astype(float) for x in inputs), out=expected, **numbers)
    limit = 4 * TOLERANCE[dtype] * max(1, np.abs(expected).max())
    np.testing.assert_allclose(made.astype(float), expected, atol=limit, rtol=4 * TOLERANCE[dtype])


WHOLE = [
    formula
    for formula in FORMULAS.values()
    if formula.type == "A" and not formula.numbers and formula.name != "div"
]


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("formula", WHOLE, ids=lambda formula: formula.name)
def test_formulas_of_any_type_are_numpys_for_integers(backend: Backend, formula: Formula, dtype: str) -> None:
    inputs = [
        np.random.default_rng(k).integers(-9, 9, (5, 7)).astype(dtype) for k in range(len(formula.inputs))
    ]
    (made,) = compute(backend, formula.name, *inputs, out=(np.zeros((5, 7), dtype),))
    expected = np.zeros((5, 7), dtype)
    NumpyBackend().run(formula.name, *inputs, out=expected)
    np.testing.assert_array_equal(made, expected)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    "sample", SAMPLES, ids=[f"{number}-{sample.kernel}" for number, sample in enumerate(SAMPLES)]
)
def test_kernel_matches_its_definition_and_leaves_inputs_alone(
    sample: Sample, dtype: str, backend: Backend
) -> None:
    inputs, out = sample.arrays(dtype)
    made = compute(backend, sample.kernel, *inputs, out=out, **sample.attributes)
    for got, expected in zip(made, sample.expected, strict=True):
        scale = np.nanmax(np.abs(np.where(np.isinf(expected), 0, expected)), initial=1.0)
        # its reference is a finite difference
        loose = 1e3 if sample.kernel == "batchnorm_2d_backward" else 20
        tolerance = TOLERANCE[dtype] * loose * scale if got.dtype.kind == "f" else 0
        np.testing.assert_allclose(got.astype(np.float64), expected, rtol=0, atol=tolerance)


def test_unknown_kernel_is_an_option_error(backend: Backend) -> None:
    with pytest.raises(OptionError, match="no kernel 'rule'"):
        backend.run("rule", out=backend.zeros((1,), "f"))
    with pytest.raises(OptionError):  # a method, but no kernel
        backend.run("empty", out=backend.zeros((1,), "f"))


@pytest.mark.parametrize("kernel", ["add", "sub", "mul", "div"])
def test_arithmetic_may_write_over_its_first_input(kernel: str, backend: Backend) -> None:
    target = backend.asarray(X)
    (expected,) = compute(backend, kernel, X, Y, out=(np.empty_like(X),))
    backend.run(kernel, target, backend.asarray(Y), out=target)
    np.testing.assert_array_equal(backend.to_numpy(target), expected)


def test_clip_may_write_over_its_input(backend: Backend) -> None:
    target = backend.asarray(X)
    backend.run("clip", target, out=target, min=-0.5, max=0.25)
    np.testing.assert_array_equal(backend.to_numpy(target), np.clip(X, -0.5, 0.25))


def test_kernels_follow_ieee_without_warnings(backend: Backend) -> None:
    (out,) = compute(
        backend, "div", np.array([1, -1, 0], "f"), np.zeros(3, "f"), out=(np.zeros(3, np.float32),)
    )
    np.testing.assert_array_equal(out, np.array([np.inf, -np.inf, np.nan]))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    "kernel", ["relu", "abs", "sign", "negative", "ceil", "sqrt", "exp", "square", "tanh"]
)
def test_special_values_are_those_of_numpy(kernel: str, dtype: str, backend: Backend) -> None:
    x = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0], dtype)
    (out,) = compute(backend, kernel, x, out=(np.zeros_like(x),))
    with np.errstate(all="ignore"):
        expected = np.maximum(x, 0) if kernel == "relu" else getattr(np, kernel)(x)
    np.testing.assert_array_equal(out, expected)


def test_maximum_and_clip_pass_nan_on(backend: Backend) -> None:
    x = np.array([[-5, -3, -4], [1, np.nan, 2], [-np.inf, -np.inf, -np.inf]], np.float32)
    for axis in (0, 1):
        (out,) = compute(backend, "max", x, out=(np.zeros(3, "f"),), axes=(axis,), keepdims=False)
        np.testing.assert_array_equal(out, x.max(axis))
    (out,) = compute(backend, "clip", x, out=(np.zeros_like(x),), min=-4.0, max=1.0)
    np.testing.assert_array_equal(out, np.clip(x, -4, 1))


def test_max_pool_gives_equal_elements_to_the_first_and_passes_nan_on(backend: Backend) -> None:
    x = np.zeros((1, 1, 2, 4), np.float32)
    x[0, 0, 1, 2] = np.nan
    out = np.empty((1, 1, 1, 2), np.float32), np.empty((1, 1, 1, 2), np.uint8)
    y, indices = compute(
        backend, "max_pool_2d", x, out=out, kernel_size=(2, 2), stride=(2, 2), padding=(0, 0)
    )
    assert indices[0, 0, 0, 0] == 0
    assert np.isnan(y[0, 0, 0, 1])


def test_convolution_in_chunks_equals_convolution_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = conv_samples(stride=(1, 1), padding=(1, 1), dilation=(1, 1), groups=2)
    monkeypatch.setattr("singa_lite.backend.cpu.conv.SCRATCH_BYTES", 1)  # one image at a time
    for sample in samples:
        test_kernel_matches_its_definition_and_leaves_inputs_alone(sample, "float64", CpuBackend())


@pytest.mark.parametrize("ids", [[0, 4], [-1, 2]])
def test_class_ids_outside_the_columns_are_a_shape_error(ids: list[int], backend: Backend) -> None:
    out = np.zeros(1), np.zeros((2, 4))
    with pytest.raises(ShapeError, match=r"0\.\.3"):  # at the latest when the host reads the result
        compute(backend, "softmax_cross_entropy", np.zeros((2, 4)), np.array(ids), out=out)
    backend.synchronize()  # reported once


def test_softmax_cross_entropy_survives_huge_logits(backend: Backend) -> None:
    x = np.array([[1e4, -1e4, -np.inf]], np.float32)
    out = np.zeros(1, np.float32), np.zeros((1, 3), np.float32)
    loss, p = compute(backend, "softmax_cross_entropy", x, np.array([0]), out=out)
    assert loss[0] == 0
    np.testing.assert_array_equal(p, [[1, 0, 0]])
    loss, p = compute(backend, "softmax_cross_entropy", x, np.array([1]), out=out)
    assert loss[0] == 2e4


def test_float16_sums_do_not_overflow_on_the_way(backend: Backend) -> None:
    one, three = np.ones(1, np.float16), np.ones(3, np.float16)
    hundreds = np.full((1, 4096), 100, np.float16)
    (mean,) = compute(backend, "mean", hundreds, out=(one,), axes=(1,), keepdims=False)
    assert mean[0] == 100
    x = np.array([[6e4, 6e4, -6e4, -6e4]], np.float16)
    columns = np.repeat(x.T, 3, axis=1)
    for total in (
        compute(backend, "sum", x, out=(one,), axes=(1,), keepdims=False),
        compute(backend, "sum", columns, out=(three,), axes=(0,), keepdims=False),
        compute(backend, "sum_to", columns, out=(three,)),
        compute(backend, "sum_to", x.reshape(4, 1), out=(one,)),
        compute(backend, "matmul", x, np.ones((4, 1), np.float16), out=(one.reshape(1, 1),)),
    ):
        assert not total[0].any()


def test_memory_calls_give_row_major_copies(backend: Backend) -> None:
    source = np.arange(6.0).reshape(2, 3).T
    array = backend.asarray(source)
    assert array.flags.c_contiguous
    source[0, 0] = 77
    copy = backend.to_numpy(array)
    np.testing.assert_array_equal(copy, np.arange(6.0).reshape(2, 3).T)
    copy[0, 0] = 5
    assert backend.to_numpy(array)[0, 0] == 0
    other = backend.asarray(source)
    assert not backend.may_share_memory(other, array)
    assert backend.may_share_memory(array, array.reshape(-1))
    assert backend.empty((2, 0), np.float16).shape == (2, 0)
    assert not backend.to_numpy(backend.zeros((3,), np.int32)).any()
    backend.synchronize()


def test_an_array_is_made_again_from_its_root_and_offset(backend: Backend) -> None:
    whole = backend.asarray(np.arange(24.0))
    part = whole[6:18].reshape(3, 4)[1:]
    assert root_of(part) is whole and address_of(part) - address_of(whole) == 80
    view = View(Memory(192), 80, part.shape, part.dtype, part.strides)
    again = view_of(whole, view)
    np.testing.assert_array_equal(backend.to_numpy(again), np.arange(10.0, 18).reshape(2, 4))
    backend.run("fill", out=again, value=-1.0)
    assert (backend.to_numpy(whole) == -1).sum() == 8
