"""A report in one line, and as a badge."""

import re

from jinja2 import Environment

from conformance.checkers.explanation import counted
from conformance.run.outcome import reasons_unsupported
from conformance.run.report import Report
from conformance.verdict import Verdict

_GREEN, _RED, _GREY = "#2f7d4f", "#b3342d", "#666"
_CHARACTER_WIDTH = 6.6  # of 11 px Verdana, about; textLength makes the browser fit the text to it
_BADGE = """\
<svg xmlns="http://www.w3.org/2000/svg" width="{{ width }}" height="20" role="img" aria-label="{{ left }}: {{ right }}">
<title>{{ left }}: {{ right }}</title>
<clipPath id="round"><rect width="{{ width }}" height="20" rx="3"/></clipPath>
<g clip-path="url(#round)">
<rect width="{{ left_width }}" height="20" fill="#444"/>
<rect x="{{ left_width }}" width="{{ width - left_width }}" height="20" fill="{{ colour }}"/>
</g>
<g fill="#fff" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11">
<text x="6" y="14" textLength="{{ left_width - 12 }}">{{ left }}</text>
<text x="{{ left_width + 6 }}" y="14" textLength="{{ width - left_width - 12 }}">{{ right }}</text>
</g>
</svg>
"""


def headline(report: Report) -> str:
    """Return the answer in a few words; it claims conformance at a level only for a certified run of it."""
    failed, total = len(report.failures) - report.num_unexpected_passes, len(report.scenarios)
    if not report.is_complete:
        return f"incomplete, {report.num_not_run} of {counted(report.totals.selected, 'scenario')} did not run"
    if report.failures:
        unexpected = counted(report.num_unexpected_passes, "unexpected pass", "es")
        return ", ".join(
            [f"{failed} of {total} failed"] * bool(failed) + [unexpected] * bool(report.num_unexpected_passes)
        )
    if report.contaminated:
        return f"{len(report.contaminated)} of {total} contaminated"
    if not report.is_green:
        return "nothing passed"
    known = f", {counted(report.num_excused, 'known failure')}" if report.num_excused else ""
    if report.certified:
        return f"conformant at {report.selection.profile}{_version(report)}, {counted(total, 'scenario')}"
    return f"{requirements_kept(report)}{known}"


def requirements_kept(report: Report) -> str:
    """Return e.g. `keeps 31 of 83 requirements, 52 need capabilities that acme does not declare`."""
    asked = counted(len(report.owed), "requirement")
    said = [f"keeps {_number(report, Verdict.PASS)} of {asked}{_version(report)}"]
    if undeclared := _number(report, Verdict.UNSUPPORTED):
        need = "needs" if undeclared == 1 else "need"
        said.append(f"{undeclared} {need} capabilities that {' or '.join(_undeclared_by(report))} does not declare")
    if unknown := _number(report, Verdict.UNKNOWN) + _number(report, Verdict.HARNESS_ERROR):
        said.append(f"{unknown} could not be judged")
    return ", ".join(said)


def _undeclared_by(report: Report) -> list[str]:
    """Return what lacks capabilities that scenarios need: `it`, the judged subject, or the backend below it by name."""
    reasons = " ".join(reason for reason, _ in reasons_unsupported(report.scenarios))
    names = sorted(set(re.findall(r"(\S+) declares no ", reasons)), key=lambda name: name != report.subject.name)
    return ["it" if name == report.subject.name else name for name in names] or ["it"]


def _version(report: Report) -> str:
    return f" (specification {report.specification})" if report.specification else ""


def _number(report: Report, verdict: Verdict) -> int:
    return sum(one.subject is verdict for one in report.owed)


def badge_svg(report: Report) -> str:
    """Return a badge for a README, drawn without any other file."""
    left = f"backend conformance of {report.short_name}" if report.is_about_backend else "DDP conformance"
    right = headline(report)
    colour = _GREEN if report.is_green else _RED if report.failures else _GREY
    left_width, right_width = (round(len(text) * _CHARACTER_WIDTH) + 12 for text in (left, right))
    template = Environment(autoescape=True).from_string(_BADGE)
    return template.render(left=left, right=right, left_width=left_width, width=left_width + right_width, colour=colour)
