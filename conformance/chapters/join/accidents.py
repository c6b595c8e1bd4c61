"""Programs about errors inside join contexts, and about contexts that must change nothing."""

from __future__ import annotations

import contextlib
import copy
import io
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from conformance.chapters.join.oracle import UnevenPlan
from conformance.history import Collective
from conformance.models.integers import RankStep, with_integer_weights
from conformance.observation import Facts
from conformance.programs.autograd_uses import WIDTH, layers
from conformance.programs.join_context import joining
from conformance.programs.rank_context import RankContext
from conformance.programs.registry import program
from conformance.programs.written_steps import rank_step
from conformance.scenario import Scenario
from conformance.truth.expected import Raises
from conformance.truth.steps import gradients, simulate_steps

_INVARIANTS = ("same_collectives", "leaves_no_trace")


class Normalised(nn.Module):
    """A layer after a shift by the mean over all ranks, which it communicates in its own forward, as SyncBatchNorm."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 2)
        self.group = group

    def forward(self, inputs: Tensor) -> Tensor:
        """Return rows of 2; all ranks must call it."""
        total = inputs.detach().sum(0)
        if self.group is not None:
            dist.all_reduce(total, group=self.group)
        output: Tensor = self.layer(inputs + total)
        return output


def _step(model: Any, turn: RankStep) -> None:
    turn.backward(turn.loss(turn.forward(model, turn.inputs(5, WIDTH))))


@program("early_termination", invariants=_INVARIANTS)
def early_termination(ctx: RankContext) -> None:
    """Train epochs on uneven inputs, each in a join context that raises when the first rank has run out of data.

    Argument `num_inputs` as in an `UnevenPlan`, of which `contexts` is the number of epochs; `communicates` gives the
    module a collective of its own. Every rank catches the error, as one does to end an epoch, and goes on.
    Observes `epoch<e>/raised`, `epoch<e>/num_steps`, and gradients of one more step of all ranks. All ranks run it.
    """
    plan = UnevenPlan.of(ctx.scenario)
    module = _terminated_module(ctx.scenario, ctx.process_group).to(ctx.device)
    model: Any = ctx.wrap(module)
    for epoch in range(plan.contexts):
        num_steps = 0
        with ctx.catching(f"epoch{epoch}/raised"), joining(ctx, model.join(throw_on_early_termination=True)):
            for index in range(plan.num_inputs[ctx.rank]):
                _step(model, rank_step(ctx, plan.step_number(epoch, index)))
                num_steps += 1
        ctx.observe(f"epoch{epoch}/num_steps", num_steps)
    module.zero_grad()
    with joining(ctx, model.join()):
        _step(model, rank_step(ctx, plan.step_number(plan.contexts, 0)))
    for name, value in gradients("after", module).items():
        ctx.observe(name, value)


def _terminated_module(scenario: Scenario, group: dist.ProcessGroup | None) -> nn.Module:
    module = Normalised(group) if scenario.arguments.get("communicates") else layers()
    return with_integer_weights(module, scenario.seed)


@early_termination.expects
def _terminated(scenario: Scenario) -> Mapping[int, Facts]:
    plan = UnevenPlan.of(scenario)
    even = len(set(plan.num_inputs)) == 1
    common: dict[str, Any] = {}
    for epoch in range(plan.contexts):
        common[f"epoch{epoch}/raised"] = None if even else Raises(("RuntimeError",))
        common[f"epoch{epoch}/num_steps"] = min(plan.num_inputs)
    last = plan.step_number(plan.contexts, 0)
    ranks = range(scenario.world_size)
    replicas = [_terminated_module(scenario, None) for _ in ranks]
    shift = sum(RankStep(rank, last).inputs(5, WIDTH).sum(0) for rank in ranks)

    def step(model: Any, turn: RankStep) -> None:
        turn = RankStep(turn.rank, last)
        inputs = turn.inputs(5, WIDTH)
        output = model.layer(inputs + shift) if scenario.arguments.get("communicates") else model(inputs)
        turn.backward(turn.loss(output))

    truth = simulate_steps(replicas, step, 1)
    return {
        rank: common | {name.replace("step0/", "after/"): value for name, value in mine.items()}
        for rank, mine in truth.items()
    }


@dataclass(frozen=True)
class Case:
    """What every rank does, and the facts that it must observe besides those that `truth` computes."""

    body: Callable[[RankContext], None]
    expected: Callable[[Scenario, int], Facts]


def _expected_gradients(scenario: Scenario, steps: Sequence[int], prefix: str = "after") -> Mapping[int, Facts]:
    """Return the truth about `layers` trained evenly, without an optimizer, at the given step numbers."""
    replicas = [with_integer_weights(layers(), scenario.seed) for _ in range(scenario.world_size)]

    def step(model: nn.Module, turn: RankStep) -> None:
        _step(model, RankStep(turn.rank, steps[turn.step]))

    truth = simulate_steps(replicas, step, len(steps))
    names = {f"step{index}/": f"{prefix}{number}/" for index, number in enumerate(steps)}
    return {rank: {_renamed(name, names): value for name, value in mine.items()} for rank, mine in truth.items()}


def _renamed(name: str, prefixes: Mapping[str, str]) -> str:
    head, _, tail = name.partition("/")
    return prefixes[f"{head}/"] + tail


def _wrapped(ctx: RankContext) -> tuple[nn.Module, Any]:
    module = with_integer_weights(layers(), ctx.scenario.seed).to(ctx.device)
    return module, ctx.wrap(module)


def _even_step(ctx: RankContext, model: Any, module: nn.Module, number: int) -> None:
    """Run step `number` and observe its gradients as `after<number>/grad/<name>`."""
    module.zero_grad()
    _step(model, rank_step(ctx, number))
    for name, value in gradients(f"after{number}", module).items():
        ctx.observe(name, value)


def _exception(ctx: RankContext) -> None:
    """Raise in the context on all ranks at the same step, then train on in a new context and outside of any."""
    module, model = _wrapped(ctx)
    with ctx.catching("raised"), joining(ctx, model.join()):
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
    ctx.observe("others", [each.describe() for each in ctx.collectives()[before:] if is_joining(each)])


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
                for name, value in gradients(f"{'join' if disabled else 'plain'}{index}", module).items():
                    ctx.observe(name, value)
        traffic.append([each.describe().split(" ")[0] + str(each.numel) for each in ctx.collectives()[before:]])
    ctx.observe("same_traffic", traffic[0] == traffic[1])


def _logged(ctx: RankContext) -> None:
    """Ask the logging data whether a join context was used, before and after."""
    _, model = _wrapped(ctx)
    _step(model, rank_step(ctx, 0))
    ctx.observe("before", int(model._get_ddp_logging_data().get("join_uneven_inputs", 0)))
    with joining(ctx, model.join()):
        for index in range(ctx.rank):
            _step(model, rank_step(ctx, 1 + index))
    ctx.observe("after", int(model._get_ddp_logging_data().get("join_uneven_inputs", 0)))


def _different_groups(ctx: RankContext) -> None:
    """Enter one join context over two wrappers in two groups."""
    _, model = _wrapped(ctx)
    group = dist.new_group(list(range(ctx.world_size)))
    other: Any = ctx.wrap(with_integer_weights(layers(), 1).to(ctx.device), process_group=group)
    with ctx.catching("raised"):
        Join([model, other])
    dist.barrier(group=ctx.process_group)
    dist.destroy_process_group(group)


def _properties(ctx: RankContext) -> None:
    """Access the attributes and methods that torch's `Join` requires of joinables."""
    _, model = _wrapped(ctx)
    _step(model, rank_step(ctx, 0))
    ctx.observe("is_joinable", isinstance(model, Joinable))
    ctx.observe("same_group", model.join_process_group is ctx.process_group)
    ctx.observe("same_device", torch.device(model.join_device) == ctx.device)
    ctx.observe("is_hook", isinstance(model.join_hook(divide_by_initial_world_size=True), JoinHook))
    ctx.observe("is_context", isinstance(model.join(), Join))


