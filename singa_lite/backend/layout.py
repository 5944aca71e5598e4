# SPDX-License-Identifier: Apache-2.0
"""Memory formats of the images of a recorded step, kept from one kernel to the next.

A convolution prefers a memory format, channels in blocks of b: the elements are ordered (batch, channels / b,
height, width, b), so 1 is row-major and all channels are channels-last. Batch norm, pooling and what works element by
element take the format of their input. Between two formats a call "reorder" is inserted. What leaves the step,
or is passed to any other kernel, is row-major as always.

The calls made here have the attributes ``memory_formats`` and ``memory_format`` of Note [lowered calls] in base.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ..graph.memory import Memory, View
from ..graph.nodes import Host, Kernel, Node

ConvFormats = Callable[..., tuple[int, int] | None]
PLAIN = 1

CONVOLUTIONS = ("conv2d", "conv2d_backward_data", "conv2d_backward_weight")
# kernel -> which input and which outputs are images of one memory format; "add" and the like need no other code
LIKE_FIRST = {
    "relu": ((0,), (0,)),
    "cast": ((0,), (0,)),
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
LIKE_SHAPE = {"avg_pool_2d_backward": ((0,), (0,))}  # its input decides nothing: it may be one pixel
TAKES_FORMAT = {
    "batchnorm_2d_train",
    "batchnorm_2d_backward",
    "max_pool_2d",
    "max_pool_2d_backward",
    "avg_pool_2d",
    "avg_pool_2d_backward",
}
IMAGES = {**LIKE_FIRST, **LIKE_SECOND, **LIKE_SHAPE}


def choose_formats(
    calls: list[Node],
    conv_formats: ConvFormats,
    accepts: Callable[[View], bool],
    takes_convolution: Callable[[Kernel], bool] = lambda call: True,
) -> list[Node]:
    """Return the same step in the memory formats that its convolutions prefer.

    Args:
        conv_formats: called with the name of a convolution kernel, the shapes of x, w and y, whether there is a bias,
            the geometry and the dtype of x; returns the formats of x and y, or None for row-major.
        accepts: whether an image may have another format than row-major.
        takes_convolution: whether images of a convolution may.
    """
    return _Layout(calls, conv_formats, accepts, takes_convolution).calls


def _is_image(view: View) -> bool:
    """Return whether it is a whole, row-major array of four axes."""
    return len(view.shape) == 4 and view.memory.num_bytes > 0 and view.is_whole


def _is_row_major(call: Kernel) -> bool:
    return all(view.is_row_major for view in (*call.inputs, *call.outputs))


class _Layout:
    def __init__(
        self,
        calls: list[Node],
        conv_formats: ConvFormats,
        accepts: Callable[[View], bool],
        takes_convolution: Callable[[Kernel], bool],
    ) -> None:
        self._conv_formats, self._accepts, self._takes_convolution = conv_formats, accepts, takes_convolution
        self._free = _changeable(calls)
        self._formats: dict[Memory, int] = {}  # of what is not plain
        # reordered, as long as nobody writes the original
        self._copies: dict[tuple[Memory, tuple[int, ...], int], Memory] = {}
        self._last_of_shape: dict[tuple[int, ...], int] = {}  # shape -> its last format
        self.calls: list[Node] = []
        for call in calls:
            if not isinstance(call, Kernel):
                self._other(call)
            elif call.name in CONVOLUTIONS:
                self._convolution(call)
            elif call.name in IMAGES and self._accepts_all(call):
                self._images(call)
            else:
                self._row_major(call)

    def _accepts_all(self, call: Kernel) -> bool:
        inputs, outputs = IMAGES[call.name]
        views = [call.inputs[index] for index in inputs if index < len(call.inputs)]
        views += [call.outputs[index] for index in outputs]
        is_alike = call.name != "add" or call.inputs[0].shape == call.inputs[1].shape
        is_image = all(map(_is_image, views)) and _is_row_major(call)
        return is_alike and is_image and self._accepts(call.outputs[0])

    def _convolution(self, call: Kernel) -> None:
        x, w, y, geometry = _of_convolution(call)
        wanted = None
        is_known = _is_row_major(call) and self._takes_convolution(call)
        if is_known and self._accepts(x) and all(map(_is_image, (x, y))):
            has_bias = len(call.inputs) == 3 or isinstance(call.out, tuple)
            wanted = self._conv_formats(
                call.name, x.shape, w.shape, y.shape, has_bias, dtype=x.dtype, **geometry
            )
        if wanted is None:
            self._row_major(call)
            return
        if call.name != "conv2d_backward_weight":  # another image kernel may have made the weights
            first, _, *rest = call.inputs
            call = replace(call, inputs=(first, self._as(w, PLAIN, call), *rest))
        formats = []
        for view, memory_format in ((x, wanted[0]), (y, wanted[1])):
            if view.memory is call.outputs[0].memory:
                memory_format = self._set_format(view, memory_format)
            else:  # the convolution reorders what it reads itself
                memory_format = self._formats.get(view.memory, PLAIN)
            formats.append(memory_format)
        self._emit(replace(call, attributes={**call.attributes, "memory_formats": tuple(formats)}))

    def _images(self, call: Kernel) -> None:
        inputs, outputs = IMAGES[call.name]
        leader = call.inputs[inputs[0]]
        memory_format = self._formats.get(leader.memory, PLAIN)
        if call.name in LIKE_SHAPE:
            memory_format = self._last_of_shape.get(call.out.shape, PLAIN)
        written = [call.outputs[index] for index in outputs]
        if not all(view.memory in self._free for view in written):
            memory_format = PLAIN
        given = list(call.inputs)
        for index, view in enumerate(given):
            given[index] = self._as(view, memory_format if index in inputs else PLAIN, call)
        for view in written:
            self._set_format(view, memory_format)
        attributes = call.attributes
        if call.name in TAKES_FORMAT and memory_format != PLAIN:
            attributes = {**attributes, "memory_format": memory_format}
        self._emit(replace(call, inputs=tuple(given), attributes=attributes))

    def _row_major(self, call: Kernel) -> None:
        """Emit a call on row-major arrays; what it writes is row-major from here on."""
        call = replace(call, inputs=tuple(self._as(view, PLAIN, call) for view in call.inputs))
        for view in call.outputs:
            self._formats.pop(view.memory, None)
        self._emit(call)

    def _set_format(self, view: View, memory_format: int) -> int:
        """Decide the memory format of an image about to be written."""
        memory_format = (
            memory_format if view.memory in self._free and view.shape[1] % memory_format == 0 else PLAIN
        )
        self._formats[view.memory] = memory_format
        self._last_of_shape[view.shape] = memory_format
        return memory_format

    def _as(self, view: View, memory_format: int, call: Kernel) -> View:
        """Return ``view`` in ``memory_format``, reordered if it has another."""
        image = self._free.get(view.memory)
        current = self._formats.get(view.memory, PLAIN)
        if image is None or current == memory_format:
            if image is not None or memory_format == PLAIN or not _is_image(view):
                return view
            image = view
        if image.shape[2:] == (1, 1):
            return view
        key = (view.memory, image.shape, memory_format)
        if key not in self._copies:
            memory = Memory(view.memory.num_bytes)
            to = replace(image, memory=memory)
            reorder = replace(
                call,
                name="reorder",
                inputs=(image,),
                out=to,
                attributes={"memory_formats": (current, memory_format)},
            )
            self.calls.append(reorder)
            self._copies[key] = memory
        return replace(view, memory=self._copies[key])

    def _other(self, node: Node) -> None:
        """Give a node that is not a kernel row-major arrays to read and write."""
        if isinstance(node, Host) and node.sees_arrays:  # it may write what outlives the step
            self._copies = {key: copy for key, copy in self._copies.items() if key[0].owner is None}
        self._emit(node)

    def _emit(self, call: Node) -> None:
        written = {view.memory for view in call.outputs}
        self._copies = {key: memory for key, memory in self._copies.items() if key[0] not in written}
        self.calls.append(call)


def _of_convolution(call: Kernel) -> tuple[View, View, View, dict[str, Any]]:
    """x, w and y, or their gradients, and the geometry."""
    geometry = {key: call.attributes[key] for key in ("stride", "padding", "dilation", "groups")}
    if call.name == "conv2d":
        return call.inputs[0], call.inputs[1], call.out, geometry
    if call.name == "conv2d_backward_data":
        return call.out, call.inputs[1], call.inputs[0], geometry
    return call.inputs[1], call.outputs[0], call.inputs[0], geometry


def _changeable(calls: Sequence[Node]) -> dict[Memory, View]:
    """Return the memory whose format is free to choose, with the image in it.

    The step alone needs it, and only kernels that know images write it, always as the same one, as which alone
    others read it: reshaped to another image, channels have other offsets.
    """
    images: dict[Memory, View] = {}
    others: set[Memory] = set()
    for call in calls:
        if not isinstance(call, Kernel):
            others |= {view.memory for view in (*call.inputs, *call.outputs)}
            continue
        if call.name in IMAGES:
            written = [call.outputs[index] for index in IMAGES[call.name][1]]
        else:
            written = [call.outputs[0]] if call.name in CONVOLUTIONS[:2] else []
        for view in call.outputs:
            is_fit = view in written and view.memory.owner is None and _is_image(view)
            if not is_fit or images.setdefault(view.memory, view).shape != view.shape:
                others.add(view.memory)
    for call in calls:
        for view in call.inputs if isinstance(call, Kernel) else ():
            if len(view.shape) == 4 and view.memory in images and images[view.memory].shape != view.shape:
                others.add(view.memory)
    return {memory: view for memory, view in images.items() if memory not in others}
