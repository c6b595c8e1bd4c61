"""Markdown for a comment below a pull request: the answer first, a table, and what failed folded away."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence

from conformance.bench.ratio import Ratio
from conformance.checkers.explanation import counted, shorten
from conformance.report.blame import Failed, failed_requirements
from conformance.report.diff import ReportDiff, compare, difference_lines
from conformance.report.headline import headline
from conformance.run.outcome import Outcome, combined_text, subjects_text, verdicts_of
from conformance.run.report import Report

#: A comment on GitHub may have 65536 characters; failures beyond this are counted, not shown.
MAX_CHARACTERS = 60_000
_MAX_EVIDENCE, _MAX_OTHERS, _MAX_CHANGES = 3_000, 10, 20
_SPECIAL = re.compile(r"([\\`*_{}\[\]()#+!|~@:-])")


def markdown(report: Report, last: Report | None = None) -> str:
    """Return the report as GitHub's Markdown; what comes from the subject is shown as text, whatever it contains.

    With the `last` report it says what has changed, before it shows what failed.
    """
    torch_version = report.package_version("torch")
    lines = [
        f"### {'✅' if report.is_green else '❌'} ddp-conformance: {as_text(headline(report))}",
        "",
        f"subject {as_code(report.subject.name)}, backend {as_code(report.backend)}, torch {as_code(torch_version)}:"
        f" {as_text(report.counts)}",
        "",
        "| chapter | scenarios | subject | torch's DDP |",
        "|---|--:|---|---|",
    ]
    for chapter in dict.fromkeys(scenario.chapter for scenario in report.scenarios):
        lines.append(_row(chapter, [scenario for scenario in report.scenarios if scenario.chapter == chapter]))
    text = "\n".join(lines) + "\n" + (_changes(compare(last, report)) if last is not None else "")
    speed = _performance(report.performance)
    if len(text) + len(speed) <= MAX_CHARACTERS:
        text += speed
    failures = failed_requirements(report)
    for number, failed in enumerate(failures):
        block = _failure(failed)
        if len(text) + len(block) > MAX_CHARACTERS:
            left = counted(len(failures) - number, "more requirement")
            return f"{text}\n… and {left} that failed; the report holds them all.\n"
        text += block
    return text


def _changes(difference: ReportDiff) -> str:
    """Return what changed, folded away below one line that says how much."""
    told = [f"{len(changes)} {name}" for name, changes in difference.groups if changes]
    both = counted(difference.num_both, "scenario")
    if not told:
        return f"\nSince the last report no verdict changed in the {both} of both.\n"
    text = "\n".join(difference_lines(difference, most=_MAX_CHANGES))
    summary = as_text(f"Since the last report, of the {both} of both: {', '.join(told)}")
    return f"\n<details><summary>{summary}</summary>\n{_fenced(text)}\n</details>\n"


def _performance(ratios: Sequence[Ratio]) -> str:
    if not ratios:
        return ""
    lines = [
        "\n<details><summary>Step time, as a ratio</summary>\n",
        "| workload | options | compared with | ranks | median (quartiles) | rounds |",
        "|---|---|---|--:|---|--:|",
    ]
    for one in ratios:
        cells = (one.workload, one.variant, one.reference, one.world_size, one, one.rounds)
        lines.append(f"| {' | '.join(as_text(str(cell)) for cell in cells)} |")
    return "\n".join([*lines, "\n</details>\n"])


def _row(chapter: str, scenarios: list[Outcome]) -> str:
    native = verdicts_of(one.native for one in scenarios)
    cells = [chapter, str(len(scenarios)), subjects_text(scenarios), combined_text(native) if native else "-"]
    return f"| {' | '.join(map(as_text, cells))} |"


def _failure(failed: Failed) -> str:
    scenario, *others = failed.outcomes
    result = scenario.failed_result
    evidence = "\n".join(finding.explanation for finding in result.findings_that_tell if finding.explanation)
    if len(evidence) > _MAX_EVIDENCE:
        evidence = evidence[:_MAX_EVIDENCE] + "\n... (cut)"
    parts = [
        "\n<details><summary>",
        f"{result.verdict.value} {as_text(failed.requirement)}, {failed.count}: {as_code(shorten(scenario.why))}",
        "</summary>\n",
    ]
    if scenario.expectation is not None:
        known = scenario.expectation
        parts.append(f"\n{as_text(known.status)}: {as_text(known.describe(scenario.subject.verdict))}\n")
    parts.append(f"\n{as_code(scenario.id)}\n")
    names = ", ".join(as_code(other.id) for other in others[:_MAX_OTHERS])
    more = f" and {len(others) - _MAX_OTHERS} more" if len(others) > _MAX_OTHERS else ""
    also = f"\nAlso {names}{more}.\n" if others else ""
    return "".join(parts) + (_fenced(evidence) if evidence else "") + also + "\n</details>\n"


def _fenced(text: str) -> str:
    """Return a code block whose fence is longer than every run of backticks in it."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"\n{fence}text\n{text}\n{fence}\n"


def as_code(text: str) -> str:
    """Return `text` as code, in which nothing is markup."""
    return f"<code>{html.escape(_one_line(text) or '?').replace('|', '&#124;')}</code>"


def as_text(text: str) -> str:
    """Return `text` so that nothing in it is markup."""
    return _SPECIAL.sub(lambda match: f"&#{ord(match[1])};", html.escape(_one_line(text), quote=False))


def _one_line(text: str) -> str:
    return " ".join(text.split())
