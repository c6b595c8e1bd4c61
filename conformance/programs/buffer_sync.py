"""Programs about buffers: which values a forward finds, and what synchronising buffers must not disturb."""

import contextlib
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from conformance.models.buffer_values import BUFFERS, buffer_value, stored_value
from conformance.models.integers import RankStep, with_integer_weights
from conformance.models.scaled import Scaled
from conformance.observation import Facts
from conformance.programs import RankContext, observe_run, program, rank_step, run_steps
from conformance.scenario import Scenario
from conformance.truth.expected import Satisfies
from conformance.truth.replicas import broadcasts_buffers

NUM_STEPS = 4
#: Buffers that live in the root module; all others live in a child.
_IN_ROOT = ("table", "count")


class _Drifting(nn.Module):
    """A layer and buffers of every kind; each forward records the buffers' values and writes the rank's own.

    With `replaces`, a forward replaces its buffers by new tensors. With `registers_later` it has none until `register`,
    which registers those of `names`.
    """

    def __init__(self, rank: int, names: Sequence[str], *, replaces: bool, registers_later: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.state = nn.Module()
        self.rank = rank
        self.replaces = replaces
        self.num_forwards = 0
        self.seen: dict[str, Tensor] = {}
        self.names = names
        if not registers_later:
            self.register()

    def register(self, device: torch.device | None = None) -> None:
        """Register the buffers, each with a value of this rank's own."""
        for name in self.names:
            value = stored_value(name, self.rank, "start").to(device)
            self._owner(name).register_buffer(name, value, persistent=name != "hidden")

    def _owner(self, name: str) -> nn.Module:
        return self if name in _IN_ROOT else self.state

    def forward(self, inputs: Tensor) -> Tensor:
        self.seen = {name: buffer.clone() for name, buffer in self.named_buffers()}
        for path in self.seen:
            name = path.rpartition(".")[2]
            value = stored_value(name, self.rank, self.num_forwards).to(inputs.device)
            if self.replaces:
                setattr(self._owner(name), name, value)
            else:
                getattr(self._owner(name), name).copy_(value)
        self.num_forwards += 1
        return self.layer(inputs)


def _drifting(scenario: Scenario, rank: int) -> nn.Module:
    replaces, registers_later = (bool(scenario.arguments.get(name)) for name in ("replaces", "registers_later"))
    names = scenario.arguments.get("only", tuple(BUFFERS))
    module = _Drifting(rank, names, replaces=replaces, registers_later=registers_later)
    with_integer_weights(module.layer, scenario.seed)
    return module


def _ordinary(model: nn.Module, turn: RankStep) -> None:
    turn.backward(turn.loss(turn.forward(model, turn.inputs(4, 3))))


@program("buffer_sync", invariants=("same_collectives", "nothing_in_flight", "leaves_no_trace"))
def buffer_sync(ctx: RankContext) -> None:
    """Train steps of `_Drifting`; arguments `ignored` (names), `replaces`, and `mode` ("train" or "eval" after step 0).

    With `only` it has no other buffers than those of these names: one alone is in no bucket with others. With
    `registers_later` the module has buffers from step 1 on. Observes gradients, for each step `seen/<name>`, the
    values that its forward found, and with argument `asks` `will_sync`, what the wrapper announced before the step;
    and `final/buffer/<name>`. All ranks run it.
    """
    module: Any = _drifting(ctx.scenario, ctx.rank).to(ctx.device)
    if ignored := ctx.arguments.get("ignored"):
        module._ddp_params_and_buffers_to_ignore = list(ignored)

    def step(model: Any, turn: RankStep) -> Mapping[str, Any]:
        if turn.step == 1:
            model.train(ctx.arguments.get("mode", "train") == "train")
            if ctx.arguments.get("registers_later"):
                module.register(ctx.device)
        facts = {"will_sync": model.will_sync_module_buffers()} if ctx.arguments.get("asks") else {}
        _ordinary(model, turn)
        return {**facts, **{f"seen/{name}": value for name, value in module.seen.items()}}

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # broadcast_buffers is deprecated, and meant here
        model = ctx.wrap(module)
    observe_run(ctx, lambda: run_steps(ctx, module, model, step, NUM_STEPS))
    ctx.observe_buffers("final", module)


@program("due_buffers", invariants=("same_collectives", "nothing_in_flight", "leaves_no_trace"))
def due_buffers(ctx: RankContext) -> None:
    """Run `_Drifting` through argument `forwards`: each `synchronised`, `local` (inside `no_sync`) or `no_grad`.

    A backward follows, except for `no_grad`. Argument `mode` is `train` or `eval`; with `registers_later` the module
    has no buffers. Observes for each forward `<k>.<kind>/seen/<name>`, the buffers that it found, and with argument
    `asks` `<k>.<kind>/will_sync`, what the wrapper announced before the forward. All ranks run it.
    """
    module: Any = _drifting(ctx.scenario, ctx.rank).to(ctx.device)
    model: Any = ctx.wrap(module)
    model.train(ctx.arguments["mode"] == "train")
    for index, kind in enumerate(ctx.arguments["forwards"]):
        with ctx.no_sync(model) if kind == "local" else contextlib.nullcontext():
            turn = rank_step(ctx, index)
            if ctx.arguments.get("asks"):
                ctx.observe(f"{index}.{kind}/will_sync", model.will_sync_module_buffers())
            if kind == "no_grad":
                with torch.no_grad():
                    turn.forward(model, turn.inputs(4, 3))
            else:
                _ordinary(model, turn)
        for name, value in module.seen.items():
            ctx.observe(f"{index}.{kind}/seen/{name}", value)


@due_buffers.expects
def _due_buffers(scenario: Scenario) -> Mapping[int, Facts]:
    given = scenario.arguments
    facts: dict[int, dict[str, Any]] = {rank: {} for rank in range(scenario.world_size)}
    buffers = dict(_drifting(scenario, 0).named_buffers())
    may = due = broadcasts_buffers(scenario.options) and bool(buffers)
    for index, kind in enumerate(given["forwards"]):
        for rank, mine in facts.items():
            if given.get("asks"):
                mine[f"{index}.{kind}/will_sync"] = due
            for name in buffers:
                written = name.split(".")[-1], *((0 if due else rank, index - 1) if index else (0, "start"))
                mine[f"{index}.{kind}/seen/{name}"] = buffer_value(*written)
        due = may and kind == "synchronised"
    return facts


def _several_forwards(num_forwards: int, model: nn.Module, turn: RankStep) -> Mapping[str, Any]:
    outputs = [turn.forward(model, turn.inputs(4, 3, micro=micro)) for micro in range(num_forwards)]
    turn.backward(torch.stack([turn.loss(output, micro) for micro, output in enumerate(outputs)]).sum())
    return {f"output{micro}": output for micro, output in enumerate(outputs)}


@program("saved_buffer", invariants=("same_collectives", "nothing_in_flight", "leaves_no_trace"))
def saved_buffer(ctx: RankContext) -> None:
    """Run argument `forwards` forwards of a module that saves a buffer for backward, then one backward; three times.

    Observes gradients and `step<k>/output<i>`, which show whose buffer was used. All ranks run it.
    """
    module = with_integer_weights(Scaled(ctx.rank), ctx.scenario.seed).to(ctx.device)
    step = partial(_several_forwards, ctx.arguments["forwards"])
    observe_run(ctx, lambda: run_steps(ctx, module, ctx.wrap(module), step, 3))


@program("forwards_before_backward", invariants=("same_collectives", "nothing_in_flight", "leaves_no_trace"))
def forwards_before_backward(ctx: RankContext) -> None:
    """Run argument `forwards` forwards of the scenario's model and one backward from the summed losses, in each step.

    Observes `step<k>/grad/<name>`, `step<k>/loss` and `step<k>/buffer/<name>`. All ranks run it.
    """
    module = ctx.build_model()
    model = ctx.wrap(module)
    for index in range(3):
        module.zero_grad(set_to_none=True)
        losses = [ctx.loss(model, index, micro) for micro in range(ctx.arguments["forwards"])]
        loss = torch.stack(losses).sum()
        ctx.backward(loss, index)
        ctx.observe(f"step{index}/loss", loss)
        ctx.observe_gradients(f"step{index}", module)
        ctx.observe_buffers(f"step{index}", module)


@program("silent_forward", invariants=("same_collectives", "leaves_no_trace"))
def silent_forward(ctx: RankContext) -> None:
    """Train a module that has nothing to synchronise in forward; argument `kind`: "no_buffers", "ignored" or "off".

    Observes the collectives of each forward: of the first two as `agreements`, since a DDP may agree on the order of
    its buckets in one of them, and then as `step<k>/in_forward`. All ranks run it.
    """
    module: Any = nn.Sequential(nn.Linear(3, 2))
    if ctx.arguments["kind"] != "no_buffers":
        module.register_buffer("table", torch.ones(3))
    if ctx.arguments["kind"] == "ignored":
        module._ddp_params_and_buffers_to_ignore = ["table"]
    model = ctx.wrap(module.to(ctx.device))
    for index in range(NUM_STEPS):
        _ordinary(model, rank_step(ctx, index))
    forwards = [each for each in ctx.collectives() if each.phase == "forward"]
    ctx.observe("agreements", [[one.describe() for one in forwards if one.step == index] for index in range(2)])
    for index in range(2, NUM_STEPS):
        ctx.observe(f"step{index}/in_forward", [one.describe() for one in forwards if one.step == index])


@silent_forward.expects
def _silent_forward(scenario: Scenario) -> Mapping[int, Facts]:
    facts: dict[str, Any] = {f"step{index}/in_forward": [] for index in range(2, NUM_STEPS)}
    facts["agreements"] = Satisfies("collectives in one of the two forwards at most", _is_one_empty)
    return dict.fromkeys(range(scenario.world_size), facts)


def _is_one_empty(got: list[list[str]]) -> bool:
    return not all(got)


@program("evaluation", invariants=("same_collectives", "leaves_no_trace"))
def evaluation(ctx: RankContext) -> None:
    """Train the scenario's model with BatchNorm for two steps, then evaluate it on the same data on every rank.

    Observes `output`, the loss of evaluation: equal on all ranks, because all see rank 0's buffers. All ranks run it.
    """
    module = ctx.build_model()
    model = ctx.wrap(module)
    for index in range(2):
        module.zero_grad(set_to_none=True)
        ctx.backward(ctx.loss(model, index), index)
    model.eval()
    with ctx.phase("forward", 2):
        loss = ctx.fixture.loss(model, ctx.scenario, rank=0, step=9, micro=0, device=ctx.device)
    ctx.observe("output", loss)
    ctx.observe_buffers("final", module)
