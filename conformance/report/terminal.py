"""What a person sees of a run when it has ended: the failures, the chapters and the totals."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from conformance.bench.curve import Curve
from conformance.bench.operations import Timed, sized
from conformance.bench.ratio import ONE_BY_ONE, Ratio, heading, overheads
from conformance.checkers.explanation import counted, shorten
from conformance.checkers.unconnected import TRIED_AGAIN
from conformance.report.causes import Cause, Kind, causes_of, in_short
from conformance.report.console import printable
from conformance.report.failure import failure_path, failure_text, last_failed_command, replay_command
from conformance.report.groups import all_groups, groups_of
from conformance.report.headline import requirements_kept
from conformance.report.lines import broken, print_evidence, print_sentence
from conformance.run.outcome import (
    Outcome,
    combine,
    combined_text,
    counts_text,
    evidence_of,
    reasons_unsupported,
    subjects_text,
    verdicts_of,
)
from conformance.run.report import Report, RequirementSummary
from conformance.spec.catalogue import Catalogue
from conformance.verdict import Verdict

STYLES = {
    Verdict.PASS: "green",
    Verdict.UNSUPPORTED: "dim",
    Verdict.UNKNOWN: "yellow",
    Verdict.FAIL: "red",
    Verdict.HANG: "magenta",
    Verdict.CRASH: "bold red",
    Verdict.HARNESS_ERROR: "bold white on red",
}

#: So many causes of failures are shown with their evidence at the end of a run.
NUM_WHOLE = 3
_WIDTH_OF_EVIDENCE = 240  # that of the first line of each other one
_NUM_REASONS = 5  # why scenarios were UNSUPPORTED


def print_report(
    console: Console, report: Report, catalogue: Catalogue, folder: Path, *, verbose: bool = False, quiet: bool = False
) -> None:
    """Print failures, a line per chapter and totals; `folder` is where the report's files are.

    With `verbose` there is a line per requirement instead, and the evidence of every cause; with
    `quiet` there are no chapters.
    """
    if verbose:
        console.print(requirements_table(report, catalogue))
        console.print()
    print_failures(console, report, catalogue, folder, whole=len(report.failures) if verbose else NUM_WHOLE)
    if not verbose and not quiet:
        console.print(chapters_table(report, catalogue))
        console.print()
    if report.performance:
        console.print(f"{heading(report.performance)}, as ratios:")
        console.print(ratios_table(report.performance))
    print_totals(console, report, notes=verbose)


def chapters_table(report: Report, catalogue: Catalogue) -> Table:
    """Return the table with one row per chapter: requirements passed of those that apply, and scenarios' verdicts."""
    with_native = bool(report.native_verdicts)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("chapter", no_wrap=True)
    table.add_column("requirements kept", no_wrap=True)
    table.add_column("scenarios", justify="right")
    table.add_column(report.short_name)
    if with_native:
        table.add_column("torch's DDP")
    groups = {group.chapter: group for group in groups_of(report)}
    shown = [
        chapter.name for chapter in catalogue.chapters if any(one.chapter == chapter.name for one in report.scenarios)
    ]
    for chapter in shown:
        relevant = [outcome for outcome in report.scenarios if outcome.chapter == chapter]
        table.add_row(chapter, str(groups.get(chapter, "")), *_cells(relevant, with_native))
    if len(shown) > 1:
        table.add_row("all", str(all_groups(report)), *_cells(list(report.scenarios), with_native), style="bold")
    return table


def requirements_table(report: Report, catalogue: Catalogue) -> Table:
    """Return the table of verdicts: one row per chapter, and below it one per requirement."""
    with_native = bool(report.native_verdicts)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", expand=True)
    table.add_column("", no_wrap=True)
    table.add_column("requirement", ratio=1)
    table.add_column("scenarios", justify="right")
    table.add_column(report.short_name, no_wrap=True)
    if with_native:
        table.add_column("torch's DDP", no_wrap=True)
    evidence = evidence_of(report.scenarios)
    for chapter in catalogue.chapters:
        rows = [requirement for requirement in report.requirements if requirement.chapter == chapter.name]
        if not rows:
            continue
        if table.row_count:
            table.add_row()
        relevant = [outcome for outcome in report.scenarios if outcome.chapter == chapter.name]
        table.add_row(chapter.prefix, Text(chapter.title), *_cells(relevant, with_native), style="bold")
        for row in rows:
            relevant = evidence.get(row.id, [])
            table.add_row(row.id, Text(row.statement), *_cells(relevant, with_native))
    return table


def _cells(outcomes: list[Outcome], with_native: bool) -> list[str | Text]:
    """Return how many scenarios there are, and what they say together in each column."""
    judged = combine(verdicts_of(one.subject for one in outcomes if not one.is_excused) or {Verdict.UNSUPPORTED: 1})
    cells: list[str | Text] = [str(len(outcomes)), Text(subjects_text(outcomes), style=STYLES[judged])]
    if with_native:
        cells.append(verdict_cell(verdicts_of(one.native for one in outcomes)))
    return cells


