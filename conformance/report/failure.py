"""A failed scenario as text: the requirement, the evidence, and the command that shows it again."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

from conformance.checkers.explanation import explain
from conformance.run.outcome import Outcome
from conformance.scenario import Scenario
from conformance.spec.catalogue import Catalogue
from conformance.verdict import Finding, ScenarioResult, Verdict, telling


def failure_text(outcome: Outcome, backend: str, catalogue: Catalogue, replay: str) -> str:
    """Return why `outcome` must not be green; `replay` is the command that shows it again."""
    result, native, expected = outcome.result, outcome.native, outcome.expected
    if native is not None and native.verdict is Verdict.HARNESS_ERROR and not result.verdict.is_failure:
        result = native
    assert result.verdict.is_failure or expected is not None, f"{outcome.scenario.id} did not fail"
    if expected is not None and expected.is_failure:
        finding = Finding("expectations", result.verdict, expected.describe(outcome.result.verdict))
        others = [one for one in result.findings if one.verdict.is_failure]
        result = replace(result, findings=(*others, finding))
    return result_text(outcome.scenario, result, backend, catalogue, replay)


def result_text(
    scenario: Scenario, result: ScenarioResult, backend: str, catalogue: Catalogue, replay: str = ""
) -> str:
    """Return header and evidence of one result that is not PASS: the gravest finding first, the others below.

    Among equally grave findings one with evidence comes first; one whose evidence was told already is left out.
    """
    first, *others = telling(result.verdict, result.findings) or [
        Finding("runner", result.verdict, "no checker says why")
    ]
    requirement_id = scenario.leading_requirement
    statement = catalogue.requirement(requirement_id).statement if requirement_id in catalogue else ""
    header = {"subject": result.subject, "backend": backend, "requirement": requirement_id, "statement": statement}
    lines = [explain(first, scenario, **header)]
    for finding in others:
        lines += [f"Also  {finding.verdict.value}: {finding.summary}", *finding.explanation.splitlines()]
    if replay:
        lines.append(f"Replay  {replay}")
    return "\n".join(lines)


def failure_path(folder: Path, scenario: Scenario) -> Path:
    """Return where a report in `folder` keeps the scenario of a failure."""
    return folder / "failures" / (scenario.id.replace("/", ".") + ".json")


def replay_command(scenario: Scenario, subject: str, backend: str, folder: Path | None = None) -> str:
    """Return the command that runs `scenario` again on the same subject and backend.

    With a report's `folder` it reads the scenario's file there, otherwise it finds the scenario by its id.
    """
    if folder is None:
        return run_command(scenario.id, subject, backend)
    return _command(["replay", str(failure_path(folder, scenario))], subject, backend)


def run_command(scenario_id: str, subject: str, backend: str) -> str:
    """Return the command that runs a scenario of the suite by its id."""
    return _command(["run", scenario_id], subject, backend)


def _command(words: list[str], subject: str, backend: str) -> str:
    if subject != "ddp_impl":
        words = [*words, "--ddp", subject]
    if backend != "gloo":
        words = [*words, "--backend", backend]
    return shlex.join(["ddp-conformance", *words])
