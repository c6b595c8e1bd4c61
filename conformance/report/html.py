"""One self-contained HTML page of one or more reports: no network, no file beside it, nothing that a report can run.

Every string of a report is escaped by the template. Should that ever fail, the page's Content-Security-Policy still
lets no script run but its own, which is named by its hash.
"""

import base64
import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from conformance.bench.ratio import heading
from conformance.checkers.explanation import ranks as names_of
from conformance.checkers.explanation import shorten
from conformance.errors import ReportError
from conformance.report.blame import blamed
from conformance.report.causes import Cause, causes_of
from conformance.report.failure import advice_on, replay_command, run_command
from conformance.report.groups import groups_of
from conformance.report.headline import headline
from conformance.report.operations import OperationMatrix, operation_matrix
from conformance.report.ratio_chart import ratio_chart
from conformance.report.timeline import Timeline, timeline
from conformance.report.words import CHECKERS
from conformance.run.outcome import NATIVE, Outcome, combine, evidence_of, verdicts_of
from conformance.run.report import Report, RequirementSummary
from conformance.spec.catalogue import load_catalogue
from conformance.verdict import RankFate, ScenarioResult, Verdict

_ID = re.compile(r"\b[A-Z][A-Z0-9]*-[0-9]{2,3}\b")
_TEMPLATES = Path(__file__).parent / "templates"

#: So many causes are listed at once; the others are one click away, so that the map of the chapters stays in sight.
_NUM_CAUSES = 7

#: So many results of a requirement with one verdict are shown whole, and one of torch's DDP, which runs beside. Beyond
#: `_MOST_WHOLE` results it is one for everybody: a page of thousands of failures must open at once.
_NUM_WHOLE, _MOST_WHOLE = 3, 100


@dataclass(frozen=True, slots=True)
class Column:
    """One subject of the matrix: a report's own, or torch's DDP that ran beside it; `folder` is the report's."""

    name: str
    report: Report
    is_native: bool
    folder: Path | None = None

    def result(self, scenario: Outcome) -> ScenarioResult | None:
        """Return this column's result in `scenario`."""
        return scenario.native if self.is_native else scenario.subject


@dataclass(frozen=True, slots=True)
class Entry:
    """One result that is not PASS, to be shown with its evidence.

    `alike` are other scenarios of the requirement with the same verdict, each with why it came to that.
    """

    anchor: str
    column: Column
    scenario: Outcome
    result: ScenarioResult
    alike: list[str] = field(default_factory=list)

    @property
    def requirement(self) -> str:
        """The id of the requirement that is to blame, or that the scenario is about."""
        return blamed(self.scenario) if self.is_failure else self.scenario.leading_requirement

    @property
    def statement(self) -> str:
        """The requirement as a sentence; empty where the report does not hold it."""
        found = (one.statement for one in self.column.report.requirements if one.id == self.requirement)
        return next(found, "")

    @property
    def why(self) -> str:
        """The reason of the verdict, in one sentence."""
        return self.scenario.why if self.is_failure else self.result.summary

    @property
    def advice(self) -> str:
        """What to do about something that the subject declares and lacks or refuses."""
        return advice_on(self.result, self.scenario.replay)

    @property
    def ranks(self) -> tuple[RankFate, ...]:
        """How the ranks ended."""
        return self.result.ranks

    @property
    def is_failure(self) -> bool:
        """Whether the result keeps the report from being green."""
        return self.scenario.is_failure and self.result is self.scenario.failed_result

    @property
    def timeline(self) -> Timeline | None:
        """The ranks' collectives, drawn."""
        return timeline(self.ranks)

    @property
    def texts(self) -> list[tuple[str, str]]:
        """What the ranks left, each under a title; ranks that left the same share one."""
        stacks = _shared((rank.stack, rank.rank) for rank in self.ranks)
        errors = _shared((rank.stderr, rank.rank) for rank in self.ranks)
        return [(f"Stack of {who}", text) for who, text in stacks] + [
            (f"Standard error of {who}", text) for who, text in errors
        ]

    @property
    def is_expected(self) -> bool:
        """Whether the result is a failure that was known."""
        return not self.column.is_native and self.scenario.expectation is not None and not self.scenario.is_failure

    @property
    def again(self) -> str:
        """The command that runs the scenario again: that of the terminal where the report keeps the scenario."""
        report, folder = self.column.report, self.column.folder
        if self.is_failure and folder is not None:
            # Of where the page was made, a reader elsewhere has only the folder itself.
            given = Path(folder.name) if folder.is_absolute() else folder
            return replay_command(self.scenario.id, report.subject.typed, report.backend, given)
        subject = NATIVE if self.column.is_native else report.subject.typed
        return run_command(self.scenario.id, subject, report.backend)


@dataclass(frozen=True, slots=True)
class Cell:
    """One requirement in one column: the verdict, how many scenarios have it, and where the first is shown."""

    verdict: Verdict | None
    count: str = ""
    anchor: str = ""
    is_expected: bool = False


