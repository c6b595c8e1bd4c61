"""Facts against expectations, and what a wrong value is recognised as."""

from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

from conformance.checkers.diagnosis import diagnose
from conformance.checkers.facts import reduced_steps, wrong_facts
from conformance.checkers.mistakes import MISTAKES
from conformance.checkers.registry import get_checker
from conformance.checkers.rules import OF_ANOTHER_KIND, OF_THE_SAME_KIND
from conformance.observation import Facts, Raised, Unmeasured
from conformance.tests.evidence_by_hand import collective, ended, evidence_of, raised, returned
from conformance.truth.expected import AnyOf, Anything, Close, Raises, Right, Satisfies
from conformance.verdict import Finding, Verdict

MEAN = torch.tensor([[2.0, 4.0], [8.0, -6.0]])
NAME = "step1/grad/fc.weight"


def _check(expected: dict[int, Facts], *observed: Facts) -> Finding:
    observations = [returned(rank, facts=facts) for rank, facts in enumerate(observed)]
    finding = get_checker("facts")(evidence_of(*observations, expected=expected))
    assert finding is not None
    return finding


def _diagnose(wanted: Any, *came: Any, name: str = NAME, rank: int = 0, others: Facts | None = None) -> str:
    """Return the diagnosis on `rank` when all ranks want the same and observe `came`, one value per rank."""
    expected = {number: {name: wanted, **(others or {})} for number in range(len(came))}
    return diagnose(name, rank, expected, {number: {name: value} for number, value in enumerate(came)}).clause


def test_passes_when_every_fact_is_as_expected() -> None:
    expected: Facts = {NAME: MEAN, "construct": None, "any": Anything()}
    observed: Facts = {NAME: MEAN.clone(), "construct": None, "any": 3, "not judged": 4}
    assert _check({0: expected, 1: expected}, observed, observed).verdict is Verdict.PASS


@given(st.sets(st.tuples(st.sampled_from("abcd"), st.integers(0, 2)), min_size=1))
def test_finds_exactly_the_wrong_facts(wrong: set[tuple[str, int]]) -> None:
    expected = {rank: dict.fromkeys("abcd", 1) for rank in range(3)}
    observed = {rank: {name: 2 if (name, rank) in wrong else 1 for name in "abcd"} for rank in range(3)}
    found = wrong_facts(expected, observed)
    assert [(fact.name, fact.rank) for fact in found] == sorted(wrong)


def test_an_expected_fact_that_was_not_observed_is_wrong() -> None:
    finding = _check({0: {NAME: None}, 1: {NAME: None}}, {NAME: None}, {})
    assert (finding.verdict, finding.summary) == (Verdict.FAIL, f"{NAME} on rank 1 was not observed")


def test_what_could_not_be_measured_is_unknown_unless_another_fact_is_wrong() -> None:
    facts: Facts = {"elements": 4, "buckets": [4], NAME: MEAN}
    unmeasured = Unmeasured("this DDP moves gradients by send")
    observed: Facts = {**facts, "elements": unmeasured, "buckets": unmeasured}
    finding = _check({0: facts, 1: facts}, facts, observed)
    why = "elements and 1 more fact(s) could not be measured: this DDP moves gradients by send"
    assert (finding.verdict, finding.summary) == (Verdict.UNKNOWN, why)
    finding = _check({0: facts, 1: facts}, {**facts, "buckets": []}, observed)
    assert (finding.verdict, finding.summary[:15]) == (Verdict.FAIL, "buckets on rank")
    assert _check({0: {NAME: MEAN}, 1: {NAME: MEAN}}, facts, observed).verdict is Verdict.PASS


def test_unknown_when_a_rank_did_not_report() -> None:
    finding = get_checker("facts")(evidence_of(returned(0), ended(1, "hung"), expected={0: {"a": 1}, 1: {"a": 1}}))
    assert finding is not None
    assert finding.verdict is Verdict.UNKNOWN


def test_what_a_rank_could_not_observe_because_it_raised_is_no_finding_of_its_own() -> None:
    expected: dict[int, Facts] = {0: {"loss": 1.0, "grad": 2.0}, 1: {"loss": 1.0, "grad": 2.0}}
    check = get_checker("facts")
    early = raised(0, ValueError("no"), facts={"loss": 1.0})
    finding = check(evidence_of(early, raised(1, ValueError("no")), expected=expected))
    assert finding is not None
    assert (finding.verdict, finding.summary) == (
        Verdict.UNKNOWN, "ranks 0 and 1 raised before 3 of the facts could be observed"
    )  # fmt: skip
    for other in (returned(1), raised(1, ValueError("no"), facts={"loss": 3.0})):
        finding = check(evidence_of(early, other, expected=expected))
        assert finding is not None
        assert finding.verdict is Verdict.FAIL


