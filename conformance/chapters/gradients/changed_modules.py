"""Programs `unknown_parameters` and `harmless_change`: the user changes a module that is wrapped already.

Parameters that DDP was not given train on local gradients, without an error, and the ranks drift apart. A change that
brings no such parameter must go through.
"""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

from conformance.models.integers import RankStep, with_integer_weights
from conformance.observation import Facts, Raised
from conformance.programs import RankContext, observe_run, program, rank_step, run_steps, step_on
from conformance.scenario import Scenario
from conformance.truth.expected import Satisfies

WIDTH = 4
_ordinary = step_on(3, WIDTH)


class Adapted(nn.Module):
    """A layer with named adapters beside it, of which one is in use: how adapter libraries change a model."""

    def __init__(self, base: nn.Module, *names: str) -> None:
        super().__init__()
        self.base = base
        self.adapters = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH, bias=False) for name in names})
        self.use(names[0])

    def use(self, name: str) -> None:
        self.active = name
        for each, adapter in self.adapters.items():
            adapter.requires_grad_(each == name)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden: Tensor = self.base(inputs) + self.adapters[self.active](inputs)
        return hidden


class Scaled(nn.Module):
    """A parametrization with a parameter of its own, or with none."""

    def __init__(self, *, learnt: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((1,), 2.0)) if learnt else 2

    def forward(self, weight: Tensor) -> Tensor:
        return weight * self.scale


