"""Issues an operation by each of `cell.PATHS`: torch's function, a method of the group or backend, a functional one."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from conformance.programs.operations.cell import Cell
from conformance.programs.operations.description import Place, uneven


@dataclass(frozen=True, slots=True)
class Issued:
    """The works that a call returned, none where the backend had finished, and the tensors that hold the result."""

    works: tuple[dist.Work, ...]
    outputs: tuple[Tensor, ...]


def reduce_op(cell: Cell, tensors: Sequence[Tensor]) -> Any:
    """Return torch's value for the cell's reduction of `tensors`; a factor that is a tensor lies where they do."""
    if cell.reduction == "PREMUL_SUM":
        is_tensor = cell.factor.startswith("tensor")
        factor = tensors[0].new_full((1,), cell.multiplier) if is_tensor else cell.multiplier
        return dist._make_nccl_premul_sum(factor)  # type: ignore[attr-defined]
    return getattr(dist.ReduceOp, cell.reduction or "SUM")


def named(owner: Any, *names: str) -> Callable[..., Any]:
    """Return the first of `names` that `owner` has: a name of torch, and older names of the same function."""
    found = next((getattr(owner, name) for name in names if hasattr(owner, name)), None)
    if found is None:
        raise NotImplementedError(f"{type(owner).__name__} has no {' or '.join(names)}")
    return found


def issue(
    cell: Cell, group: Any, backend: Any, place: Place, inputs: Sequence[Tensor], outputs: Sequence[Tensor],
    timeout: timedelta | None = None,
) -> Issued:  # fmt: skip
    """Issue the cell's operation in `group`, whose backend is `backend`. Every rank of the group must call it.

    A method of the group or the backend gets `timeout`, except that of a message.
    """
    inputs, outputs = list(inputs), list(outputs)
    if cell.returns_new:
        return Issued((), tuple(_new_tensors(cell, group, place, inputs)))
    if cell.path == "remapped":
        _remapped(cell, group.group_name, place, inputs, outputs)
        return Issued((), tuple(outputs))
    if cell.path == "public":
        given = _public(cell, group, place, inputs, outputs)
    elif cell.path == "other-thread":
        with ThreadPoolExecutor(1) as threads:
            given = threads.submit(_public, cell, group, place, inputs, outputs).result()
    else:
        given = _method(cell, group if cell.path == "group" else backend, place, inputs, outputs, timeout)
    works = given if isinstance(given, list) else [given]
    return Issued(tuple(work for work in works if work is not None), tuple(outputs))


def _public(cell: Cell, group: Any, place: Place, inputs: list[Tensor], outputs: list[Tensor]) -> Any:
    op, root = reduce_op(cell, [*inputs, *outputs]), place.root
    received, sent = _splits(cell, place)
    how: dict[str, Any] = {"group": group, "async_op": cell.lifetime != "sync"}
    gather_single = named(dist, "all_gather_single", "all_gather_into_tensor")
    scatter_single = named(dist, "reduce_scatter_single", "reduce_scatter_tensor")
    calls: dict[str, Callable[[], Any]] = {
        "barrier": lambda: dist.barrier(**how),
        "all_reduce": lambda: dist.all_reduce(outputs[0], op, **how),
        "broadcast": lambda: dist.broadcast(outputs[0], group_src=root, **how),
        "reduce": lambda: dist.reduce(outputs[0], group_dst=root, op=op, **how),
        "all_gather": lambda: dist.all_gather(outputs, inputs[0], **how),
        "all_gather_single": lambda: gather_single(outputs[0], inputs[0], **how),
        "reduce_scatter": lambda: dist.reduce_scatter(outputs[0], inputs, op, **how),
        "reduce_scatter_single": lambda: scatter_single(outputs[0], inputs[0], op, **how),
        "gather": lambda: dist.gather(inputs[0], outputs if place.is_root else None, group_dst=root, **how),
        "gather_single": lambda: named(dist, "gather_single")(
            inputs[0], outputs[0] if place.is_root else None, group_dst=root, **how
        ),
        "scatter": lambda: dist.scatter(outputs[0], inputs if place.is_root else None, group_src=root, **how),
        "all_to_all": lambda: dist.all_to_all(outputs, inputs, **how),
        "all_to_all_single": lambda: dist.all_to_all_single(outputs[0], inputs[0], **how),
        "all_to_all_uneven": lambda: dist.all_to_all_single(outputs[0], inputs[0], received, sent, **how),
        "send_recv": lambda: [
            dist.isend(inputs[0], group=group, group_dst=(place.rank + 1) % place.size),
            dist.irecv(outputs[0], group=group, group_src=(place.rank - 1) % place.size),
        ],
    }
    if cell.operation in calls:
        return calls[cell.operation]()
    with coalescing(group, async_ops=cell.lifetime != "sync") as manager:
        for number, output in enumerate(outputs):
            if cell.operation == "all_reduce_coalesced":
                dist.all_reduce(output, op, group=group)
            elif cell.operation == "all_gather_single_coalesced":
                gather_single(output, inputs[number], group=group)
            else:
                scatter_single(output, inputs[number], op, group=group)
    return list(manager.works)


@contextlib.contextmanager
def coalescing(group: Any, *, async_ops: bool = False) -> Iterator[Any]:
    """Return torch's block of coalesced collectives, which is over also where it raises.

    torch 2.13 keeps the calls of a block that raised, and executes no later call of the group.
    """
    try:
        with dist._coalescing_manager(group, async_ops=async_ops) as manager:  # type: ignore[attr-defined]
            yield manager
    finally:
        dist.distributed_c10d._world.pg_coalesce_state.pop(group, None)


def _method(
    cell: Cell, owner: Any, place: Place, inputs: list[Tensor], outputs: list[Tensor], timeout: timedelta | None
) -> Any:
    op, root = reduce_op(cell, [*inputs, *outputs]), place.root
    received, sent = _splits(cell, place)

    def options(kind: Callable[[], Any], **values: Any) -> Any:
        made = kind()
        for name, value in {**values, **({} if timeout is None else {"timeout": timeout})}.items():
            setattr(made, name, value)
        return made

    def call(name: str, old_name: str, kind: Callable[[], Any], *tensors: Any, **values: Any) -> Any:
        return named(owner, name, old_name)(*tensors, options(kind, **values))

    gathers, scatters = c10d.AllgatherOptions, c10d.ReduceScatterOptions
    calls: dict[str, Callable[[], Any]] = {
        "barrier": lambda: owner.barrier(options(c10d.BarrierOptions)),
        "all_reduce": lambda: owner.allreduce(outputs, options(c10d.AllreduceOptions, reduceOp=op)),
        "broadcast": lambda: owner.broadcast(outputs, options(c10d.BroadcastOptions, rootRank=root, rootTensor=0)),
        "reduce": lambda: owner.reduce(outputs, options(c10d.ReduceOptions, reduceOp=op, rootRank=root)),
        "all_gather": lambda: owner.allgather([outputs], inputs, options(gathers)),
        "all_gather_single": lambda: call("all_gather_single", "_allgather_base", gathers, outputs[0], inputs[0]),
        "reduce_scatter": lambda: owner.reduce_scatter(outputs, [inputs], options(scatters, reduceOp=op)),
        "reduce_scatter_single": lambda: call(
            "reduce_scatter_single", "_reduce_scatter_base", scatters, outputs[0], inputs[0], reduceOp=op
        ),
        "gather": lambda: owner.gather(
            [outputs] if place.is_root else [], inputs, options(c10d.GatherOptions, rootRank=root)
        ),
        "gather_single": lambda: owner.gather_single(
            outputs[0] if place.is_root else inputs[0].new_empty(0),
            inputs[0],
            options(c10d.GatherOptions, rootRank=root),
        ),
        "scatter": lambda: owner.scatter(
            outputs, [inputs] if place.is_root else [], options(c10d.ScatterOptions, rootRank=root)
        ),
        "all_to_all": lambda: owner.alltoall(outputs, inputs, options(c10d.AllToAllOptions)),
        "send_recv": lambda: [
            owner.send(inputs, (place.rank + 1) % place.size, 0),
            owner.recv(outputs, (place.rank - 1) % place.size, 0),
        ],
        "all_reduce_coalesced": lambda: owner.allreduce_coalesced(
            outputs, options(c10d.AllreduceCoalescedOptions, reduceOp=op)
        ),
        "all_gather_single_coalesced": lambda: call(
            "all_gather_single_coalesced", "allgather_into_tensor_coalesced", gathers, outputs, inputs
        ),
        "reduce_scatter_single_coalesced": lambda: call(
            "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced", scatters, outputs, inputs, reduceOp=op
        ),
    }
    calls["all_to_all_single"] = calls["all_to_all_uneven"] = lambda: call(
        "all_to_all_single", "alltoall_base", c10d.AllToAllOptions, outputs[0], inputs[0], received, sent
    )
    return calls[cell.operation]()


def _new_tensors(cell: Cell, group: Any, place: Place, inputs: list[Tensor]) -> list[Tensor]:
    """Call the functional collective, by itself or in a compiled graph, or have autograd call it in a backward."""
    if cell.path == "backward":
        return _backward(cell, group, place, inputs)
    call = _functional(cell, group, place)
    if cell.path == "compiled":
        torch.compiler.reset()  # a graph of an earlier cell has another group, and torch counts graphs of one function
        call = torch.compile(_functional(cell, group.group_name, place), fullgraph=True, backend="aot_eager")
    results = call(inputs)
    return [results] if isinstance(results, Tensor) else list(results)


def _functional(cell: Cell, group: Any, place: Place) -> Callable[[list[Tensor]], Any]:
    from torch.distributed import _functional_collectives as functional

    op = cell.reduction.lower()
    received, sent = (splits or None for splits in _splits(cell, place))
    calls: dict[str, Callable[[list[Tensor]], Any]] = {
        "all_reduce": lambda given: functional.all_reduce(given[0], op, group),
        "broadcast": lambda given: functional.broadcast(given[0], place.root, group),
        "all_gather_single": lambda given: functional.all_gather_tensor(given[0], 0, group),
        "reduce_scatter_single": lambda given: functional.reduce_scatter_tensor(given[0], op, 0, group),
        "all_to_all_single": lambda given: functional.all_to_all_single(given[0], received, sent, group),
        "all_reduce_coalesced": lambda given: functional.all_reduce_coalesced(given, op, group),
        "all_gather_single_coalesced": lambda given: functional.all_gather_into_tensor_coalesced(given, group),
        "reduce_scatter_single_coalesced": lambda given: functional.reduce_scatter_tensor_coalesced(
            given, op, [0] * len(given), group
        ),
    }
    return calls[cell.operation.replace("uneven", "single")]


def lacked_by_torch(cell: Cell) -> str:
    """Return why the installed torch cannot issue the cell's operation; empty if it can."""
    from torch.distributed import _functional_collectives as functional

    if (cell.path, cell.operation) != ("remapped", "reduce_scatter") or hasattr(functional, "reduce_scatter_inplace"):
        return ""
    return f"torch {torch.__version__} replaces no reduce_scatter of a list in a graph"


