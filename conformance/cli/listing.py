"""`ddp-conformance list`: prints the requirements, or the scenarios that test them."""

from collections.abc import Iterable

import click
from rich.table import Table
from rich.text import Text

from conformance.checkers.explanation import counted
from conformance.cli.options import selection_options
from conformance.report.console import make_console, say
from conformance.spec.catalogue import LEVELS, Requirement, load_catalogue
from conformance.spec.profile import in_profile, levels_of
from conformance.spec.quick import QUICK, load_kills, sentence
from conformance.spec.upstream import UpstreamTest, upstream_tests
from conformance.suite import Selection


@click.command("list")
@selection_options
@click.option("--profile", default="", metavar="LEVEL", help="Only what this profile of `run` judges.")
@click.option("--upstream", is_flag=True, help="Print which requirements ask for what torch's tests of backends do.")
@click.option("--scenarios", "as_scenarios", is_flag=True, help="Print scenario ids, one per line.")
def command(
    selection: Selection,
    profile: str,
    upstream: bool,
    as_scenarios: bool,
) -> None:
    """Print the requirements: all of them, or those of the chapters and ids in NAMES.

    With --scenarios, --profile quick, --world-size, -k, --one-per-requirement, or a NAME that is a scenario, print
    instead the ids of the scenarios that `run` would run.

    \b
    ddp-conformance list
    ddp-conformance list buckets GRAD-01
    ddp-conformance list --profile backend
    ddp-conformance list --scenarios GRAD-01 --world-size 4
    ddp-conformance list --profile quick
    ddp-conformance list --upstream
    """
    if upstream:
        console = make_console()
        console.print(upstream_table(upstream_tests()))
        return
    catalogue = load_catalogue()
    wanted = {catalogue.chapter(name).name for name in selection.chapters}
    wanted |= {catalogue.requirement(id_).id for id_ in selection.requirements}
    known = {entry.name for entry in catalogue.chapters} | {entry.id for entry in catalogue}
    narrowed = selection.world_sizes or selection.keyword or selection.one_per_requirement
    if as_scenarios or profile == QUICK or narrowed or not set(selection.names) <= known:
        # Imported here because chapters import torch, and printing requirements should not wait for that.
        from conformance.suite import load_scenarios

        everything = in_profile(profile, load_scenarios(), catalogue) if profile else load_scenarios()
        chosen = selection.apply(everything, catalogue, profile)
        for scenario in chosen:
            say(scenario.id)
        if profile == QUICK and selection == Selection():
            say(sentence(chosen, load_kills()), err=True)
        return
    wanted |= set(selection.names)
    levels = levels_of(profile) if profile else LEVELS
    shown = [
        entry for entry in catalogue if entry.level in levels and (not wanted or wanted & {entry.id, entry.chapter})
    ]
    console = make_console()
    console.print(requirements_table(shown))
    console.print(f"\n{counted(len(shown), 'requirement')}")


def upstream_table(tests: Iterable[UpstreamTest]) -> Table:
    """Return one row per test of upstream's: the requirements that ask for the same, and what none of them does."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", expand=True)
    for title, ratio in (("upstream's test", 3), ("requirements", 3), ("not asked for here", 2), ("its flag", 2)):
        table.add_column(title, ratio=ratio, overflow="fold")
    for one in tests:
        table.add_row(one.name, ", ".join(one.requirements) or "none", Text(one.missing), one.flag)
    return table


def requirements_table(requirements: list[Requirement]) -> Table:
    """Return one row per requirement: id, statement, level, source."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", expand=True)
    table.add_column("", no_wrap=True)
    table.add_column("requirement", ratio=2)
    table.add_column("level", no_wrap=True)
    table.add_column("source", ratio=1)
    for requirement in requirements:
        note = f" Not testable: {requirement.note}" if not requirement.testable else ""
        source = ", ".join(requirement.source)
        table.add_row(requirement.id, Text(requirement.statement + note), requirement.level, Text(source))
    return table
