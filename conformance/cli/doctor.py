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

    from conformance.run.doctor import examine

    console = make_console()
    ill = False
    for symptom in examine():
        word, style = (
            ("ok", "green") if symptom.healthy else ("MISSING", "bold red") if symptom.needed else ("no", "yellow")
        )
        ill |= symptom.needed and not symptom.healthy
        line = Text.assemble((f"{word:<8}", style), f"{symptom.name:<20} {symptom.detail}")
        console.print(line, soft_wrap=True)
        if not symptom.healthy and symptom.hint:
            console.print(f"{'':<29}{symptom.hint}", style="dim", soft_wrap=True)
    if ill:
        click.get_current_context().exit(EXIT_FAILED)
