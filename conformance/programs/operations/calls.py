"""Issues an operation by each way to it: torch's function, a method of the group or the backend, the functional one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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

#: The factor of PREMUL_SUM: a power of two, so that it is exact, and no AVG.
FACTOR = 4.0


@dataclass(frozen=True, slots=True)
class Issued:
    """What a call gave: its works, none where the backend had finished, and the tensors that hold the result."""

    works: tuple[dist.Work, ...]
    outputs: tuple[Tensor, ...]


def reduce_op(name: str) -> Any:
    """Return torch's value for the reduction called `name`."""
    if name == "PREMUL_SUM":
        return dist._make_nccl_premul_sum(FACTOR)  # type: ignore[attr-defined]
    return getattr(dist.ReduceOp, name or "SUM")


def named(owner: Any, *names: str) -> Callable[..., Any]:
    """Return the first of `names` that `owner` has: torch has renamed some functions and keeps the old ones."""
    found = next((getattr(owner, name) for name in names if hasattr(owner, name)), None)
    if found is None:
        raise NotImplementedError(f"{type(owner).__name__} has no {' or '.join(names)}")
    return found


def issue(
    cell: Cell,
    group: Any,
    backend: Any,
    place: Place,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    timeout: timedelta | None = None,
) -> Issued:
    """Issue the cell's operation in `group`, whose backend is `backend`. Every rank of the group must call it.

    A method of the group or the backend is given a `timeout` of its own, which messages cannot have.
    """
    inputs, outputs = list(inputs), list(outputs)
    if cell.path == "functional":
        return Issued((), tuple(_functional(cell, group, place, inputs)))
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
    operation, op = cell.operation, reduce_op(cell.reduction)
    how: dict[str, Any] = {"group": group, "async_op": cell.lifetime != "sync"}
    if operation == "barrier":
        return dist.barrier(**how)
    if operation == "all_reduce":
        return dist.all_reduce(outputs[0], op, **how)
    if operation == "broadcast":
        return dist.broadcast(outputs[0], group_src=place.root, **how)
    if operation == "reduce":
        return dist.reduce(outputs[0], group_dst=place.root, op=op, **how)
    if operation == "all_gather":
        return dist.all_gather(outputs, inputs[0], **how)
    if operation == "all_gather_single":
        return named(dist, "all_gather_single", "all_gather_into_tensor")(outputs[0], inputs[0], **how)
    if operation == "reduce_scatter":
        return dist.reduce_scatter(outputs[0], inputs, op, **how)
    if operation == "reduce_scatter_single":
        return named(dist, "reduce_scatter_single", "reduce_scatter_tensor")(outputs[0], inputs[0], op, **how)
    if operation == "gather":
        return dist.gather(inputs[0], outputs if place.is_root else None, group_dst=place.root, **how)
    if operation == "scatter":
        return dist.scatter(outputs[0], inputs if place.is_root else None, group_src=place.root, **how)
    if operation == "all_to_all":
        return dist.all_to_all(outputs, inputs, **how)
    if operation == "all_to_all_single":
        return dist.all_to_all_single(outputs[0], inputs[0], **how)
    if operation == "all_to_all_uneven":
        received, sent = _splits(cell, place)
        return dist.all_to_all_single(outputs[0], inputs[0], received, sent, **how)
    if operation == "send_recv":
        following, previous = (place.rank + 1) % place.size, (place.rank - 1) % place.size
        return [
            dist.isend(inputs[0], group=group, group_dst=following),
            dist.irecv(outputs[0], group=group, group_src=previous),
        ]
    assert cell.what.coalesced  # noqa: S101 - our own mistake
    return _coalesced_by_manager(cell, group, inputs, outputs, op, is_async=cell.lifetime != "sync")


def _coalesced_by_manager(
    cell: Cell, group: Any, inputs: list[Tensor], outputs: list[Tensor], op: Any, *, is_async: bool
) -> Any:
    with dist._coalescing_manager(group, async_ops=is_async) as manager:  # type: ignore[attr-defined]
        for number, output in enumerate(outputs):
            if cell.operation == "all_reduce_coalesced":
                dist.all_reduce(output, op, group=group)
            elif cell.operation == "all_gather_single_coalesced":
                named(dist, "all_gather_single", "all_gather_into_tensor")(output, inputs[number], group=group)
            else:
                call = named(dist, "reduce_scatter_single", "reduce_scatter_tensor")
                call(output, inputs[number], op, group=group)
    return list(manager.works)


