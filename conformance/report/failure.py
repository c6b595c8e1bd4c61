"""A failed scenario as text: the requirement, the evidence, and the command that shows it again."""

import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from conformance.checkers.explanation import explain
from conformance.errors import certain
from conformance.report.blame import blamed
from conformance.report.causes import in_short
from conformance.run.lacking import lacking
from conformance.run.outcome import Outcome
from conformance.spec.catalogue import Catalogue
from conformance.verdict import Finding, ScenarioResult, deciding

#: What the name of a file cannot hold. Reports of strangers have ids that no scenario of the suite has.
_NO_FILE_NAME = {ord("/"): ".", 0: "."}


def failure_text(outcome: Outcome, backend: str, catalogue: Catalogue, replay: str, *, title: str = "") -> str:
    """Return why `outcome` must not be green; `replay` is the command that shows it again.

    `title` is the sentence that stands above the text, which does not say it once more.
    """
    result, excuse = outcome.failed_result, outcome.expectation
    certain(result.verdict.is_failure or excuse is not None, f"{outcome.id} did not fail")
    if excuse is not None and not excuse.holds:
        finding = Finding("known_failures", result.verdict, excuse.describe(outcome.subject.verdict))
        others = [one for one in result.findings if one.verdict.is_failure]
        result = replace(result, findings=(*others, finding))
    return result_text(outcome, result, backend, catalogue, replay, title=title)


def result_text(
    outcome: Outcome, result: ScenarioResult, backend: str, catalogue: Catalogue, replay: str = "", *, title: str = ""
) -> str:
    """Return header and evidence of one column that is not PASS: the gravest finding first, the others below.

    Among equally grave findings one with evidence is first; one whose evidence was shown already is left out.
    `title` is as in `failure_text`.
    """
    found = deciding(result.verdict, result.findings) or [Finding("runner", result.verdict, "no checker says why")]
    first, *others = (replace(one, summary=" ".join(one.summary.splitlines())) for one in found)
    requirement_id = blamed(outcome) if outcome.is_failure else outcome.leading_requirement
    statement = catalogue.requirement(requirement_id).statement if requirement_id in catalogue else ""
    if statement and title == in_short(statement):
        statement = ""
    elif title == first.summary:
        first = replace(first, summary="")
    header = {"subject": result.subject, "backend": backend, "requirement": requirement_id, "statement": statement}
    headed = replace(first, verdict=result.verdict)
    lines = [explain(headed, outcome.id, outcome.world_size, outcome.seed, **header)]
    for finding in others:
        lines += [f"Also  {finding.verdict.value}: {finding.summary}", *finding.explanation.splitlines()]
    if advice := advice_on(result, outcome.replay):
        lines.append(advice)
    if replay:
        lines.append(f"Replay  {replay}")
    return "\n".join(lines)


def advice_on(result: ScenarioResult, scenario: Mapping[str, Any] | None = None) -> str:
    """Return how to leave out of the declaration what the subject lacks or refuses; empty where nothing shows that."""
    if (found := lacking(result, scenario)) is None:
        return ""
    return (
        f"{result.subject} counts as having {', '.join(found.names)} and {found.why}: leave it out of its capabilities,"
        f"\n      {found.declaration}"
    )


def failure_path(folder: Path, scenario_id: str) -> Path:
    """Return where a report in `folder` keeps the scenario of a failure: below `failures`, whatever the id."""
    return folder / "failures" / f"{scenario_id.translate(_NO_FILE_NAME)}.json"


def replay_command(scenario_id: str, subject: str, backend: str, folder: Path) -> str:
    """Return the command that runs the scenario that a report in `folder` keeps, on the same subject and backend."""
    return _command(["replay", str(failure_path(folder, scenario_id))], subject, backend)


def run_command(scenario_id: str, subject: str, backend: str) -> str:
    """Return the command that runs a scenario of the suite by its id."""
    return _command(["run", scenario_id], subject, backend)


def last_failed_command(subject: str, backend: str, folder: Path) -> str:
    """Return the command that runs again what failed in the report in `folder`."""
    return _command(["run", "--last-failed", "--report", str(folder)], subject, backend)


def _command(words: list[str], subject: str, backend: str) -> str:
    if subject not in ("", "ddp_impl"):
        words = [*words, "--ddp", subject]
    if backend != "gloo":
        words = [*words, "--backend", backend]
    return shlex.join(["ddp-conformance", *words])
