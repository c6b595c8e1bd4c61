"""Programs about tensors that overlap, that send nothing, and that autograd knows of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from conformance.checkers.explanation import shorten
from conformance.observation import Facts
from conformance.programs.rank_context import RankContext
from conformance.programs.registry import program
from conformance.scenario import Scenario
from conformance.truth.expected import Right

_NAME = "all_gather into slots that overlap by half"


@program("overlapping_outputs", invariants=(), without_ddp=True)
def overlapping_outputs(ctx: RankContext) -> None:
    """Gather into slots that overlap; observes what is neither an error nor some rank's value. All ranks run it."""
    memory = torch.full((2 * ctx.world_size + 6,), -1.0, device=ctx.device)
    slots = [memory[2 + 2 * rank : 6 + 2 * rank] for rank in range(ctx.world_size)]
    mine = torch.full((4,), float(ctx.rank + 1), device=ctx.device)
    ctx.observe(_NAME, _overlapping(ctx, slots, mine, memory))


@overlapping_outputs.expects
def _overlapping_outputs(scenario: Scenario) -> Mapping[int, Facts]:
    return {rank: {_NAME: Right()} for rank in range(scenario.world_size)}


def _overlapping(ctx: RankContext, slots: list[Tensor], mine: Tensor, memory: Tensor) -> str:
    try:
        dist.all_gather(slots, mine, group=ctx.process_group)
    except Exception as error:
        return "" if shorten(str(error)) else "the error says nothing"
    size = ctx.world_size
    for place, value in enumerate(memory.tolist()):
        whose = {float(rank + 1) for rank in range(size) if 2 + 2 * rank <= place < 6 + 2 * rank} or {-1.0}
        if value not in whose:
            return f"element {place} of the memory is {value:g}, expected one of {sorted(whose)}"
    return ""


#: Who sends to whom: nobody from rank 0, nobody to rank 0, nobody at all.
_PATTERNS: Mapping[str, Callable[[int, int], int]] = {
    "rank 0 sends nothing": lambda source, target: 0 if source == 0 else 2,
    "rank 0 receives nothing": lambda source, target: 0 if target == 0 else 3,
    "nobody sends anything": lambda source, target: 0,
    "only the last rank sends to rank 0": lambda source, target: 5 if target == 0 < source else 0,
}


@program("empty_splits", invariants=(), without_ddp=True)
def empty_splits(ctx: RankContext) -> None:
    """Exchange parts of which many are empty; observes what is wrong with what was received. All ranks run it."""
    size = ctx.world_size
    for name, length in _PATTERNS.items():
        with ctx.phase(f"all_to_all_single, {name}"):
            sent = [torch.full((length(ctx.rank, target),), 10.0 * ctx.rank + target) for target in range(size)]
            received = [length(source, ctx.rank) for source in range(size)]
            output = torch.full((sum(received),), -1.0, device=ctx.device)
            dist.all_to_all_single(
                output, torch.cat(sent).to(ctx.device), received, [len(part) for part in sent], group=ctx.process_group
            )
            expected = [10.0 * source + ctx.rank for source in range(size) for _ in range(received[source])]
            wrong = f"got {output.tolist()}, expected {expected}" if output.tolist() != expected else ""
            ctx.observe(f"all_to_all_single, {name}", wrong)


@empty_splits.expects
def _empty_splits(scenario: Scenario) -> Mapping[int, Facts]:
    names = [f"all_to_all_single, {name}" for name in _PATTERNS]
    return {rank: dict.fromkeys(names, Right()) for rank in range(scenario.world_size)}


def _inference(tensor: Tensor) -> Tensor:
    with torch.inference_mode():
        return tensor.clone()


@contextmanager
def _float64_by_default() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


#: What makes a tensor of each kind, and in which of torch's modes collectives get it.
_KINDS: Mapping[str, tuple[Callable[[Tensor], Tensor], Callable[[], AbstractContextManager[Any]]]] = {
    "a Parameter": (nn.Parameter, torch.no_grad),
    "a Parameter, with gradients enabled": (nn.Parameter, nullcontext),
    "a tensor that requires grad": (Tensor.requires_grad_, torch.no_grad),
    "a tensor that requires grad, with gradients enabled": (Tensor.requires_grad_, nullcontext),
    "an inference tensor": (_inference, torch.inference_mode),
    "a tensor, with float64 as the default dtype": (_as_it_is, _float64_by_default),
    "a tensor, under autocast of the CPU": (_as_it_is, lambda: torch.autocast("cpu", torch.bfloat16)),
    "a tensor, in anomaly mode": (_as_it_is, lambda: torch.autograd.detect_anomaly(check_nan=False)),
}


@program("kinds_of_tensors", invariants=(), without_ddp=True)
def kinds_of_tensors(ctx: RankContext) -> None:
    """Try tensors that autograd knows of, and several modes of torch; observes what is wrong. All ranks run it."""
    for name, (make, mode) in _KINDS.items():
        for operation in _operations(name):
            with ctx.phase(f"{operation} of {name}"), mode():
                ctx.observe(f"{operation} of {name}", _tried(ctx, operation, make))


@kinds_of_tensors.expects
def _kinds_of_tensors(scenario: Scenario) -> Mapping[int, Facts]:
    names = [f"{operation} of {name}" for name in _KINDS for operation in _operations(name)]
    return {rank: dict.fromkeys(names, Right()) for rank in range(scenario.world_size)}


def _operations(name: str) -> tuple[str, ...]:
    """Return what is tried: gloo's all_gather copies into its outputs, which autograd forbids of leaves."""
    return ("all_reduce", "broadcast") if "gradients enabled" in name else ("all_reduce", "broadcast", "all_gather")


def _tried(ctx: RankContext, operation: str, make: Callable[[Tensor], Tensor]) -> str:
    """Return what is wrong with the result of an operation of such tensors, as a clause."""
    size = ctx.world_size
    tensor = make(torch.full((5,), ctx.rank + 1.0, dtype=torch.float32, device=ctx.device))
    if operation == "all_reduce":
        work = dist.all_reduce(tensor, group=ctx.process_group, async_op=True)
        if work is not None:
            work.wait()
        return _unlike(tensor, float(sum(range(1, size + 1))))
    if operation == "broadcast":
        dist.broadcast(tensor, group_src=size - 1, group=ctx.process_group)
        return _unlike(tensor, float(size))
    slots = [make(torch.zeros(5, dtype=torch.float32, device=ctx.device)) for _ in range(size)]
    dist.all_gather(slots, tensor, group=ctx.process_group)
    return next(filter(None, (_unlike(slot, rank + 1.0) for rank, slot in enumerate(slots))), "")


def _unlike(tensor: Tensor, value: float) -> str:
    got = tensor.detach().tolist()
    return "" if got == [value] * len(got) else f"got {got}, expected {value:g} everywhere"
