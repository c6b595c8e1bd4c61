"""Program `wrapped_parts`: a module is wrapped of which a part is wrapped already, and each trains what is its own."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from conformance.models.integers import with_integer_weights
from conformance.programs import RankContext, observe_run, program, run_steps, step_on
from conformance.truth.expected import Raises

_WIDTH = 3
_NUM_STEPS = 3
#: The parts of the part that is wrapped twice.
_LAYERS = ("0", "1")
_step = step_on(2, _WIDTH)


@dataclass(frozen=True)
class Division:
    """Which layers of the inner part are frozen once it is wrapped, and which either wrapper ignores."""

    frozen: tuple[str, ...] = ()
    ignored_within: tuple[str, ...] = ()
    ignored_around: tuple[str, ...] = ()

    @property
    def ignores(self) -> bool:
        return bool(self.ignored_within or self.ignored_around)

    @property
    def is_shared(self) -> bool:
        return not set(_LAYERS) <= {*self.frozen, *self.ignored_within, *self.ignored_around}


DIVISIONS: Mapping[str, Division] = {
    "frozen": Division(frozen=_LAYERS),
    "ignored": Division(ignored_around=_LAYERS),
    "divided": Division(ignored_within=("0",), ignored_around=("1",)),
    "frozen_and_ignored": Division(frozen=("0",), ignored_around=("1",)),
    "shared": Division(),
    "partly_shared": Division(frozen=("0",)),
}


@program("wrapped_parts", invariants=("same_collectives", "leaves_no_trace"))
def wrapped_parts(ctx: RankContext) -> None:
    """Wrap two layers, wrap them with a third one, and train three steps.

    Arguments: `division`, one of `DIVISIONS`; `within`, the options of the wrapper within, while the one around it has
    the scenario's. Observes the gradients of every step. Where both average a parameter, the second may be refused. All
    ranks run it.
    """
    division = DIVISIONS[ctx.arguments["division"]]
    refusal = Raises(("ValueError", "RuntimeError"), ("gradient",)) if division.is_shared else None
    observe_run(ctx, lambda: _train(ctx, division), refusal=refusal)


def _train(ctx: RankContext, division: Division) -> dict[str, Any]:
    part = with_integer_weights(nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in _LAYERS)), ctx.scenario.seed)
    last = with_integer_weights(nn.Linear(_WIDTH, 2), ctx.scenario.seed)
    _ignore(part, division.ignored_within, prefix="")
    wrapped = ctx.wrap_with(part.to(ctx.device), ctx.arguments["within"])
    for layer in division.frozen:
        part.get_submodule(layer).requires_grad_(False)
    whole = nn.Sequential(wrapped, last.to(ctx.device))
    _ignore(whole, division.ignored_around, prefix="0.module.")
    return run_steps(ctx, nn.Sequential(part, last), ctx.wrap(whole), _step, _NUM_STEPS)


def _ignore(module: Any, layers: tuple[str, ...], prefix: str) -> None:
    module._ddp_params_and_buffers_to_ignore = list(_names(layers, prefix))


def _names(layers: tuple[str, ...], prefix: str) -> Iterator[str]:
    for layer in layers:
        yield from (f"{prefix}{layer}.weight", f"{prefix}{layer}.bias")
