"""`ddp-conformance doctor`: checks what this machine can run."""

import click
from rich.text import Text

from conformance.cli import EXIT_FAILED
from conformance.report.console import make_console, say


@click.command("doctor")
def command() -> None:
    """Check everything that a run needs; for each thing that is missing, print what to do.

    Exits with 1 when something that every run needs is missing.
    """
    say("Looking at this machine ...", err=True)  # at once: torch is imported next

    from conformance.run.doctor import run_checks

    console = make_console()
    is_unusable = False
    for check in run_checks():
        word, style = ("ok", "green") if check.passed else ("MISSING", "bold red") if check.needed else ("no", "yellow")
        is_unusable |= check.needed and not check.passed
        line = Text.assemble((f"{word:<8}", style), f"{check.name:<20} {check.detail}")
        console.print(line, soft_wrap=True)
        if not check.passed and check.hint:
            console.print(f"{'':<29}{check.hint}", style="dim", soft_wrap=True)
    if is_unusable:
        click.get_current_context().exit(EXIT_FAILED)
