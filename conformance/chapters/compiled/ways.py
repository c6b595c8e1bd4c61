"""Program `compiled_ways`: what is compiled is the wrapper, or lies inside: the module, parts of it, a function.

The module is a row of layers that fill a bucket each, in two halves. Each layer is followed by a mark, at which a
backward notes how many reductions have been issued.
"""

import gc
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import ge
from typing import Any

import torch
from torch import Tensor, nn

from conformance.chapters.compiled.compiling import OF_WARNINGS, PRELOAD, QUIET, CompilingContext, compiling
from conformance.chapters.compiled.overlap import listening, mark
from conformance.checkers.protocol import is_gradient
from conformance.models.integers import RankStep, with_integer_weights
from conformance.observation import Facts
from conformance.programs import RankContext, observe_run, program, rank_step, run_steps
from conformance.scenario import Scenario
from conformance.truth.expected import Satisfies
from conformance.truth.steps import simulate_steps

_WIDTH = 3
_NUM_LAYERS = 4
#: More than torch recompiles a function for, so that a way that compiles in every step is found out.
_NUM_STEPS = 20
#: How many steps are compared with the truth. After them nothing may be compiled any more: buckets are as they stay,
#: and batches have had two sizes.
_NUM_FIRST = 3


class Heavy(nn.Module):
    """A layer with one parameter of 1 MiB, the least that every DDP makes a bucket of; little of it takes part."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2**18))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * self.weight[:_WIDTH]


class Half(nn.Module):
    """Some layers, each followed by a mark; with `breaks`, and by a graph break."""

    def __init__(self, places: range, breaks: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Heavy() for _ in places)
        self._places = places
        self._breaks = breaks

    def forward(self, hidden: Tensor) -> Tensor:
        for place, layer in zip(self._places, self.layers, strict=True):
            hidden = mark(layer(hidden), place)
            if self._breaks:
                torch._dynamo.graph_break()
        return hidden


class Row(nn.Module):
    """Two halves of layers."""

    def __init__(self, breaks: bool) -> None:
        super().__init__()
        middle = _NUM_LAYERS // 2
        self.halves = nn.ModuleList(Half(places, breaks) for places in (range(middle), range(middle, _NUM_LAYERS)))

    def forward(self, hidden: Tensor) -> Tensor:
        for half in self.halves:
            hidden = half(hidden)
        return hidden

    def training_step(self, hidden: Tensor) -> Tensor:
        """Do what `forward` does, under the name that Lightning gives it."""
        return self.forward(hidden)


class Around(nn.Module):
    """What is wrapped where the module that is trained is called in another way than by its forward."""

    def __init__(self, row: Row, call: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.row = row
        self._call = call

    def forward(self, hidden: Tensor) -> Tensor:
        return self._call(hidden)


_Keywords = dict[str, Any]


def _module(row: Row, keywords: _Keywords) -> None:
    row.compile(**keywords)


def _forward(row: Any, keywords: _Keywords) -> None:
    row.forward = torch.compile(row.forward, **keywords)


def _parts(row: Row, keywords: _Keywords) -> None:
    for half in row.halves:
        half.compile(**keywords)


def _nested(row: Row, keywords: _Keywords) -> None:
    for layer in row.halves[0].layers:  # type: ignore[union-attr]
        layer.compile(**keywords)
    _parts(row, keywords)
    row.compile(**keywords)


def _one_part(row: Row, keywords: _Keywords) -> None:
    row.halves[1].compile(**keywords)


def _methods(row: Any, keywords: _Keywords) -> None:
    # As Lightning's Trainer: one context of `torch.compile` compiles each method that a loop calls.
    optimized: Any = torch.compile(row, **keywords)
    context = optimized.dynamo_ctx
    row.forward, row.training_step = context(row.forward), context(row.training_step)


#: Ways to compile inside of what is wrapped: called before the module is wrapped, or after.
INSIDE: Mapping[str, Callable[[Row, _Keywords], None]] = {
    "module": _module,
    "forward": _forward,
    "methods": _methods,
    "parts": _parts,
    "one_part": _one_part,
    "nested": _nested,
}


def _regions(module: Any, keywords: _Keywords) -> Any:
    """Return a copy of `module` with each block of a list compiled, and each part that is in no list and holds none.

    It is as accelerate's regional compilation: all modules around the blocks are copied, the wrapper too if it was
    there before, and shares all but its parts with what it is a copy of. Nothing keeps the latter.
    """
    if isinstance(module, nn.ModuleList):
        blocks: list[Any] = [torch.compile(block, **keywords) for block in module]
        return nn.ModuleList(blocks)
    if not any(isinstance(part, nn.ModuleList) for part in module.modules()):
        return torch.compile(module, **keywords)
    copy = module.__class__.__new__(module.__class__)
    copy.__dict__.update(module.__dict__)
    copy._modules = {}
    for name, part in module.named_children():
        copy.add_module(name, _regions(part, keywords))
    return copy


class Redirected:
    """Calls the wrapper as Lightning does: for the length of a call, `training_step` takes the place of `forward`."""

    def __init__(self, row: Any, model: Any) -> None:
        self._row = row
        self._model = model

    def __call__(self, hidden: Tensor) -> Any:
        row, forward = self._row, self._row.forward

        def training_step(hidden: Tensor) -> Any:
            row.forward = forward
            return row.training_step(hidden)

        row.forward = training_step
        return self._model(hidden)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def _called_function(row: Row, keywords: _Keywords) -> nn.Module:
    return Around(row, torch.compile(lambda hidden: row(hidden), **keywords))


def _warm(row: Row, keywords: _Keywords) -> nn.Module:
    row.compile(**keywords)
    row(torch.ones(4, _WIDTH, device=next(row.parameters()).device)).sum().backward()
    row.zero_grad(set_to_none=True)
    return row


#: Ways that wrap something else, or have a past.
_REPLACING: Mapping[str, Callable[[Any, _Keywords], nn.Module]] = {
    "function": _called_function,
    "regions": _regions,
    "warm": _warm,
}


def _wrap(inside: CompilingContext, row: Row, scenario: Scenario) -> Any:
    """Return what is called: the wrapped row, compiled and redirected as the scenario's arguments say."""
    model = _wrap_compiled(inside, row, scenario)
    return Redirected(row, model) if scenario.arguments.get("redirected") else model


