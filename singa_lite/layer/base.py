# SPDX-License-Identifier: Apache-2.0
"""Layer: operators with parameters that are made at the first call, when the input's size is known.

Note [what is a state]: a leaf Tensor attribute with ``stores_grad`` is a parameter, and stays one when it is frozen by
setting that flag or ``requires_grad`` to False, as does a copy by ``copy.deepcopy``; one without that flag whose name
is in the class's ``buffers`` is a state without gradient. Both are found in attributes, in lists, tuples and dicts,
and in layers below, and are named by their path: ``conv1.W``, ``blocks.0.bn.running_mean``. The order is that of
assignment, which may be another on another rank; a tensor two layers share counts once, under its first name. Last
come layers that are variables of a function in an attribute, as in SINGA's ResNet: ``downsample.conv.W``; not its
default arguments, nor what is behind ``partial`` or methods. A layer whose class overrides ``get_params`` or
``get_states`` has what these return, in the layers above it too; of a key that is the Tensor's own name the layer's
path is left out. Values are copied into these Tensors, and ``set_params`` of such a layer is not called.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np

from ..config import this_thread
from ..dtypes import bfloat16, is_float, is_narrow
from ..errors import CheckpointError, DeviceError, DTypeError, GraphError, OptionError, ShapeError, is_one_of
from ..tensor import Tensor, float32, to_numpy
from ..tensor.checks import as_numbers
from ..tensor.core import check_tensor

__all__ = ["Layer"]

NAMES = {"buffers", "unrecorded_attributes"}  # of attributes, in a tuple
Values = Mapping[str, "Tensor | np.ndarray[Any, Any]"]


class Layer:
    """Base of all layers, and of Model.

    A subclass writes ``forward`` and, if it has parameters, ``initialize``, which gets the arguments of the
    first call. Sub-layers are attributes, also in lists and dicts.

    Attributes:
        name: the attribute under which another layer holds this one; errors show it.
        buffers: names of Tensor attributes that are states without gradient.
        unrecorded_attributes: names of attributes that a recorded step leaves as they are and does not depend on.
            A record looks at all others before each replay, so a counter that the step does not use can be named here.
        sep: what is between the parts of a path.

    Example:
        >>> class Block(Layer):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.layers = [Linear(8), ReLU(), Linear(1)]
        ...     def forward(self, x):
        ...         for layer in self.layers:
        ...             x = layer(x)
        ...         return x
    """

    name: str | None = None
    buffers: tuple[str, ...] = ()
    unrecorded_attributes: tuple[str, ...] = ("_is_initialized",)
    sep = "."
    _is_initialized = False

    def __init__(self) -> None:
        pass

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        if issubclass(cls, (list, tuple, dict)):
            raise DTypeError(
                f"{cls.__name__}: a Layer cannot be a list, tuple or dict too, whose entries alone would be looked at; "
                "keep one in an attribute"
            )
        for name in NAMES & vars(cls).keys():
            if not hasattr(vars(cls)[name], "__get__"):  # a property gives them later
                _check_names(cls.__name__, name, vars(cls)[name])
        if "forward" in cls.__dict__:  # so that a direct call of forward() makes the parameters too
            cls.forward = _initializing(cls.__dict__["forward"])  # type: ignore[method-assign]

    def initialize(self, *inputs: Any, **options: Any) -> None:  # Any: whatever forward takes
        """Make the parameters for inputs like these; called before the first forward, again after one that failed."""

    def forward(self, *inputs: Any, **options: Any) -> Any:  # Any: tensors, lists of them, shapes
        """Compute the result; a subclass writes it."""
        raise NotImplementedError(f"{self!r} defines no forward")

    def __call__(self, *inputs: Any, **options: Any) -> Any:  # Any: as forward
        """Call ``forward``."""
        return self.forward(*inputs, **options)

    def __repr__(self) -> str:
        return f"{type(self).__name__}{f' {self.name!r}' if self.name else ''}"

    def __str__(self) -> str:
        """Return a tree of the layers with their parameters and how many numbers these hold; what ``print`` shows."""
        hint = "" if self._is_initialized else "; parameters are made at the first call"
        lines = [f"{self!r}: {self._count()} parameters{hint}"]
        for name, _, depth, entry, _ in _walk(self):
            indent = "  " * depth
            if isinstance(entry, Layer):
                lines.append(f"{indent}{name}: {type(entry).__name__}, {entry._count()} parameters")
            elif is_parameter(entry):
                lines.append(f"{indent}{name} {entry.dtype}{list(entry.shape)}: {entry.size()}")
        return "\n".join(lines)

    def _count(self) -> int:
        return sum(tensor.size() for tensor in self.get_params().values())

    def __setattr__(self, name: str, value: object) -> None:
        if name in NAMES:
            _check_names(type(self).__name__, name, value)
        if isinstance(value, Layer) or not callable(value):
            _check_no_method(self, name, value)
        for path, entry in items(name, value):
            if isinstance(entry, Layer) and entry.name is None:
                object.__setattr__(entry, "name", path)
        if (
            isinstance(value, Tensor)
            and value.name is None
            and value.creator is None
            and _has_own_states(self)
        ):
            value.name = name  # a key in get_params() and get_states() as SINGA's layers write them
        object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:  # only called when there is no such attribute
        hint = "" if self._is_initialized else "; parameters are made at the first call, or by Model.compile"
        # not repr(self): that of a subclass may read attributes that are not there yet
        raise AttributeError(f"{Layer.__repr__(self)} has no attribute {name!r}{hint}")

    # ---- parameters and states ---------------------------------------------------------------------

    def get_params(self) -> dict[str, Tensor]:
        """Return all parameters by name, see Note [what is a state]; the Tensors themselves, no copies.

        Raises:
            GraphError: two have one name, such as the path "a.0" of an entry of ``a`` and of an attribute called "a.0".
        """
        return self._by_name((name, tensor) for name, tensor, is_param in _states_of(self) if is_param)

    def get_states(self) -> dict[str, Tensor]:
        """Return all parameters and buffers by name; the Tensors themselves, no copies. Raises as ``get_params``."""
        return self._by_name((name, tensor) for name, tensor, _ in _states_of(self))

    def set_params(self, parameters: Values) -> None:
        """Copy values into all parameters.

        Args:
            parameters: exactly the names of ``get_params``, as Tensors or numpy arrays.

        Raises:
            CheckpointError: a name is missing or unknown.
            ShapeError, DTypeError: a value does not fit; nothing was changed if the shape is wrong.
        """
        self._assign("set_params", self.get_params(), parameters)

    def set_states(self, states: Values) -> None:
        """Copy values into all parameters and buffers; as ``set_params``, with the names of ``get_states``."""
        self._assign("set_states", self.get_states(), states)

    def register_layers(self, *layers: Layer | Mapping[str, Layer]) -> None:
        """Add sub-layers as ``<Class>_<number>``, which is the index in ``layers`` or the next that is free.

        A dict has the names as its keys. For SINGA scripts, as attributes and lists are searched anyway: what one of
        these holds too gets the path that it has in SINGA's files.

        Raises:
            DTypeError: a key is not a string.
        """
        found: dict[str, Any] = {}
        if len(layers) == 1 and isinstance(layers[0], Mapping):
            found.update(layers[0])
        else:
            for index, layer in enumerate(layers):
                names = (f"{type(layer).__name__}_{number}" for number in itertools.count(index))
                found[next(name for name in names if name not in {*vars(self), *found})] = layer
        for name in found:
            if not isinstance(name, str):
                raise DTypeError(f"register_layers: names must be strings, not {name!r}")
            _check_no_method(self, name, found[name])
        ids, ordered = set(map(id, found.values())), {}
        for name, value in vars(self).items():
            if any(id(entry) in ids for _, entry in items(name, value)):
                ordered.update(found)  # ahead of what holds one too, as the first name counts
            ordered[name] = value
        vars(self).clear()
        vars(self).update(ordered)
        for name, layer in found.items():
            setattr(self, name, layer)
            if isinstance(layer, Layer):
                object.__setattr__(layer, "name", name)

    def _assign(self, where: str, targets: dict[str, Tensor], values: Values) -> None:
        if not isinstance(values, Mapping):
            raise CheckpointError(f"{where}: expected values by name, got {type(values).__name__}")
        missing, unknown = sorted(set(targets) - set(values)), sorted(set(values) - set(targets))
        if missing or unknown:
            hint = "" if self._is_initialized else "; a layer has its parameters after its first call only"
            raise CheckpointError(f"{where}: {self!r} lacks values for {missing}, knows no {unknown}{hint}")
        found = {name: _value_for(targets[name], where, name, value) for name, value in values.items()}
        for name, value in found.items():
            if value.shape != targets[name].shape:
                raise ShapeError(f"{where}: {name} has shape {targets[name].shape}, not {value.shape}")
        for name, value in found.items():
            targets[name].copy_from(value)

    def _by_name(self, found: Iterator[tuple[str, Tensor]]) -> dict[str, Tensor]:
        states: dict[str, Tensor] = {}
        seen: set[int] = set()
        for name, tensor in found:
            if id(tensor) in seen:
                continue
            if name in states:
                raise GraphError(
                    f"{self!r}: two of its parameters or buffers are called {name!r}; rename one"
                )
            seen.add(id(tensor))
            states[name] = tensor
        return states

    # ---- for subclasses ----------------------------------------------------------------------------

    def new_parameter(self, name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Return a zero-filled parameter on the device and with the dtype of ``like``.

        It is float32 where that is bfloat16, or inside ``autograd.autocast`` float16: an optimizer's steps are too
        small for 16 bits, so copies of parameters are rounded instead.
        """
        check_tensor("new_parameter", like)
        is_mixed = this_thread.autocast is not None and is_narrow(like.dtype)
        dtype = float32 if is_mixed or like.dtype == bfloat16 else like.dtype
        made = Tensor(shape, like.device, dtype, requires_grad=True, stores_grad=True, name=name)
        made._is_parameter = True
        return made

    def check_float(self, x: object) -> None:
        """Raise a DTypeError that names this layer unless ``x`` is a float Tensor."""
        if not isinstance(x, Tensor) or not is_float(x.dtype):
            came = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise DTypeError(f"{self!r}: needs a float Tensor as input, got {came}")

    def dtype_check(self, *inputs: Tensor) -> None:
        """Raise a DTypeError unless all inputs have one dtype (SINGA's name)."""
        for tensor in inputs:
            check_tensor(repr(self), tensor)
        if len({tensor.dtype for tensor in inputs}) > 1:
            found = ", ".join(str(tensor.dtype) for tensor in inputs)
            raise DTypeError(f"{self!r}: inputs must share one dtype, got {found}; convert with as_type()")

    def device_check(self, *inputs: Tensor) -> None:
        """Raise a DeviceError unless all inputs are on one device; SINGA's moves them to the first one's."""
        for tensor in inputs:
            check_tensor(repr(self), tensor)
        if len({id(tensor.device) for tensor in inputs}) > 1:
            found = ", ".join(str(tensor.device) for tensor in inputs)
            raise DeviceError(f"{self!r}: inputs must be on one device, got {found}; move with to_device()")

    def check_size(self, what: str, came: int, expected: int) -> None:
        """Raise a ShapeError that names this layer unless both sizes agree."""
        if came != expected:
            raise ShapeError(
                f"{self!r}: expected {expected} {what} but the input has {came}; "
                "check the layer before, or leave the input size out and let the first call decide"
            )