def verdict_cell(verdicts: Mapping[Verdict, int]) -> Text:
    """Return the combined verdict, with a count when not all scenarios agree."""
    return Text(combined_text(verdicts), style=STYLES[combine(verdicts)]) if verdicts else Text("-", style="dim")


def ratios_table(ratios: Iterable[Ratio]) -> Table:
    """Return the table of step times beside torch's DDP: below 1 the contestant is faster than the reference."""
    ratios = tuple(ratios)
    shares = overheads(ratios)
    table = Table("workload", "options", "compared with", "ranks", "median ratio", "quartiles", "overhead", "rounds")
    for one in ratios:
        quartiles = f"{one.lower:.3f} - {one.upper:.3f}"
        share = str(shares[one.compared]) if one.compared in shares else ""
        table.add_row(
            one.workload, one.variant, one.reference, str(one.world_size), f"{one.median:.3f}", quartiles, share,
            str(one.rounds),
        )  # fmt: skip
    return table


def operations_table(timed: Sequence[Timed]) -> Table:
    """Return the table of operations of two backends, with the ratios of the smallest and largest messages.

    `latency` is a ratio of times, `bandwidth` one of bytes per second; `noise` is how far from 1 the quartiles of the
    reference against itself reach. Of what has two values the first is the backend's, the second the reference's.
    """
    both = f"the other columns: {timed[0].backend} / {timed[0].against}" if timed else ""
    table = Table(
        "operation, ranks", "latency", "bandwidth", "noise", "knee", "bytes^", "beside", "CPU s/GiB",
        caption=f"latency, bandwidth, noise: ratios, with quartiles; {both}",
    )  # fmt: skip
    for one in timed:
        own, other, _ = one.contestants
        beside = {ratio.variant: f"{ratio.median:.2f}" for ratio in one.ratios() if ratio.reference == ONE_BY_ONE}
        curves = {curve.contestant: curve for curve in one.curves()}
        cpu = {name: f"{seconds:.2f}" for name, seconds in one.cpu_seconds_per_gib().items()}
        several = len(one.sizes) > 1
        knees = {name: "none" if (knee := curve.knee) is None else sized(knee) for name, curve in curves.items()}
        table.add_row(
            f"{one.operation}, {one.world_size}",
            one.by_size[0][0].shortly(),
            one.by_size[-1][0].inverse.shortly() if several else "",
            f"{max(noise.width for _, noise in one.by_size):.0%}",
            *(
                f"{values[own]} / {values[other]}" if values else ""
                for values in (
                    knees if several else {},
                    {name: f"{curve.exponent:.2f}" for name, curve in curves.items()} if several else {},
                    beside,
                    cpu,
                )
            ),
        )
    return table


def growth_table(curves: Iterable[Curve]) -> Table:
    """Return the table of costs by size; the last column says with which power of the size they grew at the end."""
    table = Table("what costs", "contestant", "size", "cost: median and quartiles", "grows as")
    for curve in curves:
        for point in curve.points:
            is_first, is_last = point is curve.points[0], point is curve.points[-1]
            table.add_row(
                f"{curve.plot.title}, over {curve.plot.reference}" if is_first else "",
                curve.contestant if is_first else "",
                f"{point.size:,}",
                str(point),
                f"size^{curve.exponent:.2f}" if is_last else "",
                end_section=is_last,
            )
    return table


def print_failures(console: Console, report: Report, catalogue: Catalogue, folder: Path, *, whole: int) -> None:
    """Print why it failed, by cause, the one to look at first at the top: `whole` of them with their best evidence.

    Of the others there is one line each.
    """
    causes = causes_of(report)
    if causes:
        said = f"{counted(len(report.failures), 'failure')}, {counted(len(causes), 'cause')}:"
        console.print(said, style="bold")
    rows = {row.id: row for row in report.owed}
    for number, cause in enumerate(causes[:whole], start=1):
        _print_cause(console, cause, number, rows, catalogue)
        replay = replay_command(cause.best.id, report.subject.typed, report.backend, folder)
        print_evidence(console, failure_text(cause.best, report.backend, catalogue, replay, title=cause.title))
        console.print()
    for number, cause in enumerate(causes[whole:], start=whole + 1):
        _print_cause(console, cause, number, rows, catalogue)
        seen = next((one.explanation for one in cause.best.failed_result.deciding_findings if one.explanation), "")
        print_sentence(console, f"      {shorten(seen, _WIDTH_OF_EVIDENCE) or shorten(cause.best.why)}", indent=6)
        console.print(f"      {failure_path(folder, cause.best.id).with_suffix('.txt')}", soft_wrap=True)
    if causes:
        again = last_failed_command(report.subject.typed, report.backend, folder)
        console.print(f"After a mend: {again}\n", soft_wrap=True)


