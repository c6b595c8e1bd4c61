"""A c10d process group of the simulated device: gloo moves the bytes, the device's streams order their arrival.

As in NCCL, a collective runs on the group's own stream, which first waits for the current stream; `wait` makes the
current stream wait, not the host; a future is complete at once, and its user waits on its stream. The kernels of this
device run at once, so the host waits for other ranks when something is ordered after a collective.
"""

import itertools
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

_Nested = Any

#: Methods of `ProcessGroup` -> positions of the outputs and the inputs in their arguments; -1: none.
_METHODS: dict[str, tuple[int, int]] = {
    "allreduce": (0, 0),
    "allreduce_coalesced": (0, 0),
    "broadcast": (0, 0),
    "reduce": (0, 0),
    "allgather": (0, 1),
    "_allgather_base": (0, 1),
    "allgather_into_tensor_coalesced": (0, 1),
    "gather": (0, 1),
    "scatter": (0, 1),
    "reduce_scatter": (0, 1),
    "_reduce_scatter_base": (0, 1),
    "reduce_scatter_tensor_coalesced": (0, 1),
    "alltoall": (0, 1),
    "alltoall_base": (0, 1),
    "send": (-1, 0),
    "recv": (0, -1),
}
#: Methods that join or split flat tensors.
_FLAT = ("_allgather_base", "_reduce_scatter_base")
#: Methods that torch's backends lack, and the method for each part.
_PARTS = {
    "allgather_into_tensor_coalesced": "_allgather_base",
    "reduce_scatter_tensor_coalesced": "_reduce_scatter_base",
}
#: New names in torch 2.12.
_ALIASES = {
    "all_gather_single": "_allgather_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "all_to_all_single": "alltoall_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
}


_NOTHING: deque[Any] = deque()


