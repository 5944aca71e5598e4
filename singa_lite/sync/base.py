# SPDX-License-Identifier: Apache-2.0
"""The contract of a synchronisation scheme, and what bucketed schemes share.

A scheme turns the gradients (or parameters) of N ranks into equal ones. It knows Tensors, a backend and the
Communicator contract, but no transport. One scheme is one file in this folder; its class names the words of
``dist_option`` it answers to, and the folder is searched for it (see sync/__init__.py).
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Hashable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from ..comm.base import Communicator, Work
from ..errors import CheckpointError
from ..graph import move_to, nothing
from ..tensor import Tensor
from .bucket import Grouping

Array = Any  # a raw array of the device's backend: numpy.ndarray on the CPU, cupy.ndarray on CUDA


@dataclass(frozen=True)
class StepOptions:
    """What a caller may choose anew at every step.

    Attributes:
        spars: share of elements to send (sparseTopK, 0 < spars <= 1), or least magnitude to send
            (sparseThreshold, >= 0).
        corr: keep what was not sent and add it to the next step's gradient; False drops it.
        clip_value: fp16 only: limit each local gradient element to +-clip_value before sending; None does not.
    """

    spars: float = 0.05
    corr: bool = True
    clip_value: float | None = None


class SyncStrategy(ABC):
    """One way to make the ranks agree, chosen by ``dist_option``.

    A step is begin(), push() for each gradient as backward yields it, flush(), finish() for the means, the
    optimizer's update, after_update().

    Attributes:
        names: the words of ``dist_option`` that choose this scheme, the usual one first.
        capture: what of a step can be part of a CUDA graph: "whole", or "split" where the host must look at a value
            in ``finish``, so that one graph ends before it and another begins after it.
        bytes_sent: bytes this rank put on a ring in the last step (comm/base.py, Note [bytes]).
        bytes_payload: bytes of what travelled in the last step.
        wait_s: seconds the last step waited for communication.

    Args:
        communicator: of the world to agree in.
        threshold: elements; a parameter above it is exchanged alone, smaller ones joined until they exceed it.
        bucket_bytes: bytes per message for schemes without selection; tuning it never changes results.
    """

    names: ClassVar[tuple[str, ...]] = ()
    capture: ClassVar[Literal["whole", "split"]] = "whole"

    def __init__(self, communicator: Communicator, threshold: int, bucket_bytes: int) -> None:
        self.communicator = communicator
        self.threshold = threshold
        self.bucket_bytes = bucket_bytes
        self.options = StepOptions()
        self.bytes_sent = 0
        self.bytes_payload = 0
        self.wait_s = 0.0

    def check(self, options: StepOptions) -> None:
        """Raise OptionError for options this scheme cannot run with; called before backward."""

    def begin(self, options: StepOptions) -> None:
        """Start a step; the counters of the last one are zeroed."""
        self.options = options
        self.bytes_sent = self.bytes_payload = 0
        self.wait_s = 0.0

    @abstractmethod
    def push(self, param: Tensor, grad: Tensor) -> None:
        """Take one gradient, whose memory is ours from now on; may start a long collective, waits for tiny ones."""

    def flush(self) -> None:
        """No gradient comes any more: start what is still to be started without waiting."""

    @abstractmethod
    def finish(self) -> Iterator[tuple[Tensor, Tensor]]:
        """``flush``, wait, and give each parameter with the gradient to apply; valid until the next begin()."""

    def after_update(self, params: list[Tensor]) -> None:
        """Called when the optimizer has changed ``params``; schemes that average parameters do it here."""

    def remember(self) -> Callable[[], None]:
        """Gives what brings back to now that which ``after_update`` changes in Python, see ``HostCall.remember``."""
        return nothing

    def record_key(self, options: StepOptions) -> Hashable:
        """Equal for steps that run the same kernels on the same arrays, as a captured graph does."""
        return options.corr, options.clip_value

    def state_dict(self, names: dict[Tensor, str]) -> dict[str, np.ndarray]:
        """What this rank must save to go on bit-exactly; parameters under their ``names``."""
        return {}

    def load_state_dict(self, states: dict[str, np.ndarray], names: dict[Tensor, str]) -> None:
        """Go on from ``state_dict``.

        Raises:
            CheckpointError: states of another scheme.
        """
        if states:
            raise CheckpointError(f"{type(self).__name__} keeps no state, but got {sorted(states)[:3]}")

    def send(self, work: Work) -> Work:
        """Count a collective's bytes; returns it."""
        self.bytes_sent += work.bytes_sent
        self.bytes_payload += work.bytes_payload
        return work

    def wait(self, work: Work) -> Any:
        """Wait for a collective and count the seconds; returns its result."""
        start = time.perf_counter()
        result = work.wait()
        self.wait_s += time.perf_counter() - start
        return result


