"""Markdown for a comment below a pull request: the answer and the worst causes, the rest folded away."""

import re
from collections.abc import Sequence

from conformance.bench.ratio import Ratio, heading
from conformance.checkers.explanation import counted, shorten, some
from conformance.report.causes import Cause, causes_in, statements_of
from conformance.report.console import printable
from conformance.report.diff import ReportDiff, compare, difference_lines
from conformance.report.failure import run_command
from conformance.report.groups import all_groups, groups_of
from conformance.report.headline import headline
from conformance.run.outcome import Outcome, combined_text, subjects_text, verdicts_of
from conformance.run.report import Report

#: A comment on GitHub may have 65536 characters; failures beyond this are counted, not shown.
MAX_CHARACTERS = 60_000
_MAX_EVIDENCE, _MAX_OTHERS, _MAX_CHANGES = 3_000, 10, 20
_WORST = 3  # causes above the fold
_SPECIAL = re.compile(r"[\\`*_{}\[\]()#+!|~@:.$<>&-]")
#: GitHub looks for names (@) and issues (#) after it has read entities: a space without width parts them.
_APART = "&#8203;"


def markdown(report: Report, last: Report | None = None) -> str:
    """Return the report as GitHub's Markdown; what comes from the subject is shown as text, whatever it contains.

    What fails comes first, by cause: with the `last` report what has regressed since, and then what failed before.
    Below a dozen lines everything else is folded away.
    """
    torch_version = report.package_version("torch")
    difference = compare(last, report) if last is not None else None
    causes, told = _causes(report, difference)
    lines = [
        f"### {'✅' if report.is_green else '❌'} ddp-conformance: {as_text(headline(report))}",
        "",
        f"{as_code(report.tested)}, torch {as_code(torch_version)}: {as_text(report.counts)}",
        *told,
    ]
    text = "\n".join(lines) + "\n"
    for block in (_chapters(report), _changes(difference) if difference else "", _performance(report.performance)):
        if len(text) + len(block) <= MAX_CHARACTERS:
            text += block
    for number, cause in enumerate(causes):
        block = _evidence(cause)
        if len(text) + len(block) > MAX_CHARACTERS:
            left = counted(len(causes) - number, "more cause")
            return f"{text}\n… and {left} of failures; the report holds them all.\n"
        text += block
    return text


def _causes(report: Report, difference: ReportDiff | None) -> tuple[tuple[Cause, ...], list[str]]:
    """Return the causes of the failures, what regressed before the others, and the lines about the worst of them."""
    regressed = {change.id for change in difference.regressed} if difference is not None else set()
    statements = statements_of(report)
    recent = causes_in((one for one in report.failures if one.id in regressed), statements)
    older = causes_in((one for one in report.failures if one.id not in regressed), statements)
    causes = (*recent, *older)
    if not causes:
        return (), []
    title = f"{counted(len(causes), 'cause')} of {counted(len(report.failures), 'failure')}"
    if difference is not None:
        title += f"; {counted(len(regressed), 'scenario')} regressed since the last report"
    lines = ["", f"**{as_text(title)}**", ""]
    for number, cause in enumerate(causes[:_WORST], start=1):
        new = "regressed: " if number <= len(recent) else ""
        lines.append(
            f"{number}. {new}{as_text(cause.title)} {as_text(cause.extent)}: {as_code(shorten(cause.best.why))}"
        )
    again = run_command(causes[0].best.id, report.subject.typed, report.backend)
    return causes, [*lines, "", f"Again: {as_code(again)}"]


