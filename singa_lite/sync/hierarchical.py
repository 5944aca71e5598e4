# SPDX-License-Identifier: Apache-2.0
"""hierarchical: gradients are averaged within each host, then another scheme runs among one leader of each host.

Note [weights]: a host of n ranks gives the outer scheme its mean times n * hosts / ranks, so that the outer scheme's
mean over the hosts is the mean over the ranks, also where hosts are unequal.
Note [order]: the ranks of a host make the same calls of the inner communicator, in one order: a reduce for each
bucket as it fills, and when the outer scheme has ended a broadcast for each. Only leaders run the outer scheme, which
gets gradients while later ones are computed and may do what it likes with them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..comm.base import Communicator
from ..comm.work import Traffic, uncounted
from ..errors import CheckpointError, CommError, OptionError
from ..graph.recorder import bookkeep, unrecorded
from ..tensor import Tensor
from .base import Scheme, StepContext, scale_in_place
from .buckets import Bucket, BucketedSync, Exchange, Soon
from .step_groups import StepGroups
from .text import read_dist_option


class Hierarchical(BucketedSync):
    """Plain averaging within each host and ``outer`` between hosts, with the leaders' residuals alone."""

    names = ("hierarchical",)
    is_recordable = True
    wraps_another = True

    @dataclass(frozen=True)
    class Options:
        """Options of hierarchical.

        Attributes:
            outer: the dist_option between hosts, with its options as text: "fp32", "sparseTopK:0.01". One that averages
                parameters, keeps velocities or takes the optimizer's momentum over is an OptionError.
        """

        outer: str = "fp32"

        def __post_init__(self) -> None:
            if problem := _problem_of(*read_dist_option(self.outer)):
                raise OptionError(
                    f"hierarchical: outer = {self.outer!r}: {problem}; use one that sends gradients alone, such as "
                    "fp16 or sparseTopK"
                )

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._inner: Communicator | None = None
        self._outer: Scheme | None = None  # on a leader
        self._kind: type[BucketedSync] | None = None  # of the outer scheme, on all ranks
        self._text = ""  # of the outer scheme, at the first step
        self._weight = 1.0  # see Note [weights]
        self._ready: list[Bucket] = []  # of this step, averaged within the host
        self._num_fed = 0  # of them, that the outer scheme has
        self.inside, self.between = Traffic(), Traffic()
        self._loaded: tuple[str, dict[str, np.ndarray], dict[Tensor, str]] | None = None

    def begin(self, step: StepContext, read: Callable[[], StepContext] | None = None) -> None:
        super().begin(step, read)
        if self._inner is None:
            with unrecorded(), uncounted(self.communicator):
                self._join_hosts(step.options.outer)
        if read_dist_option(step.options.outer).scheme is not self._kind:
            raise OptionError(
                f"hierarchical: outer = {step.options.outer!r}, but it began with {self._text!r}; make another DistOpt"
            )
        assert self._inner is not None
        self._inner.wait_all()
        self._ready, self._num_fed = [], 0
        now = read or (lambda: step)
        if self._outer is not None:
            self._outer.begin(_outer_step(step), lambda: _outer_step(now()))

    def follow(self, read: Callable[[], StepContext]) -> None:
        super().follow(read)
        if self._outer is not None:
            self._outer.follow(lambda: _outer_step(read()))

    def _join_hosts(self, text: str) -> None:
        """Make both communicators and, on a leader, the outer scheme; all ranks call it at their first step."""
        inner, between = self.communicator.split_by_host(name="hierarchical")
        kind = read_dist_option(text).scheme
        assert issubclass(kind, BucketedSync)  # or Options had raised
        failure, has_states = "", self._loaded is not None and bool(self._loaded[1])
        if between is not None:
            self._outer = kind.make(between, self.threshold, self.bucket_bytes, self.optimizer)
        if self._loaded is not None:
            failure = self._restore(*self._loaded)
        mine = [failure, 0 if between is None else inner.size, has_states]
        failures, sizes, having = zip(
            *self.communicator.all_gather_object(mine, name="hierarchical hosts"), strict=True
        )
        for rank, (problem, size, has) in enumerate(zip(failures, sizes, having, strict=True)):
            if size and any(having) and not has:
                problem = (
                    "it leads a host and has none, so the ranks were on other hosts when they were saved"
                )
            if problem:
                raise CommError(f"hierarchical: rank {rank} cannot go on from its states: {problem}")
        num_hosts = sum(size > 0 for size in sizes)
        self._weight = inner.size * num_hosts / self.communicator.size
        self._inner, self._loaded = inner, None
        self._kind, self._text = kind, text
        self.groups = StepGroups(self.communicator, [each for each in (inner, between) if each is not None])

    def check(self, bucket: Bucket) -> None:
        assert self._kind is not None
        self._kind.check_dtype(bucket.key, bucket.dtype)

    def add_gradient(self, param: Tensor, grad: Tensor) -> None:
        super().add_gradient(param, grad)
        self._feed()

    def exchange(self, bucket: Bucket) -> Exchange:
        assert self._inner is not None
        yield Soon(self._inner.reduce(bucket.flat, "mean", 0, name=bucket.name))
        if self._outer is not None and self._weight != 1.0:
            scale_in_place(bucket.backend, bucket.flat, self._weight)
        self._ready.append(bucket)

    def _feed(self) -> None:
        """Give the outer scheme what was averaged within the host."""
        if self._outer is not None:
            for bucket in self._ready[self._num_fed :]:
                for pair in bucket.grads:
                    self._outer.add_gradient(*pair)
        self._num_fed = len(self._ready)

    def finish(self) -> Iterator[tuple[Tensor, Tensor]]:
        assert self._inner is not None
        list(super().finish())
        self._feed()
        if self._outer is not None:
            results = dict(self._outer.finish())
            for bucket in self._ready:
                _put(bucket, results)
        for bucket in self._ready:
            bucket.backend.activate()
        works = [self._inner.broadcast(bucket.flat, 0, name=bucket.name) for bucket in self._ready]
        for bucket, work in zip(self._ready, works, strict=True):
            work.wait()
            yield from bucket.grads

    def after_update(self, params: list[Tensor]) -> None:
        if self._outer is not None:
            self._outer.end(params)
        bookkeep(self._count)

    def _count(self) -> None:
        """Count what both communicators have sent as this scheme's."""
        assert self.groups is not None
        self.inside, self.between = [*self.groups.count(), Traffic()][:2]

    def graph_key(self) -> Hashable:
        return None if self._outer is None else self._outer.graph_key()

    def step_key(self, step: StepContext) -> Hashable:
        return None if self._outer is None else self._outer.step_key(_outer_step(step))

    def state_dict(self, names: dict[Tensor, str]) -> dict[str, np.ndarray]:
        if self._outer is None:
            name, states, _ = self._loaded or ("", {}, {})
        else:
            name, states = self._outer.names[0], self._outer.state_dict(names)
        return {f"{name}/{key}": value for key, value in states.items()}

    def check_states(self, states: dict[str, np.ndarray], names: dict[Tensor, str]) -> None:
        super().check_states(states, names)
        name = next(iter(states), "").partition("/")[0]
        if self._inner is not None and states and (problem := self._mismatch(name)):
            raise CheckpointError(f"hierarchical: {problem}")

    def load_state_dict(self, states: dict[str, np.ndarray], names: dict[Tensor, str]) -> None:
        kinds = {key.partition("/")[0] for key in states}
        own = {key.partition("/")[2]: value for key, value in states.items()}
        name = kinds.pop() if kinds else ""
        if kinds:
            raise CheckpointError(f"hierarchical: states of several outer schemes, {sorted([name, *kinds])}")
        if name:
            kind = read_dist_option(name).scheme
            kind(self.communicator, self.threshold, self.bucket_bytes, self.optimizer).load_state_dict(
                own, names
            )
        if self._inner is None:
            self._loaded = (name, own, names)
        elif failure := self._restore(name, own, names):
            raise CheckpointError(f"hierarchical: {failure}")

    def _restore(self, name: str, states: dict[str, np.ndarray], names: dict[Tensor, str]) -> str:
        """Load the states of the outer scheme; return why that cannot be, or ""."""
        problem = self._mismatch(name) if states else ""
        if self._outer is not None and not problem:
            self._outer.load_state_dict(states, names)
        return problem

    def _mismatch(self, name: str) -> str:
        """Return why the outer scheme cannot go on from states of the scheme ``name``, or ""."""
        if self._outer is None:
            return f"they are those of a host's leader ({name}), which it is not"
        own = self._outer.names[0]
        return "" if name == own else f"they are of {name}, but the outer scheme is {own}"


