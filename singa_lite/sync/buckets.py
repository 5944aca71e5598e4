# SPDX-License-Identifier: Apache-2.0
"""Schemes that send gradients in buckets while backward still runs: ``BucketedSync``, and what its exchanges yield.

What lives here: filling buckets and advancing their exchanges. What does not: what a scheme is (base.py), which
parameters share a bucket (grouping.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, ClassVar

import numpy as np

from ..comm.work import Work
from ..errors import DTypeError, OptionError
from ..graph.clock import lap
from ..graph.recorder import host, unrecorded
from ..tensor import Tensor
from .base import Array, Scheme, StepContext
from .grouping import Grouping, layout

MOST_COPIES = 4  # of a parameter's gradient in the buckets that are kept


class Bucket:
    """Gradients that are sent as one flat array, in yield order.

    Attributes:
        key: the names of all parameters, equal on all ranks and in all steps.
        name: of the step's collectives: its options and ``key``, so that ranks with other ones raise.
        flat: the gradients of ``params``, each at a multiple of the backend's alignment; zeros in between. It is
            changed in place.
        grads: each parameter with its part of ``flat``, which holds the gradient to apply in the end.
    """

    def __init__(self, params: list[Tensor], key: str, is_aligned: bool) -> None:
        self.params, self.key, self.name = params, key, key
        self.backend = params[0].device.backend
        self.dtype = params[0].dtype
        self.alignment = max(1, self.backend.alignment_bytes // self.dtype.itemsize) if is_aligned else 1
        self._spans, size = layout((param.shape for param in params), self.alignment)
        with unrecorded():
            self._flat: Array = self.backend.zeros((size,), self.dtype)
        self.grads = [(param, Tensor.wrap(part, param.device)) for param, part in self.views(self.flat)]

    @property
    def flat(self) -> Array:
        """The gradients."""
        return self._flat

    @flat.setter
    def flat(self, flat: Array) -> None:
        if flat is not self._flat:  # it is after ``bucket.flat *= 2``
            raise OptionError(
                "bucket.flat cannot be another array; change it in place: bucket.flat[:] = values"
            )

    def fits(self) -> bool:
        """Return whether the parameters have the shapes and dtypes that they had."""
        return all((grad.shape, grad.dtype) == (param.shape, param.dtype) for param, grad in self.grads)

    def views(self, flat: Array) -> Iterator[tuple[Tensor, Array]]:
        """Yield each parameter with its part of ``flat``, in the parameter's shape."""
        for param, span in zip(self.params, self._spans, strict=True):
            yield param, flat[span].reshape(param.shape)


class Soon:
    """What an exchange yields to continue as soon as the next bucket is packed, instead of after the last gradient.

    Packing waits for ``work``, which should be a short collective.
    """

    def __init__(self, work: Work) -> None:
        self.wait = work.wait


class OnHost:
    """What an exchange yields to have ``function`` called with numpy copies of ``arrays``, after the last gradient.

    It is called at every replay of a recorded step, and a CUDA graph ends before it; all buckets' functions are called
    together. What it starts, it or a later one must wait for.
    """

    def __init__(self, function: Callable[..., None], *arrays: Array) -> None:
        self.function, self.arrays = function, arrays

    def wait(self) -> None:
        """Nothing is left to wait for: ``BucketedSync.finish`` has called the function."""


Exchange = Generator[Work | Soon | OnHost, Any, None]


class BucketInFlight:
    """A bucket whose exchange, ``steps``, has begun."""

    def __init__(self, bucket: Bucket, steps: Exchange) -> None:
        self.bucket, self._steps = bucket, steps
        self.pending: Work | Soon | OnHost | None = None  # yielded last; None once the exchange has ended
        self.packed: Any = None  # what the backend's ``packing`` gave, for its ``unpacking``

    def start(self, grads: list[Tensor]) -> None:
        """Pack ``grads`` into the bucket and run the exchange to its first yield."""
        bucket = self.bucket
        lap("backward")
        with bucket.backend.packing(bucket.flat) as self.packed:
            arrays = (grad.array for grad in grads)
            bucket.backend.run("pack", *arrays, out=bucket.flat, alignment=bucket.alignment)
            lap("pack", bucket.name)
            self._advance(None)

    def advance_soon(self) -> None:
        """Run the exchange to its next yield while gradients are still computed, if its yield asks for it."""
        while isinstance(self.pending, Soon):
            with self.bucket.backend.packing(self.bucket.flat) as self.packed:
                self._advance(self.pending.wait())

    def advance(self) -> None:
        """Run the exchange to its next yield, after the last gradient; one that ended before is joined."""
        with self.bucket.backend.unpacking(self.packed):
            if self.pending is not None:
                self._advance(self.pending.wait())

    def _advance(self, result: Any) -> None:
        try:
            self.pending = self._steps.send(result)
            if not isinstance(self.pending, (Work, Soon, OnHost)):
                raise OptionError(
                    f"{self._steps.__qualname__} yielded {type(self.pending).__name__}, not a Work, Soon or OnHost"
                )
        except StopIteration:
            self.pending = None
        lap("compress" if self.pending is not None else "decompress", self.bucket.name)


