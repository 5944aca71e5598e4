# SPDX-License-Identifier: Apache-2.0
"""A store whose values are on servers: the worker's side of it.

What lives here: which message goes to which server, and waiting for answers. What does not: what a server does with it
(server.py, where Note [messages] is), the checks of a call (arguments.py, store.py).
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import numpy as np

from ..comm.base import Communicator
from ..comm.p2p import Message, MessageTraffic, Messenger, SendWork
from ..comm.work import Work
from ..errors import CheckpointError, CommError, OptionError
from ..graph.recorder import break_graph
from ..tensor import Tensor
from .calls import Array, Key, Pull, Push, PushOptions, Spec, States
from .compression import Compression
from .sharding import Part, Sharding
from .store import KVStore
from .stored import Description

BIG_ARRAY = 65_536  # elements; a smaller array is one message to one server
NOTE_S = 1.0  # after so many seconds a worker reports to a server that it waits
EXPLAIN_S = 2.0  # seconds for an answer that needs no other worker


class Request(Work):
    """Messages on their way to servers, and the answers that are to come.

    Args:
        store: whose it is.
        name: the call and its keys, for errors.
        number: that of its messages.
        targets: server -> where the arrays of its answer go; None makes new ones.
        finish: called once, when all answers are there.
    """

    def __init__(
        self,
        store: DistStore,
        name: str,
        number: int,
        targets: Mapping[int, list[Array] | None],
        finish: Callable[[], None] = lambda: None,
    ) -> None:
        self.name, self.number = name, number
        self.sends: list[SendWork] = []
        self.answers: dict[int, tuple[Any, list[Array]]] = {}  # server -> content and arrays
        self._store, self._targets, self._finish = store, targets, finish
        self._failure: Exception | None = None
        self._started = time.monotonic()

    @property
    def waits_for(self) -> list[int]:
        """The servers that have not answered."""
        return [server for server in self._targets if server not in self.answers]

    def take(self, server: int, message: Message) -> None:
        """Read the answer of a server."""
        kind, _, content = message.header
        if kind == "error":
            self._failure = (OptionError if content[0] == "OptionError" else CheckpointError)(content[1])
        self.answers[server] = content, message.read(into=self._targets[server] if kind == "values" else None)
        if not self.waits_for and self._failure is None:
            self._finish()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until the arrays of the call may be touched, and what was pulled is there.

        Raises:
            CommError: a server is gone, or has not answered in time, naming it and the keys; or another thread is in a
                call of the store.
        """
        with self._store._one_thread(self.name):
            try:
                for send in self.sends:
                    with self._store.naming(self):
                        send.wait(timeout_s)
                while self.waits_for and not isinstance(self._failure, CommError):
                    self._store.receive_answer(self, timeout_s)
            except CommError as error:
                if timeout_s is None:  # else it may be called again
                    self._fail(error)
                raise
        if self._failure is not None:
            raise self._failure

    def _fail(self, error: CommError) -> None:
        self._failure = error
        self._store.abort(str(error))

    def done(self) -> bool:
        """Return whether wait() would return at once, or raise, as it does after the time-out; takes what has come."""
        with self._store._one_thread(self.name):
            if self._failure is not None or self._store.has_ended(self):
                return True
            if time.monotonic() - self._started < self._store.timeout_s:
                return False
            self._fail(self._store.late_error(self))
        return True


