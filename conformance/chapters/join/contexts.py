"""Programs about join contexts: their effect on buffers, and several joinables in one context."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.nn.parallel.distributed import _BufferCommHookLocation

from conformance.chapters.join.plan import UnevenPlan
from conformance.models.integers import RankStep, with_integer_weights
from conformance.observation import Facts
from conformance.programs import RankContext, observe_run, program, rank_step
from conformance.programs.agreement import same_bits_everywhere
from conformance.programs.autograd_uses import WIDTH, layers
from conformance.programs.join_context import joining
from conformance.scenario import Scenario
from conformance.truth.expected import AnyOf, Raises
from conformance.truth.steps import gradients

_INVARIANTS = ("same_collectives", "leaves_no_trace")


class Marked(nn.Module):
    """A vector, and a buffer in which each forward stores its rank and its step."""

    mark: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("mark", torch.tensor([-1, -1]))

    def forward(self, inputs: Tensor, who: tuple[int, int]) -> tuple[Tensor, Tensor]:
        found = self.mark.clone()
        self.mark.copy_(torch.tensor(who))
        return self.weight * inputs, found


@program("uneven_buffers", invariants=_INVARIANTS)
def uneven_buffers(ctx: RankContext) -> None:
    """Train `Marked` by an `UnevenPlan` with one context. All ranks run it.

    Observes for each step `found`, the (rank, step) that wrote the buffer; `final/mark`, and for both whether all ranks
    hold the same.
    """
    plan = UnevenPlan.of(ctx.scenario)
    module = Marked().to(ctx.device)
    model: Any = ctx.wrap(module)
    found = torch.full((max(plan.num_inputs), 2), -9, device=ctx.device)
    with joining(ctx, model.join()):
        for index in range(plan.num_inputs[ctx.rank]):
            module.zero_grad()
            turn = rank_step(ctx, index)
            output, found[index] = turn.forward(model, turn.inputs(3), (ctx.rank, index))
            turn.backward(turn.loss(output))
            ctx.observe(f"step{index}/found", found[index].tolist())
    ctx.observe("final/mark", module.mark.tolist())
    ctx.observe("same_final", same_bits_everywhere(ctx, [module.mark]))
    gathered = [torch.empty_like(found) for _ in range(ctx.world_size)]
    dist.all_gather(gathered, found, group=ctx.process_group)
    ctx.observe("same_found", [_agree(gathered, plan, index) for index in range(max(plan.num_inputs))])


def _agree(found: list[Tensor], plan: UnevenPlan, index: int) -> bool:
    first, *others = [found[rank][index] for rank in plan.active(index)]
    return all(torch.equal(first, other) for other in others)


@uneven_buffers.expects
def _buffers(scenario: Scenario) -> Mapping[int, Facts]:
    plan = UnevenPlan.of(scenario)
    num_steps = max(plan.num_inputs)
    synchronised = bool(scenario.options.get("broadcast_buffers", True))
    facts: dict[int, Facts] = {}
    for rank, count in enumerate(plan.num_inputs):
        mine: dict[str, Any] = {}
        for index in range(count):
            sources = plan.active(index) if synchronised else [rank]
            mine[f"step{index}/found"] = _one_of([[source, index - 1] for source in sources]) if index else [-1, -1]
        if synchronised:
            mine["final/mark"] = _one_of([[last, num_steps - 1] for last in plan.last_joiners()])
            mine |= {"same_final": True, "same_found": [True] * num_steps}
        else:
            mine["final/mark"] = [rank, count - 1] if count else [-1, -1]
        facts[rank] = mine
    return facts


def _one_of(choices: list[list[int]]) -> Any:
    return AnyOf(*choices) if len(choices) > 1 else choices[0]


class Counted(nn.Module):
    """Layers, and a buffer that counts forwards."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers()
        self.register_buffer("count", torch.zeros(1))

    def forward(self, inputs: Tensor) -> Tensor:
        self.count += 1
        output: Tensor = self.layers(inputs)
        return output


