# SPDX-License-Identifier: Apache-2.0
"""nnabla's communicator: collectives that a script calls by hand, between backward and update.

    comm = communicators.MultiProcessCommunicator()
    comm.init()
    loss.backward()
    comm.all_reduce([p.grad for p in params], division=True)

What lives here: nnabla's names over the process's communicator, and the callback that sums gradients while backward
goes on. What does not: moving data (comm/), packing gradients as they come (sync/buckets.py). docs/nnabla.md says what
differs from nnabla.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from threading import TIMEOUT_MAX

from .autograd import BackwardCallback
from .comm.base import Communicator, ReduceOp
from .comm.rendezvous import process_communicator
from .comm.work import Work
from .device import Device
from .dtypes import LARGEST_FLOAT32, is_narrow
from .errors import (
    CommError,
    DeviceError,
    DTypeError,
    GraphError,
    OptionError,
    ShapeError,
    check_bool,
    check_choice,
    check_int,
    check_ints,
    check_number,
)
from .sync.agree import text_of_names
from .sync.arrays import (
    GivenArray,
    RawOrTensor,
    RawOrTensors,
    as_list,
    change_arrays,
    check_division,
    given_arrays,
    one_a_rank,
)
from .sync.base import StepContext
from .sync.buckets import Bucket, BucketedSync, Exchange
from .tensor import Tensor
from .tensor.core import check_parameter

__all__ = [
    "Comm",
    "DataParallelCommunicator",
    "Dist",
    "MultiProcessCommunicator",
    "MultiProcessDataParalellCommunicator",
    "MultiProcessDataParallelCommunicator",
]

WORLD = "world"  # the group of all ranks
MAX_NAMES = 1000  # characters of parameters' names in a collective's; of longer ones a hash
Registered = tuple[Device | None, Mapping[str, Tensor]]


class _Copies:
    """Copies of a model in this process, whose gradients are summed.

    Args:
        device: where this process computes; None is what its Tensors say. Accepted for nnabla's scripts.
    """

    def __init__(self, device: Device | None = None) -> None:
        _check_device(type(self).__name__, device)
        self.device = device
        self._copies: list[dict[str, Tensor]] = []

    @property
    def name(self) -> str:
        """The name of the class."""
        return type(self).__name__

    def add_context_and_parameters(self, ctx_param_dict: Registered) -> None:
        """Register a copy of the model of this process: (Device or None, {name: parameter}).

        Raises:
            OptionError: no such pair, other names than those of the copies before, or a parameter twice.
            DTypeError, ShapeError, DeviceError: a parameter that is not one, or is not like that of the copies before.
        """
        where = f"{type(self).__name__}: add_context_and_parameters"
        if not isinstance(ctx_param_dict, tuple) or len(ctx_param_dict) != 2:
            raise OptionError(
                f"{where}: expected (device or None, {{name: parameter}}), got {ctx_param_dict!r}"
            )
        device, params = ctx_param_dict
        _check_device(where, device)
        if not isinstance(params, Mapping) or not params:
            raise OptionError(
                f"{where}: expected parameters by name, such as model.get_params(), got {params!r}"
            )
        for name, param in params.items():
            check_parameter(f"{where}: {name}", param)
        first = self._copies[0] if self._copies else params
        if first.keys() != params.keys():
            raise OptionError(f"{where}: a copy has {list(params)} but the first one {list(first)}")
        registered = {id(param) for copy in self._copies for param in copy.values()}
        for name, param in params.items():
            if id(param) in registered:
                raise OptionError(
                    f"{where}: {name} is registered already, in this copy or one before; call "
                    "clear_context_parameters() first"
                )
            registered.add(id(param))
            if param.shape != first[name].shape or param.dtype != first[name].dtype:
                raise ShapeError(f"{where}: {name} is {param!r} but in the first copy {first[name]!r}")
            if param.device is not first[name].device:
                raise DeviceError(
                    f"{where}: {name} is on {param.device} but in the first copy on {first[name].device}; "
                    "start one rank per GPU"
                )
        self._copies.append(dict(params))

    def clear_context_parameters(self) -> None:
        """Forget all copies."""
        self._copies.clear()

    def _sum_copies(self) -> dict[str, Tensor]:
        """Return the sums over the copies in the order of names: the first copy's gradients, or new ones in float32.

        Those are for 16 bits, which are rounded once, in ``_spread``.
        """
        if not self._copies:
            raise OptionError(
                f"{type(self).__name__}: allreduce needs add_context_and_parameters((device, params)) first"
            )
        names = sorted(self._copies[0], key=str)  # processes may have registered them in other orders
        grads = {name: [_grad_to_change(name, copy[name]) for copy in self._copies] for name in names}
        totals = {}
        for name, (first, *others) in grads.items():
            is_rounded = bool(others) and is_narrow(first.dtype)
            total = first.as_type("float32") if is_rounded else first
            for other in others:
                total += other.as_type("float32") if is_rounded else other
            totals[name] = total
        return totals

    def _spread(self, totals: Mapping[str, Tensor], division: bool) -> None:
        """Divide the totals by the number of copies if told to, and give them to all copies."""
        for name, total in totals.items():
            if division and len(self._copies) > 1:
                total /= len(self._copies)
            for copy in self._copies:
                if (grad := _grad(copy[name])) is not total:
                    grad.copy_data(total.as_type(grad.dtype))


class DataParallelCommunicator(_Copies):
    """Sums the gradients of several copies of a model in this process; needs no world and no ``init``."""

    rank = 0
    local_rank = 0

    @property
    def size(self) -> int:
        """Number of registered copies."""
        return len(self._copies)

    def init(self) -> None:
        """Do nothing: there is no world to join."""

    def allreduce(self, division: bool = False, inplace: bool = False) -> None:
        """Replace the gradients of all copies by their sum, divided by the number of copies with ``division``.

        ``inplace`` is accepted: nothing is packed.
        """
        check_bool("allreduce", "division", division)
        self._spread(self._sum_copies(), division)


class MultiProcessDataParallelCommunicator(_Copies):
    """Collectives among the processes of a job, one a device, on Tensors, numpy and CUDA arrays.

    ``init`` joins the world the process was started in (`singa-lite run`, mpiexec, srun), or a world of one. Results
    are always in the arrays that were given; every rank must make the same calls. ``inplace=False`` sends the arrays of
    a dtype as one message, ``inplace=True`` each by itself; both give the same bits. A ``group`` is "world" or a name
    that ``new_group`` was given; to name another, or one without this rank, is an OptionError.
    """

    def __init__(self, device: Device | None = None) -> None:
        super().__init__(device)
        self._world: Communicator | None = None
        # by name: ranks of the world, and the communicator where this rank is one of them
        self._groups: dict[str, tuple[list[int], Communicator | None]] = {}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._world or 'init() was not called'!s})"

    def init(self, timeout_s: float | None = None) -> None:
        """Join the world of this process; a second call does nothing.

        Args:
            timeout_s: seconds a collective waits for its peers; None is 300, or SINGA_LITE_TIMEOUT_S. The first that
                joins decides for the process.

        Raises:
            CommError: no world can be made, or a rank has not joined in time.
        """
        if timeout_s is not None:
            check_number(f"{type(self).__name__}: init", "timeout_s", timeout_s, 1e-3, TIMEOUT_MAX)
        if self._world is None:
            self._world = process_communicator(timeout_s=timeout_s)
            self._groups[WORLD] = list(range(self._world.size)), self._world

    # ---- what it is ----------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The name of the class."""
        self._joined("name")
        return super().name

    @property
    def size(self) -> int:
        """Number of processes."""
        return self._joined("size").size

    @property
    def rank(self) -> int:
        """The number of this process, 0 <= rank < size."""
        return self._joined("rank").rank

    @property
    def local_rank(self) -> int:
        """The number of processes of lower rank on this host: what ``device.create_device`` takes."""
        return self._joined("local_rank").local_rank

    # ---- groups --------------------------------------------------------------------------------------

    def new_group(self, name_ranks: tuple[str, Sequence[int]]) -> str:
        """Make a group of some ranks and return its name; every rank must call it alike.

        Args:
            name_ranks: the name, and ranks of the world as a list or an array. Sums run in the order given.

        Raises:
            OptionError: no such pair, the name is taken, a rank is out of range or there twice.
            CommError: another rank gave another name or other ranks.
        """
        world, where = self._joined("new_group"), "new_group"
        if not isinstance(name_ranks, (tuple, list)) or len(name_ranks) != 2:
            raise OptionError(f"{where}: expected (name, ranks), got {name_ranks!r}")
        name, ranks = name_ranks[0], check_ints(where, "ranks", name_ranks[1], 0)
        if not isinstance(name, str) or not name:
            raise OptionError(f"{where}: the name must be text, not {name!r}")
        if name in self._groups:
            raise OptionError(
                f"{where}: there is a group {name!r} of ranks {self._groups[name][0]}; take another name"
            )
        self._groups[name] = ranks, world.new_group(ranks, name=name)  # which checks the ranks
        return name

    def list_groups(self) -> dict[str, list[int]]:
        """Return the ranks of every group by its name."""
        self._joined("list_groups")
        return {name: list(ranks) for name, (ranks, _) in self._groups.items()}

    def find_group(self, group: str) -> list[int]:
        """Return the ranks of a group; an empty list if there is none of that name."""
        return self.list_groups().get(group, []) if isinstance(group, str) else []

    # ---- collectives ---------------------------------------------------------------------------------

    def all_reduce(
        self, data: RawOrTensors, division: bool = False, inplace: bool = False, group: str = WORLD
    ) -> None:
        """Replace the values by their sum over the ranks, with ``division`` by their mean.

        Args:
            data: a Tensor or raw array, or a list of them, of any shapes and dtypes; each counts once.
            division: divide by the number of ranks; floats only.
            inplace, group: see the class.

        Raises:
            DTypeError, ShapeError, GraphError: something that is not an array, overlaps another, is not contiguous or
                read-only, or was made by a recorded operator; nothing was sent.
            CommError: a peer is gone, late or disagrees.
        """
        communicator = self._member("all_reduce", group)
        start = partial(communicator.all_reduce, op=_op(division))
        _change(communicator, start, "all_reduce", data, inplace, division)

    def reduce(
        self, data: RawOrTensors, dst: int, division: bool = False, inplace: bool = False, group: str = WORLD
    ) -> None:
        """Reduce as ``all_reduce`` does, to rank ``dst`` of the world alone; the other ranks' values stay."""
        communicator, op = self._member("reduce", group), _op(division)
        start = partial(communicator.reduce, op=op, root=self._root("reduce", "dst", dst, group))
        _change(communicator, start, "reduce", data, inplace, division)

    def bcast(self, data: RawOrTensors, src: int, inplace: bool = False, group: str = WORLD) -> None:
        """Replace the values by those of rank ``src``, a rank of the world in the group."""
        communicator = self._member("bcast", group)
        start = partial(communicator.broadcast, root=self._root("bcast", "src", src, group))
        _change(communicator, start, "bcast", data, inplace)

    def all_gather(
        self, ndarray: RawOrTensor, ndarray_list: Sequence[RawOrTensor], group: str = WORLD
    ) -> None:
        """Copy the ``ndarray`` of each rank to the entry of ``ndarray_list`` for that rank.

        Args:
            ndarray: of one size and dtype on all ranks.
            ndarray_list: an array of that size and dtype for each rank of the group, in its order.
            group: see the class.
        """
        communicator = self._member("all_gather", group)
        source = GivenArray.of("all_gather", ndarray, writes=False)
        targets = one_a_rank("all_gather", ndarray_list, source, communicator.size)
        source.backend.activate()
        with _aborting(communicator, "communicators.all_gather"):
            rows = communicator.all_gather(source.array, name="communicators.all_gather").wait()
            assert rows is not None
            for row, target in zip(rows, targets, strict=True):
                source.backend.run("copy", row.reshape(target.array.shape), out=target.array)

    def reduce_scatter(
        self,
        ndarray_list: Sequence[RawOrTensor],
        ndarray: RawOrTensor,
        division: bool = False,
        group: str = WORLD,
    ) -> None:
        """Set ``ndarray`` to the sum over the ranks of the entry of ``ndarray_list`` for this rank.

        Args:
            ndarray_list: an array for each rank of the group, in its order, of the size and dtype of ``ndarray``.
            ndarray: where the result goes.
            division: divide by the number of ranks; floats only.
            group: see the class.
        """
        communicator, op = self._member("reduce_scatter", group), _op(division)
        target = GivenArray.of("reduce_scatter", ndarray)
        sources = one_a_rank("reduce_scatter", ndarray_list, target, communicator.size, writes=False)
        check_division("reduce_scatter", [target], division)
        rows = target.backend.empty((communicator.size, target.array.size), target.array.dtype)
        target.backend.run("pack", *(source.array for source in sources), out=rows.reshape(-1))
        target.backend.activate()
        with _aborting(communicator, "communicators.reduce_scatter"):
            result = communicator.reduce_scatter(rows, op, name="communicators.reduce_scatter").wait()
            assert result is not None
            target.backend.run("copy", result.reshape(target.array.shape), out=target.array)

    def barrier(self, group: str = WORLD) -> None:
        """Return once every rank of the group has called it."""
        communicator = self._member("barrier", group)
        with _aborting(communicator, "communicators.barrier"):
            communicator.barrier(name="communicators.barrier")

    def abort(self, reason: str = "abort() was called") -> None:
        """Leave the world and all groups because of an error; peers that wait for this rank raise CommError at once."""
        self._joined("abort")
        for _, communicator in self._groups.values():
            if communicator is not None:
                communicator.abort(str(reason))

    def allreduce(self, division: bool = False, inplace: bool = False) -> None:
        """Replace the gradients of all registered copies by their sum over copies and ranks; deprecated in nnabla.

        Those of this process are summed first. ``division`` divides by the number of copies times that of ranks.

        Raises:
            OptionError: no copy is registered. DTypeError, GraphError: a gradient that cannot be changed.
            CommError: other ranks have other numbers of copies, or other names.
        """
        communicator = self._joined("allreduce")
        check_bool("allreduce", "division", division)
        check_bool("allreduce", "inplace", inplace)
        totals, count = self._sum_copies(), len(self._copies)
        # compared over the ranks, as which gradients are added up is a matter of names
        names = f"of {', '.join(map(repr, totals))}"
        if len(names) > MAX_NAMES:
            names = text_of_names(totals)
        name = f"communicators.allreduce of {count} {'copy' if count == 1 else 'copies'} {names}"
        start = partial(communicator.all_reduce, op=_op(division))
        _change(communicator, start, "all_reduce", list(totals.values()), inplace, division, name)
        self._spread(totals, division)

    def all_reduce_callback(
        self,
        data: RawOrTensors,
        pack_size: int,
        division: bool = False,
        group: str = WORLD,
        scale_grad: float = 1,
        keep_dtype: bool = False,
    ) -> BackwardCallback:
        """Return a callback for ``Tensor.backward`` that does ``all_reduce(data)`` while backward goes on.

        The bits are those of ``g *= scale_grad`` for each gradient and ``all_reduce`` after backward. A gradient of
        ``data`` that a backward does not reach is summed as it is, after the others.

        Args:
            data: gradients, such as ``[p.grad for p in params.values()]``.
            pack_size: elements, >= 1; gradients are joined until a message has so many, which changes no result.
            division, group: as in ``all_reduce``.
            scale_grad: what each gradient is multiplied by first.
            keep_dtype: accepted; arrays always keep their dtype.

        Raises:
            OptionError: an argument out of range, or parameters in ``data`` instead of their gradients.
            DTypeError: ``division`` or ``scale_grad`` with arrays that are not floats.
            GraphError: in backward, after some sums: a parameter has changed its dtype since and has another gradient.
        """
        communicator, op = self._member("all_reduce_callback", group), _op(division)
        pack_size = check_int("all_reduce_callback", "pack_size", pack_size, 1)
        check_number("all_reduce_callback", "scale_grad", scale_grad, -LARGEST_FLOAT32, LARGEST_FLOAT32)
        data = as_list(data)
        for value in data:
            if isinstance(value, Tensor) and value.stores_grad:
                raise OptionError(
                    f"all_reduce_callback: data has the parameter {value!r}; give gradients, "
                    "such as [p.grad for p in params]"
                )
        arrays = given_arrays("all_reduce_callback", data, division)
        if scale_grad != 1 and any(each.array.dtype.kind != "f" for each in arrays):
            raise DTypeError("all_reduce_callback: scale_grad needs gradients of floats")
        return _AllReduceCallback(_Sums(communicator, pack_size, op), arrays, scale_grad)

    # ---- for the calls above -------------------------------------------------------------------------

    def _joined(self, where: str) -> Communicator:
        if self._world is None:
            raise CommError(
                f"{type(self).__name__}.{where}: call init() first, which joins the world of this process"
            )
        return self._world

    def _member(self, where: str, group: str) -> Communicator:
        """Return the communicator of a group that this rank is in."""
        world = self._joined(where)
        check_choice(where, "group", group, self._groups)
        ranks, communicator = self._groups[group]
        if communicator is None:
            raise OptionError(f"{where}: rank {world.rank} is not in group {group!r} of ranks {ranks}")
        return communicator

    def _root(self, where: str, name: str, rank: object, group: str) -> int:
        """Return the number within a group of a rank of the world."""
        number, ranks = check_int(where, name, rank, 0), self._groups[group][0]
        if number not in ranks:
            raise OptionError(f"{where}: {name} = {number} is not in group {group!r} of ranks {ranks}")
        return ranks.index(number)