def test_does_not_apply_without_an_expectation() -> None:
    assert get_checker("facts")(evidence_of(returned(0), returned(1))) is None


@pytest.mark.parametrize("expected", [{0: {}, 1: {}}, {0: {"done": True}}])
def test_an_expectation_that_demands_nothing_is_our_fault(expected: dict[int, Facts]) -> None:
    finding = get_checker("facts")(evidence_of(returned(0), returned(1), expected=expected))
    assert finding is not None
    assert finding.verdict is Verdict.HARNESS_ERROR


A, B = MEAN + 1, MEAN - 1  # two ranks' local values: their mean is MEAN

SUMMED = "the sum over the ranks (expected * 2), never divided by the world size, or counted twice: 2 ranks do not tell"

DIAGNOSES = [
    ((MEAN, MEAN * 2, MEAN * 2), SUMMED),
    ((MEAN, MEAN / 2, MEAN / 2), "expected / 2: divided by the world size once too often"),
    ((MEAN, MEAN * 3, MEAN * 3), "every element is 3 times what was expected"),
    ((MEAN, -MEAN, -MEAN), "every element is -1 times what was expected"),
    ((torch.tensor([1.0, -1.0]), torch.tensor([-1.0, 1.0]), None), ""),  # perhaps others, in another order
    ((MEAN, A, B), "the rank's own local value, not averaged (the mean over the ranks is what was expected)"),
    ((MEAN, A / 2, B / 2), "the rank's own local value divided by the world size, but never reduced"),
    ((MEAN, MEAN * 0, MEAN * 0), "zeros: no value was ever written"),
    ((None, MEAN * 0, MEAN * 0), "zeros where None was expected: an absent gradient was filled in"),
    ((None, MEAN, MEAN), "a value where None was expected"),
    ((MEAN, None, None), "None where a value was expected: nothing ever arrived"),
    ((None, Raised.of(ValueError("x")), None), "an exception where there must be none"),
    ((MEAN, Raised.of(ValueError("x")), None), "an exception instead of a value"),
    ((MEAN, MEAN.t(), MEAN.t()), "the expected values transposed: wrong strides"),
    ((MEAN, MEAN.flip(0), MEAN.flip(0)), "the expected values in another order: a wrong offset, or wrong strides"),
    ((MEAN, MEAN.double(), MEAN.double()), "the right values in another dtype"),
    ((MEAN + 2**-12, MEAN.half(), MEAN.half()), "the expected values rounded to this dtype"),
    ((MEAN, MEAN.reshape(4), MEAN.reshape(4)), "the right values in another shape"),
    ((MEAN, MEAN / 0, MEAN / 0), "an overflow to infinity in 4 place(s) that must be finite"),
    ((MEAN, MEAN * float("nan"), MEAN), "not-a-number in 4 place(s) that must be finite"),
    ((MEAN, MEAN * (1 + 2**-23), MEAN), "off by rounding only: 1.2e-07 of the largest value"),
    ((2.0, 4.0, 4.0), SUMMED),
    ((2.0, 2.5, 2.5), ""),  # any number is some multiple of another
    ((MEAN.to(torch.complex64), MEAN.to(torch.complex64) * 2, MEAN.to(torch.complex64) * 2),
     SUMMED),
    ((MEAN.to_sparse(), (MEAN * 2).to_sparse(), (MEAN * 2).to_sparse()),
     SUMMED),
    (("a", "b", "b"), ""),
    ((Raises(), MEAN, MEAN), "nothing was raised"),
    ((Satisfies("small", bool), MEAN, MEAN), ""),
    ((Close(MEAN, 0.0, 0.0, "why"), MEAN * 2, MEAN * 2),
     SUMMED),
]  # fmt: skip


@pytest.mark.parametrize(("values", "diagnosis"), DIAGNOSES)
def test_recognises(values: tuple[Any, ...], diagnosis: str) -> None:
    assert _diagnose(*values) == diagnosis


