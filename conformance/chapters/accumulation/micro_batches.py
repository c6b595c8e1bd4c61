"""Program `accumulation`: micro-batches inside and outside `no_sync`, in every arrangement that users write."""

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from conformance.checkers.protocol import holds_floats
from conformance.errors import ScenarioError
from conformance.models.integers import RankStep, with_integer_weights
from conformance.observation import Collective
from conformance.programs import RankContext, program, rank_step
from conformance.programs.written_steps import in_a_thread
from conformance.scenario import Scenario
from conformance.truth.expected import at_least

#: The kinds of micro-batches, and whether their gradients are synchronised.
KINDS: Mapping[str, bool] = {
    "local": False,  # forward and backward inside `no_sync`
    "sync": True,  # both outside
    "forward_inside": False,  # the backward outside
    "backward_inside": True,  # the forward outside
    "joint_local_first": True,  # one backward for a forward inside and a later one outside
    "joint_local_last": True,  # one backward for a forward outside and a later one inside
    "after_inner": False,  # both inside, after an inner `no_sync` was left
    "after_exception": True,  # both outside, after a `no_sync` was left by an exception
    "after_empty": True,  # both outside, after a `no_sync` with nothing in it
    "local_in_thread": False,  # forward and backward in another thread, inside `no_sync` of this one
    "sync_in_thread": True,  # in another thread, outside
    "local_by_rank": False,  # as `local`, rank + 1 times
}


class Branches(nn.Module):
    """A trunk and two branches; an argument of forward selects the branches that it uses."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(3, 3)
        self.a = nn.Linear(3, 2)
        self.b = nn.Linear(3, 2, bias=False)

    def forward(self, inputs: Tensor, which: str) -> Tensor:
        hidden = self.trunk(inputs)
        outputs: list[Tensor] = [getattr(self, name)(hidden) for name in which]
        return torch.stack(outputs).sum(0)


class Interrupted(Exception):  # noqa: N818 - raised on purpose, to leave a block
    """Raised to leave `no_sync` in the middle."""


def _micro_batches(scenario: Scenario) -> list[list[tuple[str, str]]]:
    """Return for each step its micro-batches as (kind, branches); written `kind` or `kind:branches`."""
    steps = []
    for step in scenario.arguments["steps"]:
        parts = [text.partition(":") for text in step]
        steps.append([(kind, branches or "ab") for kind, _, branches in parts])
        if unknown := {kind for kind, _ in steps[-1]} - set(KINDS):
            raise ScenarioError(f"{scenario.id}: unknown micro-batches {sorted(unknown)}; known: {', '.join(KINDS)}")
    return steps


def _forward(model: Any, own_step: RankStep, micro: int, branches: str) -> Tensor:
    return own_step.loss(own_step.forward(model, own_step.inputs(4, 3, micro=micro), branches), micro)


@program("accumulation", invariants=("same_collectives", "nothing_in_flight", "leaves_no_trace"))
def accumulation(ctx: RankContext) -> None:
    """Run the micro-batches of argument `steps`, a list of steps of `KINDS`; gradients are set to None per step.

    With argument `zero_grad` = "keep" or "zeros" they are kept or set to zero instead. Observes after each micro-batch
    `step<k>/micro<m>/grad/<name>` and `num_gradient_collectives` of it, and with argument `flags` these:
    `require_backward_grad_sync` inside `no_sync` and after it. All ranks run it.
    """
    module = with_integer_weights(Branches(), ctx.scenario.seed).to(ctx.device)
    model: Any = ctx.wrap(module)
    for index, step in enumerate(_micro_batches(ctx.scenario)):
        if (how := ctx.arguments.get("zero_grad", "none")) != "keep":
            module.zero_grad(set_to_none=how == "none")
        own_step = rank_step(ctx, index)
        for micro, (kind, branches) in enumerate(step):
            before = len(ctx.collectives())
            flags = [
                _run(ctx, model, own_step, kind, micro + 10 * part, branches)  # data of its own for each forward
                for part in range(ctx.rank + 1 if kind == "local_by_rank" else 1)
            ]
            prefix = f"step{index}/micro{micro}"
            issued = sum(moves_gradients(one, module) for one in ctx.collectives()[before:])
            must = at_least(1, "gradient collective") if KINDS[kind] else 0
            ctx.observe(f"{prefix}/num_gradient_collectives", issued, must=must)
            if ctx.arguments.get("flags"):
                ctx.observe(f"{prefix}/flags", [*flags[0], _synchronises(model)])
            ctx.observe_gradients(prefix, module)


def moves_gradients(collective: Collective, module: nn.Module) -> bool:
    """Whether a collective can hold what a rank sends of its gradients, in any phase and dtype.

    The module has no buffers and issues nothing itself. Numbers that are not floating are small agreements, unless they
    take as many bytes as the gradients.
    """
    if holds_floats(collective):
        return True
    in_all = sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())
    return bool(collective.dtypes) and collective.numel * getattr(torch, collective.dtypes[0]).itemsize >= in_all


def _run(ctx: RankContext, model: Any, own_step: RankStep, kind: str, micro: int, branches: str) -> list[bool | None]:
    """Run one micro-batch and return `require_backward_grad_sync` as it is inside `no_sync`, if that is entered."""
    inside: list[bool | None] = []
    if kind in ("local", "local_by_rank"):
        with ctx.no_sync(model):
            inside.append(_synchronises(model))
            own_step.backward(_forward(model, own_step, micro, branches))
    elif kind == "sync":
        own_step.backward(_forward(model, own_step, micro, branches))
    elif kind == "forward_inside":
        with ctx.no_sync(model):
            inside.append(_synchronises(model))
            loss = _forward(model, own_step, micro, branches)
        own_step.backward(loss)
    elif kind == "backward_inside":
        loss = _forward(model, own_step, micro, branches)
        with ctx.no_sync(model):
            inside.append(_synchronises(model))
            own_step.backward(loss)
    elif kind.startswith("joint"):
        losses = []
        for part, is_local in enumerate((True, False) if kind == "joint_local_first" else (False, True)):
            with ctx.no_sync(model) if is_local else contextlib.nullcontext():
                losses.append(_forward(model, own_step, micro + 10 * part, branches))
                if is_local:
                    inside.append(_synchronises(model))
        own_step.backward(sum(losses[1:], losses[0]))
    elif kind == "after_inner":
        with ctx.no_sync(model):
            with model.no_sync():
                inside.append(_synchronises(model))
            inside.append(_synchronises(model))
            own_step.backward(_forward(model, own_step, micro, branches))
    elif kind == "after_exception":
        try:
            with ctx.no_sync(model):
                inside.append(_synchronises(model))
                raise Interrupted
        except Interrupted:
            own_step.backward(_forward(model, own_step, micro, branches))
    elif kind == "local_in_thread":
        with ctx.no_sync(model):
            inside.append(_synchronises(model))
            in_a_thread(lambda: own_step.backward(_forward(model, own_step, micro, branches)))
    elif kind == "sync_in_thread":
        in_a_thread(lambda: own_step.backward(_forward(model, own_step, micro, branches)))
    else:
        with ctx.no_sync(model):
            inside.append(_synchronises(model))
        own_step.backward(_forward(model, own_step, micro, branches))
    return inside


def _synchronises(model: Any) -> bool | None:
    flag: bool | None = getattr(model, "require_backward_grad_sync", None)
    return flag