MultiProcessCommunicator = MultiProcessDataParallelCommunicator
MultiProcessDataParalellCommunicator = MultiProcessDataParallelCommunicator  # nnabla has this spelling too
Comm = MultiProcessDataParallelCommunicator
Dist = MultiProcessDataParallelCommunicator


class _Sums(BucketedSync):
    """Sums or means of gradients in messages of at least ``pack_size`` elements, but for the last."""

    is_recordable = True
    is_selective = True  # messages are limited by their elements, and have no gaps
    changes_one_rank = False

    def __init__(self, communicator: Communicator, pack_size: int, op: ReduceOp) -> None:
        super().__init__(communicator, pack_size - 1, 0, None)  # no optimizer: nothing asks it for names
        self._op = op
        self.labels: dict[Tensor, str] = {}  # of gradients, equal on all ranks

    def names_of(self, params: list[Tensor]) -> str:
        return ", ".join(self.labels[param] for param in params)

    def exchange(self, bucket: Bucket) -> Exchange:
        yield self.communicator.all_reduce(bucket.flat, self._op, name=bucket.name)


class _AllReduceCallback(BackwardCallback):
    """See ``all_reduce_callback``; gradients, multiplied by ``scale``, stand where a scheme has parameters."""

    def __init__(self, sums: _Sums, arrays: list[GivenArray], scale: float) -> None:
        self._sums, self._scale = sums, scale
        self._changed_gradients = [array.tensor for array in arrays]
        # not sent yet: by the id of the array, number and gradient
        self._open: dict[int, tuple[int, Tensor]] = {}

    def begin(self) -> None:
        self._sums.begin(StepContext(self._sums.Options(), 0, self._sums.optimizer))
        self._open = {id(grad.array): (number, grad) for number, grad in enumerate(self._changed_gradients)}

    def add_gradient(self, param: Tensor) -> None:
        number, grad = self._open.pop(id(_grad(param).array), (0, None))
        if grad is None:
            return
        with _aborting(self._sums.communicator, "all_reduce_callback"):
            self._send(grad, f"{param.name or 'gradient'}#{number}")

    def finish(self) -> None:
        with _aborting(self._sums.communicator, "all_reduce_callback"):
            self._finish()

    def _finish(self) -> None:
        for number, grad in list(self._open.values()):
            if grad._is_old_grad:
                raise GraphError(
                    f"all_reduce_callback: the parameter of gradient {number} has changed its shape, dtype or device "
                    "since, and so has another gradient; make another callback"
                )
            self._send(grad, f"gradient#{number}")
        self._open = {}
        for grad, total in self._sums.finish():
            if total is not grad:
                grad.device.backend.run("copy", total.array, out=grad.array)

    def _send(self, grad: Tensor, label: str) -> None:
        if self._scale != 1:
            grad *= self._scale
        self._sums.labels.setdefault(grad, label)
        self._sums.add_gradient(grad, grad)


