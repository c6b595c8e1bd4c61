"""`PlainGroup`: a process group of plain ranks, whose operations are meetings at the baton; sums in rank order.

The functions of `torch.distributed`, and autograd functions, optimizers and hooks that use them, call it like any
process group that is written in Python.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from conformance.truth.backwards import Backwards
from conformance.truth.baton import Baton, Meeting

#: torch numbers a process's groups. The ranks of one process begin at different multiples of this number.
FIRST_NUMBER = 1_000_000

#: The backend that plain groups name: every torch has it for every device.
BACKEND = "gloo"

_OPERATIONS: Mapping[Any, Callable[[Tensor, Tensor], Tensor]] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.AVG: torch.add,
    dist.ReduceOp.PRODUCT: torch.mul,
    dist.ReduceOp.MIN: torch.minimum,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.BAND: torch.bitwise_and,
    dist.ReduceOp.BOR: torch.bitwise_or,
    dist.ReduceOp.BXOR: torch.bitwise_xor,
}


class _PlainWork(dist.Work):
    """One operation of one rank. `wait` hands the baton over until the other ranks have arrived."""

    def __init__(self, baton: Baton, rank: int, meeting: Meeting, results: list[Tensor]) -> None:
        super().__init__()
        self._baton = baton
        self._rank = rank
        self._meeting = meeting
        self._results = results

    def wait(self, timeout: Any = None) -> bool:
        self._baton.wait(self._rank, self._meeting)
        return True

    def is_completed(self) -> bool:
        """Return True, after all ranks have arrived: a rank that polls hands the baton over."""
        self.wait()
        return True

    def result(self) -> list[Tensor]:
        return self._results

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """Wait, and return a completed future of the outputs."""
        self.wait()
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        future.set_result(self._results)
        return future


@dataclass(frozen=True)
class Call:
    """The arguments of an operation on a rank: copies of its input tensors, and its output tensors."""

    inputs: list[Tensor]
    outputs: list[Tensor]


class PlainGroup(dist.ProcessGroup):
    """One rank's view of a group of plain ranks; `members` are the ranks of the world in the order of the group."""

    def __init__(self, baton: Baton, members: Sequence[int], rank: int, name: str) -> None:
        """Make the view of global rank `rank` of the group `name`. Not collective."""
        super().__init__(members.index(rank), len(members))  # type: ignore[call-arg]
        self.baton = baton
        self.group = self
        self.backwards = Backwards()  # of the rank's wrappers, if this is its default group
        self.members = tuple(members)
        self._me = rank
        self._place = (name, self.members)
        self._indices = itertools.count()
        self._private: dict[object, itertools.count[int]] = {}
        self._peers: dict[tuple[str, int, int], itertools.count[int]] = {}
        self._kept: deque[_PlainWork] = deque(maxlen=64)  # C++ code keeps only the C++ part of a Work
        self._given_name = ""

    def meet(self, of: object, what: str, value: Any, combine: Callable[[list[Any]], Sequence[Any]]) -> Any:
        """Meet the other ranks outside of the group's order of operations, and return this rank's result.

        `of` names the meeting's owner, the same on all ranks; `combine` gets the values of ranks, in the group's order.
        """
        return self.outcome(self.arrive(of, what, value, combine))

    def arrive(self, of: object, what: str, value: Any, combine: Callable[[list[Any]], Sequence[Any]]) -> Meeting:
        """Bring `value` to a meeting as `meet` does, and go on. `baton.wait` returns this rank's result."""
        index = next(self._private.setdefault(of, itertools.count()))

        def by_member(brought: Mapping[int, Any]) -> dict[int, Any]:
            results = combine([brought[member] for member in self.members])
            return dict(zip(self.members, results, strict=True))

        return self.baton.arrive(self._me, (*self._place, of, index), self.members, what, value, by_member)

    def outcome(self, meeting: Meeting) -> Any:
        """Wait for the others, and return this rank's result of a meeting."""
        return self.baton.wait(self._me, meeting)

    def new_group(self, ranks: Sequence[int], *, group_name: str, **_: Any) -> PlainGroup | None:
        """Return a group of `ranks`, None on others; `torch.distributed.new_group` calls it on the default group."""
        if self._me not in ranks:
            return None
        group = PlainGroup(self.baton, list(ranks), self._me, _shared(group_name))
        group._set_group_name(group_name)  # type: ignore[arg-type]
        return group

    # Methods that torch calls by these names.

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return BACKEND

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._given_name = name

    def getGroupName(self) -> str:  # noqa: N802
        return self._given_name

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        """Ignore the description."""

    def getGroupDesc(self) -> str:  # noqa: N802
        return ""

    def shutdown(self) -> None:
        """Do nothing: there is nothing to release."""

    abort = shutdown

    # Collectives: each passes a rank's inputs and outputs, and a function that computes all outputs from all inputs.

    def _issue(self, what: str, call: Call, combine: Callable[[list[Call]], None]) -> _PlainWork:
        def run(brought: Mapping[int, Call]) -> dict[int, None]:
            with torch.no_grad():
                combine([brought[member] for member in self.members])
            return dict.fromkeys(brought)

        place = (*self._place, next(self._indices))
        meeting = self.baton.arrive(self._me, place, self.members, what, call, run)
        work = _PlainWork(self.baton, self._me, meeting, call.outputs)
        self._kept.append(work)
        return work

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> _PlainWork:  # type: ignore[override]
        operation = _operation(options)

        def combine(calls: list[Call]) -> None:
            _hand_out(calls, [_reduced(each, operation) for each in zip(*(call.inputs for call in calls), strict=True)])

        return self._issue(f"all_reduce of {_shapes(tensors)}", _in_place(tensors), combine)

    allreduce_coalesced = allreduce  # type: ignore[assignment]

    def reduce(self, tensors: list[Tensor], options: Any) -> _PlainWork:  # type: ignore[override]
        root, operation = options.rootRank, _operation(options)

        def combine(calls: list[Call]) -> None:
            calls[root].outputs[0].copy_(_reduced([call.inputs[0] for call in calls], operation))

        return self._issue(f"reduce of {_shapes(tensors)} to {root}", _in_place(tensors), combine)

    def broadcast(self, tensors: list[Tensor], options: Any) -> _PlainWork:  # type: ignore[override]
        root = options.rootRank

        def combine(calls: list[Call]) -> None:
            _hand_out(calls, calls[root].inputs)

        return self._issue(f"broadcast of {_shapes(tensors)} from {root}", _in_place(tensors), combine)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], options: Any = None) -> _PlainWork:  # type: ignore[override]
        return self._gathered(outputs[0], inputs[0])

    def _allgather_base(self, output: Tensor, given: Tensor, options: Any = None) -> _PlainWork:
        return self._gathered(list(output.view(self.size(), *given.shape).unbind()), given)

    all_gather_single = _allgather_base  # type: ignore[assignment]

    def _gathered(self, outputs: list[Tensor], given: Tensor) -> _PlainWork:
        def combine(calls: list[Call]) -> None:
            _hand_out(calls, [call.inputs[0] for call in calls])

        return self._issue(f"all_gather of {_shapes([given])}", Call([_copy(given)], outputs), combine)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], options: Any) -> _PlainWork:  # type: ignore[override]
        def combine(calls: list[Call]) -> None:
            for output, call in zip(calls[options.rootRank].outputs, calls, strict=True):
                output.copy_(call.inputs[0])

        call = Call([_copy(inputs[0])], outputs[0] if outputs else [])
        return self._issue(f"gather of {_shapes(inputs)} to {options.rootRank}", call, combine)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], options: Any) -> _PlainWork:  # type: ignore[override]
        def combine(calls: list[Call]) -> None:
            for call, given in zip(calls, calls[options.rootRank].inputs, strict=True):
                call.outputs[0].copy_(given)

        call = Call([_copy(each) for each in inputs[0]] if inputs else [], list(outputs))
        return self._issue(f"scatter of {_shapes(outputs)} from {options.rootRank}", call, combine)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], options: Any = None) -> _PlainWork:  # type: ignore[override]
        return self._reduced_and_scattered(outputs[0], inputs[0], options)

    def _reduce_scatter_base(self, output: Tensor, given: Tensor, options: Any = None) -> _PlainWork:
        return self._reduced_and_scattered(output, list(given.view(self.size(), *output.shape).unbind()), options)

    reduce_scatter_single = _reduce_scatter_base  # type: ignore[assignment]

    def _reduced_and_scattered(self, output: Tensor, inputs: list[Tensor], options: Any) -> _PlainWork:
        operation = _operation(options)

        def combine(calls: list[Call]) -> None:
            for index, call in enumerate(calls):
                call.outputs[0].copy_(_reduced([each.inputs[index] for each in calls], operation))

        call = Call([_copy(each) for each in inputs], [output])
        return self._issue(f"reduce_scatter of {_shapes(inputs)}", call, combine)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], options: Any = None) -> _PlainWork:
        def combine(calls: list[Call]) -> None:
            for index, call in enumerate(calls):
                for output, sender in zip(call.outputs, calls, strict=True):
                    output.copy_(sender.inputs[index])

        return self._issue("all_to_all", Call([_copy(each) for each in inputs], list(outputs)), combine)

    def alltoall_base(
        self, output: Tensor, given: Tensor, output_sizes: list[int], input_sizes: list[int], options: Any = None
    ) -> _PlainWork:
        """Give each rank one part of every rank's tensor; parts are equal where no sizes are given."""
        return self.alltoall(_parts(output, output_sizes, self.size()), _parts(given, input_sizes, self.size()))

    all_to_all_single = alltoall_base  # type: ignore[assignment]

    def barrier(self, opts: Any = None) -> _PlainWork:
        return self._issue("barrier", Call([], []), lambda _: None)

    def monitored_barrier(self, *_: Any) -> None:
        self.barrier().wait()

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> _PlainWork:
        return self._between(self.rank(), peer, Call([_copy(tensors[0])], []))

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> _PlainWork:
        return self._between(peer, self.rank(), Call([], [tensors[0].detach()]))

    def _between(self, sender: int, receiver: int, call: Call) -> _PlainWork:
        pair = self.members[sender], self.members[receiver]

        def combine(calls: Mapping[int, Call]) -> dict[int, None]:
            calls[pair[1]].outputs[0].copy_(calls[pair[0]].inputs[0])
            return dict.fromkeys(calls)

        what = f"send from {sender} to {receiver}"
        index = next(self._peers.setdefault((what, *pair), itertools.count()))
        meeting = self.baton.arrive(self._me, (*self._place, what, index), pair, what, call, combine)
        return _PlainWork(self.baton, self._me, meeting, call.outputs)


