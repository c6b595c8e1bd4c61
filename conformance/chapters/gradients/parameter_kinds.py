"""Program `parameter_kinds`: parameters of every dtype that torch trains, of 0 to 5 dimensions, in every dense layout.

They are in one module, so that each shares its step with neighbours of other dtypes, shapes and strides.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from conformance.models.integers import RankStep, integers, with_integer_weights
from conformance.programs import RankContext, program, rank_step

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
    """Every parameter by the name of its kind, such as `float16 2x3x4x2 in order 0231`, and `sparse` tables."""

    def __init__(self, sparse: Sequence[str] = ()) -> None:
        super().__init__()
        tables = {name: nn.Embedding(5, 3, sparse=True, dtype=getattr(torch, name)) for name in sparse}
        self.sparse = nn.ModuleDict(tables)
        for dtype, shape in itertools.product(DTYPES, SHAPES):
            for order in orders(len(shape)):
                stored = torch.empty([shape[dimension] for dimension in order], dtype=getattr(torch, dtype))
                back = [order.index(dimension) for dimension in range(len(shape))]
                kind = f"{'x'.join(map(str, shape))} in order {''.join(map(str, order))}" if shape else "scalar"
                self.register_parameter(f"{dtype} {kind}", nn.Parameter(stored.permute(back)))

    def forward(self, turn: RankStep) -> Tensor:
        """Return a scalar whose gradients are integers that differ by rank, step and place."""
        total = torch.zeros((), dtype=torch.float64, device=turn.device)
        for name, parameter in self.named_parameters():
            factors = _integers(turn, name, parameter)
            used: Tensor = parameter
            if name.startswith("sparse."):
                rows = torch.arange(turn.rank, turn.rank + 2, device=turn.device) % len(parameter)
                used, factors = F.embedding(rows, parameter, sparse=True), factors[rows]
            total = total + (used * factors).real.sum().to(torch.float64)
        return total


def _integers(turn: RankStep, name: str, parameter: Tensor) -> Tensor:
    key, largest = (name, turn.rank, turn.step), _LARGEST[parameter.real.dtype]
    values = _UNIT * integers(*parameter.shape, key=("real", *key), largest=largest, dtype=torch.float64)
    if parameter.is_complex():
        imaginary = _UNIT * integers(*parameter.shape, key=("imaginary", *key), largest=largest, dtype=torch.float64)
        values = torch.complex(values, imaginary)
    return values.to(parameter.dtype).to(turn.device)


def _strides_of_gradients(module: nn.Module) -> dict[str, Any]:
    """Return the strides of every gradient, those of dimensions of extent 1, which mean nothing, as 0."""
    return {
        name: None if parameter.grad is None else _strides(parameter.grad)
        for name, parameter in module.named_parameters()
    }


def _strides(tensor: Tensor) -> list[int]:
    return [stride if extent > 1 else 0 for stride, extent in zip(tensor.stride(), tensor.shape, strict=True)]


@program("parameter_kinds", invariants=("same_collectives", "nothing_in_flight", "leaves_no_trace"))
def parameter_kinds(ctx: RankContext) -> None:
    """Train steps of `Kinds`; argument `judge` says whether `grad` (values and dtypes) or `strides` are observed.

    These are `step<k>/grad/<kind>` and `step<k>/strides`. `sparse` names the dtypes of tables with sparse gradients.
    All ranks run it.
    """
    module = with_integer_weights(Kinds(ctx.arguments.get("sparse", ())), ctx.scenario.seed).to(ctx.device)
    strides = {name: _strides(parameter) for name, parameter in module.named_parameters()}
    model = ctx.wrap(module)
    for index in range(NUM_STEPS):
        module.zero_grad(set_to_none=True)
        turn = rank_step(ctx, index)
        turn.backward(turn.forward(model, turn))
        if ctx.arguments["judge"] == "grad":
            ctx.observe_gradients(f"step{index}", module)
        else:
            ctx.observe(f"step{index}/strides", _strides_of_gradients(module), must=strides)
