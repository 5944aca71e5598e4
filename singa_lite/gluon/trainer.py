# SPDX-License-Identifier: Apache-2.0
"""MXNet's Trainer: sums the gradients of all workers through a key-value store and updates the parameters.

    trainer = gluon.Trainer(model.get_params(), "sgd", {"learning_rate": 0.1}, kvstore="dist_sync")
    loss.backward()
    trainer.step(batch_size)

What lives here: when gradients are pushed and by what they are scaled. What does not: sums (kvstore/), saving
states (saved_states.py), computing gradients (autograd/), updates (opt/).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np

from .. import kvstore as stores
from ..dtypes import LARGEST_FLOAT32
from ..errors import GraphError, OptionError, check_bool, check_choice, check_number
from ..graph.clock import drop_step, lap
from ..graph.recorder import break_graph
from ..kvstore.base import KVStoreBase
from ..kvstore.calls import MessageTraffic, Path
from ..kvstore.store import KVStore
from ..layer.base import Layer
from ..opt.base import Optimizer
from ..tensor import Tensor, to_numpy
from .arguments import checked_batch_size, optimizer_of, parameters_by_name
from .saved_states import SavedStates
from .shared_optimizer import SharedOptimizer

GIVEN = "which gradients are given"  # a key of its own, in a store of the script's
UNSUMMED = "a hash of the gradient of {}, which allreduce_grads makes equal,"


class Trainer:
    """Updates parameters by the sum of all workers' gradients, scaled by each worker's batch size.

    All workers must make it and call it alike. A gradient is ``Tensor.grad``: backward adds to it while it is fresh,
    and ``step`` makes it stale, so that the next backward replaces it.

    Args:
        params: parameters by name, such as ``model.get_params()`` gives once the model has them, or a list.
        optimizer: an opt.Optimizer that no other Trainer uses, or a name: "sgd", "adam", "adamw", "rmsprop", "adagrad",
            or one of the script's classes.
        optimizer_params: arguments for a name: ours, or MXNet's learning_rate, wd, beta1, beta2.
        kvstore: a store, a name for ``kvstore.create``, or None: nothing is summed. Several Trainers on one store need
            ``update_on_kvstore=False`` and parameters of different names.
        compression_params: see ``KVStore.set_gradient_compression``; of all that is pushed to the store.
        update_on_kvstore: whether the store keeps and updates the parameters, on its servers if it has any; None: if it
            is a dist store. With False each worker updates by itself.
        reduction: "sum" as in MXNet: with N workers and ``step`` of this worker's batch size, N times the gradient of
            the mean; "mean" divides the sum by N.

    Raises:
        OptionError: an unknown name or argument; a store that cannot do what is asked, or has an optimizer already.
        DTypeError: one of ``params`` is not a parameter.
        CommError: the workers differ in parameters or optimizer.
    """

    def __init__(
        self,
        params: Mapping[str, Tensor] | Sequence[Tensor],
        optimizer: str | Optimizer,
        optimizer_params: Mapping[str, Any] | None = None,
        kvstore: str | KVStoreBase | None = "device",
        compression_params: Mapping[str, Any] | None = None,
        update_on_kvstore: bool | None = None,
        reduction: str = "sum",
    ) -> None:
        check_choice("Trainer", "reduction", reduction, ("sum", "mean"))
        self._params = parameters_by_name(params)
        self._names = list(self._params)
        self._optimizer = optimizer_of(optimizer, optimizer_params)
        self._reduction = reduction
        self._store = stores.create(kvstore) if isinstance(kvstore, str) else kvstore
        if self._store is not None and not isinstance(self._store, KVStoreBase):
            raise OptionError(f"Trainer: kvstore must be a name, a KVStoreBase or None, not {kvstore!r}")
        self._kvstore = self._store if isinstance(self._store, KVStore) else None  # one of the package
        self._updates_on_store = self._where_to_update(update_on_kvstore)
        self._last = MessageTraffic()  # of the last step
        self._optimizer.prepare(self._params, {})
        self._connect(compression_params)
        self._shared = SharedOptimizer(self._optimizer, self._kvstore, self._updates_on_store)
        self._saved = SavedStates(
            self._params, self._optimizer, self._kvstore, self._shared, self._updates_on_store, reduction
        )
        self._begin_measuring()

    def __repr__(self) -> str:
        where = "on the store" if self._updates_on_store else "here"
        return (
            f"Trainer({len(self._params)} parameters, {self._optimizer!r}, {self._store!r}, updates {where})"
        )

    # ---- what it is ----------------------------------------------------------------------------------

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer; where the store updates, one like it is there for each parameter."""
        return self._optimizer

    @property
    def kvstore(self) -> KVStoreBase | None:
        """The store."""
        return self._store

    @property
    def update_on_kvstore(self) -> bool:
        """Whether the store updates the parameters."""
        return self._updates_on_store

    @property
    def reduction(self) -> str:
        """Whether gradients become their "sum" over the workers, or their "mean"."""
        return self._reduction

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next step."""
        return self._optimizer.lr_value

    def set_learning_rate(self, lr: float) -> None:
        """Set the learning rate from the next step on, here and on the servers; all workers must set the same.

        Raises:
            OptionError: no number >= 0. CommError: the workers set different ones.
        """
        self._shared.set_lr(check_number("Trainer: set_learning_rate", "lr", lr, 0, LARGEST_FLOAT32))

    @property
    def bytes_sent(self) -> int:
        """Bytes of the arrays that this worker sent in the last step."""
        return self._last.bytes_sent

    @property
    def bytes_received(self) -> int:
        """Bytes of the arrays that this worker received in the last step."""
        return self._last.bytes_received

    @property
    def bytes_heads(self) -> int:
        """Bytes of the headers of messages in the last step, both ways."""
        return self._last.bytes_heads

    @property
    def wait_s(self) -> float:
        """Seconds this worker waited in the last step."""
        return self._last.wait_s

    # ---- a step --------------------------------------------------------------------------------------

    def step(self, batch_size: float, ignore_stale_grad: bool = False) -> None:
        """Sum the gradients over the workers, each divided by its worker's batch size, and update the parameters.

        Args:
            batch_size: of this worker, > 0; 1 for gradients that are means already.
            ignore_stale_grad: a gradient that no backward has computed since the last step counts as zero here, and a
                parameter whose gradient is stale on all workers is not touched. Equal on all workers.

        Raises:
            GraphError: a gradient is stale; nothing has moved. OptionError: ``batch_size`` is not a number > 0.
            CommError: a worker or server is gone, or disagrees.
        """
        scale = 1 / checked_batch_size("step", batch_size)
        check_bool("Trainer: step", "ignore_stale_grad", ignore_stale_grad)
        stale = self._stale("step", ignore_stale_grad)
        self._shared.check()
        self._begin_measuring()
        with self._aborting("step"):
            if self._updates_on_store:
                params = list(self._params.values())
                self._pushpull(self._names, stale, params, scale, ignore_stale_grad)
                self._optimizer.note_update()
                self._optimizer.step()
            else:
                self._update(self._sum_grads("step", scale, stale, ignore_stale_grad))
            self._finish()

    def allreduce_grads(self) -> None:
        """Set all gradients to their sum over the workers, or mean; ``update`` comes next. They stay fresh.

        Raises:
            OptionError: the store updates the parameters. GraphError: a gradient is stale.
        """
        self._check_by_hand("allreduce_grads")
        self._stale("allreduce_grads", False)
        self._begin_measuring()
        with self._aborting("allreduce_grads"):
            self._sum_grads("allreduce_grads", 1.0, set(), False)

    def update(self, batch_size: float, ignore_stale_grad: bool = False) -> None:
        """Update the parameters by ``grad / batch_size``; all workers give the same batch size.

        A hash of the gradients is compared, as workers whose gradients nobody has summed would each go their own way.

        Raises:
            OptionError: the store updates the parameters. GraphError: a gradient is stale.
            CommError: the batch sizes, the stale gradients or the gradients differ.
        """
        self._check_by_hand("update")
        size = checked_batch_size("update", batch_size)
        check_bool("Trainer: update", "ignore_stale_grad", ignore_stale_grad)
        stale = self._stale("update", ignore_stale_grad)
        self._shared.check()
        names = [name for name in self._names if name not in stale]
        if self._kvstore is not None:
            mine: dict[str, Any] = {"the batch size": size, "the stale gradients": sorted(stale)}
            if self._kvstore.num_workers > 1:
                # + 0: a zero may have another sign on another worker
                mine |= {UNSUMMED.format(name): _hash_of(to_numpy(self._grad(name)) + 0) for name in names}
            self._kvstore.agree("update", mine)
        with self._aborting("update"):
            for name in names:
                grad = self._grad(name)
                grad *= 1 / size
            self._update(names)
            self._finish()

    def synchronize(self, model: Layer | None = None) -> None:
        """Set the parameters to the newest ones, and a model's float buffers to their mean over the workers.

        Afterwards all workers have equal bits, also with "dist_async". All of them call it, such as before evaluating.

        Args:
            model: whose buffers are averaged, such as the running statistics of batch norm; None: none.

        Raises:
            OptionError: the Trainer has no store of the package, or ``model`` is not a Layer.
            CommError: without servers, or with update_on_kvstore=False, workers have other parameters, which they have
                updated by other gradients; it names one.
        """
        if not (model is None or isinstance(model, Layer)):
            raise OptionError(f"Trainer: synchronize: expected a Model or Layer, got {model!r}")
        store = self._kvstore
        if store is None:
            raise OptionError(f"Trainer: synchronize needs a store of kvstore.create(), not {self._store!r}")
        if self._updates_on_store:
            store.agree("synchronize", {})
            store.pull(self._names, list(self._params.values()))
            store.barrier()
        if not self._updates_on_store or store.num_servers == 0:
            store.agree(
                "synchronize", {f"parameter {k}": _hash_of(to_numpy(p)) for k, p in self._params.items()}
            )
        if model is not None:
            params = set(model.get_params())
            states = sorted(model.get_states().items())  # workers may have made them in another order
            buffers = [tensor for name, tensor in states if name not in params]
            store.average([tensor for tensor in buffers if tensor.dtype.kind == "f"])

    # ---- saved states --------------------------------------------------------------------------------

    def save_states(self, fname: Path) -> None:
        """Save the optimizer's states, learning rate, step counts and what compression has lost; all call it.

        Worker 0 writes; without a dist store each process does, so give each a file of its own. Parameters are the
        model's to save. A schedule is the script's to make again.
        CheckpointError: the file cannot be written.
        """
        self._saved.save(fname)

    def load_states(self, fname: Path) -> None:
        """Continue from ``save_states``, with as many workers and any number of servers.

        Raises:
            CheckpointError: no such file, damaged, or of other parameters, workers or optimizer; nothing has changed.
        """
        self._saved.load(fname)

    def get_states(self) -> dict[str, np.ndarray[Any, Any]]:
        """Return what a job checkpoint keeps of this worker; all workers call it, and all have the newest parameters.

        Returns:
            "<parameter>:<state>" of the optimizer, on worker 0 alone where the store updates, and "step_counter";
            "sync/kvstore/<parameter>", what compression has lost here; "lr", NaN for a schedule.
        """
        if self._kvstore is not None and "async" in self._kvstore.type:
            self.synchronize()
        return self._saved.get()

    def set_states(self, states: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Continue from ``get_states`` and, also on the servers, from worker 0's parameters; all workers call it.

        Raises:
            CheckpointError: they are of other parameters, or nothing that ``get_states`` gives; nothing was changed.
        """
        self._saved.set(states)

    # ---- parts of a step -----------------------------------------------------------------------------

    def _sum_grads(self, where: str, scale: float, stale: set[str], ignores: bool) -> list[str]:
        """Set the gradients to their sum, scaled; return the names of those that some worker has given."""
        if self._store is not None:
            break_graph("it uses a key-value store")
        names = self._given_anywhere(stale) if ignores else self._names
        if self._kvstore is not None:
            if self._kvstore.optimizer_description is not None:
                raise OptionError(
                    f"Trainer: {where}: the store has got an optimizer, so it has no sums of gradients any more; use "
                    "it for one Trainer with update_on_kvstore=True, or for several with False"
                )
            if names:
                self._pushpull(names, stale, [self._params[name].grad for name in names], scale, ignores)
            return names
        grads = [self._grad(name) for name in names]
        for name, grad in zip(names, grads, strict=True):
            if name in stale:
                grad.set_value(0)
            grad *= scale
        if self._store is not None and names:
            self._store.pushpull(names, grads, out=grads)
            for grad in grads if self.reduction == "mean" else ():
                grad /= self._store.num_workers
        return names

    def _pushpull(
        self, names: list[str], stale: set[str], outs: Sequence[Tensor | None], scale: float, ignores: bool
    ) -> None:
        """Push the gradients that are not stale to the package's store, and pull what comes of them into ``outs``."""
        assert self._kvstore is not None
        grads = [None if name in stale else self._params[name].grad for name in names]
        self._kvstore.pushpull(
            names, grads, out=outs, scale=scale, mean=self.reduction == "mean", allow_none=ignores
        )

    def _grad(self, name: str) -> Tensor:
        grad = self._params[name].grad
        assert grad is not None
        return grad

    def _given_anywhere(self, stale: set[str]) -> list[str]:
        """Return the names of the parameters whose gradient is fresh on some worker."""
        given = Tensor(data=np.array([name not in stale for name in self._names], np.float32))
        if self._kvstore is not None:
            self._kvstore.average([given])
        elif self._store is not None:
            self._store.pushpull(GIVEN, given, out=given)
        return [name for name, share in zip(self._names, to_numpy(given), strict=True) if share > 0]

    def _update(self, names: list[str]) -> None:
        store = self._kvstore
        with nullcontext() if store is None else store.applying("Trainer: update"):
            self._optimizer.update_pairs([(self._params[name], self._grad(name)) for name in names])
            self._optimizer.step()

    @contextmanager
    def _aborting(self, where: str) -> Iterator[None]:
        """Inside, an exception aborts the store: other workers may have made the step, this one has not.

        And it makes the gradients stale: some may be scaled, summed or applied already.
        """
        store = self._kvstore
        with nullcontext() if store is None else store.aborting(f"Trainer: {where}"):
            try:
                yield
            except BaseException:
                self._make_stale()
                raise

    def _make_stale(self) -> None:
        """Mark all gradients as used: the next backward replaces them."""
        for param in self._params.values():
            param.mark_grad_stale()

    def _stale(self, where: str, ignores: bool) -> set[str]:
        """Return the names of stale gradients; GraphError if there are some and they are not to be ignored."""
        stale = {name for name, param in self._params.items() if not param.has_fresh_grad}
        if stale and not ignores:
            raise GraphError(
                f"Trainer: {where}: no backward has computed the gradient of {', '.join(sorted(stale))} since the last "
                "step; compute all of them, leave these out of the Trainer, or call step(..., ignore_stale_grad=True) "
                "on all workers"
            )
        return stale

    def _begin_measuring(self) -> None:
        """Note what has moved before this step."""
        self._before = MessageTraffic() if self._kvstore is None else replace(self._kvstore.traffic)

    def _finish(self) -> None:
        """Make the gradients stale, and note the step and what has moved."""
        self._make_stale()
        self._shared.note_step()
        if self._kvstore is not None:
            self._last = self._kvstore.traffic.since(self._before)
            self._begin_measuring()
            self._kvstore.note_step(self._optimizer.step_counter)
        lap("update")
        drop_step()

    # ---- the store and the optimizer -----------------------------------------------------------------

    def _where_to_update(self, wanted: bool | None) -> bool:
        """Return whether the store updates; OptionError if it cannot what is wanted."""
        store, kvstore = self._store, self._kvstore
        if wanted is not None and not isinstance(wanted, bool):
            raise OptionError(f"Trainer: update_on_kvstore must be True, False or None, not {wanted!r}")
        if kvstore is not None and kvstore.optimizer_description is not None:
            raise OptionError(
                f"Trainer: {store!r} has an optimizer already, which updates every key; make all Trainers of a store "
                "with update_on_kvstore=False"
            )
        can = kvstore is not None and kvstore.is_capable("optimizer")
        if wanted and not can:
            raise OptionError(f"Trainer: update_on_kvstore=True, but {store!r} cannot update")
        if wanted is False and store is not None and "async" in store.type:
            raise OptionError(f"Trainer: {store.type} updates on its servers; leave update_on_kvstore out")
        if wanted is not None:
            return wanted
        return can and kvstore is not None and kvstore.type.startswith("dist")

    def _connect(self, compression_params: Mapping[str, Any] | None) -> None:
        """Make the keys with worker 0's parameters, which all workers get."""
        store, params = self._store, list(self._params.values())
        if not isinstance(store, KVStore):
            if compression_params is not None:
                raise OptionError(
                    f"Trainer: compression_params need a store of kvstore.create(), not {store!r}"
                )
            if store is not None:
                store.broadcast(self._names, params, out=params)
                given = Tensor((len(params),))
                store.broadcast(GIVEN, given, out=given)
            return
        mine = {
            "the optimizer": self._optimizer.settings(),
            "the optimizer's step_counter": self._optimizer.step_counter,
            "reduction": self.reduction,
            "update_on_kvstore": self._updates_on_store,
            "compression_params": compression_params is not None,
        }
        store.agree("Trainer", mine)
        if taken := sorted(name for name in self._names if name in store.get_residuals()):
            raise OptionError(
                f"Trainer: {store!r} has got keys {taken} already, and what their compression has lost; give the "
                "parameters other names"
            )
        if compression_params is not None:
            store.set_gradient_compression(compression_params)
        store.broadcast(self._names, params, out=params)
        if self._updates_on_store:
            store.set_optimizer(self._optimizer)

    def _check_by_hand(self, where: str) -> None:
        if self._updates_on_store:
            raise OptionError(
                f"Trainer: {where} is for update_on_kvstore=False; here the store updates, in step(batch_size)"
            )


def _hash_of(array: np.ndarray[Any, Any]) -> str:
    """Return a hash of an array's bits, at the speed of memory."""
    import xxhash  # Note [imports]

    return xxhash.xxh3_64_hexdigest(array.reshape(-1).view(np.uint8).data)
