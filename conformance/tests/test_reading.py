"""What a user reads first of a mutant: which words it must hold, and what a kill keeps so that it is judged again."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from conformance.errors import ReportError
from conformance.mutants.catalogue import load_mutants
from conformance.mutants.kept import Kept, keep, kept_in
from conformance.mutants.reading import Reading, headline, readings
from conformance.observation import Collective, Ending, Observation
from conformance.run.watched_ranks import WatchedRanks
from conformance.subjects.subject import NO_DDP, get_subject
from conformance.suite import load_scenarios
from conformance.truth.carried import packed
from conformance.truth.expected import at_least
from conformance.waiting import loop


def test_every_mutant_has_words() -> None:
    assert [mutant.name for mutant in load_mutants() if not all(mutant.words) or not mutant.words] == []


def test_what_is_kept_is_judged_again_and_read(tmp_path: Path) -> None:
    (scenario, *_) = (one for one in load_scenarios() if "GRAD-01" in one.requirements and one.world_size == 2)
    local = {rank: torch.full((3,), 2.0 + rank) for rank in range(2)}
    observations = {
        rank: Observation(
            rank, Ending("returned"), {"step0/grad/w": local[rank] * 2, "num": 1}, history=tuple[Collective, ...]()
        )
        for rank in range(2)
    }
    expected = {rank: {"step0/grad/w": local[rank], "num": at_least(1)} for rank in range(2)}
    keep(tmp_path, "NoDivision", "GRAD-01", scenario, observations, expected)
    (kept,) = kept_in(tmp_path)
    assert (kept.mutant, kept.requirement) == ("NoDivision", "GRAD-01")
    (found,) = readings([kept])
    assert "step0/grad/w on ranks 0 and 1: the sum over the ranks" in found.cause
    assert found.cause_names_the_bug


def test_what_runs_without_a_ddp_is_watched_whoever_is_tried() -> None:
    """Scenarios about a backend wrap nothing: their ranks run `NO_DDP`."""
    scenario = next(one for one in load_scenarios() if "OP-04" in one.requirements)
    seen = {0: Observation(0, Ending("returned"), {}, history=())}

    async def observe(*asked: object) -> dict[int, Observation]:
        return seen

    ranks = WatchedRanks(SimpleNamespace(observe=observe), get_subject("ddp_impl"))
    for subject, kept in ((get_subject("torch"), {}), (NO_DDP, seen)):
        loop.run(ranks.observe, scenario, subject, False)
        assert ranks.observations == kept


def test_a_failure_of_the_harness_names_no_bug() -> None:
    scenario = next(one for one in load_scenarios() if "OP-04" in one.requirements)
    expected = packed({rank: {"answer": 42} for rank in range(2)})
    (found,) = readings([Kept("forgets_to_divide", "OP-04", scenario.to_json(), {}, expected)])
    assert "no observation of ranks 0 and 1" in found.cause
    assert found.requirement == ""


def test_a_word_that_is_missing_is_told() -> None:
    both = Reading("A", "A value is stale.", "Buffers MUST be copied.", ("stale|old", "buffer"))
    none = Reading("B", "A value is stale.", "Buffers MUST be copied.", ("divided|scaled",))
    assert (both.missing, both.cause_names_the_bug, none.missing) == ((), False, ("divided|scaled",))
    said = "What is read first names the bug of 1 of 2 mutants (50.0 %), the cause by itself of 0"
    assert headline([both, none]) == said


def test_a_folder_that_keeps_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="keeps nothing of mutants"):
        list(kept_in(tmp_path))
    (tmp_path / "A.GRAD-01.kept").write_bytes(b"no message")
    with pytest.raises(ReportError, match="cannot read"):
        list(kept_in(tmp_path))
