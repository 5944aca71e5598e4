# SPDX-License-Identifier: Apache-2.0
"""The engine: what an operator is, how a call is recorded, and how gradients flow back.

What lives here: Operator, Context, backward(), gradients(), no_grad(), record(). What does not: any formula (ops/),
gradients that are kept (accumulate.py).

Note [yield order]: nodes are visited in the reverse order of their creation, which is a topological order,
and a parameter is yielded as soon as its last use was visited. All ranks that ran the same forward pass
therefore yield the same parameters in the same order.
Note [gradient ownership]: an operator's backward may hand on dy itself or a view of it. The engine marks
such a gradient as shared: it is never written to, and copied before a caller gets it. A gradient of a script's own
operator, which may return an array that it has kept or saved, is copied at once: an update that comes before the
gradient is yielded may change that array.
Note [recomputing]: a recorded step in mixed precision does not keep outputs that their operator's
``_recomputation`` makes again in backward, from what is kept anyway and with the same bits (the field's activation
recomputation). Only a sum may be rounded otherwise, as forward made it a part of its norm and backward does not, or the
other way round: where the norm's output is read elsewhere too, or something was written between the two. In float32 all
is kept: who wants less memory chooses bfloat16, and its time pays for it. On a GPU all is kept, too.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar, Literal

import numpy as np

from ..config import state, this_thread
from ..device import Device
from ..errors import DeviceError, DTypeError, GraphError, OptionError, ShapeError
from ..graph.changes import changed_after, noticed_changes
from ..graph.clock import begin_step, lap
from ..graph.memory import Memory
from ..tensor import Tensor
from ..tensor.core import check_alike, check_tensor
from ..tensor.tracked import is_tracked
from .changed import kept_unread
from .results import as_array, check_gradients, own_copies, row_major_copies

Array = Any  # a raw array of the device's backend: numpy.ndarray on the CPU, cupy.ndarray on CUDA


NOT_RECORDABLE = (
    "{0} is an operator whose Python a replay would not run; if it only runs kernels by Context.run, and no value "
    "decides which, set is_recordable = True in its class"
)


SIGNATURES = (
    "an operator has forward(self, context, *arrays) and backward(self, context, *dys), see docs/singa.md"
)


class Context:
    """The state of one call of an operator, and the arrays that it saves for backward.

    Attributes:
        device: where inputs and outputs live.
        needs_grad: per input, whether a gradient will be computed.
        training: ``autograd.training`` at the time of the call.
        saved: what ``save`` kept; empty when the call is not recorded.
        input_dtypes: those of the inputs before ``autocast`` cast them, else None.
    """

    input_dtypes: tuple[Any, ...] | None = None

    def __init__(self, device: Device, needs_grad: tuple[bool, ...]) -> None:
        self.device = device
        self.backend = device.backend
        self.needs_grad = needs_grad
        self.training = this_thread.training
        self.saved: tuple[Any, ...] = ()

    def run(self, kernel: str, *inputs: Array, out: Array | tuple[Array, ...], **attributes: Any) -> None:
        """Run a kernel of the device's backend by name."""
        self.backend.run(kernel, *inputs, out=out, **attributes)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Return a new array on the device, values undefined."""
        return self.backend.empty(shape, dtype)

    def cast(self, array: Array, dtype: Any) -> Array:
        """Return ``array`` rounded or widened to ``dtype``; itself if it has it."""
        return self.backend.astype(array, dtype)

    def gradient_dtype(self, index: int, dtype: Any) -> Any:
        """Return the dtype that the gradient of an input should have; ``dtype``: that of the input as it was given.

        Behind a cast by ``autocast`` it is float32, so that a sum in float32 is not rounded to 16 bits in between.
        """
        return dtype if self.input_dtypes is None else self.input_dtypes[index]

    def save(self, *values: Any) -> None:
        """Keep values for backward; nothing is kept when no gradient will be computed."""
        if any(self.needs_grad):
            self.saved = values


class Recomputed:
    """The output of a call that is not kept for backward, see Note [recomputing].

    Args:
        number: of its call, higher than those of calls before it.
        compute: makes it again, as a new array.
        output: the one of the forward pass, which is used where somebody else has kept it.
        inputs: those of its call that are not kept either.

    Attributes:
        num_sums: of the calls that make it again, how many add.
    """

    def __init__(
        self, number: int, compute: Callable[[], Array], output: Array, inputs: list[Recomputed]
    ) -> None:
        self.number = number
        self.compute = compute
        self._output = weakref.ref(output)
        # one behind the other, as each block of a ResNet adds to the sum of the one before it
        self.num_sums: int = max((each.num_sums for each in inputs), default=0) + (len(inputs) > 1)
        self._array: Array = None

    def array(self) -> Array:
        """Return it, the same array at each call."""
        if self._array is None:
            self._array = self._output()
        if self._array is None:
            self._array = self.compute()
        return self._array

    def once(self) -> Array:
        """Return it to compute another output; what takes one sum at most is not kept for the next call."""
        is_here = self._array is not None or self._output() is not None
        return self.array() if is_here or self.num_sums > 1 else self.compute()


def array_of(value: Any) -> Any:
    """Return the array of a ``Recomputed``, anything else as it is."""
    return value.array() if isinstance(value, Recomputed) else value


class Node:
    """One recorded call: the operator, its context and where its inputs came from."""

    recomputed: Recomputed | None = None  # its output
    untracked: tuple[Memory, ...] = ()  # while a step is recorded: of the inputs that take no gradient
    is_replayed = False  # whether it stands for a recorded step

    def __init__(self, op: Operator, context: Context, inputs: tuple[Tensor, ...]) -> None:
        self.op = op
        self.context: Context | None = context
        self.number = next(state.numbers)
        # per input: the node that made it and which of its outputs, or the leaf itself, or None
        self.sources: list[tuple[Node, int] | Tensor | None] = [
            None
            if not needed
            else tensor
            if tensor.creator is None
            else (tensor.creator, tensor.creator_output)
            for tensor, needed in zip(inputs, context.needs_grad, strict=True)
        ]
        self.outputs: list[tuple[tuple[int, ...], Any]] = []  # (shape, dtype) of each

    def keep_less(self, context: Context, inputs: tuple[Tensor, ...], output: Array) -> None:
        """Keep no array for backward that can be computed again: of ``inputs``, and ``output``."""
        arrays = [tensor.array for tensor in inputs]
        makers = [None if tensor.creator is None else tensor.creator.recomputed for tensor in inputs]
        compute = self.op._recomputation(context, [b or a for a, b in zip(arrays, makers, strict=True)])
        sources = [maker for maker in makers if maker is not None]
        self.recomputed = None if compute is None else Recomputed(self.number, compute, output, sources)
        pairs = zip((*arrays, output), (*makers, self.recomputed), strict=True)
        instead = {id(array): recomputed for array, recomputed in pairs if recomputed is not None}
        if instead and isinstance(context.saved, tuple):
            context.saved = tuple(instead.get(id(value), value) for value in context.saved)


class RecordedStep(Node):
    """Stands for the operators that made a result of a recorded step, which keeps nothing for a gradient.

    So does the creator of what is computed from such results alone.
    """

    is_replayed = True

    def __init__(self) -> None:
        self.context, self.sources, self.outputs = None, [], []
        self.number = next(state.numbers)


class Operator:
    """One differentiable operation: plain attributes on the instance, state of a call on the Context.

    A subclass writes ``check`` (raises ShapeError or DTypeError), ``forward`` (raw arrays in, one raw array
    or a tuple of them out) and ``backward`` (one gradient per output in; one per input out, None where there
    is none or ``context.needs_grad`` is False). Arrays given to either are never written to. What a class outside
    of this package returns is checked (results.py): a ShapeError or DTypeError names the class.

    Attributes:
        is_recordable: whether replays may leave its Python out, as all that it does is to run kernels and no value
            decides which; a class outside of singa_lite must say so itself, or steps with it run eagerly.
        autocast: the rule by which its inputs are cast inside ``autocast`` (Note [rules] in autocast.py); with None it
            cannot be called there.
        autocast_inputs: how many inputs the rule "low" is about, the first ones; None: all.
        takes_any_float: whether ``autocast`` lets it take floats that no rule covers, too.
    """

    is_recordable: ClassVar[bool] = True
    autocast: ClassVar[Literal["low", "float32", "widest", "keep"] | None] = None
    autocast_inputs: int | None = None
    takes_any_float: ClassVar[bool] = False
    _is_own: ClassVar[bool] = False  # a script's own

    def __init_subclass__(cls, **arguments: object) -> None:
        super().__init_subclass__(**arguments)
        cls._is_own = cls.__module__.partition(".")[0] != __name__.partition(".")[0]
        if cls._is_own:
            cls.is_recordable = vars(cls).get("is_recordable", False)

    def check(self, *inputs: Tensor) -> None:
        """Raise a typed error if the inputs do not fit; the default accepts all."""

    def forward(self, context: Context, *inputs: Array) -> Array | tuple[Array, ...]:
        raise NotImplementedError(f"{type(self).__name__}.forward")

    def backward(self, context: Context, *dys: Array) -> Array | tuple[Array | None, ...] | None:
        raise NotImplementedError(f"{type(self).__name__}.backward")

    def _recomputation(
        self, context: Context, inputs: list[Array | Recomputed]
    ) -> Callable[[], Array] | None:
        """Return what computes the one output again in little time, see Note [recomputing]; None: nothing does.

        It must not hold ``context``, which holds what it makes.

        Args:
            context: as ``forward`` left it.
            inputs: an array, unless it can be computed again.
        """
        return None

    def __call__(self, *inputs: Tensor) -> Any:
        """Check, compute and, where a gradient may be needed, record; a Tensor or a tuple of Tensors."""
        autocast = this_thread.autocast
        used = inputs if autocast is None else autocast.cast(self, inputs)
        self.check(*used)
        device = common_device(type(self).__name__, inputs)
        is_recording = this_thread.training and this_thread.recording
        needs_grad = tuple([is_recording and is_tracked(tensor) for tensor in inputs])
        context = Context(device, needs_grad)
        recorder = this_thread.recorder
        has_gradient = any(needs_grad)
        if has_gradient:  # arithmetic on gradients is not recorded
            begin_step()
            if recorder is not None:
                recorder.phase = "Forward"
        if used is not inputs:
            context.input_dtypes = tuple(tensor.array.dtype for tensor in inputs)
        try:
            result = self.forward(context, *[tensor.array for tensor in used])
        except TypeError as error:
            # forward was not even begun
            if error.__traceback__ is not None and error.__traceback__.tb_next is None:
                raise TypeError(f"{error}; {SIGNATURES}") from None
            raise
        node = _made_by(self, context, inputs) if has_gradient else None
        arrays = result if isinstance(result, tuple) else (result,)
        if self._is_own:
            where = f"{type(self).__name__}: forward"
            arrays = tuple(as_array(where, array, used[0].array, context.backend) for array in arrays)
        if recorder is not None:
            given = tuple(tensor.array for tensor in used)
            if not self.is_recordable:
                recorder.break_graph(NOT_RECORDABLE.format(type(self).__name__))
            recorder.check_outputs(type(self).__name__, arrays, given)
        if self._is_own:
            arrays = row_major_copies(context, arrays)
        outputs = tuple([Tensor.wrap(array, device, node, index) for index, array in enumerate(arrays)])
        if node is not None and not node.is_replayed:
            node.outputs = [(array.shape, array.dtype) for array in arrays]
            if recorder is not None:
                node.untracked = recorder.memories_of(
                    tensor.array for tensor, needed in zip(inputs, needs_grad, strict=True) if not needed
                )
            is_recorded = recorder is not None and recorder.break_reason is None
            if is_recorded and autocast is not None and context.backend.recomputes:
                node.keep_less(context, used, arrays[0])
        return outputs if isinstance(result, tuple) else outputs[0]


def _made_by(op: Operator, context: Context, inputs: tuple[Tensor, ...]) -> Node:
    """Return the record of a call."""
    node = Node(op, context, inputs)
    for source in node.sources:
        if source is not None and not (isinstance(source, tuple) and source[0].is_replayed):
            return node
    return next(source[0] for source in node.sources if isinstance(source, tuple))


def common_device(where: str, tensors: tuple[Tensor, ...]) -> Device:
    """Return the device of all ``tensors``; DeviceError if they are not on one."""
    if not tensors:
        raise ShapeError(f"{where}: expected at least one Tensor")
    try:
        for tensor in tensors[1:]:
            if tensor.device is not tensors[0].device:
                raise DeviceError(
                    f"{where}: tensors are on {tensors[0].device} and {tensor.device}; move one with to_device()"
                )
        device = tensors[0].device
        if isinstance(device, Device):  # numpy's arrays have one too, a text
            return device
        raise AttributeError
    except AttributeError:  # found where it matters, as most operators have checked their inputs
        for tensor in tensors:
            check_tensor(where, tensor)
        raise


@contextmanager
def no_grad() -> Iterator[None]:
    """Compute without recording inside the ``with`` block."""
    before = this_thread.recording
    this_thread.recording = False
    try:
        yield
    finally:
        this_thread.recording = before


@contextmanager
def record() -> Iterator[None]:
    """Train and record inside the ``with`` block, as MXNet's ``autograd.record``; afterwards all is as it was."""
    before = this_thread.training, this_thread.recording
    this_thread.training = this_thread.recording = True
    try:
        yield
    finally:
        this_thread.training, this_thread.recording = before


