"""Programs about what surrounds sharded training: parameters that stay what they are, traffic, and mistakes."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from conformance.chapters.tensor_parallel.oracle import ShardedPlan
from conformance.chapters.tensor_parallel.sharded_training import Grid, grid, group_label, of_group, sharded_module
from conformance.checkers.protocol import is_gradient
from conformance.errors import present
from conformance.models.sharded import get_sharded_model
from conformance.observation import Collective, Facts
from conformance.programs import RankContext, program
from conformance.scenario import Scenario
from conformance.truth.expected import Raises

_NUM_STEPS = 4
_MOMENTS = ("wrapped", "forward", "after_forward", "after_backward", "after_no_sync", "after_step", "evaluation")
_FIRST_USED = {"mlp": "up", "uneven": "up", "frozen": "up", "sequence": "embed"}


@program("sharded_parameters", invariants=("same_collectives", "leaves_no_trace"))
def sharded_parameters(ctx: RankContext) -> None:
    """Record the parameters before wrapping and at many moments afterwards. All ranks run it.

    Observes `num_sharded`, the number of DTensors among them; for each moment `changes/<moment>`, what is no longer as
    it was (an empty list: nothing); `gradients`, names whose gradient is no DTensor of the parameter's placement;
    `optimizer_state`, the same of Adam's; `evaluation_traffic`, collectives over the rows in a `no_grad` forward.
    """
    plan = ShardedPlan.of(ctx.scenario)
    with grid(ctx, plan.mesh) as on:
        module = sharded_module(ctx, plan, on)
        before = dict(module.named_parameters())
        looks = {name: _look(parameter) for name, parameter in before.items()}
        ctx.observe("num_sharded", sum(isinstance(parameter, DTensor) for parameter in before.values()))

        def observe_changes(moment: str) -> None:
            now = dict(module.named_parameters())
            changes = [f"{name} is gone" for name in before if name not in now]
            changes += [f"{name} is new" for name in now if name not in before]
            changes += [f"{name} is another object" for name in before if name in now and now[name] is not before[name]]
            changes += [f"{name}: {looks[name]} is now {_look(now[name])}" for name in before
                        if name in now and looks[name] != _look(now[name])]  # fmt: skip
            ctx.observe(f"changes/{moment}", changes)

        model: Any = ctx.wrap(module, device_mesh=on.dp)
        observe_changes("wrapped")
        optimizer = torch.optim.Adam(module.parameters())
        first: Any = getattr(module, _FIRST_USED[plan.model])
        handle = first.register_forward_pre_hook(lambda *_: observe_changes("forward"))
        loss = _forward(ctx, plan, model, 0)
        handle.remove()
        observe_changes("after_forward")
        ctx.backward(loss, 0)
        observe_changes("after_backward")
        ctx.observe("gradients", [name for name, p in before.items() if not _placed_like(p, p.grad)])
        optimizer.step()
        observe_changes("after_step")
        states = [(name, entry) for name, p in before.items() for entry in optimizer.state.get(p, {}).items()]
        strange = [f"{name}: {key}" for name, (key, value) in states if not _placed_like(before[name], value)]
        ctx.observe("optimizer_state", [text for text in strange if not text.endswith(": step")])
        with ctx.no_sync(model):
            ctx.backward(_forward(ctx, plan, model, 1), 1)
        observe_changes("after_no_sync")
        model.eval()
        issued = of_group(ctx, on.dp)
        with torch.no_grad():
            _forward(ctx, plan, model, 2)
        observe_changes("evaluation")
        ctx.observe("evaluation_traffic", len(of_group(ctx, on.dp)) - len(issued))


def _forward(ctx: RankContext, plan: ShardedPlan, model: Any, step: int) -> Tensor:
    with ctx.phase("forward", step):
        return plan.sharded_model.loss(model, plan.row_of(ctx.rank), step, 0)


def _look(tensor: Tensor) -> list[object]:
    """Return what must not change: whether it is sharded and how, its sizes, whether it is trained, and its class."""
    sharded = isinstance(tensor, DTensor)
    layout = f"{list(tensor.placements)} over {tensor.device_mesh.mesh.tolist()}" if isinstance(tensor, DTensor) else ""
    local = list(tensor.to_local().shape) if isinstance(tensor, DTensor) else list(tensor.shape)
    kind = "Parameter" if isinstance(tensor, nn.Parameter) else "Tensor"
    return [sharded, layout, list(tensor.shape), local, kind, tensor.requires_grad, tensor.is_leaf]


def _placed_like(parameter: Tensor, value: Tensor | None) -> bool:
    """Whether a gradient or an optimizer's state has the parameter's placement; a frozen parameter has none."""
    if value is None:
        return not parameter.requires_grad
    return _look(value)[:4] == _look(parameter)[:4]


@sharded_parameters.expects
def _unchanged(scenario: Scenario) -> Mapping[int, Facts]:
    plan = ShardedPlan.of(scenario)
    model = plan.sharded_model
    styles = tuple(model.plan())
    names = [name for name, _ in model.build().named_parameters()]
    facts = {
        "num_sharded": sum(name.rpartition(".")[0] in styles for name in names),
        **{f"changes/{moment}": [] for moment in _MOMENTS},
        "gradients": [],
        "optimizer_state": [],
        "evaluation_traffic": 0,
    }
    return {rank: dict(facts) for rank in range(scenario.world_size)}


@program("sharded_traffic", invariants=("same_collectives", "nothing_in_flight", "leaves_no_trace"))
def sharded_traffic(ctx: RankContext) -> None:
    """Train steps with and without DDP and compare the collectives of each group. All ranks run it.

    Observes for each step `elements`, the number of elements of gradients reduced over the rows, less those of the
    local shards (0); `tensor_parallel`, collectives of the row's own group that DDP adds or removes; `elsewhere`, the
    groups used besides; and for later steps `buckets`, the elements of each gradient collective over the rows.
    """
    plan = ShardedPlan.of(ctx.scenario)
    with grid(ctx, plan.mesh) as on:
        bare = sharded_module(ctx, plan, on)
        alone = [_step_traffic(ctx, plan, on, bare, bare, step) for step in range(_NUM_STEPS)]
        module = sharded_module(ctx, plan, on)
        model = ctx.wrap(module, device_mesh=on.dp)
        local = sum(_local_numel(p) for p in module.parameters() if p.requires_grad)
        for step in range(_NUM_STEPS):
            seen = _step_traffic(ctx, plan, on, model, module, step)
            buckets = [collective.numel for collective in seen["dp"] if is_gradient(collective)]
            ctx.observe(f"step{step}/elements", sum(buckets) - local)
            ctx.observe(f"step{step}/buckets", buckets)
            ctx.observe(f"step{step}/tensor_parallel", _differences(alone[step]["tp"], seen["tp"]))
            ctx.observe(f"step{step}/elsewhere", sorted(seen["other"]))


def _step_traffic(ctx: RankContext, plan: ShardedPlan, on: Grid, model: Any, module: nn.Module, step: int) -> Any:
    """Run a step and return its collectives: in the groups `dp` and `tp`, and the names of `other` groups."""
    start = len(ctx.collectives())
    module.zero_grad()
    ctx.backward(_forward(ctx, plan, model, step), step)
    with ctx.phase("optimizer", step):
        torch.optim.SGD(module.parameters(), lr=0.125).step()
    dp, tp = group_label(ctx, on.dp), group_label(ctx, on.tp)
    found: dict[str, Any] = {"dp": [], "tp": [], "other": set()}
    for collective in ctx.collectives()[start:]:
        if collective.group in (dp, tp):
            found["dp" if collective.group == dp else "tp"].append(collective)
        else:
            found["other"].add(collective.group)
    return found


def _local_numel(parameter: Tensor) -> int:
    return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).numel()


def _differences(alone: list[Collective], seen: list[Collective]) -> list[str]:
    """Return the collectives, regardless of their order, that are in only one of the lists.

    What brings a gradient into its parameter's placement may happen in backward instead of in the optimizer.
    """
    without, with_ddp = (Counter(f"{c.op} of {c.numel}" for c in each) for each in (alone, seen))
    return [f"- {text}" for text in sorted((without - with_ddp).elements())] + [
        f"+ {text}" for text in sorted((with_ddp - without).elements())
    ]


@sharded_traffic.expects
def _traffic(scenario: Scenario) -> Mapping[int, Facts]:
    facts: dict[str, Any] = {}
    for step in range(_NUM_STEPS):
        facts |= {f"step{step}/elements": 0, f"step{step}/tensor_parallel": [], f"step{step}/elsewhere": []}
        if "buckets" in scenario.arguments and step >= 2:
            facts[f"step{step}/buckets"] = list(scenario.arguments["buckets"])
    return {rank: dict(facts) for rank in range(scenario.world_size)}


@program("sharded_hook", invariants=("same_collectives", "leaves_no_trace"))
def sharded_hook(ctx: RankContext) -> None:
    """Register a comm hook that records what the DDP passes to it, before it averages. All ranks run it.

    Observes `not_local`: gradients handed to the hook that are DTensors or not of the shape of a local shard.
    """
    plan = ShardedPlan.of(ctx.scenario)
    strange: list[str] = []
    num_gradients = 0

    def hook(group: dist.ProcessGroup, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        nonlocal num_gradients
        if isinstance(bucket.buffer(), DTensor) or bucket.buffer().dim() != 1:
            strange.append("the buffer")
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            num_gradients += 1
            if isinstance(gradient, DTensor) or gradient.numel() != _local_numel(parameter):
                strange.append(f"{list(gradient.shape)} for a parameter of {list(parameter.shape)}")
        buffer = bucket.buffer().div_(group.size())
        work = present(dist.all_reduce(buffer, group=group, async_op=True))
        averaged: torch.futures.Future[Tensor] = work.get_future().then(lambda future: future.value()[0])
        return averaged

    with grid(ctx, plan.mesh) as on:
        module = sharded_module(ctx, plan, on)
        model: Any = ctx.wrap(module, device_mesh=on.dp)
        model.register_comm_hook(on.dp.get_group(), hook)
        for step in range(2):
            ctx.backward(_forward(ctx, plan, model, step), step)
        ctx.observe("not_local", strange)
        ctx.observe("num_gradients", num_gradients)


@sharded_hook.expects
def _local_only(scenario: Scenario) -> Mapping[int, Facts]:
    num_parameters = len(list(ShardedPlan.of(scenario).sharded_model.build().parameters()))
    facts: Facts = {"not_local": [], "num_gradients": 2 * num_parameters}
    return dict.fromkeys(range(scenario.world_size), facts)


@dataclass(frozen=True)
class _Mistake:
    """A wrong way to shard and wrap a module, and the error that it must raise on every rank."""

    options: Callable[[RankContext, Grid], dict[str, Any]]
    raises: Raises
    spread: Callable[[RankContext, Grid, nn.Module], nn.Module] | None = None


def _crossed(ctx: RankContext, _: Grid) -> dict[str, Any]:
    groups = [dist.new_group(ranks) for ranks in ([0, 3], [1, 2])]
    return {"process_group": groups[0 if ctx.rank in (0, 3) else 1]}


def _spread_otherwise_on_last_row(ctx: RankContext, on: Grid, module: nn.Module) -> nn.Module:
    swapped = on.dp.get_local_rank() == on.dp.size() - 1
    styles = [RowwiseParallel(), ColwiseParallel()] if swapped else [ColwiseParallel(), RowwiseParallel()]
    return parallelize_module(module, on.tp, {str(index): styles[index % 2] for index in range(6)})


def _whole_on_last_row(ctx: RankContext, on: Grid, module: nn.Module) -> nn.Module:
    if on.dp.get_local_rank() == on.dp.size() - 1:
        return module
    return get_sharded_model("stack").spread(module, on.tp)


_ERROR = ("RuntimeError", "ValueError")
_MISTAKES: Mapping[str, _Mistake] = {
    "whole_mesh": _Mistake(lambda _, on: {"device_mesh": on.mesh}, Raises(("RuntimeError",), ("Only 1D device mesh",))),
    "default_group": _Mistake(
        lambda ctx, _: {"process_group": ctx.process_group}, Raises(_ERROR, ("0.weight", "device_mesh"))
    ),
    "tensor_parallel_mesh": _Mistake(lambda _, on: {"device_mesh": on.tp}, Raises(_ERROR, ("0.weight", "device_mesh"))),
    "crossed_groups": _Mistake(_crossed, Raises(_ERROR, ("0.weight", "device_mesh"))),
    "other_placements": _Mistake(
        lambda _, on: {"device_mesh": on.dp}, Raises(_ERROR, ("0.weight",)), _spread_otherwise_on_last_row
    ),
    "not_spread": _Mistake(lambda _, on: {"device_mesh": on.dp}, Raises(_ERROR, ("0.weight",)), _whole_on_last_row),
}


@program("sharded_mistake", invariants=("same_collectives",))
def sharded_mistake(ctx: RankContext) -> None:
    """Make the mistake that argument `mistake` names. All ranks run it; observes `construct`, the exception or None."""
    plan = ShardedPlan.of(ctx.scenario)
    mistake = _MISTAKES[ctx.arguments["mistake"]]
    with grid(ctx, plan.mesh) as on:
        module = get_sharded_model("stack").build().to(ctx.device)
        module = (mistake.spread or (lambda *_: plan.sharded_model.spread(module, on.tp)))(ctx, on, module)
        options = mistake.options(ctx, on)
        with ctx.catching("construct"):
            ctx.wrap(module, **options)
        own = options.get("process_group")
        if own is not None and own is not ctx.process_group:
            dist.barrier(group=ctx.process_group)
            dist.destroy_process_group(own)


@sharded_mistake.expects
def _refused(scenario: Scenario) -> Mapping[int, Facts]:
    raises = _MISTAKES[scenario.arguments["mistake"]].raises
    return {rank: {"construct": raises} for rank in range(scenario.world_size)}
