"""`ddp-conformance replay`: runs the scenario of a file again."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.text import Text

from conformance.cli import EXIT_FAILED, EXIT_INTERRUPTED
from conformance.cli.early_zygote import early_zygote
from conformance.cli.interrupt import interrupted_once
from conformance.cli.options import NamedPath, subject_options
from conformance.errors import ScenarioError
from conformance.report.console import make_console, say
from conformance.report.failure import result_text
from conformance.run.report import Report
from conformance.scenario import MAX_DEADLINE_S, Scenario
from conformance.spec.catalogue import Catalogue, load_catalogue
from conformance.subjects.subject import named
from conformance.verdict import Verdict
from conformance.workers.messages import Inspection

if TYPE_CHECKING:
    from conformance.workers.zygote_process import ZygoteProcess


@click.command("replay")
@click.argument("file", type=NamedPath())
@subject_options
@click.option(
    "--times",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Run it up to this often; stop at a failure.",
)
@click.option(
    "--step",
    type=click.IntRange(min=0),
    metavar="N",
    help="Tell only this step, and its values.",
)
@click.option(
    "--pdb",
    "debugged",
    type=click.IntRange(min=0),
    metavar="RANK",
    help="Debug this rank here, where its code calls breakpoint() and where it raises.",
)
@click.option(
    "--issue",
    type=NamedPath(),
    metavar="FILE",
    help="Write an issue for the developers of torch or of the backend to FILE: Markdown, with a program.",
)
def command(
    file: Path, ddp: str, backend: str, no_native: bool, times: int, step: int | None, debugged: int | None,
    issue: Path | None,
) -> None:  # fmt: skip
    """Run the scenario in FILE again, on the DDP under test and on torch's DDP, and print both verdicts with evidence.

    Before the verdicts it tells the DDP's run step by step: the collectives of every rank, the lines of code that
    issued them, and which facts are wrong. With --step also the values.

    `run` and `explore` write a scenario file to report/failures for every failure. The file holds everything that
    decides what the ranks do, except the DDP and the backend.

    \b
    ddp-conformance replay report/failures/buckets.BUCKET-03.mlp.json
    ddp-conformance replay failure.json --ddp torch
    ddp-conformance replay failure.json --times 100
    ddp-conformance replay failure.json --step 1
    ddp-conformance replay failure.json --ddp my_pkg:MyDDP --pdb 0
    ddp-conformance replay failure.json --ddp torch --issue issue.md
    """
    scenario = read_scenario(file)
    terminal = ""
    if debugged is not None:
        terminal = _terminal_for(debugged, scenario)
        scenario = replace(scenario, deadline_s=MAX_DEADLINE_S)  # the other ranks wait for a person
        times, no_native = 1, True
    catalogue = load_catalogue()
    for requirement_id in scenario.requirements:
        catalogue.requirement(requirement_id)
    named(ddp)  # a name that is none is told before torch is imported
    say(f"Running {scenario.id} on {ddp} over {backend} ...", err=True)  # at once: torch is imported next

    with early_zygote() as zygote:
        inspection = Inspection(True, -1 if debugged is None else debugged, terminal)
        report = _replayed([scenario] * times, ddp, backend, zygote, inspection, native=not no_native, step=step)
    print_replay(make_console(), report, catalogue)
    if issue is not None and report.failures:
        from conformance.cli.issue import issue_text

        say(f"Looking for a program that shows it with nothing but torch, for {issue} ...", err=True)
        issue.write_text(issue_text(report, scenario, catalogue), encoding="utf-8")
    if not report.is_complete and not report.failures:
        click.get_current_context().exit(EXIT_INTERRUPTED)
    click.get_current_context().exit(0 if report.is_green else EXIT_FAILED)


def _terminal_for(debugged: int, scenario: Scenario) -> str:
    """Return the path of the terminal at which a person debugs a rank; raises `click.UsageError` if that cannot be."""
    if debugged >= scenario.world_size:
        raise click.UsageError(f"--pdb {debugged}: the scenario's ranks are 0 to {scenario.world_size - 1}")
    if not sys.stdin.isatty():
        raise click.UsageError("--pdb needs a terminal: standard input is none")
    return os.ttyname(sys.stdin.fileno())


def _replayed(
    repeated: list[Scenario],
    ddp: str,
    backend_name: str,
    zygote: ZygoteProcess,
    inspection: Inspection,
    *,
    native: bool,
    step: int | None,
) -> Report:
    """Run the scenarios, all the same one, and print the DDP's last run step by step, or one step of it."""
    from conformance.programs.registry import preloads_of
    from conformance.report.steps import step_listing
    from conformance.run import runner
    from conformance.run.watched_ranks import WatchedRanks
    from conformance.workers.controller import Controller
    from conformance.workers.finder import find_judged

    subject, backend = find_judged(repeated, ddp, backend_name)
    runner.check_world_sizes((repeated[0].world_size,), backend)
    runner.check(repeated, backend)
    preloads = preloads_of(repeated)
    with interrupted_once(), Controller(backend, preload=preloads, zygote=zygote, inspection=inspection) as controller:
        watched = WatchedRanks(controller, subject)
        report = runner.run(
            repeated, subject, backend, native=native, fail_fast=True, controller=watched, one_at_a_time=True
        )
    console = make_console()
    for line in step_listing(watched.observations, watched.expected, step):
        console.print(line, soft_wrap=True)
    console.print()
    return report


def read_scenario(file: Path) -> Scenario:
    """Return the scenario in `file`; raises `ScenarioError`, which names the file and what is wrong with it."""
    text = ""
    try:
        text = file.read_text(encoding="utf-8")
        return Scenario.loads(text)
    except OSError as error:
        raise ScenarioError(f"cannot read {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ScenarioError(f"{file} is not a scenario file: it is not UTF-8 text") from error
    except ScenarioError as error:
        if '"scenarios":' not in text:
            raise ScenarioError(f"{file}: {error}") from error
        raise ScenarioError(
            f"{file}: it is a whole report; name one of the files in {file.parent / 'failures'}, or run all that "
            f"failed again: run --last-failed --report {file.parent}"
        ) from error


def print_replay(console: Console, report: Report, catalogue: Catalogue) -> None:
    """Print the last outcome of `report`, for the subject and for torch's DDP where it ran."""
    if not report.scenarios:
        return
    outcome = report.scenarios[-1]
    for result in outcome.results:
        if result.verdict is Verdict.PASS:
            console.print(f"PASS    {outcome.id}  subject={result.subject}")
        else:
            console.print(Text(result_text(outcome, result, report.backend, catalogue)), soft_wrap=True)
    if len(report.scenarios) > 1:
        console.print(f"{len(report.scenarios)} of {report.totals.selected} repetitions ran")