LEFT = {0: torch.tensor([[8.0, 2.0], [6.0, 4.0]]), 1: torch.tensor([[0.0, 12.0], [2.0, -6.0]])}
LAST = {0: torch.tensor([[1.0, 3.0], [9.0, 5.0]]), 1: torch.tensor([[7.0, 1.0], [3.0, -1.0]])}
TWICE = tuple((LEFT[rank] + LAST[rank]) for rank in range(2))
MEAN_OF_LAST = (LAST[0] + LAST[1]) / 2
ACCUMULATED = (LEFT[0] + LEFT[1]) / 2 + MEAN_OF_LAST


def _mistake(came: tuple[Tensor, Tensor], *, reduced: bool, before: str, name: str) -> str:
    """Return what gradients are recognised as after one backward under `no_sync` and one that synchronises."""
    expected: dict[int, Facts] = {rank: {before: LEFT[rank], name: ACCUMULATED} for rank in range(2)}
    observed: dict[int, Facts] = {rank: {before: LEFT[rank], name: came[rank]} for rank in range(2)}
    steps = {1: 8} if reduced else {}
    (found,) = {diagnose(name, rank, expected, observed, steps).mistake for rank in range(2)}
    return found


@pytest.mark.parametrize(
    ("came", "reduced", "mistake"),
    [
        ((LEFT[0] + MEAN_OF_LAST, LEFT[1] + MEAN_OF_LAST), True, "no-sync-left-out"),
        ((LEFT[0] + MEAN_OF_LAST * 2, LEFT[1] + MEAN_OF_LAST * 2), True, "no-sync-left-out"),
        (TWICE, False, "never-reduced"),
        (TWICE, True, "reduced-not-used"),
        ((ACCUMULATED * 2, ACCUMULATED * 2), True, "never-divided"),
        ((MEAN_OF_LAST, MEAN_OF_LAST), True, "earlier-lost"),
    ],
)
def test_gradients_of_no_sync_differ_from_unreduced_ones(
    came: tuple[Tensor, Tensor], reduced: bool, mistake: str
) -> None:
    for before, name in (("local0/", ""), ("micro0/", "micro1/")):
        names = {"before": f"step1/{before}grad/fc.weight", "name": f"step1/{name}grad/fc.weight"}
        assert _mistake(came, reduced=reduced, **names) == mistake


def test_an_agreement_in_backward_is_no_reduction_of_gradients() -> None:
    used = collective(dtypes=("int32",))
    for history, steps in (((used,), {}), ((used, collective(1)), {0: 4})):
        assert reduced_steps(evidence_of(returned(0, history), returned(1, history))) == steps


def test_an_average_over_those_who_used_a_parameter_is_not_taken_for_a_sum() -> None:
    """Where the other gradients of the step are right, a divisor is wrong for this parameter alone."""
    other = "step1/grad/fc2.weight"
    for right, clause in (
        (
            True,
            "the sum over the ranks divided by 1 instead of the world size, 2; other gradients of the step are right",
        ),
        (False, SUMMED),
    ):
        expected: dict[int, Facts] = {rank: {NAME: MEAN, other: MEAN + 1} for rank in range(2)}
        came = {NAME: MEAN * 2, other: (MEAN + 1) * (1 if right else 2)}
        assert diagnose(NAME, 0, expected, dict.fromkeys(range(2), came)).clause == clause


def test_the_only_value_that_nobody_else_got_is_not_taken_for_an_average_over_one_rank() -> None:
    """An average over those who used a parameter comes to every rank."""
    other = "step1/grad/fc2.weight"
    expected: dict[int, Facts] = {rank: {NAME: MEAN, other: MEAN + 1} for rank in range(2)}
    observed: dict[int, Facts] = {0: {NAME: MEAN * 2, other: MEAN + 1}, 1: {NAME: None, other: MEAN + 1}}
    found = diagnose(NAME, 0, expected, observed)
    assert found.mistake == "left-out"
    assert "not averaged: the other ranks have none" in found.clause


def test_a_complex_sum_is_recognised_where_dividing_it_would_round() -> None:
    wanted = torch.tensor(94781825835342 + 4331513467446j, dtype=torch.complex128)
    assert _diagnose(wanted, wanted * 2, wanted * 2) == SUMMED


