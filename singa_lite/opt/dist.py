# SPDX-License-Identifier: Apache-2.0
"""DistOpt: any optimizer, on N ranks. The one file where compute and exchange meet.

``DistOpt(opt)(loss, dist_option="fp16")`` is the whole of it; the ``backward_and_*`` methods are SINGA's doors
to the same few lines. How gradients travel is written in sync/, who moves them in comm/.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Hashable, Iterable
from functools import partial
from typing import Any, Protocol

import numpy as np

from .. import autograd
from ..comm.base import Communicator
from ..comm.rendezvous import process_communicator
from ..errors import (
    CheckpointError,
    CommError,
    OptionError,
    check_choice,
    check_int,
    check_number,
)
from ..graph import host
from ..sync import find_schemes
from ..sync.base import StepOptions, SyncStrategy
from ..sync.collectives import ArrayCollectives
from ..tensor import Tensor
from .base import Optimizer, Pairs, unique_names
from .schedule import DecayScheduler, as_schedule
from .sgd import SGD

THRESHOLD = 2097152  # elements; SINGA's default
BUFFER_SIZE = 4194304  # elements; SINGA's default, 16 MiB of float32 a bucket


class Ticket(Protocol):
    """What names a world: NcclIdHolder."""

    ticket: str


class HasStates(Protocol):
    """A layer or model."""

    def get_states(self) -> dict[str, Tensor]: ...


class DistOpt(ArrayCollectives, Optimizer):
    """Wraps an optimizer so that N ranks take one common step.

    Every rank computes gradients of its own batch; their mean, or what ``dist_option`` makes of it, is applied
    by ``opt`` on every rank. Before the first update the ranks' parameters are compared (names, shapes,
    dtypes) and rank 0's values win.

    Args:
        opt: the optimizer to wrap; None is SGD().
        nccl_id: an NcclIdHolder passed to every process by hand; None finds the world (launcher, MPI, Slurm,
            else a world of one).
        local_rank: with ``nccl_id``: this process's number, 0 <= local_rank < world_size.
        world_size: with ``nccl_id``: number of processes, all on this host.
        buffSize: elements a bucket holds (SINGA's name); sets ``bucket_bytes`` when that is None.
        threshold: elements; how the sparse schemes and partialUpdate cut groups: a parameter above it alone,
            smaller ones joined until they exceed it.
        spars: what ``spars`` is when a call does not say: a number, or a DecayScheduler of the step. The attribute
            of this name can be set between steps; recorded steps see it.
        bucket_bytes: fp32, fp16 and bf16 send a message as soon as it exceeds these bytes; tuning never changes
            results.
        timeout_s: seconds a collective waits for its peers; None is 300, or SINGA_LITE_TIMEOUT_S. The first
            DistOpt of a process decides, as all share one world.
        communicator: use this one instead of the process's own.

    Attributes:
        opt, communicator, world_size, local_rank, global_rank.

    Raises:
        OptionError: a value out of range. CommError: no world can be made.
    """

    def __init__(
        self,
        opt: Optimizer | None = None,
        nccl_id: Ticket | None = None,
        local_rank: int | None = None,
        world_size: int | None = None,
        buffSize: int = BUFFER_SIZE,
        *,
        threshold: int = THRESHOLD,
        spars: float | DecayScheduler = 0.05,
        bucket_bytes: int | None = None,
        timeout_s: float | None = None,
        communicator: Communicator | None = None,
    ) -> None:
        self.bucket_bytes = 4 * buffSize if bucket_bytes is None else bucket_bytes
        check_int("DistOpt", "bucket_bytes", self.bucket_bytes, 1)
        check_int("DistOpt", "threshold", threshold, 0)
        if not isinstance(spars, DecayScheduler):
            check_number("DistOpt", "spars", spars, 0)
        if timeout_s is not None:
            check_number("DistOpt", "timeout_s", timeout_s, 1e-3)
        if opt is not None and not isinstance(opt, Optimizer):
            raise OptionError(f"DistOpt: opt must be an Optimizer, not {type(opt).__name__}")
        self.opt = opt if opt is not None else SGD()
        ticket = nccl_id.ticket if nccl_id is not None else None
        super().__init__(communicator or process_communicator(ticket, local_rank, world_size, timeout_s))
        self.world_size = self.communicator.size
        self.local_rank = self.communicator.local_rank
        self.global_rank = self.communicator.rank
        self.threshold = threshold
        self.spars = spars
        self._names: dict[Tensor, str] = {}
        self._schemes: dict[str, SyncStrategy] = {}
        self._last: SyncStrategy | None = None
        self._means: list[tuple[Tensor, Tensor]] = []  # of the step that runs
        self._loaded: dict[str, dict[str, np.ndarray]] = {}  # states of schemes that have not run yet

    # ---- one step ----------------------------------------------------------------------------------

    def __call__(
        self,
        loss: Tensor,
        dist_option: str = "fp32",
        spars: float | DecayScheduler | None = None,
        *,
        threshold: int | None = None,
        corr: bool = True,
        clip_value: float | None = None,
    ) -> None:
        """Run backward, make the ranks agree as ``dist_option`` says, update, and count the step.

        Args:
            loss: recorded, one element.
            dist_option: "fp32", "fp16", "bf16", "partialUpdate", "sparseTopK", "sparseThreshold", an alias, or
                another scheme of sync/.
            spars: sparseTopK: share of elements, (0, 1]; sparseThreshold: least magnitude, >= 0.
                A DecayScheduler is asked at every step, a recorded one included. None is the attribute ``spars``.
            threshold: elements; None is the constructor's. Must not change once a scheme has run.
            corr: sparse schemes: False drops what is not sent.
            clip_value: fp16: limit each local gradient element to +-clip_value first.

        Raises:
            OptionError: unknown or out of range. CommError: a peer is gone, late or disagrees.
        """
        name = self._scheme(dist_option, threshold).names[0]
        options = partial(self._options, spars, corr, clip_value)
        kind = partial(self._kind, name, threshold, options)
        host(self._begin, name, threshold, options, updates=False, variant=kind)
        gradients = autograd.backward(loss)
        for param, grad in gradients:
            if param not in self._names:
                host(self._meet, name, [(param, grad), *gradients])
                break
            host(self._push, name, param, grad, updates=False)
        host(self._flush, name, updates=False)
        host(self._receive, name, variant=lambda: self._look(name, threshold))
        host(self._update, name, variant=kind, remember=lambda: self._remember(name))

    # The host calls of a step. They look their scheme up, as ``set_states`` may replace it between two replays.

    def _begin(self, name: str, threshold: int | None, options: Callable[[], StepOptions]) -> None:
        """Start a step with what the options are now."""
        scheme, now = self._scheme(name, threshold), options()
        scheme.check(now)
        scheme.begin(now)
        self._means = []

    def _kind(self, name: str, threshold: int | None, options: Callable[[], StepOptions]) -> Hashable:
        """Of the step that comes, see ``HostCall.variant``."""
        scheme = self._scheme(name, threshold)
        return scheme, scheme.record_key(options())

    def _look(self, name: str, threshold: int | None) -> Hashable:
        """None if ``_receive`` must see values, see ``HostCall.variant``."""
        return None if self._scheme(name, threshold).capture == "split" else 0

    def _options(
        self, spars: float | DecayScheduler | None, corr: bool, clip_value: float | None
    ) -> StepOptions:
        now = self.spars if spars is None else spars
        now = now(self.step_counter) if isinstance(now, DecayScheduler) else now
        return StepOptions(check_number("DistOpt", "spars", now), corr, clip_value)

    def _push(self, name: str, param: Tensor, grad: Tensor) -> None:
        """Hand one gradient over."""
        self._schemes[name].push(param, grad)

    def _meet(self, name: str, pairs: list[tuple[Tensor, Tensor]]) -> None:
        """Push gradients of parameters that may be new."""
        unknown = [param for param, _ in pairs if param not in self._names]
        if unknown:
            self._learn(unknown)
        for param, grad in pairs:
            self._push(name, param, grad)

    def _flush(self, name: str) -> None:
        """Tell that no gradient comes any more."""
        self._schemes[name].flush()

    def _receive(self, name: str) -> None:
        """Wait for the means."""
        self._means = list(self._schemes[name].finish())

    def _update(self, name: str) -> None:
        """Update by the means, and count the step."""
        scheme, pairs = self._schemes[name], self._means
        self.opt.update_all(pairs)
        scheme.after_update([param for param, _ in pairs])
        self.step()
        self._last = scheme

    def _remember(self, name: str) -> Callable[[], None]:
        """See ``HostCall.remember``."""
        all_of_them = self.opt.remember(), self._schemes[name].remember()

        def bring_back() -> None:
            for each in all_of_them:
                each()

        return bring_back

    def backward_and_update(self, loss: Tensor, threshold: int | None = None) -> None:
        """dist_option "fp32"."""
        self(loss, "fp32", threshold=threshold)

    def backward_and_update_half(
        self, loss: Tensor, threshold: int | None = None, clipping: bool = False, clip_Value: float = 100
    ) -> None:
        """dist_option "fp16"; ``clipping`` limits local gradients to +-clip_Value first."""
        self(loss, "fp16", threshold=threshold, clip_value=clip_Value if clipping else None)

    def backward_and_partial_update(self, loss: Tensor, threshold: int | None = None) -> None:
        """dist_option "partialUpdate"."""
        self(loss, "partialUpdate", threshold=threshold)

    def backward_and_sparse_update(
        self,
        loss: Tensor,
        threshold: int | None = None,
        spars: float | DecayScheduler | None = None,
        topK: bool = False,
        corr: bool = True,
    ) -> None:
        """dist_option "sparseTopK" or, without ``topK``, "sparseThreshold"."""
        self(loss, "sparseTopK" if topK else "sparseThreshold", spars, threshold=threshold, corr=corr)

    def _scheme(self, dist_option: str, threshold: int | None) -> SyncStrategy:
        known = find_schemes()
        check_choice("DistOpt", "dist_option", dist_option, known)
        name = known[dist_option].names[0]
        if name not in self._schemes:
            limit = self.threshold if threshold is None else threshold
            check_int("DistOpt", "threshold", limit, 0)
            self._schemes[name] = known[dist_option](self.communicator, limit, self.bucket_bytes)
            if name in self._loaded:
                self._schemes[name].load_state_dict(self._loaded.pop(name), self._names)
        scheme = self._schemes[name]
        if threshold is not None and threshold != scheme.threshold:
            raise OptionError(
                f"DistOpt: {name} runs with threshold {scheme.threshold}, not {threshold}; "
                "changing it would lose residuals: make another DistOpt"
            )
        return scheme

    @property
    def bytes_sent(self) -> int:
        """Bytes this rank put on a ring in the last step (comm/base.py, Note [bytes])."""
        return self._last.bytes_sent if self._last else 0

    @property
    def bytes_payload(self) -> int:
        """Bytes of what travelled in the last step."""
        return self._last.bytes_payload if self._last else 0

    @property
    def wait_s(self) -> float:
        """Seconds the last step waited for communication."""
        return self._last.wait_s if self._last else 0.0

    # ---- agreement before the first update -----------------------------------------------------------

    def prepare(self, params: dict[str, Tensor], buffers: dict[str, Tensor]) -> None:
        """Compare the ranks' manifests and copy rank 0's values of parameters and buffers to all.

        Raises:
            CommError: a rank has other names, shapes or dtypes.
        """
        self.opt.prepare(params, buffers)
        states = {**params, **buffers}
        self._compare(list(states.values()), list(states))
        self.broadcast(states.values())
        self._names = unique_names(dict.fromkeys([*self._names, *params.values()]))

    def _learn(self, params: list[Tensor]) -> None:
        """Meet parameters of no Model: compare manifests, and make values equal where they are not."""
        self._names = unique_names([*self._names, *params])
        self._compare(params, [self._names[param] for param in params])
        digest = hashlib.sha256()
        for param in params:
            digest.update(param.device.backend.to_numpy(param.data).tobytes())
        if len(set(self.communicator.all_gather_object(digest.hexdigest(), name="parameter values"))) > 1:
            warnings.warn(
                "DistOpt: the ranks started with different parameter values; rank 0's were copied to all. "
                "Call DistOpt.broadcast(params) before training, or use a Model",
                stacklevel=4,
            )
            self.broadcast(params)

    def _compare(self, tensors: list[Tensor], names: list[str]) -> None:
        mine = [[name, list(t.shape), str(t.dtype)] for name, t in zip(names, tensors, strict=True)]
        manifests = self.communicator.all_gather_object(mine, name="parameter manifest")
        for rank, theirs in enumerate(manifests):
            if theirs != manifests[0]:
                raise CommError(
                    f"DistOpt, rank {self.global_rank}: {_difference(manifests[0], theirs, rank)}"
                )

    def broadcast(self, params: Iterable[Tensor]) -> None:
        """Copy rank 0's values of ``params`` to every rank."""
        arrays = _arrays_of(params)
        self.communicator.broadcast(arrays, 0, name="parameters").wait()

    def synchronize(self, model: HasStates) -> None:
        """Average parameters and batch-norm statistics over the ranks, before evaluation or saving."""
        arrays = _arrays_of(model.get_states().values())
        self.communicator.all_reduce(arrays, "mean", name="synchronize").wait()

    # ---- what passes through to the wrapped optimizer --------------------------------------------------

    @property
    def lr(self) -> DecayScheduler:  # type: ignore[override]
        return self.opt.lr

    @lr.setter
    def lr(self, value: float | DecayScheduler) -> None:
        self.opt.lr = as_schedule("lr", value)

    @property
    def step_counter(self) -> int:  # type: ignore[override]
        return self.opt.step_counter

    def step(self) -> None:
        self.opt.step()

    def update_all(self, pairs: Pairs) -> None:
        """Update by gradients that are means already."""
        self.opt.update_all(pairs)

    def update(self, param: Tensor, grad: Tensor) -> None:
        """Update by a gradient that is a sum over the ranks: it is divided by world_size, in place."""
        grad /= self.world_size
        self.opt.update(param, grad)

    def get_states(self) -> dict[str, np.ndarray]:
        """The wrapped optimizer's states and this rank's own: "sync/<scheme>/<state>"."""
        own = {name: scheme.state_dict(self._names) for name, scheme in self._schemes.items()}
        states = dict(self.opt.get_states())
        for name, scheme_states in {**self._loaded, **own}.items():
            states |= {f"sync/{name}/{key}": value for key, value in scheme_states.items()}
        return states

    def set_states(self, states: dict[str, np.ndarray]) -> None:
        """Go on from ``get_states``, on the rank it was taken from; what is not in there starts anew.

        Raises:
            CheckpointError: the states do not fit; nothing was changed.
        """
        known = find_schemes()
        own: dict[str, dict[str, np.ndarray]] = {}
        for key in [key for key in states if key.startswith("sync/")]:
            _, name, state = key.split("/", 2)
            own.setdefault(name, {})[state] = states[key]
        if not set(own) <= set(known):
            raise CheckpointError(f"DistOpt: states of unknown schemes {sorted(set(own) - set(known))}")
        for name, scheme_states in own.items():  # a trial, which raises before anything changes
            known[name](self.communicator, self.threshold, self.bucket_bytes).load_state_dict(
                scheme_states, self._names
            )
        self.opt.set_states({key: value for key, value in states.items() if not key.startswith("sync/")})
        self._schemes.clear()  # made anew by the next step, whose call says with which threshold
        self._last = None
        self._loaded = own


def _arrays_of(tensors: Iterable[Tensor]) -> list[Any]:
    """Their arrays, for a collective that comes after what was computed there."""
    known = list(tensors)
    for backend in {tensor.device.backend for tensor in known}:
        backend.activate()
    return [tensor.data for tensor in known]


def _difference(first: list[Any], other: list[Any], rank: int) -> str:
    """Where the manifest of ``rank`` leaves rank 0's."""
    if len(first) != len(other):
        return f"rank 0 has {len(first)} parameters and buffers, rank {rank} has {len(other)}"
    place = next(i for i, (a, b) in enumerate(zip(first, other, strict=True)) if a != b)
    return f"parameter {place} is {first[place]} on rank 0 but {other[place]} on rank {rank}; models must be equal"
