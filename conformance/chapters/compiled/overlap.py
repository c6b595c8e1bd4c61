"""Program `compiled_overlap`: how many reductions a compiled backward has issued when it reaches the last gradient.

Each layer is followed by an operator of our own, opaque to compilers, whose backward notes what has been issued so far.
The gradients of a layer are computed behind it.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from conformance.chapters.compiled.compiling import PRELOAD, compiling
from conformance.checkers.protocol import is_gradient
from conformance.models.integers import RankStep, with_integer_weights
from conformance.observation import Facts
from conformance.programs import RankContext, observe_run, program, run_steps, step_on
from conformance.programs.bucket_traffic import caps_of, filled_buckets
from conformance.scenario import Scenario
from conformance.truth.expected import at_least
from conformance.truth.steps import simulate_steps

_NUM_STEPS = 3
_NUM_LAYERS = 4
_WIDTH = 4
_LAYER_BYTES = 4 * _WIDTH * (_WIDTH + 1)

#: What the backward of a mark calls with the place of its layer.
_listeners: list[Callable[[int], None]] = []
_step = step_on(3, _WIDTH)


@torch.library.custom_op("ddp_conformance::mark", mutates_args=())
def mark(hidden: Tensor, place: int) -> Tensor:
    """Return `hidden`; when its gradient arrives, the listeners are called with `place`."""
    return hidden.clone()


@torch.library.custom_op("ddp_conformance::mark_backward", mutates_args=())
def _mark_backward(gradient: Tensor, place: int) -> Tensor:
    for listener in _listeners:
        listener(place)
    return gradient.clone()


@mark.register_fake
@_mark_backward.register_fake
def _like(tensor: Tensor, place: int) -> Tensor:
    return torch.empty_like(tensor)


def _keep_place(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.place = inputs[1]


mark.register_autograd(lambda ctx, gradient: (_mark_backward(gradient, ctx.place), None), setup_context=_keep_place)


@contextlib.contextmanager
def listening(listener: Callable[[int], None]) -> Iterator[None]:
    """Call `listener` with the place of every mark that a backward reaches while the block runs."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


class Marked(nn.Module):
    """Layers, each followed by a mark, that run in the order in which they are registered, or the last one first."""

    def __init__(self, *, last_first: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH) for _ in range(_NUM_LAYERS))
        self._last_first = last_first

    def forward(self, hidden: Tensor) -> Tensor:
        for place, layer in enumerate(reversed(self.layers) if self._last_first else self.layers):
            hidden = mark(layer(hidden), place)
        return hidden


def _build(scenario: Scenario) -> nn.Module:
    return with_integer_weights(Marked(last_first=bool(scenario.arguments.get("last_first"))), scenario.seed)


@program("compiled_overlap", invariants=("same_collectives", "nothing_in_flight", "leaves_no_trace"), preload=PRELOAD)
def compiled_overlap(ctx: RankContext) -> None:
    """Train three steps of layers of 80 bytes each; with `last_first` they run in reverse order of registration.

    Observes gradients, and `begun`: how many reductions the last step had issued when its backward reached the first
    layer, whose gradients are the last. All ranks run it.
    """
    module = _build(ctx.scenario).to(ctx.device)
    begun: list[int] = []
    before = 0

    def listen(place: int) -> None:
        if place == 0:
            begun.append(sum(map(is_gradient, ctx.collectives()[before:])))

    def step(model: Any, turn: RankStep) -> None:
        nonlocal before
        before = len(ctx.collectives())
        _step(model, turn)

    with listening(listen), compiling(ctx) as (inside, _):
        observe_run(inside, lambda: run_steps(inside, module, inside.wrap(module), step, _NUM_STEPS))
    ctx.observe("begun", begun[-1])


@compiled_overlap.expects
def _early(scenario: Scenario) -> Mapping[int, Facts]:
    truth = simulate_steps([_build(scenario) for _ in range(scenario.world_size)], _step, _NUM_STEPS)
    num_buckets = len(filled_buckets([_LAYER_BYTES] * _NUM_LAYERS, caps_of(scenario.options)))
    early = at_least(num_buckets - 1, f"of {num_buckets}")
    return {rank: {**facts, "begun": early} for rank, facts in truth.items()}