def _value_for(target: Tensor, where: str, name: str, value: Any) -> Tensor | np.ndarray:
    """Return ``value`` as an array, or a copy of a Tensor like ``target``, as it may be another target itself."""
    if not isinstance(value, Tensor):
        return as_numbers(where, name, value)
    is_alike = value.dtype == target.dtype and value.device is target.device
    return value.clone() if is_alike else to_numpy(value)


def check_once(where: str, name: str, by_place: object, by_name: object, default: object) -> None:
    """Raise OptionError if an argument in its place is given by name too, as another value, the default left aside."""
    if not is_one_of(by_name, (default, by_place)):
        raise OptionError(f"{where}: {name} is given twice, as {by_place!r} and {name}={by_name!r}")


def _initializing(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``forward``, preceded by ``initialize`` at the first call; if that fails, attributes are as before."""

    @functools.wraps(forward)
    def wrapped(self: Layer, *inputs: Any, **options: Any) -> Any:
        if self._is_initialized:
            return forward(self, *inputs, **options)
        makes_parameters = type(self).initialize is not Layer.initialize
        if makes_parameters and this_thread.recorder is not None:
            this_thread.recorder.break_graph(
                f"it makes the parameters of a {type(self).__name__}, which a replay would do again; call the layer "
                "once before",
                is_lasting=False,
            )
        with unchanged_by_errors([self] if makes_parameters else []):
            recording, this_thread.recording = this_thread.recording, False  # what it makes are leaves
            try:
                self.initialize(*inputs, **options)
            finally:
                this_thread.recording = recording
            self._is_initialized = True
            if makes_parameters and this_thread.called is not None:
                this_thread.called._name_parameters_of(self)
            return forward(self, *inputs, **options)

    return wrapped


@contextmanager
def unchanged_by_errors(layers: Iterable[Layer]) -> Iterator[None]:
    """Give ``layers`` back the attributes they had, if the ``with`` block raises."""
    before = [(layer, dict(vars(layer))) for layer in layers]
    try:
        yield
    except BaseException:
        for layer, attributes in before:
            vars(layer).clear()
            vars(layer).update(attributes)
        raise


def items(path: str, value: object) -> Iterator[tuple[str, object]]:
    """Yield the entries of a list, tuple or dict as (path, entry); the value itself if it is another object.

    A Tensor or Layer that is a key has its number behind a # as a name, as its text changes with its values.
    """
    if isinstance(value, dict):
        keys = [f"#{number}" if isinstance(key, (Tensor, Layer)) else key for number, key in enumerate(value)]
        entries = [(str(key), entry) for key, entry in zip(keys, value.values(), strict=True)]
    elif isinstance(value, (list, tuple)):
        entries = [(str(number), entry) for number, entry in enumerate(value)]
    else:
        yield path, value
        return
    for key, entry in entries:
        yield from items(f"{path}.{key}", entry)


def _check_names(where: str, name: str, value: object) -> None:
    """Raise DTypeError unless ``value`` is a tuple of names of attributes, or a list or set that is not empty."""
    is_kind = isinstance(value, tuple) or (isinstance(value, (list, set, frozenset)) and value)
    if not is_kind or not all(isinstance(each, str) for each in value):  # type: ignore[attr-defined]
        raise DTypeError(
            f"{where}: {name} must be a tuple of names of attributes, not {value!r:.60}; give anything else another "
            "name"
        )


def _check_no_method(layer: Layer, name: str, value: object) -> None:
    """Raise DTypeError if a class of this package defines the method ``name``, which ``value`` would replace."""
    owner = next((kind for kind in type(layer).__mro__ if name in vars(kind)), object)
    if owner.__module__.startswith("singa_lite.") and isinstance(vars(owner)[name], FunctionType):
        raise DTypeError(
            f"{type(layer).__name__}: {name} is a method of {owner.__name__}, which the {type(value).__name__} would "
            "replace; give the attribute another name"
        )


class Held(NamedTuple):
    """A layer or Tensor that a layer holds, found by ``_walk``.

    Attributes:
        name: its path from the layer that holds it; from the root, where a function holds it.
        path: its path from the root.
        depth: how many layers hold it, one within the other.
        entry: the layer or Tensor.
        is_buffer: whether its holder calls it a buffer.
    """

    name: str
    path: str
    depth: int
    entry: Layer | Tensor
    is_buffer: bool


def _walk(root: Layer, opens: Callable[[Layer], bool] = lambda layer: True) -> Iterator[Held]:
    """Yield the layers and Tensors below ``root``: each layer once, followed by those below it if ``opens(layer)``.

    Last come layers that functions in attributes have enclosed.
    """
    seen = {id(root)}
    functions: list[tuple[str, FunctionType]] = []

    def inside(layer: Layer, prefix: str, depth: int) -> Iterator[Held]:
        for attribute, value in vars(layer).items():
            yield from below(attribute, value, prefix, depth, attribute in layer.buffers)

    def below(start: str, value: object, prefix: str, depth: int, is_buffer: bool) -> Iterator[Held]:
        for name, entry in items(start, value):
            path = prefix + name
            if isinstance(entry, FunctionType):
                functions.append((path, entry))
            elif isinstance(entry, Tensor):
                yield Held(name, path, depth, entry, is_buffer)
            elif isinstance(entry, Layer) and id(entry) not in seen:
                seen.add(id(entry))
                yield Held(name, path, depth, entry, is_buffer)
                if opens(entry):
                    yield from inside(entry, f"{path}.", depth + 1)

    yield from inside(root, "", 1)
    for path, layer in _enclosed(functions):
        yield from below(path, layer, "", 1, False)


def layers_of(root: Layer) -> Iterator[tuple[str, Layer]]:
    """Yield ``root`` and all layers below it with their paths from it, each once."""
    yield "", root
    yield from ((held.path, held.entry) for held in _walk(root) if isinstance(held.entry, Layer))


def _enclosed(functions: list[tuple[str, FunctionType]]) -> Iterator[tuple[str, Layer]]:
    """Yield the layers that ``functions`` have enclosed with their paths, also those of functions added meanwhile.

    Left out is a layer that holds the function: it holds what is walked through, or that is a copy of it.
    """
    for path, function in functions:
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                value = cell.cell_contents
            except ValueError:  # not assigned yet
                continue
            if isinstance(value, Layer) and not _holds(value, function, set()):
                yield f"{path}.{name}", value


def _holds(layer: Layer, function: FunctionType, seen: set[int]) -> bool:
    """Return whether ``function`` is in an attribute of ``layer`` or of one below it."""
    seen.add(id(layer))
    entries = [entry for value in vars(layer).values() for _, entry in items("", value)]
    return any(entry is function for entry in entries) or any(
        _holds(entry, function, seen)
        for entry in entries
        if isinstance(entry, Layer) and id(entry) not in seen
    )


def _states_of(root: Layer) -> Iterator[tuple[str, Tensor, bool]]:
    """Yield (name, tensor, whether it is a parameter) of every state; a shared tensor under each of its names."""
    for held in _walk(root, opens=lambda layer: not _has_own_states(layer)):
        entry = held.entry
        if isinstance(entry, Layer):
            if _has_own_states(entry):
                yield from _own_states(entry, f"{held.path}.")
        elif held.is_buffer and not entry.is_recorded and not entry.stores_grad:
            yield held.path, entry, False
        elif is_parameter(entry):
            entry._is_parameter = True
            yield held.path, entry, True


def is_parameter(tensor: Tensor) -> bool:
    """Return whether a Tensor that a layer holds is a parameter of it, see Note [what is a state]."""
    return not tensor.is_recorded and (tensor.stores_grad or tensor._is_parameter)


def _has_own_states(layer: Layer) -> bool:
    """Return whether the class of ``layer`` says itself what its parameters or states are."""
    kind = type(layer)
    return kind.get_params is not Layer.get_params or kind.get_states is not Layer.get_states


def _own_states(layer: Layer, prefix: str) -> Iterator[tuple[str, Tensor, bool]]:
    """Yield as ``_states_of`` does, by what ``get_params`` and ``get_states`` of ``layer`` return."""
    params, states = layer.get_params(), layer.get_states()
    for values in (params, states):
        if not isinstance(values, Mapping):
            raise DTypeError(
                f"{layer!r}: get_params and get_states must return Tensors by name, not {values!r}"
            )
    for name, tensor in {**params, **states}.items():
        check_tensor(repr(layer), tensor)
        if not isinstance(name, str):
            raise DTypeError(f"{layer!r}: get_params and get_states must have names as keys, not {name!r}")
        own = _own_part(name, layer, prefix) if name == tensor.name else name
        yield prefix + own, tensor, name in params


def _own_part(name: str, layer: Layer, prefix: str) -> str:
    """Return the part of a Tensor's name behind the path of ``layer``, which begins it from ``Model.compile`` on."""
    if name.startswith(prefix):
        return name.removeprefix(prefix)
    return f".{name}".rpartition(f".{layer.name}.")[2] if f".{layer.name}." in f".{name}" else name