class DistStore(KVStore):
    """Values kept by the servers of a job, in parts; see ``Sharding``. Arrays are those of the host or of a GPU.

    Args:
        name, communicator: see ``KVStore``.
        messenger: joins this worker with the servers.
        staleness: how many pushes of a key a worker may be ahead of the slowest, with "dist_async"; None: any number.
        big_array: elements from which a key is cut into parts.
    """

    def __init__(
        self,
        name: str,
        communicator: Communicator,
        messenger: Messenger,
        staleness: int | None = None,
        big_array: int = BIG_ARRAY,
    ) -> None:
        super().__init__(name, communicator)
        self._messenger = messenger
        self._is_async = "async" in name
        self._sharding = Sharding(messenger.job.num_servers, big_array)
        self._parts: dict[Key, list[Part]] = {}
        self._requests: dict[int, Request] = {}  # without all answers
        self._num_requests = 0
        self._gone: dict[int, str] = {}  # server -> why it has left
        self._is_closed = False
        join = {"is_async": self._is_async, "staleness": staleness}
        self._together("create", {**join, "big_array": big_array}, lambda: self._command("join", join))

    @property
    def num_servers(self) -> int:
        return self._messenger.job.num_servers

    @property
    def timeout_s(self) -> float:
        """Seconds after which an answer is late."""
        return self._messenger.timeout_s

    @property
    def traffic(self) -> MessageTraffic:
        break_graph("it uses a key-value store")
        return self._messenger.traffic

    def server_stats(self) -> list[dict[str, Any]]:
        with self._one_thread("server_stats"):
            request = self._ask_all("stats")
        return [request.answers[server][0] for server in range(self.num_servers)]

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def close(self) -> None:
        if self._is_closed:
            return
        with self.aborting("close"):  # servers that are left would wait for this worker
            self._is_closed = True
            for request in list(self._requests.values()):
                request.wait()
            self._ask_all("close")
        self._messenger.close()

    def leave(self) -> None:
        """Close the store, unless it is broken: what broke it was raised, and its peers have the reason."""
        if not self._failure:
            self.close()

    def abort(self, reason: str) -> None:
        super().abort(reason)
        self._messenger.abort(reason)

    # ---- what KVStore asks for -----------------------------------------------------------------------

    def _init(self, specs: list[Spec], values: list[Tensor]) -> None:
        for spec in specs:
            self._parts[spec.key] = self._sharding.place(spec)
        self._spread_values("init", specs, values)

    def _overwrite(self, specs: list[Spec], values: list[Tensor]) -> None:
        self._spread_values("overwrite", specs, values)

    def _spread_values(self, verb: str, specs: list[Spec], values: list[Tensor]) -> None:
        """Send the values of worker 0 to the servers."""
        if self.rank == 0:
            pieces: list[tuple[Any, Part, Array]] = []
            for spec, value in zip(specs, values, strict=True):
                pieces += [(spec.key, part, piece) for part, piece in self._pieces(spec, on_host(value))]
            self._spread(verb, pieces)

    def _spread(self, verb: str, pieces: list[tuple[Any, Part, Array]]) -> None:
        """Send every server a list of names and the arrays of its parts, of (name, part, array)."""
        names: dict[int, list[Any]] = {server: [] for server in range(self.num_servers)}
        arrays: dict[int, list[Array]] = {server: [] for server in names}
        for name, part, piece in pieces:
            names[part.server].append(name)
            arrays[part.server].append(piece)
        self._ask(verb, names, arrays)

    def _set_optimizer(self, description: Description) -> None:
        self._command("set_optimizer", dict(description))

    def _set_lr(self, lr: float) -> None:
        self._command("set_lr", lr)

    def _set_compression(self, compression: Compression) -> None:
        self._command("set_compression", vars(compression))

    def _command(self, verb: str, content: Any) -> None:
        """Send a call of worker 0 to all servers."""
        if self.rank == 0:
            self._ask_all(verb, content)

    def _flush(self, call: str) -> None:
        self._ask_all("flush", call)

    def _end_call(self) -> None:
        with suppress(CommError):  # it is the next call's to raise
            self._note("goes on", range(self.num_servers))

    def _get_states(self) -> States:
        """Return the states of whole keys on worker 0, {} on others."""
        if self.rank != 0:
            return {}
        request = self._ask_all("get_states")
        found: dict[tuple[Key, str], list[Array]] = {}
        for server in range(self.num_servers):
            names, arrays = request.answers[server]
            for (key, name), array in zip(names, arrays, strict=True):
                found.setdefault((key, name), []).append(array)
        states: States = {key: {} for key in self._parts}
        for (key, name), arrays in found.items():
            is_cut = len(arrays) > 1 and arrays[0].ndim == 1  # a part's number of steps is that of the key
            shape = self._arguments.specs[key].shape
            states[key][name] = np.concatenate(arrays).reshape(shape) if is_cut else arrays[0]
        return states

    def _set_states(self, states: States) -> None:
        if self.rank != 0:
            return
        pieces: list[tuple[Any, Part, Array]] = []
        for key, each in states.items():
            spec = self._arguments.specs[key]
            for name, array in each.items():
                is_cut = array.shape == spec.shape
                own = self._pieces(spec, array) if is_cut else [(part, array) for part in self._parts[key]]
                pieces += [([key, name], part, np.asarray(piece, order="C")) for part, piece in own]
        self._spread("set_states", pieces)

    def _exchange(self, what: str, pushes: list[Push], pulls: list[Pull], options: PushOptions) -> Work:
        if pushes and self._is_async and self._optimizer is None:
            raise OptionError(
                f"{self.type}: {what}: set_optimizer() comes first; without one there is no update"
            )
        contents: dict[int, dict[str, Any]] = defaultdict(
            lambda: {"push": [], "left_out": [], "pull": [], "options": vars(options)}
        )
        arrays: dict[int, list[Array]] = defaultdict(list)
        targets: dict[int, list[Array]] = defaultdict(list)
        pushed, lost = self._pushed(what, pushes)
        for spec, part, piece in pushed:
            contents[part.server]["push"].append(spec.key)
            if piece is None:
                contents[part.server]["left_out"].append(spec.key)
            else:
                arrays[part.server].append(piece)
        staging = [(pull, _host_array(pull.outs[0])) for pull in pulls]
        for pull, array in staging:
            for part, piece in self._pieces(pull.spec, array):
                contents[part.server]["pull"].append(pull.spec.key)
                targets[part.server].append(piece)

        keys = [push.spec.key for push in pushes] or [pull.spec.key for pull in pulls]
        request = self._send(
            f"{what} of {_shown(keys)}", "exchange", contents, arrays, targets, partial(_give, staging)
        )
        self._residuals.update(lost)
        return request

    def _pushed(
        self, what: str, pushes: list[Push]
    ) -> tuple[list[tuple[Spec, Part, Array | None]], dict[Key, Array]]:
        """Return each part of what is pushed, as it travels, and what compression then loses of each key."""
        lost: dict[Key, Array] = {}
        pieces: dict[Key, list[Any]] = {
            push.spec.key: [piece for _, piece in self._pieces(push.spec, on_host(push.value))]
            for push in pushes
            if push.value is not None
        }
        if self._compression is not None:
            pieces, lost = self._residuals.encode(f"{self.type}: {what}", self._compression, pieces)
        pushed: list[tuple[Spec, Part, Array | None]] = []
        for push in pushes:
            parts = self._parts[push.spec.key]
            travels = pieces.get(push.spec.key, [None] * len(parts))
            pushed += [(push.spec, part, piece) for part, piece in zip(parts, travels, strict=True)]
        return pushed, lost

    def _pieces(self, spec: Spec, array: Array) -> list[tuple[Part, Array]]:
        """Return the parts of a key, each with its elements of an array: all of it, or a flat slice."""
        parts = self._parts[spec.key]
        if len(parts) == 1:
            return [(parts[0], array)]
        flat = array.reshape(-1)
        return [(part, flat[part.start : part.stop]) for part in parts]

    # ---- messages ------------------------------------------------------------------------------------

    def _ask_all(self, verb: str, content: Any = None) -> Request:
        """Send all servers one message and wait for the answers."""
        return self._ask(verb, dict.fromkeys(range(self.num_servers), content), {})

    def _ask(self, verb: str, contents: dict[int, Any], arrays: dict[int, list[Array]]) -> Request:
        """Send every server a message and wait for the answers."""
        request = self._send(verb, verb, contents, arrays, dict.fromkeys(contents))
        request.wait()
        return request

    def _send(
        self,
        name: str,
        verb: str,
        contents: Mapping[int, Any],
        arrays: Mapping[int, list[Array]],
        targets: Mapping[int, list[Array] | None],
        finish: Callable[[], None] = lambda: None,
    ) -> Request:
        number = self._num_requests
        request = Request(self, name, number, targets, finish)
        headers = {server: [verb, number, content] for server, content in contents.items()}
        # a header that is too long is an error before the first has been sent
        for server, header in headers.items():
            self._messenger._head_of(header, arrays.get(server, []))
        self._num_requests += 1
        if targets:
            self._requests[number] = request
        with self.naming(request):
            for server, header in headers.items():
                to = self.num_workers + server
                request.sends.append(self._messenger.send(to, header, arrays.get(server, ())))
        return request

    @contextmanager
    def naming(self, request: Request) -> Iterator[None]:
        """Add the call and its keys to a CommError."""
        try:
            yield
        except CommError as error:
            raise CommError(f"{self.type}: {request.name}: {error}") from None

    def _gone_error(self, request: Request, server: int) -> CommError:
        return CommError(f"{self.type}: {self._messenger.name}: {request.name}: {self._gone[server]}")

    def late_error(self, request: Request) -> CommError:
        """Return the error of a request that has no answer within the time-out."""
        return CommError(
            f"{self.type}: {request.name}: {self._messenger.name}: not answered within {self.timeout_s:g} s"
            f"{self._what_servers_wait_for(request)}"
        )

    def receive_answer(self, request: Request, timeout_s: float | None) -> None:
        """Take the next answer, of whichever request it is; raise if ``request`` cannot have one any more."""
        for server in request.waits_for:
            if server in self._gone:
                raise self._gone_error(request, server)
        limit_s = self._messenger.timeout_s if timeout_s is None else timeout_s
        with self.naming(request):
            try:
                message = self._receive(request, limit_s)
            except CommError as error:
                raise CommError(f"{error}{self._what_servers_wait_for(request)}") from None
        self._handle(request, message)

    def has_ended(self, request: Request) -> bool:
        """Take the answers that have come; return whether a request needs no more, or can have none."""
        try:
            while request.waits_for and not self._gone.keys() & set(request.waits_for):
                self._handle(request, self._messenger.receive(0))
        except CommError:  # nothing has come, or a server has gone
            if not self._gone.keys() & set(request.waits_for):
                return False
        return all(send.done() for send in request.sends)

    def _receive(self, request: Request, limit_s: float) -> Message:
        """Return the next message; after a while report to the servers that this worker waits for ``request``."""
        if limit_s <= NOTE_S:
            return self._messenger.receive(limit_s)
        try:
            return self._messenger.receive(NOTE_S)
        except CommError:  # late, which is not an error yet; or all have gone, which the next call says again
            self._note("waits", request.waits_for, request.number)
        return self._messenger.receive(limit_s)

    def _note(self, what: str, servers: Iterable[int], request: int | None = None) -> None:
        """Report to the servers what this worker does, see ``Server._note``."""
        for server in servers:
            if server not in self._gone:
                self._messenger.send(self.num_workers + server, ["note", request, what])

    def _handle(self, request: Request, message: Message) -> None:
        server = message.source - self.num_workers
        if message.header is None:
            if self._is_closed and server not in request.waits_for:
                return  # it has answered close() and ended, since all workers have closed
            self._gone[server] = message.reason
            raise self._gone_error(request, server)
        number = message.header[1]
        answered = self._requests[number]
        with self.naming(answered):
            answered.take(server, message)
        if not answered.waits_for:
            del self._requests[number]

    def _what_servers_wait_for(self, request: Request) -> str:
        """Return which workers' pushes a request that is late needs, as the servers say, and which say nothing."""
        servers = request.waits_for
        try:
            asked = self._send(
                "explain", "explain", dict.fromkeys(servers, request.number), {}, dict.fromkeys(servers)
            )
        except CommError:
            return ""
        with suppress(CommError):
            while asked.waits_for:
                self._handle(asked, self._messenger.receive(EXPLAIN_S))
        texts = [asked.answers[server][0] for server in servers if server in asked.answers]
        texts += [f"server {server} says nothing" for server in asked.waits_for if server not in self._gone]
        return "".join(f"; {text}" for text in texts if text)


def on_host(value: Tensor) -> Array:
    """Return a Tensor's own memory, or a copy, in page-locked memory, of what is on a GPU."""
    array, backend = value.array, value.device.backend
    if isinstance(array, np.ndarray):
        return array
    return backend.to_numpy(array, out=backend.host_array(value.shape, value.dtype))


def _host_array(out: Tensor) -> Array:
    """Return where a pulled value is read to: the Tensor's own memory, or a new array for one on a GPU."""
    array = out.array
    return array if isinstance(array, np.ndarray) else out.device.backend.host_array(out.shape, out.dtype)


def _give(pulled: list[tuple[Pull, Array]]) -> None:
    """Copy pulled values to those Tensors that they were not read into."""
    for pull, array in pulled:
        for out in pull.outs:
            if out.array is not array:
                backend = out.device.backend
                source = array if isinstance(out.array, np.ndarray) else backend.asarray(array)
                backend.run("copy", source, out=out.array)


def _shown(keys: list[Key]) -> str:
    """Return the first keys as text."""
    more = f" and {len(keys) - 3} more keys" if len(keys) > 3 else ""
    return ", ".join(map(repr, keys[:3])) + more