class BucketedSync(Scheme, ABC):
    """Gathers gradients in buckets as they come, and exchanges each as soon as it is full: a scheme's ``exchange``.

    Attributes:
        is_selective: whether elements compete within a group: then groups are limited by ``threshold`` and not by
            ``bucket_bytes``, and gradients are contiguous.
        sums_residuals: whether it keeps sums over many steps in arrays of the gradients' dtype, so that it refuses 16
            bits, in which they lose too much.
        sends: dtypes of the gradients that it sends; () for all.
        sent_as: what values become on the wire, for errors.
        changes_one_rank: whether the gradients to apply differ from a rank's own in a world of one.
    """

    is_selective: ClassVar[bool] = False
    sums_residuals: ClassVar[bool] = False
    sends: ClassVar[tuple[str, ...]] = ()
    sent_as: ClassVar[str] = ""
    changes_one_rank: ClassVar[bool] = True

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._groupings: dict[np.dtype, Grouping[tuple[Tensor, Tensor]]] = {}
        self._buckets: dict[tuple[Tensor, ...], Bucket] = {}
        self._in_flight: list[BucketInFlight] = []

    @classmethod
    def check_dtype(cls, names: str, dtype: np.dtype[Any]) -> None:
        """Raise DTypeError for gradients, of the parameters ``names``, that the scheme does not send."""
        if cls.sums_residuals and dtype not in ("float32", "float64"):
            raise DTypeError(
                f"{cls.names[0]}: {names} is {dtype}, in which sums over many steps lose too much; use float32"
            )
        if cls.sends and dtype not in cls.sends:
            raise DTypeError(
                f"{cls.names[0]}: {names} is {dtype}; only {' and '.join(cls.sends)} gradients are sent as "
                f"{cls.sent_as}, use fp32"
            )

    def check(self, bucket: Bucket) -> None:
        """Raise for gradients that cannot be sent, alike on all ranks, before anything of them is."""
        self.check_dtype(bucket.key, bucket.dtype)

    @abstractmethod
    def exchange(self, bucket: Bucket) -> Exchange:
        """Turn ``bucket.flat``, this rank's gradients, into the gradients to apply.

        A generator that starts collectives. After a ``yield`` of a Work it continues when all gradients are there and
        that collective has ended, after a ``yield Soon(work)`` as soon as the next bucket is packed. Such a yield gives
        the Work's result. After a ``yield OnHost(function, *arrays)`` it continues when that function has been called.
        All ranks must yield alike.
        """

    def begin(self, step: StepContext, read: Callable[[], StepContext] | None = None) -> None:
        super().begin(step, read)
        self._groupings.clear()
        self._in_flight.clear()
        for backend in {bucket.backend for bucket in self._buckets.values()}:
            backend.join()

    def add_gradient(self, param: Tensor, grad: Tensor) -> None:
        if self.communicator.is_alone and not self.changes_one_rank:
            super().add_gradient(param, grad)
            return
        if param.dtype not in self._groupings:
            limit = self.threshold if self.is_selective else self.bucket_bytes // param.dtype.itemsize
            self._groupings[param.dtype] = Grouping(limit)
        if group := self._groupings[param.dtype].add((param, grad), param.size()):
            self._launch(group)

    def finish(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from super().finish()
        for grouping in self._groupings.values():
            if group := grouping.flush():
                self._launch(group)
        for in_flight in self._in_flight:
            in_flight.advance_soon()
        while self._in_flight:
            yielded = [
                (each.bucket, each.pending) for each in self._in_flight if isinstance(each.pending, OnHost)
            ]
            if yielded:
                device = self._in_flight[0].bucket.params[0].device
                calls = [call for _, call in yielded]
                given = [[Tensor.wrap(array, device) for array in call.arrays] for call in calls]
                # functions may use what is kept, which a recorder pins only if told: it may be copies of this step
                kept = [Tensor.wrap(a, device) for bucket, _ in yielded for a in self.state.used(bucket)]
                host(_call, calls, given, kept)
                lap("compress")
            for in_flight in self._in_flight:
                in_flight.advance()
                if in_flight.pending is None:  # it has ended
                    self.state.commit(in_flight.bucket)
                    yield from in_flight.bucket.grads
            self._in_flight = [in_flight for in_flight in self._in_flight if in_flight.pending is not None]

    def end(self, params: list[Tensor]) -> None:
        if works := self.communicator.works_in_flight:
            raise OptionError(
                f"{type(self).__name__}: exchange must yield {works[0].name!r}, which it has started"
            )
        super().end(params)

    def _launch(self, group: list[tuple[Tensor, Tensor]]) -> None:
        bucket = self._bucket_of(tuple(param for param, _ in group))
        bucket.name = self.collective_name(bucket.key)
        self.check(bucket)
        steps = self.exchange(bucket)
        if not isinstance(steps, Generator):
            raise OptionError(
                f"{type(self).__name__}: exchange must yield the Works that it starts, see docs/sync.md"
            )
        in_flight = BucketInFlight(bucket, steps)
        in_flight.start([grad for _, grad in group])
        for earlier in self._in_flight:
            earlier.advance_soon()
        self._in_flight.append(in_flight)

    def _bucket_of(self, params: tuple[Tensor, ...]) -> Bucket:
        """Return the bucket of these parameters, made if it is not kept.

        Where the parameters that have gradients change from step to step, the least recently used are dropped.
        """
        kept = self._buckets.pop(params, None)
        if kept is not None and kept.fits():
            self._buckets[params] = kept
        else:
            self._buckets[params] = Bucket(list(params), self.names_of(list(params)), not self.is_selective)
            most = MOST_COPIES * _size_of({param for group in self._buckets for param in group})
            while _size_of(param for group in self._buckets for param in group) > most:
                del self._buckets[next(iter(self._buckets))]
        return self._buckets[params]


def _size_of(params: Iterable[Tensor]) -> int:
    return sum(param.size() for param in params)


def _call(calls: list[OnHost], tensors: list[list[Tensor]], kept: list[Tensor]) -> None:
    """Call what exchanges yielded, with numpy copies of ``tensors``: all are read before anything is started.

    The calls may read and write ``kept`` besides.
    """
    values = [[tensor.device.backend.to_numpy(tensor.array) for tensor in given] for given in tensors]
    for call, given in zip(calls, values, strict=True):
        call.function(*given)
