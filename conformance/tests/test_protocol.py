"""Invariants of the collective history, on hand-made and generated histories."""

from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import assume, given

from conformance.checkers.protocol import is_gradient
from conformance.checkers.registry import get_checker
from conformance.observation import Collective, Raised
from conformance.tests.evidence_by_hand import collective, ended, evidence_of, gradients, raised, returned
from conformance.verdict import Finding, Verdict, deciding

INVARIANTS = (
    "same_collectives", "same_until_refused", "silent_no_sync", "nothing_in_flight",
    "same_number_each_step", "bucket_order", "broadcast_before_forward", "no_broadcast_in_forward",
)  # fmt: skip


def _check(name: str, *histories: tuple[Collective, ...], **scenario: Any) -> Finding:
    observations = [returned(rank, history) for rank, history in enumerate(histories)]
    finding = get_checker(name)(evidence_of(*observations, **scenario))
    assert finding is not None
    return finding


def _numbered(collectives: list[Collective]) -> tuple[Collective, ...]:
    return tuple(replace(one, index=number) for number, one in enumerate(collectives))


COLLECTIVES = st.builds(
    collective,
    numel=st.integers(0, 9),
    op=st.sampled_from(["all_reduce", "broadcast", "all_gather", "barrier"]),
    dtypes=st.sampled_from([("float32",), ("float16",), ("int64", "float32")]),
    root=st.integers(-1, 1),
    group=st.sampled_from(["default", "group 1"]),
)


def _in_groups(collectives: list[Collective]) -> tuple[Collective, ...]:
    count: dict[str, int] = {}
    numbered = []
    for one in collectives:
        index = count[one.group] = count.get(one.group, -1) + 1
        numbered.append(replace(one, index=index))
    return tuple(numbered)


@given(st.lists(COLLECTIVES), st.integers(1, 4))
def test_equal_histories_are_the_same(collectives: list[Collective], world_size: int) -> None:
    history = _in_groups(collectives)
    assert _check("same_collectives", *[history] * world_size).verdict is Verdict.PASS


@given(st.lists(st.integers(1, 99), min_size=2, max_size=8, unique=True).flatmap(
    lambda sizes: st.tuples(st.just(sizes), st.permutations(sizes))), st.integers(2, 4), st.data())  # fmt: skip
def test_any_permutation_of_distinct_collectives_is_caught(
    sizes: tuple[list[int], list[int]], world_size: int, data: st.DataObject
) -> None:
    straight, permuted = sizes
    assume(straight != permuted)
    culprit = data.draw(st.integers(0, world_size - 1))
    histories = [gradients(*(permuted if rank == culprit else straight)) for rank in range(world_size)]
    finding = _check("same_collectives", *histories)
    assert finding.verdict is Verdict.FAIL
    first = next(number for number in range(len(straight)) if straight[number] != permuted[number])
    assert f"all_reduce #{first} " in finding.summary


@given(st.lists(COLLECTIVES, min_size=1), st.data())
def test_any_missing_collective_is_caught(collectives: list[Collective], data: st.DataObject) -> None:
    gone = data.draw(st.integers(0, len(collectives) - 1))
    shorter = collectives[:gone] + collectives[gone + 1 :]
    group = collectives[gone].group
    assume(group == "default" or any(one.group == group for one in shorter))
    finding = _check("same_collectives", _in_groups(collectives), _in_groups(shorter))
    assert finding.verdict is Verdict.FAIL


def test_a_member_that_issues_nothing_in_its_group_is_caught() -> None:
    alone = (collective(), collective(group="group 1", members=(0, 2)))
    finding = _check("same_collectives", alone, (collective(),), (collective(),))
    assert finding.verdict is Verdict.FAIL
    assert finding.summary.endswith("and rank 2 issued nothing to match it")


@pytest.mark.parametrize(
    ("changes", "aspect"),
    [
        ({"op": "broadcast"}, "operation (all_reduce and broadcast)"),
        ({"shapes": ((5,),)}, "number of elements (4 and 5)"),
        ({"dtypes": ("float16",)}, "dtype (float32 and float16)"),
        ({"reduce_op": "avg"}, "reduction (sum and avg)"),
        ({"root": 1}, "root (-1 and 1)"),
    ],
)
def test_every_aspect_of_a_collective_must_match(changes: dict[str, Any], aspect: str) -> None:
    finding = _check("same_collectives", (collective(),), (replace(collective(), **changes),))
    assert finding.verdict is Verdict.FAIL
    assert aspect in finding.explanation


def test_a_rank_that_did_not_come_so_far_hides_no_mismatch_of_the_others() -> None:
    check = get_checker("same_collectives")
    seen = (ended(0, "abandoned", gradients(1)), ended(1, "killed", gradients(1, 2)), ended(2, "hung", gradients(1, 3)))
    finding = check(evidence_of(*seen))
    assert finding is not None
    assert finding.verdict is Verdict.FAIL
    assert finding.summary.startswith("ranks 1 and 2 differ: all_reduce #1 (2 ")


