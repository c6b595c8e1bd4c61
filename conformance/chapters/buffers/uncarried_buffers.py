"""Program `uncarried_buffers`: buffers of the dtypes that a backend need not carry, such as int16 and float8."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from conformance.models.buffer_values import DTYPES, LEFT_OUT
from conformance.models.integers import integers
from conformance.programs import RankContext, observe_or_refused, program, rank_step
from conformance.truth.expected import Raises

_NUM_BYTES = 24


class Stored(nn.Module):
    """A layer, and two buffers of one dtype that hold a rank's bytes; `seen` are the bytes that forward found."""

    def __init__(self, dtype: torch.dtype, rank: int) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.first: Tensor
        self.second: Tensor
        self.register_buffer("first", _bytes("first", rank, "start").view(dtype))
        self.register_buffer("second", _bytes("second", rank, "start").view(dtype))

    def forward(self, inputs: Tensor) -> Tensor:
        self.seen = self.bytes()
        output: Tensor = self.layer(inputs)
        return output

    def bytes(self) -> list[Tensor]:
        return [buffer.view(torch.uint8).clone() for buffer in (self.first, self.second)]


def _bytes(*key: object) -> Tensor:
    return integers(_NUM_BYTES, key=key, largest=100).abs().to(torch.uint8)


def _dtypes() -> dict[str, torch.dtype]:
    """Return those of the dtypes that torch itself can copy."""
    found = {}
    for name, dtype in DTYPES.items():
        if LEFT_OUT.fullmatch(name) and not dtype.is_complex:
            try:
                torch.zeros(_NUM_BYTES, dtype=torch.uint8).view(dtype).clone()
            except (RuntimeError, NotImplementedError):
                continue
            found[name] = dtype
    return found


@program("uncarried_buffers", invariants=("same_collectives", "leaves_no_trace"))
def uncarried_buffers(ctx: RankContext) -> None:
    """Wrap a module for each dtype and run a forward, before which each rank writes values of its own.

    Observes `<dtype>`: the buffers' bytes after construction and in forward, or the exception. All ranks run it.
    """
    for name, dtype in _dtypes().items():
        refusal = Raises(("RuntimeError", "TypeError", "ValueError"))
        observe_or_refused(ctx, name, partial(_copied, ctx, dtype), refusal)


def _copied(ctx: RankContext, dtype: torch.dtype) -> dict[str, Any]:
    module = Stored(dtype, ctx.rank).to(ctx.device)
    model = ctx.wrap(module)
    constructed = module.bytes()
    for name, buffer in module.named_buffers():
        buffer.view(torch.uint8).copy_(_bytes(name, ctx.rank, "later"))
    turn = rank_step(ctx, 0)
    turn.backward(turn.loss(turn.forward(model, turn.inputs(4, 3))))
    return {"constructed": constructed, "forward": module.seen}
