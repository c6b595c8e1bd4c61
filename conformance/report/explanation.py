"""What a failure looks like to a reader: the requirement, the evidence, each rank's end, and how to see it again."""

from __future__ import annotations

import shlex
from pathlib import Path
from textwrap import indent

from conformance.report.run_report import Outcome
from conformance.scenario import Scenario
from conformance.spec.catalogue import Catalogue
from conformance.verdict import RankFate, ScenarioResult, Verdict

_WIDTH = 8  # the column in which every block's text starts


def explain(outcome: Outcome, backend: str, catalogue: Catalogue, replay: str = "") -> str:
    """Return the explanation of a failed `outcome`, ending with the command `replay` that shows it again."""
    result = outcome.result if outcome.result.verdict.is_failure else outcome.native
    assert result is not None, f"{outcome.scenario.id} did not fail"
    text = explain_result(outcome.scenario, result, backend, catalogue)
    return text + (block("Replay", replay) if replay else "")


def explain_result(scenario: Scenario, result: ScenarioResult, backend: str, catalogue: Catalogue) -> str:
    """Return header and evidence of one failed result, without colours."""
    requirement_id = leading_requirement(scenario)
    statement = catalogue.requirement(requirement_id).statement if requirement_id in catalogue else scenario.program
    lines = [
        f"{result.verdict.value:<{_WIDTH - 1}} {requirement_id}  {statement}\n",
        block("", scenario.id),
        block("", f"subject={result.subject} backend={backend} world={scenario.world_size} seed={scenario.seed}"),
    ]
    for finding in result.findings:
        if finding.verdict in (Verdict.PASS, Verdict.UNSUPPORTED):
            continue
        if finding.summary:
            lines.append(block("Found", finding.summary))
        if finding.explanation:
            lines.append(block("", finding.explanation))
    if any(rank.fate != "returned" for rank in result.ranks):
        lines.extend(block(f"Rank {rank.rank}", _fate(rank)) for rank in result.ranks)
    return "".join(lines)


def leading_requirement(scenario: Scenario) -> str:
    """Return the requirement that the scenario's id names, or its first one."""
    parts = scenario.id.split("/")
    return parts[1] if len(parts) == 3 and parts[1] in scenario.requirements else scenario.requirements[0]


def failure_path(folder: Path, scenario: Scenario) -> Path:
    """Return where a report in `folder` keeps the scenario of a failure."""
    return folder / "failures" / (scenario.id.replace("/", ".") + ".json")


def replay_command(scenario: Scenario, subject: str, backend: str, folder: Path | None = None) -> str:
    """Return the command that runs `scenario` again on the same subject and backend.

    With a report's `folder` it reads the scenario's file there, otherwise it finds the scenario by its id.
    """
    words = ["run", scenario.id] if folder is None else ["replay", str(failure_path(folder, scenario))]
    if subject != "ddp_impl":
        words += ["--ddp", subject]
    if backend != "gloo":
        words += ["--backend", backend]
    return shlex.join(["ddp-conformance", *words])


def block(label: str, text: str) -> str:
    """Return `text` as a block behind `label`, its further lines aligned."""
    body = indent(text.rstrip(), " " * _WIDTH)
    return f"{label:<{_WIDTH}}{body[_WIDTH:]}\n" if len(label) < _WIDTH else f"{label}\n{body}\n"


def _fate(rank: RankFate) -> str:
    parts = [rank.fate]
    if rank.phase:
        parts.append(f"in {rank.phase}")
    if rank.last_collective:
        parts.append(f"last collective {rank.last_collective}")
    text = ", ".join(parts)
    for title, evidence in (("stack", rank.stack), ("stderr", rank.stderr)):
        if evidence.strip():
            text += f"\n{title}:\n{indent(_tail(evidence), '  ')}"
    return text


def _tail(text: str, num_lines: int = 12) -> str:
    lines = text.strip("\n").splitlines()
    return "\n".join(lines if len(lines) <= num_lines else ["...", *lines[-num_lines:]])
