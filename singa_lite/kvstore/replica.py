# SPDX-License-Identifier: Apache-2.0
"""A store without servers: every worker keeps all values and updates them by the same sums.

What lives here: the stores of one process, and of the workers of a job, whose sums are all-reduces on their
communicator. What does not: servers (dist.py, server.py).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..comm.base import Communicator
from ..comm.local import LocalCommunicator
from ..comm.p2p import MessageTraffic
from ..comm.work import FinishedWork, Work
from ..device import Device
from ..errors import DeviceError, OptionError
from ..graph.recorder import break_graph
from ..tensor import Tensor, to_numpy
from .calls import Key, Pull, Push, PushOptions, Spec, States
from .compression import Compression
from .residuals import add_decoded
from .store import KVStore
from .stored import Description, StoredArray, Updater, make_optimizer
from .sums import SumMemory

Flags = np.ndarray[Any, np.dtype[np.bool_]]
UNCOMPRESSED = ("local", "local_update_cpu", "local_allreduce_cpu", "nccl")
LOCAL_NAMES = (*UNCOMPRESSED, "device", "local_allreduce_device")
MEMORY_FACTOR = 2  # of the values' elements, for sums: each key in a list of all and in one of its own


class ReplicaStore(KVStore):
    """Values kept by every worker of ``communicator``; a push is an all-reduce, so all workers push the same keys.

    CUDA arrays travel by NCCL. float16 is summed in float32. A store of one process has a communicator of that alone.
    """

    def __init__(self, name: str, communicator: Communicator) -> None:
        super().__init__(name, communicator)
        self._stored: dict[Key, StoredArray] = {}
        self._traffic = MessageTraffic()
        self._updater: Updater | None = None
        self._memory: dict[tuple[Key, ...], SumMemory] = {}  # of keys that are pushed together

    @property
    def traffic(self) -> MessageTraffic:
        break_graph("it uses a key-value store")
        self._traffic.wait_s = self._communicator.traffic.wait_s
        return self._traffic

    def abort(self, reason: str) -> None:
        if self.num_workers > 1:
            super().abort(reason)

    def set_updater(self, updater: Updater) -> None:
        """Set ``updater(key, pushed, stored)``, which changes the stored Tensor in place, instead of an optimizer.

        The memory of ``pushed`` is that of the next sum: copy what is to outlive the call.
        """
        if not isinstance(self._communicator, LocalCommunicator) or self.type not in LOCAL_NAMES:
            super().set_updater(updater)
        if not callable(updater):
            raise OptionError(f"{self.type}: set_updater: expected a function, got {updater!r}")
        self._updater = updater
        self._optimizer = None
        self._memory.clear()  # values without an optimizer live in them
        for stored in self._stored.values():
            stored.updater = updater

    _set_updater = set_updater

    # ---- what KVStore asks for -----------------------------------------------------------------------

    def _init(self, specs: list[Spec], values: list[Tensor]) -> None:
        for spec, value in zip(specs, values, strict=True):
            stored = StoredArray(spec.key, value.clone())
            self._copy_of_worker_0(stored.param)
            if self._optimizer is not None:
                stored.set_optimizer(self._optimizer, self._lr)
            stored.updater = self._updater
            self._stored[spec.key] = stored

    def _overwrite(self, specs: list[Spec], values: list[Tensor]) -> None:
        # workers may give them in other orders
        for spec, value in sorted(zip(specs, values, strict=True), key=lambda pair: str(pair[0].key)):
            param = self._stored[spec.key].param
            param.copy_data(value)
            self._copy_of_worker_0(param)

    def _copy_of_worker_0(self, param: Tensor) -> None:
        param.device.backend.activate()
        self._communicator.broadcast(param.array, 0, name=f"kvstore.init({param.name})").wait()

    def _set_optimizer(self, description: Description) -> None:
        make_optimizer(description)
        self._updater = None
        self._memory.clear()  # values without an optimizer live in them
        for stored in self._stored.values():
            stored.set_optimizer(description)

    def _set_lr(self, lr: float) -> None:
        for stored in self._stored.values():
            stored.set_lr(lr)

    def _set_compression(self, compression: Compression) -> None:
        if self.type in UNCOMPRESSED:
            raise OptionError(f"{self.type}: set_gradient_compression is for the stores device and dist")

    def _get_states(self) -> States:
        stored = self._stored if self.rank == 0 else {}
        return {key: each.get_states() for key, each in stored.items()}

    def _set_states(self, states: States) -> None:
        for key, arrays in self.broadcast_states(states).items():
            self._stored[key].set_states(arrays)

    def _exchange(self, what: str, pushes: list[Push], pulls: list[Pull], options: PushOptions) -> Work:
        groups: dict[tuple[Device, np.dtype[Any]], list[Push]] = {}
        for push in pushes:
            device = self._stored[push.spec.key].param.device
            if push.value is not None and push.value.device is not device:
                raise DeviceError(
                    f"{self.type}: {what}: key {push.spec.key!r} is on {device}, its value on {push.value.device}"
                )
            groups.setdefault((device, push.spec.dtype), []).append(push)
        for (device, _), group in groups.items():
            self._push(group, device, options)
        for pull in pulls:
            param = self._stored[pull.spec.key].param
            for out in pull.outs:
                if out.device is param.device:
                    param.device.backend.run("copy", param.array, out=out.array)
                else:
                    out.copy_data(param)
        return FinishedWork()

    # ---- one sum -------------------------------------------------------------------------------------

    def _push(self, pushes: list[Push], device: Device, options: PushOptions) -> None:
        """Sum pushes of one device and dtype over the workers and apply the sums."""
        device.backend.activate()
        name = _name_of(pushes, options)
        has_value = self._gather_has_value(pushes, options, name)
        if self._compression is None:
            parts = self._all_reduce(pushes, device, options, name)
        else:
            parts = self._gather_codes(pushes, device, options, has_value, name)
        with self.applying("push"):
            for number, (push, part) in enumerate(zip(pushes, parts, strict=True)):
                if has_value is None or has_value[:, number].any():
                    self._stored[push.spec.key].apply(part)

    def _gather_has_value(self, pushes: list[Push], options: PushOptions, name: str) -> Flags | None:
        """Return whether each worker has a value for each key, shape (workers, keys); None: all have."""
        if not options.allow_none:
            return None
        mine = np.array([push.value is not None for push in pushes])
        every = self._communicator.all_gather(mine.astype(np.int32), name=f"{name}, given").wait()
        assert every is not None
        return every.reshape(self.num_workers, -1) != 0

    def _all_reduce(self, pushes: list[Push], device: Device, options: PushOptions, name: str) -> list[Any]:
        """Return for each push the sum of all workers' values, scaled, or their mean; float16 is summed in float32."""
        memory = self._memory_of(pushes, device, options)
        works = [
            self._communicator.all_reduce(source, "sum", out=None if source is part else part, name=name)
            for source, part in memory.fill(pushes, options.scale)
        ]
        for work in works:
            self._count(work)
            work.wait()
        if options.mean and self.num_workers > 1:
            memory.flat /= self.num_workers
        return memory.parts_as(pushes[0].spec.dtype)

    def _memory_of(self, pushes: list[Push], device: Device, options: PushOptions) -> SumMemory:
        """Return memory for a sum; that of the same keys again, whose values the sum replaces if they are there."""
        # a key that all leave out keeps its value, and the next list of keys is another
        if options.allow_none:
            return SumMemory(pushes, device)
        keys = tuple([push.spec.key for push in pushes])
        if keys not in self._memory:
            self._memory[keys] = SumMemory(pushes, device)
            most = MEMORY_FACTOR * sum(each.param.size() for each in self._stored.values())
            while sum(memory.flat.size() for memory in self._memory.values()) > most:
                del self._memory[next(iter(self._memory))]
        return self._memory[keys]

    def _gather_codes(
        self,
        pushes: list[Push],
        device: Device,
        options: PushOptions,
        has_value: Flags | None,
        name: str,
    ) -> list[Any]:
        """Return for each push the sum of what all workers' codes stand for, each with its worker's scale."""
        assert self._compression is not None
        given = {push.spec.key: [to_numpy(push.value)] for push in pushes if push.value is not None}
        codes, lost = self._residuals.encode(f"{self.type}: push", self._compression, given)
        self._residuals.update(lost)
        sizes = [self._compression.code_size(push.spec.size) for push in pushes]
        mine = [
            codes.get(push.spec.key, [np.zeros(size, np.int32)])[0]
            for push, size in zip(pushes, sizes, strict=True)
        ]
        work = self._communicator.all_gather(np.concatenate(mine), name=name)
        self._count(work)
        every = work.wait()
        scales = self._communicator.all_gather(np.array([options.scale]), name=f"{name}, scale").wait()
        assert every is not None and scales is not None
        totals = [np.zeros(push.spec.size, np.float32) for push in pushes]
        for worker, row in enumerate(every.reshape(self.num_workers, -1)):
            theirs = np.split(row, np.cumsum(sizes)[:-1])
            for number, (total, code) in enumerate(zip(totals, theirs, strict=True)):
                if has_value is None or has_value[worker, number]:
                    add_decoded(self._compression, code, float(scales.flat[worker]), total)
        for total in totals if options.mean else ():
            total /= self.num_workers
        return [
            device.backend.asarray(total.reshape(push.spec.shape))
            for total, push in zip(totals, pushes, strict=True)
        ]

    def _count(self, work: Work) -> None:
        self._traffic.bytes_sent += work.bytes_payload
        self._traffic.bytes_received += work.bytes_payload


def _name_of(pushes: list[Push], options: PushOptions) -> str:
    """Return the name of a sum, with all keys: the communicator compares it, and shows where it differs."""
    keys = ", ".join([repr(push.spec.key) for push in pushes])
    shown = "".join(f", {name}=True" for name, value in options.as_json().items() if value)
    return f"kvstore.push({keys}{shown})"
