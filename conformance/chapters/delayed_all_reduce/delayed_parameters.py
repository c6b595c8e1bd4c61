"""Programs about parameters whose all-reduce waits for another parameter's gradient."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from conformance.checkers.protocol import is_gradient
from conformance.models.catalogue import moved
from conformance.models.integers import RankStep
from conformance.models.small_integers import small_inputs, small_loss, with_small_weights
from conformance.programs import RankContext, program, rank_step
from conformance.scenario import Scenario
from conformance.truth.expected import Raises, Satisfies, at_most

NUM_STEPS = 3


class Chain(nn.Module):
    """Three layers in a row, a fourth one that is used on demand, and a vector of the root."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2, dtype=dtype)
        self.middle = nn.Linear(2, 3, dtype=dtype)
        self.last = nn.Linear(3, 2, dtype=dtype)
        self.spare = nn.Linear(2, 2, bias=False, dtype=dtype)
        self.offset = nn.Parameter(torch.empty(2, dtype=dtype))

    def forward(self, inputs: Tensor, with_spare: bool) -> Tensor:
        output: Tensor = self.last(self.middle(self.first(inputs))) + self.offset
        return output + self.spare(inputs) if with_spare else output


class Tied(nn.Module):
    """Two layers with one weight, which is used in both, and another one behind them."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2, dtype=dtype)
        self.second = nn.Linear(2, 2, bias=False, dtype=dtype)
        self.second.weight = self.first.weight
        self.last = nn.Linear(2, 2, dtype=dtype)

    def forward(self, inputs: Tensor, with_spare: bool) -> Tensor:
        output: Tensor = self.last(self.second(self.first(inputs)))
        return output


class TwoDtypes(nn.Module):
    """Layers in float32 and float64."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2, dtype=dtype)
        self.last = nn.Linear(2, 2).double()

    def forward(self, inputs: Tensor, with_spare: bool) -> Tensor:
        output: Tensor = self.last(self.first(inputs).double())
        return output


MODULES: Mapping[str, Callable[[torch.dtype], nn.Module]] = {"chain": Chain, "tied": Tied, "two_dtypes": TwoDtypes}


def _build(scenario: Scenario) -> nn.Module:
    dtype = getattr(torch, scenario.arguments.get("dtype", "float32"))
    module = MODULES[scenario.arguments.get("module", "chain")](dtype)
    for frozen in scenario.arguments.get("frozen", ()):
        module.get_parameter(frozen).requires_grad_(False)
    return with_small_weights(module, scenario.seed)


def _delayed(scenario: Scenario, module: nn.Module) -> list[str]:
    """Return the names of the delayed parameters: argument `delayed`, or all of them."""
    chosen: Sequence[str] | None = scenario.arguments.get("delayed")
    return [name for name, _ in module.named_parameters()] if chosen is None else list(chosen)


def _backward(scenario: Scenario, model: nn.Module, turn: RankStep, micro: int) -> None:
    dtype = next(model.parameters()).dtype
    users: Sequence[int] | None = scenario.arguments.get("spare_on")
    with_spare = users is None or turn.rank in users
    inputs = small_inputs(turn, 1, 2, micro=micro, dtype=dtype) * (1 + 1j if dtype.is_complex else 1)
    turn.backward(small_loss(turn, turn.forward(model, inputs, with_spare), micro))


@program(
    "delayed_all_reduce", invariants=("same_collectives", "silent_no_sync", "nothing_in_flight", "leaves_no_trace")
)
def delayed_all_reduce(ctx: RankContext) -> None:
    """Train with the parameters of argument `delayed` (all, if not given) waiting for that of argument `trigger`.

    `module` is a name of `MODULES`, in `dtype`. Each step has `local` backwards under `no_sync` before the one that
    synchronises. Ranks of `spare_on` (all, if not given) use the spare layer; `zero_grad` is as in a `Step`, and
    `frozen` names parameters without gradient. Observes gradients after each backward; after the synchronised one also
    `step<k>/early`, the number of elements that the DDP reduced before the trigger's gradient was ready, and, where
    they are known, `step<k>/sizes`, the elements of each collective. Argument `following` names a parameter whose
    gradient is computed after the trigger's; `step<k>/before_next` are, from step 1 on, the elements of each collective
    that was issued before. All ranks run it.
    """
    module = moved(_build(ctx.scenario), ctx.device)
    if ctx.arguments.get("different_weights") and ctx.rank:
        with_small_weights(module, "different", ctx.rank)
    early: list[int] = []
    when_next: list[int] = []
    if following := ctx.arguments.get("following"):
        module.get_parameter(following).register_hook(lambda _: when_next.append(len(ctx.collectives())))
    trigger = module.get_parameter(ctx.arguments["trigger"])
    trigger.register_hook(lambda _: early.append(len(ctx.collectives())))
    named = [(name, module.get_parameter(name)) for name in _delayed(ctx.scenario, module)]
    model = ctx.wrap(module, delay_all_reduce_named_params=named, param_to_hook_all_reduce=trigger)
    judged = _traffic(ctx.scenario, module)
    ctx.observe_parameters("constructed", module)
    for index in range(NUM_STEPS):
        if (how := ctx.arguments.get("zero_grad", "none")) != "keep":
            module.zero_grad(set_to_none=how == "none")
        turn = rank_step(ctx, index)
        for micro in range(ctx.arguments.get("local", 0)):
            with ctx.no_sync(model):
                _backward(ctx.scenario, model, turn, micro)
            ctx.observe_gradients(f"step{index}/local{micro}", module)
        before = len(ctx.collectives())
        early.clear()
        when_next.clear()
        _backward(ctx.scenario, model, turn, ctx.arguments.get("local", 0))
        ctx.observe_gradients(f"step{index}", module)
        issued = ctx.collectives()
        sent = [each.numel for each in issued[before : early[0]] if is_gradient(each)]
        ctx.observe(f"step{index}/early", sum(sent), must=judged["early"])
        if index and "before_next" in judged:
            sent = [each.numel for each in issued[before : when_next[0]] if is_gradient(each)]
            ctx.observe(f"step{index}/before_next", sent, must=judged["before_next"])
        if "sizes" in judged:
            sizes = sorted(each.numel for each in issued[before:] if is_gradient(each))
            ctx.observe(f"step{index}/sizes", sizes, must=judged["sizes"])


