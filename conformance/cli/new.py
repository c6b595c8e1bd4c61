"""`ddp-conformance new`: writes a package to start from."""

from pathlib import Path

import click

from conformance.cli.starters.starter import KINDS, Starter, StarterError
from conformance.report.console import say


@click.command("new")
@click.argument("kind", type=click.Choice(KINDS))
@click.argument("name")
def command(kind: str, name: str) -> None:
    """Write a package for a c10d backend, for a device or for a DDP (a subject) into the new folder NAME.

    \b
    ddp-conformance new backend acme
    ddp-conformance new device volta
    ddp-conformance new subject swift

    The package passes `ddp-conformance smoke` unchanged; its comments say where your code goes. The command overwrites
    no file.
    """
    starter = Starter(kind, name)
    try:
        written = starter.write(Path())
    except OSError as error:
        raise StarterError(f"cannot write {error.filename}: {error.strerror}") from error
    for path in written:
        say(f"wrote {path}")
    option, module = ("--ddp", "ddp:SUBJECT") if kind == "subject" else ("--backend", "adapter:BACKEND")
    say(f"Next: cd {name} && ddp-conformance smoke {option} {starter.package}.{module}")
