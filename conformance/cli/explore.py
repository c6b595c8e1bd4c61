"""`ddp-conformance explore`: runs random trainings and shrinks a failure to the simplest one that still fails."""

from __future__ import annotations

import random
from pathlib import Path

import click

from conformance.cli import EXIT_FAILED
from conformance.cli.console import make_console
from conformance.cli.interrupt import interrupted_once
from conformance.cli.options import subject_options
from conformance.report.folder import prepare_folder, write_failure
from conformance.scenario import Scenario
from conformance.spec.catalogue import load_catalogue


@click.command("explore", short_help="Run random trainings; shrink a failure to the simplest one.")
@subject_options
@click.option("--examples", type=click.IntRange(min=1), default=200, show_default=True, help="Most trainings to run.")
@click.option("--seconds", type=click.FloatRange(min=1), default=600.0, show_default=True, help="Stop after this time.")
@click.option("--seed", type=int, default=None, help="Repeat the trainings of a seed.  [default: random, printed]")
@click.option(
    "--world-size", "world_sizes", type=click.IntRange(min=1), multiple=True, default=(1, 2, 3, 4), show_default=True,
    metavar="N", help="Draw only trainings with N ranks; repeat it to allow several.",
)  # fmt: skip
@click.option(
    "--report", "folder", type=click.Path(file_okay=False, path_type=Path), default=Path("report"), show_default=True,
    metavar="FOLDER", help="Write the failing scenario into FOLDER/failures.",
)  # fmt: skip
def command(
    ddp: str, backend: str, no_native: bool, examples: int, seconds: float, seed: int | None,
    world_sizes: tuple[int, ...], folder: Path,
) -> None:  # fmt: skip
    """Draw models, options, schedules, dtypes and world sizes at random, and compare each training with the truth.

    When a training fails, the command shrinks it to the simplest scenario that still fails and writes that scenario to
    a file for `ddp-conformance replay`.

    \b
    ddp-conformance explore
    ddp-conformance explore --ddp my_pkg:MyDDP --examples 1000 --seconds 1200
    ddp-conformance explore --seed 7 --world-size 2
    """
    prepare_folder(folder)
    seed = random.randrange(2**32) if seed is None else seed

    from conformance.backends.backend import get_backend
    from conformance.run import runner
    from conformance.run.exploration import REQUIREMENT, explore
    from conformance.run.outcome import Outcome
    from conformance.run.scenario_runner import ScenarioRunner
    from conformance.workers.controller import Controller
    from conformance.workers.subject_finder import find_subject

    subject, backend_value = find_subject(ddp), get_backend(backend)
    smallest = Scenario("explored", (REQUIREMENT,), "train", world_size=max(world_sizes))
    runner.check([smallest], backend_value)
    console = make_console()

    def say(scenario: Scenario, outcome: Outcome) -> None:
        status.update(f"{outcome.subject.verdict.value}  {scenario.model}, world size "
                      f"{scenario.world_size}, {len(scenario.options)} options")  # fmt: skip

    console.print(f"seed {seed}", highlight=False)
    with interrupted_once(), Controller(backend_value) as controller, console.status("starting ranks") as status:
        runner.probe(subject, smallest.world_size, controller)
        ranks = ScenarioRunner(subject, backend_value, controller, native=not no_native)
        found = explore(ranks, examples=examples, seed=seed, world_sizes=world_sizes, budget_s=seconds, on_outcome=say)
    if found.failure is not None:
        source = backend_value.source or backend_value.name
        text = write_failure(found.failure, subject.name, source, load_catalogue(), folder)
        console.print(text, highlight=False, markup=False, soft_wrap=True)
        if not found.always_fails:
            console.print("It did not fail every time: replay it with --times.")
    console.print(
        f"Judged {found.num_judged} trainings and could not judge {found.num_not_judged}; seed {found.seed}. "
        + ("None failed." if found.failure is None else "The failure above is the simplest one found."),
        highlight=False,
    )
    if found.failure is not None or not found.num_judged:
        click.get_current_context().exit(EXIT_FAILED)
