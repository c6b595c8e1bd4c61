"""Programs about errors inside join contexts, and about contexts that must change nothing."""

import contextlib
import copy
import io
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from conformance.chapters.join.plan import UnevenPlan
from conformance.models.integers import with_integer_weights
from conformance.observation import Collective
from conformance.programs import RankContext, program, rank_step, step_on
from conformance.programs.autograd_uses import WIDTH, layers
from conformance.programs.join_context import joining
from conformance.truth.expected import Raises

_INVARIANTS = ("same_collectives", "leaves_no_trace")
_step = step_on(5, WIDTH)


class Normalised(nn.Module):
    """A layer after a shift by the mean over all ranks, which it communicates in its own forward, as SyncBatchNorm."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 2)
        self.group = group

    def forward(self, inputs: Tensor) -> Tensor:
        total = inputs.detach().sum(0)
        dist.all_reduce(total, group=self.group)
        output: Tensor = self.layer(inputs + total)
        return output


@program("early_termination", invariants=_INVARIANTS)
def early_termination(ctx: RankContext) -> None:
    """Train epochs on uneven inputs, each in a join context that raises when the first rank has run out of data.

    Argument `num_inputs` as in an `UnevenPlan`, of which `contexts` is the number of epochs; `communicates` gives the
    module a collective of its own. Every rank catches the error, as one does to end an epoch, and continues.
    Observes `epoch<e>/raised`, `epoch<e>/num_steps`, and gradients of two more
    steps of all ranks: outside of any context, behind an evaluation, and in one. All ranks run it.
    """
    plan = UnevenPlan.of(ctx.scenario)
    module = Normalised(ctx.process_group) if ctx.arguments.get("communicates") else layers()
    with_integer_weights(module, ctx.scenario.seed).to(ctx.device)
    model: Any = ctx.wrap(module)
    error = None if len(set(plan.num_inputs)) == 1 else Raises(("RuntimeError",))
    for epoch in range(plan.contexts):
        num_steps = 0
        context = model.join(throw_on_early_termination=True)
        with ctx.catching(f"epoch{epoch}/raised", must=error), joining(ctx, context):
            for index in range(plan.num_inputs[ctx.rank]):
                _step(model, rank_step(ctx, plan.step_number(epoch, index)))
                num_steps += 1
        ctx.observe(f"epoch{epoch}/num_steps", num_steps, must=min(plan.num_inputs))
    module.zero_grad()
    with torch.no_grad():
        model(rank_step(ctx, 0).inputs(5, WIDTH))
    _step(model, rank_step(ctx, plan.step_number(plan.contexts, 1)))
    ctx.observe_gradients("outside", module)
    module.zero_grad()
    with joining(ctx, model.join()):
        _step(model, rank_step(ctx, plan.step_number(plan.contexts, 0)))
    ctx.observe_gradients("after", module)


def _wrapped(ctx: RankContext) -> tuple[nn.Module, Any]:
    module = with_integer_weights(layers(), ctx.scenario.seed).to(ctx.device)
    return module, ctx.wrap(module)


def _even_step(ctx: RankContext, model: Any, module: nn.Module, number: int) -> None:
    module.zero_grad()
    _step(model, rank_step(ctx, number))
    ctx.observe_gradients(f"after{number}", module)


def _exception(ctx: RankContext) -> None:
    """Raise in the context on all ranks at the same step, then train on in a new context and outside of any."""
    module, model = _wrapped(ctx)
    with ctx.catching("raised", must=Raises(("LookupError",))), joining(ctx, model.join()):
        _step(model, rank_step(ctx, 0))
        raise LookupError("the data set is broken")
    with joining(ctx, model.join()):
        _even_step(ctx, model, module, 1)
    _even_step(ctx, model, module, 2)


def _copied(ctx: RankContext) -> None:
    """Copy the wrapped module inside a context in which ranks run out, and train the copy outside of any."""
    module, model = _wrapped(ctx)
    copies = []
    with joining(ctx, model.join(divide_by_initial_world_size=False)):
        for index in range(1 + ctx.rank):
            module.zero_grad()
            _step(model, rank_step(ctx, index))
            if index == 0:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # a DDP may warn that the copy is outside of the context
                    copies.append(_COPIES[ctx.arguments["copy"]](model))
    before = len(ctx.collectives())
    for number in (3, 4):
        _even_step(ctx, copies[0], copies[0].module, number)
    ctx.observe("others", [each.describe() for each in ctx.collectives()[before:] if is_joining(each)], must=[])


def _pickled(model: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


_COPIES: Mapping[str, Callable[[Any], Any]] = {"deepcopy": copy.deepcopy, "pickle": _pickled}


def is_joining(collective: Collective) -> bool:
    """Whether a collective is the one by which a forward notifies a join context: a reduction of one number."""
    return collective.phase == "forward" and collective.op == "all_reduce" and collective.numel == 1


def _transparent(ctx: RankContext) -> None:
    """Train twin wrappers, one in a disabled context, and compare what they communicate."""
    traffic = []
    for disabled in (False, True):
        module, model = _wrapped(ctx)
        before = len(ctx.collectives())
        with joining(ctx, model.join(enable=False)) if disabled else contextlib.nullcontext():
            for index in range(3):
                module.zero_grad()
                _step(model, rank_step(ctx, index))
                ctx.observe_gradients(f"{'join' if disabled else 'plain'}{index}", module)
        traffic.append([each.describe().split(" ")[0] + str(each.numel) for each in ctx.collectives()[before:]])
    ctx.observe("same_traffic", traffic[0] == traffic[1], must=True)


def _logged(ctx: RankContext) -> None:
    """Ask the logging data whether a join context was used, before and after."""
    module, model = _wrapped(ctx)
    _step(model, rank_step(ctx, 0))
    ctx.observe("before", _has_joined(model), must=0)
    with joining(ctx, model.join()):
        for index in range(ctx.rank):
            module.zero_grad()
            _step(model, rank_step(ctx, 1 + index))
    ctx.observe("after", _has_joined(model), must=1)


def _has_joined(model: Any) -> int:
    return int(model._get_ddp_logging_data().get("join_uneven_inputs", 0))


def _different_groups(ctx: RankContext) -> None:
    """Enter one join context over two wrappers in two groups."""
    _, model = _wrapped(ctx)
    group = dist.new_group(list(range(ctx.world_size)))
    other: Any = ctx.wrap(with_integer_weights(layers(), 1).to(ctx.device), process_group=group)
    with ctx.catching("raised", must=Raises(("ValueError",), ("group",))):
        Join([model, other])
    dist.barrier(group=ctx.process_group)
    dist.destroy_process_group(group)


def _properties(ctx: RankContext) -> None:
    """Access the attributes and methods that torch's `Join` requires of joinables."""
    _, model = _wrapped(ctx)
    _step(model, rank_step(ctx, 0))
    ctx.observe("is_joinable", isinstance(model, Joinable), must=True)
    ctx.observe("same_group", model.join_process_group is ctx.process_group, must=True)
    ctx.observe("same_device", torch.device(model.join_device) == ctx.device, must=True)
    ctx.observe("is_hook", isinstance(model.join_hook(divide_by_initial_world_size=True), JoinHook), must=True)
    ctx.observe("is_context", isinstance(model.join(), Join), must=True)


CASES: Mapping[str, Callable[[RankContext], None]] = {
    "exception": _exception,
    "copied": _copied,
    "transparent": _transparent,
    "logged": _logged,
    "different_groups": _different_groups,
    "properties": _properties,
}


@program("join_case", invariants=_INVARIANTS)
def join_case(ctx: RankContext) -> None:
    """Do what argument `case` names (see `CASES`). All ranks run it."""
    CASES[ctx.arguments["case"]](ctx)