def test_one_order_holds_in_every_group_where_no_rank_saw_an_exception() -> None:
    check = get_checker("one_order")
    mine, theirs = _in_groups([collective(group="group 1"), collective()]), _in_groups([collective(group="group 1")])
    histories = (mine, (*theirs, collective(numel=5)))
    observations = [returned(rank, history) for rank, history in enumerate(histories)]
    finding = check(evidence_of(*observations))
    assert finding is not None
    assert (finding.checker, finding.verdict) == ("one_order", Verdict.FAIL)
    swapped = [returned(rank, history) for rank, history in enumerate((mine, mine))]
    finding = check(evidence_of(*swapped))
    assert finding is not None
    assert finding.verdict is Verdict.PASS
    refused = [
        returned(rank, history, {"answer": [Raised.of(ValueError("no"))]}) for rank, history in enumerate(histories)
    ]
    assert check(evidence_of(*refused)) is None
    assert check(evidence_of(observations[0], ended(1, "hung", histories[1]))) is None
    assert check(evidence_of(*observations, recorded=False)) is None


def test_of_several_mismatches_the_earliest_is_told() -> None:
    finding = _check("same_collectives", gradients(1, 2, 3), gradients(1, 2, 4), gradients(1, 5, 3))
    assert finding.summary.startswith("ranks 0 and 2 differ: all_reduce #1 (2 ")


def test_what_may_differ_between_ranks() -> None:
    shaped = replace(collective(), shapes=((2, 2),), phase="forward", step=9, started_ns=5)
    assert _check("same_collectives", (collective(),), (shaped,)).verdict is Verdict.PASS
    uneven = [(collective(op="all_to_all_single", numel=numel),) for numel in (3, 5)]
    assert _check("same_collectives", *uneven).verdict is Verdict.PASS
    alone = (collective(), collective(op="send"), collective(group="group 2"))
    assert _check("same_collectives", alone, (collective(),)).verdict is Verdict.PASS


def test_where_ranks_did_not_end_only_what_all_issued_is_compared() -> None:
    check = get_checker("same_collectives")
    long, short, other = gradients(1, 2, 3), gradients(1, 2), gradients(1, 9)
    for witness in (ended(0, "hung", long), raised(0, ValueError("no"), long)):
        finding = check(evidence_of(witness, ended(1, "abandoned", short)))
        assert finding is not None
        assert finding.verdict is Verdict.PASS
        finding = check(evidence_of(witness, ended(1, "abandoned", other)))
        assert finding is not None
        assert finding.verdict is Verdict.FAIL
    last_only = check(evidence_of(ended(0, "hung", long), ended(1, "hung", long[2:])))
    assert last_only is not None
    assert last_only.verdict is Verdict.PASS
    nothing = check(evidence_of(ended(0, "killed"), ended(1, "abandoned")))
    assert nothing is not None
    assert nothing.verdict is Verdict.UNKNOWN


@pytest.mark.parametrize(
    ("second", "refused", "verdict"),
    [
        (gradients(1, 2), True, Verdict.PASS),
        (gradients(1, 2), False, Verdict.FAIL),
        (gradients(1, 9), True, Verdict.FAIL),
    ],
)
def test_after_a_refusal_of_every_rank_only_what_all_issued_is_compared(
    second: tuple[Collective, ...], refused: bool, verdict: Verdict
) -> None:
    first = returned(0, gradients(1, 2, 3), {"step": Raised.of(ValueError("no"))})
    other = returned(1, second, {"step": Raised.of(ValueError("no"))} if refused else {})
    finding = get_checker("same_until_refused")(evidence_of(first, other))
    assert finding is not None
    assert finding.verdict is verdict


def test_gradients_are_what_moves_floating_numbers_in_backward() -> None:
    assert is_gradient(collective())
    assert is_gradient(collective(dtypes=("complex64",)))
    assert is_gradient(collective(op="reduce_scatter_tensor", dtypes=("bfloat16",)))
    assert not is_gradient(collective(dtypes=("int32",)))
    assert not is_gradient(collective(phase="forward"))
    assert is_gradient(collective(op="all_to_all_single"))
    assert is_gradient(collective(op="send"))
    assert not is_gradient(collective(op="barrier", dtypes=()))


def test_silent_no_sync() -> None:
    assert _check("silent_no_sync", gradients(4)).verdict is Verdict.PASS
    own = (collective(dtypes=("int64",), sync=False), collective(1, phase="forward", sync=False))
    assert _check("silent_no_sync", own).verdict is Verdict.PASS
    finding = _check("silent_no_sync", gradients(4), gradients(4, sync=False))
    assert finding.verdict is Verdict.FAIL
    assert finding.summary.startswith("rank 1 issued all_reduce #0 (4 x float32, sum) in backward inside no_sync")


