"""Programs of lazy buckets: what a DDP holds between steps, and gradients that the user keeps; and a vain search."""

import time
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from conformance.models.integers import RankStep, with_integer_weights
from conformance.observation import Facts
from conformance.programs import RankContext, observe_run, program, rank_step, run_steps, step_on
from conformance.programs.held import resident_bytes
from conformance.programs.standard_error import written_to_stderr
from conformance.scenario import Scenario
from conformance.truth.expected import at_most

WIDTH = 4
NUM_STEPS = 3
#: Of each of two weights of 36 MiB: the C library gives so large a piece of memory back when it is freed.
LARGE = (3072, 3072)
_MIB = 2**20
_MOST_MIB = 36
#: A DDP that holds its buckets holds them for good, so that only its failure takes this long.
_PATIENCE_S = 10.0
_step = step_on(3, WIDTH)


@program("kept_gradients", invariants=("same_collectives", "leaves_no_trace"))
def kept_gradients(ctx: RankContext) -> None:
    """Train steps and keep each step's gradients; observe them, and those that later steps changed.

    Observes `step<k>/grad/<name>` and `step<k>/changed`, the gradients of the step before that are not what they were.
    All ranks run it.
    """
    module = with_integer_weights(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)), ctx.scenario.seed).to(
        ctx.device
    )
    kept: dict[str, tuple[Tensor, Tensor]] = {}

    def step(model: Any, turn: RankStep) -> Mapping[str, Any]:
        _step(model, turn)
        changed = [name for name, (gradient, values) in kept.items() if not torch.equal(gradient, values)]
        for name, parameter in module.named_parameters():
            if parameter.grad is not None:
                kept[name] = parameter.grad, parameter.grad.detach().clone()
        return {"changed": changed}

    must: dict[str, Any] = {f"step{index}/changed": [] for index in range(NUM_STEPS)}
    observe_run(ctx, lambda: run_steps(ctx, module, ctx.wrap(module), step, NUM_STEPS), must=must)


@program("bucket_memory", invariants=("same_collectives",))
def bucket_memory(ctx: RankContext) -> None:
    """Train steps of two large weights in one bucket and drop the gradients after each.

    Observes `held`, how many MiB more the process has after the last step than before it wrapped the module. All ranks
    run it; on the CPU only.
    """
    if ctx.device.type != "cpu":
        ctx.unsupported("memory is counted as Linux counts that of a process")
    module = nn.ParameterList([nn.Parameter(torch.zeros(LARGE)) for _ in range(2)])
    before = resident_bytes()
    model = ctx.wrap(_Sum(module))
    for index in range(NUM_STEPS):
        turn = rank_step(ctx, index)
        turn.backward(turn.forward(model))
        module.zero_grad()
    until = time.monotonic() + _PATIENCE_S
    while (held := (resident_bytes() - before) / _MIB) > _MOST_MIB and time.monotonic() < until:
        time.sleep(0.05)  # a thread of gloo drops its reference to what it has sent when it next gets a processor
    ctx.observe("held", held)


@bucket_memory.expects
def _half(scenario: Scenario) -> Mapping[int, Facts]:
    # Not by plain ranks: those share one process, in which each would wait for the memory of the other.
    held = at_most(_MOST_MIB, "MiB, half of the bucket")
    return {rank: {"held": held} for rank in range(scenario.world_size)}


class _Sum(nn.Module):
    def __init__(self, weights: nn.ParameterList) -> None:
        super().__init__()
        self.weights = weights

    def forward(self) -> Tensor:
        return torch.stack([weight.sum() for weight in self.weights]).sum()


class _Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, rows: Tensor, *, uses: bool) -> Tensor:
        hidden: Tensor = self.first(rows)
        return self.second(hidden) if uses else hidden


@program("vain_search", invariants=("same_collectives", "leaves_no_trace"))
def vain_search(ctx: RankContext) -> None:
    """Train with `find_unused_parameters`; argument `used` says whether every forward uses every parameter.

    Observes `told`, whether a warning of Python's or C++'s names the option, those that torch shows once per process
    included. All ranks run it.
    """
    module, uses = with_integer_weights(_Halves(), ctx.scenario.seed).to(ctx.device), ctx.arguments["used"]
    always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings(record=True) as caught, written_to_stderr() as written:
            warnings.simplefilter("always")
            model = ctx.wrap(module)
            for index in range(NUM_STEPS):
                turn = rank_step(ctx, index)
                module.zero_grad()
                turn.backward(turn.loss(turn.forward(model, turn.inputs(3, WIDTH), uses=uses)))
    finally:
        torch.set_warn_always(always)
    told = "find_unused_parameters" in written() + "".join(str(each.message) for each in caught)
    ctx.observe("told", told)


@vain_search.expects
def _told(scenario: Scenario) -> Mapping[int, Facts]:
    return {rank: {"told": scenario.arguments["used"]} for rank in range(scenario.world_size)}