class Bucket:
    """Gradients that travel as one flat array, in yield order.

    Attributes:
        params: the parameters, in yield order.
        flat: all gradients end to end, shape (sum of sizes,).
        means: each parameter with its part of ``flat``, which the update reads in place.
    """

    def __init__(self, params: list[Tensor], communicator: Communicator) -> None:
        self.params = params
        self.name = params[0].name or "unnamed"
        self.backend = params[0].device.backend
        self.dtype = params[0].dtype
        ends = np.cumsum([param.size() for param in params])
        self.spans = [
            slice(int(end) - param.size(), int(end)) for param, end in zip(params, ends, strict=True)
        ]
        self.flat = communicator.buffer(int(ends[-1]), str(self.dtype), self.backend)
        self.means = [(param, Tensor.wrap(part, param.device)) for param, part in self.views(self.flat)]

    def views(self, flat: Array) -> Iterator[tuple[Tensor, Array]]:
        """Each parameter with its part of ``flat``, in the parameter's shape."""
        for param, span in zip(self.params, self.spans, strict=True):
            yield param, flat[span].reshape(param.shape)


class Exchange:
    """A bucket on its way. A GPU works on it beside the backward pass: what comes before the collective is packing.

    Args:
        steps: what ``BucketedSync.exchange`` gives for the bucket.

    Attributes:
        work: what ``steps`` yielded last.
    """

    def __init__(self, bucket: Bucket, steps: Generator[Any, Any, None]) -> None:
        self.bucket, self._steps = bucket, steps
        self.work: Any = None
        self._packed: Any = None

    def go_on(self, before: Callable[[], Any]) -> None:
        """Run ``steps`` to the next yield, which gets what ``before`` gives."""
        with self.bucket.backend.packing(self.bucket.flat) as self._packed:
            self.work = self._steps.send(before())

    def end(self, wait: Callable[[Work], Any]) -> None:
        """``wait`` for the collective, and run ``steps`` to their end."""
        with self.bucket.backend.unpacking(self._packed):
            wait(self.work)
            for _ in self._steps:
                raise AssertionError(f"{self.bucket.name}: exchange yields more than once")

    def give_up(self) -> None:
        """Wait for the collective of a step that has failed: it still writes where the next one packs."""
        if not self.work.done():
            self.work.wait()


class BucketedSync(SyncStrategy):
    """Gathers gradients in buckets as they come and exchanges each as soon as it is full.

    A scheme writes ``exchange``, and says with ``is_selective`` whether elements compete within a group, in
    which case groups are cut by ``threshold`` and not by ``bucket_bytes``.
    """

    is_selective: ClassVar[bool] = False

    def __init__(self, communicator: Communicator, threshold: int, bucket_bytes: int) -> None:
        super().__init__(communicator, threshold, bucket_bytes)
        self._groupings: dict[np.dtype, Grouping[tuple[Tensor, Tensor]]] = {}
        self._buckets: dict[tuple[Tensor, ...], Bucket] = {}
        self._in_flight: list[Exchange] = []

    @abstractmethod
    def exchange(self, bucket: Bucket) -> Generator[Any, Any, None]:
        """Turn ``bucket.flat`` into the mean over the ranks.

        A generator: what must happen before the long collective, then ``yield`` its Work once, then what
        must happen after it has ended.
        """

    def begin(self, options: StepOptions) -> None:
        super().begin(options)
        self._groupings.clear()
        for exchange in self._in_flight:  # of a step that has failed
            exchange.give_up()
        self._in_flight.clear()
        for backend in {bucket.backend for bucket in self._buckets.values()}:
            backend.join()

    def push(self, param: Tensor, grad: Tensor) -> None:
        if param.dtype not in self._groupings:
            limit = self.threshold if self.is_selective else self.bucket_bytes // param.dtype.itemsize
            self._groupings[param.dtype] = Grouping(limit)
        group = self._groupings[param.dtype].add((param, grad), param.size())
        if group:
            self._launch(group)

    def flush(self) -> None:
        for grouping in self._groupings.values():
            group = grouping.flush()
            if group:
                self._launch(group)

    def finish(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.flush()
        for exchange in self._in_flight:
            exchange.end(self.wait)
            yield from exchange.bucket.means
        self._in_flight.clear()

    def _launch(self, group: list[tuple[Tensor, Tensor]]) -> None:
        params = tuple(param for param, _ in group)
        bucket = self._buckets.get(params)
        if bucket is None:
            bucket = self._buckets[params] = Bucket(list(params), self.communicator)
        grads = [grad for _, grad in group]
        self.start(Exchange(bucket, self.exchange(bucket)), lambda: self._gather(grads, bucket))

    def start(self, exchange: Exchange, gather: Callable[[], None]) -> None:
        """A bucket is full once ``gather`` has run: begin to exchange it."""
        exchange.go_on(gather)
        self._in_flight.append(exchange)

    def _gather(self, grads: list[Tensor], bucket: Bucket) -> None:
        """Bring ``grads`` into the bucket; those of a recorded step are computed there."""
        places = [mean.data for _, mean in bucket.means]
        if all(grad.data is place for grad, place in zip(grads, places, strict=True)):
            return
        bucket.backend.run("pack", *(grad.data for grad in grads), out=bucket.flat)
        for grad, place in zip(grads, places, strict=True):
            move_to(grad, place)
