"""Program `failing_peer`: the last rank fails in the third step, and the others wait for it."""

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

from conformance.errors import instance, present
from conformance.models.bomb import Bomb
from conformance.models.integers import RankStep, with_integer_weights
from conformance.observation import Facts
from conformance.programs import RankContext, program, rank_step
from conformance.programs.bare_group import bare_group
from conformance.programs.join_context import joining
from conformance.scenario import Scenario
from conformance.truth.expected import Raises

#: The step in which the last rank fails, counted from 0. Where branches differ, no step ends.
FAILING_STEP = 2
#: Longer than a busy machine keeps a rank waiting, which would raise in a step that every rank runs.
_TIMEOUT = timedelta(seconds=4)


class Branching(nn.Module):
    """Two layers beside each other and one after them; it fails where `place` says. It may have a buffer."""

    def __init__(self, *, buffer: bool = False) -> None:
        super().__init__()
        self.left = nn.Linear(3, 3)
        self.right = nn.Linear(3, 3)
        self.last = nn.Linear(3, 2)
        if buffer:
            self.register_buffer("statistics", torch.zeros(2))
        self.place = ""

    def forward(self, inputs: Tensor, uses: str) -> Tensor:
        if self.place == "forward":
            raise ArithmeticError("the batch makes no sense")
        if self.place == "input":
            inputs = Bomb.apply(inputs.requires_grad_())
        hidden = sum(self.get_submodule(name)(inputs) for name in uses.split())
        hidden = self.last(Bomb.apply(hidden) if self.place == "middle" else hidden)
        output: Tensor = Bomb.apply(hidden) if self.place == "backward" else hidden
        return output


def _train(ctx: RankContext, group: dist.ProcessGroup) -> None:
    place, fails = ctx.arguments["place"], ctx.rank == ctx.world_size - 1
    module: Any = with_integer_weights(Branching(), ctx.scenario.seed).to(ctx.device)
    if place == "construction" and fails:
        module.requires_grad_(False)
    model: Any = ctx.wrap(module, process_group=group)
    if place in ("comm_hook", "pending_hook"):
        model.register_comm_hook((group, module), _summing)
    uses = "left right"
    if place == "branches":
        uses = "left" if fails else "right"
    another: Any = ctx.wrap(Branching().to(ctx.device), process_group=group) if ctx.arguments.get("beside") else None
    joins = bool(ctx.arguments.get("joined"))
    num_steps = FAILING_STEP + 1
    if place == "input" and not fails:
        num_steps += -1 if joins else 1
    with joining(ctx, model.join()) if joins else nullcontext():
        for index in range(num_steps):
            module.zero_grad()
            if index == FAILING_STEP and (fails or place == "pending_hook"):
                module.place = place
            turn = rank_step(ctx, index)
            loss = turn.loss(turn.forward(model, turn.inputs(4, 3), uses))
            other = None
            if another is not None and index == FAILING_STEP:
                other = turn.loss(turn.forward(another, turn.inputs(4, 3), uses))
            if module.place != "skipped":
                _backward(turn, loss, other)


def _backward(turn: RankStep, loss: Tensor, other: Tensor | None) -> None:
    """Have a backward of `loss`, and where that has raised one of the `other` wrapper's as well."""
    try:
        turn.backward(loss)
    except ArithmeticError:
        if other is not None:
            with suppress(RuntimeError):
                turn.backward(other)
        raise


@program("failing_peer", invariants=("leaves_no_trace",))
def failing_peer(ctx: RankContext) -> None:
    """Train until the last rank fails where argument `place` says. Observes `raised`. All ranks run it.

    Places: `construction`, `forward`, `backward`, `comm_hook`; `skipped`: it leaves a backward out, and raises nothing;
    `branches`: from the first step it uses another layer than the other ranks. `pending_hook`: on every rank, the comm
    hook returns a future that is never done. `middle` and `input`: in backward, behind some or all of the gradients;
    behind all, the others wait in the step after. With `no_store` the group has none. With `joined` the others have run
    out of data before, in a join context. With `beside` there is another wrapper, and the rank that fails goes on with
    the backward of that one. The last rank's clock is ahead by `hours`.
    """
    now, hours = time.time, ctx.arguments.get("hours", 0) if ctx.rank == ctx.world_size - 1 else 0
    clock = mock.patch.object(time, "time", side_effect=lambda: now() + 3600 * hours)
    with ctx.group_with_timeout(_TIMEOUT) as group, ctx.catching("raised"), clock if hours else nullcontext():
        _train(ctx, bare_group(ctx, group) if ctx.arguments.get("no_store") else group)


def _summing(state: tuple[dist.ProcessGroup, Branching], bucket: GradBucket) -> Future[Tensor]:
    group, module = state
    if module.place == "comm_hook":
        raise ArithmeticError("the hook does not like this bucket")
    if module.place == "pending_hook":
        return Future()
    work = present(dist.all_reduce(bucket.buffer(), group=group, async_op=True))
    return work.get_future().then(lambda future: future.value()[0])


#: What may follow a backward, by name: a block, which gets the wrapper, around the next call of the wrapper.
_WAYS_ON: Mapping[str, Callable[[Any], AbstractContextManager[Any]]] = {
    "synchronised": lambda model: nullcontext(),
    "no_sync": lambda model: model.no_sync(),
    "no_grad": lambda model: torch.no_grad(),
    "inference": lambda model: torch.inference_mode(),
    "join": lambda model: model.join(),
}
WAYS_ON = (*_WAYS_ON, "evaluation", "end_of_join", "buffers")


