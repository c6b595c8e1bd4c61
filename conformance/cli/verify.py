"""`ddp-conformance verify`: check a certified report again, without running anything."""

from __future__ import annotations

from pathlib import Path

import click

from conformance.cli import EXIT_FAILED


@click.command("verify", short_help="Check a certified report.")
@click.argument("report", type=click.Path(path_type=Path))
def command(report: Path) -> None:
    """Check the folder REPORT of a certified run.

    Every file must be as the run wrote it; the list of scenarios must be that of the profile in this release, complete,
    each with a verdict; the environment must be there; counts and answers must follow from the verdicts. Exits with 0
    for a valid certificate of conformance, 1 for a valid one that says that the subject does not conform, 2 for none.
    """
    from conformance.report.certificate import verify
    from conformance.report.headline import headline
    from conformance.spec.catalogue import LEVELS, load_catalogue
    from conformance.spec.profile import in_profile
    from conformance.suite import load_scenarios

    scenarios, catalogue = load_scenarios(), load_catalogue()
    checked = verify(report, {level: in_profile(level, scenarios, catalogue) for level in LEVELS})
    torch_version = checked.package_version("torch")
    click.echo(f"Valid. {checked.subject.name} on {checked.backend}, torch {torch_version}: {headline(checked)}.")
    if not checked.is_green:
        click.get_current_context().exit(EXIT_FAILED)
