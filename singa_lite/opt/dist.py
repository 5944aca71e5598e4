# SPDX-License-Identifier: Apache-2.0
"""DistOpt: any optimizer, on N ranks. The one file where compute and exchange meet.

``DistOpt(opt)(loss, dist_option="fp16")`` is the whole of it; the ``backward_and_*`` methods are SINGA's doors
to the same few lines. How gradients travel is written in sync/, who moves them in comm/.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from .. import autograd
from ..backend.base import Backend
from ..comm.base import Communicator, is_cuda_array
from ..comm.rendezvous import process_communicator
from ..device import create_cuda_gpu_on, get_default_device
from ..errors import (
    CheckpointError,
    CommError,
    DeviceError,
    DTypeError,
    OptionError,
    ShapeError,
    check_choice,
    check_int,
    check_number,
)
from ..graph import host
from ..sync import find_schemes
from ..sync.base import StepOptions, SyncStrategy
from ..sync.fp16 import HalfMessage
from ..sync.sparse import SparseMessage
from ..sync.sparse_threshold import check_magnitude, count_threshold, select_threshold
from ..sync.sparse_top_k import check_share, select_top_k
from ..tensor import Tensor
from .base import Optimizer, Pairs, unique_names
from .schedule import DecayScheduler, as_schedule
from .sgd import SGD

THRESHOLD = 2097152  # elements; SINGA's default
BUFFER_SIZE = 4194304  # elements; SINGA's default, 16 MiB of float32 a bucket
RawOrTensor = Any  # a Tensor, or a raw array such as ``tensor.data``


class Ticket(Protocol):
    """What names a world: NcclIdHolder."""

    ticket: str


class HasStates(Protocol):
    """A layer or model."""

    def get_states(self) -> dict[str, Tensor]: ...


class DistOpt(Optimizer):
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
        self.communicator = communicator or process_communicator(ticket, local_rank, world_size, timeout_s)
        self.world_size = self.communicator.size
        self.local_rank = self.communicator.local_rank
        self.global_rank = self.communicator.rank
        self.threshold = threshold
        self.spars = spars
        self._names: dict[Tensor, str] = {}
        self._schemes: dict[str, SyncStrategy] = {}
        self._last: SyncStrategy | None = None
        self._loaded: dict[str, dict[str, np.ndarray]] = {}  # states of schemes that have not run yet
        self._fused: dict[str, list[Any]] = {"sum": [], "half": []}  # put aside until the next send

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
        asked = name, threshold, spars, corr, clip_value
        host(self._begin, *asked, updates=False, variant=lambda: self._variant(*asked))
        gradients = autograd.backward(loss)
        for param, grad in gradients:
            if param not in self._names:
                host(self._meet, name, [(param, grad), *gradients])
                break
            host(self._push, name, param, grad, updates=False)
        host(self._finish, name)

    # The host calls of a step. They look their scheme up, as ``set_states`` may replace it between two replays.

    def _begin(
        self,
        name: str,
        threshold: int | None,
        spars: float | DecayScheduler | None,
        corr: bool,
        clip_value: float | None,
    ) -> None:
        """Start a step with what ``spars`` is now."""
        scheme, options = self._scheme(name, threshold), self._options(spars, corr, clip_value)
        scheme.check(options)
        scheme.begin(options)

    def _variant(
        self,
        name: str,
        threshold: int | None,
        spars: float | DecayScheduler | None,
        corr: bool,
        clip_value: float | None,
    ) -> Hashable:
        """Of the step that comes, see HostCall."""
        scheme = self._scheme(name, threshold)
        if scheme.capture != "whole":
            return None
        return scheme, scheme.record_key(self._options(spars, corr, clip_value))

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

    def _finish(self, name: str) -> None:
        """Wait for the means, update by them, and count the step."""
        scheme = self._schemes[name]
        pairs = list(scheme.finish())
        self.opt.update_all(pairs)
        scheme.after_update([param for param, _ in pairs])
        self.step()
        self._last = scheme

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
        self.communicator.broadcast([param.data for param in params], 0, name="parameters").wait()

    def synchronize(self, model: HasStates) -> None:
        """Average parameters and batch-norm statistics over the ranks, before evaluation or saving."""
        arrays = [state.data for state in model.get_states().values()]
        self.communicator.all_reduce(arrays, "mean", name="synchronize").wait()

    # ---- SINGA's collectives on raw arrays: the SUM, in place, ended on return -------------------------

    def all_reduce(self, tensor: RawOrTensor) -> None:
        """Replace the values by their sum over the ranks."""
        self.communicator.all_reduce(_raw(tensor), "sum").wait()

    def fused_all_reduce(self, tensor: Sequence[RawOrTensor], send: bool = True) -> None:
        """Sum several arrays as one message; ``send=False`` puts them aside for the next call that sends."""
        flat, arrays, backend = self._fuse("sum", tensor, send)
        if flat is not None:
            self.communicator.all_reduce(flat, "sum").wait()
            backend.run("unpack", flat, out=tuple(arrays))

    def all_reduce_half(self, tensor: RawOrTensor) -> None:
        """Like ``all_reduce``, through float16 (sync/fp16.py, Note [half scale])."""
        self._all_reduce_half(_raw(tensor), _backend(tensor))

    def _all_reduce_half(self, array: Any, backend: Backend) -> None:
        message = HalfMessage(self.communicator, backend, array, "all_reduce_half")
        message.measure().wait()
        message.start("sum").wait()
        message.unscale()

    def fused_all_reduce_half(self, tensor: Sequence[RawOrTensor], send: bool = True) -> None:
        """Like ``fused_all_reduce``, through float16."""
        flat, arrays, backend = self._fuse("half", tensor, send)
        if flat is not None:
            self._all_reduce_half(flat, backend)
            backend.run("unpack", flat, out=tuple(arrays))

    def sparsification(
        self, tensor: RawOrTensor, accumulation: RawOrTensor | None, spars: float, topK: bool
    ) -> None:
        """Replace the values by the sum of what all ranks select.

        Args:
            tensor: float array.
            accumulation: residual, added first and then overwritten by what was not sent; None drops it.
            spars: share of elements with ``topK``, else least magnitude.
            topK: select by share.
        """
        residual = None if accumulation is None else _raw(accumulation)
        self._sparsify(_raw(tensor), residual, _backend(tensor), spars, topK)

    def fused_sparsification(
        self, tensor: Sequence[RawOrTensor], accumulation: RawOrTensor | None, spars: float, topK: bool
    ) -> None:
        """Like ``sparsification`` over several arrays as one; ``accumulation`` has all their elements."""
        flat, arrays, backend = _pack(self.communicator, [(_raw(part), _backend(part)) for part in tensor])
        if flat is not None:
            residual = None if accumulation is None else _raw(accumulation)
            self._sparsify(flat, residual, backend, spars, topK)
            backend.run("unpack", flat, out=tuple(arrays))

    def _sparsify(self, array: Any, residual: Any, backend: Backend, spars: float, topK: bool) -> None:
        (check_share if topK else check_magnitude)(spars)
        flat = array.reshape(-1)
        residual = None if residual is None else residual.reshape(-1)
        if residual is not None and (residual.shape, residual.dtype) != (flat.shape, flat.dtype):
            raise ShapeError(
                f"sparsification: accumulation is {residual.dtype}[{residual.size}], "
                f"the values {flat.dtype}[{flat.size}]"
            )
        if residual is not None:
            backend.run("add", flat, residual, out=flat)
        message = SparseMessage(self.communicator, backend, flat, residual, "sparsification")
        if topK:
            work = select_top_k(message, spars)
        else:
            counts = backend.to_numpy(count_threshold(message, spars).wait())
            work = select_threshold(message, spars, counts.ravel().tolist())
        work.wait()
        message.merge(1.0)

    def wait(self) -> None:
        """Kept for SINGA scripts: the calls above have ended when they return."""

    def _fuse(self, kind: str, tensors: Sequence[RawOrTensor], send: bool) -> tuple[Any, list[Any], Any]:
        """The arrays put aside and given, each once, as ``_pack`` gives them; (None, [], None) while not sending."""
        kept = self._fused[kind]
        for tensor in tensors:
            array = _raw(tensor)
            if not any(array is known for known, _ in kept):
                kept.append((array, _backend(tensor)))
        if not send:
            return None, [], None
        self._fused[kind] = []
        return _pack(self.communicator, kept)

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


def _raw(tensor: RawOrTensor) -> Any:
    """The raw array of a Tensor or array, which the caller can change in place as one piece of memory."""
    array = tensor.data if isinstance(tensor, Tensor) else tensor
    if not isinstance(array, np.ndarray) and not is_cuda_array(array):
        raise DTypeError(f"DistOpt: expected a Tensor, a numpy or a CUDA array, got {type(tensor).__name__}")
    if not array.flags.c_contiguous or not getattr(array.flags, "writeable", True):
        raise ShapeError(
            f"DistOpt: an array of shape {array.shape} is not contiguous or read-only; pass a copy"
        )
    return array


def _backend(tensor: RawOrTensor) -> Backend:
    """The backend of the device that a Tensor or raw array lives on."""
    if isinstance(tensor, Tensor):
        return tensor.device.backend
    return (create_cuda_gpu_on(tensor.device.id) if is_cuda_array(tensor) else get_default_device()).backend


def _pack(communicator: Communicator, kept: list[tuple[Any, Backend]]) -> tuple[Any, list[Any], Any]:
    """Arrays of one dtype end to end as one flat array, they, and their backend; (None, [], None) of none."""
    if not kept:
        return None, [], None
    arrays, backend = [array for array, _ in kept], kept[0][1]
    if len({array.dtype for array in arrays}) > 1:
        raise DTypeError(f"DistOpt: one message cannot hold {sorted({str(array.dtype) for array in arrays})}")
    if any(other is not backend for _, other in kept):
        raise DeviceError("DistOpt: one message cannot hold arrays of several devices")
    flat = communicator.buffer(sum(array.size for array in arrays), str(arrays[0].dtype), backend)
    backend.run("pack", *arrays, out=flat)
    return flat, arrays, backend


def _difference(first: list[Any], other: list[Any], rank: int) -> str:
    """Where the manifest of ``rank`` leaves rank 0's."""
    if len(first) != len(other):
        return f"rank 0 has {len(first)} parameters and buffers, rank {rank} has {len(other)}"
    place = next(i for i, (a, b) in enumerate(zip(first, other, strict=True)) if a != b)
    return f"parameter {place} is {first[place]} on rank 0 but {other[place]} on rank {rank}; models must be equal"
