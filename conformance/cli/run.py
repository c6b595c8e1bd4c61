"""`ddp-conformance run`: judge a DDP on every scenario that is selected."""

from __future__ import annotations

from pathlib import Path

import click

from conformance.chapters.chapter import Selection, load_scenarios
from conformance.cli import EXIT_FAILED, EXIT_INTERRUPTED
from conformance.cli.console import make_console
from conformance.cli.interrupt import interrupted_once
from conformance.cli.options import selection_of, selection_options, subject_options
from conformance.report.json_report import prepare_folder, write_report
from conformance.report.terminal import ProgressBar, print_report
from conformance.spec.catalogue import load_catalogue


@click.command("run", short_help="Judge a DDP and write the report.")
@selection_options
@subject_options
@click.option(
    "--report",
    "folder",
    type=click.Path(path_type=Path),
    default=Path("report"),
    show_default=True,
    help="Folder for report.json and one scenario file per failure.",
)
@click.option("--fail-fast", is_flag=True, help="Stop at the first failure.")
@click.option("--quiet", "-q", is_flag=True, help="Print failures and totals only.")
def command(
    names: tuple[str, ...],
    chapter: tuple[str, ...],
    requirement: tuple[str, ...],
    world_size: tuple[int, ...],
    keyword: str,
    ddp: str,
    backend: str,
    no_native: bool,
    folder: Path,
    fail_fast: bool,
    quiet: bool,
) -> None:
    """Run the selected scenarios (all, when nothing is selected) and report which requirements the DDP keeps.

    NAMES are chapters, requirement ids, scenario ids, or globs of scenario ids.

    \b
    ddp-conformance run                                  everything, on ddp_impl over gloo
    ddp-conformance run buckets GRAD-01                  one chapter and one requirement
    ddp-conformance run 'gradients/*/mlp*' --world-size 4
    ddp-conformance run --ddp my_pkg:MyDDP --report mine
    ddp-conformance run --ddp torch -k unused            where torch's own DDP deviates

    Exits with 0 when the DDP keeps every requirement that was exercised, 1 when it does not, 2 when a name or option
    is wrong, and 130 after Ctrl-C, with a report of what was known by then.
    """
    selection = selection_of(names, chapter, requirement, world_size, keyword)
    context = click.get_current_context()
    context.exit(judge_selection(selection, ddp, backend, not no_native, folder, fail_fast, quiet))


def judge_selection(
    selection: Selection, ddp: str, backend_name: str, native: bool, folder: Path, fail_fast: bool, quiet: bool
) -> int:
    """Run `selection`, print and write the report, and return the exit code."""
    catalogue = load_catalogue()
    scenarios = selection.apply(load_scenarios(), catalogue)
    prepare_folder(folder)

    # From here on torch is needed; what was said wrongly so far is answered without waiting for its import.
    from conformance import runner
    from conformance.backends.backend import get_backend
    from conformance.subjects.subject import get_subject

    subject, backend = get_subject(ddp), get_backend(backend_name)
    runner.check_world_sizes(selection.world_sizes, backend)
    console = make_console()
    with interrupted_once():
        with ProgressBar(console, scenarios) as progress:
            report = runner.run(scenarios, subject, backend, native=native, fail_fast=fail_fast, on_event=progress)
        path = write_report(report, catalogue, folder)
    print_report(console, report, catalogue, folder, with_table=not quiet)
    console.print(f"Report: {path}", highlight=False, soft_wrap=True)
    if report.interrupted:
        return EXIT_INTERRUPTED
    return 0 if report.is_green else EXIT_FAILED
