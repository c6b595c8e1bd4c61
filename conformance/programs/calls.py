"""Program `calls`: every way to pass something to forward, and the gradients that the caller gets.

A call is a place among the arguments of forward and a container in that place; the program makes each combination.
"""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from conformance.models.integers import RankStep, with_integer_weights
from conformance.programs import RankContext, program, run_steps

WIDTH = 3

#: What a scenario may judge: what forward received and returned, or gradients.
JUDGED = {"passed": ("received/", "returned/"), "gradients": ("input_grad/", "grad/")}


class Named(NamedTuple):
    """Two tensors under names."""

    first: Tensor
    second: Tensor


@dataclass
class Record:
    """A tensor and another value."""

    value: Tensor
    note: Any = "note"


@dataclass(frozen=True)
class Frozen:
    """An immutable record."""

    value: Tensor
    note: Any = None


class Cache:
    """A tensor inside an object of a class that no DDP knows."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


class Batch(dict[Any, Any]):
    """A dictionary whose constructor does not take its items, with an attribute."""

    def __init__(self, size: int, **items: Any) -> None:
        super().__init__(items)
        self.size = size


class Rows(list[Any]):
    """A list whose constructor does not take its items, with an attribute."""

    def __init__(self, first: Any, second: Any) -> None:
        super().__init__([first, second])
        self.origin = "origin"


class Couple(tuple[Any, ...]):
    """A tuple of a class of its own."""


class Absent:
    """The default of every parameter of forward."""


ABSENT = Absent()

#: Containers by name: each builds an argument of forward from a function that returns tensors that require a gradient.
CONTAINERS: Mapping[str, Callable[[Callable[[], Tensor]], Any]] = {
    "tensor": lambda leaf: leaf(),
    "computed": lambda leaf: leaf() * 2,
    "list": lambda leaf: [leaf(), leaf()],
    "tuple": lambda leaf: (leaf(), 1.5, leaf()),
    "dict": lambda leaf: {"a": leaf(), "b": "text", 3: leaf()},
    "ordered_dict": lambda leaf: OrderedDict(z=leaf(), a=leaf()),
    "named_tuple": lambda leaf: Named(leaf(), leaf()),
    "dataclass": lambda leaf: Record(leaf()),
    "frozen_dataclass": lambda leaf: Frozen(leaf(), [1, 2]),
    "nested": lambda leaf: {"x": [(leaf(), None), {"y": Named(leaf(), leaf().detach())}], "z": Record(leaf())},
    "default_dict": lambda leaf: defaultdict(list, a=leaf(), b=[leaf()]),
    "counter": lambda leaf: Counter({"a": leaf(), "b": 2}),
    "own_dict": lambda leaf: Batch(2, a=leaf(), b=[leaf()]),
    "own_list": lambda leaf: Rows(leaf(), Batch(3, c=leaf())),
    "own_tuple": lambda leaf: Couple((leaf(), None)),
    "object": lambda leaf: Cache(leaf()),
    "twice": lambda leaf: [leaf()] * 2,
    "constant": lambda leaf: leaf().detach(),
    "integers": lambda leaf: leaf().detach().long(),
    "nothing": lambda _: None,
    "text": lambda _: "text",
}

#: Names that a DDP's own methods may have for their parameters.
NAMES_OF_METHODS = (
    "args", "backend", "buffers", "compiler", "device", "dtype", "fn", "forward", "function", "group", "hook", "input",
    "inputs", "kwargs", "model", "module", "obj", "output", "outputs", "self_", "step", "target", "tensors", "value",
)  # fmt: skip

#: Places by name: each returns the positional and the keyword arguments of a call that passes the value there.
PLACES: Mapping[str, Callable[[Any], tuple[tuple[Any, ...], Mapping[str, Any]]]] = {
    "alone": lambda value: ((value,), {}),
    "second": lambda value: ((7, value), {}),
    "further": lambda value: ((None, 7, "text", value), {"named": False}),
    "by_name": lambda value: ((), {"second": value}),
    "keyword_only": lambda value: ((), {"named": value}),
    "unknown_name": lambda value: ((7,), {"named": None, "other": value, "more": 0.5}),
    "names_of_methods": lambda value: ((7,), {**dict.fromkeys(NAMES_OF_METHODS, 0.5), "inputs": value}),
}


class Receiver(nn.Module):
    """Takes arguments in every way that a function of Python can, and keeps what it received."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 2)

    def forward(
        self, first: Any = ABSENT, /, second: Any = ABSENT, *further: Any, named: Any = ABSENT, **others: Any
    ) -> Tensor:
        """Return rows of 2, to which every tensor argument contributes by a factor of its own."""
        self.received = {"first": first, "second": second, "further": further, "named": named, "others": others}
        hidden = torch.ones(2, WIDTH, device=self.layer.weight.device)
        tensors = (part for part in parts(self.received) if isinstance(part, Tensor))
        for factor, tensor in enumerate(tensors, 1):
            hidden = hidden + factor * tensor
        return self.layer(hidden)


