# SPDX-License-Identifier: Apache-2.0
"""Which calls of a step become one, and what keeps them apart."""

from dataclasses import replace

import numpy as np
import pytest

from singa_lite.backend.cpu.fuse import fuse
from singa_lite.graph.memory import Memory, View
from singa_lite.graph.nodes import Host, Kernel
from tests.devices import cuda_device

IMAGE, ROW = (2, 16, 4, 4), (16,)


def array(shape=IMAGE, memory=None):
    made = np.empty(shape, np.float32)
    return View(memory or Memory(made.nbytes), 0, made.shape, made.dtype, made.strides)


def call(kernel, inputs, out, **attributes):
    return Kernel(None, kernel, tuple(inputs), out, attributes, "Forward")


def host(sees_arrays):
    return Host(print, (), sees_arrays)


def turned(view):
    """The same memory with the order of its axes reversed."""
    return replace(view, strides=view.strides[::-1], shape=view.shape[::-1])


x, y, z, w = array(), array(), array(), array((16, 16, 3, 3))
scale, bias, mean, inverse_std, running = (array(ROW) for _ in range(5))
conv = call("conv2d", (x, w), y)
norm = call("batchnorm_2d_train", (x, scale, bias), (y, mean, inverse_std, running, array(ROW)))
relu = call("relu", (y,), z)
elsewhere = array()
owned = array()
owned.memory.owner = np.empty(IMAGE)


def test_a_relu_becomes_part_of_what_is_before_it():
    for first in (conv, norm):
        [fused] = fuse([first, relu])
        assert fused.name == first.name and fused.attributes == {"relu": True} and fused.outputs[0] == z


APART = {
    "the caller reads it": [replace(conv, out=owned), call("relu", (owned,), z)],
    "a second reader": [conv, relu, call("copy", (y,), elsewhere)],
    "Python in between": [conv, host(True), relu],
    "its input changes": [conv, call("copy", (elsewhere,), x), relu],
    "its other result is read": [norm, call("copy", (running,), array(ROW)), relu],
    "another shape": [conv, call("relu", (array((32, 16), y.memory),), array((32, 16)))],
    "float64": [replace(conv, out=replace(y, dtype=np.dtype("f8"))), call("relu", (y,), z)],
    "no elements": [replace(conv, inputs=(array((0, 16, 4, 4)), w)), relu],
    "turned filters": [replace(conv, inputs=(x, turned(array((3, 3, 16, 16))))), relu],
    "misaligned filters": [replace(conv, inputs=(x, replace(w, offset=1))), relu],
    "a turned result": [
        replace(conv, out=array((4, 4, 4, 4), y.memory)),
        call("relu", (turned(array((4, 4, 4, 4), y.memory)),), array((4, 4, 4, 4))),
    ],
}


@pytest.mark.parametrize("calls", APART.values(), ids=APART)
def test_a_relu_stays_apart(calls):
    assert fuse(calls) == calls


product, row, total = array((4, 8)), array((8,)), array((4, 8))
matmul = call("matmul", (array((4, 5)), array((5, 8))), product)


def test_a_row_is_added_by_the_product():
    [fused] = fuse([matmul, call("add", (product, row), total)])
    assert fused.inputs == (*matmul.inputs, row) and fused.out == total


def test_a_row_is_added_by_a_product_that_is_read_with_other_axes():
    reshaped, total = array((2, 2, 8), product.memory), array((2, 2, 8))
    [fused] = fuse([matmul, call("add", (reshaped, row), total)])
    assert fused.name == "matmul" and fused.inputs == (*matmul.inputs, row)
    assert fused.out == array((4, 8), total.memory)


@pytest.mark.parametrize(
    ("read", "total"),
    [
        (array((2, 8), product.memory), array((2, 8))),  # half of it
        (array((2, 2, 8), product.memory), array((3, 2, 2, 8))),  # repeated
        # into another order
        (
            array((2, 2, 8), product.memory),
            replace(array((2, 2, 8)), strides=(128, 32, 4)),
        ),
    ],
)
def test_a_row_is_not_added_by_a_product_that_is_read_in_parts_or_repeated(read, total):
    calls = [matmul, call("add", (read, row), total)]
    assert fuse(calls) == calls


