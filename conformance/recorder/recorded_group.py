"""A process group that reports every collective to the recorder and passes it on unchanged.

torch's C++ code (the DDP reducer, functional collectives, compiled graphs) calls a Python subclass of `ProcessGroup`
through torch's trampoline, Python code directly; both call the methods made below, which call the real group. Calls of
C++ code that bypass the trampoline reach the real backend, which is registered with the recorded group, too.
"""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn, Protocol, SupportsIndex

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store
from torch.distributed.distributed_c10d import _world

from conformance.errors import present
from conformance.recorder.flight import Flight
from conformance.recorder.look import Look

#: Methods of `ProcessGroup` -> (torch's public name of the collective, index of the input argument). torch >= 2.12 has
#: new names for some; methods that the installed torch lacks are left out.
_COLLECTIVES: dict[str, tuple[str, int]] = {
    "allreduce": ("all_reduce", 0),
    "allreduce_coalesced": ("all_reduce_coalesced", 0),
    "broadcast": ("broadcast", 0),
    "reduce": ("reduce", 0),
    "allgather": ("all_gather", 1),
    "allgather_coalesced": ("all_gather_coalesced", 1),
    "_allgather_base": ("all_gather_into_tensor", 1),
    "all_gather_single": ("all_gather_into_tensor", 1),
    "allgather_into_tensor_coalesced": ("all_gather_into_tensor_coalesced", 1),
    "all_gather_single_coalesced": ("all_gather_into_tensor_coalesced", 1),
    "gather": ("gather", 1),
    "gather_single": ("gather_single", 1),
    "scatter": ("scatter", 0),
    "reduce_scatter": ("reduce_scatter", 1),
    "_reduce_scatter_base": ("reduce_scatter_tensor", 1),
    "reduce_scatter_single": ("reduce_scatter_tensor", 1),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter_tensor_coalesced", 1),
    "reduce_scatter_single_coalesced": ("reduce_scatter_tensor_coalesced", 1),
    "alltoall": ("all_to_all", 1),
    "alltoall_base": ("all_to_all_single", 1),
    "all_to_all_single": ("all_to_all_single", 1),
    "send": ("send", 0),
    "recv": ("recv", 0),
    "recv_anysource": ("recv", 0),
    "barrier": ("barrier", -1),
    "monitored_barrier": ("monitored_barrier", -1),
}

_DTYPE_NAMES = {
    value: name for name, value in vars(torch).items() if isinstance(value, torch.dtype) and str(value)[6:] == name
}


#: How many of the last works of a group are kept alive. C++ code that got a Work from Python (torch's reducer gets a
#: join context's) holds only its C++ part, whose wait would not return once the Python part is gone. The next drops
#: works that have been waited for, because they keep the subject's tensors alive.
_NUM_KEPT = 64


class CollectiveLog(Protocol):
    """The `Recorder`, to which a recorded group reports; it `looks` at the tensors of collectives if asked to."""

    looks: bool

    def issue(
        self, op: str, group: str, shapes: tuple[tuple[int, ...], ...], dtypes: tuple[str, ...], reduce_op: str = "",
        root: int = -1, members: tuple[int, ...] = (),
    ) -> Flight:  # fmt: skip
        """Record a collective just before it is issued."""

    def calling_backend(self) -> AbstractContextManager[None]:
        """Return a context in which the backend is called: threads that start in it are the backend's."""