def _problem_of(scheme: type[Scheme], options: dict[str, Any]) -> str:
    """Return why a scheme cannot run between hosts, or ""."""
    name = scheme.names[0]
    if not issubclass(scheme, BucketedSync) or issubclass(scheme, Hierarchical):
        return f"{name} sends no gradients of its own"
    if not scheme.keeps_equal:
        return f"{name} averages parameters, which members of a host would not get"
    if scheme.takes_momentum(scheme.Options(**options)):
        return f"{name} takes the optimizer's momentum over, which members of a host would apply again"
    if scheme.keeps_velocity:
        return f"{name} keeps velocities, with any options, which a later step by another scheme would lose"
    return ""


def _outer_step(step: StepContext) -> StepContext:
    """Return a step as the outer scheme knows it."""
    scheme, options = read_dist_option(step.options.outer)
    return replace(step, options=scheme.Options(**options))


def _put(bucket: Bucket, results: dict[Tensor, Tensor]) -> None:
    """Write the outer scheme's gradients into the bucket, unless they are there."""
    grads = [results[param] for param in bucket.params]
    if any(result is not grad for result, (_, grad) in zip(grads, bucket.grads, strict=True)):
        arrays = (grad.array for grad in grads)
        bucket.backend.run("pack", *arrays, out=bucket.flat, alignment=bucket.alignment)