@program("buffer_hook_in_join", invariants=("leaves_no_trace",))
def buffer_hook_in_join(ctx: RankContext) -> None:
    """Train on uneven inputs with a buffer hook, which argument `location` places, inside a join context.

    Observes `outcome`: gradients of all steps and whether all ranks end with the same buffer, or the refusal. All ranks
    run it.
    """
    plan = UnevenPlan.of(ctx.scenario)
    module: Any = with_integer_weights(Counted(), ctx.scenario.seed).to(ctx.device)
    model: Any = ctx.wrap(module)

    def hook(_: Any, buffers: Mapping[str, Tensor]) -> None:
        for buffer in buffers.values():
            dist.all_reduce(buffer, dist.ReduceOp.MAX, group=ctx.process_group)

    def run() -> dict[str, Any]:
        facts: dict[str, Any] = {}
        model._register_buffer_comm_hook(None, hook, _BufferCommHookLocation[ctx.arguments["location"]])
        with joining(ctx, model.join()):
            for index in range(plan.num_inputs[ctx.rank]):
                module.zero_grad()
                _train(model, rank_step(ctx, index), 0)
                facts |= gradients(f"step{index}", module)
        return {**facts, "same_buffer": same_bits_everywhere(ctx, [module.count])}

    observe_run(ctx, run, refusal=Raises(("RuntimeError", "NotImplementedError"), ("buffer", "hook")))


class Counting(Joinable):
    """A joinable of the user's own, which counts over all ranks, in the manner of torch's Join documentation."""

    def __init__(self, ctx: RankContext) -> None:
        super().__init__()
        self.ctx = ctx
        self.count = 0
        self.kwargs: dict[str, Any] = {}
        self.num_shadowed = 0
        self.was_last: bool | None = None

    def __call__(self) -> None:
        if work := Join.notify_join_context(self):
            work.wait()
        self.add(1)

    def add(self, number: int) -> None:
        total = torch.tensor([number], device=self.ctx.device)
        dist.all_reduce(total, group=self.ctx.process_group)
        self.count += int(total.item())

    def join_hook(self, **kwargs: Any) -> JoinHook:
        self.kwargs = kwargs
        return _CountingHook(self)

    @property
    def join_device(self) -> torch.device:
        return self.ctx.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        return self.ctx.process_group


class _CountingHook(JoinHook):
    def __init__(self, counting: Counting) -> None:
        self.counting = counting

    def main_hook(self) -> None:
        self.counting.num_shadowed += 1
        self.counting.add(0)

    def post_hook(self, is_last_joiner: bool) -> None:
        self.counting.was_last = is_last_joiner


def _module(position: int, scenario: Scenario) -> nn.Module:
    return with_integer_weights(layers(), position, scenario.seed)


def _train(model: Any, turn: RankStep, position: int) -> None:
    turn.backward(turn.loss(turn.forward(model, turn.inputs(5, WIDTH, micro=position)), micro=position))


@program("shared_join", invariants=_INVARIANTS)
def shared_join(ctx: RankContext) -> None:
    """Train on uneven inputs under one `Join` over the joinables that argument `joinables` lists: "ddp" or "counter".

    Observes the gradients of every wrapped module, `step<k>/model<i>/grad/<name>`, and of every counter `counter<i>`:
    its count, how often its main hook ran, whether the context reported that it joined last, and the context's keyword
    arguments. All ranks run it.
    """
    plan = UnevenPlan.of(ctx.scenario)
    kinds = ctx.arguments["joinables"]
    modules = {place: _module(place, ctx.scenario).to(ctx.device) for place, kind in enumerate(kinds) if kind == "ddp"}
    members: list[Any] = [
        ctx.wrap(modules[place]) if place in modules else Counting(ctx) for place in range(len(kinds))
    ]
    context = Join(members, divide_by_initial_world_size=plan.divide_by_initial_world_size, answer=42)
    with joining(ctx, context):
        for index in range(plan.num_inputs[ctx.rank]):
            for place, member in enumerate(members):
                if place not in modules:
                    member()
                    continue
                modules[place].zero_grad()
                _train(member, rank_step(ctx, index), place)
                ctx.observe_gradients(f"step{index}/model{place}", modules[place])
    for place, member in enumerate(members):
        if place not in modules:
            ctx.observe(f"counter{place}", [member.count, member.num_shadowed, member.was_last, member.kwargs])
