"""`python -m workshop gpu`: the page about the runs of `ci/gpu.sh`."""

from __future__ import annotations

import datetime
from pathlib import Path

import click

from conformance.cli.options import NamedPath
from conformance.report.read import read_report
from workshop.gpu import gpu_page


@click.command("gpu", short_help="Make the page about the runs of ci/gpu.sh.")
@click.argument("reports", type=NamedPath(), nargs=-1, required=True)
@click.option("--bench", type=NamedPath(exists=True), required=True, help="What `bench` printed.")
@click.option("--out", "-o", type=NamedPath(), required=True, metavar="FILE", help="Write to FILE.")
def command(reports: tuple[Path, ...], bench: Path, out: Path) -> None:
    """Make the page in Markdown about the runs of `ci/gpu.sh`, whose REPORTS there are."""
    today = datetime.date.today().isoformat()
    out.write_text(gpu_page([read_report(report) for report in reports], bench.read_text(), today), encoding="utf-8")