def _remapped(cell: Cell, group: str, place: Place, inputs: list[Tensor], outputs: list[Tensor]) -> None:
    """Call, in a compiled graph, what torch replaces its function by there."""
    from torch.distributed import _functional_collectives as functional

    op = cell.reduction.lower()
    received, sent = (splits or None for splits in _splits(cell, place))
    scatter_list: Any = getattr(functional, "reduce_scatter_inplace", None)  # from torch 2.14 on
    calls: dict[str, Callable[[list[Tensor], list[Tensor]], Any]] = {
        "all_reduce": lambda given, room: functional.all_reduce_inplace(room[0], op, group),
        "all_gather": lambda given, room: functional.all_gather_inplace(room, given[0], group),
        "all_gather_single": lambda given, room: functional.all_gather_tensor_inplace(room[0], given[0], group),
        "reduce_scatter": lambda given, room: scatter_list(room[0], given, op, group),
        "reduce_scatter_single": lambda given, room: functional.reduce_scatter_tensor_inplace(
            room[0], given[0], op, group
        ),
        "all_to_all_single": lambda given, room: functional.all_to_all_inplace(
            room[0], given[0], received, sent, group
        ),
    }
    torch.compiler.reset()  # as in `_new_tensors`
    call = calls[cell.operation.replace("uneven", "single")]
    torch.compile(call, fullgraph=True, backend="aot_eager")(inputs, outputs)


