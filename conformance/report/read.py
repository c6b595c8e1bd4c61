"""Reads `report.json` back: plain JSON in, frozen values out, and an error that names the field otherwise.

Nothing in a report is executed, imported or looked up: a report from a stranger is data.
"""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path

import msgspec

from conformance.codec import MismatchError, decode, parse_object
from conformance.errors import ReportError
from conformance.report.console import printable
from conformance.report.journal import JOURNAL, read_journal
from conformance.report.plain_file import read_plain
from conformance.run.outcome import Outcome
from conformance.run.report import SCHEMA_VERSION, Report

#: No name and no sentence has more.
_MOST_CHARACTERS = 2000


def read_report(path: Path) -> Report:
    """Return the report in `path`: a `report.json`, or the folder of a run; of a killed one, what its journal has.

    Raises:
        ReportError: the file cannot be read, is truncated, is of another schema version, or a field has the wrong type
            (the message names it, such as `scenarios[3].subject.verdict`), or no run can have reported it.

    """
    if path.is_dir():
        folder, path = path, path / "report.json"
        if not path.exists() and (folder / JOURNAL).exists():  # the run was killed
            report = read_journal(folder / JOURNAL)
            if mistake := next(chain(_unfit(report), _impossible(report)), ""):
                raise ReportError(f"{folder / JOURNAL}: {mistake}")
            return report
    return report_in(read_plain(path), path)


def report_in(content: bytes, path: Path) -> Report:
    """Return the report in what the file `path` holds; raises `ReportError` as `read_report` does."""
    try:
        return parse_report(content)
    except ReportError as error:
        raise ReportError(f"{path}: {error}") from error


def parse_report(content: str | bytes) -> Report:
    """Return the report in `content`; raises `ReportError` as `read_report` does.

    Scenarios are parsed one by one: all of them at once, as JSON data, take several times the memory of the report.
    """
    try:
        fields = msgspec.json.decode(content, type=dict[str, msgspec.Raw])
        scenarios = msgspec.json.decode(fields.get("scenarios", b"[]"), type=list[msgspec.Raw])
        fields |= {"scenarios": msgspec.Raw(b"[]")} if "scenarios" in fields else {}
        rest = ",".join(f"{json.dumps(name)}: {_text(raw)}" for name, raw in fields.items())
        head = parse_object(f"{{{rest}}}", "a report")
        version = head.get("schema_version")
        if type(version) is not int or version != SCHEMA_VERSION:
            raise ReportError(
                f"schema_version {version!r} is not supported; this release of ddp-conformance reads {SCHEMA_VERSION}"
            )
        if "usual" in head:
            raise ReportError("it is packed: `ddp-conformance report plain` of release 0.2.0 writes it as is read here")
        report = decode(head, Report)
        report = replace(report, scenarios=tuple(_outcome(index, raw) for index, raw in enumerate(scenarios)))
    except MismatchError as error:
        raise ReportError(str(error)) from error
    except (ValueError, RecursionError) as error:
        raise ReportError(f"not valid JSON: {error}".replace("JSON: not valid JSON", "JSON")) from error
    if mistake := next(chain(_unfit(report), _impossible(report)), ""):
        raise ReportError(mistake)
    return report


def _outcome(index: int, raw: msgspec.Raw) -> Outcome:
    try:
        return decode(parse_object(_text(raw), "a scenario"), Outcome)
    except MismatchError as error:
        raise MismatchError(f"scenarios[{index}].{error}") from error


def _text(raw: msgspec.Raw) -> str:
    return bytes(raw).decode()


def _impossible(report: Report) -> Iterator[str]:
    """Yield what no run can have reported: a scenario with two outcomes, a duration or a count below zero."""
    for scenario_id, number in Counter(one.id for one in report.scenarios).items():
        if number > 1:
            yield f"scenarios: {scenario_id} is there {number} times, a run reports each once"
    for name, value in _amounts(report):
        if value < 0:
            yield f"{name}: must be >= 0, got {value}"
    for index, scenario in enumerate(report.scenarios):
        for operation, counts in scenario.tried.items():
            for name, found in counts.items():
                if len(found) != 2 or not 0 <= found[1] <= found[0]:
                    where = f"scenarios[{index}].tried.{operation}.{name}"
                    yield f"{where}: must be how many cells there are and how many are wrong, got {list(found)}"


def _unfit(report: Report) -> Iterator[str]:
    """Yield which names are not one line of text, and which scenarios to replay are none."""
    for path, name in _names(report):
        if len(name) > _MOST_CHARACTERS or printable(name) != name:
            yield f"{path}: must be a line of at most {_MOST_CHARACTERS} printable characters, got {name!r:.80}"
    for index, scenario in enumerate(report.scenarios):
        for name, kind in (("options", dict), ("arguments", dict), ("needs", list)):
            value = (scenario.replay or {}).get(name, kind())
            if type(value) is not kind or not all(type(one) is str for one in value):
                yield f"scenarios[{index}].replay.{name}: must be as a scenario has it, got {value!r:.80}"


def _names(report: Report) -> Iterator[tuple[str, str]]:
    """Yield the path and the value of every name; other texts may have several lines."""
    subject, selection = report.subject, report.selection
    yield from (("subject.name", subject.name), ("subject.target", subject.target), ("subject.source", subject.source))
    yield from (("backend", report.backend), ("specification", report.specification))
    yield from (("selection.profile", selection.profile), ("selection.order", selection.order))
    yield from (("selection.shard", selection.shard), *(("selection.ids", one) for one in selection.ids))
    yield from (("median_warm_scenario_ms", name) for name in report.median_warm_scenario_ms)
    for one in report.requirements:
        yield from (("requirements.id", one.id), ("requirements.chapter", one.chapter))
        yield from (("requirements.level", one.level), ("requirements.statement", one.statement))
    for each in report.scenarios:
        yield from (("scenarios.id", each.id), ("scenarios.contaminated_by", each.contaminated_by))
        yield from (("scenarios.requirements", name) for name in each.requirements)
        tried = each.tried.items()
        yield from (("scenarios.tried", name) for operation, cells in tried for name in (operation, *cells))
        yield from (("scenarios.results.subject", result.subject) for result in each.results)


def _amounts(report: Report) -> Iterator[tuple[str, float]]:
    totals = report.totals
    yield "duration_s", report.duration_s
    for world_size, each in report.median_warm_scenario_ms.items():
        yield f"median_warm_scenario_ms.{world_size}", each
    yield "totals.selected", totals.selected
    yield "totals.scenarios", totals.scenarios
    yield "totals.requirements", totals.requirements
    for column, counts in (("subject", totals.subject), ("native", totals.native)):
        for verdict, count in counts.items():
            yield f"totals.{column}.{verdict}", count
    for index, requirement in enumerate(report.requirements):
        yield f"requirements[{index}].scenarios", requirement.scenarios
    for index, scenario in enumerate(report.scenarios):
        yield f"scenarios[{index}].world_size", scenario.world_size
        for column, result in (("subject", scenario.subject), ("native", scenario.native)):
            if result is not None:
                yield f"scenarios[{index}].{column}.duration_ms", result.duration_ms
                yield f"scenarios[{index}].{column}.num_collectives", result.num_collectives
