"""Program `operation_cells`: issues operations of a backend, a `Cell` at a time; each rank judges its results."""

import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from conformance.checkers.explanation import shorten
from conformance.observation import Facts
from conformance.programs.judged import tried
from conformance.programs.operations.calls import device_backend, issue, lacked_by_torch, wait_for_device, wait_tensors
from conformance.programs.operations.cell import Cell
from conformance.programs.operations.data import dtype_of
from conformance.programs.operations.description import Blocks, Place
from conformance.programs.operations.generators import Generators
from conformance.programs.operations.groups import Groups, members_of, whose
from conformance.programs.operations.judging import Truth, without_reading, wrong_outputs, wrong_sum
from conformance.programs.operations.kinds import KINDS
from conformance.programs.operations.lifetimes import OF_FUTURES, Patience, complete
from conformance.programs.operations.memory import WITH_OUTPUTS, Arena, same_bits
from conformance.programs.operations.neighbours import End, Neighbours, all_reduces, nothing
from conformance.programs.operations.pairs import drawn
from conformance.programs.operations.store_messages import all_texts, introduce
from conformance.programs.rank_context import RankContext, Unsupported
from conformance.programs.registry import program_without_truth
from conformance.scenario import Scenario
from conformance.truth.expected import Right

#: The delay of a late rank.
_LATE_S = 0.02
#: The timeout of a group in which only some ranks may refuse an operation, and the others wait for them.
_TIMEOUT = timedelta(seconds=1.5)
#: How many collectives of the same group are in flight before the cell's own.
_IN_FLIGHT = 20
_NUM_NEIGHBOURS = 5

INPUTS = "inputs after each operation"
SURROUNDINGS = "memory round each tensor"
DRAWN = "random generators after all operations"
AFTERWARDS = "the group after what every rank refused"
#: The fact of a cell that needs an undeclared capability, in a scenario that has other cells, too.
UNDECLARED = "not tried: undeclared"


@program_without_truth(
    "operation_cells",
    invariants=(),
    speaks_for={INPUTS: ("VAL-13",), SURROUNDINGS: ("VAL-14",), DRAWN: ("VAL-20",), AFTERWARDS: ("ERR-03",)},
    without_ddp=True,
)
def operation_cells(ctx: RankContext) -> None:
    """Try the scenario's `cells`; observes for each what is wrong with its results, and of all what else was changed.

    All ranks run it; a rank that is no member of a cell's group leaves the cell out. With `has_undeclared` it leaves
    out cells that need an undeclared capability, and raises `Unsupported` if all do. In place of `cells`, the argument
    `drawn` has a seed and the number of cells to draw.
    """
    declares_all = not ctx.arguments.get("has_undeclared")
    if not (declares_all or any(cell.needs <= ctx.declared for cell in cells_of(ctx.scenario))):
        raise Unsupported("the backend declares nothing that any of these cells needs")
    if reason := next(filter(None, map(lacked_by_torch, cells_of(ctx.scenario))), ""):
        raise Unsupported(reason)
    refusable = bool(ctx.arguments.get("refusable"))
    groups = Groups(ctx.process_group, ctx.rank, ctx.world_size, ctx.device, _TIMEOUT if refusable else None)
    changed: dict[str, str] = {}
    patience = Patience()
    num_broken = 0
    introduce()
    generators = Generators()
    for cell in cells_of(ctx.scenario):
        if refusable:
            wrong, is_broken = _right_or_refused(ctx, cell, groups, f"twin#{num_broken}", changed, patience)
            ctx.observe(cell.describe(), wrong)
            num_broken += is_broken
            continue
        group = _group(ctx, groups, cell.group)
        beside = f"{'twin' if cell.group == 'world' else cell.group}#2"  # another group of the same members
        neighbour = _group(ctx, groups, beside) if cell.neighbour != "none" else None
        members = members_of(cell.group, ctx.rank, ctx.world_size)
        if ctx.rank not in members:
            continue
        if not (declares_all or cell.needs <= ctx.declared):
            ctx.observe(cell.describe(), UNDECLARED)
            continue
        trial = _Trial(ctx, cell, groups, group, neighbour, changed, patience)
        with ctx.phase(cell.describe()), KINDS[cell.kind].mode():
            wrong = tried(ctx, cell.describe(), members, trial.run)
        ctx.observe(cell.describe(), wrong)
    drawn = generators.drawn()
    with ctx.phase("destroy_process_group, after all operations"):
        groups.destroy()
    ctx.observe(DRAWN, drawn)
    ctx.observe(INPUTS, changed.get(INPUTS, ""))
    ctx.observe(SURROUNDINGS, changed.get(SURROUNDINGS, ""))
    if refusable:
        ctx.observe(AFTERWARDS, changed.get(AFTERWARDS, ""))


