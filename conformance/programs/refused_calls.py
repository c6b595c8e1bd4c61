"""Program `refused_calls`: calls that a backend, or torch for it, must refuse with an error, and what works afterwards.

All ranks make the same mistaken call, so that none waits for another; or one rank alone makes it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from conformance.observation import Facts
from conformance.programs.operations.calls import named
from conformance.programs.operations.judging import wrong_sum
from conformance.programs.rank_context import RankContext
from conformance.programs.registry import program_without_truth
from conformance.scenario import Scenario
from conformance.truth.expected import Raises, Right

_OF_REALS = ("MAX", "MIN", "PRODUCT", "BAND", "BOR", "BXOR")


@dataclass(frozen=True)
class Mistake:
    """A mistaken call: its name in facts, the call, and words of which the error must mention each."""

    name: str
    call: Callable[[RankContext], Any]
    mentions: tuple[str | tuple[str, ...], ...] = ()


@program_without_truth("refused_calls", invariants=(), without_ddp=True, misuses=True)
def refused_calls(ctx: RankContext) -> None:
    """Make the mistaken calls of the scenario's argument `case`; observes each error, and a sum after it.

    All ranks run it. With `alone` only the last one makes the calls.
    """
    refused = ""
    for mistake in CASES[str(ctx.arguments["case"])]:
        if ctx.rank in _callers(ctx.scenario):
            with ctx.phase(mistake.name + refused), ctx.catching(mistake.name):
                works = mistake.call(ctx)
                for work in works if isinstance(works, list) else [works]:
                    if isinstance(work, dist.Work):
                        work.wait()
        refused = f", after {mistake.name}"
        with ctx.phase(f"all_reduce{refused}"):
            ctx.observe(f"all_reduce after {mistake.name}", wrong_sum(ctx.process_group, ctx.device))


@refused_calls.expects
def _refused_calls(scenario: Scenario) -> Mapping[int, Facts]:
    mistakes = CASES[str(scenario.arguments["case"])]
    sums = {f"all_reduce after {mistake.name}": Right() for mistake in mistakes}
    errors = {mistake.name: Raises(("Exception",), mistake.mentions) for mistake in mistakes}
    callers = _callers(scenario)
    return {rank: {**(errors if rank in callers else {}), **sums} for rank in range(scenario.world_size)}


def _callers(scenario: Scenario) -> range:
    return range(scenario.world_size - 1 if scenario.arguments.get("alone") else 0, scenario.world_size)


def _ones(ctx: RankContext, length: int = 4, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(length, device=ctx.device).to(dtype)


def _all_reduce(op: str, dtype: torch.dtype) -> Callable[[RankContext], Any]:
    return lambda ctx: dist.all_reduce(_ones(ctx, dtype=dtype), getattr(dist.ReduceOp, op), group=ctx.process_group)


def _wrong_lists(ctx: RankContext, number: int) -> list[Tensor]:
    return [_ones(ctx) for _ in range(number)]


def _split(received: int, sent: int, num_in: int = 1, num_out: int = 1, more: tuple[int, int] = (0, 0)) -> Any:
    """Return an all_to_all_single of so many elements for each rank, and of `more` in its input and output."""

    def call(ctx: RankContext) -> Any:
        size = ctx.world_size
        has, room = size * num_in + more[0], size * num_out + more[1]
        return _split_by(ctx, [received] * size, [sent] * size, has, room)

    return call


def _split_by(ctx: RankContext, received: list[int], sent: list[int], num_in: int, num_out: int) -> Any:
    return dist.all_to_all_single(_ones(ctx, num_out), _ones(ctx, num_in), received, sent, group=ctx.process_group)


def _split_rows(ctx: RankContext, splits: list[int], rows: int) -> Any:
    sent = _ones(ctx, rows * ctx.world_size).view(rows, ctx.world_size)
    return dist.all_to_all_single(torch.empty_like(sent), sent, splits, splits, group=ctx.process_group)


def _negative(ctx: RankContext) -> Any:
    splits = [-1, 3, *[1] * (ctx.world_size - 2)]
    return _split_by(ctx, splits, splits, ctx.world_size, ctx.world_size)


def _batch(operations: Any) -> Any:
    return dist.batch_isend_irecv(operations)


def _gather_single(ctx: RankContext, num_out: int, dtype: torch.dtype = torch.float32) -> Any:
    call = named(dist, "all_gather_single", "all_gather_into_tensor")
    return call(_ones(ctx, num_out, dtype), _ones(ctx), group=ctx.process_group)


def _all_to_all(*, into: int = 0, of: int = 0) -> Callable[[RankContext], Any]:
    return lambda ctx: dist.all_to_all(
        _wrong_lists(ctx, ctx.world_size + into), _wrong_lists(ctx, ctx.world_size + of), group=ctx.process_group
    )


# The last rank is the root, which alone passes a list.


def _scatter(*, more: int = 0, length: int = 4, dtype: torch.dtype = torch.float32) -> Callable[[RankContext], Any]:
    def call(ctx: RankContext) -> Any:
        tensors = [_ones(ctx, length, dtype) for _ in range(ctx.world_size + more)]
        return dist.scatter(_ones(ctx), tensors, group_src=ctx.world_size - 1, group=ctx.process_group)

    return call


def _gather(*, more: int = 0, length: int = 4, dtype: torch.dtype = torch.float32) -> Callable[[RankContext], Any]:
    def call(ctx: RankContext) -> Any:
        tensors = [_ones(ctx, length, dtype) for _ in range(ctx.world_size + more)]
        return dist.gather(_ones(ctx), tensors, group_dst=ctx.world_size - 1, group=ctx.process_group)

    return call


CASES: Mapping[str, tuple[Mistake, ...]] = {
    "avg-of-bool": (Mistake("all_reduce AVG of bool", _all_reduce("AVG", torch.bool)),),
    "order-of-complex": tuple(
        Mistake(f"all_reduce {op} of {dtype}".replace("torch.", ""), _all_reduce(op, dtype), (op,))
        for op in _OF_REALS
        for dtype in (torch.complex64, torch.complex128)
    ),
    "bitwise-of-floats": tuple(
        Mistake(f"all_reduce {op} of {dtype}".replace("torch.", ""), _all_reduce(op, dtype))
        for op in ("BAND", "BOR", "BXOR")
        for dtype in (torch.float32, torch.float64)
    ),
    "mixed-dtypes": (
        Mistake(
            "all_gather of int64 into lists of float32",
            lambda ctx: dist.all_gather(
                _wrong_lists(ctx, ctx.world_size), _ones(ctx, dtype=torch.int64), group=ctx.process_group
            ),
        ),
        Mistake(
            "all_gather of float32 into float32 and float64",
            lambda ctx: dist.all_gather(
                [_ones(ctx, dtype=torch.float64), *_wrong_lists(ctx, ctx.world_size - 1)], _ones(ctx),
                group=ctx.process_group,
            ),
        ),
    ),
    "wrong-splits": (
        Mistake("all_to_all_single, more sent than there is", _split(1, 2)),
        Mistake("all_to_all_single, more received than there is room for", _split(2, 1)),
        Mistake("all_to_all_single, as much received as is sent, but more than the input has", _split(2, 2, num_out=2)),
        Mistake("all_to_all_single, as much received as is sent, but more than the output has room for",
                _split(2, 2, num_in=2)),
        Mistake("all_to_all_single, splits that leave out the end of the input", _split(1, 1, more=(1, 0))),
        Mistake("all_to_all_single, splits that leave out the end of the output", _split(1, 1, more=(0, 1))),
        Mistake("all_to_all_single, splits for fewer ranks than there are",
                lambda ctx: _split_by(ctx, [1], [1], ctx.world_size, ctx.world_size)),
        Mistake("all_to_all_single of a size that cannot be divided",
                lambda ctx: _split_by(ctx, [], [], ctx.world_size + 1, ctx.world_size + 1)),
    ),
    "splits-of-elements": (
        Mistake("all_to_all_single of rows that cannot be divided, though their elements can",
                lambda ctx: _split_rows(ctx, [], ctx.world_size + 1)),
        Mistake("all_to_all_single with splits that count elements of rows",
                lambda ctx: _split_rows(ctx, [ctx.world_size] * ctx.world_size, ctx.world_size)),
    ),
    "negative-splits": (
        Mistake("all_to_all_single with a split below zero, which others make good", _negative),
    ),
    "wrong-sizes": (
        Mistake("all_gather into a list that is too short",
                lambda ctx: dist.all_gather(_wrong_lists(ctx, ctx.world_size - 1), _ones(ctx),
                                            group=ctx.process_group)),
        Mistake("all_gather into a list that is too long",
                lambda ctx: dist.all_gather(_wrong_lists(ctx, ctx.world_size + 1), _ones(ctx),
                                            group=ctx.process_group)),
        Mistake("all_gather into tensors that are too small",
                lambda ctx: dist.all_gather([_ones(ctx, 3) for _ in range(ctx.world_size)], _ones(ctx),
                                            group=ctx.process_group)),
        Mistake("broadcast from a rank that there is not",
                lambda ctx: dist.broadcast(_ones(ctx), group_src=ctx.world_size, group=ctx.process_group)),
        Mistake("broadcast with both kinds of root",
                lambda ctx: dist.broadcast(_ones(ctx), src=0, group_src=0, group=ctx.process_group)),
        Mistake("broadcast without a root",
                lambda ctx: dist.broadcast(_ones(ctx), group=ctx.process_group)),
    ),
    "wrong-single-sizes": (
        Mistake("all_gather_single into too small a tensor",
                lambda ctx: _gather_single(ctx, 4 * ctx.world_size - 1)),
        Mistake("all_gather_single into too large a tensor",
                lambda ctx: _gather_single(ctx, 4 * ctx.world_size + 1)),
        Mistake("all_gather_single into another dtype",
                lambda ctx: _gather_single(ctx, 4 * ctx.world_size, torch.float64)),
    ),
    "wrong-scatters": (
        Mistake("reduce_scatter of a list that is too short",
                lambda ctx: dist.reduce_scatter(_ones(ctx), _wrong_lists(ctx, ctx.world_size - 1),
                                                group=ctx.process_group)),
        Mistake("reduce_scatter of a list that is too long",
                lambda ctx: dist.reduce_scatter(_ones(ctx), _wrong_lists(ctx, ctx.world_size + 1),
                                                group=ctx.process_group)),
        Mistake("reduce_scatter_single of a size that does not fit",
                lambda ctx: named(dist, "reduce_scatter_single", "reduce_scatter_tensor")(
                    _ones(ctx), _ones(ctx, 4 * ctx.world_size - 1), group=ctx.process_group)),
    ),
    "wrong-all-to-alls": (
        Mistake("all_to_all of a list that is too short", _all_to_all(of=-1)),
        Mistake("all_to_all of a list that is too long", _all_to_all(of=1)),
        Mistake("all_to_all into a list that is too short", _all_to_all(into=-1)),
        Mistake("all_to_all into a list that is too long", _all_to_all(into=1)),
    ),
    "wrong-lists-of-roots": (
        Mistake("scatter of a list that is too short", _scatter(more=-1)),
        Mistake("scatter of a list that is too long", _scatter(more=1)),
        Mistake("scatter of tensors that are larger than the output", _scatter(length=5)),
        Mistake("scatter of float64 into float32", _scatter(dtype=torch.float64)),
        Mistake("gather into a list that is too short", _gather(more=-1)),
        Mistake("gather into a list that is too long", _gather(more=1)),
        Mistake("gather into tensors that are smaller than the input", _gather(length=3)),
        Mistake("gather of float32 into float64", _gather(dtype=torch.float64)),
    ),
    "wrong-batches": (
        Mistake("batch_isend_irecv of tensors", lambda ctx: _batch([_ones(ctx)]), ("P2POp",)),
        Mistake("batch_isend_irecv of something else than a list", lambda ctx: _batch((_ones(ctx),)), ("P2POp",)),
    ),
    "unknown-ranks": (
        Mistake("new_group of a rank that there is not",
                lambda ctx: dist.new_group([0, ctx.world_size]), (("rank", "range"),)),
        Mistake("new_group that names a rank twice", lambda ctx: dist.new_group([0, 0]), ("duplicate",)),
    ),
}  # fmt: skip
