"""Program `wrapper_surface`: what frameworks and users access on a wrapper besides forward and backward."""

import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from conformance.models.integers import with_integer_weights
from conformance.observation import Facts
from conformance.programs.rank_context import RankContext
from conformance.programs.registry import program_without_truth
from conformance.scenario import Scenario
from conformance.truth.expected import Satisfies

#: The arguments of torch's constructor after the module, in their order, with their defaults; the group is the ranks'.
_DEFAULTS: Mapping[str, Any] = {
    "device_ids": None, "output_device": None, "dim": 0, "broadcast_buffers": True, "init_sync": True,
    "process_group": None, "bucket_cap_mb": None, "find_unused_parameters": False, "check_reduction": False,
    "gradient_as_bucket_view": False, "static_graph": False, "delay_all_reduce_named_params": None,
    "param_to_hook_all_reduce": None, "mixed_precision": None, "device_mesh": None,
    "skip_all_reduce_unused_params": False, "bucket_cap_mb_list": None, "batched_grad_copy": False,
    "forward_sync_buffers": None, "lazy_bucket_allocation": False,
}  # fmt: skip
#: The arguments of the installed torch; a DDP may have more after them.
ARGUMENTS = {
    name: _DEFAULTS[name]
    for name in inspect.signature(nn.parallel.DistributedDataParallel).parameters
    if name in _DEFAULTS
}

_GROUP = list(ARGUMENTS).index("process_group")

Aspect = Callable[[RankContext, nn.Module], Mapping[str, Any]]


def _module() -> nn.Module:
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout(0.5), nn.Linear(2, 1, bias=False))
    return with_integer_weights(module)


def _identity(ctx: RankContext, module: nn.Module) -> Mapping[str, Any]:
    parameters, buffers = list(module.parameters()), list(module.buffers())
    model = ctx.wrap(module)
    return {
        "same_module": model.module is module,
        "same_parameters": all(mine is its for mine, its in zip(parameters, model.parameters(), strict=True)),
        "same_buffers": all(mine is its for mine, its in zip(buffers, model.buffers(), strict=True)),
    }


def _state(ctx: RankContext, module: nn.Module) -> Mapping[str, Any]:
    model = ctx.wrap(module)
    state = {name: torch.full_like(value, 3) for name, value in model.state_dict().items()}
    loaded = model.load_state_dict(state)
    return {
        "state_names": list(state),
        "parameter_names": [name for name, _ in model.named_parameters()],
        "buffer_names": [name for name, _ in model.named_buffers()],
        "missing": list(loaded.missing_keys),
        "unexpected": list(loaded.unexpected_keys),
        "loaded": module.get_parameter("0.weight"),
    }


def _modes(ctx: RankContext, module: nn.Module) -> Mapping[str, Any]:
    model = ctx.wrap(module)
    facts: dict[str, Any] = {"train_at_first": [model.training, module.training]}
    facts["eval_returns_wrapper"] = model.eval() is model
    facts["after_eval"] = [model.training, *(part.training for part in module.modules())]
    facts["train_returns_wrapper"] = model.train() is model
    facts["after_train"] = [model.training, *(part.training for part in module.modules())]
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    model.zero_grad()
    facts["zeroed"] = [parameter.grad is None for parameter in module.parameters()]
    visited: list[str] = []
    model.apply(lambda part: visited.append(type(part).__name__))
    facts["visited"] = visited[:-1]  # the last one is the wrapper itself, under whatever name
    model.requires_grad_(False)
    facts["requires_grad"] = [parameter.requires_grad for parameter in module.parameters()]
    return facts


def _signature(ctx: RankContext, module: nn.Module) -> Mapping[str, Any]:
    """Pass ever more arguments by position, and the next by its name; then the last by its name as well.

    The signature would not show this: a subclass may pass all of its arguments on.
    """
    construct: Any = type(ctx.wrap(module))
    values = {**ARGUMENTS, "process_group": ctx.process_group}
    by_name, once = [], []
    for count, name in enumerate(values):
        positional, default = list(values.values())[: count + 1], values[name]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            named = {"process_group": ctx.process_group, name: default} if count < _GROUP else {name: default}
            if _takes(construct, module, *positional[:-1], **named):
                by_name.append(name)
            if not _takes(construct, module, *positional, **{name: default}):
                once.append(name)
    return {"by_name": by_name, "in_this_place": once}


def _takes(construct: Callable[..., nn.Module], module: nn.Module, *arguments: Any, **options: Any) -> bool:
    try:
        construct(module, *arguments, **options)
    except TypeError:
        return False
    return True


def _attributes(ctx: RankContext, module: nn.Module) -> Mapping[str, Any]:
    module._ddp_params_and_buffers_to_ignore = ["0.bias"]  # type: ignore[assignment]
    model: Any = ctx.wrap(module)
    return {
        "require_backward_grad_sync": model.require_backward_grad_sync,
        "find_unused_parameters": model.find_unused_parameters,
        "gradient_as_bucket_view": model.gradient_as_bucket_view,
        "same_group": model.process_group is ctx.process_group,
        "device_type": model.device.type == ctx.device.type,
        "parameters_to_ignore": sorted(model.parameters_to_ignore),
    }


