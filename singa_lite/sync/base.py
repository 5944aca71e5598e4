# SPDX-License-Identifier: Apache-2.0
"""The contract of a synchronisation scheme; what those share that send gradients is in buckets.py.

A scheme makes the gradients (or parameters) of N ranks equal. It knows Tensors, a backend and the Communicator
contract, but no transport. One scheme is one file in this folder; its class names the words of ``dist_option`` that
choose it, and the folder is searched for it (see sync/__init__.py).

Note [once]: in a recorded step the Python of a scheme that ``is_recordable`` runs once, while its kernels and
collectives are recorded; what numpy or cupy does to its arrays is left out of replays, and is not noticed. Numbers
that change from step to step reach kernels through ``scalar``; what decides which kernels run is in ``graph_key`` or
``step_key``; what must see values on the host is called by OnHost; what only counts by ``graph.recorder.bookkeep``.
Memory that stays from step to step is ParamState's (state.py), or is made within ``unrecorded``.

Note [options in names]: options that one rank alone changes between steps, or a step of another DistOpt, may leave the
kind and size of every collective as they are. So its name begins with the DistOpt, if that is not the first, and the
step's options, and transports compare names: the ranks get a CommError with both texts, without a message more. A
recorded step has its options for good, but those that ``read_again`` names; a scheme that has such ones starts a
collective from the host whose name has their values.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cache
from types import MappingProxyType
from typing import Any, ClassVar, Protocol, get_type_hints

import numpy as np

from ..backend.base import Backend
from ..comm.base import Communicator
from ..comm.work import Traffic
from ..errors import CheckpointError, OptionError
from ..graph.clock import lap
from ..graph.recorder import break_graph, scalar, unrecorded
from ..tensor import Tensor
from .state import ParamState, Slot
from .step_groups import StepGroups

Array = Any  # a raw array of the device's backend: numpy.ndarray on the CPU, cupy.ndarray on CUDA

NOT_RECORDABLE = (
    "{0} is a dist_option whose Python a replay would not run; if it only runs kernels and collectives, and no value "
    "decides which, set is_recordable = True in its class"
)


class MomentumRule(Protocol):
    """How the optimizer sums gradients up: by ``momentum`` >= 0, and whether it looks ahead by Nesterov's rule."""

    @property
    def momentum(self) -> float: ...

    @property
    def is_nesterov(self) -> bool: ...


class OptimizerView(Protocol):
    """The interface of DistOpt for schemes; ``step`` is the number of steps before one."""

    def collective_name(self, name: str) -> str:
        """Return ``name`` with a prefix that identifies this optimizer among several, equal on all ranks."""

    def name_of(self, param: Tensor) -> str:
        """Return the name of ``param``, equal on all ranks and different from all other parameters'."""

    def slots(self, param: Tensor) -> dict[str, Tensor]:
        """Return what the optimizer keeps for ``param``, by name, e.g. "momentum"."""

    def lr_at(self, step: int) -> float:
        """Return the learning rate of a step."""

    def momentum_rule(self, step: int) -> MomentumRule:
        """Return the momentum of a step; OptionError, with the reason, if a scheme cannot take it over."""


@dataclass(frozen=True)
class StepContext:
    """What a scheme knows of a step; what changes from step to step is for ``scalar`` and ``step_key``, Note [once]."""

    options: Any  # of the scheme's ``Options``
    step: int  # how many steps the optimizer made before it
    optimizer: OptimizerView

    @property
    def lr(self) -> float:
        """The learning rate."""
        with unrecorded():
            return self.optimizer.lr_at(self.step)

    @property
    def rule(self) -> MomentumRule:
        """The optimizer's momentum, for a scheme that ``takes_momentum``."""
        with unrecorded():
            return self.optimizer.momentum_rule(self.step)


