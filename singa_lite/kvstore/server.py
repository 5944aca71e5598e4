# SPDX-License-Identifier: Apache-2.0
"""A server: it keeps its parts of the keys, adds up what workers push, updates, and answers pulls.

What lives here: the server's side of a message. What does not: the workers' (dist.py), one value (stored.py).

Note [messages]: a worker's header is [verb, request, content]; ``request`` is a number that the answer repeats:
["values", request, content], with arrays, or ["error", request, [class, text]]. "exchange", push and pull in one, comes
from every worker and is answered if it pulls. What changes the store comes from worker 0 alone, after all workers have
compared it and have had an answer to "flush", so after all that they had pushed.
Note [rounds]: what workers push of a part waits in a queue for each worker until every one has an entry; these are a
round. With ``is_async`` each push is a round of its own. A pull waits for the rounds of what its worker pushed before.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ..comm.p2p import Message, Messenger, SendWork
from ..device import get_default_device
from ..errors import CheckpointError, CommError, OptionError
from ..tensor import Tensor
from .calls import Array, Key, PushOptions, States, difference
from .compression import Compression
from .residuals import add_decoded
from .stored import Description, StoredArray, make_optimizer
from .waits import Waits

Answer = tuple[Any, Sequence[Array]] | None  # content and arrays; None: of nothing


class Contribution(NamedTuple):
    """The contribution of one worker to a part: values, codes, or None if it leaves the key out."""

    array: Array | None
    options: PushOptions


class ServerPart:
    """The elements of a key that this server keeps.

    Attributes:
        stored: their value and optimizer.
        queues: for each worker its pushes that wait for those of the others.
        num_pushes: how many have come from each worker.
        num_rounds: how many sums were applied.
    """

    def __init__(self, key: Key, value: Array, num_workers: int) -> None:
        self.stored = StoredArray(key, Tensor.wrap(value, get_default_device()))
        self.queues: list[deque[Contribution]] = [deque() for _ in range(num_workers)]
        self.num_pushes = [0] * num_workers
        self.num_rounds = 0
        self._answers: list[SendWork] = []  # on their way, from the value's memory
        self._spare: list[Array] = []  # memory for what is pushed

    @property
    def key(self) -> Key:
        return self.stored.key

    @property
    def value(self) -> Array:
        array: Array = self.stored.param.array
        return array

    def new_array(self, compression: Compression | None) -> Array:
        """Return an array to read a push into."""
        if compression is not None:
            return np.empty(compression.code_size(self.value.size), np.int32)
        return self._spare.pop() if self._spare else np.empty_like(self.value)

    def note_answer(self, answer: SendWork) -> None:
        """Remember that the value's memory is read until ``answer`` has been sent."""
        self._answers = [other for other in self._answers if not other.done()] + [answer]

    def apply(self, contributions: list[Contribution], compression: Compression | None, divisor: int) -> None:
        """Update the value by a round; nothing if all workers leave the key out."""
        self.num_rounds += 1
        given = [(each.array, each.options.scale) for each in contributions if each.array is not None]
        if not given:
            return
        total = self._sum(given, compression)
        if contributions[0].options.mean and divisor > 1:
            total /= divisor
        if any(not answer.done() for answer in self._answers):
            self.stored.param.array = self.value.copy()
        self._answers.clear()
        self.stored.apply(total.astype(self.value.dtype, copy=False))
        self._spare += [array for array, _ in given if array is not self.value and compression is None]
        del self._spare[len(self.queues) :]

    def _sum(self, given: list[tuple[Array, float]], compression: Compression | None) -> Array:
        """Return the sum of arrays, or of what codes stand for, each times its scale; float16 in float32."""
        if compression is not None:
            flat = np.zeros(self.value.size, np.float32)
            for codes, scale in given:
                add_decoded(compression, codes, scale, flat)
            return flat.reshape(self.value.shape)
        total: Array | None = None
        for array, scale in given:
            values = array.astype(np.float32) if array.dtype == np.float16 else array
            if scale != 1:
                values *= scale
            total = values if total is None else np.add(total, values, out=total)
        assert total is not None
        return total


class PendingPull(NamedTuple):
    """A pull that waits.

    Attributes:
        worker: whose it is.
        request: its number.
        parts: what is pulled, each with how many pushes of it the worker had made before.
    """

    worker: int
    request: int
    parts: list[tuple[ServerPart, int]]


