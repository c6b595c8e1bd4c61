"""Mutants of the definition: they are made in a fork alone, what asks for their line kills them, and nothing else."""

import importlib
from collections.abc import Mapping
from pathlib import Path

import pytest

from conformance.errors import ReportError
from conformance.mutants import definition
from conformance.mutants.definition import Judge, equivalents, judge_all, sampled
from conformance.mutants.mistakes import Mistake, mistakes_in
from conformance.mutants.swaps import SWAPS, unnoticed
from conformance.mutants.truth_trace import DEFINITION, Trace, in_fork, trace_all
from conformance.scenario import Scenario
from conformance.spec.catalogue import Requirement
from conformance.suite import load_scenarios
from conformance.truth import means

IDS = ("join/JOIN-12/rank-branch-24-world2", "join/JOIN-12/rank-branch-effective-24-world2")


def mistake(function: str, before: str, after: str) -> Mistake:
    found = [
        one for module in DEFINITION for one in mistakes_in(module)
        if (one.function, one.before, one.after) == (function, before, after)
    ]  # fmt: skip
    return found[0]


OF_EFFECTIVE = mistake("PlainDDP.agree_on_round", "max(1, num_syncing)", "min(1, num_syncing)")


@pytest.fixture(scope="module")
def scenarios() -> Mapping[str, Scenario]:
    return {one.id: one for one in load_scenarios() if one.id in IDS}


@pytest.fixture(scope="module")
def traces(scenarios: Mapping[str, Scenario]) -> list[Trace]:
    return list(trace_all(scenarios.values()))


def test_a_mistake_is_made_in_a_fork_alone() -> None:
    wrong = mistake("mean_of", "each.is_sparse", "not each.is_sparse")
    before = means.mean_of.__code__

    def made() -> list[bool]:
        wrong.make()
        return [means.mean_of.__code__ is before]

    assert list(in_fork(lambda: iter(made()))) == [False]
    assert means.mean_of.__code__ is before


def test_mistakes_are_made_in_setters_and_are_no_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "with_setter.py").write_text(
        "class Held:\n    @property\n    def it(self):\n        return self._it\n\n"
        "    @it.setter\n    def it(self, value):\n        self._it = max(value, value)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("with_setter")
    changes = {one.before: one for one in mistakes_in(module)}
    assert {one.after for one in mistakes_in(module)} == {"return None", "", "min(value, value)", "value"}
    changes["self._it = max(value, value)"].make()
    held = module.Held()
    held.it = 3
    assert not hasattr(held, "_it")


def test_a_mutant_is_killed_where_somebody_asks(scenarios: Mapping[str, Scenario], traces: list[Trace]) -> None:
    initial, effective = traces
    assert Judge([initial], scenarios).judge(OF_EFFECTIVE).is_open
    verdict = Judge(traces, scenarios).judge(OF_EFFECTIVE)
    assert (verdict.killed_by, verdict.num_run, verdict.num_reaching) == (effective.id, 2, 2)


def test_who_does_not_ask_the_same_twice_kills_nobody(scenarios: Mapping[str, Scenario], traces: list[Trace]) -> None:
    unsteady = Trace(traces[1].id, {"0 step0/loss": "once"}, traces[1].lines, 0.0)
    assert not Judge([unsteady], scenarios).judge(OF_EFFECTIVE).killed_by


def test_known_verdicts_are_not_done_again(
    scenarios: Mapping[str, Scenario], traces: list[Trace], tmp_path: Path
) -> None:
    first = list(judge_all([OF_EFFECTIVE], Judge(traces, scenarios).judge, tmp_path))
    (tmp_path / "verdicts.jsonl").write_text((tmp_path / "verdicts.jsonl").read_text().replace(IDS[1], "somebody"))
    again = list(judge_all([OF_EFFECTIVE], Judge(traces, scenarios).judge, tmp_path))
    assert (first[0].killed_by, again[0].killed_by) == (IDS[1], "somebody")


def test_a_sample_is_even_over_functions_and_the_same_for_a_seed() -> None:
    every = sampled((), None, 0)
    functions = {(one.module, one.function) for one in every}
    assert {(one.module, one.function) for one in every[: len(functions)]} == functions
    assert sampled((), 50, 3) == sampled((), None, 3)[:50] != every[:50]
    with pytest.raises(ReportError, match="no function nobody"):
        sampled(["nobody"], None, 0)


def test_what_is_called_equivalent_can_be_made(tmp_path: Path) -> None:
    assert ("PlainDDP.agree_on_round", OF_EFFECTIVE.before, OF_EFFECTIVE.after) not in equivalents()
    listed = tmp_path / "equivalent.toml"
    listed.write_text('[[equivalent]]\nfunction = "mean_of"\nbefore = "1"\nafter = ["2"]\nwhy = "it is"\n')
    with pytest.raises(ReportError, match="cannot be made"):
        equivalents(file=listed)


def test_a_swap_is_unnoticed_where_things_are_alike(scenarios: Mapping[str, Scenario], traces: list[Trace]) -> None:
    swap = next(one for one in SWAPS if one.name == "divided by the initial world size")
    speaking = Requirement("JOIN-12", "join", "divide_by_initial_world_size=False divides by less.", "full", ("here",))
    assert list(unnoticed(swap, [speaking], traces[:1], scenarios)) == ["JOIN-12"]
    assert list(unnoticed(swap, [speaking], traces, scenarios)) == []


def test_the_command_lists_survivors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from click.testing import CliRunner

    from conformance.cli.mutants import command

    monkeypatch.setattr(definition, "sampled", lambda *_: [OF_EFFECTIVE])
    monkeypatch.setattr(
        "conformance.suite.load_scenarios", lambda: [one for one in load_scenarios() if one.id in IDS[:1]]
    )
    result = CliRunner().invoke(command, ["--definition", "--keep", str(tmp_path)])
    assert result.exit_code == 1, result.output
    assert "max(1, num_syncing) -> min(1, num_syncing): survives 1 scenarios; 1 are known" in result.stdout
    (tmp_path / "made_of").write_text("another suite")
    result = CliRunner().invoke(command, ["--definition", "--keep", str(tmp_path), "--resume"])
    assert "is of another suite" in str(result.exception)
