"""JUnit XML, which CI systems show as tests: one suite per chapter, one case per scenario."""

import re
from collections.abc import Mapping
from xml.etree import ElementTree

from conformance.report.causes import cause_of, statements_of
from conformance.run.outcome import Outcome
from conformance.run.report import Report
from conformance.verdict import ScenarioResult, Verdict

#: What XML 1.0 cannot hold, not even escaped; messages of crashed ranks are full of it.
_ILLEGAL = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit_xml(report: Report) -> str:
    """Return the report as JUnit XML.

    FAIL, HANG and CRASH are failures, HARNESS_ERROR is an error, and the message of either begins with its cause.
    UNSUPPORTED, UNKNOWN and failures that were expected are skipped cases with the reason as their message. A report
    that is not complete gets an error of its own, because a CI system that only counts failures would show it as green.
    """
    root, statements = ElementTree.Element("testsuites", name="ddp-conformance"), statements_of(report)
    for chapter in dict.fromkeys(scenario.chapter for scenario in report.scenarios):
        suite = ElementTree.SubElement(root, "testsuite", name=_legal(chapter))
        for scenario in report.scenarios:
            if scenario.chapter == chapter:
                _add_case(suite, scenario, statements)
    if not report.is_complete:
        suite = ElementTree.SubElement(root, "testsuite", name="run")
        case = ElementTree.SubElement(suite, "testcase", classname="run", name="complete", time="0")
        message = f"{report.num_not_run} scenario(s) did not run"
        ElementTree.SubElement(case, "error", type="INCOMPLETE", message=message)
    for suite in root:
        _count(suite)
    _count(root)
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _add_case(suite: ElementTree.Element, outcome: Outcome, statements: Mapping[str, str]) -> None:
    result = outcome.failed_result
    case = ElementTree.SubElement(
        suite,
        "testcase",
        classname=_legal(f"{outcome.chapter}.{outcome.leading_requirement}"),
        name=_legal(outcome.id),
        time=f"{outcome.subject.duration_ms / 1000:.3f}",
    )
    message = result.summary
    if outcome.expectation is not None:
        excuse = outcome.expectation
        message = f"{excuse.status}: {excuse.describe(outcome.subject.verdict)}. {message}".rstrip()
    if outcome.is_failure:
        cause = cause_of(outcome, statements)
        if not outcome.is_unexpected_pass and cause.title not in message:
            message = f"{cause.title} {message}"
        kind = "error" if result.verdict is Verdict.HARNESS_ERROR else "failure"
        problem = ElementTree.SubElement(case, kind, type=result.verdict.value, message=_legal(message))
        problem.text = _legal("\n".join(filter(None, (cause.title, cause.remedy, _evidence(result)))))
    elif result.verdict is not Verdict.PASS:
        ElementTree.SubElement(case, "skipped", message=_legal(f"{result.verdict.value}: {message}"))


def _evidence(result: ScenarioResult) -> str:
    parts = [f"subject={result.subject}"]
    for finding in result.deciding_findings:
        parts += [f"{finding.verdict.value}: {finding.summary}", finding.explanation]
    parts += [f"rank {rank.rank}: {rank.fate}\n{rank.stderr}".rstrip() for rank in result.ranks]
    return "\n".join(part for part in parts if part)


def _count(suite: ElementTree.Element) -> None:
    cases = list(suite.iter("testcase"))
    suite.set("tests", str(len(cases)))
    for plural, kind in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(plural, str(sum(case.find(kind) is not None for case in cases)))
    suite.set("time", f"{sum(float(case.get('time', 0)) for case in cases):.3f}")


def _legal(text: str) -> str:
    return _ILLEGAL.sub("", text)