class Pool(nn.Module):
    """Layers, an adapted one, parameters in a list, and a frozen layer that later steps may unfreeze."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        self.adapted = Adapted(nn.Linear(WIDTH, WIDTH), "a", "b")
        self.offsets = nn.ParameterList([nn.Parameter(torch.zeros(WIDTH))])
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.frozen(self.adapted(self.layers(inputs)))
        for offset in self.offsets:
            hidden = hidden + offset
        return hidden


def _new_layer(module: nn.Module) -> nn.Module:
    return with_integer_weights(nn.Linear(WIDTH, WIDTH), "new").to(next(module.parameters()).device)


def _replace_parameter(module: Any) -> None:
    module.layers[1].weight = nn.Parameter(module.layers[1].weight.detach().clone())


def _replace_layer(module: Any) -> None:
    module.layers[1] = _new_layer(module)


def _append(module: Any) -> None:
    module.layers.append(_new_layer(module))


def _unfreeze(module: Any) -> None:
    module.frozen.requires_grad_(True)


def _add_adapter(module: Any) -> None:
    module.layers[0] = Adapted(module.layers[0], "late").to(module.offsets[0].device)


def _switch_adapter(module: Any) -> None:
    module.adapted.use("b")


def _parametrize(module: Any) -> None:
    parametrize.register_parametrization(module.layers[0], "weight", Scaled(learnt=True).to(module.offsets[0].device))


def _weight_norm(module: Any) -> None:
    parametrizations.weight_norm(module.layers[0])


def _register(module: Any) -> None:
    module.layers[0].register_parameter("gain", nn.Parameter(module.offsets[0].detach().clone()))


def _append_parameter(module: Any) -> None:
    module.offsets.append(nn.Parameter(module.offsets[0].detach().clone()))


def _swap(module: Any) -> None:
    old = module.layers[1].weight
    torch.utils.swap_tensors(old, nn.Parameter(old.detach().clone()))


def _grow_leaf(module: Any) -> None:
    module.layers[1].add_module("late", _new_layer(module))


@dataclass(frozen=True)
class _Change:
    """What the user does to the module, and the parameter that is not averaged afterwards."""

    make: Callable[[Any], None]
    names: str


UNKNOWN: Mapping[str, _Change] = {
    "replaced_parameter": _Change(_replace_parameter, "layers.1.weight"),
    "swapped_parameter": _Change(_swap, "layers.1.weight"),
    "replaced_layer": _Change(_replace_layer, "layers.1.weight"),
    "appended_layer": _Change(_append, "layers.2.weight"),
    "unfrozen_layer": _Change(_unfreeze, "frozen.weight"),
    "added_adapter": _Change(_add_adapter, "layers.0.adapters.late.weight"),
    "switched_adapter": _Change(_switch_adapter, "adapted.adapters.b.weight"),
    "parametrization": _Change(_parametrize, "layers.0.parametrizations.weight.0.scale"),
    "weight_norm": _Change(_weight_norm, "layers.0.parametrizations.weight.original0"),
    "registered_parameter": _Change(_register, "layers.0.gain"),
    "appended_parameter": _Change(_append_parameter, "offsets.1"),
    "child_of_a_leaf": _Change(_grow_leaf, "layers.1.late.weight"),
}


def _append_frozen(module: Any) -> None:
    module.layers.append(_new_layer(module).requires_grad_(False))


def _nest(module: Any) -> None:
    module.layers[0] = nn.Sequential(module.layers[0])


def _share(module: Any) -> None:
    module.layers.append(module.layers[0])


def _parametrize_plainly(module: Any) -> None:
    parametrize.register_parametrization(module.layers[0], "weight", Scaled(learnt=False))


def _prune(module: Any) -> None:
    prune.l1_unstructured(module.layers[0], "weight", amount=2)


def _buffer(module: Any) -> None:
    module.layers[0].register_buffer("seen", torch.zeros(2, device=module.offsets[0].device))


def _freeze_and_thaw(module: Any) -> None:
    module.layers.requires_grad_(False)
    module.layers.requires_grad_(True)


def _other_hook(module: Any) -> None:
    module.layers[0].register_forward_hook(lambda *_: None)


def _convert_and_back(module: Any) -> None:
    """Give parameters and their gradients other memory twice, as `to` does; the values stay."""
    module.double()
    module.float()


HARMLESS: Mapping[str, Callable[[Any], None]] = {
    "appended_frozen_layer": _append_frozen,
    "nested_layer": _nest,
    "shared_layer": _share,
    "plain_parametrization": _parametrize_plainly,
    "pruned_layer": _prune,
    "registered_buffer": _buffer,
    "frozen_and_unfrozen": _freeze_and_thaw,
    "forward_hook": _other_hook,
    "converted_and_back": _convert_and_back,
}


def _module(scenario: Scenario) -> Any:
    return with_integer_weights(Pool(), scenario.seed)


@program("unknown_parameters", invariants=("leaves_no_trace",))
def unknown_parameters(ctx: RankContext) -> None:
    """Train `steps_before` steps, make the change that argument `change` names, and train two more. All ranks run it.

    The ranks in argument `frozen_on` freeze the parameter that is not averaged now. Observes `answers`: the texts of
    the warnings and of the exception.
    """
    module = _module(ctx.scenario).to(ctx.device)
    model: Any = ctx.wrap(module)
    first = ctx.arguments["steps_before"]
    for index in range(first):
        _ordinary(model, rank_step(ctx, index))
    change = UNKNOWN[ctx.arguments["change"]]
    change.make(module)
    if ctx.rank in ctx.arguments.get("frozen_on", ()):
        module.get_parameter(change.names).requires_grad_(False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with ctx.catching("raised"):
            for index in range(first, first + 2):
                module.zero_grad()
                if ctx.arguments.get("accumulates"):
                    with model.no_sync():
                        _ordinary(model, rank_step(ctx, index))
                _ordinary(model, rank_step(ctx, index))
    error = ctx.facts.pop("raised")
    ctx.observe("answers", [str(each.message) for each in caught] + ([] if error is None else [error]))


#: One of them is in a text that says what to do.
_WHAT_TO_DO = ("wrap", "construct", "build", "creat", "before", "again")


@unknown_parameters.expects
def _named(scenario: Scenario) -> Mapping[int, Facts]:
    name = UNKNOWN[scenario.arguments["change"]].names
    says = f"a list with an exception or a warning that names {name!r} and says what to do"
    answer = Satisfies(says, _names_and_advises, (name,))
    return {rank: {"answers": answer} for rank in range(scenario.world_size)}


def _names_and_advises(answers: list[Any], name: str) -> bool:
    texts = [item.message if isinstance(item, Raised) else item for item in answers]
    return any(name in text and any(word in text for word in _WHAT_TO_DO) for text in texts)


def _changing(scenario: Scenario) -> Callable[[Any, RankStep], None]:
    def step(model: Any, turn: RankStep) -> None:
        after = scenario.arguments.get("after")
        if after is None and turn.step == 1:
            HARMLESS[scenario.arguments["change"]](model.module)
        _ordinary(model, turn)
        if turn.step == after:
            HARMLESS[scenario.arguments["change"]](model.module)

    return step


@program("harmless_change", invariants=("leaves_no_trace",))
def harmless_change(ctx: RankContext) -> None:
    """Train four steps and make the change that argument `change` names, in step 1 or after step `after`.

    All ranks run it.

    Observes `step<k>/grad/<name>`, under the names that parameters have then.
    """
    module = _module(ctx.scenario).to(ctx.device)
    observe_run(ctx, lambda: run_steps(ctx, module, ctx.wrap(module), _changing(ctx.scenario), 4))
