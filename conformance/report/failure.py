"""A failed scenario as text: the requirement, the evidence, and the command that shows it again."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from conformance.checkers.explanation import explain
from conformance.own_mistake import certain
from conformance.report.blame import blamed
from conformance.run.outcome import Outcome
from conformance.spec.catalogue import Catalogue
from conformance.subjects.subject import CAPABILITIES, METHODS, capabilities_of
from conformance.verdict import Finding, ScenarioResult, telling

_MISSING = re.compile(r"AttributeError: (?!'NoneType').* has no attribute '(\w+)'")

#: What the name of a file cannot hold. Reports of strangers have ids that no scenario of the suite has.
_NO_FILE_NAME = {ord("/"): ".", 0: "."}

#: What a constructor raises for an option that it does not have.
_REFUSALS = ("TypeError", "ValueError")


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
    if advice := advice_on(result, outcome.replay):
        lines.append(advice)
    if replay:
        lines.append(f"Replay  {replay}")
    return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Lacking:
    """The capabilities that a subject declares and does not have, and how that shows: a clause."""

    names: tuple[str, ...]
    why: str

    @property
    def declaration(self) -> str:
        """The declaration without them, to be pasted."""
        names = ", ".join(f'"{name}"' for name in self.names)
        return f"Subject(..., capabilities=CAPABILITIES - {{{names}}})"


def lacking(result: ScenarioResult, scenario: Mapping[str, Any] | None = None) -> Lacking | None:
    """Return what the subject lacks or refuses though it declares it; None where nothing shows that.

    `scenario` is what `result` is about, as an outcome keeps it of failures.
    """
    found = (_MISSING.search(f"{one.summary}\n{one.explanation}") for one in result.findings_that_tell)
    method = next((match[1] for match in found if match and match[1] in METHODS), "")
    if method:
        return Lacking((METHODS[method],), f"has no method {method}")
    refused = _refused(result, _asked_of(scenario or {}))
    return Lacking(tuple(refused), "refuses it") if refused else None


def advice_on(result: ScenarioResult, scenario: Mapping[str, Any] | None = None) -> str:
    """Return how to leave out of the declaration what the subject lacks or refuses; empty where nothing shows that."""
    if (found := lacking(result, scenario)) is None:
        return ""
    return (
        f"{result.subject} declares {', '.join(found.names)} and {found.why}: leave it out of its capabilities,"
        f"\n      {found.declaration}"
    )


def _asked_of(scenario: Mapping[str, Any]) -> frozenset[str]:
    """Return the capabilities that a scenario asks of a DDP."""
    sparse = {"sparse_gradients"} if "sparse" in f"{scenario.get('model')} {scenario.get('arguments')}" else set()
    return capabilities_of(scenario.get("options", {})) | CAPABILITIES & {*scenario.get("needs", ()), *sparse}


def _refused(result: ScenarioResult, asked: frozenset[str]) -> list[str]:
    """Return those capabilities that a rank's error says are missing: by its type, or a constructor's by its words."""
    for rank in result.ranks:
        kind, _, message = rank.fate.partition(": ")
        named = sorted(name for name in asked if name.removesuffix("_gradients") in message)
        if kind == "NotImplementedError":
            return named or sorted(asked)
        if named and ((rank.phase == "construct" and kind in _REFUSALS) or named == ["sparse_gradients"]):
            return named
    return []


def failure_path(folder: Path, scenario_id: str) -> Path:
    """Return where a report in `folder` keeps the scenario of a failure: below `failures`, whatever the id."""
    return folder / "failures" / f"{scenario_id.translate(_NO_FILE_NAME)}.json"


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
