"""Programs of manual finalization: steps whose gradients `finalize_backward()` makes final, and mistakes with it."""

import contextlib
import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.distributed.optim.apply_optimizer_in_backward import _apply_optimizer_in_backward

from conformance.composed.numerics import WholeNumbers
from conformance.errors import present
from conformance.models.integers import RankStep, with_integer_weights
from conformance.programs import RankContext, observe_run, program, rank_step, run_steps
from conformance.truth.expected import Raises

WIDTH = 4
NUM_STEPS = 3


class Branches(nn.Module):
    """Two layers, and a third which `uses` says whether forward runs it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.spare = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("count", torch.zeros(1))

    def forward(self, rows: Tensor, *, uses: bool = True) -> Tensor:
        hidden: Tensor = self.second(self.first(rows))
        return hidden + self.spare(rows) if uses else hidden


def _wrapped(ctx: RankContext) -> tuple[Branches, Any]:
    """Return the module and its wrapper, whose backwards are finalized by hand. Does not apply to DDPs without it."""
    module = with_integer_weights(Branches(), ctx.scenario.seed).to(ctx.device)
    model: Any = ctx.wrap(module)
    ctx.finalize_by_hand(model)
    return module, model


def _finalize(ctx: RankContext, model: Any) -> None:
    with ctx.phase("finalize_backward"):
        model.finalize_backward()


def _readable(module: nn.Module) -> Mapping[str, Tensor]:
    found = dict[str, Tensor]()
    for name, parameter in module.named_parameters():
        with contextlib.suppress(RuntimeError):
            found |= {} if parameter.grad is None else {name: parameter.grad.detach().clone()}
    return found


def _forward_backward(model: Any, turn: RankStep, micro: int = 0, *, uses: bool = True) -> None:
    turn.backward(turn.loss(turn.forward(model, turn.inputs(3, WIDTH, micro=micro), uses=uses), micro))


#: How a step of the program can differ from forward, backward, `finalize_backward`.
USES = ("plain", "accumulated", "evaluated", "by_turns", "unused_by_rank", "in_backward")


@program("finalized_by_hand", invariants=("same_collectives", "leaves_no_trace"), speaks_for={"*/early": ("FINAL-02",)})
def finalized_by_hand(ctx: RankContext) -> None:
    """Train steps that `finalize_backward()` ends, in the way that argument `use` names. All ranks run it.

    Observes `step<k>/grad/<name>`; `step<k>/early`, the parameters whose gradients were these before already, unless
    they live in buckets; `step<k>/moved`, those that moved before, and the state `after`; and `asked`, the
    values of `should_finalize_after_backward` with the option and without.
    """
    use = ctx.arguments["use"]
    module, model = _wrapped(ctx)
    if use == "in_backward":
        _apply_optimizer_in_backward(WholeNumbers, module.parameters(), {})
    in_buckets = ctx.scenario.options.get("gradient_as_bucket_view")

    def step(model: Any, turn: RankStep) -> Mapping[str, Any]:
        by_hand = use != "by_turns" or turn.step % 2 == 0
        model.require_manual_backward_finalization = by_hand
        if use == "accumulated":
            with ctx.no_sync(model):
                _forward_backward(model, turn, 1)
        before = copy.deepcopy(module.state_dict())
        _forward_backward(model, turn, uses=use != "unused_by_rank" or ctx.rank == turn.step % ctx.world_size)
        early = {} if in_buckets or not by_hand else _readable(module)
        moved = [name for name, one in module.named_parameters() if not torch.equal(one, before[name])]
        if use == "evaluated":
            with torch.no_grad():
                turn.forward(model, turn.inputs(3, WIDTH, micro=2))
            model.state_dict()
        if by_hand:
            _finalize(ctx, model)
        final = _readable(module)
        same = [name for name in early if name in final and torch.equal(early[name], final[name])]
        return {"early": same, "moved": moved if by_hand else [], "after": copy.deepcopy(module.state_dict())}

    must: dict[str, Any] = {f"step{index}/{name}": [] for index in range(NUM_STEPS) for name in ("early", "moved")}
    observe_run(ctx, lambda: run_steps(ctx, module, model, step, NUM_STEPS), must=must)
    with ctx.catching("asked"):
        asked = model.should_finalize_after_backward
        model.require_manual_backward_finalization = False
        ctx.observe("asked/with", type(asked).__name__, must="bool")
        ctx.observe("asked/without", model.should_finalize_after_backward, must=False)


def _forward(ctx: RankContext, module: nn.Module, model: Any) -> None:
    turn = rank_step(ctx, 1)
    turn.forward(model, turn.inputs(3, WIDTH))


def _forward_under_no_sync(ctx: RankContext, module: nn.Module, model: Any) -> None:
    with ctx.no_sync(model):
        _forward(ctx, module, model)


def _switch(ctx: RankContext, module: nn.Module, model: Any) -> None:
    model.require_manual_backward_finalization = not model.require_manual_backward_finalization


def _again(ctx: RankContext, module: nn.Module, model: Any) -> None:
    _finalize(ctx, model)


def _stepping(make: Callable[..., optim.Optimizer]) -> Callable[[RankContext, nn.Module, Any], None]:
    return lambda ctx, module, model: make(module.parameters(), lr=0.5).step()


def _clip(ctx: RankContext, module: nn.Module, model: Any) -> None:
    nn.utils.clip_grad_norm_(module.parameters(), 0.5)


def _look(ctx: RankContext, module: nn.Module, model: Any) -> None:
    for parameter in module.parameters():
        present(parameter.grad).norm()


_Call = Callable[[RankContext, nn.Module, Any], None]
#: Mistakes by the moment of a step at which they are made.
MISTAKES: Mapping[str, Mapping[str, _Call]] = {
    "before_forward": {"finalized_before_all": _again},
    "before_backward": {"finalized_before_backward": _again, "switched_off_before_backward": _switch},
    "after_backward": {
        "forgotten": _forward,
        "forgotten_under_no_sync": _forward_under_no_sync,
        "switched_off": _switch,
        "stepped": _stepping(optim.SGD),
        "stepped_by_adam": _stepping(optim.Adam),
        "clipped": _clip,
        "looked_at": _look,
    },
    "at_the_end": {"finalized_twice": _again},
    "after_local": {"finalized_under_no_sync": _again},
    "while_off": {"finalized_while_off": _again},
}


@program("finalized_wrongly", invariants=("leaves_no_trace",))
def finalized_wrongly(ctx: RankContext) -> None:
    """Make the mistake that argument `mistake` names in the second of three steps, and continue. All ranks run it.

    Observes `error`, `moved`, the parameters that changed, and `step<k>/grad/<name>`.
    """
    module, model = _wrapped(ctx)
    mistake = ctx.arguments["mistake"]

    def at(moment: str) -> None:
        if turn.step == 1 and mistake in MISTAKES[moment]:
            before = copy.deepcopy(module.state_dict())
            with ctx.phase(mistake), ctx.catching("error", must=Raises(("RuntimeError",), ("finaliz",))):
                MISTAKES[moment][mistake](ctx, module, model)
            moved = [name for name, one in module.named_parameters() if not torch.equal(one, before[name])]
            ctx.observe("moved", moved, must=[])
            if moved:
                module.load_state_dict(before)

    for turn in (rank_step(ctx, index) for index in range(NUM_STEPS)):
        module.zero_grad()
        if mistake in MISTAKES["after_local"]:
            with ctx.no_sync(model):
                _forward_backward(model, turn, 1)
            at("after_local")
        model.require_manual_backward_finalization = by_hand = turn.step != 1 or mistake not in MISTAKES["while_off"]
        at("before_forward")
        loss = turn.loss(turn.forward(model, turn.inputs(3, WIDTH)))
        at("before_backward")
        turn.backward(loss)
        at("after_backward")
        at("while_off")
        if by_hand:
            _finalize(ctx, model)
        at("at_the_end")
        ctx.observe_gradients(f"step{turn.step}", module)