class RecordedWork(dist.Work):
    """The real `Work`; it also records waits and its completion.

    `inner` is None if the backend completed the collective before it returned. `flights` are several if they were
    coalesced into one.
    """

    def __init__(self, inner: dist.Work | None, flights: Sequence[Flight], log: CollectiveLog) -> None:
        super().__init__()
        self._inner = inner
        self._log = log
        self._flights = flights
        if inner is None:
            self._land()

    @property
    def has_landed(self) -> bool:
        """Whether all of its collectives have landed."""
        return all(flight.finished for flight in self._flights)

    def _land(self) -> None:
        for flight in self._flights:
            flight.land()

    def wait(self, *args: Any, **kwargs: Any) -> bool:
        with self._log.calling_backend():
            done = True if self._inner is None else self._inner.wait(*args, **kwargs)
        self._land()
        return done

    def synchronize(self) -> None:
        if self._inner is not None:
            self._inner.synchronize()
        self._land()

    def block_current_stream(self) -> None:
        if self._inner is not None:
            self._inner.block_current_stream()
        self._land()

    def is_completed(self) -> bool:
        """Ask the real work; a rank that polls until True has waited."""
        done = self._inner is None or self._inner.is_completed()
        if done:
            self._land()
        return done

    def get_future(self) -> torch.futures.Future[Any]:
        """Return the real future; taking it counts as waiting once it is complete."""
        if self._inner is None:
            future: torch.futures.Future[Any] = torch.futures.Future()
            future.set_result([])
            return future
        with self._log.calling_backend():
            future = self._inner.get_future()
        if any(flight.look is not None for flight in self._flights):
            future = _after_a_look(future, self._flights)
        for flight in self._flights:
            flight.poll = future.done
        return future

    def is_success(self) -> bool:
        """Ask the real work if its class overrides the method, which torch has deprecated."""
        return not self._overrides("is_success") or present(self._inner).is_success()

    def exception(self) -> Any:
        """Ask the real work if its class overrides the method."""
        return present(self._inner).exception() if self._overrides("exception") else None

    def _overrides(self, method: str) -> bool:
        own = getattr(type(self._inner), method, None)
        return own not in (None, getattr(dist.Work, method))

    def result(self) -> list[Tensor]:
        return [] if self._inner is None else self._inner.result()

    def source_rank(self) -> int:
        return present(self._inner).source_rank()


def _after_a_look(future: torch.futures.Future[Any], flights: Sequence[Flight]) -> torch.futures.Future[Any]:
    """Return a future that ends as `future` does, after a look at all `flights`.

    A callback of the returned future may change the result. A callback of `future` that looks would not always run
    first: the backend's thread runs the callbacks that it finds at the end, and the caller runs a later one at once.
    """
    devices = {tensor.device for flight in flights if flight.look is not None for tensor in flight.look.written}
    looked: torch.futures.Future[Any] = torch.futures.Future(devices=[it for it in devices if it.type != "cpu"])

    def look(ended: torch.futures.Future[Any]) -> None:
        for flight in flights:
            flight.land()
        try:
            looked.set_result(ended.value())
        except Exception as error:
            looked.set_exception(error)

    future.add_done_callback(look)
    return looked


class RecordedGroup(dist.ProcessGroup):
    """Reports every collective to a log and delegates it to `inner`."""

    def __init__(self, inner: dist.ProcessGroup, log: CollectiveLog, label: str = "") -> None:
        """Wrap `inner`; without a `label` the history uses the name that torch gives the group."""
        super().__init__(inner.rank(), inner.size())  # type: ignore[call-arg]
        self.inner = inner
        self._log = log
        self._label = label
        self._name = ""
        self._description = ""
        self._members: tuple[int, ...] = ()
        self._coalescing: list[Flight] | None = None
        self._recent: deque[RecordedWork] = deque(maxlen=_NUM_KEPT)
        for device in inner._device_types:
            backend = inner._get_backend(device)
            self._register_backend(device, _backend_type(backend), backend)
            self._set_default_backend(_backend_type(backend))

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Refuse to be copied or pickled, with the message of a real group."""
        raise TypeError("cannot pickle 'torch._C._distributed_c10d.ProcessGroup' object")

    # Methods that torch's C++ code and the properties of the base class call.

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return str(self.inner.name())

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Keep the name that torch gives, here and in the real group."""
        self._name = name
        self._label = self._label or f"group {name}"
        self.inner._set_group_name(name)  # type: ignore[arg-type]

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        self._description = description
        self.inner._set_group_desc(description)

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._description

    def abort(self) -> None:
        self.inner.abort()

    def shutdown(self) -> None:
        self.inner.shutdown()

    def get_group_store(self) -> Store:
        return self.inner.get_group_store()

    def _start_coalescing(self, device_type: torch.device) -> None:
        self._coalescing = []
        self.inner._start_coalescing(device_type)

    def _end_coalescing(self, device_type: torch.device) -> RecordedWork:
        flights, self._coalescing = self._coalescing or [], None
        with self._log.calling_backend():
            work = self.inner._end_coalescing(device_type)
        return self._watched(work, flights)

    def _issue(self, method: str, op: str, position: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        shapes, dtypes = _describe(args, kwargs, position)
        reduce_op, root = _options(op, args, kwargs)
        self._members = self._members or tuple(sorted(_world.pg_group_ranks.get(self, ())))  # once torch knows them
        flight = self._log.issue(op, self._label, shapes, dtypes, reduce_op, root, self._members)
        if self._log.looks:
            flight.look = Look(_argument(args, kwargs, position), _argument(args, kwargs, min(position, 0)))
        with self._log.calling_backend():
            work = getattr(self.inner, method)(*args, **kwargs)
        if self._coalescing is not None:
            self._coalescing.append(flight)
            return work
        return self._watched(work, (flight,))

    def _watched(self, work: Any, flights: Sequence[Flight]) -> RecordedWork:
        watched = RecordedWork(work, flights, self._log)
        if work is not None:
            for flight in flights:
                flight.completed = work.is_completed
        self._recent = deque((one for one in self._recent if not one.has_landed), _NUM_KEPT)
        self._recent.append(watched)
        return watched


def _forward(method: str, op: str, position: int) -> Callable[..., Any]:
    def issue(self: RecordedGroup, *args: Any, **kwargs: Any) -> Any:
        return self._issue(method, op, position, args, kwargs)

    issue.__name__ = method
    issue.__doc__ = f"Record {op} and hand it on."
    _keep_out_of_graphs(issue)
    return issue


def _keep_out_of_graphs(function: Any) -> None:
    """Keep Dynamo from capturing `function` and its callees when C++ code calls it during `torch.compile`.

    `torch.compiler.disable` would, too, but imports all of Dynamo.
    """
    frames = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))


