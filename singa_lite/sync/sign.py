# SPDX-License-Identifier: Apache-2.0
"""sign: a gradient travels as a sign for each element and a magnitude for each tensor; what that misses is sent later.

Note [units]: a residual is kept in the unit of gradients, but its parameter misses it times the learning rate of the
step that left it. So where the learning rate has changed it is multiplied by the old one over the new one; each
parameter by its own, as not every step has gradients of all.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from ..graph.recorder import bookkeep, unrecorded
from ..tensor import Tensor
from .base import Array, StepContext
from .buckets import Bucket, BucketedSync, Exchange
from .state import Slot


class Sign(BucketedSync):
    """Each element of a tensor is sent as plus or minus the tensor's mean \\|gradient + residual\\|; 0 counts as plus.

    Source: Seide et al., "1-bit stochastic gradient descent", 2014; Karimireddy et al., "Error feedback fixes SignSGD",
    2019; the change of units: BytePS, "gradient compression", 2020.
    """

    names = ("sign",)
    is_recordable = True
    sums_residuals = True
    is_selective = True  # groups by threshold, without padding
    slots = MappingProxyType({"residual": Slot()})
    counter_prefix = "lr of "  # of the step that left its residual

    @dataclass(frozen=True)
    class Options:
        """Options of sign.

        Attributes:
            corr: keep what was not sent and add it to the next step's gradient; False drops it.
            rescale: have what was kept follow the learning rate, see Note [units].
        """

        corr: bool = True
        rescale: bool = True

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._ends = WeakKeyDictionary[Bucket, Array]()

    def exchange(self, bucket: Bucket) -> Exchange:
        run, empty, flat = bucket.backend.run, bucket.backend.empty, bucket.flat
        [residual] = self.state.of(bucket)
        if self.options.corr:  # flat + ratio * residual
            for (param, grad), (_, kept) in zip(bucket.views(flat), bucket.views(residual), strict=True):
                minus_ratio = partial(self._minus_ratio, self.optimizer.name_of(param))
                run("sgd_update", kept, out=(grad,), lr=self.scalar(minus_ratio))
        ends = self._ends_of(bucket)
        packet, scales, bits = self._packet(bucket)
        rest = residual if self.options.corr else empty(flat.shape, bucket.dtype)
        run("abs", flat, out=rest)
        for number, (_, part) in enumerate(bucket.views(rest)):
            run("mean", part.reshape(-1), out=scales[number : number + 1], axes=(0,), keepdims=True)
        run("pack_signs", flat, out=bits)
        work = self.communicator.all_gather(packet, name=bucket.name)
        if self.options.corr:
            run("copy", flat, out=rest)
            run("add_signs", bits, scales, ends, out=rest, factor=-1.0)
            # what is not finite makes the magnitude so, and has been sent
            run("finite_or_zero", rest, out=rest)
        gathered = yield work
        run("fill", out=flat, value=0.0)
        for theirs in gathered:
            run("copy", theirs, out=packet)  # where magnitudes are aligned
            run("add_signs", bits, scales, ends, out=flat, factor=1.0 / self.communicator.size)

    def _packet(self, bucket: Bucket) -> tuple[Array, Array, Array]:
        """Return a message, and its magnitudes and signs."""
        border = len(bucket.params) * bucket.dtype.itemsize
        packet = bucket.backend.empty((border + -(-bucket.flat.size // 8),), "uint8")
        return packet, packet[:border].view(bucket.dtype), packet[border:]

    def _ends_of(self, bucket: Bucket) -> Array:
        """Return where each parameter ends in the flat array of its bucket, int64."""
        if bucket not in self._ends:
            with unrecorded():
                sizes = [param.size() for param in bucket.params]
                self._ends[bucket] = bucket.backend.asarray(np.cumsum(sizes, dtype=np.int64))
        return self._ends[bucket]

    def _minus_ratio(self, name: str, step: StepContext) -> float:
        """Return minus what a parameter's residual is multiplied by, see Note [units]."""
        lr = step.lr
        return -self.param_counters.get(name, lr) / lr if step.options.rescale and lr > 0 else -1.0

    def after_update(self, params: list[Tensor]) -> None:
        if self.options.corr:
            bookkeep(self._note_lr, [self.optimizer.name_of(param) for param in params])

    def _note_lr(self, names: list[str]) -> None:
        lr = self.now().lr
        if lr > 0:  # a step at 0 changes no parameter, and leaves the unit as it is
            self.param_counters.update(dict.fromkeys(names, lr))
