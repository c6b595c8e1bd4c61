"""Program `training_at_scale`: many parameters, large ones, many steps, gradients of every magnitude."""

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from conformance.chapters.scale.values import arbitrary, whole
from conformance.checkers.diagnosis import diagnose
from conformance.errors import instance
from conformance.models.batches import mixed_seed
from conformance.observation import Facts
from conformance.programs import RankContext, program, rank_step
from conformance.scenario import Scenario
from conformance.truth.difference import Difference, difference

#: How many wrong tensors a rank describes.
NUM_REPORTED = 8


class Weights(nn.Module):
    """Vectors; the gradient of each is, bit for bit, what `forward` multiplies it by."""

    def __init__(self, lengths: Collection[int], dtype: torch.dtype) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.ones(length, dtype=dtype) for length in lengths)

    def forward(self, factors: Collection[Tensor], users: Collection[int]) -> Tensor:
        pairs = zip(self.weights, factors, strict=True)
        return torch.stack([_dot(*pair) for index, pair in enumerate(pairs) if index in users]).sum()


def _dot(weight: Tensor, factor: Tensor) -> Tensor:
    if weight.is_complex():
        weight, factor = torch.view_as_real(weight), torch.view_as_real(factor)
    return (weight * factor).sum()


@program("training_at_scale", invariants=("same_collectives", "nothing_in_flight", "leaves_no_trace"))
def training_at_scale(ctx: RankContext) -> None:
    """Take argument `steps` steps of `Weights` with argument `parameters`, pairs of a number and a length.

    With argument `idle` ranks leave out parameters beside every power of two. With argument `arbitrary`, the name of a
    dtype, gradients have random bits of that dtype, otherwise they are whole numbers. Observes `wrong`: which gradients
    were not the mean, in which step, and where. The rank computes the mean itself, so that it need not send millions of
    elements to the controller. All ranks run it.
    """
    lengths = [length for number, length in ctx.arguments["parameters"] for _ in range(number)]
    module = Weights(lengths, _dtype(ctx.scenario)).to(ctx.device)
    model = ctx.wrap(module)
    wrong: list[str] = []
    for step in range(ctx.arguments["steps"]):
        module.zero_grad(set_to_none=True)
        users = [users_of(ctx.scenario, index, step) for index in range(len(lengths))]
        of_ranks = [_gradients(ctx.scenario, sum(lengths), rank, step).split(lengths) for rank in range(ctx.world_size)]
        factors = [factor.to(ctx.device) for factor in of_ranks[ctx.rank]]
        turn = rank_step(ctx, step)
        used = {index for index, ranks in enumerate(users) if ctx.rank in ranks}
        turn.backward(turn.forward(model, factors, used))
        for index, parameter in enumerate(module.weights):
            expected = _mean([of_ranks[rank][index] for rank in users[index]], ctx.world_size)
            if found := first_difference(expected, parameter.grad):
                own = {rank: of_ranks[rank][index] for rank in range(ctx.world_size)}
                instead = partial(clause, "gradient", expected, parameter.grad, ctx.rank, own)
                note(wrong, f"step {step}: the gradient of weights.{index} {found}", instead)
    ctx.observe("wrong", shortened(wrong))


def note(wrong: list[str], sentence: str, instead: Callable[[], str]) -> None:
    """Add a sentence about a tensor to `wrong`; where it will be reported, with what the tensor is instead."""
    wrong.append(sentence + instead() if len(wrong) < NUM_REPORTED else sentence)


def clause(name: str, expected: Tensor | None, got: Tensor | None, rank: int, own: Mapping[int, Tensor]) -> str:
    """Return what wrong tensor `name` of this rank is instead, as far as the rank can find out; empty if it cannot.

    `own` are the ranks' values before they communicated. Where this rank still has its own, so do the others.
    """
    here = None if got is None else got.detach().cpu()
    is_own = here is not None and here.dtype == own[rank].dtype and torch.equal(here, own[rank])
    others = {one: {name: value} for one, value in own.items()} if is_own else {}
    found = diagnose(name, rank, {one: {name: expected} for one in own}, {**others, rank: {name: here}})
    return f": {found.clause}" if found.clause else ""


def first_difference(expected: Tensor | None, got: Tensor | None) -> Difference | None:
    """Return how a tensor on any device differs from the expected one; millions of equal elements are cheap."""
    here = None if got is None else got.detach().cpu()
    if expected is not None and here is not None and expected.dtype == here.dtype and torch.equal(expected, here):
        return None
    return difference(expected, here)


def shortened(wrong: Sequence[str]) -> list[str]:
    """Return the first of the sentences, and how many there are if that is not all."""
    more = [f"... {len(wrong)} in all"] if len(wrong) > NUM_REPORTED else []
    return [*wrong[:NUM_REPORTED], *more]


def _dtype(scenario: Scenario) -> torch.dtype:
    return instance(getattr(torch, scenario.arguments.get("arbitrary", "float32")), torch.dtype)


def users_of(scenario: Scenario, index: int, step: int) -> Collection[int]:
    """Return the ranks that use parameter `index` in `step`: beside powers of two none, one, or all, in turns."""
    ranks = range(scenario.world_size)
    if not scenario.arguments.get("idle") or not any(_is_power_of_two(near) for near in (index - 1, index, index + 1)):
        return ranks
    return ((), (step % scenario.world_size,), ranks)[(index + step) % 3]


def _is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


def _gradients(scenario: Scenario, length: int, rank: int, step: int) -> Tensor:
    dtype = _dtype(scenario)
    if "arbitrary" not in scenario.arguments:
        return whole(length, scenario.seed, rank, step)
    values = arbitrary(length, dtype, scenario.seed, step)
    if not dtype.is_complex:  # dividing a complex infinity may give not-a-numbers
        values[:3] = torch.tensor([torch.inf, -torch.inf, torch.nan])
    values[-1] = 0  # which is not the same as none
    # One rank or two hold an element, the others a zero of either sign: the sum needs no more bits than the element.
    choices = torch.Generator().manual_seed(mixed_seed("holders", scenario.seed, step))
    first_holder, num_holders, sign = torch.randint(0, 2**20, (3, length), generator=choices)
    is_mine = (rank - first_holder) % scenario.world_size <= num_holders % 2
    return torch.where(is_mine, values, torch.where(sign % 2 == 0, 0.0, -0.0).to(dtype))


def _mean(locals_: Sequence[Tensor], world_size: int) -> Tensor | None:
    """Return the mean over all ranks, of which `locals_` are those that have a gradient; None if none has."""
    if not locals_:
        return None
    total = functools.reduce(torch.add, locals_)
    return torch.view_as_complex(torch.view_as_real(total) / world_size) if total.is_complex() else total / world_size


@training_at_scale.expects
def _expected(scenario: Scenario) -> Mapping[int, Facts]:
    nothing: dict[str, Any] = {"wrong": []}
    return dict.fromkeys(range(scenario.world_size), nothing)
