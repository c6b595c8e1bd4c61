"""The texts of failures, pinned as people read them."""
# ruff: noqa: E501 - the texts are as long as they are

from collections.abc import Mapping

import torch
from expecttest import TestCase

from conformance.checkers.explanation import explain, ranks
from conformance.observation import Facts, Observation
from conformance.run.judge import judge
from conformance.tests.evidence_by_hand import PROGRAM, SCENARIO, collective, ended, gradients, raised, returned

MEAN = torch.tensor([[1.0, 2.0], [4.0, 8.0]])


def _explain(
    observations: list[Observation],
    expected: Mapping[int, Facts] | None = None,
    statement: str = "a gradient MUST be the mean",
) -> str:
    scenario = SCENARIO.replace(world_size=len(observations))
    _, findings = judge(scenario, PROGRAM, {one.rank: one for one in observations}, expected, None)
    requirement = ", ".join(scenario.requirements)
    header = {"subject": "ddp_impl", "backend": "gloo", "requirement": requirement, "statement": statement}
    return explain(findings[0], scenario.id, scenario.world_size, scenario.seed, **header) + "\n"


def _with_facts(*facts: Facts) -> list[Observation]:
    return [returned(rank, gradients(4), found) for rank, found in enumerate(facts)]


class TestExplanations(TestCase):
    """One test per kind of failure."""

    def test_different_collectives(self) -> None:
        one = gradients(512, 4096)
        other = gradients(512, 2048)
        self.assertExpectedInline(
            _explain([returned(0, one), returned(1, other)]),
            """\
FAIL  GRAD-01  a gradient MUST be the mean
      gradients/GRAD-01/by-hand
      subject=ddp_impl backend=gloo world=2 seed=7
      ranks 0 and 1 differ: all_reduce #1 (4096 x float32, sum) meets all_reduce #1 (2048 x float32, sum)
Let   A = rank 0, collective #1: all_reduce(4096 x float32, sum)
      B = rank 1, collective #1: all_reduce(2048 x float32, sum)
Then  A and B meet in one group, but differ in number of elements (4096 and 2048).
Rank 0 was in backward, step 0.
Rank 1 was in backward, step 0.
""",
        )

    def test_a_collective_that_meets_nothing(self) -> None:
        broadcast = collective(1, 16, "broadcast", root=0, phase="forward", step=1)
        text = _explain([returned(0, gradients(512)), returned(1, (*gradients(512), broadcast))])
        self.assertExpectedInline(
            text,
            """\
FAIL  GRAD-01  a gradient MUST be the mean
      gradients/GRAD-01/by-hand
      subject=ddp_impl backend=gloo world=2 seed=7
      rank 1 issued broadcast #1 (16 x float32), and rank 0 issued nothing to match it
Let   A = rank 0, which issued nothing more
      B = rank 1, collective #1: broadcast(16 x float32, root 0)
Then  B meets nothing: rank 0 issued fewer collectives.
""",
        )

    def test_never_divided(self) -> None:
        expected: Facts = {"step0/grad/w": MEAN, "step0/grad/b": None, "final/parameter/w": MEAN}
        got: Facts = {"step0/grad/w": MEAN * 2, "step0/grad/b": None, "final/parameter/w": MEAN + 1}
        self.assertExpectedInline(
            _explain(_with_facts(got, got), {0: expected, 1: expected}),
            """\
FAIL  GRAD-01  a gradient MUST be the mean
      gradients/GRAD-01/by-hand
      subject=ddp_impl backend=gloo world=2 seed=7
      step0/grad/w on ranks 0 and 1: the sum over the ranks (expected * 2), never divided by the world size, or counted twice: 2 ranks do not tell
Let   E = step0/grad/w as expected: 2x2 float32
      A = step0/grad/w on rank 0
      B = step0/grad/w on rank 1
Then  A differs in 4 of 4 element(s), first at [0, 0]: expected 1.0, got 2.0; largest difference 8.
      B differs in 4 of 4 element(s), first at [0, 0]: expected 1.0, got 2.0; largest difference 8.
A, B: the sum over the ranks (expected * 2), never divided by the world size, or counted twice: 2 ranks do not tell.
Also wrong: final/parameter/w.
""",
        )

    def test_never_reduced(self) -> None:
        expected: Facts = {"step0/grad/w": MEAN}
        shared = (collective(0, 16, "broadcast", root=0, phase="construct"),)
        observed = [returned(rank, shared, {"step0/grad/w": MEAN + 2 * rank - 1}) for rank in range(2)]
        self.assertExpectedInline(
            _explain(observed, {0: expected, 1: expected}),
            """\
FAIL  GRAD-01  a gradient MUST be the mean
      gradients/GRAD-01/by-hand
      subject=ddp_impl backend=gloo world=2 seed=7
      step0/grad/w on ranks 0 and 1: the rank's own local value, not averaged (the mean over the ranks is what was expected)
Let   E = step0/grad/w as expected: 2x2 float32
      A = step0/grad/w on rank 0
      B = step0/grad/w on rank 1
Then  A differs in 4 of 4 element(s), first at [0, 0]: expected 1.0, got 0.0; largest difference 1.
      B differs in 4 of 4 element(s), first at [0, 0]: expected 1.0, got 2.0; largest difference 1.
A, B: the rank's own local value, not averaged (the mean over the ranks is what was expected).
""",
        )

    def test_many_ranks_and_facts(self) -> None:
        expected: Facts = {f"step0/grad/{number}": 1 for number in range(9)}
        observed = _with_facts(*[{f"step0/grad/{number}": 2 for number in range(9)}] * 6)
        self.assertExpectedInline(
            _explain(observed, dict.fromkeys(range(6), expected)),
            """\
FAIL  GRAD-01  a gradient MUST be the mean
      gradients/GRAD-01/by-hand
      subject=ddp_impl backend=gloo world=6 seed=7
      step0/grad/0 on ranks 0, 1, 2, 3, 4 and 5: 2 in place of 1: 2 times as many
Let   E = step0/grad/0 as expected: 1
      A = step0/grad/0 on rank 0
      B = step0/grad/0 on rank 1
      C = step0/grad/0 on rank 2
      D = step0/grad/0 on rank 3
Then  A is 2, expected 1.
      B is 2, expected 1.
      C is 2, expected 1.
      D is 2, expected 1.
A, B, C, D: 2 in place of 1: 2 times as many.
Wrong on ranks 4 and 5 as well.
Also wrong: step0/grad/1, step0/grad/2, step0/grad/3, step0/grad/4, step0/grad/5, step0/grad/6 and 2 more.
""",
        )

    def test_hang(self) -> None:
        waiting = ended(0, "hung", gradients(512, 4096, step=1), stack='File "reducer.py", line 7 in wait\n')
        stuck = ended(1, "hung", gradients(512, step=1), stack='File "model.py", line 3 in forward\n')
        self.assertExpectedInline(
            _explain([waiting, stuck]),
            """\
HANG  GRAD-01  a gradient MUST be the mean
      gradients/GRAD-01/by-hand
      subject=ddp_impl backend=gloo world=2 seed=7
      rank 1 is missing from all_reduce #1 (4096 x float32, sum); rank 1 is in phase backward, step 1
Let   A = all_reduce #1 (4096 x float32, sum), issued by rank 0
      B = rank 1, last collective all_reduce #0 (512 x float32, sum)
Then  A waits for B, which is in phase backward, step 1.
Rank 1's stack:
      File "model.py", line 3 in forward
Rank 0's stack:
      File "reducer.py", line 7 in wait
""",
        )

    def test_hang_after_an_exception(self) -> None:
        waiting = ended(0, "hung", gradients(512, 4096))
        self.assertExpectedInline(
            _explain([waiting, raised(1, ValueError("bad shape"), gradients(512))]),
            """\
HANG  GRAD-01  a gradient MUST be the mean
      gradients/GRAD-01/by-hand
      subject=ddp_impl backend=gloo world=2 seed=7
      rank 1 is missing from all_reduce #1 (4096 x float32, sum); rank 1 raised ValueError: bad shape in phase backward, step 0
Let   A = all_reduce #1 (4096 x float32, sum), issued by rank 0
      B = rank 1, last collective all_reduce #0 (512 x float32, sum)
Then  A waits for B, which raised ValueError: bad shape in phase backward, step 0.
""",
        )

    def test_hang_without_a_missing_rank(self) -> None:
        stuck = [ended(rank, "hung", gradients(512), stack="File x\n") for rank in range(2)]
        self.assertExpectedInline(
            _explain(stuck),
            """\
HANG  GRAD-01  a gradient MUST be the mean
      gradients/GRAD-01/by-hand
      subject=ddp_impl backend=gloo world=2 seed=7
      no rank is missing from a collective, but ranks 0 and 1 did not end: rank 0 is in phase backward, step 0; rank 1 is in phase backward, step 0
Let   A = rank 0, last collective all_reduce #0 (512 x float32, sum)
      B = rank 1, last collective all_reduce #0 (512 x float32, sum)
Then  A did not end within 20 s; it is in phase backward, step 0.
      B did not end within 20 s; it is in phase backward, step 0.
Rank 0's stack:
      File x
Rank 1's stack:
      File x
""",
        )

    def test_crash(self) -> None:
        dead = ended(1, "killed", gradients(512), stderr="terminate called after throwing\n")
        self.assertExpectedInline(
            _explain([ended(0, "abandoned", gradients(512, 4096)), dead]),
            """\
CRASH  GRAD-01  a gradient MUST be the mean
      gradients/GRAD-01/by-hand
      subject=ddp_impl backend=gloo world=2 seed=7
      rank 1 was killed by SIGKILL in phase backward, step 0
Let   A = rank 1, last collective all_reduce #0 (512 x float32, sum)
Then  A was killed by SIGKILL in phase backward, step 0.
Rank 0 had issued all_reduce #1 (4096 x float32, sum), which rank 1 never did.
Rank 0 was then ended by the harness, last collective all_reduce #1 (4096 x float32, sum).
End of rank 1's stderr:
      terminate called after throwing
""",
        )

    def test_exceptions(self) -> None:
        trace = 'Traceback (most recent call last):\n  File "ddp.py", line 5, in wrap\nValueError: no\n'
        text = _explain([raised(0, ValueError("no"), traceback=trace), raised(1, TypeError("yes"), traceback="x\n")])
        self.assertExpectedInline(
            text,
            """\
FAIL  GRAD-01  a gradient MUST be the mean
      gradients/GRAD-01/by-hand
      subject=ddp_impl backend=gloo world=2 seed=7
      rank 0 raised ValueError: no (ddp.py:5, in wrap); rank 1 raised TypeError: yes
Let   A = rank 0, no collective yet
      B = rank 1, no collective yet
Then  A raised ValueError: no in phase backward.
      B raised TypeError: yes in phase backward.
End of the traceback of rank 0:
      Traceback (most recent call last):
        File "ddp.py", line 5, in wrap
      ValueError: no
End of the traceback of rank 1:
      x
""",
        )

    def test_collectives_that_nobody_recorded(self) -> None:
        scenario = SCENARIO.replace(recorded=False)
        both = {0: raised(0, ValueError("no")), 1: ended(1, "abandoned")}
        _, findings = judge(scenario, PROGRAM, both, None, None)
        text = findings[0].explanation
        assert "Let   A = rank 0\n" in text
        assert "Rank 1 was then ended by the harness." in text

    def test_nothing_exercised(self) -> None:
        self.assertExpectedInline(
            _explain([returned(0), returned(1)], statement=""),
            """\
HARNESS_ERROR  GRAD-01  fewer collectives than the 1 that the scenario declares (rank 0: 0, rank 1: 0)
      gradients/GRAD-01/by-hand
      subject=ddp_impl backend=gloo world=2 seed=7
""",
        )


def test_ranks_are_named_as_people_do() -> None:
    assert [ranks([1]), ranks([2, 0]), ranks({3, 1, 0})] == ["rank 1", "ranks 0 and 2", "ranks 0, 1 and 3"]