@pytest.mark.parametrize("kind", [dict, AnyOf])
def test_a_value_within_a_fact_is_recognised_there(kind: type) -> None:
    """Of a mapping or a sequence, also where it is one of several that are allowed."""
    gradient = torch.tensor([3.0, 5.0, 7.0])
    wanted: Any = {"loss": 1.0, "step1/grad/w": [gradient]}
    if kind is AnyOf:
        wanted = AnyOf(wanted, Raises(("RuntimeError",)))
    came = {"loss": 1.0, "step1/grad/w": [gradient * 2]}
    assert _diagnose(wanted, came, came, name="outcome") == f"at 'step1/grad/w' at 'position 0' {SUMMED}"
    assert _diagnose(AnyOf(Raises(("ValueError",)), Raises(("TypeError",))), None, None) == "nothing was raised"


def test_a_mistake_of_some_parameters_differs_from_one_of_all() -> None:
    """A reduction ran: for the others, or for all but a part."""
    other, whole = "step1/grad/fc2.weight", torch.tensor([2.0, 4.0, 8.0, -6.0])
    own = {rank: whole + torch.tensor([0.0, 0.0, 0.0, 1.0]) * (1 - 2 * rank) for rank in range(2)}
    for came, of_others, mistake, clause in (
        ({0: whole + 1, 1: whole - 1}, 1, "left-out", "not averaged; other gradients of the step are right"),
        (own, 1, "left-out", "not averaged, in element(s) 3 to 3 of the flat value; the rest is right"),
        (own, 0, "reduced-not-used", "in element(s) 3 to 3 of the flat value, although its backward reduced"),
    ):
        expected: dict[int, Facts] = {rank: {NAME: whole, other: whole} for rank in range(2)}
        observed: dict[int, Facts] = {rank: {NAME: came[rank], other: whole * of_others} for rank in range(2)}
        found = diagnose(NAME, 0, expected, observed, {1: 8})
        assert found.mistake == mistake
        assert clause in found.clause


def test_a_broadcast_that_nobody_asked_for_is_no_value_that_came_to_the_wrong_rank() -> None:
    name = "step0/seen/table"
    expected: dict[int, Facts] = {0: {name: A}, 1: {name: B}}
    assert diagnose(name, 1, expected, {0: {name: A}, 1: {name: A}}).mistake == "broadcast-unasked"
    swapped: dict[int, Facts] = {0: {name: B}, 1: {name: A}}
    assert diagnose(name, 1, expected, swapped).mistake == "wrong-rank"


def test_a_missing_message_differs_from_a_missing_refusal() -> None:
    for came, mistake in (([], "says-nothing"), (None, "says-nothing"), (["a warning"], "")):
        expected: dict[int, Facts] = {0: {NAME: Satisfies("one warning, which names 'w'", bool)}}
        assert diagnose(NAME, 0, expected, {0: {NAME: came}}).mistake == mistake


def test_kinds_of_values_are_recognised_whatever_the_numbers() -> None:
    assert _diagnose(MEAN, MEAN.double() + 1, MEAN) == "other values in another dtype"
    assert _diagnose("float32", "float16", "float16") == "float16, where float32 must be"
    assert _diagnose(MEAN, MEAN[0], MEAN[0]) == "of shape (2,), where (2, 2) must be"
    assert _diagnose(MEAN.to_sparse(), MEAN, MEAN) == "the right values, strided where they must be sparse_coo"


def test_one_element_in_the_middle_is_no_part() -> None:
    wanted = torch.tensor([3.0, 5.0, 7.0, 11.0])
    for place, clause in ((1, ""), (3, "wrong in element(s) 3 to 3 of the flat value only")):
        came = wanted.clone()
        came[place] = 99
        assert _diagnose(wanted, came, came) == clause


def test_flags_in_another_order_are_not_put_down_to_strides() -> None:
    wanted = torch.tensor([True, False, False, True])
    came = torch.tensor([False, True, False, True])
    assert "strides" not in _diagnose(wanted, came, came, name="step0/seen/mask")


def test_two_rules_that_explain_as_well_are_both_kept_silent() -> None:
    """Twice the value: the ranks' sum, or the same step's value added to what was not cleared."""
    same_data = {"step0/grad/fc.weight": MEAN}
    assert _diagnose(MEAN, MEAN * 2, MEAN * 2, others=same_data) == ""
    assert _diagnose(MEAN, MEAN * 2, MEAN * 2).startswith("the sum over the ranks")


