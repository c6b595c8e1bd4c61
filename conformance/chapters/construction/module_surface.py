"""Program `module_surface`: state_dict, load_state_dict and the walks of `nn.Module`, with all their arguments.

The truth is a module that holds the wrapped one as `module` and does nothing else: what it returns, a DDP must return.
"""

import itertools
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from conformance.models.catalogue import moved
from conformance.models.integers import with_integer_weights
from conformance.observation import Facts
from conformance.programs import RankContext, program, rank_step
from conformance.scenario import Scenario

WIDTH = 3
_FLAGS = (False, True)


class Versioned(nn.Module):
    """A layer that counts the calls of its hooks, has extra state, and keeps the version of the state that it loads."""

    _version = 3

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH, WIDTH))
        self.frozen = nn.Parameter(torch.empty(2), requires_grad=False)
        self.register_buffer("table", torch.arange(2.0))
        self.register_buffer("hidden", torch.zeros(2), persistent=False)
        self.extra = "at first"
        self.calls: Counter[str] = Counter()
        self.register_state_dict_pre_hook(lambda *_: self.calls.update(["before state_dict"]))
        self.register_state_dict_post_hook(lambda *_: self.calls.update(["after state_dict"]))
        self.register_load_state_dict_pre_hook(self._before_loading)
        self.register_load_state_dict_post_hook(lambda *_: self.calls.update(["after load_state_dict"]))

    def _before_loading(self, _: nn.Module, state: Any, prefix: str, metadata: Any, *__: Any) -> None:
        self.calls.update([f"before load_state_dict of {prefix}, version {metadata.get('version')}"])

    def get_extra_state(self) -> str:
        return self.extra

    def set_extra_state(self, state: str) -> None:
        self.extra = state

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs @ self.weight


class Parts(nn.Module):
    """Layers inside layers, one of them under two names, and two that share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(()))
        self.first = Versioned()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH, bias=False))
        self.again = self.first
        self.tied = nn.Linear(WIDTH, WIDTH, bias=False)
        self.tied.weight = self.inner[2].weight  # type: ignore[assignment]

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.tied(self.again(self.inner(self.first(inputs)))) * self.scale
        return output


class Holder(nn.Module):
    """Holds a module as `module`, as every wrapper does."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def _whose(module: nn.Module) -> Callable[[Any], str]:
    """Return a function that names the object of `module` that a thing is, or the tensor whose memory it is in."""
    objects: dict[int, str] = {}
    memory: dict[int, str] = {}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        objects[id(tensor)] = memory[tensor.data_ptr()] = name
    objects |= {id(part): f"module {name}" for name, part in module.named_modules()}

    def name_of(thing: Any) -> str:
        if id(thing) in objects:
            return f"{objects[id(thing)]} itself"
        if isinstance(thing, Tensor):
            return f"in the memory of {memory.get(thing.data_ptr())}, requires_grad={thing.requires_grad}"
        return repr(thing) if isinstance(thing, str) else "another object"

    return name_of


def _calls_of(module: Any) -> dict[str, int]:
    """Return how often each hook was called since the last call of this function."""
    calls = dict(module.first.calls)
    module.first.calls.clear()
    return calls


def _state_dicts(model: nn.Module, module: nn.Module) -> Mapping[str, Any]:
    whose, facts = _whose(module), {}
    _calls_of(module)
    for keep_vars, prefix, given in itertools.product(_FLAGS, ("", "net."), _FLAGS):
        options: dict[str, Any] = {"keep_vars": keep_vars, "prefix": prefix}
        if given:
            options["destination"] = OrderedDict(before=torch.zeros(1))
        state = model.state_dict(**options)
        metadata = {name: dict(version) for name, version in getattr(state, "_metadata", {}).items()}
        metadata.pop(prefix.removesuffix("."), None)  # of the wrapper itself, which may have a version of its own
        facts[f"keep_vars={keep_vars}, prefix={prefix!r}, destination={'given' if given else None}"] = {
            "is what was given": state is options.get("destination"),
            "type": type(state).__name__,
            "holds": {name: whose(value) for name, value in state.items()},
            "order": list(state),
            "metadata": metadata,
            "hooks": _calls_of(module),
        }
    facts["without arguments"] = {name: whose(value) for name, value in model.state_dict().items()}
    return facts


def _loads(model: nn.Module, module: nn.Module) -> Mapping[str, Any]:
    facts = {}
    for number, (case, strict, assign) in enumerate(itertools.product(_CHANGES, _FLAGS, _FLAGS)):
        state, whose = _state_to_load(model, case, number), _whose(module)
        brought = {value.data_ptr(): name for name, value in state.items() if isinstance(value, Tensor)}
        _calls_of(module)
        found: Any = None
        raised = ""
        try:
            found = model.load_state_dict(state, strict=strict, assign=assign)
        except Exception as error:
            raised = f"{type(error).__name__} about {[name for name in _NAMED if name in str(error)]}"
        hooks = _calls_of(module)
        tensors = dict((*module.named_parameters(), *module.named_buffers()))
        facts[f"{case}, strict={strict}, assign={assign}"] = {
            "raised": raised,
            "returned": None if found is None else [type(found).__name__, found.missing_keys, found.unexpected_keys],
            "objects": {name: whose(tensor) for name, tensor in tensors.items()},
            "taken from the state": {name: brought.get(tensor.data_ptr(), "") for name, tensor in tensors.items()},
            "values": tensors,
            "extra state": module.get_submodule("first").get_extra_state(),
            "hooks": hooks,
        }
    return facts