def _chapters(report: Report) -> str:
    beside = any(verdicts_of(one.native for one in report.scenarios))
    judged = [as_code(report.subject.name), *(["torch's DDP"] if beside else [])]
    lines = [
        "\n<details><summary>Chapters</summary>\n",
        f"| chapter | requirements passed | scenarios | {' | '.join(judged)} |",
        f"|---|---|--:{'|---' * len(judged)}|",
    ]
    groups = {group.chapter: group for group in groups_of(report)}
    chapters = list(dict.fromkeys(scenario.chapter for scenario in report.scenarios))
    for chapter in chapters:
        scenarios = [scenario for scenario in report.scenarios if scenario.chapter == chapter]
        lines.append(_row(chapter, str(groups.get(chapter, "")), scenarios, beside=beside))
    if len(chapters) > 1:
        lines.append(_row("all", str(all_groups(report)), report.scenarios, beside=beside))
    return "\n".join([*lines, "\n</details>\n"])


def _changes(difference: ReportDiff) -> str:
    """Return what changed, folded away below one line that says how much."""
    told = [f"{len(changes)} {name}" for name, changes in difference.groups if changes]
    both = counted(difference.num_both, "scenario")
    if not told:
        return f"\nSince the last report no verdict changed in the {both} of both.\n"
    text = "\n".join(difference_lines(difference, most=_MAX_CHANGES))
    summary = as_text(f"Since the last report, of the {both} of both: {', '.join(told)}")
    return f"\n<details><summary>{summary}</summary>\n{fenced(text)}\n</details>\n"


def _performance(ratios: Sequence[Ratio]) -> str:
    if not ratios:
        return ""
    lines = [
        f"\n<details><summary>{as_text(heading(ratios))}, as ratios</summary>\n",
        "| workload | options | compared with | ranks | median (quartiles) | rounds |",
        "|---|---|---|--:|---|--:|",
    ]
    for one in ratios:
        cells = (one.workload, one.variant, one.reference, one.world_size, one, one.rounds)
        lines.append(f"| {' | '.join(as_text(str(cell)) for cell in cells)} |")
    return "\n".join([*lines, "\n</details>\n"])


def _row(chapter: str, passed: str, scenarios: Sequence[Outcome], *, beside: bool) -> str:
    """Return the row of a chapter, with torch's DDP where that ran `beside` what is judged."""
    native = verdicts_of(one.native for one in scenarios)
    cells = [chapter, passed, str(len(scenarios)), subjects_text(scenarios)]
    if beside:
        cells.append(combined_text(native) if native else "-")
    return f"| {' | '.join(map(as_text, cells))} |"


def _evidence(cause: Cause) -> str:
    scenario, *others = cause.outcomes
    result = scenario.failed_result
    evidence = "\n".join(finding.explanation for finding in result.deciding_findings if finding.explanation)
    if len(evidence) > _MAX_EVIDENCE:
        evidence = evidence[:_MAX_EVIDENCE] + "\n... (cut)"
    parts = [
        "\n<details><summary>",
        f"{result.verdict.value}: {as_text(cause.title)} {as_text(cause.extent)}",
        "</summary>\n",
        f"\n{as_code(shorten(scenario.why))}\n",
    ]
    if cause.remedy:
        parts.append(f"\n{as_text(cause.remedy)}\n")
    if scenario.expectation is not None:
        known = scenario.expectation
        parts.append(f"\n{as_text(known.status)}: {as_text(known.describe(scenario.subject.verdict))}\n")
    parts.append(f"\n{as_code(scenario.id)}\n")
    also = f"\nAlso {some([as_code(other.id) for other in others], _MAX_OTHERS)}.\n" if others else ""
    return "".join(parts) + (fenced(evidence) if evidence else "") + also + "\n</details>\n"


def fenced(text: str) -> str:
    """Return a code block whose fence is longer than every run of backticks in it."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"\n{fence}text\n{printable(text, lines=True)}\n{fence}\n"


def as_code(text: str) -> str:
    """Return `text` as code, in which nothing is markup."""
    return f"<code>{as_text(text) or '?'}</code>"


def as_text(text: str) -> str:
    """Return `text` so that nothing in it is markup, and GitHub finds no name, number or address in it to link to."""
    text = printable(" ".join(text.split()))
    return _SPECIAL.sub(lambda match: f"&#{ord(match[0])};{_APART * (match[0] in '@#')}", text)
