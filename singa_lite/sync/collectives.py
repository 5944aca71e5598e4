# SPDX-License-Identifier: Apache-2.0
"""The collectives on Tensors and raw arrays that DistOpt offers to scripts, by SINGA's names, and what a step sent.

A collective has ended when its call returns, and on CUDA the current stream comes after it. Those of gradients leave
the SUM over the ranks in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

from ..comm.base import Communicator
from ..comm.work import Traffic
from ..errors import CommError, DeviceError, DTypeError, OptionError, ShapeError, check_bool, check_number
from ..graph.clock import StepTimes, end_step
from ..graph.recorder import break_graph, persist
from ..tensor import Tensor
from ..tensor.checks import listed
from ..tensor.core import check_tensor
from .agree import by_name, text_of_names
from .arrays import GivenArray, RawOrTensor
from .fp16 import HalfMessage
from .sparse import SparseMessage
from .sparse_threshold import count_selected, send_selected
from .sparse_top_k import check_share, send_top_k
from .step_seconds import StepSeconds, step_seconds


class HasStates(Protocol):
    """A layer or model."""

    def get_states(self) -> dict[str, Tensor]: ...


class ArrayCollectives:
    """The calls, over ``communicator``. ``_compare_if_loaded`` is called before each sum."""

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator
        # until the last step began, of the last step, and of all steps
        self._before, self._last, self._total = Traffic(), Traffic(), Traffic()
        self._times: StepTimes | None = None
        self._check_bytes = 0  # sent to decide on the last step, not in _last
        self._fused: dict[str, list[GivenArray]] = {"sum": [], "half": []}  # put aside until the next send

    def collective_name(self, name: str) -> str:
        """Return what a collective called ``name`` is called; a subclass may say whose it is."""
        return name

    def _compare_if_loaded(self) -> None:
        """Compare the ranks where they have loaded states."""

    def _take_names(self, params: Mapping[str, Tensor]) -> None:
        """Take over names that a script has given to parameters."""

    @property
    def bytes_sent(self) -> int:
        """Bytes this rank put on a ring in the last step (comm/work.py, Note [bytes]).

        A step is what a call of DistOpt that updates makes; what a script sends otherwise, by ``all_reduce`` in a step
        made by hand, say, counts in ``communicator.traffic`` alone. So it is for all that is said of a step here.
        """
        return self._measured("bytes_sent", self._last).bytes_sent

    @property
    def total_bytes_sent(self) -> int:
        """The sum of ``bytes_sent`` over all steps since this was made; what is loaded does not change it."""
        return self._measured("total_bytes_sent", self._total).bytes_sent

    @property
    def bytes_payload(self) -> int:
        """Bytes of what travelled in the last step."""
        return self._measured("bytes_payload", self._last).bytes_payload

    @property
    def total_bytes_payload(self) -> int:
        """The sum of ``bytes_payload`` over all steps since this was made, as ``total_bytes_sent``."""
        return self._measured("total_bytes_payload", self._total).bytes_payload

    @property
    def wait_s(self) -> float:
        """Seconds the host waited for collectives in the last step, that of ``check_finite`` among them.

        Without those by which the ranks agree before a first step.
        """
        return self._measured("wait_s", self._last).wait_s

    @property
    def step_seconds(self) -> StepSeconds | None:
        """Where the time of the last step went; None before the first one, and on CUDA, which runs behind the host."""
        last = self._measured("step_seconds", self._last)
        return None if self._times is None else step_seconds(self._times, last.bytes_sent + self._check_bytes)

    def _measured(self, name: str, traffic: Traffic) -> Traffic:
        """Return ``traffic``, for the attribute ``name``."""
        break_graph(f"it reads {name}, which a replay would not do")
        return traffic

    def _begin_measuring(self) -> None:
        self._before = self.communicator.traffic.copy()

    def _end_measuring(self, is_timed: bool, check: Traffic | None = None) -> None:
        """Count what was sent since the step began; of a device whose kernels run behind the host no seconds.

        Args:
            is_timed: whether the kernels do not run behind the host.
            check: traffic of this step before it began, of which the wait counts and the bytes do not.
        """
        self._last = self.communicator.traffic.since(self._before)
        self._check_bytes = 0 if check is None else check.bytes_sent
        if check is not None:
            self._last.wait_s += check.wait_s
        self._total.add(self._last)
        times = end_step()
        self._times = times if is_timed else None

    @contextmanager
    def outside_step(self) -> Iterator[None]:
        """Leave what is sent inside, so that the ranks agree, out of what is said of the step that has begun."""
        before = self.communicator.traffic.copy()
        try:
            yield
        finally:
            self._before.add(self.communicator.traffic.since(before))

    def broadcast(self, params: Iterable[Tensor] | Mapping[str, Tensor]) -> None:
        """Copy rank 0's values of ``params`` to every rank.

        They are Tensors in an order that is the same on all ranks, or by name, as ``get_params()`` gives them.
        """
        named = params if isinstance(params, Mapping) else {}
        name = f"parameters {text_of_names(named)}" if named else "parameters"
        arrays = self._lasting(by_name(named) if isinstance(params, Mapping) else params)
        self._take_names(named)
        self.communicator.broadcast(arrays, 0, name=self.collective_name(name)).wait()

    def synchronize(self, model: HasStates) -> None:
        """Average parameters and batch-norm statistics over the ranks, before evaluation or saving."""
        if not hasattr(model, "get_states"):
            raise OptionError(f"DistOpt: synchronize: expected a Model or Layer, got {type(model).__name__}")
        states = model.get_states()
        name = self.collective_name(f"synchronize {text_of_names(states)}")
        self.communicator.all_reduce(self._lasting(by_name(states)), "mean", name=name).wait()

    def _lasting(self, tensors: Iterable[Tensor]) -> list[Any]:
        """Return the raw arrays of tensors that stay, for a collective that writes them after what was computed."""
        known = listed(tensors)
        for tensor in known:
            check_tensor("DistOpt: broadcast", tensor)
        for backend in {tensor.device.backend for tensor in known}:
            backend.activate()
        for tensor in known:
            persist(tensor.array)
            if self.communicator.size > 1:  # alone, a rank keeps its values
                tensor.note_change()
        return [tensor.array for tensor in known]

    def all_reduce(self, tensor: RawOrTensor) -> None:
        """Replace the values by their sum over the ranks."""
        given = _given(tensor)
        if isinstance(tensor, Tensor):  # a raw array is the stream's that is current
            given.backend.activate()
        self._sum(_shapes_of([given]), given)

    def fused_all_reduce(self, tensor: Sequence[RawOrTensor], send: bool = True) -> None:
        """Sum several arrays as one message; ``send=False`` puts them aside for the next call that sends.

        CommError, by the next step: some were never sent.
        """
        self._fuse("sum", tensor, send, self._sum)

    def _sum(self, shapes: str, given: GivenArray) -> None:
        self._compare_if_loaded()
        self.communicator.all_reduce(
            given.array, "sum", name=self.collective_name(f"all_reduce {shapes}")
        ).wait()

    def all_reduce_half(self, tensor: RawOrTensor) -> None:
        """Do ``all_reduce`` through float16 (sync/fp16.py, Note [half scale])."""
        given = _given(tensor)
        self._sum_half(_shapes_of([given]), given)

    def _sum_half(self, shapes: str, given: GivenArray) -> None:
        self._compare_if_loaded()
        name = self.collective_name(f"all_reduce_half {shapes}")
        message = HalfMessage(self.communicator, given.backend, given.array, name)
        message.measure().wait()
        message.send("sum").wait()

    def fused_all_reduce_half(self, tensor: Sequence[RawOrTensor], send: bool = True) -> None:
        """Do ``fused_all_reduce`` through float16."""
        self._fuse("half", tensor, send, self._sum_half)

    def sparsification(
        self, tensor: RawOrTensor, accumulation: RawOrTensor | None, spars: float, topK: bool
    ) -> None:
        """Replace the values by the sum of what all ranks select.

        Args:
            tensor: float16, float32 or float64.
            accumulation: residual, added first and then overwritten by what was not sent; None drops it.
            spars: share of elements with ``topK``, else least magnitude.
            topK: select by share.

        Raises:
            DTypeError: another dtype. ShapeError: accumulation differs in dtype or size. OptionError: spars is out of
                range.
        """
        given = _given(tensor)
        self._sparsify(accumulation, spars, topK, _shapes_of([given]), given)

    def fused_sparsification(
        self, tensor: Sequence[RawOrTensor], accumulation: RawOrTensor | None, spars: float, topK: bool
    ) -> None:
        """Do ``sparsification`` over several arrays as one; ``accumulation`` has all their elements."""
        given = list(map(_given, listed(tensor)))
        _as_one_array(given, partial(self._sparsify, accumulation, spars, topK, _shapes_of(given)))

    def _sparsify(
        self, accumulation: RawOrTensor | None, spars: float, topK: bool, shapes: str, given: GivenArray
    ) -> None:
        array, backend = given.array, given.backend
        residual = None if accumulation is None else _given(accumulation).array.reshape(-1)
        if check_bool("sparsification", "topK", topK):
            check_share("sparseTopK", "spars", spars)
        else:
            check_number("sparseThreshold", "spars", spars, 0)
        if array.dtype.char not in "efd":
            raise DTypeError(f"sparsification: expected float16, float32 or float64, got {array.dtype}")
        flat = array.reshape(-1)
        if residual is not None and (residual.shape, residual.dtype) != (flat.shape, flat.dtype):
            raise ShapeError(
                f"sparsification: accumulation is {residual.dtype}[{residual.size}], "
                f"the values {flat.dtype}[{flat.size}]"
            )
        self._compare_if_loaded()
        if residual is not None:
            backend.run("add", flat, residual, out=flat)
        name = self.collective_name(f"sparsification {shapes}")
        message = SparseMessage(self.communicator, backend, flat, residual, name)
        if topK:
            send_top_k(message, spars)
        else:
            gather = self.communicator.all_gather(count_selected(message, spars), name=message.name)
            send_selected(message, spars, backend.to_numpy(gather.wait()).ravel().tolist())
        message.merge(1.0)

    def _check_sent(self) -> None:
        """Raise CommError, and drop them, if arrays were put aside that no call has sent."""
        kept = {kind: len(arrays) for kind, arrays in self._fused.items() if arrays}
        if kept:
            self._fused = {kind: [] for kind in self._fused}
            raise CommError(
                f"DistOpt, rank {self.communicator.rank}: {sum(kept.values())} arrays were put aside by send=False and "
                "never sent, so this rank may have updated by its own gradients"
            )

    def wait(self) -> None:
        """Kept for SINGA scripts: the calls above have ended when they return."""

    def _fuse(
        self,
        kind: str,
        tensors: Sequence[RawOrTensor],
        send: bool,
        function: Callable[[str, GivenArray], None],
    ) -> None:
        """Put each array aside once; with ``send``, do ``function`` to all that were put aside, as one array."""
        check_bool("DistOpt", "send", send)
        kept = self._fused[kind]
        for given in list(map(_given, listed(tensors))):
            if not any(given.array is known.array for known in kept):
                kept.append(given)
        if send:
            self._fused[kind] = []
            _as_one_array(kept, partial(function, _shapes_of(kept)))


def _shapes_of(arrays: Iterable[GivenArray]) -> str:
    """Return the shapes as text, for the names of collectives: arrays of one size may have others on another rank."""
    return ", ".join(str(list(given.array.shape)) for given in arrays)


def _given(value: RawOrTensor) -> GivenArray:
    return GivenArray.around("DistOpt", value)


def _as_one_array(kept: list[GivenArray], function: Callable[[GivenArray], None]) -> None:
    """Do ``function`` to arrays of one dtype and device, end to end as one flat array; nothing if there are none."""
    if not kept:
        return
    arrays, device = [given.array for given in kept], kept[0].tensor.device
    if len({array.dtype for array in arrays}) > 1:
        raise DTypeError(f"DistOpt: one message cannot hold {sorted({str(array.dtype) for array in arrays})}")
    if any(given.backend is not device.backend for given in kept):
        raise DeviceError("DistOpt: one message cannot hold arrays of several devices")
    flat = device.backend.empty((sum(array.size for array in arrays),), arrays[0].dtype)
    device.backend.run("pack", *arrays, out=flat)
    function(GivenArray(flat, Tensor.wrap(flat, device)))
    device.backend.run("unpack", flat, out=tuple(arrays))
