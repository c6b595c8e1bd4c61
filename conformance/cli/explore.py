"""`ddp-conformance explore`: runs composed trainings and shrinks a failure to the simplest one that still fails."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from conformance.checkers.explanation import counted
from conformance.cli import EXIT_FAILED, EXIT_INTERRUPTED
from conformance.cli.early_zygote import early_zygote
from conformance.cli.interrupt import interrupted_once
from conformance.cli.options import NamedPath, jobs_option, subject_options
from conformance.report.console import make_console, say
from conformance.report.folder import add_failures_folder, keep_failure
from conformance.spec.catalogue import load_catalogue

if TYPE_CHECKING:
    from conformance.run.exploration import Exploration
    from conformance.run.outcome import Outcome

_MOST_PAIRS_SHOWN = 8
_MOST_NOT_JUDGED_SHOWN = 3


@click.command("explore")
@subject_options
@click.option("--examples", type=click.IntRange(min=1), default=400, show_default=True, help="Trainings of each seed.")
@click.option("--seconds", type=click.FloatRange(min=1), default=600.0, show_default=True, help="Stop after this time.")
@click.option(
    "--seed", "seeds", type=int, multiple=True, metavar="N",
    help="Repeat the trainings of a seed; repeat it for several, which take turns.  [default: random, printed]",
)  # fmt: skip
@jobs_option
@click.option(
    "--failures", "most_failures", type=click.IntRange(min=1), default=1, show_default=True,
    help="Go on until so many different failures were found and shrunk.",
)  # fmt: skip
@click.option(
    "--world-size", "world_sizes", type=click.IntRange(min=1, max=4), multiple=True, default=(1, 2, 3, 4),
    show_default=True, metavar="N", help="Draw only trainings with N ranks; repeat it to allow several.",
)  # fmt: skip
@click.option(
    "--report", "folder", type=NamedPath(file_okay=False), default=Path("explored"), show_default=True,
    metavar="FOLDER", help="Add failing scenarios to FOLDER/failures; nothing there is removed.",
)  # fmt: skip
def command(
    ddp: str, backend: str, no_native: bool, examples: int, seconds: float, seeds: tuple[int, ...], jobs: int,
    most_failures: int, world_sizes: tuple[int, ...], folder: Path,
) -> None:  # fmt: skip
    """Compose trainings of blocks, actions and options, and compare each with the same training without DDP.

    The first trainings cover every pair of features (a block, an action such as freeze or no_sync, an option); then
    they are random. When one fails, the command takes away whatever is not needed for the failure and writes the
    simplest scenario to a file for `ddp-conformance replay`. A DDP may refuse some trainings: then every rank must
    raise in the same step.

    \b
    ddp-conformance explore
    ddp-conformance explore --ddp my_pkg:MyDDP --examples 2000 --seconds 1200 --failures 20
    ddp-conformance explore --seed 7 --seed 8 --world-size 2
    """
    add_failures_folder(folder)
    seeds = tuple(dict.fromkeys(seeds)) or (random.randrange(2**32),)
    say(f"Testing {ddp} over {backend} ...", err=True)  # at once: torch is imported next
    shared = click.get_current_context().with_resource(early_zygote())

    from conformance.programs.registry import preloads_of
    from conformance.report.progress import SECONDS_BETWEEN_LINES
    from conformance.run import runner
    from conformance.run.exploration import PROBED, Deviation, Judged, explore
    from conformance.run.lanes import num_lanes
    from conformance.run.scenario_runner import ScenarioRunner
    from conformance.workers.controller import Controller
    from conformance.workers.finder import find_backend, find_subject

    subject, backend_value = find_subject(ddp), find_backend(backend)
    probed = PROBED.replace(world_size=max(world_sizes))
    runner.check([probed], backend_value)
    console = make_console()
    began = last_said = time.monotonic()
    source = backend_value.source or backend_value.name
    preload = preloads_of([probed])
    # A lane judges a training before it draws the next one, and so keeps one processor busy.
    jobs = jobs or num_lanes(backend_value, examples * len(seeds), processors_each=1)
    num_run = 0

    @contextmanager
    def open_runner() -> Iterator[ScenarioRunner]:
        with shared.local() as zygote, Controller(backend_value, preload=preload, zygote=zygote) as controller:
            yield ScenarioRunner(subject, backend_value, controller, native=not no_native)

    def count(judged: Judged) -> None:
        nonlocal num_run, last_said
        num_run += 1
        run = counted(num_run, "training")
        shrinks = ", shrinking" if judged.verdict.is_failure else ""
        status.update(f"{run}  {judged.verdict.value}  {judged.example}{shrinks}")
        now = time.monotonic()
        if not console.is_terminal and now - last_said >= SECONDS_BETWEEN_LINES:
            last_said = now
            say(f"{run}, {now - began:.0f} s of at most {seconds:.0f} s", err=True)

    def show(outcome: Outcome, how_found: str) -> None:
        text = keep_failure(outcome, subject.typed, source, load_catalogue(), folder)
        console.print(f"{text}\n{how_found}\n", soft_wrap=True)

    def show_deviation(deviation: Deviation) -> None:
        composed = ", ".join(sorted(deviation.features)) or "nothing but a plain step"
        at_times = "" if deviation.always_fails else " It did not fail every time: replay it with --times."
        show(deviation.outcome, f"Composed of: {composed}. Shrunk from {deviation.drawn}.{at_times}")

    console.print(f"Seeds: {', '.join(map(str, seeds))}", soft_wrap=True)
    with interrupted_once("; failures found so far are kept"), console.status("starting ranks") as status:
        with Controller(backend_value, preload=preload, zygote=shared) as controller:
            runner.probe(subject, probed.world_size, controller, source)
        shared.await_ready()
        found = explore(
            open_runner, examples=examples, seeds=seeds, world_sizes=world_sizes, budget_s=seconds,
            most_failures=most_failures, jobs=jobs, on_judged=count, on_deviation=show_deviation,
        )  # fmt: skip
    for example, outcome in found.unshrunk.items():
        show(outcome, f"This is {example} as it was drawn: the exploration ended before it was shrunk.")
    for line in summary(found):
        console.print(line, soft_wrap=True)
    if isinstance(found.broken_by, KeyboardInterrupt):
        click.get_current_context().exit(EXIT_INTERRUPTED)
    if found.broken_by:
        raise found.broken_by
    if found.num_failed or not found.num_judged:
        click.get_current_context().exit(EXIT_FAILED)


def summary(found: Exploration) -> list[str]:
    """Return the lines that end an exploration: what was judged, how fast, and what it covered."""
    right = found.num_judged - found.num_refused - found.num_failed
    num_shown = len(found.deviations) + len(found.unshrunk)
    end = {
        0: "None failed.",
        1: "The failure above is the simplest one found.",
    }.get(num_shown, f"The {num_shown} failures above are the simplest ones found.")
    if found.unshrunk:
        end = f"{counted(num_shown, 'failure')} above; all ended before {len(found.unshrunk)} could be shrunk."
    lines = [
        f"Judged {counted(found.num_judged, 'training')} ({found.per_minute:.0f} a minute): {right} right,"
        f" {found.num_refused} refused by every rank, {found.num_failed} failed. "
        f"Not judged: {len(found.not_judged)}; left out for a failure found before: {found.num_known}.",
        f"Pairs of features covered: {len(found.possible) - len(found.missing)} of {len(found.possible)};"
        f" {'seed' if len(found.seeds) == 1 else 'seeds'} {', '.join(map(str, found.seeds))}. " + end,
    ]
    for one in found.not_judged[:_MOST_NOT_JUDGED_SHOWN]:
        lines.append(f"Not judged, for instance: {one.example}, {one.verdict.value}: {one.why}")
    if len(found.missing) > 0:
        shown = "; ".join(f"{first} with {second}" for first, second in found.missing[:_MOST_PAIRS_SHOWN])
        lines.append(f"Not covered, for instance: {shown}. More --examples cover more.")
    return lines
