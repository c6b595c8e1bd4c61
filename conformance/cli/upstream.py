"""`ddp-conformance upstream`: runs torch's own DDP tests on another DDP."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich import progress as bar
from rich.console import Console

from conformance.cli import EXIT_FAILED
from conformance.cli.options import NamedPath
from conformance.errors import ConformanceError
from conformance.report.console import make_console, say

if TYPE_CHECKING:
    from conformance.upstream.launcher import TestRanks
    from conformance.upstream.outcome import TestName, TestRun


@click.command("upstream")
@click.option("--ddp", default="ddp_impl", show_default=True, help="DDP under test: ddp_impl, torch, or module:Class.")
@click.option(
    "-k", "keywords", multiple=True, metavar="TEXT", help="Run tests whose name contains TEXT; repeat it for more."
)
@click.option("--list", "only_list", is_flag=True, help="Print the tests and their world sizes; run none.")
@click.option(
    "--world-size",
    type=click.IntRange(2),
    metavar="N",
    help="World size.  [default: the smallest that a test supports]",
)
@click.option("--jobs", type=click.IntRange(1, 8), default=1, show_default=True, help="Tests to run at a time.")
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(0, min_open=True),
    default=300.0,
    show_default=True,
    help="Deadline of one test in seconds.",
)
@click.option("--report", type=NamedPath(dir_okay=False), metavar="FILE", help="Write the results as JSON.")
def command(
    ddp: str,
    keywords: tuple[str, ...],
    only_list: bool,
    world_size: int | None,
    jobs: int,
    timeout_s: float,
    report: Path | None,
) -> None:
    """Run the DDP tests that the torch wheel ships, on torch's DDP and on the DDP under test.

    The tests run over gloo, on the CPU, with 2 to 6 ranks on this machine. The DDP under test must pass every test that
    torch's DDP passes here.

    \b
    ddp-conformance upstream                      all tests, on ddp_impl
    ddp-conformance upstream --ddp my_pkg:MyDDP   all tests, on your DDP
    ddp-conformance upstream -k join -k uneven    tests whose names contain "join" or "uneven"

    Exits with 0 when the DDP passes every test that torch's passes, 1 when it does not, and 2 for a usage error.
    """
    say("Looking for torch's tests ...", err=True)  # at once: torch is imported next

    from conformance.run.environment import capture_environment
    from conformance.subjects.subject import KNOWN
    from conformance.upstream.comparison import compare
    from conformance.upstream.exclusions import check_exclusions, load_exclusions
    from conformance.upstream.launcher import TestRanks, find_tests
    from conformance.upstream.report import prepare_report, print_comparison, write_comparison
    from conformance.workers.finder import find_subject

    subject, exclusions = find_subject(ddp), load_exclusions()
    if report is not None and not only_list:
        prepare_report(report)
    console = make_console()
    with TestRanks(KNOWN["torch"]) as ranks:
        tests = find_tests(ranks, world_size)
        if world_size is None:
            check_exclusions(exclusions, tests)
        tests = {name: size for name, size in tests.items() if _is_wanted(name, keywords)}
        if not tests:
            raise ConformanceError(f"no test matches {' or '.join(keywords)}; --list shows the names")
        if only_list:
            for name, size in tests.items():
                excluded = f"  excluded: {exclusions[name]}" if name in exclusions else ""
                say(f"{name}  {size} ranks{excluded}")
            return
        native = _run(console, "torch", ranks, tests, timeout_s, jobs)
    with TestRanks(subject) as ranks:
        tested = _run(console, subject.name, ranks, tests, timeout_s, jobs)

    comparison = compare(subject.name, native, tested, exclusions)
    if report is not None:
        write_comparison(report, comparison, capture_environment())
    print_comparison(console, comparison)
    click.get_current_context().exit(0 if comparison.conforms else EXIT_FAILED)


def _is_wanted(name: TestName, keywords: tuple[str, ...]) -> bool:
    return not keywords or any(keyword in str(name) for keyword in keywords)


def _run(
    console: Console, who: str, ranks: TestRanks, tests: dict[TestName, int], timeout_s: float, jobs: int
) -> dict[TestName, TestRun]:
    from conformance.upstream.launcher import run_tests

    columns = (
        bar.TextColumn("{task.description}"),
        bar.BarColumn(),
        bar.MofNCompleteColumn(),
        bar.TextColumn("{task.fields[last]}"),
        bar.TimeElapsedColumn(),
    )
    with bar.Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(who, total=len(tests), last="")
        return run_tests(
            ranks,
            tests,
            timeout_s=timeout_s,
            jobs=jobs,
            on_end=lambda run: progress.update(task, advance=1, last=run.name.method),
        )