class _Gradient:
    """A gradient under construction, see Note [gradient ownership]."""

    __slots__ = ("array", "is_shared")

    def __init__(self, array: Array, is_shared: bool) -> None:
        self.array = array
        self.is_shared = is_shared

    def add(self, array: Array, backend: Any) -> None:
        if self.is_shared:
            total = backend.empty(self.array.shape, self.array.dtype)
            backend.run("add", self.array, array, out=total)
            self.array, self.is_shared = total, False
        else:
            backend.run("add", self.array, array, out=self.array)

    def release(self, backend: Any) -> Array:
        """Return the array, owned by the caller alone."""
        if not self.is_shared:
            return self.array
        own = backend.empty(self.array.shape, self.array.dtype)
        backend.run("copy", self.array, out=own)
        return own


def backward(y: Tensor, dy: Tensor | float | None = None) -> Iterator[tuple[Tensor, Tensor]]:
    """Compute dy * d(y)/d(p) for every parameter p that ``y`` was computed from.

    Args:
        y: a recorded tensor, of one element unless ``dy`` is given.
        dy: the gradient to start from: None (1), a number, or a Tensor of y's shape.

    Returns:
        A generator of (parameter, gradient), each as soon as its gradient is final, in the same order on
        every rank, see Note [yield order]. Parameters are leaves with ``stores_grad``. The caller owns
        each gradient. The record is used up: a second backward() of it raises.

    Raises:
        GraphError: y was not recorded (``autograd.training`` was False, under no_grad(), or no parameter
            takes part), or its record was used up. A parameter that an operator's backward reads has changed since.
        DTypeError: y is not a Tensor, dy neither a Tensor nor a number, or their dtypes differ.
        DeviceError: dy is on another device.
        ShapeError: y has more than one element and dy is None, or dy has another shape.
        OptionError: y was computed under ``autocast("fp16")`` and dy is None, see ``needs_scale``.
    """
    check_recorded(y)
    assert y.creator is not None
    if this_thread.before_backward is not None:
        this_thread.before_backward()
    nodes = nodes_behind(y.creator)
    used = next((node for node in nodes if node.context is None), None)
    if used is not None:
        raise GraphError(_why_used_up(used))
    if dy is None and y.size() == 1 and _has_float16(nodes):
        raise OptionError(
            'backward: gradients of this tensor would be float16, computed under autocast("fp16"), where small ones '
            'become 0; DistOpt(..., check_finite="skip") scales the loss, in one process too, or give dy, such as '
            "1024.0, and divide the gradients by it (docs/precision.md)"
        )
    lap("forward")
    if this_thread.recorder is not None:
        this_thread.recorder.phase = "Backward"
    return _walk(nodes, y.creator_output, _seed(y, dy))


