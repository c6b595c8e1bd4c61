"""Rules that recognise a known mistake of a DDP from the numbers alone; each is a value.

A rule's clause describes the value with the numbers of the case, and is empty unless the rule holds for every element.
Of several rules that hold, the rule with the smallest `generality` is the most specific.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from conformance.checkers.wrong_value import WrongValue, all_alike, is_zero, same, series, total, wide
from conformance.truth.difference import equal_values


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule that recognises one of `mistakes.MISTAKES`: `clause` describes the wrong value."""

    name: str
    generality: int
    clause: Callable[[WrongValue], str]


def _wrong_dtype(case: WrongValue) -> str:
    if case.wanted.shape != case.got.shape:
        return ""
    if same(case.wanted, case.got):
        return "the right values in another dtype"
    rounded = case.wanted.to(case.got.dtype)
    return "the expected values rounded to this dtype" if same(rounded, case.got) else "other values in another dtype"


def _wrong_shape(case: WrongValue) -> str:
    if case.wanted.numel() == case.got.numel() and same(case.wanted.reshape(-1), case.got.reshape(-1)):
        return "the right values in another shape"
    if case.wanted.shape == case.got.shape:
        return ""
    return _transposed(case) or f"of shape {tuple(case.got.shape)}, where {tuple(case.wanted.shape)} must be"


#: How many different values a tensor needs for its order to be distinctive: a flag has two.
_FEWEST_DISTINCT = 3


def _order_is_distinctive(values: Tensor) -> bool:
    parts = torch.view_as_real(values) if values.is_complex() else values.unsqueeze(-1)
    return len(parts.reshape(-1, parts.shape[-1]).unique(dim=0)) >= _FEWEST_DISTINCT


def _transposed(case: WrongValue) -> str:
    return (
        "the expected values transposed: wrong strides"
        if case.wanted.dim() == 2 and _order_is_distinctive(case.got) and same(case.wanted.t(), case.got)
        else ""
    )


def _not_finite(case: WrongValue) -> str:
    broken = ~case.got.isfinite() & case.wanted.isfinite()
    if not bool(broken.any()):
        return ""
    if bool((case.got[broken] != case.got[broken]).any()):
        return f"not-a-number in {int(broken.sum())} place(s) that must be finite"
    return f"an overflow to infinity in {int(broken.sum())} place(s) that must be finite"


def _differ_where_alike(case: WrongValue) -> bool:
    """Whether all ranks must have the same value, but do not."""
    if case.world_size < 2 or len(case.everywhere) < case.world_size or not all_alike(case.wanted_everywhere):
        return False
    return not all_alike(case.everywhere)


def _no_sync_left_out(case: WrongValue) -> str:
    left = case.left_before
    if not _differ_where_alike(case) or len(left) < case.world_size:
        return ""
    last_mean = wide(case.wanted) - total(left) / case.world_size
    for part, clause in (
        (last_mean, "what `no_sync` left on this rank, never averaged, plus the mean of the last backward"),
        (last_mean * case.world_size, "what `no_sync` left on this rank, never averaged, plus the last backward's sum"),
    ):
        if all(same(wide(got) - wide(left[rank]), part) for rank, got in case.everywhere.items()):
            return clause
    return ""


def _earlier_lost(case: WrongValue) -> str:
    left = case.left_before
    if len(left) < case.world_size or all(map(is_zero, left.values())) or is_zero(case.got):
        return ""
    mean = total(left) / case.world_size
    if is_zero(mean) or not same(wide(case.wanted) - mean, wide(case.got)):
        return ""
    who = "the backward before" if all_alike(left) else "`no_sync`"
    return f"the last backward's alone: what {who} had left is lost"


def _never_reduced(case: WrongValue) -> str:
    if not _differ_where_alike(case) or case.was_reduced:
        return ""
    found = total(case.everywhere)
    if same(found, wide(case.wanted) * case.world_size):
        return "the rank's own local value, not averaged (the mean over the ranks is what was expected)"
    if same(found, wide(case.wanted)):
        return "the rank's own local value divided by the world size, but never reduced"
    return ""


