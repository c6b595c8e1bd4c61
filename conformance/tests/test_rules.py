"""The rules of diagnosis against each other: each names its true cause, and not a neighbour that looks like it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from conformance.checkers.diagnosis import diagnose
from conformance.checkers.rules import OF_ANOTHER_KIND, OF_THE_SAME_KIND
from conformance.observation import Facts
from conformance.report.causes import causes_in
from conformance.run.outcome import Outcome
from conformance.tests.reports_by_hand import scenario
from conformance.verdict import Finding, ScenarioResult, Verdict, deciding

MEAN = torch.tensor([[2.0, 4.0], [8.0, -6.0]])
OWN = (MEAN + 1, MEAN - 1)
OTHER = "step1/grad/other"
#: What a backward under `no_sync` leaves on each rank, and the mean of the backward after it.
LEFT = (torch.tensor([[8.0, 2.0], [6.0, 4.0]]), torch.tensor([[0.0, 12.0], [2.0, -6.0]]))
LAST = torch.tensor([[4.0, 2.0], [6.0, 2.0]])
ACCUMULATED = (LEFT[0] + LEFT[1]) / 2 + LAST
UNDER_NO_SYNC = ({"step1/local0/grad/w": LEFT[0]}, {"step1/local0/grad/w": LEFT[1]})
COMPLEX = torch.complex(MEAN, MEAN + 3)
FINE = MEAN + torch.tensor([[2.0, 3.0], [5.0, 7.0]]) * 2**-12
STEPS: Facts = {"step0/grad/w": MEAN * 5 + 1}
COURSE = torch.tensor([3.0, 2.5, 2.25, 2.0], dtype=torch.float64)


@dataclass(frozen=True)
class Case:
    """One value that all ranks want, or each its own, and what came; `wrong` is the rank that is asked about."""

    wanted: Any
    came: tuple[Any, ...]
    name: str = "step1/grad/w"
    more: Facts | tuple[Facts, ...] = field(default_factory=dict)  # that is as expected
    wrong_others: Facts = field(default_factory=dict)  # expected; zeros came
    reduced: Mapping[int, int] | None = None
    wrong: int = 1

    @property
    def mistake(self) -> str:
        size = len(self.came)
        wanted = self.wanted if isinstance(self.wanted, tuple) else (self.wanted,) * size
        more = self.more if isinstance(self.more, tuple) else (self.more,) * size
        expected = {rank: {**more[rank], **self.wrong_others, self.name: wanted[rank]} for rank in range(size)}
        zeros = {name: value * 0 for name, value in self.wrong_others.items()}
        observed = {rank: {**more[rank], **zeros, self.name: self.came[rank]} for rank in range(size)}
        return diagnose(self.name, self.wrong, expected, observed, self.reduced).mistake


def everywhere(came: Tensor, wanted: Tensor = MEAN, **rest: Any) -> Case:
    """Return a case in which the same comes to both ranks."""
    return Case(wanted, (came, came), **rest)


def in_part(value: float) -> Tensor:
    """Return the mean with the last two elements replaced."""
    came = MEAN.clone()
    came[1] = value
    return came


SUM = everywhere(MEAN * 2)
NOT_USED = Case(MEAN, OWN, reduced={1: 8}, wrong_others={OTHER: MEAN})
LEFT_OUT = Case(MEAN, OWN, reduced={1: 8}, more={OTHER: MEAN})
LOST = everywhere(LAST, ACCUMULATED, more=UNDER_NO_SYNC)
SWAPPED = Case(OWN, (OWN[1], OWN[0]))
BY_USERS = everywhere(MEAN * 2, more={OTHER: MEAN})
STALE = everywhere(MEAN * 5 + 1, more=STEPS)
NOT_CLEARED = everywhere(MEAN * 6 + 1, more=STEPS)
ROUNDED = everywhere(MEAN * (1 + 2**-23))
TRANSPOSED, REORDERED = everywhere(MEAN.t()), everywhere(MEAN.flip(0))
ASTRAY = everywhere(COURSE + torch.tensor([0, 0, 1.0, 0.5]), COURSE, name="epoch0/loss")

#: A rule, a case of which it tells the cause, and a neighbour with what that is instead.
TABLE = [
    ("wrong-dtype", everywhere(MEAN.double()), SUM, "never-divided"),
    ("wrong-shape", everywhere(MEAN.reshape(4)), TRANSPOSED, "transposed"),
    ("not-finite", everywhere(MEAN / 0), everywhere(MEAN * 0), "zeros"),
    ("no-sync-left-out", Case(ACCUMULATED, (LEFT[0] + LAST, LEFT[1] + LAST), more=UNDER_NO_SYNC), LOST, "earlier-lost"),
    ("earlier-lost", LOST, everywhere(ACCUMULATED * 2, ACCUMULATED, more=UNDER_NO_SYNC), "never-divided"),
    ("never-reduced", Case(MEAN, OWN), NOT_USED, "reduced-not-used"),
    ("left-out", LEFT_OUT, NOT_USED, "reduced-not-used"),
    ("reduced-not-used", NOT_USED, LEFT_OUT, "left-out"),
    ("broadcast-unasked", Case(OWN, (OWN[0], OWN[0]), name="start/buffer"), Case(OWN, (OWN[0], OWN[0])), "wrong-rank"),
    ("reduced-local", Case(OWN, (MEAN, MEAN)), SWAPPED, "wrong-rank"),
    ("sign-of-zero", everywhere(-MEAN * 0, MEAN * 0), ROUNDED, "off-by-rounding"),
    ("off-by-rounding", ROUNDED, everywhere(FINE.half().float(), FINE), "low-precision"),
    ("zeros", everywhere(MEAN * 0), everywhere(in_part(0.0)), "part"),
    ("wrong-rank", SWAPPED, Case(OWN, (MEAN, MEAN)), "reduced-local"),
    ("never-divided", SUM, BY_USERS, "divided-by-users"),
    ("conjugated", everywhere(COMPLEX.conj().resolve_conj(), COMPLEX), everywhere(-COMPLEX, COMPLEX), "scaled"),
    ("divided-by-users", BY_USERS, SUM, "never-divided"),
    ("divided-twice", everywhere(MEAN / 2), everywhere(MEAN / 4), "scaled"),
    ("stale", STALE, NOT_CLEARED, "not-cleared"),
    ("not-cleared", NOT_CLEARED, STALE, "stale"),
    ("transposed", TRANSPOSED, everywhere(torch.eye(2).flip(0)[:, :1] @ torch.ones(1, 2)), ""),
    ("not-broadcast", Case(MEAN, (MEAN, MEAN * 3 + 1), name="start/parameter"), Case(MEAN, (MEAN, MEAN * 3 + 1)), ""),
    ("mixed-up", everywhere(MEAN * 5 + 1, more={OTHER: MEAN * 5 + 1}), STALE, "stale"),
    ("reordered", REORDERED, TRANSPOSED, "transposed"),
    ("scaled", everywhere(MEAN * 7), SUM, "never-divided"),
    ("low-precision", everywhere(FINE.half().float(), FINE), ROUNDED, "off-by-rounding"),
    ("goes-astray", ASTRAY, everywhere(in_part(5.0)), "part"),
    ("part", everywhere(in_part(5.0)), ASTRAY, "goes-astray"),
]


@pytest.mark.parametrize(("rule", "case", "neighbour", "instead"), TABLE, ids=[row[0] for row in TABLE])
def test_a_rule_names_its_cause_and_no_neighbour(rule: str, case: Case, neighbour: Case, instead: str) -> None:
    assert case.mistake == rule
    assert neighbour.mistake == instead


def test_every_rule_is_in_the_table() -> None:
    assert sorted(row[0] for row in TABLE) == sorted(rule.name for rule in (*OF_ANOTHER_KIND, *OF_THE_SAME_KIND))


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.complex64])
def test_flags_that_look_transposed_are_not_put_down_to_strides(dtype: torch.dtype) -> None:
    flags = torch.tensor([[0, 1], [0, 0]]).to(dtype)
    assert everywhere(flags.t(), flags).mistake not in ("transposed", "reordered")


@pytest.mark.parametrize(("numel", "told"), [(7, "; 7 of 8 elements were reduced"), (8, ""), (16, "")])
def test_a_reduction_of_too_few_elements_is_told(numel: int, told: str) -> None:
    """No rank holds the mean: whether everything was sent is another question."""
    expected: dict[int, Facts] = {rank: {"step1/grad/w": MEAN, OTHER: MEAN} for rank in range(2)}
    observed: dict[int, Facts] = {rank: {"step1/grad/w": OWN[rank], OTHER: OWN[rank]} for rank in range(2)}
    found = diagnose(OTHER, 0, expected, observed, {1: numel})
    assert found.clause.endswith(f"no rank holds it{told}")


@pytest.mark.parametrize(
    ("wanted", "came", "clause"),
    [
        (2, 4, "4 in place of 2: 2 times as many"),
        (1, 2, "2 in place of 1: 2 times as many"),
        (1, 3, ""),  # any number is a multiple of 1
        (2, 3, ""),
        (0, 2, ""),
        (4, 2, ""),
        (True, 2, ""),
    ],
)
def test_a_count_that_is_a_multiple_is_recognised(wanted: int, came: int, clause: str) -> None:
    assert diagnose("calls", 0, {0: {"calls": wanted}}, {0: {"calls": came}}).clause == clause


def failed_because(id_: str, *findings: Finding) -> Outcome:
    """Return what a scenario comes to with these findings."""
    return Outcome.of(scenario(id_), ScenarioResult("ddp", Verdict.FAIL, 1.0, 3, findings, ()))


def test_a_diverging_training_is_reported_after_its_possible_causes() -> None:
    """What spoils one step spoils all that follow: a cause that nobody recognised comes before that."""
    astray = failed_because(
        "training/TRAIN-04/a-world2",
        Finding("facts", Verdict.FAIL, "epoch0/loss on rank 0: right at first", mistake="goes-astray"),
    )
    differ = failed_because("gradients/GRAD-02/b-world2", Finding("facts", Verdict.FAIL, "agrees on rank 0 is False"))
    statements = {"GRAD-02": "Ranks MUST agree.", "TRAIN-04": "A network MUST learn."}
    assert [cause.best for cause in causes_in((astray, differ), statements)] == [differ, astray]


def test_an_unawaited_collective_is_reported_before_its_wrong_values() -> None:
    wrong = Finding("facts", Verdict.FAIL, "w on rank 0: wrong in element(s) 0 to 1", "A", mistake="part")
    flying = Finding("nothing_in_flight", Verdict.FAIL, "nobody waited for 1 collective(s)", "B")
    died = Finding("no_crash", Verdict.CRASH, "rank 1 died", "C")
    assert deciding(Verdict.FAIL, (wrong, flying)) == (flying, wrong)
    assert deciding(Verdict.CRASH, (wrong, flying, died))[0] == died