@dataclass(frozen=True, slots=True)
class MatrixRow:
    """One requirement of the matrix."""

    requirement: RequirementSummary
    cells: tuple[Cell, ...]

    @property
    def sources(self) -> tuple[str, ...]:
        """What the sentence rests on; empty for a sentence that this release does not have."""
        mine, known = self.requirement, load_catalogue()
        found = known.requirement(mine.id) if mine.id in known else None
        return found.source if found is not None and found.statement == mine.statement else ()

    @property
    def verdicts(self) -> str:
        """The verdicts of all cells, for the page's filter."""
        return " ".join(sorted({cell.verdict.value for cell in self.cells if cell.verdict is not None}))


def html_page(reports: Sequence[Report], folders: Sequence[Path] = ()) -> str:
    """Return the page; every report gives a column, and torch's DDP one where the first report has it.

    `folders` are where the reports are kept, for the commands that replay failures. Raises `ReportError` for no report
    at all.
    """
    if not reports:
        raise ReportError("a page needs at least one report")
    columns = _columns(reports, folders or [None] * len(reports))
    entries = tuple(_entries(columns))
    heads, heat = _heat_map(columns)
    chapters = _chapters(columns, entries)
    linked = _Linked(frozenset(row.requirement.id for rows in chapters.values() for row in rows))
    own = [column for column in columns if not column.is_native]
    script, style = _asset("report.js"), _asset("report.css")
    return (
        _jinja()
        .get_template("report.html")
        .render(
            reports=reports,
            columns=columns,
            chapters=chapters,
            causes=_cause_views(columns, entries),
            num_causes=_NUM_CAUSES,
            linked=linked,
            heads=heads,
            heat=heat,
            groups=[(column, {group.chapter: group for group in groups_of(column.report)}) for column in own],
            matrices=[(column, matrix) for column in own if (matrix := _matrix(column)).rows],
            failures=[entry for entry in entries if entry.is_failure],
            others=[entry for entry in entries if not entry.is_failure],
            verdicts=[verdict for verdict in Verdict if _occurs(verdict, columns)],
            totals=[(column, _verdicts(column, column.report.scenarios)) for column in columns],
            told={finding.checker for entry in entries for finding in entry.result.deciding_findings},
            checkers=CHECKERS,
            ratio_chart=ratio_chart,
            heading=heading,
            script=Markup(script),  # our own files, not data
            style=Markup(style),
            script_hash=_hash(script),
            style_hash=_hash(style),
        )
    )


def _columns(reports: Sequence[Report], folders: Sequence[Path | None]) -> tuple[Column, ...]:
    short = [report.short_name for report in reports]
    names = short if len(set(short)) == len(short) else [report.subject.name for report in reports]
    columns = [
        Column(name, report, is_native=False, folder=folder)
        for name, report, folder in zip(names, reports, folders, strict=True)
    ]
    if all(column.name != NATIVE for column in columns):
        columns += [Column("torch's DDP", report, is_native=True) for report in reports[:1] if report.native_verdicts]
    return tuple(columns)


def _entries(columns: Sequence[Column]) -> list[Entry]:
    """Return what is to be explained: the gravest first, the subjects' own before torch's.

    Of a requirement that comes to one verdict in many scenarios a few are shown whole, and the others named there.
    """
    entries: list[Entry] = []
    place, last = _places(columns), sum(len(column.report.scenarios) for column in columns)
    for column in columns:
        whole: dict[tuple[str, Verdict, bool, bool], list[Entry]] = {}
        for scenario in sorted(column.report.scenarios, key=lambda one: place.get((id(column.report), one.id), last)):
            result = column.result(scenario)
            if result is None or (result.verdict is Verdict.PASS and (column.is_native or not scenario.is_failure)):
                continue
            entry = Entry(f"entry-{len(entries) + 1}", column, scenario, result)
            several = whole.setdefault((entry.requirement, result.verdict, entry.is_failure, entry.is_expected), [])
            if len(several) < (1 if column.is_native or len(entries) >= _MOST_WHOLE else _NUM_WHOLE):
                several.append(entry)
                entries.append(entry)
            else:
                several[-1].alike.append(f"{scenario.id}: {shorten(entry.why)}")
    order = list(Verdict)
    return sorted(
        entries,
        key=lambda one: (
            one.column.is_native, one.is_expected, -order.index(one.result.verdict),
            place.get((id(one.column.report), one.scenario.id if one.is_failure else ""), 0),
        ),
    )  # fmt: skip


def _places(columns: Sequence[Column]) -> Mapping[tuple[int, str], int]:
    """Return at which place a reader should look at each failure of a report: by cause, the best evidence first."""
    reports = {id(column.report): column.report for column in columns}
    places: dict[tuple[int, str], int] = {}
    for key, report in reports.items():
        for cause in causes_of(report):
            for outcome in cause.outcomes:
                places[key, outcome.id] = len(places)
    return places


@dataclass(frozen=True, slots=True)
class CauseView:
    """A cause with the column that it is about, and where its best evidence is shown."""

    cause: Cause
    column: Column
    anchor: str


