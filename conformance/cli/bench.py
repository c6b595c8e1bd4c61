"""`ddp-conformance bench`: how fast a DDP is beside torch's own; `conformance.bench` does the work."""

from __future__ import annotations

import click


@click.command(
    "bench",
    short_help="Compare step times with torch's DDP.",
    add_help_option=False,
    context_settings={"ignore_unknown_options": True},
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(arguments: tuple[str, ...]) -> None:
    """Compare the DDP's step time with that of torch's own DDP, on the same ranks in one run."""
    from conformance import bench

    bench.main(list(arguments))