@pytest.mark.parametrize("op", ["all_gather", "send", "all_to_all_single", "broadcast"])
def test_no_sync_is_silent_whatever_the_operation(op: str) -> None:
    finding = _check("silent_no_sync", (collective(op=op, sync=False),))
    assert finding.verdict is Verdict.FAIL
    assert finding.summary.startswith(f"rank 0 issued {op} #0")


def test_nothing_in_flight() -> None:
    check = get_checker("nothing_in_flight")
    assert _check("nothing_in_flight", gradients(4)).verdict is Verdict.PASS
    assert _check("nothing_in_flight", gradients(4), gradients(4, 5, finished=False)).verdict is Verdict.FAIL
    unfinished = check(evidence_of(returned(0), raised(1, ValueError("no"), gradients(4, finished=False))))
    assert unfinished is not None
    assert unfinished.verdict is Verdict.UNKNOWN


@pytest.mark.parametrize("refused", [(), (0,), (0, 1)], ids=str)
def test_what_a_refused_backward_launched_may_be_in_flight(refused: tuple[int, ...]) -> None:
    history = gradients(4, finished=False)
    seen = [
        returned(rank, history, {"step": Raised.of(ValueError("no"))} if rank in refused else {}) for rank in (0, 1)
    ]
    finding = get_checker("no_gradients_in_flight")(evidence_of(*seen))
    assert (finding is None) == bool(refused)
    assert finding is None or finding.verdict is Verdict.FAIL


def test_what_must_not_be_issued_need_not_be_waited_for() -> None:
    """A wait would be the wrong remedy for what a backward sends inside `no_sync`."""
    inside, outside = gradients(4, sync=False, finished=False), gradients(4, finished=False, first=1)
    for history, name in ((inside, "silent_no_sync"), ((*inside, *outside), "no_gradients_in_flight")):
        finding = get_checker("no_gradients_in_flight")(evidence_of(returned(0, history)))
        assert finding is not None
        assert finding.checker == name
        also = _check("nothing_in_flight", history)
        assert deciding(Verdict.FAIL, [finding, also])[0] is finding


def test_what_moves_no_gradients_may_be_in_flight() -> None:
    notice = (collective(phase="forward", finished=False),)
    assert get_checker("no_gradients_in_flight")(evidence_of(returned(0, notice))) is None
    assert _check("nothing_in_flight", notice).verdict is Verdict.FAIL


def test_whether_gradients_are_in_flight_is_not_asked_of_ranks_that_did_not_end() -> None:
    check = get_checker("no_gradients_in_flight")
    flying = gradients(4, finished=False)
    assert check(evidence_of(returned(0, flying), raised(1, ValueError("no"), flying))) is None
    answers = {"answers": [{"first": Raised.of(ValueError("no"))}]}
    assert check(evidence_of(returned(0, flying, answers), returned(1, flying))) is None


def _steps(*sizes: tuple[int, ...]) -> tuple[Collective, ...]:
    return _numbered([one for step, found in enumerate(sizes) for one in gradients(*found, step=step)])


@pytest.mark.parametrize(
    ("sizes", "number", "order"),
    [
        ([(9,), (4, 5), (4, 5)], Verdict.PASS, Verdict.PASS),
        ([(9,), (4, 5), (5, 4)], Verdict.PASS, Verdict.FAIL),
        ([(9,), (4, 5), (9,)], Verdict.FAIL, Verdict.FAIL),
        ([(9,), (4, 5)], Verdict.UNKNOWN, Verdict.UNKNOWN),
        ([(9,), (4, 5), (), (4, 5)], Verdict.PASS, Verdict.PASS),
        ([], Verdict.UNKNOWN, Verdict.UNKNOWN),
    ],
)
def test_steps_alike(sizes: list[tuple[int, ...]], number: Verdict, order: Verdict) -> None:
    histories = [_steps(*sizes)] * 2
    assert _check("same_number_each_step", *histories).verdict is number
    assert _check("bucket_order", *histories).verdict is order


def test_broadcast_before_forward() -> None:
    buffers = collective(op="broadcast", phase="forward", root=0)
    assert _check("broadcast_before_forward", (buffers, collective(1))).verdict is Verdict.PASS
    assert _check("broadcast_before_forward", (collective(),)).verdict is Verdict.FAIL
    late = (collective(0, phase="forward"), replace(buffers, index=1), collective(2))
    assert _check("broadcast_before_forward", late).verdict is Verdict.FAIL
    assert _check("broadcast_before_forward", (buffers,)).verdict is Verdict.UNKNOWN
    assert _check("no_broadcast_in_forward", (collective(),)).verdict is Verdict.PASS
    assert _check("no_broadcast_in_forward", (collective(),), (buffers,)).verdict is Verdict.FAIL


@pytest.mark.parametrize("name", INVARIANTS)
def test_nothing_is_said_of_an_unrecorded_run(name: str) -> None:
    assert get_checker(name)(evidence_of(returned(0), returned(1), recorded=False)) is None
