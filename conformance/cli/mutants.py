"""`ddp-conformance mutants`: whether the requirements notice DDPs and backends that are wrong on purpose."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from conformance.cli import EXIT_FAILED
from conformance.cli.console import make_console
from conformance.errors import ReportError

if TYPE_CHECKING:
    from conformance.mutants.detector import Detection


@click.command("mutants", short_help="Run DDPs that are wrong on purpose, and say which requirements notice.")
@click.argument("names", nargs=-1)
@click.option("--profile", default="", metavar="LEVEL", help="Only kills by requirements of this level.")
@click.option("--all-requirements", is_flag=True, help="Also run every other scenario on every mutant; takes hours.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="Write a Markdown page.")
def command(names: tuple[str, ...], profile: str, all_requirements: bool, out: Path | None) -> None:
    """Show what the suite detects: run each mutant beside what it was made from.

    NAMES are mutants; all, if none is given.

    \b
    ddp-conformance mutants                        each against the requirements that it is known to break
    ddp-conformance mutants NoDivision StaleBuffers
    ddp-conformance mutants --profile core --all-requirements
    ddp-conformance mutants --out docs/detection.md

    Exits with 1 when a requirement no longer tells a mutant that breaks it from what it was made from, and when it
    kills one that was known to survive.
    """
    from conformance.mutants.catalogue import chosen, load_deviations
    from conformance.mutants.detector import detect_all
    from conformance.mutants.page import detection_page, detection_table
    from conformance.run.environment import package_version
    from conformance.spec.catalogue import load_catalogue
    from conformance.spec.profile import in_profile
    from conformance.suite import load_scenarios

    catalogue = load_catalogue()
    if out is not None and (names or profile):
        raise ReportError("--out writes a page about all mutants; leave out their names and --profile")
    mutants = chosen(names, profile, catalogue)
    further = load_scenarios() if all_requirements else ()
    found = detect_all(
        mutants,
        _say,
        deviations=None if out is None else load_deviations(),
        further=in_profile(profile, further, catalogue) if profile else further,
    )
    console = make_console()
    console.print(detection_table(found))
    console.print(f"{found.headline}.", highlight=False, soft_wrap=True)
    if out is not None:
        versions = {name: package_version(name) for name in ("ddp-conformance", "torch")}
        page = detection_page(catalogue, found, versions, datetime.datetime.now(datetime.UTC).date())
        try:
            out.write_text(page, encoding="utf-8")
        except OSError as error:
            raise ReportError(f"cannot write {out}: {error.strerror}") from error
    if not all(one.is_as_expected for one in (*found.detections, *found.deviations)):
        click.get_current_context().exit(EXIT_FAILED)


def _say(done: int, total: int, detection: Detection) -> None:
    """Say on standard error how far it got, where a table is to follow."""
    fate, requirement = detection.fate.value, detection.kill.requirement
    click.echo(f"{done:>4}/{total}  {fate:<10}  {detection.mutant.name}, {requirement}", err=True)