class _SimWork(dist.Work):
    """A collective that has been launched on `stream`."""

    def __init__(
        self, stream: torch.Stream | None, outputs: list[Tensor], inners: Sequence[Any] = (),
        before: deque[Any] = _NOTHING, tell_host: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """Record an event on `stream`; without a stream there is nothing to wait for.

        `inners` are gloo's works, and `before` the unfinished works of the stream, in their order; `tell_host` reports
        to the host that they are over.
        """
        super().__init__()
        self._inners = inners
        self._before = before
        self._tell_host = tell_host
        self._stream = stream
        self._end = torch.Event() if stream is None else stream.record_event()
        self._outputs = outputs
        self._future: torch.futures.Future[Any] | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Make the current stream wait; the host goes on."""
        self.synchronize()
        return True

    def synchronize(self) -> None:
        for inner in self._inners:
            # A finished receive would wait for another message; a failed work raises its error.
            if not inner.is_completed() or not inner.is_success():
                inner.wait()
        if self._stream is not None:
            torch.accelerator.current_stream(self._stream.device).wait_event(self._end)
            while any(inner in self._before for inner in self._inners):  # some works of gloo never report completion
                self._before.popleft()

    def block_current_stream(self) -> None:
        self.synchronize()

    def is_completed(self) -> bool:
        """Whether the collective, and so all before it on its stream, is over, which the host then knows."""
        if self._stream is None or self._end.query():
            return True
        while self._before and self._before[0].is_completed():
            self._before.popleft()
        if any(inner in self._before for inner in self._inners):
            return False
        self._tell_host()
        return True

    def is_success(self) -> bool:
        return True

    def exception(self) -> Any:
        return None

    def result(self) -> list[Tensor]:
        return self._outputs

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future that is complete, on the collective's stream."""
        if self._future is None:
            self._future = torch.futures.Future(devices=[] if self._stream is None else [self._stream.device])
            with _on(self._stream):
                self._future.set_result(self._outputs)
        return self._future


class _SimBarrier(_SimWork):
    """A barrier, whose wait holds the host."""

    def is_completed(self) -> bool:
        """Whether every rank has called, and the group's stream is over before it."""
        return all(inner.is_completed() for inner in self._inners) and super().is_completed()

    def get_future(self) -> torch.futures.Future[Any]:
        (inner,) = self._inners
        return inner.get_future()


class SimGroup(dist.ProcessGroup):
    """Relays collectives of tensors on the simulated device to `inner`, a gloo backend."""

    def __init__(self, inner: Any, device: Any, store: Store, *, serves_hosts: bool) -> None:
        """Wrap `inner`; `device` is the compiled device, `store` that of the rendezvous.

        It `serves_hosts` if it moves CPU tensors, too, as a group of two backends does.
        """
        super().__init__(inner.rank(), inner.size())  # type: ignore[call-arg]
        self._inner = inner
        self._store = store
        self._sim = device
        self._streams: dict[int, torch.Stream] = {}
        self._under_way: dict[int, deque[Any]] = {}  # gloo's unfinished works, by the device's index
        self._coalescing: list[_SimWork] | None = None
        self._num_launched = 0
        self._is_over = False
        self._serves_hosts = serves_hosts
        _groups.add(self)
        self._name = self._description = ""
        for kind in ("sim", "cpu") if serves_hosts else ("sim",):
            self._register_backend(torch.device(kind), dist.ProcessGroup.BackendType.CUSTOM, inner)
        self._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)

    def count_anew(self) -> None:
        """Begin to number collectives from 0, as the history of the next scenario does."""
        self._num_launched = 0

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return "sim"

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._name = name

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    def get_group_store(self) -> Store:
        return self._store

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        self._description = description

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._description

    def abort(self) -> None:
        """Abort the inner group, and refuse later calls."""
        self._is_over = True
        self._inner.abort()

    def shutdown(self) -> None:
        """Shut the inner group down, and refuse later calls."""
        self._is_over = True
        self._inner.shutdown()

    def barrier(self, *args: Any, **kwargs: Any) -> _SimWork:
        """Begin a barrier; its wait is ordered after the group's earlier work on this device."""
        self._num_launched += 1
        return _SimBarrier(self._streams.get(torch.accelerator.current_device_index()), [], [self._inner.barrier()])

    def _start_coalescing(self, device_type: torch.device) -> None:
        self._coalescing = []

    def _end_coalescing(self, device_type: torch.device) -> _SimWork:
        works, self._coalescing = self._coalescing or [], None
        return works[-1] if works else _SimWork(None, [])

    def _launch(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _SimWork:
        if self._is_over:
            raise RuntimeError(f"{method} of a process group of the simulated device that is destroyed")
        number = self._num_launched
        self._num_launched += 1
        writes, reads = _METHODS[method]
        arguments = [*args, *kwargs.values()]
        outputs = _flat(arguments[writes]) if writes >= 0 else []
        inputs = _flat(arguments[reads]) if reads >= 0 else []
        device = next((tensor.device for tensor in (*inputs, *outputs) if tensor.device.type == "sim"), None)
        if device is None and not self._serves_hosts:
            raise RuntimeError(f"{method} of tensors on the CPU, which a group of the simulated device does not move")
        if device is None:
            for work in self._carry_out(method, arguments):
                work.wait()
            return _SimWork(None, outputs)
        moved = (outputs or inputs)[0]
        operation = f"{method} #{number} ({moved.numel()} x {str(moved.dtype)[6:]})"
        stream = self._streams.setdefault(device.index, torch.Stream(device))
        stream.wait_stream(torch.accelerator.current_stream(device))
        with _on(stream):
            staged: dict[int, Tensor] = {}
            for position in {writes, reads} - {-1}:
                arguments[position] = _mapped(arguments[position], lambda tensor: self._stage(tensor, staged))
            inners = self._carry_out(method, arguments)  # first: a call that gloo refuses must touch no memory
            self._sim.launch(operation, inputs, outputs)
            for tensor in (*inputs, *outputs):
                tensor.record_stream(stream)
            for tensor, one in zip(outputs, itertools.cycle(inners), strict=False):
                if tensor.device.type == "sim":
                    self._sim.will_arrive(tensor, staged[id(tensor)], one)
            before = self._under_way.setdefault(device.index, deque())
            while before and before[0].is_completed():
                before.popleft()
            before.extend(inners)
            work = _SimWork(stream, outputs, inners, before, partial(self._sim.host_has_seen, self._sim.clock()))
        if self._coalescing is not None:
            self._coalescing.append(work)
        return work

    def _carry_out(self, method: str, arguments: list[Any]) -> list[Any]:
        if part := _PARTS.get(method):
            pairs = zip(arguments[0], arguments[1], strict=True)
            return [work for pair in pairs for work in self._carry_out(part, [*pair, *arguments[2:]])]
        if method in _FLAT:  # gloo needs a first dimension
            arguments[:2] = [argument.reshape(-1) for argument in arguments[:2]]
        return [getattr(self._inner, method)(*arguments)]

    def _stage(self, tensor: Tensor, staged: dict[int, Tensor]) -> Tensor:
        if tensor.device.type != "sim":
            staged[id(tensor)] = tensor
        elif id(tensor) not in staged:
            self._sim.arrive_in(tensor)
            staged[id(tensor)] = self._sim.host_view(tensor).contiguous().clone()
        return staged[id(tensor)]


_groups: weakref.WeakSet[SimGroup] = weakref.WeakSet()


def count_anew() -> None:
    """Begin to number the collectives of every group of this process from 0."""
    for group in list(_groups):
        group.count_anew()


def _relay(method: str) -> Callable[..., _SimWork]:
    def launch(self: SimGroup, *args: Any, **kwargs: Any) -> _SimWork:
        return self._launch(_ALIASES.get(method, method), args, kwargs)

    launch.__name__ = method
    launch.__doc__ = f"Launch {method}."
    return launch


for _method in (*_METHODS, *_ALIASES):
    if hasattr(dist.ProcessGroup, _method):
        setattr(SimGroup, _method, _relay(_method))


def _on(stream: torch.Stream | None) -> Any:
    return torch.sim.stream(stream)  # type: ignore[attr-defined]


def _flat(value: _Nested) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else [tensor for item in value for tensor in _flat(item)]


def _mapped(value: _Nested, function: Callable[[Tensor], Tensor]) -> _Nested:
    return function(value) if isinstance(value, Tensor) else [_mapped(item, function) for item in value]