def _backward(cell: Cell, group: Any, place: Place, inputs: list[Tensor]) -> list[Tensor]:
    """Return the gradient of the collective whose backward is the cell's operation, given the cell's input as that."""
    from torch.distributed import _functional_collectives as functional

    (given,) = inputs
    received, sent = (splits or None for splits in _splits(cell, place))
    rows = given.shape[0]
    gather = named(functional, "all_gather_single_autograd", "all_gather_tensor_autograd")
    scatter = named(functional, "reduce_scatter_single_autograd", "reduce_scatter_tensor_autograd")
    forward, rows = {
        "all_reduce": (lambda one: functional.all_reduce(one, "sum", group), rows),
        "all_gather_single": (lambda one: scatter(one, "sum", 0, group), rows * place.size),
        "reduce_scatter_single": (lambda one: gather(one, 0, group), rows // place.size),
        "all_to_all_single": (
            lambda one: functional.all_to_all_single_autograd(one, sent, received, group), sum(received or [rows])
        ),
    }[cell.operation.replace("uneven", "single")]  # fmt: skip
    leaf = given.new_zeros((rows, *given.shape[1:])).requires_grad_()
    (forward(leaf) * given).sum().backward()
    return [leaf.grad] if leaf.grad is not None else []


def _splits(cell: Cell, place: Place) -> tuple[list[int], list[int]]:
    """Return how many rows arrive from each rank and go to each, if splits are uneven; else two empty lists."""
    if cell.operation != "all_to_all_uneven":
        return [], []
    rows = cell.block_shape[0]
    received = [rows * uneven(source, place.rank, place.turn) for source in range(place.size)]
    return received, [rows * uneven(place.rank, target, place.turn) for target in range(place.size)]


def wait_tensors(outputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors that functional collectives returned, once they are complete."""
    from torch.distributed import _functional_collectives as functional

    if len(outputs) > 1 and (wait := getattr(functional, "wait_tensors", None)):  # from torch 2.15 on
        return list(wait(list(outputs)))
    return [functional.wait_tensor(output) for output in outputs]


def wait_for_device() -> None:
    """Have the host wait for the accelerator, if any: a Work's `wait` only makes the current stream wait."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def device_backend(group: Any, device: torch.device) -> Any:
    """Return the C++ backend of `group`, or the group itself if it is written in Python."""
    return group._get_backend(device) if type(group) is dist.ProcessGroup else group