def _reduced_and_not_used(case: WrongValue) -> str:
    if not _differ_where_alike(case) or not case.was_reduced:
        return ""
    if any(case.others_of_its_step) or (whose := _mean_is_right(case)) is None:
        return ""
    part = _part_of_its_own(case)
    where = f" in {part}" if part else ""
    held = "sum" if whose else "mean"
    sent = f"; {case.never_sent}" if case.never_sent else ""
    none_holds = f"the ranks' {held} is right, no rank holds it"
    return f"the rank's own{where}{whose}, although its backward reduced: {none_holds}{sent}"


def _left_out(case: WrongValue) -> str:
    if _nobody_else_has_it(case) and any(case.others_of_its_step):
        return "the rank's own value, not averaged: the other ranks have none; other gradients of the step are right"
    if not _differ_where_alike(case) or not case.was_reduced or not any(case.others_of_its_step):
        return ""
    if (whose := _mean_is_right(case)) is None:
        return ""
    if part := _part_of_its_own(case):
        return f"the rank's own{whose}, not averaged, in {part}; the rest is right"
    return f"the rank's own local value{whose}, not averaged; other gradients of the step are right"


def _nobody_else_has_it(case: WrongValue) -> bool:
    """Whether all ranks must have the mean of the only value, which this rank has itself."""
    wanted = case.wanted_everywhere
    if case.world_size < 2 or len(wanted) < case.world_size or not all_alike(wanted) or len(case.everywhere) != 1:
        return False
    return same(wide(case.wanted) * case.world_size, wide(case.got))


def _mean_is_right(case: WrongValue) -> str | None:
    """Return a suffix about the ranks' values if their mean (empty), or their sum, is the expected value; else None."""
    found = total(case.everywhere)
    if same(found, wide(case.wanted) * case.world_size):
        return ""
    return " divided by the world size" if same(found, wide(case.wanted)) else None


def _part_of_its_own(case: WrongValue) -> str:
    """Return the range of elements in which some rank has a value of its own; empty if it is the whole tensor."""
    own = torch.stack([~equal_values(wide(case.wanted), wide(got)) for got in case.everywhere.values()]).any(0)
    places = own.reshape(-1).nonzero().reshape(-1)
    return "" if len(places) == own.numel() else f"element(s) {int(places[0])} to {int(places[-1])} of the flat value"


def _reduced(case: WrongValue) -> str:
    wanted = case.wanted_everywhere
    if case.world_size < 2 or len(wanted) < case.world_size or all_alike(wanted):
        return ""
    if same(total(wanted), wide(case.got) * case.world_size):
        return "the mean over the ranks, where every rank must keep its own"
    return "the sum over the ranks, where every rank must keep its own" if same(total(wanted), wide(case.got)) else ""


def _all_zero(case: WrongValue) -> str:
    return "zeros: no value was ever written" if is_zero(case.got) else ""


def _factor(case: WrongValue) -> float | None:
    return _times(case.wanted, case.got)


def _times(one: Tensor, other: Tensor) -> float | None:
    """Return the finite factor between all elements of both; None if there is none."""
    if one.numel() == 0 or is_zero(one):
        return None
    wanted, got = (torch.view_as_real(each) if each.is_complex() else each for each in map(wide, (one, other)))
    largest = wanted.abs().argmax()
    factor = (got.reshape(-1)[largest] / wanted.reshape(-1)[largest]).item()
    return factor if math.isfinite(factor) and same(wanted * factor, got) else None


#: With so many ranks an undivided sum equals a gradient that was counted twice.
_AMBIGUOUS = 2


def _never_divided(case: WrongValue) -> str:
    if _factor(case) != case.world_size or case.world_size < 2 or any(case.others_of_its_step):
        return ""
    twice = ", or counted twice: 2 ranks do not tell" if case.world_size == _AMBIGUOUS else ""
    return f"the sum over the ranks (expected * {case.world_size}), never divided by the world size{twice}"


def _conjugated(case: WrongValue) -> str:
    if not case.wanted.is_complex() or not same(wide(case.wanted).conj(), case.got):
        return ""
    return "the complex conjugate of what was expected"


