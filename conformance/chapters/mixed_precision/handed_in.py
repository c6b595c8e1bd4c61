"""Program `mixed_precision_calls`: what forward receives in mixed precision, in every place and container."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from conformance.models.integers import RankStep, with_integer_weights
from conformance.models.low_precision import precision_of
from conformance.models.watched_layers import dtype_name
from conformance.observation import Facts
from conformance.programs import RankContext, program, rank_step
from conformance.programs.calls import CALLS, CONTAINERS, PLACES, WIDTH, Receiver, parts
from conformance.scenario import Scenario

#: Each container in each place, but for objects of a class that no DDP looks into: their tensors may stay as they are.
_CALLS = tuple((place, container) for place, container in CALLS if container != "object")


class _Keeper(Receiver):
    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        self.received = {"args": args, "kwargs": kwargs}
        output: Tensor = self.layer(self.layer.weight.new_ones(2, WIDTH))
        return output


def _arguments(turn: RankStep, leaf: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    place, container = _CALLS[turn.step]
    micros = iter(range(9))
    handed = CONTAINERS[container](lambda: leaf(turn.inputs(2, WIDTH, micro=next(micros)).requires_grad_()))
    args, kwargs = PLACES[place](handed)
    return {"args": args, "kwargs": kwargs}


def _shown(value: Any) -> list[Any]:
    """Return what every part of `value` is: its type, of tensors dtype and values, of other values themselves."""
    shown: list[Any] = []
    for part in parts(value):
        kind = type(part).__name__
        if isinstance(part, Tensor):
            shown.append([kind, dtype_name(part.dtype), part])
        elif isinstance(part, Mapping):
            shown.append(f"{kind} of {list(part)}")
        elif isinstance(part, type):
            shown.append([kind, part.__name__])
        elif isinstance(part, str | int | float | None):
            shown.append([kind, part])
        else:
            shown.append(kind)
    return shown


@program("mixed_precision_calls", invariants=("same_collectives", "leaves_no_trace"))
def mixed_precision_calls(ctx: RankContext) -> None:
    """Call forward with each container in each place, with option `mixed_precision`, a step for each. All ranks run it.

    Observes `<place>-<container>/received`, what forward found, and `/given`, what the caller has afterwards.
    """
    module = with_integer_weights(_Keeper(), ctx.scenario.seed).to(ctx.device)
    model = ctx.wrap(module, mixed_precision=precision_of(ctx.scenario.options))
    for index, (place, container) in enumerate(_CALLS):
        turn = rank_step(ctx, index)
        given = _arguments(turn, lambda tensor: tensor)
        turn.backward(turn.forward(model, *given["args"], **given["kwargs"]).sum())
        ctx.observe(f"{place}-{container}/received", _shown(module.received))
        ctx.observe(f"{place}-{container}/given", _shown(given))


@mixed_precision_calls.expects
def _expected(scenario: Scenario) -> Mapping[int, Facts]:
    dtype = precision_of(scenario.options).param_dtype
    facts: dict[int, dict[str, Any]] = {rank: {} for rank in range(scenario.world_size)}
    for rank, mine in facts.items():
        for index, (place, container) in enumerate(_CALLS):
            turn = RankStep(rank, index)
            mine[f"{place}-{container}/received"] = _shown(_arguments(turn, lambda tensor: tensor.to(dtype)))
            mine[f"{place}-{container}/given"] = _shown(_arguments(turn, lambda tensor: tensor))
    return facts
