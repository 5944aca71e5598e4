# SPDX-License-Identifier: Apache-2.0
"""DistOpt: any optimizer, on N ranks, as ``DistOpt(opt, dist_option="fp16")(loss)``.

SINGA's names for the same are in singa.py. How gradients are sent is written in sync/, what sends them in comm/.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from functools import partial
from typing import Any, NoReturn, Protocol

import numpy as np

from .. import autograd
from ..autograd.engine import check_recorded, needs_scale
from ..comm.base import Communicator
from ..comm.rendezvous import process_communicator
from ..comm.stopping import StopAgreement, StopCalls
from ..comm.work import Traffic
from ..config import state, this_thread
from ..device import Device
from ..errors import GraphError, OptionError, check_int
from ..graph.clock import abandon_step, lap, pause_step
from ..graph.recorder import bookkeep, break_graph, guard, guard_ahead, host, steps_since_start, unrecorded
from ..sync.agree import compare
from ..sync.base import Scheme, StepContext, types_of
from ..sync.clip import clip_gradients
from ..sync.collectives import ArrayCollectives
from ..sync.finite import PREFIX as FINITE
from ..sync.finite import FiniteCheck
from ..sync.fixed_order import WIRE_DTYPES, FixedOrder
from ..sync.scheme_table import PREFIX as SYNC
from ..sync.scheme_table import SchemeTable
from ..sync.text import read_dist_option
from ..tensor import Tensor
from .accumulate import PREFIX, GradientSums
from .arguments import argument_names
from .base import Optimizer, Pairs
from .checks import as_pairs, check_arrays, check_initialized, check_pair
from .consistency import Consistency
from .dist_arguments import check_messages, check_spars, check_updates, check_values
from .fixed_order import THREADS, FixedOrderSums, threads_of
from .microbatch_streams import MicrobatchStreams
from .overrides import warn_of_overrides
from .schedule import DecayScheduler
from .sgd import SGD
from .singa import SingaCalls
from .step_options import Option, StepOptions, has_clip
from .wrapper import OptimizerWrapper

THRESHOLD = 2097152  # elements; SINGA's default
SPARS = 0.05  # share or magnitude; SINGA's default
MAY_DIFFER = "ranks_may_differ"  # of states: since a scheme that does not keep parameters equal has run
BUFFER_SIZE = 4194304  # elements; SINGA's default, 16 MiB of float32 a bucket


class RendezvousId(Protocol):
    """The interface of NcclIdHolder, the name of a world."""

    rendezvous_id: str


class DistOpt(SingaCalls, StopCalls, ArrayCollectives, OptimizerWrapper):
    """Wraps an optimizer so that N ranks take one common step.

    Every rank computes gradients of its own batch; their mean, or what ``dist_option`` makes of it, is applied
    by ``opt`` on every rank. When a Model is compiled, or else at the first call, the ranks' parameters (names, shapes,
    dtypes) and optimizers (class and numbers) are compared, and rank 0's values copied to all. After states were loaded
    a hash of parameters and optimizer state is compared, by the next call, sum over the ranks or ``step()``.

    A step may be made by hand: ``all_reduce(g)`` and ``update(p, g)`` for each gradient, then ``step()``. Its sums are
    compared by shape and dtype, as they do not say whose gradient they are. Without a Model call ``broadcast`` first;
    the first ``step()`` warns where the ranks began with other values. ``bytes_sent`` and what else is measured of a
    step is of calls alone.

    Args:
        opt: the optimizer to wrap; None is SGD().
        nccl_id: an NcclIdHolder passed to every process by hand; None finds the world (launcher, MPI, Slurm,
            else a world of one).
        local_rank: with ``nccl_id``: this process's number, 0 <= local_rank < world_size.
        world_size: with ``nccl_id``: number of processes, all on this host.
        buffSize: elements a bucket holds (SINGA's name); sets ``bucket_bytes`` when that is None.
        dist_option: how gradients are sent where a call does not say: a name that docs/sync.md lists, and options of
            it as ``name[:value][:key=value...]``, such as "sparseTopK:0.01:corr=0"; the value is the first option's.
        threshold: elements; how int8, sign, the sparse schemes and partialUpdate form groups: a parameter above it
            alone, smaller ones joined until they exceed it.
        spars: what the option ``spars`` is where neither a call nor the text of ``dist_option`` says: a number, or a
            DecayScheduler of the step; None is 0.05. The attribute of this name can be set between steps; recorded
            steps see it.
        bucket_bytes: fp32, fp16 and bf16 send a message as soon as it exceeds these bytes; tuning changes no result but
            fp16's, which has one scale for a message.
        timeout_s: seconds a collective waits for its peers; None is 300, or SINGA_LITE_TIMEOUT_S. The first
            DistOpt of a process decides, as all share one world.
        communicator: use this one instead of the process's own.
        check_every: compare the same hash after every so many steps, in calls and in ``step()``, which every rank must
            then call; None compares after states were loaded only.
        accumulate: calls an update: that many calls add up gradients, and the last one sends and applies their mean,
            so that accumulate=n at batch B equals batch n * B. The step counter and schedules count updates.
        microbatches: calls of all ranks together that make an update: ``accumulate`` times the ranks.
        order: "any", or "fixed": with ``microbatches`` parameters have the same bits on 1, 2, 4, ... ranks, see
            docs/jobs.md; fp32 and bf16 alone.
        check_finite: what to do where a gradient of any rank has infinities or NaN: "raise" a NonFiniteError on all
            ranks before anything is sent, "skip" the update on all ranks, with a dynamic scale of a loss in float16 or
            computed under ``autocast("fp16")``, or None. Costs a collective of 16 bytes a rank, and nothing is sent
            during backward.
        clip_norm: scale what is applied down to this norm, of all gradients of the update together, > 0; None does not.
            dgc clips by it each rank's gradient before momentum, as its option ``clip``.
        options: of ``dist_option``, e.g. ``clip_value=1.0`` of fp16: numbers, or DecaySchedulers of the step; none
            that its text gives as well.

    Attributes:
        opt, dist_option: as given; may be set between steps on every rank, which recorded steps see. So may ``lr``,
            which is that of ``opt``; its other numbers are set there, as ``dist.opt.momentum``, and an OptionError if
            they are set here.
        communicator, world_size, local_rank, global_rank: of this process.

    Raises:
        OptionError: a value out of range. CommError: no world can be made.
    """

    is_recordable = True

    def __init__(
        self,
        opt: Optimizer | None = None,
        nccl_id: RendezvousId | None = None,
        local_rank: int | None = None,
        world_size: int | None = None,
        buffSize: int = BUFFER_SIZE,
        *,
        dist_option: str = "fp32",
        threshold: int = THRESHOLD,
        spars: float | DecayScheduler | None = None,
        bucket_bytes: int | None = None,
        timeout_s: float | None = None,
        communicator: Communicator | None = None,
        check_every: int | None = None,
        accumulate: int = 1,
        microbatches: int | None = None,
        order: str = "any",
        check_finite: str | None = None,
        clip_norm: float | None = None,
        **options: Option,
    ) -> None:
        check_messages(buffSize, bucket_bytes, threshold, timeout_s)
        accumulate, microbatches = check_updates(accumulate, microbatches, order)
        clip_norm = check_values(clip_norm, check_finite, check_every)
        self._opt = opt if opt is not None else SGD()
        _check_opt(self._opt)
        self._order, self._clip_norm = order, clip_norm
        self.places_streams = order == "fixed"
        self.bucket_bytes = int(4 * buffSize if bucket_bytes is None else bucket_bytes)
        self.spars = SPARS if spars is None else spars
        self.dist_option = dist_option
        self._step_options = StepOptions(options, clip_norm)
        self._step_options.check(self, spars)
        if nccl_id is not None and not hasattr(nccl_id, "rendezvous_id"):
            raise OptionError(f"DistOpt: nccl_id must be an NcclIdHolder, not {type(nccl_id).__name__}")
        if communicator is not None and not isinstance(communicator, Communicator):
            raise OptionError(
                f"DistOpt: communicator must be a Communicator, not {type(communicator).__name__}"
            )
        rendezvous_id = nccl_id.rendezvous_id if nccl_id is not None else None
        world = communicator or process_communicator(rendezvous_id, local_rank, world_size, timeout_s)
        super().__init__(world)
        self._stop = StopAgreement(world)
        self._sums = self._make_sums(accumulate, microbatches)
        self._finite = (
            None
            if check_finite is None
            else FiniteCheck(check_finite, self.communicator, self._drop_update, self.collective_name)
        )
        self._num_dropped = 0  # updates left out
        self.world_size = self.communicator.size
        self.local_rank = self.communicator.local_rank
        self.global_rank = self.communicator.rank
        self.threshold = threshold
        self._schemes = SchemeTable()
        self._thresholds: dict[Scheme, int] = {}  # this object's when a scheme was made
        self._ranks = Consistency(world, self._sums, check_every)
        self._streams = (
            MicrobatchStreams(world.rank, world.size, self._sums, self._ranks) if order == "fixed" else None
        )
        self._called: Scheme | None = None  # of the call whose step() runs; None if that is called by hand
        self._number = 0  # among the DistOpts of the communicator, from 1; 0: it has sent nothing yet
        self._inside, self._between = Traffic(), Traffic()  # of the last step
        self._own = frozenset(vars(self))
        if not world.is_alone:
            state.dist_opts.add(self)

    def _make_sums(self, accumulate: int, microbatches: int | None) -> GradientSums:
        if microbatches is None:
            return GradientSums(accumulate)
        each, rest = divmod(microbatches, self.communicator.size)
        if rest:
            raise OptionError(
                f"DistOpt: microbatches = {microbatches} must be divisible by the {self.communicator.size} ranks"
            )
        if self._order == "any":
            return GradientSums(each)
        return FixedOrderSums(each, _fixed_wire_dtype(read_dist_option(self.dist_option).scheme))

    def _scheme(self, kind: type[Scheme], threshold: int | None) -> Scheme:
        """Return the scheme with the name of ``kind``, a new one at its first step."""
        scheme = self._schemes.get(kind)
        if scheme is None:
            limit = self.threshold if threshold is None else threshold
            check_int("DistOpt", "bucket_bytes", self.bucket_bytes, 1)
            scheme = self._make_scheme(kind, check_int("DistOpt", "threshold", limit, 0))
            self._schemes.add(kind, scheme, self._ranks.names)
            self._thresholds[scheme] = self.threshold
        if threshold is None and self.threshold != self._thresholds[scheme]:
            threshold = self.threshold  # set since
        if threshold is not None and threshold != scheme.threshold:
            raise OptionError(
                f"DistOpt: {kind.names[0]} runs with threshold {scheme.threshold}, not {threshold}; "
                "what it keeps may belong to groups of that size: make another DistOpt"
            )
        if self.bucket_bytes != scheme.bucket_bytes:
            raise OptionError(
                f"DistOpt: {kind.names[0]} runs with bucket_bytes {scheme.bucket_bytes}, not {self.bucket_bytes}: make "
                "another DistOpt"
            )
        return scheme

    def _make_scheme(self, kind: type[Scheme], threshold: int) -> Scheme:
        if self._order == "any":
            return kind.make(self.communicator, threshold, self.bucket_bytes, self)
        scheme = FixedOrder(self.communicator, threshold, self.bucket_bytes, self)
        scheme.wire_dtype = _fixed_wire_dtype(kind)
        scheme.num_microbatches = self.world_size * self._sums.num_batches
        return scheme

    @property
    def opt(self) -> Optimizer:  # type: ignore[override]
        """The optimizer that is wrapped; one set later is prepared as it was, and the ranks compare theirs."""
        return self._opt

    @opt.setter
    def opt(self, opt: Optimizer) -> None:
        _check_opt(opt)
        if opt is not self._opt:
            if names := self._opt._names:
                opt.prepare({name: param for param, name in names.items()}, {})
            self._ranks.optimizer_set()
        self._opt = opt

    @property
    def spars(self) -> float | DecayScheduler:
        """The option ``spars`` of steps for which neither a call nor the text of ``dist_option`` gives it."""
        return self._spars

    @spars.setter
    def spars(self, spars: float | DecayScheduler) -> None:
        check_spars(spars)
        self._spars = spars

    # ---- one step ----------------------------------------------------------------------------------

    def __call__(
        self,
        loss: Tensor,
        dist_option: str | None = None,
        spars: float | DecayScheduler | None = None,
        *,
        threshold: int | None = None,
        **options: Option,
    ) -> None:
        """Run backward, make the ranks agree as ``dist_option`` says, update, and count the step.

        With ``accumulate`` all but the last call of each sum only run backward and add up gradients.

        Args:
            loss: recorded, one element.
            dist_option: as the constructor's, which None is.
            spars: sparseTopK: share of elements, (0, 1]; sparseThreshold: least magnitude, >= 0; others ignore it.
                A DecayScheduler is evaluated at every step, a recorded one included. None is the attribute ``spars``.
            threshold: elements; None is the constructor's. Must not change once a scheme has run.
            options: of the scheme, by the names that docs/sync.md lists; those that are not given are the
                constructor's if ``dist_option`` is, else the scheme's defaults.

        Raises:
            OptionError: unknown, out of range or given twice. CommError: a peer is gone, late or disagrees, at a
                scheme's first step about its options too. GraphError: ``loss`` was not recorded, or was used up.
            NonFiniteError: with ``check_finite="raise"``, on all ranks.
        """
        check_recorded(loss)
        if type(self) is not DistOpt:
            warn_of_overrides(type(self), DistOpt)
        if self._streams is not None:
            self._streams.check_draws()
        self._check_sent()
        self._guard_attributes()
        if threshold is not None:
            check_int("DistOpt", "threshold", threshold, 0)
        given = self._step_options.read_call(self, dist_option, spars, options)
        kind = read_dist_option(self.dist_option if dist_option is None else dist_option).scheme
        scheme = self._scheme(kind, threshold)
        self._schemes.check_velocity(scheme)
        self._ranks.compare_if_loaded(self, scheme)
        self._ranks.compare_options(self, kind.names[0], scheme, self._step_options, given)
        self._sums.guard()
        if not self._sums.is_last:
            self._sums.add(self._gradients(loss))
            self._leave_microbatch(is_update=False)
            self._begin_microbatch()
            lap("backward")
            pause_step()
            return
        gradients: Iterable[tuple[Tensor, Tensor]] = self._sums.means(
            self._gradients(loss), self._ranks.names
        )
        if self._finite is None:
            self._update(scheme, given, gradients, loss.device)
            self._begin_microbatch()
            return
        pairs = list(gradients)
        self._leave_microbatch(is_update=True)
        if self._finite.may_update(pairs, self._ranks.names, lambda: self._opt._step_counter):
            self._update(scheme, given, pairs, loss.device)
        self._finite.end_update()
        self._begin_microbatch()

    def _update(
        self,
        scheme: Scheme,
        given: dict[str, Option],
        gradients: Iterable[tuple[Tensor, Tensor]],
        device: Device,
    ) -> None:
        """Make the ranks agree on ``gradients`` of ``device``, update, and count the step."""
        self._begin(scheme, given)
        for param, grad in gradients:
            scheme.add_gradient(param, grad)
        if self._finite is None:
            self._leave_microbatch(is_update=True)
        pairs = list(scheme.finish())
        if scheme.keeps_equal:
            self._ranks.make_equal(self)
        if self._clip_norm is not None and not has_clip(type(scheme)):
            clip_gradients([grad for _, grad in pairs], self._clip_norm)
        takes_momentum = scheme.takes_momentum(scheme.options)
        (self._opt.update_velocity if takes_momentum else self._opt.update_pairs)(pairs)
        lap("update")
        scheme.end([param for param, _ in pairs])
        self._sums.end()
        lap("update")
        bookkeep(self._end_call, scheme, not device.backend.runs_behind_host)
        self.step()
        bookkeep(self._end_update)

    def _end_update(self) -> None:
        self._ranks.updating = self._called = None

    def _drop_update(self) -> None:
        """Begin an update again, in an eager step or a replay."""
        self._num_dropped += 1
        with unrecorded():
            self._sums.end()
            if self._finite is not None and self._finite.mode == "raise":  # else the call goes on
                self.place_streams()
        abandon_step()

    def _leave_microbatch(self, is_update: bool) -> None:
        """Set the random streams to a part that all ranks share, at the end of a call's backward pass."""
        if self._streams is not None:
            bookkeep(self._streams.share, self._opt, is_update)

    def _begin_microbatch(self) -> None:
        """Set the random streams to those of the next microbatch, but for a Model, which does so before its steps."""
        model = this_thread.model
        if model is None or model.optimizer is not self:
            self.place_streams()

    def place_streams(self) -> None:
        if self._streams is not None:
            bookkeep(self._streams.place, self._opt)

    @property
    def place(self) -> tuple[int | None, int]:  # type: ignore[override]
        return self._sums.num_calls, self._num_dropped

    def _gradients(self, loss: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield what backward does, once the ranks have agreed on its parameters."""
        gradients = self._backward(loss)
        for param, grad in gradients:
            if param not in self._ranks.names:
                rest = [(param, grad), *gradients]
                self._register([param for param, _ in rest if param not in self._ranks.names])
                yield from rest
                return
            yield param, grad

    def _backward(self, loss: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the gradients of ``loss``, computed at its scale."""
        finite = self._finite
        if finite is None or finite.mode != "skip" or loss.size() != 1:
            return autograd.backward(loss)
        if loss.dtype != np.float16 and not needs_scale(loss):
            return autograd.backward(loss)
        return finite.unscaled(autograd.backward(loss, finite.seed(loss)))

    def _begin(self, scheme: Scheme, given: dict[str, Option]) -> None:
        """Start a step of ``scheme``, and report to a recorder what decides which kernels and collectives it has."""
        # of this call, if a recorded step has several
        offset = steps_since_start(self._opt, self._opt._step_counter)
        guard_ahead(self, offset, partial(self._step_options.structure, self, scheme, given))
        guard(scheme, scheme.graph_key)
        read = partial(self._step_options.step, self, type(scheme), given)
        bookkeep(self._begin_call, scheme, read)
        with unrecorded():
            step = read()
        scheme.begin(step, read)

    def _begin_call(self, scheme: Scheme, read: Callable[[], StepContext]) -> None:
        """Start to count traffic, and have the scheme read this step's options: other ones may have run since."""
        self._begin_measuring()
        self._ranks.updating = scheme
        self.communicator.stop_requests.begin_step()
        scheme.follow(read)

    def _end_call(self, scheme: Scheme, is_timed: bool) -> None:
        """Note what the step has sent and how long it took, and whether to stop, at replays too."""
        self._end_measuring(is_timed, None if self._finite is None else self._finite.traffic)
        self._inside, self._between = scheme.inside or Traffic(), scheme.between or Traffic()
        self._stop.end_step(self._opt._step_counter + 1)  # this one is about to be counted
        self._ranks.steps_by_hand = None
        self._ranks.may_differ |= not scheme.keeps_equal
        self._called = scheme  # at replays too, for a ``step`` that a subclass overrides

    def _guard_attributes(self) -> None:
        """Check what attributes were set to between steps, and have recorded steps see them."""
        if type(self) is DistOpt and (added := vars(self).keys() - self._own):
            self._check_added(added)
        guard(
            (self, "attributes"),
            lambda: (id(self._opt), self.dist_option, self.threshold, self.bucket_bytes, tuple(vars(self))),
        )

    def _check_added(self, names: Set[str]) -> None:
        """Raise OptionError for attributes set on this object that are arguments, which nothing reads there."""
        if of_opt := sorted(names & {*argument_names(type(self._opt))}):
            raise OptionError(
                f"DistOpt: {', '.join(of_opt)} was set on the DistOpt, where nothing reads it; set that of dist.opt"
            )
        schemes = {read_dist_option(self.dist_option).scheme, *self._schemes.kinds}
        options = {name for scheme in schemes for name in types_of(scheme)}
        if own := sorted(names & {*argument_names(DistOpt), *options}):
            raise OptionError(
                f"DistOpt: {', '.join(own)} was set after the DistOpt was made, where nothing reads it; give it to the "
                "constructor, or an option of dist_option to the call"
            )

    # ---- what must be equal on all ranks ---------------------------------------------------------------

    def prepare(self, params: dict[str, Tensor], buffers: dict[str, Tensor]) -> None:
        """Compare the ranks' parameters, buffers and optimizers, and copy rank 0's values and optimizer states to all.

        Between two averages of a dist_option such as localSGD the ranks keep theirs, unless a parameter is new.

        Raises:
            CommError: a rank has other names, shapes or dtypes, or another optimizer or number of steps made; with
                order="fixed" another seed or number of threads.
        """
        self._opt.prepare(params, buffers)
        if self._order == "fixed":
            threads = {"OMP_NUM_THREADS": threads_of(params.values())}
            compare(
                self.communicator, "their threads", threads, "export the same OMP_NUM_THREADS on every rank"
            )
        self._ranks.prepare(self, params, buffers)
        if self._streams is not None:
            self.place_streams()
            cure = "call SetRandSeed alike before compile"
            compare(self.communicator, "their random seeds", self._streams.seeds_by_name(), cure)

    def _register(self, params: list[Tensor]) -> None:
        if self._order == "fixed":
            raise GraphError(
                f"DistOpt: order='fixed' has not seen {params[0].name!r}; call prepare(params, buffers) with all of "
                "them before the first call, as Model.compile does"
            )
        with unrecorded(), self.outside_step():
            self._ranks.register(self, params)

    @property
    def bytes_inside_hosts(self) -> int:
        """Of ``bytes_sent``, those among the ranks of this host; 0 unless the last step was ``hierarchical``."""
        return self._measured("bytes_inside_hosts", self._inside).bytes_sent

    @property
    def bytes_between_hosts(self) -> int:
        """Of ``bytes_sent``, those among the leaders of hosts; 0 unless the last step was ``hierarchical``."""
        return self._measured("bytes_between_hosts", self._between).bytes_sent

    @property
    def keeps_equal(self) -> bool:
        """Whether ``dist_option`` and all others that have run leave the ranks with equal parameters after each step.

        If not, ``synchronize`` before evaluation.
        """
        kinds = [read_dist_option(self.dist_option).scheme, *self._schemes.kinds]
        return all(kind.keeps_equal for kind in kinds)

    @property
    def num_skipped(self) -> int:
        """Updates that ``check_finite="skip"`` has left out."""
        break_graph("it reads num_skipped, which a replay would not do")
        return 0 if self._finite is None else self._finite.num_skipped

    @property
    def loss_scale(self) -> float:
        """What a loss in float16 or under ``autocast("fp16")`` is multiplied by; 1 without ``check_finite="skip"``."""
        break_graph("it reads loss_scale, which a replay would not do")
        finite = self._finite
        return 1.0 if finite is None or finite.mode != "skip" else finite.loss_scale

    def _compare_if_loaded(self) -> None:
        self._ranks.compare_if_loaded(self, None)

    def _take_names(self, params: Mapping[str, Tensor]) -> None:
        self._ranks.called({str(name): param for name, param in params.items()})

    def states_loaded(self) -> None:
        self._ranks.states_loaded()
        if self._streams is not None:
            self._streams.states_loaded()  # the checkpoint's seeds go on, which the ranks compare with the states
            self.place_streams()

    # ---- what passes through to the wrapped optimizer --------------------------------------------------

    def step(self) -> None:
        """Count a step; compare the ranks where ``check_every`` says so, or states were loaded."""
        scheme, self._called = self._called, None
        self._guard_attributes()
        if scheme is None:  # a call has done both at its start
            self._check_sent()
            self._compare_if_loaded()
            self._ranks.compare_by_hand(self)
        self._opt.step()
        if scheme is None:
            bookkeep(self._end_step)
        if self._ranks.check_every is not None:
            host(self._ranks.compare_if_due, self, scheme)
        if scheme is None:
            self._ranks.training_begins()

    def _end_step(self) -> None:
        self._ranks.steps_by_hand = None
        self._stop.end_step(self._opt._step_counter)

    def update_velocity(self, pairs: Pairs) -> None:
        self._check_by_hand()
        self._guard_attributes()
        self._opt.update_velocity(pairs)

    @property
    def num_calls(self) -> int:
        """How many calls were made since the last update, with ``accumulate``."""
        break_graph("it reads num_calls, which a replay would not do")
        return self._sums.num_calls

    def name_of(self, param: Tensor) -> str:
        """Return the name of ``param`` that no other has: its own, or "<name>#<k>" in the order of first updates."""
        name = self._ranks.names.get(param) if isinstance(param, Tensor) else None
        if name is None:
            raise OptionError(
                f"DistOpt: name_of: expected a parameter that was updated or prepared, got {param!r}"
            )
        return name

    def collective_name(self, name: str) -> str:
        """Return ``name``, of all but the communicator's first DistOpt behind "DistOpt <number>".

        They are numbered in the order of their first collectives, which is the same on all ranks.
        """
        if not self._number:
            self.communicator.num_optimizers += 1
            self._number = self.communicator.num_optimizers
        return str(name) if self._number == 1 else f"DistOpt {self._number} {name}".rstrip()

    def random_seeds(self) -> dict[str, int]:
        """Return the seed of each device whose random stream is placed, with order="fixed"."""
        return {} if self._streams is None else self._streams.seeds_by_name()

    def settings(self) -> dict[str, Any]:
        own = {"accumulate": self._sums.num_batches, "order": self._order, "clip_norm": self._clip_norm}
        own["check_finite"] = None if self._finite is None else self._finite.mode
        own |= {THREADS: threads_of(self._ranks.names)} if self._order == "fixed" else {}
        return {**self._opt.settings(), **own}

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise OptionError(
            "DistOpt: it cannot be copied or pickled, as it sends for this process; copy the optimizer that it wraps "
            "(.opt), or a Model without one (model.optimizer = None)"
        )

    def __repr__(self) -> str:
        """Return the wrapped optimizer, how gradients travel, and how many ranks there are."""
        given = dict(self._step_options.options)
        given |= {"accumulate": self._sums.num_batches} if self._sums.num_batches > 1 else {}
        given |= {} if self._order == "any" else {"order": self._order}
        given |= {} if self._clip_norm is None else {"clip_norm": self._clip_norm}
        options = "".join(f", {name}={value!r}" for name, value in given.items())
        return (
            f"DistOpt({self._opt!r}, dist_option={self.dist_option!r}{options}, world_size={self.world_size})"
        )

    def update_all(self, pairs: Pairs) -> None:
        """Update by gradients that are means already."""
        pairs = as_pairs("DistOpt", pairs)
        self._begin_by_hand([param for param, _ in pairs])
        self._opt.update_pairs(pairs)

    def update(self, param: Tensor, grad: Tensor) -> None:
        """Update by a gradient that is a sum over the ranks: it is divided by world_size, in place."""
        [(param, grad)] = as_pairs("DistOpt", [(param, grad)])
        check_pair("DistOpt", param, grad)
        self._begin_by_hand([param])
        grad /= self.world_size
        self._opt.update(param, grad)

    def _begin_by_hand(self, params: list[Tensor]) -> None:
        self._check_by_hand()
        self._schemes.check_velocity(None)
        self._guard_attributes()
        self._ranks.updated_by_hand(self, params)

    def _check_by_hand(self) -> None:
        """Raise OptionError where an option promises what updates by hand do not do."""
        given = "order='fixed'" if self._order == "fixed" else None
        if self._finite is not None:
            given = f"check_finite={self._finite.mode!r}"
        if given is not None:
            raise OptionError(
                f"DistOpt: {given} holds for calls, optimizer(loss), and not for updates by hand"
            )

    def get_states(self) -> dict[str, np.ndarray]:
        """Return the wrapped optimizer's states and this rank's own: "sync/<scheme>/<state>", "accumulate/<state>".

        "ranks_may_differ" is there after steps of a dist_option that does not keep the ranks' parameters equal.
        """
        states = {**self._opt.get_states(), **self._sums.state_dict(self._ranks.names)}
        states |= {} if self._finite is None else self._finite.state_dict()
        states |= {MAY_DIFFER: np.array(True)} if self._ranks.may_differ else {}
        return states | self._schemes.state_dict(self._ranks.names)

    def set_states(self, states: dict[str, np.ndarray]) -> None:
        """Continue from ``get_states``, on the rank it was taken from; what is not in there starts again.

        At the next step the ranks compare what they have loaded.

        Raises:
            CheckpointError: the states do not fit; nothing was changed.
        """
        check_arrays("DistOpt", states)
        sums, finite = ({k: states[k] for k in states if k.startswith(prefix)} for prefix in (PREFIX, FINITE))
        self._schemes.check_states(
            states,
            self._ranks.names,
            lambda kind: kind.make(self.communicator, self.threshold, self.bucket_bytes, self),
        )
        self._sums.check_states(sums, self._ranks.names)
        if self._finite is not None:
            self._finite.check_states(finite)
        self._opt.set_states(
            {k: v for k, v in states.items() if not k.startswith((SYNC, PREFIX, FINITE, MAY_DIFFER))}
        )
        self._ranks.may_differ = MAY_DIFFER in states
        if self._finite is not None:
            self._finite.load_state_dict(finite)
        self._sums.load_state_dict(sums, self._ranks.names)
        self._schemes.load_state_dict(states, self._ranks.names)
        self._last = Traffic()
        self.states_loaded()


def _check_opt(opt: object) -> None:
    """Raise OptionError unless ``opt`` is an optimizer that was initialized, and no DistOpt."""
    if isinstance(opt, DistOpt):
        raise OptionError("DistOpt: opt is a DistOpt already; give the optimizer itself, for example SGD()")
    if not isinstance(opt, Optimizer):
        raise OptionError(f"DistOpt: opt must be an Optimizer, not {type(opt).__name__}")
    check_initialized(opt)


def _fixed_wire_dtype(kind: type[Scheme]) -> str | None:
    """Return what sums in fixed order are sent as, in place of ``kind``; None: their own dtype."""
    if kind.names[0] not in WIRE_DTYPES:
        raise OptionError(f"DistOpt: order='fixed' is for fp32 and bf16, not for {kind.names[0]}")
    return WIRE_DTYPES[kind.names[0]]