def check_recorded(y: object) -> None:
    """Raise DTypeError unless ``y`` is a Tensor, GraphError unless ``backward`` can begin with it."""
    if not isinstance(y, Tensor):
        raise DTypeError(f"backward: expected a Tensor, got {type(y).__name__}")
    if y.creator is None:
        raise GraphError(
            "backward: this tensor was not recorded; set autograd.training = True before the forward pass, "
            "compute outside no_grad(), and from at least one tensor with stores_grad=True; "
            "calling a Model that is neither compiled nor in training mode evaluates it"
        )
    if y.creator.context is None:
        raise GraphError(_why_used_up(y.creator))


def _why_used_up(node: Node) -> str:
    if isinstance(node, RecordedStep):
        return (
            "backward: this is, or was computed from, a result of a recorded step, through which no gradient flows; "
            "take clone() of the result, or of what the step sets an attribute to, or compile its model with "
            "use_graph=False"
        )
    return (
        "backward: the record of this tensor, or a part of it, was used up by an earlier backward(); run the forward "
        "pass again, or one backward() of the sum of the losses"
    )


def needs_scale(y: Tensor) -> bool:
    """Return whether gradients of ``y`` pass through float16 that ``autocast`` has made of float32."""
    return y.creator is not None and _has_float16(nodes_behind(y.creator))