def _state_to_load(model: nn.Module, case: str, number: int) -> dict[str, Any]:
    """Return a state like the model's, full of `number`, and changed as `case` says."""
    saved: Any = model.state_dict()
    state: Any = OrderedDict(
        (name, torch.full_like(value, number) if isinstance(value, Tensor) else f"state {number}")
        for name, value in saved.items()
    )
    if case != "no metadata":
        state._metadata = saved._metadata
    _CHANGES[case](state)
    return state


def _rename(state: dict[str, Any]) -> None:
    state["module.stranger"] = state.pop("module.inner.0.weight")


def _reshape(state: dict[str, Any]) -> None:
    state["module.scale"] = torch.zeros(5)


#: An error must contain the names among these that are wrong.
_NAMED = ("module.stranger", "module.inner.0.weight", "module.scale", "module.first.frozen")

#: What is done to a state before it is loaded.
_CHANGES: Mapping[str, Callable[[dict[str, Any]], None]] = {
    "as saved": lambda _: None,
    "no metadata": lambda _: None,
    "another name": _rename,
    "another shape": _reshape,
}


def _walks(model: nn.Module, module: nn.Module) -> Mapping[str, Any]:
    whose, facts = _whose(module), {}

    def walk(what: str, found: Iterable[Any]) -> None:
        own = [each for each in found if each is not model and each != ("", model) and each != ("net", model)]
        facts[what] = [[each[0], whose(each[1])] if isinstance(each, tuple) else whose(each) for each in own]

    for kind, duplicates, prefix in itertools.product(("parameters", "buffers"), _FLAGS, ("", "net")):
        for recurse in _FLAGS:
            found = getattr(model, f"named_{kind}")(prefix=prefix, recurse=recurse, remove_duplicate=not duplicates)
            walk(f"named_{kind}(prefix={prefix!r}, recurse={recurse}), duplicates={duplicates}", found)
    for recurse in _FLAGS:
        walk(f"parameters(recurse={recurse})", model.parameters(recurse=recurse))
        walk(f"buffers(recurse={recurse})", model.buffers(recurse=recurse))
    for duplicates, prefix in itertools.product(_FLAGS, ("", "net")):
        found = model.named_modules(prefix=prefix, remove_duplicate=not duplicates)
        walk(f"named_modules(prefix={prefix!r}), duplicates={duplicates}", found)
    walk("named_modules() of a memo", model.named_modules(memo={module.get_submodule("inner")}))
    walk("modules()", model.modules())
    walk("children()", model.children())
    walk("named_children()", model.named_children())
    walk(
        "get",
        [
            model.get_parameter("module.inner.0.weight"),
            model.get_buffer("module.first.table"),
            model.get_submodule("module.inner.1"),
        ],
    )
    return facts


ASPECTS: Mapping[str, Callable[[nn.Module, nn.Module], Mapping[str, Any]]] = {
    "state_dict": _state_dicts,
    "load_state_dict": _loads,
    "walks": _walks,
}


#: When each aspect is observed. Loading is last, because a state may bring parameters of its own.
MOMENTS = {
    "state_dict": ("constructed", "trained"),
    "load_state_dict": ("trained",),
    "walks": ("constructed", "trained"),
}


def _build(scenario: Scenario) -> Parts:
    return with_integer_weights(Parts(), scenario.seed)


@program("module_surface", invariants=("same_collectives", "nothing_in_flight", "leaves_no_trace"))
def module_surface(ctx: RankContext) -> None:
    """Observe the aspect of the wrapper that argument `aspect` names, at its `MOMENTS`; all ranks run it.

    Facts are `constructed/<call>`, before a step of training, and `trained/<call>`, after it.
    """
    module = moved(_build(ctx.scenario), ctx.device)
    model = ctx.wrap(module)
    aspect = ctx.arguments["aspect"]
    for moment in MOMENTS[aspect]:
        if moment == "trained":
            turn = rank_step(ctx, 0)
            turn.backward(turn.loss(turn.forward(model, turn.inputs(4, WIDTH))))
        for name, value in ASPECTS[aspect](model, module).items():
            ctx.observe(f"{moment}/{name}", value)


@module_surface.expects
def _expected(scenario: Scenario) -> Mapping[int, Facts]:
    aspect = scenario.arguments["aspect"]
    facts: dict[str, Any] = {}
    for moment in MOMENTS[aspect]:
        module = _build(scenario)
        facts |= {f"{moment}/{name}": value for name, value in ASPECTS[aspect](Holder(module), module).items()}
    return dict.fromkeys(range(scenario.world_size), facts)