def _print_cause(
    console: Console, cause: Cause, number: int, rows: Mapping[str, RequirementSummary], catalogue: Catalogue
) -> None:
    """Print what is wrong, in how many scenarios, whether every DDP owes it, and what to do, or else to read."""
    style = STYLES[Verdict.FAIL if cause.verdict is Verdict.PASS else cause.verdict]
    start = f"{number:>3}.  "
    title = broken(console, f"{start}{cause.sentence}", len(start))
    console.print(Text(title, style=style), soft_wrap=True)
    of_them = [rows[name] for name in cause.requirements if name in rows]
    optional = ", of level full: not every DDP owes it" if {row.level for row in of_them} == {"full"} else ""
    sources = [catalogue.requirement(name).source for name in cause.requirements[:1] if name in catalogue]
    read = f"Read: {', '.join(sources[0])}" if sources else ""
    told = [f"Seen in {cause.extent}{optional}", f"Do: {cause.remedy}" if cause.remedy else read]
    if cause.kind is Kind.LACKS_CHECK:
        told += [f"{row.id}: {in_short(row.statement)}" for row in of_them]
    for text in filter(None, told):
        console.print(Text(broken(console, " " * len(start) + text, len(start)), style="dim"), soft_wrap=True)


def print_totals(console: Console, report: Report, *, notes: bool = False) -> None:
    """Print the last lines of a run: counts, times and the answer; with `notes` those of each scenario first."""
    for outcome in report.scenarios if notes else ():
        for note in outcome.notes:
            console.print(printable(f"{outcome.id}: {note}"), soft_wrap=True)
    for world_size, ms in report.median_warm_scenario_ms.items():
        console.print(f"median warm scenario at world size {world_size}: {ms:.1f} ms, others beside it")
    totals = report.totals
    several = any(len(outcome.requirements) > 1 for outcome in report.scenarios)
    console.print(
        f"{counted(totals.scenarios, 'scenario')} in {report.duration_s:.1f} s, evidence for"
        f" {counted(totals.requirements, 'requirement')}{' (one scenario may serve several)' * several}",
        highlight=False,
    )
    console.print(f"{report.short_name}: {report.counts}")
    if report.native_verdicts:
        console.print(f"torch's DDP: {counts_text(report.native_verdicts)}")
    _print_unsupported(console, report)
    findings = (finding for outcome in report.scenarios for finding in outcome.subject.findings)
    if again := [one for one in findings if one.summary.startswith(TRIED_AGAIN)]:
        print_sentence(console, f"{counted(len(again), 'scenario')} had to be {shorten(again[0].summary)}.")
    for outcome in report.contaminated:
        text = printable(f"{outcome.id}: {outcome.subject.findings[0].summary}")
        console.print(text, style="bold red", soft_wrap=True)
    _print_answer(console, report)


def _print_answer(console: Console, report: Report) -> None:
    """Print the last line: whether the subject keeps its requirements, or why this run does not show it."""
    if not report.is_complete:
        console.print(
            f"Incomplete: {report.num_not_run} of {counted(report.totals.selected, 'scenario')} did not run.",
            style="bold yellow",
            highlight=False,
        )
    elif report.is_green and report.num_excused:
        console.print("Nothing failed that was not expected to.", style="bold green")
    elif report.is_green:
        whole = " It keeps all that it declares to have." if report.verdicts[Verdict.UNSUPPORTED] else ""
        console.print(f"{report.short_name} {requirements_kept(report)}.{whole}", style="bold green")
    elif not report.failures and report.contaminated:
        console.print("Verdicts depend on what ran before.", style="bold red")
    elif not report.failures:
        console.print(_nothing_passed(report), style="bold red")
    else:
        console.print(f"{_failed(report)}. {report.short_name} {requirements_kept(report)}.", style="bold red")


def _failed(report: Report) -> str:
    """Return e.g. `2 scenarios failed, 1 scenario passed that was known to fail`."""
    passed = report.num_unexpected_passes
    failed = len(report.failures) - passed
    known = f"{counted(passed, 'scenario')} passed that {'was' if passed == 1 else 'were'} known to fail"
    return ", ".join([f"{counted(failed, 'scenario')} failed"] * bool(failed) + [known] * bool(passed))


def _print_unsupported(console: Console, report: Report) -> None:
    """Print why scenarios were UNSUPPORTED, a line for each reason, and what to do where something is undeclared."""
    reasons = reasons_unsupported(report.scenarios)
    if not reasons:
        return
    console.print("UNSUPPORTED, and so not judged:")
    for reason, count in reasons[:_NUM_REASONS]:
        print_sentence(console, f"{count:>6}  {shorten(reason)}", indent=8)
    if others := reasons[_NUM_REASONS:]:
        rest = counted(len(others), "other reason")
        console.print(f"{sum(count for _, count in others):>6}  for {rest}; the page has them")
    if any(" declares no " in reason for reason, _ in reasons):
        advice = "To have it judged where it exists, declare it: `capabilities` of the Subject or of the Backend."
        console.print(advice)


def _nothing_passed(report: Report) -> str:
    """Return why a run without any failure shows nothing all the same, and what to do."""
    said = "Nothing passed, so this run shows nothing"
    if excused := report.num_excused:
        them = "what failed was known to fail" if excused > 1 else "the one that failed was known to"
        return f"{said}: {them}. Select more scenarios, or leave out --baseline and --expectations to see why it fails."
    return f"{said}. Select scenarios that need no more than what is declared."
