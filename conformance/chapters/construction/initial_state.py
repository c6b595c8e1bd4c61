"""Program `initial_state`: what the constructor does with parameters and buffers that differ between ranks."""

import traceback
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from conformance.models.buffer_values import BUFFERS, stored_value
from conformance.models.catalogue import moved
from conformance.models.integers import integers
from conformance.observation import Raised
from conformance.programs import RankContext, program
from conformance.truth.expected import AnyOf, Raises


class Stateful(nn.Module):
    """Parameters of several kinds, in the root and in a child, and a buffer of every kind; all differ by rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3, 2))
        self.frozen = nn.Parameter(torch.empty(4), requires_grad=False)
        self.scalar = nn.Parameter(torch.empty(()))
        self.wide = nn.Parameter(torch.empty(2, dtype=torch.float64))
        self.child = nn.Linear(2, 3)
        self.tied = nn.Linear(2, 3, bias=False)
        self.tied.weight = self.child.weight
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.copy_(integers(*parameter.shape, key=("parameter", name, rank), largest=40))
        self.state = nn.Module()
        for name in BUFFERS:
            owner = self if name in ("table", "count") else self.state
            owner.register_buffer(name, stored_value(name, rank), persistent=name != "hidden")


@program("initial_state", invariants=("same_collectives", "leaves_no_trace"))
def initial_state(ctx: RankContext) -> None:
    """Wrap a module that differs from rank to rank. Argument `ignored`: names that the DDP must ignore.

    Observes `start/parameter/<name>` and `start/buffer/<name>` after construction, and without `init_sync`
    `num_collectives`, how many collectives the constructor issued. All ranks run it.
    """
    module = moved(Stateful(ctx.rank), ctx.device)
    if ignored := ctx.arguments.get("ignored"):
        module._ddp_params_and_buffers_to_ignore = list(ignored)  # type: ignore[assignment]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # broadcast_buffers is deprecated, and meant here
        ctx.wrap(module)
    if not ctx.scenario.options.get("init_sync", True):
        ctx.observe("num_collectives", len(ctx.collectives()), must=0)
    ctx.observe_parameters("start", module)
    ctx.observe_buffers("start", module)


@program("composite_state", invariants=("leaves_no_trace",))
def composite_state(ctx: RankContext) -> None:
    """Wrap modules with a frozen parameter and a buffer that are made of two tensors, several times over.

    Another buffer is of a class of tensors that changes nothing; with `in_one` all three are.

    Observes `parts`, the values of every part and of the plain parameters, or the refusal. All ranks run it.
    """
    modules = [_composite(ctx, ctx.rank) for _ in range(10)]
    try:
        for module in modules:
            ctx.wrap(module)
    except Exception as error:
        parts: Any = Raised.of(error, traceback.format_exc())
    else:
        parts = next((found for module in modules if (found := _parts(module)) != _OF_RANK_0), _OF_RANK_0)
    allowed = AnyOf(_OF_RANK_0, Raises(mentions=("weight",)), Raises(mentions=("table",)))
    ctx.observe("parts", parts, must=allowed)


#: What `_parts` returns of rank 0's module.
_OF_RANK_0 = ([10.0] * 9 + [20.0] * 9) * 2 + [30.0] * 3 + [0.0] * 15


class _Marked(Tensor):
    """A tensor like any other."""


def _composite(ctx: RankContext, rank: int) -> nn.Module:
    module: Any = moved(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), ctx.device)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(rank)
    made: list[Any] = []
    for _ in "ab":
        parts = [torch.full((3, 3), rank + 10.0 * part, device=ctx.device) for part in (1, 2)]
        made.append(torch.cat(parts).as_subclass(_Marked) if ctx.arguments.get("in_one") else TwoTensor(*parts))
    module[0].weight = nn.Parameter(made[0], requires_grad=False)
    module.register_buffer("table", made[1])
    module.register_buffer("marked", torch.full((3,), rank + 30.0, device=ctx.device).as_subclass(_Marked))
    return module


def _parts(module: Any) -> list[float]:
    made = (module[0].weight, module.table)
    tensors = [part for each in made for part in ((each.a, each.b) if isinstance(each, TwoTensor) else (each,))] + [
        module.marked,
        module[0].bias,
        module[1].weight,
        module[1].bias,
    ]
    return [value for tensor in tensors for value in tensor.detach().flatten().tolist()]
