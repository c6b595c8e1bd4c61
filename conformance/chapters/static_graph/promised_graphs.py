"""Programs about `static_graph`: what only a static graph makes possible, and what happens when the graph changes."""

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from conformance.checkers.protocol import is_gradient
from conformance.models.catalogue import moved
from conformance.models.integers import RankStep, with_integer_weights
from conformance.observation import Raised, Unmeasured
from conformance.programs import RankContext, observe_run, program, rank_step, run_steps, step_on
from conformance.programs.autograd_uses import USES as PLAIN_USES
from conformance.programs.autograd_uses import WIDTH, Use, layers
from conformance.programs.bucket_traffic import caps_of, filled_buckets
from conformance.programs.gradient_traffic import num_issued, uncounted
from conformance.programs.unused_parameters import Switched
from conformance.scenario import Scenario
from conformance.truth.expected import Anything, Raises, Satisfies, at_least
from conformance.truth.steps import StepFunction

NUM_STEPS = 4
_INVARIANTS = ("same_collectives", "nothing_in_flight", "leaves_no_trace")
_ordinary = step_on(5, WIDTH)


class Nested(nn.Module):
    """Three layers; a function decides how forward puts them under activation checkpoints."""

    def __init__(self, run: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.last = nn.Linear(WIDTH, 2)
        self.run = run

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.last(self.run(self, inputs.requires_grad_()))
        return output


def _reentrant(run: Callable[[Tensor], Any], hidden: Tensor) -> Tensor:
    output: Tensor = checkpoint(run, hidden, use_reentrant=True)
    return output


def _three_times(module: Nested, hidden: Tensor) -> Tensor:
    """Put one layer under three reentrant checkpoints, and a second one in between."""
    hidden = _reentrant(module.first, hidden)
    hidden = _reentrant(module.first, module.second(hidden))
    return _reentrant(module.first, hidden)


def _inside_each_other(module: Nested, hidden: Tensor) -> Tensor:
    outer = _reentrant(lambda inputs: module.second(_reentrant(module.first, inputs)), hidden)
    return outer + _reentrant(module.first, hidden)


def _of_both_kinds(module: Nested, hidden: Tensor) -> Tensor:
    hidden = _reentrant(module.first, hidden)
    plain: Tensor = checkpoint(module.first, hidden, use_reentrant=False)
    output: Tensor = plain + module.first(module.second(hidden))
    return output


class Branches(nn.Module):
    """A trunk and three heads, which forward returns in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(WIDTH, WIDTH)
        self.heads = nn.ModuleList(nn.Linear(WIDTH, 1 + head) for head in range(3))

    def forward(self, inputs: Tensor) -> list[Tensor]:
        hidden = self.trunk(inputs)
        return [head(hidden) for head in self.heads]


def _first_local(model: Any, turn: RankStep) -> None:
    """Accumulate one backward under no_sync before the one that synchronises, from the first step on."""
    with model.no_sync():
        turn.backward(turn.loss(turn.forward(model, turn.inputs(5, WIDTH, micro=1)), micro=1))
    turn.backward(turn.loss(turn.forward(model, turn.inputs(5, WIDTH))))


def _heads_by_rank(model: Any, turn: RankStep) -> None:
    """Leave out of the loss the second head, and the third on odd ranks."""
    outputs = turn.forward(model, turn.inputs(5, WIDTH))
    loss = turn.loss(outputs[0])
    turn.backward(loss if turn.rank % 2 else loss + turn.loss(outputs[2], micro=2))


def _local_elsewhere(model: Any, turn: RankStep) -> None:
    """Use only the first head, but another one on rank 0 under no_sync before the first step and before the third."""
    with model.no_sync():
        if turn.step in (0, 2):
            head = turn.step // 2 + 1 if turn.rank == 0 else 0
            turn.backward(turn.loss(turn.forward(model, turn.inputs(5, WIDTH, micro=1))[head], micro=1))
    turn.backward(turn.loss(turn.forward(model, turn.inputs(5, WIDTH))[0]))


def _local_on_one_rank(model: Any, turn: RankStep) -> None:
    """Use only the first head, in every other step once more on rank 1 alone, under no_sync."""
    if turn.rank == 1 and turn.step % 2:
        with model.no_sync():
            turn.backward(turn.loss(turn.forward(model, turn.inputs(5, WIDTH, micro=1))[0], micro=1))
    turn.backward(turn.loss(turn.forward(model, turn.inputs(5, WIDTH))[0]))


def _heads_of_forwards(model: Any, turn: RankStep) -> None:
    """Run three forwards and use another head of each in one loss."""
    outputs = [turn.forward(model, turn.inputs(3, WIDTH, micro=micro)) for micro in range(3)]
    losses = [turn.loss(output[micro], micro=micro) for micro, output in enumerate(outputs)]
    turn.backward(torch.stack(losses).sum())


def _one_head_of_two_forwards(model: Any, turn: RankStep) -> None:
    """Run two forwards and use the same head of both: the others are never used."""
    outputs = [turn.forward(model, turn.inputs(3, WIDTH, micro=micro))[1] for micro in range(2)]
    turn.backward(turn.loss(outputs[0]) + turn.loss(outputs[1], micro=1))


def _validation_first(model: Any, turn: RankStep) -> None:
    """Validate before the first step and after each."""
    for micro in (7, 8):
        model.eval()
        with torch.no_grad():
            turn.forward(model, turn.inputs(2, WIDTH, micro=micro))
        model.train()
        if micro == 7:
            turn.backward(turn.loss(turn.forward(model, turn.inputs(5, WIDTH))))


USES: Mapping[str, Use] = {
    **{name: PLAIN_USES[name] for name in (
        "ordinary", "create_graph", "retain_graph", "gradient_penalty", "autograd_grad_first", "two_forwards",
        "tensor_hooks", "module_hooks", "used_twice", "tied", "odd_shapes", "two_wrappers", "stacked_wrappers",
        "checkpoint", "checkpoint_twice", "checkpoint_reentrant", "discarded_forward", "gradient_set_before",
    )},
    "reentrant_three_times": Use(lambda: Nested(_three_times), _ordinary),
    "reentrant_inside_each_other": Use(lambda: Nested(_inside_each_other), _ordinary),
    "reentrant_and_not": Use(lambda: Nested(_of_both_kinds), _ordinary),
    "first_local": Use(layers, _first_local),
    "local_elsewhere": Use(Branches, _local_elsewhere),
    "local_on_one_rank": Use(Branches, _local_on_one_rank),
    "heads_by_rank": Use(Branches, _heads_by_rank),
    "heads_of_forwards": Use(Branches, _heads_of_forwards),
    "one_head_of_two_forwards": Use(Branches, _one_head_of_two_forwards),
    "validation_first": Use(layers, _validation_first),
}  # fmt: skip


@program("static_use", invariants=_INVARIANTS)
def static_use(ctx: RankContext) -> None:
    """Run the use that argument `use` names (see `USES`) for four steps. All ranks run it.

    Argument `late`: promise the static graph by `_set_static_graph()` after construction. Observes
    `step<k>/grad/<name>` and the use's own facts; where a DDP may raise instead, all as one fact `outcome`.
    """
    use = USES[ctx.arguments["use"]]
    module = moved(with_integer_weights(use.build(), ctx.scenario.seed), ctx.device)

    def wrap(part: nn.Module) -> Any:
        model: Any = ctx.wrap(part)
        if ctx.arguments.get("late"):
            model._set_static_graph()
        return model

    observe_run(
        ctx, lambda: run_steps(ctx, module, use.wrap(wrap, module), use.step, NUM_STEPS), refusal=use.refusal
    )  # fmt: skip


def _uses(scenario: Scenario, rank: int, step: int) -> list[str]:
    """Return the branches of `Switched` that a rank uses in a step: `uses` holds a text per rank for each step."""
    by_rank = scenario.arguments["uses"][step]
    text: str = by_rank[rank % len(by_rank)]
    return text.split()


def _switched_step(scenario: Scenario) -> StepFunction:
    def step(model: Any, turn: RankStep) -> None:
        uses = _uses(scenario, turn.rank, turn.step)
        turn.backward(turn.loss(torch.stack(turn.forward(model, turn.inputs(4, 3), uses))))

    return step


@program("changing_graph", invariants=("leaves_no_trace",))
def changing_graph(ctx: RankContext) -> None:
    """Train `Switched` under `static_graph`; argument `uses` changes the used branches, which breaks the promise.

    `changed` are the branches concerned; `freezes` names a parameter that is frozen before the third step. Observes
    `outcome`: the gradients of all steps, or the exception that a broken step or the one after it raised. All ranks run
    it.
    """
    module = with_integer_weights(Switched(), ctx.scenario.seed).to(ctx.device)
    model = ctx.wrap(module)
    run = _switched_step(ctx.scenario)

    def step(model: Any, turn: RankStep) -> None:
        if turn.step == 2 and (name := ctx.arguments.get("freezes")):
            module.get_parameter(name).requires_grad_(False)
        run(model, turn)

    observe_run(
        ctx, lambda: run_steps(ctx, module, model, step, len(ctx.arguments["uses"])),
        refusal=_names_one_of(ctx.arguments["changed"]),
    )  # fmt: skip


def _names_one_of(branches: Sequence[str]) -> Satisfies:
    """Return a matcher of an error that names a parameter of these branches of `Switched`, or its index."""
    places = [name for name, _ in Switched().named_parameters()]
    names = [name for name in places if name.startswith(tuple(branches))]

    return Satisfies(
        f"a RuntimeError that names one of {', '.join(names)}, or its index",
        _names_any, (names, [places.index(name) for name in names]),
    )  # fmt: skip


def _names_any(got: Any, names: Sequence[str], indices: Sequence[int]) -> bool:
    if not isinstance(got, Raised) or "RuntimeError" not in got.bases:
        return False
    return any(name in got.message for name in names) or any(
        re.search(rf"\b{index}\b", got.message) for index in indices
    )


@program("static_promise", invariants=("same_collectives", "leaves_no_trace"))
def static_promise(ctx: RankContext) -> None:
    """Promise a static graph by `_set_static_graph()` at the moment that argument `when` names. All ranks run it.

    `when`: "twice" (once by the option as well, before the first step) or "too_late" (after the first step).
    Observes `raised`, and for "twice" the gradients of the steps that follow.
    """
    module = with_integer_weights(layers(), ctx.scenario.seed).to(ctx.device)
    model: Any = ctx.wrap(module)
    is_late = ctx.arguments["when"] == "too_late"
    if is_late:
        _ordinary(model, rank_step(ctx, 0))
    with ctx.catching("raised", must=Raises(("RuntimeError",)) if is_late else None), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a DDP may warn that the graph is static already
        model._set_static_graph()
    if not is_late:
        observe_run(ctx, lambda: run_steps(ctx, module, model, _ordinary, NUM_STEPS))


@program("static_logging", invariants=_INVARIANTS)
def static_logging(ctx: RankContext) -> None:
    """Train `Switched` with the branches of argument `uses`, and read the logging data. All ranks run it.

    Observes `static_graph`, whether it was promised, and `can_set_static_graph`, whether it could be.
    """
    module = with_integer_weights(Switched(), ctx.scenario.seed).to(ctx.device)
    model: Any = ctx.wrap(module)
    run_steps(ctx, module, model, _switched_step(ctx.scenario), len(ctx.arguments["uses"]))
    data = model._get_ddp_logging_data()
    is_static = bool(ctx.scenario.options.get("static_graph"))
    steps = range(len(ctx.arguments["uses"]))
    used = [[_uses(ctx.scenario, rank, step) for step in steps] for rank in range(ctx.world_size)]
    all_same = all(mine[0] == step for mine in used for step in mine)
    # where it is promised already, whether it could be is not asked
    must = {"static_graph": is_static, "can_set_static_graph": Anything() if is_static else all_same}
    for key, value in must.items():  # a number or a text; left out where it does not hold
        ctx.observe(key, str(data.get(key, 0)).lower() in ("1", "true"), must=value)


#: How many vectors of `Spare` are used.
NUM_USED = 6


class Spare(nn.Module):
    """Vectors used in the order of registration, of which the last `spare` are never used."""

    def __init__(self, num_used: int, spare: int) -> None:
        super().__init__()
        self.used = nn.ParameterList(torch.empty(64) for _ in range(num_used))
        self.spare = nn.ParameterList(torch.empty(64) for _ in range(spare))

    def forward(self, inputs: Tensor) -> Tensor:
        for vector in self.used:
            inputs = inputs + vector
        return inputs


@program("learnt_unused", invariants=_INVARIANTS)
def learnt_unused(ctx: RankContext) -> None:
    """Train `Spare` in buckets of a few vectors; argument `spare` is how many vectors are never used. All ranks run it.

    Observes gradients, and for each step `buckets`, the elements of each gradient collective (`Unmeasured` where a DDP
    reduces otherwise than by all-reduces of them), and `issued_before_last`, how many of them were issued when the last
    gradient was computed.
    """
    num_spare = ctx.arguments["spare"]
    module: Any = with_integer_weights(Spare(NUM_USED, num_spare), ctx.scenario.seed).to(ctx.device)
    gradients = {"float32": sum(parameter.numel() for parameter in module.parameters())}
    before = overlapping = issued = 0

    def last_gradient(_: Tensor) -> None:
        nonlocal issued
        issued = num_issued(lambda: ctx.collectives()[before:], overlapping)

    module.used[0].register_hook(last_gradient)
    model = ctx.wrap(module)

    def step(model: Any, turn: RankStep) -> Mapping[str, Any]:
        nonlocal before, overlapping
        before, overlapping = len(ctx.collectives()), int(turn.step >= 2)
        turn.backward(turn.loss(turn.forward(model, turn.inputs(64))))
        reduced = ctx.collectives()[before:]
        why_not = uncounted(reduced, gradients, ctx.world_size)
        buckets = Unmeasured(why_not) if why_not else [each.numel for each in reduced if is_gradient(each)]
        return {"issued_before_last": issued, "buckets": buckets}

    observe_run(ctx, lambda: run_steps(ctx, module, model, step, NUM_STEPS), must=_traffic(ctx.scenario, num_spare))


def _traffic(scenario: Scenario, num_spare: int) -> Mapping[str, Any]:
    """Return what is sent at first, and once it is known which vectors are unused; some of it before the last."""
    issued = [0, Anything(), *(at_least(1) for _ in range(2, NUM_STEPS))]
    buckets: list[Any] = [[64 * (NUM_USED + num_spare)], *(Anything() for _ in range(1, NUM_STEPS))]
    if not num_spare:
        sizes = filled_buckets([4 * 64] * NUM_USED, caps_of(scenario.options))
        buckets[2:] = [[size // 4 for size in sizes]] * (NUM_STEPS - 2)
    return {
        f"step{step}/{name}": value
        for name, values in (("issued_before_last", issued), ("buckets", buckets))
        for step, value in enumerate(values)
    }