def _has_float16(nodes: list[Node]) -> bool:
    return any(
        node.context is not None
        and node.context.input_dtypes is not None
        and any(dtype == np.float16 for _, dtype in node.outputs)
        for node in nodes
    )


def _seed(y: Tensor, dy: Tensor | float | None) -> Array:
    if isinstance(dy, Tensor):
        if dy.shape != y.shape:
            raise ShapeError(f"backward: dy has shape {dy.shape} but y has {y.shape}")
        check_alike("backward: dy and y", dy, y)
        return dy.clone().array  # as the caller may change dy while the walk goes on
    if isinstance(dy, (str, bytes)):
        raise DTypeError(f"backward: dy must be a Tensor, a number or None, not {type(dy).__name__}")
    try:
        value = 1.0 if dy is None else float(dy)
    except (TypeError, ValueError, OverflowError) as error:
        raise DTypeError(
            f"backward: dy must be a Tensor, a number or None, not {type(dy).__name__}: {error}"
        ) from None
    if dy is None and y.size() != 1:
        raise ShapeError(f"backward: y has shape {y.shape}; give dy, or reduce y to one element")
    seed = y.device.backend.empty(y.shape, y.dtype)
    y.device.backend.run("fill", out=seed, value=value)
    return seed


def nodes_behind(root: Node) -> list[Node]:
    """Return ``root`` and all nodes that it was computed from, latest first."""
    seen = {root}
    stack = [root]
    while stack:
        for source in stack.pop().sources:
            if isinstance(source, tuple) and source[0] not in seen:
                seen.add(source[0])
                stack.append(source[0])
    return sorted(seen, key=lambda node: node.number, reverse=True)


