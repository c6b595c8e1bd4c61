"""Program `lazy_bits`: tensors whose conjugation or negation is a bit, and not yet in their memory.

`conj()` and the imaginary part of what it returns share memory with the tensor that they come from; a bit says that
every element is to be read as another one. A DDP that reads their memory reads other values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from conformance.models.integers import UNIT, RankStep, integers
from conformance.programs import RankContext, observe_run, program, rank_step

WIDTH = 3
NUM_STEPS = 3


def conjugated(tensor: Tensor) -> Tensor:
    """Return a leaf with the values of a complex `tensor`, whose memory holds the conjugates."""
    return tensor.conj().resolve_conj().conj().detach()


def negated(tensor: Tensor) -> Tensor:
    """Return a leaf with the values of a real `tensor`, whose memory holds the opposite ones."""
    return torch._neg_view(-tensor)  # what `imag` of a conjugate is, with the strides of any other


def _plain(tensor: Tensor) -> Tensor:
    return tensor


class Lazy(nn.Module):
    """Multiplies rows by a complex weight, conjugated if `reads_conjugate`, and by a real one, and shifts by buffers.

    `case` turns parameters and buffers into what they are: with a bit or without.
    """

    def __init__(self, key: tuple[object, ...], case: Case, device: torch.device) -> None:
        super().__init__()
        self._reads_conjugate = case.reads_conjugate

        def part(name: str) -> Tensor:
            return integers(WIDTH, key=(*key, name), largest=2).to(device)

        complex_one, real_one = torch.complex(part("real"), part("imaginary")), part("scale")
        self.weight = nn.Parameter(case.complex_parameter(complex_one))
        self.scale = nn.Parameter(case.real_parameter(real_one))
        self.phase: Tensor
        self.shift: Tensor
        self.register_buffer("phase", case.complex_buffer(torch.complex(part("a"), part("b"))))
        self.register_buffer("shift", case.real_buffer(part("c")))

    def forward(self, rows: Tensor) -> Tensor:
        weight = self.weight.conj() if self._reads_conjugate else self.weight
        turned = weight * torch.complex(rows, 2 * rows) + self.phase
        return turned.imag + turned.real * self.scale + self.shift


@dataclass(frozen=True)
class Case:
    """What has a bit: the weight as forward reads it, parameters, buffers, or gradients that are there before."""

    reads_conjugate: bool = False
    complex_parameter: Callable[[Tensor], Tensor] = _plain
    real_parameter: Callable[[Tensor], Tensor] = _plain
    complex_buffer: Callable[[Tensor], Tensor] = _plain
    real_buffer: Callable[[Tensor], Tensor] = _plain
    sets_gradients: bool = False


CASES: Mapping[str, Case] = {
    "read": Case(reads_conjugate=True),
    "parameters": Case(complex_parameter=conjugated, real_parameter=negated),
    "buffers": Case(complex_buffer=conjugated, real_buffer=negated),
    "gradients": Case(sets_gradients=True),
}


def _value(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_conj().resolve_neg().clone()


def _set_gradients(module: Lazy, turn: RankStep) -> None:
    real, imaginary, scale = (UNIT * turn.inputs(1, WIDTH, micro=micro)[0] for micro in (5, 6, 7))
    module.weight.grad = conjugated(torch.complex(real, imaginary))
    module.scale.grad = negated(scale)


@program("lazy_bits", invariants=("same_collectives", "nothing_in_flight", "leaves_no_trace"))
def lazy_bits(ctx: RankContext) -> None:
    """Train the module of argument `case`, of which ranks begin with different values. All ranks run it.

    On ranks that are not in argument `ranks` nothing has a bit. Observes `step<k>/<name>` of every gradient, parameter
    and buffer.
    """
    observe_run(ctx, lambda: _train(ctx))


def _train(ctx: RankContext) -> dict[str, Any]:
    whole = CASES[ctx.arguments["case"]]
    case = whole if ctx.rank in ctx.arguments["ranks"] else Case(reads_conjugate=whole.reads_conjugate)
    module = Lazy((ctx.scenario.seed, ctx.rank), case, ctx.device)
    model: Any = ctx.wrap(module)
    facts: dict[str, Any] = {}
    for index in range(NUM_STEPS):
        turn = rank_step(ctx, index)
        module.zero_grad()
        if case.sets_gradients and index:
            _set_gradients(module, turn)
        turn.backward(turn.loss(turn.forward(model, turn.inputs(2, WIDTH))))
        for name, parameter in module.named_parameters():
            facts[f"step{index}/grad/{name}"] = None if parameter.grad is None else _value(parameter.grad)
            facts[f"step{index}/parameter/{name}"] = _value(parameter)
        facts |= {f"step{index}/buffer/{name}": _value(buffer) for name, buffer in module.named_buffers()}
        with torch.no_grad():
            module.phase.add_(ctx.rank + 1)
            module.shift.add_(ctx.rank + 1)
    return facts