CASES: Mapping[str, Case] = {
    "exception": Case(
        _exception,
        lambda scenario, rank: {"raised": Raises(("LookupError",)), **_expected_gradients(scenario, (1, 2))[rank]},
    ),
    "copied": Case(_copied, lambda scenario, rank: {"others": [], **_expected_gradients(scenario, (3, 4))[rank]}),
    "transparent": Case(
        _transparent,
        lambda scenario, rank: {
            "same_traffic": True,
            **_expected_gradients(scenario, (0, 1, 2), "plain")[rank],
            **_expected_gradients(scenario, (0, 1, 2), "join")[rank],
        },
    ),
    "logged": Case(_logged, lambda *_: {"before": 0, "after": 1}),
    "different_groups": Case(_different_groups, lambda *_: {"raised": Raises(("ValueError",), ("group",))}),
    "properties": Case(
        _properties,
        lambda *_: dict.fromkeys(("is_joinable", "same_group", "same_device", "is_hook", "is_context"), True),
    ),
}


@program("join_case", invariants=_INVARIANTS)
def join_case(ctx: RankContext) -> None:
    """Do what argument `case` names (see `CASES`). All ranks run it."""
    CASES[ctx.arguments["case"]].body(ctx)


@join_case.expects
def _case(scenario: Scenario) -> Mapping[int, Facts]:
    case = CASES[scenario.arguments["case"]]
    return {rank: case.expected(scenario, rank) for rank in range(scenario.world_size)}
