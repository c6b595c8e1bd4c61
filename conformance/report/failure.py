"""A failed scenario as text: the requirement, the evidence, and the command that shows it again."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path

from conformance.checkers.explanation import explain
from conformance.own_mistake import certain
from conformance.report.blame import blamed
from conformance.run.outcome import Outcome
from conformance.spec.catalogue import Catalogue
from conformance.subjects.subject import METHODS
from conformance.verdict import Finding, ScenarioResult, telling

_MISSING = re.compile(r"AttributeError: (?!'NoneType').* has no attribute '(\w+)'")


def failure_text(outcome: Outcome, backend: str, catalogue: Catalogue, replay: str) -> str:
    """Return why `outcome` must not be green; `replay` is the command that shows it again."""
    result, excuse = outcome.failed_result, outcome.expectation
    certain(result.verdict.is_failure or excuse is not None, f"{outcome.id} did not fail")
    if excuse is not None and not excuse.holds:
        finding = Finding("known_failures", result.verdict, excuse.describe(outcome.subject.verdict))
        others = [one for one in result.findings if one.verdict.is_failure]
        result = replace(result, findings=(*others, finding))
    return result_text(outcome, result, backend, catalogue, replay)


def result_text(outcome: Outcome, result: ScenarioResult, backend: str, catalogue: Catalogue, replay: str = "") -> str:
    """Return header and evidence of one column that is not PASS: the gravest finding first, the others below.

    Among equally grave findings one with evidence comes first; one whose evidence was told already is left out.
    """
    first, *others = telling(result.verdict, result.findings) or [
        Finding("runner", result.verdict, "no checker says why")
    ]
    requirement_id = blamed(outcome) if outcome.is_failure else outcome.leading_requirement
    statement = catalogue.requirement(requirement_id).statement if requirement_id in catalogue else ""
    header = {"subject": result.subject, "backend": backend, "requirement": requirement_id, "statement": statement}
    lines = [explain(replace(first, verdict=result.verdict), outcome, **header)]
    for finding in others:
        lines += [f"Also  {finding.verdict.value}: {finding.summary}", *finding.explanation.splitlines()]
    if advice := advice_on(result):
        lines.append(advice)
    if replay:
        lines.append(f"Replay  {replay}")
    return "\n".join(lines)


def advice_on(result: ScenarioResult) -> str:
    """Return what to do about a method that the subject declares and lacks; empty where none is missing."""
    found = (_MISSING.search(f"{one.summary}\n{one.explanation}") for one in result.findings_that_tell)
    method = next((match[1] for match in found if match and match[1] in METHODS), "")
    if not method:
        return ""
    return (
        f"{result.subject} declares {METHODS[method]} and has no method {method}: leave it out of its capabilities,"
        f'\n      Subject(..., capabilities=CAPABILITIES - {{"{METHODS[method]}"}})'
    )


def failure_path(folder: Path, scenario_id: str) -> Path:
    """Return where a report in `folder` keeps the scenario of a failure."""
    return folder / "failures" / (scenario_id.replace("/", ".") + ".json")


def replay_command(scenario_id: str, subject: str, backend: str, folder: Path) -> str:
    """Return the command that runs the scenario that a report in `folder` keeps, on the same subject and backend."""
    return _command(["replay", str(failure_path(folder, scenario_id))], subject, backend)


def run_command(scenario_id: str, subject: str, backend: str) -> str:
    """Return the command that runs a scenario of the suite by its id."""
    return _command(["run", scenario_id], subject, backend)


def _command(words: list[str], subject: str, backend: str) -> str:
    if subject != "ddp_impl":
        words = [*words, "--ddp", subject]
    if backend != "gloo":
        words = [*words, "--backend", backend]
    return shlex.join(["ddp-conformance", *words])
