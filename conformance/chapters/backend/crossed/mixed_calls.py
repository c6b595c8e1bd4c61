"""Program `mixed_calls`: a sequence of calls that a number draws, in several groups, some of them under way at once."""

import time
from collections.abc import Mapping
from dataclasses import dataclass

from conformance.checkers.explanation import some
from conformance.observation import Facts
from conformance.programs.operation_cells import UNDECLARED
from conformance.programs.operations.calls import Issued
from conformance.programs.operations.data import dtype_of
from conformance.programs.operations.description import Blocks, Place
from conformance.programs.operations.groups import Groups, members_of, whose
from conformance.programs.operations.judging import Truth
from conformance.programs.operations.memory import WHOLE, Arena
from conformance.programs.operations.sequences import Call, sequence
from conformance.programs.operations.store_messages import introduce
from conformance.programs.operations.tensors import Tensors
from conformance.programs.rank_context import RankContext
from conformance.programs.registry import program_without_truth
from conformance.scenario import Scenario
from conformance.truth.expected import Right

_LATE_S = 0.01


@program_without_truth("mixed_calls", invariants=(), without_ddp=True)
def mixed_calls(ctx: RankContext) -> None:
    """Issue the calls of the sequence with the scenario's number; observes what is wrong with each. All ranks run it.

    A call that needs what the backend does not declare is left out.
    """
    introduce()
    groups = Groups(ctx.process_group, ctx.rank, ctx.world_size, ctx.device)
    calls = _sequence(ctx.scenario)
    for name in dict.fromkeys(call.cell.group for call in calls):  # all ranks make them in one order
        with ctx.phase(f"new_group of {whose(name)}"):
            groups.get(name)
    rank = _Rank(ctx, groups, calls)
    for number in range(len(calls)):
        rank.issue(number)
    rank.end_all()
    with ctx.phase("destroy_process_group, after all calls"):
        groups.destroy()


@mixed_calls.expects
def _mixed_calls(scenario: Scenario) -> Mapping[int, Facts]:
    size = scenario.world_size
    calls = list(enumerate(_sequence(scenario)))
    return {
        rank: {
            _name(number, call): Right(UNDECLARED)
            for number, call in calls
            if rank in members_of(call.cell.group, rank, size)
        }
        for rank in range(size)
    }


def _sequence(scenario: Scenario) -> tuple[Call, ...]:
    given = scenario.arguments
    return sequence(int(given["number"]), int(given["length"]), scenario.world_size)


def _name(number: int, call: Call) -> str:
    return f"call {number}, {call.cell.describe()}"


@dataclass(frozen=True, slots=True)
class _Begun:
    """A call that was issued, what else was under way then, and which calls had its memory before."""

    tensors: Tensors
    issued: Issued
    beside: tuple[int, ...]
    before: tuple[int, ...]


class _Rank:
    """One rank's part in the sequence."""

    def __init__(self, ctx: RankContext, groups: Groups, calls: tuple[Call, ...]) -> None:
        self._ctx, self._groups, self._calls = ctx, groups, calls
        self._begun: dict[int, _Begun] = {}
        self._free: list[tuple[int, Arena]] = []  # with the number of the call that had it last

    def issue(self, number: int) -> None:
        """Wait for what ends before the call with this number, and issue it; a synchronous one is judged at once."""
        call = self._calls[number]
        for earlier in call.ends:
            self._end(earlier)
        cell = call.cell
        members = members_of(cell.group, self._ctx.rank, self._ctx.world_size)
        if self._ctx.rank not in members:
            return
        if not cell.needs <= self._ctx.declared:
            self._ctx.observe(_name(number, call), UNDECLARED)
            return
        if call.late == self._ctx.rank:
            time.sleep(_LATE_S)
        group = self._groups.get(cell.group)
        truth = Truth(cell, Place(group.rank(), group.size(), cell.root % group.size(), turn=number))
        before: list[int] = []
        tensors = Tensors.of(
            truth, self._ctx.device, lambda blocks: self._arena(truth, blocks, before, reuses=call.reuses)
        )
        with self._ctx.phase(_name(number, call)):
            issued = tensors.issue(group)
        self._begun[number] = _Begun(tensors, issued, tuple(self._begun), tuple(dict.fromkeys(before)))
        if cell.lifetime == "sync":
            self._end(number)

    def end_all(self) -> None:
        """Wait for whatever is under way, the last call first."""
        for number in sorted(self._begun, reverse=True):
            self._end(number)

    def _arena(self, truth: Truth, blocks: Blocks, before: list[int], *, reuses: bool) -> Arena:
        shape, dtype = truth.shape(blocks), dtype_of(truth.cell.dtype)
        for place, (number, one) in enumerate(self._free if reuses else ()):
            if one.tensor.shape == shape and one.tensor.dtype == dtype:
                del self._free[place]
                before.append(number)
                one.renew()
                return one
        layout = WHOLE if len(self._begun) % 2 else "contiguous"
        return Arena.of(shape, dtype, layout, self._ctx.device)

    def _end(self, number: int) -> None:
        begun, call = self._begun.pop(number, None), self._calls[number]
        if begun is None:
            return
        with self._ctx.phase(_name(number, call)):
            for work in begun.issued.works:
                work.wait()
        wrong = self._wrong(begun)
        self._ctx.observe(_name(number, call), wrong and wrong + self._circumstances(begun))
        arenas = (*begun.tensors.inputs, *begun.tensors.outputs)
        self._free += [(number, one) for one in {id(one): one for one in arenas}.values()]

    def _wrong(self, begun: _Begun) -> str:
        tensors = begun.tensors
        if wrong := tensors.wrong():
            return wrong
        for one in () if tensors.truth.cell.what.in_place else tensors.inputs:
            if wrong := one.changed():
                return f"of an input {wrong}"
        return next((f"round a tensor {wrong}" for one in tensors.outputs if (wrong := one.touched())), "")

    def _circumstances(self, begun: _Begun) -> str:
        """Return what was under way when the call was issued, and what had its memory, as the end of a sentence."""

        def named(numbers: tuple[int, ...]) -> str:
            return some([f"call {one} ({_in_short(self._calls[one])})" for one in numbers], 3)

        told = f"; under way beside it were {named(begun.beside)}" if begun.beside else ""
        return told + (f"; its memory had been that of {named(begun.before)}" if begun.before else "")


def _in_short(call: Call) -> str:
    cell = call.cell
    return " ".join(filter(None, [cell.operation, cell.reduction, f"of {cell.dtype}, group {cell.group}"]))
