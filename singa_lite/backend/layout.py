# SPDX-License-Identifier: Apache-2.0
"""The order of channels in memory for the images of a recorded step, kept from one kernel to the next.

A convolution says in which blocks of channels it wants its images: in blocks of b they lie as (batch, channels / b,
height, width, b), so 1 is row-major and all channels are channels-last. Batch norm, pooling and what works element by
element take the blocks they are given. Where two orders meet, a call "reorder" is put in between. What leaves the step,
or meets any other kernel, is row-major as always.

The calls made here have the attributes ``blocks`` and ``block`` of Note [lowered calls] in base.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ..graph import HostCall, KernelCall, Memory, View
from .base import Call

ConvBlocks = Callable[..., tuple[int, int] | None]
PLAIN = 1

CONVOLUTIONS = ("conv2d", "conv2d_backward_data", "conv2d_backward_weight")
# kernel -> which input and which outputs are images of one order; "add" and the like go on as they are
LIKE_FIRST = {
    "relu": ((0,), (0,)),
    "add": ((0, 1), (0,)),
    "copy": ((0,), (0,)),
    "batchnorm_2d_train": ((0, 3), (0,)),
    "max_pool_2d": ((0,), (0, 1)),
    "avg_pool_2d": ((0,), (0,)),
}
LIKE_SECOND = {
    "relu_backward": ((1, 0), (0,)),
    "batchnorm_2d_backward": ((1, 0), (0,)),
    "max_pool_2d_backward": ((1, 0), (0,)),
}
LIKE_SHAPE = {"avg_pool_2d_backward": ((0,), (0,))}  # its input says nothing: it may be one pixel
KNOWS_BLOCKS = {
    "batchnorm_2d_train",
    "batchnorm_2d_backward",
    "max_pool_2d",
    "max_pool_2d_backward",
    "avg_pool_2d",
    "avg_pool_2d_backward",
}
IMAGES = {**LIKE_FIRST, **LIKE_SECOND, **LIKE_SHAPE}


def lay_out(calls: list[Call], conv_blocks: ConvBlocks, accepts: Callable[[View], bool]) -> list[Call]:
    """The same step with the orders that its convolutions want.

    Args:
        conv_blocks: called with the name of a convolution kernel, the shapes of x, w and y, whether there is a bias,
            and the geometry; gives the blocks of x and y, or None for row-major.
        accepts: whether an image may be laid out so.
    """
    return _Layout(calls, conv_blocks, accepts).calls


def _is_image(view: View) -> bool:
    """Whether it is a whole, row-major array of four axes."""
    size = 1
    for length in view.shape:
        size *= length
    strides: tuple[int, ...] = ()
    expected = view.dtype.itemsize
    for length in reversed(view.shape):
        strides = (expected, *strides)
        expected *= length
    is_whole = view.offset == 0 and view.memory.num_bytes == size * view.dtype.itemsize
    return len(view.shape) == 4 and size > 0 and is_whole and strides == view.strides


class _Layout:
    def __init__(self, calls: list[Call], conv_blocks: ConvBlocks, accepts: Callable[[View], bool]) -> None:
        self._conv_blocks, self._accepts = conv_blocks, accepts
        self._free = _changeable(calls)
        self._blocks: dict[Memory, int] = {}  # of what is not plain
        # reordered, as long as nobody writes the original
        self._copies: dict[tuple[Memory, tuple[int, ...], int], Memory] = {}
        self._usual: dict[tuple[int, ...], int] = {}  # shape -> the block it had last
        self.calls: list[Call] = []
        for call in calls:
            if isinstance(call, HostCall):  # it may write what outlives the step
                self._copies = {key: copy for key, copy in self._copies.items() if key[0].owner is None}
                self.calls.append(call)
            elif call.kernel in CONVOLUTIONS:
                self._convolution(call)
            elif call.kernel in IMAGES and self._is_for_blocks(call):
                self._images(call)
            else:
                self._in_order(call)

    def _is_for_blocks(self, call: KernelCall) -> bool:
        inputs, outputs = IMAGES[call.kernel]
        views = [call.inputs[place] for place in inputs if place < len(call.inputs)]
        views += [call.outputs[place] for place in outputs]
        is_alike = call.kernel != "add" or call.inputs[0].shape == call.inputs[1].shape
        return is_alike and all(map(_is_image, views)) and self._accepts(call.outputs[0])

    def _convolution(self, call: KernelCall) -> None:
        x, w, y, geometry = _of_convolution(call)
        wanted = None
        if self._accepts(x) and self._accepts(w) and all(map(_is_image, (x, y))):
            has_bias = len(call.inputs) == 3 or isinstance(call.out, tuple)
            wanted = self._conv_blocks(call.kernel, x.shape, w.shape, y.shape, has_bias, **geometry)
        if wanted is None:
            self._in_order(call)
            return
        of_written = {
            call.outputs[0].memory: wanted[0] if call.kernel == "conv2d_backward_data" else wanted[1]
        }
        blocks = []
        for view, block in ((x, wanted[0]), (y, wanted[1])):
            if view.memory in of_written and call.kernel != "conv2d_backward_weight":
                block = self._choose(view, block)
            else:
                block = self._blocks.get(view.memory, PLAIN)  # the convolution reorders what it reads itself
            blocks.append(block)
        self._emit(replace(call, attributes={**call.attributes, "blocks": tuple(blocks)}))

    def _images(self, call: KernelCall) -> None:
        inputs, outputs = IMAGES[call.kernel]
        leader = call.inputs[inputs[0]]
        block = self._blocks.get(leader.memory, PLAIN)
        if call.kernel in LIKE_SHAPE:
            block = self._usual.get(call.out.shape, PLAIN)
        written = [call.outputs[place] for place in outputs]
        if not all(view.memory in self._free for view in written):
            block = PLAIN
        given = list(call.inputs)
        for place, view in enumerate(given):
            given[place] = self._as(view, block if place in inputs else PLAIN, call)
        for view in written:
            self._choose(view, block)
        attributes = {**call.attributes, "block": block} if call.kernel in KNOWS_BLOCKS else call.attributes
        self._emit(replace(call, inputs=tuple(given), attributes=attributes))

    def _in_order(self, call: KernelCall) -> None:
        """A call on row-major arrays; what it writes is one from here on, even an image that had blocks."""
        call = replace(call, inputs=tuple(self._as(view, PLAIN, call) for view in call.inputs))
        for view in call.outputs:
            self._blocks.pop(view.memory, None)
        self._emit(call)

    def _choose(self, view: View, block: int) -> int:
        """Decide on the order of an image about to be written."""
        block = block if view.memory in self._free and view.shape[1] % block == 0 else PLAIN
        self._blocks[view.memory] = block
        self._usual[view.shape] = block
        return block

    def _as(self, view: View, block: int, call: KernelCall) -> View:
        """``view`` in that order, by a reorder if it has another."""
        image = self._free.get(view.memory)
        has = self._blocks.get(view.memory, PLAIN)
        if image is None or has == block:
            if image is not None or block == PLAIN or not _is_image(view):
                return view
            image = view
        if image.shape[2:] == (1, 1):
            return view
        key = (view.memory, image.shape, block)
        if key not in self._copies:
            memory = Memory(view.memory.num_bytes)
            to = replace(image, memory=memory)
            reorder = replace(
                call,
                kernel="reorder",
                inputs=(image,),
                out=to,
                attributes={"blocks": (has, block)},
                random=None,
            )
            self.calls.append(reorder)
            self._copies[key] = memory
        return replace(view, memory=self._copies[key])

    def _emit(self, call: KernelCall) -> None:
        written = {view.memory for view in call.outputs}
        self._copies = {key: memory for key, memory in self._copies.items() if key[0] not in written}
        self.calls.append(call)


def _of_convolution(call: KernelCall) -> tuple[View, View, View, dict[str, Any]]:
    """x, w and y, or their gradients, and the geometry."""
    geometry = {key: call.attributes[key] for key in ("stride", "padding", "dilation", "groups")}
    if call.kernel == "conv2d":
        return call.inputs[0], call.inputs[1], call.out, geometry
    if call.kernel == "conv2d_backward_data":
        return call.out, call.inputs[1], call.inputs[0], geometry
    return call.inputs[1], call.outputs[0], call.inputs[0], geometry


def _changeable(calls: Sequence[Call]) -> dict[Memory, View]:
    """Memory whose order is ours to choose, with the image in it.

    The step alone needs it, and only kernels that know images write it, always as the same one, as which alone
    others read it: reshaped to another image, channels lie elsewhere.
    """
    images: dict[Memory, View] = {}
    others: set[Memory] = set()
    for call in calls:
        if not isinstance(call, KernelCall):
            continue
        if call.kernel in IMAGES:
            written = [call.outputs[place] for place in IMAGES[call.kernel][1]]
        else:
            written = [call.outputs[0]] if call.kernel in CONVOLUTIONS[:2] else []
        for view in call.outputs:
            is_fit = view in written and view.memory.owner is None and _is_image(view)
            if not is_fit or images.setdefault(view.memory, view).shape != view.shape:
                others.add(view.memory)
    for call in calls:
        for view in call.inputs if isinstance(call, KernelCall) else ():
            if len(view.shape) == 4 and view.memory in images and images[view.memory].shape != view.shape:
                others.add(view.memory)
    return {memory: view for memory, view in images.items() if memory not in others}
