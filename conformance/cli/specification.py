"""`ddp-conformance specification`: the requirements as pages."""

from __future__ import annotations

from pathlib import Path

import click

from conformance.cli.options import NamedPath


@click.command("specification", short_help="Write the requirements as Markdown pages.")
@click.option(
    "--out",
    "-o",
    type=NamedPath(file_okay=False),
    default=Path("docs/specification"),
    show_default=True,
    metavar="FOLDER",
    help="Where the pages go; made if it is not there.",
)
def command(out: Path) -> None:
    """Write one page per chapter, and a README that leads to them."""
    from conformance.report.specification import specification_pages
    from conformance.spec.catalogue import load_catalogue
    from conformance.suite import load_scenarios

    pages = specification_pages(load_catalogue(), load_scenarios())
    out.mkdir(parents=True, exist_ok=True)
    for name, text in pages.items():
        (out / name).write_text(text)
    click.echo(f"{len(pages)} pages in {out}")