@program("ways_on", invariants=("leaves_no_trace",))
def ways_on(ctx: RankContext) -> None:
    """Leave a layer out on the last rank alone, and continue there as argument `way` says, while the others wait.

    Ways: a forward as it is (`synchronised`), under `no_sync`, under `no_grad`, in inference mode (`inference`), of an
    `evaluation` in eval mode, inside a `join`; the end of a join in which the layer was left out (`end_of_join`);
    copying `buffers` by hand. Observes `raised`, and on the last rank `issued`, the collectives that it issued behind
    that backward. All ranks run it.
    """
    way, fails = ctx.arguments["way"], ctx.rank == ctx.world_size - 1
    with ctx.group_with_timeout(_TIMEOUT) as group:
        module: Any = with_integer_weights(Branching(buffer=True), ctx.scenario.seed).to(ctx.device)
        model: Any = ctx.wrap(module, process_group=group)
        inputs, uses = rank_step(ctx, 0).inputs(4, 3), "left" if fails else "left right"
        before = len(ctx.collectives())
        with ctx.catching("raised"), model.join() if way == "end_of_join" else nullcontext():
            model(inputs, uses).sum().backward()
            before = len(ctx.collectives())
            model.train(way != "evaluation")
            if way == "buffers":
                model._sync_buffers()
            elif way != "end_of_join":
                with _WAYS_ON["no_grad" if way == "evaluation" else way](model):
                    model(inputs, uses)
        if fails:
            ctx.observe("issued", len(ctx.collectives()) - before)


@ways_on.expects
def _expected_of_ways(scenario: Scenario) -> Mapping[int, Facts]:
    last = scenario.world_size - 1
    missing = ("right.weight", "right.bias")
    facts: dict[int, Facts] = {
        rank: {"raised": Raises(("RuntimeError",), (*missing, f"rank {last}"))} for rank in range(last)
    }
    return {**facts, last: {"raised": Raises(("RuntimeError",), missing), "issued": 0}}


@program("prompt_exception", invariants=("leaves_no_trace",))
def prompt_exception(ctx: RankContext) -> None:
    """Raise on every rank in a backward: on the others only when the last rank has caught its exception.

    Argument `behind`: how many of its gradients the last rank has by then, `none` or `some`; the others have none.
    Observes `raised`. All ranks run it.
    """
    group = instance(dist.new_group(), dist.ProcessGroup)
    fails = ctx.rank == ctx.world_size - 1
    module: Any = with_integer_weights(Branching(), ctx.scenario.seed).to(ctx.device)
    model: Any = ctx.wrap(module, process_group=group)
    turn = rank_step(ctx, 0)

    def wait_for_last(gradient: Tensor) -> Tensor:
        dist.barrier(group=ctx.process_group)
        raise ArithmeticError("the last rank has caught its exception")

    def fail(gradient: Tensor) -> Tensor:
        raise ArithmeticError("no such gradient")

    if fails and ctx.arguments["behind"] == "none":
        module.place = "backward"
    loss = turn.loss(turn.forward(model, turn.inputs(4, 3), "left right"))
    if not fails:
        loss.register_hook(wait_for_last)
    elif ctx.arguments["behind"] == "some":
        module.left.weight.register_hook(fail)
    with ctx.catching("raised"):
        turn.backward(loss)
    if fails:
        dist.barrier(group=ctx.process_group)
    dist.barrier(group=ctx.process_group)
    dist.destroy_process_group(group)


@prompt_exception.expects
def _expected_of_prompt(scenario: Scenario) -> Mapping[int, Facts]:
    return {rank: {"raised": Raises(("ArithmeticError",))} for rank in range(scenario.world_size)}


@failing_peer.expects
def _expected(scenario: Scenario) -> Mapping[int, Facts]:
    place, last = scenario.arguments["place"], scenario.world_size - 1
    others = range(last)
    if place == "branches":
        named = ("left.weight", "left.bias", "right.weight", "right.bias")
        facts = {rank: {"raised": Raises(("RuntimeError",), (*named, f"rank {last}"))} for rank in others}
        return {**facts, last: {"raised": Raises(("RuntimeError",), (*named, "rank 0"))}}
    step = f"step {FAILING_STEP}"
    if place == "pending_hook":
        pending = Raises(("RuntimeError",), (step, _summing.__name__, "last."))
        return {rank: {"raised": pending} for rank in range(scenario.world_size)}
    if place == "skipped" or scenario.arguments.get("no_store"):
        waits = Raises(("RuntimeError",), (step, "last."))
    elif place == "construction":
        waits = Raises(("RuntimeError",), (f"rank {last}", "RuntimeError", place))
    else:
        phase = "forward" if place == "forward" else "backward"
        waits = Raises(("RuntimeError",), (f"rank {last}", "ArithmeticError", phase, step))
    fails: Raises | None = Raises(("RuntimeError" if place == "construction" else "ArithmeticError",))
    if place == "skipped":
        fails = None
    return {**{rank: {"raised": waits} for rank in others}, last: {"raised": fails}}
