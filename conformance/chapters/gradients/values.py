"""Programs about gradients whose mean is inexact, not finite, or close to overflow."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from conformance.models.integers import RankStep, integers
from conformance.observation import Facts
from conformance.programs import RankContext, observe_run, program, rank_step, run_steps
from conformance.programs.agreement import same_bits_everywhere
from conformance.scenario import Scenario

NUM_STEPS = 2
LENGTH = 6

#: Far above the half of float16's largest value, 65504: two of them do not add up, but their mean is a float16.
_LARGE = 2.0**15


class Weight(nn.Module):
    """One vector, so that the gradient is what the loss multiplies it by, element by element."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(LENGTH, dtype=dtype))

    def forward(self, factors: Tensor) -> Tensor:
        return self.weight * factors


def _special(rank: int) -> Tensor:
    gradient = 12 * integers(LENGTH, key=("special", rank))
    if rank == 1:
        gradient[0] = math.nan
        gradient[2] = math.inf
    if rank == 0:
        gradient[3] = -math.inf
    gradient[5] = math.inf if rank == 0 else -math.inf
    return gradient


def _large(rank: int) -> Tensor:
    """Return a rank's gradient near the largest float16; means over 2 or 4 ranks are exact."""
    return torch.full((LENGTH,), _LARGE * (1.5 if rank % 2 else 1.0), dtype=torch.float16)


def _zeros(rank: int) -> Tensor:
    """Return a rank's gradient of zeros that are negative on all ranks, on one or on none, or that a sum gives."""
    first = 1.0 if rank == 0 else -1.0 if rank == 1 else 0.0
    return torch.tensor([-0.0, math.copysign(0.0, first), 0.0, 12 * first, -0.0, 12.0])


_GRADIENTS = {"not_finite": _special, "large": _large, "signed_zeros": _zeros}


@program("gradient_values", invariants=("same_collectives", "nothing_in_flight", "leaves_no_trace"))
def gradient_values(ctx: RankContext) -> None:
    """Reduce the gradients that argument `values` names, one of `_GRADIENTS`. All ranks run it."""
    gradient = _GRADIENTS[ctx.arguments["values"]](ctx.rank)
    module = Weight(gradient.dtype).to(ctx.device)

    def step(model: nn.Module, turn: RankStep) -> None:
        output = turn.forward(model, gradient.to(turn.device))
        with turn.phase("backward"):
            output.backward(torch.ones_like(output))

    observe_run(ctx, lambda: run_steps(ctx, module, ctx.wrap(module), step, NUM_STEPS))


@gradient_values.expects
def _expected(scenario: Scenario) -> Mapping[int, Facts]:
    values = _GRADIENTS[scenario.arguments["values"]]
    locals_ = torch.stack([values(rank) for rank in range(scenario.world_size)])
    mean = locals_.double().mean(0).to(locals_.dtype)
    mean = torch.where(locals_.signbit().all(0), -mean.abs(), mean)  # torch's mean begins with a zero
    return {
        rank: {f"step{index}/grad/weight": mean for index in range(NUM_STEPS)} for rank in range(scenario.world_size)
    }


class Rounded(nn.Module):
    """A small network whose gradients need every bit of a float32, so that means depend on the order of sums."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            self.layers = nn.Sequential(nn.Linear(16, 33), nn.Tanh(), nn.Linear(33, 33), nn.Tanh(), nn.Linear(33, 5))

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.layers(inputs / 7)
        return output


@program("agreement", invariants=("same_collectives", "leaves_no_trace"))
def agreement(ctx: RankContext) -> None:
    """Train with inexact gradients and ask all ranks whether they hold the same bits.

    Observes `step<k>/agrees/<what>`: whether gradients and, after an optimiser step, parameters are bit for bit those
    of rank 0. All ranks run it.
    """
    module = Rounded().to(ctx.device)
    model = ctx.wrap(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for index in range(4):
        optimizer.zero_grad()
        turn: RankStep = rank_step(ctx, index)
        turn.backward(turn.forward(model, turn.inputs(9, 16)).square().mean())
        gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
        with ctx.phase("optimizer", index):
            optimizer.step()
        with ctx.phase("observe", index):
            ctx.observe(f"step{index}/agrees/gradients", same_bits_everywhere(ctx, gradients))
            ctx.observe(f"step{index}/agrees/parameters", same_bits_everywhere(ctx, list(module.parameters())))


@agreement.expects
def _agreement(scenario: Scenario) -> Mapping[int, Facts]:
    facts = {f"step{index}/agrees/{what}": True for index in range(4) for what in ("gradients", "parameters")}
    return dict.fromkeys(range(scenario.world_size), facts)