def _cause_views(columns: Sequence[Column], entries: Sequence[Entry]) -> list[CauseView]:
    anchors = {(id(one.column), one.scenario.id): one.anchor for one in entries}
    return [
        CauseView(cause, column, anchors.get((id(column), cause.best.id), "failures"))
        for column in columns
        if not column.is_native
        for cause in causes_of(column.report)
    ]


@dataclass(frozen=True, slots=True)
class HeatRow:
    """One chapter of the map: the verdicts of its scenarios, for each column and world size."""

    chapter: str
    cells: tuple[Cell, ...]


def _heat_map(columns: Sequence[Column]) -> tuple[list[tuple[Column, int]], list[HeatRow]]:
    """Return what the map's columns are, and a row per chapter."""
    sizes = sorted({one.world_size for column in columns for one in column.report.scenarios})
    heads = [(column, size) for column in columns for size in sizes]
    chapters = dict.fromkeys(one.chapter for column in columns for one in column.report.scenarios)
    rows = []
    for chapter in chapters:
        cells = []
        for column, size in heads:
            here = [one for one in column.report.scenarios if (one.chapter, one.world_size) == (chapter, size)]
            verdicts = _verdicts(column, [one for one in here if column.is_native or not one.is_excused])
            cells.append(Cell(combine(verdicts), _count(verdicts), f"chapter-{chapter}") if verdicts else Cell(None))
        rows.append(HeatRow(chapter, tuple(cells)))
    return heads, rows


def _matrix(column: Column) -> OperationMatrix:
    return operation_matrix(column.report.scenarios)


def _shared(texts: Iterable[tuple[str, int]]) -> list[tuple[str, str]]:
    """Return every text once, with the ranks that have it."""
    ranks: dict[str, list[int]] = {}
    for text, rank in texts:
        if text:
            ranks.setdefault(text, []).append(rank)
    return [(names_of(who), text) for text, who in ranks.items()]


def _chapters(columns: Sequence[Column], entries: Sequence[Entry]) -> Mapping[str, list[MatrixRow]]:
    requirements: dict[str, RequirementSummary] = {}
    for column in columns:
        for requirement in column.report.requirements:
            requirements.setdefault(requirement.id, requirement)
    evidence = [evidence_of(column.report.scenarios) for column in columns]
    chapters: dict[str, list[MatrixRow]] = {}
    for requirement in requirements.values():
        cells = tuple(
            _cell(requirement.id, column, about.get(requirement.id, []), entries)
            for column, about in zip(columns, evidence, strict=True)
        )
        chapters.setdefault(requirement.chapter, []).append(MatrixRow(requirement, cells))
    return chapters


def _cell(requirement_id: str, column: Column, relevant: Sequence[Outcome], entries: Sequence[Entry]) -> Cell:
    excused = [] if column.is_native else [one for one in relevant if one.is_excused]
    total = sum(_verdicts(column, relevant).values())
    if not total:
        return Cell(None)
    verdicts = _verdicts(column, [one for one in relevant if not (excused and one.is_excused)] or excused)
    verdict = combine(verdicts)
    count = _count(verdicts) + (f", {len(excused)} expected to fail" if excused else "")
    for entry in entries:
        if (
            entry.column is column and (about := entry.scenario.about(requirement_id)) is not None
            and (_verdicts(column, [about])[verdict] or (entry.is_expected and verdict is Verdict.PASS))
        ):  # fmt: skip
            return Cell(verdict, count, entry.anchor, is_expected=len(excused) == total)
    return Cell(verdict, count)


def _count(verdicts: Mapping[Verdict, int]) -> str:
    """Return how many scenarios have the verdict that is shown: `4 of 52, 40 unsupported`."""
    verdict, skipped = combine(verdicts), verdicts.get(Verdict.UNSUPPORTED, 0)
    if verdict is Verdict.UNSUPPORTED:
        return str(skipped)
    count = f"{verdicts[verdict]} of {sum(verdicts.values())}"
    return f"{count}, {skipped} unsupported" if skipped else count


def _verdicts(column: Column, scenarios: Sequence[Outcome]) -> Counter[Verdict]:
    return verdicts_of(map(column.result, scenarios))


def _occurs(verdict: Verdict, columns: Sequence[Column]) -> bool:
    return any(_verdicts(column, column.report.scenarios)[verdict] for column in columns)


@cache
def _jinja() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    environment.globals.update(headline=headline, shorten=shorten)
    environment.filters["with_code"] = _with_code
    return environment


@dataclass(frozen=True, slots=True)
class _Linked:
    """Makes the ids of requirements that the matrix has links to their rows there; the text is escaped."""

    ids: frozenset[str]

    def __call__(self, text: str) -> Markup:
        def link(match: re.Match[str]) -> str:
            return f'<a href="#requirement-{match[0]}">{match[0]}</a>' if match[0] in self.ids else match[0]

        return Markup(_ID.sub(link, str(escape(text))))


def _with_code(text: str) -> Markup:
    """Return `text` escaped, with every part in backticks as a `<code>` element."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))


@cache
def _asset(name: str) -> str:
    return "\n" + (_TEMPLATES / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
