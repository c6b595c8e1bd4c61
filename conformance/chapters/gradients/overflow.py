"""Program `overflowed_step`: a step whose gradients overflow, which the user skips, and the steps after it.

A gradient scaler makes such steps on purpose. What they leave in memory that a DDP keeps must not return: NaN and
infinity survive sums and products with 0, so that a DDP that does not write zeros has them in a later step.
"""

import contextlib
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

from conformance.models.integers import with_integer_weights
from conformance.models.low_precision import precision_option
from conformance.observation import Facts
from conformance.programs import RankContext, program, rank_step
from conformance.programs.join_context import joining
from conformance.scenario import Scenario
from conformance.truth.steps import gradients

WIDTH = 4
NUM_STEPS = 6
#: Behind the steps in which a DDP learns, so that its memory stays.
OVERFLOWED = 2
#: The branches that ranks use: others in every step, always the same, all of them, or only one until the last steps.
BRANCHES = ("alternating", "by_rank", "both", "one")


class Branches(nn.Module):
    """Two branches, of which a forward uses those in `branches`, and layers that every forward uses."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(WIDTH, WIDTH)
        self.a = nn.Linear(WIDTH, WIDTH)
        self.b = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, inputs: Tensor, branches: str) -> Tensor:
        hidden = self.trunk(inputs)
        for name in branches:
            hidden = getattr(self, name)(hidden)
        output: Tensor = self.head(hidden)
        return output


def branches_of(kind: str, rank: int, step: int) -> str:
    """Return the branches that `rank` uses in `step`, where `kind` is one of `BRANCHES`."""
    if kind == "alternating":
        return "ab"[(rank + step) % 2]
    if kind == "by_rank":
        return "ab"[rank % 2]
    return "a" if kind == "one" and step not in (OVERFLOWED, NUM_STEPS - 1) else "ab"


def _train(ctx: RankContext, *, overflows: bool) -> dict[str, Any]:
    """Train a module of its own; return the gradients of all steps as facts `step<k>/grad/<name>`."""
    module = with_integer_weights(Branches(), ctx.scenario.seed).to(ctx.device)
    model: Any = ctx.wrap(module, **precision_option(ctx.scenario.options))
    if ctx.arguments.get("hook"):
        model.register_comm_hook(ctx.process_group, fp16_compress_hook)
    joins = ctx.arguments.get("joins", False)
    facts: dict[str, Any] = {}
    with joining(ctx, model.join()) if joins else contextlib.nullcontext():
        # A rank that joins right behind the overflow has it in its memory still.
        for index in range(OVERFLOWED + ctx.rank if joins and ctx.rank else NUM_STEPS):
            module.zero_grad(set_to_none=ctx.arguments.get("set_to_none", True))
            is_poisoned = overflows and index == OVERFLOWED and ctx.rank in ctx.arguments["ranks"]
            for micro in range(local := ctx.arguments.get("local", 0)):
                with ctx.no_sync(model):
                    _backward(ctx, model, index, micro, is_poisoned=is_poisoned)
            _backward(ctx, model, index, local, is_poisoned=is_poisoned)
            facts |= gradients(f"step{index}", module)
    return facts


def _backward(ctx: RankContext, model: Any, index: int, micro: int, *, is_poisoned: bool) -> None:
    turn = rank_step(ctx, index)
    branches = branches_of(ctx.arguments["branches"], ctx.rank, index)
    output = turn.forward(model, turn.inputs(1, WIDTH, micro=micro), branches)
    # Small enough for half precision, where it is not to overflow.
    turn.backward(turn.loss(output, micro) / 144 * (math.inf if is_poisoned else 1))


@program("overflowed_step", invariants=("leaves_no_trace",))
def overflowed_step(ctx: RankContext) -> None:
    """Train twice, the second time with a step in which the loss of argument `ranks` is infinite; clear its gradients.

    Arguments: `branches` (of `BRANCHES`), `local` backwards under no_sync before each synchronised one, `joins`: the
    ranks have fewer and fewer inputs, `hook`: gradients travel as float16, `set_to_none`. Observes whether the step
    did overflow and `changed`, the gradients of other steps that differ from those of the first time. All ranks run it.
    """
    plain, poisoned = _train(ctx, overflows=False), _train(ctx, overflows=True)
    within = f"step{OVERFLOWED}/"
    mine = [value for name, value in poisoned.items() if name.startswith(within) and value is not None]
    ctx.observe("overflows", not all(value.isfinite().all() for value in mine))
    ctx.observe("finite", all(value is None or bool(value.isfinite().all()) for value in plain.values()))
    changed = [name for name in plain if not name.startswith(within) and not _same(plain[name], poisoned[name])]
    ctx.observe("changed", changed)


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)


@overflowed_step.expects
def _expected(scenario: Scenario) -> Mapping[int, Facts]:
    facts = {"overflows": True, "finite": True, "changed": []}
    return dict.fromkeys(range(scenario.world_size), facts)