def _divided_by_users(case: WrongValue) -> str:
    factor = _factor(case)
    if not factor or not any(case.others_of_its_step):
        return ""
    users = case.world_size / factor
    if not users.is_integer() or not 1 <= users < case.world_size:
        return ""
    others = "other gradients of the step are right"
    return f"the sum over the ranks divided by {users:g} instead of the world size, {case.world_size}; {others}"


def _divided_twice(case: WrongValue) -> str:
    factor = _factor(case)
    if factor is None or case.world_size < 2 or factor * case.world_size != 1:
        return ""
    return f"expected / {case.world_size}: divided by the world size once too often"


def _scaled(case: WrongValue) -> str:
    factor = _factor(case)
    if not factor or (case.wanted.numel() == 1 and factor % 1 and (1 / factor) % 1):
        return ""  # any number is some multiple of another
    if factor < 0 and not _order_is_distinctive(case.wanted):
        return ""  # two small numbers of opposite signs
    return f"every element is {factor:g} times what was expected"


def _misrouted(case: WrongValue) -> str:
    for rank, wanted in case.wanted_everywhere.items():
        if rank != case.rank and same(wanted, case.got):
            return f"what rank {rank} must have: it reached the wrong rank"
    return ""


def _broadcast_unasked(case: WrongValue) -> str:
    wanted, root = case.wanted_everywhere.get(0), case.everywhere.get(0)
    if not _is_state(case.name) or case.rank == 0 or wanted is None or root is None or same(wanted, case.wanted):
        return ""
    return "rank 0's, where the rank must keep its own" if same(root, wanted) and same(root, case.got) else ""


#: Parts of the names of facts about state that rank 0 broadcasts; `seen` are buffers as forward found them.
_STATE = ("parameter", "buffer", "seen")


def _is_state(name: str) -> bool:
    return any(part in _STATE for part in re.split("[/ ]", name))


def _not_broadcast(case: WrongValue) -> str:
    root, roots_wanted = case.everywhere.get(0), case.wanted_everywhere.get(0)
    if case.rank == 0 or not _is_state(case.name) or root is None or roots_wanted is None:
        return ""
    if not same(root, roots_wanted):
        return ""
    if same(root, case.wanted):
        return "the rank's own value: rank 0 has the expected one, and it was not broadcast"
    return "right on rank 0 and wrong here, as if rank 0's had not been broadcast"


def _stale(case: WrongValue) -> str:
    for name, wanted in case.other_facts.items():
        if series(name) == series(case.name) and same(wanted, case.got):
            return f"the expected value of {name}: not this step's"
    for name, wanted in case.other_facts.items():
        if _is_state(name) and _leaf(name) == _leaf(case.name) and same(wanted, case.got):
            return f"the expected value of {name}: another moment's"
    return ""


def _leaf(name: str) -> str:
    return name.rpartition("/")[2]


def _not_cleared(case: WrongValue) -> str:
    for name, wanted in case.other_facts.items():
        if series(name) == series(case.name) and same(wide(case.wanted) + wide(wanted), wide(case.got)):
            return f"the expected value with that of {name} added: not cleared in between"
    return ""


def _mixed_up(case: WrongValue) -> str:
    for name, wanted in case.other_facts.items():
        if case.got.numel() > 1 and _leaf(name) != _leaf(case.name) and same(wanted, case.got):
            return f"the expected value of {name}: the two are mixed up"
    return ""


def _reordered(case: WrongValue) -> str:
    wanted, got = case.wanted.reshape(-1), case.got.reshape(-1)
    if got.is_complex() or not _order_is_distinctive(got) or not same(wanted.sort().values, got.sort().values):
        return ""
    return "the expected values in another order: a wrong offset, or wrong strides"


def _astray(case: WrongValue) -> str:
    if not _is_loss_curve(case):
        return ""
    first = int((~equal_values(case.wanted, case.got)).nonzero()[0])
    return f"right in the first {first} of {case.got.numel()} batches, and those of another training from there on"


def _is_loss_curve(case: WrongValue) -> bool:
    """Whether the value is a number per batch of a training, where a wrong one makes all later ones wrong."""
    return case.name.rpartition("/")[2] == "loss" and case.got.dim() == 1 and case.got.numel() > 1


