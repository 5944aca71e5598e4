# SPDX-License-Identifier: Apache-2.0
"""fp32: every gradient travels in its own dtype and is averaged."""

from __future__ import annotations

from collections.abc import Generator, Iterator

from ..comm.base import Communicator, Work
from ..tensor import Tensor
from .base import Bucket, BucketedSync, StepOptions


class Fp32(BucketedSync):
    """Plain averaging: N ranks of batch B take the step of one rank of batch N*B."""

    names = ("fp32", "plain")

    def __init__(self, communicator: Communicator, threshold: int, bucket_bytes: int) -> None:
        super().__init__(communicator, threshold, bucket_bytes)
        self._alone: list[tuple[Tensor, Tensor]] = []  # of one rank, whose gradients are the means

    def begin(self, options: StepOptions) -> None:
        super().begin(options)
        self._alone = []

    def push(self, param: Tensor, grad: Tensor) -> None:
        if not self.communicator.is_alone:
            super().push(param, grad)
        else:
            self.bytes_payload += grad.memsize()
            self._alone.append((param, grad))

    def finish(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from self._alone
        yield from super().finish()

    def exchange(self, bucket: Bucket) -> Generator[Work, None, None]:
        yield self.send(self.communicator.all_reduce(bucket.flat, "mean", name=bucket.name))