def _wrap_compiled(inside: CompilingContext, row: Row, scenario: Scenario) -> Any:
    name = scenario.arguments.get("inside")
    if name is None:
        return inside.wrap(row)
    wrap, keywords = inside.uncompiled.wrap, inside.keywords()
    if scenario.arguments.get("when") != "after":
        if name in _REPLACING:
            return wrap(_REPLACING[name](row, keywords))
        INSIDE[name](row, keywords)
        return wrap(row)
    model = wrap(row)
    if name in _REPLACING:
        return _REPLACING[name](model, keywords)
    INSIDE[name](row, keywords)
    return model


def _build(scenario: Scenario) -> Row:
    return with_integer_weights(Row(bool(scenario.arguments.get("breaks"))), scenario.seed)


def _step(scenario: Scenario, model: Any, turn: RankStep) -> None:
    sizes = scenario.arguments.get("batches", (4,))
    inputs = turn.inputs(sizes[turn.step % len(sizes)], _WIDTH)
    turn.backward(turn.loss(turn.forward(model, inputs)))


@program(
    "compiled_ways",
    invariants=("same_collectives", "nothing_in_flight", "leaves_no_trace"),
    preload=PRELOAD,
    speaks_for={**OF_WARNINGS, "num_modules": ("SPLIT-35",)},
)
def compiled_ways(ctx: RankContext) -> None:
    """Train a row of layers that fill a bucket each, for 20 steps.

    Arguments: `inside`, a way to compile inside of what is wrapped, and `when` ("after" it is wrapped), instead of the
    order's `way`; `redirected`, the wrapper is called as Lightning does; `breaks`, a graph break behind each layer;
    `batches`, numbers of rows by turns; `num_graphs`, how many the compiler is to be given.
    Observes gradients, `begun`, how many reductions the last step had issued when its backward reached each layer, the
    last layer first, `num_issued`, how many it issued in all, `num_graphs` and, with `counts_modules`, `num_modules`
    in memory, after the first steps and after all, and `warnings`. All ranks run it.
    """
    row = _build(ctx.scenario).to(ctx.device)
    begun: list[int] = []
    num_graphs: list[int] = []
    num_modules: list[int] = []
    before = 0

    def issued() -> int:
        return sum(map(is_gradient, ctx.collectives()[before:]))

    def counted() -> list[int]:
        return [_num_modules()] if ctx.arguments.get("counts_modules") else []

    def step(model: Any, turn: RankStep) -> None:
        nonlocal before
        begun.clear()
        before = len(ctx.collectives())
        _step(ctx.scenario, model, turn)

    with listening(lambda _: begun.append(issued())), compiling(ctx) as (inside, watch):
        model = _wrap(inside, row, ctx.scenario)
        observe_run(inside, lambda: run_steps(inside, row, model, step, _NUM_FIRST))
        num_graphs.append(watch.num_compiled)
        num_modules += counted()
        for index in range(_NUM_FIRST, _NUM_STEPS):
            row.zero_grad(set_to_none=True)
            step(model, rank_step(inside, index))
        num_graphs.append(watch.num_compiled)
        num_modules += counted()
    ctx.observe("begun", begun)
    ctx.observe("num_issued", issued())
    ctx.observe("num_graphs", num_graphs)
    if num_modules:
        ctx.observe("num_modules", num_modules)


def _num_modules() -> int:
    gc.collect()
    return sum(issubclass(type(one), nn.Module) for one in gc.get_objects())


def _are_at_least(numbers: Sequence[int], least: Sequence[int]) -> bool:
    return len(numbers) == len(least) and all(map(ge, numbers, least))


def _are_no_more(numbers: Sequence[int]) -> bool:
    return numbers[0] >= numbers[1]


def _are_equal(numbers: Sequence[int]) -> bool:
    return numbers[0] == numbers[1]


@compiled_ways.expects
def _as_eagerly_as_possible(scenario: Scenario) -> Mapping[int, Facts]:
    replicas = [_build(scenario) for _ in range(scenario.world_size)]
    truth = simulate_steps(replicas, partial(_step, scenario), _NUM_FIRST)
    least = list(range(_NUM_LAYERS))
    kept = Satisfies("as many after all steps as after the first", _are_equal)
    judged: dict[str, Any] = {
        **QUIET,
        "begun": Satisfies(f"at least {least}", _are_at_least, (least,)),
        "num_issued": _NUM_LAYERS,
    }
    if "num_graphs" in scenario.arguments:
        judged["num_graphs"] = [scenario.arguments["num_graphs"]] * 2
    else:
        judged["num_graphs"] = kept
    if scenario.arguments.get("counts_modules"):
        judged["num_modules"] = Satisfies("no more after all steps than after the first", _are_no_more)
    return {rank: {**facts, **judged} for rank, facts in truth.items()}