def _operation(options: Any) -> Any:
    operation = getattr(options, "reduceOp", options)
    return dist.ReduceOp.SUM if operation is None else getattr(operation, "op", operation)


def _reduced(tensors: Sequence[Tensor], operation: Any) -> Tensor:
    total = reduce(_OPERATIONS[operation], tensors)
    return total / len(tensors) if operation == dist.ReduceOp.AVG else total


def _hand_out(calls: Sequence[Call], values: Sequence[Tensor]) -> None:
    for call in calls:
        for output, value in zip(call.outputs, values, strict=True):
            output.copy_(value)


def _in_place(tensors: Sequence[Tensor]) -> Call:
    outputs = [tensor if tensor.is_sparse else tensor.detach() for tensor in tensors]  # whose detached one is another
    return Call([_copy(tensor) for tensor in tensors], outputs)


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def _parts(tensor: Tensor, sizes: Sequence[int], num_ranks: int) -> list[Tensor]:
    return list(tensor.detach().split(list(sizes) or tensor.shape[0] // num_ranks))


def _shapes(tensors: Sequence[Tensor]) -> str:
    return " and ".join(f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}" for tensor in tensors)


def _shared(name: str) -> str:
    """Return the name on all ranks of the group that torch has named `name` on this rank; see `RankWorld`."""
    return str(int(name) % FIRST_NUMBER) if name.isdecimal() else name
