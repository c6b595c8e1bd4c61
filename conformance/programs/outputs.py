"""Program `outputs`: inputs and outputs of forward, and whether gradients flow through every structure."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from conformance.models.integers import RankStep, with_integer_weights
from conformance.programs import RankContext, observe_run, program, run_steps
from conformance.scenario import Scenario
from conformance.truth.expected import Raises

NUM_STEPS = 2


class Pair(NamedTuple):
    """Two outputs under names."""

    first: Tensor
    second: Tensor


@dataclass
class Record:
    """Two outputs and something that is no tensor."""

    first: Tensor
    second: Tensor
    note: Any = None


@dataclass
class _Unset:
    """Two outputs, and a field that is never set."""

    first: Tensor
    second: Tensor
    later: Any = field(init=False)


class Opaque:
    """Two outputs inside an object of a class that no DDP knows."""

    def __init__(self, first: Tensor, second: Tensor) -> None:
        self.first = first
        self.second = second


class ReadOnce(list[Any]):
    """Two outputs that it hands out once: its iterator takes them out."""

    def __iter__(self) -> Iterator[Any]:
        while self:
            yield self.pop(0)


class Computed(Mapping[str, Any]):
    """Two outputs, and an entry that cannot be computed when it is read."""

    def __init__(self, first: Tensor, second: Tensor) -> None:
        self.outputs = {"a": first, "b": second}

    def __iter__(self) -> Iterator[str]:
        return iter(("a", "b", "weights"))

    def __len__(self) -> int:
        return 3

    def __getitem__(self, name: str) -> Any:
        if name == "weights":
            raise RuntimeError("the weights were not kept")
        return self.outputs[name]


@dataclass
class Refusing:
    """Two outputs, and a field that raises when it is read."""

    first: Tensor
    second: Tensor
    weights: Any = field(init=False, repr=False)


def _not_kept(_: object) -> Any:
    raise RuntimeError("the weights were not kept")


Refusing.weights = property(_not_kept)


class _Marker:
    """An object that is no tensor; forward must return the very object that it received."""


@dataclass(frozen=True)
class Structure:
    """Functions that build a structure from two tensors and a marker, find them in it, and describe its shape.

    `constants` finds tensors without a gradient: forward must return the very ones.
    """

    build: Callable[[Tensor, Tensor, _Marker], Any]
    parts: Callable[[Any], tuple[Tensor, ...]]
    shape: Callable[[Any], str]
    marker: Callable[[Any], Any] | None = None
    constants: Callable[[Any], tuple[Tensor, ...]] = lambda output: ()


def _kind(value: Any) -> str:
    """Describe a structure by its types, down to the leaves."""
    if isinstance(value, dict):
        return f"{type(value).__name__}({', '.join(f'{key}={_kind(item)}' for key, item in value.items())})"
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__}({', '.join(map(_kind, value))})"
    return type(value).__name__


def _fields_set(value: Any) -> str:
    return f"{_kind(value)} with {', '.join(vars(value))}"


def _type(value: Any) -> str:
    return type(value).__name__


def _list_of_itself(first: Tensor, second: Tensor, marker: _Marker) -> list[Any]:
    outputs: list[Any] = [first, second, marker]
    outputs.append(outputs)
    return outputs


def _dict_of_itself(first: Tensor, second: Tensor, marker: _Marker) -> dict[str, Any]:
    outputs: dict[str, Any] = {"a": first, "b": second, "m": marker}
    outputs["all"] = (outputs,)
    return outputs


def _jagged(first: Tensor, second: Tensor, marker: _Marker) -> tuple[Any, ...]:
    return first, torch.nested.as_nested_tensor([second[:1], second[1:]], layout=torch.jagged), marker


STRUCTURES: Mapping[str, Structure] = {
    "tensor": Structure(lambda a, b, _: a + b[:, :1], lambda out: (out,), _kind),
    "tuple": Structure(lambda a, b, m: (a, b, m), lambda out: (out[0], out[1]), _kind, lambda out: out[2]),
    "list": Structure(lambda a, b, m: [a, None, b, m], lambda out: (out[0], out[2]), _kind, lambda out: out[3]),
    "named_tuple": Structure(lambda a, b, _: Pair(a, b), lambda out: (out.first, out.second), _kind),
    "dict": Structure(
        lambda a, b, m: {"a": a, "b": b, "n": 7, "m": m}, lambda out: (out["a"], out["b"]), _kind, lambda out: out["m"]
    ),
    "nested": Structure(
        lambda a, b, m: {"x": [(a,), {"y": Pair(b, b)}], "m": (None, "text", m)},
        lambda out: (out["x"][0][0], out["x"][1]["y"].second),
        _kind,
        lambda out: out["m"][2],
    ),
    "dataclass": Structure(Record, lambda out: (out.first, out.second), _kind, lambda out: out.note),
    "nested_dataclass": Structure(
        lambda a, b, m: {"record": [Record(a, b, m)]},
        lambda out: (out["record"][0].first, out["record"][0].second),
        _kind,
        lambda out: out["record"][0].note,
    ),
    "unset_field": Structure(lambda a, b, _: _Unset(a, b), lambda out: (out.first, out.second), _fields_set),
    "list_of_itself": Structure(_list_of_itself, lambda out: (out[0], out[3][1]), _type, lambda out: out[3][3][2]),
    "dict_of_itself": Structure(
        _dict_of_itself, lambda out: (out["a"], out["all"][0]["b"]), _type, lambda out: out["all"][0]["m"]
    ),
    "jagged": Structure(_jagged, lambda out: (out[0], torch.cat(out[1].unbind())), _type, lambda out: out[2]),
    "with_constants": Structure(
        lambda a, b, _: (a.detach(), a, b, [torch.arange(3), torch.zeros(2)]),
        lambda out: (out[1], out[2]),
        _kind,
        constants=lambda out: (out[0], *out[3]),
    ),
    "read_once": Structure(lambda a, b, _: ReadOnce([a, b]), lambda out: (out.pop(0), out.pop(0)), _type),
    "computed": Structure(lambda a, b, _: Computed(a, b), lambda out: (out["a"], out["b"]), _type),
    "refusing": Structure(lambda a, b, _: Refusing(a, b), lambda out: (out.first, out.second), _type),
    "opaque": Structure(lambda a, b, _: Opaque(a, b), lambda out: (out.first, out.second), _kind),
}


class _TwoOutputs(nn.Module):
    """Two layers that feed the two outputs; a third layer feeds nothing if `spare`."""

    def __init__(self, structure: Structure, *, spare: bool) -> None:
        super().__init__()
        self.structure = structure
        self.first = nn.Linear(3, 2)
        self.second = nn.Linear(3, 4, bias=False)
        if spare:
            self.spare = nn.Linear(3, 2)

    def forward(self, inputs: Tensor, /, *rest: Any, marker: _Marker, **options: Any) -> Any:
        """Return the structure; `seen` stores the inputs, and `constants` the outputs without a gradient."""
        self.seen = (rest, marker, options)
        output = self.structure.build(self.first(inputs), self.second(inputs), marker)
        self.constants = self.structure.constants(output)
        return output


def _step(scenario: Scenario, model: Any, turn: RankStep) -> Mapping[str, Any]:
    structure = STRUCTURES[scenario.arguments["structure"]]
    marker, extra = _Marker(), {"deep": [_Marker()]}
    output = turn.forward(model, turn.inputs(5, 3), 3, extra, marker=marker, flag=None, scale=turn.inputs(2, micro=9))
    parts = structure.parts(output)
    used = parts[:1] if scenario.arguments.get("loss") == "first" else parts
    turn.backward(torch.stack([turn.loss(part, micro) for micro, part in enumerate(used)]).sum())
    rest, seen_marker, options = model.module.seen
    same_extra = rest[1] is extra
    if torch.device(turn.device).type != "cpu":  # moving inputs to a device rebuilds containers
        same_extra = rest[1]["deep"][0] is extra["deep"][0]
    return {
        "structure": structure.shape(output),
        "same_constants": [
            one is other and not one.requires_grad
            for one, other in zip(structure.constants(output), model.module.constants, strict=True)
        ],
        "same_marker": structure.marker is None or structure.marker(output) is marker,
        "arguments": [len(rest), rest[0], same_extra, seen_marker is marker, sorted(options), options["flag"]],
        "scale": options["scale"],
    }


@program("opaque_output", invariants=("leaves_no_trace",))
def opaque_output(ctx: RankContext) -> None:
    """Run `outputs` with structure "opaque", for which a DDP may raise: observe one fact `outcome`, or the error.

    All ranks run it.
    """
    _run(ctx, Raises(("RuntimeError", "TypeError"), ("output",)))


@program("outputs", invariants=("same_collectives", "nothing_in_flight", "leaves_no_trace"))
def outputs(ctx: RankContext) -> None:
    """Train two steps of a module that returns the structure that argument `structure` names.

    `spare` adds a layer that no output uses; `loss` = "first" uses the first output only. Observes forward's inputs and
    outputs, and the gradients. All ranks run it.
    """
    _run(ctx)


def _run(ctx: RankContext, refusal: Raises | None = None) -> None:
    built = _TwoOutputs(STRUCTURES[ctx.arguments["structure"]], spare=bool(ctx.arguments.get("spare")))
    module = with_integer_weights(built, ctx.scenario.seed).to(ctx.device)
    step = partial(_step, ctx.scenario)
    observe_run(ctx, lambda: run_steps(ctx, module, ctx.wrap(module), step, NUM_STEPS), refusal=refusal)