def _wrap_and_warn(ctx: RankContext, module: nn.Module, **options: Any) -> tuple[Any, list[str]]:
    """Return the wrapped module and the FutureWarnings of its construction."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = ctx.wrap(module, **options)
    return model, [str(each.message) for each in caught if issubclass(each.category, FutureWarning)]


def _check_reduction(ctx: RankContext, module: nn.Module) -> Mapping[str, Any]:
    return {"warned": _wrap_and_warn(ctx, module, check_reduction=True)[1]}


def _deprecated_broadcast(ctx: RankContext, module: nn.Module) -> Mapping[str, Any]:
    alone, warned_alone = _wrap_and_warn(ctx, module, broadcast_buffers=True)
    both, warned_both = _wrap_and_warn(ctx, module, broadcast_buffers=False, forward_sync_buffers=True)
    return {
        "alone/warned": warned_alone,
        "alone/synchronises": alone.forward_sync_buffers,
        "both/warned": warned_both,
        "both/synchronises": both.forward_sync_buffers,
    }


def _ignore_by_method(ctx: RankContext, module: nn.Module) -> Mapping[str, Any]:
    # Frameworks call the static method of the class, which a program does not know.
    ddp = type(ctx.wrap(_module().to(ctx.device)))
    ddp._set_params_and_buffers_to_ignore_for_model(module, ["0.weight"])  # type: ignore[attr-defined]
    model: Any = ctx.wrap(module)
    return {"parameters_to_ignore": sorted(model.parameters_to_ignore)}


def _one_mention(word: str) -> Satisfies:
    return Satisfies(f"a list with one FutureWarning that mentions {word}", _is_one_mention, (word,))


def _is_one_mention(got: list[str], word: str) -> bool:
    return len(got) == 1 and word in got[0]


_STATE = ["0.weight", "0.bias", "1.weight", "1.bias", "1.running_mean", "1.running_var", "1.num_batches_tracked"]
_PARAMETERS = ["0.weight", "0.bias", "1.weight", "1.bias", "3.weight"]

ASPECTS: Mapping[str, tuple[Aspect, Facts]] = {
    "identity": (_identity, {"same_module": True, "same_parameters": True, "same_buffers": True}),
    "state": (
        _state,
        {
            "state_names": [f"module.{name}" for name in [*_STATE, "3.weight"]],
            "parameter_names": [f"module.{name}" for name in _PARAMETERS],
            "buffer_names": [f"module.{name}" for name in _STATE[4:]],
            "missing": [],
            "unexpected": [],
            "loaded": torch.full((2, 2), 3.0),
        },
    ),
    "modes": (
        _modes,
        {
            "train_at_first": [True, True],
            "eval_returns_wrapper": True,
            "after_eval": [False] * 6,
            "train_returns_wrapper": True,
            "after_train": [True] * 6,
            "zeroed": [True] * 5,
            "visited": ["Linear", "BatchNorm1d", "Dropout", "Linear", "Sequential"],
            "requires_grad": [False] * 5,
        },
    ),
    "signature": (_signature, {"by_name": list(ARGUMENTS), "in_this_place": list(ARGUMENTS)}),
    "attributes": (
        _attributes,
        {"require_backward_grad_sync": True, "same_group": True, "device_type": True,
         "parameters_to_ignore": ["0.bias"]},
    ),
    "check_reduction": (_check_reduction, {"warned": _one_mention("check_reduction")}),
    "deprecated_broadcast": (
        _deprecated_broadcast,
        {
            "alone/warned": _one_mention("broadcast_buffers"),
            "alone/synchronises": True,
            "both/warned": _one_mention("broadcast_buffers"),
            "both/synchronises": True,
        },
    ),
    "ignore_by_method": (_ignore_by_method, {"parameters_to_ignore": ["0.weight"]}),
}  # fmt: skip


@program_without_truth("wrapper_surface", invariants=("same_collectives", "leaves_no_trace"))
def wrapper_surface(ctx: RankContext) -> None:
    """Observe the aspect of the wrapper that argument `aspect` names. All ranks run it."""
    observe, _ = ASPECTS[ctx.arguments["aspect"]]
    for name, value in observe(ctx, _module().to(ctx.device)).items():
        ctx.observe(name, value)


@wrapper_surface.expects
def _expected(scenario: Scenario) -> Mapping[int, Facts]:
    aspect = scenario.arguments["aspect"]
    facts = dict(ASPECTS[aspect][1])
    if aspect == "attributes":
        for option in ("find_unused_parameters", "gradient_as_bucket_view"):
            facts[option] = bool(scenario.options.get(option, False))
    return dict.fromkeys(range(scenario.world_size), facts)
