"""`ddp-conformance list`: the requirements, and the scenarios that give evidence for them."""

from __future__ import annotations

import click
from rich.table import Table

from conformance.chapters.chapter import load_scenarios
from conformance.cli.console import make_console
from conformance.cli.options import selection_of, selection_options
from conformance.report.terminal import counted
from conformance.scenario import Scenario
from conformance.spec.catalogue import Catalogue, load_catalogue


@click.command("list", short_help="Show requirements and scenarios.")
@selection_options
@click.option("--scenarios", "as_scenarios", is_flag=True, help="Print scenario ids, one per line, for scripts.")
def command(
    names: tuple[str, ...],
    chapter: tuple[str, ...],
    requirement: tuple[str, ...],
    world_size: tuple[int, ...],
    keyword: str,
    as_scenarios: bool,
) -> None:
    """Show the requirements, or with --scenarios what `run` would run for the same selection.

    \b
    ddp-conformance list
    ddp-conformance list buckets
    ddp-conformance list --scenarios GRAD-01 --world-size 4
    """
    catalogue = load_catalogue()
    scenarios = selection_of(names, chapter, requirement, world_size, keyword).apply(load_scenarios(), catalogue)
    if as_scenarios:
        for scenario in scenarios:
            click.echo(scenario.id)
        return
    console = make_console()
    console.print(requirements_table(catalogue, scenarios))
    shown = {requirement_id for scenario in scenarios for requirement_id in scenario.requirements}
    console.print(f"{counted(len(shown), 'requirement')}, {counted(len(scenarios), 'scenario')}", highlight=False)


def requirements_table(catalogue: Catalogue, scenarios: tuple[Scenario, ...]) -> Table:
    """Return one row per requirement that any of `scenarios` exercises, or that no scenario can."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", expand=True)
    table.add_column("requirement", no_wrap=True)
    table.add_column("statement", ratio=1)
    table.add_column("level")
    table.add_column("source")
    table.add_column("scenarios", justify="right")
    for chapter in catalogue.chapters:
        for requirement in chapter.requirements:
            count = sum(requirement.id in scenario.requirements for scenario in scenarios)
            if count or not requirement.testable:
                source = ", ".join(requirement.source)
                shown = str(count) if requirement.testable else "untestable"
                table.add_row(requirement.id, requirement.statement, requirement.level, source, shown)
    return table
