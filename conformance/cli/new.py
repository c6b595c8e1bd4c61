"""`ddp-conformance new`: a package to start from."""

from __future__ import annotations

from pathlib import Path

import click

from conformance.starters.starter import KINDS, Starter


@click.command("new", short_help="Write a commented package for a backend or a DDP of yours.")
@click.argument("kind", type=click.Choice(KINDS))
@click.argument("name")
def command(kind: str, name: str) -> None:
    """Write a package called NAME into the current folder, for a c10d backend or for a DDP (a subject).

    \b
    ddp-conformance new backend acme
    ddp-conformance new subject swift

    It passes `ddp-conformance smoke` as it is; its comments say where yours goes. Nothing is overwritten.
    """
    starter = Starter(kind, name)
    for path in starter.write(Path()):
        click.echo(f"wrote {path}")
    option, module = ("--backend", "adapter:BACKEND") if kind == "backend" else ("--ddp", "ddp:SUBJECT")
    click.echo(f"Next: cd {name} && ddp-conformance smoke {option} {starter.package}.{module}")