class Scheme:
    """One way to synchronise the ranks, chosen by ``dist_option``.

    A step is begin(), add_gradient() for each gradient as backward yields it, finish() for the gradients to apply, the
    optimizer's update of these, after_update(). This base class applies each rank's own gradients: for schemes that
    work on parameters after the update.

    Attributes:
        names: the words of ``dist_option`` that choose this scheme, the usual one first.
        is_recordable: whether its Python follows Note [once]; each class must say so itself, or steps with it run
            eagerly.
        Options: a frozen dataclass of the options that a caller may give by name, each with a default. A value may be a
            schedule, which is read at every step. ``__post_init__`` raises OptionError for values out of range.
        read_again: names of options that reach kernels through ``scalar`` alone, so that a recorded step need not be
            recorded again when they change.
        wraps_another: whether its first option is the text of another dist_option: all that follows its own name.
            Options of that one may also be given by name.
        keeps_equal: whether parameters and optimizer states are equal on all ranks after every step.
        keeps_velocity: whether the scheme keeps what momentum has still to apply, which no other scheme can go on from.
        counter_kinds: numpy's kinds of dtype that its ``counters`` have: "iu" for whole numbers.
        counter_prefix: what stands before a parameter's name in the name of its counter; "" if it has none.
        slots: the arrays that the scheme keeps for each parameter in ``state``, by name (state.py).
        inside, between: what the last step sent within and between hosts, where the scheme distinguishes them.
        param_counters: the counter of each parameter by its name, for a scheme with a ``counter_prefix``.
        groups: the groups of ranks that its steps exchange in, where it makes some, or None.
        options: the options of the step that runs.

    Args:
        communicator: of the world to agree in.
        threshold: elements; a parameter above it is a group of its own, smaller ones are joined until they exceed it.
        bucket_bytes: bytes per message for schemes without selection; tuning it changes no result but fp16's.
    """

    names: ClassVar[tuple[str, ...]] = ()
    is_recordable: ClassVar[bool] = True
    read_again: ClassVar[tuple[str, ...]] = ()
    wraps_another: ClassVar[bool] = False
    keeps_equal: ClassVar[bool] = True
    keeps_velocity: ClassVar[bool] = False
    counter_kinds: ClassVar[str] = "iuf"
    counter_prefix: ClassVar[str] = ""
    slots: ClassVar[Mapping[str, Slot]] = MappingProxyType({})
    inside: Traffic | None = None
    between: Traffic | None = None

    @dataclass(frozen=True)
    class Options:
        """No options."""

    def __init_subclass__(cls, **arguments: object) -> None:
        super().__init_subclass__(**arguments)
        cls.is_recordable = vars(cls).get("is_recordable", False)

    def __init__(
        self, communicator: Communicator, threshold: int, bucket_bytes: int, optimizer: OptimizerView
    ) -> None:
        self.communicator = communicator
        self.threshold = threshold
        self.bucket_bytes = bucket_bytes
        self.optimizer = optimizer
        self.state = ParamState(self.slots)
        self.param_counters: dict[str, Any] = {}
        self.groups: StepGroups | None = None
        self.options: Any = self.Options()  # Any: each scheme has a class of its own
        self._options_text = ""  # of the step that runs, see Note [options in names]
        self._read: Callable[[], StepContext] = lambda: StepContext(self.options, 0, optimizer)
        self._pairs: list[tuple[Tensor, Tensor]] = []

    @classmethod
    def make(cls, *arguments: Any) -> Scheme:  # Any: those of ``__init__``
        """Return a scheme; OptionError if its ``__init__`` does not call this class's."""
        made = cls(*arguments)
        if "_pairs" not in vars(made):
            raise OptionError(
                f"{cls.__name__}: its __init__ must call super().__init__(communicator, threshold, bucket_bytes, "
                "optimizer) first"
            )
        return made

    # ---- what a scheme may write -----------------------------------------------------------------------

    def after_update(self, params: list[Tensor]) -> None:
        """Called when the optimizer has changed ``params``; schemes that average parameters do it here."""

    @classmethod
    def takes_momentum(cls, options: Any) -> bool:
        """Return whether the scheme applies the optimizer's momentum itself, before it sends; by default, it does not.

        What ``finish`` gives is then applied by ``update_velocity``.
        """
        return False

    def graph_key(self) -> Hashable:
        """Equal before steps that run the same kernels on the same arrays, as far as what the scheme keeps decides it.

        Options need not be in it.
        """
        return None

    def step_key(self, step: StepContext) -> Hashable:
        """Equal for steps that run the same kernels, as far as what is known of a step decides it; options need not."""
        return None

    def counters(self) -> dict[str, float]:
        """Return the numbers that the scheme keeps from step to step, by name, for checkpoints."""
        return {self.counter_prefix + name: number for name, number in self.param_counters.items()}

    def set_counters(self, counters: dict[str, Any]) -> None:
        """Continue from ``counters``. CheckpointError: they are another scheme's."""
        prefix = self.counter_prefix
        if wrong := sorted(name for name in counters if not prefix or not name.startswith(prefix)):
            own = self.names[0] if self.names else type(self).__name__
            raise CheckpointError(f"{own}: {wrong[:3]} are not its counters")
        self.param_counters = {name.removeprefix(prefix): number for name, number in counters.items()}

    # ---- for schemes -----------------------------------------------------------------------------------

    def scalar(self, read: Callable[[StepContext], float]) -> Any:  # Any: a number, or a graph.nodes.Scalar
        """Return a number of the step for a kernel's attribute; ``read_again`` names the options that it depends on."""
        now = self._read  # this step's, as a step with other options may come between replays
        return scalar(lambda: read(now()))

    def now(self) -> StepContext:
        """Return the step that runs, for what runs at every replay of a recorded one."""
        with unrecorded():
            return self._read()

    def names_of(self, params: list[Tensor]) -> str:
        """Return the names of ``params``, equal on all ranks."""
        return ", ".join(map(self.optimizer.name_of, params))

    def collective_name(self, names: str) -> str:
        """Return what a collective of the parameters ``names`` is called, see Note [options in names]."""
        return self._options_text + names

    def average(self, params: list[Tensor]) -> None:
        """Replace the values of ``params``, of one dtype and device, by their averages over the ranks."""
        backend, arrays = params[0].device.backend, [param.array for param in params]
        flat = backend.empty((sum(param.size() for param in params),), params[0].dtype)
        name = self.collective_name(self.names_of(params))
        backend.run("pack", *arrays, out=flat)
        lap("pack", name)
        self.communicator.all_reduce(flat, "mean", name=name).wait()
        backend.run("unpack", flat, out=tuple(arrays))
        lap("decompress", name)

    # ---- one step --------------------------------------------------------------------------------------

    def begin(self, step: StepContext, read: Callable[[], StepContext] | None = None) -> None:
        """Start ``step``; ``read`` gives it too, and again at every replay of a recorded one. None gives ``step``."""
        if not self.is_recordable:
            break_graph(NOT_RECORDABLE.format(type(self).__name__))
        self.options = step.options
        if self.names:
            options = text_of(step.options, self.read_again)
            self._options_text = self.optimizer.collective_name(f"{self.names[0]}{options}") + ": "
        self.follow(read or (lambda: step))
        self._pairs = []
        self.state.begin()
        self.communicator.wait_all()

    def follow(self, read: Callable[[], StepContext]) -> None:
        """Set ``read``, by which ``now`` reads the step that runs; called at the beginning of every replay, too."""
        self._read = read
        if self.groups is not None:
            self.groups.begin()

    def add_gradient(self, param: Tensor, grad: Tensor) -> None:
        """Add one gradient, whose memory is the scheme's from now on; may start collectives, waits for tiny ones."""
        self._pairs.append((param, grad))

    def finish(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each parameter with the gradient to apply; valid until the next begin()."""
        pairs, self._pairs = self._pairs, []
        yield from pairs

    def end(self, params: list[Tensor]) -> None:
        """End a step whose gradients have been applied to ``params``."""
        self.after_update(params)

    # ---- checkpoints -----------------------------------------------------------------------------------

    def state_dict(self, names: dict[Tensor, str]) -> dict[str, np.ndarray]:
        """Return what this rank must save to continue bit-exactly; parameters are called by ``names``."""
        counters = {f"counter/{name}": np.array(value) for name, value in self.counters().items()}
        return {**self.state.state_dict(names), **counters}

    def check_states(self, states: dict[str, np.ndarray], names: dict[Tensor, str]) -> None:
        """Raise CheckpointError unless ``load_state_dict`` takes these, by trying them on another scheme."""
        trial = type(self)(self.communicator, self.threshold, self.bucket_bytes, self.optimizer)
        trial.load_state_dict(states, names)

    def load_state_dict(self, states: dict[str, np.ndarray], names: dict[Tensor, str]) -> None:
        """Continue from ``state_dict``.

        Raises:
            CheckpointError: states of another scheme or of other parameters.
        """
        counters = {key.removeprefix("counter/"): states[key] for key in states if key.startswith("counter/")}
        arrays = {key: value for key, value in states.items() if not key.startswith("counter/")}
        kinds = self.counter_kinds
        wrong = sorted(
            name
            for name, value in counters.items()
            if value.size != 1 or value.dtype.kind not in kinds or not 0 <= value.item() < np.inf
        )
        if wrong:
            what = "number" if "f" in kinds else "whole number"
            raise CheckpointError(
                f"{self.names[0]}: expected a single {what} >= 0 for each of the counters {', '.join(wrong)}"
            )
        self.set_counters({name: value.item() for name, value in counters.items()})
        self.state.load_state_dict(arrays, names)


def text_of(options: Any, without: tuple[str, ...] = ()) -> str:
    """Return ``options``, but those ``without``, as a dist_option has them behind the name."""
    each = (field.name for field in fields(options) if field.name not in without)
    return "".join(f":{name}={getattr(options, name)}" for name in each)


def types_of(scheme: type[Scheme]) -> Mapping[str, Any]:
    """Return the types of the options that a scheme takes, by their names."""
    options: Any = scheme.Options  # Any: mypy takes no class for hashable
    return _types_of(options)


@cache  # as this takes longer than reading a text
def _types_of(options: Any) -> Mapping[str, Any]:
    return MappingProxyType(get_type_hints(options))


def scale_in_place(backend: Backend, flat: Array, factor: float) -> None:
    """Multiply an array by a number that is the same at every replay."""
    number = backend.empty((1,), flat.dtype)
    backend.run("fill", out=number, value=factor)
    backend.run("mul", flat, number, out=flat)
