"""Mutants of a DDP that a machine makes: ranks make the mistake, and what executes its line kills it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from conformance.mutants.definition import equivalents, sampled
from conformance.mutants.generated import Campaign, _unlike_first, modules_of
from conformance.mutants.mistakes import Mistake, mistakes_in
from conformance.mutants.truth_trace import Trace
from conformance.scenario import Scenario
from conformance.subjects.subject import Subject, get_subject
from conformance.suite import load_scenarios

ACCUMULATES, TRAINS = "accumulation/ACCUM-01/local-world2", "gradients/GRAD-01/mlp-world2"
TRAINS_TOO = "gradients/GRAD-01/mlp-seed1-world2"  # of a requirement that `TRAINS` tests
SMALL = get_subject("fixtures.small_ddp:SUBJECT")


def scenario(id_: str) -> Scenario:
    return next(one for one in load_scenarios() if one.id == id_)


def mistake(function: str, before: str, after: str) -> Mistake:
    (module,) = modules_of(SMALL)
    return next(
        one for one in mistakes_in(module) if (one.function, one.before, one.after) == (function, before, after)
    )


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Campaign]:
    first, *further = map(scenario, (TRAINS, TRAINS_TOO, ACCUMULATES))
    with Campaign(SMALL, tmp_path_factory.mktemp("made"), [first], [first, *further]) as one:
        one.trace(lambda text: pytest.fail(text))
        yield one


def test_ranks_make_the_mistake_and_a_scenario_kills_it(campaign: Campaign) -> None:
    verdict = campaign.judge(mistake("DDP._finish", "flat.div_(self._size)", "self._size"))
    assert (verdict.killed_by, verdict.num_run) == (TRAINS, 1)


def test_what_no_scenario_executes_is_asked_of_nobody(campaign: Campaign) -> None:
    verdict = campaign.judge(mistake("DDP.no_sync", "False", "True"))
    assert verdict.is_open
    assert (verdict.num_run, verdict.num_reaching) == (0, 0)
    assert {TRAINS} == campaign._traces.keys()


def test_mistakes_are_sampled_from_lines_that_scenarios_execute(campaign: Campaign) -> None:
    executed = sampled((), None, 0, modules_of(SMALL), campaign.is_executed)
    names = {one.function for one in executed}
    assert "DDP._finish" in names
    assert "DDP.no_sync" not in names
    assert all(campaign._reaches(one, TRAINS) for one in executed)


def test_of_scenarios_that_execute_the_same_all_but_one_wait() -> None:
    lines = {"plain": [1, 2], "twin": [1, 2], "other": [1, 3], "slow": [1, 2, 4]}
    cpu_s = {"plain": 0.1, "twin": 0.1, "other": 0.2, "slow": 9.0}
    traces = [Trace(name, {}, {"module": lines[name]}, cpu_s[name]) for name in lines]
    assert list(_unlike_first(traces)) == ["plain", "other", "slow", "twin"]


def test_a_mistake_that_changes_nothing_survives(campaign: Campaign) -> None:
    verdict = campaign.judge(mistake("DDP._finish", "bool(backward.arrived)", "backward.arrived"))
    assert verdict.is_open
    assert verdict.num_run == verdict.num_reaching == 2


def test_the_next_mutant_has_no_mistake_of_the_one_before(campaign: Campaign) -> None:
    assert campaign._is_passed(TRAINS)


def test_mistakes_are_made_in_a_package_or_in_a_module_alone() -> None:
    assert [one.__name__ for one in modules_of(SMALL)] == ["fixtures.small_ddp"]
    names = {one.__name__ for one in modules_of(Subject("ddp_impl", "ddp_impl:DistributedDataParallel"))}
    assert "ddp_impl.reducer.reducer" in names
    assert not any(".tests" in name or "__main__" in name for name in names)


def test_what_is_called_equivalent_of_a_ddp_is_not_the_definitions(tmp_path: Path) -> None:
    listed = tmp_path / "equivalent.toml"
    listed.write_text(
        f'[[equivalent]]\nof = "{SMALL.target}"\nfunction = "DDP._finish"\nbefore = "bool(backward.arrived)"\n'
        'after = ["backward.arrived"]\nwhy = "a set is true where it has something"\n'
    )
    assert not equivalents(file=listed)
    assert len(equivalents(SMALL.target, modules_of(SMALL), listed)) == 1