def parts(value: Any) -> Iterator[Any]:
    """Yield `value` and everything in it, in order, attributes of containers last."""
    yield value
    if isinstance(value, Mapping):
        inner = list(value.values())
    elif isinstance(value, list | tuple):
        inner = list(value)
    elif is_dataclass(value):
        inner = [getattr(value, field.name) for field in fields(value)]
    else:
        inner = list(vars(value).values()) if isinstance(value, Cache) else []
    if isinstance(value, Batch | Rows):
        inner += vars(value).values()
    if isinstance(value, defaultdict):
        inner.append(value.default_factory)
    for item in inner:
        yield from parts(item)


def _identity(part: Any) -> int:
    """Return the identity of a part: of a tensor its memory, because a DDP may pass a view."""
    return part.data_ptr() if isinstance(part, Tensor) else id(part)


def _shown(value: Any, given: Mapping[int, int]) -> list[Any]:
    """Describe every part of `value`: its type and which of the `given` parts it is, and a tensor itself."""
    shown: list[Any] = []
    for part in parts(value):
        kind = type(part).__name__ if not isinstance(part, Mapping) else f"{type(part).__name__} of {list(part)}"
        if isinstance(part, Tensor):
            shown.append([kind, f"memory of part {given.get(_identity(part))}", part.requires_grad, part])
        elif isinstance(part, list | tuple | Mapping) or is_dataclass(part):
            shown.append(kind)  # moving tensors to a device rebuilds containers
        else:
            shown.append([kind, f"part {given.get(_identity(part))}"])
    return shown


def _call(model: Any, turn: RankStep, place: str, container: str) -> Mapping[str, Any]:
    leaves: list[Tensor] = []

    def leaf() -> Tensor:
        leaves.append(turn.inputs(2, WIDTH, micro=len(leaves)).requires_grad_())
        return leaves[-1]

    args, kwargs = PLACES[place](CONTAINERS[container](leaf))
    given: dict[int, int] = {id(ABSENT): 0}
    for number, part in enumerate(parts([*args, *kwargs.values()]), 1):
        given.setdefault(_identity(part), number)
    output = turn.forward(model, *args, **kwargs)
    turn.backward(turn.loss(output))
    slug = f"{place}-{container}"
    return {
        f"received/{slug}": _shown(model.module.received, given),
        f"returned/{slug}": output,
        f"input_grad/{slug}": [tensor.grad for tensor in leaves],
    }


#: Each container in each place.
CALLS = tuple(itertools.product(PLACES, CONTAINERS))


def _step(model: Any, turn: RankStep) -> Mapping[str, Any]:
    return _call(model, turn, *CALLS[turn.step])


def _call_without_arguments(model: Any, turn: RankStep) -> Mapping[str, Any]:
    output = turn.forward(model)
    turn.backward(turn.loss(output))
    return {"received/nothing": _shown(model.module.received, {id(ABSENT): 0}), "returned/nothing": output}


@program("calls", invariants=("same_collectives", "nothing_in_flight", "leaves_no_trace"))
def calls(ctx: RankContext) -> None:
    """Call forward with each container in each place, a step for each; with `arguments` false, without any, twice.

    Argument `judge` is of `JUDGED`. Observes of each call `received`, what forward found where, and `returned`, what
    the caller got; or the gradients of the arguments, `input_grad`, and of the parameters, `grad`. All ranks run it.
    """
    module = with_integer_weights(Receiver(), ctx.scenario.seed).to(ctx.device)
    step, num_steps = (_step, len(CALLS)) if ctx.arguments.get("arguments", True) else (_call_without_arguments, 2)
    for name, value in run_steps(ctx, module, ctx.wrap(module), step, num_steps).items():
        if name.partition("/")[2].startswith(JUDGED[ctx.arguments["judge"]]):
            ctx.observe(name, value)
