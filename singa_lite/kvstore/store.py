# SPDX-License-Identifier: Apache-2.0
"""The stores of the package: MXNet's calls, checked and compared over the workers before anything changes.

What lives here: what all stores have in common. What does not: the checks of arguments (arguments.py) and that all
workers call alike (worker_calls.py), where values are kept and how they travel (replica.py, dist.py), the file of saved
states (states.py).
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakMethod

from ..comm.base import Communicator
from ..comm.p2p import MessageTraffic
from ..comm.work import Work
from ..dtypes import LARGEST_FLOAT32
from ..errors import CheckpointError, OptionError, check_bool, check_number
from ..graph.recorder import break_graph
from ..opt.base import Optimizer
from ..opt.wrapper import OptimizerWrapper
from ..tensor import Tensor
from .arguments import Arguments
from .calls import Array, Arrays, Key, Keys, Path, Pull, Push, PushOptions, Spec, States
from .compression import Compression
from .residuals import Residuals
from .states import (
    are_states,
    broadcast_states,
    check_head,
    check_residuals,
    check_states,
    describe_store,
    gather_residuals,
    read_states,
    scatter_residuals,
    states_with,
    write_states,
)
from .stored import Description, Updater, describe
from .worker_calls import WorkerCalls


class KVStore(WorkerCalls):
    """Arrays by key, shared by the workers of a job: pushed, summed, updated, pulled. MXNet's names.

    A key is an int or text, one kind in a store; a call takes one key or a list. A value is a Tensor, a numpy or a CUDA
    array, contiguous, or a list of such (of several devices in MXNet), which is summed first. All workers call
    ``init``, ``broadcast``, ``set_*``, ``save_*``, ``load_*`` and ``barrier`` alike; what a worker does otherwise is
    a CommError on all that names it and the key. ``priority`` is accepted and changes nothing.

    A recorded step that calls it runs eagerly.

    Args:
        name: what it was created by.
        communicator: the workers.

    Attributes:
        lr_hooks: methods that are called with each rate that is set; of a Trainer, which the store does not keep.
    """

    _can_update = True

    def __init__(self, name: str, communicator: Communicator) -> None:
        super().__init__(name, communicator)
        self._arguments = Arguments(name)
        self._optimizer: Description | None = None
        self._lr: float | None = None  # set after the optimizer
        self.lr_hooks: list[WeakMethod[Callable[[float], None]]] = []
        self._compression: Compression | None = None
        self._residuals = Residuals()

    @property
    def optimizer_description(self) -> Description | None:
        """The optimizer that was set last, as ``Optimizer.describe`` gives it; its "step_counter" too unless 0."""
        return self._optimizer

    @property
    def learning_rate(self) -> float | None:
        """What ``set_learning_rate`` has set since ``set_optimizer``; None: the rate is the optimizer's."""
        break_graph("it uses a key-value store")
        return self._lr

    @property
    def num_servers(self) -> int:
        """How many servers keep the values; 0: every worker keeps them all."""
        return 0

    @property
    @abstractmethod
    def traffic(self) -> MessageTraffic:
        """What this worker has moved so far; callers take differences."""

    def server_stats(self) -> list[dict[str, Any]]:
        """Return for each server: keys, elements, rounds, bytes_in, bytes_out, idle_s, since it started."""
        return []

    def close(self) -> None:
        """Leave the servers, which end when all workers have; called at the end of the process at the latest.

        Raises:
            CommError: a server has failed meanwhile, or this worker pushed a key more or less often than another.
        """

    @property
    def is_closed(self) -> bool:
        """Whether the servers have been left, so that no call works any more; never without servers."""
        return False

    # ---- keys ----------------------------------------------------------------------------------------

    def init(self, key: Keys, value: Any) -> None:
        """Make keys with worker 0's values; return once they are there.

        Args:
            key: new ones.
            value: an array for each, of equal shape and dtype on all workers.

        Raises:
            OptionError: a key is there already, or keys of both kinds.
            DTypeError, ShapeError: what cannot be a value.
            CommError: workers give other keys, shapes or dtypes.
        """
        self._make_keys(*self._new_keys("init", key, value))

    def _new_keys(self, where: str, key: Keys, value: Any) -> tuple[list[Spec], list[Tensor]]:
        """Return what is to be kept under new keys, and the value of each; a typed error for what cannot be."""
        keys, values = self._arguments.keys(where, key), self._arguments.values(where, key, value)
        for one in keys:
            if one in self._arguments.specs:
                raise OptionError(
                    f"{self._name}: {where}: there is a key {one!r} already; broadcast() sets it again"
                )
        given = [self._arguments.first(where, one, arrays) for one, arrays in zip(keys, values, strict=True)]
        specs = [
            Spec(one, len(self._arguments.specs) + number, each.shape, each.dtype, each.size())
            for number, (one, each) in enumerate(zip(keys, given, strict=True))
        ]
        if self._optimizer is not None:
            for spec in specs:
                self._arguments.check_float(where, spec)
        return specs, given

    def _make_keys(self, specs: list[Spec], given: list[Tensor]) -> None:
        """Make keys on all workers."""
        manifest = {
            f"key {spec.key!r}": f"{spec.dtype}{list(spec.shape)}, number {spec.number}" for spec in specs
        }
        self._together("init", manifest, lambda: self._init(specs, given))
        self._arguments.specs.update({spec.key: spec for spec in specs})

    def broadcast(self, key: Keys, value: Any, out: Any, priority: int = 0) -> None:
        """Set keys to worker 0's ``value``, new ones too, and ``out`` to that; the optimizer's state stays.

        Raises:
            OptionError: some of the keys are new and others not. DTypeError, ShapeError: ``value`` or ``out`` does not
                fit; nothing has changed. CommError: workers give other keys, shapes or dtypes.
        """
        keys, values = self._arguments.keys("broadcast", key), self._arguments.values("broadcast", key, value)
        known = [one for one in keys if one in self._arguments.specs]
        if known and len(known) < len(keys):
            raise OptionError(
                f"{self._name}: broadcast: key {known[0]!r} is there already but others are new"
            )
        if not known:
            specs, given = self._new_keys("broadcast", key, value)
            pulls = self._arguments.pulls("broadcast", specs, key, out)
            self._make_keys(specs, given)
        else:
            specs = [self._arguments.specs[one] for one in keys]
            given = [
                self._arguments.like_key("broadcast", spec, arrays)
                for spec, arrays in zip(specs, values, strict=True)
            ]
            pulls = self._arguments.pulls("broadcast", specs, key, out)
            manifest = {f"key {one!r}": True for one in keys}
            self._together("broadcast", manifest, lambda: self._overwrite(specs, given))
        self._move("broadcast", [], pulls, PushOptions())

    # ---- values --------------------------------------------------------------------------------------

    def push(
        self, key: Keys, value: Any, priority: int = 0, *, scale: float = 1.0, mean: bool = False
    ) -> None:
        """Add this worker's values to the sums of this round; return when the arrays may be touched again.

        Once all workers have pushed a key (``dist_async``: at once), the optimizer updates it by the sum; without one
        the sum replaces it.

        Args:
            key, value: see the class; values of the shape and dtype of the key.
            priority: accepted.
            scale: factor of this worker's values, such as 1 / batch size.
            mean: divide the sum by the number of workers; floats only, equal on all workers.

        Raises:
            OptionError: an unknown key. DTypeError, ShapeError: values that are not like the key's.
            CommError: a worker or server is gone, or disagrees.
        """
        options, specs = self._arguments.options("push", scale, mean), self._arguments.known("push", key)
        pushes = self._arguments.pushes("push", specs, key, value, options)
        self._move("push", pushes, [], options)

    def pull(self, key: Keys, out: Any, priority: int = 0, ignore_sparse: bool = True) -> None:
        """Set ``out`` to the values after this worker's last push of each key.

        Args:
            key: one or several.
            out: for each an array of the key's shape and dtype, or a list of such, which is changed.
            priority, ignore_sparse: accepted.

        Raises:
            OptionError: an unknown key. DTypeError, ShapeError: arrays that are not like the key's.
            CommError: a worker or server is gone, or disagrees.
        """
        pulls = self._arguments.pulls("pull", self._arguments.known("pull", key), key, out)
        self._move("pull", [], pulls, PushOptions())

    def pushpull(
        self,
        key: Keys,
        value: Any,
        out: Any = None,
        priority: int = 0,
        *,
        scale: float = 1.0,
        mean: bool = False,
        allow_none: bool = False,
        wait: bool = True,
    ) -> Work:
        """Do ``push`` and ``pull`` as one message to each server; ``out`` None is ``value``.

        Args:
            key, value, scale, mean: see ``push``.
            out: see ``pull``.
            priority: accepted.
            allow_none: a ``value`` may be None: this worker's part of the key's sum is zero, and a key that all workers
                leave out is not updated.
            wait: with False neither ``value`` nor ``out`` may be touched before the result's wait() has returned.

        Returns:
            Work.
        """
        check_bool("pushpull", "wait", wait)
        options = self._arguments.options("pushpull", scale, mean, allow_none)
        specs = self._arguments.known("pushpull", key)
        pushes = self._arguments.pushes("pushpull", specs, key, value, options)
        pulls = self._arguments.pulls("pushpull", specs, key, value if out is None else out)
        return self._move("pushpull", pushes, pulls, options, wait=wait)

    def _move(
        self, where: str, pushes: list[Push], pulls: list[Pull], options: PushOptions, wait: bool = True
    ) -> Work:
        """Begin an exchange, and wait for its end unless ``wait`` is False."""
        with self.aborting(where):
            break_graph("it uses a key-value store")
            work = self._exchange(where, pushes, pulls, options)
            if wait:
                work.wait()
        return work

    # ---- how sums become values ----------------------------------------------------------------------

    def set_optimizer(self, optimizer: Optimizer) -> None:
        """Set an optimizer, a copy of which updates the value of each key from now on, without states.

        Steps that it has made count on, so a schedule goes on from where it is.

        Raises:
            OptionError: no optimizer, a DistOpt, one that ``Optimizer.describe`` cannot describe, or whose class a
                server does not know. DTypeError: a key holds integers. CommError: the workers give different ones.
        """
        if not isinstance(optimizer, Optimizer):
            raise OptionError(f"{self._name}: set_optimizer: expected an opt.Optimizer, got {optimizer!r}")
        if isinstance(optimizer, OptimizerWrapper):
            raise OptionError(
                f"{self._name}: set_optimizer: the store sums gradients itself; give it the optimizer that "
                f"{type(optimizer).__name__} wraps"
            )
        description = describe(optimizer)
        for spec in self._arguments.specs.values():
            self._arguments.check_float("set_optimizer", spec)
        self._together("set_optimizer", description, lambda: self._set_optimizer(description))
        self._optimizer, self._lr = description, None

    def set_learning_rate(self, lr: float) -> None:
        """Set the learning rate of the store's optimizer from the next push on; all workers call it alike.

        Raises:
            OptionError: there is no optimizer, or ``lr`` is not a number >= 0. CommError: the workers give other rates.
        """
        if self._optimizer is None:
            raise OptionError(f"{self._name}: set_learning_rate: set_optimizer() comes first")
        number = check_number(f"{self._name}: set_learning_rate", "lr", lr, 0, LARGEST_FLOAT32)
        self._together("set_learning_rate", {"the learning rate": number}, lambda: self._set_lr(number))
        self._note_lr(number)

    def _note_lr(self, lr: float) -> None:
        self._lr = lr
        for reference in self.lr_hooks:
            if (hook := reference()) is not None:
                hook(lr)

    def set_updater(self, updater: Updater) -> None:
        """Set ``updater(key, pushed, stored)``, which changes the stored Tensor in place; for stores of one process."""
        raise OptionError(
            f"{self._name}: set_updater: a function cannot travel to other processes; write an Optimizer with apply() "
            "at the top of the script and use set_optimizer()"
        )

    _set_updater = set_updater

    def set_gradient_compression(self, compression_params: Mapping[str, Any]) -> None:
        """Send pushes as 1 or 2 bits a value from now on; what that loses is added to the next push of the key.

        Args:
            compression_params: {"type": "1bit" or "2bit", "threshold": number, 0.5 if left out}.

        Raises:
            OptionError: another type or threshold, a store "local" or "nccl", or a key was made already.
            CommError: the workers give different ones.
        """
        compression = Compression.of(compression_params)
        if self._arguments.specs:
            raise OptionError(f"{self._name}: set_gradient_compression comes before the first key is made")
        self._together(
            "set_gradient_compression", vars(compression), lambda: self._set_compression(compression)
        )
        self._compression, self._arguments.needs_float32 = compression, True

    # ---- saved states --------------------------------------------------------------------------------

    def save_optimizer_states(self, fname: Path, dump_optimizer: bool = False) -> None:
        """Save the optimizers' states, and what compression has lost on each worker; worker 0 writes, all call it.

        Args:
            fname: the file, see Note [states file] in states.py; it is written atomically.
            dump_optimizer: the optimizer itself as well, which ``load_optimizer_states`` then sets.

        Raises:
            OptionError: there is no optimizer. CheckpointError: the file cannot be written.
        """
        if self._optimizer is None:
            raise OptionError(f"{self._name}: save_optimizer_states: set_optimizer() comes first")
        optimizer = {"description": dict(self._optimizer), "lr": self._lr} if dump_optimizer else None
        head = {"optimizer": optimizer, "optimizer_class": self._optimizer["class"]}
        self.save_states("save_optimizer_states", fname, head)

    def load_optimizer_states(self, fname: Path) -> None:
        """Continue from ``save_optimizer_states``, with the same keys and workers and any number of servers.

        Raises:
            CheckpointError: no such file, damaged, or of another store or optimizer; nothing has changed.
        """
        alike = {} if self._optimizer is None else {"optimizer_class": self._optimizer["class"]}
        self.load_states("load_optimizer_states", fname, alike)

    def save_states(
        self,
        where: str,
        fname: Path,
        head: Mapping[str, Any],
        get_states: Callable[[], States] | None = None,
    ) -> None:
        """Save states by key and ``head``, JSON values; all call it.

        ``get_states`` gives them on worker 0, such as those of a Trainer's own optimizer, and is called on all; None:
        those of the store.
        """
        _check_path(where, fname)

        def save() -> None:
            states, specs = (get_states or self._get_states)(), list(self._arguments.specs.values())
            lost = gather_residuals(self._communicator, specs, self._residuals) if self._compression else {}
            if self.rank == 0:
                whole = {**describe_store(specs, self.num_workers), **self._compression_entry(), **head}
                write_states(fname, whole, specs, states, lost)

        self._together(where, head, save)

    def load_states(
        self,
        where: str,
        fname: Path,
        alike: Mapping[str, Any],
        get_states: Callable[[], States] | None = None,
        set_states: Callable[[States], None] | None = None,
        check: Callable[[Mapping[str, Any]], None] = lambda head: None,
    ) -> dict[str, Any]:
        """Read a file on worker 0, check it, and give its states to ``set_states`` there, {} on others.

        Args:
            where, fname: the caller, for errors, and the file.
            alike: what must be as when it was saved, of ``head``; the optimizer's class unless one was dumped.
            get_states: gives the states that there are, on worker 0; called on all. None: the store's.
            set_states: takes those of the file; called on all. None: sets the store's.
            check: raises CheckpointError if what the file keeps beside states is not right.

        Returns:
            What the file keeps beside states, on all workers.

        Raises:
            CheckpointError: see ``load_optimizer_states``.
        """
        _check_path(where, fname)

        def load() -> dict[str, Any]:
            specs, mine = list(self._arguments.specs.values()), (get_states or self._get_states)()
            head, states, lost, keys = self._do(
                "read_states", lambda: self._read_states(fname, specs, mine, alike, check)
            )
            head, keys = self._communicator.all_gather_object([head, keys], name="kvstore.load")[0]
            if head.get("optimizer") is not None:
                self._do("set_optimizer", lambda: self._set_dumped(head["optimizer"]))
            self._do("set_states", lambda: (set_states or self._set_states)(states))
            if self._compression:
                whose = [spec for spec in specs if spec.key in keys]  # not those of other Trainers
                scatter_residuals(self._communicator, whose, self._residuals, lost)
            return head

        return self._together(where, {}, load)

    def _read_states(
        self,
        fname: Path,
        specs: list[Spec],
        mine: States,
        alike: Mapping[str, Any],
        check: Callable[[Mapping[str, Any]], None],
    ) -> tuple[dict[str, Any], States, Arrays, list[Key]]:
        """Return head, states and residuals of a file, and the keys they are of; CheckpointError if of another store.

        On other workers than worker 0 they are empty.
        """
        if self.rank != 0:
            return {}, {}, {}, []
        head, states, lost = read_states(fname, describe_store(specs, self.num_workers), specs)
        check(head)
        same = {**alike, **self._compression_entry()}
        if head.get("optimizer") is not None:
            mine = states_with(fname, head["optimizer"], specs)
            same.pop("optimizer_class", None)
        check_head(fname, head, same)
        # of a Trainer's own optimizer the file has no states of other Trainers' keys
        states = {key: each for key, each in states.items() if each or key in mine}
        check_states(fname, mine, states)
        if bool(lost) != bool(self._compression):
            raise CheckpointError(f"{fname}: saved {'with' if lost else 'without'} compression")
        return head, states, lost, list(mine)

    def get_states(self) -> States:
        """Return the states of each key's optimizer, of whole keys, on worker 0 at least; all call it."""
        return self._together("get_states", {}, self._get_states)

    def set_states(self, states: States) -> None:
        """Continue from worker 0's ``get_states``; all call it.

        Raises:
            CheckpointError: worker 0's are those of other keys or another optimizer; nothing has changed.
        """

        def check() -> None:
            mine = self._get_states()
            if self.rank == 0:
                check_states("set_states", mine, states)

        def set_checked() -> None:
            self._do("set_states", check)
            self._set_states(states if self.rank == 0 else {})

        self._together("set_states", {}, set_checked)

    def get_residuals(self) -> dict[Key, Array]:
        """Return what compression has lost here, flat float32 arrays; {} without compression."""
        specs = self._arguments.specs.values() if self._compression else ()
        return {spec.key: self._residuals.get(spec.key, spec.size).copy() for spec in specs}

    def set_residuals(self, residuals: Mapping[Key, Array]) -> None:
        """Continue from ``get_residuals``; CheckpointError, nothing changed, if they are of other keys or sizes."""
        check_residuals("set_residuals", self.get_residuals(), residuals)
        for key, values in residuals.items():
            self._residuals.set(key, values)

    def broadcast_states(self, states: States) -> States:
        """Return worker 0's states on all workers; a collective. OptionError: not arrays by name, by key."""
        if not are_states(states):
            raise OptionError(
                f"{self.type}: broadcast_states: expected arrays by name, by key, got {states!r}"
            )
        return broadcast_states(self._communicator, states)

    def _compression_entry(self) -> dict[str, Any]:
        """Return what a file of states says of compression."""
        return {"compression": None if self._compression is None else vars(self._compression)}

    def _set_dumped(self, optimizer: dict[str, Any]) -> None:
        """Set the optimizer of a file."""
        self._set_optimizer(optimizer["description"])
        self._optimizer, self._lr = optimizer["description"], None
        if optimizer["lr"] is not None:
            self._set_lr(optimizer["lr"])
            self._note_lr(optimizer["lr"])

    # ---- what a store writes -------------------------------------------------------------------------

    @abstractmethod
    def _init(self, specs: list[Spec], values: list[Tensor]) -> None:
        """Make keys with worker 0's values; called on all workers, as all here up to ``_set_states``."""

    @abstractmethod
    def _overwrite(self, specs: list[Spec], values: list[Tensor]) -> None:
        """Set keys to worker 0's values."""

    @abstractmethod
    def _set_optimizer(self, description: Description) -> None:
        """Give all keys, also later ones, an optimizer."""

    @abstractmethod
    def _set_lr(self, lr: float) -> None:
        """Set the learning rate of all optimizers."""

    @abstractmethod
    def _set_compression(self, compression: Compression) -> None:
        """Raise where the store cannot compress."""

    @abstractmethod
    def _get_states(self) -> States:
        """Return the states of each key's optimizer, of whole keys; on worker 0 alone or on all."""

    @abstractmethod
    def _set_states(self, states: States) -> None:
        """Set the states to worker 0's."""

    @abstractmethod
    def _exchange(self, what: str, pushes: list[Push], pulls: list[Pull], options: PushOptions) -> Work:
        """Begin what ``pushpull`` does; ``what`` is the caller, for errors."""


def _check_path(where: str, fname: object) -> None:
    if not isinstance(fname, (str, os.PathLike)):
        raise OptionError(f"{where}: fname must be a path, not {fname!r}")