@operation_cells.expects
def _operation_cells(scenario: Scenario) -> Mapping[int, Facts]:
    cells = cells_of(scenario)
    right = Right(UNDECLARED if scenario.arguments.get("has_undeclared") else "")
    others = [INPUTS, SURROUNDINGS, DRAWN, *([AFTERWARDS] if scenario.arguments.get("refusable") else [])]
    return {
        rank: {
            **{cell.describe(): right for cell in cells if rank in members_of(cell.group, rank, scenario.world_size)},
            **{name: Right() for name in others},
        }
        for rank in range(scenario.world_size)
    }


def _right_or_refused(
    ctx: RankContext, cell: Cell, groups: Groups, name: str, changed: dict[str, str], patience: Patience
) -> tuple[str, bool]:
    """Try a cell that a backend may refuse; return what is wrong on this rank, and whether the group may be broken.

    Where only some ranks refuse, each other rank must get right values or an error, such as that of the timeout. Where
    all refuse, nothing has begun, and the group must go on working. An error that comes as late as the timeout is no
    refusal: on a busy machine an operation that has begun may end so.
    """
    group = _group(ctx, groups, name)
    with ctx.phase(cell.describe()):
        began = time.monotonic()
        try:
            wrong, said = _Trial(ctx, cell, groups, group, None, changed, patience).run(), "returned"
        except Exception as error:
            text = shorten(str(error))
            wrong = "" if text else f"raised {type(error).__name__} without a word"
            said = "refused" if time.monotonic() - began < _TIMEOUT.total_seconds() else "timed out"
        everybody = set(all_texts(cell.describe(), said, ctx.rank, range(ctx.world_size)))
    if everybody != {"refused"}:
        return wrong, everybody != {"returned"}
    with ctx.phase(f"all_reduce after {cell.describe()} was refused"):
        broken = _broken(ctx, group)
    if broken:
        changed.setdefault(AFTERWARDS, f"after every rank refused {cell.describe()}, {broken}")
    return wrong, any(all_texts(AFTERWARDS, broken, ctx.rank, range(ctx.world_size)))


def _broken(ctx: RankContext, group: Any) -> str:
    """Return what is wrong with a sum over the group, wrong values or an error, as a clause."""
    try:
        return wrong_sum(group, ctx.device, timedelta(seconds=ctx.scenario.deadline_s))
    except Exception as error:
        return f"all_reduce raised {type(error).__name__}: {shorten(str(error))}"


def _group(ctx: RankContext, groups: Groups, name: str) -> Any:
    """Return that group; the phase names it, should a rank hang or raise while the group is made."""
    with ctx.phase(f"new_group of {whose(name)}"):
        return groups.get(name)


def cells_of(scenario: Scenario) -> list[Cell]:
    """Return the cells of a scenario, in the order in which all ranks try them."""
    given = scenario.arguments
    return [Cell.from_json(one) for one in given["cells"]] if "cells" in given else list(drawn(**given["drawn"]))


class _Written:
    """Outputs that the caller overwrites after the first `wait`; the second must not write into them."""

    def __init__(self, outputs: list[torch.Tensor]) -> None:
        self._outputs = outputs
        self._before: list[torch.Tensor] = []

    def overwrite(self) -> None:
        self._before = [output.clone() for output in self._outputs]
        for output in self._outputs:
            output.copy_(torch.zeros_like(output))

    def wrong(self) -> str:
        """Return what has overwritten them since, as a clause, empty if nothing; restore their values."""
        if not self._before:
            return ""
        is_wrong = not all(same_bits(output, torch.zeros_like(output)) for output in self._outputs)
        for output, before in zip(self._outputs, self._before, strict=True):
            output.copy_(before)
        return "a second wait() wrote over what the caller had put there since the first" if is_wrong else ""


