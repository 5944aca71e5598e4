# SPDX-License-Identifier: Apache-2.0
"""Where images of a step are kept in blocks, and where they are brought back in order."""

from dataclasses import replace

import numpy as np
import pytest

from singa_lite.backend.cpu.fuse import is_compiled_dtype
from singa_lite.backend.layout import choose_formats
from singa_lite.graph.memory import Memory, View
from singa_lite.graph.nodes import Host, Kernel

IMAGE = (2, 16, 4, 4)
GEOMETRY = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "groups": 1}


def image(shape=IMAGE, memory=None, owner=None):
    made = np.empty(shape, np.float32)
    memory = memory or Memory(made.nbytes)
    if owner is not None:
        memory.owner = owner
    return View(memory, 0, made.shape, made.dtype, made.strides)


def call(kernel, inputs, out, **attributes):
    return Kernel(None, kernel, tuple(inputs), out, attributes, "Forward")


def in_blocks(*shapes, **geometry):
    return 16, 16


def laid(*calls):
    """The names of the calls that come of it, a convolution's with the blocks of its result."""
    with_formats = choose_formats(list(calls), in_blocks, is_compiled_dtype)
    return [
        f"conv{made.attributes['memory_formats'][1]}" if made.name == "conv2d" else made.name
        for made in with_formats
    ]


y = image()
conv = call("conv2d", (image(owner=np.empty(IMAGE)), image((16, 16, 3, 3))), y, **GEOMETRY)
kept = image(owner=np.empty(IMAGE))


def test_an_image_stays_in_blocks_until_another_kernel_reads_it():
    z = image()
    assert laid(conv, call("relu", (y,), z), call("relu", (z,), image())) == ["conv16", "relu", "relu"]
    assert laid(conv, call("exp", (y,), image())) == ["conv16", "reorder", "exp"]
    flat = image((2, 256), y.memory)
    assert laid(conv, call("copy", (flat,), image((2, 256)))) == ["conv16", "reorder", "copy"]


def test_a_cast_keeps_the_blocks_of_its_input():
    assert laid(conv, call("cast", (y,), image()), call("exp", (y,), image()))[:2] == ["conv16", "cast"]


def test_what_outlives_the_step_is_in_order():
    assert laid(conv, call("relu", (y,), kept)) == ["conv16", "reorder", "relu"]
    assert laid(call("conv2d", conv.inputs, kept, **GEOMETRY)) == ["conv1"]


def test_broadcasting_is_done_in_order():
    assert laid(conv, call("add", (y, image((1, 16, 1, 1))), image())) == ["conv16", "reorder", "add"]


def test_convolutions_and_norms_of_strided_parameters_are_done_in_order():
    filters, scale, mean = image((16, 16, 3, 3)), image((16,)), image((16,))
    turned = replace(filters, strides=filters.strides[::-1])
    assert choose_formats([replace(conv, inputs=(conv.inputs[0], turned))], in_blocks, is_compiled_dtype) == [
        replace(conv, inputs=(conv.inputs[0], turned))
    ]
    norm = call(
        "batchnorm_2d_train", (y, replace(scale, strides=(0,)), scale), (image(), mean, mean, mean, mean)
    )
    assert laid(conv, norm) == ["conv16", "reorder", "batchnorm_2d_train"]


def test_an_image_that_is_written_over_in_order_has_no_blocks_any_more():
    over = call("add", (y, image((1, 16, 1, 1))), y)
    assert laid(conv, over, call("exp", (y,), image())) == ["conv16", "reorder", "add", "exp"]


def test_a_copy_in_blocks_serves_until_someone_may_write_the_original():
    one, other = (call("add", (y, kept), image()) for _ in range(2))
    assert laid(conv, one, other) == ["conv16", "reorder", "add", "add"]
    assert laid(conv, one, Host(print, (), True), other)[1:] == [
        "reorder",
        "add",
        "Host.print",
        "reorder",
        "add",
    ]
    write = call("fill", (), kept)
    assert laid(conv, one, write, other)[1:] == ["reorder", "add", "fill", "reorder", "add"]


@pytest.mark.parametrize("shape", [(2, 32, 2, 4), (4, 16, 2, 4)])
def test_an_image_that_is_reshaped_to_another_is_in_order(shape):
    assert laid(conv, call("relu", (image(shape, y.memory),), image(shape))) == ["conv1", "relu"]
    one, other = (
        call("add", (y, kept), image()),
        call("add", (image(shape), image(shape, kept.memory)), image(shape)),
    )
    first = call("conv2d", (image(shape), conv.inputs[1]), other.inputs[0], **GEOMETRY)
    assert laid(conv, one, first, other) == ["conv16", "reorder", "add", "conv16", "reorder", "add"]


def test_pixels_are_in_every_order_at_once():
    pixel = image((2, 16, 1, 1))
    made = call("conv2d", (image(), image((16, 16, 4, 4))), pixel, **GEOMETRY)
    assert laid(made, call("exp", (pixel,), image((2, 16, 1, 1)))) == ["conv16", "exp"]


def test_the_gradient_of_an_average_has_the_order_of_the_image_it_is_of():
    backward = call("avg_pool_2d_backward", (image((2, 16, 2, 2)),), image())
    *_, reorder, made = choose_formats(
        [conv, backward], lambda *shapes, **geometry: (16, 16), is_compiled_dtype
    )
    assert reorder.name == "reorder" and made.attributes == {"memory_format": 16}
