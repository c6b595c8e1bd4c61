"""Program `buffer_hooks`: a user's function synchronises the buffers in place of the broadcast from rank 0."""

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel.distributed import _BufferCommHookLocation

from conformance.models.integers import RankStep, with_integer_weights
from conformance.programs import RankContext, program, rank_step
from conformance.scenario import Scenario
from conformance.truth.expected import Raises

NUM_STEPS = 4


class Counting(nn.Module):
    """A layer, and two buffers that grow in every forward by what the rank adds; `seen` is what a forward found.

    All elements of `total`, `length` of them, are the same.
    """

    total: Tensor
    largest: Tensor

    def __init__(self, length: int) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("total", torch.zeros(length))
        self.register_buffer("largest", torch.zeros(3, dtype=torch.int64))
        self.seen: list[Any] = []

    def forward(self, inputs: Tensor, amount: int) -> Tensor:
        self.seen.append(self.contents())
        self.total += amount
        self.largest += amount
        output: Tensor = self.layer(inputs)
        return output

    def contents(self) -> list[list[float]]:
        return [self.total.unique().tolist(), self.largest.unique().tolist()]


def _build(scenario: Scenario) -> Any:
    return with_integer_weights(Counting(scenario.arguments.get("length", 2)), scenario.seed)


def _amount(turn: RankStep, micro: int) -> int:
    return 1 + turn.rank + 10 * turn.step + 100 * micro


def _backward(model: Any, turn: RankStep, micro: int) -> None:
    turn.backward(turn.loss(turn.forward(model, turn.inputs(4, 3, micro=micro), _amount(turn, micro)), micro=micro))


@program("buffer_hooks", invariants=("same_collectives", "nothing_in_flight", "leaves_no_trace"))
def buffer_hooks(ctx: RankContext) -> None:
    """Train `Counting` with a buffer hook that sums one buffer over the ranks and takes the maximum of the other.

    Arguments: `location`, "PRE_FORWARD", "POST_FORWARD" or "" (the default, which is POST_FORWARD); `futures`, whether
    the hook returns futures instead of waiting; `local_backwards`, under no_sync before each synchronised one; `length`
    of the summed buffer, 2, or more if its reduction must take time. Observes for each step what the forwards `found`,
    what the buffers hold `after` backward, gradients, the names that each call of the hook received, and
    `num_broadcasts` in forward. All ranks run it.
    """
    module = _build(ctx.scenario).to(ctx.device)
    model: Any = ctx.wrap(module)
    calls: list[list[str]] = []
    state = object()
    states: set[bool] = set()

    def hook(given: Any, buffers: Mapping[str, Tensor]) -> Any:
        states.add(given is state)
        calls.append(sorted(buffers))
        works = [
            dist.all_reduce(buffers["total"], group=ctx.process_group, async_op=True),
            dist.all_reduce(buffers["largest"], dist.ReduceOp.MAX, group=ctx.process_group, async_op=True),
        ]
        futures = [work.get_future() for work in works if work is not None]
        if ctx.arguments.get("futures"):
            return futures
        for future in futures:
            future.wait()
        return None

    location = ctx.arguments["location"]
    where = {"comm_hook_location": _BufferCommHookLocation[location]} if location else {}
    model._register_buffer_comm_hook(state, hook, **where)
    for index in range(NUM_STEPS):
        module.zero_grad()
        calls.clear()
        module.seen.clear()
        before = len(ctx.collectives())
        turn = rank_step(ctx, index)
        for micro in range(_num_backwards(ctx.scenario)):
            is_last = micro == _num_backwards(ctx.scenario) - 1
            with contextlib.nullcontext() if is_last else ctx.no_sync(model):
                _backward(model, turn, micro)
        ctx.observe(f"step{index}/after", module.contents())
        ctx.observe(f"step{index}/found", module.seen)
        ctx.observe_gradients(f"step{index}", module)
        ctx.observe(f"step{index}/calls", calls)
        broadcasts = [each for each in ctx.collectives()[before:] if each.op == "broadcast" and each.phase == "forward"]
        # Earlier forwards may have broadcast the order of the gradients.
        ctx.observe(f"step{index}/num_broadcasts", len(broadcasts) if index == NUM_STEPS - 1 else 0)
    ctx.observe("state", states == {True})


def _num_backwards(scenario: Scenario) -> int:
    return 1 + int(scenario.arguments.get("local_backwards", 0))


@program("buffer_hook_misuse", invariants=("leaves_no_trace",))
def buffer_hook_misuse(ctx: RankContext) -> None:
    """Register something that is no function; observes `raised`. All ranks run it."""
    model: Any = ctx.wrap(_build(ctx.scenario).to(ctx.device))
    with ctx.catching("raised", must=Raises(("TypeError", "AssertionError"), ("callable",))):
        model._register_buffer_comm_hook(None, "no function")
