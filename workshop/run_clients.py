"""`python -m workshop clients`: trainings as people write them, on torch's DDP and on ours."""

from __future__ import annotations

import datetime
from pathlib import Path

import click

import workshop
from conformance.cli import EXIT_FAILED
from conformance.cli.options import NamedPath


@click.command("clients", short_help="Run real training scripts on torch's DDP and on ddp_impl, and compare.")
@click.argument("names", nargs=-1)
@click.option(
    "--into",
    type=NamedPath(dir_okay=False),
    metavar="FILE",
    help="Renew what this page says of the clients that run, build/clients.md for example.",
)
def command(names: tuple[str, ...], into: Path | None) -> None:
    """Run the scripts of fixtures/scripts/clients under torchrun, each with torch's DDP and with ddp_impl.

    NAMES are scripts without their ending; all, if none is given. Their libraries must be installed here: `bash
    ci/clients.sh` makes an environment that has them.

    \b
    python -m workshop clients
    python -m workshop clients gan zero --into build/clients.md

    Exits with 1 when a script's facts differ, other than by a documented fault of torch's DDP.
    """
    from conformance.run.environment import package_version
    from workshop.clients.client import load_clients
    from workshop.clients.page import renewed
    from workshop.clients.row import run
    from workshop.clients.torch_fault import load_torch_faults

    folder = workshop.ROOT / "fixtures" / "scripts" / "clients"
    clients, faults = load_clients(folder, names), load_torch_faults(folder)
    for client in clients:
        _ = client.versions  # before minutes of work: is everything installed?
    versions = f"ddp-conformance {package_version('ddp-conformance')}, torch {package_version('torch')}"
    made = f"Last run on {datetime.datetime.now(datetime.UTC).date()} with {versions}."
    rows = []
    for number, client in enumerate(clients, 1):
        row = run(client, folder, faults.get(client.name))
        rows.append(row)
        click.echo(f"{number:>3}/{len(clients)}  {row.torch_s:4.0f} s  {client.name}", err=True)
        for way, judgement in row.judgements.items():
            click.echo(f"{client.name}, {way}: {judgement.result.value} {judgement.evidence}".rstrip())
        if into is not None:  # after each, so that a run that breaks off leaves what it found
            before = into.read_text(encoding="utf-8") if into.is_file() else ""
            into.write_text(renewed(before, [row], load_clients(folder), made), encoding="utf-8")
    bad = [row.client.name for row in rows if not row.is_good]
    click.echo(f"{len(rows) - len(bad)} of {len(rows)} clients are as they should be.")
    if bad:
        click.get_current_context().exit(EXIT_FAILED)