def test_the_evidence_shown_is_of_the_fact_that_was_recognised() -> None:
    wanted = torch.tensor([3.0, 5.0, 7.0])
    expected: dict[int, Facts] = {rank: {"num_collectives": 1, NAME: wanted} for rank in range(2)}
    found = _check(expected, *({"num_collectives": 4, NAME: wanted * 2} for _ in range(2)))
    assert found.mistake == "never-divided"
    assert found.summary.startswith(NAME)
    assert "Also wrong: num_collectives." in found.explanation


def test_a_refusal_that_never_comes_is_a_check_that_is_lacking() -> None:
    found = diagnose(NAME, 0, {0: {NAME: Raises()}}, {0: {NAME: None}})
    assert (found.mistake, found.clause) == ("lacks-check", "nothing was raised")


def test_every_mistake_has_a_sentence_and_a_remedy() -> None:
    names = [rule.name for rule in (*OF_ANOTHER_KIND, *OF_THE_SAME_KIND)]
    assert len(set(names)) == len(names)
    assert set(names) < set(MISTAKES)
    assert all(one.title.endswith(".") and one.remedy.endswith(".") for one in MISTAKES.values())


def test_recognises_a_part_that_was_never_written() -> None:
    came = torch.arange(1.0, 9.0)
    came[2:5] = 0
    wanted = torch.arange(1.0, 9.0)
    assert _diagnose(wanted, came, came) == "zeros in element(s) 2 to 4 of the flat value, the rest is right"
    came = torch.where(came == 0, 77, came)
    assert _diagnose(wanted, came, came) == "wrong in element(s) 2 to 4 of the flat value only"


def test_recognises_low_precision() -> None:
    wanted = torch.tensor([1.0, 1.0 + 2**-9, 3.0])
    came = wanted.bfloat16().float()
    assert _diagnose(wanted, came, came) == "off by 0.00065 of the largest value, what rounding to float16 would do"
    wanted = torch.tensor([1.0 + 2**-8 + 2**-12, 1.5])
    came = wanted.bfloat16().float()
    assert _diagnose(wanted, came, came) == "off by 0.0024 of the largest value, what rounding to bfloat16 would do"
    wanted = torch.tensor([complex(1.0 + 2**-8, 3.0), 1.0, 7.0])
    came = torch.tensor([complex(1.0 + 2**-7, 3.0), 1.0, 7.0])
    assert _diagnose(wanted, came, came) == "off by 0.00056 of the largest value, what rounding to float16 would do"


@pytest.mark.parametrize("off", [2**-12 + 2**-20, 2**-9 + 2**-20])  # as near as float16, as bfloat16 to what it rounds
def test_what_no_low_precision_holds_was_not_rounded_to_one(off: float) -> None:
    """A buffer that forward's own update moved a little, and nobody broadcast, has all its digits."""
    wanted = torch.tensor([1.0, 2.0, 3.0])
    came = wanted + torch.tensor([off, 0.0, off])
    assert _diagnose(wanted, came, came) == ""


def test_recognises_a_buffer_that_was_not_broadcast() -> None:
    name = "step0/buffer/running_mean"
    came = MEAN + torch.tensor([[1.0, 7.0], [0.0, 2.0]])
    expected = "the rank's own value: rank 0 has the expected one, and it was not broadcast"
    assert _diagnose(MEAN, MEAN, came, name=name, rank=1) == expected
    assert _diagnose(MEAN, MEAN, came, name="step0/seen/running_mean", rank=1) == expected
    assert _diagnose(MEAN, MEAN, came, rank=1) == ""
    local: dict[int, Facts] = {0: {name: MEAN}, 1: {name: MEAN + 1}}
    assert diagnose(name, 1, local, {0: {name: MEAN}, 1: {name: came}}).clause == (
        "right on rank 0 and wrong here, as if rank 0's had not been broadcast"
    )


def test_a_buffer_that_is_near_and_right_on_rank_0_was_not_broadcast_rather_than_rounded() -> None:
    name, near = "step0/buffer/running_mean", MEAN + torch.tensor([[0.0, 2**-9], [0.0, 2**-10]])
    local: dict[int, Facts] = {0: {name: MEAN}, 1: {name: MEAN + 1}}
    found = diagnose(name, 1, local, {0: {name: MEAN}, 1: {name: near}}).clause
    assert found == "right on rank 0 and wrong here, as if rank 0's had not been broadcast"