def _partly_wrong(case: WrongValue) -> str:
    if _is_loss_curve(case):
        return ""
    wanted, got = case.wanted.reshape(-1), case.got.reshape(-1)
    places = (~equal_values(wanted, got)).nonzero().reshape(-1)
    first, last = int(places[0]), int(places[-1])
    if len(places) == got.numel():
        return ""
    if last - first + 1 != len(places):
        return _scattered(wanted[places], got[places], f"{len(places)} of {got.numel()} elements")
    if len(places) == 1 and 0 < last < got.numel() - 1:
        return ""  # one element in the middle is no part
    part = f"element(s) {first} to {last} of the flat value"
    return f"zeros in {part}, the rest is right" if is_zero(got[places]) else f"wrong in {part} only"


def _scattered(wanted: Tensor, got: Tensor, where: str) -> str:
    """Return a property that all scattered wrong elements share; empty if there is none."""
    if is_zero(got):
        return f"zeros in {where}, the rest is right"
    factor = _times(wanted, got)
    return f"{factor:g} times what was expected in {where}, the rest is right" if factor else ""


def _sign_lost(case: WrongValue) -> str:
    return "the sign of a zero differs" if torch.equal(wide(case.wanted), wide(case.got)) else ""


def _rounded(case: WrongValue) -> str:
    if not case.got.is_floating_point() and not case.got.is_complex():
        return ""
    gap, precision = _gap(case), torch.finfo(case.got.dtype).eps
    return f"off by rounding only: {gap:.2g} of the largest value" if gap <= 4 * precision else ""


def _rounded_to_half(case: WrongValue) -> str:
    if not case.got.is_floating_point() and not case.got.is_complex():
        return ""
    gap, precision = _gap(case), torch.finfo(case.got.dtype).eps
    wrong = case.got[~equal_values(case.wanted, case.got)]
    parts = torch.view_as_real(wrong) if wrong.is_complex() else wrong
    for dtype in (torch.float16, torch.bfloat16):
        if gap <= torch.finfo(dtype).eps > precision and same(parts, parts.to(dtype)):
            name = str(dtype).removeprefix("torch.")
            return f"off by {gap:.2g} of the largest value, what rounding to {name} would do"
    return ""


def _gap(case: WrongValue) -> float:
    wanted, got = wide(case.wanted), wide(case.got)
    return (wanted - got).abs().max().item() / max(wanted.abs().max().item(), torch.finfo(torch.float64).tiny)


#: Rules about values of another dtype or shape.
OF_ANOTHER_KIND = (Rule("wrong-dtype", 1, _wrong_dtype), Rule("wrong-shape", 2, _wrong_shape))
OF_THE_SAME_KIND = (
    Rule("not-finite", 0, _not_finite),
    Rule("no-sync-left-out", 0, _no_sync_left_out),
    Rule("earlier-lost", 0, _earlier_lost),
    Rule("never-reduced", 1, _never_reduced),
    Rule("left-out", 1, _left_out),
    Rule("broadcast-unasked", 1, _broadcast_unasked),
    Rule("reduced-not-used", 1, _reduced_and_not_used),
    Rule("reduced-local", 1, _reduced),
    Rule("sign-of-zero", 1, _sign_lost),
    Rule("off-by-rounding", 2, _rounded),
    Rule("zeros", 2, _all_zero),
    Rule("wrong-rank", 2, _misrouted),
    Rule("never-divided", 3, _never_divided),
    Rule("conjugated", 3, _conjugated),
    Rule("divided-by-users", 3, _divided_by_users),
    Rule("divided-twice", 3, _divided_twice),
    Rule("stale", 3, _stale),
    Rule("not-cleared", 3, _not_cleared),
    Rule("transposed", 3, _transposed),
    Rule("not-broadcast", 3, _not_broadcast),
    Rule("mixed-up", 4, _mixed_up),
    Rule("reordered", 4, _reordered),
    Rule("scaled", 5, _scaled),
    Rule("low-precision", 5, _rounded_to_half),
    Rule("goes-astray", 5, _astray),
    Rule("part", 6, _partly_wrong),
)