def _holds_once(got: list[int], size: int) -> bool:
    return got.count(size) == 1


def _traffic(scenario: Scenario, module: nn.Module) -> dict[str, Any]:
    parameters = {name: parameter.numel() for name, parameter in module.named_parameters() if parameter.requires_grad}
    delayed = sum(numel for name, numel in parameters.items() if name in _delayed(scenario, module))
    prompt = sum(parameters.values()) - delayed
    trigger = scenario.arguments["trigger"]
    most = prompt if trigger in _delayed(scenario, module) else prompt - parameters[trigger]
    facts: dict[str, Any] = {"early": at_most(most, "elements, those that need not wait")}
    if scenario.arguments.get("following") and scenario.world_size > 1:
        said = f"one collective of the {delayed} delayed elements"
        facts["before_next"] = Satisfies(said, _holds_once, (delayed,))
    asks_when = "following" in scenario.arguments  # the delayed gradients may then split a bucket
    in_one_piece = (
        not asks_when and "bucket_cap_mb" not in scenario.options and not {"module", "dtype"} & set(scenario.arguments)
    )
    if scenario.world_size > 1 and in_one_piece and scenario.arguments.get("spare_on") is None:
        facts["sizes"] = sorted(numel for numel in (prompt, delayed) if numel)
    return facts


def _other(_: nn.Module) -> nn.Parameter:
    return nn.Parameter(torch.ones(2))


#: Arguments that contradict each other or the module: keyword arguments made from it, and what the error must say.
_REFUSED: Mapping[str, tuple[Callable[[Any], Mapping[str, Any]], Raises]] = {
    "trigger_alone": (
        lambda module: {"param_to_hook_all_reduce": module.first.weight},
        Raises(("ValueError",), ("delay_all_reduce_named_params", "param_to_hook_all_reduce")),
    ),
    "names_alone": (
        lambda module: {"delay_all_reduce_named_params": [("last.weight", module.last.weight)]},
        Raises(("ValueError",), ("delay_all_reduce_named_params", "param_to_hook_all_reduce")),
    ),
    "stranger": (
        lambda module: {
            "delay_all_reduce_named_params": [("stranger", _other(module))],
            "param_to_hook_all_reduce": module.first.weight,
        },
        Raises(("ValueError",), ("stranger",)),
    ),
    "wrong_name": (
        lambda module: {
            "delay_all_reduce_named_params": [("last.bias", module.last.weight)],
            "param_to_hook_all_reduce": module.first.weight,
        },
        Raises(("ValueError",), ("last.bias",)),
    ),
    "strange_trigger": (
        lambda module: {
            "delay_all_reduce_named_params": [("last.weight", module.last.weight)],
            "param_to_hook_all_reduce": _other(module),
        },
        Raises(("ValueError",), ("param_to_hook_all_reduce",)),
    ),
    "frozen_trigger": (
        lambda module: {
            "delay_all_reduce_named_params": [("last.weight", module.last.weight)],
            "param_to_hook_all_reduce": module.first.weight.requires_grad_(False),
        },
        Raises(("ValueError", "RuntimeError"), ("param_to_hook_all_reduce",)),
    ),
}


@program("delayed_all_reduce_refusal", invariants=("leaves_no_trace",))
def delayed_all_reduce_refusal(ctx: RankContext) -> None:
    """Wrap with the arguments that argument `case` names; observe the exception as `construct`. All ranks run it."""
    arguments, answer = _REFUSED[ctx.arguments["case"]]
    module = Chain().to(ctx.device)
    with ctx.catching("construct", must=answer):
        ctx.wrap(module, **arguments(module))