class _Trial:
    def __init__(
        self, ctx: RankContext, cell: Cell, groups: Groups, group: Any, neighbour: Any, changed: dict[str, str],
        patience: Patience,
    ) -> None:  # fmt: skip
        self._patience = patience
        self._ctx, self._cell, self._group, self._neighbour = ctx, cell, group, neighbour
        self._groups, self._device, self._changed = groups, ctx.device, changed
        size = group.size()
        self._place = Place(group.rank(), size, cell.root % size, cell.tensors, cell.form == "one-empty")

    def run(self) -> str:
        """Return what is wrong, as a clause; empty if nothing is.

        A rank with a wrong value goes on, since ranks without one wait for it in the next round.
        """
        found = ""
        kept: list[tuple[Truth, list[torch.Tensor], list[torch.Tensor]]] = []
        arenas: tuple[list[Arena], list[Arena]] | None = None
        for turn in range(self._cell.turns):
            truth = Truth(self._cell, replace(self._place, turn=turn))
            arenas = self._filled_anew(truth, *arenas) if arenas and self._cell.reuses else self._arenas(truth)
            inputs, outputs = arenas
            results, wrong_work, wrong_beside = self._issue_and_wait(truth, inputs, outputs)
            wrong = self._wrong(truth, results) or wrong_work or wrong_beside
            if not found and wrong:
                found = (f"in round {turn}, " if turn else "") + wrong
            if wrong_work:
                return found
            keeps = turn < self._cell.turns - 1 and not found and not self._cell.reuses
            if keeps:
                kept.append((truth, results, [result.clone() for result in results]))
            self._write_over(inputs, outputs, keeps=keeps)
        if found:
            return found
        for truth, results, then in kept:
            if not all(map(same_bits, results, then)) and (wrong := self._wrong(truth, results)):
                return f"the result of round {truth.turn}, kept, changed later: {wrong}"
        return ""

    def _issue_and_wait(
        self, truth: Truth, inputs: list[Arena], outputs: list[Arena]
    ) -> tuple[list[torch.Tensor], str, str]:
        cell, place = self._cell, truth.place
        kind = KINDS[cell.kind]
        given = [kind.make(arena.tensor) for arena in inputs]
        room = [kind.make(arena.tensor) if kind.of_outputs or inputs is outputs else arena.tensor for arena in outputs]
        if cell.lifetime == "inputs-dropped" and not cell.what.in_place:
            given = [tensor.clone() for tensor in given]
        if cell.peer == "late" and place.rank == cell.numel % place.size:  # some rank, and in other cells another
            time.sleep(_LATE_S)
        with self._neighbours(truth) as beside:
            issued = issue(cell, self._group, self._owner(), place, given, room)
            del given, room
            if cell.lifetime == "inputs-dropped":
                self._reuse_memory(inputs)
            first = _Written(list(issued.outputs))
            how = (cell.lifetime, self._barrier, self._patience, first.overwrite)
            wrong_work = complete(issued, *how) if issued.works else ""
            written_over = first.wrong()
            if cell.lifetime == "dropped" and not issued.works:
                self._barrier()
        results = list(issued.outputs)
        if cell.returns_new:
            results = wait_tensors(results)
        self._look_round(inputs, outputs)
        return results, wrong_work or written_over, beside.wrong

    def _write_over(self, inputs: list[Arena], outputs: list[Arena], *, keeps: bool) -> None:
        """Overwrite the tensors, as a caller may; with `keeps` not the results."""
        if self._cell.lifetime == "dropped" and self._cell.what.of_pairs:
            return  # a barrier waits for no message
        if self._cell.lifetime in OF_FUTURES:
            wait_for_device()  # a future without a tensor, as of a rank that only sends in a gather, orders no stream
        shares = self._cell.in_place or self._cell.what.in_place or self._cell.reads == WITH_OUTPUTS
        if keeps and shares:
            return
        for one in inputs if keeps else [*inputs, *outputs]:
            one.write_over()

    def _arenas(self, truth: Truth) -> tuple[list[Arena], list[Arena]]:
        """Return inputs with their data, and outputs; the same ones where the operation works in place."""
        cell, what, place = self._cell, self._cell.what, truth.place
        dtype = dtype_of(cell.dtype)

        def arenas(tensors: tuple[Blocks, ...], layout: str) -> list[Arena]:
            return Arena.list_of([truth.shape(blocks) for blocks in tensors], dtype, layout, self._device)

        if cell.reads == WITH_OUTPUTS:
            both = arenas((*what.inputs(place), *what.outputs(place)), "in-one-piece")
            inputs, outputs = both[: len(what.inputs(place))], both[len(what.inputs(place)) :]
        else:
            inputs, outputs = arenas(what.inputs(place), cell.reads), []
        for one, blocks in zip(inputs, what.inputs(place), strict=True):
            one.fill(truth.sent(blocks).to(self._device))
        if what.in_place and not cell.returns_new:
            # A rank that passes nothing has room for what it gets.
            return inputs, inputs or arenas(what.outputs(place), cell.writes)
        if what.in_place and not inputs:  # the functional broadcast takes a tensor on every rank
            inputs = arenas(what.outputs(place), cell.reads)
        outputs = outputs or arenas(what.outputs(place), cell.writes)
        return (inputs, outputs) if not cell.in_place else self._overlaid(inputs, outputs)

    def _filled_anew(self, truth: Truth, inputs: list[Arena], outputs: list[Arena]) -> tuple[list[Arena], list[Arena]]:
        for one in (*inputs, *outputs):
            one.renew()
        for one, blocks in zip(inputs, self._cell.what.inputs(truth.place), strict=False):  # some pass nothing
            one.fill(truth.sent(blocks).to(self._device))
        return inputs, outputs

    def _overlaid(self, inputs: list[Arena], outputs: list[Arena]) -> tuple[list[Arena], list[Arena]]:
        """Return inputs and outputs that share the memory of the rank's own part."""
        what, rank = self._cell.what, self._place.rank
        if what.rooted and not self._place.is_root:
            return inputs, outputs
        parts_are_inputs = not what.reduces and what.name != "scatter"
        parts, wholes = (inputs, outputs) if parts_are_inputs else (outputs, inputs)
        overlays = []
        for part, whole in zip(parts, wholes if what.single else [wholes[rank]], strict=True):
            rows = part.tensor.shape[0] if what.single else 0
            shared = whole.tensor.narrow(0, rank * rows, rows) if what.single else whole.tensor
            if parts_are_inputs:
                shared.copy_(part.tensor)
            overlays.append(Arena(shared, part.memory, part.before))
        return (overlays, outputs) if parts_are_inputs else (inputs, overlays)

    def _owner(self) -> Any:
        if self._cell.path == "detail":
            if not isinstance(device_backend(self._group, self._device), c10d.Backend):
                self._ctx.unsupported("torch wraps backends written in C++ only")
            return self._groups.wrapper(self._cell.group)
        return device_backend(self._group, self._device) if self._cell.path == "backend" else None

    def _reuse_memory(self, inputs: list[Arena]) -> None:
        """Allocate and fill as much memory as the inputs had, so that a late read of them returns other values."""
        for one in [] if self._cell.what.in_place else inputs:
            for _ in range(3):
                torch.full_like(one.memory, 0x5A)

    def _look_round(self, inputs: list[Arena], outputs: list[Arena]) -> None:
        if self._cell.in_place:
            return
        writes_inputs = self._cell.what.in_place and not self._cell.returns_new
        for one in [] if writes_inputs else inputs:
            if wrong := one.changed():
                self._changed.setdefault(INPUTS, f"after {self._cell.describe()}, of an input {wrong}")
        for one in outputs if writes_inputs else [*inputs, *outputs]:
            if wrong := one.touched():
                self._changed.setdefault(SURROUNDINGS, f"after {self._cell.describe()}, {wrong}")

    def _wrong(self, truth: Truth, results: list[torch.Tensor]) -> str:
        wrong = wrong_outputs(truth, results)
        # A barrier waits for no message: a receive before it may match a message that is sent after it.
        may_come_later = self._cell.lifetime == "dropped" and self._cell.operation == "send_recv"
        if wrong and may_come_later and self._patience.until(lambda: not wrong_outputs(truth, results)):
            return ""
        if wrong and self._patience.comes_late(lambda: not wrong_outputs(truth, results)):
            early = "it or the barrier after it" if self._cell.lifetime == "dropped" else "it"
            return f"{without_reading(wrong)}; the right values came later, so that {early} counted as done too early"
        return wrong

    def _barrier(self) -> None:
        dist.barrier(group=self._group)

    def _neighbours(self, truth: Truth) -> Neighbours:
        """Return a context in which other operations are in flight, and which judges them."""
        neighbour = self._cell.neighbour
        if neighbour == "none":
            return Neighbours(nothing)
        group = self._group if neighbour.endswith("in-flight") else self._neighbour
        in_thread = neighbour.endswith("thread")
        if neighbour.startswith("alike"):
            other = truth.beside()
            trial = _Trial(self._ctx, other.cell, self._groups, group, None, self._changed, self._patience)
            return Neighbours(lambda: trial.begin(other), in_thread=in_thread)
        number = _IN_FLIGHT if neighbour == "in-flight" else _NUM_NEIGHBOURS
        return Neighbours(all_reduces(group, self._device, number), in_thread=in_thread)

    def begin(self, truth: Truth) -> End:
        """Issue the cell's operation; return a function that waits for it and returns what is wrong with it."""
        inputs, outputs = self._arenas(truth)
        given, room = [arena.tensor for arena in inputs], [arena.tensor for arena in outputs]
        issued = issue(self._cell, self._group, self._owner(), truth.place, given, room)

        def end() -> str:
            wrong_work = complete(issued, self._cell.lifetime, self._barrier, self._patience)
            self._look_round(inputs, outputs)
            wrong = self._wrong(truth, list(issued.outputs)) or wrong_work
            return wrong and f"of the {self._cell.operation} beside it, which began before it, {wrong}"

        return end