@pytest.mark.parametrize("made", [array((2, 2, 8)), array((8, 4))])
def test_a_row_is_not_added_by_a_product_of_another_shape(made):
    calls = [replace(matmul, out=made), call("add", (replace(product, memory=made.memory), row), total)]
    assert fuse(calls) == calls


@pytest.mark.parametrize(
    ("weight", "addend"),
    [(turned(array((8, 5))), row), (matmul.inputs[1], replace(row, offset=28, strides=(-4,)))],
    ids=["turned", "flipped"],
)
def test_a_row_is_not_added_by_a_product_of_strided_arrays(weight, addend):
    calls = [
        replace(matmul, inputs=(matmul.inputs[0], weight)),
        call("add", (product, addend), total),
        call("relu", (total,), array((4, 8))),
    ]
    assert fuse(calls) == calls


def test_an_addition_becomes_part_of_the_later_batch_norm():
    [fused] = fuse([norm, call("add", (elsewhere, y), z)])
    assert fused.inputs == (*norm.inputs, elsewhere) and fused.outputs[0] == z


@pytest.mark.parametrize(
    "calls",
    [
        [replace(norm, attributes={"relu": True}), call("add", (elsewhere, y), z)],
        [norm, call("add", (elsewhere, y), elsewhere)],
        [norm, call("add", (y, y), z)],
        [norm, call("add", (y, array((1, 16, 1, 1))), z)],
        [norm, call("add", (y, replace(elsewhere, strides=(0, 64, 16, 4))), z)],
    ],
    ids=["behind a relu", "in place", "twice itself", "broadcast", "repeated by its strides"],
)
def test_an_addition_stays_apart(calls):
    assert fuse(calls) == calls


grad, dy = array(), array()
of_relu = call("relu_backward", (dy, y), grad)
of_norm = call(
    "batchnorm_2d_backward", (grad, x, scale, mean, inverse_std), (array(), array(ROW), array(ROW))
)
with_relu = replace(norm, attributes={"relu": True})


def test_the_gradient_of_a_relu_is_taken_by_batch_norm():
    for between in ([], [host(False)]):
        *_, fused = fuse([with_relu, *between, of_relu, of_norm])
        assert fused.inputs == (dy, *of_norm.inputs[1:], bias)


@pytest.mark.parametrize(
    "calls",
    [
        [norm, of_relu, of_norm],
        [replace(with_relu, inputs=(*norm.inputs, elsewhere)), of_relu, of_norm],
        [replace(with_relu, inputs=(elsewhere, *norm.inputs[1:])), of_relu, of_norm],
        [with_relu, host(True), of_relu, of_norm],
        [with_relu, replace(of_relu, inputs=(replace(dy, strides=(0, 0, 0, 0)), y)), of_norm],
    ],
    ids=["no relu", "a residual", "of another input", "after an update", "of one number repeated"],
)
def test_the_gradient_of_a_relu_stays_apart(calls):
    assert fuse(calls) == calls


# ---- the CUDA backend's rules ------------------------------------------------------------------------------------


@pytest.fixture
def lower(monkeypatch):
    return cuda_device(monkeypatch).backend.lower


channel_bias = View(Memory(64), 0, ROW, np.dtype("f4"), (4,))
GEOMETRY = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "groups": 1}
biased = call("conv2d", (x, w, channel_bias), y, **GEOMETRY)
addition = call("add", (x, elsewhere), y)


def test_on_cuda_a_bias_joins_the_relu_behind_it(lower):
    first, second = lower([biased, relu])
    assert first == replace(biased, inputs=(x, w))
    row = replace(channel_bias, shape=(16, 1, 1), strides=(4, 4, 4))
    assert second == replace(relu, name="add", inputs=(y, row), attributes={"relu": True})


