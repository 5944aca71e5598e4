# SPDX-License-Identifier: Apache-2.0
"""What must be equal on all ranks of a DistOpt: when it is compared, and until when parameters may differ.

What lives here: the parameters' names, and what has been compared or must be. What does not: how the ranks compare
(sync/agree.py), what a step does (dist.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

from ..autograd.autocast import precision_of
from ..comm.base import Communicator
from ..graph.recorder import break_graph, guard, steps_since_start, unrecorded
from ..graph.rounded import note_written
from ..sync.agree import are_alike, are_equal, by_name, compare, compare_models, compare_progress, digest_of
from ..sync.base import Scheme, text_of
from ..tensor import Tensor, to_numpy
from ..users_line import warn
from .accumulate import GradientSums
from .checks import unique_names
from .step_options import CallDefaults, Option, StepOptions, schedules

BY_HAND = (
    "DistOpt: the ranks started with different values of the parameters that they update by hand, and keep them "
    "different. Call DistOpt.broadcast(params) before training, or Model.set_optimizer with the DistOpt and compile"
)
OWN_STEP = (
    "DistOpt: the optimizer's step counter has changed since the last update by hand without DistOpt.step(), so the "
    "ranks were not compared; end a step by hand with DistOpt.step(), not with step() of the optimizer inside"
)
NOT_SUMMED = (
    "DistOpt: an update by hand, though its communicator has sent nothing since training began: unless the script sums "
    "this gradient or averages parameters in another way, each rank trains by itself. Call all_reduce(grad) of the "
    "DistOpt before update(param, grad), or the DistOpt itself, optimizer(loss)"
)
HALF_MADE = (
    "DistOpt: an exception ended the update of step {}. What {} keeps of gradients may have changed already; load "
    "states that were saved before that step to go on as if nothing had happened"
)


class Compared(CallDefaults, Protocol):
    """The part of a DistOpt's interface that Consistency uses."""

    @property
    def keeps_equal(self) -> bool: ...

    def settings(self) -> dict[str, Any]: ...

    def random_seeds(self) -> dict[str, int]: ...

    def broadcast(self, params: Mapping[str, Tensor]) -> None: ...

    def outside_step(self) -> AbstractContextManager[None]: ...


