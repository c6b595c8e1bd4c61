"""Program `any_backward`: a way to run a backward, with something in `.grad` and hooks that observe it."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from conformance.checkers.protocol import is_gradient
from conformance.models.catalogue import moved
from conformance.models.integers import UNIT, RankStep, integers, with_integer_weights
from conformance.programs import RankContext, program, rank_step

_WIDTH = 3
#: In the first ones a DDP may communicate otherwise, because it learns.
_NUM_STEPS = 4


class Layers(nn.Module):
    """Two layers without biases, each of which fills a bucket."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(_WIDTH, _WIDTH, bias=False)
        self.last = nn.Linear(_WIDTH, 2, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.last(self.first(hidden))
        return output


@dataclass(frozen=True)
class _Turn:
    """One step of one rank: `model` is wrapped, and perhaps compiled."""

    rank: RankStep
    model: Any

    def inputs(self, micro: int = 0) -> Tensor:
        return self.rank.inputs(2, _WIDTH, micro=micro).requires_grad_()

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.rank.forward(self.model, inputs)
        return output

    def loss(self, micro: int = 0) -> Tensor:
        return self.rank.loss(self.forward(self.inputs(micro)), micro)

    def backward(self, loss: Tensor, **options: Any) -> None:
        self.rank.backward(loss, **options)

    def differentiate(self, loss: Tensor, by: Sequence[Tensor]) -> None:
        """Run a backward that accumulates nothing, on rank 0 alone."""
        if self.rank.rank == 0:
            with self.rank.phase("backward"):
                torch.autograd.grad(loss, by, retain_graph=True)


def _once(turn: _Turn) -> None:
    turn.backward(turn.loss())


def _by_inputs_first(turn: _Turn) -> None:
    inputs = turn.inputs()
    loss = turn.rank.loss(turn.forward(inputs))
    turn.differentiate(loss, [inputs])
    turn.backward(loss)


def _by_parameters_first(turn: _Turn) -> None:
    loss = turn.loss()
    turn.differentiate(loss, list(turn.model.parameters()))
    turn.backward(loss)


def _again(turn: _Turn) -> None:
    loss = turn.loss()
    turn.backward(loss, retain_graph=True)
    turn.backward(loss)


def _again_into_nothing(turn: _Turn) -> None:
    """Run a backward twice: into what `.grad` holds, and into None."""
    loss = turn.loss()
    turn.backward(loss, retain_graph=True)
    for parameter in turn.model.parameters():
        parameter.grad = None
    turn.backward(loss)


def _growing(turn: _Turn) -> None:
    """Take one row more in every other step."""
    inputs = turn.rank.inputs(2 + turn.rank.step // 2, _WIDTH).requires_grad_()
    turn.backward(turn.rank.loss(turn.forward(inputs)))


def _two_losses(turn: _Turn) -> None:
    output = turn.forward(turn.inputs())
    turn.backward(turn.rank.loss(output), retain_graph=True)
    turn.backward(turn.rank.loss(output, 1))


def _two_forwards(turn: _Turn) -> None:
    turn.backward(turn.loss() + turn.loss(1))


def _two_forwards_apart(turn: _Turn) -> None:
    first, second = turn.loss(), turn.loss(1)
    turn.backward(second)
    turn.backward(first)


def _local_first(turn: _Turn) -> None:
    with turn.model.no_sync():
        turn.backward(turn.loss())
    turn.backward(turn.loss(1))


def _local_late(turn: _Turn) -> None:
    first = turn.loss()
    with turn.model.no_sync():
        local = turn.loss(1)
    turn.backward(local)
    turn.backward(first)


def _local_joint(turn: _Turn) -> None:
    first = turn.loss()
    with turn.model.no_sync():
        local = turn.loss(1)
    turn.backward(first + local)


def _forgotten(turn: _Turn) -> None:
    turn.loss()
    turn.backward(turn.loss(1))


def _checkpoint(turn: _Turn, *, reentrant: bool = False) -> None:
    with turn.rank.phase("forward"):  # that of the recomputation belongs to the backward
        output = checkpoint(turn.model, turn.inputs(), use_reentrant=reentrant)
    turn.backward(turn.rank.loss(output))


def _reentrant(turn: _Turn) -> None:
    _checkpoint(turn, reentrant=True)


def _twofold(turn: _Turn) -> None:
    inputs = turn.inputs()
    loss = turn.rank.loss(turn.forward(inputs))
    with turn.rank.phase("backward"):
        (slope,) = torch.autograd.grad(loss, inputs, create_graph=True)
    turn.backward(loss + slope.sum())


#: Ways to run backwards, and how often what accumulates is averaged.
BACKWARDS: Mapping[str, tuple[Callable[[_Turn], None], int]] = {
    "once": (_once, 1),
    "by_inputs_first": (_by_inputs_first, 1),
    "by_parameters_first": (_by_parameters_first, 1),
    "again": (_again, 2),
    "again_into_nothing": (_again_into_nothing, 2),
    "growing": (_growing, 1),
    "two_losses": (_two_losses, 2),
    "two_forwards": (_two_forwards, 1),
    "two_forwards_apart": (_two_forwards_apart, 2),
    "local_first": (_local_first, 1),
    "local_late": (_local_late, 1),
    "local_joint": (_local_joint, 1),
    "forgotten": (_forgotten, 1),
    "checkpoint": (_checkpoint, 1),
    "reentrant": (_reentrant, 1),
    "twofold": (_twofold, 1),
}


def _set(turn: _Turn, ranks: Sequence[int]) -> None:
    for index, parameter in enumerate(turn.model.parameters()):
        key = ("prior", index, turn.rank.rank, turn.rank.step)
        is_set = turn.rank.rank in ranks
        parameter.grad = UNIT * integers(*parameter.shape, key=key).to(turn.rank.device) if is_set else None


def _zero(turn: _Turn) -> None:
    for parameter in turn.model.parameters():
        parameter.grad = torch.zeros_like(parameter)


#: What `.grad` holds before.
STATES: Mapping[str, Callable[[_Turn], None]] = {
    "none": lambda turn: _set(turn, ()),
    "zeros": _zero,
    "own": lambda turn: _set(turn, (0, 1)),
    "of_rank_0": lambda turn: _set(turn, (0,)),
}

_Seen = list[Tensor]


def _doubled(parameter: Tensor) -> None:
    if parameter.grad is not None:
        parameter.grad.mul_(2)


def _noted(seen: _Seen, parameter: Tensor) -> None:
    if parameter.grad is not None:
        seen.append(parameter.grad.clone())


#: Who looks on, and may change what it sees; returns handles.
HOOKS: Mapping[str, Callable[[Sequence[Tensor], _Seen], list[Any]]] = {
    "nobody": lambda _, seen: [],
    "before": lambda own, seen: [one.register_hook(lambda gradient: seen.append(gradient.clone())) for one in own],
    "changes_before": lambda own, seen: [one.register_hook(lambda gradient: gradient * 2) for one in own],
    "behind": lambda own, seen: [
        one.register_post_accumulate_grad_hook(lambda parameter: _noted(seen, parameter)) for one in own
    ],
    "changes_behind": lambda own, seen: [one.register_post_accumulate_grad_hook(_doubled) for one in own],
    "of_all": lambda own, seen: [
        torch.autograd.graph.register_multi_grad_hook(own, lambda all_: seen.extend(one.clone() for one in all_))
    ],
}


@contextlib.contextmanager
def _looking_on(ctx: RankContext, module: nn.Module, seen: _Seen) -> Iterator[None]:
    alone = ctx.arguments.get("rank_0_alone") and ctx.rank != 0
    handles = HOOKS["nobody" if alone else ctx.arguments["hook"]](list(module.parameters()), seen)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@program("any_backward", invariants=("same_collectives", "nothing_in_flight", "leaves_no_trace"))
def any_backward(ctx: RankContext) -> None:
    """Run a step of `backward`, from a `state` of `.grad`, with a `hook` (on rank 0 alone if `rank_0_alone`), 4 times.

    Observes gradients, what the hook has seen, and how many collectives reduced the gradients of the last step. All
    ranks run it.
    """
    module = moved(with_integer_weights(Layers(), ctx.scenario.seed), ctx.device)
    model = ctx.wrap(module)
    run, num_averages = BACKWARDS[ctx.arguments["backward"]]
    for index in range(_NUM_STEPS):
        turn, seen = _Turn(rank_step(ctx, index), model), list[Tensor]()
        STATES[ctx.arguments["state"]](turn)
        with _looking_on(ctx, module, seen):
            run(turn)
        ctx.observe_gradients(f"step{index}", module)
        ctx.observe(f"step{index}/seen", sorted(seen, key=lambda each: each.flatten().tolist()))
    issued = [one for one in ctx.collectives() if is_gradient(one) and one.step == _NUM_STEPS - 1]
    ctx.observe("num_issued", len(issued), must=num_averages * len(list(module.parameters())))