def test_on_cuda_an_addition_takes_the_relu_behind_it(lower):
    assert lower([addition, relu]) == [replace(addition, out=z, attributes={"relu": True})]
    half = [replace(found, dtype=np.dtype("f2")) for found in (x, elsewhere, y, z)]
    fused = lower([call("add", half[:2], half[2]), call("relu", half[2:3], half[3])])
    assert [(found.name, found.attributes) for found in fused] == [("add", {"relu": True})]


CUDA_APART = {
    "the caller reads it": [replace(addition, out=owned), call("relu", (owned,), z)],
    "a second reader": [addition, relu, call("copy", (y,), array())],
    "Python in between": [addition, host(True), relu],
    "its input changes": [addition, call("copy", (array(),), x), relu],
    "the bias changes": [biased, host(True), relu],
    "a second reader of the convolution": [biased, relu, call("copy", (y,), array())],
    "no bias": [replace(conv, attributes=GEOMETRY), relu],
    "another shape": [addition, call("relu", (array((32, 16), y.memory),), array((32, 16)))],
    "another shape of the convolution": [biased, call("relu", (array((32, 16), y.memory),), array((32, 16)))],
    "integers": [replace(addition, out=replace(y, dtype=np.dtype("i4"))), relu],
}


@pytest.mark.parametrize("calls", CUDA_APART.values(), ids=CUDA_APART)
def test_on_cuda_a_relu_stays_apart(lower, calls):
    assert lower(calls) == calls


activated = call("gelu", (y,), z)
rows = call("layer_norm", (y, scale, bias), (z, mean, inverse_std), eps=1e-5)


def test_on_cuda_a_gelu_and_a_norm_take_the_addition_before_them_and_keep_its_sum(lower):
    later = [host(True), call("gelu_backward", (dy, y), grad)]
    for between in ([], [host(False)]):
        assert lower([addition, *between, activated, *later]) == [
            *between,
            replace(addition, name="add_gelu", out=(z, y)),
            *later,
        ]
        *_, fused, _, _ = lower([addition, *between, rows, *later])
        assert fused == replace(rows, inputs=(x, scale, bias, elsewhere), out=(*rows.out, y))


row_of_y = array(ROW)
CUDA_SUMS_APART = {
    "a reader before it": [addition, call("copy", (y,), array()), activated],
    "Python in between": [addition, host(True), rows],
    "its input changes": [addition, call("copy", (array(),), x), rows],
    "the sum is the input of the other too": [replace(addition, inputs=(y, x)), activated],
    "a row is added before a norm": [replace(addition, inputs=(x, row_of_y)), rows],
    "another shape": [addition, call("gelu", (array((32, 16), y.memory),), array((32, 16)))],
    "a sum with a ReLU": [replace(addition, attributes={"relu": True}), activated],
    "another dtype": [addition, call("gelu", (y,), replace(z, dtype=np.dtype("f2")))],
    "other dtypes": [replace(addition, inputs=(x, replace(elsewhere, dtype=np.dtype("f2")))), rows],
}


@pytest.mark.parametrize("calls", CUDA_SUMS_APART.values(), ids=CUDA_SUMS_APART)
def test_on_cuda_a_sum_stays_apart(lower, calls):
    assert lower(calls) == calls


def test_on_cuda_a_relus_gradient_moves_to_the_smaller_side_of_a_pooling(lower):
    small, indices, masked = array((2, 16, 2, 2)), array((2, 16, 2, 2)), array((2, 16, 2, 2))
    forward = call("max_pool_2d", (y,), (small, indices))
    backward = call("max_pool_2d_backward", (masked, indices), elsewhere)
    grad = call("relu_backward", (elsewhere, y), z)
    kept, first, second = lower([forward, backward, grad])
    assert kept == forward and first.inputs == (masked, small)
    assert second == replace(backward, inputs=(first.out, indices), out=z)
    other = replace(grad, inputs=(elsewhere, x))
    assert lower([forward, backward, other]) == [forward, backward, other]