for _method, (_op, _position) in _COLLECTIVES.items():
    if hasattr(dist.ProcessGroup, _method):
        setattr(RecordedGroup, _method, _forward(_method, _op, _position))


def as_process_group(group: Any, store: Store | None = None) -> dist.ProcessGroup:
    """Return `group` if it is a process group, else a process group of torch around this backend."""
    if isinstance(group, dist.ProcessGroup):
        return group
    name = group.name()
    place = (group.rank(), group.size())
    plain = dist.ProcessGroup(*place) if store is None else dist.ProcessGroup(store, *place)  # type: ignore[call-arg]
    plain._set_default_backend(_backend_type(group))
    for device_type in dist.Backend.backend_capability.get(name, ["cpu", "cuda"]):
        plain._register_backend(torch.device(device_type), _backend_type(group), group)
    return plain


def _backend_type(backend: Any) -> dist.ProcessGroup.BackendType:
    return dist.Backend.backend_type_map.get(backend.name(), dist.ProcessGroup.BackendType.CUSTOM)


def _describe(
    args: tuple[Any, ...], kwargs: dict[str, Any], position: int
) -> tuple[tuple[tuple[int, ...], ...], tuple[str, ...]]:
    """Return shapes and dtypes of the argument at `position`: a tensor, or a list of them, or a list of lists."""
    tensors = _argument(args, kwargs, position)
    return tuple([tuple(tensor.shape) for tensor in tensors]), tuple([_DTYPE_NAMES[t.dtype] for t in tensors])


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], position: int) -> list[Tensor]:
    """Return the tensors of the argument at `position`; none of a negative one."""
    if position < 0:
        return []
    return _flatten(args[position] if position < len(args) else list(kwargs.values())[position - len(args)])


def _flatten(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    flat: list[Tensor] = []
    for item in value:
        flat.extend(_flatten(item))
    return flat


def _options(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, int]:
    """Return the name of the reduction and the root (for send and recv: the peer) in a call's arguments."""
    reduce_op, root = "sum" if "reduce" in op else "", -1
    for value in (*args[1:], *kwargs.values()):
        if type(value) is int:
            if root < 0:  # send(tensors, peer, tag): the peer comes first
                root = value
            continue
        option = getattr(value, "reduceOp", value)
        if isinstance(option, dist.ReduceOp | dist.ReduceOp.RedOpType):
            named: Any = getattr(option, "op", option)
            reduce_op = named.name.lower()
        root = getattr(value, "rootRank", root)
    return reduce_op, root