def _method(
    cell: Cell, owner: Any, place: Place, inputs: list[Tensor], outputs: list[Tensor], timeout: timedelta | None
) -> Any:
    operation, op = cell.operation, reduce_op(cell.reduction)

    def options(kind: Callable[[], Any], **values: Any) -> Any:
        made = kind()
        for name, value in {**values, **({} if timeout is None else {"timeout": timeout})}.items():
            setattr(made, name, value)
        return made

    if operation == "barrier":
        return owner.barrier(options(c10d.BarrierOptions))
    if operation == "all_reduce":
        return owner.allreduce(outputs, options(c10d.AllreduceOptions, reduceOp=op))
    if operation == "broadcast":
        return owner.broadcast(outputs, options(c10d.BroadcastOptions, rootRank=place.root, rootTensor=0))
    if operation == "reduce":
        return owner.reduce(outputs, options(c10d.ReduceOptions, reduceOp=op, rootRank=place.root))
    if operation == "all_gather":
        return owner.allgather([outputs], inputs, options(c10d.AllgatherOptions))
    if operation == "all_gather_single":
        return named(owner, "all_gather_single", "_allgather_base")(
            outputs[0], inputs[0], options(c10d.AllgatherOptions)
        )
    if operation == "reduce_scatter":
        return owner.reduce_scatter(outputs, [inputs], options(c10d.ReduceScatterOptions, reduceOp=op))
    if operation == "reduce_scatter_single":
        call = named(owner, "reduce_scatter_single", "_reduce_scatter_base")
        return call(outputs[0], inputs[0], options(c10d.ReduceScatterOptions, reduceOp=op))
    if operation == "gather":
        lists = [outputs] if place.is_root else []
        return owner.gather(lists, inputs, options(c10d.GatherOptions, rootRank=place.root))
    if operation == "scatter":
        lists = [inputs] if place.is_root else []
        return owner.scatter(outputs, lists, options(c10d.ScatterOptions, rootRank=place.root))
    if operation == "all_to_all":
        return owner.alltoall(outputs, inputs, options(c10d.AllToAllOptions))
    if operation in ("all_to_all_single", "all_to_all_uneven"):
        received, sent = _splits(cell, place) if operation == "all_to_all_uneven" else ([], [])
        call = named(owner, "all_to_all_single", "alltoall_base")
        return call(outputs[0], inputs[0], received, sent, options(c10d.AllToAllOptions))
    if operation == "send_recv":
        following, previous = (place.rank + 1) % place.size, (place.rank - 1) % place.size
        return [owner.send(inputs, following, 0), owner.recv(outputs, previous, 0)]
    if operation == "all_reduce_coalesced":
        return owner.allreduce_coalesced(outputs, options(c10d.AllreduceCoalescedOptions, reduceOp=op))
    if operation == "all_gather_single_coalesced":
        call = named(owner, "all_gather_single_coalesced", "allgather_into_tensor_coalesced")
        return call(outputs, inputs, options(c10d.AllgatherOptions))
    call = named(owner, "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced")
    return call(outputs, inputs, options(c10d.ReduceScatterOptions, reduceOp=op))


def _functional(cell: Cell, group: Any, place: Place, inputs: list[Tensor]) -> list[Tensor]:
    from torch.distributed import _functional_collectives as functional

    op = cell.reduction.lower()
    if cell.operation == "all_reduce":
        return [functional.all_reduce(inputs[0], op, group)]
    if cell.operation == "broadcast":
        return [functional.broadcast(inputs[0], place.root, group)]
    if cell.operation == "all_gather_single":
        return [functional.all_gather_tensor(inputs[0], 0, group)]
    if cell.operation == "reduce_scatter_single":
        return [functional.reduce_scatter_tensor(inputs[0], op, 0, group)]
    if cell.operation in ("all_to_all_single", "all_to_all_uneven"):
        received, sent = _splits(cell, place) if cell.operation == "all_to_all_uneven" else (None, None)
        return [functional.all_to_all_single(inputs[0], received, sent, group)]
    if cell.operation == "all_reduce_coalesced":
        return list(functional.all_reduce_coalesced(inputs, op, group))
    if cell.operation == "all_gather_single_coalesced":
        return list(functional.all_gather_into_tensor_coalesced(inputs, group))
    return list(functional.reduce_scatter_tensor_coalesced(inputs, op, [0] * len(inputs), group))


def _splits(cell: Cell, place: Place) -> tuple[list[int], list[int]]:
    """Return how many rows come from each rank and go to each."""
    rows = cell.block_shape[0]
    received = [rows * uneven(source, place.rank, place.turn) for source in range(place.size)]
    return received, [rows * uneven(place.rank, target, place.turn) for target in range(place.size)]


def wait_tensors(outputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors that functional collectives gave, once they are there."""
    from torch.distributed import _functional_collectives as functional

    return [functional.wait_tensor(output) for output in outputs]


def wait_for_device() -> None:
    """Have the host wait for the device, if there is one: a Work's `wait` has only put the reading stream behind it."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def device_backend(group: Any, device: torch.device) -> Any:
    """Return the C++ backend of `group`; the group itself where it is written in Python, whatever it has registered."""
    return group._get_backend(device) if type(group) is dist.ProcessGroup else group
