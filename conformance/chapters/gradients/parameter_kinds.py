"""Program `parameter_kinds`: parameters of every dtype that torch trains, of 0 to 5 dimensions, in every dense layout.

They are in one module, so that each shares its step with neighbours of other dtypes, shapes and strides.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from conformance.models.integers import RankStep, integers, with_integer_weights
from conformance.observation import Facts
from conformance.programs.rank_context import RankContext
from conformance.programs.registry import program
from conformance.programs.written_steps import observe_run, run_steps
from conformance.scenario import Scenario
from conformance.truth.steps import simulate_steps

NUM_STEPS = 2

DTYPES = ("float32", "float64", "float16", "bfloat16", "complex64", "complex128")

#: One shape for each number of dimensions, with an extent of 1 among the larger ones.
SHAPES = ((), (5,), (3, 4), (2, 3, 4), (2, 3, 4, 2), (1, 3, 2, 4), (2, 3, 2, 4, 2), (2, 1, 3, 2, 2))

#: Gradients are multiples of 12, and up to so many of them that their sum over 4 ranks needs every bit of the dtype.
_UNIT = 12
_LARGEST = {torch.bfloat16: 20, torch.float16: 40, torch.float32: 2**20, torch.float64: 2**45}


def orders(num_dimensions: int) -> Iterator[tuple[int, ...]]:
    """Yield the orders in which the dimensions of a dense tensor may lie in memory: every one of up to 3 dimensions.

    Of more: as they are, reversed, and with the channels last.
    """
    plain = tuple(range(num_dimensions))
    if num_dimensions <= 3:
        yield from itertools.permutations(plain)
    else:
        yield from (plain, plain[::-1], (0, *plain[2:], 1))


class Kinds(nn.Module):
    """Every parameter by the name of its kind, such as `float16 2x3x4x2 in order 0231`."""

    def __init__(self) -> None:
        super().__init__()
        for dtype, shape in itertools.product(DTYPES, SHAPES):
            for order in orders(len(shape)):
                stored = torch.empty([shape[dimension] for dimension in order], dtype=getattr(torch, dtype))
                back = [order.index(dimension) for dimension in range(len(shape))]
                kind = f"{'x'.join(map(str, shape))} in order {''.join(map(str, order))}" if shape else "scalar"
                self.register_parameter(f"{dtype} {kind}", nn.Parameter(stored.permute(back)))

    def forward(self, turn: RankStep) -> Tensor:
        """Return a scalar whose gradients are integers that tell the rank, the step and the place."""
        total = torch.zeros((), dtype=torch.float64, device=turn.device)
        for name, parameter in self.named_parameters():
            factors = _integers(turn, name, parameter)
            total = total + (parameter * factors).real.sum().to(torch.float64)
        return total


def _integers(turn: RankStep, name: str, parameter: Tensor) -> Tensor:
    key, largest = (name, turn.rank, turn.step), _LARGEST[parameter.real.dtype]
    values = _UNIT * integers(*parameter.shape, key=("real", *key), largest=largest, dtype=torch.float64)
    if parameter.is_complex():
        imaginary = _UNIT * integers(*parameter.shape, key=("imaginary", *key), largest=largest, dtype=torch.float64)
        values = torch.complex(values, imaginary)
    return values.to(parameter.dtype).to(turn.device)


def _step(model: Any, turn: RankStep) -> Mapping[str, Any]:
    turn.backward(turn.forward(model, turn))
    return {"strides": _strides_of_gradients(getattr(model, "module", model))}


def _strides_of_gradients(module: nn.Module) -> dict[str, Any]:
    """Return the strides of every gradient, those of dimensions of extent 1, which mean nothing, as 0."""
    return {
        name: None if parameter.grad is None else _strides(parameter.grad)
        for name, parameter in module.named_parameters()
    }


def _strides(tensor: Tensor) -> list[int]:
    return [stride if extent > 1 else 0 for stride, extent in zip(tensor.stride(), tensor.shape, strict=True)]


def _build(scenario: Scenario) -> nn.Module:
    return with_integer_weights(Kinds(), scenario.seed)


@program("parameter_kinds", invariants=("same_collectives", "nothing_in_flight", "leaves_no_trace"))
def parameter_kinds(ctx: RankContext) -> None:
    """Train steps of `Kinds`; argument `judge` says whether `grad` (values and dtypes) or `strides` are required.

    Observes `step<k>/grad/<kind>` and `step<k>/strides`. All ranks run it.
    """
    module = _build(ctx.scenario).to(ctx.device)
    observe_run(ctx, lambda: run_steps(ctx, module, ctx.wrap(module), _step, NUM_STEPS))


@parameter_kinds.expects
def _expected(scenario: Scenario) -> Mapping[int, Facts]:
    replicas = [_build(scenario) for _ in range(scenario.world_size)]
    if scenario.arguments["judge"] == "grad":
        truth = simulate_steps(replicas, _step, NUM_STEPS)
        return {
            rank: {name: value for name, value in facts.items() if "/grad/" in name} for rank, facts in truth.items()
        }
    strides = {name: _strides(parameter) for name, parameter in replicas[0].named_parameters()}
    facts: Facts = {f"step{index}/strides": strides for index in range(NUM_STEPS)}
    return dict.fromkeys(range(scenario.world_size), facts)