def test_recognises_what_belongs_elsewhere() -> None:
    others = {"step0/grad/fc.weight": MEAN + 7, "step1/grad/fc2.weight": MEAN * MEAN + 1, "step0/loss": 1.0}
    stale = MEAN + 7
    assert _diagnose(MEAN, stale, stale, others=others) == (
        "the expected value of step0/grad/fc.weight: not this step's"
    )
    kept = MEAN + stale
    assert _diagnose(MEAN, kept, kept, others=others) == (
        "the expected value with that of step0/grad/fc.weight added: not cleared in between"
    )
    swapped = MEAN * MEAN + 1
    assert _diagnose(MEAN, swapped, swapped, others=others) == (
        "the expected value of step1/grad/fc2.weight: the two are mixed up"
    )


def test_recognises_a_reduction_where_there_must_be_none() -> None:
    expected: dict[int, Facts] = {0: {NAME: A}, 1: {NAME: B}}
    for factor, word in ((1, "mean"), (2, "sum")):
        observed: dict[int, Facts] = {0: {NAME: MEAN * factor}, 1: {NAME: MEAN * factor}}
        diagnosis = f"the {word} over the ranks, where every rank must keep its own"
        assert diagnose(NAME, 1, expected, observed).clause == diagnosis


def test_recognises_another_ranks_value() -> None:
    expected: dict[int, Facts] = {0: {NAME: A}, 1: {NAME: B}}
    observed: dict[int, Facts] = {0: {NAME: A}, 1: {NAME: A}}
    assert diagnose(NAME, 1, expected, observed).clause == "what rank 0 must have: it reached the wrong rank"


@given(
    st.lists(st.integers(-50, 50).filter(bool), min_size=1, max_size=12),
    st.integers(2, 4),
    st.randoms(use_true_random=False),
)
def test_local_values_are_always_recognised(values: list[int], world_size: int, random: Any) -> None:
    """Whatever distinct whole numbers the ranks hold: if each keeps its own, the diagnosis says so."""
    local = [torch.tensor([float(value * world_size) for value in values]) for _ in range(world_size)]
    shift = random.randint(1, 9)
    local = [value + world_size * shift * rank for rank, value in enumerate(local)]
    mean: Tensor = sum(local[1:], local[0]) / world_size
    assert _diagnose(mean, *local).startswith("the rank's own local value, not averaged")


def test_a_training_that_goes_another_way_is_no_part_of_a_value() -> None:
    wanted = torch.tensor([3.0, 2.5, 2.25, 2.0])
    came = torch.tensor([3.0, 2.5, 2.5, 2.125])
    said = "right in the first 2 of 4 batches, and those of another training from there on"
    assert _diagnose(wanted, came, came, name="epoch0/loss") == said
    assert _diagnose(wanted, came, came) == "wrong in element(s) 2 to 3 of the flat value only"


def test_what_a_whole_step_under_no_sync_left_is_looked_for_as_well() -> None:
    before, name = "step0/grad/fc.weight", "step1/grad/fc.weight"
    left = {0: A, 1: B * 3}
    wanted = (left[0] + left[1]) / 2 + MEAN
    expected: dict[int, Facts] = {rank: {before: left[rank], name: wanted} for rank in (0, 1)}
    observed: dict[int, Facts] = {rank: {before: left[rank], name: left[rank] + MEAN} for rank in (0, 1)}
    assert diagnose(name, 0, expected, observed, {1: 8}).mistake == "no-sync-left-out"


def test_without_a_ddp_each_wrong_fact_has_a_word_that_is_the_same_for_other_values() -> None:
    def judged(first: str, *, without_ddp: bool = True) -> Finding:
        seen = [returned(rank, facts={"all_reduce": first, "broadcast": "raised RuntimeError"}) for rank in (0, 1)]
        evidence = evidence_of(*seen, expected={rank: dict.fromkeys(seen[0].facts, Right()) for rank in (0, 1)})
        finding = get_checker("facts")(replace(evidence, without_ddp=without_ddp))
        assert finding is not None
        return finding

    one, other, unlike = (judged(f"the result: {told}") for told in ("3 of 7 are wrong", "2 of 9 are wrong", "is late"))
    assert one.likeness == other.likeness
    assert one.wrong[1] == "broadcast on ranks 0 and 1 raised RuntimeError"
    assert unlike.likeness.split()[0] != one.likeness.split()[0]
    assert unlike.likeness.split()[1] == one.likeness.split()[1]
    raised = "raised RuntimeError: outputs do not fit"
    assert judged(f"{raised} (/the acme/group.py:31, in <lambda>)").likeness == judged(raised).likeness
    assert judged("it is late", without_ddp=False).wrong == ()