class Server:
    """The server process of a job: sums pushes and answers pulls until all workers have closed.

    Args:
        messenger: joins it with the workers.
    """

    def __init__(self, messenger: Messenger) -> None:
        self._messenger = messenger
        self._num_workers = messenger.job.num_workers
        self._parts: dict[Key, ServerPart] = {}
        self._pulls: list[PendingPull] = []
        self._left: set[int] = set()
        self._last_answers: list[SendWork] = []
        self._optimizer: Description | None = None
        self._lr: float | None = None  # set after the optimizer
        self._compression: Compression | None = None
        self._is_async = False
        self._staleness: int | None = None
        self._waits = Waits(self._num_workers)

    def serve(self) -> None:
        """Answer messages until all workers have closed.

        Raises:
            CommError: a worker died, failed, or disagrees with another; naming it and the key.
        """
        with np.errstate(all="ignore"):  # infinite sums are the workers' to notice
            while len(self._left) < self._num_workers:
                self._handle(self._messenger.receive(math.inf))
        for answer in self._last_answers:
            answer.wait()

    def _handle(self, message: Message) -> None:
        if message.header is None:
            if message.source not in self._left:
                raise self._error(message.reason)
            return
        verb, request, content = message.header
        self._waits.forget(message.source)
        if verb == "exchange":
            self._exchange(message.source, request, content, message)
        elif verb == "note":
            self._note(message.source, request, content)
        else:
            try:
                answer, arrays = getattr(self, f"_do_{verb}")(content, message) or (None, ())
                work = self._messenger.send(message.source, ["values", request, answer], arrays)
                if verb == "close":
                    self._last_answers.append(work)
            except (OptionError, CheckpointError) as error:
                text = f"{self._messenger.name}: {error}"
                self._messenger.send(message.source, ["error", request, [type(error).__name__, text]])
        self._pulls = [pull for pull in self._pulls if not self._answer(pull)]
        self._check_waits()

    def _error(self, text: str) -> CommError:
        return CommError(f"{self._messenger.name}: {text}")

    # ---- push and pull -------------------------------------------------------------------------------

    def _exchange(self, worker: int, request: int, content: dict[str, Any], message: Message) -> None:
        """Take in what a worker pushes, and note what it pulls."""
        pushed = [self._parts[key] for key in content["push"]]
        options = PushOptions(**content["options"])
        left_out = set(content["left_out"])
        arrays = [None if part.key in left_out else part.new_array(self._compression) for part in pushed]
        message.read(into=[array for array in arrays if array is not None])
        for part, array in zip(pushed, arrays, strict=True):
            part.num_pushes[worker] += 1
            part.queues[worker].append(Contribution(array, options))
            self._check_counts(part)
            self._apply_rounds(part, worker)
        if content["pull"]:
            pulled = [self._parts[key] for key in content["pull"]]
            counted = [(part, part.num_pushes[worker]) for part in pulled]
            self._pulls.append(PendingPull(worker, request, counted))

    def _apply_rounds(self, part: ServerPart, worker: int) -> None:
        queues = [part.queues[worker]] if self._is_async else part.queues
        while all(queues):
            contributions = [queue.popleft() for queue in queues]
            first = contributions[0].options.as_json()
            for number, each in enumerate(contributions):
                if each.options.as_json() != first:
                    text = difference(f"push of {part.key!r}", first, 0, each.options.as_json(), number)
                    raise self._error(text)
            part.apply(contributions, self._compression, len(queues))

    def _answer(self, pull: PendingPull) -> bool:
        """Answer a pull if its values are ready; return whether they were."""
        if not all(self._is_ready(part, count) for part, count in pull.parts):
            return False
        values = [part.value for part, _ in pull.parts]
        answer = self._messenger.send(pull.worker, ["values", pull.request, None], values)
        for part, _ in pull.parts:
            part.note_answer(answer)
        self._waits.forget(pull.worker)
        return True

    def _is_ready(self, part: ServerPart, count: int) -> bool:
        """Return whether the value is what a pull after ``count`` pushes of its worker may see."""
        if not self._is_async:
            return part.num_rounds >= count
        if self._staleness is None:
            return True
        others = [part.num_pushes[worker] for worker in range(self._num_workers) if worker not in self._left]
        return count - min(others, default=count) <= self._staleness

    def _late_workers(self, part: ServerPart, count: int) -> list[int]:
        """Return the workers that must push a part before a pull after ``count`` pushes of it is answered."""
        if self._is_ready(part, count):
            return []
        least = count - (self._staleness or 0)
        return [
            worker
            for worker, number in enumerate(part.num_pushes)
            if number < least and worker not in self._left
        ]

    def _note(self, worker: int, request: int | None, what: str) -> None:
        """Note that a worker has waited for an answer for a while ("waits"), or has ended a call of all ("goes on")."""
        if what == "goes on":
            self._waits.end_call(worker)
        elif request is not None:
            self._waits.pulling[worker] = request

    def _check_waits(self) -> None:
        """Raise if workers wait for each other."""
        if not self._waits.pulling:
            return
        # a worker with another pull that is late may go on before that is answered
        pulls = {
            pull.worker: pull for pull in self._pulls if self._waits.pulling.get(pull.worker) == pull.request
        }
        needs = {
            worker: {late for part, count in pull.parts for late in self._late_workers(part, count)}
            for worker, pull in pulls.items()
        }
        for worker in self._waits.endless(needs, self._left):
            text = self._what_it_waits_for(pulls[worker])
            calls = [f"worker {other} is in {call}" for other, call in sorted(self._waits.calls.items())]
            others = [f"worker {other} waits too" for other in sorted(needs.keys() - {worker})]
            raise self._error(
                f"worker {worker} can never go on: it {text}, and {', '.join([*calls, *others])}; all workers must "
                "push the same keys and make the same calls"
            )

    def _check_counts(self, part: ServerPart) -> None:
        """Raise if a worker has left that would have to push a part once more."""
        if self._is_async:
            return
        most = max(part.num_pushes)
        for worker in self._left:
            if part.num_pushes[worker] < most:
                other = part.num_pushes.index(most)
                raise self._error(
                    f"worker {worker} has left after {part.num_pushes[worker]} pushes of {part.key!r}, but worker "
                    f"{other} has pushed it {most} times; all workers must push a key equally often"
                )

    # ---- the other verbs: each method returns content and arrays of its answer, None for an empty one --------

    def _do_join(self, content: dict[str, Any], message: Message) -> None:
        self._is_async, self._staleness = content["is_async"], content["staleness"]

    def _do_flush(self, call: str, message: Message) -> None:
        """Answer, behind all that the worker has pushed, which is now in ``call``, a call of all workers."""
        self._waits.begin_call(message.source, call)

    def _do_init(self, keys: list[Key], message: Message) -> None:
        for key, value in zip(keys, message.read(), strict=True):
            part = ServerPart(key, value, self._num_workers)
            if self._optimizer is not None:
                part.stored.set_optimizer(self._optimizer, self._lr)
            self._parts[key] = part

    def _do_overwrite(self, keys: list[Key], message: Message) -> None:
        for key, value in zip(keys, message.read(), strict=True):
            self._parts[key].stored.param.array = value

    def _do_set_optimizer(self, description: Description, message: Message) -> None:
        make_optimizer(description)  # which may raise, before anything has changed
        for part in self._parts.values():
            part.stored.set_optimizer(description)
        self._optimizer, self._lr = description, None

    def _do_set_lr(self, lr: float, message: Message) -> None:
        for part in self._parts.values():
            part.stored.set_lr(lr)
        self._lr = lr

    def _do_set_compression(self, params: dict[str, Any], message: Message) -> None:
        self._compression = Compression.of(params)

    def _do_get_states(self, content: None, message: Message) -> Answer:
        """Answer with the names [key, state] and the arrays of all states."""
        states = [
            (part.key, name, np.asarray(array, order="C"))
            for part in self._parts.values()
            for name, array in part.stored.get_states().items()
        ]
        return [[key, name] for key, name, _ in states], [array for *_, array in states]

    def _do_set_states(self, names: list[list[Any]], message: Message) -> None:
        states: States = {}
        for (key, name), array in zip(names, message.read(), strict=True):
            states.setdefault(key, {})[name] = array
        for key, arrays in states.items():
            self._parts[key].stored.set_states(arrays)

    def _do_explain(self, number: int, message: Message) -> Answer:
        """Answer with what a pull waits for, "" if it does not."""
        for pull in self._pulls:
            if (pull.worker, pull.request) == (message.source, number):
                return f"{self._messenger.name} {self._what_it_waits_for(pull)}", ()
        return "", ()

    def _what_it_waits_for(self, pull: PendingPull) -> str:
        """Return whose pushes a pull waits for, as text."""
        for part, count in pull.parts:
            if late := self._late_workers(part, count):
                counts = ", ".join(f"worker {worker} ({part.num_pushes[worker]} so far)" for worker in late)
                return f"waits for pushes of {part.key!r} by {counts}"
        return "waits for nothing"

    def _do_stats(self, content: None, message: Message) -> Answer:
        traffic = self._messenger.traffic
        return {
            "keys": len(self._parts),
            "elements": sum(part.value.size for part in self._parts.values()),
            "rounds": sum(part.num_rounds for part in self._parts.values()),
            "bytes_in": traffic.bytes_received,
            "bytes_out": traffic.bytes_sent,
            "idle_s": traffic.wait_s,
        }, ()

    def _do_close(self, content: None, message: Message) -> None:
        self._left.add(message.source)
        for part in self._parts.values():
            self._check_counts(part)