def _walk(nodes: list[Node], output: int, seed: Array) -> Iterator[tuple[Tensor, Tensor]]:
    uses: dict[Tensor, int] = {}  # leaf -> recorded uses not yet visited
    for node in nodes:
        for source in node.sources:
            if isinstance(source, Tensor):
                uses[source] = uses.get(source, 0) + 1
    changed = changed_after(nodes[-1].number)
    gradients: dict[Any, _Gradient] = {(nodes[0], output): _Gradient(seed, is_shared=True)}
    with noticed_changes() as noticed:
        for node in nodes:
            with kept_unread(changed, type(node.op).__name__, node.number) if changed else nullcontext():
                _visit(node, gradients)
            for source in node.sources:
                if isinstance(source, Tensor):
                    uses[source] -= 1
                    if uses[source] > 0:
                        continue
                    del uses[source]
                    if source in gradients:
                        # in no variable, so that the caller alone has it
                        yield (
                            source,
                            Tensor.wrap(gradients.pop(source).release(source.device.backend), source.device),
                        )
                        changed.update(noticed)
    lap("backward")


def _visit(node: Node, gradients: dict[Any, _Gradient]) -> None:
    """Run one node's backward and hand its results on to where its inputs came from."""
    context, node.context, node.recomputed = node.context, None, None  # frees what was saved during the walk
    if context is None:
        raise GraphError(_why_used_up(node))
    arrived = [gradients.pop((node, index), None) for index in range(len(node.outputs))]
    if all(gradient is None for gradient in arrived):
        return
    recorder = this_thread.recorder
    if recorder is not None:  # again, where forward passes and steps of this walk alternate
        recorder.phase = "Backward"
        recorder.ends_of_gradients.update(node.untracked)
    dys = [
        gradient.array if gradient is not None else context.backend.zeros(shape, dtype)
        for gradient, (shape, dtype) in zip(arrived, node.outputs, strict=True)
    ]
    results = _gradients_of_inputs(node, context, dys)
    shares_memory = context.backend.may_share_memory
    for index, (source, array) in enumerate(zip(node.sources, results, strict=True)):
        if source is None or array is None:
            continue
        if (before := gradients.get(source)) is not None:
            before.add(array, context.backend)
            continue
        others = (*dys, *results[:index], *results[index + 1 :])
        is_shared = any(other is not None and shares_memory(array, other) for other in others)
        gradients[source] = _Gradient(array, is_shared)