def _change(
    communicator: Communicator,
    start: Callable[..., Work],
    where: str,
    data: RawOrTensors,
    inplace: bool,
    division: bool = False,
    name: str = "",
) -> None:
    """Change ``data`` by the collective that ``start`` starts; ``name``: what the ranks compare, "" is ``where``."""
    name = name or f"communicators.{where}"
    given = given_arrays(where, data, division)
    with _aborting(communicator, name):
        change_arrays(start, name, given, inplace)


@contextmanager
def _aborting(communicator: Communicator, where: str) -> Iterator[None]:
    """Inside, KeyboardInterrupt or SystemExit aborts ``communicator``: other ranks get sums that this one does not."""
    try:
        yield
    except Exception:
        raise
    except BaseException as error:
        if not communicator.is_alone:
            communicator.abort(f"{where} was ended by {type(error).__name__}")
        raise


def _op(division: bool) -> ReduceOp:
    return "mean" if check_bool("communicators", "division", division) else "sum"


def _check_device(where: str, device: object) -> None:
    if device is not None and not isinstance(device, Device):
        raise DeviceError(
            f"{where}: {device!r} is not a Device; give device.create_device(local_rank), or None for what the "
            "arrays say"
        )


def _grad_to_change(name: str, param: Tensor) -> Tensor:
    check_parameter(f"allreduce: {name}", param)
    grad = _grad(param)
    grad.begin_change(f"allreduce: the gradient of {name}")
    return grad


def _grad(param: Tensor) -> Tensor:
    assert param.grad is not None
    return param.grad
