# SPDX-License-Identifier: Apache-2.0
"""The contract of an optimizer: one method, ``update_all`` or ``apply``, and SINGA's other names for it."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np

from .. import autograd
from ..autograd.parts import BackwardPairs
from ..backend.formulas import UPDATES
from ..config import this_thread
from ..device import Device
from ..errors import CheckpointError, DTypeError, OptionError, ShapeError, check_choice, check_int
from ..graph.clock import drop_step, lap
from ..graph.interrupts import deferred_interrupts
from ..graph.nodes import Scalar
from ..graph.recorder import bookkeep, break_graph, guard, scalar, unrecorded
from ..tensor import Tensor
from ..tensor.checks import as_dtype
from ..tensor.core import check_tensor, set_grads_fresh
from ..tensor.pytree import leaves
from ..users_line import warn
from .arguments import comparable, description_of, make
from .checks import (
    as_pairs,
    check_arrays,
    check_initialized,
    check_not_wrapped,
    check_pair,
    check_steps,
    unique_names,
)
from .overrides import (
    ON_HOST,
    UNRECORDABLE,
    is_of_package,
    on_host,
    replaced_methods,
    runs_later,
    unrecordable,
    updates_in,
)
from .schedule import Constant, DecayScheduler, ScheduleAttribute, as_number, as_schedule, described_entries

Pairs = Iterable[tuple[Tensor, Tensor]]
# parameters and the arrays of their gradients, all of one dtype
UpdateGroup = tuple[Device, list[Tensor], list[Any]]
PART_BYTES = 4 << 20  # of gradients that a recorded step applies together; ResNet-18 has 9 such parts
NOT_UPDATED = (
    "{}: step() only counts a step, and no parameter was updated since the last one, although loss.backward() has left "
    "gradients; call optimizer(loss) instead of both, or optimizer.update(p, p.grad) for each parameter before step()"
)
NOT_SAVED = (
    "{}: the Tensors and arrays in {} are not in its states: they are not saved, and not compared over ranks; name "
    "them in slot_names and keep them by self.slots(param), or write get_states and set_states, unless no later step "
    "needs them"
)
# of Optimizer: its state and its parameters, not what it was made with
OWN_ATTRIBUTES = (
    "_step_counter",
    "_slots",
    "_parameters",
    "_names",
    "_unnamed",
    "_has_updated",
    "_has_warned",
    "slot_names",
)


class MomentumRule(NamedTuple):
    """How an optimizer sums gradients up: v = momentum * v + g, and the step is v, or by Nesterov g + momentum * v."""

    momentum: float
    is_nesterov: bool


class Optimizer:
    """Changes parameters along their gradients.

    A subclass writes ``update_all(pairs)``, or as in SINGA ``apply(name, value, grad)``, which is called for each
    parameter. In a recorded step their Python runs at every replay, unless the class sets ``is_recordable = True``:
    then it runs once, its kernels are recorded, and numbers that change reach these through ``scalar``; an attribute
    that decides which kernels run needs ``guard``, as SGD's ``nesterov``. The same holds for what it inherits from
    classes that are not optimizers. With a function set as an attribute instead of a method,
    recorded steps run eagerly.

    Attributes that are schedules, such as ``lr``, can be set to a number or another schedule between steps; recorded
    steps see it.

    State is kept per parameter object, never by name: SINGA keys momentum by name and mixes the buffers of
    two layers that are both called 'W'.

    Args:
        lr: learning rate, >= 0, a number or a DecayScheduler of the step.
        dtype: accepted for SINGA scripts; what is kept of a parameter has its dtype.
    """

    # the arrays kept per parameter, in the parameter's shape and dtype
    slot_names: tuple[str, ...] = ()
    is_recordable = False
    places_streams = False  # whether a Model calls ``place_streams`` before each training step
    # then the number of the next call within the update, and how many updates were left out so far
    place: tuple[int | None, int] = None, 0
    # names of methods that the class has not written, but inherited from a class that is no Optimizer
    _inherited_methods: tuple[str, ...] = ()
    lr = ScheduleAttribute()
    _unnamed: tuple[int, ...] | None = None  # see ``unnamed``
    _has_updated = False  # by kernels, since the last ``step``
    _has_warned = False  # of Tensors and arrays that are not saved

    def __init_subclass__(cls, **arguments: object) -> None:
        super().__init_subclass__(**arguments)
        for name in (*ON_HOST, *UNRECORDABLE):
            if runs_later(getattr(cls, name, None)):
                raise OptionError(
                    f"{cls.__name__}: {name} is a generator or a coroutine, which calling does not run; write it "
                    "without yield and async"
                )
        if vars(cls).get("is_recordable", False):
            return
        inherited = []
        for name in (*ON_HOST, *UNRECORDABLE):
            kind = next((kind for kind in cls.__mro__ if name in vars(kind)), None)
            if kind is None or not isinstance(vars(kind)[name], FunctionType) or not is_of_package(cls, name):
                continue
            is_beside = not issubclass(kind, Optimizer) and not vars(kind).get("is_recordable", False)
            if kind is cls or is_beside:
                setattr(cls, name, (on_host if name in ON_HOST else unrecordable)(vars(kind)[name]))
            if is_beside:
                inherited.append(name)
        cls._inherited_methods = tuple(inherited)

    def __init__(self, lr: float | DecayScheduler, dtype: object = None) -> None:
        self.lr = lr
        self.dtype = None if dtype is None else as_dtype(dtype)
        self._step_counter = 0
        self._slots: dict[Tensor, dict[str, Tensor]] = {}
        self._parameters: list[Tensor] = []
        self._names: dict[Tensor, str] = {}  # of those that ``prepare`` was given

    @property
    def step_counter(self) -> int:
        """Steps made so far, on which schedules depend."""
        break_graph("it reads an optimizer's step counter, which a replay would not do")
        return self._step_counter

    @step_counter.setter
    def step_counter(self, steps: int) -> None:
        break_graph("it sets an optimizer's step counter, which a replay would not do")
        self._step_counter = check_int(type(self).__name__, "step_counter", steps, 0)

    def __call__(self, loss: Tensor) -> None:
        """Run backward, update every parameter, and count the step.

        Raises:
            OptionError: a DistOpt of several ranks wraps this optimizer.
        """
        check_not_wrapped(type(self).__name__, self)
        self.call(loss)
        self.step()

    def call(self, loss: Tensor) -> None:
        """Run backward and update every parameter, without counting the step; a subclass may write it, as in SINGA.

        A recorded step applies gradients while backward runs, where this package's own update does it, so that they
        take less memory.
        """
        own = getattr(self.update_all, "__module__", "")
        if this_thread.recorder is not None and own.startswith(f"{__package__}."):
            self.update_pairs(BackwardPairs(loss, PART_BYTES))
        else:
            self.update_pairs(list(autograd.backward(loss)))

    def prepare(self, params: dict[str, Tensor], buffers: dict[str, Tensor]) -> None:
        """Take over the names of a model's parameters; ``buffers`` are states without gradient.

        ``Model.compile`` calls it on every rank, or else the first training step; DistOpt makes the ranks agree here.

        Raises:
            OptionError: not a dict. DTypeError: something in it is not a Tensor.
        """
        for name, values in (("params", params), ("buffers", buffers)):
            if not isinstance(values, Mapping):
                raise OptionError(f"{type(self).__name__}: prepare: {name} must be a dict, not {values!r}")
            for value in values.values():
                check_tensor(f"{type(self).__name__}: prepare", value)
        check_initialized(self)
        for name, param in params.items():
            param.name = self._names[param] = name
            self.slots(param)
        self._parameters, self._unnamed = list(params.values()), None

    def place_streams(self) -> None:
        """Set the random streams of the devices to where the next call of this optimizer has them begin."""

    # ---- gradients one can hold ----------------------------------------------------------------------

    def set_parameters(self, params: Mapping[str, Tensor]) -> None:
        """Name the parameters that ``zero_grad`` is for, as ``Model.compile`` does. With a DistOpt all ranks call it.

        Args:
            params: by name, such as ``model.get_params()`` gives once the model has its parameters.

        Raises:
            OptionError: not a dict, or an empty one. DTypeError: something in it is not a Tensor.
        """
        where = f"{type(self).__name__}: set_parameters"
        if not isinstance(params, Mapping) or not params:
            raise OptionError(
                f"{where} needs parameters by name, such as model.get_params() after compile() or a first forward "
                f"pass, got {params!r}"
            )
        for name, param in params.items():
            if not isinstance(param, Tensor):
                raise DTypeError(f"{where}: {name} must be a Tensor, not {type(param).__name__}")
        break_graph("it names an optimizer's parameters, which a replay would not do")
        self.prepare(dict(params), {})

    def zero_grad(self) -> None:
        """Set the gradients of the parameters to zero and not fresh: the next ``Tensor.backward`` replaces them.

        Raises:
            OptionError: neither ``set_parameters`` nor ``Model.compile`` has named parameters.
        """
        if not self._parameters:
            raise OptionError(
                f"{type(self).__name__}: zero_grad knows no parameters; call set_parameters(model.get_params()) first"
            )
        guard((id(self), "parameters"), lambda: tuple(map(id, self._parameters)))
        set_grads_fresh(self._parameters, False)
        for param in self._parameters:
            if param.grad is not None:
                param.grad.set_value(0)

    # ---- updates -----------------------------------------------------------------------------------

    def update_all(self, pairs: Pairs) -> None:
        """Update each parameter by its gradient, in place."""
        if type(self).apply is Optimizer.apply and "apply" not in vars(self):
            raise OptionError(
                f"{type(self).__name__}: an optimizer writes update_all(pairs), or apply(name, value, grad)"
            )
        for param, grad in as_pairs(type(self).__name__, pairs):
            self.apply(param.name or "", param, grad)

    def apply(self, param_name: str, param_value: Tensor, param_grad: Tensor) -> None:
        """Update one parameter, as SINGA does; the name is not used as a key."""
        self.update_all([(param_value, param_grad)])

    def update(self, param: Tensor, grad: Tensor) -> None:
        """Update one parameter (SINGA's older name), by what a subclass has overridden."""
        self.update_pairs([(param, grad)])

    def update_pairs(self, pairs: Pairs) -> None:
        """Update by what was set or written last, ``update_all`` or ``apply``."""
        self._guard_methods()
        is_own = "update_all" in next(filter(None, map(updates_in, (self, *type(self).__mro__))))
        update = self.update_all if is_own else partial(Optimizer.update_all, self)
        with autograd.autocast(enabled=False):
            update(pairs)

    def _guard_methods(self) -> None:
        """Guard the names of slots; break the graph for functions that are set as attributes instead of methods."""
        if this_thread.recorder is None:
            return
        held, names = vars(self), (*ON_HOST, *UNRECORDABLE)
        # map: a replay makes few calls of Python
        guard((id(self), "methods"), lambda: (self.slot_names, *map(held.get, names)))
        for name in replaced_methods(self):
            break_graph(f"{type(self).__name__}.{name} is an attribute, whose Python a replay would not run")

    def momentum_rule(self, step: int) -> MomentumRule:
        """Return the momentum at ``step``, for a dist_option that applies it before gradients are sent.

        Raises:
            OptionError: this optimizer has none that could be applied there; the reason.
        """
        raise OptionError(
            f"{type(self).__name__}: has no momentum that a dist_option could take over; use SGD"
        )

    def update_velocity(self, pairs: Pairs) -> None:
        """Update by velocities, gradients that have the momentum of ``momentum_rule`` in them already.

        Raises:
            OptionError: as ``momentum_rule``.
        """
        self.momentum_rule(self._step_counter)
        raise OptionError(f"{type(self).__name__}: writes momentum_rule, but not update_velocity")

    def run_update(
        self, kernel: str, pairs: Pairs, *, slots: Sequence[str] | None = None, **attributes: Any
    ) -> None:
        """Check all ``pairs``, then run an update kernel once for all tensors of a device and dtype.

        Args:
            kernel: a name of ``backend.formulas.UPDATES``.
            pairs: what ``update_all`` was given.
            slots: those of ``slot_names`` that are the kernel's states, in its order; None: all of them.
            attributes: of the kernel: numbers, or what ``scalar`` gives for those that change.

        Raises:
            OptionError: there is no such kernel, or it has another number of states. ShapeError, DTypeError,
                DeviceError: a gradient does not fit, or what is kept of a parameter that has got another dtype since.
        """
        check_choice("run_update", "kernel", kernel, tuple(UPDATES))
        names = self.slot_names if slots is None else tuple(slots)
        if len(names) != len(UPDATES[kernel].states) or not {*names} <= {*self.slot_names}:
            raise OptionError(
                f"{type(self).__name__}: {kernel} changes {len(UPDATES[kernel].states)} arrays per parameter; name "
                f"them by slots=, from {self.slot_names}, got {names}"
            )
        self._guard_methods()
        self.note_update()
        if not isinstance(pairs, BackwardPairs):
            groups = self._grouped(pairs)
            each = _attributes_of_kernels(attributes) if len(groups) > 1 else iter([attributes])
            self._run_update(kernel, names, groups, each)
            return
        each, is_first = _attributes_of_kernels(attributes), True
        with deferred_interrupts():
            for part in pairs.parts():
                self._run_update(kernel, names, self._grouped(part), each)
                del part  # or its memory would be in use until the next one is there
                if not is_first and this_thread.recorder is not None:
                    this_thread.recorder.updates_in_parts = True
                is_first = False

    def _grouped(self, pairs: Pairs) -> list[UpdateGroup]:
        groups: dict[tuple[Device, str], UpdateGroup] = {}
        for param, grad in as_pairs(type(self).__name__, pairs):
            check_pair(type(self).__name__, param, grad)
            if self._parameters and param not in self._names:
                self._unnamed = param.shape
            _, params, grads = groups.setdefault((param.device, param.dtype.char), (param.device, [], []))
            params.append(param)
            grads.append(grad.array)
        return list(groups.values())

    def _run_update(
        self,
        kernel: str,
        names: tuple[str, ...],
        groups: list[UpdateGroup],
        attributes: Iterator[dict[str, Any]],
    ) -> None:
        """Run an update kernel for each of the ``groups``, with the slots ``names`` and the next of ``attributes``."""
        # of all, before a kernel changes anything
        kept = [self._kept(names, params) for _, params, _ in groups]
        for (device, params, grads), states in zip(groups, kept, strict=True):
            device.backend.run(
                kernel, *grads, out=(*(param.array for param in params), *states), **next(attributes)
            )

    def _kept(self, names: tuple[str, ...], params: list[Tensor]) -> list[Any]:
        """Return the arrays of the slots ``names``, each of all ``params``; DTypeError unless they have their dtype."""
        slots = [self.slots(param) for param in params] if names else []
        for param, each in zip(params, slots, strict=False):  # without names there are none
            if wrong := [name for name in names if each[name].dtype != param.dtype]:
                raise DTypeError(
                    f"{type(self).__name__}: {param.name} is {param.dtype}, but its {wrong[0]} of earlier steps is "
                    f"{each[wrong[0]].dtype}; make a new optimizer for a parameter that changes its dtype"
                )
        return [each[name].array for name in names for each in slots]

    def number(self, name: str) -> Any:  # Any: a float, or a Scalar while a step is recorded
        """Return the schedule called ``name`` at this step, for a kernel; every replay reads it again."""
        return scalar(partial(self.value_of, name))

    def value_of(self, name: str, step: int | None = None) -> float:
        """Return the schedule called ``name`` at ``step``, None is this one; a subclass may have set it to a number."""
        try:
            value = getattr(self, name)
        except (AttributeError, TypeError):
            raise OptionError(f"{type(self).__name__}: has no schedule {name!r}") from None
        schedule = value if isinstance(value, DecayScheduler) else as_schedule(name, value, -math.inf)
        step = self._step_counter if step is None else step
        number = schedule(step)
        is_in_range = type(number) is float and (
            0.0 < number < 1.0 or (number == 0.0 and type(schedule) is Constant)
        )
        if not is_in_range:
            self._check_number(name, number, step)
        return float(number)

    def _check_number(self, name: str, number: object, step: int) -> None:
        """Raise OptionError unless a schedule's value is a number, and in the range of a ScheduleAttribute."""
        when = f"at step {step}"
        own = next((vars(kind)[name] for kind in type(self).__mro__ if name in vars(kind)), None)
        if isinstance(own, ScheduleAttribute):
            own.check(self, number, when)
        elif math.isnan(as_number(number)) and number == number:  # a NaN of its own is the caller's
            raise OptionError(f"{type(self).__name__}: {name} is {number!r} {when}, and not a number")

    def lr_at(self, step: int) -> float:
        """Return the learning rate at ``step``."""
        return self.value_of("lr", step)

    @property
    def lr_value(self) -> float:
        """The learning rate of the next step."""
        return self.lr(self.step_counter)

    def note_update(self) -> None:
        """Note that parameters were updated, here or by a store's optimizer, so that ``step`` ends a step."""
        vars(self)["_has_updated"] = True

    def step(self) -> None:
        """Count a step; warns where gradients of ``loss.backward()`` wait and no parameter was updated."""
        self._guard_methods()
        is_by_kernels = self.is_recordable and not replaced_methods(self)
        if is_by_kernels and not self._has_updated and any(p.has_fresh_grad for p in self._parameters):
            warn(NOT_UPDATED.format(type(self).__name__))
        vars(self)["_has_updated"] = False
        lap("update")
        bookkeep(self._count_step)

    def _count_step(self) -> None:
        vars(self)["_step_counter"] = self._step_counter + 1  # past a __setattr__, as every replay comes here
        drop_step()

    def backward_and_update(self, loss: Tensor) -> None:
        """Do the same as calling the optimizer."""
        self(loss)

    def describe(self) -> dict[str, Any]:
        """Return the class and the arguments that make this optimizer again, as JSON values.

        ``description = sgd.describe(); opt.create(description.pop("class"), **description)`` is an optimizer like
        this one, without its state. A schedule is a dict of its class and arguments.

        Raises:
            OptionError: an argument of the constructor has no attribute of its name or is not a JSON value, or an
                attribute is not what the constructor makes of the arguments, as far as ``comparable`` tells.
        """
        description = description_of(self)
        arguments, name = json.loads(json.dumps(description)), type(self).__name__
        again = make(Optimizer, arguments.pop("class"), arguments)
        if type(again) is not type(self):
            raise OptionError(f"{name}: a class of this name was defined again after this optimizer was made")
        mine, made, step = vars(self), vars(again), self._step_counter
        for key in [key for key in {**mine, **made} if key not in OWN_ATTRIBUTES]:
            is_cached = isinstance(getattr(type(self), key, None), cached_property)
            if is_cached or comparable(mine.get(key), step) == comparable(made.get(key), step):
                continue
            cure = f"make {key} what an argument of the constructor says"
            if key in replaced_methods(self):
                cure = f"write a subclass with the method {key}"
            raise OptionError(
                f"{name}: its constructor would not make it again: {key} is {mine.get(key)!r}, but would be "
                f"{made.get(key)!r}; {cure}"
            )
        return description

    def settings(self) -> dict[str, Any]:
        """Return class, numbers and what schedules give, as JSON values: what must be equal on all ranks.

        Of a function that is set instead of a method it is the name.
        """
        functions = {
            name: getattr(function, "__qualname__", type(function).__name__)
            for name, function in replaced_methods(self).items()
        }
        return {"class": type(self).__name__, **self._described(), **functions}

    def __repr__(self) -> str:
        """Return class and numbers, like "SGD(lr=0.1, momentum=0.9, ...)"."""
        names = (name for name in self._described() if not name.startswith("_"))
        return f"{type(self).__name__}({', '.join(f'{name}={vars(self)[name]!r}' for name in names)})"

    def _described(self) -> dict[str, Any]:
        """Return the attributes that are numbers, text or schedules, as JSON values."""
        attributes = {name: value for name, value in vars(self).items() if name not in OWN_ATTRIBUTES}
        return described_entries(attributes, self._step_counter)

    def states_loaded(self) -> None:
        """Called when the values of parameters or of this optimizer's state were replaced by saved ones."""

    # ---- state -------------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> Optimizer:
        """Return a copy with its own state for the same parameters, or for copies that are made in the same call."""
        reduced: Any = self.__reduce_ex__(4)  # as copy.deepcopy does it
        if not memo:  # by itself, and not in a model, whose parameters are copied too
            memo.update((id(param), param) for param in (*self._slots, *self._parameters))
        make, arguments, state, *_ = reduced
        new: Optimizer = make(*copy.deepcopy(arguments, memo))
        memo[id(self)] = new
        state = copy.deepcopy(state, memo)
        if hasattr(new, "__setstate__"):
            new.__setstate__(state)
            return new
        for attributes in state if isinstance(state, tuple) else (state,):  # the second one is of __slots__
            for name, value in (attributes or {}).items():
                object.__setattr__(new, name, value)
        return new

    def slots(self, param: Tensor) -> dict[str, Tensor]:
        """Return the state of ``param``, zeros at first: {slot name: tensor like the parameter}.

        ShapeError: the parameter has got another shape since.
        """
        if not isinstance(param, Tensor):
            raise DTypeError(
                f"{type(self).__name__}: the parameter must be a Tensor, not {type(param).__name__}"
            )
        slots = self._slots.setdefault(param, {})
        for slot in self.slot_names:
            if slot not in slots:
                with unrecorded():
                    slots[slot] = Tensor(param.shape, param.device, param.dtype)
            elif slots[slot].array.shape != param.array.shape:
                raise ShapeError(
                    f"{type(self).__name__}: {param.name} has shape {param.shape}, but its {slot} {slots[slot].shape} "
                    "of earlier steps; make a new optimizer for a parameter that changes its shape"
                )
        return slots

    def unnamed(self) -> tuple[int, ...] | None:
        """Return the shape of a parameter that was updated and that no ``prepare`` has named, None if there is none."""
        return self._unnamed

    def get_states(self) -> dict[str, np.ndarray]:
        """Return what a checkpoint keeps: "step_counter", and "<parameter>:<slot>" for every slot.

        Parameters are called by name, and by the order in which they were first updated where names repeat. Warns,
        once, of other Tensors and numpy arrays in attributes, such as SINGA's ``moments`` by name, unless a subclass
        writes this method: then it calls this one and adds its own, which its ``set_states`` takes out.
        """
        break_graph("it reads an optimizer's states, which a replay would not do")
        if not self._has_warned and type(self).get_states is Optimizer.get_states:
            self._warn_of_unsaved()
        names = unique_names(self._slots, self._names)
        states = {
            f"{names[param]}:{slot}": value.device.backend.to_numpy(value.array)
            for param in self._slots
            for slot, value in self.slots(param).items()
        }
        return {"step_counter": np.array(self._step_counter), **states}

    def _warn_of_unsaved(self) -> None:
        """Warn of attributes with numpy arrays, or with Tensors that are neither parameters nor slots."""
        known = {
            *self._slots,
            *self._names,
            *(slot for each in self._slots.values() for slot in each.values()),
        }

        def is_known(leaf: Any) -> bool:  # clones store gradients too
            return isinstance(leaf, Tensor) and (leaf in known or (leaf.stores_grad and not self._parameters))

        unsaved = [
            name
            for name, value in vars(self).items()
            if name not in OWN_ATTRIBUTES and not all(map(is_known, leaves(value, (Tensor, np.ndarray))))
        ]
        if unsaved:
            vars(self)["_has_warned"] = True
            warn(NOT_SAVED.format(type(self).__name__, ", ".join(unsaved)))

    def set_states(self, states: dict[str, np.ndarray]) -> None:
        """Continue from ``get_states``; the parameters must be known, by ``prepare`` or an earlier update.

        Raises:
            CheckpointError: states are missing, unknown or of another shape or dtype, or the number of steps is no
                possible one; nothing was changed.
        """
        check_arrays(type(self).__name__, states)
        mine = Optimizer.get_states(self)  # not what a subclass's adds, which its set_states takes
        missing, unknown = sorted(set(mine) - set(states)), sorted(set(states) - set(mine))
        if unknown and not self._slots:
            raise CheckpointError(
                f"{type(self).__name__}: it has no parameters to set states of; before, call set_parameters with the "
                f"names of the optimizer that was saved, or make an update where those have none: {unknown}"
            )
        if missing or unknown:
            raise CheckpointError(
                f"{type(self).__name__}: the states lack {missing} and have unknown {unknown}; an optimizer of another "
                "kind, or of other parameters, has made them, or a subclass whose set_states does not take what its "
                "get_states adds. For the model's alone call load_states before set_optimizer"
            )
        for key, value in mine.items():
            if value.shape != states[key].shape or value.dtype != states[key].dtype:
                raise CheckpointError(
                    f"{type(self).__name__}: state {key!r} is {states[key].dtype}{states[key].shape}, "
                    f"not {value.dtype}{value.shape}"
                )
        check_steps(type(self).__name__, states["step_counter"])
        for param, name in unique_names(self._slots, self._names).items():
            for slot, target in self._slots[param].items():
                target.copy_from_numpy(states[f"{name}:{slot}"])
        self._step_counter = int(states["step_counter"])


def _attributes_of_kernels(attributes: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Return the attributes of the kernels of one update, of which the first alone reads a Scalar."""
    given = {name: v.shared() if isinstance(v, Scalar) else (v, v) for name, v in attributes.items()}
    yield {name: first for name, (first, _) in given.items()}
    while True:
        yield {name: other for name, (_, other) in given.items()}


def create(name: str, /, **arguments: Any) -> Optimizer:  # Any: numbers, text, lists, and dicts of schedules
    """Return a new optimizer of the class called ``name``, of the package or defined by the script.

    Args:
        name: of the class, such as "SGD".
        arguments: of its constructor; a schedule is a DecayScheduler or what ``Optimizer.describe`` gives of it, such
            as ``{"class": "ExponentialDecay", "init_value": 0.1, "decay_steps": 10, "decay_rate": 0.5}``.

    Raises:
        OptionError: no optimizer or schedule has that name, or it does not take these arguments.
    """
    return make(Optimizer, name, arguments)