def _gradients_of_inputs(node: Node, context: Context, dys: list[Array]) -> tuple[Array | None, ...]:
    """Call an operator's backward; return its results, checked, in the dtypes that the inputs had."""
    if isinstance(context.saved, tuple):  # an operator of a script may have set something else
        context.saved = tuple(map(array_of, context.saved))
    is_own = node.op._is_own
    if is_own and (check := this_thread.before_kernel) is not None:
        if isinstance(context.saved, tuple):
            check(_arrays_in(context.saved, dys[0]))
        this_thread.before_kernel = None  # what else it reads may be what it has written
        try:
            result = node.op.backward(context, *dys)
        finally:
            this_thread.before_kernel = check
    else:
        result = node.op.backward(context, *dys)
    results = result if isinstance(result, tuple) else (result,)
    if is_own:
        wanted = [None if source is None else _shape_and_dtype(source) for source in node.sources]
        results = check_gradients(f"{type(node.op).__name__}: backward", results, dys[0], wanted, context)
    recorder = this_thread.recorder
    if recorder is not None:  # before kernels make other arrays of them
        outputs = tuple(array for array in results if array is not None)
        given = (*dys, *_arrays_in(context.saved, dys[0]))
        recorder.check_outputs(f"the gradient of {type(node.op).__name__}", outputs, given)
    if is_own:
        results = own_copies(context, results, dys)
    if context.input_dtypes is None:
        return results
    dtypes = zip(results, context.input_dtypes, strict=True)
    return tuple(None if array is None else context.cast(array, dtype) for array, dtype in dtypes)


def _arrays_in(values: Iterable[Any], like: Array) -> tuple[Array, ...]:
    return tuple(value for value in values if isinstance(value, type(like)))


def _shape_and_dtype(source: tuple[Node, int] | Tensor) -> tuple[tuple[int, ...], Any]:
    return (source.shape, source.dtype) if isinstance(source, Tensor) else source[0].outputs[source[1]]


def gradients(y: Tensor, dy: Tensor | float | None = None) -> dict[Tensor, Tensor]:
    """Run ``backward``; return all at once: {parameter: gradient}. SINGA keys by id(parameter), which can be reused."""
    return dict(backward(y, dy))