class Consistency:
    """Compares the ranks; every method gets the DistOpt as ``dist``, to which it keeps no reference.

    Args:
        sums: whose unfinished sum has equally many calls on all ranks.
        check_every: steps between comparisons of parameters and optimizer states; None for none.

    Attributes:
        names: parameters that the ranks have compared, with names that no two of them share; of a Model in their order.
        may_differ: a scheme has run that does not keep the ranks' parameters equal, and none since that does.
        updating: the scheme whose update has begun and is not counted yet, else None. Where there is one when the next
            begins, an exception ended its update, which other ranks may have made.
        steps_by_hand: the optimizer's step counter at the last update by hand; None if a step has ended since.
    """

    def __init__(self, communicator: Communicator, sums: GradientSums, check_every: int | None) -> None:
        self._communicator, self._sums, self.check_every = communicator, sums, check_every
        self.names: dict[Tensor, str] = {}
        self.may_differ = False
        self.updating: Scheme | None = None
        self.steps_by_hand: int | None = None
        self._is_loaded = False  # states, and not compared yet
        # bytes sent until a Model was first prepared, or the first step by hand ended; None: neither yet
        self._sent_before: int | None = None
        self._called: dict[Tensor, str] = {}  # names that the script or a Model has given
        self._by_hand: dict[Tensor, None] = {}  # parameters that were updated by hand
        # hashes of what these were before; None once the ranks have compared them, or if there is one rank
        self._first_values: list[str] | None = None if communicator.is_alone else []
        # whose options the ranks have compared, in which precision
        self._compared: set[tuple[Scheme, str]] = set()

    def states_loaded(self) -> None:
        """Mark that states were loaded, which the ranks compare before they use them."""
        self._is_loaded, self.steps_by_hand = True, None

    def optimizer_set(self) -> None:
        """Mark that another optimizer is used, which the ranks compare as loaded states, if they have compared one."""
        if self.names or self._by_hand:
            self.states_loaded()

    def updated_by_hand(self, dist: Compared, params: Iterable[Tensor]) -> None:
        """Mark ``params``, which no call has seen, to be compared too from now on; called before they change."""
        if self.steps_by_hand not in (None, dist.opt._step_counter) and not self._communicator.is_alone:
            warn(OWN_STEP)
        self._check_summed(dist)
        self.steps_by_hand = dist.opt._step_counter
        new = [param for param in params if param not in self._by_hand]
        self._by_hand |= dict.fromkeys(new)
        if self._first_values is not None:
            with unrecorded():
                self._first_values += [digest_of(param) for param in new if param not in self.names]

    def _check_summed(self, dist: Compared) -> None:
        """Warn if nothing was sent since training began, though the dist_option keeps the ranks' parameters equal."""
        if self._communicator.is_alone or not dist.keeps_equal or self.may_differ:
            return
        if self._sent_before == self._communicator.traffic.bytes_payload:
            warn(NOT_SUMMED)

    def training_begins(self) -> None:
        """Note what was sent before the first sums, if it is not known."""
        if self._sent_before is None:
            self._sent_before = self._communicator.traffic.bytes_payload

    def called(self, params: Mapping[str, Tensor]) -> None:
        """Take over names of parameters, equal on all ranks, before the first call has seen them."""
        self._called |= {param: name for name, param in params.items() if param not in self.names}

    def prepare(self, dist: Compared, params: dict[str, Tensor], buffers: dict[str, Tensor]) -> None:
        """Compare the parameters and buffers of a Model, and the optimizers, and copy rank 0's values to all.

        Known parameters that may differ until the next average keep their values.
        """
        states = {**params, **buffers}
        compare_models(self._communicator, states, self._settings(dist))
        if not self.may_differ or any(param not in self.names for param in params.values()):
            dist.broadcast(states | self._used_slots(dist, params))
        self._called |= {param: name for name, param in params.items()}
        self.names = unique_names(dict.fromkeys([*self.names, *by_name(params)]), self._called)
        self.training_begins()

    def register(self, dist: Compared, params: list[Tensor]) -> None:
        """Take over parameters of no Model: compare the ranks', and make values equal where they are not."""
        self.names = unique_names([*self.names, *params], self._called)
        named = {self.names[param]: param for param in params}
        compare_models(self._communicator, named, self._settings(dist))
        named |= self._used_slots(dist, named)
        if not are_equal(self._communicator, "parameter values", named):
            dist.broadcast(named)
            warn(
                "DistOpt: the ranks started with different parameter values; rank 0's were copied to all. "
                "Call DistOpt.broadcast(params) before training, or Model.set_optimizer with the DistOpt and compile"
            )

    def _settings(self, dist: Compared) -> dict[str, Any]:
        return {**dist.settings(), "the number of steps made": dist.opt._step_counter}

    def _used_slots(self, dist: Compared, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return what the optimizer keeps of ``params``, by name, if it has made steps, equally many on all ranks."""
        return _slots_of(dist, params) if dist.opt._step_counter else {}

    def compare_by_hand(self, dist: Compared) -> None:
        """Warn, at the first step by hand, if the ranks began with other values of parameters that no call has seen."""
        if self._first_values is None:
            return
        digests, self._first_values = sorted(self._first_values), None
        if dist.keeps_equal and not self.may_differ:
            with unrecorded():
                if not are_alike(self._communicator, "first values of parameters updated by hand", digests):
                    warn(BY_HAND)

    def make_equal(self, dist: Compared) -> None:
        """Average parameters and optimizer state before an update that keeps them equal, if ranks have other ones."""
        if self.may_differ:
            if steps_since_start(dist.opt, dist.opt._step_counter):
                break_graph(
                    "it averages what an earlier update of the same step has left different on each rank"
                )
            with unrecorded():
                self._average(dist)
        guard((self, "parameters may differ"), lambda: self.may_differ)

    def _average(self, dist: Compared) -> None:
        named = {name: param for param, name in self.names.items()}
        named |= _slots_of(dist, named)
        with dist.outside_step():
            is_equal = are_equal(self._communicator, "parameters and optimizer states", named)
        if not is_equal:
            tensors = by_name(named)
            arrays = [tensor.array for tensor in tensors]
            for tensor in tensors:
                tensor.device.backend.activate()
                note_written(tensor.array)
            name = dist.collective_name("parameters and optimizer states")
            self._communicator.all_reduce(arrays, "mean", name=name).wait()
        self.may_differ = False

    def compare_options(
        self, dist: Compared, name: str, scheme: Scheme, read: StepOptions, given: dict[str, Option]
    ) -> None:
        """Compare, at the first step of ``scheme``, called ``name``, in a precision, its options with the other ranks'.

        Later ones are compared by the names of collectives (sync/base.py, Note [options in names]).
        """
        precision = precision_of("fp32")  # of the block that the step is in
        if (scheme, precision) in self._compared:
            return
        with unrecorded():
            text = name + text_of(read.step(dist, type(scheme), given).options)
            mine = {"dist_option": text, "the precision": precision, **schedules(dist, type(scheme), given)}
            # later on the others may not compare now: they get the text from the name
            here = f", here {text} in {precision}" if self._compared else ""
            compare(self._communicator, f"their dist_option{here}", mine, "choose the same on every rank")
        self._compared.add((scheme, precision))

    def compare_if_loaded(self, dist: Compared, scheme: Scheme | None) -> None:
        """Compare states that were loaded, or that an exception may have left different, before they are used."""
        if self._is_loaded or self.updating is not None:
            cut_short, self.updating = self.updating, None
            with unrecorded():
                self._compare_states(dist, scheme, cut_short)
        guard((self, "states may differ"), lambda: self._is_loaded or self.updating is not None)

    def compare_if_due(self, dist: Compared, scheme: Scheme | None) -> None:
        """Compare states every ``check_every`` steps."""
        if self.check_every is not None and dist.opt._step_counter % self.check_every == 0:
            self.updating = None  # its update is made and counted
            self._compare_states(dist, scheme, None)

    def _compare_states(self, dist: Compared, scheme: Scheme | None, cut_short: Scheme | None) -> None:
        """Compare steps, optimizers and, where these are kept equal, parameters and optimizer states.

        ``scheme`` is None for a step by hand; ``cut_short`` is that of an update that an exception ended, else None.
        """
        is_restored, self._is_loaded = self._is_loaded, False
        what = "their optimizers" + ("" if cut_short is None else ", as an exception ended a step")
        values = None
        if (scheme.keeps_equal and not self.may_differ) if scheme else dist.keeps_equal:
            names = unique_names(dict.fromkeys([*self.names, *self._by_hand]), self._called)
            values = {name: to_numpy(param) for param, name in names.items()}
            values |= {f"the state {name}": value for name, value in dist.opt.get_states().items()}
        settings = {**dist.settings(), **dist.random_seeds()}
        settings["the number of calls in the unfinished sum"] = self._sums.num_calls
        compare_progress(self._communicator, what, dist.opt._step_counter, settings, values)
        if cut_short is not None and not is_restored and not cut_short.state.is_empty:
            warn(HALF_MADE.format(dist.opt._step_counter, cut_short.names[0]))


def _slots_of(dist: Compared, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what the optimizer keeps of ``params``, by name."""
    return {
        f"{name}:{slot}": state
        for name, param in params.items()
        for slot, state in dist.opt.slots(param).items()
    }
